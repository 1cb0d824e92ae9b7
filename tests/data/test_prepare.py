"""Splits and scalings: the public ones read one row at a time, the papers' ones do not and say so."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.data import adult
from dpgrad.data._prepare import fixed_permutation, min_max, pixels_to_unit, split_80_20, to_unit
from dpgrad.data._regression import prepare


@pytest.mark.parametrize("rows", [1, 2, 10, 1797])
def test_permutation_is_what_a_seeded_shuffle_gives(rows: int) -> None:
    state = np.random.get_state()
    try:
        np.random.seed(10000019)
        table = np.arange(rows * 3).reshape(rows, 3)
        np.random.shuffle(table)
    finally:
        np.random.set_state(state)
    np.testing.assert_array_equal(np.arange(rows * 3).reshape(rows, 3)[fixed_permutation(rows)], table)


def test_permutation_leaves_the_global_generator_alone() -> None:
    before = np.random.get_state()[1].copy()
    fixed_permutation(10)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@given(st.integers(1, 300))
def test_split_keeps_each_row_once_with_its_label(rows: int) -> None:
    x = np.arange(rows)
    x_train, y_train, x_test, y_test = split_80_20(x, -x)
    assert len(x_train) == int(0.8 * rows)
    assert sorted([*x_train, *x_test]) == x.tolist()
    np.testing.assert_array_equal(np.concatenate([x_train, x_test]), -np.concatenate([y_train, y_test]))


def test_public_bounds_clip() -> None:
    assert to_unit(np.array([[-5.0], [0.0], [5.0], [1e300]]), [(0, 10)])[:, 0].tolist() == [0, 0, 0.5, 1]


def test_min_max_of_a_constant_column() -> None:
    assert min_max(np.full((3, 1), 7.0)).tolist() == [[0], [0], [0]]


def test_all_bytes_map_to_the_unit_interval() -> None:
    unit = pixels_to_unit(np.arange(256, dtype=np.uint8))
    assert unit.dtype == np.float32
    np.testing.assert_array_equal(unit, np.arange(256, dtype=np.float32) / np.float32(255))


def rows_changed(preprocessing: str) -> int:
    """How many of 50 prepared rows move when one raw row is replaced by an extreme one."""
    x = np.random.default_rng(0).uniform(1, 9, (50, 3))
    prepared = []
    for extreme in (False, True):
        raw = x.copy()
        if extreme:
            raw[7] = 1e6
        dataset = prepare("toy", raw, np.zeros(50), preprocessing, bounds=[(0, 10)] * 3, target_bounds=(0, 1))
        prepared.append(np.concatenate([dataset.x_train, dataset.x_test]))
    return int((prepared[0] != prepared[1]).any(axis=1).sum())


def test_default_changes_only_the_row_that_changed() -> None:
    assert rows_changed("default") == 1


def test_min_max_of_the_paper_changes_every_row() -> None:
    assert rows_changed("yu2020") == 50


def test_adult_default_changes_only_the_row_that_changed() -> None:
    line = (
        "{}, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
        "{}, <=50K\n"
    )
    blobs = [
        "".join([line.format(30, "Peru"), line.format(*last), line.format(40, "Hong")]).encode()
        for last in ((20, "Iran"), (9000, "?"))
    ]
    people = [adult.parse(blob, "f", rows=3) for blob in blobs]
    before, after = (adult._features(part) for part in people)
    assert (before != after).any(axis=1).tolist() == [False, True, False]
    assert before.shape == (3, 105)
    assert 0 <= after.min() <= after.max() <= 1
