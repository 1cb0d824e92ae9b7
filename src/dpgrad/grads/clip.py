"""From each example's gradient to the clipped sum: norms, factors, one weighted sum."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgrad.grads.precision import SUMMED_AT_ONCE, exact_products, norm_error
from dpgrad.grads.sums import ClippedSum, Groups, Scale
from dpgrad.grads.uses import Use

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
        with torch.no_grad(), exact_products():
            factors, keep, uses = self._factors(scale, groups)
            if not bool(keep.all()):
                uses = {name: use.kept(keep) for name, use in uses.items()}
            return _weighted(uses, factors, groups)

    def clipped_if_finite(self, scale: Scale, groups: Groups | None = None) -> tuple[ClippedSum, Tensor]:
        """`clipped`, and whether every example's gradient is finite, as a 0-d tensor, without waiting for the device.

        Guarantee: that of `clipped` where the flag is true. Elsewhere the sum is worthless and must not be used.
        """
        with torch.no_grad(), exact_products():
            factors, keep, uses = self._factors(scale, groups)
            return _weighted(uses, factors, groups), keep.all()

    def _factors(self, scale: Scale, groups: Groups | None) -> tuple[Tensor, Tensor, dict[str, Use]]:
        norms, uses = self._measured(groups or {})
        keep = norms.isfinite().all(0)
        return torch.where(keep, scale(norms), 0) * (1 - norm_error(norms.dtype)), keep, uses

    def norms(self, groups: Groups | None = None) -> Tensor:
        """The norm of each example, (groups, examples), rounded upwards. Private."""
        with torch.no_grad(), exact_products():
            return self._measured(groups or {})[0]

    def _measured(self, groups: Groups) -> tuple[Tensor, dict[str, Use]]:
        squares: list[Tensor | None] = [None] * (max(groups.values(), default=0) + 1)
        uses = {}
        for name, use in self.uses.items():
            found, uses[name] = use.measured()
            group = _group(groups, name)
            before = squares[group]
            squares[group] = found if before is None else before + found
        first = next(found for found in squares if found is not None)
        # The square of a product may be below the least float: what each parameter may have lost is added.
        lost = len(uses) * torch.finfo(first.dtype).tiny
        every = torch.stack([torch.zeros_like(first) if found is None else found for found in squares])
        return (every + lost).sqrt(), uses


def _weighted(uses: Mapping[str, Use], factors: Tensor, groups: Groups | None) -> ClippedSum:
    return ClippedSum({name: _summed(use, factors[_group(groups, name)]) for name, use in uses.items()})


def _summed(use: Use, factors: Tensor) -> Tensor:
    """Σ fᵢ Gᵢ, few terms at a time; τ accounts for the rounding of a short sum, and float64 needs no account."""
    if len(factors) <= SUMMED_AT_ONCE:
        return use.weighted_sum(factors)
    pieces = -(-len(factors) // SUMMED_AT_ONCE)
    each = len(factors) // pieces
    several = max(1, _HELD // max(1, use.shape.numel()))
    total = torch.zeros(use.shape, dtype=torch.float64, device=factors.device)
    for start in range(0, pieces, several):
        few = slice(start * each, min(start + several, pieces) * each)
        total += use.part(few).weighted_sums(factors[few].view(-1, each)).sum(0, dtype=torch.float64)
    rest = slice(pieces * each, len(factors))
    return total + _summed(use.part(rest), factors[rest]) if rest.start < rest.stop else total


def _group(groups: Groups | None, name: str) -> int:
    return groups[name] if groups else 0
