"""Certified bounds on the profile of a composition, from lattice measures (`lattice`, `discretise`).

Each distinct step climbs a ladder of lattices: blocks of steps are composed on a fine one and rounded to the next. All
steps share the coarsest lattice, and a step that occurs a few times, such as a Gaussian release of all rows, is put on
it directly. Many distinct steps are first brought to few (`cells`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.special import ndtri

from dpgrad.accounting import _search
from dpgrad.accounting.pairs import Array, Kind, Pair
from dpgrad.accounting.pld import cells, measures
from dpgrad.accounting.pld.blends import Blend, Step
from dpgrad.accounting.pld.contour import Saddle
from dpgrad.accounting.pld.discretise import Span, accuracy, core, dotted, ends, losses, rounded
from dpgrad.accounting.pld.lattice import (
    Factor,
    Measure,
    Product,
    Rounding,
    TooLong,
    compose,
    convolve,
    most_rare,
    power,
    rare,
    regrid,
)

__all__ = [
    "PRECISION",
    "Bound",
    "Lower",
    "Resolution",
    "StepPart",
    "Upper",
    "bounds",
    "epsilon_at",
    "lower_measures",
    "resolution",
    "upper_measure",
]  # fmt: skip

PRECISION = 2e-6  # the usual one
_EPS = float(np.finfo(float).eps)
_LONGEST = 1 << 19  # points: a longer lattice is not worth its time, the bounds widen instead
_SHORT = (1 << 12, 1 << 10)  # points that are convolved by definition; fewer, where that takes too long
_MOST = 1 << 24  # points of the lattice of one step, which takes memory for all of them
_LONG = 1 << 12  # a shorter lattice is not worth dividing into core and rest
_DISTINCT = 100  # up to here each distinct step has a ladder of its own
_OFTEN = 1024  # of more distinct steps, those that occur as often have
_SPACING = 7e-5  # of single steps, at most, at the usual precision
_WIDTH = 0.01  # of a cell in log σ and log q at the usual precision; bounds err by its square
_COARSER = 20.0  # how much more variance the lattices of a schedule add: its cells' own width costs about as much
_BLOCKS = range(64, 160)
_FEW = 16  # of many distinct steps, those that occur less often go to the coarsest lattice at once
_THRESHOLDS = 2048
_PLACES = 66  # at which a bound is read at once
_IN_CELLS = 1024  # steps composed on the fine lattice of a schedule


class StepPart(NamedTuple):
    """A step and its count: on which level it enters, and the outputs that finer lattices hold, if not all."""

    pair: Step
    times: int
    level: int
    core: Span | None


@dataclass(frozen=True)
class Resolution:
    """How a composition is put on lattices: tilt, spacings from fine to coarse, mass that each step may leave out."""

    tilt: float
    spacings: tuple[float, ...]
    tail: float
    block: int  # steps composed on one level
    parts: tuple[StepPart, ...]
    many: Mapping[Pair, int]  # steps of a schedule, on ``grid``
    grid: cells.Grid
    accuracy: float  # relative error of the masses, and error of the losses, of all steps together
    compose: Callable[[list[Any]], Measure]


def resolution(
    counts: Mapping[Step, int], saddle: Saddle, delta: float, precision: float, direct: int = 0
) -> Resolution:
    """Spacings at which rounding costs about ``precision`` of ε: added variance v costs (c+1)v/2.

    With ``direct``, lattices of about so many points, few enough to be convolved by definition; `TooLong` where those
    of single steps would not fit in memory.
    """
    longest = direct or _LONGEST
    steps = sum(counts.values())
    tail = delta * 1e-5 / steps
    alone, many = _apart(counts)
    block = min(_BLOCKS, key=lambda b: sum(_compositions(n, b) for n in alone.values()))
    few = block if len(alone) <= 3 else _FEW
    levels = max((_levels(n, block, few) for n in alone.values()), default=1)
    reach = _range(counts, tail)
    # a cell must be short on the scale of 1/c; any tilt gives bounds
    tilt = min(saddle.tilt, longest / reach)
    finer = precision / PRECISION
    scale = max(saddle.epsilon, 0.3 * saddle.deviation, 1e-12)
    variance = 2 * precision * scale / (tilt + 1)
    variance *= max(1.0, len(alone) / 8)  # many parts cost time, so each is a little coarser
    if many:
        variance *= _COARSER
    else:
        variance = min(variance, steps * max(math.sqrt(finer) * _SPACING, 2 * reach / longest) ** 2 / 6)
    # of a schedule's, a quarter for the lattice of its steps, which strides double, and half for the coarsest
    shares = [variance / (levels + bool(many)) / n for n in _items(alone, many, block, few, levels)]
    spacings = [min(math.sqrt(6 * share), 1 / tilt) for share in shares]
    spacings[-1] = max(spacings[-1], reach / longest)
    parts = []
    for pair, count in sorted(alone.items(), key=lambda item: _order(item[0])):
        level = levels - _levels(count, block, few)
        span = None
        if level < levels - 1:
            whole = inner = measures.length(pair, tail)
            if isinstance(pair, Pair) and not direct and whole >= _LONG * spacings[level]:
                span = core(pair, count, tilt, tail)
                inner = _length(pair, span)
                if 2 * inner > whole:
                    span, inner = None, whole
            spacings[level] = max(spacings[level], inner / longest)
        parts.append(StepPart(pair, count, level, span))
    for level in reversed(range(levels - 1)):
        spacings[level] = min(spacings[level], spacings[level + 1])
    if direct and any(measures.length(part.pair, tail) > _MOST * spacings[part.level] for part in parts):
        raise TooLong
    grid = cells.Grid(tilt, spacings[-1], tail, min(_WIDTH * math.sqrt(finer), 0.2))
    if many:
        fine = max(math.sqrt(1.5 * variance / sum(many.values())), 4 * _range(many, tail) / longest)
        grid = grid._replace(spacing=min(fine, spacings[-1]))
    error = _accuracy(alone, many, tilt, tail) + (4 * _EPS * direct * steps if direct else 0.0)
    how = partial(convolve, faint=min(1e-30, 1e-15 * delta)) if direct else compose
    return Resolution(tilt, tuple(spacings), tail, block, tuple(parts), many, grid, error, how)


def _order(step: Step) -> tuple[bool, str, float, float]:
    if isinstance(step, Blend):
        return True, repr(step), 0.0, 0.0
    return False, step.kind, step.sigma, step.sampling_rate


def _apart(counts: Mapping[Step, int]) -> tuple[dict[Step, int], dict[Pair, int]]:
    """Steps that are composed each by itself, and those of a long schedule, which are not."""
    if len(counts) <= _DISTINCT:
        return dict(counts), {}
    often = sorted((pair for pair in counts if counts[pair] >= _OFTEN), key=lambda pair: -counts[pair])
    single = (step for step in counts if isinstance(step, Blend) or step.sampling_rate == 1)
    alone = {step: counts[step] for step in [*often[:_DISTINCT], *single]}
    return alone, {step: n for step, n in counts.items() if isinstance(step, Pair) and step not in alone}


def _items(alone: Mapping[Step, int], many: Mapping[Pair, int], block: int, few: int, levels: int) -> list[int]:
    """How many measures are rounded to the lattice of each level."""
    found = [0] * levels
    for n in alone.values():
        first = levels - _levels(n, block, few)
        for level in range(first, levels):
            found[level] += math.ceil(n / block ** (level - first)) + (2 if level > first else 0)
    found[-1] += (min(len(many), 50) + sum(many.values()) // (_IN_CELLS // 2)) if many else 0
    return [max(n, 1) for n in found]


def _levels(count: int, block: int, few: int) -> int:
    """On how many lattices a step is composed: on the coarsest alone where it occurs less than ``few`` times."""
    if count < few:
        return 1
    return 2 if count < block else 1 + max(_levels(count // block, block, block), 1)


def _compositions(count: int, block: int) -> int:
    """How many convolutions `_ladder` takes: one a level, and one more from the first digit that is not zero."""
    total, rest = 1, 0
    while count >= block:
        count, digit = divmod(count, block)
        rest |= digit > 0
        total += 1 + rest
    return total


def _length(pair: Pair, span: Span) -> float:
    low, high = losses(pair, span)
    return high - low


def _range(steps: Iterable[Step], tail: float) -> float:
    """The longest range of losses of one step, or a little more; the largest rate need not have the least noise."""
    blended = [measures.length(step, tail) for step in steps if isinstance(step, Blend)]
    counts = [step for step in steps if isinstance(step, Pair)]
    if not counts:
        return max(blended)
    sampling_rate, sigma = np.array([(pair.sampling_rate, pair.sigma) for pair in counts]).T
    sides = np.array([2.0 if p.kind in (Kind.ANTIPODAL, Kind.LARGER) or p.sampling_rate == 1 else 1.0 for p in counts])
    exponent = np.maximum(-float(ndtri(tail)) + 0.5 / sigma, 1 + 1 / sigma) / sigma
    most = np.logaddexp(np.log1p(-np.minimum(sampling_rate, 1 - _EPS)), np.log(sampling_rate) + exponent)
    lengths = [_length(pair, ends(pair, tail)) for pair in counts if pair.group > 1]
    return float(max((sides * most - np.log1p(-np.minimum(sampling_rate, 0.5))).max(), *lengths, *blended, 0.0))


def _accuracy(alone: Mapping[Step, int], many: Mapping[Pair, int], tilt: float, tail: float) -> float:
    total = math.fsum(n * measures.accuracy(step, tilt, tail) for step, n in alone.items())
    for kind in {pair.kind for pair in many}:
        members = [pair for pair in many if pair.kind is kind]
        # interpolation of noise reads Gaussians of a somewhat larger and smaller σ
        worst = Pair(kind, max(p.sampling_rate for p in members), 0.9 * min(p.sigma for p in members))
        total += sum(many[pair] for pair in members) * accuracy(worst, tilt, tail)
    return total


class _Discrete(NamedTuple):
    """One part on its lattices: its core; on the coarsest lattice one step inside it, one outside, and of these at most
    how many."""

    step: Measure
    near: Measure | None = None
    far: Measure | None = None
    most: int = 0


def upper_measure(res: Resolution) -> Measure:
    """A measure on the coarsest lattice whose profile is at least that of the composition."""
    parts = [(part, _dotted(part, res)) for part in res.parts]
    many = cells.mixtures(res.many, res.grid) if res.many else []
    return _composed(parts, many, Rounding(res.tilt, upper=True), res)


def _dotted(part: StepPart, res: Resolution) -> _Discrete:
    pair, tilt, fine, coarse, tail = part.pair, res.tilt, res.spacings[part.level], res.spacings[-1], res.tail
    if part.core is None or isinstance(pair, Blend):
        return _Discrete(measures.dotted(pair, tilt, fine, tail))
    step, near = (dotted(pair, tilt, h, tail, [part.core], whole=False) for h in (fine, coarse))
    far = dotted(pair, tilt, coarse, tail, _outside(part.core, pair, tail))
    return _Discrete(step, near, far, most_rare(near, far, part.times))


def _outside(inside: Span, pair: Pair, tail: float) -> list[Span]:
    low, high = ends(pair, tail)
    return [span for span in (Span(low, inside.low), Span(inside.high, high)) if span.low < span.high]


def lower_measures(res: Resolution) -> tuple[Measure, Measure]:
    """The masses under P and under Q of one function of the composition's output."""
    parts = [(part, _rounded(part, res)) for part in res.parts]
    many = list(cells.polynomials(res.many, res.grid)) if res.many else []
    p, q = (
        _composed(
            [(part, sides[side]) for part, sides in parts],
            [both[side] for both in many],
            Rounding(res.tilt + side, upper=False),
            res,
        )
        for side in (0, 1)
    )
    return p, q


