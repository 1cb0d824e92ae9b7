"""Attacks on the convex part: each was once a way past the guarantee, and each must fail.

**Drift.** In float32 a sum of 2ᵏ is rounded to multiples of u = 2^(k−23). Half of the rows bring it there; the others
add 0.51u and take 0.49u in turn, and each pair is rounded to u or to nothing, according to what one row among the first
had added. So one row steers all others, and moves the sum by far more than its clip bound.
"""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

from dpgrad.accounting import account, exact
from dpgrad.accounting.events import (
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Pinned,
    Relation,
    Shifted,
    leaves,
)
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex.design import Design
from dpgrad.convex.estimators import (
    DPLinearRegression,
    DPLinearSVC,
    DPLogisticRegression,
    DPPoissonRegressor,
    DPStandardScaler,
    RowNormalizer,
    preprocessing,
)
from dpgrad.convex.losses import HuberSvm, Logistic, Softmax, Squared
from dpgrad.convex.solvers import amp, auto, gd, objective, output, regression, sgd
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism

Array = NDArray[np.float64]
ZERO, REPLACE, ADD = Relation.ZERO_OUT, Relation.REPLACE_ONE, Relation.ADD_REMOVE
CLIP = 0.5


def as_csr(column: NDArray[np.float32], width: int = 3) -> Any:
    """Rows with one entry each, in the first column."""
    n = len(column)
    return sparse.csr_array((column, np.zeros(n, np.int32), np.arange(n + 1, dtype=np.int32)), shape=(n, width))


def as_dense(column: NDArray[np.float32], width: int = 2) -> NDArray[np.float32]:
    return np.pad(column[:, None], ((0, 0), (0, width - 1)))


