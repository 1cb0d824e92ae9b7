"""How many trials a selection runs: the random numbers of Papernot and Steinke, "Hyperparameter tuning with Rényi
differential privacy" (ICLR 2022).

A fixed number of trials would reveal more: that the best of K is no better than it is says something about all of them.
A random number hides how many others there were.

>>> law = NegativeBinomial.of_mean(10.0, eta=1.0)  # geometric
>>> round(law.gamma, 6), round(law.mean, 6), law.quantile(0.99)
(0.1, 10.0, 44)
>>> PoissonTrials(10.0).quantile(0.99)
18
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from dpgrad import _validate
from dpgrad.accounting import _search
from dpgrad.errors import AccountingError, OptionError

__all__ = ["LAWS", "NegativeBinomial", "PoissonTrials", "Trials", "law_named", "trials_from_dict", "trials_to_dict"]

LAWS = ("logarithmic", "geometric", "poisson")
MOST_MEAN = 1e4  # trials
_NEVER = 1e-30  # a weight beyond the mean after which nothing is left that a float could tell
_LEAST_GAMMA = 1e-12


@dataclass(frozen=True)
class NegativeBinomial:
    """The truncated negative binomial law on 1, 2, …: P(K = k) ∝ (1 − γ)^k Π_{l<k} (l + η)/(l + 1).

    ``eta`` = 1 is the geometric law, and 0 the logarithmic one, P(K = k) ∝ (1 − γ)^k/k. A smaller ``eta`` costs less
    at the same mean and has a longer tail. ``gamma`` in (0, 1) sets the mean.

    >>> round(NegativeBinomial(1.0, 0.25).mean, 6)
    4.0
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        _validate.number(eta=self.eta, gamma=self.gamma)
        if not -1 < self.eta <= 100:
            raise OptionError(f"eta must lie above -1 and be at most 100, got {_validate.shown(self.eta)}")
        if not _LEAST_GAMMA <= self.gamma < 1:
            raise OptionError(f"gamma must lie in [{_LEAST_GAMMA:g}, 1), got {_validate.shown(self.gamma)}")
        object.__setattr__(self, "eta", float(self.eta))
        object.__setattr__(self, "gamma", float(self.gamma))

    @classmethod
    def of_mean(cls, mean: float, eta: float = 0.0) -> "NegativeBinomial":
        """The law of that mean, found from below: its mean is at most ``mean``, by a part in 10¹².

        >>> round(NegativeBinomial.of_mean(5.0).gamma, 6)
        0.06992
        """
        _validate.positive(**{"mean number of trials": mean})
        if not 1 < mean <= MOST_MEAN:
            raise OptionError(
                f"the mean number of trials must lie above 1 and be at most {MOST_MEAN:,.0f}, got {mean:g}: one trial "
                "needs no selection"
            )
        _, log_gamma = _search.halved(
            lambda x: cls(eta, math.exp(x)).mean > mean, math.log(_LEAST_GAMMA), math.log1p(-1e-9), absolute=1e-13
        )
        found = cls(eta, math.exp(log_gamma))
        if found.mean < mean * (1 - 1e-6):
            raise OptionError(f"eta = {eta:g} has no law of mean {mean:g}: choose eta 0 or more, or a smaller mean")
        return found

    @property
    def mean(self) -> float:
        """E[K]: η(1 − γ)/(γ(1 − γ^η)), and (1/γ − 1)/log(1/γ) for η = 0."""
        x = -math.log(self.gamma)
        share = -math.expm1(-self.eta * x) / self.eta if self.eta else x  # (1 − γ^η)/η
        return (1 - self.gamma) / self.gamma / share

    def weights(self) -> Iterator[float]:
        """P(K = 0), P(K = 1), …"""
        yield 0.0
        x = -math.log(self.gamma)
        norm = math.expm1(self.eta * x) / self.eta if self.eta else x  # (γ^−η − 1)/η
        weight = (1 - self.gamma) / norm
        for k in count(1):
            yield weight
            weight *= (1 - self.gamma) * (k + self.eta) / (k + 1)

    def quantile(self, share: float) -> int:
        """The number of trials that is not exceeded with probability ``share``."""
        return _quantile(self, share)

    def __str__(self) -> str:
        name = {0.0: "logarithmic", 1.0: "geometric"}.get(self.eta, f"truncated negative binomial, η = {self.eta:g}")
        return f"{name}, mean {self.mean:.6g}"


@dataclass(frozen=True)
class PoissonTrials:
    """The Poisson law of mean ``mean``; with probability e^−mean no trial is run.

    >>> round(next(PoissonTrials(2.0).weights()), 4)
    0.1353
    """

    mean: float

    def __post_init__(self) -> None:
        _validate.positive(**{"mean number of trials": self.mean})
        if self.mean > MOST_MEAN:
            raise OptionError(f"the mean number of trials must be at most {MOST_MEAN:,.0f}, got {self.mean:g}")
        object.__setattr__(self, "mean", float(self.mean))

    def weights(self) -> Iterator[float]:
        """P(K = 0), P(K = 1), …"""
        for k in count(0):
            yield math.exp(k * math.log(self.mean) - self.mean - math.lgamma(k + 1))

    def quantile(self, share: float) -> int:
        """The number of trials that is not exceeded with probability ``share``."""
        return _quantile(self, share)

    def __str__(self) -> str:
        return f"poisson, mean {self.mean:g}"


Trials = NegativeBinomial | PoissonTrials


def _quantile(law: Trials, share: float) -> int:
    """The least k with P(K ≤ k) ≥ share; for a share next to 1, the k beyond which the rest is below rounding."""
    if not 0 <= share <= 1:
        raise OptionError(f"share must lie in [0, 1], got {_validate.shown(share)}")
    total = 0.0
    for k, weight in enumerate(law.weights()):
        total += weight
        if total >= share or (weight < _NEVER and k > law.mean):
            return k
    raise AssertionError("the weights of a law do not end")


def law_named(name: str, mean: float) -> Trials:
    """The law of that name and mean: logarithmic (η = 0), geometric (η = 1) or poisson.

    >>> round(law_named("geometric", 4.0).mean, 6)
    4.0
    """
    _validate.one_of(LAWS, trials=name)
    return PoissonTrials(mean) if name == "poisson" else NegativeBinomial.of_mean(mean, float(name == "geometric"))


def trials_to_dict(law: Trials) -> dict[str, object]:
    """The law as plain values, for JSON."""
    if isinstance(law, PoissonTrials):
        return {"law": "poisson", "mean": law.mean}
    return {"law": "negative-binomial", "eta": law.eta, "gamma": law.gamma}


def trials_from_dict(data: object) -> Trials:
    """The law that `trials_to_dict` wrote; anything else is refused."""
    match data:
        case {"law": "poisson", "mean": mean, **rest} if not rest:
            return PoissonTrials(mean)
        case {"law": "negative-binomial", "eta": eta, "gamma": gamma, **rest} if not rest:
            return NegativeBinomial(eta, gamma)
    raise AccountingError(f"not a law of the number of trials: {_validate.shown(data)}")
