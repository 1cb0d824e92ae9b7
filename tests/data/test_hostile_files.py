"""Hostile files of one's own: one line that names a place, never what is there, and nothing left behind.

Each file holds a secret in its cells, and every reader, `encode`, `describe` and the command are given each file.
"""

import gzip
import io
import json
import os
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpgrad import cli, data
from dpgrad.data import Column, FileFormat, Schema, Split, Target

SECRET = "s3cret"
HEAD = "age,job,income\n"
SCHEMA = Schema(
    (
        Column("age", "number", bounds=(0, 100), public=True),
        Column("job", "category", categories=("cook",), unknown="refuse", public=True),
    ),
    Target("income", classes=("low", "high"), public=True),
)

# What is refused of a CSV file, and the words that say why.
CSV: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "is empty"),
    "line ends alone": ("\n\r\n\n", "is empty"),
    "only a header": (HEAD, "holds no rows for training"),
    "a secret for a header": (f"{SECRET},{SECRET}1,x\n1,cook,low\n", "is the first line a header"),
    "data for a header": (f"30,{SECRET},low\n40,cook,high\n", "is the first line a header"),
    "a header twice": (HEAD + HEAD + "1,cook,low\n", "line 2, column 'age' is not a number"),
    "one name twice": (f"age,age,income\n1,{SECRET},low\n", "columns 1 and 2 have the same name"),
    "a secret name twice": (f"{SECRET},{SECRET},income\n1,2,low\n", "columns 1 and 2 have the same name"),
    "a header run into a row": (f"age,job,income1,{SECRET},low\n2,cook,low\n", "line 2 has 3 cells, and the first"),
    "a header run into the only row": (f"age,job,income1,{SECRET},low\n", "is the first line a header"),
    "too few cells": (HEAD + f"1,{SECRET}\n", "line 2 has 2 cells, and the first line 3"),
    "too many cells": (HEAD + f"1,cook,low,{SECRET}\n", "line 2 has 4 cells"),
    "an empty line within": (HEAD + f"1,cook,low\n\n2,{SECRET},low\n", "has an empty line 3 before its last row"),
    "a word for a number": (HEAD + f"{SECRET},cook,low\n", "line 2, column 'age' is not a number"),
    "mixed types": (HEAD + f"1,cook,low\n{SECRET},cook,low\n", "line 3, column 'age' is not a number"),
    "not a number": (HEAD + "nan,cook,low\n", "line 2, column 'age' looks like a missing value"),
    "missing": (HEAD + ",cook,low\n", 'is missing: write missing = [""] and fill = VALUE under [columns.age]'),
    "a marker": (HEAD + "N/A,cook,low\n", "looks like a missing value"),
    "a date": (HEAD + "2001-02-03,cook,low\n", "looks like a date"),
    "a date by points": (HEAD + "3.2.2001,cook,low\n", "looks like a date"),
    "a decimal comma": (HEAD + '"1,5",cook,low\n', 'decimal = "," under [file]'),
    "underscores": (HEAD + "1_000,cook,low\n", "is not a number"),
    "wide digits": (HEAD + "１,cook,low\n", "is not a number"),
    "hexadecimal": (HEAD + "0x1F,cook,low\n", "is not a number"),
    "an unknown category": (HEAD + f"1,{SECRET},low\n", "line 2, column 'job' is none of the categories"),
    "an unknown class": (HEAD + f"1,cook,{SECRET}\n", "line 2, column 'income' is none of the classes"),
    "an empty class": (HEAD + "1,cook,\n", "line 2, column 'income' is none of the classes"),
    "a quote without end": (HEAD + f'1,"{SECRET},low\n', "cannot be read: its quotes do not match"),
    "a quote within": (HEAD + f'1,"{SECRET}"x,low\n', "line 2 cannot be read: its quotes do not match"),
    "a long cell": (HEAD + f"1,{SECRET * 30_000},low\n", "a cell has more than 131,072 characters"),
    "a long cell in quotes": (HEAD + '1,"' + "x\n" * 100_000 + '",low\n', "a cell has more than 131,072"),
    "NUL": (HEAD + f"1,{SECRET}\0,low\n", "line 2 holds a NUL character"),
    "latin letters": ((HEAD + f"1,{SECRET}é,low\n").encode("latin-1"), "is not text in utf-8"),
    "two bytes a letter": ((HEAD + f"1,{SECRET},low\n").encode("utf-16"), 'write encoding = "utf-16" under [file]'),
    "four bytes a letter": ((HEAD + f"1,{SECRET},low\n").encode("utf-32"), 'write encoding = "utf-32" under [file]'),
    "two bytes a letter, unmarked": ((HEAD + f"1,{SECRET},low\n").encode("utf-16-le"), "holds a NUL character"),
    "torn letters": (HEAD.encode() + b"1,\xe2\x82", "is not text in utf-8"),
    "compressed": (gzip.compress(HEAD.encode()), "unpack it first"),
    "an archive": (b"PK\x03\x04" + bytes(90), "unpack it first"),
    "a pickle": (pickle.dumps({SECRET: 1}), "rows"),
    "all bytes": (bytes(range(256)) * 9, "rows"),
    "an unprintable name": ("age,n\x01,income\n1,2,low\n", "columns differ"),
    "a long name": ("age," + "n" * 2000 + f",income\n1,{SECRET},low\n", "columns differ"),
    "other separators": (f"age;job;income\n1;{SECRET};low\n2,cook,low\n", "line 3 has 1 cells"),
}  # fmt: skip

