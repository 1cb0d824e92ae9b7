"""Sampling: with hardly any noise and one coordinate for each row, a gradient shows which rows its batch held.

Under the claim the indicators have a known law. Counts of them are binomial or hypergeometric, and every p-value is
exact. The rates of a schedule are thinned to the least of them by coins of the audit's own.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgrad.audit import exact
from dpgrad.audit.record import Check, bonferroni
from dpgrad.audit.trials import Stepper, Trial, UnderAudit, read
from dpgrad.grads.sums import Batch
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["Batches", "check", "drawn", "fixed_size", "poisson", "shuffled"]

_NOISE = 1e-3
_STEEP = 1e3
_MOST_ROWS = 400
_MOST_SEEDS = 8
_MOST_LAGS = 64

_Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batches:
    """How often each row was in each batch, (batches, rows); ``span`` batches are of one seed."""

    counts: _Counts
    span: int
    steps: tuple[int, ...] = ()  # the number of each step


def steep(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the probe: row i has a steep gradient along coordinate i alone."""
    outputs: Tensor = model(batch)[:, 0]
    return _STEEP * outputs


def check(target: UnderAudit, wanted: int) -> Check | None:
    """The check of the sampler; None where there is nothing to sample."""
    sampler = target.mechanism.sampler
    if isinstance(sampler, sampling.FullBatch):
        return None
    batches = drawn(target, wanted)
    if (most := int(batches.counts.max(initial=0))) > 1:
        return Check("sampling", None, f"a row was {most} times in one batch", violated=True)
    if isinstance(sampler, sampling.Poisson):
        rates = np.array([sampler.sampling_rate_at(t) for t in batches.steps])
        p, says = poisson(batches.counts, rates, target.seed)
    elif isinstance(sampler, sampling.FixedSize):
        p, says = fixed_size(batches.counts, sampler.batch_size)
    else:
        p, says = shuffled(batches, sampler.span if isinstance(sampler, sampling.Shuffle) else 1)
    return Check("sampling", p, says)


def drawn(target: UnderAudit, wanted: int) -> Batches:
    """The batches of about ``wanted`` steps on a probe."""
    mechanism = target.mechanism
    rows = _rows(mechanism)
    values = max(rows, mechanism.secure_values) if mechanism.secure_values else 0  # the probe has one for each row
    shown = replace(mechanism, noise_multiplier=_NOISE, clip=1.0, noise=1.0, hold_noise=False, groups=(),
                    batch_size=mechanism.divisor, secure_values=values, adaptive_clip=None)  # fmt: skip
    parts = _parts(mechanism, wanted)
    probe = nn.Linear(rows, 1, bias=False)
    run: Stepper = target.run if target.ours is None else target.ours.plain()
    found = []
    for number, steps in enumerate(parts):
        trial = Trial(probe, steep, shown, torch.eye(rows), target.seed + 300 + number, steps)
        found.append(read(run(trial), ["weight"], len(steps), shown.divisor).sums)
    return Batches(np.rint(np.concatenate(found)).astype(np.int64), len(parts[0]), tuple(chain(*parts)))


