"""A private step whose bodies are called: on a CPU, and wherever they cannot be captured."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpgrad.distributed.rounds import Rounds, Totals
from dpgrad.grads.accumulate import unless_out_of_memory
from dpgrad.grads.batch import part
from dpgrad.grads.sums import Batch
from dpgrad.grads.watch import remembered
from dpgrad.randomness import draw
from dpgrad.training.step.bodies import Bodies, Form
from dpgrad.training.step.work import Observed, Work

__all__ = ["Taped", "observe"]

Seen = list[tuple[Tensor, Tensor]]  # norms and factors, piece by piece


class Taped:
    """Calls the bodies on as many rows as a step has, in pieces that fit in memory."""

    form = "single kernels"

    def __init__(self, work: Work) -> None:
        self._work, self._bodies = work, Bodies(work)
        self._before = self._held()

    def _held(self) -> list[object]:
        """The Python state on which a pass depends."""
        return remembered(self._work.model, self._work.loss)

    def step(self, data: Any, rows: int, step: int) -> None:
        """Write the noisy mean of a step to ``.grad``."""
        self.shown(step, self.summed(data, rows, step))

    @property
    def totals(self) -> Totals | None:
        """The receiver of a sharded model's sums."""
        return None if self._bodies.sharded is None else self._bodies.sharded.totals

    def summed(self, data: Any, rows: int, step: int, rounds: Rounds | None = None) -> Seen:
        """The first half of a step, with passes through the model: the sums before noise, exchanged in ``rounds``."""
        work, bodies = self._work, self._bodies
        if bodies.sharded is not None:
            bodies.sharded.rounds = rounds
        seen: Seen = []
        if (now := self._held()) != self._before:
            work.follow_anew()
            self._before = now
        with work.own_randomness(step):
            chosen, batch = self._drawn(data, rows, step)
            bodies.at(step)
            if batch is None:
                bodies.empty()
            else:
                work.averages_of(rows)
                seen = self._in_pieces(chosen, batch)
        work.remember()
        return seen

    def shown(self, step: int, seen: Seen) -> None:
        """The second half: add noise and write ``.grad``."""
        work, bodies = self._work, self._bodies
        noisy = bodies.show()
        if work.observe is not None:
            observe(work, bodies, step, seen, noisy)

    def _drawn(self, data: Any, rows: int, step: int) -> tuple[Tensor, Batch]:
        """The indices of this step's examples, and the batch if there are any."""
        work = self._work
        chosen = work.share.of(draw.chosen(work.mechanism.sampler, rows, step, work.key, work.device))
        if work.engine is None or not len(chosen):
            return chosen[:0], None
        return chosen, work.augmented(work.gathered(data, chosen), chosen, step)

    def _in_pieces(self, chosen: Tensor, batch: Batch) -> Seen:
        """Process all examples, as many at a time as fit in memory; if too many were tried, begin the step again."""
        most = min(self._work.microbatch or len(chosen), len(chosen))
        while True:
            seen = unless_out_of_memory(partial(self._tried, chosen, batch, most))
            self._bodies.rows = self._bodies.index = None
            if seen is not None:
                return seen
            if self._work.replayed or (self.totals is not None and self.totals.given):
                raise MemoryError(
                    "this step did not fit in memory in one piece, and smaller pieces round differently, so it "
                    "could not be replayed: give microbatch"
                    if self._work.replayed
                    else "this step did not fit in memory, and other ranks have some of its sums: give microbatch"
                )
            if most == 1:
                raise MemoryError(
                    "the gradient of one example does not fit in memory: use the book-keeping engine, a smaller model "
                    "or another device"
                )
            most = -(-most // 2)

    def _tried(self, chosen: Tensor, batch: Batch, most: int) -> Seen:
        """Norms and factors of all pieces, if they are observed."""
        work, bodies, count = self._work, self._bodies, len(chosen)
        seen: Seen = []
        for start in range(0, count, most):
            stop = min(start + most, count)
            whole = stop - start == count
            bodies.rows, bodies.index = batch if whole else part(batch, start, stop), chosen[start:stop]
            bodies.hold(stop - start)
            shown = work.observe is not None
            form = Form(stop - start, not start, stop == count, 2 * most < count, len(work.iterates), shown)
            bodies.accumulate(form)
            if form.observed:
                seen.append(bodies.seen.pop(form))
        return seen


def observe(work: Work, bodies: Bodies, step: int, seen: Seen, noisy: Any) -> None:
    """Call the function that observes steps."""
    assert work.observe is not None
    summed, raw = bodies.observed() if seen else bodies.nothing()
    means = {name: value / work.mechanism.divisor for name, value in raw.items()}
    noisy = {name: value.clone() for name, value in noisy.items()}  # .grad may be the same memory
    pieces = seen or [(torch.zeros(1, 0, device=work.device),) * 2]
    norms, factors = (torch.cat(each, 1) for each in zip(*pieces, strict=True))
    summed = pytree.tree_map(Tensor.clone, summed)
    work.observe(Observed(step, norms, factors, work.clips(step), summed, noisy, means))
