"""What a lane reads outlives its work: seen on the CPU from when storages are let go."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad.grads import bookkeeping, lanes


class Reads(TorchDispatchMode):
    """The storages that functions within the block read and that were not made there."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, StorageWeakRef] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.made:
                self.read[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        out = func(*args, **(kwargs or {}))
        self.made |= {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


class Watched:
    """Lanes that are as far behind as they may be, and what was let go too early."""

    def __init__(self) -> None:
        self.held: list[tuple[int, object, list[StorageWeakRef]]] = []
        self.pieces = 0
        self.early: list[int] = []

    @contextmanager
    def on_lane(self, which: int, *read: object) -> Iterator[None]:
        self._look()
        with Reads() as reads:
            yield
        self.pieces += 1
        self.held.append((which, read, list(reads.read.values())))
        del self.held[: -lanes._HELD]  # the main stream has waited for these

    def join(self) -> None:
        self._look()
        self.held.clear()

    def _look(self) -> None:
        self.early += [which for which, _, seen in self.held if any(storage.expired() for storage in seen)]


NETWORKS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(512, 5),
        ),
        (6, 3, 8, 8),
    ),
    "positions": (
        lambda: nn.Sequential(
            nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(),
            nn.Linear(16, 5), nn.Flatten(),
        ),
        (6, 40, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("holding", [True, False])
def test_what_a_lane_reads_is_held(name: str, holding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of memory that the main stream gives to the next gradient while a lane reads it would change the norm."""
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        squares: Tensor = model(batch).square().sum(1)
        return squares

    layouts = bookkeeping.find_layouts(model, loss, x)
    watched = Watched()
    on_lane = watched.on_lane if holding else lambda which, *read: watched.on_lane(which)
    monkeypatch.setattr(lanes, "on_lane", on_lane)
    monkeypatch.setattr(lanes, "join", watched.join)
    bookkeeping.gradients(model, loss, x, torch.ones(len(x)), layouts=layouts)
    assert watched.pieces > 3
    assert bool(watched.early) != holding  # held by nobody, they would be let go: the test can tell


def test_large_pieces_are_not_held() -> None:
    """The main stream waits for a lane that would hold much memory; for the last piece there is nothing to wait for."""
    waited: list[int] = []
    main: Any = SimpleNamespace(wait_event=waited.append)
    found = lanes._Lanes(main, [])
    small, half, large = (
        torch.empty(size, dtype=torch.uint8, device="meta")
        for size in (1, lanes._HELD_BYTES // 2, 2 * lanes._HELD_BYTES)
    )
    held = []
    for number, read in enumerate([small, small, small, small, half, half, half, large, small]):
        event: Any = number
        found.held.append((event, (read, "a record")))
        found.settle(found.fitting())
        held.append(len(found.held))
        assert waited == list(range(number + 1 - held[-1]))
    assert held == [1, 2, 3, 3, 3, 2, 2, 1, 1]
