"""Laws of the privacy loss as blends of simple parts: atoms, an exponential slope, discrete and plain Gaussians.

A blend is a pair (P, Q) whose output also tells which part it came from, so its law of the loss is the mixture of
theirs. `accounting.losses` says which blend dominates which release.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpgrad.accounting.pairs import Array, Pair
from dpgrad.accounting.pld import cumulants, discretise
from dpgrad.accounting.pld.cumulants import Complex, Tilted

__all__ = ["Atom", "Blend", "BlendPart", "Slope", "Step", "Whole", "mixed"]

_FAR = 40.0  # standard deviations; a Gaussian has 1e-350 of its mass beyond
_DIRECT = 4096  # atoms that are summed one by one in a transform
_SMALL = 0.05


@dataclass(frozen=True)
class Atom:
    """One value of the loss."""

    loss: float

    @property
    def most(self) -> float:
        return self.loss

    def span(self, tail: float) -> tuple[float, float]:
        return self.loss, self.loss

    def tilted(self, c: float, tail: float) -> Tilted:
        return Tilted(c * self.loss, self.loss, 0.0)

    def transform(self, z: Complex, tail: float) -> Complex:
        return np.asarray(z * self.loss)


@dataclass(frozen=True)
class Slope:
    """Losses between −``reach`` and ``reach`` with P-density e^{L/2}/(4·sinh(reach/2)).

    >>> round(Slope(1.0).tilted(1.0, 0.0).value, 12) == round(math.log(math.sinh(1.5) / 3 / math.sinh(0.5)), 12)
    True
    """

    reach: float

    @property
    def most(self) -> float:
        return self.reach

    def span(self, tail: float) -> tuple[float, float]:
        return -self.reach, self.reach

    def mass(self, left: Array, right: Array) -> Array:
        """P's mass between left and right: no difference cancels."""
        width = (right - left) / 4
        log = (left + right) / 4 - self.reach / 2 - math.log1p(-math.exp(-self.reach))
        return np.asarray(np.exp(log) * 2 * np.sinh(width))

    def tilted(self, c: float, tail: float) -> Tilted:
        y = (c + 0.5) * self.reach
        value = _log_sinhc(y) - _log_sinhc(self.reach / 2)
        if y < _SMALL:
            mean, spread = y / 3 - y**3 / 45, 1 / 3 - y * y / 15
        else:
            fall = math.exp(-2 * y)
            mean, spread = (1 + fall) / (1 - fall) - 1 / y, 1 / y**2 - 4 * fall / (1 - fall) ** 2
        return Tilted(value, self.reach * mean, self.reach**2 * spread)

    def transform(self, z: Complex, tail: float) -> Complex:
        y = (z + 0.5) * self.reach  # its real part is positive
        return np.asarray(y + np.log(-np.expm1(-2 * y) / (2 * y)) - _log_sinhc(self.reach / 2))


def _log_sinhc(y: float) -> float:
    """log(sinh(y)/y)."""
    return y + math.log(-math.expm1(-2 * y) / (2 * y)) if y > 1e-8 else y * y / 6


