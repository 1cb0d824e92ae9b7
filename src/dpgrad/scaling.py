"""Scaling rules: from the norms of the examples' gradients and the clip bound to the factors of the gradients.

Every rule is clip over a denominator that is never below the norm, so that no example contributes more than ``clip``.

>>> import torch
>>> norms = torch.tensor([0.0, 1.0, 2.0, 8.0, float("nan")])
>>> Hard()(norms, clip=2.0)
tensor([1.0000, 1.0000, 1.0000, 0.2500, 0.0000])
>>> bool((Psasc(s=0.5)(norms, clip=2.0)[:4] * norms[:4] <= 2.0).all())
True

The papers print weights, which are not all bounded by the same constant. A paper's C, s, r and learning rate can be
typed as printed when the clip bound of the mechanism is set to ``rule.sensitivity(C)``: the factors are then the
weights of the paper, and the noise, which is a multiple of the clip bound, is the noise of the paper.

>>> rule = Psasc(s=0.5, r=0.01)
>>> rule.sensitivity(0.2)
0.4
>>> printed = 0.2 / (0.5 * norms[:4] + 0.01 / (norms[:4] + 0.01))
>>> torch.allclose(rule(norms[:4], clip=rule.sensitivity(0.2)), printed)
True
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpgrad import _validate, kernels

# A norm is the root of a sum of squares: a coordinate below 1.1e-19, the root of the least normal float32, may be lost.
# All that 10^12 such coordinates can hide stays below this r. So a gradient that is measured as zero, and that Auto-S
# multiplies by clip/r, still contributes no more than clip.
LEAST_R = 1e-12


class ScaleRule(Protocol):
    """How much of each example's gradient is kept: the role that engines ask for.

    Guarantee:
        For every norm n that is finite and at least 0, the factor f is finite, at least 0 and f·n ≤ ``clip``, exactly,
        as numbers and not as floats. For n = inf, NaN or below zero the factor is 0. A rule sees one norm at a time.

    >>> rule: ScaleRule = Hard()
    >>> rule(torch.tensor([3.0]), 1.5)
    tensor([0.5000])
    """

    def __call__(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        """The factor of each norm; ``norms`` (..., examples), ``clip`` a number or (groups, 1)."""


class Quotient(ABC):
    """A rule of the form clip/denominator, rounded down; a new rule says its denominator and its sensitivity.

    Norms of lower precision than float32 give factors in float32. A number as ``clip`` must be positive and finite. A
    tensor is not looked at, so that a captured graph can change it; where it is not positive and finite, factors are 0.

    Guarantee:
        That of `ScaleRule`, for the norms as given (how far those are from the truth is for the engine to say), if
        ``denominator`` d is never below the norm. For then n·f ≤ d·f, and d·f ≤ clip because f is at most clip/d: it
        is the float below the one nearest to clip/d, or 1 where clip = d.

    >>> @dataclass(frozen=True)
    ... class Half(Quotient):
    ...     def denominator(self, norms, clip):
    ...         return 2 * norms
    ...
    ...     def sensitivity(self, C):
    ...         return C
    >>> Half()(torch.tensor([1.0, 2.0]), 1.0)
    tensor([0.5000, 0.2500])
    """

    @abstractmethod
    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        """What divides ``clip``, never below ``norms``; in float64, as both arguments are."""

    @abstractmethod
    def sensitivity(self, C: float) -> float:
        """The bound on weight times norm in the paper's own form: the clip bound that makes factors its weights."""

    def weights(self, norms: Tensor, C: float) -> Tensor:
        """The weights as the paper prints them for its constant C, rounded down: factors at clip = sensitivity(C).

        >>> Psac(r=0.01).weights(torch.tensor([0.0, 1.0]), C=0.3)
        tensor([0.3000, 0.2971])
        """
        return self(norms, self.sensitivity(C))

    def __call__(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        """The factor of each norm; ``norms`` (..., examples), ``clip`` a number or (groups, 1)."""
        bound = _bound(norms, clip)
        exact = norms.double()
        # Sums and quotients round to the nearest float64, and rounding keeps order: n + x is not below n for x ≥ 0.
        denominator = self.denominator(exact, bound)
        if norms.dtype == torch.float32 and norms.ndim == 2 and norms.numel() and kernels.runs_on(norms):
            from dpgrad.kernels.factors import quotient

            if bound.shape in ((), (len(norms), 1)):  # one number, or one a group
                return quotient(norms.contiguous(), bound.contiguous(), denominator.expand_as(norms).contiguous())
        dtype = torch.float64 if norms.dtype == torch.float64 else torch.float32
        nearest = (bound / denominator).to(dtype)
        # One float towards zero brings it below the quotient, infinity to the largest float; 1 stays where it is exact.
        factors = torch.nextafter(nearest, (denominator == bound).to(dtype))
        usable = (exact >= 0) & (bound > 0) & (bound < math.inf)  # NaN is none of these; n = inf has the factor 0
        return torch.where(usable, factors, 0)


def _bound(norms: Tensor, clip: float | Tensor) -> Tensor:
    """The clip bound in float64, with the arguments of a rule checked as far as can be without reading a device."""
    given: object = norms  # a caller may ignore types
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise ValueError(f"norms must be a tensor of floats, got {_kind(given)}")
    if not isinstance(clip, Tensor):
        _validate.positive(clip=clip)
        # a tensor on its device: clip / norms, with a number clip, would be computed as clip times the reciprocal
        return norms.new_full((), float(clip), dtype=torch.float64)
    if not clip.is_floating_point():
        raise ValueError(f"clip must be a number or a tensor of floats, got {_kind(clip)}")
    pairs = zip(reversed(clip.shape), reversed(norms.shape), strict=False)
    if clip.dim() > norms.dim() or any(c not in (1, n) for c, n in pairs):
        raise ValueError(
            f"clip must broadcast to the shape of norms, {tuple(norms.shape)}, got {tuple(clip.shape)}: "
            "give one clip, or (groups, 1) for norms (groups, examples)"
        )
    if clip.device != norms.device:  # also for a single number: a captured graph would keep the value it has now
        raise ValueError(f"clip must be on the device of norms, {norms.device}, got {clip.device}: move it there")
    return clip.double()


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else _validate.shown(value)


def _checked_r(r: float) -> float:
    _validate.positive(r=r)
    if r < LEAST_R:
        raise ValueError(f"r must be at least {LEAST_R}, got {_validate.shown(r)}: smaller norms are lost to rounding")
    return float(r)


@dataclass(frozen=True)
class Hard(Quotient):
    """min(1, clip/‖g‖): gradients within the bound are kept, longer ones are shortened to it (Abadi et al., 2016).

    >>> Hard().weights(torch.tensor([0.5, 4.0]), C=1.0)
    tensor([1.0000, 0.2500])
    """

    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        """max(‖g‖, clip)."""
        return torch.maximum(norms, clip)

    def sensitivity(self, C: float) -> float:
        """C: the weight is min(1, C/‖g‖).

        >>> Hard().sensitivity(0.3)
        0.3
        """
        _validate.positive(C=C)
        return float(C)


@dataclass(frozen=True)
class Automatic(Quotient):
    """clip/(‖g‖ + r): every gradient is brought to nearly the same norm (Auto-S, Bu et al.; NSGD, Yang et al.).

    The factor falls with the norm, from clip/r at zero.

    >>> Automatic(r=0.25)(torch.tensor([0.0, 0.75]), clip=1.0)
    tensor([4.0000, 1.0000])
    """

    r: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "r", _checked_r(self.r))

    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        """‖g‖ + r."""
        return norms + self.r

    def sensitivity(self, C: float) -> float:
        """1, whatever C is: the weight is 1/(‖g‖ + r) (Huang et al., 2024, Eqs. 2 and 3).

        >>> Automatic().sensitivity(0.3)
        1.0
        """
        _validate.positive(C=C)
        return 1.0


