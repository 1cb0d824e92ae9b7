"""Samplers: each draws the batches of a run *and* states the event that the drawing causes.

The batch of a step is a pure function of (secret run key, step). A process that has the key can redraw any step, in any
order. The rows drawn, and their number, are secret.

>>> sampler = Poisson(sampling_rate=0.01)
>>> batch = sampler.draw(rows=60_000, step=7, key=b"the secret of this run")
>>> bool((batch == sampler.draw(rows=60_000, step=7, key=b"the secret of this run")).all())
True
>>> sampler.event(noise_multiplier=1.0)
Poisson(sampling_rate=0.01, event=Gaussian(noise_multiplier=1.0))

The generator is Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by 128
bits of a hash of the run key: good statistics, not a cryptographic stream. A key that is `Key.secured` draws from the
ChaCha20 stream in its place.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.accounting import events
from dpgrad.accounting.events import Relation
from dpgrad.errors import OptionError
from dpgrad.mechanism import chacha, schedules
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.mechanism.schedules import Array, Schedule

__all__ = [
    "KINDS",
    "MOST_ROWS",
    "FixedSize",
    "FullBatch",
    "Indices",
    "Poisson",
    "Sampler",
    "Shuffle",
    "Words",
    "from_dict",
    "generator",
    "philox_key",
    "threshold",
    "to_dict",
    "words",
]  # fmt: skip

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]
MOST_ROWS = 1 << 62
_CHUNK = 1 << 18  # words held at a time
T = TypeVar("T")
_new, _set = object.__new__, object.__setattr__


class Sampler(Protocol):
    """The interface of a sampler. Its fields are public; the rows it draws are not."""

    @property
    def name(self) -> str:
        """The name on the command line."""

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations under which its event has a price."""

    @property
    def span(self) -> int:
        """The number of steps that one event covers: an epoch for shuffled batches, one for every other sampler."""

    @property
    def steady(self) -> bool:
        """Whether all steps draw from the same distribution."""

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps that draw as many rows as the dataset has."""

    @property
    def batch_size(self) -> int | None:
        """The public size of every batch; None if the size is not fixed in advance."""

    def draw(self, rows: int, step: int, key: AnyKey) -> Indices:
        """Return the row indices of one step, in ascending order."""

    def event(self, noise_multiplier: float, step: int = 0) -> events.Leaf:
        """Return the event of the span of steps that begins at ``step``."""

    def plan(self, multipliers: Array, start: int = 0) -> Iterator[tuple[events.Leaf, int]]:
        """Yield the events from ``start`` on, for one noise multiplier per step; consecutive equal ones are counted."""


def philox_key(key: AnyKey) -> Words:
    """Return the two words that key the Philox generator of a run's samplers; as secret as the key.

    >>> len(philox_key(5))
    2
    """
    return np.frombuffer(Key.of(key).derive("sampling", size=16), "<u8")


def _philox(key: AnyKey, step: int, block: int = 0) -> np.random.Philox:
    """The generator of one step, ``block`` blocks of four words on; a step has 2^128 blocks of its own."""
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    return np.random.Philox(key=philox_key(key), counter=np.array([block, 0, step, 0], np.uint64))


def generator(key: AnyKey, step: int) -> np.random.Generator:
    """Return the random generator for sampling at ``step``: a stream of its own of the run's Philox generator.

    >>> generator(5, step=3).integers(1000, size=3).tolist() == generator(5, step=3).integers(1000, size=3).tolist()
    True
    """
    return np.random.Generator(_philox(key, step))


def words(key: AnyKey, step: int, start: int, count: int) -> Words:
    """Return words ``start`` to ``start + count`` of the stream of ``step``: 64 uniform bits for each of these rows.

    Setting the generator's counter gives any range directly. The words of a secured key are those of ChaCha20.

    >>> words(5, step=3, start=0, count=9)[6:].tolist() == words(5, step=3, start=6, count=3).tolist()
    True
    """
    _validate.whole(most=MOST_ROWS, start=start, count=count)
    if (own := Key.of(key)).secure:
        _validate.whole(most=_validate.MOST_STEPS, step=step)
        return _secure_words(own, start, count, str(step))
    block, skipped = divmod(start, 4)
    return _philox(key, step, block).random_raw(skipped + count)[skipped:]


def _secure_words(key: Key, start: int, count: int, *names: str) -> Words:
    """Words of the ChaCha20 stream of these names."""
    block, skipped = divmod(start, chacha.BLOCK)
    blocks = -(-(skipped + count) // chacha.BLOCK)
    found = chacha.words(key.derive("secure sampling", *names), block, blocks)
    return found.reshape(-1)[skipped : skipped + count]


def threshold(sampling_rate: float) -> int:
    """Return floor(q·2^64), q the sampling rate: a uniform word lies below it with probability q, within 2^-64.

    >>> threshold(0.5) == 2**63, threshold(1.0) == 2**64, threshold(0.0)
    (True, True, 0)
    """
    _validate.unit_interval(sampling_rate=sampling_rate)
    return int(math.ldexp(sampling_rate, 64))


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: every row is in every batch independently with probability ``sampling_rate``.

    Batch sizes vary. The rate may be a schedule. Under add-remove it must be a constant, not computed from the number
    of rows.

    Guarantee: row i takes part iff word i of the step's stream lies below floor(q·2^64). The words are outputs of one
    keyed generator at distinct counters, one per row and step. The indicators are therefore independent of each other,
    of the data and of the number of rows, as the event assumes. No row is more likely than q, and a smaller q never
    costs more. With the same key, every process draws the same rows, whichever range of rows it has.

    >>> Poisson(0.01).steps_per_epoch
    100.0
    """

    sampling_rate: float | Schedule
    name: ClassVar[str] = "poisson"
    relations: ClassVar[tuple[Relation, ...]] = tuple(Relation)
    span: ClassVar[int] = 1
    batch_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not callable(self.sampling_rate):
            _validate.unit_interval(sampling_rate=self.sampling_rate)
            object.__setattr__(self, "sampling_rate", float(self.sampling_rate))
        self.sampling_rate_at(0)

    @property
    def steady(self) -> bool:
        return schedules.is_constant(self.sampling_rate)

    @property
    def steps_per_epoch(self) -> float:
        if not self.steady:
            raise OptionError(
                "steps_per_epoch is not defined where sampling_rate is a schedule: give the number of steps"
            )
        sampling_rate = self.sampling_rate_at(0)
        return 1 / sampling_rate if sampling_rate else math.inf

    def sampling_rate_at(self, step: int) -> float:
        """The sampling rate of one step."""
        return float(self._rates(1, step)[0])

    def _rates(self, steps: int, start: int) -> Array:
        if not callable(self.sampling_rate):
            return np.full(steps, self.sampling_rate)
        rates = schedules.values(self.sampling_rate, steps, start, "sampling_rate", zero=True)
        if not (rates <= 1).all():
            first = int(np.argmax(rates > 1))
            raise OptionError(f"sampling_rate at step {start + first} must lie in [0, 1], got {float(rates[first])!r}")
        return rates

    def draw(self, rows: int, step: int, key: AnyKey) -> Indices:
        _validate.whole(rows=rows)
        below = threshold(self.sampling_rate_at(step))
        drawn = [
            start + np.flatnonzero(words(key, step, start, min(_CHUNK, rows - start)) < below)
            for start in range(0, max(rows, 1), _CHUNK)
        ]
        return np.concatenate(drawn)

    def event(self, noise_multiplier: float, step: int = 0) -> events.Poisson:
        return events.Poisson(self.sampling_rate_at(step), events.Gaussian(noise_multiplier))

    def plan(self, multipliers: Array, start: int = 0) -> Iterator[tuple[events.Poisson, int]]:
        rates = self._rates(len(multipliers), start)
        for i, count in _runs(_checked(multipliers, start), rates):
            yield _leaf(events.Poisson, sampling_rate=float(rates[i]), event=_gaussian(multipliers[i])), count


