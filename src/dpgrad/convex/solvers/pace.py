"""How far, how fast and how smoothly a descent should go, from public numbers alone; and whether it arrived.

T full-batch releases that are together μ-GDP put noise of std m·C·√T/(n·μ) on every mean gradient. With a learning rate
η and momentum β the noise that reaches the score of a row of norm R has a std of at most G·R·m·C/(n·μ), where
G = η·T/(1 − β) is how far the descent goes: T does not matter (`auto`). So G is as large as the noise allowed on a
score lets it be,

    G = allowed·n·μ/(m·C·R),

and a direction in which the loss has curvature λ is descended to its end where G·λ is large. Where it is small the
gradient cannot be told from noise, and stopping early is what keeps the coefficients small.

**Steps.** Plain descent at the rate 1/β̂, for β̂ the largest curvature possible, would take N = G·β̂ steps. With momentum
√(cN) steps do, at 1 − β = √(c/N): a step contracts by √β at best, so T·(1 − β) = c leaves e^{−c/2} of the way.

**Averaging.** The mean of the second half of the iterates is returned. In a direction that was descended to its end the
noise on it has a std of √2·m·C/(n·μ·λ), whatever T and G; the last iterate would have √(G·λ/4) times as much.

**Whether it arrived.** Iterates are released, so how they move may be looked at. Where a part f of the way is left the
third and the last quarter differ by about f, or more: beyond 5 % of their length the coefficients are not to be read.

>>> pace = paced(100_000, clip=4.5, radius=4.5, smoothness=5.0, mu=0.16, moved=2)
>>> pace.steps, round(pace.learning_rate, 3), round(pace.momentum, 2)
(244, 0.2, 0.94)
"""

import math
from dataclasses import dataclass

import numpy as np

from dpgrad.convex.losses import Array

__all__ = ["ALLOWED", "SETTLING", "UNSETTLED", "Pace", "Path", "paced"]

ALLOWED = 2.0  # the noise on a score
SETTLING = 15.0  # T·(1 − momentum)
LEAST_STEPS, MOST_STEPS = 20, 1000
UNSETTLED = 0.05  # of the coefficients' length


@dataclass(frozen=True)
class Pace:
    """The steps, the learning rate and the momentum of a descent; ``reached`` is G over what noise would allow.

    >>> Pace(100, 0.25, 0.75, reached=1.0).travel
    100.0
    """

    steps: int
    learning_rate: float
    momentum: float
    reached: float

    @property
    def travel(self) -> float:
        """G, how far the descent goes."""
        return self.learning_rate * self.steps / (1 - self.momentum)


def paced(
    rows: int,
    *,
    clip: float,
    radius: float,
    smoothness: float,
    mu: float,
    moved: int,
    allowed: float = ALLOWED,
    steps: int | None = None,
    momentum: float | None = None,
) -> Pace:
    """The pace at which the noise on a score is at most ``allowed``; ``steps`` and ``momentum`` where they are given.

    Guarantee: a function of public numbers.
    """
    travel = allowed * rows * mu / (moved * clip * radius)
    plain = travel * smoothness
    count = min(max(math.ceil(math.sqrt(SETTLING * plain)), LEAST_STEPS), MOST_STEPS) if steps is None else steps
    kept = min(max(count / plain, SETTLING / count), 1.0) if momentum is None else 1 - momentum
    learning_rate = min(1 / smoothness, travel * kept / count)
    return Pace(count, learning_rate, 1 - kept, learning_rate * count / kept / travel)


class Path:
    """What is kept of the iterates of a descent of ``steps`` steps: the means of its third and of its last quarter.

    >>> path = Path(4)
    >>> for step, value in enumerate([1.0, 2.0, 3.0, 5.0]):
    ...     path.add(step, np.array([[value]]))
    >>> path.mean.tolist(), path.moved
    ([[4.0]], 0.5)
    """

    def __init__(self, steps: int) -> None:
        self._ends = steps // 2, max(steps - max(steps // 4, 1), steps // 2)
        self._sums: list[Array | float] = [0.0, 0.0]
        self._counts = [0, 0]

    @staticmethod
    def weights(steps: int) -> tuple[float, ...]:
        """How much each iterate counts in `mean`.

        >>> Path.weights(4)
        (0.0, 0.0, 0.5, 0.5)
        """
        first = steps // 2
        return (*(0.0,) * first, *(1 / (steps - first),) * (steps - first))

    def add(self, step: int, coefficients: Array) -> None:
        """Take note of the iterate after a step."""
        if step >= self._ends[0]:
            quarter = int(step >= self._ends[1])
            self._sums[quarter] = self._sums[quarter] + coefficients
            self._counts[quarter] += 1

    @property
    def mean(self) -> Array:
        """The mean of the second half of the iterates."""
        return np.asarray((self._sums[0] + self._sums[1]) / sum(self._counts))

    @property
    def moved(self) -> float:
        """How far the last quarter lies from the third, over the length of the mean; 0 where there is one step."""
        if not all(self._counts):
            return 0.0
        third, last = (total / count for total, count in zip(self._sums, self._counts, strict=True))
        length = float(np.linalg.norm(self.mean))
        return float(np.linalg.norm(last - third)) / length if length else 0.0
