"""The loss of one example, from what a model of transformers returns.

Models of transformers return one loss: the mean over all examples, or over all tokens of the batch. A private step
needs one value per example. Here it is the mean over the example's own tokens, or its own loss, and equals what the
model returns for a batch with that example alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad.errors import DataError, UnsupportedModelError
from dpgrad.training.curves import judging

__all__ = ["IGNORED", "ExampleLoss", "OwnLoss", "inner", "refuse_other"]

IGNORED = -100  # the label of a token that does not count
_REMEDY = "give compute_per_example_loss(model, inputs), a function that returns one value per example"


@dataclass(frozen=True)
class ExampleLoss:
    """The loss of each example, from the logits and labels of a model that classifies, or predicts tokens.

    ``shift``: logits at one position are for the label at the next, as in causal language models. ``problem`` is the
    ``problem_type`` of the model's configuration. ``smoothing`` is the label smoothing factor.

    >>> logits, labels = torch.zeros(2, 3, 5), torch.tensor([[1, 2, -100], [0, -100, -100]])
    >>> ExampleLoss(shift=False).of(logits, labels).tolist() == [torch.tensor(5.0).log().item()] * 2
    True
    """

    shift: bool
    problem: str | None = None
    smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if "labels" not in batch:
            raise UnsupportedModelError(f"the examples have no labels, which their losses need: {_REMEDY}")
        labels = batch["labels"]
        if "decoder_input_ids" not in inputs and (prepare := _shifted_right(model)) is not None:
            inputs["decoder_input_ids"] = prepare(labels=labels)
        found = model(**inputs)
        logits = found.get("logits") if isinstance(found, Mapping) else found[0]
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(f"{type(model).__name__} returns no logits: {_REMEDY}")
        return self.of(logits, labels)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example: (examples, ..., classes) and (examples, ...) to (examples,)."""
        logits = logits.float()
        if logits.ndim == 3 and labels.shape[:2] == logits.shape[:2] and labels.ndim == 2:
            return self._of_tokens(logits, labels)
        if logits.ndim != 2:
            raise UnsupportedModelError(
                f"logits of shape {tuple(logits.shape)} do not go with labels of shape {tuple(labels.shape)}: {_REMEDY}"
            )
        if self.problem == "regression" or (self.problem is None and logits.shape[1] == 1):
            return F.mse_loss(logits, labels.reshape(logits.shape).float(), reduction="none").mean(1)
        if self.problem == "multi_label_classification" or labels.is_floating_point():
            return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
        return self._cross_entropy(logits, labels.reshape(-1))

    def _of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = self._cross_entropy(logits.transpose(1, 2), labels)
        return each.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        try:
            return F.cross_entropy(
                logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=self.smoothing
            )
        except IndexError:  # torch names the label, which is private
            raise DataError(
                f"a label is none of the model's {logits.shape[1]:,} classes: labels count from 0, {IGNORED} is for "
                "tokens that do not count; give the model as many labels (num_labels) as the data have"
            ) from None


@dataclass(frozen=True)
class OwnLoss:
    """The loss of each example by the ``compute_loss_func`` of a Trainer, which must return one value per example."""

    function: Callable[..., Tensor]

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return self.function(model(**inputs), batch.get("labels"), num_items_in_batch=None)


def inner(model: nn.Module) -> nn.Module:
    """The model of transformers inside one of peft; any other model itself."""
    inside: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


def _shifted_right(model: nn.Module) -> Callable[..., Tensor] | None:
    """How an encoder-decoder model makes the inputs of its decoder from labels; None for any other model."""
    base = inner(model)
    if not getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return None
    found: Callable[..., Tensor] | None = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    return found


def refuse_other(loss: ExampleLoss, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse a model whose own loss for the one example of ``batch`` is not ``loss``, without label smoothing."""
    with judging(model):
        ours = replace(loss, smoothing=0.0)(model, batch)  # first: it names no label in an error
        found = model(**batch)
        own = found.get("loss") if isinstance(found, Mapping) else found[0]
    if not isinstance(own, Tensor) or own.numel() != 1:
        raise UnsupportedModelError(f"{type(model).__name__} returns no loss for inputs with labels: {_REMEDY}")
    counts = bool((batch["labels"] != IGNORED).any())
    rtol = 1e-4 if own.dtype == torch.float32 else 1e-2  # in bfloat16 the model rounds its loss
    if counts and not torch.allclose(own.float().reshape(1), ours, rtol=rtol, atol=1e-5):
        raise UnsupportedModelError(
            f"the loss of {type(model).__name__} is not the cross-entropy or squared error of its logits and labels: "
            f"{_REMEDY}"
        )
