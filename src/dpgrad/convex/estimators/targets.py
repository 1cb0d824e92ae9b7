"""What the fits of all regressors begin and end with: arguments and targets checked, and what was released told."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from dpgrad import _validate
from dpgrad.accounting.events import Relation
from dpgrad.convex import chunked
from dpgrad.convex.design import Matrix
from dpgrad.convex.estimators import rows
from dpgrad.convex.estimators.extras import Outcome
from dpgrad.convex.estimators.privacy import (
    FitPrivacy,
    delta_for,
    exact_delta,
    guarantee,
    not_covered,
    relation_of,
    warn_of_steps,
)
from dpgrad.convex.losses import Array
from dpgrad.errors import DataError, OptionError
from dpgrad.mechanism.keys import Key

__all__ = ["Checked", "ended", "given"]


@dataclass(frozen=True, repr=False, eq=False)
class Checked:
    """Rows and targets as they are fitted, and the arguments of a regressor. Rows and targets are private."""

    X: Matrix
    y: Array
    epsilon: float
    delta: float
    relation: Relation
    radius: float | None
    low: float
    high: float
    fit_intercept: bool
    secure: bool

    @property
    def exact_delta(self) -> float:
        """What is left of δ for exact noise."""
        return exact_delta(self.delta, self.secure)


def given(estimator: Any, X: Any, y: Any, least: float = -math.inf) -> Checked:
    """The arguments of ``estimator`` and its rows, checked; no target may lie below ``least``."""
    warn_of_steps(estimator)
    epsilon, relation = rows.budget_checked(estimator.epsilon), relation_of(estimator.relation)
    secure = rows.secure_checked(estimator.noise)
    if estimator.data_norm is None:
        raise OptionError("data_norm is required: a bound on the norm of every row, chosen without looking at the data")
    radius = rows.radius_of(estimator.data_norm)
    low, high = rows.pair_of("target_bounds", estimator.target_bounds)
    if low < least:
        raise OptionError(f"target_bounds must begin at {least:g} or above, got {low:g}: counts are not negative")
    fit_intercept = rows.flag_checked(fit_intercept=estimator.fit_intercept)
    X, y = rows.validated(estimator, X, y=y, dtype=rows.NUMBERS, y_numeric=True)
    y = chunked.applied(_numbers, y)
    y = y.tested() if isinstance(y, chunked.Labels) else y
    delta = delta_for(estimator.delta, X.shape[0])
    return Checked(X, y, epsilon, delta, relation, radius, low, high, fit_intercept, secure)


def _numbers(y: Any) -> Array:
    """The targets in float64, refused where they are no numbers."""
    if y.dtype.kind not in "iufb":
        raise DataError("X and y must hold numbers: encode text, by categories that are public")
    return np.asarray(y, np.float64)


def ended(estimator: Any, fitted: Checked, outcome: Outcome, key: Key, title: str) -> None:
    """Write to ``estimator`` what its fit released and how, and warn where the coefficients had not settled."""
    found, low, high = outcome.found, fitted.low, fitted.high
    estimator.inference_ = outcome.inference
    estimator.radius_, estimator.n_iter_, estimator.target_bounds_ = fitted.radius, found.steps, (low, high)
    estimator.privacy_ = FitPrivacy(
        guarantee(outcome.event, fitted.relation, fitted.delta),
        outcome.releases,
        (*rows.shape_facts(fitted.X, fitted.radius), "target_bounds", "every other argument of the estimator"),
        not_covered(estimator.ledger, fitted.secure),
        key.reproducible,
        title,
        (*rows.prepared_by(fitted.radius, fitted.fit_intercept), f"targets are clipped to [{low:g}, {high:g}]"),
        rows.schema_of(estimator, fitted.X, target_bounds=[low, high]),
        () if found.unsettled is None else (found.unsettled,),
    )
    if found.unsettled:
        _validate.warn(found.unsettled, ConvergenceWarning)
