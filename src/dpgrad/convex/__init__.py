"""Convex models: losses, designs, and solvers that return coefficients and the event of having found them.

Each solver is a module with a function ``solve``: `dpgrad.convex.gd` is DP-GD, `dpgrad.convex.sgd` is DP-SGD, and
`dpgrad.convex.auto` needs no tuning. `curvature` and `bounds` say what to expect of them. Nothing here needs torch.

>>> import numpy as np
>>> from dpgrad.events import Relation
>>> design = Design(np.array([[2.0], [-1.0]] * 500), radius=1.0)
>>> mechanism = gd.calibrated(1000, 20, clip=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE)
>>> coefficients, event = gd.solve(design, np.array([1, -1] * 500), Logistic(), mechanism, learning_rate=2.0, key=7)
>>> print(mechanism.guarantee(1e-6, "exact"))
ε = 1 at δ = 1e-06 for datasets of the same public size that differ in one row (full batch, exact accountant)
"""

from dpgrad.convex import auto, bounds, curvature, gd, sgd
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Hinge, HuberSvm, Logistic, Loss, Softmax, Squared

__all__ = [
    "Design",
    "Hinge",
    "HuberSvm",
    "Logistic",
    "Loss",
    "Softmax",
    "Squared",
    "auto",
    "bounds",
    "curvature",
    "gd",
    "sgd",
]
