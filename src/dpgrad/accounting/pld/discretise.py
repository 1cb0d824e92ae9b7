"""One step on a lattice of losses, from above and from below.

**Upper bounds.** Mass at a loss between two lattice points a < b goes to both so that P's and Q's mass are kept
("connect the dots", Doroshenko et al. 2022): b gets (1 − e^{a−l})/(1 − e^{a−b}) of it. The profile becomes the chord
of a convex function of e^ε, so it never falls; what lies beyond the last point becomes certain loss.

**Lower bounds.** Every loss is rounded to the nearest point, and the masses of P and of Q are kept apart: the sum of
the rounded losses is a function of the output, and a function reveals no more than the output does. So
δ(ε) ≥ P(S) − e^ε Q(S) for every set S of sums. Both kinds of rounding err by the square of the spacing.

**Rounding errors.** P and Q are mixtures of Gaussians, entire functions of x, so Gauss–Legendre quadrature of their
mass on a short panel has a proven remainder (`_longest`). With floating-point rounding, each mass is right to a
relative `accuracy`; `certify` pays for it once per step. Proofs: docs/proofs/accounting.md, sections 2 and 3.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dpgrad.accounting.pairs import Array, Kind, Pair
from dpgrad.accounting.pld import cumulants
from dpgrad.accounting.pld.cumulants import atom, pieces
from dpgrad.accounting.pld.lattice import Measure, shared

__all__ = ["Index", "Rounded", "Span", "accuracy", "core", "dotted", "ends", "losses", "panels", "rounded"]

Index = NDArray[np.int64]

_EPS = float(np.finfo(float).eps)
_RULES = {m: np.polynomial.legendre.leggauss(m) for m in (3, 4, 8)}
_REMAINDER = 4 * _EPS  # relative, of the mass of a panel
_TAIL = 1e-11  # relative error allowed to Φ of scipy beyond the ends: an assumption, section 1
_RARE = 1e-2  # expected number of steps outside the core, in the tilted scale


class Span(NamedTuple):
    """Outputs x between ``low`` and ``high``."""

    low: float
    high: float


def ends(pair: Pair, tail: float) -> Span:
    """The x between which all but about ``tail`` of P lies at either end."""
    reach = max(-float(ndtri(tail)) * pair.sigma, 0.5 + pair.sigma)  # both pieces of ``larger`` must exist
    if pair.group > 1:
        return Span(-reach, max(pair.top(tail), reach))
    return Span(-reach, reach + (1.0 if pair.up else 0.0))


def core(pair: Pair, count: int, tilt: float, tail: float) -> Span:
    """The x outside which ``count`` steps tilted by e^{cL} are expected to lie at most `_RARE` times."""
    low, high = ends(pair, tail)
    parts = []
    for piece, left, right in pieces(pair, low, high):
        x = np.linspace(left, right, 1025)
        parts.append((x, piece.log_p(x) + tilt * piece.loss(x)))
    x, log_mass = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    mass = np.exp(log_mass - log_mass.max())
    share = np.cumsum(mass) / mass.sum()
    rare = _RARE / 4 / count  # a quarter, as the sum is no integral
    first = int(np.searchsorted(share, rare)) - 1
    last = len(x) - int(np.searchsorted(np.cumsum(mass[::-1]) / mass.sum(), rare))
    least = 0.5 + 1e-3 * pair.sigma if pair.kind is Kind.LARGER else 0.0  # both pieces, and the atom, are in the core
    return Span(min(float(x[max(first, 0)]), -least), max(float(x[min(last, len(x) - 1)]), least))


def losses(pair: Pair, span: Span) -> Span:
    """The losses at the ends of a span."""
    held = pieces(pair, *span)
    ((one, low, _), (two, _, high)) = held[0], held[-1]
    return Span(float(one.loss(np.array(low))), float(two.loss(np.array(high))))


def accuracy(pair: Pair, tilt: float, tail: float) -> float:
    """A bound on the relative error of every mass, and on the error of every loss, that one step contributes.

    It holds the remainder of the quadrature, the rounding of the log-densities (squares of up to z, exponents of up to
    z/σ) and that of e^{cl}.
    """
    z = _reach(pair, tail)
    exponent = pair.group * (z + 0.5 * pair.group / pair.sigma) / pair.sigma
    if pair.group > 1:  # the logarithms of binomial weights
        exponent += pair.group * (2 - math.log(pair.sampling_rate) - math.log1p(-pair.sampling_rate))
    low, high = losses(pair, ends(pair, tail))
    return _EPS * (64 + 4 * z * z + 16 * exponent + 8 * (tilt + 1) * max(-low, high))


def _reach(pair: Pair, tail: float) -> float:
    """How far, in standard deviations, any x lies from any of the means 0, 1 and −1, or of a group's, up to ±k."""
    return max(-x if x < 0 else x for x in ends(pair, tail)) / pair.sigma + pair.group / pair.sigma


