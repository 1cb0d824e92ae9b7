"""Columns of Parquet files and of Arrow tables, read by row groups."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpgrad.data._opened import Chunk, FileTable, guarded, regular
from dpgrad.errors import DataError

_ROWS = 2048  # in a chunk


def table(path: Path) -> FileTable:
    """The columns of a Parquet file."""
    with regular(path):
        pass
    with guarded(path, "parquet"):
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        names = tuple(file.schema_arrow.names)
    refuse_names(path, names)
    return FileTable(str(path), names, _chunks(path, file))


def refuse_names(path: object, names: tuple[str, ...]) -> None:
    """Refuse columns that share a name."""
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: two columns are named {name!r:.80}: rename one")


def _chunks(path: Path, file: Any) -> Iterator[Chunk]:
    at = 0
    with guarded(path, "parquet"), file:
        for batch in file.iter_batches(batch_size=_ROWS):
            yield chunk(batch, at)
            at += batch.num_rows


def chunk(batch: Any, at: int) -> Chunk:
    """The columns of an Arrow batch or table; numbers without nulls stay arrays."""
    from pyarrow import types

    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        plain = types.is_floating(kind) or (types.is_integer(kind) and not column.null_count)
        columns[name] = column.to_numpy(zero_copy_only=False) if plain else column.to_pylist()
    return Chunk(columns, range(at + 1, at + batch.num_rows + 1))
