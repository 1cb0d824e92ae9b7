"""The exact accountant: full-batch Gaussian releases in closed form.

k releases with sensitivity Δ_j and noise s_j, each chosen with knowledge of the earlier ones, are together exactly
μ-GDP with μ² = Σ(Δ_j/s_j)², and

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)      (Balle and Wang 2018; Dong, Roth and Su 2019).

The two terms cancel; with t₁ = ε/μ − μ/2, t₂ = ε/μ + μ/2 and Mills' ratio m(t) = Φ(−t)/φ(t), δ = φ(t₁)·(m(t₁) − m(t₂)),
which keeps its digits at any δ. A shuffled epoch is priced as one Gaussian, which bounds it.

Two kinds of leaves that are not Gaussian compose with them in closed form too (`MixedProfile`):

* *approximate*, known to be (ε₀, δ₀)-private and no more. Its loss is that of randomised response: ∞ with probability
  δ₀, else ε₀ with probability e^{ε₀}/(1 + e^{ε₀}) and −ε₀ otherwise, which dominates every such release (Kairouz, Oh
  and Viswanath 2015). The profile of a composition is its mean over these signs, which is exact.
* *shifted*, whose loss is at most s + max(0, G) with G the loss of a Gaussian. The sum of several such losses and of
  Gaussian ones is S = Σsᵢ plus the largest of G₀ + Σ_{i∈I}Gᵢ over subsets I, and (1 − e^{ε−L})₊ of the largest is at
  most its sum over all: δ(ε) ≤ Σ_I δ(ε − S; √(μ₀² + Σ_{i∈I}μᵢ²)) for ε ≥ S. One alone keeps its own profile. Below S
  the profile, convex in e^ε and 1 at −∞, lies under the chord from there.
"""

import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import erfcx, log_expit, log_ndtr

from dpgrad import _validate
from dpgrad.accounting import _search, pairs
from dpgrad.accounting.events import (
    Approximate,
    Compose,
    DiscreteGaussian,
    Event,
    Exponential,
    Laplace,
    Leaf,
    Poisson,
    RandomizedResponse,
    Relation,
    Repeat,
    Shifted,
    fold,
    leaves,
)
from dpgrad.errors import AccountingError

if TYPE_CHECKING:
    from dpgrad.accounting.pld.blends import Step

__all__ = [
    "NAME",
    "GaussianProfile",
    "MixedProfile",
    "SingleProfile",
    "account",
    "apart",
    "delta",
    "epsilon",
    "log_delta",
    "mu_for",
    "precision",
    "refuse_numbered",
    "refuse_other",
]  # fmt: skip

NAME = "exact"
_ONCE = (Laplace, DiscreteGaussian, RandomizedResponse, Exponential)  # closed forms of one release
_MOST_SIGNS = 4096  # sums of the signs of approximate leaves; beyond, their ε add up
_MOST_SHIFTED = 1000  # subsets of shifted leaves; beyond, the μ of some are rounded up, which only adds
_LEAST = sys.float_info.min  # a δ too small for a float is not zero
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def log_delta(mu: float, epsilon: float) -> float:
    """log δ(ε) of a μ-GDP mechanism.

    >>> round(math.exp(log_delta(1.0, 1.0)), 12)
    0.126936737507
    """
    if mu == 0:
        return -math.inf if epsilon >= 0 else math.log(-math.expm1(epsilon))
    if epsilon < 0:  # δ(−ε) = 1 − e^{−ε} + e^{−ε}·δ(ε), by the symmetry of the pair
        return math.log(-math.expm1(epsilon) + math.exp(epsilon + log_delta(mu, -epsilon)))
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if low < 0 and mu >= 0.5:
        first, second = float(log_ndtr(-low)), epsilon + float(log_ndtr(-high))
        return first + math.log1p(-math.exp(min(second - first, -1e-16)))
    if mu < 0.5:  # m(t₁) − m(t₂) = ∫(1 − t·m(t))dt has no cancellation in μ
        t = epsilon / mu + mu / 2 * _POINTS
        gap = float(_WEIGHTS @ (1 - t * _mills(t))) * mu / 2
    else:
        gap = float(_mills(low) - _mills(high))
    return -(low * low) / 2 - 0.5 * math.log(2 * math.pi) + (math.log(gap) if gap > 0 else -math.inf)


