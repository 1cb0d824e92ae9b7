"""Numeric text tables: read by numpy, refused with a line and a column, never with the cell's content."""

import io
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpgrad.errors import DataError


def parse(
    blob: bytes,
    name: str,
    *,
    rows: int,
    columns: int,
    delimiter: str | None = ",",
    header: int = 0,
    dtype: DTypeLike = np.float64,
) -> NDArray[Any]:
    """The finite numbers of a text table with exactly this many rows and columns; `delimiter` None is white space.

    >>> parse(b"1,2\\n3,4\\n", "toy", rows=2, columns=2)
    array([[1., 2.],
           [3., 4.]])
    >>> parse(b"1,2\\n3,nan\\n", "toy", rows=2, columns=2)
    Traceback (most recent call last):
    dpgrad.errors.DataError: toy: line 2, column 2 is not a finite number
    """
    if not blob.isascii() or b"\0" in blob:
        raise DataError(f"{name}: not a text table, it has bytes that are not ASCII text")
    filled = sum(1 for line in blob.splitlines()[header:] if not line.isspace() and line)
    if filled != rows:
        raise DataError(f"{name}: {filled} rows, {rows} expected")
    try:
        table = np.loadtxt(
            io.BytesIO(blob),
            dtype=dtype,
            delimiter=delimiter,
            skiprows=header,
            ndmin=2,
            comments=None,
            encoding="ascii",
        )
    except (ValueError, OverflowError):
        # numpy's own message quotes the cell, which may be somebody's record.
        raise _located(blob, name, columns, delimiter, header) from None
    if table.shape != (rows, columns) or not np.isfinite(table).all():
        raise _located(blob, name, columns, delimiter, header)
    return table


def _located(blob: bytes, name: str, columns: int, delimiter: str | None, header: int) -> DataError:
    separator = None if delimiter is None else delimiter.encode("ascii")
    for number, line in enumerate(blob.splitlines(), start=1):
        if number <= header or not line.strip():
            continue
        cells = line.split(separator)
        if len(cells) != columns:
            return DataError(f"{name}: line {number} has {len(cells)} columns, {columns} expected")
        for column, cell in enumerate(cells, start=1):
            if not _finite(cell):
                return DataError(f"{name}: line {number}, column {column} is not a finite number")
    return DataError(f"{name}: a cell is not a number of the kind this table holds")


def _finite(cell: bytes) -> bool:
    try:
        return math.isfinite(float(cell)) and b"_" not in cell
    except (ValueError, OverflowError):
        return False


def unix_lines(blob: bytes, _name: str) -> bytes:
    """The text with plain line feeds and one at its end: what copies of the same table agree on.

    >>> unix_lines(b"1,2\\r\\n3,4", "toy")
    b'1,2\\n3,4\\n'
    """
    return blob.replace(b"\r\n", b"\n").rstrip(b"\n") + b"\n"


def rows_below_header(blob: bytes, name: str) -> bytes:
    """As `unix_lines`, without the first line: copies spell the column names differently.

    >>> rows_below_header(b"a,b\\r\\n3,4", "toy")
    b'3,4\\n'
    """
    return unix_lines(blob, name).partition(b"\n")[2]
