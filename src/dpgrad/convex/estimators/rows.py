"""What every estimator does with its input: validate it as scikit-learn does, and never repeat a value of it."""

from functools import partial
from typing import Any

import numpy as np
from scipy import sparse
from sklearn import config_context
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from dpgrad import _processes, _validate
from dpgrad.accounting.guarantee import SECURE, SOURCES
from dpgrad.convex import chunked
from dpgrad.convex.design import Matrix, blocks, shortened
from dpgrad.convex.opened import opened, zeros_like
from dpgrad.convex.passes import lazy
from dpgrad.errors import DataError, OptionError
from dpgrad.mechanism import chacha
from dpgrad.mechanism.keys import Key

__all__ = [
    "FLOATS", "NORMALIZE", "NUMBERS", "WHOLE", "budget_checked", "canonical", "flag_checked", "key_of", "narrowed",
    "norm_checked", "pair_of", "prepared_by", "radius_of", "schema_of", "secure_checked", "shape_facts",
    "sklearn_option", "table_facts", "unweighted", "validated",
]  # fmt: skip

NORMALIZE = "normalize"
FLOATS = (np.float64, np.float32)
WHOLE = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
NUMBERS = (*FLOATS, np.float16, *WHOLE, np.bool_)  # what is narrowed to float32 without a copy in between
_DATE_TYPES, _TEXT_TYPES = ("date", "time", "period", "duration"), ("str", "bytes", "large_string", "binary", "utf8")
_MOST_BOUND = 1e100  # of bounds, whose widths are squared
LEAST_NORM, MOST_NORM = 1e-12, 1e12  # beyond, squares and inverses of it leave float32
# errors of scikit-learn that print the input, and what is said instead
_WITHOUT_VALUES = {
    "could not convert": "X and y must hold numbers: encode text, by categories that are public",
    "Reshape your data": "Expected 2D array. Reshape your data: one row is X.reshape(1, -1), one column (-1, 1)",
    "Complex data not supported": "Complex data not supported: X and y must hold real numbers",
    "inhomogeneous": "X must have rows of one length, all with as many numbers as the first",
    "setting an array element with a sequence": "X must hold one number in each place, not a sequence",
}
_TEXT = _WITHOUT_VALUES["could not convert"]
_DATES = (
    "convert them to numbers by a public rule, such as days since a date that you choose: "
    "(X[column] - start) / np.timedelta64(1, 'D')"
)

_MISSING = "fill in missing values by a public rule, such as a constant, since their mean would have to be released"


# What options of scikit-learn's estimators correspond to: here the mean loss plus l2·‖w‖²/2 is minimised.
_SKLEARN = {
    "C": "write l2=1/(C*n) for n rows; the solvers gd, sgd, output and objective take it, and auto needs none",
    "alpha": "write l2=alpha for the alpha of SGDClassifier, l2=alpha/n for that of Ridge, n rows",
    "penalty": "it is always l2, whose weight the option l2 sets",
    "tol": "a private fit takes a fixed number of steps, which max_iter sets",
    "eta0": "write learning_rate",
    "positive": "no constraint on coefficients is offered",
}


def sklearn_option(name: str) -> str:
    """What to write in place of an option that scikit-learn's estimators have and ours do not.

    >>> sklearn_option("eta0")
    ': write learning_rate'
    """
    return f": {_SKLEARN[name]}" if name in _SKLEARN else ""


def unweighted(name: str) -> str:
    """Why ``fit`` takes no weights of rows, for the refusal of that keyword.

    >>> unweighted("sample_weight")
    ': a weight would change how much one row can move the result; leave it out, or give class_weight to a classifier'
    """
    if name != "sample_weight":
        return ""
    return (
        ": a weight would change how much one row can move the result; leave it out, or give class_weight to a "
        "classifier"
    )


