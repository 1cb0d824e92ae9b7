"""The data of a run, from which examples are taken by their index.

Data are tensors or arrays with a common first dimension, alone or in tuples, lists and dicts (a list holds columns, not
examples), or a map-style `torch.utils.data.Dataset`. `dpgrad.training.forms` brings other forms into one of these.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset, default_collate

from dpgrad.errors import DataError, DpgradError
from dpgrad.grads import unquoted
from dpgrad.grads.sums import Batch
from dpgrad.mechanism.keys import Key

__all__ = [
    "ByIndex",
    "Collate",
    "Remembered",
    "Values",
    "blocks",
    "columns",
    "comparable",
    "gathered",
    "read",
    "refuse_type",
    "rows",
    "together",
]

Collate = Callable[[list[Any]], Batch]
Values = Tensor | np.ndarray[Any, Any]

_BLOCK = 4096  # rows of files that are compared at a time


class ByIndex(Dataset[Any], ABC):
    """Rows that are read by index, a batch at a time: from files, or through another library.

    ``loading`` are options of torch's DataLoader, for the workers that read the rows. ``steady`` says that the same
    contents are always read as the same numbers; a run can then be replayed.
    """

    loading: Mapping[str, Any] = {}
    steady: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: list[int], collate: Collate) -> Batch:
        """The rows at ``indices`` as one batch on the CPU, made by ``collate`` unless it is `default_collate`."""

    def __getitem__(self, index: int) -> Any:
        return pytree.tree_map(lambda leaf: leaf[0], self.batch([index], default_collate))


def rows(data: Any) -> int:
    """How many examples the data have; what examples cannot be taken from by index is refused.

    >>> rows({"x": torch.zeros(3, 2), "y": np.zeros(3)})
    3
    """
    if isinstance(data, Dataset):
        return unquoted.length(data)
    named = pytree.tree_flatten_with_path(data)[0]
    for path, leaf in named:
        if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
            raise DataError(
                f"data{pytree.keystr(path)} must be a tensor or an array with one entry per example, got a "
                f"{type(leaf).__name__}: wrap a list of examples in a map-style Dataset"
            )
        if isinstance(leaf, np.ndarray):
            refuse_type(f"data{pytree.keystr(path)}", leaf.dtype)
    lengths = {f"data{pytree.keystr(path)}": len(leaf) for path, leaf in named}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} has {length:,}" for name, length in [*lengths.items()][:4]) or "nothing"
        raise DataError(
            f"data must hold tensors with one entry per example, but {shown}: a tuple, list or dict holds columns; "
            "wrap a list of examples in a map-style Dataset"
        )
    return next(iter(lengths.values()))


def refuse_type(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse an array of a type that torch does not have, such as text, dates, objects and long doubles."""
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        raise DataError(
            f"{name} must hold numbers of a type that torch has, got {dtype}: convert all of it to one type that you "
            "choose, such as .astype(np.float32), and labels to class indices 0, 1, ..., in an order fixed without "
            "looking at the data"
        ) from None


def gathered(data: Any, indices: Tensor, device: torch.device, collate: Collate = default_collate) -> Batch:
    """The examples at ``indices`` as one batch on ``device``.

    Guarantee: how an example is read does not depend on the others. `default_collate` gives a batch the type that suits
    all of its examples, so one of another type would round the rest differently: it is refused.

    >>> gathered(torch.tensor([5, 6, 7]), torch.tensor([2, 0]), torch.device("cpu"))
    tensor([7, 5])
    """
    if not isinstance(data, Dataset):
        return pytree.tree_map(lambda leaf: _taken(leaf, indices).to(device), data)
    return pytree.tree_map(lambda leaf: leaf.to(device), read(data, indices.tolist(), collate))


def read(data: Dataset[Any], indices: list[int], collate: Collate) -> Batch:
    """The examples of a Dataset at ``indices`` as one batch on the CPU.

    >>> read(TensorDataset(torch.arange(3)), [2, 0], default_collate)
    [tensor([2, 0])]
    """
    if isinstance(data, ByIndex):
        return data.batch(indices, collate)
    return together([unquoted.example(data, index) for index in indices], collate)


def comparable(data: Any) -> Any:
    """What `dpgrad.runs.replay.data_digest` takes: the data, or an iterator over the contents of steady files.

    >>> comparable(torch.zeros(3))
    tensor([0., 0., 0.])
    """
    if not isinstance(data, ByIndex) or not data.steady:
        return data
    starts, count = range(0, len(data), _BLOCK), len(data)
    return (data.batch([*range(start, min(start + _BLOCK, count))], default_collate) for start in starts)


