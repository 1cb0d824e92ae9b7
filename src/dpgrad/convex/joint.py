"""One class against the rest, for all classes at once: a margin loss of several scores.

>>> import numpy as np
>>> from dpgrad.convex.losses import HuberSvm
>>> Joint(HuberSvm(), classes=3).residuals(np.zeros((1, 3)), np.array([1])).tolist()
[[1.0, -1.0, 1.0]]
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from dpgrad import _validate
from dpgrad.convex.losses import Array, HuberSvm, Logistic, Softmax, Targets
from dpgrad.errors import OptionError

__all__ = ["Joint"]


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
