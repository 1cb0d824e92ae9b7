"""Classifiers: what they compute, what they say about privacy, and what they refuse."""

import inspect
import pickle
import re
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import normalize

from dpgrad import errors
from dpgrad.accounting.events import Relation
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex.estimators import (
    DPLinearRegression,
    DPLinearSVC,
    DPLogisticRegression,
    DPStandardScaler,
    PrivacyWarning,
    RowNormalizer,
    rows,
)
from dpgrad.convex.estimators.solvers import SOLVERS
from dpgrad.convex.losses import Logistic
from dpgrad.convex.solvers import auto

RANDOM = np.random.default_rng(22)
X = RANDOM.standard_normal((600, 4))
Y = (X @ [2.0, 1.0, 0.0, -1.0] + 0.3 > 0).astype(int)
THREE = np.array(["low", "middle", "top"])[np.digitize(X[:, 0] + 0.2 * X[:, 1], [-0.5, 0.5])]
BOTH = pytest.mark.parametrize("kind", [DPLogisticRegression, DPLinearSVC])


def fitted(kind: Any = DPLogisticRegression, **options: Any) -> Any:
    return kind(**{"epsilon": 2.0, "classes": [0, 1], "random_state": 7, **options}).fit(X, Y)


class TestWhatIsComputed:
    def test_the_default_is_the_solver_without_tuning(self) -> None:
        model = fitted()
        alone = auto.solve(
            X.astype(np.float32), 2 * Y - 1, Logistic(),
            epsilon=2.0, delta=600**-2.0, relation=Relation.REPLACE_ONE, key=rows.key_of(7, "DPLogisticRegression"),
        )  # fmt: skip
        np.testing.assert_array_equal(model.coef_, alone.coef.T)
        np.testing.assert_array_equal(model.intercept_, alone.intercept)
        np.testing.assert_allclose(model.decision_function(X), alone.scores(X)[:, 0])

    @pytest.mark.parametrize("weights", [None, {0: 1.0, 1: 5.0}])
    def test_without_noise_it_is_scikit_learns_logistic_regression(self, weights: dict[int, float] | None) -> None:
        l2, largest = 0.05, max((weights or {0: 1.0}).values())
        ours = fitted(
            epsilon=1e9, solver="gd", fit_intercept=False, l2=l2 / largest, max_iter=2000, class_weight=weights,
            momentum=0.5,
        )  # fmt: skip
        theirs = LogisticRegression(C=1 / (600 * l2), fit_intercept=False, class_weight=weights, tol=1e-10)
        theirs.fit(normalize(X), Y)
        np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=2e-3, atol=2e-3)

    def test_without_noise_the_intercept_is_scikit_learns(self) -> None:
        random = np.random.default_rng(26)
        rows = random.standard_normal((6000, 4))
        labels = (random.random(6000) < expit(rows @ [1.0, 0.5, 0.0, -0.5] + 0.8)).astype(int)
        ours = DPLogisticRegression(1e9, classes=[0, 1], solver="gd", data_norm=3.0, max_iter=500, momentum=0.9)
        ours.set_params(random_state=7).fit(rows, labels)
        clipped = RowNormalizer(3.0, rule="clip").fit_transform(rows)
        theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(clipped, labels)
        np.testing.assert_allclose(ours.decision_function(rows), theirs.decision_function(clipped), atol=2e-3)
        assert abs(theirs.intercept_[0]) > 0.5

    def test_without_noise_the_machine_minimises_its_loss(self) -> None:
        ours = fitted(DPLinearSVC, epsilon=1e9, solver="gd", fit_intercept=False, l2=0.1, max_iter=1000)
        unit, signs = normalize(X), 2 * Y - 1

        def objective(weights: np.ndarray) -> float:
            z = signs * (unit @ weights)
            bent = np.where(np.abs(1 - z) <= 0.1, (1.1 - z) ** 2 / 0.4, np.maximum(1 - z, 0))
            return float(bent.mean() + 0.05 * weights @ weights)

        best = minimize(objective, np.zeros(4), tol=1e-10).x
        np.testing.assert_allclose(ours.coef_[0], best, atol=2e-3)

    def test_without_noise_softmax_is_scikit_learns(self) -> None:
        ours = DPLogisticRegression(
            1e9, classes=["low", "middle", "top"], solver="gd", fit_intercept=False, l2=0.05, max_iter=2000,
            random_state=7,
        ).fit(X, THREE)  # fmt: skip
        theirs = LogisticRegression(C=1 / (600 * 0.05), fit_intercept=False, tol=1e-10).fit(normalize(X), THREE)
        np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(normalize(X)), atol=2e-3)

    @BOTH
    @pytest.mark.parametrize("solver", SOLVERS)
    def test_every_solver_learns_and_stays_within_the_budget(self, kind: Any, solver: str) -> None:
        model = fitted(kind, solver=solver, epsilon=6.0)
        # rows with a bound of 1 on 600 rows: ridge and noise leave less to some solvers, never less than this
        assert model.score(X, Y) > (0.6 if solver in ("output", "amp") else 0.8)
        assert 5.5 < model.privacy_.guarantee.epsilon <= 6.0
        assert model.privacy_.guarantee.delta == 600**-2.0

    @pytest.mark.parametrize("solver", SOLVERS)
    def test_every_solver_knows_many_classes(self, solver: str) -> None:
        images, digits = load_digits(return_X_y=True)
        for kind in (DPLogisticRegression, DPLinearSVC):
            model = kind(20.0, solver=solver, classes=range(10), random_state=7).fit(images, digits)
            assert model.coef_.shape == (10, 64)
            assert model.decision_function(images).shape == (1797, 10)
            assert model.score(images, digits) > 0.6
            assert model.privacy_.guarantee.epsilon <= 20.0

    @pytest.mark.parametrize("solver", ["auto", "objective"])
    def test_probabilities_are_probabilities(self, solver: str) -> None:
        for labels, classes in ((Y, [0, 1]), (THREE, ["top", "low", "middle"])):
            model = DPLogisticRegression(4.0, classes=classes, solver=solver, random_state=7).fit(X, labels)
            chances = model.predict_proba(X)
            assert chances.shape == (600, len(classes))
            np.testing.assert_allclose(chances.sum(axis=1), 1)
            np.testing.assert_allclose(np.log(chances), model.predict_log_proba(X))
            np.testing.assert_array_equal(model.classes_, sorted(classes))
            np.testing.assert_array_equal(model.classes_[chances.argmax(axis=1)], model.predict(X))

    @pytest.mark.parametrize("classes", [2, 3])
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_probabilities_allow_for_clipped_gradients(self, classes: int, scale: float) -> None:
        """Rows that follow the model, hardly any noise: the log loss is far nearer to the best than that of the scores.

        The bias is there: the scores of two classes are larger than the true ones by a third and more.
        """
        random = np.random.default_rng(43)
        table = normalize(random.standard_normal((40_000, 3)))
        weights = scale * np.array([[3.0, -2.0, 1.0], [0.0, 2.0, -3.0]])[: classes - 1]
        logits = np.column_stack([np.zeros(len(table)), table @ weights.T + 0.5 * scale])
        truth = softmax(logits, axis=1)
        labels = (truth.cumsum(axis=1) < random.random((len(table), 1))).sum(axis=1)
        model = DPLogisticRegression(100.0, classes=range(classes), data_norm=1.0, random_state=7).fit(table, labels)
        scores = model.decision_function(table)
        plain = softmax(scores, axis=1) if classes > 2 else np.column_stack([expit(-scores), expit(scores)])
        chances = model.predict_proba(table)

        def loss(found: np.ndarray) -> float:
            return -float(np.sum(truth * np.log(found), axis=1).mean())

        assert loss(chances) - loss(truth) < 0.7 * (loss(plain) - loss(truth))
        assert np.abs(chances - truth).max() < np.abs(plain - truth).max()
        np.testing.assert_array_equal(model.classes_[chances.argmax(axis=1)], model.predict(table))
        np.testing.assert_allclose(chances.sum(axis=1), 1)
        if classes == 2:
            assert (np.abs(model.coef_[0]) > 1.3 * np.abs(weights[0])).all()
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again.predict_proba(table[:9]), model.predict_proba(table[:9]))

    def test_other_solvers_have_the_probabilities_of_their_scores(self) -> None:
        model = fitted(solver="gd")
        np.testing.assert_allclose(model.predict_proba(X)[:, 1], expit(model.decision_function(X)))
        assert model.cut_ is None
        assert fitted(class_weight={0: 2.0}).cut_ is None

    @pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "output"])
    def test_data_and_norm_in_other_units_give_the_same_model(self, solver: str) -> None:
        one = fitted(solver=solver, data_norm=1.0)
        for unit in (2.0**-13, 2.0**10):
            model = DPLogisticRegression(2.0, classes=[0, 1], solver=solver, data_norm=unit, random_state=7)
            np.testing.assert_allclose(
                model.fit(unit * X, Y).decision_function(unit * X), one.decision_function(X), rtol=2e-3, atol=2e-3
            )

    def test_rows_are_treated_in_prediction_as_in_the_fit(self) -> None:
        normalised, clipped = fitted(), fitted(data_norm=2.0)
        np.testing.assert_allclose(normalised.decision_function(50 * X), normalised.decision_function(X))
        np.testing.assert_allclose(clipped.decision_function(50 * X), clipped.decision_function(1000 * X))
        assert np.abs(clipped.decision_function(0.1 * X) - clipped.decision_function(X)).max() > 0.1
        said = fitted(data_norm="normalize")
        np.testing.assert_array_equal(said.coef_, normalised.coef_)
        assert said.set_params(data_norm=9.0).decision_function(X)[0] == normalised.decision_function(X)[0]

    @BOTH
    def test_sparse_rows_give_what_dense_ones_do(self, kind: Any) -> None:
        thin = np.where(np.abs(X) > 0.7, X, 0)
        dense, csr, csc = (kind(2.0, classes=[0, 1], random_state=7) for _ in range(3))
        dense.fit(thin, Y)
        csr.fit(sparse.csr_array(thin), Y)
        csc.fit(sparse.csc_array(thin), Y)
        np.testing.assert_allclose(dense.coef_, csr.coef_, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(csr.coef_, csc.coef_)
        np.testing.assert_allclose(csr.decision_function(sparse.csr_array(thin)), csr.decision_function(thin))

    def test_duplicate_entries_of_sparse_rows_are_one_entry(self) -> None:
        whole = sparse.csr_array(X)
        halves = sparse.csr_array(
            (np.repeat(whole.data / 2, 2), np.repeat(whole.indices, 2), 2 * whole.indptr), shape=whole.shape
        )
        before = halves.nnz
        one, other = (DPLogisticRegression(2.0, classes=[0, 1], random_state=7).fit(x, Y) for x in (whole, halves))
        np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-5)
        assert halves.nnz == before  # the caller's matrix is left as it is

    @pytest.mark.parametrize(("dtype", "value"), [("float64", 1.7e308), ("float32", 3.4e38), ("int8", 100)])
    def test_duplicate_entries_do_not_overflow(self, dtype: str, value: float) -> None:
        """They add up to a value that is longer than any other, or in whole numbers to their sum."""
        whole = sparse.csr_array(np.rint(9 * X) + 1000 * (np.arange(X.size).reshape(X.shape) == 0))
        once = whole.copy()
        once.data[0] = 200
        halves = sparse.csr_array(
            (
                np.append([value, value], whole.data[1:]).astype(dtype),
                np.append(0, whole.indices),
                np.append(0, whole.indptr[1:] + 1),
            ),
            shape=whole.shape,
        )
        model = DPLogisticRegression(2.0, classes=[0, 1], random_state=7)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = model.fit(halves, Y).coef_
        if dtype == "int8":
            np.testing.assert_array_equal(found, model.fit(once, Y).coef_)
        assert np.isfinite(found).all()

    def test_sparse_rows_are_never_made_dense(self) -> None:
        columns = 200_000
        wide = sparse.random_array((300, columns), density=2e-4, format="csr", rng=np.random.default_rng(3))
        labels = np.arange(300) % 2
        tracemalloc.start()
        try:
            model = DPLogisticRegression(1.0, classes=[0, 1], random_state=7).fit(wide, labels)
            model.predict_proba(wide)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 300 * columns * 4 / 5  # dense rows in float32 would take 240 MB
        assert model.coef_.shape == (1, columns)

    @pytest.mark.parametrize("kind", ["float64", "int64", "uint8", "float16", "bool", "float64 sparse", "int64 sparse"])
    def test_memory(self, kind: str) -> None:
        """Input and fit together are below twice the input where a number takes eight bytes.

        A fit copies the values to float32, half of float64 and four times uint8, and holds beside them less than the
        table takes in float32.
        """
        name, _, thin = kind.partition(" ")
        random = np.random.default_rng(27)
        if thin:
            table = sparse.random_array((40_000, 1000), density=0.02, format="csr", rng=random)
            table = (100 * table).astype(name)
            size = table.data.nbytes + table.indices.nbytes + table.indptr.nbytes
            copied, narrow = 4 * table.nnz, size - table.data.nbytes + 4 * table.nnz
        else:
            table = random.integers(0, 2, (60_000, 60)).astype(name)
            size, copied, narrow = table.nbytes, 4 * table.size, 4 * table.size
        labels = np.arange(table.shape[0]) % 7
        DPLogisticRegression(1.0, classes=range(7), max_iter=2).fit(table[:500], labels[:500])
        tracemalloc.start()
        try:
            DPLogisticRegression(1.0, classes=range(7), max_iter=2).fit(table, labels)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < copied + narrow
        if name in ("float64", "int64"):
            assert size + peak < 2 * size

    def test_a_weight_moves_the_boundary(self) -> None:
        shares = [fitted(class_weight=weights).predict(X).mean() for weights in ({0: 10.0}, None, {1: 10.0})]
        assert shares[0] < shares[1] - 0.05
        assert shares[2] > shares[1] + 0.05

    def test_wide_floats_are_narrowed_and_whole_numbers_are_read(self) -> None:
        narrow = DPLogisticRegression(2.0, classes=[0, 1], random_state=7).fit(X.astype(np.float32), Y)
        np.testing.assert_array_equal(narrow.coef_, fitted().coef_)
        whole = DPLogisticRegression(2.0, classes=[0, 1], random_state=7).fit(np.rint(9 * X).astype(int), Y)
        assert whole.score(np.rint(9 * X).astype(int), Y) > 0.8


