"""Sampling on the device: (key, step) to the rows of a step, or of several steps at once.

The words are those of `dpgrad.sampling`, bit for bit, so a batch does not depend on which device drew it. Which rows
take part, and how many, is secret: nothing here shows them.

>>> chosen(sampling.Poisson(0.5), rows=8, step=0, key=7, device="cpu").tolist() == sampling.Poisson(0.5).draw(
...     rows=8, step=0, key=7
... ).tolist()
True
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpgrad import _triton, _validate
from dpgrad.errors import OptionError
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.mechanism.sampling import Sampler
from dpgrad.randomness import philox

__all__ = ["Ahead", "Device", "ahead", "chosen", "included", "words"]

Device = torch.device | str
_CHUNK = 1 << 24  # words held at a time
_HOST_ROWS = 1 << 19  # up to here numpy is done before the kernels of `included` have been launched one by one
_SIGN = -(1 << 63)


def chosen(sampler: Sampler, rows: int, step: int, key: AnyKey, device: Device) -> Tensor:
    """What ``sampler`` draws at ``step``, rising, (count,) int64 on ``device``. Secret.

    Beyond half a million rows a CUDA device draws Poisson's itself, and is waited for; the rows are the same.

    >>> chosen(sampling.FullBatch(), rows=3, step=0, key=7, device="cpu")
    tensor([0, 1, 2])
    """
    if isinstance(sampler, sampling.Poisson) and _on_device(device, rows, key):
        return included(key, step, rows, sampler.sampling_rate_at(step), device).nonzero()[:, 0]
    return _sent(torch.from_numpy(sampler.draw(rows, step, key)).long(), device)


def _on_device(device: Device, rows: int, key: AnyKey) -> bool:
    """Whether a CUDA device draws the rows itself; those of the secure source are drawn on the host."""
    return torch.device(device).type == "cuda" and rows > _HOST_ROWS and not Key.of(key).secure


def included(key: AnyKey, step: int | Tensor, rows: int, sampling_rate: float, device: Device) -> Tensor:
    """Whether each row takes part, (rows,) bool, drawn on ``device`` without waiting for it; see `words` for ``step``.

    Guarantee: that of `sampling.Poisson`, whose rows these are.

    >>> included(key=7, step=0, rows=3, sampling_rate=1.0, device="cpu")
    tensor([True, True, True])
    """
    _validate.whole(rows=rows)
    below = sampling.threshold(sampling_rate)
    if not below:
        return torch.zeros(rows, dtype=torch.bool, device=device)
    # Flipping the sign bit turns the unsigned order of words into the signed order of torch.
    last = below - 1 + _SIGN
    drawn = [
        (words(key, step, start, min(_CHUNK, rows - start), device) ^ _SIGN) <= last
        for start in range(0, max(rows, 1), _CHUNK)
    ]
    return torch.cat(drawn)


def ahead(sampler: Sampler, steps: range, rows: int, key: AnyKey, capacity: int, device: Device) -> "Ahead":
    """The first ``capacity`` rows that ``sampler`` draws at each of several steps, drawn on ``device`` at once.

    >>> drawn = ahead(sampling.Poisson(0.01), range(3), rows=1000, key=7, capacity=32, device="cpu")
    >>> drawn.indices[2, : drawn.counts[2]].tolist() == sampling.Poisson(0.01).draw(1000, step=2, key=7).tolist()
    True
    """
    _validate.whole(least=1, capacity=capacity, steps=len(steps), rows=rows)
    # numpy draws the same rows on a CPU, several times faster than the words in torch.
    if isinstance(sampler, sampling.Poisson) and torch.device(device).type == "cuda":
        mask = _included_at(key, steps, rows, [sampler.sampling_rate_at(step) for step in steps], device)
        indices, counts = _placed(mask, capacity)
    elif isinstance(sampler, sampling.FullBatch):
        indices = torch.arange(capacity, device=device).expand(len(steps), -1)
        counts = torch.full((len(steps),), rows, device=device)
    else:
        drawn = [sampler.draw(rows, step, key) for step in steps]
        counts = _sent(torch.tensor([len(each) for each in drawn]), device)
        indices = torch.zeros(len(steps), capacity, dtype=torch.int64)
        for line, each in zip(indices, drawn, strict=True):
            line[: len(each)] = torch.from_numpy(each[:capacity])
        indices = _sent(indices, device)
    filled = torch.arange(capacity, device=device) < counts[:, None]
    # A place that is not filled repeats the first: no row is touched that the step did not draw, unless it drew none.
    return Ahead(torch.where(filled, indices, indices[:, :1]), counts)


@dataclass(frozen=True, repr=False, eq=False)
class Ahead:
    """The rows of several steps. Secret.

    >>> ahead(sampling.FullBatch(), range(2), rows=3, key=7, capacity=4, device="cpu").indices.tolist()
    [[0, 1, 2, 0], [0, 1, 2, 0]]
    """

    indices: Tensor  # (steps, capacity) int64
    counts: Tensor  # (steps,) int64, how many rows were drawn, also where they are more than the capacity


def _included_at(key: AnyKey, steps: range, rows: int, rates: list[float], device: Device) -> Tensor:
    """`included` at several steps, (steps, rows): by one kernel where there is one."""
    below = [sampling.threshold(rate) for rate in rates]
    if not (_triton.available and torch.device(device).type == "cuda" and all(below)) or Key.of(key).secure:
        return torch.stack([included(key, step, rows, rate, device) for step, rate in zip(steps, rates, strict=True)])
    from dpgrad.randomness.kernels import below as words_below

    secret = philox.constants(sampling.philox_key(key).tolist(), device)
    lasts = [philox.signed(bound - 1) for bound in below]
    at, up_to = (_sent(torch.tensor(each), device) for each in (list(steps), lasts))
    return words_below(secret, at, up_to, rows)


def _placed(mask: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The rows where ``mask`` (..., rows) is true, one after another in (..., slots), and how many there are."""
    place = mask.cumsum(-1) - 1
    # Rows that have no slot go to one more, which is dropped.
    slot = torch.where(mask & (place < slots), place, slots)
    rows = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    indices = rows.new_zeros(*mask.shape[:-1], slots + 1).scatter_(-1, slot, rows)
    return indices[..., :slots], mask.sum(-1)


