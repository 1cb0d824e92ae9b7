"""The replayed step takes the same rows, noise and charge as the called one, and ends with the same weights.

On a CPU a replay is the same body called again on the same buffers: all of it but the capture. Tests that need a CUDA
device begin with ``test_cuda``.
"""

import copy
import gc
import math
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from dpgrad.errors import CannotCaptureError
from dpgrad.grads import scaling
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.precision import exact_products
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness.draw import chosen
from dpgrad.training.augment import Shifts
from dpgrad.training.private import Observed, PrivateGradient
from dpgrad.training.step import lots, sizes
from dpgrad.training.step.bodies import Bodies
from dpgrad.training.step.graphed import Graphed
from dpgrad.training.step.sizes import CALLED, Sizes
from replayed import on_cpu, warmed_on_cpu

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROWS, STEPS, TAKEN = 400, 30, 12  # examples, steps of a plan, and those that are taken of it
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, a replay is the body called again."""
    if not torch.cuda.is_available():
        on_cpu(monkeypatch)


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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def trained(
    capture: bool,
    plan: Mechanism,
    data: Any = None,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    model: nn.Module | None = None,
    steps: int = TAKEN,
    rate: Callable[[int], float] | None = None,
    **given: Any,
) -> tuple[nn.Module, PrivateGradient]:
    """The model after some steps, and what took them; a new learning rate at every step where ``rate`` says so."""
    model = network() if model is None else copy.deepcopy(model)
    private = PrivateGradient(model, given.pop("loss", loss), plan, seed=5, capture=capture, **given)
    optimizer = make(model)
    data = rows() if data is None else data
    for step in range(steps):
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        private.step(data)
        optimizer.step()
    return model, private


def assert_equal(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert bool(a.isfinite().all()), name
        assert float((a - b).detach().norm() / b.detach().norm()) < tolerance, name


def assert_same_run(plan: Mechanism, data: Any = None, tolerance: float = 1e-5, **given: Any) -> None:
    (found, private), (wanted, plain) = (trained(capture, plan, data, **given) for capture in (True, False))
    assert private.form == Graphed.form
    assert plain.form != Graphed.form
    assert private.ledger == plain.ledger
    assert_equal(found, wanted, tolerance)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """The rows, one by one, from the host."""

    def __init__(self) -> None:
        self.inputs, self.targets = (leaf.cpu() for leaf in rows())

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def excessive(norms: Tensor, clip: Any) -> Tensor:
    """A rule of the user's own, which the engine has to correct."""
    return 10 * clip / norms.mul_(0.5).clamp_min(1e-6)


GROUPS = (Group("0.*", clip=0.5, noise_multiplier=2.0), Group("[!0].*"))


