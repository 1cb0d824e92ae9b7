"""AdaSSP: sensitivities by brute force, the law of every release, and least squares where noise is small."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse, stats

from dpgrad.accounting import account
from dpgrad.accounting.events import Relation
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Squared
from dpgrad.convex.solvers import gd, regression
from dpgrad.convex.solvers.regression import Statistics
from dpgrad.mechanism.keys import Key

Array = NDArray[np.float64]
ZERO_OUT, REPLACE_ONE = Relation.ZERO_OUT, Relation.REPLACE_ONE


def problem(rows: int, columns: int = 3, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (rows, columns)) / math.sqrt(columns)
    return x, x @ np.arange(1.0, columns + 1) + 0.1 * random.standard_normal(rows)


@pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
def test_no_row_moves_a_statistic_by_more_than_its_noise_accounts_for(relation: Relation) -> None:
    random = np.random.default_rng(1)
    plan = Statistics(2.0, 3.0, relation, share=1.0)  # noise of one sensitivity
    furthest = np.zeros(3)
    for trial in range(400):
        x = random.standard_normal((4, 2))
        x *= 2 / np.linalg.norm(x, axis=1, keepdims=True)
        y = random.choice([-3.0, 3.0], 4)
        if trial % 2:
            x[1:] *= 0.01  # then the smallest eigenvalue is that of the one row
        other, label = x.copy(), y.copy()
        other[0] = 0 if relation is ZERO_OUT else random.permutation(x[0]) * random.choice([-1, 1], 2)
        label[0] = random.choice([-3.0, 3.0])
        (m, v), (n, u) = (regression.statistics(Design(a, radius=2.0), b) for a, b in ((x, y), (other, label)))
        gaps = [np.linalg.norm(m - n), np.linalg.norm(v - u), abs(np.linalg.eigvalsh(m)[0] - np.linalg.eigvalsh(n)[0])]
        furthest = np.maximum(furthest, gaps)
    allowed = np.array([plan.moment_std, plan.product_std, plan.eigenvalue_std])
    assert (furthest <= allowed).all()
    assert (furthest[:2] > 0.9 * allowed[:2]).all()


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_the_budget_is_spent_exactly(relation: Relation, epsilon: float) -> None:
    plan = regression.calibrated(1000, radius=2.0, target_bound=3.0, epsilon=epsilon, delta=1e-6, relation=relation)
    spent = account(plan.event, relation, "pld").epsilon(1e-6)
    assert epsilon * (1 - 1e-6) < spent <= epsilon


def test_large_budgets_give_least_squares() -> None:
    x, y = problem(4000)
    plan = regression.calibrated(4000, radius=1.0, target_bound=9.0, epsilon=500.0, delta=1e-8, relation=REPLACE_ONE)
    w, event = regression.solve(Design(x, radius=1.0), y, plan, key=1)
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    assert np.abs(w[:, 0] - best).max() < 0.01
    assert event == plan.event


def test_it_beats_the_zero_model_at_a_moderate_budget() -> None:
    x, y = problem(4000)
    plan = regression.calibrated(4000, radius=1.0, target_bound=4.0, epsilon=1.0, delta=1e-8, relation=REPLACE_ONE)
    errors = [
        np.mean((x @ regression.solve(Design(x, radius=1.0), y, plan, key=k)[0][:, 0] - y) ** 2) for k in range(5)
    ]
    assert np.mean(errors) < 0.2 * np.mean(y**2)


def test_the_ridge_lifts_the_spectrum_above_the_noise() -> None:
    """But with probability ρ = 5 %, XᵀX + E₁ + λI is positive definite: at most 15 of 150 runs fail (p < 1e-3)."""
    x, _ = problem(50, columns=8)
    plan = regression.calibrated(50, radius=1.0, target_bound=1.0, epsilon=0.5, delta=1e-4, relation=ZERO_OUT)
    moment, _ = regression.statistics(Design(x, radius=1.0), np.zeros(50))
    random, failures = np.random.default_rng(0), 0
    for _ in range(150):
        noise = plan.moment_std * random.standard_normal((8, 8))
        smallest = np.linalg.eigvalsh(moment)[0] + plan.eigenvalue_std * random.standard_normal()
        noisy = moment + (noise + noise.T) / 2 + plan.ridge(float(smallest), 8) * np.eye(8)
        failures += np.linalg.eigvalsh(noisy)[0] <= 0
    assert failures <= 15


def test_the_law_of_what_is_released() -> None:
    """On one row of zero only noise is left: w·(E₁ + λ) = E₂. KS at p > 1e-4: a false alarm once in 10,000 seeds."""
    design, plan = Design([[0.0]], radius=1.0), Statistics(1.0, 2.0, REPLACE_ONE, share=0.5)
    drawn = []
    for seed in range(1000):
        key = Key.from_seed(seed)
        w, _ = regression.solve(design, [1.0], plan, key=key)
        smallest = float(gd.gaussian(key, 0, (1,), plan.eigenvalue_std)[0])
        moment = float(gd.gaussian(key, 1, (1, 1), plan.moment_std)[0, 0])
        drawn.append(float(w[0, 0]) * (moment + plan.ridge(smallest, 1)))
    assert plan.product_std == 2 * 1.0 * 2.0 / 0.5
    assert stats.kstest(drawn, stats.norm(scale=plan.product_std).cdf).pvalue > 1e-4


def test_targets_are_cut_to_their_bound() -> None:
    x, y = problem(300)
    plan = regression.calibrated(300, radius=1.0, target_bound=0.5, epsilon=1.0, delta=1e-5, relation=ZERO_OUT)
    one, two = (
        regression.solve(Design(x, radius=1.0), t, plan, key=2)[0] for t in (1e6 * y, np.clip(1e6 * y, -0.5, 0.5))
    )
    assert np.array_equal(one, two)


def test_sparse_float32_and_intercept() -> None:
    x, y = problem(500)
    plan = regression.calibrated(
        500, radius=math.hypot(1.0, 0.5), target_bound=4.0, epsilon=1.0, delta=1e-6, relation=ZERO_OUT
    )
    made: list[Any] = [x, x.astype(np.float32), sparse.csr_array(x)]
    found = [regression.solve(Design(rows, radius=1.0, intercept=0.5), y + 1, plan, key=2)[0] for rows in made]
    assert found[0].shape == (4, 1)
    assert np.abs(found[0] - found[1]).max() < 1e-3
    assert np.abs(found[0] - found[2]).max() < 1e-9


def test_descent_on_cut_residuals_is_the_alternative() -> None:
    x, y = problem(4000)
    run = gd.calibrated(4000, 40, clip=1.0, epsilon=1.0, delta=1e-8, relation=REPLACE_ONE)
    w, _ = gd.solve(Design(x, radius=1.0), y, Squared(bound=4.0), run, learning_rate=3.0, key=1)
    assert np.mean((x @ w[:, 0] - y) ** 2) < 0.2 * np.mean(y**2)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"target_bound": 0.0}, "target_bound must be positive"),
        ({"target_bound": math.inf}, "target_bound must be positive and finite"),
        ({"radius": -1.0}, "radius must be positive"),
        ({"epsilon": "1"}, "epsilon must be a number"),
        ({"delta": 1e-2}, "delta must be below 1/n"),
    ],
    ids=str,
)
def test_bad_arguments(given: dict[str, Any], match: str) -> None:
    good: dict[str, Any] = {"radius": 1.0, "target_bound": 1.0, "epsilon": 1.0, "delta": 1e-6, "relation": ZERO_OUT}
    with pytest.raises(ValueError, match=match):
        regression.calibrated(100, **{**good, **given})


def test_bad_data() -> None:
    plan = regression.calibrated(10, radius=1.0, target_bound=1.0, epsilon=1.0, delta=1e-3, relation=ZERO_OUT)
    with pytest.raises(ValueError, match="rows may be as long as 2, beyond the radius 1"):
        regression.solve(Design(np.ones((10, 1)), radius=2.0), np.ones(10), plan)
    with pytest.raises(ValueError, match="targets must be finite"):
        regression.solve(Design(np.ones((10, 1)), radius=1.0), [math.nan] * 10, plan)


def test_every_row_is_lowered_by_what_rounding_may_add() -> None:
    moment, product = regression.statistics(Design([[1.0]], radius=1.0), np.array([1.0]))
    for found in (float(moment[0, 0]), float(product[0, 0])):
        assert 1 - 4e-6 < found < 1 - 5e-7


def test_no_two_releases_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same numbers on two of them, their difference would show the data."""
    drawn: list[tuple[int, float]] = []
    gaussian = gd.gaussian

    def spied(key: Key, step: int, shape: tuple[int, ...], std: float) -> Any:
        found = gaussian(key, step, shape, std)
        drawn.append((step, float(found.ravel()[0]) / std))
        return found

    monkeypatch.setattr(gd, "gaussian", spied)
    plan = regression.calibrated(
        50, radius=1.0, target_bound=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT
    )  # fmt: skip
    regression.solve(Design(np.ones((50, 2)) / 2, radius=1.0), np.ones(50), plan, key=7)
    assert len(drawn) == len({step for step, _ in drawn}) == len({first for _, first in drawn}) == 3
