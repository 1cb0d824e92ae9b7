"""Sums over blocks of rows: bounded, of fixed order, and those of rows in memory."""

import sys
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.convex.chunked import ChunkedDesign, checked
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Logistic, Softmax, Squared
from dpgrad.convex.opened import opened
from dpgrad.convex.passes import computed, total
from dpgrad.convex.solvers import auto, gd

LOSSES = {"logistic": Logistic(), "softmax": Softmax(3), "squared": Squared(2.0)}


def read(block: Any, labels: Any) -> tuple[Any, Any]:
    return np.asarray(block, np.float32), labels


def in_blocks(rows: Any, labels: Any, sizes: tuple[int, ...], **options: Any) -> tuple[ChunkedDesign, Any]:
    chunks, held = opened(da.from_array(rows, chunks=(sizes, (rows.shape[1],))), labels, read)
    return ChunkedDesign(chunks, **options), held


def targets_of(loss: Any, rows: int, random: np.random.Generator) -> Any:
    if isinstance(loss, Softmax):
        return random.integers(0, 3, rows)
    return random.choice([-1.0, 1.0], rows)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**32), clip=st.sampled_from([1e-3, 0.3, 2.0]), scale=st.sampled_from([1e-3, 1.0, 1e15]))
def test_one_row_moves_the_clipped_sum_by_at_most_the_sensitivity(
    name: str, seed: int, clip: float, scale: float
) -> None:
    loss: Any = LOSSES[name]
    random, sizes = np.random.default_rng(seed), (3, 1, 5)
    rows, labels = random.standard_normal((9, 2)) * scale, targets_of(loss, 9, random)
    weights = random.standard_normal((3, loss.outputs)) * 10
    place = int(random.integers(9))
    other, relabelled = rows.copy(), labels.copy()
    other[place], relabelled[place] = random.standard_normal(2) * scale * 1e3, targets_of(loss, 1, random)[0]

    def summed(rows: Any, labels: Any) -> Any:
        design, held = in_blocks(rows, labels, sizes, radius=2.0, intercept=1.0)
        return gd.clipped_sum(design, checked(loss, held, 9), loss, weights, clip)

    first = summed(rows, labels)
    assert np.linalg.norm(summed(other, relabelled) - first) <= 2 * clip
    memory = Design(rows.astype(np.float32), radius=2.0, intercept=1.0).precise()
    np.testing.assert_allclose(first, gd.clipped_sum(memory, labels, loss, weights, clip), atol=1e-9 * clip)


def test_releases_before_a_descent_are_those_of_rows_in_memory() -> None:
    rows = np.random.default_rng(1).standard_normal((50, 3))
    design, _ = in_blocks(rows, None, (20, 30), radius=1.0)
    memory = Design(rows.astype(np.float32), radius=1.0)
    np.testing.assert_allclose(auto.mean_row(design), auto.mean_row(memory), atol=1e-12)
    np.testing.assert_allclose(auto.second_moment(design), auto.second_moment(memory), atol=1e-12)
    assert (design.rows, design.features, design.bound, design.slack) == (50, 3, memory.bound, memory.slack)


def test_slack_covers_the_rounding_of_many_rows() -> None:
    design, _ = in_blocks(np.ones((2, 1)), None, (2,), radius=1.0)
    assert design.slack == 1e-6
    design._chunks = type("Many", (), {"shape": (2**40, 1)})()  # type: ignore[assignment]
    assert design.slack == 2.0**-9


def test_parts_are_added_in_the_order_of_the_blocks() -> None:
    parts = [np.array([value]) for value in (1e16, 1.0, -1e16, 1.0) * 20]
    wanted = total([dask.delayed(np.copy)(part) for part in parts])
    with dask.config.set(scheduler="threads", num_workers=8):
        assert all((total([dask.delayed(np.copy)(part) for part in parts]) == wanted).all() for _ in range(3))


def test_rows_chosen_are_those_of_their_blocks() -> None:
    rows = np.arange(12.0).reshape(6, 2)
    chunks, _ = opened(da.from_array(rows, chunks=(2, 2)), None, read)
    for chosen in ([0, 3, 5], [4], [], list(range(6))):
        found = chunks.added(partial(_row_sum), rows=np.array(chosen, np.int64))
        assert found.tolist() == rows[chosen].sum(axis=0).tolist()


def _row_sum(block: Any, labels: Any) -> Any:
    return block.sum(axis=0)


def test_without_tasks_dask_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional: scores of rows in memory must not need it."""
    monkeypatch.setitem(sys.modules, "dask", None)
    assert computed([]) == []
