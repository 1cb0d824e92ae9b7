"""Reuters-21578, topic money-fx: 7,770 + 3,299 documents as sparse unit rows of 8,315 words (Bottou; libsvm text).

A small sparse dataset, for use where the files of RCV1 and Real-sim are not available.
"""

from pathlib import Path

import numpy as np

from dpgrad.data import _libsvm
from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import OFFICIAL, SCRAMBLED, SPLIT_80_20, scrambled_80_20, split_80_20
from dpgrad.data._source import published_at, read_all
from dpgrad.data._unpack import bunzip2

__all__ = ["CLASSES", "PREPROCESSINGS", "REPOSITORY", "ROWS", "SOURCES", "TEXT_BYTES", "WORDS", "load"]

WORDS = 8315
ROWS = (7770, 3299)
TEXT_BYTES = (8274096, 2241732)
REPOSITORY = "https://github.com/X-DataInitiative/tick-datasets/raw/master/binary/reuters/"

SOURCES = published_at(
    REPOSITORY, "reuters-tick",
    ("reuters.trn.bz2", 3107267, "e77a3368662c02caebe0d9cbcc97d856019bcfb33a8e9b7c48e0b51ee4cdfb60"),
    ("reuters.tst.bz2", 763856, "3d699b9644a38160bf3228059d18fbfc07474057d8e82d512576a2b82d72e211"),
)  # fmt: skip
CLASSES = ("other", "money-fx")
PREPROCESSINGS = ("default", "shuffled", "legacy-scramble")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Reuters as scipy CSR rows of unit norm, as published.

    "shuffled" puts both files together, shuffles and splits 80/20 as the benchmark of Iyengar et al. does for its
    sparse sets. "legacy-scramble" repeats on top the defect that benchmark has for Real-sim: the values stay in the
    unshuffled order while rows are shuffled, so places are right and values scrambled. It mixes values across people
    (rows no longer stand for one document each), which voids any guarantee for a row.

    >>> load(preprocessing="scramble")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of reuters must be one of default, shuffled, legacy-scramble, \
got 'scramble': did you mean legacy-scramble?
    """
    check_preprocessing("reuters", preprocessing, PREPROCESSINGS)
    blobs = read_all("reuters", SOURCES, root, download=download)
    texts = [
        bunzip2(blob, source.place, limit=limit) for blob, source, limit in zip(blobs, SOURCES, TEXT_BYTES, strict=True)
    ]
    (x_train, y_train), (x_test, y_test) = (
        _libsvm.parse(text, source.place, rows=rows, columns=WORDS)
        for text, source, rows in zip(texts, SOURCES, ROWS, strict=True)
    )
    public: tuple[str, ...] = (ROW_COUNTS, "the two classes", "the 8,315 words and their weights, published upstream")
    if preprocessing == "default":
        return Dataset("reuters", x_train, y_train, x_test, y_test, CLASSES, preprocessing, OFFICIAL, public)

    from scipy.sparse import csr_array, vstack

    x, y = csr_array(vstack([x_train, x_test])), np.concatenate([y_train, y_test])
    if preprocessing == "shuffled":
        return Dataset("reuters", *split_80_20(x, y), CLASSES, preprocessing, SPLIT_80_20, public)
    public += (SCRAMBLED,)
    return Dataset("reuters", *scrambled_80_20(x, y), CLASSES, preprocessing, SPLIT_80_20, public)
