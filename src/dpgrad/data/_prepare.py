"""Splits and scalings shared by the datasets: public rules first, rules that read the data named as such."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgrad.data._dataset import OUTSIDE, Inputs

# The seed of the benchmark of Iyengar et al., which Yu et al. (2020) reuse; a public constant.
SEED = 10000019
SPLIT_80_20 = "first 80 % after the fixed permutation of seed 10000019, rest for test"
OFFICIAL = "published train and test files"
ALL_ROWS = "all rows for training, none for test"
SCRAMBLED = OUTSIDE + "values of one row are put into other rows (a published defect, kept for reproduction)"


def fixed_permutation(rows: int) -> NDArray[np.int64]:
    """The public permutation of `rows` indices: what `np.random.seed(10000019)` and a shuffle give.

    `RandomState` is frozen by numpy's policy, so this is the same array in every version.

    >>> fixed_permutation(5).tolist()
    [1, 4, 3, 0, 2]
    """
    return np.random.RandomState(SEED).permutation(rows).astype(np.int64)


def split_80_20(x: Inputs, y: NDArray[Any]) -> tuple[Inputs, NDArray[Any], Inputs, NDArray[Any]]:
    """Train rows, train labels, test rows, test labels: the first int(0.8 n) after the fixed permutation, the rest.

    >>> [part.tolist() for part in split_80_20(np.arange(5), np.arange(5))]
    [[1, 4, 3, 0], [1, 4, 3, 0], [2], [2]]
    """
    order = fixed_permutation(y.shape[0])
    return cut_80_20(x[order], y[order])


def cut_80_20(x: Inputs, y: NDArray[Any]) -> tuple[Inputs, NDArray[Any], Inputs, NDArray[Any]]:
    """Train rows, train labels, test rows, test labels of rows that are shuffled already.

    >>> [part.tolist() for part in cut_80_20(np.arange(5), np.arange(5))]
    [[0, 1, 2, 3], [0, 1, 2, 3], [4], [4]]
    """
    cut = int(0.8 * y.shape[0])
    return x[:cut], y[:cut], x[cut:], y[cut:]


def scrambled_80_20(x: Inputs, y: NDArray[Any]) -> tuple[Inputs, NDArray[Any], Inputs, NDArray[Any]]:
    """`split_80_20` of CSR rows whose values stay in the unshuffled order: places are right and values scrambled.

    A defect of the benchmark of Iyengar et al.; it reads every row for each, outside any guarantee.

    >>> from scipy.sparse import csr_array
    >>> rows = csr_array(np.diag([1.0, 2.0, 3.0, 4.0, 5.0]))
    >>> scrambled_80_20(rows, np.arange(5))[0].toarray().max(axis=1).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    from scipy.sparse import csr_array

    order = fixed_permutation(y.shape[0])
    shuffled = csr_array(x[order])
    return cut_80_20(csr_array((x.data, shuffled.indices, shuffled.indptr), shape=x.shape), y[order])


def to_unit(x: NDArray[Any], bounds: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Each column clipped to its public bounds and mapped to [0, 1]: reads only the row itself.

    >>> to_unit(np.array([[5.0, 30.0], [-1.0, 20.0]]), [(0, 10), (20, 40)]).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    low, high = np.asarray(bounds, dtype=np.float64).T
    scaled: NDArray[np.float64] = np.clip((x - low) / (high - low), 0.0, 1.0)
    return scaled


def min_max(x: NDArray[Any]) -> NDArray[np.float64]:
    """Each column mapped to [0, 1] by its own least and greatest value: reads every row, outside any guarantee.

    >>> min_max(np.array([[1.0, 7.0], [3.0, 7.0]])).tolist()
    [[0.0, 0.0], [1.0, 0.0]]
    """
    low, high = x.min(axis=0), x.max(axis=0)
    scaled: NDArray[np.float64] = (x - low) / np.where(high > low, high - low, 1.0)
    return scaled


def pixels_to_unit(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Bytes 0..255 as float32 in [0, 1].

    >>> pixels_to_unit(np.array([[0, 255]], dtype=np.uint8)).tolist()
    [[0.0, 1.0]]
    """
    unit = images.astype(np.float32)
    unit /= np.float32(255)
    return unit
