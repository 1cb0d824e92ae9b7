"""What a report is made of, for each kind of thing: runs, plans, estimators, pipelines, releases, ledgers, guarantees.

Rooms below this one make these things, so they are known here by their fields alone. `part` returns the fields of a
report in which kinds differ; `dpgrad.reports.report` adds those that all have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from dpgrad import _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import (
    NOTHING,
    Event,
    FixedSize,
    Inexact,
    Poisson,
    Relation,
    TruncatedPoisson,
    leaves,
    together,
)
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.ledger import Ledger
from dpgrad.data import OUTSIDE, ROW_COUNTS, Dataset
from dpgrad.errors import AccountingError, DpgradError, ReportError
from dpgrad.mechanism.mechanism import Mechanism

__all__ = [
    "ALLOWED",
    "SEEDED",
    "UNFINISHED",
    "UNKNOWN",
    "UNSAID",
    "Audited",
    "ChargedResult",
    "Estimator",
    "Planned",
    "Subject",
    "Trained",
    "part",
    "plain_values",
    "priced",
]  # fmt: skip

SEEDED = (
    "it was made from a seed, for repetition: whoever guesses the seed can subtract the noise, whatever ε says; "
    "train again without a seed"
)
UNFINISHED = "the run was interrupted: resume it, or share it at the price of the whole plan"
ALLOWED = "under this guarantee, which covers nothing else that the run leaves behind"
RELEASED = "under this guarantee; keep the rows to yourself"
UNKNOWN = "under this guarantee, unless its noise came from a seed, which this report does not know"
UNPAID = "a step learned from these rows without noise: leave it out, or use one of dpgrad.convex in its place"
AUDITED = "an audit is made from seeds: nothing that it ran is for release"
PLANNED = "nothing has been released yet: this is the guarantee of a plan"
UNSAID: dict[str, Any] = {"dtype": "float32", "source": None}  # of a model
_NOT_FITTED = "an estimator has one after fit"


@runtime_checkable
class Trained(Protocol):
    """A finished run: `dpgrad.training.fit.Fitted`, or another record with these fields."""

    guarantee: Guarantee
    plan: Any
    curves: Sequence[Any]
    metric: str
    held_out: float | None
    stopped: str
    reproducible: bool
    public: tuple[str, ...]
    outside: tuple[str, ...]
    seconds: float
    way: Any
    clip_bounds: Sequence[Sequence[float]]
    notes: tuple[str, ...]


@runtime_checkable
class Planned(Protocol):
    """A plan: `dpgrad.training.plan.Plan`."""

    recipe: Any
    mechanism: Mechanism
    guarantee: Guarantee
    public: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]: ...
    def cautions(self) -> Iterator[tuple[str, str]]: ...


@runtime_checkable
class Estimator(Protocol):
    """A fitted estimator of `dpgrad.convex`, whose ``privacy_`` is a `FitPrivacy`."""

    privacy_: Any


@runtime_checkable
class ChargedResult(Protocol):
    """The result of a solver or a PCA: an event that was charged, under a relation."""

    event: Event
    relation: Relation
    reproducible: bool


@runtime_checkable
class Audited(Protocol):
    """An audit: `dpgrad.audit.Audit`."""

    @property
    def words(self) -> str: ...
    @property
    def refuted(self) -> bool: ...
    @property
    def not_tried(self) -> tuple[str, ...]: ...
    @property
    def guarantee(self) -> Guarantee | None: ...


@dataclass(frozen=True)
class Subject:
    """The fields of a report in which kinds of things differ; ``subject`` names the thing in a sentence."""

    kind: str
    subject: str
    guarantee: Guarantee
    method: tuple[str, str, str | None]
    release: tuple[bool | None, str]
    public: Sequence[str] = ()
    outside: Sequence[str] = ()
    preprocessing: Sequence[str] = ()
    schema: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    releases: Sequence[Mapping[str, Any]] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False  # whether dpgrad draws the noise itself, or drew it


def part(thing: object, delta: float | None, data: Dataset | None, model: Mapping[str, Any] | None) -> Subject:
    """The part of a report that depends on what kind of thing it is about; anything else is refused in one line."""
    if isinstance(thing, Audited):
        return _audit(thing)
    if isinstance(thing, Trained):
        return _run(thing, data, model)
    if isinstance(thing, Planned) and isinstance(thing.guarantee, Guarantee):
        return _plan(thing)
    if isinstance(thing, Estimator):
        return _estimator(thing)
    if isinstance(thing, Guarantee):
        return Subject("guarantee", "this result", thing, ("guarantee", "a guarantee by itself", None), (None, UNKNOWN))
    if isinstance(thing, Ledger):
        return _ledger(thing, _needed(delta, "a ledger"))
    if isinstance(thing, Mechanism):
        return _mechanism(thing, _needed(delta, "a mechanism"))
    if isinstance(thing, ChargedResult) and isinstance(thing.relation, Relation):
        return _release(thing, _needed(delta, "what a solver or a PCA returned"))
    if inner := list(_steps(thing)):
        return _pipeline(thing, inner)
    raise ReportError(_refusal(thing))


def _audit(audit: Audited) -> Subject:
    """The claim that was audited, and the words of the audit; nothing that would say more than they do."""
    if audit.guarantee is None:
        raise ReportError("this audit's claim is a curve or a pair, not a Guarantee: report the run with audit=...")
    return Subject(
        "audit", "what was audited", audit.guarantee, ("audit", "an attempt to refute the claim", None),
        (False, AUDITED), notes=[audit.words],
    )  # fmt: skip


def _refusal(thing: object) -> str:
    wanted = (
        "a report needs what dpgrad.fit returned or a fitted estimator of dpgrad.convex, a pipeline of them, the "
        "result of a solver, a plan, a mechanism, a ledger or a guarantee"
    )
    if getattr(thing, "best_estimator_", None) is not None:
        return (
            f"{wanted}: a search made many fits. Give its estimator a ledger and report that, "
            "dpgrad.report(ledger, delta=...)"
        )
    return f"{wanted}, got {_validate.shown(thing)}: {_NOT_FITTED}"


def _needed(delta: float | None, what: str) -> float:
    if delta is None:
        raise ReportError(f"delta is required for the report of {what}: the δ of the guarantee, well below 1/n")
    return delta


def priced(event: Event, relation: Relation, delta: float) -> Guarantee:
    """The guarantee by the first accountant that prices the event: the closed form, else the tightest.

    >>> from dpgrad.accounting.events import Gaussian
    >>> priced(Gaussian(4.0), Relation.ZERO_OUT, 1e-5).accountant
    'exact'
    """
    refused: DpgradError | None = None
    for name in ("exact", "pld", "rdp"):
        try:
            return Guarantee.of(account(event, relation, name), delta)
        except AccountingError as error:
            refused = refused or error
    raise refused or AccountingError("no accountant prices this event")


def _run(fitted: Trained, data: Dataset | None, model: Mapping[str, Any] | None) -> Subject:
    named, read = fitted.plan.recipe, _read(data)
    last = fitted.curves[-1].step if fitted.curves else 0
    held_out = fitted.held_out
    run = {
        "data": None if data is None else _data(data),
        "model": None if model is None else {**UNSAID, **model, "parameters": fitted.plan.parameters or 0},
        "way": None if fitted.way is None else _way(fitted.way),
        "stopped": fitted.stopped,
        "result": {
            "metric": fitted.metric,
            "held_out": _validate.json_number(held_out),
            "steps": last,
            "seconds": fitted.seconds,
        },
        "curves": [plain_values(asdict(point)) for point in fitted.curves],
        "plan": plain_values(fitted.plan.to_dict()),
    }
    return Subject(
        "run", "this model", fitted.guarantee, (named.name, named.title, named.citation), _allowed(fitted),
        [*fitted.public, *read["public"]], [*read["outside"], *fitted.outside],
        [] if data is None else [f"{data.name}: {data.preprocessing}"], _schema(data),
        [*fitted.notes, *_bounds_used(fitted.clip_bounds), *(text for _, text in fitted.plan.cautions())],
        _values(fitted.plan.mechanism), run=run, drawn=True,
    )  # fmt: skip


def _bounds_used(bounds: Sequence[Sequence[float]]) -> list[str]:
    """Which clip bounds were used, where they followed the norms: one line a group."""
    groups = list(zip(*bounds, strict=True))
    return [
        f"the clip bound{'' if len(groups) == 1 else f' of group {place}'} followed a noisy quantile of the norms, "
        f"which the steps paid for: {each[0]:.4g} at step 0, {each[-1]:.4g} at the last, between {min(each):.4g} and "
        f"{max(each):.4g}"
        for place, each in enumerate(groups)
    ]


def _allowed(fitted: Trained) -> tuple[bool, str]:
    if fitted.reproducible:
        return False, SEEDED
    return (False, UNFINISHED) if fitted.stopped == "interrupted" else (True, ALLOWED)


def _plan(plan: Planned) -> Subject:
    named = plan.recipe
    return Subject(
        "plan", "the result of this plan", plan.guarantee, (named.name, named.title, named.citation), (False, PLANNED),
        plan.public, notes=[text for _, text in plan.cautions()], values=_values(plan.mechanism),
        run={"plan": plain_values(plan.to_dict())}, drawn=True,
    )  # fmt: skip


def _mechanism(mechanism: Mechanism, delta: float) -> Subject:
    title = f"{mechanism.sampler.name} sampling, {mechanism.steps:,} steps"
    found = priced(mechanism.event(), mechanism.relation, delta)
    return Subject(
        "plan", "the result of this mechanism", found, ("mechanism", title, None), (False, PLANNED),
        values=_values(mechanism), drawn=True,
    )  # fmt: skip


def _ledger(ledger: Ledger, delta: float) -> Subject:
    entries = ledger.entries()
    found = priced(ledger.event(), ledger.relation or Relation.ADD_REMOVE, delta)
    releases = [_told_release(entry.label or "unnamed", event=entry.event) for entry in entries]
    count = f"{len(entries):,} release{'' if len(entries) == 1 else 's'} from the same rows"
    return Subject(
        "ledger", "all releases in this ledger together", found, ("ledger", count, None), (None, UNKNOWN),
        releases=releases, outside=["releases from the same rows that were not charged to this ledger"],
    )  # fmt: skip


def _release(thing: ChargedResult, delta: float) -> Subject:
    found = priced(thing.event, thing.relation, delta)
    listed: Sequence[Any] = getattr(thing, "releases", ())
    releases = [_told_release(**asdict(one), relation=thing.relation) for one in listed]
    return Subject(
        "release", "this result", found, (type(thing).__name__, getattr(thing, "title", "a release"), None),
        (False, SEEDED) if thing.reproducible else (True, RELEASED),
        outside=["what was computed from the same rows before, and choices made by looking at them"],
        values=_main(releases), releases=releases, drawn=True,
    )  # fmt: skip


def _estimator(fitted: Estimator) -> Subject:
    told = fitted.privacy_
    releases = [_told_release(**asdict(one), relation=told.guarantee.relation) for one in told.releases]
    return Subject(
        "estimator", "this model", told.guarantee, (type(fitted).__name__, told.title, None), _shareable([told]),
        told.public, told.outside, told.preprocessing, told.schema, told.notes, _main(releases), releases,
        drawn=True,
    )  # fmt: skip


def _shareable(told: Sequence[Any]) -> tuple[bool, str]:
    return (False, SEEDED) if any(one.reproducible for one in told) else (True, RELEASED)


def _steps(thing: object) -> Iterator[tuple[str, Any]]:
    """The fitted steps of a pipeline, and of what it holds, each with its name; none of anything else."""
    for place in ("steps", "transformers_", "transformer_list"):  # pipelines, column transformers, unions
        found = getattr(thing, place, None)
        for step in found if isinstance(found, list) else []:
            name, inner = step[0], step[1]
            nested = list(_steps(inner))
            yield from nested or [(str(name), inner)]


def _pipeline(thing: object, steps: list[tuple[str, Any]]) -> Subject:
    """The steps that released something, composed: a later one may depend on what an earlier one released."""
    fitted = [(name, step.privacy_) for name, step in steps if isinstance(step, Estimator)]
    others = [(name, step) for name, step in steps if not isinstance(step, Estimator | str) and step is not None]
    if not fitted:
        raise ReportError(f"{type(thing).__name__} has no fitted step of dpgrad.convex: {_NOT_FITTED}")
    promises = [told.guarantee for _, told in fitted if told.guarantee.event != NOTHING] or [fitted[0][1].guarantee]
    if len({promise.relation for promise in promises}) > 1:
        raise ReportError("the steps have different neighbouring relations: give all of them the same relation")
    event = together(*(promise.event for promise in promises))
    found = priced(event, promises[0].relation, max(promise.delta for promise in promises))
    releases = [
        _told_release(**{**asdict(one), "name": f"{name}: {one.name}"}, relation=found.relation)
        for name, told in fitted
        for one in told.releases
    ]
    for one in releases:
        one["share"] = None  # of the budget of its own step
    unpaid = [f"what the step {name} ({type(step).__name__}) learned from these rows: it added no noise"
              for name, step in others]  # fmt: skip
    gathered = {
        name: list(dict.fromkeys(fact for _, told in fitted for fact in getattr(told, name)))
        for name in ("public", "outside", "preprocessing", "notes")
    }
    release = _shareable([told for _, told in fitted])
    if unpaid and release[0]:
        release = False, UNPAID
    title = " → ".join(name for name, step in steps if not isinstance(step, str))
    return Subject(
        "pipeline", "this pipeline", found, (type(thing).__name__, title, None),
        release, gathered["public"], [*unpaid, *gathered["outside"]],
        gathered["preprocessing"], fitted[0][1].schema, gathered["notes"], _main(releases), releases, drawn=True,
    )  # fmt: skip


def _told_release(
    name: str,
    sensitivity: float | None = None,
    std: float | None = None,
    share: float | None = None,
    count: int = 1,
    sampling_rate: float = 1.0,
    relation: Relation | None = None,
    event: Event | None = None,
) -> dict[str, Any]:
    """A release in plain values; the noise multiplier is to what one row adds, under every relation."""
    reach = 1 if relation is None else relation.reach
    multiplier = None if not sensitivity or std is None else reach * std / sensitivity
    rate: float | None = sampling_rate
    if event is not None:  # of a ledger, whose entries hold nothing else
        rate, count = _sampling_rate(event), sum(leaves(event).values())
    return {
        "name": name, "sensitivity": sensitivity, "std": std, "noise_multiplier": multiplier, "sampling_rate": rate,
        "count": count, "share": share,
    }  # fmt: skip


def _sampling_rate(event: Event) -> float | None:
    """The sampling rate of an event that has one."""
    sampled = (Poisson, FixedSize, TruncatedPoisson)
    drawn = {leaf.event if isinstance(leaf, Inexact) else leaf for leaf in leaves(event)}
    rates = {leaf.sampling_rate if isinstance(leaf, sampled) else 1.0 for leaf in drawn}
    return rates.pop() if len(rates) == 1 else None


def _main(releases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of the release that takes most of the budget; no values where there is none, or shares are unknown."""
    if not releases or (len(releases) > 1 and any(one["share"] is None for one in releases)):
        return {}
    main = max(releases, key=lambda one: one["share"] or 0.0)
    clip = None if main["noise_multiplier"] is None else main["std"] / main["noise_multiplier"]
    return {
        "noise_multiplier": main["noise_multiplier"], "clip": clip, "sampling_rate": main["sampling_rate"],
        "steps": main["count"],
    }  # fmt: skip


