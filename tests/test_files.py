"""Files that survive a crash; tests/test_faults.py puts a fault at every call they make."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dpgrad import _files
from dpgrad._files import Lines


class Short:
    """``os`` whose calls write at most three bytes at a time, and fail from the ``at``-th write on."""

    def __init__(self, at: int = 10**9) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, content: Any) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, content[:3])


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    _files.replace(path, b"first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(_files, "os", Short())
    _files.replace(path, b"second, ", b"longer")
    assert path.read_bytes() == b"second, longer"
    monkeypatch.setattr(_files, "os", Short(at=2))
    with pytest.raises(OSError, match=r"file could not be written: the disk is full; what was written before is kept"):
        _files.replace(path, b"third, which does not fit")
    assert path.read_bytes() == b"second, longer"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_crash_left_of_a_longer_file_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.with_name(f"file{_files.PARTIAL}").write_bytes(b"what a process was writing when it ended")
    _files.replace(path, b"short")
    assert path.read_bytes() == b"short"


def test_lines_are_found_again_and_chained(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Lines.create(path, [{"a": 1}])
    lines.append({"b": [2.5, None, "é"]})
    assert Lines.read(path).records == lines.records == [{"a": 1}, {"b": [2.5, None, "é"]}]
    again = Lines.read(path)
    again.append({"a": 1})
    first, _, third = (line.split(b" ", 1) for line in path.read_bytes().splitlines())
    assert json.loads(first[1]) == json.loads(third[1])
    assert first[0] != third[0]  # the same words after other lines have another checksum


def test_a_failed_append_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    lines = Lines.create(path, [{"a": 1}])
    with monkeypatch.context() as patched:
        patched.setattr(_files, "os", Short(at=1))
        with pytest.raises(OSError, match="the disk is full"):
            lines.append({"b": 2})
    with pytest.raises(ValueError, match="may end within a line"):
        lines.append({"c": 3})
    again = Lines.read(path)
    assert again.torn
    assert again.records == [{"a": 1}]
    with pytest.raises(ValueError, match="may end within a line"):  # the new line would be the end of the torn one
        again.append({"c": 3})
    again.replace_torn({"torn": True})
    again.append({"c": 3})
    assert Lines.read(path).records == [{"a": 1}, {"torn": True}, {"c": 3}]


@pytest.mark.parametrize("there", [True, False])
def test_of_a_link_the_link_alone_is_removed(there: bool, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    if there:
        elsewhere.mkdir()
        (elsewhere / "kept").write_text("kept", "utf-8")
    (tmp_path / "link").symlink_to(elsewhere)
    _files.remove(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (elsewhere / "kept").exists() == there


def test_folders_are_made_published_and_removed(tmp_path: Path) -> None:
    _files.make_folder(tmp_path / "a" / "b", 0o700)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "a" / "b" / "inner").mkdir()
    (tmp_path / "a" / "b" / "inner" / "file").write_text("x", "utf-8")
    _files.publish(tmp_path / "a" / "b", tmp_path / "c")
    assert (tmp_path / "c" / "inner" / "file").read_text("utf-8") == "x"
    _files.remove(tmp_path / "c")
    _files.remove(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
