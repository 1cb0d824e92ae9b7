"""Rows that Dask holds: read a block at a time by Dask's own scheduler, one pass for each sum that a solver needs.

`dpgrad.convex.opened` takes the blocks of a Dask array or data frame and reads them once, to count and check the rows.
After that every sum over all rows is one pass: a worker reads a block, makes a `Design` of its rows, and returns the
block's part of the sum, which is as large as the coefficients. Nothing that grows with the number of rows leaves a
worker, except the checksum of each block.

**Why the bounds hold.** The clip factor of a row is computed from that row in the task that reads it, so no row exceeds
its bound, whatever the graph returns. Parts are added in the order of the blocks, in a tree of fixed shape, whichever
worker finishes first. Neighbouring datasets have blocks of the same sizes, which are assumed public like the number of
rows, so their sums differ in the part of one block only. Scores are computed in float64: if block sizes do depend on
the data, as where a file is cut by its bytes, the other rows round differently by about 10⁻¹⁶ each and not by 10⁻⁷.
Every pass compares a checksum of each block with that of the first pass. A graph that returns different rows each time
is refused: one record could be counted in several places.

>>> import dask.array as da
>>> from dpgrad.convex.opened import opened
>>> rows, _ = opened(da.ones((5, 2), chunks=(2, 1)), None, lambda block, labels: (block, labels))
>>> rows.shape, rows.sizes
((5, 2), (2, 2, 1))
>>> rows.added(lambda block, labels: block.sum(axis=0)).tolist()
[5.0, 5.0]
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpgrad.convex.design import Design, Matrix, Part, Rows
from dpgrad.convex.losses import Array, RowLoss
from dpgrad.convex.passes import (
    BlockPieces,
    BlockReader,
    Mark,
    PassWork,
    computed,
    of_labels,
    part_of,
    shared,
    task,
    total,
)
from dpgrad.errors import DataError

__all__ = ["ChunkedDesign", "Chunks", "Labels", "applied", "checked", "designed"]

_MOST_LABELS = 10_000  # in one block


@dataclass(frozen=True, repr=False, eq=False)
class Labels:
    """The labels of rows in blocks, as lazy as these: ``pieces`` of Dask's blocks, and functions to apply in turn."""

    pieces: tuple[BlockPieces, ...]  # of each block of rows: a block of labels, from, to
    reading: Callable[[Any], Any]
    steps: tuple[Callable[[Any], Any], ...] = ()

    def mapped(self, function: Callable[[Any], Any]) -> "Labels":
        """These labels after ``function``, which takes those of one block, wherever they are used."""
        return replace(self, steps=(*self.steps, function))

    def added(self, function: Callable[[Any], Array]) -> Array:
        """The sum over blocks of what ``function`` computes of their labels, in a pass over the labels alone."""
        return total(self._tasks(function))

    def tested(self) -> "Labels":
        """These labels, after a pass that raises what a function refuses of them."""
        self.added(_nothing)
        return self

    def different(self) -> NDArray[Any]:
        """The different labels in order; they are private."""
        return np.asarray(functools.reduce(_union, computed(self._tasks(_few))))

    def _tasks(self, function: Callable[[Any], Any]) -> list[Any]:
        work = shared((self.reading, *self.steps, function))
        return [task(of_labels, list(pieces), work) for pieces in self.pieces]


