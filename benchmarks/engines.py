"""Time and memory of one private step, beside an ordinary step and beside every mode of Opacus, in one run.

    python -m benchmarks.engines [--networks cnn resnet9 transformer lstm] [--repeat 11] [--threads 2]
                                 [--device cpu|cuda] [--write]

A step is forward, backward, clipping, noise and the update by SGD, on the same inputs for all. Engines take turns
within each round, so that a busy machine slows all alike, and ratios are medians over rounds. Peak memory is measured
in a process of its own for each engine. Before anything is timed, the clipped sums of all engines are compared.
``--write`` writes benchmarks/results/engines.{json,md}, or engines_cuda.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.networks import NETWORKS, Batch, loss
from dpgrad.grads import bookkeeping, clipped_sum, vmap
from dpgrad.grads.precision import exact_products
from dpgrad.grads.sums import trainable
from dpgrad.noise import gaussians
from dpgrad.scaling import Hard

CLIP = 1.0
NOISE = 1.0
LEARNING_RATE = 0.1
WARM_UP = 2
# Book-keeping adds to each norm what rounding may have hidden, and all of dpgrad shortens factors by τ; Opacus neither.
TOLERANCE = 1e-2
RESTART_PEAK = Path("/proc/self/clear_refs")  # Linux: writing 5 sets the peak of resident memory to what it is now

Step = Callable[[], Mapping[str, Tensor]]  # one step; returns the clipped sum before noise, by name of parameter


def ordinary(model: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
        return {}

    return step


def ours(engine: str, model: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    layouts = bookkeeping.find_layouts(model, loss, batch) if engine == "bookkeeping" else None
    gradients = vmap.gradients if layouts is None else partial(bookkeeping.gradients, layouts=layouts)
    scale = partial(Hard(), clip=CLIP)
    steps = count()

    def step() -> Mapping[str, Tensor]:
        now, sums = next(steps), clipped_sum(model, loss, batch, scale, gradients).sums
        noise = gaussians(sums, dict.fromkeys(sums, CLIP * NOISE), key=7, step=now)
        for name, parameter in trainable(model).items():
            parameter.grad = noise[name].add_(sums[name]).div_(len(batch[1]))
        optimizer.step()
        return sums

    return step


def opacus(mode: str, model: nn.Module, batch: Batch) -> Step:
    from opacus.grad_sample import wrap_model
    from opacus.layers import DPLSTM
    from opacus.optimizers import get_optimizer_class
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    names = list(trainable(model))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LSTM):  # Opacus has one of its own
            own = DPLSTM(module.input_size, module.hidden_size, batch_first=module.batch_first)
            own.load_state_dict(module.state_dict())
            model.set_submodule(name, own.to(batch[0].device))
    wrapped = wrap_model(model, grad_sample_mode=mode, **({"max_grad_norm": CLIP} if mode == "ghost" else {}))
    optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode=mode)(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=len(batch[1]),
    )
    criterion = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)
    parameters = model.state_dict(keep_vars=True)  # by the names of the model as it was

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad()
        criterion(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()
        return {name: parameters[name].summed_grad for name in names}

    return step


ORDINARY, OURS = "non-private", "dpgrad bookkeeping"
MODES = ("hooks", "functorch", "ew", "ghost")
ENGINES: dict[str, Callable[[nn.Module, Batch], Step]] = {
    ORDINARY: ordinary,
    OURS: partial(ours, "bookkeeping"),
    "dpgrad vmap": partial(ours, "vmap"),
    **{f"opacus {mode}": partial(opacus, mode) for mode in MODES},
}


@dataclass
class Row:
    """One engine on one network; ``reason`` says why it could not run."""

    network: str
    engine: str
    seconds: list[float]
    mebibytes: float | None = None
    apart: float | None = None  # the largest relative difference of a parameter's clipped sum from the definition's
    reason: str = ""


def prepared(key: str, engine: str, device: str, batch_size: int | None = None) -> Step:
    network = NETWORKS[key]
    network = replace(network, batch_size=batch_size or network.batch_size)
    return ENGINES[engine](network.built(device), network.batch(device))


def raced(key: str, device: str, repeat: int) -> list[Row]:
    """The rows of one network, timed in turns."""
    rows = [Row(key, engine, []) for engine in ENGINES]
    steps: dict[str, Step] = {}
    sums: dict[str, dict[str, Tensor]] = {}
    for row in rows:
        try:
            steps[row.engine] = prepared(key, row.engine, device)
            with exact_products():  # TF32 rounds small gradients of one engine otherwise than of another
                found = steps[row.engine]()
        except Exception as error:  # no Opacus, or a network that an engine does not take, in whatever way it says so
            if row.engine in (ORDINARY, OURS):
                raise
            steps.pop(row.engine, None)
            row.reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        if found:
            sums[row.engine] = {name: total.clone() for name, total in found.items()}
    compared(rows, sums)
    for turn in range(WARM_UP + repeat):
        for row in rows:
            if row.engine in steps:
                seconds = timed(steps[row.engine], device)
                row.seconds += [seconds] if turn >= WARM_UP else []
    return rows


def compared(rows: list[Row], sums: dict[str, dict[str, Tensor]]) -> None:
    """Refuse to measure engines that do not compute the same."""
    definition = sums.get("dpgrad vmap") or sums[OURS]
    # The bias of an attention's keys has no gradient but rounding errors: it is not compared with itself.
    least = 1e-5 * torch.stack([total.norm() for total in definition.values()]).norm()
    for row in rows:
        if row.engine in sums:
            found = sums[row.engine]
            assert found.keys() == definition.keys(), f"{row.engine} clips other parameters: {list(found)}"
            row.apart = max(float((found[n] - d).norm() / d.norm().clamp(min=least)) for n, d in definition.items())
            assert row.apart < TOLERANCE, f"{row.network}: {row.engine} is {row.apart:.2g} from the definition"


def timed(step: Step, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def weighed(rows: list[Row], device: str, threads: int) -> None:
    """Peak memory of every row that ran, each in a fresh process."""
    # What is freed goes back to the system at once: the peak is then that of tensors and not of malloc's leftovers.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    for row in rows:
        if not row.reason:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row.mebibytes = pool.apply(peak, (row.network, row.engine, device, threads))


def peak(key: str, engine: str, device: str, threads: int) -> float | None:
    """MiB that a model, its batch and a step take at most, beyond what the process holds anyhow; None if unknown."""
    quiet(threads)
    prepared(key, engine, device, batch_size=2)()  # loads what is loaded at first use
    gc.collect()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        step = prepared(key, engine, device)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    if not RESTART_PEAK.exists():
        return None
    before = resident("VmRSS")
    step = prepared(key, engine, device)
    step()
    RESTART_PEAK.write_text("5")
    step()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def quiet(threads: int) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers warn at ordinary settings
    torch.set_num_threads(threads)


def longer(row: Row, than: Row) -> float:
    """How many times as long ``row`` took: the median over rounds."""
    return statistics.median(a / b for a, b in zip(row.seconds, than.seconds, strict=True))


def larger(row: Row, than: Row) -> float | None:
    return row.mebibytes / than.mebibytes if row.mebibytes and than.mebibytes else None


def best(rows: list[Row]) -> Row | None:
    """The fastest mode of Opacus, within rounds: what slows down some rounds does not choose it."""
    ran = [row for row in rows if row.engine.startswith("opacus") and row.seconds]
    return min(ran, key=lambda row: longer(row, rows[0]), default=None)


HEAD = ["network", "engine", "ms", "× non-private", "× best Opacus", "peak MiB", "× non-private", "× best Opacus"]


def listed(rows: list[Row]) -> list[list[str]]:
    """One network's lines of the table."""
    lines = []
    for row in rows:
        start = [NETWORKS[row.network].title, row.engine]
        if row.reason:
            lines.append([*start, row.reason[:100], *[""] * 5])
            continue
        others = [rows[0], best(rows)]
        times = [f"{longer(row, other):.2f}" if other else "–" for other in others]
        sizes = [f"{ratio:.2f}" if other and (ratio := larger(row, other)) else "–" for other in others]
        milliseconds = f"{statistics.median(row.seconds) * 1e3:.1f}"
        lines.append([*start, milliseconds, *times, f"{row.mebibytes:.0f}" if row.mebibytes else "–", *sizes])
    return lines


