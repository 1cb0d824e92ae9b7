"""Tables of numbers: data frames in memory, and Arrow tables and files that are read by row.

Columns of numbers and booleans are taken as they are; a missing value is NaN, and a row with NaN adds nothing to a
step. Text and dates are refused: how they become numbers must not be learned from the data.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import accumulate, groupby
from numbers import Real
from typing import Any, NoReturn, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from dpgrad import _validate
from dpgrad.errors import DataError
from dpgrad.grads.sums import Batch
from dpgrad.training.source import ByIndex, Collate, together

__all__ = [
    "ArrowRows",
    "Frame",
    "Series",
    "arrow",
    "chunked",
    "column_arrays",
    "matrix",
    "origins",
    "target_in",
    "vector",
]

Array = np.ndarray[Any, Any]


@runtime_checkable
class Series(Protocol):
    """A column of pandas, polars or Arrow."""

    def to_numpy(self) -> Array: ...
    def __len__(self) -> int: ...


@runtime_checkable
class Frame(Protocol):
    """A data frame of pandas, polars or another library with the interchange protocol."""

    @property
    def columns(self) -> Iterable[Any]: ...
    def __dataframe__(self) -> Any: ...
    def __len__(self) -> int: ...


def matrix(frame: Frame, place: str, without: str | None = None) -> Tensor:
    """The columns of a frame, but for the one that is named, as (rows, columns) in torch's default type.

    >>> import pandas
    >>> matrix(pandas.DataFrame({"age": [30, 40], "member": [True, False]}), "data")
    tensor([[30.,  1.],
            [40.,  0.]])
    """
    names = [str(name) for name in frame.columns]
    kept = [index for index, name in enumerate(names) if name != without]
    if not kept:
        raise DataError(f"{place} has no columns of features: give at least one")
    found = np.empty((len(frame), len(kept)), _default())
    for column, index in enumerate(kept):
        values = _numbers(_at(frame, index), f"{place} has column {names[index]!r}, which")
        with np.errstate(all="ignore"):  # beyond the largest float: infinite, and the row adds nothing
            found[:, column] = values
    return torch.from_numpy(found)


def vector(series: Series, place: str) -> Tensor:
    """A column as (rows,): whole numbers and booleans as int64, others in torch's default type.

    >>> import pandas
    >>> vector(pandas.Series([True, False]), "data[1]")
    tensor([1, 0])
    """
    values = _numbers(series, place)
    whole = values.dtype.kind in "biu"
    with np.errstate(all="ignore"):
        return torch.from_numpy(values.astype(np.int64 if whole else _default()))


def column_arrays(frame: Frame) -> list[Array]:
    """The columns, each as it lies in memory where that can be had."""
    return [_at(frame, index).to_numpy() for index, _ in enumerate(frame.columns)]


def target_in(names: Sequence[str], target: str, place: str) -> int:
    """Where the target stands among the columns.

    >>> target_in(["age", "income"], "incom", "data")
    Traceback (most recent call last):
    dpgrad.errors.DataError: data has no column 'incom': did you mean income?
    """
    if names.count(target) != 1:
        if target in names:
            raise DataError(f"{place} has several columns {target!r}: rename them")
        raise DataError(f"{place} has no column {target!r}{_validate.meant(target, names)}")
    return names.index(target)


def _default() -> Any:
    """torch's default type as one of numpy; half types are read as float32."""
    return np.float64 if torch.get_default_dtype() == torch.float64 else np.float32


