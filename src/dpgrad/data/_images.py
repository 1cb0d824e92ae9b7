"""Decoding small images of one known size and kind with Pillow, which is imported when first used."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.errors import DataError


def decode(blob: bytes | memoryview, name: str, *, kind: str, width: int, height: int) -> NDArray[np.uint8]:
    """The pixels (height, width, 3) of a colour image that must be of this kind ("JPEG", "PNG") and size.

    Kind and size are read from the header and compared before any pixel is decompressed.

    >>> decode(b"no image", "a.png", kind="PNG", width=8, height=8)
    Traceback (most recent call last):
    dpgrad.errors.DataError: a.png is not a valid PNG image: damaged, fetch it again
    """
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{name}: reading images needs Pillow: pip install dpgrad[images]") from None
    try:
        with Image.open(io.BytesIO(blob), formats=(kind,)) as image:
            size, mode = image.size, image.mode
            if size == (width, height) and mode == "RGB":
                pixels: NDArray[Any] = np.asarray(image)
                return pixels.astype(np.uint8, copy=False)
    except Exception:
        # Pillow lets almost any exception out of a hostile file (SyntaxError and struct.error among them).
        raise DataError(f"{name} is not a valid {kind} image: damaged, fetch it again") from None
    raise DataError(f"{name} is a {mode} image of {size[0]}x{size[1]} pixels, RGB of {width}x{height} expected")
