"""Files that survive a crash: replaced as a whole, or appended to line by line, each line with a checksum.

Locks and durable folder entries need POSIX: `refuse_other_systems` says so where a run folder or a ledger is opened.
Every call of the system goes through ``os``, so a test can let any of them fail or end the process there.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from dpgrad.errors import DpgradError, ResumeError, RunError, UnsupportedSystemError

PARTIAL = ".partial"  # the ending of what is not complete yet
_CHECK = 32  # hex digits of a checksum
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "permission is denied",
    errno.ENOENT: "it is missing",
}
_REMEDIES = {
    "written": "what was written before is kept: fix that or choose another folder",
    "removed": "remove it yourself, or fix that and resume",
}


def refuse_other_systems() -> None:
    """Refuse, before anything is written, a system whose files cannot be locked."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise UnsupportedSystemError(
            "run folders and ledgers in files need a POSIX system such as Linux or macOS, whose files can be locked: "
            "leave out the folder, keep the ledger in memory with Ledger(), or use such a system (on Windows, WSL)"
        ) from None


@contextmanager
def told(path: Path, done: str = "written") -> Iterator[None]:
    """Within the block an error of the system becomes one line: which path, why, and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, OSError):
            raise  # already reported by an inner block
        reason = _REASONS.get(error.errno or 0, error.strerror or "the system gives no reason")
        remedy = _REMEDIES.get(done, "fix that or choose another folder")
        raise OSError(error.errno, f"{path} could not be {done}: {reason}; {remedy}") from error


def read(path: Path) -> bytes | None:
    """The content of ``path``; None where it is missing."""
    with told(path, "read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def replace(path: Path, *content: bytes | memoryview, mode: int = 0o600) -> None:
    """Make ``content``, in pieces, that of ``path``: after a crash there is the old file or the new one, never a part.

    The new file is on the disk before it takes the name, and the name before this returns. Without a ``mode``, it is
    for the owner alone.
    """
    partial = path.with_name(path.name + PARTIAL)
    with told(path):
        try:
            _write(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, content, mode)
            os.replace(partial, path)
        except OSError:
            discard(partial)
            raise
        sync_folder(path.parent)


def hand_out(path: Path, text: str) -> None:
    """Make ``text`` that of a file for the user, as `replace` does; an old one keeps who may read it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:  # it is new, or `replace` says why not
        mode = 0o666  # less what the user's umask takes
    replace(path, text.encode(), mode=mode)


def _write(path: Path, flags: int, content: Iterable[bytes | memoryview], mode: int = 0o600) -> None:
    """Write all of ``content`` and wait until it is on the disk."""
    file = os.open(path, flags, mode)
    try:
        for piece in content:
            left = memoryview(piece)
            while len(left):
                left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)


