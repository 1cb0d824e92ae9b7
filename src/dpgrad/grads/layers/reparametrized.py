"""Weights that are computed from other parameters, or taken for constants."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["REWRITES", "weight_norm"]


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """w = g·v/‖v‖, the norm over every dimension but ``dim``; -1 for all of them."""
    others = [d for d in range(v.ndim) if dim == -1 or d != dim % v.ndim]
    return v * (g / torch.sqrt((v * v).sum(others, keepdim=dim != -1)))


REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: weight_norm,
    Tensor.data.__get__: torch.detach,  # type: ignore[attr-defined]
}
