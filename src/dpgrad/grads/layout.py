"""Where the batch stands in what the parameters of a model meet."""

from dataclasses import dataclass, field, replace

from torch import nn

from dpgrad.grads.axes import Layout
from dpgrad.grads.batch import leaves
from dpgrad.grads.repeating import Script
from dpgrad.grads.sums import Batch

__all__ = ["AmbiguousError", "Layouts", "by_shape", "telling_sizes"]

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


_Key = tuple[object, ...]  # parameters, function, place among its tensors, numbers of dimensions


class AmbiguousError(Exception):
    """A shape does not tell where the batch is."""


@dataclass
class Layouts:
    """Where the batch stands in what parameters meet, use by use, and in what becomes of it."""

    inputs: dict[_Key, tuple[Layout | None, ...]] = field(default_factory=dict)  # by shape one of several
    results: dict[_Key, tuple[Layout, ...]] = field(default_factory=dict)
    every: bool = False  # whether the backward pass must be asked for the gradient at every place
    guessed: bool = False  # by shape alone, to be shown for every batch
    varies: bool = False  # whether the next pass may do other things than the last one, at the same shapes
    keeps: bool = False  # whether the model keeps anything of a batch
    density: float = 0.0  # of the pass that found them, for one example (`Following.density`)
    proven: dict[_Key, Script] = field(default_factory=dict)  # by shapes of batches, passes that were followed
    first: dict[_Key, tuple[int, Script]] = field(
        default_factory=dict
    )  # by shapes of rows, one with its number of them

    def update(self, other: "Layouts") -> None:
        """Add the uses that ``other`` knows."""
        for key, several in other.inputs.items():
            before = self.inputs.get(key, ())
            self.inputs[key] = (*before, *(layout for layout in several if layout not in before))
        self.results.update(other.results)
        self.keeps |= other.keeps

    def apart(self) -> "Layouts":
        """The same where flattened rows stand apart."""

        def moved(layout: Layout) -> Layout:
            return replace(layout, outer=layout.inner, inner=1)

        return Layouts(
            {key: tuple(layout and moved(layout) for layout in several) for key, several in self.inputs.items()},
            {key: tuple(map(moved, layouts)) for key, layouts in self.results.items()},
            guessed=self.guessed,
        )

    @property
    def flat(self) -> bool:
        """Whether rows are flattened anywhere, so their order is not seen from a shape."""
        return any(layout is not None and layout.flat for several in self.inputs.values() for layout in several)


def by_shape(shape: tuple[int, ...], rows: int) -> Layout | None:
    """The layout that a shape shows when ``rows`` is a number that no other dimension has; None for no rows.

    Several entries of a row are taken for neighbours: a shape does not tell.

    >>> by_shape((4, 7, 3), rows=7), by_shape((14, 3), rows=7), by_shape((4, 3), rows=7)
    (Layout(dim=1, outer=1, inner=1), Layout(dim=0, outer=1, inner=-1), None)
    """
    exact = [dim for dim, length in enumerate(shape) if length == rows]
    several = [dim for dim, length in enumerate(shape) if length and length % rows == 0]
    found = exact or several
    if len(found) > 1:
        raise AmbiguousError(
            f"a tensor of shape {shape} has {rows} rows in more than one dimension, in which examples may act on each "
            "other"
        )
    return Layout(found[0], inner=1 if exact else -1) if found else None


def telling_sizes(model: nn.Module, batch: Batch) -> list[int]:
    """Batch sizes that show in a shape where the batch is: primes, first those that divide no dimension around."""
    shapes = [tensor.shape for tensor in (*model.parameters(), *model.buffers())]
    shapes += [leaf.shape[1:] for leaf in leaves(batch)]
    around = {length + near for shape in shapes for length in shape for near in (-1, 0, 1)}
    return sorted(_PRIMES, key=lambda prime: any(length and not length % prime for length in around))
