"""Decompression and archives, bounded by what the dataset is known to hold; nothing is ever written to disk."""

import bz2
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Protocol

from dpgrad.errors import DataError


class _Stream(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int) -> bytes: ...


class _Gzip:
    """One gzip member, with the interface of `bz2.BZ2Decompressor`."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, /, max_length: int) -> bytes:
        return self._inner.decompress(data, max_length)


def gunzip(blob: bytes, name: str, *, limit: int) -> bytes:
    """The one gzip member in `blob`, refused when it is damaged, truncated or expands beyond `limit` bytes.

    >>> import gzip
    >>> gunzip(gzip.compress(b"x" * 9), "a.gz", limit=9)
    b'xxxxxxxxx'
    >>> gunzip(gzip.compress(b"x" * 10), "a.gz", limit=9)
    Traceback (most recent call last):
    dpgrad.errors.DataError: a.gz expands beyond the 9 bytes this dataset can hold: refused as a bomb
    """
    return _expand(_Gzip(), blob, name, limit)


def bunzip2(blob: bytes, name: str, *, limit: int) -> bytes:
    """As `gunzip`, for bzip2.

    >>> bunzip2(bz2.compress(b"abc"), "a.bz2", limit=3)
    b'abc'
    """
    return _expand(bz2.BZ2Decompressor(), blob, name, limit)


def _expand(stream: _Stream, blob: bytes, name: str, limit: int) -> bytes:
    try:
        # One byte above the limit tells a bomb from a file that is exactly full.
        content = stream.decompress(blob, limit + 1)
        if len(content) <= limit and not stream.eof:
            # All is out, but the trailing checksum may not have been looked at yet.
            content += stream.decompress(b"", limit + 1 - len(content))
    except (zlib.error, OSError, ValueError, EOFError):
        raise DataError(f"{name} is not a valid compressed file: damaged, fetch it again") from None
    if len(content) > limit:
        raise DataError(f"{name} expands beyond the {limit} bytes this dataset can hold: refused as a bomb")
    if not stream.eof:
        raise DataError(f"{name} is truncated: the compressed stream ends early, fetch it again")
    if stream.unused_data:
        raise DataError(f"{name} has {len(stream.unused_data)} bytes after the end of its compressed stream: refused")
    return content


def tar_files(blob: bytes, name: str, *, most_files: int, most_bytes: int) -> Mapping[str, memoryview]:
    """The regular files of an uncompressed tar, by path; every other kind of member but folders is refused.

    Paths that are absolute or climb out by `..`, links, devices, sparse and duplicate members, more than `most_files`
    members and members above `most_bytes` are refused, though nothing here writes a path to disk.
    """
    files: dict[str, memoryview] = {}
    view = memoryview(blob)
    try:
        with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as archive:
            for number, member in enumerate(archive, start=1):
                if number > most_files:
                    raise DataError(f"{name} has more than {most_files} members: refused as a bomb")
                _refuse_path(member.name, name, number)
                if member.isdir():
                    continue
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    raise DataError(f"{name}: member {number} is a link, device or sparse file: refused")
                if not 0 <= member.size <= most_bytes:
                    raise DataError(f"{name}: member {number} has {member.size} bytes, at most {most_bytes} expected")
                if member.name in files:
                    raise DataError(f"{name}: member {number} repeats an earlier path: refused")
                if member.offset_data + member.size > len(blob):
                    raise DataError(f"{name} is truncated: member {number} ends beyond the file, fetch it again")
                files[member.name] = view[member.offset_data : member.offset_data + member.size]
    except (tarfile.TarError, EOFError, OSError, OverflowError, UnicodeError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} is not a valid tar archive: damaged, fetch it again") from None
    return files


def _refuse_path(path: str, name: str, number: int) -> None:
    parts = PurePosixPath(path).parts
    climbs = path.startswith("/") or ".." in parts
    if climbs or "\\" in path or "\0" in path or ":" in path or not path:
        raise DataError(f"{name}: member {number} has a path that leaves the archive: refused")
