"""Noise: its size, law, precision and independence, where it can be seen.

It is seen alone where every loss is 0, and in the difference of two seeds on the same real rows.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from dpgrad.audit import exact, moving
from dpgrad.audit.exact import Array
from dpgrad.audit.record import Check, bonferroni
from dpgrad.audit.trials import UnderAudit, rows_of
from dpgrad.grads.sums import trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["NoiseFound", "Ratios", "check", "independence", "law", "precision", "seen", "size", "strides"]

_VALUES = 4_000_000
_MOST_SEEDS = 8
_QUIET = 2  # rows whose losses are all 0
_LAW = 40_000  # values whose law and precision are looked at
_NEAR, _FAR = 0.2, 3.0  # claimed deviations within which noise lies too often, and beyond which too rarely


@dataclass(frozen=True, eq=False)
class Ratios:
    """Noise over its claimed standard deviation, (steps, coordinates); by itself and from differences."""

    alone: Array
    differences: Array
    parts: dict[str, slice]
    single: bool
    lags: dict[str, frozenset[int]] = field(default_factory=dict)  # distances that the shapes of parameters suggest


@dataclass(frozen=True)
class NoiseFound:
    """The checks, and an upper bound of the measured noise over the claimed."""

    checks: tuple[Check, ...]
    most: float
    not_tried: tuple[str, ...] = ()


def seen(target: UnderAudit, wanted: int) -> Ratios:
    """Run about ``wanted`` steps with all losses 0, and a sixth as many twice on real rows.

    Every second part of them is of batches as they are drawn, some of which are empty, where that is Poisson's way.
    """
    mechanism = moving.drifting(target.full, up=True)
    size = sum(part.stop - part.start for part in target.slices().values())
    wanted = max(2, min(wanted, _VALUES // size))
    parts = _parts(target, mechanism, wanted)
    quiet = target.columns(rows_of(target.data, slice(0, _QUIET)), 0.0, 0.0)
    drawn = isinstance(target.mechanism.sampler, sampling.Poisson) and not target.counts
    found = [
        target.released(
            quiet, target.seed + 100 + n, steps, target.mechanism if drawn and n % 2 else mechanism, canaried=True
        )
        for n, steps in enumerate(parts)
    ]
    alone = np.concatenate([
        (each.sums - target.quiet(_QUIET)) / target.stds(steps) for each, steps in zip(found, parts, strict=True)
    ])  # fmt: skip
    differences = _differences(target, mechanism, max(1, min(len(parts[0]), wanted // 6)))
    lags = {name: strides(parameter.shape) for name, parameter in trainable(target.model).items()}
    return Ratios(alone, differences, target.slices(), all(each.single for each in found), lags)


def _parts(target: UnderAudit, mechanism: Mechanism, wanted: int) -> list[range]:
    """The steps that are run under one seed each: the first and the last ones, or all of them again and again."""
    if target.counts:
        steps = range(min(wanted, mechanism.steps, moving.limit(mechanism, _QUIET)))
    elif mechanism.steps >= wanted:
        return [range(wanted - wanted // 2), range(mechanism.steps - wanted // 2, mechanism.steps)]
    else:
        steps = range(mechanism.steps)
    return [steps] * max(1, min(_MOST_SEEDS, -(-wanted // len(steps))))


def strides(shape: tuple[int, ...]) -> frozenset[int]:
    """How far apart neighbours along each dimension lie."""
    return frozenset(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _differences(target: UnderAudit, mechanism: Mechanism, wanted: int) -> Array:
    """Differences of two seeds on real rows; of first steps alone where the bounds of later ones differ by seed."""
    real = rows_of(target.data, slice(0, 6))
    few = range(1 if target.counts else wanted)
    pairs = []
    for pair in range(wanted if target.counts else 1):
        one, other = (target.released(real, target.seed + 200 + 2 * pair + n, few, mechanism) for n in range(2))
        pairs.append((one.sums - other.sums) / (math.sqrt(2) * target.stds(few)))
    return np.concatenate(pairs)


def check(target: UnderAudit, wanted: int, level: float) -> NoiseFound:
    """All checks of the noise."""
    noise = seen(target, wanted)
    checks = [
        size("noise size", noise.alone, noise.parts),
        size("noise on real rows", noise.differences, noise.parts),
        law(noise.alone),
        independence(noise),
    ]
    not_tried = []
    if noise.single:
        checks.append(precision(noise.alone))
    else:
        not_tried.append("precision of the noise (gradients are narrower than float32)")
    degrees = noise.alone.size
    least = float(special.chdtri(degrees, 1 - level))  # exceeded with probability 1 − level
    most = math.sqrt(float(np.square(noise.alone).sum()) / least) if least > 0 else math.inf
    return NoiseFound(tuple(checks), most, tuple(not_tried))


def size(name: str, noise: Array, parts: dict[str, slice]) -> Check:
    """χ², one-sided, of all values, and of each parameter, coordinate and step: less noise than claimed refutes."""
    squares = np.square(noise)
    steps, coordinates = noise.shape
    total = float(squares.sum())
    tests = [(float(exact.sum_of_squares(total, noise.size)), "all values")]
    by_part = [
        (float(exact.sum_of_squares(float(squares[:, part].sum()), steps * (part.stop - part.start))), name)
        for name, part in parts.items()
    ]
    tests.append(bonferroni(by_part))
    for axis, what, degrees in ((0, "coordinate", steps), (1, "step", coordinates)):
        each = exact.sum_of_squares(squares.sum(axis), degrees)
        at = int(np.argmin(each))
        tests.append((min(1.0, float(each[at]) * len(each)), f"{what} {at}"))
    p, where = bonferroni(tests)
    return Check(name, p, f"measured std / claimed {math.sqrt(total / noise.size):.4f}, least in {where}")


def law(noise: Array) -> Check:
    """Whether the noise is Gaussian: Kolmogorov-Smirnov on ratios and a count of signs, whatever its size.

    And whether it has more values near 0, or fewer far off, than Gaussian noise of the claimed size or more.
    """
    values = np.ascontiguousarray(noise.T).ravel()[:_LAW]
    ratios = exact.uniform(exact.even(values))
    signs = exact.count(int((values > 0).sum()), len(values), 0.5)
    size, distance = noise.size, np.abs(noise)
    near = exact.above(int((distance <= _NEAR).sum()), size, float(special.erf(_NEAR / math.sqrt(2))))
    far = exact.below(int((distance > _FAR).sum()), size, float(special.erfc(_FAR / math.sqrt(2))))
    p, where = bonferroni([
        (ratios, "ratios of squares"), (signs, "signs"), (near, f"values within {_NEAR:g} claimed deviations"),
        (far, f"values beyond {_FAR:g} claimed deviations"),
    ])  # fmt: skip
    return Check("noise law", p, f"least Gaussian in {where}")


def precision(noise: Array) -> Check:
    """Whether values repeat more often than float32 noise does: noise on a coarse grid does not hide what is finer."""
    values = noise.ravel()[:_LAW]
    p, distinct = exact.ties(values)
    return Check("noise precision", p, f"{distinct:,} distinct values of {len(values):,}")


def independence(noise: Ratios) -> Check:
    """Exact tests of correlation between steps, between parameters, and along a parameter."""
    alone, parts = noise.alone, noise.parts
    tests = [_between_steps(alone), _between_parameters(alone, parts, 0), _between_parameters(alone, parts, 1)]
    along = [
        (exact.lagged(alone[:, part], lag), f"{name} at lag {lag}")
        for name, part in parts.items()
        for lag in sorted({1, 2, (part.stop - part.start) // 2} | noise.lags.get(name, frozenset()))
        if 0 < lag < part.stop - part.start
    ]
    if along:
        tests.append(bonferroni(along))
    p, where = bonferroni(tests)
    return Check("noise independence", p, f"least independent: {where}")


def _between_steps(alone: Array) -> tuple[float, str]:
    steps, coordinates = alone.shape
    if steps < 2 or coordinates < 2:
        return 1.0, "between steps"
    products = alone @ alone.T
    squares = np.diagonal(products)
    one, other = np.triu_indices(steps, 1)
    p = exact.correlation(products[one, other], squares[one], squares[other], coordinates)
    at = int(np.argmin(p))
    return min(1.0, float(p[at]) * len(p)), f"between steps {one[at]} and {other[at]}"


def _between_parameters(alone: Array, parts: dict[str, slice], later: int) -> tuple[float, str]:
    """Parameters against each other, in the same step or the one after; the first coordinates of the longer one."""
    steps, names = len(alone) - later, list(parts)
    found = []
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            width = min(parts[one].stop - parts[one].start, parts[other].stop - parts[other].start)
            a = alone[:steps, parts[one].start : parts[one].start + width].ravel()
            b = alone[later:, parts[other].start : parts[other].start + width].ravel()
            if len(a) > 1:
                p = exact.correlation(np.array([a @ b]), np.array([a @ a]), np.array([b @ b]), len(a))
                found.append((float(p[0]), f"{one} and {other}" + (", one step later" if later else "")))
    return bonferroni(found) if found else (1.0, "between parameters")
