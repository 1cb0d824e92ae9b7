"""The privacy loss distribution accountant: an estimate, and bounds that contain the truth. The default.

The loss of a composition is the sum of its steps' losses, so its distribution is a convolution, and δ(ε) is
E(1 − e^{ε−L})₊. `contour` estimates it, `certify` bounds it from both sides; what is reported is the upper bound.

Both directions (one row more, one row less) are priced and the worse is reported. The lower bound is that of a concrete
pair of neighbours: under Poisson sampling and full batches it is the worst one, so the interval is narrow; for
fixed-size and shuffled batches the worst is not known, and the interval says how much room is left.

Releases that are no Gaussian noise on a sum (approximate and shifted leaves) compose with full batches in the closed
form of `accounting.exact`, and with sampled steps by adding up: half of δ for each side. Their lower bound is zero.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from dpgrad import _validate
from dpgrad.accounting import exact, losses, pairs, rdp
from dpgrad.accounting.events import (
    Approximate,
    Compose,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Leaf,
    RandomizedResponse,
    Relation,
    Repeat,
    Shifted,
    Shuffle,
    TruncatedPoisson,
    leaves,
)
from dpgrad.accounting.pairs import Array, Kind, Pair, TooLittleNoise
from dpgrad.accounting.pld import contour, single
from dpgrad.accounting.pld.blends import Blend, BlendPart, Step
from dpgrad.accounting.pld.certify import PRECISION, Bound, Lower, Upper, bounds, epsilon_at
from dpgrad.errors import AccountingError, OptionError

__all__ = ["NAME", "DeltaAt", "EpsilonAt", "Interval", "PldProfile", "Question", "Side", "account"]

NAME = "pld"
_COARSE = 1e-2
_LEAST_NOISE = 0.02
_LEAST_DELTA = 1e-280
_TAIL = 1e-5  # of δ, given up to losses too large for the lattice


class Interval(NamedTuple):
    """``lower`` ≤ truth ≤ ``upper``. ``estimate`` is of what ``upper`` bounds."""

    lower: float
    estimate: float
    upper: float


@dataclass(frozen=True)
class PldProfile:
    """The privacy profile of ``event`` under ``relation``; ``precision`` is the relative width asked of the bounds."""

    event: Event
    relation: Relation
    precision: float = PRECISION
    accountant: str = NAME
    guarantee: bool = True
    group: int = 1  # rows that change together

    def __post_init__(self) -> None:
        if self.group > 1 and self._others:
            raise AccountingError("this accountant prices a group of rows for Gaussian noise on a sum only")

    def epsilon(self, delta: float) -> float:
        """The ε certified at ``delta``."""
        if self._others:
            return self._added_epsilon(delta)
        found = self._upper(EpsilonAt(delta), _sides(self.event, self.relation, self.group))
        return min(found, self._ranged.epsilon(delta)) if self._ranged else found

    def delta(self, epsilon: float) -> float:
        """The δ certified at ``epsilon``."""
        if self._others:
            return self._added_delta(epsilon)
        found = self._upper(DeltaAt(epsilon), _sides(self.event, self.relation, self.group))
        return min(found, self._ranged.delta(epsilon)) if self._ranged else found

    def deltas(self, epsilons: Array) -> Array:
        """The δ certified at each of ``epsilons``: a few loss distributions serve them all."""
        wanted = np.asarray(epsilons, float)
        for end in (wanted.min(), wanted.max()) if wanted.size else ():
            DeltaAt(float(end))  # refuses what is not zero or more
        if not wanted.size:
            return wanted
        if self._others:
            return self._added_deltas(wanted)
        found = [side.uppers(wanted, self.precision) for side in _sides(self.event, self.relation, self.group)]
        best = np.maximum.reduce(found)
        if self._ranged:
            best = np.minimum(best, [self._ranged.delta(float(epsilon)) for epsilon in wanted])
        return np.asarray(best)

    def interval(self, delta: float) -> Interval:
        """Bounds and estimate of ε at ``delta``."""
        if self._others:
            return Interval(0.0, upper := self.epsilon(delta), upper)
        return self._interval(EpsilonAt(delta))

    def delta_interval(self, epsilon: float) -> Interval:
        """Bounds and estimate of δ at ``epsilon``."""
        if self._others:
            return Interval(0.0, upper := self.delta(epsilon), upper)
        return self._interval(DeltaAt(epsilon))

    def estimate(self, delta: float) -> float:
        """The estimate of ε at ``delta`` alone: no bound, several times quicker than `interval`."""
        if self._others or self._ranged:
            return self.epsilon(delta)
        question = EpsilonAt(delta)
        sides = sorted(
            _sides(self.event, self.relation, self.group), key=lambda side: side.rough(question), reverse=True
        )
        best = sides[0].estimate(question)
        if best is None:
            return self._upper(question, sides)
        close = [side.estimate(question) for side in sides[1:] if side.rough(question) > 0.8 * sides[0].rough(question)]
        return max([best, *(x for x in close if x is not None)])

    @property
    def _others(self) -> bool:
        """Whether some leaf is no Gaussian noise on a sum."""
        return any(isinstance(leaf, Approximate | Shifted) for leaf in leaves(self.event))

    @property
    def _ranged(self) -> "rdp.RdpProfile | None":
        """The Rényi profile where exponential mechanisms are composed: their pair is not tight then."""
        counts = leaves(self.event)
        if sum(counts.values()) < 2 or not any(isinstance(leaf, Exponential) for leaf in counts):
            return None
        return rdp.account(self.event, self.relation, self.group)

    def _split(self) -> "tuple[PldProfile | None, exact.MixedProfile]":
        """The sampled steps, if any, and the rest, whose profile has a closed form."""
        plain, rest = exact.apart(self.event, self.relation)
        if not any(side.counts for side in _sides(plain, self.relation, self.group)):
            together = exact.account(self.event, self.relation)
            return None, together if isinstance(together, exact.MixedProfile) else rest
        steps = Compose(tuple(Repeat(leaf, count) for leaf, count in plain.items()))
        return PldProfile(steps, self.relation, self.precision, group=self.group), rest

    def _added_epsilon(self, delta: float) -> float:
        steps, rest = self._split()
        if steps is None:
            return _closed_epsilon(rest, delta)
        left = (delta - rest.certain) / 2
        return steps.epsilon(left) + _closed_epsilon(rest, rest.certain + left) if left > 0 else math.inf

    def _added_delta(self, epsilon: float) -> float:
        return float(self._added_deltas(np.array([epsilon]))[0])

    def _added_deltas(self, epsilons: Array) -> Array:
        steps, rest = self._split()
        if steps is None:
            return np.array([rest.delta(float(epsilon)) for epsilon in epsilons])
        best = np.ones(len(epsilons))
        for share in (epsilons / 4, epsilons / 2, 3 * epsilons / 4, np.full(len(epsilons), rest.total)):
            fits = share <= epsilons
            if fits.any():
                given = np.array([rest.delta(float(one)) for one in share[fits]])
                best[fits] = np.minimum(best[fits], steps.deltas(epsilons[fits] - share[fits]) + given)
        return best

    def _upper(self, question: "Question", sides: "list[Side]") -> float:
        best = 0.0
        for side in sorted(sides, key=lambda side: side.rough(question), reverse=True):
            # the better direction need only be shown to be better
            if not (best and (side.beneath(question, best) or side.upper(question, _COARSE) <= best)):
                best = max(best, side.upper(question, self.precision))
        return best

    def _interval(self, question: "Question") -> Interval:
        sides = _sides(self.event, self.relation, self.group)
        upper = self._upper(question, sides)
        if self._ranged:
            by_orders = self._ranged.epsilon(question.delta) if isinstance(question, EpsilonAt) else math.inf
            upper = min(upper, by_orders)
        lower = 0.0
        attained = _concrete(self.event, self.relation) or sides
        for side in sorted(attained, key=lambda side: side.rough(question), reverse=True):
            if not (lower and (side.beneath(question, lower) or side.upper(question, _COARSE) <= lower)):
                lower = max(lower, side.lower(question, self.precision))
        likely = max(side.rough(question) for side in sides)
        found = [side.estimate(question) for side in sides if side.rough(question) >= 0.8 * likely]
        # rounding to the nearest point errs by h²/12, connecting the dots by h²/6
        estimate = lower + (upper - lower) / 3 if None in found else max(x for x in found if x is not None)
        return Interval(min(lower, upper), min(max(estimate, lower), upper), upper)


def _closed_epsilon(rest: exact.MixedProfile, delta: float) -> float:
    """The ε of releases in closed form: the bound over subsets of shifted ones is loose for many, Rényi's is not."""
    found = rest.epsilon(delta)
    if not rest.shifted or rest.certain:
        return found
    return min(found, rdp.account(rest.event, rest.relation).epsilon(delta))


