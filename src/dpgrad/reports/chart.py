"""A line chart as SVG that can stand inside a page: no file, font or script from elsewhere."""

import html
import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from dpgrad.accounting.guarantee import up
from dpgrad.reports.interactive import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Chart", "ChartLine", "draw_tradeoff", "file_style", "finish", "inlined", "page_colours", "tradeoff",
]  # fmt: skip

# Okabe and Ito's palette, which colour-blind readers tell apart, without black and with its lightest two darkened: all
# can be seen on white and on dark paper. Dashes tell lines apart that lie on one another.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A87900", "#3A96D0")
_DASHES = ("-", "--", ":", "-.")

# what a chart is drawn with, and what it takes from the page instead
_INK, _GRID = "#010203", "#dddcdb"
_FROM_THE_PAGE = {
    _INK: "currentColor", _GRID: "var(--line, #ddd)", "#000000": "currentColor", "#dddddd": "var(--line, #ddd)",
    "#e69f00": "#a87900", "#56b4e9": "#3a96d0",
}  # fmt: skip

_LONGEST = 32  # characters in the legend
_ERRORS = "false negatives of any attack"
_MARKED = (0.01, 0.05)  # false-positive rates whose power is written into the picture

ChartLine = tuple[Sequence[float], Sequence[float]]


def _short(name: str) -> str:
    """The end of a name, such as a path, that would not fit into the legend."""
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


@contextmanager
def page_colours(salt: str) -> Iterator[None]:
    """Within the block matplotlib draws for `inlined`; figures of different ``salt`` can stand in one page."""
    import matplotlib

    settings = {
        **matplotlib.rcParamsDefault, "svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 10,
        "font.family": "sans-serif", "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK,
        "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def inlined(figure: "Figure", label: str) -> str:
    """The figure as an SVG element that takes its ink from the page, light or dark; ``label`` is read aloud."""
    buffer = io.StringIO()
    empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=empty, transparent=True)
    drawn = buffer.getvalue()
    for colour, taken in _FROM_THE_PAGE.items():
        drawn = drawn.replace(f": {colour}", f": {taken}")
    return f'<svg role="img" aria-label="{html.escape(label)}"' + drawn[drawn.index("<svg") + 4 :]


@dataclass(frozen=True)
class Chart:
    """Lines over steps, each with its name; ``level`` is a horizontal line to compare with, and its name.

    ``numbers`` are those of the runs, by which a page hides what a reader does not tick.

    >>> Chart("accuracy", {"dpsgd": ([1, 2], [0.5, 0.9])}).html()[:4]
    '<div'
    """

    title: str
    lines: Mapping[str, ChartLine]
    level: tuple[str, float] | None = None
    across: str = "steps"
    numbers: Mapping[str, int] = field(default_factory=dict)

    def html(self) -> str:
        """The chart for a page, interactive where scripts run (`reports.interactive`)."""
        return plots(*self._drawn(), self._spoken)

    @property
    def _spoken(self) -> str:
        return f"{self.title} over {self.across}"

    def _drawn(self) -> "tuple[Figure, str]":
        return _drawn(self.title, self._spoken, self._draw)

    def _draw(self, axes: Any) -> None:
        styles = zip(itertools.cycle(_COLOURS), itertools.cycle(_DASHES), strict=False)
        for (name, (steps, values)), (colour, dash) in zip(self.lines.items(), styles, strict=False):
            marker = "o" if len(steps) == 1 else None
            style = {"color": colour, "linestyle": dash, "linewidth": 1.8, "marker": marker}
            axes.plot(steps, values, label=_short(name), gid=self._id(name, "line"), **style)
        if self.level is not None:
            axes.axhline(self.level[1], label=self.level[0], color="#777777", linewidth=1.2, linestyle="--")
        axes.set_xlabel(self.across)
        if len(self.lines) > 1 or self.level is not None:
            legend = axes.legend(frameon=False, fontsize=9)
            for name, line, text in zip(self.lines, legend.get_lines(), legend.get_texts(), strict=False):
                line.set_gid(self._id(name, "key"))
                text.set_gid(self._id(name, "name"))

    def _id(self, name: str, part: str) -> str | None:
        """The id of a part of a run's line, the same for nothing else of a page."""
        words = re.sub(r"\W+", "-", self.title)
        return f"run-{self.numbers[name]}-{part}-{words}" if name in self.numbers else None

    def table(self) -> str:
        """The numbers behind the lines, as rows of a table.

        >>> Chart("x", {"a": ([1], [0.5])}).table().partition("</tr>")[2]
        '<tr><td>a</td><td>1</td><td>0.5</td></tr></table>'
        """
        rows = [f"<tr><th>run</th><th>{html.escape(self.across)}</th><th>{html.escape(self.title)}</th></tr>"]
        for name, (across, values) in self.lines.items():
            hidden = f' class="run-{self.numbers[name]}"' if name in self.numbers else ""
            for x, y in zip(across, values, strict=True):
                rows.append(f"<tr{hidden}><td>{html.escape(name)}</td><td>{x:.6g}</td><td>{y:.6g}</td></tr>")
        return f'<table class="data">{"".join(rows)}</table>'


