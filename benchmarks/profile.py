"""Where the time of a captured step goes on a CUDA device: its kernels, beside those of the step without privacy.

    python -m benchmarks.profile [--workloads mnist-cnn resnet9 bert] [--kernels 20]

Steps are timed one after another without waiting between them, as training takes them, in five blocks of 0.05 s or
more: of short steps so many that each block pays for the tables that are filled for many steps ahead. Memory is the
most that was allocated, data, capture and warm-up included. Where kernels run side by side their times add up to more
than the step's.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps.engines import GRAPH, OURS, Prepared, ordinary_graph, ours
from benchmarks.steps.race import block, timed
from benchmarks.steps.workloads import WORKLOADS

BLOCKS = 5
PROFILED = 3
WARM_UP = 10


def seconds(prepared: Prepared) -> float:
    """Of one step: the mean over blocks."""
    many = block(prepared, statistics.median(timed(prepared, 1) for _ in range(WARM_UP)))
    return statistics.fmean(timed(prepared, many) for _ in range(BLOCKS))


def kernels(step: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel ran in one step, and its microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count[event.name] += 1
            micros[event.name] += event.device_time_total
    return count, micros


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["mnist-cnn", "resnet9", "bert"])
    parser.add_argument("--kernels", type=int, default=20)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.profile: there is no CUDA device", file=sys.stderr)
        return 2
    for setting in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        setting.fp32_precision = "tf32"
    for name in given.workloads:
        for label, make in ((GRAPH, ordinary_graph), (OURS, ours)):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            prepared = make(WORKLOADS[name], "cuda")
            took, most = 1e3 * seconds(prepared), torch.cuda.max_memory_allocated() / 2**20
            count, micros = kernels(prepared.step)
            many, total = sum(count.values()) / PROFILED, sum(micros.values()) / PROFILED / 1e3
            print(f"{name}, {label}: {took:.3f} ms, {most:.0f} MiB; {many:.0f} kernels of {total:.3f} ms together")
            for kernel, each in micros.most_common(given.kernels):
                print(f"  {count[kernel] / PROFILED:6.1f} × {each / PROFILED:9.1f} µs  {kernel[:100]}")
            del prepared
    return 0


if __name__ == "__main__":
    sys.exit(main())
