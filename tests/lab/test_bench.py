"""The harness of `dpgrad bench`: what it times, compares and fits, on a network that takes no time."""

import importlib
import math
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from dpgrad.grads import clipped_sum, vmap
from dpgrad.lab.bench import costs, curves, results, where
from dpgrad.lab.bench.engines import CLIP, ORDINARY, OURS, VMAP, Prepared, engines, ordinary, ours
from dpgrad.lab.bench.race import (
    TOLERANCE,
    Failed,
    Row,
    Settings,
    _paced,
    compared,
    conditions,
    difference,
    longer,
    measured,
    raced,
    reference,
    sketched,
    streamed,
)
from dpgrad.lab.bench.workloads import USUAL, WORKLOADS, Transformer, Workload, loss, stack
from dpgrad.scaling import Hard

ONCE = Settings("cpu", repeat=1, threads=1)
TINY = WORKLOADS["mlp"].of(4)


def broken(workload: Workload, device: str) -> Prepared:
    raise RuntimeError("no such kernel\nand many more lines")


class Clock:
    """Time that passes only where a step says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0

    def perf_counter(self) -> float:
        return self.now

    def engine(self, workload: Workload, device: str) -> Prepared:
        """Steps of 1/128 s, which adds up without rounding."""
        return Prepared(self.step, lambda: None)

    def step(self) -> None:
        self.steps += 1
        self.now += 1 / 128


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("dpgrad.lab.bench.race.time", clock)
    return clock


def breaking(workload: Workload, device: str) -> Prepared:
    steps = iter(range(3))
    return Prepared(lambda: next(steps), lambda: None)


class TestRace:
    def test_rows_of_every_engine_of_ours(self) -> None:
        rows = raced(TINY, engines("cpu"), ONCE)
        assert [row.engine for row in rows] == [ORDINARY, OURS, VMAP]
        assert all(len(row.seconds) == 1 and row.seconds[0] > 0 and not row.reason for row in rows)
        compared(rows, VMAP, OURS)
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
        assert _paced(prepared, "cuda", 2, 1) == 3  # 20 ms of steps of 7.8 ms
        assert clock.steps == 27  # one, then 0.2 s
        assert _paced(prepared, "cuda", 2, 100) == 100
        assert _paced(prepared, "cpu", 2, 1) == 1

    def test_ratios_are_medians_within_rounds(self) -> None:
        one, other = Row("w", 1, "a", [2.0, 30.0, 4.0]), Row("w", 1, "b", [1.0, 10.0, 2.0])
        assert longer(one, other) == 2.0
        assert longer(one, Row("w", 1, "c")) is None

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

    def test_an_engine_that_computes_something_else_is_not_timed(self) -> None:
        right = Row("w", 1, VMAP, [1.0], sketch=sketched({"a": torch.ones(9)}))
        wrong = Row("w", 1, "peer", [1.0], sketch=sketched({"a": torch.zeros(9)}))
        compared([right, wrong], VMAP, OURS)
        assert right.seconds == [1.0]
        assert wrong.seconds == []
        assert wrong.reason.startswith("its clipped sums are ")

    def test_sums_are_those_of_the_definition(self) -> None:
        prepared = ours(TINY, "cpu", captured=False)
        assert prepared.sums is not None
        model, batch = TINY.built("cpu"), TINY.batch("cpu")
        truth = clipped_sum(model, loss, batch, partial(Hard(), clip=CLIP), vmap.gradients).sums
        for name, value in prepared.sums().items():
            torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-6)


def square_or_die(number: int) -> int:
    match number:
        case 2:
            os._exit(7)
        case 3:
            raise ValueError("three")
        case 4:
            time.sleep(60)
    return number**2


@pytest.mark.slow
class TestProcesses:
    def test_a_process_that_dies_fails_or_hangs_costs_its_own_item_only(self) -> None:
        found = list(streamed(square_or_die, [1, 2, 3, 4], 5.0))
        assert found == [
            1,
            Failed("the process ended with status 7"),
            Failed("ValueError: three"),
            Failed("cut: no result within 5 s"),
        ]

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
        compared(rows, VMAP, OURS)
        assert not [row.reason for row in rows if row.reason]
        assert len(modes) == 4
        assert all(0 < (row.apart or 0) < TOLERANCE for row in rows if row.engine in modes)
        assert results.best_peer(rows) in rows[3:]

    @pytest.mark.parametrize("name", ["mlp", "mnist-cnn"])
    def test_jax_clips_alike(self, name: str) -> None:
        pytest.importorskip("jax")
        peers = importlib.import_module("benchmarks.peers")
        rows = raced(WORKLOADS[name].of(4), {VMAP: engines("cpu")[VMAP], "jax": peers.ENGINES["jax vmap+jit"]}, ONCE)
        compared(rows, VMAP, OURS)
        assert rows[1].reason == ""
        assert 0 < (rows[1].apart or 0) < TOLERANCE

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
            ["W: time at most 0.67 × fastest Opacus", "0.50 (opacus ghost)", "yes"],
            ["W: memory at most that of it", "2.00 (opacus ghost)", "**no**, 2.00 ×"],
        ]
        assert [line[2] for line in claims(rows, None)] == ["yes", "**no**, 2.00 ×"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_every_engine_in_its_own_process_has_time_and_memory(self) -> None:
        settings = Settings("cuda", repeat=2)
        rows = measured([WORKLOADS["mlp"], WORKLOADS["mnist-cnn"].of(64)], engines("cuda"), settings)
        assert len(rows) == 10
        assert [row.reason for row in rows if row.reason] == []
        assert all(len(row.seconds) == 2 and row.mebibytes for row in rows)


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
