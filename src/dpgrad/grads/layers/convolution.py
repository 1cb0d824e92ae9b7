"""Convolutions and transposed convolutions in one, two and three dimensions."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dpgrad.grads.patches import Patches
from dpgrad.grads.uses import Dense, Use, wide

__all__ = ["RULES", "convolution", "transposed"]

_Sizes = int | Sequence[int]


def convolution(
    g: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Sizes = 1,
    padding: _Sizes | str = 0,
    dilation: _Sizes = 1,
    groups: int = 1,
) -> dict[str, Use]:
    examples, x, out, many = len(g), input.flatten(0, 1), g.flatten(0, 1), weight.ndim - 2
    kernel, steps, spread = tuple(weight.shape[2:]), _each(stride, many), _each(dilation, many)
    if padding == "same":
        before = tuple(d * (k - 1) // 2 for k, d in zip(kernel, spread, strict=True))
    else:
        before = _each(0 if isinstance(padding, str) else padding, many)
    return {"weight": Patches(x, out, kernel, steps, before, spread, groups, examples), "bias": _bias(g)}


def transposed(
    g: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _Sizes = 1,
    padding: _Sizes = 0,
    output_padding: _Sizes = 0,
    groups: int = 1,
    dilation: _Sizes = 1,
) -> dict[str, Use]:
    """The adjoint of a convolution: its input and its output's gradient exchange their parts."""
    examples, x, out, many = len(g), input.flatten(0, 1), g.flatten(0, 1), weight.ndim - 2
    sizes = tuple(weight.shape[2:]), _each(stride, many), _each(padding, many), _each(dilation, many)
    return {"weight": Patches(out, x, *sizes, groups, examples), "bias": _bias(g)}


def _bias(g: Tensor) -> Dense:
    return Dense(wide(g).sum((1, *range(3, g.ndim))))


def _each(value: _Sizes, many: int) -> tuple[int, ...]:
    """One size per dimension; a single one stands for all."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return sizes * many if len(sizes) == 1 else sizes


RULES: dict[Callable[..., Any], Callable[..., dict[str, Use]]] = {
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.conv_transpose1d: transposed,
    F.conv_transpose2d: transposed,
    F.conv_transpose3d: transposed,
}
