"""Experiments of the convex tables: what a trial is, that a run goes on where it stopped, and what figures mean."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import convex_log
from dpgrad import accounting
from dpgrad.convex import Logistic, Softmax
from dpgrad.convex.solvers import amp, gd
from dpgrad.papers import convex as lab
from dpgrad.papers import yu2020
from dpgrad.papers.experiment import Outcomes


@pytest.fixture
def small() -> lab.Prepared:
    random = np.random.default_rng(0)
    rows = random.standard_normal((600, 4)).astype(np.float32)
    classes = (rows @ np.array([2.0, -1.0, 0.5, 0.0]) > 0).astype(int)
    return lab.Prepared("small", rows[:500], 2 * classes[:500] - 1, Logistic(), rows[500:], classes[500:])


class TestTrial:
    def test_noise_differs_between_runs_settings_and_budgets(self) -> None:
        first = lab.FitTrial("adult", "gd", 0.1, (("rate", 1.0),))
        others = [replace(first, run=1), replace(first, setting=(("rate", 5.0),)), replace(first, epsilon=1.0)]
        assert len({first.seed, *(other.seed for other in others)}) == 4

    def test_label_reads_as_a_setting(self) -> None:
        assert lab.FitTrial("adult", "gd", 0.1, (("rows", "raw"), ("rate", 0.1))).label == "rows=raw rate=0.1"


class TestOutcome:
    @pytest.mark.parametrize("solver", sorted(lab.SOLVERS))
    def test_every_solver_learns_at_a_generous_budget(self, small: lab.Prepared, solver: str) -> None:
        epsilon = None if solver == "non-private" else 20.0
        if solver.startswith("amp"):
            epsilon = 5.0  # its precondition holds up to there
        grid = lab.SOLVERS[solver].grid(small)
        found = [lab.outcome(small, lab.FitTrial("small", solver, epsilon, setting)) for setting in grid[-3:]]
        best = max(found, key=lambda one: one.accuracy)
        assert best.accuracy > 85
        assert best.auc is not None
        assert best.auc > 0.9
        assert math.isfinite(best.risk)

    def test_the_minimiser_has_the_least_risk(self, small: lab.Prepared) -> None:
        least = lab.outcome(small, lab.FitTrial("small", "non-private", None, (("rows", "raw"),)))
        for setting in lab.SOLVERS["gd"].grid(small):
            assert lab.outcome(small, lab.FitTrial("small", "gd", 5.0, setting)).risk > least.risk

    def test_the_same_trial_gives_the_same_figures(self, small: lab.Prepared) -> None:
        trial = lab.FitTrial("small", "auto", 1.0)
        one, other = lab.outcome(small, trial), lab.outcome(small, trial)
        assert (one.accuracy, one.auc, one.risk) == (other.accuracy, other.auc, other.risk)

    def test_more_classes_are_fitted_against_the_rest(self) -> None:
        random = np.random.default_rng(0)
        rows = random.standard_normal((600, 3)).astype(np.float32)
        classes = rows.argmax(axis=1)
        three = lab.Prepared("three", rows[:500], classes[:500], Softmax(3), rows[500:], classes[500:])
        found = lab.outcome(three, lab.FitTrial("three", "objective", 100.0, (("slope", 1.0),)))
        assert found.accuracy > 85
        assert found.auc is None

    def test_an_intercept_is_a_column_of_ones(self, small: lab.Prepared) -> None:
        setting = lab.SOLVERS["gd-intercept"].grid(small)[4]
        trial = lab.FitTrial("small", "gd-intercept", 5.0, setting)
        coefficients, intercept, design = lab.SOLVERS["gd-intercept"].fit(small, trial)
        ones = np.ones((500, 1), np.float32)
        wide = replace(small, rows=np.hstack([small.rows, ones]))
        assert design is small.within(lab.UNBOUNDED)
        assert coefficients.shape == (4, 1)
        mechanism = gd.calibrated(500, 200, clip=1.0, epsilon=5.0, delta=small.delta, relation=lab.RELATION)
        expected, _ = gd.solve(
            wide.within(lab.UNBOUNDED), small.targets, small.loss, mechanism,
            learning_rate=1.0, l2=lab.L2, key=trial.seed,
        )  # fmt: skip
        np.testing.assert_allclose(np.append(coefficients[:, 0], intercept), expected[:, 0], rtol=1e-5)

    def test_the_published_ridge_is_four_times_the_least(
        self, small: lab.Prepared, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ridges = []
        solve = amp.solve
        monkeypatch.setattr(amp, "solve", lambda *a, **k: (ridges.append(a[3].ridge), solve(*a, **k))[1])
        for solver in ("amp-free", "amp-published"):
            lab.outcome(small, lab.FitTrial("small", solver, 1.0))
        assert ridges[1] == pytest.approx(4 * ridges[0])

    def test_a_private_solver_without_a_budget_is_refused(self, small: lab.Prepared) -> None:
        with pytest.raises(ValueError, match="gd needs an epsilon"):
            lab.outcome(small, lab.FitTrial("small", "gd", None, lab.SOLVERS["gd"].grid(small)[0]))

    def test_numbers_are_not_classes(self, data_dir: Path) -> None:
        with pytest.raises(ValueError, match="boston-housing has no classes"):
            lab.task("boston-housing", data_dir)


class TestAuc:
    def test_equals_the_count_of_pairs(self) -> None:
        random = np.random.default_rng(1)
        scores, positive = random.integers(0, 9, 60).astype(float), random.random(60) < 0.3
        pairs = scores[positive][:, None] - scores[~positive]
        assert lab.auc(scores, positive) == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)), abs=1e-12)


class TestLog:
    def test_a_run_goes_on_where_it_stopped(self, small: lab.Prepared, tmp_path: Path) -> None:
        file = tmp_path / "log.json"
        first = [next(convex_log.complete(small, convex_log.ScoreLog(file), "output-full", 1.0, runs=4, pilot=2))]
        rest = list(convex_log.complete(small, convex_log.ScoreLog(file), "output-full", 1.0, runs=4, pilot=2))
        assert len(first + rest) == 3 * 2 + 2  # a pilot of three settings, and two more runs of the best
        assert list(convex_log.complete(small, convex_log.ScoreLog(file), "output-full", 1.0, runs=4, pilot=2)) == []

    def test_what_is_read_is_what_was_written(self, small: lab.Prepared, tmp_path: Path) -> None:
        log = convex_log.ScoreLog(tmp_path / "log.json")
        found = lab.outcome(small, lab.FitTrial("small", "gd", 1.0, lab.SOLVERS["gd"].grid(small)[0]))
        log.add(found)
        again = convex_log.ScoreLog(log.file).outcomes[found.trial]
        assert again.accuracy == pytest.approx(found.accuracy, abs=1e-4)
        assert len(json.loads(log.file.read_text("utf-8"))) == 1

    def test_two_runs_keep_what_the_other_wrote(self, small: lab.Prepared, tmp_path: Path) -> None:
        one, other = convex_log.ScoreLog(tmp_path / "log.json"), convex_log.ScoreLog(tmp_path / "log.json")
        for run, log in enumerate((one, other, one)):
            log.add(lab.outcome(small, lab.FitTrial("small", "auto", 1.0, run=run)))
        assert [trial.run for trial in convex_log.ScoreLog(one.file).outcomes] == [0, 1, 2]

    def test_the_best_setting_is_that_of_the_pilot(self) -> None:
        like = lab.FitTrial("small", "gd", 1.0)
        grid: list[lab.Setting] = [(("rate", 1.0),), (("rate", 2.0),)]

        def one(rate: float, run: int, accuracy: float) -> lab.Scored:
            return lab.Scored(replace(like, setting=(("rate", rate),), run=run), accuracy, None, 0.0, 0.0)

        outcomes = [one(1.0, 0, 70), one(2.0, 0, 80), one(1.0, 5, 99)]
        assert convex_log.best(outcomes, like, grid, pilot=1) == (("rate", 2.0),)


class TestPaper:
    def test_the_bound_of_the_ablation_asks_for_more_noise_than_the_accountant(self) -> None:
        delta = 36176**-2.0
        mechanism = lab._sampled(36176, 200, 1.0, 0.1, "bound")
        assert mechanism.noise_multiplier == lab.bound_multiplier(200, 0.1, delta)
        assert accounting.account(mechanism.event(), lab.RELATION, "pld").epsilon(delta) < 0.1

    @pytest.mark.parametrize("name", ["adult", pytest.param("mnist", marks=pytest.mark.slow)])
    def test_shapes_of_table_3(self, name: str, data_dir: Path) -> None:
        found = lab.task(name, data_dir)
        rows, columns, classes = lab.SHAPES[name]
        assert len(found.targets) + len(found.test_classes) == rows
        assert found.rows.shape[1] == columns
        assert len(np.unique(found.targets)) == classes
        assert len(found.targets) == int(0.8 * rows)


class TestClaims:
    def test_learning_is_judged_by_the_largest_class(self) -> None:
        below, above = Outcomes({"AMP": [{"accuracy": 94.0}]}), Outcomes({"AMP": [{"accuracy": 95.0}]})
        assert [yu2020._learns("reuters", found) for found in (below, above)] == [False, True]
        assert yu2020._learns("gisette", above) is None
        assert yu2020._learns("gisette", Outcomes({"AMP": [{"accuracy": 95.0, "largest_class": 96.0}]})) is False

    def test_a_rise_needs_every_solver_and_errors(self) -> None:
        def trials(low: float, high: float) -> dict[str, list[dict[str, float]]]:
            return {
                f"{title}, ε = {epsilon:g}": [{"accuracy": mean}, {"accuracy": mean + 1}]
                for title in list(yu2020.SOLVERS)[1:]
                for epsilon, mean in ((0.03, low), (3.0, high))
            }

        assert yu2020._rises(Outcomes(trials(50.0, 60.0))) is True
        assert yu2020._rises(Outcomes(trials(60.0, 50.0))) is False
        assert yu2020._rises(Outcomes(trials(50.0, 50.5))) is None
        lacking = trials(50.0, 60.0)
        del lacking["AMP, ε = 3"]
        assert yu2020._rises(Outcomes(lacking)) is None