def _rounded(part: StepPart, res: Resolution) -> tuple[_Discrete, _Discrete]:
    pair, tilt, fine, coarse, tail = part.pair, res.tilt, res.spacings[part.level], res.spacings[-1], res.tail
    if part.core is None or isinstance(pair, Blend):
        whole = measures.rounded(pair, tilt, fine, tail)
        return _Discrete(whole.p), _Discrete(whole.q)
    (step,), (near,) = (rounded(pair, [pair], tilt, h, tail, [part.core]) for h in (fine, coarse))
    (far,) = rounded(pair, [pair], tilt, coarse, tail, _outside(part.core, pair, tail))
    # P and Q are read with one function of the output, so with one limit
    most = max(most_rare(near[side], far[side], part.times) for side in (0, 1))
    return _Discrete(step.p, near.p, far.p, most), _Discrete(step.q, near.q, far.q, most)


def _composed(
    parts: list[tuple[StepPart, _Discrete]], many: Iterable[Product], rounding: Rounding, res: Resolution
) -> Measure:
    top: list[Factor] = []
    for part, discrete in parts:
        top += _ladder(part, discrete, rounding, res)
    for cell in many:
        top += _from_cell(cell, rounding, res)
    return res.compose(top)


def _ladder(part: StepPart, discrete: _Discrete, rounding: Rounding, res: Resolution) -> list[Factor]:
    """All steps of one part as few factors on the coarsest lattice: the digits of its count, one a level."""
    found: list[Factor] = []
    measure, count, spacings = discrete.step, part.times, res.spacings[part.level :]
    if discrete.near is not None and discrete.far is not None:
        whole = regrid(res.compose([power(measure, discrete.most)]), rounding, spacings[0], spacings[-1])
        found.append(rare(whole, discrete.near, discrete.far, count, discrete.most))
        count -= discrete.most
    rest: Measure | None = None
    for fine, coarse in pairwise(spacings):
        count, digit = divmod(count, res.block)
        low = ([power(measure, digit)] if digit else []) + ([power(rest)] if rest is not None else [])
        rest = regrid(res.compose(low), rounding, fine, coarse) if low else None
        if count:
            measure = regrid(res.compose([power(measure, res.block)]), rounding, fine, coarse)
    return found + ([power(measure, count)] if count else []) + ([power(rest)] if rest is not None else [])


