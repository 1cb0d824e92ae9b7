"""Curvature against finite differences, eigenvalues, quadrature and the paper's own examples; minimisers; Table 2."""

import math
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import sparse

from dpgrad import data
from dpgrad.convex import Design, Hinge, HuberSvm, Logistic, Softmax, Squared, curvature
from dpgrad.convex.curvature import (
    Objective,
    along,
    average,
    describe,
    excess_risk,
    expected,
    expected_by_draws,
    minimiser,
    minimum,
    smoothness,
)

# Means of draws may stray by so many standard errors: false alarms below 6e-7 a comparison.
SIGMAS = 5
PLAIN = Squared(math.inf)


def objective_of(loss, rows: int = 40, columns: int = 5, l2: float = 0.0, seed: int = 0, compact: bool = False):
    """A random problem with rows of very different scales by column."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * np.geomspace(1, 0.1, columns)
    match loss:
        case Softmax(classes):
            y = random.integers(classes, size=rows)
        case Squared():
            y = random.standard_normal(rows)
        case _:
            y = np.where(random.random(rows) < 0.5, 1.0, -1.0)
    return Objective(loss, Design(sparse.csr_array(x) if compact else x, radius=100.0, intercept=0.5), y, l2)


LOSSES = [Logistic(), Logistic(slope=0.6), HuberSvm(width=0.5), PLAIN, Squared(1.0), Softmax(3)]
losses = pytest.mark.parametrize("loss", LOSSES, ids=repr)


class TestObjective:
    @losses
    @pytest.mark.parametrize("compact", [False, True])
    def test_derivatives(self, loss, compact: bool) -> None:
        objective = objective_of(loss, l2=0.03, compact=compact)
        w = 0.3 * np.random.default_rng(1).standard_normal(objective.shape)
        units = np.eye(objective.dimension).reshape(-1, *objective.shape)
        step = 1e-6
        slopes = [(objective.value(w + step * u) - objective.value(w - step * u)) / (2 * step) for u in units]
        assert_allclose(objective.gradient(w).ravel(), slopes, atol=1e-8)
        bends = [(objective.gradient(w + step * u) - objective.gradient(w - step * u)) / (2 * step) for u in units]
        hessian = objective.hessian(w)
        assert_allclose(hessian, np.array([b.ravel() for b in bends]), atol=1e-6)
        product = objective.hessian_product(w)
        assert_allclose(np.array([product(u).ravel() for u in units]), hessian, atol=1e-12)
        assert_allclose(objective.trace(w), np.trace(hessian), rtol=1e-9)

    def test_the_hessian_may_be_formed_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for loss in (Logistic(), Softmax(3)):
            objective = objective_of(loss)
            w = np.full(objective.shape, 0.2)
            whole = objective.hessian(w)
            monkeypatch.setattr(curvature, "_BLOCK", 80)  # two columns
            assert_allclose(objective.hessian(w), whole, atol=1e-14)
            monkeypatch.undo()

    def test_smoothness_is_never_exceeded_and_met_by_the_squared_loss(self) -> None:
        random = np.random.default_rng(3)
        for loss in LOSSES:
            objective = objective_of(loss, l2=0.1)
            beta = smoothness(objective)
            for scale in (0.0, 0.1, 1.0):
                w = scale * random.standard_normal(objective.shape)
                assert np.linalg.eigvalsh(objective.hessian(w))[-1] <= beta * (1 + 1e-9)
        objective = objective_of(PLAIN, l2=0.1)
        largest = np.linalg.eigvalsh(objective.hessian(np.zeros(objective.shape)))[-1]
        assert_allclose(smoothness(objective), largest, rtol=1e-9)

    def test_refusals(self) -> None:
        design = Design(np.eye(2), radius=1.0)
        with pytest.raises(ValueError, match="curvature needs a smooth loss, got Hinge"):
            Objective(Hinge(), design, np.array([1.0, -1.0]))
        with pytest.raises(ValueError, match="l2 must be zero or more"):
            Objective(Logistic(), design, np.array([1.0, -1.0]), l2=-1.0)
        with pytest.raises(ValueError, match=r"targets must be -1 or \+1: write"):
            Objective(Logistic(), design, np.array([1.0, 0.0]))

    def test_repr_shows_no_row(self) -> None:
        assert repr(objective_of(Logistic())) == "Objective(loss=Logistic(slope=1.0), l2=0.0)"


class TestMinimumAndAverage:
    @losses
    def test_dense(self, loss) -> None:
        objective = objective_of(loss, l2=0.02)
        w = 0.1 * np.random.default_rng(1).standard_normal(objective.shape)
        values = np.linalg.eigvalsh(objective.hessian(w))
        assert_allclose(minimum(objective, w).value, values[0], atol=1e-12)
        assert_allclose(average(objective, w), values.mean(), rtol=1e-9)

    @pytest.mark.parametrize("loss", [Logistic(), PLAIN], ids=repr)
    def test_lanczos(self, loss, monkeypatch: pytest.MonkeyPatch) -> None:
        objective = objective_of(loss, rows=400, columns=120, l2=0.001)
        w = np.zeros(objective.shape)
        exact = minimum(objective, w)
        monkeypatch.setattr(curvature, "_DENSE", 10)
        found = minimum(objective, w)
        assert found.error < 1e-6
        assert abs(found.value - exact.value) <= found.error + 1e-9
        assert found == minimum(objective, w)  # the same figure every time

    def test_lanczos_at_the_size_it_is_for(self) -> None:
        """2,100 columns that stay sparse: column j appears in its own rows only, with mean square c_j."""
        columns, copies = 2100, 2
        scales = np.linspace(1.0, 3.0, columns)
        x = sparse.csr_array(sparse.vstack([sparse.diags_array(scales)] * copies))
        objective = Objective(PLAIN, Design(x, radius=4.0), np.zeros(columns * copies))
        found = minimum(objective, np.zeros((columns, 1)))
        assert_allclose(found.value, 1 / columns, rtol=1e-3)
        assert found.error < 1e-3 / columns
        assert_allclose(average(objective, np.zeros((columns, 1))), (scales**2).mean() / columns, rtol=1e-9)

    @pytest.mark.parametrize("scale", [0.0, 1.0])
    def test_lanczos_where_all_directions_are_alike(self, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(curvature, "_DENSE", 1)
        objective = Objective(PLAIN, Design(scale * np.eye(8), radius=2.0), np.ones(8), l2=0.5)
        found = minimum(objective, np.zeros((8, 1)))
        assert_allclose(found, (scale / 8 + 0.5, 0.0), atol=1e-12)
        plain = Objective(PLAIN, Design(scale * np.eye(8), radius=2.0), np.ones(8))
        assert_allclose(minimum(plain, np.zeros((8, 1))), (scale / 8, 0.0), atol=1e-12)

    def test_flat_directions_are_known(self) -> None:
        """Softmax: all classes together. Fewer rows than columns: what no row sees."""
        for objective in (objective_of(Softmax(4), l2=0.3), objective_of(Logistic(), rows=4, columns=9, l2=0.3)):
            w = np.full(objective.shape, 0.1)
            assert minimum(objective, w) == (0.3, 0.0)
            assert_allclose(np.linalg.eigvalsh(objective.hessian(w))[0], 0.3, atol=1e-12)

    def test_logistic_with_l2_has_at_least_that(self) -> None:
        """The regulariser is the strong convexity: far out the loss itself is flat."""
        objective = objective_of(Logistic(), l2=0.01)
        random = np.random.default_rng(5)
        for scale in (0.0, 1.0, 10.0, 1000.0):
            found = minimum(objective, scale * random.standard_normal(objective.shape)).value
            assert found >= 0.01 - 1e-12
        assert_allclose(found, 0.01, atol=1e-4)


class Dot:
    """−y·s: the dot-product loss of the lower bound of Bassily et al. (2014)."""

    smooth: ClassVar[bool] = True
    outputs: ClassVar[int] = 1

    def checked(self, targets, rows: int):
        return np.asarray(targets)

    def values(self, scores, targets):
        return -targets * scores[:, 0]

    def residuals(self, scores, targets):
        return -targets[:, None] * np.ones_like(scores)

    def curvatures(self, scores, targets):
        return np.zeros(len(scores))

    def lipschitz(self, radius: float) -> float:
        return radius

    def smoothness(self, radius: float) -> float:
        return 0.0


class TestExpected:
    @given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(0, 100.0))
    def test_example_1(self, seed: int, std: float, reach: float) -> None:
        """Linear regression: ν > μ for every σ > 0 and x, and ν is the ratio of Definition 3 without approximation."""
        objective = objective_of(PLAIN, seed=7)
        best = minimiser(objective)
        x = best + reach * np.random.default_rng(seed).standard_normal(objective.shape)
        hessian = objective.hessian(x)
        gap = (x - best).ravel()
        # E⟨H(g−z), g−z⟩ and E‖g−z‖²
        exact = (gap @ hessian @ gap + std**2 * np.trace(hessian)) / (gap @ gap + std**2 * gap.size)
        found = expected(objective, x, best, std)
        assert_allclose(found, exact, rtol=1e-6)
        assert found > np.linalg.eigvalsh(hessian)[0]

    def test_not_at_every_point_at_once(self) -> None:
        """Definition 3 asks for one ν at every x: far out along the flattest direction no more than μ is left."""
        objective = objective_of(PLAIN)
        best = minimiser(objective)
        values, vectors = np.linalg.eigh(objective.hessian(best))
        far = best + 1e5 * vectors[:, :1]
        assert_allclose(expected(objective, far, best, std=1.0), values[0], rtol=1e-3)

    @losses
    def test_tends_to_the_average(self, loss) -> None:
        objective = objective_of(loss, l2=0.05)
        best = minimiser(objective)
        x = best + 0.1
        assert_allclose(expected(objective, x, best, std=1e5), average(objective, x), rtol=1e-6)

    def test_is_the_mean_of_two_curvatures(self) -> None:
        objective = objective_of(Logistic(), l2=0.01)
        best = minimiser(objective)
        x, std = np.zeros(objective.shape), 0.2
        square, noise = float(np.sum(best**2)), objective.dimension * std**2
        towards = float(np.vdot(objective.gradient(x), x - best)) / square
        mixed = (noise * average(objective, x) + square * towards) / (noise + square)
        assert_allclose(expected(objective, x, best, std), mixed, rtol=1e-12)

    @pytest.mark.parametrize("std", [0.05, 1.0])
    def test_draws_agree_with_eq_5_for_the_squared_loss(self, std: float) -> None:
        objective = objective_of(PLAIN)
        best, x = minimiser(objective), np.zeros(objective.shape)
        found = expected_by_draws(objective, x, best, std, np.random.default_rng(0), draws=400)
        assert abs(found.value - expected(objective, x, best, std)) <= SIGMAS * found.error

    @pytest.mark.parametrize("std", [0.1, 1.0, 10.0])
    def test_draws_agree_with_quadrature(self, std: float) -> None:
        """Logistic loss in one dimension: Definition 3 by quadrature, where Eq. 5 is not exact."""
        from scipy.integrate import quad

        x = np.array([[1.0], [2.0], [-1.0], [0.5]])
        objective = Objective(Logistic(), Design(x, radius=2.0), np.array([1.0, 1.0, 1.0, -1.0]), l2=0.01)
        best, start = minimiser(objective), np.zeros((1, 1))

        def top(z: float) -> float:
            slope = float(objective.gradient(np.array([[-z]]))[0, 0])
            return slope * (-z - best[0, 0]) * math.exp(-((z / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))

        exact = quad(top, -12 * std, 12 * std, points=[0.0], limit=200)[0] / (std**2 + best[0, 0] ** 2)
        found = expected_by_draws(objective, start, best, std, np.random.default_rng(1), draws=4000)
        assert found.error < 0.03 * exact
        assert abs(found.value - exact) <= SIGMAS * found.error
        approximate = expected(objective, start, best, std)
        if std == 0.1:
            assert_allclose(approximate, exact, rtol=0.01)
        if std == 10.0:  # second order is not enough for noise that leaves the curved part of the loss
            assert approximate > 2 * exact

    def test_underdetermined(self) -> None:
        """μ = 0 and ν > 0: at least λ₊·r/p from the start, but not the restricted strong convexity λ₊ itself."""
        random = np.random.default_rng(0)
        objective = Objective(PLAIN, Design(random.standard_normal((4, 9)), radius=100.0), random.standard_normal(4))
        best, start = minimiser(objective), np.zeros((9, 1))
        assert minimum(objective, start) == (0.0, 0.0)
        positive = np.linalg.eigvalsh(objective.hessian(start))[5:]
        assert len(positive) == 4
        assert positive[0] > 1e-3
        for std in (0.0, 0.1, 1.0, 100.0):
            assert expected(objective, start, best, std) >= positive[0] * 4 / 9
        # rows (1, 0): λ₊ = 1, and noise in the second direction counts against it
        plane = Objective(PLAIN, Design(np.array([[1.0, 0.0]]), radius=2.0), np.array([1.0]))
        assert_allclose(expected(plane, np.zeros((2, 1)), np.array([[1.0], [0.0]]), std=1.0), 2 / 3)

    def test_dot_product_loss(self) -> None:
        """No curvature in any direction: ν = 0 at the minimiser of the unit ball, and for much noise everywhere."""
        random = np.random.default_rng(0)
        objective = Objective(Dot(), Design(random.standard_normal((20, 3)), radius=100.0), np.ones(20))
        start = np.zeros((3, 1))
        pull = -objective.gradient(start)
        best = pull / np.linalg.norm(pull)
        assert (minimum(objective, start).value, average(objective, start)) == (0.0, 0.0)
        assert expected(objective, best, best, std=0.5) == 0.0
        assert expected(objective, start, best, std=0.5) > 0
        assert expected(objective, start, best, std=1e6) < 1e-12

    def test_refusals(self) -> None:
        objective = objective_of(PLAIN)
        best = minimiser(objective)
        with pytest.raises(ValueError, match="not defined at the minimiser without noise"):
            expected(objective, best, best, std=0.0)
        with pytest.raises(ValueError, match="std must be zero or more"):
            expected(objective, best, best, std=-1.0)
        with pytest.raises(ValueError, match="draws must be a whole number of at least 2"):
            expected_by_draws(objective, best, best, 1.0, np.random.default_rng(0), draws=1)


class TestAlong:
    def test_is_what_the_run_sees(self) -> None:
        """ν₂ given x₁ against the ratio of Definition 3 over 20,000 second iterates; ν₁ has no noise."""
        objective = objective_of(PLAIN)
        best, start = minimiser(objective), np.zeros(objective.shape)
        rate, std = 0.3, 0.4
        random = np.random.default_rng(2)
        noises = std * random.standard_normal((20_000, objective.dimension))
        hessian, gradient = objective.hessian(start), objective.gradient(start).ravel()
        gaps = -rate * (gradient + noises) - best.ravel()
        tops = np.einsum("ij,jk,ik->i", gaps, hessian, gaps)
        squares = (gaps**2).sum(axis=1)
        ratio = tops.mean() / squares.mean()
        error = (tops - ratio * squares).std() / squares.mean() / math.sqrt(len(noises))
        second = start - rate * (objective.gradient(start) + noises[0][:, None])
        first, found = along(objective, [start, second], best, learning_rate=rate, std=std)
        assert_allclose(first, (gradient @ -best.ravel()) / np.sum(best**2), rtol=1e-9)
        assert abs(found - ratio) <= SIGMAS * error

    def test_noise_is_rate_times_std(self) -> None:
        objective = objective_of(Logistic(), l2=0.1)
        best, start = minimiser(objective), np.zeros(objective.shape)
        run = [start, np.ones(objective.shape)]
        centre = start - 2.0 * objective.gradient(start)
        found = along(objective, run, best, learning_rate=2.0, std=0.3)[1]
        assert found == expected(objective, centre, best, std=0.6)


class TestMinimiser:
    def test_least_squares(self) -> None:
        objective = objective_of(PLAIN)
        rows = objective.design.scores(np.eye(objective.dimension))
        assert_allclose(minimiser(objective)[:, 0], np.linalg.lstsq(rows, objective.targets)[0], rtol=1e-8)

    def test_nearest_to_the_start_where_there_are_many(self) -> None:
        random = np.random.default_rng(0)
        x, y = random.standard_normal((6, 15)), random.standard_normal(6)
        objective = Objective(PLAIN, Design(x, radius=100.0), y)
        for start in (np.zeros((15, 1)), random.standard_normal((15, 1))):
            nearest = start[:, 0] + np.linalg.pinv(x) @ (y - x @ start[:, 0])
            assert_allclose(minimiser(objective, start)[:, 0], nearest, atol=1e-7)

    @losses
    def test_gradient_vanishes(self, loss) -> None:
        for compact in (False, True):
            objective = objective_of(loss, l2=0.01, compact=compact)
            assert np.abs(objective.gradient(minimiser(objective))).max() < 1e-8

    def test_logistic_without_l2(self) -> None:
        """Duplicate columns: the minimiser nearest to the start moves both alike."""
        random = np.random.default_rng(0)
        column = random.standard_normal((100, 1))
        y = np.where(random.random(100) < 0.5, 1.0, -1.0)
        objective = Objective(Logistic(), Design(np.hstack([column, column]), radius=100.0), y)
        best = minimiser(objective, np.array([[3.0], [1.0]]))
        assert np.abs(objective.gradient(best)).max() < 1e-8
        assert_allclose(best[0] - 3.0, best[1] - 1.0, atol=1e-6)

    def test_softmax_keeps_the_sum_over_classes(self) -> None:
        """Adding a vector to every class changes nothing: the nearest minimiser adds none."""
        objective = objective_of(Softmax(3), rows=200, columns=3)
        start = np.random.default_rng(1).standard_normal(objective.shape)
        best = minimiser(objective, start)
        assert np.abs(objective.gradient(best)).max() < 1e-7
        assert_allclose(best.sum(axis=1), start.sum(axis=1), atol=1e-6)

    def test_single_precision(self) -> None:
        random = np.random.default_rng(0)
        x = random.standard_normal((500, 4)).astype(np.float32)
        y = np.where(random.random(500) < 0.5, 1.0, -1.0)
        single, double = (
            minimiser(Objective(Logistic(), Design(rows, radius=100.0), y)) for rows in (x, x.astype(np.float64))
        )
        assert_allclose(single, double, atol=1e-5)

    def test_start_far_away(self) -> None:
        objective = objective_of(PLAIN)
        far = np.full(objective.shape, 1e5)
        assert_allclose(minimiser(objective, far), minimiser(objective), atol=1e-6)

    def test_start_that_is_the_minimiser(self) -> None:
        objective = Objective(PLAIN, Design(np.eye(2), radius=2.0), np.array([1.0, 2.0]))
        best = np.array([[1.0], [2.0]])
        assert minimiser(objective, best).tolist() == best.tolist()

    def test_refusals(self) -> None:
        x = np.array([[1.0, 0.2], [2.0, -0.1], [-1.0, 0.3], [-2.0, 0.1]])
        design, separable = Design(x, radius=3.0), np.array([1.0, 1.0, -1.0, -1.0])
        with pytest.raises(ValueError, match=r"no minimiser was found .*separable.*give l2 > 0"):
            minimiser(Objective(Logistic(), design, separable))
        with pytest.raises(ValueError, match=r"the loss is flat at \d+ rows.*give l2 > 0"):
            minimiser(Objective(HuberSvm(), design, separable))
        assert np.isfinite(minimiser(Objective(HuberSvm(), design, separable, l2=0.1))).all()


class TestExcessRisk:
    def test_known(self) -> None:
        objective = Objective(PLAIN, Design(np.eye(2), radius=2.0), np.array([1.0, 2.0]))
        best = minimiser(objective)
        shifts = [0.0, 2.0, 4.0]
        found = excess_risk(objective, (best + np.array([[shift], [0.0]]) for shift in shifts), best)
        risks = [shift**2 / 4 for shift in shifts]
        assert_allclose(found.value, np.mean(risks), rtol=1e-6)
        assert_allclose(found.error, np.std(risks, ddof=1) / math.sqrt(3), rtol=1e-6)

    def test_one_run_has_no_error(self) -> None:
        objective = objective_of(PLAIN)
        with pytest.raises(ValueError, match="at least 2, got 1"):
            excess_risk(objective, [np.zeros(objective.shape)], minimiser(objective))


class TestTable2:
    """Minimum and average curvature of linear regression on min-max scaled columns, Yu et al. (2020), Table 2."""

    @pytest.mark.parametrize(
        ("name", "recipe", "least", "mean"),
        [
            ("graduate-admission", "yu2020", 6.68e-3, 0.401),  # printed 6.68e-3, .40
            ("sonar", "yu2020", 4.00e-4, 0.190),  # printed 3.63e-4, .19
            ("boston-housing", "yu2020", 4.89e-3, 0.266),  # printed 3.44e-3, .34
            ("swedish-motor-insurance", "yu2020", 2.17e-4, 0.241),  # printed average .24
            ("swedish-motor-insurance", "yu2020-with-target", 9.06e-6, 0.207),  # printed minimum 9.07e-6
        ],
    )
    def test_figures(self, name: str, recipe: str, least: float, mean: float, data_dir) -> None:
        found = describe(data.load(name, data_dir, recipe), PLAIN)
        assert float(f"{found.minimum:.3g}") == pytest.approx(least, rel=1e-9)
        assert round(found.average, 3) == mean
        assert found.minimum < found.average < found.smoothness
        assert found.orders[0].strongly_convex == pytest.approx(found.dimension / found.minimum / found.examples**2)

    def test_sonar_of_fewer_rows(self, data_dir) -> None:
        """The printed minimum is an ordinary one for a random 80 % of the rows, and the average stays at .19."""
        x = data.load("sonar", data_dir, "yu2020").x_train
        random = np.random.default_rng(0)
        parts = [x[random.permutation(len(x))[:166]] for _ in range(100)]
        values = np.array([np.linalg.eigvalsh(part.T @ part / 166) for part in parts])
        assert np.quantile(values[:, 0], 0.5) < 3.63e-4 < np.quantile(values[:, 0], 0.99)
        assert_allclose(values.mean(axis=1), 0.19, atol=0.005)

    def test_boston_is_not_a_choice_of_columns(self, data_dir) -> None:
        """Neither with the target, nor with a constant, nor with both are the printed figures near."""
        boston = data.load("boston-housing", data_dir, "yu2020")
        x, y = boston.x_train, boston.y_train
        target, ones = (y - y.min()) / np.ptp(y), np.ones(len(y))
        for extra in ((), (target,), (ones,), (target, ones)):
            rows = np.column_stack([x, *extra])
            values = np.linalg.eigvalsh(rows.T @ rows / len(rows))
            assert abs(values[0] / 3.44e-3 - 1) > 0.03
            assert abs(values.mean() / 0.34 - 1) > 0.05

    def test_noise_brings_the_average_near(self, data_dir) -> None:
        """Figure 1: at s = 1 the expected curvature is almost the average; at the noise of ε = 1 it is not."""
        admission = data.load("graduate-admission", data_dir, "yu2020")
        design = Design(admission.x_train, radius=3.0)
        objective = Objective(PLAIN, design, admission.y_train)
        best, start = minimiser(objective), np.zeros(objective.shape)
        gaps = [abs(expected(objective, start, best, s) / average(objective, start) - 1) for s in (0.0, 0.1, 1.0, 10.0)]
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[1] > 0.7
        assert gaps[2] < 0.1
        plans = describe(admission, PLAIN, epsilon=1.0).plans
        assert all(plan.weight < 0.3 for plan in plans)
        assert plans[0].weight < 0.05

    def test_words(self, data_dir) -> None:
        found = describe(data.load("graduate-admission", data_dir, "yu2020"), PLAIN)
        words = found.words()
        assert words[0] == (
            "graduate-admission: 500 rows, 7 coefficients. Curvature: minimum 0.00668, average 0.401, largest 2.56."
        )
        assert "Learning rate: up to 1/2.56 = 0.391" in words[2]
        assert "4,760 by the minimum" in words[3]
        assert words[4].startswith("Solver: gradient perturbation")
        assert "not for release" in words[-1]
        assert all("\n" not in line for line in words)


class TestDescribe:
    def test_plans_hold_the_exact_noise(self) -> None:
        """std = 2·C·√T/(n·μ) with the μ that is exactly (ε, δ)-private: against the mechanism that runs."""
        from dpgrad.accounting.events import Relation
        from dpgrad.convex.solvers import gd

        digits = data.load("digits")
        found = describe(digits, Softmax(10), epsilon=0.7, clip=0.5, l2=1e-2)
        n = found.examples
        for plan in found.plans:
            mechanism = gd.calibrated(
                n, plan.steps, clip=0.5, epsilon=0.7, delta=n**-2.0, relation=Relation.REPLACE_ONE
            )
            assert_allclose(plan.std, mechanism.std_at(0) / n, rtol=1e-3)
            assert_allclose(plan.noise * found.smoothness, plan.std)
        assert (found.minimum, found.dimension) == (0.01, 640)

    def test_solver_follows_table_1(self) -> None:
        random = np.random.default_rng(0)

        def named(rows: np.ndarray, targets: np.ndarray) -> str:
            set_ = data.Dataset("toy", rows, targets, rows[:0], targets[:0], None, "default", "none", ())
            return describe(set_, PLAIN).words()[4]

        round_bowl = random.standard_normal((5000, 3))
        assert "objective perturbation" in named(round_bowl, round_bowl @ np.ones(3))
        flat = round_bowl * [1, 1, 1e-3]
        assert named(flat, flat @ np.ones(3)).startswith("Solver: gradient perturbation; ")

    def test_margins_and_sparse_rows(self) -> None:
        random = np.random.default_rng(0)
        rows = sparse.csr_array(sparse.random_array((300, 6), density=0.5, rng=random))
        labels = random.integers(2, size=300)
        toy = data.Dataset("toy", rows, labels, rows[:0], labels[:0], ("no", "yes"), "default", "none", ())
        found = describe(toy, Logistic(), l2=0.01)
        dense = rows.toarray()
        hessian = dense.T @ dense / 300 / 4 + 0.01 * np.eye(6)
        values = np.linalg.eigvalsh(hessian)
        assert_allclose(
            [found.minimum, found.average, found.smoothness], [values[0], values.mean(), values[-1]], rtol=1e-6
        )
