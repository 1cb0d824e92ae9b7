"""What a user's own code raises on private rows reaches nobody in its own words."""

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
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


def raising(error: Exception) -> Callable[[Any, Any], Tensor]:
    def loss(model: Any, batch: Any) -> Tensor:
        raise error

    return loss


@pytest.mark.parametrize(
    "file",
    [
        f"{sysconfig.get_path('purelib')}/acme/loss.py",
        f"{Path(dpgrad.__file__).parent}_experiments/loss.py",
        "<eval_with_key>.1",
    ],
    ids=["installed", "beside dpgrad", "without a file"],
)
def test_of_code_that_lies_elsewhere(file: str) -> None:
    names: dict[str, Any] = {}
    exec(
        compile(f"def loss(model, batch):\n    raise ValueError({SECRET!r} * bool(batch[0].sum()))", file, "exec"),
        names,
    )
    assert "raised ValueError on training rows: its words may hold values" in str(refused(loss=names["loss"]))


def of_torch_on_kept_labels(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), torch.full((len(batch[0]),), 5431), reduction="none")


def of_python_on_a_kept_cell(model: Any, batch: Any) -> Tensor:
    return model(batch[0])[:, 0] * float(f"{SECRET} 5431")


def of_an_operation_on_a_kept_place(model: Any, batch: Any) -> Tensor:
    return model(batch[0])[:, 5431 + 0 * len(batch[0])]


def of_a_distribution_on_kept_rates(model: Any, batch: Any) -> Tensor:
    return torch.distributions.Poisson(torch.full((1,), -5431.0), validate_args=True).log_prob(model(batch[0])[:, 0])


@pytest.mark.parametrize(
    "loss",
    [
        of_torch_on_kept_labels,
        of_python_on_a_kept_cell,
        of_an_operation_on_a_kept_place,
        of_a_distribution_on_kept_rates,
    ],
)
def test_of_values_that_are_no_part_of_the_batch(loss: Any) -> None:
    """Zeros raise the same: a model may keep its last input, a loss may look values up in a table."""
    said = str(refused(loss=loss))
    assert "on training rows: its words may hold values" in said
    assert "5431" not in said


@pytest.mark.parametrize("kind", [DataError, UnsupportedModelError])
def test_of_a_kind_of_dpgrad(kind: type[Exception]) -> None:
    """Words that the user's own code chose are not dpgrad's, whatever kind they come in."""

    class Told(Rows):
        def __getitem__(self, index: int) -> Any:
            raise kind(SECRET)

    def collate(examples: Any) -> Any:
        raise kind(SECRET)

    assert f"raised {kind.__name__} on training rows" in str(refused(loss=raising(kind(SECRET))))
    assert f"raised {kind.__name__} for an example of the data" in str(refused(data=Told()))
    data = torch.utils.data.TensorDataset(INPUTS, LABELS)
    assert f"raised {kind.__name__};" in str(refused(data=data, computing=dpgrad.Computing(collate=collate)))


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_of_memory_keeps_its_kind(kind: type[Exception]) -> None:
    with pytest.raises(kind) as found:
        dpgrad.fit(
            nn.Linear(4, 2), (INPUTS, LABELS), method="dpsgd", epsilon=3.0, delta=1e-3, steps=30, batch_size=20,
            loss=raising(kind(SECRET)),
        )  # fmt: skip
    assert SECRET not in "".join(traceback.format_exception(found.value))


def test_of_a_mismatch_of_types_that_the_loss_tells_itself() -> None:
    assert "its words may hold values" in str(refused(loss=raising(RuntimeError(f"wrong dtype of {SECRET}"))))


def test_of_the_length_of_a_dataset() -> None:
    class Unsized(Rows):
        def __len__(self) -> int:
            raise FileNotFoundError(SECRET)

    assert "raised FileNotFoundError for the number of its examples" in str(refused(data=Unsized()))


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
