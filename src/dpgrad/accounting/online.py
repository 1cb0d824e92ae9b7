"""Decide step by step whether one more step fits the budget (ε, δ).

Use `Follower` for schedules fixed in advance: the last admissible step is certified before the run. Use `RdpFilter` if
the noise or the sampling rate depends on earlier outputs. Such a run cannot be priced in advance, and the ε spent so
far (an odometer) is not a guarantee.

>>> from dpgrad import events, online
>>> run = online.Follower(lambda n: events.Repeat(events.Gaussian(10.0), n), epsilon=1.0, delta=1e-5)
>>> run.last  # steps within the budget
7
"""

import math
from collections.abc import Callable

from dpgrad import _validate
from dpgrad.accounting import calibrate, rdp
from dpgrad.accounting.events import Event, Leaf, Relation
from dpgrad.errors import BudgetSpentError, OptionError

__all__ = ["Follower", "RdpFilter"]


class Follower:
    """A budget check for a run whose steps were fixed in advance; ``plan(n)`` is the event of its first n steps.

    Guarantee: ``plan(last)`` is (ε, δ)-private by the certified bound of ``accountant``. A run that takes only steps
    that `allows` accepts is at most ``plan(last)``.

    >>> from dpgrad.accounting.events import Gaussian, Repeat
    >>> run = Follower(lambda n: Repeat(Gaussian(10.0), n), epsilon=3.0, delta=1e-5)
    >>> run.last, run.allows()
    (51, True)
    >>> for _ in range(51):
    ...     run.advance()
    >>> run.allows()
    False
    """

    def __init__(
        self,
        plan: Callable[[int], Event],
        epsilon: float,
        delta: float,
        relation: Relation = Relation.ADD_REMOVE,
        accountant: str = "pld",
        limit: int = _validate.MOST_STEPS,
    ) -> None:
        self.plan = plan
        self.epsilon, self.delta, self.relation = epsilon, delta, relation
        self.last = calibrate.steps(plan, epsilon, delta, relation, accountant, limit)
        self.taken = 0

    def allows(self) -> bool:
        """Whether one more step stays within the budget."""
        return self.taken < self.last

    def advance(self) -> None:
        """Count one more step. A step that would exceed the budget is refused and not counted."""
        if self.taken >= self.last:
            raise BudgetSpentError(
                f"step {self.taken + 1:,} would exceed epsilon = {self.epsilon:g} at delta = {self.delta:g}: "
                f"the plan allows {self.last:,} steps; stop here"
            )
        self.taken += 1

    def event(self) -> Event:
        """Return the event of the steps so far."""
        return self.plan(self.taken)


class RdpFilter:
    """A budget check for a run whose steps may depend on earlier outputs, by Rényi divergence of one fixed order.

    ``expected`` is a public guess of a typical step. It is used only to choose the order: the one that allows the most
    repetitions of that step. The order is fixed before the run, because the best order in hindsight would depend on the
    outputs.

    Guarantee: if only steps that `allows` accepts are charged, the whole run is (ε, δ)-private. Let ρ_t be the
    divergence of order α of step t, which may depend on earlier outputs. Stopping before Σρ_t exceeds B keeps the whole
    interaction (α, B)-Rényi private (Feldman and Zrnic 2021, Theorem 4.3; Lécuyer 2021). B is the largest value that
    the improved conversion allows at (ε, δ).

    >>> from dpgrad.accounting.events import Gaussian, Poisson
    >>> step = Poisson(0.01, Gaussian(1.0))
    >>> run = RdpFilter(epsilon=2.0, delta=1e-5, expected=step)
    >>> run.allows(step)
    True
    >>> run.charge(step)
    >>> run.allows(Gaussian(0.1))
    False
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        expected: Event,
        relation: Relation = Relation.ADD_REMOVE,
    ) -> None:
        _validate.positive(epsilon=epsilon)
        _validate.open_unit(delta=delta)
        self.epsilon, self.delta, self.relation = epsilon, delta, relation
        profile = rdp.account(expected, relation)
        if not profile.divergence(2.0):
            raise OptionError(
                "expected must release something: give the steps you expect, by which the Rényi order is chosen"
            )
        most = min(curve.most for curve in profile.curves)
        held = -math.inf
        for k in range(-8, 60):  # budget over divergence rises to one peak and falls
            order = 1 + min(2 ** (k / 4), most)
            times = self._budget(order) / profile.divergence(order)
            if times > held:
                held, self.order = times, order
            elif held > 0 and times < held / 2:
                break
        self.budget = self._budget(self.order)
        self.spent = 0.0
        self._prices: dict[Leaf, float] = {}

    def _budget(self, order: float) -> float:
        """The ρ at which ρ + log(1 − 1/α) − (log δ + log α)/(α − 1) is ε; large orders always leave some."""
        return self.epsilon - math.log1p(-1 / order) + (math.log(self.delta) + math.log(order)) / (order - 1)

    def _price(self, step: Leaf) -> float:
        if step not in self._prices:
            self._prices[step] = rdp.account(step, self.relation).divergence(self.order)
        return self._prices[step]

    def allows(self, step: Leaf) -> bool:
        """Whether ``step`` stays within the budget."""
        return self._after(step) <= self.budget

    def _after(self, step: Leaf) -> float:
        # every sum is rounded up, so no number of steps drifts past the budget
        return math.nextafter(self.spent + self._price(step), math.inf)

    def charge(self, step: Leaf) -> None:
        """Charge ``step`` before looking at anything computed from it; refuse it if it would exceed the budget."""
        if not self.allows(step):
            raise BudgetSpentError(
                f"this step would exceed epsilon = {self.epsilon:g} at delta = {self.delta:g}: "
                f"{self.spent:.6g} of {self.budget:.6g} is spent at order {self.order:.4g}; stop here, or add noise"
            )
        self.spent = self._after(step)
