"""One parameter's gradient for each example, in the form in which it is cheapest to measure and to sum.

A layer hands over what its gradient is made of, and four forms say how it is put together:

- `Dense`: the gradients themselves, (examples, *shape);
- `Outer`: Gᵢ = Σ_t g_it a_itᵀ, a product over T positions (linear layers);
- `Lookup`: Gᵢ has the row g_it added at index id_it (embeddings);
- `Patches` (in `patches`): a convolution, which is an `Outer` over the patches of its input.

Guarantee: `measured` returns a norm that is not below the norm of what `weighted_sum` adds for that example. Summing
over positions loses up to γ‖a‖‖g‖ to rounding, however small the sum is, and that much is added where the sum is formed
anew; gradients that are kept and summed as measured need no margin. Where torch's settings allow TF32, products are
formed in it, and the margin says what that costs.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from dpgrad import _triton
from dpgrad.grads.precision import SUMMED_AT_ONCE, allows_tf32, in_tf32, tf32_margins
from dpgrad.grads.scratch import room
from dpgrad.grads.sums import sum_dtype

__all__ = [
    "Dense", "Drop", "Layer", "Lookup", "Outer", "Tied", "Use", "combined", "ghost_squares", "lengths", "lost",
    "mass_of", "norm", "one_by_one", "products", "rounding", "select", "wide", "worth_forming",
]  # fmt: skip

# Rounding errors of a sum of n products stay below λ√n·u with probability 1 − 2n·exp(−λ²/2) (Higham and Mary, 2019).
_LAMBDA = 8.0
_AT_ONCE = 1 << 13  # squares that are added up one after another
_KEPT = {"cpu": 2}  # at most so many times as many values of a kept matrix as of what it is made of; otherwise once
_SMALL = 1 << 16  # values of a matrix whose products are summed by a kernel of our own
_SINGLE = (torch.float32, torch.bfloat16, torch.float16)  # what kernels read and measure in float32


Drop = Callable[[Tensor, Tensor], Tensor]  # keep (rows,), tensor (rows, ...) -> the tensor with other rows zero


class Use(Protocol):
    """One parameter's gradient for each example."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""

    def settled(self) -> "Use":
        """The form that is cheapest to measure and to sum, so what it was made of can be freed.

        It may be measured now, while its factors are in the cache.
        """

    def measured(self) -> tuple[Tensor, "Use"]:
        """The norm of each example, (examples,), and the form from which to sum.

        What is lost because the square of a value is below the least float is not in it: at most √(values·least).
        """

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ fᵢ Gᵢ in the shape of the parameter."""

    def weighted_sums(self, factors: Tensor) -> Tensor:
        """Such a sum over every piece of neighbouring examples, factors (pieces, each): (pieces, *shape)."""

    def per_example(self) -> Tensor:
        """The gradients themselves, (examples, *shape)."""

    def kept(self, keep: Tensor, drop: "Drop | None" = None) -> Self:
        """The same with the examples outside ``keep`` set to zero, whatever they held: by ``drop``, else in a copy."""

    def part(self, examples: slice) -> Self:
        """Some of the examples."""

    def scaled(self, factor: float) -> Self:
        """Every gradient times ``factor``."""


def rounding(terms: int, dtype: torch.dtype) -> float:
    """A bound on the error of a sum of ``terms`` products, relative to the sum of their magnitudes.

    >>> rounding(4, torch.float32) == 16 * 2.0**-24
    True
    """
    return _LAMBDA * math.sqrt(terms) * torch.finfo(dtype).eps / 2


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the type in which it is measured and summed."""
    dtype = sum_dtype(tensor.dtype)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def select(keep: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the examples outside ``keep`` replaced by zeros: 0·inf is NaN, so no product would do.

    A value that is expanded over some dimensions stays so.
    """
    for dim in range(1, tensor.ndim):
        if not tensor.stride(dim) and tensor.shape[dim] > 1:
            whole, tensor = tensor.shape, tensor.narrow(dim, 0, 1)
            return select(keep, tensor).expand(whole)
    return torch.where(keep.bool().view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)


class Layer:
    """A linear layer at one position of each example, on a CUDA device: one kernel measures weight and bias.

    It runs when either norm is first asked for: not at all for a layer whose parameters have other uses.
    """

    def __init__(self, inputs: Tensor, gradients: Tensor) -> None:
        self._inputs, self._gradients = inputs, gradients

    @classmethod
    def of(cls, inputs: Tensor, gradients: Tensor) -> "Layer | None":
        """The layer with inputs (examples, T, d) and gradients (examples, T, p), where the kernel measures it."""
        return cls(inputs, gradients) if inputs.shape[1] == 1 and _reads(inputs, gradients) else None

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """‖aᵢ‖‖gᵢ‖ and ‖gᵢ‖ of each example: the norms of its gradients of weight and bias."""
        from dpgrad.grads.kernels.lengths import of_layer

        return of_layer(self._inputs[:, 0], self._gradients[:, 0])


def _reads(*tensors: Tensor) -> bool:
    """Whether kernels that compute in float32 or above read the tensors as they are."""
    return _triton.runs_on(*tensors) and all(tensor.dtype in _SINGLE for tensor in tensors)


@dataclass(frozen=True)
class Dense:
    """The gradients themselves."""

    gradients: Tensor  # (examples, *shape)
    norms: Tensor | None = None  # (examples,), where they are known
    layer: Layer | None = None  # whose bias it is, where that is measured with its weight

    @classmethod
    def zero(cls, parameter: Tensor, examples: int) -> "Dense":
        """No gradient for any example, in no memory."""
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return cls(zero.expand(examples, *parameter.shape))

    @property
    def shape(self) -> torch.Size:
        return self.gradients.shape[1:]

    @property
    def sums_in_double(self) -> bool:
        """Whether `weighted_sum` adds in float64, however many the examples are."""
        return _reads(self.gradients)

    def settled(self) -> "Dense":
        if self.norms is not None:
            return self
        if self.layer is not None:
            return Dense(self.gradients, self.layer.norms[1])
        gradients = wide(self.gradients)
        return Dense(gradients, norm(gradients.reshape(gradients.shape[0], -1)))

    def measured(self) -> tuple[Tensor, Use]:
        settled = self.settled()
        assert settled.norms is not None
        return settled.norms, settled

    def weighted_sum(self, factors: Tensor) -> Tensor:
        flat = self.gradients.reshape(self.gradients.shape[0], -1)
        if self.sums_in_double:
            from dpgrad.grads.kernels.products import weighted

            return weighted(flat.contiguous(), factors).view(self.shape)
        return (factors @ wide(flat)).view(self.shape)

    def weighted_sums(self, factors: Tensor) -> Tensor:
        pieces, each = factors.shape
        gradients = wide(self.gradients).reshape(pieces, each, -1)
        return (factors[:, None] @ gradients).view(pieces, *self.shape)

    def per_example(self) -> Tensor:
        return wide(self.gradients)

    def kept(self, keep: Tensor, drop: Drop | None = None) -> "Dense":
        return Dense((drop or select)(keep, self.gradients))

    def part(self, examples: slice) -> "Dense":
        return Dense(self.gradients[examples])

    def scaled(self, factor: float) -> "Dense":
        return Dense(self.gradients * factor)


@dataclass(frozen=True)
class Outer:
    """Gᵢ = Σ_t g_it a_itᵀ: the weight of a linear layer applied at T positions."""

    inputs: Tensor  # a: (examples, T, d)
    gradients: Tensor  # g: (examples, T, p)
    tf32: bool | None = None  # whether it is measured and summed in TF32; None until it is settled
    norms: Tensor | None = None  # (examples,), where they are known
    layer: Layer | None = None  # whose weight it is, where that is measured with its bias
    apart: tuple[Tensor, Tensor] | None = None  # ‖aᵢ‖ and ‖gᵢ‖, (examples,) each, of which `products` makes norms

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.gradients.shape[2], self.inputs.shape[2]))

    @property
    def _in_tf32(self) -> bool:
        if self.tf32 is None:
            return self.inputs.shape[1] > 1 and allows_tf32(self.inputs, self.gradients)
        return self.tf32

    def settled(self) -> Use:
        p, d = self.shape
        positions = self.inputs.shape[1]
        if self.norms is not None or self.apart is not None:
            return self
        if worth_forming(positions, d, p, self.inputs.device):
            return Dense(self.per_example()).settled()
        layer = self.layer or Layer.of(self.inputs, self.gradients)
        if layer is not None:
            return Outer(self.inputs, self.gradients, tf32=False, norms=layer.norms[0])
        if positions == 1:
            a, g = wide(self.inputs), wide(self.gradients)
            return Outer(a, g, tf32=False, apart=(norm(a.flatten(1)), norm(g.flatten(1))))
        if not self._in_tf32:
            return self
        from dpgrad.grads.kernels.products import ghost

        a, g = self.inputs.contiguous(), self.gradients.contiguous()
        margins = tf32_margins(d, p, positions, exact=torch.float32 not in (a.dtype, g.dtype))
        return Outer(a, g, tf32=True, norms=ghost(a, g, *margins, lost(d, p)))

    def measured(self) -> tuple[Tensor, Use]:
        settled = self.settled()
        if isinstance(settled, Dense):
            return settled.measured()
        if isinstance(settled, Outer) and settled.norms is not None:
            return settled.norms, settled
        if isinstance(settled, Outer) and settled.apart is not None:
            return products([settled])[0], settled
        a, g = wide(self.inputs), wide(self.gradients)
        return ghost_squares(a, g).sqrt(), Outer(a, g, tf32=False)

    @property
    def sums_in_double(self) -> bool:
        """Whether `weighted_sum` adds in float64, however many the examples are: small products at one position."""
        small = self.inputs.shape[1] == 1 and self.shape.numel() <= _SMALL
        return small and _reads(self.inputs, self.gradients)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        if self.sums_in_double:
            from dpgrad.grads.kernels.products import weighted_outer

            a, g = (each[:, 0].contiguous() for each in (self.inputs, self.gradients))
            return weighted_outer(a, g, factors, SUMMED_AT_ONCE)
        return self.weighted_sums(factors[None])[0]

    def weighted_sums(self, factors: Tensor) -> Tensor:
        if self._in_tf32:
            from dpgrad.grads.kernels.products import scaled

            pieces, each = len(factors), factors.flatten()
            a, g = self.inputs, self.gradients  # the smaller is scaled, in a copy
            if a.shape[2] < g.shape[2]:
                a, g = scaled(a.contiguous(), each), wide(g)
            else:
                a, g = wide(a), scaled(g.contiguous(), each)
            with in_tf32():
                return g.reshape(pieces, -1, g.shape[2]).mT @ a.reshape(pieces, -1, a.shape[2])
        a, g = wide(self.inputs), wide(self.gradients)
        if len(factors) == 1 and a.shape[1] == 1:  # a plain product of matrices
            a, g, factors = a[:, 0], g[:, 0], factors.view(-1, 1)
            a, g = (a * factors, g) if a.shape[1] < g.shape[1] else (a, g * factors)
            return (g.mT @ a)[None]
        pieces, factors = len(factors), factors.reshape(-1, 1, 1)
        a, g = (a * factors, g) if a.shape[2] < g.shape[2] else (a, g * factors)
        return g.reshape(pieces, -1, g.shape[2]).mT @ a.reshape(pieces, -1, a.shape[2])

    def per_example(self) -> Tensor:
        a, g = wide(self.inputs), wide(self.gradients)
        with in_tf32() if self._in_tf32 else nullcontext():
            return torch.bmm(g.mT, a, out=room((len(g), *self.shape), g))

    def kept(self, keep: Tensor, drop: Drop | None = None) -> "Outer":
        drop = drop or select
        return Outer(drop(keep, self.inputs), drop(keep, self.gradients), self.tf32)

    def part(self, examples: slice) -> "Outer":
        return Outer(self.inputs[examples], self.gradients[examples], self.tf32)

    def scaled(self, factor: float) -> "Outer":
        return Outer(self.inputs, self.gradients * factor, self.tf32)


@dataclass(frozen=True)
class Lookup:
    """Gᵢ has g_it added to its row id_it: the weight of an embedding looked up at T positions."""

    indices: Tensor  # (examples, T)
    gradients: Tensor  # (examples, T, d)
    count: int  # rows of the weight

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, self.gradients.shape[2]))

    def settled(self) -> Use:
        return self

    def measured(self) -> tuple[Tensor, Use]:
        """Positions with equal indices are added up first, then squared; what was added up is also what is summed.

        Two positions that cancel would otherwise stand in the sum over all examples, as large as they are, and round
        what others have there.
        """
        g = wide(self.gradients)
        if g.shape[1] == 1:
            return lengths(g), replace(self, gradients=g)
        ordered, order = self.indices.sort(dim=1, stable=True)
        fresh = ordered.diff(dim=1, prepend=ordered[:, :1] - 1) != 0
        segment = fresh.cumsum(1) - 1  # which distinct index a position belongs to
        places = torch.zeros_like(segment).scatter(1, order, segment)
        added = torch.zeros_like(g).scatter_add(1, places[..., None].expand_as(g), g)
        distinct = torch.zeros_like(ordered).scatter(1, segment, ordered)  # 0 where nothing is added
        return lengths(added), Lookup(distinct, added, self.count)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        g = wide(self.gradients)
        total = torch.zeros(self.shape, dtype=g.dtype, device=g.device)
        return total.index_add_(0, self.indices.flatten(), (g * factors.view(-1, 1, 1)).flatten(0, 1))

    def weighted_sums(self, factors: Tensor) -> Tensor:
        return one_by_one(self, factors)

    def per_example(self) -> Tensor:
        g = wide(self.gradients)
        total = torch.zeros((len(g), *self.shape), dtype=g.dtype, device=g.device)
        return total.scatter_add_(1, self.indices[..., None].expand_as(g), g)

    def kept(self, keep: Tensor, drop: Drop | None = None) -> "Lookup":
        return replace(self, gradients=(drop or select)(keep, self.gradients))

    def part(self, examples: slice) -> "Lookup":
        return Lookup(self.indices[examples], self.gradients[examples], self.count)

    def scaled(self, factor: float) -> "Lookup":
        return replace(self, gradients=self.gradients * factor)


@dataclass(frozen=True)
class Tied:
    """An embedding whose weight is also that of a linear layer: Gᵢ is the sum of both gradients.

    ‖R + O‖² = ‖R‖² + ‖O‖² + 2⟨R, O⟩ with ⟨R, O⟩ = Σ_t Σ_s (g^O_s)[id_t] · ⟨g^R_t, a_s⟩, so nothing as large as the
    vocabulary is held for an example.
    """

    rows: Lookup
    outer: Outer

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def settled(self) -> Use:
        return self

    def measured(self) -> tuple[Tensor, Use]:
        of_rows, rows = self.rows.measured()
        assert isinstance(rows, Lookup)
        ids, r = rows.indices, rows.gradients
        outer, mass, squares, rounded = self._outer_measured()
        a, g = outer.inputs, outer.gradients
        chosen = g.gather(2, ids[:, None, :].expand(-1, g.shape[1], -1))  # (examples, S, T)
        if outer.tf32:  # of the factors from which the norm is found, cut
            a, chosen = _cut(wide(a)), _cut(wide(chosen))
        cross = (chosen * (a @ r.mT)).sum((1, 2))
        # |⟨R, O⟩| ≤ Σ_st |g_s||a_s||r_t|, and what is left of it after cancelling is known to that times γ.
        apart = mass * lengths(r, 2).sum(1) * rounding(a.shape[1] * r.shape[1] + a.shape[2], r.dtype)
        found = (of_rows.square() + squares + 2 * cross).clamp(min=0) + 2 * apart
        return found.sqrt() + rounded * mass, Tied(rows, outer)

    def _outer_measured(self) -> tuple[Outer, Tensor, Tensor, float]:
        """The linear part as it is summed, its mass, its squared norm, and by how many masses TF32 moves the sum."""
        outer = self.outer
        if not outer._in_tf32:
            a, g = wide(outer.inputs), wide(outer.gradients)
            # The sum is formed anew: the norm of a matrix that is not kept has no margin.
            return Outer(a, g, tf32=False), mass_of(a, g), ghost_squares(a, g), 0.0
        from dpgrad.grads.kernels.products import ghost

        a, g = outer.inputs.contiguous(), outer.gradients.contiguous()
        p, d = outer.shape
        gamma, sigma = tf32_margins(d, p, a.shape[1], exact=torch.float32 not in (a.dtype, g.dtype))
        squares = ghost(a, g, gamma, 0.0, lost(d, p)).square()
        return Outer(a, g, tf32=True), mass_of(wide(a), wide(g)), squares, sigma

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self.rows.weighted_sum(factors) + self.outer.weighted_sum(factors)

    def weighted_sums(self, factors: Tensor) -> Tensor:
        return self.rows.weighted_sums(factors) + self.outer.weighted_sums(factors)

    def per_example(self) -> Tensor:
        return self.rows.per_example() + self.outer.per_example()

    def kept(self, keep: Tensor, drop: Drop | None = None) -> "Tied":
        return Tied(self.rows.kept(keep, drop), self.outer.kept(keep, drop))

    def part(self, examples: slice) -> "Tied":
        return Tied(self.rows.part(examples), self.outer.part(examples))

    def scaled(self, factor: float) -> "Tied":
        return Tied(self.rows.scaled(factor), self.outer.scaled(factor))


def _cut(tensor: Tensor) -> Tensor:
    """The values of TF32 next to those of a float32 tensor towards zero."""
    return (tensor.view(torch.int32) & -0x2000).view(torch.float32)


def one_by_one(use: Use, factors: Tensor) -> Tensor:
    """`Use.weighted_sums` for a form that has no better way: one piece after another."""
    pieces, each = factors.shape
    parts = (use.part(slice(i * each, (i + 1) * each)) for i in range(pieces))
    return torch.stack([part.weighted_sum(few) for part, few in zip(parts, factors, strict=True)])


def lengths(tensor: Tensor, dims: int = 1) -> Tensor:
    """The norm over all but the first ``dims`` dimensions, no smaller than it is: tiny entries square to zero."""
    flat = tensor.reshape(*tensor.shape[:dims], -1)
    return norm(flat) + _hidden(flat.shape[dims], flat.dtype)


def _hidden(values: int, dtype: torch.dtype) -> float:
    """What the norm of so many values may have lost because their squares are below the least float."""
    return math.sqrt(values * torch.finfo(dtype).tiny)


def products(outers: Sequence[Outer]) -> Tensor:
    """The norms ‖aᵢ‖‖gᵢ‖ of uses at one position whose factors are measured, (uses, examples): all of them at once."""
    found = []
    for place in (0, 1):
        pairs = [outer.apart for outer in outers if outer.apart is not None]
        every = torch.stack([pair[place] for pair in pairs])
        values = max((outer.inputs, outer.gradients)[place].shape[2] for outer in outers)
        found.append(every + _hidden(values, every.dtype))
    return found[0] * found[1]


def norm(rows: Tensor) -> Tensor:
    """The norm over the last dimension, of few values at a time: squares added to a long sum would vanish in it.

    >>> norm(torch.ones(2, 20_000)).square().round()
    tensor([20000., 20000.])
    """
    length = rows.shape[-1]
    whole = length // _AT_ONCE * _AT_ONCE
    if length <= _AT_ONCE:
        found: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        return found
    pieces = rows[..., :whole].reshape(*rows.shape[:-1], -1, _AT_ONCE)
    parts = [torch.linalg.vector_norm(pieces, dim=-1)]
    if whole < length:
        parts.append(torch.linalg.vector_norm(rows[..., whole:], dim=-1, keepdim=True))
    return norm(torch.cat(parts, -1))


def lost(d: int, p: int) -> float:
    """What the squared length of a row of so many values, or of fewer, may have lost below the least float32."""
    return max(d, p) * torch.finfo(torch.float32).tiny


def mass_of(a: Tensor, g: Tensor) -> Tensor:
    """Σ_t ‖a_t‖‖g_t‖ of each example: what the norm of Σ_t g_t a_tᵀ would be without cancelling."""
    return (lengths(a, 2) * lengths(g, 2)).sum(1)


def worth_forming(positions: int, d: int, p: int, device: torch.device) -> bool:
    """Whether to form and keep the matrix Σ_t g_t a_tᵀ, (p, d), instead of measuring it by its ghost.

    Kept, it is summed as it is: 2Tdp operations in all. The ghost takes 2T²(d+p), and 2Tdp more for the sum. So a kept
    matrix is the faster of the two whenever it takes no more memory than what it is made of, on a CPU also twice that.

    Guarantee: the choice does not depend on how many examples there are. If it did, one example more would change the
    margins of all norms.
    """
    return positions > 1 and d * p <= _KEPT.get(device.type, 1) * positions * (d + p)


def ghost_squares(a: Tensor, g: Tensor) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖² of each example as Σ_ts ⟨a_t, a_s⟩⟨g_t, g_s⟩, with what rounding may have hidden added."""
    positions, d = a.shape[1:]
    p = g.shape[2]
    of_a, of_g = a @ a.mT, g @ g.mT
    found: Tensor = torch.linalg.vecdot(of_a.flatten(1), of_g.flatten(1)).clamp(min=0)
    tiny = torch.finfo(a.dtype).tiny  # what a product below the least float may have lost
    squares_a, squares_g = (
        products.diagonal(dim1=1, dim2=2) + length * tiny for products, length in ((of_a, d), (of_g, p))
    )
    mass = (squares_a.sqrt() * squares_g.sqrt()).sum(1)
    lost = positions * tiny * (d * squares_g.sum(1) + p * squares_a.sum(1))
    return found + rounding(positions * positions + d + p, a.dtype) * mass.square() + lost


def combined(uses: Sequence[Use]) -> Use:
    """One parameter's several uses as one: their gradients add up before they are measured."""
    uses = [part for use in uses for part in ((use.rows, use.outer) if isinstance(use, Tied) else (use,))]
    rows = [use for use in uses if isinstance(use, Lookup)]
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(uses) == 1:
        return uses[0]
    if len(rows) + len(outers) == len(uses):
        together: list[Use] = []
        if rows:
            together.append(
                Lookup(
                    torch.cat([r.indices for r in rows], 1), torch.cat([r.gradients for r in rows], 1), rows[0].count
                )
            )
        if outers:
            a, g = torch.cat([o.inputs for o in outers], 1), torch.cat([o.gradients for o in outers], 1)
            together.append(Outer(a, g))
        match together:
            case [Lookup() as looked_up, Outer() as applied]:
                return Tied(looked_up, applied)
            case _:
                return together[0]
    total = uses[0].per_example()
    for use in uses[1:]:
        total = total + use.per_example()
    return Dense(total)
