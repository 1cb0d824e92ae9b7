"""Linear layers, and matrix products with a parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpgrad.grads.uses import Dense, Layer, Outer, Use, wide

__all__ = ["RULES", "addmm", "linear", "matmul"]


def linear(g: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Use]:
    """y = x Wᵀ + b at any number of positions."""
    if weight.ndim == 1:
        g = g.unsqueeze(-1)
    a, g = _positions(input), _positions(g)
    layer = Layer.of(a, g)
    found: dict[str, Use] = {"weight": Outer(a, g, layer=layer) if weight.ndim == 2 else Dense(_along(a, g))}
    return found if bias is None else {**found, "bias": _bias(g, bias, layer)}


def matmul(g: Tensor, input: Tensor, other: Tensor) -> dict[str, Use]:
    """y = x W: the weight of a linear layer, transposed, or a vector."""
    if other.ndim == 1:
        return {"other": Dense(_along(_positions(input), _positions(g.unsqueeze(-1))))}
    return {"other": Outer(_positions(g), _positions(input))}


def addmm(
    g: Tensor, bias: Tensor, input: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1
) -> dict[str, Use]:
    """y = x W + b, as transformers write it."""
    a, g = _positions(input), _positions(g)
    of_weight, of_bias = (g if factor == 1 else g * factor for factor in (alpha, beta))
    layer = Layer.of(a, of_weight)
    return {
        "weight": Outer(of_weight, a, layer=layer),
        "bias": _bias(of_bias, bias, layer if alpha == beta else None),
    }


def _along(a: Tensor, g: Tensor) -> Tensor:
    """Σ_t g_t a_t for g (examples, T, 1): the gradient of a vector that inputs are multiplied by."""
    return (wide(g) * wide(a)).sum(1)


def _bias(g: Tensor, bias: Tensor, layer: Layer | None) -> Dense:
    """Σ_t g_t, (examples, p), of the layer; one number for all outputs where the bias is one number."""
    if layer is not None and bias.numel() == g.shape[2]:
        return Dense(g[:, 0].reshape(len(g), *bias.shape), layer=layer)
    total = wide(g)[:, 0] if g.shape[1] == 1 else wide(g).sum(1)
    if bias.shape[:-1].numel() > 1:  # data
        return Dense(total)
    return Dense((total.sum(1) if bias.numel() == 1 else total).reshape(len(g), *bias.shape))


def _positions(tensor: Tensor) -> Tensor:
    """(examples, rows, ..., d) as (examples, T, d)."""
    return tensor.flatten(1, -2)


RULES: dict[Callable[..., Any], Callable[..., dict[str, Use]]] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.mm: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.addmm: addmm,
}
