"""Where and when a benchmark ran, and tables of its results."""

import os
import platform
from datetime import UTC, datetime
from typing import Any

from dpgrad import __version__
from dpgrad.reports.environment import processor, version

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
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"dpgrad": __version__, **{name: number for name in LIBRARIES if (number := version(name))}},
    }
