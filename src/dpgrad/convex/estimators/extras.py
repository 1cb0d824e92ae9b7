"""What estimators release besides their coefficients, each for a share of the one budget of a fit.

`Shares` divides the budget, in μ². `balanced` releases how often each class occurs; `solved` solves, and releases what
standard errors need.

>>> split = Shares(1.0, 1e-6, Relation.REPLACE_ONE, counts=0.05)
>>> round(split.left, 2), round(split.counts_plan(classes=2).sensitivity, 4)
(0.95, 1.4142)
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import Event, Relation, together
from dpgrad.convex import chunked
from dpgrad.convex.design import Design, Matrix
from dpgrad.convex.estimators import solvers
from dpgrad.convex.estimators.solvers import Found, SolverTask
from dpgrad.convex.inference import (
    CLEAR,
    LOWERED,
    SCORE,
    Curvature,
    Errors,
    Intervals,
    Moments,
    OneRelease,
    Scatter,
    curvature,
    squared_errors,
)
from dpgrad.convex.losses import Array, HuberSvm, Squared, Targets
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.solved import Statistic
from dpgrad.errors import OptionError
from dpgrad.mechanism.keys import Key

__all__ = [
    "COUNTS_SHARE", "ERRORS_SHARE", "WEIGHTED", "ClassCounts", "Inferred", "Measured", "Outcome", "Shares", "balanced",
    "class_counts", "refuse_unknown_spread", "share_checked", "solved",
]  # fmt: skip

COUNTS_SHARE = 0.05  # of μ², for class_weight="balanced"
ERRORS_SHARE = 1 / 3  # of the share of standard errors, for the variance of errors where the curvature needs the rest
_ROUNDING = 1e-9  # μ stays below its share by this much


@dataclass(frozen=True)
class ClassCounts(OneRelease):
    """The release of how many rows each class has.

    Guarantee: a row adds 1 to one count, so leaving it out moves the counts by 1, exchanging it by √2.
    """

    @property
    def sensitivity(self) -> float:
        return math.sqrt(self.relation.reach)


@dataclass(frozen=True)
class Shares:
    """A budget divided in μ²: ``counts`` and ``inference`` are shares of it, the solver has what is left.

    With ``secure`` noise of the secure source, ``delta`` is what is left for exact noise (`privacy.exact_delta`).
    """

    epsilon: float
    delta: float
    relation: Relation
    counts: float = 0.0
    inference: float = 0.0
    secure: bool = False

    @property
    def left(self) -> float:
        """The share of the solver."""
        return 1 - self.counts - self.inference

    def _mu(self, share: float) -> float:
        return exact.mu_for(self.epsilon, self.delta) * math.sqrt(share) * (1 - _ROUNDING)

    def counts_plan(self, classes: int) -> ClassCounts:
        """The release of class counts."""
        return ClassCounts(self._mu(self.counts), self.relation, classes if self.secure else 0)

    def curvature_plan(self, task: SolverTask, share: float, features: int) -> Curvature:
        """The release of the curvature of all rows, which have so many ``features``, a constant one included."""
        values = features**2 if self.secure else 0
        return Curvature(self._mu(share), self.relation, values, most=task.loss.smoothness(task.bound))

    def errors_plan(self, share: float) -> Errors:
        """The release of the squared errors of a regression, in units of half the width of the target's bounds."""
        return Errors(self._mu(share), self.relation, int(self.secure), bound=1.0)


def share_checked(**share: object) -> float:
    """A share of the budget; None is none of it.

    >>> share_checked(inference_share=0.5)
    0.5
    """
    ((name, value),) = share.items()
    if value is None:
        return 0.0
    _validate.open_unit(**share)
    if float(value) > 0.9:  # type: ignore[arg-type]
        raise OptionError(f"{name} must be at most 0.9, got {value!r}: nothing would be left for the coefficients")
    return float(value)  # type: ignore[arg-type]


