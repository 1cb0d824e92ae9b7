"""What a schema declares about a file: its columns, target, format and split. Nothing is learned from the rows."""

import codecs
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from dpgrad import _validate
from dpgrad.data._columns import MOST_WIDE, Column, Target, check_flags, check_kind, check_name, check_whole, key, texts
from dpgrad.errors import DataError

FORMATS = ("csv", "parquet", "npz", "npy", "images", "jsonl", "hf")
RULES = ("none", "fraction", "last", "column", "file")

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """Which rows are held out: a rule in which one row's part never depends on the values of other rows.

    "fraction" hashes each row's position, or its id where a unit is declared, under the public ``key``. "last" takes
    the last rows of the file, dropped ones counted, so a memory map stays one. "column" holds out rows whose cell
    in ``column`` is one of ``values``. "file" reads them from another ``file``, named relative to the data.

    Guarantee: under zero-out and replace-one, rows keep their positions. Under add-remove, leaving out a row moves
    those after it: split by a unit, a column or a file there.

    >>> Split("fraction", held_out=0.1).fact()
    "a share of 0.1 is held out by a hash under the key 'dpgrad'"
    """

    rule: str = "none"
    held_out: float = 0.2
    key: str = "dpgrad"
    column: str | None = None
    values: tuple[str, ...] = ()
    file: str | None = None

    def __post_init__(self) -> None:
        check_kind("[split]", RULES, rule=self.rule)
        share: object = self.held_out
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            raise DataError(f"[split] held_out must lie strictly between 0 and 1, got {_validate.shown(share)}")
        check_name("[split] key", self.key)
        object.__setattr__(self, "values", texts("[split]", "values", self.values))
        if (self.rule == "column") != (self.column is not None and bool(self.values)):
            raise DataError(
                '[split] rule = "column" needs column = "NAME" and values = ["TEST"], and no other rule does'
            )
        if (self.rule == "file") != (self.file is not None):
            raise DataError('[split] rule = "file" needs file = "NAME", and no other rule does')
        for name, value in (("column", self.column), ("file", self.file)):
            if value is not None:
                check_name(f"[split] {name}", value)

    def fact(self) -> str:
        """The rule in words."""
        if self.rule == "fraction":
            return f"a share of {self.held_out:g} is held out by a hash under the key {self.key!r}"
        return {
            "none": "all rows for training, none held out",
            "last": f"the last share of {self.held_out:g} of the rows is held out",
            "column": f"rows with {', '.join(self.values)} in column {self.column} are held out",
            "file": f"the rows of {self.file} are held out",
        }[self.rule]


@dataclass(frozen=True)
class FileFormat:
    """How a file is written: its format and, for CSV, the separator, quote, escape, encoding, decimal sign and header.

    Nothing here depends on a value. ``header`` None means that there is one; it must be said where the
    names of all columns are numbers. ``separator`` None is the one that finds the names of the schema in the header,
    and without a header a comma, or a semicolon where the decimal sign is a comma.

    >>> FileFormat(separator=";", decimal=",", encoding="latin-1").header is None
    True
    """

    format: str | None = None
    separator: str | None = None
    quote: str = '"'
    escape: str | None = None
    encoding: str = "utf-8"
    decimal: str = "."
    header: bool | None = None

    def __post_init__(self) -> None:
        if self.format is not None:
            check_kind("[file]", FORMATS, format=self.format)
        if self.header is not None:
            check_flags("[file]", header=self.header)
        check_kind("[file]", (".", ","), decimal=self.decimal)
        separator: object = self.separator
        good = isinstance(separator, str) and 1 <= len(separator) <= 5 and not set(separator) & set("\r\n\0")
        if separator is not None and not good:
            raise DataError(f"[file] separator must be 1 to 5 characters, got {_validate.shown(self.separator)}")
        signs: list[tuple[str, object]] = [("quote", self.quote)]
        signs += [] if self.escape is None else [("escape", self.escape)]
        for name, sign in signs:
            none = name == "quote" and sign == ""
            if not none and (not isinstance(sign, str) or len(sign) != 1 or sign in "\r\n\0"):
                raise DataError(f"[file] {name} must be one character, got {_validate.shown(sign)}")
        if self.separator is not None and self.separator == self.quote:
            raise DataError("[file] separator and quote must differ")
        if self.separator is not None and self.separator == self.decimal == ",":
            raise DataError('[file] separator and decimal must differ: write separator = ";"')
        _check_encoding(self.encoding)


