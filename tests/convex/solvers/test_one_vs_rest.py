"""One-vs-rest: every class its own model and key, all of them in the event, the budget split."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Event, Gaussian, Relation, Repeat
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Logistic
from dpgrad.convex.solvers import amp, objective, one_vs_rest, output
from dpgrad.mechanism.keys import AnyKey, Key

Array = NDArray[np.float64]
KIND: dict[str, Any] = {"radius": 1.0, "epsilon": 2.0, "delta": 1e-8, "relation": Relation.REPLACE_ONE}


def problem(rows: int = 3000) -> tuple[Design, NDArray[np.int64]]:
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, rows)
    x = np.eye(4)[labels] + 0.3 * random.standard_normal((rows, 4))
    return Design(x, radius=1.0, rule="normalise"), labels


PLANS: dict[str, Any] = {
    "objective": (objective, objective.calibrated(3000, Logistic(), models=4, **KIND)),
    "amp": (amp, amp.tuning_free(3000, Logistic(), models=4, **KIND)),
    "output": (
        output,
        output.calibrated(3000, Logistic(), models=4, passes=2, batch_size=50, learning_rate=0.5, **KIND),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_four_classes_within_the_budget(name: str) -> None:
    module, plan = PLANS[name]
    design, labels = problem()
    w, event = one_vs_rest.solve(design, labels, 4, partial(module.solve, loss=Logistic(), plan=plan), key=3)
    assert w.shape == (4, 4)
    assert np.mean(design.scores(w).argmax(axis=1) == labels) > 0.8
    assert event == Repeat(plan.event, 4)
    spent = account(event, Relation.REPLACE_ONE, "pld").epsilon(1e-8)
    assert 0.8 * 2.0 < spent <= 2.0


def test_each_class_is_the_binary_fit_with_its_own_key() -> None:
    design, labels = problem(100)
    seen: list[tuple[Any, Key]] = []

    def binary(design: Design, targets: ArrayLike, *, key: AnyKey) -> tuple[Array, Event]:
        seen.append((np.asarray(targets), Key.of(key)))
        return np.full((4, 1), float(len(seen))), Gaussian(2.0 + len(seen))

    w, event = one_vs_rest.solve(design, labels, 4, binary, key=3)
    assert w[0].tolist() == [1, 2, 3, 4]
    assert event == Compose(tuple(Gaussian(2.0 + k) for k in (1, 2, 3, 4)))
    for each, (targets, key) in enumerate(seen):
        assert np.array_equal(targets, np.where(labels == each, 1.0, -1.0))
        assert key.reproducible
    assert len({key.secret for _, key in seen} | {Key.from_seed(3).secret}) == 5
    one_vs_rest.solve(design, labels, 4, binary)
    assert not seen[-1][1].reproducible


def test_gaussian_releases_share_exactly() -> None:
    """√K times the noise of one model, where adding up would take more than K times."""
    kind = {**KIND, "passes": 2, "batch_size": 50, "learning_rate": 0.5}
    one, ten = (output.calibrated(3000, Logistic(), models=k, **kind) for k in (1, 10))
    assert ten.std == pytest.approx(math.sqrt(10) * one.std)
    split = output.calibrated(3000, Logistic(), **{**kind, "epsilon": 0.2, "delta": 1e-9})
    assert split.std > 2 * ten.std


def test_labels_outside_the_classes_are_refused() -> None:
    design, labels = problem(100)
    module, plan = PLANS["amp"]
    binary = partial(module.solve, loss=Logistic(), plan=plan)
    with pytest.raises(ValueError, match="targets must be class indices from 0 to 2"):
        one_vs_rest.solve(design, labels, 3, binary)
    with pytest.raises(ValueError, match="classes must be a whole number of at least 2"):
        one_vs_rest.solve(design, labels, 1, binary)


def test_a_model_of_several_scores_is_no_binary_one() -> None:
    design, labels = problem(100)
    with pytest.raises(ValueError, match="scores of a binary model must be at most 1, got 3"):
        one_vs_rest.solve(design, labels, 4, lambda design, targets, *, key: (np.ones((4, 3)), Gaussian(1.0)))
