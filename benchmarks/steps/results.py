"""The tables of `python -m benchmarks.steps`, and the files in which results are gathered run by run."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.steps.cases import ABSENT, CASES, SETUP, Case
from benchmarks.steps.curves import Curve
from benchmarks.steps.engines import COMPILED, EAGER, GRAPH, ORDINARY, OURS
from benchmarks.steps.race import Row, longer, quartiles, reference
from benchmarks.steps.where import Table

PEER = "opacus"  # engines whose names begin so are modes of one peer, the fastest of which is its best
STAMPED = ("date", "command", "commit", "source")  # what each row says of the run that measured it


def best_peer(rows: Sequence[Row]) -> Row | None:
    """The fastest mode of the peer, within rounds: what slows down some rounds does not choose it."""
    ran = [row for row in rows if row.engine.startswith(PEER) and row.seconds]
    others = [row for row in rows if row.engine == ORDINARY and row.seconds]
    return min(ran, key=lambda row: longer(row, others[0]) or 0 if others else row.median, default=None)


def by_name(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each name, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return list(found.values())


@dataclass(frozen=True)
class Claim:
    """A bound on a figure of dpgrad."""

    what: str
    figure: float | None  # None where it could not be measured
    bound: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the figure is within its bound."""
        return self.figure is not None and self.figure <= self.bound

    def __str__(self) -> str:
        return f"{self.what} ≤ {self.bound:.4g}{self.unit}"


def claims(row: Row, rows: Sequence[Row], case: Case, device: str) -> list[Claim]:
    """What is asked of one engine of dpgrad, beside the others of its row."""
    plain, peer = reference(rows), best_peer(rows)
    found = []
    most = case.most if device == "cuda" else case.cpu
    if row.engine == OURS:
        if most is not None and plain is not None:
            found.append(Claim("time", longer(row, plain), most))
        if device == "cuda" and case.memory is not None and plain is not None:
            found.append(Claim("memory", more(row, plain), case.memory))
        found.append(Claim("set-up", row.setup, SETUP, " s"))
    if row.engine == (EAGER if device == "cuda" else OURS) and peer is not None:
        found.append(Claim(f"{peer.engine}", longer(row, peer), 1.0))
    return found


def more(row: Row, than: Row) -> float | None:
    """How many times the memory."""
    return row.mebibytes / than.mebibytes if row.mebibytes and than.mebibytes else None


def line(row: Row, rows: Sequence[Row], device: str) -> list[str]:
    """The cells of one row of the table; ``rows`` are all of its name."""
    start = [f"{row.workload} ({row.batch_size:,})", row.engine]
    if not row.seconds:
        failed = "no" if row.engine in (OURS, EAGER) and not row.reason.endswith(ABSENT) else ""
        return [*start, row.reason[:100], *[""] * 7, failed, ""]
    plain, peer = reference(rows), best_peer(rows)
    times, spread = (longer(row, plain), quartiles(row, plain)) if plain else (None, None)
    between = f" ({spread[0]:.2f}–{spread[1]:.2f})" if spread and row is not plain else ""
    asked = claims(row, rows, CASES[row.name], device) if row.engine in (OURS, EAGER) and row.name in CASES else []
    missed = [f"{claim.what} {_shown(claim.figure)}" for claim in asked if not claim.holds]
    return [
        *start, _milliseconds(row.median), _shown(times) + between, _shown(longer(row, peer) if peer else None),
        _shown(row.mebibytes, ".0f"), _shown(more(row, plain) if plain else None), _shown(row.setup, ".1f"),
        row.form[:60], ", ".join(map(str, asked)), (f"no: {', '.join(missed)}" if missed else "yes") if asked else "",
        "" if row.apart is None else f"{row.apart:.0e}",
    ]  # fmt: skip


def engine_table(rows: Iterable[Row], device: str) -> Table:
    """Time, memory and set-up of every engine, beside the step without privacy, and whether targets are met."""
    plain = f"× {GRAPH if device == 'cuda' else ORDINARY}"
    head = ["workload (expected batch)", "engine", "ms", plain, "× best Opacus", "peak MiB", "×", "set-up s", "form"]
    table = [[*head, "target", "met", "apart"]]
    for here in by_name(rows):
        table += [line(row, here, device) for row in here]
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


