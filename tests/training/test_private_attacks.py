"""What a hostile review found in the private step: each attack stays refused."""

import copy
import pickle
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from one_row import moved_by_one_row
from torch import Tensor, nn

from dpgrad import Mechanism
from dpgrad.errors import UnsupportedModelError
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Group
from dpgrad.training.private import PrivateGradient


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def private(model: nn.Module, engine: str = "bookkeeping", **options: Any) -> PrivateGradient:
    return PrivateGradient(
        model, squares, Mechanism(sampling.FullBatch(), 4, 1.0, batch_size=4.0, **options), engine=engine
    )


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_batchnorm_that_is_switched_to_training_after_the_first_step(engine: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)).eval()
    steps, data = private(model, engine), torch.randn(8, 3)
    steps.step(data)
    model.train()
    before = model[1].running_mean.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="BatchNorm '1' mixes examples"):
            steps.step(data)
    assert steps.steps_taken == 1
    assert torch.equal(model[1].running_mean, before)
    model.eval()
    steps.step(data)


def test_a_hook_that_comes_after_the_first_step() -> None:
    model = nn.Linear(3, 2)
    steps, data = private(model), torch.randn(8, 3)
    steps.step(data)
    model.register_forward_pre_hook(lambda _, given: (given[0] - given[0].mean(0),))
    with pytest.raises(ValueError, match="examples act on each other"):
        steps.step(data)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_add_the_same_noise_to_another_sum(copied: Any) -> None:
    with pytest.raises(ValueError, match="cannot be copied or pickled"):
        copied(private(nn.Linear(3, 2)))


def test_a_last_group_whose_parameters_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    private(model, groups=(Group("0.*"), Group("1.*"))).step(torch.randn(8, 3))
    assert model[0].weight.grad is not None


def test_dropout_does_not_draw_from_a_seed_that_the_caller_may_tell() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 2))
    data = torch.randn(64, 3)
    found = []
    for _ in range(2):
        plan = Mechanism(sampling.FullBatch(), 1, 1e-6, batch_size=1.0)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        PrivateGradient(model, squares, plan).step(data)
        assert torch.equal(torch.get_rng_state(), before)
        assert model[1].weight.grad is not None
        found.append(model[1].weight.grad)
    assert float((found[0] - found[1]).norm()) > 0.1


def test_each_step_and_rank_draws_its_own_masks() -> None:
    work = private(nn.Linear(3, 2)).work
    ranks = copy.copy(work.ranks)
    found = []
    for step, rank in ((0, 0), (1, 0), (0, 1), (0, 0)):
        work.ranks = copy.copy(ranks)
        work.ranks.rank = rank
        with work.own_randomness(step):
            found.append(torch.rand(3))
    assert torch.equal(found[0], found[3])
    assert len(torch.stack(found).unique(dim=0)) == 3


