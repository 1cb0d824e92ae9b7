"""The libsvm text format: `label index:value ...` a line, indices from 1 upwards and increasing."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import Inputs
from dpgrad.errors import DataError


def parse(blob: bytes, name: str, *, rows: int, columns: int) -> tuple[Inputs, NDArray[np.int64]]:
    """A scipy CSR array of shape (rows, columns) and labels 0 (for -1) and 1 (for +1).

    >>> x, y = parse(b"+1 2:0.5\\n-1 1:1 3:2\\n", "toy", rows=2, columns=3)
    >>> x.toarray().tolist(), y.tolist()
    ([[0.0, 0.5, 0.0], [1.0, 0.0, 2.0]], [1, 0])
    """
    from scipy.sparse import csr_array

    # The array is made from lists that hold only what the text holds: a huge index costs nothing and is refused.
    lines = [(number, line) for number, line in enumerate(blob.splitlines(), start=1) if line.strip()]
    if len(lines) != rows:
        raise DataError(f"{name}: {len(lines)} rows, {rows} expected")
    labels = np.empty(rows, dtype=np.int64)
    indices: list[int] = []
    values: list[float] = []
    starts = [0]
    for row, (number, line) in enumerate(lines):
        head, *cells = line.split()
        if head not in (b"+1", b"1", b"-1"):
            raise DataError(f"{name}: line {number} has a label that is neither +1 nor -1")
        labels[row] = head != b"-1"
        previous = 0
        for position, cell in enumerate(cells, start=1):
            index, value = _cell(cell)
            if not previous < index <= columns:
                raise DataError(
                    f"{name}: line {number}, entry {position}: its index must increase and lie in 1..{columns}"
                )
            if not math.isfinite(value):
                raise DataError(f"{name}: line {number}, entry {position} is not `index:value` with a finite value")
            indices.append(index - 1)
            values.append(value)
            previous = index
        starts.append(len(indices))
    parts: tuple[NDArray[Any], ...] = (
        np.asarray(values, dtype=np.float64),
        np.asarray(indices, dtype=np.int32),
        np.asarray(starts, dtype=np.int32),
    )
    return csr_array(parts, shape=(rows, columns)), labels


def _cell(cell: bytes) -> tuple[int, float]:
    """Index and value of one cell; a value of NaN stands for a cell that cannot be read."""
    index, colon, value = cell.partition(b":")
    if not (colon and index.isdigit() and len(index) < 16) or b"_" in value:
        return 1 << 62, math.nan
    try:
        return int(index), float(value)
    except ValueError:
        return int(index), math.nan
