"""The harness of `python -m benchmarks.steps`: what it times, compares and fits, on a network that takes no time."""

import importlib
import json
import math
import multiprocessing
import os
import pickle
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.steps import curves, race, results, where
from benchmarks.steps.cases import CASES, Case, missing, usual
from benchmarks.steps.engines import CLIP, EAGER, GRAPH, ORDINARY, OURS, Prepared, engines, ordinary, ours
from benchmarks.steps.hugging_face import Lora
from benchmarks.steps.networks import Transformer, resnet9, stack
from benchmarks.steps.processes import Failed, Worker
from benchmarks.steps.race import (
    Row,
    Settings,
    block,
    clock,
    compared,
    conditions,
    longer,
    measured,
    quartiles,
    raced,
    reference,
    timed,
)
from benchmarks.steps.sums import (
    ROUNDED_TOLERANCE,
    SMALL_SHARE,
    TOLERANCE,
    definition,
    definitions,
    difference,
    lot,
    sketched,
)
from benchmarks.steps.workloads import DATASET, HOST, LOTS, TRANSFORMERS, WORKLOADS, Examples, Workload, transformer
from torch import nn

from dpgrad.grads import clipped_sum, vmap
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import Hard
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group
from dpgrad.training.models import Residual

ONCE = Settings("cpu", repeat=1)
TINY = WORKLOADS["mlp"].of(4)
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def broken(workload: Workload, device: str) -> Prepared:
    raise RuntimeError("no such kernel\nand many more lines")


