"""``os`` with a fault at any call: for tests of what a crash, a power failure or a full disk leaves."""

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any


class CrashError(BaseException):
    """The process ends here."""


class FaultyOs:
    """``os`` with a fault at the ``at``-th call that changes a file; calls are counted from 0.

    ``when`` is "before", "during" (half of a write is done) or "after"; ``error`` is a number of errno for a call that
    fails, None for a process that ends: then every later call ends it too.

    It also keeps what a disk would hold after the power failed: the content that files had when they were last synced,
    under the names that folders had when they were. What is there at the beginning is on the disk.
    """

    def __init__(self, root: Path, at: int = -1, when: str = "before", error: int | None = None) -> None:
        self.root, self.at, self.when, self.error = root, at, when, error
        self.calls: list[str] = []
        self.ended = False
        self._fresh = count()
        self._files: dict[int, Path] = {}  # descriptor -> path
        self._names: dict[Path, int] = {root: next(self._fresh)}  # path -> file, as the process sees it
        self._synced_names: dict[int, dict[str, int]] = {}  # folder -> name -> file, on the disk
        self._synced: dict[int, bytes] = {}  # file -> content on the disk
        self._folders: set[int] = {self._names[root]}
        for path in sorted(root.rglob("*")):
            self._name(path)
        for path in self._names:
            self._sync(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _fault(self, name: str, act: Any, half: Any = None) -> Any:
        if self.ended:
            raise CrashError(name)
        number = len(self.calls)
        self.calls.append(name)
        if number != self.at:
            return act()
        if self.when == "during" and half is not None:
            half()
        if self.when == "after":
            act()
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.ended = True
        raise CrashError(name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if self.ended:
            raise CrashError("open")
        path = Path(path)
        act = lambda: os.open(path, flags, mode)  # noqa: E731
        file: int = self._fault("open", act) if flags & os.O_CREAT else act()
        self._files[file] = path
        self._name(path)
        return file

    def _name(self, path: Path) -> int:
        if path not in self._names:
            self._names[path] = next(self._fresh)
            if path.is_dir():
                self._folders.add(self._names[path])
        return self._names[path]

    def close(self, file: int) -> None:
        self._files.pop(file, None)
        os.close(file)

    def write(self, file: int, content: Any) -> int:
        half = lambda: os.write(file, content[: len(content) // 2])  # noqa: E731
        written: int = self._fault("write", lambda: os.write(file, content), half)
        return written

    def fsync(self, file: int) -> None:
        self._fault("fsync", lambda: self._sync(self._files[file]))

    def _sync(self, path: Path) -> None:
        if path.is_dir():
            self._synced_names[self._name(path)] = {p.name: self._name(p) for p in path.iterdir()}
        else:
            self._synced[self._name(path)] = path.read_bytes()

    def _moved(self, old: Path, new: Path) -> None:
        self._names = {p: n for p, n in self._names.items() if new not in (p, *p.parents)}
        for path in [p for p in self._names if old in (p, *p.parents)]:
            self._names[new / path.relative_to(old)] = self._names.pop(path)

    def replace(self, old: Any, new: Any) -> None:
        self._fault("replace", lambda: (os.replace(old, new), self._moved(Path(old), Path(new))))

    def rename(self, old: Any, new: Any) -> None:
        self._fault("rename", lambda: (os.rename(old, new), self._moved(Path(old), Path(new))))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._fault("mkdir", lambda: (os.mkdir(path, mode), self._name(Path(path))))

    def unlink(self, path: Any) -> None:
        self._fault("unlink", lambda: (os.unlink(path), self._names.pop(Path(path), None)))

    def rmdir(self, path: Any) -> None:
        self._fault("rmdir", lambda: (os.rmdir(path), self._names.pop(Path(path), None)))

    def chmod(self, path: Any, mode: int) -> None:
        self._fault("chmod", lambda: os.chmod(path, mode))

    def fail_power(self) -> None:
        """Leave on the disk what had been synced."""
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._restore(self.root, self._names[self.root])

    def _restore(self, folder: Path, number: int) -> None:
        for name, inner in self._synced_names.get(number, {}).items():
            if inner in self._folders:
                (folder / name).mkdir()
                self._restore(folder / name, inner)
            else:
                (folder / name).write_bytes(self._synced.get(inner, b""))


def moments(calls: list[str]) -> Iterator[tuple[int, str]]:
    for at, name in enumerate(calls):
        yield at, "before"
        if name == "write":
            yield at, "during"
        yield at, "after"
