"""The Rényi accountant: divergences of integer and fractional orders, the best order found, converted to (ε, δ).

For a dominating pair with K(c) = log E_P e^{cL} the Rényi divergence of order α = 1 + c is K(c)/c. It is an integral of
hockey-stick divergences with non-negative weights, so what dominates bounds it, and K adds up over steps (Mironov
2017). The two conversions, for every c > 0:

    improved   ε = K(c)/c + log(c/(1+c)) + (log(1/δ) − log(1+c))/c      (Canonne, Kamath and Steinke 2020, Prop. 12;
                                                                        Asoodeh et al. 2020)
    classic    ε = K(c)/c + log(1/δ)/c                                   (Mironov 2017, Prop. 3)

Both are (G(c) + log(1/δ))/c with G convex: G = K, or G = K + c·log c − (1+c)·log(1+c), whose second derivative is
K″ + 1/c − 1/(1+c). So c·G′ − G grows, and the best order is the one root of

    c·K′(c) − K(c) + [log(1+c)] = log(1/δ),

the bracket for the improved conversion only; the best order for δ at a given ε is the root of G′(c) = ε. No grid of
orders is needed. Any order gives a valid bound, so the search cannot break the guarantee, only fail to be best.

Removing a row is the worse direction at every order (Mironov, Talwar and Zhang 2019, Thm. 5): the order is searched
there, and both directions are priced at the order found.

**Quadrature.** K is an integral of an analytic function against a Gaussian, taken by the trapezoidal rule; `_spacing`
keeps its error under e^{−30} of the value, by the bound in docs/proofs/rdp.md. Many noise levels share a grid.

**Leaves that are no Gaussian** (see `accounting.exact`). A purely ε-private one has the loss ±ε of randomised response,
K(c) = log (e^{(1+c)ε} + e^{−cε})/(1 + e^ε); a shifted one s + max(0, G), K(c) = cs + log(Φ(−μ/2) + e^{c(c+1)μ²/2}·Φ(μ/2
+ cμ)). A leaf with δ > 0 has no Rényi divergence and is refused.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from scipy.special import log_ndtr

from dpgrad import _validate
from dpgrad.accounting import _search, exact, losses, pairs
from dpgrad.accounting.events import (
    Approximate,
    Compose,
    DiscreteGaussian,
    Event,
    Exponential,
    Leaf,
    RandomizedResponse,
    Relation,
    Repeat,
    Selection,
    Shifted,
    leaves,
    tally,
)
from dpgrad.accounting.pairs import Array, Kind, Pair
from dpgrad.accounting.pld import cumulants
from dpgrad.accounting.pld.blends import Blend, Whole, mixed
from dpgrad.accounting.selection import SelectionCurve
from dpgrad.errors import AccountingError, OptionError

__all__ = ["CLASSIC", "NAME", "Curve", "RdpProfile", "account", "classic", "tilts"]

NAME = "rdp"
CLASSIC = "rdp-classic"
_TINY = 0.02
_TINY_LARGER = 0.05
_BLOCK = 1 << 19  # numbers held at once
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def tilts(found: Sequence[Pair], c: float) -> Array:
    """K(c), K′(c) and K″(c) of each pair: (3, pairs).

    >>> tilts([Pair(Kind.REMOVE, 1.0, 2.0)], 3.0).ravel().tolist()  # c(c+1)/2σ², (2c+1)/2σ², 1/σ²
    [1.5, 0.875, 0.25]
    """
    return _Batches(found).at(c)


class _Batches:
    """Pairs sorted by what prices them, each kind by itself."""

    def __init__(self, found: Sequence[Pair]) -> None:
        self.pairs = found
        self.sampling_rate = np.array([pair.sampling_rate for pair in found], float)
        self.sigma = np.array([pair.sigma for pair in found], float)
        kinds: dict[Kind | None, list[int]] = {}
        for index, pair in enumerate(found):
            plain = pair.sampling_rate == 1 or pair.sigma < (_TINY_LARGER if pair.kind is Kind.LARGER else _TINY)
            # a group's shifts, and the corners of ``larger``, take Gauss–Legendre on pieces
            kind = Kind.LARGER if pair.group > 1 else pair.kind
            kinds.setdefault(None if plain else kind, []).append(index)
        against = [pair.kind is Kind.ANTIPODAL and pair.sampling_rate < 1 for pair in found]
        groups = np.array([pair.group for pair in found], float)
        # log 1/(1−q)ᵏ where Q too is a mixture
        self.hidden = -groups * np.log1p(-np.where(against, self.sampling_rate, 0))
        self.shift = np.where(self.sampling_rate < 1, groups, 1.0)  # at rate 1 the shift is in σ already
        self.kinds = {kind: np.array(places, np.intp) for kind, places in kinds.items()}

    def at(self, c: float) -> Array:
        result = np.empty((3, len(self.pairs)))
        for kind, places in self.kinds.items():
            if kind is None:  # a plain Gaussian, or, at next to no noise, what bounds a sampled one
                variance, hidden = (self.shift[places] / self.sigma[places]) ** 2, self.hidden[places]
                result[:, places] = variance * np.array([[c * (c + 1) / 2], [c + 0.5], [1.0]])
                result[:2, places] += hidden * np.array([[c], [1.0]])
            elif kind is Kind.LARGER:
                result[:, places] = np.array([cumulants.tilted(self.pairs[i], c) for i in places]).T
            else:
                places = places[np.argsort(self.sigma[places])]
                for block in _blocks(kind, self.sigma[places], c):
                    chosen = places[block]
                    result[:, chosen] = _trapezoid(kind, self.sampling_rate[chosen], self.sigma[chosen], c)
        # what rounding may have taken: of the value, and of the terms of first order in q that cancel in it
        lost = result[0] * 1e-12 + 2e-16 * c * self.sampling_rate
        result[0] = np.maximum(result[0] + np.where(self.sampling_rate < 1, lost, 0), 0)
        return result


def _window(kind: Kind, sigma: float, c: float) -> tuple[float, float]:
    """The range of g that holds all peaks of the integrand and `cumulants.REACH` around them."""
    low = -cumulants.REACH - (c / sigma if kind is Kind.ADD else 0)
    shift = {Kind.REMOVE: 1 + c, Kind.ADD: 0.0, Kind.ANTIPODAL: 1 + 2 * c}[kind]
    return low, cumulants.REACH + shift / sigma


def _spacing(kind: Kind, sigma: Array, c: float) -> Array:
    """The trapezoidal step: from the best strip where it fits in |a| ≤ 2σ, else from a = 2σ (see the module)."""
    negative = 0.0 if kind is Kind.REMOVE else c
    spread = np.sqrt(1 + negative / (4 * sigma**2))
    narrow = 4 * np.pi * sigma / (38 + 2 * sigma**2 + 0.62 * negative)
    wide = 0.7 / spread
    return np.where(2 * np.pi / 0.7 / spread <= 2 * sigma, np.maximum(wide, narrow), narrow)


def _blocks(kind: Kind, sigma: Array, c: float) -> list[slice]:
    """Cuts of a sorted array of noise levels: each spans at most a factor 1.5 and fits in memory."""
    found, start = [], 0
    while start < len(sigma):
        low, high = _window(kind, float(sigma[start]), c)
        points = (high - low) / float(_spacing(kind, sigma[start : start + 1], c)[0])
        most = max(1, int(_BLOCK / points))
        stop = min(start + most, int(np.searchsorted(sigma, 1.5 * sigma[start], "right")))
        found.append(slice(start, stop))
        start = stop
    return found


def _trapezoid(kind: Kind, sampling_rate: Array, sigma: Array, c: float) -> Array:
    """K, K′ and K″ for noise levels of about the same size: (3, levels)."""
    low, high = _window(kind, float(sigma.min()), c)
    count = math.ceil((high - low) / float(_spacing(kind, sigma, c).min()))
    g = np.linspace(low, high, count + 1)
    step = (high - low) / count
    sampling_rate, sigma = sampling_rate[:, None], sigma[:, None]
    up = _log_mixture(sampling_rate, g / sigma - 0.5 / sigma**2)  # (levels, points)
    match kind:
        case Kind.REMOVE:
            loss, exponent = up, (1 + c) * up
        case Kind.ADD:
            loss, exponent = -up, -c * up
        case _:
            loss = up - _log_mixture(sampling_rate, -g / sigma - 0.5 / sigma**2)
            exponent = up + c * loss
    base = math.log(step) - _LOG_SQRT_2PI - g * g / 2
    total = exponent + base
    top = total.max(axis=1)
    weight = np.exp(total - top[:, None])
    mass = weight.sum(axis=1)
    mean = (weight * loss).sum(axis=1) / mass
    spread = (weight * (loss - mean[:, None]) ** 2).sum(axis=1) / mass
    value = top + np.log(mass)
    small = np.abs(value) < 0.5  # log E e^x = log1p(E[e^x − 1]): a tiny K keeps its digits
    if small.any():
        rows = exponent[small]
        far = rows > 30  # where e^x could overflow its density is far below rounding: take both together
        parts = np.where(far, np.exp(rows + base), np.exp(base) * np.expm1(np.where(far, 0, rows)))
        value[small] = np.log1p(parts.sum(axis=1))
    return np.array([value, mean, spread])


def _log_mixture(sampling_rate: Array, y: Array) -> Array:
    """log(1 − q + q·e^y), to full relative precision where it is small: (levels, points)."""
    result = np.log1p(sampling_rate * np.expm1(np.minimum(y, 30)))
    if (far := y > 30).any():
        large = np.broadcast_to(sampling_rate, y.shape)[far]
        result[far] = np.logaddexp(np.log1p(-large), np.log(large) + y[far])
    return np.asarray(result)


class Curve:
    """K of a composition in one direction, a sum over its distinct steps.

    >>> Curve({Pair(Kind.REMOVE, 1.0, 2.0): 4}).at(3.0)
    Tilted(value=6.0, slope=3.5, curvature=1.0)
    """

    def __init__(self, counts: "Mapping[_Priced, int]") -> None:
        # steps that see every row are one Gaussian; those that see none are dropped
        noised = {p: n for p, n in counts.items() if isinstance(p, Pair)}
        square = math.fsum(n / p.sigma**2 for p, n in noised.items() if p.sampling_rate == 1)
        steps = {p: float(n) for p, n in noised.items() if 0 < p.sampling_rate < 1}
        if square:
            steps[Pair(Kind.REMOVE, 1.0, square**-0.5)] = 1.0
        self.count = np.array(list(steps.values()))
        self._batches = _Batches(list(steps))
        self._others = [(one, n) for one, n in counts.items() if not isinstance(one, Pair)]
        # beyond, quadrature would take millions of points; the best order never lies there in practice
        reaches = [float(self._batches.sigma.min())] if steps else []
        self.most = 1e5 * min(reaches + [one.reach for one, _ in self._others], default=0.0)

    @property
    def empty(self) -> bool:
        """Nothing is released."""
        return not len(self.count) and not self._others

    def at(self, c: float) -> cumulants.Tilted:
        total = self._batches.at(c) @ self.count
        for one, count in self._others:
            total = total + count * np.array(one.at(c))
        value, slope, curvature = (float(x) for x in total)
        return cumulants.Tilted(value, slope, curvature)


@dataclass(frozen=True)
class _Pure:
    """The loss of randomised response: ε or −ε."""

    epsilon: float

    @property
    def reach(self) -> float:
        return 1 / self.epsilon

    def at(self, c: float) -> tuple[float, float, float]:
        up, down = (1 + c) * self.epsilon, -c * self.epsilon
        value = np.logaddexp(up, down) - np.logaddexp(self.epsilon, 0)
        tilt = math.tanh((up - down) / 2)  # E of the sign under the tilted law
        lost = 4e-16 * (1 + up)  # what rounding may have taken
        return float(value) + lost, tilt * self.epsilon, (1 - tilt**2) * self.epsilon**2


@dataclass(frozen=True)
class _Positive:
    """The shift plus the positive part of a Gaussian's loss."""

    shift: float
    mu: float

    @property
    def reach(self) -> float:
        return 1 / max(self.mu, self.shift)

    def at(self, c: float) -> tuple[float, float, float]:
        x = self.mu * (c + 0.5)
        low, high = float(log_ndtr(-self.mu / 2)), c * (c + 1) * self.mu**2 / 2 + float(log_ndtr(x))
        both = float(np.logaddexp(low, high))
        ratio = math.exp(-x * x / 2 - _LOG_SQRT_2PI - float(log_ndtr(x)))  # φ(x)/Φ(x)
        slope, bend = self.mu * (x + ratio), self.mu**2 * (1 - ratio * (x + ratio))
        share = math.exp(high - both)
        lost = 4e-16 * (1 + abs(high))
        return c * self.shift + both + lost, self.shift + share * slope, share * (bend + (1 - share) * slope**2)