def claims(rows: list[Row]) -> list[list[str]]:
    """Whether book-keeping takes no longer and no more memory than the fastest mode of Opacus."""
    own, peer, title = next(row for row in rows if row.engine == OURS), best(rows), NETWORKS[rows[0].network].title
    if peer is None:
        return []
    found = {f"{title}: not slower than Opacus": longer(own, peer), f"{title}: not larger": larger(own, peer)}
    return [
        [asked, f"{ratio:.2f} × {peer.engine}", "yes" if ratio <= 1 else "**no**"]
        for asked, ratio in found.items()
        if ratio is not None
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
    given = parser.parse_args()
    quiet(given.threads)
    where = environment.describe("benchmarks.engines")
    rows: list[Row] = []
    lines, verdicts = [HEAD], [["asked of book-keeping", "measured", "holds"]]
    for key in given.networks:
        here = raced(key, given.device, given.repeat)
        weighed(here, given.device, given.threads)
        rows += here
        lines += listed(here)
        verdicts += claims(here)
        print(environment.table([HEAD, *listed(here)]), flush=True)
    print(environment.table(verdicts))
    if given.write:
        note = (
            f"Milliseconds are medians of {given.repeat} steps on {given.threads} threads ({given.device}); ratios of "
            "time are medians over rounds in which every engine takes one step: forward, backward, clipping, noise and "
            "the update by SGD. Peak memory is what model, batch and a step take, in a process of their own. The best "
            "mode of Opacus is its fastest. Before timing, the clipped sums of all engines were compared: the JSON "
            "has the largest relative difference of a parameter (`apart`)."
        )
        data = {"environment": where, "claims": verdicts[1:], "rows": [asdict(row) for row in rows]}
        text = [environment.table(verdicts), environment.table(lines), note]
        on = "" if given.device == "cpu" else f" on {torch.cuda.get_device_name()}"
        name = "engines" if given.device == "cpu" else f"engines_{given.device}"
        environment.write(name, data, f"Time and memory of one private step{on}", text)
    return 0  # a measurement, not a gate


if __name__ == "__main__":
    sys.exit(main())
