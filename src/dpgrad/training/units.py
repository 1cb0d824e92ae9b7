"""Rows that belong to the same person: at most K of each, one example per person.

One person is then the unit of privacy. Poisson sampling draws persons, and the mean gradient of a person's rows is
clipped once (`dpgrad.PrivateGradient` with ``several_rows``).

Guarantee: which rows of a person are used, and how much each counts, depends on the rows of that person alone. A person
with m ≤ K rows is an example of K places: each of the m rows counts 1/m, and the places left over hold rows of the same
person that count nothing. Adding, changing or removing a person therefore changes one example and no other, and that
example contributes at most the clip bound, however many rows the person has: the guarantee does not depend on K. What
is public is the number of persons instead of the number of rows.

>>> owned = Owned.of(["ann", "bob", "ann", "ann"], rows=4, most=2, rule="first", name="person")
>>> owned.rows.tolist(), owned.weights.tolist()
([[0, 2], [1, 1]], [[1.0, 1.0], [2.0, 0.0]])
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpgrad.accounting.guarantee import plural
from dpgrad.errors import DataError
from dpgrad.grads.sums import Batch, Loss
from dpgrad.grads.unquoted import example
from dpgrad.training import source
from dpgrad.training.options import UNIT_RULES

__all__ = ["ByWeight", "Owned", "OwnerExamples", "Together", "numbered", "refuse_shared"]

Numbers = NDArray[np.int64]


def numbered(ids: Any, rows: int, name: str = "units") -> tuple[Numbers, NDArray[Any]]:
    """The number of the owner of each row, and the ids in the order of their numbers.

    Ids are whole numbers or texts: an array, a tensor, a list or a pandas Series. A missing id names nobody, and its
    rows could be anyone's; it is refused.

    >>> numbered(np.array([7, 3, 7]), rows=3)[0].tolist()
    [1, 0, 1]
    """
    found = _array(ids, name)
    if found.ndim != 1 or len(found) != rows:
        shape = f"{len(found):,} ids" if found.ndim == 1 else f"an array of {found.ndim} dimensions"
        raise DataError(f"{name} must hold one id per row, got {shape} for {rows:,} rows")
    if found.dtype.kind == "O":
        found = _of_objects(found, name)
    if found.dtype.kind not in "iuUS":
        raise DataError(
            f"{name} must hold ids that are whole numbers or texts, got {found.dtype}: convert them, such as "
            "ids.astype(str); a missing id names nobody, so remove its rows first"
        )
    if found.dtype.kind in "US" and bool((np.char.strip(found) == found.dtype.type()).any()):
        raise DataError(f"{name} must not hold an empty text: it names nobody, and its rows could be anyone's")
    known, number = np.unique(found, return_inverse=True)
    return number.astype(np.int64).reshape(-1), known


def _array(ids: Any, name: str) -> NDArray[Any]:
    if not isinstance(ids, Tensor | np.ndarray | list | tuple) and not _column(ids):
        raise DataError(f"{name} must hold one id per row, such as an array or a column, got a {type(ids).__name__}")
    if isinstance(ids, Tensor):
        return np.asarray(ids.detach().cpu().numpy())
    if isinstance(ids, list | tuple):
        made = np.empty(len(ids), dtype=object)
        made[:] = [one if not isinstance(one, list | tuple) else None for one in ids]
        return made
    return np.asarray(ids.to_numpy() if _column(ids) else ids)


def _column(ids: Any) -> bool:
    """Whether it is a column of a table, such as a pandas Series."""
    return callable(getattr(type(ids), "to_numpy", None))


def _of_objects(found: NDArray[Any], name: str) -> NDArray[Any]:
    """Ids of Python objects, all whole numbers or all texts, as an array of such."""
    kinds: set[type] = set()
    for one in found:
        kind = str if isinstance(one, str) else int if isinstance(one, int | np.integer) else None
        if kind is None or isinstance(one, bool):
            raise DataError(
                f"{name} must hold ids that are whole numbers or texts, got a {type(one).__name__} among them: a "
                "missing id names nobody, so remove its rows first"
            )
        kinds.add(kind)
    if len(kinds) > 1:
        raise DataError(f"{name} must hold whole numbers or texts, got both: convert all ids to text")
    try:
        return found.astype(str if kinds == {str} else np.int64)
    except OverflowError:
        return found.astype(str)


def refuse_shared(ids: Any, held_out: Any, rows: int, held_rows: int, name: str) -> None:
    """Refuse held-out rows of persons who also have training rows.

    >>> refuse_shared([1, 1, 2], [2], 3, 1, "person")
    Traceback (most recent call last):
    dpgrad.errors.DataError: some held-out rows belong to a person who also has training rows: a figure on them ...
    """
    mine, yours = numbered(ids, rows)[1], numbered(held_out, held_rows, "units of the held-out rows")[1]
    if np.isin(mine.astype(str), yours.astype(str)).any():
        raise DataError(
            f"some held-out rows belong to a {name} who also has training rows: a figure on them would be shown "
            f"without noise; hold out all rows of a {name} or none"
        )


def _first(place: Numbers) -> NDArray[Any]:
    return place


def _hash(place: Numbers) -> NDArray[Any]:
    """A fixed public hash of the position: splitmix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(all="ignore"):
        z = place.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


