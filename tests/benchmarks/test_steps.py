"""The harness of `dpgrad bench`: what it times, compares and fits, on a network that takes no time."""

import importlib
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.steps import costs, curves, results, where
from benchmarks.steps.engines import CLIP, EAGER, ORDINARY, OURS, VMAP, Prepared, definition, engines, ordinary, ours
from benchmarks.steps.race import (
    SMALL_SHARE,
    TF32_TOLERANCE,
    TOLERANCE,
    Failed,
    Row,
    Settings,
    compared,
    conditions,
    difference,
    longer,
    measured,
    paced,
    quartiles,
    raced,
    reference,
    sketched,
    streamed,
    timed,
)
from benchmarks.steps.workloads import (
    USUAL,
    WORKLOADS,
    Residual,
    Transformer,
    Workload,
    loss,
    resnet9,
    stack,
    transformer,
)
from torch import nn

from dpgrad.grads import clipped_sum, vmap
from dpgrad.grads.scaling import Hard
from dpgrad.grads.sums import ClippedSum
from dpgrad.mechanism.mechanism import Group
from dpgrad.training import graph
from dpgrad.training.private import PrivateGradient

ONCE = Settings("cpu", repeat=1, threads=1)
TINY = WORKLOADS["mlp"].of(4)


def broken(workload: Workload, device: str) -> Prepared:
    raise RuntimeError("no such kernel\nand many more lines")


