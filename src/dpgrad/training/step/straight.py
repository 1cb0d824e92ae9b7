"""A private step on a CPU whose body is straight-line code (`dpgrad.grads.traced`), where that saves time.

The code of a piece returns the same bits as its body, so whether and when it is made changes no result. It is tried for
short bodies, in which Python takes most of the time, and kept if it is faster. If matrix products take the time, no
code is made, and piece sizes follow the batches.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from dpgrad.grads.traced import CannotTraceError, Traced
from dpgrad.grads.ways import Attributed
from dpgrad.training.step.bodies import Bodies, Form
from dpgrad.training.step.pieces import Graph, Pieces
from dpgrad.training.step.sizes import CALLED, CODE, MORE_CODE, Grain, Sizes
from dpgrad.training.step.work import Work

__all__ = ["Straight"]

_SHORT = 0.1  # seconds; in a longer body Python's share does not matter
_LONG = 200  # steps; in a shorter run trying is not worth while
_SPARSE = 1e6  # multiply-adds per operation of torch; with fewer, an empty place costs little
_DENSE = 2e7  # the same; with more, Python's share does not matter
_FASTER = 0.9  # the code may take at most this share of the body's time
_TRIES = 3  # measurements of the code, of which the least counts: a busy machine makes any of them long
_OFTEN = 2  # uses of a body in the drawn steps from which on its code is made ahead


class Straight(Pieces):
    """Runs the bodies on pieces of fixed sizes, as straight-line code where that is faster."""

    form = "pieces of fixed sizes"

    def __init__(self, work: Work, data: Any, rows: int, workers: int = 0) -> None:
        super().__init__(work, data, rows, workers)
        self._draws = True
        self.worth = self._grain(rows) is not CALLED
        if not self.worth:
            self.form = "pieces of the sizes of batches"  # which round differently
        self.faster = False  # whether code has proved faster

    def _grain(self, rows: int) -> Grain:
        """Few sizes, each with code, if Python takes much of the time; otherwise sizes with almost no empty places.

        Guarantee: it follows from model, mechanism and shapes, so a step that is replayed has the same pieces.
        """
        work = self._work
        if work.mechanism.steps < _LONG or work.average is not None:  # which is changed in place
            return CALLED
        places = Sizes.of(work.mechanism, rows, work.microbatch, CODE, work.share).most
        density = work.engine.density if isinstance(work.engine, Attributed) else math.inf
        if density * places >= _DENSE:
            return CALLED
        return CODE if density * places < _SPARSE else MORE_CODE

    def _made(self, form: Form) -> Graph:
        return _Body(self, self._work, self._bodies, form)

    def _renew(self) -> None:
        super()._renew()
        self.faster = False

    def step(self, data: Any, rows: int, step: int) -> None:
        known = self.faster
        super().step(data, rows, step)
        if self.faster and not known and step + 1 < self._work.mechanism.steps:
            self._make_ahead(step + 1)

    def _make_ahead(self, step: int) -> None:
        """Make the code that the next steps need, once code has proved faster, so no later step waits for it."""
        coming = Counter(form for lot in self._lots.known(step) for _, form in self._forms(step, lot))
        for form, times in coming.items():
            body = self._graphs.get(form) or self._made(form)
            if times >= _OFTEN and isinstance(body, _Body) and body.make():
                self._graphs[form] = body


class _Body:
    """The body of a form: called at first, and replaced by code once that proves faster."""

    def __init__(self, owner: Straight, work: Work, bodies: Bodies, form: Form) -> None:
        self._owner, self._work, self._bodies, self._form = owner, work, bodies, form
        self._code: Traced | None = None
        self._took = 0.0  # seconds of the body

    def replay(self) -> None:
        if self._code is None and self._took and self._may_be_traced():
            self._trace()
        began = time.thread_time()
        if self._code is None:
            self._bodies.accumulate(self._form)
            self._took = time.thread_time() - began
        elif not self._run(self._code):
            self._bodies.accumulate(self._form)

    def make(self) -> bool:
        """Make the code of a body that may not have been called yet; return whether it succeeded."""
        if self._code is None and not self._took:
            with torch.random.fork_rng([]):
                began = time.thread_time()
                self._bodies.sums(self._form.size)(*self._bodies.inputs(self._form.size))  # follows the new shapes
                self._took = time.thread_time() - began
        if self._code is None and self._may_be_traced():
            self._trace()
        return self._code is not None

    def _may_be_traced(self) -> bool:
        engine, form = self._work.engine, self._form
        if not self._owner.worth or form.observed or self._took > _SHORT or not isinstance(engine, Attributed):
            return False
        few = self._bodies.inputs(form.size)[:-2]
        return engine.way.name == "batched" and engine.repeats(few)

    def _trace(self) -> None:
        inputs = self._bodies.inputs(self._form.size)
        try:
            with torch.random.fork_rng([]):
                code = Traced(self._bodies.sums(self._form.size), inputs, self._work.model)
                faster = min(_seconds(code, inputs) for _ in range(_TRIES)) <= _FASTER * self._took
        except CannotTraceError:
            faster = False
        if faster:
            self._code, self._owner.faster = code, True
        else:
            self._owner.worth = False

    def _run(self, code: Traced) -> bool:
        """Run the code; return False, having done nothing, if it does not apply to this piece."""
        state = torch.get_rng_state()
        found = code.called(*self._bodies.inputs(self._form.size))
        if found is None:
            return False
        *totals, finite = found
        if not bool(finite):  # an example is to be left out
            torch.set_rng_state(state)
            return False
        self._bodies.add(totals, self._form)
        return True


def _seconds(code: Traced, inputs: Sequence[torch.Tensor]) -> float:
    began = time.thread_time()
    code(*inputs)
    return time.thread_time() - began
