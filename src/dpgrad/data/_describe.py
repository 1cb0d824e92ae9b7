"""A schema proposed from a file: it reads the private rows, so a person has to confirm every entry."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpgrad import _validate
from dpgrad.data import _csv, _folders, _hf
from dpgrad.data._columns import LONGEST_NAME, Column, Target
from dpgrad.data._encode import real, written_as
from dpgrad.data._opened import FileTable
from dpgrad.data._read import format_of, table_of
from dpgrad.data._schema import FileFormat, Schema, Split
from dpgrad.errors import DataError

NOTICE = (
    "This schema was proposed by reading the data, which is outside every guarantee: its names, bounds and categories "
    "may reveal rows. Correct each entry from public knowledge, then confirm it with public = true."
)
MARKERS = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "none", "-", ".")

_MOST_DISTINCT = 1000  # values that are counted; beyond that a column has no categories
_MOST_CATEGORIES = 50
_OFTEN = 3  # a category that occurs less often is not listed: it may be one person's
_MOST_CLASSES = 20  # of a target of whole numbers
_LONG_TEXT = 30  # characters on average
_SENTENCE = 2  # words on average, above which a short text is one
_CLOSE = 5  # ids that count rows lie this often among whole numbers, at most
_FEW = 10  # rows, in which numbers that differ say nothing
_OWNED = 20  # rows of one person, on average, that what may be an index of something else names at most
_FAR = 3  # numbers that lie so many times their spread from 0 are bounded on both sides
_NO_SHAPE = (0,)  # of lists that are not arrays of numbers of one shape
_TARGETS = ("target", "label", "labels", "class", "y", _folders.FOLDER)
_WHO = "patient|subject|participant|respondent|person|user|customer|client|member|employee|student|account|household"
_PERSON = re.compile(
    rf"(?i:(.*[^a-z0-9])?((id[^a-z0-9]*)({_WHO})|({_WHO})[^a-z0-9]*(id|ids|no|nr|num|number|key|code|name|uuid|guid)"
    r"|mrn|ssn|pid|uid|e[^a-z0-9]?mail([^a-z0-9]*address)?))",
    re.DOTALL,
)
_ID = re.compile(rf"(?i:(.*[^a-z0-9])?(id|ids|uuid|guid))|.*[a-z](ID|Id)|{_PERSON.pattern}", re.DOTALL)
_INDEX = re.compile(r"(?i:(.*[^a-z0-9])?(idx|index)|column 1)", re.DOTALL)
_ALONE = re.compile(rf"(?i:{_WHO})")  # may as well say yes or no, or be what a message is about
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_DECIMAL_POINT = re.compile(r"[+-]?\d+\.\d+")
_CODE = re.compile(r"0\d+")
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?")


@dataclass
class _Seen:
    """What was seen of one column."""

    counts: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    missing: set[str] = field(default_factory=set)
    numbers: int = 0
    low: float = math.inf
    high: float = -math.inf
    dates: int = 0
    letters: int = 0
    words: int = 0
    codes: int = 0  # whole numbers that begin with a 0, as in 01234: not the same as 1234
    whole: bool = True
    rising: bool = True  # each number above the one before
    repeats: bool = False  # a value came again, of those that are counted
    crowded: bool = False
    shape: tuple[int, ...] = ()
    images: set[tuple[int, int, int]] = field(default_factory=set)
    strange: bool = False  # nested values, or bytes that are no image

    def add(self, cells: Any, comma: bool, fault: Callable[..., DataError]) -> None:
        """Take in the cells of a chunk; ``fault`` names the place of one that cannot be read."""
        if isinstance(cells, np.ndarray) and cells.ndim > 1:
            self._arrays(cells)
            return
        for index, cell in enumerate(cells.tolist() if isinstance(cells, np.ndarray) else cells):
            if isinstance(cell, list):
                self._arrays(_array(cell))
                continue
            if isinstance(cell, Path | bytes | dict):
                try:
                    self.images.add(_folders.size(cell))
                except DataError as error:
                    if isinstance(cell, Path) or self.images:
                        raise fault(index, reason=str(error).removeprefix(f"{_folders.UNNAMED} ")) from None
                    if self.rows:
                        raise fault(index, reason="is nested or of bytes, and others before it are not") from None
                    self.strange = True
                continue
            self._one(cell, written_as(cell), comma)

    def _one(self, cell: object, text: str | None, comma: bool) -> None:
        if text is None or text in MARKERS:
            self.missing.add("" if text is None else text)
            return
        text = text.encode("utf-8", "replace").decode()  # half a character, as JSON can hold, is in no TOML
        self.rows += 1
        self.letters += len(text)
        self.words += len(text.split())
        self.repeats = self.repeats or text in self.counts
        if not self.crowded:
            self.counts[text] += 1
            self.crowded = len(self.counts) > _MOST_DISTINCT
        value = None if isinstance(cell, bool) else real(cell, comma)
        if value is None:
            self.dates += bool(_DATE.fullmatch(text))
        elif math.isfinite(value):
            self.codes += isinstance(cell, str) and bool(_CODE.fullmatch(text))
            self.numbers += 1
            self.rising = self.rising and value > self.high
            self.low, self.high = min(self.low, value), max(self.high, value)
            self.whole = self.whole and value.is_integer()

    def _arrays(self, cells: Any) -> None:
        self.rows += len(cells)
        usable = cells.dtype.kind in "fiub" and self.shape in ((), cells.shape[1:])
        self.shape = cells.shape[1:] if usable else _NO_SHAPE
        if not usable:
            return
        values = cells[np.isfinite(cells)]
        if values.size:
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    @property
    def all_numbers(self) -> bool:
        return self.rows > 0 and self.numbers == self.rows and not self.codes

    @property
    def counts_rows(self) -> bool:
        """Whether these are whole numbers that rise from row to row and lie close together, as numbers of rows do."""
        close = self.high - self.low < _CLOSE * self.rows
        return self.all_numbers and self.whole and self.rising and close and self.rows >= _FEW

    @property
    def is_shared(self) -> bool:
        """Whether values come again as the ids of persons with a few rows do."""
        return self.repeats and (self.crowded or len(self.counts) * _OWNED >= self.rows)


def _array(cell: list[Any]) -> Any:
    """A list as an array of one row; of texts where it is not of numbers alone, all of one shape."""
    try:
        return np.asarray([cell], np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([[""]])


def describe(
    path: str | Path, target: str | None = None, file: FileFormat | None = None
) -> tuple[Schema, dict[str, list[str]]]:
    """Propose a schema for a file, with notes for each entry.

    Guarantee: none. Proposing reads every row. Nothing of it is confirmed, and `read` refuses it until a person has.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "people.csv")
    >>> _ = path.write_text("age,income\\n30,low\\n54,high\\n", "utf-8")
    >>> schema, notes = describe(path)
    >>> schema.columns[0].bounds, schema.target.classes, schema.target.public
    ((0.0, 100.0), ('high', 'low'), False)
    """
    file = file or FileFormat()
    kind, found = format_of(path, file)
    if kind == "csv":
        file = replace(file, separator=file.separator or _csv.separator_at(found, file))
        file = replace(file, decimal=_decimal(found, file))
        file = file if file.header is not None else replace(file, header=_csv.has_header(found, file))
    table = table_of(path, file, (), target)
    for place, name in enumerate(table.names, 1):  # by their places: they may be a row
        if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise DataError(f"{path}: the name of column {place:,} must be 1 to {LONGEST_NAME} printable characters")
    seen = {name: _Seen() for name in table.names}
    rows = 0
    for chunk in table.chunks:
        rows += len(chunk)
        for name in table.names:
            seen[name].add(chunk.columns[name], file.decimal == ",", partial(table.fault, chunk, column=name))
    if not rows:
        raise DataError(f"{path} holds no rows below its header: there is nothing to describe")
    goal = _goal(table, target)
    notes: dict[str, list[str]] = {"": []}
    declared = _hf.class_names(found) if kind == "hf" else {}
    columns = []
    for name in table.names:
        if name != goal:
            column, note = _column(name, seen[name])
            columns.append(column)
            notes[name] = note
    described = _target(table, goal, seen[goal], declared.get(goal))
    if target is None:
        notes["[target]"] = ["the target is guessed: correct column if it is another"]
    unit = _unit([column.name for column in columns if column.kind == "id" and seen[column.name].repeats], seen, notes)
    notes[""] = _preface(path, unit)
    columns = _used(table, columns, seen, notes)
    proposed = Schema(_alone(columns, notes), described, file, Split("fraction"), unit, proposed_from_data=True)
    return proposed, notes


def _unit(shared: list[str], seen: dict[str, _Seen], notes: dict[str, list[str]]) -> str | None:
    """Whose rows belong together: of ids that come again, one that names persons, then one of the most values."""
    if not shared:
        return None
    unit = max(shared, key=lambda name: (_is_person(name), len(seen[name].counts)))
    for name in shared:
        notes[name] = [
            "an id whose values come again: it is the unit above, so persons are protected, not rows"
            if name == unit
            else "an id whose values come again, as do those of the unit above, chosen of several: if this one "
            f"names whom to protect, write unit = {json.dumps(name)} at the top"
        ]
    return unit


def _is_person(name: str) -> bool:
    return bool(_PERSON.fullmatch(name) or _ALONE.fullmatch(name))


def _decimal(path: Path, file: FileFormat) -> str:
    """The decimal sign that numbers of a delimited file seem to have."""
    if file.separator == "," or file.decimal == ",":
        return file.decimal
    cells = next(_csv.table(path, replace(file, header=False)).chunks).columns.values()
    commas, points = (
        sum(2 * sum(bool(sign.fullmatch(cell)) for cell in column) > len(column) for column in cells)
        for sign in (_DECIMAL_COMMA, _DECIMAL_POINT)
    )
    return "," if commas > points else "."


def _used(table: FileTable, columns: list[Column], seen: dict[str, _Seen], notes: dict[str, list[str]]) -> list[Column]:
    """The columns, one of them a number or a text where none would be used."""
    if any(column.is_feature for column in columns):
        return columns
    for place, column in enumerate(columns):
        found = seen[column.name]
        if found.counts_rows and not _ID.fullmatch(column.name) and not _INDEX.fullmatch(column.name):
            made, notes[column.name] = _number(column.name, found)
            return [*columns[:place], made, *columns[place + 1 :]]
        if column.kind == "ignored" and found.rows and not found.shape and found.dates * 2 <= found.rows:
            notes[column.name] = ["taken for text, as no other column can be used; if it is none, write another kind"]
            return [*columns[:place], Column(column.name, "text"), *columns[place + 1 :]]
    raise DataError(
        f"{table.path}: no column but the target can be used: all look like ids or dates, or are empty; write a schema "
        "by hand"
    )


def _preface(path: str | Path, unit: str | None) -> list[str]:
    return [
        f"Proposed by `dpgrad data describe {path}`, which reads the data: that is OUTSIDE THE GUARANTEE.",
        "Names, bounds and categories below may reveal private rows. Replace them by what is publicly known, and write",
        "public = true in each entry you confirm. dpgrad refuses the file until every entry in use is confirmed.",
        'Rows of one person: write unit = "NAME" here, and kind = "id" under that column.'
        if unit is None
        else "Rows of one person: so that at most K of them count, write rows_per_unit = K here.",
    ]


def _goal(table: FileTable, target: str | None) -> str:
    if len(table.names) < 2:
        other = ", such as --target y.npy" if table.path.endswith(".npy") else ""
        raise DataError(f"{table.path} has only one column: a schema needs a target as well{other}")
    if target is not None:
        if target not in table.names:
            near = _validate.meant(target, table.names) if table.certain else ""
            raise DataError(f"target {target!r:.80} is no column of {table.path}{near}")
        return target
    named = (name for name in table.names if name.lower() in _TARGETS)
    likely = (name for name in reversed(table.names) if not _ID.fullmatch(name))  # an id would list its persons
    return next(named, next(likely, table.names[-1]))


def _column(name: str, seen: _Seen) -> tuple[Column, list[str]]:
    missing: dict[str, Any] = {"missing": tuple(sorted({"", *seen.missing}))} if seen.missing else {}
    if seen.strange:
        return Column(name, "ignored"), ["nested values, or bytes that are no image"]
    if seen.images:
        return _image(name, seen)
    if named := _id(name, seen):
        return Column(name, "id"), [named]
    if seen.all_numbers or (seen.shape and seen.shape != _NO_SHAPE and not seen.counts):
        return _number(name, seen, **missing)
    if seen.dates * 2 > seen.rows:
        return Column(name, "ignored"), ["looks like dates: turn them into numbers, such as years, to use them"]
    if seen.rows and seen.letters > _LONG_TEXT * seen.rows:
        return Column(name, "text"), ["text, hashed word by word; buckets and length are constants"]
    often = [text for text, count in seen.counts.most_common() if count >= _OFTEN]
    if (
        not seen.crowded
        and often
        and len(often) <= _MOST_CATEGORIES
        and sum(map(seen.counts.__getitem__, often)) * 2 > seen.rows
    ):
        return Column(name, "category", categories=tuple(sorted(often)), **missing), [
            f"categories that occur at least {_OFTEN} times; others become 'other'"
        ]
    if not seen.rows:
        return Column(name, "ignored"), ["all values are missing"]
    if seen.codes:
        return Column(name, "ignored"), ['codes, as some begin with 0; if they name a person, write kind = "id"']
    if seen.words > _SENTENCE * seen.rows:
        return Column(name, "text"), ["short text, hashed word by word; buckets and length are constants"]
    return Column(name, "ignored"), ['neither numbers nor few categories; if it names a person, write kind = "id"']


def _number(name: str, seen: _Seen, **missing: Any) -> tuple[Column, list[str]]:
    low, high = rounded(seen.low, seen.high)
    if missing:
        missing["fill"] = (low + high) / 2
    note = ["bounds are rounded outward from the data: replace them by what is known"]
    if seen.whole and not seen.shape and seen.rows >= _FEW and not seen.repeats:
        note.append('no value comes twice: if it is an id, write kind = "id" alone')
    return Column(name, "number", bounds=(low, high), shape=seen.shape, **missing), note


def _id(name: str, seen: _Seen) -> str | None:
    """Why a column is taken for an id, which is no feature; None where it is not."""
    if seen.shape or seen.images or not seen.rows:
        return None
    why = "numbers the rows" if seen.counts_rows else "an id by its name" if _names_ids(name, seen) else ""
    if not why or (seen.all_numbers and not seen.whole):
        return None
    return f"{why}: left out of the rows. If rows of one person share it, write unit = {json.dumps(name)} at the top"


def _names_ids(name: str, seen: _Seen) -> bool:
    """Whether the values are ids, by the name of their column: however often each comes, where it leaves no doubt."""
    if _INDEX.fullmatch(name):
        return (seen.is_shared or not seen.repeats) and seen.numbers in (0, seen.rows)
    if _ALONE.fullmatch(name):
        return seen.repeats and len(seen.counts) > 2 and seen.words <= _SENTENCE * seen.rows
    return bool(_ID.fullmatch(name))


def _image(name: str, seen: _Seen) -> tuple[Column, list[str]]:
    channels = max(size[0] for size in seen.images)
    height, width = (max(size[at] for size in seen.images) for at in (1, 2))
    if len({size[1:] for size in seen.images}) > 1:
        side = min(height, width, 64)
        return Column(name, "image", shape=(channels, side, side), resize="crop"), [
            "images of several sizes: each is cropped and resized to this shape"
        ]
    return Column(name, "image", shape=(channels, height, width)), []


def _alone(columns: list[Column], notes: dict[str, list[str]]) -> tuple[Column, ...]:
    """A text, if the other columns are numbers or categories: a row is one or the other."""
    for alone in ("image", "text"):
        first = next((column.name for column in columns if column.kind == alone), None)
        others = [column for column in columns if column.kind in ("number", "category")]
        if first is not None and (alone == "image" or not others):
            return tuple(c if c.name == first or not c.is_feature else Column(c.name, "ignored") for c in columns)
        if first is not None:
            for column in columns:
                if column.kind == alone:
                    notes[column.name] = [f"{alone} with other columns: to train on it, ignore the others"]
            columns = [Column(c.name, "ignored") if c.kind == alone else c for c in columns]
    return tuple(columns)


def _target(table: FileTable, name: str, seen: _Seen, declared: Sequence[str] | None) -> Target:
    missing = tuple(sorted(seen.missing))
    if declared:
        return Target(name, classes=tuple(declared), missing=missing)
    if seen.all_numbers and (seen.crowded or not seen.whole or len(seen.counts) > _MOST_CLASSES):
        return Target(name, bounds=rounded(seen.low, seen.high), missing=missing)
    if seen.crowded or len(seen.counts) < 2:
        few = "no numbers or texts, one a row" if seen.strange or seen.shape else "fewer than two values"
        count = "more than 1,000 values" if seen.crowded else few
        raise DataError(
            f"{table.path}: the target, column {table.names.index(name) + 1}, has {count}: give --target NAME"
        )
    order = sorted(seen.counts, key=lambda text: (float(text) if seen.all_numbers else 0.0, text))
    return Target(name, classes=tuple(order), missing=missing)


def rounded(low: float, high: float) -> tuple[float, float]:
    """Bounds rounded outward to 1, 2 or 5 times a power of ten: closer ones would tell the extreme rows.

    Numbers that lie far from 0, as years do, are rounded outward to multiples of such a step, the next above their
    spread.

    >>> rounded(17, 90), rounded(0.02, 0.93), rounded(-3, 870)
    ((0.0, 100.0), (0.0, 1.0), (-5.0, 1000.0))
    >>> rounded(1931, 2019)
    (1900.0, 2100.0)
    """
    if not low <= high:
        return 0.0, 1.0
    if min(abs(low), abs(high)) > _FAR * (high - low) > 0 and low * high > 0:
        step = _outward(high - low)
        return math.floor(low / step) * step, math.ceil(high / step) * step
    least, most = (min(0.0, -_outward(-low)) if low < 0 else 0.0), (_outward(high) if high > 0 else 0.0)
    return (least, most) if least < most else (least, least + 1.0)


def _outward(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value)) if value > 1e-30 else 1e-30
    return min(next(step * power for step in (1, 2, 5, 10, 20) if step * power >= value), 3e38)
