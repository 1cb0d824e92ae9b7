"""Each class against the rest as one loss: its derivative, its constants, and that it is the sum it says it is."""

import numpy as np
import pytest

from dpgrad.convex.losses import HuberSvm, Logistic
from dpgrad.convex.weighted import Joint

LOSSES = [Joint(HuberSvm(), 4), Joint(Logistic(), 4)]
RANDOM = np.random.default_rng(20)
SCORES, TARGETS = RANDOM.normal(0, 2, (50, 4)), RANDOM.integers(0, 4, 50)


@pytest.mark.parametrize("joint", LOSSES)
def test_it_is_the_sum_of_its_parts(joint: Joint) -> None:
    parts = [joint.loss.values(SCORES[:, [k]], np.where(k == TARGETS, 1.0, -1.0)) for k in range(4)]
    np.testing.assert_allclose(joint.values(SCORES, TARGETS), sum(parts))


@pytest.mark.parametrize("joint", LOSSES)
def test_residuals_are_the_derivative(joint: Joint) -> None:
    step = 1e-6
    for k in range(4):
        moved = SCORES.copy()
        moved[:, k] += step
        back = SCORES.copy()
        back[:, k] -= step
        slope = (joint.values(moved, TARGETS) - joint.values(back, TARGETS)) / (2 * step)
        np.testing.assert_allclose(joint.residuals(SCORES, TARGETS)[:, k], slope, atol=1e-5)


@pytest.mark.parametrize("joint", LOSSES)
def test_no_gradient_is_longer_and_none_changes_faster(joint: Joint) -> None:
    far = 100 * SCORES
    longest = np.linalg.norm(joint.residuals(far, TARGETS), axis=1).max()
    wrong = np.linalg.norm(joint.residuals(np.array([[-9.0, 9.0, 9.0, 9.0]]), np.array([0])))
    assert 3 * wrong > 0.99 * joint.lipschitz(3.0)  # all classes may be wrong at once, and then the bound is met
    assert 3 * longest <= joint.lipschitz(3.0) * (1 + 1e-12)
    other = SCORES + np.random.default_rng(27).normal(0, 0.1, SCORES.shape)
    change = np.linalg.norm(joint.residuals(other, TARGETS) - joint.residuals(SCORES, TARGETS), axis=1)
    assert (change <= joint.smoothness(1.0) * np.linalg.norm(other - SCORES, axis=1) * (1 + 1e-9)).all()


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores must have shape \(50, 4\), got \(50, 3\)"):
        LOSSES[0].residuals(SCORES[:, :3], TARGETS)
    with pytest.raises(ValueError, match="class indices from 0 to 3"):
        LOSSES[0].checked([0, 4], 2)
    with pytest.raises(ValueError, match="classes must be a whole number of at least 2"):
        Joint(HuberSvm(), 1)
