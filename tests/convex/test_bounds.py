"""The bounds hold where the exact risk is known, hold in simulation, are tight where they should be, and refuse."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dpgrad.accounting.events import Relation
from dpgrad.convex import Design, Logistic, bounds
from dpgrad.convex.bounds import Problem
from dpgrad.convex.curvature import Objective, along, excess_risk, minimiser, smoothness
from dpgrad.convex.solvers import gd, sgd
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.sampling import FullBatch, Poisson

# A mean of simulated risks may exceed a bound that holds by so many standard errors: false alarms below 3e-7 a test.
SIGMAS = 5


def squared_errors(
    curvatures: np.ndarray, start: np.ndarray, rate: float, stds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """E(x_t − x*)² by coordinate, t = 1, …, T+1, of DP-GD on Σ h_i(x_i − x*_i)²/2, exactly: (T+1, p); and ν_t."""
    found = [start**2]
    for std in stds:
        found.append((1 - rate * curvatures) ** 2 * found[-1] + (rate * std) ** 2)
    squares = np.array(found)
    totals = squares.sum(axis=1)
    # at x* itself any ν will do
    return squares, np.divide(squares @ curvatures, totals, out=np.full_like(totals, np.inf), where=totals > 0)


curved = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=5).map(np.array)


class TestDescent:
    """DP-GD on quadratics, where every expectation is known."""

    @given(curved, st.floats(0.01, 1.0), st.floats(0, 1.0), st.integers(1, 60), st.integers(0, 2**32 - 1))
    def test_eq_9_holds_for_the_curvature_along_the_run(
        self, curvatures: np.ndarray, share: float, std: float, steps: int, seed: int
    ) -> None:
        start = np.random.default_rng(seed).standard_normal(len(curvatures))
        beta = float(curvatures.max())
        rate = share / beta
        squares, along_run = squared_errors(curvatures, start, rate, np.full(steps, std))
        nu = min(float(along_run[:-1].min()), beta)
        problem = Problem(10, len(start), 1.0, beta, nu, float(np.linalg.norm(start)))
        bound = bounds.gd_distance(problem, std=std, learning_rate=rate, steps=steps)
        assert squares[-1].sum() <= bound * (1 + 1e-9)
        risk = squares[-1] @ curvatures / 2
        assert risk <= bounds.gd_risk(problem, std=std, learning_rate=rate, steps=steps) * (1 + 1e-9)

    @given(curved, st.floats(0.01, 1.0), st.floats(0, 1.0), st.integers(1, 60), st.integers(0, 2**32 - 1))
    def test_eq_12_holds_for_the_mean_of_all_risks(
        self, curvatures: np.ndarray, share: float, std: float, steps: int, seed: int
    ) -> None:
        """The mean of F(x_t) bounds F at the mean of x_t, so this asks for more than the equation says."""
        start = np.random.default_rng(seed).standard_normal(len(curvatures))
        beta = float(curvatures.max())
        rate = share / beta
        squares, _ = squared_errors(curvatures, start, rate, np.full(steps, std))
        problem = Problem(10, len(start), 1.0, beta, 0.0, float(np.linalg.norm(start)))
        bound = bounds.gd_average_risk(problem, std=std, learning_rate=rate, steps=steps)
        assert (squares[1:] @ curvatures / 2).mean() <= bound * (1 + 1e-9)

    def test_the_minimum_curvature_is_not_needed(self) -> None:
        """Eq. 9 holds with the ν of the run, and is then well below Eq. 9 with μ.

        Less so with every step: the error in the flat direction adds up, and ν along the run falls.
        """
        curvatures = np.array([1e-4, 1.0, 1.0, 1.0])
        squares, along_run = squared_errors(curvatures, np.ones(4), 1.0, np.full(100, 0.5))
        values = [
            bounds.gd_risk(Problem(10, 4, 1.0, 1.0, nu, 2.0), std=0.5, learning_rate=1.0, steps=100)
            for nu in (float(along_run.min()), 1e-4)
        ]
        assert squares[-1] @ curvatures / 2 <= values[0] < values[1] / 3
        assert 1e-4 < along_run[-1] < along_run[10] < along_run[0] == pytest.approx(0.75, rel=1e-3)

    def test_equality_for_a_round_bowl(self) -> None:
        """With H = β·I and η = 1/β every step forgets the last: nothing is given away."""
        squares, along_run = squared_errors(np.full(6, 0.5), np.ones(6), 2.0, np.full(9, 0.3))
        assert_allclose(along_run, 0.5)
        problem = Problem(10, 6, 1.0, 0.5, 0.5, math.sqrt(6))
        found = bounds.gd_risk(problem, std=0.3, learning_rate=2.0, steps=9)
        assert_allclose(found, squares[-1].sum() * 0.25, rtol=1e-12)

    def test_noise_may_follow_a_schedule(self) -> None:
        problem = Problem(10, 3, 1.0, 1.0, 0.25, 2.0)
        stds = [0.1 * (t + 1) for t in range(7)]
        kept = 1 - 0.5 * 0.25
        explicit = kept**7 * 4 + 3 * 0.25 * sum(kept ** (6 - t) * std**2 for t, std in enumerate(stds))
        found = bounds.gd_distance(problem, std=lambda t: 0.1 * (t + 1), learning_rate=0.5, steps=7)
        assert_allclose(found, explicit, rtol=1e-12)
        held = bounds.gd_distance(problem, std=0.1, learning_rate=0.5, steps=7)
        assert_allclose(held, bounds.gd_distance(problem, std=lambda t: 0.1, learning_rate=0.5, steps=7), rtol=1e-12)

    def test_without_curvature_noise_adds_up(self) -> None:
        problem = Problem(10, 3, 1.0, 1.0, 0.0, 2.0)
        assert_allclose(bounds.gd_distance(problem, std=0.1, learning_rate=0.5, steps=8), 4 + 3 * 0.25 * 8 * 0.01)


def slope(xs: list[float], ys: list[float]) -> float:
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


class TestTheorem1:
    DELTA = 1e-8

    def risk(self, n: float, p: float, epsilon: float) -> tuple[float, float]:
        """Exact risk and bound for a round bowl, where the bound should be tight."""
        problem = Problem(int(n), int(p), 1.0, 0.5, 0.5, 1e-9)
        choice = bounds.gd_choice(problem, epsilon)
        std = gd.closed_form(choice.steps, epsilon, self.DELTA) / n
        curvatures, start = np.full(int(p), 0.5), np.full(int(p), 1e-9 / math.sqrt(p))
        squares, _ = squared_errors(curvatures, start, 2.0, np.full(choice.steps, std))
        return float(squares[-1] @ curvatures / 2), bounds.theorem_1(problem, epsilon, self.DELTA)

    def flat_risk(self, n: float, p: float, epsilon: float) -> tuple[float, float]:
        """Exact risk of the mean iterate for the bowl that is worst at so many steps, and the bound for ν = 0."""
        beta, distance = 1.0, 1.0
        problem = Problem(int(n), int(p), 1.0, beta, 0.0, distance)
        _, steps, average = bounds.gd_choice(problem, epsilon)
        assert average
        std = gd.closed_form(steps, epsilon, self.DELTA) / n
        h = beta / steps
        powers = (1 - h / beta) ** np.arange(1, steps + 1)
        noise = p * std**2 / h**2 / steps**2 * ((1 - powers) ** 2).sum()
        start = (distance * beta / h * (1 - h / beta) * (1 - powers[-1]) / steps) ** 2
        return h / 2 * (noise + start), bounds.theorem_1(problem, epsilon, self.DELTA)

    def test_scaling_with_curvature(self) -> None:
        for column in (0, 1):
            ns = [250.0, 1000.0, 4000.0, 16000.0]
            scaled = [
                self.risk(n, 10, 0.5)[column] / bounds.gd_choice(Problem(int(n), 10, 1, 0.5, 0.5, 1), 1.0).steps
                for n in ns
            ]
            assert_allclose(slope(ns, scaled), -2, atol=1e-6)  # T itself grows as log n
            assert_allclose(slope([1, 4, 16], [self.risk(1000, p, 0.5)[column] for p in (1, 4, 16)]), 1, atol=1e-6)
            epsilons = [0.1, 0.2, 0.4, 0.8]
            assert_allclose(slope(epsilons, [self.risk(1000, 10, e)[column] for e in epsilons]), -2, atol=1e-6)

    def test_scaling_without_curvature(self) -> None:
        """√p/(nε) exactly in the bound, and the same to a few per cent for the worst bowl: the start dies out."""
        for column, tolerance in ((0, 0.05), (1, 0.02)):
            ns = [1000.0, 4000.0, 16000.0]
            assert_allclose(slope(ns, [self.flat_risk(n, 16, 0.5)[column] for n in ns]), -1, atol=tolerance)
            ps = [4.0, 16.0, 64.0]
            assert_allclose(slope(ps, [self.flat_risk(16000, p, 0.5)[column] for p in ps]), 0.5, atol=tolerance)
            epsilons = [0.25, 0.5, 1.0]
            values = [self.flat_risk(16000, 16, e)[column] for e in epsilons]
            assert_allclose(slope(epsilons, values), -1, atol=tolerance)

    def test_the_bound_holds_and_is_tight(self) -> None:
        for n, p, epsilon in ((1000, 10, 0.5), (10_000, 3, 0.1)):
            risk, bound = self.risk(n, p, epsilon)
            assert 0.999 * bound < risk <= bound * (1 + 1e-9)
            risk, bound = self.flat_risk(n, p, epsilon)
            assert bound / 12 < risk <= bound

    @given(st.integers(10, 10**6), st.integers(1, 1000), st.floats(0.01, 2.0), st.floats(0.01, 1.0))
    def test_the_closed_form_in_the_docs(self, n: int, p: int, epsilon: float, share: float) -> None:
        beta, distance, lipschitz = 2.0, 1.5, 3.0
        problem = Problem(n, p, lipschitz, beta, share * beta, distance)
        found = bounds.theorem_1(problem, epsilon, self.DELTA)
        start = beta * distance**2 / (2 * n**2)
        logs = math.log(n) * math.log(1 / self.DELTA)
        noise = 8 * beta * p * lipschitz**2 * logs / (problem.curvature * n * epsilon) ** 2
        rounding = 1 + share / (2 * math.log(n))
        assert found <= (start + noise * rounding) * (1 + 1e-9)
        assert found >= noise * (1 - 1 / n**2) * (1 - 1e-9) * (1 - (1 - share) ** (2 * math.log(n) / share))

    def test_the_closed_form_without_curvature(self) -> None:
        n, p, epsilon, distance, lipschitz = 10_000, 25, 0.5, 1.5, 3.0
        problem = Problem(n, p, lipschitz, 2.0, 0.0, distance)
        explicit = math.sqrt(p) * (distance**2 / 2 + 8 * lipschitz**2 * math.log(1 / self.DELTA)) / (n * epsilon)
        assert_allclose(bounds.theorem_1(problem, epsilon, self.DELTA), explicit, rtol=1e-12)


class TestTheorem2:
    def test_eq_13_is_what_its_recursion_gives(self) -> None:
        bound, nu = 3.0, 0.2
        problem = Problem(10, 2, 1.0, 1.0, nu, 1.0)
        square = 0.0  # E r₂² ≤ (1−2)·r₁² + G²/ν² whatever the start
        for t in range(1, 2001):
            square = max(0.0, 1 - 2 / t) * square + (bound / (nu * t)) ** 2
            assert square <= bounds.sgd_distance(problem, bound, t) * (1 + 1e-12)
        assert square >= 0.49 * bounds.sgd_distance(problem, bound, 2000)

    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10, 31, 100, 1000])
    def test_the_last_iterate_is_bounded_as_derived(self, steps: int) -> None:
        """The closed forms are at least the sums of their derivation, evaluated term by term with G = D = ν = 1."""
        last = steps + 1
        t = np.arange(1, last + 1)
        eq_13 = 2 / t
        half = last // 2

        def gap(k: int, rates: np.ndarray, squares: np.ndarray) -> float:
            tail = slice(last - k, last)  # t > T−k
            apart = 2 * squares[tail] + 2 * squares[last - k - 1]
            return float(apart @ np.diff(1 / rates)[last - k - 1 :] / 2 + rates[last - k - 1 :].sum() / 2)

        def mean(k: int, rates: np.ndarray, squares: np.ndarray) -> float:
            first = squares[last - k - 1] / (2 * rates[last - k - 1])
            later = squares[last - k :] @ np.diff(1 / rates)[last - k - 1 :] / 2
            return float(first + later + rates[last - k - 1 :].sum() / 2) / (k + 1)

        rates = 1 / t
        total = mean(half, rates, eq_13) + sum(gap(k, rates, eq_13) / (k * (k + 1)) for k in range(1, half + 1))
        steep = Problem(10, 2, 1.0, math.inf, 1.0, 1.0)
        assert total <= bounds.sgd_risk(steep, 1.0, steps)

        rates = 1 / np.sqrt(t)
        grown = 1 + np.concatenate([[0], np.cumsum(1 / t)[:-1]])
        flat = Problem(10, 2, 1.0, math.inf, 0.0, 1.0)
        total = mean(last - 1, rates, grown) + sum(gap(k, rates, grown) / (k * (k + 1)) for k in range(1, last))
        assert total <= bounds.sgd_risk(flat, 1.0, steps)
        assert mean(last - 1, rates, grown) * last / steps <= bounds.sgd_average_risk(flat, 1.0, steps)

    def test_choices(self) -> None:
        problem = Problem(1000, 25, 1.0, 1.0, 0.5, 2.0)
        rate, steps, average = bounds.sgd_choice(problem, 0.1, 3.0)
        assert (steps, average) == (100**2, False)
        assert [rate(t) for t in (0, 1, 9)] == [1 / (0.5 * t) for t in (1, 2, 10)]
        assert bounds.sgd_choice(problem, 0.1, 3.0, short=True).steps == 100 / 5
        rate, steps, average = bounds.sgd_choice(Problem(1000, 25, 1.0, 1.0, 0.0, 2.0), 0.1, 3.0)
        assert (steps, average) == (100**2, True)
        assert_allclose([rate(t) for t in (0, 3)], [2 / 3, 2 / 6])

    def test_scaling(self) -> None:
        """At a fixed noise multiplier T = n²ε² gives log(n)/(n²ε²) for ν > 0, and log(n)/(nε) for ν = 0."""

        def value(n: int, nu: float, short: bool = False) -> float:
            return bounds.theorem_2(Problem(n, 100, 1.0, math.inf, nu, 1.0), 0.5, 2.0, short=short)

        ns = [10**3, 10**4, 10**5, 10**6]
        assert_allclose(slope(ns, [value(n, 0.1) / math.log(n) for n in ns]), -2, atol=0.05)
        assert_allclose(slope(ns, [value(n, 0.0) / math.log(n) for n in ns]), -1, atol=0.05)
        assert_allclose(slope(ns, [value(n, 0.1, short=True) / math.log(n) for n in ns]), -1, atol=0.1)

    def test_poisson_gradient_bound_is_met_by_equal_rows(self) -> None:
        """n equal gradients of norm L: the mean square of a Poisson batch's sum is L²·E[N²], N binomial."""
        n, rate, lipschitz = 20, 0.15, 2.0
        counts = np.arange(n + 1)
        chances = np.array([math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in counts])
        batch = rate * n
        square = lipschitz**2 * float(chances @ counts**2) / batch**2
        noise = 5 * (lipschitz * 3.0 / batch) ** 2
        problem = Problem(n, 5, lipschitz, 1.0, 0.0, 1.0)
        assert_allclose(bounds.poisson_gradient_bound(problem, 3.0, rate), math.sqrt(square + noise), rtol=1e-12)
        whole = bounds.poisson_gradient_bound(problem, 3.0, 1.0)
        assert_allclose(whole, lipschitz * math.sqrt(1 + 5 * (3.0 / n) ** 2), rtol=1e-12)


