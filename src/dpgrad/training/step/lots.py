"""The rows of each step, drawn on the device for many steps ahead, so no step waits for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpgrad.distributed.share import WHOLE, Share
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import draw
from dpgrad.training.step.sizes import capacity

__all__ = ["MOST_AHEAD", "Lot", "Lots"]

MOST_AHEAD = 256  # steps
_AT_ONCE = 1 << 22  # rows of the data times steps drawn at a time


@dataclass(frozen=True, repr=False, eq=False)
class Lot:
    """The examples of one step that this rank works on. Secret."""

    indices: Tensor  # int64, among the rows held here; entries beyond count are padding
    count: int


@dataclass(frozen=True, repr=False, eq=False)
class _Block:
    """The lots of consecutive steps; their sizes are being copied to the host."""

    steps: range
    indices: Tensor
    counts: Tensor  # (steps,) on the host
    bounds: Tensor | None  # (2, steps) on the host: where this rank's part of each lot begins and ends
    ready: torch.cuda.Event | None

    def count(self, step: int) -> int:
        """The number of rows of a step, over all ranks."""
        if self.ready is not None:
            self.ready.synchronize()
        return int(self.counts[step - self.steps.start])


class Lots:
    """The rows of the steps of a mechanism: the same functions of (key, step) as `draw.chosen`.

    ``beyond`` padding places follow the rows of a lot, so a piece may reach past its end. With ``to_host`` the indices
    are copied to the host. Each of several ranks draws the whole lot and takes its ``share`` of it.
    """

    def __init__(
        self, mechanism: Mechanism, rows: int, key: Key, device: torch.device, beyond: int, to_host: bool = False,
        share: Share = WHOLE,
    ) -> None:  # fmt: skip
        self._mechanism, self._rows, self._key, self._device = mechanism, rows, key, device
        self._to_host, self._share = to_host, share
        self._most, self._beyond = capacity(mechanism, rows), beyond
        self._at_once = max(1, min(MOST_AHEAD, _AT_ONCE // max(rows, 1)))
        self._now: _Block | None = None
        self._next: _Block | None = None

    def at(self, step: int) -> Lot:
        """The lot of a step."""
        if self._now is None or step not in self._now.steps:
            known = self._next if self._next is not None and step in self._next.steps else None
            self._now = known or self._drawn(step)
            after = self._now.steps.stop
            # Requested now and read much later, when the device has drawn it.
            self._next = self._drawn(after) if after < self._mechanism.steps else None
        count = self._now.count(step)  # waits; the indices have arrived too then
        if count > self._most:
            device = torch.device("cpu") if self._to_host else self._device
            alone = self._share.of(draw.chosen(self._mechanism.sampler, self._rows, step, self._key, device))
            return Lot(torch.cat([alone, alone.new_zeros(self._beyond)]), len(alone))
        place = step - self._now.steps.start
        line = self._now.indices[place]
        if self._share.whole:
            return Lot(line, count)
        bounds = self._now.bounds
        start, stop = self._share.bounds(count) if bounds is None else map(int, bounds[:, place])
        return Lot(self._share.local(line[start:]), stop - start)

    def known(self, step: int) -> list[Lot]:
        """The lots of ``step`` and of the later steps that are already drawn."""
        first = self.at(step)
        assert self._now is not None
        return [first, *(self.at(later) for later in range(step + 1, self._now.steps.stop))]

    def _drawn(self, first: int) -> _Block:
        steps = range(first, min(first + self._at_once, self._mechanism.steps))
        places = max(1, self._most + self._beyond)
        found = draw.ahead(self._mechanism.sampler, steps, self._rows, self._key, places, self._device)
        bounds = self._share.bounds_in(found.indices, found.counts)
        if self._device.type != "cuda":
            return _Block(steps, found.indices, found.counts, bounds, None)
        counts, indices = _to_host(found.counts), _to_host(found.indices) if self._to_host else found.indices
        bounds = None if bounds is None else _to_host(bounds)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return _Block(steps, indices, counts, bounds, ready)


def _to_host(tensor: Tensor) -> Tensor:
    """An asynchronous copy on the host, complete once the device has reached it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
