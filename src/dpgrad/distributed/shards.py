"""Models whose parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps in shards, a part on each rank.

Parameters, gradients and the state of the optimizer stay in shards. In the passes of a step a unit of ``fully_shard``
is gathered when an operation uses one of its parameters, forwards or backwards, and its memory is given back when
another unit is used. Sums are given to the ranks that hold their shards as they are formed, a few parameters at a time,
so that those of the whole model never exist at once. Ranks do both in rounds (`dpgrad.distributed.rounds`), each at its
own pace.

Guarantee: the norm of an example is that of its whole gradient, on the rank that works on it. The noise of a shard is
the slice of the noise of the whole parameter, a function of (key, step, name, place), added once all ranks have given
all their sums.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.distributed.rounds import Held, Rounds, Slices, Spread, Totals
from dpgrad.errors import OptionError, UnsupportedModelError
from dpgrad.grads import fsdp

__all__ = ["as_replica", "as_shard", "local", "plain", "refuse_layout", "spread_of", "totals_of", "whole"]

_READING = {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__}
# What needs no memory of the tensor it is given.
_EMPTY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


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
    spread = spread_of(model, ranks)
    members = dist.get_process_group_ranks(ranks.group)
    for name, parameter in model.named_parameters():
        if not fsdp.is_shard(parameter):
            raise UnsupportedModelError(
                f"parameter {name} is not sharded, and others are: call fully_shard(model) on the whole model last, "
                "without ignored_params"
            )
        _refuse_mesh(name, parameter, members)
        slices, own = Slices.of(parameter.shape, spread.shards), spread.shard(ranks.rank)
        if local(parameter).numel() != slices.length(own):
            raise UnsupportedModelError(f"the shard of parameter {name} is not the one that fully_shard makes")


def _refuse_mesh(name: str, parameter: Any, members: list[int]) -> None:
    """Refuse a parameter that is not cut by rows over all ranks, or over rows of ranks that are replicas (HSDP)."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim > 2 or not all(each.is_replicate() for each in placements[:-1]):
        raise UnsupportedModelError(
            f"parameter {name} lies on a mesh of {mesh.ndim} dimensions by {placements}, which is not supported: call "
            "fully_shard with a mesh of all ranks, of one dimension or of two (replicas, shards)"
        )
    if not placements[-1].is_shard(0):
        raise UnsupportedModelError(
            f"parameter {name} is placed by {placements[-1]}, which is not supported: leave out "
            "shard_placement_fn, and fully_shard cuts the first dimension"
        )
    if mesh.mesh.flatten().tolist() != members:
        raise UnsupportedModelError(
            f"parameter {name} is sharded over other ranks than those of the run, or in another order: give the group "
            "of its mesh as group"
        )


def spread_of(model: nn.Module, ranks: Ranks) -> Spread:
    """Which shard each rank holds of a sharded model."""
    first: Any = next(each for each in model.parameters() if fsdp.is_shard(each))
    return Spread(ranks.size, int(first.device_mesh.shape[-1]))


def totals_of(model: nn.Module, ranks: Ranks) -> Totals:
    """What takes the sums of the parameters that are trained."""
    names = {id(each): name for name, each in model.named_parameters() if each.requires_grad}
    units = [
        {names[id(each)]: each.shape for each in parameters if id(each) in names} for parameters, _ in fsdp.units(model)
    ]
    return Totals(ranks, units, spread_of(model, ranks), next(model.parameters()).device)


def local(tensor: Any) -> Tensor:
    """The shard that this rank holds, or the tensor itself.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    found: Tensor = tensor.detach()
    return found.to_local() if fsdp.is_shard(found) else found  # type: ignore[attr-defined]


def as_shard(values: Tensor, like: Any, shape: torch.Size | None = None) -> Tensor:
    """The values of a shard as a tensor in the layout of ``like``; ``shape`` is that of the whole, if another one."""
    from torch.distributed.tensor import DTensor

    shape = like.shape if shape is None else shape
    stride = torch.empty(shape, device="meta").stride()
    found: Tensor = DTensor.from_local(  # type: ignore[no-untyped-call, unused-ignore]
        values, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return found


def as_replica(values: Tensor, like: Any) -> Tensor:
    """The values of a tensor that all ranks hold whole, on the mesh of ``like``."""
    from torch.distributed.tensor import DTensor, Replicate

    found: Tensor = DTensor.from_local(  # type: ignore[no-untyped-call, unused-ignore]
        values, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    return found


@contextmanager
def plain(model: nn.Module) -> Iterator[list[str]]:
    """Within the block a sharded model shows its modules, with parameters that hold no values and no hooks of FSDP.

    It is compared, not used, in the block. Gives what ``fully_shard`` made of it, in words; none for other models.
    """
    if not fsdp.is_sharded(model):
        yield []
        return
    words = fsdp.words(model)
    places = _places(model)
    stands = {
        id(each): nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="meta"), each.requires_grad)
        for _, _, each in places
    }
    try:
        with fsdp.undressed(model):
            for module, slot, parameter in places:
                _put(module, slot, stands[id(parameter)])
            yield words
    finally:
        for module, slot, parameter in places:
            _put(module, slot, parameter)


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where parameters lie: a module, the name there, and the parameter."""
    return [
        (module, slot, parameter)
        for module in model.modules()
        for slot, parameter in module._parameters.items()
        if parameter is not None
    ]