@pytest.fixture(scope="module")
def objective() -> Objective:
    """A logistic problem that is not separable: 300 rows of norm at most 1, 3 columns."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((300, 3)) * [1.0, 0.5, 0.2]
    labels = np.where(random.random(300) < 1 / (1 + np.exp(-rows @ [3.0, -2.0, 4.0])), 1.0, -1.0)
    return Objective(Logistic(), Design(rows, radius=1.0), labels)


def problem_of(objective: Objective, best: np.ndarray, curvature: float) -> Problem:
    lipschitz = objective.loss.lipschitz(objective.design.bound)
    distance = float(np.linalg.norm(best))
    beta = smoothness(objective)
    return Problem(objective.design.rows, objective.dimension, lipschitz, beta, curvature, distance)


class TestRuns:
    """The shipped solvers on a logistic problem with known constants."""

    def test_gd_stays_below_theorem_1(self, objective: Objective) -> None:
        """ν = μ = l2, sure everywhere. Mean of 30 runs."""
        ridged = Objective(objective.loss, objective.design, objective.targets, l2=0.05)
        best = minimiser(ridged)
        problem = problem_of(ridged, best, 0.05)
        epsilon, delta = 2.0, 1e-6
        rate, steps, average = bounds.gd_choice(problem, epsilon)
        assert isinstance(rate, float)
        noise = gd.closed_form(steps, epsilon, delta)
        mechanism = Mechanism(
            FullBatch(), steps, noise, problem.lipschitz, relation=Relation.REPLACE_ONE, batch_size=300
        )
        outputs = [
            gd.solve(ridged.design, ridged.targets, ridged.loss, mechanism, learning_rate=rate, l2=0.05, key=seed)[0]
            for seed in range(30)
        ]
        found = excess_risk(ridged, outputs, best)
        assert not average
        assert found.value - SIGMAS * found.error <= bounds.theorem_1(problem, epsilon, delta) < 10 * found.value

    def test_gd_stays_below_eq_9_with_the_curvature_of_its_path(self, objective: Objective) -> None:
        """Unregularised, so that μ over the whole space is 0; ν is the least along 40 runs of 60 steps."""
        best = minimiser(objective)
        std, beta, steps, runs = 0.05, smoothness(objective), 60, 40
        rate = 1 / beta
        random = np.random.default_rng(1)
        least, outputs = math.inf, []
        for _ in range(runs):
            iterates = [np.zeros((3, 1))]
            for _ in range(steps):
                noise = std * random.standard_normal((3, 1))
                iterates.append(iterates[-1] - rate * (objective.gradient(iterates[-1]) + noise))
            nus = along(objective, iterates[:-1], best, learning_rate=rate, std=std)
            least = min(least, float(nus.min()))
            outputs.append(iterates[-1])
        found = excess_risk(objective, outputs, best)
        bound, without = (
            bounds.gd_risk(problem_of(objective, best, nu), std=std, learning_rate=rate, steps=steps)
            for nu in (least, 0.0)
        )
        assert found.value - SIGMAS * found.error <= bound < without / 2

    def test_average_of_gd_stays_below_eq_12(self, objective: Objective) -> None:
        """Mean of 30 runs."""
        best = minimiser(objective)
        problem = problem_of(objective, best, 0.0)
        epsilon, delta = 4.0, 1e-6
        rate, steps, average = bounds.gd_choice(problem, epsilon)
        assert average
        assert isinstance(rate, float)
        noise = gd.closed_form(steps, epsilon, delta)
        mechanism = Mechanism(
            FullBatch(), steps, noise, problem.lipschitz, relation=Relation.REPLACE_ONE, batch_size=300
        )
        outputs = [
            gd.solve(
                objective.design, objective.targets, objective.loss, mechanism,
                learning_rate=rate, average=True, key=seed,
            )[0]
            for seed in range(30)
        ]  # fmt: skip
        found = excess_risk(objective, outputs, best)
        assert found.value - SIGMAS * found.error <= bounds.theorem_1(problem, epsilon, delta)

    def test_sgd_stays_below_theorem_2(self, objective: Objective) -> None:
        """Algorithm 2 as printed, one row a step; ν = μ = l2 with G doubled for the l2 term. Mean of 400 runs."""
        l2, noise, steps, runs = 0.1, 2.0, 1500, 400
        ridged = Objective(objective.loss, objective.design, objective.targets, l2=l2)
        best = minimiser(ridged)
        problem = problem_of(ridged, best, l2)
        bound = 2 * bounds.gradient_bound(problem, noise)
        last, _, largest = printed_sgd(ridged, sgd.harmonic(l2), noise * problem.lipschitz, steps, runs)
        assert largest <= bound**2
        squares = ((last - best[:, 0]) ** 2).sum(axis=1)
        error = squares.std(ddof=1) / math.sqrt(runs)
        assert squares.mean() - SIGMAS * error <= bounds.sgd_distance(problem, bound, steps)
        found = excess_risk(ridged, last[:, :, None], best)
        assert found.value - SIGMAS * found.error <= bounds.sgd_risk(problem, bound, steps)
        epsilon = math.sqrt(steps) / problem.examples
        assert_allclose(bounds.theorem_2(problem, epsilon, noise), bounds.sgd_risk(problem, bound, steps), rtol=1e-12)

    def test_sgd_without_curvature_stays_below_theorem_2(self, objective: Objective) -> None:
        """η_t = D/(G√t), one row a step, mean and last iterate of 400 runs."""
        noise, steps, runs = 2.0, 1500, 400
        best = minimiser(objective)
        problem = problem_of(objective, best, 0.0)
        bound = bounds.gradient_bound(problem, noise)
        rates = sgd.root(problem.distance, bound)
        last, mean, largest = printed_sgd(objective, rates, noise * problem.lipschitz, steps, runs)
        assert largest <= bound**2 * 1.2  # a mean of 400: the true one is at most bound²
        found = excess_risk(objective, mean[:, :, None], best)
        epsilon = math.sqrt(steps) / problem.examples
        value = bounds.sgd_average_risk(problem, bound, steps)
        assert_allclose(bounds.theorem_2(problem, epsilon, noise), value, rtol=1e-12)
        assert found.value - SIGMAS * found.error <= bounds.sgd_average_risk(problem, bound, steps)
        found = excess_risk(objective, last[:, :, None], best)
        assert found.value - SIGMAS * found.error <= bounds.sgd_risk(problem, bound, steps)

    def test_poisson_sgd_stays_below_its_bound(self, objective: Objective) -> None:
        """The shipped solver, batches of 30 on average; mean of 20 runs."""
        best = minimiser(objective)
        problem = problem_of(objective, best, 0.0)
        bound = bounds.poisson_gradient_bound(problem, 5.0, 0.1)
        mechanism = Mechanism(Poisson(0.1), 200, 5.0, problem.lipschitz, relation=Relation.ZERO_OUT, batch_size=30.0)
        outputs = [
            sgd.solve(
                objective.design, objective.targets, objective.loss, mechanism,
                learning_rate=sgd.root(problem.distance, bound), average=True, key=seed,
            )[0]
            for seed in range(20)
        ]  # fmt: skip
        found = excess_risk(objective, outputs, best)
        assert found.value - SIGMAS * found.error <= bounds.sgd_average_risk(problem, bound, 200)


def printed_sgd(objective: Objective, rates, std: float, steps: int, runs: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Last and mean iterates of Algorithm 2 from 0, (runs, p) each, and the largest mean square of a noisy gradient."""
    rows = objective.design.scores(np.eye(objective.dimension))
    targets, random = objective.targets, np.random.default_rng(2)
    x, mean, largest = np.zeros((runs, rows.shape[1])), np.zeros((runs, rows.shape[1])), 0.0
    for t in range(steps):
        drawn = random.integers(len(rows), size=runs)
        margins = targets[drawn] * np.einsum("ij,ij->i", rows[drawn], x)
        pulls = -targets[drawn] / (1 + np.exp(np.clip(margins, -500, 500)))
        noisy = pulls[:, None] * rows[drawn] + objective.l2 * x + std * random.standard_normal(x.shape)
        largest = max(largest, float((noisy**2).sum(axis=1).mean()))
        x = x - rates(t) * noisy
        mean += (x - mean) / (t + 1)
    return x, mean, largest


