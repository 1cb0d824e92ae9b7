"""Plans: what a budget becomes, both readings of Yu et al., what is refused, and what the papers suggest."""

import dataclasses
import json
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from dpgrad import Relation
from dpgrad.accounting import ACCOUNTANTS, account
from dpgrad.accounting.events import NOTHING, Compose, Event, Gaussian, Poisson, Repeat
from dpgrad.errors import OptionError
from dpgrad.mechanism import schedules
from dpgrad.mechanism.mechanism import Group
from dpgrad.reports import compare
from dpgrad.training.plan import Plan, accumulated_noise, make, theorem_2_learning_rate, theorem_3_scales

MNIST: dict[str, Any] = {"rows": 60_000, "batch_size": 512, "epochs": 20}
SMALL: dict[str, Any] = {"rows": 1000, "batch_size": 50, "steps": 100, "noise_multiplier": 2.0, "delta": 1e-4}


def small(method: str = "dpsgd", **options: Any) -> Plan:
    return make(method, **SMALL | options)


class TestBudget:
    def test_epsilon_and_epochs_give_noise_over_the_whole_run(self) -> None:
        plan = make("psasc", **MNIST, epsilon=3.0, delta=1e-5)
        assert plan.steps == int(20 * 60_000 / 512) == 2343
        assert plan.mechanism.event() == Repeat(Poisson(512 / 60_000, Gaussian(plan.mechanism.noise_multiplier)), 2343)
        assert 2.999 < plan.guarantee.epsilon <= 3.0
        assert (plan.ends, plan.reading, plan.target) == ("plan", None, 3.0)
        assert plan.guarantee == plan.mechanism.guarantee(1e-5)
        assert plan.epochs == pytest.approx(20, rel=1e-3)

    def test_noise_alone_costs_what_it_costs(self) -> None:
        plan = small()
        assert plan.target is None
        assert plan.mechanism.noise_multiplier == 2.0
        assert plan.guarantee.epsilon == plan.mechanism.guarantee(1e-4).epsilon

    def test_noise_and_epsilon_stop_before_the_step_that_overspends(self) -> None:
        plan = small(steps=None, epsilon=2.0)
        assert plan.ends == "budget"
        assert plan.guarantee.epsilon <= 2.0
        assert plan.mechanism.with_steps(plan.steps + 1).guarantee(1e-4).epsilon > 2.0

    def test_noise_and_epsilon_and_steps_are_checked(self) -> None:
        cost = small().guarantee.epsilon
        assert small(epsilon=cost + 0.01).ends == "plan"
        with pytest.raises(ValueError, match=r"over 100 steps costs epsilon .*, above the budget 0\.1"):
            small(epsilon=0.1)

    def test_the_two_readings_of_yu(self) -> None:
        """Their step counts at ε = 2 are in the tests of the mechanism, whose answers these are."""
        budget = {"steps": 40, "epsilon": 2.0, "noise_multiplier": None, "accountant": "rdp"}
        less = small("dpsgd-dynamic", **budget)
        assert less.mechanism == small("dpsgd-dynamic", **budget, reading="less-noise").mechanism
        assert (less.steps, less.ends) == (40, "plan")
        more = small("dpsgd-dynamic", **budget, reading="more-steps")
        assert more.ends == "budget"
        assert more.mechanism == less.mechanism.more_steps(2.0, 1e-4, "rdp")
        # noise for a constant bound, to two digits; it lasts longer, because the bound shrinks on the target's clock
        constant = small(**budget).mechanism.noise_multiplier
        assert less.mechanism.noise_multiplier < constant < more.mechanism.noise_multiplier < constant + 0.01
        assert more.steps > 40
        assert more.mechanism.clip == less.mechanism.clip == schedules.linear(12.0, 40)
        assert max(more.guarantee.epsilon, less.guarantee.epsilon) <= 2.0

    def test_noise_given_with_more_steps_runs_on_over_the_schedule(self) -> None:
        plan = small("dpsgd-dynamic", steps=20, epsilon=1.0, reading="more-steps", accountant="rdp")
        assert plan.ends == "budget"
        assert plan.steps > 20
        assert plan.mechanism.clip == schedules.linear(12.0, 20)
        further = plan.mechanism.with_steps(plan.steps + 1).guarantee(1e-4, "rdp")
        assert further.epsilon > 1.0 >= plan.guarantee.epsilon

    def test_what_is_released_beside_is_within_the_budget(self) -> None:
        beside = Gaussian(5.0)
        alone = small(epsilon=2.0, noise_multiplier=None)
        plan = small(epsilon=2.0, noise_multiplier=None, also_released=beside)
        assert plan.mechanism.noise_multiplier > alone.mechanism.noise_multiplier
        both = account(Compose((beside, plan.mechanism.event())), Relation.ZERO_OUT).epsilon(1e-4)
        assert plan.guarantee.epsilon == both <= 2.0
        assert plan.epsilon_after(0) == account(beside, Relation.ZERO_OUT).epsilon(1e-4)

    def test_every_accountant_that_proves_something_may_be_chosen(self) -> None:
        for name in ("rdp", "moments", "strong"):
            assert small(accountant=name).guarantee.accountant == name
        with pytest.raises(ValueError, match="historical comparison"):
            small(accountant="strong-printed")

    @pytest.mark.parametrize("z", [2.0, None])
    def test_full_batches(self, z: float | None) -> None:
        plan = make("dpgd", rows=100, epochs=7, noise_multiplier=z, delta=1e-3, epsilon=None if z else 1.0)
        assert plan.steps == 7
        assert plan.batch_size == plan.mechanism.divisor == 100
        assert plan.mechanism.event() == Repeat(Gaussian(plan.mechanism.noise_multiplier), 7)


