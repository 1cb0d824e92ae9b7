"""Tensors that depend on parameters alone, and the notes a tape takes of their uses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from dpgrad.grads.axes import Layout
from dpgrad.grads.uses import Use

if TYPE_CHECKING:
    from dpgrad.grads.tape import Tape

__all__ = ["Record", "Shared", "names_of", "plain_of"]


class Shared(Tensor):
    """A tensor that depends on parameters and not on the batch."""

    tape: "Tape"
    plain: Tensor  # the same values, invisible to the tape
    names: tuple[str, ...] = ()  # the parameters it depends on; a value, because older tensors have names too
    whole: bool  # it is one parameter itself,
    flipped: bool  # or that parameter transposed
    make_twin: Callable[[], Tensor]  # (rows, *shape): the same values once for every row

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shared = next(value for value in _given(args, kwargs) if isinstance(value, Shared))
        tape = shared.tape
        return (tape.lifted or tape.call)(func, args, kwargs)


def _given(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments, and what stands in lists of them: the latter is slow to find and rarely needed."""
    yield from args
    yield from kwargs.values()
    yield from pytree.tree_leaves((args, kwargs))


@dataclass(frozen=True)
class Record:
    """One use of parameters, and where the gradient that completes it will arrive."""

    place: Tensor | GradientEdge
    shape: torch.Size  # of that gradient, and
    layout: Layout  # where the rows stand in it
    names: tuple[str, ...]
    uses: Callable[[Tensor], Sequence[Use]]  # gradient that arrived -> one use per name
    passed: bool = False  # the backward pass goes on from there, to a place noted earlier


def plain_of(value: Any) -> Any:
    """The value as the tape does not see it."""
    return value.plain if isinstance(value, Shared) else value


def names_of(values: Any) -> tuple[str, ...]:
    """The parameters that the values depend on."""
    return tuple(name for value in values if isinstance(value, Shared) for name in value.names)
