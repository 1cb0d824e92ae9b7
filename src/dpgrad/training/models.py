"""Small models by name, as the command line trains them: a name, the shape of one row and the number of outputs.

>>> build("linear", (1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
torch.Size([2, 10])
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import _validate
from dpgrad.errors import OptionError

__all__ = ["MODELS", "OWN_MODEL", "OrientedGradients", "build"]

OWN_MODEL = "own"  # in a report: the caller brought the model


class OrientedGradients(nn.Module):
    """Histograms of oriented gradients: fixed features of small images; nothing in them is learned.

    In cells of ``cell`` × ``cell`` pixels the lengths of the image's gradients are added up by their direction, in
    ``bins`` directions with linear interpolation between them (Dalal and Triggs, 2005, without their blocks). The
    histograms of one image are scaled to norm 1, a constant is subtracted, and they are scaled to norm 1 again. No
    example's gradient in a linear model is then large because of the size of its features.

    Guarantee: a fixed function of one row; it costs nothing and mixes no rows.

    >>> features = OrientedGradients()(torch.rand(3, 1, 8, 8))
    >>> features.shape, features.square().sum(1).allclose(torch.ones(3))
    (torch.Size([3, 128]), True)
    """

    def __init__(self, bins: int = 8, cell: int = 2, offset: float = 0.6) -> None:
        super().__init__()
        self.bins, self.cell, self.offset = bins, cell, offset
        self.register_buffer("directions", torch.arange(bins, dtype=torch.float32)[:, None, None, None], False)
        self.directions: Tensor

    def forward(self, images: Tensor) -> Tensor:
        padded = F.pad(images, (1, 1, 1, 1))
        across = padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]
        down = padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]
        length = (across.square() + down.square()).sqrt()
        turn = torch.atan2(down, across)[:, None] * (self.bins / (2 * math.pi))  # (rows, 1, channels, height, width)
        apart = torch.remainder(turn - self.directions + self.bins / 2, self.bins) - self.bins / 2
        shares = F.relu(1 - apart.abs()) * length[:, None]
        cells = F.avg_pool2d(shares.flatten(1, 2), self.cell)
        histograms = F.normalize(cells.flatten(1), dim=1)
        return F.normalize(histograms - self.offset / math.sqrt(histograms.shape[1]), dim=1)


def _linear(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def _mlp(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.Tanh(), nn.Linear(64, outputs))


def _cnn(shape: Sequence[int], outputs: int) -> nn.Module:
    """Two 3×3 convolutions; tanh keeps activations bounded, which suits clipped gradients (Papernot et al., 2021)."""
    channels, height, width = _image("cnn", shape)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), outputs),
    )  # fmt: skip


def _oriented_gradients(shape: Sequence[int], outputs: int) -> nn.Module:
    channels, height, width = _image("oriented-gradients", shape)
    features = OrientedGradients()
    head = nn.Linear(features.bins * channels * (height // 2) * (width // 2), outputs)
    nn.init.zeros_(head.weight)  # a convex problem: from zero, every class is as likely as any other
    nn.init.zeros_(head.bias)
    return nn.Sequential(features, head)


MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "cnn": _cnn,
    "oriented-gradients": _oriented_gradients,
}


def _image(name: str, shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise OptionError(
            f"model {name} is for images of (channels, height, width) with sides of at least 4, got rows of shape "
            f"{tuple(shape)}: choose linear or mlp"
        )
    return shape[0], shape[1], shape[2]


def build(name: str, shape: Sequence[int], outputs: int) -> nn.Module:
    """The model of that name for rows of ``shape``; its weights are drawn from torch's default generator.

    >>> build("conn", (1, 8, 8), 10)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: model must be one of linear, mlp, cnn, oriented-gradients, got 'conn': did you mean cnn?
    """
    _validate.one_of(MODELS, model=name)
    _validate.whole(least=1, outputs=outputs)
    return MODELS[name](shape, outputs)
