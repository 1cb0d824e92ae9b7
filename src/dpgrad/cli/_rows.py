"""The rows of `dpgrad predict`: prepared numbers from a file, with refusals in the words of the command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpgrad import _validate
from dpgrad.errors import DataError, OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

KINDS = (".npy", ".npz", ".csv")
HEADERS = ("auto", "yes", "no")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|", "space": " "}  # as in `dpgrad.data`


def blocks(path: Path, shape: tuple[int, ...], header: str = "auto", separator: str = "auto") -> Iterator["Array"]:
    """The rows of a file as float32, at most 1,024 at a time; each must have the ``shape`` the model was trained on."""
    from dpgrad import data

    if (kind := path.suffix.lower()) not in KINDS:
        raise OptionError(f"--input must end in {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {path.name!r:.80}")
    if kind != ".csv" and (header, separator) != ("auto", "auto"):
        raise OptionError(f"--header and --separator are for .csv files, got {path.name!r:.80}: leave them out")
    try:
        yield from data.numbers(path, shape, header, separator)
    except DataError as error:
        raise DataError(f"--input {error}") from None


def separator(text: str) -> str:
    """A separator by its name or as itself; ``auto`` stays."""
    known: dict[str, str] = {"auto": "auto", **SEPARATORS, **{sign: sign for sign in SEPARATORS.values()}, "\\t": "\t"}
    if text not in known:
        _validate.one_of(("auto", *SEPARATORS), value=text)
    return known[text]
