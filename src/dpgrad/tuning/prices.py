"""What choosing among trials costs, by each way of paying for it.

*One trial* is what the same model costs without a choice. *A random number of trials* is Papernot and Steinke (2022),
of which only the best is released. *A search for a target* is what Abadi et al. (2016) have in mind, after Gupta et al.
(2010): trials until one meets a target that was set before, of which that one is released. Its price is our own;
docs/proofs/tuning.md proves it, and why the ε + 8ε′ that Abadi et al. cite cannot be one. *Composition* adds up every
trial, and everything may be seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpgrad import _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Event, Relation, Repeat, Selection
from dpgrad.accounting.guarantee import up
from dpgrad.accounting.trials import LAWS, NegativeBinomial, law_named
from dpgrad.errors import AccountingError

__all__ = ["Price", "price", "table"]


@dataclass(frozen=True)
class Price:
    """One way of paying: its ε at δ, and how many trials it may run.

    ``trials`` is the number of trials, or its mean; ``most`` is not exceeded in 99 of 100 selections.
    """

    name: str
    epsilon: float
    delta: float
    trials: float
    most: int
    note: str = ""


def price(
    trial: Event | Sequence[Event],
    *,
    mean: float,
    delta: float,
    relation: Relation = Relation.ZERO_OUT,
    settings: int | None = None,
) -> list[Price]:
    """The cost of choosing among trials, before anything is spent.

    ``trial`` is the event of one trial, or those of the settings, one of which a trial draws uniformly. ``mean`` is the
    expected number of trials, and ``settings`` how many there are (default: as many as events).

    >>> from dpgrad.accounting.events import Gaussian
    >>> found = {one.name: one.epsilon for one in price(Repeat(Gaussian(30.0), 40), mean=10, delta=1e-5)}
    >>> found["best of a random number, logarithmic"] < found["composition of 10 trials"]
    True
    """
    events = tuple(trial) if isinstance(trial, Sequence) else (trial,)
    _validate.positive(mean=mean)
    _validate.open_unit(delta=delta)
    count = len(events) if settings is None else settings
    _validate.whole(least=1, settings=count)
    one = max((account(event, relation, "rdp").epsilon(delta) for event in events), default=0.0)
    found = [Price("one trial", one, delta, 1, 1, note="nothing is chosen: method auto needs no more")]
    for name in LAWS:
        if name != "poisson" and mean <= 1:
            continue
        law = law_named(name, mean)
        epsilon = account(Selection(events, law), relation, "rdp").epsilon(delta)
        found.append(Price(f"best of a random number, {name}", epsilon, delta, law.mean, law.quantile(0.99)))
    if mean > 1:
        found.append(_searched(events, mean, delta, relation))
    whole = math.ceil(mean)
    found.append(_composed(f"composition of {whole:,} trials", events, whole, delta, relation))
    if count > 1 and count != whole:
        found.append(_composed(f"composition of all {count:,} settings", events, count, delta, relation))
    return found


def _searched(events: tuple[Event, ...], mean: float, delta: float, relation: Relation) -> Price:
    """Trials until one meets the target, each of the others the last with probability γ = 1/mean.

    The bound on K is that of a logarithmic number of the same γ, plus a constant, which is a factor of δ.
    """
    gamma = 1 / mean
    part = delta * (mean - 1) / mean / math.log1p(mean - 1)
    epsilon = account(Selection(events, NegativeBinomial(0.0, gamma)), relation, "rdp").epsilon(part)
    most = NegativeBinomial(1.0, gamma).quantile(0.99)
    note = "after Gupta et al. (2010): for a score that is set before; dpgrad prices this search and does not run it"
    return Price("first to meet a target", epsilon, delta, mean, most, note)


def _composed(name: str, events: tuple[Event, ...], count: int, delta: float, relation: Relation) -> Price:
    """Trials of the settings in turn, all of them released; the worse settings where they do not come out even."""
    whole, rest = divmod(count, len(events))
    worst = max(events, key=lambda event: account(event, relation, "rdp").epsilon(delta))
    together = Compose((*(Repeat(event, whole) for event in events), Repeat(worst, rest)))
    try:
        epsilon = account(together, relation, "pld").epsilon(delta)
    except (AccountingError, ArithmeticError):
        epsilon = account(together, relation, "rdp").epsilon(delta)
    return Price(name, epsilon, delta, count, count, note="every trial and score may be looked at")


def table(prices: Sequence[Price]) -> list[list[str]]:
    """The prices as rows of text, with a heading.

    >>> table([Price("one trial", 1.0, 1e-5, 1, 1)])[1][:3]
    ['one trial', '1', '1']
    """
    head = ["way of choosing", "ε", "trials", "of which 99 % of the time at most", ""]
    return [head, *([one.name, up(one.epsilon), f"{one.trials:.4g}", f"{one.most:,}", one.note] for one in prices)]
