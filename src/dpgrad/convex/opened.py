"""Dask arrays and data frames as blocks of rows: opened for a fit, or mapped block by block for a prediction."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from dpgrad.convex.chunked import Chunks, Labels
from dpgrad.convex.design import quiet
from dpgrad.convex.passes import (
    CHANGED,
    BlockPiece,
    BlockPieces,
    BlockReader,
    FirstPass,
    Mark,
    computed,
    first_read,
    height,
    lazy,
    shared,
    task,
)
from dpgrad.errors import DataError

__all__ = ["blockwise", "in_memory", "opened", "zeros_like"]

_SIZES = "Found input variables with inconsistent numbers of samples: {}: give one label for each row"
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def opened(X: Any, y: Any, reading: BlockReader) -> tuple[Chunks, Labels | None]:
    """The rows of a Dask array or data frame and their labels, after a first pass that counts and checks them.

    ``reading`` turns a block and its labels (None where there are none) into a matrix and labels, and refuses what is
    wrong with them without repeating a value. Labels may be lazy, in blocks of other sizes, or in memory. Blocks along
    columns are joined; blocks without rows are left out.
    """
    held = _held(X)
    pieces: list[BlockPieces] = [()] * len(held.blocks)
    if y is not None:
        labels = _labels(y)
        pieces = _as_they_are(labels) if _alike(held, labels) else _paired(held.counted(), labels.counted())
    marks = _marked(held, pieces, reading)
    if y is not None and any(mark.rows != mark.labels for mark in marks):
        sizes, heights = [mark.rows for mark in marks], [mark.labels or 0 for mark in marks]
        pieces = _paired(replace(held, sizes=sizes), replace(labels, sizes=heights))
        marks = _marked(held, pieces, reading)
        if any(mark.rows != mark.labels for mark in marks):
            raise DataError(CHANGED)
    kept = [place for place, mark in enumerate(marks) if mark.rows]
    if not kept:
        raise DataError("X holds no rows in any of its blocks: at least one is required")
    parts = tuple(pieces[i] for i in kept)
    rows = Chunks(tuple(held.blocks[i] for i in kept), parts, reading, tuple(marks[i] for i in kept), held.columns)
    return rows, None if y is None else Labels(parts, functools.partial(_labels_of, reading, held.columns))


def _labels_of(reading: BlockReader, columns: int, labels: Any) -> Any:
    """Labels as they are read together with rows."""
    return reading(np.zeros((len(labels), columns)), labels)[1]


@dataclass(frozen=True, repr=False, eq=False)
class _Held:
    """Blocks of a collection along its rows, their sizes where they are known, and how many columns there are."""

    blocks: list[Any]
    sizes: Sequence[float]  # NaN where unknown
    columns: int = 1

    def counted(self) -> "_Held":
        """The same with all sizes known, by a pass where they are not."""
        if not any(map(math.isnan, self.sizes)):
            return self
        return replace(self, sizes=computed([task(height, block) for block in self.blocks]))


def _held(X: Any) -> _Held:
    """The blocks of rows, each with all columns."""
    import dask.array

    if isinstance(X, dask.array.Array):
        if X.ndim != 2:
            raise DataError(f"Expected 2D array, got a Dask array of {X.ndim} dimensions: X.reshape(-1, 1) is a column")
        if math.isnan(X.shape[1]):
            raise DataError("X has an unknown number of columns: call X.compute_chunk_sizes() first")
        if X.shape[1] == 0:
            raise DataError("Found array with 0 feature(s) while a minimum of 1 is required: give at least one column")
        if X.numblocks[1] > 1:
            X = _joined(X)
        return _Held([row[0] for row in X.to_delayed()], X.chunks[0], int(X.shape[1]))
    if _frame(X) and X.ndim == 2:
        return _Held(list(X.to_delayed()), [math.nan] * X.npartitions, len(X.columns))
    raise DataError(f"X is a Dask {type(X).__name__}: give a dask.array of two dimensions or a dask.dataframe")


def _joined(X: Any) -> Any:
    """The array with all columns in each block; of fewer rows where a block would exceed Dask's own limit."""
    import dask
    from dask.utils import parse_bytes

    whole = X.rechunk({1: -1})
    limit = parse_bytes(dask.config.get("array.chunk-size"))
    if math.isnan(X.shape[0]) or max(whole.chunks[0]) * X.shape[1] * X.dtype.itemsize <= limit:
        return whole
    return X.rechunk({0: "auto", 1: -1})


def _frame(X: Any) -> bool:
    """Whether a collection is a data frame or a series, told by its module: pandas need not be there."""
    return type(X).__module__.startswith("dask.dataframe")


