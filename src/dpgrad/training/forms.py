"""The forms in which people hold data, each brought into one that a run reads: tensors, or a map-style Dataset.

Every step draws its own batch, in which each row takes part independently of the others. So a run must reach any row
at any step: streams are refused, and the batches of a DataLoader are not used.

Other libraries are not imported here: data of a library that is not loaded cannot be given.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dpgrad import _validate
from dpgrad.errors import DataError
from dpgrad.grads.sums import Batch
from dpgrad.grads.unquoted import example
from dpgrad.training.source import ByIndex, Collate, together
from dpgrad.training.tables import ArrowRows, Frame, Series, arrow, column_arrays, matrix, target_in, vector

__all__ = ["Examples", "HuggingFaceRows", "LoaderWarning", "copied", "places", "selected", "taken", "warn_of_missing"]


class LoaderWarning(UserWarning):
    """A DataLoader was given: its dataset, collate function and workers are used, its batches are not."""


def taken(data: Any, place: str = "data", model: nn.Module | None = None) -> Any:
    """Data as tensors and arrays or as a map-style Dataset.

    A frame becomes a matrix. A column becomes a vector, of int64 where it holds whole numbers or booleans.
    ``(frame, "target")`` names the column of targets. The index of a frame is ignored. Numbers that are not whole are
    converted to the type of the ``model``, float32 or float64, where they come in arrays and frames; without a model
    those of a frame have torch's default type. Tensors, memory maps and Datasets stay as they are.

    >>> import pandas
    >>> taken((pandas.DataFrame({"age": [30, 40], "income": [1, 0]}), "income"))
    (tensor([[30.],
            [40.]]), tensor([1, 0]))
    """
    found, kind = _taken(data, place), None if model is None else _type_of(model)
    if kind is None or isinstance(found, Dataset):
        return found
    kept = {id(leaf) for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor | np.memmap)}

    def converted(leaf: Any) -> Any:
        if id(leaf) in kept or not isinstance(leaf, Tensor | np.ndarray):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.to(kind) if leaf.is_floating_point() else leaf
        wanted = np.dtype(str(kind).removeprefix("torch."))
        if leaf.dtype.kind != "f" or leaf.dtype == wanted or leaf.dtype.itemsize > 8:
            return leaf
        with np.errstate(all="ignore"):  # beyond the largest float: infinite, and the row adds nothing
            return leaf.astype(wanted)

    return pytree.tree_map(converted, found)


def warn_of_missing(data: Any) -> None:
    """Warn where numbers in memory are NaN or infinite: their rows are dropped. What lies on disk is not read for it.

    It says neither how many rows nor which; like every warning it is outside the guarantee.
    """
    if isinstance(data, Dataset):
        return
    for leaf in pytree.tree_leaves(data):
        if isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap) and leaf.dtype.kind == "f":
            whole = bool(np.isfinite(leaf).all())
        elif isinstance(leaf, Tensor) and leaf.is_floating_point():
            whole = bool(leaf.isfinite().all())
        else:
            continue
        if not whole:
            _validate.warn(
                "the data hold NaN or infinite numbers, and a row with one adds nothing to a step: to use these rows, "
                "fill in a public constant first, such as numpy.nan_to_num(x, nan=0.5). Do not release this message"
            )
            return


def copied(data: Any, found: Any) -> list[Any]:
    """The arrays of the data that `taken` has copied into another type: what is written into them is not in ``found``.

    >>> rows = np.zeros((3, 2)), np.zeros(3, np.int64)
    >>> [column.shape for column in copied(rows, taken(rows, model=nn.Linear(2, 2)))]
    [(3, 2)]
    """
    if isinstance(found, Dataset):
        return []
    kept = {id(leaf) for leaf in pytree.tree_leaves(found)}
    arrays = [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, np.ndarray) and id(leaf) not in kept]
    return arrays if len({leaf.shape[:1] for leaf in arrays}) == 1 else []  # others are refused by the caller


def _type_of(model: nn.Module) -> torch.dtype | None:
    """The type of a model's parameters; None where they have several, or a half type."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return types.pop() if types in ({torch.float32}, {torch.float64}) else None


def _refuse_dask(data: Any, place: str) -> None:
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else (data,)
    if any(type(part).__module__.partition(".")[0] in ("dask", "dask_expr") for part in parts):
        raise DataError(
            f"{place} must be readable by index, got a Dask collection, of which every batch would compute all blocks: "
            "give what compute() returns, or write it to a file once and give np.load(path, mmap_mode='r') or a "
            "pyarrow dataset. The linear models of dpgrad.convex take Dask collections as they are"
        )


