"""Rows of a file as numbers: each by itself, by what the schema declares."""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._columns import LARGEST, SCALES, Column, Target
from dpgrad.data._opened import Chunk, FileTable
from dpgrad.data._schema import Schema
from dpgrad.errors import DataError

Tokens: TypeAlias = Callable[[list[str]], Any]

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.ASCII | re.IGNORECASE)
_WORD = re.compile(r"\w+")

MARKERS = ("na", "n/a", "null", "none", "nil", "?", "-", ".")  # of missing values, as files often write them


@dataclass(frozen=True)
class Encoder:
    """Turns chunks of one table into arrays, as the schema says; a cell that cannot be is refused by its place."""

    schema: Schema
    table: FileTable
    tokens: Tokens | None = None
    training: bool = True  # rows that are to be predicted are all wanted, and their schema is that of the model

    @np.errstate(all="ignore")  # whatever np.seterr asks for: an error of numpy would tell of a value
    def rows(self, chunk: Chunk) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The encoded rows, and which of them the schema keeps."""
        keep = np.ones(len(chunk), bool)
        columns = self.schema.features
        first = columns[0]
        if first.kind == "text":
            return self._text(first, chunk), keep
        if first.kind == "image":
            return self._images(first, chunk), keep
        parts = [
            self._category(column, chunk, keep) if column.kind == "category" else self._number(column, chunk)
            for column in columns
        ]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return x.reshape(len(chunk), *self.schema.shape), keep

    def _fault(self, chunk: Chunk, index: int, column: str, reason: str) -> DataError:
        """What is wrong with one cell, with the line to write; for rows to predict that line is one of a new training.

        >>> age = Schema((Column("age", "number", scale="none"),))
        >>> encoder = Encoder(age, FileTable("new.csv", (), iter([])), training=False)
        >>> print(encoder._fault(Chunk({}, [7]), 0, "age", "is missing: write missing = ['']"))
        new.csv: row 7, column 'age' is missing: correct this file, or change the schema (write missing = ['']) and \
