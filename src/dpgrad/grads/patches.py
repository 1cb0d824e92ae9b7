"""The weight of a convolution: an outer product over the patches of its input, for any number of dimensions."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dpgrad.grads.precision import allows_tf32, in_tf32, tf32_margins
from dpgrad.grads.scratch import room
from dpgrad.grads.uses import Dense, Drop, Use, ghost_squares, lengths, lost, one_by_one, select, wide, worth_forming

__all__ = ["Patches"]

# Patches hold a value once for every position that sees it. Few examples' at a time bound what that takes, and on a CPU
# they stay in its cache; a GPU needs many at once.
_VALUES_AT_ONCE = {"cpu": 1 << 21}
_OTHERWISE = 1 << 26
_LITTLE = 1 << 14  # values of a kept matrix that are no matter
# Units of rounding that transforms may leave: chosen with room to spare, not proven; on a CPU none is expected.
_TRANSFORMS = {"cuda": 128}
_NONE = 8


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
    tf32: bool | None = None  # whether it is measured and summed in TF32; None until it is settled
    norms: Tensor | None = None  # (examples,), where they are known

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

    @property
    def _in_tf32(self) -> bool:
        """Whether there are kernels for this: they know two dimensions and one group."""
        if self.tf32 is not None:
            return self.tf32
        plain = len(self.kernel) == 2 and self.groups == 1
        return plain and allows_tf32(self.inputs, self.gradients, convolution=True)

    def settled(self) -> Use:
        if self.norms is not None:
            return self
        if not self._in_tf32:
            forming = worth_forming(*self._sizes, self.inputs.device)
            return Dense(self.per_example()).settled() if forming else self
        # Kept, a matrix is summed as it is; it may take no more memory than what it is made of, or little.
        most = max(self._items * (self.inputs.shape[1:].numel() + self.gradients.shape[1:].numel()), _LITTLE)
        return self._formed() if self.shape.numel() <= most else self._measured_in_tf32()

    def measured(self) -> tuple[Tensor, Use]:
        settled = self.settled()
        if isinstance(settled, Dense):
            return settled.measured()
        if isinstance(settled, Patches) and settled.norms is not None:
            return settled.norms, settled
        squares = torch.cat([ghost_squares(a, g) for _, a, g in self._factors()])
        norms = squares.view(self.examples, self.groups).sum(1).sqrt()
        return norms + self._blurred(), replace(self, tf32=False)

    def _blurred(self) -> Tensor:
        """What the sum may add although no patch meets a gradient: it may be formed by way of transforms.

        The rounding of Fourier or Winograd transforms is relative to the whole input and the whole gradient.
        """
        x, g = (lengths(wide(each).reshape(self.examples, -1)) for each in (self.inputs, self.gradients))
        return _TRANSFORMS.get(x.device.type, _NONE) * torch.finfo(x.dtype).eps * x * g

    def _formed(self) -> Dense:
        """The gradients themselves and their norms, in TF32."""
        from dpgrad.grads.kernels.convolution import formed

        x, g = wide(self.inputs).contiguous(), wide(self.gradients).contiguous()
        found, parts = formed(x, g, self.kernel, self.stride, self.padding, self.dilation, self._items)
        squares = parts.sum(1) if parts.shape[1] > 1 else parts[:, 0]
        return Dense(found.view(self.examples, *self.shape), squares.sqrt())

    def _measured_in_tf32(self) -> "Patches":
        """The same with channels last, as the kernels and the sum want them, and its norms."""
        from dpgrad.grads.kernels.products import ghost, swapped

        positions, d, p = self._sizes
        height, width = self.inputs.shape[2:]
        added = math.prod(self.kernel) * -(-self.shape[1] // 8) * 8  # eight channels at a time
        margins = tf32_margins(added, p, positions, exact=self.inputs.dtype != torch.float32)
        x, g = (swapped(each.contiguous().flatten(2)) for each in (self.inputs, self.gradients))
        x = x.view(len(x), height, width, -1)
        shape = height, width, self.gradients.shape[3], *self.kernel, *self.stride, *self.padding, *self.dilation
        norms = ghost(x, g.view(self.examples, positions, p), *margins, lost(d, p), shape, self._items)
        norms = norms + self._blurred()
        g = g.view(len(x), *self.gradients.shape[2:], -1)
        return replace(self, inputs=x.permute(0, 3, 1, 2), gradients=g.permute(0, 3, 1, 2), tf32=True, norms=norms)

    def _weighted(self, factors: Tensor) -> Tensor:
        """The gradients times the factors of their examples."""
        if not self._in_tf32:
            g = wide(self.gradients)
            return g * factors.repeat_interleave(self._items).view(-1, *[1] * (g.ndim - 1))
        from dpgrad.grads.kernels.products import scaled

        factors = factors.repeat_interleave(self._items) if self._items > 1 else factors
        last = self.gradients.permute(0, 2, 3, 1)
        if last.is_contiguous():
            return scaled(last, factors).permute(0, 3, 1, 2)
        return scaled(self.gradients.contiguous(), factors)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        weighted = self._weighted(factors)
        many = len(self.kernel)
        padded = [
            (length + 2 * p - d * (k - 1) - 1) // s + 1 == n
            for length, p, k, s, d, n in zip(
                self.inputs.shape[2:], self.padding, self.kernel, self.stride, self.dilation, weighted.shape[2:],
                strict=True,
            )
        ]  # fmt: skip
        # As many zeros on both sides need not be added by hand.
        x, padding = (wide(self.inputs), self.padding) if all(padded) else (self._reached(self.inputs), (0,) * many)
        empty = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        found: Tensor
        with in_tf32() if self._in_tf32 else nullcontext():
            _, found, _ = torch.ops.aten.convolution_backward(
                weighted, x, empty, None, self.stride, padding, self.dilation, False, [0] * many, self.groups,
                [False, True, False],
            )  # fmt: skip
        return found

    def weighted_sums(self, factors: Tensor) -> Tensor:
        return one_by_one(self, factors)

    def per_example(self) -> Tensor:
        _, d, p = self._sizes
        like = wide(self.gradients[:0])
        shape = self.examples, self.groups, p, d
        found = room(shape, like)
        if found is None:
            found = torch.empty(shape, dtype=like.dtype, device=like.device)
        for part, a, g in self._factors():
            torch.bmm(g.mT, a, out=found[part].flatten(0, 1))
        return found.view(self.examples, *self.shape)

    def kept(self, keep: Tensor, drop: Drop | None = None) -> "Patches":
        items, drop = keep.repeat_interleave(self._items) if self._items > 1 else keep, drop or select
        return replace(self, inputs=drop(items, self.inputs), gradients=drop(items, self.gradients), norms=None)

    def part(self, examples: slice) -> "Patches":
        start, stop, _ = examples.indices(self.examples)
        items = slice(start * self._items, stop * self._items)
        some = self.inputs[items], self.gradients[items]
        return replace(self, inputs=some[0], gradients=some[1], examples=stop - start, norms=None)

    def scaled(self, factor: float) -> "Patches":
        return replace(self, gradients=self.gradients * factor, norms=None)