JSON_LINES = {
    "nothing": ("", "is empty"),
    "text": (f"{SECRET}\n", "line 1 is not JSON"),
    "a torn line": (f'{{"age": 1, "job": "{SECRET}\n', "line 1 is not JSON"),
    "a list": (f'["{SECRET}"]\n', "line 1 is not an object"),
    "a number": ("7\n", "line 1 is not an object"),
    "a key twice": (f'{{"age": 1, "age": "{SECRET}"}}\n', "line 1 names a key twice"),
    "another key": (
        f'{{"age": 1, "job": "cook", "income": "low"}}\n{{"{SECRET}": 1}}\n', "line 2 has a key that no earlier line"
    ),
    "other keys": (f'{{"{SECRET}": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "g": 7}}\n', "columns differ"),
    "nested": (f'{{"age": {{"x": "{SECRET}"}}, "job": "cook", "income": "low"}}\n', "column 'age' is not a number"),
    "a nested list": (f'{{"age": ["{SECRET}"], "job": "cook", "income": "low"}}\n', "column 'age' is not a number"),
    "deep": ("[" * 100_000 + "\n", "line 1"),
    "deep objects": ('{"a":' * 100_000 + "\n", "line 1"),
    "NaN": ('{"age": NaN, "job": "cook", "income": "low"}\n', "column 'age' is missing"),
    "a null": ('{"age": null, "job": "cook", "income": "low"}\n', "column 'age' is missing"),
    "long digits": ('{"age": ' + "9" * 5000 + ', "job": "cook", "income": "low"}\n', "line 1 is not JSON"),
    "a nested category": (f'{{"age": 1, "job": {{"{SECRET}": 1}}, "income": "low"}}\n', "column 'job' is none of"),
    "latin letters": (f'{{"age": 1, "job": "{SECRET}é"}}\n'.encode("latin-1"), "is not text in utf-8"),
    "NUL": (f'{{"age": 1, "job": "{SECRET}\0"}}\n', "line 1 holds a NUL character"),
    "all on one line": ('{"age": 1} {"age": 2}\n', "line 1 is not JSON"),
}  # fmt: skip


def npy(value: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, value, allow_pickle=True)
    return made.getvalue()


def header(descr: str, shape: str) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(64).encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


class Witness:
    """Leaves a file where it is unpickled."""

    path = Path("unpickled")

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


