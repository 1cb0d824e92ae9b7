"""AMP against its printed constants, its precondition, and densities by quadrature."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpgrad.accounting import account, exact
from dpgrad.accounting.events import Approximate, Relation, Repeat
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, Softmax, Squared
from dpgrad.convex.solvers import amp

ZERO_OUT, REPLACE_ONE = Relation.ZERO_OUT, Relation.REPLACE_ONE
KIND: dict[str, Any] = {"radius": 1.0, "epsilon": 0.1, "delta": 36176**-2.0, "relation": REPLACE_ONE}
ROWS = 36176


def test_printed_constants_under_replace_one() -> None:
    plan = amp.calibrated(ROWS, Logistic(), noise_share=0.9, output_share=0.1, **KIND)
    eps1, eps3 = 0.09, 0.081
    delta1 = 0.9 * 36176**-2.0
    assert plan.ridge == pytest.approx(2 * 0.25 / (eps1 - eps3))  # rβ/(ε₁ − ε₃), β = L²/4
    # the average is perturbed by (2L/n)(1 + √(2·log(1/δ₁)))/ε₃, the sum by n times that
    assert plan.scale == pytest.approx(2 * (1 + math.sqrt(2 * math.log(1 / delta1))) / eps3)
    assert plan.tolerance == pytest.approx(1 / ROWS)  # n·γ, γ = 1/n²
    first, second = plan.event.events  # type: ignore[union-attr]
    assert first.epsilon == pytest.approx(eps1)
    assert first.delta == pytest.approx(delta1)
    assert first.relation is REPLACE_ONE
    # the output: a Gaussian of sensitivity 2nγ/Λ that is exactly (ε₂, δ₂)-private
    mu = 2 * plan.tolerance / plan.ridge / plan.output_scale
    assert math.exp(exact.log_delta(mu, 0.01)) == pytest.approx(0.1 * 36176**-2.0, rel=1e-6)
    assert exact.account(second, REPLACE_ONE).delta(0.01) == pytest.approx(0.1 * 36176**-2.0, rel=1e-6)


def test_half_the_noise_and_ridge_where_a_row_is_left_out() -> None:
    swap = amp.calibrated(ROWS, Logistic(), noise_share=0.9, **KIND)
    zero = amp.calibrated(ROWS, Logistic(), noise_share=0.9, **{**KIND, "relation": ZERO_OUT})
    assert swap.scale == pytest.approx(2 * zero.scale)
    assert swap.ridge == pytest.approx(2 * zero.ridge)


def test_the_curvature_is_that_of_the_loss() -> None:
    """The authors' code has β = L² for every loss: a fifth of the truth for a Huber SVM of width 0.1."""
    plain = amp.calibrated(ROWS, Logistic(), noise_share=0.9, **KIND)
    huber = amp.calibrated(ROWS, HuberSvm(0.1), noise_share=0.9, **KIND)
    assert huber.ridge / plain.ridge == pytest.approx(5 / 0.25)


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 50.0])
def test_rows_in_other_units_give_the_same_fit(unit: float) -> None:
    """Coefficients in units of 1/unit: also the noise on them, by a tolerance in units of the gradient."""
    rows = np.random.default_rng(4).standard_normal((500, 3))
    targets = np.sign(rows[:, 0])
    found = []
    for scale in (1.0, unit):
        plan = amp.tuning_free(500, Logistic(), radius=scale, unit=scale, epsilon=1.0, delta=1e-6, relation=REPLACE_ONE)
        found.append(scale * amp.solve(Design(scale * rows, radius=scale), targets, Logistic(), plan, key=7)[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_a_larger_ridge_is_taken_and_a_smaller_one_is_not() -> None:
    least = amp.calibrated(ROWS, Logistic(), noise_share=0.9, **KIND)
    authors = amp.tuning_free(ROWS, Logistic(), ridge=4 * amp.tuning_free(ROWS, Logistic(), **KIND).ridge, **KIND)
    assert authors.ridge == pytest.approx(2 * 1.0 / (authors.event.events[0].epsilon * (1 - 0.930744)), rel=1e-3)  # type: ignore[union-attr]
    assert amp.calibrated(ROWS, Logistic(), noise_share=0.9, ridge=0.1, **KIND) == least
    with pytest.raises(ValueError, match="ridge must be zero or more"):
        amp.calibrated(ROWS, Logistic(), noise_share=0.9, ridge=-1.0, **KIND)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 10.0])
def test_without_tuning_it_takes_the_share_that_was_fitted(epsilon: float) -> None:
    share = max(min(0.88671 + 0.0186607 / epsilon**0.372906, 0.99), 1 - 1 / epsilon + 0.001)
    given = {**KIND, "epsilon": epsilon}
    assert amp.tuning_free(ROWS, Logistic(), **given) == amp.calibrated(ROWS, Logistic(), noise_share=share, **given)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("models", [1, 10])
def test_the_price_of_all_models_is_within_the_budget(epsilon: float, models: int) -> None:
    plan = amp.tuning_free(ROWS, Logistic(), models=models, **{**KIND, "epsilon": epsilon})
    for accountant in ("exact", "pld"):
        spent = account(Repeat(plan.event, models), REPLACE_ONE, accountant).epsilon(KIND["delta"])
        assert 0.8 * epsilon < spent <= epsilon