@dataclass(frozen=True)
class Psac(Quotient):
    """clip/(‖g‖ + r/(‖g‖ + r)): nearly clip/‖g‖ for long gradients, clip at zero (DP-PSAC, Xia et al., 2023).

    C only rescales the learning rate: (C, η) and (1, C·η) make the same updates.

    >>> Psac(r=0.25)(torch.tensor([0.0, 0.25, 100.0]), clip=1.0)
    tensor([1.0000, 1.3333, 0.0100])
    """

    r: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "r", _checked_r(self.r))

    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        """‖g‖ + r/(‖g‖ + r)."""
        return norms + self.r / (norms + self.r)

    def sensitivity(self, C: float) -> float:
        """C: the weight is C/(‖g‖ + r/(‖g‖ + r)) (Huang et al., 2024, Eq. 4).

        >>> Psac().sensitivity(0.3)
        0.3
        """
        _validate.positive(C=C)
        return float(C)


@dataclass(frozen=True)
class Psasc(Quotient):
    """clip/(‖g‖ + r/(s·(‖g‖ + r))): DP-PSASC (Huang et al., 2024), whose weight is C/(s·‖g‖ + r/(‖g‖ + r)), Eq. 6.

    The printed weight is bounded by C/s, so the factor is the weight for clip = C/s. At clip = C the factor is s times
    the weight, and the learning rate has to be divided by s for the same updates. The weight is C at zero; for s·r ≤ 1
    it is largest, C/(1 − (1 − √(s·r))²), at ‖g‖ = √(r/s) − r, and that falls as s grows.

    s = 1 is `Psac`, and the paper looks for s < 1. The factors then lie below those of `Psac` at the same clip bound,
    hence the same noise, at every norm (Eq. 7): the larger weight comes with a noise that is larger still. For s > 1,
    which is accepted too, that comparison turns round; nothing else changes.

    >>> Psasc(s=0.5, r=0.25)(torch.tensor([0.0, 0.25, 100.0]), clip=1.0)
    tensor([0.5000, 0.8000, 0.0100])
    """

    s: float
    r: float = 0.01

    def __post_init__(self) -> None:
        _validate.positive(s=self.s)
        object.__setattr__(self, "s", float(self.s))
        object.__setattr__(self, "r", _checked_r(self.r))

    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        """‖g‖ + r/(s·(‖g‖ + r))."""
        return norms + self.r / (self.s * (norms + self.r))

    def sensitivity(self, C: float) -> float:
        """C/s.

        >>> Psasc(s=0.8).sensitivity(0.2)
        0.25
        """
        _validate.positive(C=C)
        return float(C) / self.s


# Every rule, for the tests that all of them must pass.
RULES: tuple[type[Quotient], ...] = (Hard, Automatic, Psac, Psasc)