def _taken(data: Any, place: str) -> Any:
    _refuse_dask(data, place)
    if isinstance(data, DataLoader):
        return _of_loader(data, place)
    if isinstance(data, IterableDataset | Iterator) or (isinstance(data, Dataset) and not isinstance(data, Sized)):
        raise DataError(_stream(data, place))
    if isinstance(data, Dataset | Tensor | np.ndarray):
        return data
    if _hugging_face(data, "DatasetDict"):
        raise DataError(f'{place} holds several splits: give one of them, such as {place}["train"]')
    if not pytree.tree_is_leaf(data):
        return _of_columns(data, place)
    if _hugging_face(data, "Dataset"):
        return HuggingFaceRows(data)
    if isinstance(data, Frame | Series) or arrow(data):
        raise DataError(
            f"{place} has no target: give the features and the target, such as "
            '(frame.drop(columns="y"), frame["y"]) or (frame, "y"); for a loss of your own without a target give a '
            "tensor, such as torch.tensor(frame.to_numpy(), dtype=torch.float32)"
        )
    if isinstance(data, Mapping):
        return _of_columns(dict(data), place)
    if isinstance(data, _ByPlace) and not isinstance(data, str | bytes):
        return Examples(data, default_collate)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        raise DataError(_stream(data, place))
    return data


def places(data: Any) -> Any:
    """The data as they lie in memory, to see whether others are the same rows: the columns of frames, not copies.

    >>> import pandas
    >>> [column.tolist() for column in places(pandas.DataFrame({"age": [30, 40]}))]
    [[30, 40]]
    """
    if isinstance(data, DataLoader | Examples):
        return data.dataset
    if isinstance(data, HuggingFaceRows):
        return data.rows
    if isinstance(data, Frame) and not arrow(data):
        return column_arrays(data)
    if isinstance(data, tuple | list):
        return [places(part) for part in data if not isinstance(part, str)]
    return data.to_numpy() if _foreign(data) and isinstance(data, Series) else data


def selected(data: Any) -> tuple[Any, "np.ndarray[Any, Any]"] | None:
    """The table that a ``datasets.Dataset`` takes its rows from, and which of them; None of other data.

    >>> import datasets
    >>> selected(datasets.Dataset.from_dict({"x": [5, 6, 7]}).select([2, 0]))[1].tolist()
    [2, 0]
    """
    if not _hugging_face(data, "Dataset"):
        return None
    chosen = data._indices  # the library has no public place for it
    return data.data, np.arange(len(data)) if chosen is None else chosen.column(0).to_numpy().astype(np.int64)


@runtime_checkable
class _ByPlace(Protocol):
    """What a DataLoader takes for a map-style dataset."""

    def __getitem__(self, index: int) -> Any: ...
    def __len__(self) -> int: ...


class Examples(ByIndex):
    """A map-style dataset with the function that makes batches of its examples, and how its workers are started.

    >>> Examples(["a", "b"], lambda words: torch.tensor([ord(word) for word in words])).batch([1], default_collate)
    tensor([98])
    """

    def __init__(self, dataset: Any, collate: Collate, loading: Mapping[str, Any] | None = None) -> None:
        self.dataset, self._collate, self.loading = dataset, collate, loading or {}

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: list[int], collate: Collate) -> Batch:
        own = self._collate if collate is default_collate else collate
        return together([example(self.dataset, index) for index in indices], own)


def _of_loader(loader: DataLoader[Any], place: str) -> Any:
    """The dataset of a DataLoader, read as the loader reads it; its batches, order and sampler are not used."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, _ByPlace):
        raise DataError(_stream(dataset, f"the dataset of {place}"))
    _refuse_sampler(loader, place)
    if place == "data":
        _validate.warn(
            "the dataset, collate_fn and workers of the DataLoader are used; its batches, their size and their order "
            "are not: every step draws its own batch, as the guarantee assumes, of batch_size rows in expectation",
            LoaderWarning,
        )
    if loader.collate_fn is default_collate and type(dataset) is TensorDataset:
        return dataset  # in memory: there is nothing for workers to do
    loading = {
        "num_workers": loader.num_workers,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    if loader.collate_fn is default_collate and _hugging_face(dataset, "Dataset"):
        return HuggingFaceRows(dataset, loading)
    return Examples(dataset, loader.collate_fn, loading)


def _refuse_sampler(loader: DataLoader[Any], place: str) -> None:
    """Refuse a loader that does not go through every row once: its rows are other data than its dataset."""
    if loader.batch_sampler is None:
        raise DataError(
            f"{place} is a DataLoader with batch_size=None, whose dataset makes the batches: give a dataset of single "
            "examples"
        )
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    every = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not every or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise DataError(
            f"{place} is a DataLoader with a {type(sampler).__name__}, which may leave rows out or repeat them, and "
            "batches are not drawn by it: to train on some of the rows give torch.utils.data.Subset(dataset, indices) "
            "with indices chosen without looking at the data; to weight rows, weight their losses"
        )


def _stream(data: object, place: str) -> str:
    """Why a stream is refused, and what to do."""
    return (
        f"{place} must be readable by index, got {type(data).__name__}, a stream: every step draws each row "
        "independently of the others, so it must reach any row, and the guarantee assumes it; give the whole dataset "
        "itself, or write the stream to a file once, by datasets.Dataset.from_generator(...) or "
        'numpy.lib.format.open_memmap("rows.npy", "w+", dtype, shape)'
    )


def _of_columns(data: Any, place: str) -> Any:
    """Tensors and arrays in place of frames, columns and tables; data without these are returned as they are."""
    pair = isinstance(data, tuple | list) and len(data) == 2
    if pair and isinstance(data[1], str):
        return _with_target(data[0], data[1], place)
    for part in pytree.tree_leaves(data):
        if isinstance(part, Iterator | IterableDataset | DataLoader):
            raise DataError(_stream(part, place))
    if not any(_foreign(part) for part in pytree.tree_leaves(data)):
        return data

    def plain(path: Any, part: Any) -> Any:
        name = f"{place}{pytree.keystr(path)}"
        if arrow(part):
            raise DataError(f'{name} is a table of Arrow: give ({place}, "y"), with the name of the target\'s column')
        if isinstance(part, Frame):
            single = pair and pytree.keystr(path) == "[1]" and len(list(part.columns)) == 1
            return vector(part[next(iter(part.columns))], name) if single else matrix(part, name)  # type: ignore[index]
        return vector(part, name) if _foreign(part) else part

    return pytree.tree_map_with_path(plain, data)


def _with_target(table: Any, target: str, place: str) -> Any:
    """The features and the target of a frame or a table, by the name of the target's column."""
    if arrow(table):
        return ArrowRows(table, target, f"{place}[0]")
    if not isinstance(table, Frame):
        raise DataError(
            f"{place} names the target {target!r}, which needs a data frame or an Arrow table, got a "
            f"{type(table).__name__}: give (inputs, targets), or open files by pyarrow.dataset.dataset(path)"
        )
    index = target_in([str(name) for name in table.columns], target, f"{place}[0]")
    own = list(table.columns)[index]
    return matrix(table, f"{place}[0]", without=target), vector(table[own], f"{place}[0][{target!r}]")  # type: ignore[index]