def _check_encoding(name: object) -> None:
    """Refuse anything but an encoding of text; Python also lists others, such as zip, which expand what they read."""
    try:
        known = isinstance(name, str) and "\0" not in name and codecs.lookup(name)._is_text_encoding
    except LookupError:
        known = False
    if not known:
        raise DataError(
            f'[file] encoding must be a text encoding, such as "utf-8" or "latin-1", got {_validate.shown(name)}'
        )


@dataclass(frozen=True)
class Schema:
    """Everything that is assumed of a file, declared by the user and confirmed as public entry by entry.

    ``columns`` are all but the target. ``unit`` names the id column whose rows belong to one person, and
    ``rows_per_unit`` how many of them may count. ``proposed_from_data`` records that `describe` wrote the first draft.

    Guarantee: reading with a schema maps each row by itself, by constants, so it costs no privacy. What the schema
    says is taken as public: whoever learned it from the private rows has released it outside the guarantee.

    >>> age = Column("age", "number", bounds=(0, 100), public=True)
    >>> schema = Schema((age,), Target("income", classes=("low", "high"), public=True))
    >>> Schema.from_dict(schema.to_dict()) == schema
    True
    """

    columns: tuple[Column, ...]
    target: Target | None = None
    file: FileFormat = field(default_factory=FileFormat)
    split: Split = field(default_factory=Split)
    unit: str | None = None
    rows_per_unit: int | None = None
    proposed_from_data: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        check_flags("schema:", proposed_from_data=self.proposed_from_data)
        names = [column.name for column in self.columns]
        for name in names:
            if names.count(name) > 1 or (self.target is not None and name == self.target.column):
                raise DataError(f"[columns.{key(name)}] is declared twice, or is the target: describe each column once")
        kinds = [column.kind for column in self.columns if column.is_feature]
        if not kinds:
            raise DataError('schema: it needs a column that is not ignored: write [columns.NAME] with kind = "number"')
        for alone in ("text", "image"):
            if alone in kinds and len(kinds) > 1:
                raise DataError(
                    f"schema: a column of kind {alone} must be the only one in use: write "
                    'kind = "ignored" for the others'
                )
        if sum(max(1, math.prod(column.shape)) for column in self.columns) > MOST_WIDE:
            raise DataError(f"schema: a row must have at most {MOST_WIDE:,} numbers: declare smaller shapes")
        self._check_unit()
        if self.split.column is not None and self.split.column not in names:
            raise DataError(
                f"[split] column {self.split.column!r:.80} is not described"
                + (
                    _validate.meant(self.split.column, names)
                    or f': write [columns.{key(self.split.column)}] with kind = "ignored"'
                )
            )

    def _check_unit(self) -> None:
        if self.unit is not None and not any(c.name == self.unit and c.kind == "id" for c in self.columns):
            check_name("unit", self.unit)
            names = [column.name for column in self.columns]
            near = "" if self.unit in names else _validate.meant(self.unit, names)
            raise DataError(
                f"unit = {_validate.shown(self.unit)} must name an id column"
                + (near or f': write [columns.{key(self.unit)}] with kind = "id"')
            )
        if self.rows_per_unit is not None:
            check_whole("schema:", 1, 2**31 - 1, rows_per_unit=self.rows_per_unit)
            if self.unit is None:
                raise DataError('schema: rows_per_unit needs a unit: write unit = "NAME OF THE ID COLUMN"')

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that make up an encoded row, in this order."""
        return tuple(column for column in self.columns if column.is_feature)

    @property
    def kind(self) -> str:
        """The kind of an encoded row: "table", "image" or "text"."""
        first = self.features[0]
        image = first.kind == "image" or (len(self.features) == 1 and len(first.shape) == 3 and not first.missing)
        return "image" if image else "text" if first.kind == "text" else "table"

    @property
    def may_drop(self) -> bool:
        """Whether a row is left out for what it holds: then how many are kept depends on their values."""
        target = self.target is not None and (self.target.unknown == "drop" or bool(self.target.missing))
        return target or any(column.unknown == "drop" for column in self.features)

    def labels(self) -> tuple[str, ...]:
        """The names of the numbers in an encoded row."""
        return tuple(label for column in self.features for label in column.labels())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded row; for text, unless a tokenizer gives another length."""
        (first, *others) = self.features
        if not others and first.shape and not first.missing:
            return first.shape
        return (len(self.labels()),)

    def confirmed(self) -> "Schema":
        """This schema, refused unless every entry is confirmed as public."""
        entries = [(column.where, column.public) for column in self.features]
        if self.target is not None:
            entries.append(("[target]", self.target.public))
        for where, public in entries:
            if not public:
                raise DataError(
                    f"{where} is not confirmed as public: write public = true there, once you know that its entries do "
                    "not come from the private rows, or may be published"
                )
        return self

    def facts(self) -> tuple[str, ...]:
        """Every fact that is taken as public, in words."""
        target = () if self.target is None else (self.target.fact(),)
        unit = () if self.unit is None else (f"column {self.unit} names the person a row belongs to",)
        return ("the names of the columns", *(column.fact() for column in self.features), *target, *unit)

    def to_dict(self) -> dict[str, Any]:
        """The schema as plain values, as JSON and TOML hold them; what is not said has its default."""
        found: dict[str, Any] = {}
        for name in ("unit", "rows_per_unit", "proposed_from_data"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        found |= {name: plain for name in ("file", "split") if (plain := _plain(getattr(self, name)))}
        if self.target is not None:
            found["target"] = _plain(self.target)
        columns = {column.name: _plain(column) for column in self.columns}
        return {
            **found,
            "columns": {name: {k: v for k, v in entry.items() if k != "name"} for name, entry in columns.items()},
        }

    @classmethod
    def from_dict(cls, values: object) -> "Schema":
        """The schema that `to_dict` wrote, or a user did; a key that is not known is refused by name."""
        top = _table("schema:", values, {entry.name for entry in fields(cls)})
        listed = top.get("columns")
        if not isinstance(listed, Mapping):
            raise DataError('schema: it needs a table for each column: write [columns.NAME] with kind = "number"')
        columns = tuple(
            _made(Column, f"[columns.{key(str(name))}]", value, name=name) for name, value in listed.items()
        )
        records: dict[str, Any] = {
            name: _made(kind, f"[{name}]", top[name])
            for name, kind in (("target", Target), ("file", FileFormat), ("split", Split))
            if top.get(name) is not None
        }
        plain = {name: top[name] for name in ("unit", "rows_per_unit", "proposed_from_data") if name in top}
        return cls(columns, **records, **plain)


def _table(where: str, values: object, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise DataError(f"{where} must be a table of keys and values, got {_validate.shown(values)}")
    for name in values:
        if name not in known:
            remedy = _validate.meant(name, known) or f": it takes {', '.join(sorted(known))}"
            raise DataError(f"{where} unknown key {name!r:.60}{remedy}")
    return values


def _made(kind: type[T], where: str, values: object, **own: Any) -> T:
    entries = fields(kind)  # type: ignore[arg-type]
    found = _table(where, values, {entry.name for entry in entries} - own.keys())
    for entry in entries:
        if entry.default is MISSING and entry.name not in (*found, *own):
            raise DataError(f'{where} needs {entry.name}: write {entry.name} = "..."')
    return kind(**found, **own)


def _plain(record: Any) -> dict[str, Any]:
    """The fields that are not at their default, and those that a reader of the file looks for."""
    needed, found = {"public"}, {}
    if isinstance(record, Split) and record.rule in ("fraction", "last"):
        needed |= {"held_out", "key"} if record.rule == "fraction" else {"held_out"}
    for entry in fields(record):
        value = getattr(record, entry.name)
        if value != entry.default or entry.name in needed:
            found[entry.name] = list(value) if isinstance(value, tuple) else value
    return found
