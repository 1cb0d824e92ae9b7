"""The plainest engine: ordinary automatic differentiation of one example after another.

It takes any model that can be called on one example, and it is as slow as that. Nothing has to be attributed: a pass
sees one example alone. Give ``microbatch`` where the gradients of a whole batch do not fit in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpgrad.grads.batch import part, row_losses
from dpgrad.grads.clip import PerExample
from dpgrad.grads.kept import guarded
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.uses import Dense

__all__ = ["gradients"]


def gradients(model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1) -> PerExample:
    """The gradient of every example, as `dpgrad.grads.vmap.gradients` defines it.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = gradients(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten()
    tensor([2., 3.])
    """
    parameters = trainable(model)
    found: list[list[Tensor]] = []
    for start in range(0, len(weights), rows):
        with torch.enable_grad(), swapped(model, {}):
            losses = row_losses(guarded(loss), model, part(batch, start, start + rows), rows)
            total = (losses * weights[start : start + rows]).sum()
            own: Sequence[Tensor | None] = [None] * len(parameters)
            if total.requires_grad:
                own = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        found.append(
            [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters.values(), own, strict=True)]
        )
    return PerExample(
        {name: Dense(torch.stack(of)) for name, of in zip(parameters, zip(*found, strict=True), strict=True)}
    )
