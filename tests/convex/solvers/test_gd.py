"""DP-GD against a descent that forms every gradient, brute force on neighbours, and the exact price."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, sparse, stats

from dpgrad import data
from dpgrad.accounting.events import Gaussian, Relation, Repeat
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, RowLoss, Softmax, Squared
from dpgrad.convex.solvers import gd
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.mechanism.sampling import FullBatch

Array = NDArray[np.float64]
ROWS, COLUMNS = 40, 6
SLACK = 1e-6  # what a clip bound is lowered by for rounding
LOSSES: list[Any] = [Logistic(), Logistic(0.3), HuberSvm(0.5), Softmax(3), Squared(1.5)]
RELATIONS = [Relation.ZERO_OUT, Relation.REPLACE_ONE]


def problem(loss: RowLoss, seed: int = 0) -> tuple[Array, NDArray[Any]]:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((ROWS, COLUMNS)) * random.uniform(0.1, 2, (ROWS, 1))
    match loss:
        case Softmax(classes):
            return rows, random.integers(0, classes, ROWS)
        case Squared():
            return rows, random.uniform(-3, 3, ROWS)
    return rows, random.choice([-1.0, 1.0], ROWS)


def full_batch(steps: int, multiplier: float, clip: Any = 1.0, rows: float | None = ROWS, **rest: Any) -> Mechanism:
    return Mechanism(FullBatch(), steps, multiplier, clip, batch_size=rows, **rest)


def reference(
    rows: Array, targets: NDArray[Any], loss: RowLoss, mechanism: Mechanism, rate: Callable[[int], float],
    l2: float, momentum: float, average: bool, key: Key, drawn: Callable[[int], NDArray[np.int64]] | None = None,
) -> Array:  # fmt: skip
    """Descent in plain words: every gradient of every row is formed, clipped, summed, noised, divided."""
    w = np.zeros((rows.shape[1], loss.outputs))
    velocity, iterates = np.zeros_like(w), []
    for t in range(mechanism.steps):
        total = np.zeros_like(w)
        for i in range(len(rows)) if drawn is None else drawn(t):
            residual = loss.residuals(rows[i : i + 1] @ w, targets[i : i + 1])[0]
            gradient = np.outer(rows[i], residual)
            most = mechanism.clip_at(t) * (1 - SLACK)
            total += gradient * min(1.0, most / max(np.linalg.norm(gradient), 1e-300))
        gradient = (total + gd.gaussian(key, t, w.shape, mechanism.std_at(t))) / mechanism.divisor + l2 * w
        velocity = momentum * velocity + gradient
        w = w - rate(t) * velocity
        iterates.append(w)
    return np.mean(iterates, axis=0) if average else w


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    "options",
    [
        {"l2": 0.0, "momentum": 0.0, "average": False},
        {"l2": 0.1, "momentum": 0.8, "average": False},
        {"l2": 0.1, "momentum": 0.5, "average": True},
    ],
    ids=str,
)
def test_equals_a_descent_that_forms_every_gradient(loss: RowLoss, form: Any, options: dict[str, Any]) -> None:
    rows, targets = problem(loss)
    mechanism = full_batch(7, 0.5, clip=schedules.linear(0.8, 7), noise=schedules.piecewise([3], [1.0, 2.0]))
    rate = schedules.piecewise([4], [0.5, 0.25])
    design = Design(form(rows), radius=1e3, intercept=0.7)
    found, event = gd.solve(design, targets, loss, mechanism, learning_rate=rate, key=5, **options)
    whole = np.column_stack([rows, np.full(ROWS, 0.7)])
    wanted = reference(whole, targets, loss, mechanism, rate, key=Key.of(5), **options)
    np.testing.assert_allclose(found, wanted, atol=1e-8)
    assert event == mechanism.event()


def test_single_precision_follows_double() -> None:
    rows, targets = problem(Softmax(3))
    both = [
        gd.solve(
            Design(rows.astype(kind), radius=9.0), targets, Softmax(3), full_batch(20, 0.1), learning_rate=1.0, key=1
        )
        for kind in (np.float32, np.float64)
    ]
    np.testing.assert_allclose(both[0][0], both[1][0], atol=1e-5)


@pytest.mark.parametrize("loss", [Logistic(), HuberSvm(0.5), Softmax(3), Squared(50.0)], ids=repr)
def test_without_noise_and_clipping_it_finds_the_minimiser(loss: Any) -> None:
    rows, targets = problem(loss)
    design, l2 = Design(rows, radius=9.0), 0.5
    rate = 1 / (loss.smoothness(float(np.max(design.norms))) + l2)
    free = full_batch(500, 1e-5, clip=1e3)
    found, _ = gd.solve(design, targets, loss, free, learning_rate=rate, l2=l2, momentum=0.9, key=1)

    def objective(flat: Array) -> float:
        w = flat.reshape(found.shape)
        return float(loss.values(rows @ w, targets).mean() + l2 / 2 * np.sum(w**2))

    best = optimize.minimize(objective, np.zeros(found.size), method="BFGS", options={"gtol": 1e-9})
    assert objective(found.ravel()) <= best.fun + 1e-6


class TestSensitivity:
    """On tiny neighbouring datasets the clipped sum moves by at most one clip bound, or two, whatever the row."""

    LOSSES: tuple[Any, ...] = (*LOSSES, Hinge(), Squared(math.inf))

    @staticmethod
    def total(rows: NDArray[Any], targets: Any, loss: RowLoss, w: Array, clip: float, **options: Any) -> Array:
        design = Design(rows, radius=options.pop("radius", 1e6), **options)
        return gd.clipped_sum(design, loss.checked(targets, rows.shape[0]), loss, w, clip)

    @settings(max_examples=60)
    @given(
        st.sampled_from(LOSSES),
        st.integers(0, 2**32 - 1),
        st.sampled_from([np.float32, np.float64]),
        st.floats(1e-4, 1e4),
        st.floats(1e-3, 1e3),
        st.booleans(),
    )
    def test_neighbours(self, loss: Any, seed: int, dtype: type, size: float, clip: float, sparse_rows: bool) -> None:
        random = np.random.default_rng(seed)
        rows = (random.standard_normal((5, 3)) * size * 10 ** random.uniform(-2, 2, (5, 1))).astype(dtype)
        classes = loss.classes if isinstance(loss, Softmax) else 2
        labels = random.integers(0, classes, 5)
        w = random.standard_normal((4, loss.outputs)) / size

        def total(rows: NDArray[Any], labels: NDArray[Any]) -> Array:
            targets = labels if isinstance(loss, Softmax) else 2.0 * labels - 1
            form = sparse.csr_array(rows) if sparse_rows else rows
            return self.total(form, targets, loss, w, clip, intercept=1.0)

        whole, others = total(rows, labels), [1, 2, 3, 4]
        # what rounding does to the sum of the other rows, in the precision of the products
        rounding = 40 * clip * float(np.finfo(dtype).eps)
        assert np.linalg.norm(whole - total(rows[others], labels[others])) <= clip + rounding
        for scale, label in itertools.product([0.0, 1.0, -1.0, 1e3, -1e3], range(classes)):
            exchanged, names = rows.copy(), labels.copy()
            exchanged[0], names[0] = scale * exchanged[0] + (scale > 1) * random.standard_normal(3), label
            assert np.linalg.norm(whole - total(exchanged, names)) <= 2 * clip + rounding

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_a_single_row_never_exceeds_the_clip_bound(self, dtype: type) -> None:
        """min(1, C/n)·n exceeds C for half of all norms n in floating point; measured in extended precision."""
        random = np.random.default_rng(1)
        for _ in range(300):
            rows = (random.standard_normal((1, 7)) * 10 ** random.uniform(-2, 2)).astype(dtype)
            w = random.standard_normal((7, 3))
            total = self.total(rows, [0], Softmax(3), w, clip=0.01)
            assert np.linalg.norm(total.astype(np.longdouble)) <= 0.01

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_bounds_are_attained(self, dtype: type) -> None:
        """An antipodal row moves the sum by two clip bounds: nothing smaller would be a bound."""
        rows = np.array([[3.0, 4.0], [1.0, 1.0]], dtype)
        w, loss = np.zeros((2, 1)), Logistic()
        both = self.total(rows, [1, 1], loss, w, clip=0.5)
        one = self.total(rows[1:], [1], loss, w, clip=0.5)
        other = self.total(rows, [-1, 1], loss, w, clip=0.5)
        assert np.linalg.norm(both - one) == pytest.approx(0.5, rel=1e-5)
        assert np.linalg.norm(both - other) == pytest.approx(1.0, rel=1e-5)

    @pytest.mark.parametrize("loss", [Logistic(), Logistic(0.3), HuberSvm(), Softmax(4), Squared(2.0)], ids=repr)
    def test_a_clip_bound_at_the_lipschitz_constant_never_binds(self, loss: Any) -> None:
        """The paper's Algorithm 1 has no clipping: its L, but for rounding, is a clip bound that changes nothing."""
        rows, targets = problem(loss)
        w = np.random.default_rng(2).standard_normal((COLUMNS, loss.outputs))
        design = Design(rows, radius=1.0, rule="normalise")
        steepest = loss.lipschitz(design.bound)
        np.testing.assert_allclose(
            gd.clipped_sum(design, targets, loss, w, steepest / (1 - SLACK)),
            design.gathered(loss.residuals(design.scores(w), targets)),
            atol=1e-8 * steepest,
        )

    def test_a_row_that_is_not_finite_counts_as_absent(self) -> None:
        rows = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
        # a score beyond float32 leaves the second row without a residual
        w = np.array([[1e38], [1e38]])
        found = self.total(rows, [0.0, 0.0, 0.0], Squared(math.inf), w, clip=1.0)
        assert np.isfinite(found).all()
        left = self.total(rows[:1], [0.0], Squared(math.inf), w, clip=1.0)
        np.testing.assert_array_equal(found, left)


