"""What it costs to choose among trials, against adding them all up.

    python -m benchmarks.tuning

Writes results/tuning.md, .json and .svg. One trial is a run at ε = 1 by accountant rdp; composition is by pld, which is
tighter: the comparison favours it.
"""

import json
from typing import Any

from benchmarks import environment
from dpgrad.accounting import calibrate
from dpgrad.accounting.events import Event, Gaussian, Poisson, Relation, Repeat
from dpgrad.tuning import price

RESULTS = environment.ROOT / "results"
DELTA, RATE, STEPS, MEANS = 1e-5, 0.01, 1000, (2, 3, 5, 8, 10, 15, 20, 30, 50, 70, 100)
TRIALS = (0.5, 1.0, 3.0)


def trial(epsilon: float) -> Event:
    """A run that costs ``epsilon``."""
    z = calibrate.noise_multiplier(lambda z: run(z), epsilon, DELTA, Relation.ZERO_OUT, "rdp")
    return run(z)


def run(z: float) -> Event:
    return Repeat(Poisson(RATE, Gaussian(z)), STEPS)


def curves(epsilon: float) -> dict[str, list[float]]:
    """The ε of every way by the mean number of trials."""
    found: dict[str, list[float]] = {}
    for mean in MEANS:
        for one in price(trial(epsilon), mean=mean, delta=DELTA, settings=mean):
            name = "composition of all trials" if one.name.startswith("composition") else one.name
            found.setdefault(name, []).append(one.epsilon)
    return found


def draw(found: dict[str, dict[str, list[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dpgrad"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(12, 4), sharex=True)
    for place, (epsilon, ways) in zip(axes, found.items(), strict=True):
        for name, values in ways.items():
            dashed = "--" if name.startswith("composition") else "-"
            place.plot(MEANS, values, dashed, label=name)
        place.set(xscale="log", yscale="log", title=f"one trial: ε = {epsilon}", xlabel="mean number of trials")
        place.grid(alpha=0.3)
    axes[0].set_ylabel(f"ε at δ = {DELTA:g}")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "tuning.svg", metadata={"Date": None})


def page(found: dict[str, dict[str, list[float]]], ran: dict[str, Any]) -> str:
    parts = [environment.heading(ran, "What choosing costs")]
    parts.append(
        f"ε at δ = {DELTA:g} of choosing among trials of {STEPS:,} Poisson-sampled steps at rate {RATE:g}, zero-out "
        "neighbours, by the (mean) number of trials, which is also the number of settings. The figure is tuning.svg."
    )
    for epsilon, ways in found.items():
        rows = [["one trial: ε = " + epsilon, *(f"{mean:g}" for mean in MEANS)]]
        rows += [[name, *(f"{value:.2f}" for value in values)] for name, values in ways.items()]
        parts.append(environment.table(rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Compute, draw and write."""
    found = {f"{epsilon:g}": curves(epsilon) for epsilon in TRIALS}
    ran = environment.describe("benchmarks.tuning")
    (RESULTS / "tuning.json").write_text(
        json.dumps({"environment": ran, "means": MEANS, "epsilon": found}, indent=1) + "\n", "utf-8"
    )
    (RESULTS / "tuning.md").write_text(page(found, ran), "utf-8")
    draw(found)


if __name__ == "__main__":
    main()
