"""A user's own model: the function that ``FILE.py:FUNCTION`` names, run as a module of its own.

The file is trusted, since the user names it; nothing of a release folder is ever run. What goes wrong in it becomes one
line with its name and line.
"""

import contextlib
import hashlib
import inspect
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dpgrad import _validate
from dpgrad.errors import DpgradError, OptionError
from dpgrad.training.models import OWN_MODEL

__all__ = ["OwnModel", "is_own"]

_MOST = 1 << 24  # bytes of a file


def is_own(text: str) -> bool:
    """Whether a model is named as a file of Python, with or without its function.

    >>> is_own("net.py:make"), is_own("net.py"), is_own("cnn"), is_own("a:b/net.py:make")
    (True, True, False, True)
    """
    return any(part.endswith(".py") for part in (text, text.rpartition(":")[0]))


class OwnModel:
    """The function of a user's file that builds a model from the shape of one row and the number of outputs.

    ``digest`` is that of the file as it was run; `dpgrad predict` uses it to notice a change.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = "from torch import nn\\ndef make(shape, outputs):\\n    return nn.Linear(*shape, outputs)\\n"
    ...     _ = Path(folder, "net.py").write_text(text, "utf-8")
    ...     OwnModel(f"{folder}/net.py:make").build((3,), 2)
    Linear(in_features=3, out_features=2, bias=True)
    """

    name = OWN_MODEL
    notes: tuple[str, ...] = ()

    def __init__(self, text: str) -> None:
        file, _, self._function = text.rpartition(":")
        if not file.endswith(".py") or not self._function:
            raise OptionError(f"--model {text:.200}: name the function that builds the model, FILE.py:FUNCTION")
        self._text, self._path = text, Path(file)
        source = _source(self._path, text)
        self.digest = hashlib.sha256(source).hexdigest()
        self._trained: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._make = self._found(self._module(source))

    def described(self) -> dict[str, Any]:
        """Its description in a report: names without folders, and the digest."""
        file = f"{self._path.name}:{self._function}"
        return {"name": self.name, "source": {"file": file, "digest": self.digest, "kind": None, "lora": None}}

    def write(self, release: Path) -> None:
        """Nothing: code is not released."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """A new model; refused where the function raises, or returns anything but a new module."""
        with self.told():
            made: object = self._make(*self._arguments(tuple(shape), outputs))
        if not isinstance(made, nn.Module):
            remedy = ": does it end with return?" if made is None else ""
            if isinstance(made, type):
                remedy = f": call it, {made.__name__}(...)"
            raise OptionError(
                f"--model {self._text}: {self._function} must return a torch.nn.Module, got {_kind(made)}{remedy}"
            )
        for parameter in made.parameters():
            if parameter.requires_grad and self._trained.get(id(parameter)) is parameter:
                raise OptionError(
                    f"--model {self._text}: {self._function} returned parameters that it has returned before: a run "
                    "begins from weights that no row has touched; build the model inside the function"
                )
        self._trained.update({id(parameter): parameter for parameter in made.parameters()})
        return made

    @contextlib.contextmanager
    def told(self, doing: str = "", private: bool = False) -> Iterator[None]:
        """Within the block what the file raises becomes one line with its place, and what it prints goes to stderr.

        ``doing`` says what the block does with the model. Where it passes ``private`` rows, what an exception says may
        hold their values and is left out.
        """
        folder = str(self._path.parent.resolve())
        sys.path.append(folder)  # at the end: files next to the model can be imported and hide no others
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (Exception, SystemExit) as error:
            place = self._place(error)
            if private and (place is None or isinstance(error, DpgradError)):
                raise
            said = " ".join(filter(None, (type(error).__name__, doing)))
            quoted = "" if private else f": {error!s:.300}"
            raise OptionError(f"--model {self._text}: {place or self._path.name} raised {said}{quoted}") from None
        finally:
            with contextlib.suppress(ValueError):  # the file may have removed it
                sys.path.remove(folder)

    def _place(self, error: BaseException) -> str | None:
        """The last line of the file on the way to an error."""
        if isinstance(error, SyntaxError) and error.filename == str(self._path):
            return f"{self._path.name}, line {error.lineno}," if error.lineno else None
        lines, trace = [], error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(self._path):
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        return f"{self._path.name}, line {lines[-1]}," if lines else None

    def _module(self, source: bytes) -> types.ModuleType:
        module = types.ModuleType(f"dpgrad_model_{self._path.stem}")
        module.__file__ = str(self._path)
        sys.modules[module.__name__] = module  # dataclasses and others look a class's module up
        with self.told():
            exec(compile(source, str(self._path), "exec"), module.__dict__)
        return module

    def _found(self, module: types.ModuleType) -> Callable[..., object]:
        found: object = vars(module).get(self._function)
        if callable(found):
            return found
        own = [name for name, value in vars(module).items() if _is_own_callable(value, module)]
        known = f"; it has {', '.join(own[:10])}" if own else ""
        raise OptionError(
            f"--model {self._text}: {self._path.name} has no function {self._function!r:.60}"
            f"{_validate.meant(self._function, own) or known}"
        )

    def _arguments(self, shape: tuple[int, ...], outputs: int) -> tuple[Any, ...]:
        """The shape of one row and the number of outputs; nothing for a function without arguments."""
        try:
            takes = inspect.signature(self._make)
        except ValueError:  # of a builtin
            return shape, outputs
        for given in ((shape, outputs), ()):
            with contextlib.suppress(TypeError):
                takes.bind(*given)
                return given
        raise OptionError(
            f"--model {self._text}: {self._function}{takes!s:.100} cannot be called with the shape of one row and the "
            f"number of outputs: write def {self._function}(shape, outputs)"
        )


def _source(path: Path, text: str) -> bytes:
    if not os.path.exists(path):  # a Path would raise over a name that is too long
        raise OptionError(f"--model {text:.200}: there is no file {path!s:.200}")
    if not path.is_file():
        raise OptionError(f"--model {text:.200}: {path} is not a regular file")
    with path.open("rb") as file:
        source = file.read(_MOST + 1)
    if len(source) > _MOST:
        raise OptionError(f"--model {text:.200}: {path} has more than {_MOST:,} bytes: is it Python?")
    return source


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_own_callable(value: object, module: types.ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__
