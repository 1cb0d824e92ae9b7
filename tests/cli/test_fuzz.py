"""Hostile arguments and files: every command answers, or refuses with one line and exit code 2; never anything else.

Cases are drawn from seeds. The short test is for every change; the long one, marked slow, draws many more.
"""

import argparse
import json
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpgrad import cli
from dpgrad.reports.chart import Chart
from dpgrad.training import prepare
from hostile import GOOD, Words, check

VALUES = (
    "", " ", "-", "--", "=", "0", "-0", "1", "-1", "2", "0.5", "1e-9", "1e-320", "1e308", "1e309", "-1e308", "nan",
    "-nan", "inf", "-inf", "1/0", "1/3", "0/0", "1e18", "99999999999999999999", "1" * 5000, "0x10", "1_000", "１", "½",
    "true", "None", "null", "[]", "{}", "()", "%s%n", "{0}", "\x1b[31m", "\n", "a\nb", "\udcff", "a\0b", "é", "ε",
    "\u202e", "😀",
    "x" * 5000, "..", "/", ".", "~", "*", "/dev/null", "/proc/self/mem", "absent/absent", "warmup:inf+constant",
    "warmup:nan+constant", "warmup:0+constant", "warmup:1e400+constant", "warmup:2+" * 3000 + "constant", "warmup:2+",
    "linear:nan", "linear:-1", "cosine:2", "cosine:inf", "cosine:0:0", "decay-then-hold:0:1e308",
    "decay-then-hold:0.5:-1", "decay-then-hold:nan:nan", "linear", "affine", "affine:1", "geometric", "geometric:0",
    "geometric:1e-320", "geometric:nan", "geometric:0.5:0.5", "arithmetic:inf", "arithmetic:0.1", "ema:nan", "ema:inf",
    "ema:1", "ema:0.5", "tail:nan", "tail:1e-320", "tail:1", "conv*:nan", "*:1:1", "[:1", "*:0", ":::", "dpsgd",
    "psasc",
    "dpsgd-dynamic", "mlp", "cnn", "adam", "lbfgs", "SGD", "__class__", "os", "digits", "adult", "cuda:99", "cpu:7",
    "meta",
    "vmap", "comma", "|",
)  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that are not what a command expects, by a name for each."""
    folder = tmp_path_factory.mktemp("hostile")
    contents = {
        "empty": b"",
        "zeros": bytes(1000),
        "noise": random.Random(1).randbytes(3000),
        "deep": b"[" * 200_000,
        "deep-objects": b'{"a":' * 200_000,
        "number": b"1" * 10_000,
        "nan": b"NaN",
        "list": b"[]",
        "object": b"{}",
        "curves": b'{"curves": [{"points": [0], "seconds": {"a": [1]}}]}',
        "latin": "é".encode("latin-1"),
        "line": b"x" * 300_000,
        "pickle": b"\x80\x04K\x01.",
        "keys": b"epsilon = 1\nepsilon = 2\n",
        "key": b"epsilonn = 1\n",
        "kind": b"epsilon = [1, 2]\n",
        "table": b"[epsilon]\na = 1\n",
        "nest": b"epsilon = " + b"[" * 5000 + b"]" * 5000,
        "false": b"json = 0\n",
        "date": b"epsilon = 1979-05-27\n",
        "nul": b'data = "a\\u0000b"\n',
        "config": b"config = 'a'\n",
        "twice": b"noise_multiplier = 1\nnoise-multiplier = 2\n",
        "method": b"method = ['--help']\n",
    }
    found = {}
    for name, content in contents.items():
        for ending in ("", ".json", ".toml", ".csv", ".npy", ".npz", ".html", ".svg"):
            path = folder / f"{name}{ending}"
            path.write_bytes(content)
            found[path.name] = path
    for ending in (".json", ".toml", ".csv", ".npy", ".npz"):
        (folder / f"folder{ending}").mkdir()
        os.mkfifo(folder / f"pipe{ending}")
        (folder / f"loop{ending}").symlink_to(folder / f"loop{ending}")
        (folder / f"shut{ending}").touch(mode=0)
        found |= {f"{name}{ending}": folder / f"{name}{ending}" for name in ("folder", "pipe", "loop", "shut")}
    with zipfile.ZipFile(folder / "none.npz", "w"):
        found["none.npz"] = folder / "none.npz"
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: what is spoilt is refused before that, or is well."""
    monkeypatch.setattr(prepare, "expected_seconds", lambda *_, **__: 0.0)
    monkeypatch.setattr(Chart, "html", lambda _: "<svg/>")


