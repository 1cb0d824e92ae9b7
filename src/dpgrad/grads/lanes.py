"""Work in parallel to the main stream of a CUDA device: short kernels that would leave most of the device idle.

Lanes are streams that a captured graph turns into branches. Outside an `opened` block everything stays on the current
stream, and nothing here does anything.

Guarantee: memory that a lane reads is not freed or overwritten before the main stream has waited for the lane:
`on_lane` holds its ``read`` tensors until then.

>>> with on_lane(0):
...     pass
>>> join()
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

__all__ = ["join", "on_lane", "opened"]

_HELD = 3  # pieces of work by which a lane may lag behind
_HELD_BYTES = 1 << 28  # bytes of the tensors they read; a single piece may read more


class _Lanes:
    """The side streams of a main stream, and the tensors they read."""

    def __init__(self, main: torch.cuda.Stream, streams: list[torch.cuda.Stream]) -> None:
        self.main, self.streams = main, streams
        self.held: deque[tuple[torch.cuda.Event, tuple[object, ...]]] = deque()

    def settle(self, most: int) -> None:
        """Let the main stream wait for all but the last ``most`` pieces of work, and free what they read."""
        while len(self.held) > most:
            done, _ = self.held[0]
            self.main.wait_event(done)
            self.held.popleft()

    def fitting(self) -> int:
        """The number of latest pieces of work that may be held."""
        count, size = 0, 0
        for _, read in islice(reversed(self.held), _HELD):
            size += sum(each.nbytes for each in read if isinstance(each, Tensor))
            if count and size > _HELD_BYTES:
                break
            count += 1
        return count


_open: list[_Lanes] = []  # the backward pass runs in a thread of its own: no context variable would reach it


@contextmanager
def opened(streams: list[torch.cuda.Stream]) -> Iterator[None]:
    """Open lanes for the current stream within the block, if there are ``streams``, and join them at its end."""
    if not streams:
        yield
        return
    _open.append(_Lanes(torch.cuda.current_stream(), streams))
    try:
        yield
        join()
    finally:
        _open.pop()


@contextmanager
def on_lane(which: int, *read: object) -> Iterator[None]:
    """Run the block on a lane, after all earlier work of the main stream; the block may read ``read``."""
    if not _open:
        yield
        return
    lanes = _open[-1]
    stream = lanes.streams[which % len(lanes.streams)]
    ready = lanes.main.record_event()
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield
        lanes.held.append((stream.record_event(), read))
    lanes.settle(lanes.fitting())


def join() -> None:
    """Let the main stream wait for all lanes."""
    if _open:
        _open[-1].settle(0)
