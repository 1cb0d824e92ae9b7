"""What our best runs train: networks with few parameters, and features that suit clipped rows of linear models.

A feature is a fixed function of one row. Which functions are used is a choice like a learning rate: it was made on
held-out training rows and is not charged.

>>> build({"model": "conv", "width": 4, "pool": "max"}, (81, 7, 7), 10)(torch.zeros(2, 81, 7, 7)).shape
torch.Size([2, 10])
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import _validate

__all__ = ["PEOPLE", "Standardized", "build", "digit", "person"]


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


Array = NDArray[Any]
# The columns of Adult as Iyengar et al. prepare it ("yu2020"): how many each part has.
PEOPLE = {
    "workclass": 7, "education": 16, "marital": 7, "occupation": 14, "relationship": 6, "race": 5, "sex": 2,
    "country": 41, "age": 1, "weight": 1, "schooling": 1, "gain": 1, "loss": 1, "hours": 1,
}  # fmt: skip


def person(rows: Array, setting: Mapping[str, Any]) -> Array:
    """People with each part multiplied by its entry of ``setting``, 1 without one; parts times 0 are left out.

    Numbers that are small for nearly everybody are multiplied and then cut at 1: ``gain_by`` and ``loss_by``,
    ``age_by`` and ``hours_by``. So they weigh as much as a category where they matter.
    """
    edges = np.cumsum([0, *PEOPLE.values()])
    found = []
    for name, (start, end) in zip(PEOPLE, pairwise(edges), strict=True):
        part = np.minimum(1.0, rows[:, start:end] * setting.get(f"{name}_by", 1.0))
        if setting.get(name, 1.0):
            found.append(setting.get(name, 1.0) * part)
    return np.concatenate(found, axis=1)


def digit(rows: Array, setting: Mapping[str, Any]) -> Array:
    """Images of pixels in [0, 1] as oriented gradients, or blurred, averaged over ``pool``² pixels, to a ``power``."""
    side = round(rows.shape[1] ** 0.5)
    images = rows.reshape(len(rows), 1, side, side).astype(np.float32)
    if setting["features"] == "oriented":
        import torch

        from dpgrad.training.models import OrientedGradients

        extract = OrientedGradients(bins=setting["bins"], cell=setting["cell"])
        with torch.no_grad():
            found: Array = np.concatenate([extract(few).numpy() for few in torch.split(torch.from_numpy(images), 2048)])
        return found
    if setting["blur"]:
        from scipy.ndimage import gaussian_filter

        images = gaussian_filter(images, (0, 0, setting["blur"], setting["blur"]))  # each image by itself
    pool = setting["pool"]
    small: Array = images.reshape(len(rows), side // pool, pool, side // pool, pool).mean(axis=(2, 4))
    made: Array = np.power(small.reshape(len(rows), -1), setting["power"])
    return made
