"""Objective perturbation: the minimiser of the losses plus a random linear term, tight and classic.

    minimise J(w) = Σᵢ lossᵢ(w) + (λ/2)·‖w‖² + b·w,        b ~ N(0, std²) or of density ∝ e^{−‖b‖/scale}

and release it with the small noise of `perturbed`, which pays for solving numerically. L bounds the gradient of one row
and β its curvature; the loss is a function of one score, so its Hessian has rank one.

**Tight** (`calibrated`), for margin losses, whose derivative has one sign. Between neighbours the log of the ratio of
densities has two parts: the determinants of the Hessians, at most s = log(1 + β/λ), and the noise. With ε′ = ε − s ≥ 0,
δ(ε) is at most the profile at ε′ of a Gaussian that moves by L/std under zero-out and 2L/std under replace-one. The
proof is in docs/proofs/objective.md.

The event is `Shifted`(s, Gaussian). Several such releases compose almost as Gaussians do (`accounting.exact`).

**Classic.** `approximate` takes the Gaussian of Kifer et al., `pure` the noise of Chaudhuri et al. that is private with
δ = 0; both hold for any loss of one score, and say so by an `Approximate` event.

>>> import numpy as np
>>> from dpgrad.convex.design import Design
>>> design = Design(np.array([[1.0], [-1.0]] * 500), radius=1.0)
>>> plan = calibrated(1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE)
>>> coefficients, event = solve(design, np.array([1.0, -1.0] * 500), Logistic(), plan, key=7)
>>> bool(coefficients[0, 0] > 2), bool(exact.account(event, Relation.REPLACE_ONE).epsilon(1e-6) <= 1)
(True, True)
"""

import math

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.calibrate import least
from dpgrad.accounting.events import Approximate, Compose, Event, Gaussian, Pinned, Relation, Repeat, Shifted, together
from dpgrad.convex.losses import HuberSvm, Logistic, RowLoss
from dpgrad.convex.solvers import gd, perturbed
from dpgrad.convex.solvers.perturbed import Law, Perturbation, solve
from dpgrad.errors import BudgetSpentError, OptionError

__all__ = ["approximate", "calibrated", "pure", "solve"]

OUTPUT_SHARE = 0.01  # of μ², or of ε and δ, for the noise that covers the numerical solution
_LEAST_NOISE, _MOST_NOISE = 0.01, 1e9
# Of the loss, by the determinants. A ridge that lets them take more is so small that it depends on the rows whether
# float64 finds the minimiser (from 18 on for HuberSvm), and helps no one: at 10 it is 5e-5 of the largest curvature.
_MOST_SHIFT = 10.0


def calibrated(
    rows: int,
    loss: RowLoss,
    *,
    radius: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    ridge: float = 0.0,
    shift_share: float = 0.1,
    models: int = 1,
    share: float = 1.0,
) -> Perturbation:
    """The tight perturbation with the least Gaussian noise that is (ε, δ)-private.

    ``radius`` is ``design.bound``; ``rows`` as for `gd.calibrated`. The ridge λ is the least for which the determinants
    take no more than ``shift_share`` of ε, nor more than 10, or ``ridge`` if that is larger. ``models`` such fits on
    the same rows share the budget; ``share`` as for `gd.calibrated`.

    Guarantee: by docs/proofs/objective.md, for Logistic and HuberSvm under zero-out and replace-one. Add/remove is
    refused: the accuracy of the minimiser, and so whether one is found, depends on the number of rows.

    >>> plan = calibrated(1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT)
    >>> round(plan.ridge, 3), round(plan.scale, 3)
    (2.377, 4.682)
    """
    if not isinstance(perturbed.curved(loss, "objective"), Logistic | HuberSvm):
        raise OptionError(
            f"the tight calibration needs a margin loss, whose derivative has one sign, got {loss!r}: use Logistic or "
            "HuberSvm, or objective.approximate"
        )
    _check(rows, epsilon, models, shift_share, ridge, relation)
    gd.check_delta(delta, rows)
    lam, shift = _ridge(loss, radius, epsilon / models, ridge, shift_share)

    def event_of(multiplier: float) -> Event:
        first = Shifted(shift, Gaussian(multiplier / math.sqrt(1 - OUTPUT_SHARE)))
        return Compose((first, Pinned(Gaussian(multiplier / math.sqrt(OUTPUT_SHARE)), relation)))

    others = gd.others(share, epsilon, delta, relation)

    def price(multiplier: float) -> float:
        fits = Repeat(event_of(multiplier), models)
        return exact.account(together(fits, others), relation).epsilon(delta)

    if price(_MOST_NOISE) > epsilon:
        raise BudgetSpentError(
            f"objective cannot divide epsilon {epsilon!r} among {models:,} models at delta {delta:g}: use auto or gd, "
            "which have all scores in one model"
        )
    multiplier = least(price, epsilon, low=_LEAST_NOISE, high=_MOST_NOISE)
    lipschitz = loss.lipschitz(radius)
    std = lipschitz * multiplier / math.sqrt(1 - OUTPUT_SHARE)
    gamma = perturbed.tolerance(rows, lipschitz, std)
    output = 2 * gamma / lam / perturbed.moved(relation) * multiplier / math.sqrt(OUTPUT_SHARE)
    return Perturbation(
        perturbed.curved(loss, "objective"), radius, rows, Relation(relation), lam, Law.GAUSSIAN, std, output, gamma,
        event_of(multiplier),
    )  # fmt: skip


