"""A private step whose bodies are CUDA graphs: a step of many small kernels does not wait for Python to launch them.

There is a graph for each piece size. Those that the next steps need are captured before the first step, the others
when they are first needed. Rows, clip bound, noise and step lie in buffers that are filled before a replay, so graphs
are never captured again for other values. Nothing in a step waits for the device.

Guarantee: that of `pieces`.
"""

import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from dpgrad import _validate
from dpgrad.errors import CannotCaptureError
from dpgrad.grads.watch import Watch
from dpgrad.grads.ways import Attributed
from dpgrad.training.step.bodies import Form
from dpgrad.training.step.pieces import Called, Graph, Pieces
from dpgrad.training.step.work import Work

__all__ = ["Graphed", "elsewhere"]

_LANES = 4  # side streams
_MOST_RENEWED = 10  # times that graphs are captured again after a change


class Graphed(Pieces):
    """Replays the bodies as CUDA graphs."""

    form = "graphs of pieces"

    def __init__(self, work: Work, data: Any, rows: int, workers: int = 0, step: int = 0) -> None:
        reason = _refusal(work, rows)
        if reason:
            raise CannotCaptureError(reason)
        super().__init__(work, data, rows, workers)
        self._renewed = 0
        self._warm: set[Form] = set()  # forms, ignoring their size, whose body has been called
        self._open_device()
        self._bodies.hold(1)
        self._bodies.at(work.mechanism.steps - 1)
        # The largest first: the others then fit into the memory they share.
        first = Form(self._sizes.most, True, True, False, len(work.iterates), work.observe is not None)
        with work.own_randomness(work.mechanism.steps):  # a step that the mechanism does not have
            self._graphs[first] = self._made(first)
            self._capture_ahead(step)
        torch.cuda.empty_cache()  # free the memory of the passes before the captures: graphs have a pool of their own
        self._watch = Watch(work.model, work.loss, work.rule)  # as the passes left it

    def _capture_ahead(self, step: int) -> None:
        """Capture the bodies that the next steps will need more than once, the largest first."""
        drawn = enumerate(self._lots.known(step), step) if step < self._work.mechanism.steps else ()
        needed = Counter(form for at, lot in drawn for _, form in self._forms(at, lot))
        for form in sorted((form for form, times in needed.items() if times > 1), reverse=True):
            if form not in self._graphs:
                with suppress(CannotCaptureError):  # reported when it is needed
                    self._graphs[form] = self._made(form)

    def _open_device(self) -> None:
        """Open the streams and the memory pool of the captures."""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._bodies.lanes = [torch.cuda.Stream(self._device) for _ in range(_LANES)]  # type: ignore[no-untyped-call]

    def _renew(self) -> None:
        super()._renew()
        self._warm.clear()
        self._draws = True  # a changed model may now draw random numbers: never from the caller's generator
        self._open_device()
        self._renewed += 1
        if self._renewed == _MOST_RENEWED:
            _validate.warn(
                "steps are no longer captured as CUDA graphs: model, loss or rule hold a number that changes again and "
                "again: keep it in a tensor that is written into"
            )

    def _made(self, form: Form) -> Graph:
        """Capture the body of a form; model, generators and other pieces' sums stay unchanged."""
        if self._renewed >= _MOST_RENEWED:
            return Called(partial(self._bodies.accumulate, form))
        model = self._work.model
        before = Watch(model, self._work.loss, self._work.rule)
        kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                graph = self._captured_cold(form)
                if graph is None:
                    self._warm_up(form)
                    before = Watch(model, self._work.loss, self._work.rule)  # a first pass may change something
                    graph = self._capture(partial(self._bodies.accumulate, form))
                    self._warm.add(form._replace(size=0))
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

    def _captured_cold(self, form: Form) -> Graph | None:
        """Capture a form of which another size was captured, without a warm-up pass; None if it needs one.

        A pass takes as long as a capture. It is needed if a kernel chosen by size cannot be loaded during a capture.
        """
        if form._replace(size=0) not in self._warm:
            return None
        try:
            return self._capture(partial(self._bodies.accumulate, form))
        except RuntimeError:
            torch.cuda.synchronize(self._device)
            return None

    def _warm_up(self, form: Form) -> None:
        """Call the body as it will be captured: kernels are chosen, and what cannot be captured is refused."""
        generator = torch.cuda.default_generators[self._device.index]
        drawn, on_host = generator.get_offset(), _host_randomness()
        with self._on_stream():
            self._bodies.accumulate(form, dry=True)
            if not self._graphs:
                with _as_if_capturing():
                    self._bodies.accumulate(form, dry=True)
        torch.cuda.empty_cache()
        self._draws = self._draws or generator.get_offset() != drawn
        if _host_randomness() != on_host:
            raise CannotCaptureError(
                "model or loss draws random numbers on the host, which a graph would repeat: draw them on the device"
            )

    def _capture(self, body: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        collecting = gc.isenabled()
        gc.disable()  # freeing memory during a capture might wait for the device
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
        """Run the block on the captured stream: libraries hold scratch memory for each stream."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)


def elsewhere(device: torch.device) -> str:
    """Explain why the step of a model on another device is not captured."""
    return f"the model is on {device}: a step is captured on a CUDA device"


def _refusal(work: Work, rows: int) -> str:
    """Explain why this run's step cannot be captured; empty if a capture may be tried."""
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
    """Within the block, models that ask are told of a capture, and waiting for the device is an error.

    Waiting during a capture would corrupt torch's generators; transformers skips checks of values during one.
    """
    before, asked = torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing
    with warnings.catch_warnings():  # torch warns that this mode misses some cases: the capture itself refuses those
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = asked
            torch.cuda.set_sync_debug_mode(before)
