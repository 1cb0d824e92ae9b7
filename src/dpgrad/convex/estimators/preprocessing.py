"""Rows prepared for private models: by a public rule that costs nothing, or by statistics that are released."""

import math
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import NOTHING, Gaussian, Relation
from dpgrad.accounting.guarantee import ORDINARY, Guarantee
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex import chunked
from dpgrad.convex.design import CompensatedSum, Matrix, Rule, blocks, factors, quiet, shortened
from dpgrad.convex.estimators import rows
from dpgrad.convex.estimators.privacy import (
    FitPrivacy,
    Reported,
    charging,
    delta_for,
    guarantee,
    not_covered,
    relation_of,
)
from dpgrad.convex.losses import Array
from dpgrad.convex.opened import blockwise
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.auto import Statistic
from dpgrad.errors import BudgetSpentError, DataError, OptionError

__all__ = ["RULES", "DPStandardScaler", "RowNormalizer", "moment_sums"]

RULES: dict[str, Rule] = {"normalize": "normalise", "clip": "clip"}
_ROUNDING = 1e-9  # μ stays below its bound by this much
_AIM = 2.0**-22  # how far below the norm rows are scaled to: what rounding to float32 may add
_SLACK = 1e-6  # and so do the sums, as those of `Design`


class RowNormalizer(Reported, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Each row scaled to the Euclidean ``norm``, or, by the rule ``"clip"``, only where it is longer.

    What happens to a row depends on that row alone, so it costs no privacy; rows of zeros stay, and a row shorter than
    1e-18 is normalised to zeros. Sparse rows stay sparse. No row that it scaled is longer than ``norm``, rounding
    included: for that it aims below by a few parts in 10⁷. It does so in float64 too, since one row may decide the
    type of all.

    >>> RowNormalizer(norm=2.0, rule="clip").fit_transform([[3.0, 4.0], [0.6, 0.8]]).round(6).tolist()
    [[1.2, 1.6], [0.6, 0.8]]
    """

    @_validate.keywords()
    def __init__(self, norm: float = 1.0, *, rule: str = "normalize") -> None:
        self.norm = norm
        self.rule = rule

    @_validate.keywords(rows.unweighted, absent=("sample_weight",))
    @quiet
    def fit(self, X: Any, y: Any = None) -> Self:
        """Nothing is learned; the input is checked."""
        self._check()
        X = rows.validated(self, X)
        verb = "longer than" if self.rule == "clip" else "of any length but"
        self.privacy_ = FitPrivacy(
            Guarantee(0.0, min(1 / X.shape[0] ** 2, 0.5), Relation.ZERO_OUT, "exact", NOTHING),
            (), rows.table_facts(X), ("the rows that it returns: they are as private as those that it was given",),
            False, "scaling of each row by itself, which releases nothing",
            (f"rows {verb} {self.norm:g} are scaled to that norm",), rows.schema_of(self, X),
        )  # fmt: skip
        return self

    @blockwise
    def transform(self, X: Any) -> Matrix:
        """The scaled rows, in a new array."""
        self._check()
        X, lengths = shortened(rows.canonical(rows.validated(self, X, reset=False)))
        return _scaled(X, factors(lengths, self.norm * (1 - _AIM), RULES[self.rule]))

    def _check(self) -> None:
        rows.norm_checked(norm=self.norm)
        _validate.one_of(RULES, rule=self.rule)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _scaled(X: Matrix, by: Array) -> Matrix:
    """Each row times its factor, in the precision of the rows."""
    if not sparse.issparse(X):
        return (X * by[:, None]).astype(X.dtype, copy=False)
    return _with_data(X, X.data * np.repeat(by, np.diff(X.indptr)))


class DPStandardScaler(Reported, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Columns with mean 0 and variance 1 by a noisy mean and a noisy mean square, which are released and charged.

    ``bounds`` is a pair (low, high) of numbers, or of arrays with one value for each column, chosen without looking at
    the data: values beyond are clipped to them, in the fit and in every transformation. In units u of half their
    distance from the middle, |u| ≤ 1, and one release holds the sums of u and of u² − 1 for all p columns. A variance
    below the noise is replaced by the noise. ``noise`` is its source, as in `DPLogisticRegression`.

    Guarantee: u² + (u² − 1)² ≤ 1, so a row adds a vector of norm at most √p, and `privacy_` holds the price of one
    Gaussian release of that sensitivity. It is the scaler's own: a model that follows pays for itself. A shared
    ``ledger`` adds both up.

    >>> X = np.random.default_rng(7).normal(5.0, 2.0, (10_000, 3))
    >>> scaler = DPStandardScaler(epsilon=1.0, bounds=(-5.0, 15.0), random_state=7)
    >>> Z = scaler.fit_transform(X)
    >>> bool(np.abs(Z.mean(axis=0)).max() < 0.05), bool(np.abs(Z.std(axis=0) - 1).max() < 0.05)
    (True, True)
    """

    @_validate.keywords()
    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        delta: float | None = None,
        relation: str = "replace-one",
        bounds: tuple[ArrayLike, ArrayLike] | None = None,
        with_mean: bool = True,
        with_std: bool = True,
        noise: str = ORDINARY,
        random_state: Any = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.bounds = bounds
        self.with_mean = with_mean
        self.with_std = with_std
        self.noise = noise
        self.random_state = random_state
        self.ledger = ledger

    @_validate.keywords(rows.unweighted, absent=("sample_weight",))
    @quiet
    def fit(self, X: Any, y: Any = None) -> Self:
        """Release the centres and scales of the columns.

        Guarantee: `privacy_`, once fitted. A ``ledger`` is charged before anything is released.
        """
        epsilon, relation = rows.budget_checked(self.epsilon), relation_of(self.relation)
        secure = rows.secure_checked(self.noise)
        if not any([rows.flag_checked(with_mean=self.with_mean), rows.flag_checked(with_std=self.with_std)]):
            raise OptionError("with_mean or with_std must be True: otherwise there is nothing to scale by")
        X = rows.canonical(rows.validated(self, X))
        count, columns = X.shape
        low, high = rows.pair_of("bounds", self.bounds, columns)
        _refuse_dense(X, self.with_mean, low, high)
        delta = delta_for(self.delta, count)
        key = rows.key_of(self.random_state, type(self).__name__)

        values = 2 * columns if secure else 0
        multiplier = relation.reach / (exact.mu_for(epsilon, gd.below(delta, values)) * (1 - _ROUNDING))
        event, std = gd.with_distance(Gaussian(multiplier), values), multiplier * math.sqrt(columns)
        price = guarantee(event, relation, delta)
        if price.epsilon > epsilon:
            raise BudgetSpentError(f"epsilon {epsilon!r} is too small to be met in floating point at delta {delta:g}")
        charging(self.ledger, relation, type(self).__name__, delta)(event)
        key = gd.keyed(key, values, 2 * columns)
        noisy = gd.noised(key, 0, (1 - _SLACK) * moment_sums(X, low, high), math.sqrt(columns), std)

        mean = np.clip(noisy[0] / count, -1, 1)
        variance = np.clip(noisy[1] / count + 1, 0, 1) - mean**2
        middle, half = low + (high - low) / 2, (high - low) / 2
        self.n_samples_seen_, self.low_, self.high_ = count, low, high
        self.mean_: Array | None = middle + half * mean if self.with_mean else None
        self.scale_: Array | None = (
            half * np.sqrt(np.maximum(variance, min(std / count, 1.0))) if self.with_std else None
        )
        release = Statistic("mean and mean square", relation.reach * math.sqrt(columns) / count, std / count, 1.0)
        facts = (*rows.table_facts(X), "bounds", "every other argument")
        self.privacy_ = FitPrivacy(
            price, (release,), facts, not_covered(self.ledger, secure), key.reproducible,
            "scaling by noisy means and variances",
            ("values are clipped to the bounds", "columns are scaled by released means and variances"),
            rows.schema_of(self, X, bounds=[low.tolist(), high.tolist()]),
        )  # fmt: skip
        return self

    @blockwise
    def transform(self, X: Any) -> Matrix:
        """The rows clipped to the bounds, less the mean, divided by the scale; in a new array."""
        check_is_fitted(self)
        X = rows.canonical(rows.validated(self, X, reset=False))
        _refuse_dense(X, self.mean_ is not None, self.low_, self.high_)
        shift, scale = self._shift_and_scale()
        if sparse.issparse(X):
            clipped = np.clip(X.data, self.low_[X.indices], self.high_[X.indices])
            return _with_data(X, clipped / scale[X.indices])
        return ((np.clip(X, self.low_, self.high_) - shift) / scale).astype(X.dtype, copy=False)

    @blockwise
    def inverse_transform(self, X: Any) -> Matrix:
        """Scaled rows in the units of the data; what was clipped does not come back."""
        check_is_fitted(self)
        X = rows.canonical(rows.validated(self, X, reset=False))
        _refuse_dense(X, self.mean_ is not None, self.low_, self.high_)
        shift, scale = self._shift_and_scale()
        if sparse.issparse(X):
            return _with_data(X, X.data * scale[X.indices])
        return (X * scale + shift).astype(X.dtype, copy=False)

    def _shift_and_scale(self) -> tuple[Array, Array]:
        zeros, ones = np.zeros_like(self.low_), np.ones_like(self.low_)
        return zeros if self.mean_ is None else self.mean_, ones if self.scale_ is None else self.scale_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = not self.with_mean
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _refuse_dense(X: Matrix, centred: bool, low: Array, high: Array) -> None:
    """Refuse sparse rows that would become dense."""
    if not (X.sparse if isinstance(X, chunked.Chunks) else sparse.issparse(X)):
        return
    if centred:
        raise DataError("sparse rows cannot be centred without making them dense: with_mean=False")
    if (low > 0).any() or (high < 0).any():
        raise OptionError("bounds must hold 0 for sparse rows: clipping would make them dense")


def _with_data(X: Matrix, data: NDArray[Any]) -> Matrix:
    return sparse.csr_array((data.astype(X.dtype, copy=False), X.indices.copy(), X.indptr.copy()), shape=X.shape)


def moment_sums(X: Matrix, low: Array, high: Array) -> Array:
    """The sums of u and of u² − 1 over the rows, u = (x − middle)/half clipped to ±1: (2, columns), before any noise.

    Guarantee: leaving out a row moves it by at most √columns, exchanging one by at most twice that.

    >>> moment_sums(np.array([[0.0], [4.0], [9.0]]), np.array([0.0]), np.array([8.0])).tolist()
    [[0.0], [-1.0]]
    """
    if isinstance(X, chunked.Chunks):
        return X.added(partial(_block_sums, low=low, high=high))
    return _block_sums(X, None, low=low, high=high)


def _block_sums(X: Matrix, labels: None, *, low: Array, high: Array) -> Array:
    """The sums over rows in memory."""
    total = CompensatedSum((2, X.shape[1]))
    for _, block in blocks(X):
        if sparse.issparse(block):
            total.add(_sparse_moments(block, low, high))
        else:
            total.add(_moments(_units(block, low, high)).sum(axis=1))
    return total.total


def _units(values: Matrix, low: Array, high: Array) -> Array:
    """Values clipped to their bounds, before anything can overflow, in units of half their distance from the middle."""
    middle, half = low + (high - low) / 2, (high - low) / 2
    inside = np.clip(values, low, high)
    return np.asarray(np.clip((inside - middle) / half, -1, 1))


def _sparse_moments(block: Matrix, low: Array, high: Array) -> Array:
    """The sums over sparse rows: of what they hold, and of the zeros that they do not."""
    rows, columns = block.shape
    units = _units(block.data, low[block.indices], high[block.indices])
    held = np.bincount(block.indices, minlength=columns)
    zeros = _moments(_units(np.zeros(columns), low, high)) * (rows - held)
    return np.asarray(zeros + [np.bincount(block.indices, part, columns) for part in _moments(units)])


def _moments(units: Array) -> NDArray[np.float64]:
    return np.array([units, units**2 - 1])
