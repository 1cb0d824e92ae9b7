"""One rank that exchanges its sums with itself by NCCL, beside a process without a group: the same steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dpgrad import Mechanism, sampling
from dpgrad.grads import fsdp
from dpgrad.mechanism.mechanism import Group
from dpgrad.training.private import PrivateGradient

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()),
    reason="needs a CUDA device and NCCL",
)
DEVICE = "cuda"
BACKEND = "nccl"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group(BACKEND, init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, :32]).square().sum(1)


def trained(group: Any, steps: int = 6, **options: Any) -> tuple[Tensor, PrivateGradient]:
    """The weights after some steps, with noise too small to hide another sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 3)).to(DEVICE)
    sharded = options.pop("sharded", False)
    if sharded:
        mesh = dist.init_device_mesh(DEVICE, (1,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    rows = torch.randn(400, 33, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    values = sum(parameter.numel() for parameter in model.parameters())
    secure = values if options.pop("secure", False) else 0
    plan = Mechanism(sampling.Poisson(0.2), 40, 1e-3, batch_size=80, secure_values=secure, **options)
    private = PrivateGradient(model, losses, plan, seed=1, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        private.step(rows)
        optimizer.step()
    whole = [p.full_tensor() if sharded else p for p in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole]).cpu(), private


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("groups", [(), (Group("0.*", clip=0.5), Group("2.*", noise_multiplier=2.0))])
def test_one_rank_is_one_process(group: Any, secure: bool, groups: tuple[Group, ...]) -> None:
    alone, single = trained(None, secure=secure, groups=groups)
    with_itself, ranked = trained(group, secure=secure, groups=groups)
    torch.testing.assert_close(with_itself, alone, rtol=0, atol=1e-5)
    assert ranked.ledger == single.ledger
    assert not ranked.ranks.alone


@pytest.mark.skipif(not torch.__version__.startswith(tuple(fsdp.VERIFIED)), reason="FSDP2 of this torch is refused")
@pytest.mark.parametrize("secure", [False, True])
def test_a_sharded_model_is_one_process(group: Any, secure: bool) -> None:
    """In shards of FSDP2, of which the one rank holds all."""
    alone, single = trained(None, secure=secure)
    sharded, ranked = trained(group, secure=secure, sharded=True)
    torch.testing.assert_close(sharded, alone, rtol=0, atol=1e-5)
    assert ranked.ledger == single.ledger
