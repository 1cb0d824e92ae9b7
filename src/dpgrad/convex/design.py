"""The rows of a linear model as solvers see them: bounded by a public rule, never copied, never made dense.

The caller's matrix stays as it is. The effect of a public rule is kept separately and applied inside the products:
row i becomes ((fᵢ·xᵢ − c)·M, b), where fᵢ brings the norm of xᵢ within the radius R, c is a centre, M a linear map and
b the constant of the intercept. Solvers need three things of it: scores, sums of rows weighted by residuals, and norms.

>>> import numpy as np
>>> design = Design(np.array([[3.0, 4.0], [0.3, 0.4]]), radius=1.0, intercept=1.0)
>>> design.norms.round(6).tolist(), round(design.bound, 6)
([1.414214, 1.118034], 1.414214)
>>> design.scores(np.array([[1.0], [1.0], [0.0]])).round(6).tolist()
[[1.4], [0.7]]
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from dpgrad import _validate
from dpgrad.convex.losses import Array
from dpgrad.errors import DataError, OptionError

__all__ = [
    "CompensatedSum", "Design", "Matrix", "Part", "Rows", "Rule", "blocks", "factors", "quiet", "shortened",
    "single_threaded",
]  # fmt: skip

Rule: TypeAlias = Literal["clip", "normalise"]
Matrix: TypeAlias = Any  # a dense array or a scipy CSR array: scipy has no types
Part: TypeAlias = "Callable[[Design, Any], Array]"  # what some rows and their targets add to a sum over all
_LEAST, _MOST = 1e-18, 1e18  # norms of rows that survive a product in float32
_BLOCK = 1 << 17  # numbers in a block of rows
_HEIGHT = 1 << 11  # rows in a block: summing h numbers in float64 errs by h²·2⁻⁵³ of the largest
_SHRINK = 1 - 1e-12  # what rounding may add to a norm
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def quiet(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorate a function of private rows: numpy neither warns nor raises there, whatever ``np.seterr`` asks for.

    A warning or an error of numpy depends on the values: by ``np.seterr(under="raise")`` one row that holds 1e-45 would
    stop a fit.

    >>> with np.errstate(all="raise"):
    ...     quiet(np.square)(np.float32(1e-45)).item()
    0.0
    """

    @functools.wraps(function)
    def unheard(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return unheard


@functools.cache
def _pools() -> Any:
    """The threads of numpy's matrix products."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Matrix products on one thread each, for the time of a ``with`` block.

    >>> with single_threaded():
    ...     scores = np.ones((2, 2)) @ np.ones((2, 2))
    """
    pools = _pools()
    if all(pool.num_threads == 1 for pool in pools.lib_controllers):  # setting it takes longer than asking
        yield
        return
    with pools.limit(limits=1):
        yield


def _on_one_thread(
    product: "Callable[Concatenate[Design, _Given], Array]",
) -> "Callable[Concatenate[Design, _Given], Array]":
    """The product on one thread: blocks are too small to share, and on a busy machine sharing takes ten times as long.

    The order of its sums then does not depend on the machine, so one key gives one result.
    """

    @functools.wraps(product)
    @quiet
    def pinned(design: "Design", /, *args: _Given.args, **kwargs: _Given.kwargs) -> Array:
        with single_threaded():
            return product(design, *args, **kwargs)

    return pinned


class Rows(Protocol):
    """What a solver asks of rows, in memory (`Design`) or in blocks (`chunked.ChunkedDesign`): sums over all of them.

    >>> Rows.added.__name__
    'added'
    """

    @property
    def rows(self) -> int:
        """How many rows there are."""

    @property
    def features(self) -> int:
        """How many coefficients an output has, the intercept among them."""

    @property
    def radius(self) -> float:
        """The norm that rows are clipped or normalised to."""

    @property
    def intercept(self) -> float:
        """The constant of the last column, 0 for none."""

    @property
    def bound(self) -> float:
        """No row is longer, whatever the data."""

    @property
    def slack(self) -> float:
        """What rounding may add to one row's part in a sum, relative to its bound."""

    @property
    def accuracy(self) -> float:
        """How far, relative to the largest, rounding may carry scores."""

    def precise(self) -> "Rows":
        """The same rows with scores in float64."""

    def added(self, part: Part, targets: Any = None, rows: NDArray[np.int64] | None = None) -> Array:
        """The sum over all rows, or over those chosen, of what ``part`` computes of some and their targets."""


class Design:
    """Rows of norm at most ``radius`` by a public rule, with an optional centre, linear map and intercept.

    ``rows`` is a dense array of float32 or float64, or a CSR matrix of them. The rule ``"clip"`` scales longer rows to
    the radius, ``"normalise"`` scales every row to it, where a row shorter than 1e-18 counts as zero. By either rule a
    row longer than 1e18 counts as one of that length (`shortened`). ``intercept`` is the constant b of a last column, 0
    for none. Coefficients have shape (features, outputs), the intercept last.

    Scores run in the precision of the matrix over blocks of rows. Sums run in float64 whatever the matrix holds, since
    in float32 what one row adds decides how all others are rounded.

    Guarantee: what happens to a row depends on that row and on public numbers alone, so rows that differ in one place
    before it differ in one place after it. ``radius``, ``intercept``, ``centre`` and ``linear_map`` must be public or
    released with their own charge; the number of columns is taken as public. The norms are read once: the matrix must
    not change while the design is in use.

    >>> Design([[3.0, 4.0]])
    Traceback (most recent call last):
    dpgrad.errors.OptionError: radius is required: a bound on the norm of every row, chosen without looking at the data
    """

    @quiet
    def __init__(
        self,
        rows: ArrayLike | Matrix,
        *,
        radius: float | None = None,
        rule: Rule = "clip",
        intercept: float = 0.0,
        centre: ArrayLike | None = None,
        linear_map: ArrayLike | None = None,
    ) -> None:
        if radius is None:
            raise OptionError(
                "radius is required: a bound on the norm of every row, chosen without looking at the data"
            )
        _validate.positive(radius=radius)
        _validate.non_negative(intercept=intercept)
        _validate.one_of(get_args(Rule), rule=rule)
        self._matrix, lengths = shortened(_matrix(rows))
        self._dtype = self._matrix.dtype  # of products
        columns = self._matrix.shape[1]
        self.radius, self.intercept = float(radius), float(intercept)
        self._centre = None if centre is None else _finite("centre", centre, (columns,))
        self._map = None if linear_map is None else _finite("linear_map", linear_map, (columns, None))
        self._factors = factors(lengths, self.radius, rule)
        self._blocks = tuple(blocks(self._matrix))
        self._known: dict[tuple[Any, bytes], Array] = {}
        self.norms = np.hypot(self._mapped_norms(lengths * self._factors), self.intercept)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._matrix.shape[0])

    @property
    def features(self) -> int:
        """How many coefficients an output has, the intercept among them."""
        width: int = self._matrix.shape[1] if self._map is None else self._map.shape[1]
        return width + (self.intercept > 0)

    @property
    def bound(self) -> float:
        """No row is longer, whatever the data: √(((R + ‖c‖)·‖M‖)² + b²)."""
        reach = self.radius + (0.0 if self._centre is None else float(np.linalg.norm(self._centre)))
        stretch = 1.0 if self._map is None else float(np.linalg.norm(self._map, 2))
        return math.hypot(reach * stretch, self.intercept)

    @property
    def slack(self) -> float:
        """What rounding may add to one row's part in a sum, relative to its bound: bounds are lowered by it.

        Blocks of h rows in float64, themselves added with compensation, err by less than (h² + 4n)·2⁻⁵³ of the longest
        summand: 1e-9 for a million rows. A linear map lengthens that by its norm in the same units.

        >>> Design(np.ones((1, 2), np.float32), radius=1.0).slack
        1e-06
        """
        return 1e-6

    @property
    def accuracy(self) -> float:
        """How far, relative to the largest, rounding may carry scores and what is computed from them.

        >>> Design(np.ones((1, 2), np.float32), radius=1.0).accuracy
        1e-06
        """
        return 1e-6 if self._dtype == np.float32 else 1e-10

    def precise(self) -> "Design":
        """The same rows with scores in float64 whatever the matrix holds, converted block by block.

        >>> Design(np.ones((1, 2), np.float32), radius=1.0).precise().accuracy
        1e-10
        """
        same = copy.copy(self)
        same._dtype = np.dtype(np.float64)
        return same

    @_on_one_thread
    def scores(self, coefficients: Array) -> Array:
        """Each row times the coefficients: (n, outputs).

        >>> Design([[1.0, 2.0]], radius=9.0, centre=[1.0, 1.0]).scores(np.array([[5.0], [7.0]])).tolist()
        [[7.0]]
        """
        weights, shift = self._unfolded(coefficients)
        found = np.empty((self.rows, weights.shape[1]))
        for place, block in self._blocks:
            found[place] = self._block_scores(place, block, weights, shift)
        return found

    def recalled(self, coefficients: Array) -> Array:
        """`scores`, of which the last two are kept: a line search asks for the same ones again.

        >>> design = Design([[1.0, 2.0]], radius=9.0)
        >>> design.recalled(np.ones((2, 1))) is design.recalled(np.ones((2, 1)))
        True
        """
        name = self._dtype, coefficients.tobytes()
        if name not in self._known:
            found = self.scores(coefficients)
            while len(self._known) > 1:
                del self._known[next(iter(self._known))]
            self._known[name] = found
        return self._known[name]

    @quiet
    def added(self, part: Part, targets: Any = None, rows: NDArray[np.int64] | None = None) -> Array:
        """The sum over all rows, or over those chosen, of what ``part`` computes of some rows and their targets.

        Rows in memory are one such part; a solver that asks for its sums in this way also runs on rows in blocks.

        >>> design = Design([[1.0], [2.0]], radius=9.0)
        >>> design.added(lambda part, targets: part.gathered(targets[:, None]), np.array([1.0, 3.0])).tolist()
        [[7.0]]
        """
        if rows is None:
            return part(self, targets)
        return part(self.taken(rows), None if targets is None else targets[rows])

    @_on_one_thread
    def gathered(self, residuals: Array) -> Array:
        """The sum of all rows, each times its residual: Xᵀr, (features, outputs).

        >>> Design([[1.0, 2.0], [0.0, 1.0]], radius=9.0).gathered(np.array([[1.0], [-1.0]])).tolist()
        [[1.0], [1.0]]
        """
        if residuals.ndim != 2 or len(residuals) != self.rows:
            raise OptionError(f"residuals must have shape ({self.rows}, outputs), got {residuals.shape}")
        return self._sum(residuals.shape[1], ((p, block, residuals[p]) for p, block in self._blocks))

    @_on_one_thread
    def summed(self, coefficients: Array, residuals_of: Callable[[slice, Array], Array]) -> Array:
        """`gathered` of residuals that are computed block by block from the places and scores of the block's rows.

        Nothing of the size of all scores is held.

        >>> design = Design([[1.0, 2.0], [0.0, 1.0]], radius=9.0)
        >>> design.summed(np.array([[1.0], [0.0]]), lambda rows, scores: scores - 1).tolist()
        [[0.0], [-1.0]]
        """
        weights, shift = self._unfolded(coefficients)
        parts = ((p, b, residuals_of(p, self._block_scores(p, b, weights, shift))) for p, b in self._blocks)
        return self._sum(weights.shape[1], parts)

    def taken(self, chosen: NDArray[np.int64]) -> "Design":
        """The design of the chosen rows alone, which may be none.

        >>> Design([[1.0], [2.0], [3.0]], radius=9.0).taken(np.array([2, 0])).norms.tolist()
        [3.0, 1.0]
        """
        part = copy.copy(self)
        part._matrix = self._matrix[chosen]
        part._factors, part.norms = self._factors[chosen], self.norms[chosen]
        part._blocks, part._known = tuple(blocks(part._matrix)), {}
        return part

    def _unfolded(self, coefficients: Array) -> tuple[NDArray[Any], Array]:
        """What the raw columns are multiplied with, and what is added to every score."""
        if coefficients.ndim != 2 or len(coefficients) != self.features:
            raise OptionError(f"coefficients must have shape ({self.features}, outputs), got {coefficients.shape}")
        weights, last = (coefficients[:-1], coefficients[-1]) if self.intercept else (coefficients, 0.0)
        weights = weights if self._map is None else self._map @ weights
        shift = self.intercept * np.asarray(last) - (0.0 if self._centre is None else self._centre @ weights)
        return weights.astype(self._dtype), np.asarray(shift)

    def _block_scores(self, place: slice, block: Matrix, weights: NDArray[Any], shift: Array) -> Array:
        # one output after the other in memory: what follows reduces over a few outputs of many rows
        by_output = np.multiply((block @ weights).T, self._factors[place], order="C", dtype=np.float64)
        by_output += shift.reshape(-1, 1)
        return np.asarray(by_output.T)

    def _sum(self, outputs: int, parts: Iterable[tuple[slice, Matrix, Array]]) -> Array:
        by_output, ones = CompensatedSum((outputs, self._matrix.shape[1])), CompensatedSum((outputs,))
        for place, block, residuals in parts:
            precise = block if sparse.issparse(block) else block.astype(np.float64, copy=False)
            by_output.add(np.multiply(residuals.T, self._factors[place]) @ precise)
            ones.add(residuals.sum(axis=0))
        total = by_output.total.T
        if self._centre is not None:
            total -= self._centre[:, None] * ones.total
        if self._map is not None:
            total = self._map.T @ total
        return np.vstack([total, self.intercept * ones.total]) if self.intercept else total

    def _mapped_norms(self, lengths: Array) -> Array:
        """The norms of the rows after the centre and the map, before the intercept; never below the true ones."""
        centre, linear_map = self._centre, self._map
        if linear_map is None:
            if centre is None:
                return lengths
            if sparse.issparse(self._matrix):  # x − c would be dense: ‖x‖² − 2x·c + ‖c‖², and what rounding took
                cross = self._factors * np.concatenate([block @ centre for _, block in self._blocks])
                reach = float(np.linalg.norm(centre))
                squares = lengths**2 - 2 * cross + reach**2 + 1e-13 * (lengths + reach) ** 2
                return np.asarray(np.sqrt(np.maximum(squares, 0)))
        shift = np.zeros(1) if centre is None else centre if linear_map is None else centre @ linear_map
        width = self._matrix.shape[1] if linear_map is None else max(linear_map.shape)
        found = np.empty(self.rows)
        for place, block in blocks(self._matrix, width):
            rows = block.astype(np.float64)
            mapped = self._factors[place, None] * (rows if linear_map is None else rows @ linear_map) - shift
            found[place] = np.sqrt(np.einsum("ij,ij->i", mapped, mapped))
        return found


