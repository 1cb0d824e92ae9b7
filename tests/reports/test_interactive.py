"""Figures of matplotlib as Plotly charts: the same points, limits and names, or nothing where something is unknown."""

import math

import numpy as np
from matplotlib.figure import Figure

from dpgrad.reports.interactive import INK, panels, plots


def panel(draw: object) -> dict[str, object]:
    figure = Figure()
    draw(figure.add_subplot())  # type: ignore[operator]
    found = panels(figure)
    assert found is not None
    return found[0]


def test_a_line_keeps_its_points_and_style() -> None:
    def draw(axes):
        axes.plot([1, 2, 3], [0.5, math.nan, 0.9], "--s", color="#D55E00", label="a <b>", gid="run-7-line-x")
        axes.plot([1, 2, 3], [1, 2, 3], color="black", drawstyle="steps-post")
        axes.set(xlabel="steps", ylabel="ε", xlim=(0, 4), title="one & two")
        axes.legend()

    found = panel(draw)
    first, second = found["data"]
    assert (first["x"], first["y"]) == ([1, 2, 3], [0.5, None, 0.9])
    assert (first["name"], first["meta"], first["line"]["dash"]) == ("a &lt;b&gt;", 7, "dash")
    assert (first["mode"], first["marker"]["symbol"]) == ("lines+markers", "square")
    assert (second["line"]["color"], second["line"]["shape"], second["showlegend"]) == (INK, "hv", False)
    assert found["layout"]["xaxis"]["range"] == [0, 4]
    assert found["title"] == "one & two"
    assert found["layout"]["hovermode"] == "x unified"  # both lines have the same steps


def test_a_note_with_an_arrow_stays_on_one_line() -> None:
    def draw(axes):
        axes.plot([0, 1], [1, 0])
        axes.annotate("5 % false positives: ≤ 15.149 % found", (0.05, 0.8), (0.3, 0.9),
                      arrowprops={"arrowstyle": "-", "linewidth": 0.6})  # fmt: skip

    layout = panel(draw)["layout"]
    assert layout["hovermode"] == "x unified"  # one line alone
    assert "<br>" not in layout["annotations"][0]["text"]
    assert layout["annotations"][0]["arrowwidth"] == 0.6


def test_logarithms_named_ticks_and_levels() -> None:
    def draw(axes):
        axes.plot([1, 10], [2, 3])
        axes.axhline(2.5, color="#777777", label="NP")
        axes.axvline(4.0)
        axes.set_xscale("log")
        axes.set_xlim(1, 100)
        axes.set_yticks([2, 3], ["two", "a name that is much too long for a phone"])

    found = panel(draw)["layout"]
    assert (found["xaxis"]["type"], found["xaxis"]["range"]) == ("log", [0, 2])
    assert found["yaxis"]["tickvals"] == [2, 3]
    assert found["yaxis"]["ticktext"][1].count("<br>") == 2
    across, up = found["shapes"]
    assert (across["y0"], across["y1"], across["xref"], across["name"]) == (2.5, 2.5, "x domain", "NP")
    assert (up["x0"], up["yref"]) == (4.0, "y domain")


def test_symlog_leaves_out_nothing_but_zero() -> None:
    def draw(axes):
        axes.plot([0, 10, 1000], [1, 2, 3])
        axes.set_xscale("symlog", linthresh=100)
        axes.set_xlim(0, 1000)

    found = panel(draw)["layout"]["xaxis"]
    assert found["range"] == [1, 3]  # powers of ten, from the least positive point


def test_error_bars_points_steps_and_areas() -> None:
    def draw(axes):
        axes.errorbar([0, 1], [5.0, 6.0], yerr=[0.5, 0.25], fmt="o", capsize=4, label="ours")
        axes.errorbar(2, math.nan, yerr=0.0, fmt="o")
        axes.scatter([0, 1], [5.5, 6.5], marker="_", label="paper")
        axes.stairs([1, 2], [0, 1, 2])
        axes.fill_between([0, 1], 0, [1, 2], alpha=0.1)
        axes.vlines([1, 2], 0, [1, 2])

    found = {tuple(trace["y"][:2]): trace for trace in panel(draw)["data"]}
    assert np.allclose(found[5.0, 6.0]["error_y"]["array"], [0.5, 0.25])
    assert found[5.5, 6.5]["marker"]["symbol"] == "line-ew-open"
    assert found[1, 2]["line"]["shape"] == "hv"
    assert len(found) == 6


def test_unknown_artists_leave_the_figure_as_it_is() -> None:
    figure = Figure()
    figure.add_subplot().imshow(np.zeros((2, 2)))
    assert panels(figure) is None
    assert plots(figure, "<svg></svg>", "a picture") == '<div class="chart"><svg></svg></div>'
