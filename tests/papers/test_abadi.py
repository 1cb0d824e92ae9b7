"""Abadi et al. (2016): the arithmetic of their experiments against closed forms written out here."""

import copy
import math

import pytest
import torch
from torch import nn

from dpgrad import fit, recipes
from dpgrad.accounting import account
from dpgrad.accounting.events import Event, Gaussian, Poisson, Relation, Repeat
from dpgrad.papers import abadi, abadi_mnist, private_sgd
from dpgrad.papers.experiment import Arm, Outcomes, Place
from dpgrad.training.options import Privacy

TINY = Place(size="tiny")
Q, SIGMA, DELTA, STEPS = 0.01, 4.0, 1e-5, 10_000


def log_moment(order: int, q: float, sigma: float) -> float:
    """α(λ) of a sampled Gaussian as the paper's binomial sum."""
    power = order + 1
    return math.log(
        math.fsum(
            math.comb(power, k) * (1 - q) ** (power - k) * q**k * math.exp(k * (k - 1) / (2 * sigma**2))
            for k in range(power + 1)
        )
    )


def tail(log_moments: dict[int, float], delta: float) -> float:
    return min((moment - math.log(delta)) / order for order, moment in log_moments.items())


def trial(experiment: str, arm: str, size: str = "tiny") -> dict[str, object]:
    found = next(one for one in abadi.EXPERIMENTS if one.name == experiment)
    return found.trial(next(one for one in found.arms(size) if one.name == arm), 0, TINY)  # type: ignore[arg-type]


class TestEpsilon:
    def test_moments_accountant_is_the_tail_bound_over_the_binomial_sum(self) -> None:
        found = trial("abadi-epsilon", "moments")
        for steps, epsilon in zip(found["step"], found["epsilon_so_far"], strict=True):  # type: ignore[call-overload]
            moments = {order: steps * log_moment(order, Q, SIGMA) for order in range(1, 33)}
            assert epsilon == pytest.approx(tail(moments, DELTA), rel=1e-6)

    def test_strong_composition_is_the_printed_arithmetic(self) -> None:
        each = Q * math.sqrt(2 * math.log(1.25 * 2 * STEPS * Q / DELTA)) / SIGMA
        wanted = each * math.sqrt(2 * STEPS * math.log(2 / DELTA)) + STEPS * each**2
        assert trial("abadi-epsilon", "strong-printed")["epsilon"] == pytest.approx(wanted)
        assert round(wanted, 2) == 9.34


class TestNoise:
    def test_noise_meets_its_budget_and_the_law_is_as_printed(self) -> None:
        found = trial("abadi-noise", "moments accountant, over δ")
        for delta, noise, over in zip(found["value"], found["noise"], found["over_moments_law"], strict=True):  # type: ignore[call-overload]
            whole = tail({order: STEPS * log_moment(order, Q, noise) for order in range(1, 60)}, delta)
            assert 1.0 - 1e-3 <= whole <= 1.01  # whole orders alone give a little more
            assert over == pytest.approx(noise / (Q * math.sqrt(STEPS * math.log(1 / delta))))

    def test_savings_are_those_of_the_theorems(self) -> None:
        found = trial("abadi-savings", "strong composition")
        delta, part = found["root_log"][0] ** 2, found["epsilon_part"][0]  # type: ignore[index]
        one = math.log1p(Q * math.expm1(0.5))
        wanted = math.sqrt(2 * STEPS * delta) * one + STEPS * one * math.expm1(one)
        assert part == pytest.approx(wanted / (Q * 0.5 * math.sqrt(STEPS)))
        assert found["delta_part_over_steps"] == pytest.approx([1 + steps * Q for steps in (100, 100_000)])


class TestSettingsTried:
    def test_every_way_of_paying_for_two_settings(self) -> None:
        run = Repeat(Poisson(Q, Gaussian(SIGMA)), STEPS)
        calls = math.ceil(2 / 0.0625 * math.log(20))  # ε′ = 1/16 and β = 1/20

        def costs(event: Event, delta: float, accountant: str) -> object:
            return pytest.approx(account(event, Relation.ADD_REMOVE, accountant).epsilon(delta), rel=1e-12)

        def asked(way: str) -> float:
            return float(trial("abadi-selection", way)["of_two_settings"])  # type: ignore[arg-type]

        assert asked("one trial") == costs(run, DELTA, "rdp")
        assert asked("all settings added up") == costs(Repeat(run, 2), DELTA, "pld")
        assert asked("Gupta et al. (2010)") - 8 / 16 == costs(run, DELTA / calls, "rdp")

    def test_claims_see_the_number_of_settings(self) -> None:
        def found(*gupta: float) -> Outcomes:
            ways = {"all settings added up": (1.0, 2.0, 3.0), "Gupta et al. (2010)": gupta}
            return Outcomes({way: [{"settings": [2, 5, 10], "epsilon_of": list(e)}] for way, e in ways.items()})

        large, any_number, _ = abadi.SELECTION.claims
        assert (large.holds(found(1.5, 1.6, 1.7)), any_number.holds(found(1.5, 1.6, 1.7))) == (True, False)
        assert any_number.holds(found(0.5, 1.6, 1.7)) is True
        assert large.holds(found(0.5, 2.6, 1.7)) is False