class Clock:
    """Time that passes only where a step says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.each = 1 / 128
        self.first = 0.0  # what the first step takes longer

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def engine(self, workload: Workload, device: str, share: float = 1.0) -> Prepared:
        """Steps of 1/128 s, which adds up without rounding."""
        return Prepared(self.step, lambda: None, share=lambda steps: share)

    def step(self) -> None:
        self.now += self.each + (0.0 if self.steps else self.first)
        self.steps += 1


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr("benchmarks.steps.race.time", ticking)
    return ticking


def breaking(workload: Workload, device: str) -> Prepared:
    steps = iter(range(3))
    return Prepared(lambda: next(steps), lambda: None)


class TestRace:
    def test_rows_of_every_engine_of_ours(self) -> None:
        rows = list(measured("mlp", TINY, engines("cpu"), ONCE))
        assert [row.engine for row in rows] == [ORDINARY, OURS]
        assert all(len(row.seconds) == 1 and row.seconds[0] > 0 and not row.reason for row in rows)
        assert rows[0].apart is None  # it clips nothing
        assert rows[1].apart is not None
        assert 0 < rows[1].apart < TOLERANCE

    def test_an_engine_that_raises_shows_its_reason_and_others_run(self) -> None:
        first, second = raced("mlp", TINY, {"broken": broken, ORDINARY: ordinary}, ONCE)
        assert (first.seconds, first.reason) == ([], "RuntimeError: no such kernel")
        assert second.seconds
        assert any("RuntimeError: no such kernel" in cell for cell in results.engine_table([first, second], "cpu")[1])

    def test_an_engine_that_raises_later_has_no_figure(self) -> None:
        (row,) = raced("mlp", TINY, {"breaking": breaking}, Settings("cpu", repeat=3))
        assert (row.seconds, row.reason) == ([], "StopIteration: ")

    def test_rounds_of_a_slow_engine_end_after_three(self, ticking: Clock) -> None:
        (row,) = raced("mlp", TINY, {"slow": ticking.engine}, Settings("cpu", repeat=9, seconds=0.01))
        assert (row.seconds, row.reason) == ([1 / 128] * 3, "")

    def test_set_up_is_what_the_first_steps_take_longer(self, ticking: Clock) -> None:
        ticking.first = 0.5
        (row,) = raced("mlp", TINY, {"slow": ticking.engine}, Settings("cpu", repeat=3))
        assert (row.setup, row.median) == (0.5, 1 / 128)

    def test_time_is_that_of_the_expected_number_of_examples(self, ticking: Clock) -> None:
        """Lots that held half as many examples as expected took half the time of the expected ones."""
        assert timed(ticking.engine(TINY, "cpu", share=0.5), 4, ticking.perf_counter) == 1 / 64
        assert timed(ticking.engine(TINY, "cpu", share=0.0), 4, ticking.perf_counter) == 1 / 128  # all were empty

    def test_the_share_is_that_of_the_lots_drawn(self) -> None:
        prepared = ours(TINY, "cpu")
        for _ in range(3):
            prepared.step()
        lots = [len(sampling.Poisson(1 / LOTS).draw(LOTS * 4, step, Key.from_seed(0))) for step in range(3)]
        assert prepared.share(2) == (lots[1] + lots[2]) / 8
        assert len(lot(TINY, "cpu")[1]) == lots[0]

    @pytest.mark.parametrize(
        ("each", "lots", "period", "many"),
        [
            (1 / 128, False, 1, 6),  # 0.05 s of steps
            (1e-5, False, 1, 256),
            (1e-4, False, 200, 400),  # whole periods of 0.02 s
            (0.01, False, 300, 5),  # a period takes 3 s
            (0.1, True, 256, 16),  # Poisson lots differ
            (0.5, True, 256, 1),  # and take too long
        ],
    )
    def test_a_device_is_timed_in_blocks(self, each: float, lots: bool, period: int, many: int) -> None:
        assert block(Prepared(lambda: None, lambda: None, lots=lots, period=period), each) == many

    def test_inner_momentum_is_warm_when_it_has_its_iterates(self) -> None:
        assert ours(TINY, "cpu").warm_up == 2
        assert ours(TINY, "cpu", inner_momentum=InnerMomentum(0.5, 3)).warm_up == 5

    def test_one_thread_of_a_cpu_is_timed_by_what_it_computes(self) -> None:
        assert clock(Settings("cpu", threads=1)) is time.process_time
        assert clock(Settings("cpu", threads=2)) is clock(Settings("cuda")) is time.perf_counter

    def test_ratios_are_medians_within_rounds(self) -> None:
        one, other = Row("w", "W", 1, "a", [2.0, 30.0, 4.0]), Row("w", "W", 1, "b", [1.0, 10.0, 2.0])
        assert longer(one, other) == 2.0
        assert longer(one, Row("w", "W", 1, "c")) is None
        assert quartiles(one, other) == (2.0, 2.5)
        assert quartiles(Row("w", "W", 1, "a", [2.0]), other) is None

    def test_the_graph_is_the_reference_where_it_ran(self) -> None:
        plain, graph = Row("w", "W", 1, ORDINARY, [2.0]), Row("w", "W", 1, GRAPH, [1.0])
        assert reference([plain, graph]) is graph
        assert reference([plain, Row("w", "W", 1, GRAPH, reason="none")]) is plain

    def test_conditions_are_put_back(self) -> None:
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision, torch.get_num_threads()
        with conditions(Settings("cpu", threads=before[1] + 1, tf32=True)):
            assert (matmul.fp32_precision, torch.get_num_threads()) == ("tf32", before[1] + 1)
        with conditions(Settings("cpu", tf32=False)):
            assert matmul.fp32_precision == "ieee"
        assert (matmul.fp32_precision, torch.get_num_threads()) == before

    @pytest.mark.parametrize("microbatch", [None, 1, 3])
    def test_parts_add_up_to_the_gradient_of_the_batch(self, microbatch: int | None) -> None:
        """A step on a batch of 4 in parts moves the weights as a step on the whole does."""
        made: list[nn.Module] = []
        model = TINY.built("cpu")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        workload = replace(TINY, microbatch=microbatch, make=lambda: made.append(TINY.make()) or made[-1])
        ordinary(workload, "cpu").step()
        grads = torch.autograd.grad(TINY.loss(model, TINY.batch("cpu")).mean(), list(model.parameters()))
        for (name, value), grad in zip(made[0].named_parameters(), grads, strict=True):
            torch.testing.assert_close(value, before[name] - 0.01 * grad)


class TestComparison:
    def test_difference_is_that_of_the_tensors(self) -> None:
        """Eight projections estimate a length within a factor of 2 but for about one in 200; the vectors are fixed."""
        truth = {"a": torch.randn(1000, generator=torch.Generator().manual_seed(0)), "b": torch.ones(2, 3)}
        moved = {**truth, "a": truth["a"] * 1.05}
        assert difference(sketched(truth), sketched(truth)) == 0
        assert 0.025 < difference(sketched(moved), sketched(truth)) < 0.1

    def test_other_parameters_are_infinitely_far(self) -> None:
        assert difference(sketched({"a": torch.ones(1)}), sketched({"b": torch.ones(1)})) == math.inf

    def test_a_parameter_without_gradient_is_compared_with_a_share_of_the_whole(self) -> None:
        """What TF32 leaves of zero passes, and so does what noise of length √p leaves; a wrong value does not."""
        whole = torch.full((100,), 1.0)  # of norm 10
        truth = sketched({"all": whole, "keys": torch.zeros(10_000)})
        random = torch.Generator().manual_seed(0)
        for error, passes in ((3e-8, True), (1e-6, True), (1e-4, False)):
            keys = torch.randn(10_000, generator=random) * error
            apart = difference(sketched({"all": whole, "keys": keys}), truth)
            assert 0.5 < apart / (error * 100 / (SMALL_SHARE * 10)) < 2
            assert (apart <= ROUNDED_TOLERANCE) == passes

    def test_what_is_not_finite_is_infinitely_far(self) -> None:
        truth = {True: sketched({"a": torch.ones(3), "b": torch.ones(3)})}
        rows = [
            Row(
                "w", "W", 1, OURS, [1.0], sketch=sketched({"a": torch.ones(3), "b": torch.full((3,), value)}), lots=True
            )
            for value in (1.0, math.nan, math.inf)
        ]
        for row in rows:
            compared(row, truth, TOLERANCE)
        assert [row.seconds for row in rows] == [[1.0], [], []]
        assert [row.apart for row in rows] == [0.0, None, None]
        assert rows[2].reason == "its clipped sums are inf from the definition's"
        json.dumps(rows[1].fields(), allow_nan=False)

    def test_what_is_summed_of_another_batch_is_not_compared(self) -> None:
        row = Row("w", "W", 1, "peer", [1.0], sketch=sketched({"a": torch.ones(3)}))
        compared(row, {True: sketched({"a": torch.zeros(3)})}, TOLERANCE)
        assert (row.seconds, row.apart) == ([1.0], None)

    def test_tolerance_is_larger_for_fewer_bits_only(self) -> None:
        half = replace(TINY, autocast=True)
        assert Settings("cuda").tolerance(TINY) == Settings("cpu").tolerance(half) == ROUNDED_TOLERANCE
        assert Settings("cuda", tf32=False).tolerance(TINY) == Settings("cpu").tolerance(TINY) == TOLERANCE

    def test_tf32_is_within_its_tolerance(self) -> None:
        """Ten layers whose factors are cut to the 10 bits of TF32, forward and backward, clipped example by example."""
        cut, exact = (self._clipped_by_hand(rounded) for rounded in (True, False))
        assert 1e-4 < difference(sketched(cut), sketched(exact)) < ROUNDED_TOLERANCE / 2

    @staticmethod
    def _clipped_by_hand(rounded: bool) -> dict[str, torch.Tensor]:
        def kept(x: torch.Tensor) -> torch.Tensor:
            return (x.detach().contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32) if rounded else x

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x, weight)
                return kept(x) @ kept(weight).T

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                x, weight = ctx.saved_tensors
                return kept(grads[0]) @ kept(weight), kept(grads[0]).T @ kept(x)

        random = torch.Generator().manual_seed(0)
        weights = [torch.randn(32, 32, generator=random) / 32**0.5 for _ in range(10)]
        inputs, labels = torch.randn(8, 32, generator=random), torch.arange(8)
        sums = {str(place): torch.zeros(32, 32) for place in range(10)}
        for x, label in zip(inputs, labels, strict=True):
            leaves = [weight.clone().requires_grad_() for weight in weights]
            y = x[None]
            for leaf in leaves:
                y = Product.apply(y, leaf).tanh()  # type: ignore[no-untyped-call]
            grads = torch.autograd.grad(torch.nn.functional.cross_entropy(y, label[None]), leaves)
            factor = min(1.0, CLIP / math.hypot(*(float(grad.norm()) for grad in grads)))
            for place, grad in enumerate(grads):
                sums[str(place)] += factor * grad
        return sums

    def test_the_definition_is_that_of_vmap_exactly(self) -> None:
        """The lot of dpgrad's first step, with its rule; TF32 is off whatever the settings are."""
        workload = replace(TINY, options={"rule": Hard()})
        batch = lot(workload, "cpu")
        with conditions(Settings("cpu")):
            found = definition(workload, batch, "cpu")
        truth = clipped_sum(
            workload.built("cpu"), workload.loss, batch, partial(Hard(), clip=CLIP), vmap.gradients
        ).sums
        assert found.keys() == truth.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, truth[name].float(), rtol=5e-3, atol=1e-6)  # dpgrad shortens factors

    def test_large_lots_and_views_are_not_defined_here(self) -> None:
        assert set(definitions("cpu", {True, False}, TINY)) == {True, False}
        assert definitions("cpu", {True}, replace(TINY, views=2)) == {}
        assert definitions("cpu", {True}, TINY.of(2000)) == {}

    def test_a_step_that_computes_something_else_is_found(self) -> None:
        """The sums are those of the step that is timed, not of one beside it: another rule shows in them."""
        halved = partial(ours, rule=lambda norms, clip: Hard()(norms, clip=clip) / 2)
        rows = list(measured("mlp", TINY, {EAGER: halved, OURS: ours}, ONCE))
        assert [bool(row.seconds) for row in rows] == [False, True]
        assert rows[0].apart is not None
        assert 0.25 < rows[0].apart < 1  # estimated: 0.5
        assert rows[0].reason.startswith("its clipped sums are 0.")

    def test_sums_of_groups_and_later_steps(self) -> None:
        """Noise differs by group and step: at the third step, where weights have moved, sums are still without it."""
        groups = (Group("1.*", noise_multiplier=2.0), Group("3.*", clip=0.5))
        prepared = ours(TINY, "cpu", groups=groups)
        for _ in range(3):
            prepared.step()
        assert prepared.sums is not None
        for value in prepared.sums().values():
            assert float(value.norm()) < 1.001 * 4 * prepared.share(1) * CLIP  # noise of 4,096 values is 64 long


