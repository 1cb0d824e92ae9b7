"""Secure noise in convex fits: whole numbers on rounded sums, every one of them accounted, and nothing else."""

import math
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dpgrad.accounting import account, exact
from dpgrad.accounting.events import Inexact, Relation, leaves
from dpgrad.accounting.inexact import parted
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex import DPLinearRegression, DPLinearSVC, DPLogisticRegression, DPPoissonRegressor, DPStandardScaler
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Logistic
from dpgrad.convex.solvers import auto, gd, output, regression, sgd
from dpgrad.errors import OptionError
from dpgrad.mechanism import chacha, normal, secure
from dpgrad.mechanism.keys import Key
from dpgrad.reports.report import report

Array = NDArray[np.float64]
KEY = Key.from_seed(7).secured()
FALSE_ALARM = 1e-6  # of a statistic of a fixed seed, for an honest sampler
RANDOM = np.random.default_rng(3)
ROWS = RANDOM.uniform(-1, 1, (3000, 3)) / math.sqrt(3)
SIDES = (ROWS @ [2.0, -1.0, 0.5] > 0).astype(int)
THIRDS = np.arange(3000) % 3
NUMBERS = ROWS @ [1.0, -0.5, 0.2]
COUNTS = RANDOM.poisson(np.exp(ROWS @ [1.0, -0.5, 0.2]))
BUDGET: dict[str, Any] = {"epsilon": 2.0, "noise": "secure", "random_state": 5}
TARGET: dict[str, Any] = {"data_norm": 1.0, "target_bounds": (-1.0, 1.0)}
MANY = {"max_iter": 20, "data_norm": 1.0}

NOISED = [-66097996.0, -218355415.0, 200421317.0]  # in units of the grid
FITS: dict[str, tuple[Any, Any]] = {
    "auto": (DPLogisticRegression(**BUDGET, classes=[0, 1], data_norm=1.0), SIDES),
    "auto, three classes": (DPLogisticRegression(**BUDGET, classes=[0, 1, 2]), THIRDS),
    "gd": (DPLogisticRegression(**BUDGET, classes=[0, 1], solver="gd", **MANY), SIDES),
    "gd, zero-out": (DPLinearSVC(**BUDGET, classes=[0, 1], solver="gd", relation="zero-out", **MANY), SIDES),
    "sgd": (DPLogisticRegression(**BUDGET, classes=[0, 1], solver="sgd", **MANY), SIDES),
    "output": (DPLogisticRegression(**BUDGET, classes=[0, 1], solver="output", **MANY), SIDES),
    "balanced": (DPLinearSVC(**BUDGET, classes=[0, 1], class_weight="balanced", solver="gd", **MANY), SIDES),
    "intervals": (DPLogisticRegression(**BUDGET, classes=[0, 1], solver="gd", inference_share=0.5, **MANY), SIDES),
    "adassp": (DPLinearRegression(**BUDGET, **TARGET, inference_share=0.2), NUMBERS),
    "regression by gd": (DPLinearRegression(**BUDGET, **TARGET, solver="gd", max_iter=20), NUMBERS),
    "counts": (DPPoissonRegressor(**BUDGET, data_norm=1.0, target_bounds=(0, 8), max_iter=20), COUNTS),
    "scaler": (DPStandardScaler(**BUDGET, bounds=(-1.0, 1.0)), None),
}


