"""The tables of `python -m benchmarks.steps`."""

from collections.abc import Iterable, Sequence

from benchmarks.steps.costs import POISSON
from benchmarks.steps.curves import Curve
from benchmarks.steps.engines import GRAPH, ORDINARY
from benchmarks.steps.race import Row, longer, reference
from benchmarks.steps.where import Table

PEER = "opacus"  # engines whose names begin so are modes of one peer, the fastest of which is its best


def best_peer(rows: Sequence[Row]) -> Row | None:
    """The fastest mode of the peer, within rounds: what slows down some rounds does not choose it."""
    ran = [row for row in rows if row.engine.startswith(PEER) and row.seconds]
    others = [row for row in rows if row.engine == ORDINARY and row.seconds]
    return min(ran, key=lambda row: longer(row, others[0]) or 0 if others else row.median, default=None)


def by_workload(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each workload, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.workload, []).append(row)
    return list(found.values())


def engine_table(rows: Iterable[Row]) -> Table:
    """Time and memory of every engine, beside the step without privacy and the best peer."""
    rows = list(rows)
    plain_is = GRAPH if any(row.engine == GRAPH and row.seconds for row in rows) else ORDINARY
    times_of = [f"× {plain_is}", "× best Opacus"]
    table = [["workload (batch)", "engine", "ms", *times_of, "peak MiB", f"× {ORDINARY}", "apart"]]
    for here in by_workload(rows):
        plain, peer = reference(here), best_peer(here)
        held = next((row.mebibytes for row in here if row.engine == ORDINARY), None)
        for row in here:
            start = [f"{row.workload} ({row.batch_size})", row.engine]
            if not row.seconds:
                table.append([*start, row.reason[:100], *[""] * 5])
                continue
            more = row.mebibytes / held if row.mebibytes and held else None
            times = [_shown(longer(row, other) if other else None) for other in (plain, peer)]
            took = _milliseconds(row.median) + (f" ({row.reason})" if row.reason else "")
            apart = "" if row.apart is None else f"{row.apart:.1e}"
            table.append([*start, took, *times, _shown(row.mebibytes, ".0f"), _shown(more), apart])
    return table


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _shown(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def curve_table(curve: Curve) -> Table:
    """One curve: a line a point, and its exponents."""
    table = [[f"{curve.label}, {curve.workload}", *(f"{name}, ms" for name in curve.seconds), "×"]]
    for place, point in enumerate(curve.points):
        times = [_milliseconds(values[place]) for values in curve.seconds.values()]
        table.append([f"{point:,}", *times, _shown(curve.ratios[place])])
    for label, slopes in (("exponent", curve.exponents), ("exponent, last 3", curve.last_exponents)):
        table.append([label, *(_shown(slope) for slope in slopes.values()), ""])
    return table


def cost_table(rows: Iterable[Row], form: str) -> Table:
    """Each row beside the first of its workload, the plain private step."""
    table = [["workload (batch)", f"private step ({form})", "ms", "× plain"]]
    for here in by_workload(rows):
        for row in here:
            start = [f"{row.workload} ({row.batch_size})", row.engine]
            if row.seconds:
                table.append([*start, _milliseconds(row.median), _shown(longer(row, here[0]))])
            else:
                table.append([*start, row.reason[:100], ""])
    return table


def poisson_table(rows: Iterable[Row]) -> Table:
    """Batches that vary in size beside fixed ones, per example that is expected in them."""
    table = [["workload (expected batch)", "step", "ms", "µs per expected example", "× non-private", "× fixed"]]
    for here in by_workload(rows):
        medians = [row.median if row.seconds else None for row in here]
        for row, median in zip(here, medians, strict=True):
            start = [f"{row.workload} ({row.batch_size})", row.engine]
            if median is None:
                table.append([*start, row.reason[:100], "", "", ""])
                continue
            ratios = [_shown(None if other is None else median / other) for other in medians[:2]]
            each = f"{1e6 * median / row.batch_size:.3g}"
            table.append([*start, _milliseconds(median), each, ratios[0], ratios[1] if row.engine == POISSON else ""])
    return table
