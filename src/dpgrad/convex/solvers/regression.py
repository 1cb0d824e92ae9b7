"""Private linear regression from sufficient statistics: AdaSSP (Wang, "Revisiting differentially private linear
regression", UAI 2018).

    w = (XᵀX + E₁ + λI)⁻¹·(Xᵀy + E₂),          λ = max(0, √(p·log(2p²/ρ))·s₁ − λ̃_min)

for rows of norm at most R and targets in [−B, B]. Three Gaussian releases share μ² evenly:

    release              zero-out      replace-one    (sensitivity)
    XᵀX (Frobenius)      R²            √2·R²
    Xᵀy                  R·B           2R·B
    λ_min(XᵀX)           R²            R²             (xxᵀ − x′x′ᵀ has its eigenvalues in [−R², R²])

λ̃_min is the noisy smallest eigenvalue less its noise's quantile, so, except with probability ρ, XᵀX + E₁ + λI is
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
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import Compose, Event, Gaussian, Pinned, Relation, Repeat
from dpgrad.convex import chunked
from dpgrad.convex.design import Design, Rows, quiet
from dpgrad.convex.losses import Array, Squared, Targets
from dpgrad.convex.solvers import auto, gd
from dpgrad.convex.solvers.solved import Solved, Statistic
from dpgrad.mechanism.keys import AnyKey, Key

__all__ = ["FAILURE", "NoisyMoments", "Statistics", "calibrated", "released", "solve", "statistics"]

FAILURE = 0.05  # ρ: the chance that the ridge is too small


@dataclass(frozen=True)
class Statistics:
    """Three releases in public numbers; ``share`` is the μ of each.

    ``secure_columns`` is the number of columns where noise is to come from the secure source, else 0.
    """

    radius: float
    target_bound: float
    relation: Relation
    share: float
    secure_columns: int = 0

    @property
    def event(self) -> Event:
        """Three Gaussian releases of the same price, under the relation that they were calibrated for."""
        leaf = Pinned(Gaussian(self.relation.reach / self.share), self.relation)
        if not self.secure_columns:
            return Repeat(leaf, 3)
        return Compose(
            tuple(gd.with_distance(leaf, values) for values in (1, self.secure_columns**2, self.secure_columns))
        )

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

    @property
    def releases(self) -> tuple[Statistic, ...]:
        """The three releases, of equal price."""
        named = {
            "second moment": self.moment_std,
            "products with the target": self.product_std,
            "smallest eigenvalue": self.eigenvalue_std,
        }
        return tuple(Statistic(name, self.share * std, std, 1 / 3) for name, std in named.items())

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
    share: float = 1.0,
    secure_columns: int = 0,
) -> Statistics:
    """The releases with the least noise that are (ε, δ)-private together.

    ``radius`` is ``design.bound`` and ``target_bound`` B, both chosen without looking at the data; ``rows`` as for
    `gd.calibrated`, and so is ``share``. ``secure_columns`` is the number of columns where noise is to come from the
    secure source (docs/secure_noise.md), else 0.

    Guarantee: by the exact profile of three Gaussian releases.

    >>> plan = calibrated(1000, radius=1.0, target_bound=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT)
    >>> exact.account(plan.event, Relation.ZERO_OUT).epsilon(1e-6) <= 1
    True
    """
    _validate.positive(radius=radius, target_bound=target_bound, epsilon=epsilon)
    gd.check_delta(delta, rows)
    left = gd.below(delta, secure_columns**2 + secure_columns + 1 if secure_columns else 0)
    one = exact.mu_for(epsilon, left) * (1 - 1e-9) * math.sqrt(share / 3)
    return Statistics(float(radius), float(target_bound), Relation(relation), one, secure_columns)


@dataclass(frozen=True, eq=False)
class NoisyMoments:
    """The three releases as they came out: the moment (features, features), the products (features, 1), an eigenvalue.

    ``rows`` and ``constant`` say how many rows there were, and whether the last column is that of an intercept.
    """

    moment: Array
    product: Array
    smallest: float
    rows: int
    constant: bool

    def penalty(self, l2: float) -> Array:
        """What ``l2`` adds to the diagonal: n·l2, but nothing for the intercept."""
        found = np.full(len(self.moment), l2 * self.rows)
        if self.constant:
            found[-1] = 0.0
        return found

    def ridge(self, plan: Statistics, l2: float) -> Array:
        """What is added to the diagonal: ``l2`` where it exceeds what privacy needs."""
        return np.maximum(plan.ridge(self.smallest, len(self.moment)), self.penalty(l2))

    def coefficients(self, plan: Statistics, l2: float = 0.0) -> Array:
        """The coefficients (features, 1) by these statistics."""
        found = np.linalg.lstsq(self.moment + np.diag(self.ridge(plan, l2)), self.product, rcond=None)[0]
        return np.asarray(found, np.float64)


@quiet
def released(design: Rows, targets: ArrayLike, plan: Statistics, key: Key) -> NoisyMoments:
    """The three releases of ``plan``, with their noise.

    Guarantee: as for `solve`, which makes them.
    """
    gd.check_design(design, plan.radius)
    checked = chunked.checked(Squared(math.inf), targets, design.rows)
    key = gd.keyed(key, plan.secure_columns, design.features)
    cut = chunked.applied(partial(np.clip, a_min=-plan.target_bound, a_max=plan.target_bound), checked)
    moment, product = statistics(design, cut)
    stds = plan.eigenvalue_std, plan.moment_std, plan.product_std
    eigenvalues = np.asarray(np.linalg.eigvalsh(moment), np.float64)
    smallest = gd.noised(key, 0, eigenvalues[:1], plan.share * stds[0], stds[0])
    noisy = auto.noised_matrix(key, 1, moment, plan.share * stds[1], stds[1])
    target = gd.noised(key, 2, product, plan.share * stds[2], stds[2])
    return NoisyMoments(noisy, target, float(smallest[0]), design.rows, design.intercept > 0)


def solve(design: Rows, targets: ArrayLike, plan: Statistics, *, l2: float = 0.0, key: AnyKey | None = None) -> Solved:
    """The coefficients (features, 1) of AdaSSP, and the event of having found them.

    Targets beyond the bound are cut to it. ``l2`` is the weight of ‖w‖²/2 added to the mean loss, as in ridge
    regression, without a penalty on the intercept; it has an effect only above the least that privacy needs. ``key`` is
    fresh unless given; one key serves one run on one dataset.

    Guarantee: the event is that of ``plan``; rows longer than it was made for are refused. Everything read from the
    data is one of its three releases. Sums run in float64, and every row's part in a release is lowered by what
    rounding may add to it.
    """
    _validate.non_negative(l2=l2)
    secret = Key.fresh() if key is None else Key.of(key)
    found = released(design, targets, plan, secret).coefficients(plan, l2)
    return Solved(found, plan.event, plan.relation, "AdaSSP", secret.reproducible, plan.releases)


def statistics(design: Rows, targets: Targets) -> tuple[Array, Array]:
    """XᵀX and Xᵀy, before any noise: (features, features) and (features, 1).

    Guarantee: the sensitivities of this module.

    >>> moment, product = statistics(Design([[1.0], [0.5]], radius=1.0), np.array([1.0, 2.0]))
    >>> moment.round(5).tolist(), product.round(5).tolist()
    ([[1.25]], [[2.0]])
    """
    product = design.added(_product, targets) * (1 - design.slack)
    return auto.second_moment(design) * design.rows, product


def _product(design: Design, targets: Targets) -> Array:
    return design.gathered(targets[:, None])
