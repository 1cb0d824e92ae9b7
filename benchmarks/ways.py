"""Time and memory of the three ways to the clipped sum, beside the step without privacy, in one run.

    python -m benchmarks.ways [--device cuda] [--workloads mlp ...] [--rounds 7] [--threads 1] [--write]

The clipped sum alone is measured: forward, backward, norms, factors and the weighted sum; no noise, no optimizer. The
ways take turns, and a figure is the median over rounds of the ratio to the pass without privacy in the same round. On a
CPU it is processor time. On a CUDA device the sum is also captured as a graph, except the certified way, which cannot
be. Memory is the most that torch had allocated above what stood before.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.steps.workloads import WORKLOADS
from dpgrad.grads import bookkeeping, certified, lifted
from dpgrad.grads.clip import PerExample, ZeroRows
from dpgrad.grads.forks import Seen
from dpgrad.grads.scaling import Hard
from dpgrad.grads.sums import Loss

SCALE = partial(Hard(), clip=1.0)
Body = Callable[[], object]
USUAL = {
    "cpu": ("mlp", "mnist-cnn", "resnet9", "transformer", "lstm", "wrn-16-4"),
    "cuda": ("mnist-cnn", "resnet9", "wrn-16-4", "bert", "transformer", "lstm"),
}


def bodies(model: nn.Module, loss: Loss, batch: Any, size: int) -> dict[str, Body]:
    """The clipped sum by each way, and the gradient of the sum of all losses."""
    weights = torch.ones(size, device=batch[0].device)
    known = bookkeeping.find_layouts(model, loss, batch)
    guessed, seen = certified.guessed(model, loss, batch), Seen()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def summed(gradients: Callable[[], PerExample]) -> dict[str, Tensor]:
        with gradients().scaled(SCALE, drop=ZeroRows((*model.parameters(), *model.buffers(), *batch))) as found:
            return {name: found.sum(name) for name, _ in model.named_parameters()}

    return {
        "no privacy": lambda: torch.autograd.grad(loss(model, batch).sum(), parameters),
        "batched": lambda: summed(lambda: bookkeeping.gradients(model, loss, batch, weights, layouts=known)),
        "lifted": lambda: summed(lambda: lifted.gradients(model, loss, batch, weights, seen=seen)),
        "certified": lambda: summed(lambda: certified.gradients(model, loss, batch, weights, layouts=guessed)),
    }


def captured(body: Body) -> Body:
    """The body as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = body()

    def replay(held: object = held) -> object:  # what the graph writes to must stay
        graph.replay()
        return held

    return replay


def seconds(body: Body, cuda: bool, least: float) -> float:
    """Of one call: as many as take ``least`` seconds."""
    many, took = 1, 0.0
    clock = time.perf_counter if cuda else time.process_time  # which other processes do not lengthen
    while took < least:
        began = clock()
        for _ in range(many):
            body()
        if cuda:
            torch.cuda.synchronize()
        took = clock() - began
        many = many if took >= least else max(2 * many, int(many * least / max(took, 1e-6)))
    return took / many


def memory(body: Body, cuda: bool) -> float:
    """The most bytes above what stood before."""
    if not cuda:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            body()
        made = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]  # type: ignore[union-attr]
        made.sort(key=lambda each: each.start_ns())
        return float(max(accumulate(each.nbytes() for each in made)))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    body()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def measured(name: str, device: str, rounds: int, least: float) -> list[dict[str, Any]]:
    """One row for each way."""
    workload, cuda = WORKLOADS[name].on(device), device == "cuda"
    size = workload.batch_size
    eager = bodies(workload.built(device), workload.loss, workload.batch(device), size)
    for body in eager.values():
        body()
    forms = {"": eager}
    if cuda:
        forms["captured, "] = {way: captured(body) for way, body in eager.items() if way != "certified"}
    found: list[dict[str, Any]] = []
    for form, ways in forms.items():
        ratios: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            took = {way: seconds(body, cuda, least) for way, body in ways.items()}
            for way, of in took.items():
                ratios[way].append(of / took["no privacy"])
        peaks = {} if form else {way: memory(body, cuda) for way, body in ways.items()}
        for way, of in ratios.items():
            found.append(
                {
                    "network": workload.title, "batch": size, "way": form + way, "time": statistics.median(of),
                    "memory": peaks[way] / peaks["no privacy"] if peaks else None,
                }
            )  # fmt: skip
            print(found[-1], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: the usual ones of the device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of torch on the processor")
    parser.add_argument("--seconds", type=float, default=0.1, help="the least that one turn takes")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/ways[_cuda].{json,md}")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.ways: there is no CUDA device", file=sys.stderr)
        return 2
    for setting in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        setting.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.set_num_threads(given.threads)
    names = given.workloads or USUAL[given.device]
    rows = [row for name in names for row in measured(name, given.device, given.rounds, given.seconds)]
    if given.write:
        table = [["network", "batch", "way", "time × no privacy", "memory × no privacy"]]
        for row in rows:
            memory_of = "" if row["memory"] is None else f"{row['memory']:.2f}"
            table.append([row["network"], str(row["batch"]), row["way"], f"{row['time']:.2f}", memory_of])
        name = "ways_cuda" if given.device == "cuda" else "ways"
        data = {
            "environment": environment.describe("benchmarks.ways"), "device": given.device, "threads": given.threads,
            "rounds": given.rounds, "rows": rows,
        }  # fmt: skip
        how = (
            f"Medians over {given.rounds} rounds, in which the ways take turns, of the ratio to the pass without "
            f"privacy in the same round; {given.threads} thread(s), "
            + ("TF32 allowed." if given.device == "cuda" else "processor time.")
        )
        environment.write(
            name, data, f"Three ways to the clipped sum, on {given.device}", [how, environment.table(table)]
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
