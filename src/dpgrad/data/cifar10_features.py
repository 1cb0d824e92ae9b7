"""CIFAR-10 as 320 features of a public MobileNetV2: the stand-in for papers that train a linear layer on features."""

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpgrad.data._dataset import ROW_COUNTS, Dataset, check_preprocessing
from dpgrad.data._prepare import OFFICIAL
from dpgrad.data._source import Source, read_all
from dpgrad.errors import DataError

__all__ = ["ARRAYS", "CLASSES", "HEADER_BYTES", "PREPROCESSINGS", "SOURCES", "load", "parse"]

SOURCES = (
    Source(
        "cifar10-features",
        "cifar10-mobilenetv2.npz",
        "2d2bbf72e07e8fee68d8f211d129d63f7b4af30ec360042442ce1b87925cfa65",
        38461002,
        published="the dpgrad project's shared data folder (made from CIFAR-10; no public address)",
    ),
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PREPROCESSINGS = ("default", "unit-norm")
# Any .npy header of a plain array fits in this.
HEADER_BYTES = 1 << 10
ARRAYS: Mapping[str, tuple[tuple[int, ...], DTypeLike]] = {
    "x_train": ((50000, 320), np.float16),
    "y_train": ((50000,), np.uint8),
    "x_test": ((10000, 320), np.float16),
    "y_test": ((10000,), np.uint8),
}


def load(root: Path | None = None, *, preprocessing: str = "default", download: bool = False) -> Dataset:
    """Features (n, 320) as float32, as stored; "unit-norm" divides each row by its own norm, a rule that is public.

    The network and the projection to 320 directions were fitted to ImageNet and Imagenette, which are public, so they
    are not charged.

    >>> load(preprocessing="simclr")
    Traceback (most recent call last):
    dpgrad.errors.DataError: preprocessing of cifar10-features must be one of default, unit-norm, got 'simclr'
    """
    name = "cifar10-features"
    check_preprocessing(name, preprocessing, PREPROCESSINGS)
    (blob,) = read_all(name, SOURCES, root, download=download)
    arrays = parse(blob, SOURCES[0].place, arrays=ARRAYS)
    x_train, x_test = arrays["x_train"].astype(np.float32), arrays["x_test"].astype(np.float32)
    if preprocessing == "unit-norm":
        x_train, x_test = _unit_rows(x_train), _unit_rows(x_test)
    y_train, y_test = (arrays[part].astype(np.int64) for part in ("y_train", "y_test"))
    public = (ROW_COUNTS, "the ten classes", "the feature extractor, trained on ImageNet and Imagenette")
    return Dataset(name, x_train, y_train, x_test, y_test, CLASSES, preprocessing, OFFICIAL, public)


def _unit_rows(x: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (x / np.where(norms > 0, norms, 1)).astype(np.float32)
    return unit


def parse(
    blob: bytes, name: str, *, arrays: Mapping[str, tuple[tuple[int, ...], DTypeLike]]
) -> dict[str, NDArray[Any]]:
    """The named arrays of an npz, each of exactly the expected shape and type; nothing is ever unpickled.

    Sizes in the zip directory and in each array's header are compared before memory is taken.
    """
    found: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            if sorted(archive.namelist()) != sorted(f"{key}.npy" for key in arrays):
                raise DataError(f"{name}: must hold exactly the arrays {', '.join(arrays)}")
            for key, (shape, dtype) in arrays.items():
                expected = math.prod(shape) * np.dtype(dtype).itemsize
                if not expected <= archive.getinfo(f"{key}.npy").file_size <= expected + HEADER_BYTES:
                    raise DataError(f"{name}: array {key} does not have the {expected} bytes of shape {shape}")
                found[key] = _array(archive.read(f"{key}.npy"), f"{name}: array {key}", shape, np.dtype(dtype))
    except DataError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.LargeZipFile):
        raise DataError(f"{name} is not a valid npz file: damaged, fetch it again") from None
    return found


def _array(blob: bytes, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    stream = io.BytesIO(blob)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    reader = readers.get(np.lib.format.read_magic(stream))
    if reader is None:
        raise DataError(f"{name} has an unknown npy version")
    announced, _, kind = reader(stream, max_header_size=HEADER_BYTES)
    if kind != dtype or announced != shape:
        raise DataError(f"{name} is not of shape {shape} and type {dtype}")
    stream.seek(0)
    array: NDArray[Any] = np.load(stream, allow_pickle=False)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{name} has a value that is not finite")
    return array