class TestPrice:
    N = 36_176

    @pytest.mark.parametrize("relation", list(Relation))
    @pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
    def test_calibrated_noise_meets_the_exact_formula(self, epsilon: float, relation: Relation) -> None:
        """δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) in sixty digits, with μ = m√T/z."""
        steps, delta = 50, self.N**-2.0
        mechanism = gd.calibrated(self.N, steps, clip=0.7, epsilon=epsilon, delta=delta, relation=relation)
        moved = 2 if relation is Relation.REPLACE_ONE else 1
        with mpmath.workdps(60):
            mu = moved * mpmath.sqrt(steps) / mpmath.mpf(mechanism.noise_multiplier)
            exact = mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
            assert 1 - 1e-4 <= float(exact / delta) <= 1
        assert mechanism.std_at(0) == pytest.approx(0.7 * mechanism.noise_multiplier)
        assert mechanism.divisor == self.N
        assert mechanism.event() == Repeat(Gaussian(mechanism.noise_multiplier), steps)
        guarantee = mechanism.guarantee(delta, "exact")
        assert guarantee.epsilon == pytest.approx(epsilon, rel=1e-5)
        assert guarantee.relation is relation

    @pytest.mark.parametrize(("epsilon", "ratio"), [(0.1, 1.28), (0.5, 1.20), (1.0, 1.17)])
    @pytest.mark.parametrize("relation", RELATIONS)
    def test_closed_form_is_private_and_wasteful(self, epsilon: float, ratio: float, relation: Relation) -> None:
        delta = self.N**-2.0
        best = gd.calibrated(self.N, 200, clip=1.0, epsilon=epsilon, delta=delta, relation=relation)
        printed = gd.closed_form(200, epsilon, delta, relation)
        assert printed / best.noise_multiplier == pytest.approx(ratio, abs=0.006)

    def test_closed_form_is_the_printed_sigma(self) -> None:
        steps, epsilon, delta, lipschitz = 50, 0.1, 1e-9, 1.7
        sigma = 2 * math.sqrt(2) * lipschitz * math.sqrt(steps * math.log(1 / delta)) / (self.N * epsilon)
        assert gd.closed_form(steps, epsilon, delta) == pytest.approx(sigma * self.N / lipschitz)

    @pytest.mark.parametrize("relation", RELATIONS)
    def test_closed_form_is_refused_where_it_is_not_private(self, relation: Relation) -> None:
        delta = self.N**-2.0
        assert gd.closed_form(50, 9.22, delta, relation) > 0  # by a root in fifty digits: up to 9.22435
        for epsilon in (9.23, 20.0):
            with pytest.raises(ValueError, match=r"too large for the closed form at delta .* use calibrated"):
                gd.closed_form(50, epsilon, delta, relation)

    @pytest.mark.parametrize("delta", [1e-3, 1 / 999, 0.5])
    def test_delta_of_one_row_is_refused(self, delta: float) -> None:
        with pytest.raises(ValueError, match=r"delta must be below 1/n = 0.001 for n = 1,000 rows"):
            gd.calibrated(1000, 5, clip=1.0, epsilon=1.0, delta=delta, relation=Relation.REPLACE_ONE)

    @pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 1e-5), ("1", 1e-5), (1.0, 0.0), (1.0, math.nan)])
    def test_budgets_that_are_none(self, epsilon: Any, delta: float) -> None:
        with pytest.raises(ValueError, match=r"^(epsilon|delta) must"):
            gd.closed_form(5, epsilon, delta)
        with pytest.raises(ValueError, match=r"^(epsilon|delta) must"):
            gd.calibrated(1000, 5, clip=1.0, epsilon=epsilon, delta=delta, relation=Relation.REPLACE_ONE)


