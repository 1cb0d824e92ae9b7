"""One run of the comparison: a task, a budget and a setting of the grid; imported by every process."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.defaults.tasks import TASKS, Task, model, rows, score
from dpgrad import fit, recipes
from dpgrad.papers.tasks import whole
from dpgrad.training import auto
from dpgrad.training.recipes import Recipe

DELTA, KEYS, FINALISTS = 1e-5, 2, 3
OLD = "0.1.0"


@dataclass(frozen=True)
class Job:
    """One run: a task, a budget, a setting by name, and a seed."""

    task: str
    epsilon: float
    setting: str
    seed: int = 0


def grid() -> dict[str, tuple[Recipe, float]]:
    """The settings of the search: a recipe, and how many times the steps of method auto."""
    found: dict[str, tuple[Recipe, float]] = {}
    for times, rates in ((1.0, (0.001, 0.003, 0.01, 0.03, 0.1)), (3.0, (0.001, 0.005))):
        for rate in rates:
            made = recipes.dpsgd(optimizer="adam", clip=1.0, learning_rate=rate, learning_rate_schedule="linear")
            found[f"adam {rate:g}{'' if times == 1 else f', {times:g}x steps'}"] = made, times
    for clip, rates in ((1.0, (0.03, 0.1, 0.3, 1.0, 3.0)), (0.1, (1.0, 3.0, 10.0))):
        for rate in rates:
            made = recipes.dpsgd(momentum=0.9, clip=clip, learning_rate=rate, learning_rate_schedule="linear")
            found[f"sgd {rate:g}, clip {clip:g}"] = made, 1.0
    return found


def trained(job: Job, folder: Path, device: str) -> float:
    """The score of one run."""
    (task,) = (task for task in TASKS if task.name == job.task)
    device = device if task.heavy else "cpu"
    x, y, _, _ = rows(task, folder, device)
    length: dict[str, Any] = {}
    method: str | Recipe = "auto"
    if job.setting == OLD:
        method, length = "dpsgd", {"epochs": 20}
    elif job.setting != "auto":
        method, times = grid()[job.setting]
        steps = round(times * auto.steps_for(len(y)))
        size = min(len(y), max(1, round(auto.epochs(job.epsilon) * len(y) / steps)))
        length = {"steps": steps, "batch_size": size}
    found = model(task, folder, device, job.seed)
    whole(fit(found, (x, y), task.loss, epsilon=job.epsilon, delta=DELTA, method=method, seed=job.seed + 1, **length))
    return score(task, found, folder, device)


def jobs(tasks: list[Task], budgets: list[float]) -> Iterator[Job]:
    """All runs of the first key, and those of method auto with every key; those that take longest first."""
    for task in sorted(tasks, key=lambda task: (not task.heavy, -task.rows)):
        for epsilon in budgets:
            yield from (Job(task.name, epsilon, "auto", seed) for seed in range(KEYS))
            yield from (Job(task.name, epsilon, setting) for setting in (OLD, *grid()))


def finals(tasks: list[Task], budgets: list[float], known: dict[Job, float]) -> Iterator[Job]:
    """The runs with the further keys of the settings that were best with the first."""
    for task in tasks:
        for epsilon in budgets:
            found = {name: known[job] for name in grid() if (job := Job(task.name, epsilon, name)) in known}
            for setting in sorted(found, key=lambda name: -found[name])[:FINALISTS]:
                yield from (Job(task.name, epsilon, setting, seed) for seed in range(1, KEYS))


def done(job: Job, folder: Path, device: str) -> tuple[Job, float | None, str]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return job, trained(job, folder, device), ""
    except Exception as error:  # a setting that fails is reported, and the others go on
        return job, None, f"{type(error).__name__}: {error}"
