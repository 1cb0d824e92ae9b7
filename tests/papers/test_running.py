"""How experiments run: what is kept, what is not run again, what is written, and what is refused."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import chosen
from dpgrad import cli
from dpgrad.errors import DataError, MissingFileError, ReportError, RunError
from dpgrad.papers import best_training, catalogue, figures, huang, prepared, running, searching, summary, tables, tasks
from dpgrad.papers.experiment import Arm, Claim, Outcomes, Place
from toy_experiment import PLACE, TOY, arms, trial


class Counting:
    """A trial that counts its calls, and fails at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fail_at = fail_at

    def __call__(self, arm: Arm, seed: int, place: Place) -> dict[str, Any]:
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append((arm.name, seed))
        return trial(arm, seed, place)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue.experiments()
    named = {"toy": TOY, "toy-lacking": replace(TOY, name="toy-lacking", needs=("gisette",))}
    monkeypatch.setattr(catalogue, "experiments", lambda: named)
    monkeypatch.delenv("DPGRAD_DATA", raising=False)


class TestRunning:
    def test_every_arm_has_every_seed_and_arms_take_turns(self, tmp_path: Path) -> None:
        counted = Counting()
        done = running.reproduce(replace(TOY, trial=counted), PLACE, tmp_path, seeds=2)
        assert counted.calls == [("one, a_b & c", 0), ("two", 0), ("one, a_b & c", 1), ("two", 1)]
        assert done.complete
        assert done.outcomes.values("two", "accuracy") == [95.0, 96.0]
        assert done.outcomes.values("two", "nothing") == []

    @pytest.mark.parametrize(("name", "module"), [("huang-table3-mnist", huang), ("best-mnist", best_training)])
    def test_a_fit_that_was_interrupted_is_no_trial(
        self, name: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`fit` ends in order at Ctrl-C and returns the model it has: no result of the experiment."""
        monkeypatch.setattr(module, "fit", lambda *_, **__: SimpleNamespace(stopped="interrupted"))
        experiment = catalogue.experiments()[name]
        with pytest.raises(KeyboardInterrupt):
            running.reproduce(experiment, PLACE, tmp_path, seeds=1)
        assert not running.trials_path(experiment, "tiny", tmp_path).read_bytes()

    def test_a_stopped_run_goes_on_where_it_was(self, tmp_path: Path) -> None:
        stopped, again, third = Counting(fail_at=3), Counting(), Counting()
        with pytest.raises(KeyboardInterrupt):
            running.reproduce(replace(TOY, trial=stopped), PLACE, tmp_path, seeds=3)
        done = running.reproduce(replace(TOY, trial=again), PLACE, tmp_path, seeds=3)
        assert sorted(stopped.calls + again.calls) == sorted((arm.name, seed) for arm in arms("") for seed in range(3))
        assert len(stopped.calls) == 3
        assert running.reproduce(replace(TOY, trial=third), PLACE, tmp_path, seeds=3).lines == done.lines
        assert third.calls == []

    def test_a_torn_last_line_is_run_again_and_nothing_else(self, tmp_path: Path) -> None:
        running.reproduce(TOY, PLACE, tmp_path, seeds=2)
        path = tmp_path / "toy.tiny.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        counted = Counting()
        running.reproduce(replace(TOY, trial=counted), PLACE, tmp_path, seeds=2)
        assert counted.calls == [("two", 1)]
        assert len(path.read_bytes().splitlines()) == 4
        assert all(json.loads(line) for line in path.read_bytes().splitlines())

    def test_another_setting_is_another_trial(self, tmp_path: Path) -> None:
        running.reproduce(TOY, PLACE, tmp_path, seeds=1)
        counted = Counting()
        other = replace(TOY, arms=lambda size: (arms(size)[0], Arm("two", {"mean": 10.0})), trial=counted)
        done = running.reproduce(other, PLACE, tmp_path, seeds=1)
        assert counted.calls == [("two", 0)]
        assert done.outcomes.mean("two", "accuracy") == 10.0

    def test_sizes_have_files_of_their_own(self, tmp_path: Path) -> None:
        for size in ("full", "quick"):
            running.reproduce(TOY, Place(size=size), tmp_path)  # type: ignore[arg-type]
        assert {path.name for path in tmp_path.iterdir()} == {"toy.jsonl", "toy.quick.jsonl"}
        assert len((tmp_path / "toy.jsonl").read_bytes().splitlines()) == 6
        assert len((tmp_path / "toy.quick.jsonl").read_bytes().splitlines()) == 4

    @pytest.mark.parametrize("line", [b"[]", b"nonsense", b'{"arm": "two"}', b"[" * 100_000])
    def test_a_line_that_is_no_trial_is_refused_by_its_number(self, tmp_path: Path, line: bytes) -> None:
        (tmp_path / "toy.tiny.jsonl").write_bytes(line + b"\n")
        with pytest.raises(ReportError, match=r"toy\.tiny\.jsonl, line 1, is no trial: remove that line"):
            running.reproduce(TOY, PLACE, tmp_path)

    def test_two_processes_do_not_write_one_file(self, tmp_path: Path) -> None:
        log = running.TrialLog(tmp_path / "toy.tiny.jsonl")
        with log.writing(), pytest.raises(RunError, match="in use by another process"):
            running.reproduce(TOY, PLACE, tmp_path)

    def test_trials_that_another_process_added_meanwhile_are_kept_and_not_run_again(self, tmp_path: Path) -> None:
        path = tmp_path / "toy.tiny.jsonl"
        early = running.TrialLog(path)
        running.reproduce(TOY, PLACE, tmp_path, seeds=1)
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"arm": ')  # and it was torn
        with early.writing() as add:
            assert [line["arm"] for line in early.lines] == ["one, a_b & c", "two"]
            add({**early.lines[0], "seed": 1})
        assert path.read_bytes().startswith(whole)
        assert [line["seed"] for line in running.TrialLog(path).lines] == [0, 0, 1]

    def test_two_arms_of_one_name_are_refused(self, tmp_path: Path) -> None:
        twice = replace(TOY, arms=lambda size: arms(size)[:1] * 2)
        with pytest.raises(RunError, match="two arms of one name"):
            running.reproduce(twice, PLACE, tmp_path)

    def test_an_error_of_a_trial_names_its_arm_and_the_others_go_on(self, tmp_path: Path) -> None:
        def bad(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
            if arm.name != "two":
                raise DataError("no rows")
            return trial(arm, seed, place)

        with pytest.raises(DataError, match=r"^toy, one, a_b & c: no rows; 2 more trials failed$"):
            running.reproduce(replace(TOY, trial=bad), PLACE, tmp_path, seeds=3)
        kept = running.reproduce(TOY, PLACE, tmp_path, seeds=3, run=False)
        assert [(line["arm"], line["seed"]) for line in kept.lines] == [("two", 0), ("two", 1), ("two", 2)]

    def test_several_processes_give_the_same_trials_and_one_that_dies_is_one_line(self, tmp_path: Path) -> None:
        experiment = catalogue.experiments()["huang-figure9"]
        one = running.reproduce(experiment, PLACE, tmp_path / "one", seeds=2)
        with running.processes(2) as pool:
            assert pool is not None
            two = running.reproduce(experiment, PLACE, tmp_path / "two", seeds=2, pool=pool)
            pool.submit(os.abort)
            for _ in range(2):  # at the latest the second finds the pool broken before it begins
                with pytest.raises(RunError, match="a process that ran trials has died"):
                    running.reproduce(experiment, PLACE, tmp_path / "two", seeds=200, pool=pool)
        assert [line["figures"] for line in one.lines] == [line["figures"] for line in two.lines]

    def test_a_killed_run_goes_on(self, tmp_path: Path) -> None:
        """SIGKILL in the middle: what was finished is kept, whole."""
        script = (
            "import sys, time\nsys.path[:0] = sys.argv[2:]\nimport test_running as t\nfrom pathlib import Path\n"
            "def slow(*a):\n    time.sleep(0.2)\n    return t.trial(*a)\n"
            "t.running.reproduce(t.replace(t.TOY, trial=slow), t.PLACE, Path(sys.argv[1]), seeds=50)\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path), *map(str, Path(__file__).parents[:2])]
        path = tmp_path / "toy.tiny.jsonl"
        with subprocess.Popen(command) as process:
            while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 3):
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
        kept = running.TrialLog(path).lines
        assert 3 <= len(kept) < 100
        counted = Counting()
        done = running.reproduce(replace(TOY, trial=counted), PLACE, tmp_path, seeds=50)
        assert done.complete
        assert len(counted.calls) == 100 - len(kept)


class TestWritten:
    def test_tables_hold_the_papers_value_and_ours_with_its_error(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=3)
        done = replace(done, place=replace(PLACE, size="full"))  # of which claims are judged
        page, text = tables.page(done, drawn=True), tables.csv_text(done)
        assert "| two          | 96.50 | 96.00 ± 0.58   | –       | 3      |" in page
        assert "- **held**: two is above one" in page
        assert "- **did not hold**: one is above two" in page
        assert "- **cannot be told**: three is above two" in page
        assert "`dpgrad reproduce toy`" in page
        assert "![Table 1](toy.svg)" in page
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [float(row["accuracy"]) for row in rows] == [91.0, 96.0]
        assert float(rows[1]["accuracy standard error"]) == pytest.approx(3**-0.5)
        assert json.loads(rows[0]["setting"]) == {"mean": 90.0, "sizes": [1, 2]}
        assert r"one, a\_b \& c" in tables.latex(tables.rows(done))

    def test_a_small_size_is_not_judged_but_for_what_is_certain(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=3)
        sure = tuple(replace(claim, certain=claim.text == "two is above one") for claim in TOY.claims)
        small = replace(done, experiment=replace(TOY, claims=sure))
        page = tables.page(small, drawn=True)
        assert "- **held**: two is above one" in page
        assert "- **not judged at this size**: one is above two" in page
        assert "did not hold" not in page + tables.summary(small)
        assert "`dpgrad reproduce toy --quick --seeds 3`" in page
        assert "![Table 1](toy.tiny.svg)" in page

    def test_a_partial_table_says_so(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=2)
        part = replace(done, lines=done.lines[:3])
        assert "Partial: 3 of 4 trials." in tables.page(part, drawn=False)
        assert "partial: 3 of 4 trials are there" in tables.summary(part)

    def test_the_page_of_a_folder_says_what_has_been_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ours = Claim("one is above zero", lambda found: True, kind="ours")
        toy, other = replace(TOY, claims=(*TOY.claims, ours)), replace(TOY, name="other", item="Table 2")
        monkeypatch.setattr(catalogue, "experiments", lambda: {"toy": toy, "other": other})
        done = running.reproduce(toy, Place(), tmp_path, seeds=2)
        lines = [[cell.strip() for cell in line.split("|")] for line in summary.page(tmp_path).splitlines()]
        assert ["", "[toy](toy.md)", "Table 1", "4 of 6", "1 of 3", "1", "1", ""] in lines
        assert ["", "other", "Table 2", "0", "", "", "", ""] in lines

        theirs, own = tables.page(done, drawn=False).split("Our aims and checks:")
        assert "Claims of the paper:" in theirs
        assert "- **held**: one is above zero" in own

    def test_trials_of_other_code_are_counted(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=1)
        stale = replace(done, lines=({**done.lines[0], "source": "f" * 12}, *done.lines[1:]))
        assert "1 of 2 trials were made with other code" in tables.page(stale, drawn=False)
        assert "other code" not in tables.page(done, drawn=False)

    def test_trials_without_a_record_of_where_they_were_made_are_counted(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=1)
        old = {"date": None, "device": None, "versions": {}, "source": "unknown"}
        for count, lines in (
            (1, ({**done.lines[0], **old}, *done.lines[1:])),
            (2, [{**one, **old} for one in done.lines]),
        ):
            page = tables.page(replace(done, lines=tuple(lines)), drawn=False)
            assert f"Of {count} trials it was not recorded when" in page
            assert ("Trials made 20" in page) == (count == 1)
            assert "other code than" not in page

    def test_the_same_trials_give_the_same_bytes(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=2)
        found = []
        for _ in range(2):
            paths = figures.write(TOY, done.outcomes, tmp_path / "toy") + tables.write(done, tmp_path / "toy", True)
            found.append({path.name: path.read_bytes() for path in paths})
        assert found[0] == found[1]
        assert {*found[0]} == {f"toy.{ending}" for ending in ("svg", "png", "md", "csv", "tex")}

    def test_one_trial_is_drawn_without_an_error(self, tmp_path: Path) -> None:
        done = running.reproduce(TOY, PLACE, tmp_path, seeds=2)
        for lines, errors, label in (
            (done.lines[:3], 1, "ours, with two standard errors"),
            (done.lines[:1], 0, "ours"),
        ):
            (axes,) = figures.drawn(TOY, replace(done, lines=lines).outcomes).axes
            assert sum(bool(bar.has_yerr) for bar in axes.containers) == errors
            assert label in axes.get_legend_handles_labels()[1]

    def test_without_matplotlib_there_is_no_figure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert figures.write(TOY, Outcomes({}), tmp_path / "toy") == []


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        code = cli.main(["reproduce", *words])
        return (code, *capsys.readouterr())

    @pytest.mark.usefixtures("known")
    def test_answer_and_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = self.run(capsys, "toy", "--out", str(tmp_path))
        assert code == 0
        assert "| two          | 96.50 | 96.00 ± 0.58   |" in out
        assert "held: two is above one" in out
        assert err.splitlines()[-1] == "toy: 6 of 6  two, seed 2  accuracy 97  0:00 left"
        assert {path.suffix for path in tmp_path.iterdir()} == {
            ".md",
            ".csv",
            ".tex",
            ".svg",
            ".png",
            ".jsonl",
            ".html",
        }
        code, out, err = self.run(capsys, "toy", "--out", str(tmp_path), "--json")
        (found,) = json.loads(out)["experiments"]
        assert err == ""  # no trial was run
        assert found["claims"][0] == {"claim": "two is above one", "held": True, "kind": "paper"}
        assert found["rows"][1]["accuracy"]["mean"] == 96.0

    @pytest.mark.usefixtures("known")
    def test_missing_data_are_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = self.run(capsys, "toy-lacking", "--out", str(tmp_path))
        assert (code, out) == (2, "")
        assert "toy-lacking needs a dataset that is missing: gisette (put " in err
        code, out, err = self.run(capsys, "all", "--out", str(tmp_path))
        assert code == 0
        assert "dpgrad: skipped toy-lacking: missing gisette (put " in err
        assert "skipped toy-lacking: missing data" in out

    @pytest.mark.usefixtures("known")
    def test_finished_trials_are_shown_without_data(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = self.run(capsys, "toy", "--finished", "--out", str(tmp_path))
        assert code == 2
        assert "has no trials of toy, " not in err
        assert "has no trials of toy: run them first" in err
        (tmp_path / "toy.jsonl").touch()  # stopped in its first trial
        assert self.run(capsys, "toy", "--finished", "--out", str(tmp_path))[2] == err
        assert "](toy.md)" not in summary.page(tmp_path)
        running.reproduce(TOY, Place(), tmp_path, seeds=1)
        (tmp_path / "toy.jsonl").rename(tmp_path / "toy-lacking.jsonl")
        code, out, err = self.run(capsys, "toy-lacking", "--finished", "--out", str(tmp_path))
        assert (code, err) == (0, "")
        assert "partial: 2 of 6 trials are there" in out

    @pytest.mark.usefixtures("known")
    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = self.run(capsys, "--list")
        assert code == 0
        assert "| toy-lacking | Nobody 2026 | Table 1 | 2 × 3        | gisette (missing) |" in out
        listed = json.loads(self.run(capsys, "--list", "toy-lacking", "--json")[1])["experiments"]
        assert [(one["name"], one["missing"]) for one in listed] == [("toy-lacking", ["gisette"])]

    @pytest.mark.usefixtures("known")
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["toi"], "there is no experiment 'toi': did you mean toy?"),
            (["nothing-like-it"], "there is no experiment 'nothing-like-it': dpgrad reproduce --list names them"),
            ([], "name an experiment, or all of them with all"),
            (["toy", "--seeds", "0"], "--seeds must be a whole number of at least 1, got 0"),
            (["toy", "--processes", "-1"], "--processes must be a whole number of at least 1, got -1"),
            (["toy", "--device", "gpu"], "--device must be one of cpu, cuda, got 'gpu'"),
        ],
    )
    def test_refusals(self, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
        code, out, err = self.run(capsys, *words)
        assert (code, out) == (2, "")
        assert err.startswith("dpgrad: error: ")
        assert said in err
        assert err.count("\n") == 1

    @pytest.mark.usefixtures("known")
    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").write_text("", "utf-8")
        code, _, err = self.run(capsys, "toy", "--out", str(tmp_path / "file" / "inner"))
        assert code == 2
        assert err.count("\n") == 1

    def test_an_interrupt_says_how_to_go_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped = replace(TOY, trial=Counting(fail_at=1))
        monkeypatch.setattr(catalogue, "experiments", lambda: {"toy": stopped})
        code, _, err = self.run(capsys, "toy", "--out", str(tmp_path))
        assert code == 130
        assert "interrupted: finished trials are kept; the same command continues" in err


class TestSearching:
    def test_what_a_search_chose_is_read_from_its_trials(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def candidates(size: str) -> tuple[Arm, ...]:
            return tuple(Arm(f"rate {rate}", {"method": "psac", "rate": rate}) for rate in (1, 2, 3))

        def judged(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
            return {"accuracy": -abs(arm.setting["rate"] - 2) + 0.1 * seed}

        def settle(arm: Arm, earlier: Any) -> Arm:
            return Arm(arm.name, {**arm.setting, **searching.chosen("search", earlier["search"], "psac")})

        search = replace(TOY, name="search", arms=candidates, trial=judged)
        table = replace(TOY, name="table", after=("search",), settle=settle)
        monkeypatch.setattr(catalogue, "experiments", lambda: {"search": search, "table": table})
        assert "rate" not in running.arms_of(table, "tiny", tmp_path)[0].setting  # nothing is committed of it
        monkeypatch.setattr(searching, "committed", lambda: {"search": {"psac": {"rate": 7}}})
        assert running.arms_of(table, "tiny", tmp_path)[0].setting["rate"] == 7
        running.reproduce(search, PLACE, tmp_path, seeds=2)
        assert running.arms_of(table, "tiny", tmp_path)[0].setting["rate"] == 2
        found = searching.outcomes("search", "tiny", tmp_path)
        assert searching.told("search", found, "psac", 3, "") == "best of 3 settings"
        assert searching.told("search", found, "psac", 5, "") == "best of 3 of 5 settings so far"
        assert searching.told("search", found, "other", 5, "the middle") == "not searched yet: the middle"

    def test_choices_that_come_with_dpgrad_are_those_of_complete_searches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def candidates(size: str) -> tuple[Arm, ...]:
            return tuple(Arm(f"rate {rate}", {"method": "psac", "rate": rate, "mean": rate}) for rate in (1, 2))

        search = replace(TOY, name="search", arms=candidates)
        table = replace(TOY, name="table", after=("search", "toy"))  # the settings of toy have no method
        monkeypatch.setattr(catalogue, "experiments", lambda: {"search": search, "toy": TOY, "table": table})
        monkeypatch.setattr(searching, "COMMITTED", tmp_path / "chosen.json")
        monkeypatch.setattr(searching, "committed", dict)
        running.reproduce(TOY, Place(), tmp_path)
        running.reproduce(replace(search, arms=lambda size: candidates(size)[:1]), Place(), tmp_path)
        assert chosen.write(tmp_path) == {}
        running.reproduce(search, Place(), tmp_path)
        assert chosen.write(tmp_path) == {"search": {"psac": {"method": "psac", "rate": 2, "mean": 2}}}

    def test_choices_that_come_with_dpgrad_are_those_of_its_results(self) -> None:
        results = Path(__file__).resolve().parents[2] / "results"
        for search, methods in searching.committed().items():
            tried = searching.outcomes(search, "full", results)
            assert {method: searching.chosen(search, tried, method) for method in methods} == methods

    def test_a_candidate_without_a_number_is_not_chosen(self) -> None:
        def tried(rate: int, accuracy: float | None) -> list[dict[str, Any]]:
            return [{"accuracy": accuracy, "setting": {"method": "psac", "rate": rate}}]

        found = Outcomes({"a": tried(1, None), "b": tried(2, 50.0), "c": tried(3, 60.0)})
        assert searching.chosen("toy", found, "psac")["rate"] == 3
        assert searching.chosen("toy", Outcomes({"a": tried(1, None)}), "psac") == {}


def test_few_rows_of_a_file_that_is_sorted_by_class_have_every_class() -> None:
    y = torch.arange(10).repeat_interleave(97)
    rows = tasks.Loaded(y[:, None], y, y[:, None], y, 10).few(30, 11)
    assert rows.y.unique().tolist() == rows.y_test.unique().tolist() == list(range(10))
    assert (len(rows.y), len(rows.y_test), len(rows.few(10_000).y)) == (30, 11, 30)
    assert torch.equal(rows.x[:, 0], rows.y)


class TestPrepared:
    def test_rows_come_back_as_they_were(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        random = np.random.default_rng(0)
        images = {part: random.integers(0, 256, (n, 3, 8, 8), np.uint8) for part, n in (("x_train", 7), ("x_test", 4))}
        labels = {"y_train": np.arange(7) % 2, "y_test": np.arange(4) % 2}
        found = type("Found", (), {**images, **labels})
        monkeypatch.setattr("dpgrad.data.load", lambda *_: found)
        prepared.write("imagenette64", tmp_path, parts=2)
        back = prepared.load("imagenette64", tmp_path)
        assert all(np.array_equal(back[name], value) for name, value in {**images, **labels}.items())
        assert running.lacks("imagenette64", tmp_path) == []
        marked = running.reproduce(replace(TOY, needs=("imagenette64",)), PLACE, tmp_path, seeds=1)
        assert marked.lines[0]["figures"]["prepared"] == ["imagenette64"]
        prepared.path("imagenette64", tmp_path, 2).unlink()
        with pytest.raises(DataError, match=r"prepared-2\.npz is missing: copy every part"):
            prepared.load("imagenette64", tmp_path)
        prepared.path("imagenette64", tmp_path).write_bytes(b"nonsense")
        with pytest.raises(DataError, match=r"is not what dpgrad\.papers\.prepared writes"):
            prepared.load("imagenette64", tmp_path)


def test_missing_data_are_refused_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPGRAD_DATA", raising=False)
    lacking = replace(TOY, needs=("gisette",))
    with pytest.raises(MissingFileError, match=r"^toy needs a dataset that is missing: gisette"):
        running.reproduce(lacking, Place(size="quick"), tmp_path)
    assert running.reproduce(lacking, PLACE, tmp_path).complete  # the tests need no data
