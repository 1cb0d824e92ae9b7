"""Datasets by name, and files of your own, as numpy arrays with a record of what was assumed public.

`read` takes a file and the schema that describes it. Every public module of this package is one dataset; a new file is
found by its name and needs no registration.
Files are read from `root` or from the folder named by `DPGRAD_DATA`.

>>> from dpgrad import data
>>> digits = data.load("digits")
>>> digits.x_train.shape, digits.x_test.shape
((1437, 1, 8, 8), (360, 1, 8, 8))
"""

import importlib
import os
import pkgutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dpgrad import _validate
from dpgrad._submodules import attribute
from dpgrad.data._columns import Column, Target
from dpgrad.data._csv import SEPARATORS
from dpgrad.data._dataset import OUTSIDE, ROW_COUNTS, Dataset
from dpgrad.data._describe import NOTICE, describe
from dpgrad.data._numbers import Array, fits, numbers
from dpgrad.data._prepare import ALL_ROWS, OFFICIAL
from dpgrad.data._read import ROW, encode, identified, read
from dpgrad.data._schema import FileFormat, Schema, Split
from dpgrad.data._source import Source, data_folder, read_all
from dpgrad.data._toml import schema_of, written
from dpgrad.errors import DataError, MissingFileError

__all__ = [
    "NOTICE",
    "OUTSIDE",
    "ROW",
    "ROW_COUNTS",
    "SEPARATORS",
    "Array",
    "Column",
    "DataError",
    "Dataset",
    "FileFormat",
    "MissingFileError",
    "Schema",
    "Source",
    "Split",
    "Target",
    "data_folder",
    "describe",
    "encode",
    "fits",
    "identified",
    "is_file",
    "load",
    "names",
    "numbers",
    "preprocessings",
    "read",
    "read_all",
    "schema_of",
    "sources",
    "written",
]


def names() -> tuple[str, ...]:
    """The names that `load` knows, one per module of this package.

    >>> names()[:4]
    ('adult', 'boston-housing', 'celeba', 'cifar10')
    """
    modules = (found.name for found in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in modules if not name.startswith("_")))


def load(
    name: str, root: Path | str | None = None, preprocessing: str | None = None, *, download: bool = False
) -> Dataset:
    """One dataset, checked against its published checksums and prepared by a named recipe.

    The default recipe uses public constants only. Recipes named after papers repeat what the papers did, also where
    that reads the private rows; `Dataset.outside_guarantee` then says so.

    Guarantee: loading spends nothing and protects nothing. What `Dataset.public` lists is assumed public, and an
    entry marked "outside the guarantee" is not covered by any epsilon computed later.

    >>> load("digits")
    Dataset('digits', train=(1437, 1, 8, 8), test=(360, 1, 8, 8), classes=10, preprocessing='default')
    >>> load("digit")
    Traceback (most recent call last):
    dpgrad.errors.DataError: dataset must be one of adult, ..., got 'digit': did you mean digits?
    """
    dataset = _module(name).load(
        None if root is None else Path(root), preprocessing=preprocessing or "default", download=download
    )
    if not isinstance(dataset, Dataset):
        raise TypeError(f"dpgrad.data.{name}.load must return a Dataset, got {type(dataset).__name__}")
    return replace(dataset, by_position=dataset.split not in (OFFICIAL, ALL_ROWS))  # a rule of its own counts rows


def is_file(name: str) -> bool:
    """Whether ``name`` is meant as a user's own file or folder, not as the name of a dataset.

    >>> is_file("digits"), is_file("people.csv"), is_file("hf:reviews")
    (False, True, True)
    """
    return name not in names() and (os.sep in name or "." in name or name.startswith("hf:") or os.path.exists(name))


def preprocessings(name: str) -> tuple[str, ...]:
    """The recipes a dataset offers; the first, "default", reads nothing private.

    >>> preprocessings("adult")
    ('default', 'yu2020')
    """
    return tuple(_module(name).PREPROCESSINGS)


def sources(name: str) -> tuple[Source, ...]:
    """The files a dataset is read from, with checksum and place of publication; none for embedded sets.

    >>> sources("digits")
    ()
    >>> sources("covertype")[0].file
    'covtype.data.gz'
    """
    return tuple(_module(name).SOURCES)


def _module(name: str) -> ModuleType:
    _validate.one_of(names(), error=DataError, dataset=name)
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
