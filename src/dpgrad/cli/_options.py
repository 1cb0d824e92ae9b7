"""What the commands share: how they are registered, how their options are read, and what the terminal shows."""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import shlex
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dpgrad import _interrupt, _validate
from dpgrad.errors import OptionError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

T = TypeVar("T")

LATE = 3.0  # seconds without a word before one is said
MOST_SHOWN = 12  # options in the `--help` of a command
_MOST_ROWS = 10**15
_PLOTS = (".svg", ".png")


class Printed(Exception):  # noqa: N818  # an answer, not an error
    """Text that argparse would print by itself, ignoring write errors and ending the process."""


class Answer(str):
    """An answer with an exit status of its own."""

    status: int

    def __new__(cls, text: str, status: int) -> "Answer":
        """The text, to be written before the process ends with ``status``."""
        made = super().__new__(cls, text)
        made.status = status
        return made


class First(str):
    """The help of an option that `--help` shows even if the command has too many to show all of them."""


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        raise Printed(parser.help_text(parser._actions))


class Parser(argparse.ArgumentParser):
    """A parser that raises an error of one line; `main` ends the process. Every parser has --help and --help-all."""

    elsewhere = ""  # where options go that this command does not have

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_help=False, **settings)
        self.add_argument("-h", "--help", action="help", help=First("Show the usual options."))
        self.add_argument(
            "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=First("Show every option.")
        )

    def usual(self) -> list[argparse.Action]:
        """What `--help` shows: all options of a command that has few, else the required and those marked `First`."""
        if sum(bool(action.option_strings) for action in self._actions) <= MOST_SHOWN + 2:  # and the two of help
            return self._actions
        return [
            action
            for action in self._actions
            if not action.option_strings or action.required or isinstance(action.help, First)
        ]

    def format_help(self) -> str:
        return self.help_text(self.usual())

    def help_text(self, shown: list[argparse.Action]) -> str:
        """The help of these actions, in their groups."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, shown, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in sorted(self._action_groups, key=lambda group: group is self._optionals):  # those of help last
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments([action for action in group._group_actions if action in shown])
            formatter.end_section()
        formatter.add_text(self.epilog)
        if left_out := len(self._actions) - len(shown):
            formatter.add_text(f"{left_out} more options: {self.prog} --help-all")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        raise OptionError(re.sub(r"^argument (\S+): (?=must |cannot )", r"\1 ", message))

    def _print_message(self, message: str, file: Any = None) -> NoReturn:
        raise Printed(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown option by its name, with the one that was probably meant."""
        self._refuse_unknown(list(args or ()))
        return super().parse_known_args(args, namespace)

    def _refuse_unknown(self, words: list[str]) -> None:
        known, leads = self._option_string_actions, self._subparsers is not None
        for word in itertools.takewhile(lambda word: word != "--", words):
            name, _, value = word.partition("=")
            if value == "--" and name in known:  # argparse drops it
                self.error(f"{name} must be given a value, got '--'")
            if leads and not word.startswith("-"):
                return  # the words after the command are for its own parser
            if re.match(r"-{1,2}[^\W\d]", name) and name not in known:
                place = self.elsewhere or f"{self.prog} --help-all lists the options"
                remedy = _validate.meant(name, known) or f": {place}"
                if leads:
                    remedy = ": the options of a command follow it, as in dpgrad train --epsilon 3; see dpgrad --help"
                self.error(f"unknown option {name!r:.60}{remedy}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices, with the one that was probably meant."""
        if action.choices is not None:
            named = "command" if isinstance(action, argparse._SubParsersAction) else action.metavar or action.dest
            name = action.option_strings[0] if action.option_strings else str(named)
            _validate.one_of(list(action.choices), **{name: value})


def _text(value: str) -> str:
    """The text of an option. Empty text is refused: it comes from an unset shell variable, not from a choice."""
    if not value.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {value!r:.40}: give a value or leave it out")
    if "\0" in value:
        raise argparse.ArgumentTypeError(f"must not hold a NUL character, got {value!r:.40}")
    return value


def command(
    commands: "Commands", name: str, short: str, long: str, answer: Callable[[argparse.Namespace], str]
) -> Parser:
    """The parser of one command; ``answer(args)`` returns all of its standard output."""
    parser = commands.add_parser(name, help=short, description=long, allow_abbrev=False)
    parser.register("type", None, _text)  # of options that name no type
    parser.set_defaults(answer=answer)
    return parser


def option(convert: Callable[[str], T], check: Callable[..., None]) -> Callable[[str], T]:
    """An argparse type: convert the text, then check the value with a function of `_validate`."""

    def parse(text: str) -> T:
        try:
            value = convert(text)
            check(value=float(value) if isinstance(value, Fraction) else value)
        except ValueError as error:
            said = str(error).removeprefix("value ")
            raise argparse.ArgumentTypeError(said if said.startswith("must ") else f"must be {error}") from None
        return value

    return parse


def real(text: str) -> float:
    """Parse a number; the check that follows refuses nan and infinities."""
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"a number, got {text!r:.40}") from None


