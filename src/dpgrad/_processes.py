"""Refuse to run as one of several processes where each would release a result of its own, which no budget covers.

The processes may be ranks of a distributed job, or copies that a fork made of this one.

>>> refuse_several()
"""

import os
import sys
from threading import RLock

from dpgrad.errors import RunError, UnsupportedSystemError

RANK_TIMEOUT = 45.0  # seconds without a sign of life of a rank: with the rest of a step, all end within a minute
# What the launchers of distributed jobs tell each process: torchrun, Open MPI, MPICH and its kin, MVAPICH, srun,
# horovodrun, jsrun, flux.
_LAUNCHERS = (
    "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "HOROVOD_SIZE",
    "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE",
)  # fmt: skip


def refuse_several() -> None:
    """Refuse where this process is one of several of a distributed job, whether or not they are connected yet.

    Guarantee: none of what dpgrad accounts for one process is released by several of them at once.
    """
    ranks = _connected()
    found = f"torch.distributed has {ranks} ranks here" if ranks > 1 else _launched()
    if found:
        raise UnsupportedSystemError(
            f"this runs in one process, and {found}: each process would release a result of its own, with noise of "
            "its own, and the budget covers one. Run it in one process, without torchrun or srun; on several train "
            "with dpgrad.fit or PrivateGradient (docs/several_processes.md)"
        )


def refuse_unconnected() -> None:
    """Refuse where a launcher started several processes and torch.distributed does not connect them.

    >>> refuse_unconnected()
    """
    found = _launched()
    if found and _connected() < 2:
        raise UnsupportedSystemError(
            f"{found} and they are not connected: each would release a model of its own, and the budget covers one. "
            "Call torch.distributed.init_process_group() first, and they train one model together; or run in one "
            "process, without torchrun or srun"
        )


class Turns:
    """Lets one thread at a time into a block, and none of a process that was forked since: a context manager.

    Guarantee: what is taken in the block, such as the noise of a step or a place in a ledger, is taken once.

    >>> with Turns("make another in each process"):
    ...     pass
    """

    def __init__(self, remedy: str) -> None:
        self._process, self._thread, self._remedy = os.getpid(), RLock(), remedy

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made this."""
        return os.getpid() != self._process

    def __enter__(self) -> None:
        if self.forked:
            raise RunError(f"this was made in process {self._process}, of which this one is a fork: {self._remedy}")
        self._thread.acquire()

    def __exit__(self, *error: object) -> None:
        self._thread.release()


def _connected() -> int:
    """How many ranks torch knows of; torch is not imported for it. 0 where it knows of none."""
    known = sys.modules.get("torch.distributed")
    if known is None or not known.is_available() or not known.is_initialized():
        return 0
    return int(known.get_world_size())


def _launched() -> str:
    """What the launcher says."""
    for name in _LAUNCHERS:
        value = os.environ.get(name, "").strip()
        if value.isdecimal() and int(value) > 1:
            return f"a launcher started {value} processes ({name} in the environment)"
    return ""
