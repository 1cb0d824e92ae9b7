"""Which lines and branches of dpgrad run in this process: a plugin of pytest, or ``python -m measuring SCRIPT``.

SlipCover puts probes into the bytecode of dpgrad's modules when they are imported, and no other code is slowed down.
The tracer of coverage.py is called for every function of every library: on Python 3.11 the tests take twice as long.

Nothing is measured unless DPGRAD_MEASURED names a folder. Each process, and each process it forks, writes what ran to
a file there; tests/covered.py adds them up. Other processes that tests start are not measured, apart from the ranks of
tests/ranked.py: a process needs seconds to put in its probes.
"""

import ast
import json
import os
import runpy
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from slipcover import Slipcover
from slipcover.branch import preinstrument

FOLDER = "DPGRAD_MEASURED"
# Triton reads the source of its kernels; like captured steps, they do not run without a CUDA device.
OMITTED = ("*/kernels/*", "*/randomness/*kernels.py", "*/training/step/graphed.py")
# SlipCover would take out probes that were seen this often, by replacing the code of functions while they are in use.
_NEVER = 2**31 - 1


class Measuring:
    """Finds the modules of dpgrad before Python does, and puts probes into them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slipcover = Slipcover(branch=True, d_miss_threshold=_NEVER, exclude_lines=[])

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "dpgrad":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not any(fnmatch(spec.loader.path, pattern) for pattern in OMITTED):
            spec.loader = _Loader(self.slipcover, spec.loader)
        return spec

    def write(self) -> None:
        """Write the lines and branches that ran, by file."""
        files = self.slipcover.get_coverage()["files"].items()
        ran = {name: [file["executed_lines"], file["executed_branches"]] for name, file in files}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(ran), "utf-8")

    def forked(self) -> None:
        """In a forked process: write before it ends, which it does by `os._exit`."""
        end = os._exit

        def written(status: int) -> None:
            self.write()
            end(status)

        os._exit = written


class _Loader(SourceFileLoader):
    """Compiles a module with its probes, and is otherwise the loader of every module."""

    def __init__(self, slipcover: Slipcover, real: SourceFileLoader) -> None:
        super().__init__(real.name, real.path)
        self.slipcover = slipcover

    def get_code(self, fullname: str) -> CodeType:
        tree = preinstrument(ast.parse(self.get_data(self.path), self.path))
        return self.slipcover.instrument(compile(tree, self.path, "exec", dont_inherit=True))


def begin() -> Measuring:
    """Measure what this process imports of dpgrad from now on."""
    assert "dpgrad" not in sys.modules, "dpgrad was imported before it could be measured"
    measuring = Measuring(Path(os.environ[FOLDER]))
    sys.meta_path.insert(0, measuring)
    os.register_at_fork(after_in_child=measuring.forked)
    return measuring


# Not where pytest imports this file under another name, to look for doctests.
_MEASURING = begin() if FOLDER in os.environ and __name__ in ("measuring", "__main__") else None


def pytest_unconfigure() -> None:
    if _MEASURING is not None:
        _MEASURING.write()


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
