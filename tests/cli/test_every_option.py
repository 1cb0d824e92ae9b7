"""Every option of every command, as the parser lists them, with values that nobody should give.

Each call answers, or refuses with one line and exit code 2; never a traceback, never a file where none was asked for.
Options that are new are in here by themselves. Nothing is trained: `dpgrad train` only plans.
"""

import argparse
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpgrad import audit, cli
from dpgrad.cli import completion
from dpgrad.convex import curvature
from dpgrad.data import digits
from dpgrad.reports import compare
from dpgrad.reports.chart import Chart
from dpgrad.training import prepare
from dpgrad.tuning import planned
from hostile import GOOD, Words, check

PARSERS = {
    parser.prog.removeprefix("dpgrad "): parser
    for parser in completion.commands(cli.parser())
    if "answer" in parser._defaults  # not one that only leads to others
}
HELPS = ("--help", "--help-all")
NUMBERS = (
    "nan", "-nan", "inf", "-inf", "0", "-0", "-1", "1e-320", "1e308", "1e309", "-1e308", "9" * 400, "1" * 5000, "1/0",
    "0x10", "1_000", "１", "½", "1e", "+1", "1,5",
)  # fmt: skip
TEXTS = (
    "", " ", "\t", "\n", "a\nb", "a\0b", "\udcff", "\u202e", "é", "😀", "x" * 5000, "-", "--", "=", "%s%n", "{0}",
    "$HOME", "*", "[", "(", "\\", "'", '"', ":", ":::", "..", "~", "../..", "None", "true", "__class__", "os:system",
)  # fmt: skip
PLACES = ("folder", "absent", "absent/absent", "empty", "noise.csv", "noise.npy", "noise.toml", "pipe", "loop",
          "/dev/null", "/proc/self/mem", "x" * 300, "hf:", "hf:absent", "hf:folder", "noise.py:make", "absent.py:make",
          "noise.py:", ":make", "folder.py:make")  # fmt: skip


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with things that are not what an option expects; the commands run in it."""
    here = tmp_path / "a" / "b"  # with little in the folders above
    here.mkdir(parents=True)
    for name in ("empty", "noise.csv", "noise.npy", "noise.toml", "noise.py"):
        (here / name).write_bytes(b"" if name == "empty" else bytes(range(256)) * 3)
    for name in ("folder", "folder.py"):
        (here / name).mkdir()
    os.mkfifo(here / "pipe")
    (here / "loop").symlink_to(here / "loop")
    monkeypatch.chdir(here)
    monkeypatch.delenv("DPGRAD_DATA", raising=False)
    return here


# pure functions, computed once for all tests
_DIGITS = functools.cache(lambda preprocessing, load=digits.load: load(preprocessing=preprocessing))
_REMEMBERING = [
    (compare, "figure", functools.cache(compare.figure)),
    (cli, "parser", functools.cache(cli.parser)),
    (planned, "planned", functools.cache(planned.planned)),
    (planned, "price", functools.cache(planned.price)),
    (digits, "load", lambda root=None, *, preprocessing="default", download=False: _DIGITS(preprocessing)),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, drawn or computed twice: what is spoilt is refused before that, or is well."""
    monkeypatch.setattr(prepare, "expected_seconds", lambda *_, **__: 0.0)
    monkeypatch.setattr(Chart, "html", lambda _: "<svg/>")
    monkeypatch.setattr(curvature, "_NEWTON_STEPS", 2)
    monkeypatch.setattr(audit, "step", lambda *job, step=audit.step, **how: step(*job, **how | {"checks": ["ledger"]}))
    for module, name, remembering in _REMEMBERING:
        monkeypatch.setattr(module, name, remembering)


def line(command: str, small: Path) -> Words:
    """A line of the command that is answered, or for a new command one that names what it requires."""
    if command in GOOD:
        rows = small.parent.parent / "rows.csv"
        rows.write_text("1,2,3\n", "utf-8")
        return [command, *GOOD[command].format(small=small, rows=rows, out="page").split()]
    words = command.split()
    for action in PARSERS[command]._actions:
        if action.required and action.nargs != 0:
            value = str(next(iter(action.choices))) if action.choices else "noise.csv"
            words += [*action.option_strings[:1], value]
    return words


