"""Interactive charts: matplotlib figures as Plotly charts, in a page that needs no network.

Plotly is used because it is maintained, brings hover, zoom and touch, and its package ships it as one file. A page
holds that file once, compressed to 2 MB. What matplotlib drew stays in the page for printing, for browsers that run no
scripts, and for machines where Plotly is not installed.
"""

import base64
import functools
import gzip
import html
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "panels", "plots", "script"]

INK = "ink"  # a colour that the page gives: dark on light paper, light on dark
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
_FOR_PAPER_OF_BOTH_SCHEMES = {
    "#000000": INK, "#010203": INK, "#e69f00": "#a87900", "#56b4e9": "#3a96d0", "#bbbbbb": "#888888",
}  # fmt: skip
_MARKERS = {
    "o": "circle", ".": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down",
    "<": "triangle-left", "x": "x-thin-open", "+": "cross-thin-open", "_": "line-ew-open",
}  # fmt: skip
_STEPS = {"steps": "vh", "steps-pre": "vh", "steps-post": "hv", "steps-mid": "hvh"}
_MOST_MARKERS = 12
_LABEL, _TICK, _NOTE = 34, 18, 40  # characters in a line
_HOLDERS = '<div class="plots">'
_RUN = re.compile(r"run-(\d+)-line")  # the id of a line that the page hides unless its run is ticked

# Draws every chart, again when the scheme changes or a run is ticked. One chart after another, which leaves the
# page readable meanwhile; whatever fails keeps the chart of matplotlib.
_DRAW = """
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
  const code = document.createElement("script");
  code.textContent = await new Response(
    new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(code);
  const told = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = chart => {
    const panels = JSON.parse(chart.querySelector("script").textContent.replaceAll('"ink"', `"${told("--ink")}"`));
    const holders = chart.querySelectorAll(".plot");
    chart.classList.add("live");
    panels.forEach(({data, layout}, place) => {
      const ticked = trace => document.getElementById(`tick-${trace.meta}`)?.checked ?? true;
      const shown = data.filter(ticked), named = shown.filter(trace => trace.showlegend).length;
      const axis = {gridcolor: told("--line"), zeroline: false, automargin: true,
                    hoverformat: ".6~g", exponentformat: "none", separatethousands: true};
      Plotly.react(holders[place], shown, {
        ...layout, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
        font: {color: told("--ink"), family: "system-ui, sans-serif", size: 12},
        hoverdistance: -1,  // the nearest point, however far
        hoverlabel: {bgcolor: told("--paper"), font: {color: told("--ink")}, namelength: -1},
        xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis},
        height: 280 + 20 * named, margin: {l: 8, r: 12, t: 8, b: 8}, dragmode: matchMedia("(pointer: coarse)").matches
          ? false : "zoom", legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0},
      }, {responsive: true, displayModeBar: false});
    });
  };
  const drawAll = async () => {
    delete document.documentElement.dataset.charts;
    for (const chart of document.querySelectorAll(".chart:has(> script)")) {
      draw(chart);
      await new Promise(later => setTimeout(later));
    }
    document.documentElement.dataset.charts = "drawn";
  };
  await drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("change", event => event.target.id?.startsWith("tick-") && drawAll());
})().catch(error => { document.documentElement.dataset.charts = "static"; console.error(error); });
"""


