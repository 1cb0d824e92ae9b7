"""The tests of the engines and of everything else that has a CUDA path, run on a CUDA device.

    python -m benchmarks.gpu_tests [--workers 8] [--only tests/grads ...] [--write]

It runs the tests of the gradient engines and of the private step, and every test file that asks for a CUDA device.
Whether a test really ran on the device is seen from the memory that it allocated there. ``--write`` writes
benchmarks/results/gpu_tests.{json,md}; with ``--only`` it puts the files that were run in the place of what is there of
them, and each file's line says when. The exit status is 1 where a test failed, 2 where nothing can be run.
"""

import argparse
import importlib.util
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import environment

TESTS = environment.ROOT / "tests"
ALWAYS = ("grads/test_*.py", "training/test_private*.py", "randomness/test_*.py", "training/step/test_*.py")
NEEDED = ("pytest", "hypothesis", "cryptography")
RESULT = environment.RESULTS / "gpu_tests.json"
ALLOCATED = "CUDA allocations"  # what a worker tells of each test


def files() -> list[str]:
    """Test files of the engines and of the private step, and those that ask whether there is a CUDA device."""
    always = {path for pattern in ALWAYS for path in TESTS.glob(pattern)}
    asking = re.compile(r"(not|if) torch\.cuda\.is_available\(\)")
    naming = {path for path in TESTS.rglob("test_*.py") if asking.search(path.read_text("utf-8"))}
    return sorted(str(path.relative_to(environment.ROOT)) for path in always | naming)


def allocations() -> int:
    """How many pieces of memory this process has taken on the device so far."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0)) if torch.cuda.is_initialized() else 0


def pytest_runtest_setup(item: Any) -> None:
    """In each worker, of which this module is a plugin."""
    item.user_properties.append((ALLOCATED, -allocations()))


def pytest_runtest_teardown(item: Any) -> None:
    item.user_properties.append((ALLOCATED, allocations()))


@dataclass
class File:
    """What became of the tests of one file."""

    passed: int = 0
    failed: int = 0
    on_device: int = 0
    seconds: float = 0.0  # of all workers together
    when: str = ""  # it was run
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    functions: dict[str, Counter[str]] = field(default_factory=dict)  # passed, failed, skipped, on the device

    def fields(self, name: str) -> dict[str, Any]:
        return {"file": name, **vars(self), "seconds": round(self.seconds, 2)}

    @classmethod
    def read(cls, fields: Mapping[str, Any], when: str) -> "File":
        """What `fields` wrote, at a time that it may not say."""
        found = {name: value for name, value in fields.items() if name != "file"}
        found["skipped"] = Counter(fields["skipped"])
        found["functions"] = {name: Counter(counts) for name, counts in fields["functions"].items()}
        found["when"] = fields.get("when") or when
        return cls(**found)


class Recorder:
    """Notes the reports of all workers."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.failures: list[dict[str, str]] = []

    def dated(self, when: str) -> None:
        """Say of every file when it was run."""
        for here in self.files.values():
            here.when = when

    def join(self, before: Mapping[str, Any]) -> None:
        """Take over the files of an earlier run that were not run again."""
        names = set(self.files)
        when = before["environment"]["date"]
        self.files |= {each["file"]: File.read(each, when) for each in before["files"] if each["file"] not in names}
        self.failures += [each for each in before["failures"] if each["test"].partition("::")[0] not in names]

    def pytest_runtest_logreport(self, report: Any) -> None:
        path, _, test = report.nodeid.partition("::")
        here = self.files.setdefault(path, File())
        here.seconds += report.duration
        function = here.functions.setdefault(test.partition("[")[0], Counter())
        if report.failed:
            self._failed(here, function, report.nodeid, _last_line(report))
        elif report.skipped:
            here.skipped[_reason(report)] += 1
            function["skipped"] += 1
        elif report.when == "call":
            here.passed += 1
            function["passed"] += 1
        if report.when == "teardown" and sum(count for name, count in report.user_properties if name == ALLOCATED) > 0:
            here.on_device += 1
            function["on the device"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failed(self.files.setdefault(report.nodeid, File()), Counter(), report.nodeid, _last_line(report))

    def _failed(self, here: File, function: Counter[str], test: str, words: str) -> None:
        here.failed += 1
        function["failed"] += 1
        self.failures.append({"test": test, "error": words})


def _last_line(report: Any) -> str:
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")] or [str(report.longrepr)]
    said = lines[0].removeprefix("E").strip().replace(f"{environment.ROOT}/", "").replace(sys.executable, "python")
    return said[:300]


def _reason(report: Any) -> str:
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "skipped")
    return str(words).removeprefix("Skipped: ")