def _joined(singles: list[Batch]) -> Batch:
    """Batches of one example each as one batch."""
    leaves = [pytree.tree_leaves(one) for one in singles]
    if not all(isinstance(leaf, Tensor) for one in leaves for leaf in one):
        return singles[0]  # refused by the caller
    for leaf in (leaf for one in leaves for leaf in one):
        _refuse_length(leaf, 1)
    shapes = [[(leaf.dtype, leaf.shape) for leaf in one] for one in leaves]
    if any(one != shapes[0] for one in shapes) or len({repr(pytree.tree_structure(one)) for one in singles}) > 1:
        raise DataError(
            "collate must give every example tensors of one shape and type, whatever the others are: pad all to "
            "one length"
        )
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *singles)


def together(examples: list[Any], collate: Collate = default_collate) -> Batch:
    """The examples of a Dataset as one batch of tensors.

    Guarantee: a ``collate`` of the user's own is called with one example at a time, so none can act on another.

    >>> together([(torch.zeros(2), 1), (torch.ones(2), 3)])[1]
    tensor([1, 3])
    >>> def centred(examples):
    ...     return torch.tensor(examples) - torch.tensor(examples).mean()
    >>> together([2.0, 6.0], centred)
    tensor([0., 0.])
    """
    if collate is default_collate:
        _refuse_mixed(examples)
    try:
        batch = collate(list(examples)) if collate is default_collate else _joined([collate([one]) for one in examples])
    except Exception as error:  # whose text may hold a value of a row
        if isinstance(error, DpgradError) and unquoted.passed_on(error) is error:
            raise
        remedy = "or give collate" if collate is default_collate else f"or correct collate ({_raised(error)})"
        raise DataError(
            "the examples of data cannot be put into one batch: make the Dataset return tensors of one shape (padded), "
            f"{remedy}"
        ) from None
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            raise DataError(
                f"an example of data must hold tensors or numbers, {pytree.keystr(path) or 'it'} is a "
                f"{type(leaf).__name__}: leave it out, or give collate"
            )
        _refuse_length(leaf, len(examples))
    return batch


def _refuse_length(leaf: Tensor, examples: int) -> None:
    if not leaf.ndim or len(leaf) != examples:
        raise DataError(
            f"collate must give one entry per example in every tensor, got {tuple(leaf.shape)} for {examples:,} "
            f"{'example' if examples == 1 else 'examples'}: replace examples that are of no use in the Dataset, do not "
            "leave them out"
        )


def _raised(error: Exception) -> str:
    """The type of an exception of collate, and its line where that is in code of the user's own."""
    return f"{unquoted.place(error) or 'it'} raised {type(error).__name__}; its message may be private"


_COMPARED = 16  # rows of other data than before
_GLANCED = 2  # rows of the same memory on the CPU, into which numpy may have written other rows
_MOST = 1 << 12  # values of one row that are compared; of a longer one, every so many

