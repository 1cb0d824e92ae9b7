"""The defaults of `dpgrad train` for each dataset: a model, methods and settings; and the dataset as tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgrad.data import Dataset
from dpgrad.training.recipes import Recipe

__all__ = ["DataSettings", "JobRows", "constants", "job", "threads"]

EPSILON, DELTA = 3.0, 1e-5


@dataclass(frozen=True)
class DataSettings:
    """Settings for one dataset; ``largest_step`` is the learning rate times the clip bound C, without momentum.

    A method without C has the learning rate ``largest_step``, one with momentum c the share 1 − c of it: one example
    then moves the model equally far with every method. If it is None, methods keep the constants of their papers.
    Method auto chooses for itself, and none of the numbers apply to it.
    """

    model: str
    methods: tuple[str, ...]
    batch_size: int
    baseline_epochs: int
    steps: int | None = None
    epochs: int | None = None
    clip: float | None = None
    largest_step: float | None = None
    averaging: str | None = None
    threads: int | None = None  # small models are faster on one thread


# The settings of digits were chosen on six splits of its training rows, 1,150 to 287; its test rows were not used.
_DIGITS = DataSettings(
    "oriented-gradients", ("dpsgd", "autos", "psac", "psasc"),
    batch_size=512, baseline_epochs=60, steps=300, clip=0.1, largest_step=6.0, averaging="ema:0.97", threads=1,
)  # fmt: skip
_IMAGES = DataSettings("cnn", ("auto",), batch_size=512, baseline_epochs=10, epochs=20)
_VECTORS = DataSettings("linear", ("auto",), batch_size=256, baseline_epochs=10, epochs=20)


def job(data: Dataset) -> DataSettings:
    """The job for a dataset: its own, or one for images or for vectors."""
    if data.name == "digits" and data.schema is None:  # not a file of that name
        return _DIGITS
    return _IMAGES if len(data.x_train.shape) == 4 else _VECTORS


def constants(found: DataSettings, recipe: Recipe, clip: float | None) -> dict[str, float]:
    """The clip bound and learning rate of a job for one method, for options that the command line does not give."""
    if found.largest_step is None or recipe.by_rule:
        return {}
    step = found.largest_step * (1 - recipe.momentum)
    if recipe.clip is None:
        return {"learning_rate": step}
    bound = found.clip if clip is None else clip
    return {} if bound is None else {"clip": bound, "learning_rate": step / bound}


@contextmanager
def threads(found: DataSettings) -> Iterator[None]:
    """Limit torch to the job's number of threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(found.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class JobRows:
    """A dataset as tensors: training rows, held-out rows, the shape of a row, the number of outputs, the loss.

    ``kind`` is table, image or text; the rows of texts are whole numbers, and all others are float32.
    """

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor] | None
    shape: tuple[int, ...]
    outputs: int
    loss: str
    kind: str

    @classmethod
    def of(cls, data: Dataset) -> "JobRows":
        """The rows of ``data``: classes by cross-entropy, real targets by the squared loss."""
        classes = data.classes
        train = _tensors(data.x_train, data.y_train, classes is not None, data.kind)
        held_out = _tensors(data.x_test, data.y_test, classes is not None, data.kind) if len(data.y_test) else None
        shape = tuple(int(size) for size in data.x_train.shape[1:])
        loss = "squared" if classes is None else "cross-entropy"
        return cls(train, held_out, shape, 1 if classes is None else len(classes), loss, data.kind)


def _tensors(x: Any, y: Any, classes: bool, kind: str) -> tuple[Tensor, Tensor]:
    dense = x if isinstance(x, np.ndarray) else x.toarray()  # scipy's sparse rows
    inputs = torch.from_numpy(np.ascontiguousarray(dense, dtype=np.int64 if kind == "text" else np.float32))
    return inputs, torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64 if classes else np.float32))
