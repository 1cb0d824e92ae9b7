"""A dataset of images as compact .npz files, for a machine that cannot read the published files or takes few bytes.

    python -m dpgrad.papers.prepared imagenette64 --out DIR [--data-dir DIR] [--parts 2]

writes ``DIR/imagenette64/prepared.npz`` (and ``prepared-2.npz`` ...), each with a part of the rows. Bytes are kept
exactly: an image is stored as the difference from what its neighbours to the left and above predict, which compresses
well.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad import data
from dpgrad.errors import DataError

__all__ = ["ARRAYS", "load", "path", "restored", "taken", "write"]

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
Bytes = NDArray[np.uint8]
_taken: set[str] = set()


def path(name: str, folder: Path, part: int = 1) -> Path:
    """Where a part of a dataset lies.

    >>> path("imagenette64", Path("data"), part=2).as_posix()
    'data/imagenette64/prepared-2.npz'
    """
    return folder / name / ("prepared.npz" if part == 1 else f"prepared-{part}.npz")


def write(name: str, out: Path, root: Path | None = None, parts: int = 1) -> list[Path]:
    """Write the raw rows of a dataset in so many parts."""
    found = data.load(name, root, "raw")
    paths = [path(name, out, part) for part in range(1, parts + 1)]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for part, file in enumerate(paths):
        arrays: dict[str, Any] = {each: np.array_split(getattr(found, each), parts)[part] for each in ARRAYS}
        arrays |= {each: _filtered(arrays[each]) for each in ("x_train", "x_test")}
        np.savez_compressed(file, parts=np.array(parts), **arrays)
    return paths


def load(name: str, folder: Path) -> dict[str, NDArray[Any]]:
    """The four arrays of a prepared dataset."""
    first = _read(path(name, folder))
    parts = [first, *(_read(path(name, folder, part)) for part in range(2, int(first["parts"]) + 1))]
    _taken.add(name)
    joined = {each: np.concatenate([part[each] for part in parts]) for each in ARRAYS}
    return joined | {each: restored(joined[each]) for each in ("x_train", "x_test")}


def taken() -> set[str]:
    """The datasets whose prepared form this process has read: a trial says so, since the files are not checked.

    >>> "digits" in taken()
    False
    """
    return set(_taken)


def _read(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as found:
            return {each: found[each] for each in (*ARRAYS, "parts")}
    except FileNotFoundError:
        raise DataError(f"{file} is missing: copy every part that dpgrad.papers.prepared wrote") from None
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file} is not what dpgrad.papers.prepared writes ({error}): write it again") from None


def _filtered(images: Bytes) -> Bytes:
    """Differences from the prediction of each pixel, modulo 256; other channels first as differences from the second.

    The prediction is the median of left, above, and left + above − corner.
    """
    plain = _channels(images, -1)
    padded = np.pad(plain, [(0, 0)] * (plain.ndim - 2) + [(1, 0), (1, 0)]).astype(np.int16)
    predicted = _median(padded[..., 1:, :-1], padded[..., :-1, 1:], padded[..., :-1, :-1])
    return (plain - predicted).astype(np.uint8)


def restored(differences: Bytes) -> Bytes:
    """The images of which these are the differences.

    >>> images = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)
    >>> np.array_equal(restored(_filtered(images)), images)
    True
    """
    height, width = differences.shape[-2:]
    apart = np.moveaxis(differences, (-2, -1), (0, 1)).astype(np.int16)  # a pixel of all images lies together
    padded = np.zeros((height + 1, width + 1, *apart.shape[2:]), np.int16)
    for i in range(height):
        for j in range(width):
            predicted = _median(padded[i + 1, j], padded[i, j + 1], padded[i, j])
            padded[i + 1, j + 1] = (apart[i, j] + predicted) & 255
    plain = np.ascontiguousarray(np.moveaxis(padded[1:, 1:].astype(np.uint8), (0, 1), (-2, -1)))
    return _channels(plain, 1)


def _channels(images: Bytes, sign: int) -> Bytes:
    """Every channel but the second less the second, or back."""
    if images.shape[1] != 3:
        return images
    green, out = images[:, 1], images.copy()
    for other in (0, 2):
        out[:, other] = images[:, other] + green if sign > 0 else images[:, other] - green
    return out


def _median(left: NDArray[np.int16], above: NDArray[np.int16], corner: NDArray[np.int16]) -> NDArray[np.int16]:
    low, high = np.minimum(left, above), np.maximum(left, above)
    found: NDArray[np.int16] = np.clip(left + above - corner, low, high)
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m dpgrad.papers.prepared", description=__doc__)
    parser.add_argument("name", help="a dataset of images")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--data-dir", type=Path, help="default: DPGRAD_DATA")
    parser.add_argument("--parts", type=int, default=1, help="the number of files")
    given = parser.parse_args()
    for file in write(given.name, given.out, given.data_dir, given.parts):
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
