"""Standard errors of private coefficients: sampling error and the noise of the mechanism, from released numbers alone.

Near the optimum a loss is a parabola whose curvature is S = Σᵢ hᵢ·xᵢ·xᵢᵀ, hᵢ the second derivative of the loss of row i
in its score. S is released once, with noise and its share of the budget (`Curvature`), and everything else is known:
the gradients of n independent rows sum to a vector of covariance φ·S, where φ is 1 for a logistic model, the variance
of the errors for a linear one (released too, `Errors`) and a public constant for counts; and the noise of the mechanism
has a law that is public. A solver's `Scatter` says what both do to its coefficients. docs/proofs/intervals.md has the
argument and its limits.

>>> spread = Perturbed(ridge=1.0, l2=0.0, std=2.0, output_std=0.0)
>>> weights, total = np.array([3.0]), np.array([[100.0]])
>>> spread.estimate(weights, total, rows=400).round(2).tolist()
[3.03]
>>> spread.covariance(weights, total, dispersion=1.0, rows=400).round(4).tolist()  # S⁻¹·(S + 2²)·S⁻¹
[[0.0104]]
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dpgrad import _validate
from dpgrad.accounting.events import Event, Gaussian, Pinned, Relation
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Array
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.auto import noised_matrix
from dpgrad.convex.solvers.solved import Statistic
from dpgrad.errors import OptionError
from dpgrad.mechanism.keys import Key

__all__ = [
    "CLEAR", "LEFT", "LOWERED", "SCORE", "STEP", "STRAIGHT", "Curvature", "Descended", "Errors", "Intervals", "Moments",
    "OneRelease", "Perturbed", "Scatter", "curvature", "responses", "squared_errors",
]  # fmt: skip

LEFT = 0.1  # the part of the way that a descent may have left, in any direction
STRAIGHT = 0.5  # the same for a parabola, of which any part that is left is known
SCORE = 0.5  # the standard error of a score up to which a curved loss is taken to be a parabola
CLEAR = 4.0  # how many times its noise the smallest eigenvalue of S must be
LOWERED = 2.0  # how many times its noise S is lowered by for the covariance: what passed CLEAR may owe it to that noise
STEP = 1 << 30  # the counter of this noise, beyond the steps of every descent
_CHUNK = 64  # columns of S that are summed at once
_SLACK = 1e-6  # what rounding may add to one row's part in a sum, as in `Design`


@dataclass(frozen=True)
class OneRelease(ABC):
    """One Gaussian release of a statistic, for a price of ``mu``; with ``secure_values``, noise of the secure source.

    Its noise multiplier is right for ``relation`` alone; see `gd.with_distance`.
    """

    mu: float
    relation: Relation
    secure_values: int = 0

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """How far neighbours are apart, in the Euclidean norm (Frobenius for a matrix)."""

    @property
    def std(self) -> float:
        """The noise on each coordinate of that norm."""
        return self.sensitivity / self.mu

    @property
    def event(self) -> Event:
        """What it costs."""
        return gd.with_distance(Pinned(Gaussian(self.relation.reach / self.mu), self.relation), self.secure_values)


@dataclass(frozen=True, kw_only=True)
class Curvature(OneRelease):
    """The release of S: ``most`` is the largest curvature of one row, h·‖x‖².

    Guarantee: hᵢ·xᵢ·xᵢᵀ has Frobenius norm at most ``most``, and two such matrices have no negative product: leaving
    out a row moves S by ``most``, exchanging one by √2 times that.

    >>> Curvature(0.1, Relation.REPLACE_ONE, most=0.25).sensitivity
    0.3535533905932738
    """

    most: float

    @property
    def sensitivity(self) -> float:
        return math.sqrt(self.relation.reach) * self.most

    def release(self, share: float) -> Statistic:
        """What a report says of it."""
        return Statistic("curvature, for standard errors", self.sensitivity, self.std, share)

    def noisy(self, total: Array, key: Key) -> Array:
        """S with its noise."""
        return noised_matrix(gd.keyed(key, self.secure_values, total.size), STEP, total, self.sensitivity, self.std)


@dataclass(frozen=True, kw_only=True)
class Errors(OneRelease):
    """The release of the sum of squared errors, each cut at ``bound``².

    Guarantee: one row moves the sum by ``bound``² at most, left out or exchanged.

    >>> Errors(0.1, Relation.REPLACE_ONE, bound=1.0).std
    10.0
    """

    bound: float

    @property
    def sensitivity(self) -> float:
        return self.bound**2

    def release(self, share: float) -> Statistic:
        """What a report says of it."""
        return Statistic("squared errors, for standard errors", self.sensitivity, self.std, share)

    def noisy(self, total: float, key: Key) -> float:
        """The sum with its noise."""
        own = gd.keyed(key, self.secure_values, 1)
        return float(gd.noised(own, STEP + 1, np.array([total]), self.sensitivity, self.std)[0])


def curvature(design: Design, bends: Array) -> Array:
    """S = Σᵢ hᵢ·xᵢ·xᵢᵀ, before any noise: (features, features), by a few columns at a time; of some rows, their part.

    Guarantee: the sensitivity of `Curvature`, where no ``bends`` times the squared norm of its row exceeds ``most``;
    summed in float64, and lowered by what rounding there may add.

    >>> curvature(Design([[2.0], [1.0]], radius=2.0), np.array([0.25, 0.25])).round(4).tolist()
    [[1.25]]
    """
    total, precise = np.empty((design.features, design.features)), design.precise()
    for start in range(0, design.features, _CHUNK):
        some = np.eye(design.features, min(_CHUNK, design.features - start), -start)
        total[:, start : start + _CHUNK] = precise.summed(some, lambda rows, columns: bends[rows, None] * columns)
    return (total + total.T) / 2 * (1 - 2 * design.slack)


def squared_errors(errors: Array, bound: float) -> float:
    """The sum of squared errors, each cut at ``bound``², before any noise; lowered by what rounding may add.

    >>> round(squared_errors(np.array([0.5, -3.0]), bound=1.0), 5)
    1.25
    """
    return float(np.sum(np.minimum(np.abs(errors), bound) ** 2)) * (1 - _SLACK)


class Scatter(Protocol):
    """How a solver's coefficients scatter around the optimum."""

    def estimate(self, weights: Array, total: Array, rows: int) -> Array:
        """The coefficients, freed of what the solver is known to shrink; ``total`` is the released S, ``rows`` n."""

    def covariance(self, weights: Array, total: Array, dispersion: float, rows: int) -> Array:
        """The covariance matrix of the estimate, ``dispersion`` φ: the larger, the smaller ``total`` is."""


