"""Certified bounds on the profile of a composition, from lattice measures (`lattice`).

Few distinct steps are composed each by itself. Many are brought to few: for the upper bound every step becomes the
mixture of the neighbouring nodes in s = 2Φ(κ/σ) − 1 and in q, which dominates it (`pairs`) and errs by the square of
the node spacing; for the lower bound the steps of a cell are read with one ruler, and the masses of what is read are
interpolated.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, log_ndtr

from dpgrad.accounting.contour import Saddle
from dpgrad.accounting.lattice import (
    Measure,
    Product,
    Rounded,
    Rounding,
    compose,
    dotted,
    ends,
    power,
    product,
    regrid,
    rounded,
)
from dpgrad.accounting.pairs import Array, Kind, Pair

_LONGEST = 1 << 18
_DISTINCT = 100  # up to here each distinct step has a measure of its own
_WIDTH = 0.014  # of a cell in log σ and log q at the usual precision; bounds err by its square
_POLYNOMIAL = 7
_RADIUS = 0.2
_MOST_BLOCKS = 1 << 22  # of steps that two levels can hold
_SLACK = 1e-11  # relative: suffix sums, exponentials and the quadrature of one step


@dataclass(frozen=True)
class Resolution:
    """How a composition is put on lattices: tilt, spacing at each level, and the mass each step may leave out."""

    tilt: float
    spacings: tuple[float, ...]
    tail: float
    width: float  # of a cell of noise levels or rates, in their logarithm
    climbs: bool  # one ladder of levels for each distinct step; otherwise two levels for all
    block: int  # steps composed on one level


def resolution(counts: Mapping[Pair, int], saddle: Saddle, delta: float, precision: float) -> Resolution:
    """Spacings at which rounding costs about ``precision`` of ε: added variance v costs (c+1)v/2."""
    steps = sum(counts.values())
    tail = delta * 1e-5 / steps
    # a lattice of more than _LONGEST points is not worth its time: the bounds widen instead
    worst = {kind: [p for p in counts if p.kind is kind] for kind in {p.kind for p in counts}}
    widest = [Pair(k, max(p.rate for p in ps), min(p.sigma for p in ps)) for k, ps in worst.items()]
    least = max(_range(pair, tail) for pair in widest) / (_LONGEST if len(counts) == 1 else _LONGEST / 4)
    # a cell must be short on the scale of 1/c; any tilt gives bounds
    tilt = min(saddle.tilt, 1 / least)
    scale = max(saddle.epsilon, 0.3 * saddle.deviation, 1e-12)
    variance = 2 * precision * scale / (tilt + 1)
    width = _WIDTH * math.sqrt(precision / 2e-5)
    climbs = len(counts) == 1 or (steps > _MOST_BLOCKS and len(counts) <= _DISTINCT)
    block = min(range(40, 160), key=lambda b: sum(_compositions(n, b) for n in counts.values())) if climbs else 1024
    if climbs:
        blocks = [steps]
        while max(counts.values()) >= block ** len(blocks) or (len(blocks) == 1 and len(counts) > 1):
            blocks.append(sum(math.ceil(n / block ** len(blocks)) for n in counts.values()))
    else:
        blocks = [steps, min(len(counts), 50) + steps // 512]
        if len(counts) > _DISTINCT:
            variance *= 5  # the cells' own width costs about as much
    spacings = tuple(max(min(math.sqrt(6 * variance / len(blocks) / b), 1 / tilt), least) for b in blocks)
    return Resolution(tilt, spacings, tail, min(width, 0.2), climbs, block)


def _compositions(count: int, block: int) -> int:
    """How many convolutions `_ladder` takes: one a level, and one more from the first digit that is not zero."""
    total, rest = 1, 0
    while count >= block:
        count, digit = divmod(count, block)
        rest |= digit > 0
        total += 1 + rest
    return total


def _range(pair: Pair, tail: float) -> float:
    low, high = pair.loss(np.array(ends(pair, tail)))
    return float(high - low)


def upper_measure(counts: Mapping[Pair, int], res: Resolution) -> Measure:
    """A measure on the coarsest lattice whose profile is at least that of the composition."""
    rounding = Rounding(res.tilt, upper=True)
    if len(counts) > _DISTINCT:
        return _from_cells(_mixtures(counts, res), rounding, res)
    steps = [(dotted(pair, res.tilt, res.spacings[0], res.tail), n) for pair, n in _ordered(counts)]
    return _from_steps(steps, rounding, res)


def lower_measures(counts: Mapping[Pair, int], res: Resolution) -> Rounded:
    """The masses under P and under Q of one function of the composition's output."""
    of_p, of_q = Rounding(res.tilt, upper=False), Rounding(res.tilt + 1, upper=False)
    if len(counts) > _DISTINCT:
        cells = list(_polynomials(counts, res))
        return Rounded(_from_cells([p for p, _ in cells], of_p, res), _from_cells([q for _, q in cells], of_q, res))
    steps = [(rounded(pair, [pair], res.tilt, res.spacings[0], res.tail)[0], n) for pair, n in _ordered(counts)]
    p, q = [(step.p, n) for step, n in steps], [(step.q, n) for step, n in steps]
    return Rounded(_from_steps(p, of_p, res), _from_steps(q, of_q, res))


