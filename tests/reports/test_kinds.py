"""Everything that dpgrad makes private has a report, in one format."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dpgrad
from dpgrad import Guarantee, Ledger, Mechanism, Relation, convex, events, pca, plan, sampling
from dpgrad.convex import Design, Logistic, amp, auto, gd, objective, one_vs_rest, output, regression, sgd
from dpgrad.reports import environment, report
from dpgrad.training.fit import Fitted

ROWS = np.random.default_rng(0).uniform(-1, 1, (60, 2))
SIGNS = np.where(np.arange(60) % 2, 1.0, -1.0)
BUDGET: Any = {"epsilon": 1.0, "delta": 1e-4, "relation": Relation.REPLACE_ONE}
ESTIMATORS = [
    convex.DPLogisticRegression(classes=[0, 1]),
    convex.DPLogisticRegression(classes=[0, 1], solver="sgd", max_iter=5),
    convex.DPLogisticRegression(classes=[0, 1], solver="objective"),
    convex.DPLinearSVC(classes=[0, 1], solver="amp"),
    convex.DPLinearSVC(classes=[0, 1], solver="output"),
    convex.DPLinearRegression(data_norm=1.0, target_bounds=(0, 1)),
    convex.DPStandardScaler(bounds=(-1, 1)),
    convex.RowNormalizer(),
]


def solved(name: str) -> Any:
    """What each solver returns, of the same rows."""
    design, limits = Design(ROWS, radius=1.0), {"radius": 1.0, **BUDGET}
    match name:
        case "gd":
            return gd.solve(design, SIGNS, Logistic(), gd.calibrated(60, 5, clip=1.0, **BUDGET), learning_rate=1.0)
        case "sgd":
            mechanism = sgd.calibrated(60, 5, sampling_rate=0.5, clip=1.0, **BUDGET)
            return sgd.solve(design, SIGNS, Logistic(), mechanism, learning_rate=1.0)
        case "output":
            made = output.calibrated(60, Logistic(), passes=1, batch_size=30, learning_rate=0.1, **limits)
            return output.solve(design, SIGNS, Logistic(), made)
        case "objective":
            return objective.solve(design, SIGNS, Logistic(), objective.calibrated(60, Logistic(), **limits))
        case "amp":
            return amp.solve(design, SIGNS, Logistic(), amp.tuning_free(60, Logistic(), **limits))
        case "regression":
            return regression.solve(design, SIGNS, regression.calibrated(60, target_bound=1.0, **limits))
        case "auto":
            return auto.solve(ROWS, SIGNS, Logistic(), **BUDGET)
    made = objective.calibrated(60, Logistic(), models=3, **limits)
    return one_vs_rest.solve(
        design, np.arange(60) % 3, 3, lambda design, y, *, key: objective.solve(design, y, Logistic(), made, key=key)
    )


def agrees(found: report.Report, kind: str) -> None:
    """It is of the format, of the kind, and in all of its forms."""
    report.check(json.loads(found.json()))
    assert found["kind"] == kind
    assert found["plain"]["promise"] in found.page().replace("&#x27;", "'")
    assert found["guarantee"]["statement"] in " ".join(found.text().split())
    assert "In plain words" in found.page()
    assert "What it does not mean" in found.page()
    assert str(found) == found.text()
    names = [line[:14].strip() for line in found.text().splitlines() if line[:14].strip()]
    assert (names[:2], names[-1]) == (["privacy", "plain words"], "not meant")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_estimators(estimator: Any) -> None:
    fitted = estimator.fit(ROWS, np.arange(60) % 2)
    found = dpgrad.report(fitted, outside=["something else"])
    agrees(found, "estimator")
    assert found["method"]["name"] == type(estimator).__name__
    assert found["guarantee"]["epsilon"] == fitted.privacy_.guarantee.epsilon <= 1
    assert [one["sensitivity"] for one in found["releases"]] == [one.sensitivity for one in fitted.privacy_.releases]
    assert found["outside"] == [*fitted.privacy_.outside, "something else"]
    assert found["preprocessing"]
    assert found["schema"]["rows"] == 60
    assert found["release"]["allowed"] is True
    assert fitted.report() == dpgrad.report(fitted)
    if found["releases"]:
        values, event = found["values"], fitted.privacy_.guarantee.event
        assert values["clip"] == pytest.approx(values["clip"])
        multipliers = {round(getattr(leaf, "noise_multiplier", 0) or leaf.event.noise_multiplier, 6)
                       for leaf in events.leaves(event) if not isinstance(leaf, events.Approximate)}  # fmt: skip
        assert round(values["noise_multiplier"], 6) in multipliers or estimator.get_params().get("solver") == "amp"


def test_values_of_a_descent() -> None:
    model = convex.DPLogisticRegression(classes=[0, 1], solver="sgd", max_iter=7, clip=0.5, sampling_rate=0.25)
    with pytest.warns(ConvergenceWarning):
        model.fit(ROWS, np.arange(60) % 2)
    values = model.report()["values"]
    assert (values["clip"], values["sampling_rate"], values["steps"]) == (pytest.approx(0.5), 0.25, 7)
    (leaf,) = events.leaves(model.privacy_.guarantee.event)
    assert values["noise_multiplier"] == pytest.approx(leaf.event.noise_multiplier)  # type: ignore[union-attr]
    assert model.report()["notes"], "that it had not settled"


def test_a_seeded_estimator_is_not_for_release() -> None:
    found = convex.DPLogisticRegression(classes=[0, 1], random_state=7).fit(ROWS, np.arange(60) % 2).report()
    assert found["release"]["allowed"] is False
    assert "NOT FOR RELEASE" in found.text()
    assert "is not for release" in found.page()
    assert "7" not in found["release"]["reason"]


def test_columns_are_named_and_inferred_classes_are_not() -> None:
    frame = pytest.importorskip("pandas").DataFrame(ROWS, columns=["age", "dose"])
    model = convex.DPLogisticRegression()
    with pytest.warns(convex.PrivacyWarning):
        model.fit(frame, np.arange(60) % 2)
    found = model.report()
    assert found["schema"] == {"rows": 60, "columns": ["age", "dose"], "classes": None}
    assert "2 columns: age, dose" in found.text()


@pytest.mark.parametrize("name", ["gd", "sgd", "output", "objective", "amp", "regression", "auto", "one_vs_rest"])
def test_solvers(name: str) -> None:
    result = solved(name)
    found = result.report(1e-4)
    agrees(found, "release")
    assert found["guarantee"]["epsilon"] <= 1.0 + 1e-9
    assert found["values"]["noise_multiplier"] > 0
    assert found["release"]["allowed"] is True
    again = pickle.loads(pickle.dumps(result))
    assert (again.event, again.relation, again.releases) == (result.event, result.relation, result.releases)
    with pytest.raises(ValueError, match=r"^delta is required"):
        dpgrad.report(result)


def test_a_solver_still_returns_a_pair() -> None:
    coefficients, event = result = solved("output")
    assert coefficients is result.coefficients is result[0]
    assert event is result.event


class TestPipelines:
    def fitted(self, *steps: Any) -> Any:
        return make_pipeline(*steps).fit(ROWS, np.arange(60) % 2)

    def test_steps_are_added_up(self) -> None:
        pipeline = self.fitted(
            convex.DPStandardScaler(0.5, bounds=(-1, 1)), convex.RowNormalizer(), convex.DPLinearSVC(classes=[0, 1])
        )
        found = dpgrad.report(pipeline)
        agrees(found, "pipeline")
        both = events.Compose(tuple(pipeline[place].privacy_.guarantee.event for place in (0, 2)))
        price = dpgrad.accounting.account(both, Relation.REPLACE_ONE, "exact").epsilon(60**-2.0)
        assert found["guarantee"]["epsilon"] == price
        assert found["guarantee"]["epsilon"] > pipeline[-1].privacy_.guarantee.epsilon
        assert any("are scaled to that norm" in entry for entry in found["preprocessing"])
        assert found["releases"][0]["name"] == "dpstandardscaler: mean and mean square"

    def test_what_others_learned_is_not_covered(self) -> None:
        columns = ColumnTransformer([("own", convex.DPStandardScaler(0.5, bounds=(-1, 1)), [0]), ("left", "drop", [1])])
        found = dpgrad.report(self.fitted(StandardScaler(), columns, convex.DPLogisticRegression(classes=[0, 1])))
        assert any("StandardScaler" in entry and "no noise" in entry for entry in found["outside"])
        assert {one["name"].partition(":")[0] for one in found["releases"]} == {"own", "dplogisticregression"}

    def test_steps_that_disagree(self) -> None:
        pipeline = self.fitted(
            convex.DPStandardScaler(bounds=(-1, 1), relation="zero-out"), convex.DPLinearSVC(classes=[0, 1])
        )
        with pytest.raises(ValueError, match="different neighbouring relations"):
            dpgrad.report(pipeline)

    def test_a_search_is_sent_to_its_ledger(self) -> None:
        search = GridSearchCV(convex.DPLinearSVC(classes=[0, 1]), {"kappa": [0.5, 1.0]}, cv=2)
        with pytest.raises(ValueError, match=r"a search made many fits.*report\(ledger"):
            dpgrad.report(search.fit(ROWS, np.arange(60) % 2))


class TestOthers:
    def test_guarantee(self) -> None:
        found = dpgrad.report(Guarantee(1.0, 1e-6, Relation.ZERO_OUT, "exact", events.Gaussian(4.9)))
        agrees(found, "guarantee")
        assert found["release"]["allowed"] is None
        assert dpgrad.report(found) is found

    def test_ledger(self) -> None:
        ledger = Ledger()
        assert dpgrad.report(ledger, delta=1e-5)["guarantee"]["epsilon"] == 0
        ledger.add(events.Repeat(events.Poisson(0.1, events.Gaussian(2.0)), 3), Relation.ZERO_OUT, "<b>a run</b>")
        ledger.add(events.Gaussian(4.0), Relation.ZERO_OUT, "a scaler")
        found = dpgrad.report(ledger, delta=1e-5)
        agrees(found, "ledger")
        assert found["guarantee"]["epsilon"] == ledger.guarantee(1e-5).epsilon
        assert [(one["sampling_rate"], one["count"]) for one in found["releases"]] == [(0.1, 3), (1.0, 1)]
        assert "<b>a run" not in found.page().partition("<script")[0]

    def test_mechanism_and_plan(self) -> None:
        mechanism = Mechanism(sampling.Poisson(0.01), 100, 1.5, clip=2.0)
        found = dpgrad.report(mechanism, delta=1e-5)
        agrees(found, "plan")
        assert found["values"] == {"noise_multiplier": 1.5, "clip": 2.0, "sampling_rate": 0.01, "steps": 100}
        made = plan.make("dpgd", rows=1000, steps=50, noise_multiplier=20.0, delta=1e-5)
        agrees(made.report(), "plan")
        assert made.report()["values"]["sampling_rate"] == 1.0
        assert made.report()["release"]["allowed"] is False

    def test_projection(self) -> None:
        found = pca.principal_directions(torch.eye(4), directions=2, noise_multiplier=4.0).report(1e-5)
        agrees(found, "release")
        assert "DP-PCA" in found.text()

    def test_runs(self, fitted: Fitted) -> None:
        found = dpgrad.report(fitted)
        agrees(found, "run")
        assert found == fitted.report()
        mechanism = fitted.plan.mechanism
        assert found["values"] == {
            "noise_multiplier": mechanism.noise_multiplier, "clip": mechanism.clip_at(0), "sampling_rate": 0.2,
            "steps": 3,
        }  # fmt: skip

    @pytest.mark.parametrize("declared", [{"columns": {"age": {"bounds": (0, 99)}}}, None])
    def test_a_schema_of_the_data(self, fitted: Fitted, declared: Any) -> None:
        held = replace(dpgrad.data.load("digits"), schema=declared)
        found = report.report(fitted, data=held)
        assert found["schema"] == (None if declared is None else {"columns": {"age": {"bounds": [0, 99]}}})

    @pytest.mark.parametrize("given", [convex.DPLogisticRegression(), make_pipeline(StandardScaler()), None, 3])
    def test_anything_else_is_refused_in_one_line(self, given: Any) -> None:
        with pytest.raises(ValueError, match=r"^[^\n]*an estimator has one after fit$"):
            dpgrad.report(given)


class TestSaved:
    def test_three_files(self, tmp_path: Path) -> None:
        found = dpgrad.report(Guarantee(1.0, 1e-6, Relation.ZERO_OUT, "exact", events.Gaussian(4.9)))
        found.save(tmp_path / "new" / "folder")
        assert report.load(tmp_path / "new" / "folder") == found
        assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {
            "report.json", "report.txt", "report.html",
        }  # fmt: skip
        with pytest.raises(ValueError, match="is there already: choose another folder"):
            found.save(tmp_path / "new" / "folder")
        with pytest.raises(ValueError, match="is a file"):
            found.save(tmp_path / "new" / "folder" / "report.txt")


def test_the_environment_names_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform
    import socket

    found = environment.environment()
    assert found["packages"]["torch"] == torch.__version__
    assert platform.node() not in json.dumps(found) or not platform.node()
    assert socket.gethostname() not in json.dumps(found)
    assert "/" not in json.dumps(found)
