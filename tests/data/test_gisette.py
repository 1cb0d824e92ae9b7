"""Gisette on files of the same form: the public range, and the benchmark's raw values."""

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from dpgrad import data
from dpgrad.data import gisette

ROWS, COLUMNS = 10, 4


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setattr(gisette, "ROWS", ROWS)
    monkeypatch.setattr(gisette, "COLUMNS", COLUMNS)
    return np.random.default_rng(0).integers(0, 1000, (ROWS, COLUMNS))


def publish(folder: Path, x: np.ndarray, labels: list[int]) -> None:
    (folder / "gisette").mkdir()
    # every line ends with a blank, as in the published file
    (folder / "gisette" / "gisette_train.data").write_text(
        "".join(" ".join(map(str, row)) + " \n" for row in x), "utf-8"
    )
    (folder / "gisette" / "gisette_train.labels").write_text("".join(f"{label}\n" for label in labels), "utf-8")


def test_rows_are_scaled_by_the_documented_range(x: np.ndarray, tmp_path: Path) -> None:
    labels = [1, -1] * 5
    publish(tmp_path, x, labels)
    order = np.arange(ROWS)
    np.random.RandomState(10000019).shuffle(order)
    scaled, raw = data.load("gisette", tmp_path), data.load("gisette", tmp_path, "yu2020")
    assert_array_equal(np.concatenate([raw.x_train, raw.x_test]), x[order])
    assert_allclose(np.concatenate([scaled.x_train, scaled.x_test]), x[order] / 999, rtol=1e-6)
    for found in (scaled, raw):
        assert len(found.y_train) == 8
        assert_array_equal(np.concatenate([found.y_train, found.y_test]), np.array(labels)[order] == 1)
        assert found.outside_guarantee == ()


def test_values_beyond_the_range_and_other_labels_are_refused(x: np.ndarray, tmp_path: Path, refused) -> None:
    x[3, 2] = 1000
    publish(tmp_path, x, [1, -1] * 5)
    with refused(r"gisette_train.data: a value lies outside 0\.\.999"):
        data.load("gisette", tmp_path)
    x[3, 2] = 999
    (tmp_path / "gisette" / "gisette_train.data").write_text(
        "".join(" ".join(map(str, row)) + "\n" for row in x), "utf-8"
    )
    (tmp_path / "gisette" / "gisette_train.labels").write_text("0\n" * ROWS, "utf-8")
    with refused("gisette_train.labels: a label is neither 1 nor -1"):
        data.load("gisette", tmp_path)
