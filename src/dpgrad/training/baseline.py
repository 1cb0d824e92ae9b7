"""The same model without privacy, to compare with: what the guarantee costs in accuracy."""

from typing import Any

import torch
from torch import nn

from dpgrad import _validate
from dpgrad.training import source
from dpgrad.training.curves import evaluate
from dpgrad.training.losses import PerRow, loss_named, metric_named
from dpgrad.training.prepare import device_of, within_reach

__all__ = ["non_private"]

_LOT, _RATE = 64, 1e-2


def non_private(
    model: nn.Module, data: Any, loss: str, held_out: Any, *, epochs: int, metric: str | PerRow | None = None
) -> float:
    """Train ``model`` in place by Adam on shuffled batches of 64; the metric on held-out rows.

    The learning rate falls from 0.01 to 0 along a half cosine.

    Guarantee: none. The model and the figure are computed from the rows without noise; neither may be released where
    the rows are private.

    >>> rows = torch.eye(2).repeat(32, 1), torch.tensor([0, 1]).repeat(32)
    >>> non_private(nn.Linear(2, 2), rows, "cross-entropy", rows, epochs=200)
    1.0
    """
    _validate.whole(least=1, epochs=epochs)
    goal, device = loss_named(loss), device_of(model)
    rows = source.rows(data)
    near = within_reach(data, device)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-rows // _LOT))
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(rows), _LOT):
            optimizer.zero_grad()
            torch.autograd.backward(goal(model, source.gathered(near, chosen, device)).mean())
            optimizer.step()
            falling.step()
    return evaluate(model, metric_named(metric, goal), held_out)
