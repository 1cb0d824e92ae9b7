"""Wide parametrisations: a choice that meets every value runs always, the rest only by `make test-exhaustive`."""

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import pytest

Case = tuple[int, ...]


def thinned(*axes: Collection[Any], pairs: bool = False) -> list[Any]:
    """All combinations of the axes, those marked exhaustive without which every value, or every pair, still occurs.

    A tuple on an axis stands for several arguments.
    """
    values = [list(axis) for axis in axes]
    kept = _of_pairs(values) if pairs else _of_values(values)
    return [
        pytest.param(
            *_flat(axis[i] for axis, i in zip(values, case, strict=True)),
            marks=() if case in kept else pytest.mark.exhaustive,
        )
        for case in itertools.product(*map(range, map(len, values)))
    ]


def _of_values(axes: list[list[Any]]) -> set[Case]:
    """Cases that hold every value, each of the longest axis once."""
    return {tuple(k % len(axis) for axis in axes) for k in range(max(map(len, axes)))}


def _of_pairs(axes: list[list[Any]]) -> set[Case]:
    """Cases that hold every pair of values of two axes, each chosen for the most pairs that it adds."""
    every = list(itertools.product(*map(range, map(len, axes))))
    missing = {pair for case in every for pair in _parts(case)}
    kept: set[Case] = set()
    while missing:
        best = max(every, key=lambda case: sum(pair in missing for pair in _parts(case)))
        kept.add(best)
        missing.difference_update(_parts(best))
    return kept


def _parts(case: Case) -> Iterator[tuple[tuple[int, int], ...]]:
    return itertools.combinations(enumerate(case), 2)


def _flat(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)
