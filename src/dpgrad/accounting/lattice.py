"""Measures on a lattice of losses: rounding that keeps the order of privacy, and composition by FFT with a known error.

**Upper bounds.** Mass at a loss between two lattice points a < b goes to both so that P's and Q's mass are kept
("connect the dots", Doroshenko et al. 2022): b gets (1 − e^{a−l})/(1 − e^{a−b}) of it. The profile becomes the chord
of a convex function of e^ε, so it never falls; what lies beyond the last point becomes certain loss.

**Lower bounds.** Every loss is rounded to the nearest point, and the masses of P and of Q are kept apart: the sum of
the rounded losses is a function of the output, and a function reveals no more than the output does. So
δ(ε) ≥ P(S) − e^ε Q(S) for every set S of sums. Both kinds of rounding err by the square of the spacing.

**Tilting.** A measure is stored as e^{cl} times itself, normalised. In the tilted scale a misplaced mass τ moves δ(ε)
by at most τ·e^{K−cε}·c^c/(1+c)^{1+c}, wherever it is misplaced, because e^{−cy}(1 − e^{−y}) is at most that for y ≥
0. So one number per measure, ``error``, bounds everything that is not exact: FFT round-off, wrap-around (a Chernoff
bound of the discrete measure itself), and trimmed tails; it adds under composition.

**Levels.** Rounding T times with spacing h adds variance T·h²/6; a grid fine enough for that over the range of the
whole composition would need √T points. Blocks of about a hundred steps are composed on a short fine grid and rounded
again to a coarser one, so no grid is long and the cost grows with log T.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import ndtr, ndtri

from dpgrad.accounting import cumulants
from dpgrad.accounting.cumulants import Complex, atom, longest_panel, nodes, pieces
from dpgrad.accounting.pairs import Array, Kind, Pair

Index = NDArray[np.int64]

_EPS = float(np.finfo(float).eps)
_QUADRATURE = 2e-14  # relative error allowed to a panel's mass
_TAIL_ERROR = 2e-15  # relative error of Φ in its tail
_TRIM = 1e-14  # tilted mass cut from each end of a block
MOST_POINTS = 1 << 23


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


def dotted(pair: Pair, tilt: float, spacing: float, tail: float) -> Measure:
    """An upper bound of one step: P's loss distribution on the lattice by connecting the dots.

    ``tail`` of P's mass is given up at each end: the low end is moved up, the high end becomes certain loss.
    """
    low, high = ends(pair, tail)
    held = pieces(pair, low, high)
    parts = [_dotted_piece(*piece, tilt, spacing, tail) for piece in held]
    if pair.kind is Kind.LARGER:
        parts.append((0, np.ones(1), math.log(atom(pair))))
    log_scale = max(part[2] for part in parts)
    first = min(part[0] for part in parts)
    mass = np.zeros(max(start + len(piece) for start, piece, _ in parts) - first)
    for start, piece, top in parts:
        mass[start - first : start - first + len(piece)] += piece * math.exp(top - log_scale)
    below = float(held[0][0].mass(np.array(-np.inf), np.array(low)))
    mass[1] += below * math.exp(min(tilt * (first + 1) * spacing - log_scale, 600.0))
    infinite = float(held[-1][0].mass(np.array(high), np.array(np.inf)))
    total = float(mass.sum())
    return Measure(first, mass / total, log_scale + math.log(total) + _QUADRATURE, 0.0, infinite)


def ends(pair: Pair, tail: float) -> tuple[float, float]:
    """The x between which all but about ``tail`` of P lies at either end."""
    reach = max(-float(ndtri(tail)) * pair.sigma, 0.5 + pair.sigma)  # both pieces of ``larger`` must exist
    return -reach, reach + (1.0 if pair.up else 0.0)


def _dotted_piece(
    pair: Pair, low: float, high: float, tilt: float, spacing: float, tail: float
) -> tuple[int, Array, float]:
    points = _dots(pair, low, high, tilt, spacing, tail)
    places = points.astype(np.float64) * spacing
    uniform = np.linspace(low, high, math.ceil((high - low) / longest_panel(pair)) + 1)
    edges = np.unique(np.clip(np.concatenate([uniform, pair.place(places)]), low, high))
    drawn = nodes(pair, edges[:-1], edges[1:])
    exponent = drawn.log_p + tilt * drawn.loss
    top = float(exponent.max())
    left = np.clip(np.searchsorted(places, drawn.loss, side="right") - 1, 0, len(places) - 2)
    mass = np.zeros(int(points[-1] - points[0]) + 1)
    mass[points - points[0]] = _shared(
        exponent - top, drawn.loss, left, places[left], places[left + 1], tilt, len(places)
    )
    return int(points[0]), mass, top


def _shared(log_mass: Array, loss: Array, left: Index, a: Array, b: Array, tilt: float, size: int) -> Array:
    """Tilted masses at ``loss`` split between a and b, the points numbered left and left + 1, P and Q kept."""
    share = np.expm1(a - loss) / np.expm1(a - b)
    mass = np.bincount(left + 1, share * np.exp(log_mass + tilt * (b - loss)), size)
    mass += np.bincount(left, (1 - share) * np.exp(log_mass + tilt * (a - loss)), size)
    return np.maximum(mass, 0)


def _dots(pair: Pair, low: float, high: float, tilt: float, spacing: float, tail: float) -> Index:
    """The lattice points that receive mass: all, or, on a long lattice, fewer where there is little tilted mass.

    A stride of r cells over tilted mass m costs as much as m·r² of unit strides; all blocks share one in all.
    """
    bottom, top = pair.loss(np.array([low, high])) / spacing
    first, last = math.floor(bottom), math.ceil(top)
    if last - first < 2000:
        return np.arange(first, last + 1)
    block = 1 << max(0, (last - first).bit_length() - 10)
    corners = np.append(np.arange(first, last, block), last)
    x = pair.place(corners * spacing)
    with np.errstate(divide="ignore"):
        log_mass = np.log(pair.mass(x[:-1], x[1:])) + tilt * corners[1:] * spacing
    log_share = log_mass - cumulants.tilted(pair, tilt, tail).value + math.log(len(log_mass))
    # δ near ε may come from little tilted mass: only what is negligible may be coarse on the scale of 1/c
    log_most = np.where(log_share > -25, min(math.log(0.02 / (tilt * spacing)), math.log(block)), math.log(block))
    stride = np.exp2(np.floor(np.clip(-log_share / 2, 0, np.maximum(log_most, 0)) / math.log(2))).astype(np.int64)
    index = np.arange(last - first + 1)
    kept = (index % block) % np.append(stride, 1)[index // block] == 0
    kept[-1] = True
    return np.asarray(first + index[kept])


class Rounded(NamedTuple):
    """P's and Q's masses of one step on the lattice; Q's are tilted once more, being e^{−l} of P's."""

    p: Measure
    q: Measure


def rounded(ruler: Pair, actual: list[Pair], tilt: float, spacing: float, tail: float) -> list[Rounded]:
    """Lower bounds of single steps: the loss that ``ruler`` would have, rounded to the nearest lattice point, is a
    function of the output; its masses under each ``actual`` pair, which may have other noise or rate."""
    low, high = ends(ruler, tail)
    points = _dots(ruler, low, high, tilt, spacing, tail)
    places = points * spacing
    cuts = np.clip(ruler.place((places[1:] + places[:-1]) / 2), low, high)
    edges = np.concatenate([[low], cuts, [high]])
    size, at = int(points[-1] - points[0]) + 1, points - points[0]
    found = []
    for pair in actual:
        plain, plain_noise = _intervals(edges / pair.sigma)
        sides = []
        for shift, c in ((float(pair.up), tilt), (-float(pair.down), tilt + 1)):
            law, noise = plain, plain_noise
            if shift:
                shifted, shifted_noise = _intervals((edges - shift) / pair.sigma)
                law = (1 - pair.rate) * plain + pair.rate * shifted
                noise = (1 - pair.rate) * plain_noise + pair.rate * shifted_noise
            with np.errstate(divide="ignore"):
                logs = np.log(law) + c * places
            top = float(logs.max())
            mass = np.zeros(size)
            mass[at] = np.exp(logs - top)
            total = float(mass.sum())
            error = float(np.exp(np.log(np.maximum(noise, 1e-300)) + c * places - top).sum())
            sides.append(Measure(int(points[0]), mass / total, top + math.log(total), error / total))
        found.append(Rounded(*sides))
    return found


def _intervals(edges: Array) -> tuple[Array, Array]:
    """The standard normal's mass between edges, from the nearer tail, and a bound on the error of each."""
    below, above = ndtr(edges), ndtr(-edges)
    mass = np.where(edges[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    noise = _TAIL_ERROR * np.minimum(below, above)
    return mass, noise[1:] + noise[:-1]


def regrid(measure: Measure, rounding: Rounding, old: float, new: float) -> Measure:
    """The measure on a coarser lattice."""
    loss: Array = (measure.first + np.arange(len(measure.mass), dtype=float)) * old
    if rounding.upper:
        place = np.floor(loss / new).astype(np.int64)
        start, size = int(place[0]), int(place[-1] - place[0]) + 2
        with np.errstate(divide="ignore"):
            logs = np.log(measure.mass)
        left = place.astype(np.float64) * new
        mass = _shared(logs, loss, place - start, left, left + new, rounding.tilt, size)
    else:
        place = np.rint(loss / new).astype(np.int64)
        start = int(place[0])
        moved: Array = measure.mass * np.exp(rounding.tilt * (place * new - loss))
        mass = np.asarray(np.bincount(place - start, moved), np.float64)
    # what was misplaced before moves by at most one new cell
    return measure._replace(first=start, mass=mass, error=measure.error * math.exp(rounding.tilt * new))


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

    def log_moments(self, theta: Array) -> Array:
        """log Σ e^{θi}·mass of the composition, i counted from the first points, or more: long measures are read in
        bins whose mass is taken at the end where it counts most."""
        points = self.masses.shape[1]
        width = -(-points // 2048)
        starts = np.arange(0, points, width)
        binned = np.add.reduceat(self.masses, starts, axis=1) if width > 1 else self.masses
        ends = np.where(theta[:, None] > 0, np.minimum(starts + width, points) - 1, starts)
        return self.gather(np.exp(theta[:, None] * ends) @ binned.T)

    def gather(self, moments: Array) -> Array:
        """log of the composed moments, from those of each measure: (any, measures) to (any,)."""
        return np.asarray(np.log(moments @ self.weights.T) @ self.counts)

    def transform(self, size: int) -> tuple[Complex, float]:
        """The discrete Fourier transform of the composed measure, and a bound on its error in the 2-norm."""
        waves = np.array([fft.rfft(_wrapped(row, size)) for row in self.masses])  # (measures, frequencies)
        steps = self.steps
        if steps == 1 and len(self.weights) == 1:
            out, live = self.weights[0] @ waves, np.ones(waves.shape[1], bool)
        else:
            # a frequency is silent where the product is certainly below e⁻⁶⁰
            live = np.abs(waves).max(axis=0) > math.exp(-60 / steps) / self.amplify
            out = np.zeros(waves.shape[1], np.complex128)
            out[live] = self._multiplied(waves[:, live])
        # a coefficient of a forward transform errs by a few eps·log N of the measure's 2-norm; a product of n by n such
        each = 3 * _EPS * math.log2(size) * self.amplify * float(np.sqrt((self.masses**2).sum(axis=1)).max())
        # of n factors of modulus f the error is n·f^{n−1} times that of one, and the powers' own rounding is relative
        rough = np.abs(out[live]) / np.maximum(np.abs(waves[:, live]).min(axis=0), 0.1)
        rough = each * np.maximum(rough, 0.1 ** min(steps - 1, 300.0)) + 4 * _EPS * np.abs(out[live])
        return out, float(steps * math.sqrt(2 * (rough**2).sum() / size) + 1e-24)

    def _multiplied(self, waves: Complex) -> Complex:
        rows = (self.weights[i : i + 256] @ waves for i in range(0, len(self.counts), 256))
        if np.all(self.counts == 1):
            return np.asarray(np.prod([np.prod(part, axis=0) for part in rows], axis=0))
        total = np.zeros(waves.shape[1], np.complex128)
        with np.errstate(divide="ignore", invalid="ignore"):
            for i, part in zip(range(0, len(self.counts), 256), rows, strict=True):
                total += self.counts[i : i + 256] @ np.log(part)
            return np.where(np.isfinite(total), np.exp(total), 0.0)


def _wrapped(row: Array, size: int) -> Array:
    if len(row) <= size:
        return np.pad(row, (0, size - len(row)))
    return np.asarray(np.pad(row, (0, -len(row) % size)).reshape(-1, size).sum(axis=0))


def power(measure: Measure, count: int = 1) -> Product:
    """``measure``, ``count`` times."""
    return product([measure], np.ones((1, 1)), np.array([float(count)]))


def product(measures: list[Measure], weights: Array, counts: Array) -> Product:
    """Measures brought to a common first point and scale."""
    first = min(m.first for m in measures)
    last = max(m.first + len(m.mass) for m in measures)
    masses = np.zeros((len(measures), last - first))
    for row, m in zip(masses, measures, strict=True):
        row[m.first - first : m.first - first + len(m.mass)] = m.mass
    scale = np.array([m.log_scale for m in measures])
    # what each row weighs: rows are mixtures of measures of very different scale only where weights are one or zero
    top = np.where(weights != 0, scale, -np.inf).max(axis=1)
    mixed = weights * np.exp(np.minimum(scale - top[:, None], 0.0))
    total = mixed @ masses.sum(axis=1)
    error, infinite = np.array([m.error for m in measures]), np.array([m.infinite for m in measures])
    return Product(first, masses, top + np.log(total), error, infinite, mixed / total[:, None], counts)


def compose(products: list[Product]) -> Measure:
    """The composition of all ``products``, which share one lattice."""
    offset = sum(int(p.first * p.steps) for p in products)
    log_scale = sum(float(p.counts @ p.log_scale) for p in products)
    low, high, mean_mass = _window(products)
    size = fft.next_fast_len(max(high - low + 1, 16), real=True)
    if size > MOST_POINTS:
        raise ValueError(f"the composition needs a lattice of {size:,} points: its loss spreads too widely to certify")
    waves, error = np.ones(size // 2 + 1, np.complex128), 0.0
    for p in products:
        wave, rough = p.transform(size)
        waves *= wave
        error += rough
    mass = np.roll(fft.irfft(waves, size), -low)  # index i holds offset + low + i
    norm = float(np.sqrt((mass**2).sum()))
    round_off = math.sqrt(size) * (error + 3 * _EPS * math.log2(size) * norm)
    inherited = sum(float(p.counts @ np.abs(p.weights) @ p.error) for p in products)
    infinite = sum(p.steps * float(p.infinite.max()) for p in products)
    start, stop = _trimmed(mass)
    trimmed = float(np.abs(mass[:start]).sum() + np.abs(mass[stop:]).sum())
    wrapped = 2 * _TRIM * mean_mass
    error = round_off + inherited + trimmed + wrapped
    return Measure(offset + low + start, np.maximum(mass[start:stop], 0), log_scale, error, infinite)


def _trimmed(mass: Array) -> tuple[int, int]:
    """The part that holds all but `_TRIM` of the mass at either end."""
    positive = np.maximum(mass, 0)
    total = positive.sum()
    start = int(np.searchsorted(np.cumsum(positive), _TRIM * total))
    stop = len(mass) - int(np.searchsorted(np.cumsum(positive[::-1]), _TRIM * total))
    return start, max(stop, start + 1)


def _window(products: list[Product]) -> tuple[int, int, float]:
    """Lattice points, from the sum of the first points, outside which the composition has tilted mass below `_TRIM`
    times its total, by Chernoff's bound on the discrete measures."""
    variance = log_total = 0.0
    for p in products:
        index = np.arange(p.masses.shape[1], dtype=float)
        moments = p.weights @ np.stack([p.masses.sum(axis=1), p.masses @ index, p.masses @ index**2], axis=1)
        m1 = moments[:, 1] / moments[:, 0]
        variance += float(p.counts @ (moments[:, 2] / moments[:, 0] - m1**2))
        log_total += float(p.counts @ np.log(moments[:, 0]))
    deviation = math.sqrt(max(variance, 1e-6))
    need = -math.log(_TRIM)
    span = max(p.masses.shape[1] for p in products)
    # a bell wants θ = √(2·need)/deviation, rare large losses want θ a few times 1/span
    theta = np.geomspace(1 / span, max(math.sqrt(2 * need) / deviation, 2 / span), 8)
    theta = theta[theta * span < 650]
    ends = []
    for sign in (1, -1):
        logs = sum(p.log_moments(sign * theta) for p in products) - log_total
        ends.append(float(np.min((logs + need) / theta)))
    return math.floor(-ends[1]), math.ceil(ends[0]), math.exp(min(log_total, 50.0))