def _at(frame: Any, index: int) -> Series:
    """A column by its place: names may occur twice in pandas."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(frame, pandas.DataFrame):
        return cast(Series, frame.iloc[:, index])
    return cast(Series, frame[list(frame.columns)[index]])


def _numbers(series: Series, which: str) -> Array:
    """The values of a column as an array of numbers or booleans."""
    values = np.asarray(series.to_numpy())
    if values.ndim != 1:
        raise DataError(f"{which} must hold one number per row, got shape (rows, {values.shape[-1]})")
    if values.dtype.kind == "O":
        found = [_number(value) for value in values]
        if None in found:
            _refuse(which, "text" if any(isinstance(value, str) for value in values) else "values that are no numbers")
        whole = all(isinstance(value, int) for value in found)
        return np.array(found, np.int64 if whole and found else np.float64)
    if values.dtype.kind not in "biuf":
        _refuse(which, {"M": "dates", "m": "time spans", "c": "complex numbers"}.get(values.dtype.kind, "text"))
    return values


def _number(value: Any) -> float | int | None:
    """A number, or NaN where there is none; None for anything else."""
    if value is None or type(value).__name__ == "NAType":  # pandas.NA
        return float("nan")
    if isinstance(value, bool | np.bool_ | int | np.integer):
        return int(value) if abs(int(value)) < 1 << 63 else float(value)
    return float(value) if isinstance(value, Real | Decimal) else None


def _refuse(which: str, kind: str) -> NoReturn:
    remedy = "describe its categories in a schema and read the file with dpgrad.data.read, or encode"
    if kind in ("dates", "time spans"):
        remedy = "convert it to a number, such as days since a fixed date, or encode"
    raise DataError(
        f"{which} holds {kind}, and a model needs numbers: {remedy} it by a rule that is fixed without looking at the "
        "data"
    )


class ArrowRows(ByIndex):
    """Rows of an Arrow table, or of Parquet and Arrow files, as (features, target); only rows asked for are read.

    A column of fixed-size lists is as many features as it has entries.

    >>> import pyarrow
    >>> rows = ArrowRows(pyarrow.table({"age": [30, 40], "income": [1, 0]}), "income", "data")
    >>> rows.batch([1], default_collate)
    (tensor([[40.]]), tensor([0]))
    """

    steady = True

    def __init__(self, held: Any, target: str, place: str) -> None:
        self._place, self._schema = place, held.schema
        self._target = target_in(self._schema.names, target, place)
        if len(self._schema.names) < 2:
            raise DataError(f"{place} has no feature columns besides {target!r}")
        for field in self._schema:
            _refuse_arrow(field, place)
        self._held = held
        in_memory = isinstance(held, sys.modules["pyarrow"].Table)
        self._batches = held.to_batches() if in_memory else None  # pieces of a memory map, nothing is copied
        self._ends = list(accumulate(len(batch) for batch in self._batches or ()))
        self._rows = len(held) if in_memory else held.count_rows()

    def __len__(self) -> int:
        return int(self._rows)

    def batch(self, indices: list[int], collate: Collate) -> Batch:
        if collate is not default_collate:
            return together([self[index] for index in indices], collate)
        parts = [self._pair(part) for part in self._taken(indices)]
        if not parts:
            return self._pair(self._schema.empty_table())
        inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        return inputs, targets

    def _taken(self, indices: list[int]) -> Iterator[Any]:
        """The rows at ``indices`` in this order, as tables or batches of Arrow."""
        pyarrow = sys.modules["pyarrow"]
        if self._batches is None:
            yield self._held.take(pyarrow.array(indices, pyarrow.int64()))
            return
        # Batch by batch: Arrow would join all pieces of a table in memory to take rows from several.
        for piece, own in groupby(indices, lambda index: bisect_right(self._ends, index)):
            start = self._ends[piece] - len(self._batches[piece])
            yield self._batches[piece].take(pyarrow.array([index - start for index in own], pyarrow.int64()))

    @np.errstate(all="ignore")  # beyond the largest float: infinite, and the row adds nothing
    def _pair(self, few: Any) -> tuple[Tensor, Tensor]:
        """Features and target of rows of Arrow."""
        fields = [*enumerate(self._schema)]
        _, target = fields.pop(self._target)
        features = [_plain_column(few.column(index), field, self._place) for index, field in fields]
        inputs = torch.from_numpy(np.concatenate(features, 1).astype(_default()))
        column = few.column(self._target)
        types = sys.modules["pyarrow"].types
        if not types.is_integer(target.type) and not types.is_boolean(target.type):
            numbers = torch.from_numpy(_plain_column(column, target, self._place).astype(_default()))
            return inputs, numbers[:, 0] if numbers.shape[1] == 1 else numbers
        if column.null_count:
            raise DataError(f"{self._place} has missing values in the target {target.name!r}: leave those rows out")
        return inputs, torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False), np.int64))


def arrow(data: Any) -> bool:
    """Whether these are an Arrow table, or Arrow or Parquet files opened by ``pyarrow.dataset.dataset``."""
    table, files = sys.modules.get("pyarrow"), sys.modules.get("pyarrow.dataset")
    return (table is not None and isinstance(data, table.Table)) or (
        files is not None and isinstance(data, files.Dataset)
    )


def chunked(data: Any) -> bool:
    """Whether this is an Arrow table in memory or mapped into it, also as the datasets library holds it."""
    held, library = sys.modules.get("pyarrow"), sys.modules.get("datasets")
    return (held is not None and isinstance(data, held.Table)) or (
        library is not None and isinstance(data, library.table.Table)
    )


def origins(table: Any, rows: Array) -> dict[int | str, Array]:
    """Where the values of the given rows come from: their positions in the memory or the file that holds them.

    >>> import pyarrow
    >>> ages = pyarrow.table({"age": [30, 40, 50]})
    >>> [places.tolist() for places in origins(ages.slice(1), np.array([0, 1])).values()]
    [[1, 2]]
    """
    ordered, found = np.sort(rows), dict[int | str, list[Array]]()
    for origin, first, start, count in _pieces(table):
        low, high = np.searchsorted(ordered, (start, start + count))
        found.setdefault(origin, []).append(ordered[low:high] - start + first)
    return {origin: np.concatenate(places) for origin, places in found.items()}


def _pieces(table: Any) -> Iterator[tuple[int | str, int, int, int]]:
    """Consecutive rows of a table that lie in one place: (which, from where in it, from which row, how many)."""
    for column in table.columns:
        start = 0
        for chunk in column.chunks:
            held = next((buffer for buffer in chunk.buffers() if buffer is not None), None)
            if held is not None:
                yield held.address, chunk.offset, start, len(chunk)
            start += len(chunk)
    start = 0
    for chunks in getattr(table, "blocks", [[table]]):  # of tables put together by the datasets library
        for block in chunks:
            if (path := getattr(block, "path", None)) is not None:  # a file may be mapped twice
                sliced = sum(arguments[0] for name, arguments, _ in block.replays if name == "slice")
                yield path, sliced, start, block.num_rows
        start += chunks[0].num_rows


def _inner(field: Any) -> tuple[Any, int]:
    """The type of the numbers in a column, and how many there are in a row."""
    types = sys.modules["pyarrow"].types
    if types.is_fixed_size_list(field.type):
        return field.type.value_type, field.type.list_size
    return (field.type.value_type if types.is_dictionary(field.type) else field.type), 1


def _refuse_arrow(field: Any, place: str) -> None:
    """Refuse a column by its type, before anything is read."""
    types = sys.modules["pyarrow"].types
    kind, _ = _inner(field)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return
    which = f"{place} has column {field.name!r}, which"
    if types.is_temporal(kind):
        _refuse(which, "dates")
    _refuse(which, "text" if types.is_string(kind) or types.is_large_string(kind) else f"values of type {kind}")


def _plain_column(column: Any, field: Any, place: str) -> Array:
    """The values of a column as float64, (rows, entries); how one is read does not depend on the others."""
    pyarrow = sys.modules["pyarrow"]
    whole = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    if pyarrow.types.is_dictionary(whole.type):
        whole = whole.dictionary_decode()
    rows, (_, width) = len(whole), _inner(field)
    if pyarrow.types.is_fixed_size_list(whole.type):
        if whole.null_count:
            raise DataError(f"{place} has missing lists in column {field.name!r}: leave those rows out")
        whole = whole.flatten()
    values = whole.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(values, np.float64).reshape(rows, width)
