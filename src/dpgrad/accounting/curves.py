"""What ε means for one person: the privacy profile δ(ε) at many ε, and every attack that it bounds.

Someone who sees the release and knows everything else wants to know which of two neighbouring datasets it came from.
Calling one of them the *null*, a test has a rate of false positives a and of false negatives b. If δ(ε) bounds the
hockey-stick divergence in both directions, every test obeys b ≥ 1 − δ(ε) − e^ε·a and b ≥ e^{−ε}(1 − δ(ε) − a) for every
ε ≥ 0, so

    f(a) = max over ε of max(0, 1 − δ(ε) − e^ε·a, e^{−ε}(1 − δ(ε) − a))

is a lower bound on the trade-off function (Dong, Roth and Su 2019, Prop. 6). A maximum over some ε only is smaller, so
finitely many ε and upper bounds of δ still certify f. Everything here follows from f or from δ(ε); figures are rounded
to the safe side. Proofs: docs/proofs/curves.md.

>>> from dpgrad.accounting.events import Gaussian
>>> round(tradeoff(Gaussian(2.0), Relation.ADD_REMOVE).advantage, 4)
0.1974
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from dpgrad import _validate
from dpgrad.accounting import account, exact, group, losses, pairs, pld, rdp
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
    Poisson,
    RandomizedResponse,
    Relation,
    Shifted,
    TruncatedPoisson,
    fold,
    leaves,
)
from dpgrad.accounting.guarantee import Profile, refuse_history
from dpgrad.accounting.inexact import MOST_EPSILON, parted
from dpgrad.accounting.pairs import Array, Kind
from dpgrad.errors import AccountingError, DpgradError

__all__ = [
    "CHANCES",
    "FALSE_POSITIVES",
    "ORDERS",
    "Tradeoff",
    "deltas",
    "figures",
    "least_errors",
    "mu",
    "renyi",
    "tradeoff",
    "zcdp",
]

FALSE_POSITIVES = (0.001, 0.01, 0.05, 0.1)
CHANCES = (0.05, 0.01, 0.001)  # with which a belief may be larger
ORDERS = (1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_ROUNDING = 1e-14  # added to every figure that is shown: sums and products of numbers of at most one
_PRECISION = 1e-4  # relative, of ε: below the width of a line, and quick
_POINTS, _FEWER = 384, 48  # values of ε; fewer where each takes a while
_SMALL = (1e-9, 1e-7, 1e-5, 1e-3)  # δ at the largest of them: the first that has a finite ε
_LARGE = 10.0  # the largest where none has
_LEAST = 1e-3  # the least of those above zero, as a share of the largest


@dataclass(frozen=True)
class Tradeoff:
    """δ(ε) at some ε, certified from above, and what no attack can exceed because of it.

    Guarantee: every bound holds for every attack on a release with this profile, whatever else the attacker knows.

    >>> from dpgrad.accounting.events import Gaussian
    >>> found = tradeoff(Gaussian(1.0), Relation.ADD_REMOVE)
    >>> round(found.advantage, 4), round(found.power(0.05), 4)  # 2Φ(1/2) − 1 and Φ(Φ⁻¹(0.05) + 1)
    (0.3829, 0.2595)
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    accountant: str

    @property
    def advantage(self) -> float:
        """The largest true-positive rate minus false-positive rate of any test: the total variation distance.

        It is also the membership-inference advantage 2·(probability of guessing right) − 1 from even odds. It is δ(0);
        where δ at a larger ε says more, as with Rényi bounds, (e^ε − 1 + 2δ)/(e^ε + 1).
        """
        epsilon, delta = np.array(self.epsilons), np.array(self.deltas)
        other = np.tanh(epsilon / 2) + delta * (1 - np.tanh(epsilon / 2))
        return min(self.deltas[0], float(other.min()) + _ROUNDING)

    def false_negatives(self, false_positives: float) -> float:
        """f(a): a lower bound on the false-negative rate of every test with this false-positive rate.

        >>> from dpgrad.accounting.events import Gaussian
        >>> round(tradeoff(Gaussian(1.0), Relation.ADD_REMOVE).false_negatives(0.05), 4)
        0.7405
        """
        _validate.unit_interval(false_positives=false_positives)
        return float(self.curve([false_positives])[0])

    def curve(self, false_positives: Sequence[float] | Array) -> Array:
        """`false_negatives` at many rates."""
        least = least_errors(np.array(self.epsilons), np.array(self.deltas), np.asarray(false_positives, float))
        return np.clip(least - _ROUNDING, 0.0, 1.0)

    def power(self, false_positives: float) -> float:
        """The largest true-positive rate of any test with at most this false-positive rate.

        >>> from dpgrad.accounting.events import Gaussian
        >>> tradeoff(Gaussian(1.0), Relation.ADD_REMOVE).power(1.0)
        1.0
        """
        return min(1.0, 1 - self.false_negatives(false_positives) + _ROUNDING)

    def precision(self, false_positives: float, prior: float = 0.5) -> float:
        """The largest probability that a positive answer is right, of a test with at least this false-positive rate.

        With prior π it is π·TPR/(π·TPR + (1 − π)·FPR) at the largest TPR. It is an average over positive answers; one
        lucky output may show more, which only pure ε-privacy rules out: see `belief`.
        """
        _validate.open_unit(prior=prior)
        power = self.power(false_positives)
        return min(1.0, prior * power / (prior * power + (1 - prior) * false_positives) * (1 + _ROUNDING))

    def belief(self, chance: float, prior: float = 0.5) -> float:
        """A bound on the attacker's posterior belief in the truth, exceeded with probability at most ``chance``.

        Before, the attacker gives the true one of two neighbouring datasets the probability ``prior``. After, they give
        it more than the value returned with probability at most ``chance``, over the randomness of the release,
        whichever of the two is true. The posterior odds are the prior odds times e^L, and P(L ≥ ε) ≤ δ(ε′)/(1 −
        e^{ε′−ε}) for ε′ < ε. It is 1 where no ε is certified.

        >>> from dpgrad.accounting.events import Gaussian
        >>> found = tradeoff(Gaussian(2.0), Relation.ADD_REMOVE)
        >>> found.belief(0.5) < found.belief(0.01) < found.belief(0.0001) < 1
        True
        """
        _validate.open_unit(chance=chance, prior=prior)
        epsilon, delta = np.array(self.epsilons), np.array(self.deltas)
        possible = delta < chance
        if not possible.any():
            return 1.0
        with np.errstate(divide="ignore"):
            least = epsilon[possible] - np.log1p(-delta[possible] / chance)  # 1 − e^{ε′−ε} = δ(ε′)/chance
        logit = float(least.min()) + math.log(prior) - math.log1p(-prior)
        return min(1.0, (1 / (1 + math.exp(-min(logit, 700.0))) if logit > -700 else 0.0) + _ROUNDING)

    def points(self, count: int = 41) -> list[tuple[float, float]]:
        """(false-positive rate, least false-negative rate) along the curve, closer together where it is steep."""
        rates = np.sin(np.linspace(0, np.pi / 2, count)) ** 4
        return [(float(a), float(b)) for a, b in zip(rates, self.curve(rates), strict=True)]


