"""The Rényi curve of a selection: a random number of trials, of which the best leaves.

Papernot and Steinke (2022), Theorems 2 and 6, in terms of K(c) = c·D_{1+c} of one trial, the worse of both directions.
For a truncated negative binomial number of trials

    K′(c) = K(c) + (1 + η)·c·s + log E[K],    s = min over λ̂ ≥ 1 of (K(λ̂ − 1) + log 1/γ)/λ̂,

where the second order λ̂ does not depend on the first. For a Poisson number of mean μ

    K′(c) = log(e^−μ + μ·exp(K(c) + c·μ·δ̂)),    δ̂ = δ of one trial at ε̂ = log(1 + 1/c),

with the term e^−μ for the case without a trial. A trial whose settings are drawn uniformly has e^K(c) = the mean of
e^Kⱼ(c) over the settings, which its output names. Proofs: docs/proofs/tuning.md.

>>> from dpgrad.accounting.rdp import Curve
>>> from dpgrad.accounting.pairs import Kind, Pair
>>> from dpgrad.accounting.trials import NegativeBinomial
>>> one = Curve({Pair(Kind.REMOVE, 1.0, 10.0): 1})
>>> bound = SelectionCurve(((one,),), NegativeBinomial.of_mean(10.0, eta=1.0))
>>> bound.at(9.0).value > one.at(9.0).value
True
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dpgrad.accounting import _search
from dpgrad.accounting.trials import NegativeBinomial, Trials

if TYPE_CHECKING:
    from dpgrad.accounting.pld.cumulants import Tilted

__all__ = ["SelectionCurve"]

_APART = 1e-3  # relative, of the points whose difference is a slope
_ROUNDING = 1e-13


class Tilts(Protocol):
    """K of one direction, such as `dpgrad.accounting.rdp.Curve`."""

    most: float

    def at(self, c: float) -> "Tilted": ...


class SelectionCurve:
    """The bound on K of a selection among trials; ``curves`` has, for each choice of settings, its directions."""

    def __init__(self, curves: Sequence[Sequence[Tilts]], law: Trials) -> None:
        self._curves, self._law = curves, law
        reaches = [curve.most for directions in curves for curve in directions if curve.most]
        self._most = min(reaches, default=1e5)
        self.reach = self._most / 1e5  # as `Curve` counts

    def at(self, c: float) -> "Tilted":
        """The bound with its slope and curvature."""
        from dpgrad.accounting.pld.cumulants import Tilted  # pld imports rdp, which imports this module

        law = self._law
        if isinstance(law, NegativeBinomial):
            one, tax = self._trial(c), (1 + law.eta) * self._second
            value = one.value + c * tax + math.log(law.mean)
            return Tilted(value + _ROUNDING * (1 + abs(value)), one.slope + tax, one.curvature)
        low, middle, high = (self._poisson(c * (1 + move), law.mean) for move in (-_APART, 0.0, _APART))
        apart = c * _APART
        return Tilted(middle, (high - low) / (2 * apart), max((high - 2 * middle + low) / apart**2, 0.0))

    def _trial(self, c: float) -> "Tilted":
        """K of one trial: log of the mean of e^Kⱼ over the choices."""
        each = [
            max((curve.at(c) for curve in directions), key=lambda found: found.value) for directions in self._curves
        ]
        if len(each) == 1:
            return each[0]
        from dpgrad.accounting.pld.cumulants import Tilted

        values, slopes, bends = (np.array(column) for column in zip(*each, strict=True))
        top = float(values.max())
        weights = np.exp(values - top)
        value = top + math.log(float(weights.mean())) + _ROUNDING * (1 + abs(top))
        weights /= weights.sum()
        slope = float(weights @ slopes)
        return Tilted(value, slope, float(weights @ (bends + slopes**2)) - slope**2)

    @cached_property
    def _second(self) -> float:
        """s: see the module. Every order gives a bound; the best is searched for."""
        assert isinstance(self._law, NegativeBinomial)
        far = -math.log(self._law.gamma)

        def excess(c: float) -> tuple[float, float]:
            k = self._trial(c)
            return (1 + c) * k.slope - k.value - far, (1 + c) * k.curvature

        c = _search.newton(excess, self._most)
        return min((self._trial(c).value + far) / (1 + c), far) * (1 + _ROUNDING)

    def _poisson(self, c: float, mean: float) -> float:
        inside = self._trial(c).value + c * mean * self._delta(math.log1p(1 / c))
        value = float(np.logaddexp(-mean, math.log(mean) + inside))
        return max(value, 0.0) + _ROUNDING * (1 + abs(inside))

    def _delta(self, epsilon: float) -> float:
        """δ of one trial at ``epsilon``, by the improved conversion (`dpgrad.accounting.rdp`)."""

        def excess(c: float) -> tuple[float, float]:
            k = self._trial(c)
            return k.slope - epsilon - math.log1p(1 / c), k.curvature + 1 / (c * (1 + c))

        c = _search.newton(excess, self._most)
        power = self._trial(c).value - c * math.log1p(1 / c) - math.log1p(c) - c * epsilon
        return min(math.exp(min(power, 0.0)), 1.0)
