"""Delimited text: any separator and quoting, a header or none, read line by line into chunks of cells."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dpgrad.data._opened import SAVE, Chunk, FileTable, guarded, regular
from dpgrad.data._schema import FileFormat
from dpgrad.errors import DataError

SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "space": " "}  # in the order they are tried

_ROWS = 2048  # in a chunk
_LOOKED_AT = 10  # lines, to find the separator
_CHARACTERS = 1 << 22  # in a chunk, about
_MANY = 5  # whole numbers that rise by one, from wherever
_LONGEST = 1 << 24  # characters of a line
_STAND_IN = "\x1f"  # for a separator of several characters; ASCII has it for this
_PLAIN = FileFormat()
_MARKS = (
    (b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"),
    (b"\x1f\x8b", None), (b"PK\x03\x04", None),
)  # fmt: skip


def table(path: Path, file: FileFormat, wanted: Sequence[str] = (), target: str | None = None) -> FileTable:
    """The cells of a delimited file; ``wanted`` are the columns of the schema, none where it is still to be written.

    Columns of a file without a header are named "1", "2", and so on.
    """
    header = _has_header(path, file, wanted)
    lines = lines_of(path, file)
    with guarded(path, "csv"):
        first = list(islice(lines, _LOOKED_AT))
    if file.separator is None and wanted and not header:  # no value of a row decides how the others are read
        separator = ";" if file.decimal == "," else ","
    else:
        separator = file.separator or separator_of(first, file, wanted)
    rows = cells(path, chain(first, lines), separator, file)
    with guarded(path, "csv"):
        line, head = next(rows, (0, []))
    if not head:
        raise DataError(f"{path} is empty: it holds no rows")
    numbered = tuple(str(place) for place in range(1, len(head) + 1))
    if header:
        names = _names(path, head)
        with guarded(path, "csv"):
            second = next(rows, None)  # refused where it has another width: a header may have run into it
        return FileTable(
            str(path), names, _chunks(path, rows, second, names), "line", certain=False, plausible=second is not None
        )
    if wanted and target in wanted and len(head) == len(wanted) - 1:  # as in a file to predict
        numbered = tuple(sorted(set(wanted) - {target}, key=lambda name: (len(name), name)))
    return FileTable(
        str(path), numbered, _chunks(path, rows, (line, head), numbered), "line", certain=file.separator is not None
    )


def _has_header(path: Path, file: FileFormat, wanted: Sequence[str]) -> bool:
    """Whether the first line names the columns: by what is declared, never by what that line holds."""
    if file.header is None and wanted and all(name.isdecimal() or is_number(name) for name in wanted):
        raise DataError(
            f"{path}: the columns of the schema have numbers for names, and its first line could be a row: write "
            "header = false under [file] of the schema if it is one, or header = true if it names the columns"
        )
    return file.header is not False


def _names(path: Path, head: Sequence[str]) -> tuple[str, ...]:
    """The names in a header, which must differ; a message gives their places alone, since they may be a row."""
    seen: dict[str, int] = {}
    head = [name or f"column {place}" for place, name in enumerate(head, 1)]  # as tables written with an index have it
    for place, name in enumerate(head, 1):
        if name in seen:
            raise DataError(
                f"{path}: columns {seen[name]:,} and {place:,} have the same name in the first line: rename one, or "
                "write header = false under [file] if that line is a row"
            )
        seen[name] = place
    return tuple(head)


def lines_of(path: Path, file: FileFormat) -> Iterator[str]:
    """The lines of a text file, each checked before it is kept."""
    encoding = "utf-8-sig" if file.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else file.encoding
    with regular(path) as raw:
        start = raw.read(4)
        for mark, named in _MARKS:
            if encoding == "utf-8-sig" and start.startswith(mark):
                remedy = f'{SAVE}, write encoding = "{named}" under [file]' if named else "unpack it first"
                raise DataError(f"{path} is not UTF-8 text: {remedy}")
        raw.seek(0)
        number = 0
        with io.TextIOWrapper(raw, encoding, newline="") as text:
            while line := text.readline(_LONGEST + 1):
                number += 1
                if len(line) > _LONGEST:
                    raise DataError(
                        f"{path}: line {number:,} has more than {_LONGEST:,} characters: is it text with line ends?"
                    )
                if "\0" in line:
                    raise DataError(f"{path}: line {number:,} holds a NUL character: it is not text in {file.encoding}")
                yield line


def _reader(lines: Iterable[str], separator: str, file: FileFormat) -> Any:
    quoting = {"quotechar": file.quote or None, "quoting": csv.QUOTE_MINIMAL if file.quote else csv.QUOTE_NONE}
    if separator == " ":  # any white space, also before the first and after the last cell
        lines = (" ".join(line.split()) for line in lines)
    if len(separator) > 1:
        lines = (line.replace(separator, _STAND_IN) for line in lines)
    sign = separator if len(separator) == 1 else _STAND_IN
    found: dict[str, Any] = {**quoting, "escapechar": file.escape, "skipinitialspace": sign != "\t"}
    return csv.reader(lines, delimiter=sign, strict=True, **found)


def cells(path: Path, lines: Iterable[str], separator: str, file: FileFormat) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, as many in all, with its line; empty lines are for the end of the file alone."""
    width = empty = 0
    reader = _reader(lines, separator, file)
    long = len(separator) > 1
    try:
        for found in reader:
            line = reader.line_num
            if not found:
                empty = empty or line
                continue
            if empty:
                raise DataError(
                    f"{path} has an empty line {empty:,} before its last row: is a row missing? Remove that line"
                )
            width = width or len(found)
            if len(found) != width:
                raise DataError(
                    f"{path}: line {line:,} has {len(found):,} cells, and the first line {width:,}: give each row as "
                    "many, and put a cell that holds the separator in quotes; where the file has another separator "
                    "(; with decimal commas), name it: separator under [file] of the schema, or --separator"
                )
            yield line, [(cell.replace(_STAND_IN, separator) if long else cell).strip() for cell in found]
    except csv.Error as error:
        wide = "field limit" in str(error)
        reason = f"a cell has more than {csv.field_size_limit():,} characters" if wide else "its quotes do not match"
        raise DataError(f"{path}: line {reader.line_num:,} cannot be read: {reason}") from None


