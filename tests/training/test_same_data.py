"""The whole dataset at every step: batches in its place are noticed at the second, and the same data are recognised."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from dpgrad import Mechanism, PrivateGradient
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import Key
from dpgrad.training.source import Remembered

ROWS = 32
OTHERS = "data must be the whole dataset, with the same rows at every step"
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch.values() if isinstance(batch, dict) else batch
    out: Tensor = nn.functional.cross_entropy(model(x.float()), y, reduction="none")
    return out


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 5, generator=random), torch.randint(3, (ROWS,), generator=random)


def private(steps: int = 4) -> PrivateGradient:
    plan = Mechanism(sampling.Poisson(0.5), steps, 1.0, batch_size=16.0)
    return PrivateGradient(nn.Linear(5, 3), loss, plan)


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """A Dataset that is no TensorDataset, and whose examples need not be the same twice."""

    def __init__(self, seed: int = 0, jitter: bool = False) -> None:
        self.x, self.y = rows(seed)
        self.jitter = jitter

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + (torch.randn(5) if self.jitter else 0), self.y[index]


def arrays(seed: int = 0) -> tuple[Any, ...]:
    return tuple(column.numpy() for column in rows(seed))


def doubles(seed: int = 0) -> tuple[Any, ...]:
    """Arrays of which a step reads copies: the model is of another type."""
    x, y = arrays(seed)
    return x.astype(np.float64), y


# The data of the first step, and others of the second that only look like them.
OTHER: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensors": (rows, lambda _: rows(1)),
    "other labels": (rows, lambda data: (data[0], (data[1] + 1) % 3)),
    "arrays": (arrays, lambda _: arrays(1)),
    "a dict": (lambda: dict(zip("xy", rows(), strict=True)), lambda _: dict(zip("xy", rows(1), strict=True))),
    "another order": (rows, lambda data: tuple(column.flip(0) for column in data)),
    "a TensorDataset": (lambda: TensorDataset(*rows()), lambda _: TensorDataset(*rows(1))),
    "a Dataset": (Examples, lambda _: Examples(1)),
    "a part of a Dataset": (
        lambda: Subset(TensorDataset(*rows()), range(16)),
        lambda data: Subset(data.dataset, range(16, 32)),
    ),
    "a Dataset in place of tensors": (rows, lambda _: Examples(1)),
    "tensors in place of a Dataset": (Examples, lambda _: rows(1)),
    "fewer": (rows, lambda data: tuple(column[:-1] for column in data)),
    "noise on all": (rows, lambda data: (data[0] + torch.randn(ROWS, 5), data[1])),
    "one column less": (lambda: (*rows(), torch.zeros(ROWS)), lambda data: data[:2]),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_rows_are_refused_at_the_second_step(name: str) -> None:
    make, change = OTHER[name]
    data = make()
    one = PrivateGradient(
        nn.Linear(5, 3), lambda model, batch: loss(model, batch if isinstance(batch, dict) else batch[:2]),
        Mechanism(sampling.Poisson(0.5), 4, 1.0, batch_size=16.0),
    )  # fmt: skip
    one.step(data)
    with pytest.raises(ValueError, match=OTHERS):
        one.step(change(data))
    assert one.steps_taken == 1
    one.step(data)


def test_batches_of_a_loader() -> None:
    first, second, *_ = DataLoader(TensorDataset(*rows()), batch_size=8)
    one = private()
    one.step(first)
    with pytest.raises(ValueError, match="Give the dataset of a loader, not its batches"):
        one.step(second)


@pytest.mark.parametrize("make", [iter, lambda loader: (batch for batch in loader)])
def test_what_passes_by_is_refused_at_the_first_step(make: Any) -> None:
    with pytest.raises(ValueError, match="give the whole dataset itself"):
        private().step(make(DataLoader(TensorDataset(*rows()), batch_size=8)))


def refilled(data: Any, into: Callable[[Any, Any], object]) -> None:
    for column, other in zip(data, rows(1), strict=True):
        into(column, other)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (rows, lambda data: refilled(data, lambda column, other: column.copy_(other))),
        (arrays, lambda data: refilled(data, lambda column, other: np.copyto(column, other.numpy()))),
        (rows, lambda data: refilled(data, lambda column, other: np.copyto(column.numpy(), other.numpy()))),
        (doubles, lambda data: np.copyto(data[0], doubles(1)[0])),  # not the labels, which are no copies
        (lambda: dict(zip("xy", doubles(), strict=True)), lambda data: data.update(zip("xy", doubles(1), strict=True))),
        (lambda: list(doubles()), lambda data: data.__setitem__(slice(None), doubles(1))),
        (lambda: dict(zip("xy", rows(), strict=True)), lambda data: data.update(zip("xy", rows(1), strict=True))),
        (lambda: list(rows()), lambda data: data.__setitem__(slice(None), rows(1))),
    ],
    ids=["torch", "numpy", "tensors by numpy", "copied", "copied in a dict", "copied in a list", "dict", "list"],
)
def test_other_rows_in_the_same_place(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    one, data = private(), make()
    one.step(data)
    change(data)
    with pytest.raises(ValueError, match=OTHERS):
        one.step(data)


def test_memory_that_is_freed_cannot_be_taken_for_the_first_data() -> None:
    one = private()
    one.step(rows())
    for seed in range(1, 20):
        with pytest.raises(ValueError, match=OTHERS):
            one.step(rows(seed))


def test_a_step_that_was_charged_is_not_computed_on_other_data() -> None:
    one, data = private(), rows()
    step = one.charged(data)
    with pytest.raises(ValueError, match=OTHERS):
        one.compute(rows(1), step)
    one.compute(data, step)


SAME: dict[str, Callable[[tuple[Tensor, Tensor]], Any]] = {
    "the same": lambda data: data,
    "another tuple": lambda data: (data[0], data[1]),
    "a list": lambda data: list(data),
    "copies": lambda data: tuple(column.clone() for column in data),
    "views": lambda data: tuple(column[:] for column in data),
    "read again": lambda data: rows(),
    "arrays": lambda data: tuple(column.numpy().copy() for column in data),
    "in other memory order": lambda data: (data[0].T.contiguous().T, data[1]),
    "in float64": lambda data: (data[0].double(), data[1]),
    "a TensorDataset": lambda data: TensorDataset(*data),
    "detached": lambda data: (data[0].detach(), data[1]),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_data_in_another_form_are_taken(name: str) -> None:
    one, data = private(), rows()
    one.step(data)
    one.step(SAME[name](data))
    one.step(SAME[name](data))
    assert one.steps_taken == 3


def test_a_dict_made_anew_in_another_order() -> None:
    seen = Remembered.of(dict(zip("xy", rows(), strict=True)), Key.fresh())
    assert seen.holds(dict(reversed(dict(zip("xy", rows(), strict=True)).items())))


def test_a_dataset_whose_examples_vary() -> None:
    one, data = private(), Examples(jitter=True)
    for _ in range(3):
        one.step(data)
    assert one.steps_taken == 3


def test_another_dataset_with_the_same_examples() -> None:
    one = private()
    one.step(Examples())
    one.step(Examples())


def test_a_file_that_is_opened_again(tmp_path: Path) -> None:
    x, y = arrays()
    np.save(tmp_path / "x.npy", x)
    one = private()
    for _ in range(3):
        one.step((np.load(tmp_path / "x.npy", mmap_mode="r"), y))
    np.save(tmp_path / "x.npy", arrays(1)[0])
    with pytest.raises(ValueError, match=OTHERS):
        one.step((np.load(tmp_path / "x.npy", mmap_mode="r"), y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_that_are_not_numbers_are_equal_to_themselves(dtype: torch.dtype) -> None:
    x = torch.full((ROWS, 5), math.nan, dtype=dtype)
    seen = Remembered.of(x, Key.fresh())
    assert seen.holds(x.clone())
    assert not seen.holds(torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(3, 70, 70), (100_000,), ()])
def test_rows_of_any_length(shape: tuple[int, ...]) -> None:
    x = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))
    seen = Remembered.of(x, Key.fresh())
    assert seen.holds(x.clone())
    assert not seen.holds(torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1)))


def test_no_rows_and_rows_of_inference_mode() -> None:
    seen = Remembered.of(torch.zeros(0, 3), Key.fresh())
    assert seen.holds(torch.zeros(0, 3))
    with torch.inference_mode():
        x = torch.randn(ROWS, 3)
    assert Remembered.of(x, Key.fresh()).holds(x)


def test_the_message_says_nothing_of_the_data() -> None:
    said = []
    for seed in (1, 2):
        one = private()
        one.step(rows())
        with pytest.raises(ValueError, match=OTHERS) as caught:
            one.step(tuple(column[: seed * 3] for column in rows(seed)))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert not any(sign.isdigit() for sign in said[0])


@on_cuda
def test_cuda_the_same_tensors_are_known_without_waiting() -> None:
    data = tuple(column.cuda() for column in rows())
    seen = Remembered.of(data, Key.fresh())
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert seen.holds((data[0], data[1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen.holds(rows())
    assert seen.holds(tuple(column.clone() for column in data))
    assert not seen.holds(tuple(column.cuda() for column in rows(1)))
    data[0].copy_(rows(1)[0])
    assert not seen.holds(data)


def test_tensors_of_lists_in_a_tuple_that_are_exchanged() -> None:
    data = tuple([leaf] for leaf in rows())
    assert Remembered.of(rows(), Key.fresh()).steady()
    seen = Remembered.of(data, Key.fresh())
    assert seen.holds(data)
    for held, other in zip(data, rows(1), strict=True):
        held[0] = other
    assert not seen.steady()
    assert not seen.holds(data)
