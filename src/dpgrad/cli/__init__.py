"""The command `dpgrad`: plan a budget, train within it, use and report what was trained.

One file per command, with a function ``add(commands)`` that registers its parser and the function that answers it.
Heavy modules are imported when first used: questions about a budget do not load torch. An answer is complete before
any of it is written, so a refusal leaves standard output empty.

>>> from dpgrad import cli
>>> cli.main("steps --epsilon 1 --delta 1e-5 --sampling-rate 0.01 --noise-multiplier 1 --json".split())
{"epsilon": 0.99965..., "steps": 254, ...}
0
"""

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpgrad import __version__
from dpgrad._submodules import attribute
from dpgrad.cli import audit, budget, completion, curvature, data, predict, report, reproduce, train, tune
from dpgrad.cli._options import Answer, Parser, Printed

__all__ = ["COMMANDS", "main", "parser"]

# a new command is a file with `add(commands)` and an entry here, in the order of the help
COMMANDS = (budget, data, train, tune, predict, report, audit, curvature, reproduce, completion)

_LONGEST, _LONGEST_WORD = 1000, 200  # characters of a refusal, and of a word in it

# how messages write an option of a record in Python; here it is an option of the command
_PYTHON = re.compile(r"\w+=(?:Privacy|Computing|HeldOut|RunFolder)\((?:\w+, )?(\w+)=\.\.\.\)")

# what is written if the terminal's encoding lacks a character
_SPELLED = {"ε": "epsilon", "δ": "delta", "é": "e", "–": "-", "─": "-", "∞": "inf", "×": "x", "√": "sqrt", "…": "..."}


def parser() -> Parser:
    """The parser of the whole command line."""
    main = Parser(
        prog="dpgrad",
        description="Plan and account for training with differential privacy.",
        epilog="`dpgrad COMMAND --help` explains the usual options of a command, and `--help-all` every option.",
        allow_abbrev=False,
    )
    main.add_argument("--version", action="version", version=f"dpgrad {__version__}", help="Show the version.")
    commands = main.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for file in COMMANDS:
        file.add(commands)
    return main


def _spell(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_SPELLED.get(c, "?") for c in error.object[error.start : error.end]), error.end


def _joined(argv: Sequence[str]) -> list[str]:
    """Join negative numbers to their option with ``=``: argparse would read -1e-5 as an option."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-(\.?\d|inf|nan)", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _write(text: str) -> int:
    """Write the answer to standard output; return the exit status."""
    if sys.stdout is None:
        return _refused("standard output is closed: there is nowhere to write the answer", 2)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # or the interpreter fails to flush the rest of the buffer when it ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _refused(f"the answer could not be written to standard output: {error.strerror}", 2)
    return 0


def _shortened(text: str, most: int) -> str:
    """The text, or its start and its end, where the remedy of a refusal is."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 3 :]}"


def _refused(message: str, code: int) -> int:
    """Write one line to standard error; return the exit status."""
    words = "".join(c if c.isprintable() else " " for c in message).split()
    line = " ".join(_shortened(word, _LONGEST_WORD) for word in words)  # a path or a value of any length
    line = _shortened(line, _LONGEST)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        print(f"dpgrad: error: {line}", file=sys.stderr, flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, 1 if refuted by an audit, 2 if the input was refused, 130 if stopped.

    >>> main(["--version"])
    dpgrad 0.2.0
    0
    """
    codecs.register_error("dpgrad.spell", _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="dpgrad.spell")
    try:
        command = parser()
        args = command.parse_args(_joined(sys.argv[1:] if argv is None else argv))
        answer = command.format_help() if args.command is None else args.answer(args)
        return _write(answer) or (answer.status if isinstance(answer, Answer) else 0)
    except Printed as answer:  # --help and --version
        return _write(str(answer))
    except KeyboardInterrupt as stop:
        return _refused(": ".join(("interrupted", *map(str, stop.args))), 130)
    except OSError as error:
        named = "" if error.filename is None else f"{error.filename}: "
        return _refused(f"{named}{error.strerror or error}", 2)
    except ValueError as error:
        return _refused(_PYTHON.sub(lambda found: f"--{found[1].replace('_', '-')}", str(error)), 2)
    except RecursionError:
        return _refused("the input is nested too deeply: no file or option of dpgrad needs that", 2)
    except MemoryError:
        return _refused("not enough memory: ask for less at a time", 2)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        return _refused(f"{type(error).__name__}: {error}: this is a bug in dpgrad, please report the command", 1)


if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