class CompensatedSum:
    """A sum of arrays that errs by 2⁻⁵² of their norms, however many there are (Kahan 1965).

    >>> total = CompensatedSum((1,))
    >>> for _ in range(10):
    ...     total.add(np.array([0.1]))
    >>> float(total.total[0]), sum([0.1] * 9) + 0.1
    (1.0, 0.9999999999999999)
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total, self._lost = np.zeros(shape), np.zeros(shape)

    def add(self, part: Array) -> None:
        part = part - self._lost
        grown = self.total + part
        self._lost = (grown - self.total) - part
        self.total = grown


def _matrix(rows: ArrayLike | Matrix) -> Matrix:
    """The rows as a dense array or as a CSR array that shares their memory; refused where they are anything else."""
    found = _csr(rows) if sparse.issparse(rows) else _dense(rows)
    if found.ndim != 2:
        raise DataError(f"rows must have two dimensions, got shape {found.shape}: one row is rows.reshape(1, -1)")
    if 0 in found.shape:
        raise DataError(f"rows must hold at least one row and one column, got shape {found.shape}")
    if found.dtype not in (np.float32, np.float64):
        raise DataError(f"rows must be float32 or float64, got {found.dtype}: convert them, rows.astype(np.float32)")
    return found


def _dense(rows: ArrayLike) -> NDArray[Any]:
    """An array as it is; anything else in float64, since numpy would choose a type by all of its values."""
    if isinstance(rows, np.ndarray):
        return rows
    try:
        return np.asarray(rows, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise DataError("rows must be an array of numbers, or rows of numbers, all of one length") from None


def _csr(rows: Matrix) -> Matrix:
    if rows.format != "csr":
        raise DataError(f"sparse rows must be in CSR format, got {rows.format}: convert them, rows.tocsr()")
    try:
        # a new array, since the caller's may hold a flag that is no longer true; it shares the memory
        found = sparse.csr_array((rows.data, rows.indices, rows.indptr), shape=rows.shape)
        found.check_format(full_check=True)
    except ValueError as error:
        raise DataError(f"sparse rows are not a valid CSR matrix: {error}") from None
    if not found.has_canonical_format:
        raise DataError("sparse rows hold duplicate or unsorted entries: call rows.sum_duplicates() first")
    return found


def _finite(name: str, values: ArrayLike, shape: tuple[int | None, ...]) -> Array:
    """``values`` in float64, of a given shape (None: any length of at least one), all finite."""
    found = np.asarray(values, np.float64)
    right = len(shape) == found.ndim and all(a and b in (a, None) for a, b in zip(found.shape, shape, strict=True))
    if not right:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise DataError(f"{name} must have shape ({wanted}), got {found.shape}")
    if not np.isfinite(found).all():
        raise DataError(f"{name} must hold finite numbers only")
    return found


def blocks(matrix: Matrix, width: int | None = None) -> Iterator[tuple[slice, Matrix]]:
    """Views of neighbouring rows and their places; ``width``, the numbers that a row takes, decides how many.

    >>> [(place.start, place.stop) for place, _ in blocks(np.zeros((5000, 1)))]
    [(0, 2048), (2048, 4096), (4096, 5000)]
    """
    width = _width(matrix) if width is None else width
    height = min(max(1, _BLOCK // max(1, width)), _HEIGHT)
    for start in range(0, matrix.shape[0], height):
        place = slice(start, min(start + height, matrix.shape[0]))
        yield place, _view(matrix, place) if sparse.issparse(matrix) else matrix[place]


def _view(matrix: Matrix, place: slice) -> Matrix:
    """Rows of a CSR array that share its memory, which slicing and the constructor would copy."""
    pointers = matrix.indptr[place.start : place.stop + 1]
    held = slice(pointers[0], pointers[-1])
    view = sparse.csr_array((len(pointers) - 1, matrix.shape[1]), dtype=matrix.dtype)
    view.data, view.indices, view.indptr = matrix.data[held], matrix.indices[held], pointers - pointers[0]
    return view


def _width(matrix: Matrix) -> int:
    """How many numbers a row holds, on average where they differ."""
    return int(matrix.nnz // max(1, matrix.shape[0]) if sparse.issparse(matrix) else matrix.shape[1])


@quiet
def shortened(matrix: Matrix) -> tuple[Matrix, Array]:
    """The rows, each one longer than 1e18 scaled to that length, and the lengths of all, in float64.

    They are the caller's unless one is so long; then they are a copy. What happens to a row depends on that row alone.
    No row of finite numbers is refused, since an error would tell of it.

    >>> rows, lengths = shortened(np.array([[3.0, 4.0], [3e300, -4e300]]))
    >>> rows.tolist(), lengths.tolist()
    ([[3.0, 4.0], [6e+17, -8e+17]], [5.0, 1e+18])
    """
    lengths = _lengths(matrix)
    long = ~(lengths <= _MOST)  # NaN is not
    if not long.any():
        return matrix, lengths
    copied = matrix.copy()
    for (place, block), (_, target) in zip(blocks(matrix), blocks(copied), strict=True):
        if long[place].any():
            _shorten(block, target, long[place])
    return copied, _lengths(copied)


def _shorten(block: Matrix, target: Matrix, long: NDArray[np.bool_]) -> None:
    """Write the long rows of a block to its copy, scaled: first by a power of two, so nothing overflows."""
    counts = np.diff(block.indptr) if sparse.issparse(block) else np.full(len(block), block.shape[1])
    source, goal = (part.data if sparse.issparse(part) else part for part in (block, target))
    here = np.repeat(long, counts) if sparse.issparse(block) else long
    values, ends = source[here].astype(np.float64).reshape(-1), np.cumsum(counts[long])
    starts = ends - counts[long]
    largest = np.maximum.reduceat(np.abs(values), starts)
    if not np.isfinite(largest).all():
        raise DataError("rows must hold finite numbers only")
    values = np.ldexp(values, np.repeat(-np.frexp(largest)[1], counts[long]))
    lengths = np.sqrt(np.add.reduceat(values**2, starts))
    values *= np.repeat(_MOST / lengths, counts[long])
    goal[here] = values.reshape(goal[here].shape)


def _lengths(matrix: Matrix) -> Array:
    """The norms of the rows in float64: infinite where squares overflow, NaN where a number is."""
    found = np.empty(matrix.shape[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for place, block in blocks(matrix):
            found[place] = np.sqrt(_squares(block))
    return found


def _squares(block: Matrix) -> Array:
    """The squared norm of each row of a block."""
    if not sparse.issparse(block):
        return np.asarray(np.einsum("ij,ij->i", block, block, dtype=np.float64))
    squares = block.data.astype(np.float64) ** 2
    ones = np.ones(block.shape[1])
    return np.asarray(sparse.csr_array((squares, block.indices, block.indptr), shape=block.shape) @ ones)


def factors(lengths: Array, radius: float, rule: Rule) -> Array:
    """What multiplies each row so that its norm is at most the radius; 0 where a row to be normalised is too short.

    >>> factors(np.array([4.0, 0.5, 1e-20]), 2.0, "clip").round(6).tolist()
    [0.5, 1.0, 1.0]
    """
    most = radius * _SHRINK
    long_enough = lengths > (most if rule == "clip" else _LEAST)
    shorter = np.ones_like(lengths) if rule == "clip" else np.zeros_like(lengths)
    return np.divide(most, lengths, out=shorter, where=long_enough)
