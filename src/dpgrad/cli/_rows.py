"""Rows from a file, block by block: .npy, .npz or .csv, every row of it or a refusal that says where.

Nothing is unpickled, and no more memory is taken than a block needs, whatever size a file declares.
"""

import csv
import math
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from dpgrad import _validate
from dpgrad.errors import DataError, OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

KINDS = (".npy", ".npz", ".csv")
HEADERS = ("auto", "yes", "no")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "space": " "}  # in the order they are tried

_BLOCK = 1024  # rows
_LARGEST = 3.4028234663852886e38  # of float32
_MANY = 5  # whole numbers that rise by one, from wherever
_LONG_CELL = 1000  # characters; a line may have as many for each column, and `csv` allows one cell more
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_MISSING = ("na", "n/a", "null", "none", "nil", "?", "-", ".")


def blocks(path: Path, shape: tuple[int, ...], header: str = "auto", separator: str = "auto") -> Iterator["Array"]:
    """The rows of a file as float32, at most 1,024 at a time; each must have the ``shape`` the model was trained on.

    ``header`` and ``separator`` are for .csv. Without them the separator is the first of `SEPARATORS` that splits the
    first line into as many cells as a row has numbers. That line is a header if every cell is a name, which begins with
    a letter or an underscore, and a row if no cell is one. Anything between, and a line that only counts (0,1,2,...),
    is refused: it could be either.
    """
    if (kind := path.suffix.lower()) not in KINDS:
        raise OptionError(f"--input must end in {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {path.name!r:.80}")
    if kind != ".csv" and (header, separator) != ("auto", "auto"):
        raise OptionError(f"--header and --separator are for .csv files, got {path.name!r:.80}: leave them out")
    with _readable(path):
        if kind == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as text:
                yield from _lines(text, shape, header, separator)
            return
        with path.open("rb") as file:
            yield from _archive(file, shape) if kind == ".npz" else _array(file, path.stat().st_size, shape)


class _FileError(ValueError):
    """What is wrong with a file, without its name."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within the block a fault, or anything that a library raises over a damaged file, becomes one line with its name.

    Only regular files are opened: a pipe could block for ever.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _FileError("is not a regular file: name a file")
        yield
    except _FileError as error:
        raise DataError(f"--input {path} {error}") from None
    except FileNotFoundError:
        raise DataError(f"--input {path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--input {path} is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    except MemoryError:
        raise DataError(f"--input {path} does not fit into memory: save it in C order, or in parts") from None
    except Exception as error:  # numpy, zipfile and its decompressors raise many kinds
        kind = type(error).__name__
        raise DataError(f"--input {path} cannot be read as {path.suffix}, it is damaged: {kind}: {error}") from None


def _archive(file: IO[bytes], shape: tuple[int, ...]) -> Iterator["Array"]:
    """The one array of an .npz, or the one named x."""
    if file.read(6) == b"\x93NUMPY":
        raise _FileError("holds one array, as .npy files do: rename it to .npy")
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}
        if len(members) != 1 and "x" not in members:
            named = f"it holds {', '.join(members):.80}" if members else "it holds none"
            raise _FileError(f"must hold one array, or one named x, and {named}")
        member = archive.getinfo(members["x" if "x" in members else next(iter(members))])
        with archive.open(member) as stream:
            yield from _array(stream, member.file_size, shape)


def _array(stream: IO[bytes], size: int, shape: tuple[int, ...]) -> Iterator["Array"]:
    """The rows of an array in numpy's format, of which there are ``size`` bytes; its header is checked before its data.

    `numpy.load` would allocate whatever the header declares.
    """
    import numpy as np
    from numpy.lib import format as written

    version = written.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise _FileError(f"must hold numbers, and its format {version[0]}.{version[1]} is for records")
    read = written.read_array_header_1_0 if version == (1, 0) else written.read_array_header_2_0
    given, fortran, dtype = read(stream)
    if dtype.kind not in "fiub":
        raise _FileError(f"must hold numbers, got {dtype}")
    if not fits(given, shape):
        raise _FileError(f"must hold rows of shape {shape}, got an array of shape {given}")
    declared, held = math.prod(given) * dtype.itemsize, size - stream.tell()
    if declared != held:
        raise _FileError(f"declares {declared:,} bytes of numbers and holds {held:,}: damaged, or more than one array")
    rows, width = given[0], math.prod(shape)
    if fortran:  # the rows lie across the whole array
        whole = np.frombuffer(_exactly(stream, held), dtype).reshape(given, order="F")
    for at in range(0, rows, _BLOCK):
        count = min(_BLOCK, rows - at)
        if fortran:
            block = whole[at : at + count]
        else:
            block = np.frombuffer(_exactly(stream, count * width * dtype.itemsize), dtype).reshape(count, width)
        yield _checked(block, at, shape)
    if stream.read(1):  # a member of an archive also checks its own sum at its end
        raise _FileError("holds more than it declares: it is damaged")


def _exactly(stream: IO[bytes], count: int) -> bytes:
    found = stream.read(count)
    if len(found) != count:
        raise _FileError(f"ends {count - len(found):,} bytes before it should: it is damaged")
    return found


def fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array holds rows of ``shape``: laid out as one line each, or with the same sides of more than 1.

    Other orders of the same sides, such as channels last, are another image.
    """
    if len(given) == 2 and given[0] >= 0 and given[1] == math.prod(shape):
        return True
    sides = [side for side in given[1:] if side != 1]
    return len(given) > 1 and given[0] >= 0 and sides == [side for side in shape if side != 1]


