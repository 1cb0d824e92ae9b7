"""Quadrature for the loss of a pair, and its cumulant generating function K(z) = log E_P e^{zL}, z real or complex.

K carries everything an accountant needs: the Rényi divergence of order α is K(α−1)/(α−1), Abadi et al.'s α(λ) is K(λ),
and the profile of a composition is a contour integral of e^{ΣK} (`contour`).

The integrands are analytic in x, so Gauss–Legendre panels shorter than both the Gaussian's width and the distance to
the loss's singularities, (x − ½)/σ² = log((1−q)/q) ± iπ, are exact to rounding.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, ndtri

from dpgrad.accounting.pairs import Array, Kind, Pair

__all__ = [
    "REACH",
    "Complex",
    "Nodes",
    "Tilted",
    "atom",
    "law",
    "longest_panel",
    "nodes",
    "pieces",
    "tilted",
    "transform",
]  # fmt: skip

Complex = NDArray[np.complex128]

_WIDE = np.polynomial.legendre.leggauss(8)
_NARROW = np.polynomial.legendre.leggauss(4)
REACH = 11.0  # standard deviations; N(0, 1) has 2e-28 of its mass beyond


class Nodes(NamedTuple):
    """Points at which an expectation under P is a weighted sum; the log-weight under Q is ``log_p − loss``."""

    loss: Array
    log_p: Array


def nodes(pair: Pair, left: Array, right: Array) -> Nodes:
    """Gauss–Legendre nodes on panels [left, right] of x no longer than `longest_panel`.

    Eight points a panel; four where it is so short that four are as exact.
    """
    half, middle = (right - left) / 2, (right + left) / 2
    narrow = 2 * half <= min(pair.sigma / 40, pair.sigma**2 / 20)
    xs, logs = [], []
    for (points, weights), chosen in ((_NARROW, narrow), (_WIDE, ~narrow)):
        h = half[chosen, None]
        xs.append((middle[chosen, None] + h * points).ravel())
        logs.append((np.log(h) + np.log(weights)).ravel())
    x = np.concatenate(xs)
    return Nodes(pair.loss(x), pair.log_p(x) + np.concatenate(logs))


def longest_panel(pair: Pair) -> float:
    """The longest panel on which eight points are exact to rounding within `REACH` standard deviations."""
    return min(pair.sigma / 4, pair.sigma**2 / 2)


def pieces(pair: Pair, low: float, high: float) -> list[tuple[Pair, float, float]]:
    """The smooth pieces of a pair and the part of [low, high] each holds on.

    ``larger`` is the add pair's negative losses and the remove pair's positive ones; they cross zero at ∓½.
    """
    if pair.kind is not Kind.LARGER:
        return [(pair, low, high)]
    add, remove = Pair(Kind.ADD, pair.sampling_rate, pair.sigma), Pair(Kind.REMOVE, pair.sampling_rate, pair.sigma)
    return [(add, low, min(high, -0.5)), (remove, max(low, 0.5), high)]


def atom(pair: Pair) -> float:
    """P's (and Q's) mass at loss zero: (1−q)(2Φ(1/2σ) − 1) for ``larger``, else none."""
    return float((1 - pair.sampling_rate) * erf(0.5 / pair.sigma / np.sqrt(2))) if pair.kind is Kind.LARGER else 0.0


def law(pair: Pair, tilt: float, frequency: float = 0.0, tail: float = 0.0) -> Nodes:
    """Nodes fit to integrate e^{zL} under P at Re z = 0 and Re z = ``tilt``, for |Im z| ≤ ``frequency``.

    A ``tail`` of P's mass at the largest losses may be left out: it can carry all of E e^{cL} and yet not matter to δ.
    """
    reach = max(REACH * pair.sigma, 0.5 + pair.sigma)  # both pieces of ``larger`` must exist
    # e^{cL} moves a Gaussian by up to c, and by 2c where both are shifted
    top = reach + pair.group * (pair.up + tilt * (2 if pair.kind is Kind.ANTIPODAL else 1))
    if tail:
        top = min(top, pair.top(tail) if pair.group > 1 else 1 - float(ndtri(tail)) * pair.sigma)
    found = []
    for piece, low, high in pieces(pair, -reach, top):
        edges = np.linspace(low, high, int(np.ceil((high - low) / longest_panel(piece))) + 1)
        left, right = edges[:-1], edges[1:]
        if len(left) > 100:  # a large tilt leaves most of the line empty: keep what is within e⁻⁵⁰ of either peak
            log_p, loss = piece.log_p(edges), piece.loss(edges)
            tilted = log_p + tilt * loss
            seen = (log_p > log_p.max() - 50) | (tilted > tilted.max() - 50)
            left, right = left[seen[:-1] | seen[1:]], right[seen[:-1] | seen[1:]]
        if frequency:  # about two radians of e^{iwL} a panel
            turns = np.ceil(np.maximum((piece.loss(right) - piece.loss(left)) * frequency / 2, 1)).astype(np.intp)
            parts = np.concatenate([np.arange(n) / n for n in turns]) if turns.max() > 1 else np.zeros(len(left))
            step = np.repeat((right - left) / turns, turns)
            left = np.repeat(left, turns) + parts * np.repeat(right - left, turns)
            right = left + step
        found.append(nodes(piece, left, right))
    if pair.kind is Kind.LARGER:
        found.append(Nodes(np.zeros(1), np.log([atom(pair)])))
    return Nodes(np.concatenate([n.loss for n in found]), np.concatenate([n.log_p for n in found]))


class Tilted(NamedTuple):
    """K and its first two derivatives at a real point: mass, mean and variance of the tilted loss."""

    value: float
    slope: float
    curvature: float


def tilted(pair: Pair, c: float, tail: float = 0.0) -> Tilted:
    """K(c), K′(c) and K″(c).

    >>> tilted(Pair(Kind.REMOVE, 1.0, 2.0), 3.0)  # c(c+1)/2σ², (2c+1)/2σ², 1/σ²
    Tilted(value=1.5, slope=0.875, curvature=0.25)
    """
    if pair.sampling_rate == 1 and pair.kind is Kind.REMOVE and not tail:
        variance = pair.sigma**-2
        return Tilted(c * (c + 1) / 2 * variance, (c + 0.5) * variance, variance)
    loss, log_p = law(pair, c, tail=tail)
    exponent = log_p + c * loss
    top = exponent.max()
    weight = np.exp(exponent - top)
    mass = weight.sum()
    mean = weight @ loss / mass
    # log E e^{cL} = log1p(E[e^{cL} − 1]): a tiny K keeps its digits
    value = top + np.log(mass)
    if abs(value) <= 0.5:
        high = c * loss > 1  # where P's mass may be too small, and e^{cL} too large, to be multiplied
        near = np.exp(log_p) * np.expm1(np.where(high, 0.0, c * loss))
        value = np.log1p(np.where(high, np.exp(exponent) - np.exp(log_p), near).sum())
    return Tilted(float(value), float(mean), float(weight @ (loss - mean) ** 2 / mass))


def transform(pair: Pair, c: float, w: Array, tail: float = 0.0) -> Complex:
    """K(c + iw) for an array of frequencies, on the branch that is continuous from w = 0."""
    z = c + 1j * w
    if pair.sampling_rate == 1 and pair.kind is Kind.REMOVE:
        return np.asarray(z * (z + 1) / (2 * pair.sigma**2))
    loss, log_p = law(pair, c, float(w.max()), tail)
    exponent = log_p + c * loss
    top = exponent.max()
    weight = np.exp(exponent - top)
    keep = weight > 1e-19 * weight.max()
    loss, weight = loss[keep], weight[keep] / weight[keep].sum()
    # centred, the phase of one step stays within ±π as far as its modulus matters: fractions of K need the right branch
    mean = float(weight @ loss)
    loss = loss - mean
    # E e^{iwL} − 1 = Σ weight·(−2 sin²(wL/2) + i sin wL): no cancellation near w = 0
    values = np.empty(len(w), np.complex128)
    for start in range(0, len(w), 64):  # blocks bound the memory
        half = np.multiply.outer(w[start : start + 64], loss / 2)
        s = np.sin(half)
        values[start : start + 64] = -2 * (s * s) @ weight + 2j * ((s * np.cos(half)) @ weight)
    size = 2 * values.real + np.abs(values) ** 2  # |1 + values|² − 1
    magnitude = np.where(
        size > -0.5, 0.5 * np.log1p(np.maximum(size, -0.5)), np.log(np.maximum(np.abs(1 + values), 1e-300))
    )
    phase = np.unwrap(np.concatenate([[0.0], np.angle(1 + values)]))[1:]
    return np.asarray(tilted(pair, c, tail).value + magnitude + 1j * (phase + mean * w))
