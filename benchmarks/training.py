"""A whole private run on MNIST, beside the same run with Opacus: 60,000 examples, Poisson lots of 512 on average.

    python -m benchmarks.training [--device cuda|cpu] [--epochs 20] [--modes hooks ...] [--repeat 3] [--threads 2]
                                  [--data-dir DIR] [--write]

What is timed is what a user waits for once the data are in memory: calibration, checks, capture, every step, and the
accuracy on the test images at the end. Opacus runs as its documentation shows it (``make_private`` on a DataLoader of a
TensorDataset), and once more with its own sampler but the batches taken from tensors on the device by index, which
spares it the DataLoader. Both use the noise multiplier that dpgrad calibrates. Runs take turns, after a short one of
each that is not timed: what a process loads and compiles once is left out.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import environment
from benchmarks.steps.networks import cnn
from dpgrad import data, fit, recipes
from dpgrad.papers.tasks import whole
from dpgrad.training.plan import make

EPSILON, DELTA, LOT, CLIP, LEARNING_RATE = 3.0, 1e-5, 512, 1.0, 2.0
WARM_UP = 0.1  # epochs of a run that is not timed
Batch = tuple[Tensor, Tensor]


@dataclass
class Row:
    """One way to train; seconds of each whole run, and the accuracy of the last."""

    name: str
    seconds: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    reason: str = ""


def accuracy(model: nn.Module, test: Batch) -> float:
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def ours(device: str, train: Batch, test: Batch, epochs: float) -> float:
    model = cnn().to(device)
    fitted = fit(
        model,
        train,
        epsilon=EPSILON,
        delta=DELTA,
        epochs=epochs,
        batch_size=LOT,
        method=recipes.dpsgd(clip=CLIP, learning_rate=LEARNING_RATE),
    )
    return accuracy(whole(fitted).model, test)


def opacus(mode: str, by_index: bool, device: str, train: Batch, test: Batch, noise: float, epochs: float) -> float:
    from opacus import PrivacyEngine
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    model = cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(TensorDataset(*(leaf.cpu() for leaf in train)), batch_size=LOT)
    criterion = nn.CrossEntropyLoss()
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise, max_grad_norm=CLIP,
        grad_sample_mode=mode, criterion=criterion,
    )  # fmt: skip
    private, optimizer, *rest = made
    criterion, loader = (rest[0], rest[1]) if len(rest) == 2 else (criterion, rest[0])
    rate = LOT / len(train[1])
    steps = int(epochs * len(train[1]) / LOT)
    sampler = UniformWithReplacementSampler(num_samples=len(train[1]), sample_rate=rate, steps=steps)

    def batches() -> "list[Batch] | object":
        if by_index:
            return ((train[0][rows], train[1][rows]) for rows in sampler)
        return endless(loader)

    for taken, (inputs, labels) in enumerate(batches()):  # type: ignore[arg-type, var-annotated]
        if taken == steps:
            break
        optimizer.zero_grad()
        criterion(private(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
    return accuracy(model, test)


def endless(loader: DataLoader) -> object:
    while True:
        yield from loader


def timed(run: Callable[[], float], device: str) -> tuple[float, float]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    wait()
    began = time.perf_counter()
    found = run()
    wait()
    return time.perf_counter() - began, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--epochs", type=float, default=20.0)
    parser.add_argument("--modes", nargs="+", default=["hooks"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers warn at ordinary settings
    torch.set_num_threads(given.threads)
    where = environment.describe("benchmarks.training")
    mnist = data.load("mnist", given.data_dir)
    train, test = (
        (torch.from_numpy(x).float().to(given.device), torch.from_numpy(y).long().to(given.device))
        for x, y in ((mnist.x_train, mnist.y_train), (mnist.x_test, mnist.y_test))
    )
    plan = make("dpsgd", rows=len(train[1]), epsilon=EPSILON, delta=DELTA, epochs=given.epochs, batch_size=LOT)
    noise = plan.mechanism.noise_multiplier
    ways: dict[str, Callable[[float], float]] = {"dpgrad fit": partial(ours, given.device, train, test)}
    for mode in given.modes:
        for by_index in (False, True):
            name = f"opacus {mode}" + (", batches by index" if by_index else "")
            ways[name] = partial(opacus, mode, by_index, given.device, train, test, noise)
    rows = {name: Row(name) for name in ways}
    for turn in range(given.repeat + 1):
        for name, way in ways.items():
            row = rows[name]
            if row.reason:
                continue
            try:
                seconds, row.accuracy = timed(partial(way, given.epochs if turn else WARM_UP), given.device)
            except Exception as error:  # whatever a peer says where it cannot
                if name == "dpgrad fit":
                    raise
                row.reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if not turn:
                continue  # a short run first: what a process loads and compiles once is not timed
            row.seconds.append(seconds)
            print(f"{turn}: {name} {seconds:.2f} s, accuracy {row.accuracy:.4f}", flush=True)
    own = rows["dpgrad fit"]
    lines = [["run", "seconds", "× dpgrad", "accuracy"]]
    for row in rows.values():
        if row.reason:
            lines.append([row.name, row.reason[:100], "", ""])
            continue
        ratio = statistics.median(a / b for a, b in zip(row.seconds, own.seconds, strict=True))
        lines.append([row.name, f"{statistics.median(row.seconds):.2f}", f"{ratio:.2f}", f"{row.accuracy:.4f}"])
    print(environment.table(lines))
    if given.write:
        on = "" if given.device == "cpu" else f" on {torch.cuda.get_device_name()}"
        note = (
            f"Medians of {given.repeat} whole runs of {given.epochs:g} epochs ({plan.steps} steps), ε = {EPSILON:g} at "
            f"δ = {DELTA:g}, noise multiplier {noise:.4f}, clip {CLIP:g}, learning rate {LEARNING_RATE:g}. Accuracy "
            "is that of one run, on the test images; nothing was tuned."
        )
        name = "training" if given.device == "cpu" else f"training_{given.device}"
        results = {"environment": where, "noise_multiplier": noise, "rows": [asdict(row) for row in rows.values()]}
        environment.write(name, results, f"A private run on MNIST{on}", [environment.table(lines), note])
    return 0  # a measurement, not a gate


if __name__ == "__main__":
    sys.exit(main())