class TestNoise:
    def test_committed_values(self) -> None:
        found = gd.noised(KEY, 3, np.array([[1.0], [-2.5], [0.0]]), sensitivity=1.0, std=2.0)
        unit = secure.grid(2.0, 1.0, 3)
        assert np.rint(found / unit).ravel().tolist() == NOISED
        drawn = secure.draw(KEY, 0, 3, "convex noise", "3")
        assert (np.rint(np.array([1.0, -2.5, 0.0]) / unit) + drawn).tolist() == NOISED

    def test_the_law(self) -> None:
        """As a whole and in variance: each would be as extreme with probability 1e-6 for an honest sampler."""
        count, std = 50_000, 3.0
        found = gd.noised(KEY, 0, np.zeros(count), sensitivity=1.0, std=std)
        square = float(np.sum((found / std) ** 2))
        assert FALSE_ALARM < stats.chi2(count).sf(square) < 1 - FALSE_ALARM
        assert stats.kstest(found, stats.norm(scale=std).cdf).pvalue > FALSE_ALARM

    def test_a_matrix_has_half_the_variance_off_its_diagonal(self) -> None:
        """Two statistics of a fixed seed, each with false alarms of 1e-6."""
        found = auto.noised_matrix(KEY, 1, np.zeros((300, 300)), sensitivity=1.0, std=2.0)
        assert (found == found.T).all()
        for values, variance in ((np.diag(found), 4.0), (found[np.triu_indices(300, 1)], 2.0)):
            square = float(np.sum(values**2) / variance)
            assert FALSE_ALARM < stats.chi2(values.size).sf(square) < 1 - FALSE_ALARM

    @given(
        st.lists(st.floats(-50, 50) | st.floats(-1e8, 1e8), min_size=1, max_size=30),
        st.integers(0, 99),
        st.floats(0.05, 50),
        st.floats(0, 1) | st.floats(1, 40),
    )
    def test_rounding_is_in_the_sensitivity(self, total: list[float], seed: int, std: float, far: float) -> None:
        """Totals that differ by the sensitivity keep the noise multiplier std/sensitivity, as they are rounded.

        Those that differ by k times as much, as where k rows change or one is exchanged, keep a kth of it; so do sums
        that the grid does not hold.
        """
        one = np.array(total)
        way = np.random.default_rng(seed).standard_normal(len(one))
        other = one + way * (far / np.linalg.norm(way))
        unit = secure.grid(std, 1.0, len(one))
        times = max(1.0, float(np.linalg.norm(one - other)) * (1 + 1e-12))
        apart = np.linalg.norm(secure.rounded(one, unit) - secure.rounded(other, unit))
        assert std * apart <= secure.SCALE * times

    def test_neighbours_come_out_on_one_grid(self) -> None:
        """With the same key, the difference of two releases is a whole number of units: nothing else is released."""
        unit = secure.grid(0.7, 1.0, 4)
        totals = [np.array([0.1, 0.2, 0.3, -7.7]), np.array([0.1 + 1e-9, 0.9, 0.3, -7.7])]
        found = [gd.noised(KEY, 2, total, sensitivity=1.0, std=0.7) for total in totals]
        one, other = (np.rint(each / unit) for each in found)
        assert all((each == whole * unit).all() for each, whole in zip(found, (one, other), strict=True))
        assert (one - other == secure.rounded(totals[0], unit) - secure.rounded(totals[1], unit)).all()

    def test_a_sum_beyond_the_grid_is_refused_by_what_is_released(self) -> None:
        assert gd.noised(KEY, 0, np.array([1.6e7]), sensitivity=1.0, std=1.0) == pytest.approx(1.6e7, rel=1e-6)
        with pytest.raises(OptionError, match=r"sums of up to 1.7e\+07 standard deviations .* what was charged is spe"):
            gd.noised(KEY, 0, np.array([1.7e7]), sensitivity=1.0, std=1.0)

    def test_a_key_keeps_its_source_for_each_use(self) -> None:
        assert KEY.child("one use").secure
        assert not Key.from_seed(7).child("one use").secure
        assert KEY.child("one use").reproducible


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each draw of secure noise has; other noise, other samples and a stream used twice are refused."""
    counts: list[int] = []
    used: set[bytes] = set()
    fill = secure.fill

    def spied(key: Key, wanted: Any, threads: int = 1) -> None:
        assert key.secure
        for each in wanted:
            own = secure.stream(key, *each.names)
            assert own not in used, f"two sums have the noise of {each.names}"
            used.add(own)
            counts.append(len(each.values))
        fill(key, wanted, threads)

    def refused(*given: object) -> None:
        raise AssertionError("ordinary noise was drawn")

    monkeypatch.setattr(secure, "fill", spied)
    monkeypatch.setattr(normal, "fill", refused)
    monkeypatch.setattr("dpgrad.mechanism.sampling._philox", refused)
    return counts


@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
class TestEstimators:
    def test_every_value_is_secure_and_accounted(self, name: str, drawn: list[int]) -> None:
        model, targets = FITS[name]
        ledger = Ledger()
        model = type(model)(**{**model.get_params(), "ledger": ledger})
        told = model.fit(ROWS, targets).privacy_
        event = told.guarantee.event
        assert sum(drawn) > 0
        assert parted(event)[1] >= sum(drawn) * secure.DISTANCE
        assert all(isinstance(leaf, Inexact) for leaf in leaves(event))
        assert leaves(ledger.event()) == leaves(event)
        assert told.guarantee.epsilon <= 2.0
        assert told.guarantee.delta == 1 / 3000**2
        ordinary = account(parted(event)[0], told.guarantee.relation, told.guarantee.accountant)
        assert told.guarantee.epsilon == pytest.approx(ordinary.epsilon(told.guarantee.delta), rel=1e-6)
        assert told.guarantee.epsilon > 1.99  # hardly anything is lost
        said = report(model)
        assert said["noise"]["source"] == "secure"
        assert not any("floating-point" in entry for entry in said["outside"])


@pytest.mark.parametrize("name", [name for name in FITS if name != "sgd"])  # whose price is that of sampled rows
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_all_noise_of_a_fit_together_is_of_the_size_that_is_paid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ (sensitivity/std)² of what is drawn is μ², and no stream is drawn from twice."""
    model, targets = FITS[name]
    squares: list[float] = []
    streams: list[object] = []
    noised, fill = gd.noised, secure.fill

    def sized(key: Key, step: int, total: Array, sensitivity: float, std: float) -> Array:
        squares.append((sensitivity / std) ** 2)
        return noised(key, step, total, sensitivity, std)

    def spied(key: Key, wanted: Any, threads: int = 1) -> None:
        streams.extend((key.secret, each.names) for each in wanted)
        fill(key, wanted, threads)

    monkeypatch.setattr(gd, "noised", sized)
    monkeypatch.setattr(secure, "fill", spied)
    type(model)(**{**model.get_params(), "relation": "zero-out"}).fit(ROWS, targets)
    assert len(squares) == len(streams) == len(set(streams))
    assert 0.999 < sum(squares) / exact.mu_for(2.0, 1 / 3000**2) ** 2 <= 1