@dataclass(frozen=True)
class _Ranged:
    """A mechanism whose losses lie in an interval of length ``epsilon``: the worst of them at each order.

    With two values t and t − ε the moment is y^c(E − e^{−cε} − y(1 − e^{−cε}))/(E − 1), y = e^t, E = e^ε; it is largest
    at y = c(E − e^{−cε})/((1+c)(1 − e^{−cε})). Every such mechanism is a mixture of these (docs/proofs/releases.md).
    """

    epsilon: float

    @property
    def reach(self) -> float:
        return 1 / self.epsilon

    def at(self, c: float) -> tuple[float, float, float]:
        fall = -math.expm1(-c * self.epsilon)  # 1 − e^{−cε}
        first = math.log(-math.expm1(-(1 + c) * self.epsilon))  # log(1 − e^{−(1+c)ε})
        t = self.epsilon + first + math.log(c) - math.log1p(c) - math.log(fall)
        value = c * t + first - math.log1p(c) - math.log(-math.expm1(-self.epsilon))
        low, high = t - self.epsilon, t
        up = min(max((math.exp(self.epsilon - t) - 1) / math.expm1(self.epsilon) * math.exp(t), 0.0), 1.0)
        weights = [up * math.exp(c * high - value), (1 - up) * math.exp(c * low - value)]
        share = weights[0] / (weights[0] + weights[1])  # of the larger loss, in the tilted law
        lost = 16e-16 * (1 + c * self.epsilon)
        return value + lost, low + share * self.epsilon, share * (1 - share) * self.epsilon**2


