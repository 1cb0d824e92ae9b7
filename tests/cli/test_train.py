"""`dpgrad train`: the job without arguments, its options, plans, files, faults and refusals."""

import dataclasses
import importlib
import json
import os
import re
import resource
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dpgrad import _files, cli, data
from dpgrad.cli import _options, _progress, _summary
from dpgrad.data import _source
from dpgrad.reports import report
from dpgrad.training import fit, jobs
from dpgrad.training.curves import Progress
from dpgrad.training.options import RunFolder

SHORT = "train --method dpsgd --steps 3 --batch-size 100 --no-baseline"
Capture = pytest.CaptureFixture[str]


def run(command: str, capsys: Capture) -> dict[str, Any]:
    """The JSON object of a command; its standard error holds progress alone."""
    assert cli.main([*command.split(), "--json"]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert all(": step " in line or line.startswith("dpgrad: ") for line in err.splitlines()), err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def files(folder: Path) -> dict[Path, int]:
    """Everything below a folder, with the time of its last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def interrupted_at_its_end(command: str, capsys: Capture) -> str:
    """Run the command up to its report, and stop it there; the command."""

    def interrupted(folder: Path, found: report.Report) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", interrupted)
        assert cli.main(command.split()) == 130
    capsys.readouterr()
    return command


class TestJob:
    def test_table(self, trained: Any) -> None:
        text = " ".join(trained.out.split())
        assert re.search(r"dpsgd 3 1e-05 \d\d\.\d % 20 [\d.]+", text)
        assert re.search(r"psasc 3 1e-05 \d\d\.\d % 20 [\d.]+", text)
        assert re.search(r"non-private ∞ – 9\d\.\d % – – outside every guarantee", text)
        assert "privacy ε = 3 at δ = 1e-05" in text
        assert "plain words Differential privacy hides" in text
        assert f"full report {trained.folder / 'dpsgd' / 'release' / 'report.txt'}" in text
        assert len(trained.out.splitlines()) < 40  # a screen
        assert "All runs in the ledger together have ε = " in text
        assert str(trained.folder / "report.html") in text
        assert text.count("(share release/ only)") == 2

    def test_no_figure_is_left_out_on_a_narrow_terminal(self, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        folders = {method: trained.folder / method for method in ("dpsgd", "psasc")}
        reports = {method: report.load(folder) for method, folder in folders.items()}
        said = " ".join(_summary.Summary(reports, folders, None, None, trained.folder / "report.html").words().split())
        for method in folders:
            assert re.search(rf"{method} 3 1e-05 \d\d\.\d % 20 [\d.]+", said)

    def test_progress_is_plain_lines_elsewhere_than_on_a_terminal(self, trained: Any) -> None:
        lines = [line for line in trained.err.splitlines() if line.startswith("dpsgd: ")]
        assert len(lines) == 10
        assert re.fullmatch(r"dpsgd: step 20 of 20  ε 3 +held-out accuracy \d\d\.\d %  0:00 left", lines[-1])
        assert "\x1b" not in trained.err

    def test_files(self, trained: Any) -> None:
        for method in ("dpsgd", "psasc"):
            folder = trained.folder / method
            kept = {"report.html", "report.json", "report.txt", "weights.pt"}
            assert {path.name for path in (folder / "release").iterdir()} == kept
            assert not (folder / "private").exists()
            assert report.load(folder)["method"]["name"] == method
        assert "non-private" in (trained.folder / "report.html").read_text("utf-8")
        shared = (trained.folder / "dpsgd" / "release" / "report.html").read_text("utf-8")
        assert "non-private" not in shared

    def test_report(self, trained: Any) -> None:
        found = report.load(trained.folder / "dpsgd")
        assert 2.9 < found["guarantee"]["epsilon"] <= 3
        assert found["guarantee"]["delta"] == 1e-5
        assert found["model"] == {
            "name": "oriented-gradients", "shape": [1, 8, 8], "outputs": 10, "dtype": "float32", "source": None,
            "parameters": 1290,
        }  # fmt: skip
        assert found["data"]["name"] == "digits"
        assert found["release"]["allowed"]
        assert found["result"]["held_out"] > 0.7  # by chance: 0.1
        assert found["stopped"] == "plan"
        assert found["way"] == {"name": "batched", "reason": "no operation depends on values", "cost": None}

    def test_together_costs_more_than_one(self, trained: Any) -> None:
        said = re.search(r"All runs in the ledger together have ε = ([\d.]+)", " ".join(trained.out.split()))
        assert said is not None
        assert 3 < float(said[1]) < 6


class TestOptions:
    def test_one_method_is_its_own_folder(self, capsys: Capture, tmp_path: Path) -> None:
        found = run(f"{SHORT} --out {tmp_path / 'a'}", capsys)
        assert list(found["methods"]) == ["dpsgd"]
        assert found["methods"]["dpsgd"]["folder"] == str(tmp_path / "a")
        assert found["non_private"] is None
        assert found["together"] is None
        assert 0 < found["epsilon_lower"] <= found["epsilon"] <= 3
        assert found["page"] == str(tmp_path / "a" / "report.html")
        report.check(found["methods"]["dpsgd"]["report"])

    def test_same_seed_same_weights_and_not_for_release(self, capsys: Capture, tmp_path: Path) -> None:
        weights = []
        for name in ("a", "b", "c"):
            seed = "" if name == "c" else "--seed 7"
            found = run(f"{SHORT} --model mlp --out {tmp_path / name} {seed}", capsys)
            assert found["methods"]["dpsgd"]["report"]["release"]["allowed"] is (name == "c")
            weights.append(torch.load(tmp_path / name / "release" / "weights.pt", weights_only=True))
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])

    def test_options_reach_the_plan(self, capsys: Capture, tmp_path: Path) -> None:
        command = (
            "train --plan --method psasc-momentum --epsilon 2 --delta 1e-6 --epochs 3 --batch-size 64 --clip 0.5 "
            "--s 0.8 --r 0.01 --gamma 0.3 --length 1 --momentum 0.5 --learning-rate 2 "
            "--learning-rate-schedule cosine:0.1 --averaging tail:0.5 --dataset-size 1500 --relation zero-out "
            "--accountant rdp --group 0.*:0.5:2 --group [1-9].* "
            "--model cnn --inner past"
        )
        plan = run(command, capsys)["plans"]["psasc-momentum"]
        method = plan["method"]
        assert (method["clip"], method["s"], method["r"]) == (0.5, 0.8, 0.01)
        assert (method["gamma"], method["length"], method["momentum"], method["inner"]) == (0.3, 1, 0.5, "past")
        assert (plan["delta"], plan["relation"], plan["accountant"]) == (1e-6, "zero-out", "rdp")
        assert plan["steps"] == int(3 * 1500 / 64)
        assert plan["epsilon"] <= 2
        assert plan["averaging"] == "tail:0.5"
        assert plan["expected_seconds"] > 0
        assert list(tmp_path.iterdir()) == []

    def test_a_declared_size_is_all_that_is_told_of_the_number_of_rows(self, capsys: Capture, tmp_path: Path) -> None:
        """Neighbours differ by a row more or less: nothing may be equal to their number, nor change with it."""
        digits = data.load("digits")
        fewer = dataclasses.replace(
            digits, x_train=digits.x_train[:300], y_train=digits.y_train[:300], by_position=False,
            x_test=digits.x_test[:100], y_test=digits.y_test[:100],
        )  # fmt: skip
        found = []
        for few in (fewer, dataclasses.replace(fewer, x_train=digits.x_train[:299], y_train=digits.y_train[:299])):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(data, "load", lambda *args, few=few, **options: few)
                plan = run("train --plan --method dpsgd --dataset-size 1000", capsys)["plans"]["dpsgd"]
                assert (plan["relation"], plan["dataset_size"], plan["batch_size"]) == ("add-remove", 1000, 512)
                assert (
                    run("train --plan --method dpsgd --dataset-size 400", capsys)["plans"]["dpsgd"]["batch_size"] == 400
                )
                folder = tmp_path / str(len(few.y_train))
                run(f"train --method dpsgd --steps 2 --dataset-size 1000 --no-baseline --out {folder}", capsys)
            written = report.load(folder)
            assert not re.search(r"\b(299|300|100)\b", json.dumps({**written, "result": None, "curves": None}))
            del plan["expected_seconds"]
            found.append((plan, written["guarantee"], written["public"], written["outside"]))
        assert found[0] == found[1]

    def test_noise_instead_of_a_budget(self, capsys: Capture) -> None:
        plan = run("train --plan --method dpsgd --noise-multiplier 4 --steps 10", capsys)["plans"]["dpsgd"]
        assert (plan["noise_multiplier"], plan["steps"], plan["target_epsilon"]) == (4.0, 10, None)
        both = run("train --plan --method dpsgd --noise-multiplier 4 --epsilon 1", capsys)["plans"]["dpsgd"]
        assert both["steps_set_by"] == "budget"
        assert both["epsilon"] <= 1

    def test_plan_in_words(self, capsys: Capture) -> None:
        assert cli.main("train --plan".split()) == 0
        out, err = capsys.readouterr()
        assert out.count("noise multiplier") == len(jobs.job(data.load("digits")).methods)
        for words in ("DP-SGD", "DP-PSASC", "300 = ", "expected time", "rdp", "Abadi et al. (2016) advise"):
            assert words in out
        for line in out.splitlines():  # of which paper
            assert not line.startswith("Theorem") or " of Huang et al. (2024): " in line
        assert err == ""

    def test_augment_adam_and_diagnostics(self, capsys: Capture, tmp_path: Path) -> None:
        options = "--augment 2 --optimizer adam --learning-rate 0.01 --diagnostics 1 --averaging tail:0.5"
        found = run(f"{SHORT} {options} --out {tmp_path / 'a'} --ledger {tmp_path / 'books'}", capsys)
        outside = found["methods"]["dpsgd"]["report"]["outside"]
        assert any("diagnostics" in entry for entry in outside)
        kept = tmp_path / "a" / "private"
        assert kept.is_dir()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700
        again = run(f"{SHORT} --out {tmp_path / 'b'} --ledger {tmp_path / 'books'}", capsys)
        assert again["together"]["epsilon"] > 3


class TestConfig:
    def test_the_command_line_overrules_the_file(self, capsys: Capture, tmp_path: Path) -> None:
        file = tmp_path / "job.toml"
        file.write_text(
            'method = ["psac"]\nepsilon = 2\ndelta = 1e-6\nepochs = 5\nbatch-size = 128\nclip = 0.2\n'
            '"learning-rate" = 3\n'
            'averaging = "ema:0.9"\nplan = true\ndata = "digits"\nbaseline = false\n',
            "utf-8",
        )
        found = run(f"train --config {file} --steps 9 --epsilon 1.5", capsys)["plans"]["psac"]
        assert (found["steps"], found["target_epsilon"], found["delta"], found["batch_size"]) == (9, 1.5, 1e-6, 128)
        assert (found["method"]["clip"], found["learning_rate"], found["averaging"]) == (0.2, 3.0, "ema:0.9")

    def test_underscores_and_repeated_options(self, capsys: Capture, tmp_path: Path) -> None:
        file = tmp_path / "job.toml"
        file.write_text(
            'noise_multiplier = 5\nsteps = 4\ngroup = ["1.weight:2", "1.bias"]\nmethod = "dpsgd"\n', "utf-8"
        )
        found = run(f"train --plan --config {file}", capsys)["plans"]["dpsgd"]
        assert found["noise_multiplier"] == 5
        assert len(found["mechanism"]["groups"]) == 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("epsilom = 3", "unknown key 'epsilom': did you mean epsilon?"),
            ("learning-rat = 3", "did you mean learning-rate?"),
            ("epsilon = -1", "job.toml: --epsilon must be positive"),
            ("epsilon = true", "job.toml: epsilon must be a number or a text"),
            ("epsilon = [1, 2]", "epsilon takes one value, got 2"),
            ("epsilon = {a = 1}", "epsilon must be a number or a text"),
            ("resume = 1", "resume must be true or false"),
            ("method = []", "method must be a number or a text"),
            ("relation = 'friends'", "--relation must be one of add-remove, zero-out, replace-one, got 'friends'"),
            ("config = 'other.toml'", "unknown key 'config'"),
            ("epsilon = 1\nepsilon = 2", "is not TOML"),
            ("noise_multiplier = 1\nnoise-multiplier = 1", "noise-multiplier is given twice"),
            ("epsilon = " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
            ('data = "a\\u0000b"', "--data must not hold a NUL character"),
            ("model = ''", "--model must not be empty, got ''"),
            ("zzzz = 1", "unknown key 'zzzz': keys are the options of dpgrad train without dashes"),
            ("epsilon = ", "is not TOML"),
        ],
    )
    def test_refused(self, refused: Callable[..., str], tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "job.toml").write_text(text, "utf-8")
        assert message in refused(f"train --plan --config {tmp_path / 'job.toml'}")

    def test_no_file(self, refused: Callable[..., str], tmp_path: Path) -> None:
        assert "there is no such file" in refused(f"train --config {tmp_path / 'absent.toml'}")


REFUSED = {
    "data": ("train --data digit", "got 'digit': did you mean digits?"),
    "preprocessing": ("train --preprocessing odd", "preprocessing of digits must be one of"),
    "method": ("train --method psaac", "got 'psaac': did you mean psac?"),
    "model": (f"{SHORT} --model conn --plan", "got 'conn': did you mean cnn?"),
    "epsilon": ("train --epsilon 0", "--epsilon must be positive"),
    "delta": ("train --delta 1", "--delta must lie strictly between 0 and 1"),
    "delta too large": (f"{SHORT} --delta 0.01 --plan", "delta must be below 1/n"),
    "batch_size": (f"{SHORT} --batch-size 5000 --plan", "batch_size"),
    "an option of another method": (f"{SHORT} --s 0.5 --plan", "method dpsgd has no s"),
    "steps and epochs": (f"{SHORT} --epochs 3 --plan", "steps"),
    "group": (f"{SHORT} --group a:b --plan", "--group must be PATTERN[:CLIP[:NOISE]], got 'a:b'"),
    "long group": (f"{SHORT} --group a:1:2:3 --plan", "--group must be PATTERN"),
    "resume without a folder": ("train --resume", "--resume needs --out"),
    "resume of nothing": ("train --resume --out absent", "there is no run in absent"),
    "seed": ("train --seed -1", "--seed must be a whole number of at least 0"),
    "device": (f"{SHORT} --device gpu --plan", "--device must be cpu or cuda, got 'gpu'"),
    "number of a device": (f"{SHORT} --device cpu:x", "--device cpu:x cannot be used"),
    "optimizer of a plan": (f"{SHORT} --optimizer adem --plan", "got 'adem': did you mean adam?"),
    "optimizer": (f"{SHORT} --optimizer adem", "optimizer must be a function of the parameters or one of"),
    "optimizer and momentum": (f"{SHORT} --optimizer adam --momentum 0.5 --plan", "momentum = 0.5 is that of SGD"),
    "engine": (f"{SHORT} --engine steam", "engine must be one of"),
    "lot of a run": (f"{SHORT} --batch-size 5000", "batch_size"),
    "ledger in no folder": (f"{SHORT} --ledger no/books --plan", "--ledger no/books: its folder is missing"),
    "ledger that is a folder": (f"{SHORT} --ledger .", "--ledger . is not a regular file: name a file"),
    "far-off model": (
        f"{SHORT} --model zzzz --plan",
        "model must be FILE.py:FUNCTION, hf:FOLDER or one of linear, mlp, ",
    ),
    "data of one's own": ("train --data mine.csv", "mine.csv: there is no such file or folder"),
    "option": ("train --epsylon 3", "unknown option '--epsylon': did you mean --epsilon?"),
    "averaging": (f"{SHORT} --averaging mean --plan", "averaging must be ema:DECAY or tail:SHARE, got 'mean'"),
    "rate schedule": (f"{SHORT} --learning-rate-schedule falling --plan", "learning_rate_schedule must be constant, "),
}


class TestRefused:
    @pytest.mark.parametrize(("command", "message"), REFUSED.values(), ids=REFUSED)
    def test_one_line(
        self, refused: Callable[..., str], command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert message in refused(command)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_in_use(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "note.txt").write_text("mine", "utf-8")
        assert "is not empty: choose another folder" in refused(f"{SHORT} --out {tmp_path}")

    def test_a_file_as_folder(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("", "utf-8")
        said = f"since {tmp_path / 'file'} is a file: choose another folder"
        assert f"--out {tmp_path / 'file'} cannot be made, {said}" in refused(f"{SHORT} --out {tmp_path / 'file'}")
        assert said in refused(f"{SHORT} --out {tmp_path / 'file' / 'in'}")

    def test_a_read_only_folder(
        self, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write where others may not
        said = refused(f"{SHORT} --out {tmp_path / 'a' / 'b'}")
        assert f"--out {tmp_path / 'a' / 'b'} cannot be written, since {tmp_path} is read-only" in said
        assert list(tmp_path.iterdir()) == []

    def test_an_empty_folder_stays_empty(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        assert "engine must be one of" in refused(f"{SHORT} --engine steam --out {tmp_path / 'a'}")
        assert list(tmp_path.rglob("*")) == [tmp_path / "a"]

    def test_what_another_process_began_is_left(
        self, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held: list[int] = []

        def overtaken(*args: Any, folder: RunFolder, **options: Any) -> None:
            _files.make_folder(Path(folder.path) / "private")
            held.append(_files.lock(Path(folder.path) / "lock"))
            raise ValueError("in use by another process")

        monkeypatch.setattr(fit, "fit", overtaken)
        assert "in use" in refused(f"{SHORT} --out {tmp_path / 'a'}")
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"lock", "private"}
        _files.unlock(*held)

    def test_data_that_are_not_there(self, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DPGRAD_DATA", raising=False)
        said = refused("train --data mnist")
        assert "mnist needs files that are missing: fetch them with --download --data-dir DIR, or put " in said
        assert "into DIR/mnist, where --data-dir or DPGRAD_DATA names DIR" in said

    @pytest.mark.parametrize("command", ["train --data", "curvature"])
    @pytest.mark.parametrize("name", [name for name in data.names() if data.sources(name)])
    def test_every_file_that_is_not_there_is_named(
        self, refused: Callable[..., str], tmp_path: Path, name: str, command: str
    ) -> None:
        said = refused(f"{command} {name} --data-dir {tmp_path}")
        assert " ... " not in said  # nothing is cut
        assert str(tmp_path) in said
        assert all(source.file in said and source.published in said for source in data.sources(name))
        assert ("--download" in said) == all(source.url for source in data.sources(name))

    def test_missing_files_are_fetched(
        self, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def fetched(url: str, target: Path, **others: Any) -> None:
            asked.append(url)
            raise data.DataError("no network")

        monkeypatch.setattr(_source, "fetch", fetched)
        assert "no network" in refused(f"train --data mnist --download --data-dir {tmp_path}")
        assert asked == [data.sources("mnist")[0].url]

    def test_a_ledger_of_something_else(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "books").write_text("mine\n", "utf-8")
        assert "checksum" in refused(f"{SHORT} --plan --ledger {tmp_path / 'books'}")


class TestResume:
    def test_interrupted_and_resumed(self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        command = f"train --method dpsgd autos --steps 8 --batch-size 100 --no-baseline --out {tmp_path / 'a'}"
        real = _progress._lines

        def stopping(label: str, metric: str) -> Any:
            class Stop:
                def __enter__(self) -> Any:
                    return lambda now: label == "autos" and now.step == 3

                def __exit__(self, *_: object) -> None: ...

            return Stop()

        monkeypatch.setattr(_progress, "_lines", stopping)
        assert cli.main(command.split()) == 130
        out, err = capsys.readouterr()
        assert out == ""
        said = "count the whole plan as spent, or resume it with: dpgrad "
        assert err.startswith(f"dpgrad: error: interrupted: {said}")
        assert err.count("\n") == 1
        again = err.partition(said)[2]
        assert shlex.split(again) == shlex.split(
            f"train --method dpsgd autos --no-baseline --steps 8 --batch-size 100 --out {tmp_path / 'a'} --resume"
        )
        assert not (tmp_path / "a" / "autos" / "release").exists()
        weights = (tmp_path / "a" / "dpsgd" / "release" / "weights.pt").read_bytes()
        monkeypatch.setattr(_progress, "_lines", real)
        found = run(again, capsys)
        assert found["methods"]["autos"]["report"]["result"]["steps"] == 8
        assert found["methods"]["autos"]["report"]["guarantee"]["epsilon"] <= 3
        assert (tmp_path / "a" / "dpsgd" / "release" / "weights.pt").read_bytes() == weights

    def test_a_finished_run_is_shown_again(self, capsys: Capture, tmp_path: Path) -> None:
        first = run(f"{SHORT} --out {tmp_path / 'a'}", capsys)
        assert run(f"{SHORT} --out {tmp_path / 'a'} --resume", capsys) == first

    @pytest.mark.parametrize("resume", ["", "--resume"])
    def test_no_other_runs_in_the_folder_of_one(
        self, refused: Callable[..., str], tmp_path: Path, capsys: Capture, resume: str
    ) -> None:
        """The methods of the default would begin, and spend, though nobody asked for them."""
        run(f"{SHORT} --out {tmp_path / 'a'}", capsys)
        before = files(tmp_path)
        said = refused(f"train {resume} --out {tmp_path / 'a'}")
        assert f"{tmp_path / 'a'} holds the run of one method, and 4 were asked for" in said
        assert "give --resume, its --method" in said
        assert files(tmp_path) == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--method dpsgd", "holds the runs of several methods, and one was asked for"),
            ("", "and was not begun with --method dpsgd autos psac psasc"),
            ("--method psasc autos dpsgd", "and was not begun with --method psasc autos dpsgd"),
        ],
        ids=["one", "default", "another order"],
    )
    def test_no_other_runs_among_several(
        self, refused: Callable[..., str], trained: Any, options: str, message: str
    ) -> None:
        before = files(trained.folder)
        assert message in refused(f"train {options} --resume --out {trained.folder}")
        assert files(trained.folder) == before

    def test_no_runs_among_other_files(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "note.txt").write_text("mine", "utf-8")
        for command in (SHORT, "train"):
            assert "which holds other files" in refused(f"{command} --resume --out {tmp_path}")
            assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]

    def test_interrupted_while_it_is_released(self, capsys: Capture, tmp_path: Path) -> None:
        (tmp_path / "job.toml").write_text('method = "dpsgd"\nsteps = 3\nbatch-size = 100\n', "utf-8")
        command = f"train --config {tmp_path / 'job.toml'} --no-baseline --epsilon 2.5 --out {tmp_path / 'a'}"

        def interrupted(folder: Path, found: report.Report) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "write", interrupted)
            assert cli.main(command.split()) == 130
        again = capsys.readouterr().err.partition("resume it with: dpgrad ")[2]
        assert sorted(again.split()) == sorted(f"{command} --resume".split())
        assert run(again, capsys)["methods"]["dpsgd"]["report"]["result"]["steps"] == 3

    def test_another_method_or_plan_is_refused(
        self, refused: Callable[..., str], capsys: Capture, tmp_path: Path
    ) -> None:
        command = interrupted_at_its_end(f"{SHORT} --out {tmp_path / 'a'}", capsys)
        assert "resume it with the same" in refused(f"{command} --resume --epsilon 1")
        run(f"{command} --resume", capsys)
        said = refused(*f"{command} --resume --method autos".split())
        assert "holds a finished run of dpsgd, not of autos" in said

    def test_changed_data_are_charged_and_said(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command = interrupted_at_its_end(f"{SHORT} --checkpoint-every 1 --out {tmp_path / 'a'}", capsys)
        digits = data.load("digits")
        other = dataclasses.replace(digits, x_train=digits.x_train / 2)
        monkeypatch.setattr(data, "load", lambda *names, **options: other)
        assert cli.main(f"{command} --resume --json".split()) == 0
        out, err = capsys.readouterr()
        (line,) = [line for line in err.splitlines() if line.startswith("dpgrad: warning: ")]
        assert " with a new key (not the same as before: data" in line
        assert "stays spent" in line
        assert json.loads(out)["warnings"] == [line.removeprefix("dpgrad: warning: ")]

    def test_not_for_release(self, capsys: Capture, tmp_path: Path) -> None:
        assert cli.main(f"{SHORT} --seed 7 --out {tmp_path / 'a'}".split()) == 0
        out = capsys.readouterr().out
        assert f"run folder    {tmp_path / 'a'}  (not for release)\n" in out
        assert "share release/" not in out


class States:
    """``os`` that keeps a copy of a folder before every call that changes it, once ``begin`` was made in it."""

    def __init__(self, folder: Path, copies: Path, begin: str) -> None:
        self.folder, self.copies, self.begin = folder, copies, begin

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "replace", "rename", "mkdir", "unlink", "rmdir", "chmod"):
            return real

        def called(*given: Any) -> Any:
            if (self.folder / self.begin).exists():
                shutil.copytree(self.folder, self.copies / str(len(list(self.copies.iterdir()))))
            return real(*given)

        return called

    def distinct(self) -> list[Path]:
        """The copies, each state once."""
        known: dict[tuple[Any, ...], Path] = {}
        for place in sorted(self.copies.iterdir(), key=lambda path: int(path.name)):
            held = sorted((p.relative_to(place), p.read_bytes() if p.is_file() else b"") for p in place.rglob("*"))
            known.setdefault(tuple(held), place)
        return list(known.values())


def states(command: str, folder: Path, copies: Path, begin: str) -> list[Path]:
    """What a kill at any call would have left of a command's run folder, from the moment there is ``begin``."""
    copies.mkdir()
    seen = States(folder, copies, begin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files, "os", seen)
        assert cli.main([*command.split(), "--out", str(folder)]) == 0
    return seen.distinct()


@pytest.mark.slow
class TestKilled:
    """A kill at every call: the folders that it would have left, resumed by the command."""

    def test_within_the_end(self, capsys: Capture, tmp_path: Path) -> None:
        found = states(SHORT, tmp_path / "a", tmp_path / "copies", "release")
        left = [(place / "private" / "checkpoint.pt").exists() for place in found]
        assert left == sorted(left, reverse=True)
        assert 2 <= sum(left) < len(left) - 1  # released; released and said to be finished; then the key goes
        weights = (tmp_path / "a" / "release" / "weights.pt").read_bytes()
        for place in found:
            capsys.readouterr()
            run(f"{SHORT} --resume --out {place}", capsys)
            assert {path.name for path in place.iterdir()} == {"ledger.jsonl", "lock", "release", "report.html"}, place
        # a run that was finished is not released again
        assert (found[-1] / "release" / "weights.pt").read_bytes() == weights

    def test_before_the_first_checkpoint(self, capsys: Capture, tmp_path: Path) -> None:
        found = states(SHORT, tmp_path / "a", tmp_path / "copies", "lock")
        early = [place for place in found if not (place / "ledger.jsonl").exists()]
        assert any((place / "private" / "checkpoint.pt").exists() for place in early)
        assert not all((place / "private" / "checkpoint.pt").exists() for place in early)
        for place in early[:: max(1, len(early) // 6)] + early[-1:]:
            capsys.readouterr()
            done = run(f"{SHORT} --resume --out {place}", capsys)
            assert done["methods"]["dpsgd"]["report"]["result"]["steps"] == 3
            assert not (place / "private").exists()


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Within the block no file grows beyond so many bytes; Python ignores the signal that would come of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_is_one_line_that_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Files that cannot grow fail in the same calls: at the beginning, at a checkpoint, in the release at the end."""
    limits = {"0": "private/README.txt", "2000": "private/checkpoint.pt", "50000": "release.partial"}
    priced = "--noise-multiplier 4 --accountant rdp"  # the quickest plan: the files are the same
    importlib.import_module("joblib")  # which would write a file, and go without what it is for
    monkeypatch.chdir(tmp_path)
    for most, place in limits.items():
        with limited(int(most)):
            assert cli.main([*f"{SHORT} {priced} --out".split(), most]) == 2
        *_, said = capsys.readouterr().err.splitlines()
        assert said == (
            f"dpgrad: error: {most}/{place} could not be written: File too large; what was written before is kept: fix "
            "that or choose another folder"
        )


class TestInterrupted:
    @pytest.mark.parametrize(
        "module",
        [
            "dpgrad.cli", "torch", "dpgrad.training.fit",
            *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("argparse", "numpy", "torch.nn")),
        ],
    )  # fmt: skip
    def test_ctrl_c_while_modules_load_is_one_line(self, module: str, tmp_path: Path) -> None:
        code = (
            "import signal, sys\n"
            "class Finder:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
            "sys.meta_path.insert(0, Finder())\n"
            "from dpgrad.__main__ import main\nsys.exit(main())"
        )
        command = [sys.executable, "-c", code, *SHORT.split(), "--out", str(tmp_path / "a")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        said = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]  # after any waiting
        assert (done.returncode, done.stdout, said) == (130, "", ["dpgrad: error: interrupted"])
        assert not (tmp_path / "a").exists()

    def test_ctrl_c_that_is_ignored_stays_so(self) -> None:
        code = (
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nfrom dpgrad import _interrupt\n"
            "_interrupt.at_once()\nsignal.raise_signal(signal.SIGINT)\n_interrupt.orderly()\n"
            "signal.raise_signal(signal.SIGINT)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0

    def test_ctrl_c_during_the_work_is_raised(self) -> None:
        code = (
            "import signal\nfrom dpgrad import _interrupt\n_interrupt.at_once()\n_interrupt.orderly()\n"
            "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: raise SystemExit(7)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 7


class TestProgress:
    def test_a_bar_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        with _progress.showing("dpsgd", "accuracy") as show:
            for step in (1, 2):
                show(Progress(step, 2, 1.5, 0.91, 1.0, 61.0))
        err = capsys.readouterr().err
        assert "2/2" in err
        assert "ε 1.5" in err
        assert "held-out accuracy 91.0 %" in err
        assert "1:01 left" in err

    def test_what_takes_long_is_said_before_the_first_step(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        monkeypatch.setattr(_options, "LATE", 0.0)
        with _progress.showing("dpsgd", "accuracy"):
            while not (err := capsys.readouterr().err):
                time.sleep(0.01)
        assert err == "dpgrad: checking the model and computing the noise for dpsgd ...\n"

    def test_nothing_is_said_after_the_first_step_but_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        timers: list[Any] = []

        class Timer(threading.Timer):
            def start(self) -> None:
                timers.append(self)

        monkeypatch.setattr(_options.threading, "Timer", Timer)
        with _progress.showing("dpsgd", "accuracy") as show:
            assert not timers[0].finished.is_set()
            show(Progress(1, 2, 1.5, None, 1.0, 1.0))
            assert timers[0].finished.is_set()

    def test_a_loss_is_no_share(self) -> None:
        assert "held-out squared 0.25" in _progress.said(Progress(1, 2, 1.5, 0.25, 1.0, 1.0), "squared")
        assert "held-out" not in _progress.said(Progress(1, 2, 1.5, None, 1.0, 1.0), "squared")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dpgrad.cli import main\n"
        "assert main(['train', '--help']) == 0\nassert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
