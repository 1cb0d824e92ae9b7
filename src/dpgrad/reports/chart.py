"""A line chart as SVG that can stand inside a page: no file, font or script from elsewhere."""

import html
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Chart", "Line"]

# Okabe and Ito's palette, which colour-blind readers tell apart, without black and with its lightest two darkened: all
# can be seen on white and on dark paper. Dashes tell lines apart that lie on one another.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A87900", "#3A96D0")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))

# what the chart is drawn with, and what it takes from the page instead
_INK, _GRID = "#010203", "#dddcdb"
_FROM_THE_PAGE = {_INK: "currentColor", _GRID: "var(--line, #ddd)"}

_LONGEST = 32  # characters in the legend

Line = tuple[Sequence[float], Sequence[float]]


def _short(name: str) -> str:
    """The end of a name, such as a path, that would not fit into the legend."""
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


@dataclass(frozen=True)
class Chart:
    """Lines over steps, each with its name; ``level`` is a horizontal line to compare with, and its name."""

    title: str
    lines: Mapping[str, Line]
    level: tuple[str, float] | None = None

    def svg(self) -> str:
        """The chart; the same lines give the same text.

        >>> Chart("accuracy", {"dpsgd": ([1, 2], [0.5, 0.9])}).svg()[:4]
        '<svg'
        """
        import matplotlib
        from matplotlib.figure import Figure

        settings = {
            **matplotlib.rcParamsDefault, "svg.hashsalt": self.title, "svg.fonttype": "none", "font.size": 10,
            "font.family": "sans-serif", "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK,
            "xtick.color": _INK, "ytick.color": _INK,
        }  # fmt: skip
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=(4.9, 3.1), layout="constrained")
            axes = figure.add_subplot()
            styles = zip(itertools.cycle(_COLOURS), itertools.cycle(_DASHES), strict=False)
            for (name, (steps, values)), (colour, dash) in zip(self.lines.items(), styles, strict=False):
                marker = "o" if len(steps) == 1 else None
                axes.plot(steps, values, label=_short(name), color=colour, linestyle=dash, linewidth=1.8, marker=marker)
            if self.level is not None:
                axes.axhline(self.level[1], label=self.level[0], color="#777777", linewidth=1.2, linestyle=(0, (2, 2)))
            axes.set_title(self.title, loc="left", fontsize=11)
            axes.set_xlabel("steps")
            axes.grid(True, color=_GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            if len(self.lines) > 1 or self.level is not None:
                axes.legend(frameon=False, fontsize=9)
            buffer = io.StringIO()
            empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
            figure.savefig(buffer, format="svg", metadata=empty, transparent=True)
        drawn = buffer.getvalue()
        for colour, taken in _FROM_THE_PAGE.items():
            drawn = drawn.replace(f": {colour}", f": {taken}")
        named = f'<svg role="img" aria-label="{html.escape(self.title)} over steps"'
        return named + drawn[drawn.index("<svg") + 4 :]