@dataclass(frozen=True)
class _Blended:
    """A blend of atoms, slopes and Gaussians."""

    blend: Blend

    @property
    def reach(self) -> float:
        parts = [part for _, part in self.blend.parts]
        return min(
            part.sigma / part.shift if isinstance(part, Whole)
            else part.sigma if isinstance(part, Pair)
            else 1 / max(abs(part.most), 1e-6)
            for part in parts
        )  # fmt: skip

    def at(self, c: float) -> tuple[float, float, float]:
        found = []
        for _, part in self.blend.parts:
            if isinstance(part, Pair):
                found.append(cumulants.Tilted(*(float(x) for x in tilts([part], c)[:, 0])))
            else:
                found.append(part.tilted(c, 0.0))
        value, slope, curvature = mixed([weight for weight, _ in self.blend.parts], found)
        lost = 64e-16 * (1 + abs(value) + max(abs(one.value) for one in found))
        return value + lost, slope, curvature


_Closed = _Pure | _Positive | _Ranged | _Blended | SelectionCurve
_Priced = Pair | _Closed


@dataclass(frozen=True)
class RdpProfile:
    """The profile of a composition from its Rényi curve; ``improved`` says which conversion is used."""

    event: Event
    relation: Relation
    curves: tuple[Curve, ...] = field(repr=False, compare=False)
    improved: bool = True
    accountant: str = NAME
    guarantee: bool = True

    def divergence(self, order: float) -> float:
        """The Rényi divergence of order ``order`` > 1, the worse direction."""
        if not 1 < order < math.inf:
            raise OptionError(f"order must be above 1 and finite, got {order!r}")
        return 0.0 if self.curves[0].empty else self._worst(order - 1) / (order - 1)

    def best_order(self, delta: float) -> float:
        """The order at which ε at ``delta`` is least."""
        _validate.open_unit(delta=delta)
        if self.curves[0].empty:
            return math.inf
        target = -math.log(delta)

        def excess(c: float) -> tuple[float, float]:
            k = self.curves[0].at(c)
            value, slope = c * k.slope - k.value - target, c * k.curvature
            return (value + math.log1p(c), slope + 1 / (1 + c)) if self.improved else (value, slope)

        return 1 + _search.newton(excess, self.curves[0].most)

    def epsilon(self, delta: float) -> float:
        """The ε at ``delta``, at the best order; zero where the conversion would be negative."""
        c = self.best_order(delta) - 1
        return 0.0 if self.curves[0].empty else max((self._convex(c) - math.log(delta)) / c, 0.0)

    def delta(self, epsilon: float) -> float:
        """The δ at ``epsilon``, at its best order; at most 1, and never rounded down to nothing."""
        _validate.non_negative(epsilon=epsilon)
        if self.curves[0].empty:
            return 0.0

        def excess(c: float) -> tuple[float, float]:
            k = self.curves[0].at(c)
            value, slope = k.slope - epsilon, k.curvature
            return (value - math.log1p(1 / c), slope + 1 / (c * (1 + c))) if self.improved else (value, slope)

        c = _search.newton(excess, self.curves[0].most)
        return max(math.exp(min(self._convex(c) - c * epsilon, 0.0)), sys.float_info.min)

    def _worst(self, c: float) -> float:
        return max(curve.at(c).value for curve in self.curves)

    def _convex(self, c: float) -> float:
        """G(c): see the module."""
        return self._worst(c) - (c * math.log1p(1 / c) + math.log1p(c) if self.improved else 0)