def tradeoff(attacks: Mapping[str, Any]) -> str:
    """The trade-off curve of the figures of `accounting.curves.figures` for a page, with its points at some rates.

    >>> curve = [{"false_positives": x, "false_negatives": 1 - x} for x in (0.0, 1.0)]
    >>> tradeoff({"tradeoff": curve, "power": [], "membership_advantage": 0.0})[:4]
    '<div'
    """
    told = ", ".join(f"{100 * one['false_positives']:g} %: {up(100 * one['power'])} %" for one in attacks["power"])
    advantage = f"advantage at most {up(attacks['membership_advantage'])}"
    spoken = f"Least false negatives over false positives of any attack; {advantage}; largest power at {told}"
    return plots(*_drawn(_ERRORS, spoken, partial(draw_tradeoff, attacks=attacks)), spoken)


def draw_tradeoff(axes: Any, attacks: Mapping[str, Any]) -> None:
    """Draw the trade-off curve on the axes of a figure."""
    curve = attacks["tradeoff"]
    axes.plot([0, 1], [1, 0], color="#777777", linewidth=1.2, linestyle="--", label="guessing without looking")
    at, errors = ([point[name] for point in curve] for name in ("false_positives", "false_negatives"))
    axes.plot(at, errors, color=_COLOURS[0], linewidth=1.8, label="the best attack")
    axes.fill_between(at, 0, errors, color=_COLOURS[0], alpha=0.08, linewidth=0)
    marked, below = [one for one in attacks["power"] if one["false_positives"] in _MARKED], 1.0
    for left, one in zip(range(len(marked), 0, -1), marked, strict=True):
        place = one["false_positives"], 1 - one["power"]
        axes.plot(*place, marker="o", markersize=5, color=_COLOURS[1])
        height = min(max(place[1] + 0.02, 0.1 * left), below)  # one label under the other, and above the axis
        below = height - 0.1
        axes.annotate(
            f"{100 * place[0]:g} % false positives: ≤ {up(100 * one['power'])} % found", place,
            xytext=(0.24, height), fontsize=9, va="top", arrowprops={"arrowstyle": "-", "linewidth": 0.6},
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("false positives")
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _drawn(title: str, spoken: str, draw: Callable[[Any], None]) -> "tuple[Figure, str]":
    """A chart in the colours of the page, and as SVG; ``spoken`` is read out to those who do not see it."""
    from matplotlib.figure import Figure

    with page_colours(title):
        figure = Figure(figsize=(4.9, 3.1), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        finish(axes, title, _GRID)
        return figure, inlined(figure, spoken)


def finish(axes: Any, title: str, grid: str = "#DDDDDD") -> None:
    """Write the title of a panel, and draw its grid behind the lines and no frame at the top and on the right."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


@contextmanager
def file_style() -> Iterator[None]:
    """Within the block matplotlib draws for a file: the same figure gives the same bytes, whatever the user's style."""
    import matplotlib

    settings = {**matplotlib.rcParamsDefault, "svg.hashsalt": "dpgrad", "font.size": 10, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        yield
