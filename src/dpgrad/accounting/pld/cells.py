"""Schedules of many distinct steps, brought to few measures.

For the upper bound every step becomes the mixture of the neighbouring nodes in s = 2Φ(κ/σ) − 1 and in q, which
dominates it (`pairs`) and errs by the square of the node spacing; for the lower bound the steps of a cell are read with
one ruler, and the masses of what is read are interpolated.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, log_ndtr

from dpgrad.accounting.pairs import Array, Kind, Pair
from dpgrad.accounting.pld.discretise import dotted, rounded
from dpgrad.accounting.pld.lattice import Measure, Product, product

__all__ = ["Cell", "Grid", "mixtures", "polynomials"]

_POLYNOMIAL = 7
_RADIUS = 0.2
_EPS = float(np.finfo(float).eps)
_MARGIN = 64 * _EPS  # of s, or of the ratio of its complements; see `_in_s`
_ROUNDING = 256 * _EPS  # of the Lagrange basis: 7 nodes, 42 factors


class Grid(NamedTuple):
    """The lattice of single steps: tilt, spacing, the mass each step may leave out, and the width of a cell in log σ
    and log q."""

    tilt: float
    spacing: float
    tail: float
    width: float


class Cell(NamedTuple):
    """Steps of one kind whose noise and rate lie between neighbouring nodes."""

    kind: Kind
    sigma_nodes: Array  # (2,), or (1,) where all noise is equal
    rate_nodes: Array
    sigma: Array  # (steps,)
    sampling_rate: Array
    counts: Array


def _cells(counts: Mapping[Pair, int], width: float) -> Iterator[Cell]:
    for kind in sorted({pair.kind for pair in counts}):
        members = [(pair, n) for pair, n in counts.items() if pair.kind is kind]
        sigma = np.array([pair.sigma for pair, _ in members])
        sampling_rate = np.array([pair.sampling_rate for pair, _ in members])
        count = np.array([float(n) for _, n in members])
        sigma_nodes, rate_nodes = _nodes(sigma, width), _nodes(sampling_rate, width)
        at_sigma, at_rate = _place(sigma_nodes, sigma), _place(rate_nodes, sampling_rate)
        order = np.lexsort((at_rate, at_sigma))
        breaks = np.flatnonzero(np.diff(at_sigma[order]) | np.diff(at_rate[order])) + 1
        for inside in np.split(order, breaks):
            i, j = at_sigma[inside[0]], at_rate[inside[0]]
            for part in np.array_split(inside, math.ceil(len(inside) / 1024)):
                yield Cell(
                    kind, sigma_nodes[i : i + 2], rate_nodes[j : j + 2], sigma[part], sampling_rate[part], count[part]
                )


def _nodes(values: Array, width: float) -> Array:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low])
    nodes = np.geomspace(low, high, max(2, math.ceil(math.log(high / low) / width) + 1))
    nodes[0], nodes[-1] = low, high  # rounding must not leave a step outside
    return nodes


def _place(nodes: Array, values: Array) -> NDArray[np.intp]:
    return np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, max(len(nodes) - 2, 0))


def _linear(nodes: Array, values: Array) -> Array:
    """Weights that interpolate ``values`` between two nodes: (values, nodes)."""
    if len(nodes) == 1:
        return np.ones((len(values), 1))
    share = np.clip((values - nodes[0]) / (nodes[1] - nodes[0]), 0, 1)
    return np.stack([1 - share, share], axis=1)


def mixtures(counts: Mapping[Pair, int], grid: Grid) -> Iterator[Product]:
    """Every step as the mixture of the corners of its cell, which dominates it."""
    made: dict[Pair, Measure] = {}
    for cell in _cells(counts, grid.width):
        kappa = Pair(cell.kind, 1.0, 1.0).kappa
        by_sigma = _in_s(cell.sigma_nodes, cell.sigma, kappa)
        by_rate = _linear(cell.rate_nodes, cell.sampling_rate)
        corners = [Pair(cell.kind, float(r), float(s)) for s in cell.sigma_nodes for r in cell.rate_nodes]
        for pair in corners:
            if pair not in made:
                made[pair] = dotted(pair, grid.tilt, grid.spacing, grid.tail)
        weights = np.einsum("ts,tr->tsr", by_sigma, by_rate).reshape(len(cell.sigma), -1)
        yield product([made[pair] for pair in corners], weights, cell.counts)


def _in_s(nodes: Array, sigma: Array, kappa: float) -> Array:
    """Weights that interpolate linearly in s = 2Φ(κ/σ) − 1 between two noise levels, in doubt towards the smaller.

    Where s is close to one it has no digits left: its complement 2Φ(−κ/σ) has, relative to that of the larger noise.
    """
    if len(nodes) == 1:
        return np.ones((len(sigma), 1))
    if kappa / nodes[0] > 1:
        low, here, high = (log_ndtr(-kappa / x) for x in (nodes[0], sigma, nodes[1]))
        gap, margin = -np.expm1(low - high), _MARGIN * (1 - low)
        share = (np.exp(here - high) - np.exp(low - high)) / gap
    else:
        low, here, high = (erf(kappa / x / math.sqrt(2)) for x in (nodes[0], sigma, nodes[1]))
        gap, margin = high - low, _MARGIN * low
        share = (here - low) / gap
    share = np.clip(share - 1e-9 - margin / abs(gap), 0, 1)
    return np.stack([1 - share, share], axis=1)


def polynomials(counts: Mapping[Pair, int], grid: Grid) -> Iterator[tuple[Product, Product]]:
    """The steps of a cell, all read with one ruler; their masses interpolated in log σ (exactly linear in q).

    A mass of N(m, σ²) is analytic in log σ, and for complex σ with |log σ − log σ₀| ≤ r its modulus is at most e^{2r}
    times 1/√cos 2r times the mass of N(m, σ̄²), σ̄ = σ₀·e^r/√cos 2r: |e^{−y²/2σ²}| ≤ e^{−y²/2σ̄²}, as Re σ⁻² ≥ σ̄⁻², and
    |1/σ| ≤ e^r/σ₀. Interpolation at the k Chebyshev nodes of half-width w errs by ∮f(ζ)ω(x)/(ω(ζ)(ζ−x))dζ/2πi over
    the circle, with |ω(x)| ≤ 2(w/2)^k and |ω(ζ)| ≥ (r−w)^k: at most 2(w/2(r−w))^k·r/(r−w) of that mass (`_remainder`).
    """
    for cell in _cells(counts, min(grid.width, 0.05)):
        low, high = float(cell.sigma_nodes[0]), float(cell.sigma_nodes[-1])
        middle, half = math.sqrt(low * high), math.log(high / low) / 2
        ruler = Pair(cell.kind, float(cell.rate_nodes[0]), middle)
        at, basis = _lagrange(middle, half, cell.sigma)
        actual = [Pair(cell.kind, float(r), float(s)) for s in at for r in cell.rate_nodes]
        # (1 − q)N₀ + qN₁ is at most the sum of those at the lowest and at the highest rate
        broad = middle * math.exp(_RADIUS) / math.sqrt(math.cos(2 * _RADIUS))
        wide = [Pair(cell.kind, float(r), broad) for r in cell.rate_nodes]
        found = rounded(ruler, [*actual, *wide], grid.tilt, grid.spacing, grid.tail)
        steps, bounds = found[: len(actual)], found[len(actual) :]
        weights = np.einsum("ts,tr->tsr", basis, _linear(cell.rate_nodes, cell.sampling_rate)).reshape(
            len(cell.sigma), -1
        )
        share = _remainder(half, len(at))
        sides = []
        for measures, overs in (
            ([s.p for s in steps], [b.p for b in bounds]),
            ([s.q for s in steps], [b.q for b in bounds]),
        ):
            together = product(measures, weights, cell.counts)
            least = float(together.log_scale.min())
            extra = share * sum(math.exp(min(over.log_scale - least, 300.0)) for over in overs)
            error = np.full(len(measures), float(together.error.max()) + extra + _ROUNDING)
            sides.append(replace(together, error=error))
        yield sides[0], sides[1]


def _remainder(half: float, nodes: int) -> float:
    """The largest error of interpolation as a share of the mass at σ̄: see `polynomials`."""
    far = _RADIUS - half
    shape = math.exp(2 * _RADIUS) / math.sqrt(math.cos(2 * _RADIUS))
    return shape * 2 * (half / (2 * far)) ** nodes * _RADIUS / far if half else 0.0


def _lagrange(middle: float, half: float, sigma: Array) -> tuple[Array, Array]:
    """Chebyshev nodes σ_k over a cell, and the Lagrange basis in log σ at each step: (nodes,), (steps, nodes)."""
    if half == 0:
        return np.array([middle]), np.ones((len(sigma), 1))
    unit = np.cos((np.arange(_POLYNOMIAL) + 0.5) * np.pi / _POLYNOMIAL)
    place = np.log(sigma / middle) / half
    basis = np.ones((len(sigma), _POLYNOMIAL))
    for k in range(_POLYNOMIAL):
        for other in np.delete(unit, k):
            basis[:, k] *= (place - other) / (unit[k] - other)
    return middle * np.exp(half * unit), basis