def account(event: Event, relation: Relation = Relation.ADD_REMOVE, group: int = 1) -> RdpProfile:
    """The Rényi profile of any composition of known events, by the improved conversion.

    With ``group``, that of so many rows that change together.

    >>> from dpgrad.accounting.events import Gaussian, Poisson, Repeat
    >>> profile = account(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000))
    >>> round(profile.epsilon(1e-5), 7), round(profile.best_order(1e-5), 2), round(profile.divergence(17.22), 6)
    (1.035384, 17.22, 0.560879)

    Guarantee: (epsilon(δ), δ)-private for every δ, for neighbours under ``relation``; the steps may be chosen with
    knowledge of earlier outputs as long as the events are fixed in advance.
    """
    relation = Relation(relation)
    return RdpProfile(event, relation, _curves(event, relation, group))


def classic(event: Event, relation: Relation = Relation.ADD_REMOVE) -> RdpProfile:
    """The same by the classic conversion, which papers before 2020 report.

    >>> from dpgrad.accounting.events import Gaussian, Poisson, Repeat
    >>> round(classic(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000)).epsilon(1e-5), 6)
    1.258376
    """
    relation = Relation(relation)
    return RdpProfile(event, relation, _curves(event, relation), improved=False, accountant=CLASSIC)


def _curves(event: Event, relation: Relation, group: int = 1) -> tuple[Curve, ...]:
    if group > 1:  # the answers of several rows are independent
        event = Compose(tuple(
            Repeat(leaf, count * (group if isinstance(leaf, RandomizedResponse) else 1))
            for leaf, count in leaves(event).items()
        ))  # fmt: skip
    return tuple(Curve(tally(event, partial(_price, relation, one, group))) for one in pairs.directions(relation))


