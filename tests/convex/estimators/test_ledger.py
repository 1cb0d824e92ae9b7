"""A shared ledger adds up every fit: refits, pipelines, and the grid searches that would spend unseen."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline

from dpgrad.accounting.events import Compose, Relation
from dpgrad.accounting.ledger import Ledger
from dpgrad.convex.estimators import DPLinearRegression, DPLogisticRegression, DPStandardScaler
from dpgrad.convex.estimators.solvers import SOLVERS

RANDOM = np.random.default_rng(25)
X = RANDOM.standard_normal((200, 3))
Y = (X[:, 0] > 0).astype(int)


def model(ledger: Ledger | None, **options: object) -> DPLogisticRegression:
    return DPLogisticRegression(0.5, classes=[0, 1], ledger=ledger, max_iter=5, **options)


def test_a_clone_pays_into_the_same_ledger() -> None:
    ledger = Ledger()
    assert clone(model(ledger)).ledger is ledger
    assert clone(make_pipeline(model(ledger)))[-1].ledger is ledger


def test_refits_add_up() -> None:
    ledger, once = Ledger(), Ledger()
    fitted = model(ledger).fit(X, Y).fit(X, Y)
    model(once).fit(X, Y)
    assert [entry.label for entry in ledger.entries()] == ["DPLogisticRegression"] * 2
    assert ledger.event() == Compose((once.event(), once.event()))
    assert fitted.privacy_.guarantee.epsilon <= 0.5  # of the last fit
    both = ledger.guarantee(200**-2.0, "exact")
    assert 0.5 < both.epsilon < 1
    assert both.relation is Relation.REPLACE_ONE
    assert any("ledger.guarantee" in fact for fact in fitted.privacy_.outside)


def test_a_grid_search_cannot_spend_unseen() -> None:
    ledger = Ledger()
    search = GridSearchCV(model(ledger), {"kappa": [0.5, 1.0], "fit_intercept": [True, False]}, cv=3)
    search.fit(X, Y)
    assert len(ledger.entries()) == 3 * 4 + 1
    assert ledger.guarantee(200**-2.0, "exact").epsilon > 3 * search.best_estimator_.privacy_.guarantee.epsilon


def test_processes_share_a_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "spent.jsonl")
    GridSearchCV(model(ledger), {"kappa": [0.5, 1.0]}, cv=2, n_jobs=2).fit(X, Y)
    assert len(ledger.entries()) == 2 * 2 + 1
    assert len(Ledger(tmp_path / "spent.jsonl").entries()) == 5


def test_a_ledger_in_memory_is_not_sent_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a ledger in memory cannot be sent to another process.*Ledger\(path\)"):
        pickle.dumps(model(Ledger()))
    with pytest.raises(pickle.PicklingError, match="Could not pickle the task") as refused:
        GridSearchCV(model(Ledger()), {"kappa": [0.5, 1.0]}, cv=2, n_jobs=2).fit(X, Y)
    assert "Ledger(path)" in str(refused.value.__cause__)  # where a traceback shows it
    kept = Ledger(tmp_path / "spent.jsonl")
    pickle.loads(pickle.dumps(model(kept))).fit(X, Y)
    assert len(kept.entries()) == 1


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("classes", [2, 3])
def test_what_is_charged_is_what_is_reported(solver: str, classes: int) -> None:
    ledger = Ledger()
    labels = Y if classes == 2 else np.digitize(X[:, 0], [-0.5, 0.5])
    fitted = DPLogisticRegression(3.0, classes=range(classes), solver=solver, ledger=ledger).fit(X, labels)
    assert ledger.event() == fitted.privacy_.guarantee.event
    regression = DPLinearRegression(3.0, data_norm=2.0, target_bounds=(0, 1), ledger=(paid := Ledger())).fit(X, Y)
    assert paid.event() == regression.privacy_.guarantee.event


def test_a_fit_that_fails_after_it_began_is_paid_for() -> None:
    ledger = Ledger()
    wild = DPLogisticRegression(
        0.5, classes=[0, 1], solver="gd", learning_rate=1e300, l2=1e10, max_iter=5, ledger=ledger
    )
    with pytest.raises(ValueError, match="makes the coefficients grow without bound"):
        wild.fit(X, Y)
    assert len(ledger.entries()) == 1
    with pytest.raises(ValueError, match="solver gd does not use kappa"):
        wild.set_params(kappa=1.0).fit(X, Y)
    assert len(ledger.entries()) == 1


def test_a_pipeline_pays_for_every_part() -> None:
    ledger = Ledger()
    chain = make_pipeline(DPStandardScaler(0.5, bounds=(-5.0, 5.0), ledger=ledger), model(ledger))
    cross_val_score(chain, X, Y, cv=2)
    labels = [entry.label for entry in ledger.entries()]
    assert labels == ["DPStandardScaler", "DPLogisticRegression"] * 2


def test_relations_do_not_mix_and_nothing_is_released() -> None:
    ledger = Ledger()
    model(ledger).fit(X, Y)
    other = model(ledger, relation="zero-out")
    with pytest.raises(ValueError, match="the ledger holds releases for replace-one neighbours, got one for zero-out"):
        other.fit(X, Y)
    assert "coef_" not in vars(other)
    assert len(ledger.entries()) == 1
