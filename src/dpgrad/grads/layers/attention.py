"""Multi-head attention, written with `F.linear` on whole weights.

`nn.MultiheadAttention` hands its weights to `F.multi_head_attention_forward`, which cuts the packed weight in three and
says nothing of single examples. The rewrite returns what that function returns, softmax(q kᵀ/√d + mask) v for each
head (Vaswani et al. 2017, Eq. 1), and uses a parameter in two ways only: a weight by `F.linear` of an input (batch,
time, features), a bias without a weight by `expand` to the batch. The output is cut afterwards.

With trainable parameters nothing else is reached: `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take their
fused functions (`torch._native_multi_head_attention`, `torch._transformer_encoder_layer_fwd`) only in evaluation mode,
when no argument needs a gradient and none is of a tensor subclass. Where only a separate projection weight is
trained, torch's own function runs and gives that weight whole to `F.linear`, with an input (time, batch, features).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpgrad.errors import UnsupportedModelError

__all__ = ["REWRITES", "multi_head_attention_forward"]


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, static_k: Tensor | None, static_v: Tensor | None, hint_alone: bool
) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 3 for shape in shapes):
        raise UnsupportedModelError(
            f"attention needs query, key and value of 3 dimensions, one of them the batch, got shapes {shapes}: "
            "give it the whole batch, or a batch of one by unsqueeze"
        )
    if len({shape[1] for shape in shapes}) != 1:
        raise UnsupportedModelError(
            f"query, key and value must have one batch size, got shapes (time, batch, features) {shapes}: expand "
            "what is common to all examples to the batch"
        )
    if static_k is not None or static_v is not None:
        raise UnsupportedModelError("static_k and static_v have no rule: give key and value, to be projected")
    if hint_alone:
        raise UnsupportedModelError("is_causal is a hint about attn_mask, which is None: give the mask too")


def _packed_projection(inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """q, k and v (batch, time, E) by the packed weight (3E, E).

    Each distinct input meets the whole weight and only the part that is needed is kept of the product. That is three
    times the arithmetic where all three inputs differ, once where they are the same tensor, and always exact: the parts
    that are cut off have no gradient. The inputs are joined along time, so the weight is used once.
    """
    distinct = list({id(tensor): tensor for tensor in inputs}.values())
    joined = distinct[0] if len(distinct) == 1 else torch.cat(distinct, dim=1)
    products = F.linear(joined, weight, bias).split_with_sizes([x.shape[1] for x in distinct], dim=1)
    product_of = {id(tensor): product.chunk(3, dim=-1) for tensor, product in zip(distinct, products, strict=True)}
    return [product_of[id(tensor)][part] for part, tensor in enumerate(inputs)]


def _separate_projections(
    inputs: tuple[Tensor, Tensor, Tensor], weights: list[Tensor], bias: Tensor | None
) -> list[Tensor]:
    """q, k and v (batch, time, E) by a weight each; their biases are the three parts of one parameter (3E,)."""
    products = [F.linear(tensor, weight) for tensor, weight in zip(inputs, weights, strict=True)]
    if bias is None:
        return products
    biases = bias.expand(inputs[0].shape[0], -1).chunk(3, dim=-1)  # (batch, E) each
    return [product + part.unsqueeze(1) for product, part in zip(products, biases, strict=True)]


def _float_mask(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Tensor | None:
    """The mask as it is added to the scores: −inf where a mask of truth values is true."""
    if mask is None:
        return None
    if mask.shape not in shapes:
        raise UnsupportedModelError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise UnsupportedModelError(f"{name} must be of truth values or floating point, got {mask.dtype}")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, more: int) -> Tensor | None:
    """Both masks as one that broadcasts to (batch, heads, target, source), with ``more`` open sources at the end."""
    parts = []
    if attn_mask is not None:  # (target, source) or (batch·heads, target, source)
        parts.append(attn_mask if attn_mask.dim() == 2 else attn_mask.view(-1, num_heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:  # (batch, source)
        parts.append(key_padding_mask[:, None, None, :])
    return F.pad(sum(parts[1:], start=parts[0]), (0, more)) if parts else None


def _extended(sequence: Tensor, bias: Tensor | None, add_zero_attn: bool) -> Tensor:
    """Keys or values (batch, source, E) followed by the bias, one element common to all examples, and by zeros."""
    batch, _, features = sequence.shape
    parts = [sequence]
    if bias is not None:  # (1, 1, E)
        parts.append(bias.expand(batch, -1, -1))
    if add_zero_attn:
        parts.append(sequence.new_zeros(batch, 1, features))
    return torch.cat(parts, dim=1) if len(parts) > 1 else sequence


def _weighed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """The values mixed by the weights of attention, and the weights."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
    return weights @ v, weights


def _projected(
    inputs: tuple[Tensor, Tensor, Tensor], packed: Tensor | None, each: Sequence[Tensor | None], bias: Tensor | None
) -> list[Tensor]:
    """Queries, keys and values, by one packed weight or by one weight each."""
    if packed is not None:
        return _packed_projection(inputs, packed, bias)
    return _separate_projections(inputs, [weight for weight in each if weight is not None], bias)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `F.multi_head_attention_forward` returns: outputs (time, batch, E) and, if asked for, the weights.

    >>> layer, x = torch.nn.MultiheadAttention(2, 1), torch.ones(5, 3, 2)
    >>> into, out = (layer.in_proj_weight, layer.in_proj_bias), (layer.out_proj.weight, layer.out_proj.bias)
    >>> output, _ = multi_head_attention_forward(x, x, x, 2, 1, *into, None, None, False, 0.0, *out)
    >>> torch.allclose(output, layer(x, x, x)[0])
    True
    """
    _refuse(query, key, value, static_k, static_v, is_causal and attn_mask is None)
    (target, batch, _), source = query.shape, key.shape[0]
    first = {id(tensor): tensor.transpose(0, 1) for tensor in (query, key, value)}  # batch first; same stays same
    inputs = first[id(query)], first[id(key)], first[id(value)]
    each = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = _projected(inputs, None if use_separate_proj_weight else in_proj_weight, each, in_proj_bias)
    padding = _float_mask("key_padding_mask", key_padding_mask, [(batch, source)], query.dtype)
    mask = _float_mask("attn_mask", attn_mask, [(target, source), (batch * num_heads, target, source)], query.dtype)
    # As in torch: the hint replaces the mask where nothing else needs it.
    causal = is_causal and key_padding_mask is None and not need_weights
    merged = None if causal else _merged(mask, padding, num_heads, (bias_k is not None) + add_zero_attn)

    heads = (num_heads, embed_dim_to_check // num_heads)
    q, k, v = (  # (batch, heads, time, features of a head)
        tensor.view(*tensor.shape[:2], *heads).transpose(1, 2)
        for tensor in (q, _extended(k, bias_k, add_zero_attn), _extended(v, bias_v, add_zero_attn))
    )
    dropout = dropout_p if training else 0.0
    if need_weights:
        mixed, weights = _weighed(q, k, v, merged, dropout)
    else:
        mixed, weights = F.scaled_dot_product_attention(q, k, v, merged, dropout, causal), None
    output = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return output.transpose(0, 1), weights.mean(dim=1) if weights is not None and average_attn_weights else weights


REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
}
"""The torch function that `nn.MultiheadAttention` calls -> the same in terms of `F.linear`."""