def _foreign(part: object) -> bool:
    """Whether a part of the data is a frame, a column or a table of another library."""
    return not isinstance(part, Tensor | np.ndarray) and (isinstance(part, Frame | Series) or arrow(part))


def _hugging_face(data: object, name: str) -> bool:
    """Whether this is an object of that class of the datasets library."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, getattr(library, name))


class HuggingFaceRows(ByIndex):
    """Rows of a ``datasets.Dataset`` as a dict of tensors, in the format that is set or in that of torch.

    A transform is applied to one row at a time, so no row depends on others.

    >>> import datasets
    >>> HuggingFaceRows(datasets.Dataset.from_dict({"x": [[1.0], [2.0]]})).batch([1], default_collate)
    {'x': tensor([[2.]])}
    """

    def __init__(self, dataset: Any, loading: Mapping[str, Any] | None = None) -> None:
        self.loading = loading or {}
        kind, columns = dataset.format["type"], dataset.format["columns"]
        self._transformed = kind == "custom"
        known = self._transformed or kind in ("torch", "numpy")
        self.rows = dataset if known else dataset.with_format("torch", columns=columns)
        features = {name: dataset.features[name] for name in columns}
        self._text = [] if self._transformed else [name for name, one in features.items() if _numbers(one) is None]
        self._whole = {name for name, one in features.items() if _numbers(one) is True}
        self.steady = not self._transformed and not self._text

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: list[int], collate: Collate) -> Batch:
        if self._transformed or collate is not default_collate:
            return together([example(self.rows, index) for index in indices], collate)
        if self._text:
            raise DataError(_text(self._text))
        found = {name: self._tensor(name, column) for name, column in self.rows[indices].items()}
        for name in self._whole & found.keys():
            if found[name].is_floating_point():
                raise DataError(f"column {name!r} of data has missing values: fill them in by a fixed rule")
        return found

    def _tensor(self, name: str, column: Any) -> Tensor:
        if isinstance(column, np.ndarray) and column.dtype != object:
            return torch.from_numpy(column)
        if isinstance(column, Tensor):
            return column
        raise DataError(
            f"column {name!r} of data has rows of different shapes: bring all to one fixed shape, such as by "
            'tokenizer(..., padding="max_length", truncation=True, max_length=128)'
        )


def _numbers(feature: Any) -> bool | None:
    """Whether a feature of the datasets library holds whole numbers (True), others (False) or none (None)."""
    library = sys.modules["datasets"]
    if isinstance(feature, library.ClassLabel):
        return True
    if isinstance(feature, library.Value):
        kind = str(feature.dtype)
        return None if kind.startswith(_NO_NUMBERS) else kind.startswith(("int", "uint", "bool"))
    inner = getattr(feature, "feature", None)  # of a list
    return False if inner is None else _numbers(inner)


_NO_NUMBERS = ("string", "large_string", "binary", "large_binary", "date", "time", "duration", "null")


def _text(columns: Sequence[str]) -> str:
    named = ", ".join(map(repr, columns))
    return (
        f"column {named} of data holds text or dates, and a model needs numbers: tokenize text first, such as "
        'data.map(lambda row: tokenizer(row["text"], padding="max_length", truncation=True, max_length=128)), then '
        f"data.remove_columns([{named}])"
    )
