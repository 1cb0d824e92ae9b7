"""What a pass depends on besides its rows, in a form that is quick to compare before every step."""

import dis
import logging
import random
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice
from types import CellType, CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from dpgrad.grads.precision import precision_settings

__all__ = ["Watch", "held", "remembered"]

_NUMBERS = (int, float, bool, str, type(None))
# What gives another value whenever it is asked.
_HIDING = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(of_modules, f"_global{kind}") for kind in _HOOKS]
_PLAIN = frozenset(_NUMBERS)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # what every module has; its tensors are looked at one by one
_OPAQUE = (Tensor, nn.Module, type, ModuleType, logging.Logger)  # what is not looked into
_MOST = 512  # values inside one list, dictionary or object that are looked at

_Place = tuple[dict[str, Any], str]


class Watch:
    """Tensors, numbers, words and functions of a model and the functions used with it, and torch's settings, as now.

    >>> model, settings = nn.Linear(2, 1), {"scale": 1.0}
    >>> watch = Watch(model, lambda model, batch: settings["scale"] * model(batch)[:, 0])
    >>> watch.same(), settings.update(scale=2.0), watch.same()
    (True, None, False)
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        self._places = _Places(model, functions)
        owned = (owner for each in self._places.modules for owner in (each._parameters, each._buffers))
        self._tensors = [(owner, name) for owner in owned for name, value in owner.items() if value is not None]
        self._before = self._now()

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self._now() == self._before

    def _now(self) -> list[object]:
        return [
            [_address(owner.get(name)) for owner, name in self._tensors],
            self._places.tokens(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            [one.fp32_precision in ("tf32", "bf16") for one in precision_settings()],
        ]


def remembered(model: nn.Module, *functions: Callable[..., Any]) -> list[object]:
    """What the next pass may depend on that lies in Python: numbers, words and functions that are held, and hooks.

    Tensors are left out. What holds a state that cannot be seen, such as a generator, is never equal to itself.

    >>> model = nn.Linear(2, 1)
    >>> model.calls = {"count": 0}
    >>> before = remembered(model)
    >>> before == remembered(model), model.calls.update(count=1), before == remembered(model)
    (True, None, False)
    """
    return _Places(model, functions).tokens(tensors=False, hidden=True)


class _Places:
    """Where a model and the functions used with it hold what is no parameter and no buffer."""

    def __init__(self, model: nn.Module, functions: Sequence[Callable[..., Any]]) -> None:
        self.modules = _modules(model, functions)
        self._owners = [module.__dict__ for module in self.modules]
        self._owners += [vars(owner) for owner in map(_owner, functions) if hasattr(owner, "__dict__")]
        self._places = [*chain.from_iterable(map(_names, functions)), *_globals_of(self.modules)]
        self._cells = [cell for given in functions for cell in _cells(given)]

    def tokens(self, tensors: bool = True, hidden: bool = False) -> list[object]:
        """One token for each value that is there now."""
        token = partial(_token, known=set(), tensors=tensors, hidden=hidden)
        return [
            [
                (name, value if value.__class__ in _PLAIN else token(value))
                for module in self.modules
                for name, value in module.__dict__.items()
                if name not in _OF_TORCH
            ],
            [[*module.__dict__[kind]] for module in self.modules for kind in _HOOKS],
            [[*hooks] for hooks in _GLOBAL_HOOKS],
            [token(owner.get(name)) for owner, name in self._places],
            [token(_content(cell)) for cell in self._cells],
            [*map(len, self._owners)],
        ]


def held(model: nn.Module, *functions: Callable[..., Any]) -> list[Tensor]:
    """The visible tensors that a model and the functions used with it hold, without those of a pass.

    >>> table = torch.zeros(3)
    >>> found = held(nn.Linear(2, 1), lambda model, batch: model(batch)[:, 0] + table)
    >>> any(each is table for each in found)
    True
    """
    modules = _modules(model, functions)
    own = (module.__dict__[kind] for module in modules for kind in ("_parameters", "_buffers"))
    values: list[object] = [value for each in own for value in each.values()]
    values += [value for module in modules for value in vars(module).values()]
    values += [owner.get(name) for owner, name in chain.from_iterable(map(_names, functions))]
    values += [_content(cell) for given in functions for cell in _cells(given)]
    values += [part for value in values for part in islice(_parts(value), _MOST)]
    return [value for value in values if isinstance(value, Tensor)]


def _modules(model: nn.Module, functions: Iterable[Callable[..., Any]]) -> list[nn.Module]:
    """The modules of a model, and of the functions that are modules or belong to one."""
    owners = [owner for owner in map(_owner, functions) if isinstance(owner, nn.Module)]
    return list(dict.fromkeys(chain(model.modules(), *(owner.modules() for owner in owners))))


def _functions(given: Any, known: set[int] | None = None) -> Iterator[Any]:
    """The functions of Python that a function is made of: those it closes over, and those of its module it names."""
    known = set() if known is None else known
    if isinstance(given, partial):
        yield from _functions(given.func, known)
    elif hasattr(given, "__func__"):
        yield from _functions(given.__func__, known)
    elif hasattr(given, "__code__") and id(given) not in known:
        known.add(id(given))
        yield given
        named = (given.__globals__.get(name) for name in _named(given.__code__))
        helpers = (each for each in named if getattr(each, "__module__", None) == given.__module__)
        for each in chain(helpers, map(_content, given.__closure__ or ())):
            yield from _functions(each, known)
    elif isinstance(given, nn.Module):
        yield from _functions(type(given).forward, known)
    elif callable(given) and hasattr(type(given).__call__, "__code__"):
        yield from _functions(type(given).__call__, known)


def _owner(given: object) -> object:
    """The object that a function belongs to, or is."""
    return _owner(given.func) if isinstance(given, partial) else getattr(given, "__self__", given)


def _names(given: Callable[..., Any]) -> Iterator[_Place]:
    """Where a function finds what it does not hold itself: the variables of its module and of its object."""
    for function in _functions(given):
        yield from ((function.__globals__, name) for name in _named(function.__code__))
    if isinstance(given, partial):
        yield from ((given.keywords, name) for name in given.keywords)
        yield {"args": given.args}, "args"
    owner = _owner(given)
    if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module):
        yield from ((owner.__dict__, name) for name in owner.__dict__)


@cache
def _named(code: CodeType) -> list[str]:
    """The variables of its module that a function's code reads, and that functions within it read."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    within = chain.from_iterable(_named(each) for each in code.co_consts if isinstance(each, CodeType))
    return list(dict.fromkeys(chain(own, within)))


