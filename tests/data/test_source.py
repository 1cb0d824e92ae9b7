"""Published files are read only if they are what was published; everything else that may lie there is refused."""

import gzip
import hashlib
import os
from functools import partial
from pathlib import Path

import pytest

from dpgrad.data._source import Content, Source, data_folder, read, read_all
from dpgrad.data._table import unix_lines
from dpgrad.data._unpack import gunzip

TEXT = b"1,2\n3,4\n"
DIGEST = hashlib.sha256(TEXT).hexdigest()
PLAIN = Source("toy", "toy.csv", DIGEST, len(TEXT), published="https://example.org/toy.csv")
ANY_LINES = Source("toy", "toy.csv", DIGEST, len(TEXT), "there", content=Content(DIGEST, unix_lines, "of the text"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    return tmp_path / "toy" / "toy.csv"


def test_good_file_is_read(path: Path) -> None:
    path.write_bytes(TEXT)
    assert read(path, PLAIN) == TEXT
    assert read_all("toy", [PLAIN], path.parent.parent, download=False) == [TEXT]


def test_a_link_to_a_good_file_is_read(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(TEXT)
    path.symlink_to(tmp_path / "elsewhere")
    assert read(path, PLAIN) == TEXT


def test_changed_file_is_refused_with_both_sums(path: Path, refused) -> None:
    path.write_bytes(b"1,2\n3,5\n")
    found = hashlib.sha256(b"1,2\n3,5\n").hexdigest()
    with refused(f"sha256 is {found}, published {DIGEST}.*fetch it again from https://example.org"):
        read(path, PLAIN)


@pytest.mark.parametrize("text", [TEXT[:-1], TEXT + b"\n"])
def test_other_length_is_refused(path: Path, text: bytes, refused) -> None:
    path.write_bytes(text)
    with refused(f"has {len(text)} bytes, {len(TEXT)} expected"):
        read(path, PLAIN)


def test_empty_file_is_refused(path: Path, refused) -> None:
    path.touch()
    with refused("is empty, 8 bytes expected"):
        read(path, PLAIN)


def test_folder_is_refused(path: Path, refused) -> None:
    path.mkdir()
    with refused("is a folder: put the file toy.csv there"):
        read(path, PLAIN)


def test_pipe_is_refused_without_waiting(path: Path, refused) -> None:
    os.mkfifo(path)
    with refused("is not a regular file"):
        read(path, PLAIN)


def test_unreadable_file_is_refused(path: Path, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(TEXT)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # root may read anything, so permissions cannot be taken away here
    with refused(r"cannot be read \(Permission denied\)"):
        read(path, PLAIN)


def test_dangling_link_and_file_in_place_of_a_folder_are_refused(tmp_path: Path, path: Path, refused) -> None:
    path.symlink_to(tmp_path / "nowhere")
    with refused("cannot be read"):
        read_all("toy", [PLAIN], tmp_path, download=False)
    (tmp_path / "file").write_bytes(b"x")
    with refused("cannot be read"):
        read_all("toy", [PLAIN], tmp_path / "file", download=False)


def test_line_ends_may_differ_where_only_content_counts(path: Path, refused) -> None:
    path.write_bytes(b"1,2\r\n3,4")
    assert read(path, ANY_LINES) == TEXT
    path.write_bytes(b"1,2\r\n3,5")
    with refused("sha256 of the text is"):
        read(path, ANY_LINES)


def test_much_larger_file_is_refused_unread(path: Path, refused) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: no disk is used
    for source in (PLAIN, ANY_LINES):
        with refused("has 1099511627776 bytes"):
            read(path, source)


def test_a_file_of_unknown_size_and_checksum_is_read_up_to_a_limit(path: Path, tmp_path: Path, refused) -> None:
    source = Source("toy", "toy.csv", None, None, "https://example.org")
    with refused("no checksum known, some bytes, published at https://example.org"):
        read_all("toy", [source], tmp_path / "nowhere", download=True)
    path.write_bytes(TEXT)
    assert read(path, source) == TEXT
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with refused("has 1073741825 bytes, at most 1073741824 expected"):
        read(path, source)


def test_gzip_may_differ_where_only_content_counts(tmp_path: Path, refused) -> None:
    content = Content(DIGEST, partial(gunzip, limit=len(TEXT)), "of the decompressed file")
    source = Source("toy", "toy.gz", "00" * 32, 40, "there", content=content)
    for when in (0, 12345):
        (tmp_path / "toy.gz").write_bytes(gzip.compress(TEXT, mtime=when))
        assert read(tmp_path / "toy.gz", source) == TEXT
    (tmp_path / "toy.gz").write_bytes(gzip.compress(b"x" * 10**6))
    with refused("refused as a bomb"):
        read(tmp_path / "toy.gz", source)


def test_folder_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGRAD_DATA", "named")
    assert data_folder(None) == Path("named")
    assert data_folder(Path("given")) == Path("given")
    monkeypatch.setenv("DPGRAD_DATA", "")
    assert data_folder(None) is None


def test_without_an_address_download_says_where_it_is_published(tmp_path: Path, refused) -> None:
    with refused("toy/toy.csv .*published at https://example.org/toy.csv"):
        read_all("toy", [PLAIN], tmp_path, download=True)