def _ordered(counts: Mapping[Pair, int]) -> list[tuple[Pair, int]]:
    return sorted(counts.items(), key=lambda item: (item[0].kind, item[0].sigma, item[0].rate))


def _from_steps(steps: list[tuple[Measure, int]], rounding: Rounding, res: Resolution) -> Measure:
    if not res.climbs:
        groups = [steps[i : i + 12] for i in range(0, len(steps), 12)]
        cells = (product([m for m, _ in g], np.eye(len(g)), np.array([float(n) for _, n in g])) for g in groups)
        return _from_cells(cells, rounding, res)
    top = [part for measure, n in steps for part in _ladder(measure, n, rounding, res)]
    return compose([power(measure, n) for measure, n in top])


def _ladder(measure: Measure, count: int, rounding: Rounding, res: Resolution) -> list[tuple[Measure, int]]:
    """The ``count``-fold composition as few measures on the coarsest lattice: count's digits, one a level."""
    rest: Measure | None = None
    for fine, coarse in pairwise(res.spacings):
        count, digit = divmod(count, res.block)
        low = ([power(measure, digit)] if digit else []) + ([power(rest)] if rest is not None else [])
        rest = regrid(compose(low), rounding, fine, coarse) if low else None
        if count:
            measure = regrid(compose([power(measure, res.block)]), rounding, fine, coarse)
    found = [(measure, count)] if count else []
    return found + ([(rest, 1)] if rest is not None else [])


