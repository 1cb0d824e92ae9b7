"""Yu et al. (2018): schedules, readings of σ̃ and claims of their experiments against what follows by hand."""

import json
from pathlib import Path

import pytest

from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Gaussian, Poisson
from dpgrad.papers import yu2018, yu2018_noise
from dpgrad.papers.experiment import Arm, Outcomes, Place

RESULTS = Path(__file__).resolve().parents[2] / "results"
BY_NAME = {experiment.name: experiment for experiment in yu2018.EXPERIMENTS}
# target epochs: σ̃ of a constant bound and how long it lasts, and the least σ̃ of the falling bound
READINGS = {5: (0.86, 5039, 0.704), 10: (0.96, 6229, 0.758), 20: (1.15, 9159, 0.861), 40: (1.46, 15219, 1.060)}


class TestReadings:
    """ε = 2, δ = 1e-5, q = 0.01."""

    @pytest.mark.parametrize("epochs", READINGS)
    def test_committed_results_are_the_known_values(self, epochs: int) -> None:
        noise, steps, least = READINGS[epochs]
        lines = [json.loads(line) for line in (RESULTS / "yu2018-readings.jsonl").read_text("utf-8").splitlines()]
        (found,) = [line["figures"] for line in lines if line["arm"] == f"{epochs} epochs"]
        assert found["noise_multiplier"] == noise
        assert abs(found["steps"] - steps) <= 2  # certified: a step or two fewer than by the exact ε
        assert found["least_noise_multiplier"] == pytest.approx(least, abs=6e-4)
        assert found["epsilon"] <= 2.0

    def test_committed_noise_is_that_of_the_arms(self) -> None:
        """The figures take noise and steps from there: every arm must find its own."""
        lines = [json.loads(line) for line in (RESULTS / "yu2018-noise.jsonl").read_text("utf-8").splitlines()]
        earlier = Outcomes({line["arm"]: [{**line["figures"], "setting": line["setting"]}] for line in lines})
        for name in (
            "yu2018-figure2-cnn",
            "yu2018-figure2-softmax",
            "yu2018-figure4-mnist",
            "yu2018-figure4-covertype",
        ):
            settle = BY_NAME[name].settle
            assert settle is not None
            arms = {arm.name: settle(arm, {"yu2018-noise": earlier}).setting for arm in BY_NAME[name].arms("full")}
            assert all("noise_multiplier" in setting for setting in arms.values())
            for arm, setting in arms.items():
                longer = setting["steps"] > setting["target_steps"]
                assert longer == ("more steps" in arm), arm


class TestMechanism:
    def test_the_noise_is_held_while_the_bound_falls(self) -> None:
        run, _ = yu2018_noise.mechanism(
            240, 0.25, 4, 2.0, 1e-5, clip_schedule="linear", accountant="rdp", reading="more-steps"
        )
        for step in range(min(run.steps, 8)):
            share = min(2.0, 1 + step / 4)
            assert run.clip_at(step) == pytest.approx(12.0 / share)
            assert run.std_at(step) == pytest.approx(run.noise_multiplier * 12.0)
        assert run.batch_size == 60

    def test_epsilon_is_that_of_every_step_at_its_own_noise(self) -> None:
        run, epsilon = yu2018_noise.mechanism(240, 0.25, 4, 2.0, 1e-5, clip_schedule="linear")
        shares = [min(2.0, 1 + step / 4) for step in range(4)]
        event = Compose(tuple(Poisson(0.25, Gaussian(run.noise_multiplier * share)) for share in shares))
        assert epsilon == pytest.approx(account(event).epsilon(1e-5), rel=1e-4)
        assert epsilon <= 2.0
        less = Compose(tuple(Poisson(0.25, Gaussian((run.noise_multiplier - 0.01) * share)) for share in shares))
        assert account(less).epsilon(1e-5) > 2.0  # the least to 0.01

    def test_a_replaced_row_costs_more_than_a_missing_one(self) -> None:
        (one, _), (other, _) = (
            yu2018_noise.mechanism(240, 0.25, 4, 2.0, 1e-5, relation=relation, accountant="rdp")
            for relation in ("add-remove", "replace-one")
        )
        assert other.noise_multiplier > one.noise_multiplier

    def test_what_was_found_before_is_not_searched_for(self) -> None:
        run, epsilon = yu2018_noise.mechanism(240, 0.25, 4, 2.0, 1e-5, noise_multiplier=5.0, steps=7)
        assert (run.noise_multiplier, run.steps) == (5.0, 7)
        assert epsilon < 2.0


