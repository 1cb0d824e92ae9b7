"""The clipped sum of a whole batch, in as many pieces as memory asks for."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad import _validate
from dpgrad.errors import DataError, OptionError
from dpgrad.grads import single, vmap, ways
from dpgrad.grads.batch import as_rows, leaves, on_device_of, part, size
from dpgrad.grads.clip import PerExample
from dpgrad.grads.sums import Batch, ClippedSum, Groups, Loss, Scale, sum_dtype, trainable
from dpgrad.grads.swap import unwrapped

__all__ = ["ENGINES", "Engine", "clipped_sum", "row_weights", "unless_out_of_memory"]

T = TypeVar("T")


class Engine(Protocol):
    """Computes the gradient of every example: ``rows`` consecutive rows of the batch, each with its weight."""

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1) -> PerExample: ...


ENGINES: dict[str, Engine] = {"bookkeeping": ways.gradients, "vmap": vmap.gradients, "single": single.gradients}


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    scale: Scale,
    engine: Engine = ways.gradients,
    groups: Groups | None = None,
    mask: Tensor | None = None,
    several_rows: bool = False,
    microbatch: int | None = None,
) -> ClippedSum:
    """Σ scale(‖gᵢ‖)·gᵢ over the examples of a batch, with what rounding may add taken off.

    ``loss(model, batch)`` returns one value per row. With ``several_rows`` the tensors of the batch are
    (examples, K, ...): the loss sees all rows at once, and an example's gradient is the mean over its rows. ``mask``,
    (examples,) or (examples, K), leaves out padding. ``groups`` gives the group of each parameter; norms and factors
    are then one per group.

    ``microbatch`` examples are worked on at a time. Where even they do not fit, the same examples are worked on in
    smaller pieces: what is summed does not change, and noise is added by the caller, once.

    Guarantee: for a rule with scale(n)·n ≤ clip, one example changes the sum by at most clip. Nothing is computed for
    an empty batch, and an example whose gradient is not finite is left out.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> hard = lambda norms: (1 / norms).clamp(max=1)
    >>> found = clipped_sum(model, lambda model, x: model(x)[:, 0], torch.tensor([[0.5], [3.0]]), hard)
    >>> round(found.sums["weight"].item(), 2)
    1.5
    """
    model = unwrapped(model)
    examples = size(batch)
    names = list(trainable(model))
    if microbatch is not None:
        _validate.whole(least=1, microbatch=microbatch)
    if groups is not None:
        _refuse_groups(groups, names)
    if not examples or not names:
        return ClippedSum.zero(model)
    on_device_of(model, batch)
    weights = row_weights(model, batch, mask, several_rows)
    if several_rows and mask is not None:
        batch = _without_padding(batch, weights)

    def piece(start: int, stop: int) -> ClippedSum:
        few = batch if stop - start == examples else part(batch, start, stop)
        rows = as_rows(few) if several_rows else few
        return engine(model, loss, rows, weights[start:stop].flatten(), weights.shape[1]).clipped(scale, groups)

    return _in_pieces(piece, examples, microbatch or examples)


def _without_padding(batch: Batch, weights: Tensor) -> Batch:
    """The batch with padding replaced by the first row of its example that counts: 0·NaN would drop the example."""
    examples, width = weights.shape
    first = (weights > 0).to(torch.int8).argmax(1, keepdim=True)
    source = torch.where(weights > 0, torch.arange(width, device=weights.device), first)  # (examples, K)
    own = torch.arange(examples, device=weights.device)[:, None]
    return pytree.tree_map(lambda leaf: leaf[own, source], batch)


def _refuse_groups(groups: Groups, names: Collection[str]) -> None:
    unknown, missing = sorted(groups.keys() - set(names)), sorted(set(names) - groups.keys())
    if unknown or missing:
        raise OptionError(
            f"groups must name every trainable parameter and no other, got unknown {unknown} and missing {missing}"
        )
    for name, group in groups.items():
        _validate.whole(least=0, **{f"group of {name}": group})


def row_weights(model: nn.Module, batch: Batch, mask: Tensor | None, several_rows: bool) -> Tensor:
    """What each row counts for within its example, (examples, K): 1/K, zero for padding."""
    first = leaves(batch)[0]
    if several_rows:
        shapes = {tuple(leaf.shape[:2]) for leaf in leaves(batch)}
        if len(shapes) > 1 or first.ndim < 2 or not first.shape[1]:
            raise DataError(
                "with several rows per example every tensor must begin with (examples, rows), one row or more, got "
                f"{sorted(shapes)}"
            )
    shape = first.shape[:2] if several_rows else (len(first), 1)
    dtype = sum_dtype(next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad))
    if mask is None:
        return torch.full(shape, 1 / shape[1], dtype=dtype, device=first.device)
    given: object = mask  # a caller may ignore types
    fits = isinstance(given, Tensor) and given.shape in {first.shape[:1], torch.Size(shape)}
    if not fits or mask.dtype != torch.bool:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(given, Tensor) else _validate.shown(given)
        raise DataError(f"mask must be boolean with one entry per example or row, {tuple(shape)}, got {got}")
    counted = mask.to(first.device).view(len(first), -1).expand(shape).to(dtype)
    return counted / counted.sum(1, keepdim=True).clamp(min=1)


def _in_pieces(piece: Callable[[int, int], ClippedSum], examples: int, most: int) -> ClippedSum:
    """The sum over all examples, ``most`` at a time, fewer where memory does not suffice.

    Several pieces are added in float64: each piece's own rounding is accounted for, that of a long sum is not.
    """
    waiting = [(start, min(start + most, examples)) for start in range(0, examples, most)][::-1]
    total: ClippedSum | None = None
    while waiting:
        start, stop = waiting.pop()
        found = unless_out_of_memory(partial(piece, start, stop))
        if found is not None and stop - start == examples:
            return found  # the whole batch in one piece
        if found is not None:
            total = _double(found) if total is None else total + found
        elif stop - start == 1:
            raise MemoryError(
                "the gradient of one example does not fit in memory: use the book-keeping engine, a smaller model or "
                "another device"
            )
        else:
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]
    assert total is not None
    return total


def _double(total: ClippedSum) -> ClippedSum:
    return ClippedSum({name: found.double() for name, found in total.sums.items()})


def unless_out_of_memory(work: Callable[[], T]) -> T | None:
    """What the work returns; None where memory does not suffice for it, after what can be given back was given back.

    >>> unless_out_of_memory(lambda: 3)
    3
    """
    try:
        return work()
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
