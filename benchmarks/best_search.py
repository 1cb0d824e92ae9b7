"""The search for the settings of our best runs, on a split of the training rows: the test rows are not read.

    python -m benchmarks.best_search mnist fashion-mnist-9 --device cuda --processes 12 --seconds 60

For each task three rounds, by accuracy on held-out training rows: the known setting with one value changed (coarse);
what gained together, and neighbours of the best (fine); the best few with all views of an image and more seeds (sure).
The best of the last round is written to ``best.json``, which `dpgrad.papers.best` reads. Every trial is a line of
``--log`` and is not run again, so a stopped search goes on. ``--seconds`` bounds each task; a trial that has begun
ends.

Guarantee: none. The choice looks at private rows and is not charged to the budgets of the runs; every table says so.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgrad.errors import DpgradError, OptionError
from dpgrad.papers import best_models, best_tasks, running
from dpgrad.papers.best_tasks import TASKS, BestTask

__all__ = ["SPACES", "SearchLog", "SearchTrial", "chosen", "main", "neighbours", "proposals", "searched", "together"]

Setting = dict[str, Any]
Space = Mapping[str, Sequence[Any]]
_ABSENT: Setting = {"standardized": False, **dict.fromkeys(best_models.PEOPLE, 1.0)}  # what a missing value means
_SHARES = (0.45, 0.7, 1.0)  # of the seconds of a task, when each of the three rounds ends
_FINALISTS, _SEEDS = 3, 2

_REACH = (0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1, 1.6, 2.2)
_IMAGES: dict[str, tuple[Any, ...]] = {
    "reach": _REACH, "pool": ("none", "max", "mean"), "norm": ("groups", "paths", "local"),
    "clip": (0.03, 0.1, 0.3, 1.0), "width": (32, 64, 128), "averaging": ("ema:0.98", "ema:0.99", "ema:0.995"),
    "steps": (600, 900, 1300),
    "schedule": ("constant", "linear:0.2"), "rule": ("hard", "automatic"),
}  # fmt: skip
_LINEAR: dict[str, tuple[Any, ...]] = {
    "reach": (0.012, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6),
    "clip": (0.01, 0.03, 0.1, 0.3, 1.0), "averaging": ("ema:0.95", "ema:0.98", "ema:0.99"),
    "schedule": ("constant", "linear:0.2"), "rule": ("hard", "automatic"),
}  # fmt: skip
_PEOPLE = ("education", "marital", "occupation", "relationship", "sex", "age", "schooling", "gain", "loss", "hours")
# Of each task the values that are tried, in order: those beside each other are neighbours, and what matters most comes
# first. The share of rows in a lot is near the best that the accountant allows, which is seen without a row.
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "mnist": _IMAGES,
    "fashion-mnist-9": _IMAGES,
    "fashion-mnist-3": _IMAGES,
    "mnist-replace-one": {
        **_LINEAR, "norm": ("groups", "local", "paths"), "steps": (100, 200, 400), "width": (8, 16, 32),
    },
    "imagenette": {
        **_IMAGES, "standardized": (False, True), "width": (16, 32, 64), "steps": (250, 400, 600),
        "norm": ("paths", "local"),
    },
    "cifar10-features": {**_LINEAR, "norm": ("none", "unit"), "steps": (200, 300, 450)},
    "covertype": {
        **_LINEAR, "knots": (16, 32, 64), "widths": ([32], [64], [128], [64, 32]), "steps": (800, 1600, 3200),
        "norm": ("none", "unit"),
    },
    "adult-convex": {
        **dict.fromkeys(_PEOPLE, (0.0, 0.5, 0.7, 1.0, 1.4, 2.0)), "kappa": (0.7, 1.0, 1.4),
        "gain_by": (10.0, 20.0, 40.0), "loss_by": (10.0, 20.0, 40.0), "age_by": (1.5, 2.0, 2.5),
        "hours_by": (1.0, 1.6, 2.2),
    },
    "mnist-convex-pixels": {
        "power": (0.7, 1.0), "blur": (0.0, 0.5, 0.8, 1.2), "kappa": (0.7, 1.0, 1.2, 1.4), "pool": (1, 2),
    },
    "mnist-convex": {"kappa": (0.5, 0.7, 1.0, 1.4), "cell": (4, 7), "bins": (6, 8, 12)},
}  # fmt: skip
# Rounds one and two take fewer views of an image: they cost as many passes.
_QUICKLY = {
    "mnist": "one", "mnist-replace-one": "one", "fashion-mnist-9": "mirror", "fashion-mnist-3": "mirror",
    "imagenette": "mirror",
}  # fmt: skip


@dataclass(frozen=True)
class SearchTrial:
    """One setting of a task with one seed."""

    task: str
    setting: Setting
    seed: int

    @property
    def key(self) -> str:
        """What tells it from others, as text."""
        return json.dumps([self.task, self.setting, self.seed], sort_keys=True)


class SearchLog:
    """The trials in a file, one JSON object per line; several searches may add to it."""

    def __init__(self, path: Path) -> None:
        self._log = running.TrialLog(path, {"task": str, "stage": int, "setting": dict, "seed": int})
        self.found = {SearchTrial(one["task"], one["setting"], one["seed"]).key: one for one in self._log.lines}

    def add(self, trial: SearchTrial, figures: Mapping[str, Any], stage: int = 0) -> None:
        """Keep a trial of a round."""
        line = {"task": trial.task, "stage": stage, "setting": trial.setting, "seed": trial.seed, **figures}
        with self._log.writing(wait=True) as add:
            add(line)
        self.found[trial.key] = self._log.lines[-1]

    def ranked(self, task: str, before: int = 3) -> list[tuple[float, int, Setting]]:
        """Mean accuracy, number of seeds and setting of what was tried before a round, the best first, no failures."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for one in self.found.values():
            if one["task"] == task and one["stage"] < before and one.get("accuracy") is not None:
                groups.setdefault(json.dumps(one["setting"], sort_keys=True), []).append(one)
        means = [
            (statistics.fmean(one["accuracy"] for one in ran), len(ran), ran[0]["setting"]) for ran in groups.values()
        ]
        return sorted(means, key=lambda one: -one[0])


