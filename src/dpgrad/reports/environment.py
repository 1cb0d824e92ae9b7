"""How a result was made: versions and the kind of machine, without names, paths or serial numbers.

>>> sorted(environment())
['machine', 'packages', 'python', 'system']
"""

import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "environment", "processor", "today", "version"]

PACKAGES = ("numpy", "scipy", "scikit-learn", "torch")


def environment() -> dict[str, Any]:
    """The version of Python and of the packages that compute, the operating system and the kind of processor."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def version(name: str) -> str | None:
    """The version of an installed package, which is not imported; None where there is none.

    >>> version("no-such-package") is None
    True
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The name of the processor, or its kind where the system does not tell.

    >>> processor() != ""
    True
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def today() -> str:
    """The date in UTC, as in 2026-01-31.

    >>> len(today())
    10
    """
    return datetime.now(UTC).date().isoformat()
