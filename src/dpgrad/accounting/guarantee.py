"""`Guarantee`: ε together with δ, relation, sampling and accountant; and `Profile`, the result of an accountant."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import TYPE_CHECKING, Any, Protocol

from dpgrad import _validate
from dpgrad.accounting.events import (
    Approximate,
    DiscreteGaussian,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Inexact,
    Laplace,
    Leaf,
    Pinned,
    Poisson,
    RandomizedResponse,
    Relation,
    Selection,
    Shifted,
    Shuffle,
    TruncatedPoisson,
    leaves,
)
from dpgrad.errors import AccountingError, OptionError

if TYPE_CHECKING:
    from dpgrad.accounting.curves import Tradeoff

__all__ = [
    "FLOATING", "ORDINARY", "SECURE", "SOURCES", "UNIT", "Guarantee", "Profile", "down", "not_covered", "plural",
    "refuse_history", "several", "up",
]  # fmt: skip


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
    Selection: "the best of a random number of trials",
    TruncatedPoisson: "Poisson sampling with a largest batch",
    Laplace: "Laplace noise",
    DiscreteGaussian: "discrete Gaussian noise",
    RandomizedResponse: "randomized response",
    Exponential: "exponential mechanism",
}


def _exact(leaf: Leaf) -> Leaf:
    return leaf.event if isinstance(leaf, Inexact) else leaf


UNIT = "row"  # what is protected, unless something else is named
SOURCES = ORDINARY, SECURE = "ordinary", "secure"  # of noise and batches
FLOATING = "attacks on floating-point noise, and on its generators, which are not cryptographic"


def several(unit: str, count: int) -> str:
    """So many units, in words.

    >>> several("row", 1), several("person", 5), several("company", 2), several("bus", 2)
    ('one row', '5 persons', '2 companies', '2 buses')
    """
    return f"one {unit}" if count == 1 else f"{count:,} {plural(unit)}"


def plural(unit: str) -> str:
    """Several units, in words.

    >>> plural("row"), plural("person")
    ('rows', 'persons')
    """
    if unit.endswith("y") and unit[-2:-1] not in ("a", "e", "i", "o", "u", ""):
        return f"{unit[:-1]}ies"
    return f"{unit}es" if unit.endswith(("s", "x", "ch", "sh")) else f"{unit}s"


def _neighbours(relation: Relation, unit: str, group: int) -> str:
    size = "size" if unit == UNIT else f"number of {plural(unit)}"
    changed = several(unit, group)
    match relation:
        case Relation.ADD_REMOVE:
            return f"datasets that differ by the presence of {changed}"
        case Relation.ZERO_OUT:
            moved = f"{changed}'s contribution" if group == 1 else f"the contributions of {changed}"
            return f"datasets of the same public {size}, {moved} replaced by nothing"
        case Relation.REPLACE_ONE:
            return f"datasets of the same public {size} that differ in {changed}"


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of ``event`` under ``relation``, proven by ``accountant``.

    ``unit`` is what one example of the event stands for, such as a row or a person, and ``group`` how many of them
    change together: 1, except where `for_group` made the guarantee.

    >>> print(Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(4.0)))
    ε = 1 at δ = 1e-05 for datasets that differ by the presence of one row (full batch, exact accountant)
    """

    epsilon: float
    delta: float
    relation: Relation
    accountant: str
    event: Event
    unit: str = UNIT
    group: int = 1

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise OptionError(f"epsilon must be zero or more, got {self.epsilon!r}")
        _validate.open_unit(delta=self.delta)

    @classmethod
    def of(cls, profile: Profile, delta: float) -> "Guarantee":
        """Return the guarantee of a profile at ``delta``; refuse a profile that is only a historical comparison."""
        refuse_history(profile)
        return cls(profile.epsilon(delta), delta, profile.relation, profile.accountant, profile.event)

    def for_group(self, size: int) -> "Guarantee":
        """Return the guarantee for ``size`` rows (or other units) that change together, at the same δ.

        It is for those who own several rows where one row is the unit, and for people whose data go together, such as a
        family. The bound is certified, by the pld accountant where another one has no proof for groups.

        >>> from dpgrad.accounting import account
        >>> one = Guarantee.of(account(Gaussian(10.0), Relation.ADD_REMOVE, "exact"), 1e-5)
        >>> print(one.for_group(5))
        ε = 1.9931 at δ = 1e-05 for datasets that differ by the presence of 5 rows (full batch, exact accountant)
        >>> one.for_group(1) == one
        True
        """
        from dpgrad.accounting import group

        if self.group != 1:
            raise OptionError(
                f"this guarantee is already for {several(self.unit, self.group)}: call for_group on the guarantee of "
                f"one {self.unit}"
            )
        _validate.whole(least=1, most=group.MOST, **{"size of the group": size})
        if size == 1:
            return self
        found, by = group.epsilon(self.event, self.relation, self.delta, size, self.accountant)
        return replace(self, epsilon=max(found, self.epsilon), accountant=by, group=int(size))

    def groups(self, sizes: Sequence[int] = (1, 2, 5, 10)) -> list[dict[str, Any]]:
        """The ε of groups of several sizes at the same δ, as plain values; None where it is not finite.

        >>> Guarantee(0.5, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(8.0)).groups([1])
        [{'size': 1, 'epsilon': 0.5}]
        """
        found = [(size, self.for_group(size).epsilon) for size in sizes]
        return [{"size": size, "epsilon": _validate.json_number(value)} for size, value in found]

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """The certified δ at each of ``epsilons``: the whole curve δ(ε) in one call.

        >>> [round(x, 4) for x in Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(1.0)).deltas([0, 1, 2])]
        [0.3829, 0.1269, 0.0209]
        """
        from dpgrad.accounting import curves

        found = curves.deltas(self.event, self.relation, epsilons, self.group, self.accountant)
        return [float(one) for one in found]

    def tradeoff(self) -> "Tradeoff":
        """Bounds on every attack: the trade-off between its errors, advantage, power, precision and belief.

        >>> found = Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(1.0)).tradeoff()
        >>> round(found.advantage, 4), round(found.power(0.05), 4)
        (0.3829, 0.2595)
        """
        from dpgrad.accounting import curves

        return curves.tradeoff(self.event, self.relation, self.group, self.accountant)

    def mu(self) -> float:
        """The μ of Gaussian differential privacy, for full batches and shuffled epochs; refused elsewhere.

        >>> Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(4.0)).mu()
        0.25
        """
        from dpgrad.accounting import curves

        return curves.mu(self.event, self.relation, self.group)

    def zcdp(self) -> float:
        """The ρ of zero-concentrated differential privacy; refused where none is proven.

        >>> round(Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(4.0)).zcdp(), 9)
        0.03125
        """
        from dpgrad.accounting import curves

        return curves.zcdp(self.event, self.relation, self.group)

    def renyi(self, orders: Sequence[float]) -> list[float]:
        """The Rényi divergence at each of ``orders``, from above.

        >>> Guarantee(1.0, 1e-5, Relation.ADD_REMOVE, "exact", Gaussian(2.0)).renyi([2.0])
        [0.25]
        """
        from dpgrad.accounting import curves

        return curves.renyi(self.event, self.relation, orders, self.group)

    def attacks(self) -> dict[str, Any]:
        """All of these as plain values for a report (`accounting.curves.figures`)."""
        from dpgrad.accounting import curves

        return curves.figures(self.event, self.relation, self.group, self.accountant)

    @property
    def neighbours(self) -> str:
        """The relation in words."""
        return _neighbours(self.relation, self.unit, self.group)

    @property
    def sampling(self) -> str:
        """How the rows were drawn, in words."""
        kinds = dict.fromkeys(_SAMPLING[type(_exact(leaf))] for leaf in leaves(self.event))
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


def not_covered(
    relation: Relation, *, held_out: bool, diagnostics: bool, tried: bool, unit: str = UNIT, secure: bool = False
) -> tuple[str, ...]:
    """List what the guarantee of a training run does not cover.

    ``held_out`` and ``diagnostics``: whether the run has any. ``tried``: whether training rows decided how gradients
    are computed. ``unit``: what is protected. ``secure``: whether noise came from the secure source.
    """
    found = [
        "choices of method and settings that were made by looking at these data",
        "what was computed from these data before: bounds, means, categories, features",
        "how long the run took, and its errors",
    ]
    if not secure:
        found.append(FLOATING)
    if relation == Relation.ADD_REMOVE:
        found.append(
            f"rounding: with one {unit} more, kernels may be chosen that round the gradients of the others differently"
        )
    if held_out:
        found.append("the held-out rows: every figure on them is computed without noise")  # their number tells n
    if diagnostics:
        found.append("the diagnostics: computed from the training rows without noise, kept in private/")
    if tried:
        found.append("whether gradients are computed lifted or certified: a few training rows were tried to find out")
    return tuple(found)
