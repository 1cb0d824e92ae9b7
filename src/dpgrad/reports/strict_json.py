"""Strict JSON from a file that others may have edited."""

import json
import math
from pathlib import Path
from typing import Any

from dpgrad.errors import ReportError

__all__ = ["read"]

_DIGITS = 19  # of a whole number: counts of rows and steps have fewer, and no more fit 64 bits


def read(path: Path) -> Any:
    """What ``path`` holds; anything but JSON with finite numbers, of some depth, is refused with one line."""
    try:
        return json.loads(path.read_text("utf-8"), parse_constant=_refused, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ReportError(f"{path} is nested too deeply: it was damaged or edited") from None
    except ValueError as error:
        raise ReportError(f"{path} is not JSON ({error}): it was damaged or edited") from None


def _refused(text: str) -> float:
    raise ReportError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(f"{text:.40}")


def _whole(text: str) -> int | float:
    return int(text) if len(text) <= _DIGITS else _refused(f"{text:.40}")
