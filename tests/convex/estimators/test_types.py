"""How one row is read does not depend on the others: not on their types, nor on the type they give the whole table."""

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy import sparse

from dpgrad.convex import DPLinearRegression, DPLinearSVC, DPLogisticRegression, DPStandardScaler, RowNormalizer
from dpgrad.convex.design import Design
from dpgrad.convex.estimators import rows, solvers

COUNT = 300
RANDOM = np.random.default_rng(0)
LARGE = [[int(a), int(b)] for a, b in RANDOM.integers(2**53, 2**63, (COUNT, 2))]
PARTS = [[float(a), float(b)] for a, b in RANDOM.uniform(-1, 1, (COUNT, 2))]
NARROW = [[np.float32(a), np.float32(b)] for a, b in PARTS]
LABELS = np.arange(COUNT) % 2
Table = list[list[Any]]

# name: the rows, what replaces the first of them, how a table is made of them
CASES: dict[str, tuple[Table, list[Any], Callable[[Table], Any]]] = {
    "whole and not": (LARGE, [0.5, 1], np.array),
    "a list": (LARGE, [0.5, 1], list),
    "signed and unsigned": (LARGE, [np.uint64(2**64 - 1), 1], np.array),
    "negative and unsigned": ([[np.uint64(a), np.uint64(b)] for a, b in LARGE], [np.int64(-1), np.int64(1)], np.array),
    "beyond 64 bits": (LARGE, [2**80, 1], np.array),
    "objects": (LARGE, [0.5, 1], lambda table: np.array(table, object)),
    "whole and long": (LARGE, [np.longdouble(0.5), np.longdouble(1)], np.array),
    "narrow and wide floats": (NARROW, [0.1, 0.2], np.array),
    "narrow floats in a list": (NARROW, [0.1, 0.2], list),
    "half and whole": (
        [[np.float16(a), np.float16(b)] for a, b in PARTS],
        [np.int64(2**53 + 1), np.int64(1)],
        np.array,
    ),
    "truth values": ([[a > 0, b > 0] for a, b in PARTS], [0.5, 1], np.array),
    "a frame": (LARGE, [0.5, 1], lambda table: pd.DataFrame(table, columns=["a", "b"])),
    "a frame of two types": (LARGE, [1, 0.5], lambda table: pd.DataFrame(table, columns=["a", "b"])),
    "a frame of objects": (LARGE, [0.5, 1], lambda table: pd.DataFrame(table, columns=["a", "b"], dtype=object)),
    "a nullable frame": (LARGE, [0.5, 1], lambda table: pd.DataFrame(table, columns=["a", "b"]).convert_dtypes()),
    "sparse": (LARGE, [0.5, 1], lambda table: sparse.csr_array(np.array(table))),
    "sparse by columns": (LARGE, [0.5, 1], lambda table: sparse.csc_array(np.array(table))),
    "sparse floats": (NARROW, [0.1, 0.2], lambda table: sparse.coo_array(np.array(table))),
}


def duplicated(form: str) -> Callable[[Table], Any]:
    """Entries that stand for two each, which a sparse matrix adds up."""

    def made(table: Table) -> Any:
        values = np.array(table).repeat(2, axis=1)  # (rows, 4): each place twice
        count, shape = len(values), (len(values), 2)
        row, column = np.repeat(np.arange(count), 4), np.tile([0, 0, 1, 1], count)
        if form == "coo":
            return sparse.coo_array((values.ravel(), (row, column)), shape=shape)
        if form == "csr":
            return sparse.csr_array((values.ravel(), column, np.arange(0, 4 * count + 1, 4)), shape=shape)
        by_column = np.concatenate([values[:, :2].ravel(), values[:, 2:].ravel()])
        places = np.tile(np.repeat(np.arange(count), 2), 2)
        return sparse.csc_array((by_column, places, [0, 2 * count, 4 * count]), shape=shape)

    return made


for form in ("csr", "coo", "csc"):
    CASES[f"duplicates of whole numbers, {form}"] = (LARGE, [0.5, 1], duplicated(form))
    CASES[f"duplicates of narrow floats, {form}"] = (NARROW, [0.1, 0.2], duplicated(form))


def dense(found: Any) -> NDArray[Any]:
    return np.asarray(found.todense() if sparse.issparse(found) else found)


