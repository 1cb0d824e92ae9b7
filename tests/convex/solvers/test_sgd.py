"""DP-SGD against a descent that forms every gradient of every sampled row, and its prices under every relation."""

import math
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse, stats

from dpgrad.accounting import account
from dpgrad.accounting.events import Gaussian, Poisson, Relation, Repeat
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, RowLoss, Softmax, Squared
from dpgrad.convex.solvers import gd, sgd
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from thinned import thinned

Array = NDArray[np.float64]
ROWS, COLUMNS = 60, 5
LOSSES: list[Any] = [Logistic(0.4), Hinge(), HuberSvm(0.5), Softmax(3), Squared(1.0)]


def problem(loss: RowLoss, seed: int = 0) -> tuple[Array, NDArray[Any]]:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((ROWS, COLUMNS)) * random.uniform(0.1, 2, (ROWS, 1))
    match loss:
        case Softmax(classes):
            return rows, random.integers(0, classes, ROWS)
        case Squared():
            return rows, random.uniform(-3, 3, ROWS)
    return rows, random.choice([-1.0, 1.0], ROWS)


def sampled(steps: int, noise: float, rate: Any = 0.2, clip: float = 0.5, **rest: Any) -> Mechanism:
    return Mechanism(sampling.Poisson(rate), steps, noise, clip, batch_size=0.2 * ROWS, **rest)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize("average", [False, True])
def test_equals_a_descent_that_forms_every_gradient(loss: RowLoss, form: Any, average: bool) -> None:
    rows, targets = problem(loss)
    mechanism, key = sampled(9, 0.3), Key.from_seed(5)
    rate, l2, momentum = sgd.halved(0.4, 9), 0.05, 0.5
    w = np.zeros((COLUMNS, loss.outputs))
    velocity, iterates = np.zeros_like(w), []
    for t in range(9):
        total = gd.gaussian(key, t, w.shape, 0.3 * 0.5)
        for i in sampling.Poisson(0.2).draw(ROWS, t, key):
            gradient = np.outer(rows[i], loss.residuals(rows[i : i + 1] @ w, targets[i : i + 1])[0])
            total = total + gradient * min(1.0, 0.5 * (1 - 1e-6) / max(float(np.linalg.norm(gradient)), 1e-300))
        velocity = momentum * velocity + total / (0.2 * ROWS) + l2 * w
        w = w - (0.4 if t < 5 else 0.2) * velocity
        iterates.append(w)
    found, event = sgd.solve(
        Design(form(rows), radius=1e3), targets, loss, mechanism,
        learning_rate=rate, l2=l2, momentum=momentum, average=average, key=key,
    )  # fmt: skip
    np.testing.assert_allclose(found, np.mean(iterates, axis=0) if average else w, atol=1e-8)
    assert event == Repeat(Poisson(0.2, Gaussian(0.3)), 9)


def test_all_rows_at_every_step_is_gradient_descent() -> None:
    rows, targets = problem(Logistic())
    design, common = Design(rows, radius=1.0), {"learning_rate": 0.3, "key": 4}
    every = Mechanism(sampling.Poisson(1.0), 6, 1.0, batch_size=ROWS)
    full = Mechanism(sampling.FullBatch(), 6, 1.0, batch_size=ROWS)
    found, _ = sgd.solve(design, targets, Logistic(), every, **common)
    np.testing.assert_allclose(found, gd.solve(design, targets, Logistic(), full, **common)[0], rtol=1e-12)


def test_an_empty_batch_is_a_step_like_any_other() -> None:
    rows, targets = problem(Logistic())
    mechanism, key = sampled(3, 1.0, rate=0.0), Key.from_seed(1)
    found, event = sgd.solve(Design(rows, radius=1.0), targets, Logistic(), mechanism, learning_rate=1.0, key=key)
    noise = sum(gd.gaussian(key, t, (COLUMNS, 1), 0.5) for t in range(3))
    np.testing.assert_allclose(found, -noise / (0.2 * ROWS), rtol=1e-12)
    assert event == Repeat(Poisson(0.0, Gaussian(1.0)), 3)


