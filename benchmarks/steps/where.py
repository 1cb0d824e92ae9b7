"""Where and when a benchmark ran, and tables of its results."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpgrad import __version__

LIBRARIES = ("numpy", "scipy", "torch", "triton", "opacus", "jax", "dp-accounting", "mpmath")

Table = list[list[str]]


def environment(command: str) -> dict[str, Any]:
    """Date, command, hardware and versions.

    >>> environment("dpgrad bench")["command"]
    'dpgrad bench'
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"dpgrad": __version__, **{name: number for name in LIBRARIES if (number := _version(name))}},
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
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def markdown(table: Table) -> str:
    """A Markdown table with its columns under each other; the first row is its heading.

    >>> print(markdown([["engine", "ms"], ["dpgrad", "1.25"]]))
    | engine | ms   |
    | ------ | ---- |
    | dpgrad | 1.25 |
    """
    table = [[cell.replace("|", "/") for cell in row] for row in table]
    widths = [max(3, *(len(row[column]) for row in table)) for column in range(len(table[0]))]
    head, *body = table
    ruled = [head, ["-" * width for width in widths], *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in ruled
    )
