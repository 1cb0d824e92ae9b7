"""Models whose parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps in shards, a part on each rank.

Parameters, gradients and the state of the optimizer stay in shards. For the passes of a step every rank gathers the
parameters, works on its examples as one process does, and gives them back; then every rank is sent the sums of its own
shards, adds them up in the order of the ranks, and adds the noise of its shards. No collective takes place within a
pass, so ranks may take different numbers of passes, and an error within one is reported in the next meeting.

Guarantee: the norm of an example is that of its whole gradient, on the rank that works on it. The noise of a shard is
the slice of the noise of the whole parameter, a function of (key, step, name, place), added once.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.errors import OptionError, RunError, UnsupportedModelError
from dpgrad.grads import fsdp
from dpgrad.randomness.noise import Part

__all__ = ["ShardExchange", "Slices", "as_shard", "full", "refuse_layout", "whole"]

_BUCKET = 1 << 22  # values that are exchanged together, at least one parameter


class Slices(NamedTuple):
    """Where the shards of a parameter lie in it, flat: that of rank r from ``cuts[r]`` to ``cuts[r + 1]``.

    FSDP2 cuts the first dimension as `torch.chunk` does: as many rows on each rank, the last ones fewer or none.

    >>> Slices.of(torch.Size([5, 2]), 3).cuts
    (0, 4, 8, 10)
    >>> Slices.of(torch.Size([1]), 3).cuts
    (0, 1, 1, 1)
    """

    cuts: tuple[int, ...]

    @classmethod
    def of(cls, shape: torch.Size, ranks: int) -> "Slices":
        """Those of a parameter on so many ranks."""
        rows, inner = shape[0], shape[1:].numel()
        each = -(-rows // ranks)
        return cls(tuple(inner * min(rank * each, rows) for rank in range(ranks + 1)))


def refuse_layout(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a sharded model unless every parameter is cut by rows over the ranks of the run, and computed as it is."""
    if not fsdp.is_sharded(model):
        return
    fsdp.refuse_version()
    if ranks.alone:
        raise OptionError(
            "the model is sharded by fully_shard, and there is one process: start several with torchrun, give "
            "group=torch.distributed.group.WORLD, or give the plain model"
        )
    fsdp.refuse_policies(model)
    members = dist.get_process_group_ranks(ranks.group)
    for name, parameter in model.named_parameters():
        if not fsdp.is_shard(parameter):
            raise UnsupportedModelError(
                f"parameter {name} is not sharded, and others are: call fully_shard(model) on the whole model at last, "
                "without ignored_params"
            )
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if mesh.ndim > 1:
            raise UnsupportedModelError(
                f"parameter {name} lies on a mesh of {mesh.ndim} dimensions (HSDP, or with tensor parallel), which "
                "is not supported: call fully_shard with a mesh of one dimension, of all ranks"
            )
        if not placements[0].is_shard(0):
            raise UnsupportedModelError(
                f"parameter {name} is placed by {placements[0]}, which is not supported: leave out "
                "shard_placement_fn, and fully_shard cuts the first dimension"
            )
        if dist.get_process_group_ranks(mesh.get_group()) != members:
            raise UnsupportedModelError(
                f"parameter {name} is sharded over other ranks than those of the run: give the group of its mesh as "
                "group"
            )
        cuts = Slices.of(parameter.shape, ranks.size).cuts
        if _local(parameter).numel() != cuts[ranks.rank + 1] - cuts[ranks.rank]:
            raise UnsupportedModelError(f"the shard of parameter {name} is not the one that fully_shard makes")


