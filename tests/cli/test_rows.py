"""Rows of files for `dpgrad predict`: every row is read as written, or the file is refused where it is wrong."""

import contextlib
import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgrad import cli
from dpgrad.cli import _rows
from dpgrad.data import SEPARATORS, _numbers

Refused = Callable[..., str]


def read(folder: Path, content: str | bytes, width: int = 3, **options: str) -> list[list[float]]:
    """The rows of a .csv with that content."""
    path = folder / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [row for block in _rows.blocks(path, (width,), **options) for row in block.tolist()]


ROWS = [[1.5, 2.0, -3.0], [4.0, 5.0, 6.0]]

READ = {
    "plain": ("1.5,2,-3\n4,5,6\n", {}),
    "no end of line": ("1.5,2,-3\n4,5,6", {}),
    "header": ("a,b,c\n1.5,2,-3\n4,5,6\n", {}),
    "header that is told": ("0,1,2\n1.5,2,-3\n4,5,6\n", {"header": "yes"}),
    "header of numpy": ("# a,b,c\n1.5,2,-3\n4,5,6\n", {"header": "yes"}),
    "header in quotes over two lines": ('"a\nb",b,c\n1.5,2,-3\n4,5,6\n', {}),
    "greek header": ("α,β,γ\n1.5,2,-3\n4,5,6\n", {}),
    "carriage returns": ("a,b,c\r\n1.5,2,-3\r\n4,5,6\r\n", {}),
    "old line ends": ("a,b,c\r1.5,2,-3\r4,5,6\r", {}),
    "byte order mark": ("\ufeff1.5,2,-3\n4,5,6\n", {}),
    "byte order mark before a header": ("\ufeffa,b,c\n1.5,2,-3\n4,5,6\n", {}),
    "empty lines at the end": ("1.5,2,-3\n4,5,6\n\n\r\n\n", {}),
    "quotes": ('"1.5","2","-3"\n"4",5,"6"\n', {}),
    "spaces around": (" 1.5 , 2 ,-3 \n4 ,5, 6\n", {}),
    "semicolons": ("1.5;2;-3\n4;5;6\n", {}),
    "semicolons and a header": ("a;b;c\n1.5;2;-3\n4;5;6\n", {}),
    "tabs": ("1.5\t2\t-3\n4\t5\t6\n", {}),
    "bars": ("1.5|2|-3\n4|5|6\n", {}),
    "white space": ("  1.5   2 \t -3\n 4 5 6  \n", {}),
    "white space and a header": ("a b c\n1.5 2 -3\n4 5 6\n", {}),
    "separator that is told": ("1.5;2;-3\n4;5;6\n", {"separator": ";"}),
    "forms of numbers": ("+1.5,2.,-3e0\n4E0,.5e1,6.000\n", {}),
    "no header that is told": ("1.5,2,-3\n4,5,6\n", {"header": "no"}),
}


@pytest.mark.parametrize(("content", "options"), READ.values(), ids=READ)
def test_rows_of_a_csv(tmp_path: Path, content: str, options: dict[str, str]) -> None:
    assert read(tmp_path, content, **options) == ROWS


