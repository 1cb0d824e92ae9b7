"""Private linear regression for scikit-learn."""

from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.metrics import r2_score

from dpgrad import _validate
from dpgrad.accounting.guarantee import ORDINARY
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex import chunked
from dpgrad.convex.design import quiet
from dpgrad.convex.estimators import rows
from dpgrad.convex.estimators.targets import Regressor, given
from dpgrad.convex.losses import Array, Squared
from dpgrad.convex.opened import blockwise, in_memory

__all__ = ["OPTIONS", "DPLinearRegression"]


class DPLinearRegression(Regressor):
    """Linear regression with differential privacy.

    The default solver, ``"adassp"``, releases XᵀX and Xᵀy once (`dpgrad.convex.regression`); ``"gd"`` is DP-GD on
    errors that are cut at half the width of the target's bounds, for rows with thousands of columns or sparse ones. Its
    steps come from public numbers unless ``learning_rate`` is given, as in `DPLogisticRegression`, and a
    ``ConvergenceWarning`` says where its coefficients had not settled. Predictions are clipped to ``target_bounds``.

    ``data_norm`` and ``target_bounds`` are required, chosen without looking at the data: longer rows are clipped to
    the norm, in the fit and in prediction (``"normalize"`` scales every row to norm 1, which few regressions want), and
    targets beyond their bounds (low, high) are clipped to these. ``l2`` makes it a ridge regression; ``"adassp"`` does
    not shrink the intercept. ``inference_share`` pays for `confidence_intervals`. The other arguments are those of
    `DPLogisticRegression`.

    Guarantee: `privacy_` holds (ε, δ) for neighbours under ``relation``, every release, what is assumed public, and
    what is not covered.

    >>> random = np.random.default_rng(7)
    >>> X = random.uniform(-1, 1, (5000, 2))
    >>> y = 3 + X @ [2.0, -1.0] + random.normal(0, 0.1, 5000)
    >>> model = DPLinearRegression(epsilon=1.0, data_norm=1.5, target_bounds=(0.0, 6.0), random_state=7).fit(X, y)
    >>> bool(model.score(X, y) > 0.95), [release.name for release in model.privacy_.releases]
    (True, ['second moment', 'products with the target', 'smallest eigenvalue'])
    """

    @_validate.keywords(rows.sklearn_option)
    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        relation: str = "replace-one",
        data_norm: float | str | None = None,
        target_bounds: tuple[float, float] | None = None,
        inference_share: float | None = None,
        fit_intercept: bool = True,
        solver: str = "adassp",
        max_iter: int | None = None,
        learning_rate: float | None = None,
        clip: float | None = None,
        l2: float | None = None,
        momentum: float | None = None,
        noise: str = ORDINARY,
        random_state: Any = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.data_norm = data_norm
        self.target_bounds = target_bounds
        self.inference_share = inference_share
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.clip = clip
        self.l2 = l2
        self.momentum = momentum
        self.noise = noise
        self.random_state = random_state
        self.ledger = ledger

    @_validate.keywords(rows.unweighted, absent=("sample_weight",))
    @quiet
    def fit(self, X: Any, y: Any) -> Self:
        """Learn within the budget. Rows are counted, and nothing else is read from them without noise.

        Guarantee: `privacy_`, once fitted. A ``ledger`` is charged before anything is released.
        """
        fitted = given(self, X, y)
        low, high = fitted.low, fitted.high
        if fitted.fit_intercept:
            middle, half = low + (high - low) / 2, (high - low) / 2
        else:  # a row of zeros has the target 0, wherever the bounds lie
            middle, half = 0.0, max(abs(low), abs(high))
        targets = chunked.applied(partial(_scaled, low=low, high=high, middle=middle, half=half), fitted.y)
        options = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        loss, scaling = Squared(bound=1.0), {"scale": half, "offset": middle}
        found = self._solve(fitted, targets, loss, self.solver, options, "linear regression", **scaling)
        self.coef_ = half * found.coef[:, 0]
        self.intercept_ = float(middle + half * found.intercept[0])
        return self

    @blockwise
    def predict(self, X: Any) -> Array:
        """The expected target of raw rows, clipped or normalised as those of the fit were; within ``target_bounds``."""
        return np.clip(self._scores(X), *self.target_bounds_)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² of the predictions. These rows are not protected; lazy targets and predictions are computed."""
        truth, found, weights = in_memory(y, self.predict(X), sample_weight)
        return float(r2_score(truth, found, sample_weight=weights))


def _scaled(y: Array, *, low: float, high: float, middle: float, half: float) -> Array:
    """Targets clipped to their bounds, from −1 to 1."""
    return np.clip((np.clip(y, low, high) - middle) / half, -1, 1)


OPTIONS = ("max_iter", "learning_rate", "clip", "l2", "momentum")
