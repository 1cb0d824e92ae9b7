"""A model whose parameters are exchanged for other tensors, for the length of a block."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpgrad._validate import shown
from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.fsdp import gathers, is_shard
from dpgrad.grads.sums import sum_dtype, trainable

__all__ = ["refuse_modules", "swapped", "unwrapped", "without_dropout"]


def unwrapped(model: nn.Module, sharded: bool = False) -> nn.Module:
    """The module inside a compiled model: its parameters are the same, and each use of them can be seen.

    Models that hide their modules in other ways, or are spread over several processes or devices, are refused. With
    ``sharded`` those of ``fully_shard`` are returned: the caller gathers their parameters before any pass.
    """
    given: object = model  # a caller may ignore types
    if not isinstance(given, nn.Module):
        raise UnsupportedModelError(f"model must be a torch.nn.Module, got {shown(given)}")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return unwrapped(model._orig_mod, sharded)
    _refuse_spread(model, sharded)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"module {name or 'itself'!r} is a TorchScript one: give the module it was made from"
            )
        inner = name and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        if inner or module._compiled_call_impl is not None:
            raise UnsupportedModelError(f"module {name or 'itself'!r} of the model is compiled: give it uncompiled")
    return model


def refuse_modules(model: nn.Module) -> None:
    """Refuse a model whose modules or parameters alone show that it cannot be trained, before any pass."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedModelError(
                f"{name} has no shape yet: run the lazy module once, on public data, or give its sizes"
            )
    if not trainable(model):
        raise UnsupportedModelError("model must have a parameter to train, got none with requires_grad")
    kinds = {sum_dtype(parameter.dtype) for parameter in trainable(model).values()}
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        found = ", ".join(sorted({str(parameter.dtype) for parameter in trainable(model).values()}))
        raise UnsupportedModelError(
            f"parameters that are trained must have one floating-point type, got {found}: convert them"
        )
    for name, module in model.named_modules():
        # Without running statistics those of the batch are used in eval mode too.
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise UnsupportedModelError(
                f"BatchNorm {name or 'itself'!r} mixes examples: replace it by GroupNorm with "
                "dpgrad.grads.convert(model), or, with statistics that are public, put it in eval mode"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedModelError(
                f"embedding {name or 'itself'!r} shortens the rows that a batch looks up, without noise: "
                "give max_norm=None"
            )


def _refuse_spread(model: nn.Module, sharded: bool) -> None:
    """Refuse a model that is wrapped for, or spread over, several processes or devices."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    wrapped = tuple(_kinds("torch.distributed.fsdp", ("FullyShardedDataParallel",)))
    for name, module in model.named_modules():
        what = f"module {name!r} of the model" if name else "the model"
        if isinstance(module, wrappers):
            raise UnsupportedModelError(
                f"{what} is wrapped in {type(module).__name__}, which adds up gradients before they are clipped: give "
                "the model unwrapped. After torch.distributed.init_process_group() dpgrad adds up the clipped sums of "
                "all ranks itself, and adds the noise once"
            )
        if wrapped and isinstance(module, wrapped):
            raise UnsupportedModelError(
                f"{what} is sharded by {type(module).__name__} (FSDP1), which is not supported: use fully_shard of "
                "torch.distributed.fsdp (FSDP2), or give the plain model to every rank"
            )
    if gathers(model):
        if sharded:
            return
        raise UnsupportedModelError(
            "the model is sharded by fully_shard, which dpgrad.fit and PrivateGradient take and this does not: give "
            "the plain model"
        )
    for name, parameter in model.named_parameters():
        if is_shard(parameter):
            raise UnsupportedModelError(
                f"parameter {name} is a DTensor, a part of which each process holds (tensor parallel): the norm of an "
                "example's gradient would be spread over them. Give the plain model to every rank"
            )
    devices = sorted({str(parameter.device) for parameter in model.parameters() if not parameter.is_meta})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model lies on several devices ({', '.join(devices)}), as device_map makes it: put all of it on one, "
            "with model.to(device)"
        )


def _kinds(module: str, names: tuple[str, ...]) -> list[type]:
    """The classes of a module of torch, which no object can have before the module is loaded."""
    known = sys.modules.get(module)
    return [vars(known)[name] for name in names if name in vars(known)] if known is not None else []


@contextmanager
def swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Wherever a module of ``model`` holds the parameter ``name``, it holds ``tensors[name]`` instead.

    Every place is exchanged, so tied parameters stay tied. The model is as before when the block ends, however it
    ends: tensors that a module was given meanwhile (a weight computed by a hook, a recurrent layer's list of weights)
    belong to the exchanged parameters and are taken back.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> with swapped(model, {"weight": torch.full((1, 1), 3.0)}):
    ...     print(model(torch.ones(1, 1)))
    tensor([[3.]])
    """
    wanted = {id(parameter): tensors[name] for name, parameter in trainable(model).items() if name in tensors}
    modules = list(model.modules())
    places = [
        (module, slot, parameter)
        for module in modules
        for slot, parameter in module._parameters.items()
        if id(parameter) in wanted
    ]
    held = [(owner, dict(owner)) for module in modules for owner in (module.__dict__, module._buffers)]
    try:
        for module, slot, parameter in places:
            # The dictionary itself: setting the attribute would refuse a tensor that is no Parameter.
            module._parameters[slot] = wanted[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for module, slot, parameter in places:
            module._parameters[slot] = parameter
        for owner, before in held:
            _take_back(owner, before)


def _take_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    if [*now] == [*before] and all(map(is_, now.values(), before.values())):
        return
    for slot in now.keys() | before.keys():
        pair = now.get(slot), before.get(slot)
        if pair[0] is not pair[1] and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(pair)):
            if slot in before:
                now[slot] = before[slot]
            else:
                del now[slot]


_DROPPING = {
    F.alpha_dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class _NoDropout(TorchFunctionMode):
    """Functions that drop at random drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) < 5:
            kwargs["dropout_p"] = 0.0
        elif func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:])
        return func(*args, **kwargs)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout functions and layers, attention and recurrent layers drop nothing in the block; training flags stay."""
    kinds = {_DropoutNd: "p", nn.MultiheadAttention: "dropout", nn.RNNBase: "dropout"}
    held = [
        (module, slot, getattr(module, slot))
        for module in model.modules()
        for kind, slot in kinds.items()
        if isinstance(module, kind)
    ]
    try:
        for module, slot, _ in held:
            setattr(module, slot, 0.0)
        with _NoDropout():
            yield
    finally:
        for module, slot, rate in held:
            setattr(module, slot, rate)
