"""Four networks of the field, sized for two CPU cores, with fixed random inputs.

Each is built of ordinary torch modules, so that every engine runs the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # inputs, labels
CLASSES = 10
VOCABULARY = 2000


@dataclass(frozen=True)
class Network:
    """A model, and the shape of what it is trained on."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    batch_size: int
    tokens: bool = False  # inputs are indices into a vocabulary

    def built(self, device: str) -> nn.Module:
        """The model with weights that depend on nothing but torch's generator at seed 0."""
        torch.manual_seed(0)
        return self.make().to(device)

    def batch(self, device: str) -> Batch:
        """The same random examples at every call."""
        random = torch.Generator().manual_seed(1)
        size = (self.batch_size, *self.shape)
        inputs = (
            torch.randint(VOCABULARY, size, generator=random) if self.tokens else torch.randn(size, generator=random)
        )
        labels = torch.randint(CLASSES, size[:1], generator=random)
        return inputs.to(device), labels.to(device)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of each example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def cnn() -> nn.Module:
    """Two convolutions with tanh: the network of most DP-SGD papers on MNIST (Papernot et al., 2021)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def resnet9() -> nn.Module:
    """ResNet-9 with GroupNorm, 6.6 million parameters."""

    def block(before: int, after: int, pool: bool = False) -> nn.Sequential:
        layers = [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(min(32, after // 4), after), nn.ReLU()]
        return nn.Sequential(*layers, *[nn.MaxPool2d(2)] * pool)

    return nn.Sequential(
        block(3, 64), block(64, 128, pool=True), Residual(block(128, 128), block(128, 128)),
        block(128, 256, pool=True), block(256, 512, pool=True), Residual(block(512, 512), block(512, 512)),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip


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
        normal = self.before(x)
        parts = (
            part(normal).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """An encoder in the shape of BERT, made smaller; it classifies by the first position."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.normal, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.normal(x[:, 0]))


class Recurrent(nn.Module):
    """An LSTM classifier of token sequences."""

    def __init__(self, width: int = 100, hidden: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.words(ids))[0][:, -1])


NETWORKS: dict[str, Network] = {
    "cnn": Network("MNIST CNN", cnn, (1, 28, 28), 512),
    "resnet9": Network("ResNet-9, GroupNorm", resnet9, (3, 32, 32), 32),
    "transformer": Network("transformer encoder", Transformer, (128,), 16, tokens=True),
    "lstm": Network("LSTM classifier", Recurrent, (64,), 64, tokens=True),
}
