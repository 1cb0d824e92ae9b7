"""Batches: any pytree of tensors with a common first dimension."""

import re

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad._validate import shown
from dpgrad.errors import DataError, DpgradError, UnsupportedModelError
from dpgrad.grads.sums import Batch, Loss
from dpgrad.grads.unquoted import chosen

__all__ = ["LossShapeError", "as_rows", "leaves", "of_one_row", "on_device_of", "part", "row_losses", "size"]

_TYPES = re.compile(
    r"dtype|datatype|scalar type|[Ii]nput type|output type|not implemented for '"
)  # in torch's messages

_PER_EXAMPLE = "use reduction='none', e.g. F.cross_entropy(model(inputs), targets, reduction='none')"


class LossShapeError(UnsupportedModelError):
    """A loss that does not return one value per row."""


def of_one_row(error: Exception) -> bool:
    """Whether an error in a pass over one row may be due to that, as where a model squeezes its output.

    >>> of_one_row(ValueError("Target size ([1]) must be the same as input size ([])")), of_one_row(DataError("none"))
    (True, False)
    """
    return isinstance(error, RuntimeError | IndexError | ValueError) and (
        isinstance(error, LossShapeError) or not isinstance(error, DpgradError)
    )


def leaves(batch: Batch) -> list[Tensor]:
    """The tensors of a batch; anything else in it is refused."""
    found = pytree.tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) for leaf in found):
        raise DataError(_strange(batch))
    if not all(leaf.ndim for leaf in found):
        raise DataError("batch must hold tensors with a first dimension of examples, got a 0-dimensional tensor")
    if not found:
        raise DataError(f"batch must hold a tensor, got {shown(batch)}")
    return found


def _strange(batch: Batch) -> str:
    """What to say of a batch that holds something else than tensors."""
    found = pytree.tree_flatten_with_path(batch)[0]
    path, leaf = next((path, leaf) for path, leaf in found if not isinstance(leaf, Tensor))
    place = f" at {pytree.keystr(path)}" if path else ""
    return (
        f"batch must be a tensor, or a tuple, list or dict of tensors, got a {type(leaf).__name__}{place}: "
        "convert it with torch.as_tensor or dict(...)"
    )


def size(batch: Batch) -> int:
    """The first dimension that all tensors of a batch have in common.

    >>> import torch; size({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
    3
    """
    lengths = [len(leaf) for leaf in leaves(batch)]
    if len(set(lengths)) > 1:
        raise DataError(f"batch must hold tensors with one first dimension, got {lengths}: one entry per example")
    return lengths[0]


def part(batch: Batch, start: int, stop: int) -> Batch:
    """The examples from ``start`` to ``stop``."""
    return pytree.tree_map(lambda leaf: leaf[start:stop], batch)


def as_rows(batch: Batch) -> Batch:
    """A batch of (examples, K, ...) as one of rows, (examples·K, ...)."""
    return pytree.tree_map(lambda leaf: leaf.flatten(0, 1), batch)


def on_device_of(model: nn.Module, batch: Batch) -> None:
    """Refuse a batch that lies on another device than the model."""
    for leaf in leaves(batch):
        if any(parameter.device == leaf.device for parameter in model.parameters()):
            continue
        devices = {parameter.device for parameter in model.parameters()}
        if devices:
            where = ", ".join(sorted(map(str, devices)))
            raise DataError(f"batch lies on {leaf.device} and the model on {where}: move one with .to(device)")


def row_losses(loss: Loss, model: nn.Module, batch: Batch, rows: int) -> Tensor:
    """The loss of each row, (rows,); a loss that returns anything else is refused.

    It gets a dict of its own to take entries out of, as ``batch.pop("labels")`` does: it is called again on this batch.
    """
    seed = torch.initial_seed()
    try:
        found: object = loss(model, pytree.tree_map(lambda leaf: leaf, batch))
    except RuntimeError as error:
        if _TYPES.search(str(error)) and not chosen(error):
            raise UnsupportedModelError(_mismatch(model, batch, str(error))) from None
        raise
    if torch.initial_seed() != seed:
        raise UnsupportedModelError(
            "the model or the loss seeds torch's random numbers, so examples get them by their place in the "
            "batch: remove torch.manual_seed"
        )
    if not isinstance(found, Tensor):
        raise UnsupportedModelError(f"loss must return a tensor with one value per example, got {shown(found)}")
    if tuple(found.shape) != (rows,):
        hint = _PER_EXAMPLE if not found.ndim else "sum or average over every dimension but the first"
        raise LossShapeError(
            f"loss must return one value per example, shape ({rows},), got shape {tuple(found.shape)}: {hint}"
        )
    if not found.is_floating_point():
        raise UnsupportedModelError(f"loss must return floating-point values, got {found.dtype}")
    return found


def _mismatch(model: nn.Module, batch: Batch, reason: str) -> str:
    """What to say when torch refuses the types that meet in a model."""
    given = [f"batch{pytree.keystr(path)} is {leaf.dtype}" for path, leaf in pytree.tree_leaves_with_path(batch)]
    computed = next((parameter.dtype for parameter in model.parameters()), None)
    return (
        f"types do not match ({reason.splitlines()[0]}): the model is {computed}, {', '.join(given)}: convert inputs, "
        f"and targets that are numbers, with .to({computed}), arrays by .astype, indices and class labels with .long()"
    )
