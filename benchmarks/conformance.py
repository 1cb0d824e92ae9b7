"""Certified intervals against an independent high-precision oracle, over random settings.

    python -m benchmarks.conformance [--cases 300] [--seed 1000] [--processes 2]

q from 1e-5 to 1, σ from 0.3 to 50, 1 to 1e6 steps, δ from 1e-3 to 1e-15, one direction each, a quarter of them
schedules of distinct steps (tests/accounting/oracle.py: `random_cases`), and as many again mixed: two or three parts of
rates and noises of their own, up to 1e7 steps each, a plain Gaussian beside every second. An interval contains the
truth if it does so to within the oracle's own error, 1e-9, and the estimate likewise. Results go to
benchmarks/results/conformance.{json,md}; exit status 1 unless every interval contains the truth.
"""

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import environment
from dpgrad.accounting.events import Gaussian, Leaf, Poisson
from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.accounting.pld import PRECISION, EpsilonAt, Side

sys.path.insert(0, str(environment.ROOT / "tests" / "accounting"))
import oracle

ORACLE_ERROR = 1e-9
CHUNK = 10
Case = dict[str, Any]


def side(steps: oracle.Steps, direction: str) -> Side:
    """One direction of a composition of Poisson steps."""
    kind = Kind(direction)
    counts: Counter[Leaf] = Counter()
    for q, sigma, n in steps:
        counts[Poisson(q, Gaussian(sigma))] += n

    def pair(leaf: Leaf) -> Pair:
        assert isinstance(leaf, Poisson)
        rate, sigma = leaf.sampling_rate, leaf.event.noise_multiplier
        if rate == 1:
            return Pair(Kind.REMOVE, 1.0, sigma / 2 if kind is Kind.ANTIPODAL else sigma)
        return Pair(kind, rate, sigma)

    return Side(counts, pair)


def priced(steps: oracle.Steps, direction: str, delta: float, truth: float) -> Case:
    """The interval and how it stands to the truth; an error is a case that failed."""
    case: Case = {"steps": steps, "direction": direction, "delta": delta, "oracle": float(truth)}
    question = EpsilonAt(delta)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            one = side(steps, direction)
            upper, lower = float(one.upper(question, PRECISION)), float(one.lower(question, PRECISION))
            seconds = time.perf_counter() - start
            estimate = one.estimate(question)
    except Exception as error:  # recorded, counted, and the run goes on
        return case | {"error": f"{type(error).__name__}: {error}", "contained": False}
    inside = estimate is None or (lower <= estimate * (1 + ORACLE_ERROR) and upper >= estimate * (1 - ORACLE_ERROR))
    return case | {
        "lower": lower,
        "estimate": estimate,
        "upper": upper,
        "gap": (upper - lower) / float(truth),
        "seconds": seconds,
        "warnings": sorted({str(w.message) for w in raised}),
        "contained": bool(inside and lower <= truth * (1 + ORACLE_ERROR) and upper >= truth * (1 - ORACLE_ERROR)),
    }


def mixed_cases(seed: int, count: int) -> Iterator[tuple[oracle.Steps, str, float, float]]:
    """Parts that have little in common, as far as the oracle's contour reaches."""
    rng = np.random.default_rng([seed, 1])

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(math.log(low), math.log(high))))

    done = 0
    while done < count:
        parts = rng.integers(2, 4)
        steps = [(log_uniform(1e-5, 0.5), log_uniform(0.5, 20.0), round(log_uniform(10, 1e7))) for _ in range(parts)]
        if rng.random() < 0.5:
            steps.append((1.0, log_uniform(1.0, 100.0), 1))
        delta, direction = log_uniform(1e-15, 1e-3), str(rng.choice(oracle.DIRECTIONS))
        try:
            value = oracle.epsilon(steps, delta, direction, "contour")
        except oracle.OracleUnsure:
            continue
        if 0.01 <= value <= 60:
            done += 1
            yield steps, direction, delta, value


def chunk(task: tuple[int, int]) -> list[Case]:
    seed, count = task
    cases = itertools.chain(oracle.random_cases(seed, count), mixed_cases(seed, count))
    return [{"seed": seed} | priced(*case) for case in cases]


