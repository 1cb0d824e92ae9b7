"""Branch coverage of src by the tests: ``python tests/covered.py [--files] [--last] [--write] [pytest arguments]``.

Runs pytest with tests/measuring.py, then the tests marked unmeasured without it, and prints per cent of lines and
branches that ran, by room; --files prints them by file as well, with the lines that did not run. --last runs nothing
and reads what the last run left in build/measured.
The exit status is 1 if a test fails, or if src or a room is below its figure in tests/covered.toml.

--write writes those figures: what was measured, less a quarter of a per cent for lines that depend on the order of
threads, rounded down. The tests then run without the real datasets, so that the figures hold where there are none.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import floor
from pathlib import Path

import pytest
from slipcover import Slipcover
from slipcover.slipcover import format_missing

import measuring

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "dpgrad"
LEAST = ROOT / "tests" / "covered.toml"
HEAD = "# Least per cent of lines and branches that run in the tests, by room. `make coverage` writes this file.\n"
MEASURED = ROOT / "build" / "measured"
MARGIN = 0.25  # per cent


@dataclass(frozen=True)
class Covered:
    """How many of the lines and branches of a file, or of several, ran."""

    ran: int
    all: int
    missing: str = ""

    @property
    def percent(self) -> float:
        return 100.0 * self.ran / self.all if self.all else 100.0


def joined(files: Iterable[Covered]) -> Covered:
    each = [*files]
    return Covered(sum(file.ran for file in each), sum(file.all for file in each))


def read(folder: Path) -> dict[str, Covered]:
    """What ran in any process, by file of src."""
    ran: dict[Path, tuple[set[int], set[tuple[int, ...]]]] = defaultdict(lambda: (set(), set()))
    for process in folder.glob("*.json"):
        for name, (lines, branches) in json.loads(process.read_text("utf-8")).items():
            ran[ROOT / name][0].update(lines)
            ran[ROOT / name][1].update(map(tuple, branches))
    there = Slipcover(branch=True, source=[str(SOURCE)], omit=[*measuring.OMITTED]).get_coverage()["files"]
    covered = {}
    for name, file in sorted(there.items()):
        lines, branches = {*file["missing_lines"]}, {*file["missing_branches"]}
        seen, taken = lines & ran[ROOT / name][0], branches & ran[ROOT / name][1]
        missing = format_missing(sorted(lines - seen), sorted(seen), sorted(branches - taken))
        found = Covered(len(seen) + len(taken), len(lines) + len(branches), missing)
        covered[(ROOT / name).relative_to(SOURCE).as_posix()] = found
    return covered


def room(file: str) -> str:
    return file.partition("/")[0] if "/" in file else "modules"


def run(arguments: list[str], **environment: str) -> int:
    """Run pytest, which leaves what ran in the folder of measurements; the exit status of what fails first."""
    shutil.rmtree(MEASURED, ignore_errors=True)
    MEASURED.mkdir(parents=True)
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    measured = {measuring.FOLDER: str(MEASURED), "PYTHONPATH": paths}
    for chosen, own in ((["-p", "measuring"], measured), (["-m", "unmeasured"], {})):
        command = [sys.executable, "-m", "pytest", *chosen, *arguments]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, **own, **environment}).returncode
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return status
    return 0


def main() -> int:
    options = {"--files", "--write", "--last"} & {*sys.argv}
    arguments = [given for given in sys.argv[1:] if given not in options]
    without = {"DPGRAD_DATA": str(MEASURED / "no-data")} if "--write" in options else {}
    if "--last" not in options and (status := run(arguments, **without)):
        return status
    files = read(MEASURED)
    if "--files" in options:
        for name, file in files.items():
            print(f"{file.percent:7.2f}  {name}  {file.missing}")
    rooms = {name: joined(files[file] for file in group) for name, group in groupby(sorted(files, key=room), key=room)}
    found = {"src": joined(files.values()), **rooms}
    if "--write" in options:
        rows = (f"{name} = {max(0, floor(one.percent - MARGIN))}\n" for name, one in found.items())
        LEAST.write_text(HEAD + "".join(rows), "utf-8")
    least = tomllib.loads(LEAST.read_text("utf-8"))
    print("per cent of lines and branches that ran, and the least that is asked for:")
    for name, one in found.items():
        low = one.percent < least.get(name, 0)
        print(f"{one.percent:7.2f}  {least.get(name, '-'):>3}  {name}{'  TOO LOW' if low else ''}")
    return int(any(one.percent < least.get(name, 0) for name, one in found.items()))


if __name__ == "__main__":
    sys.exit(main())