class TestTable1:
    def test_orders_as_printed(self) -> None:
        n, p, beta, nu, mu, epsilon = 1000.0, 50.0, 0.25, 0.02, 0.001, 0.3
        problem = Problem(1000, 50, 1.0, beta, nu, 1.0)
        rows = {row.method: row[1:] for row in bounds.table_1(problem, mu, epsilon)}
        log = math.log(n)
        root, square = p**0.5 / (n * epsilon), p / (n * epsilon) ** 2
        assert_allclose(rows["objective perturbation"], (root, square / mu))
        assert_allclose(
            rows["output perturbation"], ((beta * p) ** (1 / 3) / (n * epsilon) ** (2 / 3), beta * square / mu**2)
        )
        assert_allclose(rows["DP-SGD, Bassily et al."], (root * log**1.5, square * log**2 / mu))
        assert rows["DP-GD, Jayaraman et al."][0] is None
        assert_allclose(rows["DP-GD, Jayaraman et al."][1], beta * square * log**2 / mu**2)
        assert_allclose(rows["DP-GD, expected curvature"], [min(root, beta * square * log / nu**2)] * 2)
        assert_allclose(rows["DP-SGD, expected curvature"], [min(root * log, square * log / nu)] * 2)

    def test_the_logarithm_is_at_least_one(self) -> None:
        rows = {row.method: row for row in bounds.table_1(Problem(1, 4, 1.0, 0.25, 0.0, 1.0), 0.1, 0.5)}
        assert rows["DP-SGD, Bassily et al."].convex == rows["DP-SGD, expected curvature"].convex == 4.0

    def test_without_strong_convexity(self) -> None:
        problem = Problem(1000, 50, 1.0, 0.25, 0.0, 1.0)
        rows = bounds.table_1(problem, 0.0, 0.3)
        assert [row.strongly_convex for row in rows[:4]] == [None] * 4
        assert rows[4].convex == rows[0].convex


