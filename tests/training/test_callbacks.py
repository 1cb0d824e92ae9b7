"""Callbacks: when they are called and with what, what the ready ones write, and what an error or a resume does."""

import csv
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpgrad
import spread
from dpgrad import CSVLog
from dpgrad.errors import OptionError, RunError
from dpgrad.reports.chart import Chart
from dpgrad.training.callbacks import Callbacks
from dpgrad.training.curves import Point, Progress
from dpgrad.training.diagnostics import Diagnostics
from dpgrad.training.fit import Fitted, ResumeWarning

STEPS = 6
SETTINGS: dict[str, Any] = {
    "steps": STEPS, "batch_size": 8, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 3, "evaluate_every": 2,
    "accountant": "rdp", "checkpoint_every": 2,
}  # fmt: skip
HELD_OUT = "held_out (outside the guarantee)"


def rows(count: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :2].argmax(1)


def fitted(*callbacks: Any, data: Any = None, **options: Any) -> Fitted:
    torch.manual_seed(0)
    given = SETTINGS | {"held_out": rows(5, seed=2), "callbacks": callbacks} | options
    return spread.fit(nn.Linear(3, 2), rows() if data is None else data, **given)


@pytest.fixture(autouse=True)
def _nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chart, "html", lambda _: "<svg/>")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fitted, bytes]:
    """A run without errors, and its log."""
    folder = tmp_path_factory.mktemp("whole")
    found = fitted(CSVLog(folder / "log"), folder=folder / "run", release=lambda folder, fitted: None)
    return found, (folder / "log").read_bytes()


class Seen:
    """Everything that a callback is shown, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def at_start(self, progress: Progress) -> None:
        self.calls.append(("start", progress))

    def after_step(self, progress: Progress) -> None:
        self.calls.append(("step", progress))

    def after_evaluation(self, point: Point) -> None:
        self.calls.append(("evaluation", point))

    def at_end(self, fitted: Fitted) -> None:
        self.calls.append(("end", fitted))

    def named(self, name: str) -> list[Any]:
        return [shown for kind, shown in self.calls if kind == name]


def logged(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_when_each_is_called_and_with_what() -> None:
    seen = Seen()
    found = fitted(seen)
    assert [kind for kind, _ in seen.calls] == ["start", *["step", "evaluation", "step"] * 3, "end"]
    assert [progress.step for progress in seen.named("step")] == [1, 2, 3, 4, 5, 6]
    assert tuple(seen.named("evaluation")) == found.curves
    assert seen.named("end") == [found]
    (start,) = seen.named("start")
    assert (start.step, start.steps, start.resumed) == (0, STEPS, False)
    for progress in seen.named("step"):
        assert (progress.delta, progress.noise_multiplier) == (1e-3, 1.0)
        assert (progress.clip, progress.learning_rate) == (found.plan.mechanism.clip, found.plan.learning_rate_at(0))
        assert 0 < progress.epsilon <= found.guarantee.epsilon


def test_a_function_and_methods_may_stop_a_run() -> None:
    class Enough:
        def after_evaluation(self, point: Point) -> bool:
            return point.step == 4

    seen: list[int] = []
    found = fitted(Enough(), lambda progress: seen.append(progress.step))
    assert (found.stopped, seen) == ("interrupted", [1, 2, 3, 4])
    assert found.guarantee == found.plan.guarantee
    assert fitted(lambda progress: progress.step == 1).curves[-1].step == 1


@pytest.mark.parametrize("one", [3, "log.csv", CSVLog, object(), None])
def test_what_is_no_callback_is_refused(one: Any) -> None:
    with pytest.raises(OptionError, match=r"^callbacks must be functions of a Progress, or objects with a method"):
        Callbacks.of([one])


def test_diagnostics_stay_among_the_callbacks() -> None:
    seen = Seen()
    assert fitted(Diagnostics(), seen).diagnostics is not None
    with pytest.raises(OptionError, match="at most one Diagnostics"):
        Callbacks.of([Diagnostics(), Diagnostics()])


def test_an_error_at_the_end_does_not_lose_the_result() -> None:
    class Late:
        def at_end(self, fitted: Fitted) -> None:
            raise OSError("no space")

    with pytest.warns(UserWarning, match=r"the run is complete, but Late\.at_end raised OSError: no space"):
        assert fitted(Late()).stopped == "plan"


class TestCSVLog:
    def test_a_row_for_each_step(self, tmp_path: Path) -> None:
        seen = Seen()
        found = fitted(seen, CSVLog(tmp_path / "new" / "log.csv"))
        written = logged(tmp_path / "new" / "log.csv")
        assert list(written[0]) == [
            "step", "epsilon", "delta", "learning_rate", "clip", "noise_multiplier", HELD_OUT,
        ]  # fmt: skip
        for row, progress in zip(written, seen.named("step"), strict=True):
            assert [float(row[name]) for name in list(row)[:-1]] == [
                progress.step, progress.epsilon, 1e-3, progress.learning_rate, progress.clip, 1.0,
            ]  # fmt: skip
        judged = {point.step: point.held_out for point in found.curves}
        assert {int(row["step"]): float(row[HELD_OUT]) for row in written if row[HELD_OUT]} == judged

    def test_nothing_private_is_written(self, tmp_path: Path) -> None:
        """What is written but for the metric is the same for other rows."""
        for name, seed in (("one", 1), ("other", 7)):
            fitted(CSVLog(tmp_path / name), data=rows(seed=seed))
        one, other = ([list(row.values())[:-1] for row in logged(tmp_path / name)] for name in ("one", "other"))
        assert one == other

    def test_a_run_that_is_stopped_has_its_last_metric(self, tmp_path: Path) -> None:
        found = fitted(CSVLog(tmp_path / "log"), lambda progress: progress.step == 3)
        last = logged(tmp_path / "log")[-1]
        assert (last["step"], float(last[HELD_OUT])) == ("3", found.held_out)

    def test_rows_of_another_run_are_not_overwritten(self, tmp_path: Path) -> None:
        fitted(CSVLog(tmp_path / "log"))
        before = (tmp_path / "log").read_bytes()
        ledger = dpgrad.Ledger(tmp_path / "spent.jsonl")
        with pytest.raises(RunError, match="has the rows of another run: choose another file, or resume that run"):
            fitted(CSVLog(tmp_path / "log"), folder=tmp_path / "run", ledger=ledger)
        assert (tmp_path / "log").read_bytes() == before
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "spent.jsonl").exists() or not ledger.entries

    @pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\xff\xfe", b"step\n"])
    def test_other_files_are_refused(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(content)
        with pytest.raises(RunError, match="is not a log of dpgrad: choose another file"):
            fitted(CSVLog(tmp_path / "log"))
        assert (tmp_path / "log").read_bytes() == content
        with pytest.raises(RunError, match="is a folder: give CSVLog the path of a file"):
            fitted(CSVLog(tmp_path))


class Broken:
    """A callback that fails once, after a step or an evaluation."""

    def __init__(self, step: int, kind: type[BaseException] = OSError) -> None:
        self.step, self.kind = step, kind

    def after_step(self, progress: Progress) -> None:
        if progress.step == self.step:
            raise self.kind("broken")


class Opaque(Dataset[Any]):
    """It cannot be compared when a run is resumed."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in rows())


