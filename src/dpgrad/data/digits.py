"""Digits: 1,797 images of 8x8 pixels (UCI optical recognition, test part), embedded in scikit-learn."""

from pathlib import Path

import numpy as np

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import SPLIT_80_20, split_80_20
from dpgrad.data._source import Source

__all__ = ["PREPROCESSINGS", "SOURCES", "load"]

SOURCES: tuple[Source, ...] = ()
PREPROCESSINGS = ("default", "raw")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Digits as (n, 1, 8, 8), pixels divided by their documented maximum of 16; "raw" keeps 0..16 as bytes.

    `root` and `download` are accepted as everywhere and not needed.

    >>> load().x_train.max()
    np.float32(1.0)
    """
    check_preprocessing("digits", preprocessing, PREPROCESSINGS)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8)
    x = images.astype(np.uint8) if preprocessing == "raw" else (images / 16.0).astype(np.float32)
    classes = tuple("0123456789")
    public = (ROW_COUNTS, "the ten classes", "the pixel range 0..16")
    return Dataset("digits", *split_80_20(x, labels.astype(np.int64)), classes, preprocessing, SPLIT_80_20, public)
