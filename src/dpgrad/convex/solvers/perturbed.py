"""The minimiser of an objective with a random linear term: what objective perturbation and AMP share.

    J(w) = Σᵢ lossᵢ(w) + (λ/2)·‖w‖² + b·w,        w̃ with ‖∇J(w̃)‖ ≤ γ,        release w̃ + b₂

The noise b makes the exact minimiser private, and how private is for `objective` and `amp` to say. No computer finds
it. J is λ-strongly convex, so w̃ lies within γ/λ of it, and, given the minimiser, the w̃ of two datasets differ by 2γ/λ
at most: the second noise b₂ hides that, at a price of its own. A numerical solution is never treated as exact.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import Approximate, Compose, Event, Gaussian, Relation
from dpgrad.convex import chunked
from dpgrad.convex._conjugate import conjugate
from dpgrad.convex.design import Design, Rows, quiet
from dpgrad.convex.losses import Array, HuberSvm, Logistic, RowLoss, Squared, Targets
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.solved import Solved, Statistic
from dpgrad.errors import OptionError
from dpgrad.mechanism.keys import AnyKey, Key

__all__ = [
    "AnyCurved", "Law", "Perturbation", "approximate", "curved", "minimiser", "moved", "noise", "solve", "tolerance",
]  # fmt: skip

AnyCurved = Logistic | HuberSvm | Squared
_TOLERANCE = 3e-10  # of the largest gradient that is possible
_MOST_STEPS = 200


class Law(StrEnum):
    """The law of a noise vector: density ∝ e^{−‖b‖²/2·scale²}, or ∝ e^{−‖b‖/scale}, whose norm is Gamma(p, scale)."""

    GAUSSIAN = "gaussian"
    GAMMA = "gamma"


@dataclass(frozen=True)
class Perturbation:
    """A perturbed objective in public numbers, and the event of releasing its minimiser.

    ``scale`` belongs to the noise b in the sum of the losses, ``output_scale`` to b₂ on the coefficients, both of the
    same ``law``; ``tolerance`` is γ, in the sum as well. `objective` and `amp` make them.
    """

    loss: AnyCurved
    radius: float
    rows: int
    relation: Relation
    ridge: float
    law: Law
    scale: float
    output_scale: float
    tolerance: float
    event: Event

    @property
    def releases(self) -> tuple[Statistic, ...]:
        """The minimiser of the perturbed objective, and the noise on it, by their shares of the budget."""
        moved = self.relation.reach * self.loss.lipschitz(self.radius)
        return (
            Statistic("objective", moved, self.scale, 0.99),
            Statistic("minimiser", 2 * self.tolerance / self.ridge, self.output_scale, 0.01),
        )


def approximate(
    loss: AnyCurved,
    radius: float,
    rows: int,
    relation: Relation,
    *,
    ridge: float,
    std: float,
    tolerance: float,
    first: tuple[float, float],
    output: tuple[float, float],
) -> Perturbation:
    """The perturbation by Gaussian noise whose minimiser is ``first`` private, an (ε, δ), and b₂ ``output`` private.

    Minimisers to within γ of two equal objectives are 2γ/λ apart, which b₂ hides as an exact Gaussian does.
    """
    mu = exact.mu_for(*output)
    event = Compose((Approximate(*first, relation), Gaussian(moved(relation) / mu)))
    scale = 2 * tolerance / ridge / mu
    return Perturbation(loss, radius, rows, Relation(relation), ridge, Law.GAUSSIAN, std, scale, tolerance, event)


def tolerance(rows: int, lipschitz: float, scale: float) -> float:
    """A γ that float64 reaches: 3e-10 of the largest gradient of the sum and of the noise.

    >>> tolerance(1000, lipschitz=1.0, scale=1000.0)
    6e-07
    """
    return _TOLERANCE * (rows * lipschitz + scale)


def curved(loss: RowLoss, solver: str) -> AnyCurved:
    """The loss, refused where the solver has no proof for it.

    >>> from dpgrad.convex.losses import Hinge
    >>> curved(Hinge(), "objective")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: objective needs a smooth loss, got Hinge(): use sgd, or HuberSvm in place of Hinge
    """
    if not loss.smooth:
        raise OptionError(f"{solver} needs a smooth loss, got {loss!r}: use sgd, or HuberSvm in place of Hinge")
    if not isinstance(loss, AnyCurved):
        raise OptionError(
            f"{solver} needs a loss of one score, whose Hessian has rank one, got {loss!r}: use Logistic with "
            "one_vs_rest, or gd"
        )
    return loss


def moved(relation: Relation) -> int:
    """How many rows' contributions the sum moves by between neighbours.

    Guarantee: add/remove is refused. What rounding may hide of a gradient grows with the number of rows, so whether the
    minimiser is found within γ would tell of that number, were it not public.
    """
    return gd.same_size(relation, "how accurately the minimiser is found depends on the number of rows").reach


@quiet
def solve(design: Rows, targets: ArrayLike, loss: RowLoss, plan: Perturbation, *, key: AnyKey | None = None) -> Solved:
    """The released coefficients (features, 1) of a perturbed objective, and the event of having found them.

    ``key`` is fresh unless given; one key serves one run on one dataset.

    Guarantee: the event is that of ``plan``; a loss, another number of rows or rows beyond the bounds it was made for
    are refused. It holds in exact arithmetic but for the solution itself, whose distance from the minimiser is bounded
    and covered by noise.
    """
    if loss != plan.loss:
        raise OptionError(f"loss must be the one the noise was calibrated for, {plan.loss!r}, got {loss!r}")
    gd.check_design(design, plan.radius, plan.rows)
    checked = chunked.checked(plan.loss, targets, design.rows)
    secret = Key.fresh() if key is None else Key.of(key)
    shape = (design.features, 1)
    linear = noise(plan.law, secret, 0, shape, plan.scale)
    found = minimiser(design, checked, plan.loss, plan.ridge, linear, plan.tolerance)
    noisy = found + noise(plan.law, secret, 1, shape, plan.output_scale)
    return Solved(noisy, plan.event, plan.relation, "objective perturbation", secret.reproducible, plan.releases)


def noise(law: Law, key: Key, step: int, shape: tuple[int, ...], scale: float) -> Array:
    """A noise vector of the given law, a function of the key and the step.

    >>> one = noise(Law.GAMMA, Key.from_seed(7), step=0, shape=(3, 1), scale=2.0)
    >>> bool((one == noise(Law.GAMMA, Key.from_seed(7), step=0, shape=(3, 1), scale=2.0)).all())
    True
    """
    if law is Law.GAUSSIAN:
        return gd.gaussian(key, step, shape, scale)
    direction = gd.gaussian(key, step, shape, 1.0)
    words = np.frombuffer(key.derive("convex norm", size=16), "<u8")
    random = np.random.Generator(np.random.Philox(key=words, counter=np.array([0, 0, step, 0], np.uint64)))
    return direction * (scale * random.standard_gamma(direction.size) / float(np.linalg.norm(direction)))


def minimiser(design: Rows, targets: Targets, loss: AnyCurved, ridge: float, linear: Array, tolerance: float) -> Array:
    """Coefficients at which the gradient of Σ lossᵢ + (ridge/2)·‖w‖² + linear·w is no longer than ``tolerance``.

    Newton's method, its equations solved by conjugate gradients, so no Hessian is formed. Gradients are summed in
    float64, and what rounding may hide of them counts against the tolerance.

    >>> one = Design([[1.0]], radius=1.0)
    >>> found = minimiser(one, np.array([3.0]), Squared(bound=9.0), 1.0, np.zeros((1, 1)), 1e-9)
    >>> round(float(found[0, 0]), 9)  # (w − 3) + w = 0
    1.5
    """
    _validate.positive(ridge=ridge, tolerance=tolerance)
    precise = design.precise()
    found = np.zeros_like(linear)
    first = 0.0
    for _ in range(_MOST_STEPS):
        *pulls, lengths = precise.added(partial(_pull, loss=loss, at=found), targets)[:, 0]
        gradient = np.array(pulls)[:, None] + ridge * found + linear
        norm = float(np.linalg.norm(gradient))
        rounding = precise.accuracy * float(lengths)
        rounding += 1e-14 * float(ridge * np.linalg.norm(found) + np.linalg.norm(linear))
        if norm + rounding <= tolerance:
            return found
        if not norm:  # no step is left, and rounding alone hides more than the tolerance
            break
        first = first or norm
        step = conjugate(_product(design, targets, loss, found, ridge), -gradient, min(0.1, math.sqrt(norm / first)))
        found = found + _length(precise, targets, loss, ridge, linear, found, step) * step
    raise OptionError(
        f"no coefficients with a gradient below {tolerance:g} were found in {_MOST_STEPS} steps: raise the ridge (l2)"
    )


def _pull(design: Design, targets: Targets, *, loss: AnyCurved, at: Array) -> Array:
    """The sum of the gradients of some rows, and below it that of their norms."""
    residuals = loss.residuals(design.recalled(at), targets)
    return np.append(design.gathered(residuals), np.abs(residuals[:, 0]) @ design.norms)[:, None]


def _bend(design: Design, targets: Targets, *, loss: AnyCurved, at: Array, along: Array) -> Array:
    """The curvature of the loss of some rows times a direction."""
    bends = loss.curvatures(design.precise().recalled(at), targets)[:, None]
    return design.summed(along, lambda rows, scores: bends[rows] * scores)


def _slope(design: Design, targets: Targets, *, loss: AnyCurved, at: Array, step: Array, length: float) -> Array:
    """The slope of the loss of some rows along a step, a part of it taken."""
    along = design.recalled(step)
    return np.array([np.vdot(loss.residuals(design.recalled(at) + length * along, targets), along)])


def _product(design: Rows, targets: Targets, loss: AnyCurved, at: Array, ridge: float) -> Callable[[Array], Array]:
    return lambda vector: design.added(partial(_bend, loss=loss, at=at, along=vector), targets) + ridge * vector


def _length(
    design: Rows,
    targets: Targets,
    loss: AnyCurved,
    ridge: float,
    linear: Array,
    start: Array,
    step: Array,
) -> float:
    """How much of a Newton step to take: all of it unless J would climb there, else up to where J begins to climb.

    The slope of J along the step grows; rounding spoils it far less than the values of J.
    """
    fixed, bent = float(np.vdot(ridge * start + linear, step)), ridge * float(np.vdot(step, step))

    def slope(length: float) -> float:
        part = partial(_slope, loss=loss, at=start, step=step, length=length)
        return float(design.added(part, targets)[0]) + fixed + length * bent

    allowed = -0.1 * slope(0.0)
    if slope(1.0) <= allowed:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if slope(middle) > 0:
            high = middle
        else:
            low = middle
            if slope(low) > -allowed:
                break
    return low or high