def _checked(block: Any, before: int, shape: tuple[int, ...]) -> "Array":
    """The block as float32 in rows of ``shape``, refused where a value is not finite there."""
    import numpy as np

    with np.errstate(over="ignore"):
        rows: Array = block.reshape(len(block), *shape).astype(np.float32)
    good = np.isfinite(rows).reshape(len(rows), -1).all(1)
    if not good.all():
        number = before + int(np.argmin(good)) + 1
        raise _FileError(f"holds a value that is not finite in float32, in row {number:,}: correct or remove that row")
    return rows


def _lines(text: TextIO, shape: tuple[int, ...], header: str, separator: str) -> Iterator["Array"]:
    """The rows of a .csv; line numbers are those of the file, and columns count from 1."""
    import numpy as np

    width = math.prod(shape)
    first = _line(text, width)
    if separator == "auto":
        separator = _separator(first, width)
    reader = _reader(_chain(first, text, width), separator)
    block: list[list[float]] = []
    rows, headed = 0, False
    for line, cells in _cells(reader, separator, width):
        if not rows and not headed and header != "no":
            headed = header == "yes" or _is_header(cells, line)
            if headed:
                continue
        block.append(_numbers(cells, line, maybe_header=header == "auto" and not rows))
        rows += 1
        if len(block) == _BLOCK:
            yield np.array(block, np.float32).reshape(-1, *shape)
            block = []
    if block:
        yield np.array(block, np.float32).reshape(-1, *shape)
    if not rows and header != "yes":
        what = "its only line is read as a header; --header no reads it as a row" if headed else "it is empty"
        raise _FileError(f"holds no rows: {what}")


def _chain(first: str, text: TextIO, width: int) -> Iterator[str]:
    yield first
    while line := _line(text, width):
        yield line


def _line(text: TextIO, width: int) -> str:
    """The next line, refused where it is far longer than ``width`` numbers."""
    most = csv.field_size_limit() + _LONG_CELL * width
    line = text.readline(most + 1)
    if len(line) > most:
        raise _FileError(f"has a line of more than {most:,} characters: expected {width:,} numbers a line")
    return line


def _reader(lines: Iterable[str], separator: str) -> Any:
    if separator == " ":  # any white space, also before the first and after the last cell
        return csv.reader((" ".join(line.split()) for line in lines), delimiter=" ", strict=True)
    return csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)


