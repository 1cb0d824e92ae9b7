"""Schemas: what they refuse, by the line to write, and that they come back from TOML and JSON as they were."""

import json
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad import data
from dpgrad.data import Column, FileFormat, Schema, Split, Target

Refused = Callable[[str], AbstractContextManager[None]]

WORDS = (
    st.text("abcdefgé .\"'\\#=[]?<>5%\t", min_size=1, max_size=8).map(str.strip).filter(bool).filter(str.isprintable)
)
MARKERS = st.lists(st.sampled_from(["", "NA", "?"]), unique=True, max_size=3)
BOUNDS = st.tuples(st.floats(-1e6, 0), st.floats(1e-3, 1e6))


@st.composite
def columns(draw: Any, name: str) -> Column:
    public, kind = draw(st.booleans()), draw(st.sampled_from(["number", "category", "id", "ignored"]))
    if kind == "number":
        low, high = draw(BOUNDS)
        missing = tuple(draw(MARKERS))
        fill = draw(st.floats(low, high)) if missing else None
        return Column(name, kind, bounds=(low, high), scale=draw(st.sampled_from(["unit", "none"])), missing=missing,
                      fill=fill, indicator=draw(st.booleans()), public=public)  # fmt: skip
    if kind == "category":
        listed = tuple(draw(st.lists(WORDS, min_size=1, max_size=4, unique=True)))
        missing = tuple(marker for marker in draw(MARKERS) if marker not in listed)
        return Column(name, kind, categories=listed, missing=missing, public=public,
                      unknown=draw(st.sampled_from(["other", "zeros", "drop", "refuse"])))  # fmt: skip
    return Column(name, kind, public=public)


@st.composite
def schemas(draw: Any) -> Schema:
    names = draw(st.lists(WORDS, min_size=2, max_size=5, unique=True))
    first = Column(names[0], "number", scale="none", shape=tuple(draw(st.lists(st.integers(1, 9), max_size=3))))
    classes = tuple(draw(st.lists(WORDS, min_size=2, max_size=3, unique=True)))
    target = draw(st.sampled_from([None, Target(names[1], classes=classes), Target(names[1], bounds=draw(BOUNDS))]))
    split = draw(st.sampled_from([Split(), Split("fraction", 0.3, "k"), Split("last"), Split("file", file="b.csv")]))
    sign = draw(st.sampled_from([None, ";", "\t", '"']))
    file = FileFormat(separator=sign, quote="'", header=draw(st.sampled_from([None, True, False])))
    return Schema((first, *(draw(columns(name)) for name in names[2:])), target, file, split)


@given(schemas())
@settings(max_examples=60, deadline=None)
def test_written_and_read_again(schema: Schema) -> None:
    """TOML, JSON and plain values all hold the whole schema."""
    assert Schema.from_dict(tomllib.loads(data.written(schema))) == schema
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict(), allow_nan=False))) == schema


def test_a_file(tmp_path: Path) -> None:
    schema = Schema((Column("ä b", "number", bounds=(0, 1), public=True),), unit=None)
    (tmp_path / "schema.toml").write_text(data.written(schema, {"ä b": ["one\nline"]}), "utf-8")
    assert data.schema_of(tmp_path / "schema.toml") == schema
    assert data.schema_of(str(tmp_path / "schema.toml")) == schema


