"""A line chart as SVG that can stand inside a page: no file, font or script from elsewhere."""

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Chart", "Line"]

# Okabe and Ito's palette, which colour-blind readers tell apart; dashes tell lines apart that lie on one another
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))

Line = tuple[Sequence[float], Sequence[float]]


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
            "font.family": "sans-serif",
        }  # fmt: skip
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=(5.6, 3.3), layout="constrained")
            axes = figure.add_subplot()
            styles = itertools.cycle(zip(_COLOURS, itertools.cycle(_DASHES), strict=False))
            for (name, (steps, values)), (colour, dash) in zip(self.lines.items(), styles, strict=False):
                marker = "o" if len(steps) == 1 else None
                axes.plot(steps, values, label=name, color=colour, linestyle=dash, linewidth=1.8, marker=marker)
            if self.level is not None:
                axes.axhline(self.level[1], label=self.level[0], color="#777777", linewidth=1.2, linestyle=(0, (2, 2)))
            axes.set_title(self.title, loc="left", fontsize=11)
            axes.set_xlabel("steps")
            axes.grid(True, color="#DDDDDD", linewidth=0.8)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            if len(self.lines) > 1 or self.level is not None:
                axes.legend(frameon=False, fontsize=8)
            buffer = io.StringIO()
            empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
            figure.savefig(buffer, format="svg", metadata=empty)
        drawn = buffer.getvalue()
        return drawn[drawn.index("<svg") :]
