"""The pairs of distributions on the line whose privacy loss bounds one step, for every sampler and relation.

A pair (P, Q) *dominates* a step if its hockey-stick divergence H_α(P‖Q) = ∫(P − αQ)₊ is at least the step's for all
α ≥ 0 and all neighbours; dominating pairs compose (Zhu, Dong and Wang, 2022). In units of the clip bound, with noise
N(0, σ²) and sampling rate q, each of ours is

    P = (1−q)·N(0) + q·N(1)   or N(0),          Q = N(0)   or   (1−q)·N(0) + q·N(−1),

so the loss is L(x) = log P/Q = [P is shifted]·ℓ(x) − [Q is shifted]·ℓ(−x) with ℓ(x) = log(1 − q + q·e^{(x−½)/σ²}),
increasing in x and invertible in closed form.

**remove** (P shifted) and **add** (Q shifted) are Poisson sampling under add/remove and zero-out; both directions
must be composed and the worse one reported.

**antipodal** (both shifted) is Poisson sampling under replace-one. It is symmetric under x → −x: one direction serves
both.

**larger** is fixed-size sampling under replace-one. With the same rows drawn around it, an exchanged row shifts the
sum by at most 2 clips with probability q; every such step is dominated by the *pointwise maximum* of the remove and
the add profile at noise σ/2 (the pair of the maximum is composed; the maximum of the two composed profiles is not a
bound). The maximum is the remove profile where ε ≥ 0 and the add profile where ε ≤ 0, so its loss distribution is
that of add below zero, that of remove above, and an atom at zero.

**A group of k rows** that change together: each takes part with probability q, so N(1) becomes the mixture Σ_j b_j N(j)
with j ~ Binomial(k, q), and N(−1) its mirror image (`_shifts`; docs/proofs/groups.md). Full batches and shuffled epochs
move k times as far.

**Noise levels and rates interpolate.** For fixed q each profile is convex in s = 2Φ(κ/σ) − 1, so a step at σ between
two nodes is dominated by the mixture of the nodes with weights linear in s. Mixtures of nodes in q dominate too:
interpolate in one, then in the other.

The proofs that the antipodal pair dominates and that profiles interpolate are in docs/proofs/pairs.md.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from dpgrad.accounting._shifts import GroupShifts, shifts
from dpgrad.accounting.events import (
    Approximate,
    DiscreteGaussian,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    Leaf,
    Pinned,
    Poisson,
    RandomizedResponse,
    Relation,
    Selection,
    Shifted,
    Shuffle,
    TruncatedPoisson,
)
from dpgrad.errors import AccountingError

__all__ = ["Array", "Kind", "Pair", "TooLittleNoise", "directions", "of"]

Array = NDArray[np.float64]

_HALF_LOG_2PI = 0.5 * np.log(2 * np.pi)


class TooLittleNoise(AccountingError):  # noqa: N818
    """A step has less noise than an accountant can price."""


class Kind(StrEnum):
    """Which of the two distributions is shifted."""

    REMOVE = "remove"
    ADD = "add"
    ANTIPODAL = "antipodal"
    LARGER = "larger"


@dataclass(frozen=True)
class Pair:
    """One dominating pair: ``kind`` at sampling rate ``rate`` and noise ``sigma`` in units of the shift.

    >>> pair = Pair(Kind.REMOVE, 0.01, 1.0)
    >>> round(float(pair.loss(pair.place(np.array([0.5])))[0]), 12)
    0.5
    """

    kind: Kind
    sampling_rate: float
    sigma: float
    group: int = 1  # how many rows change together, each drawn with probability ``rate``

    @property
    def up(self) -> bool:
        """P is the shifted distribution (of ``larger``: for positive losses)."""
        return self.kind is not Kind.ADD

    @property
    def down(self) -> bool:
        """Q is the shifted distribution."""
        return self.kind in (Kind.ADD, Kind.ANTIPODAL)

    def loss(self, x: Array) -> Array:
        """log P/Q at x."""
        total = np.zeros_like(x)
        if self.up:
            total += self._log_ratio(x)
        if self.down:
            total -= self._log_ratio(-x)
        return total

    def _log_ratio(self, x: Array) -> Array:
        """The log-density of the shifted distribution at x, less that of N(0)."""
        if self.group > 1:
            return self.shifts.log_ratio(x, self.sigma**2)
        return _log_mixture(self.sampling_rate, (x - 0.5) / self.sigma**2)

    @property
    def shifts(self) -> GroupShifts:
        """How far a group moves the sum."""
        return shifts(self.sampling_rate, self.group)

    def log_p(self, x: Array, loss: Array | None = None) -> Array:
        """The log-density of P at x; ``loss`` is that at x, where it is known already."""
        base = -((x / self.sigma) ** 2) / 2 - np.log(self.sigma) - _HALF_LOG_2PI
        if not self.up:
            return np.asarray(base)
        if loss is None or self.down:
            return np.asarray(base + self._log_ratio(x))
        return np.asarray(base + loss)

    def place(self, loss: Array) -> Array:
        """The x at which the loss is taken; ∓∞ outside its range."""
        variance = self.sigma**2
        if self.group > 1:
            if self.kind is Kind.ANTIPODAL:
                return self.shifts.balanced(loss, variance)
            sign = -1.0 if self.kind is Kind.ADD else 1.0
            return np.asarray(sign * self.shifts.inverse(sign * loss, variance))
        if self.kind is Kind.ANTIPODAL:
            # qe^{z−1/2σ²} − e^L·qe^{−z−1/2σ²} = (1−q)(e^L−1), z = L/2 + u: sinh u = (1−q)/q·e^{1/2σ²}·sinh(L/2)
            with np.errstate(divide="ignore"):
                log_sinh = np.abs(loss) / 2 + np.log(-np.expm1(-np.abs(loss)) / 2)
                log_v = np.log1p(-self.sampling_rate) - np.log(self.sampling_rate) + 0.5 / variance + log_sinh
            u = np.where(
                log_v < 0, np.arcsinh(np.exp(np.minimum(log_v, 0))), log_v + np.log1p(np.hypot(1, _exp_neg(log_v)))
            )
            return np.asarray(variance * (loss / 2 + np.copysign(u, loss)))
        if self.kind is Kind.ADD:
            return -(variance * _inverse_mixture(self.sampling_rate, -loss) + 0.5)
        return variance * _inverse_mixture(self.sampling_rate, loss) + 0.5

    def mass(self, left: Array | float, right: Array | float) -> Array:
        """P's mass between left and right, which may be infinite."""
        if self.up and self.group > 1:
            return self.shifts.mass(left, right, self.sigma)
        plain = _interval(left / self.sigma, right / self.sigma)
        if not self.up:
            return plain
        shifted = _interval((left - 1.0) / self.sigma, (right - 1.0) / self.sigma)
        return np.asarray((1 - self.sampling_rate) * plain + self.sampling_rate * shifted)

    def top(self, tail: float) -> float:
        """An x above which about ``tail`` of P lies."""
        if self.up and self.group > 1:
            return self.shifts.top(tail, self.sigma)
        return (1.0 if self.up else 0.0) - float(ndtri(tail)) * self.sigma

    @property
    def most(self) -> float:
        """The largest loss; of ``add``, P is never more than 1/(1 − q)ᵏ times as likely as Q."""
        return -self.group * float(np.log1p(-self.sampling_rate)) if self.kind is Kind.ADD else np.inf

    @property
    def kappa(self) -> float:
        """The profile is convex in 2Φ(κ/σ) − 1: see the module's proof."""
        return 1.0 if self.kind is Kind.ANTIPODAL else 0.5


def _interval(a: Array | float, b: Array | float) -> Array:
    """Φ(b) − Φ(a), from the nearer tail."""
    flip = a > 0
    return np.asarray(ndtr(np.where(flip, -a, b)) - ndtr(np.where(flip, -b, a)))


def _exp_neg(v: Array) -> Array:
    return np.asarray(np.exp(-np.maximum(v, 0)))


def _log_mixture(sampling_rate: float, y: Array) -> Array:
    """log(1 − q + q·e^y), to full relative precision where it is small."""
    if sampling_rate == 1:
        return y
    found = np.log1p(sampling_rate * np.expm1(np.minimum(y, 30)))
    large = y > 30
    if np.any(large):
        found = np.where(large, np.logaddexp(np.log1p(-sampling_rate), np.log(sampling_rate) + y), found)
    return np.asarray(found)


def _inverse_mixture(sampling_rate: float, loss: Array) -> Array:
    """The y with log(1 − q + q·e^y) = loss; −∞ at and below log(1 − q)."""
    if sampling_rate == 1:
        return loss
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a tiny rate puts a loss at infinity
        small = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30)) / sampling_rate, -1))
        large = loss - np.log(sampling_rate) + np.log1p(-(1 - sampling_rate) * _exp_neg(loss))
    return np.where(loss < 30, small, large)


def directions(relation: Relation) -> tuple[Kind, ...]:
    """The directions that must be composed, each by itself."""
    return (Kind.ANTIPODAL,) if Relation(relation) is Relation.REPLACE_ONE else (Kind.REMOVE, Kind.ADD)


def of(leaf: Leaf, relation: Relation, direction: Kind, group: int = 1) -> Pair:
    """The pair that dominates one application of ``leaf`` where ``group`` rows change; what has none is refused."""
    relation = Relation(relation)  # a name that is no relation must never be priced as another
    # A full-batch Gaussian under replace-one moves by 2 clips. Its pair is symmetric, so REMOVE at rate 1 serves.
    shift = float(relation.reach * group)
    match leaf:
        case Gaussian(z):
            return Pair(Kind.REMOVE, 1.0, z / shift)
        case Poisson(q, Gaussian(z)) if q == 1:
            return Pair(Kind.REMOVE, 1.0, z / shift)
        case Poisson(q, Gaussian(z)):
            return Pair(direction, q, z, group if q else 1)
        case Shuffle(_, Gaussian(z)):
            if relation is Relation.ADD_REMOVE:
                raise AccountingError(
                    "shuffle has no price under add-remove: batches of a fixed size reveal the number of rows; "
                    "use relation zero-out or replace-one, or the Poisson sampler"
                )
            return Pair(Kind.REMOVE, 1.0, z / shift)
        case FixedSize(_, _, Gaussian(z)):
            if relation is not Relation.REPLACE_ONE:
                raise AccountingError(
                    f"fixed-size sampling has no price under {relation}: a sample of fixed size that loses a row gains "
                    "another; use relation replace-one, or the Poisson sampler"
                )
            if leaf.sampling_rate == 1:
                return Pair(Kind.REMOVE, 1.0, z / shift)
            if group > 1:
                raise AccountingError(
                    "fixed-size sampling has no pair for several rows that change together: their price follows from "
                    "that of one row"
                )
            return Pair(Kind.LARGER, leaf.sampling_rate, z / shift)
        case Pinned(inner, declared):
            if declared is not relation:
                raise AccountingError(
                    f"a release whose noise was counted for {declared} neighbours has no price under {relation}: "
                    f"ask for relation {declared}"
                )
            return of(inner, relation, direction, group)
        case Approximate() | Shifted() | Laplace() | DiscreteGaussian() | RandomizedResponse() | Exponential():
            raise AccountingError(
                f"{type(leaf).__name__} has no price by this accountant: use accountant pld, exact or rdp"
            )
        case Selection():
            raise AccountingError("a selection among trials has no price by this accountant: use accountant rdp")
        case TruncatedPoisson():
            raise AccountingError(
                "truncated Poisson sampling has no price by this accountant: use accountant pld or rdp"
            )
        case _:
            raise AccountingError(f"unknown event {leaf!r}: no pair is known to dominate it")