def _near(setting: Setting, space: Space, name: str, apart: Sequence[int] = (1, -1)) -> list[Setting]:
    """The setting with one value moved by so many places in the space."""
    values = list(space[name])
    if setting.get(name, _ABSENT.get(name)) not in values:
        return []
    at = values.index(setting.get(name, _ABSENT.get(name)))
    return [{**setting, name: values[near]} for near in (at + by for by in apart) if 0 <= near < len(values)]


def neighbours(setting: Setting, space: Space) -> Iterator[Setting]:
    """The settings with one value moved, by the order of the space.

    >>> list(neighbours({"clip": 0.1}, {"clip": (0.03, 0.1, 0.3)}))
    [{'clip': 0.3}, {'clip': 0.03}]
    """
    for name in space:
        yield from _near(setting, space, name)


def together(start: Setting, scores: Sequence[tuple[float, Setting]]) -> Iterator[Setting]:
    """The changes of one value that gained, applied together: all of them, the best three, the best two.

    >>> list(together({"a": 0, "b": 0}, [(9.0, {"a": 1, "b": 0}), (8.0, {"a": 0, "b": 2}), (7.0, {"a": 0, "b": 0})]))
    [{'a': 1, 'b': 2}]
    """
    floor = next((mean for mean, setting in scores if setting == start), None)
    gains: dict[str, Any] = {}
    for mean, setting in scores:
        changed = [name for name in setting if setting[name] != start.get(name)]
        if floor is not None and mean > floor and len(changed) == 1:
            gains.setdefault(changed[0], setting[changed[0]])
    for most in sorted({len(gains), min(3, len(gains)), min(2, len(gains))}, reverse=True):
        if most > 1:
            yield {**start, **dict(list(gains.items())[:most])}


def proposals(task: BestTask, trials: SearchLog, stage: int, count: int) -> list[SearchTrial]:
    """The trials of a round: 0 coarse, 1 fine, 2 sure. They follow from those of the rounds before and from no chance.

    >>> tried = proposals(TASKS["mnist"], SearchLog(Path("absent")), 0, 3)
    >>> [trial.setting["reach"] for trial in tried], tried[0].setting["views"]
    ([0.4, 0.56, 0.28], 'one')
    """
    space = SPACES[task.name]
    fewer = {"views": _QUICKLY[task.name]} if task.name in _QUICKLY else {}
    start, *others = ({**one, **fewer} for one in (task.start, *task.others))
    scores = [(mean, setting) for mean, _, setting in trials.ranked(task.name, stage)]
    best = [setting for _, setting in scores if setting.get("views") == start.get("views")]
    if stage == 0:
        wide = _near(start, space, "reach", (1, -1, 3, -3)) if "reach" in space else []
        made = [start, *wide, *others, *neighbours(start, space)]
    elif stage == 1:
        made = [*together(start, scores), *(each for one in best[:2] for each in neighbours(one, space))]
    else:
        finalists = [*best[:2], *(_near(best[0], space, "reach")[:1] if best and "reach" in space else best[2:3])]
        full = [{**each, "views": task.start["views"]} if "views" in start else each for each in finalists]
        return [SearchTrial(task.name, setting, seed) for seed in range(_SEEDS) for setting in full[:_FINALISTS]]
    found = {trial.key: trial for trial in (SearchTrial(task.name, setting, 0) for setting in made)}
    old = {key for key, one in trials.found.items() if one["stage"] < stage}
    return [trial for key, trial in found.items() if key not in old][:count]


