"""Private linear models for scikit-learn: estimators that say in ``privacy_`` what they released.

>>> import numpy as np
>>> X = np.random.default_rng(7).standard_normal((500, 3))
>>> model = DPLogisticRegression(epsilon=2.0, classes=[0, 1], random_state=7).fit(X, (X[:, 0] > 0).astype(int))
>>> print(model.privacy_)
ε = 2 at δ = 4e-06 for datasets of the same public size that differ in one row (full batch, exact accountant)
released: mean, sensitivity 0.004, noise 0.03739, 5 % of the budget
released: second moment, sensitivity 0.002828, noise 0.0187, 10 % of the budget
released: gradients, sensitivity 1, noise 17.56, 60 times, 85 % of the budget
assumed public: the number of rows, 500, and of columns, 3, and the names and types of the columns
assumed public: that every value is a finite number
assumed public: rows are normalised, by a rule that is not read from them
assumed public: the 2 classes, and that no label lies beyond them
assumed public: every argument of the estimator
not covered: other fits on the same rows, as tuning makes them: they are not added up, give them one shared ledger
not covered: scores on these rows or on held-out ones, and choices made from them
not covered: what was computed from these rows before the fit, such as means of a scaler without privacy
not covered: attacks on floating-point noise, and on its generators, which are not cryptographic
reproducible, not for release
"""

from typing import TYPE_CHECKING

from dpgrad._submodules import attribute
from dpgrad.convex.estimators.classifiers import DPLinearSVC, DPLogisticRegression
from dpgrad.convex.estimators.counts import DPPoissonRegressor
from dpgrad.convex.estimators.preprocessing import DPStandardScaler, RowNormalizer
from dpgrad.convex.estimators.privacy import FitPrivacy, PrivacyWarning
from dpgrad.convex.estimators.regressor import DPLinearRegression

__all__ = [
    "DPLinearRegression",
    "DPLinearSVC",
    "DPLogisticRegression",
    "DPPoissonRegressor",
    "DPStandardScaler",
    "FitPrivacy",
    "PrivacyWarning",
    "RowNormalizer",
]

if not TYPE_CHECKING:  # a type checker would take any misspelt name for a module
    __getattr__ = attribute(__name__)
