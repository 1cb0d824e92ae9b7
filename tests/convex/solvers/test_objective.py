"""Objective perturbation against densities by quadrature, brute force on neighbours, and its formulas."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse, stats

from dpgrad.accounting import account, exact
from dpgrad.accounting.events import Approximate, Gaussian, Relation, Repeat, Shifted
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, Softmax, Squared
from dpgrad.convex.solvers import objective, perturbed
from dpgrad.convex.solvers.perturbed import Law, Perturbation
from dpgrad.mechanism.keys import Key

Array = NDArray[np.float64]
ZERO_OUT, REPLACE_ONE = Relation.ZERO_OUT, Relation.REPLACE_ONE
MARGIN: list[Any] = [Logistic(), Logistic(0.3), HuberSvm(0.3)]
MADE: dict[str, Callable[..., Perturbation]] = {
    "tight": objective.calibrated, "approximate": objective.approximate, "pure": objective.pure,
}  # fmt: skip


def density(loss: Any, x: Array, y: Array, ridge: float, log_noise: Callable[[Array], Array], w: Array) -> Array:
    """The density of the exact minimiser on one column: that of b(w) = −Σ yxℓ′ − λw times |b′(w)|."""
    b, bends = -ridge * w, np.full_like(w, ridge)
    for row, label in zip(x, y, strict=True):
        scores, labels = (w * row)[:, None], np.full_like(w, label)
        b -= row * loss.residuals(scores, labels)[:, 0]
        bends += row**2 * loss.curvatures(scores, labels)
    return np.asarray(np.exp(log_noise(b)) * bends)


def neighbours(relation: Relation, random: np.random.Generator, loss: Any) -> tuple[Array, Array, Array, Array]:
    """Two small datasets of one column; what is left out has a row of zero, which contributes nothing."""
    n = int(random.integers(1, 5))
    x, y = random.uniform(-1, 1, n), random.choice([-1.0, 1.0], n)
    if isinstance(loss, Squared):
        y = random.uniform(-2, 2, n)
    other, label = x.copy(), y.copy()
    x[0] = random.choice([-1.0, 1.0])
    other[0] = 0.0 if relation is ZERO_OUT else random.choice([-1.0, 1.0])
    label[0] = random.choice([-1.0, 1.0])
    return x, y, other, label


def hockey_sticks(p: Array, q: Array, epsilons: Array, w: Array) -> Array:
    """The larger of H(P‖Q) and H(Q‖P) at each ε."""
    found = [[np.trapezoid(np.maximum(a - math.exp(e) * b, 0), w) for a, b in ((p, q), (q, p))] for e in epsilons]
    return np.asarray(np.max(found, axis=1))


def points(loss: Any, reach: float, *rows: Array) -> Array:
    """Points for the trapezoidal rule, with one on either side of every jump of the density."""
    x = np.concatenate(rows)
    margins = {HuberSvm: (1 - 0.3, 1 + 0.3), Logistic: (math.log(0.7 / 0.3),), Squared: ()}[type(loss)]
    jumps = np.array([sign * margin / x for margin in margins for sign in (-1, 1)])
    jumps = jumps[np.isfinite(jumps) & (np.abs(jumps) < reach)]
    return np.unique(np.concatenate([np.linspace(-reach, reach, 100_001), jumps - 1e-9, jumps + 1e-9]))


class TestDensities:
    """The actual δ(ε) of the exact minimiser of random problems of one column, by quadrature, over the bound."""

    @pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
    @pytest.mark.parametrize("loss", MARGIN, ids=str)
    def test_tight(self, loss: Any, relation: Relation) -> None:
        random = np.random.default_rng(7)
        worst = 0.0
        for _ in range(12):
            x, y, other, label = neighbours(relation, random, loss)
            ridge, std = random.uniform(0.1, 2), random.uniform(0.3, 3)
            event = Shifted(math.log1p(loss.smoothness(1.0) / ridge), Gaussian(std / loss.lipschitz(1.0)))
            reach = (9 * std + 4) / ridge
            with np.errstate(divide="ignore"):  # a row of zero has no jump
                w = points(loss, reach, x, other)
            p, q = (
                density(loss, a, b, ridge, lambda v, s=std: stats.norm.logpdf(v, scale=s), w)  # type: ignore[misc]
                for a, b in ((x, y), (other, label))
            )
            assert np.trapezoid(p, w) == pytest.approx(1, abs=1e-4)
            epsilons = np.array([0.0, 0.05, 0.2, 0.5, 1.0, 1.5])
            actual = hockey_sticks(p, q, epsilons, w)
            bound = np.array([exact.account(event, relation).delta(e) for e in epsilons])
            kept = bound > 1e-4  # below, the quadrature has no digits
            worst = max(worst, float((actual[kept] / bound[kept]).max(initial=0.0)))
        assert 0.3 < worst <= 1

    @pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
    @pytest.mark.parametrize("loss", [Logistic(), HuberSvm(0.3), Squared(1.0)], ids=str)
    def test_classic(self, loss: Any, relation: Relation) -> None:
        random = np.random.default_rng(8)
        for epsilon in (0.5, 1.0, 3.0):
            x, y, other, label = neighbours(relation, random, loss)
            kind = {"radius": 1.0, "epsilon": epsilon, "relation": relation}
            gauss = objective.approximate(10, loss, delta=0.05, **kind)
            gamma = objective.pure(10, loss, **kind)
            for plan, log_noise in (
                (gauss, lambda v, s=gauss.scale: stats.norm.logpdf(v, scale=s)),
                (gamma, lambda v, s=gamma.scale: stats.laplace.logpdf(v, scale=s)),
            ):
                reach = (25 * plan.scale + 4) / plan.ridge
                w = np.linspace(-reach, reach, 40_001)
                p, q = (density(loss, a, b, plan.ridge, log_noise, w) for a, b in ((x, y), (other, label)))
                spent = 0.99 * epsilon
                allowed = 0.99 * 0.05 if plan.law is Law.GAUSSIAN else 1e-6
                assert hockey_sticks(p, q, np.array([spent]), w)[0] <= allowed


class TestFourCorners:
    """The lemma behind replace-one: max over the corners a, d, a + d is at most the Gaussian that moves by 2μ."""

    @pytest.mark.parametrize(("mu", "epsilon"), list(itertools.product([0.1, 0.5, 2.0], [0.0, 0.05, 0.3, 1.5])))
    def test_by_quadrature(self, mu: float, epsilon: float) -> None:
        g = np.linspace(-7 - 2 * mu, 7, 701)
        one, two = np.meshgrid(g, np.linspace(-7 - mu, 7 + mu, 701), indexing="ij")
        cell = (g[1] - g[0]) * (14 + 2 * mu) / 700

        def phi(a: float, b: float) -> Array:
            return np.exp(-((one + a) ** 2 + (two + b) ** 2) / 2) / (2 * math.pi)

        top = math.exp(exact.log_delta(2 * mu, epsilon))
        values = []
        for angle in np.linspace(0, math.pi / 2, 6):
            c, s = mu * math.cos(angle), mu * math.sin(angle)
            best = np.maximum.reduce([phi(0, 0) - math.exp(epsilon) * phi(*d) for d in ((c, s), (c, -s), (2 * c, 0))])
            values.append(float(np.maximum(best, 0).sum()) * cell)
        assert values[0] == pytest.approx(top, rel=1e-3, abs=1e-7)
        assert max(values) <= top * (1 + 1e-3) + 1e-7


class TestNeighbours:
    @pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
    @pytest.mark.parametrize("loss", MARGIN, ids=str)
    def test_exact_minimisers_move_by_no_more_than_the_noise_accounts_for(self, loss: Any, relation: Relation) -> None:
        """With the noise fixed ‖w − w′‖ ≤ mL/λ; the noise that would give w on the neighbour is mL away at most."""
        random = np.random.default_rng(3)
        moved, furthest = (2 if relation is REPLACE_ONE else 1) * loss.lipschitz(1.0), 0.0
        for _ in range(30):
            x = random.standard_normal((6, 2))
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            y = random.choice([-1.0, 1.0], 6)
            other, label = x.copy(), y.copy()
            other[0] = 0 if relation is ZERO_OUT else -x[0] if random.uniform() < 0.5 else x[1]
            linear, ridge = random.standard_normal((2, 1)) * 3, random.uniform(0.05, 2)
            w, v = (
                perturbed.minimiser(Design(a, radius=1.0), b, loss, ridge, linear, 1e-8)
                for a, b in ((x, y), (other, label))
            )
            needed = -Design(other, radius=1.0).gathered(loss.residuals(other @ w, label)) - ridge * w
            assert np.linalg.norm(w - v) <= moved / ridge + 1e-6
            assert np.linalg.norm(needed - linear) <= moved + 1e-6
            furthest = max(furthest, float(np.linalg.norm(needed - linear)))
        assert furthest > 0.6 * moved

    def test_the_noise_that_a_release_needed_has_its_law(self) -> None:
        """b = −∇(J − b·w) at the release: KS at p > 1e-4 on 600 runs, both laws; a false alarm once in 5,000 seeds."""
        design, y = Design([[1.0], [-0.5]] * 50, radius=1.0), np.array([1.0] * 100)
        gauss = objective.calibrated(100, Logistic(), radius=1.0, epsilon=1.0, delta=1e-3, relation=ZERO_OUT)
        gamma = objective.pure(100, Logistic(), radius=1.0, epsilon=1.0, relation=ZERO_OUT)
        for plan, law in ((gauss, stats.norm(scale=gauss.scale)), (gamma, stats.laplace(scale=gamma.scale))):
            sample = []
            for seed in range(600):
                w, _ = objective.solve(design, y, Logistic(), plan, key=seed)
                total = design.gathered(Logistic().residuals(design.scores(w), y)) + plan.ridge * w
                sample.append(-float(total[0, 0]))
            assert stats.kstest(sample, law.cdf).pvalue > 1e-4


class TestCalibration:
    @pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
    @pytest.mark.parametrize("models", [1, 3, 10])
    @pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
    def test_tight_spends_the_budget_and_no_more(self, relation: Relation, models: int, epsilon: float) -> None:
        plan = objective.calibrated(
            1000, Logistic(), radius=1.0, epsilon=epsilon, delta=1e-6, relation=relation, models=models
        )
        for accountant in ("exact", "pld"):
            spent = account(Repeat(plan.event, models), relation, accountant).epsilon(1e-6)
            assert 0.999 * epsilon < spent <= epsilon

    def test_models_share_as_gaussians_do(self) -> None:
        """Ten models take little more than √10 times the noise; adding up would take about ten times."""
        kind = {"radius": 1.0, "epsilon": 1.0, "delta": 1e-9, "relation": REPLACE_ONE}
        one, ten = (objective.calibrated(1000, Logistic(), models=k, **kind) for k in (1, 10))
        assert math.sqrt(10) < ten.scale / one.scale < 1.08 * math.sqrt(10)

    def test_the_ridge_decides_the_shift(self) -> None:
        kind = {"radius": 2.0, "epsilon": 1.0, "delta": 1e-6, "relation": ZERO_OUT}
        plan = objective.calibrated(1000, HuberSvm(0.5), shift_share=0.2, **kind)
        assert plan.ridge == pytest.approx(4.0 / math.expm1(0.2))  # β = R²/2h
        shifted = plan.event.events[0]  # type: ignore[union-attr]
        assert shifted.shift == pytest.approx(0.2)
        assert shifted.event.noise_multiplier == pytest.approx(plan.scale / 2.0)
        large = objective.calibrated(1000, HuberSvm(0.5), ridge=100.0, **kind)
        assert large.ridge == 100
        assert large.event.events[0].shift == pytest.approx(math.log1p(0.04))  # type: ignore[union-attr]
        assert large.scale < plan.scale

    @pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
    def test_the_second_noise_covers_two_approximate_solutions(self, relation: Relation) -> None:
        """A Gaussian of sensitivity 2γ/λ under either relation, a hundredth of μ²."""
        plan = objective.calibrated(1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=relation)
        first, second = plan.event.events  # type: ignore[union-attr]
        mu = exact.account(second, relation)
        assert isinstance(mu, exact.GaussianProfile)
        assert mu.mu == pytest.approx(2 * plan.tolerance / plan.ridge / plan.output_scale)
        main = exact.account(first.event, relation)
        assert isinstance(main, exact.GaussianProfile)
        assert mu.mu**2 / (mu.mu**2 + main.mu**2) == pytest.approx(0.01)
        assert plan.output_scale < 1e-4  # next to the noise of the minimiser, std/(λ + n·curvature), nothing

    def test_constants_of_kifer(self) -> None:
        kind: dict[str, Any] = {"radius": 3.0, "epsilon": 2.0, "delta": 1e-4}
        zero = objective.approximate(100, Logistic(), relation=ZERO_OUT, **kind)
        swap = objective.approximate(100, Logistic(), relation=REPLACE_ONE, **kind)
        e, d = 1.98, 1e-4 * 0.99
        assert zero.scale == pytest.approx(3 * math.sqrt(8 * math.log(2 / d) + 4 * e) / e)
        assert swap.scale == pytest.approx(2 * zero.scale)
        assert zero.ridge == swap.ridge == pytest.approx(2 * (9 / 4) / e)
        assert zero.event.events[0] == Approximate(e, d, ZERO_OUT)  # type: ignore[union-attr]

    def test_constants_of_chaudhuri(self) -> None:
        plan = objective.pure(100, HuberSvm(0.5), radius=1.0, epsilon=2.0, relation=REPLACE_ONE)
        assert plan.ridge == pytest.approx(1 / math.expm1(0.99))  # half of .99·ε for the determinants, β = 1
        assert plan.scale == pytest.approx(2 / 0.99)
        assert plan.event == Approximate(2.0, 0.0, REPLACE_ONE)
        assert plan.output_scale == pytest.approx(2 * plan.tolerance / plan.ridge / 0.02)
        kept = objective.pure(100, HuberSvm(0.5), radius=1.0, epsilon=2.0, relation=REPLACE_ONE, ridge=50.0)
        assert kept.scale == pytest.approx(2 / (1.98 - math.log1p(1 / 50)))

    def test_models_share_the_budget_of_chaudhuri(self) -> None:
        """Each of four gets a quarter of ε: for its determinants, its noise and its second noise."""
        kind: dict[str, Any] = {"radius": 2.0, "relation": REPLACE_ONE}
        four = objective.pure(100, Logistic(), epsilon=2.0, models=4, **kind)
        assert four == objective.pure(100, Logistic(), epsilon=0.5, **kind)
        assert four.scale == pytest.approx(2 * 2.0 / (0.495 - math.log1p(1.0 / four.ridge)))
        assert account(Repeat(four.event, 4), REPLACE_ONE, "exact").epsilon(1e-9) <= 2.0 * (1 + 1e-12)

    @pytest.mark.parametrize("made", [objective.approximate, objective.calibrated], ids=["approximate", "tight"])
    def test_the_price_is_within_the_budget(self, made: Callable[..., Perturbation]) -> None:
        plan = made(1000, Logistic(), radius=1.0, epsilon=0.5, delta=1e-7, relation=REPLACE_ONE, models=4)
        assert account(Repeat(plan.event, 4), REPLACE_ONE, "pld").epsilon(1e-7) <= 0.5


@pytest.mark.parametrize("way", MADE)
def test_a_plan_is_solved_for_what_it_was_made_for(way: str) -> None:
    """The released coefficients, less the second noise, have a gradient within the tolerance of the plan."""
    random, loss, key = np.random.default_rng(3), HuberSvm(0.3), Key.from_seed(4)
    x, y = random.uniform(-0.8, 0.8, (60, 3)), random.choice([-1.0, 1.0], 60)
    given: dict[str, Any] = {} if way == "pure" else {"delta": 1e-4}
    plan = MADE[way](60, loss, radius=1.5, epsilon=2.0, relation=REPLACE_ONE, **given)
    assert (plan.loss, plan.radius, plan.rows, plan.relation) == (loss, 1.5, 60, REPLACE_ONE)
    found, event = objective.solve(Design(x, radius=1.5), y, loss, plan, key=key)
    first, second = (perturbed.noise(plan.law, key, i, (3, 1), s) for i, s in ((0, plan.scale), (1, plan.output_scale)))
    w = found - second
    assert np.linalg.norm(x.T @ loss.residuals(x @ w, y) + plan.ridge * w + first) <= 1.1 * plan.tolerance
    assert event == plan.event


class TestRefusals:
    KIND: dict[str, Any] = {"radius": 1.0, "epsilon": 1.0, "delta": 1e-6, "relation": ZERO_OUT}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("loss", "match"),
        [
            (Hinge(), "objective needs a smooth loss, got Hinge"),
            (Softmax(3), "needs a loss of one score"),
            (Squared(1.0), "the tight calibration needs a margin loss"),
        ],
        ids=str,
    )
    def test_losses(self, loss: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            objective.calibrated(1000, loss, **self.KIND)

    def test_the_plain_squared_loss_has_no_bound(self) -> None:
        with pytest.raises(ValueError, match="bound is infinite"):
            objective.approximate(1000, Squared(math.inf), **self.KIND)

    @pytest.mark.parametrize(
        ("way", "given", "match"),
        [
            (way, given, match)
            for way, absent in (("tight", ()), ("approximate", ("shift_share",)), ("pure", ("delta",)))
            for given, match in (
                ({"epsilon": 0.0}, "epsilon must be positive"),
                ({"delta": 1e-3}, "delta must be below 1/n"),
                ({"delta": 0.0}, "delta must lie strictly between"),
                ({"models": 0}, "models must be a whole number"),
                ({"ridge": -1.0}, "ridge must be zero or more"),
                ({"shift_share": 1.0}, "shift_share must lie strictly between"),
                ({"radius": -1.0}, "radius must be"),
                ({"relation": "swap"}, "not a valid Relation"),
                ({"relation": Relation.ADD_REMOVE}, "relation add-remove is refused"),
            )
            if not set(given) & set(absent)
        ],
        ids=str,
    )
    def test_arguments(self, way: str, given: dict[str, Any], match: str) -> None:
        kind = {name: value for name, value in (self.KIND | given).items() if way != "pure" or name != "delta"}
        with pytest.raises(ValueError, match=match) as error:
            MADE[way](1000, Logistic(), **kind)
        assert "\n" not in str(error.value)


def test_sparse_rows_give_what_dense_rows_give() -> None:
    random = np.random.default_rng(2)
    x = random.uniform(-1, 1, (300, 20)) * (random.uniform(size=(300, 20)) < 0.2)
    y = np.where(x @ random.standard_normal(20) > 0, 1.0, -1.0)
    dense, csr = Design(x, radius=1.0, intercept=0.5), Design(sparse.csr_array(x), radius=1.0, intercept=0.5)
    plan = objective.calibrated(300, Logistic(), radius=dense.bound, epsilon=1.0, delta=1e-5, relation=ZERO_OUT)
    one, two = (objective.solve(design, y, Logistic(), plan, key=5)[0] for design in (dense, csr))
    assert one.shape == (21, 1)
    assert np.abs(one - two).max() < 1e-6