def class_counts(places: NDArray[np.int64], classes: int) -> Array:
    """How many rows each class has, before any noise.

    Guarantee: the sensitivity of `ClassCounts`.

    >>> class_counts(np.array([0, 2, 2]), 3).tolist()
    [1.0, 0.0, 2.0]
    """
    counted = partial(_counted, classes=classes)
    return places.added(counted) if isinstance(places, chunked.Labels) else counted(places)


def _counted(places: NDArray[np.int64], classes: int) -> Array:
    return np.bincount(places, minlength=classes).astype(np.float64)


def balanced(counts: Array, plan: ClassCounts, key: Key) -> tuple[float, ...]:
    """Weights that are inverse to noisy class counts, 1 for the rarest class.

    A count below its noise is taken to be the noise: a class may well be absent.

    Guarantee: a function of one release of ``plan``.

    >>> made = balanced(np.array([900.0, 100.0]), ClassCounts(1e9, Relation.ZERO_OUT), Key.from_seed(7))
    >>> [round(weight, 3) for weight in made]
    [0.111, 1.0]
    """
    own = gd.keyed(key.child("class counts"), plan.secure_values, counts.size)
    noisy = gd.noised(own, 0, counts, plan.sensitivity, plan.std)
    inverse = 1 / np.maximum(noisy, max(plan.std, 1.0))
    return tuple((inverse / inverse.max()).tolist())


@dataclass(frozen=True, eq=False)
class Measured:
    """What was released for standard errors, and what coefficients they are of.

    ``weights`` are coefficients of the design, ``total`` its noisy curvature S with noise of ``std``, ``dispersion`` φ.
    Coefficients of the columns are ``scale`` times theirs; the intercept is ``offset`` plus ``scale`` times
    ``constant`` times the last of them. ``reach`` is the length of the longest row where the loss is no parabola, else
    0.
    """

    weights: Array
    spread: Scatter
    total: Array
    std: float
    dispersion: float
    rows: int
    constant: float
    reach: float = 0.0
    scale: float = 1.0
    offset: float = 0.0

    def intervals(self, level: float) -> Intervals:
        """The estimate with its standard errors, refused where noise hides what they depend on."""
        _validate.open_unit(level=level)
        smallest = float(np.linalg.eigvalsh(self.total)[0])
        if smallest < CLEAR * self.std:
            raise OptionError(
                f"no intervals: the smallest eigenvalue of the curvature, {smallest:.4g}, is not {CLEAR:g} times its "
                f"noise, {self.std:.4g}; more rows{self._wanted(smallest)}, a larger epsilon or inference_share, or a "
                "tighter data_norm are needed"
            )
        estimate = self.spread.estimate(self.weights, self.total, self.rows)
        covariance = self._covariance(self.total)
        if (score := self.reach * math.sqrt(float(np.linalg.eigvalsh(covariance)[-1]))) > SCORE:
            raise OptionError(
                f"no intervals: the standard error of a score is up to {score:.2g}, above {SCORE:g}, where the loss is "
                "no parabola; more rows, a larger epsilon, a tighter data_norm or another solver are needed"
            )
        sure = self.total - LOWERED * self.std * np.eye(len(self.total))  # what passed may owe it to the noise
        errors = np.sqrt(np.maximum(np.diag(self._covariance(sure)), 0))
        if not self.constant:
            return Intervals(level, self.scale * estimate, self.scale * errors, np.zeros(1), np.zeros(1))
        last = self.scale * self.constant
        return Intervals(
            level, self.scale * estimate[:-1], self.scale * errors[:-1],
            self.offset + last * estimate[-1:], last * errors[-1:],
        )  # fmt: skip

    def _covariance(self, total: Array) -> Array:
        return self.spread.covariance(self.weights, total, self.dispersion, self.rows)

    def _wanted(self, smallest: float) -> str:
        """How many rows of the same kind would do, from what was released; its noise leaves a range of them.

        The curvature is within two deviations of what was released, and must exceed ``CLEAR`` of them by two more.
        """
        least = self.rows * CLEAR * self.std / (max(smallest, 0.0) + 2 * self.std)
        most = self.rows * (CLEAR + 2) * self.std / (smallest - 2 * self.std) if smallest > 2.5 * self.std else math.inf
        least, most = (float(f"{max(number, self.rows):.2g}") for number in (least, most))
        if math.isfinite(most):
            return f" ({least:,.0f} to {most:,.0f} of this kind)"
        return f" (at least {least:,.0f} of this kind)" if least > self.rows else ""