def validated(estimator: Any, X: Any, *, dtype: tuple[type, ...] = FLOATS, **checks: Any) -> Any:
    """`validate_data` for finite numbers, dense or CSR, less the values that its errors repeat.

    Rows that Dask holds are read once, block by block in the same way, and returned as `chunked.Chunks`.

    Input is checked to be finite whatever scikit-learn is configured to assume: one row that is not would show in every
    result. Its sums may overflow on the way, of which nothing is said.

    Guarantee: how one row is read does not depend on the others. The type of a column often does, as where one number
    that is not whole makes all of them floats, so every type of number is read by way of float64 (`narrowed`). Types
    that change what a number means, dates with their units and text, are refused.
    """
    if lazy(X):
        return _opened(estimator, X, dtype, checks)
    try:
        X = _numbers(X)
        if isinstance(y := checks.get("y"), np.ndarray) and y.dtype.kind == "T":  # which scikit-learn does not know
            checks["y"] = y.astype(object)
        with config_context(assume_finite=False), np.errstate(all="ignore"):
            return validate_data(estimator, X, accept_sparse="csr", dtype=dtype, **checks)
    except ValueError as error:
        if "contains NaN" in str(error):
            raise DataError(f"{str(error).splitlines()[0].rstrip('.')}: {_MISSING}") from None
        for words, told in _WITHOUT_VALUES.items():
            if words in str(error):
                raise DataError(told) from None
        raise
    except OverflowError:
        raise DataError("X must hold numbers that float64 can hold, at most 1.8e308: scale the columns") from None
    except TypeError as error:
        if "NA is ambiguous" in str(error):
            raise DataError(f"Input contains NaN: {_MISSING}") from None
        if "argument must be" in str(error):
            raise TypeError(f"X and y must hold numbers, {error}: convert them first") from None
        raise


class _Reader(BaseEstimator):  # type: ignore[misc]
    """What a block is validated for."""


def _opened(estimator: Any, X: Any, dtype: tuple[type, ...], checks: dict[str, Any]) -> Any:
    """The rows of Dask's blocks, and their labels where there are any to be checked."""
    one = zeros_like(X)
    if getattr(one, "columns", None) is not None:
        _numbers(X._meta)
    if "y" in checks and checks["y"] is None:
        validate_data(estimator, one, y=None)  # raises
    validate_data(estimator, one, skip_check_array=True)
    labels = checks.pop("y", None)
    found, held = opened(X, labels, partial(_read, dtype=dtype, checks=checks))
    return found if labels is None else (found, held)


def _read(block: Any, labels: Any, *, dtype: tuple[type, ...], checks: dict[str, Any]) -> tuple[Matrix, Any]:
    """A block of rows as models use them: in float32, for those that take every type of number."""
    treated = narrowed if dtype is NUMBERS or dtype == NUMBERS else canonical
    if labels is None:
        return treated(validated(_Reader(), block, dtype=dtype)), None
    rows, found = validated(_Reader(), block, dtype=dtype, y=labels, **checks)
    return treated(rows), found


def _numbers(X: Any) -> Any:
    """The input, refused where it is no table of numbers: scikit-learn would read some of it by a rule of its own.

    >>> _numbers(np.array([["2020-01-01"]], "datetime64[D]"))
    Traceback (most recent call last):
    dpgrad.errors.DataError: X holds dates or times: convert them to numbers by a public rule, such as days \
since a date that you choose: (X[column] - start) / np.timedelta64(1, 'D')
    """
    if sparse.issparse(X):
        return _as_csr(X)
    if isinstance(X, np.ma.MaskedArray):
        raise DataError(f"X is a masked array, whose mask would be ignored: {_MISSING}")
    if isinstance(X, list | tuple):
        X = np.asarray(X)
    for place, dtype, values in _columns(X):
        listed = np.asarray(values, object).ravel().tolist() if dtype == "object" else []
        if dtype.startswith(_DATE_TYPES) or any(isinstance(value, np.datetime64 | np.timedelta64) for value in listed):
            raise DataError(f"{place} holds dates or times: {_DATES}")
        if dtype.startswith(_TEXT_TYPES) or any(isinstance(value, str | bytes) for value in listed):
            raise DataError(_TEXT) from None
    return X


def _columns(X: Any) -> list[tuple[str, str, Any]]:
    """What each column of a data frame is called, its type and its values; of an array, of all columns together."""
    if isinstance(X, np.ndarray):
        return [("X", X.dtype.name.lower(), X)]
    names, types = getattr(X, "columns", None), getattr(X, "dtypes", None)  # what all data frames have
    if names is None or types is None:
        return []
    called = list(names)
    if repeated := [name for name in called if called.count(name) > 1]:
        raise DataError(f"X has several columns named {_validate.shown(repeated[0])}: give each a name of its own")
    found = []
    for name, dtype in zip(called, types, strict=True):
        held = dtype.categories.dtype if str(dtype) == "category" else dtype
        found.append((f"column {_validate.shown(name)} of X", str(held).lower(), X[name]))
    return found


