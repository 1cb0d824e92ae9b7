"""What a result was made with: versions and the kind of machine, without names, paths or serial numbers.

>>> sorted(environment())
['machine', 'packages', 'python', 'system']
"""

import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

__all__ = ["PACKAGES", "environment", "today"]

PACKAGES = ("numpy", "scipy", "scikit-learn", "torch")


def environment() -> dict[str, Any]:
    """The version of Python and of the packages that compute, the operating system and the kind of processor."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    """The version of an installed package, which is not imported; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def today() -> str:
    """The date in UTC, as in 2026-01-31.

    >>> len(today())
    10
    """
    return datetime.now(UTC).date().isoformat()
