"""Speed of the accountants against dp-accounting and Opacus, one thread each, in one run.

    python -m benchmarks.accounting [--repeats 5] [--all]

Every library answers the same question with its own defaults. ``--all`` adds the peers' rows that take minutes.
Results go to benchmarks/results/accounting.{json,md}.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

from benchmarks import environment
from dpgrad.accounting import calibrate, pld, rdp
from dpgrad.accounting.events import Event, Gaussian, Poisson, Repeat, grouped

DELTA = 1e-5
RATE_B, STEPS_B, EPSILON_B = 512 / 60_000, 2343, 3.0
Runs = list[tuple[float, float, int]]  # rate, noise multiplier, steps


@dataclass(frozen=True)
class Row:
    question: str
    library: str
    seconds: float
    repeats: int
    answer: float


def schedule(steps: int) -> Runs:
    """Case G: noise σ_t = min(2, 1 + t/T) at rate 0.01, every step distinct."""
    return [(0.01, min(2.0, 1 + t / steps), 1) for t in range(steps)]


def event(runs: Runs) -> Event:
    return grouped(Poisson(q, Gaussian(z)) for q, z, n in runs for _ in range(n)) if len(runs) > 1 else _one(*runs[0])


def _one(rate: float, noise: float, steps: int) -> Event:
    return Repeat(Poisson(rate, Gaussian(noise)), steps)


def _peer_epsilon(peer: dp_accounting.PrivacyAccountant, runs: Runs) -> float:
    for q, z, n in runs:
        peer.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), n)
    return float(peer.get_epsilon(DELTA))


def _opacus_epsilon(peer: PRVAccountant | RDPAccountant, runs: Runs) -> float:
    peer.history = [(z, q, n) for q, z, n in runs]
    return float(peer.get_epsilon(DELTA))


Question = Callable[[Runs], float]
OURS: dict[str, Question] = {
    "dpgrad pld, certified upper bound": lambda runs: pld.account(event(runs)).epsilon(DELTA),
    "dpgrad pld, certified interval": lambda runs: pld.account(event(runs)).interval(DELTA).upper,
    "dpgrad pld, estimate": lambda runs: pld.account(event(runs)).estimate(DELTA),
    "dpgrad rdp": lambda runs: rdp.account(event(runs)).epsilon(DELTA),
}
PEERS: dict[str, Question] = {
    "dp-accounting PLD": lambda runs: _peer_epsilon(PLDAccountant(value_discretization_interval=1e-4), runs),
    "dp-accounting RDP": lambda runs: _peer_epsilon(RdpAccountant(), runs),
    "opacus PRV": lambda runs: _opacus_epsilon(PRVAccountant(), runs),
    "opacus RDP": lambda runs: _opacus_epsilon(RDPAccountant(), runs),
}


def _calibrated_by_peer(make: Callable[[], dp_accounting.PrivacyAccountant]) -> float:
    def of_noise(z: float) -> dp_accounting.DpEvent:
        step = dp_accounting.PoissonSampledDpEvent(RATE_B, dp_accounting.GaussianDpEvent(z))
        return dp_accounting.SelfComposedDpEvent(step, STEPS_B)

    return float(dp_accounting.calibrate_dp_mechanism(make, of_noise, EPSILON_B, DELTA))


def _calibrated_by_opacus(accountant: str) -> float:
    return float(
        get_noise_multiplier(
            target_epsilon=EPSILON_B, target_delta=DELTA, sample_rate=RATE_B, steps=STEPS_B, accountant=accountant
        )
    )


CALIBRATION: dict[str, Callable[[], float]] = {
    "dpgrad pld": lambda: calibrate.noise_multiplier(
        lambda z: _one(RATE_B, z, STEPS_B), epsilon=EPSILON_B, delta=DELTA
    ),
    "dpgrad rdp": lambda: calibrate.noise_multiplier(
        lambda z: _one(RATE_B, z, STEPS_B), epsilon=EPSILON_B, delta=DELTA, accountant="rdp"
    ),
    "dp-accounting PLD": lambda: _calibrated_by_peer(PLDAccountant),
    "dp-accounting RDP": lambda: _calibrated_by_peer(RdpAccountant),
    "opacus PRV": lambda: _calibrated_by_opacus("prv"),
    "opacus RDP": lambda: _calibrated_by_opacus("rdp"),
}


def measure(question: str, library: str, call: Callable[[], float], repeats: int) -> Row:
    """The median of ``repeats``; one run only of what takes more than five seconds."""
    seconds: list[float] = []
    while len(seconds) < repeats and not (seconds and seconds[0] > 5):
        start = time.perf_counter()
        answer = call()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1 and seconds[0] < 1 and library.startswith("dpgrad"):
            call()  # a second warm-up costs nothing and the first call may have imported something
    row = Row(question, library, statistics.median(seconds), len(seconds), answer)
    print(f"{question:28} {library:36} {row.seconds:10.4f} s  × {row.repeats}   {row.answer:.7g}", flush=True)
    return row


def measured(repeats: int, everything: bool) -> list[Row]:
    rows = [measure("calibrate case B", name, call, repeats) for name, call in CALIBRATION.items()]
    for steps in (1000, 10_000, 100_000, 1_000_000):
        runs = [(0.01, 4.0, steps)]
        rows += [
            measure(f"{steps:,} equal steps", n, lambda f=f, r=runs: f(r), repeats) for n, f in (OURS | PEERS).items()
        ]
    for steps, peers in ((300, list(PEERS)), (10_000, list(PEERS) if everything else [])):
        runs = schedule(steps)
        asked = OURS | {name: PEERS[name] for name in peers}
        rows += [measure(f"{steps:,} distinct steps", n, lambda f=f, r=runs: f(r), repeats) for n, f in asked.items()]
    return rows


def claims(rows: list[Row]) -> list[tuple[str, str, bool]]:
    """What is asked of the accountant, what was measured, whether it holds."""
    seconds = {(row.question, row.library): row.seconds for row in rows}
    upper, interval = "dpgrad pld, certified upper bound", "dpgrad pld, certified interval"
    calibration = seconds["calibrate case B", "dp-accounting PLD"] / seconds["calibrate case B", "dpgrad pld"]
    few = seconds["300 distinct steps", "dp-accounting PLD"] / seconds["300 distinct steps", upper]
    both = seconds["300 distinct steps", "dp-accounting PLD"] / seconds["300 distinct steps", interval]
    many, many_both = seconds["10,000 distinct steps", upper], seconds["10,000 distinct steps", interval]
    equal = [seconds[f"{n:,} equal steps", upper] for n in (1000, 1_000_000)]
    return [
        ("calibration of case B at least 20× faster than dp-accounting PLD", f"{calibration:.0f}×", calibration >= 20),
        (
            "300 distinct steps at least 100× faster than dp-accounting PLD",
            f"{few:.0f}× (interval: {both:.0f}×)",
            few >= 100,
        ),
        (
            "10,000 distinct steps certified in about a second",
            f"{many:.2f} s (interval: {many_both:.2f} s)",
            many <= 1.5,
        ),
        (
            "1,000,000 equal steps no slower than 1,000",
            f"{equal[1] * 1e3:.0f} ms and {equal[0] * 1e3:.0f} ms",
            equal[1] <= 1.25 * equal[0],
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="also the peers' rows that take minutes")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # peers warn at ordinary settings
    warnings.simplefilter("ignore")
    where = environment.describe("benchmarks.accounting")
    rows = measured(arguments.repeats, arguments.all)
    found = claims(rows)
    ours = {row.question: row for row in reversed(rows) if row.library.startswith("dpgrad pld")}
    listing = [["question", "library", "seconds", "repeats", "answer", "times dpgrad pld"]]
    for row in rows:
        ratio = row.seconds / ours[row.question].seconds
        listing.append(
            [row.question, row.library, f"{row.seconds:.4f}", str(row.repeats), f"{row.answer:.7g}", f"{ratio:.2f}"]
        )
    verdicts = [["asked", "measured", "holds"], *([a, b, "yes" if c else "**no**"] for a, b, c in found)]
    text = [environment.table(verdicts), environment.table(listing)]
    text.append(
        "Seconds are medians. The answer is ε at δ = 1e-5, or σ for ε = 3 at δ = 1e-5 (calibration; the exact σ is "
        "0.8916415). Equal steps: q = 0.01, σ = 4. Distinct steps: q = 0.01, σ_t = min(2, 1 + t/T). dp-accounting's "
        "PLD has its default grid of 1e-4; Opacus has its defaults, with a tolerance of 0.01 in calibrating ε."
    )
    data = {"environment": where, "claims": [dict(zip(("asked", "measured", "holds"), c, strict=True)) for c in found]}
    environment.write("accounting", data | {"rows": [asdict(row) for row in rows]}, "Speed of the accountants", text)
    print(environment.table(verdicts))
    return 0  # a measurement, not a gate


if __name__ == "__main__":
    sys.exit(main())