def account(event: Event, relation: Relation = Relation.ADD_REMOVE, precision: float = PRECISION) -> PldProfile:
    """The certified profile of any composition of known events.

    >>> from dpgrad.accounting.events import Gaussian, Poisson, Repeat
    >>> interval = account(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000)).interval(1e-5)
    >>> interval.lower <= 0.9468668 <= interval.upper, round(interval.estimate, 7)
    (True, 0.9468668)
    """
    relation = Relation(relation)
    _validate.positive(precision=precision)
    if not 1e-9 <= precision <= 0.1:
        raise OptionError(f"precision must lie between 1e-09 and 0.1, got {precision!r}")
    _sides(exact.apart(event, relation)[0], relation)  # both refuse what has no price
    return PldProfile(event, relation, precision)


@dataclass(frozen=True)
class EpsilonAt:
    """Which ε at this δ?"""

    delta: float

    def __post_init__(self) -> None:
        _validate.open_unit(delta=self.delta)
        if self.delta < _LEAST_DELTA:
            raise OptionError(f"delta must be at least {_LEAST_DELTA:g} for accountant pld, got {self.delta!r}")


@dataclass(frozen=True)
class DeltaAt:
    """Which δ at this ε?"""

    epsilon: float

    def __post_init__(self) -> None:
        _validate.non_negative(epsilon=self.epsilon)