def options(command: str) -> dict[str, argparse.Action]:
    parser = cli.parser()._subparsers
    assert parser is not None
    chosen = parser._group_actions[0].choices[command]  # type: ignore[index]
    return {action.option_strings[0]: action for action in chosen._actions if action.option_strings}


def spoilt(draw: random.Random, command: str, places: dict[str, str], files: list[str]) -> Words:
    """The line of a command with one to three options spoilt, added or dropped."""
    words = [command, *GOOD[command].format(**places).split()]
    known = options(command)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        name = draw.choice([*known, "--unknown"])
        a_place = name not in known or str(known[name].metavar).startswith(("FILE", "DIR"))
        value = draw.choice(files) if draw.random() < (0.7 if a_place else 0.05) else draw.choice(VALUES)
        how = draw.random()
        takes = name not in known or known[name].nargs != 0
        if how < 0.5 and takes and name in words[:-1]:
            words[words.index(name) + 1] = value
        elif how < 0.85:
            words += [name, value] if takes else [name]
        elif how < 0.95:
            words[draw.randrange(1, len(words))] = value
        else:
            del words[draw.randrange(1, len(words))]
    return [word for word in words if word not in ("--help", "--help-all", "-h", "--resume")]


def expensive(words: Words) -> bool:
    """Whether an honest answer takes long: a run that is not only planned."""
    return words[0] == "train" and "--plan" not in words


def rounds(
    seed: int, count: int, small: Path, hostile: dict[str, Path], tmp_path: Path, only: str | None = None
) -> Iterator[Words]:
    draw = random.Random(seed)
    np.save(tmp_path / "rows.npy", np.zeros((2, 3)))
    np.save(tmp_path / "y.npy", np.arange(2))
    places = {"small": str(small), "rows": str(tmp_path / "rows.npy"), "out": str(tmp_path / "out")}
    files = [str(path) for path in hostile.values()]
    for _ in range(count):
        for command in [only] if only else GOOD:
            words = spoilt(draw, command, places, files)
            if not expensive(words):
                yield words


PLAIN: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**12, 10**17, -(10**17), 0.5, 1e-320, 1e308, -1e308, "", "x", "\0", "\ud800", "ε",
    "<script>", "x" * 3000, [], [[]], [None], {}, {"a": 1}, ["a", "b"], [3], [1, 8, 8], [10**9, 10**9],
    {"type": "gaussian"},
    {"type": "repeat", "count": 10**15, "event": {"type": "gaussian", "noise_multiplier": 1e-300}},
)  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that is in a plain value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from leaves(item, (*path, key))


def edited(draw: random.Random, found: Any) -> Any:
    """A copy of a plain value with one thing in it replaced, left out or added to."""
    made = {"": json.loads(json.dumps(found))}
    *path, last = ("", *draw.choice(list(leaves(found))))
    place: Any = made
    for key in path:
        place = place[key]
    if draw.random() < 0.8:
        place[last] = draw.choice(PLAIN)
    elif last != "":
        del place[last]
    return made[""]


def edit(draw: random.Random, content: bytes) -> bytes:
    """Bytes with some changed, cut off, left out or put in twice."""
    start, end = sorted(draw.choices(range(len(content) + 1), k=2))
    match draw.randrange(5):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[end:]
        case 2:
            return content[:start] + draw.randbytes(draw.randint(1, 8)) + content[start:]
        case 3:
            return content[:end] + content[start:]
        case _:
            made = bytearray(content)
            for place in draw.choices(range(len(made)), k=draw.randint(1, 4)):
                made[place] = draw.randrange(256)
            return bytes(made)


def copied(small: Path, tmp_path: Path) -> Path:
    made = tmp_path / "edited"
    made.mkdir(exist_ok=True)
    for name in ("report.json", "weights.pt"):
        (made / name).write_bytes((small / name).read_bytes())
    return made


