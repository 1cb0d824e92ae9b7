"""Adult: 32,561 + 16,281 people of the 1994 census, income above or below $50,000 (Becker & Kohavi 1996, UCI)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import CHOSEN_BOUNDS, OUTSIDE, ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import OFFICIAL, SPLIT_80_20, split_80_20, to_unit
from dpgrad.data._source import published_at, read_all
from dpgrad.errors import DataError

__all__ = [
    "BOUNDS",
    "CATEGORIES",
    "CLASSES",
    "COLUMNS",
    "PREPROCESSINGS",
    "ROWS",
    "SOURCES",
    "URL",
    "People",
    "load",
    "parse",
]  # fmt: skip

URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"

SOURCES = published_at(
    URL, "adult",
    ("adult.data", 3974305, "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    ("adult.test", 2003153, "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)  # fmt: skip
CLASSES = ("<=50K", ">50K")
ROWS = (32561, 16281)
PREPROCESSINGS = ("default", "yu2020")

# Column -> public bounds. The 16 levels of schooling are documented in adult.names; the other bounds are round
# constants, chosen by authors who knew the published file. Values beyond are clipped, so the bounds hold in any case.
BOUNDS: dict[int, tuple[float, float]] = {
    0: (16, 90),  # age
    2: (0, 1_000_000),  # fnlwgt, the sampling weight
    4: (1, 16),  # education-num
    10: (0, 99_999),  # capital-gain
    11: (0, 9_999),  # capital-loss
    12: (0, 99),  # hours-per-week
}
# Column -> the values that adult.names documents, in its order.
CATEGORIES: dict[int, tuple[str, ...]] = {
    1: ("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked"),
    3: ("Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
        "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool"),
    5: ("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
        "Married-AF-spouse"),
    6: ("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
        "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
        "Priv-house-serv", "Protective-serv", "Armed-Forces"),
    7: ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    8: ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    9: ("Female", "Male"),
    13: ("United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
         "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
         "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
         "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
         "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands"),
}  # fmt: skip
COLUMNS = 15


@dataclass(frozen=True, eq=False)
class People:
    """One parsed file: numbers (n, 6), places in `CATEGORIES` (n, 8) with -1 where the file says `?`, classes (n,)."""

    numbers: NDArray[np.int64]
    codes: NDArray[np.int64]
    classes: NDArray[np.int64]


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Adult as (n, 105): 6 numbers mapped to [0, 1] by public bounds, then a 0/1 column for each documented category.

    The published files are the split; a missing category (`?`) is a block of zeros and no row is dropped.
    "yu2020" is the benchmark of Iyengar et al.: rows with `?` dropped, also the last of each file (its slice `[:-2]`
    takes the blank line and one person), both files together, a column for each category *found*, numbers divided by
    the greatest *found*, shuffled and split 80/20: 45,220 rows of 104, of which 36,176 for training.

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of adult must be one of default, yu2020, got 'raw'
    """
    check_preprocessing("adult", preprocessing, PREPROCESSINGS)
    blobs = read_all("adult", SOURCES, root, download=download)
    train, test = (parse(b, s.place, rows=n) for b, s, n in zip(blobs, SOURCES, ROWS, strict=True))
    public: tuple[str, ...] = (ROW_COUNTS, "the two classes")
    if preprocessing == "default":
        public += (
            "the categories listed in adult.names",
            CHOSEN_BOUNDS,
        )
        parts = (_features(train), train.classes, _features(test), test.classes)
        return Dataset("adult", *parts, CLASSES, preprocessing, OFFICIAL, public)
    public += (
        OUTSIDE + "column maxima and the categories found, read from all private rows, train and test",
        OUTSIDE + "the row dropped at the end of each file depends on the rows before it",
    )
    x, y = _benchmark(train, test)
    return Dataset("adult", *split_80_20(x, y), CLASSES, preprocessing, SPLIT_80_20, public)


def _features(people: People) -> NDArray[np.float64]:
    blocks = [to_unit(people.numbers, list(BOUNDS.values()))]
    for place, values in enumerate(CATEGORIES.values()):
        blocks.append((people.codes[:, place, None] == np.arange(len(values))).astype(np.float64))
    return np.concatenate(blocks, axis=1)


def _benchmark(train: People, test: People) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    kept = [np.flatnonzero((part.codes >= 0).all(axis=1))[:-1] for part in (train, test)]
    numbers = np.concatenate([train.numbers[kept[0]], test.numbers[kept[1]]])
    codes = np.concatenate([train.codes[kept[0]], test.codes[kept[1]]])
    blocks = []
    for place, values in enumerate(CATEGORIES.values()):
        # The benchmark numbers the values it finds in the order of their spelling.
        found = sorted(np.unique(codes[:, place]).tolist(), key=values.__getitem__)
        blocks.append((codes[:, place, None] == np.array(found)).astype(np.float64))
    blocks.append(numbers / np.maximum(numbers.max(axis=0), 1))
    return np.concatenate(blocks, axis=1), np.concatenate([train.classes[kept[0]], test.classes[kept[1]]])


def parse(blob: bytes, name: str, *, rows: int) -> People:
    """The people of one file; blank lines and the comment line of adult.test (`|...`) are passed over.

    >>> parse(b"1, 2", "toy", rows=1)
    Traceback (most recent call last):
    dpgrad.errors.DataError: toy: line 1 has 2 columns, 15 expected
    """
    lines = [
        (number, line)
        for number, line in enumerate(blob.splitlines(), start=1)
        if line.strip() and not line.startswith(b"|")
    ]
    if len(lines) != rows:
        raise DataError(f"{name}: {len(lines)} rows, {rows} expected")
    places = [
        {value.encode(): code for code, value in enumerate(values)} | {b"?": -1} for values in CATEGORIES.values()
    ]
    classes = {f"{label}{end}".encode(): code for code, label in enumerate(CLASSES) for end in ("", ".")}
    numbers = np.empty((rows, len(BOUNDS)), dtype=np.int64)
    codes = np.empty((rows, len(CATEGORIES)), dtype=np.int64)
    labels = np.empty(rows, dtype=np.int64)
    for row, (number, line) in enumerate(lines):
        cells = [cell.strip() for cell in line.split(b",")]
        if len(cells) != COLUMNS:
            raise DataError(f"{name}: line {number} has {len(cells)} columns, {COLUMNS} expected")
        for at, column in enumerate(BOUNDS):
            cell = cells[column]
            if not cell.isdigit() or len(cell) > 9:
                raise DataError(f"{name}: line {number}, column {column + 1} is not a whole number of 1 to 9 digits")
            numbers[row, at] = int(cell)
        for at, column in enumerate(CATEGORIES):
            code = places[at].get(cells[column])
            if code is None:
                raise DataError(f"{name}: line {number}, column {column + 1} is not a category that adult.names lists")
            codes[row, at] = code
        label = classes.get(cells[14])
        if label is None:
            raise DataError(f"{name}: line {number}, column 15 is neither <=50K nor >50K")
        labels[row] = label
    return People(numbers, codes, labels)
