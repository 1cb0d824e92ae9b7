"""Embeddings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.uses import Lookup, Use

__all__ = ["RULES", "embedding"]


def embedding(
    g: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> dict[str, Use]:
    """y_t = W[x_t]; the row ``padding_idx`` gets no gradient."""
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedModelError("an embedding with max_norm or scale_grad_by_freq mixes examples: turn both off")
    ids, g = input.flatten(1), g.flatten(1, -2)
    if padding_idx is not None:
        row = padding_idx % weight.shape[0]
        g = torch.where((ids == row)[..., None], 0, g)
    return {"weight": Lookup(ids, g, weight.shape[0])}


RULES: dict[Callable[..., Any], Callable[..., dict[str, Use]]] = {F.embedding: embedding}
