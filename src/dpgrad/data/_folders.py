"""Folders of images, one folder per class; an image becomes pixels in [0, 1] of the shape that is declared."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._opened import Chunk, FileTable, guarded
from dpgrad.errors import DataError

IMAGE, FOLDER = "image", "folder"  # the names of the two columns
FILE = "file"  # what the path of an image within its folder is called, where predictions name it
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

_LITTER = ("thumbs.db", "desktop.ini")  # what Windows leaves in folders of images
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # others call programs of their own
_ROWS = 64  # in a chunk
UNNAMED = "its file"  # in messages: the name may say whose image it is
_MOST_PIXELS = 1 << 26  # of one image, before it is resized
_LARGE = f"has more than {_MOST_PIXELS:,} pixels: make it smaller first"
_ORIENTATION, _ASIDE = 0x0112, (5, 6, 7, 8)  # an entry of EXIF, and those of its values that turn an image on its side
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N")


def table(path: Path) -> FileTable:
    """The images below a folder, sorted by name; without a folder per class, the images in it, without classes."""
    with guarded(path, "a folder of images"):
        folders = [entry.name for entry in _entries(path) if entry.is_dir()]
        files = [entry for entry in _entries(path) if not entry.is_dir()]
        if folders and files:
            raise DataError(f"{path} holds files as well as folders: keep one folder per class and nothing else")
        found = [
            (folder, image, place(number, at if folders else 0))
            for at, folder in enumerate(folders or [""], 1)
            for number, image in enumerate(_images(path, folder, at if folders else 0), 1)
        ]
    if not found:
        raise DataError(f"{path} holds no images: put those of each class into a folder of its own")
    names = (IMAGE, FOLDER) if folders else (IMAGE,)
    return FileTable(str(path), names, _chunks(path, found), "image")


def place(number: int, folder: int) -> str:
    """Where an image is, by numbers alone: its name may say whose it is.

    >>> place(3, 1), place(3, 0)
    ('image 3 of class 1 (both in the order of their names)', 'image 3 (in the order of names)')
    """
    if folder:
        return f"image {number:,} of class {folder:,} (both in the order of their names)"
    return f"image {number:,} (in the order of names)"


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted by name, without what a system leaves there unasked."""
    with os.scandir(path) as entries:
        kept = (entry for entry in entries if not entry.name.startswith(".") and entry.name.lower() not in _LITTER)
        return sorted(kept, key=lambda entry: entry.name)


def _images(path: Path, folder: str, at: int) -> list[str]:
    entries = _entries(path / folder)
    for number, entry in enumerate(entries, 1):
        if not entry.is_file() or not entry.name.lower().endswith(ENDINGS):
            kind = (
                "a folder" if entry.is_dir() else "a link or device" if not entry.is_file() else "no image by its name"
            )
            raise DataError(f"{path}: {place(number, at)} is {kind}: keep images alone there ({', '.join(ENDINGS)})")
    return [entry.name for entry in entries]


def _chunks(path: Path, found: list[tuple[str, str, str]]) -> Iterator[Chunk]:
    for at in range(0, len(found), _ROWS):
        part = found[at : at + _ROWS]
        columns = {IMAGE: [path / folder / name for folder, name, _ in part], FOLDER: [folder for folder, *_ in part]}
        keys, places = [f"{folder}/{name}" for folder, name, _ in part], [where for *_, where in part]
        yield Chunk(columns, range(at + 1, at + len(part) + 1), keys, places)


def size(image: object) -> tuple[int, int, int]:
    """Channels, height and width of an image file, without decoding it."""
    with _opened(image) as opened:
        width, height = _upright(opened)
        return (1 if opened.mode in ("1", "L", "I", "F") or opened.mode in _DEEP else 3), height, width


def pixels(image: object, shape: tuple[int, ...], resize: str) -> NDArray[np.float32]:
    """The pixels of an image file, or of its bytes, as (channels, height, width) in [0, 1], turned as its camera says.

    Pixels of 16 bits are divided by 65,535, others by 255.
    """
    channels, height, width = shape
    with _opened(image) as opened:
        if (found := _upright(opened)) != (width, height):
            if resize == "refuse":
                raise DataError(
                    f"is not of the declared size ({height} x {width} pixels): write "
                    'resize = "crop" or "stretch" under its column'
                )
            if found[0] * found[1] > _MOST_PIXELS:
                raise DataError(_LARGE)
        with guarded(UNNAMED, "an image"):
            from PIL import ImageOps

            plain = _of_255(opened, channels)
            if plain.size != (width, height):
                plain = ImageOps.fit(plain, (width, height)) if resize == "crop" else plain.resize((width, height))
            shown = np.asarray(plain, np.float32).reshape(height, width, -1) / np.float32(255)
    return np.ascontiguousarray(np.broadcast_to(shown.clip(0, 1), (height, width, channels)).transpose(2, 0, 1))


def _upright(opened: Any) -> tuple[int, int]:
    """Width and height of an image once it is turned."""
    with guarded(UNNAMED, "an image"):
        width, height = opened.size
        return (height, width) if opened.getexif().get(_ORIENTATION) in _ASIDE else (width, height)


def _of_255(opened: Any, channels: int) -> Any:
    """The upright image with pixels from 0 to 255, as whole numbers or, of 16 bits, as floats."""
    from PIL import Image, ImageOps

    deep = opened.mode in _DEEP or (opened.mode == "I" and opened.format in ("PNG", "PPM"))  # these have 16 at most
    if not deep and opened.mode in ("I", "F"):
        raise DataError("has pixels of 32 bits, whose range is not known: save it with 8 or 16 bits")
    upright = ImageOps.exif_transpose(opened)
    if deep:
        return Image.fromarray(np.asarray(upright, np.float32) * np.float32(255 / 65535))
    return upright.convert("L" if channels == 1 else "RGB")


def _opened(image: object) -> Any:
    """The image, of which only the header is read yet; a dictionary holds the bytes as Hugging Face writes them."""
    if isinstance(image, dict):
        image = image.get("bytes")
    if not isinstance(image, Path | bytes):
        raise DataError("holds no image: the bytes of an image file are needed")
    with guarded(UNNAMED, "an image"):
        import warnings

        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the declared size limits what is decoded
            try:
                return Image.open(image if isinstance(image, Path) else io.BytesIO(image), formats=_FORMATS)
            except Image.DecompressionBombError:
                raise DataError(_LARGE) from None