class TestPrivacy:
    @BOTH
    @pytest.mark.parametrize("solver", ["auto", "gd", "output"])
    @pytest.mark.parametrize(("relation", "moved"), [("replace-one", 2), ("zero-out", 1)])
    def test_releases_add_up_to_the_guarantee(self, kind: Any, solver: str, relation: str, moved: int) -> None:
        """μ² = Σ count·(sensitivity/std)² and the profile of a Gaussian, both computed here."""
        model = fitted(kind, solver=solver, relation=relation)
        told = model.privacy_
        squares = [made.count * (made.sensitivity / made.std) ** 2 for made in told.releases]
        mu = mpmath.sqrt(mpmath.fsum(squares))
        with mpmath.workdps(40):
            delta = mpmath.ncdf(mu / 2 - 2 / mu) - mpmath.exp(2) * mpmath.ncdf(-mu / 2 - 2 / mu)
        assert delta <= told.guarantee.delta
        assert delta > 0.999 * told.guarantee.delta
        np.testing.assert_allclose([made.share for made in told.releases], np.array(squares) / sum(squares))
        assert told.guarantee.relation == relation

    def test_what_is_public_and_what_is_not_covered_is_said(self) -> None:
        told = fitted().privacy_
        assert told.reproducible
        assert "the number of rows, 600, and of columns, 4, and the names and types of the columns" in told.public
        assert "that every value is a finite number" in told.public
        assert "the 2 classes, and that no label lies beyond them" in told.public
        assert any("other fits" in fact and "shared ledger" in fact for fact in told.outside)
        assert "scores on these rows or on held-out ones, and choices made from them" in told.outside
        text = str(told)
        assert text.startswith("ε = 2 at δ = 2.77778e-06")
        assert text.endswith("reproducible, not for release")
        assert "released: gradients, sensitivity" in text

    def test_without_a_seed_every_fit_differs_and_may_be_released(self) -> None:
        one, other = fitted(random_state=None), fitted(random_state=None)
        assert not one.privacy_.reproducible
        assert np.abs(one.coef_ - other.coef_).max() > 1e-6

    def test_numpys_global_seed_is_not_used(self) -> None:
        found = []
        for _ in range(2):
            np.random.seed(0)
            found.append(fitted(random_state=None).coef_)
        assert np.abs(found[0] - found[1]).max() > 1e-6

    @pytest.mark.parametrize("make", [lambda: 7, lambda: np.random.RandomState(7), lambda: np.random.default_rng(7)])
    def test_every_kind_of_seed_repeats(self, make: Any) -> None:
        one, other = fitted(random_state=make()), fitted(random_state=make())
        np.testing.assert_array_equal(one.coef_, other.coef_)
        assert one.privacy_.reproducible

    def test_inferred_classes_are_the_one_warning(self) -> None:
        with pytest.warns(PrivacyWarning, match=r"classes were read from y.*name them, classes=\[...\]"):
            model = DPLogisticRegression(random_state=7).fit(X, Y)
        assert "the labels that occur, read from y" in model.privacy_.outside
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            named = fitted()
        assert not any("labels" in fact for fact in named.privacy_.outside)

    def test_warnings_name_the_line_of_the_caller(self) -> None:
        """Through a pipeline of scikit-learn too."""
        X, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 2
        for model in (
            DPLogisticRegression(max_iter=2),
            make_pipeline(RowNormalizer(), DPLogisticRegression(max_iter=2)),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.fit(X, y)
            assert {Path(one.filename).name for one in caught} == {Path(__file__).name}

    def test_named_classes_silence_every_warning_about_the_labels(self) -> None:
        """scikit-learn warns where labels are many for so few rows: by y, which is private."""
        labels = np.arange(200) % 101
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DPLogisticRegression(1.0, classes=range(200), random_state=7, max_iter=2).fit(X[:200], labels)

    @BOTH
    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("norm", [None, 1.0], ids=["normalised", "clipped"])
    def test_no_finite_row_shows_by_an_error_or_a_warning(self, kind: Any, solver: str, norm: float | None) -> None:
        """One row of the longest there are: fitted and charged as its neighbour is, and predicted."""
        long, near = X.copy(), X.copy()
        long[0] = [1.7e308, -1.7e308, 1.7e308, 0.0]
        near[0] = [1e6, -1e6, 1e6, 0.0]
        found = []
        for table in (long, near):
            ledger = Ledger()
            model = kind(2.0, classes=[0, 1], data_norm=norm, solver=solver, random_state=7, ledger=ledger)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", ConvergenceWarning)  # decided by what is released
                found.append((model.fit(table, Y).coef_, model.decision_function(table), len(ledger.entries())))
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)
        assert found[0][2] == 1

    def test_a_class_that_does_not_occur_is_learned_like_any_other(self) -> None:
        model = DPLogisticRegression(classes=[0, 1], random_state=7).fit(X, np.zeros(600, int))
        assert model.predict(X).mean() < 0.1
        model = DPLogisticRegression(classes=[0, 1, 2], random_state=7).fit(X, Y)
        assert model.predict_proba(X).shape == (600, 3)

    def test_delta_is_given_or_the_square(self) -> None:
        assert fitted().privacy_.guarantee.delta == 600**-2.0
        assert fitted(delta=1e-5).privacy_.guarantee.delta == 1e-5


