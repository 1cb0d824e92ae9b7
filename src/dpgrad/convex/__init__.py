"""Convex models: losses, designs, and solvers that return coefficients and what finding them cost.

Each solver is a module with a function ``solve``: `gd` is DP-GD, `sgd` is DP-SGD, and `auto` needs no tuning; their
rivals are `objective` and `output` perturbation and `amp`, with `one_vs_rest` for many classes; `regression` is AdaSSP.
`curvature` and `bounds` say what to expect of them. Nothing here needs torch. The estimators for scikit-learn, which
`dpgrad.convex.estimators` holds, are imported when first used.

>>> import numpy as np
>>> from dpgrad.accounting.events import Relation
>>> design = Design(np.array([[2.0], [-1.0]] * 500), radius=1.0)
>>> mechanism = gd.calibrated(1000, 20, clip=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE)
>>> coefficients, event = gd.solve(design, np.array([1, -1] * 500), Logistic(), mechanism, learning_rate=2.0, key=7)
>>> print(mechanism.guarantee(1e-6, "exact"))
ε = 1 at δ = 1e-06 for datasets of the same public size that differ in one row (full batch, exact accountant)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dpgrad._submodules import attribute
from dpgrad.convex import bounds, curvature
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Counts, Hinge, HuberSvm, Logistic, RowLoss, Softmax, Squared
from dpgrad.convex.solvers import amp, auto, gd, objective, one_vs_rest, output, pace, regression, sgd

if TYPE_CHECKING:
    from dpgrad.convex.estimators import (
        DPLinearRegression,
        DPLinearSVC,
        DPLogisticRegression,
        DPPoissonRegressor,
        DPStandardScaler,
        PrivacyWarning,
        RowNormalizer,
    )

__all__ = [
    "Counts",
    "DPLinearRegression",
    "DPLinearSVC",
    "DPLogisticRegression",
    "DPPoissonRegressor",
    "DPStandardScaler",
    "Design",
    "Hinge",
    "HuberSvm",
    "Logistic",
    "PrivacyWarning",
    "RowLoss",
    "RowNormalizer",
    "Softmax",
    "Squared",
    "amp",
    "auto",
    "bounds",
    "curvature",
    "gd",
    "objective",
    "one_vs_rest",
    "output",
    "pace",
    "regression",
    "sgd",
]

if not TYPE_CHECKING:  # a type checker would take any misspelt name for an object

    def __getattr__(name: str) -> object:
        if name not in __all__:
            return attribute(__name__)(name)
        value: object = getattr(import_module("dpgrad.convex.estimators"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
