"""The sum of what a group of k rows adds to one Poisson-sampled step: j of them take part, j ~ Binomial(k, q).

With contributions of norm at most one, the noisy sum is at worst Σ_j b_j·N(j, σ²), and its log-density ratio to N(0,
σ²) is ℓ(x) = log Σ_j b_j·e^{(jx − j²/2)/σ²}, convex and increasing in x (docs/proofs/groups.md).
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

__all__ = ["GroupShifts", "shifts"]

Array = NDArray[np.float64]

_MOST = 32  # distinct shifts of a group; of a larger group they are rounded up, which never lowers a profile
_RARE, _FAINT = 1e-9, 1e-40
_LEAST = -660.0  # the logarithm of a probability that still is one in floating point
_ITERATIONS = 60  # of Newton's method, which takes about six
_CLOSE = 1e-9  # the next step would be its square
_LARGE = 30.0


class GroupShifts(NamedTuple):
    """How far the sum of a group moves, the logarithm of the probability of each, and that of not moving at all."""

    by: tuple[float, ...]
    log_weights: tuple[float, ...]
    none: float

    def log_ratio(self, x: Array, variance: float) -> Array:
        """ℓ(x), to full relative precision where it is small."""
        total, most = np.zeros_like(x), np.full_like(x, -np.inf)
        for by, log_weight in zip(self.by, self.log_weights, strict=True):
            exponent = (by * x - by * by / 2) / variance
            most = np.maximum(most, exponent + log_weight)
            total += math.exp(log_weight) * np.expm1(np.minimum(exponent, _LARGE))
        found = np.log1p(np.maximum(total, math.expm1(self.none)))
        far = most > math.log(_LARGE)
        if np.any(far):
            found = np.where(far, self._log_sum(x, variance, with_none=True)[0], found)
        return np.asarray(found)

    def _log_sum(self, x: Array, variance: float, with_none: bool) -> tuple[Array, Array]:
        """log Σ of the terms, with or without that of no shift, and its derivative in x."""
        none = self.none if with_none else -math.inf
        logs = [log_weight + (by * x - by * by / 2) / variance for by, log_weight in self._terms()]
        top = np.maximum(np.maximum.reduce(logs), none)
        total, moment = np.exp(none - top), np.zeros_like(x)
        for (by, _), log in zip(self._terms(), logs, strict=True):
            share = np.exp(log - top)
            total, moment = total + share, moment + by * share
        return np.asarray(top + np.log(total)), np.asarray(moment / total / variance)

    def _terms(self) -> list[tuple[float, float]]:
        return list(zip(self.by, self.log_weights, strict=True))

    def inverse(self, loss: Array, variance: float) -> Array:
        """The x with ℓ(x) = loss; −∞ at and below ``none``.

        What is solved is log Σ_{j≥1} = log(e^loss − b₀), whose left side is convex with a slope between 1/σ² and k/σ²:
        Newton's method from above never passes the root.
        """
        loss = np.asarray(loss, float)
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.expm1(np.minimum(loss, _LARGE)) - math.expm1(self.none)
            target = np.where(loss < _LARGE, np.log(np.maximum(left, 0.0)), loss + np.log1p(-np.exp(self.none - loss)))
        finite = np.isfinite(target)
        wanted = np.where(finite, target, 0.0)
        bounds = [variance * (wanted - log_weight) / by + by / 2 for by, log_weight in self._terms()]
        x = np.minimum.reduce(bounds)
        for _ in range(_ITERATIONS):
            value, slope = self._log_sum(x, variance, with_none=False)
            step = (value - wanted) / slope
            x = x - step
            if not np.any(np.abs(step) > _CLOSE * (1 + np.abs(x))):
                break
        return np.where(finite, x, np.where(loss > 0, loss, -np.inf))  # an infinite loss lies at infinity

    def balanced(self, loss: Array, variance: float) -> Array:
        """The x with ℓ(x) − ℓ(−x) = loss: bisection and Newton's method together, between known bounds."""
        size = np.abs(np.asarray(loss, float))
        finite = np.isfinite(size)
        wanted = np.where(finite, size, 0.0)
        low = np.maximum(self.inverse(wanted + self.none, variance), 0.0)
        high = np.maximum(self.inverse(wanted, variance), low)
        x = high
        for _ in range(_ITERATIONS):
            up, rising = self._log_sum(x, variance, with_none=True)
            down, falling = self._log_sum(-x, variance, with_none=True)
            excess = up - down - wanted
            low, high = np.where(excess < 0, x, low), np.where(excess < 0, high, x)
            with np.errstate(divide="ignore", invalid="ignore"):  # a slope that underflows: the bracket is halved
                newton = x - excess / (rising + falling)
            inside = (newton >= low) & (newton <= high)
            x, before = np.where(inside, newton, (low + high) / 2), x
            if not np.any(np.abs(x - before) > _CLOSE * (1 + np.abs(x))):
                break
        return np.copysign(np.where(finite, x, np.inf), loss)

    def mass(self, left: Array | float, right: Array | float, sigma: float) -> Array:
        """The mass of the shifted sum between left and right."""
        total = math.exp(self.none) * _interval(left / sigma, right / sigma)
        for by, log_weight in self._terms():
            total = total + math.exp(log_weight) * _interval((left - by) / sigma, (right - by) / sigma)
        return np.asarray(total)

    def top(self, tail: float, sigma: float) -> float:
        """An x beyond which about ``tail`` of the mass lies."""
        ends = [-float(ndtri(tail)) * sigma]
        for by, log_weight in self._terms():
            share = math.exp(min(math.log(tail) - log_weight, 0.0))
            if share < 0.5:
                ends.append(by - float(ndtri(share)) * sigma)
        return max(ends)