class TestNoise:
    """Rows of zeros have no gradient: what is left in the coefficients is noise. False alarms: 1e-6 a test."""

    WIDTH, ALARM = 20_000, 1e-6

    def noise(self, steps: int, multiplier: float, clip: float, key: int) -> Array:
        design = Design(np.zeros((2, self.WIDTH)), radius=1.0)
        mechanism = full_batch(steps, multiplier, clip, rows=2)
        found, _ = gd.solve(design, [1.0, -1.0], Logistic(), mechanism, learning_rate=2.0, key=key)
        return found[:, 0]  # 2·(sum of noises)/2

    @pytest.mark.parametrize(("steps", "multiplier", "clip"), [(1, 3.0, 0.5), (4, 3.0, 0.5), (1, 0.2, 7.0)])
    def test_it_is_normal_with_the_accounted_size(self, steps: int, multiplier: float, clip: float) -> None:
        scaled = self.noise(steps, multiplier, clip, key=11) / (multiplier * clip * math.sqrt(steps))
        low, high = stats.chi2.ppf([self.ALARM / 2, 1 - self.ALARM / 2], self.WIDTH)
        assert low <= np.sum(scaled**2) <= high
        assert stats.kstest(scaled, "norm").pvalue > self.ALARM

    def test_steps_outputs_and_coefficients_are_independent(self) -> None:
        key = Key.from_seed(3)
        drawn = np.array([gd.gaussian(key, t, (self.WIDTH, 2), 1.0) for t in range(3)])
        streams = list(drawn.transpose(0, 2, 1).reshape(6, -1))
        pairs = [*itertools.combinations(streams, 2), *((stream[1:], stream[:-1]) for stream in streams)]
        for a, b in pairs:
            assert abs(float(a @ b)) / math.sqrt(len(a)) < stats.norm.isf(self.ALARM / 2 / len(pairs))

    def test_another_key_is_another_noise(self) -> None:
        assert np.array_equal(self.noise(1, 1.0, 1.0, key=1), self.noise(1, 1.0, 1.0, key=1))
        assert not np.any(self.noise(1, 1.0, 1.0, key=1) == self.noise(1, 1.0, 1.0, key=2))

    def test_no_key_is_a_fresh_key(self) -> None:
        rows, targets = problem(Logistic())
        design = Design(rows, radius=1.0)
        a, b = (gd.solve(design, targets, Logistic(), full_batch(1, 1.0), learning_rate=1.0)[0] for _ in range(2))
        assert not np.any(a == b)

    def test_its_stream_is_not_that_of_the_sampler(self) -> None:
        for step in range(3):
            noise = gd.gaussian(Key.from_seed(3), step, (100,), 1.0)
            assert not np.isin(noise, sampling.generator(3, step).standard_normal(200)).any()


