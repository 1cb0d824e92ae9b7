"""Normalization layers: their scale and shift. What they normalize by belongs to one example, or is fixed."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dpgrad.grads.uses import Dense, Use, wide


def layer_norm(
    g: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> dict[str, Use]:
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
    if training or running_mean is None or running_var is None:
        raise ValueError(
            "BatchNorm in training mode lets examples act on each other: replace it by GroupNorm with "
            "dpgrad.grads.convert(model), or put it in eval mode with public statistics"
        )
    return _channels(g, _fixed(input, running_mean, running_var, eps))


def _fixed(input: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(examples, rows, C, ...) normalized by statistics that do not depend on the batch."""
    shape = (1, 1, -1, *[1] * (input.ndim - 3))
    x = wide(input)
    return (x - mean.view(shape).to(x)) * (var.to(x) + eps).rsqrt().view(shape)


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
