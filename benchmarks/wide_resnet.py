"""A wide residual network with GroupNorm: the layers on which lifting costs most."""

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.steps.workloads import CLASSES


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
