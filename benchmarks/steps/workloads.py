"""What is trained in a benchmark: networks of the field with random inputs, the same for every engine.

Each is built of ordinary torch modules, so that every engine runs the same model.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # inputs, labels
CLASSES = 10
VOCABULARY = 2000


@dataclass(frozen=True)
class Workload:
    """A model, and the shape of what it is trained on.

    >>> WORKLOADS["mnist-cnn"].of(4).batch("cpu")[0].shape
    torch.Size([4, 1, 28, 28])
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    batch_size: int
    batch_size_cpu: int  # sized for two cores
    vocabulary: int | None = None  # inputs are indices into it

    def of(self, batch_size: int) -> "Workload":
        """The same with batches of another size."""
        return replace(self, batch_size=batch_size, batch_size_cpu=batch_size)

    def on(self, device: str) -> "Workload":
        """The same with the batches that fit the device."""
        return self if device == "cuda" else self.of(self.batch_size_cpu)

    def built(self, device: str) -> nn.Module:
        """The model with weights that depend on nothing but torch's generator at seed 0."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.make().to(device)

    def batch(self, device: str) -> Batch:
        """The same random examples at every call."""
        return self.rows(self.batch_size, device)

    def rows(self, count: int, device: str) -> Batch:
        """As many random examples."""
        random = torch.Generator().manual_seed(1)
        size = (count, *self.shape)
        if self.vocabulary is None:
            inputs = torch.randn(size, generator=random)
        else:
            inputs = torch.randint(self.vocabulary, size, generator=random)
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


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        inner: Tensor = self.inner(x)
        return x + inner


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


def transformer(width: int, layers: int, length: int, batch_size: int) -> Workload:
    """A transformer with heads of 64 dimensions."""
    make = partial(Transformer, width, layers, max(1, width // 64), length)
    return Workload("transformer encoder", make, (length,), batch_size, batch_size, VOCABULARY)


_BERT = partial(Transformer, 768, 12, 12, 256, 30522)

WORKLOADS: dict[str, Workload] = {
    "mlp": Workload("MLP, one hidden layer", partial(mlp, 64, 64), (64,), 512, 512),
    "mnist-cnn": Workload("MNIST CNN", cnn, (1, 28, 28), 512, 512),
    "resnet9": Workload("ResNet-9, GroupNorm", resnet9, (3, 32, 32), 512, 32),
    "bert": Workload("BERT-base shape, T=256", _BERT, (256,), 32, 1, 30522),
    "transformer": transformer(256, 4, 128, 16),
    "lstm": Workload("LSTM classifier", Recurrent, (64,), 64, 64, VOCABULARY),
}
USUAL = {
    "cpu": ("mnist-cnn", "resnet9", "transformer", "lstm"),
    "cuda": ("mnist-cnn", "resnet9", "bert", "transformer", "lstm"),
}
