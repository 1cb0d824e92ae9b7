"""A model whose parameters are exchanged is as before when the block ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpgrad.grads.swap import swapped


def rename(held: dict[str, Any]) -> None:
    held["other"] = held.pop("last")


def exchange(held: dict[str, Any]) -> None:
    first, last = held.pop("first"), held.pop("last")
    held["last"], held["first"] = first, last


def replace(held: dict[str, Any]) -> None:
    held["first"] = torch.ones(3)


def add(held: dict[str, Any]) -> None:
    held["other"] = [torch.ones(3)]


@pytest.mark.parametrize("change", [rename, exchange, replace, add])
@pytest.mark.parametrize("registered", [True, False])
def test_tensors_given_meanwhile_are_taken_back(change: Callable[[dict[str, Any]], None], registered: bool) -> None:
    module = nn.Linear(2, 1)
    held = module._buffers if registered else module.__dict__
    held["first"], held["last"] = torch.zeros(1), torch.zeros(2)
    weight, before = module.weight, dict(held)
    with swapped(module, {"weight": torch.ones(1, 2)}):
        assert module.weight is not weight
        change(held)
    assert module.weight is weight
    assert held.keys() == before.keys()
    assert all(held[name] is value for name, value in before.items())


def test_a_number_that_was_noted_meanwhile_stays() -> None:
    module = nn.Linear(2, 1)
    with swapped(module, {}):
        module.calls = 3
    assert module.calls == 3