def given(words: Words, option: str, *values: str) -> Words:
    """The line with these values of an option in place of the one it may have."""
    at = words.index(option) if option in words else len(words)
    return [*words[:at], *words[at + 2 :], *(f"{option}={value}" for value in values)]


def values(action: argparse.Action) -> tuple[str, ...]:
    """Bad values: all of the kind that the option takes, and some of the others."""
    if action.type is not None or action.choices is not None:
        return (*NUMBERS, *TEXTS[::3], *PLACES[::7])
    a_place = any(word in str(action.metavar) for word in ("FILE", "DIR", "FOLDER", "RUN", "NAME"))
    return (*NUMBERS[::5], *TEXTS, *PLACES) if a_place else (*NUMBERS[::3], *TEXTS, *PLACES[::5])


def spoilt(words: Words, action: argparse.Action) -> Iterator[Words]:
    """The line with bad values of one option: each alone, one after a good one, and one as a word of its own."""
    if not action.option_strings:
        for value in values(action):
            yield [words[0], value, *words[2:]] if words[0] in GOOD else [*words[:-1], value]
        return
    option = next(name for name in action.option_strings if name.startswith("--"))
    if action.nargs == 0:
        yield [*words, option, option]
        yield [*words, f"{option}=1"]
        yield [*words, f"{option}="]
        return
    for value in values(action):
        yield given(words, option, value)
    yield [*given(words, option), option]  # the value is missing
    yield [*given(words, option), option, "-1"]
    yield [*given(words, option), option, "a", "b"]
    yield given(words, option, "2", "nan")


OPTIONS = [
    pytest.param(name, action, id=f"{name} {action.option_strings[-1] if action.option_strings else action.dest}")
    for name, parser in PARSERS.items()
    for action in parser._actions
    if not {*HELPS} & {*action.option_strings}
]


def test_every_command_is_in_here() -> None:
    assert {name.split()[0] for name in PARSERS} == {*completion_of_main()}
    assert len(OPTIONS) > 100


def completion_of_main() -> list[str]:
    return list(next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices)


@pytest.mark.usefixtures("quick", "places")
@pytest.mark.parametrize(("command", "action"), OPTIONS)
def test_an_option(small: Path, command: str, action: argparse.Action) -> None:
    words = line(command, small)
    if command == "train" and action.type is None:
        words += ["--noise-multiplier", "1"]  # or the noise would be searched for again and again
    codes = [check(spoilt_words)[0] for spoilt_words in spoilt(words, action)]
    assert 2 in codes  # some of the values are refused


def valid(action: argparse.Action) -> list[Words]:
    """Values that the option accepts by itself, where its kind tells."""
    option = action.option_strings[0]
    if action.nargs == 0:
        return [[name] for name in action.option_strings]
    if action.choices:
        return [[option, str(choice)] for choice in action.choices][-2:]  # the first accountant is the slowest
    return [[option, value] for value in ("2", "0.5", "linear", "ema:0.5", "dpsgd", "1e9") if _parsed(action, value)][
        :2
    ]


def _parsed(action: argparse.Action, value: str) -> bool:
    try:
        action.type(value) if callable(action.type) else None
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return True


def pairs(command: str, every: int) -> Iterator[Words]:
    """Two options of a command together, which may exclude or need each other."""
    actions = [a for a in PARSERS[command]._actions if a.option_strings and not {*HELPS} & {*a.option_strings}]
    for number, (one, other) in enumerate(itertools.combinations(actions, 2)):
        if number % every == 0:
            for first, second in zip(valid(one), valid(other), strict=False):
                yield [*first, *second]


@pytest.mark.usefixtures("quick", "places")
@pytest.mark.parametrize("command", PARSERS)
def test_two_options_together(small: Path, command: str) -> None:
    for words in pairs(command, 40 if command == "train" else 5):
        check([*line(command, small), *words])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick", "places")
@pytest.mark.parametrize("command", PARSERS)
def test_every_two_options_together(small: Path, command: str) -> None:
    for words in pairs(command, 1):
        check([*line(command, small), *words])
