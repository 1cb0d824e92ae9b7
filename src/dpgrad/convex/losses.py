"""Losses of linear models: values, derivatives in the scores, and the two constants that privacy and step sizes need.

A model has one score for each output, s = x·w of shape (n, outputs). A loss is a function of the scores and the target
of one row, so its gradient in the coefficients is x times a *residual* r = ∂loss/∂s, of norm ‖x‖·‖r‖: a clipped
gradient is a scaled residual. For rows of norm at most R:

    loss                    largest gradient L     largest curvature β
    logistic                R                      R²/4
    logistic, slope c       c·R                    c(1−c)·R² below c = 1/2, else R²/4
    Huber SVM, width h      R                      R²/2h
    hinge                   R                      ∞
    softmax                 √2·R                   R²/2          (Böhning 1992)
    squared, bound b        b·R                    R²
    counts, in units of b   R                      R²

(Yu et al., "Gradient Perturbation is Underrated for Differentially Private Convex Optimization", IJCAI 2020; Iyengar et
al., S&P 2019.) Every function is stable for scores of any finite size.

>>> import numpy as np
>>> Logistic().residuals(np.array([[0.0], [800.0]]), np.array([1.0, -1.0])).tolist()
[[-0.5], [1.0]]
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logsumexp, softmax

from dpgrad import _validate
from dpgrad.errors import DataError, OptionError

__all__ = ["Array", "Counts", "Hinge", "HuberSvm", "Logistic", "RowLoss", "Softmax", "Squared", "Targets"]

Array = NDArray[np.float64]
Targets = NDArray[Any]


class RowLoss(Protocol):
    """What a solver asks of a loss. ``smooth`` says whether its derivative is continuous; fields are public."""

    smooth: ClassVar[bool]

    @property
    def outputs(self) -> int:
        """How many scores a row has."""

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        """The targets of ``rows`` rows as an array, refused where this loss has no meaning for them."""

    def values(self, scores: Array, targets: Targets) -> Array:
        """The loss of each row: (n,)."""

    def residuals(self, scores: Array, targets: Targets) -> Array:
        """∂loss/∂scores: (n, outputs)."""

    def lipschitz(self, radius: float) -> float:
        """L: no gradient in the coefficients is longer, for rows of norm at most ``radius``."""

    def smoothness(self, radius: float) -> float:
        """β: no second derivative in the coefficients is larger, for rows of norm at most ``radius``."""


@dataclass(frozen=True)
class Logistic:
    """log(1 + e^{−z}) of the margin z = y·s, targets y = ±1; below the point of slope −``slope`` it goes on straight.

    With ``slope`` c < 1 the loss is linear for z < log((1−c)/c), so no row pulls harder than c; at 1 it is the
    plain logistic loss.

    >>> Logistic(slope=0.25).lipschitz(radius=2.0), Logistic(slope=0.25).smoothness(radius=2.0)
    (0.5, 0.75)
    """

    slope: float = 1.0
    smooth: ClassVar[bool] = True
    outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _validate.positive(slope=self.slope)
        if self.slope > 1:
            raise OptionError(f"slope must be at most 1, that of the plain logistic loss, got {self.slope!r}")

    @property
    def _corner(self) -> float:
        """The margin at which the slope is −``slope``."""
        return math.log((1 - self.slope) / self.slope) if self.slope < 1 else -math.inf

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        return _signs(targets, rows)

    def values(self, scores: Array, targets: Targets) -> Array:
        margins = _margins(scores, targets)
        curved = np.maximum(margins, self._corner)
        return np.asarray(np.logaddexp(0, -curved) + self.slope * (curved - margins))

    def residuals(self, scores: Array, targets: Targets) -> Array:
        pulls = np.minimum(expit(-_margins(scores, targets)), self.slope)
        return np.asarray(-targets * pulls)[:, None]

    def curvatures(self, scores: Array, targets: Targets) -> Array:
        """The second derivative in the score: (n,)."""
        margins = _margins(scores, targets)
        return np.where(margins >= self._corner, expit(margins) * expit(-margins), 0.0)

    def lipschitz(self, radius: float) -> float:
        return self.slope * _radius(radius)

    def smoothness(self, radius: float) -> float:
        steepest = self.slope * (1 - self.slope) if self.slope < 0.5 else 0.25
        return steepest * _radius(radius) ** 2


@dataclass(frozen=True)
class HuberSvm:
    """The hinge max(0, 1−z) of the margin z = y·s, rounded off by a parabola for |1−z| ≤ ``width``; targets ±1.

    0 where z > 1+h, (1+h−z)²/4h where |1−z| ≤ h, else 1−z (Chaudhuri, Monteleoni and Sarwate 2011).

    >>> HuberSvm().smoothness(radius=1.0)
    5.0
    """

    width: float = 0.1
    smooth: ClassVar[bool] = True
    outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _validate.positive(width=self.width)

    def _depth(self, margins: Array) -> Array:
        """How far a margin lies into the parabola, from 0 at its right end to 2h at its left."""
        return np.asarray(np.clip(1 + self.width - margins, 0, 2 * self.width))

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        return _signs(targets, rows)

    def values(self, scores: Array, targets: Targets) -> Array:
        margins = _margins(scores, targets)
        return np.asarray(self._depth(margins) ** 2 / (4 * self.width) + np.maximum(1 - self.width - margins, 0))

    def residuals(self, scores: Array, targets: Targets) -> Array:
        return (-targets * self._depth(_margins(scores, targets)) / (2 * self.width))[:, None]

    def curvatures(self, scores: Array, targets: Targets) -> Array:
        """The second derivative in the score: (n,)."""
        return np.where(np.abs(1 - _margins(scores, targets)) <= self.width, 1 / (2 * self.width), 0.0)

    def lipschitz(self, radius: float) -> float:
        return _radius(radius)

    def smoothness(self, radius: float) -> float:
        return _radius(radius) ** 2 / (2 * self.width)


@dataclass(frozen=True)
class Hinge:
    """max(0, 1−z) of the margin z = y·s, targets ±1; its residual at the corner z = 1 is the subgradient 0.

    >>> Hinge().smooth, Hinge().smoothness(radius=1.0)
    (False, inf)
    """

    smooth: ClassVar[bool] = False
    outputs: ClassVar[int] = 1

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        return _signs(targets, rows)

    def values(self, scores: Array, targets: Targets) -> Array:
        return np.maximum(1 - _margins(scores, targets), 0)

    def residuals(self, scores: Array, targets: Targets) -> Array:
        return (-targets * (_margins(scores, targets) < 1))[:, None]

    def curvatures(self, scores: Array, targets: Targets) -> Array:
        """The second derivative in the score, which is zero wherever there is one: (n,)."""
        return np.zeros_like(_margins(scores, targets))

    def lipschitz(self, radius: float) -> float:
        return _radius(radius)

    def smoothness(self, radius: float) -> float:
        _radius(radius)
        return math.inf


@dataclass(frozen=True)
class Softmax:
    """The cross-entropy of a softmax over ``classes`` scores; targets are class indices 0, …, classes−1.

    >>> round(Softmax(10).lipschitz(radius=1.0), 6), Softmax(10).smoothness(radius=1.0)
    (1.414214, 0.5)
    """

    classes: int
    smooth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.whole(least=2, classes=self.classes)

    @property
    def outputs(self) -> int:
        return self.classes

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        found = _column(targets, rows)
        bad = ~((found >= 0) & (found < self.classes) & (np.floor(found) == found))  # NaN is bad too
        if bad.any():
            raise DataError(
                f"targets must be class indices from 0 to {self.classes - 1}: number the classes in an order that "
                "does not come from the data"
            )
        return found.astype(np.int64)

    def values(self, scores: Array, targets: Targets) -> Array:
        chosen = _scored(scores, targets, self.classes)[np.arange(len(targets)), targets]
        # from the largest score, so equal huge scores do not cancel
        top = scores.max(axis=1)
        return np.asarray(logsumexp(scores - top[:, None], axis=1) + (top - chosen))

    def residuals(self, scores: Array, targets: Targets) -> Array:
        found: Array = softmax(_scored(scores, targets, self.classes), axis=1)
        found[np.arange(len(targets)), targets] -= 1
        return found

    def hessian_product(self, scores: Array, targets: Targets, directions: Array) -> Array:
        """The second derivative of each row times its direction: p∘d − p·(p·d), (n, classes)."""
        weights: Array = softmax(_scored(scores, targets, self.classes), axis=1)
        _scored(directions, targets, self.classes)
        mean = np.einsum("ij,ij->i", weights, directions)
        return np.asarray(weights * (directions - mean[:, None]))

    def lipschitz(self, radius: float) -> float:
        return math.sqrt(2) * _radius(radius)

    def smoothness(self, radius: float) -> float:
        return _radius(radius) ** 2 / 2


@dataclass(frozen=True)
class Squared:
    """(s−y)²/2 of a number y, which beyond an error of ``bound`` goes on straight: its residual is cut to ±bound.

    ``bound`` is chosen without looking at the data. ``math.inf`` gives the plain squared loss, which has no Lipschitz
    constant.

    >>> Squared(bound=2.0).lipschitz(radius=1.0)
    2.0
    """

    bound: float
    smooth: ClassVar[bool] = True
    outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.bound != math.inf:
            _validate.positive(bound=self.bound)

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        found = _column(targets, rows)
        if not np.isfinite(found).all():
            raise DataError("targets must be finite numbers")
        return found.astype(np.float64)

    def values(self, scores: Array, targets: Targets) -> Array:
        errors = np.abs(self._errors(scores, targets))
        # half the square up to the bound, then straight: (e − m/2)·m with m = min(e, bound)
        curved = np.minimum(errors, self.bound)
        with np.errstate(over="ignore"):  # the square of an error beyond 1e154 is infinite
            return curved * (errors - curved / 2)

    def residuals(self, scores: Array, targets: Targets) -> Array:
        return np.clip(self._errors(scores, targets), -self.bound, self.bound)[:, None]

    def curvatures(self, scores: Array, targets: Targets) -> Array:
        """The second derivative in the score: (n,)."""
        return np.where(np.abs(self._errors(scores, targets)) <= self.bound, 1.0, 0.0)

    def _errors(self, scores: Array, targets: Targets) -> Array:
        return _scored(scores, targets, 1)[:, 0] - targets

    def lipschitz(self, radius: float) -> float:
        if self.bound == math.inf:
            raise OptionError(
                "bound is infinite: the plain squared loss has no Lipschitz constant; give a bound on errors"
            )
        return self.bound * _radius(radius)

    def smoothness(self, radius: float) -> float:
        return _radius(radius) ** 2


@dataclass(frozen=True)
class Counts:
    """e^s − y·s of a count y, in units of the largest: y in [0, 1] and a rate e^{s + offset} that is cut at 1.

    The Poisson loss of a count of at most b, over b: its targets are counts over b, and ``offset`` is −log(b), or 0
    where an intercept can take its place. Where the rate would exceed the largest count the loss goes on straight, so
    that no residual exceeds 1.

    >>> Counts().residuals(np.array([[0.0], [9.0]]), np.array([0.25, 1.0])).tolist()
    [[0.75], [0.0]]
    """

    offset: float = 0.0
    smooth: ClassVar[bool] = True
    outputs: ClassVar[int] = 1

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        found = _column(targets, rows).astype(np.float64)
        if not ((found >= 0) & (found <= 1)).all():  # NaN is refused too
            raise DataError("targets must be counts over the largest, from 0 to 1")
        return found

    def values(self, scores: Array, targets: Targets) -> Array:
        shifted = _scored(scores, targets, 1)[:, 0] + self.offset
        curved = np.minimum(shifted, 0.0)
        return np.asarray(np.exp(curved) + (shifted - curved) - targets * shifted)

    def residuals(self, scores: Array, targets: Targets) -> Array:
        return (self._rates(scores, targets) - targets)[:, None]

    def curvatures(self, scores: Array, targets: Targets) -> Array:
        """The second derivative in the score: (n,)."""
        rates = self._rates(scores, targets)
        return np.where(scores[:, 0] + self.offset <= 0, rates, 0.0)

    def _rates(self, scores: Array, targets: Targets) -> Array:
        return np.asarray(np.exp(np.minimum(_scored(scores, targets, 1)[:, 0] + self.offset, 0.0)))

    def lipschitz(self, radius: float) -> float:
        return _radius(radius)

    def smoothness(self, radius: float) -> float:
        return _radius(radius) ** 2


def _radius(radius: float) -> float:
    _validate.non_negative(radius=radius)
    return float(radius)


def _scored(scores: Array, targets: Targets, outputs: int) -> Array:
    """The scores, refused where their shape is not (n, outputs): a wrong one would broadcast silently."""
    if scores.shape != (len(targets), outputs):
        raise OptionError(f"scores must have shape ({len(targets)}, {outputs}), got {scores.shape}")
    return scores


def _margins(scores: Array, targets: Targets) -> Array:
    return np.asarray(targets * _scored(scores, targets, 1)[:, 0])


def _column(targets: ArrayLike, rows: int) -> Targets:
    """One real number for each row."""
    found = np.asarray(targets)
    if found.shape != (rows,):
        raise DataError(f"targets must have one value for each of {rows:,} rows, got shape {found.shape}")
    if found.dtype.kind not in "iufb":
        raise DataError(f"targets must be numbers, got dtype {found.dtype}")
    return found


def _signs(targets: ArrayLike, rows: int) -> Targets:
    found = _column(targets, rows)
    if found.dtype.kind == "b" or (np.abs(found.astype(np.float64)) != 1).any():
        raise DataError("targets must be -1 or +1: write 2*y - 1 for y in 0, 1")
    return found.astype(np.float64)
