"""What every estimator does with its input: validate it as scikit-learn does, and never repeat a value of it."""

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from dpgrad import _validate
from dpgrad.convex.design import Matrix
from dpgrad.keys import Key

NORMALIZE = "normalize"
FLOATS = (np.float64, np.float32)


def validated(estimator: Any, X: Any, **checks: Any) -> Any:
    """`validate_data` for float input, dense or CSR, without the text of a number that could not be read."""
    try:
        return validate_data(estimator, X, accept_sparse="csr", dtype=FLOATS, **checks)
    except ValueError as error:
        if "could not convert" in str(error):
            raise ValueError("X and y must hold numbers: encode text, by categories that are public") from None
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


def key_of(random_state: object) -> Key:
    """A key from the operating system, or of the seed: `numpy`'s global state is never used.

    >>> key_of(None).label, key_of(7).label
    ('secret', 'reproducible, not for release')
    """
    if random_state is None:
        return Key.fresh()
    if isinstance(random_state, np.random.Generator):
        return Key.from_seed(int(random_state.integers(2**63)))
    if isinstance(random_state, np.random.RandomState):
        return Key.from_seed(int(check_random_state(random_state).randint(2**31)))
    _validate.whole(random_state=random_state)
    return Key.from_seed(int(random_state))  # type: ignore[call-overload]


def shape_facts(X: Matrix, radius: float | None) -> tuple[str, ...]:
    """What is assumed public of the rows."""
    rule = "rows are normalised" if radius is None else f"rows are clipped to norm {radius:g}"
    return (
        f"the number of rows, {X.shape[0]:,}, and of columns, {X.shape[1]:,}",
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