@dataclass(frozen=True)
class Perturbed:
    """The minimiser of Σ lossᵢ + ridge·‖w‖²/2 + b·w, plus noise: objective perturbation.

    The part of the ridge beyond ``l2``, which privacy asks for, is undone. ``std`` is that of b, ``output_std`` that of
    the noise on the minimiser.
    """

    ridge: float
    l2: float
    std: float
    output_std: float

    def _undone(self, total: Array) -> Array:
        unit = np.eye(len(total))
        return np.asarray(np.linalg.solve(total + self.l2 * unit, total + self.ridge * unit), np.float64)

    def estimate(self, weights: Array, total: Array, rows: int) -> Array:
        """See `Scatter`: A·w = S·w* − Σgᵢ − b with A = S + ridge, solved for w*."""
        return self._undone(total) @ weights

    def covariance(self, weights: Array, total: Array, dispersion: float, rows: int) -> Array:
        """See `Scatter`: that of S⁻¹·(Σgᵢ + b), and of the noise on the minimiser where the ridge is undone."""
        unit, undone = np.eye(len(total)), self._undone(total)
        inverse = np.linalg.inv(total + self.l2 * unit)
        noise = dispersion * total + self.std**2 * unit
        found: Array = inverse @ noise @ inverse.T + self.output_std**2 * undone @ undone.T
        return found


@dataclass(frozen=True, eq=False)
class Descended:
    """A descent with ``learning_rates``, its noise of ``std`` on every mean gradient, and noise on its end.

    ``averaged`` says how much each iterate counts in the result. ``sampled`` is the variance that sampling of rows
    adds to a mean gradient, over that of one row. The part of the way that is left is undone where it is at most
    ``left``.
    """

    learning_rates: tuple[float, ...]
    momentum: float
    averaged: tuple[float, ...]
    l2: float | Array
    std: float
    output_std: float = 0.0
    sampled: float = 0.0
    left: float = LEFT

    def _along(self, total: Array, rows: int) -> tuple[Array, Array, NDArray[np.float64], Array]:
        """The eigenvalues and directions of S/n with the penalty, and the `responses` along them."""
        penalty = np.broadcast_to(np.ravel(self.l2), (len(total),))
        values, vectors = np.linalg.eigh(total / rows + np.diag(penalty))
        return values, vectors, *responses(values, self.learning_rates, self.momentum, self.averaged)

    def estimate(self, weights: Array, total: Array, rows: int) -> Array:
        """See `Scatter`: in the directions of S the descent is a linear filter of its start and its noise."""
        _, vectors, _, rest = self._along(total, rows)
        if (most := float(np.abs(rest).max())) > self.left:
            raise OptionError(
                f"no intervals: the descent has {most:.0%} of its way left in one direction, above {self.left:.0%}; "
                "raise max_iter, epsilon or the number of rows, or tighten data_norm"
            )
        return vectors @ ((vectors.T @ weights) / (1 - rest))

    def covariance(self, weights: Array, total: Array, dispersion: float, rows: int) -> Array:
        """See `Scatter`: sampling of the rows, and what the filter leaves of the noise."""
        values, vectors, each, rest = self._along(total, rows)
        variance = dispersion * vectors.T @ (total / rows) @ vectors  # of one row's gradient, along the directions
        noise = each @ each.T * (self.std**2 * np.eye(len(total)) + self.sampled * variance)
        gain = 1 - rest
        found = variance / rows / np.outer(values, values)
        found += (noise + self.output_std**2 * np.eye(len(total))) / np.outer(gain, gain)
        return vectors @ found @ vectors.T


