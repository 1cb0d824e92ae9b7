"""What a group of k rows is promised: the price of an event where k rows change together.

Full batches and shuffled epochs move k times as far, so μ becomes kμ. In a Poisson-sampled step j ~ Binomial(k, q) rows
of the group take part; the pair of those mixtures dominates under every relation and composes, so the certified bounds
of `accounting.pld` apply. A release that is only known to be (ε, δ)-private is, for k rows, (kε, δ(e^{kε} − 1)/(e^ε −
1))-private, and the same chain bounds whatever has no pair of its own, from the whole curve δ(ε). Proofs:
docs/proofs/groups.md.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dpgrad.accounting import _search, account, exact, pld
from dpgrad.accounting.events import Approximate, Compose, Event, Gaussian, Leaf, Poisson, Relation, Repeat, leaves
from dpgrad.accounting.guarantee import Profile
from dpgrad.accounting.inexact import parted, proved
from dpgrad.accounting.pairs import Array
from dpgrad.errors import DpgradError

__all__ = ["chained", "chained_deltas", "epsilon", "together"]

_PRECISION = 1e-3  # relative, of ε, at most: a table of groups must not take long
_MOST_LEVELS = 12  # of noise; of more, each is rounded down to one of them, which never lowers ε
_LEAST_DELTA = 1e-250
MOST = 1_000_000


@lru_cache(maxsize=256)
def epsilon(event: Event, relation: Relation, delta: float, size: int, accountant: str) -> tuple[float, str]:
    """The ε at ``delta`` of ``size`` rows that change together, by the tightest proof that applies, and by whose.

    >>> epsilon(Gaussian(10.0), Relation.ADD_REMOVE, 1e-5, 5, "rdp")[1]
    'pld'
    >>> found = epsilon(Gaussian(10.0), Relation.ADD_REMOVE, 1e-5, 5, "exact")[0]
    >>> found == account(Gaussian(2.0), Relation.ADD_REMOVE, "exact").epsilon(1e-5)  # a fifth of the noise
    True
    """
    exactly, distance = parted(event)
    if distance:  # the same for a group: the noise does not depend on the data
        left = math.nextafter(delta - distance, 0.0)
        found, by = epsilon(exactly, relation, left, size, accountant) if left > 0 else (math.inf, accountant)
        return proved(found), by
    closed = accountant == exact.NAME
    try:
        return _by_pairs(event, relation, delta, size), exact.NAME if closed else pld.NAME
    except (DpgradError, ArithmeticError):  # a step without a pair for groups: their price follows from that of one row
        profile = account(event, relation, accountant)
        if isinstance(profile, pld.PldProfile):
            profile = replace(profile, precision=_PRECISION)
        return chained(profile, delta, size), accountant


def _by_pairs(event: Event, relation: Relation, delta: float, size: int) -> float:
    """By dominating pairs; releases that are only known to be (ε, δ)-private are added up."""
    plain: Counter[Leaf] = Counter()
    certain, total = 0.0, 0.0
    for leaf, count in leaves(event).items():
        if isinstance(leaf, Approximate):
            account(leaf, relation)  # refuses another relation
            total += count * size * leaf.epsilon
            certain += count * leaf.delta * math.exp(min(_log_factor(leaf.epsilon, size), 700.0)) if leaf.delta else 0.0
        else:
            plain[leaf] += count
    if certain >= delta:
        return math.inf
    if not plain:
        return total
    return total + _profile(plain, relation, size, _PRECISION).epsilon(delta - certain)


def together(event: Event, relation: Relation, size: int, precision: float = _PRECISION) -> pld.PldProfile:
    """The certified profile of ``size`` rows that change together; refused where a step has no pair for groups.

    >>> round(together(Gaussian(10.0), Relation.ADD_REMOVE, 5).epsilon(1e-5), 4)
    1.9931
    """
    return _profile(leaves(event), relation, size, precision)


def _profile(plain: Counter[Leaf], relation: Relation, size: int, precision: float) -> pld.PldProfile:
    steps = Compose(tuple(Repeat(leaf, count) for leaf, count in _few(plain).items()))
    return pld.PldProfile(steps, relation, precision, group=size)


def _few(counts: Counter[Leaf]) -> Counter[Leaf]:
    """The same leaves, the noise of sampled steps rounded down to few levels where there are many."""
    noise = [leaf.event.noise_multiplier for leaf in counts if isinstance(leaf, Poisson)]
    if len(noise) <= _MOST_LEVELS:
        return counts
    levels = np.geomspace(min(noise), max(noise), _MOST_LEVELS)
    levels[0] = min(noise)  # rounding must not leave a step below
    found: Counter[Leaf] = Counter()
    for leaf, count in counts.items():
        if isinstance(leaf, Poisson):
            z = leaf.event.noise_multiplier
            below = float(levels[np.searchsorted(levels, z, side="right") - 1])
            leaf = Poisson(leaf.sampling_rate, Gaussian(min(below, z)))
        found[leaf] += count
    return found


def chained(profile: Profile, delta: float, size: int) -> float:
    """The least kε, found to one part in a thousand, with δ(ε)·(e^{kε} − 1)/(e^ε − 1) ≤ ``delta``.

    Between two datasets that differ in k rows lie k − 1 others, each of which differs from the next in one row. ∞ where
    no ε does.
    """

    def beyond(single: float) -> bool:
        left = math.log(delta) - _log_factor(single, size)
        return left < math.log(_LEAST_DELTA) or profile.epsilon(math.exp(left)) > single

    low, high = _search.doubled(beyond, 0.0, max(profile.epsilon(delta / size), 1e-9), most=1e4)
    if math.isinf(high):
        return high
    return size * _search.halved(beyond, low, high, relative=_PRECISION)[1]


def chained_deltas(single: Array, epsilons: Array, size: int) -> Array:
    """δ of ``size`` rows at each ε from that of one row at ε over ``size``, by a chain of neighbours.

    >>> chained_deltas(np.array([0.01]), np.array([0.0]), 5).round(12).tolist()
    [0.05]
    """
    logs = np.array([_log_factor(float(one) / size, size) for one in epsilons])
    return np.asarray(np.minimum(single * np.exp(np.minimum(logs, 700.0)), 1.0))


def _log_factor(single: float, size: int) -> float:
    """log Σ_{i<k} e^{iε}, rounded up."""
    if single == 0:
        return math.log(size)
    last = size * single
    top = last + math.log1p(-math.exp(-last)) if last > 30 else math.log(math.expm1(last))
    bottom = single + math.log1p(-math.exp(-single)) if single > 30 else math.log(math.expm1(single))
    return max(top - bottom, math.log(size)) + 1e-12 * (1 + last)
