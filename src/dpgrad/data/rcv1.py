"""RCV1-v2: newswire stories as sparse unit rows of 47,236 words, corporate or not (Lewis et al. 2004)."""

from collections.abc import Iterable, Set
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data import _libsvm
from dpgrad.data._dataset import ROW_COUNTS, Dataset, Inputs, check_preprocessing
from dpgrad.data._prepare import cut_80_20, fixed_permutation
from dpgrad.data._source import Source, read_all
from dpgrad.data._unpack import gunzip
from dpgrad.errors import DataError

__all__ = [
    "CLASSES", "FIGSHARE", "PREPROCESSINGS", "SOURCES", "SPLIT", "TEXT_BYTES", "TOPIC", "WORDS", "load", "members",
    "parse",
]  # fmt: skip

WORDS = 47236
STORIES, TAKEN = 500_000, 50_000  # those that are shuffled, and how many of them are kept
TEXT_BYTES = 1 << 30  # a bound on the unpacked text, whose size is not published
TOPIC = b"CCAT"
FIGSHARE = "https://ndownloader.figshare.com/files/"


def _source(file: str, number: int, sha256: str) -> Source:
    return Source("rcv1", file, sha256, None, published=f"{FIGSHARE}{number}")


# In this order the stories are numbered: training first. The fourth file holds the last of the 500,000.
SOURCES = (
    _source(
        "lyrl2004_vectors_train.dat.gz", 5976057, "5468f656d0ba7a83afc7ad44841cf9a53048a5c083eedc005dcdb5cc768924ae"
    ),
    _source(
        "lyrl2004_vectors_test_pt0.dat.gz", 5976069, "ed40f7e418d10484091b059703eeb95ae3199fe042891dcec4be6696b9968374"
    ),
    _source(
        "lyrl2004_vectors_test_pt1.dat.gz", 5976066, "87700668ae45d45d5ca1ef6ae9bd81ab0f5ec88cc95dcef9ae7838f727a13aa6"
    ),
    _source(
        "lyrl2004_vectors_test_pt2.dat.gz", 5976063, "48143ac703cbe33299f7ae9f4995db49a258690f60e5debbff8995c34841c7f5"
    ),
    _source("rcv1v2.topics.qrels.gz", 5976048, "2a98e5e5d8b770bded93afc8930d88299474317fe14181aee1466cc754d0d1c1"),
)
CLASSES = ("other", "CCAT")
PREPROCESSINGS = ("default", "yu2020")
SPLIT = "first 50,000 of the first 500,000 stories after the fixed permutation of seed 10000019, of them 80 % for train"


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """RCV1 as scipy CSR rows of unit norm as published; the class is whether a story has the topic CCAT.

    Of the first 500,000 stories, shuffled, 50,000 are kept and split 80/20, as in the benchmark of Iyengar et al.:
    "yu2020" is another name for the same rows. (Its own shuffle may differ, since a fit that draws random numbers goes
    before it there.)

    >>> load(preprocessing="raw")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of rcv1 must be one of default, yu2020, got 'raw'
    """
    check_preprocessing("rcv1", preprocessing, PREPROCESSINGS)
    *vectors, topics = read_all("rcv1", SOURCES, root, download=download)
    named = members(gunzip(topics, SOURCES[-1].place, limit=TEXT_BYTES), SOURCES[-1].place)
    texts = (gunzip(blob, source.place, limit=TEXT_BYTES) for blob, source in zip(vectors, SOURCES[:-1], strict=True))
    x, y = parse(texts, named, fixed_permutation(STORIES)[:TAKEN], "rcv1")
    public = (ROW_COUNTS, "the two classes", "the words and their weights, published upstream")
    return Dataset("rcv1", *cut_80_20(x, y), CLASSES, preprocessing, SPLIT, public)


def members(text: bytes, name: str) -> set[bytes]:
    """The numbers of the stories that have the topic; a line is `topic story 1`.

    >>> sorted(members(b"CCAT 2286 1\\nECAT 2286 1\\nGCAT 2287 1\\n", "toy"))
    [b'2286']
    """
    found = set()
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split()
        if len(cells) != 3 or not cells[1].isdigit():
            raise DataError(f"{name}: line {number} is not `topic story 1`")
        if cells[0] == TOPIC:
            found.add(cells[1])
    return found


def parse(
    texts: Iterable[bytes], named: Set[bytes], places: NDArray[np.int64], name: str
) -> tuple[Inputs, NDArray[np.int64]]:
    """The stories at these places, counted through all texts, and whether each is named.

    A line is `story index:value …`.

    >>> x, y = parse([b"7 1:0.5\\n", b"8 2:1\\n"], {b"8"}, np.array([1, 0]), "toy")
    >>> x.toarray()[:, :2].tolist(), y.tolist()
    ([[0.0, 1.0], [0.5, 0.0]], [1, 0])
    """
    wanted = {int(place): row for row, place in enumerate(places)}
    lines = [b""] * len(wanted)
    seen = 0
    for text in texts:
        for line in text.splitlines():
            if line.strip():
                if seen in wanted:
                    story, _, cells = line.strip().partition(b" ")
                    if not story.isdigit():
                        raise DataError(f"{name}: story {seen + 1} does not begin with its number")
                    lines[wanted[seen]] = (b"+1 " if story in named else b"-1 ") + cells
                seen += 1
    if wanted and seen <= max(wanted):
        raise DataError(f"{name}: {seen} stories, more than {max(wanted)} expected")
    return _libsvm.parse(b"\n".join(lines), f"{name}, the stories that were drawn", rows=len(lines), columns=WORDS)
