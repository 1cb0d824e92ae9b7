"""What every estimator does with its input: validate it as scikit-learn does, and never repeat a value of it."""

from typing import Any

import numpy as np
from scipy import sparse
from sklearn import config_context
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from dpgrad import _validate
from dpgrad.convex.design import Matrix
from dpgrad.keys import Key

NORMALIZE = "normalize"
FLOATS = (np.float64, np.float32)
# errors of scikit-learn that print the input, and what is said instead
_WITHOUT_VALUES = {
    "could not convert": "X and y must hold numbers: encode text, by categories that are public",
    "Reshape your data": "Expected 2D array. Reshape your data: one row is X.reshape(1, -1), one column (-1, 1)",
    "Complex data not supported": "Complex data not supported: X and y must hold real numbers",
}


def validated(estimator: Any, X: Any, **checks: Any) -> Any:
    """`validate_data` for finite float input, dense or CSR, less the values that its errors repeat.

    Input is checked to be finite whatever scikit-learn is configured to assume: one row that is not would show in every
    result.
    """
    try:
        with config_context(assume_finite=False):
            return validate_data(estimator, X, accept_sparse="csr", dtype=FLOATS, **checks)
    except ValueError as error:
        for words, told in _WITHOUT_VALUES.items():
            if words in str(error):
                raise ValueError(told) from None
        raise


def narrowed(X: Matrix) -> Matrix:
    """The rows in float32, in which products take half the time; sparse ones without duplicates, in order.

    >>> narrowed(np.array([[1.0]])).dtype.name
    'float32'
    """
    found = canonical(X)
    if found.dtype == np.float32:
        return found
    with np.errstate(over="ignore"):  # what becomes infinite is refused as a row that is too long
        return found.astype(np.float32) if sparse.issparse(found) else found.astype(np.float32, order="C")


def canonical(X: Matrix) -> Matrix:
    """Sparse rows with one entry for each place, in order: the caller's where they are so, else a copy."""
    if not sparse.issparse(X):
        return X
    # a new array that shares the memory, since the caller's may hold a flag that is no longer true
    found = sparse.csr_array((X.data, X.indices, X.indptr), shape=X.shape)
    if not found.has_canonical_format:
        found = found.copy()
        found.sum_duplicates()
    return found


def radius_of(data_norm: object) -> float | None:
    """The bound that rows are clipped to; None where they are normalised.

    >>> radius_of("normalize") is None, radius_of(2)
    (True, 2.0)
    """
    if data_norm is None or (isinstance(data_norm, str) and data_norm == NORMALIZE):
        return None
    if isinstance(data_norm, str):
        raise ValueError(f"data_norm must be a positive number or 'normalize', got {_validate.shown(data_norm)}")
    _validate.positive(data_norm=data_norm)
    return float(data_norm)  # type: ignore[arg-type]


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
    return (
        f"the number of rows, {X.shape[0]:,}, and of columns, {X.shape[1]:,}, and the names of the columns",
        "that every value is a finite number",
    )


def shape_facts(X: Matrix, radius: float | None) -> tuple[str, ...]:
    """What is assumed public of the rows."""
    rule = "rows are normalised" if radius is None else f"rows are clipped to norm {radius:g}"
    return (
        *table_facts(X),
        f"{rule}, by a rule that is not read from them",
    )


def budget_checked(epsilon: object) -> float:
    """ε, a positive number.

    >>> budget_checked("1")
    Traceback (most recent call last):
    ValueError: epsilon must be a number, got '1'
    """
    _validate.positive(epsilon=epsilon)
    return float(epsilon)  # type: ignore[arg-type]


def pair_of(name: str, bounds: object, length: int | None = None) -> tuple[Any, Any]:
    """Lower and upper bounds as floats, or as arrays of ``length``; refused where one is missing.

    >>> pair_of("target_bounds", (0, 10))
    (0.0, 10.0)
    """
    if bounds is None:
        raise ValueError(f"{name} is required: a pair (low, high), chosen without looking at the data")
    try:
        low, high = (np.asarray(bound, np.float64) for bound in bounds)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair (low, high) of numbers, got {_validate.shown(bounds)}") from None
    shapes = {()} if length is None else {(), (length,)}
    if not {low.shape, high.shape} <= shapes:
        wanted = "numbers" if length is None else f"numbers or arrays of {length}, one for each column"
        raise ValueError(f"{name} must be a pair (low, high) of {wanted}, got shapes {low.shape} and {high.shape}")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError(f"{name} must be finite, each low below its high, got {_validate.shown(bounds)}")
    if length is None:
        return float(low), float(high)
    return np.broadcast_to(low, (length,)), np.broadcast_to(high, (length,))
