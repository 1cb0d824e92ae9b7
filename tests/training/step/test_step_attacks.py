"""What a hostile review found in the private step, run in each of its forms: each attack stays without effect.

The noise of a run with a known seed is taken off again, which leaves the clipped sum of each step.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpgrad.errors import DataError
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import noise
from dpgrad.training.private import PrivateGradient
from dpgrad.training.step import straight
from dpgrad.training.step.graphed import Graphed
from dpgrad.training.step.release import Figures
from replayed import on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes the noise of a CPU off again")
SEED, ROWS = 1, 200


@pytest.fixture(params=["taped", "graphed", "straight"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How steps are run, as options of `PrivateGradient`; code is kept whatever the load of the machine."""
    monkeypatch.setattr(straight, "_FASTER", math.inf)
    monkeypatch.setattr(straight, "_SHORT", math.inf)
    if request.param == "graphed":
        on_cpu(monkeypatch)
    return {"capture": {"taped": False, "graphed": True, "straight": None}[request.param]}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def rows(count: int = ROWS) -> Tensor:
    return 3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(0))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def plan(rate: float | None = None, **given: Any) -> Mechanism:
    sampler = sampling.FullBatch() if rate is None else sampling.Poisson(rate)
    return Mechanism(sampler, 300, 1e-3, batch_size=ROWS * (rate or 1.0), **given)


def sums(private: PrivateGradient, data: Any, steps: int) -> Iterator[Tensor]:
    """The clipped sum of each step, all parameters one after another."""
    for _ in range(steps):
        step = private.steps_taken
        private.step(data)
        likes = {name: parameter.detach().double() for name, parameter in private.model.named_parameters()}
        stds = {name: private.mechanism.std_at(step) for name in likes}
        drawn = noise.gaussians(likes, stds, private.key, step)
        found = []
        for name, parameter in private.model.named_parameters():
            assert parameter.grad is not None
            found.append((parameter.grad.double() * private.mechanism.divisor - drawn[name]).flatten())
        yield torch.cat(found)


