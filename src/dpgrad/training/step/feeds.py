"""Rows of the data on their way to the device: gathered there, or on the host while the device computes.

Where each piece begins and ends is known before its step, so the host can fetch rows ahead. Fetching releases
nothing; what is computed from the rows is charged before it is computed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from dpgrad.errors import DpgradError
from dpgrad.grads.sums import Batch
from dpgrad.training import source
from dpgrad.training.step.lots import Lot, Lots
from dpgrad.training.step.sizes import Sizes

__all__ = ["Feed", "Piece", "feed"]

_AHEAD = 2  # pieces that are fetched ahead


class Piece(NamedTuple):
    """Some examples of a step."""

    step: int
    start: int
    size: int  # places
    filled: int  # places that hold an example

    @classmethod
    def of(cls, step: int, lot: Lot, sizes: Sizes) -> list["Piece"]:
        """The pieces of a step."""
        found, start = [], 0
        for size in sizes.pieces(lot.count):
            found.append(cls(step, start, size, min(size, lot.count - start)))
            start += size
        return found


class Feed:
    """Rows of data that lie on the device."""

    def __init__(self, data: Any, device: torch.device) -> None:
        self._data, self._device = data, device
        self._leaves = [] if isinstance(data, Dataset) else pytree.tree_leaves(data)

    def rows(self, piece: Piece, lot: Lot) -> Batch | None:
        """The rows of a piece, ``piece.size`` of them or, where they come from the host, ``piece.filled``."""
        own = lot.indices[piece.start : piece.start + piece.size]
        return source.gathered(self._data, own, self._device)

    def gather(self, indices: Tensor, buffers: list[Tensor]) -> bool:
        """Write the rows straight into buffers if possible; return whether it was."""
        for leaf, buffer in zip(self._leaves, buffers, strict=True):
            torch.index_select(leaf, 0, indices, out=buffer[: len(indices)])
        return True

    def close(self) -> None:
        """Stop fetching and free its threads or processes."""


class _Fetched(Feed):
    """Rows of data on the host, fetched by a thread ahead of time and copied while the device computes."""

    def __init__(
        self, data: Any, device: torch.device, collate: source.Collate, lots: Lots, sizes: Sizes, last: int
    ) -> None:
        super().__init__(data, device)
        self._collate, self._lots, self._sizes, self._last = collate, lots, sizes, last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dpgrad-rows")
        self._waiting: deque[tuple[Piece, Future[Batch]]] = deque()
        self._coming: Iterator[tuple[Piece, Tensor]] = iter(())
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def rows(self, piece: Piece, lot: Lot) -> Batch | None:
        if not piece.filled:
            return None
        while self._waiting and self._waiting[0][0] != piece:
            self._waiting.popleft()[1].cancel()  # of steps that were not taken
        if not self._waiting:
            self._coming = _pieces(self._lots, self._sizes, self._last, piece)
            self._ask()
        _, fetched = self._waiting.popleft()
        batch = fetched.result()
        self._ask()
        return self._sent(batch)

    def gather(self, indices: Tensor, buffers: list[Tensor]) -> bool:
        return False

    def _ask(self) -> None:
        """Start fetching the next pieces."""
        while len(self._waiting) < _AHEAD:
            following = next(self._coming, None)
            if following is None:
                return
            piece, indices = following
            self._waiting.append((piece, self._thread.submit(self._fetch, indices)))

    def _fetch(self, indices: Tensor) -> Batch:
        batch = source.gathered(self._data, indices, torch.device("cpu"), self._collate)
        return pytree.tree_map(Tensor.pin_memory, batch) if self._device.type == "cuda" else batch

    def _sent(self, batch: Batch) -> Batch:
        """The rows on the device, copied while it computes."""
        if self._copying is None:
            return batch
        now = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copying):
            found = pytree.tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), batch)
        now.wait_stream(self._copying)
        for leaf in pytree.tree_leaves(found):
            leaf.record_stream(now)
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Loaded(_Fetched):
    """Rows of a Dataset, read by the worker processes of torch's own DataLoader."""

    def __init__(self, *args: Any, loading: Mapping[str, Any]) -> None:
        super().__init__(*args)
        self._loading = loading
        self._order: deque[Piece] = deque()
        self._loaded: Iterator[Batch] = iter(())

    def rows(self, piece: Piece, lot: Lot) -> Batch | None:
        if not piece.filled:
            return None
        # Taken out until the rows arrive: after an interrupted wait, order and rows no longer match.
        order, self._order = self._order, deque()
        while order and order[0] != piece:
            order.popleft()
            next(self._loaded)
        if not order:
            order = self._begin(piece)
        order.popleft()
        try:
            batch = next(self._loaded)
        except DpgradError as error:  # with the traceback of the worker before it
            raise type(error)(str(error).strip().splitlines()[-1].partition(": ")[2]) from None
        self._order = order
        return self._sent(batch)

    def _begin(self, first: Piece) -> deque[Piece]:
        """Start loading the pieces from ``first`` on; return their order."""
        order: deque[Piece] = deque()
        # No reference to ``self``, which holds the loader: in a cycle, each worker takes five seconds to end.
        coming = _pieces(self._lots, self._sizes, self._last, first)

        def indices() -> Iterator[list[int]]:
            for piece, own in coming:
                order.append(piece)
                yield own.tolist()

        loader = DataLoader(
            _Read(self._data, self._collate), batch_sampler=_Once(indices), collate_fn=_as_it_is,
            pin_memory=self._device.type == "cuda", **self._loading,
        )  # fmt: skip
        with torch.random.fork_rng([]):  # drawing the workers' seed must not change the numbers that dropout draws
            self._loaded = iter(loader)
        return order

    def close(self) -> None:
        super().close()
        self._loaded = iter(())


def _pieces(lots: Lots, sizes: Sizes, last: int, first: Piece) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces from ``first`` on, with the examples of each."""
    for step in range(first.step, last):
        lot = lots.at(step)
        for piece in Piece.of(step, lot, sizes):
            if piece.filled and (step, piece.start) >= (first.step, first.start):
                yield piece, lot.indices[piece.start : piece.start + piece.filled]


class _Once:
    """A batch sampler for a DataLoader, used once."""

    def __init__(self, indices: Callable[[], Iterator[list[int]]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices()


class _Read(Dataset[Batch]):
    """A Dataset that a worker process reads a batch at a time."""

    def __init__(self, data: Dataset[Any], collate: source.Collate) -> None:
        self._data, self._collate = data, collate

    def __getitems__(self, indices: list[int]) -> Batch:
        return source.read(self._data, indices, self._collate)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def feed(
    data: Any, device: torch.device, collate: source.Collate, lots: Lots, sizes: Sizes, last: int, workers: int = 0
) -> Feed:
    """The feed for ``data``; its own ``lots`` are on the host, for data that lie there."""
    here = not isinstance(data, Dataset) and all(
        isinstance(leaf, Tensor) and leaf.device == device for leaf in pytree.tree_leaves(data)
    )
    if here:
        return Feed(data, device)
    loading = {**data.loading} if isinstance(data, source.ByIndex) else {}
    loading["num_workers"] = workers or loading.get("num_workers", 0)
    if isinstance(data, Dataset) and loading["num_workers"]:
        return _Loaded(data, device, collate, lots, sizes, last, loading=loading)
    return _Fetched(data, device, collate, lots, sizes, last)