def _from_cells(cells: Iterable[Product], rounding: Rounding, res: Resolution) -> Measure:
    """Each cell as a block that is repeated and a rest, on the fine lattice; then all of them on the coarse one."""
    fine, coarse = res.spacings
    top = []
    for cell in cells:
        times = max(1, int(cell.steps // res.block))
        for counts, n in ((cell.counts // times, times), (cell.counts % times, 1)):
            kept = counts > 0
            if kept.any():
                block = replace(cell, weights=cell.weights[kept], counts=counts[kept], log_scale=cell.log_scale[kept])
                top.append(power(regrid(compose([block]), rounding, fine, coarse), n))
    return compose(top)


class Cell(NamedTuple):
    """Steps of one kind whose noise and rate lie between neighbouring nodes."""

    kind: Kind
    sigma_nodes: Array  # (2,), or (1,) where all noise is equal
    rate_nodes: Array
    sigma: Array  # (steps,)
    rate: Array
    counts: Array


def _cells(counts: Mapping[Pair, int], width: float) -> Iterator[Cell]:
    for kind in sorted({pair.kind for pair in counts}):
        members = [(pair, n) for pair, n in counts.items() if pair.kind is kind]
        sigma = np.array([pair.sigma for pair, _ in members])
        rate = np.array([pair.rate for pair, _ in members])
        count = np.array([float(n) for _, n in members])
        sigma_nodes, rate_nodes = _nodes(sigma, width), _nodes(rate, width)
        at_sigma, at_rate = _place(sigma_nodes, sigma), _place(rate_nodes, rate)
        order = np.lexsort((at_rate, at_sigma))
        breaks = np.flatnonzero(np.diff(at_sigma[order]) | np.diff(at_rate[order])) + 1
        for inside in np.split(order, breaks):
            i, j = at_sigma[inside[0]], at_rate[inside[0]]
            for part in np.array_split(inside, math.ceil(len(inside) / 1024)):
                yield Cell(kind, sigma_nodes[i : i + 2], rate_nodes[j : j + 2], sigma[part], rate[part], count[part])


def _nodes(values: Array, width: float) -> Array:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low])
    nodes = np.geomspace(low, high, max(2, math.ceil(math.log(high / low) / width) + 1))
    nodes[0], nodes[-1] = low, high  # rounding must not leave a step outside
    return nodes


def _place(nodes: Array, values: Array) -> NDArray[np.intp]:
    return np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, max(len(nodes) - 2, 0))


def _linear(nodes: Array, values: Array) -> Array:
    """Weights that interpolate ``values`` between two nodes: (values, nodes)."""
    if len(nodes) == 1:
        return np.ones((len(values), 1))
    share = np.clip((values - nodes[0]) / (nodes[1] - nodes[0]), 0, 1)
    return np.stack([1 - share, share], axis=1)


def _mixtures(counts: Mapping[Pair, int], res: Resolution) -> Iterator[Product]:
    """Every step as the mixture of the corners of its cell, which dominates it."""
    made: dict[Pair, Measure] = {}
    for cell in _cells(counts, res.width):
        kappa = Pair(cell.kind, 1.0, 1.0).kappa
        by_sigma = _in_s(cell.sigma_nodes, cell.sigma, kappa)
        by_rate = _linear(cell.rate_nodes, cell.rate)
        corners = [Pair(cell.kind, float(r), float(s)) for s in cell.sigma_nodes for r in cell.rate_nodes]
        for pair in corners:
            if pair not in made:
                made[pair] = dotted(pair, res.tilt, res.spacings[0], res.tail)
        weights = np.einsum("ts,tr->tsr", by_sigma, by_rate).reshape(len(cell.sigma), -1)
        yield product([made[pair] for pair in corners], weights, cell.counts)


def _in_s(nodes: Array, sigma: Array, kappa: float) -> Array:
    """Weights that interpolate linearly in s = 2Φ(κ/σ) − 1 between two noise levels, in doubt towards the smaller.

    Where s is close to one it has no digits left: its complement 2Φ(−κ/σ) has, relative to that of the larger noise.
    """
    if len(nodes) == 1:
        return np.ones((len(sigma), 1))
    if kappa / nodes[0] > 1:
        low, here, high = (log_ndtr(-kappa / x) for x in (nodes[0], sigma, nodes[1]))
        share = (np.exp(here - high) - np.exp(low - high)) / -np.expm1(low - high)
    else:
        low, here, high = (erf(kappa / x / math.sqrt(2)) for x in (nodes[0], sigma, nodes[1]))
        share = (here - low) / (high - low)
    share = np.clip(share - 1e-9, 0, 1)
    return np.stack([1 - share, share], axis=1)


def _polynomials(counts: Mapping[Pair, int], res: Resolution) -> Iterator[tuple[Product, Product]]:
    """The steps of a cell, all read with one ruler; their masses interpolated in log σ (exactly linear in q).

    A mass of N(m, σ²) is analytic in log σ, and for complex σ with |log σ − log σ₀| ≤ r its modulus is at most e^{2r}
    times 1/√cos 2r times the mass of N(m, σ̄²), σ̄ = σ₀·e^r/√cos 2r: |e^{−y²/2σ²}| ≤ e^{−y²/2σ̄²}, as Re σ⁻² ≥ σ̄⁻², and
    |1/σ| ≤ e^r/σ₀. Interpolation at the k Chebyshev nodes of half-width w errs by ∮f(ζ)ω(x)/(ω(ζ)(ζ−x))dζ/2πi over
    the circle, with |ω(x)| ≤ 2(w/2)^k and |ω(ζ)| ≥ (r−w)^k: at most 2(w/2(r−w))^k·r/(r−w) of that mass (`_remainder`).
    """
    for cell in _cells(counts, min(res.width, 0.05)):
        low, high = float(cell.sigma_nodes[0]), float(cell.sigma_nodes[-1])
        middle, half = math.sqrt(low * high), math.log(high / low) / 2
        ruler = Pair(cell.kind, float(cell.rate_nodes[0]), middle)
        at, basis = _lagrange(middle, half, cell.sigma)
        actual = [Pair(cell.kind, float(r), float(s)) for s in at for r in cell.rate_nodes]
        # (1 − q)N₀ + qN₁ is at most the sum of those at the lowest and at the highest rate
        broad = middle * math.exp(_RADIUS) / math.sqrt(math.cos(2 * _RADIUS))
        wide = [Pair(cell.kind, float(r), broad) for r in cell.rate_nodes]
        found = rounded(ruler, [*actual, *wide], res.tilt, res.spacings[0], res.tail)
        steps, bounds = found[: len(actual)], found[len(actual) :]
        weights = np.einsum("ts,tr->tsr", basis, _linear(cell.rate_nodes, cell.rate)).reshape(len(cell.sigma), -1)
        share = _remainder(half, len(at))
        sides = []
        for measures, overs in (
            ([s.p for s in steps], [b.p for b in bounds]),
            ([s.q for s in steps], [b.q for b in bounds]),
        ):
            together = product(measures, weights, cell.counts)
            least = float(together.log_scale.min())
            extra = share * sum(math.exp(min(over.log_scale - least, 300.0)) for over in overs)
            error = np.full(len(measures), float(together.error.max()) + extra)
            sides.append(replace(together, error=error))
        yield sides[0], sides[1]


def _remainder(half: float, nodes: int) -> float:
    """The largest error of interpolation as a share of the mass at σ̄: see `_polynomials`."""
    far = _RADIUS - half
    shape = math.exp(2 * _RADIUS) / math.sqrt(math.cos(2 * _RADIUS))
    return shape * 2 * (half / (2 * far)) ** nodes * _RADIUS / far if half else 0.0


def _lagrange(middle: float, half: float, sigma: Array) -> tuple[Array, Array]:
    """Chebyshev nodes σ_k over a cell, and the Lagrange basis in log σ at each step: (nodes,), (steps, nodes)."""
    if half == 0:
        return np.array([middle]), np.ones((len(sigma), 1))
    unit = np.cos((np.arange(_POLYNOMIAL) + 0.5) * np.pi / _POLYNOMIAL)
    place = np.log(sigma / middle) / half
    basis = np.ones((len(sigma), _POLYNOMIAL))
    for k in range(_POLYNOMIAL):
        for other in np.delete(unit, k):
            basis[:, k] *= (place - other) / (unit[k] - other)
    return middle * np.exp(half * unit), basis


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

    def above(self, power: float) -> Array:
        """Σ_{l ≥ l_j} mass·e^{−power·(l − reference)}; one more, zero, at the end."""
        terms = self._mass * np.exp(-power * (self.loss - self.reference))
        return np.append(np.cumsum(terms[::-1])[::-1], 0.0)


class Upper:
    """δ(ε) ≤ value, for every ε ≥ 0."""

    def __init__(self, counts: Mapping[Pair, int], saddle: Saddle, delta: float, precision: float) -> None:
        res = resolution(counts, saddle, delta, precision)
        measure = upper_measure(counts, res)
        sums = _Sums(measure, res.tilt, res.spacings[-1], saddle.epsilon)
        self._c, self._sums, self._measure = res.tilt, sums, measure
        self._p, self._q = sums.above(self._c), sums.above(self._c + 1)
        c = self._c
        # the most that e^{−cy}(1 − e^{−y}) can be for y ≥ 0
        self._most = math.exp(c * math.log(c / (c + 1)) - math.log1p(c))

    def delta(self, epsilon: float) -> float:
        sums = self._sums
        j = int(np.searchsorted(sums.loss, epsilon, side="right"))
        if j == 0 and not sums.whole and epsilon < sums.top:
            return 1.0
        inside = self._p[j] * (1 + _SLACK) - math.exp(min(epsilon - sums.reference, 600.0)) * self._q[j]
        if not math.isfinite(inside):
            return 1.0
        total = math.exp(min(sums.log_scale, 700.0)) * max(inside, 0.0)
        total += math.exp(min(self._measure.log_scale - self._c * epsilon, 700.0)) * self._most * sums.error
        return float(min(total + self._measure.infinite, 1.0))


class Lower:
    """δ(ε) ≥ value, for every ε ≥ 0."""

    def __init__(self, counts: Mapping[Pair, int], saddle: Saddle, delta: float, precision: float) -> None:
        res = resolution(counts, saddle, delta, precision)
        measures = lower_measures(counts, res)
        p = _Sums(measures.p, res.tilt, res.spacings[-1], saddle.epsilon)
        q = _Sums(measures.q, res.tilt + 1, res.spacings[-1], saddle.epsilon)
        first, last = max(p.first, q.first), min(p.first + len(p.loss), q.first + len(q.loss))
        self._p = self._logs(p, res.tilt, -1)[first - p.first : max(last, first) - p.first]
        self._q = self._logs(q, res.tilt + 1, 1)[first - q.first : max(last, first) - q.first]

    @staticmethod
    def _logs(sums: _Sums, tilt: float, sign: int) -> Array:
        """log of the untilted mass at and above each point, its error taken to the safe side."""
        error = sums.error * np.exp(-tilt * (sums.loss - sums.reference))
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(sums.above(tilt)[:-1] * (1 + sign * _SLACK) + sign * error, 0.0))
        return np.asarray(logs + sums.log_scale)

    def delta(self, epsilon: float) -> float:
        """P(S) − e^ε·Q(S) for the best set S of sums above a threshold."""
        with np.errstate(over="ignore", invalid="ignore"):
            gap = self._q + epsilon - self._p
            values = np.where(gap < 0, -np.expm1(gap) * np.exp(self._p), 0.0)
        return float(np.nanmax(values, initial=0.0))


def epsilon_at(bound: "Upper | Lower", delta: float, near: float, upper: bool) -> float:
    """The ε at which ``bound`` reaches ``delta``, on the safe side; ∞ where it never does."""
    if bound.delta(0.0) <= delta:
        return 0.0
    low, high = 0.0, max(2 * near, 1e-3)
    while bound.delta(high) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    # start from a narrow bracket around the estimate where it holds
    for width in (1e-4, 1e-2):
        a, b = near * (1 - width), near * (1 + width)
        if low < a and b < high and bound.delta(a) > delta >= bound.delta(b):
            low, high = a, b
            break
    while high - low > 1e-12 * high + 1e-15:
        middle = (low + high) / 2
        if bound.delta(middle) > delta:
            low = middle
        else:
            high = middle
    return high if upper else low
