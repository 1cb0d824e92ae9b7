"""A claim as a curve: how many false negatives every test must make at each rate of false positives.

H₀: for all events S and all ε, in both orders of the two worlds, P(S) ≤ e^ε·Q(S) + δ(ε). Then every test has
FNR ≥ f(FPR) with the f of `dpgrad.accounting.curves` (Wasserman and Zhou 2010; Dong, Roth and Su 2022). A finite grid
of ε only lowers f, which makes a test conservative.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from dpgrad import _validate
from dpgrad.accounting import account
from dpgrad.accounting.curves import least_errors
from dpgrad.accounting.events import (
    Event,
    FixedSize,
    Gaussian,
    Leaf,
    Poisson,
    Relation,
    Repeat,
    Shuffle,
    leaves,
    together,
)
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.pld import PldProfile
from dpgrad.audit.exact import Array
from dpgrad.errors import OptionError
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["AnyClaim", "ClaimCurve", "Claimed", "Family", "claimed"]

_LEAST_DELTA = 1e-7  # at the largest ε of the grid; no audit sees events that are rarer
_PRECISION = 1e-3  # of δ; the bound stays certified
_POINTS = 24
_DELTA = 1e-5  # of the guarantee of a mechanism, which has none of its own


@runtime_checkable
class _Profiled(Protocol):
    def epsilon(self, delta: float) -> float: ...
    def delta(self, epsilon: float) -> float: ...


AnyClaim = object  # a Mechanism, Guarantee, profile or Curve, an estimator's privacy_, or a pair (ε, δ)


@dataclass(frozen=True, eq=False)
class ClaimCurve:
    """A claim at some ε: the δ(ε) that it promises, and the trade-off curve that follows.

    >>> curve = ClaimCurve.point(1.0, 0.0)
    >>> round(float(curve.f(np.array([0.1]))[0]), 4)
    0.7282
    """

    epsilons: Array
    deltas: Array

    @classmethod
    def point(cls, epsilon: float, delta: float) -> "ClaimCurve":
        """The claim of (ε, δ)-privacy alone."""
        _validate.non_negative(epsilon=epsilon)
        if not 0 <= delta < 1:
            raise OptionError(f"delta must lie in [0, 1), got {delta!r}")
        return cls(np.array([float(epsilon)]), np.array([float(delta)]))

    @classmethod
    def of(cls, profile: _Profiled, points: int = _POINTS) -> "ClaimCurve":
        """A whole profile, at ``points`` values of ε."""
        if isinstance(profile, PldProfile):
            profile = replace(profile, precision=max(profile.precision, _PRECISION))
        top = profile.epsilon(_LEAST_DELTA)
        if not math.isfinite(top):
            top = 50.0
        grid = np.concatenate([[0.0], np.linspace(0, 1, points)[1:] ** 1.5 * top])
        return cls(grid, np.array([min(1.0, max(0.0, profile.delta(float(epsilon)))) for epsilon in grid]))

    @classmethod
    def gaussian(cls, mu: float, points: int = 200) -> "ClaimCurve":
        """The claim of μ-Gaussian privacy."""
        from scipy import special

        _validate.positive(mu=mu)
        grid = np.linspace(0, mu * mu / 2 + 6 * mu, points)
        deltas = special.ndtr(mu / 2 - grid / mu) - np.exp(grid + special.log_ndtr(-mu / 2 - grid / mu))
        return cls(grid, np.clip(deltas, 0.0, 1.0))

    def f(self, false_positives: Array) -> Array:
        """The least rate of false negatives at each rate of false positives."""
        return least_errors(self.epsilons, self.deltas, np.asarray(false_positives, float))


@dataclass(frozen=True)
class Family:
    """The claimed mechanism with its noise multiplied by any factor."""

    event: Event
    relation: Relation
    accountant: str

    def at(self, factor: float) -> _Profiled:
        """The profile with ``factor`` times the noise."""
        found = account(_noisier(self.event, factor), self.relation, self.accountant)
        return replace(found, precision=_PRECISION) if isinstance(found, PldProfile) else found


@dataclass(frozen=True)
class Claimed:
    """A claim that was read: its words, its curve, and the family of mechanisms it belongs to, if that is known."""

    words: str
    curve: ClaimCurve
    family: Family | None = None
    guarantee: Guarantee | None = None


def claimed(claim: AnyClaim) -> Claimed:
    """Read a claim; anything else is refused.

    >>> claimed((1.0, 1e-5)).words
    'ε = 1 at δ = 1e-05'
    >>> claimed("private")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: claim must be a Mechanism, a Guarantee, a profile, a Curve or a pair (ε, δ), got ...
    """
    privacy = getattr(claim, "guarantee", None)
    if isinstance(privacy, Guarantee):  # a fitted run, a plan, the privacy_ of an estimator
        claim = privacy
    if isinstance(claim, Mechanism):
        family = Family(claim.event(), claim.relation, "pld")
        words = f"{claim.steps:,} steps, noise multiplier {claim.multiplier_at(0):.6g}, {claim.relation.value}"
        return Claimed(words, ClaimCurve.of(claim.profile()), _known(family), claim.guarantee(_DELTA))
    if isinstance(claim, Guarantee):
        if claim.group != 1:
            return Claimed(str(claim), ClaimCurve.point(claim.epsilon, claim.delta), None, claim)
        family = Family(claim.event, claim.relation, claim.accountant)
        curve = ClaimCurve.of(account(claim.event, claim.relation, claim.accountant))
        return Claimed(str(claim), curve, _known(family), claim)
    if isinstance(claim, ClaimCurve):
        return Claimed(f"a curve of {len(claim.epsilons)} points", claim)
    if isinstance(claim, tuple) and len(claim) == 2:
        _validate.number(epsilon=claim[0], delta=claim[1])
        epsilon, delta = map(float, claim)
        return Claimed(f"ε = {epsilon:g} at δ = {delta:g}", ClaimCurve.point(epsilon, delta))
    if isinstance(claim, PldProfile):
        family = Family(claim.event, claim.relation, claim.accountant)
        return Claimed("a privacy profile", ClaimCurve.of(claim), _known(family))
    if isinstance(claim, _Profiled) and not isinstance(claim, type):
        return Claimed("a privacy profile", ClaimCurve.of(claim))
    raise OptionError(
        f"claim must be a Mechanism, a Guarantee, a profile, a Curve or a pair (ε, δ), got {_validate.shown(claim)}"
    )


def _known(family: Family) -> Family | None:
    """The family, where every event in it is noise that can be multiplied."""
    kinds = (Gaussian, Poisson, FixedSize, Shuffle)
    return family if all(isinstance(leaf, kinds) for leaf in leaves(family.event)) else None


def _noisier(event: Event, factor: float) -> Event:
    return together(*(Repeat(_scaled(leaf, factor), count) for leaf, count in leaves(event).items()))


def _scaled(leaf: Leaf, factor: float) -> Leaf:
    match leaf:
        case Gaussian(multiplier):
            return Gaussian(multiplier * factor)
        case (
            Poisson(_, Gaussian(multiplier)) | FixedSize(_, _, Gaussian(multiplier)) | Shuffle(_, Gaussian(multiplier))
        ):
            return replace(leaf, event=Gaussian(multiplier * factor))
        case _:
            raise OptionError(f"noise of {leaf!r:.80} cannot be multiplied: give the claim as a pair (ε, δ)")
