"""Runs the tests as other machines would: `python tests/portable.py [--only NAME] [-- pytest arguments]`.

Three variations. ``old``: every numerical library on the code path of an old processor, one thread, an ASCII locale,
a narrow terminal. ``threads``: four threads, other kernels, another locale and time zone, new examples of hypothesis.
``load``: this machine as it is, with fifteen processes that compute beside the tests. Options that a processor or a
build does not know are ignored by the libraries they are for.
"""

import argparse
import locale
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOAD = 15


def threads(count: int) -> dict[str, str]:
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def numpy_features() -> str:
    """The instructions that NumPy found beyond those it was built for, which are the ones it can do without."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])


def installed(*names: str) -> str:
    """The first locale of these that the machine has."""
    for name in names:
        try:
            locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
        finally:
            locale.setlocale(locale.LC_ALL, "C")
        return name
    return "C"


def variations() -> dict[str, dict[str, str]]:
    """What each variation sets in the environment."""
    old = {
        "ATEN_CPU_CAPABILITY": "default",
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": numpy_features(),
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TZ": "Asia/Kolkata",
        "COLUMNS": "40",
        "PYTHONHASHSEED": "1",
    }
    other = {
        "ATEN_CPU_CAPABILITY": "avx2",
        "OPENBLAS_CORETYPE": "Haswell",
        "MKL_CBWR": "AVX2",
        "LC_ALL": installed("tr_TR.UTF-8", "de_DE.UTF-8", "C.UTF-8"),
        "TZ": "America/St_Johns",
        "COLUMNS": "200",
        "PYTHONHASHSEED": "2",
        "HYPOTHESIS_PROFILE": "explore",
        "OMP_WAIT_POLICY": "passive",  # there may be fewer cores than threads
    }
    return {"old": old | threads(1), "threads": other | threads(4), "load": threads(2)}


def compute() -> None:
    while True:
        sum(range(10**6))


@contextmanager
def loaded(count: int) -> Iterator[None]:
    """Within the block that many processes compute."""
    busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def main() -> int:
    made = variations()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=made, help="one variation")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    args = parser.parse_args()
    ended = {}
    for name in [args.only] if args.only else made:
        print(f"== {name}: " + " ".join(f"{key}={value!r}" for key, value in made[name].items()), flush=True)
        with loaded(LOAD if name == "load" else 0):
            command = [sys.executable, "-m", "pytest", "-q", *args.pytest]
            ended[name] = subprocess.run(command, cwd=ROOT, env=os.environ | made[name]).returncode
    for name, code in ended.items():
        print(f"{name}: {'passed' if code == 0 else f'failed (pytest ended with {code})'}")
    return max(ended.values())


if __name__ == "__main__":
    sys.exit(main())