train again
        """
        problem, _, remedy = reason.partition(": ")
        if not self.training and re.search("write |list ", remedy):
            reason = f"{problem}: correct this file, or change the schema ({remedy}) and train again"
        return self.table.fault(chunk, index, column, reason)

    @np.errstate(all="ignore")  # whatever np.seterr asks for: an error of numpy would tell of a value
    def target(self, chunk: Chunk) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The class indices, or the targets in [0, 1], and which rows the schema keeps."""
        target = self.schema.target
        assert target is not None
        cells = chunk.columns[target.column]
        if isinstance(cells, np.ndarray) and cells.ndim > 1:
            shape = cells.shape[1:]
            raise self._fault(
                chunk, 0, target.column, f"has shape {shape} in a row: save one value a row, as by ravel()"
            )
        if target.bounds is None:
            return self._classes(target, cells, chunk)
        values, missing = self._numbers(cells, target.column, target.missing, chunk)
        self._refuse_missing(missing, bool(target.missing), target.column, "[target]", "", chunk)
        low, high = target.bounds
        return ((np.clip(values, low, high) - low) / (high - low)).astype(np.float32), ~missing

    def _classes(self, target: Target, cells: Any, chunk: Chunk) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        places: dict[str | None, int] = {name: place for place, name in enumerate(target.classes)}
        if target.missing:
            places |= dict.fromkeys((*target.missing, None), -2)
        codes = np.array([places.get(written_as(cell), -1) for cell in _listed(cells)], np.int64)
        unknown = np.flatnonzero(codes == -1)
        if unknown.size and target.unknown == "refuse":
            raise self._fault(
                chunk, int(unknown[0]), target.column,
                'is none of the classes under [target]: list it there, or write unknown = "drop"',
            )  # fmt: skip
        return np.maximum(codes, 0), codes >= 0

    def texts(self, chunk: Chunk, column: str) -> list[str]:
        """The cells of a column as text: what ids and splits are made of."""
        found = [written_as(cell) for cell in _listed(chunk.columns[column])]
        return ["" if text is None else text for text in found]

    def ids(self, chunk: Chunk, column: str) -> NDArray[np.uint64]:
        """A hash of the id of each row; equal ids are one person."""
        found = self.texts(chunk, column)
        if "" in found:
            raise self._fault(chunk, found.index(""), column, "is empty: every row needs the id of its person")
        return np.array([_hash(text) for text in found], np.uint64)

    def _number(self, column: Column, chunk: Chunk) -> NDArray[np.float32]:
        cells, width = chunk.columns[column.name], max(1, math.prod(column.shape))
        if column.shape:
            cells = self._flat(column, cells, chunk)
        values, missing = self._numbers(cells, column.name, column.missing, chunk, width)
        remedy = "and fill = VALUE "
        self._refuse_missing(missing, bool(column.missing), column.name, column.where, remedy, chunk, width)
        values[missing] = 0.0 if column.fill is None else float(column.fill)
        if column.bounds is None:
            wild = np.flatnonzero(~(np.abs(values) <= LARGEST))
            if wild.size:
                reason = f"is not finite in float32: write bounds = [LOW, HIGH] under {column.where}"
                raise self._fault(chunk, int(wild[0]) // width, column.name, reason)
        else:
            low, high = column.bounds
            values = np.clip(values, low, high)
            if column.scale != "none":
                least, most = SCALES[column.scale]
                values = least + (most - least) * ((values - low) / (high - low))
        found = values.reshape(len(chunk), width).astype(np.float32)
        if not (column.missing and column.indicator):
            return found
        marks = missing.reshape(len(chunk), width).any(1, keepdims=True).astype(np.float32)
        return np.concatenate([found, marks], axis=1)

    def _flat(self, column: Column, cells: Any, chunk: Chunk) -> Any:
        """The numbers of a column of arrays, one after another, where each has the declared shape."""
        if isinstance(cells, np.ndarray) and cells.dtype != object:
            if cells.shape[1:] != column.shape and math.prod(cells.shape[1:]) != math.prod(column.shape):
                raise DataError(
                    f"{self.table.path}: column {column.name!r:.80} holds arrays of shape {cells.shape[1:]}: write "
                    f"shape = {list(cells.shape[1:])} under {column.where}"
                )
            return cells.reshape(-1)
        found = np.full((len(chunk), math.prod(column.shape)), np.nan)
        for index, cell in enumerate(cells):
            try:
                row = np.asarray(cell, np.float64)
            except (TypeError, ValueError, OverflowError):
                row = np.empty(0)
            if cell is None:
                continue
            if row.shape != column.shape:
                reason = f"is not an array of numbers of shape {column.shape}, as declared under {column.where}"
                raise self._fault(chunk, index, column.name, reason)
            found[index] = row.reshape(-1)
        return found.reshape(-1)

    def _numbers(
        self, cells: Any, name: str, markers: Sequence[str], chunk: Chunk, width: int = 1
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The cells as numbers, and which are missing: markers, nulls and NaN; anything else is refused."""
        if isinstance(cells, np.ndarray) and cells.dtype.kind in "fiub":
            values = cells.astype(np.float64)
            return values, np.isnan(values)
        marked, comma = frozenset(markers), self.schema.file.decimal == ","
        quick = None if comma else _quick(cells)
        if quick is not None and not marked.intersection(cells):
            return quick, np.zeros(len(cells), bool)
        values = np.zeros(len(cells))
        missing = np.zeros(len(cells), bool)
        for index, cell in enumerate(cells):
            if cell is None or cell == "" or (marked and isinstance(cell, str) and cell in marked):
                missing[index] = True
                continue
            value = real(cell, comma)
            if value is None:
                raise self._fault(chunk, index // width, name, self._why(cell))
            if math.isnan(value):
                missing[index] = True
            values[index] = value
        return values, missing

    def _why(self, cell: object) -> str:
        """Why a cell is not a number, without its content."""
        text = cell.lower() if isinstance(cell, str) else ""
        if text.lstrip("+-") == "nan" or text in MARKERS:
            return "looks like a missing value: list its marker in missing = [...] of that column, with fill = VALUE"
        if isinstance(cell, date | datetime) or re.match(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}", text):
            return 'looks like a date, not a number: write kind = "ignored", or a column of years or days'
        if re.fullmatch(r"[+-]?\d{1,3}(\.\d{3})*,\d+", text) or re.fullmatch(r"[+-]?\d+,\d+", text):
            return 'looks like a number with a decimal comma: write decimal = "," under [file]'
        return 'is not a number: write kind = "category" or "ignored", or list it in missing = [...] of that column'

    def _refuse_missing(
        self,
        missing: NDArray[np.bool_],
        declared: bool,
        name: str,
        where: str,
        remedy: str,
        chunk: Chunk,
        width: int = 1,
    ) -> None:
        if not declared and missing.any():
            reason = f'is missing: write missing = [""] {remedy}under {where}'
            raise self._fault(chunk, int(np.argmax(missing)) // width, name, reason)

    def _category(self, column: Column, chunk: Chunk, keep: NDArray[np.bool_]) -> NDArray[np.float32]:
        count = len(column.categories)
        places: dict[str | None, int] = {name: place for place, name in enumerate(column.categories)}
        if column.missing:
            places |= dict.fromkeys((*column.missing, None), -2)
        cells = _listed(chunk.columns[column.name])
        codes = np.array([places.get(written_as(cell), -1) for cell in cells], np.int64)
        unknown, missing = codes == -1, codes == -2
        if unknown.any() and (column.unknown == "refuse" or (column.unknown == "drop" and not self.training)):
            reason = (
                f'is none of the categories under {column.where}: list it there, or write unknown = "other"'
                if column.unknown == "refuse"
                else "is none of the categories, and the schema drops such rows: remove the row from this file"
            )
            raise self._fault(chunk, int(np.argmax(unknown)), column.name, reason)
        if column.unknown == "drop":
            keep &= ~unknown
        if column.fill is not None:
            codes[missing] = places[str(column.fill)]
        found = np.zeros((len(cells), len(column.labels())), np.float32)
        if column.unknown == "other":
            codes[unknown] = count
        rows = np.flatnonzero(codes >= 0)
        found[rows, codes[rows]] = 1.0
        if column.missing and column.indicator:
            found[:, -1] = missing
        return found

    def _text(self, column: Column, chunk: Chunk) -> NDArray[np.int64]:
        cells = self.texts(chunk, column.name)
        if self.tokens is None:
            return np.array([hashed(text, column.buckets, column.length) for text in cells], np.int64)
        found = np.asarray(self.tokens(cells))
        if found.ndim != 2 or len(found) != len(cells) or found.dtype.kind not in "iu":
            raise DataError(
                f"tokens must return whole numbers of shape (rows, length), got {found.dtype} of shape {found.shape}: "
                "pad each text to one length"
            )
        return found.astype(np.int64)

    def _images(self, column: Column, chunk: Chunk) -> NDArray[np.float32]:
        from dpgrad.data._folders import UNNAMED, pixels

        found = np.empty((len(chunk), *column.shape), np.float32)
        for index, cell in enumerate(_listed(chunk.columns[column.name])):
            try:
                found[index] = pixels(cell, column.shape, column.resize)
            except DataError as error:
                raise self._fault(chunk, index, column.name, str(error).removeprefix(f"{UNNAMED} ")) from None
        return found


def hashed(text: str, buckets: int, length: int) -> list[int]:
    """The words of a text as numbers 1..buckets-1 by a fixed public hash, cut or padded with 0 to ``length``.

    >>> hashed("A word, a WORD!", 100, 5)
    [3, 35, 3, 35, 0]
    """
    words = [1 + _word(found[0]) % (buckets - 1) for found in islice(_WORD.finditer(text.lower()), length)]
    return words + [0] * (length - len(words))


def _hash(text: str, salt: bytes = b"") -> int:
    """A fixed public hash of 64 bits."""
    content = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=salt).digest(), "big")


_word = lru_cache(maxsize=1 << 16)(_hash)  # words come again


def shares(keys: Sequence[str], key: str) -> NDArray[np.float64]:
    """A number in [0, 1) for each row, by a hash of its own key alone.

    >>> shares(["0", "1"], "dpgrad").round(3).tolist() == shares(["0", "1"], "dpgrad").round(3).tolist()
    True
    """
    salt = hashlib.blake2b(key.encode("utf-8"), digest_size=16).digest()
    return np.array([_hash(text, salt) for text in keys], np.uint64) / 2.0**64


def _listed(cells: Any) -> Any:
    return cells.tolist() if isinstance(cells, np.ndarray) else cells


def written_as(cell: object) -> str | None:
    """A cell as a text file would hold it; None where it is null."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(cell, str):
        return cell
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell)


def _quick(cells: Sequence[Any]) -> NDArray[np.float64] | None:
    """The numbers of cells that are all written plainly; None where one of them has to be looked at."""
    try:
        joined = "".join(cells)
        if not joined.isascii() or "_" in joined:  # which Python reads as a part of a number
            return None
        values = np.array(list(map(float, cells)))
    except (TypeError, ValueError):
        return None
    return values if np.isfinite(values).all() else None


def real(cell: object, comma: bool) -> float | None:
    """The number that a cell holds, also if infinite; None where it is none."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(cell, str):
        if comma:
            cell = "x" if "." in cell else cell.replace(",", ".")
        return float(cell) if _NUMBER.fullmatch(cell) else None
    if isinstance(cell, int | float | Decimal):
        try:
            return float(cell)
        except (OverflowError, ValueError):
            return math.inf if cell > 0 else -math.inf
    return None
