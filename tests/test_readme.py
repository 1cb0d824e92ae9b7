"""The README is true: its Python runs, its commands answer, its links lead somewhere."""

import doctest
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^dpgrad [^#\n]*", TEXT, re.MULTILINE)


def test_examples_are_found() -> None:
    assert PYTHON
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.splitlines()[0])
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[1])
def test_command_answers(command: str) -> None:
    program = Path(sys.executable).with_name("dpgrad")
    done = subprocess.run([program, *shlex.split(command)[1:], "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epsilon"] > 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text("utf-8")):
        assert (ROOT / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_examples_of_the_docs_are_true(page: str) -> None:
    assert not doctest.testfile(str(ROOT / "docs" / page), module_relative=False, encoding="utf-8").failed


def test_changelog_has_its_privacy_heading() -> None:
    assert re.search(r"^### Privacy$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
