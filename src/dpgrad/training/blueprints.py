"""What ``--model`` names: a model by its name, a function in a user's file, a folder of transformers.

Each is a `Blueprint`: it builds the model anew from public facts alone, says in a report how to build it again, and
adds to a release folder what that needs.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.grads.fsdp import is_sharded
from dpgrad.grads.swap import refuse_modules
from dpgrad.training import models
from dpgrad.training.curves import judging
from dpgrad.training.hugging_face import PREFIX, Checkpoint
from dpgrad.training.own_model import OwnModel, is_own

__all__ = ["Blueprint", "NamedModel", "blueprint", "built"]


class Blueprint(Protocol):
    """How a model is built, for rows of a shape and a number of outputs; ``notes`` are for the user to know."""

    @property
    def name(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def build(self, shape: Sequence[int], outputs: int) -> nn.Module: ...
    def described(self) -> dict[str, Any]: ...
    def write(self, release: Path) -> None: ...
    def told(self, doing: str = "", private: bool = False) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class NamedModel:
    """A model of `dpgrad.training.models`.

    >>> NamedModel("linear").build((3,), 2)[1]
    Linear(in_features=3, out_features=2, bias=True)
    """

    name: str
    notes: tuple[str, ...] = ()

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The model."""
        return models.build(self.name, shape, outputs)

    def described(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}

    def write(self, release: Path) -> None:
        """Nothing: the name says it all."""

    def told(self, doing: str = "", private: bool = False) -> AbstractContextManager[None]:
        """Errors in these models are ours."""
        return nullcontext()


def blueprint(text: str, kind: str = "table", lora: int | None = None) -> Blueprint:
    """The blueprint that ``text`` names, for data of a kind (table, image or text); ``lora`` is a rank of adapters.

    >>> blueprint("linear")
    NamedModel(name='linear', notes=())
    >>> blueprint("cnn", lora=4)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: --lora is for models of transformers, hf:FOLDER, got --model cnn: leave it out
    """
    if text.startswith(PREFIX):
        return Checkpoint.read(text.removeprefix(PREFIX), kind, lora)
    if lora is not None:
        raise OptionError(f"--lora is for models of transformers, hf:FOLDER, got --model {text:.80}: leave it out")
    if is_own(text):
        return OwnModel(text)
    _validate.one_of(models.MODELS, "FILE.py:FUNCTION, hf:FOLDER", model=text)
    return NamedModel(text)


def built(source: Blueprint, shape: Sequence[int], outputs: int, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """The model on its device, seen to give ``outputs`` numbers for one row of zeros; its mode stays as it is.

    Its weights are drawn from torch's default generator. Nothing of the data is read.

    >>> built(NamedModel("linear"), (3,), 2, torch.float32)(torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """
    model = source.build(shape, outputs)
    try:
        if not is_sharded(model):  # shards stay where fully_shard put them
            model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # a device that is not there
        why = str(error).splitlines()[0]
        raise OptionError(f"--device {device} cannot be used: {why}; choose cpu, or leave it out") from None
    row = torch.zeros((1, *shape), dtype=dtype, device=device)
    with source.told(f"on a row of zeros of shape {tuple(shape)}"), judging(model):
        found: object = model(row)
    if not isinstance(found, Tensor):
        raise OptionError(
            f"model {source.name} must return a tensor of outputs, one row for each row, got {type(found).__name__}"
        )
    if tuple(found.shape) not in ((1, outputs), (1,) if outputs == 1 else (1, outputs)):
        raise OptionError(
            f"model {source.name} gives outputs of shape {tuple(found.shape)} for one row of shape {tuple(shape)}, "
            f"expected (1, {outputs}): one number for each class, or one for a real target"
        )
    refuse_modules(model)
    return model