def _price(relation: Relation, direction: Kind, group: int, leaf: Leaf) -> _Priced:
    """What bounds the loss of one application of ``leaf``."""
    match leaf:
        case Approximate(epsilon, delta):
            exact.refuse_other(leaf, relation)
            if delta:
                raise AccountingError(
                    "accountant rdp has no price for a release that is private with delta above 0: use accountant pld "
                    "or exact"
                )
            return _Pure(group * epsilon) if epsilon else Pair(direction, 0.0, 1.0)  # it sees no row
        case Shifted() if group > 1:
            raise AccountingError("objective perturbation has no Rényi bound for several rows that change together")
        case Shifted(shift, inner):
            return _Positive(shift, math.sqrt(exact.precision(inner, relation)))
        case Selection(events, law):
            return SelectionCurve([_curves(event, relation, group) for event in events], law)
        case Exponential(epsilon):
            losses.refuse_other(leaf, relation)
            return _Ranged(group * epsilon) if epsilon else Pair(direction, 0.0, 1.0)
        case DiscreteGaussian(sigma, sensitivity):
            return _Blended(Blend(((1.0, Whole(sigma, relation.reach * group * sensitivity)),)))
        case _:
            step = losses.of(leaf, relation, direction, group)
            return step if isinstance(step, Pair) else _Blended(step)