def small_resnet() -> nn.Module:
    """All kinds of layers of ResNet-9, on images of 8 × 8."""

    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU())

    return nn.Sequential(
        nn.Sequential(*block(3, 4), nn.MaxPool2d(2)), Residual(block(4, 4), block(4, 4)),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip


def twice(batch: Any, generator: torch.Generator) -> Any:
    return tuple(leaf[:, None].expand(-1, 2, *leaf.shape[1:]) for leaf in batch)


def square_or_die(number: int) -> int:
    match number:
        case 2:
            os._exit(7)
        case 3:
            raise ValueError("three")
        case 4:
            time.sleep(3600)
    return number**2


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes begin as copies of this one, which has torch loaded."""
    if torch.cuda.is_available():
        pytest.skip("a copy of a process with threads of autograd cannot compute gradients")
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.mark.slow
class TestProcesses:
    @pytest.mark.usefixtures("forked")
    def test_a_process_that_dies_fails_or_hangs_says_so(self) -> None:
        workers = [Worker(partial(square_or_die, number)) for number in (1, 2, 3)]
        found = [worker.result(600.0) for worker in workers]
        assert found == [1, Failed("the process ended with status 7"), Failed("ValueError: three")]
        assert Worker(partial(square_or_die, 4)).result(0.5) == Failed("cut: no result within 0.5 s")

    @pytest.mark.usefixtures("forked")
    def test_engines_in_processes_of_their_own(self) -> None:
        """As on CUDA, where each has one: rows come one by one, and without a definition ours are compared."""
        workload = replace(TINY, views=2, options={"augment": twice})
        rows = list(race._one_by_one("mlp", workload, {ORDINARY: ordinary, OURS: ours, EAGER: ours, "b": broken}, ONCE))
        assert [row.reason for row in rows] == ["", "", "", "RuntimeError: no such kernel"]
        assert [row.apart for row in rows] == [None, None, 0.0, None]

    def test_peak_memory_is_measured_in_a_process_of_its_own(self) -> None:
        """One hidden layer on 1,024 rows of 64 floats takes at least the rows, 1/4 MiB, and far below a GiB."""
        (row,) = measured("mlp", TINY.of(1024), {OURS: ours}, ONCE, memory=True)
        assert row.mebibytes is not None
        assert 0.25 < row.mebibytes < 1024


class TestPeers:
    """The source tree's engines of others, which run only where the others are installed."""

    @pytest.fixture(autouse=True)
    def tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))

    @pytest.mark.parametrize(
        ("workload", "modes"),
        [
            (TINY, 4),
            (replace(TINY.of(5), microbatch=2), 4),  # virtual steps, the last of one example
            (replace(WORKLOADS["char-lstm"].of(3), shape=(5,)), 4),
            (WORKLOADS["gpt2-lora"].on("cpu").of(2), 4),
            pytest.param(WORKLOADS["llama"].on("cpu").of(2), 3, marks=pytest.mark.exhaustive),
        ],
        ids=["mlp", "parts", "char-lstm", "lora", "llama"],
    )
    def test_opacus_clips_alike(self, workload: Workload, modes: int) -> None:
        pytest.importorskip("opacus")
        if workload.title.startswith(("GPT", "Llama")):
            pytest.importorskip("transformers")
        peers = importlib.import_module("benchmarks.peers").ENGINES
        found = {name: engine for name, engine in peers.items() if name.startswith("opacus")}
        rows = list(measured("mlp", workload, engines("cpu") | found, ONCE))
        assert len(found) == 4
        ran = [row for row in rows if row.engine in found and not row.reason]
        assert len(ran) == modes
        assert all(row.apart is not None and row.apart < TOLERANCE for row in ran)
        assert results.best_peer(rows) in ran

    @pytest.mark.parametrize("name", ["mlp", "mnist-cnn", "resnet", "transformer"])
    def test_jax_clips_alike(self, name: str) -> None:
        pytest.importorskip("jax")
        peers = importlib.import_module("benchmarks.peers")
        workload = {
            "resnet": Workload("residual", small_resnet, (3, 8, 8), 3, 3),
            "transformer": transformer(128, 1, 6, 3),  # two heads
        }.get(name) or WORKLOADS[name].of(4)
        (row,) = measured(name, workload, {"jax": peers.ENGINES["jax vmap+jit"]}, ONCE)
        assert row.reason == ""
        assert 0 < (row.apart or 0) < 4e-3

    def test_jax_takes_the_kinds_of_layers_there_are(self) -> None:
        """The small network of the test above has every kind of layer of ResNet-9."""
        kinds = ({type(module) for module in make().modules()} for make in (resnet9, small_resnet))
        assert len(set(map(frozenset, kinds))) == 1

    def test_jax_says_what_it_is_not_written_for(self) -> None:
        pytest.importorskip("jax")
        peers = importlib.import_module("benchmarks.peers")
        (row,) = raced("lstm", WORKLOADS["lstm"].of(2), {"jax": peers.ENGINES["jax vmap+jit"]}, ONCE)
        assert row.reason == "ValueError: Recurrent is not written in JAX here"

    def test_profile_times_whole_periods(self, ticking: Clock) -> None:
        profile = importlib.import_module("benchmarks.profile")
        ticking.each = 1 / 2048
        assert profile.seconds(replace(ticking.engine(TINY, "cuda"), period=256)) == 1 / 2048
        assert ticking.steps == profile.WARM_UP + profile.BLOCKS * 256

    def test_ways_take_every_workload(self) -> None:
        ways = importlib.import_module("benchmarks.ways")
        assert {name for names in ways.USUAL.values() for name in names} <= WORKLOADS.keys()
        sums = ways.bodies(TINY.built("cpu"), TINY.loss, TINY.batch("cpu"), 4)
        assert all(sums[way]().keys() == sums["batched"]().keys() for way in ("lifted", "certified"))


