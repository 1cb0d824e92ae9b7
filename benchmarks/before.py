"""A private step of this tree beside that of another tree of dpgrad, such as a release, on a CPU.

    git worktree add ../old v0.1.0
    python -m benchmarks.before ../old [--workloads mlp ...] [--rounds 9] [--write]

Each tree has a process of its own, which takes steps when it is told to. They take turns. A figure is the median over
rounds of the ratio of processor times in the same round, beside the least and the largest ratio. Networks and data are
those of this tree's `benchmarks.steps`. Steps are forward, backward, clipping, noise and SGD on Poisson lots.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.steps.workloads import WORKLOADS

# Those of the table of engines; WRN-16-4 stands for ResNet-9, which is made by the package itself since 0.2.0.
ROWS = ("mlp", "mlp-50", "mnist-cnn", "wrn-16-4", "char-lstm", "lstm", "transformer")


class Tree:
    """A process that takes private steps with the package of one tree."""

    def __init__(self, root: Path, workload: str) -> None:
        path = os.pathsep.join([str(root / "src"), str(environment.ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.steps.served", workload],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=environment.ROOT,
        )  # fmt: skip
        self.seconds(0)  # of the first steps, which set up what the others need

    def seconds(self, least: float) -> float:
        """Of processor time, for one step: of as many as take ``least`` seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(least, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measured(name: str, old: Path, rounds: int, least: float) -> dict[str, Any]:
    """The ratio of this tree's step to the other's."""
    trees = [Tree(environment.ROOT, name), Tree(old, name)]
    took = [[tree.seconds(least) for tree in trees] for _ in range(rounds)]
    for tree in trees:
        tree.close()
    ratios = [now / before for now, before in took]
    workload = WORKLOADS[name].on("cpu")
    return {
        "network": workload.title, "batch": workload.batch_size,
        "now_ms": 1e3 * statistics.median(now for now, _ in took),
        "before_ms": 1e3 * statistics.median(before for _, before in took),
        "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="the other tree, with its src/dpgrad")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="the least that one turn takes")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/before.{json,md}")
    given = parser.parse_args()
    if not (given.tree / "src" / "dpgrad").is_dir():
        print(f"benchmarks.before: {given.tree} has no src/dpgrad", file=sys.stderr)
        return 2
    rows = []
    for name in given.workloads:
        rows.append(measured(name, given.tree.resolve(), given.rounds, given.seconds))
        print(rows[-1], flush=True)
    if given.write:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=given.tree, capture_output=True, text=True, check=False
        ).stdout.strip()
        table = [["network", "batch", "ms now", "ms before", "now / before"]]
        table += [
            [row["network"], str(row["batch"]), f"{row['now_ms']:.3g}", f"{row['before_ms']:.3g}",
             f"{row['ratio']:.2f} ({row['least']:.2f}–{row['most']:.2f})"]
            for row in rows
        ]  # fmt: skip
        ran = environment.describe("benchmarks.before", ["OLD", *sys.argv[2:]])
        how = (
            f"The private step of this tree and of commit {commit}, by turns: medians over {given.rounds} rounds of "
            "the processor time of a step, and of the ratio in one round (least and largest beside it); one thread."
        )
        environment.write(
            "before", {"environment": ran, "before": commit, "rounds": given.rounds, "rows": rows},
            "The private step beside that of an earlier version, on a CPU", [how, environment.table(table)],
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
