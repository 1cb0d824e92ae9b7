"""The profile of a composition by a contour integral: an estimate to about ten digits, with no grid.

With K(z) = Σ_t log E_P e^{zL_t} and any c > 0,

    δ(ε) = (1/π) ∫₀^∞ Re[ e^{K(c+iw) − ε(c+iw)} / ((c+iw)(c+1+iw)) ] dw,

taken at the saddle of the integrand, where it is a bell a few standard deviations wide. The trapezoidal rule with
spacing 2π/Λ returns Σ_k g(ε + kΛ)/e^{cε} with g(ε) = e^{cε}δ(ε) ≥ 0, so its error is known: for k < 0 it is below
e^{−cΛ}, for k > 0 a Chernoff tail (`_period`). The integrand decays slowly where a few steps carry all the loss (T = 1,
tiny q): `Contour.converged` is then false, and the lattice bounds answer alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from dpgrad.accounting.pairs import Array, Kind, Pair
from dpgrad.accounting.pld import cumulants
from dpgrad.accounting.pld.blends import Blend, Step

__all__ = ["Contour", "Saddle", "Total", "saddle_for_delta", "saddle_for_epsilon", "total"]

_MOST_FREQUENCIES = 1600
_NEGLIGIBLE = 26.0  # e⁻²⁶ = 5e-12
_MOST_TURNS = 4000.0  # radians of e^{iwL} over the range of L: beyond, quadrature costs more than a lattice
_AGREEMENT = 1e-6  # of δ, between interpolations at ten nodes and at twelve, which err by less
_OFTEN = 16
_DISTINCT = 40  # up to here every distinct step is integrated by itself


class Total(NamedTuple):
    """A composition as a weighted sum of cumulant functions; interpolation weights may be fractions or negative."""

    pairs: tuple[Step, ...]
    weights: tuple[float, ...]

    def at(self, c: float, tail: float = 0.0) -> cumulants.Tilted:
        parts = [_tilted(pair, c, tail) for pair in self.pairs]
        return cumulants.Tilted(
            *(
                math.fsum(w * x for w, x in zip(self.weights, column, strict=True))
                for column in zip(*parts, strict=True)
            )
        )

    def transform(self, c: float, w: Array, tail: float = 0.0) -> cumulants.Complex:
        total = np.zeros(len(w), np.complex128)
        for pair, weight in zip(self.pairs, self.weights, strict=True):
            one = pair.transform(c, w, tail) if isinstance(pair, Blend) else cumulants.transform(pair, c, w, tail)
            total += weight * one
        return total

    def revival(self, c: float, w: Array, tail: float = 0.0) -> Array:
        """What Re K(c + iw′) may be again at some w′ beyond w; where a step has a density, what it is at w."""
        total = np.zeros(len(w))
        for step, weight in zip(self.pairs, self.weights, strict=True):
            again = step.revival(c, w, tail) if isinstance(step, Blend) else cumulants.transform(step, c, w, tail).real
            total += weight * again
        return total


def _tilted(step: Step, c: float, tail: float) -> cumulants.Tilted:
    return step.tilted(c, tail) if isinstance(step, Blend) else cumulants.tilted(step, c, tail)


def _length(step: Step, tilt: float, tail: float) -> float:
    """The range of losses that a transform sees."""
    if isinstance(step, Blend):
        low, high = step.span(max(tail, 1e-300))
        return high - low
    return float(np.ptp(cumulants.law(step, tilt, tail=tail).loss))


def total(counts: Mapping[Step, int], nodes: int = 12) -> Total:
    """The composition of ``counts``; many noise levels or rates are interpolated, at a cost independent of how many.

    K is analytic in log σ and log q: on segments of at most a factor 1.6, Chebyshev interpolation with twelve nodes is
    exact to about ten digits, with five to about four, and Σ_t K(z; σ_t) becomes Σ_j W_j K(z; σ_j) with W_j the sum of
    the Lagrange polynomials. Where rare losses carry K it turns too fast for that: `Contour.agrees` tells.
    """
    plain: dict[Step, float] = {step: float(count) for step, count in counts.items() if isinstance(step, Blend)}
    groups: dict[tuple[Kind, int], list[tuple[Pair, int]]] = {}
    for pair, count in ((step, count) for step, count in counts.items() if isinstance(step, Pair)):
        groups.setdefault((pair.kind, pair.group), []).append((pair, count))
    for (kind, together), members in groups.items():
        # a step repeated many times is better left alone: at the edge of a segment interpolation would amplify it
        members.sort(key=lambda member: -member[1])
        alone = next((i for i, (_, n) in enumerate(members[:_DISTINCT]) if n < _OFTEN), len(members[:_DISTINCT]))
        if len(members) - alone <= _DISTINCT:
            alone = len(members)
        plain.update(members[:alone])
        members = members[alone:]
        if not members:
            continue
        sigma = np.log([pair.sigma for pair, _ in members])
        rate = np.log([pair.sampling_rate for pair, _ in members])
        times = np.array([count for _, count in members], float)
        for in_sigma in _segments(sigma):
            for in_rate in _segments(rate[in_sigma]):
                chosen = np.flatnonzero(in_sigma)[in_rate]
                sigma_nodes, sigma_basis = _lagrange(sigma[chosen], nodes)
                rate_nodes, rate_basis = _lagrange(rate[chosen], nodes)
                if len(chosen) <= 4 * len(sigma_nodes) * len(rate_nodes):  # interpolation would save little
                    plain.update(members[i] for i in chosen)
                    continue
                weights = np.einsum("t,ts,tr->sr", times[chosen], sigma_basis, rate_basis)
                for i, s in enumerate(sigma_nodes):
                    for j, r in enumerate(rate_nodes):
                        pair = Pair(kind, min(math.exp(r), 1.0), math.exp(s), together)
                        plain[pair] = plain.get(pair, 0.0) + float(weights[i, j])
    return Total(tuple(plain), tuple(float(w) for w in plain.values()))


def _segments(values: Array) -> Iterable[np.typing.NDArray[np.bool_]]:
    low, high = values.min(), values.max()
    count = max(1, math.ceil((high - low) / 0.47))
    place = np.minimum((values - low) / max(high - low, 1e-300) * count, count - 1).astype(int)
    return [place == i for i in range(count) if np.any(place == i)]


def _lagrange(values: Array, most: int) -> tuple[Array, Array]:
    """Chebyshev nodes over the values' range, and the Lagrange basis at each value: (nodes,), (values, nodes)."""
    low, high = values.min(), values.max()
    if high - low < 1e-12:
        return np.array([low]), np.ones((len(values), 1))
    count = min(most, len(np.unique(values)))
    angles = (np.arange(count) + 0.5) * np.pi / count
    nodes = (low + high) / 2 + (high - low) / 2 * np.cos(angles)
    barycentric = np.sin(angles) * (-1.0) ** np.arange(len(nodes))
    gap = values[:, None] - nodes
    hit = gap == 0
    terms = barycentric / np.where(hit, 1, gap)
    basis = np.where(hit.any(axis=1, keepdims=True), hit, terms / terms.sum(axis=1, keepdims=True))
    return nodes, basis