class TestVerdicts:
    CASE = Case(TINY, time=1.2, memory=1.25, cpu=1.5)
    ROWS = (
        Row("mlp", "W", 1, ORDINARY, [1.0], mebibytes=200.0),
        Row("mlp", "W", 1, GRAPH, [0.5], mebibytes=100.0),
        Row("mlp", "W", 1, OURS, [0.625], 6.0, 120.0),
        Row("mlp", "W", 1, EAGER, [1.5], 6.0, 120.0),
        Row("mlp", "W", 1, "opacus ghost", [1.25]),
        Row("mlp", "W", 1, "opacus hooks", [2.5]),
    )

    def test_targets_of_a_device(self) -> None:
        found = [str(claim) for claim in results.claims(self.ROWS[2], self.ROWS, self.CASE, "cuda")]
        assert found == ["time ≤ 1.2", "memory ≤ 1.25", "set-up ≤ 5 s"]
        held = [claim.holds for claim in results.claims(self.ROWS[2], self.ROWS, self.CASE, "cuda")]
        assert held == [False, True, False]  # 1.25, 1.2 and 6 s
        (eager,) = results.claims(self.ROWS[3], self.ROWS, self.CASE, "cuda")
        assert (str(eager), eager.figure, eager.holds) == ("opacus ghost ≤ 1", 1.2, False)

    def test_targets_of_a_cpu(self) -> None:
        rows = [self.ROWS[0], *self.ROWS[2:3], *self.ROWS[4:]]
        found = results.claims(rows[1], rows, self.CASE, "cpu")
        assert [(str(claim), claim.holds) for claim in found] == [
            ("time ≤ 1.5", True), ("set-up ≤ 5 s", False), ("opacus ghost ≤ 1", True),
        ]  # fmt: skip

    def test_several_passes_are_allowed_their_time(self) -> None:
        assert CASES["mnist-cnn-momentum"].most == pytest.approx(3.45)
        assert Case(TINY).most is None

    def test_what_was_not_measured_does_not_hold(self) -> None:
        assert not results.Claim("memory", None, 1.0).holds

    def test_the_table_says_what_is_missed(self) -> None:
        rows = [replace(row, name="mlp-50") for row in self.ROWS if row.engine in (ORDINARY, OURS)]
        rows[1].seconds, rows[1].form = [2.0], "graphs"
        head, _, line = results.engine_table(rows, "cpu")
        found = dict(zip(head[1:], line[1:], strict=True))
        assert (found["target"], found["met"]) == ("time ≤ 1.6, set-up ≤ 5 s", "no: time 2.00, set-up 6.00")
        assert (found["form"], found["× non-private"], found["set-up s"]) == ("graphs", "2.00", "6.0")

    def test_an_absent_library_is_no_missed_target(self) -> None:
        head, *lines = results.engine_table(
            [
                Row("gpt2", "W", 1, OURS, reason="transformers is not installed"),
                Row("gpt2", "W", 1, EAGER, reason="no"),
            ],
            "cuda",
        )
        assert [line[head.index("met")] for line in lines] == ["", "no"]