class TestPrecondition:
    def test_what_the_determinants_get_stays_below_one(self) -> None:
        with pytest.raises(
            ValueError, match=r"amp needs epsilon .* below 1, got 4\.95: raise noise_share above 0\.898"
        ):
            amp.calibrated(ROWS, Logistic(), noise_share=0.5, **{**KIND, "epsilon": 10.0})
        amp.calibrated(ROWS, Logistic(), noise_share=0.9, **{**KIND, "epsilon": 10.0})

    def test_noise_beyond_the_proof_is_refused(self) -> None:
        given = {**KIND, "epsilon": 40.0}
        with pytest.raises(ValueError, match=r"amp needs a noise share of epsilon of at most 14\..* lower epsilon"):
            amp.calibrated(ROWS, Logistic(), noise_share=0.98, **given)

    @pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
    @pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0])
    def test_it_holds_of_every_plan(self, epsilon: float, relation: Relation) -> None:
        """The ridge is at least rβ/(ε₁ − ε₃), and 0 < ε₁ − ε₃ < 1 with ε₃ read off the noise."""
        moved = 2 if relation is REPLACE_ONE else 1
        for loss in (Logistic(), HuberSvm(0.2), Squared(2.0)):
            plan = amp.tuning_free(500, loss, radius=3.0, epsilon=epsilon, delta=1e-5, relation=relation)
            first = plan.event.events[0]  # type: ignore[union-attr]
            tail = 1 + math.sqrt(-2 * math.log(first.delta))
            left = first.epsilon - moved * loss.lipschitz(3.0) * tail / plan.scale
            assert 0 < left < 1
            assert plan.ridge >= moved * loss.smoothness(3.0) / left * (1 - 1e-9)

    @pytest.mark.parametrize(
        ("loss", "match"),
        [(Hinge(), "amp needs a smooth loss"), (Softmax(3), "amp needs a loss of one score")],
        ids=str,
    )
    def test_losses(self, loss: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            amp.tuning_free(ROWS, loss, **KIND)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"noise_share": 1.0}, "noise_share must lie strictly between"),
            ({"output_share": 0.0}, "output_share must lie strictly between"),
            ({"epsilon": "1"}, "epsilon must be a number"),
            ({"delta": 1e-3}, "delta must be below 1/n"),
            ({"models": 0}, "models must be a whole number"),
            ({"unit": 0.0}, "unit must be positive"),
            ({"relation": Relation.ADD_REMOVE}, "relation add-remove is refused"),
        ],
        ids=str,
    )
    def test_arguments(self, given: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            amp.calibrated(ROWS, Logistic(), **{"noise_share": 0.9, **KIND, **given})


@pytest.mark.parametrize("relation", [ZERO_OUT, REPLACE_ONE])
@pytest.mark.parametrize("loss", [Logistic(), HuberSvm(0.3), Squared(1.0)], ids=str)
def test_the_exact_minimiser_is_as_private_as_declared(loss: Any, relation: Relation) -> None:
    """δ(ε₁) of the minimiser's density on one column, by quadrature, for the worst of many neighbours."""
    plan = amp.calibrated(10, loss, radius=1.0, epsilon=1.0, delta=0.05, relation=relation, noise_share=0.9)
    first = plan.event.events[0]  # type: ignore[union-attr]
    assert first == Approximate(first.epsilon, first.delta, relation)
    reach = (9 * plan.scale + 4) / plan.ridge
    w = np.linspace(-reach, reach, 100_001)

    def density(x: list[float], y: list[float]) -> Any:
        b, bends = -plan.ridge * w, np.full_like(w, plan.ridge)
        for row, label in zip(x, y, strict=True):
            scores, labels = (w * row)[:, None], np.full_like(w, label)
            b -= row * loss.residuals(scores, labels)[:, 0]
            bends += row**2 * loss.curvatures(scores, labels)
        return stats.norm.pdf(b, scale=plan.scale) * bends

    others = [0.0] if relation is ZERO_OUT else [1.0, -1.0]
    for label in (1.0, -1.0):
        for other in others:
            p, q = density([1.0, 0.3], [1.0, 1.0]), density([other, 0.3], [label, 1.0])
            for a, b in ((p, q), (q, p)):
                assert np.maximum(a - math.exp(first.epsilon) * b, 0).sum() * (w[1] - w[0]) <= first.delta


def test_it_learns() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((4000, 3))
    y = np.where(x @ [1.0, -2.0, 0.5] > 0, 1.0, -1.0)
    design = Design(x, radius=1.0, rule="normalise")
    plan = amp.tuning_free(4000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-8, relation=REPLACE_ONE)
    w, event = amp.solve(design, y, Logistic(), plan, key=1)
    assert np.mean((design.scores(w)[:, 0] > 0) == (y > 0)) > 0.95
    assert event == plan.event


@pytest.mark.parametrize("epsilon", [50.0, 999.0, 1000.0, 1e4, 1e300])
@pytest.mark.parametrize("models", [1, 3])
def test_an_epsilon_that_is_too_large_is_refused_in_words(epsilon: float, models: int) -> None:
    with pytest.raises(
        ValueError, match=r"^amp needs a noise share of epsilon of at most .*: lower epsilon or use gd$"
    ):
        amp.tuning_free(
            100, Logistic(), radius=1.0, epsilon=epsilon, delta=1e-4, relation=Relation.REPLACE_ONE, models=models
        )
