"""Where the rows of a batch stand in a tensor, and how that place moves when the tensor changes its shape.

A tensor that descends from the batch has a `Layout`. Any other tensor has *periods*: along a dimension with period p
the value depends on the index modulo p alone. Period 1 means the same value everywhere, the full length means that
nothing is known. A tensor with periods may be combined with one that has a layout if it is the same for every row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Layout", "Periods", "even", "reshaped", "same_for_rows"]

Periods = tuple[int, ...]  # one for each dimension


@dataclass(frozen=True)
class Layout:
    """The dimension of the rows: index j along it belongs to row (j // inner) % rows, with ``outer`` rounds of them.

    Rows alone have outer = inner = 1. A batch flattened with its positions has inner = T, time first has outer = T.
    Minus one stands for the number that fits.

    >>> Layout(0, inner=4).flat, Layout(1).flat
    (True, False)
    """

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def flat(self) -> bool:
        """Whether a row has several entries in the dimension."""
        return self.outer != 1 or self.inner != 1

    def moved(self, dim: int) -> "Layout":
        """The same in another dimension."""
        return Layout(dim, self.outer, self.inner)

    def opened(self, tensor: Tensor, rows: int) -> Tensor:
        """The tensor with the rows first, (rows, ...), and a row's entries in the dimension where the rows were."""
        if not self.dim and self.outer == 1:
            return _unflatten(tensor, 0, (rows, self.inner))
        split = _unflatten(tensor, self.dim, (self.outer, rows, self.inner)).movedim(self.dim + 1, 0)
        return split.flatten(self.dim + 1, self.dim + 2)

    def closed(self, tensor: Tensor) -> Tensor:
        """The inverse of `opened`: rows and entries together in one dimension again."""
        if not self.dim and self.outer == 1:
            return tensor.flatten(0, 1)
        split = _unflatten(tensor, self.dim + 1, (self.outer, self.inner)).movedim(0, self.dim + 1)
        return split.flatten(self.dim, self.dim + 2)

    def folded(self, tensor: Tensor, rows: int, examples: int) -> Tensor:
        """The tensor as (examples, entries of all rows of one example, ...)."""
        if not self.dim and self.outer == 1:
            return tensor.reshape(examples, tensor.shape[0] // examples, *tensor.shape[1:])
        moved = self.opened(tensor, rows).movedim(self.dim + 1, 1)
        return moved.reshape(examples, rows // examples * moved.shape[1], *moved.shape[2:])

    def fits(self, shape: Sequence[int], rows: int) -> bool:
        """Whether a tensor of this shape can have ``rows`` rows here."""
        if self.dim >= len(shape):
            return False
        length = shape[self.dim]
        if -1 in (self.outer, self.inner):
            return length % rows == 0
        return length == self.outer * rows * self.inner

    def reshaped(self, shape: Sequence[int], new: Sequence[int], rows: int) -> "Layout | None":
        """The layout after a reshape in row-major order; None where the rows no longer fill one dimension.

        The row of an element is a digit of its place p in that order: (p // stride) % rows. It lies within a dimension
        of the new shape exactly if the dimension's own digits, from ``below`` to below·length, contain it.

        >>> Layout(0).reshaped((6, 4, 5), (24, 5), rows=6), Layout(0).reshaped((6, 4), (4, 6), rows=6)
        (Layout(dim=0, outer=1, inner=4), None)
        """
        stride = self.inner * math.prod(shape[self.dim + 1 :])
        for dim, length in enumerate(new):
            below = math.prod(new[dim + 1 :])
            if below and stride % below == 0 and (length * below) % (stride * rows) == 0:
                return Layout(dim, length * below // (stride * rows), stride // below)
        return None


def _unflatten(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    split: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return split


def even(dims: int) -> Periods:
    """The periods of a tensor that has the same value, or the same distribution, everywhere."""
    return (1,) * dims


def same_for_rows(periods: Periods, shape: Sequence[int], layout: Layout) -> bool:
    """Whether a tensor holds the same for every row of a tensor with this layout and as many dimensions.

    >>> same_for_rows((5, 3), (5, 3), Layout(0)), same_for_rows((1, 3), (5, 3), Layout(0))
    (False, True)
    """
    period = periods[layout.dim]
    return shape[layout.dim] == 1 or period == 1 or layout.inner % period == 0


def reshaped(periods: Periods, shape: Sequence[int], new: Sequence[int]) -> Periods:
    """The periods after a reshape in row-major order, where they can be derived.

    >>> reshaped((1, 3), (4, 3), (12,))
    (3,)
    """
    if 0 in new or all(period == 1 for period in periods):
        return even(len(new))
    found: list[int] = []
    old = list(zip(shape, periods, strict=True))
    waiting = list(new)
    while waiting:
        lengths: list[int] = []
        group: list[tuple[int, int]] = []
        of_old = of_new = 1
        while True:  # the fewest dimensions from here on that hold as many elements before as after
            if waiting and (not lengths or of_new < of_old):
                lengths.append(waiting.pop(0))
                of_new *= lengths[-1]
            elif old and of_old < of_new:
                group.append(old.pop(0))
                of_old *= group[-1][0]
            else:
                break
        found += _group(group, lengths)
    return tuple(found)


def _group(group: list[tuple[int, int]], lengths: list[int]) -> list[int]:
    """Periods of the dimensions ``lengths`` that are another shape of those in ``group``, (length, period) each."""
    while group and len(group) > 1 and group[0][1] == 1:
        del group[0]
    if len(lengths) != 1:
        uneven = [(length, period) for length, period in group if period != 1]
        return list(lengths) if uneven else [1] * len(lengths)
    if len(group) == 1:
        return [group[0][1]]
    return [math.prod(length for length, _ in group)] if group else [1]
