"""An e-process: a bettor's wealth against the claim, at which one may look after every trial.

For pairs (x, y) of the two worlds and a bet (S, ε, λ) chosen from earlier pairs, Z = 1[x ∈ S] − e^ε·1[y ∈ S] − δ(ε) has
mean at most 0 under the claim, and 1 + λZ ≥ 0 for λ ≤ 1/(e^ε + δ). The wealth ∏(1 + λZ) is a nonnegative
supermartingale that starts at 1, so it ever reaches 1/a with probability at most a (Ville 1939).
"""

import math

import numpy as np

from dpgrad.audit.claims import ClaimCurve
from dpgrad.audit.exact import Array

__all__ = ["Bettor"]

_CAP = 0.5  # of what may be lost in one bet
_LEAST = 50  # pairs before the first bet


class Bettor:
    """Bets against a claim, with bets that are chosen from the pairs seen before.

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
