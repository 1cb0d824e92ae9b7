"""How often 95 % confidence intervals of private coefficients hold the truth, by simulation.

    python -m benchmarks.intervals [--fits 400]

Every fit has new rows, new targets and new noise; what is covered are the coefficients that drew the targets. The share
of intervals that cover them is shown with its standard error, beside the standard error that intervals state and the
scatter that estimates have.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning

from benchmarks import environment
from dpgrad.convex import DPLinearRegression, DPLogisticRegression, DPPoissonRegressor
from dpgrad.errors import OptionError

COEFFICIENTS, INTERCEPT = np.array([1.0, -0.5, 0.25]), 0.3
NORM, LEVEL, SHARE = math.sqrt(3), 0.95, 0.1
Rows = tuple[Any, Any]


def logistic(random: np.random.Generator, rows: int) -> Rows:
    """Rows in a cube, and classes by a logistic model."""
    X = random.uniform(-1, 1, (rows, 3))
    return X, (random.random(rows) < expit(X @ COEFFICIENTS + INTERCEPT)).astype(int)


def two_columns(random: np.random.Generator, rows: int) -> Rows:
    """Rows in a square, and classes by a logistic model."""
    X = random.uniform(-1, 1, (rows, 2))
    return X, (random.random(rows) < expit(X @ COEFFICIENTS[:2] + INTERCEPT)).astype(int)


def linear(random: np.random.Generator, rows: int) -> Rows:
    """Rows in a cube, and targets with errors of standard deviation 0.3."""
    X = random.uniform(-1, 1, (rows, 3))
    return X, X @ COEFFICIENTS + INTERCEPT + random.normal(0, 0.3, rows)


def counts(random: np.random.Generator, rows: int) -> Rows:
    """Rows in a cube, and Poisson counts."""
    X = random.uniform(-1, 1, (rows, 3))
    return X, random.poisson(np.exp(X @ COEFFICIENTS + INTERCEPT))


@dataclass(frozen=True)
class Setting:
    """An estimator with its rows."""

    name: str
    estimator: Callable[[], Any]
    drawn: Callable[[np.random.Generator, int], Rows]
    rows: int
    epsilon: float


def settings() -> list[Setting]:
    """Every solver that has intervals, at two budgets, and rows that are just enough or too few."""
    found = []
    for epsilon, rows in ((1.0, 10_000), (4.0, 4_000)):
        both: dict[str, Any] = {"data_norm": NORM, "inference_share": SHARE, "epsilon": epsilon}
        solvers: dict[str, dict[str, Any]] = {
            "objective": {}, "gd": {}, "output": {"max_iter": 10, "batch_size": rows // 10, "learning_rate": 0.5},
        }  # fmt: skip
        if epsilon == 1:  # whose accountant takes its time over the other
            solvers["sgd"] = {}
        for solver, options in solvers.items():
            made = lambda solver=solver, options=options, both=both: DPLogisticRegression(  # noqa: E731
                classes=[0, 1], solver=solver, **options, **both
            )
            found.append(Setting(f"logistic, {solver}", made, logistic, rows, epsilon))
        for solver in ("adassp", "gd"):
            regression = lambda solver=solver, both=both: DPLinearRegression(  # noqa: E731
                solver=solver, target_bounds=(-3.0, 3.0), **both
            )
            found.append(Setting(f"linear, {solver}", regression, linear, rows, epsilon))
    for rows in (1_200, 1_500, 2_000):  # where noise on the curvature decides which fits have intervals
        near = lambda: DPLogisticRegression(  # noqa: E731
            classes=[0, 1], solver="objective", data_norm=1.5, inference_share=SHARE, epsilon=1.0
        )
        found.append(Setting("logistic of two columns, objective", near, two_columns, rows, 1.0))
    poisson = lambda: DPPoissonRegressor(  # noqa: E731
        alpha=0.0, target_bounds=(0, 12), data_norm=NORM, inference_share=SHARE, epsilon=4.0
    )
    return [*found, Setting("Poisson, gd", poisson, counts, 8_000, 4.0)]


def covered(setting: Setting, fits: int) -> dict[str, Any]:
    """The share of intervals that hold the truth, and the standard errors beside the scatter of the estimates."""
    inside, errors, estimates, refused = [], [], [], 0
    for number in range(fits):
        X, y = setting.drawn(np.random.default_rng([17, number]), setting.rows)
        model = setting.estimator().set_params(random_state=number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(X, y)
        try:
            found = model.confidence_intervals(LEVEL)
        except OptionError:
            refused += 1
            continue
        truth = np.append(COEFFICIENTS[: X.shape[1]], INTERCEPT)
        low = np.append(found.coef_low.ravel(), found.intercept_low)
        high = np.append(found.coef_high.ravel(), found.intercept_high)
        inside.append((low <= truth) & (truth <= high))
        errors.append(np.append(found.coef_error.ravel(), found.intercept_error))
        estimates.append(np.append(found.coef.ravel(), found.intercept))
    each = np.mean(inside, axis=1)  # of one fit, whose intervals are not independent
    return {
        "name": setting.name, "epsilon": setting.epsilon, "rows": setting.rows, "fits": len(inside), "refused": refused,
        "covered": float(each.mean()), "standard_error": float(each.std() / math.sqrt(len(each))),
        "stated": np.sqrt(np.mean(np.square(errors), axis=0)).round(5).tolist(),
        "scatter": np.std(estimates, axis=0).round(5).tolist(),
    }  # fmt: skip


def table(found: list[dict[str, Any]]) -> list[str]:
    """The sections of the page of results."""
    lines = [
        "| model, solver | ε | rows | fits | refused | covered | first coefficient: stated error, scatter |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        share = f"{100 * one['covered']:.1f} ± {100 * one['standard_error']:.1f} %"
        lines.append(
            f"| {one['name']} | {one['epsilon']:g} | {one['rows']:,} | {one['fits']:,} | {one['refused']:,} | {share} "
            f"| {one['stated'][0]:.4f}, {one['scatter'][0]:.4f} |"
        )
    said = (
        f"Nominal coverage is {100 * LEVEL:g} %. `inference_share={SHARE:g}`, columns in [-1, 1], three "
        "unless stated, an intercept, and new rows, targets and noise for every fit. Refused fits say that noise hides "
        "what an interval depends on."
    )
    return [said, "\n".join(lines)]


def main() -> None:
    """Simulate, and write the results."""
    parser = argparse.ArgumentParser(description="coverage of confidence intervals")
    parser.add_argument("--fits", type=int, default=400)
    args = parser.parse_args()
    found = []
    for setting in settings():
        found.append(covered(setting, args.fits))
        print(found[-1], file=sys.stderr, flush=True)
    data = {"environment": environment.describe("benchmarks.intervals"), "settings": found}
    environment.write("intervals", data, "Coverage of confidence intervals", table(found))


if __name__ == "__main__":
    main()