def delta(mu: float, epsilon: float) -> float:
    """δ(ε) of a μ-GDP mechanism at ε ≥ 0, rounded up in the last digits; zero only where μ is.

    >>> delta(1e-3, 9.0), delta(0.0, 0.0)
    (2.2250738585072014e-308, 0.0)
    """
    found = math.exp(log_delta(mu, epsilon)) * (1 + 1e-12)
    return min(max(found, _LEAST), 1.0) if mu else 0.0


def _mills(t: "float | pairs.Array") -> "pairs.Array":
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(np.asarray(t) / math.sqrt(2)))


def epsilon(mu: float, delta: float) -> float:
    """The least ε ≥ 0 of a μ-GDP mechanism at ``delta``, rounded up in the last digits.

    >>> round(epsilon(0.353553, 1e-5), 6)
    1.356466
    """
    target = math.log(delta)
    if mu == 0 or log_delta(mu, 0.0) <= target:
        return 0.0
    # δ(ε) ≤ Φ(μ/2 − ε/μ) < δ from here on
    high = mu * mu / 2 + mu * math.sqrt(-2 * target)
    return _falling(lambda x: log_delta(mu, x) - target, 0.0, high)


def mu_for(epsilon: float, delta: float) -> float:
    """The largest μ that is (ε, δ)-private, rounded down in the last digits.

    >>> round(mu_for(1.0, 1e-5), 6)
    0.268051
    """
    _validate.non_negative(epsilon=epsilon)
    _validate.open_unit(delta=delta)
    target = math.log(delta)
    low = 1.0
    while log_delta(low, epsilon) > target:
        low /= 2
    _, high = _search.doubled(lambda mu: log_delta(mu, epsilon) <= target, low, 2 * low)
    return 1 / _falling(lambda x: log_delta(1 / x, epsilon) - target, 1 / high, 1 / low)


def _falling(excess: Callable[[float], float], low: float, high: float) -> float:
    """The point in [low, high] from which on a falling function is at most zero, from above."""
    return _search.halved(lambda x: excess(x) > 0, low, high, relative=4e-15)[1] * (1 + 1e-13)


@dataclass(frozen=True)
class GaussianProfile:
    """The profile of a mechanism that is exactly μ-GDP."""

    mu: float
    event: Event
    relation: Relation
    accountant: str = NAME
    guarantee: bool = True

    def epsilon(self, delta: float) -> float:
        _validate.open_unit(delta=delta)
        return epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        _validate.non_negative(epsilon=epsilon)
        return delta(self.mu, epsilon)


