"""Compressed files and archives: bombs, lies, truncation and paths that climb."""

import bz2
import gzip
import io
import tarfile
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.data._unpack import bunzip2, gunzip, tar_files

FORMATS = pytest.mark.parametrize(
    ("expand", "compress"), [(gunzip, gzip.compress), (bunzip2, bz2.compress)], ids=["gzip", "bzip2"]
)
Expand = Callable[..., bytes]
Compress = Callable[[bytes], bytes]


@FORMATS
def test_content_up_to_the_limit_is_returned(expand: Expand, compress: Compress) -> None:
    for content in (b"", b"a", bytes(range(256)) * 1000):
        assert expand(compress(content), "f", limit=len(content)) == content


@FORMATS
def test_one_byte_more_is_a_bomb(expand: Expand, compress: Compress, refused) -> None:
    with refused("expands beyond the 999 bytes"):
        expand(compress(bytes(1000)), "f", limit=999)


@FORMATS
def test_a_bomb_is_not_expanded(expand: Expand, compress: Compress, refused) -> None:
    with refused("refused as a bomb"):
        expand(compress(bytes(1 << 26)), "f", limit=1 << 10)


@FORMATS
@pytest.mark.parametrize("keep", [0.01, 0.5, 0.9, 0.999])
def test_truncated_stream_is_refused(expand: Expand, compress: Compress, keep: float, refused) -> None:
    content = bytes(range(256)) * 400
    blob = compress(content)
    with refused("truncated|not a valid compressed file"):
        expand(blob[: int(keep * len(blob))], "f", limit=len(content))


@FORMATS
def test_changed_byte_is_refused(expand: Expand, compress: Compress, refused) -> None:
    blob = bytearray(compress(b"somebody's record" * 50))
    blob[-6] ^= 1  # inside the checksum at the end
    with refused("not a valid compressed file"):
        expand(bytes(blob), "f", limit=10_000)


@FORMATS
def test_anything_behind_the_stream_is_refused(expand: Expand, compress: Compress, refused) -> None:
    with refused("after the end of its compressed stream"):
        expand(compress(b"abc") + compress(bytes(1 << 20)), "f", limit=3)


@FORMATS
def test_other_format_is_refused(expand: Expand, compress: Compress, refused) -> None:
    for blob in (b"plain text", b"PK\x03\x04" + bytes(100)):
        with refused("not a valid compressed file|truncated"):
            expand(blob, "f", limit=100)


@given(st.binary(max_size=200))
def test_any_bytes_are_expanded_or_refused(read_or_refused, blob: bytes) -> None:
    for expand in (gunzip, bunzip2):
        for start in (b"", b"\x1f\x8b\x08\0\0\0\0\0\0\0", b"BZh9"):
            found = read_or_refused(partial(expand, start + blob, "f", limit=1000))
            assert found is None or len(found) <= 1000


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return stream.getvalue()


def special(kind: bytes, name: str = "a/b", link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def files(blob: bytes, most_files: int = 10, most_bytes: int = 100) -> dict[str, bytes]:
    found = tar_files(blob, "f.tar", most_files=most_files, most_bytes=most_bytes)
    return {path: bytes(content) for path, content in found.items()}


def test_files_are_found_and_folders_passed_over() -> None:
    blob = tar(special(tarfile.DIRTYPE, "a"), ("a/b", b"one"), ("a/c", b""))
    assert files(blob) == {"a/b": b"one", "a/c": b""}


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a/..", "..", "a\\..\\x", "C:/x"])
def test_paths_that_climb_are_refused(path: str, refused) -> None:
    with refused("member 2 has a path that leaves the archive"):
        files(tar(("good", b""), (path, b"s3cret")))


@pytest.mark.parametrize(
    "member",
    [
        special(tarfile.SYMTYPE, link="/etc/passwd"),
        special(tarfile.LNKTYPE, link="good"),
        special(tarfile.CHRTYPE),
        special(tarfile.BLKTYPE),
        special(tarfile.FIFOTYPE),
        special(tarfile.CONTTYPE),
    ],
    ids=["symlink", "hardlink", "character device", "block device", "pipe", "contiguous"],
)
def test_links_and_devices_are_refused(member: tarfile.TarInfo, refused) -> None:
    with refused("member 1 is a link, device or sparse file"):
        files(tar(member))


def test_sparse_bomb_is_refused(refused) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(1 << 60), "GNU.sparse.map": "0,1"}
        archive.addfile(info)
    with refused("sparse|bytes, at most"):
        files(stream.getvalue())


def test_repeated_path_is_refused(refused) -> None:
    with refused("member 2 repeats an earlier path"):
        files(tar(("a", b"1"), ("a", b"2")))


def test_many_members_are_refused(refused) -> None:
    with refused("more than 10 members"):
        files(tar(*((f"m{number}", b"") for number in range(11))))


def test_large_member_is_refused(refused) -> None:
    with refused("member 1 has 101 bytes, at most 100 expected"):
        files(tar(("a", bytes(101))))


def test_truncated_archive_is_refused(refused) -> None:
    blob = tar(("a", b"x" * 100))
    for keep in (0, 100, 511, 550):
        with refused("truncated|not a valid tar"):
            files(blob[:keep])


def test_compressed_archive_in_place_of_a_plain_one_is_refused(refused) -> None:
    with refused("not a valid tar"):
        files(gzip.compress(tar(("a", b""))))


@given(st.binary(max_size=600), st.integers(0, 1023))
def test_any_damage_is_read_or_refused(read_or_refused, noise: bytes, at: int) -> None:
    good = tar(("a", b"x" * 50), ("b", b"y" * 50))
    for blob in (noise, good[:at] + noise + good[at + len(noise) :]):
        found = read_or_refused(partial(files, blob))
        assert found is None or sum(map(len, found.values())) <= len(blob)
