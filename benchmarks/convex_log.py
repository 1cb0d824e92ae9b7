"""The outcomes of the convex tables: kept in files, one per dataset, and a table's missing trials run.

`complete` runs the trials of a cell and writes each outcome as soon as it is there, so that a run that was stopped goes
on where it was. The setting of a solver with a grid is the one of best mean accuracy on the test split, and the choice
is not charged, as in the paper; a solver with one setting is not tuned.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dpgrad.papers.convex import SOLVERS, FitTrial, Prepared, Scored, Setting, outcome


class ScoreLog:
    """The outcomes in a JSON file, one per line: written whole after each new one, with what others wrote meanwhile."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.outcomes: dict[FitTrial, Scored] = {}
        self._read()

    def _read(self) -> None:
        found = json.loads(self.file.read_text("utf-8")) if self.file.exists() else []
        self.outcomes |= {one.trial: one for one in map(_read, found)}

    def add(self, one: Scored) -> None:
        """Keep an outcome."""
        self._read()
        self.outcomes[one.trial] = one
        lines = ",\n".join(json.dumps(_flat(one)) for one in self.outcomes.values())
        part = self.file.with_suffix(".part")
        part.write_text(f"[\n{lines}\n]\n", "utf-8")
        os.replace(part, self.file)


def _flat(one: Scored) -> dict[str, Any]:
    return {
        **asdict(one.trial), "setting": dict(one.trial.setting), "accuracy": round(one.accuracy, 4),
        "auc": None if one.auc is None else round(one.auc, 5), "risk": round(one.risk, 7),
        "seconds": round(one.seconds, 3), "source": one.source,
    }  # fmt: skip


def _read(line: Mapping[str, Any]) -> Scored:
    trial = FitTrial(line["dataset"], line["solver"], line["epsilon"], tuple(line["setting"].items()), line["run"])
    return Scored(trial, line["accuracy"], line["auc"], line["risk"], line["seconds"], line.get("source"))


def complete(
    task: Prepared, log: ScoreLog, solver: str, epsilon: float | None, *, runs: int = 20, pilot: int = 3
) -> Iterator[Scored]:
    """Run what is missing of a cell of the table: a pilot of every setting of the grid, then the best of them."""
    grid = SOLVERS[solver].grid(task)
    first = FitTrial(task.name, solver, epsilon)
    if len(grid) > 1:
        for setting in grid:
            yield from repeated(task, log, replace(first, setting=setting), min(pilot, runs))
    yield from repeated(task, log, replace(first, setting=best(log.outcomes.values(), first, grid, pilot)), runs)


def repeated(task: Prepared, log: ScoreLog, trial: FitTrial, runs: int) -> Iterator[Scored]:
    """Run what is missing of so many runs of one trial."""
    for run in range(runs):
        one = replace(trial, run=run)
        if one not in log.outcomes:
            log.add(outcome(task, one))
            yield log.outcomes[one]


def best(outcomes: Iterable[Scored], like: FitTrial, grid: Sequence[Setting], pilot: int) -> Setting:
    """The setting of the best mean accuracy on the test split over the first ``pilot`` runs."""
    if len(grid) == 1:
        return grid[0]
    found: dict[Setting, list[float]] = {setting: [] for setting in grid}
    for one in outcomes:
        same = replace(one.trial, setting=(), run=0) == replace(like, setting=(), run=0)
        if same and one.trial.setting in found and one.trial.run < pilot:
            found[one.trial.setting].append(one.accuracy)
    return max(found, key=lambda setting: statistics.fmean(found[setting] or [-math.inf]))
