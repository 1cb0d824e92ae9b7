"""Checks of arguments: each raises one line with name, value, bound and, where there is one, the remedy."""

import functools
import inspect
import math
import operator
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import ParamSpec, SupportsFloat, SupportsIndex, TypeVar

from dpgrad.errors import DpgradError, OptionError, UnknownOptionError

P = ParamSpec("P")
R = TypeVar("R")

MOST_STEPS = 10**9


def _number(name: str, value: object) -> float:
    if type(value) is float and value == value:  # the usual case, and the only one that runs often
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise OptionError(f"{name} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except (TypeError, OverflowError):  # an array, or a whole number beyond any float
        raise OptionError(f"{name} must be a number, got {shown(value)}") from None
    if math.isnan(number):
        raise OptionError(f"{name} must be a number, got nan")
    return number


_LISTED = 20  # entries of a list that may be an option; a longer one may be a column of private values


def shown(value: object) -> str:
    """The value as it is written, cut short: a message is one line. Of a table of values its kind alone: it is data.

    >>> shown([1, "a"]), shown([0, 1] * 20)
    ("[1, 'a']", 'a list of many values')
    """
    if getattr(value, "shape", ()) != () or (isinstance(value, list | tuple) and len(value) > _LISTED):
        return f"{'an' if type(value).__name__[:1].lower() in 'aeiou' else 'a'} {type(value).__name__} of many values"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write very long whole numbers
        text = f"a {type(value).__name__} too long to write"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(**named: object) -> None:
    """Refuse anything but a number that is not nan."""
    for name, value in named.items():
        _number(name, value)


def positive(**named: object) -> None:
    """Refuse anything but a finite number above zero.

    >>> positive(noise_multiplier=0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: noise_multiplier must be positive and finite, got 0
    """
    for name, value in named.items():
        if not 0 < _number(name, value) < math.inf:
            raise OptionError(f"{name} must be positive and finite, got {shown(value)}")


def json_number(value: float | None) -> float | None:
    """The number, or None if it is not finite, which JSON cannot hold.

    >>> json_number(0.5), json_number(float("inf"))
    (0.5, None)
    """
    return value if value is not None and math.isfinite(value) else None


def non_negative(**named: object) -> None:
    """Refuse anything but a finite number of at least zero."""
    for name, value in named.items():
        if not 0 <= _number(name, value) < math.inf:
            raise OptionError(f"{name} must be zero or more and finite, got {shown(value)}")


def unit_interval(**named: object) -> None:
    """Refuse anything outside [0, 1]."""
    for name, value in named.items():
        if not 0 <= _number(name, value) <= 1:
            raise OptionError(f"{name} must lie in [0, 1], got {shown(value)}")


def open_unit(**named: object) -> None:
    """Refuse anything outside the open interval (0, 1)."""
    for name, value in named.items():
        if not 0 < _number(name, value) < 1:
            raise OptionError(f"{name} must lie strictly between 0 and 1, got {shown(value)}")


def whole(least: int = 0, most: int | None = None, **named: object) -> None:
    """Refuse anything but a whole number within [least, most]; booleans are not numbers.

    >>> whole(least=1, steps=0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: steps must be a whole number of at least 1, got 0
    """
    for name, value in named.items():
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
            raise OptionError(f"{name} must be a whole number, got {shown(value)}")
        number = operator.index(value)
        if number < least:
            raise OptionError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
        if most is not None and number > most:
            got = f"{number:,}" if number < 10**30 else shown(value)
            raise OptionError(f"{name} must be at most {most:,}, got {got}")


def step_count(**named: object) -> None:
    """Refuse anything but a number of steps from 1 to a thousand million: beyond that nothing is certified."""
    whole(least=1, most=MOST_STEPS, **named)


# What other libraries and the papers call an option or a choice.
_ELSEWHERE = {
    "lr": "learning-rate",
    "eta": "learning-rate",
    "lr-schedule": "learning-rate-schedule",
    "max-grad-norm": "clip",
    "l2-norm-clip": "clip",
    "lot": "batch-size",
    "lot-size": "batch-size",
    "sigma": "noise-multiplier",
    "noise": "noise-multiplier",
    "target-epsilon": "epsilon",
    "target-delta": "delta",
    "mse": "squared",
}


def nearest(given: object, known: Iterable[str]) -> str | None:
    """The one of the ``known`` names that was probably meant.

    >>> nearest("mnst", ["adult", "mnist"]), nearest("lr", ["clip", "learning_rate"]), nearest("x", ["mnist"])
    ('mnist', 'learning_rate', None)
    """
    if not isinstance(given, str):
        return None
    folded = {_folded(name): name for name in known}
    word = _folded(given)
    if (usual := _ELSEWHERE.get(word)) in folded:
        return folded[usual]
    close = get_close_matches(word, folded, n=1, cutoff=0.6 if len(word) > 3 else 0.5)  # of dg and gd it is 0.5
    return folded[close[0]] if close else None


def meant(given: object, known: Iterable[str]) -> str:
    """The end of a refusal: ``: did you mean NAME?``, or nothing where no known name is near."""
    name = nearest(given, known)
    return "" if name is None else f": did you mean {name}?"


def _folded(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def one_of(known: Collection[str], also: str = "", error: type[DpgradError] = OptionError, **named: object) -> None:
    """Refuse anything but one of the ``known`` names; ``also`` says what else the caller takes.

    >>> one_of(["gd", "sgd"], solver="dg")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: solver must be one of gd, sgd, got 'dg': did you mean gd?
    """
    for name, value in named.items():
        if not isinstance(value, str) or value not in known:
            choice = f"{also} or one of" if also else "one of"
            raise error(f"{name} must be {choice} {', '.join(known)}, got {shown(value)}{meant(value, known)}")


def keywords(
    remedy: Callable[[str], str] = lambda name: "", absent: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to refuse an unknown keyword with ``remedy(keyword)``, else with the nearest one it has.

    A keyword of ``absent`` may be given as None, which says that there is none of it.

    Python's own message names the class that defines ``__init__``, which users of a subclass have never seen.

    >>> @keywords()
    ... def train(clip=1.0): ...
    >>> train(clpi=2.0)
    Traceback (most recent call last):
    dpgrad.errors.UnknownOptionError: train has no option 'clpi': did you mean clip?
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name, value in dict(options).items():
                if name in absent and value is None:
                    options.pop(name)
                elif name not in known:
                    title = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                    said = remedy(name) or meant(name, known) or f": it takes {', '.join(known)}"
                    raise UnknownOptionError(f"{title} has no option {name!r:.40}{said}")
            return function(*args, **options)

        return checked

    return decorated


# The package, and those that call it for a user: a warning names the line of the user's own.
_CALLERS = (__name__.partition(".")[0], "sklearn", "joblib", "torch", "transformers", "lightning", "contextlib")


def warn(words: str, category: type[Warning] = UserWarning) -> None:
    """Warn as of the caller's line: that of the first frame outside the package and the libraries that call it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _CALLERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(words, category, stacklevel=level)
