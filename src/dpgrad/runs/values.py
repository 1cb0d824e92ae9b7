"""Files of values next to a checkpoint: tensors one after another, written and read in small parts.

A checkpoint names the file that belongs to it, with the digest of its bytes. The file is whole, and on the disk, before
the checkpoint that names it is; the one before goes after that. So after a crash the checkpoint and its file fit.
"""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from dpgrad import _files
from dpgrad.errors import ResumeError
from dpgrad.runs.snapshot import REMEDY

__all__ = ["PREFIX", "Reader", "Writer", "discard_others"]

PREFIX = "values-"
_CHUNK = 1 << 22  # bytes


class Writer:
    """A new file in ``folder``, written from its beginning to its end; a context manager.

    Its name is in ``name`` from the beginning; it has it on the disk once `finish` returns. What was written and not
    finished goes with the block.
    """

    def __init__(self, folder: Path) -> None:
        self.name = PREFIX + secrets.token_hex(8)
        self._path, self._digest = folder / self.name, _blank()
        self._file = _files.begun(self._path)

    def __enter__(self) -> Self:
        return self

    def write(self, piece: bytes | memoryview) -> None:
        """Append some bytes."""
        self._digest.update(piece)
        _files.append(self._file, self._path, piece)

    def finish(self) -> str:
        """The digest of all bytes, once they are on the disk."""
        _files.completed(self._file, self._path)
        return self._digest.hexdigest()

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            os.close(self._file)
        _files.discard(self._path.with_name(self.name + _files.PARTIAL))


class Reader:
    """A file that `Writer` wrote, whose bytes are compared with its digest before the first of them is read."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        found = _blank()
        with _files.told(path, "read"):
            self._file = os.open(path, os.O_RDONLY)
        try:
            for piece in self._pieces():
                found.update(piece)
        except BaseException:
            self.close()
            raise
        if found.hexdigest() != digest:
            self.close()
            raise ResumeError(f"{path} is incomplete or was edited, its checksum does not match: {REMEDY}")

    def _pieces(self) -> Iterator[bytes]:
        start = 0
        while piece := self.read(start, _CHUNK):
            yield piece
            start += len(piece)

    def read(self, start: int, length: int) -> bytes:
        """Some bytes."""
        with _files.told(self._path, "read"):
            return os.pread(self._file, length, start)

    def close(self) -> None:
        """Give back the file."""
        os.close(self._file)


def discard_others(folder: Path, name: str) -> None:
    """Remove the files of values that the checkpoint does not name: they hold states that nobody reads again."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.name != name:
            _files.unlink(path)


def _blank() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=32, person=b"dpgrad values")
