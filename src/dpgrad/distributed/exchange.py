"""The sums of a step over all ranks, and their noise: every value is added up once, and given noise once, by one rank.

The sums lie in one flat buffer in float64, cut into as many *shards* as there are ranks. Every rank sends each shard to
the rank of that number, which adds up what it receives in the order of the ranks, adds the noise of its shard and
divides; then every rank is sent every shard. The noise of a shard is a slice of the noise of the whole, a function of
(key, step, place), so it is what one process would add, whatever the number of ranks. It depends on no sum, so a rank
on a CPU draws it while the sums travel.

Bytes per step and rank, with V values and N ranks: 8 V (N-1)/N of sums and 4 V (N-1)/N of noisy means are sent, and as
many received.

Guarantee: what is gathered has noise in every place, once. No rank sends a mean before all ranks have said that their
sums are complete, and the same step is never exchanged twice.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.errors import RunError

__all__ = ["ALIGNED", "Exchange"]

ALIGNED = 4  # values of a shard are a multiple of it: the noise of a CUDA device comes in fours

Noisy = Callable[[Tensor, int], Tensor]  # (sum of a shard, where it begins) -> its noisy mean


class Exchange:
    """The buffers of one model on one device, at addresses that stay: ``sums`` to fill, ``means`` to read.

    ``values`` is the length of what is summed; ``dtype`` that of the means. ``noisy(total, start)`` makes the noisy
    mean of the values of a shard from ``start`` on.
    """

    def __init__(self, ranks: Ranks, values: int, device: torch.device, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self.shard = -(-values // (ranks.size * ALIGNED)) * ALIGNED
        whole = self.shard * ranks.size
        self.sums = torch.zeros(whole, dtype=torch.float64, device=device)
        self.means = torch.zeros(whole, dtype=dtype, device=device)
        self._direct = device.type == "cpu" or "nccl" in ranks.backend
        where = device if self._direct else torch.device("cpu")
        self._received = torch.empty(whole, dtype=torch.float64, device=where)
        self._taken = -1

    def run(self, step: int, noisy: Noisy, meanwhile: Callable[[], object] | None = None) -> Tensor:
        """Exchange the ``sums`` of a step; the noisy means of all values, the same bits on every rank.

        ``meanwhile``, on a CPU, is called while the sums travel: what `noisy` needs and no sum is needed for.
        """
        ranks = self._ranks
        if step <= self._taken:
            raise RunError(
                f"the sums of step {step} were already exchanged. Reusing its noise on other sums would reveal their "
                "difference"
            )
        with ranks.together():
            ranks.meet(Phase.SUMMED, step)
            self._taken = step
            with ranks.committed():
                total = self._summed(meanwhile)
                own = noisy(total, self.shard * ranks.rank).to(self.means.dtype)
                self._gather(own)
        return self.means

    def _summed(self, meanwhile: Callable[[], object] | None) -> Tensor:
        """The sum of this rank's shard, added up in the order of the ranks."""
        if self.sums.is_cuda and self._direct:
            dist.all_to_all_single(self._received, self.sums, group=self._ranks.group)
        else:
            self._ranks.exchange(self._received, self.sums.cpu(), meanwhile=meanwhile)
        parts = self._received.view(self._ranks.size, self.shard)
        total = parts[0]
        for rank in range(1, self._ranks.size):
            total += parts[rank]
        return total.to(self.sums.device)

    def _gather(self, own: Tensor) -> None:
        """Send every rank this rank's shard of the means."""
        if self.means.is_cuda and self._direct:
            dist.all_gather(list(self.means.view(-1, self.shard)), own, group=self._ranks.group)
            return
        # gloo gathers many times slower than it sends from each to each.
        sent = own.cpu().repeat(self._ranks.size)
        found = self.means if self.means.device.type == "cpu" else torch.empty_like(sent)
        self._ranks.exchange(found, sent)
        if found is not self.means:
            self.means.copy_(found)
