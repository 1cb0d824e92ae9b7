"""The key stream is that of RFC 8439, from any block on."""

import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.mechanism import chacha

# Section 2.3.2 and appendix A.1 of RFC 8439: key, nonce, counter, key stream.
VECTORS = [
    (
        bytes(range(32)), "000000090000004a00000000", 1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32), "00" * 12, 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32), "00" * 12, 1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes(31) + b"\x01", "00" * 12, 1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        b"\x00\xff" + bytes(30), "00" * 12, 2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        bytes(32), "00" * 11 + "02", 0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]  # fmt: skip


def block(key: bytes, number: int) -> bytes:
    """The definition in section 2.3 of RFC 8439, one block at a time."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *struct.unpack("<8I", key)]
    start += struct.unpack("<4I", number.to_bytes(16, "little"))
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for left, right, mixed, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[left] = (x[left] + x[right]) & 0xFFFFFFFF
            x[mixed] ^= x[left]
            x[mixed] = ((x[mixed] << turn) | (x[mixed] >> (32 - turn))) & 0xFFFFFFFF

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True)))


@pytest.mark.parametrize(("key", "nonce", "counter", "expected"), VECTORS)
def test_vectors_of_the_standard(key: bytes, nonce: str, counter: int, expected: str) -> None:
    number = (int.from_bytes(bytes.fromhex(nonce), "little") << 32) + counter
    assert block(key, number).hex() == expected
    assert chacha.words(key, number, 1).astype("<u8").tobytes().hex() == expected


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**40), st.integers(0, 5))
def test_any_blocks_are_those_of_the_definition(key: bytes, number: int, count: int) -> None:
    expected = b"".join(block(key, number + i) for i in range(count))
    assert chacha.words(key, number, count).astype("<u8").tobytes() == expected


def test_the_counter_goes_on_in_the_nonce() -> None:
    first = 2**32 - 2
    expected = b"".join(block(bytes(32), first + i) for i in range(4))
    assert chacha.words(bytes(32), first, 4).tobytes() == expected


def test_long_streams_are_made_in_pieces() -> None:
    many = len(chacha._ZEROS) // 64 + 3
    found = chacha.words(bytes(32), 5, many)
    assert found.shape == (many, chacha.BLOCK)
    for place in (0, many - 4, many - 3, many - 1):
        assert found[place].tobytes() == block(bytes(32), 5 + place)


def test_no_blocks() -> None:
    assert chacha.words(bytes(32), 0, 0).shape == (0, chacha.BLOCK)
    assert chacha.words(bytes(32), 0, 1).dtype == np.uint64


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chacha, "find_spec", lambda _: None)
    chacha._package.cache_clear()
    assert "cryptography" in sys.modules  # used above
    with pytest.raises(ValueError, match=r"needs the package cryptography: pip install 'dpgrad\[secure\]'"):
        chacha.words(bytes(32), 0, 1)
