"""Functions of a batch, run once on all examples of a `torch.func.vmap`.

vmap takes many functions apart, or copies their inputs: group norms, convolutions, attention. All of them treat the
entries of their first dimension alike and apart. So the dimension of the examples is folded into that one,
(examples, rows, ...) -> (examples·rows, ...), the function runs as in any batched pass, and its result is unfolded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call  # what an autograd.Function is called by
from torch.nn import functional as F

from dpgrad.grads.layers import ANY_RANK, RULES
from dpgrad.grads.layers.recurrent import DATA, WEIGHTS, OneLayer

__all__ = [
    "FOLDED",
    "Folding",
    "Function",
    "folding",
    "has_own_rule",
    "is_batched",
    "layer_folding",
    "physical",
    "wrapped",
]  # fmt: skip

_C: Any = torch._C._functorch
Function = Callable[..., Any]


def is_batched(value: object) -> bool:
    """Whether a value is a tensor inside vmap that holds all examples."""
    return isinstance(value, Tensor) and _C.is_batchedtensor(value)


def physical(tensor: Tensor) -> Tensor:
    """The tensor of all examples, (examples, ...), behind the one that a function inside vmap sees."""
    held: Tensor = _C.get_unwrapped(tensor)
    dim: int = _C.maybe_get_bdim(tensor)
    return held.movedim(dim, 0) if dim else held


def wrapped(tensor: Tensor, level: int, dim: int = 0) -> Tensor:
    """What a function inside vmap sees of a tensor of all examples, which stand in dimension ``dim``."""
    made: Tensor = _C._add_batch_dim(tensor, dim, level)
    return made


def has_own_rule(func: Any, args: Sequence[Any]) -> bool:
    """Whether a function that is not torch's says itself what vmap does: such a rule is given all examples."""
    if func is custom_function_call:
        return not args[0].generate_vmap_rule
    whole = isinstance(func, torch._ops.OpOverloadPacket)
    if not whole and not isinstance(func, torch._ops.OpOverload):
        return False
    overloads = [getattr(func, each) for each in func.overloads()] if whole else [func]
    return any(
        each.namespace not in ("aten", "prims")
        and torch._C._dispatch_has_kernel_for_dispatch_key(each.name(), "FuncTorchBatched")
        for each in overloads
    )


def _named(*names: str) -> list[Function]:
    """The functions of these names, in each of the places where torch has one."""
    found = [getattr(place, name, None) for name in names for place in (F, torch, torch._C._nn)]
    return [each for each in found if each is not None]


# Dimensions of the input, the batch among them; without that one, the examples become the batch.
_RANKS: dict[Function, int] = {
    func: space + 2
    for space in (1, 2, 3)
    for func in _named(
        *(f"{kind}{space}d" for kind in ("conv", "conv_transpose", "max_pool", "avg_pool")),
        *(f"adaptive_{kind}_pool{space}d" for kind in ("avg", "max")),
        *(f"{kind}max_pool{space}d_with_indices" for kind in ("", "adaptive_")),
    )
} | {F.unfold: 4, F.fold: 3, F.scaled_dot_product_attention: 4}
# Any number of dimensions, the first of which is the batch.
_BATCH_FIRST: set[Function] = {
    F.group_norm, F.instance_norm, F.batch_norm, F.interpolate, F.cross_entropy, F.nll_loss,
    torch.mm, Tensor.mm, torch.addmm,
}  # fmt: skip
# Any dimensions before the last ones.
_ANY_RANK: set[Function] = {func for func, rule in RULES.items() if rule in ANY_RANK} - _BATCH_FIRST
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}  # whose second factor may have a batch of its own
# The arguments that have the batch, where it is not the first alone.
_DATA: dict[Function, dict[int, str]] = {
    torch.addmm: {1: "mat1"},
    F.cross_entropy: {0: "input", 1: "target"},
    F.nll_loss: {0: "input", 1: "target"},
    F.scaled_dot_product_attention: {0: "query", 1: "key", 2: "value"},
}
_FIRST = {0: "input"}
_KEEPING_RESULTS = {F.scaled_dot_product_attention}  # for the backward pass
FOLDED: frozenset[Function] = frozenset({*_RANKS, *_BATCH_FIRST, *_ANY_RANK})


@dataclass
class Folding:
    """The arguments of a function on all examples, and where these stand in its results."""

    args: list[Any]
    kwargs: dict[str, Any]
    sizes: tuple[int, int] | None  # (examples, rows) where these are folded
    dims: tuple[int, ...] = (0,)  # the dimension that they are folded in, for each result
    view: bool = False

    def closed(self, result: Any, level: int) -> Any:
        """The result as a function inside vmap sees it."""
        if isinstance(result, Tensor):
            return self._closed(result, self.dims[0], level)
        dims = self.dims if len(self.dims) > 1 else self.dims * len(result)
        return type(result)(self._closed(each, dim, level) for each, dim in zip(result, dims, strict=True))

    def _closed(self, tensor: Tensor, dim: int, level: int) -> Tensor:
        if self.sizes is None:
            return wrapped(tensor, level)
        shape = (*tensor.shape[:dim], *self.sizes, *tensor.shape[dim + 1 :])
        # A view would make every later change in place expensive. Nobody else sees the tensor it would be a view of,
        # so it need not be one, unless the backward pass does.
        open = tensor.view(shape) if self.view else torch.ops.aten._unsafe_view(tensor, shape)
        return wrapped(open, level, dim)


