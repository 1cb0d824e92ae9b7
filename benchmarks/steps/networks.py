"""The networks of the benchmarks, of ordinary torch modules: every engine runs the same model."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
VOCABULARY = 2000


def cnn() -> nn.Module:
    """Two convolutions with tanh: the network of most DP-SGD papers on MNIST (Papernot et al., 2021)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def mlp(inputs: int, width: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, CLASSES))


def stack(width: int, depth: int) -> nn.Module:
    """Linear layers with tanh between them, named by their place in binary, so that a prefix names half of them.

    >>> list(stack(3, 4)._modules)
    ['00', '01', '10', '11']
    """
    digits = (depth - 1).bit_length()
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh()) if place < depth - 1 else nn.Linear(width, CLASSES)
        for place in range(depth)
    ]
    return nn.Sequential(OrderedDict((f"{place:0{digits}b}", layer) for place, layer in enumerate(layers)))


def resnet9() -> nn.Module:
    """ResNet-9 with GroupNorm, 6.6 million parameters."""
    from dpgrad.training.models import build  # not in every version that `benchmarks.before` runs

    return build("resnet9", (3, 32, 32), CLASSES)


class EncoderLayer(nn.Module):
    """Self-attention and two linear layers, normalized before each (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        normal = self.before(x)
        query, key, value = (
            part(normal).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        inner: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + inner


class Transformer(nn.Module):
    """An encoder in the shape of BERT; it classifies by the first position."""

    def __init__(
        self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 128, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.normal, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) indices to (batch, classes)."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1))
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.normal(x[:, 0]))
        return scores


class Recurrent(nn.Module):
    """An LSTM classifier of token sequences."""

    def __init__(self, width: int = 100, hidden: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) indices to (batch, classes)."""
        scores: Tensor = self.head(self.recurrent(self.words(ids))[0][:, -1])
        return scores


class Characters(nn.Module):
    """An LSTM that predicts each next character."""

    def __init__(self, characters: int = 128, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(characters, width)
        self.recurrent = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) indices to (batch, length, characters)."""
        scores: Tensor = self.head(self.recurrent(self.words(ids))[0])
        return scores


class Block(nn.Module):
    """Two convolutions, each after GroupNorm and ReLU, beside a shortcut (Zagoruyko and Komodakis, 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(16, before), nn.GroupNorm(16, after)
        self.down = nn.Conv2d(before, after, 3, stride, padding=1)
        self.along = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, height, width) to (batch, after, height / stride, width / stride)."""
        active = F.relu(self.first(x))
        inner: Tensor = self.along(F.relu(self.second(self.down(active))))
        return inner + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(depth: int = 16, factor: int = 4) -> nn.Module:
    """A wide residual network with GroupNorm, as De et al. (2022) train on CIFAR-10; 2.7 million parameters."""
    widths = [16, *(factor * width for width in (16, 32, 64))]
    blocks = [
        Block(before if place == 0 else after, after, stride if place == 0 else 1)
        for before, after, stride in zip(widths, widths[1:], (1, 2, 2), strict=False)
        for place in range((depth - 4) // 6)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.GroupNorm(16, widths[-1]), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES),
    )  # fmt: skip
