"""DP-SGD as the older papers run it: rows on the device, one private loop, and what is looked at during it.

An experiment needs a run's curve, and the run's mechanism is the same for every seed. `dpgrad.fit` would calibrate and
price each run again; here a mechanism is calibrated once per process and the loop only takes its steps.

Guarantee: a model trained by `trained` is private as its mechanism says, up to the seed, which makes it unfit for
release. Accuracies on test rows and gradient norms of training rows are computed without noise, for the experiment.
"""

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dpgrad.grads import ENGINES, clipped_sum
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.schedules import Schedule, as_schedule
from dpgrad.papers import tasks
from dpgrad.papers.experiment import Place, Size
from dpgrad.papers.tasks import Loaded
from dpgrad.training.losses import NamedLoss
from dpgrad.training.private import PrivateGradient

__all__ = ["LOSS", "POINTS", "gradient_norm", "rows", "trained"]

LOSS = NamedLoss("cross-entropy")
_QUICK = 6000, 2000  # training and test rows
POINTS: dict[Size, int] = {"full": 20, "quick": 10, "tiny": 2}  # of a curve
_Pair = tuple[Tensor, Tensor]


@functools.lru_cache(maxsize=2)
def rows(name: str, place: Place) -> Loaded:
    """A dataset at the size of a place: all of it, evenly spaced rows, or a few made-up rows of a like shape.

    >>> found = rows("mnist", Place(size="tiny"))
    >>> len(found.y), found.shape, found.classes
    (240, (1, 16, 16), 10)
    """
    if place.size == "tiny":
        return _made_up((1, 16, 16), 10, place.device) if name == "mnist" else _made_up((54,), 7, place.device)
    found = tasks.load(name, place)
    return found.few(*_QUICK) if place.size == "quick" else found


def _made_up(shape: tuple[int, ...], classes: int, device: str, train: int = 240, test: int = 120) -> Loaded:
    """Rows in [0, 1] around one centre per class, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(classes, *shape, generator=generator)
    y = torch.arange(train + test) % classes
    noisy = centres[y] + 0.25 * torch.randn(train + test, *shape, generator=generator)
    x, y = noisy.clamp(0, 1).to(device), y.to(device)
    return Loaded(x[:train], y[:train], x[train:], y[train:], classes)


def gradient_norm(model: nn.Module, pair: _Pair) -> float:
    """The mean norm of the rows' own gradients: private, and never released.

    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> round(gradient_norm(model, (torch.ones(3, 1), torch.tensor([0, 1, 1]))), 4)  # (1/2, -1/2)
    0.7071
    """
    seen: list[Tensor] = []

    def kept(norms: Tensor) -> Tensor:
        seen.append(norms)
        return torch.ones_like(norms)

    clipped_sum(model, LOSS, pair, kept, ENGINES["bookkeeping"])
    return float(torch.cat(seen, 1).mean())


def trained(
    model: nn.Module,
    train: _Pair,
    mechanism: Mechanism,
    learning_rate: float | Schedule,
    seed: int,
    *,
    momentum: float = 0.0,
    look: Mapping[str, Callable[[], float]],
    points: int,
) -> dict[str, list[float]]:
    """Take every step of the mechanism on ``model``, in place; the curves of what was looked at, about ``points`` each.

    ``look`` maps a name to a figure of the model as it is. Momentum is m ← c·m + g, as Yu et al. (2018) write it.

    >>> from dpgrad import sampling
    >>> model, train = nn.Linear(2, 2), (torch.eye(2).repeat(50, 1), torch.tensor([0, 1]).repeat(50))
    >>> run = Mechanism(sampling.Poisson(0.5), steps=30, noise_multiplier=1.0, clip=1.0, batch_size=50)
    >>> look = {"accuracy": lambda: tasks.accuracy(model, *train)}
    >>> found = trained(model, train, run, 1.0, seed=0, look=look, points=3)
    >>> found["step"], found["accuracy"][-1]
    ([0, 10, 20, 30], 100.0)
    """
    rate = as_schedule(learning_rate)
    private = PrivateGradient(model, LOSS, mechanism, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate(0), momentum=momentum)
    every = math.ceil(mechanism.steps / points)
    curves: dict[str, list[float]] = {"step": [], **{name: [] for name in look}}

    def seen(step: int) -> None:
        curves["step"].append(step)
        for name, figure in look.items():
            curves[name].append(figure())

    seen(0)
    for step in range(mechanism.steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        private.step(train)
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == mechanism.steps:
            seen(step + 1)
    return curves