class TestResume:
    @pytest.mark.parametrize(("step", "first"), [(1, True), (4, False), (STEPS, True)])
    def test_an_error_in_a_callback_loses_nothing(
        self, step: int, first: bool, whole: tuple[Fitted, bytes], tmp_path: Path
    ) -> None:
        """The log has every step once, whichever comes first, and the weights are those of a run without errors."""
        wanted, log_wanted = whole
        log = [CSVLog(tmp_path / "log")]
        broken = [Broken(step), *log] if first else [*log, Broken(step)]
        with pytest.raises(OSError, match="broken"):
            fitted(*broken, folder=tmp_path / "run")
        found = fitted(CSVLog(tmp_path / "log"), folder=tmp_path / "run", resume=True)
        assert (tmp_path / "log").read_bytes() == log_wanted
        assert torch.equal(found.model.weight, wanted.model.weight)  # type: ignore[arg-type]
        assert found.curves == wanted.curves
        assert found.event == wanted.event

    def test_no_step_is_charged_twice_after_an_error(self, tmp_path: Path) -> None:
        """Also where the data cannot be compared: the step was stored before the run ended."""
        with pytest.raises(OSError, match="broken"):
            fitted(Broken(3), data=Opaque(), folder=tmp_path / "run", checkpoint_every=1)
        seen = Seen()
        with pytest.warns(ResumeWarning):
            fitted(seen, data=Opaque(), folder=tmp_path / "run", resume=True, checkpoint_every=1)
        (start,) = seen.named("start")
        assert (start.step, start.resumed) == (2, True)
        assert seen.named("step")[0].step == 3

    def test_a_process_that_dies_leaves_a_log_that_goes_on(self, whole: tuple[Fitted, bytes], tmp_path: Path) -> None:
        """After the last checkpoint rows were written, one of them in part."""
        with pytest.raises(KeyboardInterrupt):
            fitted(CSVLog(tmp_path / "log"), Broken(5, KeyboardInterrupt), folder=tmp_path / "run")
        assert [row["step"] for row in logged(tmp_path / "log")] == ["1", "2", "3", "4", "5"]
        with (tmp_path / "log").open("ab") as file:
            file.write(b"6,0.")
        fitted(CSVLog(tmp_path / "log"), folder=tmp_path / "run", resume=True)
        assert (tmp_path / "log").read_bytes() == whole[1]

    def test_a_signal_during_a_callback(self, tmp_path: Path) -> None:
        def ask(progress: Progress) -> None:
            if progress.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        assert fitted(ask, CSVLog(tmp_path / "log"), folder=tmp_path / "run").stopped == "interrupted"
        fitted(CSVLog(tmp_path / "log"), folder=tmp_path / "run", resume=True)
        assert [row["step"] for row in logged(tmp_path / "log")] == ["1", "2", "3", "4", "5", "6"]
