"""Whether the ranks of a run compute the same losses: a loss or a collate function of the user's own may differ.

A row more or less moves other rows to another rank. If a row's loss is another one there, more than one row's
contribution changes, by up to 1.66 clip for a neighbour that adds or removes a row. So all ranks compute the losses of
the same few rows, from places that follow from the key, and compare them before the first step and at every 16th.

What a comparison cannot see: a loss that differs on other rows alone. Losses that are others at every call cannot be
compared.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.errors import RanksError
from dpgrad.grads.batch import as_rows, row_losses, size
from dpgrad.grads.sums import Batch
from dpgrad.grads.swap import without_dropout
from dpgrad.runs import replay
from dpgrad.training.step.work import Work

__all__ = ["compare", "due"]

_OFTEN = 16  # steps
_ROWS = 4  # that are compared, of each rank that holds rows of its own
_SEED = 0x5A3E_1055


def due(taken: int) -> bool:
    """Whether losses are compared before the step that follows ``taken`` steps.

    >>> due(0), due(1), due(32)
    (True, False, True)
    """
    return not taken % _OFTEN


def compare(
    work: Work,
    passing: Callable[[], AbstractContextManager[object]],
    probe: Callable[[], Batch] | None,
    parts: bool,
    step: int,
) -> None:
    """Refuse ranks whose loss differs on the same rows: on some of every rank's where each holds ``parts``.

    ``passing()`` is a block in which rows may pass through the model; ``probe()`` are rows of this rank, if it has any.
    """
    found: list[float] = []
    with passing():
        few = None if probe is None else pytree.tree_map(lambda leaf: leaf[:_ROWS], probe())
        given = [few]
        if parts:
            sent = None if few is None else pytree.tree_map(lambda leaf: leaf.cpu(), few)
            given = work.ranks.every(sent, Phase.COMPARED, step)
        found = _losses(work, [each for each in given if each is not None])
    _refuse_other(work.ranks, found, work.device, step)


def _losses(work: Work, batches: list[Batch]) -> list[float]:
    """The losses of the rows at the present weights; none where they are others at a second call."""
    found: list[float] = []
    for batch in batches:
        rows = pytree.tree_map(lambda leaf: leaf.to(work.device), as_rows(batch) if work.several_rows else batch)
        once, again = (_of(work, rows) for _ in range(2))
        if not torch.equal(once.nan_to_num(), again.nan_to_num()):
            return []
        found += once.tolist()
    return found


def _of(work: Work, rows: Batch) -> Tensor:
    cuda = [work.device] if work.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda), without_dropout(work.model):
        torch.manual_seed(_SEED)
        return row_losses(work.loss, work.model, rows, size(rows)).double().cpu()


def _refuse_other(ranks: Ranks, own: list[float], device: torch.device, step: int) -> None:
    """Refuse ranks whose losses differ by more than rounding, on devices of one kind or of several."""
    every: list[tuple[list[float], str]] = ranks.every((own, replay.device_kind(device)), Phase.COMPARED, step)
    if not all(found for found, _ in every):  # they hold none, or cannot be compared
        return
    near = 1e-4 if len({kind for _, kind in every}) == 1 else 1e-2
    first, *others = (torch.tensor(found, dtype=torch.float64) for found, _ in every)
    for rank, other in enumerate(others, 1):
        same = first.shape == other.shape and torch.allclose(first, other, near, near**2, equal_nan=True)
        if not same:
            with ranks.agreeing():
                raise RanksError(
                    f"ranks 0 and {rank} do not have the same loss on the same rows: use one loss, and one collate "
                    "function, on every rank; where a row lies must not change its gradient"
                )
