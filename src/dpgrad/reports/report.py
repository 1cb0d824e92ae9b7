"""The privacy report of a run: what it reveals, for whom, by whose proof, what is public and what is not covered.

A report is a plain dictionary whose form ``report.schema.json`` describes. It is made once, from what `dpgrad.fit`
returned, and shown as JSON, as text or as a page; `dpgrad.reports.page` draws the last. It holds nothing that was
computed from training rows without noise.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dpgrad import __version__, _validate
from dpgrad.accounting import events
from dpgrad.accounting.guarantee import Guarantee, down, up
from dpgrad.data import OUTSIDE, ROW_COUNTS, Dataset
from dpgrad.errors import ReportError
from dpgrad.reports import compare, strict_json
from dpgrad.reports.schema import faults

__all__ = [
    "ALLOWED",
    "FILE",
    "SCHEMA",
    "SEEDED",
    "UNFINISHED",
    "Report",
    "Trained",
    "check",
    "facts",
    "interval",
    "load",
    "privacy",
    "released",
    "shown",
    "text",
    "write",
]  # fmt: skip

FORMAT, ESTIMATOR_FORMAT = "dpgrad privacy report 2", "dpgrad estimator report 1"
_FIRST = "dpgrad privacy report 1"  # of 0.1.0: without the way, and the batch size was called lot
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("report.schema.json").read_text("utf-8"))
FILE = "report.json"
_MOST_LEAVES = 50  # an event of more is given by their number
_WIDTH = 100

SEEDED = (
    "it was made from a seed, for repetition: whoever guesses the seed can subtract the noise, whatever ε says; "
    "train again without a seed"
)
UNFINISHED = "the run was interrupted: resume it, or share it at the price of the whole plan"
ALLOWED = "under this guarantee; keep the folder private/ and the held-out rows to yourself"

Report = dict[str, Any]


@runtime_checkable
class Trained(Protocol):
    """What a report is made of: `dpgrad.training.fit.Fitted`, or another record with these fields."""

    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def plan(self) -> Any: ...
    @property
    def curves(self) -> Sequence[Any]: ...
    @property
    def metric(self) -> str: ...
    @property
    def held_out(self) -> float | None: ...
    @property
    def stopped(self) -> str: ...
    @property
    def reproducible(self) -> bool: ...
    @property
    def public(self) -> tuple[str, ...]: ...
    @property
    def outside(self) -> tuple[str, ...]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def way(self) -> Any: ...


def privacy(
    fitted: Any, data: Dataset | None = None, model: Mapping[str, Any] | None = None, outside: Sequence[str] = ()
) -> Report:
    """The report of a run on ``data`` with the named ``model`` (name, shape, outputs), where there are such.

    ``outside`` adds to what the guarantee does not cover. ``fitted`` is what `dpgrad.fit` returned, or a fitted
    estimator of `dpgrad.convex`, whose report holds its ``privacy_`` under a format of its own.
    """
    if not isinstance(fitted, Trained):
        return _of_estimator(fitted, outside)
    event = fitted.guarantee.event
    distinct = compare.runs(event)
    last = fitted.curves[-1].step if fitted.curves else 0
    named, read = fitted.plan.recipe, _read(data)
    found: Report = {
        "format": FORMAT,
        "dpgrad": __version__,
        "data": None if data is None else _data(data),
        "model": None if model is None else {**model, "parameters": fitted.plan.parameters or 0},
        "method": {"name": named.name, "title": named.title, "citation": named.citation},
        "way": None if fitted.way is None else _way(fitted.way),
        "guarantee": _guarantee(fitted.guarantee),
        "release": _release(fitted),
        "public": [*fitted.public, *read["public"]],
        "outside": [*read["outside"], *fitted.outside, *outside],
        "stopped": fitted.stopped,
        "result": {
            "metric": fitted.metric,
            "held_out": None if fitted.held_out is None else _finite(fitted.held_out),
            "steps": last,
            "seconds": fitted.seconds,
        },
        "curves": [_without_infinities(asdict(point)) for point in fitted.curves],
        "plan": _without_infinities(fitted.plan.to_dict()),
        "event": events.to_dict(event) if distinct < _MOST_LEAVES else None,
        "distinct_steps": distinct,
    }
    check(found)
    return found


def _of_estimator(fitted: object, outside: Sequence[str]) -> Report:
    """The report of a fitted estimator; None but these have ``privacy_``."""
    told = getattr(fitted, "privacy_", None)
    if told is None:
        raise ReportError(
            f"a report needs what dpgrad.fit returned or a fitted estimator of dpgrad.convex, got "
            f"{_validate.shown(fitted)}: an estimator has one after fit, unless it releases nothing"
        )
    found: Report = {
        "format": ESTIMATOR_FORMAT, "dpgrad": __version__, "estimator": type(fitted).__name__, **told.to_dict(),
    }  # fmt: skip
    return {**found, "outside": [*found["outside"], *outside], "text": str(told)}


def _way(way: Any) -> dict[str, Any]:
    kept = way.to_release()
    return {"name": kept.name, "reason": kept.why or None, "cost": kept.cost or None}


def _data(data: Dataset) -> dict[str, Any]:
    classes = None if data.classes is None else list(data.classes)
    return {"name": data.name, "preprocessing": data.preprocessing, "split": data.split, "classes": classes}


def _read(data: Dataset | None) -> dict[str, list[str]]:
    """What preparing the data took to be public, and what it read from private rows without a charge."""
    if data is None:
        return {"public": [], "outside": []}
    private = data.outside_guarantee
    return {
        "public": [entry for entry in data.public if entry not in (*private, ROW_COUNTS)],  # the plan has their number
        "outside": [entry.removeprefix(OUTSIDE) for entry in private],
    }


def _guarantee(guarantee: Guarantee) -> dict[str, Any]:
    figure = compare.figure(
        guarantee.event, guarantee.relation, guarantee.accountant, guarantee.delta, chosen=True
    )  # fmt: skip
    return {
        "statement": str(guarantee),
        "epsilon": _finite(guarantee.epsilon),
        "epsilon_lower": None if figure.lower is None else _finite(min(figure.lower, guarantee.epsilon)),
        "delta": guarantee.delta,
        "relation": guarantee.relation.value,
        "neighbours": guarantee.neighbours,
        "privacy_unit": "one row",
        "sampling": guarantee.sampling,
        "accountant": guarantee.accountant,
        "reason": "no finite epsilon is certified at this delta" if math.isinf(guarantee.epsilon) else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _without_infinities(value: Any) -> Any:
    """Plain values with null for what JSON cannot say."""
    match value:
        case dict():
            return {name: _without_infinities(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_without_infinities(inner) for inner in value]
        case float():
            return _finite(value)
        case _:
            return value


def _release(fitted: Trained) -> dict[str, Any]:
    if fitted.reproducible:
        return {"allowed": False, "reason": SEEDED}
    if fitted.stopped == "interrupted":
        return {"allowed": False, "reason": UNFINISHED}
    return {"allowed": True, "reason": ALLOWED}


def check(report: object, name: str = "report") -> None:
    """Refuse what is not a report of this format or of an earlier one, with the first fault.

    >>> check({"format": "dpgrad privacy report 2"})
    Traceback (most recent call last):
    dpgrad.errors.ReportError: report.dpgrad is missing: not a dpgrad privacy report 2
    """
    for fault in faults(_current(report), SCHEMA, name):
        raise ReportError(f"{fault}: not a {FORMAT}")


def _current(report: Any) -> Any:
    """A report of an earlier format in the present one; null for what it does not say."""
    if not isinstance(report, dict) or report.get("format") != _FIRST or "way" in report:
        return report
    plan = report.get("plan")
    if isinstance(plan, dict) and "lot" in plan:
        plan = {**{name: value for name, value in plan.items() if name != "lot"}, "batch_size": plan["lot"]}
    return {**report, "format": FORMAT, "way": None, "plan": plan}


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
    current: Report = _current(found)
    return current


def write(folder: Path, report: Report) -> None:
    """Write the report into a folder for release, as JSON and as text."""
    (folder / FILE).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", "utf-8")
    (folder / "report.txt").write_text(text(report), "utf-8")


def facts(report: Report) -> list[tuple[str, str]]:
    """What the report says, each under a name, in the order in which it should be read."""
    promise, result, named = report["guarantee"], report["result"], report["method"]
    found = [
        ("privacy", promise["statement"]),
        ("ε", interval(promise)),
        ("δ", f"{promise['delta']:g}"),
        ("neighbours", f"{promise['relation']}: {promise['neighbours']}"),
        ("privacy unit", f"{promise['privacy_unit']}; someone with several rows is protected less"),
        ("sampling", "{}, batches of {:g} out of {:,} rows".format(promise["sampling"], *_sizes(report["plan"]))),
        ("accountant", promise["accountant"]),
        ("method", f"{named['title']} ({named['citation']})"),
        *([("chosen by rule", why)] if (why := report["plan"].get("chosen_by_rule")) else []),
        *([] if report.get("way") is None else [("gradients", _said(report["way"]))]),
        ("release", ("yes, " if report["release"]["allowed"] else "NOT FOR RELEASE: ") + report["release"]["reason"]),
        ("steps", f"{result['steps']:,}, {_STOPPED[report['stopped']]}"),
    ]
    if report["data"] is not None:
        found.append(("data", "{name}, preprocessing {preprocessing}; {split}".format(**report["data"])))
    if report["model"] is not None:
        found.append(("model", "{name}, {parameters:,} trained parameters".format(**report["model"])))
    if result["held_out"] is not None:
        found.append(("held-out", f"{result['metric']} {shown(result['held_out'], result['metric'])}"))
    return [
        *found,
        *(("public", entry) for entry in report["public"]),
        *(("not covered", entry) for entry in report["outside"]),
    ]


def _said(way: Mapping[str, Any]) -> str:
    """The way in which gradients were computed, in words.

    >>> _said({"name": "lifted", "reason": "sort has no rule", "cost": None})
    'lifted: sort has no rule'
    """
    told = way["name"] if way["reason"] is None else f"{way['name']}: {way['reason']}"
    return told if way["cost"] is None else f"{told}; every batch is checked, which costs {way['cost']}"


def _sizes(plan: Mapping[str, Any]) -> tuple[float, int]:
    return plan["batch_size"], plan["dataset_size"]


_STOPPED = {
    "plan": "as planned",
    "budget": "as many as the budget allowed",
    "interrupted": "interrupted: the guarantee is that of the whole plan",
}


def interval(promise: Mapping[str, Any]) -> str:
    """The certified interval of ε in words; figures are never rounded towards comfort.

    >>> interval({"epsilon": 2.9999991, "epsilon_lower": 2.99991, "reason": None})
    'at most 3, and at least 2.9999 by any proof'
    """
    if promise["epsilon"] is None:
        return f"infinite: {promise['reason']}"
    least = "" if promise["epsilon_lower"] is None else f", and at least {down(promise['epsilon_lower'])} by any proof"
    return f"at most {up(promise['epsilon'])}{least}"


def shown(value: float | None, metric: str) -> str:
    """A figure on held-out rows: a share as per cent, a loss as it is.

    >>> shown(0.9583, "accuracy"), shown(0.25, "squared"), shown(None, "accuracy")
    ('95.8 %', '0.25', '–')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def text(report: Report) -> str:
    """The report in words, one fact after another."""
    if report["format"] == ESTIMATOR_FORMAT:
        return f"{report['text']}\n"
    lines, before = [], ""
    for name, fact in facts(report):
        label = "" if name == before else name
        first, rest = f"{label:<14}", " " * 14
        lines.append(textwrap.fill(fact, _WIDTH, initial_indent=first, subsequent_indent=rest))
        before = name
    return "\n".join(lines) + "\n"
