"""Steps of several ranks beside those of one process, in one run.

    python -m benchmarks.ranks [--device cuda] [--workloads mlp ...] [--rounds 7] [--steps 5] [--write]

On a CPU one process with one thread takes turns with two ranks (gloo) of one thread each; the batch is the same, so
that two ranks at their best take half the time. The *seam* is the step of one rank that exchanges its sums with itself,
beside the plain step in the same process: all that several ranks add to a step but waiting and sending. On a CUDA
device only the seam is measured, by NCCL at world size 1. A figure is the median over rounds of the ratio to the plain
step in the same round. Results go to benchmarks/results/ranks.{json,md}, or ranks_cuda.
"""

import argparse
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import environment
from benchmarks.steps.workloads import LOTS, WORKLOADS, Workload
from dpgrad import Mechanism, PrivateGradient, sampling

USUAL = {"cpu": ("mlp", "mnist-cnn", "stack-32"), "cuda": ("mnist-cnn", "resnet9", "wrn-16-4")}


def stepper(work: Workload, device: str, group: Any = None) -> Callable[[int], float]:
    """A function that takes so many private steps and returns the seconds of one."""
    torch.manual_seed(0)
    model, data = work.make().to(device), work.data(device)
    plan = Mechanism(sampling.Poisson(1 / LOTS), 10**5, 1.0, batch_size=float(work.batch_size))
    private = PrivateGradient(model, work.loss, plan, seed=1, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def take(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            private.step(data)
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    return take


def _rank(rank: int, store: str, names: list[str], device: str, orders: Connection) -> None:
    """One of two ranks, which takes steps when it is told to."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    steppers = {name: stepper(WORKLOADS[name].on(device), device) for name in names}
    while (order := orders.recv()) is not None:
        orders.send(steppers[order[0]](order[1]))


def measured(names: list[str], device: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each workload."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    pipes, context = [], mp.get_context("spawn")
    for rank in range(2) if device == "cpu" else ():
        ours, theirs = context.Pipe()
        given = (rank, f"file://{folder}/two", names, device, theirs)
        context.Process(target=_rank, args=given, daemon=True).start()
        pipes.append(ours)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/one", rank=0, world_size=1
    )
    rows = [_row(name, device, pipes, rounds, steps) for name in names]
    for pipe in pipes:
        pipe.send(None)
    dist.destroy_process_group()
    return rows


def _row(name: str, device: str, pipes: list[Connection], rounds: int, steps: int) -> dict[str, Any]:
    work = WORKLOADS[name].on(device)
    plain, seam = stepper(work, device), stepper(work, device, dist.group.WORLD)
    values = sum(parameter.numel() for parameter in work.make().parameters())

    def two() -> float:
        for pipe in pipes:
            pipe.send((name, steps))
        return max(pipe.recv() for pipe in pipes)

    kinds: dict[str, Callable[[], float]] = {"plain": lambda: plain(steps), "seam": lambda: seam(steps)}
    if pipes:
        kinds["two ranks"] = two
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for at in range(rounds + 1):
        for kind, take in kinds.items():
            found = take()
            if at:  # the first steps choose kernels and record code
                seconds[kind].append(found)
    ratios = {
        kind: statistics.median(one / other for one, other in zip(found, seconds["plain"], strict=True))
        for kind, found in seconds.items()
        if kind != "plain"
    }
    return {
        "workload": name,
        "title": work.title,
        "batch_size": work.batch_size,
        "values": values,
        "milliseconds": 1e3 * statistics.median(seconds["plain"]),
        "ratios": ratios,
        "seconds": seconds,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    rows = measured(list(args.workloads or USUAL[args.device]), args.device, args.rounds, args.steps)
    found = {"environment": environment.describe("benchmarks.ranks", argv), "results": rows}
    head = ["workload", "batch", "trained values", "plain step, ms", "seam", "two ranks"]
    lines = [
        [
            row["title"],
            str(row["batch_size"]),
            f"{row['values']:,}",
            f"{row['milliseconds']:.1f}",
            *(f"{row['ratios'][kind]:.2f}" if kind in row["ratios"] else "" for kind in ("seam", "two ranks")),
        ]
        for row in rows
    ]
    said = (
        f"Medians over {args.rounds} rounds of {args.steps} steps, in which they take turns, of the ratio to the plain "
        "step of one process in the same round; one thread per process. At its best a step of two ranks takes 0.50. "
        "The load in the line above counts what else ran: where it exceeds the cores, ranks wait for a core, and the "
        "figures say little about scaling."
    )
    table = environment.table([head, *lines])
    print(table)
    if args.write:
        name = "ranks" if args.device == "cpu" else f"ranks_{args.device}"
        environment.write(name, found, f"Steps of several ranks, on {args.device}", [said, table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