def _parts(mechanism: Mechanism, wanted: int) -> list[range]:
    """The steps that are run under one seed each: the first and the last ones, or all of them again and again."""
    if mechanism.steps > wanted and not isinstance(mechanism.sampler, sampling.Shuffle):  # which has epochs
        return [range(wanted - wanted // 2), range(mechanism.steps - wanted // 2, mechanism.steps)]
    steps = range(min(wanted, mechanism.steps))
    return [steps] * max(1, min(_MOST_SEEDS, -(-wanted // len(steps))))


def _rows(mechanism: Mechanism) -> int:
    sampler = mechanism.sampler
    if isinstance(sampler, sampling.FixedSize | sampling.Shuffle):
        return sampler.dataset_size
    rates = [sampler.sampling_rate_at(t) for t in range(min(mechanism.steps, 50))]  # type: ignore[attr-defined]
    least = min((each for each in rates if each > 0), default=1.0)
    return int(min(_MOST_ROWS, max(32, math.ceil(20 / least))))


def poisson(counts: _Counts, sampling_rates: exact.Array, seed: int) -> tuple[float, str]:
    """The p-value of independent indicators with these sampling rates, one per step.

    Tested: the number of inclusions, batch sizes and rows' counts (how many are near their mean, and the extreme
    ones), how many rows two steps share, and how many steps two rows share.
    """
    if counts[sampling_rates <= 0].any():
        return 0.0, "rows were drawn at a sampling rate of 0"
    counts, sampling_rates = counts[sampling_rates > 0], sampling_rates[sampling_rates > 0]
    if not len(sampling_rates):
        return 1.0, "no step draws any row"
    chance = float(sampling_rates.min())
    coins = np.random.default_rng(seed).random(counts.shape)
    kept = (counts > 0) & (coins < (chance / sampling_rates)[:, None])
    steps, rows = kept.shape
    sizes, each = kept.sum(1), kept.sum(0)
    tests = [
        (exact.count(int(kept.sum()), kept.size, chance), f"mean batch {sizes.mean():.2f} of {rows * chance:.2f}"),
        (_central(sizes, rows, chance), f"sizes of batches, with deviation {sizes.std():.2f}"),
        (_central(each, steps, chance), "how often rows are drawn"),
        (_extreme(sizes, rows, chance), "the largest or smallest batch"),
        (_extreme(each, steps, chance), "the row drawn most or least often"),
        _overlaps(kept, chance),
        _most_alike(kept, chance),
        _together(kept, chance),
    ]
    return bonferroni(tests)


def _central(counts: _Counts, trials: int, chance: float) -> float:
    """How many binomial counts lie near their mean: as many as chance puts there."""
    distance = np.abs(np.arange(trials + 1) - trials * chance)
    masses = np.diff(np.concatenate([[0.0], [exact.below(k, trials, chance) for k in range(trials + 1)]]))
    order = np.argsort(distance, kind="stable")
    inside = order[: int(np.searchsorted(np.cumsum(masses[order]), 0.5)) + 1]
    near = np.isin(counts, inside)
    return exact.count(int(near.sum()), len(counts), min(1.0, float(masses[inside].sum())))


def _extreme(counts: _Counts, trials: int, chance: float) -> float:
    least, most = int(counts.min()), int(counts.max())
    tail = min(exact.below(least, trials, chance), exact.above(most, trials, chance))
    return min(1.0, 2 * len(counts) * tail)


def _overlaps(kept: NDArray[np.bool_], chance: float) -> tuple[float, str]:
    """Rows that batches some steps apart share; each batch is in one pair at most for every distance."""
    steps, rows = kept.shape
    found = []
    for lag in range(1, min(steps // 2, _MOST_LAGS) + 1):
        first = np.arange(steps - lag)
        first = first[first % (2 * lag) < lag]
        shared = int((kept[first] & kept[first + lag]).sum())
        found.append((exact.count(shared, len(first) * rows, chance**2), f"rows shared by batches {lag} steps apart"))
    return bonferroni(found) if found else (1.0, "rows shared by batches")


def _most_alike(kept: NDArray[np.bool_], chance: float) -> tuple[float, str]:
    """The two batches that share most rows, among all pairs."""
    steps, rows = kept.shape
    if steps < 2:
        return 1.0, "two batches"
    shared = kept.astype(np.float64) @ kept.T.astype(np.float64)
    one, other = np.triu_indices(steps, 1)
    most = int(shared[one, other].max())
    return min(1.0, len(one) * exact.above(most, rows, chance**2)), f"two batches share {most} rows"


def _together(kept: NDArray[np.bool_], chance: float) -> tuple[float, str]:
    steps, rows = kept.shape
    both = int((kept[:, 0 : rows - 1 : 2] & kept[:, 1:rows:2]).sum())
    return exact.count(both, steps * (rows // 2), chance**2), "neighbouring rows drawn together"


def fixed_size(counts: _Counts, size: int) -> tuple[float, str]:
    """The p-value of batches of ``size`` rows drawn without replacement, anew at every step."""
    steps, rows = counts.shape
    if (counts.sum(1) != size).any():
        return 0.0, f"batches of other sizes than {size}"
    tests = [(_extreme(counts.sum(0), steps, size / rows), "the row drawn most or least often")]
    found = []
    for lag in range(1, min(steps // 2, _MOST_LAGS) + 1):
        first = np.arange(steps - lag)
        first = first[first % (2 * lag) < lag]
        shared = int((counts[first] * counts[first + lag]).sum())
        found.append((_tail(_shared_law(rows, size, len(first)), shared), f"rows shared by batches {lag} steps apart"))
    return bonferroni([*tests, *([bonferroni(found)] if found else [])])


def shuffled(batches: Batches, span: int) -> tuple[float, str]:
    """The p-value of epochs in which every row comes once, in an order drawn anew for each."""
    counts, per_seed = batches.counts, batches.span // span
    rows = counts.shape[1]
    epochs = [
        counts[start + n * span : start + (n + 1) * span]
        for start in range(0, len(counts), batches.span)
        for n in range(per_seed)
    ]
    if not epochs:
        return 1.0, "no whole epoch"
    if any((epoch.sum(0) != 1).any() for epoch in epochs):
        return 0.0, "a row is not in exactly one batch of an epoch"
    tests = []
    for place in range(span):
        size = int(epochs[0][place].sum())
        shared = [int((epochs[n][place] * epochs[n + 1][place]).sum()) for n in range(0, len(epochs) - 1, 2)]
        if shared:
            p = _tail(_shared_law(rows, size, len(shared)), sum(shared))
            tests.append((p, f"rows that batch {place} of two epochs share"))
    return bonferroni(tests) if tests else (1.0, "one epoch")


@cache
def _shared_law(rows: int, size: int, count: int) -> exact.Array:
    """The law of how many rows ``count`` pairs of independent batches share: a sum of hypergeometric counts."""
    from scipy import stats

    found, power = np.ones(1), stats.hypergeom(rows, size, size).pmf(np.arange(size + 1))
    while count:
        if count & 1:
            found = np.convolve(found, power)
        count >>= 1
        if count:
            power = np.convolve(power, power)
    return found


def _tail(law: exact.Array, value: int) -> float:
    return min(1.0, 2 * min(float(law[: value + 1].sum()), float(law[value:].sum())))