def _longest(points: int, reach: float) -> float:
    """The longest panel, in standard deviations, on which Gauss–Legendre has a relative remainder of `_REMAINDER`.

    On a panel of w the remainder is w^{2m+1}(m!)⁴/((2m+1)(2m)!³)·f^{(2m)}(ξ), and for a Gaussian |f^{(2m)}| ≤ H(z)·f,
    with H the Hermite polynomial of order 2m with all signs positive and z the reach; f varies by at most e^{wz} ≤ e³.
    """
    m = points
    hermite = math.fsum(
        math.factorial(2 * m) / (math.factorial(k) * math.factorial(2 * m - 2 * k) * 2.0**k) * reach ** (2 * m - 2 * k)
        for k in range(m + 1)
    )
    constant = math.factorial(m) ** 4 / ((2 * m + 1) * math.factorial(2 * m) ** 3)
    return float(min((_REMAINDER / (constant * hermite * math.exp(3.0))) ** (0.5 / m), 3.0 / reach))


class _Nodes(NamedTuple):
    x: Array
    log_weight: Array


def _nodes(sigma: float, reach: float, edges: Array, low: float, high: float) -> _Nodes:
    """Quadrature nodes between low and high on panels that no edge cuts, in no order."""
    width = _longest(8, reach) * sigma
    uniform = np.linspace(low, high, math.ceil((high - low) / width) + 1)
    bounds = np.unique(np.clip(np.concatenate([uniform, edges]), low, high))
    half, middle = np.diff(bounds) / 2, (bounds[1:] + bounds[:-1]) / 2
    xs, logs = [], []
    left = np.ones(len(half), bool)
    for m, (points, weights) in _RULES.items():
        chosen = left & (2 * half <= (1 + 1e-9) * _longest(m, reach) * sigma) if m < 8 else left
        h = half[chosen, None]
        xs.append((middle[chosen, None] + h * points).ravel())
        logs.append((np.log(h) + np.log(weights)).ravel())
        left = left & ~chosen
    return _Nodes(np.concatenate(xs), np.concatenate(logs))


def panels(pair: Pair, low: float, high: float) -> _Nodes:
    """Nodes that integrate P or Q between low and high."""
    reach = (max(-low, high) + pair.group) / pair.sigma
    return _nodes(pair.sigma, reach, np.empty(0), low, high)


def dotted(
    pair: Pair, tilt: float, spacing: float, tail: float, spans: list[Span] | None = None, whole: bool = True
) -> Measure:
    """An upper bound of one step: P's loss distribution on the lattice by connecting the dots.

    ``tail`` of P's mass is given up at each end: the low end is moved up, the high end becomes certain loss. With
    ``spans`` only what lies there, and with ``whole`` also both ends.
    """
    full = ends(pair, tail)
    held = [held for span in spans or [full] for held in pieces(pair, *span) if held[1] < held[2]]
    reach = _reach(pair, tail)
    parts = [_dotted_piece(*piece, tilt, spacing, tail, reach) for piece in held]
    if pair.kind is Kind.LARGER and any(span.low < 0 < span.high for span in spans or [full]):
        parts.append((0, np.ones(1), math.log(atom(pair))))
    infinite = 0.0
    if whole:
        (lowest, *_), (highest, *_) = pieces(pair, *full)[0], pieces(pair, *full)[-1]
        above = math.floor(losses(pair, full).low / spacing) + 1
        log_below = float(np.log(np.maximum(lowest.mass(np.array(-np.inf), np.array(full.low)), 1e-320)))
        parts.append((above, np.ones(1), log_below + tilt * above * spacing))
        infinite = float(highest.mass(np.array(full.high), np.array(np.inf))) * (1 + _TAIL)
    log_scale = max(part[2] for part in parts)
    first = min(part[0] for part in parts)
    mass = np.zeros(max(start + len(piece) for start, piece, _ in parts) - first)
    for start, piece, top in parts:
        mass[start - first : start - first + len(piece)] += piece * math.exp(max(top - log_scale, -745.0))
    total = float(mass.sum())
    return Measure(first, mass / total, log_scale + math.log(total), 0.0, infinite)