class TestSizes:
    def test_lots_an_epoch_are_as_many_as_epochs_unless_told(self) -> None:
        assert small(batch_size=None, steps=None, epochs=20).batch_size == 50
        assert small(batch_size=None, steps=400).batch_size == 50

    def test_a_size_from_the_data_gives_zero_out_and_a_declared_one_add_remove(self) -> None:
        counted, declared = small(), small(dataset_size=1000)
        assert counted.mechanism.relation is Relation.ZERO_OUT
        assert declared.mechanism.relation is Relation.ADD_REMOVE
        assert small(relation="replace-one").mechanism.relation is Relation.REPLACE_ONE
        assert "the number of rows (1,000, taken from the data)" in counted.public
        assert "the number of rows (1,000, declared)" in declared.public
        with pytest.raises(ValueError, match="relation add-remove needs a declared dataset_size"):
            small(relation="add-remove")
        with pytest.raises(ValueError, match=r"relation must be one of .* got 'neighbours'"):
            small(relation="neighbours")

    def test_the_divisor_is_the_lot_whatever_is_drawn(self) -> None:
        assert small().mechanism.divisor == 50.0
        assert small(batch_size=12.5).mechanism.divisor == 12.5


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"noise_multiplier": None}, "a budget is required: give epsilon and delta"),
            ({"delta": None}, "delta is required: the probability that the ε bound fails"),
            ({"epsilon": 1.0, "noise_multiplier": None, "delta": None}, "delta is required"),
            ({"delta": 1e-3}, r"delta must be below 1/n = 0\.001, got 0\.001"),
            ({"delta": 0.0}, "delta must lie strictly between 0 and 1"),
            ({"epsilon": -1.0}, "epsilon must be positive"),
            ({"epsilon": math.inf}, "epsilon must be positive and finite"),
            ({"noise_multiplier": 0.0}, "noise_multiplier must be positive"),
            ({"batch_size": 1001}, "batch_size must be at most the number of rows, 1,000, got 1001"),
            ({"batch_size": 0}, "batch_size must be positive"),
            ({"steps": None, "epochs": 1e308}, "steps must be at most"),
            ({"steps": None, "epochs": 0}, "epochs must be positive and finite, got 0"),
            ({"steps": None, "epochs": 0.01}, r"epochs = 0\.01 of 1,000 rows in batches of 50 make no step"),
            ({"epochs": 3}, "epochs and steps both say how long"),
            ({"steps": None}, "epochs or steps is required"),
            ({"steps": 0}, "steps must be a whole number of at least 1"),
            ({"reading": "less-steps", "epsilon": 1.0}, "reading must be one of less-noise, more-steps"),
            ({"reading": "less-noise"}, "reading says how a budget is used: give epsilon"),
            ({"rows": 0}, "data must hold at least one row"),
            ({"batch_size": None, "steps": None, "epsilon": 1.0}, "batch_size is required"),
            ({"learning_rate": -0.1}, "learning_rate must be positive"),
            (
                {"learning_rate": schedules.constant(0.1), "learning_rate_schedule": "cosine"},
                "learning_rate is a schedule",
            ),
            ({"learning_rate": lambda t: math.nan}, "learning_rate at step 0 must be zero or more"),
            ({"learning_rate_schedule": "step"}, "learning_rate_schedule must be constant, .* got 'step'"),
            ({"schedule_steps": 5}, "schedule_steps is for a clip_schedule, and dpsgd has none"),
            ({"method": "dpsgd-dynamic", "schedule_steps": 0}, "schedule_steps must be a whole number of at least 1"),
            ({"averaging": "swa"}, "averaging must be ema:DECAY or tail:SHARE, got 'swa'"),
            ({"accountant": "gdp"}, "accountant must be one of pld, .* got 'gdp'"),
            ({"method": "sgd"}, "method must be a Recipe or one of dpsgd, .* got 'sgd': did you mean dpsgd"),
            ({"method": "dpgd", "batch_size": 10}, "method dpgd takes all 1,000 rows at every step"),
            ({"method": "psasc-gd", "batch_size": None, "momentum": -0.1}, r"momentum must lie in \[0, 1\)"),
        ],
    )
    def test_one_clear_line(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as raised:
            small(**options)
        assert "\n" not in str(raised.value)

    def test_a_clip_schedule_without_a_clock(self) -> None:
        with pytest.raises(ValueError, match="schedule_steps is required"):
            small("dpsgd-dynamic", steps=None, epsilon=2.0)
        plan = small("dpsgd-dynamic", steps=None, epsilon=1.0, schedule_steps=30, accountant="rdp")
        assert plan.mechanism.clip == schedules.linear(12.0, 30)


class TestSchedules:
    def test_clip_schedules_by_name_hold_the_noise(self) -> None:
        mechanism = small(clip=8.0, clip_schedule="geometric:0.001").mechanism
        assert mechanism.clip == schedules.geometric(8.0, 0.999, 4.0)
        assert mechanism.hold_noise
        assert mechanism.std_at(50) == mechanism.std_at(0) == 16.0

    def test_learning_rates(self) -> None:
        assert small().learning_rate == 0.02
        assert small(learning_rate=0.5).learning_rate_at(99) == 0.5
        assert small(learning_rate=0.5, learning_rate_schedule="cosine:0.1").learning_rate == schedules.cosine(
            0.5, 0.05, 100
        )
        assert small(learning_rate_schedule="decay-then-hold:0.5:2").learning_rate == schedules.decay_then_hold(
            0.02, 0.01, 40
        )
        assert small(learning_rate=schedules.constant(2.0)).learning_rate_at(3) == 2.0

    def test_groups_act_as_one_multiplier(self) -> None:
        plan = small(groups=(Group("a*"), Group("b*", clip=0.5)))
        assert plan.mechanism.multiplier_at(0) == pytest.approx(2.0 / math.sqrt(2))
        assert plan.guarantee.epsilon > small().guarantee.epsilon


class TestSuggestions:
    @pytest.mark.parametrize("c", [0.3, 0.6, 0.9])
    def test_momentum_carries_the_noise_that_a_simulation_shows(self, c: float) -> None:
        """20,000 momenta of 30 steps: the variance has a relative standard error of 1 %; 5 of them is the bound."""
        random, m = np.random.default_rng(0), np.zeros(20_000)
        for _ in range(30):
            m = c * m + random.standard_normal(20_000)
        assert np.var(m) == pytest.approx(accumulated_noise(c, 30), rel=0.05)

    def test_accumulated_noise_of_the_papers(self) -> None:
        assert accumulated_noise(0.9, 10_000) == pytest.approx(1 / 0.19)
        assert accumulated_noise(0.9, 1) == 1.0
        plan = small("psasc-momentum", momentum=0.6)
        assert plan.momentum_noise == pytest.approx(1 / (1 - 0.36))
        text = dict(plan.suggestions())["momentum"]
        assert "c = 0.6" in text
        assert "γ₁ = 0.4" in text
        assert "1.56 times" in text
        with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\)"):
            accumulated_noise(1.0, 5)

    def test_theorem_2(self) -> None:
        wanted = (2 * 0.8**2 * 2.3 / (1.5 * 400 * (2 + 1.1**2 * 5000))) ** 0.5
        found = theorem_2_learning_rate(400, 1.1, 5000, s=0.8, loss=2.3, smoothness=1.5)
        assert found == pytest.approx(wanted, rel=1e-12)
        plan = small("psasc", parameters=5000, classes=10)
        rate = theorem_2_learning_rate(100, 2.0, 5000, s=0.9, loss=math.log(10), smoothness=1.0)
        assert f"η = {rate:.3g} at C = 1" in dict(plan.suggestions())["Theorem 2"]
        assert "Theorem 2" not in dict(small("psasc").suggestions())  # without a model there is no number

    def test_theorem_3(self) -> None:
        assert theorem_3_scales(16) == {"r": 0.25, "s": 0.5, "gamma": 0.5, "learning_rate": 0.125}
        assert (
            "r = 0.1, s = 0.316, gamma = 0.316, learning_rate = 0.0316"
            in dict(small("psasc").suggestions())["Theorem 3"]
        )

    def test_rules_of_thumb(self) -> None:
        plan = make("dpsgd", rows=60_000, batch_size=600, epochs=20, noise_multiplier=1.0, delta=1e-5)
        text = dict(plan.suggestions())["batches"]
        assert "100 batches an epoch for 20 epochs" in text
        assert "batches of about 3000 for as many epochs, 1342 for as many steps" in text  # 60,000/20, 60,000/√2000
        assert "learning rate" not in dict(plan.suggestions())
        assert "no need to end near zero" in dict(small(learning_rate_schedule="cosine").suggestions())["learning rate"]

    def test_a_delta_near_one_over_n(self) -> None:
        def told(rows: int, delta: float) -> dict[str, str]:
            return dict(
                make("dpsgd", rows=rows, batch_size=600, steps=100, noise_multiplier=1.0, delta=delta).cautions()
            )

        assert "choose it well below, e.g. 1e-6" in told(60_000, 1e-5)["delta"]
        assert "delta" not in told(60_000, 1e-6)
        with pytest.raises(OptionError, match=r"delta must be below 1/n = 5e-06, got 1e-05: .*choose e.g. 1e-7"):
            told(200_000, 1e-5)

    def test_noise_above_all_signal_is_told(self) -> None:
        """√T·B/σ is what steps of gradients that all agree add up to, in standard deviations of the sum of noise."""
        random, useless = np.random.default_rng(0), make("dpgd", rows=100, steps=64, noise_multiplier=40.0, delta=1e-5)
        sums = 40.0 * random.standard_normal((20_000, 64)).sum(1)  # in units of the clip bound
        assert useless.reach == pytest.approx(64 * 100 / np.std(sums), rel=0.05)
        text = dict(useless.suggestions())["usefulness"]
        assert "add up to 20 times the noise" in text
        assert "usefulness" not in dict(make("dpgd", rows=1000, steps=64, noise_multiplier=40.0, delta=1e-5).cautions())
        assert text in useless.report()["notes"]

    def test_in_words(self) -> None:
        plan = small(learning_rate_schedule="cosine:0.1")
        assert str(plan).splitlines() == plan.lines()
        assert "\n" not in repr(plan)
        assert re.search(r"learning rate +[\d.]+ at step 0, [\d.]+ at the last", str(plan))
        assert "0x" not in str(plan)

    def test_noise_bias_of_adam(self) -> None:
        plan = small(optimizer="adam", clip=2.0)
        assert "noise bias" not in dict(small().suggestions())
        text = dict(plan.suggestions())["noise bias"]
        floor = 2.0 * 2.0 / 50
        assert f"{floor**2:.3g} is added to every squared gradient" in text
        assert f"below {floor:.3g}" in text