@dataclass(frozen=True)
class Whole:
    """The discrete Gaussian of parameter ``sigma`` around 0 (P) and around ``shift`` (Q), a whole number."""

    sigma: float
    shift: int

    @property
    def most(self) -> float:
        return math.inf

    def span(self, tail: float) -> tuple[float, float]:
        loss = self.atoms(tail)[0]
        return float(loss[0]), float(loss[-1])

    def atoms(self, tail: float) -> tuple[Array, Array]:
        """The losses, ascending, and their log-mass; at each end at most ``tail`` of P's mass is left out."""
        # P(|x| ≥ m) ≤ 2e^{−m²/2σ²}: a discrete Gaussian is subgaussian (Canonne et al., Lemma 22)
        most = math.ceil(self.sigma * math.sqrt(2 * math.log(2 / min(tail, 0.5)))) if tail else self._far
        x = np.arange(min(most, self._far), -min(most, self._far) - 1, -1, dtype=float)
        return self.shift * (self.shift - 2 * x) / (2 * self.sigma**2), -((x / self.sigma) ** 2) / 2 - self._log_total

    @property
    def _far(self) -> int:
        return math.ceil(_FAR * self.sigma)

    @property
    def _log_total(self) -> float:
        return math.log(_theta(self.sigma, 0.0))

    def tilted(self, c: float, tail: float) -> Tilted:
        """K(c) = c(c+1)s²/2σ² + log(S(cs)/S(0)) with S(t) = Σ e^{−(x+t)²/2σ²}; its derivatives are a Gaussian's."""
        rate = self.shift**2 / self.sigma**2
        value = c * (c + 1) / 2 * rate + math.log(_theta(self.sigma, c * self.shift)) - self._log_total
        return Tilted(value, (c + 0.5) * rate, rate)

    def transform(self, z: Complex, tail: float) -> Complex:
        if 2 * _FAR * self.sigma > _DIRECT:  # S is flat to rounding as far as the transform is not negligible
            return np.asarray(z * (z + 1) / 2 * self.shift**2 / self.sigma**2)
        loss, log_p = self.atoms(0.0)
        found = [np.exp(log_p + np.outer(block, loss)).sum(axis=1) for block in np.array_split(z, 1 + len(z) // 64)]
        return np.asarray(np.log(np.concatenate(found)))


@lru_cache(maxsize=4096)
def _theta(sigma: float, shift: float) -> float:
    """Σ e^{−(x+t)²/2σ²} over whole x; from σ = 2 on it is σ√2π to 30 digits, whatever t is."""
    if sigma > 2:
        return sigma * math.sqrt(2 * math.pi)
    rest = shift - math.floor(shift)
    far = math.ceil(_FAR * sigma) + 1
    return math.fsum(math.exp(-((x + rest) ** 2) / (2 * sigma**2)) for x in range(-far - 1, far + 1))


BlendPart = Atom | Slope | Whole | Pair


@dataclass(frozen=True)
class Blend:
    """Parts and the probability that P gives each; together at least one.

    >>> coin = Blend(((0.75, Atom(math.log(3))), (0.25, Atom(-math.log(3)))))
    >>> round(math.exp(coin.tilted(1.0).value), 6)  # 0.75·3 + 0.25/3
    2.333333
    """

    parts: tuple[tuple[float, BlendPart], ...]

    @property
    def most(self) -> float:
        """The largest loss."""
        return max(part.most for _, part in self.parts)

    def span(self, tail: float) -> tuple[float, float]:
        """The least and the largest loss, but for about ``tail`` of the mass at either end."""
        ends = [
            discretise.losses(part, discretise.ends(part, tail)) if isinstance(part, Pair) else part.span(tail)
            for _, part in self.parts
        ]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def tilted(self, c: float, tail: float = 0.0) -> Tilted:
        """K(c) and its derivatives."""
        found = [
            cumulants.tilted(part, c, tail) if isinstance(part, Pair) else part.tilted(c, tail)
            for _, part in self.parts
        ]
        return mixed([weight for weight, _ in self.parts], found)

    def transform(self, c: float, w: Array, tail: float = 0.0) -> Complex:
        """K(c + iw) but for whole turns, which a whole number of steps does not see."""
        logs = self._logs(c, w, tail)
        top = logs.real.max(axis=0)
        return np.asarray(top + np.log(np.exp(logs - top).sum(axis=0)))

    def revival(self, c: float, w: Array, tail: float = 0.0) -> Array:
        """What Re K(c + iw′) may be again at some w′ beyond w: atoms come into step again and again.

        Only what has a density fades for good.
        """
        logs = self._logs(c, w, tail).real
        for place, (weight, part) in enumerate(self.parts):
            if isinstance(part, Atom | Whole):
                logs[place] = math.log(weight) + part.tilted(c, tail).value
        return np.asarray(np.logaddexp.reduce(logs, axis=0))

    def _logs(self, c: float, w: Array, tail: float) -> Complex:
        z: Complex = np.asarray(c + 1j * w, np.complex128)
        return np.array([
            math.log(weight)
            + (cumulants.transform(part, c, w, tail) if isinstance(part, Pair) else part.transform(z, tail))
            for weight, part in self.parts
        ])  # fmt: skip


Step = Pair | Blend


def mixed(weights: list[float], found: list[Tilted]) -> Tilted:
    """The cumulants of a mixture from those of its parts."""
    logs = np.log(weights) + [one.value for one in found]
    top = logs.max()
    share = np.exp(logs - top)
    value, share = float(top + math.log(share.sum())), share / share.sum()
    slopes = np.array([one.slope for one in found])
    mean = float(share @ slopes)
    spread = float(share @ (np.array([one.curvature for one in found]) + (slopes - mean) ** 2))
    return Tilted(value, mean, spread)