class TestAsAnEstimator:
    @BOTH
    def test_pickle_and_clone(self, kind: Any) -> None:
        model = fitted(kind)
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again.predict(X), model.predict(X))
        assert again.privacy_ == model.privacy_
        assert clone(model).get_params() == model.get_params()

    def test_pipeline(self) -> None:
        chain = make_pipeline(
            DPStandardScaler(1.0, bounds=(-5.0, 5.0), random_state=7),
            RowNormalizer(),
            DPLogisticRegression(1.0, classes=[0, 1], random_state=7),
        )
        assert chain.fit(X, Y).score(X, Y) > 0.85

    def test_data_frames(self) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(X, columns=["a", "b", "c", "d"])
        labels = pandas.Series(np.where(Y == 1, "yes", "no"))
        model = DPLogisticRegression(2.0, classes=["no", "yes"], random_state=7).fit(frame, labels)
        assert model.feature_names_in_.tolist() == ["a", "b", "c", "d"]
        np.testing.assert_array_equal(model.coef_, fitted().coef_)
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(frame[["b", "a", "c", "d"]])
        scaler = DPStandardScaler(bounds=(-5.0, 5.0), random_state=7).set_output(transform="pandas")
        assert scaler.fit_transform(frame).columns.tolist() == ["a", "b", "c", "d"]

    def test_init_stores_and_nothing_else(self) -> None:
        model = DPLogisticRegression("no number", classes=3, solver=5)
        assert vars(model) == model.get_params()


