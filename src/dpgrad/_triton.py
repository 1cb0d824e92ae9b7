"""Triton kernels for what plain torch does in many launches or passes; each has a plain path that it equals.

Triton comes with torch for CUDA devices. Where it is missing, callers take the plain path. The files beside this one
are imported only where `runs_on` holds.
"""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

available = find_spec("triton") is not None and torch.cuda.is_available()


def runs_on(*tensors: Tensor) -> bool:
    """Whether kernels may be used for these tensors: Triton is here, and all are on a CUDA device.

    >>> runs_on(torch.zeros(2))
    False
    """
    return available and all(tensor.is_cuda for tensor in tensors)


def on_its_device(launch: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """The function with the device of its first argument as the current one, on which Triton launches."""

    @wraps(launch)
    def launched(tensor: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
            return launch(tensor, *args, **kwargs)

    return launched
