"""CIFAR-10 as features of SimCLRv2 that you have computed yourself: an .npz file in the data folder."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import OFFICIAL
from dpgrad.data._source import Source, read_all
from dpgrad.errors import DataError

__all__ = ["ARRAYS", "CLASSES", "PREPROCESSINGS", "SOURCES", "load", "parse"]

SOURCES = (
    Source(
        "cifar10-simclr",
        "features.npz",
        None,
        None,
        published="your own: x_train (50000, p), y_train, x_test (10000, p) and y_test, features of SimCLRv2 as Tramèr "
        "and Boneh (2021) compute them",
    ),
)
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
CLASSES = tuple(f"class {label}" for label in range(10))
PREPROCESSINGS = ("default",)


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """The features as float32, as they are in the file; the network that made them is taken as public.

    >>> load(preprocessing="unit-norm")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of cifar10-simclr must be one of default, got 'unit-norm'
    """
    check_preprocessing("cifar10-simclr", preprocessing, PREPROCESSINGS)
    (blob,) = read_all("cifar10-simclr", SOURCES, root, download=download)
    arrays = parse(blob, SOURCES[0].place)
    public = (ROW_COUNTS, "the ten classes", "the feature extractor")
    return Dataset(
        "cifar10-simclr", arrays["x_train"], arrays["y_train"], arrays["x_test"], arrays["y_test"], CLASSES,
        preprocessing, OFFICIAL, public,
    )  # fmt: skip


def parse(blob: bytes, name: str) -> dict[str, NDArray[Any]]:
    """The four arrays of an .npz file: rows of numbers as float32, labels 0 to 9."""
    try:
        with np.load(io.BytesIO(blob), allow_pickle=False) as file:
            arrays = {part: np.asarray(file[part]) for part in ARRAYS}
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile, EOFError):
        raise DataError(f"{name} is not an .npz file of {', '.join(ARRAYS)}: write it with numpy.savez") from None
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.ndim != 2 or x.dtype.kind not in "fiu" or not np.isfinite(x).all():
            raise DataError(f"{name}: x_{part} must be finite numbers of shape (rows, features)")
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu" or not ((y >= 0) & (y < len(CLASSES))).all():
            raise DataError(f"{name}: y_{part} must be one whole number from 0 to 9 for each row of x_{part}")
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x.astype(np.float32), y.astype(np.int64)
    if arrays["x_train"].shape[1] != arrays["x_test"].shape[1]:
        raise DataError(f"{name}: x_train and x_test must have the same number of features")
    return arrays
