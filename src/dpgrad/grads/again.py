"""When an engine is compared with its definition again during a run."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Again"]


class Again:
    """When to `compare` once more: after the first step, and after 4, 16, ... where it costs little.

    A comparison that takes longer than the quickest step waits until all comparisons are a two-hundredth of the time
    since the first step. Over 1,000 steps they then take about a hundredth of the time. They do not change what a step
    returns.
    """

    def __init__(self) -> None:
        self._steps, self._next = 0, 1
        self._began = self._took = self._last = 0.0
        self._least = math.inf  # seconds that a comparison takes
        self._step = math.inf  # seconds that a step takes, once what it needs is made

    def due(self) -> bool:
        """Whether to compare before the next step, which is counted."""
        self._steps += 1
        done = self._steps - 1
        last, self._last = self._last, time.monotonic()
        if done <= 1:  # the first step sets up what the others need: its time is not theirs
            self._began = self._last
            return done == 1
        self._step = min(self._step, self._last - last)
        if done < self._next:
            return False
        return self._least <= self._step or self._took + self._least <= 0.005 * (self._last - self._began)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A comparison, whose time is measured."""
        began = time.monotonic()
        yield
        self._last = time.monotonic()
        took = self._last - began
        self._took += took
        self._least = min(self._least, took)
        self._next = 4 * (self._steps - 1)
