"""Method auto: a budget is a complete call, and everything it chooses follows from public facts."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpgrad
from dpgrad import errors, recipes
from dpgrad.reports import report
from dpgrad.training import auto
from dpgrad.training.options import Budget, Privacy
from dpgrad.training.plan import make

BUDGET = {"epsilon": 3.0, "delta": 1e-5}


def rows(count: int = 60, columns: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] > 0).long()


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, outputs)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def stopped(data: Any, loss: Any = "cross-entropy", model: nn.Module | None = None, **options: Any) -> dpgrad.Fitted:
    """A run of the whole plan that is stopped after its first step."""
    return dpgrad.fit(model or network(), data, loss, callbacks=lambda seen: True, **{**BUDGET, **options})


def test_a_budget_is_a_complete_call() -> None:
    data, test = rows(300), rows(200, seed=5)
    fitted = dpgrad.fit(network(), data, **BUDGET, held_out=test, seed=3)
    assert fitted.plan.recipe.name == "auto"
    assert fitted.guarantee.epsilon <= 3
    assert fitted.plan.steps == 144
    assert fitted.held_out is not None
    assert fitted.held_out > 0.8
    again = dpgrad.fit(network(), data, **BUDGET, held_out=test, seed=3)
    assert torch.equal(weights(fitted.model), weights(again.model))
    other = dpgrad.fit(network(), data, **BUDGET, seed=4)
    assert not torch.equal(weights(fitted.model), weights(other.model))


def test_the_plan_does_not_depend_on_the_values_of_the_data() -> None:
    some, others = rows(), rows(seed=1)
    found = stopped(some).plan
    assert found == stopped((others[0] * 1e6, 1 - others[1])).plan
    assert found != stopped(rows(61)).plan


def test_a_declared_size_takes_the_place_of_the_number_of_rows() -> None:
    found = stopped(rows(100), privacy=Privacy(dataset_size=99)).plan
    assert found == stopped(rows(98), privacy=Privacy(dataset_size=99)).plan
    assert found.dataset_size == 99
    assert found.guarantee.relation == dpgrad.Relation.ADD_REMOVE


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.cell(x)[0].mean(1))
        return found


def squared(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square()


images = torch.zeros(40, 1, 6, 6)
CASES: dict[str, Any] = {
    "regression": (lambda: nn.Linear(3, 1), (rows()[0], rows()[0][:, 1]), "squared", {}),
    "bce": (lambda: nn.Linear(3, 1), (rows()[0], rows()[1][:, None].float()), "bce", {}),
    "own loss, recurrent": (Pooled, (torch.randn(40, 5, 3), torch.randn(40)), squared, {}),
    "augmented": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2)), (images, torch.zeros(40).long()),
        "cross-entropy", {"method": recipes.auto(augment=dpgrad.augment.Shifts(2))},
    ),
    "several rows": (
        lambda: nn.Linear(3, 2), (torch.randn(20, 4, 3), torch.zeros(20, 4).long()), "cross-entropy",
        {"privacy": Privacy(several_rows=True)},
    ),
    "one row": (lambda: nn.Linear(3, 2), rows(1), "cross-entropy", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_other_models_losses_and_rows(case: str) -> None:
    made, data, loss, options = CASES[case]
    model = made()
    before = weights(model)
    fitted = stopped(data, loss, model, **options)
    assert fitted.guarantee.epsilon <= 3
    assert not torch.equal(before, weights(model))
    assert bool(weights(model).isfinite().all())


def test_frozen_weights_do_not_count() -> None:
    """Fine-tuning: the rate follows from what is trained."""
    model = nn.Sequential(nn.Linear(3, 50_000).requires_grad_(False), nn.Linear(50_000, 2))
    found = stopped(rows(), model=model).plan
    assert found.parameters == 100_002
    assert found.learning_rate_at(0) == pytest.approx(50 / math.sqrt(144 * 100_002))


@pytest.mark.parametrize("size", [1, 7, 100, 1437, 60_000, 10**7])
def test_lengths(size: int) -> None:
    """Whatever is given is kept, the rest follows, and no more rows are read than the epochs allow."""
    given = {"epochs": [None, 0.5, 30.0, 1000.0], "steps": [None, 1, 50, 5000], "batch_size": [None, 1, size]}
    for epochs, steps, batch_size in itertools.product(*given.values()):
        if epochs is not None and steps is not None:
            continue
        budget = Budget(1.0, 1e-9, epochs, steps, batch_size)
        found = auto.lengthened(budget, Privacy(), size)
        assert batch_size in (None, found.batch_size)
        assert steps in (None, found.steps)
        assert found.batch_size is not None
        assert 1 <= found.batch_size <= size
        taken = found.steps or found.epochs * size / found.batch_size  # type: ignore[operator]
        if batch_size is None and steps is None:
            passes = epochs or auto.epochs(1.0)
            rounding = max(1, 0.5 / found.batch_size * taken)
            assert taken * found.batch_size / size <= passes * (1 + rounding) + taken / size


def test_more_epochs_make_larger_batches_and_not_more_steps() -> None:
    few, many = (make(rows=2000, parameters=50, epochs=passes, **BUDGET) for passes in (5, 40))
    assert few.steps == many.steps == auto.steps_for(2000)
    assert (few.epochs, many.epochs) == (pytest.approx(5, rel=0.02), pytest.approx(40, rel=0.02))
    assert few.mechanism.noise_multiplier / few.batch_size > many.mechanism.noise_multiplier / many.batch_size


def test_noise_in_place_of_a_budget() -> None:
    found = make(rows=2000, parameters=50, delta=1e-5, noise_multiplier=2.0)
    assert found.steps == auto.steps_for(2000)
    ends = make(rows=2000, parameters=50, noise_multiplier=2.0, **BUDGET)
    assert ends.ends == "budget"
    assert ends.guarantee.epsilon <= 3


def test_what_is_given_replaces_its_part_of_the_rule() -> None:
    plain = make(rows=2000, parameters=50, **BUDGET)
    changed = make(rows=2000, parameters=50, clip=0.7, learning_rate=0.5, momentum=0.3, averaging="tail:0.5", **BUDGET)
    assert (changed.recipe.clip, changed.learning_rate_at(0), changed.recipe.momentum) == (0.7, 0.5, 0.3)
    assert (changed.steps, changed.batch_size, changed.optimizer) == (plain.steps, plain.batch_size, "self-scaled")
    constant = make(rows=2000, parameters=50, learning_rate=lambda step: 0.25, **BUDGET)
    assert constant.learning_rate_at(7) == 0.25


def test_the_rate_suits_the_optimizer() -> None:
    facts: dict[str, Any] = {"rows": 2000, "parameters": 10_000, **BUDGET}
    adam, sgd = make(optimizer="Adam", **facts), make(optimizer="sgd", clip=1.0, **facts)
    assert adam.learning_rate_at(0) == pytest.approx(50 / math.sqrt(adam.steps * 10_000))
    assert adam.recipe.momentum == 0
    assert make(optimizer="Adam", **{**facts, "parameters": 50}).learning_rate_at(0) == 0.1
    noise = sgd.mechanism.noise_multiplier / sgd.batch_size
    assert sgd.learning_rate_at(0) == pytest.approx(5 / math.sqrt(sgd.steps * (0.1 + 10_000 * noise**2)))
    assert make(optimizer="sgd", clip=0.1, **facts).learning_rate_at(0) == pytest.approx(10 * sgd.learning_rate_at(0))
    for own in ("adagrad", lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        assert make(optimizer=own, **facts).learning_rate is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 10}, "parameters is required"),
        ({"rows": 10, "parameters": 5, "epochs": 2, "steps": 3}, "give one of them"),
        ({"rows": 10, "parameters": 5, "batch_size": 11}, "batch_size must be at most the number of rows, 10, got 11"),
        ({"rows": 10, "parameters": 5, "epsilon": None}, "a budget is required"),
        ({"rows": 10, "parameters": 5, "delta": None}, "delta is required"),
        ({"rows": 10, "parameters": 5, "delta": 0.5}, "delta must be below 1/n"),
        ({"rows": 10, "parameters": 5, "epochs": 1e12}, "steps must be"),
        ({"rows": 10, "parameters": 5, "optimizer": "adm"}, "did you mean"),
        ({"rows": 10, "parameters": 5, "optimizer": "adam", "momentum": 0.5}, "momentum = 0.5 is that of SGD"),
    ],
    ids=str,
)
def test_bad_input(options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.DpgradError, match=said) as caught:
        make(**{**BUDGET, **options})
    assert "\n" not in str(caught.value)


def test_the_plan_and_the_report_say_what_was_chosen_and_why() -> None:
    fitted = stopped(rows())
    said = fitted.plan.chosen_by_rule
    assert said == "144 steps of 9 rows (21.6 epochs), learning rate 0.1, self-scaled: from 60 rows, 8 parameters and ε"
    assert any(said in line for line in fitted.plan.lines())
    assert fitted.report()["plan"]["chosen_by_rule"] == said
    assert said in " ".join(report.text(fitted.report()).split())
    assert stopped(rows(), method="dpsgd", steps=2, batch_size=10).plan.chosen_by_rule is None


@pytest.mark.unmeasured
def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    data, short = rows(), {"steps": 8, **BUDGET}
    whole = dpgrad.fit(network(), data, seed=1, folder=tmp_path / "whole", **short)
    first = dpgrad.RunFolder(tmp_path / "halves", checkpoint_every=2)
    dpgrad.fit(network(), data, seed=1, folder=first, callbacks=lambda seen: seen.step == 5, **short)
    model = network()
    resumed = dpgrad.fit(model, data, seed=1, folder=dataclasses.replace(first, resume=True), **short)
    assert resumed.event == whole.event
    assert torch.equal(weights(model), weights(whole.model))
