"""Branch coverage of src, and whether it fell: ``python tests/covered.py critical|whole|ignored [pytest arguments]``.

*critical* runs the tests of the files that carry the guarantee and measures those files. ``make test`` does that, and
then runs all other tests: *ignored* prints the arguments of pytest that leave out what *critical* runs.
*whole* runs every test and measures everything, in about twice the time of the tests alone: the tracer of Python 3.11
is slow. The exit status is 1 below the figure of ``[tool.covered]`` in pyproject.toml: what was measured, rounded down.
Kernels of a CUDA device are left out: they do not run without one.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parent.parent
OMITTED = ["*/kernels/*", "*/randomness/kernels.py", "*/training/step/graphed.py"]
# Each file with the tests that are about it.
CRITICAL = {
    "mechanism/*": ("mechanism",),
    "randomness/noise.py": ("randomness/test_noise.py",),
    "randomness/draw.py": ("randomness/test_draw.py",),
    "accounting/events.py": ("accounting/test_events.py",),
    "accounting/exact.py": ("accounting/test_exact.py",),
    "accounting/ledger.py": ("accounting/test_ledger.py",),
    "accounting/pairs.py": ("accounting/test_pairs.py",),
    "grads/scaling.py": ("grads/test_scaling.py", "grads/test_own_rules.py"),
    "runs/writeahead.py": ("runs/test_writeahead.py",),
}


def settings(files: list[str]) -> str:
    """The settings of coverage, as a file of its own: processes that tests start are measured too."""
    lists = {"source": ["src/dpgrad"], "include": [f"src/dpgrad/{file}" for file in files], "omit": OMITTED}
    if files:
        lists.pop("source")
    rows = [f"{name} =\n    " + "\n    ".join(values) for name, values in lists.items() if values]
    return "\n".join(["[run]", "branch = true", "parallel = true", "patch = subprocess", *rows, ""])


def measured(files: list[str], tests: list[str], arguments: list[str]) -> float:
    """Per cent of lines and branches that ran; ends the process if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        rc, data = Path(folder) / "coveragerc", Path(folder) / "data"
        rc.write_text(settings(files), "utf-8")
        run = [sys.executable, "-m", "coverage", "run", f"--rcfile={rc}", f"--data-file={data}", "-m", "pytest", "-q"]
        done = subprocess.run([*run, *tests, *arguments], cwd=ROOT)
        if done.returncode:
            sys.exit(done.returncode)
        found = coverage.Coverage(data_file=str(data), config_file=str(rc))
        found.combine([folder])
        return found.report(skip_covered=bool(not files), show_missing=bool(files))


def main() -> int:
    kind, *arguments = sys.argv[1:] or ["critical"]
    figures = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["covered"]
    tests = sorted({f"tests/{test}" for of_file in CRITICAL.values() for test in of_file})
    if kind not in ("critical", "whole", "ignored"):
        print(f"error: the measure must be critical, whole or ignored, got {kind!r}", file=sys.stderr)
        return 2
    if kind == "ignored":
        print(*(f"--ignore={test}" for test in tests))
        return 0
    if kind == "critical":
        found = measured([*CRITICAL], tests, ["-p", "no:cacheprovider", *arguments])
    else:
        found = measured([], ["tests"], arguments)
    if (least := figures.get(kind)) is None:
        print(f"{kind}: {found:.2f} % of lines and branches; no figure is committed: add {kind} to [tool.covered]")
        return 0
    print(f"{kind}: {found:.2f} % of lines and branches, at least {least} % is asked for")
    return 0 if found >= least else 1


if __name__ == "__main__":
    sys.exit(main())