def by_hand(model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], data: Tensor, clip: float = 1.0) -> Tensor:
    """The sum of clipped gradients, one example after another."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for row in data:
        own = torch.autograd.grad(loss(model, row[None]).sum(), list(model.parameters()))
        flat = torch.cat([each.double().flatten() for each in own])
        total += flat * min(1.0, clip / float(flat.norm()))
    return total


@pytest.mark.parametrize("microbatch", [None, 40, 100, 150])
def test_no_piece_of_a_step_is_lost(form: dict[str, Any], microbatch: int | None) -> None:
    """Pieces of more than 128 examples are summed in float64 and smaller ones in float32."""
    model, data = linear(), rows()
    private = PrivateGradient(model, squares, plan(), seed=SEED, microbatch=microbatch, **form)
    for found in sums(private, data, 4):
        assert float((found - by_hand(model, squares, data)).norm()) < 0.5  # rounding margins of all; a row more is 1


class Some(Dataset[Tensor | None]):
    """Rows one by one, some of which are of no use."""

    def __init__(self, data: Tensor, useless: tuple[int, ...] = ()) -> None:
        self.data, self.useless = data, useless

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index in self.useless else self.data[index]


def of_use(examples: list[Tensor | None]) -> Tensor:
    found = [example for example in examples if example is not None]
    return torch.stack(found) if found else torch.zeros(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_leaves_examples_out_lets_no_other_row_count(form: dict[str, Any], workers: int) -> None:
    """Places beyond its rows hold rows of earlier steps, which would count once more."""
    mechanism = plan(0.2)
    first, second = (set(sampling.Poisson(0.2).draw(ROWS, step, Key.from_seed(SEED)).tolist()) for step in (0, 1))
    useless = tuple(sorted(second - first))[:5]
    given = {"collate": of_use, "workers": workers, **form}
    with pytest.raises(DataError, match="collate must give one entry per example"):
        for _ in sums(PrivateGradient(linear(), squares, mechanism, seed=SEED, **given), Some(rows(), useless), 2):
            pass


def test_interrupted_while_rows_are_loaded_the_next_step_has_its_own(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if form["capture"] is False:
        pytest.skip("rows are loaded at once")
    model, mechanism = linear(), plan(0.2)
    private = PrivateGradient(model, squares, mechanism, seed=SEED, workers=1, **form)
    data = Some(rows())
    private.step(data)
    feed: Any = private._running._feed  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(feed, "_loaded", _interrupted())
        with pytest.raises(KeyboardInterrupt):
            private.step(data)
    for step, total in enumerate(sums(private, data, 3), start=2):
        drawn = sampling.Poisson(0.2).draw(ROWS, step, private.key)
        assert float((total - by_hand(model, squares, rows()[drawn])).norm()) < 0.5


def _interrupted() -> Iterator[Tensor]:
    """Someone presses Ctrl-C while the rows are waited for."""
    raise KeyboardInterrupt
    yield


def test_workers_leave_the_masks_of_dropout_alone() -> None:
    """A run that goes on starts its workers anew, and a replay must drop what was dropped before."""
    masks = []
    for workers in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(), nn.Linear(3, 2))
        private = PrivateGradient(model, squares, plan(0.2), seed=SEED, workers=workers)
        masks.append(torch.stack([*sums(private, Some(rows()), 2)]))
    assert torch.equal(*masks)


def test_figures_of_other_steps_are_not_taken_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = Mechanism(
        sampling.FullBatch(), 600, 1.0, batch_size=1, noise=schedules.piecewise([256], [1.0, 4.0]), hold_noise=False
    )
    figures = Figures(mechanism, None)
    assert figures.stds(0) == [mechanism.std_at(0)]
    with monkeypatch.context() as patch:
        patch.setattr(Mechanism, "clips", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            figures.stds(256)
    assert figures.stds(300) == [mechanism.std_at(300)]
    assert figures.stds(3) == [mechanism.std_at(3)]


class Scale:
    """Settings, and a loss or a rule that reads its own."""

    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.by * squares(model, x)


class ScaleModule(Scale, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        Scale.__init__(self)


GLOBAL = Scale()


def helper() -> float:
    return GLOBAL.by


def _in_a_dictionary() -> tuple[Any, Callable[[], Any]]:
    settings = {"loss": {"by": 1.0}}
    return lambda model, x: settings["loss"]["by"] * squares(model, x), lambda: settings["loss"].update(by=2.0)


def _in_an_object() -> tuple[Any, Callable[[], Any]]:
    scale = Scale()
    return lambda model, x: scale.by * squares(model, x), lambda: setattr(scale, "by", 2.0)


def _in_a_helper() -> tuple[Any, Callable[[], Any]]:
    GLOBAL.by = 1.0
    return lambda model, x: helper() * squares(model, x), lambda: setattr(GLOBAL, "by", 2.0)


def _of_a_module() -> tuple[Any, Callable[[], Any]]:
    scale = ScaleModule()
    return scale, lambda: setattr(scale, "by", 2.0)


def _of_a_part() -> tuple[Any, Callable[[], Any]]:
    scale = Scale()
    return functools.partial(scale.__call__), lambda: setattr(scale, "by", 2.0)


@pytest.mark.parametrize("make", [_in_a_dictionary, _in_an_object, _in_a_helper, _of_a_module, _of_a_part])
def test_a_number_of_the_loss_that_changes_is_followed(form: dict[str, Any], make: Callable[[], Any]) -> None:
    loss, change = make()
    private = PrivateGradient(linear(), loss, plan(clip=1e4), seed=SEED, **form)
    *_, before = sums(private, rows(), 5)
    change()
    (after,) = sums(private, rows(), 1)
    assert abs(float(after.norm() / before.norm()) - 2) < 0.01


def test_a_number_of_the_rule_that_changes_is_followed(form: dict[str, Any]) -> None:
    class Rule:
        by = 0.5

        def __call__(self, norms: Tensor, clip: Any) -> Tensor:
            return self.by * clip / norms

    rule = Rule()
    private = PrivateGradient(linear(), squares, plan(), seed=SEED, rule=rule, **form)
    *_, before = sums(private, rows(), 5)
    rule.by = 1.0
    (after,) = sums(private, rows(), 1)
    assert abs(float(after.norm() / before.norm()) - 2) < 0.01


def test_a_rule_that_is_exchanged_is_followed(form: dict[str, Any]) -> None:
    private = PrivateGradient(linear(), squares, plan(), seed=SEED, rule=lambda norms, clip: 0.5 * clip / norms, **form)
    *_, before = sums(private, rows(), 5)
    private.rule = lambda norms, clip: clip / norms
    (after,) = sums(private, rows(), 1)
    assert abs(float(after.norm() / before.norm()) - 2) < 0.01


def test_parameters_that_are_exchanged_get_the_gradients(form: dict[str, Any]) -> None:
    model = linear()
    private = PrivateGradient(model, squares, plan(), seed=SEED, **form)
    private.step(rows())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    for found in sums(private, rows(), 1):
        assert float((found - by_hand(model, squares, rows())).norm()) < 0.5


@pytest.mark.parametrize("name", ["mechanism", "key", "model"])
def test_what_noise_and_charge_are_read_from_cannot_be_exchanged(name: str) -> None:
    """A step would be charged by one mechanism, and given the noise of another."""
    private, other = (PrivateGradient(linear(), squares, plan(), seed=SEED) for _ in range(2))
    with pytest.raises(AttributeError):
        setattr(private, name, getattr(other, name))


def test_a_body_that_is_only_tried_changes_no_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture calls the body before the first step, on buffers that hold no step yet."""
    on_cpu(monkeypatch)
    made = Graphed._made

    def tried(self: Graphed, form: Any) -> Any:
        self._bodies._from_start.zero_()
        self._bodies.accumulate(form, dry=True)
        return made(self, form)

    monkeypatch.setattr(Graphed, "_made", tried)
    private = PrivateGradient(linear(), squares, plan(), seed=SEED, average=0.5, capture=True)
    private.prepare(rows())
    averages = private.work.averages
    assert averages is not None
    assert not averages.updates.any()
    assert not any(bool(momentum[:-1].any()) for momentum in averages.momenta.values())


def test_places_without_an_example_have_no_average_to_miss(form: dict[str, Any]) -> None:
    """The last of several pieces has more places than examples; without steps of an optimizer averages stay."""
    model = linear()
    private = PrivateGradient(model, squares, plan(), seed=SEED, average=0.3, microbatch=70, **form)
    for found in sums(private, rows(), 3):
        assert float((found - by_hand(model, squares, rows())).norm()) < 0.5


def test_a_state_is_restored_into_what_was_prepared(form: dict[str, Any]) -> None:
    """Averages and sizes of pieces are those of the state, not those that `prepare` found."""
    found = []
    for prepared in (False, True):
        model = linear()
        private = PrivateGradient(model, squares, plan(), seed=SEED, average=0.3, microbatch=70, **form)
        for _ in range(3):
            private.step(rows())
        again = PrivateGradient(model, squares, plan(), seed=SEED, average=0.3, **form)
        if prepared:
            again.prepare(rows())
        again.restore(private.state())
        found.append(torch.stack([*sums(again, rows(), 2)]))
    assert torch.equal(*found)