class TestRefusals:
    def solve(self, loss: Any = None, mechanism: Mechanism | None = None, targets: Any = None, **rest: Any) -> None:
        rows, signs = problem(Logistic())
        arguments = {"learning_rate": 0.1, "key": 1, **rest}
        gd.solve(
            Design(rows, radius=1.0),
            signs if targets is None else targets,
            loss or Logistic(),
            mechanism or full_batch(3, 1.0),
            **arguments,
        )

    def test_hinge(self) -> None:
        with pytest.raises(ValueError, match=r"gd needs a smooth loss, got Hinge\(\): use sgd, or HuberSvm"):
            self.solve(Hinge())

    def test_sampled_batches(self) -> None:
        with pytest.raises(ValueError, match="gd takes every row at every step, got poisson sampling: use sgd"):
            self.solve(mechanism=Mechanism(sampling.Poisson(0.5), 3, 1.0, batch_size=20))

    def test_no_divisor(self) -> None:
        with pytest.raises(ValueError, match="batch_size is required"):
            self.solve(mechanism=full_batch(3, 1.0, rows=None))

    def test_groups(self) -> None:
        with pytest.raises(ValueError, match="group is required"):
            self.solve(mechanism=full_batch(3, 1.0, groups=(Group("*"),)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"learning_rate": 0.0}, "learning_rate must be positive"),
            ({"learning_rate": lambda t: 1.0 - t}, "learning_rate at step 1 must be positive"),
            ({"l2": -1.0}, "l2 must be zero or more"),
            ({"momentum": 1.0}, "momentum must be below 1, got 1.0"),
            ({"momentum": -0.1}, "momentum must be zero or more"),
            ({"targets": np.zeros(ROWS)}, r"targets must be -1 or \+1: write"),
            ({"targets": np.ones(3)}, "one value for each of 40 rows"),
            ({"key": "seed"}, "key must be a whole number, bytes or a Key"),
        ],
        ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.solve(**options)

    def test_a_rate_that_makes_the_coefficients_explode(self) -> None:
        with pytest.raises(ValueError, match=r"learning_rate 1e\+200 makes the coefficients grow without bound"):
            self.solve(learning_rate=1e200, l2=1.0)


