"""Events, the input of every accountant: what was released, in public numbers, and for which neighbouring datasets.

A leaf is one application of a mechanism; `Repeat` and `Compose` count leaves. Accountants price one leaf and leave the
counting to `fold`. No accountant opens a `Repeat` or a `Compose` itself, so none can forget a count.

A noise multiplier is std/clip under every relation, where clip bounds the norm of one example's contribution. The
relation changes the price only.

>>> run = Repeat(Poisson(0.01, Gaussian(1.0)), 1000)
>>> from_json(to_json(run)) == run
True
"""

import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from dpgrad import _validate
from dpgrad.accounting.relation import Relation, declared
from dpgrad.accounting.releases import DiscreteGaussian, Exponential, Laplace, RandomizedResponse
from dpgrad.accounting.trials import Trials, trials_from_dict, trials_to_dict
from dpgrad.errors import AccountingError, OptionError

__all__ = [
    "NOTHING",
    "Approximate",
    "Compose",
    "Counted",
    "DiscreteGaussian",
    "Event",
    "Exponential",
    "FixedSize",
    "Gaussian",
    "Inexact",
    "Laplace",
    "Leaf",
    "Noised",
    "Others",
    "Pinned",
    "Poisson",
    "Priced",
    "RandomizedResponse",
    "Relation",
    "Repeat",
    "Selection",
    "Shifted",
    "Shuffle",
    "TruncatedPoisson",
    "expanded",
    "fold",
    "from_dict",
    "from_json",
    "group_multiplier",
    "grouped",
    "leaves",
    "tally",
    "to_dict",
    "to_json",
    "together",
]  # fmt: skip

# beyond these nothing can be priced in floating point, and nothing is private or useful
LEAST_NOISE, MOST_NOISE = 1e-6, 1e12


