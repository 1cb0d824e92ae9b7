"""Datasets by name, as numpy arrays, with checksums and a record of what was assumed public.

Every public module of this package is one dataset; a new file is found by its name and needs no registration.
Files are read from `root` or from the folder named by `DPGRAD_DATA`.
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dpgrad import _validate
from dpgrad._submodules import attribute
from dpgrad.data._dataset import OUTSIDE, ROW_COUNTS, Dataset
from dpgrad.data._source import Source, data_folder, read_all
from dpgrad.errors import DataError, MissingFileError

__all__ = [
    "OUTSIDE",
    "ROW_COUNTS",
    "DataError",
    "Dataset",
    "MissingFileError",
    "Source",
    "data_folder",
    "load",
    "names",
    "preprocessings",
    "read_all",
    "sources",
]


def names() -> tuple[str, ...]:
    """The names that `load` knows: one a module of this package.

    >>> names()[:4]
    ('adult', 'boston-housing', 'cifar10', 'cifar10-features')
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
    return dataset


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
