"""Scaling rules: functions from gradient norms and the clip bound to the factor of each example's gradient.

Every rule here is clip divided by a denominator that is never below the norm, so no example contributes more than
``clip``.

>>> import torch
>>> norms = torch.tensor([0.0, 1.0, 2.0, 8.0, float("nan")])
>>> Hard()(norms, clip=2.0)
tensor([1.0000, 1.0000, 1.0000, 0.2500, 0.0000])
>>> bool((Psasc(s=0.5)(norms, clip=2.0)[:4] * norms[:4] <= 2.0).all())
True

The papers print weights, whose bounds differ. To type a paper's C, s, r and learning rate as printed, set the clip
bound of the mechanism to ``rule.sensitivity(C)``. The factors are then the paper's weights, and the noise, a multiple
of the clip bound, is the paper's noise.

>>> rule = Psasc(s=0.5, r=0.01)
>>> rule.sensitivity(0.2)
0.4
>>> printed = 0.2 / (0.5 * norms[:4] + 0.01 / (norms[:4] + 0.01))
>>> torch.allclose(rule(norms[:4], clip=rule.sensitivity(0.2)), printed)
True
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpgrad import _triton, _validate
from dpgrad.errors import OptionError

__all__ = ["LEAST_R", "RULES", "Automatic", "Bounded", "Hard", "Psac", "Psasc", "Quotient", "ScaleRule", "fault"]

# A norm is the root of a sum of squares: a coordinate below 1.1e-19, the root of the least normal float32, may be lost.
# The norm of 10^12 such coordinates stays below this r. So a gradient that is measured as zero, and that Auto-S
# multiplies by clip/r, still contributes at most clip.
LEAST_R = 1e-12


class ScaleRule(Protocol):
    """The interface of a scaling rule: ``rule(norms, clip)`` returns the factor of each example's gradient.

    Your own function may take this role. Write it in torch operations on ``norms``; `Bounded` enforces the guarantee.

    Guarantee:
        For every finite norm n ≥ 0, the factor f is finite, f ≥ 0 and f·n ≤ ``clip`` in exact arithmetic, not only in
        floats. For n = inf, NaN or n < 0 the factor is 0. The factors of an example depend on its own norms alone.

    >>> rule: ScaleRule = Hard()
    >>> rule(torch.tensor([3.0]), 1.5)
    tensor([0.5000])
    """

    def __call__(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        """The factor of each norm; ``norms`` (..., examples), ``clip`` a number or (groups, 1)."""


class Quotient(ABC):
    """A rule of the form clip/denominator, rounded down. A new rule defines its denominator and its sensitivity.

    Norms below float32 precision give float32 factors. A number as ``clip`` must be positive and finite. A tensor is
    not read, because a captured graph may change it; if it is not positive and finite, the factors are 0.

    Guarantee:
        That of `ScaleRule` for the norms as given (the engine accounts for their error), if ``denominator`` d is never
        below the norm: n·f ≤ d·f ≤ clip, because f ≤ clip/d. f is the float below the one nearest to clip/d, or 1 if
        clip = d.

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
        """Return the denominator of ``clip``, never below ``norms``; arguments and result are float64."""

    @abstractmethod
    def sensitivity(self, C: float) -> float:
        """Return the paper's bound on weight × norm: the clip bound at which the factors equal the paper's weights."""

    def weights(self, norms: Tensor, C: float) -> Tensor:
        """Return the paper's weights for its constant C, rounded down: the factors at clip = sensitivity(C).

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
        own = type(self) not in RULES  # runs inside vmap, where there is no memory that a kernel could read
        if not own and norms.dtype == torch.float32 and norms.ndim == 2 and norms.numel() and _triton.runs_on(norms):
            from dpgrad.grads.kernels.factors import quotient

            if bound.shape in ((), (len(norms), 1)):  # one number, or one a group
                return quotient(norms.contiguous(), bound.contiguous(), denominator.expand_as(norms).contiguous())
        dtype = torch.float64 if norms.dtype == torch.float64 else torch.float32
        nearest = (bound / denominator).to(dtype)
        # One float towards zero brings it below the quotient, infinity to the largest float; 1 stays where it is exact.
        factors = torch.nextafter(nearest, (denominator == bound).to(dtype))
        usable = (exact >= 0) & (bound > 0) & (bound < math.inf)  # NaN is none of these; n = inf has the factor 0
        return torch.where(usable, factors, 0)


def _bound(norms: Tensor, clip: float | Tensor) -> Tensor:
    """The clip bound in float64; checks the arguments of a rule without reading values from a device."""
    given: object = norms  # a caller may ignore types
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise OptionError(f"norms must be a tensor of floats, got {_kind(given)}")
    if not isinstance(clip, Tensor):
        _validate.positive(clip=clip)
        # a tensor on its device: clip / norms, with a number clip, would be computed as clip times the reciprocal
        return norms.new_full((), float(clip), dtype=torch.float64)
    if not clip.is_floating_point():
        raise OptionError(f"clip must be a number or a tensor of floats, got {_kind(clip)}")
    pairs = zip(reversed(clip.shape), reversed(norms.shape), strict=False)
    if clip.dim() > norms.dim() or any(c not in (1, n) for c, n in pairs):
        raise OptionError(
            f"clip must broadcast to the shape of norms, {tuple(norms.shape)}, got {tuple(clip.shape)}: "
            "give one clip, or (groups, 1) for norms (groups, examples)"
        )
    if clip.device != norms.device:  # also for a single number: a captured graph would keep the value it has now
        raise OptionError(f"clip must be on the device of norms, {norms.device}, got {clip.device}: move it there")
    return clip.double()


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else _validate.shown(value)


def _checked_r(r: float) -> float:
    _validate.positive(r=r)
    if r < LEAST_R:
        raise OptionError(f"r must be at least {LEAST_R}, got {_validate.shown(r)}: smaller norms are lost to rounding")
    return float(r)


@dataclass(frozen=True)
class Hard(Quotient):
    """Clipping, min(1, clip/‖g‖): shorten gradients longer than the clip bound to it (Abadi et al., 2016).

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
    """Automatic clipping, clip/(‖g‖ + r): bring all gradients to nearly the same norm.

    Auto-S of Bu et al., NSGD of Yang et al. The factor falls with the norm, from clip/r at zero.

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
    """DP-PSAC, clip/(‖g‖ + r/(‖g‖ + r)): nearly clip/‖g‖ for long gradients, clip at zero (Xia et al., 2023).

    C only rescales the learning rate: (C, η) and (1, C·η) give the same updates.

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
    """DP-PSASC, clip/(‖g‖ + r/(s·(‖g‖ + r))) (Huang et al., 2024).

    The paper's weight is C/(s·‖g‖ + r/(‖g‖ + r)), Eq. 6. It is bounded by C/s, so the factor equals the weight for
    clip = C/s. At clip = C the factor is s times the weight; divide the learning rate by s for the same updates. The
    weight is C at zero. For s·r ≤ 1 its maximum is C/(1 − (1 − √(s·r))²), at ‖g‖ = √(r/s) − r; the maximum falls as s
    grows.

    s = 1 is `Psac`; the paper considers s < 1. At the same clip bound, hence the same noise, the factors are then below
    those of `Psac` at every norm (Eq. 7): the weight is larger, but its noise is larger still. s > 1 is accepted and
    reverses that comparison.

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


# All rules; each must pass the same tests.
RULES: tuple[type[Quotient], ...] = (Hard, Automatic, Psac, Psasc)


@dataclass(frozen=True)
class Bounded:
    """A rule at one clip bound, with the guarantee of `ScaleRule` enforced: norms (groups, examples) to factors.

    The rules in `RULES` keep the guarantee by construction. Any other rule is applied to each example alone, inside
    ``torch.vmap``. Its factors are lowered to clip/norm if they are larger, and set to 0 if negative or not finite.

    Guarantee: that of `ScaleRule`, whatever the rule returns and whatever it does to its arguments. Not covered: a rule
    that remembers norms between calls and that `fault` did not detect, or one that reads the data elsewhere.

    >>> norms = torch.tensor([[0.5, 2.0, 8.0]])
    >>> Bounded(lambda norms, clip: 10 * clip / norms, clip=2.0)(norms)
    tensor([[4.0000, 1.0000, 0.2500]])
    >>> Bounded(lambda norms, clip: norms.max() / norms, clip=2.0)(norms)  # each norm is the largest of its example
    tensor([[1.0000, 1.0000, 0.2500]])
    """

    rule: ScaleRule
    clip: float | Tensor  # a number, or (groups, 1)

    def __call__(self, norms: Tensor) -> Tensor:
        """The factor of each norm."""
        if type(self.rule) in RULES:
            return self.rule(norms, self.clip)
        return _within(norms, _each_alone(self.rule, norms, self.clip), self.clip)


def _each_alone(rule: ScaleRule, norms: Tensor, clip: float | Tensor) -> Tensor:
    """The rule's factors, (groups, examples), from the (groups, 1) norms of one example at a time.

    It gets copies, so norms or bounds that it changes in place do not change what its factors are checked against.
    """
    if not norms.shape[-1]:
        return torch.zeros_like(norms)
    bound = clip.clone() if isinstance(clip, Tensor) else clip
    asked = torch.Size((len(norms), 1))

    def alone(own: Tensor) -> Tensor:
        found: Any = rule(own, bound)  # a caller may ignore types
        factors = found if isinstance(found, Tensor) else torch.as_tensor(found, dtype=norms.dtype, device=norms.device)
        if factors.is_complex() or not (factors.shape == asked or factors.numel() == 1):
            raise OptionError(
                f"rule must return one real factor per norm, {tuple(asked)} for one example, got "
                f"{tuple(factors.shape)} of {factors.dtype}"
            )
        return factors.to(norms.dtype).reshape(asked if factors.shape == asked else ()).expand(asked)

    try:
        found: Tensor = torch.vmap(alone)(norms.clone().T[:, :, None])
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the rule raises
        raise OptionError(
            "rule must act on each norm alone, in torch operations such as torch.where and clamp, without branches on "
            f"values and without random numbers; {type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"
        ) from error
    return found[:, :, 0].T


def _within(norms: Tensor, factors: Tensor, clip: float | Tensor) -> Tensor:
    """The factors, lowered to the float below clip/norm if above it, and 0 if negative or not finite."""
    bound, exact = _bound(norms, clip), norms.double()
    nearest = (bound / exact.abs()).to(norms.dtype)  # −0 is a norm of 0
    most = torch.nextafter(nearest, torch.zeros_like(nearest))  # the largest float where the quotient is beyond it
    usable = factors.isfinite() & (factors >= 0) & (exact >= 0) & exact.isfinite() & (bound > 0) & (bound < math.inf)
    return torch.where(usable, torch.minimum(factors, most), 0)


_PROBES = 1000  # norms at which a rule is tried
_DECADES = 9.0  # how far below and above the clip bound they reach
_AGREEMENT = 1e-3  # how far two ways to compute a rule may differ by rounding


def fault(rule: ScaleRule, clips: Sequence[float | Tensor], device: torch.device | str = "cpu") -> str:
    """Describe what `Bounded` has to correct in a rule; empty if the rule keeps the guarantee by itself.

    The rule is tried at fixed norms around each clip bound, independent of any data. A rule is refused if it cannot be
    applied to each example alone, mixes the norms of examples, or remembers earlier ones.

    >>> fault(lambda norms, clip: (clip / norms).clamp(max=1), [2.0])
    ''
    >>> fault(lambda norms, clip: 3 * clip / norms, [2.0])
    'rule gives a norm of 2e-09 the factor 3e+09 at clip 2, more than clip/norm'
    >>> fault(lambda norms, clip: clip / norms.max(), [2.0])
    Traceback (most recent call last):
    dpgrad.errors.OptionError: rule must act on each norm alone, but the factor of an example changes with ...
    """
    if type(rule) in RULES:
        return ""
    found = [words for clip in clips if (words := _fault_at(rule, clip, device))]
    return found[0] if found else ""


def _fault_at(rule: ScaleRule, clip: float | Tensor, device: torch.device | str) -> str:
    bounds = torch.as_tensor(clip, dtype=torch.float64, device=device).view(-1, 1)
    decades = torch.linspace(-_DECADES, _DECADES, _PROBES, dtype=torch.float64, device=device)
    norms = (bounds * 10**decades).float()  # (groups, probes)
    factors = _each_alone(rule, norms, clip)
    _each_alone(rule, norms[:, : _PROBES // 2] * 3, clip)
    if not _alike(factors, _each_alone(rule, norms, clip)):
        raise OptionError(
            "rule must be a function of its arguments, but the same norms got other factors: keep no state"
        )
    if not _alike(factors, _all_at_once(rule, norms, clip)):
        raise OptionError(
            "rule must act on each norm alone, but the factor of an example changes with the norms of others: one "
            "example would then change the share of all, which no clip bound covers"
        )
    bad = ~(factors >= 0) | ~factors.isfinite() | (factors.double() * norms.double() > bounds * (1 + _AGREEMENT))
    if not bool(bad.any()):
        return ""
    group, place = (int(at[0]) for at in bad.nonzero(as_tuple=True))
    norm, factor, bound = float(norms[group, place]), float(factors[group, place]), float(bounds[group])
    wrong = "more than clip/norm" if 0 <= factor < math.inf else "which is no factor"
    return f"rule gives a norm of {norm:.3g} the factor {factor:.3g} at clip {bound:.3g}, {wrong}"


def _all_at_once(rule: ScaleRule, norms: Tensor, clip: float | Tensor) -> Tensor:
    """The rule's factors for all examples in one call, as its author has probably tried it."""
    found: Any = rule(norms.clone(), clip.clone() if isinstance(clip, Tensor) else clip)
    factors = torch.as_tensor(found, dtype=norms.dtype, device=norms.device)
    return factors.expand_as(norms) if factors.numel() == 1 else factors


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=_AGREEMENT, atol=0.0, equal_nan=True)
