"""The number and the sizes of the pieces in which a step's examples are processed.

A captured graph has a fixed number of places. A batch takes full pieces and a smaller one for the rest, so few
places stay empty; the memory is that of one full piece for every batch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dpgrad.distributed.share import WHOLE, Share
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["CALLED", "CODE", "GRAPHS", "MORE_CODE", "Grain", "Sizes", "capacity"]


class Grain(NamedTuple):
    """How finely sizes are spaced: what a size costs, and what an empty place costs."""

    above: float  # standard deviations by which a full piece exceeds the expected batch
    deviations: float  # standard deviations between sizes
    share: float = 0.0  # or this share of the expected batch, if larger


GRAPHS = Grain(1.0, 0.5)  # a size is captured, and takes memory
CODE = Grain(2.0, 2.0)  # code is recorded per size, and an empty place costs little compared with Python
MORE_CODE = Grain(2.0, 0.5)  # code is recorded per size, and an empty place costs more in the long run
CALLED = Grain(2.0, 0.0, 1 / 32)  # a size costs little, and an empty place as much as an example

# A full piece holds most batches, or a second, small piece would cost time, and takes little more memory than one.
_MOST, _SHARE = 3.0, 0.1  # it may exceed the expected batch by this share of it, within so many deviations
_RARELY = 6.0  # deviations beyond which a Poisson batch is drawn separately
_LAST = 8  # sizes of the last piece, where a batch takes several
_ALIGNED = 8  # rows; large sizes are multiples of it


@dataclass(frozen=True)
class Sizes:
    """The sizes of pieces: at most ``most`` examples, in steps of ``fine``."""

    most: int
    fine: int = 1

    @classmethod
    def of(
        cls, mechanism: Mechanism, rows: int, microbatch: int | None = None, grain: Grain = GRAPHS,
        share: Share = WHOLE,
    ) -> "Sizes":  # fmt: skip
        """The sizes of a run; each of several ranks has its ``share``.

        >>> plan = Mechanism(sampling.Poisson(0.01), 10_000, 1.0, batch_size=500)
        >>> Sizes.of(plan, rows=50_000), Sizes.of(plan, rows=50_000, grain=CALLED).pieces(507)
        (Sizes(most=552, fine=8), [512])
        """
        mean, deviation = _expected(mechanism, rows)
        if not share.whole:
            mean, deviation, rows = mean / share.size, deviation / math.sqrt(share.size), max(1, share.most(rows))
        above = max(grain.above * deviation, min(_MOST * deviation, _SHARE * mean))
        most = max(math.ceil(mean), math.floor(mean + above), 1)
        most = min(_aligned(most), rows, microbatch or rows)
        few = most / _LAST if mean > most and not grain.share else 0
        fine = max(1.0, grain.deviations * deviation, grain.share * mean, few)
        return cls(most, min(most, 1 << round(math.log2(fine))))

    def pieces(self, count: int) -> list[int]:
        """The numbers of places of the pieces that hold ``count`` examples.

        >>> Sizes(550, 16).pieces(1200), Sizes(550, 16).pieces(0)
        ([550, 550, 112], [16])
        """
        whole, rest = divmod(count, self.most)
        last = [min(self.most, -(-rest // self.fine) * self.fine)] if rest else []
        return [self.most] * whole + last or [min(self.fine, self.most)]


def capacity(mechanism: Mechanism, rows: int) -> int:
    """A number of examples that a batch of the declared size almost never exceeds."""
    mean, deviation = _expected(mechanism, rows)
    return min(rows, math.ceil(mean + _RARELY * deviation))


def _aligned(size: int) -> int:
    """Round a size up to a multiple of eight if that adds little."""
    return -(-size // _ALIGNED) * _ALIGNED if size >= _ALIGNED * _ALIGNED and size % _ALIGNED else size


def _expected(mechanism: Mechanism, rows: int) -> tuple[float, float]:
    """Mean and standard deviation of the number of examples, at the step with the largest batch.

    For Poisson batches this is the declared size: one computed from the data would round differently with one more row.
    """
    sampler = mechanism.sampler
    if not isinstance(sampler, sampling.Poisson):
        return float(min(rows, sampler.batch_size or rows)), 0.0
    rates = [sampler.sampling_rate_at(step) for step in range(0, mechanism.steps, max(1, mechanism.steps // 1000))]
    sampling_rate = max(rates)
    mean = rows * sampling_rate
    if mechanism.batch_size is not None:
        mean = mechanism.batch_size * sampling_rate * len(rates) / sum(rates)
    return mean, math.sqrt(mean * (1 - sampling_rate))