REFUSED = {
    "names that count from 0": ("0,1,2\n4,5,6\n", 3, "counts in line 1"),
    "names that count from 1": ("1,2,3\n4,5,6\n", 3, "say --header yes if it is a header and --header no if it is"),
    "names that count as floats": ("0.0,1.0,2.0\n4,5,6\n", 3, "counts"),
    "years": ("2001,2002,2003,2004,2005\n4,5,6,8,9\n", 5, "counts in line 1"),
    "one name that counts": ("0\n4\n5\n", 1, "counts in line 1"),
    "two names that count": ("0,1\n4,5\n", 2, "counts"),
    "empty first cell": (",2,3\n4,5,6\n", 3, "has an empty cell in line 1, column 1"),
    "empty first cells": (",,3\n", 3, "has an empty cell in line 1, column 1"),
    "nothing but separators": (",,\n4,5,6\n", 3, "has an empty cell in line 1, column 1"),
    "empty last cell": ("1.5,2,3\n4,5,\n", 3, "has an empty cell in line 2, column 3"),
    "cell of spaces": ("1.5,2,3\n4,  ,6\n", 3, "has an empty cell in line 2, column 2"),
    "empty cell in one column": ('4\n""\n5\n', 1, "has an empty cell in line 2, column 1"),
    "empty tabs": ("4\t5\t6\n\t\t\n", 3, "has an empty cell in line 2, column 1"),
    "missing": ("4,5,6\n1,NA,3\n", 3, "has a missing value in line 2, column 2"),
    "missing at first": ("NA,5,6\n", 3, "has a missing value in line 1, column 1"),
    "not a number": ("4,5,6\nnan,2,3\n", 3, "has a missing value in line 2, column 1"),
    "infinite": ("4,5,6\n1,-inf,3\n", 3, "has a missing value in line 2, column 2"),
    "infinite by size": ("4,5,6\n1,1e999,3\n", 3, "has a number beyond float32 in line 2, column 2"),
    "beyond float32": ("4,5,6\n1,3.5e38,3\n", 3, "has a number beyond float32"),
    "names and numbers": ("a,1,2\n4,5,6\n", 3, "mixes names and others in line 1"),
    "names and an empty cell": ("a,,c\n4,5,6\n", 3, "mixes names and others"),
    "names that begin with digits": ("1x1,1x2,1x3\n4,5,6\n", 3, "if that line is a header, say --header yes"),
    "comment": ("#a,b,c\n4,5,6\n", 3, "mixes names and others"),
    "comment below": ("4,5,6\n#7,8,9\n", 3, "has a cell that is not a number in line 2, column 1"),
    "words below": ("4,5,6\nx,8,9\n", 3, "has a cell that is not a number in line 2, column 1"),
    "two headers": ("a,b,c\na,b,c\n4,5,6\n", 3, "has a cell that is not a number in line 2, column 1"),
    "decimal commas": ("1,5;2,5;3,5\n", 3, "has a decimal comma where a point is read in line 1, column 1"),
    "decimal commas and tabs": ("1,5\t2,5\t3,5\n", 3, "has a decimal comma"),
    "thousands": ('"1,000",2,3\n', 3, "has a decimal comma where a point is read in line 1, column 1"),
    "underscores": ("1_0,2,3\n", 3, "has a cell that is not a number"),
    "wide digits": ("１,2,4\n", 3, "has a cell that is not a number"),
    "hexadecimal": ("0x1F,2,3\n", 3, "has a cell that is not a number"),
    "per cent": ("5%,2,3\n", 3, "has a cell that is not a number"),
    "too few columns": ("4,5,6\n1,2\n", 3, "line 2 has 2 cells, and the first line 3"),
    "too many columns": ("4,5,6\n1,2,3,4\n", 3, "line 2 has 4 cells, and the first line 3"),
    "separator at the end": ("4,5,6,\n", 3, "has 4 columns in line 1"),
    "a column of numbers of rows": (",a,b,c\n0,4,5,6\n", 3, "has 4 columns in line 1"),
    "one column for three": ("1\n2\n3\n", 3, "has 1 column in line 1"),
    "columns by another separator": ("1;2;3\n", 4, "has 3 columns in line 1 (separator semicolon), expected 4"),
    "separators that change": ("4,5,6\n7;8;9\n", 3, "line 2 has 1 cells, and the first line 3"),
    "three columns for one": ("1;2;3\n", 1, "has a cell that is not a number"),
    "empty line within": ("4,5,6\n\n7,8,9\n", 3, "has an empty line 2 before its last row"),
    "empty line within one column": ("4\n\n7\n", 1, "has an empty line 2 before its last row"),
    "empty line at first": ("\n4,5,6\n", 3, "has an empty line 1 before its last row"),
    "nothing": ("", 3, "holds no rows: it is empty"),
    "only ends of lines": ("\n\n", 3, "holds no rows: it is empty"),
    "only a header": ("a,b,c\n", 3, "holds no rows: its only line is read as a header"),
    "only a header by semicolons": ("a;b;c", 3, "holds no rows: its only line is read as a header"),
    "quote without end": ('4,5,6\n"7,8,9\n', 3, "line 2 cannot be read: its quotes do not match"),
    "quote within": ('4,5,"6"7\n', 3, "line 1 cannot be read: its quotes do not match"),
    "long cell": ("4,5," + "6" * 140_000 + "\n", 3, "a cell has more than 131,072 characters"),
    "long cell in a wide file": (
        ",".join(["1"] * 199 + ["1" * 140_000]),
        200,
        "a cell has more than 131,072 characters",
    ),
    "endless line": ("4," * 10**6, 3, "has 1,000,001 columns in line 1"),
    "long digits": ("4,5," + "6" * 1000 + "\n", 3, "beyond float32"),
    "long word": ("4,5," + "6" * 100_000 + "x\n", 3, "has a cell that is not a number"),
    "latin letters": ("ä,b,c\n4,5,6\n".encode("latin-1"), 3, "is not text in utf-8: save it as UTF-8, or"),
    "another width of characters": ("a,b,c\n4,5,6\n".encode("utf-16"), 3, "is not UTF-8 text: save it as UTF-8, or"),
    "characters of two bytes": ("4,5,6\n".encode("utf-16-le"), 3, "line 1 holds a NUL character"),
    "another line end": ("4,5,6\x0b7,8,9\n", 3, "has 5 columns in line 1"),
    "binary": (bytes(range(256)) * 8, 3, "--input"),
}


