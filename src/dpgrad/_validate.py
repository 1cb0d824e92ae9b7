"""Checks of arguments: each raises one line with name, value, bound and, where there is one, the remedy."""

import math
import operator
import sys
import warnings
from typing import SupportsFloat, SupportsIndex

from dpgrad.errors import OptionError

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


def shown(value: object) -> str:
    """The value as it is written, cut short: a message is one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write very long whole numbers
        text = f"a {type(value).__name__} too long to write"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def positive(**named: object) -> None:
    """Refuse anything but a finite number above zero.

    >>> positive(noise_multiplier=0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: noise_multiplier must be positive and finite, got 0
    """
    for name, value in named.items():
        if not 0 < _number(name, value) < math.inf:
            raise OptionError(f"{name} must be positive and finite, got {shown(value)}")


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


def warn(words: str) -> None:
    """Warn as of the caller's line: that of the first frame outside the package."""
    level, package = 2, __name__.partition(".")[0]
    while str(sys._getframe(level - 1).f_globals.get("__name__")).partition(".")[0] == package:
        level += 1
    warnings.warn(words, stacklevel=level)
