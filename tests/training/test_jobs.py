"""What is done where nothing is said: settings that suit every method, and rows as tensors."""

import pytest
import torch

from dpgrad import data
from dpgrad.training import jobs
from dpgrad.training.baseline import non_private
from dpgrad.training.models import build
from dpgrad.training.recipes import RECIPES, recipe
from spread import fit


def test_settings_of_digits_move_as_far_by_every_method() -> None:
    job = jobs.job(data.load("digits"))
    assert jobs.constants(job, RECIPES["auto"], None) == {}  # chooses for itself
    for named in RECIPES.values():
        if named.by_rule:
            continue
        made = jobs.constants(job, named, None)
        reach = made["learning_rate"] * made.get("clip", 1.0) / (1 - named.momentum)
        assert reach == pytest.approx(job.largest_step)
    assert jobs.constants(job, recipe("dpsgd"), 0.5) == {"clip": 0.5, "learning_rate": 12.0}


@pytest.mark.parametrize(("shape", "model"), [((1, 8, 8), "cnn"), ((5,), "linear")], ids=str)
def test_other_data(shape: tuple[int, ...], model: str) -> None:
    rows = torch.zeros(4, *shape).numpy()
    labels = torch.tensor([0, 1, 0, 1]).numpy()
    made = data.Dataset("toy", rows, labels, rows, labels, ("a", "b"), "default", "none", ())
    assert jobs.job(made).model == model
    assert jobs.JobRows.of(made).outputs == 2
    real = data.Dataset("toy", rows, rows[:, 0].reshape(4, -1)[:, 0], rows[:0], labels[:0], None, "default", "", ())
    found = jobs.JobRows.of(real)
    assert (found.outputs, found.loss, found.held_out) == (1, "squared", None)
    assert found.train[1].dtype == torch.float32


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with jobs.threads(jobs.job(data.load("digits"))):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.exhaustive if place % 2 else ())
        for place, method in enumerate(jobs.job(data.load("digits")).methods)
    ],
)
def test_digits_at_epsilon_3(method: str) -> None:
    """A fixed seed; over fresh keys the mean is 96 % and the lowest of 48 runs was 95.3 %."""
    digits = data.load("digits")
    job, rows = jobs.job(digits), jobs.JobRows.of(digits)
    with jobs.threads(job):
        fitted = fit(
            build(job.model, rows.shape, rows.outputs), rows.train, rows.loss, method=method, epsilon=3.0, delta=1e-5,
            batch_size=job.batch_size, steps=job.steps, averaging=job.averaging, held_out=rows.held_out,
            evaluate_every=job.steps, seed=1, **jobs.constants(job, recipe(method), None),
        )  # fmt: skip
    assert fitted.guarantee.epsilon <= 3
    assert fitted.held_out is not None
    assert fitted.held_out >= 0.93


def test_digits_without_privacy() -> None:
    rows = jobs.JobRows.of(data.load("digits"))
    torch.manual_seed(0)
    model = build("oriented-gradients", rows.shape, rows.outputs)
    assert non_private(model, rows.train, rows.loss, rows.held_out, epochs=60) >= 0.975