class TestSameRun:
    @pytest.mark.parametrize("sampler", ["poisson", "full-batch", "fixed-size", "shuffle"])
    def test_every_sampler(self, sampler: str) -> None:
        clip = schedules.piecewise([7], [1.0, 0.3])
        assert_same_run(mechanism(sampler, clip=clip), rate=lambda step: 0.1 / (1 + step))

    @pytest.mark.parametrize("hold", [True, False])
    def test_schedules(self, hold: bool) -> None:
        plan = mechanism(clip=schedules.linear(1.0, STEPS), hold_noise=hold, noise=schedules.geometric(1.0, 0.99, 0.5))
        assert_same_run(plan, rate=lambda step: 0.1 + 0.01 * step)

    def test_groups(self) -> None:
        assert_same_run(mechanism(groups=GROUPS))

    @pytest.mark.parametrize("rule", [scaling.Automatic(0.01), scaling.Psac(0.01), scaling.Psasc(0.5, 0.01)])
    def test_rules(self, rule: Any) -> None:
        assert_same_run(mechanism(), rule=rule)

    @pytest.mark.filterwarnings("ignore:rule gives")
    @pytest.mark.parametrize("groups", [(), GROUPS], ids=["one", "two"])
    def test_an_own_rule_is_held_to_the_bound(self, groups: Any) -> None:
        assert_same_run(mechanism(groups=groups), rule=excessive)
        held, wanted = (trained(True, mechanism(), rule=rule)[0] for rule in (excessive, lambda n, c: c / n))
        assert_equal(held, wanted)

    @pytest.mark.parametrize("sampler", ["poisson", "full-batch", "shuffle"])
    @pytest.mark.parametrize("microbatch", [1, 7, 16, 39])
    def test_microbatches(self, sampler: str, microbatch: int) -> None:
        if sampler != "poisson" and microbatch < 16:
            pytest.skip("the same path as the others, in many pieces")
        assert_same_run(mechanism(sampler), microbatch=microbatch, steps=6)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a device captures")
    @pytest.mark.parametrize("given", [{}, {"adaptive_clip": AdaptiveClip()}], ids=["fixed", "adaptive"])
    def test_bodies_that_are_warmed_up_add_nothing(self, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is first needed within a step is called before its capture: its rows must not count twice."""
        warmed_on_cpu(monkeypatch)
        monkeypatch.setattr(Graphed, "_capture_ahead", lambda self, step: None)
        assert_same_run(mechanism(**given), microbatch=16)

    def test_memory_limit(self) -> None:
        assert_same_run(mechanism("full-batch"), memory_limit=300_000, steps=5)

    @pytest.mark.parametrize("inner", ["current", "past"])
    @pytest.mark.parametrize("length", [0, 2])
    def test_inner_momentum(self, inner: Any, length: int) -> None:
        assert_same_run(mechanism(), inner_momentum=InnerMomentum(0.7, length, inner))

    def test_averages(self) -> None:
        assert_same_run(mechanism("full-batch"), average=0.3, steps=8)
        assert_same_run(mechanism("full-batch"), average=0.3, microbatch=150, steps=8)

    @pytest.mark.parametrize("microbatch", [None, 16])
    def test_augmentation(self, microbatch: int | None) -> None:
        assert_same_run(mechanism(), augment=Shifts(3), microbatch=microbatch, steps=8)
        assert_same_run(
            mechanism(), augment=lambda batch, random: shaken(batch, random), microbatch=microbatch, steps=4
        )

    def test_several_rows(self) -> None:
        inputs, targets = rows()
        data = inputs.view(ROWS // 4, 4, 1, 8, 8), targets.view(ROWS // 4, 4)
        assert_same_run(mechanism(), data, several_rows=True)
        assert_same_run(mechanism("full-batch"), data, several_rows=True, average=0.3, steps=4)

    @pytest.mark.parametrize("microbatch", [None, 16])
    def test_data_on_the_host(self, microbatch: int | None, tmp_path: Any) -> None:
        inputs, targets = (leaf.cpu().numpy() for leaf in rows())
        mapped = np.memmap(tmp_path / "rows", dtype=inputs.dtype, mode="w+", shape=inputs.shape)
        mapped[:] = inputs
        wanted, _ = trained(True, mechanism(), rows(), microbatch=microbatch)
        for data in ((torch.from_numpy(inputs), torch.from_numpy(targets)), (mapped, targets), Pairs()):
            found, private = trained(True, mechanism(), data, microbatch=microbatch)
            assert private.form == Graphed.form
            assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))

    def test_a_dataset_with_workers(self) -> None:
        wanted, _ = trained(True, mechanism(), rows(), microbatch=30, steps=6)
        found, _ = trained(True, mechanism(), Pairs(), microbatch=30, steps=6, workers=2)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))

    def test_workers_end_with_the_run(self) -> None:
        """No cycle holds them: in one, torch waits five seconds for each."""
        model, private = trained(True, mechanism(), Pairs(), microbatch=30, steps=1, workers=1)
        reading = weakref.ref(private._running._feed._loaded)
        assert reading() is not None
        gc.disable()
        try:
            del model, private
            assert reading() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_examples_that_are_not_finite_are_left_out(self, value: float) -> None:
        """Drawn at some steps and not at others, also the first row, which padding would repeat."""
        data = rows()
        for row in (0, 17, 230):
            data[0][row, 0, 2, 2] = value
        assert_same_run(mechanism(), data)
        assert_same_run(mechanism(groups=GROUPS), data, microbatch=16)

    def test_empty_batches(self) -> None:
        plan = Mechanism(sampling.Poisson(0.002), STEPS, 0.5, batch_size=1, relation="zero-out")
        assert_same_run(plan)
        assert_same_run(plan, Pairs())

    def test_mixed_types_of_parameters(self) -> None:
        model = network()
        model[5].to(torch.bfloat16)
        model.insert(5, Halved())
        model.append(Whole())
        assert_same_run(mechanism(), model=model, tolerance=2e-2)

    def test_few_steps_ahead_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lots, "_AT_ONCE", 3 * ROWS)
        assert_same_run(mechanism())

    def test_a_batch_beyond_what_is_drawn_ahead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sizes, "_RARELY", -1.0)
        assert_same_run(mechanism())
        assert_same_run(mechanism(), Pairs())

    def test_lots_are_those_of_their_steps_however_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A lot beyond the places that are drawn ahead is drawn by itself: no place is taken for another row."""
        monkeypatch.setattr(sizes, "_RARELY", 0.0)
        plan, key, device = mechanism(), Key.from_seed(5), torch.device(DEVICE)
        ahead = lots.Lots(plan, ROWS, key, device, beyond=0)
        for step in range(STEPS):
            lot, wanted = ahead.at(step), chosen(plan.sampler, ROWS, step, key, device)
            assert torch.equal(lot.indices[: lot.count], wanted)

    def test_observed(self) -> None:
        for given in ({}, {"microbatch": 16}, {"inner_momentum": InnerMomentum(0.5, 1)}):
            seen: dict[bool, list[Observed]] = {True: [], False: []}
            with exact_products():
                for capture, found in seen.items():
                    trained(capture, mechanism(), observe=found.append, steps=4, **given)
            for one, other in zip(seen[True], seen[False], strict=True):
                torch.testing.assert_close(one.norms, other.norms, rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(one.factors, other.factors, rtol=1e-3, atol=1e-4)
                for name in one.raw:
                    torch.testing.assert_close(
                        one.raw[name], other.raw[name].to(one.raw[name].dtype), rtol=1e-3, atol=1e-4
                    )
                    a, b = one.clipped_sum[name], other.clipped_sum[name]
                    torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-4)

    def test_a_run_goes_on_from_its_state(self) -> None:
        for given in ({"inner_momentum": InnerMomentum(0.5, 2)}, {}):
            model, private = trained(True, mechanism(), steps=9, **given)
            state = copy.deepcopy(private.state())
            again = copy.deepcopy(model)
            other = PrivateGradient(again, loss, mechanism(), seed=5, capture=True, **given)
            other.restore(state)
            for one in (private, other):
                one.step(rows())
            for a, b in zip(model.parameters(), again.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def shaken(batch: Any, random: torch.Generator) -> Any:
    images, labels = batch
    noise = torch.randn((1, 2, *images.shape[1:]), generator=random, device=images.device)
    return images[:, None] + 0.1 * noise, labels[:, None].expand(-1, 2)


class Weighted:
    """A loss with a number of its own."""

    factor = 1.0

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.factor * loss(model, batch)


class TestChanges:
    """What a graph keeps from its capture is looked at."""

    def test_gradients_that_someone_has_cleared(self) -> None:
        """As every training loop does: a step would be charged and nothing trained."""
        model = network()
        private = PrivateGradient(model, loss, mechanism(), seed=5, capture=True)
        for _ in range(3):
            model.zero_grad()
            private.step(rows())
            assert all(bool(parameter.grad.any()) for parameter in model.parameters())

    def test_a_frozen_parameter_with_an_old_gradient_stays(self) -> None:
        model = network()
        loss(model, rows(9)).sum().backward()
        model[0].requires_grad_(False)
        private = PrivateGradient(model, loss, mechanism(), seed=5, capture=True)
        private.step(rows())
        assert model[0].weight.grad is None

    @pytest.mark.parametrize("change", ["mode", "frozen", "memory", "loss", "rule", "module"])
    def test_the_step_follows(self, change: str) -> None:
        """A change between two steps has the effect that it has without a graph."""
        found = []
        for capture in (True, False):
            weighted = Weighted()
            model = network(0.5)
            model[4].eval()
            private = PrivateGradient(model, weighted, mechanism(), seed=5, capture=capture)
            for step in range(4):
                if step == 2:
                    if change == "mode":
                        model.eval()
                    elif change == "frozen":
                        model[0].requires_grad_(False)
                    elif change == "memory":
                        with torch.no_grad():
                            model[0].weight.data = 2 * model[0].weight.data.clone()
                    elif change == "loss":
                        weighted.factor = 0.01
                    elif change == "rule":
                        private.rule = scaling.Automatic(0.01)
                    elif change == "module":
                        model[2] = nn.ReLU()
                private.step(rows())
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert float((a - b).norm()) <= 1e-4 * float(b.norm())

    def test_a_number_that_changes_at_every_step_is_followed_without_graphs(self) -> None:
        found = []
        for capture in (True, False):
            model, weighted = network(), Weighted()
            private = PrivateGradient(model, weighted, mechanism(), seed=5, capture=capture)
            with pytest.warns(UserWarning, match="no longer captured") if capture else nullcontext():
                for _ in range(15):
                    weighted.factor *= 0.7
                    private.step(rows())
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        for a, b in zip(*found, strict=True):
            assert float((a - b).norm()) <= 1e-4 * float(b.norm())

    def test_a_step_too_many(self) -> None:
        _, private = trained(True, mechanism(), steps=STEPS)
        with pytest.raises(ValueError, match=f"all {STEPS} steps of the mechanism are taken"):
            private.step(rows())


class TestFaults:
    """Faults of a replay are seen without a device: each is made, and the runs must differ."""

    @pytest.fixture
    def differs(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
        """Whether a run with a fault ends elsewhere than without."""

        def compared(place: type, name: str, fault: Any, **given: Any) -> bool:
            plan = Mechanism(sampling.Poisson(0.4), STEPS, 0.5, batch_size=160, relation="zero-out")  # some padding
            wanted, _ = trained(False, plan, steps=5, **given)
            sound, _ = trained(True, plan, steps=5, **given)
            assert_equal(sound, wanted)
            monkeypatch.setattr(place, name, fault)
            found, _ = trained(True, plan, steps=5, **given)
            pairs = zip(found.parameters(), wanted.parameters(), strict=True)
            return any(float((a - b).detach().norm()) > 1e-4 * float(b.detach().norm()) for a, b in pairs)

        return compared

    def test_stale_rows(self, differs: Any) -> None:
        fill, calls = Graphed._fill, []

        def stale(self: Graphed, *args: Any) -> None:
            calls.append(args)
            if len(calls) != 3:
                fill(self, *args)

        assert differs(Graphed, "_fill", stale)

    def test_sums_that_are_not_begun_anew(self, differs: Any) -> None:
        accumulate = Bodies.accumulate

        def going_on(self: Bodies, form: Any, dry: bool = False) -> None:
            begun = form.first and (form.last or not self._carried)  # the first of the run has to make room
            accumulate(self, form._replace(first=begun), dry)

        assert differs(Bodies, "accumulate", going_on, microbatch=16)

    def test_a_piece_that_is_repeated(self, differs: Any) -> None:
        replay = Graphed._replay

        def twice(self: Graphed, form: Any) -> None:
            replay(self, form)
            if not form.last and not form.first:
                replay(self, form)

        assert differs(Graphed, "_replay", twice, microbatch=10)

    def test_a_step_with_the_noise_of_another(self, differs: Any) -> None:
        at = Bodies.at
        assert differs(Bodies, "at", lambda self, step: at(self, max(0, step - 1)))

    def test_rows_beyond_the_end_that_count(self, differs: Any) -> None:
        hold = Bodies.hold
        assert differs(Bodies, "hold", lambda self, count: hold(self, count + 1))


class TestSizes:
    @pytest.mark.parametrize("steps", [10, 1000, 10**6])
    def test_a_full_piece_is_little_more_than_the_expected_batch(self, steps: int) -> None:
        for batch in (1, 16, 64, 512, 60_000):
            plan = Mechanism(sampling.Poisson(1 / 20), steps, 1.0, batch_size=batch)
            found = Sizes.of(plan, 20 * batch)
            assert batch <= found.most <= batch + max(0.1 * batch + 8, batch**0.5)
            assert 1 <= found.fine <= max(1, batch**0.5)
            assert found.fine & (found.fine - 1) == 0 or found.fine == found.most
            assert Sizes.of(plan, 20 * batch, microbatch=10).most == min(10, found.most)

    def test_called_bodies_leave_few_places_empty(self) -> None:
        for batch in (1, 4, 16, 64, 512, 60_000):
            plan = Mechanism(sampling.Poisson(1 / 20), 1000, 1.0, batch_size=batch)
            found = Sizes.of(plan, 20 * batch, grain=CALLED)
            assert batch <= found.most <= batch + max(0.1 * batch + 8, 2 * batch**0.5)
            assert 1 <= found.fine <= max(1, batch / 16)
            assert Sizes.of(plan, 20 * batch, microbatch=10, grain=CALLED).fine <= found.fine

    def test_no_number_of_rows_decides(self) -> None:
        """A row more would otherwise make every step round differently."""
        plan = Mechanism(sampling.Poisson(1 / 20), 1000, 1.0, batch_size=64)
        assert len({Sizes.of(plan, rows) for rows in range(1200, 1400)}) == 1

    @pytest.mark.parametrize(("most", "fine"), [(1, 1), (2, 1), (7, 1), (16, 2), (33, 5), (550, 16)])
    def test_pieces_hold_every_example_once_and_little_else(self, most: int, fine: int) -> None:
        for count in range(4 * most + 3):
            found = Sizes(most, fine).pieces(count)
            assert sum(found[:-1]) < max(count, 1) <= sum(found)
            assert sum(found) - count <= fine
            assert max(found) <= most


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a device")
def test_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    private = PrivateGradient(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), loss, mechanism(), capture=True)
    with pytest.raises(CannotCaptureError, match="the model is on cpu: a step is captured on a CUDA device"):
        private.prepare(rows())
    assert private.steps_taken == 0


@on_cuda
def test_cuda_every_optimizer() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop):
        # Those that divide by a root do so by no less than eps, which keeps rounding from growing where it is small.
        more = {} if kind is torch.optim.SGD else {"eps": 1e-2}
        assert_same_run(mechanism(), make=lambda model, kind=kind, more=more: kind(model.parameters(), lr=0.01, **more))


@on_cuda
def test_cuda_dropout_draws_its_own_masks_at_every_step_and_piece() -> None:
    """The masks of a padded batch are others than those of the batch alone: the law is compared, not the values."""
    for microbatch in (None, 16):
        model, again = (trained(True, mechanism(), model=network(0.5), microbatch=microbatch)[0] for _ in range(2))
        without, _ = trained(True, mechanism(), microbatch=microbatch)
        assert_equal(model, again, 1e-6)
        assert any(float((a - b).norm()) > 1e-3 for a, b in zip(model.parameters(), without.parameters(), strict=True))


@on_cuda
def test_cuda_capture_leaves_everything_as_it_was() -> None:
    model, data = network(0.5), rows()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    private = PrivateGradient(model, loss, mechanism(), seed=5)
    private.prepare(data)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert private.steps_taken == 0
    assert private.form == Graphed.form
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


@on_cuda
def test_cuda_nothing_waits_in_a_steady_step() -> None:
    for given in ({}, {"microbatch": 16}, {"inner_momentum": InnerMomentum(0.5, 1)}):
        model = network()
        data = rows()
        data[0][3] = math.nan
        plan = Mechanism(sampling.Poisson(0.1), 200, 0.5, relation="zero-out", batch_size=40)
        private = PrivateGradient(model, loss, plan, seed=5, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(150):  # until every size was met
            private.step(data)
            optimizer.step()
        private._again.due = lambda: False  # comparisons wait
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        waited = []
        try:
            for _ in range(20):
                try:
                    private.step(data)
                except RuntimeError as error:
                    waited.append(error)
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert len(waited) <= 2, waited  # a size that was not met before


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
    private = PrivateGradient(model, loss, mechanism(), seed=5, capture=True)
    with pytest.raises(CannotCaptureError, match="reads values of the batch in Python"):
        private.step(rows())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    private = PrivateGradient(model, loss, mechanism(), seed=5)
    with pytest.warns(UserWarning, match="is not captured as a CUDA graph: the model reads values"):
        private.step(rows())  # without a graph it can still be taken
    assert "reads values" in private.not_captured


@on_cuda
def test_cuda_random_numbers_of_the_host_are_refused() -> None:
    """A graph would repeat for ever what was drawn at its capture."""
    for draw in (lambda: torch.rand(()), random.random, np.random.rand):

        def noisy(model: nn.Module, batch: Any, draw: Callable[[], Any] = draw) -> Tensor:
            return loss(model, batch) + 0.0 * float(draw())

        with pytest.raises(CannotCaptureError, match="draws random numbers on the host, which a graph would repeat"):
            PrivateGradient(network(), noisy, mechanism(), seed=5, capture=True).prepare(rows())