@pytest.mark.parametrize("case", CASES)
class TestNeighbours:
    """Tables that differ in their first row, whose type differs with it."""

    def pair(self, case: str) -> tuple[Any, Any]:
        table, other, made = CASES[case]
        return made(table), made([other, *table[1:]])

    def test_models_read_all_other_rows_alike(self, case: str) -> None:
        one, other = (
            dense(rows.narrowed(rows.validated(DPLogisticRegression(), X, dtype=rows.NUMBERS))) for X in self.pair(case)
        )
        assert one.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(one[1:], other[1:])
        assert (one[0] != other[0]).any()

    def test_normalised_rows_stay_alike(self, case: str) -> None:
        for rule in ("normalize", "clip"):
            one, other = (dense(RowNormalizer(rule=rule).fit_transform(X)).astype(np.float32) for X in self.pair(case))
            np.testing.assert_array_equal(one[1:], other[1:])

    def test_scaled_rows_stay_alike(self, case: str) -> None:
        scaler = DPStandardScaler(bounds=(-1e18, 1e18), with_mean=False, random_state=7)
        one, other = self.pair(case)
        fitted = scaler.fit(one)
        found = [dense(fitted.transform(X)).astype(np.float32) for X in (one, other)]
        np.testing.assert_array_equal(found[0][1:], found[1][1:])


@pytest.mark.parametrize("first", [0.5, 2**80, np.longdouble(0.5), np.uint64(2**64 - 1)])
def test_targets_of_a_regression_are_read_alike(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[NDArray[np.float64]] = []
    solve = solvers.solve

    def spied(name: object, X: Any, targets: Any, *rest: Any) -> Any:
        seen.append(targets)
        return solve(name, X, targets, *rest)

    monkeypatch.setattr(solvers, "solve", spied)
    targets = [row[0] for row in LARGE]
    model = DPLinearRegression(data_norm=1.0, target_bounds=(0, 2.0**63))
    for y in (targets, [first, *targets[1:]], np.array([first, *targets[1:]], object)):
        model.fit(PARTS, y)
    assert seen[0].dtype == np.float64
    np.testing.assert_array_equal(seen[0][1:], seen[1][1:])
    np.testing.assert_array_equal(seen[0][1:], seen[2][1:])


class TestLabels:
    def test_whole_numbers_that_floats_cannot_tell_apart_are_refused(self) -> None:
        classes = [2**53, 2**53 + 1]
        labels: list[Any] = [classes[place] for place in LABELS]
        for y in (labels, [float(labels[0]), *labels[1:]]):
            with pytest.raises(
                ValueError, match=r"^classes holds numbers of 2\^53 or more, .*: use text, str\(label\)$"
            ):
                DPLogisticRegression(classes=classes).fit(PARTS, y)

    @pytest.mark.filterwarnings("ignore::dpgrad.convex.PrivacyWarning")
    def test_also_where_they_are_read(self) -> None:
        with pytest.raises(ValueError, match=r"^y holds labels of 2\^53 or more"):
            DPLogisticRegression().fit(PARTS, LABELS + 2**60)

    @pytest.mark.parametrize("first", [0, 0.0, np.float32(0), False, np.uint8(0)])
    def test_the_type_of_one_label_does_not_move_the_others(self, first: Any) -> None:
        labels = [first, *LABELS[1:].tolist()]
        model = DPLinearSVC(classes=[0, 1], random_state=7)
        assert model.fit(PARTS, labels).coef_.tolist() == model.fit(PARTS, LABELS).coef_.tolist()

    @pytest.mark.parametrize(
        "made",
        [
            list,
            np.array,
            lambda names: np.array(names, object),
            lambda names: np.array(names, np.dtypes.StringDType()),
            pd.Series,
            lambda names: pd.Series(names, dtype="string"),
            lambda names: pd.Series(names, dtype=object),
            pd.Categorical,
            lambda names: pd.DataFrame({"label": names}),
        ],
        ids=["list", "U", "object", "T", "Series", "string", "Series of objects", "Categorical", "DataFrame"],
    )
    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.filterwarnings("ignore::dpgrad.convex.PrivacyWarning")
    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
    def test_text_in_every_form(self, made: Callable[[list[str]], Any], named: bool) -> None:
        names = [("no", "yes")[place] for place in LABELS]
        plain = DPLogisticRegression(classes=["no", "yes"], random_state=7).fit(PARTS, names)
        model = DPLogisticRegression(classes=["no", "yes"] if named else None, random_state=7).fit(PARTS, made(names))
        assert model.predict(PARTS).tolist() == plain.predict(PARTS).tolist()
        assert 0 <= model.score(PARTS, names) <= 1


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": [row[0] for row in PARTS], **columns})


DAY = np.datetime64("2020-01-01")
REFUSED: dict[str, tuple[Any, str]] = {
    "dates and numbers": (frame(day=pd.Timestamp(2020, 1, 1)), "column 'day' of X holds dates or times: "),
    "dates with a zone": (frame(day=pd.Timestamp(2020, 1, 1, tz="UTC")), "column 'day' of X holds dates or times: "),
    "durations": (frame(time=pd.Timedelta(seconds=1)), "column 'time' of X holds dates or times: "),
    "periods": (frame(day=pd.period_range("2020", periods=COUNT)), "column 'day' of X holds dates or times: "),
    "categories of dates": (
        frame(day=pd.Categorical([pd.Timestamp(2020, 1, 1)] * COUNT)),
        "column 'day' of X holds dates or times: ",
    ),
    "dates alone": (np.full((COUNT, 2), DAY), "X holds dates or times: "),
    "a list of dates": ([[DAY]] * COUNT, "X holds dates or times: "),
    "times among objects": (np.array([[np.timedelta64(1, "s"), 1.0]] * COUNT, object), "X holds dates or times: "),
    "text": (np.full((COUNT, 2), "1.5"), "X and y must hold numbers: encode text"),
    "text of variable length": (np.full((COUNT, 2), "1.5", np.dtypes.StringDType()), "X and y must hold numbers: "),
    "bytes": (np.full((COUNT, 2), b"1.5"), "X and y must hold numbers: encode text"),
    "one text in a list": ([["1.5", 1.0], *PARTS[1:]], "X and y must hold numbers: encode text"),
    "text among objects": (np.array([["1.5", 1.0]] * COUNT, object), "X and y must hold numbers: encode text"),
    "a column of text": (frame(code=["1"] * COUNT), "X and y must hold numbers: encode text"),
    "a masked array": (np.ma.array(PARTS, mask=np.array(PARTS) > 0), "X is a masked array, .*: fill in missing values"),
    "rows of several lengths": ([[1.0], *PARTS[1:]], "X must have rows of one length"),
    "beyond float64": ([[10**400, 1], *PARTS[1:]], "X must hold numbers that float64 can hold"),
    "a name twice": (pd.DataFrame(PARTS, columns=["a", "a"]), "X has several columns named 'a': give each a name"),
}
ESTIMATORS = (
    DPLogisticRegression(classes=[0, 1]),
    DPLinearSVC(classes=[0, 1]),
    DPLinearRegression(data_norm=1.0, target_bounds=(0, 1)),
    DPStandardScaler(bounds=(-1, 1)),
    RowNormalizer(),
)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
@pytest.mark.parametrize("case", REFUSED)
def test_types_whose_meaning_a_row_decides_are_refused_in_one_line(estimator: Any, case: str) -> None:
    X, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        estimator.fit(X, LABELS)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [datetime.datetime(2020, 1, 1), {"a": 1}, 1j])
