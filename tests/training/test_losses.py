"""Losses by name against torch's own, one value per row; metrics; refusals that repeat no label."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad.errors import OptionError
from dpgrad.grads import ENGINES, clipped_sum
from dpgrad.training.losses import (
    LOSSES,
    METRICS,
    NamedLoss,
    accuracy,
    bce,
    cross_entropy,
    huber,
    loss_named,
    metric_named,
    pair,
    refuse_targets,
    squared,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def labels(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Tensor, Tensor, nn.Module]] = {
    "cross-entropy": (normal(5, 4), labels(5, classes=4), nn.CrossEntropyLoss(reduction="sum")),
    "bce": (normal(5, 3), labels(5, 3, classes=2).float(), nn.BCEWithLogitsLoss(reduction="sum")),
    "huber": (3 * normal(5, 2), normal(5, 2), nn.HuberLoss(reduction="sum")),
    "squared": (normal(5, 2), normal(5, 2).flip(0), nn.MSELoss(reduction="sum")),
}


def test_every_loss_has_a_case() -> None:
    assert set(CASES) == set(LOSSES)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_one_value_per_row_as_torch_has_it(name: str) -> None:
    outputs, targets, reference = CASES[name]
    found = LOSSES[name](outputs, targets)
    half = 0.5 if name == "squared" else 1.0  # (s−y)²/2, as the convex losses have it
    wanted = [half * reference(outputs[i : i + 1], targets[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(found, torch.stack(wanted))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_both_engines_take_every_loss(name: str) -> None:
    outputs, targets, _ = CASES[name]
    torch.manual_seed(0)
    model = nn.Linear(3, outputs.shape[1])
    batch = normal(5, 3), targets
    sums = [
        clipped_sum(model, NamedLoss(name), batch, lambda norms: torch.ones_like(norms), engine).sums
        for engine in ENGINES.values()
    ]
    alone = LOSSES[name](model(batch[0]), targets).sum()
    wanted = torch.autograd.grad(alone, list(model.parameters()))
    for found in sums:
        torch.testing.assert_close(list(found.values()), list(wanted), rtol=2e-3, atol=1e-4)


def test_a_column_of_outputs_meets_a_vector_of_targets() -> None:
    """(n, 1) beside (n,) would broadcast to (n, n)."""
    outputs, targets = normal(4, 1), normal(4).flip(0)
    torch.testing.assert_close(squared(outputs, targets), (outputs[:, 0] - targets).square() / 2)
    assert huber(outputs, targets).shape == bce(outputs, (targets > 0).int()).shape == (4,)


def test_whole_numbers_of_any_width_are_labels() -> None:
    outputs = normal(3, 4)
    for kind in (torch.int32, torch.uint8, torch.int64):
        assert torch.equal(
            cross_entropy(outputs, torch.tensor([0, 3, 1], dtype=kind)), cross_entropy(outputs, torch.tensor([0, 3, 1]))
        )


@pytest.mark.parametrize("label", [3, 77, -1, -100])
def test_labels_out_of_range_are_refused_without_being_repeated(label: int) -> None:
    """Also −100, which torch would pass over in silence."""
    message = (
        "targets must be class indices from 0 to 2: the model has 3 outputs; give it one for each class; subtract 1 "
        "from labels that begin at 1, and of labels −1 and 1 take (labels + 1) // 2"
    )
    for refused in (
        lambda: cross_entropy(normal(2, 3), torch.tensor([0, label])),
        lambda: refuse_targets(NamedLoss("cross-entropy"), normal(2, 3), torch.tensor([0, label])),
    ):
        with pytest.raises(ValueError, match="targets must be class indices") as raised:
            refused()
        assert str(raised.value) == message
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "message"),
    [
        (cross_entropy, normal(2, 3), normal(2), "needs class indices as targets, got torch.float32"),
        (cross_entropy, normal(2, 3, 4), labels(2, classes=3), r"got outputs \(2, 3, 4\)"),
        (cross_entropy, normal(2, 3), labels(3, classes=3), r"targets \(3,\)"),
        (squared, normal(2, 3), normal(2), r"squared needs as many targets as outputs, got outputs \(2, 3\)"),
        (huber, normal(2, 3), normal(3, 2), "huber needs as many"),
        (bce, normal(2, 3), normal(2, 2), "bce needs as many"),
    ],
)
def test_shapes_that_do_not_meet_are_refused(loss: Any, outputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(outputs, targets)


def test_bce_refuses_labels_it_has_no_meaning_for() -> None:
    """−1 in place of 0 would push every score of that label without bound."""
    with pytest.raises(ValueError, match=r"^targets of bce must lie from 0 to 1: of labels −1 and 1 take .*/ 2$"):
        refuse_targets(NamedLoss("bce"), normal(2, 1), torch.tensor([[-1.0], [1.0]]))
    refuse_targets(NamedLoss("bce"), normal(2, 1), torch.tensor([[0.5], [1.0]]))


@pytest.mark.parametrize("targets", [torch.tensor([7, 7]), np.array([7, 7]), [7, 7], (torch.tensor(7),)])
def test_targets_in_the_place_of_the_loss(targets: Any) -> None:
    """As fit(X, y) of scikit-learn takes them; the message repeats none."""
    with pytest.raises(ValueError, match=r"targets: give rows and targets as one pair, fit\(model, \(X, y\)") as raised:
        loss_named(targets)
    assert "7" not in str(raised.value)


class TestNames:
    def test_a_function_is_passed_on(self) -> None:
        def own(model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch)[:, 0]

        assert loss_named(own) is own

    def test_unknown_names_are_refused_with_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"loss must be .* got 'crossentropy': did you mean cross-entropy"):
            loss_named("crossentropy")
        with pytest.raises(ValueError, match=r"metric must be one of .* got 'acuracy': did you mean accuracy"):
            metric_named("acuracy", NamedLoss("bce"))

    def test_data_that_are_no_pair_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"needs data as a pair \(inputs, targets\), got dict"):
            pair({"x": normal(2)})
        with pytest.raises(ValueError, match="got 3 parts"):
            pair((normal(2), normal(2), normal(2)))
        assert len(pair([normal(2), normal(2)])) == 2


class TestMetrics:
    def test_accuracy_of_classes_and_of_labels(self) -> None:
        outputs = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
        assert accuracy(outputs, torch.tensor([0, 1, 1])).tolist() == [1, 1, 0]
        logits = torch.tensor([[2.0, -1.0], [-1.0, -1.0]])
        assert accuracy(logits, torch.tensor([[1, 0], [1, 0]])).tolist() == [1, 0.5]
        assert accuracy(torch.tensor([[2.0], [-1.0]]), torch.tensor([1, 1])).tolist() == [1, 0]

    def test_what_is_shown_unless_told(self) -> None:
        def own(model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0])[:, 0]

        names = {loss: metric_named(None, NamedLoss(loss)).name for loss in LOSSES}
        assert names == {"cross-entropy": "accuracy", "bce": "accuracy", "squared": "squared", "huber": "huber"}
        assert metric_named(None, own).values is own
        assert metric_named("loss", NamedLoss("huber")).values == NamedLoss("huber")

    def test_a_function_of_outputs_and_targets(self) -> None:
        def error(outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs[:, 0] - targets).abs()

        found = metric_named(error, NamedLoss("squared"))
        assert found.name == "error"
        values = found.values(nn.Identity(), (torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 3.0])))
        assert values.tolist() == [2, 1]

    def test_every_loss_is_a_metric(self) -> None:
        assert set(LOSSES) < set(METRICS)


CLASSES, REALS = torch.tensor([0, 1, 3]), torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


class TestOfTorch:
    @pytest.mark.parametrize(
        ("loss", "named", "targets"),
        [
            (nn.CrossEntropyLoss(), "cross-entropy", CLASSES), (nn.CrossEntropyLoss, "cross-entropy", CLASSES),
            (nn.CrossEntropyLoss(reduction="none"), "cross-entropy", CLASSES),
            (F.cross_entropy, "cross-entropy", CLASSES), (nn.NLLLoss(), None, CLASSES),
            (nn.MSELoss(), "squared", REALS), (F.mse_loss, "squared", REALS), (nn.BCEWithLogitsLoss(), "bce", REALS),
            (F.binary_cross_entropy_with_logits, "bce", REALS), (nn.HuberLoss(), "huber", REALS),
            (F.smooth_l1_loss, "huber", REALS), (nn.L1Loss(), None, REALS), (F.l1_loss, None, REALS),
        ],
        ids=lambda value: None if isinstance(value, Tensor) else str(getattr(value, "__name__", value)),
    )  # fmt: skip
    def test_the_line_to_write(self, loss: Any, named: str | None, targets: Tensor) -> None:
        with pytest.raises(OptionError, match="is one of outputs and targets: write ") as raised:
            loss_named(loss)
        said = str(raised.value)
        assert (f'write loss="{named}", or ' in said) == (named is not None)
        written = eval(said.rpartition("loss=")[2], {"nn": nn, "F": F})
        values = loss_named(written)(nn.Linear(2, 4), (torch.zeros(3, 2), targets))
        assert len(values) == 3  # one place per example, no mean over them