class TestShown:
    @pytest.mark.parametrize("method", ["dpsgd", "dpsgd-amended", "psasc-momentum", "dpgd"])
    def test_json(self, method: str) -> None:
        plan = small(method, steps=10, **({"batch_size": None} if method == "dpgd" else {}))
        found = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
        assert found["epsilon"] == plan.guarantee.epsilon
        assert found["relation"] == "zero-out"
        assert set(found["accountants"]) == set(ACCOUNTANTS)
        assert found["accountants"]["pld"]["epsilon"] == plan.guarantee.epsilon
        assert found["accountants"]["rdp"]["epsilon"] > plan.guarantee.epsilon
        assert found["accountants"]["strong-printed"].get("guarantee") is not True
        assert type(plan.mechanism).from_dict(found["mechanism"]) == plan.mechanism

    def test_numbers_of_numpy_go_to_json_too(self) -> None:
        numbers = {
            "rows": np.int64(1000),
            "batch_size": np.float32(50),
            "delta": np.float32(1e-4),
            "steps": np.int64(3),
        }
        found = json.dumps(small(**numbers, epsilon=np.float32(9.0)).to_dict())
        assert json.loads(found)["batch_size"] == 50

    def test_a_learning_rate_that_is_a_plain_function(self) -> None:
        plan = small(learning_rate=lambda step: 0.1, steps=3)
        assert json.loads(json.dumps(plan.to_dict()))["learning_rate"] == {"schedule": "function"}

    def test_lines(self) -> None:
        plan = dataclasses.replace(small("psasc-momentum", epsilon=1.0, steps=None), seconds=12.5)
        text = "\n".join(plan.lines())
        for part in (
            "noise multiplier  2", "clip bound        0.333333", "learning rate     0.32 (sgd",
            "as many as the budget allows", str(plan.guarantee), "  rdp", "momentum  ",
            "Theorem 3", "chosen by us      learning_rate, momentum, gamma, length", "expected time     12.5 s",
        ):  # fmt: skip
            assert part in text
        assert "2 at step 0, 4 at the last" in "\n".join(small("dpsgd-dynamic", steps=11, schedule_steps=10).lines())

    def test_the_cost_of_the_first_steps(self) -> None:
        plan = small()
        assert plan.epsilon_after(0) == 0.0
        assert plan.epsilon_after(10) == plan.mechanism.with_steps(10).guarantee(1e-4).epsilon
        assert plan.epsilon_after(100) == plan.guarantee.epsilon


@pytest.mark.parametrize("beside", [NOTHING, Gaussian(30.0)])
def test_figures_of_rounded_noise_are_marked(monkeypatch: pytest.MonkeyPatch, beside: Event) -> None:
    """Moments and its binomial sum are the same bound: where they differ, the words and the JSON say why."""
    monkeypatch.setattr(compare, "coarse", partial(compare.coarse, most=15))
    options: dict[str, Any] = {"rows": 1000, "batch_size": 50, "noise_multiplier": 2.0, "delta": 1e-4}
    for steps, rounded in ((10, False), (20, True)):
        plan = make("dpsgd-dynamic", steps=steps, accountant="moments", also_released=beside, **options)
        figures = plan.to_dict()["accountants"]
        assert {name for name, found in figures.items() if found.get("noise_rounded")} == (
            {name for name, found in figures.items() if "epsilon" in found} - {"moments"} if rounded else set()
        )
        assert (figures["moments"]["epsilon"] < figures["moments-closed"]["epsilon"] * (1 - 1e-6)) == rounded
        said = "\n".join(plan.lines())
        assert ("noise rounded down by up to 0.1 %" in said) == rounded
        assert said.count("ε = ~") == (sum(found["noise_rounded"] for found in figures.values() if "epsilon" in found))