# from positions among the rows of a person to numbers: rows with the K least are kept
_RULES: dict[str, Callable[[Numbers], NDArray[Any]]] = dict(zip(UNIT_RULES, (_hash, _first), strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Owned:
    """The rows that each person contributes, (persons, K), and how much each counts, relative to 1/K. Private."""

    rows: Tensor
    weights: Tensor
    name: str

    @classmethod
    def of(cls, ids: Any, rows: int, most: int, rule: str, name: str) -> "Owned":
        """The rows of each owner, at most ``most`` of them, by a rule on their positions within the owner's rows."""
        number, known = numbered(ids, rows)
        order = np.argsort(number, kind="stable")
        owner = number[order]
        counts = np.bincount(number, minlength=len(known))
        starts = np.cumsum(counts) - counts
        place = np.arange(rows) - starts[owner]  # of each row among those of its owner, in the order given
        chosen = np.lexsort((_RULES[rule](place), owner))
        rank = np.arange(rows) - starts[owner]
        kept = np.sort(chosen[rank < most])  # back in the order given, within each owner
        used = np.minimum(counts, most)
        begins = np.cumsum(used) - used
        column = np.arange(most)
        table = order[kept][begins[:, None] + column % used[:, None]]
        weights = np.where(column < used[:, None], most / used[:, None], 0.0)
        return cls(torch.from_numpy(table), torch.from_numpy(weights), name)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Owned(by {plural(self.name)}, private)"

    def examples(self, data: Any) -> Any:
        """The data with one example per owner: (weights, rows), each (owners, K, ...).

        Tensors and arrays in memory are copied; a Dataset and memory maps are read row by row.
        """
        if isinstance(data, Dataset) or any(isinstance(leaf, np.memmap) for leaf in pytree.tree_leaves(data)):
            return OwnerExamples(data, self)
        index = self.rows.numpy()

        def taken(leaf: Any) -> Any:
            return leaf[self.rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf[index]

        return self.weights, pytree.tree_map(taken, data)


class OwnerExamples(Dataset[Any]):
    """One example per owner, of data that are read row by row; `Together` makes a batch of them."""

    def __init__(self, data: Any, owned: Owned) -> None:
        self._data, self._owned = data, owned

    def __len__(self) -> int:
        return len(self._owned)

    def __getitem__(self, owner: int) -> tuple[Tensor, list[Any]]:
        rows = self._owned.rows[owner].tolist()
        if isinstance(self._data, Dataset):
            return self._owned.weights[owner], [example(self._data, row) for row in rows]
        return self._owned.weights[owner], [pytree.tree_map(lambda leaf, at=row: leaf[at], self._data) for row in rows]


@dataclass(frozen=True)
class Together:
    """Make a batch of `OwnerExamples` with the ``collate`` of their rows: (weights, rows), each (examples, K, ...)."""

    collate: source.Collate

    def __call__(self, examples: list[Any]) -> Batch:
        rows = source.together([row for _, own in examples for row in own], self.collate)
        weights = torch.stack([weights for weights, _ in examples])
        return weights, pytree.tree_map(lambda leaf: leaf.reshape(*weights.shape, *leaf.shape[1:]), rows)


@dataclass(frozen=True)
class ByWeight:
    """The loss of each row times how much it counts, of a batch (weights, rows).

    >>> half = ByWeight(lambda model, batch: model(batch)[:, 0])
    >>> half(nn.Identity(), (torch.tensor([0.5]), torch.tensor([[4.0]])))
    tensor([2.])
    """

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        weights, rows = batch
        losses: Any = self.loss(model, rows)
        if not isinstance(losses, Tensor) or losses.shape != weights.shape:
            return losses  # type: ignore[no-any-return]  # refused by whoever called
        counted: Tensor = losses * weights.to(losses.dtype)
        return counted
