"""Tests whose distribution under the claim is known: docs/proofs/audit.md says why each keeps its level.

Every function returns a p-value: under the claim it is at most a with probability at most a, for every a.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = ["Array", "above", "below", "correlation", "count", "even", "lagged", "sum_of_squares", "ties", "uniform"]

Array = NDArray[np.float64]


def below(x: float, trials: float, chance: float) -> float:
    """P[Bin(trials, chance) ≤ x].

    >>> below(0, 2, 0.5)
    0.25
    """
    return float(special.bdtr(x, trials, chance)) if x < trials else 1.0


def above(x: float, trials: float, chance: float) -> float:
    """P[Bin(trials, chance) ≥ x].

    >>> above(2, 2, 0.5)
    0.25
    """
    return 1.0 if x <= 0 else float(special.bdtrc(x - 1, trials, chance))


def count(x: float, trials: float, chance: float) -> float:
    """The two-sided p-value of a binomial count: twice the smaller tail.

    >>> count(0, 2, 0.5), count(1, 2, 0.5)
    (0.5, 1.0)
    """
    if chance <= 0 or chance >= 1:
        return 1.0 if x == trials * chance else 0.0
    return min(1.0, 2 * min(below(x, trials, chance), above(x, trials, chance)))


def sum_of_squares(squares: Array | float, degrees: float) -> Array:
    """P[χ² ≤ squares]: small where there is less noise than claimed.

    >>> round(float(sum_of_squares(0.455, 1)), 2)
    0.5
    """
    found: Array = special.chdtr(degrees, np.asarray(squares, float))
    return found


def correlation(products: Array, left: Array, right: Array, length: int) -> Array:
    """Two-sided p-values of r = ⟨a, b⟩/(‖a‖‖b‖) for independent Gaussian vectors of this length and mean zero.

    r√(n−1)/√(1−r²) has Student's t distribution with n − 1 degrees of freedom, whatever the two scales are.

    >>> float(correlation(np.array([0.0]), np.array([1.0]), np.array([1.0]), 10)[0])
    1.0
    """
    scale = np.sqrt(left * right)
    r = np.divide(
        products, scale, out=np.ones_like(products), where=scale > 0
    )  # no noise at all: as dependent as can be
    r = np.clip(np.abs(r), 0.0, 1.0)
    with np.errstate(divide="ignore"):
        t = r * np.sqrt(max(length - 1, 1)) / np.sqrt(1 - r * r)
    found: Array = 2 * special.stdtr(max(length - 1, 1), -t) if length > 1 else np.ones_like(r)
    return found


def lagged(values: Array, lag: int) -> float:
    """The p-value of dependence between entries ``lag`` apart in each row; every entry is in one pair at most.

    >>> lagged(np.ones((1, 4)), 1) < 0.5
    True
    """
    width = values.shape[1]
    first = np.arange(width - lag)
    first = first[first % (2 * lag) < lag]
    a, b = values[:, first].ravel(), values[:, first + lag].ravel()
    if len(a) < 2:
        return 1.0
    return float(correlation(np.array([a @ b]), np.array([a @ a]), np.array([b @ b]), len(a))[0])


def uniform(values: Array) -> float:
    """Kolmogorov-Smirnov's p-value against the uniform distribution on [0, 1], by its exact law.

    >>> uniform(np.linspace(0.05, 0.95, 10)) > 0.9
    True
    """
    from scipy import stats

    ordered, n = np.sort(values), len(values)
    if not n:
        return 1.0
    steps = np.arange(n + 1) / n
    distance = float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    return float(stats.kstwo.sf(distance, n))


def even(values: Array) -> Array:
    """Values that are uniform on [0, 1] if ``values`` are independent N(0, s²), whatever s is.

    (x₁² + x₂²)/(x₁² + x₂² + x₃² + x₄²) is one part of two equal exponential ones. Signs are tested by themselves.

    >>> even(np.ones(4)).tolist()
    [0.5]
    """
    squares = np.square(values[: len(values) // 4 * 4].reshape(-1, 4))
    whole = squares.sum(1)
    found: Array = np.divide(squares[:, :2].sum(1), whole, out=np.full(len(whole), 0.5), where=whole > 0)
    return found


# Two float32 values of a Gaussian law agree with probability at most ∫ f(x)²·2⁻²³|x| dx = 2⁻²³/(2π).
_SAME = 2.0**-23 / (2 * math.pi)


def ties(values: Array) -> tuple[float, int]:
    """A p-value for too many equal values among float32 noise, by Markov's inequality; and how many are distinct.

    >>> ties(np.array([1.0, 2.0, 3.0]))
    (1.0, 3)
    >>> ties(np.ones(1000))[0] < 1e-5
    True
    """
    _, counts = np.unique(values, return_counts=True)
    pairs = float((counts * (counts - 1) / 2).sum())
    expected = len(values) * (len(values) - 1) / 2 * _SAME
    return (min(1.0, expected / pairs) if pairs else 1.0), len(counts)
