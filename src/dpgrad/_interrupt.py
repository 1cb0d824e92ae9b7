"""Ctrl-C while the command loads its modules: one line instead of a traceback.

An interrupt within an import surfaces anywhere: as another error, in lines about ignored exceptions, or as a process
that ends by the signal. While a command loads there is nothing to put in order, so the process ends at once. This
file imports next to nothing, since until it is loaded Python itself answers.
"""

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_LINE = b"dpgrad: error: interrupted\n"


def _stop(number: int, frame: "FrameType | None") -> None:
    try:
        os.write(2, _LINE)
    finally:
        os._exit(130)


def at_once() -> None:
    """From here on Ctrl-C ends the process with one line and status 130; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def orderly() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: there are files to close and a terminal to leave as it was.

    >>> orderly()
    """
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
