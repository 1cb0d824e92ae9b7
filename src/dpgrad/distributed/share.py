"""Which rows of a step a rank works on: an even part of those that were drawn, or those that it holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["WHOLE", "Share"]


@dataclass(frozen=True)
class Share:
    """The part of one of ``size`` ranks. ``held`` are the global indices of its rows, None where it holds all rows.

    Guarantee: every row that was drawn is worked on by one rank: the parts of a rising list of rows are disjoint and
    make up the whole.

    >>> chosen = torch.tensor([1, 4, 6, 7, 9])
    >>> [Share(rank, 2).of(chosen).tolist() for rank in (0, 1)]
    [[1, 4], [6, 7, 9]]
    >>> [Share(rank, 2, held).of(chosen).tolist() for rank, held in enumerate([range(0, 7), range(7, 10)])]
    [[1, 4, 6], [0, 2]]
    """

    rank: int = 0
    size: int = 1
    held: range | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of every step."""
        return self.size == 1

    @property
    def first(self) -> int:
        """The global index of the first row that is held."""
        return 0 if self.held is None else self.held.start

    def most(self, rows: int) -> int:
        """The most rows that this rank may have to work on, of ``rows`` in all.

        >>> Share(1, 3).most(10), Share(0, 2, range(0, 4)).most(10)
        (4, 4)
        """
        return -(-rows // self.size) if self.held is None else len(self.held)

    def bounds(self, count: int) -> tuple[int, int]:
        """Where an even part of ``count`` rows begins and ends."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def of(self, chosen: Tensor) -> Tensor:
        """The part of rows that were drawn, rising, (count,), as indices among the rows held."""
        if self.whole:
            return chosen
        if self.held is None:
            start, stop = self.bounds(len(chosen))
            return chosen[start:stop]
        return chosen[(chosen >= self.held.start) & (chosen < self.held.stop)] - self.held.start

    def bounds_in(self, indices: Tensor, counts: Tensor) -> Tensor | None:
        """Where the rows held begin and end in each line of (steps, places), (2, steps); None for even parts."""
        if self.held is None:
            return None
        filled = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
        ends = (self.held.start, self.held.stop)
        return torch.stack([(filled & (indices < end)).sum(-1) for end in ends])

    def local(self, line: Tensor) -> Tensor:
        """Indices among the rows held; of rows that others hold, which are of no account, any."""
        if self.held is None:
            return line
        return (line - self.held.start).clamp(0, max(0, len(self.held) - 1))


WHOLE = Share()  # of one process
