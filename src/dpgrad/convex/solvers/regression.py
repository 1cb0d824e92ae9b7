"""Private linear regression from sufficient statistics: AdaSSP (Wang, "Revisiting differentially private linear
regression", UAI 2018).

    w = (XᵀX + E₁ + λI)⁻¹·(Xᵀy + E₂),          λ = max(0, √(p·log(2p²/ρ))·s₁ − λ̃_min)

for rows of norm at most R and targets in [−B, B]. Three Gaussian releases share μ² evenly:

    release              zero-out      replace-one    (sensitivity)
    XᵀX (Frobenius)      R²            √2·R²
    Xᵀy                  R·B           2R·B
    λ_min(XᵀX)           R²            R²             (xxᵀ − x′x′ᵀ has its eigenvalues in [−R², R²])

λ̃_min is the noisy smallest eigenvalue less its noise's quantile, so that, but with probability ρ, XᵀX + E₁ + λI is
positive definite and no larger than it has to be; the noise E₁ is symmetric, s₁ on its diagonal and s₁/√2 off it. The
alternative is `gd` on the loss `Squared(bound)`, whose residuals are cut.

>>> import numpy as np
>>> random = np.random.default_rng(7)
>>> rows = random.uniform(-1, 1, (5000, 2)) / np.sqrt(2)
>>> design = Design(rows, radius=1.0)
>>> plan = calibrated(5000, radius=1.0, target_bound=2.0, epsilon=1.0, delta=1e-8, relation=Relation.REPLACE_ONE)
>>> coefficients, event = solve(design, rows @ [1.0, -1.0], plan, key=7)
>>> bool(np.abs(coefficients[:, 0] - [1, -1]).max() < 0.2), event == plan.event
(True, True)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import Event, Gaussian, Pinned, Relation, Repeat
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Array, Squared
from dpgrad.convex.solvers import auto, gd
from dpgrad.mechanism.keys import AnyKey, Key

__all__ = ["FAILURE", "Statistics", "calibrated", "solve", "statistics"]

FAILURE = 0.05  # ρ: the chance that the ridge is too small


@dataclass(frozen=True)
class Statistics:
    """Three releases in public numbers; ``share`` is the μ of each."""

    radius: float
    target_bound: float
    relation: Relation
    share: float

    @property
    def event(self) -> Event:
        """Three Gaussian releases of the same price, under the relation that they were calibrated for."""
        return Repeat(Pinned(Gaussian(self.relation.reach / self.share), self.relation), 3)

    @property
    def moment_std(self) -> float:
        """s₁, of the noise on XᵀX: on its diagonal, and in the coordinates whose norm is Frobenius'."""
        return math.sqrt(self.relation.reach) * self.radius**2 / self.share

    @property
    def product_std(self) -> float:
        """The noise on each coordinate of Xᵀy."""
        return self.relation.reach * self.radius * self.target_bound / self.share

    @property
    def eigenvalue_std(self) -> float:
        """The noise on the smallest eigenvalue."""
        return self.radius**2 / self.share

    def ridge(self, smallest: float, features: int) -> float:
        """λ, from the noisy smallest eigenvalue.

        >>> plan = Statistics(1.0, 1.0, Relation.ZERO_OUT, share=1.0)
        >>> plan.ridge(1e9, features=2), round(plan.ridge(0.0, features=2), 4)
        (0.0, 3.186)
        """
        known = max(smallest - self.eigenvalue_std * float(-ndtri(FAILURE / 2)), 0.0)
        wanted = math.sqrt(features * math.log(2 * features**2 / FAILURE)) * self.moment_std
        return max(wanted - known, 0.0)


def calibrated(
    rows: int,
    *,
    radius: float,
    target_bound: float,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> Statistics:
    """The releases with the least noise that are (ε, δ)-private together.

    ``radius`` is ``design.bound`` and ``target_bound`` B, both chosen without looking at the data; ``rows`` as for
    `gd.calibrated`.

    Guarantee: by the exact profile of three Gaussian releases.

    >>> plan = calibrated(1000, radius=1.0, target_bound=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT)
    >>> exact.account(plan.event, Relation.ZERO_OUT).epsilon(1e-6) <= 1
    True
    """
    _validate.positive(radius=radius, target_bound=target_bound, epsilon=epsilon)
    gd.check_delta(delta, rows)
    share = exact.mu_for(epsilon, delta) * (1 - 1e-9) / math.sqrt(3)
    return Statistics(float(radius), float(target_bound), Relation(relation), share)


def solve(design: Design, targets: ArrayLike, plan: Statistics, *, key: AnyKey | None = None) -> tuple[Array, Event]:
    """The coefficients (features, 1) of AdaSSP, and the event of having found them.

    Targets beyond the bound are cut to it. ``key`` is fresh unless given; one key serves one run on one dataset.

    Guarantee: the event is that of ``plan``; rows longer than it was made for are refused. Everything read from the
    data is one of its three releases. Sums run in float64, and every row's part in a release is lowered by what
    rounding may add to it.
    """
    gd.check_design(design, plan.radius)
    checked = Squared(math.inf).checked(targets, design.rows)
    secret, p = Key.fresh() if key is None else Key.of(key), design.features
    moment, product = statistics(design, np.clip(checked, -plan.target_bound, plan.target_bound))
    smallest = float(np.linalg.eigvalsh(moment)[0]) + float(gd.gaussian(secret, 0, (1,), plan.eigenvalue_std)[0])
    noisy = moment + auto.symmetric_noise(secret, 1, p, plan.moment_std) + plan.ridge(smallest, p) * np.eye(p)
    target = product + gd.gaussian(secret, 2, (p, 1), plan.product_std)
    found: Array = np.linalg.lstsq(noisy, target, rcond=None)[0].astype(np.float64)
    return found, plan.event


def statistics(design: Design, targets: Array) -> tuple[Array, Array]:
    """XᵀX and Xᵀy, before any noise: (features, features) and (features, 1).

    Guarantee: the sensitivities of this module.

    >>> moment, product = statistics(Design([[1.0], [0.5]], radius=1.0), np.array([1.0, 2.0]))
    >>> moment.round(5).tolist(), product.round(5).tolist()
    ([[1.25]], [[2.0]])
    """
    product = design.gathered(targets[:, None]) * (1 - design.slack)
    return auto.second_moment(design) * design.rows, product
