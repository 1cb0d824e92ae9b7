"""The definition: one example's gradient is the gradient of its own loss, computed by `torch.func`.

It takes any module that `torch.func.vmap` can take, and holds one gradient of the whole model per example.
"""

import warnings
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.batch import row_losses
from dpgrad.grads.clip import PerExample
from dpgrad.grads.failures import CAUGHT, Failures
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.uses import Dense

__all__ = ["gradients"]


def gradients(model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1) -> PerExample:
    """gᵢ = ∇ Σ_k w_ik ℓ(row k of example i), where an example owns ``rows`` consecutive rows with ``weights``.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> found = gradients(model, lambda model, x: model(x)[:, 0], torch.tensor([[2.0], [3.0]]), torch.ones(2))
    >>> found.uses["weight"].per_example().flatten()
    tensor([2., 3.])
    """
    examples = len(weights) // rows
    grouped = pytree.tree_map(lambda leaf: leaf.unflatten(0, (examples, rows)), batch)

    def weighted(parameters: dict[str, Tensor], example: Batch, weight: Tensor) -> Tensor:
        with swapped(model, parameters):
            return (row_losses(loss, model, example, rows) * weight).sum()

    # The fused kernels of attention have no rule for vmap: some are run one by one, some refuse a mask. Under autocast
    # the plain form fails instead: it mixes types.
    mixed = torch.is_autocast_enabled(weights.device.type)
    attention = nullcontext() if mixed else sdpa_kernel(SDPBackend.MATH)
    live = {name: parameter.detach() for name, parameter in trainable(model).items()}
    each = torch.func.vmap(torch.func.grad(weighted), in_dims=(None, 0, 0), randomness="different")
    try:
        with attention, warnings.catch_warnings(), Failures() as failures:
            # A function without a batching rule of its own runs row by row, which is slow and right.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found = each(live, grouped, weights.view(examples, rows))
        if failures.first:
            raise UnsupportedModelError(f"{CAUGHT.format(failures.first)}: use engine='single'")
    finally:
        torch.clear_autocast_cache()  # an outer autocast would keep what this pass converted
    return PerExample({name: Dense(gradient.detach()) for name, gradient in found.items()})
