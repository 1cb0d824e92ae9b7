"""From files of one's own to predictions on other files: images by class, tables, texts; as a new user would."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgrad import cli, data
from dpgrad.training.models import build
from dpgrad.training.own_model import OwnModel

Image = pytest.importorskip("PIL.Image")
Capture = pytest.CaptureFixture[str]
SHORT = "train --method dpsgd --steps 2 --batch-size 10 --delta 0.001 --no-baseline"
CLASSES = ["cat", "dog"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> Path:
    Path(name).write_text(text, "utf-8")
    return Path(name)


def answered(command: str, capsys: Capture) -> str:
    """What the command prints."""
    code = cli.main(command.split())
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(command: str, capsys: Capture) -> str:
    """The one line of a refusal."""
    code = cli.main(command.split())
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


def release(folder: str) -> Any:
    """The report of a run; nothing in it says where files lie."""
    text = Path(folder, "release", "report.json").read_text("utf-8")
    assert str(Path.cwd()) not in text
    return json.loads(text)


class TestImages:
    """An image folder with a model of one's own: train, report, predict."""

    def folder(self, name: str, count: int) -> None:
        random = np.random.default_rng(0)
        for place, kind in enumerate(CLASSES):
            Path(name, kind).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 100, (6, 6, 3), dtype=np.uint8) + np.uint8(150 * place)
                Image.fromarray(pixels).save(Path(name, kind, f"{number}.png"))

    def test_own_model(self, capsys: Capture) -> None:
        self.folder("pets", 12)
        self.folder("new", 2)
        write(
            "net.py",
            "from torch import nn\n\n\ndef make(shape, outputs):\n"
            "    return nn.Sequential(nn.Conv2d(shape[0], 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, outputs))\n",
        )
        write("schema.toml", answered("data describe pets", capsys).replace("public = false", "public = true"))
        answered(f"{SHORT} --data pets --schema schema.toml --model net.py:make --out run", capsys)
        found = release("run")
        assert (found["data"]["name"], found["data"]["classes"]) == ("pets", CLASSES)
        assert (found["model"]["shape"], found["model"]["source"]["file"]) == ([3, 6, 6], "net.py:make")
        answered("report run --out page.html", capsys)
        ask = "predict run --model net.py:make"
        answered(f"{ask} --input new --out out.csv", capsys)
        with Path("out.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        model = OwnModel("net.py:make").build((3, 6, 6), 2)
        model.load_state_dict(torch.load("run/release/weights.pt", weights_only=True))
        with torch.no_grad():
            wanted = model(torch.from_numpy(data.encode("new", found["schema"]))).softmax(1)
        assert [row["file"] for row in rows] == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"]
        assert [row["label"] for row in rows] == [CLASSES[place] for place in wanted.argmax(1)]
        shares = [[float(row[f"probability of {name}"]) for name in CLASSES] for row in rows]
        np.testing.assert_allclose(shares, wanted, atol=1e-6)
        assert "name the function that builds it with --model net.py:make" in refused("predict run --input new", capsys)


SCHEMA = """
[columns.size]
kind = "number"
bounds = [0, 200]
public = true

[columns.code]
kind = "id"

[columns.town]
kind = "category"
categories = ["A", "B"]
missing = ["?"]
public = true

[target]
column = "price"
bounds = [100, 300]
public = true
"""


class TestTables:
    def test_a_real_target_in_its_own_units(self, capsys: Capture) -> None:
        """A table with strings and missing values; predictions lie within the declared bounds of the target."""
        rows = "".join(f"{size},{'AB?'[size % 3]},{100 + size},h{size}\n" for size in range(40))
        write("homes.csv", f"size,town,price,code\n{rows}")
        write("schema.toml", SCHEMA)
        answered(f"{SHORT} --data homes.csv --schema schema.toml --out run", capsys)
        found = release("run")
        assert (found["data"]["name"], found["model"]["name"], found["model"]["outputs"]) == ("homes", "linear", 1)
        write("new.csv", "town,size\nA,20\n?,1000\nC,-5\n")
        answer = json.loads(answered("predict run --input new.csv --json", capsys))
        given = answer["predictions"]
        assert answer["rows"] == {"row": [1, 2, 3]}
        write("known.csv", "town,size,code\nA,20,h7\nB,3,x\n")
        Path("none.csv").write_text(Path("new.csv").read_text("utf-8").splitlines()[0] + "\n", "utf-8")
        none = refused("predict run --input none.csv --out none.jsonl", capsys)
        assert "--input none.csv holds no rows that the schema keeps" in none
        assert not Path("none.jsonl").exists()
        answered("predict run --input known.csv --out known.jsonl", capsys)
        answered("predict run --input known.csv --out known.csv.csv", capsys)
        assert [json.loads(line)["code"] for line in Path("known.jsonl").read_text("utf-8").splitlines()] == ["h7", "x"]
        assert Path("known.csv.csv").read_text("utf-8").splitlines()[0] == "code,prediction"
        model = build("linear", found["model"]["shape"], 1)
        model.load_state_dict(torch.load("run/release/weights.pt", weights_only=True))
        with torch.no_grad():
            shares = model(torch.from_numpy(data.encode("new.csv", found["schema"])))[:, 0]
        np.testing.assert_allclose(given, 100 + 200 * shares.clamp(0, 1), rtol=1e-5)
        state = {name: value + 50 for name, value in model.state_dict().items()}
        torch.save(state, "run/release/weights.pt")
        assert json.loads(answered("predict run --input new.csv --json", capsys))["predictions"] == [300.0] * 3
        write("other.csv", "town,weight\nA,20\n")
        said = refused("predict run --input other.csv", capsys)
        assert "missing 'size'; unexpected 'weight'" in said
        said = refused("predict run --input new.csv --separator comma", capsys)
        assert "the schema says how this file is read" in said


REVIEWS = """
[columns.text]
kind = "text"
length = 6
public = true

[target]
column = "label"
classes = ["bad", "good"]
public = true
"""


class TestTexts:
    def test_words_by_default(self, capsys: Capture) -> None:
        lines = [
            {"text": f"film {number} was {kind}", "label": kind} for number in range(15) for kind in ("bad", "good")
        ]
        write("reviews.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write("schema.toml", REVIEWS)
        answered(f"{SHORT} --data reviews.jsonl --schema schema.toml --out run", capsys)
        made = release("run")["model"]
        assert (made["name"], made["shape"], made["dtype"]) == ("words", [6], "int64")
        write("new.jsonl", '{"text": "a good film"}\n{"text": ""}\n')
        answered("predict run --input new.jsonl --out out.jsonl", capsys)
        found = [json.loads(line) for line in Path("out.jsonl").read_text("utf-8").splitlines()]
        assert [set(row["probabilities"]) for row in found] == [{"bad", "good"}] * 2
        assert all(row["label"] == max(row["probabilities"], key=row["probabilities"].get) for row in found)