class Saddle(NamedTuple):
    """Where the integrand is centred: tilt c, and ε and log δ in the saddle-point approximation there."""

    tilt: float
    epsilon: float
    log_delta: float
    deviation: float  # standard deviation of the tilted total loss


def _saddle(composed: Total, c: float, tail: float) -> Saddle:
    k = composed.at(c, tail)
    epsilon = k.slope - 1 / c - 1 / (c + 1)
    width = max(k.curvature, 0.0) + c**-2 + (c + 1) ** -2
    log_delta = k.value - c * epsilon - math.log(c) - math.log1p(c) - 0.5 * math.log(2 * math.pi * width)
    return Saddle(c, epsilon, log_delta, math.sqrt(max(k.curvature, 0.0)))


def saddle_for_delta(composed: Total, delta: float, tail: float, most: float = math.inf) -> Saddle:
    """The saddle whose approximate δ is ``delta``; where even ε = 0 has a smaller δ, the saddle of ε = 0.

    ``tail`` of each step's mass at the largest losses is left out. Losses are at most ``most``: near that there is no
    saddle, and the search stops.
    """
    target = math.log(delta)
    flat = _saddle(composed, 1e-6, tail)
    # a Gaussian loss of the same spread would have its saddle here
    guess = math.sqrt(-2 * target) / max(flat.deviation, 1e-12)
    found = _search(composed, lambda s: s.log_delta - target, flat, guess, tail, most)
    return found if found.epsilon >= 0 else saddle_for_epsilon(composed, 0.0, tail, most)