def test_adult_as_published(data_dir: Path) -> None:
    """Table 4 of the paper has 80.9 for DP-GD on Adult at ε = 0.1, δ = 1/n², replace-one; the majority has 75.9.

    Twenty keys gave 81.4 with a standard deviation of 0.5, so that a mean of three below 80.0 has odds under 1e-6.
    """
    adult = data.load("adult", data_dir, "yu2020")
    rows, targets, n = adult.x_train.astype(np.float32), 2.0 * adult.y_train - 1, len(adult.y_train)
    mechanism = gd.calibrated(n, 50, clip=1.0, epsilon=0.1, delta=n**-2.0, relation=Relation.REPLACE_ONE)
    design, test = Design(rows, radius=4.0), Design(adult.x_test.astype(np.float32), radius=4.0)
    right = []
    for seed in range(3):
        w, _ = gd.solve(design, targets, Logistic(), mechanism, learning_rate=5.0, l2=1e-4, key=seed)
        right.append(np.mean((test.scores(w)[:, 0] > 0) == adult.y_test))
    assert n == 36_176
    assert np.mean(right) > 0.80


@pytest.mark.parametrize("size", [1.0, 1e8, 1e14])
def test_zeroing_a_row_moves_the_sum_by_the_clip_bound_in_float32(size: float) -> None:
    """With scores that cancel; taking a row out moves others within blocks, so that only float64 keeps the bound."""
    random = np.random.default_rng(51)
    for place in range(8):
        weights = size * random.standard_normal((7, 1))
        rows = random.standard_normal((2001, 7))
        rows = (rows - (rows @ weights) * weights.T / (weights.T @ weights)).astype(np.float32)
        targets = random.choice([-1.0, 1.0], 2001)
        design = Design(rows, radius=1.0)
        zeroed = rows.copy()
        zeroed[place] = 0
        whole = gd.clipped_sum(design, targets, Logistic(), weights, 1.0)
        moved = whole - gd.clipped_sum(Design(zeroed, radius=1.0), targets, Logistic(), weights, 1.0)
        assert np.linalg.norm(moved) <= 1
        kept = np.delete(np.arange(2001), place)
        precise = design.precise()
        moved = gd.clipped_sum(precise, targets, Logistic(), weights, 1.0) - gd.clipped_sum(
            precise.taken(kept), targets[kept], Logistic(), weights, 1.0
        )
        assert np.linalg.norm(moved) <= 1


def test_scores_run_in_float64_where_a_row_may_be_missing() -> None:
    """One row more moves others within blocks, where float32 may round their scores differently."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((400, 7)).astype(np.float32)
    targets = np.where(random.random(400) < 0.5, 1.0, -1.0)
    design = Design(rows, radius=1.0)

    def solved(given: Design, relation: Relation) -> list[list[float]]:
        run = gd.calibrated(400, 5, clip=1.0, epsilon=5.0, delta=1e-6, relation=relation)
        return gd.solve(given, targets, Logistic(), run, learning_rate=1.0, key=7)[0].tolist()

    assert solved(design, Relation.ADD_REMOVE) == solved(design.precise(), Relation.ADD_REMOVE)
    assert solved(design, Relation.ZERO_OUT) != solved(design.precise(), Relation.ZERO_OUT)


def test_there_is_no_penalty_momentum_or_average_unless_asked_for() -> None:
    rows, targets = problem(Logistic())
    design, plain = Design(rows, radius=2.0), {"l2": 0.0, "momentum": 0.0, "average": False}

    def found(**given: Any) -> Array:
        return gd.solve(design, targets, Logistic(), full_batch(3, 1.0), learning_rate=0.5, key=1, **given)[0]

    assert np.array_equal(found(), found(**plain))
    for other in ({"l2": 1.0}, {"momentum": 0.5}, {"average": True}):
        assert not np.array_equal(found(), found(**plain | other))
