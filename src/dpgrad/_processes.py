"""Refuse to run as one of several processes: each would release a result of its own, for which no budget accounts.

>>> refuse_several()
"""

import os
import sys

from dpgrad.errors import UnsupportedSystemError

# What the launchers of distributed jobs tell each process: torchrun, Open MPI, MPICH and its kin.
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def refuse_several() -> None:
    """Refuse where this process is one of several of a distributed job, whether or not they are connected yet.

    Guarantee: none of what dpgrad accounts for one process is released by several of them at once.
    """
    found = _connected() or _launched()
    if found:
        raise UnsupportedSystemError(
            f"dpgrad runs in one process, and {found}: each process would release a model of its own, with noise of "
            "its own, and the budget covers one. Training over several processes (dpgrad.distributed) is not supported "
            "yet: run this in one process, without torchrun"
        )


def _connected() -> str:
    """What torch knows of other processes; torch is not imported for it."""
    known = sys.modules.get("torch.distributed")
    if known is None or not known.is_available() or not known.is_initialized():
        return ""
    ranks = known.get_world_size()
    return f"torch.distributed has {ranks} ranks here" if ranks > 1 else ""


def _launched() -> str:
    """What the launcher says."""
    for name in _LAUNCHERS:
        value = os.environ.get(name, "").strip()
        if value.isdecimal() and int(value) > 1:
            return f"a launcher started {value} of them ({name} in the environment)"
    return ""
