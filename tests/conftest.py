"""Shared by all tests: how hypothesis runs, where the data folder is."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# No deadline: shared machines stall. The examples are the same in every run and on every machine; to look for others,
# HYPOTHESIS_PROFILE=explore.
settings.register_profile("dpgrad", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dpgrad"))

# What a shell or a CI says about its terminal, which rich, argparse and matplotlib read. Tests that are about a
# terminal set what they need.
for _name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PYTHON_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# Some virtual machines name AMX among their processor's instructions and then do not run it: bfloat16 products would
# end the process. Read when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A shell without job control starts what it sends to the background with Ctrl-C ignored, and so would be the processes
# that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Numbers drawn from torch's own generator do not depend on which tests ran before in the same process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked exhaustive, and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked exhaustive, or all others; while coverage is measured, those marked unmeasured too."""
    wanted, measured = config.getoption("--exhaustive"), "DPGRAD_MEASURED" in os.environ
    left_out = {item for item in items if (item.get_closest_marker("exhaustive") is not None) != wanted}
    if measured:
        left_out |= {item for item in items if item.get_closest_marker("unmeasured") is not None}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is there by now stays: the garbage collector need not look at thousands of tests again and again."""
    gc.collect()
    gc.freeze()


ROOT = Path(__file__).resolve().parent.parent
_COMPUTED: dict[tuple[Any, ...], Any] = {}
_PRECISION = 1e-4  # of prices in tests of runs: a quarter of the time that the six digits of users take


def _remembering(kind: type, method: str, coarse: bool) -> Callable[..., Any]:
    """The method of a frozen dataclass, computed once in this process for the same fields and arguments."""
    real = getattr(kind, method)

    def given(self: Any, *args: float) -> Any:
        called = (kind, method, repr(self), args, coarse)
        if called not in _COMPUTED:
            own = replace(self, precision=max(self.precision, _PRECISION)) if coarse else self
            _COMPUTED[called] = real(own, *args)
        return _COMPUTED[called]

    return given


@pytest.fixture(autouse=True, scope="module")
def _computed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute each price and draw each chart once per process, except in the tests of prices and charts.

    Both are pure functions of what they are given, and most runs in the other tests have one of a few plans. Tests of
    runs compare prices with each other, so that fewer digits of them do.
    """
    if {"accounting", "reports"} & set(request.path.parts):
        yield
        return
    from dpgrad.accounting.pld import PldProfile
    from dpgrad.reports.chart import Chart

    with pytest.MonkeyPatch.context() as patch:
        coarse = bool({"grads", "training", "runs", "integrations"} & set(request.path.parts))
        for method in ("epsilon", "interval", "estimate"):
            patch.setattr(PldProfile, method, _remembering(PldProfile, method, coarse))
        patch.setattr(Chart, "html", _remembering(Chart, "html", coarse=False))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real datasets: ``DPGRAD_DATA``, else the sibling folder shared/data; skips where neither is."""
    named = os.environ.get("DPGRAD_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}: set DPGRAD_DATA to the folder that holds the datasets")
    return folder


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """Chromium, one for all pages."""
    from browsing import launched

    yield from launched()
