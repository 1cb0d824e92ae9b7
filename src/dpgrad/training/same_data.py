"""The data of a run, which every step is given again: brought into a form that a step reads, and recognised."""

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpgrad.errors import DataError
from dpgrad.grads.batch import as_rows
from dpgrad.grads.check import PROBED
from dpgrad.grads.sums import Batch
from dpgrad.training import agreed, forms, source
from dpgrad.training.step.work import Work

__all__ = ["SameData"]


class SameData:
    """The data of the first step, which are those of all steps; ``held`` is how many examples of them are here,
    and ``parts`` whether each rank holds its own.

    Guarantee: a step takes the rows of the first, on every rank: a batch drawn from a batch is not what is accounted.
    """

    def __init__(self, work: Work, parts: bool) -> None:
        self._work, self.parts = work, parts
        self._rows: int | None = None  # of all ranks
        self.held = 0
        self._data: source.Remembered | None = None
        self._form: tuple[list[Any], Any, Any, source.Remembered | None] | None = None  # see `_read`
        self._compared: Any = None

    def taken(self, data: Any, again: bool = False) -> tuple[Any, int]:
        """The data in a form that a step reads, and how many examples all ranks have.

        ``again``: what was compared just before need not be compared once more.
        """
        found = self._read(data)
        known = self._rows if again and found is self._compared else None
        return found, self._same_rows(found) if known is None else known

    def zeros(self, data: Any) -> Batch:
        """Two rows of zeros in the shape of the first: what fails on them fails by shapes and types."""
        work = self._work
        first = work.gathered(data, torch.zeros(2, dtype=torch.int64))
        if work.several_rows and work.augment is None:
            first = as_rows(first)
        return pytree.tree_map(torch.zeros_like, first)

    def from_all_over(self) -> Tensor:
        """Some examples from all over the data, the same ones whenever this run is resumed."""
        seed = int.from_bytes(self._work.key.derive("probe", size=8), "little")
        generator = torch.Generator().manual_seed(seed)
        if self.held <= 4 * PROBED:
            return torch.randperm(self.held, generator=generator, device="cpu")[:PROBED].sort().values
        return torch.randint(self.held, (PROBED,), generator=generator, device="cpu").sort().values

    def _read(self, data: Any) -> Any:
        """The data in a form that a step reads. What was given before, also in a new tuple, is not converted again.

        It is where other rows were written into arrays of which the form holds copies: then the rows are refused.
        """
        parts, layout = pytree.tree_flatten(data)
        if self._form is not None:
            given, before, found, copied = self._form
            same = layout == before and all(map(operator.is_, parts, given))  # a dict or list may hold others by now
            if same and (copied is None or copied.holds(copied.data)):
                return found
        found = forms.taken(data, model=self._work.model)
        arrays = forms.copied(data, found)
        self._form = parts, layout, found, source.Remembered.of(arrays, self._work.key) if arrays else None
        return found

    def _same_rows(self, data: Any) -> int:
        """The number of examples of data that must not change; of several ranks, how many all have together."""
        if self._rows is not None and self._data is not None and data is self._data.data and self._data.steady():
            self._compared = data
            return self._rows
        work, held = self._work, source.rows(data)
        if self._data is None or self._rows is None:
            remembered = source.Remembered.of(data, work.key)
            word = partial(agreed.rows_word if self.parts else agreed.data_word, data, work.key, held)
            work.share, self._rows = agreed.share_of(work.ranks, held, self.parts, word)
            agreed.same_lots(work.ranks, work.mechanism, self._rows, work.key, work.start)
            self._data, self.held = remembered, held
        elif held != self.held or not self._data.holds(data):
            raise DataError(
                "data must be the whole dataset, with the same rows at every step, and these are others than at the "
                "first: the mechanism draws the batches itself. Give the dataset of a loader, not its batches, and "
                "random changes of the rows as augment"
            )
        self._compared = data
        return self._rows