def test_a_difference_that_shows_later_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compare` refuses on the rows of a later batch is refused before that step is taken.

    The words are those of a stand-in in this file, and so not shown.
    """

    def differs(*arguments: object, **options: object) -> None:
        raise UnsupportedModelError("the engine differs from one example at a time")

    monkeypatch.setattr("dpgrad.training.private.compare", differs)
    monkeypatch.setattr("dpgrad.grads.again.Again.due", lambda self: one.steps_taken > 0)
    data = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    plan = Mechanism(sampling.FullBatch(), steps=3, noise_multiplier=1.0, batch_size=20)
    one = PrivateGradient(nn.Linear(3, 1), squares, plan, seed=1)
    one.step(data)
    with pytest.raises(UnsupportedModelError, match=r"_attacks\.py, line \d+, raised UnsupportedModelError"):
        one.step(data)
    assert one.steps_taken == 1


def test_a_batch_in_place_of_the_dataset_is_warned_of() -> None:
    plan = Mechanism(sampling.Poisson(0.2), steps=3, noise_multiplier=1.0, batch_size=80)
    data = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="give the whole dataset at every step, not a batch of it"):
        PrivateGradient(nn.Linear(3, 1), squares, plan, seed=1).step(data)


class Set(nn.Module):
    """A model that does other things by what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1)
        self.center, self.settings, self.between = False, {"center": [False]}, torch.tanh
        self.passes = {"count": 0}
        self.late = 10_000

    def forward(self, x: Tensor) -> Tensor:
        self.passes["count"] += 1
        h = self.first(x)
        if self.center or self.settings["center"][0] or self.passes["count"] > self.late:
            h = h - h.mean(0)
        out: Tensor = self.second(self.between(h))
        return out


class SetLoss:
    mixed = False

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        own: Tensor = (5 * model(x)[:, 0]).square()
        return own * (x.sum() + 100).sign() if self.mixed else own


def turns(module: nn.Module, inner: Any, outer: tuple[Tensor]) -> tuple[Tensor]:
    return (inner[0] * outer[0][7].sign(),)  # by one row


@pytest.mark.parametrize("steps", [5, 40], ids=["single kernels", "pieces"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m, loss: setattr(m, "center", True),
        lambda m, loss: m.settings["center"].__setitem__(0, True),
        lambda m, loss: setattr(m, "between", lambda h: (h - h.mean(0)).tanh()),
        lambda m, loss: setattr(m, "forward", lambda x: m.second((m.first(x) - m.first(x).mean(0)).tanh())),
        lambda m, loss: setattr(m, "late", 0),
        lambda m, loss: m.second.register_full_backward_hook(turns),
        lambda m, loss: setattr(loss, "mixed", True),
    ],
    ids=["flag", "nested flag", "function", "forward", "count", "backward hook", "loss"],
)
def test_what_changes_between_steps_is_followed_again(change: Any, steps: int) -> None:
    """Passes that had been followed once were taken to do the same for good: one row moved the sum by 34 clip."""
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    y = x.clone()
    y[7] = -100.0
    losses: list[SetLoss] = []
    changed: list[int] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return losses[-1](model, batch)

    def make() -> nn.Module:
        losses.append(SetLoss())
        return Set()

    def between(model: nn.Module, step: int) -> None:
        if step == 3:  # the comparison after the first step is over
            change(model, losses[-1])
            changed.append(step)

    with suppress(UnsupportedModelError):  # what is refused moves nothing
        assert max(moved_by_one_row(make, loss, x, y, steps=5, between=between, planned=steps)) < 2
    assert changed


@dataclass(slots=True)
class Slots:
    center: bool = False


class Elsewhere:
    center = False


class Hidden(nn.Module):
    """A model that does other things by what nobody looks at: all that is seen is what it does."""

    of_class = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1)
        self.slots, self.bytes, self.array, self.many = Slots(), array("b", [0]), np.zeros(1000), [0] * 1000

    def centered(self) -> bool:
        held = self.slots.center or self.of_class or self.bytes[0] or self.array[-1] or self.many[-1]
        return bool(held or Elsewhere.center)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.second(torch.tanh(h - h.mean(0) if self.centered() else h))
        return out


@pytest.mark.parametrize("steps", [5, 40], ids=["single kernels", "pieces"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.slots, "center", True),
        lambda m: m.bytes.__setitem__(0, 1),
        lambda m: m.array.__setitem__(-1, 1),
        lambda m: m.many.__setitem__(-1, 1),
        lambda m: setattr(type(m), "of_class", True),
        lambda m: setattr(type(m), "centered", lambda self: True),
        lambda m: setattr(type(m), "forward", lambda self, x: self.second((self.first(x) - x.mean()).tanh())),
        lambda m: setattr(Elsewhere, "center", True),
    ],
    ids=["slot", "bytes", "array", "list", "its class", "its method", "its forward", "another class"],
)
def test_every_pass_is_compared_with_the_one_that_was_followed(change: Any, steps: int) -> None:
    """What a pass may depend on cannot be listed: one row moved the sum by 43 clip."""
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    y = x.clone()
    y[7] = -100.0

    def make() -> nn.Module:
        Elsewhere.center = False
        own: nn.Module = type("Own", (Hidden,), {})()  # a class that may be changed
        return own

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = (5 * model(batch)[:, 0]).square()
        return out

    def between(model: nn.Module, step: int) -> None:
        if step == 3:  # the comparison after the first step is over
            change(model)

    with suppress(UnsupportedModelError):  # what is refused moves nothing
        assert max(moved_by_one_row(make, loss, x, y, steps=5, between=between, planned=steps)) < 2
