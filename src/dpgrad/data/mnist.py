"""MNIST: 60,000 + 10,000 images of handwritten digits, four idx files (LeCun, Cortes, Burges)."""

from pathlib import Path

import numpy as np

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._idx import read_pairs
from dpgrad.data._prepare import OFFICIAL, SPLIT_80_20, pixels_to_unit, split_80_20
from dpgrad.data._source import published_at

__all__ = ["MIRROR", "PREPROCESSINGS", "PUBLIC", "SOURCES", "load"]

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"

SOURCES = published_at(
    MIRROR, "mnist",
    ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)  # fmt: skip
PREPROCESSINGS = ("default", "raw", "abadi2016", "yu2018", "huang2024", "yu2020")
PUBLIC = (ROW_COUNTS, "the ten classes", "the pixel range 0..255")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """MNIST as (n, 1, 28, 28): 60,000 training and 10,000 test images, pixels divided by 255.

    "abadi2016", "yu2018" and "huang2024" are the same arrays: those papers use the published split and print no other
    scaling. "raw" keeps bytes. "yu2020" is the benchmark of Iyengar et al.: the first 5,000 training images are left
    out (the TensorFlow tutorial's validation part), the other 55,000 and the 10,000 test images are shuffled together
    and split 80/20, as vectors of 784; it reads nothing private either, but its test rows are not the published ones.

    >>> load(preprocessing="yu2019")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of mnist must be one of default, raw, abadi2016, yu2018, huang2024, \
yu2020, got 'yu2019': did you mean yu2018?
    """
    check_preprocessing("mnist", preprocessing, PREPROCESSINGS)
    x_train, y_train, x_test, y_test = read_pairs("mnist", SOURCES, root, rows=(60000, 10000), download=download)
    classes = tuple("0123456789")
    if preprocessing == "yu2020":
        pixels = np.concatenate([x_train[5000:], x_test]).reshape(-1, 784)
        # The tutorial multiplies by the reciprocal in float32, which differs from a division in the last bit.
        x = pixels.astype(np.float32) * np.float32(1.0 / 255.0)
        y = np.concatenate([y_train[5000:], y_test])
        return Dataset("mnist", *split_80_20(x, y), classes, preprocessing, SPLIT_80_20, PUBLIC)
    if preprocessing != "raw":
        x_train, x_test = pixels_to_unit(x_train), pixels_to_unit(x_test)
    return Dataset("mnist", x_train, y_train, x_test, y_test, classes, preprocessing, OFFICIAL, PUBLIC)
