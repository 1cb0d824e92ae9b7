"""Where and how a benchmark ran, and its results folder."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("dpgrad", "numpy", "scipy", "torch", "dp-accounting", "opacus", "mpmath")


def describe(module: str) -> dict[str, Any]:
    """Date, hardware, versions, commit and the command line that would run this again."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: number for name in LIBRARIES if (number := _version(name))},
    }


def _version(name: str) -> str | None:
    """None where the library is not installed: a benchmark leaves out the peers it does not find."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its heading."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def write(name: str, data: dict[str, Any], title: str, sections: list[str]) -> None:
    """NAME.json with everything and NAME.md with what a reader wants."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    where = data["environment"]
    versions = ", ".join(f"{library} {number}" for library, number in where["versions"].items())
    header = (
        f"# {title}\n\n`{where['command']}`, {where['date']}\n\n{where['processor']}, {where['cores']} cores "
        f"(load {where['load_average'][0]}), {where['system']}, Python {where['python']}, {versions}"
    )
    (RESULTS / f"{name}.json").write_text(_json(data))
    (RESULTS / f"{name}.md").write_text("\n\n".join([header, *sections]) + "\n")


def _json(data: dict[str, Any]) -> str:
    """One line an entry, and one an item of a list."""
    lines = []
    for key, value in data.items():
        items = ",\n  ".join(json.dumps(item) for item in value) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(key)}: " + (f"[\n  {items}\n ]" if items else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"
