"""The data of a run, from which examples are taken by their index.

Data are tensors or arrays with a common first dimension, alone or in tuples, lists and dicts (a list holds columns, not
examples), or a map-style `torch.utils.data.Dataset`.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dpgrad.grads.sums import Batch

Collate = Callable[[list[Any]], Batch]


def rows(data: Any) -> int:
    """How many examples the data have; what examples cannot be taken from by index is refused.

    >>> rows({"x": torch.zeros(3, 2), "y": np.zeros(3)})
    3
    """
    if isinstance(data, IterableDataset | DataLoader) or (isinstance(data, Dataset) and not isinstance(data, Sized)):
        raise ValueError(
            f"data must be tensors or a map-style Dataset with a length, got {type(data).__name__}: the mechanism "
            "draws the batches, so it needs every example by its index; give the dataset itself"
        )
    if isinstance(data, Dataset):
        return len(data)  # type: ignore[arg-type]
    named = pytree.tree_flatten_with_path(data)[0]
    for path, leaf in named:
        if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
            raise ValueError(
                f"data{pytree.keystr(path)} must be a tensor or an array with one entry per example, got a "
                f"{type(leaf).__name__}: wrap a list of examples in a map-style Dataset"
            )
        if isinstance(leaf, np.ndarray) and not _has_numbers(leaf):
            raise ValueError(
                f"data{pytree.keystr(path)} must hold numbers that torch knows, got {leaf.dtype}: give labels as class "
                "indices 0, 1, ..., in an order fixed without looking at the data, and convert other columns to float32"
            )
    lengths = {f"data{pytree.keystr(path)}": len(leaf) for path, leaf in named}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} has {length:,}" for name, length in [*lengths.items()][:4]) or "nothing"
        raise ValueError(
            f"data must hold tensors with one entry per example, but {shown}: a tuple, list or dict holds columns; "
            "wrap a list of examples in a map-style Dataset"
        )
    return next(iter(lengths.values()))


def _has_numbers(array: np.ndarray[Any, Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def gathered(data: Any, indices: Tensor, device: torch.device, collate: Collate = default_collate) -> Batch:
    """The examples at ``indices`` as one batch on ``device``.

    >>> gathered(torch.tensor([5, 6, 7]), torch.tensor([2, 0]), torch.device("cpu"))
    tensor([7, 5])
    """
    if not isinstance(data, Dataset):
        return pytree.tree_map(lambda leaf: _taken(leaf, indices).to(device), data)
    examples: Sequence[Any] = [data[int(index)] for index in indices]
    try:
        batch = collate(list(examples))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "the examples of data cannot be put into one batch: let the Dataset return tensors of one shape (padded), "
            "or give collate"
        ) from error
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"an example of data must hold tensors or numbers, {pytree.keystr(path) or 'it'} is a "
                f"{type(leaf).__name__}: leave it out, or give collate"
            )
    return pytree.tree_map(lambda leaf: leaf.to(device), batch)


def blocks(rows: Tensor | np.ndarray[Any, Any], size: int) -> Iterator[Tensor]:
    """Consecutive rows as tensors, ``size`` at a time: of a memory-mapped array no more than that is read at once.

    >>> [block.tolist() for block in blocks(np.arange(3), size=2)]
    [[0, 1], [2]]
    """
    for start in range(0, len(rows), size):
        few = rows[start : start + size]
        # A copy, in the machine's byte order: torch takes neither a read-only array nor a foreign order.
        yield few if isinstance(few, Tensor) else torch.from_numpy(np.array(few, dtype=few.dtype.newbyteorder("=")))


def _taken(leaf: Tensor | np.ndarray[Any, Any], indices: Tensor) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf[indices.to(leaf.device)]
    taken = leaf[indices.cpu().numpy()]
    return torch.from_numpy(taken.astype(taken.dtype.newbyteorder("="), copy=False))  # files often have the other order
