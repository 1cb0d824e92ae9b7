"""Several rows made from each example at every step: their mean gradient is scaled once.

De, Berrada, Hayes, Smith and Balle, "Unlocking high-accuracy differentially private image classification through scale"
(2022), call it augmentation multiplicity.

>>> from dpgrad import augment
>>> images, labels = augment.Shifts(4)((torch.rand(1, 3, 8, 8), torch.tensor([5])), torch.Generator())
>>> images.shape  # four shifted copies of one image
torch.Size([1, 4, 3, 8, 8])
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.grads.batch import leaves
from dpgrad.grads.sums import Batch
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.randomness import philox

__all__ = ["Augment", "Shifts", "augmented", "probed"]

_DIGITS = 20  # to base 3, of one word of 64 bits: 3²⁰ is so far below 2⁶³ that all are as good as equally likely

Augment = Callable[[Batch, torch.Generator], Batch]  # (1, ...) -> (1, K, ...): it is given one example at a time


def augmented(augment: Augment, batch: Batch, examples: Tensor, key: AnyKey, step: int) -> Batch:
    """The rows of each example of ``batch``, (examples, K, ...); ``examples`` are their indices in the data.

    ``augment`` is called for one example after another, each with a generator of (key, step, index of the example).

    Guarantee: an example's rows are made from it and from independent draws alone, so an example more or less moves the
    sum by its own term: the draws of the others are the same, and divergences of mixtures over draws are at most the
    worst. No example can be mixed with another, since ``augment`` never sees two. Not covered is one that remembers
    examples from call to call.

    >>> def twice(batch, generator):
    ...     return batch[:, None].expand(-1, 2)
    >>> augmented(twice, torch.tensor([3.0, 4.0]), torch.tensor([0, 7]), key=7, step=0)
    tensor([[3., 3.],
            [4., 4.]])
    """
    if type(augment) is Shifts:
        return augment.moved(batch, augment.drawn(examples.to(leaves(batch)[0].device), key, step))
    columns, form = pytree.tree_flatten(batch)
    singles = zip(*(column.split(1) for column in columns), strict=True)
    made = []
    for single, random in zip(singles, _generators(examples, key, step, columns[0].device), strict=True):
        made.append(augment(pytree.tree_unflatten(list(single), form), random))
        _refuse_shape(made[-1], made[0])
    return pytree.tree_map(lambda *rows: torch.cat(rows), *made)


def probed(augment: Augment, probe: Batch, key: AnyKey) -> Batch:
    """The rows of a few examples; an augmentation is refused that makes others of the same example and generator.

    >>> probed(lambda batch, generator: torch.rand_like(batch)[:, None], torch.zeros(3), key=7)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: augment must make an example's rows from that example and the generator alone: ...
    """
    examples = torch.arange(len(leaves(probe)[0]))
    rows = augmented(augment, probe, examples, key, 0)
    backwards = augmented(augment, pytree.tree_map(lambda leaf: leaf.flip(0), probe), examples.flip(0), key, 0)
    for one, other in zip(leaves(rows), leaves(backwards), strict=True):
        again = other.flip(0)
        if not ((one == again) | (one != one) & (again != again)).all():
            raise OptionError(
                "augment must make an example's rows from that example and the generator alone: called again, in "
                "another order, it made others (it draws randomness from elsewhere, or remembers examples)"
            )
    return rows


@dataclass(frozen=True)
class Shifts:
    """Each image and ``count`` − 1 copies of it, shifted by up to one pixel in each direction; zeros move in.

    The data are (images, labels), images (examples, channels, height, width). All images of a
    batch are shifted in one call, which is much faster than one call per image.

    >>> images, labels = Shifts(4)((torch.rand(1, 3, 8, 8), torch.tensor([5])), torch.Generator())
    >>> images.shape, labels.tolist()
    (torch.Size([1, 4, 3, 8, 8]), [[5, 5, 5, 5]])
    """

    count: int

    def __post_init__(self) -> None:
        _validate.whole(least=1, count=self.count)

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        return self.moved(batch, torch.stack([self.draws(generator) for _ in leaves(batch)[0]]))

    def draws(self, generator: torch.Generator) -> Tensor:
        """How far down and to the right each copy of one image begins, (2, count); 1 is the image as it is."""
        shifts = torch.randint(3, (2, self.count), generator=generator, device=generator.device)
        shifts[:, 0] = 1
        return shifts

    def drawn(self, examples: Tensor, key: AnyKey, step: int) -> Tensor:
        """The `draws` of examples by their indices, (examples, 2, count), where the indices lie, all at once.

        They are functions of (key, step, example) alone, the same on every device, and nothing waits for them.

        >>> few = Shifts(3).drawn(torch.tensor([7, 2]), key=5, step=1)
        >>> torch.equal(few[1:], Shifts(3).drawn(torch.tensor([2]), key=5, step=1))
        True
        """
        secret = Key.of(key).derive("shifts", size=16)
        words = [int.from_bytes(half, "little") for half in (secret[:8], secret[8:])]
        blocks = -(-2 * self.count // (4 * _DIGITS))  # of four words
        at = examples[:, None] * blocks + torch.arange(1, blocks + 1, device=examples.device)
        found = philox.words(at, torch.full((1, 1), step, device=examples.device), words) >> 1 & (1 << 63) - 1
        powers = 3 ** torch.arange(_DIGITS, device=examples.device)
        digits = (found.flatten(1)[..., None] // powers % 3).flatten(1)[:, : 2 * self.count]
        shifts = digits.view(-1, 2, self.count)
        shifts[:, :, 0] = 1
        return shifts

    def moved(self, batch: Batch, shifts: Tensor) -> Batch:
        """The images by their ``shifts``, (examples, 2, count), each with the label of its example."""
        images, labels = batch
        if images.ndim != 4:
            raise OptionError(f"Shifts is for images, got rows of shape {tuple(images.shape[1:])}: leave out augment")
        height, width = images.shape[-2:]
        padded, (down, right) = F.pad(images, (1, 1, 1, 1)), shifts.to(images.device).movedim(1, 0)
        rows = torch.arange(height, device=images.device) + down[..., None]  # (examples, K, height)
        columns = torch.arange(width, device=images.device) + right[..., None]
        example = torch.arange(len(images), device=images.device)[:, None, None, None]
        moved = padded.movedim(1, -1)[example, rows[..., None], columns[:, :, None, :]]  # (examples, K, h, w, channels)
        return moved.movedim(-1, 2), labels[:, None].expand(-1, self.count)


def _generators(examples: Tensor, key: AnyKey, step: int, device: torch.device) -> Iterator[torch.Generator]:
    """A generator for each example in turn; the same object, seeded anew."""
    own, random = Key.of(key), torch.Generator(device)
    for example in examples.tolist():
        seed = own.derive("augment", str(step), str(example), size=8)
        yield random.manual_seed(int.from_bytes(seed, "little"))


def _refuse_shape(made: Batch, first: Batch) -> None:
    """Refuse rows that do not begin with (1, K), the same K in all tensors, and examples of different K or shape."""
    found = leaves(made)
    if len({leaf.shape[:2] for leaf in found}) != 1 or found[0].ndim < 2 or len(found[0]) != 1 or not found[0].shape[1]:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in found)
        raise OptionError(
            "augment is given a batch of one example and must return tensors that begin with (1, K), K the number of "
            f"rows, got {shapes}"
        )
    if [leaf.shape for leaf in found] != [leaf.shape for leaf in leaves(first)]:
        raise OptionError("augment must return the same number of rows, of the same shape, for every example")
