"""A user's own files: every fault becomes one line with path and place, without the content of a cell."""

import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dpgrad.errors import DataError, MissingFileError

SAVE = "save it as UTF-8, or, where a schema tells how it is read"
_BINARY = ("parquet", "npy", "npz", "an image", "a saved dataset")
_LONGEST = 400  # characters of a path in a message


@contextmanager
def guarded(path: object, kind: str, what: str = "") -> Iterator[None]:
    """Within the block anything that a library raises over a damaged file becomes one line with the file's name.

    Libraries quote what they read, so nothing of their messages is passed on.
    """
    named = f"{what} {path}".strip()
    named = named if len(named) <= _LONGEST else f"{named[:_LONGEST]}..."
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise MissingFileError(f"{named}: there is no such file or folder") from None
    except OSError as error:
        damaged = f"as {kind}: it is damaged or of another format"
        raise DataError(f"{named} cannot be read{f': {error.strerror}' if error.strerror else f' {damaged}'}") from None
    except UnicodeDecodeError as error:
        if kind in _BINARY:  # the file names or holds texts, and is none
            raise DataError(f"{named} cannot be read as {kind}: it is damaged or of another format") from None
        remedy = f'{SAVE}, write encoding = "latin-1", or the one it has, under [file]'
        raise DataError(f"{named} is not text in {error.encoding}: {remedy}") from None
    except ImportError as error:
        extra = {"pyarrow": "parquet", "PIL": "images", "datasets": "text"}.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise DataError(f"{named} needs the package {error.name}: pip install dpgrad[{extra}]") from None
    except MemoryError:
        raise DataError(
            f"{named} does not fit into memory: save it in parts, or as .npy, which is memory-mapped"
        ) from None
    except RecursionError:
        raise DataError(f"{named} is nested too deeply to be read as {kind}") from None
    except Exception as error:
        raise DataError(
            f"{named} cannot be read as {kind}: it is damaged or of another format ({type(error).__name__})"
        ) from None


@contextmanager
def regular(path: Path, what: str = "") -> Iterator[IO[bytes]]:
    """A regular file, opened for reading; a pipe could block for ever."""
    with guarded(path, path.suffix or "a file", what):
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{what} {path}".strip() + " is not a regular file: name a file")
        with path.open("rb") as file:
            yield file


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file: the cells of each column, and where each row is found in the file.

    ``keys`` are what a row is split by, where its position will not do, and ``places`` where it is, in words, where a
    number will not do: both are of files, whose names may be private.
    """

    columns: Mapping[str, Any]
    lines: Sequence[int]
    keys: Sequence[str] | None = None
    places: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(frozen=True)
class FileTable:
    """A file as columns: their names, and their cells in chunks of rows.

    ``certain`` is whether the names are names for certain, and not the first row of a file that has no header: else a
    message may show them only where they are ``plausible`` and most are those of a schema. ``line`` is what a place in
    it is called. ``whole`` are columns as memory maps.
    """

    path: str
    names: tuple[str, ...]
    chunks: Iterator[Chunk]
    line: str = "row"
    certain: bool = True
    plausible: bool = True
    whole: Mapping[str, Any] | None = None

    def fault(self, chunk: Chunk, index: int, column: str, reason: str) -> DataError:
        """What is wrong with one cell, by its place and never by its content."""
        place = f"{self.line} {chunk.lines[index]:,}" if chunk.places is None else chunk.places[index]
        return DataError(f"{self.path}: {place}, column {column!r:.80} {reason}")
