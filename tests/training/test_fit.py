"""`fit` as a whole: what goes in, what comes out, what is refused, and what is said about it."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpgrad
import spread
from dpgrad import Relation
from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Gaussian, leaves
from dpgrad.accounting.ledger import Ledger
from dpgrad.errors import CannotCaptureError
from dpgrad.grads import ENGINES
from dpgrad.grads.ways import Way
from dpgrad.mechanism import schedules
from dpgrad.mechanism.mechanism import Group
from dpgrad.reports.chart import Chart
from dpgrad.training import prepare, session
from dpgrad.training.averaging import Ema
from dpgrad.training.curves import Point, Progress, evaluate
from dpgrad.training.diagnostics import Diagnostics
from dpgrad.training.fit import Fitted, ResumeWarning
from dpgrad.training.losses import NamedLoss, metric_named
from dpgrad.training.pca import Projection
from dpgrad.training.plan import make
from dpgrad.training.private import PrivateGradient
from dpgrad.training.recipes import RECIPES
from replayed import on_cpu

ROWS, STEPS = 60, 12
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": 15, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 3}


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def rows(count: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fitted(data: Any = None, model: nn.Module | None = None, **options: Any) -> Fitted:
    return spread.fit(network() if model is None else model, rows() if data is None else data, **SETTINGS | options)


@pytest.fixture(autouse=True)
def _nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here looks at the charts of a report; tests/reports and tests/cli do."""
    monkeypatch.setattr(Chart, "html", lambda _: "<svg/>")


@pytest.fixture(scope="module")
def wanted() -> Tensor:
    return weights(fitted().model)