def _sent(indices: Tensor, device: Device) -> Tensor:
    if torch.device(device).type == "cuda":
        indices = indices.pin_memory()  # the copy then does not wait for the device
    return indices.to(device, non_blocking=True)


def words(key: AnyKey, step: int | Tensor, start: int, count: int, device: Device) -> Tensor:
    """`sampling.words` on ``device``, as int64 of the same 64 bits, without waiting for it.

    ``step`` may be a 0-d int64 tensor on the device, as a captured graph needs it; its value is not checked. The words
    of a secured key are drawn on the host, and a tensor is then refused.

    >>> words(key=7, step=3, start=5, count=2, device="cpu").numpy().view("u8").tolist() == sampling.words(
    ...     key=7, step=3, start=5, count=2
    ... ).tolist()
    True
    """
    _validate.whole(most=sampling.MOST_ROWS, start=start, count=count)
    if not isinstance(step, Tensor):
        _validate.whole(most=_validate.MOST_STEPS, step=step)
        if Key.of(key).secure:
            drawn = sampling.words(key, step, start, count).astype(np.uint64).view(np.int64)
            return _sent(torch.from_numpy(drawn), device)
        step = torch.full((), step, device=device)
    if Key.of(key).secure:
        raise OptionError("step must be a number with a secured key: its words are drawn on the host")
    first, skipped = divmod(start, 4)
    blocks = -(-(skipped + count) // 4)
    counters = torch.arange(first + 1, first + 1 + blocks, device=device)  # numpy counts on before it makes a block
    secret = sampling.philox_key(key).tolist()
    return philox.words(counters, step.unsqueeze(-1), secret).flatten(-2)[..., skipped : skipped + count]