class TestSampling:
    def test_a_row_counts_only_where_it_is_drawn_and_by_no_more_than_two_clip_bounds(self) -> None:
        """One step, same key: exchanging row i moves the coefficients iff it was drawn, by 2·clip·η/(q·n) at most."""
        rows, targets = problem(Logistic())
        mechanism, key = sampled(1, 1.0), Key.from_seed(9)
        drawn = set(sampling.Poisson(0.2).draw(ROWS, 0, key).tolist())
        assert 0 < len(drawn) < ROWS

        def solved(rows: Array, targets: Array) -> Array:
            design = Design(rows, radius=1e6)
            return sgd.solve(design, targets, Logistic(), mechanism, learning_rate=3.0, key=key)[0]

        whole = solved(rows, targets)
        for i in range(ROWS):
            exchanged, signs = rows.copy(), targets.copy()
            exchanged[i], signs[i] = 1e3 * rows[i], -targets[i]
            moved = float(np.linalg.norm(solved(exchanged, signs) - whole))
            assert (moved > 0) == (i in drawn)
            assert moved <= 2 * 0.5 * 3.0 / (0.2 * ROWS) * (1 + 1e-9)

    def test_the_sum_is_divided_by_the_expected_size(self) -> None:
        """Equal rows, next to no noise: a step is the realised size over the expected one, and unbiased."""
        design, mechanism, runs = Design(np.ones((ROWS, 1)), radius=1.0), sampled(1, 1e-6), 400
        steps = [
            sgd.solve(design, np.ones(ROWS), Logistic(), mechanism, learning_rate=1.0, key=key)[0][0, 0]
            for key in range(runs)
        ]
        sizes = np.array(steps) / 0.5 * (0.2 * ROWS)
        np.testing.assert_allclose(sizes, np.round(sizes), atol=1e-4)
        # binomial sizes: a mean beyond 4.9 standard errors has odds of 1e-6
        error = math.sqrt(ROWS * 0.2 * 0.8 / runs)
        assert abs(sizes.mean() - 0.2 * ROWS) < stats.norm.isf(5e-7) * error


class TestPrice:
    @pytest.mark.parametrize("relation", list(Relation))
    def test_calibrated_noise_is_certified(self, relation: Relation) -> None:
        mechanism = sgd.calibrated(2000, 30, sampling_rate=0.1, clip=0.5, epsilon=1.0, delta=1e-5, relation=relation)
        event = Repeat(Poisson(0.1, Gaussian(mechanism.noise_multiplier)), 30)
        assert mechanism.event() == event
        assert mechanism.divisor == 200
        assert 0.999 < account(event, relation, "pld").epsilon(1e-5) <= 1.0
        assert account(event, relation, "rdp").epsilon(1e-5) < 1.3

    def test_replacing_costs_more_than_leaving_out(self) -> None:
        noise = {
            relation: sgd.calibrated(
                2000, 30, sampling_rate=0.1, clip=0.5, epsilon=1.0, delta=1e-5, relation=relation
            ).noise_multiplier
            for relation in Relation
        }
        assert noise[Relation.ADD_REMOVE] == noise[Relation.ZERO_OUT]
        assert 1.5 < noise[Relation.REPLACE_ONE] / noise[Relation.ZERO_OUT] <= 2.001

    def test_delta_of_one_row_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"delta must be below 1/n = 0.0005 for n = 2,000 rows"):
            sgd.calibrated(2000, 30, sampling_rate=0.1, clip=1.0, epsilon=1.0, delta=1e-3, relation=Relation.ZERO_OUT)

    @pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
    def test_sampling_rates_that_are_none(self, rate: float) -> None:
        with pytest.raises(ValueError, match="sampling_rate must"):
            sgd.calibrated(2000, 30, sampling_rate=rate, clip=1.0, epsilon=1.0, delta=1e-5, relation=Relation.ZERO_OUT)


