"""What a pass depends on in Python is remembered, wherever a model or a loss holds it."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgrad.grads.watch import Watch, remembered

FLAG = [False]


class Holding(nn.Module):
    """A model that holds things of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.number, self.words, self.pooled = 1, "mean", torch.tanh
        self.settings: dict[str, Any] = {"deep": [{"center": False}]}
        self.empty: list[int] = []
        self.object = SimpleNamespace(count=0, part=SimpleNamespace(rate=0.5))
        self.array, self.scalar = np.zeros(3), np.int64(0)
        self.names = {"a"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) if not FLAG[0] else self.inner(x - x.mean(0))
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)[:, 0]
    return out


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda m: setattr(m, "number", 2),
    "word": lambda m: setattr(m, "words", "max"),
    "function": lambda m: setattr(m, "pooled", torch.sin),
    "forward": lambda m: setattr(m, "forward", lambda x: x),
    "nested": lambda m: m.settings["deep"][0].update(center=True),
    "filled": lambda m: m.empty.append(1),
    "object": lambda m: setattr(m.object.part, "rate", 0.1),
    "kind of object": lambda m: setattr(m, "object", type("Other", (SimpleNamespace,), {})(**vars(m.object))),
    "array": lambda m: m.array.__setitem__(1, 2.0),
    "scalar": lambda m: setattr(m, "scalar", np.int64(1)),
    "set": lambda m: m.names.add("b"),
    "mode": lambda m: m.eval(),
    "hook": lambda m: m.inner.register_forward_hook(lambda *_: None),
    "backward hook": lambda m: m.inner.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.inner.register_full_backward_pre_hook(lambda *_: None),
    "variable of the module's file": lambda m: FLAG.__setitem__(0, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    model = Holding()
    watch, before = Watch(model, loss), remembered(model, loss)
    assert watch.same()
    assert remembered(model, loss) == before
    try:
        CHANGES[name](model)
        assert not watch.same()
        assert remembered(model, loss) != before
    finally:
        FLAG[0] = False


@pytest.mark.parametrize("holding", [lambda: iter([1]), random.Random, np.random.default_rng, torch.Generator])
def test_a_state_that_cannot_be_seen_is_another_every_time(holding: Callable[[], object]) -> None:
    model = Holding()
    model.settings["source"] = holding()
    assert remembered(model) != remembered(model)
    assert Watch(model).same()  # else nothing could be replayed


def test_a_tensor_counts_by_its_place_where_it_is_replayed_alone() -> None:
    model = Holding()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    watch, before = Watch(model), remembered(model)
    model.table = torch.zeros(3)
    model.table = torch.ones(3)
    assert not watch.same()
    assert remembered(model)[0] != before[0]  # one name more
    before = remembered(model)
    model.table = torch.zeros(3)
    assert remembered(model) == before
