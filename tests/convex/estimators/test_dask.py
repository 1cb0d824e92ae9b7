"""Fits on rows that Dask holds equal fits in memory, read every block once a pass, and refuse what they cannot read."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.pipeline import make_pipeline

from dpgrad import Ledger, convex
from dpgrad.errors import DataError, OptionError

ROWS = 600
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((ROWS, 4))
TWO = (X @ [2.0, 1.0, -1.0, 0.0] + RANDOM.normal(size=ROWS) > 0).astype(int)
THREE = np.digitize(X[:, 0], [-0.5, 0.5])
NUMBERS = X @ [1.0, 2.0, 0.0, 0.0] + RANDOM.normal(size=ROWS)
COUNTS = RANDOM.poisson(np.exp(X[:, 0] / 2))
BLOCKS = (250, 1, 149, 200)
SECRET = 987654321.25
FITS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "auto": ("DPLogisticRegression", TWO, {"classes": [0, 1]}),
    "auto, clipped": ("DPLogisticRegression", TWO, {"classes": [0, 1], "data_norm": 2.0, "epsilon": 8.0}),
    "auto, balanced": ("DPLogisticRegression", THREE, {"classes": [0, 1, 2], "class_weight": "balanced"}),
    "auto, classes read": ("DPLogisticRegression", THREE, {}),
    "gd": ("DPLogisticRegression", TWO, {"classes": [0, 1], "solver": "gd", "max_iter": 10}),
    "gd, softmax": ("DPLogisticRegression", THREE, {"classes": [0, 1, 2], "solver": "gd", "max_iter": 10}),
    "gd, intervals": (
        "DPLogisticRegression", TWO, {"classes": [0, 1], "solver": "gd", "epsilon": 9.0, "inference_share": 0.3},
    ),
    "sgd": ("DPLogisticRegression", TWO, {"classes": [0, 1], "solver": "sgd", "max_iter": 10}),
    "sgd, hardly any": (
        "DPLogisticRegression", TWO, {"classes": [0, 1], "solver": "sgd", "max_iter": 10, "sampling_rate": 1e-3},
    ),
    "objective": ("DPLogisticRegression", TWO, {"classes": [0, 1], "solver": "objective"}),
    "objective, rest": ("DPLogisticRegression", THREE, {"classes": [0, 1, 2], "solver": "objective"}),
    "amp": ("DPLinearSVC", TWO, {"classes": [0, 1], "solver": "amp"}),
    "output": ("DPLogisticRegression", TWO, {"classes": [0, 1], "solver": "output", "batch_size": ROWS}),
    "svm": ("DPLinearSVC", THREE, {"classes": [0, 1, 2]}),
    "adassp": (
        "DPLinearRegression", NUMBERS, {"data_norm": 2.0, "target_bounds": (-5, 5), "inference_share": 0.2},
    ),
    "squares": ("DPLinearRegression", NUMBERS, {"data_norm": 2.0, "target_bounds": (-5, 5), "solver": "gd"}),
    "counts": ("DPPoissonRegressor", COUNTS, {"data_norm": 2.0, "target_bounds": (0, 5)}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(kind: str, **options: Any) -> Any:
    return getattr(convex, kind)(random_state=7, **options)


def blocks_of(values: Any, sizes: tuple[int, ...] = BLOCKS) -> Any:
    return da.from_array(values, chunks=(sizes, *values.shape[1:]))


def logistic(**options: Any) -> Any:
    return made("DPLogisticRegression", **{"classes": [0, 1], "solver": "gd", "max_iter": 3, **options})


class TestSameAsInMemory:
    @pytest.mark.parametrize("name", FITS)
    def test_every_solver(self, name: str) -> None:
        kind, labels, options = FITS[name]
        mine = made(kind, **options).fit(X, labels)
        theirs = made(kind, **options).fit(blocks_of(X), blocks_of(labels, (100, 500)))
        # float32 scores in memory, float64 ones in blocks: 1e-7 of a score, and steps in both by the same noise
        np.testing.assert_allclose(theirs.coef_, mine.coef_, atol=1e-6 * np.abs(mine.coef_).max())
        np.testing.assert_allclose(theirs.intercept_, mine.intercept_, atol=1e-6)
        assert theirs.privacy_.guarantee == mine.privacy_.guarantee
        assert theirs.privacy_.releases == mine.privacy_.releases
        assert "how many rows each block of Dask's has" in theirs.privacy_.public  # that is, not gathered first
        if mine.inference_ is not None:
            np.testing.assert_allclose(theirs.inference_.total, mine.inference_.total, rtol=1e-6)

    def test_threads_and_one_thread_give_the_same_bits(self) -> None:
        one = logistic().fit(blocks_of(X), blocks_of(TWO))
        with dask.config.set(scheduler="threads", num_workers=4):
            several = logistic().fit(blocks_of(X), blocks_of(TWO))
        assert (one.coef_ == several.coef_).all()

    def test_many_blocks_are_added_in_a_tree(self) -> None:
        mine, theirs = logistic().fit(X[:300], TWO[:300]), logistic()
        theirs.fit(da.from_array(X[:300], chunks=(1, 4)), da.from_array(TWO[:300], chunks=7))
        np.testing.assert_allclose(theirs.coef_, mine.coef_, atol=1e-6 * np.abs(mine.coef_).max())

    def test_ledger_is_charged_once(self) -> None:
        ledger = Ledger()
        logistic(ledger=ledger).fit(blocks_of(X), blocks_of(TWO))
        assert len(ledger.entries()) == 1

    def test_scaler_and_pipeline(self) -> None:
        scaler = made("DPStandardScaler", bounds=(-4.0, 4.0))
        mine, theirs = (scaler.fit(rows).mean_ for rows in (X, blocks_of(X)))
        np.testing.assert_allclose(theirs, mine, atol=1e-12)
        parts = [scaler, convex.RowNormalizer(), logistic()]
        mine, theirs = (
            make_pipeline(*parts).fit(rows, labels)[-1].coef_
            for rows, labels in ((X, TWO), (blocks_of(X), blocks_of(TWO)))
        )
        np.testing.assert_allclose(theirs, mine, atol=1e-6 * np.abs(mine).max())


class TestForms:
    """What Dask holds in another form is read as it would be in memory."""

    def same(self, rows: Any, labels: Any, plain: Any = X, truth: Any = TWO, **options: Any) -> Any:
        mine, theirs = logistic(**options).fit(plain, truth), logistic(**options).fit(rows, labels)
        np.testing.assert_allclose(theirs.coef_, mine.coef_, atol=1e-6 * np.abs(mine.coef_).max())
        return theirs

    def test_blocks_along_columns(self) -> None:
        self.same(da.from_array(X, chunks=(250, 1)), da.from_array(TWO, chunks=ROWS))

    def test_blocks_along_columns_beyond_the_limit_of_a_block(self) -> None:
        with dask.config.set({"array.chunk-size": "2KiB"}):
            self.same(da.from_array(X, chunks=(ROWS, 1)), da.from_array(TWO, chunks=ROWS))

    def test_labels_in_memory(self) -> None:
        for labels in (TWO, TWO.tolist(), pd.Series(TWO), TWO[:, None]):
            self.same(blocks_of(X), labels)

    def test_labels_as_a_column(self) -> None:
        self.same(blocks_of(X), da.from_array(TWO[:, None], chunks=(200, 1)))

    def test_data_frame_without_known_sizes_and_with_an_empty_block(self) -> None:
        frame = pd.DataFrame(X, columns=list("abcd")).assign(label=np.where(TWO, "yes", "no"), row=np.arange(ROWS))
        lazy = dd.from_pandas(frame, npartitions=5)
        lazy, kept = lazy[lazy["row"] >= 200], frame[frame["row"] >= 200]  # the first block becomes empty
        found = self.same(lazy[list("abcd")], lazy["label"], kept[list("abcd")], kept["label"], classes=["no", "yes"])
        assert found.feature_names_in_.tolist() == list("abcd")

    def test_data_frame_and_labels_in_other_blocks(self) -> None:
        frame = dd.from_pandas(pd.DataFrame(X, columns=list("abcd")), npartitions=4)
        plain = pd.DataFrame(X, columns=list("abcd"))
        for labels in (
            dd.from_pandas(pd.Series(TWO), npartitions=3),
            blocks_of(TWO, (100, 200, 250, 50)),
            frame.assign(label=frame["a"] * 0 + 1)["label"].repartition(npartitions=2) * 0,
        ):
            truth = TWO if not isinstance(labels, dd.Series) or labels.npartitions == 3 else np.zeros(ROWS, int)
            self.same(frame, labels, plain, truth)

    def test_one_kind_of_number_in_one_block_and_another_in_the_next(self) -> None:
        whole = X.round()
        parts = [whole[:300].astype(np.int64), whole[300:].astype(np.float32)]
        lazy = da.concatenate([da.from_array(part, chunks=(150, 4)) for part in parts])
        self.same(lazy, blocks_of(TWO), whole)

    def test_sparse_blocks(self) -> None:
        thin = X * (np.abs(X) > 1)
        lazy = blocks_of(thin).map_blocks(sparse.csr_matrix)
        self.same(lazy, blocks_of(TWO), thin)

    def test_objects_that_are_numbers(self) -> None:
        self.same(blocks_of(X.astype(object)), blocks_of(TWO))

    def test_labels_of_every_kind(self) -> None:
        for known in (["no", "yes"], [-1, 1], [0.0, 1.0], [False, True]):
            truth = np.array(known)[TWO]
            found = self.same(blocks_of(X), blocks_of(truth), truth=truth, classes=known)
            assert found.classes_.tolist() == known


def counted(reads: list[int]) -> Any:
    """The rows, noting each block that is read."""

    def read(block: Any) -> Any:
        reads.append(len(block))
        return block

    return blocks_of(X).map_blocks(read, dtype=float, meta=np.zeros((0, 4)))


class TestPasses:
    @pytest.mark.parametrize("steps", [1, 4])
    def test_a_step_reads_every_block_once(self, steps: int) -> None:
        reads: list[int] = []
        logistic(max_iter=steps).fit(counted(reads), blocks_of(TWO))
        assert len(reads) == (1 + steps) * len(BLOCKS)

    def test_statistics_are_one_pass_each(self) -> None:
        reads: list[int] = []
        made("DPLinearRegression", data_norm=1.0, target_bounds=(-1, 1)).fit(counted(reads), blocks_of(NUMBERS))
        assert len(reads) == 3 * len(BLOCKS)  # the first, products with the target, and the second moment

    def test_sampling_leaves_blocks_without_a_row_unread(self) -> None:
        reads: list[int] = []
        logistic(solver="sgd", sampling_rate=1e-3).fit(counted(reads), blocks_of(TWO))
        assert len(reads) < 3 * len(BLOCKS)

    @pytest.mark.parametrize("which", ["rows", "labels", "order", "sizes"])
    def test_other_rows_in_a_second_pass_are_refused(self, which: str) -> None:
        reads: list[int] = []

        def other(block: Any) -> Any:
            reads.append(1)
            late = len(reads) > len(BLOCKS)
            if which == "sizes":
                return block[:-1] if late and len(block) > 1 else block
            return (
                (block[::-1] if which == "order" else block + 1e-3 if which == "rows" else 1 - block) if late else block
            )

        rows, labels = blocks_of(X), blocks_of(TWO)
        if which == "labels":
            labels = labels.map_blocks(other, dtype=int, meta=np.zeros(0, int))
        else:
            rows = rows.map_blocks(other, dtype=float, meta=np.zeros((0, 4)))
        with pytest.raises(DataError, match="X or y gave other rows in a second pass"):
            logistic().fit(rows, labels)

    def test_random_rows_with_a_seed_in_the_graph_are_the_same_in_every_pass(self) -> None:
        rows = da.random.default_rng(1).normal(size=(ROWS, 4), chunks=(200, 4))
        mine, theirs = logistic().fit(rows.compute(), TWO), logistic().fit(rows, blocks_of(TWO))
        np.testing.assert_allclose(theirs.coef_, mine.coef_, atol=1e-6 * np.abs(mine.coef_).max())


def with_value(value: Any, dtype: Any = float) -> Any:
    spoiled = X.astype(dtype)
    spoiled[400, 2] = value
    return blocks_of(spoiled)


def failing(block: Any) -> Any:
    raise RuntimeError(f"bad row {SECRET}")


dates = pd.DataFrame({"a": pd.date_range("2020-01-01", periods=ROWS), "b": np.arange(ROWS)})
REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "missing": (lambda: (with_value(np.nan), TWO), "contains NaN: fill in missing values"),
    "infinite": (lambda: (with_value(np.inf), TWO), "infinity"),
    "text": (lambda: (with_value(f"v{SECRET}", object), TWO), "must hold numbers: encode text"),
    "dates": (lambda: (dd.from_pandas(dates, npartitions=2), TWO), "column 'a' of X holds dates or times"),
    "missing label": (lambda: (blocks_of(X), blocks_of(np.where(X[:, 0] > 9, 1, np.nan))), "NaN"),
    "unknown label": (lambda: (blocks_of(X), blocks_of(TWO + 1)), "labels that are not among the 2 classes"),
    "fewer labels": (lambda: (blocks_of(X), blocks_of(TWO[:-1], (599,))), "inconsistent numbers of samples"),
    "two columns of labels": (lambda: (blocks_of(X), da.zeros((ROWS, 2))), "must have one label for each row"),
    "one dimension": (lambda: (da.zeros(9), TWO), "got a Dask array of 1 dimensions: X.reshape"),
    "no columns": (lambda: (da.zeros((9, 0)), TWO), "0 feature"),
    "no rows": (lambda: (blocks_of(X)[:0], TWO[:0]), "X holds no rows in any of its blocks"),
    "bag": (lambda: (dask.bag.from_sequence([1, 2]), TWO), "X is a Dask Bag: give a dask.array"),
    "no labels": (lambda: (blocks_of(X), None), "requires y to be passed"),
    "a graph that fails": (
        lambda: (blocks_of(X).map_blocks(failing, meta=np.zeros((0, 4))), TWO),
        "a block of X or y could not be computed .RuntimeError.",
    ),
    "a block of other columns": (
        lambda: (blocks_of(X).map_blocks(lambda block: block[:, :2], meta=np.zeros((0, 4))), TWO),
        "a block of X has 2 columns, and X has 4",
    ),
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    def test_in_one_line_without_a_value(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        given, told = REFUSED[name]
        ledger = Ledger()
        with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match=told) as caught:
            logistic(ledger=ledger).fit(*given())
        assert "\n" not in str(caught.value).strip()
        assert str(SECRET) not in str(caught.value) + caplog.text
        assert not ledger.entries()  # nothing is charged

    def test_batches_from_all_over_the_data(self) -> None:
        with pytest.raises(OptionError, match=r"solver output takes batches of 50 rows .* use gd or auto, or give a"):
            logistic(solver="output", max_iter=None).fit(blocks_of(X), blocks_of(TWO))

    def test_more_labels_than_classes_can_be(self) -> None:
        many = da.arange(20_001, chunks=20_001)
        with pytest.raises(DataError, match="y holds more than 10,000 different labels"):
            logistic(classes=None).fit(da.zeros((20_001, 1), chunks=(20_001, 1)), many)


class TestPredictions:
    def test_are_lazy_and_those_of_rows_in_memory(self) -> None:
        reads: list[int] = []
        model = logistic(classes=["no", "yes"], ledger=Ledger()).fit(X, np.where(TWO, "yes", "no"))
        for method in (model.predict, model.predict_proba, model.predict_log_proba, model.decision_function):
            found = method(counted(reads))
            assert isinstance(found, da.Array)
            assert found.chunks[0] == BLOCKS
            assert not reads
            assert found.dtype == method(X).dtype
            assert found.shape == method(X).shape
            computed = found.compute()
            assert (computed == method(X)).all() if computed.dtype.kind == "U" else np.allclose(computed, method(X))
            reads.clear()

    def test_of_a_data_frame_with_an_empty_block(self) -> None:
        frame = pd.DataFrame(X, columns=list("abcd"))
        lazy = dd.from_pandas(frame, npartitions=4)
        model = made("DPLinearRegression", data_norm=2.0, target_bounds=(-5, 5)).fit(frame, NUMBERS)
        later = lazy.assign(row=da.arange(ROWS, chunks=150))
        found = model.predict(later[later["row"] >= 300][list("abcd")]).compute()
        np.testing.assert_allclose(found, model.predict(frame[300:]))
        with pytest.raises(ValueError, match="feature names"):
            model.predict(lazy.rename(columns={"a": "z"}))

    @pytest.mark.parametrize("name", ["gd", "squares", "counts"])
    def test_score(self, name: str) -> None:
        kind, labels, options = FITS[name]
        model = made(kind, **options).fit(X, labels)
        wanted = model.score(X, labels)
        frame = dd.from_pandas(pd.DataFrame(X), npartitions=3).to_dask_array()  # of unknown sizes
        for rows, truth in ((blocks_of(X), blocks_of(labels)), (frame, labels), (X, blocks_of(labels))):
            assert model.score(rows, truth) == pytest.approx(wanted)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from dask.distributed import Client, LocalCluster

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "120s"}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, scheduler_port=0,
            worker_dashboard_address=None,
        ) as workers,
        Client(workers) as client,
    ):  # fmt: skip
        yield client


@pytest.mark.unmeasured
class TestCluster:
    """Dask's own cluster of two processes."""

    @pytest.mark.parametrize("name", ["gd, softmax", "sgd", "objective", "adassp"])
    def test_same_as_in_memory(self, cluster: Any, name: str) -> None:
        kind, labels, options = FITS[name]
        mine, theirs = made(kind, **options).fit(X, labels), made(kind, **options)
        with dask.config.set(scheduler="distributed"):
            theirs.fit(blocks_of(X), blocks_of(labels, (100, 500)))
            score = theirs.score(blocks_of(X), blocks_of(labels))
        np.testing.assert_allclose(theirs.coef_, mine.coef_, atol=1e-6 * np.abs(mine.coef_).max())
        assert score == pytest.approx(mine.score(X, labels), abs=1e-3)

    def test_both_workers_take_part(self, cluster: Any) -> None:
        seen = set(cluster.run(lambda: __import__("os").getpid()).values())
        assert len(seen) == 2

    def test_refusals_are_those_of_one_process(self, cluster: Any) -> None:
        with dask.config.set(scheduler="distributed"), pytest.raises(DataError, match="encode text") as caught:
            logistic().fit(with_value(f"v{SECRET}", object), TWO)
        assert str(SECRET) not in str(caught.value)
        logs = str(cluster.get_worker_logs()) + str(cluster.get_scheduler_logs())
        assert str(SECRET) not in logs
        with dask.config.set(scheduler="distributed"), pytest.raises(RuntimeError):  # what a task raises is in them
            blocks_of(X).map_blocks(failing, meta=np.zeros((0, 4))).compute()
        assert str(SECRET) in str(cluster.get_worker_logs())


