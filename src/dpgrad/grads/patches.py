"""The weight of a convolution: an outer product over the patches of its input, for any number of dimensions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dpgrad.grads.uses import Dense, Use, ghost_squares, one_by_one, select, wide, worth_forming

# Patches hold a value once for every position that sees it. Few examples' at a time bound what that takes, and on a CPU
# they stay in its cache; a GPU needs many at once.
_VALUES_AT_ONCE = {"cpu": 1 << 21}
_OTHERWISE = 1 << 26


@dataclass(frozen=True)
class Patches:
    """Gᵢ = Σ_t g_it ⊗ patch_t(x_i) over the positions t of a convolution's output, one product for each group.

    A transposed convolution has the same gradient with its input and its output's gradient exchanged. An example may
    own several consecutive items of the first dimension.
    """

    inputs: Tensor  # x: (items, C, *space)
    gradients: Tensor  # g: (items, P, *positions)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # zeros before the first entry of each dimension of space; as many after as are reached
    dilation: tuple[int, ...]
    groups: int
    examples: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.gradients.shape[1], self.inputs.shape[1] // self.groups, *self.kernel))

    @property
    def _items(self) -> int:
        return len(self.gradients) // self.examples

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Positions T of one example, and the values d of a patch and p of an output there, in one group."""
        positions = self._items * math.prod(self.gradients.shape[2:])
        return positions, math.prod(self.shape[1:]), self.shape[0] // self.groups

    def _reached(self, inputs: Tensor) -> Tensor:
        """What the patches see of some inputs: padding added, the rest cut off."""
        x = wide(inputs)
        reach = [
            d * (k - 1) + s * (n - 1) + 1
            for k, s, d, n in zip(self.kernel, self.stride, self.dilation, self.gradients.shape[2:], strict=True)
        ]
        sides = [
            (before, max(end - before - length, 0))
            for before, end, length in zip(self.padding, reach, x.shape[2:], strict=True)
        ]
        if any(map(any, sides)):
            x = F.pad(x, [amount for side in reversed(sides) for amount in side])
        for dim, end in enumerate(reach, start=2):
            x = x.narrow(dim, 0, end)
        return x

    def _factors(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some examples at a time, a: (examples·groups, T, d) and g: (examples·groups, T, p).

        The groups of an example are neighbours. Both are stored position by position, which is how they lie in x and g.
        """
        positions, d, p = self._sizes
        at_once = _VALUES_AT_ONCE.get(self.inputs.device.type, _OTHERWISE)
        several = max(1, at_once // (positions * d * self.groups))
        for start in range(0, self.examples, several):
            part = slice(start, min(start + several, self.examples))
            many = (part.stop - part.start) * self.groups
            rows = slice(part.start * self._items, part.stop * self._items)
            g = wide(self.gradients[rows]).reshape(-1, self._items, self.groups, p, positions // self._items)
            yield (
                part,
                self._columns(rows).reshape(many, d, positions).mT,
                g.movedim(1, 3).reshape(many, p, positions).mT,
            )

    def _columns(self, rows: slice) -> Tensor:
        """The patches of some items as a view: (examples, groups, C/groups, *kernel, items, *positions)."""
        x = self._reached(self.inputs[rows])
        x = x.view(-1, self._items, self.groups, x.shape[1] // self.groups, *x.shape[2:])
        (example, item, group, channel), steps = x.stride()[:4], x.stride()[4:]
        taken = [d * s for d, s in zip(self.dilation, steps, strict=True)]
        moved = [d * s for d, s in zip(self.stride, steps, strict=True)]
        size = (x.shape[0], *x.shape[2:4], *self.kernel, self._items, *self.gradients.shape[2:])
        return x.as_strided(size, (example, group, channel, *taken, item, *moved))

    def settled(self) -> Use:
        return Dense(self.per_example()) if worth_forming(*self._sizes, self.examples * self.groups) else self

    def measured(self) -> tuple[Tensor, Use]:
        settled = self.settled()
        if isinstance(settled, Dense):
            return settled.measured()
        squares = torch.cat([ghost_squares(a, g) for _, a, g in self._factors()])
        return squares.view(self.examples, self.groups).sum(1), self

    def weighted_sum(self, factors: Tensor) -> Tensor:
        x, g = self._reached(self.inputs), wide(self.gradients)
        weighted = g * factors.repeat_interleave(self._items).view(-1, *[1] * (g.ndim - 1))
        many = len(self.kernel)
        empty = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        found: Tensor
        _, found, _ = torch.ops.aten.convolution_backward(
            weighted, x, empty, None, self.stride, [0] * many, self.dilation, False, [0] * many, self.groups,
            [False, True, False],
        )  # fmt: skip
        return found

    def weighted_sums(self, factors: Tensor) -> Tensor:
        return one_by_one(self, factors)

    def per_example(self) -> Tensor:
        _, d, p = self._sizes
        like = wide(self.gradients[:0])
        found = torch.empty(self.examples, self.groups, p, d, dtype=like.dtype, device=like.device)
        for part, a, g in self._factors():
            torch.bmm(g.mT, a, out=found[part].flatten(0, 1))
        return found.view(self.examples, *self.shape)

    def kept(self, keep: Tensor) -> "Patches":
        items = keep.repeat_interleave(self._items)
        return replace(self, inputs=select(items, self.inputs), gradients=select(items, self.gradients))

    def part(self, examples: slice) -> "Patches":
        start, stop, _ = examples.indices(self.examples)
        items = slice(start * self._items, stop * self._items)
        return replace(self, inputs=self.inputs[items], gradients=self.gradients[items], examples=stop - start)

    def scaled(self, factor: float) -> "Patches":
        return replace(self, gradients=self.gradients * factor)
