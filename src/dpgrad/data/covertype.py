"""Covertype: 581,012 cells of forest, 54 columns, seven kinds of cover (Blackard 1998, UCI)."""

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data import _table
from dpgrad.data._dataset import CHOSEN_BOUNDS, OUTSIDE, ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import SPLIT_80_20, split_80_20, to_unit
from dpgrad.data._source import Content, Source, read_all
from dpgrad.data._unpack import gunzip
from dpgrad.errors import DataError

__all__ = ["BOUNDS", "CLASSES", "PREPROCESSINGS", "SOURCES", "TEXT_BYTES", "URL", "load", "parse"]

ROWS, COLUMNS = 581012, 54
TEXT_BYTES = 75169317
URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz"
SOURCES = (
    Source(
        "covtype",
        "covtype.data.gz",
        "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
        11240707,
        published=URL,
        url=URL,
        # Copies differ in the time that gzip writes into its header: the text inside is what is checked.
        content=Content(
            "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
            partial(gunzip, limit=TEXT_BYTES),
            "of the decompressed file",
        ),
    ),
)
CLASSES = (
    "Spruce/Fir", "Lodgepole Pine", "Ponderosa Pine", "Cottonwood/Willow", "Aspen", "Douglas-fir", "Krummholz",
)  # fmt: skip
# Degrees, hillshade and 0/1 columns have the ranges their units give. The distances have none: those are round
# constants, chosen by authors who had seen the range of the published file. The code itself reads no row for them.
BOUNDS: tuple[tuple[float, float], ...] = (
    (0, 4401),  # elevation in metres: the highest summit of Colorado
    (0, 360),  # aspect in degrees azimuth
    (0, 90),  # slope in degrees
    (0, 2000),  # horizontal distance to water, metres
    (-1000, 1000),  # vertical distance to water, metres
    (0, 10000),  # horizontal distance to a road, metres
    (0, 255),  # hillshade index at 9 am
    (0, 255),  # at noon
    (0, 255),  # at 3 pm
    (0, 10000),  # horizontal distance to an ignition point, metres
) + ((0, 1),) * 44  # 4 wilderness areas and 40 soil types, one column each
PREPROCESSINGS = ("default", "uci-split", "yu2020")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Covertype as (n, 54): columns clipped to public bounds and mapped to [0, 1], split 80/20 by a fixed permutation.

    "uci-split" differs in the split: the first 11,340 rows for training, the last 565,892 for test, as UCI documents;
    the 3,780 between are its validation part and are left out. "yu2020" divides each column whose greatest value
    exceeds 1 by that value, which is read from the data.

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of covertype must be one of default, uci-split, yu2020, got 'raw'
    """
    check_preprocessing("covertype", preprocessing, PREPROCESSINGS)
    (text,) = read_all("covertype", SOURCES, root, download=download)
    x, y = parse(text, SOURCES[0].place)
    public: tuple[str, ...] = (ROW_COUNTS, "the seven classes")
    if preprocessing == "yu2020":
        greatest = x.max(axis=0)
        scaled = x / np.where(greatest > 1, greatest, 1)
        public += (OUTSIDE + "column maxima read from all private rows, train and test",)
    else:
        scaled = to_unit(x, BOUNDS)
        public += (CHOSEN_BOUNDS,)
    if preprocessing == "uci-split":
        parts = (scaled[:11340], y[:11340], scaled[15120:], y[15120:])
        return Dataset("covertype", *parts, CLASSES, preprocessing, "first 11,340 and last 565,892 rows", public)
    return Dataset("covertype", *split_80_20(scaled, y), CLASSES, preprocessing, SPLIT_80_20, public)


def parse(text: bytes, name: str, *, rows: int = ROWS) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Features (rows, 54) and class indices 0..6 of the decompressed table.

    >>> parse(b"1," * 54 + b"9", "toy", rows=1)
    Traceback (most recent call last):
    dpgrad.errors.DataError: toy: line 1, column 55 is not a class from 1 to 7
    """
    table = _table.parse(text, name, rows=rows, columns=COLUMNS + 1, dtype=np.int32)
    labels = table[:, COLUMNS]
    bad = (labels < 1) | (labels > len(CLASSES))
    if bad.any():
        raise DataError(f"{name}: line {int(np.argmax(bad)) + 1}, column 55 is not a class from 1 to 7")
    return table[:, :COLUMNS], labels.astype(np.int64) - 1
