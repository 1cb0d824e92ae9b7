"""Rows of a dataset on the device of a trial, and what every trial does with them.

Rows are kept between the trials of a process. A search is judged on a part of the training rows
(`Loaded.searched`); the test rows are for the tables alone.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpgrad import data
from dpgrad.papers import prepared
from dpgrad.papers.experiment import Place
from dpgrad.training.curves import judging
from dpgrad.training.fit import Fitted

__all__ = ["Loaded", "accuracy", "fast_products", "load", "whole"]

_JUDGED = 2048  # rows at a time


@dataclass(frozen=True, eq=False)
class Loaded:
    """Training and test rows as tensors on a device; pixels are divided by 255.

    >>> rows = load("digits", Place())
    >>> rows.x.shape, rows.x_test.shape, rows.classes
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]), 10)
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """What `dpgrad.fit` takes."""
        return self.x, self.y

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.x.shape[1:])

    def few(self, train: int, test: int | None = None) -> "Loaded":
        """At most so many rows, evenly spaced, since some files are sorted by class: a smaller experiment.

        >>> len(load("digits", Place()).few(100).y)
        100
        """
        rows, judged = _spaced(self.y, train), _spaced(self.y_test, len(self.y_test) if test is None else test)
        return replace(self, x=self.x[rows], y=self.y[rows], x_test=self.x_test[judged], y_test=self.y_test[judged])

    def searched(self, share: float = 1 / 6) -> "Loaded":
        """The training rows alone, a share of them, picked by a fixed seed, in place of the test rows.

        >>> parts = load("digits", Place()).searched()
        >>> len(parts.y) + len(parts.y_test)
        1437
        """
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(self.y))).to(self.y.device)
        held = max(1, round(share * len(self.y)))
        out, kept = order[:held], order[held:]
        return replace(self, x=self.x[kept], y=self.y[kept], x_test=self.x[out], y_test=self.y[out])


def load(name: str, place: Place, preprocessing: str | None = None) -> Loaded:
    """The rows of a dataset by name; a prepared form of it is taken where there is one (`papers.prepared`).

    At the tiny size, that of the tests, the 8×8 digits of scikit-learn stand in for every dataset.

    >>> load("imagenette64", Place(size="tiny")).shape
    (1, 8, 8)
    """
    if place.size == "tiny":
        name, preprocessing = "digits", "default"
    return _load(name, preprocessing, place.device, data.data_folder(place.data))


@functools.lru_cache(maxsize=4)
def _load(name: str, preprocessing: str | None, device: str, folder: Path | None) -> Loaded:
    if preprocessing is None and folder is not None and prepared.path(name, folder).exists():
        arrays = prepared.load(name, folder)
        classes = int(arrays["y_train"].max()) + 1
    else:
        raw = "raw" if preprocessing is None and "raw" in data.preprocessings(name) else preprocessing
        found = data.load(name, folder, raw)
        arrays = {part: np.asarray(getattr(found, part)) for part in prepared.ARRAYS}
        classes = len(found.classes or ())
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(arrays[part])).to(device) for part in prepared.ARRAYS)
    return Loaded(_unit(x), y.long(), _unit(x_test), y_test.long(), classes)


def _spaced(labels: Tensor, most: int) -> Tensor | slice:
    """Which rows to take; a slice where it is all of them, which copies none."""
    count = min(most, len(labels))
    return slice(None) if count == len(labels) else torch.arange(count, device=labels.device) * len(labels) // count


def _unit(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


@contextmanager
def fast_products() -> Iterator[None]:
    """Within the block, products in TF32 where the device has it; the clip bound holds all the same.

    `dpgrad.grads.precision` says why.

    >>> with fast_products():
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of rows, in %, whose class has the highest score.

    >>> accuracy(nn.Identity(), torch.eye(4), torch.tensor([0, 1, 2, 0]))
    75.0
    """
    with judging(model):
        hits = sum(
            (model(x[at : at + _JUDGED]).argmax(1) == y[at : at + _JUDGED]).sum() for at in range(0, len(y), _JUDGED)
        )
    return 100 * float(hits) / len(y)


def whole(fitted: Fitted) -> Fitted:
    """The run of a trial, unless it was interrupted: `fit` returns what it has by then, which is no trial."""
    if fitted.stopped == "interrupted":
        raise KeyboardInterrupt
    return fitted
