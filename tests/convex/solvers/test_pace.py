"""Paces: what noise allows, in no more steps than it takes, and arrival seen from released iterates alone."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from dpgrad.accounting.events import Relation
from dpgrad.convex import DPLinearRegression, DPLogisticRegression
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Squared
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.pace import ALLOWED, LEAST_STEPS, MOST_STEPS, Path, paced

Array = NDArray[np.float64]


@pytest.mark.parametrize("rows", [10, 1000, 10**5, 10**7])
@pytest.mark.parametrize("mu", [1e-4, 0.1, 10.0])
def test_the_noise_on_a_score_is_what_is_allowed_or_less(rows: int, mu: float) -> None:
    clip, radius, moved = 1.7, 2.5, 2
    pace = paced(rows, clip=clip, radius=radius, smoothness=3.0, mu=mu, moved=moved)
    noise = pace.travel * radius * moved * clip / (rows * mu)
    assert noise <= ALLOWED * (1 + 1e-12)
    assert noise == pytest.approx(ALLOWED * pace.reached)
    assert pace.learning_rate <= 1 / 3.0
    assert 0 <= pace.momentum < 1
    assert LEAST_STEPS <= pace.steps <= MOST_STEPS
    assert pace.reached == pytest.approx(1) or pace.steps == MOST_STEPS


def test_steps_and_momentum_of_the_caller_are_kept() -> None:
    pace = paced(10**6, clip=1.0, radius=1.0, smoothness=0.25, mu=1.0, moved=2, steps=30, momentum=0.5)
    assert (pace.steps, pace.momentum, pace.learning_rate) == (30, 0.5, 4.0)
    assert pace.reached < 0.01


def test_the_descent_of_a_quadratic_ends_in_every_direction_that_it_reaches() -> None:
    """Curvatures λ with G·λ from 10 to 1000, with no noise to speak of."""
    curvatures = np.geomspace(1e-3, 0.1, 5)
    rows = np.diag(np.sqrt(5 * curvatures)).repeat(200, axis=0)
    best = np.array([1.0, -2.0, 3.0, -1.0, 2.0])
    design, targets = Design(rows, radius=1.0), rows @ best
    pace = paced(1000, clip=9.0, radius=1.0, smoothness=1.0, mu=10**4 * 9 * 2 / (ALLOWED * 1000), moved=2)
    assert pace.travel * curvatures[0] == pytest.approx(10)
    mechanism = gd.calibrated(
        1000, pace.steps, clip=9.0, epsilon=1e12, delta=1e-7, relation=Relation.REPLACE_ONE
    )  # fmt: skip
    path = Path(pace.steps)
    gd.solve(
        design, targets, Squared(math.inf), mechanism,
        learning_rate=pace.learning_rate, momentum=pace.momentum, key=7, each=path.add,
    )  # fmt: skip
    np.testing.assert_allclose(path.mean[:, 0], best, rtol=0.01)
    assert path.moved < 0.01


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 101])
def test_a_path_of_any_length(steps: int) -> None:
    path = Path(steps)
    for step in range(steps):
        path.add(step, np.array([[float(step)]]))
    half = np.arange(steps // 2, steps)
    assert path.mean[0, 0] == pytest.approx(half.mean())
    assert path.moved >= 0


@pytest.mark.parametrize("left", [0.02, 0.04, 0.06, 0.1, 0.3, 0.7])
def test_what_is_left_of_the_way_shows_in_the_last_quarter(left: float) -> None:
    """An exponential approach that leaves ``left`` of its way in the mean that is returned."""
    from scipy.optimize import brentq

    times = (np.arange(400) + 1) / 400

    def missing(rate: float) -> float:
        return float(np.exp(-rate * times[200:]).mean()) - left

    rate = brentq(missing, 1e-3, 100)
    path = Path(400)
    for step, time in enumerate(times):
        path.add(step, np.array([[1 - math.exp(-rate * time)]]))
    assert (path.moved > 0.05) == (left > 0.05)


def odds(rows: int, columns: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    X = random.uniform(0, 1, (rows, columns))
    weights = random.normal(0, 2, columns)
    chances = 1 / (1 + np.exp(-(X - 0.5) @ weights))
    return X, (random.random(rows) < chances).astype(np.int64)


def without_privacy(X: Array, y: NDArray[np.int64]) -> Array:
    return np.asarray(LogisticRegression(C=1e9, max_iter=1000, tol=1e-8).fit(X, y).coef_[0])


@pytest.mark.parametrize("seed", range(3))
def test_coefficients_are_those_of_the_optimum_where_the_budget_allows_it(seed: int) -> None:
    """20,000 rows of 5 columns at ε = 8: the noise on a coefficient is about 1 % of their length."""
    X, y = odds(20_000, 5, seed)
    best = without_privacy(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = DPLogisticRegression(8.0, classes=[0, 1], data_norm=5**0.5, solver="gd", random_state=seed).fit(X, y)
    assert np.linalg.norm(model.coef_[0] - best) < 0.05 * np.linalg.norm(best)


def test_sampled_descent_comes_as_close() -> None:
    X, y = odds(20_000, 5, 3)
    best = without_privacy(X, y)
    model = DPLogisticRegression(8.0, classes=[0, 1], data_norm=5**0.5, solver="sgd", random_state=3).fit(X, y)
    assert np.linalg.norm(model.coef_[0] - best) < 0.1 * np.linalg.norm(best)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"epsilon": 0.05}, "more rows, a larger epsilon or a tighter data_norm are needed"),
        ({"epsilon": 8.0, "max_iter": 20}, r"raise max_iter to about [\d,]+, or learning_rate where it is given"),
        ({"epsilon": 8.0, "learning_rate": 1e-3}, r"raise max_iter to about [\d,]+, or learning_rate .*"),
        ({"epsilon": 8.0, "data_norm": 100.0}, "more rows, a larger epsilon or a tighter data_norm are needed"),
    ],
)
def test_a_warning_where_the_optimum_was_not_reached(options: dict[str, Any], remedy: str) -> None:
    X, y = odds(20_000, 5, 1)
    given = {"classes": [0, 1], "data_norm": 5**0.5, "solver": "gd", "random_state": 1, **options}
    with pytest.warns(ConvergenceWarning, match=rf"^the coefficients had not settled: they moved by .* {remedy}\."):
        DPLogisticRegression(**given).fit(X, y)


def test_a_rate_of_ones_own_is_the_descent_of_the_paper() -> None:
    X, y = odds(500, 3, 2)
    given: dict[str, Any] = {"classes": [0, 1], "data_norm": 2.0, "fit_intercept": False, "random_state": 2}
    with pytest.warns(ConvergenceWarning):
        model = DPLogisticRegression(1.0, solver="gd", learning_rate=0.5, **given).fit(X, y)
    mechanism = gd.calibrated(
        500, 100, clip=2.0, epsilon=1.0, delta=500**-2, relation=Relation.REPLACE_ONE
    )  # fmt: skip
    assert model.n_iter_ == 100
    assert model.privacy_.releases[0].std == pytest.approx(mechanism.std_at(0))


@pytest.mark.parametrize("epsilon", [1e-3, 0.01, 0.1])
@pytest.mark.parametrize("solver", ["gd", "adassp"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_predictions_stay_within_the_bounds_of_the_target(solver: str, epsilon: float) -> None:
    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (3000, 5))
    y = 3 + X @ [2.0, -1.0, 0.5, 0.0, 1.0]
    for fit_intercept in (True, False):
        model = DPLinearRegression(
            epsilon, data_norm=2.5, target_bounds=(-2.0, 8.0), solver=solver, fit_intercept=fit_intercept,
            random_state=5,
        )  # fmt: skip
        found = model.fit(X, y).predict(np.vstack([X, 1e6 * X]))
        assert found.min() >= -2
        assert found.max() <= 8
    centred = DPLinearRegression(epsilon, data_norm=2.5, target_bounds=(-2, 8), solver=solver, random_state=5)
    assert centred.fit(X, y).score(X, y) > -1
