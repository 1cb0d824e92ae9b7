"""The estimators keep scikit-learn's contract: its own checks, at an ε so large that noise decides nothing.

No check is expected to fail. A check is skipped only where what it needs is not installed or not switched on.
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
    DPStandardScaler,
    PrivacyWarning,
    RowNormalizer,
)

LARGE = 1e6
ESTIMATORS = {
    "logistic": DPLogisticRegression(LARGE),
    "logistic clipped": DPLogisticRegression(LARGE, data_norm=20.0),
    "svc": DPLinearSVC(LARGE),
    "regression": DPLinearRegression(LARGE, data_norm=20.0, target_bounds=(-5.0, 5.0)),
    "scaler": DPStandardScaler(LARGE, bounds=(-1000.0, 1000.0)),
    "scaler without mean": DPStandardScaler(LARGE, bounds=(-1000.0, 1000.0), with_mean=False),
    "normalizer": RowNormalizer(),
    "normalizer clipping": RowNormalizer(norm=2.0, rule="clip"),
}
EXPECTED_FAILURES: dict[str, str] = {}
OPTIONAL = {"check_array_api_input", "check_classifier_data_not_an_array", "check_regressor_data_not_an_array"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_check_estimator(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # the checks do not name their classes
        found: list[dict[str, Any]] = check_estimator(
            ESTIMATORS[name], expected_failed_checks=EXPECTED_FAILURES, on_skip=None
        )
    status = {result["check_name"]: result["status"] for result in found}
    assert len(found) >= 40
    assert {check for check, said in status.items() if said != "passed"} <= OPTIONAL


def test_the_package_offers_them_when_asked() -> None:
    assert convex.DPLogisticRegression is DPLogisticRegression
    assert {kind.__name__ for kind in map(type, ESTIMATORS.values())} <= set(convex.__all__) <= set(dir(convex))
    assert all(getattr(convex, name) for name in convex.__all__)
    with pytest.raises(AttributeError, match=r"'dpgrad\.convex' has no attribute 'DPForest'"):
        convex.DPForest  # noqa: B018