def _cells(reader: Any, separator: str, width: int) -> Iterator[tuple[int, list[str]]]:
    """Each row with its line number; empty lines are for the end of the file alone."""
    empty = 0
    try:
        for cells in reader:
            line = reader.line_num
            if not cells:
                empty = empty or line
                continue
            if empty:
                raise _FileError(f"has an empty line {empty:,} before its last row: is a row missing? Remove that line")
            if len(cells) != width:
                named = next(name for name, sign in SEPARATORS.items() if sign == separator)
                raise _FileError(
                    f"has {len(cells):,} column{'s' * (len(cells) > 1)} in line {line:,} (separator {named}), expected "
                    f"{width:,}: give one column for each number of a row, or another --separator"
                )
            yield line, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise _FileError(f"cannot be read in line {reader.line_num:,}: {error}") from None


def _separator(line: str, width: int) -> str:
    """The first separator that splits the line into ``width`` cells; else the one that splits it most, to be refused.

    A wrong choice leaves another separator within a cell, which is then no number.
    """
    counts: dict[str, int] = {}
    for sign in SEPARATORS.values():
        try:
            counts[sign] = len(next(_reader([line], sign), []))
        except csv.Error:  # a quote that this separator does not end, or that goes on in the next line
            counts[sign] = 1
    fitting = [sign for sign, count in counts.items() if count == width]
    return fitting[0] if fitting else max(counts, key=lambda sign: counts[sign])


def _is_header(cells: list[str], line: int) -> bool:
    """Whether the first line holds names rather than numbers; refused where it could be either."""
    names = [_is_name(cell) for cell in cells]
    if all(names):
        return True
    remedy = "say --header yes if it is a header and --header no if it is a row"
    if any(names):
        named, other = cells[names.index(True)], cells[names.index(False)]
        raise _FileError(f"mixes names and others ({named!r:.40}, {other!r:.40}) in line {line}: {remedy}")
    if _counts(cells):
        shown = ",".join(cells[:3]) + (",..." if len(cells) > 3 else "")
        raise _FileError(f"counts ({shown:.60}) in line {line}, which may be a header or a row: {remedy}")
    return False


def _is_name(cell: str) -> bool:
    begins = cell[:1].isalpha() or cell[:1] == "_"
    return begins and not _NOT_FINITE.fullmatch(cell) and cell.lower() not in _MISSING


def _counts(cells: list[str]) -> bool:
    """Whether the cells are whole numbers that rise by one, as columns without names are numbered.

    A few such numbers must begin at 0 or 1; only many are more likely names, as years are, than a row.
    """
    if any(_fault(cell) for cell in cells):
        return False
    values = [float(cell) for cell in cells]
    start = values[0]
    counting = start.is_integer() and values == [start + place for place in range(len(values))]
    return counting and (len(values) >= _MANY or start in (0, 1))


def _numbers(cells: list[str], line: int, maybe_header: bool) -> list[float]:
    """The cells as numbers, each refused by its place and reason where it is none."""
    joined = "".join(cells)
    if joined.isascii() and "_" not in joined:  # what Python reads as a number and a file does not mean as one
        try:
            found = list(map(float, cells))
        except ValueError:
            found = []
        if found and all(-_LARGEST <= value <= _LARGEST for value in found):
            return found
    column, reason = next((place, reason) for place, cell in enumerate(cells, 1) if (reason := _fault(cell)))
    remedy = "; if that line is a header, say --header yes" if maybe_header else ""
    raise _FileError(f"{reason} in line {line:,}, column {column:,}: every cell must be a number{remedy}")


def _fault(cell: str) -> str | None:
    """Why a cell is not a number that float32 holds, or None."""
    if not cell:
        return "has an empty cell"
    if _NUMBER.fullmatch(cell):
        return None if abs(float(cell)) <= _LARGEST else f"has a number beyond float32 ({cell!r:.40})"
    if _NOT_FINITE.fullmatch(cell) or cell.lower() in _MISSING:
        return f"has a missing value ({cell!r:.40})"
    if _DECIMAL_COMMA.fullmatch(cell):
        return f"has a decimal comma where a point is read ({cell!r:.40})"
    return f"has a cell that is not a number ({cell!r:.40})"


def separator(text: str) -> str:
    """A separator by its name or as itself; ``auto`` stays."""
    known: dict[str, str] = {"auto": "auto", **SEPARATORS, **{sign: sign for sign in SEPARATORS.values()}, "\\t": "\t"}
    if text not in known:
        _validate.one_of(("auto", *SEPARATORS), value=text)
    return known[text]
