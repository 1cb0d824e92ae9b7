"""The two-world game: many runs with and without one row, told apart by a score, against the whole claimed curve.

A threshold is chosen on the first part of the trials. On the rest, with FP false positives of n₀ and FN false negatives
of n₁, T(a) = P[Bin(n₀, a) ≤ FP]·P[Bin(n₁, f(a)) ≤ FN], and p = sup_a T(1 − ln T), cells of a grid bounded from above.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from dpgrad import _validate
from dpgrad.audit.claims import AnyClaim, ClaimCurve, Claimed, claimed
from dpgrad.audit.exact import Array
from dpgrad.audit.record import Audit, Check, judged
from dpgrad.errors import AuditError, OptionError

__all__ = [
    "Bettor",
    "Wrong",
    "chosen",
    "counted",
    "game",
    "judgement",
    "least_epsilon",
    "least_in_family",
    "p_value",
    "scores",
]

_SHARE = 0.3  # of the trials, on which the threshold is chosen
_BLOCK = 50  # pairs of trials between two looks of the e-process
_CAP = 0.5  # of what may be lost in one bet
_LEAST = 50  # pairs before the first bet
_GRID = np.concatenate([
    [0.0], np.geomspace(1e-12, 1e-3, 300), np.linspace(1e-3, 0.999, 4000)[1:], 1 - np.geomspace(1e-3, 1e-12, 300)[1:],
    [1.0],
])  # fmt: skip
_NOT_TRIED = ("other scores, rows and data", "other thresholds", "anything that the score does not read")


class Bettor:
    """An e-process: a bettor's wealth against a claim, at which one may look after every trial.

    For pairs (x, y) of the two worlds and a bet (S, ε, λ) chosen from earlier pairs, Z = 1[x ∈ S] − e^ε·1[y ∈ S] − δ(ε)
    has mean at most 0 under the claim, and 1 + λZ ≥ 0 for λ ≤ 1/(e^ε + δ). The wealth ∏(1 + λZ) is a nonnegative
    supermartingale that starts at 1, so it ever reaches 1/a with probability at most a (Ville 1939).

    >>> random = np.random.default_rng(0)
    >>> bettor = Bettor(ClaimCurve.point(0.5, 1e-5))
    >>> for n in range(50, 1001, 50):
    ...     bettor.look(random.normal(2, 1, 1000)[:n], random.normal(0, 1, 1000)[:n])
    >>> bettor.p < 1e-3
    True
    """

    def __init__(self, curve: ClaimCurve) -> None:
        self._curve, self._log_wealth, self._log_best = curve, 0.0, 0.0
        self.seen = 0
        self._bet: tuple[bool, float, float, float, float, float] | None = None

    @property
    def best(self) -> float:
        """The largest wealth so far."""
        return math.exp(min(self._log_best, 700.0))

    @property
    def p(self) -> float:
        """An anytime-valid p-value."""
        return math.exp(-self._log_best)

    def look(self, inside: Array, outside: Array) -> None:
        """Settle the bet on the pairs that are new, and choose the next one from all of them."""
        new = slice(self.seen, len(inside))
        if self._bet is not None:
            swapped, sign, cut, growth, delta, stake = self._bet
            x, y = (outside[new], inside[new]) if swapped else (inside[new], outside[new])
            z = (sign * x > sign * cut) - growth * (sign * y > sign * cut) - delta
            wealth = self._log_wealth + np.cumsum(np.log1p(stake * z))
            self._log_wealth = float(wealth[-1])
            self._log_best = max(self._log_best, float(wealth.max()))
        self.seen = len(inside)
        self._bet = self._chosen(inside, outside) if self.seen >= _LEAST else None

    def _chosen(self, inside: Array, outside: Array) -> tuple[bool, float, float, float, float, float] | None:
        cuts = np.quantile(np.concatenate([inside, outside]), np.linspace(0.02, 0.98, 49))
        epsilons, deltas = self._curve.epsilons, self._curve.deltas
        usable = (epsilons < 30) & (deltas < 1)
        growth, deltas = np.exp(epsilons[usable]), deltas[usable]
        best, found = 0.0, None
        for swapped in (False, True):
            x, y = (outside, inside) if swapped else (inside, outside)
            for sign in (1.0, -1.0):
                with_x = (sign * x[:, None] > sign * cuts).mean(0)[:, None]
                with_y = ((sign * y[:, None] > sign * cuts).sum(0)[:, None] + 0.5) / (len(y) + 1)
                mean = with_x - growth * with_y - deltas  # (cuts, ε)
                spread = with_x * (1 - with_x) + growth**2 * with_y * (1 - with_y)
                gain = np.where(mean > 0, mean**2 / (mean**2 + spread), 0.0)
                if gain.size and gain.max() > best:
                    best = float(gain.max())
                    cut, at = np.unravel_index(int(np.argmax(gain)), gain.shape)
                    wanted = 0.5 * mean[cut, at] / (mean[cut, at] ** 2 + spread[cut, at])
                    stake = min(float(wanted), _CAP / float(growth[at] + deltas[at]))
                    found = (swapped, sign, float(cuts[cut]), float(growth[at]), float(deltas[at]), stake)
        return found


@dataclass(frozen=True)
class Wrong:
    """False positives among trials without the row, and false negatives among trials with it."""

    false_positives: int
    without: int
    false_negatives: int
    with_: int


def p_value(counts: Wrong, curve: ClaimCurve) -> float:
    """The p-value of the claim from the counts at one threshold that was fixed beforehand.

    >>> p_value(Wrong(0, 1000, 0, 1000), ClaimCurve.point(1.0, 1e-5)) < 1e-100
    True
    >>> p_value(Wrong(500, 1000, 500, 1000), ClaimCurve.point(1.0, 1e-5))
    1.0
    """
    return float(_p_values(counts, curve.f(_GRID)))


def _p_values(counts: Wrong, f: Array) -> float:
    with np.errstate(divide="ignore"):
        left = np.log(special.bdtr(counts.false_positives, counts.without, _GRID[:-1]))
        right = np.log(special.bdtr(counts.false_negatives, counts.with_, f[1:]))
    largest = float(np.nanmax(left + right))
    if largest == -math.inf:
        return 0.0
    largest = min(largest, 0.0)
    return min(1.0, math.exp(largest) * (1 - largest))


def chosen(inside: Array, outside: Array, curve: ClaimCurve) -> tuple[float, bool]:
    """The threshold, and whether scores are to be flipped, that look worst for the claim on these trials."""
    best, found = -math.inf, (0.0, False)
    for flip in (False, True):
        sign = -1.0 if flip else 1.0
        a, b = np.sort(sign * inside), np.sort(sign * outside)
        cuts = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0.005, 0.995, 120)))
        positives = len(b) - np.searchsorted(b, cuts, "right")
        negatives = np.searchsorted(a, cuts, "right")
        fpr, fnr = (positives + 0.5) / (len(b) + 1), (negatives + 0.5) / (len(a) + 1)
        f = curve.f(fpr)
        slope = (curve.f(np.minimum(1.0, fpr + 1e-4)) - f) / 1e-4
        spread = np.sqrt(fnr * (1 - fnr) / len(a) + slope**2 * fpr * (1 - fpr) / len(b))
        z = (f - fnr) / spread
        at = int(np.argmax(z))
        if z[at] > best:
            best, found = float(z[at]), (float(cuts[at]), flip)
    return found


def counted(inside: Array, outside: Array, threshold: float, flip: bool) -> Wrong:
    """The errors of the test that says "with" where the score exceeds the threshold."""
    sign = -1.0 if flip else 1.0
    return Wrong(
        int((sign * outside > threshold).sum()), len(outside), int((sign * inside <= threshold).sum()), len(inside)
    )


def least_epsilon(counts: Wrong, delta: float, level: float) -> float:
    """The largest ε for which (ε, δ)-privacy is refuted at ``level``; 0 where none is. No model is assumed.

    >>> least_epsilon(Wrong(1, 1000, 500, 1000), 1e-5, 0.01) > 3
    True
    """
    return _last_refuted(lambda epsilon: p_value(counts, ClaimCurve.point(epsilon, delta)) <= level, 0.0, 60.0)


def least_in_family(counts: Wrong, claim: Claimed, delta: float, level: float) -> float | None:
    """The largest ε at ``delta`` that is refuted among the claimed mechanism with any noise; None without a family."""
    family = claim.family
    if family is None:
        return None

    def refuted(less: float) -> bool:
        return p_value(counts, ClaimCurve.of(family.at(math.exp(-less)), 12)) <= level

    # from eight times the noise to an eighth
    found = _last_refuted(refuted, -math.log(8), math.log(8), 10)
    return 0.0 if found == -math.log(8) and not refuted(found) else family.at(math.exp(-found)).epsilon(delta)


def _last_refuted(refuted: Callable[[float], bool], low: float, high: float, turns: int = 40) -> float:
    """Where refuting ends, by bisection; the value returned was refuted, or is ``low``."""
    if not refuted(low):
        return low
    if refuted(high):
        return high
    for _ in range(turns):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def scores(
    inside: Sequence[float],
    outside: Sequence[float],
    claim: AnyClaim,
    *,
    delta: float = 1e-5,
    level: float = 1e-3,
    seed: int = 0,
) -> Audit:
    """Audit a claim by scores of independent runs with (``inside``) and without (``outside``) one row, in run order.

    ``claim`` is a Mechanism, a Guarantee, a privacy profile, a `ClaimCurve` or a pair (ε, δ); it is tested as a whole
    curve. ``delta`` is that of the lower bounds on ε.

    >>> random = np.random.default_rng(0)
    >>> found = scores(random.normal(4.0, 1, 500), random.normal(0.0, 1, 500), (1.0, 1e-5))
    >>> found.refuted, found.lower_epsilon > 1
    (True, True)
    """
    told = claimed(claim)
    a, b = _numbers("inside", inside), _numbers("outside", outside)
    _validate.open_unit(delta=delta, level=level)
    return judgement(a, b, told, delta, level, seed, [])


def _numbers(name: str, values: Sequence[float]) -> Array:
    found = np.asarray(values, float).ravel()
    if len(found) < 20 or np.isnan(found).any():
        raise OptionError(f"{name} must hold at least 20 scores that are numbers, got {len(found)}")
    return found


def judgement(
    inside: Array, outside: Array, told: Claimed, delta: float, level: float, seed: int, before: list[Check]
) -> Audit:
    """The record of a game from all of its scores, and of the checks that came before."""
    first = int(len(inside) * _SHARE), int(len(outside) * _SHARE)
    threshold, flip = chosen(inside[: first[0]], outside[: first[1]], told.curve)
    counts = counted(inside[first[0] :], outside[first[1] :], threshold, flip)
    says = (
        f"{counts.false_positives} of {counts.without} runs without the row and {counts.with_ - counts.false_negatives}"
        f" of {counts.with_} with it were called with"
    )
    checks = judged([*before, Check("two-world game", p_value(counts, told.curve), says)], level)
    share = checks[-1].level
    return Audit(
        "game", told.words, level, checks, _NOT_TRIED, delta=delta, lower_epsilon=least_epsilon(counts, delta, share),
        lower_epsilon_in_family=least_in_family(counts, told, delta, share), seed=seed,
        trials=len(inside) + len(outside), guarantee=told.guarantee,
    )  # fmt: skip


def game(
    train: Callable[[Any, int], Any],
    without: Any,
    with_: Any,
    claim: AnyClaim,
    *,
    score: Callable[[Any], float] = float,
    trials: int = 1000,
    delta: float = 1e-5,
    level: float = 1e-3,
    stop_early: bool = False,
    seed: int = 0,
) -> Audit:
    """Audit any code by the two-world game: ``train(data, seed)`` runs on both datasets, ``score`` reads each result.

    Half of the ``trials`` are ``without`` the row and half ``with_`` it, each under a seed of its own. The claim is
    tested as a whole curve. With ``stop_early`` an e-process is looked at after every fifty pairs, and the game ends
    where it refutes the claim; it and the final test have half of the level each.

    >>> def train(data, seed):
    ...     return sum(data) + np.random.default_rng(seed).normal(0, 0.2)
    >>> game(train, [0.0], [0.0, 1.0], claim=(1.0, 1e-5), trials=200).refuted
    True
    """
    told = claimed(claim)
    _validate.whole(least=40, trials=trials)
    _validate.open_unit(delta=delta, level=level)
    _validate.whole(seed=seed)
    pairs = trials // 2
    inside, outside = np.zeros(pairs), np.zeros(pairs)
    bettor = Bettor(told.curve)
    for pair in range(pairs):
        for place, (data, kept) in enumerate(((without, outside), (with_, inside))):
            found = float(score(train(data, seed * 1_000_003 + 2 * pair + place)))
            if math.isnan(found):
                raise AuditError(f"score of trial {2 * pair + place} is not a number: every result must have one")
            kept[pair] = found
        if stop_early and (pair + 1) % _BLOCK == 0:
            bettor.look(inside[: pair + 1], outside[: pair + 1])
            if bettor.p <= level / 2:
                check = replace(_betting(bettor), level=level / 2)
                return Audit(
                    "game",
                    told.words,
                    level,
                    (check,),
                    _NOT_TRIED,
                    delta=delta,
                    seed=seed,
                    trials=2 * (pair + 1),
                    guarantee=told.guarantee,
                )
    return judgement(inside, outside, told, delta, level, seed, [_betting(bettor)] if stop_early else [])


def _betting(bettor: Bettor) -> Check:
    return Check("e-process", bettor.p, f"wealth {bettor.best:.3g} after {bettor.seen} pairs of runs")
