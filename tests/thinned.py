"""Wide parametrisations: a choice that meets every value runs always, the rest only by `make test-exhaustive`."""

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

Case = tuple[int, ...]


def thinned(*axes: Collection[Any], pairs: bool = False) -> list[Any]:
    """All combinations of the axes, those marked exhaustive without which every value, or every pair, still occurs.

    A tuple on an axis stands for several arguments. Without ``pairs`` some pairs of values never meet.
    """
    values = [list(axis) for axis in axes]
    every = list(itertools.product(*map(range, map(len, values))))
    return _marked(values, every, _of_pairs(every) if pairs else _of_values(values))


def thinned_where(possible: Callable[..., bool], *axes: Collection[Any]) -> list[Any]:
    """The combinations that are ``possible``, those marked exhaustive without which every pair that is still occurs."""
    values = [list(axis) for axis in axes]
    every = [
        case for case in itertools.product(*map(range, map(len, values))) if possible(*_flat(_values(values, case)))
    ]
    return _marked(values, every, _of_pairs(every))


def _marked(axes: list[list[Any]], every: list[Case], kept: set[Case]) -> list[Any]:
    return [
        pytest.param(*_flat(_values(axes, case)), marks=() if case in kept else pytest.mark.exhaustive)
        for case in every
    ]


def _of_values(axes: list[list[Any]]) -> set[Case]:
    """Cases that hold every value, each of the longest axis once."""
    return {tuple(k % len(axis) for axis in axes) for k in range(max(map(len, axes)))}


def _of_pairs(every: list[Case]) -> set[Case]:
    """Cases that hold every pair of values of two axes, each chosen for the most pairs that it adds."""
    missing = {pair for case in every for pair in _parts(case)}
    kept: set[Case] = set()
    while missing:
        best = max(every, key=lambda case: sum(pair in missing for pair in _parts(case)))
        kept.add(best)
        missing.difference_update(_parts(best))
    return kept


def _parts(case: Case) -> Iterator[tuple[tuple[int, int], ...]]:
    return itertools.combinations(enumerate(case), 2)


def _values(axes: list[list[Any]], case: Case) -> Iterator[Any]:
    return (axis[i] for axis, i in zip(axes, case, strict=True))


def _flat(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)