def responses(
    bends: Array, learning_rates: tuple[float, ...], momentum: float, averaged: tuple[float, ...]
) -> tuple[NDArray[np.float64], Array]:
    """What a unit of noise at each step, (directions, steps), and a unit of distance at the start leave in the result.

    Heavy-ball descent v ← momentum·v + λ·e + noise, e ← e − η·v, of the distance e to the optimum along a direction of
    curvature λ, whose result is Σ averagedₜ·eₜ; found backwards, from the result to the start.

    >>> each, rest = responses(np.array([0.5]), (1.0, 1.0), 0.0, (0.0, 1.0))
    >>> each.tolist(), rest.tolist()
    ([[-0.5, -1.0]], [0.25])
    """
    of_distance, of_velocity = np.zeros_like(bends), np.zeros_like(bends)
    each = np.empty((len(bends), len(learning_rates)))
    for step in reversed(range(len(learning_rates))):
        of_distance = of_distance + averaged[step]
        moved = of_velocity - learning_rates[step] * of_distance
        each[:, step] = moved
        of_distance, of_velocity = of_distance + bends * moved, momentum * moved
    return each, of_distance


@dataclass(frozen=True, eq=False)
class Moments:
    """AdaSSP: (M + ridge)⁻¹·c of a noisy second moment M, which it has released already, and noisy products c.

    ``ridge`` and ``l2`` are what is added to the diagonal, and the part of it that the caller asked for.
    """

    moment: Array
    ridge: Array
    l2: Array
    moment_std: float
    product_std: float

    def estimate(self, weights: Array, total: Array, rows: int) -> Array:
        """See `Scatter`: (M + ridge)·w = M·w* + Σ eᵢ·xᵢ + noise, solved for w*."""
        found = np.linalg.solve(total + np.diag(self.l2), (total + np.diag(self.ridge)) @ weights)
        return np.asarray(found, np.float64)

    def covariance(self, weights: Array, total: Array, dispersion: float, rows: int) -> Array:
        """See `Scatter`: the noise on M meets w*."""
        estimate = self.estimate(weights, total, rows)
        unit, inverse = np.eye(len(total)), np.linalg.inv(total + np.diag(self.l2))
        met = self.moment_std**2 / 2 * (float(estimate @ estimate) * unit + np.outer(estimate, estimate))
        noise = dispersion * total + self.product_std**2 * unit + met
        found: Array = inverse @ noise @ inverse.T
        return found


@dataclass(frozen=True, eq=False)
class Intervals:
    """Coefficients with their standard errors and confidence intervals, shaped like ``coef_`` and ``intercept_``.

    ``coef`` is the estimate that intervals are centred on: ``coef_``, freed of what the solver is known to shrink.

    >>> made = Intervals(0.95, np.array([1.0]), np.array([0.1]), np.array([0.0]), np.array([0.2]))
    >>> made.coef_low.round(3).tolist(), made.coef_high.round(3).tolist()
    ([0.804], [1.196])
    """

    level: float
    coef: Array
    coef_error: Array
    intercept: Array
    intercept_error: Array

    @property
    def width(self) -> float:
        """How many standard errors an interval reaches to each side."""
        _validate.open_unit(level=self.level)
        return float(ndtri(0.5 + self.level / 2))

    @property
    def coef_low(self) -> Array:
        """The lower ends."""
        return self.coef - self.width * self.coef_error

    @property
    def coef_high(self) -> Array:
        """The upper ends."""
        return self.coef + self.width * self.coef_error

    @property
    def intercept_low(self) -> Array:
        """The lower end for the intercept."""
        return self.intercept - self.width * self.intercept_error

    @property
    def intercept_high(self) -> Array:
        """The upper end for the intercept."""
        return self.intercept + self.width * self.intercept_error
