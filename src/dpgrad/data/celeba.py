"""CelebA: 202,599 aligned photographs of faces with 40 yes-or-no attributes; the task is the attribute Male."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._images import decode
from dpgrad.data._prepare import OFFICIAL, pixels_to_unit
from dpgrad.data._source import Source, data_folder, read_all
from dpgrad.errors import DataError, MissingFileError

__all__ = ["ATTRIBUTE", "FOLDER", "HEIGHT", "PREPROCESSINGS", "SIDE", "SOURCES", "WIDTH", "attributes", "load", "parts"]

_WHERE = (
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html (aligned and cropped images; an agreement has to be accepted)"
)
SOURCES = tuple(
    Source("celeba", file, None, None, published=_WHERE) for file in ("list_attr_celeba.txt", "list_eval_partition.txt")
)
FOLDER = "img_align_celeba"  # next to the two lists
WIDTH, HEIGHT, SIDE = 178, 218, 64
ATTRIBUTE = "Male"
PREPROCESSINGS = ("default", "raw", "huang2024")
_FILE = re.compile(r"[0-9]{6}\.jpg")
_MOST_BYTES = 1 << 18  # of an image


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """CelebA as (n, 3, 64, 64), pixels divided by 255, labelled by Male: parts 0 for training and 2 for test.

    The folder ``celeba`` holds the official files: ``img_align_celeba/000001.jpg`` ..., ``list_attr_celeba.txt`` and
    ``list_eval_partition.txt``. Of each image the central 128×128 pixels are taken, and 2×2 of them averaged to one:
    Huang et al. print no resolution. They print N = 162,079, and the official training part has 162,770 images, all of
    which are here. "raw" keeps bytes, a quarter of the memory; "huang2024" is the same as the default.

    >>> load(preprocessing="small")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of celeba must be one of default, raw, huang2024, got 'small'
    """
    check_preprocessing("celeba", preprocessing, PREPROCESSINGS)
    listed, parted = read_all("celeba", SOURCES, root, download=download)
    male, where = attributes(listed, SOURCES[0].place), parts(parted, SOURCES[1].place)
    if male.keys() != where.keys():
        raise DataError(f"{SOURCES[0].place} and {SOURCES[1].place} do not list the same images: fetch both again")
    folder = data_folder(root)
    assert folder is not None  # the lists were read from it
    images = folder / "celeba" / FOLDER
    found: list[NDArray[Any]] = []
    for part in (0, 2):
        names = [name for name, number in where.items() if number == part]
        found += [_pixels(images, names), np.array([male[name] for name in names], dtype=np.int64)]
    x_train, y_train, x_test, y_test = found
    if preprocessing != "raw":
        x_train, x_test = pixels_to_unit(x_train), pixels_to_unit(x_test)
    public = (ROW_COUNTS, "the attribute Male", "the pixel range 0..255", "the official parts")
    return Dataset("celeba", x_train, y_train, x_test, y_test, ("no", "yes"), preprocessing, OFFICIAL, public)


def attributes(blob: bytes, name: str, attribute: str = ATTRIBUTE) -> dict[str, int]:
    """Whether each image has an attribute: the count, the names of the attributes, then a line per image with ±1.

    >>> attributes(b"1\\nBald Male\\n000001.jpg -1  1\\n", "f")
    {'000001.jpg': 1}
    """
    count, heads, *lines = _lines(blob, name)
    names = heads.split()
    if attribute not in names or not count.strip().isdecimal() or int(count) != len(lines):
        raise DataError(f"{name} is not a list of attributes with {attribute}: truncated or another version")
    found = {}
    for number, line in enumerate(lines, start=3):
        file, *values = line.split()
        if not _FILE.fullmatch(file) or len(values) != len(names) or not {*values} <= {"1", "-1"}:
            raise DataError(f"{name}, line {number}, is not an image and {len(names)} values of 1 or -1")
        found[file] = int(values[names.index(attribute)] == "1")
    return found


def parts(blob: bytes, name: str) -> dict[str, int]:
    """The part of each image: 0 for training, 1 for validation, 2 for test.

    >>> parts(b"000001.jpg 0\\n000002.jpg 2\\n", "f")
    {'000001.jpg': 0, '000002.jpg': 2}
    """
    found = {}
    for number, line in enumerate(_lines(blob, name), start=1):
        file, *values = line.split()
        if not _FILE.fullmatch(file) or len(values) != 1 or values[0] not in ("0", "1", "2"):
            raise DataError(f"{name}, line {number}, is not an image and its part, 0, 1 or 2")
        found[file] = int(values[0])
    return found


def _lines(blob: bytes, name: str) -> list[str]:
    try:
        lines = blob.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{name} is not ASCII text: damaged, fetch it again") from None
    found = [line for line in lines if line.strip()]
    if len(found) < 2:
        raise DataError(f"{name} has no rows: damaged, fetch it again")
    return found


def _pixels(folder: Path, names: list[str]) -> NDArray[np.uint8]:
    """The images of these names, (n, 3, 64, 64): the mean of 2×2 pixels in the middle."""
    images = np.empty((len(names), 3, SIDE, SIDE), dtype=np.uint8)
    top, left = (HEIGHT - 2 * SIDE) // 2, (WIDTH - 2 * SIDE) // 2
    for row, name in enumerate(names):
        path = folder / name
        try:
            with path.open("rb") as file:
                blob = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            raise MissingFileError(f"{path} is missing: unpack {FOLDER}.zip ({_WHERE}) into {folder.parent}") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
        pixels = decode(blob, f"celeba/{FOLDER}/{name}", kind="JPEG", width=WIDTH, height=HEIGHT)
        middle = pixels[top : top + 2 * SIDE, left : left + 2 * SIDE].astype(np.uint16)
        quarters = middle.reshape(SIDE, 2, SIDE, 2, 3).sum((1, 3))
        images[row] = ((quarters + 2) // 4).transpose(2, 0, 1)
    return images