def begun(path: Path) -> int:
    """A new file, under the name that `path` has until it is complete, for `append` and `completed`."""
    with told(path):
        return os.open(path.with_name(path.name + PARTIAL), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def append(file: int, path: Path, content: bytes | memoryview) -> None:
    """Write at the end of a file that was `begun`."""
    left = memoryview(content)
    with told(path):
        while len(left):
            left = left[os.write(file, left) :]


def completed(file: int, path: Path) -> None:
    """Give a file that was `begun` its name, once it is on the disk; it stays open."""
    with told(path):
        os.fsync(file)
        os.rename(path.with_name(path.name + PARTIAL), path)
        sync_folder(path.parent)


def discard(path: Path) -> None:
    """Remove a file that may not be there."""
    with suppress(OSError):  # it was not made, or cannot be removed either: it is never read
        os.unlink(path)


def unlink(path: Path) -> None:
    """Remove a file that may not be there; an error is raised, since what stays may be a secret."""
    with told(path, "removed"), suppress(FileNotFoundError):
        os.unlink(path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make ``folder`` where it is missing, its parents too; its mode is exact where only the owner may enter."""
    with told(folder):
        if not folder.is_dir():
            if not folder.parent.is_dir():
                make_folder(folder.parent)
            os.mkdir(folder, mode)
            sync_folder(folder.parent)
        if mode == 0o700:
            os.chmod(folder, mode)  # also one that was opened to others meanwhile


def publish(partial: Path, path: Path) -> None:
    """Give the complete folder ``partial`` the name ``path``, in place of one that has it."""
    with told(path):
        for folder, _, names in os.walk(partial):
            for name in names:
                file = os.open(Path(folder, name), os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
            sync_folder(Path(folder))
        old = path.with_name(path.name + ".old" + PARTIAL)
        if path.exists():
            remove(old)
            os.rename(path, old)
        os.rename(partial, path)
        sync_folder(path.parent)
        remove(old)


def remove(folder: Path) -> None:
    """Remove a folder and what is in it, of a link the link alone; nothing happens where it is missing."""
    if folder.is_symlink():
        unlink(folder)
    if not folder.exists():
        return
    with told(folder, "removed"):
        for inner, folders, names in os.walk(folder, topdown=False):
            for name in names:
                os.unlink(Path(inner, name))
            for path in (Path(inner, name) for name in folders):
                os.unlink(path) if path.is_symlink() else os.rmdir(path)
        os.rmdir(folder)
        sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    """Give a file another name in its folder; the name is on the disk when this returns."""
    with told(new):
        os.rename(old, new)
        sync_folder(new.parent)


class Lines:
    """A file of JSON objects, one per line, that is only appended to.

    A line is ``checksum object``. The checksum is over the checksum before and the object, so a line that was
    edited, exchanged, left out or put in is found; lines cut from the end are not. ``checks`` are the checksums.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = Lines.create(Path(folder, "lines"), [{"first": 1}])
    ...     lines.append({"second": 2})
    ...     Lines.read(Path(folder, "lines")).records
    [{'first': 1}, {'second': 2}]
    """

    refused: ClassVar[type[DpgradError]] = ResumeError  # raised where the file is damaged

    def __init__(self, path: Path, records: list[dict[str, Any]], checks: list[str], torn: bool) -> None:
        self.path, self.records, self.checks = path, records, checks
        self.torn = torn  # whether the file ends within a line, as a crash leaves it
        self._whole = True

    @classmethod
    def create(cls, path: Path, records: Iterable[dict[str, Any]]) -> Self:
        """A file that begins with ``records``; it appears with all of them or not at all."""
        made = cls(path, [], [], False)
        made._rewrite(records)
        return made

    @classmethod
    def found(cls, path: Path) -> Self | None:
        """The lines of ``path``, as `read` has them; None where the file is missing."""
        content = read(path)
        return None if content is None else cls._parsed(path, content)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The lines of ``path``; refused where one that is complete is not as it was written.

        A last line without its end was being appended when the process ended: it is left out, and ``torn`` says so.
        """
        with told(path, "read"):
            return cls._parsed(path, path.read_bytes())

    @classmethod
    def _parsed(cls, path: Path, content: bytes) -> Self:
        *complete, rest = content.split(b"\n")
        records, checks = [], [""]
        for number, line in enumerate(complete, 1):
            body = line[_CHECK + 1 :]
            checks.append(_check(checks[-1], body))
            if line[: _CHECK + 1] != checks[-1].encode() + b" ":
                raise cls.refused(
                    f"{path}: line {number} has the wrong checksum: the file was edited or damaged and cannot be "
                    "trusted; count the whole plan as spent and begin in another folder"
                )
            records.append(json.loads(body))
        if records or not rest:
            return cls(path, records, checks[1:], bool(rest))
        raise cls.refused(f"{path} is not a file of checked lines: choose another")

    def append(self, record: dict[str, Any]) -> None:
        """Add one line; it is on the disk when this returns."""
        if self.torn or not self._whole:
            raise self.refused(f"{self.path} may end within a line, since writing it failed: close it and resume")
        line, check = _line(self.checks[-1] if self.checks else "", record)
        self._whole = False
        with told(self.path):
            _write(self.path, os.O_WRONLY | os.O_APPEND, [line])
        self._whole = True
        self.records.append(record)
        self.checks.append(check)

    def replace_torn(self, record: dict[str, Any]) -> None:
        """Replace a torn last line by ``record``."""
        self._rewrite([*self.records, record])
        self.torn = False

    def rename(self, path: Path) -> None:
        """Give the file another name in its folder."""
        rename(self.path, path)
        self.path = path

    def _rewrite(self, records: Iterable[dict[str, Any]]) -> None:
        checks, content, kept = [""], b"", list(records)
        for record in kept:
            line, check = _line(checks[-1], record)
            content += line
            checks.append(check)
        replace(self.path, content)
        self.records, self.checks = kept, checks[1:]


def _line(before: str, record: dict[str, Any]) -> tuple[bytes, str]:
    """The line of ``record`` after the checksum ``before``, and its own checksum."""
    body = json.dumps(record, allow_nan=False).encode()
    check = _check(before, body)
    return check.encode() + b" " + body + b"\n", check


def _check(before: str, body: bytes) -> str:
    return hashlib.blake2b(before.encode() + body, digest_size=_CHECK // 2, person=b"dpgrad line").hexdigest()


def lock(path: Path, wait: bool = False) -> int:
    """Lock ``path``, a file made for it, against other processes; the lock goes with the process that holds it.

    Returns what `unlock` takes. The system holds the lock, not the file: what a dead process left does not block. A
    file that was deleted while this process waited for it locks nothing: the one in its place is taken.
    """
    refuse_other_systems()
    import fcntl

    while True:
        with told(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                if _is_named(file, path):
                    return file
            except BlockingIOError:
                os.close(file)
                raise _in_use(path.parent) from None
            except OSError:
                os.close(file)
                raise
            os.close(file)


def _is_named(file: int, path: Path) -> bool:
    """Whether ``path`` is still the name of an open file."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def lock_folder(folder: Path) -> tuple[int, int]:
    """Lock ``folder`` against other processes: by a file ``lock`` in it, and by itself, should the file be deleted.

    Returns what `unlock` takes. Some network file systems lock no folders; there the file alone has to do.
    """
    file = lock(folder / "lock")
    import fcntl

    try:
        with told(folder, "locked"):
            itself = os.open(folder, os.O_RDONLY)
    except OSError:
        unlock(file)
        raise
    try:
        with suppress(OSError):
            try:
                fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(folder) from None
    except BaseException:
        unlock(file, itself)
        raise
    return file, itself


def _in_use(folder: Path) -> RunError:
    return RunError(f"{folder} is in use by another process: wait until it ends, or choose another folder")


def unlock(*files: int) -> None:
    """Give back a lock."""
    for file in files:
        os.close(file)
