"""Scaling with a charge and without one: what is released, how far one row moves it, how much noise is on it."""

import math
import pickle
import warnings
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import sparse
from scipy.stats import chi2, norm
from sklearn.base import clone

from dpgrad.accounting.ledger import Ledger
from dpgrad.convex.estimators import DPStandardScaler, RowNormalizer
from dpgrad.convex.estimators.preprocessing import moment_sums
from dpgrad.convex.solvers import gd

RANDOM = np.random.default_rng(23)
X = RANDOM.normal([1.0, -2.0, 0.0], [1.0, 0.5, 3.0], (2000, 3))
BOUNDS = ([-4.0, -5.0, -20.0], [6.0, 2.0, 12.0])
LOW, HIGH = map(np.array, BOUNDS)


class TestNormalizer:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("make", [np.array, sparse.csr_array], ids=["dense", "sparse"])
    def test_rows(self, make: Any, dtype: Any) -> None:
        rows = make(np.array([[3.0, 4.0], [0.0, 0.0], [0.3, 0.0]], dtype))
        normal, cut = (RowNormalizer(2.0, rule=rule).fit_transform(rows) for rule in ("normalize", "clip"))
        dense = [x.toarray() if sparse.issparse(x) else x for x in (normal, cut)]
        np.testing.assert_allclose(dense[0], [[1.2, 1.6], [0, 0], [2, 0]], rtol=1e-6)
        np.testing.assert_allclose(dense[1], [[1.2, 1.6], [0, 0], [0.3, 0]], rtol=1e-6)
        assert sparse.issparse(normal) == sparse.issparse(rows)
        assert normal.dtype == dtype

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        whole = RowNormalizer().fit_transform(X)
        np.testing.assert_array_equal(whole[5:9], RowNormalizer().transform(X[5:9]))

    def test_duplicate_entries_count_once(self) -> None:
        twice = sparse.csr_array((np.array([1.5, 1.5, 4.0]), np.array([0, 0, 1]), np.array([0, 3])), shape=(1, 2))
        plain = np.array([[3.0, 4.0]])
        np.testing.assert_array_equal(
            RowNormalizer().fit_transform(twice).toarray(), RowNormalizer().fit_transform(plain)
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"norm": 0}, "norm must be positive"),
            ({"norm": 1e200}, r"norm must lie between 1e-12 and 1e\+12, got 1e\+200: scale the columns"),
            ({"rule": "max"}, "rule must be one of normalize, clip, got 'max'"),
            ({"rule": ["clip"]}, "rule must be one of normalize, clip, got"),
        ],
    )
    def test_bad_arguments(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RowNormalizer(**options).fit(X)

    @pytest.mark.parametrize("make", [np.array, sparse.csr_array], ids=["dense", "sparse"])
    @pytest.mark.parametrize("rule", ["normalize", "clip"])
    def test_the_longest_rows_are_scaled_like_any_other(self, rule: str, make: Any) -> None:
        long = make(np.array([[3e300, 4e300], [1.7e308, 0.0], [2e18, -2e18]]))
        with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
            warnings.simplefilter("error")
            found = RowNormalizer(2.0, rule=rule).fit_transform(long)
        dense = found.toarray() if sparse.issparse(found) else found
        expected = RowNormalizer(2.0).fit_transform([[3.0, 4.0], [1.0, 0.0], [1.0, -1.0]])
        np.testing.assert_allclose(dense, expected, rtol=1e-9)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("make", [np.array, sparse.csr_array], ids=["dense", "sparse"])
    def test_no_row_is_longer_than_the_norm(self, make: Any, dtype: Any) -> None:
        """In exact arithmetic, of ordinary rows and of those whose squares are denormal."""
        rows = np.random.default_rng(31).standard_normal((300, 7)) * 10.0 ** np.arange(300)[:, None] ** 0.2
        edge = np.full((1, 7), 1.5e-162)
        edge[0, 3] = 2.4e-162
        for most in (1.0, 0.3):
            found = RowNormalizer(most).fit_transform(make(np.vstack([rows, edge]).astype(dtype)))
            dense = found.toarray() if sparse.issparse(found) else found
            squares = [sum(Fraction(float(value)) ** 2 for value in row) for row in dense]
            assert max(squares) <= Fraction(most) ** 2
            assert min(squares[:-1]) > Fraction(most * (1 - 1e-6)) ** 2
            assert squares[-1] == 0  # shorter than 1e-18


class TestSensitivity:
    def contributions(self, rows: np.ndarray) -> np.ndarray:
        """What each row adds, by leaving it out."""
        whole = moment_sums(rows, LOW, HIGH)
        return np.array([whole - moment_sums(np.delete(rows, i, 0), LOW, HIGH) for i in range(len(rows))])

    def test_no_row_adds_more_than_the_root_of_the_columns(self) -> None:
        middle, half = (LOW + HIGH) / 2, (HIGH - LOW) / 2
        random = np.random.default_rng(28)
        corners = np.sign(random.normal(size=(8, 3)))
        units = np.vstack([random.uniform(-1, 1, (60, 3)), corners, np.zeros((1, 3)), 9 * X[:9]])
        added = self.contributions(middle + half * units)
        lengths = np.sqrt((added**2).sum(axis=(1, 2)))
        assert lengths.max() <= math.sqrt(3) * (1 + 1e-9)
        assert lengths.max() > 0.999 * math.sqrt(3)
        apart = np.sqrt(((added[:, None] - added[None]) ** 2).sum(axis=(2, 3)))
        assert apart.max() <= 2 * math.sqrt(3) * (1 + 1e-9)
        assert apart.max() > 1.7 * math.sqrt(3)

    def test_sums_are_sums(self) -> None:
        units = np.clip((X - (LOW + HIGH) / 2) / ((HIGH - LOW) / 2), -1, 1)
        expected = [units.sum(axis=0), (units**2 - 1).sum(axis=0)]
        np.testing.assert_allclose(moment_sums(X, LOW, HIGH), expected)
        thin = np.where(np.abs(X) > 1, X, 0)
        np.testing.assert_allclose(moment_sums(sparse.csr_array(thin), LOW, HIGH), moment_sums(thin, LOW, HIGH))

    @pytest.mark.parametrize(("relation", "moved"), [("replace-one", 2), ("zero-out", 1)])
    def test_the_price_is_that_of_the_release(self, relation: str, moved: int) -> None:
        scaler = DPStandardScaler(0.7, bounds=BOUNDS, relation=relation, random_state=7).fit(X)
        (made,) = scaler.privacy_.releases
        assert made.sensitivity == pytest.approx(moved * math.sqrt(3) / 2000)
        mu = made.sensitivity / made.std
        with mpmath.workdps(40):
            spent = mpmath.ncdf(mu / 2 - 0.7 / mu) - mpmath.exp(0.7) * mpmath.ncdf(-mu / 2 - 0.7 / mu)
        assert 0.999 * 2000**-2.0 < spent <= 2000**-2.0
        assert scaler.privacy_.guarantee.epsilon <= 0.7

    def test_the_noise_on_the_mean_is_what_is_said(self) -> None:
        """400 fits, 3 columns: two-sided tests of variance and mean at 1e-6 each (seeds are fixed)."""
        found = [DPStandardScaler(bounds=BOUNDS, random_state=seed).fit(X) for seed in range(400)]
        units = np.array([(model.mean_ - (LOW + HIGH) / 2) / ((HIGH - LOW) / 2) for model in found])
        exact = moment_sums(X, LOW, HIGH)[0] / 2000
        scores = ((units - exact) / found[0].privacy_.releases[0].std).ravel()
        square = (scores**2).sum()
        assert chi2.ppf(5e-7, scores.size) < square < chi2.isf(5e-7, scores.size)
        assert abs(scores.sum()) / math.sqrt(scores.size) < norm.isf(5e-7)


class TestScaler:
    def test_with_little_noise_it_is_scikit_learns(self) -> None:
        scaler = DPStandardScaler(1e8, bounds=BOUNDS, random_state=7).fit(X)
        inside = np.clip(X, LOW, HIGH)
        np.testing.assert_allclose(scaler.mean_, inside.mean(axis=0), atol=1e-3)
        np.testing.assert_allclose(scaler.scale_, inside.std(axis=0), rtol=2e-3)
        np.testing.assert_allclose(scaler.transform(X), (inside - scaler.mean_) / scaler.scale_)
        np.testing.assert_allclose(scaler.inverse_transform(scaler.transform(X)), inside, atol=1e-9)

    def test_a_column_that_noise_hides_is_scaled_by_the_noise(self) -> None:
        scaler = DPStandardScaler(0.01, bounds=(-1e6, 1e6), random_state=7).fit(X)
        assert np.abs(scaler.transform(X)).max() <= 2 / math.sqrt(min(1, scaler.privacy_.releases[0].std))

    def test_one_bound_for_all_columns_or_one_for_each(self) -> None:
        same = DPStandardScaler(bounds=(-9, 9), random_state=7).fit(X)
        each = DPStandardScaler(bounds=([-9] * 3, np.full(3, 9.0)), random_state=7).fit(X)
        np.testing.assert_array_equal(same.mean_, each.mean_)

    def test_sparse_rows_stay_sparse(self) -> None:
        thin = sparse.csr_array(np.where(np.abs(X) > 1, X, 0))
        options = {"bounds": BOUNDS, "with_mean": False, "random_state": 7}
        one, other = DPStandardScaler(**options).fit(thin), DPStandardScaler(**options).fit(thin.toarray())
        found = one.transform(thin)
        assert sparse.issparse(found)
        assert found.nnz == thin.nnz
        np.testing.assert_allclose(found.toarray(), other.transform(thin.toarray()))
        np.testing.assert_allclose(one.inverse_transform(found).toarray(), np.clip(thin.toarray(), LOW, HIGH))
        halves = sparse.csr_array(
            (np.repeat(thin.data / 2, 2), np.repeat(thin.indices, 2), 2 * thin.indptr), shape=thin.shape
        )
        np.testing.assert_allclose(DPStandardScaler(**options).fit(halves).scale_, one.scale_)

    def test_without_a_scale(self) -> None:
        scaler = DPStandardScaler(bounds=BOUNDS, with_std=False, random_state=7).fit(X)
        assert scaler.scale_ is None
        np.testing.assert_allclose(scaler.transform(X), np.clip(X, LOW, HIGH) - scaler.mean_)

    def test_it_pays_for_itself(self) -> None:
        ledger = Ledger()
        scaler = DPStandardScaler(0.5, bounds=BOUNDS, ledger=ledger).fit(X)
        assert ledger.guarantee(2000**-2.0, "exact").epsilon == scaler.privacy_.guarantee.epsilon
        assert not scaler.privacy_.reproducible

    def test_pickle_and_clone(self) -> None:
        scaler = DPStandardScaler(bounds=BOUNDS, random_state=7).fit(X)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(scaler)).transform(X), scaler.transform(X))
        np.testing.assert_array_equal(clone(scaler).fit_transform(X), scaler.transform(X))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"bounds": None}, r"bounds is required: a pair \(low, high\), chosen without looking at the data"),
            ({"bounds": 3.0}, r"bounds must be a pair \(low, high\) of numbers, got 3.0"),
            ({"bounds": (1.0, 1.0)}, "bounds must be finite, each low below its high"),
            ({"bounds": (-1.0, float("inf"))}, "bounds must be finite"),
            ({"bounds": ([0.0] * 4, [1.0] * 4)}, r"arrays of 3, one for each column, got shapes \(4,\) and \(4,\)"),
            (
                {"bounds": (-1e308, 1e308)},
                r"bounds must lie within ±1e\+100, each low below its high by 1e-100 or more",
            ),
            ({"bounds": (0, 5e-324)}, r"bounds must lie within ±1e\+100, each low below its high by 1e-100 or more"),
            ({"with_mean": "no"}, "with_mean must be True or False, got 'no'"),
            ({"bounds": ("a", "b")}, r"bounds must be a pair \(low, high\) of numbers"),
            ({"epsilon": "1"}, "epsilon must be a number, got '1'"),
            ({"epsilon": -1}, "epsilon must be positive"),
            ({"delta": 0.1}, "delta must be below 1/n"),
            ({"relation": "add-remove"}, "relation must be replace-one or zero-out"),
            ({"with_mean": False, "with_std": False}, "with_mean or with_std must be True"),
        ],
    )
    def test_bad_arguments(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DPStandardScaler(**{"bounds": BOUNDS, **options}).fit(X)

    @pytest.mark.parametrize("make", [np.array, sparse.csr_array], ids=["dense", "sparse"])
    def test_values_far_beyond_the_bounds_are_clipped_without_a_word(self, make: Any) -> None:
        far, near = X.copy(), X.copy()
        far[0], near[0] = [1e308, -1.7e308, 1e308], [1e-3, -1e-3, 1e-3]
        options = {"bounds": (-1e-3, 1e-3), "random_state": 7, "with_mean": make is np.array}
        with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
            warnings.simplefilter("error")
            one = DPStandardScaler(**options).fit(make(far))
            moved = one.transform(make(far))
        other = DPStandardScaler(**options).fit(make(near))
        np.testing.assert_array_equal(one.scale_, other.scale_)
        assert np.abs(moved).max() < 1e3

    def test_sparse_rows_that_would_become_dense(self) -> None:
        thin = sparse.csr_array(X)
        with pytest.raises(ValueError, match="cannot be centred without making them dense: with_mean=False"):
            DPStandardScaler(bounds=BOUNDS).fit(thin)
        with pytest.raises(ValueError, match="bounds must hold 0 for sparse rows"):
            DPStandardScaler(bounds=(1.0, 2.0), with_mean=False).fit(thin)

    def test_rows_that_are_not_finite(self) -> None:
        bad = X.copy()
        bad[0, 0] = np.nan
        with pytest.raises(ValueError, match=r"^Input X contains NaN: fill in missing values by a public rule"):
            DPStandardScaler(bounds=BOUNDS).fit(bad)


def test_released_sums_are_lowered_by_what_rounding_may_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, rows at the upper bound have a mean of it, less a millionth of half the width."""
    monkeypatch.setattr(gd, "gaussian", lambda key, step, shape, std: np.zeros(shape))
    found = DPStandardScaler(bounds=(-1.0, 1.0)).fit(np.ones((500, 2))).mean_
    assert found is not None
    assert ((found > 1 - 2e-6) & (found < 1 - 5e-7)).all()


def test_no_unit_is_beyond_one() -> None:
    """Also where (high − middle)/half rounds to more."""
    random = np.random.default_rng(3)
    low = random.uniform(-1, 1, 2000)
    high = low + random.uniform(1e-3, 2, 2000)
    middle, half = low + (high - low) / 2, (high - low) / 2
    assert (np.abs((np.array([low, high]) - middle) / half) > 1).any()  # what is guarded against does happen
    sums = [moment_sums(edge[None, :], low, high) for edge in (low, high)]
    assert all((np.abs(first) <= 1).all() and (second <= 0).all() for first, second in sums)
