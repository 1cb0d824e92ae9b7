"""Jobs of several ranks for tests: one process that loads torch once and forks the ranks of each job.

A job is a function of (rank, ranks, folder) in tests/ranked_jobs.py whose result every rank writes to the folder.
Ranks find each other through a file, not a port. The whole process group ends with the process that started it.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

LIMIT = 1800.0  # seconds for all jobs of a module on a busy machine
AFTER_A_DEATH = 300.0  # seconds that ranks may go on after one was killed: far below gloo's 30 minutes, on any machine
TESTS = Path(__file__).resolve().parent


def run_all(folder: Path, jobs: list[tuple[str, int]]) -> None:
    """Run jobs by name, each on so many ranks; see `results`."""
    named = [f"{name}:{ranks}" for name, ranks in jobs]
    script = TESTS / "ranked_jobs.py"
    paths = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    measured = ["-m", "measuring"] if "DPGRAD_MEASURED" in environment else []
    command = [sys.executable, *measured, str(script), str(folder), *named]
    with _ended(subprocess.Popen(command, env=environment, start_new_session=True)) as server:
        assert server.wait(LIMIT) == 0


@contextmanager
def _ended(server: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """Whatever happens, neither the process nor a rank of it is left behind."""
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def results(folder: Path, name: str, ranks: int) -> list[Any]:
    """What each rank returned, or its error as "Kind: words"; None of a rank that was killed."""
    paths = [folder / f"{name}-{ranks}-{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def serve(jobs: dict[str, Callable[[int, int, Path], Any]]) -> None:
    """Run the jobs that the command line names, one after another."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in ("torch.distributed.fsdp", "torch._dynamo"):  # once, and not in every rank
        importlib.import_module(name)
    for named in sys.argv[2:]:
        name, count = named.split(":")
        ranks = int(count)
        forked = [_forked(jobs[name], rank, ranks, folder / f"{name}-{ranks}") for rank in range(ranks)]
        _await(forked)


def _forked(job: Callable[[int, int, Path], Any], rank: int, ranks: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        folder.mkdir(exist_ok=True)
        import torch.distributed as dist

        store = f"file://{folder.parent}/{folder.name}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        try:
            found = job(rank, ranks, folder)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        torch.save(found, folder.parent / f"{folder.name}-{rank}.pt")
        status = 0
    finally:
        os._exit(status)


def _await(forked: list[int]) -> None:
    """Wait for all ranks; those that outlive a killed one for too long are killed, and have no result."""
    left, died = set(forked), 0.0
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                died = died or (time.monotonic() if os.WIFSIGNALED(status) else 0.0)
        if died and time.monotonic() - died > AFTER_A_DEATH:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