Question = EpsilonAt | DeltaAt


def _sides(event: Event | Mapping[Leaf, int], relation: Relation, group: int = 1) -> "list[Side]":
    """Each direction as the pairs to compose."""
    counts = event if isinstance(event, Mapping) else leaves(event)
    kinds = pairs.directions(relation)
    # the answers of several rows are independent
    counts = {leaf: n * (group if isinstance(leaf, RandomizedResponse) else 1) for leaf, n in counts.items()}
    return [Side(counts, partial(losses.of, relation=relation, direction=kind, group=group)) for kind in kinds]


def _concrete(event: Event, relation: Relation) -> "list[Side]":
    """Concrete neighbours, where the dominating pair of some step is not known to be attained.

    Fixed-size: all other rows contribute −1, the exchanged one +1 and then −1 (remove, or add the other way round); or
    the others contribute nothing and the exchanged one ±1 (antipodal). Shuffle: none is offered, the bound is zero: an
    epoch may have been cut short.
    """
    counts = leaves(event)
    if not any(isinstance(leaf, FixedSize | Shuffle | Exponential | TruncatedPoisson) for leaf in counts):
        return []

    def attained(leaf: Leaf, *, fixed: Kind) -> Step:
        direction = Kind.ANTIPODAL if relation is Relation.REPLACE_ONE else fixed
        match leaf:
            case Exponential() | TruncatedPoisson():
                return losses.attained(leaf, relation, direction)
            case FixedSize(_, _, Gaussian(z)) if leaf.sampling_rate < 1:
                return Pair(fixed, leaf.sampling_rate, z if fixed is Kind.ANTIPODAL else z / 2)
            case Shuffle():
                return Pair(fixed, 0.0, 1.0)
            case _:
                return losses.of(leaf, relation, direction)

    kinds = (Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL) if relation is Relation.REPLACE_ONE else (Kind.REMOVE, Kind.ADD)
    return [Side(counts, partial(attained, fixed=kind)) for kind in kinds]


def _refuse_little(part: BlendPart, leaf: Leaf) -> None:
    if isinstance(part, Pair) and part.sigma < _LEAST_NOISE:
        raise TooLittleNoise(
            f"accountant pld certifies sampled steps with std/shift of at least {_LEAST_NOISE:g}, got "
            f"{part.sigma:g} in {leaf}: add noise, or take the looser bound of accountant rdp"
        )


