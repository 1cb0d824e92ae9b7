"""Losses by name, and the metrics by which held-out rows are judged.

A loss gives one value per example, never a mean: each example's gradient is scaled by itself.

>>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
tensor([1.3863, 1.3863])
>>> named = loss_named("cross-entropy")
>>> named(nn.Linear(3, 4), (torch.zeros(2, 3), torch.tensor([0, 3]))).shape
torch.Size([2])
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.accounting.guarantee import several
from dpgrad.errors import DataError, OptionError, UnsupportedModelError
from dpgrad.grads.sums import Batch, Loss

__all__ = [
    "LOSSES", "METRICS", "Metric", "NamedLoss", "PerRow", "accuracy", "bce", "cross_entropy", "huber", "loss_named",
    "metric_named", "outputs_and_targets", "pair", "refuse_targets", "squared", "targets_of",
]  # fmt: skip

PerRow = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one value per row


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(outputs)[target]; outputs (rows, classes), targets class indices (rows,).

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([2]))
    Traceback (most recent call last):
    dpgrad.errors.DataError: targets must be class indices from 0 to 1: the model has 2 outputs; give it one ...
    """
    classes = outputs.shape[-1]
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1]:
        of_tokens = _OF_TOKENS if outputs.ndim == 3 else ""
        remedy = "take the one column of the targets, y[:, 0]"
        if outputs.ndim != 2 or targets.shape != (len(outputs), 1):
            remedy = f"use a loss of your own for other shapes{of_tokens}"
        raise DataError(
            f"cross-entropy needs outputs (rows, classes) and targets (rows,), got outputs {_shape(outputs)} and "
            f"targets {_shape(targets)}: {remedy}"
        )
    if targets.is_floating_point():
        raise DataError(
            f"cross-entropy needs class indices as targets, got {targets.dtype}: remove rows without a "
            "target, then convert with .long(), or .astype(int) of a column"
        )
    try:
        # torch skips targets equal to ignore_index, by default -100; a wrong label must not be skipped
        return F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=_NO_CLASS)
    except IndexError:  # its message repeats the label, which is private
        raise DataError(_wrong_class(classes)) from None


_NO_CLASS = -(1 << 40)
_OF_TOKENS = (
    ', for one label per token such as loss=lambda model, batch: F.cross_entropy(model(batch["input_ids"]).logits'
    '.transpose(1, 2), batch["labels"], reduction="none").mean(1)'
)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ over labels of the binary cross-entropy of outputs as logits; outputs and targets (rows, labels) or (rows,).

    >>> bce(torch.zeros(1, 3), torch.tensor([[1, 0, 1]]))
    tensor([2.0794])
    """
    logits, labels = _paired("bce", outputs, targets)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ (output − target)²/2; outputs and targets (rows, ...) with the same number of entries.

    >>> squared(torch.tensor([[3.0]]), torch.tensor([1.0]))
    tensor([2.])
    """
    found, wanted = _paired("squared", outputs, targets)
    return (found - wanted).square().sum(1) / 2


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ d²/2 where |d| ≤ 1 and |d| − 1/2 beyond, for d = output − target.

    >>> huber(torch.tensor([[3.0], [0.5]]), torch.zeros(2))
    tensor([2.5000, 0.1250])
    """
    found, wanted = _paired("huber", outputs, targets)
    return F.huber_loss(found, wanted, reduction="none").sum(1)


LOSSES: dict[str, PerRow] = {"cross-entropy": cross_entropy, "bce": bce, "squared": squared, "huber": huber}


def _paired(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as (rows, entries), the targets in the type of the outputs."""
    if len(outputs) != len(targets) or outputs.numel() != targets.numel():
        raise DataError(
            f"{name} needs as many targets as outputs, got outputs {_shape(outputs)} and targets {_shape(targets)}"
        )
    rows = len(outputs)
    return outputs.reshape(rows, -1), targets.reshape(rows, -1).to(outputs.dtype)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _wrong_class(classes: int) -> str:
    return (
        f"targets must be class indices from 0 to {classes - 1}: the model has {several('output', classes)}; give it "
        "one for each class; subtract 1 from labels that begin at 1, and of labels −1 and 1 take (labels + 1) // 2"
    )


_WRONG_SHARE = "targets of bce must lie from 0 to 1: of labels −1 and 1 take (labels + 1) / 2"


@dataclass(frozen=True)
class NamedLoss:
    """A loss of `LOSSES` as a function of a model and a batch (inputs, targets), which is what a private step takes.

    >>> NamedLoss("huber")
    NamedLoss(name='huber')
    """

    name: str

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return LOSSES[self.name](*outputs_and_targets(model, batch))


_TARGETS = ("labels", "label")  # of a dict, as Hugging Face names them


