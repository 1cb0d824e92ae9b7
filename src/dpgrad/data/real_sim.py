"""Real-sim: 72,309 articles on real or simulated cars and planes as sparse rows of 20,958 words (McCallum; libsvm)."""

from pathlib import Path

from dpgrad.data import _libsvm
from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import SCRAMBLED, SPLIT_80_20, scrambled_80_20, split_80_20
from dpgrad.data._source import Source, read_all
from dpgrad.data._unpack import bunzip2

__all__ = ["CLASSES", "PREPROCESSINGS", "SOURCES", "TEXT_BYTES", "load"]

ROWS, WORDS = 72309, 20958
TEXT_BYTES = 1 << 28  # a bound on the unpacked text, whose size is not published
SOURCES = (
    Source(
        "real-sim",
        "real-sim.bz2",
        "7cd52374f55ce62e803ef33ca1c44689427c23d481eff64026f8ba9f53b8cc27",
        None,
        published="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/real-sim.bz2",
    ),
)
CLASSES = ("simulated", "real")
PREPROCESSINGS = ("default", "yu2020")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Real-sim as scipy CSR rows as published, shuffled and split 80/20.

    "yu2020" repeats a defect of the benchmark of Iyengar et al., which the paper took over: rows are shuffled, but the
    values stay in the order of the file, so places are right and values scrambled. That mixes values across rows
    and voids any guarantee for a row; it is there to reproduce Table 4.

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of real-sim must be one of default, yu2020, got 'raw'
    """
    check_preprocessing("real-sim", preprocessing, PREPROCESSINGS)
    (blob,) = read_all("real-sim", SOURCES, root, download=download)
    text = bunzip2(blob, SOURCES[0].place, limit=TEXT_BYTES)
    x, y = _libsvm.parse(text, SOURCES[0].place, rows=ROWS, columns=WORDS)
    public: tuple[str, ...] = (ROW_COUNTS, "the two classes", "the words and their weights, published upstream")
    if preprocessing == "default":
        return Dataset("real-sim", *split_80_20(x, y), CLASSES, preprocessing, SPLIT_80_20, public)
    public += (SCRAMBLED,)
    return Dataset("real-sim", *scrambled_80_20(x, y), CLASSES, preprocessing, SPLIT_80_20, public)
