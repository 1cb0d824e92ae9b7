"""The result of an audit: a frozen record that says what was refuted, what was tried and what was not.

An audit can refute a claim and never prove it. The words of a record are the only ones to quote.
"""

from dataclasses import dataclass, replace
from typing import Any

from dpgrad import _validate
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.errors import AuditError

__all__ = ["Audit", "Check", "bonferroni", "judged"]


@dataclass(frozen=True)
class Check:
    """One check of an audit: its p-value, and in words what it found.

    ``p`` is None for a check without chance, such as a contribution beyond the clip bound: it is refuted or not.
    ``level`` is the part of the audit's level that the check may use; with none it refutes nothing.

    >>> Check("noise size", 0.4, "measured std / claimed 1.001", level=1e-4).refuted
    False
    """

    name: str
    p: float | None
    says: str
    level: float = 0.0
    violated: bool = False

    @property
    def refuted(self) -> bool:
        """Whether the claim is refuted by this check."""
        return self.violated if self.p is None else self.level > 0 and self.p <= self.level

    def __str__(self) -> str:
        judged = self.p is None or self.level > 0
        verdict = "REFUTED" if self.refuted else "not refuted" if judged else "no verdict"
        chance = "no chance involved" if self.p is None else f"p = {self.p:.3g}"
        return f"{self.name:<24}{verdict:<13}{chance:<20}{self.says}"


@dataclass(frozen=True)
class Audit:
    """What an audit tried and found. It is made from seeds and is never for release.

    ``measured_multiplier`` is an upper bound of the noise over the largest contribution that was found.
    ``lower_epsilon`` holds at ``delta`` without assumptions. ``lower_epsilon_in_family`` assumes that the code is the
    claimed mechanism with less noise. Each is None where it was not measured.

    >>> found = Audit("step", "z = 1", 1e-3, (Check("sensitivity", None, "0.999 of the clip bound"),), ("dropout",))
    >>> print(found.words)
    Not refuted. This does not prove the claim; tried: sensitivity; not tried: dropout.
    """

    kind: str
    claim: str
    level: float
    checks: tuple[Check, ...]
    not_tried: tuple[str, ...] = ()
    claimed_multiplier: float | None = None
    measured_multiplier: float | None = None
    delta: float | None = None
    lower_epsilon: float | None = None
    lower_epsilon_in_family: float | None = None
    seed: int = 0
    trials: int | None = None
    verdict: bool = True  # False for methods too weak to give one
    guarantee: Guarantee | None = None  # what was claimed, where that is known

    @property
    def refuted(self) -> bool:
        """Whether some check refutes the claim, at ``level`` for all checks together."""
        return self.verdict and any(check.refuted for check in self.checks)

    @property
    def tried(self) -> tuple[str, ...]:
        """The names of the checks."""
        return tuple(check.name for check in self.checks)

    @property
    def words(self) -> str:
        """The result in the only words to quote."""
        if self.refuted:
            found = "; ".join(f"{check.name}: {check.says}" for check in self.checks if check.refuted)
            return f"REFUTED: {found}, at level {self.level:g}"
        left = ", ".join(self.not_tried) or "whatever is not listed as tried"
        words = f"Not refuted. This does not prove the claim; tried: {', '.join(self.tried)}; not tried: {left}."
        return words if self.verdict else f"Weak by design, no verdict. {words}"

    def __str__(self) -> str:
        lines = [f"claim: {self.claim}", *map(str, self.checks)]
        if self.measured_multiplier is not None:
            claimed = "" if self.claimed_multiplier is None else f" of {self.claimed_multiplier:.6g} claimed"
            lines.append(f"noise multiplier, measured: at most {self.measured_multiplier:.4g}{claimed}")
        if self.lower_epsilon is not None:
            lines.append(f"ε is at least {self.lower_epsilon:.4g} at δ = {self.delta:g}, whatever the code does")
        if self.lower_epsilon_in_family is not None:
            lines.append(
                f"ε is at least {self.lower_epsilon_in_family:.4g} at δ = {self.delta:g}, assuming the claimed "
                "mechanism with less noise"
            )
        return "\n".join([*lines, self.words, "Made from a seed: not for release."])

    def assert_held(self) -> None:
        """Raise `AuditError` with the words of the audit if the claim is refuted; for a user's own tests.

        >>> bad = Audit("step", "z = 1", 1e-3, (Check("sensitivity", None, "2 of the clip bound", violated=True),))
        >>> bad.assert_held()
        Traceback (most recent call last):
        dpgrad.errors.AuditError: REFUTED: sensitivity: 2 of the clip bound, at level 0.001
        """
        if self.refuted:
            raise AuditError(self.words)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, for JSON.

        >>> Audit("game", "(1, 1e-5)", 0.01, ()).to_dict()["refuted"]
        False
        """
        return {
            "kind": self.kind,
            "refuted": self.refuted,
            "words": self.words,
            "claim": self.claim,
            "level": self.level,
            "checks": [
                {
                    "name": check.name,
                    "refuted": check.refuted,
                    "p": check.p,
                    "level": check.level if check.p is not None else None,
                    "says": check.says,
                }
                for check in self.checks
            ],
            "not_tried": list(self.not_tried),
            "claimed_multiplier": self.claimed_multiplier,
            "measured_multiplier": _validate.json_number(self.measured_multiplier),
            "delta": self.delta,
            "lower_epsilon": _validate.json_number(self.lower_epsilon),
            "lower_epsilon_in_family": _validate.json_number(self.lower_epsilon_in_family),
            "in_family_assumes": "the claimed mechanism with less noise",
            "trials": self.trials,
            "seed": self.seed,
            "for_release": False,
        }


def judged(checks: list[Check], level: float) -> tuple[Check, ...]:
    """The checks with the level divided equally among those that involve chance.

    >>> [check.level for check in judged([Check("a", 0.5, ""), Check("b", 0.1, ""), Check("c", None, "")], 0.02)]
    [0.01, 0.01, 0.0]
    """
    _validate.open_unit(level=level)
    count = max(1, sum(check.p is not None for check in checks))
    return tuple(check if check.p is None else replace(check, level=level / count) for check in checks)


def bonferroni(found: list[tuple[float, str]]) -> tuple[float, str]:
    """The p-value of several tests together, and what the least of them says.

    >>> bonferroni([(0.02, "sizes"), (0.5, "rows")])
    (0.04, 'sizes')
    """
    p, says = min(found)
    return min(1.0, p * len(found)), says