def narrowed(X: Matrix) -> Matrix:
    """The rows in float32, in which products take half the time; sparse ones without duplicates, in order.

    Rows that are longer than float32 can hold are shortened first, by the rule of `Design`; a block at a time, so
    nothing wider than float32 is held of all rows.

    Guarantee: whole numbers pass through float64, as they do where another row is not whole and all are floats. Rounded
    to float32 at once, numbers beyond 2⁵³ would come out differently, and one row would move all others.

    >>> narrowed(np.array([[1, 2]])).dtype.name, narrowed(np.array([[0.0, 4e200]])).tolist()
    ('float32', [[0.0, 9.999999843067494e+17]])
    >>> whole = np.array([[2**60 + 2**36 + 1]])  # the 1 is lost in float64, and decides how float32 rounds
    >>> bool(narrowed(whole) == narrowed(whole.astype(float)))
    True
    """
    if isinstance(X, chunked.Chunks):  # a worker narrows what it reads
        return X
    found = canonical(X)
    if found.dtype == np.float32:
        return found
    if sparse.issparse(found):
        narrow = sparse.csr_array((np.empty(found.nnz, np.float32), found.indices, found.indptr), shape=found.shape)
        for (_, block), (_, target) in zip(blocks(found), blocks(narrow), strict=True):
            target.data[:] = _shortened(block).data
        return narrow
    narrow = np.empty(found.shape, np.float32)
    for place, block in blocks(found):
        narrow[place] = _shortened(block)
    return narrow


def _shortened(block: Matrix) -> Matrix:
    """A block of rows that float32 can hold, in float64 unless it is of narrow floats."""
    return block if block.dtype == np.float16 else shortened(block.astype(np.float64, copy=False))[0]


def canonical(X: Matrix) -> Matrix:
    """Sparse rows with one entry for each place, in order: the caller's where they are so, else a copy.

    Where entries of one place add up to more than a float holds, the largest float is meant. They are added in float64
    whatever the type of the matrix, which one row may decide: float32 would round, and whole numbers wrap around.
    """
    if not sparse.issparse(X):
        return X
    # a new array that shares the memory, since the caller's may hold a flag that is no longer true
    found = sparse.csr_array((X.data, X.indices, X.indptr), shape=X.shape)
    if not found.has_canonical_format:
        found = sparse.csr_array((X.data.astype(np.float64), X.indices.copy(), X.indptr.copy()), shape=X.shape)
        found.sum_duplicates()
        kept = X.dtype if X.dtype in FLOATS else np.dtype(np.float64)
        most = np.finfo(kept).max
        np.clip(found.data, -most, most, out=found.data)
        found.data = found.data.astype(kept, copy=False)
    return found


def _as_csr(X: Matrix) -> Matrix:
    """A sparse matrix in CSR format. Other formats are converted in float64, since that may add up their entries."""
    if X.format == "csr" or X.dtype.kind not in "iufb":
        return X
    found = canonical(X.astype(np.float64).tocsr())
    if X.dtype != np.float32:
        return found
    most = np.finfo(np.float32).max
    np.clip(found.data, -most, most, out=found.data)
    return found.astype(np.float32)


def radius_of(data_norm: object) -> float | None:
    """The bound that rows are clipped to; None where they are normalised.

    >>> radius_of("normalize") is None, radius_of(2)
    (True, 2.0)
    """
    if data_norm is None or (isinstance(data_norm, str) and data_norm == NORMALIZE):
        return None
    if isinstance(data_norm, str):
        raise OptionError(f"data_norm must be a positive number or 'normalize', got {_validate.shown(data_norm)}")
    return norm_checked(data_norm=data_norm)


def norm_checked(**norm: object) -> float:
    """A norm of rows, positive and within what float32 computes with.

    >>> norm_checked(data_norm=1e200)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: data_norm must lie between 1e-12 and 1e+12, got 1e+200: scale the columns by ...
    """
    ((name, value),) = norm.items()
    _validate.positive(**norm)
    if not LEAST_NORM <= value <= MOST_NORM:  # type: ignore[operator]
        raise OptionError(
            f"{name} must lie between {LEAST_NORM:g} and {MOST_NORM:g}, got {value:g}: "
            "scale the columns by public numbers"
        )
    return float(value)  # type: ignore[arg-type]


def flag_checked(**flag: object) -> bool:
    """True or False, also numpy's, which a grid of settings is made of.

    >>> flag_checked(fit_intercept="no")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: fit_intercept must be True or False, got 'no'
    """
    ((name, value),) = flag.items()
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} must be True or False, got {_validate.shown(value)}")
    return bool(value)


