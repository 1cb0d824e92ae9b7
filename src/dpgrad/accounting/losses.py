"""Privacy losses that are no Gaussian mixture, as blends of simple parts, for every accountant.

A `Blend` is a pair (P, Q) whose output also tells which part it came from. Its law of the loss L = log P/Q is the
mixture of those of the parts:

    Atom(l)              L = l; Q has e^{−l} times P's mass
    Slope(r)             L in [−r, r] with P-density proportional to e^{L/2}, hence Q-density to e^{−L/2}
    Whole(σ, s)          the discrete Gaussian against itself shifted by s: L = s(s − 2x)/2σ² at whole x
    Pair                 a Gaussian pair of `accounting.pairs`

| leaf | blend |
|---|---|
| Laplace of scale b, shift s, ε = s/b | ½ Atom(ε) + ½e^{−ε} Atom(−ε) + the rest Slope(ε) |
| randomized response, k categories | Atom(ε), Atom(−ε) and, for k > 2, Atom(0) |
| exponential mechanism of range ε | Slope(ε): the pointwise largest profile of all mechanisms of that range |
| discrete Gaussian | Whole(σ, s) |
| truncated Poisson | a Gaussian pair where the sample is not cut, one of twice the shift where it is |

Each dominates its leaf at every order of composition. Proofs: docs/proofs/releases.md.
"""

import math
from functools import lru_cache

from dpgrad.accounting import exact, pairs
from dpgrad.accounting.events import (
    DiscreteGaussian,
    Exponential,
    Laplace,
    Leaf,
    Poisson,
    RandomizedResponse,
    Relation,
    TruncatedPoisson,
)
from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.accounting.pld.blends import Atom, Blend, BlendPart, Slope, Step, Whole
from dpgrad.errors import AccountingError

__all__ = ["attained", "cut", "of", "refuse_other"]

_MOST_SIGMA = 1e5  # of a discrete Gaussian on a lattice: beyond, the table of its atoms is too long
_BINOMIAL = 1e-9  # relative error allowed to scipy's binomial tails: an assumption, docs/proofs/releases.md


def of(leaf: Leaf, relation: Relation, direction: Kind, group: int = 1) -> Step:
    """What dominates one application of ``leaf`` where ``group`` rows change; what has no price is refused.

    A group of randomized answers is so many independent ones: it is counted, not priced here.
    """
    relation = Relation(relation)
    shift = relation.reach * group
    match leaf:
        case Laplace(scale):
            return _laplace(shift / scale)
        case DiscreteGaussian(sigma, sensitivity):
            if sigma > _MOST_SIGMA:
                raise AccountingError(
                    f"accountant pld prices a discrete Gaussian with sigma of at most {_MOST_SIGMA:g}, got {sigma:g}: "
                    "use accountant rdp"
                )
            return Blend(((1.0, Whole(sigma, shift * sensitivity)),))
        case RandomizedResponse():
            exact.refuse_numbered(leaf, relation)
            return _response(leaf) if leaf.noise < 1 else Pair(direction, 0.0, 1.0)  # it tells nothing
        case Exponential(epsilon):
            refuse_other(leaf, relation)
            return Blend(((1.0, Slope(group * epsilon)),)) if epsilon else Pair(direction, 0.0, 1.0)  # it tells nothing
        case TruncatedPoisson():
            return _truncated(leaf, relation, direction, group)
        case _:
            return pairs.of(leaf, relation, direction, group)


def refuse_other(leaf: Exponential, relation: Relation) -> None:
    """Refuse an exponential mechanism that was declared for neighbours under another relation."""
    if leaf.relation is not relation:
        raise AccountingError(
            f"an exponential mechanism declared {leaf.epsilon:g}-private under {leaf.relation} has no price under "
            f"{relation}: ask for relation {leaf.relation}"
        )


def attained(leaf: Exponential | TruncatedPoisson, relation: Relation, direction: Kind) -> Step:
    """Concrete neighbours: two candidates of which each world prefers one; or one row among rows that add nothing."""
    if isinstance(leaf, Exponential):
        return _binary(leaf.epsilon / 2)
    chance, after = cut(leaf)
    sampling_rate = (leaf.sampling_rate * (1 - chance) + chance * after) * (1 - 4 * _BINOMIAL)
    return Pair(direction, min(sampling_rate, 1.0), leaf.event.noise_multiplier)


def _laplace(epsilon: float) -> Blend:
    low, rest = math.exp(-epsilon) / 2, -math.expm1(-epsilon) / 2
    return Blend(((0.5, Atom(epsilon)), (low, Atom(-epsilon)), (rest, Slope(epsilon))))


def _binary(epsilon: float) -> Blend:
    up = 1 / (1 + math.exp(-epsilon))
    return Blend(((up, Atom(epsilon)), (up * math.exp(-epsilon), Atom(-epsilon))))


def _response(leaf: RandomizedResponse) -> Blend:
    each = leaf.noise / leaf.categories
    found: list[tuple[float, BlendPart]] = [(1 - leaf.noise + each, Atom(leaf.epsilon)), (each, Atom(-leaf.epsilon))]
    return Blend((*found, *([((leaf.categories - 2) * each, Atom(0.0))] if leaf.categories > 2 else [])))


@lru_cache(maxsize=1024)
def cut(leaf: TruncatedPoisson) -> tuple[float, float]:
    """The probability that the other rows fill the batch, and then that of the row to be in it.

    >>> from dpgrad.accounting.events import Gaussian
    >>> chance, after = cut(TruncatedPoisson(0.5, 3, 1, Gaussian(1.0)))
    >>> round(chance, 6), round(after, 6)  # ¾, and (⅓·¼ + ½·½)·½ of it: one of one or two others and itself
    (0.75, 0.222222)
    """
    from scipy.stats import binom  # slow to import

    sampling_rate, rows, most = leaf.sampling_rate, leaf.dataset_size, leaf.batch_size
    chance = float(binom.sf(most - 1, rows - 1, sampling_rate))
    if chance == 0:
        return 0.0, 0.0
    return chance, min(float(binom.sf(most, rows, sampling_rate)) * most / rows / chance, sampling_rate)


def _truncated(leaf: TruncatedPoisson, relation: Relation, direction: Kind, group: int) -> Step:
    if group > 1:
        raise AccountingError(
            "truncated Poisson sampling has no pair for several rows that change together: their price follows from "
            "that of one row"
        )
    sampling_rate, sigma = leaf.sampling_rate, leaf.event.noise_multiplier
    chance, after = cut(leaf)
    if sampling_rate == 0:
        return Pair(direction, 0.0, sigma)
    if relation is Relation.ADD_REMOVE:
        # any number of rows up to that declared: ``after`` at most q, and the less noise the dearer
        other = Pair(direction if sampling_rate < 1 else Kind.REMOVE, sampling_rate, sigma / 2)
    else:
        after = min(after * (1 + 4 * _BINOMIAL), 1.0)
        full = Pair(Kind.REMOVE, 1.0, sigma / 4)
        other = Pair(Kind.ANTIPODAL, after, sigma / 2) if after < 1 else full
    plain = pairs.of(Poisson(sampling_rate, leaf.event), relation, direction)
    if chance == 0:
        return plain
    return Blend(((min(1 - chance * (1 - _BINOMIAL), 1.0), plain), (min(chance * (1 + _BINOMIAL), 1.0), other)))
