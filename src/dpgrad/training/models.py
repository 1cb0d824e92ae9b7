"""Models by name, as the command line trains them: a name, the shape of one row and the number of outputs.

Among them are the networks of the papers that dpgrad reproduces. Each takes rows of any shape that its layers allow;
on the paper's data it has the paper's sizes.

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

__all__ = ["MODELS", "OWN_MODEL", "OrientedGradients", "Residual", "Words", "build", "default"]

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


class Words(nn.Module):
    """A classifier of texts: the mean of the embeddings of a text's words, and one linear layer.

    A row holds the numbers of its words, each at least 1, and 0 for padding. Numbers beyond ``words`` share the
    embeddings of smaller ones, so no number is out of range and the size depends on nothing in the data.

    >>> model = Words(2)
    >>> rows = torch.tensor([[7, 3, 0], [7, 3, 3]])
    >>> torch.equal(model(rows[:1]), model(torch.tensor([[0, 3, 0, 7]]))), model(0 * rows).isfinite().all()
    (True, tensor(True))
    """

    def __init__(self, outputs: int, words: int = (1 << 13) - 1, width: int = 32) -> None:
        super().__init__()
        self.words = words
        self.embedding, self.head = nn.Embedding(words + 1, width), nn.Linear(width, outputs)

    def forward(self, numbers: Tensor) -> Tensor:
        """(rows, length) whole numbers to (rows, outputs)."""
        there = (numbers > 0).unsqueeze(2)
        found = self.embedding(torch.where(numbers > 0, (numbers - 1) % self.words + 1, 0)) * there
        mean = found.sum(1) / there.sum(1).clamp(min=1)
        outputs: Tensor = self.head(mean)
        return outputs


class Residual(nn.Module):
    """x + f(x), where f are the given layers one after another.

    >>> Residual(nn.Tanh(), nn.Tanh())(torch.zeros(2))
    tensor([0., 0.])
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        inner: Tensor = self.inner(x)
        return x + inner


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
    """A linear model of oriented gradients; cells grow with the image, so a side has at most about 23 of them."""
    channels, height, width = _image("oriented-gradients", shape)
    cell = max(2, min(height, width) // 16)
    features = OrientedGradients(cell=cell)
    head = nn.Linear(features.bins * channels * (height // cell) * (width // cell), outputs)
    nn.init.zeros_(head.weight)  # a convex problem: from zero, every class is as likely as any other
    nn.init.zeros_(head.bias)
    return nn.Sequential(features, head)


def _words(shape: Sequence[int], outputs: int) -> nn.Module:
    if len(shape) != 1:
        raise OptionError(f"model words is for rows of word numbers, got rows of shape {tuple(shape)}: choose linear")
    return Words(outputs)


def _yu2018_cnn(shape: Sequence[int], outputs: int) -> nn.Module:
    """Yu et al. (2018), Section 4: two 5×5 convolutions with 10 and 20 channels, ReLU, "fully connected 50→10".

    20 channels cannot be flattened to 50 numbers. The usual reading, taken here: 2×2 max-pooling after each
    convolution, and a layer 320→50 with ReLU before the last one.
    """
    channels, height, width = _image("yu2018-cnn", shape, 16)
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(20 * math.prod(left), 50), nn.ReLU(), nn.Linear(50, outputs),
    )  # fmt: skip


def _yu2018_covertype(shape: Sequence[int], outputs: int) -> nn.Module:
    """Yu et al. (2018), Figure 4: two hidden layers of 100 with tanh; 54-100-100-7 on Covertype."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(),
        nn.Linear(100, outputs),
    )  # fmt: skip


def _huang2024_cnn(shape: Sequence[int], outputs: int) -> nn.Module:
    """Huang et al. (2024), Section 5: "four convolutional layers and one fully connected layer".

    The paper prints no channels, kernels, activations or pooling. Ours: 3×3 convolutions with 32, 32, 64 and 64
    channels and ReLU, 2×2 max-pooling after the second and the fourth.
    """
    channels, height, width = _image("huang2024-cnn", shape)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), outputs),
    )  # fmt: skip


def _resnet9(shape: Sequence[int], outputs: int) -> nn.Module:
    """ResNet-9, as Huang et al. (2024) train it, with GroupNorm; 6.6 million parameters on images of three channels."""
    channels, _, _ = _image("resnet9", shape, 8)

    def block(before: int, after: int, pool: bool = False) -> nn.Sequential:
        layers = [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(min(32, after // 4), after), nn.ReLU()]
        return nn.Sequential(*layers, *[nn.MaxPool2d(2)] * pool)

    return nn.Sequential(
        block(channels, 64), block(64, 128, pool=True), Residual(block(128, 128), block(128, 128)),
        block(128, 256, pool=True), block(256, 512, pool=True), Residual(block(512, 512), block(512, 512)),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, outputs),
    )  # fmt: skip


MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "linear": _linear,  # softmax regression, also on features that were computed before
    "mlp": _mlp,
    "cnn": _cnn,
    "oriented-gradients": _oriented_gradients,
    "words": _words,
    "yu2018-softmax": _linear,
    "yu2018-cnn": _yu2018_cnn,
    "yu2018-covertype": _yu2018_covertype,
    "huang2024-cnn": _huang2024_cnn,
    "resnet9": _resnet9,
}


def _image(name: str, shape: Sequence[int], least: int = 4) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise OptionError(
            f"model {name} is for images of (channels, height, width) with sides of at least {least}, got rows of "
            f"shape {tuple(shape)}: choose linear or mlp"
        )
    return shape[0], shape[1], shape[2]


def default(kind: str, shape: Sequence[int]) -> str:
    """The name of a model that suits rows of a kind (table, image or text) and shape, without looking at any row.

    Privacy noise grows with the number of parameters, so each is small. Images get a linear model of fixed features:
    with a few thousand rows it learns more than a network that also has to learn its features.

    >>> default("image", (1, 28, 28)), default("table", (14,)), default("text", (64,))
    ('oriented-gradients', 'linear', 'words')
    """
    if kind == "image" and len(shape) == 3 and min(shape[1:]) >= 4:
        return "oriented-gradients"
    return "words" if kind == "text" and len(shape) == 1 else "linear"


def build(name: str, shape: Sequence[int], outputs: int) -> nn.Module:
    """The model of that name for rows of ``shape``; its weights are drawn from torch's default generator.

    >>> build("conn", (1, 8, 8), 10)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: model must be one of linear, mlp, cnn, ..., got 'conn': did you mean cnn?
    """
    _validate.one_of(MODELS, model=name)
    _validate.whole(least=1, outputs=outputs)
    return MODELS[name](shape, outputs)