def _dotted_piece(
    pair: Pair, low: float, high: float, tilt: float, spacing: float, tail: float, reach: float
) -> tuple[int, Array, float]:
    points = _dots(pair, low, high, tilt, spacing, tail)
    places = points.astype(np.float64) * spacing
    x, log_weight = _nodes(pair.sigma, reach, pair.place(places), low, high)
    loss = pair.loss(x)
    exponent = (pair.log_p(x, loss) + log_weight) + tilt * loss
    top = float(exponent.max())
    left = np.clip(np.searchsorted(places, loss, side="right") - 1, 0, len(places) - 2)
    mass = np.zeros(int(points[-1] - points[0]) + 1)
    gap = np.diff(places)[left] if len(points) < len(mass) else spacing
    mass[points - points[0]] = shared(np.exp(exponent - top), loss, left, places[left], gap, tilt, len(places))
    return int(points[0]), mass, top


def _dots(pair: Pair, low: float, high: float, tilt: float, spacing: float, tail: float) -> Index:
    """The lattice points that receive mass: all, or, on a long lattice, fewer where there is little tilted mass.

    A stride of r cells over tilted mass m costs as much as m·r² of unit strides; all blocks share one in all.
    """
    bottom, top = pair.loss(np.array([low, high])) / spacing
    first = math.floor(bottom)
    last = max(math.ceil(top), first + 1)
    if last - first < 2000:
        return np.arange(first, last + 1)
    block = 1 << max(0, (last - first).bit_length() - 10)
    corners = np.append(np.arange(first, last, block), last)
    x = pair.place(corners * spacing)
    with np.errstate(divide="ignore"):
        log_mass = np.log(pair.mass(x[:-1], x[1:])) + tilt * corners[1:] * spacing
    log_share = log_mass - cumulants.tilted(pair, tilt, tail).value + math.log(len(log_mass))
    # δ near ε may come from little tilted mass: only what is negligible may be coarse on the scale of 1/c, and only so
    # far that it stays so when it moves up by a stride
    room = np.where(log_share > -25, 0.02, np.clip(-log_share / 4, 0.02, 300)) / (tilt * spacing)
    log_most = np.minimum(np.log(room), math.log(block))
    stride = np.exp2(np.floor(np.clip(-log_share / 2, 0, np.maximum(log_most, 0)) / math.log(2))).astype(np.int64)
    index = np.arange(last - first + 1)
    kept = (index % block) % np.append(stride, 1)[index // block] == 0
    kept[-1] = True
    return np.asarray(first + index[kept])


class Rounded(NamedTuple):
    """P's and Q's masses of one step on the lattice; Q's are tilted once more, being e^{−l} of P's."""

    p: Measure
    q: Measure


def rounded(
    ruler: Pair, actual: list[Pair], tilt: float, spacing: float, tail: float, spans: list[Span] | None = None
) -> list[Rounded]:
    """Lower bounds of single steps: the loss that ``ruler`` would have, rounded to the nearest lattice point, is a
    function of the output; its masses under each ``actual`` pair, which may have other noise or rate.

    With ``spans`` only what lies there.
    """
    reach = max(_reach(pair, tail) * pair.sigma for pair in (ruler, *actual)) / min(pair.sigma for pair in actual)
    sigma = min(pair.sigma for pair in actual)
    found: list[tuple[Array, Array, Index]] = []  # x, log-weight, lattice point of each node
    for low, high in spans or [ends(ruler, tail)]:
        points = _dots(ruler, low, high, tilt, spacing, tail)
        cuts = np.clip(ruler.place((points[1:] + points[:-1]) / 2 * spacing), low, high)
        x, log_weight = _nodes(sigma, reach, cuts, low, high)
        found.append((x, log_weight, points[np.searchsorted(cuts, x)]))
    x, log_weight, point = (np.concatenate(column) for column in zip(*found, strict=True))
    first, place = int(point.min()), point * spacing
    index, size = point - first, int(point.max()) - first + 1
    steps = []
    for pair in actual:
        loss = pair.loss(x)
        log_p = pair.log_p(x, loss) + log_weight
        sides = []
        for logs in (log_p + tilt * place, log_p - loss + (tilt + 1) * place):
            top = float(logs.max())
            mass = np.bincount(index, np.exp(logs - top), size)
            total = float(mass.sum())
            sides.append(Measure(first, mass / total, top + math.log(total)))
        steps.append(Rounded(*sides))
    return steps