class TestRates:
    @pytest.mark.parametrize(("steps", "wanted"), [(1, [2]), (2, [2, 1]), (5, [2, 2, 2, 1, 1]), (6, [2] * 3 + [1] * 3)])
    def test_halved(self, steps: int, wanted: list[float]) -> None:
        assert schedules.values(sgd.halved(2.0, steps), steps).tolist() == wanted

    def test_harmonic_and_root_count_from_one(self) -> None:
        t = np.arange(1, 101)
        np.testing.assert_allclose(schedules.values(sgd.harmonic(0.25), 100), 1 / (0.25 * t))
        np.testing.assert_allclose(schedules.values(sgd.root(3.0, 7.0), 100), 3 / (7 * np.sqrt(t)))

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="rate must be positive"):
            sgd.halved(0.0, 5)
        with pytest.raises(ValueError, match="steps must be a whole number"):
            sgd.halved(1.0, 0)
        with pytest.raises(ValueError, match="curvature must be positive"):
            sgd.harmonic(0.0)
        with pytest.raises(ValueError, match="gradient must be positive"):
            sgd.root(1.0, 0.0)

    RATES: ClassVar = {
        "constant": 0.5,
        "halved": sgd.halved(1, 2000),
        "1/νt": sgd.harmonic(0.1),
        "D/G√t": sgd.root(2, 1),
    }

    @pytest.mark.parametrize(("loss", "named"), thinned([Hinge(), Logistic()], RATES))
    def test_every_rate_descends(self, loss: Any, named: str) -> None:
        """With next to no noise the objective ends within 2 % of the best that thousands of full steps find."""
        design, targets = self.separable()
        free = Mechanism(sampling.Poisson(0.5), 2000, 1e-6, 1.0, batch_size=0.5 * ROWS)
        w, _ = sgd.solve(design, targets, loss, free, learning_rate=self.RATES[named], l2=0.1, average=True, key=1)
        best = self.best(loss)
        assert best * (1 - 1e-3) <= self.objective(loss, w) <= 1.02 * best

    @staticmethod
    def separable() -> tuple[Design, Array]:
        random = np.random.default_rng(3)
        rows = random.standard_normal((ROWS, COLUMNS))
        targets = np.where(rows.sum(axis=1) > 0.3 * random.standard_normal(ROWS), 1.0, -1.0)
        return Design(rows, radius=1.0, rule="normalise"), targets

    @classmethod
    def objective(cls, loss: Any, w: Array) -> float:
        design, targets = cls.separable()
        return float(loss.values(design.scores(w), targets).mean() + 0.05 * np.sum(w**2))

    @classmethod
    @cache
    def best(cls, loss: Any) -> float:
        """By the subgradient method with steps 1/(l2·t), the objective looked at every hundredth step."""
        design, targets = cls.separable()
        w, best = np.zeros((COLUMNS, 1)), math.inf
        for t in range(8000):
            w = w - (design.gathered(loss.residuals(design.scores(w), targets)) / ROWS + 0.1 * w) / (0.1 * (t + 1))
            best = min(best, cls.objective(loss, w)) if t % 100 == 0 else best
        return best


class TestRefusals:
    @pytest.mark.parametrize("sampler", [sampling.FullBatch(), sampling.Shuffle(ROWS, 20)], ids=repr)
    def test_other_samplers(self, sampler: Any) -> None:
        rows, targets = problem(Logistic())
        mechanism = Mechanism(sampler, 3, 1.0, relation=Relation.ZERO_OUT, batch_size=20)
        with pytest.raises(ValueError, match=f"sgd samples rows by Poisson sampling, got {sampler.name} sampling"):
            sgd.solve(Design(rows, radius=1.0), targets, Logistic(), mechanism, learning_rate=1.0)

    def test_no_divisor(self) -> None:
        rows, targets = problem(Logistic())
        with pytest.raises(ValueError, match="batch_size is required to train with poisson sampling"):
            sgd.solve(
                Design(rows, radius=1.0), targets, Logistic(), Mechanism(sampling.Poisson(0.1), 3, 1.0),
                learning_rate=1.0,
            )  # fmt: skip


def test_there_is_no_penalty_momentum_or_average_unless_asked_for() -> None:
    rows, targets = problem(Logistic())
    design, plain = Design(rows, radius=2.0), {"l2": 0.0, "momentum": 0.0, "average": False}

    def found(**given: Any) -> Array:
        return sgd.solve(design, targets, Logistic(), sampled(3, 1.0), learning_rate=0.5, key=1, **given)[0]

    assert np.array_equal(found(), found(**plain))
    for other in ({"l2": 1.0}, {"momentum": 0.5}, {"average": True}):
        assert not np.array_equal(found(), found(**plain | other))
