"""Arrays in numpy's formats: headers are checked before any data, nothing is unpickled, .npy is memory-mapped."""

import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as written
from numpy.typing import NDArray

from dpgrad.data._opened import Chunk, FileTable, guarded, regular
from dpgrad.errors import DataError

_ROWS = 4096  # in a chunk
_NUMBERS = 1 << 22  # in a chunk, about


def npy(path: Path, target: str | None) -> FileTable:
    """The rows of an .npy file as the column "x", memory-mapped; ``target`` names another .npy in its folder."""
    columns: dict[str, Any] = {"x": _mapped(path)}
    if target is not None and target.endswith(".npy"):
        columns[target] = _mapped(path.parent / target)
    return _table(path, columns)


def npz(path: Path) -> FileTable:
    """The arrays of an .npz file, a column each."""
    columns = {}
    with regular(path) as file, archive(path, file) as opened:
        members = opened.infolist()
        _refuse_size(path, sum(member.file_size for member in members))
        for member in members:
            with opened.open(member) as stream:
                name = member.filename.removesuffix(".npy")
                if name in columns:
                    raise DataError(f"{path} holds two arrays of one name: save it again")
                columns[name] = _loaded(path, stream, member.file_size)
    if not columns:
        raise DataError(f"{path} holds no arrays: save it with numpy.savez(x=..., y=...)")
    return _table(path, columns)


def archive(path: Path, file: IO[bytes]) -> zipfile.ZipFile:
    """The archive that an .npz file is."""
    if file.read(6) == b"\x93NUMPY":
        raise DataError(f"{path} holds one array, as .npy files do: rename it to .npy")
    file.seek(0)
    return zipfile.ZipFile(file)


def _refuse_size(path: Path, size: int) -> None:
    """Refuse an archive that would expand beyond the memory of the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise DataError(
            f"{path} would expand to {size:,} bytes, more than this machine's memory: save it as .npy, which is "
            "memory-mapped"
        )


def header(path: object, stream: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array of numbers in ``size`` bytes; `numpy.load` would allocate what it declares."""
    version = written.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise DataError(f"{path} must hold numbers or texts, and its format {version[0]}.{version[1]} is for records")
    read = written.read_array_header_1_0 if version == (1, 0) else written.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.kind not in "fiubUS":
        got = "objects or records, which are never unpickled" if dtype.hasobject or dtype.names else str(dtype)
        raise DataError(f"{path} must hold numbers, got {got}")
    if not shape or min(shape) < 0:
        raise DataError(f"{path} must hold an array with one entry per row, got one of shape {shape}")
    declared, held = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if declared != held:
        raise DataError(f"{path} declares {declared:,} bytes of numbers and holds {held:,}: it is damaged")
    return shape, fortran, dtype


def _mapped(path: Path) -> NDArray[Any]:
    with regular(path) as file:
        shape, fortran, dtype = header(path, file, path.stat().st_size)
        at = file.tell()
    with guarded(path, "npy"):
        if not math.prod(shape):
            return np.empty(shape, dtype)
        # Copy on write: torch refuses to share memory that is read-only, and nothing writes to it.
        return np.memmap(path, dtype, "c", at, shape, "F" if fortran else "C")


def _loaded(path: Path, stream: IO[bytes], size: int) -> NDArray[Any]:
    shape, fortran, dtype = header(path, stream, size)
    content = stream.read(math.prod(shape) * dtype.itemsize)
    if stream.read(1):  # a member of an archive also checks its own sum at its end
        raise DataError(f"{path} holds more than it declares: it is damaged")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _table(path: Path, columns: Mapping[str, NDArray[Any]]) -> FileTable:
    counts = {len(array) for array in columns.values()}
    if len(counts) > 1:
        raise DataError(f"{path}: its arrays must have as many rows each: {', '.join(columns):.200}")
    return FileTable(str(path), tuple(columns), _chunks(columns, counts.pop()), whole=columns)


def _chunks(columns: Mapping[str, NDArray[Any]], rows: int) -> Iterator[Chunk]:
    wide = max(math.prod(array.shape[1:]) for array in columns.values())
    step = max(1, min(_ROWS, _NUMBERS // max(1, wide)))
    for at in range(0, rows, step):
        until = min(at + step, rows)
        yield Chunk({name: np.asarray(array[at:until]) for name, array in columns.items()}, range(at + 1, until + 1))
