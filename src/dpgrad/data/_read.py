"""A user's own file as a Dataset: read in chunks, each row encoded by the schema and put into its part."""

import filecmp
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.data import _arrays, _csv, _folders, _hf, _jsonl, _parquet
from dpgrad.data._columns import Column, Target, key
from dpgrad.data._dataset import OUTSIDE, ROW_COUNTS, Dataset
from dpgrad.data._encode import Encoder, Tokens
from dpgrad.data._opened import Chunk, FileTable, guarded
from dpgrad.data._parts import Grown, Parts, collect
from dpgrad.data._schema import FileFormat, Schema, Split
from dpgrad.data._toml import schema_of
from dpgrad.errors import DataError

ENDINGS = {
    ".csv": "csv", ".tsv": "csv", ".txt": "csv", ".data": "csv", ".parquet": "parquet", ".pq": "parquet",
    ".npz": "npz", ".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl",
}  # fmt: skip
ROW = "row"  # the name of the row number, for rows without ids
KEPT_COUNTS = f"{ROW_COUNTS} that are kept"
PROPOSED = OUTSIDE + "the schema was first proposed from the private rows (dpgrad data describe)"

# What a schema has to say at least, for those who write it by hand.
_CLASSES = 'classes = ["FIRST", "SECOND"] and public = true'
_LINES = {
    "csv": '[columns.NAME] with kind = "number", bounds = [LOW, HIGH] and public = true, and [target] with '
    f'column = "NAME", {_CLASSES}',
    "images": f'[columns.{_folders.IMAGE}] with kind = "image", shape = [3, HEIGHT, WIDTH] and public = true, and '
    f'[target] with column = "{_folders.FOLDER}", {_CLASSES}: the names of its folders',
    "jsonl": '[columns.NAME] with kind = "text" (or "number" with bounds = [LOW, HIGH]) and public = true, and '
    f'[target] with column = "NAME", {_CLASSES}',
}
_LINES["hf"] = _LINES["jsonl"]

SchemaLike = Schema | Mapping[str, Any] | Path | str


def format_of(path: str | Path, file: FileFormat) -> tuple[str, Path]:
    """The format of a file, and its path without the prefix hf:."""
    name = os.fspath(path)
    if "\0" in name or not name.strip():
        raise DataError(f"path must name a file or a folder, got {_validate.shown(name)}")
    if name.startswith(_hf.PREFIX):
        return "hf", Path(name.removeprefix(_hf.PREFIX)).expanduser()
    found = Path(name).expanduser()
    with guarded(found, "a file"):
        found.stat()  # refuses what is missing, or may not be looked at
        kind = file.format or ("images" if found.is_dir() else ENDINGS.get(found.suffix.lower()))
    if kind is None:
        known = ", ".join(dict.fromkeys(ENDINGS))
        raise DataError(
            f'{found} must end in {known}, be a folder of images, or be named hf:FOLDER; or write format = "csv" under '
            "[file] of its schema"
        )
    return kind, found


def table_of(path: str | Path, file: FileFormat, wanted: Sequence[str] = (), target: str | None = None) -> FileTable:
    """The file as columns of cells; ``wanted`` are the columns that its schema describes."""
    kind, found = format_of(path, file)
    if kind == "csv":
        plain = file.separator is None and found.suffix.lower() == ".tsv"
        return _csv.table(found, replace(file, separator="\t") if plain else file, wanted, target)
    if kind == "jsonl":
        return _jsonl.table(found, file, wanted)
    if kind == "npy":
        return _arrays.npy(found, target)
    return {"parquet": _parquet.table, "npz": _arrays.npz, "images": _folders.table, "hf": _hf.table}[kind](found)


