"""Leaves that are no Gaussian noise on a sum: Laplace, discrete Gaussian, randomized response, exponential mechanism.

`accounting.events` holds them together with all others; import them from there.
"""

import math
import operator
from dataclasses import dataclass

from dpgrad import _validate
from dpgrad.accounting.relation import Relation, declared
from dpgrad.errors import OptionError

__all__ = ["DiscreteGaussian", "Exponential", "Laplace", "RandomizedResponse"]

_LEAST_SCALE, _MOST_SCALE = 1e-3, 1e12
_LEAST_SIGMA, _MOST_SIGMA = 0.05, 1e12
_MOST_EPSILON = 1e3


@dataclass(frozen=True)
class Laplace:
    """One number, a sum over rows, plus Laplace noise of scale ``noise_multiplier`` times one row's largest part.

    Each row adds at most 1 in absolute value, in units of that bound. Under replace-one the sum moves by up to 2.

    >>> Laplace(noise_multiplier=10.0)
    Laplace(noise_multiplier=10.0)
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        _within(_LEAST_SCALE, _MOST_SCALE, noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))


@dataclass(frozen=True)
class DiscreteGaussian:
    """A whole number, a sum over rows, plus noise with P(x) proportional to e^{−x²/2σ²} on the whole numbers.

    Each row adds a whole number of at most ``sensitivity`` in absolute value; ``sigma`` is σ, in units of one (Canonne,
    Kamath and Steinke 2020).

    >>> DiscreteGaussian(sigma=10.0, sensitivity=3).sensitivity
    3
    """

    sigma: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        _within(_LEAST_SIGMA, _MOST_SIGMA, sigma=self.sigma)
        _validate.whole(least=1, most=10**9, sensitivity=self.sensitivity)
        object.__setattr__(self, "sigma", float(self.sigma))
        object.__setattr__(self, "sensitivity", operator.index(self.sensitivity))


@dataclass(frozen=True)
class RandomizedResponse:
    """Every row's answer, one of ``categories``: the truth, or with probability ``noise`` any of them at random.

    All answers are released, so their number is public, and only replace-one neighbours have a price. For two
    categories it is the classical coin: ε = log(2/noise − 1).

    >>> round(RandomizedResponse(noise=0.5, categories=2).epsilon, 6)  # log 3
    1.098612
    """

    noise: float
    categories: int

    def __post_init__(self) -> None:
        _validate.whole(least=2, most=10**9, categories=self.categories)
        if not 1e-9 <= _number(noise=self.noise) <= 1:
            raise OptionError(f"noise must lie between 1e-09 and 1, got {_validate.shown(self.noise)}")
        object.__setattr__(self, "noise", float(self.noise))
        object.__setattr__(self, "categories", operator.index(self.categories))

    @property
    def epsilon(self) -> float:
        """The largest privacy loss: log(1 + k(1 − p)/p)."""
        return math.log1p(self.categories * (1 - self.noise) / self.noise)


@dataclass(frozen=True)
class Exponential:
    """The choice of one candidate by the exponential mechanism, ``epsilon``-private under ``relation``.

    A candidate of utility u is chosen with probability proportional to e^{εu/2Δ}, where no utility moves by more than Δ
    between neighbours; or to e^{εu/Δ} if all utilities move in one direction. Its losses lie in an interval of length ε
    (bounded range), which makes it cheaper in composition than other pure mechanisms (Dong, Durfee and Rogers 2020).
    Report-noisy-max with Gumbel noise is the same mechanism.

    >>> Exponential(0.5, "zero-out").epsilon
    0.5
    """

    epsilon: float
    relation: Relation

    def __post_init__(self) -> None:
        _validate.non_negative(epsilon=self.epsilon)
        if self.epsilon > _MOST_EPSILON:
            raise OptionError(f"epsilon must be at most {_MOST_EPSILON:g}, got {_validate.shown(self.epsilon)}")
        object.__setattr__(self, "epsilon", float(self.epsilon))
        object.__setattr__(self, "relation", declared(self.relation))


def _number(**named: float) -> float:
    _validate.non_negative(**named)
    return float(next(iter(named.values())))


def _within(low: float, high: float, **named: float) -> None:
    _validate.positive(**named)
    for name, value in named.items():
        if not low <= value <= high:
            raise OptionError(f"{name} must lie between {low:g} and {high:g}, got {_validate.shown(value)}")