@functools.cache
def _packed() -> str:
    """Plotly's one file, compressed; empty where it is not installed."""
    try:
        code = (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        return ""
    return base64.b64encode(gzip.compress(code, 6, mtime=0)).decode()


def script(body: str) -> str:
    """What a page needs once, at its end, if there are charts for Plotly in its body.

    >>> script("<p>no chart</p>")
    ''
    """
    if _HOLDERS not in body:
        return ""
    return f'<script type="text/plain" id="plotly">{_packed()}</script>\n<script>{_DRAW}</script>\n'


def plots(figure: "Figure", drawn: str, label: str) -> str:
    """The chart ``drawn`` by matplotlib, and its panels for Plotly where it can show all that is in them."""
    found = panels(figure) if _packed() else None
    if found is None:
        return f'<div class="chart">{drawn}</div>'
    spoken = html.escape(label)
    holders = "".join(
        f'<div>{_heading(panel)}<div class="plot" role="img" aria-label="{spoken}"></div></div>' for panel in found
    )
    told = [{name: panel[name] for name in ("data", "layout")} for panel in found]
    safe = json.dumps(told, allow_nan=False).replace("<", "\\u003c")
    return f'<div class="chart">{drawn}{_HOLDERS}{holders}</div><script type="application/json">{safe}</script></div>'


def _heading(panel: Mapping[str, Any]) -> str:
    return f'<p class="panel">{html.escape(panel["title"])}</p>' if panel["title"] else ""


def panels(figure: "Figure") -> list[dict[str, Any]] | None:
    """The axes of a figure as Plotly's ``data`` and ``layout``, and a title; None where one holds something else.

    >>> from matplotlib.figure import Figure
    >>> figure = Figure()
    >>> _ = figure.add_subplot().plot([1, 2], [0.5, 0.9], label="dpsgd", color="#0072B2")
    >>> panels(figure)[0]["data"][0]["name"], panels(figure)[0]["data"][0]["y"]
    ('dpsgd', [0.5, 0.9])
    """
    found = [_panel(axes) for axes in figure.axes]
    whole = [panel for panel in found if panel is not None]
    return whole if len(whole) == len(found) else None


def _panel(axes: "Axes") -> dict[str, Any] | None:
    """One panel; None where it holds an artist that is not translated."""
    taken, traces = _error_bars(axes)
    shapes: list[dict[str, Any]] = []
    for artist in axes.get_children():
        if artist in taken or artist in _frame(axes):
            continue
        found = _translated(artist, axes)
        if found is None:
            return None
        (shapes if found["type"] == "line" else traces).append(found)
    alike = len({tuple(trace["x"]) for trace in traces if "lines" in trace["mode"]}) == 1 and len(traces) < 9
    named = axes.get_legend() is not None
    for entry in (*traces, *shapes):
        entry["showlegend"] = named and bool(entry["name"])
    layout: dict[str, Any] = {
        "xaxis": _axis(axes, "x", traces), "yaxis": _axis(axes, "y", traces), "shapes": shapes,
        "annotations": [_annotation(text, axes) for text in axes.texts if text.get_visible()],
        "hovermode": "x unified" if alike else "closest", "showlegend": named,
    }  # fmt: skip
    if axes.get_aspect() == 1:
        layout["yaxis"]["scaleanchor"] = "x"
    title = axes.get_title() or axes.get_title("left") or axes.get_title("right")
    return {"title": title, "data": traces, "layout": layout}


def _frame(axes: "Axes") -> "set[Artist]":
    """The artists of every panel: paper, borders, axes, titles, legend, and texts, which become annotations."""
    from matplotlib.text import Text

    legend, texts = axes.get_legend(), (artist for artist in axes.get_children() if isinstance(artist, Text))
    return {axes.patch, *axes.spines.values(), axes.xaxis, axes.yaxis, *texts, *([legend] if legend else [])}


def _error_bars(axes: "Axes") -> "tuple[set[Artist], list[dict[str, Any]]]":
    """The parts of error bars, and the traces that replace them."""
    from matplotlib.container import ErrorbarContainer

    taken: set[Artist] = set()
    traces = []
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer):
            line, caps, bars = container.lines
            taken |= {line, *caps, *bars}
            trace = _line(line) | {"name": _name(container.get_label())}
            ends = [segment for bar in bars for segment in bar.get_segments()]  # empty where the mean is missing
            lengths = [float(abs(end[-1][1] - end[0][1]) / 2) if len(end) else 0.0 for end in ends]
            trace["error_y"] = {"type": "data", "array": lengths, "color": trace["marker"]["color"]}
            traces.append(trace)
    return taken, traces


def _translated(artist: Any, axes: "Axes") -> dict[str, Any] | None:
    """A line, points, steps or a filled area as a trace, a level as a shape, and None for anything else."""
    from matplotlib.collections import LineCollection, PathCollection, PolyCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import StepPatch

    match artist:
        case Line2D() if artist.get_transform() == axes.transData:
            return _line(artist)
        case Line2D() if artist.get_transform() == axes.get_yaxis_transform(which="grid"):
            return _level(artist, "x", "y")
        case Line2D() if artist.get_transform() == axes.get_xaxis_transform(which="grid"):
            return _level(artist, "y", "x")
        case PathCollection():
            return _points(artist)
        case LineCollection():
            return _segments(artist)
        case PolyCollection():
            return _area(artist)
        case StepPatch():
            return _stairs(artist)
        case _:
            return None


def _points(points: Any) -> dict[str, Any]:
    flat = len(points.get_paths()[0].vertices) == 2  # a marker that is a stroke
    colour, symbol = _colour(points.get_edgecolor()[0]), _MARKERS["_" if flat else "o"]
    marker = {"color": colour, "size": float(points.get_sizes()[0] ** 0.5), "symbol": symbol}
    marker["line"] = {"width": 2 if flat else 0, "color": colour}
    return _trace(points, points.get_offsets(), "markers") | {"marker": marker}


def _segments(lines: Any) -> dict[str, Any]:
    """Lines of their own, such as whiskers, with gaps between them."""
    gap = (math.nan, math.nan)
    ends = [end for segment in lines.get_segments() for end in (*segment, gap)]
    style = {"color": _colour(lines.get_color()[0]), "width": float(lines.get_linewidth()[0])}
    return _trace(lines, ends, "lines") | {"line": style}


def _area(area: Any) -> dict[str, Any]:
    red, green, blue, alpha = (float(part) for part in area.get_facecolor()[0])
    filled = f"rgba({255 * red:.0f},{255 * green:.0f},{255 * blue:.0f},{alpha:g})"
    style = {"fill": "toself", "fillcolor": filled, "line": {"width": 0}, "hoverinfo": "skip"}
    return _trace(area, area.get_paths()[0].vertices, "lines") | style