RUN = {**where.environment("python -m benchmarks.steps"), "commit": "c", "source": "now"}


class TestReport:
    def made(self, file: Path, source: str = "now") -> results.Report:
        return results.Report({**RUN, "source": source}, {"device": "cpu"}, file)

    def test_every_row_is_written_at_once_and_runs_add_up(self, tmp_path: Path) -> None:
        file = tmp_path / "engines.json"
        first = self.made(file, "then")
        first.add(Row("mlp", "MLP", 4, OURS, [2.0]))
        assert json.loads(file.read_text("utf-8"))["rows"][0]["seconds"] == [2.0]
        second = self.made(file)
        for row in (Row("mlp", "MLP", 4, ORDINARY, [1.0]), Row("mnist-cnn", "CNN", 4, OURS, [3.0])):
            second.add(row)
        kept = json.loads(file.read_text("utf-8"))
        found = [(row["name"], row["engine"], row["source"]) for row in kept["rows"]]
        assert found == [("mnist-cnn", OURS, "now"), ("mlp", ORDINARY, "now"), ("mlp", OURS, "then")]
        assert kept["environment"]["source"] == "then"  # the whole table is not current
        assert "| MLP (4)" in file.with_suffix(".md").read_text("utf-8")
        second.add(Row("mlp", "MLP", 4, OURS, [5.0]))
        kept = json.loads(file.read_text("utf-8"))
        assert [row["seconds"] for row in kept["rows"]] == [[3.0], [1.0], [5.0]]
        assert kept["environment"]["source"] == "now"

    def test_what_was_measured_is_not_lost_to_what_was_left_out(self, tmp_path: Path) -> None:
        report = self.made(tmp_path / "engines.json")
        report.add(Row("gpt2", "GPT-2", 4, OURS, [2.0]))
        report.add(Row("gpt2", "GPT-2", 4, OURS, reason="transformers is not installed"))
        assert [row.seconds for row in report.rows] == [[2.0]]

    def test_results_of_another_device_or_form_are_not_mixed_in(self, tmp_path: Path) -> None:
        file = tmp_path / "engines.json"
        self.made(file).add(Row("mlp", "MLP", 4, OURS, [2.0]))
        assert results.Report(RUN, {"device": "cuda"}, file).rows == []
        file.write_text(
            json.dumps({"settings": {"device": "cpu"}, "rows": [{"workload": "MLP", "seconds": [1]}]}), "utf-8"
        )
        assert self.made(file).rows == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_every_engine_in_its_own_process_has_time_memory_and_set_up(self) -> None:
        workload = WORKLOADS["mnist-cnn"].of(64)
        rows = list(measured("mnist-cnn", workload, engines("cuda"), Settings("cuda", repeat=3)))
        assert [row.engine for row in rows] == list(engines("cuda"))
        assert [row.reason for row in rows if row.reason] == []
        assert {row.engine for row in rows if row.apart is not None} == {OURS, EAGER}
        assert all(len(row.seconds) == 3 and row.mebibytes and row.setup is not None for row in rows)

    @pytest.mark.parametrize("workload", [TINY, WORKLOADS["mnist-cnn"].of(64)], ids=["mlp", "cnn"])
    def test_sums_of_the_step_are_those_of_the_definition(self, workload: Workload) -> None:
        """In float32: noise of about 1 is taken off again, which leaves an error of 1e-7."""
        with conditions(Settings("cuda", tf32=False)):
            prepared = ours(workload, "cuda")
            prepared.step()
            assert prepared.sums is not None
            found, truth = prepared.sums(), definition(workload, lot(workload, "cuda"), "cuda")
        for name, value in truth.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=5e-3, atol=1e-5)