def read(
    path: str | Path,
    target: str | None = None,
    schema: SchemaLike | None = None,
    tokens: Tokens | None = None,
    *,
    classes: int | None = None,
    held_out: float | str | Path | None = None,
) -> Dataset:
    """Read a file or folder of your own: CSV, Parquet, .npz, .npy, JSON lines, images by class, or hf:FOLDER.

    What a row becomes is declared in ``schema`` (a TOML file, a dictionary or a `Schema`), whose entries must be
    confirmed as public. Without one, only arrays can be read: ``target`` names the labels 0, 1, ... of an .npz and
    ``classes`` how many there are. ``tokens`` turns a list of texts into whole numbers (rows, length), in place of
    the hash of words. ``held_out`` is a share of the rows or another file, where the schema has no split.

    Guarantee: each row is encoded by itself, by declared constants: that costs no privacy. The number of rows and
    what ``Dataset.public`` lists are taken as public. A refusal names a place in the file, never what is there.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "people.csv")
    >>> _ = path.write_text("age,income\\n30,low\\n50,high\\n140,high\\n", "utf-8")
    >>> people = read(path, schema={
    ...     "columns": {"age": {"kind": "number", "bounds": [0, 100], "public": True}},
    ...     "target": {"column": "income", "classes": ["low", "high"], "public": True},
    ... })
    >>> people.x_train.ravel().round(2).tolist(), people.y_train.tolist()
    ([0.30000001192092896, 0.5, 1.0], [0, 1, 1])
    """
    if tokens is not None and not callable(tokens):
        raise DataError(f"tokens must be a function of a list of texts, got {_validate.shown(tokens)}")
    declared = _implied(path, target, classes) if schema is None else _declared(schema, target, classes)
    declared = _with_split(declared, held_out).confirmed()
    if declared.target is None:
        raise DataError(
            '[target] is needed for training: write [target] with column = "NAME" and its classes or bounds'
        )
    wanted = [column.name for column in declared.columns] + [declared.target.column]
    sibling = None if declared.split.file is None else _sibling(path, declared.split.file)
    if sibling is not None:
        _refuse_same(path, sibling, declared.file)
    table = table_of(path, declared.file, wanted, declared.target.column)
    matched(table, declared, training=True)
    parts = Parts()
    collect(Encoder(declared, table, tokens), declared, parts, None)
    if sibling is not None:
        other = table_of(sibling, declared.file, wanted, declared.target.column)
        matched(other, declared, training=True)
        collect(Encoder(declared, other, tokens), declared, parts, True)
    return _dataset(path, declared, parts)


def encode(
    rows: "str | Path | Mapping[str, Sequence[object]] | Sequence[Mapping[str, object]] | Any",
    schema: SchemaLike,
    tokens: Tokens | None = None,
) -> NDArray[Any]:
    """The rows of a file, or of columns or records in memory, through a schema and without a target.

    What `read` makes of the same rows. A file whose columns differ is refused, with what is missing and what is
    unexpected; the target, ids and ignored columns may be there or not.

    >>> schema = Schema((Column("age", "number", bounds=(0, 100), public=True),))
    >>> encode({"age": [25, 999]}, schema).tolist()
    [[0.25], [1.0]]
    """
    return identified(rows, schema, tokens)[0]


def identified(
    rows: "str | Path | Mapping[str, Sequence[object]] | Sequence[Mapping[str, object]] | Any",
    schema: SchemaLike,
    tokens: Tokens | None = None,
) -> tuple[NDArray[Any], dict[str, list[Any]]]:
    """The rows as `encode` gives them, and what identifies them: by name, one entry per row.

    That is every id column of the schema that the rows have, the file of each image in a folder, and else the number of
    the row, from 1.

    >>> columns = (Column("age", "number", bounds=(0, 100), public=True), Column("patient", "id"))
    >>> identified({"patient": ["p7", "p8"], "age": [25, 50]}, Schema(columns))[1]
    {'patient': ['p7', 'p8']}
    >>> identified({"age": [25, 50]}, Schema(columns))[1]
    {'row': [1, 2]}
    """
    declared = schema_of(schema).confirmed()
    target = None if declared.target is None else declared.target.column
    wanted = [column.name for column in declared.columns] + ([] if target is None else [target])
    if isinstance(rows, str | Path):
        table = table_of(
            rows, declared.file, wanted, target if target is not None and not target.endswith(".npy") else None
        )
    else:
        table = _in_memory(rows)
    matched(table, declared, training=False)
    encoder = Encoder(declared, table, tokens, training=False)
    ids = [column.name for column in declared.columns if column.kind == "id" and column.name in table.names]
    told: dict[str, list[Any]] = {name: [] for name in ids}
    grown = Grown()
    for chunk in table.chunks:
        for name, cells in _names(encoder, chunk, ids, len(grown)).items():
            told.setdefault(name, []).extend(cells)
        grown.add(encoder.rows(chunk)[0])
    if not len(grown):
        return np.empty((0, *declared.shape), np.int64 if declared.kind == "text" else np.float32), told or {ROW: []}
    return grown.done(), told


def _names(encoder: Encoder, chunk: Chunk, ids: Sequence[str], before: int) -> dict[str, Sequence[Any]]:
    """What identifies the rows of a chunk."""
    if ids:
        return {name: encoder.texts(chunk, name) for name in ids}
    if chunk.keys is not None:
        return {_folders.FILE: [key.removeprefix("/") for key in chunk.keys]}
    return {ROW: range(before + 1, before + len(chunk) + 1)}


