"""What a run writes of a model to be shared: its parameters and buffers, and nothing that was read from the rows."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpgrad import _files
from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.fsdp import is_shard

__all__ = ["Weights"]

_FEW = 1 << 22  # values


class Weights:
    """The state of a model as it may be released after training; what is not trained must stay as it is now.

    Guarantee: trained parameters were made by private steps. Everything else that is written was there before the first
    row was read. A model with state beyond parameters and buffers (``get_extra_state``) is refused, and so is a buffer
    or a frozen parameter that changed: a forward pass may have written values of the rows to it. The vectors of
    spectral normalization may change, since they are functions of the weights.

    >>> import torch
    >>> model = nn.BatchNorm1d(2)
    >>> before = Weights(model)
    >>> _ = model(torch.rand(8, 2))
    >>> before.state()
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedModelError: running_mean of the model changed during the run, and is not trained: ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        state = self._state()
        trained = {name for name, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}
        may_change = trained | _functions_of_weights(model)
        self._fixed = {name: _remembered(value) for name, value in state.items() if name not in may_change}
        self._settled: dict[str, int] | None = None

    def settle(self) -> None:
        """The run has ended: what changes a parameter from now on is no private step, and is refused."""
        self._settled = self._versions()

    def _versions(self) -> dict[str, int]:
        return {name: value._version for name, value in self._model.named_parameters(remove_duplicate=False)}

    def state(self) -> dict[str, Tensor]:
        """The state to write: each value is a copy, so memory that it shares with others is not written.

        Of a model in shards those of this rank, as they lie there.
        """
        self.refuse_changed()
        if self._settled is not None and self._settled != self._versions():
            raise UnsupportedModelError(
                "the model changed after the run, which the guarantee does not cover: save it before it is changed"
            )
        return {name: value if is_shard(value) else value.cpu().clone() for name, value in self._state().items()}

    def write(self, path: Path, whole: Mapping[str, Tensor] | None = None) -> None:
        """Write the state, as torch.load reads it; of a model in shards ``whole``, which its ranks made up of them."""
        with _files.told(path), path.open("wb") as file:
            held: Any = _Told(file)
            try:
                torch.save(self.state() if whole is None else dict(whole), held)
            except Exception:
                if held.error is not None:  # torch does not say why it failed
                    raise held.error from None
                raise

    def refuse_changed(self) -> None:
        """Refuse a model of which something changed that is not trained."""
        state = self._state()
        for name, value in self._fixed.items():
            if name not in state or not _same(state[name], value):
                raise UnsupportedModelError(
                    f"{name} of the model changed during the run, and is not trained: values of the rows may have been "
                    "written to it without noise; put its module in evaluation mode, or leave it out of the model"
                )

    def _state(self) -> dict[str, Tensor]:
        """The parameters and buffers that a state dict holds, detached; anything else in it is refused."""
        model = self._model
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        state = model.state_dict()
        for name, value in state.items():
            if name not in known or not isinstance(value, Tensor):
                raise UnsupportedModelError(
                    f"the state of the model has {name}, neither a parameter nor a buffer, which would be released as "
                    "it is: leave out get_extra_state, or train without folder"
                )
        return {name: value.detach() for name, value in state.items()}


class _Told:
    """A file that keeps the error of the system which ended writing it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, piece: bytes) -> int:
        try:
            return self._file.write(piece)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _functions_of_weights(model: nn.Module) -> set[str]:
    """The buffers that the power iterations of spectral normalization write."""
    return {
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        if isinstance(module, parametrizations._SpectralNorm)
        for buffer, _ in module.named_buffers()
    }


def _remembered(value: Tensor) -> "Tensor | str":
    """A copy; of a shard, which may be most of what a device holds, a digest."""
    if not is_shard(value):
        return value.clone()
    digest, flat = hashlib.blake2b(), value.to_local().reshape(-1)  # type: ignore[attr-defined]
    for few in torch.split(flat, _FEW):
        digest.update(few.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _same(one: Tensor, other: "Tensor | str") -> bool:
    if isinstance(other, str):
        return _remembered(one) == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())
