"""A model whose parameters are exchanged for other tensors, for the length of a block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad._validate import shown
from dpgrad.grads.sums import trainable


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside a compiled model: its parameters are the same, and each use of them can be seen.

    Models that hide their modules otherwise are refused.
    """
    given: object = model  # a caller may ignore types
    if not isinstance(given, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {shown(given)}")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return unwrapped(model._orig_mod)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"model must be the module itself, got {type(model).__name__}: give model.module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"module {name or 'itself'!r} is a TorchScript one: give the module it was made from")
        inner = name and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        if inner or module._compiled_call_impl is not None:
            raise ValueError(f"module {name or 'itself'!r} of the model is compiled: give it uncompiled")
    return model


@contextmanager
def swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Wherever a module of ``model`` holds the parameter ``name``, it holds ``tensors[name]`` instead.

    Every place is exchanged, so that tied parameters stay tied. The model is as before when the block ends, however it
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