def least_errors(epsilons: Array, deltas: Array, false_positives: Array) -> Array:
    """f(a), up to rounding: the least rate of false negatives at each rate a of false positives, from δ(ε) at some ε.

    >>> least_errors(np.array([1.0]), np.array([0.0]), np.array([0.0, 0.1, 1.0])).round(4).tolist()
    [1.0, 0.7282, 0.0]
    """
    a, rest = false_positives[:, None], 1 - deltas  # (rates, 1), (ε,)
    with np.errstate(over="ignore", invalid="ignore"):  # e^ε may be infinite: it says nothing of a rate above 0
        steep = rest - np.where(a > 0, np.exp(epsilons) * a, 0.0)
    flat = np.exp(-epsilons) * (rest - a)
    return np.asarray(np.maximum(0.0, np.maximum(steep, flat).max(axis=1)))


def deltas(
    event: Event, relation: Relation, epsilons: Sequence[float] | Array, size: int = 1, accountant: str = pld.NAME
) -> Array:
    """δ(ε) of ``size`` rows that change together, from above at every ε; by pld where that has a price.

    >>> from dpgrad.accounting.events import Gaussian
    >>> deltas(Gaussian(1.0), Relation.ADD_REMOVE, [0.0, 1.0]).round(4).tolist()
    [0.3829, 0.1269]
    """
    given = list(epsilons)
    for one in given:
        _validate.non_negative(epsilon=one)
    wanted = np.array(given, float)
    exactly, distance = parted(event)
    if distance:
        wanted = np.minimum(wanted, MOST_EPSILON)
    found, _ = _tried(lambda profile: _profile_deltas(profile, wanted, size), exactly, relation, size, accountant)
    return np.minimum(found + distance, 1.0) if distance else found