def _interval(a: Array | float, b: Array | float) -> Array:
    flip = np.asarray(a) > 0
    return np.asarray(ndtr(np.where(flip, -a, b)) - ndtr(np.where(flip, -b, a)))


@lru_cache(maxsize=256)
def shifts(sampling_rate: float, group: int) -> GroupShifts:
    """How far ``group`` rows move the sum at sampling rate 0 < q < 1.

    Beyond 32 rows the Binomial law is rounded up to fewer values: the shift only grows.

    >>> shifts(0.5, 2).by
    (1.0, 2.0)
    """
    none = group * math.log1p(-sampling_rate)
    if group <= _MOST:
        logs = [
            math.log(math.comb(group, j)) + j * math.log(sampling_rate) + (group - j) * math.log1p(-sampling_rate)
            for j in _up(group)
        ]
        return GroupShifts(tuple(map(float, _up(group))), tuple(logs), none)
    from scipy.stats import binom  # slow to import

    law = binom(group, sampling_rate)
    low, high = max(int(law.ppf(_RARE)), 1), int(law.isf(_RARE)) + 1
    last = min(int(law.isf(_FAINT)) + 1, group)
    often = np.linspace(low, high, min(3 * _MOST // 4, high - low + 1))  # every number, where there are few
    seldom = np.linspace(high, max(last, high), _MOST // 4)
    points = np.unique(np.minimum(np.concatenate([often, seldom, [group]]).astype(int), group))
    # what lies above one point and at most at the next goes to the next; scipy's figures are right to 1e-9 or better
    some = math.log(-math.expm1(none))
    above = np.minimum(np.append(some, law.logsf(points) + 1e-9), some)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = above[:-1] + np.log(-np.expm1(above[1:] - above[:-1]))
    weights[-1] = weights[-1] if weights[-1] >= _LEAST else _LEAST  # what is not a number, too
    kept = weights >= _LEAST  # the others have less than the last, all of the group, was given
    return GroupShifts(tuple(map(float, points[kept])), tuple(map(float, weights[kept])), none)


def _up(group: int) -> range:
    return range(1, group + 1)
