"""Examples that take different paths through a model are worked on path by path, and put together again in order.

A model inside `torch.func.vmap` is written for one example. Where it needs a value of that example in Python (an if, a
range, a slice), all examples are asked. If they agree, that is the answer. If not, the pass ends with a `Fork`, and the
examples of each answer start again on their own. Every example's path is decided by that example alone.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.calls import KeptError
from dpgrad.grads.fold import is_batched
from dpgrad.grads.kept import refuse_earlier
from dpgrad.grads.uses import Drop, Use, one_by_one, wide

__all__ = ["Fork", "Joined", "Questions", "RunAgain", "Seen", "by_path"]

_F = TypeVar("_F")
_Answer = tuple[str, Tensor]  # who asked, and the value that all examples of a path have there


@dataclass
class Seen:
    """What lifted passes of one model have met so far. Give the same record to every pass of a model.

    ``paths`` is how many paths the last batch took, and ``asked`` whether any pass asked for a value of the batch: such
    a pass cannot be captured in a CUDA graph. Both depend on private data. ``masks`` is the caller's choice: whether
    examples whose values make tensors of different shapes (boolean masks, nonzero, unique) are worked on separately.
    That is exact and may take as many paths as there are examples; without it, such models are refused.
    """

    masks: bool = False
    paths: int = 0
    asked: bool = False
    every: bool = False  # the backward pass must be asked for the gradient at every place
    spread: bool = False  # tensors that no example is in are written to: every example needs its own
    kept: dict[int, "weakref.ref[Tensor]"] = field(default_factory=dict)  # of passes that are over, by identity

    def keep(self, made: Sequence["weakref.ref[Tensor]"]) -> None:
        """Note which of the tensors of a pass that is over the model still has."""
        alive = [(ref(), ref) for ref in (*self.kept.values(), *made)]
        self.kept = {id(tensor): ref for tensor, ref in alive if tensor is not None}

    def refuse_kept(self, given: Sequence[object]) -> None:
        """Refuse a tensor of a pass that is over: vmap would take it for one of the present examples."""
        if self.kept and any(each is ref() for each in given if (ref := self.kept.get(id(each)))):
            raise KeptError
        refuse_earlier(each for each in given if not is_batched(each))  # of a pass that was not lifted


class Fork(BaseException):
    """Examples answer a question differently. Not an `Exception`: a model that catches those would hide it."""

    def __init__(self, paths: Sequence[tuple[Tensor, list[_Answer]]]) -> None:
        super().__init__("examples take different paths through the model")
        self.paths = paths  # which examples, and the answers they give


class RunAgain(BaseException):
    """The pass has to be run again, for what `Seen` now says of the model."""


@dataclass
class Questions:
    """The answers of the examples of one pass. Those of a ``script`` were given before the pass began again.

    A question may depend on random numbers, which are drawn anew in every pass. Asking again would favour the paths on
    which examples agree.
    """

    script: list[_Answer]
    seen: Seen
    given: list[_Answer] = field(default_factory=list)

    def answer(self, who: str, values: Tensor) -> Tensor:
        """What every example answers, from their ``values``, (examples, ...); raises `Fork` where they differ."""
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedModelError(
                f"the model reads a value of the batch in Python ({who}), which a captured step cannot do: turn "
                "capture off, or compute with tensors instead of an if, .item() or range()"
            )
        self.seen.asked = True
        place = len(self.given)
        if place < len(self.script) and self.script[place][0] == who:
            self.given.append(self.script[place])
            return self.script[place][1].to(values.device)
        del self.script[place:]
        known = values.detach().cpu()
        bits = _bits(known)
        if bool((bits == bits[:1]).all()):
            self.given.append((who, known[0]))
            return values.detach()[0]
        _, kinds = torch.unique(bits, dim=0, return_inverse=True)
        paths = [kinds == kind for kind in range(int(kinds.max()) + 1)]
        raise Fork([(own, [*self.given, (who, known[own][0])]) for own in paths])


def _bits(values: Tensor) -> Tensor:
    """Values as whole numbers, one row for each example: 0 and −0 differ, and NaN equals itself."""
    flat = values.reshape(len(values), -1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    if flat.is_floating_point():
        flat = flat.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return flat.long()


def by_path(examples: int, seen: Seen, run: Callable[[Tensor | None, Questions], _F]) -> list[tuple[Tensor, _F]]:
    """``run`` on the examples of each path: their indices, in ascending order, and what was found for them.

    ``run`` is given None for all examples. Any number of paths is run: one for each example at worst.
    """
    waiting: list[tuple[Tensor, list[_Answer]]] = [(torch.arange(examples, device="cpu"), [])]
    done = []
    while waiting:
        few, script = waiting.pop()
        questions = Questions(script, seen)
        try:
            found = run(None if len(few) == examples else few, questions)
        except Fork as fork:
            waiting += [(few[own], answers) for own, answers in fork.paths]
        except RunAgain:
            waiting.append((few, questions.given))
        else:
            done.append((few, found))
    seen.paths = len(done)
    return done


@dataclass(frozen=True)
class Joined:
    """The gradients of examples that took different paths, each path's in its own form."""

    paths: tuple[tuple[Tensor, Use], ...]  # the examples of a path, in ascending order, and their gradients
    examples: int

    @property
    def shape(self) -> torch.Size:
        return self.paths[0][1].shape

    def _together(self, parts: Sequence[Tensor]) -> Tensor:
        """One entry for each example, from those of every path."""
        order = torch.cat([own for own, _ in self.paths]).argsort()
        return torch.cat(list(parts))[order]

    def settled(self) -> "Joined":
        return replace(self, paths=tuple((own, use.settled()) for own, use in self.paths))

    def measured(self) -> tuple[Tensor, Use]:
        norms, uses = zip(*(use.measured() for _, use in self.paths), strict=True)
        paths = tuple((own, use) for (own, _), use in zip(self.paths, uses, strict=True))
        return self._together(norms), replace(self, paths=paths)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        (first, use), *others = self.paths
        total = use.weighted_sum(factors[first])
        for own, use in others:
            total = total + use.weighted_sum(factors[own])
        return total

    def weighted_sums(self, factors: Tensor) -> Tensor:
        return one_by_one(self, factors)

    def per_example(self) -> Tensor:
        return self._together([wide(use.per_example()) for _, use in self.paths])

    def kept(self, keep: Tensor, drop: Drop | None = None) -> "Joined":
        return replace(self, paths=tuple((own, use.kept(keep[own], drop)) for own, use in self.paths))

    def part(self, examples: slice) -> "Joined":
        start, stop, _ = examples.indices(self.examples)
        paths = []
        for own, use in self.paths:
            first, last = (int((own < end).sum()) for end in (start, stop))
            if first < last:
                paths.append((own[first:last] - start, use.part(slice(first, last))))
        return Joined(tuple(paths), stop - start)

    def scaled(self, factor: float) -> "Joined":
        return replace(self, paths=tuple((own, use.scaled(factor)) for own, use in self.paths))