def folding(func: Function, args: Iterable[Any], kwargs: dict[str, Any], examples: int) -> Folding | None:
    """How ``func`` runs on all examples at once; None where that is left to vmap. Call it outside of vmap's level."""
    given, named = list(args), dict(kwargs)
    places: list[tuple[Any, Any]] = [
        (given, place) if place < len(given) else (named, name) for place, name in _DATA.get(func, _FIRST).items()
    ]
    found = [where.get(key) if isinstance(where, dict) else where[key] for where, key in places]
    data = [each for each in found if isinstance(each, Tensor)]
    if len(data) < len(found) or not any(map(is_batched, data)):
        return None
    fold = _folds(func, data, given, named)
    if fold is None:
        return None
    rows = data[0].shape[0] if fold else 1

    def opened(tensor: Tensor) -> Tensor:
        whole = physical(tensor) if is_batched(tensor) else tensor.expand(examples, *tensor.shape)
        return whole.flatten(0, 1) if fold else whole

    for (where, key), each in zip(places, data, strict=True):
        where[key] = opened(each)
    if func is F.scaled_dot_product_attention:
        _open_mask(given, named, fold, examples, rows)
    if any(map(is_batched, (*given, *named.values()))):
        return None
    return Folding(given, named, (examples, rows) if fold else None, view=func in _KEEPING_RESULTS)


def _folds(func: Function, data: list[Tensor], args: list[Any], kwargs: dict[str, Any]) -> bool | None:
    """Whether the examples are folded into the first dimension or stand before it; None for neither.

    Guarantee: no other argument is lined up with the dimension of the examples when it is broadcast.
    """
    ndim, ndims = data[0].ndim, {each.ndim for each in data}
    if "out" in kwargs:
        return None
    if func in _ANY_RANK:
        other = args[1] if len(args) > 1 else kwargs.get("other")
        many = func in _PRODUCTS and (not isinstance(other, Tensor) or other.ndim > 2)
        return None if many else False
    if len({each.shape[:1] for each in data}) > 1:
        return None
    if func in _RANKS:
        fold = {_RANKS[func]: True, _RANKS[func] - 1: False}.get(ndim)
        fits = len(ndims) == 1 and (func is not F.scaled_dot_product_attention or _mask_fits(args, kwargs, data[0]))
        return fold if fits else None
    if func in (F.cross_entropy, F.nll_loss) and (kwargs.get("reduction") != "none" or len(args) > 3):
        return None
    if func is F.instance_norm and _keeps_statistics(*args[1:], **kwargs):
        return None
    if func is torch.addmm:
        added = args[0] if args else kwargs.get("input")
        return True if isinstance(added, Tensor) and added.shape[:-1].numel() == 1 and added.ndim <= 2 else None
    return True if ndim >= 2 else None


def _keeps_statistics(
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether an instance norm writes what it sees of all examples into its running statistics."""
    return use_input_stats and (running_mean is not None or running_var is not None)


def _mask_of(args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[3] if len(args) > 3 else kwargs.get("attn_mask")


def _mask_fits(args: list[Any], kwargs: dict[str, Any], query: Tensor) -> bool:
    """Whether a mask has one entry, or as many as the queries, where it has their batch at all."""
    mask = _mask_of(args, kwargs)
    return mask is None or mask.ndim < query.ndim or mask.shape[0] in (1, query.shape[0])


def _open_mask(args: list[Any], kwargs: dict[str, Any], fold: bool, examples: int, rows: int) -> None:
    """The attention mask for queries of all examples: it may lack dimensions, or have size one there."""
    where: Any = args if len(args) > 3 else kwargs
    key: Any = 3 if len(args) > 3 else "attn_mask"
    mask = _mask_of(args, kwargs)
    if mask is None:
        return
    ndim = 4 if fold else 3
    if is_batched(mask):
        whole = physical(mask)
        whole = whole.reshape(examples, *[1] * (ndim + 1 - whole.ndim), *whole.shape[1:])
        where[key] = whole.expand(examples, rows, *whole.shape[2:]).flatten(0, 1) if fold else whole
    elif fold and mask.ndim == 4 and mask.shape[0] > 1:
        where[key] = mask.expand(examples, *mask.shape).flatten(0, 1)


def layer_folding(layer: OneLayer, examples: int) -> Folding | None:
    """The same for one layer of a recurrent network; None where no example is in it, or one is in its weights."""
    if any(is_batched(getattr(layer, name)) for name in WEIGHTS) or not any(map(is_batched, layer)):
        return None

    def opened(tensor: Any) -> Any:
        if tensor is None:
            return None
        whole = physical(tensor) if is_batched(tensor) else tensor.expand(examples, *tensor.shape)
        return whole.flatten(0, 1)

    folded = layer._replace(**{name: opened(getattr(layer, name)) for name in DATA})
    return Folding([folded], {}, (examples, len(layer.inputs)), view=True)
