"""The privacy report: what was released, what it reveals, for whom, by whose proof, and what is not covered.

A report is a plain dictionary whose form ``report.schema.json`` describes, with functions that write it. `report` makes
it, from a run, an estimator, a pipeline, a solver's result, a plan, a ledger or a guarantee; it is shown as JSON, as
text (`dpgrad.reports.words`) or as a page (`dpgrad.reports.page`). It holds nothing that was computed from training
rows without noise.

>>> from dpgrad.accounting.events import Gaussian, Relation
>>> found = report(Guarantee(1.0, 1e-6, Relation.ZERO_OUT, "exact", Gaussian(4.9)))
>>> found["kind"], found["guarantee"]["epsilon"], round(found["plain"]["odds"]["sure"], 3)
('guarantee', 1.0, 0.731)
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from dpgrad import __version__, _validate
from dpgrad.accounting import events
from dpgrad.accounting.guarantee import Guarantee, several
from dpgrad.accounting.inexact import parted
from dpgrad.data import Dataset
from dpgrad.errors import ReportError
from dpgrad.reports import compare, kinds, plain, strict_json
from dpgrad.reports.environment import environment, today
from dpgrad.reports.kinds import ALLOWED, SEEDED, UNFINISHED, Trained
from dpgrad.reports.words import facts, group_lines, interval, shown, text

__all__ = [
    "ALLOWED",
    "FILE",
    "FORMAT",
    "SCHEMA",
    "SEEDED",
    "UNFINISHED",
    "Report",
    "Trained",
    "check",
    "facts",
    "faults",
    "group_lines",
    "interval",
    "load",
    "released",
    "report",
    "shown",
    "text",
    "write",
]

FORMAT = "dpgrad privacy report 3"
_FIRST, _SECOND = "dpgrad privacy report 1", "dpgrad privacy report 2"
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("report.schema.json").read_text("utf-8"))
FILE, _TEXT, _PAGE = "report.json", "report.txt", "report.html"
_MOST_LEAVES = 50  # an event of more is given by their number
_VALUES = ("noise_multiplier", "clip", "sampling_rate", "steps")
_RUN: dict[str, Any] = dict.fromkeys(("data", "model", "way", "stopped", "result", "plan"))


class Report(dict[str, Any]):
    """A report: a dictionary in the format of docs/report.md, which prints as text and can be saved.

    >>> from dpgrad.accounting.events import Gaussian, Relation
    >>> found = report(Guarantee(1.0, 1e-6, Relation.ZERO_OUT, "exact", Gaussian(4.9)))
    >>> print(found.text().splitlines()[0][:40])
    privacy       ε = 1 at δ = 1e-06 for dat
    """

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The report in words, one fact after another."""
        return text(self)

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self, indent=1, allow_nan=False) + "\n"

    def page(self) -> str:
        """The report as one self-contained HTML page."""
        from dpgrad.reports.page import page

        return page({self["method"]["name"]: self})

    def save(self, folder: str | PathLike[str]) -> None:
        """Write report.json, report.txt and report.html into ``folder``, which is made where it is missing.

        A file that is there already is kept: the folder is refused.
        """
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise ReportError(f"{path} is a file: choose a folder for the report")
        if present := [name for name in (FILE, _TEXT, _PAGE) if (path / name).exists()]:
            raise ReportError(f"{path / present[0]} is there already: choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        write(path, self)
        (path / _PAGE).write_text(self.page(), "utf-8")


def report(
    thing: object,
    *,
    delta: float | None = None,
    data: Dataset | None = None,
    model: Mapping[str, Any] | None = None,
    outside: Sequence[str] = (),
    audit: kinds.Audited | None = None,
) -> Report:
    """The privacy report of anything that dpgrad made private.

    ``thing`` is what `dpgrad.fit` returned, a fitted estimator of `dpgrad.convex`, a pipeline that holds such, a result
    of one of its solvers, a projection of `dpgrad.pca`, a plan, a `Mechanism`, a `Ledger` or a `Guarantee`. ``delta``
    is required for those that have none of their own: a solver's result, a projection, a mechanism, a ledger. ``data``
    and ``model`` (name, shape, outputs) describe a run, in place of what it knows of them itself. ``outside`` adds to
    what the guarantee does not cover. ``audit``, a record of `dpgrad.audit` about the same thing, adds its words to the
    notes; an audit by itself has a report too.

    Guarantee: a report is a function of what was released and of public facts.

    >>> from dpgrad.accounting.events import Gaussian, Relation
    >>> ledger = kinds.Ledger()
    >>> ledger.add(Gaussian(4.0), Relation.ADD_REMOVE, "a model")
    >>> report(ledger, delta=1e-5)["guarantee"]["statement"]
    'ε = 0.92635 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, exact accountant)'
    """
    if isinstance(thing, Report):
        return thing
    if data is None and model is None:  # a run knows its own
        data, model = getattr(thing, "dataset", None), getattr(thing, "described", None)
    part = kinds.part(thing, delta, data, model)
    event, promise = part.guarantee.event, _guarantee(part.guarantee)
    distinct = compare.runs(event)
    allowed = dict(zip(("allowed", "reason"), part.release, strict=True))
    found = Report({
        **_head(part.kind),
        **_RUN,
        "schema": None if part.schema is None else kinds.plain_values(part.schema),
        "method": dict(zip(("name", "title", "citation"), part.method, strict=True)),
        "preprocessing": list(part.preprocessing),
        "guarantee": promise,
        "noise": _noise(event, part.drawn),
        "plain": plain.explained(promise, allowed, part.subject),
        "values": {**dict.fromkeys(_VALUES), **part.values},
        "releases": [dict(one) for one in part.releases], "release": allowed,
        "public": list(part.public),
        "outside": [*part.outside, *outside],
        "notes": [*part.notes, *([] if audit is None else [audit.words])],
        "curves": [],
        "event": events.to_dict(event) if distinct < _MOST_LEAVES else None,
        "distinct_steps": distinct,
        **part.run,
    })  # fmt: skip
    check(found)
    return found


def _head(kind: str) -> dict[str, Any]:
    """What every report begins with."""
    return {"format": FORMAT, "kind": kind, "dpgrad": __version__, "date": today(), "environment": environment()}


def _guarantee(guarantee: Guarantee) -> dict[str, Any]:
    figure = compare.figure(
        guarantee.event, guarantee.relation, guarantee.accountant, guarantee.delta, chosen=True
    )  # fmt: skip
    return {
        "statement": str(guarantee),
        "epsilon": _validate.json_number(guarantee.epsilon),
        "epsilon_lower": None if figure.lower is None else _validate.json_number(min(figure.lower, guarantee.epsilon)),
        "delta": guarantee.delta,
        "relation": guarantee.relation.value,
        "neighbours": guarantee.neighbours,
        "privacy_unit": several(guarantee.unit, 1),
        "groups": guarantee.groups(),
        "attacks": _attacks(guarantee),
        "sampling": guarantee.sampling,
        "accountant": guarantee.accountant,
        "reason": "no finite epsilon is certified at this delta" if math.isinf(guarantee.epsilon) else None,
    }


def _attacks(guarantee: Guarantee) -> dict[str, Any] | None:
    """What no attack can exceed; None where its curve leaves the range of floating point."""
    try:
        return guarantee.attacks()
    except ArithmeticError:
        return None


def _noise(event: events.Event, drawn: bool) -> dict[str, Any] | None:
    """The source of the noise according to the event; None if dpgrad did not draw it, or drew none."""
    leaves = events.leaves(event)
    secure = [leaf for leaf in leaves if isinstance(leaf, events.Inexact)]
    if not leaves or (not secure and not drawn):
        return None
    source = "ordinary" if not secure else "secure" if len(secure) == len(leaves) else "secure and ordinary"
    return {"source": source, "distance": parted(event)[1]}


def check(report: object, name: str = "report") -> None:
    """Refuse anything but a report of this or an earlier format, and name the first fault.

    >>> check({"format": "dpgrad privacy report 3"})
    Traceback (most recent call last):
    dpgrad.errors.ReportError: report.kind is missing: not a dpgrad privacy report 3
    """
    for fault in faults(_current(report), SCHEMA, name):
        raise ReportError(f"{fault}: not a {FORMAT}")


def _current(report: Any) -> Any:
    """A report of an earlier format in the present one; null where it says nothing.

    The first was that of 0.1.0: without the way, and the batch size was called lot. The second was for runs alone.
    """
    if not isinstance(report, dict):
        return report
    if isinstance(promise := report.get("guarantee"), dict):
        report = {**report, "guarantee": {"groups": [], "attacks": None, **promise}}
    if isinstance(told := report.get("plain"), dict):
        report = {**report, "plain": {"attack": None, **told}}
    if isinstance(model := report.get("model"), dict):
        report = {**report, "model": {**kinds.UNSAID, **model}}
    if report.get("format") == _FIRST and "way" not in report:
        planned = report.get("plan")
        if isinstance(planned, dict) and "lot" in planned:
            planned = {
                **{name: value for name, value in planned.items() if name != "lot"},
                "batch_size": planned["lot"],
            }
        report = {**report, "format": _SECOND, "way": None, "plan": planned}
    if report.get("format") == _SECOND and "kind" not in report:
        report = {**report, "format": FORMAT, **_added(report)}
    return report


def _added(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the third format has and the second, of a run, had not; nothing in plain words where that was edited."""
    planned, told = report.get("plan"), {}
    with contextlib.suppress(ReportError, KeyError, TypeError, ValueError):  # `check` says what is wrong
        told = plain.explained(report["guarantee"], report["release"], "this model")
    known = planned if isinstance(planned, dict) else {}
    return {
        "kind": "run", "date": None, "environment": None, "schema": None, "preprocessing": [], "plain": told,
        "values": {**dict.fromkeys(_VALUES), **{name: known.get(name) for name in ("noise_multiplier", "steps")}},
        "releases": [], "notes": [], "noise": None,
    }  # fmt: skip


def released(run: Path) -> Path:
    """The folder with what may be shared of a run: ``release`` in the folder of the run, or the one given itself."""
    if not run.is_dir():
        raise ReportError(f"{run}: there is no such folder: give that of a finished run, or what was shared of one")
    for folder in (run / "release", run):
        if (folder / FILE).is_file():
            return folder
    if within := sorted(other.parent.parent.name for other in run.glob(f"*/release/{FILE}")):
        raise ReportError(f"{run} holds several runs: choose {' or '.join(str(run / name) for name in within)}")
    missing = run / "release" / FILE
    raise ReportError(
        f"{run} holds no finished run: {missing} is missing; finish it with dpgrad train --resume, or "
        "with dpgrad.fit and RunFolder(path, resume=True)"
    )


def load(run: Path) -> Report:
    """The report of the run in that folder, or of what was shared of it; only what was released is read."""
    path = released(run) / FILE
    found = strict_json.read(path)
    check(found, str(path))
    return Report(_current(found))


def write(folder: Path, report: Report) -> None:
    """Write the report into a folder for release, as JSON and as text."""
    (folder / FILE).write_text(report.json(), "utf-8")
    (folder / _TEXT).write_text(report.text(), "utf-8")


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(value: Any, schema: dict[str, Any], at: str = "report") -> Iterator[str]:
    """Where ``value`` differs from ``schema``, one line each; nothing where it does not.

    >>> list(faults({"steps": -1}, {"type": "object", "properties": {"steps": {"type": "integer", "minimum": 0}}}))
    ['report.steps must be at least 0']
    """
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds):
        yield f"{at} must be of type {' or '.join(kinds)}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{at} must be one of {', '.join(map(str, schema['enum']))}"
    elif isinstance(value, dict):
        yield from _fields(value, schema, at)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{at}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _bounds(value, schema, at)


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _fields(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name} is missing"
    for name, item in value.items():
        if name in known:
            yield from faults(item, known[name], f"{at}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{at}.{name} is not known"


def _bounds(value: float, schema: dict[str, Any], at: str) -> Iterator[str]:
    if value < schema.get("minimum", value):
        yield f"{at} must be at least {schema['minimum']}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{at} must be above {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        yield f"{at} must be below {schema['exclusiveMaximum']}"
