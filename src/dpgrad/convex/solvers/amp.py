"""Approximate Minima Perturbation: objective perturbation whose minimiser need not be exact (Iyengar et al., S&P 2019).

ε is spent three ways: ε₂ for the noise on the output, and ε₁ = ε − ε₂ on the objective, of which ε₃ for its noise and
the rest for the determinants; δ = δ₁ + δ₂ for the objective and the output. In the sum of the losses,

    Λ = r·β/(ε₁ − ε₃),      b₁ ~ N(0, s₁²),  s₁ = m·L·(1 + √(2·log(1/δ₁)))/ε₃,      ‖∇J(w̃)‖ ≤ n·γ,  γ = 1/n²,

and w̃ + b₂ is released, b₂ being Gaussian for the sensitivity 2nγ/Λ at (ε₂, δ₂). r = m = 2 under replace-one, which is
the paper's relation; r = m = 1 otherwise. β is the true curvature bound of the loss: the authors' code has L² for every
loss, four times too much for the logistic one and a fifth of the truth for their Huber SVM, whose guarantee fails. The
output noise is that of the exact Gaussian mechanism for the distance between two approximate minimisers, which is twice
the distance to the exact one.

**Why it holds.** The determinants take log(1 + β/Λ) ≤ (ε₁ − ε₃)/r (`objective`). The noise takes h(D) = (‖D‖² +
2D·b)/2s₁², where D lies in the span of at most two fixed directions and ‖D‖ ≤ mL. With μ = mL/s₁ and χ the length of a
standard normal in that plane, h ≤ μ²/2 + μχ, and χ ≤ t = √(2·log(1/δ₁)) but with probability δ₁; as μ = ε₃/(1 + t),
then h ≤ ε₃ if μ ≤ 2. Any loss of one score will do.

>>> import numpy as np
>>> from dpgrad.accounting import exact
>>> from dpgrad.convex.design import Design
>>> from dpgrad.convex.losses import Logistic
>>> design = Design(np.array([[1.0], [-1.0]] * 500), radius=1.0)
>>> plan = tuning_free(1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE)
>>> coefficients, event = solve(design, np.array([1.0, -1.0] * 500), Logistic(), plan, key=7)
>>> bool(coefficients[0, 0] > 1), bool(exact.account(event, Relation.REPLACE_ONE).epsilon(1e-6) <= 1)
(True, True)
"""

import math

from dpgrad import _validate
from dpgrad.accounting.events import Relation
from dpgrad.convex.losses import RowLoss
from dpgrad.convex.solvers import gd, perturbed
from dpgrad.convex.solvers.perturbed import Perturbation, solve
from dpgrad.errors import OptionError

__all__ = ["calibrated", "solve", "tuning_free"]


def calibrated(
    rows: int,
    loss: RowLoss,
    *,
    radius: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    noise_share: float,
    output_share: float = 0.01,
    ridge: float = 0.0,
    models: int = 1,
    unit: float = 1.0,
) -> Perturbation:
    """The perturbation at given shares: ε₂ = output_share·ε, δ₂ = output_share·δ, ε₃ = noise_share·ε₁.

    The paper tunes noise_share over .9, .95, .98, .99, output_share over .001, .01, .1, .5 and radius over .1, 1, 10.
    ``radius`` is ``design.bound``; ``rows`` as for `gd.calibrated`. Λ is the least that the precondition allows, or
    ``ridge`` if that is larger. ``models`` such fits on the same rows get ε and δ divided by their number. ``unit`` is
    what the length of rows is measured in: γ = unit/n², so rows and radius in other units give the same fit.

    Guarantee: 0 < ε₁ − ε₃ < 1 and Λ ≥ r·β/(ε₁ − ε₃) are enforced, and so is μ ≤ 2.

    >>> from dpgrad.convex.losses import Logistic
    >>> plan = calibrated(
    ...     1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE, noise_share=0.9
    ... )
    >>> round(plan.ridge, 3), round(plan.scale, 3), plan.tolerance
    (5.051, 14.048, 0.001)
    """
    checked = perturbed.curved(loss, "amp")
    _validate.whole(least=1, models=models)
    _validate.positive(epsilon=epsilon, unit=unit)
    _validate.non_negative(ridge=ridge)
    _validate.open_unit(noise_share=noise_share, output_share=output_share)
    gd.check_delta(delta, rows)
    output_epsilon, output_delta = output_share * epsilon / models, output_share * delta / models
    first, first_delta = epsilon / models - output_epsilon, delta / models - output_delta
    noise = noise_share * first
    m, tail = perturbed.moved(relation), math.sqrt(-2 * math.log(first_delta))
    if noise > 2 * (1 + tail):
        raise OptionError(
            f"amp needs a noise share of epsilon of at most {2 * (1 + tail):.6g} at this delta, got {noise:.6g}: "
            "lower epsilon or use gd"
        )
    if first - noise >= 1:
        raise OptionError(
            f"amp needs epsilon of the objective less that of its noise below 1, got {first - noise:.6g}: "
            f"raise noise_share above {1 - 1 / first:.6g}"
        )
    lam = max(m * checked.smoothness(radius) / (first - noise), ridge)
    lipschitz = checked.lipschitz(radius)
    std = m * lipschitz * (1 + tail) / noise
    gamma = max(unit / rows, perturbed.tolerance(rows, lipschitz, std))
    return perturbed.approximate(
        checked, radius, rows, relation,
        ridge=lam, std=std, tolerance=gamma, first=(first, first_delta), output=(output_epsilon, output_delta),
    )  # fmt: skip


def tuning_free(
    rows: int,
    loss: RowLoss,
    *,
    radius: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    ridge: float = 0.0,
    models: int = 1,
    unit: float = 1.0,
) -> Perturbation:
    """The perturbation without tuning (AMP-NT): output_share .01 and the noise share that the authors fitted to ε.

    f = max(min(.88671 + .0186607·ε^{−.372906}, .99), 1 − 1/ε + .001), at the ε of one model. The fit was made with the
    authors' β = L²: for the logistic loss ``ridge`` of four times the least is theirs, which helps where p is large.

    >>> from dpgrad.convex.losses import Logistic
    >>> plan = tuning_free(1000, Logistic(), radius=1.0, epsilon=0.1, delta=1e-6, relation=Relation.REPLACE_ONE)
    >>> round(plan.ridge, 2)
    72.93
    """
    _validate.positive(epsilon=epsilon)
    _validate.whole(least=1, models=models)
    one = epsilon / models
    share = max(min(0.88671 + 0.0186607 / one**0.372906, 0.99), 1 - 1 / one + 0.001)
    share = min(share, 1 - 1e-9)  # beyond an epsilon of 1000, where `calibrated` refuses its noise
    return calibrated(
        rows, loss,
        radius=radius, epsilon=epsilon, delta=delta, relation=relation, noise_share=share, ridge=ridge, models=models,
        unit=unit,
    )  # fmt: skip
