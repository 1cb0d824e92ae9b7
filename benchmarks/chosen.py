"""Commit to the settings that the searches of the papers' experiments chose: ``chosen.json`` of `dpgrad.papers`.

    python -m benchmarks.chosen RESULTS

takes over what the searches in the results folder chose that are complete, and keeps what is committed of the others.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dpgrad import _files
from dpgrad.papers import catalogue, searching


def write(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Write the choices of the complete searches in a folder, and return all that are committed."""
    found = dict(searching.committed())
    for search in {name: None for one in catalogue.experiments().values() for name in one.after}:
        earlier = searching.outcomes(search, "full", folder)
        settings = [earlier.of(arm)[0]["setting"] for arm in earlier.arms]
        if len(settings) < len(catalogue.experiments()[search].arms("full")):
            continue
        if methods := dict.fromkeys(setting["method"] for setting in settings if "method" in setting):
            found[search] = {method: searching.chosen(search, earlier, method) for method in methods}
    _files.replace(searching.COMMITTED, (json.dumps(found, indent=1) + "\n").encode())
    return found


if __name__ == "__main__":
    print(json.dumps(write(Path(sys.argv[1])), indent=1))
