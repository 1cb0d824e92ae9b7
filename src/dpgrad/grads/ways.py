"""Three ways to per-example gradients; in each it is certain which example a gradient belongs to.

1. *batched*: every operation of the pass was followed and keeps examples apart, whatever the values (`following`).
2. *lifted*: the pass runs inside `torch.func.vmap`, so no example can see another (`lifted`).
3. *certified*: an ordinary pass over the batch, proven to keep examples apart for every single batch (`certified`).

The first way that applies to a model is used. The choice depends on the operations of the model and, between the second
and third, on a few examples; a batch to which it does not apply goes the next way.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpgrad._validate import warn
from dpgrad.errors import UnsupportedModelError
from dpgrad.grads import bookkeeping, certified, lifted
from dpgrad.grads.batch import leaves, row_losses, size
from dpgrad.grads.calls import MixedError, UnfollowedError
from dpgrad.grads.clip import PerExample
from dpgrad.grads.forks import Seen
from dpgrad.grads.kept import guarded
from dpgrad.grads.layout import Layouts
from dpgrad.grads.sums import Batch, Loss
from dpgrad.grads.swap import swapped, without_dropout

__all__ = ["MOST_PATHS", "Attributed", "Name", "Way", "gradients"]

Name = Literal["batched", "lifted", "certified", "vmap", "single"]
_Fallback = Literal["lifted", "certified", "forked"]  # forked: lifted, with a path for every boolean mask
_FALLBACKS: tuple[_Fallback, ...] = ("lifted", "certified", "forked")
MOST_PATHS = 8  # through a model; with more, a warning says so
_ONE_ROW = (
    "the loss of an example changes with the others in its batch, through a statistic of the batch: gradients are "
    "computed as if each example were alone, so it is the statistic of one row"
)

# The parts of a reason that may repeat private rows: the words of an error that the model raised on them, and shapes. A
# place in the model's code is not private, but of no use to others.
_OF_DATA = (
    (re.compile(r"(vmap does not take it): .*", re.DOTALL), r"\1"),
    (re.compile(r"of shape .*? has \d+ rows", re.DOTALL), "has rows"),
    (re.compile(r" \([^()]*, line \d+\)"), ""),
)


@dataclass(frozen=True)
class Way:
    """How per-example gradients are computed, and why.

    >>> print(Way("lifted", "sort has no rule"))
    lifted (sort has no rule)
    """

    name: Name
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name

    @property
    def cost(self) -> str:
        """The extra cost of this way in words; empty if there is none."""
        return certified.COST if self.name == "certified" else ""

    def to_release(self) -> "Way":
        """The way with only those parts of the reason that hold no value and no size computed from the data.

        >>> print(Way("certified", "vmap does not take it: patient 17 is unknown (model.py, line 3)").to_release())
        certified (vmap does not take it)
        """
        why = self.why
        for pattern, instead in _OF_DATA:
            why = pattern.sub(instead, why)
        return Way(self.name, why)


class Attributed:
    """An engine that uses the first of the three ways that applies to a model.

    >>> engine, model = Attributed(), nn.Linear(1, 1, bias=False)
    >>> found = engine(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten(), engine.way
    (tensor([2., 3.]), Way(name='batched', why='no operation depends on values'))
    """

    def __init__(self) -> None:
        self._layouts: Layouts | None = None  # of the batched way
        self._followed = False  # whether the batched way has taken a batch
        self._mixed: dict[object, str] = {}  # shapes of batches that the batched way refused, and why
        self._fallback: _Fallback = "lifted"  # the way of a model or a batch that the batched way refused
        self._why = ""  # why that one
        self._seen = Seen()
        self._guessed: Layouts | None = None
        self._decided = False
        self._lots = 0
        self._said: set[str] = set()
        self.density = math.inf  # `Following.density` of a pass over one example, once the batched way is decided

    @property
    def way(self) -> Way:
        """The way that is used; the costlier one if batches of some sizes cannot be followed."""
        if not self._mixed:
            return Way("batched", "no operation depends on values")
        sizes = "in batches of some sizes, " if self._followed else ""
        why = "; ".join(filter(None, [sizes + next(iter(self._mixed.values())), self._why]))
        return Way("certified" if self._fallback == "certified" else "lifted", why)

    @property
    def not_captured(self) -> str:
        """Why a pass cannot be captured in a CUDA graph; empty if a capture may be tried."""
        if self._seen.asked:
            return "the model reads values of the batch in Python"
        return f"every batch is checked: {self.way.why}" if self.way.name == "certified" else ""

    def repeats(self, batch: Batch) -> bool:
        """Whether a pass over a batch of these shapes runs the same operations every time."""
        shapes = tuple(leaf.shape for leaf in leaves(batch))
        return self._layouts is not None and shapes in self._layouts.proven and shapes not in self._mixed

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1) -> PerExample:
        shapes = tuple(leaf.shape for leaf in leaves(batch))
        if shapes not in self._mixed and (self._followed or not self._mixed):
            try:
                if self._layouts is None:
                    self._layouts = bookkeeping.find_layouts(model, loss, batch, rows)
                found = bookkeeping.gradients(model, loss, batch, weights, rows, self._layouts)
                self._followed = True
                return found
            except (MixedError, UnfollowedError) as mixed:
                self._mixed[shapes] = str(mixed)
                if self._followed:
                    self._say(f"batches of some sizes cannot be followed ({mixed}): they go another way")
        return self._without_following(model, loss, batch, weights, rows)

    def _without_following(self, model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int) -> PerExample:
        """Try the second way, the third, and the second again with a path for each example."""
        reasons = []
        for name in _FALLBACKS[_FALLBACKS.index(self._fallback) :]:
            try:
                if name == "certified":
                    found = self._certified(model, loss, batch, weights, rows)
                else:
                    found = self._lifted(model, loss, batch, weights, rows, masks=name == "forked")
            except certified.MetError as met:
                raise UnsupportedModelError(
                    f"{met}: make each output depend only on its own row, not on a statistic of the batch or its size"
                ) from None
            except (lifted.CannotLiftError, certified.RefusedError, UnfollowedError) as error:
                reasons += [str(error)] if str(error) not in reasons else []
            else:
                if not self._decided and name != self._fallback:
                    self._fallback, self._why = name, "; ".join(reasons)
                    if name == "certified":
                        self._say(
                            f"the model can neither be followed nor lifted ({self.way.why}): every batch is checked, "
                            f"which costs {certified.COST}"
                        )
                return found
        why = "; ".join([*self._mixed.values()][:1] + reasons)
        raise UnsupportedModelError(
            f"gradients cannot be attributed to single examples ({why}): make each output depend only on its own row, "
            "or use engine='single', which passes one example at a time"
        )

    def decided(self) -> None:
        """Keep the way that was found, and follow every pass from now on: earlier ones had no dropout.

        How a later batch is computed then depends on that batch alone, so a step can be replayed.
        """
        if self._layouts is not None and not self._mixed:
            self.density = self._layouts.density
        self._decided = True
        self.anew()

    def anew(self) -> None:
        """Follow the next pass over each shape again, because the model may have changed."""
        if self._layouts is not None:
            self._layouts.proven.clear()

    def _lifted(
        self, model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int, masks: bool
    ) -> PerExample:
        self._seen.masks = masks
        found = lifted.gradients(model, loss, batch, weights, rows, self._seen)
        if self._seen.paths > MOST_PATHS:
            self._say(f"examples take more than {MOST_PATHS} paths through the model, each in a pass of its own")
        self._compare_losses(model, loss, batch, rows)
        return found

    def _compare_losses(self, model: nn.Module, loss: Loss, batch: Batch, rows: int) -> None:
        """Warn if losses differ in a batch: the model computes a statistic of the batch, which here is of one row.

        With a known operation over the examples every batch is compared; without one the 1st, 2nd, 4th, ... batch.
        """
        self._lots += 1
        device = leaves(batch)[0].device
        rarely = "several examples" not in self.way.why and self._lots & (self._lots - 1)
        if _ONE_ROW in self._said or rarely or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), without_dropout(model):
            before = torch.get_rng_state()
            with swapped(model, {}):  # the pass of a whole batch must leave nothing in the modules
                together = row_losses(guarded(loss), model, batch, size(batch))
            if not torch.equal(before, torch.get_rng_state()):
                return
            alone = lifted.losses(model, loss, batch, rows, self._seen)
        near = torch.finfo(together.dtype).eps ** 0.5 * (alone.abs() + alone.abs().nan_to_num(posinf=0).mean())
        if bool(((together - alone).abs() > near).any()):
            self._say(_ONE_ROW)

    def _certified(self, model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int) -> PerExample:
        if self._guessed is None:
            self._guessed = certified.guessed(model, loss, batch, rows)
        return certified.gradients(model, loss, batch, weights, rows, self._guessed)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(what)


def gradients(model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1) -> PerExample:
    """The gradient of every example, as `dpgrad.grads.vmap.gradients` defines it, by the first way that applies."""
    return Attributed()(model, loss, batch, weights, rows)
