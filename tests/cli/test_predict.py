"""`dpgrad predict`: a released model, from its folder alone, on rows from files."""

import csv
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgrad import cli, data
from dpgrad.cli.predict import _distinct
from dpgrad.training.models import build

ROWS = data.load("digits").x_test[:5]


@pytest.fixture
def released(trained: Any, tmp_path: Path) -> Path:
    """A run of which only what may be shared is left."""
    shutil.copytree(trained.folder / "dpsgd" / "release", tmp_path / "run" / "release")
    return tmp_path / "run"


def wanted(run: Path) -> torch.Tensor:
    model = build("oriented-gradients", (1, 8, 8), 10)
    model.load_state_dict(torch.load(run / "release" / "weights.pt", weights_only=True))
    with torch.no_grad():
        return model(torch.from_numpy(ROWS)).softmax(1)


def save(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    match kind:
        case "npy":
            np.save(path, ROWS)
        case "npz":
            np.savez(path, x=ROWS, y=np.arange(5))
        case _:
            np.savetxt(path, ROWS.reshape(5, -1), delimiter=",", header=",".join("abcdefgh" * 8), comments="")
    return path


@pytest.mark.parametrize("kind", ["npy", "npz", "csv"])
def test_json(answer: Callable[[str], Any], released: Path, kind: str) -> None:
    found = answer(f"predict {released} --input {save(released, kind)}")
    expected = wanted(released)
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)
    assert found["labels"] == [str(label) for label in expected.argmax(1).tolist()]
    assert found["guarantee"]["epsilon"] <= 3
    assert found["rows"] == {"row": [1, 2, 3, 4, 5]}


