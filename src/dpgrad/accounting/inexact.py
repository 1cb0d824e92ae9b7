"""The price of noise that is not drawn exactly: δ grows by the probability that it follows another law.

With probability 1 − η the noise is that of the event, whatever the data; with probability η nothing is known. The
hockey-stick divergence is jointly convex, so δ(ε) ≤ (1 − η)·δ_exact(ε) + η (docs/proofs/secure_noise.md, section 1).

>>> from dpgrad.accounting.events import Gaussian, Repeat
>>> parted(Repeat(Inexact(Gaussian(4.0), 1e-9), 100))  # doctest: +ELLIPSIS
(Repeat(event=Gaussian(noise_multiplier=4.0), count=100), 1.0000...e-07)
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpgrad import _validate
from dpgrad.accounting.events import Event, Inexact, Relation, Repeat, leaves, together
from dpgrad.accounting.guarantee import Profile

if TYPE_CHECKING:
    from dpgrad.accounting.pld import Interval

__all__ = ["MOST_EPSILON", "InexactProfile", "parted", "proved"]

MOST_EPSILON = 256.0  # up to which the distance is proved


def parted(event: Event) -> tuple[Event, float]:
    """The event with noise that is drawn exactly, and the probability that any of it is not, rounded up."""
    counts = leaves(event)
    inexact = {leaf: count for leaf, count in counts.items() if isinstance(leaf, Inexact)}
    if not inexact:
        return event, 0.0
    exact = [Repeat(leaf.event if isinstance(leaf, Inexact) else leaf, count) for leaf, count in counts.items()]
    distance = math.fsum(leaf.distance * count for leaf, count in inexact.items()) * (1 + 2.0**-50)
    return together(*exact), min(1.0, distance)


@dataclass(frozen=True)
class InexactProfile:
    """The profile ``exact`` of exact noise, for noise that follows another law with probability ``distance``.

    Guarantee: δ(ε) of the event is at most ``exact.delta(ε) + distance`` up to ε = 256. Beyond, ε is infinite.

    >>> from dpgrad.accounting import account
    >>> from dpgrad.accounting.events import Gaussian
    >>> profile = account(Inexact(Gaussian(4.0), 1e-6), accountant="exact")
    >>> found = profile.epsilon(1e-5), account(Gaussian(4.0), accountant="exact").epsilon(9e-6)
    >>> round(found[0], 6) == round(found[1], 6)
    True
    """

    exact: Profile
    event: Event
    distance: float

    @property
    def accountant(self) -> str:
        return self.exact.accountant

    @property
    def relation(self) -> Relation:
        return self.exact.relation

    @property
    def guarantee(self) -> bool:
        return self.exact.guarantee

    def epsilon(self, delta: float) -> float:
        """The ε certified at ``delta``."""
        _validate.open_unit(delta=delta)
        left = self._left(delta)
        return proved(self.exact.epsilon(left)) if left > 0 else math.inf

    def delta(self, epsilon: float) -> float:
        """The δ certified at ``epsilon``."""
        return min(1.0, math.nextafter(self.exact.delta(min(epsilon, MOST_EPSILON)) + self.distance, 1.0))

    def estimate(self, delta: float) -> float:
        """An estimate of ε, where the accountant has a quick one; else the bound."""
        from dpgrad.accounting.pld import PldProfile

        left = self._left(delta)
        if left <= 0 or not isinstance(self.exact, PldProfile):
            return self.epsilon(delta)
        return proved(self.exact.estimate(left))

    def interval(self, delta: float) -> "Interval":
        """Bounds and estimate of ε at ``delta``; the lower bound is that of exact noise, 0 where there is none."""
        from dpgrad.accounting.pld import Interval, PldProfile

        upper = self.epsilon(delta)
        if not isinstance(self.exact, PldProfile):
            return Interval(0.0, upper, upper)
        found = self.exact.interval(delta)
        lower = min(found.lower, upper)
        return Interval(lower, min(max(lower, self.estimate(delta)), upper), upper)

    def _left(self, delta: float) -> float:
        return math.nextafter(delta - self.distance, 0.0)


def proved(epsilon: float) -> float:
    """The ε where the distance is proved, else infinity.

    >>> proved(3.0), proved(300.0)
    (3.0, inf)
    """
    return epsilon if epsilon <= MOST_EPSILON else math.inf
