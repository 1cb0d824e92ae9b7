"""Steps on pieces of fixed sizes, whose rows lie in buffers: a graph or code made from a body is reused.

Guarantee: that of the bodies. Before every step `Watch` compares model, loss and rule with what they were when a body
was made; after a change it is made again. Tensors inside lists, dictionaries and objects that model, loss or rule hold
must be written to in place, not replaced.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from dpgrad import _validate
from dpgrad.errors import CannotCaptureError
from dpgrad.grads.watch import Watch
from dpgrad.training.augment import Shifts
from dpgrad.training.step import taped
from dpgrad.training.step.bodies import Bodies, Form
from dpgrad.training.step.feeds import Feed, Piece, feed
from dpgrad.training.step.lots import Lot, Lots
from dpgrad.training.step.sizes import GRAPHS, Grain, Sizes
from dpgrad.training.step.work import Work

__all__ = ["FEWEST_STEPS", "Called", "Graph", "Pieces"]

FEWEST_STEPS = 30  # of a mechanism, from which on making a graph or code pays off


class Graph(Protocol):
    """A body that can be replayed."""

    def replay(self) -> None: ...


class Pieces(ABC):
    """Steps in pieces of fixed sizes."""

    form: str  # how a step rounds; without the sizes, which would reveal the number of rows

    def __init__(self, work: Work, data: Any, rows: int, workers: int = 0) -> None:
        self._work, self._device = work, work.device
        self._bodies = Bodies(work)
        self._sizes = Sizes.of(work.mechanism, rows, work.microbatch, self._grain(rows), work.share)
        lots = partial(Lots, work.mechanism, rows, work.key, self._device, self._sizes.most, share=work.share)
        self._lots = lots()
        # A user's augmentation is called on the host, for one example after another.
        own = work.augment is not None and not isinstance(work.augment, Shifts)
        self._on_host = lots(to_host=True) if own else None
        self._feed: Feed = feed(
            data, self._device, work.collate, lots(to_host=True), self._sizes, work.mechanism.steps, workers
        )
        one = torch.zeros(1, dtype=torch.int64)
        like = work.augmented(work.gathered(data, one), one, 0)
        self._bodies.rows = pytree.tree_map(lambda leaf: leaf.expand(self._sizes.most, *leaf.shape[1:]).clone(), like)
        if work.averages_of(rows) is not None:
            # No example yet: trying a body must change no example's average.
            self._bodies.index = torch.full((self._sizes.most,), rows, dtype=torch.int64, device=self._device)
        self._graphs: dict[Form, Graph] = {}
        self._draws = False  # whether the model draws random numbers
        self._said = False
        self._rule, self._watch = work.rule, Watch(work.model, work.loss, work.rule)

    def _grain(self, rows: int) -> Grain:
        """How finely sizes are spaced."""
        return GRAPHS

    @abstractmethod
    def _made(self, form: Form) -> Graph:
        """Make the graph or code that runs a form."""

    def _renew(self) -> None:
        """Discard what was made, because something has changed."""
        self._graphs.clear()
        work = self._work
        work.follow_anew()
        self._rule, self._watch = work.rule, Watch(work.model, work.loss, work.rule)

    def step(self, data: Any, rows: int, step: int) -> None:
        """Write the noisy mean of a step to ``.grad``."""
        work, bodies = self._work, self._bodies
        if work.rule is not self._rule or not self._watch.same():
            self._renew()
        lot = self._lots.at(step)
        bodies.at(step)
        seen: taped.Seen = []
        with work.own_randomness(step) if self._draws else nullcontext():
            for piece, form in self._forms(step, lot):
                self._fill(piece, lot)
                self._replay(form)
                if form.observed:
                    seen.append(tuple(each[:, : piece.filled].clone() for each in bodies.seen[form]))  # type: ignore[arg-type]
        work.remember()
        noisy = bodies.show()
        if work.observe is not None:
            taped.observe(work, bodies, step, seen, noisy)

    def _forms(self, step: int, lot: Lot) -> list[tuple[Piece, Form]]:
        """The pieces of a step, each with the form of its body."""
        pieces, work = Piece.of(step, lot, self._sizes), self._work
        of_all = len(pieces) > 2, len(work.iterates), work.observe is not None
        return [(piece, Form(piece.size, not piece.start, piece is pieces[-1], *of_all)) for piece in pieces]

    def close(self) -> None:
        """Stop fetching rows."""
        self._feed.close()

    def _fill(self, piece: Piece, lot: Lot) -> None:
        """Copy the rows of a piece into the buffers."""
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
                self._graphs[form] = self._made(form)
            except CannotCaptureError as error:
                if not self._said:
                    _validate.warn(f"pieces of some sizes are not captured: {error}")
                self._said = True
                self._graphs[form] = Called(partial(self._bodies.accumulate, form))
        self._graphs[form].replay()


class Called:
    """Runs a body by calling it."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body
