"""One step on a lattice, whatever its law: Gaussian pairs by `discretise`, blends part by part.

An atom between two lattice points is shared so that P's and Q's mass are kept (connect the dots). The density a·e^{L/2}
of a slope is first brought to the lattice points and its two ends: on a cell [u, v] the chord has masses
2a·tanh((v−u)/4)·e^{u/2} at u and 2a·tanh((v−u)/4)·e^{v/2} at v, in closed form. For lower bounds masses of cells are
sums or differences in closed form. Proofs: docs/proofs/releases.md.
"""

import math
from typing import NamedTuple

import numpy as np

from dpgrad.accounting.pairs import Array, Pair
from dpgrad.accounting.pld import discretise
from dpgrad.accounting.pld.blends import Atom, Blend, BlendPart, Slope, Step, Whole
from dpgrad.accounting.pld.discretise import Rounded
from dpgrad.accounting.pld.lattice import Measure, shared

__all__ = ["accuracy", "dotted", "length", "rounded"]

_EPS = float(np.finfo(float).eps)


class _Masses(NamedTuple):
    """Values of the loss, ascending, P's log-mass at each, and the mass beyond the largest."""

    loss: Array
    log_p: Array
    infinite: float = 0.0


def length(step: Step, tail: float) -> float:
    """From the least to the largest loss."""
    if isinstance(step, Blend):
        low, high = step.span(tail)
        return high - low
    low, high = discretise.losses(step, discretise.ends(step, tail))
    return high - low


def accuracy(step: Step, tilt: float, tail: float) -> float:
    """A bound on the relative error of every mass, and on the error of every loss, that one step contributes."""
    if isinstance(step, Pair):
        return discretise.accuracy(step, tilt, tail)
    low, high = step.span(tail)
    own = _EPS * (256 + 8 * max(-math.log(tail), 0.0) + 16 * (tilt + 1) * max(-low, high))
    parts = [discretise.accuracy(part, tilt, tail) for _, part in step.parts if isinstance(part, Pair)]
    return own + max(parts, default=0.0)


def dotted(step: Step, tilt: float, spacing: float, tail: float) -> Measure:
    """An upper bound of one step: P's loss distribution on the lattice by connecting the dots."""
    if isinstance(step, Pair):
        return discretise.dotted(step, tilt, spacing, tail)
    found = []
    for _, part in step.parts:
        if isinstance(part, Pair):
            found.append(discretise.dotted(part, tilt, spacing, tail))
        else:
            found.append(_shared(_upper(part, spacing, tail), tilt, spacing))
    return _blended(step, found)


def _upper(part: BlendPart, spacing: float, tail: float) -> _Masses:
    match part:
        case Atom(loss):
            return _Masses(np.array([loss]), np.zeros(1))
        case Slope(reach):
            points = np.unique(np.clip(_lattice(-reach, reach, spacing), -reach, reach))
            gap = np.tanh(np.diff(points) / 4) * 2
            log_scale = -reach / 2 - math.log1p(-math.exp(-reach)) - math.log(2)
            both = np.append(gap, 0.0) + np.append(0.0, gap)
            return _Masses(points, np.log(both) + points / 2 + log_scale)
        case Whole():
            losses, log_p = part.atoms(tail)
            # what lies below the least is moved up to it, what lies above the largest becomes certain loss
            log_p = np.append(np.logaddexp(log_p[0], math.log(tail)), log_p[1:])
            return _Masses(losses, log_p, tail)
        case _:
            raise TypeError(part)


def _lattice(low: float, high: float, spacing: float) -> Array:
    return spacing * np.arange(math.floor(low / spacing), math.ceil(high / spacing) + 1, dtype=float)


def _shared(masses: _Masses, tilt: float, spacing: float) -> Measure:
    place = np.floor(masses.loss / spacing).astype(np.int64)
    first, size = int(place[0]), int(place[-1] - place[0]) + 2
    exponent = masses.log_p + tilt * masses.loss
    top = float(exponent.max())
    left: Array = place.astype(np.float64) * spacing
    mass = shared(np.exp(exponent - top), masses.loss, place - first, left, spacing, tilt, size)
    total = float(mass.sum())
    return Measure(first, mass / total, top + math.log(total), 0.0, masses.infinite)


def _blended(step: Blend, found: list[Measure]) -> Measure:
    logs = np.array([math.log(weight) for weight, _ in step.parts]) + [one.log_scale for one in found]
    top = float(logs.max())
    first = min(one.first for one in found)
    mass = np.zeros(max(one.first + len(one.mass) for one in found) - first)
    for one, log in zip(found, logs, strict=True):
        mass[one.first - first : one.first - first + len(one.mass)] += one.mass * math.exp(max(log - top, -745.0))
    total = float(mass.sum())
    infinite = math.fsum(weight * one.infinite for (weight, _), one in zip(step.parts, found, strict=True))
    return Measure(first, mass / total, top + math.log(total), 0.0, infinite)


def rounded(step: Step, tilt: float, spacing: float, tail: float) -> Rounded:
    """A lower bound of one step: the loss rounded to the nearest lattice point, its masses under P and under Q."""
    if isinstance(step, Pair):
        return discretise.rounded(step, [step], tilt, spacing, tail)[0]
    found = []
    for _, part in step.parts:
        if isinstance(part, Pair):
            found.append(discretise.rounded(part, [part], tilt, spacing, tail)[0])
        else:
            found.append(_nearest(part, tilt, spacing, tail))
    return Rounded(_blended(step, [one.p for one in found]), _blended(step, [one.q for one in found]))


def _nearest(part: BlendPart, tilt: float, spacing: float, tail: float) -> Rounded:
    if isinstance(part, Slope):
        edges = np.clip(_lattice(-part.reach, part.reach, spacing) - spacing / 2, -part.reach, part.reach)
        edges = np.unique(np.append(edges, part.reach))
        middle = (edges[1:] + edges[:-1]) / 2
        log_p = np.log(part.mass(edges[:-1], edges[1:]))
        log_q, point = log_p - middle, np.rint(middle / spacing).astype(np.int64)
    else:
        loss, log_p = part.atoms(tail) if isinstance(part, Whole) else (np.array([part.most]), np.zeros(1))
        log_q, point = log_p - loss, np.rint(loss / spacing).astype(np.int64)
    first, sides = int(point.min()), []
    for log, power in ((log_p, tilt), (log_q, tilt + 1)):
        exponent = log + power * point * spacing
        top = float(exponent.max())
        mass = np.bincount(point - first, np.exp(exponent - top))
        total = float(mass.sum())
        sides.append(Measure(first, mass / total, top + math.log(total)))
    return Rounded(*sides)