_Found = TypeVar("_Found")


def _tried(
    ask: Callable[[Profile], _Found], event: Event, relation: Relation, size: int, accountant: str
) -> tuple[_Found, str]:
    """The answer of the first profile that has one, and its name: pld of the group, pld of one row, the accountant."""
    refuse_history(account(event, relation, accountant))
    ways: list[Callable[[], Profile]] = [lambda: pld.account(event, relation, _PRECISION)]
    if size > 1:
        ways.insert(0, lambda: group.together(event, relation, size, _PRECISION))
    for way in ways:
        try:
            return ask(way()), pld.NAME
        except (DpgradError, ArithmeticError):
            continue
    return ask(account(event, relation, accountant)), accountant


def _profile_deltas(profile: Profile, epsilons: Array, size: int) -> Array:
    if isinstance(profile, pld.PldProfile):
        if profile.group == size:
            return profile.deltas(epsilons)
        single = profile.deltas(epsilons / size)
    else:
        single = np.array([profile.delta(float(one)) for one in epsilons / size])
    return group.chained_deltas(single, epsilons, size)


def _grid(profile: Profile, size: int) -> Array:
    """The ε at which a profile is asked: from zero to where δ is negligible."""
    times = 1 if isinstance(profile, pld.PldProfile) and profile.group == size else size
    found = (times * profile.epsilon(small / times) for small in _SMALL)
    top = min(max(next(filter(math.isfinite, found), _LARGE), 1e-3), 1e4)
    count = _POINTS if isinstance(profile, pld.PldProfile) else _FEWER
    small = np.geomspace(_LEAST * top, top, count // 3)
    return np.unique(np.concatenate([np.linspace(0, top, 2 * count // 3), small]))


@lru_cache(maxsize=64)
def tradeoff(event: Event, relation: Relation, size: int = 1, accountant: str = pld.NAME) -> Tradeoff:
    """The trade-off between the errors of tests for ``size`` rows that change together.

    >>> from dpgrad.accounting.events import Gaussian
    >>> tradeoff(Gaussian(1.0), Relation.ADD_REMOVE).accountant
    'pld'
    """

    def ask(profile: Profile) -> tuple[Array, Array]:
        epsilons = _grid(profile, size)
        return epsilons, _profile_deltas(profile, epsilons, size)

    exactly, distance = parted(event)
    (epsilons, values), by = _tried(ask, exactly, relation, size, accountant)
    if distance:
        proved = epsilons <= MOST_EPSILON
        epsilons, values = epsilons[proved], values[proved] + distance
    values = np.minimum.accumulate(np.minimum(values, 1.0))  # δ falls: a bound holds at every larger ε too
    return Tradeoff(tuple(map(float, epsilons)), tuple(map(float, values)), by)


def figures(event: Event, relation: Relation, size: int = 1, accountant: str = pld.NAME) -> dict[str, Any]:
    """All of this for a report, as plain values; None or nothing where a notion does not hold.

    >>> from dpgrad.accounting.events import Gaussian
    >>> found = figures(Gaussian(1.0), Relation.ADD_REMOVE)
    >>> found["mu"], round(found["rho"], 9), found["power"][1]["false_positives"]
    (1.0, 0.5, 0.01)
    """
    curve = tradeoff(event, relation, size, accountant)
    tested = [
        {"false_positives": rate, "power": curve.power(rate), "precision": curve.precision(rate)}
        for rate in FALSE_POSITIVES
    ]
    divergences = _held(lambda: renyi(event, relation, ORDERS, size)) or []
    return {
        "membership_advantage": curve.advantage,
        "power": tested,
        "belief": [{"chance": chance, "belief": curve.belief(chance)} for chance in CHANCES],
        "mu": _held(lambda: mu(event, relation, size)),
        "rho": None if _sampled(event) else _held(lambda: zcdp(event, relation, size)),
        "renyi": [
            {"order": order, "divergence": value} for order, value in zip(ORDERS, divergences, strict=bool(divergences))
        ],
        "tradeoff": [{"false_positives": a, "false_negatives": b} for a, b in curve.points()],
        "accountant": curve.accountant,
    }


def _sampled(event: Event) -> bool:
    """Whether some step sees a sample of the rows: its ρ is that of a full batch and says little."""
    return any(
        isinstance(leaf, Poisson | FixedSize | TruncatedPoisson) and 0 < leaf.sampling_rate < 1
        for leaf in leaves(event)
    )


def _refuse_inexact(event: Event, why: str) -> None:
    """Refuse notions without a δ for noise that follows its law except with some probability."""
    if any(isinstance(leaf, Inexact) for leaf in leaves(event)):
        raise AccountingError(
            f"secure noise has {why}: it is Gaussian except with a small probability, which counts towards δ; use "
            "tradeoff() or deltas()"
        )


def _held(ask: Callable[[], _Found]) -> _Found | None:
    """The answer; None where it is refused."""
    try:
        return ask()
    except (DpgradError, ArithmeticError):
        return None


def mu(event: Event, relation: Relation, size: int = 1) -> float:
    """The μ for which the release is μ-GDP: exact for full batches, a bound for shuffled epochs; else refused.

    Sampled steps are refused although the central limit theorem suggests a μ: their losses have heavier tails, so
    μ understates δ(ε).

    >>> from dpgrad.accounting.events import Gaussian, Repeat
    >>> mu(Repeat(Gaussian(8.0), 16), Relation.ADD_REMOVE), mu(Gaussian(8.0), Relation.REPLACE_ONE, size=3)
    (0.5, 0.75)
    """
    _refuse_inexact(event, "no μ")
    if _sampled(event):
        raise AccountingError(
            "sampled steps have no useful μ: the Gaussian approximation understates δ(ε); use tradeoff(), or renyi()"
        )
    profile = exact.account(event, relation)
    if not isinstance(profile, exact.GaussianProfile):
        raise AccountingError("only Gaussian noise on sums of all rows is μ-GDP: read the trade-off curve instead")
    return size * profile.mu


def renyi(event: Event, relation: Relation, orders: Sequence[float] = ORDERS, size: int = 1) -> list[float]:
    """The Rényi divergence of each order α > 1, the worse direction, from above.

    >>> from dpgrad.accounting.events import Gaussian
    >>> renyi(Gaussian(2.0), Relation.ADD_REMOVE, [2.0, 4.0])  # α/2σ²
    [0.25, 0.5]
    """
    for order in orders:
        _validate.number(order=order)
    _refuse_inexact(event, "no Rényi divergence")
    profile = rdp.account(event, relation, size)
    return [profile.divergence(float(order)) for order in orders]


def zcdp(event: Event, relation: Relation, size: int = 1) -> float:
    """The ρ for which the release is ρ-zCDP: divergence at most ρα at every order (Bun and Steinke 2016).

    Sampling does not lower it: at large orders a sampled Gaussian is as revealing as a full batch. k rows have k²ρ.

    >>> from dpgrad.accounting.events import Gaussian, Repeat
    >>> round(zcdp(Repeat(Gaussian(2.0), 8), Relation.ADD_REMOVE), 12)
    1.0
    """
    _refuse_inexact(event, "no zCDP")
    return size**2 * fold(event, lambda leaf: _rho(leaf, relation), operator.mul, math.fsum) * (1 + _ROUNDING)


def _rho(leaf: Leaf, relation: Relation) -> float:
    match leaf:
        case Approximate(epsilon, delta):
            exact.refuse_other(leaf, relation)
            if delta:
                raise AccountingError("a release that is private with delta above 0 has no zCDP: use epsilon and delta")
            return epsilon**2 / 2
        case Shifted():
            raise AccountingError("objective perturbation has no proven zCDP: use epsilon and delta, or Rényi orders")
        case Poisson(sampling_rate=0) | TruncatedPoisson(sampling_rate=0):
            return 0.0
        case Exponential(epsilon):
            losses.refuse_other(leaf, relation)
            return epsilon**2 / 8  # Cesar and Rogers (2021), Lemma 3.4, of bounded range
        case Laplace(scale):
            return (relation.reach / scale) ** 2 / 2
        case DiscreteGaussian(sigma, sensitivity):
            return (relation.reach * sensitivity / sigma) ** 2 / 2  # Canonne, Kamath and Steinke (2020), Thm. 4
        case RandomizedResponse():
            losses.of(leaf, relation, Kind.ANTIPODAL)  # refuses another relation
            return leaf.epsilon**2 / 2
        case TruncatedPoisson(_, _, _, Gaussian(z)):
            # the same rows are drawn, or one more pushes out another
            return (1 if relation is Relation.ZERO_OUT else 2) ** 2 / z**2 / 2
        case _:
            pair = pairs.of(leaf, relation, pairs.directions(relation)[0])
            return (2.0 if pair.kind is Kind.ANTIPODAL else 1.0) ** 2 / pair.sigma**2 / 2