def _in_memory(rows: Any) -> FileTable:
    """Columns, records or a DataFrame as a table."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        if not rows.columns.is_unique:
            raise DataError("rows: two columns of the DataFrame have one name: rename one")
        cells = rows.astype(object).where(rows.notna(), None)
        rows = {str(name): cells[name].tolist() for name in rows.columns}
    if isinstance(rows, Mapping):
        columns = {str(name): list(cells) for name, cells in rows.items()}
    elif isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        columns = {
            str(name): [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)
        }
    else:
        raise DataError(f"rows must be a path, columns by name, records or a DataFrame, got {type(rows).__name__}")
    counts = {len(cells) for cells in columns.values()}
    if len(counts) != 1:
        raise DataError("rows: all columns must have the same number of entries, and there must be at least one column")
    count = counts.pop()
    return FileTable("rows", tuple(columns), iter([Chunk(columns, range(1, count + 1))] if count else []))


def matched(table: FileTable, schema: Schema, *, training: bool) -> None:
    """Refuse a table whose columns are not those of the schema, naming them.

    Names of the file are shown only where they are certain to be names: the first line of a file that has no header
    is somebody's record.
    """
    target = schema.target
    needed = [column.name for column in schema.features]
    if training:
        named = (None if target is None else target.column, schema.unit, schema.split.column)
        needed += [name for name in named if name is not None]
    known = {column.name for column in schema.columns} | ({target.column} if target is not None else set())
    missing = [name for name in needed if name not in table.names]
    unexpected = [name for name in table.names if name not in known]
    if not missing and not unexpected:
        return
    words = {
        name for name in known.intersection(table.names) if not (name.isdecimal() or _csv.is_number(name))
    }  # numbers may be a row's
    sure = table.certain or (table.plausible and 2 * len(words) >= len(table.names))
    said = [f"missing {_listed(missing)}"] if missing else []
    if unexpected:
        said.append(
            f"unexpected {_listed(unexpected)}" if sure else f"{len(unexpected):,} that the schema does not name"
        )
    lines = not sure and format_of(table.path, schema.file)[0] == "csv"
    remedy = _layout(schema.file, training) if lines else _remedy(missing, unexpected if sure else (), training)
    raise DataError(f"{table.path}: its columns differ from the schema's: {'; '.join(said)}{remedy}")


def _layout(file: FileFormat, training: bool) -> str:
    """What to look at where the first line may not be a header: what the schema says of it, and what to change.

    >>> _layout(FileFormat(separator=";"), training=False)
    ': is the first line a header, and the separator right? The schema has separator = ";": write the file so'
    """
    said = [] if file.header is None else [f"header = {str(file.header).lower()}"]
    said += [] if file.separator is None else [f"separator = {json.dumps(file.separator)}"]
    asked = ": is the first line a header, and the separator right?"
    if training or not said:
        told = f"The schema has {' and '.join(said)}: see" if said else "See"
        return f"{asked} {told} header and separator under [file]"
    return f"{asked} The schema has {' and '.join(said)}: write the file so"


def _remedy(missing: Sequence[str], unexpected: Sequence[str], training: bool) -> str:
    """What to do about columns that differ, for the first of each."""
    for name in missing:
        if (other := _validate.nearest(name, unexpected)) is not None:
            return f": is {other!r:.80} the column {name!r:.80}? Rename one"
    if not training:
        return ": give the file the columns that the model was trained on, and remove others"
    if not unexpected:
        return ""
    name = key(unexpected[0]) if len(unexpected[0]) <= 80 else "NAME"
    return f': to leave a column out, write [columns.{name}] with kind = "ignored"'


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name)[:80] for name in names[:8])
    return shown + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")


def _declared(schema: SchemaLike, target: str | None, classes: int | None) -> Schema:
    found = schema_of(schema)
    if classes is not None:
        raise DataError("classes is for arrays without a schema: list the classes under [target] of the schema")
    if target is not None and (found.target is None or found.target.column != target):
        there = "none" if found.target is None else repr(found.target.column)[:80]
        known = [column.name for column in found.columns] + ([] if found.target is None else [found.target.column])
        near = "" if target in known else _validate.meant(target, known)
        raise DataError(
            f"target is {target!r:.80}, and the schema has {there}"
            + (near or f': write column = "{target:.80}" under [target]')
        )
    return found


def _with_split(schema: Schema, held_out: float | str | Path | None) -> Schema:
    if held_out is None:
        return schema
    if schema.split.rule != "none":
        raise DataError("held_out is given, and the schema has a rule under [split]: leave one of them out")
    if isinstance(held_out, str | Path):
        return replace(schema, split=Split("file", file=os.fspath(held_out)))
    return replace(schema, split=Split("fraction", held_out=held_out))


def _sibling(path: str | Path, file: str) -> str:
    """The path of the held-out file, relative to the folder of the data."""
    name = os.fspath(path)
    prefix = _hf.PREFIX if name.startswith(_hf.PREFIX) else ""
    return prefix + str(Path(name.removeprefix(prefix)).expanduser().parent / file.removeprefix(prefix))


def _refuse_same(path: str | Path, sibling: str, file: FileFormat) -> None:
    """Refuse to hold out the training rows themselves: the same file, by whatever name, or a copy of it."""
    (_, own), (_, other) = format_of(path, file), format_of(sibling, file)
    with guarded(other, "a file"):
        same = own.samefile(other) or _copied(own, other)
    if same:
        raise DataError(
            f"{other} holds the same as {path}, and held-out rows must be others: name another file, or write "
            'rule = "fraction" under [split]'
        )


def _copied(own: Path, other: Path) -> bool:
    """Whether two files, or the files below two folders, hold the same bytes."""
    names = [
        sorted(str(below.relative_to(path)) for below in (path, *path.rglob("*")) if below.is_file())
        for path in (own, other)
    ]
    return (
        bool(names[0])
        and names[0] == names[1]
        and all(filecmp.cmp(own / name, other / name, shallow=False) for name in names[0])
    )


def _implied(path: str | Path, target: str | None, classes: int | None) -> Schema:
    """The schema of arrays, whose shapes and types say all that has to be known; anything else is refused."""
    kind, _ = format_of(path, FileFormat())
    if kind not in ("npz", "npy"):
        lines = _LINES.get(kind, _LINES["csv"])
        raise DataError(
            f"{path} needs a schema, since kinds, bounds and categories may not be learned from private rows: "
            f"propose one with `dpgrad data describe {path} > schema.toml`, which looks at the data, or write {lines}"
        )
    if target is None or classes is None:
        raise DataError(
            f'{path} needs its target and the number of its classes: give target="y" and classes=10, or a schema with '
            "[target] column, and classes or bounds"
        )
    _validate.whole(least=2, most=1_000_000, classes=classes)
    whole = table_of(path, FileFormat(), (), target).whole or {}
    if target not in whole:
        near = _validate.meant(target, whole) or f": it holds {_listed(list(whole))}"
        raise DataError(f"{path} has no array {target!r:.80}{near}")
    inputs = [name for name in whole if name != target]
    if len(inputs) != 1 or whole[inputs[0]].dtype.kind not in "fu" or whole[target].dtype.kind not in "iu":
        raise DataError(
            f"{path} needs a schema: without one it must hold one array of floats or bytes, and the target as whole "
            "numbers"
        )
    array = whole[inputs[0]]
    pixels = array.dtype == np.uint8  # their range is that of the type, whatever the values
    bounds, scale = ((0.0, 255.0), "unit") if pixels else (None, "none")
    column = Column(inputs[0], "number", bounds=bounds, scale=scale, shape=array.shape[1:], public=True)
    names = tuple(str(number) for number in range(classes))
    return Schema((column,), Target(target, classes=names, public=True))


def _dataset(path: str | Path, schema: Schema, parts: Parts) -> Dataset:
    train, test = parts.train, parts.test
    cut = parts.cut(schema.split.held_out) if schema.split.rule == "last" else len(train.y)
    if not cut:
        raise DataError(f"{path} holds no rows for training: it has only a header, or all are held out or dropped")
    x, y = train.rows(), train.y.done()
    x_test = test.rows() if len(test.y) else x[:0]
    y_test = test.y.done() if len(test.y) else y[:0]
    ids = train.ids.done() if schema.unit is not None else None
    if schema.split.rule == "last":
        x, x_test, y, y_test = x[:cut], x[cut:], y[:cut], y[cut:]
        others = None if ids is None else ids[cut:]
        ids = None if ids is None else ids[:cut]
    else:
        others = test.ids.done() if ids is not None and len(test.ids) else None
    if ids is not None and others is not None and np.isin(others, ids).any():
        raise DataError(
            f"{path}: a person has rows in both parts, and held-out rows must be of other people: write "
            'rule = "fraction" under [split], which splits by person'
        )
    target = schema.target
    assert target is not None
    said = (PROPOSED,) if schema.proposed_from_data else ()
    units = None if ids is None else np.unique(ids, return_inverse=True)[1].astype(np.int64)
    told = None
    if units is not None:
        told = 1 + units.max() + np.unique(np.empty(0) if others is None else others, return_inverse=True)[1]
    return Dataset(
        _stem(path), x, y, x_test, y_test, target.classes or None, "schema", schema.split.fact(),
        (KEPT_COUNTS if schema.may_drop else ROW_COUNTS, *schema.facts(), *said), schema,
        units, schema.kind, parts.by_position, told,
    )  # fmt: skip


def _stem(path: str | Path) -> str:
    """The name of the file without its ending, as the name of a dataset and of a folder."""
    stem = Path(os.fspath(path).removeprefix(_hf.PREFIX)).expanduser().resolve().stem
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in stem)[:80] or "data"