def saddle_for_epsilon(composed: Total, epsilon: float, tail: float, most: float = math.inf) -> Saddle:
    """The saddle of the integrand at ``epsilon``."""
    flat = _saddle(composed, 1e-6, tail)
    guess = (epsilon + math.hypot(epsilon, 2 * flat.deviation)) / 2 / max(flat.deviation, 1e-12) ** 2

    def excess(s: Saddle) -> float:
        return (epsilon - s.epsilon) / max(s.deviation, 1e-12)

    return _search(composed, excess, flat, guess, tail, most)._replace(epsilon=epsilon)


def _search(
    composed: Total, excess: Callable[[Saddle], float], flat: Saddle, guess: float, tail: float, most: float
) -> Saddle:
    """The saddle at which ``excess``, which falls with the tilt, is zero: secants in log c kept within a bracket."""
    if excess(flat) <= 0:
        return flat
    low = high = _saddle(composed, min(max(guess, 1e-4), 1e7), tail)
    if excess(high) > 0:
        while excess(high) > 0:
            if high.epsilon >= 0.9995 * most or high.tilt > 1e8:
                return high
            low, high = high, _saddle(composed, 2 * high.tilt, tail)
    else:
        while excess(low) <= 0:
            if low.tilt < 1e-5:
                low = flat
                break
            high, low = low, _saddle(composed, low.tilt / 2, tail)
    middle = low
    for _ in range(60):
        if math.log(high.tilt / low.tilt) < 1e-4:
            break
        at_low, at_high = excess(low), excess(high)
        share = min(max(at_low / (at_low - at_high), 0.05), 0.95)
        middle = _saddle(composed, low.tilt * (high.tilt / low.tilt) ** share, tail)
        if abs(excess(middle)) < 1e-3:
            break
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return middle


def _period(composed: Total, saddle: Saddle, tail: float) -> float:
    """A Λ for which the other terms of the trapezoidal rule, Σ_{k≠0} e^{ckΛ}δ(ε + kΛ), are negligible next to δ(ε).

    For k < 0, δ ≤ 1. For k > 0, e^{ax}δ(x) ≤ e^{K(a)} with any a > c, where K is that of the law that is integrated:
    a tail that hardly matters to δ can carry much of the tilted mass, and then Λ must be long.
    """
    need = _NEGLIGIBLE - min(saddle.log_delta, 0.0)
    bounds = []
    for theta in (math.sqrt(2 * need) / max(saddle.deviation, 1e-9), saddle.tilt, 0.3 * saddle.tilt):
        a = saddle.tilt + theta
        bounds.append((composed.at(a, tail).value - a * saddle.epsilon + need) / theta)
    return max(need / saddle.tilt, min(bounds))


def _tail(composed: Total, saddle: Saddle, tail: float) -> tuple[float, float]:
    """How much of each step's mass to leave out, as little as costs few frequencies, and Λ."""
    usual = max((_NEGLIGIBLE - min(saddle.log_delta, 0.0)) / saddle.tilt, 40 * saddle.deviation)
    for share in (1e-8, 1e-5, 1e-3, 1e-1):
        period = _period(composed, saddle, share * tail)
        if period <= 2 * usual:
            return share * tail, period
    return tail, _period(composed, saddle, tail)


