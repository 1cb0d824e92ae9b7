"""What choosing costs, and the noise that a budget leaves for one trial."""

from typing import Any

import pytest

from dpgrad import Privacy, Relation, recipes
from dpgrad.accounting import account
from dpgrad.accounting.events import Gaussian, Poisson, Repeat, Selection
from dpgrad.accounting.trials import PoissonTrials
from dpgrad.errors import BudgetSpentError, DpgradError, OptionError
from dpgrad.tuning import Configuration, PrivateScore, PublicScore, plan, price

PUBLIC = PublicScore(function=lambda model: 0.0)
TWO = [Configuration(recipes.dpsgd(clip=c, learning_rate=1.0), steps=20, batch_size=50) for c in (0.1, 1.0)]
SETTINGS: dict[str, Any] = {"rows": 1000, "score": PUBLIC, "epsilon": 3.0, "delta": 1e-5}


def test_prices_are_those_of_the_accountants() -> None:
    trial = Repeat(Poisson(0.05, Gaussian(2.0)), 50)
    found = {one.name: one for one in price(trial, mean=8, delta=1e-5, relation=Relation.ZERO_OUT, settings=4)}
    assert found["one trial"].epsilon == account(trial, Relation.ZERO_OUT, "rdp").epsilon(1e-5)
    composed = found["composition of 8 trials"].epsilon
    assert composed == account(Repeat(trial, 8), Relation.ZERO_OUT, "pld").epsilon(1e-5)
    assert found["composition of all 4 settings"].epsilon < composed
    poisson = account(Selection((trial,), PoissonTrials(8.0)), Relation.ZERO_OUT, "rdp").epsilon(1e-5)
    assert found["best of a random number, poisson"].epsilon == poisson
    best = {name: found[f"best of a random number, {name}"].epsilon for name in ("logarithmic", "geometric")}
    searched = found["first to meet a target"]
    assert found["one trial"].epsilon < searched.epsilon < best["logarithmic"] < best["geometric"]
    assert (searched.trials, searched.most) == (8, 35)  # 35 = ceil(log 0.01/log(7/8))


@pytest.mark.parametrize(("trials", "relation"), [("logarithmic", "replace-one"), ("poisson", "zero-out")])
def test_a_plan_is_within_its_budget_and_uses_it(trials: str, relation: str) -> None:
    found = plan(TWO, **SETTINGS, trials=trials, mean=6, privacy=Privacy(relation=relation))
    assert found.guarantee.epsilon <= 3.0
    assert found.guarantee.epsilon > 2.95
    priced = account(found.event, Relation(relation), "rdp").epsilon(1e-5)
    assert priced == found.guarantee.epsilon
    assert found.event.events == tuple(one.mechanism.event() for one in found.plans)
    assert "needs no tuning" in str(plan(TWO, **SETTINGS, parameters=10))


def test_a_private_score_is_part_of_every_trial() -> None:
    public, private = plan(TWO, **SETTINGS), plan(TWO, **(SETTINGS | {"score": PrivateScore(0.1, 10.0)}))
    assert all(Gaussian(20.0) in trial.events for trial in private.event.events)  # type: ignore[union-attr]
    assert private.trial_epsilon < public.trial_epsilon
    with pytest.raises(BudgetSpentError, match="with this private score"):
        plan(TWO, **(SETTINGS | {"score": PrivateScore(0.1, 0.1)}))


def test_configurations_of_every_kind_cost_the_same() -> None:
    many: list[Any] = [*TWO, "auto", Configuration("dpgd", steps=9), Configuration("autos", epochs=2, batch_size=20)]
    found = plan(many, **SETTINGS, parameters=10)
    each = [one.guarantee.epsilon for one in found.plans]
    assert each == pytest.approx([found.trial_epsilon] * 5, rel=1e-3)
    assert found.to_dict()["prices"][0]["name"] == "one trial"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"configurations": []}, "at least one"),
        ({"configurations": [*TWO, TWO[0]]}, "0 and 2 are the same"),
        ({"configurations": ["nothing"]}, "method must be"),
        ({"trials": "binomial"}, "trials must be"),
        ({"trials": PoissonTrials(3.0), "mean": 2.0}, "leave out mean"),
        ({"mean": 0.5}, "mean number of trials"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 0.1}, "delta must be below"),
        ({"privacy": Privacy(noise_multiplier=1.0)}, "leave out noise_multiplier"),
        ({"privacy": Privacy(also_released=Gaussian(9.0))}, "also_released is not priced"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    settings = {"configurations": TWO, **SETTINGS} | changed
    with pytest.raises(DpgradError, match=message):
        plan(settings.pop("configurations"), **settings)


def test_one_configuration_may_be_tried_again_and_again() -> None:
    assert len(plan(TWO[:1], **SETTINGS).plans) == 1
    with pytest.raises(OptionError, match="rows that are not protected"):
        PublicScore()
