"""`Guarantee`: ε together with δ, relation, sampling and accountant; and `Profile`, the result of an accountant."""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Protocol

from dpgrad import _validate
from dpgrad.accounting.events import (
    Approximate,
    Event,
    FixedSize,
    Gaussian,
    Pinned,
    Poisson,
    Relation,
    Shifted,
    Shuffle,
    leaves,
)
from dpgrad.errors import AccountingError, OptionError

__all__ = ["Guarantee", "Profile", "down", "not_covered", "refuse_history", "up"]


class Profile(Protocol):
    """The privacy of one event under one relation, as an accountant returns it.

    ``guarantee`` is False for historical arithmetic that may understate ε. Such a profile is for comparison only: it
    cannot become a `Guarantee` or calibrate anything.
    """

    @property
    def accountant(self) -> str: ...
    @property
    def event(self) -> Event: ...
    @property
    def relation(self) -> Relation: ...
    @property
    def guarantee(self) -> bool: ...

    def epsilon(self, delta: float) -> float: ...
    def delta(self, epsilon: float) -> float: ...


def up(value: float) -> str:
    """Format with five digits, rounded up.

    >>> up(0.94688549), up(math.inf), up(2.0)
    ('0.94689', '∞', '2')
    """
    return _digits(value, ROUND_CEILING)


def down(value: float) -> str:
    """Format with five digits, rounded down.

    >>> down(0.94688549)
    '0.94688'
    """
    return _digits(value, ROUND_FLOOR)


def _digits(value: float, rounding: str) -> str:
    if not math.isfinite(value):
        return "∞"
    return f"{float(Context(prec=5, rounding=rounding).create_decimal(value)):.5g}"


_SAMPLING: dict[type, str] = {
    Gaussian: "full batch",
    Poisson: "Poisson sampling",
    FixedSize: "fixed-size sampling",
    Shuffle: "shuffled batches",
    Approximate: "a release known to be (ε, δ)-private",
    Shifted: "objective perturbation",
    Pinned: "full batch",
}
_NEIGHBOURS = {
    Relation.ADD_REMOVE: "datasets that differ by the presence of one row",
    Relation.ZERO_OUT: "datasets of the same public size, one row's contribution replaced by nothing",
    Relation.REPLACE_ONE: "datasets of the same public size that differ in one row",
}


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of ``event`` under ``relation``, proven by ``accountant``.

    >>> print(Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(4.0)))
    ε = 1 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, exact accountant)
    """

    epsilon: float
    delta: float
    relation: Relation
    accountant: str
    event: Event

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise OptionError(f"epsilon must be zero or more, got {self.epsilon!r}")
        _validate.open_unit(delta=self.delta)

    @classmethod
    def of(cls, profile: Profile, delta: float) -> "Guarantee":
        """Return the guarantee of a profile at ``delta``; refuse a profile that is only a historical comparison."""
        refuse_history(profile)
        return cls(profile.epsilon(delta), delta, profile.relation, profile.accountant, profile.event)

    @property
    def neighbours(self) -> str:
        """The relation in words."""
        return _NEIGHBOURS[self.relation]

    @property
    def sampling(self) -> str:
        """How the rows were drawn, in words."""
        kinds = dict.fromkeys(_SAMPLING[type(leaf)] for leaf in leaves(self.event))
        return " and ".join(kinds) or "nothing released"

    def __str__(self) -> str:
        proof = f"({self.sampling}, {self.accountant} accountant)"
        return f"ε = {up(self.epsilon)} at δ = {self.delta:g} for {self.neighbours} {proof}"


def refuse_history(profile: Profile) -> None:
    """Refuse a profile that is a historical comparison and not a guarantee."""
    if not profile.guarantee:
        raise AccountingError(
            f"accountant {profile.accountant} is a historical comparison that can understate epsilon, not a guarantee: "
            "use pld, rdp, moments, exact or the valid strong composition"
        )


def not_covered(relation: Relation, *, held_out: bool, diagnostics: bool, tried: bool) -> tuple[str, ...]:
    """List what the guarantee of a training run does not cover.

    ``held_out`` and ``diagnostics``: whether the run has any. ``tried``: whether training rows decided how gradients
    are computed.
    """
    found = [
        "choices of method and settings that were made by looking at these data",
        "what was computed from these data before: bounds, means, categories, features",
        "how long the run took, its errors, and attacks on floating-point noise",
    ]
    if relation == Relation.ADD_REMOVE:
        found.append(
            "rounding: with one row more, kernels may be chosen that round the gradients of the others otherwise"
        )
    if held_out:
        found.append("the held-out rows: every figure on them is computed without noise")  # their number tells n
    if diagnostics:
        found.append("the diagnostics: computed from the training rows without noise, kept in private/")
    if tried:
        found.append("whether gradients are computed lifted or certified: a few training rows were tried to find out")
    return tuple(found)