class TestDataOfEveryKind:
    """The same rows, however they are held, make the same weights to the bit."""

    def test_arrays(self, wanted: Tensor) -> None:
        inputs, targets = rows()
        assert torch.equal(weights(fitted((inputs.numpy(), targets.numpy().astype(np.int32))).model), wanted)

    def test_read_only_and_foreign_byte_order(self, wanted: Tensor) -> None:
        inputs, targets = rows()
        held = inputs.numpy().astype(">f4")
        held.flags.writeable = False
        assert torch.equal(weights(fitted((held, targets.numpy())).model), wanted)

    def test_datasets(self, wanted: Tensor) -> None:
        assert torch.equal(weights(fitted(TensorDataset(*rows())).model), wanted)

    def test_datasets_with_a_collate_of_their_own(self, wanted: Tensor) -> None:
        class Words(Dataset[dict[str, Any]]):
            def __len__(self) -> int:
                return ROWS

            def __getitem__(self, index: int) -> dict[str, Any]:
                inputs, targets = rows()
                return {"x": inputs[index].tolist(), "y": int(targets[index])}

        def collate(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
            return torch.tensor([one["x"] for one in examples]), torch.tensor([one["y"] for one in examples])

        assert torch.equal(weights(fitted(Words(), collate=collate).model), wanted)

    def test_memory_maps_are_read_a_batch_at_a_time(self, wanted: Tensor, tmp_path: Path) -> None:
        taken: list[int] = []

        class Watched(np.memmap):
            def __getitem__(self, index: Any) -> Any:
                taken.append(len(index) if isinstance(index, np.ndarray) else ROWS)
                return np.asarray(self).__getitem__(index)

            def __array__(self, *args: Any, **kwargs: Any) -> Any:  # what a copy of the whole would go through
                return super().__array__(*args, **kwargs)

        inputs, targets = rows()
        np.save(tmp_path / "inputs.npy", inputs.numpy())
        held = np.load(tmp_path / "inputs.npy", mmap_mode="r").view(Watched)
        assert torch.equal(weights(fitted((held, targets)).model), wanted)
        assert len(taken) >= STEPS
        assert sum(count >= ROWS for count in taken) <= 1  # the examples on which the engine is tried
        assert isinstance(prepare.within_reach((held, targets), torch.device("cpu"))[0], np.memmap)


class TestSeeds:
    def test_the_same_seed_makes_the_same_weights(self) -> None:
        one, other, another = fitted(), fitted(), fitted(seed=4)
        assert torch.equal(weights(one.model), weights(other.model))
        assert not torch.equal(weights(one.model), weights(another.model))
        assert one.reproducible
        assert one.curves == other.curves

    def test_without_a_seed_no_two_runs_are_alike(self) -> None:
        one, other = fitted(seed=None), fitted(seed=None)
        assert not torch.equal(weights(one.model), weights(other.model))
        assert not one.reproducible

    def test_the_global_generator_is_left_alone(self) -> None:
        model = nn.Sequential(network(), nn.Dropout(0.5))
        torch.manual_seed(5)
        wanted = torch.rand(3)
        torch.manual_seed(5)
        fitted(model=model)
        assert torch.equal(torch.rand(3), wanted)


class TestOptimizers:
    def by_hand(self, make_optimizer: Any, rate: Any = None) -> Tensor:
        """The same private gradients, applied by torch.optim outside `fit`."""
        plan = make("dpsgd", rows=ROWS, **{k: v for k, v in SETTINGS.items() if k != "seed"})
        model = network()
        private = PrivateGradient(model, NamedLoss("cross-entropy"), plan.mechanism, seed=3)
        optimizer = make_optimizer(model.parameters())
        for step in range(STEPS):
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate(step)
            private.step(rows())
            optimizer.step()
        return weights(model)

    def test_by_name(self) -> None:
        wanted = self.by_hand(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        assert torch.equal(weights(fitted(optimizer="adamw", learning_rate=0.01).model), wanted)

    def test_by_a_function_with_its_own_rate(self) -> None:
        def adam(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=0.05, betas=(0.8, 0.9))

        done = fitted(optimizer=adam)
        assert torch.equal(weights(done.model), self.by_hand(adam))
        assert done.plan.learning_rate is None
        assert done.plan.optimizer == "adam"
        assert done.curves[-1].learning_rate == 0.05
        assert "noise bias" in dict(done.plan.suggestions())

    def test_schedules_set_the_rate_of_every_step(self) -> None:
        rate = schedules.warmup(schedules.cosine(0.5, 0.05, STEPS), 3)
        wanted = self.by_hand(lambda parameters: torch.optim.SGD(parameters, lr=1.0), rate)
        done = fitted(learning_rate=0.5, learning_rate_schedule="warmup:3+cosine:0.1", evaluate_every=1)
        assert torch.equal(weights(done.model), wanted)
        assert [point.learning_rate for point in done.curves] == [rate(step) for step in range(STEPS)]
        assert torch.equal(weights(fitted(learning_rate=rate).model), wanted)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"optimizer": "adamm"}, "optimizer must be .* got 'adamm': did you mean adam"),
            ({"optimizer": "lbfgs"}, "optimizer must be .* got 'lbfgs'"),
            ({"optimizer": lambda parameters: None}, "optimizer must make a torch.optim.Optimizer, it made None"),
            ({"optimizer": "adam", "method": "dpsgd-momentum"}, r"momentum = 0\.6 is that of SGD"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fitted(**options)


class TestAveraging:
    @pytest.mark.parametrize("text", ["ema:0.7", "tail:0.5"])
    def test_the_model_ends_as_the_average_of_its_iterates(self, text: str) -> None:
        iterates: list[Tensor] = []
        model = network()
        done = fitted(
            model=model, averaging=text, held_out=rows(30, seed=2), evaluate_every=1,
            progress=lambda seen: iterates.append(weights(model)),
        )  # fmt: skip
        if text == "ema:0.7":
            scale = torch.tensor([0.7 ** (STEPS - 1 - j) for j in range(STEPS)])
            wanted = (torch.stack(iterates) * (scale / scale.sum())[:, None]).sum(0)
        else:
            wanted = torch.stack(iterates[STEPS // 2 :]).mean(0)
        torch.testing.assert_close(weights(done.model), wanted, rtol=0, atol=1e-5)
        # what is evaluated is the average, and training goes on from the iterate
        own = evaluate(done.model, metric_named("accuracy", NamedLoss("cross-entropy")), rows(30, seed=2))
        assert done.held_out == own
        assert torch.equal(iterates[-1], weights(fitted().model))


class TestHeldOut:
    def test_curves(self) -> None:
        inputs, targets = rows(40, seed=2)
        done = fitted(held_out=(inputs, targets), evaluate_every=5)
        assert [point.step for point in done.curves] == [5, 10, 12]
        correct = (done.model(inputs).argmax(1) == targets).float().mean()
        assert done.held_out == done.curves[-1].held_out == pytest.approx(correct.item())
        assert done.metric == "accuracy"
        last = done.curves[-1]
        assert last.epsilon == done.guarantee.epsilon
        assert last.epoch == pytest.approx(3.0)
        assert (last.clip, last.noise_multiplier, last.learning_rate) == (12.0, 1.0, 0.02)
        assert any("the held-out rows" in entry for entry in done.outside)

    def test_it_does_not_move_the_run(self) -> None:
        model = nn.Sequential(network(), nn.Dropout(0.3))
        other = nn.Sequential(network(), nn.Dropout(0.3))
        one = fitted(model=model, held_out=rows(40, seed=2), evaluate_every=1)
        assert torch.equal(weights(one.model), weights(fitted(model=other).model))

    def test_metrics(self) -> None:
        inputs, targets = rows(40, seed=2)

        def margin(outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.max(1).values

        done = fitted(held_out=(inputs, targets), metric=margin)
        assert done.metric == "margin"
        assert done.held_out == pytest.approx(done.model(inputs).max(1).values.mean().item(), rel=1e-6)
        regression = fitted(
            (rows()[0], rows()[0][:, 0]), network(1), loss="squared", held_out=(inputs, inputs[:, 0]), metric=None
        )
        assert regression.metric == "squared"
        error = (regression.model(inputs)[:, 0] - inputs[:, 0]).square().mean() / 2
        assert regression.held_out == pytest.approx(error.item(), rel=1e-5)

    def test_nothing_of_the_training_rows_is_shown_without_it(self) -> None:
        done = fitted()
        assert done.held_out is None
        assert all(point.held_out is None for point in done.curves)
        shown = {field.name for field in dataclasses.fields(Point)} | {f.name for f in dataclasses.fields(Progress)}
        assert not {name for name in shown if "loss" in name or "train" in name}


class TestBudget:
    def test_epsilon_in_model_out(self) -> None:
        done = fitted(noise_multiplier=None, epsilon=2.0)
        assert 1.99 < done.guarantee.epsilon <= 2.0
        assert done.event == done.plan.mechanism.event()
        assert done.stopped == "plan"
        assert done.guarantee.relation is Relation.ZERO_OUT
        assert "the number of rows (60, taken from the data)" in done.public

    def test_it_stops_before_the_step_that_overspends(self) -> None:
        """An oracle that takes one step at a time: ε of n steps is within the budget, that of n+1 is not."""
        done = fitted(steps=None, epsilon=3.0)
        taken = done.curves[-1].step
        assert done.stopped == "budget"
        assert account(done.event, Relation.ZERO_OUT).epsilon(1e-3) <= 3.0
        further = done.plan.mechanism.with_steps(taken + 1).event()
        assert account(further, Relation.ZERO_OUT).epsilon(1e-3) > 3.0

    def test_a_declared_size_is_taken_whatever_the_data_have(self) -> None:
        done = fitted(rows(ROWS + 1), dataset_size=ROWS)
        assert done.guarantee.relation is Relation.ADD_REMOVE
        assert done.plan.mechanism == fitted(dataset_size=ROWS).plan.mechanism

    def test_beside(self) -> None:
        beside = Gaussian(4.0)
        done = fitted(noise_multiplier=None, epsilon=2.0, also_released=beside)
        both = account(Compose((beside, done.event)), Relation.ZERO_OUT).epsilon(1e-3)
        assert done.guarantee.epsilon == both <= 2.0
        assert done.guarantee.event == Compose((beside, done.event))

    def test_a_projection_from_a_seed_marks_the_run(self) -> None:
        for reproducible in (True, False):
            made = Projection(torch.eye(4)[:2], Gaussian(4.0), Relation.ZERO_OUT, reproducible)
            done = fitted(also_released=made, seed=None)
            assert done.plan.also_released == Gaussian(4.0)
            assert done.reproducible == reproducible
        with pytest.raises(ValueError, match=r"also_released must be an event of dpgrad\.events or a release"):
            fitted(also_released=3)

    def test_groups(self) -> None:
        groups = (Group("0.*"), Group("2.*", clip=0.5))
        done = fitted(groups=groups, clip=1.0)
        assert done.plan.mechanism.multiplier_at(0) == pytest.approx(1 / math.sqrt(2))
        with pytest.raises(ValueError, match=r"parameter '2\.weight' must match one group"):
            fitted(groups=groups[:1])

    @pytest.mark.parametrize("pieces", [{"microbatch": 4}, {"memory_limit": 100_000}])
    def test_a_lot_may_be_worked_on_in_batches(self, pieces: dict[str, int]) -> None:
        done = fitted(**pieces, clip=0.1)
        torch.testing.assert_close(weights(done.model), weights(fitted(clip=0.1).model))
        assert done.event == done.plan.mechanism.event()

    @pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
    def test_losses_of_ones_own(self, engine: str) -> None:
        def absolute(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return (model(batch["x"])[:, 0] - batch["y"]).abs()

        data, held_out = ({"x": x, "y": x[:, 0]} for x in (rows()[0], rows(30, seed=2)[0]))
        done = fitted(data, network(1), loss=absolute, held_out=held_out, engine=engine)
        assert done.metric == "loss"
        assert done.held_out == pytest.approx(absolute(done.model, held_out).mean().item(), rel=1e-5)


class TestStopping:
    @pytest.mark.parametrize("how", ["progress", "SIGINT", "SIGTERM"])
    def test_a_run_that_is_stopped_costs_its_plan(self, how: str) -> None:
        def watch(seen: Progress) -> bool:
            if seen.step == 5 and how != "progress":
                os.kill(os.getpid(), getattr(signal, how))
            return seen.step == 5 and how == "progress"

        before = signal.getsignal(signal.SIGINT)
        done = fitted(progress=watch)
        assert signal.getsignal(signal.SIGINT) is before
        assert done.stopped == "interrupted"
        assert done.curves[-1].step == 5
        assert done.event == done.plan.mechanism.with_steps(5).event()
        assert done.guarantee == done.plan.guarantee
        assert done.guarantee.epsilon > account(done.event, Relation.ZERO_OUT).epsilon(1e-3)

    def test_what_progress_says(self) -> None:
        seen: list[Progress] = []
        fitted(progress=seen.append, held_out=rows(20, seed=2), evaluate_every=4)
        assert [one.step for one in seen] == list(range(1, STEPS + 1))
        assert [one.held_out is None for one in seen] == [True] * 3 + [False] * 9
        assert all(one.steps == STEPS and one.seconds_left >= 0 for one in seen)
        assert seen[-1].seconds_left == 0
        assert [one.epsilon for one in seen] == sorted(one.epsilon for one in seen)


class TestLedger:
    def test_several_runs_add_up(self) -> None:
        ledger = Ledger()
        runs = [fitted(ledger=ledger, steps=steps) for steps in (3, 5)]
        together = account(ledger.event(), Relation.ZERO_OUT).epsilon(1e-3)
        assert together == pytest.approx(
            account(Compose(tuple(run.event for run in runs)), Relation.ZERO_OUT).epsilon(1e-3), rel=1e-9
        )
        assert together > runs[1].guarantee.epsilon

    def test_the_plan_is_charged_before_the_first_step_and_stays_where_a_run_is_stopped(self) -> None:
        ledger = Ledger()
        seen = []

        def watch(progress: Progress) -> bool:
            seen.append(ledger.event())
            return progress.step == 2

        done = fitted(ledger=ledger, progress=watch)
        wanted = account(done.plan.mechanism.event(), Relation.ZERO_OUT).epsilon(1e-3)
        for event in (seen[0], ledger.event()):
            assert account(event, Relation.ZERO_OUT).epsilon(1e-3) == pytest.approx(wanted, rel=1e-9)


class Died(BaseException):
    """The end of a process, after which nothing is stored; an error in a callback ends a run in order."""


def killed_at(step: int) -> Callable[[Progress], None]:
    def progress(seen: Progress) -> None:
        if seen.step == step:
            raise Died("the process died")

    return progress


class Begun:
    """Calls a function before the first step of a process."""

    def __init__(self, at_start: Callable[[Progress], None]) -> None:
        self.at_start = at_start


class Turned(torch.autograd.Function):
    """y = x, with the gradient turned around: it can be neither followed nor lifted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().sum(1) + batch[1]


def losses_sorted(model: nn.Module, batch: Any) -> Tensor:
    order = batch[0][:, 0].argsort()
    return losses_of(model, (batch[0][order], batch[1][order]))[order.argsort()]


def losses_sorted_where_many(model: nn.Module, batch: Any) -> Tensor:
    return (losses_sorted if len(batch[0]) > 40 else losses_of)(model, batch)


def losses_turned(model: nn.Module, batch: Any) -> Tensor:
    return losses_of(model, (Turned.apply(model[0](batch[0])), batch[1]))


def losses_that_fail_for_one(model: nn.Module, batch: Any) -> Tensor:
    """Inside vmap alone they fail, with words about a row."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError("no rule for patient Smith; of 1234 rows, or so")
    return losses_of(model, (Turned.apply(batch[0] * model[0].weight[0]), batch[1]))


class TestWay:
    """How gradients were computed is known of every run, and nothing of the rows with it."""

    @pytest.mark.parametrize(
        ("loss", "options", "name", "why"),
        [
            (losses_of, {}, "batched", "no operation depends on values"),
            (losses_sorted, {}, "lifted", "sort works along the dimension of the examples"),
            (losses_of, {"engine": "vmap"}, "vmap", ""),
            (losses_of, {"engine": "single"}, "single", ""),
        ],
        ids=["batched", "lifted", "vmap", "single"],
    )
    def test_of_a_run(self, loss: Any, options: dict[str, Any], name: str, why: str) -> None:
        done = fitted(loss=loss, **options)
        assert done.way == Way(name, why)
        assert done.way.cost == ""
        said = [entry for entry in done.outside if "lifted or certified" in entry]
        assert len(said) == (name == "lifted")

    def test_certified_says_what_it_costs(self) -> None:
        with pytest.warns(UserWarning, match="every batch is checked"):
            done = fitted(loss=losses_turned, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
        assert done.way is not None
        assert done.way.name == "certified"
        assert "autograd.Function" in done.way.why
        assert "second backward pass" in done.way.cost
        assert any("lifted or certified" in entry for entry in done.outside)

    def test_that_of_larger_batches_than_the_few_that_are_compared(self) -> None:
        with pytest.warns(UserWarning, match="batches of some sizes cannot be followed"):
            done = fitted(loss=losses_sorted_where_many, batch_size=55)
        assert done.way == Way("lifted", "in batches of some sizes, sort works along the dimension of the examples")

    def test_no_size_of_a_batch_that_was_drawn_decides(self) -> None:
        """Lots above 40 rows go another way, and few keys draw one; the probe has as many rows as any may have."""
        with pytest.warns(UserWarning, match="batches of some sizes cannot be followed"):
            ways = {fitted(loss=losses_sorted_where_many, batch_size=33, seed=key).way for key in range(4)}
        assert len(ways) == 1

    def test_nothing_of_the_rows_is_in_it(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="Smith"):  # which stays in the process
            done = fitted(loss=losses_that_fail_for_one, folder=tmp_path, keep_private=True)
        assert done.way is not None
        assert done.way.name == "certified"
        assert done.way.why.endswith("vmap does not take it")
        kept = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(kept) > 1
        assert not any(b"Smith" in path.read_bytes() for path in kept)

    def test_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on_cpu(monkeypatch)
        assert fitted(loss=losses_sorted).way == fitted(loss=losses_sorted, capture=False).way

    def test_resumed(self, tmp_path: Path) -> None:
        wanted = fitted(loss=losses_sorted).way
        options: dict[str, Any] = {"loss": losses_sorted, "folder": tmp_path / "run"}
        stopped = fitted(progress=lambda seen: seen.step == 5, **options)
        assert stopped.way == wanted
        assert fitted(resume=True, **options).way == wanted

    def test_resumed_with_no_step_left(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"loss": losses_sorted, "folder": tmp_path / "run"}

        def failing(folder: Path, done: Fitted) -> None:
            raise RuntimeError("the disk is full")

        with pytest.raises(RuntimeError, match="the disk is full"):
            fitted(release=failing, **options)
        seen: list[Any] = []
        done = fitted(resume=True, release=lambda folder, done: seen.append(done.way), **options)
        assert done.way == seen[0] == Way("lifted", "sort works along the dimension of the examples")

    def test_of_a_checkpoint_without_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of 0.1.0 have none."""
        options: dict[str, Any] = {"loss": losses_sorted, "folder": tmp_path / "run"}
        state = session.Session.state

        def old(own: Any) -> dict[str, Any]:
            return {name: value for name, value in state(own).items() if name != "way"}

        monkeypatch.setattr(session.Session, "state", old)
        fitted(progress=lambda seen: seen.step == 5, **options)
        assert fitted(resume=True, **options).way == fitted(loss=losses_sorted).way


def impossible(*_: object, **__: object) -> None:
    raise CannotCaptureError("not here")


class TestFolders:
    def stopped_at(self, step: int, folder: Path, **options: Any) -> Fitted:
        return fitted(folder=folder, progress=lambda seen: seen.step == step, **options)

    @pytest.mark.parametrize("method", ["dpsgd-amended", "psasc-momentum", "psasc-gd"])
    def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped(self, method: str, tmp_path: Path) -> None:
        options: dict[str, Any] = {"method": method, "averaging": "ema:0.9", "held_out": rows(20, seed=2)}
        options["accountant"] = "rdp"  # prices schedules soonest
        if RECIPES[method].full_batch:
            options["batch_size"] = None
        undisturbed = fitted(**options)
        self.stopped_at(5, tmp_path / "run", **options)
        assert not (tmp_path / "run" / "release").exists()
        done = fitted(folder=tmp_path / "run", resume=True, **options)
        assert torch.equal(weights(done.model), weights(undisturbed.model))
        assert done.event == done.plan.mechanism.event()
        assert done.guarantee == undisturbed.guarantee
        assert [dataclasses.astuple(one) for one in done.curves if one.step != 5] == [
            dataclasses.astuple(one) for one in undisturbed.curves if one.step != 5
        ]
        assert done.stopped == "plan"
        assert not (tmp_path / "run" / "private").exists()

    def test_steps_since_the_last_checkpoint_are_replayed(self, tmp_path: Path) -> None:
        with pytest.raises(Died, match="the process died"):
            fitted(folder=tmp_path / "run", progress=killed_at(8), checkpoint_every=3)
        done = fitted(folder=tmp_path / "run", resume=True)
        assert torch.equal(weights(done.model), weights(fitted().model))
        assert done.event == done.plan.mechanism.event()

    def test_other_settings_mean_a_new_key_and_an_earlier_end(self, tmp_path: Path) -> None:
        with pytest.raises(Died, match="the process died"):
            fitted(folder=tmp_path / "run", progress=killed_at(8), checkpoint_every=3, learning_rate=0.5)
        ledger = Ledger()
        done = fitted(folder=tmp_path / "run", resume=True, learning_rate=0.25, ledger=ledger)
        assert done.stopped == "budget"
        assert 6 < done.curves[-1].step < STEPS
        assert done.guarantee.epsilon <= done.plan.guarantee.epsilon
        assert done.guarantee == dpgrad.Guarantee.of(account(done.event, Relation.ZERO_OUT), 1e-3)
        # nine steps under the old key, at which a checkpoint was due, and those from the sixth on under the new one
        assert sum(leaves(done.event).values()) == 9 + done.curves[-1].step - 6
        assert leaves(ledger.event()) == leaves(done.event)

    @pytest.mark.parametrize(
        ("changed", "said"), [({"learning_rate": 0.25}, "recipe"), ({"data": (rows()[0] + 1, rows()[1])}, "data")]
    )
    def test_a_new_key_and_what_it_costs_are_said(self, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
        with pytest.raises(Died, match="the process died"):
            fitted(folder=tmp_path / "run", progress=killed_at(8), checkpoint_every=3)
        with pytest.warns(ResumeWarning, match=rf"resumes at step 6 with a new key \(not the same .*{said}") as warned:
            done = fitted(folder=tmp_path / "run", resume=True, **changed)
        (line,) = [str(one.message) for one in warned if one.category is ResumeWarning]
        assert line.endswith(f"the run now ends after {done.curves[-1].step} of {STEPS} steps")
        assert "\n" not in line

    def test_nothing_is_said_where_nothing_changed(self, tmp_path: Path) -> None:
        with pytest.raises(Died, match="the process died"):
            fitted(folder=tmp_path / "run", progress=killed_at(8), checkpoint_every=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResumeWarning)
            fitted(folder=tmp_path / "run", resume=True)

    def test_another_optimizer_or_averaging_begins_anew(self, tmp_path: Path) -> None:
        self.stopped_at(5, tmp_path / "run", momentum=0.5)
        done = fitted(folder=tmp_path / "run", resume=True, optimizer="adam", averaging="tail:0.5")
        assert done.curves[-1].step == STEPS - 1  # one step may have been taken since the checkpoint
        assert bool(weights(done.model).isfinite().all())
        assert done.guarantee.epsilon <= done.plan.guarantee.epsilon

    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        self.stopped_at(5, tmp_path / "run")
        spent = (tmp_path / "run" / "ledger.jsonl").read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResumeWarning)  # nothing is resumed, and nothing is charged
            with pytest.raises(ValueError, match="model has other parameters or shapes than the run in the folder"):
                fitted(model=network(4), folder=tmp_path / "run", resume=True)
        assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == spent  # what is refused costs nothing

    def test_a_capture_that_fails_costs_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stopped_at(5, tmp_path / "run")
        spent = (tmp_path / "run" / "ledger.jsonl").read_bytes()
        monkeypatch.setattr(PrivateGradient, "prepare", impossible)
        with pytest.raises(CannotCaptureError, match="not here"):
            fitted(folder=tmp_path / "run", resume=True, learning_rate=0.125)
        assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == spent

    def test_averaging_that_is_added_begins_with_the_weights_that_were_loaded(self, tmp_path: Path) -> None:
        seen: list[Tensor] = []
        self.stopped_at(5, tmp_path / "run", averaging="tail:0.5")
        model = nn.Sequential(*(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))  # with weights of its own
        done = fitted(
            model=model, folder=tmp_path / "run", resume=True, averaging="ema:0.5", checkpoint_every=1,
            progress=lambda progress: seen.append(weights(model)),
        )  # fmt: skip
        loaded = weights(self.stopped_at(5, tmp_path / "same").model)
        wanted = loaded
        for step, iterate in enumerate(seen, 5):
            wanted = wanted + Ema(0.5).weight(step) * (iterate - wanted)
        torch.testing.assert_close(weights(done.model), wanted, rtol=0, atol=1e-5)

    def test_another_plan_is_refused(self, tmp_path: Path) -> None:
        """What a run showed may be why another budget is asked for: the interrupted run costs its own plan."""
        options: dict[str, Any] = {"noise_multiplier": None, "folder": tmp_path / "run", "seed": None}
        first = fitted(epsilon=8.0, progress=lambda seen: seen.step == 11, **options)
        for other in ({"epsilon": 1.0}, {"epsilon": 8.0, "steps": 14}, {"epsilon": 8.0, "batch_size": 20}):
            with pytest.raises(ValueError, match=r"planned with another mechanism, which differs in .*a ledger"):
                fitted(resume=True, **options | other)
        same = options | {"noise_multiplier": first.plan.mechanism.noise_multiplier}
        with pytest.raises(ValueError, match="also_released differs from what the run was planned with"):
            fitted(resume=True, also_released=Gaussian(9.0), **same)
        done = fitted(
            (rows()[0] + 1, rows()[1]), epsilon=8.0, resume=True, progress=lambda seen: seen.step == 1, **options
        )
        assert done.guarantee.epsilon >= account(done.event, Relation.ZERO_OUT).epsilon(1e-3)

    def test_what_is_released_beside_counts_under_a_new_key_too(self, tmp_path: Path) -> None:
        beside = Gaussian(1.5)
        options: dict[str, Any] = {"folder": tmp_path / "run", "also_released": beside, "checkpoint_every": 2}
        with pytest.raises(Died, match="the process died"):
            fitted(progress=killed_at(7), **options)
        ledger = Ledger()
        done = fitted((rows()[0] + 1, rows()[1]), resume=True, ledger=ledger, **options)
        assert done.stopped == "budget"
        assert beside not in leaves(done.event)
        both = account(Compose((beside, done.event)), Relation.ZERO_OUT).epsilon(1e-3)
        assert both > account(done.event, Relation.ZERO_OUT).epsilon(1e-3)
        assert done.guarantee.epsilon == both <= done.plan.guarantee.epsilon
        assert leaves(done.guarantee.event) == leaves(Compose((beside, done.event)))
        assert leaves(ledger.event()) == leaves(done.event)  # who released it adds it there, once

    def test_curves_count_what_was_spent_before(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint_every": 2, "noise_multiplier": 2.0}
        seen: list[Progress] = []
        with pytest.raises(Died, match="the process died"):
            fitted(progress=killed_at(7), **options)
        done = fitted((rows()[0] + 1, rows()[1]), resume=True, progress=seen.append, evaluate_every=1, **options)
        for progress in seen:
            own = [done.plan.mechanism.step_event(step) for step in range(6, progress.step)]
            before = done.plan.mechanism.with_steps(8).event()
            truth = account(Compose((before, *own)), Relation.ZERO_OUT).epsilon(1e-3)
            assert truth <= progress.epsilon
            assert progress.steps == seen[-1].step < STEPS
        assert [point.epsilon for point in done.curves if point.step > 6] == [one.epsilon for one in seen]

    def test_a_dataset_cannot_be_compared(self, tmp_path: Path) -> None:
        class Items(Dataset[tuple[Tensor, Tensor]]):
            def __len__(self) -> int:
                return ROWS

            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return rows()[0][index], rows()[1][index]

        self.stopped_at(5, tmp_path / "run", data=Items())
        assert fitted(Items(), folder=tmp_path / "run", resume=True).stopped == "budget"

    def test_what_is_released(self, tmp_path: Path) -> None:
        def release(folder: Path, done: Fitted) -> None:
            (folder / "report.txt").write_text(str(done.guarantee), "utf-8")

        done = fitted(folder=tmp_path / "run", release=release)
        assert sorted(path.name for path in (tmp_path / "run" / "release").iterdir()) == ["report.txt", "weights.pt"]
        model = network()
        model.load_state_dict(torch.load(tmp_path / "run" / "release" / "weights.pt", weights_only=True))
        assert torch.equal(weights(model), weights(done.model))
        assert done.folder == tmp_path / "run"

    def test_a_ledger_counts_a_run_once_that_was_resumed(self, tmp_path: Path) -> None:
        ledger = Ledger()
        self.stopped_at(5, tmp_path / "run", ledger=ledger)
        done = fitted(folder=tmp_path / "run", resume=True, ledger=ledger)
        cost = account(ledger.event(), Relation.ZERO_OUT).epsilon(1e-3)
        assert cost == pytest.approx(done.guarantee.epsilon, rel=1e-9)

    def test_a_captured_run_is_replayed_as_a_graph_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a graph rounds otherwise than single kernels would show the same noise on another sum."""
        on_cpu(monkeypatch)
        for where in ("run", "other"):
            with pytest.raises(Died, match="the process died"):
                fitted(folder=tmp_path / where, progress=killed_at(8), checkpoint_every=3)
        done = fitted(folder=tmp_path / "run", resume=True)
        assert torch.equal(weights(done.model), weights(fitted().model))
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"taken as graphs of .* as single kernels, .* give capture=False"):
            fitted(folder=tmp_path / "other", resume=True)
        done = fitted(folder=tmp_path / "other", resume=True, capture=False)
        assert done.stopped == "budget"  # paid for a new key
        with pytest.raises(Died, match="the process died"):
            fitted(folder=tmp_path / "third", progress=killed_at(8), checkpoint_every=3)
        on_cpu(monkeypatch)
        with pytest.raises(ValueError, match=r"taken as single kernels, .* graphs of .* give capture=True"):
            fitted(folder=tmp_path / "third", resume=True)

    def test_a_step_without_memory_is_replayed_as_it_was_or_under_a_new_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other pieces round differently: the same noise on both sums would reveal their difference."""
        engine, full = ENGINES["vmap"], [False]

        def small(model: nn.Module, loss: Any, batch: Any, weights: Tensor, rows: int = 1) -> Any:
            if full[0] and len(weights) > 5:
                raise MemoryError
            return engine(model, loss, batch, weights, rows)

        monkeypatch.setitem(ENGINES, "vmap", small)
        options: dict[str, Any] = {"steps": 40, "engine": "vmap"}
        wanted = weights(fitted(**options).model)
        for where in ("run", "other"):
            full[0] = False
            with pytest.raises(MemoryError, match="could not be replayed: give microbatch"):
                fitted(
                    folder=tmp_path / where, checkpoint_every=3, **options,
                    progress=lambda seen: full.__setitem__(0, seen.step >= 8),
                )  # fmt: skip
        done = fitted(folder=tmp_path / "other", resume=True, microbatch=5, **options)
        assert done.stopped == "budget"  # paid for a new key
        full[0] = False
        assert torch.equal(weights(fitted(folder=tmp_path / "run", resume=True, **options).model), wanted)

    def test_no_step_is_replayed_from_weights_that_a_callback_changed(self, tmp_path: Path) -> None:
        """The same noise on the gradients of other weights would reveal the difference of both."""
        model, at = network(), tmp_path / "run"

        def moved(seen: Progress) -> None:
            if seen.step == 7:
                with torch.no_grad():
                    next(model.parameters()).add_(1)
            if seen.step == 9:
                raise SystemExit  # the process ends where nothing is stored

        with pytest.raises(SystemExit):
            fitted(model=model, folder=at, progress=moved, checkpoint_every=6)
        begun: list[Progress] = []
        fitted(folder=at, resume=True, callbacks=[Begun(begun.append)])
        assert begun[0].step == 7

    def test_callbacks_leave_the_weights_that_a_run_goes_on_from(self, tmp_path: Path) -> None:
        self.stopped_at(5, tmp_path / "run")
        spent = (tmp_path / "run" / "ledger.jsonl").read_bytes()
        model = network()

        def reset(seen: Progress) -> None:
            nn.init.zeros_(next(model.parameters()))

        begun = Begun(reset)
        with pytest.raises(ValueError, match="at_start of a callback changed the weights of a run that is resumed"):
            fitted(model=model, folder=tmp_path / "run", resume=True, callbacks=[begun])
        assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == spent

    def test_a_run_within_a_limit_of_memory_keeps_to_its_pieces_after_a_crash(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was found within the limit takes its place in a run that is resumed."""
        on_cpu(monkeypatch)
        options: dict[str, Any] = {"folder": tmp_path / "run", "memory_limit": 60_000}
        with pytest.raises(Died, match="the process died"):
            fitted(progress=killed_at(8), checkpoint_every=3, **options)
        done = fitted(resume=True, **options)
        assert done.stopped == "plan"
        assert torch.equal(weights(done.model), weights(fitted(memory_limit=60_000).model))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_cuda_a_captured_run_replays_to_the_bit(self, tmp_path: Path) -> None:
        """In processes of their own, where cuBLAS has been told to be deterministic before it started."""
        script = Path(__file__).parents[1] / "captured_run.py"
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

        def run(name: str, *given: str) -> list[str]:
            command = [sys.executable, str(script), str(tmp_path / name), *given]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout.split()

        whole = run("whole")
        assert run("again") == whole
        assert run("part", "--die", "17") == ["died", "captured"]
        assert run("part", "--resume") == whole
        assert whole[1:] == ["plan", "captured"]

    def test_refusals(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no run in"):
            fitted(folder=tmp_path / "run", resume=True)
        with pytest.raises(CannotCaptureError, match="the model is on cpu"):
            fitted(folder=tmp_path / "run", capture=True)
        assert not (tmp_path / "run").exists()
        fitted(folder=tmp_path / "run")
        with pytest.raises(ValueError, match="is finished"):
            fitted(folder=tmp_path / "run", resume=True)


class Annealed:
    """A loss that falls with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") / (1 + self.calls // 40)


class Weighted(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, weight, 1.0]))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=self.weights, reduction="none")


CHANGED: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "mode": (lambda: {"model": nn.Sequential(nn.Dropout(0.5), network())},
             lambda: {"model": nn.Sequential(nn.Dropout(0.5), network()).eval()}),
    "loss that moves": (lambda: {"loss": Annealed()}, lambda: {"loss": Annealed()}),
    "loss with weights": (lambda: {"loss": Weighted(1.0)}, lambda: {"loss": Weighted(3.0)}),
    "diagnostics": (lambda: {"diagnostics": Diagnostics(last_epochs=1)}, dict),
}  # fmt: skip


class TestTheSameKey:
    """Two results with the same noise and different sums reveal their difference: the key is drawn anew."""

    def attempts(self, folder: Path, first: dict[str, Any], second: dict[str, Any]) -> int:
        options: dict[str, Any] = {"folder": folder, "checkpoint_every": 3, "seed": None}
        with pytest.raises(Died, match="the process died"):
            fitted(progress=killed_at(5), **options, **first)
        fitted(resume=True, **options, **second)
        return (folder / "ledger.jsonl").read_text("utf-8").count('"attempt"')

    @pytest.mark.parametrize("name", CHANGED)
    def test_is_not_used_where_anything_changed(self, name: str, tmp_path: Path) -> None:
        first, second = CHANGED[name]
        assert self.attempts(tmp_path / "run", first(), second()) == 2

    def test_is_not_used_where_a_layer_was_frozen_during_the_run(self, tmp_path: Path) -> None:
        model = network()

        def freezing(seen: Progress) -> None:
            next(model.parameters()).requires_grad_(seen.step < 2)
            killed_at(5)(seen)

        options: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint_every": 3}
        with pytest.raises(Died, match="the process died"):
            fitted(model=model, progress=freezing, **options)
        done = fitted(resume=True, **options)
        assert done.stopped == "budget"

    def test_is_used_where_nothing_did(self, tmp_path: Path) -> None:
        def same() -> dict[str, Any]:
            return {"loss": Weighted(2.0), "model": nn.Sequential(nn.Dropout(0.5), network())}

        assert self.attempts(tmp_path / "run", same(), same()) == 1


class TestDiagnostics:
    def test_they_change_nothing_and_stay_private(self, tmp_path: Path) -> None:
        done = fitted(diagnostics=Diagnostics(last_epochs=1), folder=tmp_path / "run")
        assert torch.equal(weights(done.model), weights(fitted().model))
        assert done.diagnostics is not None
        assert done.diagnostics.report()["steps"]["step"] == [8, 9, 10, 11]
        assert [path.name for path in (tmp_path / "run" / "private").iterdir()] == ["diagnostics.json"]
        assert not list((tmp_path / "run" / "release").glob("*diagnostics*"))
        assert any("diagnostics" in entry for entry in done.outside)
        assert fitted().diagnostics is None


class TestAugmentation:
    def test_rows_of_an_example_are_averaged_before_scaling(self) -> None:
        """K equal rows change nothing: were each row clipped by itself, the sum would be K times as long."""

        def twice(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
            inputs, targets = batch
            return inputs[:, None].expand(-1, 2, -1), targets[:, None].expand(-1, 2)

        torch.testing.assert_close(weights(fitted(augment=twice, clip=0.1).model), weights(fitted(clip=0.1).model))

    def test_several_rows_an_example(self) -> None:
        inputs, targets = rows()
        pairs = inputs[:, None].expand(-1, 2, -1), targets[:, None].expand(-1, 2)
        torch.testing.assert_close(weights(fitted(pairs, several_rows=True).model), weights(fitted().model))


HELD = rows()


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "psaac"}, "method must be .* got 'psaac': did you mean psac"),
            ({"loss": "mse"}, "loss must be .* got 'mse': did you mean squared"),
            ({"metric": "f1"}, "metric must be one of accuracy, .* got 'f1'"),
            ({"data": (torch.zeros(0, 4), torch.zeros(0).long())}, "data must hold at least one row, got none"),
            ({"data": (rows()[0], rows()[1] + 1)}, "targets must be class indices from 0 to 2: the model has 3"),
            ({"data": (rows()[0], rows()[1].float())}, "needs class indices as targets, got torch.float32"),
            ({"data": (rows()[0].double(), rows()[1])}, r"types do not match .*convert inputs"),
            ({"data": (rows()[0], rows()[1].numpy().astype(str))}, r"data\[1\] must hold numbers .*class indices 0, 1"),
            (
                {"held_out": (torch.zeros(3, 7), rows(3)[1])},
                r"held-out rows: rows of shape \(7,\) do not fit layer",
            ),
            ({"data": "rows.csv"}, r"write dpgrad.data.read\('rows.csv', schema=.*`dpgrad data describe` proposes"),
            ({"data": Path("rows.parquet")}, r"write dpgrad.data.read\('rows.parquet', schema="),
            ({"model": LogisticRegression()}, r"write dpgrad.convex.DPLogisticRegression\(epsilon=3, classes="),
            ({"model": Ridge()}, r"write dpgrad.convex.DPLinearRegression\(epsilon=3, data_norm=..., target_bounds="),
            (
                {"model": KMeans()},
                "dpgrad.convex has private estimators for scikit-learn, such as",
            ),
            ({"data": (rows()[0].numpy().astype(object), rows()[1])}, r"data\[0\] must hold numbers .*got object"),
            ({"data": (rows()[0], rows()[1].numpy().astype("M8[s]"))}, r"data\[1\] must hold numbers .*datetime64"),
            ({"data": rows()[0]}, r"needs data as a pair \(inputs, targets\), got Tensor"),
            ({"data": (rows()[0], rows()[1][:5])}, "one entry per example"),
            ({"held_out": (torch.full((3, 4), math.nan), torch.zeros(3).long())}, r"held_out\[0\] holds values"),
            ({"data": HELD, "held_out": HELD}, "held_out are rows of the training data"),
            ({"held_out": (torch.zeros(0, 4), torch.zeros(0).long())}, "held_out must hold at least one row"),
            ({"held_out": (rows(3)[0].double(), rows(3)[1])}, "metric accuracy on held_out: types do not match"),
            (
                {"held_out": rows(3), "metric": lambda outputs, targets: outputs},
                "on held_out: .* one value per example",
            ),
            ({"held_out": rows(3)[0]}, r"metric accuracy on held_out: .* pair \(inputs, targets\)"),
            ({"evaluate_every": 0}, "evaluate_every must be a whole number of at least 1"),
            ({"folder": "unused", "checkpoint_every": -1}, "checkpoint_every must be a whole number"),
            ({"engine": "ghost"}, "engine must be one of bookkeeping, vmap"),
            ({"ledger": "ledger.jsonl"}, r"ledger must be a dpgrad.Ledger, got 'ledger.jsonl': give Ledger\(path\)"),
            (
                {"optimizer": torch.optim.Adam([nn.Parameter(torch.zeros(1))])},
                "optimizer must be a name or a function .* got Adam itself: give lambda parameters: Adam",
            ),
            (
                {"loss": nn.functional.cross_entropy},
                r'of outputs and targets: write loss="cross-entropy", or',
            ),
            (
                {"loss": nn.CrossEntropyLoss()},
                r'of outputs and targets: write loss="cross-entropy", or',
            ),
            ({"capture": True}, "the model is on cpu: a step is captured on a CUDA device"),
            ({"delta": None}, "delta is required"),
            ({"batch_size": 61}, "batch_size must be at most the number of rows, 60"),
            ({"relation": "add-remove"}, "relation add-remove needs a declared dataset_size"),
        ],
    )
    def test_one_clear_line(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as raised:
            fitted(**options)
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value, ValueError if options.get("capture") is None else CannotCaptureError)

    def test_a_model_on_two_devices(self) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, device="meta"))
        with pytest.raises(ValueError, match="model must lie on one device, its parameters lie on cpu, meta"):
            fitted(model=model)

    def test_a_label_met_in_a_dataset_is_not_repeated(self) -> None:
        inputs, targets = rows()
        targets[30:] = 77
        with pytest.raises(ValueError, match="targets must be class indices from 0 to 2") as raised:
            fitted(TensorDataset(inputs, targets))
        assert "77" not in str(raised.value)

    def test_rows_that_are_not_finite_are_left_out(self) -> None:
        inputs, targets = rows()
        inputs[7] = math.nan
        assert bool(weights(fitted((inputs, targets)).model).isfinite().all())


def test_it_learns() -> None:
    """60 epochs at a noise multiplier of 1 on a linear rule: well above the third that guessing gets."""
    data = rows(600)
    done = dpgrad.fit(
        network(), data, method="psasc", epsilon=8.0, delta=1e-4, epochs=20, held_out=rows(300, seed=2), seed=0
    )
    assert done.held_out is not None
    assert done.held_out > 0.7
