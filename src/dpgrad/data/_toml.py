"""Schemas as TOML files: read by Python's own parser, written by a few lines with comments for people."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpgrad.data._columns import key
from dpgrad.data._opened import regular
from dpgrad.data._schema import Schema
from dpgrad.errors import DataError

_MOST_BYTES = 1 << 26  # of a schema; a list of categories may be long


def schema_of(given: "Schema | Mapping[str, Any] | Path | str") -> Schema:
    """The schema that is given as such, as plain values, or as a TOML file.

    >>> schema_of({"columns": {"age": {"kind": "number", "bounds": [0, 100]}}}).labels()
    ('age',)
    """
    if isinstance(given, Schema):
        return given
    if isinstance(given, Mapping):
        return Schema.from_dict(given)
    if not isinstance(given, str | Path):
        raise DataError(f"schema must be a Schema, a dictionary or a TOML file, got {type(given).__name__}")
    path = Path(given)
    with regular(path, "schema") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DataError(f"schema {path} has more than {_MOST_BYTES:,} bytes: it must be a TOML file, not the data")
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(f"schema {path} is not TOML, which is UTF-8 text") from None
    except RecursionError:
        raise DataError(f"schema {path} is nested too deeply for a schema") from None
    except ValueError as error:
        # The parser names a line and never quotes it; data passed by mistake stay unquoted.
        where = str(error).rpartition("(at ")[2].rstrip(")") if "(at " in str(error) else "some line"
        raise DataError(f"schema {path} is not TOML: it cannot be read at {where}") from None
    try:
        return Schema.from_dict(values)
    except DataError as error:
        raise DataError(f"schema {path}: {str(error).removeprefix('schema: ')}") from None


def written(schema: Schema, notes: Mapping[str, Sequence[str]] | None = None) -> str:
    """The schema as TOML; ``notes`` are comments above an entry by its heading, and "" above all.

    >>> from dpgrad.data._columns import Column
    >>> age = Column("age", "number", bounds=(0, 100), public=True)
    >>> print(written(Schema((age,)), {"age": ["in years"]}), end="")
    # in years
    [columns.age]
    kind = "number"
    bounds = [0, 100]
    public = true
    """
    plain, notes = schema.to_dict(), notes or {}
    columns = plain.pop("columns")
    tables = {name: plain.pop(name) for name in ("file", "split", "target") if name in plain}
    blocks = [_comments(notes.get("", ())) + _pairs(plain)] if plain or "" in notes else []
    blocks += [[*_comments(notes.get(f"[{name}]", ())), f"[{name}]", *_pairs(value)] for name, value in tables.items()]
    for name, value in columns.items():
        blocks.append([*_comments(notes.get(name, ())), f"[columns.{key(name)}]", *_pairs(value)])
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _comments(lines: Sequence[str]) -> list[str]:
    return [f"# {''.join(c if c.isprintable() else ' ' for c in line)}".rstrip() for line in lines]


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in table.items()]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise DataError(f"schema: a value of kind {type(value).__name__} cannot be written as TOML")
