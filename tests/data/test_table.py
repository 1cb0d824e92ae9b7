"""Text tables: NaN, infinities, lost columns and words are refused by place, never by content."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.data import adult, covertype, sonar
from dpgrad.data._table import parse, rows_below_header, unix_lines


@given(st.lists(st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3), min_size=1, max_size=20))
def test_round_trip(rows: list[tuple[float, ...]]) -> None:
    text = "\n".join(",".join(map(repr, row)) for row in rows).encode()
    np.testing.assert_array_equal(parse(text, "f", rows=len(rows), columns=3), np.array(rows))


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_line_ends_headers_and_white_space(ends: bytes) -> None:
    expected = [[1.0, 2.0], [3.0, 4.0]]
    assert parse(ends.join([b"a,b", b"1,2", b"3,4", b""]), "f", rows=2, columns=2, header=1).tolist() == expected
    assert parse(ends.join([b" 1  2", b" 3  4"]), "f", rows=2, columns=2, delimiter=None).tolist() == expected


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (b"1,2\n3,nan", "line 2, column 2 is not a finite number"),
        (b"1,NaN\n3,4", "line 1, column 2 is not"),
        (b"inf,2\n3,4", "line 1, column 1 is not"),
        (b"1,2\n-Infinity,4", "line 2, column 1 is not"),
        (b"1,2\n1e999,4", "line 2, column 1 is not"),
        (b"1,2\n3,s3cret", "line 2, column 2 is not"),
        (b"1,2\n3,", "line 2, column 2 is not"),
        (b"1,2\n3,1_0", "line 2, column 2 is not"),
        (b"1,2\n3,0x1p3", "line 2, column 2 is not"),
        (b"1,2\n3,4,5", "line 2 has 3 columns, 2 expected"),
        (b"1,2\n3", "line 2 has 1 columns, 2 expected"),
        (b"1,2,3\n4,5,6", "line 1 has 3 columns, 2 expected"),
        (b"1,2", "1 rows, 2 expected"),
        (b"1,2\n3,4\n5,6", "3 rows, 2 expected"),
        (b"", "0 rows, 2 expected"),
        (b"\n \n", "0 rows, 2 expected"),
        (b"1,2\n3,\xff", "not ASCII"),
        (b"1,2\n3,4\0", "not ASCII"),
    ],
)
def test_bad_tables_are_refused_by_place(text: bytes, pattern: str, refused) -> None:
    with refused(pattern):
        parse(text, "f", rows=2, columns=2)


def test_whole_number_tables_refuse_fractions_and_overflow(refused) -> None:
    for text in (b"1,2.5", b"1,99999999999999999999"):
        with refused("not a number of the kind this table holds"):
            parse(text, "f", rows=1, columns=2, dtype=np.int32)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(read_or_refused, blob: bytes) -> None:
    for first, delimiter in ((b"1,2\n", ","), (b"1 2\n", None)):
        table = read_or_refused(partial(parse, first + blob, "f", rows=2, columns=2, delimiter=delimiter))
        assert table is None or (table.shape == (2, 2) and np.isfinite(table).all())


def test_canonical_text() -> None:
    assert unix_lines(b"a\r\nb\r\n", "f") == unix_lines(b"a\nb", "f") == b"a\nb\n"
    assert rows_below_header(b"head", "f") == b""


class TestCovertype:
    def test_classes(self) -> None:
        x, y = covertype.parse(b"5," * 54 + b"7\n" + b"-6," * 54 + b"1\n", "f", rows=2)
        assert x.shape == (2, 54)
        assert y.tolist() == [6, 0]

    @pytest.mark.parametrize("label", [b"0", b"8", b"-1"])
    def test_unknown_class_is_refused(self, label: bytes, refused) -> None:
        with refused("line 2, column 55 is not a class from 1 to 7"):
            covertype.parse(b"5," * 54 + b"7\n" + b"5," * 54 + label, "f", rows=2)


class TestSonar:
    def test_nan_and_unknown_class_are_refused(self, refused) -> None:
        good = b"0.5," * 60 + b"M\n"
        assert sonar.parse(good, "f", rows=1)[1].tolist() == [1]
        with refused("line 2, column 61 is neither R nor M"):
            sonar.parse(good + b"0.5," * 60 + b"s3cret", "f", rows=2)
        with refused("line 2, column 3 is not a finite number"):
            sonar.parse(good + b"0.5,0.5,nan," + b"0.5," * 57 + b"R", "f", rows=2)
        with refused("line 2 has 61 columns, 60 expected"):
            sonar.parse(good + b"0.5," * 61 + b"R", "f", rows=2)


class TestAdult:
    GOOD = (
        "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
        "United-States, <=50K"
    ).split(", ")

    def line(self, column: int = 0, cell: str = "39") -> bytes:
        cells = list(self.GOOD)
        cells[column] = cell
        return ", ".join(cells).encode()

    def test_both_spellings_of_the_files(self) -> None:
        blob = b"|1x3 Cross validator\n" + self.line() + b"\n" + self.line(14, ">50K.") + b"\n\n"
        people = adult.parse(blob, "f", rows=2)
        assert people.numbers[0].tolist() == [39, 77516, 13, 2174, 0, 40]
        assert people.codes[0].tolist() == [5, 0, 2, 8, 3, 0, 1, 0]
        assert people.classes.tolist() == [0, 1]

    def test_missing_category_is_a_block_of_zeros(self) -> None:
        people = adult.parse(self.line(6, "?"), "f", rows=1)
        assert people.codes[0, 3] == -1
        assert adult._features(people).sum() == pytest.approx(
            adult._features(adult.parse(self.line(), "f", rows=1)).sum() - 1
        )

    @pytest.mark.parametrize(
        ("column", "cell", "pattern"),
        [
            (0, "nan", "line 1, column 1 is not a whole number"),
            (0, "-1", "line 1, column 1 is not"),
            (2, "1.5", "line 1, column 3 is not"),
            (10, "9" * 400, "line 1, column 11 is not"),
            (12, "?", "line 1, column 13 is not"),
            (1, "s3cret", "line 1, column 2 is not a category"),
            (13, "", "line 1, column 14 is not a category"),
            (14, "s3cret", "line 1, column 15 is neither"),
            (14, "<=50K, 1", "line 1 has 16 columns, 15 expected"),
        ],
    )
    def test_bad_cells_are_refused_by_place(self, column: int, cell: str, pattern: str, refused) -> None:
        with refused(pattern):
            adult.parse(self.line(column, cell), "f", rows=1)

    def test_lost_rows_are_refused(self, refused) -> None:
        with refused("1 rows, 2 expected"):
            adult.parse(self.line(), "f", rows=2)

    def test_documented_categories_are_all_there(self) -> None:
        assert [len(values) for values in adult.CATEGORIES.values()] == [8, 16, 7, 14, 6, 5, 2, 41]
        assert sorted([*adult.CATEGORIES, *adult.BOUNDS]) == list(range(14))
