"""Price: whether the claimed δ(ε) covers the mechanism as declared, by simulating a worst pair of neighbours.

The accountant is not asked. One row at its clip bound against none (or its opposite, under replace-one) is simulated
through all steps, and the privacy loss L of each simulated run is computed. E(1 − e^(ε−L))₊ is a lower bound of the
true δ(ε): a coin with that chance is flipped for every run, and the number of heads is binomial.
"""

import warnings

import numpy as np

from dpgrad.accounting.events import Relation, leaves
from dpgrad.audit import exact
from dpgrad.audit.claims import Claimed
from dpgrad.audit.exact import Array
from dpgrad.audit.moving import MOVED
from dpgrad.audit.record import Check, bonferroni
from dpgrad.audit.trials import Canaried, PrivateSteps, Trial, UnderAudit, rows_of
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["check", "ledger", "losses"]

_NUMBERS = 12_000_000  # drawn in all
_MOST_RUNS = 40_000
_POINTS = 6
_CHARGED = 8  # steps that are taken


def check(target: UnderAudit, claim: Claimed, runs: int | None = None) -> Check:
    """Whether the claim is below what a worst pair of neighbours reveals, by so many simulated runs."""
    mechanism, curve = target.mechanism, claim.curve
    asked = np.unique(np.linspace(0, len(curve.epsilons) - 1, _POINTS).astype(int))
    tests = []
    for removed in (True, False):
        loss = losses(mechanism, target.seed + removed, runs, removed=removed)
        coins = np.random.default_rng(target.seed + 7 + removed).random(len(loss))
        for at in asked:
            epsilon, delta = float(curve.epsilons[at]), float(curve.deltas[at])
            heads = int((coins < -np.expm1(np.minimum(epsilon - loss, 0.0))).sum())
            if delta < 1:
                found = f"δ({epsilon:.3g}) = {delta:.3g} claimed, {heads / len(loss):.3g} simulated"
                tests.append((exact.above(heads, len(loss), delta) if delta > 0 else float(heads == 0), found))
    p, says = bonferroni(tests) if tests else (1.0, "no claim below δ = 1")
    return Check("price", p, says)


def losses(mechanism: Mechanism, seed: int, runs: int | None = None, *, removed: bool = True) -> Array:
    """Privacy losses of simulated runs: with the row against without it, or (``removed`` False) the other way round."""
    runs = max(2000, min(_MOST_RUNS, _NUMBERS // mechanism.steps)) if runs is None else runs
    random, total = np.random.default_rng(seed), np.zeros(runs)
    multipliers = _multipliers(mechanism)
    exchanged = mechanism.relation is Relation.REPLACE_ONE
    sampler = mechanism.sampler
    if isinstance(sampler, sampling.Shuffle):
        return _shuffled(multipliers, sampler.span, runs, random, exchanged=exchanged, removed=removed)
    for step, multiplier in enumerate(multipliers):
        sampling_rate = _sampling_rate(mechanism, step)
        present = random.random(runs) < sampling_rate
        shift = present if removed else -present.astype(float) if exchanged else np.zeros(runs)
        seen = random.standard_normal(runs) * multiplier + shift
        with_it, opposite = _log_ratio(seen, sampling_rate, multiplier), _log_ratio(-seen, sampling_rate, multiplier)
        loss = with_it - opposite if exchanged else with_it
        total += loss if removed else -loss
    return total


def _log_ratio(seen: Array, sampling_rate: float, multiplier: float) -> Array:
    """log of (1 − q) + q·N(1, z²)/N(0, z²)."""
    with np.errstate(divide="ignore"):
        found: Array = np.logaddexp(np.log1p(-sampling_rate), np.log(sampling_rate) + (seen - 0.5) / multiplier**2)
    return found


def _shuffled(
    multipliers: Array, span: int, runs: int, random: np.random.Generator, *, exchanged: bool, removed: bool
) -> Array:
    """The row is in one batch of each epoch."""
    total = np.zeros(runs)
    for start in range(0, len(multipliers) - span + 1, span):
        epoch = multipliers[start : start + span]
        seen = random.standard_normal((runs, span)) * epoch
        place = random.integers(span, size=runs)
        sign = 1.0 if removed else -1.0 if exchanged else 0.0
        seen[np.arange(runs), place] += sign
        with_it = np.logaddexp.reduce((seen - 0.5) / epoch**2, axis=1) - np.log(span)
        opposite = np.logaddexp.reduce((-seen - 0.5) / epoch**2, axis=1) - np.log(span)
        loss = with_it - opposite if exchanged else with_it
        total += loss if removed else -loss
    return total


def _multipliers(mechanism: Mechanism) -> Array:
    """Noise over clip bound at every step, from the numbers that a step reads; groups and counts taken together."""
    steps = range(mechanism.steps)
    squares = sum(
        np.square(mechanism.clips(steps, group) / mechanism.stds(steps, group)) for group in mechanism.groups or (None,)
    )
    if mechanism.adaptive_clip is not None:  # a row moves the count of every group too
        squares = squares + max(1, len(mechanism.groups)) * np.square(MOVED / mechanism.count_stds(steps))
    found: Array = 1 / np.sqrt(squares)
    return found


def _sampling_rate(mechanism: Mechanism, step: int) -> float:
    sampler = mechanism.sampler
    if isinstance(sampler, sampling.Poisson):
        return sampler.sampling_rate_at(step)
    if isinstance(sampler, sampling.FixedSize):
        return sampler.batch_size / sampler.dataset_size
    return 1.0


def ledger(target: UnderAudit, ours: PrivateSteps) -> Check:
    """Whether every step that was taken is in the ledger, at its price."""
    poisson = isinstance(target.mechanism.sampler, sampling.Poisson)
    mechanism = target.mechanism if poisson else target.full  # also of steps whose batch is empty
    steps = min(mechanism.steps, _CHARGED if poisson else 3)
    data = target.columns(rows_of(target.data, slice(0, 2)), 0.0, 0.0)
    trial = Trial(target.model, Canaried(target.loss, target.directions), mechanism, data, target.seed, range(steps))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        private = ours.canaried().private(trial)
        for _ in range(steps):
            private.step(data)
    taken, owed = leaves(private.ledger), leaves(mechanism.with_steps(steps).event())
    missing = owed - taken
    says = f"{steps} steps taken, {sum(taken.values())} charged"
    return Check("ledger", None, says, violated=bool(missing))