def refusal() -> str:
    """Why the tests cannot run here; nothing where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device is seen by torch: run this on a machine that has one"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"these packages cannot be imported: {', '.join(missing)}: pip install pytest pytest-xdist hypothesis "
            "cryptography, or the same with --target FOLDER and FOLDER on PYTHONPATH"
        )
    return ""


def run(paths: list[str], workers: int) -> tuple[Recorder, float]:
    """Run the tests in several processes, which share the device well, and note what became of them."""
    import pytest

    recorder = Recorder()
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_tests", "--no-header", "--tb=short"]
    if importlib.util.find_spec("xdist") is not None and workers > 1:
        arguments += ["-p", "xdist", "-n", str(workers)]
    begun = time.perf_counter()
    pytest.main([*arguments, *paths], plugins=[recorder])
    return recorder, time.perf_counter() - begun


def summary(recorder: Recorder) -> environment.where.Table:
    table = [["file", "passed", "failed", "skipped", "ran on the device", "seconds", "when"]]
    every = File()
    for name, here in sorted(recorder.files.items()):
        table.append(_row(name, here))
        every.passed, every.failed = every.passed + here.passed, every.failed + here.failed
        every.on_device, every.seconds = every.on_device + here.on_device, every.seconds + here.seconds
        every.skipped += here.skipped
    return [*table, _row("**all**", every)]


def _row(name: str, here: File) -> list[str]:
    counts = here.passed, here.failed, here.skipped.total(), here.on_device
    return [name, *map(str, counts), f"{here.seconds:.1f}", here.when]


def sections(recorder: Recorder, wall: float, workers: int) -> list[str]:
    """What a reader wants to see: counts, failures, why tests were skipped, and which ran on the device."""
    skipped = [["file", "skipped", "because"]]
    ran = [["file", "test", "cases", "on the device"]]
    for name, here in sorted(recorder.files.items()):
        skipped += [[name, str(count), reason] for reason, count in sorted(here.skipped.items())]
        for function, counts in here.functions.items():
            cases = counts["passed"] + counts["failed"] + counts["skipped"]
            if counts["on the device"]:
                ran.append([name, function, str(cases), str(counts["on the device"])])
    failed = [["failed", "error"], *([failure["test"], failure["error"]] for failure in recorder.failures)]
    text = [
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {workers} processes, {wall:.0f} s. A test ran on "
        "the device if it allocated memory there; the equality suite of the engines (tests/grads) compares every layer "
        "and network with plain autograd on one example at a time, in float64, and whole networks in float32, with "
        "TF32 and in bfloat16 autocast too.",
        environment.table(summary(recorder)),
    ]
    if recorder.failures:
        text += ["## Failed", environment.table(failed)]
    if len(skipped) > 1:
        text += ["## Skipped", environment.table(skipped)]
    return [*text, "## Tests that ran on the device", environment.table(ran)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="processes that share the device, where xdist is there")
    parser.add_argument("--only", nargs="+", metavar="PATH", help="test files or folders instead of all that are found")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
    given = parser.parse_args()
    if (reason := refusal()) != "":
        print(f"error: {reason}", file=sys.stderr)
        return 2
    where = environment.describe("benchmarks.gpu_tests")
    recorder, wall = run(given.only or files(), given.workers)
    recorder.dated(where["date"])
    print(environment.table(summary(recorder)))
    for failure in recorder.failures:
        print(f"FAILED {failure['test']}: {failure['error']}")
    ran = any(here.passed or here.failed for here in recorder.files.values())
    failed = bool(recorder.failures)
    if given.write:
        if given.only and RESULT.exists():
            recorder.join(json.loads(RESULT.read_text("utf-8")))
        data = {
            "environment": {**where, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda},
            "seconds": round(wall, 1),
            "failures": recorder.failures,
            "files": [here.fields(name) for name, here in sorted(recorder.files.items())],
        }
        text = sections(recorder, wall, given.workers)
        environment.write("gpu_tests", data, f"Tests on {torch.cuda.get_device_name()}", text)
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
