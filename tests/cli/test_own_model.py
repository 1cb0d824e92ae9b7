"""`dpgrad train --model` with a file of one's own or a folder of transformers, and `dpgrad predict` of what it made."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgrad import cli, data
from dpgrad.reports import report
from dpgrad.training import models
from dpgrad.training.own_model import OwnModel

Capture = pytest.CaptureFixture[str]
SHORT = "train --method dpsgd --steps 2 --batch-size 100 --no-baseline"
NET = """
from torch import nn
from widths import WIDTH

print("made")


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH * shape[1] * shape[2], outputs)

    def forward(self, x):
        return self.head(self.conv(x).tanh().flatten(1))


def make(shape, outputs):
    return Net(shape, outputs)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A model in a folder with a colon in its name, which imports a file beside it."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "widths.py").write_text("WIDTH = 2\n", "utf-8")
    (folder / "net.py").write_text(NET, "utf-8")
    return folder / "net.py"


def run(command: str, capsys: Capture) -> tuple[Any, str]:
    """The JSON object of a command, and what it wrote to standard error."""
    code = cli.main([*command.split(), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out), err


class TestOwn:
    def test_from_a_file_to_predictions(self, net: Path, tmp_path: Path, capsys: Capture) -> None:
        found, err = run(f"{SHORT} --model {net}:make --out {tmp_path / 'run'}", capsys)
        assert "made\n" in err  # what the file prints is not in the answer
        made = found["methods"]["dpsgd"]["report"]["model"]
        assert (made["name"], made["source"]["file"], made["outputs"]) == ("own", "net.py:make", 10)
        assert str(tmp_path) not in json.dumps(found["methods"]["dpsgd"]["report"])
        rows = data.load("digits").x_test[:4]
        np.save(tmp_path / "rows.npy", rows)
        ask = f"predict {tmp_path / 'run'} --input {tmp_path / 'rows.npy'}"
        answer, err = run(f"{ask} --model {net}:make", capsys)
        assert "warning" not in err
        model = OwnModel(f"{net}:make").build((1, 8, 8), 10)
        model.load_state_dict(torch.load(tmp_path / "run" / "release" / "weights.pt", weights_only=True))
        with torch.no_grad():
            wanted = model(torch.from_numpy(rows)).softmax(1).numpy()
        np.testing.assert_allclose(answer["probabilities"], wanted, atol=1e-6)
        self.every_form(f"{ask} --model {net}:make", wanted, tmp_path, capsys)
        self.changed(ask, net, capsys)

    def every_form(self, ask: str, wanted: Any, folder: Path, capsys: Capture) -> None:
        for kind in ("csv", "json", "jsonl"):
            assert cli.main([*ask.split(), "--out", str(folder / f"out.{kind}")]) == 0
            assert "4 rows predicted" in capsys.readouterr().out
        table = list(csv.DictReader(io.StringIO((folder / "out.csv").read_text("utf-8"))))
        lines = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
        whole = json.loads((folder / "out.json").read_text("utf-8"))
        labels = [str(label) for label in wanted.argmax(1)]
        assert [row["label"] for row in table] == [line["label"] for line in lines] == whole["labels"] == labels
        for row, line, given, shares in zip(table, lines, whole["probabilities"], wanted, strict=True):
            np.testing.assert_allclose([float(row[f"probability of {name}"]) for name in range(10)], shares, atol=1e-6)
            np.testing.assert_allclose([line["probabilities"][str(name)] for name in range(10)], shares, atol=1e-6)
            np.testing.assert_allclose(given, shares, atol=1e-6)
        assert cli.main([*ask.split(), "--out", str(folder / "out.txt")]) == 2
        assert "--out must end in .csv, .json or .jsonl" in capsys.readouterr().err

    def changed(self, ask: str, net: Path, capsys: Capture) -> None:
        """A file that is not named is not run; one that has changed is reported, and refused if its weights differ."""
        assert cli.main(ask.split()) == 2
        assert "name the function that builds it with --model net.py:make; code is never" in capsys.readouterr().err
        net.write_text(f"{NET}\n# later\n", "utf-8")
        _, err = run(f"{ask} --model {net}:make", capsys)
        assert "net.py has changed since the model was trained" in err
        (net.parent / "widths.py").write_text("WIDTH = 30\n", "utf-8")
        sys.modules.pop("widths")
        assert cli.main([*ask.split(), "--model", f"{net}:make"]) == 2
        assert "does not hold the weights of this model: Error(s) in loading" in capsys.readouterr().err

    def test_a_run_of_ones_own_model_is_replayed(self, net: Path, tmp_path: Path, capsys: Capture) -> None:
        """Built again from the same file it is the same model: an interrupted run goes on with the same key."""
        command = f"{SHORT} --model {net}:make --out {tmp_path / 'run'}"

        def interrupted(folder: Path, found: report.Report) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(report, "write", interrupted)
            assert cli.main(command.split()) == 130
        capsys.readouterr()
        found, err = run(f"{command} --resume", capsys)
        assert "new key" not in err
        assert found["methods"]["dpsgd"]["report"]["result"]["steps"] == 2

    def test_what_training_rows_raise_is_not_repeated(
        self, refused: Callable[..., str], tmp_path: Path, capsys: Capture
    ) -> None:
        text = (
            "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        x = x.flatten(1)\n"
            "        if x.sum() > 0:\n            raise KeyError(f'secret {x.sum()}')\n"
            "        return super().forward(x)\n"
            "def make(shape, outputs):\n    return Net(64, outputs)\n"
        )
        (tmp_path / "net.py").write_text(text, "utf-8")
        said = refused(f"{SHORT} --model {tmp_path}/net.py:make --out {tmp_path / 'run'}")
        assert "net.py, line 6, raised KeyError on training rows" in said
        assert "secret" not in said
        assert not (tmp_path / "run").exists()


HEAD = "from torch import nn\n"
HOSTILE = {
    "no make": (f"{HEAD}def built(shape, outputs): ...\n", "net.py has no function 'make'; it has built"),
    "nearly make": (f"{HEAD}def mak(shape, outputs): ...\n", "has no function 'make': did you mean mak?"),
    "a number": ("make = 3\n", "has no function 'make'"),
    "raises": (f"{HEAD}def make(shape, outputs):\n    raise KeyError('x')\n", "net.py, line 3, raised KeyError: 'x'"),
    "raises at import": (f"{HEAD}\n\nnn.Lnear(2, 3)\n", "net.py, line 4, raised AttributeError: module 'torch.nn'"),
    "exits": ("import sys\nsys.exit(0)\n", "net.py, line 2, raised SystemExit: 0"),
    "recurses": (f"{HEAD}def make(a, b):\n    return make(a, b)\n", "net.py, line 3, raised RecursionError"),
    "syntax": ("def make(shape, outputs:\n    return 3\n", "net.py, line 1, raised SyntaxError"),
    "not text": ("\x00\x00", "net.py raised SyntaxError"),
    "missing package": ("import nowhere_at_all\n", "net.py, line 1, raised ModuleNotFoundError: No module named"),
    "none": ("def make(shape, outputs): ...\n", "must return a torch.nn.Module, got None: does it end with return?"),
    "a class": (f"{HEAD}def make(shape, outputs): return nn.Linear\n", "got a type: call it, Linear(...)"),
    "arguments": (f"{HEAD}def make(one): ...\n", "make(one) cannot be called with the shape of one row and the number"),
    "wrong size": (
        f"{HEAD}def make(shape, outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n",
        "gives outputs of shape (1, 7) for one row of shape (1, 8, 8), expected (1, 10)",
    ),
    "wrong input": (
        f"{HEAD}def make(shape, outputs): return nn.Linear(5, outputs)\n",
        "net.py raised RuntimeError on a row of zeros of shape (1, 8, 8): mat1 and mat2",
    ),
    "a tuple": (
        f"{HEAD}class Net(nn.Linear):\n    def forward(self, x): return x, x\ndef make(s, o): return Net(1, 1)\n",
        "must return a tensor of outputs, one row for each row, got tuple",
    ),
    "the same one": (
        f"{HEAD}NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\ndef make(s, o): return NET\n",
        "make returned parameters that it has returned before",
    ),
    "nothing to train": (
        f"{HEAD}def make(s, o): return nn.Sequential(nn.Flatten(), nn.Linear(64, o)).requires_grad_(False)\n",
        "model must have a parameter to train",
    ),
    "batch norm": (
        f"{HEAD}def make(s, o): return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, o))\n",
        "BatchNorm '0' mixes examples: replace it by GroupNorm with dpgrad.grads.convert(model)",
    ),
}
NAMED = {
    "a name": ("cnnn", "model must be FILE.py:FUNCTION, hf:FOLDER or one of linear, mlp, "),
    "near": ("resnet", "did you mean resnet9?"),
    "no function": ("net.py", "name the function that builds the model, FILE.py:FUNCTION"),
    "empty function": ("net.py:", "name the function that builds the model"),
    "no file": ("absent.py:make", "there is no file absent.py"),
    "a folder": ("folder.py:make", "folder.py is not a regular file"),
    "a network of other rows": ("yu2018-cnn", "model yu2018-cnn is for images of (channels, height, width) with sides"),
    "lora": ("mlp --lora 2", "--lora is for models of transformers, hf:FOLDER, got --model mlp: leave it out"),
    "lora of a file": ("net.py:make --lora 2", "--lora is for models of transformers"),
    "rank": ("hf:folder.py --lora 0", "--lora must be a whole number of at least 1, got 0"),
    "no folder": ("hf:absent", "--model hf:absent: there is no such folder"),
    "a long name": (f"{'1' * 3000}.py:make", "11: there is no file 11"),
    "a long folder": (f"hf:{'1' * 3000}", "11: there is no such folder"),
}


class TestRefused:
    @pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
    def test_files(
        self, refused: Callable[..., str], tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("net.py").write_text(text, "utf-8")
        assert message in refused(f"{SHORT} --model net.py:make")
        assert [path.name for path in tmp_path.iterdir()] == ["net.py"]

    @pytest.mark.parametrize(("model", "message"), NAMED.values(), ids=NAMED)
    def test_names(
        self, refused: Callable[..., str], tmp_path: Path, model: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("folder.py").mkdir()
        assert message in refused(f"{SHORT} --plan --model {model}")

    def test_every_name_is_in_the_help(self, told: Callable[[str], str]) -> None:
        said = told("train --help")
        assert [name for name in models.MODELS if name not in said] == []
