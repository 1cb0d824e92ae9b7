"""What a solver returns: coefficients, the event of having found them, and what a report needs to know of it."""

from dataclasses import dataclass
from typing import Any

from dpgrad.accounting.events import Event, Relation
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.convex.losses import Array
from dpgrad.reports import kinds
from dpgrad.reports.report import Report, report

__all__ = ["Solved", "Statistic"]


@dataclass(frozen=True)
class Statistic:
    """What was released: its name, how far one row moves it, the noise on it, and its share of the budget.

    The share is one of μ²; in objective perturbation and AMP, whose loss is not the noise's alone, that of the two
    parts between which the plan divides its budget: the minimiser of the perturbed objective, and the noise on it.

    The sensitivity is in the Euclidean norm (Frobenius for the matrix), between neighbours; ``std`` is the noise
    on each coordinate. The gradients are sums over the rows, and their two numbers those of one of ``count`` steps,
    each on rows sampled at ``sampling_rate``. The matrix is symmetric: entries off its diagonal count twice in the norm
    and carry noise of std/√2.

    >>> Statistic("mean", sensitivity=0.02, std=0.5, share=0.05).count
    1
    """

    name: str
    sensitivity: float
    std: float
    share: float
    count: int = 1
    sampling_rate: float = 1.0


class Solved(tuple[Array, Event]):
    """The pair (coefficients, event) that a solver returns, with its relation, releases and report.

    >>> import numpy as np
    >>> from dpgrad.accounting.events import Gaussian
    >>> found = Solved(np.zeros((1, 1)), Gaussian(4.0), Relation.ZERO_OUT, "output", reproducible=False)
    >>> coefficients, event = found
    >>> print(found.guarantee(1e-5))
    ε = 0.92635 at δ = 1e-05 for datasets of the same public size, one row's contribution replaced by nothing (full ...
    """

    relation: Relation
    title: str
    reproducible: bool
    releases: tuple[Statistic, ...]

    def __new__(
        cls,
        coefficients: Array,
        event: Event,
        relation: Relation,
        title: str,
        reproducible: bool,
        releases: tuple[Statistic, ...] = (),
    ) -> "Solved":
        """The pair, with the facts for its report."""
        made = super().__new__(cls, (coefficients, event))
        made.relation, made.title = Relation(relation), title
        made.reproducible, made.releases = reproducible, releases
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return *self, self.relation, self.title, self.reproducible, self.releases

    @property
    def coefficients(self) -> Array:
        """The coefficients (features, outputs)."""
        return self[0]

    @property
    def event(self) -> Event:
        """The event of having found them."""
        return self[1]

    def guarantee(self, delta: float) -> Guarantee:
        """The (ε, δ) of the coefficients."""
        return kinds.priced(self.event, self.relation, delta)

    def report(self, delta: float) -> Report:
        """The privacy report, in the format of docs/report.md."""
        return report(self, delta=delta)
