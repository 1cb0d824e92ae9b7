"""One pass over blocks of rows by Dask's scheduler: what a task does with a block, and how results are added.

A task never raises: what it refuses is returned and raised by the caller, since Dask writes the errors of tasks to its
logs together with their arguments.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from dpgrad.convex.design import CompensatedSum, Matrix, single_threaded
from dpgrad.convex.losses import Array
from dpgrad.errors import DataError, DpgradError

__all__ = [
    "CHANGED",
    "BlockPiece",
    "BlockPieces",
    "BlockReader",
    "FirstPass",
    "Mark",
    "PassWork",
    "Refusal",
    "computed",
    "failed",
    "first_read",
    "height",
    "lazy",
    "of_labels",
    "part_of",
    "shared",
    "task",
    "total",
]  # fmt: skip

BlockReader = Callable[[Any, Any], tuple[Matrix, Any]]  # a block and its labels as they come, to rows and labels
BlockPiece = tuple[Any, int, int | None]  # a block of labels, from, to
BlockPieces = tuple[BlockPiece, ...]
_FAN = 16  # parts that are added at once
CHANGED = (
    "X or y gave other rows in a second pass than in the first: every pass must see the same rows, or one record could "
    "be counted twice. Write them to files first, as to_parquet and to_zarr do, or keep them in memory by persist()"
)


def lazy(X: object) -> bool:
    """Whether ``X`` is one of Dask's collections. Dask is not imported for it.

    >>> lazy(np.zeros((2, 2)))
    False
    """
    dask = sys.modules.get("dask")
    return dask is not None and bool(dask.is_dask_collection(X))


@dataclass(frozen=True)
class Mark:
    """How many rows and labels a block has, and a checksum of both; as private as they are."""

    rows: int
    labels: int | None
    checksum: int
    sparse: bool


@dataclass(frozen=True)
class Refusal:
    """Why a block was refused. It is returned, since Dask writes errors of tasks to its logs, with their arguments."""

    kind: type[Exception]
    told: str

    @staticmethod
    def of(error: Exception) -> "Refusal":
        """Errors of ours and of scikit-learn's checks repeat no value; of others the kind alone is told."""
        if isinstance(error, DpgradError):
            return Refusal(type(error), str(error))
        if type(error) in (ValueError, TypeError) and "sklearn" in _origin(error):
            return Refusal(type(error), str(error))
        return Refusal(DataError, failed(error))


def _origin(error: Exception) -> str:
    """The file in which an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_filename


def failed(error: BaseException) -> str:
    return (
        f"a block of X or y could not be computed ({type(error).__name__}). The message is left out, as it may hold "
        "private values: compute the blocks one by one, X.partitions[i] or X.blocks[i], to find the cause"
    )


@dataclass(frozen=True, repr=False, eq=False)
class PassWork:
    """What every task of a pass does."""

    reading: BlockReader
    steps: tuple[Callable[[Any], Any], ...]
    function: Callable[[Matrix, Any], Array]


@dataclass(frozen=True, repr=False, eq=False)
class FirstPass:
    """What the first pass does."""

    reading: BlockReader
    columns: int


def computed(tasks: Sequence[Any]) -> list[Any]:
    """What the tasks return, by the scheduler that Dask is set to; the first refusal is raised."""
    if not tasks:  # nothing is Dask's, which may not even be installed
        return []
    import dask

    try:
        with single_threaded():
            found = dask.compute(*tasks)
    except Exception as error:
        raise DataError(failed(error)) from None
    for one in found:
        if isinstance(one, Refusal):
            raise one.kind(one.told)
    return list(found)


def total(tasks: list[Any]) -> Array:
    """The sum of what the tasks return, a few at a time where they were computed."""
    while len(tasks) > 1:
        tasks = [task(_merged, tasks[start : start + _FAN]) for start in range(0, len(tasks), _FAN)]
    (found,) = computed(tasks)
    return np.asarray(found)


def task(function: Callable[..., Any], *args: Any) -> Any:
    import dask

    return dask.delayed(function, pure=False)(*args)


def shared(work: Any) -> Any:
    """What all tasks of a pass need, sent to each worker once."""
    import dask

    return dask.delayed(work, pure=False, traverse=False)


def _merged(parts: list[Any]) -> Any:
    """The sum of parts in their order, or the first refusal."""
    for part in parts:
        if isinstance(part, Refusal):
            return part
    total = CompensatedSum(parts[0].shape)
    for part in parts:
        total.add(part)
    return total.total


def part_of(block: Any, pieces: list[Any], mark: Mark, chosen: Any, work: PassWork) -> Any:
    """What one block adds to a sum."""
    try:
        labels = _joined(pieces)
        if height(block) != mark.rows or (labels is not None and len(labels) != mark.rows):
            return Refusal(DataError, CHANGED)
        matrix, labels = work.reading(block, labels)
        if _mark(matrix, labels) != mark:
            return Refusal(DataError, CHANGED)
        for step in work.steps:
            labels = step(labels)
        if chosen is not None:
            matrix, labels = matrix[chosen], None if labels is None else labels[chosen]
        return np.asarray(work.function(matrix, labels), np.float64)
    except Exception as error:
        return Refusal.of(error)


def first_read(block: Any, pieces: list[Any], work: "FirstPass") -> Any:
    """The mark of a block that is read for the first time; without a checksum where it is not to be used."""
    try:
        labels, rows = _joined(pieces), height(block)
        count = None if labels is None else len(labels)
        if not rows or count not in (None, rows):
            return Mark(rows, count or 0, 0, False)
        matrix, labels = work.reading(block, labels)
        if matrix.shape[1] != work.columns:
            raise DataError(
                f"a block of X has {matrix.shape[1]} columns, and X has {work.columns}: give every block as many"
            )
        return _mark(matrix, labels)
    except Exception as error:
        return Refusal.of(error)


def of_labels(pieces: list[Any], steps: Sequence[Callable[[Any], Any]]) -> Any:
    """What functions, each of what the one before returns, make of the labels of one block."""
    try:
        found = _joined(pieces)
        for step in steps:
            found = step(found)
        return found
    except Exception as error:
        return Refusal.of(error)


def height(block: Any) -> int:
    return int(block.shape[0])


def _joined(pieces: list[Any]) -> Any:
    """The labels of a block of rows from pieces of blocks of labels; None where there are no labels."""
    if not pieces:
        return None
    parts = [_flat(source)[start:stop] for source, start, stop in pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _flat(source: Any) -> NDArray[Any]:
    found = np.asarray(source)
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def _mark(matrix: Matrix, labels: Any) -> Mark:
    """A checksum that a change of any number changes, but for one time in 2³²."""
    thin = sparse.issparse(matrix)
    found = 0
    for held in (matrix.data, matrix.indices, matrix.indptr) if thin else (matrix,):
        found = zlib.crc32(np.ascontiguousarray(held).view(np.uint8).data, found)
    if labels is not None:
        told = "\x1f".join(map(repr, labels.tolist())).encode() if labels.dtype.hasobject else labels.tobytes()
        found = zlib.crc32(told, found)
    return Mark(int(matrix.shape[0]), None if labels is None else len(labels), found, bool(thin))
