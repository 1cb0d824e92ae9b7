"""Output perturbation: brute force on neighbours for every order of the rows, closed forms, and the noise."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse, stats

from dpgrad.accounting import account, exact
from dpgrad.accounting.events import Gaussian, Relation, Repeat
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, Softmax, Squared
from dpgrad.convex.solvers import output
from dpgrad.convex.solvers.output import Descent
from dpgrad.mechanism.keys import Key

Array = NDArray[np.float64]
ZERO_OUT, REPLACE_ONE = Relation.ZERO_OUT, Relation.REPLACE_ONE
RELATIONS = [ZERO_OUT, REPLACE_ONE]
BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
LOSSES: list[Any] = [Logistic(), Logistic(0.3), HuberSvm(0.5), Squared(1.0), Softmax(3)]


def plan_of(rows: int, loss: Any, relation: Relation = REPLACE_ONE, **given: Any) -> Descent:
    return output.calibrated(rows, loss, radius=1.0, relation=relation, **{**BUDGET, **given})


def problem(loss: Any, random: np.random.Generator, rows: int) -> tuple[Array, NDArray[Any]]:
    x = random.standard_normal((rows, 2))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    match loss:
        case Softmax(classes):
            return x, random.integers(0, classes, rows)
        case Squared():
            return x, random.uniform(-3, 3, rows)
    return x, random.choice([-1.0, 1.0], rows)


WAYS: dict[str, dict[str, Any]] = {
    "convex": {"passes": 3, "batch_size": 2, "learning_rate": 0.3},
    "short last batch": {"passes": 2, "batch_size": 4, "learning_rate": 0.5},
    "largest rate": {"passes": 2, "batch_size": 1, "learning_rate": 1.0},
    "strongly convex": {"passes": 3, "batch_size": 2, "l2": 0.5},
    "full gradient": {"passes": 7, "batch_size": 5, "learning_rate": 0.5},
    "full gradient, strongly convex": {"passes": 7, "batch_size": 5, "learning_rate": 0.4, "l2": 0.3},
}


class TestNeighbours:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("loss", LOSSES, ids=str)
    @pytest.mark.parametrize("relation", RELATIONS)
    def test_no_row_moves_the_result_by_more_than_the_sensitivity(
        self, way: str, loss: Any, relation: Relation
    ) -> None:
        random = np.random.default_rng(5)
        plan = plan_of(5, loss, relation, **WAYS[way])
        for _ in range(6):
            x, y = problem(loss, random, 5)
            other, label = x.copy(), y.copy()
            other[0], label[0] = (0, y[0]) if relation is ZERO_OUT else (-x[0], problem(loss, random, 1)[1][0])
            for order in (np.arange(5), np.arange(5)[::-1].copy(), random.permutation(5)):
                one, two = (
                    output.descend(Design(a, radius=1.0), b, loss, plan, order) for a, b in ((x, y), (other, label))
                )
                assert np.linalg.norm(one - two) <= plan.sensitivity

    def test_the_bound_is_reached_where_nothing_contracts(self) -> None:
        """A Huber SVM far from its margin is linear: the gradients of a row add up over the passes."""
        loss = HuberSvm(0.5)
        x, y = np.array([[1e-6, 0.0]] * 4), np.ones(4)
        x[0], other = (0.0, 1.0), x.copy()
        other[0] = 0.0, -1.0
        plan = plan_of(4, loss, passes=2, batch_size=2, learning_rate=0.01)
        one, two = (output.descend(Design(a, radius=1.0), y, loss, plan, np.arange(4)) for a in (x, other))
        assert np.linalg.norm(one - two) == pytest.approx(plan.sensitivity, rel=1e-5)

    def test_every_order_counts(self) -> None:
        """All 24 orders of four rows, with a rate that falls: the worst place is covered."""
        loss, random = Logistic(), np.random.default_rng(1)
        plan = plan_of(4, loss, passes=2, batch_size=1, learning_rate=lambda t: 0.5 / (1 + t))
        x, y = problem(loss, random, 4)
        other = x.copy()
        other[0] = -x[0]
        worst = max(
            float(
                np.linalg.norm(
                    output.descend(Design(x, radius=1.0), y, loss, plan, np.array(order))
                    - output.descend(Design(other, radius=1.0), y, loss, plan, np.array(order))
                )
            )
            for order in itertools.permutations(range(4))
        )
        assert 0.3 * plan.sensitivity < worst <= plan.sensitivity


class TestSensitivity:
    @pytest.mark.parametrize("relation", RELATIONS)
    def test_closed_forms(self, relation: Relation) -> None:
        m = 2 if relation is REPLACE_ONE else 1
        loss, n = Logistic(), 1000
        convex = plan_of(n, loss, relation, passes=10, batch_size=50, learning_rate=0.1)
        assert convex.sensitivity == pytest.approx(m * 10 * 1.0 * 0.1 / 50)
        for passes in (5, 80):
            strong = plan_of(n, loss, relation, passes=passes, batch_size=50, l2=0.05)
            assert 0.9 * m / (0.05 * n) < strong.sensitivity <= m / (0.05 * n) * (1 + 1e-12)
        full = plan_of(n, loss, relation, passes=30, batch_size=n, learning_rate=2.0)
        assert full.sensitivity == pytest.approx(m * 2.0 * 30 / n)
        both = plan_of(n, loss, relation, passes=30, batch_size=n, learning_rate=2.0, l2=0.1)
        assert both.sensitivity == pytest.approx(m / (0.1 * n) * (1 - 0.8**30))

    def test_the_last_short_batch_counts_as_a_whole_one(self) -> None:
        """36,176 rows in batches of 50 leave 26: divided by 26 they would pull 1.9 times as hard."""
        plan = plan_of(36176, Logistic(), delta=1e-9, passes=1, batch_size=50, learning_rate=0.1)
        assert plan.sensitivity == pytest.approx(2 * 0.1 / 50)
        x, y = np.zeros((7, 1)), np.ones(7)
        x[6] = 1.0
        small = plan_of(7, Logistic(), delta=1e-3, passes=1, batch_size=4, learning_rate=1.0)
        found = output.descend(Design(x, radius=1.0), y, Logistic(), small, np.arange(7))
        assert found[0, 0] == pytest.approx(0.5 / 4, rel=1e-5)  # not 0.5/3

    def test_rates_that_drive_neighbours_apart_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"learning_rate must be at most 2/\(smoothness \+ l2\) = 8, got 8.1"):
            plan_of(100, Logistic(), passes=1, batch_size=10, learning_rate=8.1)
        plan_of(100, Logistic(), passes=1, batch_size=10, learning_rate=8.0)


class TestNoise:
    @pytest.mark.parametrize("relation", RELATIONS)
    @pytest.mark.parametrize("models", [1, 10])
    @pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
    def test_the_budget_is_spent_exactly(self, relation: Relation, models: int, epsilon: float) -> None:
        plan = plan_of(
            1000, Logistic(), relation, epsilon=epsilon, passes=2, batch_size=50, learning_rate=0.1, models=models
        )
        for accountant in ("exact", "pld", "rdp"):
            spent = account(Repeat(plan.event, models), relation, accountant).epsilon(1e-6)
            assert spent <= epsilon or accountant == "rdp"
            assert spent >= epsilon * (1 - 1e-6)

    def test_the_noise_is_analytic_and_not_the_classical_formula(self) -> None:
        plan = plan_of(1000, Logistic(), epsilon=1.0, passes=2, batch_size=50, learning_rate=0.1)
        assert plan.std == pytest.approx(plan.sensitivity / exact.mu_for(1.0, 1e-6), rel=1e-8)
        assert plan.std < plan.sensitivity * math.sqrt(2 * math.log(2e6))
        assert plan.event == Gaussian(2 * plan.std / plan.sensitivity)

    def test_its_law(self) -> None:
        """Kolmogorov–Smirnov of 2,000 releases around the descent, p > 1e-4: a false alarm once in 10,000 seeds."""
        x, y = np.array([[1.0], [-1.0]]), np.array([1.0, -1.0])
        plan = plan_of(2, Logistic(), delta=0.1, passes=1, batch_size=2, learning_rate=0.1)
        design = Design(x, radius=1.0)
        centre = output.descend(design, y, Logistic(), plan, np.arange(2))
        drawn = [float((output.solve(design, y, Logistic(), plan, key=k)[0] - centre)[0, 0]) for k in range(2000)]
        assert stats.kstest(drawn, stats.norm(scale=plan.std).cdf).pvalue > 1e-4

    def test_the_order_is_uniform(self) -> None:
        """χ² of 6,000 orders of three rows over 6 cells, p > 1e-4: a false alarm once in 10,000 seeds."""
        seen = [tuple(output.order(Key.from_seed(k), 3).tolist()) for k in range(6000)]
        counts = [seen.count(one) for one in itertools.permutations(range(3))]
        assert stats.chisquare(counts).pvalue > 1e-4


class TestSolve:
    @pytest.mark.parametrize("loss", LOSSES, ids=str)
    def test_it_is_the_descent_in_plain_words(self, loss: Any) -> None:
        random = np.random.default_rng(4)
        x, y = problem(loss, random, 11)
        plan = plan_of(11, loss, delta=1e-3, passes=2, batch_size=4, l2=0.2)
        order = random.permutation(11)
        w = np.zeros((2, loss.outputs))
        step = 0
        for _ in range(2):
            for start in (0, 4, 8):
                total = np.zeros_like(w)
                for i in order[start : start + 4]:
                    total += np.outer(x[i], loss.residuals(x[i : i + 1] @ w, y[i : i + 1])[0])
                w = w - plan.learning_rates[step] * (total / 4 + 0.2 * w)
                step += 1
        found = output.descend(Design(x, radius=1.0), y, loss, plan, order)
        assert np.abs(found - w).max() < 1e-5

    def test_sparse_rows_give_what_dense_rows_give(self) -> None:
        random = np.random.default_rng(2)
        x = random.uniform(-1, 1, (60, 8)) * (random.uniform(size=(60, 8)) < 0.3)
        y = random.choice([-1.0, 1.0], 60)
        plan = plan_of(60, Logistic(), delta=1e-4, passes=3, batch_size=7, learning_rate=0.5)
        one, two = (
            output.solve(Design(rows, radius=1.0), y, Logistic(), plan, key=5)[0] for rows in (x, sparse.csr_array(x))
        )
        assert np.abs(one - two).max() < 1e-12

    def test_what_the_noise_was_not_calibrated_for_is_refused(self) -> None:
        x, y = problem(Logistic(), np.random.default_rng(0), 10)
        plan = plan_of(10, Logistic(), delta=1e-3, passes=1, batch_size=5, learning_rate=0.5)
        with pytest.raises(ValueError, match="loss must be the one the noise was calibrated for"):
            output.solve(Design(x, radius=1.0), y, Logistic(0.5), plan)
        with pytest.raises(ValueError, match="the noise was calibrated for 10 rows, got 9"):
            output.solve(Design(x[:9], radius=1.0), y[:9], Logistic(), plan)
        with pytest.raises(ValueError, match="rows may be as long as 2, beyond the radius 1"):
            output.solve(Design(x, radius=2.0), y, Logistic(), plan)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"relation": Relation.ADD_REMOVE}, "relation add-remove is refused: batches reveal the number of rows"),
        ({"loss": Hinge()}, "output needs a smooth loss, got Hinge"),
        ({"learning_rate": None}, "learning_rate is required where l2 is 0"),
        ({"learning_rate": -0.1}, "learning_rate"),
        ({"batch_size": 101}, "batch_size must be at most 100"),
        ({"passes": 0}, "passes must be a whole number"),
        ({"l2": -1.0}, "l2 must be zero or more"),
        ({"delta": 0.01}, "delta must be below 1/n"),
        ({"epsilon": math.nan}, "epsilon must be a number"),
        ({"loss": Squared(math.inf)}, "bound is infinite"),
    ],
    ids=str,
)
def test_bad_arguments(given: dict[str, Any], match: str) -> None:
    good: dict[str, Any] = {
        "loss": Logistic(), "relation": ZERO_OUT, "passes": 1, "batch_size": 10, "learning_rate": 0.1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=match) as error:
        plan_of(100, **{**good, **given})
    assert "\n" not in str(error.value)


def test_a_row_is_lowered_by_what_rounding_may_add() -> None:
    """One row that pulls as hard as a row can moves the result by the sensitivity, less a millionth."""
    loss = Squared(bound=1.0)
    plan = output.calibrated(
        2, loss, radius=1.0, passes=1, batch_size=2, learning_rate=0.5, epsilon=1.0, delta=0.1,
        relation=Relation.ZERO_OUT,
    )  # fmt: skip
    found = output.descend(
        Design(np.array([[1.0], [0.0]]), radius=1.0), np.array([9.0, 0.0]), loss, plan, np.arange(2)
    )  # fmt: skip
    assert plan.sensitivity * (1 - 1.1e-6) < float(found[0, 0]) < plan.sensitivity * (1 - 9e-7)
