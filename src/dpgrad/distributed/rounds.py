"""Rounds: ranks that work at their own pace lend each other shards of parameters, and take each other's sums.

A pass through a sharded model needs the parameters of one unit of ``fully_shard`` after the other, and gives sums of
gradients one after the other. Ranks need not do this in step: one may have no rows, take more passes, or another path
through the model. A *round* is a meeting in which every rank says what it wishes (a unit, to give the sums of some
parameters, or nothing more), and an exchange in which every rank gets what it wished. A rank that has finished takes
part in rounds until all have.

Guarantee: a block of rounds ends on a rank only if it ends on all, and with all sums of all ranks. A rank that fails
within is heard of in the round that the others come to next, and all of them raise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.errors import RunError

__all__ = ["Held", "Rounds", "Slices", "Spread", "Totals"]

T = TypeVar("T")

_BUCKET = 1 << 20  # values that are exchanged together, at least one parameter
_TYPES = (torch.float32, torch.float64)  # of sums


class Slices(NamedTuple):
    """Where the shards of a parameter lie in it, flat: shard k from ``cuts[k]`` to ``cuts[k + 1]``.

    FSDP2 cuts the first dimension as `torch.chunk` does: as many rows in each shard, the last ones fewer or none.

    >>> Slices.of(torch.Size([5, 2]), 3).cuts
    (0, 4, 8, 10)
    >>> Slices.of(torch.Size([1]), 3).cuts
    (0, 1, 1, 1)
    """

    cuts: tuple[int, ...]

    @classmethod
    def of(cls, shape: torch.Size, shards: int) -> "Slices":
        """Those of a parameter in so many shards."""
        rows, inner = shape[0], shape[1:].numel()
        each = -(-rows // shards)
        return cls(tuple(inner * min(shard * each, rows) for shard in range(shards + 1)))

    def length(self, shard: int) -> int:
        """The number of values of a shard."""
        return self.cuts[shard + 1] - self.cuts[shard]


@dataclass(frozen=True)
class Spread:
    """Which shard each of ``ranks`` holds: all ``shards`` of them, and again, where replicas hold the same (HSDP).

    >>> spread = Spread(4, 2)
    >>> [spread.shard(rank) for rank in range(4)], list(spread.row(3))
    ([0, 1, 0, 1], [2, 3])
    """

    ranks: int
    shards: int

    def shard(self, rank: int) -> int:
        """The shard that a rank holds."""
        return rank % self.shards

    def row(self, rank: int) -> range:
        """The ranks that hold all shards together with this one, in the order of the shards."""
        first = rank - self.shard(rank)
        return range(first, first + self.shards)


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter of which this rank holds a shard. ``whole`` has memory while its unit is here, and none elsewhere."""

    local: Tensor  # the shard, flat
    whole: Tensor
    slices: Slices

    def flat(self) -> Tensor:
        """The memory of the whole, as a flat tensor whose changes nobody else counts."""
        whole = self.whole
        flat = torch.empty(0, dtype=whole.dtype, device=whole.device)
        return flat.set_(whole.untyped_storage(), 0, (whole.numel(),), (1,))

    def make(self) -> None:
        """Give the whole its memory."""
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())

    def drop(self) -> None:
        """Take its memory back."""
        self.whole.untyped_storage().resize_(0)


class Totals:
    """This rank's shards of the sums of a step, added up in float64 as all ranks give them.

    ``units`` are the shapes of the parameters that are trained, by name, in each unit; ``buckets`` those whose sums are
    given together. Guarantee: a step is begun once.
    """

    def __init__(
        self, ranks: Ranks, units: Sequence[Mapping[str, torch.Size]], spread: Spread, device: torch.device
    ) -> None:
        self._ranks, self._spread, self._device = ranks, spread, device
        self.slices = {name: Slices.of(shape, spread.shards) for unit in units for name, shape in unit.items()}
        each = ({name: shape.numel() for name, shape in unit.items()} for unit in units)
        self.buckets = [bucket for unit in each for bucket in _buckets(unit)]
        self.sums: list[Tensor] = []  # of the own shards, by bucket
        self._taken = -1
        self.given = False  # whether this rank has given any of a step

    def begin(self, step: int) -> None:
        """From here on the sums of a step are added up."""
        if step <= self._taken:
            raise RunError(
                f"the sums of step {step} were already exchanged. Reusing its noise on other sums would reveal their "
                "difference"
            )
        self._taken, self.given = step, False
        own = range(len(self.buckets))
        self.sums = [
            torch.zeros(self.length(k, self._ranks.rank), dtype=torch.float64, device=self._device) for k in own
        ]

    def ends(self, name: str) -> tuple[int, int]:
        """Where this rank's shard of a parameter begins and ends."""
        cuts, shard = self.slices[name].cuts, self._spread.shard(self._ranks.rank)
        return cuts[shard], cuts[shard + 1]

    def length(self, bucket: int, rank: int) -> int:
        """The number of values of a rank's shards in a bucket."""
        shard = self._spread.shard(rank)
        return sum(self.slices[name].length(shard) for name in self.buckets[bucket])

    def parts(self, bucket: int, total: Tensor) -> list[Tensor]:
        """The sums of a bucket, as each rank takes them."""
        names = self.buckets[bucket]
        each = torch.split(total, [self.slices[name].cuts[-1] for name in names])
        cuts = [self.slices[name].cuts for name in names]
        shards = [
            torch.cat([one[cut[shard] : cut[shard + 1]] for one, cut in zip(each, cuts, strict=True)])
            for shard in range(self._spread.shards)
        ]
        return [shards[self._spread.shard(rank)] for rank in range(self._ranks.size)]


