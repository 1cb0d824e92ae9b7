"""JSON lines: one object a line, its keys the columns."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dpgrad.data._csv import lines_of
from dpgrad.data._opened import Chunk, FileTable, guarded
from dpgrad.data._schema import FileFormat
from dpgrad.errors import DataError

_ROWS = 1024  # in a chunk, and that are looked at for names
_CHARACTERS = 1 << 22  # in a chunk, about


def table(path: Path, file: FileFormat, wanted: Sequence[str] = ()) -> FileTable:
    """The values of each key; the first object names the columns, together with ``wanted``.

    A key that an object lacks is a missing value there. A key that neither names is refused.
    """
    rows = _objects(path, file)
    with guarded(path, "jsonl"):
        first = list(islice(rows, _ROWS))
    if not first:
        raise DataError(f"{path} is empty: it holds no rows")
    every = dict.fromkeys(name for _, row, _ in first for name in row)
    if wanted:  # a key of a single later row is somebody's, and is not shown
        every = dict.fromkeys(chain(first[0][1], (name for name in wanted if name in every)))
    names = tuple(every)
    return FileTable(
        str(path), names, _chunks(path, chain(first, rows), {*names, *wanted}, names), "line", certain=False
    )


class _RepeatedKey(Exception):  # noqa: N818  # says what was found; the caller says where
    """An object names a key twice."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedKey
    return found


def _objects(path: Path, file: FileFormat) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Each object with its line and its length in characters."""
    for number, line in enumerate(lines_of(path, file), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, object_pairs_hook=_pairs)
        except _RepeatedKey:
            raise DataError(f"{path}: line {number:,} names a key twice in one object: rename one") from None
        except RecursionError:
            raise DataError(
                f"{path}: line {number:,} is nested too deeply: a value must be a number or a text"
            ) from None
        except ValueError:  # its message may quote the line
            raise DataError(f"{path}: line {number:,} is not JSON: write one object a line") from None
        if not isinstance(found, dict):
            raise DataError(f"{path}: line {number:,} is not an object: write {{...}} with a value for each column")
        yield number, found, len(line)


def _chunks(
    path: Path, rows: Iterator[tuple[int, dict[str, Any], int]], known: set[str], names: tuple[str, ...]
) -> Iterator[Chunk]:
    lines: list[int] = []
    found: list[dict[str, Any]] = []
    size = 0

    def chunk() -> Chunk:
        return Chunk({name: [row.get(name) for row in found] for name in {*names, *known}}, lines)

    with guarded(path, "jsonl"):
        for number, row, length in rows:
            if not row.keys() <= known:
                raise DataError(
                    f"{path}: line {number:,} has a key that no earlier line and no schema has: correct that line"
                )
            lines.append(number)
            found.append(row)
            size += length
            if len(found) == _ROWS or size > _CHARACTERS:
                yield chunk()
                lines, found, size = [], [], 0
        if found:
            yield chunk()
