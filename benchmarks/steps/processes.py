"""Work in a process of its own, which is cut where it takes too long, and the memory of a step on a CPU."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STARTING = 120.0  # seconds that a process may take to load what it needs
RESTART_PEAK = Path("/proc/self/clear_refs")  # Linux: writing 5 sets the peak of resident memory to what it is now


@dataclass(frozen=True)
class Failed:
    """Why a process has no result."""

    reason: str


def said(error: Exception) -> str:
    """The first line of what an exception says, and its kind."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Worker:
    """A process that calls ``work`` once; it loads what it needs before it is asked, beside others."""

    def __init__(self, work: Callable[[], object]) -> None:
        # What is freed goes back to the system at once: the peak is then that of tensors, not of malloc's leftovers.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 16))
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work))  # no daemon: a Dataset has workers
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has loaded what it needs."""
        self._pipe.poll(STARTING)

    def result(self, seconds: float) -> Any:
        """What the work returns, or `Failed` where it raises, takes longer than ``seconds`` or ends the process."""
        try:
            self.ready()
            self._pipe.recv()
            self._pipe.send("begin")
            return self._pipe.recv() if self._pipe.poll(seconds) else Failed(f"cut: no result within {seconds:g} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            return Failed(f"the process ended with status {self._process.exitcode}")
        finally:
            self.end()

    def end(self) -> None:
        """Stop the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, work: Callable[[], object]) -> None:
    try:
        pipe.send("ready")
        pipe.recv()
        try:
            result = work()
        except Exception as error:
            result = Failed(said(error))
        pipe.send(result)
    except (EOFError, BrokenPipeError):
        pass  # nobody asks any more


def most_resident(prepare: Callable[[], Callable[[], object]]) -> float | None:
    """MiB of the CPU's memory that preparing a step, and taking it twice, need beyond what the process holds anyhow."""
    gc.collect()
    if not RESTART_PEAK.exists():
        return None
    before = _resident("VmRSS")
    step = prepare()
    step()
    RESTART_PEAK.write_text("5", encoding="utf-8")
    step()
    return _resident("VmHWM") - before


def _resident(entry: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(entry))