def secure_checked(noise: object) -> bool:
    """Whether noise is to come from the secure source, by the name of one.

    >>> secure_checked("loud")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: noise must be one of ordinary, secure, got 'loud'
    """
    _validate.one_of(SOURCES, noise=noise)
    if noise == SECURE:
        chacha.refuse_missing()
    return noise == SECURE


def key_of(random_state: object, estimator: str) -> Key:
    """A key from the operating system, or of the seed and the estimator's name; never of `numpy`'s global state.

    Estimators of different names draw different noise from one seed, as where a scaler and a model share it.

    >>> key_of(None, "a scaler").label, key_of(7, "a scaler").label
    ('secret', 'reproducible, not for release')
    """
    if random_state is None:
        return Key.fresh()
    if isinstance(random_state, np.random.Generator):
        seed = int(random_state.integers(2**63))
    elif isinstance(random_state, np.random.RandomState):
        seed = int(check_random_state(random_state).randint(2**31))
    else:
        _validate.whole(random_state=random_state)
        seed = int(random_state)  # type: ignore[call-overload]
    return Key(Key.from_seed(seed).derive("estimator", estimator), reproducible=True)


def table_facts(X: Matrix) -> tuple[str, ...]:
    """What is assumed public of any table: what it takes to be accepted."""
    divided = ("how many rows each block of Dask's has",) if isinstance(X, chunked.Chunks) else ()
    return (
        f"the number of rows, {X.shape[0]:,}, and of columns, {X.shape[1]:,}, and the names and types of the columns",
        *divided,
        "that every value is a finite number",
    )


def shape_facts(X: Matrix, radius: float | None) -> tuple[str, ...]:
    """What is assumed public of the rows."""
    rule = "rows are normalised" if radius is None else f"rows are clipped to norm {radius:g}"
    return (
        *table_facts(X),
        f"{rule}, by a rule that is not read from them",
    )


def prepared_by(radius: float | None, fit_intercept: bool = False) -> tuple[str, ...]:
    """What is done to rows before a model sees them.

    >>> prepared_by(2.0, fit_intercept=True)
    ('rows longer than 2 are scaled to that norm', 'a constant column is added for the intercept')
    """
    rule = "every row is scaled to norm 1" if radius is None else f"rows longer than {radius:g} are scaled to that norm"
    return (rule, "a constant column is added for the intercept") if fit_intercept else (rule,)


def schema_of(estimator: Any, X: Matrix, **declared: Any) -> dict[str, Any]:
    """What a report says of the columns: their number and names, and what else was declared public.

    >>> schema_of(object(), np.zeros((3, 2)), classes=["no", "yes"])
    {'rows': 3, 'columns': 2, 'classes': ['no', 'yes']}
    """
    names = getattr(estimator, "feature_names_in_", None)
    return {"rows": X.shape[0], "columns": X.shape[1] if names is None else [str(name) for name in names], **declared}


def budget_checked(epsilon: object) -> float:
    """ε, a positive number; refused in one of several processes, since each would spend it.

    >>> budget_checked("1")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: epsilon must be a number, got '1'
    """
    _validate.positive(epsilon=epsilon)
    _processes.refuse_several()
    return float(epsilon)  # type: ignore[arg-type]


def pair_of(name: str, bounds: object, length: int | None = None) -> tuple[Any, Any]:
    """Lower and upper bounds as floats, or as arrays of ``length``; refused where one is missing.

    >>> pair_of("target_bounds", (0, 10))
    (0.0, 10.0)
    """
    if bounds is None:
        raise OptionError(f"{name} is required: a pair (low, high), chosen without looking at the data")
    try:
        low, high = (np.asarray(bound, np.float64) for bound in bounds)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise OptionError(f"{name} must be a pair (low, high) of numbers, got {_validate.shown(bounds)}") from None
    shapes = {()} if length is None else {(), (length,)}
    if not {low.shape, high.shape} <= shapes:
        wanted = "numbers" if length is None else f"numbers or arrays of {length}, one for each column"
        raise OptionError(f"{name} must be a pair (low, high) of {wanted}, got shapes {low.shape} and {high.shape}")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise OptionError(f"{name} must be finite, each low below its high, got {_validate.shown(bounds)}")
    if max(np.abs(low).max(), np.abs(high).max()) > _MOST_BOUND or (high - low).min() < 1 / _MOST_BOUND:
        raise OptionError(
            f"{name} must lie within ±{_MOST_BOUND:g}, each low below its high by {1 / _MOST_BOUND:g} or more, got "
            f"{_validate.shown(bounds)}"
        )
    if length is None:
        return float(low), float(high)
    return np.broadcast_to(low, (length,)), np.broadcast_to(high, (length,))
