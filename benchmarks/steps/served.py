"""Private steps on a CPU as a process that `benchmarks.before` tells when to take them, with the dpgrad it finds first.

Nothing else of dpgrad may be imported here: it may be of an earlier version.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.steps.workloads import LOTS, WORKLOADS
from dpgrad import Mechanism, PrivateGradient, sampling

_STEPS = 10**5  # more than are ever taken


def main(name: str) -> None:
    """Take steps for as many seconds as each line asks for, with the package that is found first."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name].on("cpu")
    model, data = workload.built("cpu"), workload.data("cpu")
    declared = "batch_size" if "batch_size" in Mechanism.__dataclass_fields__ else "expected_batch_size"  # 0.1.0
    size: dict[str, Any] = {declared: workload.batch_size}
    private = PrivateGradient(model, workload.loss, Mechanism(sampling.Poisson(1 / LOTS), _STEPS, 1.0, **size), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        private.step(data)
        optimizer.step()

    for line in sys.stdin:
        print(_per_step(step, float(line)), flush=True)


def _per_step(step: Callable[[], object], least: float) -> float:
    """Processor time of a step; without a least time, of ten that come first."""
    taken, began = 0, time.process_time()
    while taken < 10 or time.process_time() - began < least:
        step()
        taken += 1
    return (time.process_time() - began) / taken


if __name__ == "__main__":
    main(sys.argv[1])
