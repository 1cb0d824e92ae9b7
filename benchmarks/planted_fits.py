"""Estimators with planted faults, on data where one row moves what is released as far as it may.

For the tests and for `benchmarks.audit`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from benchmarks.planted import Fault, honest, patched
from dpgrad import audit
from dpgrad.convex import DPLinearSVC, DPStandardScaler
from dpgrad.convex.estimators import preprocessing
from dpgrad.convex.solvers import gd, output

ROWS = np.random.default_rng(0).uniform(-0.05, 0.05, (100, 2))
ROWS[0] = 1.0, 0.0
SIDES = np.arange(100) % 2


def coefficients(trials: int = 80) -> audit.Audit:
    """Output perturbation: the gradient of one row is turned round in every pass."""
    made = DPLinearSVC(
        epsilon=1.0, solver="output", data_norm=1.0, max_iter=5, l2=0.1, classes=[0, 1], relation="replace-one",
        fit_intercept=False,
    )  # fmt: skip
    return audit.estimator(
        made, ROWS, SIDES, read=lambda fitted: fitted.coef_, row=[-1.0, 0.0], target=0, released="coefficients",
        trials=trials,
    )  # fmt: skip


def mean(trials: int = 80) -> audit.Audit:
    """A scaler: one row goes from one corner of the bounds to the other."""
    made = DPStandardScaler(epsilon=1.0, bounds=(-1.0, 1.0), relation="replace-one")
    rows = ROWS.copy()
    rows[0] = -1.0
    return audit.estimator(
        made, rows, read=lambda fitted: fitted.mean_, row=[1.0, 1.0], released="mean and mean square", trials=trials
    )


def noise_times(factor: float) -> Fault:
    """So much of the noise."""
    real = gd.gaussian
    return lambda: patched(gd, gaussian=lambda *args: real(*args) * factor)


def half_of_coefficients() -> AbstractContextManager[None]:
    """The sensitivity of the coefficients is computed as half of what it is, and so is the noise."""
    real = output.stability
    return patched(output, stability=lambda *args: real(*args) / 2)


def half_of_mean() -> AbstractContextManager[None]:
    """A scaler declares half of its sensitivity."""
    real = preprocessing.Statistic

    def halved(name: str, moved: float, std: float, share: float) -> Any:
        return real(name, moved / 2, std, share)

    return patched(preprocessing, Statistic=halved)


FITS: dict[str, tuple[Callable[..., audit.Audit], Fault]] = {
    "coefficients of DPLinearSVC": (coefficients, half_of_coefficients),
    "mean of DPStandardScaler": (mean, half_of_mean),
}
FAULTS: dict[str, Callable[[Fault], Fault]] = {  # of a fit, from its own fault
    "none": lambda _: honest,
    "sensitivity halved": lambda own: own,
    "noise × 0.5": lambda _: noise_times(0.5),
    "no noise": lambda _: noise_times(0.0),
}
