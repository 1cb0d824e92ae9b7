"""One sampled step: its profile in closed form.

With e^{ε′} = 1 + (e^ε − 1)/q, removing a row has q times the profile of the plain Gaussian at ε′; adding one has
1 − e^ε(1−q) times it at ε″ with e^{−ε″} = 1 + (e^{−ε} − 1)/q, and nothing from ε = −log(1−q) on. ``larger`` is the
larger of the two. For ``antipodal`` and for groups, δ = P(x > x*) − e^ε·Q(x > x*) cancels, and is integrated instead:
each term of ∫(1 − e^{ε−L})dP beyond the x* of loss ε is positive. Proofs: docs/proofs/accounting.md, section 6.
"""

import math

import numpy as np

from dpgrad.accounting import _search, exact
from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.accounting.pld import discretise
from dpgrad.accounting.pld.blends import Atom, Blend, BlendPart, Slope, Step, Whole

__all__ = ["SLACK", "bound", "delta", "epsilon_at"]

SLACK = 1e-10  # relative error of δ, at most
_ROUNDING = 16 * float(np.finfo(float).eps)  # of ε and of log(1 − q)
_LEAST = 1e-300
_BEYOND = 40.0  # standard deviations; N(0, 1) has 1e-350 of its mass beyond


def delta(pair: Step, epsilon: float) -> float:
    """δ(ε) of one step at ε ≥ 0, to a relative error of `SLACK`.

    >>> f"{delta(Pair(Kind.REMOVE, 1e-5, 1.0), 0.01):.6g}"
    '9.2335e-17'
    """
    if isinstance(pair, Blend):
        return math.fsum(weight * _part(part, epsilon) for weight, part in pair.parts)
    if pair.sampling_rate == 1:
        return _gaussian(pair.sigma, epsilon)
    if pair.group > 1:
        return 0.0 if epsilon >= pair.most else _integral(pair, epsilon)
    match pair.kind:
        case Kind.REMOVE:
            return pair.sampling_rate * _gaussian(pair.sigma, _amplified(pair.sampling_rate, epsilon))
        case Kind.ADD:
            room = -math.expm1(epsilon + math.log1p(-pair.sampling_rate))
            gain = math.expm1(-epsilon) / pair.sampling_rate
            return room * _gaussian(pair.sigma, -math.log1p(gain)) if room > 0 and gain > -1 else 0.0
        case Kind.LARGER:
            kinds = (Kind.REMOVE, Kind.ADD)
            return max(delta(Pair(kind, pair.sampling_rate, pair.sigma), epsilon) for kind in kinds)
        case Kind.ANTIPODAL:
            return _integral(pair, epsilon)


def _part(part: BlendPart, epsilon: float) -> float:
    """δ(ε) of one part of a blend; every term is positive."""
    match part:
        case Atom(loss):
            return -math.expm1(min(epsilon - loss, 0.0))
        case Slope(reach):
            # ∫ (1 − e^{ε−L}) e^{L/2} dL / 4 sinh(r/2) = 2e^{ε/2}·sinh²((r − ε)/4)/sinh(r/2)
            left = max(reach - epsilon, 0.0) / 4
            log = (epsilon - reach) / 2 + 2 * left + 2 * math.log1p(-math.exp(-2 * left)) if left else -math.inf
            return math.exp(log) / -math.expm1(-reach)
        case Whole():
            losses, log_p = part.atoms(0.0)
            above = losses > epsilon
            return math.fsum(np.exp(log_p[above]) * -np.expm1(epsilon - losses[above]))
        case _:
            return delta(part, epsilon)


def _amplified(sampling_rate: float, epsilon: float) -> float:
    """log(1 + (e^ε − 1)/q)."""
    if epsilon > 30:
        return epsilon - math.log(sampling_rate) + math.log1p(-(1 - sampling_rate) * math.exp(-epsilon))
    return math.log1p(math.expm1(epsilon) / sampling_rate)


def _gaussian(sigma: float, epsilon: float) -> float:
    return math.exp(exact.log_delta(1 / sigma, epsilon))


def _integral(pair: Pair, epsilon: float) -> float:
    start = float(pair.place(np.array(epsilon)))
    end = _BEYOND * pair.sigma + pair.group
    if start > end:
        return 0.0
    x, log_weight = discretise.panels(pair, start, max(start, pair.group) + _BEYOND * pair.sigma)
    loss = pair.loss(x)
    terms = np.exp(pair.log_p(x) + log_weight) * -np.expm1(np.minimum(epsilon - loss, 0.0))
    return math.fsum(terms)


def bound(pair: Step, epsilon: float, upper: bool) -> float:
    """δ(ε), from above or from below."""
    sign = 1 if upper else -1
    size = 4 * (1 + epsilon) if isinstance(pair, Blend) else pair.group * (epsilon - math.log1p(-pair.sampling_rate))
    moved = epsilon - sign * _ROUNDING * size
    found = min(delta(pair, max(moved, 0.0)) * (1 + sign * SLACK), 1.0)
    # a δ too small for a float is not zero, except where no loss is as large
    return max(found, _LEAST) if upper and epsilon < pair.most else found


def epsilon_at(pair: Step, target: float, upper: bool) -> float:
    """The least ε ≥ 0 at which δ(ε) ≤ ``target``, from above or from below."""

    def beyond(epsilon: float) -> bool:
        return bound(pair, epsilon, upper) > target

    if not beyond(0.0):
        return 0.0
    return _search.halved(beyond, *_search.doubled(beyond, 0.0, 1e-9), relative=1e-14)[upper]