def _scored(trial: SearchTrial, device: str, root: Path | None, size: str) -> dict[str, Any]:
    """Run a trial on the split of the training rows; a setting that fails is kept as a failure."""
    from dpgrad.papers import best_training

    task, setting = TASKS[trial.task], best_training.smaller(trial.setting, size)
    try:
        seeds = [1000 + task.repeats * trial.seed + more for more in range(task.repeats)]
        runs = [best_training.run(task, setting, "search", size, root, device, seed) for seed in seeds]
        return {**runs[0], "accuracy": statistics.fmean(one["accuracy"] for one in runs)}
    except (DpgradError, RuntimeError) as error:
        return {"accuracy": None, "failed": f"{type(error).__name__}: {error}"[:300]}


def _begun(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _run(
    todo: Iterable[SearchTrial], trials: SearchLog, pool: Executor, most: int, deadline: float, where: tuple[Any, ...]
) -> Iterator[tuple[SearchTrial, dict[str, Any]]]:
    """Run the trials that are not there yet, at most so many at a time, and begin none after the deadline."""
    left = [trial for trial in todo if trial.key not in trials.found]
    running: dict[Future[dict[str, Any]], SearchTrial] = {}
    while left or running:
        while left and len(running) < most and time.monotonic() < deadline:
            running[pool.submit(_scored, left[0], *where)] = left[0]
            del left[0]
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            trial = running.pop(future)
            yield trial, future.result()


def searched(
    task: BestTask, trials: SearchLog, pool: Executor, *, processes: int, seconds: float, counts: Sequence[int],
    where: tuple[Any, ...],
) -> None:  # fmt: skip
    """Run the three rounds of a task."""
    began = time.monotonic()
    for stage, (share, count) in enumerate(zip(_SHARES, (*counts, 0), strict=True)):
        todo = proposals(task, trials, stage, count)
        for trial, figures in _run(todo, trials, pool, processes, began + share * seconds, where):
            trials.add(trial, figures, stage)
            told = figures.get("failed") or f"{figures['accuracy']:.2f}  {figures.get('train_seconds', 0)} s"
            print(f"{task.name} {stage} seed {trial.seed}  {told}  {_apart(trial.setting, task.start)}", flush=True)


def _apart(setting: Setting, start: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in setting.items() if start.get(name) != value) or "start"


def chosen(trials: SearchLog, task: str) -> dict[str, Any] | None:
    """The setting with the best mean among those with the most seeds; None where nothing was tried."""
    ranked = trials.ranked(task)
    if not ranked:
        return None
    most = max(seeds for _, seeds, _ in ranked)
    mean, seeds, setting = next(one for one in ranked if one[1] == most)
    return {"setting": setting, "held_out_accuracy": round(mean, 3), "seeds": seeds, "settings_tried": len(ranked)}


def _written(trials: SearchLog, tasks: Sequence[str]) -> None:
    """Write what was chosen to ``best.json``; tasks that were not searched keep what they have."""
    found = json.loads(best_tasks.CHOSEN.read_text("utf-8"))
    for task in tasks:
        if (best := chosen(trials, task)) is not None:
            found[task] = best
    best_tasks.CHOSEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def _warm(task: BestTask, device: str, root: Path | None, size: str) -> None:
    """Compute what the trials share once, into the folder from which every process reads it."""
    from dpgrad.papers import best_training

    if task.kind != "images":
        return
    for name in {_QUICKLY.get(task.name, task.start["views"]), task.start["views"]}:
        setting = best_training.smaller({**task.start, "views": name}, size)
        best_training.rows_of(task, setting, "search", size, root, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.best_search", description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="+", choices=sorted(SPACES), metavar="TASK", help=", ".join(sorted(SPACES)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="at most this long for each task; default: 60")
    parser.add_argument("--coarse", type=int, default=20, help="settings of the first round; default: 20")
    parser.add_argument("--fine", type=int, default=12, help="settings of the second round; default: 12")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--log", type=Path, default=Path("results/best_search.jsonl"))
    parser.add_argument("--cache", type=Path, default=None, help="a folder for features that processes share")
    parser.add_argument("--size", choices=("full", "quick", "tiny"), default="full")
    args = parser.parse_args(arguments)
    if args.processes < 1 or args.seconds <= 0 or args.coarse < 1 or args.fine < 0:
        raise OptionError("processes and coarse must be at least 1, seconds above 0 and fine at least 0")
    if args.cache is not None:
        from dpgrad.papers import best_views

        os.environ[best_views.CACHE] = str(args.cache)
    trials, where = SearchLog(args.log), (args.device, args.data_dir, args.size)
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // args.processes)
    with ProcessPoolExecutor(args.processes, context, _begun, (threads,)) as pool:
        for name in args.tasks:
            task, counts = TASKS[name], (args.coarse, args.fine)
            if args.cache is not None:
                pool.submit(_warm, task, *where).result()
            searched(task, trials, pool, processes=args.processes, seconds=args.seconds, counts=counts, where=where)
            if args.size == "full":
                _written(trials, [name])
            print(f"{name}: {json.dumps(chosen(trials, name))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
