"""The libsvm format: sparse round trips, and indices and values that lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.data._libsvm import parse


def test_rows_labels_and_empty_rows() -> None:
    x, y = parse(b"+1 1:0.5 4:2\n-1\n1 3:-1e-3 \n", "f", rows=3, columns=4)
    np.testing.assert_array_equal(x.toarray(), [[0.5, 0, 0, 2], [0, 0, 0, 0], [0, 0, -1e-3, 0]])
    assert y.tolist() == [1, 0, 1]
    assert x.format == "csr"


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        (b"-1 0:1", r"line 2, entry 1: its index must increase and lie in 1\.\.4"),
        (b"-1 5:1", r"must increase and lie in 1\.\.4"),
        (b"-1 999999999999999999999999:1", "must increase"),
        (b"-1 2:1 1:1", "line 2, entry 2: its index must increase"),
        (b"-1 2:1 2:1", "line 2, entry 2: its index must increase"),
        (b"-1 -1:1", "must increase"),
        (b"-1 1:nan", "entry 1 is not `index:value` with a finite value"),
        (b"-1 1:inf", "finite value"),
        (b"-1 1:1e999", "finite value"),
        (b"-1 1:s3cret", "finite value"),
        (b"-1 1:", "finite value"),
        (b"-1 1:1_0", "line 2, entry 1"),
        (b"-1 s3cret", "line 2, entry 1"),
        (b"-1 1:2:3", "finite value"),
        (b"s3cret 1:1", "line 2 has a label that is neither"),
        (b"1:1", "line 2 has a label that is neither"),
        (b"0 1:1", "line 2 has a label that is neither"),
        (b"", "1 rows, 2 expected"),
        (b"-1\n-1", "3 rows, 2 expected"),
    ],
)
def test_bad_lines_are_refused_by_place(line: bytes, pattern: str, refused) -> None:
    with refused(pattern):
        parse(b"+1 1:1\n" + line, "f", rows=2, columns=4)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(read_or_refused, blob: bytes) -> None:
    found = read_or_refused(lambda: parse(b"+1 1:1\n-1 " + blob, "f", rows=2, columns=4))
    assert found is None or np.isfinite(found[0].data).all()