GOOD = npy(np.zeros((4, 3), np.float32))
ARRAYS = {
    "empty": b"",
    "torn header": GOOD[:40],
    "torn numbers": GOOD[:-1],
    "more bytes": GOOD + b"\0",
    "huge shape": header("'<f4'", "(1000000000000, 3)"),
    "shape beyond counting": header("'<f4'", f"({10**40}, 3)"),
    "negative shape": header("'<f4'", "(-4, 3)") + bytes(48),
    "no rows' side": header("'<f4'", "()") + bytes(4),
    "unknown type": header("'<q9'", "(4, 3)") + bytes(108),
    "objects": npy(np.array([[SECRET, 2]], dtype=object)),
    "witness": npy(np.array([Witness()], dtype=object)),
    "records": npy(np.zeros(4, dtype=[("a", "f4")])),
    "texts": npy(np.array([[SECRET] * 3] * 4)),
    "complex": npy(np.zeros((4, 3), complex)),
    "infinite": npy(np.full((4, 3), np.inf, np.float32)),
    "other rows": npy(np.zeros((5, 3), np.float32)),
    "text": f"{SECRET},1\n".encode(),
}


def told(read: Callable[[], object]) -> str:
    """The line that refuses, checked: one line, no secret, nothing chained."""
    with pytest.raises(data.DataError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1200
    assert SECRET not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def quiet(read: Callable[[], object]) -> None:
    """Read, or be refused in one line without a secret."""
    try:
        read()
    except data.DataError as error:
        message = str(error)
        assert "\n" not in message
        assert SECRET not in message


@pytest.mark.parametrize(("content", "message"), CSV.values(), ids=CSV)
def test_csv(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in told(lambda: data.read(path, schema=SCHEMA))
    quiet(lambda: data.encode(path, SCHEMA))
    quiet(lambda: data.describe(path))
    quiet(lambda: data.describe(path, f"not {SECRET}"[:3]))
    assert os.listdir(tmp_path) == ["rows.csv"]


@pytest.mark.parametrize(("content", "message"), JSON_LINES.values(), ids=JSON_LINES)
def test_json_lines(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in told(lambda: data.read(path, schema=SCHEMA))
    quiet(lambda: data.encode(path, SCHEMA))
    quiet(lambda: data.describe(path))


@pytest.mark.parametrize("content", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("within", [False, True], ids=["npy", "npz"])
def test_arrays(tmp_path: Path, content: bytes, within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "y.npy", np.arange(4) % 2)
    path = tmp_path / ("x.npz" if within else "x.npy")
    path.write_bytes(content)
    if within:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", content)
            archive.writestr("y.npy", npy(np.arange(4) % 2))
    target = "y" if within else "y.npy"
    told(lambda: data.read(path, target, classes=2))
    quiet(lambda: data.describe(path, target))
    assert not Witness.path.exists()


def test_labels_beyond_the_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3)), y=np.array([0, 1, 2, 98765]))
    said = told(lambda: data.read(tmp_path / "a.npz", "y", classes=3))
    assert "row 4, column 'y' is none of the classes" in said
    assert "98765" not in said


@pytest.mark.parametrize("bounds", [{"classes": ("0", "1")}, {"bounds": (0, 1)}])
def test_a_target_with_columns(tmp_path: Path, bounds: dict[str, Any]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3)), y=np.array([[0], [1], [0], [1]]))
    schema = Schema((Column("x", "number", shape=(3,), scale="none", public=True),), Target("y", public=True, **bounds))
    assert "has shape (1,) in a row: save one value a row" in told(lambda: data.read(tmp_path / "a.npz", schema=schema))


class TestArchives:
    def test_a_bomb_is_not_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", header("'<f4'", "(2500000, 1)") + bytes(10_000_000))
        monkeypatch.setattr(os, "sysconf", lambda name: 1000)  # a machine of a million bytes
        assert "more than this machine's memory" in told(lambda: data.read(tmp_path / "a.npz", "y", classes=2))

    def test_a_member_that_lies_about_its_size(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", header("'<f4'", "(10, 1)") + bytes(4_000_000))
        told(lambda: data.read(tmp_path / "a.npz", "y", classes=2))

    @pytest.mark.parametrize("names", [(), ("x.npy", "x.npy"), ("../x.npy",), ("x.npy/",)])
    def test_members(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            warnings.simplefilter("ignore")  # of a name twice
            for name in names:
                archive.writestr(name, GOOD)
        told(lambda: data.read(tmp_path / "a.npz", "y", classes=2))

    def test_every_torn_file_is_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=np.zeros((4, 3)), y=np.arange(4) % 2)
        whole = (tmp_path / "a.npz").read_bytes()
        for cut in range(0, len(whole) - 1, 37):
            (tmp_path / "a.npz").write_bytes(whole[:cut])
            told(lambda: data.read(tmp_path / "a.npz", "y", classes=2))


class TestParquet:
    def whole(self, folder: Path) -> bytes:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {"age": [1.0, 2.0], "job": ["cook", SECRET], "income": ["low", "high"]}
        parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return (folder / "a.parquet").read_bytes()

    def test_damaged(self, tmp_path: Path) -> None:
        whole, path = self.whole(tmp_path), tmp_path / "a.parquet"
        assert "row 2, column 'job' is none of the categories" in told(lambda: data.read(path, schema=SCHEMA))
        draw = random.Random(7)
        for content in (b"", b"PAR1", whole[:50], whole[-50:], whole[: len(whole) // 2], f"{SECRET},1\n".encode()):
            path.write_bytes(content)
            told(lambda: data.read(path, schema=SCHEMA))
            told(lambda: data.describe(path))
        for _ in range(60):
            spoilt = bytearray(whole)
            for _ in range(3):
                spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
            path.write_bytes(spoilt)
            quiet(lambda: data.read(path, schema=SCHEMA))

    def test_types_that_are_no_numbers(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        import datetime

        from pyarrow import parquet

        for cell in (datetime.date(2001, 2, 3), datetime.datetime(2001, 2, 3), b"\xff", [1.0], {"x": SECRET}, SECRET):
            columns = {"age": [cell], "job": ["cook"], "income": ["low"]}
            parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
            assert "row 1, column 'age'" in told(lambda: data.read(tmp_path / "a.parquet", schema=SCHEMA))
            quiet(lambda: data.describe(tmp_path / "a.parquet"))

    def test_the_package_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        said = told(lambda: data.read(tmp_path / "a.parquet", schema=SCHEMA))
        assert "pip install dpgrad[parquet]" in said


class TestImages:
    SCHEMA = Schema(
        (Column("image", "image", shape=(1, 8, 8), public=True),), Target("folder", classes=("a", "b"), public=True)
    )

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        image = pytest.importorskip("PIL.Image")
        for label in "ab":
            (tmp_path / "pets" / label).mkdir(parents=True)
            image.new("L", (8, 8)).save(tmp_path / "pets" / label / "0.png")
        return tmp_path / "pets"

    def test_broken(self, folder: Path) -> None:
        whole = (folder / "a" / "0.png").read_bytes()
        postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n" + SECRET.encode()
        for content in (b"", b"\x89PNG", whole[:40], SECRET.encode() * 9, postscript):
            (folder / "b" / f"1{SECRET}.png").write_bytes(content)
            said = told(lambda: data.read(folder, schema=self.SCHEMA))
            assert "pets: image 2 of class 2 (" in said
            assert "column 'image' cannot be read as an image" in said
            quiet(lambda: data.describe(folder))
        assert "pets: image 2 of class 2 (" in told(lambda: data.describe(folder))

    def test_huge(self, folder: Path) -> None:
        size = (60_000).to_bytes(4, "big")
        import zlib

        chunk = b"IHDR" + size + size + bytes([8, 0, 0, 0, 0])
        bomb = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        (folder / "b" / "1.png").write_bytes(bomb + bytes(100))
        schema = Schema((Column("image", "image", shape=(1, 8, 8), resize="crop", public=True),), self.SCHEMA.target)
        for found in (self.SCHEMA, schema):
            told(lambda found=found: data.read(folder, schema=found))  # type: ignore[misc]

    def test_other_things_in_the_folder(self, folder: Path, tmp_path: Path) -> None:
        (folder / "b" / f"{SECRET}.txt").write_text(SECRET, "utf-8")
        assert "is no image by its name" in told(lambda: data.read(folder, schema=self.SCHEMA))
        (folder / "b" / f"{SECRET}.txt").unlink()
        (folder / "b" / SECRET).mkdir()
        assert "of class 2 (both in the order of their names) is a folder" in told(
            lambda: data.read(folder, schema=self.SCHEMA)
        )
        (folder / "b" / SECRET).rmdir()
        (folder / "b" / "loop.png").symlink_to(folder / "b" / "loop.png")
        told(lambda: data.read(folder, schema=self.SCHEMA))
        (folder / "b" / "loop.png").unlink()
        (folder / "c").symlink_to(folder)
        told(lambda: data.read(folder, schema=self.SCHEMA))
        (folder / "c").unlink()
        (folder / "stray.png").touch()
        assert "holds files as well as folders" in told(lambda: data.read(folder, schema=self.SCHEMA))
        (tmp_path / "bare").mkdir()
        assert "holds no images" in told(lambda: data.read(tmp_path / "bare", schema=self.SCHEMA))

    def test_neither_name_nor_size_is_told(self, folder: Path) -> None:
        image = pytest.importorskip("PIL.Image")
        image.new("L", (57, 13)).save(folder / "b" / f"{SECRET}.png")
        for use in (lambda: data.read(folder, schema=self.SCHEMA), lambda: data.encode(folder / "b", self.SCHEMA)):
            said = told(use)
            assert "is not of the declared size (8 x 8 pixels)" in said
            assert "57" not in said.replace(str(folder), "")
            assert "13" not in said.replace(str(folder), "")

    def test_no_folder_a_class(self, folder: Path) -> None:
        assert "missing 'folder'" in told(lambda: data.read(folder / "a", schema=self.SCHEMA))


class TestSavedDatasets:
    def test_missing_or_damaged(self, tmp_path: Path) -> None:
        pytest.importorskip("datasets")
        assert "there is no such folder" in told(lambda: data.read(f"hf:{tmp_path / 'none'}", schema=SCHEMA))
        (tmp_path / "bare").mkdir()
        told(lambda: data.read(f"hf:{tmp_path / 'bare'}", schema=SCHEMA))
        (tmp_path / "bare" / "state.json").write_text(f'{{"{SECRET}": ', "utf-8")
        (tmp_path / "bare" / "dataset_info.json").write_text("{}", "utf-8")
        told(lambda: data.read(f"hf:{tmp_path / 'bare'}", schema=SCHEMA))

    def test_several_parts(self, tmp_path: Path) -> None:
        (tmp_path / "d" / "train").mkdir(parents=True)
        (tmp_path / "d" / "dataset_dict.json").write_text("{}", "utf-8")
        (tmp_path / "d" / "train" / "dataset_info.json").write_text("{}", "utf-8")
        assert "holds several parts (train): name one" in told(lambda: data.read(f"hf:{tmp_path / 'd'}", schema=SCHEMA))


class TestPlaces:
    @pytest.mark.parametrize("ending", [".csv", ".parquet", ".npz", ".npy", ".jsonl", ".xyz"])
    def test_what_is_no_file(self, tmp_path: Path, ending: str) -> None:
        os.mkfifo(tmp_path / f"pipe{ending}")
        (tmp_path / f"loop{ending}").symlink_to(tmp_path / f"loop{ending}")
        (tmp_path / f"lost{ending}").symlink_to(tmp_path / "nowhere")
        for name in ("pipe", "loop", "lost", "none"):
            path = tmp_path / f"{name}{ending}"
            told(lambda path=path: data.read(path, schema=SCHEMA))  # type: ignore[misc]
            told(lambda path=path: data.describe(path))  # type: ignore[misc]
            told(lambda path=path: data.read(path, "y", classes=2))  # type: ignore[misc]

    def test_a_folder_named_as_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "rows.csv").mkdir()
        told(lambda: data.read(tmp_path / "rows.csv", schema=SCHEMA))


LETTERS = "01.-e,;\t \"'\r\n{}[]:aok\ufeffé\0"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@given(st.binary(max_size=300) | st.text(LETTERS, max_size=200).map(lambda text: (HEAD + text).encode()))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".npy", ".npz", ".tsv"])
def test_any_bytes(scratch: Path, ending: str, content: bytes) -> None:
    """Anything is read or refused by a DataError; nothing else is raised."""
    path = scratch / f"rows{ending}"
    path.write_bytes(content)
    for read in (
        lambda: data.read(path, schema=SCHEMA),
        lambda: data.describe(path),
        lambda: data.encode(path, SCHEMA),
    ):
        quiet(read)


PEOPLE = Schema(
    (*SCHEMA.columns, Column("who", "id"), Column("part", "ignored")),
    SCHEMA.target, split=Split("column", column="part", values=("test",)), unit="who",
)  # fmt: skip
SPLICES = (b'"', b",", b"\n", b"\0", b"\xff", b"{", b"1e999", b"nan", b"\r", b"\xef\xbb\xbf")


def spoilt(draw: random.Random, whole: bytes) -> bytes:
    """A file with a few bytes changed, left out, put in or moved."""
    found = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, how = draw.randrange(len(found)), draw.random()
        if how < 0.4:
            found[at] = draw.randrange(256)
        elif how < 0.6:
            del found[at : at + draw.randrange(1, 9)]
        elif how < 0.8:
            found[at:at] = draw.choice(SPLICES)
        else:
            found[at:at] = found[draw.randrange(len(found)) :][:20]
    return bytes(found)


def spoil(folder: Path, seed: int, count: int) -> None:
    rows = [
        {"age": row, "job": "cook", "who": f"{SECRET}{row}", "part": "test" if row % 4 else "x", "income": "low"}
        for row in range(12)
    ]
    table = "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]).encode()
    lines = "\n".join(map(json.dumps, rows)).encode()
    draw = random.Random(seed)
    for path, whole in ((folder / "rows.csv", table), (folder / "rows.jsonl", lines)):
        path.write_bytes(whole)
        data.read(path, schema=PEOPLE)
        for _ in range(count):
            path.write_bytes(spoilt(draw, whole))
            quiet(lambda path=path: data.read(path, schema=PEOPLE))  # type: ignore[misc]
            quiet(lambda path=path: data.encode(path, PEOPLE))  # type: ignore[misc]
            quiet(lambda path=path: data.describe(path))  # type: ignore[misc]


def test_spoilt_files_tell_no_secret(tmp_path: Path) -> None:
    spoil(tmp_path, 5, 150)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_many_spoilt_files_tell_no_secret(tmp_path: Path, seed: int) -> None:
    spoil(tmp_path, 100 + seed, 3000)


def commands(folder: Path) -> Iterator[tuple[str, str]]:
    """Every hostile file with its schema, as the command is given it."""
    schema = folder / "schema.toml"
    schema.write_text(data.written(SCHEMA), "utf-8")
    for kind, files in (("csv", CSV), ("jsonl", JSON_LINES)):
        for number, (content, _) in enumerate(files.values()):
            path = folder / f"{number}.{kind}"
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            yield f"train --plan --data {path} --schema {schema}", str(path)


def test_the_command_says_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with one line for each file, and the secret in none of them."""
    tried = 0
    for command, _ in commands(tmp_path):
        assert cli.main(command.split()) == 2, command
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.endswith(" ...")]
        assert out == ""
        assert len(lines) == 1, err
        assert lines[0].startswith("dpgrad: error: ")
        assert SECRET not in err
        tried += 1
    assert tried == len(CSV) + len(JSON_LINES)


def test_a_schema_that_is_the_data_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(HEAD + f"1,{SECRET},low\n", "utf-8")
    said = told(lambda: data.read(tmp_path / "rows.csv", schema=tmp_path / "rows.csv"))
    assert "is not TOML: it cannot be read at line 1" in said


@pytest.mark.parametrize("name", [f"{SECRET}\x01", SECRET * 200])
def test_names_that_may_be_a_row_are_not_quoted(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.csv").write_text(f"age,{name},income\n1,2,low\n", "utf-8")
    assert "the name of column 2 must be 1 to 500 printable" in told(lambda: data.describe(tmp_path / "rows.csv"))


def test_long_lines_are_not_kept(tmp_path: Path) -> None:
    """A file without line ends is refused after its first part."""
    path = tmp_path / "rows.csv"
    with path.open("wb") as file:
        file.write(b"age")
        file.truncate(10 * 2**30)  # sparse: 10 GB of NUL
    assert "has more than 16,777,216 characters" in told(lambda: data.read(path, schema=SCHEMA))
    assert "has more than 16,777,216 characters" in told(lambda: data.describe(path))


def test_nothing_is_written_for_a_schema_that_is_given_as_values() -> None:
    plain = json.loads(json.dumps(SCHEMA.to_dict()))
    assert data.schema_of(plain) == SCHEMA
    assert data.schema_of(data.Schema.from_dict(plain)) == SCHEMA
    assert FileFormat() == SCHEMA.file
