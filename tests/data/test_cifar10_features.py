"""The npz file: shapes, types and sizes are compared before memory is taken, and nothing is unpickled."""

import io
import pickle
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.data.cifar10_features import parse

ARRAYS = {"x": ((3, 2), np.float16), "y": ((3,), np.uint8)}
GOOD = {"x": np.arange(6, dtype=np.float16).reshape(3, 2), "y": np.array([1, 2, 3], dtype=np.uint8)}


class Explodes:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return pytest.fail, ("the file was unpickled",)


def npz(**changes: object) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **{**GOOD, **changes})  # type: ignore[arg-type]
    return stream.getvalue()


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def lying(shape: str) -> bytes:
    """An array whose header announces another shape, of the same length in bytes."""
    good = npy(GOOD["x"])
    plain = b"(3, 2), }" + b" " * (len(shape) - len("(3, 2)"))
    assert plain in good
    return good.replace(plain, shape.encode() + b", }")


def test_good_arrays() -> None:
    found = parse(npz(), "f", arrays=ARRAYS)
    np.testing.assert_array_equal(found["x"], GOOD["x"])
    np.testing.assert_array_equal(found["y"], GOOD["y"])


@pytest.mark.parametrize(
    ("blob", "pattern"),
    [
        (npz(x=GOOD["x"].T.copy()), r"array x is not of shape \(3, 2\)"),
        (npz(x=GOOD["x"].astype(np.int16)), "array x is not of shape .* and type float16"),
        (npz(x=np.zeros((10**4, 10), np.float16)), "array x does not have the 12 bytes"),
        (npz(x=np.array([[1, 2], [3, np.nan], [5, 6]], np.float16)), "array x has a value that is not finite"),
        (npz(x=np.array([[1, 2], [3, np.inf], [5, 6]], np.float16)), "array x has a value that is not finite"),
        (npz(x=np.array(Explodes())), "array x is not of shape"),
        (npz(z=GOOD["x"]), "must hold exactly the arrays x, y"),
        (zipped(x=npy(GOOD["x"])), "must hold exactly the arrays x, y"),
        (zipped(x=pickle.dumps(Explodes()) + bytes(12), y=npy(GOOD["y"])), "not a valid npz"),
        (zipped(x=bytes(1 << 24), y=npy(GOOD["y"])), "array x does not have the 12 bytes"),
        (zipped(x=lying("(99999999999, 99999999)"), y=npy(GOOD["y"])), "array x is not of shape|not a valid npz"),
        (zipped(x=npy(GOOD["x"])[:-1], y=npy(GOOD["y"])), "not a valid npz"),
        (zipped(x=b"\x93NUMPY\x09\x00" + bytes(200), y=npy(GOOD["y"])), "unknown npy version|not a valid npz"),
        (pickle.dumps(Explodes()), "not a valid npz"),
        (b"", "not a valid npz"),
        (npz()[:-30], "not a valid npz"),
    ],
)
def test_bad_files_are_refused(blob: bytes, pattern: str, refused) -> None:
    with refused(pattern):
        parse(blob, "f", arrays=ARRAYS)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_repeated_array_is_refused(refused) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("x", "y", "y"):
            archive.writestr(f"{name}.npy", npy(GOOD[name]))
    with refused("must hold exactly the arrays"):
        parse(stream.getvalue(), "f", arrays=ARRAYS)


@given(st.integers(0, 500), st.integers(0, 255))
def test_any_damage_is_read_or_refused(read_or_refused, at: int, byte: int) -> None:
    blob = bytearray(npz())
    blob[at % len(blob)] = byte
    found = read_or_refused(lambda: parse(bytes(blob), "f", arrays=ARRAYS))
    assert found is None or found["x"].shape == (3, 2)
