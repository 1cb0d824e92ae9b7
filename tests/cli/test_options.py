"""What all commands share: empty options, misspelt ones, and where an answer is written."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpgrad import cli

Refused = Callable[..., str]
PARSERS = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
COMMANDS = tuple(PARSERS)
OPTIONS = [
    (name, action)
    for name, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings and len(action.option_strings[0]) > 4
]
CHOICES = [(name, action) for name, action in OPTIONS if action.choices]


def swapped(name: str) -> str:
    """A name with two of its letters in each other's place."""
    place = next(n for n in range(len(name) // 2, len(name)) if name[n - 1] != name[n])
    return name[: place - 1] + name[place] + name[place - 1] + name[place + 1 :]


class TestEmpty:
    """An unset variable of a shell gives an empty option: the default was not asked for."""

    @pytest.mark.parametrize("name", ["model", "data", "data-dir", "preprocessing", "out", "ledger", "device", "engine",
                                      "optimizer", "averaging", "rate-schedule", "clip-schedule", "config", "method",
                                      "group", "relation", "epsilon", "steps"])  # fmt: skip
    @pytest.mark.parametrize("value", ["", "  "], ids=["empty", "blank"])
    def test_train(self, refused: Refused, name: str, value: str) -> None:
        assert f"--{name}" in refused("train", "--plan", f"--{name}", value)

    @pytest.mark.parametrize(
        "words",
        [
            ("predict", "", "--input", "rows.npy"),
            ("predict", "run", "--input", ""),
            ("predict", "run", "--input", "rows.npy", "--output", ""),
            ("report", ""),
            ("report", "run", "--out", ""),
            ("curvature", ""),
            ("curvature", "digits", "--preprocessing", ""),
        ],
        ids=" ".join,
    )
    def test_others(self, refused: Refused, words: tuple[str, ...]) -> None:
        assert "must not be empty, got ''" in refused(*words)


class TestMisspelt:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("audit --data digits", "unknown option '--data': write the options of dpgrad train into a file and give"),
            ("train --epsilonn 3", "unknown option '--epsilonn': did you mean --epsilon?"),
            ("train --learning_rate=3", "unknown option '--learning_rate': did you mean --learning-rate?"),
            ("train -epsilon 3", "unknown option '-epsilon': did you mean --epsilon?"),
            ("calibrate --epsilom 3", "did you mean --epsilon?"),  # though the right one is missing
            ("train --zzz", "unknown option '--zzz': dpgrad train --help-all lists the options"),
            ("predict run --inputs rows.npy", "did you mean --input?"),
            ("train --check", "unknown option '--check'"),
        ],
    )
    def test_the_one_that_was_meant(self, refused: Refused, command: str, said: str) -> None:
        assert said in refused(command)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_command(self, refused: Refused, command: str) -> None:
        given = swapped(command)
        said = f"command must be one of {', '.join(COMMANDS)}, got '{given}': did you mean {command}?"
        assert said in refused(f"{given} --epsilon 3")

    @pytest.mark.parametrize(("command", "action"), CHOICES, ids=lambda value: getattr(value, "dest", value))
    def test_a_choice(self, refused: Refused, command: str, action: argparse.Action) -> None:
        for name in action.choices or ():
            option, given = action.option_strings[0], swapped(name)
            assert f"{option} must be one of " in (said := refused(command, option, given))
            assert f"got '{given}': did you mean {name}?" in said

    @pytest.mark.parametrize(("command", "action"), OPTIONS, ids=lambda value: getattr(value, "dest", value))
    def test_an_option(self, refused: Refused, command: str, action: argparse.Action) -> None:
        option = action.option_strings[0]
        given = f"--{swapped(option.removeprefix('--'))}"
        assert f"unknown option '{given}': did you mean {option}?" in refused(command, given)

    @pytest.mark.parametrize("command", ["--methdo psasc train", "--epsilon 3 train"])
    def test_an_option_before_the_command(self, refused: Refused, command: str) -> None:
        assert "the options of a command follow it, as in dpgrad train --epsilon 3" in refused(command)

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            ("train --data mnst", "mnist"), ("train --method psaac", "psac"), ("train --plan --model lniear", "linear"),
            ("train --plan --method dpsgd --optimizer aadm", "adam"), ("train --preprocessing rwa", "raw"),
            ("train --plan --averaging eam:0.9", "ema"), ("train --plan --learning-rate-schedule cosnie", "cosine"),
            ("train --plan --method dpsgd --clip-schedule lienar", "linear"), ("curvature sonra", "sonar"),
            ("predict run --input rows.csv --separator smeicolon", "semicolon"),
        ],
    )  # fmt: skip
    def test_a_name(self, refused: Refused, command: str, name: str) -> None:
        assert refused(command).endswith(f": did you mean {name}?\n")


def run(command: str, **settings: Any) -> "subprocess.CompletedProcess[bytes]":
    source = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, **settings.pop("env", {})}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 300}
    return subprocess.run(
        [sys.executable, "-m", "dpgrad", *command.split()], env=environment, **{**options, **settings}
    )


class TestWhereItIsWritten:
    @pytest.mark.parametrize("command", ["", *COMMANDS])
    def test_help_on_a_narrow_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", "20")
        assert cli.main([*command.split(), "--help"]) == 0
        out, err = capsys.readouterr()
        assert "usage: dpgrad" in out
        assert err == ""

    @pytest.mark.parametrize("command", ["--help", "--version", "train --help", "epsilon --help", "report ε"])
    def test_ascii_alone(self, command: str) -> None:
        done = run(command, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "20"})
        assert done.returncode == (2 if "ε" in command else 0), done.stderr
        assert (done.stdout + done.stderr).isascii()
        assert b"Traceback" not in done.stderr

    @pytest.mark.parametrize("command", ["", "--help", "--version", "train --help"])
    def test_a_closed_pipe(self, command: str) -> None:
        read, write = os.pipe()
        os.close(read)
        try:
            done = run(command, stdout=write)
        finally:
            os.close(write)
        assert done.returncode == 2
        assert done.stderr.decode().count("\n") == 1
        assert b"standard output" in done.stderr

    def test_a_full_disk(self) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("this system has no /dev/full")
        with open("/dev/full", "wb") as full:
            done = run("--help", stdout=full)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert b"the answer could not be written to standard output: No space left" in done.stderr

    def test_bytes_that_are_no_text(self) -> None:
        done = run("report " + os.fsdecode(b"\xff\xfe"))
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert b"give the folder of a finished run" in done.stderr


class TestNets:
    """What no check foresaw is still one line, and refused rather than called a defect where the input is to blame."""

    @pytest.mark.parametrize(("error", "said"), [(RecursionError(), "nested too deeply"), (MemoryError(), "memory")])
    def test_limits_of_the_machine(
        self, refused: Refused, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("dpgrad.reports.report.load", fail)
        assert said in refused("predict run --input rows.npy")

    def test_a_long_refusal_keeps_its_remedy(self, refused: Refused) -> None:
        said = refused("train", "--plan", "--learning-rate-schedule", "x" * 5000)
        assert len(said) < 1500
        said = refused("report", "x" * 5000)
        assert len(said) < 1500
        assert "give the folder of a finished run" in said or "File name too long" in said