# The peak is read from /proc where there is one: on Linux, what getrusage says begins with the peak of the process that
# started this one.
MEMORY = """
import os, re, resource, sys
import dask, dask.array as da, numpy as np
from dpgrad.convex import DPLogisticRegression

rows, columns, height = 1_000_000, 50, 20_000  # 400 MB in float64
def block(block_info=None):
    start = block_info[None]["array-location"][0][0]
    return np.sin(np.arange(start, start + height)[:, None] * 0.1 + np.arange(columns))
X = da.map_blocks(block, chunks=((height,) * (rows // height), (columns,)), dtype=float, meta=np.zeros((0, 0)))
model = DPLogisticRegression(classes=[False, True], solver="gd", max_iter=2, random_state=1)
dask.config.set(scheduler="synchronous")
def fit(rows):
    model.fit(rows, rows[:, 0] > 0)
fit(X[:height])  # imports, and all that does not grow
def peak():
    if os.path.exists("/proc/self/status"):
        return 1024 * int(re.search("VmHWM:\\s*([0-9]+)", open("/proc/self/status", encoding="utf-8").read())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
fit(X if sys.argv[1] == "lazy" else X.compute())
print((peak() - before) / (rows * columns * 8))
"""


@pytest.mark.parametrize("how", ["lazy", pytest.param("materialised", marks=pytest.mark.slow)])
def test_peak_memory_is_that_of_a_few_blocks(how: str) -> None:
    """Blocks hold 2 % of the rows. All rows, even in float32, would be half of them."""
    ran = subprocess.run([sys.executable, "-c", MEMORY, how], capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    grown = float(ran.stdout)
    assert grown < 0.25 if how == "lazy" else grown > 0.5
