"""The site: every page is reached from its home, notebooks are those of their pages, and what pages list is complete.

`make docs` builds the site, which takes minutes; here is what can be checked in seconds.
"""

import contextlib
import fnmatch
import importlib.util
import inspect
import io
import json
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dpgrad
from dpgrad import errors
from dpgrad.training import models

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MADE = DOCS / "api" / "modules"  # by the build
PAGES = sorted(page for page in DOCS.rglob("*.md") if MADE not in page.parents)


def loaded(path: Path) -> ModuleType:
    """A module that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks = loaded(DOCS / "notebooks" / "make.py")
measured = loaded(DOCS / "_extensions" / "measured.py")
commands = loaded(DOCS / "_extensions" / "commands.py")
sys.modules |= {"commands": commands, "measured": measured}
inserted = loaded(DOCS / "_extensions" / "inserted.py")


def entries(page: Path) -> list[str]:
    """The pages and patterns that the toctrees of a page name, relative to the repository."""
    found = []
    for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        for line in tree.splitlines():
            if line and not line.startswith((":", "<!--")):
                name = re.sub(r".*<(.*)>", r"\1", line.strip())
                found.append((page.parent / name).as_posix())
    return [str(Path(one).resolve().relative_to(ROOT)) if "*" not in one else normal(one) for one in found]


def normal(pattern: str) -> str:
    parts: list[str] = []
    for part in Path(pattern).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return Path(*parts).relative_to(ROOT).as_posix()


def test_every_page_is_in_a_toctree() -> None:
    named = [entry for page in PAGES for entry in entries(page)] + ["docs/index"]
    named += [f"docs/{name}" for name in inserted.others().splitlines()]
    names = [page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES]
    orphans = [name for name in names if not any(fnmatch.fnmatch(name, entry) for entry in named)]
    assert not orphans, f"pages that no toctree names: {orphans}; add them to docs/index.md"
    missing = [entry for entry in named if "*" not in entry and not made(ROOT / f"{entry}.md")]
    assert not missing, f"entries of toctrees that are no pages: {missing}"


def made(page: Path) -> bool:
    return page.exists() or MADE in page.parents


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_notebooks_are_those_of_their_pages(name: str) -> None:
    assert (DOCS / "notebooks" / f"{name}.ipynb").read_text("utf-8") == notebooks.notebook(name), "run `make notebooks`"


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_cells_of_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in one namespace, as a kernel runs them. tests/test_readme.py compares outputs of the pages."""
    monkeypatch.chdir(tmp_path)
    book = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    space: dict[str, object] = {"__name__": "__main__"}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), space)
            assert bool(said.getvalue()) >= bool(cell["outputs"])


def test_every_kind_of_error_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    kinds = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and name != "DpgradError"]
    assert kinds
    assert not [name for name in kinds if f"| `{name}` |" not in page]


def test_messages_that_are_explained_are_messages_of_the_code() -> None:
    source = " ".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    plain = re.sub(r'"\s*\n\s*f?"', "", source)
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = [part.strip() for words in re.findall(r"^\*\*`(.*?)`", page, re.MULTILINE) for part in words.split("...")]
    parts = [part for part in quoted if len(part) > 8]
    assert len(parts) > 10
    assert not [part for part in parts if part not in plain]


def test_the_command_reference_names_every_command_and_option() -> None:
    text = commands.text()
    assert re.findall(r"^## dpgrad (\w+)", text, re.MULTILINE)[:3] == ["epsilon", "calibrate", "steps"]
    assert "`--noise-multiplier` `Z`" in text
    assert "`--help`" not in text


def test_every_table_has_a_date_and_hardware() -> None:
    text = measured.text()
    files = [*(ROOT / "benchmarks" / "results").glob("*.md"), *(ROOT / "results").glob("*.md")]
    assert text.count("](../") == len(files) - 1  # but results/README.md
    assert "no date" not in text


def test_release_files_name_this_version() -> None:
    citation, changes = ((ROOT / name).read_text("utf-8") for name in ("CITATION.cff", "CHANGELOG.md"))
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.MULTILINE)
    newest = re.search(r"^## \[(\d\S*)\] - (\S+)$", changes, re.MULTILINE)
    assert cited is not None
    assert newest is not None
    assert cited[1] == dpgrad.__version__
    assert newest.groups() == cited.groups()


def test_extras_are_those_that_the_docs_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    page = (DOCS / "install.md").read_text("utf-8")
    assert set(re.findall(r"`dpgrad\[(\w+)\]`", page)) == set(extras) - {"dev", "release"}


@pytest.mark.parametrize("record", [dpgrad.Privacy, dpgrad.Computing, dpgrad.HeldOut, dpgrad.RunFolder])
def test_every_option_of_a_record_is_listed(record: Any) -> None:
    (row,) = re.findall(
        rf"^\| `dpgrad.{record.__name__}` \|.*\| (.*) \|$", (DOCS / "train.md").read_text("utf-8"), re.MULTILINE
    )
    assert re.findall(r"`(\w+)`", row) == [field.name for field in fields(record)]


def test_every_model_by_name_is_listed() -> None:
    page = (DOCS / "own_model.md").read_text("utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == [*models.MODELS]
