"""Which committed results were made with other code than there is now: `python -m benchmarks.stale`.

Every results file names its command, date, hardware and a digest of the code it depends on
(`dpgrad.papers.sources`); in the files of the convex tables every trial has the digest of its solver. A result is
*stale* where that code has changed since, which may or may not have changed its figures, and *unknown* where it was
made before digests were kept. Exit status 1 where there are such results.

`--forget` SOLVER ... takes the trials of solvers that are not current out of the files of the convex tables, so that
`python -m benchmarks.convex run` makes them again.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import environment
from dpgrad.papers import convex

Status = tuple[str, str, int]  # file, "current", "stale" or "unknown", how many results
_ELSEWHERE = environment.ROOT / "results"  # that of `benchmarks.audit` and `benchmarks.tuning`, among those of the lab


def statuses(folder: Path = environment.RESULTS, other: Path | None = None) -> Iterator[Status]:
    """What is known of each results file, and of those in JSON of another folder."""
    for file in sorted([*folder.glob("*.json"), *(other.glob("*.json") if other else ())]):
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, list):
            for status, count in sorted(Counter(map(of_trial, content)).items()):
                yield file.name, status, count
        else:
            yield file.name, of_file(content), 1
    for file in sorted(folder.glob("*.md")):
        if not file.with_suffix(".json").exists():
            yield file.name, "unknown", 1


def of_trial(trial: dict[str, Any]) -> str:
    """The status of one trial of a convex table."""
    if trial["solver"] not in convex.SOLVERS:
        return "peer"  # the code of another library
    return _status(trial.get("source"), convex.source_of(trial["solver"]))


def of_file(content: dict[str, Any]) -> str:
    """The status of a file with an environment; where each part has one, that of the first that is not current."""
    if content and all(isinstance(part, dict) and "environment" in part for part in content.values()):
        return next((status for status in map(of_file, content.values()) if status != "current"), "current")
    ran = content.get("environment", {})
    named = re.match(r"python -m ([\w.]+)", ran.get("command", ""))
    return _status(ran.get("source"), environment.digest(named.group(1)) if named else None)


def _status(then: str | None, now: str | None) -> str:
    return "unknown" if then is None or now is None else "current" if then == now else "stale"


def forget(solvers: set[str], folder: Path = environment.RESULTS, dataset: str = "*") -> int:
    """Take the trials of those solvers that are not current out of their files; how many there were."""
    dropped = 0
    for file in sorted(folder.glob(f"convex_{dataset}.json")):
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, list):
            kept = [one for one in content if one["solver"] not in solvers or of_trial(one) == "current"]
            dropped += len(content) - len(kept)
            file.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n", "utf-8")
    return dropped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forget", nargs="+", choices=convex.SOLVERS, metavar="SOLVER", help="solvers to run again")
    parser.add_argument("--dataset", default="*", help="of which to forget trials; default: all")
    given = parser.parse_args()
    if given.forget:
        dropped = forget(set(given.forget), dataset=given.dataset)
        print(f"{dropped:,} trials taken out: run python -m benchmarks.convex run")
        return 0
    found = list(statuses(other=_ELSEWHERE))
    print(
        environment.table([["file", "status", "results"], *([name, what, f"{count:,}"] for name, what, count in found)])
    )
    return int(any(what in ("stale", "unknown") for _, what, _ in found))


if __name__ == "__main__":
    sys.exit(main())
