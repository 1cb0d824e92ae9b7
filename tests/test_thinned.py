"""The choice of cases that runs always: each value is met, each pair where that is asked for, and no case is lost."""

import itertools
from typing import Any

import pytest

from thinned import thinned, thinned_where

AXES = ["abc", range(4), [(5, 6), (7, 8)]]


def kept(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("pairs", [False, True])
def test_no_case_is_lost_and_most_wait(pairs: bool) -> None:
    cases = thinned(*AXES, pairs=pairs)
    assert [case.values for case in cases] == [(a, b, *c) for a, b, c in itertools.product(*AXES)]
    assert len(kept(cases)) < len(cases)


def test_every_value_is_met() -> None:
    found = kept(thinned(*AXES))
    assert [set(values) for values in zip(*found, strict=True)] == [{*"abc"}, {*range(4)}, {5, 7}, {6, 8}]
    assert len(found) == 4


def test_every_pair_is_met() -> None:
    found = kept(thinned("abc", range(4), "xyz", pairs=True))
    for one, other in itertools.combinations(range(3), 2):
        axes = ["abc", range(4), "xyz"]
        assert {(case[one], case[other]) for case in found} == {*itertools.product(axes[one], axes[other])}


def test_every_possible_pair_is_met() -> None:
    def possible(a: str, b: int, c: int, d: int) -> bool:
        return (a, b) != ("a", 0)

    cases = thinned_where(possible, *AXES)
    every = [(a, b, *c) for a, b, c in itertools.product(*AXES) if possible(a, b, *c)]
    assert [case.values for case in cases] == every
    assert len(kept(cases)) < len(cases)
    for one, other in itertools.combinations(range(3), 2):
        assert {(case[one], case[other]) for case in kept(cases)} == {(case[one], case[other]) for case in every}
