"""README and docs are true: their Python runs, their commands answer as shown, their links lead somewhere.

Every page is read from top to bottom, in an empty folder. Each Python block of README stands alone; those of a page of
docs share one namespace. A
``text`` block right after a Python block is its output. A ``console`` block is run, command by command; ``...`` stands
for lines that are not shown. A command in a ``sh`` block may take long or need a GPU: the command line must accept it.
"""

import contextlib
import doctest
import io
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from dpgrad import cli
from dpgrad.papers import catalogue

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / "docs" / "api" / "modules"  # by `make docs`
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if MADE not in path.parents)
PAGES = ["README.md", *DOCS]
TOP = ["CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
README_LINES, FIRST_PYTHON = 150, 40
MEASURED = ("performance", "adaptive_clip", "defaults", "tuning", "secure_noise")  # pages whose figures are looked up
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
# An accuracy, shown as 0.89, varies between runs with fresh noise, on 360 held-out rows with a standard deviation of
# about 0.02: five of them are a false alarm in a million runs. Anything else may change in its last digits only, which
# depend on the libraries.
ACCURACY = re.compile(r"0\.\d\d?")
SPREAD, ROUNDING = 0.1, 1e-3


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page it begins on, from 1."""

    language: str
    text: str
    line: int


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> list[Block]:
    text = text_of(page)
    found = re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(one[1], one[2], text.count("\n", 0, one.start()) + 1) for one in found]


def programs(page: str) -> list[tuple[Block, str | None]]:
    """The Python blocks of a page, each with its output where the page shows it; doctests are run elsewhere."""
    found = blocks(page)
    after = [*found[1:], Block("", "", 0)][: len(found)]
    lines = text_of(page).splitlines()
    return [
        (block, shown.text if shown.language == "text" and follows(lines, block, shown) else None)
        for block, shown in zip(found, after, strict=True)
        if block.language == "python" and not block.text.startswith(">>>")
    ]


def follows(lines: list[str], block: Block, shown: Block) -> bool:
    """Whether only empty lines stand between two blocks."""
    end = block.line + block.text.count("\n") + 1  # the line of the closing fence, from 1
    return not "".join(lines[end : shown.line - 1]).strip()


def commands(page: str, language: str) -> list[str]:
    """The dpgrad commands of a page's blocks in that language, also by torchrun, without comments and redirections."""
    lines = [line for block in blocks(page) if block.language == language for line in lines_of(block)]
    found = [re.match(r"(?:\$ |torchrun .* -m )?(dpgrad [^#>]*)", line) for line in lines]
    return [one[1].strip() for one in found if one]


def lines_of(block: Block) -> list[str]:
    return block.text.splitlines()


def same(shown: str, printed: str) -> bool:
    """Whether a line has the words shown, and numbers close to those shown."""
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(close(a, b) for a, b in pairs)


def close(shown: str, printed: str) -> bool:
    spread = SPREAD if ACCURACY.fullmatch(shown) else 0.0
    a, b = (float(text.replace(",", "")) for text in (shown, printed))
    return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=spread)


def differs(shown: str, printed: str) -> str:
    """The first line shown that was not printed there; empty where the output is as shown."""
    left = [line.rstrip() for line in printed.splitlines()]
    anywhere = False
    for line in shown.splitlines():
        if line.strip() == "...":
            anywhere = True
            continue
        while anywhere and left and not same(line, left[0]):
            left.pop(0)
        anywhere = False
        if not left or not same(line, left.pop(0)):
            return f"not printed: {line!r}, in\n{printed}"
    return f"printed, but not shown: {left[0]!r}" if left and not anywhere else ""