@dataclass(frozen=True)
class FixedSize:
    """Fixed-size sampling: ``batch_size`` of ``dataset_size`` rows per step, without replacement; replace-one only.

    It costs far more than Poisson sampling at the same rate: replacing one row moves the sum by up to twice the clip.

    >>> len(FixedSize(dataset_size=1000, batch_size=50).draw(rows=1000, step=0, key=1))
    50
    """

    dataset_size: int
    batch_size: int
    name: ClassVar[str] = "fixed-size"
    relations: ClassVar[tuple[Relation, ...]] = (Relation.REPLACE_ONE,)
    span: ClassVar[int] = 1
    steady: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _sizes(self.dataset_size, self.batch_size)

    @property
    def steps_per_epoch(self) -> float:
        return self.dataset_size / self.batch_size

    def draw(self, rows: int, step: int, key: AnyKey) -> Indices:
        _same_rows(rows, self.dataset_size)
        return _chosen(Key.of(key), step, rows, self.batch_size)

    def event(self, noise_multiplier: float, step: int = 0) -> events.FixedSize:
        return events.FixedSize(self.dataset_size, self.batch_size, events.Gaussian(noise_multiplier))

    def plan(self, multipliers: Array, start: int = 0) -> Iterator[tuple[events.FixedSize, int]]:
        sizes = {"dataset_size": self.dataset_size, "batch_size": self.batch_size}
        for i, count in _runs(_checked(multipliers, start)):
            yield _leaf(events.FixedSize, **sizes, event=_gaussian(multipliers[i])), count


