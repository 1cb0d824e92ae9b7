"""ε against steps, one line for each accountant that can price the run."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpgrad.accounting import ACCOUNTANTS, account, pld
from dpgrad.accounting.events import Event, Relation
from dpgrad.accounting.guarantee import up
from dpgrad.accounting.inexact import parted
from dpgrad.errors import OptionError
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.reports import chart, compare
from dpgrad.reports.compare import Figure

__all__ = ["counts", "draw", "lines", "write"]

_POINTS, _FEWER = 16, 12  # the fewer where steps differ and each point takes a while
_DECADES = 3
_COARSE = 100  # noise rounded down by less than 1 %: below the width of a line

# Okabe and Ito's palette, which colour-blind readers tell apart; markers tell lines apart that lie on one another
_STYLES = {
    "pld": ("#000000", "o"),
    "rdp": ("#0072B2", "s"),
    "moments": ("#D55E00", "^"),
    "exact": ("#009E73", "x"),
    "strong": ("#CC79A7", "D"),
    "rdp-classic": ("#56B4E9", "v"),
    "moments-closed": ("#E69F00", "+"),
    "moments-asymptotic": ("#7F7F7F", "<"),
    "strong-printed": ("#B8860B", ">"),
}
_ANY = ("#555555", ".")


def counts(steps: int, span: int = 1, points: int = _POINTS) -> list[int]:
    """Numbers of steps, spread over three decades, that end at ``steps``; whole epochs of ``span`` steps before that.

    >>> counts(8)
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    epochs = -(-steps // span)
    spread = np.geomspace(max(1.0, epochs / 10**_DECADES), epochs, points)
    return sorted({min(steps, span * round(float(n))) for n in spread} | {steps})


def lines(run: Mechanism, delta: float, known: Mapping[str, Figure]) -> dict[str, tuple[list[int], list[float], bool]]:
    """For each accountant that prices the run: steps, ε there, and whether it is a guarantee.

    The last point is certified, and taken from ``known`` where it is there; the others are for the eye.
    """
    event = run.event()
    several = compare.runs(event) > 1
    at = counts(run.steps, run.sampler.span, _FEWER if several else _POINTS)[:-1]
    before = [compare.coarse(run.with_steps(n).event(), _COARSE, most=_COARSE) for n in at]
    whole = compare.coarse(event)
    found = {}
    for name in ACCOUNTANTS:
        try:
            last = known.get(name) or compare.figure(whole, run.relation, name, delta)
            points = [(n, _quick(e, run.relation, name, delta)) for n, e in zip(at, before, strict=True)]
        except ValueError:
            continue
        points = [(n, e) for n, e in [*points, (run.steps, last.epsilon)] if 0 < e < math.inf]
        if points:
            found[name] = ([n for n, _ in points], [e for _, e in points], last.guarantee)
    return found


def _quick(event: Event, relation: Relation, accountant: str, delta: float) -> float:
    """ε to a thousandth; NaN where the accountant fails at this point alone."""
    try:
        if accountant == pld.NAME and not parted(event)[1]:
            return pld.account(event, relation, precision=1e-3).epsilon(delta)
        return account(event, relation, accountant).epsilon(delta)
    except (ValueError, ArithmeticError):
        return math.nan


def draw(path: str, run: Mechanism, delta: float, known: Mapping[str, Figure]) -> None:
    """Write the plot; the same run gives the same bytes. ``known`` are figures of the whole run."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    found = lines(run, delta, known)
    if not found:
        raise OptionError("--plot has nothing to draw: no accountant gives a finite epsilon above 0")
    with chart.file_style():
        figure = Canvas(figsize=(8.2, 4.7), layout="constrained")
        axes = figure.add_subplot()
        for name, (steps, epsilons, guarantee) in sorted(found.items(), key=lambda item: -item[1][1][-1]):
            colour, marker = _STYLES.get(name, _ANY)
            axes.plot(
                steps, epsilons,
                color=colour, marker=marker, markersize=5, markerfacecolor="none",
                linewidth=2.4 if name == "pld" else 1.4,
                linestyle="-" if guarantee else (0, (4, 2.5)),
                zorder=3 if name == "pld" else 2,
                label=f"{name}  {up(epsilons[-1])}",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-4 < value < 1e7 else f"{value:.0e}")
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            short = high / low < 50
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if short else (1.0,)))
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("steps")
        axes.set_ylabel(f"ε at δ = {delta:g}, {run.relation} neighbours")
        chart.finish(axes, _title(run))
        history = "" if all(guarantee for _, _, guarantee in found.values()) else "\n(dashed: not a guarantee)"
        figure.legend(
            loc="outside right upper", frameon=False, title=f"accountant, ε at {run.steps:,} steps{history}",
            fontsize=9, title_fontsize=9, alignment="left",
        )  # fmt: skip
        write(figure, path)


def write(figure: Any, path: str, option: str = "--plot") -> None:
    """Write a figure of matplotlib, without the date and the program that made it: the same figure is the same file."""
    buffer = io.BytesIO()
    kind = Path(path).suffix[1:].lower()
    empty = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=150, metadata=empty)
    try:
        Path(path).write_bytes(buffer.getvalue())
    except OSError as error:
        raise OptionError(f"{option} cannot write {path}: {error.strerror}") from None


def _title(run: Mechanism) -> str:
    match run.sampler:
        case sampling.Poisson():
            drawn = f"Poisson sampling at rate {run.sampler.sampling_rate_at(0):.4g}"
        case sampling.FixedSize(rows, size):
            drawn = f"{size:,} of {rows:,} rows without replacement"
        case sampling.Shuffle():
            drawn = f"{run.sampler.span:,} shuffled batches an epoch"
        case _:
            drawn = "full batch"
    shrinking = " at first,\nclip bound shrinking to one half under noise of the same size" if run.hold_noise else ""
    return f"{drawn}, noise multiplier {run.noise_multiplier:.4g}{shrinking}"
