"""Linear regression: against least squares, its releases, and what it refuses."""

import pickle
import warnings
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression

from dpgrad.convex.estimators import DPLinearRegression

RANDOM = np.random.default_rng(24)
X = RANDOM.uniform(-1, 1, (4000, 3))
Y = 10 + X @ [3.0, -2.0, 0.5] + RANDOM.normal(0, 0.3, 4000)
GIVEN: dict[str, Any] = {"data_norm": 2.0, "target_bounds": (2.0, 18.0), "random_state": 7}


def test_with_little_noise_it_is_least_squares() -> None:
    model = DPLinearRegression(1e8, **GIVEN).fit(X, Y)
    plain = LinearRegression().fit(X, Y)
    np.testing.assert_allclose(model.coef_, plain.coef_, atol=0.01)
    assert model.intercept_ == pytest.approx(plain.intercept_, abs=0.01)


def test_without_an_intercept_zeros_are_predicted_zero() -> None:
    model = DPLinearRegression(1e8, **GIVEN | {"fit_intercept": False}).fit(X, Y)
    plain = LinearRegression(fit_intercept=False).fit(X, Y)
    assert model.intercept_ == 0
    np.testing.assert_allclose(model.coef_, plain.coef_, atol=0.02)


@pytest.mark.parametrize("solver", ["adassp", "gd"])
def test_solvers_learn_within_the_budget(solver: str) -> None:
    model = DPLinearRegression(2.0, solver=solver, **GIVEN).fit(X, Y)
    assert model.score(X, Y) > 0.8
    assert 1.99 < model.privacy_.guarantee.epsilon <= 2.0
    assert model.privacy_.guarantee.delta == 4000**-2.0


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("solver", ["adassp", "gd"])
def test_releases_add_up_to_the_guarantee(solver: str, relation: str) -> None:
    told = DPLinearRegression(1.0, solver=solver, relation=relation, **GIVEN).fit(X, Y).privacy_
    squares = [made.count * (made.sensitivity / made.std) ** 2 for made in told.releases]
    mu = mpmath.sqrt(mpmath.fsum(squares))
    with mpmath.workdps(40):
        spent = mpmath.ncdf(mu / 2 - 1 / mu) - mpmath.e * mpmath.ncdf(-mu / 2 - 1 / mu)
    assert 0.999 * told.guarantee.delta < spent <= told.guarantee.delta
    np.testing.assert_allclose([made.share for made in told.releases], np.array(squares) / sum(squares))


@pytest.mark.parametrize("solver", ["adassp", "gd"])
def test_targets_beyond_their_bounds_are_clipped(solver: str) -> None:
    wild = Y.copy()
    wild[0], inside = 1e12, Y.copy()
    inside[0] = 18.0
    one, other = (DPLinearRegression(1.0, solver=solver, **GIVEN).fit(X, targets) for targets in (wild, inside))
    np.testing.assert_array_equal(one.coef_, other.coef_)


@pytest.mark.parametrize("solver", ["adassp", "gd"])
def test_no_finite_row_shows_by_an_error_or_a_warning(solver: str) -> None:
    found = []
    for value in (1.7e308, 1e6):
        rows = X.copy()
        rows[0] = [value, -value, 0]
        model = DPLinearRegression(1.0, solver=solver, **GIVEN)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ConvergenceWarning)  # decided by what is released
            found.append((model.fit(rows, Y).coef_, model.predict(rows)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4)


def test_targets_of_a_narrow_kind() -> None:
    narrow = Y.astype(np.float16)
    one, other = (
        DPLinearRegression(**GIVEN | {"target_bounds": (0, 1e6)}).fit(X, y) for y in (narrow, narrow.astype(float))
    )
    np.testing.assert_array_equal(one.coef_, other.coef_)


def test_sparse_rows_and_pickle() -> None:
    thin = np.where(np.abs(X) > 0.5, X, 0)
    one, other = (DPLinearRegression(1.0, **GIVEN).fit(rows, Y) for rows in (thin, sparse.csr_array(thin)))
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-4)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(one)).predict(thin), other.predict(thin), rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_norm": None}, "data_norm is required: a bound on the norm of every row, chosen without looking"),
        ({"target_bounds": None}, r"target_bounds is required: a pair \(low, high\), chosen without looking"),
        ({"target_bounds": (3, 1)}, "target_bounds must be finite, each low below its high"),
        ({"target_bounds": "wide"}, r"target_bounds must be a pair \(low, high\) of numbers"),
        ({"epsilon": "much"}, "epsilon must be a number, got 'much'"),
        ({"epsilon": -2}, "epsilon must be positive and finite, got -2"),
        ({"delta": 1e-3}, "delta must be below 1/n = 0.00025"),
        ({"relation": "add-remove"}, "relation must be replace-one or zero-out"),
        ({"target_bounds": (-1e308, 1e308)}, r"target_bounds must lie within ±1e\+100"),
        ({"fit_intercept": "no"}, "fit_intercept must be True or False, got 'no'"),
        ({"solver": "svd"}, "solver must be one of adassp, gd, got 'svd'"),
        ({"clip": 0.1}, "solver adassp does not use clip"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPLinearRegression(**{**GIVEN, **options}).fit(X, Y)


def test_a_matrix_too_large_to_form_is_refused() -> None:
    wide = sparse.random_array((50, 20_000), density=1e-3, format="csr", rng=np.random.default_rng(1))
    with pytest.raises(ValueError, match=r"solver adassp forms a matrix .*got 20,001 of them, at most 10,000: use gd"):
        DPLinearRegression(**GIVEN).fit(wide, np.arange(50.0))
    assert DPLinearRegression(solver="gd", **GIVEN).fit(wide, np.arange(50.0)).coef_.shape == (20_000,)


def test_bad_data() -> None:
    bad = Y.copy()
    bad[3] = np.nan
    with pytest.raises(ValueError, match="Input y contains NaN"):
        DPLinearRegression(**GIVEN).fit(X, bad)
    with pytest.raises(ValueError, match="Found array with 0 sample"):
        DPLinearRegression(**GIVEN).fit(X[:0], Y[:0])
    with pytest.raises(ValueError, match="X and y must hold numbers") as refused:
        DPLinearRegression(**GIVEN).fit(X, ["secret"] * 4000)
    assert "secret" not in str(refused.value)
