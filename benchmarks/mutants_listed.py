"""Faults chosen by hand, each of which would break a guarantee: do the tests notice every one?

    python -m benchmarks.mutants_listed [--topic TOPIC] [--only N ...] [--minutes M]

The list is benchmarks/mutants_listed.toml. Each fault is put into a copy of the sources, and the tests named with it
run up to the first failure; before, the same tests must pass without a fault. Results go to
benchmarks/results/mutants_listed.md and .json; with --topic or --only, other outcomes are kept. The exit status is 1
where a fault survived that is not said to be equivalent. benchmarks.mutants makes its faults by rules instead.
"""

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import mutants

LIST = mutants.ROOT / "benchmarks" / "mutants_listed.toml"
TOPICS = (
    "noise size", "clip", "divisor", "event count", "schedule offset", "relation", "mask", "group", "ledger flush",
    "seed reuse", "price",
)  # fmt: skip
_LIMIT = 1800.0  # seconds after which tests have stalled


@dataclass(frozen=True)
class Listed:
    """One fault: in ``file``, ``before`` becomes ``after``."""

    topic: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.before} → {self.after}"

    def source(self, folder: Path = mutants.SOURCES) -> str:
        """The file with the fault, from a folder with the sources."""
        text = (folder / self.file).read_text("utf-8")
        if text.count(self.before) != 1:
            raise LookupError(f"{self.file} holds {text.count(self.before)} times, and must once: {self.before}")
        return text.replace(self.before, self.after)


def read() -> list[Listed]:
    """The list."""
    found = tomllib.loads(LIST.read_text("utf-8"))["mutant"]
    return [Listed(**{**one, "tests": tuple(one["tests"])}) for one in found]


def tried(todo: Sequence[Listed], until: float) -> dict[str, str]:
    """The outcome of each fault by name; *unusable* where its tests fail without a fault, too."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = mutants.Bench(Path(folder))
        sound: dict[str, bool] = {}  # whether tests pass without a fault
        for one in todo:
            if time.monotonic() > until:
                break
            for file in one.tests:
                if file not in sound:
                    sound[file] = bench.outcome(one.file, None, _LIMIT, [file]) == "survived"
            usable = all(sound[file] for file in one.tests)
            source = one.source(bench.folder / "src" / "dpgrad")
            found[one.name] = bench.outcome(one.file, source, _LIMIT, one.tests) if usable else "unusable"
            print(f"{found[one.name]:9} {one.topic:16} {one.name}", flush=True)
    return found


def sections(every: Sequence[Listed], outcomes: dict[str, str]) -> list[str]:
    """The counts by topic, and every fault."""
    from dpgrad.reports import markdown

    kinds = ("killed", "stalled", "survived", "equivalent", "unusable", "not tried")
    told = {one: "equivalent" if one.equivalent else outcomes.get(one.name, "not tried") for one in every}
    counts = [
        [topic, *(str(sum(kind == found for one, found in told.items() if one.topic == topic)) for kind in kinds)]
        for topic in TOPICS
    ]
    rows = [
        [one.topic, one.file, _told(one.before), _told(one.after), one.equivalent or told[one], " ".join(one.tests)]
        for one in every
    ]
    return [
        f"{len(every)} faults chosen by hand (`benchmarks/mutants_listed.toml`). *Killed*: a test failed. *Stalled*: "
        "the tests did not end. *Unusable*: the tests fail without the fault too.",
        markdown.table([["topic", *kinds], *counts]),
        markdown.table([["topic", "file", "before", "after", "outcome", "tests"], *rows]),
    ]


def _told(code: str) -> str:
    """Lines of code in one cell."""
    return f"`{' '.join(code.split())}`" if code else "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topic", choices=TOPICS, help="only the faults of this topic")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these of the list, from 1")
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="begin no fault after so long")
    given = parser.parse_args()
    every = read()
    chosen = [
        one
        for number, one in enumerate(every, 1)
        if (given.topic in (None, one.topic)) and (given.only is None or number in given.only) and not one.equivalent
    ]
    mutants._loaded()
    path = mutants.RESULTS / "mutants_listed.json"
    known = json.loads(path.read_text("utf-8"))["outcomes"] if path.is_file() else {}
    outcomes = {name: outcome for name, outcome in known.items() if name in {one.name for one in every}}
    outcomes |= tried(chosen, time.monotonic() + 60 * given.minutes)
    from benchmarks import environment  # after the forks, which import dpgrad from the copy

    data = {"environment": environment.describe("benchmarks.mutants_listed"), "outcomes": outcomes}
    environment.write("mutants_listed", data, "Faults chosen by hand", sections(every, outcomes))
    left = [one for one in every if not one.equivalent and outcomes.get(one.name) in ("survived", "unusable")]
    print(f"{len(left)} of {len(every)} were not noticed", *(one.name for one in left), sep="\n  ")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