def test_objects_that_are_no_numbers_are_refused_in_one_line(value: Any) -> None:
    X = np.array([[value, 1.0]] * COUNT, object)
    with pytest.raises(TypeError, match=r"^X and y must hold numbers, .*: convert them first$") as raised:
        DPLogisticRegression(classes=[0, 1]).fit(X, LABELS)
    assert "\n" not in str(raised.value)


def test_missing_labels_are_refused_in_one_line() -> None:
    y = pd.Series([None, *("no", "yes") * (COUNT // 2)][:COUNT], dtype="string")
    with pytest.raises(ValueError, match=r"^Input contains NaN: fill in missing values"):
        DPLogisticRegression(classes=["no", "yes"]).fit(PARTS, y)


def test_a_design_reads_lists_alike() -> None:
    one, other = (Design(table, radius=1e30) for table in (NARROW, [[0.1, 0.2], *NARROW[1:]]))
    weights = RANDOM.standard_normal((2, 1))
    np.testing.assert_array_equal(one.scores(weights)[1:], other.scores(weights)[1:])


def test_a_design_of_something_else_is_refused_in_one_line() -> None:
    for given in ([[1.0], [1.0, 2.0]], [["a"]], [[10**400]], object()):
        with pytest.raises(ValueError, match=r"^rows must be an array of numbers|^rows must have two dimensions"):
            Design(given, radius=1.0)
