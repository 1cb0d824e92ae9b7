"""Where the rows of a batch stand in a tensor that a model computed."""

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from dpgrad.grads.batch import leaves
from dpgrad.grads.sums import Batch

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


Key = tuple[object, ...]  # parameters, function, place among its tensors, numbers of dimensions


class AmbiguousError(Exception):
    """A shape does not tell where the batch is."""


@dataclass(frozen=True)
class Layout:
    """The dimension of the rows; ``flat`` where each row has several entries there.

    These are neighbours, or ``apart``: the rows one after another, time and again (time first; two views of a batch).
    """

    dim: int
    flat: bool
    apart: bool = False

    def opened(self, tensor: Tensor, rows: int) -> tuple[Tensor, int]:
        """The tensor with a further dimension for the entries of a row, and which dimension now has the rows."""
        if self.apart:
            return self._split(tensor, (-1, rows)), self.dim + 1
        return self._split(tensor, (rows, -1)), self.dim

    def _split(self, tensor: Tensor, sizes: tuple[int, int]) -> Tensor:
        split: Tensor = tensor.unflatten(self.dim, sizes)  # type: ignore[no-untyped-call]
        return split

    def folded(self, tensor: Tensor, rows: int, examples: int) -> Tensor:
        """The tensor as (examples, entries of all rows of one example, ...)."""
        if not self.dim and not self.apart:
            return tensor.reshape(examples, tensor.shape[0] // examples, *tensor.shape[1:])
        opened, dim = self.opened(tensor, rows)
        moved = opened.movedim((dim, self.dim if self.apart else self.dim + 1), (0, 1))
        return moved.reshape(examples, rows // examples * moved.shape[1], *moved.shape[2:])

    def fits(self, tensor: Tensor, rows: int) -> bool:
        """Whether a tensor of this shape can have ``rows`` rows here."""
        if self.dim >= tensor.ndim:
            return False
        length = tensor.shape[self.dim]
        return length % rows == 0 if self.flat else length == rows


@dataclass
class Layouts:
    """Where the batch stands in what parameters meet, use by use, and in what becomes of it."""

    inputs: dict[Key, Layout | None] = field(default_factory=dict)
    results: dict[Key, tuple[Layout, ...]] = field(default_factory=dict)
    every: bool = False  # whether the backward pass must be asked for the gradient at every place

    def update(self, other: "Layouts") -> None:
        """Add the uses that ``other`` knows."""
        self.inputs.update(other.inputs)
        self.results.update(other.results)

    def apart(self) -> "Layouts":
        """The same where flattened rows stand apart."""

        def moved(layout: Layout) -> Layout:
            return replace(layout, apart=layout.flat)

        return Layouts(
            {key: layout and moved(layout) for key, layout in self.inputs.items()},
            {key: tuple(map(moved, layouts)) for key, layouts in self.results.items()},
        )

    @property
    def flat(self) -> bool:
        """Whether rows are flattened anywhere, so that their order is not seen from a shape."""
        return any(layout is not None and layout.flat for layout in self.inputs.values())


def by_shape(shape: tuple[int, ...], rows: int) -> Layout | None:
    """The layout that a shape shows when ``rows`` is a number that no other dimension has; None for no rows.

    >>> by_shape((4, 7, 3), rows=7), by_shape((14, 3), rows=7), by_shape((4, 3), rows=7)
    (Layout(dim=1, flat=False, apart=False), Layout(dim=0, flat=True, apart=False), None)
    """
    exact = [dim for dim, length in enumerate(shape) if length == rows]
    several = [dim for dim, length in enumerate(shape) if length and length % rows == 0]
    found = exact or several
    if len(found) > 1:
        raise AmbiguousError(
            f"a tensor of shape {shape} has {rows} rows in more than one dimension, in which examples may act on each "
            "other"
        )
    return Layout(found[0], not exact) if found else None


def telling_sizes(model: nn.Module, batch: Batch) -> list[int]:
    """Batch sizes that show in a shape where the batch is: primes, first those that divide no dimension around."""
    shapes = [tensor.shape for tensor in (*model.parameters(), *model.buffers())]
    shapes += [leaf.shape[1:] for leaf in leaves(batch)]
    around = {length + near for shape in shapes for length in shape for near in (-1, 0, 1)}
    return sorted(_PRIMES, key=lambda prime: any(length and not length % prime for length in around))
