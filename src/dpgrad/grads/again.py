"""When an engine is compared with its definition again during a run."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Again"]


class Again:
    """When to `compare` once more: after 1, 4, 16, ... steps, within a hundredth of the time of 1,000 steps.

    A comparison that takes longer than two steps waits until it is a two-hundredth of all time so far. When it is done
    does not change what a step returns.
    """

    def __init__(self) -> None:
        self._steps, self._next = 0, 1
        self._began = self._took = 0.0
        self._least = math.inf  # seconds that a comparison takes

    def due(self) -> bool:
        """Whether to compare before the next step, which is counted."""
        now = time.monotonic()
        self._steps += 1
        if self._steps == 1:
            self._began = now
            return False
        elapsed = now - self._began
        if self._steps - 1 < self._next:
            return False
        affordable = self._least == math.inf or self._least <= 2 * elapsed / (self._steps - 1)
        return affordable or self._took + self._least <= 0.005 * elapsed

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A comparison, whose time is measured."""
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        self._took += took
        self._least = min(self._least, took)
        self._next = 4 * (self._steps - 1)