class Clock:
    """Time that passes only where a step says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.each = 1 / 128
        self.tables = 0.0  # what every 256th step takes longer

    def perf_counter(self) -> float:
        return self.now

    def engine(self, workload: Workload, device: str) -> Prepared:
        """Steps of 1/128 s, which adds up without rounding."""
        return Prepared(self.step, lambda: None, period=256 if self.tables else 1)

    def step(self) -> None:
        self.now += self.each + (0.0 if self.steps % 256 else self.tables)
        self.steps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("benchmarks.steps.race.time", clock)
    return clock


def breaking(workload: Workload, device: str) -> Prepared:
    steps = iter(range(3))
    return Prepared(lambda: next(steps), lambda: None)


class TestRace:
    def test_rows_of_every_engine_of_ours(self) -> None:
        rows = raced(TINY, engines("cpu"), ONCE)
        assert [row.engine for row in rows] == [ORDINARY, OURS, VMAP]
        assert all(len(row.seconds) == 1 and row.seconds[0] > 0 and not row.reason for row in rows)
        compared(rows, VMAP, OURS, TOLERANCE)
        assert rows[0].apart is None  # it clips nothing
        assert rows[1].apart is not None
        assert rows[1].apart < TOLERANCE

    def test_an_engine_that_raises_shows_its_reason_and_others_run(self) -> None:
        first, second = raced(TINY, {"broken": broken, ORDINARY: ordinary}, ONCE)
        assert (first.seconds, first.reason) == ([], "RuntimeError: no such kernel")
        assert second.seconds
        assert any("RuntimeError: no such kernel" in line for line in results.engine_table([first, second])[1])

    def test_an_engine_that_raises_later_has_no_figure(self) -> None:
        (row,) = raced(TINY, {"breaking": breaking}, Settings("cpu", repeat=3, threads=1))
        assert (row.seconds, row.reason) == ([], "StopIteration: ")

    def test_a_slow_engine_is_cut_and_says_so(self, clock: Clock) -> None:
        settings = Settings("cpu", repeat=9, threads=1, limit=0.01)
        (row,) = raced(TINY, {"slow": clock.engine}, settings)
        assert row.reason == "cut after 2 of 9 rounds: over 0.01 s"
        assert row.seconds == [1 / 128, 1 / 128]
        assert results.engine_table([row])[1][2] == "7.81 (cut after 2 of 9 rounds: over 0.01 s)"

    def test_a_device_is_timed_in_blocks_after_it_is_warm(self, clock: Clock) -> None:
        prepared = clock.engine(TINY, "cuda")
        assert paced(prepared, "cuda", 2, 1) == 6  # 0.05 s of steps of 7.8 ms
        assert clock.steps == 27  # one, then 0.2 s
        assert paced(prepared, "cuda", 2, 100) == 100
        assert paced(prepared, "cpu", 2, 1) == 1

    def test_every_block_of_short_steps_pays_for_the_tables(self, clock: Clock) -> None:
        """Of 1/2048 s, and every 256th of 1/64 s more: however the blocks fall, each of 256 holds one of these."""
        clock.each, clock.tables = 1 / 2048, 1 / 64
        prepared = clock.engine(TINY, "cuda")
        assert paced(prepared, "cuda") == 256
        assert {timed(prepared, 256) for _ in range(5)} == {1 / 2048 + 1 / 64 / 256}

    @pytest.mark.parametrize(("each", "many"), [(1 / 512, 256), (1 / 256, 13)])
    def test_a_block_holds_a_whole_period_while_that_is_half_a_second(
        self, clock: Clock, each: float, many: int
    ) -> None:
        clock.each, clock.tables = each, 1 / 64
        assert paced(clock.engine(TINY, "cuda"), "cuda") == many

    def test_one_slow_step_does_not_decide_how_many_are_timed(self, clock: Clock) -> None:
        """The step that fills tables ends the 0.2 s of warming up more often than any other."""
        clock.each, clock.tables, clock.steps = 1 / 2048, 1.0, 200
        prepared = Prepared(clock.step, lambda: None)
        assert paced(prepared, "cuda") == 102  # 0.05 s, none of it a second
        assert clock.steps == 257

    def test_the_captured_step_tells_its_period(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []

        class Fake:
            def __init__(self, private: PrivateGradient, data: object, optimizer: object) -> None:
                made.append(private)

            step = settle = staticmethod(lambda: None)

        monkeypatch.setattr("benchmarks.steps.engines.CapturedStep", Fake)
        assert ours(TINY, "cpu", captured=True).period == graph.MOST_AHEAD
        assert ours(TINY, "cpu", captured=False).period == 1
        assert len(made) == 1

    def test_ratios_are_medians_within_rounds(self) -> None:
        one, other = Row("w", 1, "a", [2.0, 30.0, 4.0]), Row("w", 1, "b", [1.0, 10.0, 2.0])
        assert longer(one, other) == 2.0
        assert longer(one, Row("w", 1, "c")) is None
        assert quartiles(one, other) == (2.0, 2.5)
        assert quartiles(Row("w", 1, "a", [2.0]), other) is None

    def test_the_graph_is_the_reference_where_it_ran(self) -> None:
        plain, graph = Row("w", 1, "non-private", [2.0]), Row("w", 1, "non-private graph", [1.0])
        assert reference([plain, graph]) is graph
        assert reference([plain, Row("w", 1, "non-private graph", reason="none")]) is plain

    def test_conditions_are_put_back(self) -> None:
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision, torch.get_num_threads()
        with conditions(Settings("cpu", threads=before[1] + 1, tf32=True)):
            assert (matmul.fp32_precision, torch.get_num_threads()) == ("tf32", before[1] + 1)
        with conditions(Settings("cpu", tf32=False)):
            assert matmul.fp32_precision == "ieee"
        assert (matmul.fp32_precision, torch.get_num_threads()) == before


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
            assert (apart <= TF32_TOLERANCE) == passes

    def test_what_is_not_finite_is_infinitely_far(self) -> None:
        truth = sketched({"a": torch.ones(3), "b": torch.ones(3)})
        rows = [
            Row("w", 1, name, [1.0], sketch=sketched({"a": torch.ones(3), "b": torch.full((3,), value)}))
            for name, value in ((VMAP, 1.0), ("peer", math.nan), ("other peer", math.inf))
        ]
        rows[0].definition = truth
        compared(rows, VMAP, OURS, TOLERANCE)
        assert [row.seconds for row in rows] == [[1.0], [], []]
        assert [row.apart for row in rows] == [0.0, None, None]
        assert rows[2].reason == "its clipped sums are inf from the definition's"
        json.dumps(rows[1].fields(), allow_nan=False)

    def test_tolerance_is_larger_in_tf32_only(self) -> None:
        assert Settings("cuda").tolerance == TF32_TOLERANCE
        assert Settings("cuda", tf32=False).tolerance == Settings("cpu").tolerance == TOLERANCE

    def test_tf32_is_within_its_tolerance(self) -> None:
        """Ten layers whose factors are cut to the 10 bits of TF32, forward and backward, clipped example by example."""
        cut, exact = (self._clipped_by_hand(rounded) for rounded in (True, False))
        assert 1e-4 < difference(sketched(cut), sketched(exact)) < TF32_TOLERANCE / 2

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

    def test_sums_are_formed_as_timed_and_the_definition_exactly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = {}
        found = {"a": torch.ones(3)}

        def sums(*arguments: object) -> dict[str, torch.Tensor]:
            seen["sums"] = torch.backends.cuda.matmul.fp32_precision
            return found

        def exactly(*arguments: object) -> ClippedSum:
            seen["definition"] = torch.backends.cuda.matmul.fp32_precision
            return ClippedSum(found)

        monkeypatch.setattr("benchmarks.steps.engines.clipped_sum", exactly)

        def engine(workload: Workload, device: str) -> Prepared:
            return Prepared(lambda: None, lambda: None, sums, definition=partial(definition, workload, device))

        (row,) = raced(TINY, {VMAP: engine}, ONCE)
        assert seen == {"sums": "tf32", "definition": "ieee"}
        assert row.sketch == row.definition == sketched(found)

    def test_a_step_that_computes_something_else_is_found(self) -> None:
        """The sums are those of the step that is timed, not of one beside it: another rule shows in them."""
        other = partial(ours, captured=False, rule=lambda norms, clip: Hard()(norms, clip=clip) / 2)
        rows = raced(TINY, {OURS: partial(ours, captured=False), "other": other, VMAP: engines("cpu")[VMAP]}, ONCE)
        compared(rows, VMAP, OURS, TOLERANCE)
        assert [bool(row.seconds) for row in rows] == [True, False, True]

    def test_sums_of_groups_and_later_steps(self) -> None:
        """Noise differs by group and step: at the third step, where weights have moved, sums are still without it."""
        workload = WORKLOADS["mlp"].of(3)
        groups = (Group("1.*", noise_multiplier=2.0), Group("3.*", clip=0.5))
        prepared = ours(workload, "cpu", captured=False, groups=groups)
        for _ in range(2):
            prepared.step()
        assert prepared.sums is not None
        for value in prepared.sums().values():
            assert float(value.norm()) < 1.001 * 3 * CLIP  # noise of 4,096 values is 64 long

    def test_an_engine_that_computes_something_else_is_not_timed(self) -> None:
        ones = sketched({"a": torch.ones(9)})
        right = Row("w", 1, VMAP, [1.0], sketch=ones, definition=ones)
        wrong = Row("w", 1, "peer", [1.0], sketch=sketched({"a": torch.zeros(9)}))
        compared([right, wrong], VMAP, OURS, TOLERANCE)
        assert right.seconds == [1.0]
        assert wrong.seconds == []
        assert wrong.reason.startswith("its clipped sums are ")

    def test_without_the_definition_others_are_compared_with_ours(self) -> None:
        own, peer = (Row("w", 1, name, [1.0], sketch=sketched({"a": torch.ones(9)})) for name in (OURS, "peer"))
        compared([Row("w", 1, VMAP, reason="out of memory"), own, peer], VMAP, OURS, TOLERANCE)
        assert (own.apart, peer.apart) == (None, 0.0)

    def test_sums_are_those_of_the_definition(self) -> None:
        prepared = ours(TINY, "cpu", captured=False)
        assert prepared.sums is not None
        model, batch = TINY.built("cpu"), TINY.batch("cpu")
        truth = clipped_sum(model, loss, batch, partial(Hard(), clip=CLIP), vmap.gradients).sums
        for name, value in prepared.sums().items():
            torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-6)


def small_resnet() -> nn.Module:
    """All kinds of layers of ResNet-9, on images of 8 × 8."""

    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU())

    return nn.Sequential(
        nn.Sequential(*block(3, 4), nn.MaxPool2d(2)), Residual(block(4, 4), block(4, 4)),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip


def square_or_die(number: int) -> int:
    match number:
        case 2:
            os._exit(7)
        case 3:
            raise ValueError("three")
        case 4:
            time.sleep(3600)
    return number**2


@pytest.mark.slow
class TestProcesses:
    def test_a_process_that_dies_fails_or_hangs_costs_its_own_item_only(self) -> None:
        found = list(streamed(square_or_die, [1, 2, 3, 5], 600.0))
        assert found == [1, Failed("the process ended with status 7"), Failed("ValueError: three"), 25]
        assert list(streamed(square_or_die, [4], 0.5)) == [Failed("cut: no result within 0.5 s")]

    def test_peak_memory_is_measured_in_a_process_of_its_own(self) -> None:
        """One hidden layer on 4,096 rows of 64 floats takes at least the rows, 1 MiB, and far below a GiB."""
        (row,) = measured([WORKLOADS["mlp"].of(4096)], {OURS: partial(ours, captured=False)}, ONCE)
        assert row.mebibytes is not None
        assert 1 < row.mebibytes < 1024


class TestPeers:
    """The source tree's engines of others, which run only where the others are installed."""

    @pytest.fixture(autouse=True)
    def tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))

    def test_opacus_clips_alike(self) -> None:
        pytest.importorskip("opacus")
        peers = importlib.import_module("benchmarks.peers")
        modes = {name: engine for name, engine in peers.ENGINES.items() if name.startswith("opacus")}
        rows = raced(TINY, engines("cpu") | modes, ONCE)
        compared(rows, VMAP, OURS, TOLERANCE)
        assert not [row.reason for row in rows if row.reason]
        assert len(modes) == 4
        assert all(0 < (row.apart or 0) < TOLERANCE for row in rows if row.engine in modes)
        assert results.best_peer(rows) in rows[3:]

    @pytest.mark.parametrize("name", ["mlp", "mnist-cnn", "resnet", "transformer"])
    def test_jax_clips_alike(self, name: str) -> None:
        pytest.importorskip("jax")
        peers = importlib.import_module("benchmarks.peers")
        workload = {
            "resnet": Workload("residual", small_resnet, (3, 8, 8), 3, 3),
            "transformer": transformer(128, 1, 6, 3),  # two heads
        }.get(name) or WORKLOADS[name].of(4)
        rows = raced(workload, {VMAP: engines("cpu")[VMAP], "jax": peers.ENGINES["jax vmap+jit"]}, ONCE)
        compared(rows, VMAP, OURS, TOLERANCE)
        assert rows[1].reason == ""
        assert 0 < (rows[1].apart or 0) < 4e-3  # dpgrad shortens factors by 1.1e-3

    def test_jax_takes_the_kinds_of_layers_there_are(self) -> None:
        """The small network of the test above has every kind of layer of ResNet-9."""
        kinds = ({type(module) for module in make().modules()} for make in (resnet9, small_resnet))
        assert len(set(map(frozenset, kinds))) == 1

    def test_jax_says_what_it_is_not_written_for(self) -> None:
        pytest.importorskip("jax")
        peers = importlib.import_module("benchmarks.peers")
        (row,) = raced(WORKLOADS["lstm"].of(2), {"jax": peers.ENGINES["jax vmap+jit"]}, ONCE)
        assert row.reason == "ValueError: Recurrent is not written in JAX here"

    def test_profile_pays_for_the_tables(self, clock: Clock) -> None:
        profile = importlib.import_module("benchmarks.profile")
        clock.each, clock.tables = 1 / 2048, 1 / 64
        assert profile.seconds(clock.engine(TINY, "cuda")) == 1 / 2048 + 1 / 64 / 256

    def test_verdicts(self) -> None:
        claims = importlib.import_module("benchmarks.engines").claims
        rows = [
            Row("W", 1, ORDINARY, [1.0], 100.0),
            Row("W", 1, "non-private graph", [0.5], 100.0),
            Row("W", 1, OURS, [0.625], 120.0),
            Row("W", 1, "opacus ghost", [1.25], 60.0),
            Row("W", 1, "opacus hooks", [2.5], 600.0),
        ]
        assert claims(rows, 1.2) == [
            ["W: time at most 1.2 × non-private graph", "1.25", "**no**, 1.04 ×"],
            ["W: memory at most 1.3 × non-private", "1.20", "yes"],
            ["W: time at most 0.67 × fastest Opacus that ran", "0.50 (opacus ghost)", "yes"],
            ["W: memory at most that of it", "2.00 (opacus ghost)", "**no**, 2.00 ×"],
        ]
        assert [line[2] for line in claims(rows, None)] == ["yes", "**no**, 2.00 ×"]
        rows[2].seconds, rows[2].reason = [], "its clipped sums are 0.7 from the definition's"
        assert claims(rows, None) == [["W: a step", rows[2].reason, "**no**"]]

    @pytest.mark.parametrize(
        ("seconds", "measured", "holds"),
        [
            ([0.5, 0.75, 0.75], "0.75 (0.62 to 0.75)", "yes"),
            ([0.875, 0.75, 1.25, 1.5, 1.0], "1.00 (0.88 to 1.25)", "yes, within the noise of the rounds"),
            ([0.875, 0.75, 1.25, 1.5, 1.125], "1.12 (0.88 to 1.25)", "**no**, 1.12 ×, within the noise of the rounds"),
            ([1.5, 1.25, 2.0], "1.50 (1.38 to 1.75)", "**no**, 1.50 ×"),
        ],
    )
    def test_a_verdict_tells_the_spread_of_the_rounds(self, seconds: list[float], measured: str, holds: str) -> None:
        claims = importlib.import_module("benchmarks.engines").claims
        rows = [Row("W", 1, ORDINARY, [1.0]), Row("W", 1, OURS, seconds), Row("W", 1, "opacus ew", [1.0] * 5)]
        asked = "W: time at most 1.00 × fastest Opacus that ran"
        assert claims(rows, None) == [[asked, f"{measured} (opacus ew)", holds]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_every_engine_in_its_own_process_has_time_and_memory(self) -> None:
        settings = Settings("cuda", repeat=2)
        rows = measured([WORKLOADS["mlp"], WORKLOADS["mnist-cnn"].of(64)], engines("cuda"), settings)
        assert len(rows) == 2 * len(engines("cuda"))
        for here in results.by_workload(rows):
            compared(here, VMAP, OURS, settings.tolerance)
            assert {row.engine for row in here if row.apart is not None} == {OURS, EAGER, VMAP}
        assert [row.reason for row in rows if row.reason] == []
        assert all(len(row.seconds) == 2 and row.mebibytes for row in rows)

    @pytest.mark.parametrize("workload", [TINY, WORKLOADS["mnist-cnn"].of(64)], ids=["mlp", "cnn"])
    def test_sums_of_the_captured_step_are_those_of_the_definition(self, workload: Workload) -> None:
        """In float32: noise of about 1 is taken off again, which leaves an error of 1e-7."""
        with conditions(Settings("cuda", tf32=False)):
            prepared = ours(workload, "cuda", captured=True)
            assert prepared.sums is not None
            found, truth = prepared.sums(), definition(workload, "cuda")
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

    @pytest.mark.parametrize("name", ["batch", "length", "history"])
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
        assert (curves.SCALES["batch"].points[0], curves.SCALES["batch"].points[-1]) == (64, 8192)
        assert (curves.SCALES["length"].points[0], curves.SCALES["length"].points[-1]) == (128, 2048)

    def test_plot_has_a_panel_a_curve(self) -> None:
        entry = {
            "label": "K₀", "workload": "MLP", "points": [0, 1], "seconds": {ORDINARY: [1.0, 1.0], OURS: [1.0, None]},
            "exponents": {ORDINARY: 0.0, OURS: None},
        }  # fmt: skip
        drawn = curves.plotted([entry, {**entry, "label": "width", "points": [1, 2]}])
        assert drawn.count('id="axes_') == 2
        assert drawn == curves.plotted([entry, {**entry, "label": "width", "points": [1, 2]}])


class TestCosts:
    def test_every_rule_beside_hard(self) -> None:
        rows = costs.rules(ONCE, TINY)
        assert [row.engine for row in rows] == ["Hard", "Automatic", "Psac", "Psasc"]
        table = results.cost_table(rows, "eager")
        assert [line[3] for line in table[:2]] == ["× plain", "1.00"]

    def test_history_and_diagnostics(self) -> None:
        rows = costs.additions(ONCE, TINY)
        assert not [row.reason for row in rows if row.reason]
        assert len(rows) == 6

    def test_poisson_beside_fixed(self) -> None:
        rows = costs.poisson(ONCE, 3, TINY)
        assert [row.engine for row in rows] == [ORDINARY, "fixed batches", "Poisson batches"]
        rows[0].seconds, rows[1].seconds, rows[2].seconds = [0.002], [0.004], [0.004, 0.012]
        last = results.poisson_table(rows)[-1]
        assert last[2:] == ["8", "2e+03", "4.00", "2.00"]


class TestWorkloads:
    @pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "bert"])
    def test_model_takes_its_batch(self, name: str) -> None:
        workload = WORKLOADS[name].of(2)
        model, batch = workload.built("cpu"), workload.batch("cpu")
        assert loss(model, batch).shape == (2,)
        assert torch.equal(batch[0], workload.batch("cpu")[0])
        again = workload.built("cpu").state_dict()
        assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())

    def test_sizes_are_those_of_the_field(self) -> None:
        with torch.device("meta"):
            bert = WORKLOADS["bert"].make()
        assert isinstance(bert, Transformer)
        assert 107e6 < sum(p.numel() for p in bert.parameters()) < 110e6  # BERT-base without pooler and third embedding
        assert [WORKLOADS[name].on("cuda").batch_size for name in ("mnist-cnn", "resnet9", "bert")] == [512, 512, 32]
        assert sum(p.numel() for p in WORKLOADS["mnist-cnn"].make().parameters()) == 26_010
        assert {name for names in USUAL.values() for name in names} <= WORKLOADS.keys()


def test_environment_is_complete() -> None:
    found = where.environment("dpgrad bench --repeat 3")
    assert found["command"] == "dpgrad bench --repeat 3"
    assert {"date", "processor", "cores", "system", "python", "versions"} <= found.keys()
    assert {"dpgrad", "torch", "numpy", "scipy"} <= found["versions"].keys()