def _local(tensor: Any) -> Tensor:
    """The shard that this rank holds."""
    found: Tensor = tensor.detach().to_local()
    return found


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from all ranks where it is a shard: every rank must ask for it.

    >>> full(torch.ones(2))
    tensor([1., 1.])
    """
    if not fsdp.is_shard(tensor):
        return tensor
    with torch.no_grad():
        found: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return found


def as_shard(local: Tensor, like: Any) -> Tensor:
    """The values of a shard as a tensor in the layout of ``like``."""
    from torch.distributed.tensor import DTensor

    found: Tensor = DTensor.from_local(  # type: ignore[no-untyped-call, unused-ignore]
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


@contextmanager
def whole(model: nn.Module, ranks: Ranks, step: int) -> Iterator[None]:
    """Within the block a sharded model holds whole parameters, as a model of one process does; others stay as they are.

    All ranks must come here at the same step. FSDP's own hooks are not called within the block.
    """
    if not fsdp.is_sharded(model):
        yield
        return
    places = [
        (module, slot, parameter)
        for module in model.modules()
        for slot, parameter in module._parameters.items()
        if parameter is not None
    ]
    ranks.meet(Phase.GATHERED, step)
    with ranks.committed():
        gathered = {
            id(each): nn.Parameter(full(each), each.requires_grad)
            for each in {id(parameter): parameter for _, _, parameter in places}.values()
        }
    try:
        with fsdp.without_hooks(model):
            for module, slot, parameter in places:
                _put(module, slot, gathered[id(parameter)])
            yield
    finally:
        for module, slot, parameter in places:
            _put(module, slot, parameter)


def _put(module: nn.Module, slot: str, parameter: nn.Parameter) -> None:
    """Exchange a parameter; a recurrent layer keeps a list of its own, which it fills when an attribute is set."""
    if isinstance(module, nn.RNNBase):
        setattr(module, slot, parameter)
    else:
        module._parameters[slot] = parameter


Noisy = Callable[[Sequence[Part], Tensor], Tensor]  # (which values, their sums one after another) -> noisy means


class ShardExchange:
    """Sums of whole parameters on every rank, to noisy means of the shards that each rank holds.

    Bytes per step and rank, with V values and N ranks: 8 V (N-1)/N of sums are sent, and as many received. Parameters
    are exchanged a few at a time, and what was exchanged is freed.
    """

    def __init__(self, ranks: Ranks, parameters: Mapping[str, nn.Parameter]) -> None:
        self._ranks = ranks
        self._slices = {name: Slices.of(each.shape, ranks.size) for name, each in parameters.items()}
        device = next(iter(parameters.values())).device
        self._direct = device.type == "cpu" or "nccl" in ranks.backend
        self._device = device
        self._buckets: list[list[str]] = []
        room = 0
        for name, each in parameters.items():
            if room < each.numel() or not self._buckets:
                self._buckets.append([])
                room = _BUCKET
            self._buckets[-1].append(name)
            room -= each.numel()
        self._taken = -1

    def run(self, step: int, totals: MutableMapping[str, Tensor], noisy: Noisy) -> dict[str, Tensor]:
        """Exchange the flat sums of a step, which are taken out of ``totals``; the noisy means of the own shards."""
        ranks = self._ranks
        if step <= self._taken:
            raise RunError(f"the sums of step {step} were exchanged: its noise on others would reveal the difference")
        found: dict[str, Tensor] = {}
        with ranks.together():
            ranks.meet(Phase.SUMMED, step)
            self._taken = step
            with ranks.committed():
                for names in self._buckets:
                    parts = [self._own(name) for name in names]
                    sizes = [part.stop - part.start for part in parts]
                    means = noisy(parts, self._summed([totals.pop(name) for name in names], names))
                    found.update(zip(names, torch.split(means, sizes), strict=True))
        return found

    def _own(self, name: str) -> Part:
        cuts, rank = self._slices[name].cuts, self._ranks.rank
        return Part(name, cuts[rank], cuts[rank + 1])

    def _summed(self, totals: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        """The sums of this rank's shards of a few parameters, added up in the order of the ranks."""
        size = self._ranks.size
        group = self._ranks.group if self._device.type == "cuda" and self._direct else self._ranks.control
        where = self._device if self._direct else torch.device("cpu")
        cuts = [self._slices[name].cuts for name in names]
        sent = [
            [total[cut[rank] : cut[rank + 1]].to(where, torch.float64) for total, cut in zip(totals, cuts, strict=True)]
            for rank in range(size)
        ]
        counts = [sum(map(len, parts)) for parts in sent]
        own = counts[self._ranks.rank]
        received = torch.empty(size * own, dtype=torch.float64, device=where)
        flat = torch.cat([part for parts in sent for part in parts])
        dist.all_to_all_single(received, flat, [own] * size, counts, group=group)
        parts = received.view(size, own)
        found = parts[0]
        for rank in range(1, size):
            found += parts[rank]
        return found.to(self._device)
