"""Where and how a benchmark ran, and its results folder."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.steps import where
from dpgrad.papers import sources

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

table = where.markdown


def describe(module: str) -> dict[str, Any]:
    """Date, hardware, versions, commit, a digest of the code and the command line that would run this again."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        **where.environment(shlex.join(["python", "-m", module, *sys.argv[1:]])),
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "source": sources.digest(module),
    }


def write(name: str, data: dict[str, Any], title: str, sections: list[str]) -> None:
    """NAME.json with everything and NAME.md with what a reader wants."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    ran = data["environment"]
    versions = ", ".join(f"{library} {number}" for library, number in ran["versions"].items())
    header = (
        f"# {title}\n\n`{ran['command']}`, {ran['date']}\n\n{ran['processor']}, {ran['cores']} cores "
        f"(load {ran['load_average'][0]}), {ran['system']}, Python {ran['python']}, {versions}; "
        f"code {ran.get('source') or 'unknown'} (`python -m benchmarks.stale`)"
    )
    (RESULTS / f"{name}.json").write_text(_json(data), "utf-8")
    (RESULTS / f"{name}.md").write_text("\n\n".join([header, *sections]) + "\n", "utf-8")


def _json(data: dict[str, Any]) -> str:
    """One line an entry, and one an item of a list."""
    lines = []
    for key, value in data.items():
        items = ",\n  ".join(json.dumps(item) for item in value) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(key)}: " + (f"[\n  {items}\n ]" if items else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"