class Inferred:
    """What estimators with standard errors have: confidence intervals, once fitted with a share of the budget."""

    def confidence_intervals(self, level: float = 0.95) -> Intervals:
        """Standard errors and confidence intervals of the coefficients, for which ``inference_share`` has paid.

        They hold the sampling error of the rows and the noise of the mechanism, and are computed from what was
        released: calling this costs nothing. They are for the coefficients that rows of the same law, clipped in the
        same way, would give without privacy in the limit; docs/proofs/intervals.md says when they cover these with the
        stated probability.
        """
        found = getattr(self, "inference_", None)
        if not isinstance(found, Measured):
            raise OptionError(
                "no intervals were released: fit with inference_share, the share of the budget that they cost, such "
                "as 0.1"
            )
        return found.intervals(level)


WEIGHTED = (
    "inference_share is refused: weighted rows have gradients of another covariance, which is not released; leave "
    "class_weight at None"
)
_WITHOUT = {
    "auto": "auto clips gradients far below what the loss allows, which biases coefficients at every n; use gd or "
    "objective",
    "amp": "amp adds more noise than objective for the same promise; use objective",
}


def refuse_unknown_spread(solver: object, task: SolverTask, options: dict[str, Any]) -> None:
    """Refuse standard errors, before anything is charged, where no theory gives them.

    >>> from dpgrad.convex.losses import Logistic
    >>> task = SolverTask(Logistic(), 2, 1.0, 1e-6, Relation.REPLACE_ONE, 1.0, True)
    >>> refuse_unknown_spread("auto", task, {})
    Traceback (most recent call last):
    dpgrad.errors.OptionError: inference_share is refused: auto clips gradients far below what the loss allows, ...
    """
    reason = _WITHOUT.get(str(solver))
    if isinstance(task.loss, HuberSvm) or task.classes > 2:
        reason = "standard errors are for linear, logistic (two classes) and Poisson models; leave it at None"
    elif "clip" in options and float(options["clip"]) < task.loss.lipschitz(task.bound):
        reason = "a clip bound below the largest gradient biases coefficients; leave clip at None"
    if reason is not None:
        raise OptionError(f"inference_share is refused: {reason}")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a fit found, the event of all its releases, what a report says of them, and what standard errors need."""

    found: Found
    event: Event
    releases: tuple[Statistic, ...]
    inference: Measured | None


def solved(
    solver: object, rows: Matrix, targets: Targets, task: SolverTask, options: dict[str, Any], key: Key, split: Shares,
    **scaling: float,
) -> Outcome:  # fmt: skip
    """Solve the task for the share that is left, and release what standard errors need, all charged at once.

    ``scaling`` are fields of `Measured`.
    """
    charge, moment = task.charge, solver == "adassp"
    extra: tuple[Event, ...] = ()
    releases: tuple[Statistic, ...] = ()
    if split.inference:
        refuse_unknown_spread(solver, task, options)
        features = rows.shape[1] + task.fit_intercept
        curved, errors = _plans(task, split, moment, features)
        if curved is not None:
            _refuse_few(rows.shape[0], features, task, split)
        shares = (split.inference * (1 - _errors_part(task, moment)), split.inference * _errors_part(task, moment))
        made = [(plan, share) for plan, share in zip((curved, errors), shares, strict=True) if plan is not None]
        extra = tuple(plan.event for plan, _ in made)
        releases = tuple(plan.release(share) for plan, share in made)
    own = replace(task, share=split.left, charge=lambda event: charge(together(event, *extra)))
    found = solvers.solve(solver, rows, targets, own, options, key)
    scaled = tuple(replace(release, share=release.share * split.left) for release in found.releases)
    inference = _measured(rows, targets, found, own, split, key, **scaling) if split.inference else None
    return Outcome(found, together(found.event, *extra), (*scaled, *releases), inference)


def _refuse_few(count: int, features: int, task: SolverTask, split: Shares) -> None:
    """Refuse intervals that no data of this public size can give: the trace of S is at most ``most`` a row."""
    needed, enough = count, 0
    while enough < needed:  # δ = 1/n² falls as rows are added, and then more of them are needed
        own = replace(split, delta=1 / needed**2) if split.delta == 1 / count**2 else split
        plan, _ = _plans(task, own, moment=False, features=features)
        assert plan is not None
        enough, needed = needed, max(needed, math.ceil(CLEAR * plan.std * features / plan.most))
    if count < needed:
        raise OptionError(
            f"inference_share is refused: intervals need at least {needed:,} rows at this budget, and most data more; "
            f"there are {count:,}. Give a larger epsilon or inference_share, or leave it at None; nothing was spent"
        )


def _measured(
    rows: Matrix, targets: Targets, found: Found, task: SolverTask, split: Shares, key: Key, dispersion: float = 1.0,
    **scaling: float,
) -> Measured:  # fmt: skip
    """Release what standard errors need at the coefficients that were found, as it was charged."""
    assert found.weights is not None
    assert found.spread is not None
    design = solvers.prepared_rows(rows, task).precise()
    own = key.child("standard errors")
    curved, errors = _plans(task, split, isinstance(found.spread, Moments), design.features)
    loss: Any = task.loss
    coded = chunked.applied(solvers.signed, targets) if task.classes == 2 else targets
    checked = chunked.checked(loss, coded, design.rows)
    if isinstance(found.spread, Moments):
        total, std = found.spread.moment, found.spread.moment_std
    else:
        assert curved is not None
        bent = design.added(partial(_bent, loss=loss, at=found.weights), checked)
        total, std = curved.noisy(bent, own), curved.std
    if errors is not None:
        missed = design.added(partial(_missed, bound=errors.bound, at=found.weights), checked)
        noisy = errors.noisy(float(missed[0]), own)
        # what is not told from noise is taken to be the noise, which errs to the safe side
        dispersion = max(noisy, errors.std) / max(design.rows - design.features, 1)
    weights, constant = found.weights[:, 0], design.intercept
    reach = 0.0 if isinstance(loss, Squared) else design.bound
    return Measured(weights, found.spread, total, std, dispersion, design.rows, constant, reach, **scaling)


def _bent(design: Design, targets: Targets, *, loss: Any, at: Array) -> Array:
    """The curvature of some rows."""
    return curvature(design, loss.curvatures(design.scores(at), targets))


def _missed(design: Design, targets: Targets, *, bound: float, at: Array) -> Array:
    """The squared errors of some rows."""
    return np.array([squared_errors(design.scores(at)[:, 0] - targets, bound)])


def _errors_part(task: SolverTask, moment: bool) -> float:
    """The part of the share that the squared errors get: all where a ``moment`` was released already."""
    return 0.0 if not isinstance(task.loss, Squared) else 1.0 if moment else ERRORS_SHARE


def _plans(task: SolverTask, split: Shares, moment: bool, features: int) -> tuple[Curvature | None, Errors | None]:
    """The releases that standard errors need."""
    part = _errors_part(task, moment)
    curved = split.curvature_plan(task, split.inference * (1 - part), features) if part < 1 else None
    return curved, split.errors_plan(split.inference * part) if part else None
