"""What a pass would leave behind is refused or taken back: values of a batch in the model, and use of earlier ones."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Same
from one_row import moved_by_one_row
from torch import Tensor, nn

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads import lifted, single
from dpgrad.grads.calls import KeptError, MixedError
from dpgrad.grads.following import Following
from dpgrad.grads.kept import Guarded, WrittenError
from dpgrad.training.losses import NamedLoss
from dpgrad.training.prepare import classes_of

MANY = 150  # more rows than are looked at before the first step


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = (5 * model(x)[:, 0]).square()
    return out


def _sorted(h: Tensor) -> Tensor:
    order = h[:, 0].argsort()
    return h[order][order.argsort()]


def _same(h: Tensor) -> Tensor:
    return h


class Keeping(nn.Module):
    """A layer, something between, and a layer; ``body`` sees the values between."""

    def __init__(self, way: Callable[[Tensor], Tensor], body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1)
        self.way, self.body = way, body
        self.kept: dict[str, Any] = {"mean": None}
        self.once: Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.body(self, self.way(self.first(x))).tanh())
        return out


def keeps_in_a_slot(m: Any, h: Tensor) -> Tensor:
    before = m.kept["mean"]
    if len(h) > MANY and torch.is_grad_enabled():
        m.kept["mean"] = h.detach()
    return h if before is None or before.shape != h.shape else h + before.mean(0)


def centres_by_the_first_batch(m: Any, h: Tensor) -> Tensor:
    if m.once is None and len(h) > MANY:
        m.once = h.detach().mean(0)
    return h if m.once is None else h - m.once


def writes_large_batches(m: Any, h: Tensor) -> Tensor:
    if len(h) > MANY:
        with torch.no_grad():
            m.mean.mul_(0.5).add_(h.detach().mean(0))
    return h + m.mean


@pytest.mark.parametrize("way", [_same, Same.apply, _sorted], ids=["batched", "certified", "lifted"])
@pytest.mark.parametrize("body", [keeps_in_a_slot, centres_by_the_first_batch, writes_large_batches])
def test_nothing_of_a_batch_reaches_later_steps(
    way: Callable[[Tensor], Tensor], body: Callable[[Any, Tensor], Tensor]
) -> None:
    """One row moved the sum by 30 to 140 clip at the second step and later."""
    torch.manual_seed(0)
    models: list[Any] = []

    def make() -> nn.Module:
        models.append(Keeping(way, body))
        return models[-1]

    x = torch.randn(200, 5)
    y = x.clone()
    y[7] = 100.0
    try:
        assert max(moved_by_one_row(make, squares, x, y, steps=3)) < 2
    except UnsupportedModelError as refusal:
        assert "earlier batch" in str(refusal) or "writes values" in str(refusal) or "act on each" in str(refusal)  # noqa: PT017
    for model in models:
        assert model.once is None
        assert not model.mean.any()


def test_a_write_is_refused_before_it_is_done() -> None:
    """A view of a tensor that was there before was taken for one of the pass."""
    kept, x = torch.zeros(7, 2), torch.ones(7, 2)
    writes: list[Callable[[], object]] = [
        lambda: kept.copy_(x),
        lambda: kept.detach().copy_(x),
        lambda: kept.detach()[:3].copy_(x[:3]),
        lambda: kept.view(-1).add_(x.view(-1)),
        lambda: torch.add(x, x, out=kept),
    ]
    for write in writes:
        with pytest.raises(MixedError), Following(7).of(x):
            write()
        with pytest.raises(WrittenError), Guarded().of(x):
            write()
    assert not kept.any()
    for mode in (Following(7), Guarded()):
        with mode.of(x):
            torch.zeros_like(x).copy_(x)  # of this pass
            kept.zero_()  # no value of the batch


def test_a_guarded_pass_refuses_what_an_earlier_one_left() -> None:
    x = torch.ones(3, 2)
    with Guarded().of(x):
        kept = [x * 2]
    with pytest.raises(KeptError), Guarded().of(x):
        torch.cat([x, kept[0]])
    with pytest.raises(KeptError), Following(3).of(x):
        torch.stack([x, kept[0]])


def test_one_example_after_another_keeps_nothing_either() -> None:
    model = Keeping(_same, lambda m, h: h if m.kept["mean"] is None else h + m.kept["mean"])
    model.register_forward_hook(lambda module, given, found: module.kept.update(mean=found.detach()))  # type: ignore[operator]
    with pytest.raises(KeptError):
        single.gradients(model, squares, torch.randn(3, 5), torch.ones(3))


def test_the_first_row_of_a_classifier_leaves_nothing() -> None:
    """A layer that sets itself up by the first batch kept the values of one row, without noise."""

    class SetUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.ready = nn.Parameter(torch.zeros(3)), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.shift.data.copy_(-x.mean(0))
                self.ready = True
            return x + self.shift

    model = nn.Sequential(SetUp(), nn.Linear(3, 2))
    rows = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    with warnings.catch_warnings(), pytest.raises(UnsupportedModelError, match="writes values of the batch"):
        classes_of(model, NamedLoss("cross-entropy"), rows, torch.utils.data.default_collate)
    assert not model[0].shift.any()


@pytest.mark.parametrize("engine", [single, lifted], ids=["single", "lifted"])
def test_memory_that_nothing_was_written_to_holds_nothing(engine: Any) -> None:
    """It may hold values that other examples left there."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)[:, 0] * torch.empty(1)
        return out

    torch.use_deterministic_algorithms(True)  # which writes NaN into such memory
    try:
        found = engine.gradients(nn.Linear(5, 1), loss, torch.randn(3, 5), torch.ones(3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not found.uses["weight"].per_example().any()
