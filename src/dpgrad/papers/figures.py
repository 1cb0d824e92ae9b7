"""Figures of experiments, as SVG and PNG: the same bytes for the same trials.

Where matplotlib is not installed, trials and tables are made all the same, and running the command again on a machine
that has it draws the figure.
"""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgrad import _files
from dpgrad.papers.experiment import Experiment, Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "ENDINGS", "MARKERS", "axes_of", "compared", "curves", "drawn", "finish", "write"]

ENDINGS = (".svg", ".png")
# Okabe and Ito's palette, which colour-blind readers tell apart; markers tell apart lines that lie on one another
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
_NAMED = 40  # arms of a table that are named in its figure
MARKERS = ("o", "s", "^", "D", "v", "x", "+", "<")


def write(experiment: Experiment, outcomes: Outcomes, stem: Path) -> list[Path]:
    """Draw the figure of an experiment to STEM.svg and STEM.png; nothing where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
    except ImportError:
        return []
    figure = drawn(experiment, outcomes)
    paths = [stem.with_name(stem.name + ending) for ending in ENDINGS]
    for path, metadata in zip(paths, ({"Date": None}, {"Software": None}), strict=True):
        into = io.BytesIO()
        with rc_context({"svg.hashsalt": experiment.name, "svg.fonttype": "none"}):
            figure.savefig(into, format=path.suffix[1:], metadata=metadata, dpi=120)
        _files.replace(path, into.getvalue())
    return paths


def drawn(experiment: Experiment, outcomes: Outcomes) -> "Figure":
    """The figure of an experiment, not yet written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    if experiment.draw is None:
        compared(experiment, outcomes, figure)
    else:
        experiment.draw(outcomes, figure)
    return figure


def compared(experiment: Experiment, outcomes: Outcomes, figure: "Figure") -> None:
    """The figure of a table: one point per arm with two standard errors, and the paper's value next to it."""
    axes = figure.add_subplot()
    arms = outcomes.arms
    if len(arms) > _NAMED:  # a grid: their names would not fit
        axes.plot([outcomes.mean(arm, experiment.figure) for arm in arms], ".", color=COLOURS[0])
        finish(axes, "setting, in the order of the table", experiment.figure, f"{experiment.paper}, {experiment.item}")
        return
    errors = [outcomes.error(arm, experiment.figure) for arm in arms]
    ours = "ours" if all(map(math.isnan, errors)) else "ours, with two standard errors"
    for place, (arm, error) in enumerate(zip(arms, errors, strict=True)):
        whisker = None if math.isnan(error) else 2 * error  # one trial has none
        label = ours if place == 0 else None
        axes.errorbar(
            place,
            outcomes.mean(arm, experiment.figure),
            yerr=whisker,
            fmt="o",
            color=COLOURS[0],
            capsize=4,
            label=label,
        )
    printed = [(place, experiment.printed[arm]) for place, arm in enumerate(arms) if arm in experiment.printed]
    if printed:
        across, up = zip(*printed, strict=True)
        axes.scatter(across, up, marker="_", s=400, color=COLOURS[1], label="paper")
    axes.set_xticks(
        range(len(arms)), arms, rotation=0 if len(arms) < 6 else 45, ha="center" if len(arms) < 6 else "right"
    )
    finish(axes, "", experiment.figure.replace("_", " "), f"{experiment.paper}, {experiment.item}")


def curves(
    axes: "Axes", outcomes: Outcomes, x: str, y: str, arms: Iterable[str] | None = None, markers: bool = True
) -> None:
    """One line per arm: the mean over trials of the list ``y`` against the list ``x``."""
    for place, arm in enumerate(outcomes.arms if arms is None else arms):
        across, up = outcomes.curve(arm, x), outcomes.curve(arm, y)
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "label": arm}
        if markers:
            style |= {"marker": MARKERS[place % len(MARKERS)], "markersize": 4, "markevery": max(1, len(up) // 12)}
        axes.plot(across[: len(up)], up[: len(across)], **style)


def axes_of(figure: "Figure", panels: int, columns: int = 3) -> "list[Axes]":
    """So many panels in rows of ``columns``, the figure grown to hold them."""
    wide = min(panels, columns)
    tall = -(-panels // columns)
    figure.set_size_inches(max(7.2, 4.0 * wide), max(4.6 if panels == 1 else 3.4, 3.4 * tall))
    return [figure.add_subplot(tall, wide, place + 1) for place in range(panels)]


def finish(axes: "Axes", across: str, up: str, title: str, legend: bool = True) -> None:
    """Name the axes of a panel, and show the grid and the legend."""
    axes.set(xlabel=across, ylabel=up)
    axes.set_title(title, fontsize=10)
    axes.grid(True, color="#DDDDDD")
    axes.set_axisbelow(True)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
