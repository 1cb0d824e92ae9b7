"""The networks of our best runs: few parameters on fixed features.

>>> build({"model": "conv", "width": 4, "pool": "max"}, (81, 7, 7), 10)(torch.zeros(2, 81, 7, 7)).shape
torch.Size([2, 10])
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import _validate

__all__ = ["Standardized", "build"]


class _Float(nn.Module):
    """Features are kept in half the memory; the model computes in float32."""

    def forward(self, features: Tensor) -> Tensor:
        return features.float()


class Standardized(nn.Conv2d):
    """A convolution whose filters are brought to mean 0 and norm 1 before use (Qiao et al., 2019).

    >>> Standardized(3, 4, 3)(torch.ones(1, 3, 5, 5)).abs().max() < 1
    tensor(True)
    """

    def forward(self, input: Tensor) -> Tensor:
        """The convolution."""
        flat = self.weight.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        weight = (centred / (centred.square().sum(1, keepdim=True) + 1e-6).sqrt()).view_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


_POOLS: dict[str, tuple[type[nn.MaxPool2d] | type[nn.AvgPool2d], ...]] = {
    "none": (), "max": (nn.MaxPool2d,), "mean": (nn.AvgPool2d,),
}  # fmt: skip


def build(setting: Mapping[str, Any], shape: Sequence[int], outputs: int) -> nn.Module:
    """The network of a setting for rows of ``shape``; weights are drawn from torch's default generator.

    "linear"; "mlp" with hidden layers of ``widths``; "conv": one 3×3 convolution of ``width`` channels, or two where
    ``second`` is a number of channels, tanh, pooling by two, and a linear layer.

    >>> sum(p.numel() for p in build({"model": "mlp", "widths": [3]}, (2,), 2).parameters())
    17
    """
    _validate.one_of(("linear", "mlp", "conv"), model=setting["model"])
    if setting["model"] == "conv":
        return _convolutional(setting, shape, outputs)
    sizes = [math.prod(shape), *(setting["widths"] if setting["model"] == "mlp" else ())]
    layers: list[nn.Module] = [_Float(), nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, _head(sizes[-1], outputs, zero=len(sizes) == 1))


def _convolutional(setting: Mapping[str, Any], shape: Sequence[int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = [_Float()]
    channels = shape[0]
    kind = Standardized if setting.get("standardized") else nn.Conv2d
    for width in (setting["width"], setting.get("second")):
        if width:
            layers += [kind(channels, width, 3, padding=1), nn.Tanh()]
            layers += [pool(2, ceil_mode=True) for pool in _POOLS[setting["pool"]]]
            channels = width
    layers.append(nn.Flatten())
    with torch.no_grad():
        size = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*layers, _head(size, outputs, zero=False))


def _head(inputs: int, outputs: int, zero: bool) -> nn.Linear:
    """The last layer; a linear model begins at zero, where every class is as likely as any other."""
    head = nn.Linear(inputs, outputs)
    if zero:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return head