NUMBER = {"kind": "number", "bounds": [0, 1], "public": True}
GOOD: dict[str, Any] = {"columns": {"a": NUMBER}, "target": {"column": "y", "classes": ["p", "q"], "public": True}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no columns": ({"columns": {}}, r"write \[columns.NAME\] with kind = \"number\""),
    "columns of another form": ({"columns": [1]}, r"write \[columns.NAME\]"),
    "an unknown table": ({"column": {}}, "unknown key 'column': did you mean columns"),
    "an unknown key": ({"columns": {"a": {**NUMBER, "bound": 1}}}, "unknown key 'bound': did you mean bounds"),
    "an unknown kind": ({"columns": {"a": {"kind": "numbr"}}}, "kind must be one of .*: did you mean number"),
    "no kind": ({"columns": {"a": {}}}, r"\[columns.a\] needs kind"),
    "no bounds": ({"columns": {"a b": {"kind": "number"}}}, r'\[columns."a b"\] needs bounds .* write bounds = \[LOW'),
    "bounds that fall": ({"columns": {"a": {**NUMBER, "bounds": [1, 0]}}}, "bounds must be two numbers"),
    "bounds of one": ({"columns": {"a": {**NUMBER, "bounds": [1]}}}, "bounds must be two numbers"),
    "bounds without end": ({"columns": {"a": {**NUMBER, "bounds": [0, float("inf")]}}}, "bounds must be two numbers"),
    "bounds that are none": ({"columns": {"a": {**NUMBER, "bounds": [0, float("nan")]}}}, "bounds must be two numbers"),
    "bounds as words": ({"columns": {"a": {**NUMBER, "bounds": "0..1"}}}, "bounds must be two numbers"),
    "no fill": ({"columns": {"a": {**NUMBER, "missing": [""]}}}, "fill, which replaces a missing value, must be a num"),
    "a fill beyond": ({"columns": {"a": {**NUMBER, "missing": [""], "fill": 7}}}, "within the bounds, got 7"),
    "a fill for nothing": ({"columns": {"a": {**NUMBER, "fill": 0}}}, "fill needs the markers"),
    "no categories": ({"columns": {"a": {"kind": "category"}}}, "write categories = "),
    "categories of numbers": ({"columns": {"a": {"kind": "category", "categories": [1.5]}}}, "must be a list of texts"),
    "a category twice": ({"columns": {"a": {"kind": "category", "categories": ["x", "x"]}}}, "must not repeat"),
    "categories for numbers": ({"columns": {"a": {**NUMBER, "categories": ["x"]}}}, "is for columns of kind category"),
    "public as a word": ({"columns": {"a": {**NUMBER, "public": "yes"}}}, "public must be true or false"),
    "an image without a shape": ({"columns": {"a": {"kind": "image"}}}, r"write shape = \[3, HEIGHT, WIDTH\]"),
    "a negative shape": ({"columns": {"a": {**NUMBER, "shape": [-1]}}}, "shape must be a whole number"),
    "a huge shape": ({"columns": {"a": {**NUMBER, "shape": [10**6, 10**6]}}}, "at most 10,000,000 numbers"),
    "text beside numbers": ({"columns": {"a": NUMBER, "b": {"kind": "text"}}}, 'kind = "ignored" for the others'),
    "nothing in use": ({"columns": {"a": {"kind": "ignored"}}}, "needs a column that is not ignored"),
    "a target of no kind": ({"target": {"column": "y"}}, "write classes = .* or bounds ="),
    "a target of both kinds": ({"target": {"column": "y", "classes": ["a", "b"], "bounds": [0, 1]}}, "classes or"),
    "one class": ({"target": {"column": "y", "classes": ["a"]}}, "at least two"),
    "a target that is a column": ({"target": {"column": "a", "classes": ["p", "q"]}}, "twice, or is the target"),
    "a unit that is no id": ({"unit": "a"}, r'unit = .* write \[columns.a\] with kind = "id"'),
    "rows of no unit": ({"rows_per_unit": 3}, "rows_per_unit needs a unit"),
    "a rule": ({"split": {"rule": "random"}}, r"\[split\] rule must be one of"),
    "a share": ({"split": {"rule": "fraction", "held_out": 1.5}}, "held_out must lie strictly between 0 and 1"),
    "a column to split by": ({"split": {"rule": "column"}}, "needs column = "),
    "a split by an unknown column": ({"split": {"rule": "column", "column": "z", "values": ["t"]}}, "is not described"),
    "a file to split by": ({"split": {"rule": "file"}}, "needs file = "),
    "a separator": ({"file": {"separator": "\n"}}, "separator must be 1 to 5 characters"),
    "an encoding": ({"file": {"encoding": "utf-99"}}, "encoding must be a text encoding"),
    "an encoding of no text": ({"file": {"encoding": "zlib"}}, "encoding must be a text encoding"),
    "a decimal sign": ({"file": {"decimal": ",", "separator": ","}}, "separator and decimal must differ"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(refused: Refused, change: dict[str, Any], message: str) -> None:
    with refused(message):
        Schema.from_dict({**GOOD, **change})
    assert Schema.from_dict(GOOD).to_dict() == GOOD


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"schema.toml: it needs a table for each column"),
        (b"[columns.a]\nkind = 'number'\nkind = 'text'\n", "is not TOML: it cannot be read at line 3"),
        (b"\xff\xfe", "which is UTF-8 text"),
        (b"a = " + b"[" * 5000, "nested too deeply|is not TOML"),
        (b"[columns.a]\nkind = 1979-05-27\n", r"\[columns.a\] kind must be one of"),
    ],
)
def test_refused_files(tmp_path: Path, refused: Refused, content: bytes, message: str) -> None:
    (tmp_path / "schema.toml").write_bytes(content)
    with refused(message):
        data.schema_of(tmp_path / "schema.toml")
    with refused("there is no such file"):
        data.schema_of(tmp_path / "none.toml")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(), lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["columns", "target", "file", "split", "unit", "kind", "bounds", "a"]), inner)
)))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_any_values(values: Any) -> None:
    """Whatever is given for a schema, it is a schema or refused in one line."""
    for given_values in (values, {**GOOD, "columns": values}, {**GOOD, "target": values}, {**GOOD, "split": values}):
        try:
            Schema.from_dict(given_values)
            said = ""
        except data.DataError as error:
            said = str(error)
        assert "\n" not in said


class TestConfirming:
    SCHEMA = Schema((Column("a", "number", bounds=(0, 1)), Column("b", "id")), Target("y", classes=("p", "q")))

    def test_the_line_is_named(self, tmp_path: Path, refused: Refused) -> None:
        (tmp_path / "a.csv").write_text("a,b,y\n1,2,p\n", "utf-8")
        with refused(r"\[columns.a\] is not confirmed as public: write public = true there"):
            data.read(tmp_path / "a.csv", schema=self.SCHEMA)
        half = Schema((Column("a", "number", bounds=(0, 1), public=True), Column("b", "id")), self.SCHEMA.target)
        with refused(r"\[target\] is not confirmed as public"):
            data.read(tmp_path / "a.csv", schema=half)
        with refused("is not confirmed"):
            data.encode(tmp_path / "a.csv", self.SCHEMA)

    def test_ids_and_ignored_columns_say_nothing(self) -> None:
        whole = Schema(
            (Column("a", "number", bounds=(0, 1), public=True), Column("b", "id"), Column("c", "ignored")),
            Target("y", classes=("p", "q"), public=True),
        )
        assert whole.confirmed() is whole
