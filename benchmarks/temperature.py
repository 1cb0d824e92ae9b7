"""What a temperature does to the probabilities of method auto, and to its classes.

    python -m benchmarks.temperature [--keys 1] [--processes 1]

Tables, images and texts that train in seconds on one core, at ε = 1, 3 and 8. The tasks of the selection were looked at
while the constants were chosen (the bound 1 of a slope, the number of halvings, the noise that a slope has to exceed,
the share of the budget); the fresh ones were not.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpgrad
from benchmarks import environment
from dpgrad.training.models import build

BUDGETS, DELTA, SHARE, BINS, TEST = (1.0, 3.0, 8.0), 1e-5, 0.01, 15, 3000

Rows = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """The first ``rows`` of a source after a fixed permutation, and a model by name."""

    name: str
    part: str
    source: str | Callable[[], Rows]
    rows: int
    model: str


def overlapping(classes: int, columns: int, spread: float, seed: int) -> Callable[[], Rows]:
    """Classes drawn from a softmax of weak linear scores: none can be told apart well."""

    def made() -> Rows:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(9000, columns, generator=random)
        scores = spread * x @ torch.randn(columns, classes, generator=random) / columns**0.5
        scores[:, 0] += 0.7
        y = torch.multinomial(scores.softmax(1), 1, generator=random)[:, 0]
        return x[:6000], y[:6000], x[6000:], y[6000:]

    return made


def bundled(name: str) -> Callable[[], Rows]:
    """A table that scikit-learn carries, each column divided by its largest value."""

    def made() -> Rows:
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")()
        x = torch.from_numpy(found.data / np.abs(found.data).max(0)).float()
        y = torch.from_numpy(found.target).long()
        order = torch.from_numpy(np.random.RandomState(0).permutation(len(y)))
        x, y, parted = x[order], y[order], 7 * len(y) // 10
        return x[:parted], y[:parted], x[parted:], y[parted:]

    return made


TASKS = (
    Task("hard table, 2 classes", "selection", overlapping(2, 20, 0.6, 0), 2000, "linear"),
    Task("hard table, 2 classes, MLP", "selection", overlapping(2, 20, 0.6, 0), 2000, "mlp"),
    Task("breast cancer", "selection", bundled("breast_cancer"), 398, "linear"),
    Task("digits MLP", "selection", "digits", 1437, "mlp"),
    Task("digits CNN", "selection", "digits", 1437, "cnn"),
    Task("Adult, 1,000 rows", "selection", "adult", 1000, "linear"),
    Task("Sonar", "selection", "sonar", 166, "linear"),
    Task("Covertype MLP, 4,000 rows", "selection", "covertype", 4000, "mlp"),
    Task("hard table, 5 classes", "fresh", overlapping(5, 10, 1.0, 1), 4000, "linear"),
    Task("wine", "fresh", bundled("wine"), 124, "linear"),
    Task("iris", "fresh", bundled("iris"), 105, "mlp"),
    Task("digits, linear on pixels", "fresh", "digits", 1437, "linear"),
)


def rows(task: Task) -> Rows:
    """Training and test rows."""
    if callable(task.source):
        x, y, xt, yt = task.source()
        return x[: task.rows], y[: task.rows], xt, yt
    found = dpgrad.data.load(task.source)
    order = np.random.RandomState(0).permutation(len(found.y_train))[: task.rows]
    x, xt = _dense(found.x_train[order]), _dense(found.x_test[:TEST])
    return x, torch.from_numpy(found.y_train[order]).long(), xt, torch.from_numpy(found.y_test[:TEST]).long()


def _dense(part: Any) -> Tensor:
    return torch.from_numpy(np.asarray(part if isinstance(part, np.ndarray) else part.toarray(), np.float32))


def judged(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, log loss and expected calibration error in equal bins (Guo et al., 2017)."""
    with torch.no_grad():
        logits = model(x)
    sure, told = logits.softmax(1).max(1)
    right = (told == y).double()
    place = (sure * BINS).long().clamp(max=BINS - 1)
    gaps = [float((sure[place == k].double() - right[place == k]).sum().abs()) for k in range(BINS)]
    loss = float(F.cross_entropy(logits.double(), y))
    return {"accuracy": 100 * float(right.mean()), "loss": loss, "error": 100 * sum(gaps) / len(y)}