class TestMechanism:
    @pytest.mark.parametrize(("epsilon", "noise", "pca"), [(e, *found[:2]) for e, found in abadi_mnist.PRINTED.items()])
    def test_steps_end_where_pca_and_training_spend_the_budget_together(
        self, epsilon: float, noise: float, pca: float
    ) -> None:
        def cost(steps: int) -> float:
            both = {k: k * (k + 1) / (2 * pca**2) + steps * log_moment(k, Q, noise) for k in range(1, 33)}
            return tail(both, DELTA)

        run, certified = abadi_mnist.mechanism(60_000, 600, epsilon, noise, pca, stop="moments")
        assert cost(run.steps) <= epsilon < cost(run.steps + 1)
        assert certified < epsilon

    def test_the_pca_is_charged(self) -> None:
        without, alone = abadi_mnist.mechanism(600, 60, 2.0, 4.0, stop="certified")
        charged, both = abadi_mnist.mechanism(600, 60, 2.0, 4.0, 4.0, stop="certified")
        assert charged.steps < without.steps
        assert max(alone, both) <= 2.0

    def test_certified_noise_takes_as_many_steps_with_less_noise(self) -> None:
        published, _ = abadi_mnist.mechanism(600, 60, 2.0, 4.0, 7.0, stop="moments")
        certified, epsilon = abadi_mnist.mechanism(600, 60, 2.0, 4.0, 7.0, stop="as-published")
        assert certified.steps == published.steps
        assert certified.noise_multiplier < published.noise_multiplier
        assert epsilon <= 2.0


def settled(experiment: str, earlier: Outcomes) -> dict[str, Arm]:
    found = next(one for one in abadi.EXPERIMENTS if one.name == experiment)
    assert found.settle is not None
    return {arm.name: found.settle(arm, {"abadi-search": earlier}) for arm in found.arms("full")}


class TestSearch:
    FOUND = Outcomes({
        "low": [{"accuracy": 90.0, "setting": {"method": "reference", "learning_rate": 0.2}}],
        "high": [{"accuracy": 92.0, "setting": {"method": "reference", "learning_rate": 0.8}}],
        "reach": [{"accuracy": 80.0, "setting": {"method": "convex", "reach": 5.0}}],
    })  # fmt: skip

    def test_the_best_rate_is_taken_by_every_arm(self) -> None:
        arms = settled("abadi-learning-rate", self.FOUND)
        rates = {name: (arm.setting["learning_rate"], arm.setting["last_rate"]) for name, arm in arms.items()}
        assert rates["falls, then stays"] == pytest.approx((0.8, 0.4))
        assert rates["constant, as at the end"] == pytest.approx((0.4, 0.4))
        assert {arm.setting["learning_rate"] for arm in settled("abadi-settings", self.FOUND).values()} == {0.8}

    def test_what_was_not_searched_for_keeps_its_own(self) -> None:
        arms = settled("abadi-batches", self.FOUND)
        reaches = {arm.setting["kind"]: arm.setting["reach"] for arm in arms.values()}
        assert reaches["convex"] == 5.0
        assert reaches["non-convex"] != 5.0

    def test_it_is_judged_on_training_rows_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = private_sgd.rows("mnist", TINY)
        seen: list[torch.Tensor] = []
        monkeypatch.setattr(abadi_mnist, "_fit", lambda setting, rows, seed, place: seen.append(rows.x_test) or {})
        abadi_mnist.SEARCH.trial(abadi_mnist.SEARCH.arms("tiny")[0], 0, TINY)
        assert all(any(torch.equal(row, other) for other in rows.x) for row in seen[0])


def test_the_learning_rate_falls_on_a_line_and_stays() -> None:
    setting = {"learning_rate": 0.1, "last_rate": 0.052, "decay_epochs": 10, "rows": 60_000, "lot": 600}
    rate = abadi_mnist._rate(setting, 5000)
    assert [rate(0), rate(500), rate(1000), rate(4999)] == pytest.approx([0.1, 0.076, 0.052, 0.052])


class TestLoop:
    def test_it_takes_the_steps_that_fit_takes(self) -> None:
        train = (torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)
        torch.manual_seed(1)
        one = nn.Linear(4, 3)
        other = copy.deepcopy(one)
        fitted = fit(
            one, train, steps=5, batch_size=20, delta=1e-3, seed=7, privacy=Privacy(noise_multiplier=1.0),
            method=recipes.dpsgd_momentum(clip=1.0, learning_rate=0.1, momentum=0.6),
        )  # fmt: skip
        private_sgd.trained(other, train, fitted.plan.mechanism, 0.1, 7, momentum=0.6, look={}, points=2)
        assert torch.equal(one.weight, other.weight)

    def test_gradient_norms_are_those_of_single_examples(self) -> None:
        rows = private_sgd.rows("mnist", TINY).few(6)
        model = abadi_mnist.network(256, [5], 10)
        wanted = []
        for x, y in zip(rows.x, rows.y, strict=True):
            loss = nn.functional.cross_entropy(model(x[None]), y[None])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            wanted.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads)))
        assert private_sgd.gradient_norm(model, rows.train) == pytest.approx(sum(wanted) / 6, rel=1e-5)
