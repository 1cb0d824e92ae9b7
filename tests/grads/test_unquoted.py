"""What a user's own code raises on private rows reaches nobody in its own words."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, get_worker_info

import dpgrad
from dpgrad.errors import DataError, UnsupportedModelError
from dpgrad.training.forms import LoaderWarning

SECRET = "Smith, 54"
INPUTS = torch.ones(60, 4)
LABELS = torch.ones(60, dtype=torch.int64)


def failing_from(call: int, kind: type[Exception]) -> Callable[[Any, Any], Tensor]:
    calls = []

    def loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) >= call:
            raise kind(SECRET)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return loss


class Rows(Dataset[Any]):
    def __init__(self, in_worker: bool = False) -> None:
        self._in_worker = in_worker

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        if not self._in_worker or get_worker_info() is not None:
            raise FileNotFoundError(SECRET)
        return INPUTS[index], LABELS[index]


class Telling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum():
            raise ValueError(f"{SECRET} {x}")
        return super().forward(x)


def refused(model: nn.Module | None = None, data: Any = (INPUTS, LABELS), **options: Any) -> dpgrad.DpgradError:
    with pytest.raises(dpgrad.DpgradError) as found:
        dpgrad.fit(
            model or nn.Linear(4, 2), data, method="dpsgd", epsilon=3.0, delta=1e-3, steps=30, batch_size=20, **options
        )
    printed = "".join(traceback.format_exception(found.value))
    assert SECRET not in printed
    assert "tensor(" not in printed
    return found.value


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize("call", [1, 3, 25], ids=["first", "compared", "in a step"])
def test_of_a_loss(call: int, kind: type[Exception]) -> None:
    said = refused(loss=failing_from(call, kind))
    assert f"raised {kind.__name__} on training rows: its words may hold values" in str(said)
    assert "test_unquoted.py, line" in str(said)
    assert isinstance(said.__context__, kind)  # for a debugger


@pytest.mark.parametrize("engine", ["vmap", "single"])
def test_of_a_loss_by_other_engines(engine: str) -> None:
    assert "RuntimeError" in str(refused(loss=failing_from(1, RuntimeError), computing=dpgrad.Computing(engine=engine)))


def test_of_a_model() -> None:
    for loss in ("cross-entropy", "bce"):
        labels = LABELS if loss == "cross-entropy" else torch.ones(60, 2)
        assert "raised ValueError on training rows" in str(refused(Telling(4, 2), (INPUTS, labels), loss=loss))


@pytest.mark.parametrize("units", [None, list(range(60))], ids=["rows", "persons"])
def test_of_a_dataset(units: Any) -> None:
    said = refused(data=Rows(), privacy=dpgrad.Privacy(units=units))
    assert isinstance(said, DataError)
    assert "raised FileNotFoundError for an example of the data" in str(said)


def test_of_a_worker_in_one_line() -> None:
    with pytest.warns(LoaderWarning):
        said = refused(data=DataLoader(Rows(in_worker=True), batch_size=20, num_workers=1))
    assert str(said).count("\n") == 0
    assert "raised FileNotFoundError for an example" in str(said)


def test_words_that_follow_from_shapes_are_shown() -> None:
    def wrong(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1][:, None], reduction="none")

    assert "multi-target not supported" in str(refused(loss=wrong))


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
def test_rows_of_another_width_are_refused_by_their_shape_and_the_layer(loss: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2 if loss == "cross-entropy" else 1))
    targets = LABELS if loss == "cross-entropy" else LABELS.float()
    said = refused(model, (INPUTS, targets), loss=loss)
    assert isinstance(said, UnsupportedModelError)
    assert "rows of shape (4,) do not fit layer '1' (Linear(in_features=5, out_features=3, bias=True))" in str(said)
