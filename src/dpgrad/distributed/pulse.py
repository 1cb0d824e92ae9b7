"""Signs of life: how ranks that wait tell a slow rank from one that is gone.

A process that dies closes its connections, and whoever waits for it hears of that at once. A machine that vanishes, or
a process that is stopped, closes nothing. So a thread of every rank counts upwards in the store by which the ranks
found each other, also while the rank computes, compiles or evaluates for long. A rank that waits looks at the counts of
the others: one that stands still for too long is *silent*. Where the store itself does not answer, nothing is known of
any rank.

Only time in which this rank itself was running and waiting counts as silence.
"""

import atexit
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

__all__ = ["EVERY", "Pulse"]

EVERY = 0.5  # seconds between two signs, for groups of up to 32 ranks
_STORE = "the store by which the ranks found each other, which rank 0 or the launcher holds,"


class Pulse:
    """The signs of life of the ranks of ``group``, of which this process is ``rank``.

    They end with the group, with the process, or by `stop`.
    """

    def __init__(self, group: Any) -> None:
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [rank for rank in range(size) if rank != self._rank]
        self._every = EVERY * max(1, size / 32)  # all ranks read all counts
        self._group = weakref.ref(group)
        store = _store()
        self._store = None if store is None else c10d.PrefixStore(f"dpgrad pulse {group.group_name}", store)
        self._counted = 0
        self._known: dict[int, bytes] = {}
        self._heard = dict.fromkeys(self._others, 0.0)  # when a count was last seen to change
        self._answered = 0.0  # when the store last told the counts
        self._ended, self._watched = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dpgrad pulse", daemon=True)
        if self._store is not None:
            self._sign()  # all have signed before the first of them can wait
            self._thread.start()
            atexit.register(self.stop)

    def silent(self, since: float, limit: float) -> str:
        """Who gave no sign for ``limit`` seconds of the time after ``since``, in words; none where no store tells."""
        if not self._thread.is_alive():
            return ""
        self._watched.set()
        least, now = max(limit, 4 * self._every), time.monotonic()
        if now - max(self._answered, since) > least:
            return _STORE
        late = [str(rank) for rank, heard in self._heard.items() if now - max(heard, since) > least]
        return f"rank{'s' * (len(late) > 1)} {', '.join(late)}" if late else ""

    def rest(self) -> None:
        """Nobody waits: counts need not be read."""
        self._watched.clear()

    def stop(self) -> None:
        """Give no further signs."""
        self._ended.set()
        atexit.unregister(self.stop)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * self._every)  # a store that does not answer is not waited for

    def _beat(self) -> None:
        while not self._ended.wait(self._every) and self._group() is not None:
            try:
                self._sign()
                if self._watched.is_set():
                    self._look()
            except dist.DistStoreError:  # it was too slow to answer, and may answer again
                continue
            except Exception:  # the store is gone, and with it the process that holds it: connections tell of that
                return

    def _sign(self) -> None:
        assert self._store is not None
        self._counted += 1
        self._store.set(str(self._rank), str(self._counted))

    def _look(self) -> None:
        assert self._store is not None
        found = self._store.multi_get([str(rank) for rank in self._others])
        self._answered = now = time.monotonic()
        for rank, count in zip(self._others, found, strict=True):
            if self._known.get(rank) != count:
                self._known[rank], self._heard[rank] = count, now


def _store() -> Any:
    """A connection of its own to the store of torch's default group; None where there is none."""
    try:
        return c10d._get_default_store().clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None
