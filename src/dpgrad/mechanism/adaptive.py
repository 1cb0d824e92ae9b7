"""A clip bound that follows a noisy quantile of the gradient norms, charged in the same step.

Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private learning with adaptive clipping" (2021). In addition to
the clipped gradients, a step sums bᵢ − ½, where bᵢ says whether the norm of example i is at most the clip bound C: it
falls from 1 at 0.95·C to 0 at 1.05·C. If it fell at once, as in the paper, the rounding of norms, which may depend on
the number of rows in a batch, could change the answers of all rows at the bound when one row is added. With noise of
standard deviation σ_b on that count, the next clip bound is C·exp(−η(b̃ − γ)), where b̃ is the noisy share and γ the
quantile that is aimed at.

Guarantee: one example adds at most C to the sum and ½ to the count, and the count is one more coordinate of the sum. A
step of noise multiplier z remains one of noise multiplier z where the gradients get z_Δ = (z⁻² − (2σ_b)⁻²)^(−½).
Exchanging an example moves both parts twice as far, as `Relation.reach` says. The proof is in docs/proofs/adaptive.md.

>>> rule = AdaptiveClip(quantile=0.5, learning_rate=0.2)
>>> round(rule.following(1.0, noisy_count=50.0, batch_size=100.0), 4)  # every norm is below: the bound shrinks
0.9048
"""

import math
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.mechanism.schedules import Array

__all__ = ["FAR", "WIDTH", "AdaptiveClip"]

_SHARE = 20  # the paper's σ_b is the expected batch size over this
FAR = 1e6  # the clip bound stays within this factor of its start
WIDTH = 0.05  # relative, of the norms on each side of the bound that count in part
_ROUNDING = 1e-14  # what rounding may have taken from the noise of the gradients, many times over


@dataclass(frozen=True)
class AdaptiveClip:
    """How the clip bound follows the norms: ``quantile`` is the share of examples that should not be clipped.

    ``learning_rate`` is η of the geometric update. ``noise`` is σ_b, the standard deviation of the noise on the count
    of one step. Without one it is that of the paper, a twentieth of the expected batch size, and at least √k times the
    noise multiplier for k groups, at which counting takes a quarter of what the step may reveal.

    >>> AdaptiveClip.parse("0.7:0.1")
    AdaptiveClip(quantile=0.7, learning_rate=0.1, noise=None)
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        _validate.number(**{"quantile of adaptive_clip": self.quantile})
        if not 0 <= self.quantile <= 1:
            raise OptionError(f"quantile of adaptive_clip must lie in [0, 1], got {_validate.shown(self.quantile)}")
        _validate.positive(**{"learning_rate of adaptive_clip": self.learning_rate})
        if self.noise is not None:
            _validate.positive(**{"noise of adaptive_clip": self.noise})

    @classmethod
    def parse(cls, text: "str | float | AdaptiveClip") -> "AdaptiveClip":
        """The rule that ``QUANTILE``, ``QUANTILE:ETA`` or ``QUANTILE:ETA:NOISE`` names; a rule is returned as it is.

        >>> AdaptiveClip.parse("half")
        Traceback (most recent call last):
        dpgrad.errors.OptionError: adaptive_clip must be QUANTILE, QUANTILE:ETA or QUANTILE:ETA:NOISE, got 'half'
        """
        if isinstance(text, cls):
            return text
        given: object = text  # a caller may ignore types
        parts = given.split(":") if isinstance(given, str) else [given]
        values: list[float] = []
        with suppress(ValueError):
            values = [
                float(part) for part in parts if isinstance(part, str | float | int) and not isinstance(part, bool)
            ]
        if len(values) != len(parts) or len(values) > 3:
            shown = _validate.shown(given)
            raise OptionError(f"adaptive_clip must be QUANTILE, QUANTILE:ETA or QUANTILE:ETA:NOISE, got {shown}")
        return cls(*values)

    def following(self, clip: float, noisy_count: float, batch_size: float, start: float | None = None) -> float:
        """The next clip bound: clip·exp(−η(b̃ − γ)), b̃ = noisy_count/batch_size + ½; the count is that of bᵢ − ½.

        It stays within a factor of a million of ``start``, and is finite and positive whatever the noise was.
        """
        share = noisy_count / batch_size + 0.5
        exponent = min(max(-self.learning_rate * (share - self.quantile), -50.0), 50.0)
        start = clip if start is None else start
        return min(max(clip * math.exp(exponent), start / FAR), start * FAR)

    def count_stds(self, multipliers: Array, groups: int, batch_size: float) -> Array:
        """σ_b of steps by their noise multiplier, for as many groups, each of which has a count."""
        if self.noise is not None:
            return np.full_like(multipliers, self.noise)
        return np.maximum(batch_size / _SHARE, math.sqrt(groups) * multipliers)

    def widening(self, multipliers: Array, groups: int, batch_size: float) -> Array:
        """z_Δ/z of steps by their noise multiplier z: how much more noise the gradients get.

        >>> AdaptiveClip(noise=1.0).widening(np.array([1.0]), groups=1, batch_size=100.0).round(4)
        array([1.1547])
        """
        stds = self.count_stds(multipliers, groups, batch_size)
        taken = groups * (multipliers / (2 * stds)) ** 2
        if (taken >= 1).any():
            least = math.sqrt(groups) * float(multipliers.max()) / 2
            raise OptionError(
                f"noise of adaptive_clip must be above {least:.6g}, half the noise multiplier"
                f"{'' if groups == 1 else f' times the root of {groups} groups'}, got {self.noise:g}: with less, the "
                "count alone reveals more than a step may; give more, or leave it out"
            )
        return np.asarray((1 - taken) ** -0.5 * (1 + _ROUNDING))