@dataclass(frozen=True)
class MixedProfile:
    """The profile of Gaussian releases, μ-GDP together, with ``approximate`` and ``shifted`` ones.

    ``approximate`` holds (ε, δ, count), ``shifted`` (shift, μ, count).
    """

    mu: float
    approximate: tuple[tuple[float, float, int], ...]
    shifted: tuple[tuple[float, float, int], ...]
    event: Event
    relation: Relation
    accountant: str = NAME
    guarantee: bool = True

    @property
    def certain(self) -> float:
        """The probability that some approximate leaf fails: no ε has a smaller δ."""
        return -math.expm1(math.fsum(count * math.log1p(-delta) for _, delta, count in self.approximate))

    @property
    def total(self) -> float:
        """The sum of the ε of the approximate leaves and of all shifts."""
        return math.fsum(count * one for one, _, count in (*self.approximate, *self.shifted))

    def epsilon(self, delta: float) -> float:
        """The least ε at ``delta``, from above; ∞ where none is small enough."""
        _validate.open_unit(delta=delta)
        if self.delta(0.0) <= delta:
            return 0.0
        _, high = _search.doubled(lambda x: self.delta(x) > delta, 0.0, max(self.total, 1e-3), most=1e6)
        return _falling(lambda x: self.delta(x) - delta, 0.0, high) if high < math.inf else high

    def delta(self, epsilon: float) -> float:
        """The least δ at ``epsilon``, from above."""
        _validate.non_negative(epsilon=epsilon)
        inside = math.fsum(chance * self._closed(epsilon - loss) for loss, chance in self._signs().items())
        found = min((self.certain + (1 - self.certain) * inside) * (1 + 1e-11), 1.0)
        return max(found, _LEAST) if self.mu or self.shifted or epsilon < self.total else found

    def _signs(self) -> dict[float, float]:
        """The sums of the losses of the approximate leaves, where none fails, and their probabilities."""
        found = {0.0: 1.0}
        for one, _, count in sorted(self.approximate):
            if len(found) * (count + 1) > _MOST_SIGNS:
                found = {loss + count * one: chance for loss, chance in found.items()}
                continue
            ups = range(count + 1)
            up, down = float(log_expit(one)), float(log_expit(-one))
            chances = [math.exp(_log_choose(count, k) + k * up + (count - k) * down) for k in ups]
            grown: dict[float, float] = {}
            for loss, chance in found.items():
                for k in ups:
                    place = loss + (2 * k - count) * one
                    grown[place] = grown.get(place, 0.0) + chance * chances[k]
            found = grown
        return found

    def _closed(self, epsilon: float) -> float:
        """δ at ``epsilon``, which may be negative, of the Gaussian and shifted leaves."""
        if not self.shifted:
            return math.exp(log_delta(self.mu, epsilon)) if self.mu or epsilon < 0 else 0.0
        shift = math.fsum(count * one for one, _, count in self.shifted)
        if sum(count for _, _, count in self.shifted) >= _MOST_SHIFTED:
            return 1.0  # a sum over that many subsets bounds nothing
        if epsilon < shift:
            return 1 - math.exp(epsilon - shift) * (1 - self._closed(shift))
        terms = (chance * math.exp(log_delta(mu, epsilon - shift)) for mu, chance in self._subsets())
        return min(math.fsum(terms), 1.0)

    def _subsets(self) -> Iterable[tuple[float, float]]:
        """μ of the Gaussian leaves with each number of each kind of shifted ones, and in how many ways."""
        found = [(self.mu**2, 1.0)]
        for mu, count in _grouped([(mu, count) for _, mu, count in self.shifted]):
            ways = [math.exp(_log_choose(count, k)) for k in range(count + 1)]
            found = [(square + k * mu**2, way * ways[k]) for square, way in found for k in range(count + 1)]
        return [(math.sqrt(square), way) for square, way in found if square]