_Column = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True, repr=False, eq=False)
class Remembered:
    """The data of the first step, to be recognised at the next ones by a few rows at secret places. Private.

    Tensors on a device are read only where they are other tensors than before, or were written into: otherwise nothing
    waits for the device. The memory of the data is held, or other data might come to lie in the same place.

    >>> seen = Remembered.of(torch.arange(50), Key.fresh())
    >>> seen.holds(torch.arange(50)), seen.holds(torch.arange(50) + 50)
    (True, False)
    """

    data: Any
    places: tuple[int, ...]
    columns: Mapping[str, _Column]  # none of a Dataset
    versions: Mapping[str, int]  # how often each tensor was written into
    samples: Mapping[str, "np.ndarray[Any, Any]"]  # the rows at those places
    addresses: Mapping[str, int]  # of tensors
    glances: tuple[tuple[Tensor, Tensor], ...]  # rows of tensors on the CPU, and what they held

    @classmethod
    def of(cls, data: Any, key: Key) -> "Remembered":
        """Remember ``data``; the places follow from the key of the run."""
        count = rows(data)
        random = np.random.default_rng(np.frombuffer(key.derive("rows compared"), np.uint64))
        places = tuple(int(place) for place in random.integers(count, size=_COMPARED)) if count else ()
        found = columns(data)
        versions = {name: _version(column) for name, column in found.items()}
        samples = {name: _sampled(column, places) for name, column in found.items()}
        addresses = {name: column.data_ptr() for name, column in found.items() if isinstance(column, Tensor)}
        on_cpu = [column for column in found.values() if isinstance(column, Tensor) and column.device.type == "cpu"]
        rows_of = [column[place] for column in on_cpu for place in places[:_GLANCED]]
        glances = tuple((row, row.clone()) for row in rows_of)
        return cls(data, places, found, versions, samples, addresses, glances)

    def holds(self, data: Any) -> bool:
        """Whether these are the same data: the same objects, copies of them, or the same contents read again."""
        if isinstance(self.data, Dataset) and not isinstance(self.data, TensorDataset):
            return data is self.data or self._same_examples(data)
        if data is self.data and self.steady():
            return True
        found = columns(data)
        return found.keys() == self.columns.keys() and all(map(self._same_column, found, found.values()))

    def steady(self) -> bool:
        """Whether the data are tensors, in a tuple or alone, and none was written into or exchanged.

        On the CPU a few rows are looked at too: numpy may have written others into the same memory.
        """
        parts = self.data if type(self.data) is tuple else (self.data,)
        return (
            all(isinstance(part, Tensor) for part in parts)  # a list may hold other tensors by now
            and all(
                isinstance(column, Tensor)
                and _version(column) == self.versions[name]
                and column.data_ptr() == self.addresses[name]
                for name, column in self.columns.items()
            )
            and all(torch.equal(row, was) for row, was in self.glances)
        )

    def _same_column(self, name: str, column: _Column) -> bool:
        count = _COMPARED
        if _memory(column) == _memory(self.columns[name]) and _version(column) == self.versions[name]:
            count = 0 if isinstance(column, Tensor) and column.device.type != "cpu" else _GLANCED
        return not count or _equal(_sampled(column, self.places[:count]), self.samples[name][:count])

    def _same_examples(self, data: Any) -> bool:
        """Whether another Dataset has the same examples at the places."""
        if not isinstance(data, Dataset):
            return False
        pairs = (
            tuple(pytree.tree_leaves(unquoted.example(held, place)) for held in (self.data, data))
            for place in self.places
        )
        return all(
            len(one) == len(other) and all(_equal(_plain(a), _plain(b)) for a, b in zip(one, other, strict=True))
            for one, other in pairs
        )


def columns(data: Any) -> dict[str, _Column]:
    """Tensors and arrays of the data by their place in it; nothing of a Dataset but a TensorDataset.

    >>> list(columns({"x": torch.zeros(3), "y": np.zeros(3)}))
    ["['x']", "['y']"]
    """
    if isinstance(data, Dataset):
        data = data.tensors if isinstance(data, TensorDataset) else ()
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(data)[0]}


def _version(column: _Column) -> int:
    """How often torch wrote into a tensor; one of inference mode does not count, and cannot be written into outside."""
    return column._version if isinstance(column, Tensor) and not column.is_inference() else 0


def _memory(column: _Column) -> object:
    """Where the values lie, and how."""
    if isinstance(column, Tensor):
        return column.data_ptr(), column.shape, column.stride(), column.dtype, column.device
    return column.ctypes.data, column.shape, column.strides, column.dtype


def _sampled(column: _Column, places: Sequence[int]) -> "np.ndarray[Any, Any]":
    """The rows at ``places``, of long ones every so many values: (places, values)."""
    each = max(1, -(-math.prod(column.shape[1:]) // _MOST))
    taken = _plain(_taken(column, torch.tensor(places, dtype=torch.int64)))
    return taken.reshape(len(places), math.prod(column.shape[1:]))[:, ::each]


def _plain(value: Any) -> "np.ndarray[Any, Any]":
    if not isinstance(value, Tensor):
        return np.asarray(value)
    return (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().resolve_conj().numpy()


def _equal(one: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> bool:
    """Whether values are equal; NaN is equal to NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


_PLAIN = {float: "float64", int: "int64", bool: "bool"}  # as default_collate reads them


def _refuse_mixed(examples: Sequence[Any]) -> None:
    """Refuse examples whose values are of different types."""

    def types(example: Any) -> list[str]:
        leaves = pytree.tree_leaves(example)
        return [
            str(leaf.dtype).removeprefix("torch.")
            if isinstance(leaf, Tensor | np.ndarray | np.generic)
            else _PLAIN.get(type(leaf), type(leaf).__name__)
            for leaf in leaves
        ]

    first = types(examples[0]) if examples else []
    for example in examples:
        for one, other in zip(first, types(example), strict=False):  # other structures are for collate to refuse
            if one != other:
                raise DataError(
                    f"the examples of data must hold values of one type, got {one} and {other}: convert every "
                    "example in the Dataset, such as torch.as_tensor(x, dtype=torch.float32)"
                )


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
