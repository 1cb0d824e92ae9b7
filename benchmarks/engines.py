"""Time and memory of one private step, beside an ordinary step and beside every mode of Opacus, in one run.

    python -m benchmarks.engines [--workloads mnist-cnn resnet9 transformer lstm] [--repeat 11] [--threads 2]
                                 [--device cpu|cuda] [--limit 60] [--write]

It is `python -m benchmarks.steps` with a verdict: on a CPU dpgrad must not be slower than the fastest mode of Opacus,
on CUDA it must stay within bounds beside the step without privacy too. ``--write`` writes
benchmarks/results/engines.{json,md}, or engines_cuda.
"""

import argparse
import signal
import sys
from dataclasses import asdict
from functools import partial

import torch

from benchmarks import environment
from benchmarks.peers import ENGINES as PEERS
from benchmarks.steps import results
from benchmarks.steps.engines import ORDINARY, OURS, VMAP, engines
from benchmarks.steps.race import SMALL_SHARE, Row, Settings, compared, longer, measured, quartiles, reference
from benchmarks.steps.workloads import USUAL, WORKLOADS

TIMES = {"mnist-cnn": 1.2, "resnet9": 1.3, "bert": 1.15}  # at most so many times the step without privacy, on CUDA
MEMORY = 1.3  # likewise
FASTER = 1.5  # at least so many times as fast as the fastest mode of Opacus, on CUDA


def claims(rows: list[Row], most: float | None) -> list[list[str]]:
    """What is asked of dpgrad on one workload, what was measured, and whether it holds.

    On CUDA ``most`` bounds its time in steps without privacy; elsewhere it is compared with Opacus alone.
    """
    own = next(row for row in rows if row.engine == OURS)
    if not own.seconds:
        return [[f"{own.workload}: a step", own.reason, "**no**"]]
    said: list[list[str] | None] = []
    plain, eager = reference(rows), next(row for row in rows if row.engine == ORDINARY)
    if most is not None and plain is not None:
        said += [
            _time(f"time at most {most:g} × {plain.engine}", own, plain, most),
            _memory(f"memory at most {MEMORY:g} × {eager.engine}", own, eager, MEMORY),
        ]
    if (peer := results.best_peer(rows)) is not None:
        bound, beside = 1.0 if most is None else 1 / FASTER, f" ({peer.engine})"
        said += [
            _time(f"time at most {bound:.2f} × fastest Opacus that ran", own, peer, bound, beside),
            _memory("memory at most that of it", own, peer, 1.0, beside),
        ]
    return [line for line in said if line is not None]


def _time(asked: str, own: Row, other: Row, bound: float, beside: str = "") -> list[str] | None:
    ratio, spread = longer(own, other), quartiles(own, other)
    if ratio is None:
        return None
    between, holds = "", _holds(ratio, bound)
    if spread is not None:
        low, high = spread
        between = f" ({low:.2f} to {high:.2f})"
        holds += ", within the noise of the rounds" if low <= bound < high else ""
    return [f"{own.workload}: {asked}", f"{ratio:.2f}{between}{beside}", holds]


def _memory(asked: str, own: Row, other: Row, bound: float, beside: str = "") -> list[str] | None:
    if not own.mebibytes or not other.mebibytes:
        return None
    ratio = own.mebibytes / other.mebibytes
    return [f"{own.workload}: {asked}", f"{ratio:.2f}{beside}", _holds(ratio, bound)]


def _holds(ratio: float, bound: float) -> str:
    return "yes" if ratio <= bound else f"**no**, {ratio / bound:.2f} ×"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which an engine is cut")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results")
    given = parser.parse_args()
    settings = Settings(given.device, given.repeat, given.threads, limit=given.limit)
    where = environment.describe("benchmarks.engines")
    verdicts = [["asked of dpgrad", "measured", "holds"]]
    names = given.workloads or USUAL[given.device]
    workloads = [WORKLOADS[name].on(given.device) for name in names]
    known = engines(given.device) | PEERS
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cut off"))
    try:
        measured(workloads, known, settings, say=partial(print, flush=True), rows=rows)
    except (KeyboardInterrupt, SystemExit) as cut:
        print(f"benchmarks.engines: {cut or 'interrupted'}: what was measured follows", file=sys.stderr)
    rows = [row for workload in workloads for row in rows if row.workload == workload.title]
    for name, here in zip(names, results.by_workload(rows), strict=False):
        if any(row.engine == OURS for row in here):
            compared(here, VMAP, OURS, settings.tolerance)
            verdicts += claims(here, TIMES.get(name) if given.device == "cuda" else None)
    print(environment.table(results.engine_table(rows)))
    print(environment.table(verdicts))
    if given.write:
        tf32 = "on" if settings.tf32 and given.device == "cuda" else "off"
        note = (
            f"Milliseconds are medians over {given.repeat} rounds on {given.threads} threads ({given.device}, TF32 "
            f"{tf32}). A step is forward, backward, clipping, noise and the update by SGD. "
            "On a CPU engines take turns in each round; on CUDA each engine has a process of its own, and a round is a "
            "block of steps, of captured steps that are short so many that it pays for tables filled many steps "
            "ahead. Ratios of time are medians over rounds, and in brackets quartiles over rounds: a bound between "
            "them is within the noise. Peak memory is what model, batch and a step take. The best mode of Opacus is "
            "the fastest of those that ran. What is compared is what the first step summed in the form that is timed, "
            "TF32 where that is on: for dpgrad its gradient times the batch size less its noise, which the seed "
            "tells, for Opacus the sum it adds noise to, for JAX the change of the weights by the compiled step "
            "with the noise at 0 and the rate at -1. `apart` is the largest relative difference of a parameter from "
            "the definition, estimated from projections; the definition is the sum of the clipped gradients of "
            "single examples, formed "
            f"by vmap, always without TF32. A parameter whose sum is less than {SMALL_SHARE:g} of the whole is "
            f"compared with that share, and an engine that is more than {settings.tolerance:g} apart is not timed."
        )
        there = {(row.workload, row.engine) for row in rows}
        asked = ((workload.title, name) for workload in workloads for name in known)
        missing = [", ".join(pair) for pair in asked if pair not in there]
        if missing:
            note += f"\n\nThe run was cut off before: {'; '.join(missing)}."
        data = {
            "environment": where,
            "settings": asdict(settings),
            "claims": verdicts[1:],
            "missing": missing,
            "rows": [row.fields() for row in rows],
        }
        text = [environment.table(verdicts), environment.table(results.engine_table(rows)), note]
        on = "" if given.device == "cpu" else f" on {torch.cuda.get_device_name()}"
        name = "engines" if given.device == "cpu" else f"engines_{given.device}"
        environment.write(name, data, f"Time and memory of one private step{on}", text)
    return 0  # a measurement, not a gate


if __name__ == "__main__":
    sys.exit(main())