@dataclass(frozen=True)
class Gaussian:
    """A sum of clipped contributions of all rows, plus Gaussian noise of ``noise_multiplier`` times the clip bound.

    >>> Gaussian(noise_multiplier=4.0)
    Gaussian(noise_multiplier=4.0)
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _validate.positive(noise_multiplier=self.noise_multiplier)
        if not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE:
            bounds = f"between {LEAST_NOISE:g} and {MOST_NOISE:g}"
            raise OptionError(f"noise_multiplier must lie {bounds}, got {self.noise_multiplier!r}: std/clip, not std")
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))


@dataclass(frozen=True)
class Poisson:
    """``event`` applied to a sample that holds each row independently with probability ``sampling_rate``."""

    sampling_rate: float
    event: Gaussian

    def __post_init__(self) -> None:
        _validate.unit_interval(sampling_rate=self.sampling_rate)
        _inner_gaussian(self.event)
        object.__setattr__(self, "sampling_rate", float(self.sampling_rate))


@dataclass(frozen=True)
class TruncatedPoisson:
    """``event`` applied to a Poisson sample of which at most ``batch_size`` rows, chosen at random, are kept.

    ``dataset_size`` is the number of rows; under add/remove, a declared bound on it. Cutting a sample lets one
    row push out another, so it costs more than Poisson sampling (Ganesh et al. 2025). If samples are almost never too
    large, the difference is negligible.

    >>> TruncatedPoisson(0.01, 10_000, 150, Gaussian(1.0)).batch_size
    150
    """

    sampling_rate: float
    dataset_size: int
    batch_size: int
    event: Gaussian

    def __post_init__(self) -> None:
        _validate.unit_interval(sampling_rate=self.sampling_rate)
        _validate.whole(least=1, most=10**15, dataset_size=self.dataset_size, batch_size=self.batch_size)
        _inner_gaussian(self.event)
        object.__setattr__(self, "sampling_rate", float(self.sampling_rate))
        object.__setattr__(self, "dataset_size", operator.index(self.dataset_size))
        object.__setattr__(self, "batch_size", operator.index(self.batch_size))


@dataclass(frozen=True)
class FixedSize:
    """``event`` applied to ``batch_size`` rows drawn without replacement from ``dataset_size``; replace-one only."""

    dataset_size: int
    batch_size: int
    event: Gaussian

    def __post_init__(self) -> None:
        _validate.whole(least=1, dataset_size=self.dataset_size, batch_size=self.batch_size)
        _validate.whole(most=self.dataset_size, batch_size=self.batch_size)
        _inner_gaussian(self.event)
        object.__setattr__(self, "dataset_size", operator.index(self.dataset_size))
        object.__setattr__(self, "batch_size", operator.index(self.batch_size))

    @property
    def sampling_rate(self) -> float:
        return self.batch_size / self.dataset_size


@dataclass(frozen=True)
class Shuffle:
    """One epoch: the rows are shuffled, cut into ``batches`` batches, and ``event`` is applied to each batch.

    Every row is in at most one batch. The price is that of one Gaussian per epoch, never that of Poisson sampling,
    which also hides who took part.
    """

    batches: int
    event: Gaussian

    def __post_init__(self) -> None:
        _validate.whole(least=1, batches=self.batches)
        _inner_gaussian(self.event)
        object.__setattr__(self, "batches", operator.index(self.batches))


@dataclass(frozen=True)
class Approximate:
    """A release of which only (``epsilon``, ``delta``)-privacy under ``relation`` is known.

    ``delta`` = 0 is pure ``epsilon``-privacy. The event has no price under another relation.

    >>> Approximate(1.0, 0, Relation.REPLACE_ONE)
    Approximate(epsilon=1.0, delta=0.0, relation=<Relation.REPLACE_ONE: 'replace-one'>)
    """

    epsilon: float
    delta: float
    relation: Relation

    def __post_init__(self) -> None:
        _validate.non_negative(epsilon=self.epsilon, delta=self.delta)
        if self.delta >= 1:
            raise OptionError(f"delta must be below 1, got {_validate.shown(self.delta)}")
        object.__setattr__(self, "epsilon", float(self.epsilon))
        object.__setattr__(self, "delta", float(self.delta))
        object.__setattr__(self, "relation", declared(self.relation))


@dataclass(frozen=True)
class Shifted:
    """A release whose privacy loss exceeds the positive part of that of ``event`` by at most ``shift``.

    Its δ(ε) is at most the Gaussian's δ(ε − shift) for every ε ≥ shift. Objective perturbation is of this kind: its
    privacy loss has a Jacobian term besides the noise (`dpgrad.convex.solvers.objective`).

    >>> Shifted(0.1, Gaussian(50.0)).event
    Gaussian(noise_multiplier=50.0)
    """

    shift: float
    event: Gaussian

    def __post_init__(self) -> None:
        _validate.non_negative(shift=self.shift)
        if not isinstance(self.event, Gaussian):
            raise AccountingError(f"only a Gaussian can be shifted, got {_validate.shown(self.event)}")
        object.__setattr__(self, "shift", float(self.shift))


@dataclass(frozen=True)
class Pinned:
    """A Gaussian release whose noise multiplier holds under one ``relation`` only.

    A sum of clipped rows moves twice as far under replace-one as under the other relations. A release such as XᵀX does
    not follow that rule: its multiplier differs by relation, and it has no price under a relation it was not made for.

    >>> Pinned(Gaussian(50.0), "zero-out").relation.value
    'zero-out'
    """

    event: Gaussian
    relation: Relation

    def __post_init__(self) -> None:
        if not isinstance(self.event, Gaussian):
            raise AccountingError(f"only a Gaussian can be pinned, got {_validate.shown(self.event)}")
        object.__setattr__(self, "relation", declared(self.relation))


@dataclass(frozen=True)
class Selection:
    """The best of a random number of trials, each of which is one of ``events``, drawn uniformly.

    ``trials`` is the law of their number (`dpgrad.accounting.trials`). Only the best trial is released: neither the
    others nor how many there were. Accountant rdp prices it (Papernot and Steinke, 2022).

    >>> from dpgrad.accounting.trials import PoissonTrials
    >>> Selection((Gaussian(9.0), Repeat(Gaussian(20.0), 4)), PoissonTrials(5.0)).trials.mean
    5.0
    """

    events: tuple["Event", ...]
    trials: Trials

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        if not self.events:
            raise AccountingError("a selection needs at least one event to choose from")
        for event in self.events:
            _known(event)
            if any(isinstance(leaf, Inexact) for leaf in leaves(event)):
                raise AccountingError(
                    "a selection among trials with secure noise has no price: choose among trials with ordinary noise"
                )
        if not isinstance(self.trials, Trials):
            raise AccountingError(
                f"trials must be a law of dpgrad.accounting.trials, got {_validate.shown(self.trials)}"
            )


@dataclass(frozen=True)
class Inexact:
    """``event``, whose noise follows another law than assumed with probability at most ``distance``.

    That probability does not depend on the data. So δ(ε) is at most that of ``event`` plus ``distance``, which
    `dpgrad.accounting.account` adds for every accountant (docs/proofs/secure_noise.md, section 1).

    >>> Inexact(Gaussian(4.0), 1e-17).event
    Gaussian(noise_multiplier=4.0)
    """

    event: Gaussian | Poisson | FixedSize | Shuffle | Pinned
    distance: float

    def __post_init__(self) -> None:
        if not isinstance(self.event, Gaussian | Poisson | FixedSize | Shuffle | Pinned):
            raise AccountingError(f"only noise on a sum can be inexact, got {_validate.shown(self.event)}")
        _validate.unit_interval(distance=self.distance)
        object.__setattr__(self, "distance", float(self.distance))


@dataclass(frozen=True)
class Repeat:
    """``event`` applied ``count`` times with fresh randomness; each may depend on earlier outputs."""

    event: "Event"
    count: int

    def __post_init__(self) -> None:
        _validate.whole(least=0, count=self.count)
        _known(self.event)
        object.__setattr__(self, "count", operator.index(self.count))


@dataclass(frozen=True)
class Compose:
    """All of ``events``; each may depend on earlier outputs. ``Compose(())`` releases nothing."""

    events: tuple["Event", ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        for event in self.events:
            _known(event)


_Price = TypeVar("_Price")
Counted = TypeVar("Counted")
_Total = TypeVar("_Total")
Priced = TypeVar("Priced", bound=Hashable)
Noised = Gaussian | Poisson | FixedSize | Shuffle | Pinned
Others = Laplace | DiscreteGaussian | RandomizedResponse | Exponential | TruncatedPoisson
Leaf = Noised | Approximate | Shifted | Selection | Others | Inexact
Event = Leaf | Repeat | Compose

NOTHING = Compose(())
_EVENTS = get_args(Event)


def _known(event: object) -> None:
    if not isinstance(event, _EVENTS):
        raise AccountingError(
            f"unknown event {_validate.shown(event)}: expected one of {', '.join(t.__name__ for t in _EVENTS)}"
        )


def _inner_gaussian(event: object) -> None:
    if not isinstance(event, Gaussian):
        raise AccountingError(
            f"only a Gaussian can be sampled, got {_validate.shown(event)}: sample it once, where the batch is drawn"
        )


def fold(
    event: Event,
    leaf: Callable[[Leaf], _Price],
    repeat: Callable[[_Price, int], Counted],
    combine: Callable[[Iterable[Counted]], _Total],
) -> _Total:
    """Reduce an event tree: ``leaf`` prices one application, ``repeat`` multiplies a price, ``combine`` adds them up.

    Composition costs the same in any order, so equal leaves are first counted together, wherever they are in the tree.
    Each distinct leaf is priced once, in order of first application. A leaf that is never applied is not priced.

    >>> fold(Repeat(Compose((Gaussian(1.0), Gaussian(2.0))), 3), lambda _: 1, lambda x, n: n * x, sum)
    6
    """
    counts: dict[Leaf, int] = {}
    stack: list[tuple[Event, int]] = [(event, 1)]  # no recursion: a tree may be deeper than Python's stack
    while stack:
        node, times = stack.pop()
        match node:
            case Repeat(inner, count):
                stack.append((inner, times * count))
            case Compose(events):
                stack.extend((e, times) for e in reversed(events))
            case _:
                _known(node)
                if times:
                    counts[node] = counts.get(node, 0) + times
    return combine(repeat(leaf(one), count) for one, count in counts.items())


def tally(event: Event, price: Callable[[Leaf], Priced]) -> Counter[Priced]:
    """Count how often each price occurs: `fold` for prices that do not add.

    >>> tally(Repeat(Compose((Gaussian(1.0), Gaussian(2.0))), 5), lambda leaf: type(leaf).__name__)
    Counter({'Gaussian': 10})
    """
    counts: Counter[Priced] = Counter()

    def add(parts: Iterable[tuple[Priced, int]]) -> Counter[Priced]:
        for one, count in parts:
            counts[one] += count
        return counts

    return fold(event, price, lambda one, count: (one, count), add)


def leaves(event: Event) -> Counter[Leaf]:
    """Count how often each distinct leaf is applied.

    >>> leaves(Repeat(Compose((Gaussian(1.0), Gaussian(2.0), Gaussian(1.0))), 5))
    Counter({Gaussian(noise_multiplier=1.0): 10, Gaussian(noise_multiplier=2.0): 5})
    """
    return tally(event, lambda leaf: leaf)


def grouped(steps: Iterable[Leaf]) -> Event:
    """Return the composition of ``steps``, with consecutive equal steps counted together.

    >>> grouped([Gaussian(1.0), Gaussian(1.0), Gaussian(2.0)]) == Compose(
    ...     (Repeat(Gaussian(1.0), 2), Repeat(Gaussian(2.0), 1))
    ... )
    True
    """
    runs: list[tuple[Leaf, int]] = []
    for step in steps:
        if runs and runs[-1][0] == step:
            runs[-1] = (step, runs[-1][1] + 1)
        else:
            runs.append((step, 1))
    return together(*(Repeat(step, count) for step, count in runs))


def together(*events: Event) -> Event:
    """Return the composition of ``events`` without those that release nothing; of a single one, that event.

    >>> together(NOTHING, Gaussian(2.0)), together() == NOTHING
    (Gaussian(noise_multiplier=2.0), True)
    """
    kept = tuple(event for event in events if event != NOTHING)
    return kept[0] if len(kept) == 1 else Compose(kept)


def expanded(event: Event) -> list[Leaf]:
    """Return the leaves that `grouped` put together, in order.

    >>> expanded(Repeat(Gaussian(1.0), 2))
    [Gaussian(noise_multiplier=1.0), Gaussian(noise_multiplier=1.0)]
    """
    match event:
        case Repeat(inner, count):
            return expanded(inner) * count
        case Compose(events):
            return [leaf for inner in events for leaf in expanded(inner)]
        case _:
            return [event]


def group_multiplier(multipliers: Iterable[float]) -> float:
    """Return the noise multiplier of parameter groups that are clipped and noised separately: 1/√Σ z_g⁻².

    One example moves group g by at most C_g, so the sum scaled by 1/std_g moves by at most √Σ(C_g/std_g)².

    >>> group_multiplier([2.0, 2.0])  # doctest: +ELLIPSIS
    1.41421356...
    """
    values = list(multipliers)
    if not values:
        raise OptionError("groups must not be empty: give one noise multiplier a group")
    for value in values:
        _validate.positive(noise_multiplier=value)
    return 1 / math.sqrt(math.fsum(value**-2 for value in values))


def to_dict(event: Event) -> dict[str, Any]:
    """Return the event as plain dictionaries, for JSON."""
    _known(event)
    kind, fields = next((name, fields) for name, (made, fields) in _FIELDS.items() if type(event) is made)
    return {"type": kind, **{field: _plain(getattr(event, field)) for field in fields}}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Relation):
        return value.value
    if isinstance(value, Trials):
        return trials_to_dict(value)
    return to_dict(value) if isinstance(value, _EVENTS) else value


_FIELDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "gaussian": (Gaussian, ("noise_multiplier",)),
    "poisson": (Poisson, ("sampling_rate", "event")),
    "truncated-poisson": (TruncatedPoisson, ("sampling_rate", "dataset_size", "batch_size", "event")),
    "fixed-size": (FixedSize, ("dataset_size", "batch_size", "event")),
    "shuffle": (Shuffle, ("batches", "event")),
    "approximate": (Approximate, ("epsilon", "delta", "relation")),
    "shifted": (Shifted, ("shift", "event")),
    "pinned": (Pinned, ("relation", "event")),
    "selection": (Selection, ("events", "trials")),
    "laplace": (Laplace, ("noise_multiplier",)),
    "discrete-gaussian": (DiscreteGaussian, ("sigma", "sensitivity")),
    "randomized-response": (RandomizedResponse, ("noise", "categories")),
    "exponential": (Exponential, ("epsilon", "relation")),
    "inexact": (Inexact, ("distance", "event")),
    "repeat": (Repeat, ("count", "event")),
    "compose": (Compose, ("events",)),
}


def from_dict(data: object) -> Event:
    """Return the event that `to_dict` wrote; refuse anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("type"), str) or data["type"] not in _FIELDS:
        raise AccountingError(
            f"not an event: {_validate.shown(data)}; expected an object whose type is one of {', '.join(_FIELDS)}"
        )
    kind, fields = _FIELDS[data["type"]]
    given = {name: value for name, value in data.items() if name != "type"}
    if given.keys() != set(fields):
        shown = _validate.shown(sorted(map(str, given)))
        raise AccountingError(f"event of type {data['type']} must have fields {sorted(fields)}, got {shown}")
    if "event" in given:
        given["event"] = from_dict(given["event"])
    if "events" in given:
        if not isinstance(given["events"], list):
            raise AccountingError(f"events must be a list, got {_validate.shown(given['events'])}")
        given["events"] = tuple(from_dict(e) for e in given["events"])
    if "trials" in given:
        given["trials"] = trials_from_dict(given["trials"])
    event: Event = kind(**given)
    return event


def to_json(event: Event) -> str:
    """Return the event as one line of JSON; floats keep every bit."""
    return json.dumps(to_dict(event), allow_nan=False)


def from_json(text: str) -> Event:
    """Return the event that `to_json` wrote."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise AccountingError("not an event: nested too deeply") from None
    except ValueError as error:
        raise AccountingError(f"not an event: {error}") from None
    try:
        return from_dict(data)
    except RecursionError:
        raise AccountingError("not an event: nested too deeply") from None
