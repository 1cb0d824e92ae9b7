"""Real-sim on a file of the same form: rows as they are, and the benchmark's scrambled ones."""

import bz2
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy import sparse

from dpgrad import data
from dpgrad.data import real_sim

ROWS, WORDS = 25, 6


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = np.where(random.random((ROWS, WORDS)) < 0.5, random.integers(1, 100, (ROWS, WORDS)), 0)
    y = random.integers(0, 2, ROWS)
    lines = [
        " ".join([("-1", "+1")[label], *(f"{at + 1}:{value}" for at, value in enumerate(row) if value)])
        for row, label in zip(x, y, strict=True)
    ]
    (tmp_path / "real-sim").mkdir()
    (tmp_path / "real-sim" / "real-sim.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    monkeypatch.setattr(real_sim, "SOURCES", (replace(real_sim.SOURCES[0], sha256=None),))
    monkeypatch.setattr(real_sim, "ROWS", ROWS)
    monkeypatch.setattr(real_sim, "WORDS", WORDS)
    return x.astype(float), y


def shuffled(values: np.ndarray) -> np.ndarray:
    """As the benchmark: the global generator, seeded, and its shuffle of an index."""
    index = np.arange(len(values))
    np.random.RandomState(10000019).shuffle(index)
    return values[index]


def test_rows_are_shuffled_and_split(published: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    x, y = published
    found = data.load("real-sim", tmp_path)
    assert (found.x_train.shape, found.x_test.shape) == ((20, WORDS), (5, WORDS))
    assert_array_equal(sparse.vstack([found.x_train, found.x_test]).toarray(), shuffled(x))
    assert_array_equal(np.concatenate([found.y_train, found.y_test]), shuffled(y))
    assert found.outside_guarantee == ()


def test_the_benchmark_keeps_values_in_the_order_of_the_file(
    published: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = published
    found = data.load("real-sim", tmp_path, "yu2020")
    rows = sparse.vstack([found.x_train, found.x_test]).tocsr()
    assert_array_equal(rows.toarray() != 0, shuffled(x) != 0)
    assert_array_equal(rows.data, x[x != 0])
    assert_array_equal(np.concatenate([found.y_train, found.y_test]), shuffled(y))
    assert len(found.outside_guarantee) == 1


def test_another_file_is_refused(tmp_path: Path, refused) -> None:
    (tmp_path / "real-sim").mkdir()
    (tmp_path / "real-sim" / "real-sim.bz2").write_bytes(bz2.compress(b"+1 1:1\n"))
    with refused("sha256 is .* published 7cd52374"):
        data.load("real-sim", tmp_path)
