"""KDD Cup 1999 on a file of the same form: public bounds, and the benchmark's draw with replacement."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from dpgrad import data
from dpgrad.data import kddcup99

ROWS, DRAWN = 40, 25


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    random = np.random.default_rng(0)
    known = [[value.decode() for value in values] for values in kddcup99.SYMBOLS]
    made = [
        [
            str(random.integers(0, 20_000)),
            *(str(random.choice(values)) for values in known),
            *(str(value) for value in random.integers(0, 2, 37)),
            str(random.choice(["normal.", "smurf."])),
        ]
        for _ in range(ROWS)
    ]
    made[0][2] = "unheard-of"
    (tmp_path / "kddcup99").mkdir()
    text = "\n".join(map(",".join, made))
    (tmp_path / kddcup99.SOURCES[0].place).write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(kddcup99, "SOURCES", (replace(kddcup99.SOURCES[0], sha256=None),))
    monkeypatch.setattr(kddcup99, "ROWS", ROWS)
    monkeypatch.setattr(kddcup99, "DRAWN", DRAWN)
    return made


def test_the_symbols_are_those_of_the_full_set_in_order() -> None:
    assert [len(values) for values in kddcup99.SYMBOLS] == [3, 70, 11]
    for values in kddcup99.SYMBOLS:
        assert list(values) == sorted(set(values))


def test_default_reads_public_bounds_and_symbols(lines: list[list[str]], tmp_path: Path) -> None:
    found = data.load("kddcup99", tmp_path)
    order = np.arange(ROWS)
    np.random.RandomState(10000019).shuffle(order)
    x, y = np.concatenate([found.x_train, found.x_test]), np.concatenate([found.y_train, found.y_test])
    assert (found.x_train.shape, x.dtype) == ((32, 38 + 3 + 70 + 11), np.float32)
    assert (x >= 0).all()
    assert (x <= 1).all()
    durations = np.array([min(float(line[0]), 10_000) / 10_000 for line in lines])
    assert_allclose(x[:, 0], durations[order], rtol=1e-6)
    assert_array_equal(y, np.array([line[-1] == "normal." for line in lines])[order])
    blocks = [x[:, 38:41], x[:, 41:111], x[:, 111:]]
    for place, (block, values) in enumerate(zip(blocks, kddcup99.SYMBOLS, strict=True), start=1):
        for row, at in zip(block, order, strict=True):
            shown = [value.decode() for value, one in zip(values, row, strict=True) if one]
            assert shown == ([] if lines[at][place] == "unheard-of" else [lines[at][place]])
    assert found.outside_guarantee == ()


def test_the_benchmark_draws_with_replacement(lines: list[list[str]], tmp_path: Path) -> None:
    """Against the benchmark's steps one by one: randint, one-hot of what was drawn, all columns shuffled together."""
    found = data.load("kddcup99", tmp_path, "yu2020")
    random = np.random.RandomState(10000019)
    drawn = [lines[at] for at in random.randint(ROWS, size=DRAWN)]
    assert len(set(map(tuple, drawn))) < DRAWN  # some are drawn twice
    columns = []
    for place in (1, 2, 3):
        cells = [line[place] for line in drawn]
        columns += [[float(cell == value) for cell in cells] for value in sorted(set(cells))]
    columns += [[float(line[place]) for line in drawn] for place in (0, *range(4, 41))]
    columns.append([float(line[41] == "normal.") for line in drawn])
    table = np.column_stack(columns)
    random.shuffle(table)
    assert_array_equal(np.concatenate([found.x_train, found.x_test]), table[:, :-1])
    assert_array_equal(np.concatenate([found.y_train, found.y_test]), table[:, -1])
    assert (len(found.y_train), len(found.outside_guarantee)) == (20, 2)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        (b"s3cret", "row 2 has 1 columns, 42 expected"),
        (b"0,tcp,http,SF," + b"s3cret," * 37 + b"normal.", "line 2, column 2 is not a finite number"),
        (b"", "1 rows, 2 expected"),
    ],
)
def test_bad_lines_are_refused_by_place(line: bytes, pattern: str, refused) -> None:
    good = b"0,tcp,http,SF," + b"0," * 37 + b"normal."
    with refused(pattern):
        kddcup99.parse(good + b"\n" + line, "f", rows=2)