@dataclass(frozen=True)
class FullBatch:
    """All rows at every step.

    >>> FullBatch().event(4.0)
    Gaussian(noise_multiplier=4.0)
    """

    name: ClassVar[str] = "full-batch"
    relations: ClassVar[tuple[Relation, ...]] = tuple(Relation)
    span: ClassVar[int] = 1
    steady: ClassVar[bool] = True
    steps_per_epoch: ClassVar[float] = 1.0
    batch_size: ClassVar[None] = None

    def draw(self, rows: int, step: int, key: AnyKey) -> Indices:
        _validate.whole(rows=rows)
        return np.arange(rows, dtype=np.int64)

    def event(self, noise_multiplier: float, step: int = 0) -> events.Gaussian:
        return events.Gaussian(noise_multiplier)

    def plan(self, multipliers: Array, start: int = 0) -> Iterator[tuple[events.Gaussian, int]]:
        for i, count in _runs(_checked(multipliers, start)):
            yield _gaussian(multipliers[i]), count


@dataclass(frozen=True)
class Shuffle:
    """Shuffled epochs: the rows in a new random order, cut into batches of ``batch_size``; the last may be smaller.

    Guarantee: each row is in one batch per epoch. The event is one Gaussian per epoch, at the least noise multiplier of
    its steps. An unfinished epoch costs as much as a whole one. dpgrad claims no amplification by shuffling: pricing
    this as Poisson sampling can understate ε several times.

    >>> Shuffle(dataset_size=1000, batch_size=300).event(1.0)
    Shuffle(batches=4, event=Gaussian(noise_multiplier=1.0))
    """

    dataset_size: int
    batch_size: int
    name: ClassVar[str] = "shuffle"
    relations: ClassVar[tuple[Relation, ...]] = (Relation.ZERO_OUT, Relation.REPLACE_ONE)
    steady: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _sizes(self.dataset_size, self.batch_size)

    @property
    def span(self) -> int:
        return -(-self.dataset_size // self.batch_size)

    @property
    def steps_per_epoch(self) -> float:
        return float(self.span)

    def draw(self, rows: int, step: int, key: AnyKey) -> Indices:
        _same_rows(rows, self.dataset_size)
        _validate.whole(step=step)
        epoch, batch = divmod(step, self.span)
        order = _permutation(rows, epoch, Key.of(key))
        return np.sort(order[batch * self.batch_size : (batch + 1) * self.batch_size])

    def event(self, noise_multiplier: float, step: int = 0) -> events.Shuffle:
        return events.Shuffle(self.span, events.Gaussian(noise_multiplier))

    def plan(self, multipliers: Array, start: int = 0) -> Iterator[tuple[events.Shuffle, int]]:
        """Yield one event per epoch; ``start`` must be the first step of an epoch."""
        if start % self.span:
            raise OptionError(f"start must be the first step of an epoch of {self.span} batches, got {start}")
        checked = _checked(multipliers, start)
        least = np.minimum.reduceat(checked, np.arange(0, len(checked), self.span)) if len(checked) else checked
        for i, count in _runs(least):
            yield _leaf(events.Shuffle, batches=self.span, event=_gaussian(least[i])), count


def _sizes(dataset_size: int, batch_size: int) -> None:
    _validate.whole(least=1, dataset_size=dataset_size, batch_size=batch_size)
    if batch_size > dataset_size:
        raise OptionError(f"batch_size must be at most dataset_size = {dataset_size:,}, got {batch_size:,}")


def _same_rows(rows: int, dataset_size: int) -> None:
    _validate.whole(rows=rows)
    if rows != dataset_size:
        raise OptionError(f"rows must equal the declared dataset_size = {dataset_size:,}, got {rows:,}")


def _chosen(key: Key, step: int, rows: int, count: int) -> Indices:
    """``count`` of ``rows``, uniformly without replacement, rising; quick where count is far below rows."""
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    if count == rows:
        return np.arange(rows, dtype=np.int64)
    if key.secure:
        return np.sort(_secure_order(key, step, rows)[:count])
    return np.sort(generator(key, step).choice(rows, count, replace=False, shuffle=False))


def _secure_order(key: Key, step: int, rows: int) -> Indices:
    """The rows in a uniformly random order: that of one word each, drawn again where two are equal."""
    for tried in itertools.count():
        words = _secure_words(key, 0, rows, str(step), "order", str(tried))
        order = np.argsort(words)
        if not (words[order[1:]] == words[order[:-1]]).any():
            return order
    raise AssertionError("unreachable")


@lru_cache(maxsize=2)
def _permutation(rows: int, epoch: int, key: Key) -> Indices:
    """The order of one epoch; kept while its batches are drawn. Never handed out: callers copy a piece."""
    return _secure_order(key, epoch, rows) if key.secure else generator(key, epoch).permutation(rows)


def _checked(multipliers: Array, start: int) -> Array:
    """The multipliers, refused where one is not a price: what follows builds events without asking again."""
    good = np.isfinite(multipliers) & (multipliers > 0)
    if not good.all():
        first = int(np.argmin(good))
        value = float(multipliers[first])
        raise OptionError(f"noise_multiplier at step {start + first} must be positive and finite, got {value!r}")
    return multipliers


def _runs(*columns: Array) -> Iterator[tuple[int, int]]:
    """Where a run of equal rows begins, and how long it is."""
    if not len(columns[0]):
        return
    changed = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    starts = np.concatenate([[0], np.flatnonzero(changed) + 1, [len(columns[0])]])
    yield from zip(starts[:-1].tolist(), np.diff(starts).tolist(), strict=True)


def _gaussian(multiplier: float) -> events.Gaussian:
    return _leaf(events.Gaussian, noise_multiplier=float(multiplier))


def _leaf(kind: type[T], **fields: object) -> T:
    """A leaf whose fields have been checked as arrays: checking each again takes a minute for a million steps."""
    made = _new(kind)
    for name, value in fields.items():
        _set(made, name, value)
    return made


KINDS = (Poisson, FixedSize, FullBatch, Shuffle)
_NAMES = {kind.name: kind for kind in KINDS}


def to_dict(sampler: Sampler) -> dict[str, Any]:
    """Return the sampler as plain values, for JSON.

    >>> to_dict(Poisson(0.01))
    {'sampler': 'poisson', 'sampling_rate': 0.01}
    """
    match sampler:
        case Poisson(sampling_rate):
            return {"sampler": sampler.name, "sampling_rate": schedules.to_plain(sampling_rate, "sampling_rate")}
        case FixedSize(dataset_size, batch_size) | Shuffle(dataset_size, batch_size):
            return {"sampler": sampler.name, "dataset_size": dataset_size, "batch_size": batch_size}
        case FullBatch():
            return {"sampler": sampler.name}
        case _:
            raise OptionError(f"unknown sampler {sampler!r}: expected one of {', '.join(_NAMES)}")


def from_dict(data: object) -> Poisson | FixedSize | FullBatch | Shuffle:
    """Return the sampler that `to_dict` wrote; refuse anything else.

    >>> from_dict({"sampler": "full-batch"})
    FullBatch()
    """
    if not isinstance(data, Mapping) or str(data.get("sampler")) not in _NAMES:
        raise OptionError(
            f"not a sampler: {data!r:.80}; expected an object whose sampler is one of {', '.join(_NAMES)}"
        )
    fields = {name: value for name, value in data.items() if name != "sampler"}
    if "sampling_rate" in fields:
        fields["sampling_rate"] = schedules.from_plain(fields["sampling_rate"])
    kind: Any = _NAMES[str(data["sampler"])]
    try:
        made: Poisson | FixedSize | FullBatch | Shuffle = kind(**fields)
    except TypeError:
        raise OptionError(f"sampler {data['sampler']} cannot be made of fields {sorted(map(str, fields))}") from None
    return made
