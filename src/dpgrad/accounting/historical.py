"""Strong composition, to compare: a valid form, and the paper's own arithmetic, which is not a guarantee.

**Valid** (`account`). A step is (ε₀, δ₀)-private before sampling, with the exact ε₀ of its Gaussian at δ₀, and
(ε₁, δ₁) = (log(1 + q(e^{ε₀} − 1)), qδ₀) after it. Steps (ε_i, δ_i) compose to

    ε = min(Σε_i,  √(2·log(1/δ′)·Σε_i²) + Σε_i(e^{ε_i} − 1)),      δ = Σδ_i + δ′

(Dwork, Rothblum and Vadhan 2010, with sums for steps that differ: Azuma's inequality for losses that lie in [−ε_i, ε_i]
and have mean at most ε_i(e^{ε_i} − 1); adding up needs no δ′). Every step gets the same δ_i, and the part of δ that
goes to δ′ is the best of `SPLITS`: each gives a bound, so the least is one. Beyond a thousand distinct steps noise is
rounded down by up to a thousandth, which only adds to ε.

*Amplification.* Poisson sampling under add/remove and zero-out: Li, Qardaji and Su (2012); fixed-size under
replace-one: Balle, Barthe and Gaboardi (2018, Thm. 9), with a Gaussian that moves by two clips. Poisson under
replace-one: conditioned on the other rows P = (1−q)N₀ + qN_a and Q = (1−q)N₀ + qN_b, so by their advanced joint
convexity (Thm. 2) H_{e^{ε₁}}(P‖Q) = q·H_{e^{ε₀}}(N_a ‖ (1−β)N₀ + βN_b) for some β in [0, 1]. H is convex in its second
argument, N₀ is one clip from N_a and N_b at most two, so this is at most qδ₀ for the Gaussian that moves by two clips.

**Printed** (`printed`). Abadi et al. (2016) amplify to ε₁ = q·ε₀ with the classical ε₀ = √(2·log(1.25/δ₀))/σ, outside
the range (ε₀ < 1) in which either holds, with δ₀ = δ/2Tq, and use ε₁√(2T·log(2/δ)) + Tε₁². At q = 0.01, σ = 0.5, T = 1
and δ = 1e-5 that is 0.4 where the truth is 3.03.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpgrad import _validate
from dpgrad.accounting import _search, exact, pairs
from dpgrad.accounting.events import Event, Gaussian, Leaf, Poisson, Relation, leaves, tally
from dpgrad.accounting.pairs import Kind
from dpgrad.errors import AccountingError, OptionError

__all__ = [
    "NAME",
    "PRINTED",
    "SPLITS",
    "PrintedProfile",
    "Steps",
    "StrongProfile",
    "account",
    "amplification",
    "amplified",
    "classical_gaussian",
    "moments_scale",
    "momentum_noise",
    "printed",
    "strong_scale",
]

NAME = "strong"
PRINTED = "strong-printed"
SPLITS = (0.5, 0.2, 0.05, 0.01, 0.002)  # δ′/δ
_LEAST = 1e-300
_MANY = 1000

Steps = tuple[tuple[float, float, int], ...]


def amplified(epsilon: float, sampling_rate: float) -> float:
    """log(1 + q(e^ε − 1)): the ε of a mechanism that sees a sample at rate q. Its δ becomes qδ.

    >>> round(amplified(1.0, 0.01), 6)
    0.017037
    """
    if sampling_rate == 0:
        return 0.0
    if epsilon > 30:
        high = math.log(sampling_rate) + epsilon
        if high > 0:
            return high + math.log1p((1 - sampling_rate) * math.exp(-high))
        return math.log1p(math.exp(high) - sampling_rate)
    return math.log1p(sampling_rate * math.expm1(epsilon))


@dataclass(frozen=True)
class StrongProfile:
    """Strong composition that holds, of steps as (sampling rate, shift over noise, count)."""

    event: Event
    relation: Relation
    steps: Steps
    accountant: str = NAME
    guarantee: bool = True

    def epsilon(self, delta: float) -> float:
        """The ε at ``delta``, at the best split of δ."""
        _validate.open_unit(delta=delta)
        if not self.steps:
            return 0.0
        plain = math.fsum(count * one for one, count in self._each(delta))
        return min(plain, *(self._composed(delta, split) for split in SPLITS))

    def delta(self, epsilon: float) -> float:
        """The least δ whose ε is at most ``epsilon``, from above; 1 where there is none."""
        return _inverse(self.epsilon, epsilon) if self.steps else 0.0

    def _each(self, delta: float) -> list[tuple[float, int]]:
        """ε of one application of each distinct step and its count, with δ spent evenly over all applications."""
        share = delta / sum(count for _, _, count in self.steps)
        found = []
        for sampling_rate, mu, count in self.steps:
            base = share / sampling_rate  # from 1 on, the sampling alone is private enough
            found.append((amplified(exact.epsilon(mu, base), sampling_rate) if base < 1 else 0.0, count))
        return found

    def _composed(self, delta: float, split: float) -> float:
        each = self._each(delta * (1 - split))
        square = math.fsum(count * one * one for one, count in each)
        drift = math.fsum(count * one * (math.expm1(one) if one < 700 else math.inf) for one, count in each if one)
        return math.sqrt(-2 * math.log(delta * split) * square) + drift


@dataclass(frozen=True)
class PrintedProfile:
    """Strong composition as Abadi et al. print it: never a guarantee."""

    event: Event
    relation: Relation
    steps: Steps
    accountant: str = PRINTED
    guarantee: bool = False

    def epsilon(self, delta: float) -> float:
        """ε₁√(2T·log(2/δ)) + Tε₁², with sums where steps differ."""
        _validate.open_unit(delta=delta)
        total = sum(count for _, _, count in self.steps)
        square = 0.0
        for sampling_rate, mu, count in self.steps:
            base = delta / (2 * total * sampling_rate)
            square += count * 2 * max(math.log(1.25 / base), 0.0) * (sampling_rate * mu) ** 2
        return math.sqrt(-2 * math.log(delta / 2) * square) + square

    def delta(self, epsilon: float) -> float:
        """The least δ whose printed ε is at most ``epsilon``; 1 where there is none."""
        return _inverse(self.epsilon, epsilon) if self.steps else 0.0


def _inverse(epsilon_at: Callable[[float], float], epsilon: float) -> float:
    """The least δ at which a falling ε(δ) is at most ``epsilon``, from above."""
    _validate.non_negative(epsilon=epsilon)
    if epsilon_at(_LEAST) <= epsilon:
        return _LEAST
    found = _search.halved(lambda x: epsilon_at(math.exp(x)) > epsilon, math.log(_LEAST), 0.0, absolute=1e-11)
    return math.exp(found[1])


def account(event: Event, relation: Relation = Relation.ADD_REMOVE) -> StrongProfile:
    """Strong composition that holds: exact Gaussian, exact amplification, never worse than adding up.

    >>> from dpgrad.accounting.events import Repeat
    >>> round(account(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000)).epsilon(1e-5), 3)
    16.847
    >>> round(account(Poisson(0.01, Gaussian(0.5))).epsilon(1e-5), 4)  # one step: the truth
    3.0254

    Guarantee: (epsilon(δ), δ)-private for every δ, for neighbours under ``relation``.
    """
    relation = Relation(relation)
    many = len(leaves(event)) > _MANY

    def price(leaf: Leaf) -> tuple[float, float]:
        sampling_rate, mu = _sampled(leaf, relation)
        return sampling_rate, max(mu, math.exp(math.ceil(math.log(mu) * 1000) / 1000)) if many else mu

    steps = tally(event, price)
    return StrongProfile(
        event,
        relation,
        tuple((sampling_rate, mu, count) for (sampling_rate, mu), count in steps.items() if sampling_rate),
    )


def printed(event: Event, relation: Relation = Relation.ADD_REMOVE) -> PrintedProfile:
    """Strong composition as Abadi et al. apply it. Not a guarantee: it understates where noise is small.

    >>> from dpgrad.accounting.events import Repeat
    >>> profile = printed(Repeat(Poisson(0.01, Gaussian(4.0)), 10_000))
    >>> round(profile.epsilon(1e-5), 3), profile.guarantee
    (9.339, False)
    """
    relation = Relation(relation)
    for leaf in leaves(event):
        if relation is Relation.REPLACE_ONE or not isinstance(leaf, Gaussian | Poisson):
            raise AccountingError(
                f"accountant {PRINTED} has a form for full-batch and Poisson sampling under add-remove or zero-out "
                f"only, got {type(leaf).__name__} under {relation}: use accountant {NAME} or pld"
            )
    return PrintedProfile(event, relation, account(event, relation).steps)


def _sampled(leaf: Leaf, relation: Relation) -> tuple[float, float]:
    """The sampling rate of a leaf and shift/std of the Gaussian it samples."""
    pair = pairs.of(leaf, relation, pairs.directions(relation)[0])  # refuses what has no price
    shift = 2.0 if pair.kind is Kind.ANTIPODAL else 1.0  # the other kinds are in units of the shift already
    return pair.sampling_rate, shift / pair.sigma


def moments_scale(sampling_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """q·√(T·log(1/δ))/ε: the noise multiplier under the moments accountant, up to a constant.

    Abadi et al. (2016), Thm. 1, for ε below a constant times q²T.

    >>> round(moments_scale(0.01, 10_000, 1.0, 1e-5), 4)
    3.3931
    """
    _scaling(sampling_rate, steps, epsilon, delta)
    return sampling_rate * math.sqrt(-steps * math.log(delta)) / epsilon


def strong_scale(sampling_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """q·√(T·log(1/δ)·log(T/δ))/ε: the noise multiplier under strong composition, up to a constant.

    Abadi et al. (2016), after Thm. 1: a factor √log(T/δ) more than `moments_scale`.

    >>> round(strong_scale(0.01, 10_000, 1.0, 1e-5), 4)
    15.4462
    """
    return moments_scale(sampling_rate, steps, epsilon, delta) * math.sqrt(math.log(steps / delta))


def _scaling(sampling_rate: float, steps: int, epsilon: float, delta: float) -> None:
    _validate.unit_interval(sampling_rate=sampling_rate)
    _validate.whole(least=1, steps=steps)
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)


def classical_gaussian(epsilon: float, delta: float) -> float:
    """√(2·log(1.25/δ))/ε: the classical noise multiplier of one Gaussian release, for ε below 1 only.

    Dwork and Roth (2014), Thm. A.1. At ε ≥ 1 it can be too little noise, and it is refused; below, it is more than the
    exact multiplier 1/μ.

    >>> round(classical_gaussian(0.5, 1e-5), 4)
    9.6896
    >>> classical_gaussian(1.0, 1e-5)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: the classical Gaussian noise holds for epsilon below 1, got 1.0: use 1 / ...
    """
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)
    if epsilon >= 1:
        raise OptionError(
            f"the classical Gaussian noise holds for epsilon below 1, got {epsilon!r}: "
            "use 1 / exact.mu_for(epsilon, delta)"
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def amplification(epsilon: float, delta: float, sampling_rate: float) -> tuple[float, float]:
    """(log(1 + q(e^ε − 1)), qδ): what an (ε, δ)-private mechanism is when it sees a sample at rate q.

    Poisson sampling under add/remove (Li, Qardaji and Su 2012), sampling without replacement under replace-one (Balle,
    Barthe and Gaboardi 2018). The papers' (qε, qδ) is less than this and does not hold.

    >>> [round(x, 9) for x in amplification(1.0, 1e-5, 0.01)]
    [0.017036863, 1e-07]
    """
    _validate.non_negative(epsilon=epsilon)
    _validate.unit_interval(delta=delta, sampling_rate=sampling_rate)
    return amplified(epsilon, sampling_rate), sampling_rate * delta


def momentum_noise(momentum: float, steps: int | None = None) -> float:
    """(1 − c^{2t})/(1 − c²): the noise variance in m_t = c·m_{t−1} + g_t after t steps, in units of one step's.

    Yu et al. (2018). Without ``steps``, the limit 1/(1 − c²). Momentum is post-processing and costs no privacy; this is
    what it costs in noise.

    >>> round(momentum_noise(0.9), 2), momentum_noise(0.5, 2)
    (5.26, 1.25)
    """
    if not 0 <= momentum < 1:
        raise OptionError(f"momentum must lie in [0, 1), got {momentum!r}: at 1 the noise grows without bound")
    if steps is None:
        return 1 / (1 - momentum**2)
    _validate.whole(least=1, steps=steps)
    return -math.expm1(2 * steps * math.log(momentum)) / (1 - momentum**2) if momentum else 1.0