def setting(case: Case) -> str:
    steps = case["steps"]
    total = sum(n for *_, n in steps)
    if len(steps) == 1:
        text = f"q = {steps[0][0]:.3g}, σ = {steps[0][1]:.3g}"
    else:
        rates, noises = [q for q, *_ in steps], [s for _, s, _ in steps]
        text = f"q = {min(rates):.3g}…{max(rates):.3g}, σ = {min(noises):.3g}…{max(noises):.3g}, {len(steps)} distinct"
    return f"{text}, T = {total:,}, δ = {case['delta']:.1e}, {case['direction']}"


def summary(cases: list[Case]) -> dict[str, Any]:
    done = [case for case in cases if "gap" in case]
    gaps = sorted(case["gap"] for case in done)
    off = [abs(case["estimate"] / case["oracle"] - 1) for case in done if case["estimate"] is not None]
    quantiles = {f"{q}": gaps[min(int(q / 100 * len(gaps)), len(gaps) - 1)] for q in (50, 90, 95, 99, 100)}
    return {
        "cases": len(cases),
        "contained": sum(case["contained"] for case in cases),
        "errors": len(cases) - len(done),
        "schedules": sum(len(case["steps"]) > 1 for case in cases),
        "directions": dict(Counter(case["direction"] for case in cases)),
        "gap_quantiles": quantiles,
        "gaps_above_1e-4": sum(gap > 1e-4 for gap in gaps),
        "estimates": len(off),
        "estimate_error_median": statistics.median(off),
        "estimate_error_worst": max(off),
        "seconds_median": statistics.median(case["seconds"] for case in done),
        "seconds_worst": max(case["seconds"] for case in done),
        "with_warnings": sum(bool(case["warnings"]) for case in done),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    where = environment.describe("benchmarks.conformance")
    tasks = [(arguments.seed + i, min(CHUNK, arguments.cases - CHUNK * i)) for i in range(-(-arguments.cases // CHUNK))]
    cases: list[Case] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for some in pool.imap_unordered(chunk, tasks):
            cases += some
            print(f"{sum(c['contained'] for c in cases)} of {len(cases)} contained", file=sys.stderr, flush=True)
    cases.sort(key=lambda case: case["seed"])
    found = summary(cases)
    failed = [case for case in cases if not case["contained"]]
    widest = sorted((case for case in cases if "gap" in case), key=lambda case: -case["gap"])[:10]
    head = ["setting", "oracle ε", "lower", "estimate", "upper", "gap", "seconds"]

    def row(case: Case) -> list[str]:
        if "error" in case:
            return [setting(case), f"{case['oracle']:.10g}", case["error"], "", "", "", ""]
        estimate = "–" if case["estimate"] is None else f"{case['estimate']:.10g}"
        numbers = [f"{case[k]:.10g}" for k in ("oracle", "lower")] + [estimate, f"{case['upper']:.10g}"]
        return [setting(case), *numbers, f"{case['gap']:.1e}", f"{case['seconds']:.2f}"]

    gaps = ", ".join(f"{q} %: {gap:.1e}" for q, gap in found["gap_quantiles"].items())
    text = [
        f"**{found['contained']} of {found['cases']} intervals contain the oracle's value** "
        f"({found['schedules']} are schedules; {found['directions']}). "
        f"Relative gap (upper − lower)/ε: {gaps}; {found['gaps_above_1e-4']} above 1e-4. "
        f"Estimates ({found['estimates']}) err by {found['estimate_error_median']:.1e} in the median, "
        f"{found['estimate_error_worst']:.1e} at worst. "
        f"Both bounds take {found['seconds_median']:.2f} s in the median, {found['seconds_worst']:.1f} s at worst.",
        "## Not contained\n\n" + (environment.table([head, *map(row, failed)]) if failed else "None."),
        "## Widest\n\n" + environment.table([head, *map(row, widest)]),
        "## All\n\n" + environment.table([head, *map(row, cases)]),
    ]
    data = {"environment": where, "summary": found, "cases": cases}
    environment.write("conformance", data, "Certified intervals against an independent oracle", text)
    print(text[0])
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main())