class TestRefusals:
    PROBLEM = Problem(100, 5, 1.0, 0.5, 0.1, 1.0)

    def test_rate_beyond_one_over_smoothness(self) -> None:
        for bound in (bounds.gd_risk, bounds.gd_average_risk, bounds.gd_distance):
            with pytest.raises(ValueError, match=r"learning_rate must be at most 1/smoothness = 2, got 2\.1"):
                bound(self.PROBLEM, std=0.1, learning_rate=2.1, steps=5)

    def test_smoothness_is_needed(self) -> None:
        rough = Problem(100, 5, 1.0, math.inf, 0.1, 1.0)
        with pytest.raises(ValueError, match="smoothness must be positive and finite, got inf"):
            bounds.gd_risk(rough, std=0.1, learning_rate=1.0, steps=5)
        with pytest.raises(ValueError, match="smoothness must be positive and finite, got inf"):
            bounds.gd_choice(rough, 1.0)

    def test_curvature_is_needed(self) -> None:
        with pytest.raises(ValueError, match="curvature must be positive and finite, got 0"):
            bounds.sgd_distance(Problem(100, 5, 1.0, 1.0, 0, 1.0), 1.0, 10)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("examples", 0, "examples must be a whole number of at least 1"),
            ("dimension", 1.5, "dimension must be a whole number"),
            ("lipschitz", 0.0, "lipschitz must be positive"),
            ("smoothness", -1.0, "smoothness must be positive"),
            ("curvature", math.nan, "curvature must be a number"),
            ("distance", -1.0, "distance must be zero or more"),
        ],
    )
    def test_constants(self, field: str, value: float, message: str) -> None:
        fields = {"examples": 9, "dimension": 2, "lipschitz": 1.0, "smoothness": 1.0, "curvature": 0.1, "distance": 1.0}
        with pytest.raises(ValueError, match=message):
            Problem(**(fields | {field: value}))

    def test_steps_and_noise(self) -> None:
        with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
            bounds.gd_risk(self.PROBLEM, std=0.1, learning_rate=1.0, steps=0)
        with pytest.raises(ValueError, match="std"):
            bounds.gd_average_risk(self.PROBLEM, std=-0.1, learning_rate=1.0, steps=1)
        with pytest.raises(ValueError, match="noise_multiplier must be zero or more"):
            bounds.gradient_bound(self.PROBLEM, -1.0)
        with pytest.raises(ValueError, match="epsilon must be positive"):
            bounds.theorem_2(self.PROBLEM, 0.0, 1.0)
        with pytest.raises(ValueError, match="too large for the closed form"):
            bounds.theorem_1(self.PROBLEM, 40.0, 1e-5)