def _values(mechanism: Mechanism) -> dict[str, Any]:
    """Of a run: at its first step, where they follow schedules."""
    groups = mechanism.groups
    return {
        "noise_multiplier": mechanism.multiplier_at(0),
        "clip": mechanism.clip_at(0) if not groups else None,
        "sampling_rate": _sampling_rate(mechanism.step_event(0)) if mechanism.steps else None,
        "steps": mechanism.steps,
    }


def _way(way: Any) -> dict[str, Any]:
    kept = way.to_release()
    return {"name": kept.name, "reason": kept.why or None, "cost": kept.cost or None}


def _data(data: Dataset) -> dict[str, Any]:
    classes = None if data.classes is None else list(data.classes)
    return {"name": data.name, "preprocessing": data.preprocessing, "split": data.split, "classes": classes}


def _schema(data: Dataset | None) -> Mapping[str, Any] | None:
    """The columns as the user declared them, where the dataset has such a declaration."""
    declared = getattr(data, "schema", None)
    if declared is None or isinstance(declared, Mapping):
        return declared
    found: Mapping[str, Any] = declared.to_dict()
    return found


def _read(data: Dataset | None) -> dict[str, list[str]]:
    """What preparing the data took to be public, and what it read from private rows without a charge."""
    if data is None:
        return {"public": [], "outside": []}
    private = data.outside_guarantee
    return {
        "public": [entry for entry in data.public if entry not in (*private, ROW_COUNTS)],  # the plan has their number
        "outside": [entry.removeprefix(OUTSIDE) for entry in private],
    }


def plain_values(value: Any) -> Any:
    """Plain values for JSON: null for an infinite number, lists for tuples and arrays, text for anything else.

    >>> plain_values({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    match value:
        case Mapping():
            return {str(name): plain_values(inner) for name, inner in value.items()}
        case str() | bool() | int() | None:
            return value
        case float():
            return _validate.json_number(value)
        case list() | tuple() | set() | frozenset() | range():
            return [plain_values(inner) for inner in value]
        case _ if (tolist := getattr(value, "tolist", None)) is not None:  # numpy's numbers and arrays
            return plain_values(tolist())
        case _:
            return str(value)
