"""Rows of numbers that are prepared already, block by block: .npy, .npz or .csv, without a schema.

Nothing is unpickled, and no more memory is taken than a block needs, whatever size a file declares.
"""

import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgrad.data import _arrays, _csv
from dpgrad.data._columns import LARGEST
from dpgrad.data._encode import MARKERS
from dpgrad.data._opened import guarded, regular
from dpgrad.data._schema import FileFormat
from dpgrad.errors import DataError

Array: TypeAlias = NDArray[np.float32]

_BLOCK = 1024  # rows
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)


def numbers(path: Path, shape: tuple[int, ...], header: str = "auto", separator: str = "auto") -> Iterator[Array]:
    """The rows of a file as float32, at most 1,024 at a time; each must have ``shape``.

    ``header`` (auto, yes, no) and ``separator`` are for .csv. Without them the separator is the first that splits the
    first line into as many cells as a row has numbers. That line is a header if every cell is a name, which begins with
    a letter or an underscore, and a row if no cell is one. Anything between, and a line that only counts (0,1,2,...),
    is refused: it could be either. A refusal gives the place of a cell, never its content.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "rows.csv")
    >>> _ = path.write_text("a;b\\n1.5;2\\n", "utf-8")
    >>> [block.tolist() for block in numbers(path, (2,))]
    [[[1.5, 2.0]]]
    """
    kind = path.suffix.lower()
    with guarded(path, kind):
        if kind == ".csv":
            yield from _lines(path, shape, header, separator)
            return
        with regular(path) as file:
            yield from _archive(path, file, shape) if kind == ".npz" else _array(path, file, path.stat().st_size, shape)


def _archive(path: Path, file: IO[bytes], shape: tuple[int, ...]) -> Iterator[Array]:
    """The one array of an .npz, or the one named x."""
    with _arrays.archive(path, file) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}
        if len(members) != 1 and "x" not in members:
            named = f"it holds {', '.join(members):.80}" if members else "it holds none"
            raise DataError(f"{path} must hold one array, or one named x, and {named}")
        member: zipfile.ZipInfo = archive.getinfo(members["x" if "x" in members else next(iter(members))])
        with archive.open(member) as stream:
            yield from _array(path, stream, member.file_size, shape)


def _array(path: Path, stream: IO[bytes], size: int, shape: tuple[int, ...]) -> Iterator[Array]:
    """The rows of an array in numpy's format, of which there are ``size`` bytes."""
    given, fortran, dtype = _arrays.header(path, stream, size)
    if dtype.kind not in "fiub":
        raise DataError(f"{path} must hold numbers, got texts")
    if not fits(given, shape):
        raise DataError(f"{path} must hold rows of shape {shape}, got an array of shape {given}")
    rows, width = given[0], math.prod(shape)
    if not rows:
        raise DataError(f"{path} holds no rows: its array is empty")
    if fortran:  # the rows lie across the whole array
        whole = np.frombuffer(_exactly(path, stream, math.prod(given) * dtype.itemsize), dtype).reshape(
            given, order="F"
        )
    for at in range(0, rows, _BLOCK):
        count = min(_BLOCK, rows - at)
        if fortran:
            block = whole[at : at + count]
        else:
            block = np.frombuffer(_exactly(path, stream, count * width * dtype.itemsize), dtype).reshape(count, width)
        yield _checked(path, block, at, shape)
    if stream.read(1):  # a member of an archive also checks its own sum at its end
        raise DataError(f"{path} holds more than it declares: it is damaged")


def _exactly(path: Path, stream: IO[bytes], count: int) -> bytes:
    found = stream.read(count)
    if len(found) != count:
        raise DataError(f"{path} ends {count - len(found):,} bytes before it should: it is damaged")
    return found


def fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array holds rows of ``shape``: laid out as one line each, or with the same sides of more than 1.

    Other orders of the same sides, such as channels last, are another image.

    >>> fits((5, 64), (1, 8, 8)), fits((5, 8, 8), (1, 8, 8)), fits((5, 8, 8, 3), (3, 8, 8))
    (True, True, False)
    """
    if len(given) == 2 and given[0] >= 0 and given[1] == math.prod(shape):
        return True
    sides = [side for side in given[1:] if side != 1]
    return len(given) > 1 and given[0] >= 0 and sides == [side for side in shape if side != 1]


def _checked(path: Path, block: Any, before: int, shape: tuple[int, ...]) -> Array:
    """The block as float32 in rows of ``shape``, refused where a value is not finite there."""
    with np.errstate(all="ignore"):
        rows: Array = block.reshape(len(block), *shape).astype(np.float32)
    good = np.isfinite(rows).reshape(len(rows), -1).all(1)
    if not good.all():
        row = before + int(np.argmin(good)) + 1
        raise DataError(
            f"{path} holds a value that is not finite in float32, in row {row:,}: correct or remove that row"
        )
    return rows


def _lines(path: Path, shape: tuple[int, ...], header: str, separator: str) -> Iterator[Array]:
    """The rows of a .csv; line numbers are those of the file, and columns count from 1."""
    width = math.prod(shape)
    lines = _csv.lines_of(path, FileFormat())
    first, rest = _csv.first_line(lines)
    sign = _csv.separator_for(first, width) if separator == "auto" else separator
    block: list[list[float]] = []
    rows, headed = 0, False
    for line, cells in _csv.cells(path, rest, sign, FileFormat()):
        if len(cells) != width:
            named = next((name for name, known in _csv.SEPARATORS.items() if known == sign), sign)
            raise DataError(
                f"{path} has {len(cells):,} column{'s' * (len(cells) > 1)} in line {line:,} (separator {named}), "
                f"expected {width:,}: give one column for each number of a row, or another --separator"
            )
        if not rows and not headed and header != "no":
            headed = header == "yes" or _is_header(path, cells, line)
            if headed:
                continue
        block.append(_values(path, cells, line, maybe_header=header == "auto" and not rows))
        rows += 1
        if len(block) == _BLOCK:
            yield np.array(block, np.float32).reshape(-1, *shape)
            block = []
    if block:
        yield np.array(block, np.float32).reshape(-1, *shape)
    if not rows and header != "yes":
        what = "its only line is read as a header; --header no reads it as a row" if headed else "it is empty"
        raise DataError(f"{path} holds no rows: {what}")


def _is_header(path: Path, cells: list[str], line: int) -> bool:
    """Whether the first line holds names rather than numbers; refused where it could be either."""
    names = [_is_name(cell) for cell in cells]
    if all(names):
        return True
    remedy = "say --header yes if it is a header and --header no if it is a row"
    if any(names):
        raise DataError(f"{path} mixes names and others in line {line}: {remedy}")
    if not any(_fault(cell) for cell in cells) and _csv.counts([float(cell) for cell in cells]):
        raise DataError(f"{path} counts in line {line}, which may be a header or a row: {remedy}")
    return False


def _is_name(cell: str) -> bool:
    begins = cell[:1].isalpha() or cell[:1] == "_"
    return begins and not _NOT_FINITE.fullmatch(cell) and cell.lower() not in MARKERS


def _values(path: Path, cells: list[str], line: int, maybe_header: bool) -> list[float]:
    """The cells as numbers, each refused by its place and reason where it is none."""
    joined = "".join(cells)
    if joined.isascii() and "_" not in joined:  # what Python reads as a number and a file does not mean as one
        try:
            found = list(map(float, cells))
        except ValueError:
            found = []
        if found and all(-LARGEST <= value <= LARGEST for value in found):
            return found
    column, reason = next((place, reason) for place, cell in enumerate(cells, 1) if (reason := _fault(cell)))
    remedy = "; if that line is a header, say --header yes" if maybe_header else ""
    raise DataError(f"{path} {reason} in line {line:,}, column {column:,}: every cell must be a number{remedy}")


def _fault(cell: str) -> str | None:
    """Why a cell is not a number that float32 holds, or None."""
    if not cell:
        return "has an empty cell"
    if _NUMBER.fullmatch(cell):
        return None if abs(float(cell)) <= LARGEST else "has a number beyond float32"
    if _NOT_FINITE.fullmatch(cell) or cell.lower() in MARKERS:
        return "has a missing value"
    if _DECIMAL_COMMA.fullmatch(cell):
        return "has a decimal comma where a point is read"
    return "has a cell that is not a number"
