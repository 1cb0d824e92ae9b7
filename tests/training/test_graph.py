"""The captured step takes the same rows, noise and charge as the step it captures, and ends with the same weights.

Tests that need a CUDA device take no arguments, so that they can be called without pytest.
"""

import copy
import inspect
import itertools
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad.errors import CannotCaptureError
from dpgrad.grads import lanes, scaling
from dpgrad.grads.precision import exact_products, in_tf32
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import device_noise, noise
from dpgrad.training import graph
from dpgrad.training.graph import CapturedStep
from dpgrad.training.private import PrivateGradient

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROWS, STEPS = 400, 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 1, 8, 8, generator=random)
    return inputs.to(DEVICE), torch.randint(4, (count,), generator=random).to(DEVICE)


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(216, 4)
    ).to(DEVICE)


def mechanism(sampler: str = "poisson", **given: Any) -> Mechanism:
    samplers: dict[str, Callable[[], Any]] = {
        "poisson": lambda: sampling.Poisson(0.1),
        "full-batch": sampling.FullBatch,
        "fixed-size": lambda: sampling.FixedSize(ROWS, 150),
        "shuffle": lambda: sampling.Shuffle(ROWS, 130),
    }
    relation = "replace-one" if sampler in ("fixed-size", "shuffle") else "zero-out"
    size = {} if sampler in ("fixed-size", "shuffle") else {"batch_size": 40}
    return Mechanism(samplers[sampler](), steps=STEPS, noise_multiplier=0.5, relation=relation, **size, **given)


def sgd(model: nn.Module, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5, **given)


def capturable(kind: Callable[..., torch.optim.Optimizer], **given: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), lr=0.01, capturable=True, **given)


# Those that divide by a root do so by no less than eps, which keeps rounding from growing where the root is small.
CAPTURABLE: dict[str, Callable[[nn.Module], Any]] = {
    "Adam": capturable(torch.optim.Adam, eps=1e-2),
    "Adam, amsgrad": capturable(torch.optim.Adam, eps=1e-2, amsgrad=True),
    "AdamW": capturable(torch.optim.AdamW, eps=1e-2, weight_decay=0.1),
    "Adamax": capturable(torch.optim.Adamax, eps=1e-2),
    "NAdam": capturable(torch.optim.NAdam, eps=1e-2),
    "RAdam": capturable(torch.optim.RAdam, eps=1e-2),
    "RMSprop": capturable(torch.optim.RMSprop, eps=1e-2, momentum=0.5),
    "Adadelta": capturable(torch.optim.Adadelta, eps=1e-2),
}


def trained(
    captured: bool,
    plan: Mechanism,
    data: Any,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    dropout: float = 0.0,
    rule: Any = None,
    steps: int = STEPS,
    rate: Callable[[int], float] | None = None,
) -> tuple[nn.Module, PrivateGradient]:
    """The model after some steps, and what took them; a new learning rate at every step where ``rate`` says so."""
    model = network(dropout)
    private = PrivateGradient(model, loss, plan, seed=5, rule=rule)
    optimizer = make(model)
    one = CapturedStep(private, data, optimizer) if captured else None
    for step in range(steps):
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        if one is None:
            private.step(data)
            optimizer.step()
        else:
            one.step()
    if one is not None:
        one.settle()
    return model, private


