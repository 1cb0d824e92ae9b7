"""Designs: what is applied implicitly equals rows transformed one by one, dense or sparse, in blocks or not."""

import math
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse

from dpgrad.convex import design as module
from dpgrad.convex.design import Design

Array = NDArray[np.float64]
ROWS, COLUMNS = 60, 9
RANDOM = np.random.default_rng(0)
CENTRE = RANDOM.standard_normal(COLUMNS) / 10
MAP = RANDOM.standard_normal((COLUMNS, 5))
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "normalised": {"rule": "normalise"},
    "intercept": {"intercept": 0.3},
    "centred": {"centre": CENTRE},
    "mapped": {"linear_map": MAP},
    "all": {"rule": "normalise", "intercept": 0.3, "centre": CENTRE, "linear_map": MAP},
}
RADIUS = 1.5


def matrix(dtype: type = np.float64) -> NDArray[Any]:
    """Rows shorter and longer than the radius, most entries zero, one row all zero."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((ROWS, COLUMNS)) * (random.random((ROWS, COLUMNS)) < 0.4)
    rows[7] = 0
    return rows.astype(dtype)


def explicit(
    rows: NDArray[Any],
    rule: str = "clip",
    intercept: float = 0.0,
    centre: Array | None = None,
    linear_map: Array | None = None,
) -> Array:
    """Each row transformed by itself, in plain words."""
    found = []
    for row in rows.astype(np.float64):
        length = np.linalg.norm(row)
        if length > RADIUS or (rule == "normalise" and length > 0):
            row = row * RADIUS / length
        if centre is not None:
            row = row - centre
        if linear_map is not None:
            row = row @ linear_map
        found.append(np.append(row, intercept) if intercept else row)
    return np.array(found)


FORMS = {"dense": np.asarray, "fortran": np.asfortranarray, "csr array": sparse.csr_array, "csr": sparse.csr_matrix}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("block", [1 << 20, 40], ids=["whole", "blocks"])
def test_products_equal_explicit_rows(
    form: Any, dtype: type, options: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    rows = matrix(dtype)
    wanted = explicit(rows, **options)
    design = Design(form(rows), radius=RADIUS, **options)
    random = np.random.default_rng(2)
    coefficients, residuals = random.standard_normal((wanted.shape[1], 3)), random.standard_normal((ROWS, 3))
    atol = 1e-5 if dtype == np.float32 else 1e-11
    assert (design.rows, design.features) == wanted.shape
    np.testing.assert_allclose(design.norms, np.linalg.norm(wanted, axis=1), rtol=1e-11, atol=1e-6)
    np.testing.assert_allclose(design.scores(coefficients), wanted @ coefficients, atol=atol)
    np.testing.assert_allclose(design.gathered(residuals), wanted.T @ residuals, atol=1e-11)  # whatever the precision

    def tanh(place: slice, scores: Array) -> Array:
        return np.tanh(scores) * residuals[place]

    whole = wanted.T @ (np.tanh(wanted @ coefficients) * residuals)
    np.testing.assert_allclose(design.summed(coefficients, tanh), whole, atol=2 * atol)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("chosen", [[3, 50, 7], list(range(ROWS)), []], ids=["some", "all", "none"])
def test_taken_rows(form: Any, options: dict[str, Any], chosen: list[int]) -> None:
    places = np.array(chosen, np.int64)
    wanted = explicit(matrix(), **options)[places]
    part = Design(form(matrix()), radius=RADIUS, **options).taken(places)
    coefficients = np.random.default_rng(3).standard_normal((wanted.shape[1], 2))
    assert part.rows == len(chosen)
    np.testing.assert_allclose(part.norms, np.linalg.norm(wanted, axis=1), rtol=1e-11, atol=1e-6)
    np.testing.assert_allclose(part.scores(coefficients), wanted @ coefficients, atol=1e-11)
    np.testing.assert_allclose(part.gathered(np.ones((len(chosen), 2)))[:, 0], wanted.sum(axis=0), atol=1e-11)


def test_strided_rows_are_read_in_place() -> None:
    rows = matrix()
    design = Design(rows[::-2, 1:], radius=RADIUS)
    coefficients = np.ones((COLUMNS - 1, 1))
    np.testing.assert_allclose(design.scores(coefficients), explicit(rows[::-2, 1:]) @ coefficients, atol=1e-12)


def test_blocks_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 7 * COLUMNS)
    places: list[slice] = []

    def note(place: slice, scores: Array) -> Array:
        places.append(place)
        return scores

    Design(matrix(), radius=1.0).summed(np.zeros((COLUMNS, 1)), note)
    assert [i for place in places for i in range(place.start, place.stop)] == list(range(ROWS))
    assert max(place.stop - place.start for place in places) == 7


class TestBounds:
    @given(st.integers(0, 2**32 - 1), st.floats(-17, 17), st.floats(1e-3, 1e3), st.sampled_from(["clip", "normalise"]))
    def test_no_row_is_longer_than_the_bound(self, seed: int, size: float, radius: float, rule: Any) -> None:
        random = np.random.default_rng(seed)
        rows = random.standard_normal((20, 4)) * 10**size * 10 ** random.uniform(-3, 0, (20, 1))
        plain = Design(rows, radius=radius, rule=rule)
        assert (plain.norms <= radius).all()
        assert plain.bound == radius
        if rule == "normalise":
            lengths = np.linalg.norm(rows, axis=1)
            np.testing.assert_allclose(plain.norms, np.where(lengths > 1e-18, radius, 0), rtol=2e-12)
        both = Design(rows, radius=radius, rule=rule, centre=CENTRE[:4], linear_map=MAP[:4], intercept=0.5)
        assert (both.norms <= both.bound * (1 + 1e-12)).all()

    def test_bound_is_attained(self) -> None:
        rows = np.array([[-3.0, -4.0]])
        design = Design(rows, radius=1.0, centre=[0.3, 0.4], linear_map=[[2.0, 0.0], [0.0, 2.0]], intercept=4.0)
        assert design.bound == pytest.approx(5.0)
        assert design.norms[0] == pytest.approx(5.0)

    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    def test_norms_are_never_below_the_true_ones(self, form: Any) -> None:
        """Also where a row all but equals the centre and ‖x‖² − 2x·c + ‖c‖² cancels."""
        random = np.random.default_rng(4)
        centre = random.standard_normal(200)
        gaps = 10.0 ** random.uniform(-16, 0, (100, 1))
        rows = centre + gaps * random.standard_normal((100, 200))
        rows[0] = centre
        true = np.linalg.norm(rows.astype(np.longdouble) - centre, axis=1)
        found = Design(form(rows), radius=1e3, centre=centre).norms
        assert (found >= true * (1 - 1e-12)).all()
        assert (found <= true + 1e-5).all()

    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    def test_rows_at_the_edge_of_floating_point(self, form: Any) -> None:
        rows = np.array([[1e-20, 0.0], [3e-18, 4e-18], [3e17, 4e17]], np.float32)
        design = Design(form(rows), radius=1.0, rule="normalise")
        assert design.norms.round(6).tolist() == [0.0, 1.0, 1.0]
        np.testing.assert_allclose(design.scores(np.eye(2)), [[0, 0], [0.6, 0.8], [0.6, 0.8]], rtol=1e-6)
        np.testing.assert_allclose(design.gathered(np.ones((3, 1))), [[1.2], [1.6]], rtol=1e-6)

    @pytest.mark.parametrize("rule", ["clip", "normalise"])
    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    @pytest.mark.parametrize(("dtype", "most"), [(np.float32, 3.4e38), (np.float64, 1.7e308)])
    def test_finite_rows_are_never_too_long(self, dtype: type, most: float, form: Any, rule: Any) -> None:
        """An error would tell of a row what a guarantee says is hidden; directions are kept, the caller's rows too."""
        rows = matrix(dtype)
        rows[3] = [most, 0, -most, most / 4, 0, 0, most / 2, 1, most]
        rows[40] = np.where(np.arange(COLUMNS) == 5, 2e18, 0)
        before = rows.copy()
        given = form(rows)
        with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
            warnings.simplefilter("error")
            design = Design(given, radius=2.0, rule=rule, intercept=1.0, centre=CENTRE)
            scores = design.scores(np.full((COLUMNS + 1, 1), 1e3))
            total = design.gathered(np.ones((ROWS, 1)))
        unit = rows.copy()
        unit[3] = np.array([1, 0, -1, 0.25, 0, 0, 0.5, 0, 1]) * 100
        unit[40] = rows[40] / 1e18
        other = Design(form(unit), radius=2.0, rule=rule, intercept=1.0, centre=CENTRE)
        np.testing.assert_allclose(scores, other.scores(np.full((COLUMNS + 1, 1), 1e3)), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(total, other.gathered(np.ones((ROWS, 1))), atol=1e-5)
        np.testing.assert_allclose(design.norms, other.norms, rtol=1e-6)
        np.testing.assert_array_equal(rows, before)
        np.testing.assert_array_equal(given.toarray() if sparse.issparse(given) else given, before)

    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    def test_rows_beyond_the_longest_get_its_length(self, form: Any) -> None:
        rows = np.array([[3.0, 4.0], [3e300, -4e300], [0.0, 2e18]])
        found, lengths = module.shortened(form(rows))
        np.testing.assert_allclose(lengths, [5, 1e18, 1e18], rtol=1e-12)
        np.testing.assert_allclose(found @ np.eye(2), [[3, 4], [6e17, -8e17], [0, 1e18]], rtol=1e-12)


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most bytes that were held at once beyond those held at the start."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


class TestMemory:
    """Beside the input, less than the input is held: the whole stays below twice the input."""

    @pytest.mark.parametrize(
        "options", [{}, {"centre": np.ones(300) / 100, "intercept": 1.0}], ids=["plain", "centred"]
    )
    def test_dense(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_BLOCK", 1 << 17)
        rows = np.random.default_rng(5).standard_normal((20_000, 300)).astype(np.float32)
        with peak() as held:
            design = Design(rows, radius=1.0, rule="normalise", **options)
            design.summed(np.ones((design.features, 7)), lambda _, scores: np.tanh(scores))
        assert held[0] < 0.25 * rows.nbytes

    def test_sparse_is_never_made_dense(self) -> None:
        rows = sparse.random_array((20_000, 30_000), density=3e-3, format="csr", dtype=np.float32, rng=6)
        size = rows.data.nbytes + rows.indices.nbytes + rows.indptr.nbytes
        with peak() as held:
            design = Design(rows, radius=1.0, centre=np.full(30_000, 1e-3), intercept=1.0)
            design.summed(np.ones((design.features, 1)), lambda _, scores: np.tanh(scores))
        assert held[0] < size

    def test_sparse_with_a_map(self) -> None:
        rows = sparse.random_array((40_000, 400), density=0.1, format="csr", dtype=np.float64, rng=7)
        size = rows.data.nbytes + rows.indices.nbytes + rows.indptr.nbytes
        with peak() as held:
            Design(rows, radius=1.0, linear_map=np.eye(400), centre=np.ones(400) / 400)
        assert held[0] < size < 0.2 * 8 * 40_000 * 400


class TestRefusals:
    @pytest.mark.parametrize("rows", [np.ones((2, 2)), sparse.csr_array(np.ones((2, 2)))], ids=["dense", "sparse"])
    def test_no_bound(self, rows: Any) -> None:
        with pytest.raises(ValueError, match=r"^radius is required: a bound on the norm of every row, chosen without"):
            Design(rows)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
    def test_numbers_that_are_not_finite(self, form: Any, dtype: type, bad: float) -> None:
        rows = matrix(dtype)
        rows[11, 3] = bad
        with pytest.raises(ValueError, match=r"^rows must hold finite numbers only$"):
            Design(form(rows), radius=1.0)

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
    def test_nothing(self, shape: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match=r"^rows must hold at least one row and one column, got shape"):
            Design(np.empty(shape), radius=1.0)
        with pytest.raises(ValueError, match=r"^rows must hold at least one row and one column, got shape"):
            Design(sparse.csr_array(shape), radius=1.0)

    @pytest.mark.parametrize("rows", [np.ones(3), np.float64(1.0), np.ones((2, 2, 2)), [1.0, 2.0]], ids=repr)
    def test_dimensions(self, rows: Any) -> None:
        with pytest.raises(ValueError, match=r"^rows must have two dimensions, got shape"):
            Design(rows, radius=1.0)

    @pytest.mark.parametrize(
        "dtype", [np.int64, np.uint8, bool, np.float16, np.complex128, object, "U3", np.longdouble]
    )
    def test_kinds_of_number(self, dtype: Any) -> None:
        with pytest.raises(ValueError, match=r"^rows must be float32 or float64, got"):
            Design(np.ones((2, 2)).astype(dtype), radius=1.0)

    def test_kinds_of_sparse_number(self) -> None:
        with pytest.raises(ValueError, match=r"^rows must be float32 or float64, got int64"):
            Design(sparse.csr_array(np.ones((2, 2), np.int64)), radius=1.0)

    @pytest.mark.parametrize("form", ["csc", "coo", "lil", "dok", "bsr", "dia"])
    def test_sparse_formats(self, form: str) -> None:
        with pytest.raises(ValueError, match=rf"^sparse rows must be in CSR format, got {form}: convert"):
            Design(sparse.csr_array(np.eye(3)).asformat(form), radius=1.0)

    def test_duplicates_would_hide_the_norm(self) -> None:
        twice = sparse.csr_array((np.array([1.0, 1.0]), np.array([0, 0]), np.array([0, 2])), shape=(1, 2))
        twice.has_canonical_format = True  # what a caller says is not believed
        with pytest.raises(ValueError, match=r"^sparse rows hold duplicate or unsorted entries: call"):
            Design(twice, radius=9.0)
        clean = sparse.csr_array((np.array([1.0, 1.0]), np.array([0, 0]), np.array([0, 2])), shape=(1, 2))
        clean.sum_duplicates()
        assert Design(clean, radius=9.0).norms.tolist() == [2.0]

    def test_entries_outside_the_matrix(self) -> None:
        broken = sparse.csr_array(np.eye(3))
        broken.indices[1] = 77
        with pytest.raises(ValueError, match=r"^sparse rows are not a valid CSR matrix: "):
            Design(broken, radius=1.0)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"radius": 0.0}, "radius must be positive and finite, got 0.0"),
            ({"radius": math.inf}, "radius must be positive and finite, got inf"),
            ({"radius": "1"}, "radius must be a number, got '1'"),
            ({"rule": "scale"}, "rule must be one of clip, normalise, got 'scale'"),
            ({"intercept": -1.0}, "intercept must be zero or more and finite"),
            ({"centre": [1.0]}, r"centre must have shape \(3\), got \(1,\)"),
            ({"centre": [1.0, math.nan, 1.0]}, "centre must hold finite numbers only"),
            ({"linear_map": np.ones((2, 3))}, r"linear_map must have shape \(3, any\), got \(2, 3\)"),
            ({"linear_map": np.ones((3, 0))}, r"linear_map must have shape \(3, any\), got \(3, 0\)"),
            ({"linear_map": np.full((3, 3), math.inf)}, "linear_map must hold finite numbers only"),
        ],
        ids=str,
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Design(np.ones((2, 3)), **{"radius": 1.0, **options})

    def test_products_of_another_shape(self) -> None:
        design = Design(np.ones((2, 3)), radius=1.0, intercept=1.0)
        with pytest.raises(ValueError, match=r"coefficients must have shape \(4, outputs\), got \(3, 1\)"):
            design.scores(np.ones((3, 1)))
        with pytest.raises(ValueError, match=r"coefficients must have shape \(4, outputs\), got \(4,\)"):
            design.scores(np.ones(4))
        with pytest.raises(ValueError, match=r"residuals must have shape \(2, outputs\), got \(3, 1\)"):
            design.gathered(np.ones((3, 1)))


class TestThreads:
    def test_products_run_on_one_thread_and_leave_the_rest_as_it_was(self) -> None:
        design = Design(np.ones((8, 2)), radius=2.0)
        pools = threadpoolctl.ThreadpoolController().select(user_api="blas")
        seen: list[int] = []

        def watched(rows: slice, scores: Array) -> Array:
            seen.extend(pool.num_threads for pool in pools.lib_controllers)
            return scores

        with pools.limit(limits=2):
            before = [pool.num_threads for pool in pools.lib_controllers]
            design.summed(np.ones((2, 1)), watched)
            assert [pool.num_threads for pool in pools.lib_controllers] == before
        assert seen
        assert set(seen) == {1}
