"""`--help` of every command shows about ten options, and `--help-all` every one."""

import argparse
import re

import pytest

from dpgrad import cli
from dpgrad.cli import completion
from dpgrad.cli._options import MOST_SHOWN, First, Parser

COMMANDS = {parser.prog: parser for parser in completion.commands(cli.parser())}
HELPS = {"--help", "--help-all"}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[set[str], str]:
    """The options that an answer explains, each by its first name, and the answer."""
    assert cli.main(list(words)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.M)) - HELPS, out


def first_names(parser: argparse.ArgumentParser) -> set[str]:
    long = [[name for name in action.option_strings if name.startswith("--")] for action in parser._actions]
    return {found[0] for found in long if found} - HELPS


@pytest.mark.parametrize("prog", COMMANDS)
class TestEveryCommand:
    def test_about_ten_options(self, capsys: pytest.CaptureFixture[str], prog: str) -> None:
        known = first_names(COMMANDS[prog])
        found, text = shown(capsys, *prog.split()[1:], "--help")
        assert found <= known
        assert len(found) <= MOST_SHOWN
        assert len(found) >= min(len(known), 6)  # a newcomer is not left with next to nothing
        if left_out := known - found:
            assert f"{len(left_out)} more options: {prog} --help-all" in text
        else:
            assert "more options" not in text

    def test_all_of_them(self, capsys: pytest.CaptureFixture[str], prog: str) -> None:
        found, text = shown(capsys, *prog.split()[1:], "--help-all")
        assert found == first_names(COMMANDS[prog])
        assert "more options" not in text

    def test_a_command_can_be_typed_from_its_help(self, prog: str) -> None:
        """What has to be given is shown: each required option, and each that is one of several of which one is."""
        parser = COMMANDS[prog]
        assert isinstance(parser, Parser)
        for group in parser._mutually_exclusive_groups:
            assert not group.required or {*group._group_actions} <= {*parser.usual()}
        assert {action for action in parser._actions if action.required} <= {*parser.usual()}

    def test_options_are_in_groups(self, prog: str) -> None:
        parser = COMMANDS[prog]
        loose = [action for action in parser._optionals._group_actions if not HELPS & {*action.option_strings}]
        assert len(loose) <= 6


def made(count: int) -> Parser:
    parser = Parser(prog="dpgrad mine")
    parser.add_argument("--needed", required=True, help="needed")
    parser.add_argument("--usual", help=First("usual"))
    for number in range(count - 2):
        parser.add_argument(f"--rare-{number}", help="rare")
    return parser


def test_few_options_are_all_shown() -> None:
    parser = made(MOST_SHOWN)
    assert parser.usual() == parser._actions
    assert "more options" not in parser.format_help()


def test_of_many_options_those_marked_are_shown() -> None:
    parser = made(MOST_SHOWN + 1)
    assert {action.dest for action in parser.usual()} == {"help", "help_all", "needed", "usual"}
    assert f"{MOST_SHOWN - 1} more options: dpgrad mine --help-all" in parser.format_help()
    assert "--rare-0" not in parser.format_help()


def test_a_file_of_settings_cannot_ask_for_help(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{tmp_path}/settings.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write("help-all = true\n")
    assert cli.main(["train", "--plan", "--config", path]) == 2
    assert "unknown key 'help-all'" in capsys.readouterr().err
