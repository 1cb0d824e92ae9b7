"""The temperature of a classifier's probabilities, found from noisy slopes at a small share of the budget.

A low clip bound cuts nearly every gradient to the same length: examples that a model is wrong about then count no more
than others, and logits grow until probabilities lie too near 0 and 1. Dividing all logits by one number T, the
temperature (Guo et al., "On calibration of modern neural networks", 2017), makes them honest and leaves the predicted
class as it is. The best T depends on the rows: it is 1 where classes can be told apart and above 10 where they
cannot, so no public rule knows it.

How it is found, after the last step, with the trained weights held fixed: log T lies in [0, log 16], and five full
batches halve this interval. Each releases Σᵢ clip₁(dℓᵢ/d log s) plus Gaussian noise, the slope of the log loss in the
logarithm of the scale s = 1/T at the middle, one number an example, cut to [−1, 1]. Where it is above the standard
deviation of its noise, smaller logits are better. Noise alone thus rarely raises T. The last layer is then divided by
T.

Guarantee: the five full batches are steps of a `Mechanism` taken by `PrivateGradient`, with a key of their own. Their
event is composed with that of the run in `Plan.also_released`, and the noise of the run is found with both in the
budget: ε stays what was asked for. Everything else, the new last layer included, is post-processing.

>>> from dpgrad.training import plan
>>> recipe = plan.make(rows=2000, parameters=22, epsilon=3.0, delta=1e-5, temperature=0.01)
>>> recipe.temperature.steps, recipe.guarantee.epsilon <= 3.0
(5, True)
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad.errors import OptionError, UnsupportedModelError
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.training import source
from dpgrad.training.curves import judging
from dpgrad.training.losses import LOSSES, NamedLoss, outputs_and_targets
from dpgrad.training.private import PrivateGradient

__all__ = ["ScaledLoss", "cooled", "last_layer"]

_MOST = 16.0
_MICROBATCH = 512


def last_layer(model: nn.Module, loss: object, data: Any, collate: source.Collate) -> nn.Linear:
    """The linear layer that gives the logits; a model or a loss that has none is refused.

    It is looked for by its effect, on random inputs of the shape of a row: logits halve with its weights.

    >>> found = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> rows = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    >>> _ = nn.init.zeros_(found[2].weight)
    >>> last_layer(found, NamedLoss("cross-entropy"), rows, torch.utils.data.default_collate) is found[2]
    True
    """
    if loss not in (NamedLoss("cross-entropy"), NamedLoss("bce")):
        raise OptionError(
            'temperature is for class probabilities: give loss="cross-entropy" or "bce", or leave out temperature'
        )
    linear = [module for module in model.modules() if type(module) is nn.Linear and module.weight.requires_grad]
    place = next(iter(trainable(model).values())).device
    batch = pytree.tree_map(_random, source.gathered(data, torch.arange(1), place, collate))
    if not linear or not _halves(model, linear[-1], batch):
        raise UnsupportedModelError(
            "temperature divides the last layer, and the logits of this model do not follow one nn.Linear that is "
            "trained: end it with one, or leave out temperature"
        )
    return linear[-1]


def _random(leaf: Any) -> Any:
    """Random numbers in place of a row's; whole numbers become 0."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_floating_point():
        return torch.zeros_like(leaf)
    return torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0)).to(leaf)


def _values(layer: nn.Linear) -> list[Tensor]:
    given: Tensor | None = layer.bias  # torch's types leave the None out
    return [layer.weight] if given is None else [layer.weight, given]


def _halves(model: nn.Module, layer: nn.Linear, batch: Batch) -> bool:
    values = _values(layer)
    kept = [value.detach().clone() for value in values]
    with judging(model):
        try:
            for value in values:  # a layer may start at 0
                value.copy_(_random(value) - 0.5)
            before, _ = outputs_and_targets(model, batch)
            for value in values:
                value.mul_(0.5)
            after, _ = outputs_and_targets(model, batch)
        finally:
            for value, held in zip(values, kept, strict=True):
                value.copy_(held)
    return bool(before.any()) and bool(torch.allclose(before, 2 * after, rtol=1e-3, atol=1e-6))


@dataclass(frozen=True)
class ScaledLoss:
    """A loss by name of logits times the scale."""

    name: str

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, _Scale)
        outputs, targets = outputs_and_targets(model.model, batch)
        return LOSSES[self.name](outputs * model.log_scale.exp(), targets)


class _Scale(nn.Module):
    """A model whose weights are held, and one number that is not: the logarithm of the scale of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        place = next(iter(trainable(model).values()))
        kind = torch.promote_types(place.dtype, torch.float32)
        self.log_scale = nn.Parameter(torch.zeros(1, device=place.device, dtype=kind))


def cooled(
    model: nn.Module, layer: nn.Linear, loss: Loss, mechanism: Mechanism, data: Any, key: Key, *,
    microbatch: int | None = None, replayed: bool = False, **options: Any,
) -> float:  # fmt: skip
    """Divide the last layer by the temperature that noisy slopes over ``data`` choose; return it.

    ``options`` are those of `PrivateGradient` that say what an example is. ``replayed``: a run that is resumed may come
    here again with the same key, and its sums must then round as they did.
    """
    key = key.child("temperature")
    low, high = -math.log(_MOST), 0.0
    scale = _Scale(model)
    with _held(model):
        private = PrivateGradient(
            scale, loss, mechanism, key=key, capture=False, microbatch=microbatch or _MICROBATCH,
            charge=_charged if replayed else None, **options,
        )  # fmt: skip
        noise = mechanism.std_at(0) / mechanism.divisor
        for _ in range(mechanism.steps):
            middle = (low + high) / 2
            with torch.no_grad():
                scale.log_scale.fill_(middle)
            private.step(data)
            assert scale.log_scale.grad is not None
            low, high = (low, middle) if float(scale.log_scale.grad) > noise else (middle, high)
    temperature = math.exp(-(low + high) / 2)
    with torch.no_grad():
        for value in _values(layer):
            value.div_(temperature)
    return temperature


def _charged(step: int) -> None:
    """All full batches were charged with the run, before its first step."""


@contextmanager
def _held(model: nn.Module) -> Iterator[None]:
    """Within the block the weights are not trained, and the model is in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    trained = list(trainable(model).values())
    held = [(parameter, parameter.grad) for parameter in trained]
    model.eval()
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, gradient in held:
            parameter.requires_grad_(True)
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode
