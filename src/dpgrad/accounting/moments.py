"""The moments accountant of Abadi et al. (2016), three ways; the third is history, not a guarantee.

With μ₀ = N(0, σ²), μ₁ = N(1, σ²) and μ = (1−q)μ₀ + qμ₁, a step has α(λ) = log max(E₁, E₂), where

    E₁ = E_{z∼μ₀}[(μ₀(z)/μ(z))^λ],      E₂ = E_{z∼μ}[(μ(z)/μ₀(z))^λ]          (their Eqs. 3 and 4);

α adds up over steps (Thm. 2.1), and the tail bound (Thm. 2.2) is δ = min_λ e^{α(λ) − λε}, that is
ε = min_λ (α(λ) + log(1/δ))/λ. As in the authors' code λ runs over 1, …, 32, the Rényi orders 2, …, 33.

`account` integrates E₁ and E₂ numerically, `closed` takes E₂ as a binomial sum, `asymptotic` takes the leading term of
the paper's bound without its O(q³/σ³), which understates: it has `guarantee` False and can calibrate nothing.
"""

import math
import operator
import sys
from dataclasses import dataclass, field

import numpy as np
from scipy.special import gammaln, xlog1py, xlogy

from dpgrad import _validate
from dpgrad.accounting import pairs, rdp
from dpgrad.accounting.events import Event, Gaussian, Leaf, Poisson, Relation, fold, leaves
from dpgrad.accounting.pairs import Array, Kind, Pair
from dpgrad.errors import AccountingError

__all__ = ["ASYMPTOTIC", "CLOSED", "MOMENTS", "NAME", "MomentsProfile", "account", "asymptotic", "closed"]

NAME = "moments"
CLOSED = "moments-closed"
ASYMPTOTIC = "moments-asymptotic"
MOMENTS = np.arange(1, 33)  # λ


@dataclass(frozen=True)
class MomentsProfile:
    """The tail bound over the moments ``log_moments``, one for each λ of `MOMENTS`."""

    event: Event
    relation: Relation
    log_moments: Array = field(repr=False, compare=False)
    accountant: str = NAME
    guarantee: bool = True

    def epsilon(self, delta: float) -> float:
        """min_λ (α(λ) + log(1/δ))/λ; zero where nothing was released."""
        _validate.open_unit(delta=delta)
        if not self.log_moments.any():
            return 0.0
        return max(float(((self.log_moments - math.log(delta)) / MOMENTS).min()), 0.0)

    def delta(self, epsilon: float) -> float:
        """min_λ e^{α(λ) − λε}, at most 1; zero only where nothing was released."""
        _validate.non_negative(epsilon=epsilon)
        if not self.log_moments.any():
            return 0.0
        return max(math.exp(min(float((self.log_moments - MOMENTS * epsilon).min()), 0.0)), sys.float_info.min)


def account(event: Event, relation: Relation = Relation.ADD_REMOVE) -> MomentsProfile:
    """The moments accountant with α(λ) by numerical integration.

    Replace-one, which the paper does not treat, integrates the moments of the pair that dominates the step.

    >>> from dpgrad.accounting.events import Repeat
    >>> profile = account(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000))
    >>> round(profile.epsilon(1e-5), 7)
    1.2585747

    Guarantee: (epsilon(δ), δ)-private for every δ, for neighbours under ``relation``.
    """
    relation = Relation(relation)
    distinct = list(leaves(event))
    worst = np.zeros((len(MOMENTS), len(distinct)))
    for direction in pairs.directions(relation):
        found = [pairs.of(leaf, relation, direction) for leaf in distinct]
        seen = np.array([pair.sampling_rate > 0 for pair in found], bool)
        batch = [pair for pair in found if pair.sampling_rate > 0]
        for row, moment in zip(worst, MOMENTS, strict=True):
            row[seen] = np.maximum(row[seen], rdp.tilts(batch, float(moment))[0])
    return MomentsProfile(event, relation, _total(event, dict(zip(distinct, worst.T, strict=True))))


def closed(event: Event, relation: Relation = Relation.ADD_REMOVE) -> MomentsProfile:
    """The moments accountant with α(λ) in closed form.

    λ(λ+1)/2σ² at q = 1, and for Poisson sampling

        E₂ = Σ_k C(λ+1, k)·(1−q)^{λ+1−k}·q^k·e^{k(k−1)/2σ²},

    which is 1 plus the sum over k ≥ 2 with e^x − 1 for e^x: no term cancels. E₁ ≤ E₂ at every λ (Mironov, Talwar and
    Zhang 2019, Thm. 5), so E₂ alone decides.

    >>> from dpgrad.accounting.events import Repeat
    >>> round(closed(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000)).epsilon(1e-5), 7)
    1.2585747

    Guarantee: (epsilon(δ), δ)-private for every δ, for neighbours under ``relation``.
    """
    relation = Relation(relation)
    distinct = list(leaves(event))
    found = [_closed_pair(leaf, relation) for leaf in distinct]
    sampling_rate, sigma = np.array([(pair.sampling_rate, pair.sigma) for pair in found]).reshape(-1, 2).T
    values = np.array([_binomial(sampling_rate, sigma, int(moment) + 1) for moment in MOMENTS])
    return MomentsProfile(event, relation, _total(event, dict(zip(distinct, values.T, strict=True))), CLOSED)


def asymptotic(event: Event, relation: Relation = Relation.ADD_REMOVE) -> MomentsProfile:
    """The paper's asymptotic α(λ) = q²λ(λ+1)/((1−q)σ²), its error term left out. Not a guarantee: it understates.

    >>> from dpgrad.accounting.events import Repeat
    >>> profile = asymptotic(Repeat(Poisson(0.01, Gaussian(0.5)), 100))
    >>> round(profile.epsilon(1e-5), 2), profile.guarantee  # the truth is 6.48
    (1.4, False)
    """
    relation = Relation(relation)
    one = {leaf: _asymptotic_moments(leaf, relation) for leaf in leaves(event)}
    return MomentsProfile(event, relation, _total(event, one), ASYMPTOTIC, guarantee=False)


def _total(event: Event, one: dict[Leaf, Array]) -> Array:
    """α(λ) of the whole from that of one application of each leaf."""
    nothing = np.zeros(len(MOMENTS))
    return fold(event, one.__getitem__, operator.mul, lambda parts: sum(parts, nothing))


def _closed_pair(leaf: Leaf, relation: Relation) -> Pair:
    pair = pairs.of(leaf, relation, pairs.directions(relation)[0])
    if pair.kind is not Kind.REMOVE:
        raise AccountingError(
            f"accountant {CLOSED} has no closed form for {type(leaf).__name__} sampling under {relation}: "
            f"use accountant {NAME} or pld"
        )
    return pair


def _binomial(sampling_rate: Array, sigma: Array, order: int) -> Array:
    """log E₂ at λ + 1 = ``order`` for each step: (steps,)."""
    k = np.arange(2, order + 1)
    x = k * (k - 1) / (2 * sigma[:, None] ** 2)  # (steps, k)
    log_choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    taken, left = xlogy(k, sampling_rate[:, None]), xlog1py(order - k, -sampling_rate[:, None])
    chance = log_choose + taken + left  # at q = 1 only k = λ + 1
    with np.errstate(divide="ignore"):  # noise beyond 1e150: x is 0
        top = np.logaddexp.reduce(chance + x + np.log(-np.expm1(-x)), axis=1)
    return np.asarray(np.where(top > 0, np.logaddexp(0.0, top), np.log1p(np.exp(np.minimum(top, 0)))))


def _asymptotic_moments(leaf: Leaf, relation: Relation) -> Array:
    match leaf:
        case Poisson(q, Gaussian(z)) if q < 1 and relation is not Relation.REPLACE_ONE:
            return np.asarray(q**2 * MOMENTS * (MOMENTS + 1) / ((1 - q) * z**2))
        case _:
            sampling_rate = leaf.sampling_rate if isinstance(leaf, Poisson) else 1.0
            raise AccountingError(
                f"accountant {ASYMPTOTIC} has a form for Poisson sampling at a rate below 1 under add-remove or "
                f"zero-out only, got {type(leaf).__name__} at rate {sampling_rate:g} under {relation}: use "
                "accountant pld"
            )
