"""Method auto beside a grid search that is tuned on the test set, over tasks and budgets.

    python -m benchmarks.defaults [--tasks selection|judged|all|NAME ...] [--epsilon 1 3 8] [--device cuda]
                                  [--processes N] [--rows FILE] [--prepared DIR] [--prepare] [--write]

Each task is trained at each ε (δ = 1e-5) with method auto, with the default of 0.1.0 (clip 12, learning rate 0.02, 20
epochs), and with every setting of a grid. The three settings of the grid that score best *on the test set* are run with
a second key, and "best" is the best mean: an upper reference that no honest method has. Method auto is the mean of the
same two keys. The grid has the steps and batches of auto, and three times the steps, which
shows where the rule takes too few. Tasks marked selection were looked at while the rule was found, judged ones not.

Results are appended to ``--rows`` as they come, and a stopped run goes on from there. ``--prepared`` keeps the rows of
all tasks in small files, from which another machine can run without the datasets; ``--prepare`` does no more than that.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.defaults.grid import DELTA, FINALISTS, KEYS, OLD, Job, done, finals, grid, jobs
from benchmarks.defaults.tasks import TASKS, Task, prepare


def prepared(tasks: list[Task], folder: Path) -> None:
    """Write the rows of the tasks, one source after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted({task.source for task in tasks} | {task.start for task in tasks if task.start}):
        prepare(source, folder)


def measure(wanted: list[Job], known: dict[Job, float], given: argparse.Namespace, folder: Path) -> None:
    """Run what is not known yet; every result is on disk before the next is waited for."""
    left = [job for job in wanted if job not in known]
    if not left:
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.processes) as pool, given.rows.open("a", encoding="utf-8") as kept:
        print(json.dumps(environment.describe("benchmarks.defaults")), file=kept, flush=True)
        results = pool.imap_unordered(partial(done, folder=folder, device=given.device), left)
        for count, (job, found, why) in enumerate(results):
            said = "failed: " + why if found is None else f"{found:.2f}"
            print(f"{count + 1}/{len(left)} {job.task}, ε = {job.epsilon:g}, {job.setting}: {said}", file=sys.stderr)
            if found is not None:
                known[job] = found
                print(json.dumps([job.task, job.epsilon, job.setting, job.seed, found]), file=kept, flush=True)


def compared(tasks: list[Task], budgets: list[float], known: dict[Job, float]) -> list[dict[str, Any]]:
    """One row a task and budget where all of it is known: auto, the old default, the best of the grid."""
    found = []
    for task in tasks:
        for epsilon in budgets:
            own = [known.get(Job(task.name, epsilon, "auto", seed)) for seed in range(KEYS)]
            first = [name for name in grid() if Job(task.name, epsilon, name) in known]
            others = {
                name: sum(known[Job(task.name, epsilon, name, seed)] for seed in range(KEYS)) / KEYS
                for name in first
                if all(Job(task.name, epsilon, name, seed) in known for seed in range(KEYS))
            }
            measured = len(first) == len(grid()) and len(others) >= FINALISTS
            if None in own or not measured or Job(task.name, epsilon, OLD) not in known:
                continue
            best = max(others, key=lambda name: others[name])
            mean = sum(value for value in own if value is not None) / KEYS
            found.append(
                {
                    "task": task.name, "part": task.part, "points": task.points, "rows": task.rows, "epsilon": epsilon,
                    "old": known.get(Job(task.name, epsilon, OLD)), "auto": mean, "best": others[best],
                    "best_setting": best, "behind": others[best] - mean, "settings": len(first),
                }
            )  # fmt: skip
    return found


def sections(found: list[dict[str, Any]]) -> list[str]:
    """The summary and the table, as Markdown."""
    lines = []
    for part in ("selection", "judged", "all"):
        some = [row for row in found if part in (row["part"], "all")]
        if some:
            behind, old = ([row["best"] - row[name] for row in some] for name in ("auto", "old"))
            where = max(some, key=lambda row: row["behind"])
            least = sum(max(0.0, gap) for gap in behind)
            lines.append(
                [
                    part, str(len({row["task"] for row in some})), f"{sum(behind) / len(behind):.2f}",
                    f"{least / len(behind):.2f}", f"{max(behind):.1f} ({where['task']}, ε = {where['epsilon']:g})",
                    f"{sum(old) / len(old):.1f}",
                ]
            )  # fmt: skip
    heads = [
        "tasks", "number", "auto: mean behind", "with ahead as 0", "auto: most behind", "0.1.0: mean behind",
    ]  # fmt: skip
    summary = environment.table([heads, *lines])
    columns = ["task", "part", "points", "rows", "ε", "0.1.0", "auto", "best of the grid", "which", "behind"]
    listed = [
        [
            row["task"], row["part"], row["points"], f"{row['rows']:,}", f"{row['epsilon']:g}", f"{row['old']:.1f}",
            f"{row['auto']:.1f}", f"{row['best']:.1f}", row["best_setting"], f"{row['behind']:.1f}",
        ]
        for row in found
    ]  # fmt: skip
    missing = 3 * len(TASKS) - len(found)
    return [
        *([f"**Partial**: {missing} of {3 * len(TASKS)} pairs of task and ε are not measured yet."] if missing else []),
        f"δ = {DELTA:g}; points are accuracy or R² on the test rows, times 100. Auto is the mean of {KEYS} keys. Of "
        f"{len(grid())} settings with one key, the {FINALISTS} best on the test rows were run with the other; the best "
        "mean is shown. Tasks of the selection were looked at while the rule was found, judged ones were not.",
        summary,
        environment.table([columns, *listed]),
    ]


def _read(file: Path) -> tuple[dict[Job, float], dict[str, Any]]:
    """The results that are known, and where the last of them were made."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    ran = [line for line in lines if isinstance(line, dict)]
    return {Job(*line[:4]): line[4] for line in lines if isinstance(line, list)}, ran[-1] if ran else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["all"], help="selection, judged, all, or names")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="for the larger tasks")
    parser.add_argument("--processes", type=int, default=1, help="with 0, only what is in --rows is shown")
    parser.add_argument("--rows", type=Path, default=Path("defaults.jsonl"), help="where results are kept as they come")
    parser.add_argument("--prepared", type=Path, help="where the rows of the tasks are kept")
    parser.add_argument("--prepare", action="store_true", help="prepare the rows and stop")
    parser.add_argument("--write", action="store_true", help="commit to these results")
    given = parser.parse_args()
    tasks = [task for task in TASKS if {"all", task.part, task.name} & set(given.tasks)]
    if not tasks:
        parser.error(f"--tasks must be selection, judged, all or names: {', '.join(task.name for task in TASKS)}")
    with tempfile.TemporaryDirectory() as own:
        folder = given.prepared or Path(own)
        known, _ = _read(given.rows)
        wanted = list(jobs(tasks, given.epsilon))
        if given.prepare or (given.processes and any(job not in known for job in wanted)):
            prepared(tasks, folder)
        if given.prepare:
            return 0
        if given.processes:
            measure(wanted, known, given, folder)
            measure(list(finals(tasks, given.epsilon, known)), known, given, folder)
    known, ran = _read(given.rows)
    found = compared(tasks, given.epsilon, known)
    print("\n\n".join(sections(found)))
    if given.write:
        runs = [[job.task, job.epsilon, job.setting, job.seed, value] for job, value in known.items()]
        made = {"environment": ran, "compared": found, "runs": runs}
        environment.write("defaults", made, "Method auto beside a grid search tuned on the test set", sections(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