def cell(task: Task, epsilon: float, keys: int) -> dict[str, Any]:
    """One task at one budget: without and with a temperature."""
    x, y, xt, yt = rows(task)
    classes = int(y.max()) + 1
    shares = torch.bincount(y, minlength=classes).double() / len(y)
    found: dict[str, Any] = {"constant": float(-shares[yt].log().mean())}
    for name, share in (("without", None), ("with", SHARE)):
        of_keys = []
        for seed in range(keys):
            torch.manual_seed(seed)
            model = build(task.model, tuple(x.shape[1:]), classes)
            method = dpgrad.recipes.auto(temperature=share)
            fitted = dpgrad.fit(model, (x, y), epsilon=epsilon, delta=DELTA, method=method, seed=100 + seed)
            noise = fitted.plan.mechanism.noise_multiplier
            of_keys.append({**judged(model, xt, yt), "temperature": fitted.temperature or 1.0, "noise": noise})
        found[name] = {key: statistics.mean(one[key] for one in of_keys) for key in of_keys[0]}
    print(task.name, epsilon, found, file=sys.stderr, flush=True)
    return {"task": task.name, "part": task.part, "rows": len(y), "epsilon": epsilon, **found}


def _cell(pair: tuple[int, float, int]) -> dict[str, Any]:
    place, epsilon, keys = pair
    return cell(TASKS[place], epsilon, keys)


def sections(cells: list[dict[str, Any]], keys: int) -> list[str]:
    """The sections of the page of results."""
    said = (
        f"Method auto without a temperature and with `temperature={SHARE:g}`, on test rows, with "
        f"{keys} key{'' if keys == 1 else 's'} each; "
        "log loss, expected calibration error in percentage points, and accuracy in percent. The constant always "
        "answers with the shares of the classes among the training rows, which are private."
    )
    heads = ["task", "part", "rows", "ε", "T", "log loss", "with T", "constant", "ECE", "with T", "accuracy", "with T"]
    body = []
    for one in cells:
        before, after = one["without"], one["with"]
        body.append(
            [one["task"], one["part"], f"{one['rows']:,}", f"{one['epsilon']:g}", f"{after['temperature']:.1f}",
             f"{before['loss']:.3f}", f"{after['loss']:.3f}", f"{one['constant']:.3f}", f"{before['error']:.1f}",
             f"{after['error']:.1f}", f"{before['accuracy']:.1f}", f"{after['accuracy']:.1f}"]
        )  # fmt: skip
    return [said, environment.table(_summary(cells)), environment.table([heads, *body])]


def _summary(cells: list[dict[str, Any]]) -> list[list[str]]:
    table = [["tasks", "pairs", "log loss", "with T", "ECE", "with T", "accuracy", "with T", "log loss falls",
              "rises by more than 0.01", "noise"]]  # fmt: skip
    for part in ("selection", "fresh"):
        of_part = [one for one in cells if one["part"] == part]

        def mean(which: str, key: str, some: list[dict[str, Any]] = of_part) -> float:
            return statistics.mean(one[which][key] for one in some)

        rise = [one["with"]["loss"] - one["without"]["loss"] for one in of_part]
        noise = statistics.mean(one["with"]["noise"] / one["without"]["noise"] for one in of_part)
        table.append(
            [part, str(len(of_part)), f"{mean('without', 'loss'):.3f}", f"{mean('with', 'loss'):.3f}",
             f"{mean('without', 'error'):.1f}", f"{mean('with', 'error'):.1f}", f"{mean('without', 'accuracy'):.2f}",
             f"{mean('with', 'accuracy'):.2f}", str(sum(one < 0 for one in rise)), str(sum(one > 0.01 for one in rise)),
             f"+{100 * (noise - 1):.2f} %"]
        )  # fmt: skip
    return table


def main() -> None:
    """Train, and write the results."""
    parser = argparse.ArgumentParser(description="temperatures")
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    keys = given.keys
    pairs = [(place, epsilon, keys) for place in range(len(TASKS)) for epsilon in BUDGETS]
    with ProcessPoolExecutor(given.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        cells = list(pool.map(_cell, pairs))
    data = {"environment": environment.describe("benchmarks.temperature"), "cells": cells}
    environment.write("temperature", data, "Probabilities of method auto with a temperature", sections(cells, keys))


if __name__ == "__main__":
    main()
