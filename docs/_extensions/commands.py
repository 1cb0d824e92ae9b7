"""The command reference: every command and option, read from the parser of `dpgrad` itself."""

import argparse
import re

from dpgrad import cli


def text() -> str:
    """One section per command, as Markdown."""
    (choices,) = (action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return "\n\n".join(section for parser in choices.choices.values() for section in sections(parser))


def sections(parser: argparse.ArgumentParser) -> list[str]:
    """A command, and those inside it."""
    found = [f"## {parser.prog}", escaped(parser.description or "")]
    inside: list[argparse.ArgumentParser] = []
    for group in sorted(parser._action_groups, key=lambda group: group is parser._optionals):
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                inside += action.choices.values()
            elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
                rows.append(f"| {written(action)} | {meaning(action)} |")
        if rows:
            title = (group.title or "options").capitalize()
            found.append(f"| {escaped(title)} | meaning |\n|---|---|\n" + "\n".join(rows))
    return found + [part for one in inside for part in sections(one)]


def written(action: argparse.Action) -> str:
    """How an option is written, with its value."""
    values = [] if action.nargs == 0 else arguments(action)
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    given = " or ".join(f"`{value}`" for value in values)
    return f"{flags} {given}".strip().replace("|", "\\|")


def arguments(action: argparse.Action) -> list[str]:
    """What may follow an option: one of several words, or a value."""
    if action.choices is not None and action.metavar is None:
        return [str(choice) for choice in action.choices]
    if isinstance(action, argparse.BooleanOptionalAction):
        return []
    name = action.metavar or action.dest.upper()
    shown = name if isinstance(name, str) else " ".join(name)
    return [f"{shown} ..." if action.nargs in ("+", "*") else shown]


def meaning(action: argparse.Action) -> str:
    words = escaped(str(action.help or "").replace("%%", "%"))
    return f"{words} *Required.*" if action.required and action.option_strings else words


def escaped(words: str) -> str:
    """As Markdown: what could be read as markup is not, but for code in backquotes."""
    parts = re.split(r"(`[^`]*`)", words)
    plain = [part if part.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", part) for part in parts]
    return "".join(plain).replace("|", "\\|")