class TestCurves:
    @pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
    def test_exponent_of_a_power_is_found(self, power: float) -> None:
        points = [1, 2, 4, 16]
        assert curves.exponent(points, [3 * x**power for x in points]) == pytest.approx(power, abs=1e-12)

    def test_exponent_needs_two_points(self) -> None:
        assert curves.exponent([1, 2], [1.0, None]) is None
        assert curves.exponent([1, 2, 4], [1.0, None, 4.0]) == pytest.approx(1.0)

    def test_groups_of_a_stack(self) -> None:
        model = stack(2, 8)
        groups = curves._groups(4)["groups"]
        assert [group.pattern for group in groups] == ["00*", "01*", "10*", "11*"]
        assert all(sum(name.startswith(g.pattern[:-1]) for g in groups) == 1 for name, _ in model.named_parameters())
        with pytest.raises(ValueError, match="power of two up to 32, got 3"):
            curves._groups(3)

    @pytest.mark.parametrize(
        "name", ["batch", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("length", "history"))]
    )
    def test_a_curve_has_a_figure_at_each_point(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        if name == "history":
            monkeypatch.setitem(WORKLOADS, "mnist-cnn", TINY)
        points = [0, 1] if name == "history" else [2, 4]
        found = curves.curve(ONCE, points, name)
        assert list(found.seconds) == [ORDINARY, OURS]
        assert all(len(values) == 2 and None not in values for values in found.seconds.values())
        assert found.reasons == []
        assert None not in found.ratios
        slope = found.exponents[OURS]
        first, last = found.seconds[OURS]
        assert first is not None
        assert last is not None
        assert slope == pytest.approx(math.log2(last / first))
        assert len(results.curve_table(found)) == 5

    def test_scales_reach_what_is_asked_for(self) -> None:
        assert set(curves.SCALES) == {"batch", "width", "length", "depth", "groups", "history"}
        assert (curves.SCALES["batch"].points[0], curves.SCALES["batch"].points[-1]) == (64, 65_536)
        largest = curves.SCALES["batch"].workload(65_536)
        assert (largest.batch_size, largest.microbatch) == (65_536, 4096)
        assert (curves.SCALES["length"].points[0], curves.SCALES["length"].points[-1]) == (128, 2048)

    def test_plot_has_a_panel_a_curve(self) -> None:
        entry = {
            "label": "K₀", "workload": "MLP", "points": [0, 1], "seconds": {ORDINARY: [1.0, 1.0], OURS: [1.0, None]},
            "exponents": {ORDINARY: 0.0, OURS: None},
        }  # fmt: skip
        drawn = curves.plotted([entry, {**entry, "label": "width", "points": [1, 2]}])
        assert drawn.count('id="axes_') == 2
        assert drawn == curves.plotted([entry, {**entry, "label": "width", "points": [1, 2]}])


class TestWorkloads:
    @pytest.mark.parametrize("name", [name for name in CASES if name != "bert"])
    def test_model_takes_its_batch(self, name: str) -> None:
        if reason := missing(name):
            pytest.skip(reason)
        workload = CASES[name].workload.on("cpu").of(2)
        model, batch = workload.built("cpu"), workload.batch("cpu")
        assert workload.loss(model, batch).shape == (2 * workload.views,)
        assert torch.equal(batch[0], workload.batch("cpu")[0])
        again = workload.built("cpu").state_dict()
        assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())

    def test_sizes_are_those_of_the_field(self) -> None:
        with torch.device("meta"):
            bert = WORKLOADS["bert"].make()
        assert isinstance(bert, Transformer)
        assert 107e6 < sum(p.numel() for p in bert.parameters()) < 110e6  # BERT-base without pooler and third embedding
        sizes = {name: CASES[name].workload.on("cuda").batch_size for name in CASES}
        assert [sizes[name] for name in ("mnist-cnn", "resnet9", "bert", "wrn-16-4")] == [512, 512, 32, 256]
        assert [sizes[name] for name in ("vit-s16", "gpt2", "llama-bf16", "char-lstm")] == [64, 16, 16, 256]
        lots = CASES["wrn-16-4-lot"].workload
        assert (lots.batch_size, lots.microbatch) == (16_384, 1_024)
        assert sum(p.numel() for p in WORKLOADS["mnist-cnn"].make().parameters()) == 26_010

    @pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
    def test_sizes_of_transformers(self) -> None:
        for name, low, high in (("gpt2", 123e6, 125e6), ("llama", 170e6, 190e6), ("vit-s16", 21e6, 23e6)):
            with torch.device("meta"):
                model = WORKLOADS[name].make()
            assert low < sum(p.numel() for p in model.parameters()) < high

    def test_a_row_without_its_library_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.steps.hugging_face.installed", lambda: False)
        assert {name for name in CASES if missing(name)} == {*TRANSFORMERS, "gpt2-bf16", "llama-bf16"}
        assert missing("gpt2-bf16") == "transformers is not installed"

    @pytest.mark.parametrize("name", CASES)
    def test_a_row_can_be_sent_to_a_process(self, name: str) -> None:
        sent = pickle.loads(pickle.dumps((CASES[name].workload, list(engines("cuda").values()))))[0]
        assert (sent.title, sent.options) == (CASES[name].workload.title, CASES[name].workload.options)

    def test_rows_of_the_devices(self) -> None:
        assert len(usual("cuda")) == 19  # all of which something is asked
        assert set(usual("cpu")) == set(CASES)

    def test_data_are_where_they_should_be(self) -> None:
        inputs, labels = TINY.data("cpu")
        assert len(inputs) == len(labels) == 4 * LOTS
        held = replace(TINY, place=DATASET).data("cpu")
        assert isinstance(held, Examples)
        assert len(held) == 4 * LOTS
        assert torch.equal(held[5][0], inputs[5])
        assert torch.equal(replace(TINY, place=HOST).data("cpu")[0], inputs)

    def test_rows_repeat_where_there_are_many(self) -> None:
        inputs, labels = TINY.rows(5000, "cpu")
        assert torch.equal(inputs[4096:], inputs[:904])
        assert torch.equal(labels[4096:], labels[:904])
        assert len(inputs.unique(dim=0)) == 4096

    def test_the_loss_of_a_sequence_is_the_mean_over_its_tokens(self) -> None:
        workload = replace(WORKLOADS["char-lstm"].of(3), shape=(5,))
        model, (inputs, labels) = workload.built("cpu"), workload.batch("cpu")
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        one = nn.functional.cross_entropy(model(inputs[1:2])[0], labels[1])
        torch.testing.assert_close(workload.loss(model, (inputs, labels))[1], one)

    def test_autocast_is_bfloat16(self) -> None:
        model, batch = TINY.built("cpu"), TINY.batch("cpu")
        exact, rounded = TINY.loss(model, batch), replace(TINY, autocast=True).loss(model, batch)
        assert 0 < float((exact - rounded).detach().abs().max()) < 0.1

    def test_lora_adds_a_product_and_trains_only_that(self) -> None:
        frozen = nn.Linear(6, 4).requires_grad_(False)
        lora, x = Lora(frozen, 6, 4, 2), torch.randn(3, 6)
        product = lora.up.weight @ lora.down.weight
        torch.testing.assert_close(lora(x), x @ (frozen.weight + product).T + frozen.bias)
        assert {name for name, value in lora.named_parameters() if value.requires_grad} == {"down.weight", "up.weight"}

    @pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
    def test_lora_of_gpt2_trains_its_factors(self) -> None:
        model = WORKLOADS["gpt2-lora"].on("cpu").built("cpu")
        trained = {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}
        assert len(trained) == 4
        assert set(trained.values()) == {(8, 128), (384, 8)}


def test_environment_is_complete() -> None:
    found = where.environment("dpgrad bench --repeat 3")
    assert found["command"] == "dpgrad bench --repeat 3"
    assert {"date", "processor", "cores", "system", "python", "versions"} <= found.keys()
    assert {"dpgrad", "torch", "numpy", "scipy"} <= found["versions"].keys()
