"""Bad input: one clear line each, from both engines."""

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import Mechanism, PrivateGradient, sampling
from dpgrad.grads import ENGINES, clipped_sum
from dpgrad.grads.scaling import Hard
from dpgrad.grads.sums import Batch, Loss

pytestmark = pytest.mark.parametrize("engine", ENGINES)


def hard(norms: Tensor) -> Tensor:
    return Hard()(norms, 1.0)


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).flatten(1).sum(1)


def refused(message: str, engine: str, model: nn.Module, loss: Loss, batch: Batch, **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        clipped_sum(model, loss, batch, hard, ENGINES[engine], **options)
    assert "\n" not in str(refusal.value)


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a mean": (
        lambda y: y.mean(),
        r"one value per example, shape \(\d+,\), got shape \(\): use reduction='none', e.g. F\.",
    ),
    "a value for each output": (
        lambda y: y,
        r"got shape \(\d+, 2\): sum or average over every dimension but the first",
    ),
    "one column": (lambda y: y[:, :1], r"got shape \(\d+, 1\): sum or average"),
    "nothing": (lambda y: None, "must return a tensor with one value per example, got None"),
    "a number": (lambda y: 1.0, r"must return a tensor with one value per example, got 1\.0"),
    "a pair": (lambda y: (y.sum(1), y), "must return a tensor with one value per example, got "),
    "whole numbers": (lambda y: y.sum(1).long(), r"must return floating-point values, got torch\.int64"),
    "too many": (lambda y: torch.cat([y, y]).sum(1), r"one value per example, shape \(\d+,\), got shape \(\d+,\)"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_does_not_return_one_value_per_example(name: str, engine: str) -> None:
    returned, message = LOSSES[name]
    refused(message, engine, nn.Linear(3, 2), lambda model, x: returned(model(x)), torch.randn(4, 3))


@pytest.mark.parametrize("batch", [(torch.ones(4, 3), torch.ones(5)), {"x": torch.ones(4, 3), "y": torch.ones(5)}])
def test_first_dimensions_that_differ(batch: Batch, engine: str) -> None:
    refused(r"one first dimension, got \[4, 5\]: one entry per example", engine, nn.Linear(3, 2), total, batch)


class Pair(NamedTuple):
    """Batches may be named tuples."""

    x: Tensor
    y: Tensor


NOT_TENSORS: dict[str, tuple[Batch, str]] = {
    "an array": (np.ones((4, 3)), r"got a ndarray: convert it with torch\.as_tensor"),
    "a list of numbers": ([1.0, 2.0], r"got a float at \[0\]"),
    "text beside a tensor": ({"x": torch.ones(4, 3), "name": "abc"}, r"got a str at \['name'\]"),
    "None beside a tensor": (Pair(torch.ones(4, 3), None), r"got a NoneType at \.y"),  # type: ignore[arg-type]
    "a tokenizer's result": (UserDict(x=torch.ones(4, 3)), r"got a UserDict: convert it with .* dict\(\.\.\.\)"),
    "a single number": (torch.tensor(1.0), "a first dimension of examples, got a 0-dimensional tensor"),
    "a single label": (
        (torch.ones(4, 3), torch.tensor(1)),
        "a first dimension of examples, got a 0-dimensional tensor",
    ),
    "an empty tuple": ((), r"batch must hold a tensor, got \(\)"),
}


@pytest.mark.parametrize("name", NOT_TENSORS)
def test_a_batch_that_is_not_made_of_tensors(name: str, engine: str) -> None:
    batch, message = NOT_TENSORS[name]
    refused(message, engine, nn.Linear(3, 2), total, batch)


def test_what_is_refused_as_it_is_works_when_converted(engine: str) -> None:
    """The remedies that the messages name."""
    x = torch.randn(4, 3)
    model = nn.Linear(3, 2)
    plain = clipped_sum(model, total, x, hard, ENGINES[engine]).sums
    named = clipped_sum(model, lambda model, b: total(model, b["x"]), dict(UserDict(x=x)), hard, ENGINES[engine]).sums
    array = torch.as_tensor(x.numpy())
    for found in (named, clipped_sum(model, total, array, hard, ENGINES[engine]).sums):
        assert all(torch.equal(found[name], value) for name, value in plain.items())


TYPES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "linear": (lambda: nn.Linear(3, 2), lambda x: x),
    "convolution": (lambda: nn.Conv1d(1, 2, 2), lambda x: x[:, None]),
    "transposed convolution": (lambda: nn.ConvTranspose1d(1, 2, 2), lambda x: x[:, None]),
    "layer norm": (lambda: nn.LayerNorm(3), lambda x: x),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True),
        lambda x: x[:, :, None].repeat(1, 1, 4),
    ),
}


def test_a_loss_that_takes_entries_out_of_its_batch(engine: str) -> None:
    """As loops for Hugging Face models do. It is called again on the same batch, to be compared among others."""
    model, rows = nn.Linear(3, 2), {"inputs": torch.randn(4, 3), "labels": torch.tensor([0, 1, 1, 0])}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(model(*batch.values()), labels, reduction="none")

    mechanism = Mechanism(sampling.FullBatch(), steps=2, noise_multiplier=1.0, batch_size=4)
    private = PrivateGradient(model, loss, mechanism, engine=engine)
    private.step(rows)
    private.step(rows)
    assert list(rows) == ["inputs", "labels"]
    assert private.way.name in ("batched", engine)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.uint8])
