"""What an audit refuses, each in one line; and what its record holds."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import planted
from dpgrad import audit, sampling
from dpgrad.audit.record import Audit, Check, judged
from dpgrad.audit.trials import Trial
from dpgrad.errors import AuditError, DpgradError, OptionError
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.mechanism import Mechanism

FULL = planted.poisson(sampler=sampling.FullBatch(), steps=2)


def stepped(**changed: Any) -> Audit:
    given: dict[str, Any] = {
        "model": planted.mlp(), "loss": planted.cross_entropy, "mechanism": FULL, "data": planted.rows(),
        "checks": ["ledger"], **changed,
    }  # fmt: skip
    return audit.step(given.pop("model"), given.pop("loss"), given.pop("mechanism"), given.pop("data"), **given)


@pytest.mark.parametrize(
    "changed",
    [
        {"level": 0.0},
        {"level": 1.0},
        {"level": "high"},
        {"canaries": 0},
        {"steps": 1},
        {"steps": 2.5},
        {"seed": -1},
        {"checks": ["everything"]},
        {"loss": "cross-entropie"},
        {"claim": "private"},
        {"claim": (1.0, 2.0)},
        {"data": []},
        {"data": "rows"},
        {"data": planted.rows(1)},
        {"data": (torch.zeros(3, 4), torch.zeros(2).long())},
        {"model": nn.ReLU()},
        {"mechanism": Mechanism(sampling.Poisson(0.1), 2, 1.0)},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_in_one_line(changed: Any) -> None:
    with pytest.raises(DpgradError) as refused:
        stepped(**changed)
    assert "\n" not in str(refused.value)


def test_clip_bounds_that_leave_their_range_in_a_step_are_refused() -> None:
    """There they tell no count."""
    moving = dataclasses.replace(FULL, adaptive_clip=AdaptiveClip(0.5, learning_rate=100.0))
    with pytest.raises(OptionError, match=r"learning_rate 100 of adaptive_clip moves the clip bound to the end .* aud"):
        stepped(mechanism=moving, checks=["noise"], canaries=1)


def test_clip_bounds_that_hardly_move_are_refused() -> None:
    """Rounding would show as a row that moves a count by more than it may, and as noise on a coarse grid."""
    moving = dataclasses.replace(FULL, adaptive_clip=AdaptiveClip(0.5, learning_rate=1e-13))
    with pytest.raises(OptionError, match="learning_rate of adaptive_clip must be at least 1e-06 for an audit of"):
        stepped(mechanism=moving, checks=["noise"], canaries=1)


def test_as_many_equal_canaries_are_tried_as_a_quick_clip_bound_can_follow() -> None:
    moving = dataclasses.replace(FULL, adaptive_clip=AdaptiveClip(0.5, learning_rate=4.0))
    assert not stepped(mechanism=moving, checks=["sensitivity"], canaries=1).refuted


@pytest.mark.parametrize("bounds", [None, torch.ones(2), torch.tensor([[1.0], [2.0]])], ids=str)
def test_code_with_adaptive_clip_shows_its_bounds(bounds: torch.Tensor | None) -> None:
    """Without them, in another shape, or other ones than the step before had left."""

    def run(trial: Trial) -> list[dict[str, torch.Tensor]]:
        found = [{name: torch.zeros_like(p) for name, p in trial.model.named_parameters()} for _ in trial.steps]
        return found if bounds is None else [{**each, ".clip": bounds} for each in found]

    moving = dataclasses.replace(FULL, adaptive_clip=AdaptiveClip(0.5))
    with pytest.raises(AuditError, match=r"left no clip bounds: .* shape \(2, 1\)|used other clip bounds than"):
        stepped(mechanism=moving, checks=["noise"], canaries=1, run=run)


def test_arrays_are_taken() -> None:
    inputs, targets = planted.rows()
    stepped(data=(inputs.numpy(), targets.numpy())).assert_held()


def test_model_of_the_caller_is_left_alone() -> None:
    model = planted.mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stepped(model=model, checks=["sensitivity"], canaries=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_same_seed_gives_the_same_record() -> None:
    assert stepped(checks=["noise"], steps=4) == stepped(checks=["noise"], steps=4)
    assert stepped(checks=["noise"], steps=4, seed=1) != stepped(checks=["noise"], steps=4)


def test_record_is_frozen_and_plain() -> None:
    found = stepped()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.level = 1.0  # type: ignore[misc]
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["for_release"] is False
    assert told["words"] == found.words
    assert "not for release" in str(found)


def test_what_was_not_tried_is_said() -> None:
    found = stepped()
    assert {"sensitivity", "noise", "sampling", "price"} <= set(found.not_tried)
    assert "not tried: sensitivity, overflow, noise, sampling, price, keys" in found.words


def test_level_is_divided_among_the_checks_with_chance() -> None:
    checks = judged([Check("a", 0.004, ""), Check("b", 0.9, ""), Check("c", None, "", violated=False)], 0.01)
    found = Audit("step", "claim", 0.01, checks)
    assert found.refuted
    assert sum(check.level for check in checks) == pytest.approx(0.01)


def test_infinite_figures_are_null() -> None:
    found = Audit("game", "claim", 0.01, (), measured_multiplier=np.inf, lower_epsilon=np.inf)
    assert found.to_dict()["lower_epsilon"] is None
    assert found.to_dict()["measured_multiplier"] is None