def assert_equal(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert bool(a.isfinite().all()), name
        assert float((a - b).detach().norm() / b.detach().norm()) < tolerance, name


def assert_same_run(plan: Mechanism, data: Any = None, tolerance: float = 1e-5, **given: Any) -> None:
    data = rows() if data is None else data
    (found, private), (wanted, plain) = (trained(captured, plan, data, **given) for captured in (True, False))
    assert private.ledger == plain.ledger
    assert_equal(found, wanted, tolerance)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CapturedStep` without a device: all of it but the capture, a replay being the same body again."""

    def capture_all(self: CapturedStep) -> None:
        self._graphs = {size: SimpleNamespace(replay=partial(self._body, size)) for size in self.capacities}

    monkeypatch.setattr(graph, "refusal", lambda private, data: "")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(lanes, "opened", lambda streams: nullcontext())
    monkeypatch.setattr(CapturedStep, "_on_stream", lambda self: nullcontext())
    monkeypatch.setattr(CapturedStep, "_capture_all", capture_all)
    monkeypatch.setattr(noise, "_on_cpu", device_noise.gaussians)  # the noise of a device, in plain torch


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="stands for a CUDA device")
class TestOnTheCpu:
    def made(self, **given: Any) -> tuple[nn.Module, CapturedStep, torch.optim.Optimizer]:
        model = network()
        optimizer = given.pop("make", sgd)(model)
        plan = mechanism(**given)
        return model, CapturedStep(PrivateGradient(model, loss, plan, seed=5), rows(), optimizer), optimizer

    @pytest.mark.parametrize("sampler", ["poisson", "full-batch", "fixed-size", "shuffle"])
    def test_it_takes_the_steps_of_the_private_gradient(self, sampler: str) -> None:
        clip = schedules.piecewise([7], [1.0, 0.3])
        assert_same_run(mechanism(sampler, clip=clip), rate=lambda step: 0.1 / (1 + step))

    @pytest.mark.filterwarnings("ignore:rule gives")
    def test_an_own_rule_is_held_to_the_bound(self) -> None:
        assert_same_run(mechanism(), rule=excessive)
        held, wanted = (trained(True, mechanism(), rows(), rule=rule)[0] for rule in (excessive, lambda n, c: c / n))
        assert_equal(held, wanted)

    def test_gradients_that_someone_has_cleared(self) -> None:
        """As every training loop does: a step would be charged and nothing trained."""
        wanted = network()
        private = PrivateGradient(wanted, loss, mechanism(), seed=5)
        other = sgd(wanted)
        model, one, optimizer = self.made()
        for _ in range(5):
            optimizer.zero_grad()
            one.step()
            private.step(rows())
            other.step()
        assert_equal(model, wanted)

    def test_a_frozen_parameter_with_an_old_gradient_stays(self) -> None:
        model = network()
        loss(model, rows(9)).sum().backward()
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        one = CapturedStep(PrivateGradient(model, loss, mechanism(), seed=5), rows(), sgd(model))
        for _ in range(3):
            one.step()
        assert torch.equal(model[0].weight, before)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda model, optimizer: model.eval(), r"the model \(its mode"),
            (lambda model, optimizer: model[0].requires_grad_(False), r"the model \(.* what is trained\)"),
            (lambda model, optimizer: setattr(model[0].weight, "data", model[0].weight.clone()), "a tensor of data"),
            (lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.9), "a setting of the optimizer"),
            (
                lambda model, optimizer: optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
                "a setting of the optimizer",
            ),
        ],
    )
    def test_what_a_graph_would_not_notice_is_refused(self, change: Callable[..., Any], message: str) -> None:
        model, one, optimizer = self.made()
        one.step()
        one._optimizes = True  # as if it had been captured with the state that it has now
        one._captured = one._conditions()
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        one.step()
        change(model, optimizer)
        with pytest.raises(ValueError, match=f"^{message}.* changed since the step was captured: put it back, or"):
            one.step()
        assert one._private.steps_taken == 2

    def test_precision_and_autocast_are_those_of_the_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, one, _ = self.made()
        with in_tf32(), pytest.raises(ValueError, match=r"^the precision of products changed since"):
            one.step()
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        with pytest.raises(ValueError, match=r"^autocast changed since"):
            one.step()

    def test_rows_that_are_never_finite_do_not_repeat_the_steps_after_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every step is stopped: each is replayed once more at most."""
        model = network()
        data = rows()
        data[0][3] = math.nan
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one = CapturedStep(PrivateGradient(model, loss, mechanism("full-batch"), seed=5), data, optimizer)
        one._optimizes = True
        one._captured = one._conditions()
        launched: list[int] = []
        launch = CapturedStep._launch
        monkeypatch.setattr(
            CapturedStep, "_launch", lambda self, step, rates: (launched.append(step), launch(self, step, rates))
        )
        for _ in range(20):
            one.step()
        one.settle()
        assert len(launched) == 2 * 20 - 1
        wanted = network()
        private = PrivateGradient(wanted, loss, mechanism("full-batch"), seed=5)
        other = torch.optim.SGD(wanted.parameters(), lr=0.1)
        for _ in range(20):
            private.step(data)
            other.step()
        assert_equal(model, wanted)

    def test_an_interrupted_replay_does_not_shift_the_steps_after_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, one, _ = self.made()
        taken: list[int] = []
        body = CapturedStep._body

        def interrupted(self: CapturedStep, size: int) -> None:
            if len(taken) == 2 and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt
            taken.append(int(self._slot))
            body(self, size)

        stopped: list[bool] = []
        monkeypatch.setattr(CapturedStep, "_body", interrupted)
        one._graphs = {size: SimpleNamespace(replay=partial(one._body, size)) for size in one.capacities}
        for _ in range(2):
            one.step()
        with pytest.raises(KeyboardInterrupt):
            one.step()
        one.step()
        assert taken == [0, 1, 3]

    def test_the_same_precision_by_another_name_is_no_change(self) -> None:
        _, one, _ = self.made()
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("highest")
            one.step()
        finally:
            torch.set_float32_matmul_precision(before)

    def test_a_step_too_many(self) -> None:
        _, one, _ = self.made()
        for _ in range(STEPS):
            one.step()
        with pytest.raises(ValueError, match=f"all {STEPS} steps of the mechanism are taken"):
            one.step()


class TestRefusals:
    def test_cpu(self) -> None:
        model = nn.Linear(1, 1)
        private = PrivateGradient(model, loss, mechanism())
        with pytest.raises(CannotCaptureError, match="the model is on cpu: a step is captured on a CUDA device"):
            CapturedStep(private, torch.zeros(3, 1), sgd(model))

    def test_sizes_of_a_poisson_batch(self) -> None:
        plan = Mechanism(sampling.Poisson(512 / 60_000), 10, 1.0, batch_size=512)
        sizes = graph._sizes(plan, 60_000)
        assert sizes == sorted(sizes)
        assert 512 <= sizes[0] < 520
        assert sizes[-1] >= 512 + 6 * math.sqrt(512 * (1 - 512 / 60_000))


class TestOptimizers:
    """Which are captured, and how those that cannot skip a step are taken back."""

    PLAIN: ClassVar[dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
        "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
        "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, centered=True),
    }

    @pytest.mark.parametrize(
        ("kind", "given", "captured"),
        [
            ("Adam", {"capturable": True}, True),
            ("NAdam", {"capturable": True}, True),
            ("Adam", {}, False),
            ("SGD", {}, False),
            ("ASGD", {"capturable": True}, False),  # what its state begins with depends on the learning rate
        ],
    )
    def test_which_are_captured(self, kind: str, given: dict[str, bool], captured: bool) -> None:
        optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(2))], lr=0.1, **given)
        assert graph._is_capturable(optimizer) is captured
        assert not graph._is_fused(optimizer)

    def test_a_state_that_is_there_does_not_decide(self) -> None:
        """A run that is resumed has one, and must be captured as it was when it had none."""
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.ASGD([parameter], lr=0.1, capturable=True)
        optimizer.state[parameter]["step"] = torch.ones(())
        assert not graph._is_capturable(optimizer)

    @pytest.mark.parametrize("kind", graph._BEGINS, ids=lambda kind: kind.__name__)
    def test_what_a_state_begins_with(self, kind: Any) -> None:
        """As torch makes it."""
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.ones(2)
        optimizer = kind([parameter], lr=0.1, **({"momentum": 0.5} if kind is torch.optim.SGD else {}))
        lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(lists)))
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                assert bool((value == graph._BEGINS[kind].get(key, 0.0)).all()), key

    @pytest.mark.parametrize("kind", PLAIN)
    def test_a_step_is_taken_or_leaves_no_trace(self, kind: str) -> None:
        torch.manual_seed(0)
        one, other = ([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(()))] for _ in range(2))
        guarded, plain = self.PLAIN[kind](one), self.PLAIN[kind](other)
        frozen = nn.Parameter(torch.ones(1))
        guarded.add_param_group({"params": [frozen]})
        for step in range(4):
            for a, b in zip(one, other, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            if step == 2:
                kept = [parameter.grad for parameter in one]
                for parameter in one:
                    parameter.grad = torch.full_like(parameter, math.nan)
                graph._step_unless(torch.ones(()), guarded)
                for parameter, grad in zip(one, kept, strict=True):
                    parameter.grad = grad
            graph._step_unless(torch.zeros(()), guarded)
            plain.step()
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
            assert guarded.state[a].keys() == plain.state[b].keys()
            for key, value in plain.state[b].items():
                assert torch.equal(torch.as_tensor(guarded.state[a][key]), torch.as_tensor(value)), key
        assert torch.equal(frozen, torch.ones(1))


@on_cuda
def test_cuda_every_sampler_and_optimizer() -> None:
    for sampler in ("poisson", "full-batch", "fixed-size", "shuffle"):
        for fused in (True, False):
            assert_same_run(mechanism(sampler), make=lambda model, fused=fused: sgd(model, fused=fused))


@on_cuda
def test_cuda_schedules_and_learning_rates() -> None:
    clip = schedules.linear(1.0, STEPS)
    for hold, fused in itertools.product((True, False), (True, False)):
        plan = mechanism(clip=clip, hold_noise=hold, noise=schedules.geometric(1.0, 0.99, 0.5))
        assert_same_run(
            plan, make=lambda model, fused=fused: sgd(model, fused=fused), rate=lambda step: 0.1 + 0.01 * step
        )


@on_cuda
def test_cuda_groups_and_rules() -> None:
    groups = (Group("0.*", clip=0.5, noise_multiplier=2.0), Group("[!0].*"))
    assert_same_run(mechanism(groups=groups), make=lambda model: sgd(model, fused=True))
    for rule in (scaling.Automatic(0.01), scaling.Psac(0.01), scaling.Psasc(0.5, 0.01)):
        assert_same_run(mechanism(), make=lambda model: sgd(model, fused=True), rule=rule)


def excessive(norms: Tensor, clip: Any) -> Tensor:
    """A rule of the user's own, which the engine has to correct."""
    return 10 * clip / norms.mul_(0.5).clamp_min(1e-6)


@on_cuda
@pytest.mark.filterwarnings("ignore:rule gives")
@pytest.mark.parametrize("groups", [(), (Group("0.*", clip=0.5), Group("[!0].*"))], ids=["one", "two"])
def test_cuda_own_rules_are_held_in_a_graph_too(groups: Any) -> None:
    assert_same_run(mechanism(groups=groups), make=lambda model: sgd(model, fused=True), rule=excessive)
    plain = trained(True, mechanism(groups=groups), rows(), rule=lambda norms, clip: clip / norms)[0]
    held = trained(True, mechanism(groups=groups), rows(), rule=excessive)[0]
    assert_equal(held, plain)


@on_cuda
def test_cuda_adam() -> None:
    def adam(model: nn.Module, **given: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, **given)

    # Adam divides by the root of a mean square that rounding moves where it is small.
    assert_same_run(mechanism(), make=lambda model: adam(model, fused=True, capturable=True), tolerance=1e-4)
    assert_same_run(mechanism(), make=adam, tolerance=1e-4)


def assert_same_optimizer_run(name: str, data: Any = None) -> None:
    """The weights and what the optimizer remembers, with a new learning rate at every step.

    Without TF32, which torch allows in convolutions: a value on the border between two of its numbers falls to either
    side, and RMSprop's first steps are ten learning rates long.
    """
    made: list[torch.optim.Optimizer] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(CAPTURABLE[name](model))
        return made[-1]

    with exact_products():
        assert_same_run(mechanism(), data, make=make, rate=lambda step: 0.01 + 0.001 * step)
    for found, wanted in zip(*(optimizer.state.values() for optimizer in made), strict=True):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert float((found[key] - value).norm()) <= 1e-5 * float(value.norm()), (name, key)


@on_cuda
def test_cuda_capturable_optimizers_are_part_of_the_graph() -> None:
    for name, make in CAPTURABLE.items():
        model = network()
        optimizer = make(model)
        assert CapturedStep(PrivateGradient(model, loss, mechanism(), seed=5), rows(), optimizer)._optimizes, name
        assert_same_optimizer_run(name)


@on_cuda
def test_cuda_capturable_optimizers_are_left_alone_by_a_stopped_step() -> None:
    data = rows()
    for row in (0, 17, 230):
        data[0][row, 0, 2, 2] = math.nan
    for name in CAPTURABLE:
        assert_same_optimizer_run(name, data)


@on_cuda
def test_cuda_a_capturable_optimizer_that_waits_steps_after_the_replay() -> None:
    """One tensor at a time, torch reads the learning rate from the device."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-2, foreach=False, capturable=True)

    model = network()
    optimizer = make(model)
    assert not CapturedStep(PrivateGradient(model, loss, mechanism(), seed=5), rows(), optimizer)._optimizes
    assert_same_run(mechanism(), make=make)


@on_cuda
def test_cuda_an_optimizer_goes_on_from_the_state_it_has() -> None:
    def begun(model: nn.Module, kind: str) -> torch.optim.Optimizer:
        optimizer = CAPTURABLE[kind](model) if kind in CAPTURABLE else sgd(model, fused=True)
        random = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random).to(DEVICE) / 100
        optimizer.step()
        return optimizer

    for kind in ("Adam", "NAdam", "fused SGD"):
        assert_same_run(mechanism(), make=lambda model, kind=kind: begun(model, kind))


@on_cuda
def test_cuda_dropout_draws_its_own_masks_at_every_step() -> None:
    """The masks of a padded batch are others than those of the batch alone: the law is compared, not the values."""
    model, _ = trained(True, mechanism(), rows(), dropout=0.5, make=lambda model: sgd(model, fused=True))
    again, _ = trained(True, mechanism(), rows(), dropout=0.5, make=lambda model: sgd(model, fused=True))
    without, _ = trained(True, mechanism(), rows(), make=lambda model: sgd(model, fused=True))
    assert_equal(model, again, 1e-6)
    assert any(float((a - b).norm()) > 1e-3 for a, b in zip(model.parameters(), without.parameters(), strict=True))


@on_cuda
def test_cuda_examples_that_are_not_finite_are_left_out() -> None:
    """Drawn at some steps and not at others, also the first row, which padding would repeat."""
    for value in (math.nan, math.inf):
        data = rows()
        for row in (0, 17, 230):
            data[0][row, 0, 2, 2] = value
        for fused in (True, False):
            assert_same_run(mechanism(), data, make=lambda model, fused=fused: sgd(model, fused=fused))


@on_cuda
def test_cuda_more_rows_than_places() -> None:
    before = graph._DEVIATIONS
    graph._DEVIATIONS = (-1.0, 0.0)
    try:
        for fused in (True, False):
            assert_same_run(mechanism(), make=lambda model, fused=fused: sgd(model, fused=fused))
    finally:
        graph._DEVIATIONS = before


@on_cuda
def test_cuda_few_steps_ahead_at_a_time() -> None:
    before = graph._AHEAD
    graph._AHEAD = 3 * ROWS
    try:
        assert_same_run(mechanism(), make=lambda model: sgd(model, fused=True))
    finally:
        graph._AHEAD = before


@on_cuda
def test_cuda_empty_batches() -> None:
    plan = Mechanism(sampling.Poisson(0.002), STEPS, 0.5, batch_size=1, relation="zero-out")
    assert_same_run(plan, make=lambda model: sgd(model, fused=True))


@on_cuda
def test_cuda_capture_leaves_everything_as_it_was() -> None:
    model, data = network(), rows()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    private = PrivateGradient(model, loss, mechanism(), seed=5)
    optimizer = sgd(model, fused=True)
    CapturedStep(private, data, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert private.steps_taken == 0
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters())


@on_cuda
def test_cuda_refusals() -> None:
    model = network()
    for given, reason in (
        ({"microbatch": 5}, "pieces of microbatch"),
        ({"observe": print}, "observe is not captured"),
    ):
        private = PrivateGradient(model, loss, mechanism(), **given)
        assert reason in graph.refusal(private, rows())
    private = PrivateGradient(model, loss, mechanism())
    assert "not on cuda" in graph.refusal(private, tuple(leaf.cpu() for leaf in rows()))


@on_cuda
def test_cuda_a_model_that_waits_for_the_device_is_refused_with_the_reason() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x.flatten(1) * (1.0 if float(x.sum()) > -math.inf else 0.5))
            return out

    model = Waits().to(DEVICE)
    before = copy.deepcopy(model.state_dict())
    for fused in (True, False):
        private = PrivateGradient(model, loss, mechanism(), seed=5)
        optimizer = sgd(model, fused=fused)
        with pytest.raises(CannotCaptureError, match="reads values of the batch in Python"):
            CapturedStep(private, rows(), optimizer)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert not optimizer.state
        assert all(parameter.grad is None for parameter in model.parameters())
    private.step(rows())  # without a graph it can still be taken


@on_cuda
def test_cuda_a_stopped_step_shows_no_gradient() -> None:
    """Its noise will be on another sum once the step is taken again: seen on both, it would cancel."""
    data = rows()
    data[0][50:, 0, 2, 2] = math.nan  # not the first, on which the engine is checked
    model = network()
    one = CapturedStep(PrivateGradient(model, loss, mechanism(), seed=5), data, sgd(model, fused=True))
    for _ in range(3):
        one.step()
        assert all(bool(parameter.grad.isnan().all()) for parameter in model.parameters())
    one.settle()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


@on_cuda
def test_cuda_random_numbers_of_the_host_are_refused() -> None:
    """A graph would repeat for ever what was drawn at its capture."""
    for draw in (lambda: torch.rand(()), random.random, np.random.rand):

        def noisy(model: nn.Module, batch: Any, draw: Callable[[], Any] = draw) -> Tensor:
            return loss(model, batch) + 0.0 * float(draw())

        model = network()
        with pytest.raises(CannotCaptureError, match="draws random numbers on the host, which a graph would repeat"):
            CapturedStep(PrivateGradient(model, noisy, mechanism(), seed=5), rows(), sgd(model))
