"""What dpgrad reads of torch's FSDP2 beyond its documented interface: the hooks and the policies of ``fully_shard``.

No other module reads them. They may change with any version of torch, so versions on which the tests have not run
are refused.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpgrad.errors import UnsupportedModelError, UnsupportedSystemError

__all__ = [
    "VERIFIED",
    "cast",
    "gathers",
    "is_shard",
    "is_sharded",
    "refuse_policies",
    "refuse_version",
    "resharded",
    "undressed",
    "units",
    "without_hooks",
    "words",
]

VERIFIED = ("2.13",)  # versions of torch that the tests have run on
_FSDP = "torch.distributed.fsdp"
_OWN = ("__composable_api_", "_is_fsdp_managed_module", "_fsdp_use_orig_params")  # attributes that it sets


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the model or to one of its modules.

    >>> is_sharded(nn.Linear(1, 1))
    False
    """
    return next(_modules(model), None) is not None


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds a part of the tensor alone.

    >>> is_shard(torch.zeros(2))
    False
    """
    known = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return known is not None and isinstance(tensor, known.DTensor)


def gathers(model: nn.Module) -> bool:
    """Whether a pass of the model calls FSDP's hooks, which gather its parameters and give them back.

    >>> gathers(nn.Linear(1, 1))
    False
    """
    return any(_of_fsdp(hook) for module in _modules(model) for hook in module._forward_pre_hooks.values())


def _modules(model: nn.Module) -> Iterator[Any]:
    """The modules that ``fully_shard`` was called with."""
    kind = getattr(sys.modules.get(_FSDP), "FSDPModule", None)
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))


def refuse_version(version: str = torch.__version__) -> None:
    """Refuse a version of torch whose FSDP2 was not tested.

    >>> refuse_version("2.13.1+cu130")
    >>> refuse_version("3.0.0")
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedSystemError: models sharded by fully_shard are tested with torch 2.13, got 3.0.0: ...
    """
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in VERIFIED:
        raise UnsupportedSystemError(
            f"models sharded by fully_shard are tested with torch {', '.join(VERIFIED)}, got {version}: install that "
            "version, or give the plain model to every rank"
        )


def refuse_policies(model: nn.Module) -> None:
    """Refuse policies of ``fully_shard`` that change where gradients are computed."""
    for module in _modules(model):
        groups = module._get_fsdp_state()._fsdp_param_groups
        if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in groups):
            raise UnsupportedModelError(
                "offload_policy of fully_shard is not supported: leave it out, or put the whole model on the CPU"
            )


def units(model: nn.Module) -> list[tuple[list[nn.Parameter], torch.dtype | None]]:
    """The parameters that ``fully_shard`` keeps together, and the type in which passes see them, None for their own.

    They are those of a module it was called with, without those of such a module within.
    """
    found: dict[int, tuple[list[nn.Parameter], torch.dtype | None]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, unit: int, dtype: torch.dtype | None) -> None:
        if _is_unit(module):
            unit, dtype = id(module), _policy(module).param_dtype
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.setdefault(unit, ([], dtype))[0].append(parameter)
        for inner in module.children():
            visit(inner, unit, dtype)

    visit(model, 0, None)
    return list(found.values())


def _is_unit(module: nn.Module) -> bool:
    return next(_modules(module), None) is module


def _policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy


@contextmanager
def cast(model: nn.Module) -> Iterator[None]:
    """Within the block inputs and outputs of modules have the types that ``mp_policy`` of ``fully_shard`` names."""

    def to(dtype: torch.dtype, given: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.to(dtype) if _floats(leaf) else leaf, given)

    hooks: list[RemovableHandle] = []
    try:
        for module in _modules(model):
            policy = _policy(module)
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, args, kwargs, dtype=policy.param_dtype: (to(dtype, args), to(dtype, kwargs)),
                        with_kwargs=True,
                    )
                )
            if policy.output_dtype is not None:
                hooks.append(
                    module.register_forward_hook(lambda _, args, out, dtype=policy.output_dtype: to(dtype, out))
                )
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _floats(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def resharded(model: nn.Module) -> None:
    """Give back the parameters that a pass of the caller's own gathered: the model holds shards again."""
    for module in _modules(model):
        module.reshard()


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Within the block a pass neither gathers nor gives back parameters: FSDP's hooks are not called."""
    held = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    before = [dict(hooks) for hooks in held]
    try:
        for hooks in held:
            for number in [number for number, hook in hooks.items() if _of_fsdp(hook)]:
                del hooks[number]
        yield
    finally:
        for hooks, were in zip(held, before, strict=True):
            added = {number: hook for number, hook in hooks.items() if number not in were}
            hooks.clear()
            hooks.update({**were, **added})


@contextmanager
def undressed(model: nn.Module) -> Iterator[None]:
    """Within the block the modules have neither hooks nor attributes that ``fully_shard`` gave them."""
    held = [vars(module) for module in model.modules()]
    held += [value for own in held for name, value in own.items() if name.endswith("_hooks")]
    before = [dict(each) for each in held]
    try:
        for each in held:
            for name in [name for name, value in each.items() if str(name).startswith(_OWN) or _of_fsdp(value)]:
                del each[name]
        yield
    finally:
        for each, were in zip(held, before, strict=True):
            each.clear()  # hooks are called in their order
            each.update(were)


def words(model: nn.Module) -> list[str]:
    """What ``fully_shard`` made of a model, on which the order of sums and the rounding of a pass depend."""
    names = {id(each): name for name, each in model.named_parameters()}
    found = [f"{dtype}: {', '.join(names[id(each)] for each in parameters)}" for parameters, dtype in units(model)]
    found += [str(_policy(module)) for module in _modules(model)]
    first: Any = next(each for each in model.parameters() if is_shard(each))
    return [*found, f"{tuple(first.device_mesh.shape)} {first.placements}"]


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)
