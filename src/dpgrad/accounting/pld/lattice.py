"""Measures on a lattice of losses, and their composition by FFT with a known error.

**Tilting.** A measure is stored as e^{cl} times itself, normalised. In the tilted scale a misplaced mass τ moves δ(ε)
by at most τ·e^{K−cε}·c^c/(1+c)^{1+c}, wherever it is misplaced, because e^{−cy}(1 − e^{−y}) is at most that for y ≥
0. So one number per measure, ``error``, bounds everything that is not exact: FFT round-off, wrap-around (a Chernoff
bound of the discrete measure itself), and trimmed tails. The proofs are in docs/proofs/accounting.md, sections 4 and 5.

**Levels.** Rounding T times with spacing h adds variance T·h²/6; a grid fine enough for that over the range of the
whole composition would need √T points. Blocks of about a hundred steps are composed on a short fine grid and rounded
again to a coarser one, so no grid is long and the cost grows with log T.

**Rare losses.** Most of a step's range of losses is hardly ever visited, even in the tilted scale. The fine grids hold
only the core of the range; how often T steps leave it is counted (`Rare`), and those steps go to the coarse grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import gammaln

from dpgrad.accounting.pairs import Array
from dpgrad.accounting.pld.cumulants import Complex
from dpgrad.errors import AccountingError

__all__ = [
    "MOST_POINTS",
    "Factor",
    "Measure",
    "Product",
    "Rare",
    "Rounding",
    "TooLong",
    "compose",
    "convolve",
    "most_rare",
    "power",
    "product",
    "rare",
    "regrid",
    "shared",
]  # fmt: skip

_EPS = float(np.finfo(float).eps)
_FFT = 8 * _EPS  # times log₂N and the mass: error of each coefficient; docs/proofs/accounting.md, section 4
_TRIM = 1e-14  # tilted mass cut from each end of a block
_SILENT = 60.0  # a frequency below e⁻⁶⁰ is left out
MOST_POINTS = 1 << 23
_MOST_PRODUCTS = 1 << 29  # of one convolution by definition


class TooLong(Exception):  # noqa: N818
    """A convolution by definition would take too long."""


class Measure(NamedTuple):
    """e^{c·l}·mass on lattice points (first + i)·h, divided by e^{log_scale}."""

    first: int
    mass: Array
    log_scale: float
    error: float = 0.0  # tilted mass that may be missing or misplaced
    infinite: float = 0.0  # untilted mass whose loss is not bounded


@dataclass(frozen=True)
class Rounding:
    """How masses move to a coarser lattice: ``upper`` connects the dots, otherwise each goes to the nearest point.

    ``tilt`` is the power of e^l that multiplies the measure.
    """

    tilt: float
    upper: bool


def shared(
    mass: Array, loss: Array, left: NDArray[np.int64], a: Array, gap: Array | float, tilt: float, size: int
) -> Array:
    """Tilted masses at ``loss`` split between a and a + gap, the points numbered left and left + 1, P and Q kept."""
    share = np.clip(np.expm1(a - loss) / np.expm1(-gap), 0, 1)
    moved = mass * np.exp(tilt * (a - loss))
    found = np.bincount(left, (1 - share) * moved, size) + np.bincount(
        left + 1, share * np.exp(tilt * gap) * moved, size
    )
    return np.asarray(found, np.float64)


def regrid(measure: Measure, rounding: Rounding, old: float, new: float) -> Measure:
    """The measure on a coarser lattice."""
    loss: Array = (measure.first + np.arange(len(measure.mass), dtype=float)) * old
    if rounding.upper:
        place = np.floor(loss / new).astype(np.int64)
        start, size = int(place[0]), int(place[-1] - place[0]) + 2
        mass = shared(measure.mass, loss, place - start, place.astype(np.float64) * new, new, rounding.tilt, size)
    else:
        place = np.rint(loss / new).astype(np.int64)
        start = int(place[0])
        moved: Array = measure.mass * np.exp(rounding.tilt * (place * new - loss))
        mass = np.asarray(np.bincount(place - start, moved), np.float64)
    # what was misplaced before moves by at most one new cell
    return measure._replace(first=start, mass=mass, error=measure.error * math.exp(rounding.tilt * new))


class Factor(Protocol):
    """Something to be composed on one lattice: a measure of mass about one, once divided by e^{log_total}."""

    @property
    def offset(self) -> int:
        """The lattice point that index zero stands for."""

    @property
    def log_total(self) -> float: ...

    @property
    def span(self) -> int:
        """The length of the longest measure in it."""

    @property
    def variance(self) -> float:
        """About the variance, in squared lattice points."""

    @property
    def inherited(self) -> float:
        """A bound on the error that its measures brought with them."""

    @property
    def infinite_total(self) -> float: ...

    def log_moments(self, theta: Array) -> Array:
        """log Σ e^{θi}·mass, or more."""

    def transform(self, size: int) -> tuple[Complex, float, float]:
        """The discrete Fourier transform; the root mean square of bounds on its errors; and a relative bound."""


def _bins(masses: Array) -> tuple[Array, Array, Array]:
    """Long measures in bins: first index, last index and mass of each."""
    points = masses.shape[1]
    width = -(-points // 2048)
    starts = np.arange(0, points, width)
    binned = np.add.reduceat(masses, starts, axis=1) if width > 1 else masses
    return starts, np.minimum(starts + width, points) - 1, binned


def _moments(masses: Array, theta: Array) -> Array:
    """Σ e^{θi}·mass of each measure, or more: the mass of a bin is taken at the end where it counts most."""
    starts, stops, binned = _bins(masses)
    return np.asarray(np.exp(theta[:, None] * np.where(theta[:, None] > 0, stops, starts)) @ binned.T)


def _spread(masses: Array) -> Array:
    """(mass, first moment, second moment) of each measure."""
    index = np.arange(masses.shape[1], dtype=float)
    return np.stack([masses.sum(axis=1), masses @ index, masses @ index**2], axis=1)


def _waves(masses: Array, size: int) -> tuple[Complex, float]:
    """The transforms of some measures, and a bound on the error of every coefficient."""
    most = float(masses.sum(axis=1).max())
    return np.array([fft.rfft(_wrapped(row, size), size) for row in masses]), _FFT * math.log2(size) * most


@dataclass(frozen=True)
class Product:
    """Steps to be composed on one lattice: each row of ``weights`` mixes the measures and is repeated ``counts`` times.

    The measures of one product share ``first``; every row has mass one once divided by e^{log_scale}. Weights may be
    signed where a polynomial interpolates.
    """

    first: int
    masses: Array  # (measures, points)
    log_scale: Array  # (rows,)
    error: Array  # (measures,)
    infinite: Array  # (measures,)
    weights: Array  # (rows, measures)
    counts: Array  # (rows,)

    @property
    def steps(self) -> float:
        return float(self.counts.sum())

    @property
    def amplify(self) -> float:
        """How much larger than the largest measure a mixture can be."""
        return float(np.abs(self.weights).sum(axis=1).max())

    @property
    def offset(self) -> int:
        return int(self.first * self.steps)

    @property
    def log_total(self) -> float:
        return float(self.counts @ self.log_scale)

    @property
    def span(self) -> int:
        return int(self.masses.shape[1])

    @property
    def variance(self) -> float:
        moments = self.weights @ _spread(self.masses)
        mean = moments[:, 1] / moments[:, 0]
        return float(self.counts @ (moments[:, 2] / moments[:, 0] - mean**2))

    @property
    def inherited(self) -> float:
        # n measures, each wrong by e of its mass of one: together by (1 + e)ⁿ − 1
        return math.expm1(min(float(self.counts @ np.log1p(np.abs(self.weights) @ self.error)), 600.0))

    @property
    def infinite_total(self) -> float:
        return self.steps * float(self.infinite.max())

    def log_moments(self, theta: Array) -> Array:
        return np.asarray(np.log(_moments(self.masses, theta) @ self.weights.T) @ self.counts)

    def transform(self, size: int) -> tuple[Complex, float, float]:
        waves, each = _waves(self.masses, size)
        each *= self.amplify
        steps = self.steps
        if steps == 1 and len(self.weights) == 1:
            return self.weights[0] @ waves, each, 256 * _EPS
        # a frequency is silent where the product is certainly below e⁻⁶⁰
        live = np.abs(waves).max(axis=0) > math.exp(-_SILENT / steps) / self.amplify
        out = np.zeros(waves.shape[1], np.complex128)
        out[live], least = self._multiplied(waves[:, live])
        # n factors of modulus at most one, each wrong by d: by n·d·(1 + d)ⁿ times the product of all but the least
        others = np.minimum(np.abs(out[live]) / np.maximum(least, 1e-300), 1.0)
        silent = math.exp(-_SILENT * max(steps - 1, 0) / steps)
        rough = 1.1 * steps * each * math.sqrt(2 * float((others**2).sum()) / size) + 1.1 * steps * each * silent
        return out, rough + 2 * math.exp(-_SILENT), (2 * steps + 256) * _EPS

    def _multiplied(self, waves: Complex) -> tuple[Complex, Array]:
        """The product of all rows, and the least modulus among them; by squaring, logarithms are slow."""
        total = np.ones(waves.shape[1], np.complex128)
        least = np.ones(waves.shape[1])
        for i in range(0, len(self.counts), 256):
            part, counts = self.weights[i : i + 256] @ waves, self.counts[i : i + 256].astype(np.int64)
            least = np.minimum(least, np.abs(part).min(axis=0))
            while len(counts):
                total *= part[counts % 2 == 1].prod(axis=0)
                part, counts = part[counts > 1] ** 2, counts[counts > 1] // 2
        return total, least


def _wrapped(row: Array, size: int) -> Array:
    """The row, whose end goes on at its beginning where it is longer than ``size``."""
    if len(row) <= size:
        return row  # the transform adds zeros
    return np.asarray(np.pad(row, (0, -len(row) % size)).reshape(-1, size).sum(axis=0))


def power(measure: Measure, count: int = 1) -> Product:
    """``measure``, ``count`` times."""
    return product([measure], np.ones((1, 1)), np.array([float(count)]))


def product(measures: list[Measure], weights: Array, counts: Array) -> Product:
    """Measures brought to a common first point and scale."""
    first, masses = _aligned(measures)
    scale = np.array([m.log_scale for m in measures])
    # what each row weighs: rows are mixtures of measures of very different scale only where weights are one or zero
    top = np.where(weights != 0, scale, -np.inf).max(axis=1)
    mixed = weights * np.exp(np.minimum(scale - top[:, None], 0.0))
    total = mixed @ masses.sum(axis=1)
    error = np.array([m.error / m.mass.sum() for m in measures])
    infinite = np.array([m.infinite for m in measures])
    return Product(first, masses, top + np.log(total), error, infinite, mixed / total[:, None], counts)


def _aligned(measures: Sequence[Measure], first: int | None = None) -> tuple[int, Array]:
    first = min(m.first for m in measures) if first is None else first
    last = max(m.first + len(m.mass) for m in measures)
    masses = np.zeros((len(measures), last - first))
    for row, m in zip(masses, measures, strict=True):
        row[m.first - first : m.first - first + len(m.mass)] = m.mass
    return first, masses


@dataclass(frozen=True)
class Rare:
    """The steps among n that may leave the core: near^J, or C(n, j)·near^{J−j}·far^j for each j from 1 to J.

    n steps that are each near or far are near^{n−J} times this, but for more than J far ones, which are ``dropped``.
    Row 0 holds all J near steps composed, row 1 one near step, row 2 one far step.
    """

    first: int
    masses: Array  # (3, points)
    shares: Array  # (J + 1,): how much of the whole each number of far steps has
    log_total: float
    inherited: float
    infinite_total: float

    @property
    def _most(self) -> int:
        return len(self.shares) - 1

    @property
    def offset(self) -> int:
        return self.first * self._most

    @property
    def span(self) -> int:
        return int(self.masses.shape[1])

    @property
    def variance(self) -> float:
        moments = _spread(self.masses)
        return float(moments[0, 2] - moments[0, 1] ** 2 + self.shares[1] * moments[2, 2])

    def _sum(self, whole: Complex, near: Complex, far: Complex) -> Complex:
        total = self.shares[-1] * np.ones_like(far)
        power = np.ones_like(near)
        for share in self.shares[-2:0:-1]:
            power = power * near
            total = total * far + share * power
        return np.asarray(self.shares[0] * whole + (total * far if self._most else 0.0))

    def log_moments(self, theta: Array) -> Array:
        whole, near, far = np.log(_moments(self.masses, theta)).T
        terms = [math.log(self.shares[0]) + whole]
        for j, share in enumerate(self.shares[1:], start=1):
            terms.append(math.log(max(share, 1e-300)) + (self._most - j) * near + j * far)
        return np.asarray(np.logaddexp.reduce(terms, axis=0))

    def transform(self, size: int) -> tuple[Complex, float, float]:
        waves, each = _waves(self.masses, size)
        rounding = 16 * self._most * _EPS  # of sums and products of numbers of modulus at most one
        return self._sum(*waves), 1.1 * self._most * each + rounding, 0.0


def _log_ways(near: Measure, far: Measure, count: int) -> Array:
    """log C(n, j)·(far/near)^j: the tilted mass of j far steps among n, in units of n near ones, for some hundred j."""
    j = np.arange(min(count, 200) + 1)
    ratio = far.log_scale - near.log_scale
    return np.asarray(gammaln(count + 1) - gammaln(j + 1) - gammaln(count - j + 1) + j * ratio)


def _beyond(logs: Array) -> Array:
    """The share of more than j, for each j."""
    share = np.exp(logs - np.logaddexp.reduce(logs))
    return 1.01 * np.append(np.cumsum(share[::-1])[::-1][1:], 0.0)


def most_rare(near: Measure, far: Measure, count: int) -> int:
    """How many of ``count`` steps, at most, are far, but for a negligible share."""
    return max(int(np.argmax(_beyond(_log_ways(near, far, count)) <= _TRIM)), 1)


def rare(whole: Measure, near: Measure, far: Measure, count: int, most: int) -> Rare:
    """`Rare` from the composition of ``most`` near steps, one near and one far step, all on one lattice."""
    logs = _log_ways(near, far, count)
    dropped, logs = float(_beyond(logs)[most]), logs[: most + 1]
    # index zero stands for the same sum in every term: J times the first point
    first = min(near.first, far.first, math.floor(whole.first / most))
    masses = _aligned([whole._replace(first=whole.first - (most - 1) * first), near, far], first)[1]
    scales = logs + most * near.log_scale
    scales[0] = whole.log_scale
    total = float(np.logaddexp.reduce(scales))
    error = whole.error + most * (near.error + far.error)
    slack = math.exp(2 * abs(whole.log_scale - most * near.log_scale))
    return Rare(first, masses, np.exp(scales - total), total, error + dropped * slack, count * far.infinite)


def compose(factors: Sequence[Factor]) -> Measure:
    """The composition of all ``factors``, which share one lattice."""
    low, high = _window(factors)
    size = fft.next_fast_len(max(high - low + 1, 16), real=True)
    if size > MOST_POINTS:
        raise AccountingError(
            f"the composition needs a lattice of {size:,} points: its loss spreads too widely to certify"
        )
    waves, absolute, relative = np.ones(size // 2 + 1, np.complex128), 0.0, _FFT * math.log2(size)
    for factor in factors:
        wave, rough, scaled = factor.transform(size)
        waves *= wave
        absolute += rough
        relative += scaled
    mass = np.roll(fft.irfft(waves, size), -low)  # index i holds offset + low + i
    norm = float(np.sqrt((mass**2).sum()))
    round_off = math.sqrt(size) * (1.1 * absolute + 1.1 * relative * norm)
    inherited = math.expm1(math.fsum(math.log1p(factor.inherited) for factor in factors))
    start, stop = _trimmed(mass)
    trimmed = float(np.abs(mass[:start]).sum() + np.abs(mass[stop:]).sum())
    error = round_off + inherited + trimmed + 2.1 * _TRIM
    return Measure(
        sum(factor.offset for factor in factors) + low + start,
        np.maximum(mass[start:stop], 0),
        math.fsum(factor.log_total for factor in factors),
        error,
        math.fsum(factor.infinite_total for factor in factors),
    )


def convolve(factors: Sequence[Product], faint: float) -> Measure:
    """The composition of powers of single measures, by definition: every mass is a sum of positive products, so it
    keeps its relative precision where the FFT's round-off would drown it. For few points only.

    About ``faint`` of the tilted mass is cut from each end of every product.
    """
    first, mass, left_out = 0, np.ones(1), 0.0
    for factor in factors:
        square, at, n = factor.masses[0] * factor.weights[0, 0], factor.first, int(factor.steps)
        while n:
            if n & 1:
                start, mass = _kept(_product(mass, square), faint)
                first += at + start
            n >>= 1
            if n:
                start, square = _kept(_product(square, square), faint)
                at = 2 * at + start
            left_out += 4 * faint * factor.steps
    return Measure(
        first,
        mass,
        math.fsum(factor.log_total for factor in factors),
        math.expm1(math.fsum(math.log1p(factor.inherited) for factor in factors)) + left_out,
        math.fsum(factor.infinite_total for factor in factors),
    )


def _product(one: Array, two: Array) -> Array:
    if len(one) * len(two) > _MOST_PRODUCTS:
        raise TooLong
    return np.asarray(np.convolve(one, two))


def _kept(mass: Array, faint: float) -> tuple[int, Array]:
    inside = np.flatnonzero(mass > faint / len(mass))
    return int(inside[0]), mass[inside[0] : inside[-1] + 1]


def _trimmed(mass: Array) -> tuple[int, int]:
    """The part that holds all but at most `_TRIM` of the mass at either end, in whole blocks."""
    width = max(1, len(mass) >> 12)
    blocks = np.add.reduceat(np.maximum(mass, 0), np.arange(0, len(mass), width))
    most = _TRIM * blocks.sum()
    start = int(np.searchsorted(np.cumsum(blocks), most)) * width
    stop = len(mass) - (int(np.searchsorted(np.cumsum(blocks[::-1]), most)) - 1) * width
    return start, min(max(stop, start + 1), len(mass))


def _window(factors: Sequence[Factor]) -> tuple[int, int]:
    """Lattice points, from the offset, outside which the composition has tilted mass below `_TRIM`, by Chernoff's
    bound on the discrete measures."""
    deviation = math.sqrt(max(sum(factor.variance for factor in factors), 1e-6))
    need = -math.log(_TRIM)
    span = max(factor.span for factor in factors)
    # a bell wants θ = √(2·need)/deviation, rare large losses want θ a few times 1/span
    theta = np.geomspace(1 / span, max(math.sqrt(2 * need) / deviation, 2 / span), 8)
    theta = theta[theta * span < 650]
    ends = []
    for sign in (1, -1):
        logs = sum(factor.log_moments(sign * theta) for factor in factors)
        ends.append(float(np.min((logs + need) / theta)))
    return math.floor(-ends[1]), math.ceil(ends[0])