class _Place(NamedTuple):
    """Where the lattice is to look: a saddle and the δ there."""

    saddle: contour.Saddle
    delta: float


class Side:
    """One direction of a composition: Gaussians that see every row merged into one, steps that see none dropped."""

    def __init__(self, leaf_counts: Mapping[Leaf, int], step_of: Callable[[Leaf], Step]) -> None:
        self.counts: Counter[Step] = Counter()
        square = 0.0
        for leaf, count in leaf_counts.items():
            step = step_of(leaf)
            if isinstance(step, Blend):
                for _, part in step.parts:
                    _refuse_little(part, leaf)
                self.counts[step] += count
            elif step.sampling_rate == 1:
                square += count / step.sigma**2
            elif step.sampling_rate > 0:
                _refuse_little(step, leaf)
                self.counts[step] += count
        self.steps = sum(self.counts.values())
        _validate.whole(most=_validate.MOST_STEPS, steps=self.steps)
        # without sampled steps, or with one and nothing else, a closed form answers
        self.mu = math.sqrt(square)
        self._one = next(iter(self.counts)) if self.steps == 1 and not square else None
        self.closed = not self.counts or self._one is not None
        if square and not self.closed:
            self.counts[Pair(Kind.REMOVE, 1.0, 1 / self.mu)] += 1
        # one row more can hide, but never reveal itself, by more than this
        self.most = sum(n * p.most for p, n in self.counts.items())
        self._saddles: dict[EpsilonAt, contour.Saddle] = {}
        self._places: dict[Question, _Place] = {}

    @cached_property
    def total(self) -> contour.Total:
        return contour.total(self.counts)

    @cached_property
    def sketch(self) -> contour.Total:
        """Enough of the total to find saddles: any saddle gives bounds."""
        return contour.total(self.counts, nodes=5)

    def _exact(self, question: Question, upper: bool = True) -> float:
        if self._one is not None:
            if isinstance(question, EpsilonAt):
                return single.epsilon_at(self._one, question.delta, upper)
            return single.bound(self._one, question.epsilon, upper)
        if isinstance(question, EpsilonAt):
            return exact.epsilon(self.mu, question.delta)
        return exact.delta(self.mu, question.epsilon)

    def rough(self, question: Question) -> float:
        """The answer to within some percent: which direction to look at first."""
        if self.closed:
            return self._exact(question)
        if isinstance(question, EpsilonAt):
            return self._first(question).epsilon
        return 0.0 if question.epsilon >= self.most else math.exp(min(self._place(question).saddle.log_delta, 0.0))

    def beneath(self, question: Question, value: float) -> bool:
        """Whether the answer is certainly at most ``value``: a bounded loss needs no lattice."""
        return isinstance(question, EpsilonAt) and self.most <= value

    def estimate(self, question: Question) -> float | None:
        """The answer by the contour integral; None where that does not converge."""
        if self.closed:
            return self._exact(question)
        if isinstance(question, DeltaAt):
            if question.epsilon >= self.most:
                return 0.0
            saddle, delta = self._place(question)
            wave = contour.Contour(self.total, saddle, _TAIL * delta / self.steps)
            return wave.delta(question.epsilon) if wave.converged and self._sure(wave, question.epsilon) else None
        tail = _TAIL * question.delta / self.steps
        known = self._places.get(question)
        saddle = known.saddle if known else self._first(question)
        found = self._by_contour(question, saddle, tail)
        if found is not None and abs(found - saddle.epsilon) > 0.25 * saddle.deviation:
            # far from its saddle the integral may only seem to converge: ask again from there
            again = contour.saddle_for_epsilon(self.sketch, max(found, 0.0), tail, self.most)
            second = self._by_contour(question, again, tail)
            found = second if second is not None and abs(second - found) < 1e-6 * abs(found) else None
        return None if found is None else max(found, 0.0)

    def _by_contour(self, question: EpsilonAt, saddle: contour.Saddle, tail: float) -> float | None:
        wave = contour.Contour(self.total, saddle, tail)
        found = wave.epsilon(question.delta, saddle.epsilon)
        return found if found is not None and self._sure(wave, found) else None

    def _sure(self, wave: contour.Contour, epsilon: float) -> bool:
        """Whether δ(ε) does not depend on how a schedule was interpolated."""
        fewer = contour.total(self.counts, nodes=10)
        return fewer == self.total or wave.agrees(fewer, epsilon)

    def upper(self, question: Question, precision: float) -> float:
        return self._bound(Upper, question, precision)

    def uppers(self, epsilons: Array, precision: float) -> Array:
        """Upper bounds of δ at many ε, from the loss distribution at their least, middle and largest.

        Each is a bound at every ε; it is tight where δ is not far below that of its own place.
        """
        if self.closed:
            return np.array([self._exact(DeltaAt(float(epsilon))) for epsilon in epsilons])
        found = np.where(epsilons >= self.most, 0.0, 1.0)
        inside = epsilons[epsilons < self.most]
        if len(inside):
            for place in dict.fromkeys((inside.min(), (inside.min() + inside.max()) / 2, inside.max())):
                saddle, delta = self._place(DeltaAt(float(place)))
                for bound in bounds(Upper, self.counts, saddle, delta, precision):
                    found[epsilons < self.most] = np.minimum(found[epsilons < self.most], bound.deltas(inside))
        return found

    def lower(self, question: Question, precision: float) -> float:
        return self._bound(Lower, question, precision)

    def _bound(self, kind: type[Bound], question: Question, precision: float) -> float:
        if self.closed:
            return self._exact(question, upper=kind is Upper)
        if isinstance(question, DeltaAt) and question.epsilon >= self.most:
            return 0.0
        place = self._place(question)
        upper = kind is Upper
        best = min if upper else max
        found = bounds(kind, self.counts, place.saddle, place.delta, precision)
        if isinstance(question, DeltaAt):
            return best(bound.delta(question.epsilon) for bound in found)
        near = place.saddle.epsilon
        return min(best(epsilon_at(bound, question.delta, near, upper) for bound in found), self.most)

    def _place(self, question: Question) -> _Place:
        if question not in self._places:
            place = self._near_delta if isinstance(question, EpsilonAt) else self._near_epsilon
            self._places[question] = place(question)  # type: ignore[arg-type]
        return self._places[question]

    def _first(self, question: EpsilonAt) -> contour.Saddle:
        """The saddle-point approximation."""
        if question not in self._saddles:
            tail = _TAIL * question.delta / self.steps
            self._saddles[question] = contour.saddle_for_delta(self.sketch, question.delta, tail, self.most)
        return self._saddles[question]

    def _near_delta(self, question: EpsilonAt) -> _Place:
        delta, tail = question.delta, _TAIL * question.delta / self.steps
        saddle = self._first(question)
        # the saddle-point approximation can be far off where few steps carry the loss: quick bounds find the place
        for _ in range(4):
            found = bounds(Upper, self.counts, saddle, delta, _COARSE)
            near = min(epsilon_at(bound, delta, saddle.epsilon, upper=True) for bound in found)
            moved, saddle = abs(near - saddle.epsilon), contour.saddle_for_epsilon(self.sketch, near, tail, self.most)
            if moved < 0.1 * saddle.deviation:
                break
        return _Place(saddle, delta)

    def _near_epsilon(self, question: DeltaAt) -> _Place:
        rough = contour.saddle_for_epsilon(self.sketch, question.epsilon, 1e-250, self.most)
        delta = math.exp(min(max(rough.log_delta, -550.0), -1e-3))
        # the saddle-point approximation can be orders above δ where few steps carry the loss: so would be the tail
        for _ in range(8):
            tail = _TAIL * delta / self.steps
            saddle = contour.saddle_for_epsilon(self.sketch, question.epsilon, tail, self.most)
            uppers = bounds(Upper, self.counts, saddle, delta, _COARSE)
            found = min(bound.delta(question.epsilon) for bound in uppers)
            if found > 0.1 * delta or delta <= _LEAST_DELTA:
                break
            delta = max(found, _LEAST_DELTA)
        return _Place(saddle, delta)
