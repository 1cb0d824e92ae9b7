"""Weighted losses: the derivative, the constants, and that a weight never lets a row pull harder."""

import numpy as np
import pytest

from dpgrad.convex.design import Design
from dpgrad.convex.losses import HuberSvm, Logistic, Softmax
from dpgrad.convex.solvers import gd
from dpgrad.convex.weighted import Joint, Weighted

LOSSES = [
    Weighted(Logistic(), (0.2, 1.0)),
    Weighted(HuberSvm(), (1.0, 0.0)),
    Weighted(Softmax(3), (1.0, 0.5, 0.1)),
    Weighted(Joint(HuberSvm(), 3), (0.3, 1.0, 0.1)),
]


def case(loss: Weighted, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rows)
    places = random.integers(0, len(loss.weights), rows)
    targets = places if loss.outputs > 1 else 2.0 * places - 1
    return random.normal(0, 2, (rows, loss.outputs)), targets


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_counts_as_often_as_its_weight_says(loss: Weighted) -> None:
    scores, targets = case(loss)
    for row, target in enumerate(targets):
        weight = loss.weights[int(target) if loss.outputs > 1 else int(target > 0)]
        one, wanted = scores[[row]], targets[[row]]
        np.testing.assert_allclose(loss.values(one, wanted), weight * loss.loss.values(one, wanted))
        np.testing.assert_allclose(loss.residuals(one, wanted), weight * loss.loss.residuals(one, wanted))


@pytest.mark.parametrize("loss", LOSSES)
def test_exchanging_a_row_moves_the_clipped_sum_by_twice_the_clip_at_most(loss: Weighted) -> None:
    _, targets = case(loss, 20)
    random = np.random.default_rng(21)
    rows = random.normal(0, 1, (20, 3))
    weights = random.normal(0, 3, (3, loss.outputs))
    _, others = case(loss, 200)
    sums = []
    for target, row in zip(others, random.normal(0, 5, (200, 3)), strict=True):
        rows[0], targets[0] = row, target
        sums.append(gd.clipped_sum(Design(rows, radius=2.0), targets, loss, weights, clip=0.5))
    flat = np.array(sums).reshape(200, -1)
    spans = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    assert spans.max() <= 1.0
    assert spans.max() > 0.5  # the bound is one that binds


@pytest.mark.parametrize("loss", LOSSES)
def test_constants_are_those_of_the_loss(loss: Weighted) -> None:
    assert loss.lipschitz(2.0) == loss.loss.lipschitz(2.0)
    assert loss.smoothness(2.0) == loss.loss.smoothness(2.0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "one value for each of 2 classes, got 1"),
        ((0.5, 0.2), "relative to the largest, which is 1, got 0.5"),
        ((1.0, 2.0), "relative to the largest, which is 1, got 2.0"),
        ((0.5, 1 + 1e-9), "relative to the largest, which is 1, got 1.000000001"),
        ((1.0, -1.0), "weight must be zero or more"),
    ],
)
def test_bad_weights_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Weighted(Logistic(), weights)
