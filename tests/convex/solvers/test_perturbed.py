"""The minimiser of a perturbed objective: found to the tolerance claimed however the rows are held; the noise laws."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, sparse, stats

from dpgrad.accounting import exact
from dpgrad.accounting.events import NOTHING, Approximate, Relation
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, Softmax, Squared
from dpgrad.convex.solvers import perturbed
from dpgrad.convex.solvers.perturbed import Law, Perturbation
from dpgrad.mechanism.keys import Key

Array = NDArray[np.float64]
LOSSES: list[Any] = [Logistic(), Logistic(0.3), HuberSvm(0.1), Squared(0.5)]


def problem(loss: Any, rows: int = 200, columns: int = 5, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns))
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1)
    y = x @ random.standard_normal(columns) + 0.3 * random.standard_normal(rows)
    return x, y if isinstance(loss, Squared) else np.where(y > 0, 1.0, -1.0)


def gradient(x: Array, y: Array, loss: Any, ridge: float, linear: Array, w: Array) -> Array:
    """The gradient in plain words, in extended precision."""
    wide = x.astype(np.longdouble)
    residuals = loss.residuals((x @ w), y).astype(np.longdouble)
    return np.asarray(wide.T @ residuals + ridge * w + linear, np.float64)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("ridge", [0.01, 3.0])
@pytest.mark.parametrize("held", ["float64", "float32", "sparse"])
def test_the_gradient_is_within_the_tolerance(loss: Any, ridge: float, held: str) -> None:
    x, y = problem(loss)
    linear = np.random.default_rng(1).standard_normal((5, 1)) * 4
    rows = {"float64": x, "float32": x.astype(np.float32), "sparse": sparse.csr_array(x.astype(np.float32))}[held]
    tolerance = perturbed.tolerance(200, 1.0, 4.0)
    design = Design(rows, radius=1.0)
    w = perturbed.minimiser(design, y, loss, ridge, linear, tolerance)
    clipped = design.precise()
    seen = np.eye(5).T @ clipped.gathered(np.eye(200))  # the rows as the design sees them, (5, 200)
    assert np.linalg.norm(gradient(seen.T, y, loss, ridge, linear, w)) <= tolerance


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_it_is_the_minimiser_that_scipy_finds(loss: Any) -> None:
    x, y = problem(loss)
    linear = np.random.default_rng(1).standard_normal((5, 1))

    def value(w: Array) -> float:
        scores = (x @ w)[:, None]
        return float(loss.values(scores, y).sum() + 0.5 * w @ w + linear[:, 0] @ w)

    best = optimize.minimize(value, np.zeros(5), method="BFGS", options={"gtol": 1e-7})
    found = perturbed.minimiser(Design(x, radius=1.0), y, loss, 1.0, linear, 1e-7)[:, 0]
    assert value(found) <= best.fun + 1e-9
    assert np.abs(found - best.x).max() < 1e-4


def test_a_far_start_needs_a_shorter_step() -> None:
    """A noise of a thousand sends the first Newton step of a Huber SVM far beyond the minimiser."""
    x, y = problem(HuberSvm(0.01))
    linear = np.full((5, 1), 1000.0)
    w = perturbed.minimiser(Design(x, radius=1.0), y, HuberSvm(0.01), 0.5, linear, 1e-6)
    assert np.linalg.norm(gradient(x, y, HuberSvm(0.01), 0.5, linear, w)) < 2e-6


def test_the_noise_laws() -> None:
    """Kolmogorov–Smirnov on 4,000 draws at p > 1e-4 each: five laws, so a false alarm once in 2,000 seeds."""
    gauss = np.hstack([perturbed.noise(Law.GAUSSIAN, Key.from_seed(k), 0, (3, 1), 2.5) for k in range(4000)])
    gamma = np.hstack([perturbed.noise(Law.GAMMA, Key.from_seed(k), 0, (3, 1), 2.5) for k in range(4000)])
    norms = np.linalg.norm(gamma, axis=0)
    for sample, law in [
        (gauss[0], stats.norm(scale=2.5)),
        (gauss[2], stats.norm(scale=2.5)),
        (norms, stats.gamma(3, scale=2.5)),
        (gamma[0] / norms, stats.uniform(-1, 2)),  # Archimedes: a coordinate of a direction in space is uniform
        (gamma[2] / norms, stats.uniform(-1, 2)),
    ]:
        assert stats.kstest(sample, law.cdf).pvalue > 1e-4


def test_the_two_noises_of_a_run_are_apart() -> None:
    for law in Law:
        first, second = (perturbed.noise(law, Key.from_seed(7), step, (50, 1), 1.0) for step in (0, 1))
        assert abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1]) < 0.5


@pytest.mark.parametrize("relation", [Relation.ZERO_OUT, Relation.REPLACE_ONE])
@pytest.mark.parametrize("ridge", [0.01, 3.0])
def test_the_second_noise_is_that_of_its_event(relation: Relation, ridge: float) -> None:
    """Two solutions within γ of one minimiser are 2γ/λ apart: std and price are of that distance."""
    plan = perturbed.approximate(
        Logistic(), 1.0, 200, relation, ridge=ridge, std=3.0, tolerance=1e-6, first=(0.9, 1e-7), output=(0.1, 1e-8)
    )
    first, second = plan.event.events  # type: ignore[union-attr]
    assert first == Approximate(0.9, 1e-7, relation)
    assert math.exp(exact.log_delta(2e-6 / ridge / plan.output_scale, 0.1)) == pytest.approx(1e-8, rel=1e-6)
    assert exact.account(second, relation).delta(0.1) == pytest.approx(1e-8, rel=1e-6)


PLAN = Perturbation(Logistic(), 1.0, 200, Relation.ZERO_OUT, 2.0, Law.GAUSSIAN, 3.0, 0.5, 1e-6, NOTHING)


def test_the_release_is_the_minimiser_and_the_second_noise() -> None:
    x, y = problem(Logistic())
    key = Key.from_seed(3)
    linear = perturbed.noise(Law.GAUSSIAN, key, 0, (5, 1), 3.0)
    found, event = perturbed.solve(Design(x, radius=1.0), y, Logistic(), PLAN, key=key)
    expected = perturbed.minimiser(Design(x, radius=1.0), y, Logistic(), 2.0, linear, 1e-6)
    assert np.array_equal(found, expected + perturbed.noise(Law.GAUSSIAN, key, 1, (5, 1), 0.5))
    assert event == NOTHING
    assert not np.array_equal(found, perturbed.solve(Design(x, radius=1.0), y, Logistic(), PLAN)[0])


def test_what_the_noise_was_not_calibrated_for_is_refused() -> None:
    x, y = problem(Logistic())
    with pytest.raises(ValueError, match="loss must be the one the noise was calibrated for"):
        perturbed.solve(Design(x, radius=1.0), y, HuberSvm(), PLAN)
    with pytest.raises(ValueError, match=r"rows may be as long as 1\.41421, beyond the radius 1 .* give design\.bound"):
        perturbed.solve(Design(x, radius=1.0, intercept=1.0), y, Logistic(), PLAN)
    with pytest.raises(ValueError, match="targets must be -1 or"):
        perturbed.solve(Design(x, radius=1.0), 2 * y, Logistic(), PLAN)


@pytest.mark.parametrize(
    ("loss", "match"), [(Hinge(), "needs a smooth loss"), (Softmax(3), "needs a loss of one score")]
)
def test_losses_without_a_proof_are_refused(loss: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"amp {match}"):
        perturbed.curved(loss, "amp")


def test_a_tolerance_beyond_arithmetic_is_an_error_and_not_a_guess() -> None:
    x, y = problem(Logistic())
    with pytest.raises(ValueError, match="no coefficients with a gradient below 1e-30 were found"):
        perturbed.minimiser(Design(x, radius=1.0), y, Logistic(), 1.0, np.ones((5, 1)), 1e-30)
    with pytest.raises(ValueError, match="ridge must be positive"):
        perturbed.minimiser(Design(x, radius=1.0), y, Logistic(), 0.0, np.ones((5, 1)), 1e-6)


def test_the_tolerance_is_within_reach_of_float64() -> None:
    """Also where noise outweighs the rows by far, and for half a million of them."""
    assert perturbed.tolerance(500_000, 1.0, 1.0) > 2 * 1e-10 * 500_000
    assert perturbed.tolerance(10, 1.0, 1e9) > 1e-14 * math.sqrt(50_000) * 1e9 / 10


def test_what_rounding_may_hide_of_the_gradient_counts_against_the_tolerance() -> None:
    """The gradient of one row can be made zero, and is still known to 1e-10 of its summand only."""
    one, linear = Design([[1.0]], radius=1.0), np.zeros((1, 1))
    assert perturbed.minimiser(one, np.array([3.0]), Squared(bound=9.0), 1.0, linear, 1e-9).shape == (1, 1)
    with pytest.raises(ValueError, match="no coefficients with a gradient below"):
        perturbed.minimiser(one, np.array([3.0]), Squared(bound=9.0), 1.0, linear, 1e-11)