def outputs_and_targets(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The outputs of a model for a batch, and its targets, which a loss by name compares.

    A batch is a pair (inputs, targets), or a dict with ``labels`` whose other entries are keyword arguments of the
    model; a single one that the model does not know by name is its input. Of outputs with ``logits`` these are taken.

    >>> outputs_and_targets(nn.Identity(), {"image": torch.ones(1, 2), "label": torch.tensor([1])})
    (tensor([[1., 1.]]), tensor([1]))
    """
    targets = targets_of(batch)
    if not isinstance(batch, dict):
        outputs = model(batch[0])
    else:
        inputs = {name: value for name, value in batch.items() if name not in _TARGETS}
        known = inspect.signature(model.forward).parameters
        alone = len(inputs) == 1 and not inputs.keys() & known.keys()
        outputs = model(*inputs.values()) if alone else model(**inputs)
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor):
        raise UnsupportedModelError(
            "a loss by name needs a model that returns a tensor, or an object with logits, got a "
            f"{type(outputs).__name__}: give a loss of your own, a function of (model, batch) that returns one value "
            "per example"
        )
    return found, targets


def targets_of(batch: Batch) -> Any:
    """The second of a pair, or the labels of a dict.

    >>> targets_of({"input_ids": torch.zeros(1, 4), "labels": torch.tensor([1])})
    tensor([1])
    """
    if not isinstance(batch, dict):
        return pair(batch)[1]
    named = [name for name in _TARGETS if name in batch]
    if len(named) != 1 or len(batch) < 2:
        raise DataError(
            f"a loss by name needs one column labels or label, and inputs, got {', '.join(map(str, batch))}: rename "
            "the column of targets, or give a loss of your own, a function of (model, batch) that returns one value "
            "per example"
        )
    return batch[named[0]]


def pair(batch: Batch) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of a batch; a batch of another form needs a loss of its own.

    >>> pair(torch.zeros(3))
    Traceback (most recent call last):
    dpgrad.errors.DataError: a loss by name needs data as a pair (inputs, targets), got Tensor: give a loss ...
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(
            f"a loss by name needs data as a pair (inputs, targets), got {kind}: give a loss of your own, "
            "a function of (model, batch) that returns one value per example"
        )
    return batch[0], batch[1]


def loss_named(loss: str | Loss) -> Loss:
    """The loss of that name; a function of (model, batch) is passed on as it is.

    >>> loss_named("crossentropy")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: loss must be a function of (model, batch) or one of cross-entropy, ...
    """
    if str(getattr(loss, "__module__", "")).startswith("torch."):
        raise OptionError(_of_outputs(loss))
    if callable(loss):
        return loss
    given: object = loss
    if getattr(given, "shape", ()) != () or isinstance(given, list | tuple):
        raise OptionError(
            "loss must be a function of (model, batch) or a name, got what looks like targets: give rows and "
            "targets as one pair, fit(model, (X, y), epsilon=..., delta=...)"
        )
    _validate.one_of(LOSSES, "a function of (model, batch)", loss=loss)
    return NamedLoss(loss)


# The losses of torch that are, up to a constant factor, those of a name here.
_TORCH = {
    "crossentropyloss": "cross-entropy",
    "crossentropy": "cross-entropy",
    "bcewithlogitsloss": "bce",
    "binarycrossentropywithlogits": "bce",
    "mseloss": "squared",
    "huberloss": "huber",
    "smoothl1loss": "huber",
}


def _of_outputs(loss: object) -> str:
    """Why a loss of torch is refused, and the line to write in its place."""
    name = str(getattr(loss, "__name__", type(loss).__name__))
    named = _TORCH.get(name.replace("_", "").lower())
    said = "" if named is None else f'loss="{named}", or '
    called = f'F.{name}(model(batch[0]), batch[1], reduction="none")'
    if isinstance(loss, nn.Module | type):
        called = f'nn.{name}(reduction="none")(model(batch[0]), batch[1])'
    return (
        f"loss must be a function of (model, batch) with one value per example, and {name} of torch is one of outputs "
        f"and targets: write {said}loss=lambda model, batch: {called}"
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is that of the target's class; for several labels a row, the share that is right.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    if outputs.ndim == 2 and outputs.shape[1] > 1 and targets.shape == outputs.shape[:1]:
        return (outputs.argmax(1) == targets).float()
    found, wanted = _paired("accuracy", outputs, targets)
    return ((found > 0) == (wanted > 0.5)).float().mean(1)


METRICS: dict[str, PerRow] = {"accuracy": accuracy, **LOSSES}


@dataclass(frozen=True)
class Metric:
    """A name and a function of (model, batch) with one value per row, of which the mean over held-out rows is shown.

    >>> metric_named("accuracy", NamedLoss("cross-entropy")).name
    'accuracy'
    """

    name: str
    values: Loss


def metric_named(metric: str | PerRow | None, loss: Loss) -> Metric:
    """The metric of that name, or a function of (outputs, targets) with one value per row.

    None is the accuracy of a classifier and the loss of anything else.

    >>> metric_named(None, NamedLoss("squared")).name, metric_named(None, NamedLoss("cross-entropy")).name
    ('squared', 'accuracy')
    """
    if metric is None:
        if not isinstance(loss, NamedLoss):
            return Metric("loss", loss)
        metric = "accuracy" if loss.name in ("cross-entropy", "bce") else loss.name
    if metric == "loss":
        return Metric("loss", loss)
    if isinstance(metric, str):
        _validate.one_of(METRICS, metric=metric)
        name, values = metric, METRICS[metric]
    else:
        name, values = getattr(metric, "__name__", type(metric).__name__), metric

    def of_rows(model: nn.Module, batch: Batch) -> Tensor:
        return values(*outputs_and_targets(model, batch))

    return Metric(name, of_rows)


def refuse_targets(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Refuse labels that the model has no output for, or bce no meaning, before the first step; none is repeated.

    ``outputs`` are those of some rows, ``targets`` those of all.

    >>> refuse_targets(NamedLoss("cross-entropy"), torch.zeros(1, 3), torch.tensor([0, 3]))
    Traceback (most recent call last):
    dpgrad.errors.DataError: targets must be class indices from 0 to 2: the model has 3 outputs; give it one ...
    """
    if loss == NamedLoss("bce") and targets.numel():
        low, high = torch.aminmax(targets)
        if float(low) < 0 or float(high) > 1:
            raise DataError(_WRONG_SHARE)
    if loss != NamedLoss("cross-entropy") or not targets.numel() or targets.is_floating_point():
        return
    low, high = torch.aminmax(targets)
    if int(low) < 0 or int(high) >= outputs.shape[-1]:
        raise DataError(_wrong_class(outputs.shape[-1]))