def exact(text: str) -> Fraction:
    """Parse a number exactly: 0.01 is 1/100, and 512/60000 is kept. Floats could lose a step in T = int(E/Q)."""
    if match := re.fullmatch(r"\s*(\d{1,18})\s*/\s*(\d{1,18})\s*", text):
        if not int(match[2]):
            raise OptionError(f"a number, got {text!r}")
        return Fraction(int(match[1]), int(match[2]))
    number = real(text)
    if not math.isfinite(number):
        raise OptionError(f"a finite number, got {text!r:.40}")
    return Fraction(repr(number))


def whole(text: str) -> int:
    """Parse a whole number, such as 10000 or 1e4."""
    with contextlib.suppress(InvalidOperation):
        number = Decimal(text.strip())
        if number.is_finite() and number.adjusted() < 30 and number == number.to_integral_value():
            return int(number)
    raise OptionError(f"a whole number, got {text!r:.40}")


def _at_least_one(value: int) -> None:
    _validate.whole(least=1, most=_MOST_ROWS, value=value)


def plot_file(text: str) -> str:
    """Check, before the work begins, that a plot of this name can be written."""
    return _writable(text, _PLOTS)


def curve_file(text: str) -> str:
    """Check, before the work begins, that a curve of this name can be written."""
    return _writable(text, (".csv", *_PLOTS))


def _writable(text: str, endings: Sequence[str]) -> str:
    if os.path.splitext(text)[1].lower() not in endings:
        raise argparse.ArgumentTypeError(f"must end in {' or '.join(endings)}, got {text!r:.80}")
    folder = os.path.dirname(text) or "."
    # drawing reports what still fails
    if os.path.isdir(text) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r:.80}: name a file in a folder that exists")
    return text


number = option(real, _validate.number)
positive = option(real, _validate.positive)
open_unit = option(real, _validate.open_unit)
steps = option(whole, _validate.step_count)
count = option(whole, _at_least_one)
epochs = option(exact, _validate.positive)
sampling_rate = option(exact, _validate.unit_interval)

# How the text of an option is read, by the kind that its declaration names (`dpgrad.training.options`).
_READ: dict[str, Callable[[str], object] | None] = {
    "positive": positive, "delta": open_unit, "epochs": epochs, "steps": steps, "count": count, "size": count,
    "number": number, "share": open_unit, "text": None, "name": None,
}  # fmt: skip


def declared(record: type, *names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options that the fields of a record declare, as ``add_argument`` takes them; all, or those of these names."""
    for field in dataclasses.fields(record):
        told = field.metadata
        if told.get("kind") is None or (names and field.name not in names):
            continue
        shown = First(told["help"]) if told["first"] else told["help"]
        settings: dict[str, Any] = {"dest": field.name, "help": shown}
        if told["kind"] == "flag":
            settings |= {"action": "store_true", "default": None}
        elif told["choices"]:
            settings["choices"] = list(told["choices"])
        else:
            settings |= {"metavar": told["metavar"], "type": _READ[told["kind"]]}
        yield (
            f"--{field.name.replace('_', '-')}",
            {key: value for key, value in settings.items() if key != "type" or value},
        )


def typed(parser: Parser, args: argparse.Namespace) -> str:
    """The command line for ``args``, for a command whose options are None if they are not given."""
    words = parser.prog.split()
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if value is None or not action.option_strings:
            continue
        name = action.option_strings[0]
        if action.nargs == 0:
            words.append(name if value else f"--no-{name.removeprefix('--')}")
        elif action.nargs == "+":
            words += [name, *value]
        else:
            words += [word for item in (value if isinstance(value, list) else [value]) for word in (name, str(item))]
    return shlex.join(words)


def screen() -> tuple[bool, int]:
    """Whether standard output is a terminal, and how wide to write."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return terminal, min(max(shutil.get_terminal_size((100, 24)).columns, 60), 110)


@contextlib.contextmanager
def warned(category: type[Warning]) -> Iterator[list[str]]:
    """Within the block warnings of this kind become one line each on standard error, and are collected."""
    found: list[str] = []
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, kind: type[Warning], *place: Any, **where: Any) -> None:
            if not issubclass(kind, category):
                others(message, kind, *place, **where)
                return
            found.append(str(message))
            print(f"dpgrad: warning: {message}", file=sys.stderr, flush=True)

        warnings.simplefilter("always", category)
        warnings.showwarning = show  # type: ignore[assignment]
        yield found


@contextlib.contextmanager
def patience(message: str) -> Iterator[None]:
    """Show a message on standard error if the work within the block takes long."""
    _interrupt.orderly()  # Ctrl-C then restores the terminal
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(message):
            yield
        return
    with late(message):
        yield


@contextlib.contextmanager
def late(message: str) -> Iterator[Callable[[], None]]:
    """Print a message on standard error once the block has taken three seconds, unless what this gives was called."""

    def say() -> None:
        if sys.stderr is not None:  # print would take standard output instead
            print(f"dpgrad: {message} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(LATE, say)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()
