"""How the cost of a step grows: with the batch, the width, the length, the depth, the groups and the history."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.steps.engines import GRAPH, ORDINARY, OURS, Engine, ordinary, ordinary_graph, ours
from benchmarks.steps.race import Settings, longer, raced
from benchmarks.steps.workloads import WORKLOADS, Workload, deep, transformer
from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism.mechanism import Group

_LAYERS = 32  # of the stack whose parameters are put into groups
_PIECE = 4096  # examples of a lot processed at a time
_LAST = 3  # points from which the exponent at the end of a curve is fitted


@dataclass(frozen=True)
class Scale:
    """One thing that grows: what it is, where it is measured, and what that makes of workload and private step."""

    label: str
    points: tuple[int, ...]
    workload: Callable[[int], Workload]
    options: Callable[[int], dict[str, Any]] = lambda value: {}
    most_on_cpu: int | None = None  # larger points are for a CUDA device
    passes: Callable[[int], int] = lambda value: value  # what the exponent is an exponent of


@dataclass(frozen=True)
class Curve:
    """Seconds of a step at each point, by engine; None where it could not be taken, and ``reasons`` say why."""

    scale: str
    label: str
    workload: str
    points: list[int]
    seconds: dict[str, list[float | None]]
    ratios: list[float | None]  # of the private step to the other, medians over rounds
    exponents: dict[str, float | None]
    last_exponents: dict[str, float | None]  # over the last points, where fixed costs weigh least
    reasons: list[str] = field(default_factory=list)


def exponent(points: Sequence[float], seconds: Sequence[float | None]) -> float | None:
    """The a of seconds ≈ c·points^a: the slope of a least-squares line in logarithms; None for fewer than two points.

    >>> round(exponent([1, 2, 4], [3.0, 6.0, 12.0]), 6)
    1.0
    """
    known = [(x, y) for x, y in zip(points, seconds, strict=True) if y is not None]
    if len(known) < 2:
        return None
    x, y = np.log(np.array(known, dtype=float)).T
    return float(np.polynomial.polynomial.polyfit(x, y, 1)[1])


def _groups(count: int) -> dict[str, Any]:
    """As many groups of parameters of a `stack`, by the first binary digits of the layers' names."""
    digits = (count - 1).bit_length()
    if count != 2**digits or count > _LAYERS:
        raise ValueError(f"the number of groups must be a power of two up to {_LAYERS}, got {count}")
    if count == 1:
        return {}
    return {"groups": tuple(Group(f"{group:0{digits}b}*") for group in range(count))}


def _history(length: int) -> dict[str, Any]:
    return {"inner_momentum": InnerMomentum(0.5, length)} if length else {}


def _lot(size: int) -> Workload:
    """Lots of the MNIST CNN, in pieces where they are large."""
    return replace(WORKLOADS["mnist-cnn"].of(size), microbatch=_PIECE if size > _PIECE else None)


SCALES: dict[str, Scale] = {
    "batch": Scale("lot size", tuple(2**power for power in range(6, 17)), _lot, most_on_cpu=1024),
    "width": Scale("width", (128, 256, 512, 1024, 2048), lambda width: transformer(width, 2, 128, 16)),
    "length": Scale("sequence length", (128, 256, 512, 1024, 2048), lambda length: transformer(256, 2, length, 8)),
    "depth": Scale("layers", (1, 2, 4, 8, 16), lambda layers: transformer(256, layers, 128, 16)),
    "groups": Scale("groups of parameters", (1, 2, 4, 8, 16, 32), lambda count: deep(256, _LAYERS, 512), _groups),
    "history": Scale(
        "K₀", (0, 1, 2, 4, 8), lambda length: WORKLOADS["mnist-cnn"], _history, passes=lambda length: length + 1,
    ),
}  # fmt: skip


def curve(settings: Settings, points: Sequence[int] | None, name: str) -> Curve:
    """The curve of that name in `SCALES`, at its own points or at those given."""
    scale = SCALES[name]
    cuda = settings.device == "cuda"
    few = [point for point in scale.points if cuda or scale.most_on_cpu is None or point <= scale.most_on_cpu]
    chosen = list(points or few)
    other: dict[str, Engine] = {GRAPH: ordinary_graph} if cuda else {ORDINARY: ordinary}
    seconds: dict[str, list[float | None]] = {name: [] for name in (*other, OURS)}
    ratios: list[float | None] = []
    reasons = []
    for point in chosen:
        engines: dict[str, Engine] = {**other, OURS: partial(ours, **scale.options(point))}
        rows = raced(name, scale.workload(point), engines, settings)
        for row in rows:
            seconds[row.engine].append(row.median if row.seconds else None)
            reasons += [f"{row.engine} at {point}: {row.reason}"] if row.reason else []
        ratios.append(longer(rows[1], rows[0]))
    x = [scale.passes(point) for point in chosen]
    return Curve(
        name, scale.label, scale.workload(chosen[0]).title, chosen, seconds, ratios,
        {engine: exponent(x, y) for engine, y in seconds.items()},
        {engine: exponent(x[-_LAST:], y[-_LAST:]) for engine, y in seconds.items()},
        reasons,
    )  # fmt: skip


def plotted(curves: Sequence[Mapping[str, Any]]) -> str:
    """The curves as one SVG picture, a panel each, both axes logarithmic."""
    import io

    import matplotlib
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    lines = -(-len(curves) // columns)
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "benchmarks.steps", "font.size": 9}):
        figure = Figure(figsize=(4.2 * columns, 3.3 * lines), layout="constrained")
        for place, one in enumerate(curves, 1):
            axes = figure.add_subplot(lines, columns, place)
            shift = 1 if min(one["points"]) < 1 else 0  # logarithms begin at one
            for engine, marker in zip(one["seconds"], "os", strict=True):
                known = [(x + shift, 1e3 * y) for x, y in zip(one["points"], one["seconds"][engine], strict=True) if y]
                slope = one["exponents"][engine]
                label = engine if slope is None else f"{engine}, exponent {slope:.2f}"
                axes.plot(*zip(*known, strict=True) if known else ((), ()), marker=marker, label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel(one["label"] + (" + 1" if shift else ""))
            axes.set_ylabel("milliseconds a step")
            axes.set_title(one["workload"], loc="left", fontsize=10)
            axes.grid(True, color="#DDDDDD", linewidth=0.8)
            axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
