"""`dpgrad completion`: a script with which a shell completes the commands, options, names and files of dpgrad."""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dpgrad.cli import _options
from dpgrad.errors import OptionError

if TYPE_CHECKING:
    from dpgrad.cli._options import Commands

__all__ = ["add", "commands"]

# where each shell looks for the script, when a line is completed for the first time
_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/dpgrad",
    "zsh": '"${fpath[1]}/_dpgrad"',
    "fish": "~/.config/fish/completions/dpgrad.fish",
}


def add(commands: "Commands") -> None:
    """Register the command."""
    parser = _options.command(
        commands,
        "completion",
        "print a script for completion with the Tab key",
        "Prints a script that completes commands, options, names and files. Write it where the shell looks for such "
        f"scripts, once: {'; '.join(f'dpgrad completion {shell} > {place}' for shell, place in _PLACES.items())}",
        _answer,
    )
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_PLACES), help=f"One of {', '.join(_PLACES)}.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object that holds the script.")


def _answer(args: argparse.Namespace) -> str:
    import shtab

    from dpgrad import cli

    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise OptionError(f"completion for {args.shell} needs a newer shtab: pip install --upgrade shtab")
    main = cli.parser()
    names = _names()
    for parser in commands(main):
        for action in parser._actions:
            _complete(action, names)
    head = f"# Completion of dpgrad, by `dpgrad completion {args.shell}`. Keep it as {_PLACES[args.shell]}\n"
    script = re.sub(r"(?m)^# AUTOMATICALLY GENERATED.*\n(#.*\n)*", lambda _: head, shtab.complete(main, args.shell))
    return json.dumps({"shell": args.shell, "script": script}) + "\n" if args.json else f"{script}\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of all commands below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)


def _names() -> dict[str, Iterable[str]]:
    """What may be named, by the option that names it."""
    from dpgrad import data
    from dpgrad.cli._rows import SEPARATORS
    from dpgrad.training.models import MODELS
    from dpgrad.training.recipes import RECIPES, optimizers

    datasets = data.names()
    return {
        "data": datasets,
        "dataset": datasets,
        "preprocessing": dict.fromkeys(recipe for name in datasets for recipe in data.preprocessings(name)),
        "method": RECIPES,
        "model": MODELS,
        "optimizer": optimizers(),
        "clip_schedule": ("linear", "affine", "geometric:", "arithmetic:"),
        "learning_rate_schedule": ("constant", "linear:", "cosine:", "decay-then-hold:", "warmup:"),
        "averaging": ("ema:", "tail:"),
        "separator": SEPARATORS,
        "device": ("cpu", "cuda"),
    }


def _complete(action: Any, names: dict[str, Iterable[str]]) -> None:
    """Mark an action of a parser that only shtab reads: its metavar tells whether it takes a name, a file or a folder.

    >>> from dpgrad.cli._options import Parser
    >>> made = Parser().add_argument("--data", metavar="NAME|FILE")
    >>> _complete(made, {"data": ["digits"]})
    >>> made.complete["bash"]
    '_dpgrad_files_or_data'
    """
    kind = str(action.metavar or "")
    named = list(names.get(action.dest, ())) if re.search("NAME|DATASET", kind) else []
    if action.choices is not None:
        pass
    elif re.search("FILE", kind) or (named and "FOLDER" in kind):
        action.complete = _either(action.dest, named) if named else "file"
    elif re.search("DIR|FOLDER|RUN", kind):
        action.complete = "directory"
    elif named:
        action.choices = named
    if kind:  # zsh reads : and [ in it
        action.metavar = re.sub(r"\W+", "_", kind).strip("_")


def _either(option: str, names: list[str]) -> dict[str, Any]:
    """Completion by one of the names or by a file, for each shell."""
    function, words = f"_dpgrad_files_or_{option}", " ".join(names)
    return {
        "bash": function,
        "zsh": function,
        "fish": f"(printf '%s\\n' {words}; __fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{\n  compgen -W "{words}" -- "$1"\n  compgen -f -- "$1"\n}}',
            "zsh": f"{function}() {{\n  compadd -- {words}\n  _files\n}}",
        },
    }
