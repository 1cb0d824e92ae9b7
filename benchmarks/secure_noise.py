"""Time of secure noise beside ordinary noise: the noise alone, and whole private steps, in one run.

    python -m benchmarks.secure_noise [--device cuda] [--values 10000 ...] [--workloads mlp ...] [--rounds 7] [--write]

The sources take turns, and a figure is the median over rounds of the ratio to ordinary noise in the same round. On a
CUDA device secure noise is measured as steps draw it, on the CPU and copied, and by the kernel that draws it there.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import environment
from benchmarks.steps.workloads import WORKLOADS
from benchmarks.ways import seconds
from dpgrad import _triton
from dpgrad.mechanism import sampling, secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import noise, secure_noise
from dpgrad.training.private import PrivateGradient

KEY = Key.from_seed(1)
STEPS = 100_000  # more than are measured


def sources(values: int, device: str) -> dict[str, Callable[[], object]]:
    """(total + noise)/divisor of one tensor, by each source."""
    total = torch.randn(values, device=device)
    unit = secure.grid(1.0, 1.0, values)
    found: dict[str, Callable[[], object]] = {
        "ordinary": lambda: noise.noisy_means({"a": total}, {"a": 1.0}, KEY, 0, 8.0),
        "secure": lambda: secure_noise.noisy_means({"a": total}, {"a": unit}, KEY, 0, 8.0),
    }
    if device == "cuda" and _triton.available:
        from dpgrad.randomness import secure_kernels

        table, starts = secure_kernels.tables(device), torch.tensor([0, values], device=device)
        sizes = [torch.tensor(number, dtype=torch.float64, device=device) for number in (unit, 8.0)]
        out = torch.empty_like(total)

        def by_kernel() -> None:
            keys = secure_kernels.keys([secure.stream(KEY, "noise", "a", "0")]).to(device)
            secure_kernels.noisy(out, keys, starts, values, table, total, *sizes)

        found["secure, kernel"] = by_kernel
    return found


def steps(name: str, device: str) -> dict[str, Callable[[], object]]:
    """A private step of a workload, by each source."""
    workload = WORKLOADS[name].on(device)
    data = workload.of(8 * workload.batch_size).batch(device)
    found: dict[str, Callable[[], object]] = {}
    for source in ("ordinary", "secure"):
        model = workload.built(device)
        values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        run = Mechanism(
            sampling.Poisson(1 / 8), STEPS, 1.0, batch_size=workload.batch_size,
            secure_values=values if source == "secure" else 0,
        )  # fmt: skip
        private = PrivateGradient(model, workload.loss, run, seed=1)
        found[source] = lambda private=private: private.step(data)  # type: ignore[misc]
    return found


def measured(what: str, bodies: dict[str, Callable[[], object]], rounds: int, cuda: bool) -> list[dict[str, Any]]:
    """One row for each source."""
    for body in bodies.values():
        seconds(body, cuda, 0.5)  # a step captures the sizes of its pieces as they come up
    took: dict[str, list[float]] = {source: [] for source in bodies}
    for _ in range(rounds):
        for source, body in bodies.items():
            took[source].append(seconds(body, cuda, 0.1))
    rows = []
    for source, times in took.items():
        ratios = [one / other for one, other in zip(times, took["ordinary"], strict=True)]
        rows.append({
            "what": what, "source": source, "milliseconds": 1e3 * statistics.median(times),
            "ratio": statistics.median(ratios),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--values", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["mlp", "mnist-cnn", "resnet9"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch on the processor")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/secure_noise_DEVICE.{json,md}")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.secure_noise: there is no CUDA device", file=sys.stderr)
        return 2
    torch.set_num_threads(given.threads)
    cuda = given.device == "cuda"
    rows = []
    for values in given.values:
        rows += measured(f"noise of {values:,} values", sources(values, given.device), given.rounds, cuda)
    for name in given.workloads:
        rows += measured(
            f"step of {WORKLOADS[name].on(given.device).title}", steps(name, given.device), given.rounds, cuda
        )
    if given.write:
        table = [["what", "source", "ms", "× ordinary"]]
        table += [[row["what"], row["source"], f"{row['milliseconds']:.3g}", f"{row['ratio']:.2f}"] for row in rows]
        data = {
            "environment": environment.describe("benchmarks.secure_noise"), "device": given.device,
            "threads": given.threads, "rounds": given.rounds, "rows": rows,
        }  # fmt: skip
        how = (
            f"Medians over {given.rounds} rounds, in which the sources take turns; the ratio is to ordinary noise in "
            f"the same round; {given.threads} threads."
        )
        environment.write(
            f"secure_noise_{given.device}", data, f"Secure noise, on {given.device}", [how, environment.table(table)]
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