@pytest.mark.parametrize("name", TYPES)
def test_an_input_of_another_type_than_the_model(name: str, dtype: torch.dtype, engine: str) -> None:
    make, shaped = TYPES[name]
    batch = {"x": torch.ones(4, 3, dtype=dtype), "y": torch.ones(4)}
    message = (
        r"types do not match \(.*\): the model is torch\.float32, batch\['x'\] is "
        rf"{dtype}, batch\['y'\] is torch\.float32: convert inputs, and targets that are numbers, with \.to\("
    )
    refused(message, engine, make(), lambda model, b: total(model, shaped(b["x"])) * b["y"], batch)


def test_indices_and_labels_of_another_type(engine: str) -> None:
    words = nn.Sequential(nn.Embedding(5, 2), nn.Flatten())
    message = r"types do not match .* batch is torch\.float32: .* indices and class labels with \.long\(\)"
    refused(message, engine, words, total, torch.ones(4, 3))

    def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    message = r"types do not match .* batch\[1\] is torch\.float32: .* indices and class labels with \.long\(\)"
    refused(message, engine, nn.Linear(3, 2), entropy, (torch.randn(4, 3), torch.ones(4)))


def test_an_error_of_the_loss_itself_is_left_as_it_is(engine: str) -> None:
    def failing(model: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("the file is gone")

    with pytest.raises(RuntimeError, match=r"^the file is gone$"):
        clipped_sum(nn.Linear(3, 2), failing, torch.randn(4, 3), hard, ENGINES[engine])
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
        clipped_sum(nn.Linear(3, 2), total, torch.randn(4, 5), hard, ENGINES[engine])


def test_a_model_on_another_device(engine: str) -> None:
    message = r"batch lies on cpu and the model on meta: move one with \.to\(device\)"
    refused(message, engine, nn.Linear(3, 2, device="meta"), total, torch.randn(4, 3))
    message = r"batch lies on meta and the model on cpu: move one with \.to\(device\)"
    refused(message, engine, nn.Linear(3, 2), total, (torch.randn(4, 3), torch.ones(4, device="meta")))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4),
        torch.ones(4, dtype=torch.int64),
        torch.ones(5, dtype=torch.bool),
        torch.ones(4, 2, dtype=torch.bool),
    ],
)
def test_a_mask_of_another_type_or_shape(mask: Tensor, engine: str) -> None:
    message = r"mask must be boolean with one entry per example or row, \(4, 1\), got torch\."
    refused(message, engine, nn.Linear(3, 2), total, torch.randn(4, 3), mask=mask)


def test_a_mask_that_is_no_tensor(engine: str) -> None:
    message = "mask must be boolean with one entry per example or row"
    refused(message, engine, nn.Linear(3, 2), total, torch.randn(4, 3), mask=[True] * 4)


@pytest.mark.parametrize("examples", [0, 4])
@pytest.mark.parametrize("microbatch", [0, -1, 1.5, "2", True])
def test_a_microbatch_that_is_no_number_of_examples(microbatch: Any, examples: int, engine: str) -> None:
    message = "microbatch must be a whole number"
    refused(message, engine, nn.Linear(3, 2), total, torch.randn(examples, 3), microbatch=microbatch)


@pytest.mark.parametrize("examples", [0, 4])
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"weight": 0, "bias": 0, "wieght": 1}, r"unknown \['wieght'\] and missing \[\]"),
        ({"weight": 0}, r"unknown \[\] and missing \['bias'\]"),
        ({}, r"missing \['bias', 'weight'\]"),
        ({"weight": -1, "bias": 0}, "group of weight must be a whole number of at least 0, got -1"),
        ({"weight": "a", "bias": 0}, "group of weight must be a whole number, got 'a'"),
    ],
)
def test_groups_that_do_not_cover_the_parameters(groups: Any, message: str, examples: int, engine: str) -> None:
    refused(message, engine, nn.Linear(3, 2), total, torch.randn(examples, 3), groups=groups)


@pytest.mark.parametrize(
    "batch",
    [torch.ones(4), torch.ones(4, 0, 3), (torch.ones(4, 2, 3), torch.ones(4, 3)), (torch.ones(4, 2, 3), torch.ones(4))],
)
def test_several_rows_that_are_not_there(batch: Batch, engine: str) -> None:
    message = r"with several rows per example every tensor must begin with \(examples, rows\), one row or more, got \["
    refused(message, engine, nn.Linear(3, 2), total, batch, several_rows=True)


def test_a_model_that_is_no_module(engine: str) -> None:
    refused("model must be a torch.nn.Module, got <function", engine, F.relu, total, torch.randn(4, 3))  # type: ignore[arg-type]


class Scripted(nn.Module):
    """A model that torch can script."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_models_that_hide_their_modules(engine: str) -> None:
    x = torch.randn(4, 3)
    parallel = nn.DataParallel(Scripted())
    refused("^the model is wrapped in DataParallel, .*: give the model unwrapped", engine, parallel, total, x)
    refused("^module '0' of the model is wrapped in DataParallel", engine, nn.Sequential(parallel), total, x)
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(Scripted())
    refused("module 'itself' is a TorchScript one: give the module it was made from", engine, scripted, total, x)
    with pytest.warns(DeprecationWarning, match="jit"):
        inner = nn.Sequential(torch.jit.script(Scripted()))
    refused("module '0' is a TorchScript one", engine, inner, total, x)