@dataclass(frozen=True, repr=False, eq=False)
class Chunks:
    """Rows in blocks that are read when they are needed. How many there are is public; they are not."""

    blocks: tuple[Any, ...]
    pieces: tuple[BlockPieces, ...]  # of labels, by which each block is checked; () where none
    reading: BlockReader
    marks: tuple[Mark, ...]
    columns: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each block has."""
        return tuple(mark.rows for mark in self.marks)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return sum(self.sizes), self.columns

    @property
    def sparse(self) -> bool:
        """Whether a block is sparse."""
        return any(mark.sparse for mark in self.marks)

    def added(
        self,
        function: Callable[[Matrix, Any], Array],
        labels: Labels | None = None,
        rows: NDArray[np.int64] | None = None,
    ) -> Array:
        """The sum over blocks of what ``function`` computes of their rows and labels: one pass.

        ``rows``, in ascending order, are the only ones that are taken; blocks without one are not read.
        """
        starts = np.cumsum([0, *self.sizes])
        steps = () if labels is None else labels.steps
        work, tasks = shared(PassWork(self.reading, steps, function)), []
        for place, (block, pieces, mark) in enumerate(zip(self.blocks, self.pieces, self.marks, strict=True)):
            chosen = None
            if rows is not None:
                ends = np.searchsorted(rows, starts[place : place + 2])
                chosen = rows[slice(*ends)] - starts[place]
                if not len(chosen) and (place or len(rows)):  # without any row, the first block gives a sum of none
                    continue
            tasks.append(task(part_of, block, list(pieces), mark, chosen, work))
        return total(tasks)


class ChunkedDesign:
    """`dpgrad.convex.Design` of rows in blocks: each pass makes the design of one block after the other.

    Guarantee: that of `Design`, for neighbours with blocks of the same sizes; see this module.
    """

    def __init__(self, rows: Chunks, **options: Any) -> None:
        self._chunks, self._options = rows, options
        self._none = Design(np.zeros((1, rows.columns), np.float32), **options)  # checks the options

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._chunks.shape[0]

    @property
    def features(self) -> int:
        """How many coefficients an output has, the intercept among them."""
        return self._none.features

    @property
    def radius(self) -> float:
        """The norm that rows are clipped or normalised to."""
        return self._none.radius

    @property
    def intercept(self) -> float:
        """The constant of the last column."""
        return self._none.intercept

    @property
    def bound(self) -> float:
        """No row is longer, whatever the data."""
        return self._none.bound

    @property
    def slack(self) -> float:
        """What rounding may add to one row's part in a sum: the tree of sums adds at most 2⁻⁴⁹ for each row."""
        return max(self._none.slack, 2.0**-49 * self.rows)

    @property
    def accuracy(self) -> float:
        """That of scores in float64."""
        return self._none.precise().accuracy

    def precise(self) -> "ChunkedDesign":
        """The same: its scores are in float64."""
        return self

    def added(self, part: Part, targets: Any = None, rows: NDArray[np.int64] | None = None) -> Array:
        """The sum over blocks of what ``part`` computes of the design of their rows and their targets: one pass."""
        labels = targets if isinstance(targets, Labels) else None
        return self._chunks.added(_Part(part, self._options), labels, rows)


@dataclass(frozen=True, repr=False, eq=False)
class _Part:
    """A part of a sum over designs, as one over blocks."""

    part: Part
    options: dict[str, Any]

    def __call__(self, matrix: Matrix, labels: Any) -> Array:
        if matrix.shape[0]:
            return self.part(Design(matrix, **self.options).precise(), labels)
        one = Design(np.zeros((1, matrix.shape[1]), np.float32), **self.options).precise()
        return self.part(one.taken(np.arange(0)), labels)


def designed(rows: ArrayLike | Matrix, **options: Any) -> Rows:
    """The design of rows in memory, or in blocks.

    >>> designed(np.ones((3, 2)), radius=1.0).rows
    3
    """
    return ChunkedDesign(rows, **options) if isinstance(rows, Chunks) else Design(rows, **options)


def applied(function: Callable[[Any], Any], targets: Any) -> Any:
    """``function`` of targets in memory, or of those of each block where they are lazy.

    >>> applied(np.sign, np.array([-2, 3])).tolist()
    [-1, 1]
    """
    return targets.mapped(function) if isinstance(targets, Labels) else function(targets)


def checked(loss: RowLoss, targets: Any, rows: int) -> Any:
    """The targets of ``rows`` rows, refused where the loss has no meaning for them.

    >>> from dpgrad.convex.losses import Logistic
    >>> checked(Logistic(), [1, -1], 2).tolist()
    [1.0, -1.0]
    """
    if isinstance(targets, Labels):
        return targets.mapped(functools.partial(_checked, loss))
    return loss.checked(targets, rows)


def _checked(loss: RowLoss, targets: Any) -> Any:
    return loss.checked(targets, len(targets))


def _nothing(labels: Any) -> Array:
    return np.zeros(1)


def _few(labels: Any) -> Any:
    """The different labels of a block."""
    try:
        found = np.unique(labels)
    except TypeError:
        raise DataError("y holds labels that cannot be put in order: use text or numbers alone") from None
    if len(found) > _MOST_LABELS:
        raise DataError(f"y holds more than {_MOST_LABELS:,} different labels: it must hold classes")
    return found


def _union(first: Any, second: Any) -> Any:
    return _few(np.concatenate([first, second]))