def _stairs(stairs: Any) -> dict[str, Any]:
    """The outline of a histogram."""
    values, edges, _ = stairs.get_data()
    style = {"color": _colour(stairs.get_edgecolor()), "width": 1.8, "shape": "hv"}
    return _trace(stairs, zip(edges, [*values, values[-1]], strict=True), "lines") | {"line": style}


def _level(line: Any, along: str, across: str) -> dict[str, Any]:
    """A line from one side of a panel to the other, as a shape."""
    style = {name: known for name, known in _line(line)["line"].items() if name != "shape"}
    value = float((line.get_ydata() if across == "y" else line.get_xdata())[0])
    ends = {f"{along}ref": f"{along} domain", f"{along}0": 0, f"{along}1": 1, f"{across}0": value, f"{across}1": value}
    return {"type": "line", **ends, "name": _name(line.get_label()), "line": style}


def _line(line: Any) -> dict[str, Any]:
    """A line of matplotlib as a trace."""
    dash, marker = _DASHES.get(line.get_linestyle()), _MARKERS.get(line.get_marker())
    mode = "+".join(name for name, there in (("lines", dash), ("markers", marker)) if there)
    colour = _colour(line.get_color())
    style = {"color": colour, "width": line.get_linewidth(), "shape": _STEPS.get(line.get_drawstyle(), "linear")}
    trace = _trace(line, line.get_xydata(), mode or "lines") | {"line": style | ({"dash": dash} if dash else {})}
    trace["marker"] = {"color": colour, "symbol": marker or "circle", "size": max(5, 1.2 * line.get_markersize())}
    if dash:
        trace["marker"]["maxdisplayed"] = _MOST_MARKERS
    if run := _RUN.match(line.get_gid() or ""):
        trace["meta"] = int(run.group(1))
    return trace


def _trace(artist: "Artist", points: Iterable[Sequence[float]], mode: str) -> dict[str, Any]:
    """A named trace through points; those that are not finite are gaps."""
    whole = [[_number(value) for value in point] for point in points]
    return {
        "type": "scatter", "mode": mode, "name": _name(artist.get_label()),
        "x": [point[0] for point in whole], "y": [point[1] for point in whole],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _name(label: object) -> str:
    """The name of an artist as Plotly's markup shows it; matplotlib's own begin with an underscore."""
    return "" if label is None or str(label).startswith("_") else html.escape(str(label), quote=False)


def _wrapped(text: str, width: int) -> str:
    """A text in Plotly's markup, broken into lines that a phone can show."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(text, width))


def _colour(given: Any) -> str:
    """The colour as the page shows it: black is its ink, and light colours are those of its palette."""
    from matplotlib.colors import to_hex

    found = to_hex(given)
    return _FOR_PAPER_OF_BOTH_SCHEMES.get(found, found)


def _axis(axes: "Axes", which: str, traces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The title, scale, limits and named ticks of an axis.

    matplotlib's symlog becomes log, which leaves out points at 0.
    """
    from matplotlib.ticker import FixedLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    found: dict[str, Any] = {"title": {"text": _wrapped(axis.get_label_text(), _LABEL)}}
    if axis.get_scale() != "linear":
        if low <= 0:
            positive = [value for trace in traces for value in trace[which] if value is not None and value > 0]
            low = min(positive, default=high / 10)
        found["type"], (low, high) = "log", (math.log10(low), math.log10(high))
    found["range"] = [float(low), float(high)]
    locator = axis.get_major_locator()
    if isinstance(locator, FixedLocator):
        places = [float(place) for place in locator()]
        texts = axis.get_major_formatter().format_ticks(places)
        found |= {"tickvals": places, "ticktext": [_wrapped(text, _TICK) for text in texts]}
    return found


def _annotation(text: Any, axes: "Axes") -> dict[str, Any]:
    """A text at a place of the data, with its arrow or its distance from that place in points."""

    def at(place: Sequence[float]) -> list[float]:
        return [_place(axis, value) for axis, value in zip((axes.xaxis, axes.yaxis), place, strict=True)]

    x, y = at(getattr(text, "xy", text.get_position()))
    found: dict[str, Any] = {"x": x, "y": y, "text": _wrapped(text.get_text(), _TICK), "showarrow": False}
    up = {"top": "top", "center": "middle"}.get(text.get_va(), "bottom")
    found |= {"font": {"size": 11}, "align": "left", "xanchor": "left", "yanchor": up}
    if (arrow := getattr(text, "arrowprops", None)) is not None:
        ax, ay = at(text.xyann)
        found |= {"showarrow": True, "ax": ax, "ay": ay, "axref": "x", "ayref": "y"}
        found |= {"text": _wrapped(text.get_text(), _NOTE), "arrowwidth": arrow.get("linewidth", 1)}
        found |= {"arrowhead": 0 if text.get_text() else 2, "arrowcolor": _colour(arrow.get("color", "black"))}
    elif getattr(text, "anncoords", None) == "offset points":
        found |= {"xshift": text.xyann[0], "yshift": text.xyann[1]}
    return found


def _place(axis: Any, value: float) -> float:
    """A place on an axis: annotations stand at logarithms where it is logarithmic."""
    return float(value) if axis.get_scale() == "linear" else math.log10(value)