@contextmanager
def whole(model: nn.Module, ranks: Ranks, step: int, totals: Totals | None = None) -> Iterator[Rounds | None]:
    """Within the block a sharded model holds whole parameters, each while it is used; other models stay as they are.

    All ranks must come here at the same step. FSDP's own hooks are not called within the block. ``totals`` take the
    sums that ranks give.
    """
    if not fsdp.is_sharded(model):
        yield None
        return
    if totals is not None:
        totals.begin(step)
    spread = spread_of(model, ranks)
    units, wholes = _units(model, spread)
    places = _places(model)
    rounds = Rounds(ranks, step, units, spread, totals)
    ranks.meet(Phase.GATHERED, step)
    used = _Used(rounds, units)
    try:
        with fsdp.without_hooks(model), fsdp.cast(model):
            for module, slot, parameter in places:
                _put(module, slot, wholes[id(parameter)])
            with _Unread(used), used:
                yield rounds
            rounds.end()
    finally:
        rounds.close()
        for module, slot, parameter in places:
            _put(module, slot, parameter)


def _units(model: nn.Module, spread: Spread) -> tuple[list[list[Held]], dict[int, nn.Parameter]]:
    """The parameters of each unit of ``fully_shard``, and those that stand in their places, by what they stand for."""
    found: list[list[Held]] = []
    wholes: dict[int, nn.Parameter] = {}
    for parameters, dtype in fsdp.units(model):
        found.append([])
        for each in parameters:
            empty = torch.empty(each.shape, dtype=dtype or each.dtype, device=each.device)
            whole = wholes[id(each)] = nn.Parameter(empty, each.requires_grad)
            found[-1].append(Held(local(each).reshape(-1), whole, Slices.of(each.shape, spread.shards)))
            found[-1][-1].drop()
    return found, wholes


class _Used(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gathers the units whose parameters an operation uses, before it runs: in a forward pass, a backward pass, ...

    Whatever shares the memory of a parameter, a view or what a backward pass has kept, is found by that memory.
    """

    supports_higher_order_operators = True

    def __init__(self, rounds: Rounds, units: list[list[Held]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounds = rounds
        self._unit = {held.whole.untyped_storage()._cdata: place for place, unit in enumerate(units) for held in unit}

    def units(self, given: Any) -> set[int]:
        """The units that tensors belong to."""
        found = set()
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                unit = self._unit.get(leaf.untyped_storage()._cdata)
                if unit is not None:
                    found.add(unit)
        return found

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _EMPTY:
            with torch._C.DisableTorchFunction():
                wanted = self.units((args, kwargs))
                if wanted:
                    self._rounds.have(wanted)
        return func(*args, **(kwargs or {}))


class _Unread(TorchFunctionMode):
    """Refuses what reads the memory of a parameter past torch: it need not be there."""

    def __init__(self, used: _Used) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING:
            with torch._C.DisableTorchFunction():
                known = self._used.units(args[0])
            if known:
                raise UnsupportedModelError(
                    f"the model or the loss reads a parameter by Tensor.{func.__name__}, and the model is sharded by "
                    "fully_shard: use operations of torch, which gather it"
                )
        return func(*args, **(kwargs or {}))


def _put(module: nn.Module, slot: str, parameter: nn.Parameter) -> None:
    """Exchange a parameter; a recurrent layer keeps a list of its own, which it fills when an attribute is set."""
    if isinstance(module, nn.RNNBase):
        setattr(module, slot, parameter)
    else:
        module._parameters[slot] = parameter
