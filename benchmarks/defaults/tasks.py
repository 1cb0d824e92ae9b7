"""The tasks: rows, a model and a loss each, and whether the rule of method auto was chosen while looking at them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.steps import networks
from dpgrad import data
from dpgrad.training.models import build

Rows = tuple[Tensor, Tensor, Tensor, Tensor]  # training inputs and targets, test inputs and targets
ALPHABET, LENGTH, SOUGHT = 12, 24, 4
TEST = 5000  # at most as many test rows


@dataclass(frozen=True)
class Task:
    """``rows`` are the training rows, the first after a fixed permutation."""

    name: str
    part: Literal["selection", "judged"]
    source: str
    rows: int
    model: Callable[[Tensor, int], nn.Module]
    loss: str = "cross-entropy"
    start: str | None = None  # the task without privacy on whose rows the model is trained before
    heavy: bool = False  # run on the device; the others are faster on one core each

    @property
    def points(self) -> str:
        """What a score is, times 100."""
        return "R²" if self.loss == "squared" else "accuracy"


def linear(x: Tensor, outputs: int) -> nn.Module:
    return build("linear", tuple(x.shape[1:]), outputs)


def mlp(x: Tensor, outputs: int) -> nn.Module:
    return build("mlp", tuple(x.shape[1:]), outputs)


def cnn(x: Tensor, outputs: int) -> nn.Module:
    return build("cnn", tuple(x.shape[1:]), outputs)


def oriented(x: Tensor, outputs: int) -> nn.Module:
    return build("oriented-gradients", tuple(x.shape[1:]), outputs)


def papernot(x: Tensor, outputs: int) -> nn.Module:
    found = networks.cnn()
    assert isinstance(found, nn.Sequential)
    found[-1] = nn.Linear(32, outputs)
    return found


def relu(*widths: int) -> Callable[[Tensor, int], nn.Module]:
    def made(x: Tensor, outputs: int) -> nn.Module:
        sizes = [x[0].numel(), *widths]
        hidden = [part for one, two in itertools.pairwise(sizes) for part in (nn.Linear(one, two), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], outputs))

    return made


class Gru(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.letters, self.out = nn.Embedding(ALPHABET, 16), nn.Linear(32, outputs)
        self.cell = nn.GRU(16, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.cell(self.letters(x))[0].mean(1))
        return found


class Transformer(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.letters, self.out = nn.Embedding(ALPHABET, 32), nn.Linear(32, outputs)
        self.places = nn.Parameter(torch.zeros(LENGTH, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layer(self.letters(x) + self.places).mean(1))
        return found


TASKS = (
    Task("digits MLP", "selection", "digits", 1437, mlp),
    Task("digits CNN", "selection", "digits", 1437, cnn),
    Task("digits HOG linear", "selection", "digits", 1437, oriented),
    Task("Adult linear", "selection", "adult", 32561, linear),
    Task("Adult MLP", "selection", "adult", 32561, mlp),
    Task("Covertype MLP", "selection", "covertype", 8000, mlp),
    Task("Fashion-MNIST linear", "selection", "fashion-mnist", 20000, linear),
    Task("MNIST CNN", "selection", "mnist", 6000, cnn, heavy=True),
    Task("CIFAR-10 features linear", "selection", "cifar10-features", 20000, linear),
    Task("Reuters linear", "selection", "reuters", 7770, linear),
    Task("Graduate Admission linear", "selection", "graduate-admission", 400, linear, "squared"),
    Task("Boston housing linear", "selection", "boston-housing", 404, linear, "squared"),
    Task("Covertype linear, 90,000 rows", "judged", "covertype", 90_000, linear),
    Task("Covertype 54-100-100-7, 90,000 rows", "judged", "covertype", 90_000, relu(100, 100)),
    Task("MNIST CNN, 60,000 rows", "judged", "mnist", 60_000, papernot, heavy=True),
    Task("Fashion-MNIST CNN, 20,000 rows", "judged", "fashion-mnist", 20_000, papernot, heavy=True),
    Task("CIFAR-10 features MLP, 30,000 rows", "judged", "cifar10-features", 30_000, relu(128), heavy=True),
    Task("MNIST 784-1000-10, 10,000 rows", "judged", "mnist", 10_000, relu(1000), heavy=True),
    Task("MNIST even or odd, CNN with bce", "judged", "mnist-parity", 10_000, papernot, "bce", heavy=True),
    Task("Adult linear, 1,000 rows", "judged", "adult", 1000, linear),
    Task("Reuters 8315-32-2", "judged", "reuters", 7770, relu(32), heavy=True),
    Task("Sonar linear, 166 rows", "judged", "sonar", 166, linear),
    Task("Swedish Motor Insurance linear", "selection", "swedish-motor-insurance", 1745, linear, "squared"),
    Task("Elevation from Covertype, MLP", "judged", "elevation", 50_000, relu(64), "squared"),
    Task("letters GRU", "judged", "letters", 10_000, lambda x, outputs: Gru(outputs)),
    Task("letters transformer", "judged", "letters", 10_000, lambda x, outputs: Transformer(outputs)),
    Task("Fashion-MNIST CNN, from MNIST", "judged", "fashion-mnist", 5000, papernot, start="mnist", heavy=True),
)  # fmt: skip


def prepare(source: str, folder: Path) -> None:
    """Write the rows of a source that tasks use to a small file, in a fixed order; one that is there is kept."""
    file = folder / f"{source}.npz"
    if file.exists():
        return
    x, y, xt, yt = _letters() if source == "letters" else _loaded(source)
    most = max(
        [task.rows for task in TASKS if task.source == source] + [20_000 for task in TASKS if task.start == source]
    )
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(y)))[:most]
    parts = {"x": _packed(x[order]), "y": y[order].numpy(), "xt": _packed(xt[:TEST]), "yt": yt[:TEST].numpy()}
    part = file.with_suffix(".part.npz")
    np.savez_compressed(part, **parts)
    part.rename(file)


def _packed(x: Tensor) -> NDArray[Any]:
    """As few bytes as hold the values; pixels as whole numbers of 255ths."""
    if x.is_floating_point() and bool(torch.equal((x * 255).round() / 255, x)):
        return (x * 255).round().to(torch.uint8).numpy()
    half = x.half()
    return (half if x.is_floating_point() and bool(torch.equal(half.float(), x)) else x).numpy()


def _unpacked(x: NDArray[Any]) -> Tensor:
    found = torch.from_numpy(x)
    return found.float() / 255 if found.dtype == torch.uint8 else found.float() if found.is_floating_point() else found


@cache
def _read(source: str, folder: Path) -> Rows:
    with np.load(folder / f"{source}.npz") as held:
        x, y, xt, yt = (held[name] for name in ("x", "y", "xt", "yt"))
    return _unpacked(x), torch.from_numpy(y), _unpacked(xt), torch.from_numpy(yt)


def _loaded(source: str) -> Rows:
    named = {"mnist-parity": "mnist", "elevation": "covertype"}.get(source, source)
    found = data.load(named)
    x, xt = (
        torch.from_numpy(np.asarray(part if isinstance(part, np.ndarray) else part.toarray(), np.float32))
        for part in (found.x_train, found.x_test)
    )
    kind = torch.int64 if found.classes else torch.float32
    y, yt = (torch.from_numpy(np.asarray(part)).to(kind) for part in (found.y_train, found.y_test))
    if source == "mnist-parity":
        y, yt = (y % 2)[:, None].float(), (yt % 2)[:, None].float()
    if source == "elevation":
        x, y, xt, yt = x[:, 1:], x[:, 0], xt[:, 1:], xt[:, 0]
    return x, y, xt, yt


def _letters() -> Rows:
    """Words of random letters; the class is which of the first four letters occurs most, the earliest of several."""
    random = torch.Generator().manual_seed(0)
    words = torch.randint(ALPHABET, (13_000, LENGTH), generator=random)
    classes = F.one_hot(words, ALPHABET).sum(1)[:, :SOUGHT].argmax(1)
    return words[:10_000], classes[:10_000], words[10_000:], classes[10_000:]


@cache
def rows(task: Task, folder: Path, device: str) -> Rows:
    x, y, xt, yt = _read(task.source, folder)
    return x[: task.rows].to(device), y[: task.rows].to(device), xt.to(device), yt.to(device)


@cache
def _trained(task: Task, folder: Path, device: str) -> dict[str, Tensor]:
    """The weights from which fine-tuning begins: those of two passes over other, public rows without privacy."""
    assert task.start is not None
    x, y, _, _ = _read(task.start, folder)
    torch.manual_seed(0)
    found = task.model(x, int(y.max()) + 1).to(device)
    optimizer = torch.optim.Adam(found.parameters(), 1e-3)
    for few in torch.randperm(20_000).repeat(2).split(128):
        optimizer.zero_grad()
        F.cross_entropy(found(x[few].to(device)), y[few].to(device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach().clone() for name, value in found.state_dict().items()}


def model(task: Task, folder: Path, device: str, seed: int) -> nn.Module:
    """The model from its public start: drawn from ``seed``, or trained on other rows."""
    x, y, _, _ = rows(task, folder, device)
    start = _trained(task, folder, device) if task.start is not None else None
    torch.manual_seed(seed)
    found = task.model(x, int(y.max()) + 1 if y.dtype == torch.int64 else 1).to(device)
    if start is not None:
        found.load_state_dict(start)
    return found


@torch.no_grad()
def score(task: Task, found: nn.Module, folder: Path, device: str) -> float:
    """Accuracy or R² on the test rows, times 100; R² is at least −100, however wrong the model is."""
    _, _, xt, yt = rows(task, folder, device)
    outputs = torch.cat([found(few) for few in xt.split(2000)])
    if task.loss == "squared":
        wrong = (outputs.view(-1) - yt).square().mean() / yt.var(unbiased=False)
        return max(-100.0, 100 * float(1 - wrong)) if bool(wrong.isfinite()) else -100.0
    right = (outputs > 0) == (yt > 0.5) if task.loss == "bce" else outputs.argmax(1) == yt
    return 100 * float(right.double().mean())
