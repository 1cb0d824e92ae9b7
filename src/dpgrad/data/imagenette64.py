"""Imagenette at 64 pixels: 9,469 + 3,925 photographs of ten ImageNet classes in one tar of JPEG files."""

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._images import decode
from dpgrad.data._prepare import OFFICIAL, pixels_to_unit
from dpgrad.data._source import Source, read_all
from dpgrad.data._unpack import tar_files
from dpgrad.errors import DataError

__all__ = ["CLASSES_BY_SYNSET", "COUNTS", "MOST_BYTES", "PREPROCESSINGS", "SIDE", "SOURCES", "load", "parse"]

SIDE = 64
COUNTS = {"train": 9469, "val": 3925}
# A 64x64 JPEG is a few thousand bytes; uncompressed it would be 12,288.
MOST_BYTES = 1 << 16
SOURCES = (
    Source(
        "imagenette64",
        "imagenette64.tar",
        "91653faf3feaa7fdc5372923ada1422849ddcb194419f9a3a3a3f4492c350b32",
        53012480,
        published="https://github.com/fastai/imagenette (imagenette2, each image resized to 64x64, JPEG quality 92; "
        "the resized tar itself has no public address)",
    ),
)
CLASSES_BY_SYNSET = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
PREPROCESSINGS = ("default", "raw", "huang2024")
_MEMBER = re.compile(r"(train|val)/(n[0-9]{8})/[A-Za-z0-9_]+\.JPEG")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Imagenette as (n, 3, 64, 64), pixels divided by 255: 9,469 training and 3,925 validation images.

    "raw" keeps bytes, a quarter of the memory. "huang2024" is the same as the default: Huang et al. print N = 9,464
    where Imagenette has 9,469, and do not say which five are left out, so none is.

    >>> load(preprocessing="small")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of imagenette64 must be one of default, raw, huang2024, got 'small'
    """
    check_preprocessing("imagenette64", preprocessing, PREPROCESSINGS)
    (blob,) = read_all("imagenette64", SOURCES, root, download=download)
    parts = parse(blob, SOURCES[0].place, counts=COUNTS)
    (x_train, y_train), (x_test, y_test) = parts["train"], parts["val"]
    public: tuple[str, ...] = (ROW_COUNTS, "the ten classes", "the pixel range 0..255")
    if preprocessing == "huang2024":
        public += ("Huang et al. print N = 9,464 and not which five rows are left out; all 9,469 are here",)
    classes = tuple(CLASSES_BY_SYNSET.values())
    if preprocessing == "raw":
        return Dataset("imagenette64", x_train, y_train, x_test, y_test, classes, preprocessing, OFFICIAL, public)
    unit = (pixels_to_unit(x_train), y_train, pixels_to_unit(x_test), y_test)
    return Dataset("imagenette64", *unit, classes, preprocessing, OFFICIAL, public)


def parse(blob: bytes, name: str, *, counts: dict[str, int]) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Images (n, 3, 64, 64) and labels of each part, in the order of the tar; `counts` is what each part must hold."""
    files = tar_files(blob, name, most_files=sum(counts.values()) + 64, most_bytes=MOST_BYTES)
    synsets = {synset: label for label, synset in enumerate(CLASSES_BY_SYNSET)}
    members: dict[str, list[tuple[str, int]]] = {part: [] for part in counts}
    for number, path in enumerate(files, start=1):
        match = _MEMBER.fullmatch(path)
        if match is None or match[2] not in synsets:
            raise DataError(f"{name}: file {number} is not {{train,val}}/<class of Imagenette>/<image>.JPEG")
        members[match[1]].append((path, synsets[match[2]]))
    parts = {}
    for part, paths in members.items():
        if len(paths) != counts[part]:
            raise DataError(
                f"{name}: {len(paths)} images in {part}, {counts[part]} expected: truncated or another version"
            )
        images = np.empty((len(paths), 3, SIDE, SIDE), dtype=np.uint8)
        for row, (path, _) in enumerate(paths):
            pixels = decode(files[path], f"{name}, {part} image {row + 1}", kind="JPEG", width=SIDE, height=SIDE)
            images[row] = pixels.transpose(2, 0, 1)
        parts[part] = images, np.array([label for _, label in paths], dtype=np.int64)
    return parts
