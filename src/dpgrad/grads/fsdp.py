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

from dpgrad.errors import UnsupportedModelError, UnsupportedSystemError

__all__ = [
    "VERIFIED",
    "gathers",
    "is_shard",
    "is_sharded",
    "refuse_policies",
    "refuse_version",
    "resharded",
    "without_hooks",
]

VERIFIED = ("2.13",)  # versions of torch that the tests have run on
_FSDP = "torch.distributed.fsdp"


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
    """Refuse policies of ``fully_shard`` that change in which type, or where, gradients are computed."""
    for module in _modules(model):
        state = module._get_fsdp_state()
        policies = [state._mp_policy, *(group.mp_policy for group in state._fsdp_param_groups)]
        if any(each.param_dtype or each.reduce_dtype or each.output_dtype for each in policies):
            raise UnsupportedModelError(
                "mp_policy of fully_shard is not supported, since norms are measured in the type of the parameters: "
                "leave it out, and take steps within torch.autocast(device, torch.bfloat16), which keeps sums in "
                "float32"
            )
        if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in state._fsdp_param_groups):
            raise UnsupportedModelError(
                "offload_policy of fully_shard is not supported: leave it out, or put the whole model on the CPU"
            )


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


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)
