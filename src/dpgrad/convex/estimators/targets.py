"""What all regressors share: how arguments and targets are checked, how a fit is solved, and what is said of it."""

import math
from abc import ABC
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from dpgrad import _validate
from dpgrad.accounting.events import Relation
from dpgrad.convex import chunked
from dpgrad.convex.design import Matrix
from dpgrad.convex.estimators import extras, rows
from dpgrad.convex.estimators.privacy import (
    FitPrivacy,
    Reported,
    charging,
    delta_for,
    exact_delta,
    guarantee,
    not_covered,
    relation_of,
    warn_of_steps,
)
from dpgrad.convex.estimators.solvers import Found, SolverTask, design
from dpgrad.convex.losses import Array, RowLoss
from dpgrad.errors import DataError, OptionError

__all__ = ["Checked", "Regressor", "given"]


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


class Regressor(extras.Inferred, Reported, RegressorMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """What private regressors share: the solving of a fit, and the scores of rows."""

    def _solve(
        self, fitted: Checked, targets: Array, loss: RowLoss, solver: str, options: dict[str, Any], title: str,
        **scaling: float,
    ) -> Found:  # fmt: skip
        """Solve, write what the fit released and how, and warn where the coefficients had not settled."""
        name, low, high = type(self).__name__, fitted.low, fitted.high
        charge = charging(self.ledger, fitted.relation, name, fitted.delta)
        exact, share = fitted.exact_delta, extras.share_checked(inference_share=self.inference_share)
        task = SolverTask(
            loss, 0, fitted.epsilon, exact, fitted.relation, fitted.radius, fitted.fit_intercept, charge,
            secure=fitted.secure,
        )  # fmt: skip
        split = extras.Shares(fitted.epsilon, exact, fitted.relation, inference=share, secure=fitted.secure)
        key = rows.key_of(self.random_state, name)
        outcome = extras.solved(solver, rows.narrowed(fitted.X), targets, task, options, key, split, **scaling)
        found = outcome.found
        self.inference_ = outcome.inference
        self.radius_, self.n_iter_, self.target_bounds_ = fitted.radius, found.steps, (low, high)
        self.privacy_ = FitPrivacy(
            guarantee(outcome.event, fitted.relation, fitted.delta),
            outcome.releases,
            (*rows.shape_facts(fitted.X, fitted.radius), "target_bounds", "every other argument of the estimator"),
            not_covered(self.ledger, fitted.secure),
            key.reproducible,
            f"{title}, solver {solver}",
            (*rows.prepared_by(fitted.radius, fitted.fit_intercept), f"targets are clipped to [{low:g}, {high:g}]"),
            rows.schema_of(self, fitted.X, target_bounds=[low, high]),
            () if found.unsettled is None else (found.unsettled,),
        )
        if found.unsettled:
            _validate.warn(found.unsettled, ConvergenceWarning)
        return found

    def _scores(self, X: Any) -> Array:
        """The scores of raw rows, clipped or normalised as those of the fit were."""
        check_is_fitted(self)
        X = rows.canonical(rows.validated(self, X, reset=False))
        return np.asarray(design(X, self.radius_).scores(self.coef_[:, None])[:, 0] + self.intercept_)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
