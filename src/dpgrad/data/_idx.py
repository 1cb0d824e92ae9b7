"""The idx format of MNIST and Fashion-MNIST: a header of big-endian sizes, then unsigned bytes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._source import Source, read_all
from dpgrad.data._unpack import gunzip
from dpgrad.errors import DataError

UNSIGNED_BYTE = 0x08
SIDE = 28


def parse(blob: bytes, name: str, *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array of an idx file that must have exactly this shape.

    The header is compared before anything is allocated, so sizes that lie cost nothing.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), "labels", shape=(2,))
    array([5, 7], dtype=uint8)
    >>> parse(bytes([0, 0, 8, 1, 255, 255, 255, 255, 5]), "labels", shape=(2,))
    Traceback (most recent call last):
    dpgrad.errors.DataError: labels: header announces shape (4294967295,), (2,) expected
    """
    start = 4 + 4 * len(shape)
    if len(blob) < start:
        raise DataError(f"{name}: {len(blob)} bytes, at least {start} expected for an idx header")
    if blob[:4] != bytes([0, 0, UNSIGNED_BYTE, len(shape)]):
        raise DataError(f"{name}: not an idx file of unsigned bytes with {len(shape)} dimensions")
    announced = tuple(int.from_bytes(blob[at : at + 4], "big") for at in range(4, start, 4))
    if announced != shape:
        raise DataError(f"{name}: header announces shape {announced}, {shape} expected")
    expected = start + math.prod(shape)
    if len(blob) != expected:
        raise DataError(f"{name}: {len(blob)} bytes, {expected} expected from the idx header")
    # A copy: a view of bytes is read-only, which torch warns about.
    return np.frombuffer(blob, dtype=np.uint8, offset=start).reshape(shape).copy()


def labels(blob: bytes, name: str, *, rows: int, classes: int) -> NDArray[np.int64]:
    """The class indices of an idx label file, each below `classes`."""
    found = parse(blob, name, shape=(rows,))
    if found.size and int(found.max()) >= classes:
        row = int(np.argmax(found >= classes))
        raise DataError(f"{name}: label {row + 1} is not below {classes}")
    return found.astype(np.int64)


def read_pairs(
    name: str, sources: tuple[Source, ...], root: Path | None, *, rows: tuple[int, int], download: bool
) -> list[NDArray[Any]]:
    """Train images (n, 1, 28, 28), train labels, test images, test labels of four verified idx files."""
    blobs = read_all(name, sources, root, download=download)
    arrays: list[NDArray[Any]] = []
    for part, count in enumerate(rows):
        image_source, label_source = sources[2 * part : 2 * part + 2]
        pixels = gunzip(blobs[2 * part], image_source.place, limit=16 + count * SIDE * SIDE)
        images = parse(pixels, image_source.place, shape=(count, SIDE, SIDE))
        classes = gunzip(blobs[2 * part + 1], label_source.place, limit=8 + count)
        arrays += [images[:, None], labels(classes, label_source.place, rows=count, classes=10)]
    return arrays
