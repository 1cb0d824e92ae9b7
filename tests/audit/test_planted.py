"""Every planted fault is refuted by the check that is to find it; the same subjects without a fault are not."""

from typing import Any

import pytest

from benchmarks import planted
from dpgrad import audit
from dpgrad.audit.record import Audit
from dpgrad.errors import AuditError


def audited(subject: planted.Subject, checks: list[str], steps: int = 40, **settings: Any) -> Audit:
    return audit.step(
        subject.model, subject.loss, subject.mechanism, subject.data, checks=checks, steps=steps, canaries=1,
        **subject.options, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("case", planted.CASES, ids=lambda case: case.name)
def test_fault_is_refuted(case: planted.Case) -> None:
    subject = case.subject()
    with case.fault():
        found = audited(subject, [case.found_by], case.steps)
    assert found.refuted
    assert found.words.startswith("REFUTED: ")
    assert found.words.endswith("at level 0.001")
    with pytest.raises(AuditError, match="REFUTED"):
        found.assert_held()


def test_patches_are_taken_back() -> None:
    """A fault that stayed would make every later test worthless."""
    subject = planted.subject()
    for case in planted.CASES:
        with case.fault():
            pass
    audited(subject, ["noise", "ledger"], steps=20).assert_held()
