"""From each example's gradient to the clipped sum: norms, factors, one weighted sum."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgrad import _triton
from dpgrad.grads.precision import SUMMED_AT_ONCE, norm_error, own_products
from dpgrad.grads.sums import ClippedSum, Groups, Scale
from dpgrad.grads.uses import Dense, Outer, Use, products, select

__all__ = ["PerExample", "Scaled", "ZeroRows"]

_HELD = 1 << 22  # values of short sums held at a time


@dataclass(frozen=True)
class PerExample:
    """The gradient of every example, parameter by parameter. Private.

    >>> from dpgrad.grads.uses import Dense
    >>> gradients = PerExample({"weight": Dense(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))})
    >>> gradients.clipped(lambda norms: (1 / norms).clamp(max=1)).sums["weight"].round(decimals=2)
    tensor([0.6000, 1.3000])
    """

    uses: Mapping[str, Use]

    def clipped(self, scale: Scale, groups: Groups | None = None) -> ClippedSum:
        """Σᵢ (1−τ)·scale(nᵢ)·gᵢ, where nᵢ is the norm of example i, or of its part in each group of parameters.

        Guarantee: the norm of one example's term is at most (1−τ)·scale(nᵢ)·nᵢ(1+τ), so at most ``clip`` for a rule
        that keeps scale(n)·n ≤ clip. An example with a gradient that is not finite is left out of every group.
        """
        with self.scaled(scale, groups) as found:
            return ClippedSum({name: found.sum(name) for name in self.uses})

    @contextmanager
    def scaled(
        self, scale: Scale, groups: Groups | None = None, drop: "ZeroRows | None" = None, look: bool = True
    ) -> Iterator["Scaled"]:
        """`clipped` parameter by parameter: yield norms and factors, from which the block takes each sum.

        With ``drop``, which zeroes the rows of examples that are left out, nothing waits for a CUDA device. Without a
        ``look`` at the gradients no example is left out.

        Guarantee: that of `clipped`; without a look only where all of `Scaled.keep` is true.
        """
        with torch.no_grad(), own_products():
            norms, uses = self._measured(groups or {})
            factors, keep = _factors(norms, scale)
            if look and ((drop is not None and norms.is_cuda) or not bool(keep.all())):
                uses = {name: use.kept(keep, drop) for name, use in uses.items()}
            if drop is not None:
                drop.launch()
            yield Scaled(norms, factors, keep, uses, groups)

    def norms(self, groups: Groups | None = None) -> Tensor:
        """The norm of each example, (groups, examples), rounded upwards. Private."""
        with torch.no_grad(), own_products():
            return self._measured(groups or {})[0]

    def _measured(self, groups: Groups) -> tuple[Tensor, dict[str, Use]]:
        parts: list[list[Tensor | Outer]] = [[] for _ in range(max(groups.values(), default=0) + 1)]
        values = [0] * len(parts)
        uses: dict[str, Use] = {}
        for name, use in self.uses.items():
            group = _group(groups, name)
            settled = use.settled()
            if isinstance(settled, Outer) and settled.apart is not None:
                uses[name] = settled
                parts[group].append(settled)
            else:
                found, uses[name] = settled.measured()
                parts[group].append(found)
            values[group] += use.shape.numel()
        measured = [_in_order(found) if found else None for found in parts]
        like = next(found for found in measured if found is not None)
        every = [
            torch.zeros_like(like[0]) if found is None else _together(found, count + len(found))
            for found, count in zip(measured, values, strict=True)
        ]
        return torch.stack(every) if len(every) > 1 else every[0][None], uses


def _in_order(parts: Sequence[Tensor | Outer]) -> Tensor:
    """The norms of the parts, (parts, examples); those of products of two factors are computed together."""
    outers = {place: part for place, part in enumerate(parts) if isinstance(part, Outer)}
    others = {place: part for place, part in enumerate(parts) if isinstance(part, Tensor)}
    if not outers:
        return torch.stack([*others.values()])
    found = products([*outers.values()])
    if not others:
        return found
    norms = {**others, **dict(zip(outers, found.unbind(), strict=True))}
    return torch.stack([norms[place] for place in range(len(parts))])  # an index would have to reach the device


def _together(every: Tensor, squares: int) -> Tensor:
    """The norm of each example from the norms of its parts, (parts, examples), made of ``squares`` squares in all.

    Guarantee: it is not below the norm: the most that squares below the least float can have lost is added.
    """
    lost = math.sqrt(squares * torch.finfo(every.dtype).tiny)
    if every.dtype == torch.float32 and _triton.runs_on(every):
        from dpgrad.grads.kernels.factors import together

        return together(every, lost)
    found: Tensor = torch.linalg.vector_norm(every, dim=0)
    return found + lost


def _factors(norms: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """(1−τ)·scale(nᵢ), 0 for an example with a norm that is not finite; and whether all its norms are finite."""
    shrink = 1 - norm_error(norms.dtype)
    factors = scale(norms)
    alike = factors.shape == norms.shape and factors.dtype == norms.dtype == torch.float32
    if alike and _triton.runs_on(norms, factors):
        from dpgrad.grads.kernels.factors import finite

        return finite(norms.contiguous(), factors.contiguous(), shrink)
    keep = norms.isfinite().all(0)
    return torch.where(keep, factors, 0) * shrink, keep


@dataclass(frozen=True, repr=False)
class Scaled:
    """Norms and factors of a batch, and from them the sum of each parameter. Private.

    >>> from dpgrad.grads.uses import Dense
    >>> gradients = PerExample({"weight": Dense(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))})
    >>> with gradients.scaled(lambda norms: (1 / norms).clamp(max=1)) as found:
    ...     print(found.keep.tolist(), found.sum("weight").round(decimals=2), found.plain("weight").round(decimals=2))
    [True, True] tensor([0.6000, 1.3000]) tensor([3.0000, 4.5000])
    """

    norms: Tensor  # (groups, examples)
    factors: Tensor  # (groups, examples), shortened by τ
    keep: Tensor  # (examples,), whether the gradient is finite
    uses: Mapping[str, Use]
    groups: Groups | None

    def sum(self, name: str) -> Tensor:
        """Σᵢ fᵢ gᵢ of one parameter."""
        return _summed(self.uses[name], self.factors[_group(self.groups, name)])

    def plain(self, name: str) -> Tensor:
        """(1−τ) Σᵢ gᵢ of one parameter, over the examples that are kept."""
        return _summed(self.uses[name], self.keep.to(self.norms.dtype) * (1 - norm_error(self.norms.dtype)))


class ZeroRows:
    """Zeroes rows in place, of many tensors in one launch. Tensors that `protected` owns are copied instead.

    Only for tensors of the step itself, such as the activations and gradients of a pass.
    """

    def __init__(self, protected: Iterable[Tensor] = ()) -> None:
        self._protected = {tensor.untyped_storage().data_ptr() for tensor in protected}
        self._waiting: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by the rows to keep

    def __call__(self, keep: Tensor, tensor: Tensor) -> Tensor:
        if not _triton.runs_on(tensor) or not self._may_write(tensor):
            return select(keep, tensor)
        self._waiting.setdefault(id(keep), (keep, []))[1].append(tensor)
        return tensor

    def _may_write(self, tensor: Tensor) -> bool:
        """Whether each row is contiguous, separate from the others, and may be written to."""
        if tensor.untyped_storage().data_ptr() in self._protected or tensor.element_size() < 2:
            return False
        row = tensor.shape[1:].numel()
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        return row > 0 and reach == row and tensor.stride(0) >= row and len(tensor) > 0

    def launch(self) -> None:
        """Zero the rows collected so far."""
        if self._waiting:
            from dpgrad.grads.kernels.rows import zeroed

            for keep, tensors in self._waiting.values():
                zeroed(keep.to(torch.int8), tensors)
            self._waiting.clear()


def _summed(use: Use, factors: Tensor) -> Tensor:
    """Σ fᵢ Gᵢ, a few terms at a time: τ covers the rounding of a short sum, and in float64 it is negligible.

    Guarantee: the short sums do not depend on the number of terms; otherwise one more would change them all.
    """
    if len(factors) <= SUMMED_AT_ONCE or (isinstance(use, Dense | Outer) and use.sums_in_double):
        return use.weighted_sum(factors)
    pieces, each = len(factors) // SUMMED_AT_ONCE, SUMMED_AT_ONCE
    several = max(1, _HELD // max(1, use.shape.numel()))
    total: Tensor | None = None
    for start in range(0, pieces, several):
        few = slice(start * each, min(start + several, pieces) * each)
        some = use if few == slice(0, len(factors)) else use.part(few)
        found = some.weighted_sums(factors[few].view(-1, each)).sum(0, dtype=torch.float64)
        total = found if total is None else total.add_(found)
    assert total is not None  # more than one piece
    rest = slice(pieces * each, len(factors))
    return total + _summed(use.part(rest), factors[rest]) if rest.start < rest.stop else total


def _group(groups: Groups | None, name: str) -> int:
    return groups[name] if groups else 0
