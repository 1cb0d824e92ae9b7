"""From each example's gradient to the clipped sum: norms, factors, one weighted sum."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgrad.grads.precision import exact_products, norm_error
from dpgrad.grads.sums import ClippedSum, Groups, Scale
from dpgrad.grads.uses import Use


@dataclass(frozen=True)
class PerExample:
    """The gradient of every example, parameter by parameter. Private.

    >>> from dpgrad.grads.uses import Dense
    >>> gradients = PerExample({"weight": Dense(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))}, examples=2)
    >>> gradients.clipped(lambda norms: (1 / norms).clamp(max=1)).sums["weight"].round(decimals=2)
    tensor([0.6000, 1.3000])
    """

    uses: Mapping[str, Use]
    examples: int

    def clipped(self, scale: Scale, groups: Groups | None = None) -> ClippedSum:
        """Σᵢ (1−τ)·scale(nᵢ)·gᵢ, where nᵢ is the norm of example i, or of its part in each group of parameters.

        Guarantee: the norm of one example's term is at most (1−τ)·scale(nᵢ)·nᵢ(1+τ), so at most ``clip`` for a rule
        that keeps scale(n)·n ≤ clip. An example with a gradient that is not finite is left out of every group.
        """
        with torch.no_grad(), exact_products():
            norms, uses = self._measured(groups or {})
            keep = norms.isfinite().all(0)
            factors = torch.where(keep, scale(norms), 0) * (1 - norm_error(norms.dtype, self.examples))
            if not bool(keep.all()):
                uses = {name: use.kept(keep) for name, use in uses.items()}
            return ClippedSum({name: use.weighted_sum(factors[_group(groups, name)]) for name, use in uses.items()})

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
        return torch.stack([torch.zeros_like(first) if found is None else found for found in squares]).sqrt(), uses


def _group(groups: Groups | None, name: str) -> int:
    return groups[name] if groups else 0
