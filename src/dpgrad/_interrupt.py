"""Ctrl-C while the command loads its modules: one line instead of a traceback.

An interrupt within an import surfaces anywhere: as another error, in lines about ignored exceptions, or as a process
that ends by the signal. While a command loads there is nothing to put in order, so the process ends at once.
"""

import os
import signal
from contextlib import suppress
from threading import current_thread, main_thread
from types import FrameType

_LINE = b"dpgrad: error: interrupted\n"


def _stop(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, _LINE)
    os._exit(130)


def at_once() -> None:
    """From here on Ctrl-C ends the process with one line and status 130; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def orderly() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: there are files to close and a terminal to leave as it was.

    >>> orderly()
    """
    if signal.getsignal(signal.SIGINT) is _stop and current_thread() is main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
