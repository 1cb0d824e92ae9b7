"""What a graph fixed when it was captured, in a form that is quick to compare before every step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from operator import is_
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad.grads.precision import precision_settings

__all__ = ["Watch", "held"]

_NUMBERS = (int, float, bool, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))  # what every module has; its tensors are looked at one by one
_MOST = 512  # values inside one list, dictionary or object that are looked at

_Place = tuple[dict[str, Any], str]


class Watch:
    """Tensors, numbers and words of a model and the functions used with it, and torch's settings, as they are now.

    >>> model, settings = nn.Linear(2, 1), {"scale": 1.0}
    >>> watch = Watch(model, lambda model, batch: settings["scale"] * model(batch)[:, 0])
    >>> watch.same(), settings.update(scale=2.0), watch.same()
    (True, None, False)
    """

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        modules = _modules(model, functions)
        owned: list[dict[str, Any]] = [owner for each in modules for owner in (each._parameters, each._buffers)]
        tensors = [(owner, name) for owner in owned for name, value in owner.items() if value is not None]
        of_modules: list[dict[str, Any]] = [module.__dict__ for module in modules]
        self._owners = [*of_modules, *(vars(owner) for owner in map(_owner, functions) if hasattr(owner, "__dict__"))]
        places: list[_Place] = [
            (owner, name) for owner in of_modules for name in owner if name not in _OF_TORCH or name == "training"
        ]
        places += chain.from_iterable(map(_names, functions))
        self._tensors = tensors + [(owner, name) for owner, name in places if isinstance(owner.get(name), Tensor)]
        self._numbers = [(owner, name) for owner, name in places if isinstance(owner.get(name), _NUMBERS)]
        self._seen: list[object] = []  # the numbers, as objects
        self._cells = [cell for given in functions for cell in _cells(given)]
        self._holding = [(owner, name) for owner, name in places if _parts(owner.get(name))]
        self._before = self._now()
        self._before_numbers = [_token(owner.get(name)) for owner, name in self._numbers]

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self._numbers_are_same() and self._now() == self._before

    def _numbers_are_same(self) -> bool:
        """Whether numbers and words are what they were: mostly the same objects, which is seen at once."""
        now = [owner.get(name) for owner, name in self._numbers]
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return True
        same = [*map(_token, now)] == self._before_numbers
        self._seen = now if same else []
        return same

    def _now(self) -> list[object]:
        return [
            [_token(owner.get(name)) for owner, name in self._tensors],
            [_token(_content(cell)) for cell in self._cells],
            [_inside(owner.get(name)) for owner, name in self._holding],
            [_inside(_content(cell)) for cell in self._cells],
            [*map(len, self._owners)],
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            [one.fp32_precision in ("tf32", "bf16") for one in precision_settings()],
        ]


def held(model: nn.Module, *functions: Callable[..., Any]) -> list[Tensor]:
    """The tensors that a model and the functions used with it hold, as far as they can be seen: not a pass's own.

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
        named = (given.__globals__.get(name) for name in given.__code__.co_names)
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
        yield from ((function.__globals__, name) for name in function.__code__.co_names)
    if isinstance(given, partial):
        yield from ((given.keywords, name) for name in given.keywords)
        yield {"args": given.args}, "args"
    owner = _owner(given)
    if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module):
        yield from ((owner.__dict__, name) for name in owner.__dict__)


def _cells(given: Callable[..., Any]) -> list[CellType]:
    """The variables that a function closes over."""
    return [cell for function in _functions(given) for cell in function.__closure__ or ()]


def _parts(value: object) -> Iterable[object]:
    """What a list, a dictionary or an object of the user's holds."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    opaque = isinstance(value, Tensor | nn.Module | type | ModuleType) or hasattr(value, "__code__")
    return () if opaque else getattr(value, "__dict__", {}).values()


def _inside(value: object) -> list[object]:
    """The numbers and words in a list, a dictionary or an object, and in those that it holds."""
    found: list[object] = []
    waiting, known = deque(islice(_parts(value), _MOST)), {id(value)}
    for _ in range(_MOST):
        if not waiting:
            break
        each = waiting.popleft()
        if isinstance(each, _NUMBERS):
            found.append(each)
        elif id(each) not in known:
            known.add(id(each))
            waiting.extend(islice(_parts(each), _MOST))
    return found


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _token(value: object) -> object:
    """A value that can be compared: a number, where a tensor lies, or which object it is."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value if isinstance(value, _NUMBERS) else id(value)
