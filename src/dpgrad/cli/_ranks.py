"""The processes that torchrun started for one command: connected here, and only rank 0 answers."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpgrad._processes import RANK_TIMEOUT
from dpgrad.errors import OptionError

if TYPE_CHECKING:
    from dpgrad.distributed.ranks import Ranks

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def connected(device: str | None, timeout: float | None = None) -> "Iterator[Ranks]":
    """Within the block the processes of torchrun, if there are several, are the ranks of one run.

    They exchange sums by NCCL on CUDA devices, one for each process of a machine, and otherwise by gloo. What fails on
    one of them in the block is reported to the others; one that is silent for ``timeout`` seconds ends them.
    """
    import torch
    import torch.distributed as dist

    from dpgrad.distributed.ranks import Ranks

    size = os.environ.get("WORLD_SIZE", "")
    launched = all(name in os.environ for name in _OF_TORCHRUN) and size.isdecimal() and int(size) > 1
    connect = launched and dist.is_available() and not dist.is_initialized()
    if connect:
        cuda = torch.cuda.is_available() if device is None else device.partition(":")[0] == "cuda"
        if cuda:
            local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= there:
                raise OptionError(
                    f"this machine has {there} CUDA devices, and process {local} of it has none: start as many with "
                    "--nproc-per-node, or give --device cpu"
                )
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        ranks = Ranks.of(timeout=RANK_TIMEOUT if timeout is None else float(timeout))
        with ranks.together():
            yield ranks
    finally:
        if connect:
            with contextlib.suppress(Exception):  # it ends with the process
                dist.destroy_process_group()
