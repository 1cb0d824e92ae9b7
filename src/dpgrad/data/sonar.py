"""Sonar: 208 echoes in 60 frequency bands, from a mine or a rock (Gorman & Sejnowski 1988, UCI)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data import _table
from dpgrad.data._dataset import Dataset, check_preprocessing
from dpgrad.data._regression import prepare
from dpgrad.data._source import Content, Source, read_all
from dpgrad.errors import DataError

__all__ = ["CLASSES", "PREPROCESSINGS", "SHA256", "SOURCES", "URL", "load", "parse"]

ROWS, BANDS = 208, 60
URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/undocumented/connectionist-bench/sonar/sonar.all-data"
SHA256 = "e90434cdbf00fcf93ffa911fe447ae25606979658e60f1d32e155c3b5240234d"
SOURCES = (
    Source(
        "regression",
        "sonar.all-data",
        SHA256,
        87776,
        published=URL,
        url=URL,
        content=Content(SHA256, _table.unix_lines, "of the text with plain line feeds"),
    ),
)
CLASSES = ("rock", "mine")
PREPROCESSINGS = ("default", "yu2020")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Sonar as (n, 60) energies, documented to lie in [0, 1], and the class.

    "yu2020" is min-max scaled over all 208 rows: curvatures 4.0e-4 and .190 (the paper prints 3.63e-4 and .19).

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of sonar must be one of default, yu2020, got 'raw'
    """
    check_preprocessing("sonar", preprocessing, PREPROCESSINGS)
    (text,) = read_all("sonar", SOURCES, root, download=download)
    x, y = parse(text, SOURCES[0].place)
    facts = ("the two classes",)
    return prepare(
        "sonar", x, y, preprocessing, bounds=[(0, 1)] * BANDS, target_bounds=None, classes=CLASSES, facts=facts
    )


def parse(text: bytes, name: str, *, rows: int = ROWS) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Energies (rows, 60) and classes of the text table, whose last column is R or M.

    >>> parse(b"0.5," * 60 + b"X", "toy", rows=1)
    Traceback (most recent call last):
    dpgrad.errors.DataError: toy: line 1, column 61 is neither R nor M
    """
    labels: list[int] = []
    numbers: list[bytes] = []
    for line, row in enumerate(text.splitlines(), start=1):
        cells, _, label = row.rpartition(b",")
        if label.strip() not in (b"R", b"M"):
            raise DataError(f"{name}: line {line}, column {BANDS + 1} is neither R nor M")
        labels.append(int(label.strip() == b"M"))
        numbers.append(cells)
    table = _table.parse(b"\n".join(numbers), name, rows=rows, columns=BANDS)
    return table, np.array(labels, dtype=np.int64)