class Contour:
    """The integrand along Re z = c, computed once: δ at any ε near the saddle is then a dot product.

    Up to ``tail`` of each step's mass at the largest losses is left out.
    """

    def __init__(self, composed: Total, saddle: Saddle, tail: float) -> None:
        tail, period = _tail(composed, saddle, tail)
        self._tilt, self._tail = saddle.tilt, tail
        self._value = composed.at(saddle.tilt, tail).value
        self._spacing = 2 * math.pi / period
        w, terms = np.empty(0), np.empty(0, np.complex128)
        self.converged = False
        turns = max(_length(step, saddle.tilt, tail) for step in composed.pairs)
        while len(w) < _MOST_FREQUENCIES and not self.converged and turns * self._spacing * (len(w) + 64) < _MOST_TURNS:
            block = self._spacing * np.arange(len(w), len(w) + 64, dtype=float)
            new = self._integrand(composed, block)
            w, terms = np.concatenate([w, block]), np.concatenate([terms, new])
            left = float(self._ends(composed, block, new).max()) * len(w) / float(np.abs(terms).sum())
            self.converged = left < 1e-13
            if (
                len(w) >= 128
                and math.log(1e-13) / math.log(min(max(left, 1e-300), 0.99)) * len(w) > 2 * _MOST_FREQUENCIES
            ):
                break  # at this pace it would not decay in time
        terms[:1] /= 2
        self._w, self._terms = w, terms

    def agrees(self, other: Total, epsilon: float) -> bool:
        """Whether ``other``, the same composition interpolated at fewer nodes, has the same δ(ε)."""
        blocks = [self._integrand(other, w) for w in np.split(self._w, range(64, len(self._w), 64))]
        again = np.concatenate(blocks)
        again[:1] /= 2
        one, two = (float((np.exp(-1j * self._w * epsilon) @ terms).real) for terms in (self._terms, again))
        return abs(one - two) <= _AGREEMENT * abs(one)

    def _ends(self, composed: Total, block: Array, terms: cumulants.Complex) -> Array:
        """What the integrand may be again beyond the last frequencies of a block."""
        if not any(isinstance(step, Blend) for step in composed.pairs):
            return np.abs(terms[-8:])
        z = self._tilt + 1j * block[-8:]
        return np.asarray(
            np.exp(composed.revival(self._tilt, block[-8:], self._tail) - self._value) / np.abs(z * (z + 1))
        )

    def _integrand(self, composed: Total, w: Array) -> cumulants.Complex:
        z = self._tilt + 1j * w
        found = np.exp(composed.transform(self._tilt, w, self._tail) - self._value) / (z * (z + 1))
        return np.asarray(found)

    def delta(self, epsilon: float) -> float:
        """δ(ε); meaningful where ``converged``."""
        scale = math.exp(min(self._value - self._tilt * epsilon, 700.0)) * self._spacing / math.pi
        return scale * float((np.exp(-1j * self._w * epsilon) @ self._terms).real)

    def epsilon(self, delta: float, near: float) -> float | None:
        """The ε at which δ(ε) = ``delta``, by secants on log δ from ``near``; None where it is not found."""
        if not self.converged:
            return None
        points: list[tuple[float, float]] = []
        epsilon = near
        for _ in range(30):
            value = self.delta(epsilon)
            if not value > 0:
                return None
            excess = math.log(value) - math.log(delta)
            if abs(excess) < 1e-13:
                return epsilon
            slope = -self._tilt
            if points and points[-1][0] != epsilon:
                slope = min((excess - points[-1][1]) / (epsilon - points[-1][0]), -0.1 * self._tilt)
            points.append((epsilon, excess))
            if abs(excess / slope) < 1e-15 * max(abs(epsilon), 1e-3):
                return epsilon
            epsilon -= excess / slope
        return None
