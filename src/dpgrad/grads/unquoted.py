"""Errors of the user's own code on private rows: told by kind and place, and never in words that a row may have chosen.

What a Dataset, a transform, a model or a loss raises may hold values of rows, and messages reach logs that others read.
So its words are shown only where rows of zeros make the same line raise the same kind of error: then they follow from
shapes and types, which are public. The exception itself stays in ``__context__`` of the one that is raised in its
place, for a debugger; tracebacks and loggers do not print it.
"""

import opcode
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from dpgrad.errors import DataError, DpgradError, UnsupportedModelError
from dpgrad.grads.sums import Batch, Loss

__all__ = ["chosen", "example", "place", "unquoted"]

_OURS = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_RAISE = (opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"])
_NOT_TOLD = (DpgradError, MemoryError, torch.OutOfMemoryError)  # they hold no values, and others act on them
_HIDDEN = (
    "its words may hold values of rows and are not shown; call the model and the loss on rows that are not private to "
    "see them"
)


def place(error: BaseException) -> str | None:
    """The last line of code outside dpgrad, Python and installed packages on the way to an error, if there is one.

    >>> place(KeyError("never raised")) is None
    True
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the one that caught it
    own = [frame for frame in frames if not frame.filename.startswith((*_OURS, "<eval_with_key>", "<frozen"))]
    return f"{own[-1].filename}, line {own[-1].lineno}," if own else None


def chosen(error: BaseException) -> bool:
    """Whether code of the user's own raised an error with a `raise`, and so chose its words; torch's have no values.

    >>> chosen(RuntimeError("never raised"))
    False
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISE


@contextmanager
def unquoted(model: nn.Module, loss: Loss, zeros: Callable[[], Batch], what: str = "training rows") -> Iterator[None]:
    """Within the block an error of the model or the loss on private rows becomes one line without its words.

    ``zeros`` makes a batch of zeros in the shape of the rows. Where the loss fails on it in the same way, the words are
    shown, with the layer that refuses the rows. An error that no code of the user's own took part in, and that zeros do
    not repeat, is passed on.

    >>> model, loss = nn.Linear(3, 1), lambda model, batch: model(batch)[:, 0]
    >>> with unquoted(model, loss, lambda: torch.zeros(2, 5)):
    ...     loss(model, torch.randn(7, 5))
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedModelError: ...rows of shape (5,) do not fit the model (Linear(in_features=3, ...
    """
    try:
        yield
    except _NOT_TOLD:
        raise
    except Exception as error:
        where = place(error)
        said = "" if chosen(error) else _repeated(error, where, model, loss, zeros)
        if where is None and not said:
            raise
        raised = "" if where is None else f"{where} raised {type(error).__name__} on {what}: "
        place_of = "" if raised or what == "training rows" else f"{what}: "
        raise UnsupportedModelError(place_of + raised + (said or _HIDDEN)) from None


def _repeated(error: Exception, where: str | None, model: nn.Module, loss: Loss, zeros: Callable[[], Batch]) -> str:
    """What the loss says to rows of zeros, where that is the same error in the same line; nothing elsewhere."""
    entered: list[nn.Module] = []

    def left(module: nn.Module, given: object, found: object) -> None:
        entered.pop()

    hooks = (
        register_module_forward_pre_hook(lambda module, given: entered.append(module)),
        register_module_forward_hook(left),
    )
    try:
        rows = zeros()
        with torch.no_grad():
            loss(model, rows)
    except Exception as other:
        if type(other) is not type(error) or place(other) != where:
            return ""
        names = {module: f"layer {name!r}" if name else "the model" for name, module in model.named_modules()}
        layer = next((module for module in reversed(entered) if module in names), None)
        said = " ".join(str(other).split())[:300]
        shape = tuple(pytree.tree_leaves(rows)[0].shape[1:])
        kind = "" if layer is None else f" ({str(layer).splitlines()[0]:.100})"
        return said if layer is None else f"rows of shape {shape} do not fit {names[layer]}{kind}: {said}"
    finally:
        for hook in hooks:
            hook.remove()
    return ""


def example(data: Any, index: int) -> Any:
    """One example of a Dataset; an error of the Dataset itself becomes one line without its words.

    >>> example(["a", "b"], 1)
    'b'
    """
    try:
        return data[index]
    except _NOT_TOLD:
        raise
    except Exception as error:
        where = place(error) or f"{type(data).__name__}.__getitem__"
        raise DataError(
            f"{where} raised {type(error).__name__} for an example of the data: its words may hold values of rows and "
            "are not shown; read the examples yourself, dataset[i], to see them"
        ) from None