def _chunks(
    path: Path, rows: Iterator[tuple[int, list[str]]], first: tuple[int, list[str]] | None, names: tuple[str, ...]
) -> Iterator[Chunk]:
    lines: list[int] = []
    found: list[list[str]] = []
    size = 0

    def chunk() -> Chunk:
        return Chunk(dict(zip(names, zip(*found, strict=True), strict=True)), lines)

    if first is not None:
        lines, found = [first[0]], [first[1]]
    with guarded(path, "csv"):
        for line, row in rows:
            lines.append(line)
            found.append(row)
            size += sum(map(len, row))
            if len(found) == _ROWS or size > _CHARACTERS:
                yield chunk()
                lines, found, size = [], [], 0
        if found:
            yield chunk()


def separator_at(path: Path, file: FileFormat) -> str:
    """The separator that a file seems to have."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with guarded(path, "csv"):
        return separator_of(list(islice(lines_of(path, file), _LOOKED_AT)), file)


def has_header(path: Path, file: FileFormat) -> bool:
    """Whether the first line seems to be a header; refused where it could be either.

    It is one if it has a word above numbers, or holds words alone that never come again. It is a row if it has a
    number above numbers, or a word that comes again in its column. Numbers that only count could be either.
    """
    chunk = next(table(path, replace(file, header=False)).chunks)
    columns = [[_pointed(cell) if file.decimal == "," else cell for cell in cells] for cells in chunk.columns.values()]
    heads = [cells[0] for cells in columns]
    named = row = False
    for head, *below in columns:
        numbers = sum(map(is_number, below)) * 2 > len(below)
        named |= numbers and not is_number(head) and head != ""
        row |= (numbers and is_number(head)) or (head != "" and not numbers and head in below)
    counting = all(map(is_number, heads)) and counts([float(head) for head in heads])
    if counting or (named and row) or (not named and not row and any(map(is_number, heads))):
        raise DataError(f"{path}: its first line could be a header or a row: say --header yes or --header no")
    return not row


def _pointed(cell: str) -> str:
    """A number with a decimal comma as Python writes it."""
    return cell.replace(",", ".") if cell.count(",") == 1 and "." not in cell else cell


def is_number(cell: str) -> bool:
    """Whether a cell is a finite number, as Python writes them."""
    try:
        return cell.isascii() and "_" not in cell and math.isfinite(float(cell))
    except ValueError:
        return False


def counts(values: Sequence[float]) -> bool:
    """Whether these are whole numbers that rise by one, as columns without names are numbered.

    A few such numbers must begin at 0 or 1; only many are more likely names, as years are, than a row.

    >>> counts([0, 1, 2]), counts([2001, 2002]), counts([2001, 2002, 2003, 2004, 2005])
    (True, False, True)
    """
    start = values[0]
    rising = float(start).is_integer() and list(values) == [start + place for place in range(len(values))]
    return rising and (len(values) >= _MANY or start in (0, 1))


def first_line(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """The first line, and all lines with it."""
    first = next(lines, "")
    return first, chain([first] if first else [], lines)


def separator_for(line: str, width: int) -> str:
    """The first separator that splits a line into ``width`` cells; else the one that splits it most, to be refused.

    A wrong choice leaves another separator within a cell, which is then no number.

    >>> separator_for("1;2;3", 3), separator_for("1 2,3", 2)
    (';', ',')
    """
    found: dict[str, int] = {}
    for sign in SEPARATORS.values():
        try:
            found[sign] = len(next(_reader([line], sign, FileFormat()), []))
        except csv.Error:  # a quote that this separator does not end, or that goes on in the next line
            found[sign] = 1
    fitting = [sign for sign, count in found.items() if count == width]
    return fitting[0] if fitting else max(found, key=lambda sign: found[sign])


def separator_of(lines: Sequence[str], file: FileFormat = _PLAIN, wanted: Sequence[str] = ()) -> str:
    """The separator that finds most of the ``wanted`` names in the first line; without them, that splits lines alike.

    >>> separator_of(["age;income, gross", "1;2"]), separator_of(["a b,c d"], wanted=["a b", "c d"])
    (';', ',')
    """
    known, ranks = set(wanted), {}
    for sign in SEPARATORS.values():
        found: list[list[str]] = []
        with suppress(csv.Error):  # a quote that goes on beyond these lines, or that another sign ends
            rows = ([cell.strip() for cell in row] for row in _reader(lines, sign, file) if row)
            found.extend(islice(rows, 1) if known else rows)  # the rows below a header are private
        first = found[0] if found else []
        alike = not known and len({len(row) for row in found}) == 1 and len(first) > 1
        exact = bool(known) and len(known) - len(first) in (0, 1)
        ranks[sign] = (len(known & set(first)), exact, alike, sign != " ", len(first))
    return max(ranks, key=lambda sign: ranks[sign])