def test_ordinary_noise_stays_the_default_and_says_so() -> None:
    plain = DPLogisticRegression(2.0, classes=[0, 1], random_state=5).fit(ROWS, SIDES)
    assert plain.noise == "ordinary"
    assert report(plain)["noise"]["source"] == "ordinary"
    assert any("floating-point" in entry for entry in plain.privacy_.outside)
    assert not any(isinstance(leaf, Inexact) for leaf in leaves(plain.privacy_.guarantee.event))


def test_fits_repeat_and_predict_as_with_ordinary_noise() -> None:
    given: dict[str, Any] = {"classes": [0, 1], "data_norm": 1.0, "random_state": 5}
    one, again, other = (
        DPLogisticRegression(2.0, **given, noise=noise).fit(ROWS, SIDES) for noise in ("secure", "secure", "ordinary")
    )
    assert (one.coef_ == again.coef_).all()
    assert (one.coef_ != other.coef_).all()
    assert min(model.score(ROWS, SIDES) for model in (one, other)) > 0.9


class TestRefusals:
    @pytest.mark.parametrize("solver", ["objective", "amp"])
    def test_noise_within_the_objective_needs_a_density(self, solver: str) -> None:
        ledger = Ledger()
        model = DPLogisticRegression(2.0, classes=[0, 1], solver=solver, data_norm=1.0, noise="secure", ledger=ledger)
        with pytest.raises(OptionError, match=f"noise secure is refused with solver {solver}: .* use auto, gd, output"):
            model.fit(ROWS, SIDES)
        assert not ledger.entries()

    @pytest.mark.parametrize("model", [DPLogisticRegression(classes=[0, 1]), DPLinearRegression(**TARGET)], ids=str)
    def test_a_source_that_is_not_known(self, model: Any) -> None:
        with pytest.raises(OptionError, match="noise must be one of ordinary, secure, got 'loud'"):
            model.set_params(noise="loud").fit(ROWS, SIDES)

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chacha, "find_spec", lambda _: None)
        with pytest.raises(OptionError, match=r"needs the package cryptography: pip install 'dpgrad\[secure\]'"):
            DPStandardScaler(bounds=(-1, 1), noise="secure").fit(ROWS)

    def test_a_delta_that_the_distance_would_use_up(self) -> None:
        ledger = Ledger()
        model = DPLogisticRegression(2.0, delta=1e-21, classes=[0, 1], noise="secure", ledger=ledger)
        with pytest.raises(OptionError, match="delta is too small for noise secure: a 1,024th of 1e-21 may go to"):
            model.fit(ROWS, SIDES)
        assert not ledger.entries()


