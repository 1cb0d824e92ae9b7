"""Where and how a benchmark ran, and its results folder."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.steps import where
from dpgrad.errors import OptionError
from dpgrad.papers import sources
from dpgrad.reports import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

table = markdown.table


def digest(module: str) -> str | None:
    """That of the code of ``python -m module``; None where there is no such module any more."""
    whole = ROOT.joinpath(*module.split("."), "__main__.py").exists()
    try:
        return sources.digest(f"{module}.__main__" if whole else module)
    except OptionError:
        return None


def describe(module: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Date, hardware, versions, commit, a digest of the code and the command line that would run this again."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    command = ["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]
    return {
        **where.environment(shlex.join(command)),
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "source": digest(module),
    }


def heading(ran: Mapping[str, Any], title: str) -> str:
    """The title of a results file, and where it was made."""
    versions = ", ".join(f"{library} {number}" for library, number in ran["versions"].items())
    return (
        f"# {title}\n\n`{ran['command']}`, {ran['date']}\n\n{ran['processor']}, {ran['cores']} cores "
        f"(load {ran['load_average'][0]}), {ran['system']}, Python {ran['python']}, {versions}; "
        f"code {ran.get('source') or 'unknown'} (`python -m benchmarks.stale`)"
    )


def write(name: str, data: dict[str, Any], title: str, sections: list[str]) -> None:
    """NAME.json with everything and NAME.md with what a reader wants."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(as_json(data), "utf-8")
    (RESULTS / f"{name}.md").write_text("\n\n".join([heading(data["environment"], title), *sections]) + "\n", "utf-8")


def as_json(data: Mapping[str, Any]) -> str:
    """One line an entry, and one an item of a list."""
    lines = []
    for key, value in data.items():
        items = ",\n  ".join(json.dumps(item) for item in value) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(key)}: " + (f"[\n  {items}\n ]" if items else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"