class Rounds:
    """The rounds of one block of passes of a step, through a model of these ``units``."""

    def __init__(
        self, ranks: Ranks, step: int, units: Sequence[Sequence[Held]], spread: Spread, totals: Totals | None
    ) -> None:
        self._ranks, self._step, self._spread, self._totals = ranks, step, spread, totals
        self._units = units
        self._order = [list(_buckets({place: held.whole.numel() for place, held in enumerate(unit)})) for unit in units]
        self.device = next(held.local.device for unit in units for held in unit)
        self._direct = self.device.type == "cpu" or "nccl" in ranks.backend
        self._here: set[int] = set()
        self._failed: BaseException | None = None

    def have(self, wanted: set[int]) -> None:
        """Let these units be here, and no others."""
        if wanted <= self._here:
            return
        for unit in self._here - wanted:
            for held in self._units[unit]:
                held.drop()
        missing = sorted(wanted - self._here)
        self._here &= wanted
        for unit in missing:
            self._round(1 + unit)
            self._here.add(unit)

    def give(self, bucket: int, total: Tensor) -> None:
        """Add the sums of some parameters, flat, to those of all ranks: float32 travels as it is, and loses nothing."""
        assert self._totals is not None
        self._totals.given = True
        self._round(-1 - (len(_TYPES) * bucket + _TYPES.index(total.dtype)), total)

    def end(self) -> None:
        """Serve the others until all have finished."""
        while not self._round(0):
            pass

    def close(self) -> None:
        """Take back all memory, however the block ended."""
        for unit in self._here:
            for held in self._units[unit]:
                held.drop()
        self._here.clear()

    def _round(self, wish: int, total: Tensor | None = None) -> bool:
        """One round; whether nobody has a wish left."""
        if self._failed is not None:  # who called may have caught it
            raise self._failed
        try:
            wishes = self._ranks.meet(Phase.GATHERED, self._step, wish=wish)
            with self._ranks.committed():
                if any(each > 0 for each in wishes):
                    self._lend([each - 1 for each in wishes])
                if any(each < 0 for each in wishes):
                    self._add([-1 - each for each in wishes], total)
        except BaseException as error:
            self._failed = error
            raise
        return not any(wishes)

    def _lend(self, wanted: Sequence[int]) -> None:
        """Exchange parameters: to every rank the unit that it wants, from the ranks of its row; below 0, none."""
        rank, spread = self._ranks.rank, self._spread
        orders = [self._order[unit] if unit >= 0 else [] for unit in wanted]
        if wanted[rank] >= 0:
            for held in self._units[wanted[rank]]:
                held.make()
        for at in range(max(map(len, orders))):
            sent = []
            for other, order in enumerate(orders):
                asked = at < len(order) and rank in spread.row(other)
                places = order[at] if asked else ()
                shards = [self._units[wanted[other]][place] for place in places]
                sent.append([_bytes(held.local.to(held.whole.dtype)) for held in shards])
            own = [self._units[wanted[rank]][place] for place in orders[rank][at]] if at < len(orders[rank]) else []
            lengths = [
                [each.slices.length(spread.shard(other)) * each.whole.element_size() for each in own]
                if other in spread.row(rank)
                else []
                for other in range(self._ranks.size)
            ]
            received = self._exchanged([_joined(each, self.device) for each in sent], list(map(sum, lengths)))
            for other, parts in enumerate(received):
                if lengths[other]:
                    for each, few in zip(own, torch.split(parts, lengths[other]), strict=True):
                        start = each.slices.cuts[spread.shard(other)] * each.whole.element_size()
                        each.flat().view(torch.uint8)[start : start + len(few)] = few

    def _add(self, given: Sequence[int], total: Tensor | None) -> None:
        """Exchange sums: of what each rank gives, this one's shards are added in the order of the ranks; -1, none."""
        totals, rank = self._totals, self._ranks.rank
        if totals is None:
            raise RuntimeError("another rank gives sums in a block without any")
        what = [divmod(each, len(_TYPES)) if each >= 0 else None for each in given]
        sent = [torch.empty(0, dtype=torch.uint8, device=self.device)] * self._ranks.size
        own = what[rank]
        if own is not None and total is not None:
            sent = [_bytes(part) for part in totals.parts(own[0], total)]
        lengths = [0 if each is None else totals.length(each[0], rank) * _TYPES[each[1]].itemsize for each in what]
        for each, part in zip(what, self._exchanged(sent, lengths), strict=True):
            if each is not None:
                totals.sums[each[0]] += part.clone().view(_TYPES[each[1]])

    def _exchanged(self, sent: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Send bytes to every rank; those that are received from each."""
        ranks = self._ranks
        where = self.device if self._direct else torch.device("cpu")
        received = torch.empty(sum(lengths), dtype=torch.uint8, device=where)
        flat, given = torch.cat(list(sent)).to(where), [len(each) for each in sent]
        if self.device.type == "cuda" and self._direct:
            dist.all_to_all_single(received, flat, list(lengths), given, group=ranks.group)
        else:
            ranks.exchange(received, flat, lengths, given)
        return torch.split(received.to(self.device), list(lengths))


def _bytes(tensor: Tensor) -> Tensor:
    """The values of a flat tensor as bytes."""
    return tensor.contiguous().view(torch.uint8)


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _buckets(values: Mapping[T, int]) -> list[tuple[T, ...]]:
    """Things of so many values, a few at a time."""
    found: list[list[T]] = []
    room = 0
    for name, count in values.items():
        if room < count or not found:
            found.append([])
            room = _BUCKET
        found[-1].append(name)
        room -= count
    return [tuple(each) for each in found]