class TestSolvers:
    """The solvers by themselves: plans in public numbers, whose event holds the distance."""

    DESIGN = Design(ROWS, radius=1.0)
    SIGNS = 2.0 * SIDES - 1
    BUDGET: ClassVar[dict[str, Any]] = {"epsilon": 1.0, "delta": 1e-7, "relation": Relation.REPLACE_ONE}

    def test_calibration_pays_for_the_distance(self) -> None:
        """At a δ near the distance the noise grows; the guarantee of the plan stays within ε."""
        tiny: dict[str, Any] = {**self.BUDGET, "delta": 1e-21}
        plans: list[Any] = [
            gd.calibrated(3000, 10, clip=1.0, secure_values=30, **tiny),
            output.calibrated(
                3000, Logistic(), radius=1.0, passes=2, batch_size=50, learning_rate=0.1, secure_values=300, **tiny
            ),
            regression.calibrated(3000, radius=1.0, target_bound=1.0, secure_columns=16, **tiny),
        ]
        for plan in plans:
            event = plan.event() if callable(plan.event) else plan.event
            plain, distance = parted(event)
            assert 0.5e-21 < distance < 1e-21
            price = account(event, Relation.REPLACE_ONE, "exact").epsilon(1e-21)
            assert 0.999 < price <= 1.0
            assert account(plain, Relation.REPLACE_ONE, "exact").epsilon(1e-21) < price

    def test_more_values_than_are_accounted(self) -> None:
        run = gd.calibrated(3000, 10, clip=1.0, secure_values=2, **self.BUDGET)
        with pytest.raises(OptionError, match="secure_values must be at least 3, the number of values that get noise"):
            gd.solve(self.DESIGN, self.SIGNS, Logistic(), run, learning_rate=0.1, key=1)

    def test_samples_come_from_the_secure_stream(self, drawn: list[int]) -> None:
        run = sgd.calibrated(3000, 4, sampling_rate=0.1, clip=1.0, secure_values=3, **self.BUDGET)
        solved = sgd.solve(self.DESIGN, self.SIGNS, Logistic(), run, learning_rate=0.1, key=1)
        assert drawn == [3] * 4
        assert solved.event == run.event()

    def test_add_remove_takes_secure_noise_too(self, drawn: list[int]) -> None:
        given = {**self.BUDGET, "relation": Relation.ADD_REMOVE}
        run = gd.calibrated(3000, 4, clip=1.0, secure_values=3, **given)
        gd.solve(self.DESIGN, self.SIGNS, Logistic(), run, learning_rate=0.1, key=1)
        assert drawn == [3] * 4
