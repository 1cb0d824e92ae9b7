"""What a graph keeps of the time of its capture, remembered so that it is soon compared before every step."""

from collections.abc import Iterator
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad.grads.precision import precision_settings
from dpgrad.grads.sums import Loss

__all__ = ["Watch"]

_NUMBERS = (int, float, bool, str, type(None))


class Watch:
    """Tensors, numbers and words of a model and its loss function, and torch's settings, as they are now.

    >>> model = nn.Linear(2, 1)
    >>> watch = Watch(model, lambda model, batch: model(batch)[:, 0])
    >>> watch.same(), setattr(model, "scale", 2.0), watch.same()
    (True, None, False)
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        owned: list[dict[str, Any]] = [
            owner for module in model.modules() for owner in (module._parameters, module._buffers)
        ]
        self._tensors = [(owner, name) for owner in owned for name, value in owner.items() if value is not None]
        self._owners: list[dict[str, Any]] = [module.__dict__ for module in model.modules()]
        numbers = [*((owner, name) for owner in self._owners for name in owner), *_names(loss)]
        self._numbers = [(owner, name) for owner, name in numbers if isinstance(owner.get(name), (*_NUMBERS, Tensor))]
        self._cells = list(_cells(loss))
        self._before = self._now()

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self._now() == self._before

    def _now(self) -> list[object]:
        return [
            [owner[name].data_ptr() if owner.get(name) is not None else None for owner, name in self._tensors],
            [_token(owner.get(name)) for owner, name in self._numbers],
            [_token(_content(cell)) for cell in self._cells],
            [*map(len, self._owners)],
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            [one.fp32_precision in ("tf32", "bf16") for one in precision_settings()],
        ]


def _functions(loss: object) -> Iterator[Any]:
    """A loss function, and what it is made of."""
    if isinstance(loss, partial):
        yield from _functions(loss.func)
    elif hasattr(loss, "__func__"):
        yield from _functions(loss.__func__)
    elif hasattr(loss, "__code__"):
        yield loss


def _names(loss: Loss) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a loss function finds what it does not hold itself: the variables of its module and of its object."""
    for function in _functions(loss):
        yield from ((function.__globals__, name) for name in function.__code__.co_names)
    owner: object = getattr(loss, "__self__", loss)
    if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module):
        yield from ((owner.__dict__, name) for name in owner.__dict__)


def _cells(loss: Loss) -> list[CellType]:
    """The variables that a loss function closes over."""
    return [cell for function in _functions(loss) for cell in function.__closure__ or ()]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _token(value: object) -> object:
    """A value that can be compared: a number, where a tensor lies, or which object it is."""
    if isinstance(value, _NUMBERS):
        return value
    return value.data_ptr() if isinstance(value, Tensor) else id(value)