@pytest.mark.parametrize(("content", "width", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_csv(tmp_path: Path, content: str | bytes, width: int, message: str) -> None:
    with pytest.raises(ValueError, match="--input") as refusal:
        read(tmp_path, content, width)
    assert message in str(refusal.value)
    assert "'" not in str(refusal.value), "no cell is quoted"
    assert len(str(refusal.value)) < len(str(tmp_path)) + 400


@pytest.mark.parametrize("content", ["0,1,2\n4,5,6\n", "1,2,3\n", "7,8,9,10,11\n"])
def test_a_line_that_counts_is_what_it_is_said_to_be(tmp_path: Path, content: str) -> None:
    rows = [[float(cell) for cell in line.split(",")] for line in content.split()]
    assert read(tmp_path, content, len(rows[0]), header="no") == rows
    assert read(tmp_path, content, len(rows[0]), header="yes") == rows[1:]


def test_separators_are_those_of_the_readers() -> None:
    assert _rows.SEPARATORS == SEPARATORS


def test_a_header_that_is_told_may_be_all_there_is(tmp_path: Path) -> None:
    assert read(tmp_path, "a,b,c\n", header="yes") == []


@pytest.mark.parametrize("start", [5.0, -1.0, 0.5])
def test_a_few_numbers_seldom_count(tmp_path: Path, start: float) -> None:
    for width in range(1, 5):
        row = [start + place for place in range(width)]
        assert read(tmp_path, ",".join(map(str, row)), width) == [row]


@pytest.mark.parametrize("rows", [1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|", " "])
def test_as_many_rows_as_lines(tmp_path: Path, rows: int, separator: str) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
    lines = [separator.join(map(repr, row)) for row in values.tolist()]
    for head in ([], [separator.join("abc")]):
        assert read(tmp_path, "\n".join([*head, *lines])) == values.tolist()


def test_quick_and_careful_reading_agree(tmp_path: Path) -> None:
    """A cell is a number to the quick way exactly where no fault is found in it."""
    seeded = np.random.default_rng(13)
    letters = list("0123456789+-.eE_ nNaAiIfFxX,'١½\u00a0\x00")
    for _ in range(5000):
        cell = "".join(seeded.choice(letters, seeded.integers(1, 6))).strip()
        try:
            found: float | None = _numbers._values(Path(), [cell], 1, maybe_header=False)[0]
        except ValueError:
            found = None
        assert (found is None) is (_numbers._fault(cell) is not None), cell


class TestCommand:
    def test_predictions_are_those_of_the_rows(self, small: Path, tmp_path: Path, capsys: Any) -> None:
        values = np.random.default_rng(1).normal(size=(2500, 3)).astype(np.float32)
        state = torch.load(small / "weights.pt", weights_only=True)
        wanted = (torch.from_numpy(values) @ state["1.weight"].T + state["1.bias"]).softmax(1)
        made = {"npy": tmp_path / "rows.npy", "npz": tmp_path / "rows.npz", "csv": tmp_path / "rows.csv"}
        np.save(made["npy"], np.asfortranarray(values.astype(">f8")))
        np.savez_compressed(made["npz"], values)
        np.savetxt(made["csv"], values, delimiter=";", fmt="%.9g", header="a;b;c", comments="")
        for path in made.values():
            assert cli.main(["predict", str(small), "--input", str(path), "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            np.testing.assert_allclose(found["probabilities"], wanted, atol=1e-6)
            assert len(found["labels"]) == 2500

    def test_options(self, small: Path, tmp_path: Path, answer: Callable[[str], Any]) -> None:
        (tmp_path / "rows.csv").write_text("0|1|2\n3|4|5\n", "utf-8")
        command = f"predict {small} --input {tmp_path / 'rows.csv'} --separator pipe"
        assert len(answer(f"{command} --header yes")["labels"]) == 1
        assert len(answer(f"{command} --header no")["labels"]) == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--header maybe", "--header"),
            ("--separator colon", "--separator must be one of auto, comma, semicolon, tab, pipe, space, got 'colon'"),
            ("--header yes", "--header and --separator are for .csv files"),
        ],
    )
    def test_refused_options(self, small: Path, tmp_path: Path, refused: Refused, options: str, message: str) -> None:
        np.save(tmp_path / "rows.npy", np.zeros((2, 3)))
        assert message in refused(f"predict {small} --input {tmp_path / 'rows.npy'} {options}")


def header(descr: str, shape: str, order: str = "False", pad: int = 64) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(pad).encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


class Witness:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def array(value: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, value, allow_pickle=True)
    return made.getvalue()


GOOD = array(np.zeros((4, 3)))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a format that is for names of records in other letters
    GREEK = array(np.zeros((4, 3), dtype=[("α", "f4")]))
NPY = {
    "empty": b"",
    "only its mark": b"\x93NUMPY",
    "torn header": GOOD[:50],
    "torn numbers": GOOD[:-1],
    "two arrays": GOOD + GOOD,
    "more bytes": GOOD + b"\0",
    "later version": GOOD[:6] + b"\x09\x00" + GOOD[8:],
    "huge header": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100,
    "long header": header("'<f8'", "(4, 3)", pad=60_000),
    "deep header": header("-" * 9000 + "1", "(4, 3)"),
    "header of brackets": header("[" * 4000, "(4, 3)"),
    "huge shape": header("'<f8'", "(1000000000000, 3)"),
    "shape beyond counting": header("'<f8'", f"({10**40}, 3)"),
    "huge shape in the other order": header("'<f8'", "(1000000000000, 3)", "True"),
    "negative shape": header("'<f8'", "(-4, 3)") + bytes(96),
    "negative sides": header("'<f8'", "(-4, -3)") + bytes(96),
    "shape without sides": header("'<f8'", "()") + bytes(8),
    "no rows": header("'<f8'", "(0, 3)"),
    "no numbers in a row": header("'<f8'", "(10, 0)"),
    "objects": array(np.array([[1, 2, "x"]], dtype=object)),
    "letters": array(np.array([["a", "b", "c"]])),
    "records": array(np.zeros((4, 3), dtype=[("a", "f4")])),
    "greek records": GREEK,
    "inner arrays": header("('<f4', (3,))", "(4,)") + bytes(48),
    "complex": array(np.zeros((4, 3), complex)),
    "times": array(np.zeros((4, 3), "datetime64[s]")),
    "unknown type": header("'<q9'", "(4, 3)") + bytes(108),
    "not finite": array(np.array([[0, 0, 0], [0, np.inf, 0]])),
    "beyond float32": array(np.array([[0, 0, 1e300]])),
    "text": b"4,5,6\n",
    "archive": b"PK\x03\x04" + bytes(60),
}


@pytest.mark.parametrize("content", NPY.values(), ids=NPY)
@pytest.mark.parametrize("within", [False, True], ids=["npy", "npz"])
def test_refused_arrays(small: Path, tmp_path: Path, refused: Refused, content: bytes, within: bool) -> None:
    path = tmp_path / ("rows.npz" if within else "rows.npy")
    path.write_bytes(content)
    if within:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
    assert f"--input {path} " in refused(f"predict {small} --input {path} --json")


def test_a_pickle_is_never_opened(small: Path, tmp_path: Path, refused: Refused) -> None:
    witness = tmp_path / "unpickled"
    for name, content in {
        "rows.npy": array(np.array([Witness(witness)], dtype=object)),
        "bare.npy": pickle.dumps(Witness(witness)),
        "bare.csv": pickle.dumps(Witness(witness)),
    }.items():
        (tmp_path / name).write_bytes(content)
        refused(f"predict {small} --input {tmp_path / name}")
    np.savez(tmp_path / "rows.npz", x=np.array([Witness(witness)], dtype=object))
    refused(f"predict {small} --input {tmp_path / 'rows.npz'}")
    assert not witness.exists()


class TestArchives:
    def write(self, path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> Path:
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ({}, "must hold one array, or one named x, and it holds none"),
            ({"a.npy": GOOD, "b.npy": GOOD}, "and it holds a, b"),
            ({"read me": b"hello"}, "cannot be read as .npz: it is damaged"),
            ({"x.npy": b""}, "cannot be read as .npz: it is damaged"),
        ],
        ids=["none", "two", "text", "empty"],
    )
    def test_members(
        self, small: Path, tmp_path: Path, refused: Refused, members: dict[str, bytes], message: str
    ) -> None:
        path = self.write(tmp_path / "rows.npz", members)
        assert message in refused(f"predict {small} --input {path}")

    def test_an_array_with_another_name(self, small: Path, tmp_path: Path, refused: Refused) -> None:
        (tmp_path / "rows.npz").write_bytes(GOOD)
        assert "rename it to .npy" in refused(f"predict {small} --input {tmp_path / 'rows.npz'}")

    def test_every_damaged_byte_is_noticed(self, small: Path, tmp_path: Path, capsys: Any) -> None:
        """The archive checks its contents: a changed byte is refused, or is one that changes no number."""
        values = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)
        path = self.write(tmp_path / "rows.npz", {"x.npy": array(values)})
        whole = path.read_bytes()
        assert cli.main(["predict", str(small), "--input", str(path), "--json"]) == 0
        wanted = capsys.readouterr().out
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            with contextlib.suppress(ValueError):
                assert np.array_equal(np.concatenate(list(_rows.blocks(path, (3,)))), values), place
        path.write_bytes(whole)
        assert cli.main(["predict", str(small), "--input", str(path), "--json"]) == 0
        assert capsys.readouterr().out == wanted

    def test_a_small_archive_of_a_huge_array_is_read_in_blocks(self, small: Path, tmp_path: Path) -> None:
        path = self.write(tmp_path / "rows.npz", {"x.npy": array(np.zeros((300_000, 3), np.float32))})
        sizes = [len(block) for block in _rows.blocks(path, (3,))]
        assert sum(sizes) == 300_000
        assert max(sizes) <= 1024


class TestPlaces:
    @pytest.mark.parametrize("kind", ["csv", "npy", "npz"])
    def test_what_is_not_a_file(self, small: Path, tmp_path: Path, refused: Refused, kind: str) -> None:
        (tmp_path / f"folder.{kind}").mkdir()
        os.mkfifo(tmp_path / f"pipe.{kind}")
        (tmp_path / f"loop.{kind}").symlink_to(tmp_path / f"loop.{kind}")
        (tmp_path / f"lost.{kind}").symlink_to(tmp_path / "absent")
        for name, said in {
            "folder": "is not a regular file",
            "pipe": "is not a regular file",
            "loop": "cannot be read",
            "lost": "there is no such file",
        }.items():
            assert said in refused(f"predict {small} --input {tmp_path / f'{name}.{kind}'}")
        assert "NUL" in refused("predict", str(small), "--input", f"a\0b.{kind}")


class TestEditedReports:
    """What a release folder says of itself is checked before memory is taken or a class is looked up."""

    def edited(self, small: Path, folder: Path, **changes: Any) -> Path:
        made = folder / "release"
        made.mkdir()
        found = json.loads((small / "report.json").read_text("utf-8"))
        for name, value in changes.items():
            part, _, field = name.partition("__")
            found[part][field] = value
        (made / "report.json").write_text(json.dumps(found), "utf-8")
        (made / "weights.pt").write_bytes((small / "weights.pt").read_bytes())
        np.save(folder / "rows.npy", np.zeros((2, 3)))
        return made

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"data__classes": ["no"]}, "its report has 1 class names for 2 outputs"),
            ({"data__classes": []}, "its report has 0 class names for 2 outputs"),
            ({"data__classes": ["a", "b", "c"]}, "its report has 3 class names for 2 outputs"),
            ({"data__classes": None}, "its report has no class names for 2 outputs"),
            ({"model__outputs": 10**12}, "its report has 2 class names for 1,000,000,000,000 outputs"),
            ({"model__outputs": 10**12, "data__classes": None}, "its report has no class names"),
            ({"model__shape": [10**12]}, "does not hold the weights of this model: it has fewer bytes"),
            ({"model__shape": [10**17, 10**17]}, "does not hold the weights of this model: it has fewer bytes"),
            ({"model__shape": []}, "does not hold the weights of this model"),
            ({"model__shape": [1]}, "does not hold the weights of this model"),
            ({"model__shape": [1, 3]}, ""),
            ({"model__name": "mlp"}, "does not hold the weights of this model"),
            ({"model__name": "cnn"}, "model cnn is for images"),
            ({"model__name": "lin"}, "got 'lin': did you mean linear?"),
            ({"model__outputs": 10**400}, "is no number of JSON"),
            ({"guarantee__epsilon": float("nan")}, "NaN is no number of JSON"),
            ({"plan__batch_size": None}, "plan.batch_size must be of type number"),
        ],
    )
    def test_refused(
        self, small: Path, tmp_path: Path, refused: Refused, capsys: Any, changes: dict[str, Any], message: str
    ) -> None:
        made = self.edited(small, tmp_path, **changes)
        if message:
            assert message in refused(f"predict {made} --input {tmp_path / 'rows.npy'} --json")
        else:  # another form of the same rows
            assert cli.main(["predict", str(made), "--input", str(tmp_path / "rows.npy"), "--json"]) == 0

    def test_a_million_outputs_that_are_named(self, small: Path, tmp_path: Path, refused: Refused) -> None:
        changes = {"model__outputs": 10**6, "model__shape": [10**9], "data__classes": ["c"] * 10**6}
        made = self.edited(small, tmp_path, **changes)
        assert "it has fewer bytes" in refused(f"predict {made} --input {tmp_path / 'rows.npy'}")

    def test_weights_that_are_not_finite(self, small: Path, tmp_path: Path, refused: Refused) -> None:
        made = self.edited(small, tmp_path)
        state = torch.load(made / "weights.pt", weights_only=True)
        torch.save({name: value * torch.nan for name, value in state.items()}, made / "weights.pt")
        said = refused(f"predict {made} --input {tmp_path / 'rows.npy'} --json")
        assert "gives no finite output for row 1 of" in said

    def test_missing_weights(self, small: Path, tmp_path: Path, refused: Refused) -> None:
        made = self.edited(small, tmp_path)
        (made / "weights.pt").unlink()
        assert "weights.pt is missing" in refused(f"predict {made} --input {tmp_path / 'rows.npy'}")