def outcomes(**accuracies: float) -> Outcomes:
    """Two trials of each arm, 0.01 apart."""
    return Outcomes({
        name.replace("_", " "): [{"accuracy": value - 0.005}, {"accuracy": value + 0.005}]
        for name, value in accuracies.items()
    })  # fmt: skip


class TestClaims:
    def claim(self, name: str, beginning: str) -> object:
        return next(claim.holds for claim in BY_NAME[name].claims if claim.text.startswith(beginning))

    def test_the_advantage_is_compared_between_few_and_many_epochs(self) -> None:
        def run(gain_at_5: float, gain_at_40: float) -> Outcomes:
            trials = {}
            for epochs, gain in ((5, gain_at_5), (40, gain_at_40)):
                trials[f"DP-SGD, {epochs} epochs"] = [{"accuracy": 80.0}, {"accuracy": 80.1}]
                trials[f"both, less noise, {epochs} epochs"] = [{"accuracy": 80 + gain}, {"accuracy": 80.1 + gain}]
            return Outcomes(trials)

        holds = self.claim("yu2018-figure2-cnn", "the advantage grows as the budget (steps) shrinks (less")
        assert holds(run(5.0, 1.0)) is True  # type: ignore[operator]
        assert holds(run(1.0, 5.0)) is False  # type: ignore[operator]
        assert holds(run(1.0, 1.05)) is None  # type: ignore[operator]

    def test_amended_is_compared_with_dp_sgd_of_as_many_epochs(self) -> None:
        holds = self.claim("yu2018-figure4-covertype", "the amended algorithm is above")
        names = {f"DP-SGD, {epochs} epochs": 60.0 for epochs in (2, 5, 10)}
        names |= {f"amended, {epochs} epochs": 62.0 for epochs in (2, 5, 10)} | {"amended, more steps, 5 epochs": 50.0}
        assert holds(outcomes(**names)) is True  # type: ignore[operator]
        assert holds(outcomes(**{**names, "amended, 2 epochs": 59.0})) is False  # type: ignore[operator]
        del names["amended, 10 epochs"]
        assert holds(outcomes(**names)) is None  # type: ignore[operator]

    def test_what_any_target_may_reach_needs_all_of_them_to_be_refuted(self) -> None:
        holds = self.claim("yu2018-figure4-mnist", "the amended algorithm reaches")
        rest = {f"CNN: amended, {epochs} epochs": 85.0 for epochs in (5, 10, 20)}
        rest |= {f"CNN: amended, {how}, 10 epochs": 85.0 for how in ("arithmetic", "more steps")}
        assert holds(outcomes(**rest)) is False  # type: ignore[operator]
        assert holds(outcomes(**{**rest, "CNN: amended, 20 epochs": 92.0})) is True  # type: ignore[operator]
        del rest["CNN: amended, 20 epochs"]
        assert holds(outcomes(**rest)) is None  # type: ignore[operator]

    def test_an_improvement_at_all_target_epochs_needs_all_of_them(self) -> None:
        holds = self.claim("yu2018-figure2-cnn", "momentum c = 0.6 improves")
        names = {f"DP-SGD, {epochs} epochs": 60.0 for epochs in (5, 10, 20, 40)}
        names |= {f"momentum, {epochs} epochs": 62.0 for epochs in (5, 10, 20)}
        assert holds(outcomes(**names)) is None  # type: ignore[operator]
        assert holds(outcomes(**names, **{"momentum, 40 epochs": 62.0})) is True  # type: ignore[operator]
        assert holds(outcomes(**names, **{"momentum, 40 epochs": 59.0})) is False  # type: ignore[operator]

    def test_a_coefficient_outside_the_claimed_ones_refutes_it(self) -> None:
        holds = self.claim("yu2018-figure3", "the best accuracy")
        assert holds(outcomes(**{"c = 0": 90.0, "c = 0.6": 91.0, "c = 0.9": 89.0})) is True  # type: ignore[operator]
        assert holds(outcomes(**{"c = 0": 90.0, "c = 0.6": 91.0, "c = 0.9": 92.0})) is False  # type: ignore[operator]


def test_a_budget_that_was_not_found_is_searched_for_in_the_trial() -> None:
    arm = BY_NAME["yu2018-figure3"].arms("tiny")[0]
    assert yu2018_noise.settled(arm, {"yu2018-noise": Outcomes({})}) == arm
    found = BY_NAME["yu2018-figure3"].trial(Arm(arm.name, arm.setting), 0, Place(size="tiny"))
    assert found["epsilon"] <= 2.0
    assert found["steps"] == arm.setting["target_steps"]
