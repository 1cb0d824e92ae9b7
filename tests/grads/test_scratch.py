"""Memory that is kept for the gradients of single examples changes nothing, and is nobody else's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpgrad import Mechanism, PrivateGradient, sampling
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import Psasc
from dpgrad.grads.scratch import Scratch, room

ROWS = 40


def sequences() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 6))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    outputs = model(x)
    each = F.cross_entropy(outputs.flatten(0, -2), y.repeat_interleave(outputs[0].numel() // 6), reduction="none")
    return each.view(len(y), -1).mean(1)


def gradients(make, shape, scratch: Scratch, **options) -> list[torch.Tensor]:
    """Those of twelve steps on batches of various sizes."""
    torch.manual_seed(0)
    model = make()
    data = torch.randn(ROWS, *shape), torch.randint(6, (ROWS,))
    private = PrivateGradient(model, loss, Mechanism(sampling.Poisson(0.2), 1000, 1.0, batch_size=8), seed=1, **options)
    private.work.scratch = scratch
    found = []
    for _ in range(12):
        private.step(data)
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatch": 3}, {"rule": Psasc(s=0.7), "inner_momentum": InnerMomentum(0.5, 2)}, {"observe": str}],
    ids=["plain", "pieces", "momentum", "observed"],
)
@pytest.mark.parametrize(("make", "shape"), [(sequences, (20, 8)), (images, (2, 6, 6))], ids=["sequences", "images"])
def test_steps_are_those_without_it(make, shape, options):
    run = partial(gradients, make, shape, **options)
    scratch = Scratch()
    assert all(map(torch.equal, run(scratch), run(Scratch(0))))
    assert len(scratch.memory) > 0  # it was used


def test_tensors_of_a_block_do_not_overlap_and_blocks_share():
    scratch, like = Scratch(), torch.zeros(1)
    with scratch.opened():
        assert room((5, 3), like) is None
        assert room((50,), like) is None
    with scratch.opened():
        one, other = room((5, 3), like), room((50,), like)
        one.fill_(1)
        other.fill_(2)
        assert bool((one == 1).all())
    with scratch.opened():
        assert room((5, 3), like).data_ptr() == one.data_ptr()
        assert room((5, 3), like.double()) is None
        assert room((150,), like) is None  # it is full
    assert room((5, 3), like) is None


def test_no_more_than_the_most_is_kept():
    scratch, like = Scratch(most=64), torch.zeros(1)
    for _ in range(2):
        with scratch.opened():
            found = [room((64,), like), room((64,), like)]
    assert len(scratch.memory) == 64
    assert found[0] is not None
    assert found[1] is None


def test_a_memory_limit_leaves_none():
    plan = Mechanism(sampling.Poisson(0.2), 1000, 1.0, batch_size=8)
    private = PrivateGradient(sequences(), loss, plan, seed=1, memory_limit=1 << 24)
    data = torch.randn(ROWS, 20, 8), torch.randint(6, (ROWS,))
    for _ in range(3):
        private.step(data)
    assert not len(private.work.scratch.memory)
