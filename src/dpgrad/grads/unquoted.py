"""Errors of the user's own code on private rows: reported by kind and place, never in words that a row may have chosen.

What a Dataset, a transform, a model or a loss raises may hold values of rows, and messages reach logs that others read.
So its words are shown only where rows of zeros make the same line raise the same kind of error, and torch's own layers
and functions chose them: then they follow from shapes and types, which are public. Zeros alone do not suffice: a model
may keep its last input, and a loss may look values up in a table. The exception itself stays in ``__context__`` of the
one that is raised in its place, for a debugger; tracebacks and loggers do not print it.
"""

import opcode
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from dpgrad.errors import DataError, DpgradError, UnsupportedModelError
from dpgrad.grads.sums import Batch, Loss

__all__ = ["chosen", "example", "length", "of_torch", "passed_on", "place", "unquoted"]


def _folder(file: str | None) -> str:
    return str(Path(str(file)).parent) + os.sep


_OWN, _TORCH, _NUMPY = str(Path(__file__).parents[1]) + os.sep, _folder(torch.__file__), _folder(np.__file__)
_PYTHON = (_folder(os.__file__), *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")))
_INSTALLED = ("site-packages", "dist-packages")  # they may lie within the standard library
_LAYERS = (_folder(nn.__file__), _TORCH + "functional.py")  # not torch.distributions, which print what they refuse
_OF_SHAPES = RuntimeError, ValueError, TypeError, AssertionError  # not of a key or an attribute that was looked up
_OF_VALUES = re.compile(r"out of bounds|to have value|offsets")  # in torch's messages: labels, lengths, places
_RAISE = (opcode.opmap["RAISE_VARARGS"], opcode.opmap["RERAISE"])
_HIDDEN = (
    "its words may hold values of rows and are not shown; call the model and the loss on rows that are not private to "
    "see them"
)


def _own_code(file: str) -> bool:
    """Whether a file is neither of dpgrad, torch, numpy nor Python: also an installed package may be the user's own."""
    if file.startswith((_OWN, _TORCH, _NUMPY, "<eval_with_key>", "<frozen")):
        return False
    return not any(file.startswith(root) and not file.removeprefix(root).startswith(_INSTALLED) for root in _PYTHON)


def _raised_in(error: BaseException) -> str:
    """The file of the last line on the way to an error; nothing of one that was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def place(error: BaseException) -> str | None:
    """The last line of code outside dpgrad, torch, numpy and Python on the way to an error, if there is one.

    >>> place(KeyError("never raised")) is None
    True
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the one that caught it
    own = [frame for frame in frames if _own_code(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}," if own else None


def of_torch(error: BaseException) -> bool:
    """Whether a layer or a function of torch raised an error, in words about shapes and types.

    >>> of_torch(RuntimeError("never raised"))
    False
    """
    words = str(error)
    if not isinstance(error, _OF_SHAPES) and not words.startswith("Dimension out of range"):
        return False
    return _raised_in(error).startswith(_LAYERS) and not _OF_VALUES.search(words)


def chosen(error: BaseException) -> bool:
    """Whether code of the user's own raised an error with a `raise`, and so chose its words.

    >>> chosen(RuntimeError("never raised"))
    False
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _own_code(trace.tb_frame.f_code.co_filename):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISE


def passed_on(error: Exception) -> Exception | None:
    """An error that others act on, as it may be shown; None of one whose words are not to be shown.

    dpgrad's own hold no values. Those about memory keep their kind, and words that dpgrad or torch chose.

    >>> str(passed_on(MemoryError("Unable to allocate an array with shape (54,)")))
    ''
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error if _raised_in(error).startswith((_OWN, _TORCH)) else torch.OutOfMemoryError("out of memory")
    if isinstance(error, MemoryError):  # numpy's is of a kind of its own, and tells shapes
        return error if type(error) is MemoryError and _raised_in(error).startswith(_OWN) else MemoryError()
    return error if isinstance(error, DpgradError | Warning) and _raised_in(error).startswith(_OWN) else None


@contextmanager
def _instead(told: Callable[[Exception], DpgradError]) -> Iterator[None]:
    """Within the block an error becomes the one that ``told`` makes of it; what others act on is passed on."""
    try:
        yield
    except Exception as error:
        if (shown := passed_on(error)) is error:
            raise
        raise (told(error) if shown is None else shown) from None


def unquoted(
    model: nn.Module, loss: Loss, zeros: Callable[[], Batch], what: str = "training rows"
) -> AbstractContextManager[None]:
    """A block in which an error of the model or the loss on private rows becomes one line without its words.

    ``zeros`` makes a batch of zeros in the shape of the rows. Where the loss fails on it in the same way, and torch
    chose the words, they are shown, with the layer that refuses the rows. What others act on is passed on.

    >>> model, loss = nn.Linear(3, 1), lambda model, batch: model(batch)[:, 0]
    >>> with unquoted(model, loss, lambda: torch.zeros(2, 5)):
    ...     loss(model, torch.randn(7, 5))
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedModelError: ...rows of shape (5,) do not fit the model (Linear(in_features=3, ...
    """

    def told(error: Exception) -> UnsupportedModelError:
        where = place(error)
        said = _repeated(error, where, model, loss, zeros)
        raised = f"{where or 'the model or the loss'} raised {type(error).__name__} on {what}: "
        if said and where is None:
            raised = "" if what == "training rows" else f"{what}: "
        return UnsupportedModelError(raised + (said or _HIDDEN))

    return _instead(told)


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
        if type(other) is not type(error) or place(other) != where or not of_torch(other):
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
    with _of_data(f"{type(data).__name__}.__getitem__", "for an example of the data"):
        return data[index]


def length(data: Any) -> int:
    """The number of examples of a Dataset; an error of the Dataset itself becomes one line without its words.

    >>> length(["a", "b"])
    2
    """
    with _of_data(f"{type(data).__name__}.__len__", "for the number of its examples"):
        return len(data)


def _of_data(method: str, what: str) -> AbstractContextManager[None]:
    return _instead(
        lambda error: DataError(
            f"{place(error) or method} raised {type(error).__name__} {what}: its words may hold values of rows and "
            "are not shown; read the examples yourself, dataset[i], to see them"
        )
    )
