"""Losses of several classes: one class against the rest for all at once, and classes that count differently.

>>> import numpy as np
>>> from dpgrad.convex.losses import Logistic
>>> rare = Weighted(Logistic(), weights=(0.1, 1.0))
>>> rare.residuals(np.zeros((2, 1)), np.array([-1.0, 1.0])).tolist()
[[0.05], [-0.5]]
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from dpgrad import _validate
from dpgrad.convex.losses import Array, HuberSvm, Logistic, Softmax, Targets
from dpgrad.errors import OptionError

__all__ = ["Joint", "Weighted"]


@dataclass(frozen=True)
class Joint:
    """The sum over ``classes`` of ``loss``, each class against the rest; targets are class indices 0, …, classes−1.

    One descent learns all scores, and a row's gradient is clipped as a whole: a row that most classes are sure of
    spends its bound on the others, where separate fits would divide the budget.

    Guarantee: for rows of norm at most R the gradient is no longer than √K times that of ``loss``. The scores have
    coefficients of their own, so the curvature is no larger.

    >>> Joint(HuberSvm(), classes=4).lipschitz(1.0), Joint(HuberSvm(), classes=4).smoothness(1.0)
    (2.0, 5.0)
    """

    loss: Logistic | HuberSvm
    classes: int
    smooth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _validate.whole(least=2, classes=self.classes)

    @property
    def outputs(self) -> int:
        return self.classes

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        return Softmax(self.classes).checked(targets, rows)

    def values(self, scores: Array, targets: Targets) -> Array:
        parts = (self.loss.values(scores[:, [k]], self._signs(targets, k)) for k in range(self.classes))
        return np.asarray(sum(parts))

    def residuals(self, scores: Array, targets: Targets) -> Array:
        if scores.shape != (len(targets), self.classes):
            raise OptionError(f"scores must have shape ({len(targets)}, {self.classes}), got {scores.shape}")
        found = np.empty_like(scores)
        for k in range(self.classes):
            found[:, [k]] = self.loss.residuals(scores[:, [k]], self._signs(targets, k))
        return found

    def lipschitz(self, radius: float) -> float:
        return math.sqrt(self.classes) * self.loss.lipschitz(radius)

    def smoothness(self, radius: float) -> float:
        return self.loss.smoothness(radius)

    def _signs(self, targets: Targets, k: int) -> Array:
        """1 for the rows of class k, −1 for the rest."""
        return np.where(targets == k, 1.0, -1.0)


@dataclass(frozen=True)
class Weighted:
    """``loss`` times the weight of the row's class: ``weights`` in the order −1, +1, or of class indices.

    Weights are relative and public, 1 for the class that counts most: a global factor would only change the learning
    rate. They scale residuals before these are clipped, so no row pulls harder than it would without them.

    Guarantee: no weight exceeds 1, so the constants of ``loss`` bound the weighted loss too.

    >>> Weighted(Softmax(3), weights=(1.0, 2.0, 1.0))
    Traceback (most recent call last):
    dpgrad.errors.OptionError: weights must be relative to the largest, which is 1, got 2.0 as the largest
    """

    loss: Logistic | HuberSvm | Softmax | Joint
    weights: tuple[float, ...]
    smooth: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for weight in self.weights:
            _validate.non_negative(weight=weight)
        classes = max(2, self.loss.outputs)
        if len(self.weights) != classes:
            raise OptionError(f"weights must have one value for each of {classes} classes, got {len(self.weights)}")
        if (largest := max(self.weights)) != 1:
            raise OptionError(f"weights must be relative to the largest, which is 1, got {largest!r} as the largest")

    @property
    def outputs(self) -> int:
        return self.loss.outputs

    def checked(self, targets: ArrayLike, rows: int) -> Targets:
        return self.loss.checked(targets, rows)

    def values(self, scores: Array, targets: Targets) -> Array:
        return self._of(targets) * self.loss.values(scores, targets)

    def residuals(self, scores: Array, targets: Targets) -> Array:
        return np.asarray(self._of(targets)[:, None] * self.loss.residuals(scores, targets))

    def lipschitz(self, radius: float) -> float:
        return self.loss.lipschitz(radius)

    def smoothness(self, radius: float) -> float:
        return self.loss.smoothness(radius)

    def _of(self, targets: Targets) -> Array:
        """The weight of each row."""
        places = targets if self.outputs > 1 else (targets > 0).astype(np.int64)
        return np.asarray(np.asarray(self.weights)[places])
