"""One operation of torch as a rule sees it: its arguments, its result, and the place of the rows in each tensor."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.axes import Layout, Periods, same_for_rows

__all__ = [
    "Call",
    "FoundAt",
    "KeptError",
    "MixedError",
    "UnfollowedError",
    "Where",
    "dims_of",
]

Where = Layout | Periods
FoundAt = Where | Sequence["Where | None"] | None  # of each result; None for one that must not be used


class MixedError(Exception):
    """An operation whose effect on the examples depends on values, lets examples meet, or is not known."""


class UnfollowedError(UnsupportedModelError):
    """A use of a parameter whose gradients cannot be attributed to single examples in this way of computing them."""


class KeptError(UnsupportedModelError):
    """A model that uses what it kept of an earlier batch, which no way of running it would make private."""

    def __init__(self) -> None:
        super().__init__(
            "the model uses a tensor that it kept from an earlier batch, so an example changes the gradients of "
            "others in later steps: let it keep none"
        )


class Call:
    """One operation with its arguments by name, and the place of the rows in each tensor among them."""

    def __init__(self, name: str, arguments: dict[str, Any], result: Any, place: Callable[[Tensor], Where], rows: int):
        self.name, self.arguments, self.result, self.place, self.rows = name, arguments, result, place, rows

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, lists included."""
        found = []
        for value in self.arguments.values():
            given = value if isinstance(value, list | tuple) else [value]
            found += [each for each in given if isinstance(each, Tensor)]
        return found

    @property
    def data(self) -> Tensor:
        """The first tensor that descends from the batch."""
        return next(tensor for tensor in self.tensors if isinstance(self.place(tensor), Layout))

    def pretending(self, tensor: Tensor, layout: Layout, rows: int) -> "Call":
        """The same call, as if one of its tensors had ``rows`` rows of a batch."""

        def place(other: Tensor) -> Where:
            return layout if other is tensor else self.place(other)

        return Call(self.name, self.arguments, self.result, place, rows)

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of a tensor that descends from the batch; None for any other."""
        place = self.place(tensor) if isinstance(tensor, Tensor) else None
        return place if isinstance(place, Layout) else None

    def refuse(self, why: str) -> MixedError:
        """The error to raise."""
        return MixedError(f"{self.name} {why}")

    def only(self, *names: str) -> Tensor:
        """The one of these arguments that descends from the batch, which must be the only one that does."""
        carrying = [tensor for tensor in self.tensors if self.layout(tensor)]
        if len(carrying) == 1 and any(carrying[0] is self[name] for name in names):
            return carrying[0]
        raise self.refuse("takes the batch in several arguments, or in one that has no rule")

    def aligned(self, layout: Layout, *others: Any) -> Layout:
        """The layout, if the other tensors share it or hold the same for every row; sizes may differ."""
        for other in others:
            if not isinstance(other, Tensor):
                continue
            place = self.place(other)
            if isinstance(place, Layout):
                if place != layout:
                    raise self.refuse("takes the batch in different dimensions")
            elif other.ndim <= layout.dim or not same_for_rows(place, other.shape, layout):
                raise self.refuse("gives examples different values by their place in the batch")
        return layout

    def apart_from(self, layout: Layout, dims: Iterable[int], ndim: int) -> Layout:
        """The layout, if none of these dimensions has the rows."""
        if layout.dim in {dim % max(ndim, 1) for dim in dims}:
            raise self.refuse("works along the dimension of the examples")
        return layout


def dims_of(value: Any, ndim: int) -> list[int]:
    """The dimensions that an argument names; all of them where it names none."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return list(range(ndim))
    given = value if isinstance(value, list | tuple) else [value]
    return [dim % max(ndim, 1) for dim in given]
