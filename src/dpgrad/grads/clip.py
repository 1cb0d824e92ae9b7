"""From each example's gradient to the clipped sum: norms, factors, one weighted sum."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgrad import _triton
from dpgrad.grads.precision import SUMMED_AT_ONCE, norm_error, own_products
from dpgrad.grads.sums import ClippedSum, Groups, Scale
from dpgrad.grads.uses import Dense, Outer, Use

__all__ = ["PerExample"]

_HELD = 1 << 22  # values of short sums that are held at a time


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
        with torch.no_grad(), own_products():
            norms, uses = self._measured(groups or {})
            factors, finite = _factors(norms, scale)
            if not bool(finite):
                keep = norms.isfinite().all(0)
                uses = {name: use.kept(keep) for name, use in uses.items()}
            return _weighted(uses, factors, groups)

    @contextmanager
    def clipped_if_finite(
        self, scale: Scale, groups: Groups | None = None
    ) -> Iterator[tuple[Callable[[str], Tensor], Tensor]]:
        """`clipped` parameter by parameter, and whether every example's gradient is finite, as a 0-d tensor.

        Nothing waits for the device. The sums are asked for by name, within the block.

        Guarantee: that of `clipped` where the flag is true. Elsewhere the sums are worthless and must not be used.
        """
        with torch.no_grad(), own_products():
            norms, uses = self._measured(groups or {})
            factors, finite = _factors(norms, scale)
            yield lambda name: _summed(uses[name], factors[_group(groups, name)]), finite

    def norms(self, groups: Groups | None = None) -> Tensor:
        """The norm of each example, (groups, examples), rounded upwards. Private."""
        with torch.no_grad(), own_products():
            return self._measured(groups or {})[0]

    def _measured(self, groups: Groups) -> tuple[Tensor, dict[str, Use]]:
        norms: list[list[Tensor]] = [[] for _ in range(max(groups.values(), default=0) + 1)]
        values = [0] * len(norms)
        uses = {}
        for name, use in self.uses.items():
            found, uses[name] = use.measured()
            group = _group(groups, name)
            norms[group].append(found)
            values[group] += use.shape.numel()
        like = next(found for of_group in norms for found in of_group)
        every = [
            _together(found, count + len(found)) if found else torch.zeros_like(like)
            for found, count in zip(norms, values, strict=True)
        ]
        return torch.stack(every) if len(every) > 1 else every[0][None], uses


def _together(parts: list[Tensor], squares: int) -> Tensor:
    """The norm of each example from those of its parts, made of so many squares.

    Guarantee: it is not below the norm: what squares below the least float have lost is added.
    """
    every = torch.stack(parts)
    lost = math.sqrt(squares * torch.finfo(every.dtype).tiny)
    if every.dtype == torch.float32 and _triton.runs_on(every):
        from dpgrad.grads.kernels.factors import together

        return together(every, lost)
    found: Tensor = torch.linalg.vector_norm(every, dim=0)
    return found + lost


def _factors(norms: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """(1−τ)·scale(nᵢ), 0 for an example that has a norm that is not finite, and whether there is none, a 0-d tensor."""
    shrink = 1 - norm_error(norms.dtype)
    factors = scale(norms)
    alike = factors.shape == norms.shape and factors.dtype == norms.dtype == torch.float32
    if alike and _triton.runs_on(norms, factors):
        from dpgrad.grads.kernels.factors import finite

        return finite(norms.contiguous(), factors.contiguous(), shrink)
    keep = norms.isfinite().all(0)
    return torch.where(keep, factors, 0) * shrink, keep.all()


def _weighted(uses: Mapping[str, Use], factors: Tensor, groups: Groups | None) -> ClippedSum:
    of_group = factors.unbind()
    return ClippedSum({name: _summed(use, of_group[_group(groups, name)]) for name, use in uses.items()})


def _summed(use: Use, factors: Tensor) -> Tensor:
    """Σ fᵢ Gᵢ, few terms at a time; τ accounts for the rounding of a short sum, and float64 needs no account.

    Guarantee: where a short sum ends does not depend on how many terms there are, or one more would change them all.
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
