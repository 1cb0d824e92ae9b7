"""The script of `dpgrad completion` completes in a shell what the parser knows."""

import argparse
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgrad import cli, data
from dpgrad.cli import completion
from dpgrad.training.models import MODELS
from dpgrad.training.recipes import RECIPES

# completes the words given one after another, the last of which is being typed
ASK = """
source "$1"; shift
COMP_WORDS=(dpgrad "$@"); COMP_CWORD=$#
_shtab_dpgrad
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "dpgrad.bash"
    args = argparse.Namespace(shell="bash", json=False)
    path.write_text(completion._answer(args), "utf-8")
    return path


@pytest.fixture
def offered(script: Path, tmp_path: Path) -> Callable[..., set[str]]:
    """What bash offers for a line that is being typed, in an empty folder."""
    bash = shutil.which("bash")
    assert bash is not None, "these tests run bash: install it"

    def ask(*words: str) -> set[str]:
        done = subprocess.run(
            [bash, "--norc", "--noprofile", "-c", ASK, "ask", str(script), *words],
            cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=600,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return {*done.stdout.splitlines()} - {""}

    return ask


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_head_names_the_place_of_the_script(shell: str) -> None:
    head = completion._answer(argparse.Namespace(shell=shell, json=False))[:400]
    assert f"`dpgrad completion {shell}`. Keep it as {completion._PLACES[shell]}" in head
    assert "shtab" not in head.partition("_shtab")[0]


def test_commands(offered: Callable[..., set[str]]) -> None:
    commands = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert offered("") == {*commands}
    assert offered("cal") == {"calibrate"}


def test_options(offered: Callable[..., set[str]]) -> None:
    known = {*cli.parser()._subparsers._group_actions[0].choices["train"]._option_string_actions}  # type: ignore
    assert offered("train", "--") == {name for name in known if name.startswith("--")}
    assert offered("train", "--epsilon", "3", "--del") == {"--delta"}
    assert offered("report", "--sampl") == set()


def test_names(offered: Callable[..., set[str]]) -> None:
    assert offered("train", "--method", "") == {*RECIPES}
    assert offered("train", "--method", "dpsgd", "psas") == {name for name in RECIPES if name.startswith("psas")}
    assert offered("train", "--data", "") >= {*data.names()}
    assert offered("train", "--model", "") >= {*MODELS}
    assert offered("curvature", "so") == {"sonar"}
    assert offered("epsilon", "--relation", "z") == {"zero-out"}


def test_files_and_folders(offered: Callable[..., set[str]], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    (tmp_path / "run").mkdir()
    assert offered("predict", "run", "--input", "r") == {"rows.csv", "run"}
    assert offered("train", "--out", "r") == {"run"}
    assert offered("report", "r") == {"run"}
    assert offered("train", "--config", "rows") == {"rows.csv"}


def test_a_name_or_a_file(tmp_path: Path) -> None:
    """An option that takes either is completed by both."""
    parser = argparse.ArgumentParser(prog="dpgrad")
    option = parser.add_argument("--data", metavar="NAME|FILE|FOLDER")
    completion._complete(option, {"data": ["mnist", "mine"]})
    import shtab

    path = tmp_path / "script"
    path.write_text(shtab.complete(parser, "bash"), "utf-8")
    (tmp_path / "mine.csv").touch()
    done = subprocess.run(
        ["bash", "-c", ASK, "ask", path, "--data", "mi"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.split() == ["mine", "mine.csv"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert cli.main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in ("calibrate", "noise-multiplier", "psasc", "mnist", "rdp-classic"):
        assert name in out
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=out, encoding="utf-8", check=True, timeout=600)


@pytest.mark.parametrize("shell", ["", "tcsh", "bsah"])
def test_a_shell_that_is_not_known(refused: Callable[..., str], shell: str) -> None:
    said = refused("completion", shell)
    assert "SHELL" in said
    assert shell != "bsah" or "did you mean bash?" in said


def test_a_shell_is_required(refused: Callable[..., str]) -> None:
    assert "SHELL" in refused("completion")
