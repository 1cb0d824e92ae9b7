"""By how much one row moves the sums that private steps release."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad import Mechanism, PrivateGradient
from dpgrad.mechanism import sampling

__all__ = ["moved_by_one_row"]

NOISE = 1e-6  # the same for both data


def moved_by_one_row(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    data: Any,
    other: Any,
    *,
    steps: int,
    planned: int | None = None,
    between: Callable[[nn.Module, int], object] = lambda model, step: None,
    engine: str = "bookkeeping",
) -> list[float]:
    """How far apart, in clip bounds, the sums of each step are on two data that differ in one row, at fixed weights.

    ``between`` is called before each step. The bound is 2.
    """
    sums: list[list[Tensor]] = []
    for rows in (data, other):
        torch.manual_seed(0)
        model = make()
        plan = Mechanism(sampling.FullBatch(), planned or steps, NOISE, batch_size=1.0)
        private = PrivateGradient(model, loss, plan, engine=engine, seed=1)
        found = []
        for step in range(steps):
            between(model, step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                private.step(rows)
            grads = (each.grad for each in model.parameters() if each.grad is not None)
            found.append(torch.cat([each.double().flatten() for each in grads]))
        sums.append(found)
    return [float((one - two).norm()) for one, two in zip(*sums, strict=True)]