def _globals_of(modules: Iterable[nn.Module]) -> Iterator[_Place]:
    """The variables that modules' own code names, but for those of torch's modules."""
    kinds: Iterable[Any] = dict.fromkeys(map(type, modules))
    for forward in (kind.forward for kind in kinds if kind.__module__.partition(".")[0] != "torch"):
        if hasattr(forward, "__code__"):
            yield from ((forward.__globals__, name) for name in _named(forward.__code__))


def _cells(given: Callable[..., Any]) -> list[CellType]:
    """The variables that a function closes over."""
    return [cell for function in _functions(given) for cell in function.__closure__ or ()]


def _parts(value: object) -> Collection[object]:
    """What a list, a dictionary or an object of the user's holds."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    opaque = isinstance(value, _OPAQUE) or hasattr(value, "__code__")
    return () if opaque else getattr(value, "__dict__", {}).values()


def _inside(value: object, hidden: bool, known: set[int]) -> list[object]:
    """The numbers, words and functions in a list, a dictionary or an object, and in those that it holds.

    What was looked at before is ``known``, and only named.
    """
    if id(value) in known:
        return [_Is(value)]
    found: list[object] = []
    waiting = deque([value])
    known.add(id(value))
    for _ in range(_MOST):
        if not waiting:
            break
        each = waiting.popleft()
        parts = _parts(each)
        found += (_single(each, hidden), len(parts))
        for part in islice(parts, _MOST):
            if isinstance(part, _NUMBERS):
                found.append(part)
            elif id(part) not in known:
                known.add(id(part))
                waiting.append(part)
    return found


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


class _Is:
    """An object that is compared by identity, and held, so its address is not reused."""

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self._value is other._value


def _single(value: object, hidden: bool) -> object:
    """A value by itself, apart from what it holds."""
    if isinstance(value, np.generic | np.ndarray):
        return value.dtype.str, value.tobytes() if value.size <= _MOST else value.shape
    if hidden and isinstance(value, _HIDING):
        return object()
    by_itself = callable(value) or isinstance(value, nn.Module | ModuleType)
    return _Is(value) if by_itself and not isinstance(value, Tensor | weakref.ref) else type(value)


def _token(value: object, known: set[int], tensors: bool, hidden: bool) -> object:
    """A value that can be compared: a number, a tensor's memory, or an object's identity and contents."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, Tensor):
        return _address(value) if tensors else None
    return _inside(value, hidden, known)


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
