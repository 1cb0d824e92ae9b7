"""The exact accountant: full-batch Gaussian releases in closed form.

k releases with sensitivity Δ_j and noise s_j, each chosen with knowledge of the earlier ones, are together exactly
μ-GDP with μ² = Σ(Δ_j/s_j)², and

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)      (Balle and Wang 2018; Dong, Roth and Su 2019).

The two terms cancel; with t₁ = ε/μ − μ/2, t₂ = ε/μ + μ/2 and Mills' ratio m(t) = Φ(−t)/φ(t), δ = φ(t₁)·(m(t₁) − m(t₂)),
which keeps its digits at any δ. A shuffled epoch is priced as one Gaussian, which bounds it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, log_ndtr

from dpgrad import _validate
from dpgrad.accounting import pairs
from dpgrad.events import Event, Leaf, Poisson, Relation, fold

NAME = "exact"
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def log_delta(mu: float, epsilon: float) -> float:
    """log δ(ε) of a μ-GDP mechanism.

    >>> round(math.exp(log_delta(1.0, 1.0)), 12)
    0.126936737507
    """
    if mu == 0:
        return -math.inf if epsilon >= 0 else math.log(-math.expm1(epsilon))
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if low < 0 and (mu >= 0.5 or epsilon < 0):
        first, second = float(log_ndtr(-low)), epsilon + float(log_ndtr(-high))
        return first + math.log1p(-math.exp(min(second - first, -1e-16)))
    if mu < 0.5:  # m(t₁) − m(t₂) = ∫(1 − t·m(t))dt has no cancellation in μ
        t = epsilon / mu + mu / 2 * _POINTS
        gap = float(_WEIGHTS @ (1 - t * _mills(t))) * mu / 2
    else:
        gap = float(_mills(low) - _mills(high))
    return -(low**2) / 2 - 0.5 * math.log(2 * math.pi) + (math.log(gap) if gap > 0 else -math.inf)


def _mills(t: "float | pairs.Array") -> "pairs.Array":
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(np.asarray(t) / math.sqrt(2)))


def epsilon(mu: float, delta: float) -> float:
    """The least ε ≥ 0 of a μ-GDP mechanism at ``delta``, rounded up in the last digits.

    >>> round(epsilon(0.353553, 1e-5), 6)
    1.356466
    """
    target = math.log(delta)
    if mu == 0 or log_delta(mu, 0.0) <= target:
        return 0.0
    # δ(ε) ≤ Φ(μ/2 − ε/μ) < δ from here on
    high = mu * mu / 2 + mu * math.sqrt(-2 * target)
    return _falling(lambda x: log_delta(mu, x) - target, 0.0, high)


def mu_for(epsilon: float, delta: float) -> float:
    """The largest μ that is (ε, δ)-private, rounded down in the last digits.

    >>> round(mu_for(1.0, 1e-5), 6)
    0.268051
    """
    _validate.non_negative(epsilon=epsilon)
    _validate.open_unit(delta=delta)
    target = math.log(delta)
    low = 1.0
    while log_delta(low, epsilon) > target:
        low /= 2
    high = 2 * low
    while log_delta(high, epsilon) <= target:
        high *= 2
    return 1 / _falling(lambda x: log_delta(1 / x, epsilon) - target, 1 / high, 1 / low)


def _falling(excess: Callable[[float], float], low: float, high: float) -> float:
    """The point in [low, high] from which on a falling function is at most zero, from above."""
    while high - low > 4e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high * (1 + 1e-13)


@dataclass(frozen=True)
class GaussianProfile:
    """The profile of a mechanism that is exactly μ-GDP."""

    mu: float
    event: Event
    relation: Relation
    accountant: str = NAME
    guarantee: bool = True

    def epsilon(self, delta: float) -> float:
        _validate.open_unit(delta=delta)
        return epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        _validate.non_negative(epsilon=epsilon)
        return min(math.exp(log_delta(self.mu, epsilon)) * (1 + 1e-12), 1.0)


def account(event: Event, relation: Relation = Relation.ADD_REMOVE) -> GaussianProfile:
    """The profile of full-batch Gaussians; sampled ones are refused: no closed form is known.

    >>> from dpgrad.events import Gaussian, Repeat
    >>> profile = account(Repeat(Gaussian(8.0), 128))
    >>> round(profile.epsilon(1e-5), 6)
    6.57297
    """
    relation = Relation(relation)
    square = fold(event, lambda leaf: _precision(leaf, relation), lambda x, n: n * x, lambda xs: math.fsum(xs))
    return GaussianProfile(math.sqrt(square), event, relation)


def _precision(leaf: Leaf, relation: Relation) -> float:
    """(shift/std)² of one application."""
    if isinstance(leaf, Poisson) and leaf.sampling_rate == 0:
        return 0.0
    pair = pairs.of(leaf, relation, pairs.directions(relation)[0])
    if pair.rate < 1:
        raise ValueError(
            f"accountant exact prices full-batch Gaussians only, got {type(leaf).__name__} sampling "
            f"at rate {pair.rate:g}: use accountant pld"
        )
    return float(pair.sigma) ** -2
