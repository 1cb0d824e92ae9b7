"""How a command is run in a test: for its JSON object, for its words, or for its refusal."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpgrad import cli
from dpgrad.cli import _options

PATIENCE = re.compile(r"(?m)^dpgrad: .* \.\.\.$\n")  # after three seconds, which anything takes on a busy machine
Answer = dict[str, Any]


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of what takes long, as on an idle machine."""
    monkeypatch.setattr(_options, "LATE", 3600.0)


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[[str], Answer]:
    """Runs a command with --json; checks that standard output is one object and standard error is empty."""

    def run(command: str) -> Answer:
        code = cli.main([*command.split(), "--json"])
        out, err = capsys.readouterr()
        assert (code, PATIENCE.sub("", err)) == (0, ""), err
        assert out.count("\n") == 1
        found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
        assert isinstance(found, dict)
        return found

    return run


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a command for people; what it prints, with every stretch of white space made one space."""

    def run(command: str) -> str:
        code = cli.main(command.split())
        out, err = capsys.readouterr()
        assert (code, PATIENCE.sub("", err)) == (0, ""), err
        return " ".join(out.split())

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must exit 2 with one line on standard error alone; that line."""

    def run(*command: str) -> str:
        code = cli.main(command[0].split() if len(command) == 1 else list(command))
        out, err = capsys.readouterr()
        err = PATIENCE.sub("", err)
        assert code == 2
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("dpgrad: error: ")
        assert err.endswith("\n")
        assert "Traceback" not in err
        return err

    return run


@dataclass(frozen=True)
class Trained:
    """A short run of `dpgrad train` by two methods: where it is, and what it wrote to either stream."""

    folder: Path
    out: str
    err: str


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    out, err = io.StringIO(), io.StringIO()
    command = f"train --method dpsgd psasc --steps 20 --batch-size 256 --out {folder}"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main(command.split()) == 0, err.getvalue()
    return Trained(folder, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was released of a linear model of rows of three numbers and two classes; the model adds up nothing else."""
    import torch

    from dpgrad.training.models import build

    folder = tmp_path_factory.mktemp("small")
    command = f"train --method dpsgd --model linear --steps 1 --batch-size 64 --no-baseline --out {folder / 'run'}"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert cli.main(command.split()) == 0, err.getvalue()
    release = folder / "run" / "release"
    found = json.loads((release / "report.json").read_text("utf-8"))
    found["model"] = {"name": "linear", "shape": [3], "outputs": 2, "dtype": "float32", "source": None, "parameters": 8}
    found["data"]["classes"] = ["no", "yes"]
    found["public"] = [entry for entry in found["public"] if "pixel" not in entry]
    (release / "report.json").write_text(json.dumps(found), "utf-8")
    torch.save(build("linear", [3], 2).state_dict(), release / "weights.pt")
    return release