def approximate(
    rows: int,
    loss: RowLoss,
    *,
    radius: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    ridge: float = 0.0,
    models: int = 1,
) -> Perturbation:
    """The perturbation of Kifer, Smith and Thakurta (2012): λ ≥ 2β/ε and std = m·L·√(8·log(2/δ) + 4ε)/ε.

    m is 2 under replace-one and 1 otherwise. ``models`` fits get ε and δ divided by their number.

    Guarantee: the determinants take log(1 + β/λ) ≤ ε/2. D lies in the span of at most two fixed directions and is no
    longer than mL, so the noise takes μ²/2 + μχ with μ = mL/std and χ the length of a standard normal in the plane,
    beyond T = √(2·log(2/δ)) with probability δ/2. With u = ε/(T² + ε), μ = ε/2√(T² + ε) and
    (μT + μ²/2)/(ε/2) = √(1 − u) + u/4 ≤ 1. Any loss of one score will do. A hundredth of ε and δ goes to b₂.

    >>> plan = approximate(1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT)
    >>> round(plan.ridge, 3), round(plan.scale, 3)
    (0.505, 11.07)
    """
    checked = perturbed.curved(loss, "objective")
    _check(rows, epsilon, models, 0.5, ridge, relation)
    gd.check_delta(delta, rows)
    one, small = epsilon * (1 - OUTPUT_SHARE) / models, delta * (1 - OUTPUT_SHARE) / models
    lam = max(2 * checked.smoothness(radius) / one, ridge)
    lipschitz, m = checked.lipschitz(radius), perturbed.moved(relation)
    std = m * lipschitz * math.sqrt(8 * math.log(2 / small) + 4 * one) / one
    gamma = perturbed.tolerance(rows, lipschitz, std)
    output = epsilon * OUTPUT_SHARE / models, delta * OUTPUT_SHARE / models
    return perturbed.approximate(
        checked, radius, rows, relation, ridge=lam, std=std, tolerance=gamma, first=(one, small), output=output
    )


def pure(
    rows: int,
    loss: RowLoss,
    *,
    radius: float,
    epsilon: float,
    relation: Relation,
    ridge: float = 0.0,
    shift_share: float = 0.5,
    models: int = 1,
) -> Perturbation:
    """The perturbation of Chaudhuri, Monteleoni and Sarwate (2011), private with δ = 0: b of density ∝ e^{−‖b‖·ε′/mL}.

    ε′ is what the determinants leave, ε − log(1 + β/λ); the paper counts their logarithm twice under replace-one, which
    a Hessian of rank one does not need. Its ridge takes half of ε where the given one is too small.

    Guarantee: ‖b + D‖ − ‖b‖ ≤ ‖D‖ ≤ mL, so the noise takes ε′ at most, for any loss of one score. A hundredth of ε goes
    to b₂, of the same law. ``models`` fits get ε divided by their number.

    >>> plan = pure(1000, Logistic(), radius=1.0, epsilon=1.0, relation=Relation.REPLACE_ONE)
    >>> plan.law.value, round(plan.ridge, 3), round(plan.scale, 3), plan.event.delta
    ('gamma', 0.39, 4.04, 0.0)
    """
    checked = perturbed.curved(loss, "objective")
    _check(rows, epsilon, models, shift_share, ridge, relation)
    one, small = epsilon * (1 - OUTPUT_SHARE) / models, epsilon * OUTPUT_SHARE / models
    lam, shift = _ridge(checked, radius, one, ridge, shift_share)
    lipschitz = checked.lipschitz(radius)
    scale = perturbed.moved(relation) * lipschitz / (one - shift)
    # the noise is p times as long as its scale: this leaves room for rounding at millions of coefficients
    gamma = perturbed.tolerance(rows, lipschitz, 100 * scale)
    event = Approximate(epsilon / models, 0.0, relation)
    return Perturbation(
        checked, radius, rows, Relation(relation), lam, Law.GAMMA, scale, 2 * gamma / lam / small, gamma, event
    )


def _ridge(loss: RowLoss, radius: float, epsilon: float, ridge: float, share: float) -> tuple[float, float]:
    """λ and what the determinants take of ε at it."""
    beta = loss.smoothness(radius)
    lam = max(beta / math.expm1(min(share * epsilon, _MOST_SHIFT)), ridge)
    return lam, math.log1p(beta / lam)


def _check(rows: int, epsilon: float, models: int, share: float, ridge: float, relation: Relation) -> None:
    perturbed.moved(relation)
    _validate.whole(least=1, rows=rows, models=models)
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(shift_share=share)
    _validate.non_negative(ridge=ridge)