BAD = {
    "epsilon negative": ({"epsilon": -1.0}, "epsilon must be positive and finite, got -1.0"),
    "epsilon zero": ({"epsilon": 0}, "epsilon must be positive and finite, got 0"),
    "epsilon text": ({"epsilon": "1"}, "epsilon must be a number, got '1'"),
    "epsilon nan": ({"epsilon": float("nan")}, "epsilon must be a number, got nan"),
    "epsilon infinite": ({"epsilon": float("inf")}, "epsilon must be positive and finite, got inf"),
    "delta large": ({"delta": 0.01}, "delta must be below 1/n = 0.00166667 for n = 600 rows, got 0.01"),
    "delta at 1/n": ({"delta": 1 / 600}, "delta must be below 1/n"),
    "delta zero": ({"delta": 0.0}, "delta must lie strictly between 0 and 1"),
    "delta text": ({"delta": "small"}, "delta must be a number"),
    "relation": ({"relation": "add-remove"}, "relation must be replace-one or zero-out, got 'add-remove'"),
    "relation unknown": ({"relation": 3}, "relation must be one of replace-one, zero-out, got 3"),
    "norm": ({"data_norm": -2.0}, "data_norm must be positive and finite, got -2.0"),
    "norm text": ({"data_norm": "max"}, "data_norm must be a positive number or 'normalize', got 'max'"),
    "norm beyond floats": ({"data_norm": 1e160}, "data_norm must lie between 1e-12 and 1e+12, got 1e+160: scale"),
    "norm below floats": ({"data_norm": 1e-200}, "data_norm must lie between 1e-12 and 1e+12, got 1e-200: scale"),
    "classes without order": (
        {"classes": ["yes", None]},
        "classes must be a list of at least 2 different labels, text or",
    ),
    "one class": ({"classes": [1]}, "classes must be a list of at least 2 different labels"),
    "same class": ({"classes": [0, 1, 1]}, "classes must be a list of at least 2 different labels"),
    "no list": ({"classes": 2}, "classes must be a list of at least 2 different labels"),
    "other labels": ({"classes": [1, 2]}, "y holds labels that are not among the 2 classes"),
    "labels of another kind": ({"classes": ["0", "1"]}, "y holds labels that are not among the 2 classes"),
    "weights by another name": ({"class_weight": "even"}, "class_weight must be a dict of public weights or"),
    "balanced": (
        {"class_weight": "balanced", "solver": "objective"},
        "solver objective does not use class_weight",
    ),
    "intervals of auto": ({"inference_share": 0.1}, "inference_share is refused: "),
    "intervals of amp": ({"inference_share": 0.1, "solver": "amp"}, "inference_share is refused: "),
    "intervals, clipped": (
        {"inference_share": 0.1, "solver": "gd", "clip": 0.1},
        "inference_share is refused: ",
    ),
    "intervals, weighted": (
        {"inference_share": 0.1, "solver": "gd", "class_weight": "balanced"},
        "inference_share is refused: weighted rows",
    ),
    "inference_share": ({"inference_share": 0.95, "solver": "gd"}, "inference_share must be at most 0.9, got 0.95"),
    "weight of another class": ({"class_weight": {7: 1.0}}, "class_weight names 7, which is not among the classes"),
    "weight negative": ({"class_weight": {0: -1.0}}, "class_weight must be zero or more"),
    "weights zero": ({"class_weight": {0: 0, 1: 0}}, "class_weight must have a positive weight"),
    "weight with objective": (
        {"class_weight": {0: 2.0}, "solver": "objective"},
        "solver objective does not use class_weight",
    ),
    "misspelt solver": ({"solver": "dg"}, "got 'dg': did you mean gd?"),
    "solver": ({"solver": "lbfgs"}, "solver must be one of auto, gd, sgd, output, objective, amp, got 'lbfgs'"),
    "unused option": ({"l2": 0.1}, "solver auto does not use l2: leave l2 at None"),
    "iterations": ({"max_iter": 0}, "max_iter must be a whole number of at least 1, got 0"),
    "batch": ({"solver": "output", "batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
    "seed": ({"random_state": -1}, "random_state must be a whole number of at least 0, got -1"),
    "seed text": ({"random_state": "x"}, "random_state must be a whole number, got 'x'"),
    "ledger": (
        {"ledger": "spent.jsonl"},
        r"ledger must be a dpgrad.Ledger or None, got 'spent.jsonl'",
    ),
    "intercept": ({"fit_intercept": "yes"}, "fit_intercept must be True or False"),
    "intercept of gd": ({"fit_intercept": "no", "solver": "gd"}, "fit_intercept must be True or False, got 'no'"),
    "intercept as a number": (
        {"fit_intercept": 1, "solver": "objective"},
        "fit_intercept must be True or False, got 1",
    ),
}


class TestBadInput:
    @pytest.mark.parametrize("name", BAD)
    @BOTH
    def test_arguments(self, kind: Any, name: str) -> None:
        options, message = BAD[name]
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            fitted(kind, **options)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("make", [np.array, sparse.csr_array], ids=["dense", "sparse"])
    def test_rows_that_are_not_finite(self, make: Any, value: float) -> None:
        bad = X.copy()
        bad[3, 2] = value
        with pytest.raises(ValueError, match=r"^Input X contains (NaN: fill in missing values by|infinity)") as refused:
            DPLogisticRegression(classes=[0, 1]).fit(make(bad), Y)
        assert "\n" not in str(refused.value)

    def test_targets_that_are_not_there(self) -> None:
        labels = Y.astype(float)
        labels[0] = np.nan
        with pytest.raises(ValueError, match="Input y contains NaN"):
            DPLogisticRegression(classes=[0, 1]).fit(X, labels)
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            DPLogisticRegression(classes=[0, 1]).fit(X, Y[1:])

    def test_no_rows_and_one_row(self) -> None:
        with pytest.raises(ValueError, match="Found array with 0 sample"):
            DPLogisticRegression(classes=[0, 1]).fit(X[:0], Y[:0])
        with pytest.raises(ValueError, match="n_samples = 1: one row alone cannot be hidden"):
            DPLogisticRegression(classes=[0, 1]).fit(X[:1], Y[:1])

    @pytest.mark.filterwarnings("ignore::dpgrad.convex.estimators.PrivacyWarning")
    def test_one_class(self) -> None:
        with pytest.raises(ValueError, match=r"y holds one class: at least 2 are needed"):
            DPLogisticRegression().fit(X, np.ones(600))

    def test_numbers_as_labels_of_a_regression(self) -> None:
        with pytest.raises(ValueError, match="y holds labels that are not among the 2 classes"):
            DPLogisticRegression(classes=[0, 1]).fit(X, X[:, 0])
        with pytest.raises(ValueError, match="Unknown label type: continuous"):
            DPLogisticRegression().fit(X, X[:, 0])

    @pytest.mark.parametrize("stranger", ["secret", None, ("secret",), ["secret"], 0.5], ids=str)
    def test_labels_of_another_kind_among_them(self, stranger: object) -> None:
        labels = Y.astype(object)
        labels[5] = stranger
        with pytest.raises(ValueError, match=r"not among the 2 classes|Input y contains NaN") as refused:
            DPLogisticRegression(classes=[0, 1]).fit(X, labels)
        assert "secret" not in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.filterwarnings("ignore::dpgrad.convex.estimators.PrivacyWarning")
    def test_labels_of_several_kinds_have_no_order(self) -> None:
        labels = Y.astype(object)
        labels[5] = "secret"
        with pytest.raises(ValueError, match=r"^(y holds labels that cannot be put in order|Unknown label)") as refused:
            DPLogisticRegression().fit(X, labels)
        assert "secret" not in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_objects_as_labels(self) -> None:
        labels = np.where(Y == 1, "yes", "no").astype(object)
        model = DPLogisticRegression(2.0, classes=["yes", "no"], random_state=7).fit(X, labels)
        np.testing.assert_array_equal(model.coef_, fitted().coef_)

    def test_weights_of_rows_are_not_taken(self) -> None:
        with pytest.raises(TypeError, match="sample_weight"):
            DPLogisticRegression(classes=[0, 1]).fit(X, Y, sample_weight=np.ones(600))

    def test_no_message_repeats_a_value_of_the_data(self) -> None:
        labels = np.where(Y == 1, "secret-diagnosis", "none")
        with pytest.raises(ValueError, match="not among the 2 classes") as refused:
            DPLogisticRegression(classes=["none", "other"]).fit(X, labels)
        assert "secret" not in str(refused.value)
        text = X.astype(object)
        text[0, 0] = "secret-name"
        with pytest.raises(ValueError, match="X and y must hold numbers") as refused:
            DPLogisticRegression(classes=[0, 1]).fit(text, Y)
        assert "secret" not in str(refused.value)
        assert refused.value.__cause__ is None
        assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    "kind", [DPLogisticRegression, DPLinearSVC, DPLinearRegression, DPStandardScaler, RowNormalizer]
)
class TestKeywords:
    def test_the_estimator_is_named_and_the_nearest_option(self, kind: type[Any]) -> None:
        for name in inspect.signature(kind).parameters:
            said = f"^{kind.__name__} has no option '{name}s': did you mean {name}\\?$"
            with pytest.raises(TypeError, match=said) as raised:
                kind(**{f"{name}s": 1})
            assert isinstance(raised.value, errors.OptionError)

    def test_copies_are_made_as_scikit_learn_makes_them(self, kind: type[Any]) -> None:
        assert clone(kind()).get_params() == kind().get_params()


@pytest.mark.parametrize("kind", [DPLogisticRegression, DPLinearSVC])
def test_c_is_a_ridge(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} has no option 'C': write l2=1/\(C\*n\) for n rows"):
        kind(C=1)


def test_l2_of_c_gives_the_model_of_scikit_learn() -> None:
    """Without noise to speak of, l2 = 1/(C·n) is the ridge of scikit-learn's C."""
    random = np.random.default_rng(7)
    X = random.standard_normal((500, 2))
    X /= np.maximum(1, np.linalg.norm(X, axis=1, keepdims=True))
    y = (X @ [2.0, 1.0] + 0.3 * random.standard_normal(500) > 0).astype(int)
    theirs = LogisticRegression(C=0.05, fit_intercept=False).fit(X, y)
    ours = DPLogisticRegression(
        1e6, delta=1e-4, data_norm=1.0, classes=[0, 1], fit_intercept=False, solver="gd", l2=1 / (0.05 * 500),
        learning_rate=4.0, max_iter=300, random_state=7,
    ).fit(X, y)  # fmt: skip
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=0.02)
