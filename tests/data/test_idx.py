"""The idx format: round trips, and headers that lie."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.data._idx import labels, parse


def idx(shape: tuple[int, ...], body: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms())
def test_round_trip(sizes: list[int], random) -> None:
    shape = tuple(sizes)
    body = random.randbytes(int(np.prod(shape)))
    found = parse(idx(shape, body), "f", shape=shape)
    assert found.shape == shape
    assert found.tobytes() == body
    assert found.flags.writeable


@pytest.mark.parametrize(
    ("blob", "pattern"),
    [
        (b"", "0 bytes, at least 8 expected"),
        (b"\0\0\x08", "3 bytes"),
        (idx((2**32 - 1,), b"abc"), r"announces shape \(4294967295,\), \(3,\) expected"),
        (idx((4,), b"abc"), r"announces shape \(4,\)"),
        (idx((3,), b"ab"), "10 bytes, 11 expected"),
        (idx((3,), b"abcd"), "12 bytes, 11 expected"),
        (idx((3, 1), b"abc"), "not an idx file of unsigned bytes with 1 dimensions"),
        (idx((3,), b"abc", kind=0x0D), "not an idx file of unsigned bytes"),
        (b"\x1f\x8b\x08\x01" + bytes(20), "not an idx file"),
    ],
)
def test_lies_are_refused(blob: bytes, pattern: str, refused) -> None:
    with refused(pattern):
        parse(blob, "f", shape=(3,))


def test_dimensions_that_overflow_cost_nothing(refused) -> None:
    with refused("announces shape"):
        parse(idx((2**32 - 1,) * 3, b""), "f", shape=(60000, 28, 28))


def test_labels_outside_the_classes_are_refused(refused) -> None:
    assert labels(idx((3,), bytes([0, 9, 1])), "f", rows=3, classes=10).tolist() == [0, 9, 1]
    with refused("label 2 is not below 10"):
        labels(idx((3,), bytes([0, 10, 1])), "f", rows=3, classes=10)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(read_or_refused, blob: bytes) -> None:
    found = read_or_refused(lambda: parse(blob, "f", shape=(2, 2)))
    assert found is None or found.shape == (2, 2)
