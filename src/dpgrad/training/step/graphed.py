"""A private step whose bodies are CUDA graphs: a step of many small kernels does not wait for Python to launch them.

A graph is captured for each size of a piece when it is first needed, and replayed from then on. Rows, clip bound, noise
and step lie in buffers that are filled before a replay, so that no graph has to be captured anew for them. Nothing in a
step waits for the device.

Guarantee: that of the bodies. What a graph keeps of the time of its capture is looked at before every step, as far as
it can be seen: where it changed, graphs are captured anew. Not seen are numbers inside lists, dictionaries and objects
that the model or the loss hold; tensors that they hold must be written into, not exchanged.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dpgrad.errors import CannotCaptureError
from dpgrad.grads.ways import Attributed
from dpgrad.training.augment import Shifts
from dpgrad.training.step import taped
from dpgrad.training.step.bodies import Bodies, Form
from dpgrad.training.step.feeds import Feed, Piece, feed
from dpgrad.training.step.lots import Lot, Lots
from dpgrad.training.step.sizes import Sizes
from dpgrad.training.step.watch import Watch
from dpgrad.training.step.work import Work

__all__ = ["FEWEST_STEPS", "Graphed", "elsewhere"]

FEWEST_STEPS = 30  # of a mechanism, from which on a capture is worth its time
_LANES = 2  # beside the main stream


class Graph(Protocol):
    """A body that can be replayed."""

    def replay(self) -> None: ...


class Graphed:
    """Replays the bodies on pieces of fixed sizes."""

    form = "graphs of pieces"  # how a step rounds; the sizes follow from the mechanism, and would tell how many rows

    def __init__(self, work: Work, data: Any, rows: int, workers: int = 0) -> None:
        self._work, self._device = work, work.device
        reason = _refusal(work, rows)
        if reason:
            raise CannotCaptureError(reason)
        self._bodies = Bodies(work)
        self._sizes = Sizes.of(work.mechanism, rows, work.microbatch)
        lots = partial(Lots, work.mechanism, rows, work.key, self._device, self._sizes.most)
        self._lots = lots()
        # An augmentation of the user's own is called for one example after another, from the host.
        own = work.augment is not None and not isinstance(work.augment, Shifts)
        self._on_host = lots(to_host=True) if own else None
        self._feed: Feed = feed(
            data, self._device, work.collate, lots(to_host=True), self._sizes, work.mechanism.steps, workers
        )
        one = torch.zeros(1, dtype=torch.int64)
        like = work.augmented(work.gathered(data, one), one, 0)
        self._bodies.rows = pytree.tree_map(lambda leaf: leaf.expand(self._sizes.most, *leaf.shape[1:]).clone(), like)
        if work.averages_of(rows) is not None:
            self._bodies.index = torch.zeros(self._sizes.most, dtype=torch.int64, device=self._device)
        self._graphs: dict[Form, Graph] = {}
        self._draws = False  # whether the model draws random numbers
        self._said = False
        self._open_device()
        self._bodies.hold(1)
        self._bodies.at(work.mechanism.steps - 1)
        with work.own_randomness(work.mechanism.steps):  # a step that the mechanism does not have
            self._graphs[self._first_form()] = self._captured(self._first_form())
        self._rule, self._watch = work.rule, Watch(work.model, work.loss)

    def _open_device(self) -> None:
        """Streams and memory of the captures."""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._bodies.lanes = [torch.cuda.Stream(self._device) for _ in range(_LANES)]  # type: ignore[no-untyped-call]

    def _first_form(self) -> Form:
        """The largest, which leaves room for the others in the memory that they share."""
        shown = self._work.observe is not None
        return Form(self._sizes.most, True, True, False, len(self._work.iterates), shown)

    def step(self, data: Any, rows: int, step: int) -> None:
        """Write the noisy mean of a step to ``.grad``."""
        work, bodies = self._work, self._bodies
        if work.rule is not self._rule or not self._watch.same():
            self._graphs.clear()
            self._open_device()
            self._rule, self._watch = work.rule, Watch(work.model, work.loss)
        lot = self._lots.at(step)
        bodies.at(step)
        seen: taped.Seen = []
        pieces = Piece.of(step, lot, self._sizes)
        with work.own_randomness(step) if self._draws else nullcontext():
            for piece in pieces:
                last = piece is pieces[-1]
                shown = work.observe is not None
                form = Form(piece.size, not piece.start, last, len(pieces) > 2, len(work.iterates), shown)
                self._fill(piece, lot)
                self._replay(form)
                if form.observed:
                    seen.append(tuple(each[:, : piece.filled].clone() for each in bodies.seen[form]))  # type: ignore[arg-type]
        work.remember()
        noisy = bodies.show()
        if work.observe is not None:
            taped.observe(work, bodies, step, seen, noisy)

    def close(self) -> None:
        """Let go of what fetches rows."""
        self._feed.close()

    def _fill(self, piece: Piece, lot: Lot) -> None:
        """Bring the rows of a piece into the buffers."""
        work, bodies = self._work, self._bodies
        bodies.hold(piece.filled)
        own = lot.indices[piece.start : piece.start + piece.size]
        if bodies.index is not None:
            bodies.index[: piece.size].copy_(own)
        held = pytree.tree_leaves(bodies.rows)
        if work.augment is None and self._feed.gather(own, held):
            return
        batch = self._feed.rows(piece, lot)
        if batch is None:
            return
        rows = len(pytree.tree_leaves(batch)[0])
        examples = own if self._on_host is None else self._on_host.at(piece.step).indices[piece.start :]
        batch = work.augmented(work.alike("collate", batch), examples[:rows], piece.step)
        for buffer, leaf in zip(held, pytree.tree_leaves(batch), strict=True):
            buffer[:rows].copy_(leaf)

    def _replay(self, form: Form) -> None:
        if form not in self._graphs:
            try:
                self._graphs[form] = self._captured(form)
            except CannotCaptureError as error:
                if not self._said:
                    warnings.warn(f"pieces of some sizes are not captured: {error}", stacklevel=4)
                self._said = True
                self._graphs[form] = _Called(partial(self._bodies.accumulate, form))
        self._graphs[form].replay()

    def _captured(self, form: Form) -> Graph:
        """The body of a form as a graph; model, generators and other pieces' sums are as before."""
        model = self._work.model
        kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        before = Watch(model, self._work.loss)
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                self._warm_up(form)
                graph = self._capture(partial(self._bodies.accumulate, form))
        except RuntimeError as error:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
            raise CannotCaptureError(f"the step cannot be captured: {str(error).partition(chr(10))[0]}") from error
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)
        if not before.same():
            raise CannotCaptureError(
                "model or loss change numbers of their own at every pass, which a graph would not repeat: keep them in "
                "tensors that are written into"
            )
        return graph

    def _warm_up(self, form: Form) -> None:
        """Call the body as it will be captured: kernels are chosen, and what cannot be captured is refused."""
        generator = torch.cuda.default_generators[self._device.index]
        drawn, on_host = generator.get_offset(), _host_randomness()
        with self._on_stream():
            self._bodies.accumulate(form, dry=True)
            if not self._graphs:
                with _as_if_capturing():
                    self._bodies.accumulate(form, dry=True)
        self._draws = self._draws or generator.get_offset() != drawn
        if _host_randomness() != on_host:
            raise CannotCaptureError(
                "model or loss draws random numbers on the host, which a graph would repeat: draw them on the device"
            )

    def _capture(self, body: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        collecting = gc.isenabled()
        gc.disable()  # what is let go meanwhile might wait for the device
        try:
            with self._on_stream():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    body()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Within the block work goes to the stream that is captured: libraries hold scratch memory for each stream."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)


class _Called:
    """A body that is called instead."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body


def elsewhere(device: torch.device) -> str:
    """Why the step of a model on another device is not captured."""
    return f"the model is on {device}: a step is captured on a CUDA device"


def _refusal(work: Work, rows: int) -> str:
    """Why the step of this run cannot be captured; nothing where it may be tried."""
    if work.device.type != "cuda":
        return elsewhere(work.device)
    if not rows or work.engine is None:
        return "there is no example"
    engine = work.engine
    return engine.not_captured if isinstance(engine, Attributed) else ""


def _host_randomness() -> object:
    """The states of the generators on the host."""
    return torch.default_generator.get_state().tolist(), random.getstate(), repr(np.random.get_state())


@contextmanager
def _as_if_capturing() -> Iterator[None]:
    """Within the block models that ask see a capture, and waiting for the device is an error.

    While capturing it would spoil torch's generators. transformers leaves out checks of values where it sees a capture.
    """
    before, asked = torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing
    with warnings.catch_warnings():  # that it does not find everything: what it misses, the capture refuses
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = asked
            torch.cuda.set_sync_debug_mode(before)
