"""Normalization layers: their scale and shift. What they normalize by belongs to one example, or is fixed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpgrad import _triton
from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.sums import sum_dtype
from dpgrad.grads.uses import Dense, Use, wide

__all__ = ["RULES", "batch_norm", "group_norm", "instance_norm", "layer_norm", "refuse_training", "rms_norm"]

_MOST_TOGETHER = 1 << 13  # values that a kernel holds at once


def layer_norm(
    g: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> dict[str, Use]:
    width = math.prod(normalized_shape)
    if _by_kernel(input, g, width):
        from dpgrad.grads.kernels import affine

        x, out = (each.reshape(len(g), -1, width).contiguous() for each in (input, g))
        return _as_uses(affine.layer_norm(x, out, eps), (len(g), *normalized_shape))
    normal = F.layer_norm(wide(input), normalized_shape, eps=eps)
    return _trailing(g, normal, len(normalized_shape))


def rms_norm(
    g: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> dict[str, Use]:
    normal = F.rms_norm(wide(input), normalized_shape, eps=eps)
    return _trailing(g, normal, len(normalized_shape))


def group_norm(
    g: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> dict[str, Use]:
    channels = g.shape[2]
    if g.shape[1] == 1 and _by_kernel(input, g, input[0].numel() // num_groups):
        from dpgrad.grads.kernels import affine

        x, out = (each.reshape(len(g), channels, -1).contiguous() for each in (input, g))
        return _as_uses(affine.group_norm(x, out, num_groups, eps), (len(g), channels))
    normal = F.group_norm(wide(input).flatten(0, 1), num_groups, eps=eps)
    return _channels(g, normal.view_as(input))


def instance_norm(
    g: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Use]:
    if not use_input_stats and running_mean is not None and running_var is not None:
        return _channels(g, _fixed(input, running_mean, running_var, eps))
    normal = F.instance_norm(wide(input).flatten(0, 1), eps=eps)
    return _channels(g, normal.view_as(input))


def batch_norm(
    g: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Use]:
    return _channels(g, _fixed(input, *refuse_training(training, running_mean, running_var), eps))


def refuse_training(training: bool, mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor]:
    """The fixed statistics of a BatchNorm; one that has none, or gathers them, is refused."""
    if training or mean is None or var is None:
        raise UnsupportedModelError(
            "BatchNorm in training mode mixes examples: replace it by GroupNorm with "
            "dpgrad.grads.convert(model), or put it in eval mode with public statistics"
        )
    return mean, var


def _fixed(input: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(examples, rows, C, ...) normalized by statistics that do not depend on the batch."""
    shape = (1, 1, -1, *[1] * (input.ndim - 3))
    x = wide(input)
    return (x - mean.view(shape).to(x)) * (var.to(x) + eps).rsqrt().view(shape)


def _by_kernel(input: Tensor, g: Tensor, together: int) -> bool:
    """Whether a kernel can do it: so many values are normalized together, and none is of higher precision."""
    narrow = all(sum_dtype(each.dtype) == torch.float32 for each in (input, g))
    return narrow and 0 < together <= _MOST_TOGETHER and _triton.runs_on(input, g)


def _as_uses(found: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> dict[str, Use]:
    scale, shift = found
    return {"weight": Dense(scale.view(shape)), "bias": Dense(shift.view(shape))}


def _trailing(g: Tensor, normal: Tensor, dims: int) -> dict[str, Use]:
    """Scale and shift over the last ``dims`` dimensions."""
    middle = tuple(range(1, g.ndim - dims))
    g = wide(g)
    return {"weight": Dense((g * normal).sum(middle)), "bias": Dense(g.sum(middle))}


def _channels(g: Tensor, normal: Tensor) -> dict[str, Use]:
    """Scale and shift of each channel: (examples, rows, C, ...)."""
    others = (1, *range(3, g.ndim))
    g = wide(g)
    return {"weight": Dense((g * normal).sum(others)), "bias": Dense(g.sum(others))}


RULES: dict[Callable[..., Any], Callable[..., dict[str, Use]]] = {
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
}