def drift(n: int, exponent: int, run: int) -> tuple[NDArray[np.float32], Array]:
    """Lengths of rows and targets at which gradients of the logistic loss at 0 drift; signs change every ``run``."""
    head, unit = n // 2, 2.0 ** (exponent - 23)
    down = (np.arange(n - head) // run) % 2 == 1
    lengths, targets = np.empty(n, np.float32), np.ones(n)
    lengths[:head] = 2.0**exponent * run / (head * 0.5)
    lengths[head:] = np.where(down, 0.98 * unit, 1.02 * unit)
    targets[head:][down] = -1
    return lengths, targets


# in CSR one row after the other is added, in BLAS two at a time
DRIFTS: dict[str, tuple[Callable[..., Any], int, int, int]] = {
    "dense": (as_dense, 1 << 16, 12, 2),
    "sparse": (as_csr, 1 << 17, 14, 1),
}


def neighbours(kind: str) -> tuple[Any, Any, Array]:
    """Two datasets that differ in their first row, which is all but nothing in one of them."""
    form, n, exponent, run = DRIFTS[kind]
    lengths, targets = drift(n, exponent, run)
    without, long = lengths.copy(), lengths.copy()
    without[0], long[0] = 0, 0.9999
    return form(without), form(long), targets


@pytest.mark.parametrize("kind", DRIFTS)
class TestDriftOfGradients:
    def test_clipped_sums(self, kind: str) -> None:
        *both, targets = neighbours(kind)
        one, other = (
            gd.clipped_sum(Design(x, radius=1.0), targets, Logistic(), np.zeros((x.shape[1], 1)), CLIP) for x in both
        )
        assert np.linalg.norm(one - other) == pytest.approx(0.9999 * CLIP, rel=1e-6)

    def test_descents(self, kind: str) -> None:
        """One step with the same noise: what is left is the difference of two sums, through the public solvers."""
        *both, targets = neighbours(kind)
        n = both[0].shape[0]

        def moved(solve: Any, sampler: Any) -> float:
            mechanism = Mechanism(sampler, 1, 1.0, CLIP, relation=ZERO, batch_size=n)
            one, other = (
                solve(Design(x, radius=1.0), targets, Logistic(), mechanism, learning_rate=1.0, key=3)[0] for x in both
            )
            return float(np.linalg.norm(one - other)) * n

        assert moved(gd.solve, sampling.FullBatch()) <= CLIP
        assert moved(sgd.solve, sampling.Poisson(1.0)) <= CLIP

    @pytest.mark.parametrize("batches", [1, 4])
    def test_output_perturbation(self, kind: str, batches: int) -> None:
        *both, targets = neighbours(kind)
        n = both[0].shape[0]
        plan = output.calibrated(
            n, Logistic(), radius=1.0, passes=1, batch_size=n // batches, learning_rate=1.0, epsilon=1.0, delta=1e-11,
            relation=ZERO,
        )  # fmt: skip
        one, other = (output.descend(Design(x, radius=1.0), targets, Logistic(), plan, np.arange(n)) for x in both)
        assert np.linalg.norm(one - other) <= plan.sensitivity

    def test_the_estimator(self, kind: str) -> None:
        *both, targets = neighbours(kind)
        labels = (targets > 0).astype(int)
        one, other = (
            DPLogisticRegression(
                1.0, classes=[0, 1], data_norm=1.0, solver="gd", max_iter=1, clip=CLIP, learning_rate=1.0,
                fit_intercept=False, relation="zero-out", random_state=7,
            ).fit(x, labels).coef_
            for x in both
        )  # fmt: skip
        assert np.linalg.norm(one - other) * both[0].shape[0] <= CLIP


class TestDriftOfMoments:
    """Rows of norm 1 whose first coordinates drift; the first row is one unit vector or another."""

    N = 1 << 17

    def designs(self) -> tuple[Design, Design]:
        head, unit = self.N // 2, 2.0 ** (14 - 23)
        rows = np.zeros((self.N, 3))
        rows[:head, 0] = 2.0**14 / head
        rows[head::2, 0], rows[head + 1 :: 2, 0] = 0.51 * unit, -0.49 * unit
        rows[:, 1] = np.sqrt(1 - rows[:, 0] ** 2) * np.where(np.arange(self.N) % 2, 1, -1)
        found = []
        for first in ([0, 0, 1], [0.99999, 0, 0]):
            rows[0] = first
            found.append(Design(sparse.csr_array(rows.astype(np.float32)), radius=1.0, rule="normalise"))
        return found[0], found[1]

    def test_mean_and_second_moment(self) -> None:
        one, other = self.designs()
        assert np.linalg.norm(auto.mean_row(one) - auto.mean_row(other)) <= 2 / self.N
        assert np.linalg.norm(auto.second_moment(one) - auto.second_moment(other)) <= math.sqrt(2) / self.N

    def test_sufficient_statistics(self) -> None:
        targets = np.ones(self.N)
        (moment, product), (moment_2, product_2) = (regression.statistics(d, targets) for d in self.designs())
        assert np.linalg.norm(product - product_2) <= 2
        assert np.linalg.norm(moment - moment_2) <= math.sqrt(2)


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
def test_drift_of_a_scalers_sums(form: Any) -> None:
    """The same in float64, over a million rows that one row steers: by 4e-6 of its bound where 1e-9 was allowed."""
    n, exponent = 1 << 20, 17
    unit = 2.0 ** (exponent - 52)
    column = np.full((n, 1), 0.25)
    column[n // 2 :: 2], column[n // 2 + 1 :: 2] = 0.51 * unit, -0.49 * unit
    other = column.copy()
    column[0], other[0] = 1.0, -1.0
    bounds = np.array([-1.0]), np.array([1.0])
    one, two = (preprocessing.moment_sums(form(x), *bounds)[0, 0] for x in (column, other))
    assert abs(one - two) <= 2 * (1 + 1e-8)


def test_a_map_does_not_lengthen_what_rounding_adds() -> None:
    """Rows close together are stretched a hundredfold: a residual rounded to float32 would be, too."""
    random, n = np.random.default_rng(0), 200_000
    rows = (np.ones(2) / math.sqrt(2) + 0.01 * random.standard_normal((n, 2))).astype(np.float32)
    plan = auto.AutoPlan(n, 2, 1.0, exact.mu_for(8.0, n**-2.0), 2, 60, 1)
    plain, key = Design(rows, radius=1.0, rule="normalise"), Key.from_seed(0)
    centre = auto._noisy_mean(plain, plan, key)
    linear_map, _ = auto._preconditioner(plain, centre, plan, key)
    assert np.linalg.norm(linear_map, 2) > 100
    options: dict[str, Any] = {"radius": 1.0, "rule": "normalise", "intercept": 0.3}
    design = Design(rows, **options, centre=centre, linear_map=linear_map)
    for i in np.flatnonzero(design.norms * 0.5 > plan.clip)[:500]:
        one = Design(rows[i : i + 1], **options, centre=centre, linear_map=linear_map)
        total = gd.clipped_sum(one, np.ones(1), Logistic(), np.zeros((3, 1)), plan.clip)
        assert np.linalg.norm(total) <= plan.clip


def test_one_row_more_changes_no_other_row_under_add_remove() -> None:
    """Each row takes another place among those that are added at once; float32 scores would round apart."""
    random, n = np.random.default_rng(1), 20_000
    rows = random.standard_normal((n, 37)).astype(np.float32)
    targets = random.choice([-1.0, 1.0], n)
    mechanism = Mechanism(sampling.FullBatch(), 2, 1e-6, CLIP, relation=ADD, batch_size=n)
    zero = np.zeros((1, 37), np.float32)  # a row that adds nothing itself
    one, other = (
        gd.solve(Design(x, radius=1.0), y, Logistic(), mechanism, learning_rate=50.0, key=1)[0]
        for x, y in ((rows, targets), (np.vstack([zero, rows]), np.append(1.0, targets)))
    )
    assert np.linalg.norm(one - other) * n / 50 <= 1e-6 * CLIP


class TestRelations:
    """An event says no less than brute force finds, under every relation that it has a price for."""

    @staticmethod
    def told(event: Event, relation: Relation) -> float | None:
        """μ of a composition of Gaussians under the relation; None where it has no price."""
        try:
            profile = exact.account(event, relation)
        except ValueError:
            return None
        assert isinstance(profile, exact.GaussianProfile)
        return profile.mu

    @staticmethod
    def worst(release: Callable[[Array], Array], relation: Relation) -> float:
        """How far a sum over rows of norm at most 1 moves: one row against none, or two at any angle."""
        angles = np.linspace(0, math.pi, 181)
        rows = [np.array([[math.cos(a), math.sin(a)]]) for a in angles]
        others = rows if relation is REPLACE else [np.zeros((1, 2))]
        return max(float(np.linalg.norm(release(rows[0]) - release(other))) for other in others)

    @pytest.mark.parametrize("made_for", [ZERO, REPLACE])
    def test_adassp(self, made_for: Relation) -> None:
        plan = regression.calibrated(1000, radius=1.0, target_bound=1.0, epsilon=1.0, delta=1e-6, relation=made_for)
        assert self.told(plan.event, made_for) == pytest.approx(exact.mu_for(1.0, 1e-6), rel=1e-8)
        for relation in (ZERO, REPLACE):
            moved = [
                self.worst(lambda x: x.T @ x, relation) / plan.moment_std,
                self.worst(lambda x: x.T, relation) / plan.product_std,
                self.worst(lambda x: np.linalg.eigvalsh(np.diag([0.0, 9.0]) + x.T @ x)[:1], relation)
                / plan.eigenvalue_std,
            ]
            told = self.told(plan.event, relation)
            assert told is None or math.hypot(*moved) <= told * (1 + 1e-9)

    @pytest.mark.parametrize("made_for", [ZERO, REPLACE])
    def test_auto(self, made_for: Relation) -> None:
        n, steps = 100_000, 60
        plan = auto.AutoPlan(n, 2, 1.0, exact.mu_for(1.0, 1e-10), 2 if made_for is REPLACE else 1, steps, outputs=1)
        mechanism = plan.mechanism(made_for)
        rows = np.random.default_rng(0).standard_normal((n, 2))
        event = auto.solve(
            rows, np.where(rows[:, 0] > 0, 1, -1), Logistic(), epsilon=1.0, delta=1e-10, relation=made_for, key=1
        ).event
        for relation in (ZERO, REPLACE):
            moved = [
                self.worst(lambda x: x / n, relation) / plan.mean_std,
                self.worst(lambda x: x.T @ x / n, relation) / plan.second_std,
                math.sqrt(steps) * plan.clip * self.worst(lambda x: x, relation) / mechanism.std_at(0),
            ]
            told = self.told(event, relation)
            assert told is None or math.hypot(*moved) <= told * (1 + 1e-6)
        assert self.told(event, made_for) == pytest.approx(plan.mu, rel=1e-8)

    @pytest.mark.parametrize("made_for", [ZERO, REPLACE])
    def test_objective(self, made_for: Relation) -> None:
        """Given the minimiser, two solutions within γ of it differ by 2γ/λ, whatever the relation."""
        plan = objective.calibrated(1000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-6, relation=made_for)
        shifted, second = leaves(plan.event)
        moved = 2 * plan.tolerance / plan.ridge / plan.output_scale
        assert isinstance(shifted, Shifted)
        for relation in (ZERO, REPLACE):
            told = self.told(second, relation)
            assert told is None or moved <= told * (1 + 1e-9)
            noise = self.worst(lambda x: x, relation) / plan.scale
            assert noise <= self.told(shifted.event, relation) * (1 + 1e-9)
        assert self.told(second, made_for) == pytest.approx(moved)

    def test_every_accountant_refuses_another_relation(self) -> None:
        event = Pinned(Gaussian(4.0), REPLACE)
        for name in ("exact", "pld", "rdp", "moments", "strong"):
            assert account(event, REPLACE, name).epsilon(1e-5) > 0
            with pytest.raises(ValueError, match="counted for replace-one neighbours has no price under zero-out"):
                account(event, ZERO, name)


RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((300, 3))
Y = (X[:, 0] > 0).astype(int)
FITS: dict[str, Any] = {
    "scaler": DPStandardScaler(bounds=(-3.0, 3.0)),
    "logistic": DPLogisticRegression(classes=[0, 1]),
    "svc": DPLinearSVC(classes=[0, 1], solver="gd"),
    "regression": DPLinearRegression(data_norm=1.0, target_bounds=(0.0, 1.0)),
}


class TestInput:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("name", FITS)
    def test_what_is_not_finite_is_refused_whatever_scikit_learn_assumes(self, name: str, bad: float) -> None:
        rows, numbers = X.copy(), Y.astype(float)
        rows[3, 1], numbers[7] = bad, bad
        with sklearn.config_context(assume_finite=True):
            with pytest.raises(ValueError, match="Input X contains"):
                FITS[name].fit(rows, Y)
            if name == "regression":
                with pytest.raises(ValueError, match="Input y contains"):
                    FITS[name].fit(X, numbers)

    SECRET = 73.1925

    @pytest.mark.parametrize("name", FITS)
    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda x: x[:, 0], "Reshape your data"),
            (lambda x: x.astype(complex), "Complex data not supported"),
            (lambda x: x.astype(str) + "a", "must hold numbers"),
        ],
        ids=["one column", "complex", "text"],
    )
    def test_no_error_of_an_estimator_holds_a_value(self, name: str, spoil: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            FITS[name].fit(spoil(np.full((300, 3), self.SECRET)), Y)
        assert "73" not in str(caught.value)
        assert caught.value.__suppress_context__

    @pytest.mark.parametrize("loss", [Logistic(), HuberSvm(), Softmax(3), Squared(1.0)], ids=repr)
    def test_no_error_of_a_loss_holds_a_target_or_its_place(self, loss: Any) -> None:
        bad = math.inf if isinstance(loss, Squared) else self.SECRET
        with pytest.raises(ValueError, match="targets must be") as caught:
            loss.checked([1.0] * 57 + [bad], 58)
        assert not any(word in str(caught.value) for word in ("73", "57", "inf"))

    def test_no_error_of_a_design_tells_the_place_of_a_row(self) -> None:
        rows = np.ones((60, 2))
        rows[57, 1] = np.inf
        with pytest.raises(ValueError, match="rows must hold finite numbers") as caught:
            Design(rows, radius=1.0)
        assert "57" not in str(caught.value)

    def test_one_seed_gives_estimators_of_different_names_different_noise(self) -> None:
        """Rows of zeros leave the noise alone: the scaler's first column and the model's first step once were equal."""
        zeros = np.zeros((300, 3))
        scaler = DPStandardScaler(bounds=(-1.0, 1.0), random_state=7).fit(zeros)
        model = DPLogisticRegression(
            classes=[0, 1], data_norm=1.0, solver="gd", max_iter=1, learning_rate=1.0, fit_intercept=False,
            random_state=7,
        ).fit(zeros, Y)  # fmt: skip
        assert scaler.mean_ is not None
        first = scaler.mean_ / scaler.privacy_.releases[0].std
        second = -model.coef_[0] * 300 / model.privacy_.releases[0].std
        assert np.abs(first - second).min() > 1e-3


class TestLedger:
    def test_a_relative_path_goes_on_naming_the_same_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sub").mkdir()
        ledger = Ledger("spent.jsonl")
        ledger.add(Gaussian(2.0), ZERO)
        os.chdir("sub")
        ledger.add(Gaussian(2.0), ZERO)
        assert len(ledger.entries()) == 2
        assert len(Ledger(tmp_path / "spent.jsonl").entries()) == 2
        assert not list((tmp_path / "sub").iterdir())

    @pytest.mark.parametrize(
        "event",
        [Approximate(1.0, 0.0, REPLACE), FixedSize(10, 2, Gaussian(1.0)), Pinned(Gaussian(1.0), REPLACE)],
        ids=["approximate", "fixed-size", "pinned"],
    )
    def test_what_has_no_price_is_refused_before_it_is_written(self, event: Event, tmp_path: Path) -> None:
        for ledger in (Ledger(), Ledger(tmp_path / "spent.jsonl")):
            with pytest.raises(ValueError, match="no price under zero-out"):
                ledger.add(Compose((Gaussian(1.0), event)), ZERO)
            assert ledger.entries() == ()
            ledger.add(Gaussian(1.0), ZERO)
            assert ledger.guarantee(1e-5).epsilon > 0
        assert "approximate" not in (tmp_path / "spent.jsonl").read_text("utf-8")

    def test_a_grid_of_objective_perturbations_has_a_price(self) -> None:
        ledger = Ledger()
        model = DPLogisticRegression(classes=[0, 1], solver="objective", ledger=ledger)
        search = GridSearchCV(model, {"epsilon": [0.5, 1, 2, 4]}, cv=7).fit(X, Y)
        assert len(ledger.entries()) == 29
        spent = ledger.guarantee(1e-5).epsilon
        parts = [*([0.5, 1, 2, 4] * 7), search.best_params_["epsilon"]]
        assert 5 < spent <= account(ledger.event(), REPLACE, "rdp").epsilon(1e-5) < sum(parts)
        assert account(ledger.event(), REPLACE, "exact").epsilon(1e-5) < sum(parts)


class TestObjective:
    def test_add_remove_is_refused(self) -> None:
        """γ covers what rounding hides of the declared rows; whether more are solved would tell how many there are."""
        common: dict[str, Any] = {"radius": 1.0, "epsilon": 1.0, "relation": ADD}
        for make in (objective.calibrated, objective.approximate, amp.tuning_free):
            with pytest.raises(ValueError, match="relation add-remove is refused: how accurately the minimiser"):
                make(100, Logistic(), delta=1e-3, **common)
        with pytest.raises(ValueError, match="relation add-remove is refused: how accurately the minimiser"):
            objective.pure(100, Logistic(), **common)

    def test_another_number_of_rows_is_refused(self) -> None:
        plan = objective.calibrated(2, Logistic(), radius=1.0, epsilon=20.0, delta=1e-3, relation=ZERO)
        with pytest.raises(ValueError, match="the noise was calibrated for 2 rows, got 50"):
            objective.solve(Design(np.ones((50, 1)), radius=1.0), np.ones(50), Logistic(), plan)

    def test_pure_noise_in_many_dimensions(self) -> None:
        """Its norm grows with the number of coefficients, and with it what rounding hides of the gradient."""
        rows = sparse.csr_array((np.ones(4), (np.arange(4), np.zeros(4, int))), shape=(4, 200_000))
        plan = objective.pure(4, Logistic(), radius=1.0, epsilon=1.0, relation=REPLACE)
        found, _ = objective.solve(Design(rows, radius=1.0), np.array([1.0, 1, -1, 1]), Logistic(), plan, key=1)
        assert found.shape == (200_000, 1)

    @pytest.mark.parametrize("loss", [Logistic(), HuberSvm()], ids=["logistic", "svm"])
    @pytest.mark.parametrize("separable", [True, False])
    def test_whether_a_minimiser_is_found_is_decided_by_public_numbers(self, loss: Any, separable: bool) -> None:
        """At every ε a ridge is left with which Newton's method ends, whatever the labels and the noise."""
        random = np.random.default_rng(12)
        rows = random.standard_normal((500, 30))
        targets = np.sign(rows[:, 0]) if separable else random.choice([-1.0, 1.0], 500)
        for epsilon in (100.0, 180.0, 200.0, 1000.0, 1e300):
            plan = objective.calibrated(500, loss, radius=1.0, epsilon=epsilon, delta=1e-8, relation=REPLACE)
            assert plan.ridge >= loss.smoothness(1.0) / math.expm1(10.0) * (1 - 1e-9)
            for key in range(3):
                found, _ = objective.solve(Design(rows, radius=1.0, rule="normalise"), targets, loss, plan, key=key)
                assert np.isfinite(found).all()

    def test_more_models_than_can_share_the_budget(self) -> None:
        with pytest.raises(
            ValueError, match=r"objective cannot divide epsilon 1.0 among 1,000 models .*: use auto or gd"
        ):
            objective.calibrated(9000, Logistic(), radius=1.0, epsilon=1.0, delta=1e-8, relation=REPLACE, models=1000)

    @pytest.mark.parametrize("epsilon", [8000.0, 1e300])
    def test_an_epsilon_of_any_size(self, epsilon: float) -> None:
        plan = objective.calibrated(100, Logistic(), radius=1.0, epsilon=epsilon, delta=1e-4, relation=ZERO)
        assert exact.account(plan.event, ZERO).epsilon(1e-4) <= epsilon
        pure = objective.pure(100, Logistic(), radius=1.0, epsilon=epsilon, relation=ZERO)
        assert 0 < pure.scale < 1
        assert pure.ridge > 0


class TestNumpyToldToRaise:
    """``np.seterr(all="raise")``: an error of numpy would say that one row holds a value this small."""

    X = np.array([[1e-45, 0.5], [5e-324, -1e-300], [1e-160, 1e-20], [1e300, -1e300], *[[1.0, 0.5], [0.25, -1.0]] * 18])
    NARROW = np.clip(X, -1, 1).astype(np.float32)
    Y = np.array([0, 1] * 20)

    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    @pytest.mark.parametrize(
        "solver", ["auto", "gd", "sgd", "output", "objective", "amp", "adassp", "poisson", "scaler"]
    )
    def test_no_estimator_tells_of_a_value(self, solver: str, form: Any) -> None:
        common: dict[str, Any] = {"epsilon": 9.0, "data_norm": 1.0, "random_state": 7}
        model: Any
        if solver == "scaler":
            model = DPStandardScaler(9.0, bounds=(-1, 1), with_mean=False, random_state=7)
        elif solver == "poisson":
            model = DPPoissonRegressor(target_bounds=(0, 1), max_iter=3, **common)
        elif solver == "adassp":
            model = DPLinearRegression(target_bounds=(0, 1), **common)
        else:
            model = DPLogisticRegression(solver=solver, classes=[0, 1], **common)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            expected = model.fit(form(self.X), self.Y)
            with np.errstate(all="raise"):
                found = clone(model).fit(form(self.X), self.Y)
        name = "scale_" if solver == "scaler" else "coef_"
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))

    @pytest.mark.parametrize("step", [RowNormalizer(), DPStandardScaler(9.0, bounds=(-1, 1), random_state=7)], ids=repr)
    def test_no_preparation_tells_of_a_value(self, step: Any) -> None:
        with np.errstate(all="raise"):
            assert np.isfinite(step.fit_transform(self.X)).all()
            assert np.isfinite(step.fit_transform(self.NARROW)).all()

    def test_no_solver_tells_of_a_value(self) -> None:
        signs, loss = 2.0 * self.Y - 1, Logistic()
        budget: Any = {"epsilon": 9.0, "delta": 1e-4, "relation": REPLACE}
        with np.errstate(all="raise"):
            design = Design(self.X, radius=1.0)
            n = design.rows
            auto.solve(self.X, signs, loss, radius=1.0, key=7, steps=3, **budget)
            gd.solve(design, signs, loss, gd.calibrated(n, 3, clip=1.0, **budget), learning_rate=0.1, key=7)
            made = sgd.calibrated(n, 3, sampling_rate=0.5, clip=1.0, **budget)
            sgd.solve(design, signs, loss, made, learning_rate=0.1, key=7)
            cut: Any = {"passes": 1, "batch_size": n, "learning_rate": 0.1}
            output.solve(design, signs, loss, output.calibrated(n, loss, radius=1.0, **cut, **budget), key=7)
            objective.solve(design, signs, loss, objective.calibrated(n, loss, radius=1.0, **budget), key=7)
            regression.solve(design, signs, regression.calibrated(n, radius=1.0, target_bound=1.0, **budget), key=7)
