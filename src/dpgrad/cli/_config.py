"""Settings from a TOML file: options of a command by name. The command line takes precedence."""

import argparse
import tomllib
from pathlib import Path
from typing import Any

from dpgrad import _validate
from dpgrad.cli._options import Parser
from dpgrad.errors import OptionError


def overruled(args: argparse.Namespace, parser: Parser, rivals: tuple[tuple[str, ...], ...]) -> None:
    """Fill in from the file ``args.config`` the options that the command line does not give.

    A key is an option without its dashes. Options in one group of ``rivals`` exclude each other: if the command line
    gives one of them, those of the file are ignored.
    """
    path = Path(args.config)
    given = {name for name, value in vars(args).items() if value is not None}
    found = vars(_parsed(_read(path), parser, path))
    for name, value in found.items():
        beaten = any(name in group and given & set(group) for group in rivals)
        if value is not None and name not in given and not beaten:
            setattr(args, name, value)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8") if path.is_file() or not path.exists() else None
    except FileNotFoundError:
        raise OptionError(f"--config cannot read {path}: there is no such file") from None
    except OSError as error:
        raise OptionError(f"--config cannot read {path}: {error.strerror}") from None
    except UnicodeError:
        raise OptionError(f"--config {path} is not TOML, which is UTF-8 text") from None
    if text is None:  # a pipe could block for ever
        raise OptionError(f"--config {path} is not a file")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise OptionError(f"--config {path} is nested too deeply: its keys are options, each with its value") from None
    except ValueError as error:
        raise OptionError(f"--config {path} is not TOML: {error}") from None


def _parsed(settings: dict[str, Any], parser: Parser, path: Path) -> argparse.Namespace:
    known = {
        option.removeprefix("--"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
        and not option.startswith("--no-")
        and action.dest not in ("help", "help_all", "config")
    }
    words_of: dict[str, list[str]] = {}
    for key, value in settings.items():
        name = key.replace("_", "-")
        if name not in known:
            remedy = _validate.meant(name, known) or ": keys are the options of dpgrad train without dashes"
            raise OptionError(f"{path}: unknown key {key!r:.60}{remedy}")
        if name in words_of:
            raise OptionError(f"{path}: {name} is given twice, with - and with _: give it once")
        words_of[name] = _words(name, value, known[name], path)
    try:
        return parser.parse_args([word for words in words_of.values() for word in words])
    except ValueError as error:
        raise OptionError(f"{path}: {error}") from None


def _words(name: str, value: Any, action: argparse.Action, path: Path) -> list[str]:
    """One setting as words of a command line."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise OptionError(f"{path}: {name} must be true or false, got {value!r:.60}")
        return [f"--{'' if value else 'no-'}{name}"] if value or f"--no-{name}" in action.option_strings else []
    several = value if isinstance(value, list) else [value]
    if not several or any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in several):
        raise OptionError(f"{path}: {name} must be a number or a text, got {value!r:.60}")
    if isinstance(value, list) and action.nargs is None and not isinstance(action, argparse._AppendAction):
        raise OptionError(f"{path}: {name} takes one value, got {len(value)}")
    if action.nargs == "+":
        return [f"--{name}", *map(str, several)]
    return [f"--{name}={item}" for item in several]
