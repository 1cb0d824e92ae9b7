"""Conjugate gradients against a direct solution."""

import numpy as np
import pytest

from dpgrad.convex._conjugate import conjugate


@pytest.mark.parametrize("size", [1, 5, 40])
@pytest.mark.parametrize("accuracy", [1e-1, 1e-8])
def test_what_is_left_is_within_the_accuracy(size: int, accuracy: float) -> None:
    random = np.random.default_rng(size)
    factor = random.standard_normal((size, size))
    matrix, target = factor @ factor.T + np.eye(size), random.standard_normal((size, 2))
    found = conjugate(lambda vector: matrix @ vector, target, accuracy)
    assert np.linalg.norm(matrix @ found - target) <= accuracy * np.linalg.norm(target) * (1 + 1e-6)


def test_nothing_is_solved_by_nothing() -> None:
    assert not conjugate(lambda vector: 2 * vector, np.zeros((3, 1)), 0.1).any()