def spoil_files(seed: int, count: int, small: Path, tmp_path: Path) -> None:
    """`predict` and `report` with files of which one was edited."""
    draw, made = random.Random(seed), copied(small, tmp_path)
    report, weights = json.loads((small / "report.json").read_text("utf-8")), (small / "weights.pt").read_bytes()
    np.save(tmp_path / "rows.npy", np.ones((4, 3)))
    np.savez_compressed(tmp_path / "rows.npz", x=np.ones((4, 3)))
    (tmp_path / "rows.csv").write_text('a,"b",c\n1,2.5,3\n-4e0,5,6\n', "utf-8")
    whole = {path: path.read_bytes() for path in sorted(tmp_path.glob("rows.*"))}
    predict = ["predict", str(made), "--json", "--input"]
    for _ in range(count):
        (made / "report.json").write_text(json.dumps(edited(draw, report)), "utf-8")
        check([*predict, str(tmp_path / "rows.npy")])
        if draw.random() < 0.2:  # drawing takes long
            check(["report", str(made), "--json", "--out", str(tmp_path / "page.html")])
        (made / "report.json").write_bytes(edit(draw, (small / "report.json").read_bytes()))
        check([*predict, str(tmp_path / "rows.npy")])
        (made / "report.json").write_text(json.dumps(report), "utf-8")
        (made / "weights.pt").write_bytes(edit(draw, weights))
        check([*predict, str(tmp_path / "rows.npy")])
        (made / "weights.pt").write_bytes(weights)
        for path, content in whole.items():
            path.write_bytes(edit(draw, content))
            check([*predict, str(path)])
            path.write_bytes(content)


def spoil_settings(seed: int, count: int, tmp_path: Path) -> None:
    """`train --plan` with settings of which some were edited."""
    draw, path = random.Random(seed), tmp_path / "settings.toml"
    good = {
        "method": "dpsgd",
        "steps": 5,
        "model": "linear",
        "accountant": "rdp",
        "batch_size": 64,
        "plan": True,
        "json": True,
    }
    for _ in range(count):
        lines = [f"{name} = {json.dumps(value)}" for name, value in good.items()]
        name = draw.choice(["", *options("train")]).removeprefix("--")
        said = json.dumps(draw.choice((*PLAIN, *VALUES)), ensure_ascii=draw.random() < 0.5).encode("utf-8", "replace")
        made = "\n".join(line for line in lines if not line.startswith(f"{name} ")).encode()
        made += f"\n{name} = ".encode() + said + b"\n"
        path.write_bytes(edit(draw, made) if draw.random() < 0.3 else made)
        check(["train", "--plan", "--config", str(path), "--out", str(tmp_path / "run")])


def test_edited_files(small: Path, tmp_path: Path) -> None:
    spoil_files(13, 20, small, tmp_path)


@pytest.mark.usefixtures("quick")
def test_edited_settings(tmp_path: Path) -> None:
    spoil_settings(13, 20, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
def test_many_edited_files(small: Path, tmp_path: Path, seed: int) -> None:
    spoil_files(seed, 100, small, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["--ledger", "--out", "--resume --out"])
def test_runs_in_hostile_places(hostile: dict[str, Path], tmp_path: Path, option: str) -> None:
    for name, path in hostile.items():
        if name.endswith(".json"):
            out = [] if "--out" in option else ["--out", str(tmp_path / name)]
            command = (
                "train --method dpsgd --model linear --steps 2 --batch-size 64 --no-baseline --accountant rdp --json"
            )
            check([*command.split(), *out, *option.split(), str(path)])


def test_numbers_beyond_squaring() -> None:
    for command in (
        "calibrate --sampler full-batch --steps 3 --delta 1e-5 --accountant exact",
        "curvature digits --rows 20 --loss softmax",
    ):
        for epsilon in ("1e308", "1e-308"):
            check([*command.split(), "--epsilon", epsilon, "--json"])
    for clip in ("1e308", "1e-308"):
        check(["curvature", "digits", "--rows", "20", "--loss", "softmax", "--clip", clip, "--json"])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(3))
def test_many_edited_settings(tmp_path: Path, seed: int) -> None:
    spoil_settings(seed, 100, tmp_path)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("command", GOOD)
def test_what_is_spoilt_below_is_well_itself(small: Path, tmp_path: Path, command: str) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((2, 3)))
    np.save(tmp_path / "y.npy", np.arange(2))
    places = {"small": small, "rows": tmp_path / "rows.npy", "out": tmp_path / "out"}
    assert check([command, *GOOD[command].format(**places).split()])[0] == 0


@pytest.mark.usefixtures("quick")
def test_spoilt_arguments(
    small: Path, hostile: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = [check(words)[0] for words in rounds(13, 8, small, hostile, tmp_path)]
    assert codes.count(2) > len(codes) / 2


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(5))
def test_many_spoilt_arguments(
    small: Path, hostile: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in rounds(1000 + seed, 100, small, hostile, tmp_path):
        check(words)
