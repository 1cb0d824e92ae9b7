"""Whom a waiting rank takes for silent: ranks whose counts stand still, or the store where it does not answer.

The clock is the tests' own: a machine that stalls makes no rank silent.
"""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dpgrad.distributed import pulse
from dpgrad.distributed.pulse import Pulse
from dpgrad.distributed.ranks import Ranks

LIMIT = 1.0  # seconds of `Clock`


class Group:
    group_name = "a group"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Store:
    """Counts of ranks 0, which ``lives``, and 2, which is gone; ``open`` is cleared while it does not answer."""

    def __init__(self) -> None:
        self.lives = True
        self.open, self.asked, self.slow, self.clock = threading.Event(), 0, 0, Clock()
        self.open.set()

    def set(self, name: str, value: str) -> None:
        pass

    def multi_get(self, names: list[str]) -> list[bytes]:
        self.asked += 1
        self.open.wait()
        if self.slow:
            self.slow -= 1
            raise dist.DistStoreError("wait timeout")
        return [str(self.asked if name == "0" and self.lives else 1).encode() for name in names]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pulse, Store]]:
    store, group = Store(), Group()
    monkeypatch.setattr(pulse, "EVERY", 1e-3)
    monkeypatch.setattr(pulse, "time", store.clock)
    monkeypatch.setattr(pulse, "_store", lambda: store)
    monkeypatch.setattr(pulse.c10d, "PrefixStore", lambda name, of: of)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3)
    made = Pulse(group)
    try:
        yield made, store
    finally:
        store.open.set()
        made.stop()
        del group


def waited(made: Pulse, store: Store) -> str:
    """Who is told of first, where the counts are read twice between two looks at the clock if the store answers."""
    since = store.clock.now
    for _ in range(400):
        if found := made.silent(since, LIMIT):
            return found
        store.clock.now += LIMIT / 40
        asked = store.asked
        while store.open.is_set() and store.asked < asked + 2:
            time.sleep(1e-4)
    return "nobody"


@pytest.mark.parametrize(("lives", "named"), [(True, "rank 2"), (False, "ranks 0, 2")])
def test_a_rank_whose_count_stands_still_is_named(lives: bool, named: str, heard: tuple[Pulse, Store]) -> None:
    made, store = heard
    store.lives = lives
    assert waited(made, store) == named


def test_no_rank_is_named_where_the_store_does_not_answer(heard: tuple[Pulse, Store]) -> None:
    made, store = heard
    store.open.clear()
    assert waited(made, store) == pulse._STORE


def test_a_store_that_was_slow_is_asked_again(heard: tuple[Pulse, Store]) -> None:
    made, store = heard
    store.slow = 3
    assert waited(made, store) == "rank 2"
    assert store.asked > 4


def test_an_exchange_is_pending_while_other_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What interrupts that work closes the connections, and must not wait for the exchange."""
    ranks, seen = Ranks(None, alone=True), []
    place = SimpleNamespace(pending=False, control=None, pulse=SimpleNamespace(rest=lambda: None))
    monkeypatch.setattr(ranks, "_place", place)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: SimpleNamespace(wait=lambda _: None))
    ranks.exchange(torch.zeros(1), torch.zeros(1), meanwhile=lambda: seen.append(place.pending))
    assert seen == [True]
    assert not place.pending