def answer(command: str, folder: Path) -> str:
    """What a command writes to standard output."""
    words = [sys.executable, "-m", *shlex.split(command)]
    wide = {**os.environ, "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=600, cwd=folder, env=wide)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)])
def test_python_runs_and_prints_what_is_shown(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block, shown in programs(page):
        if page == "README.md" or not names:
            names = {"__name__": "page"}
        printed = io.StringIO()
        padded = "\n" * block.line + block.text  # an error names the line of the page
        with contextlib.redirect_stdout(printed):
            exec(compile(padded, page, "exec"), names)
        if shown is not None:
            assert not (why := differs(shown, printed.getvalue())), f"{page}, line {block.line}: {why}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "console")])
def test_commands_answer_as_shown(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, shown = part.split("\n", 1)
                assert not (why := differs(shown, answer(command, tmp_path))), f"{page}: {command}: {why}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "sh")])
def test_commands_are_accepted(page: str) -> None:
    """The command line reads every option with its value. Those that take seconds also run: tests/test_guides.py."""
    for command in commands(page, "sh"):
        words = shlex.split(command)[1:]
        given = cli.parser().parse_args(words)
        for name in given.names if words[0] == "reproduce" else ():
            assert name == "all" or catalogue.named(name)[0]


def test_examples_are_found() -> None:
    assert len(programs("README.md")) == 2
    assert all(shown for _, shown in programs("README.md"))
    assert commands("README.md", "console")
    assert {page for page in PAGES if programs(page)} >= {
        "docs/train.md", "docs/own_loop.md", "docs/scikit_learn.md", "docs/accounting.md",
    }  # fmt: skip


def test_output_that_differs_is_noticed() -> None:
    assert not differs("0.89\nε = 3 (pld)\n...\n", "0.93\nε = 2.9999 (pld)\nmore\n")
    assert differs("ε = 3 (pld)\n", "ε = 3 (pld)\nmore\n")
    assert differs("ε = 3 (pld)\n", "ε = 3 (rdp)\n")
    assert differs("ε = 3 (pld)\n", "ε = 2.98 (pld)\n")
    assert differs("0.89\n", "0.74\n")
    assert differs("...\nlast\n", "first\n")


def test_readme_fits_on_a_screen() -> None:
    assert len(text_of("README.md").splitlines()) <= README_LINES
    assert programs("README.md")[0][0].line <= FIRST_PYTHON


def test_first_example_has_five_lines_and_the_second_four() -> None:
    assert [sum(map(bool, lines_of(block))) for block, _ in programs("README.md")] == [5, 4]


@pytest.mark.parametrize("page", [*PAGES, *TOP])
def test_links_lead_somewhere(page: str) -> None:
    for target, fragment in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", text_of(page)):
        place = (ROOT / page).parent / target if target else ROOT / page
        assert place.exists(), f"{page} links to {target}"
        if fragment:
            assert fragment.removeprefix("#") in anchors(place), f"{page} links to {target}{fragment}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in MEASURED)])
def test_measured_figures_are_in_the_results_that_are_linked(page: str) -> None:
    """Each section is looked at by itself, without its code. Years and small whole numbers, as epochs, are left out."""
    measured = 0
    for section in re.split(r"^## ", re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S), flags=re.M):
        files = re.findall(r"\]\(([^)#]*results/[^)#]+\.md)\)", section)
        results = "".join(((ROOT / page).parent / file).read_text("utf-8") for file in files)
        numbers = [figure.rstrip(",") for figure in NUMBER.findall(section)] if files else []
        figures = [one for one in numbers if "." in one or (len(one) > 2 and not re.fullmatch(r"(19|20)\d\d", one))]
        assert not (missing := [figure for figure in figures if figure not in results]), f"{page}: {missing}"
        measured += len(figures)
    assert measured >= 3


@pytest.mark.parametrize("page", [page for page in PAGES if re.search(r"benchmarks/results/\w+\.md\)", text_of(page))])
def test_pages_say_that_results_may_be_older_than_the_code(page: str) -> None:
    assert "`make stale`" in text_of(page)


def test_our_best_is_that_of_the_results() -> None:
    rows = [line.split("|") for line in text_of("docs/best.md").splitlines() if "](../results/best-" in line]
    assert len(rows) >= 6
    for row in rows:
        name = row[1].split("`")[1]
        (line,) = re.findall(r"^\| our best .*±.*$", text_of(f"results/{name}.md"), re.MULTILINE)
        assert row[6].split(";")[0].strip() in line, name


def test_every_block_is_run_or_the_page_says_why_not() -> None:
    """Blocks of these languages are run, parsed or compared by a test; what is in ``sh`` must be accepted."""
    known = {"python", "text", "console", "sh", "toml", "{toctree}"}
    apart = {  # page: languages that are not run there, and the words that say so or say what runs them
        "docs/from_opacus.md": ({"diff"}, "A test applies the diffs"),
        "docs/several_processes.md": ({"py", "yaml"}, "run on two ranks in `tests/distributed`"),
        "docs/from_tf_privacy.md": ({""}, "A Keras script such as"),
        "docs/train.md": ({""}, "It takes about a minute"),
    }
    for page in PAGES:
        others, words = apart.get(page, (set(), ""))
        assert {block.language for block in blocks(page)} - known <= others, page
        assert words in text_of(page), page
        outputs = [shown for _, shown in programs(page) if shown is not None]
        assert [block.text for block in blocks(page) if block.language == "text"] == outputs, page
        for block in blocks(page):
            if block.language == "toml":
                tomllib.loads(block.text)


@pytest.mark.parametrize("page", DOCS)
def test_doctests_of_the_docs_are_true(page: str) -> None:
    assert not doctest.testfile(str(ROOT / page), module_relative=False, encoding="utf-8").failed


@pytest.mark.parametrize("page", DOCS)
def test_every_page_is_linked(page: str) -> None:
    """From README, or from a page of docs."""
    name = Path(page).name
    assert any(f"{name})" in text_of(other) or f"{name}#" in text_of(other) for other in PAGES if other != page)


def test_changelog_has_its_privacy_heading() -> None:
    assert re.search(r"^### Privacy$", text_of("CHANGELOG.md"), re.MULTILINE)
