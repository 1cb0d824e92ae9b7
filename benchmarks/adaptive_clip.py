"""Whether a clip bound that follows a quantile of the norms helps: beside a fixed one, and beside method auto.

    python -m benchmarks.adaptive_clip [--seeds 5]

A small network on the digits within one budget. The clip bound starts at values that span three decades, as it does for
someone who does not know the scale of the gradients, and the learning rate is searched over as many. What the search
would cost is left out, for all alike; method auto needs none.
"""

import argparse
import statistics
import sys
from typing import Any

import torch
from torch import nn

import dpgrad
from benchmarks import environment
from dpgrad import recipes

EPSILON, DELTA, EPOCHS, BATCH_SIZE = 2.0, 1e-4, 20, 64
CLIPS, RATES, QUANTILES = (0.03, 0.3, 3.0, 30.0), (0.03, 0.3, 3.0, 30.0), ("0.5", "0.8")


def network(seed: int) -> nn.Module:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def accuracy(method: recipes.Recipe, seed: int) -> tuple[float, float]:
    """The share of test rows that are classified correctly, and the last clip bound."""
    own: dict[str, Any] = {} if method.by_rule else {"epochs": EPOCHS, "batch_size": BATCH_SIZE}
    fitted = dpgrad.fit(
        network(seed), dpgrad.data.load("digits"), method=method, epsilon=EPSILON, delta=DELTA, seed=seed, **own
    )
    assert fitted.held_out is not None
    return fitted.held_out, fitted.curves[-1].clip


def measured(name: str, clip: float | None, rate: float | None, method: recipes.Recipe, seeds: int) -> dict[str, Any]:
    """One cell of the table, over all seeds."""
    found = [accuracy(method, seed) for seed in range(seeds)]
    scores, last = [score for score, _ in found], statistics.median(clip for _, clip in found)
    one = {"rule": name, "clip": clip, "learning_rate": rate, "accuracy": scores, "last_clip": last}
    print(one, file=sys.stderr, flush=True)
    return one


def cells(seeds: int) -> list[dict[str, Any]]:
    """Every rule at every first clip bound and learning rate, and method auto."""
    found = [measured("auto", None, None, recipes.auto(), seeds)]
    for name in ("fixed", *QUANTILES):
        for clip in CLIPS:
            for rate in RATES:
                quantile = None if name == "fixed" else name
                method = recipes.dpsgd(clip=clip, learning_rate=rate, adaptive_clip=quantile)
                found.append(measured(name, clip, rate, method, seeds))
    return found


def shown(one: dict[str, Any]) -> str:
    return f"{100 * statistics.mean(one['accuracy']):.1f} ± {100 * statistics.stdev(one['accuracy']):.1f}"


def sections(found: list[dict[str, Any]]) -> list[str]:
    """The sections of the page of results."""
    best, every = [["clip bound", *(f"from C = {clip:g}" for clip in CLIPS)]], []
    for name in ("fixed", *QUANTILES):
        of_rule = [one for one in found if one["rule"] == name]
        row = []
        for clip in CLIPS:
            top = max((one for one in of_rule if one["clip"] == clip), key=lambda one: statistics.mean(one["accuracy"]))
            row.append(f"{shown(top)} (η = {top['learning_rate']:g}, last C = {top['last_clip']:.2g})")
        best.append([_name(name), *row])
        every += [[_name(name), f"{one['clip']:g}", f"{one['learning_rate']:g}", shown(one)] for one in of_rule]
    auto = next(one for one in found if one["rule"] == "auto")
    within = {
        name: [shown_mean(one) for one in found if one["rule"] == name] for name in ("fixed", *QUANTILES)
    }  # fmt: skip
    top_of = {name: max(scores) for name, scores in within.items()}
    near = {name: sum(score >= max(top_of.values()) - 2 for score in scores) for name, scores in within.items()}
    said = (
        f"Accuracy on 360 test rows in percent, mean and standard deviation over {len(auto['accuracy'])} seeds: a "
        f"network of two layers on the digits, ε = {EPSILON:g} at δ = {DELTA:g}, {EPOCHS} epochs of batches of "
        f"{BATCH_SIZE}. Each cell has the best of {len(RATES)} learning rates for that row and column, chosen on the "
        f"test rows. **Method auto, with nothing chosen: {shown(auto)}.**"
    )
    counted = "; ".join(f"{_name(name)} {near[name]}" for name in near)
    sure = (
        f"Of {len(CLIPS) * len(RATES)} pairs of a first clip bound and a learning rate, this many come within two "
        f"points of the best pair of any rule: {counted}. The best pair of each rule reaches "
        + ", ".join(f"{top_of[name]:.1f} ({_name(name)})" for name in top_of)
        + "."
    )
    rows = [["clip bound", "first C", "η", "accuracy"], *every]
    return [said, environment.table(best), sure, "## Every pair\n\n" + environment.table(rows)]


def shown_mean(one: dict[str, Any]) -> float:
    return 100 * statistics.mean(one["accuracy"])


def _name(rule: str) -> str:
    return "fixed" if rule == "fixed" else f"quantile {rule}"


def main() -> None:
    """Train, and write the results."""
    parser = argparse.ArgumentParser(description="adaptive clip bounds")
    parser.add_argument("--seeds", type=int, default=5)
    found = cells(parser.parse_args().seeds)
    data = {"environment": environment.describe("benchmarks.adaptive_clip"), "cells": found}
    environment.write("adaptive_clip", data, "A clip bound that follows the norms", sections(found))


if __name__ == "__main__":
    main()
