"""What a schema declares about one column and the target, and the checks of its values."""

import json
import math
import re
from dataclasses import dataclass, fields
from typing import Any

from dpgrad import _validate
from dpgrad.errors import DataError

KINDS = ("number", "category", "text", "image", "id", "ignored")
FEATURES = ("number", "category", "text", "image")  # what becomes part of a row
SCALES = {"unit": (0.0, 1.0), "symmetric": (-1.0, 1.0)}
UNKNOWN = ("other", "zeros", "drop", "refuse")
RESIZE = ("refuse", "stretch", "crop")
LARGEST = 3.4028234663852886e38  # of float32
LONGEST_NAME = 500  # characters
MOST_WIDE = 10_000_000  # numbers in one encoded row


def key(name: str) -> str:
    """A column's name as a key of TOML."""
    return (
        name
        if re.fullmatch(r"[A-Za-z0-9_-]+", name)
        else json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")
    )


def texts(where: str, name: str, value: object) -> tuple[str, ...]:
    """A list of texts, in which whole numbers and truth values are written as a file writes them."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
        raise DataError(f"{where} {name} must be a list of texts, got {_validate.shown(value)}")
    found = tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in value)
    if len(set(found)) < len(found):
        raise DataError(f"{where} {name} must not repeat an entry")
    return found


def check_bounds(where: str, bounds: object) -> tuple[float, float]:
    numbers = isinstance(bounds, list | tuple) and [
        float(item) for item in bounds if isinstance(item, int | float) and not isinstance(item, bool)
    ]
    if not numbers or len(numbers) != 2 or not -LARGEST <= numbers[0] < numbers[1] <= LARGEST:
        raise DataError(
            f"{where} bounds must be two numbers of float32 in rising order, got {_validate.shown(bounds)}: write "
            "bounds = [LOW, HIGH]"
        )
    return numbers[0], numbers[1]


def check_whole(where: str, least: int, most: int, **named: object) -> None:
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise DataError(
                f"{where} {name} must be a whole number of {least} to {most:,}, got {_validate.shown(value)}"
            )


def check_kind(where: str, known: tuple[str, ...], **named: object) -> None:
    for name, value in named.items():
        _validate.one_of(known, "", DataError, **{f"{where} {name}": value})


def check_flags(where: str, **named: object) -> None:
    for name, value in named.items():
        if not isinstance(value, bool):
            raise DataError(f"{where} {name} must be true or false, got {_validate.shown(value)}")


def check_name(where: str, value: object) -> None:
    if not isinstance(value, str) or not value or len(value) > LONGEST_NAME or not value.isprintable():
        raise DataError(
            f"{where} must be a text of 1 to {LONGEST_NAME} printable characters, got {_validate.shown(value)}"
        )


def _set(record: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)


@dataclass(frozen=True)
class Column:
    """One column of a file, as the schema declares it.

    A number is clipped to ``bounds`` and mapped to the public ``scale``: "unit" is [0, 1], "symmetric" [-1, 1], "none"
    leaves the number as it is. A category becomes one number per category, 0 or 1; one that is not listed is mapped to
    a number of its own ("other"), to zeros, or its row is dropped or refused. A cell that is one of the ``missing``
    markers becomes ``fill``, and an indicator of its own says so. ``public`` confirms that none of this was learned
    from the private rows.

    >>> Column("age", "number", bounds=(0, 100), public=True).labels()
    ('age',)
    >>> Column("job", "category", categories=("cook", "clerk"), missing=("?",)).labels()
    ('job=cook', 'job=clerk', 'job=other', 'job missing')
    """

    name: str
    kind: str
    bounds: tuple[float, float] | None = None
    scale: str = "unit"
    shape: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()
    unknown: str = "other"
    missing: tuple[str, ...] = ()
    fill: float | str | None = None
    indicator: bool = True
    buckets: int = 8192
    length: int = 64
    resize: str = "refuse"
    public: bool = False

    def __post_init__(self) -> None:
        check_name("the name of a column", self.name)
        where = self.where
        check_kind(where, KINDS, kind=self.kind)
        check_kind(where, (*SCALES, "none"), scale=self.scale)
        check_kind(where, UNKNOWN, unknown=self.unknown)
        check_kind(where, RESIZE, resize=self.resize)
        check_flags(where, indicator=self.indicator, public=self.public)
        check_whole(where, 2, 2**31 - 1, buckets=self.buckets)
        check_whole(where, 1, 1_000_000, length=self.length)
        if not isinstance(self.shape, list | tuple):
            raise DataError(f"{where} shape must be a list of whole numbers, got {_validate.shown(self.shape)}")
        for side in self.shape:
            check_whole(where, 1, MOST_WIDE, shape=side)
        _set(self, shape=tuple(self.shape), categories=texts(where, "categories", self.categories))
        _set(self, missing=texts(where, "missing", self.missing))
        if self.bounds is not None:
            _set(self, bounds=check_bounds(where, self.bounds))
        _check_uses(self)
        _check_facts(self)

    @property
    def where(self) -> str:
        """The heading of this column in a TOML file."""
        return f"[columns.{key(self.name)}]"

    @property
    def is_feature(self) -> bool:
        """Whether the column is part of an encoded row."""
        return self.kind in FEATURES

    def labels(self) -> tuple[str, ...]:
        """The names of the numbers that a cell becomes; those of an array, an image or a text are numbered."""
        marks = (f"{self.name} missing",) if self.missing and self.indicator else ()
        if self.kind == "category":
            other = (f"{self.name}=other",) if self.unknown == "other" else ()
            return (*(f"{self.name}={category}" for category in self.categories), *other, *marks)
        count = self.length if self.kind == "text" else math.prod(self.shape)
        numbers = (
            (self.name,) if not self.shape and self.kind == "number" else (f"{self.name}[{i}]" for i in range(count))
        )
        return (*numbers, *marks) if self.kind == "number" else tuple(numbers)

    def fact(self) -> str:
        """The facts about the column that are taken as public, in words."""
        said = f"column {self.name}: "
        if self.kind == "number":
            said += (
                "numbers as they are" if self.bounds is None else f"bounds {self.bounds[0]:g} and {self.bounds[1]:g}"
            )
            if self.bounds is not None:
                scale = "" if self.scale == "none" else " and mapped to [{:g}, {:g}]".format(*SCALES[self.scale])
                said += f", values clipped{scale}"
        elif self.kind == "category":
            said += f"its {len(self.categories)} categories; unknown ones: {self.unknown}"
        elif self.kind == "text":
            said += f"text of at most {self.length} words, hashed into {self.buckets} buckets"
        elif self.kind == "image":
            said += f"images of shape {self.shape}, pixels of 0..255 mapped to [0, 1]"
        if self.missing:
            filled = "" if self.fill is None else f"{self.fill} and "
            said += f"; missing values ({', '.join(map(repr, self.missing))}) become {filled}an indicator"
        return said


# Which fields say something about which kind of column; a field that would be ignored is refused.
_USES = {
    "bounds": ("number",), "scale": ("number",), "shape": ("number", "image"), "categories": ("category",),
    "unknown": ("category",), "missing": ("number", "category"), "fill": ("number", "category"),
    "indicator": ("number", "category"), "buckets": ("text",), "length": ("text",), "resize": ("image",),
}  # fmt: skip


def _check_uses(column: Column) -> None:
    defaults = {entry.name: entry.default for entry in fields(Column)}
    for name, kinds in _USES.items():
        if getattr(column, name) != defaults[name] and column.kind not in kinds:
            raise DataError(f"{column.where} {name} is for columns of kind {' or '.join(kinds)}, not {column.kind}")


def _check_facts(column: Column) -> None:
    """Refuse a column that leaves open what would then have to be learned from the rows."""
    where = column.where
    if column.kind == "number" and column.bounds is None and column.scale != "none":
        raise DataError(
            f'{where} needs bounds that do not come from the rows: write bounds = [LOW, HIGH], or scale = "none" to '
            "use the numbers as they are"
        )
    if column.kind == "category" and not column.categories:
        raise DataError(f'{where} needs its categories: write categories = ["FIRST", "SECOND"]')
    if column.kind == "image" and (len(column.shape) != 3 or column.shape[0] not in (1, 3)):
        raise DataError(
            f"{where} needs the shape of its images: write shape = [3, HEIGHT, WIDTH], or [1, ...] for gray"
        )
    if column.fill is not None and not column.missing:
        raise DataError(f'{where} fill needs the markers of missing values: write missing = ["", "NA"]')
    if column.kind == "number" and column.missing:
        low, high = column.bounds or (-math.inf, math.inf)
        fill: object = column.fill
        if isinstance(fill, bool) or not isinstance(fill, int | float) or not low <= fill <= high or math.isinf(fill):
            raise DataError(
                f"{where} fill, which replaces a missing value, must be a number within the bounds, got "
                f"{_validate.shown(fill)}"
            )
    if column.kind == "category" and column.fill is not None and column.fill not in column.categories:
        raise DataError(f"{where} fill must be one of its categories, got {_validate.shown(column.fill)}")
    if column.kind == "category" and set(column.missing) & set(column.categories):
        raise DataError(f"{where} missing and categories must not share an entry")


@dataclass(frozen=True)
class Target:
    """The column that is predicted: its ``classes``, or its ``bounds`` where it is a real number, mapped to [0, 1].

    A class that is not listed, and a missing target, is refused or its row is dropped.

    >>> Target("price", bounds=(0, 200)).values(0.25)
    50.0
    """

    column: str
    classes: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    unknown: str = "refuse"
    missing: tuple[str, ...] = ()
    public: bool = False

    def __post_init__(self) -> None:
        check_name("[target] column", self.column)
        check_kind("[target]", ("drop", "refuse"), unknown=self.unknown)
        check_flags("[target]", public=self.public)
        _set(self, classes=texts("[target]", "classes", self.classes))
        _set(self, missing=texts("[target]", "missing", self.missing))
        if self.bounds is not None:
            _set(self, bounds=check_bounds("[target]", self.bounds))
        if bool(self.classes) == (self.bounds is not None):
            raise DataError(
                '[target] needs its classes or, for a real number, its bounds: write classes = ["FIRST", "SECOND"] or '
                "bounds = [LOW, HIGH]"
            )
        if len(self.classes) == 1:
            raise DataError("[target] classes must be at least two, got one")
        if set(self.missing) & set(self.classes):
            raise DataError("[target] missing and classes must not share an entry")

    def values(self, unit: Any) -> Any:
        """Real numbers for predictions on the scale [0, 1], which are clipped to it."""
        import numpy as np

        if self.bounds is None:
            raise DataError(f"[target] {self.column!r:.80} has classes, no bounds: its predictions are classes")
        low, high = self.bounds
        found = low + (high - low) * np.clip(unit, 0.0, 1.0)
        return found if np.ndim(unit) else float(found)

    def fact(self) -> str:
        """The facts about the target that are taken as public, in words."""
        if self.bounds is None:
            return f"target {self.column}: its {len(self.classes)} classes"
        low, high = self.bounds
        return f"target {self.column}: bounds {low:g} and {high:g}, values clipped and mapped to [0, 1]"
