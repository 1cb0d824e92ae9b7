"""Private Poisson regression for scikit-learn."""

import math
from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.metrics import d2_tweedie_score
from sklearn.utils import Tags

from dpgrad import _validate
from dpgrad.accounting.guarantee import ORDINARY
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex import chunked
from dpgrad.convex.design import quiet
from dpgrad.convex.estimators import rows
from dpgrad.convex.estimators.targets import Regressor, given
from dpgrad.convex.losses import Array, Counts
from dpgrad.convex.opened import blockwise, in_memory

__all__ = ["DPPoissonRegressor"]

_OPTIONS = ("max_iter", "learning_rate", "momentum")


class DPPoissonRegressor(Regressor):
    """Poisson regression with differential privacy, for counts and rates: the expected target is exp(x·w + b).

    As scikit-learn's ``PoissonRegressor``, it minimises the mean Poisson loss plus ``alpha``·‖w‖²/2, without a penalty
    on the intercept, and `score` is D², the part of the deviance that it explains. The solver is DP-GD
    (`dpgrad.convex.gd`) at the pace that public numbers suggest, unless ``learning_rate`` is given.

    ``data_norm`` and ``target_bounds`` are required, chosen without looking at the data: longer rows are clipped to the
    norm, and targets to their bounds (low, high), low ≥ 0. No expected target exceeds the bounds, in the fit and in
    prediction. Noise is in proportion to the upper bound, so a bound near the largest usual count serves best.
    ``inference_share`` pays for `confidence_intervals`, which assume that targets are Poisson. The other arguments are
    those of `DPLogisticRegression`.

    Guarantee: `privacy_` holds (ε, δ) for neighbours under ``relation``. With the expected target cut at the upper
    bound no gradient exceeds that bound times the norm of a row, and nothing is clipped.

    >>> random = np.random.default_rng(7)
    >>> X = random.uniform(-1, 1, (20_000, 2))
    >>> y = random.poisson(np.exp(1 + X @ [0.5, -0.5]))
    >>> model = DPPoissonRegressor(4.0, alpha=0.0, data_norm=1.5, target_bounds=(0, 10), random_state=7).fit(X, y)
    >>> bool(np.abs(model.coef_ - [0.5, -0.5]).max() < 0.15), bool(model.score(X, y) > 0.1)
    (True, True)
    """

    @_validate.keywords(rows.sklearn_option)
    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        alpha: float = 1.0,
        delta: float | None = None,
        relation: str = "replace-one",
        data_norm: float | str | None = None,
        target_bounds: tuple[float, float] | None = None,
        inference_share: float | None = None,
        fit_intercept: bool = True,
        max_iter: int | None = None,
        learning_rate: float | None = None,
        momentum: float | None = None,
        noise: str = ORDINARY,
        random_state: Any = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.alpha = alpha
        self.delta = delta
        self.relation = relation
        self.data_norm = data_norm
        self.target_bounds = target_bounds
        self.inference_share = inference_share
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.learning_rate = learning_rate
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
        _validate.non_negative(alpha=self.alpha)
        fitted = given(self, X, y, least=0)
        low, high, fit_intercept = fitted.low, fitted.high, fitted.fit_intercept
        targets = chunked.applied(partial(_scaled, low=low, high=high), fitted.y)
        # in units of the largest count; an intercept holds its logarithm, and an offset where there is none
        loss, raised = Counts(0.0 if fit_intercept else -math.log(high)), math.log(high) if fit_intercept else 0.0
        options, scaling = self._options(fitted.X.shape[1], high), {"dispersion": 1 / high, "offset": raised}
        found = self._solve(fitted, targets, loss, "gd", options, "Poisson regression", **scaling)
        self.coef_, self.intercept_ = found.coef[:, 0], float(raised + found.intercept[0])
        return self

    def _options(self, columns: int, high: float) -> dict[str, Any]:
        """The options of the solver; ``alpha`` in its units, and nothing of it for the intercept."""
        penalty = np.full((columns, 1), float(self.alpha) / high)
        found = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        return {**found, "l2": np.vstack([penalty, [[0.0]]]) if self.fit_intercept else penalty}

    @blockwise
    def predict(self, X: Any) -> Array:
        """The expected target of raw rows, clipped or normalised as those of the fit were; within ``target_bounds``."""
        scores, (low, high) = self._scores(X), self.target_bounds_
        least = max(low, float(np.finfo(np.float64).tiny))  # an expected count is positive
        return np.clip(np.exp(np.clip(scores, math.log(least), math.log(high))), least, high)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D² of the predictions: 1 for the true targets, 0 for their mean; these rows are not protected."""
        truth, found, weights = in_memory(y, self.predict(X), sample_weight)
        return float(d2_tweedie_score(truth, found, sample_weight=weights, power=1))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


def _scaled(y: Array, *, low: float, high: float) -> Array:
    """Targets clipped to their bounds, in units of the largest."""
    return np.clip(np.clip(y, low, high) / high, 0, 1)
