"""How claims about several arms are answered: True, False, or None where the trials cannot tell."""

import math
from collections.abc import Iterable, Sequence

from dpgrad.papers.experiment import Outcomes

__all__ = ["best", "every", "gain", "grows", "reaches"]


def every(answers: Iterable[bool | None]) -> bool | None:
    """Whether all hold: False where one does not, None where one cannot be told.

    >>> every([True, True]), every([True, None]), every([None, False]), every([])
    (True, None, False, None)
    """
    found = list(answers)
    if False in found:
        return False
    return None if None in found or not found else True


def best(outcomes: Outcomes, among: Sequence[str], others: Sequence[str], figure: str) -> bool | None:
    """Whether the highest mean is that of one of ``among``, by more than two standard errors.

    >>> trials = {"a": [{"x": 2.0}, {"x": 2.1}], "b": [{"x": 1.0}, {"x": 1.1}]}
    >>> best(Outcomes(trials), ["a"], ["b"], "x")
    True
    """
    tops = [_highest(outcomes, arms, figure) for arms in (among, others)]
    return None if None in tops else outcomes.above(str(tops[0]), str(tops[1]), figure)


def _highest(outcomes: Outcomes, arms: Sequence[str], figure: str) -> str | None:
    known = [arm for arm in arms if outcomes.values(arm, figure)]
    return max(known, key=lambda arm: outcomes.mean(arm, figure), default=None)


def gain(outcomes: Outcomes, one: str, other: str, figure: str) -> tuple[float, float]:
    """How far ``one`` is above ``other``, and the standard error of that.

    >>> gain(Outcomes({"a": [{"x": 2.0}] * 2, "b": [{"x": 1.5}] * 2}), "a", "b", "x")
    (0.5, 0.0)
    """
    apart = outcomes.mean(one, figure) - outcomes.mean(other, figure)
    return apart, math.hypot(outcomes.error(one, figure), outcomes.error(other, figure))


def grows(small: tuple[float, float], large: tuple[float, float]) -> bool | None:
    """Whether the second of two gains is the larger one, by more than two standard errors.

    >>> grows((0.1, 0.01), (0.5, 0.01)), grows((0.1, 1.0), (0.5, 1.0)), grows((0.5, 0.01), (0.1, 0.01))
    (True, None, False)
    """
    apart, within = large[0] - small[0], 2 * math.hypot(small[1], large[1])
    return None if math.isnan(apart) or math.isnan(within) or abs(apart) <= within else apart > 0


def reaches(outcomes: Outcomes, arm: str, figure: str, value: float, errors: float = 2.0) -> bool | None:
    """Whether the mean is at least ``value``.

    None where it is below by less than ``errors`` standard errors, and where there are not two trials.

    >>> reaches(Outcomes({"a": [{"x": 2.0}, {"x": 2.2}], "b": [{"x": 2.1}]}), "a", "x", 2.0)
    True
    """
    mean, error = outcomes.mean(arm, figure), outcomes.error(arm, figure)
    if math.isnan(error):
        return None
    return True if mean >= value else None if mean + errors * error >= value else False