def test_csv(capsys: pytest.CaptureFixture[str], released: Path, tmp_path: Path) -> None:
    command = ["predict", str(released), "--input", str(save(released, "npy"))]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    head, *rows = csv.reader(io.StringIO(text))
    assert head == ["row", "label", *(f"probability of {digit}" for digit in range(10))]
    assert [row[:2] for row in rows] == [
        [str(number), str(label)] for number, label in enumerate(wanted(released).argmax(1).tolist(), 1)
    ]
    np.testing.assert_allclose(np.array([row[2:] for row in rows], float), wanted(released), atol=1e-6)
    assert cli.main([*command, "--output", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text("utf-8") == text
    assert "5 rows predicted" in capsys.readouterr().out


def test_the_input_is_not_written_over(released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join(",".join(map(str, row.ravel())) for row in ROWS), "utf-8")
    before = rows.read_text("utf-8")
    (tmp_path / "link.csv").symlink_to(rows)
    for out in (rows, tmp_path / "link.csv"):
        assert cli.main(["predict", str(released), "--input", str(rows), "--out", str(out)]) == 2
        assert "is the file of --input, whose rows would be lost" in capsys.readouterr().err
    assert rows.read_text("utf-8") == before


def test_a_file_that_is_there_is_replaced_only_if_asked(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept.csv"
    out.write_text("kept", "utf-8")
    command = ["predict", str(released), "--input", str(save(released, "npy"))]
    assert cli.main([*command, "--out", str(out)]) == 2
    assert f"{out}' exists: name another file, or replace it with --overwrite" in capsys.readouterr().err
    assert out.read_text("utf-8") == "kept"
    assert cli.main([*command, "--out", str(out), "--overwrite"]) == 0
    assert out.read_text("utf-8").startswith("row,label,")
    assert cli.main([*command, "--overwrite"]) == 2
    assert "--overwrite is for the file of --out" in capsys.readouterr().err


def test_a_file_that_cannot_be_replaced_is_kept(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kept.csv"
    out.write_text("kept", "utf-8")
    out.chmod(0o600)
    rows = str(save(released, "npy"))

    def full(file: int, content: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert cli.main(["predict", str(released), "--input", rows, "--out", str(out), "--overwrite"]) == 2
    assert "kept.csv could not be written: the disk is full" in capsys.readouterr().err
    assert out.read_text("utf-8") == "kept"
    assert [path.name for path in tmp_path.glob("kept*")] == ["kept.csv"]
    assert cli.main(["predict", str(released), "--input", rows, "--out", str(out), "--overwrite"]) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_no_two_names_of_rows_come_under_one_heading() -> None:
    names = {name: [name] for name in ("label", "label of the row", "id", "label of the row of the row")}
    for given in (names, dict(reversed(names.items()))):
        told = _distinct(given, ["label", "id"])
        assert [*told.values()] == [*given.values()]
        assert not {"label", "id"} & told.keys()


@pytest.mark.parametrize("shape", [(5, 64), (5, 8, 8), (5, 8, 8, 1)], ids=str)
def test_rows_laid_out_otherwise(answer: Callable[[str], Any], released: Path, shape: tuple[int, ...]) -> None:
    np.save(released / "rows.npy", ROWS.reshape(shape))
    found = answer(f"predict {released} --input {released / 'rows.npy'}")
    np.testing.assert_allclose(found["probabilities"], wanted(released), atol=1e-6)


def test_channels_last_is_another_image() -> None:
    assert data.fits((5, 3, 32, 32), (3, 32, 32))
    assert data.fits((5, 3072), (3, 32, 32))
    assert not data.fits((5, 32, 32, 3), (3, 32, 32))


def test_what_was_shared_is_enough(answer: Callable[[str], Any], released: Path, tmp_path: Path) -> None:
    rows = save(released, "npy")
    found = answer(f"predict {released} --input {rows}")
    assert answer(f"predict {released / 'release'} --input {rows}") == found
    shutil.move(released / "release", tmp_path / "got")
    assert answer(f"predict {tmp_path / 'got'} --input {rows}") == found


BAD = {
    "narrow": (np.zeros((3, 63), np.float32), "must hold rows of shape (1, 8, 8), got an array of shape (3, 63)"),
    "no rows": (np.zeros((0, 1, 8, 8), np.float32), "holds no rows: its array is empty"),
    "one row": (np.zeros(64, np.float32), "got an array of shape (64,)"),
    "other sides": (np.zeros((3, 4, 16), np.float32), "got an array of shape (3, 4, 16)"),
    "raw pixels": (16 * ROWS, "values above 1, and the model was trained on pixels in 0..1: divide those of the pixel"),
    "not finite": (np.full((1, 1, 8, 8), np.nan), "not finite"),
    "words": (np.array(["a"]), "must hold numbers"),
    "objects": (np.array([{}], dtype=object), "must hold numbers, got object"),
}


class TestRefused:
    @pytest.mark.parametrize(("rows", "message"), BAD.values(), ids=BAD)
    def test_rows(self, refused: Callable[..., str], released: Path, rows: Any, message: str) -> None:
        np.save(released / "rows.npy", rows, allow_pickle=True)
        assert message in refused(f"predict {released} --input {released / 'rows.npy'} --json")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("rows.csv", b"1,2,3\n", "has 3 columns in line 1 (separator comma), expected 64"),
            (
                "rows.csv",
                b",".join([b"x"] * 64) + b"\n" + b",".join([b"x"] * 64),
                "has a cell that is not a number in line 2, column 1",
            ),
            ("rows.npy", b"", "cannot be read as .npy"),
            ("rows.npz", b"PK", "cannot be read as .npz"),
            ("rows.txt", b"", "must end in .npy, .npz or .csv"),
        ],
        ids=["narrow", "words", "empty", "torn", "kind"],
    )
    def test_files(self, refused: Callable[..., str], released: Path, name: str, content: bytes, message: str) -> None:
        (released / name).write_bytes(content)
        assert message in refused(f"predict {released} --input {released / name}")

    def test_prepared_rows_for_a_model_of_raw_ones(self, refused: Callable[..., str], released: Path) -> None:
        path = released / "release" / "report.json"
        found = json.loads(path.read_text("utf-8"))
        found["data"]["preprocessing"] = "raw"
        path.write_text(json.dumps(found), "utf-8")
        said = refused(f"predict {released} --input {save(released, 'npy')}")
        assert "trained on raw pixels in 0..16: do not divide them" in said

    def test_several_arrays(self, refused: Callable[..., str], released: Path) -> None:
        np.savez(released / "rows.npz", a=ROWS, b=ROWS)
        assert "one array, or one named x" in refused(f"predict {released} --input {released / 'rows.npz'}")

    def test_no_input(self, refused: Callable[..., str], released: Path) -> None:
        assert "there is no such file" in refused(f"predict {released} --input absent.npy")

    def test_no_run(self, refused: Callable[..., str], trained: Any, tmp_path: Path) -> None:
        assert "there is no such folder" in refused(f"predict {tmp_path / 'absent'} --input absent.npy")
        assert "holds no finished run" in refused(f"predict {tmp_path} --input absent.npy")
        assert "several runs: choose" in refused(f"predict {trained.folder} --input absent.npy")

    def test_damaged_weights(self, refused: Callable[..., str], released: Path) -> None:
        (released / "release" / "weights.pt").write_bytes(b"not weights")
        path = save(released, "npy")
        assert "does not hold the weights of this model" in refused(f"predict {released} --input {path}")

    def test_a_model_of_a_program(self, refused: Callable[..., str], released: Path) -> None:
        path = released / "release" / "report.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "model": None}), "utf-8")
        assert "the report does not say what rows" in refused(f"predict {released} --input {save(released, 'npy')}")