@dataclass
class Report:
    """What was measured so far, in this run and, where a file has them, in earlier ones of the same device.

    Every result that is added is written at once: a run that is cut loses nothing, and one of other rows adds to it.
    """

    run: Mapping[str, Any]  # where and how this run is measured
    settings: Mapping[str, Any]
    file: Path | None = None
    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    stamps: dict[str, dict[str, Any]] = field(default_factory=dict)  # by row and engine, or by curve

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            kept = json.loads(self.file.read_text("utf-8"))
            if kept.get("settings", {}).get("device") == self.settings["device"]:
                for entry in kept.get("rows", ()):
                    self._restore(entry)
                for entry in kept.get("curves", ()):
                    self._restore_curve(entry)

    def _restore(self, entry: Mapping[str, Any]) -> None:
        if entry.get("name") in CASES:  # others are of an older form
            self.rows.append(Row(**_known(Row, entry)))
            self.stamps[_key(self.rows[-1])] = {name: entry.get(name) for name in STAMPED}

    def _restore_curve(self, entry: Mapping[str, Any]) -> None:
        if "source" in entry:
            self.curves.append(Curve(**_known(Curve, entry)))
            self.stamps[self.curves[-1].scale] = {name: entry.get(name) for name in STAMPED}

    def add(self, row: Row) -> None:
        """Put a row in the place of the one that was measured before it; one that was left out does not replace it."""
        before = next((old for old in self.rows if _key(old) == _key(row)), None)
        if before is not None:
            if before.seconds and row.reason and not row.seconds:
                return
            self.rows.remove(before)
        self.rows.append(row)
        names, engines = list(CASES), (ORDINARY, GRAPH, COMPILED, OURS, EAGER)
        place = {engine: at for at, engine in enumerate(engines)}
        self.rows.sort(key=lambda one: (names.index(one.name), place.get(one.engine, len(place)), one.engine))
        self._stamp(_key(row))

    def add_curve(self, curve: Curve) -> None:
        """Put a curve in the place of the one that was measured before it."""
        self.curves = [*(old for old in self.curves if old.scale != curve.scale), curve]
        self._stamp(curve.scale)

    def _stamp(self, key: str) -> None:
        self.stamps[key] = {name: self.run.get(name) for name in STAMPED}
        self.write()

    def fields(self) -> dict[str, Any]:
        """Everything, for JSON."""
        results: dict[str, Any] = {}
        if self.rows:
            results["rows"] = [{**row.fields(), **self.stamps[_key(row)]} for row in self.rows]
        if self.curves:
            results["curves"] = [{**vars(curve), **self.stamps[curve.scale]} for curve in self.curves]
        sources = {stamp["source"] for stamp in self.stamps.values()}
        # A table of which one row is of other code is not current.
        source = next(iter(sorted(sources - {self.run.get("source")}, key=str)), self.run.get("source"))
        return {"environment": {**self.run, "source": source}, "settings": self.settings, **results}

    def tables(self) -> list[Table]:
        """The table of engines and one of each curve."""
        engines = [engine_table(self.rows, self.settings["device"])] if self.rows else []
        return engines + [curve_table(curve) for curve in self.curves]

    def left_out(self) -> list[str]:
        """Why engines, and points of curves, have no figure."""
        return [
            *(f"{row.name}, {row.engine}: {row.reason}" for row in self.rows if row.reason),
            *(f"{curve.label}, {reason}" for curve in self.curves for reason in curve.reasons),
        ]

    def text(self) -> str:
        """The tables, and what was left out."""
        parts = [environment.table(table) for table in self.tables()]
        if lines := self.left_out():
            parts.append("Left out:\n\n" + "\n".join(f"- {line}" for line in lines))
        return "\n\n".join(parts)

    def write(self) -> None:
        """Both files at once, each whole whenever it is read."""
        if self.file is None:
            return
        others = {tuple(stamp[name] for name in STAMPED[:3]) for stamp in self.stamps.values()}
        runs = [f"- {date}, commit {commit}: `{command}`" for date, command, commit in sorted(others, key=str)]
        head = environment.heading(self.fields()["environment"], f"One private step on {self.run.get('gpu', 'a CPU')}")
        parts = [head, _HOW if self.rows else "", self.text(), "Measured by:\n\n" + "\n".join(runs)]
        _replaced(self.file, environment.as_json(self.fields()))
        _replaced(self.file.with_suffix(".md"), "\n\n".join(filter(None, parts)) + "\n")


_HOW = (
    "A step is forward, backward, clipping, noise and the update by SGD. Private steps draw Poisson lots from 16 "
    "times as many examples, and their times are per expected example: divided by the examples drawn in the timed "
    "steps. Other engines take one batch of the expected size again and again. On a CPU engines take turns in each "
    "round; on CUDA each has a process of its own, and a round is a block of steps. Ratios are medians over rounds, "
    "in brackets their quartiles. Peak memory is the most that was allocated from the first step on, checks and "
    "capture included, beyond the data. Set-up is what the first steps took beyond steady ones. `apart` is the "
    "largest relative difference of a parameter's clipped sum at the first step from the definition, the clipped "
    "gradients of single examples by autograd in float32 (of lots that are too large for that, dpgrad eager from "
    "dpgrad); an engine that is too far from it is not timed. `opacus ... ≤ 1` asks for a step no slower than the "
    "fastest mode of Opacus."
)


def _key(row: Row) -> str:
    return f"{row.name}, {row.engine}"


def _known(kind: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: entry[one.name] for one in fields(kind) if one.name in entry}


def _replaced(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text, "utf-8")
    os.replace(beside, file)
