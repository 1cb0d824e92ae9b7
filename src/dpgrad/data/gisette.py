"""Gisette: 6,000 images of the digits 4 and 9 as 5,000 columns, half of them probes without meaning (Guyon 2003)."""

from pathlib import Path

import numpy as np

from dpgrad.data import _table
from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import SPLIT_80_20, split_80_20
from dpgrad.data._source import Source, read_all
from dpgrad.errors import DataError

__all__ = ["CLASSES", "MOST", "PREPROCESSINGS", "SOURCES", "URL", "load"]

ROWS, COLUMNS = 6000, 5000
MOST = 999  # the documented range of a column is 0..999
URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/gisette/GISETTE/"
SOURCES = tuple(
    Source("gisette", file, None, None, published=URL + file) for file in ("gisette_train.data", "gisette_train.labels")
)
CLASSES = ("-1", "+1")
PREPROCESSINGS = ("default", "yu2020")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Gisette's training files as (n, 5000), columns divided by 999, shuffled and split 80/20.

    "yu2020" keeps 0..999, as the benchmark of Iyengar et al. does. UCI publishes no checksum of these files: shapes and
    ranges are what is checked.

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of gisette must be one of default, yu2020, got 'raw'
    """
    check_preprocessing("gisette", preprocessing, PREPROCESSINGS)
    text, labels = read_all("gisette", SOURCES, root, download=download)
    x = _table.parse(text, SOURCES[0].place, rows=ROWS, columns=COLUMNS, delimiter=None, dtype=np.float32)
    if x.min() < 0 or x.max() > MOST:
        raise DataError(f"{SOURCES[0].place}: a value lies outside 0..{MOST}")
    signs = _table.parse(labels, SOURCES[1].place, rows=ROWS, columns=1, delimiter=None, dtype=np.int64)[:, 0]
    if not np.isin(signs, (-1, 1)).all():
        raise DataError(f"{SOURCES[1].place}: a label is neither 1 nor -1")
    if preprocessing == "default":
        x = x / np.float32(MOST)
    public = (ROW_COUNTS, "the two classes", "the range 0..999 of a column")
    return Dataset("gisette", *split_80_20(x, (signs + 1) // 2), CLASSES, preprocessing, SPLIT_80_20, public)