def _labels(y: Any) -> _Held:
    """The blocks of labels, lazy or one in memory."""
    import dask.array

    if not lazy(y):
        found = np.asarray(y)
        if found.ndim == 2 and found.shape[1] == 1:
            found = found[:, 0]
        if found.ndim != 1:
            raise DataError(f"y should be a 1d array, got an array of shape {found.shape}: one label for each row")
        return _Held([found], [len(found)])
    if isinstance(y, dask.array.Array) and (y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)):
        column = y if y.ndim == 1 else y[:, 0]
        return _Held(list(column.to_delayed()), column.chunks[0])
    if _frame(y) and (y.ndim == 1 or len(y.columns) == 1):
        return _Held(list(y.to_delayed()), [math.nan] * y.npartitions)
    raise DataError(f"y is a Dask {type(y).__name__} and must have one label for each row: give y[:, 0] or a series")


def _alike(rows: _Held, labels: _Held) -> bool:
    """Whether blocks may be taken to have as many labels as rows, to be seen when they are read."""
    if any(map(math.isnan, [*rows.sizes, *labels.sizes])):
        return len(rows.sizes) == len(labels.sizes) and lazy(labels.blocks[0])
    return list(rows.sizes) == list(labels.sizes) and lazy(labels.blocks[0])


def _as_they_are(labels: _Held) -> list[BlockPieces]:
    return [((block, 0, None),) for block in labels.blocks]


def _paired(rows: _Held, labels: _Held) -> list[BlockPieces]:
    """For each block of rows, the pieces of blocks of labels that belong to it."""
    ends, starts = (np.cumsum([0, *map(int, held.sizes)]) for held in (labels, rows))
    if ends[-1] != starts[-1]:
        raise DataError(_SIZES.format([int(starts[-1]), int(ends[-1])]))
    found: list[BlockPieces] = []
    for start, stop in pairwise(starts):
        first, last = np.searchsorted(ends, start, "right") - 1, np.searchsorted(ends, stop)
        spans = [(i, max(start, ends[i]) - ends[i], min(stop, ends[i + 1]) - ends[i]) for i in range(first, last)]
        found.append(tuple(_cut(labels.blocks[i], int(low), int(high)) for i, low, high in spans if low < high))
    return found


def _cut(source: Any, start: int, stop: int) -> BlockPiece:
    """A piece of labels; of those in memory only what is needed, so no more is sent to a worker."""
    return (source, start, stop) if lazy(source) else (source[start:stop], 0, stop - start)


def _marked(held: _Held, pieces: list[BlockPieces], reading: BlockReader) -> list[Mark]:
    """Read every block for the first time."""
    work = shared(FirstPass(reading, held.columns))
    return computed(
        [task(first_read, block, list(some), work) for block, some in zip(held.blocks, pieces, strict=True)]
    )


def blockwise(
    method: "Callable[Concatenate[Any, Any, _Given], _Result]",
) -> "Callable[Concatenate[Any, Any, _Given], _Result]":
    """Decorate a method of rows, such as ``predict``, to return a lazy Dask array for rows that Dask holds.

    Its blocks are those of the rows; nothing is computed until it is asked for, as in dask-ml.
    """

    @functools.wraps(method)
    def called(estimator: Any, X: Any, /, *args: _Given.args, **options: _Given.kwargs) -> _Result:
        if not lazy(X):
            return quiet(method)(estimator, X, *args, **options)
        lean = copy.copy(estimator)  # what a worker needs: a ledger stays in its process
        for name in ("ledger", "random_state"):
            if name in vars(lean):
                setattr(lean, name, None)
        found: Any = _mapped(functools.partial(method, lean), X)
        return cast(_Result, found)

    return called


def zeros_like(X: Any) -> Any:
    """One row of zeros with the columns of a Dask collection, by their names where they have any."""
    shape: Any = getattr(X, "shape", ())
    row = np.zeros((1, shape[1] if len(shape) == 2 and isinstance(shape[1], int) else 1))
    return type(X._meta)(row, columns=X.columns) if _frame(X) and X.ndim == 2 else row


def in_memory(*values: Any) -> tuple[Any, ...]:
    """The values, those that are lazy computed in one pass, as for a score.

    >>> in_memory([1, 2], None)
    ([1, 2], None)
    """
    found = iter(computed([value for value in values if lazy(value)]))
    return tuple(next(found) if lazy(value) else value for value in values)


def _mapped(function: Callable[[Any], Any], X: Any) -> Any:
    """A lazy array of what a function returns of each block."""
    import dask.array

    held = _held(X)
    like = function(zeros_like(X))[:0]
    made = [
        dask.array.from_delayed(task(_filled, function, block, like), (size, *like.shape[1:]), meta=like)
        for block, size in zip(held.blocks, held.sizes, strict=True)
    ]
    return dask.array.concatenate(made, allow_unknown_chunksizes=True)


def _filled(function: Callable[[Any], Any], block: Any, like: Any) -> Any:
    return function(block) if height(block) else like