def _from_cell(cell: Product, rounding: Rounding, res: Resolution) -> list[Factor]:
    """A block that is repeated and a rest, composed on the fine lattice of the schedule, then on the coarsest."""
    found: list[Factor] = []
    times = max(1, int(cell.steps // _IN_CELLS))
    for counts, n in ((cell.counts // times, times), (cell.counts % times, 1)):
        kept = counts > 0
        if kept.any():
            block = replace(cell, weights=cell.weights[kept], counts=counts[kept], log_scale=cell.log_scale[kept])
            found.append(power(regrid(compose([block]), rounding, res.grid.spacing, res.spacings[-1]), n))
    return found


class _Sums:
    """Sums of a measure's untilted masses at and above each lattice point, in units of e^{−c·reference}, as far below
    the reference as that can be represented."""

    def __init__(self, measure: Measure, tilt: float, spacing: float, reference: float) -> None:
        loss = spacing * (measure.first + np.arange(len(measure.mass)))
        self.reference = reference
        kept = loss >= reference - 300 / (tilt + 1)
        self.loss, mass = loss[kept], measure.mass[kept]
        self.first = measure.first + len(loss) - len(self.loss)
        self.whole, self.top = bool(kept.all()), float(loss[-1])
        self.log_scale = measure.log_scale - tilt * self.reference
        self._mass = mass
        self.error = measure.error
        # N − 1 additions, and exponents c·l of up to 300 and those of the tilt at the ends of the lattice
        self.slack = _EPS * (len(mass) + 1024 + 8 * (tilt + 1) * float(np.abs(loss[[0, -1]]).max()))

    def noise(self, delta: float) -> float:
        """The error at the reference as a share of ``delta``."""
        return self.error * math.exp(min(self.log_scale - math.log(delta), 600.0))

    def above(self, power: float) -> Array:
        """Σ_{l ≥ l_j} mass·e^{−power·(l − reference)}; one more, zero, at the end."""
        terms = self._mass * np.exp(np.minimum(-power * (self.loss - self.reference), 600.0))
        return np.append(np.cumsum(terms[::-1])[::-1], 0.0)


class Upper:
    """δ(ε) ≤ value, for every ε ≥ 0."""

    def __init__(
        self, counts: Mapping[Step, int], saddle: Saddle, delta: float, precision: float, direct: int = 0
    ) -> None:
        res = resolution(counts, saddle, delta, precision, direct)
        measure = upper_measure(res)
        sums = _Sums(measure, res.tilt, res.spacings[-1], saddle.epsilon)
        self._c, self._sums, self._measure = res.tilt, sums, measure
        self._p, self._q = sums.above(self._c), sums.above(self._c + 1)
        c = self._c
        # the most that e^{−cy}(1 − e^{−y}) can be for y ≥ 0
        self._most = math.exp(c * math.log(c / (c + 1)) - math.log1p(c))
        self._accuracy = res.accuracy
        self.noise = self._most * sums.noise(delta)

    def delta(self, epsilon: float) -> float:
        return float(self.deltas(np.array([epsilon]))[0])

    def deltas(self, epsilons: Array) -> Array:
        """The bound at many ε: one measure serves them all."""
        sums = self._sums
        # P's masses may be too small and Q's too large by the accuracy each: a factor, and losses too small by two
        epsilon = epsilons - 2 * self._accuracy
        j = np.searchsorted(sums.loss, epsilon, side="right")
        with np.errstate(over="ignore", invalid="ignore"):
            inside = self._p[j] * (1 + 2 * sums.slack) - np.exp(np.minimum(epsilon - sums.reference, 600)) * self._q[j]
            total = math.exp(min(sums.log_scale, 700.0)) * np.maximum(inside, 0.0)
            total += np.exp(np.minimum(self._measure.log_scale - self._c * epsilon, 700.0)) * self._most * sums.error
            found = np.minimum(total * math.exp(self._accuracy) + self._measure.infinite, 1.0)
        unknown = ~np.isfinite(inside) | np.isnan(found)
        if not sums.whole:
            unknown |= (j == 0) & (epsilon < sums.top)
        return np.where(unknown, 1.0, found)


class Lower:
    """δ(ε) ≥ value, for every ε ≥ 0."""

    def __init__(
        self, counts: Mapping[Step, int], saddle: Saddle, delta: float, precision: float, direct: int = 0
    ) -> None:
        res = resolution(counts, saddle, delta, precision, direct)
        measures = lower_measures(res)
        p = _Sums(measures[0], res.tilt, res.spacings[-1], saddle.epsilon)
        q = _Sums(measures[1], res.tilt + 1, res.spacings[-1], saddle.epsilon)
        first, last = max(p.first, q.first), min(p.first + len(p.loss), q.first + len(q.loss))
        of_p, of_q = (slice(first - side.first, max(last, first) - side.first) for side in (p, q))
        self._p = self._logs(p, res.tilt, -1, res.accuracy)[of_p]
        self._q = self._logs(q, res.tilt + 1, 1, res.accuracy)[of_q]
        self.noise = p.noise(delta) + q.noise(delta)

    @staticmethod
    def _logs(sums: _Sums, tilt: float, sign: int, accuracy: float) -> Array:
        """log of the untilted mass at and above each point, its error taken to the safe side."""
        error = sums.error * np.exp(np.minimum(-tilt * (sums.loss - sums.reference), 600.0))
        with np.errstate(divide="ignore"):  # log 0 = −∞ is meant
            logs = np.log(np.maximum(sums.above(tilt)[:-1] * (1 + sign * sums.slack) + sign * error, 0.0))
        return np.asarray(logs + (sums.log_scale + sign * accuracy))

    def delta(self, epsilon: float) -> float:
        """P(S) − e^ε·Q(S) for the best set S of sums above a threshold. Any S is a bound: a rough search will do."""
        if not len(self._p):
            return 0.0
        some = self._values(slice(None, None, stride := 1 + len(self._p) // _THRESHOLDS), epsilon)
        best = int(np.argmax(some)) * stride
        near = self._values(slice(max(best - 2 * stride, 0), best + 2 * stride), epsilon)
        return float(max(some.max(), near.max()))

    def _values(self, chosen: slice, epsilon: float) -> Array:
        p, q = self._p[chosen], self._q[chosen]
        gap = np.where(p > -math.inf, np.minimum(q + epsilon - np.maximum(p, -1e300), 0.0), 0.0)
        return np.asarray(-np.expm1(gap) * np.exp(np.minimum(p, 0.0)))


Bound = TypeVar("Bound", Upper, Lower)


def bounds(
    kind: type[Bound], counts: Mapping[Step, int], saddle: Saddle, delta: float, precision: float
) -> "list[Bound]":
    """Bounds at a place, of which the best may be taken.

    Where a few rare losses make δ, the FFT's round-off, a share of all tilted mass, can exceed δ: then also without it.
    """
    found = [kind(counts, saddle, delta, precision)]
    if found[0].noise > 5 * precision * max(saddle.tilt * saddle.epsilon, 1e-3) and len(counts) <= _DISTINCT:
        for direct in _SHORT:
            try:
                found.append(kind(counts, saddle, delta, precision, direct))
                break
            except TooLong:
                continue
    return found


def epsilon_at(bound: "Upper | Lower", delta: float, near: float, upper: bool) -> float:
    """The ε at which ``bound`` reaches ``delta``, on the safe side; ∞ where it never does."""
    if bound.delta(0.0) <= delta:
        return 0.0

    def beyond(epsilon: float) -> bool:
        return bound.delta(epsilon) > delta

    low, high = _search.doubled(beyond, 0.0, max(2 * near, 1e-3), most=1e6)
    if high == math.inf:
        return high
    # start from a narrow bracket around the estimate where it holds
    for width in (1e-4, 1e-2):
        a, b = near * (1 - width), near * (1 + width)
        if low < a and b < high and beyond(a) and not beyond(b):
            low, high = a, b
            break
    if isinstance(bound, Upper):
        return _narrowed(bound, delta, low, high)
    return _search.halved(beyond, low, high, relative=1e-12, absolute=1e-15)[upper]


def _narrowed(bound: Upper, delta: float, low: float, high: float) -> float:
    """`_search.halved`, from above: the bound is read at many places at once."""
    while high - low > 1e-12 * high + 1e-15:
        places = np.linspace(low, high, _PLACES)
        within = bound.deltas(places[1:-1]) <= delta
        first = int(np.argmax(np.append(within, True))) + 1
        before, (low, high) = (low, high), (float(places[first - 1]), float(places[first]))
        if (low, high) == before:
            break
    return high
