"""The estimators keep scikit-learn's contract: its own checks, at an ε so large that noise decides nothing.

One check is expected to fail, of the two solvers that refuse what it needs. A check is skipped only where what it needs
is not installed or not switched on. ``"sgd"`` passes too, but its accountant takes half a minute over these fits.
"""

import warnings
from typing import Any

import pytest
from sklearn.utils.estimator_checks import check_estimator

from dpgrad import convex
from dpgrad.convex.estimators import (
    DPLinearRegression,
    DPLinearSVC,
    DPLogisticRegression,
    DPPoissonRegressor,
    DPStandardScaler,
    PrivacyWarning,
    RowNormalizer,
)

LARGE = 1e6
ESTIMATORS = {
    "logistic": DPLogisticRegression(LARGE),
    "logistic clipped": DPLogisticRegression(LARGE, data_norm=20.0),
    "logistic gd": DPLogisticRegression(LARGE, solver="gd", max_iter=30),
    "logistic output": DPLogisticRegression(LARGE, solver="output"),
    "logistic objective": DPLogisticRegression(100.0, solver="objective"),
    "logistic amp": DPLogisticRegression(6.0, solver="amp"),
    "svc": DPLinearSVC(LARGE),
    "regression": DPLinearRegression(LARGE, data_norm=20.0, target_bounds=(-5.0, 5.0)),
    "regression gd": DPLinearRegression(
        LARGE, data_norm=20.0, target_bounds=(-5.0, 5.0), solver="gd", momentum=0.9, max_iter=100
    ),
    "poisson": DPPoissonRegressor(LARGE, alpha=0.0, data_norm=5.0, target_bounds=(0.0, 8.0), max_iter=100),
    "scaler": DPStandardScaler(LARGE, bounds=(-1000.0, 1000.0)),
    "scaler without mean": DPStandardScaler(LARGE, bounds=(-1000.0, 1000.0), with_mean=False),
    "normalizer": RowNormalizer(),
    "normalizer clipping": RowNormalizer(norm=2.0, rule="clip"),
}
REFUSED = {"check_class_weight_classifiers": "the proof is for unweighted losses: class_weight is refused"}
EXPECTED_FAILURES = {"logistic objective": REFUSED, "logistic amp": REFUSED}
OPTIONAL = {"check_array_api_input", "check_classifier_data_not_an_array", "check_regressor_data_not_an_array"}


# other solvers of an estimator share all that scikit-learn looks at
EXHAUSTIVE = ("logistic clipped", "logistic gd", "logistic output")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.exhaustive] * (one in EXHAUSTIVE)) for one in ESTIMATORS]
)
def test_check_estimator(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # the checks do not name their classes
        found: list[dict[str, Any]] = check_estimator(
            ESTIMATORS[name], expected_failed_checks=EXPECTED_FAILURES.get(name, {}), on_skip=None
        )
    status = {result["check_name"]: result["status"] for result in found}
    assert len(found) >= 40
    assert {check for check, said in status.items() if said == "xfail"} == set(EXPECTED_FAILURES.get(name, {}))
    assert {check for check, said in status.items() if said not in ("passed", "xfail")} <= OPTIONAL


def test_the_package_offers_them_when_asked() -> None:
    assert convex.DPLogisticRegression is DPLogisticRegression
    assert {kind.__name__ for kind in map(type, ESTIMATORS.values())} <= set(convex.__all__) <= set(dir(convex))
    assert all(getattr(convex, name) for name in convex.__all__)
    with pytest.raises(AttributeError, match=r"'dpgrad\.convex' has no attribute 'DPForest'"):
        convex.DPForest  # noqa: B018
