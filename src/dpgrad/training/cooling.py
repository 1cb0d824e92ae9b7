"""What a temperature costs: the full batches that find it, planned with the run (see `dpgrad.training.temperature`).

>>> from dpgrad.training import plan
>>> plan.make(rows=2000, parameters=22, epsilon=3.0, delta=1e-5, temperature=0.01).temperature.steps
5
"""

import math
from dataclasses import replace

from dpgrad.accounting.events import Event, together
from dpgrad.errors import OptionError
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.sampling import FullBatch
from dpgrad.training.options import Budget

__all__ = ["HALVINGS", "line", "planned"]

HALVINGS = 5  # of the interval in which the logarithm of a temperature lies


def planned(
    share: float | None, budget: Budget, run: Mechanism, size: float, other: Event
) -> tuple[Mechanism | None, Event]:
    """The full batches that take ``share`` of a budget, as its μ² counts it, and their event with ``other``."""
    if share is None:
        return None, other
    if budget.epsilon is None or budget.delta is None:
        raise OptionError("temperature is the share of a budget: give epsilon and delta, or leave out temperature")
    whole = Mechanism(FullBatch(), HALVINGS, 1.0, relation=run.relation, batch_size=size)
    noise_multiplier = whole.calibrated(budget.epsilon, budget.delta, "exact").noise_multiplier / math.sqrt(share)
    made = replace(whole, noise_multiplier=noise_multiplier, secure_values=1 if run.secure_values else 0)
    return made, together(other, made.event())


def line(share: float | None, batches: Mechanism | None) -> list[str]:
    """The line of a plan."""
    if share is None or batches is None:
        return []
    return [
        f"temperature       for {100 * share:.3g} % of the budget: {batches.steps} full batches of one number, noise "
        f"multiplier {batches.noise_multiplier:.4g}"
    ]