def _grouped(kinds: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The kinds (μ, count), neighbouring μ raised to the larger where there are too many ways to choose among them.

    >>> _grouped([(0.3, 2), (0.1, 1)]), _grouped([(0.1 + i, 9) for i in range(4)])
    ([(0.1, 1), (0.3, 2)], [(2.1, 27), (3.1, 9)])
    """
    found = sorted(kinds)
    while len(found) > 1 and math.prod(count + 1 for _, count in found) > _MOST_SHIFTED:
        least = min(range(len(found) - 1), key=lambda i: found[i + 1][0] - found[i][0])
        (_, few), (mu, many) = found[least : least + 2]
        found[least : least + 2] = [(mu, few + many)]
    return found


def _log_choose(count: int, k: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)


@dataclass(frozen=True)
class SingleProfile:
    """The profile of one release that is no Gaussian, in closed form."""

    step: "Step"
    event: Event
    relation: Relation
    accountant: str = NAME
    guarantee: bool = True

    def epsilon(self, delta: float) -> float:
        from dpgrad.accounting.pld import single

        _validate.open_unit(delta=delta)
        return single.epsilon_at(self.step, delta, upper=True)

    def delta(self, epsilon: float) -> float:
        from dpgrad.accounting.pld import single

        _validate.non_negative(epsilon=epsilon)
        return single.bound(self.step, epsilon, upper=True)


def account(event: Event, relation: Relation = Relation.ADD_REMOVE) -> GaussianProfile | MixedProfile | SingleProfile:
    """The profile of full-batch releases; sampled ones are refused: no closed form is known.

    One release with Laplace or discrete Gaussian noise, or by the exponential mechanism, has a closed form; several of
    them are refused. Randomized responses with two categories compose as purely private leaves do.

    >>> from dpgrad.accounting.events import Gaussian
    >>> profile = account(Repeat(Gaussian(8.0), 128))
    >>> round(profile.epsilon(1e-5), 6)
    6.57297
    >>> pure = Approximate(0.1, 0.0, Relation.REPLACE_ONE)
    >>> round(account(Repeat(pure, 10), Relation.REPLACE_ONE).epsilon(1e-5), 6)  # adding up gives 1
    0.993691
    """
    relation = Relation(relation)
    counts = leaves(event)
    if len(counts) == 1 and isinstance(leaf := next(iter(counts)), _ONCE) and counts[leaf] == 1:
        from dpgrad.accounting import losses

        step = losses.of(leaf, relation, pairs.directions(relation)[0])
        if isinstance(step, pairs.Pair):  # it tells nothing
            return GaussianProfile(0.0, event, relation)
        return SingleProfile(step, event, relation)
    _, rest = apart(event, relation)
    square = fold(event, lambda leaf: precision(leaf, relation), operator.mul, math.fsum)
    if not rest.approximate and not rest.shifted:
        return GaussianProfile(math.sqrt(square), event, relation)
    return MixedProfile(math.sqrt(square), rest.approximate, rest.shifted, event, relation)


def apart(event: Event, relation: Relation) -> tuple[Counter[Leaf], MixedProfile]:
    """The leaves that are Gaussian noise on a sum, and the profile of all others together.

    >>> from dpgrad.accounting.events import Gaussian
    >>> plain, rest = apart(Compose((Gaussian(2.0), Shifted(0.1, Gaussian(50.0)))), Relation.ZERO_OUT)
    >>> plain, rest.shifted
    (Counter({Gaussian(noise_multiplier=2.0): 1}), ((0.1, 0.02, 1),))
    """
    plain: Counter[Leaf] = Counter()
    approximate, shifted, others = [], [], []
    for leaf, count in leaves(event).items():
        match leaf:
            case Approximate(epsilon, delta):
                refuse_other(leaf, relation)
                approximate.append((epsilon, delta, count))
            case RandomizedResponse(categories=2):
                refuse_numbered(leaf, relation)
                if leaf.epsilon:
                    approximate.append((leaf.epsilon, 0.0, count))
            case Shifted(shift, inner):
                shifted.append((shift, math.sqrt(precision(inner, relation)), count))
            case _:
                plain[leaf] += count
                continue
        others.append(Repeat(leaf, count))
    rest = MixedProfile(0.0, tuple(approximate), tuple(shifted), Compose(tuple(others)), relation)
    return plain, rest


def refuse_other(leaf: Approximate, relation: Relation) -> None:
    """Refuse an approximate leaf that was declared for neighbours under another relation."""
    if leaf.relation is not relation:
        raise AccountingError(
            f"a release declared ({leaf.epsilon:g}, {leaf.delta:g})-private under {leaf.relation} has no price under "
            f"{relation}: ask for relation {leaf.relation}"
        )


def refuse_numbered(leaf: RandomizedResponse, relation: Relation) -> None:
    """Refuse randomized answers under a relation whose neighbours differ in their number."""
    if relation is not Relation.REPLACE_ONE:
        raise AccountingError(
            f"{type(leaf).__name__} has no price under {relation}: one answer of every row is released, which shows "
            "their number; use relation replace-one"
        )


def precision(leaf: Leaf, relation: Relation) -> float:
    """(shift/std)² of one application; 0 of a leaf that is no Gaussian noise on a sum."""
    if isinstance(leaf, RandomizedResponse) and leaf.categories == 2:
        return 0.0
    if isinstance(leaf, _ONCE):
        raise AccountingError(
            f"accountant exact prices {type(leaf).__name__} once and alone, not composed: use accountant pld"
        )
    if isinstance(leaf, Approximate | Shifted) or (isinstance(leaf, Poisson) and leaf.sampling_rate == 0):
        return 0.0
    pair = pairs.of(leaf, relation, pairs.directions(relation)[0])
    if pair.sampling_rate < 1:
        raise AccountingError(
            f"accountant exact prices full-batch Gaussians only, got {type(leaf).__name__} sampling "
            f"at rate {pair.sampling_rate:g}: use accountant pld"
        )
    return float(pair.sigma) ** -2
