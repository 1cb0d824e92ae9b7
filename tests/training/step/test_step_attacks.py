"""What a hostile review found in the private step, run in each of its forms: each attack stays without effect.

The noise of a run with a known seed is taken off again, which leaves the clipped sum of each step.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import noise
from dpgrad.training.private import PrivateGradient
from dpgrad.training.step import straight
from replayed import on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes the noise of a CPU off again")
SEED, ROWS = 1, 200


@pytest.fixture(params=["taped", "graphed", "straight"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How steps are run, as options of `PrivateGradient`; code is kept whatever the load of the machine."""
    monkeypatch.setattr(straight, "_FASTER", math.inf)
    monkeypatch.setattr(straight, "_SHORT", math.inf)
    if request.param == "graphed":
        on_cpu(monkeypatch)
    return {"capture": {"taped": False, "graphed": True, "straight": None}[request.param]}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def rows(count: int = ROWS) -> Tensor:
    return 3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(0))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def plan(rate: float | None = None, steps: int = 300) -> Mechanism:
    sampler = sampling.FullBatch() if rate is None else sampling.Poisson(rate)
    return Mechanism(sampler, steps, 1e-3, batch_size=ROWS * (rate or 1.0))


def sums(private: PrivateGradient, data: Any, steps: int) -> Iterator[Tensor]:
    """The clipped sum of each step, all parameters one after another."""
    for _ in range(steps):
        step = private.steps_taken
        private.step(data)
        likes = {name: parameter.detach().double() for name, parameter in private.model.named_parameters()}
        stds = {name: private.mechanism.std_at(step) for name in likes}
        drawn = noise.gaussians(likes, stds, private.key, step)
        found = []
        for name, parameter in private.model.named_parameters():
            assert parameter.grad is not None
            found.append((parameter.grad.double() * private.mechanism.divisor - drawn[name]).flatten())
        yield torch.cat(found)


def by_hand(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], data: Tensor, clip: float = 1.0) -> Tensor:
    """The sum of clipped gradients, one example after another."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for row in data:
        own = torch.autograd.grad(loss(model, row[None]).sum(), list(model.parameters()))
        flat = torch.cat([each.double().flatten() for each in own])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("microbatch", [None, 40, 100, 150])
def test_no_piece_of_a_step_is_lost(form: dict[str, Any], microbatch: int | None) -> None:
    """Pieces of more than 128 examples are summed in float64 and smaller ones in float32."""
    model, data = linear(), rows()
    private = PrivateGradient(model, squares, plan(), seed=SEED, microbatch=microbatch, **form)
    for found in sums(private, data, 4):
        assert float((found - by_hand(model, squares, data)).norm()) < 0.5  # rounding margins of all; a row more is 1
