"""High-precision oracle for the privacy profile of composed subsampled Gaussian mechanisms (tests only).

One step at sampling rate q and noise multiplier σ compares P with Q:

* ``remove``:    P = (1-q) N(0,σ²) + q N(1,σ²),  Q = N(0,σ²)
* ``add``:       P = N(0,σ²),  Q = (1-q) N(0,σ²) + q N(1,σ²)
* ``antipodal``: P = (1-q) N(0,σ²) + q N(1,σ²),  Q = (1-q) N(0,σ²) + q N(-1,σ²)

With L = log P/Q under P and independent steps, δ(ε) = E_P[(1 - exp(ε - ΣL))₊].  ``steps`` is a list of
``(q, sigma, count)``.  Nothing here is shared with the code under test.  Four routes:

1. *Closed form* (mpmath, 60 digits): a single step, or all q = 1 (a Gaussian mechanism with μ² = Σ count·(s/σ)²).
2. *Contour*: δ(ε) = (1/π) ∫₀^∞ Re[e^{K(z)-εz} / (z(z+1))] dw on z = c + iw, c > 0 the saddle point, where
   K(z) = Σ count·log E_P e^{zL}.  E_P e^{zL} is a trapezoid sum in x and the w-integral a trapezoid sum; both converge
   exponentially.  The w-sum with step h equals Σ_m e^{cmS} δ(ε + mS), S = 2π/h, whose terms m ≠ 0 are nonnegative and
   are bounded by Chernoff bounds; S is chosen so that the bound is below 1e-12 of δ.
3. *Density* (few steps, where the characteristic function decays slowly): the density of the sum is built by pairwise
   convolution in a coordinate in which one step is a Gaussian mixture (v with loss = softplus(v), or its two-sided
   analogue), with adaptive Gauss-Legendre quadrature and piecewise Chebyshev interpolation of the log density.
   Every term is positive, so relative accuracy survives in the tails.
4. Otherwise :class:`OracleUnsure` is raised.

Error control of routes 2 and 3: each number is computed with two settings (contour: different c, h, x-step and cut-off;
density: other grids, quadrature and cut-off), and OracleUnsure is raised unless the two agree to ``RTOL`` in δ.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Steps = Sequence[tuple[float, float, int]]
Real = NDArray[np.float64]
Complex = NDArray[np.complex128]

DIRECTIONS = ("remove", "add", "antipodal")
RTOL = 1e-9  # two settings must agree in δ to this
_DIGITS = 28.0  # nats: aliasing and truncation are kept below exp(-28) = 7e-13 of δ
_CONTOUR_BUDGET = 4e9  # (w, x) pairs one contour evaluation may take; about 2 s per 1e9 on one core
_DENSITY_BUDGET = 40  # pairwise convolutions one density evaluation may take; 0.1 to 1 s each


class OracleUnsure(RuntimeError):  # noqa: N818
    """The oracle cannot vouch for a number: it is out of reach, or two settings disagree."""


def _normalise(steps: Steps, direction: str) -> tuple[tuple[float, float, int], ...]:
    """Merge equal (q, σ), drop q = 0 and zero counts, check ranges."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    merged: dict[tuple[float, float], int] = {}
    for q, sigma, count in steps:
        if not 0 <= q <= 1 or not sigma > 0 or count < 0 or count != int(count):
            raise ValueError(f"bad step {(q, sigma, count)}")
        if q > 0 and count > 0:
            key = (float(q), float(sigma))
            merged[key] = merged.get(key, 0) + int(count)
    return tuple((q, s, n) for (q, s), n in sorted(merged.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Route 1: closed forms
# ---------------------------------------------------------------------------------------------------------------------


def _upper(x: mpmath.mpf) -> mpmath.mpf:
    """Standard normal P(X > x)."""
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def _delta_gauss(mu2: float, epsilon: float) -> float:
    """δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) with 60 digits."""
    with mpmath.workdps(60):
        mu, eps = mpmath.sqrt(mpmath.mpf(mu2)), mpmath.mpf(epsilon)
        return float(_upper(eps / mu - mu / 2) - mpmath.exp(eps) * _upper(eps / mu + mu / 2))


def _delta_one(q: float, sigma: float, epsilon: float, direction: str) -> float:
    """δ(ε) = P(A) - e^ε Q(A) with A = {L > ε}, a half-line whose end is known in closed form; 60 digits."""
    with mpmath.workdps(60):
        q_, s, eps = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.mpf(epsilon)
        a = 1 / (2 * s * s)
        if direction == "antipodal":
            # log-ratio = ψ(v) = ε at v = ε/2 + asinh(e^b sinh(ε/2)), x = v σ², e^b = e^a (1-q)/q
            x = (eps / 2 + mpmath.asinh(mpmath.exp(a) * (1 - q_) / q_ * mpmath.sinh(eps / 2))) * s * s
            p = (1 - q_) * _upper(x / s) + q_ * _upper((x - 1) / s)
            r = (1 - q_) * _upper(x / s) + q_ * _upper((x + 1) / s)
            return float(p - mpmath.exp(eps) * r)
        sign = 1 if direction == "remove" else -1
        ratio = (mpmath.expm1(sign * eps) + q_) / q_
        if ratio <= 0:
            return float(-mpmath.expm1(eps)) if direction == "remove" else 0.0
        x = s * s * mpmath.log(ratio) + mpmath.mpf(1) / 2
        if direction == "remove":
            mix = (1 - q_) * _upper(x / s) + q_ * _upper((x - 1) / s)
            return float(mix - mpmath.exp(eps) * _upper(x / s))
        mix = (1 - q_) * _upper(-x / s) + q_ * _upper((1 - x) / s)
        return float(_upper(-x / s) - mpmath.exp(eps) * mix)


# ---------------------------------------------------------------------------------------------------------------------
# Route 2: contour integral
# ---------------------------------------------------------------------------------------------------------------------


def _log_mix(q: float, y: Real) -> Real:
    """ℓ(y) = log(1 - q + q e^y), accurate for small q and without overflow."""
    if q in (0, 1):
        return q * y
    with np.errstate(over="ignore"):
        small = np.log1p(q * np.expm1(np.minimum(y, 30.0)))
    return np.where(y > 30.0, np.logaddexp(math.log1p(-q), math.log(q) + y), small)


@dataclass(frozen=True)
class _Mgf:
    """log E_P e^{zL} of one step as a trapezoid sum over g = x/σ.

    E_P e^{zL} = E_{g~N(0,1)} e^{(1+z)ℓ₊} (remove), e^{-zℓ₊} (add), e^{(1+z)ℓ₊ - zℓ₋} (antipodal), where
    ℓ± = log(1-q+q e^{±g/σ - 1/(2σ²)}).
    """

    q: float
    sigma: float
    direction: str

    def parts(self, g: Real) -> tuple[Real, Real, Real, Real]:
        """(a, λ, u0, u1): exponent a + zλ, and E[u0] = E[u1] = 0 with a + zλ = u0 + z u1 to first order in q."""
        y = g / self.sigma - 0.5 / self.sigma**2
        lp = _log_mix(self.q, y)
        up = self.q * np.expm1(np.minimum(y, 600.0))
        if self.direction == "remove":
            return lp, lp, up, up
        if self.direction == "add":
            return np.zeros_like(lp), -lp, np.zeros_like(up), -up
        y = -g / self.sigma - 0.5 / self.sigma**2
        lm = _log_mix(self.q, y)
        um = self.q * np.expm1(np.minimum(y, 600.0))
        return lp, lp - lm, up, up - um

    def window(self, c: float, nats: float, centre: bool) -> tuple[float, float]:
        """Range of g that carries E e^{cL} to e^{-nats} (with ``centre`` also E 1 and E u)."""
        top = 14.0 + (0.0 if self.direction == "add" else (1 + c) / self.sigma) + 1 / self.sigma
        low = -14.0 - (1 / self.sigma if self.direction == "antipodal" else 0.0)
        size = int((top - low) / 0.1) + 2
        if size > 1_000_000:
            raise OracleUnsure(f"saddle point {c} out of reach")
        g = np.linspace(low, top, size)
        a, lam, _, _ = self.parts(g)
        e = a + c * lam - 0.5 * g * g
        keep = e > e.max() - nats
        if centre:
            keep |= (g * g < 2 * nats) | ((g - 1 / self.sigma) ** 2 < 2 * nats)
            if self.direction == "antipodal":
                keep |= (g + 1 / self.sigma) ** 2 < 2 * nats
        index = np.flatnonzero(keep)
        return float(g[max(index[0] - 1, 0)]), float(g[min(index[-1] + 1, size - 1)])

    def pitch(self, c: float, w: float, nats: float) -> float:
        """Trapezoid step in g with error below e^{-nats} M(c) at z = c + iw.

        A trapezoid sum with step h of f, analytic in |Im g| ≤ η, errs by at most e^{-2πη/h} ∫ |f(g+iη)| + |f(g-iη)| dg
        (to leading order); the integral is evaluated for a range of η inside the strip free of branch points (πσ) and
        the largest h is taken.
        """
        low, high = self.window(c, nats + 15, False)
        g = np.linspace(low, high, int((high - low) / 0.25) + 3)
        a, lam, _, _ = self.parts(g)
        real = a + c * lam - 0.5 * g * g
        base = real.max() + math.log(np.exp(real - real.max()).sum())
        best = 0.0
        eta = min(0.9 * math.pi * self.sigma if self.q < 1 else math.inf, math.sqrt(2 * nats))
        for _ in range(16):
            growth = -math.inf
            for sign in (1, -1):
                y = (g + 1j * sign * eta) / self.sigma
                lp = _complex_log_mix(self.q, y - 0.5 / self.sigma**2)
                if self.direction == "antipodal":
                    lm = _complex_log_mix(self.q, -y - 0.5 / self.sigma**2)
                    e = (lp + (c + 1j * w) * (lp - lm)).real
                else:
                    e = ((1 + c + 1j * w) * lp if self.direction == "remove" else -(c + 1j * w) * lp).real
                e += 0.5 * (eta * eta - g * g)
                growth = max(growth, float(e.max() + math.log(np.exp(e - e.max()).sum()) - base))
            step = 2 * math.pi * eta / (nats + 0.7 + max(growth, 0.0))
            if step < 0.8 * best:
                break
            best = max(best, step)
            eta /= 1.5
        return best

    def real(self, c: float) -> tuple[float, float, float]:
        """log M(c) and its first two derivatives at real c (used for choosing parameters)."""
        lo, hi = self.window(c, 36.0, False)
        pitch = min(0.3, 0.25 * self.sigma)
        g = np.arange(lo, hi + pitch, pitch)
        a, lam, _, _ = self.parts(g)
        e = a + c * lam - 0.5 * g * g
        top = e.max()
        p = np.exp(e - top)
        total = p.sum()
        mean = float((p @ lam) / total)
        log_m = float(top + math.log(total * pitch / math.sqrt(2 * math.pi)))
        return log_m, mean, float((p @ (lam - mean) ** 2) / total)

    def exact(self, c: float) -> float:
        """log M(c); where it is small, as log1p of E[e^{a+cλ} - 1 - u0 - c u1].

        The first-order terms have mean zero exactly, so log M keeps its relative accuracy when it is tiny (small q).
        """
        small = self.real(c)[0] < 1
        lo, hi = self.window(c, 60.0, small)
        pitch = min(self.pitch(c, 0.0, 60.0), self.pitch(0.0, 0.0, 60.0))
        g = np.arange(lo, hi + pitch, pitch)
        a, lam, u0, u1 = self.parts(g)
        unit = pitch / math.sqrt(2 * math.pi)
        if small:
            big = np.minimum(a + c * lam, 600.0)
            terms = np.exp(-0.5 * g * g) * (np.expm1(big) - u0 - c * u1)
            return math.log1p(math.fsum(terms) * unit)
        e = a + c * lam - 0.5 * g * g
        return float(e.max()) + math.log(math.fsum(np.exp(e - e.max())) * unit)

    def cost(self, c: float, w: float, n: int) -> float:
        """Number of (w, x) pairs for n frequencies up to w."""
        lo, hi = self.window(c, 42.0, False)
        return n * (hi - lo) / self.pitch(c, w, 42.0)

    def grid(self, c: float, h: float, n: int, fine: float) -> tuple[Complex, float]:
        """k(j) = log M(c + ihj) - log M(c) - ihj·λ₀ for j = 0..n-1, and λ₀, the mean of λ under the law tilted by c."""
        out = np.empty(n, complex)
        mean = self.real(c)[1]
        start = 0
        while start < n:
            stop = min(n, max(64, 2 * start))
            out[start:stop] = self.block(c, h, start, stop, fine, mean)
            start = stop
        return out, mean

    def block(self, c: float, h: float, start: int, stop: int, fine: float, mean: float) -> Complex:
        """``grid`` for start ≤ j < stop as a matrix product.

        With j = start + kJ + m, e^{ihjλ} - 1 is AB + A + B, A = e^{ih(start+kJ)λ} - 1 and B = e^{ihmλ} - 1 (λ centred);
        its mean under the tilted law is small where the loss is small and is then accurate to a small absolute error.
        """
        nats = 42.0 * fine
        lo, hi = self.window(c, nats, False)
        pitch = self.pitch(c, h * stop, nats)
        size = int((hi - lo) / pitch) + 2
        g = np.linspace(lo, hi, 400)
        a, lam, _, _ = self.parts(g)
        peak = float((a + c * lam - 0.5 * g * g).max())
        cols = math.isqrt(stop - start - 1) + 1
        rows = -(-(stop - start) // cols)
        out = np.zeros((rows, cols), complex)
        total = 0.0
        chunk = max(256, int(1e6) // cols)
        for i in range(0, size, chunk):
            g = lo + pitch * np.arange(i, min(size, i + chunk))
            a, lam, _, _ = self.parts(g)
            weight = np.exp(a + c * lam - 0.5 * g * g - peak)
            total += float(weight.sum())
            lam -= mean
            left = weight * _expm1i((h * (start + cols * np.arange(rows)))[:, None] * lam)
            right = _expm1i(lam[:, None] * (h * np.arange(cols)))
            out += left @ right + left.sum(1)[:, None] + weight @ right
        return _log1p(out.ravel()[: stop - start] / total)


def _complex_log_mix(q: float, y: Complex) -> Complex:
    """log(1 - q + q e^y), continuous for |Im y| < π."""
    if q == 1:
        return y
    big = y.real > 0
    e = np.exp(np.where(big, -y, y))
    return np.where(big, y + np.log(q + (1 - q) * e), np.log(1 - q + q * e))


def _expm1i(x: Real) -> Complex:
    """e^{ix} - 1."""
    half = np.sin(x / 2)
    return 2j * half * np.exp(0.5j * x)


def _log1p(m: Complex) -> Complex:
    """log(1 + m) for complex m without loss for small m."""
    with np.errstate(divide="ignore"):
        size = np.where(np.abs(m) < 0.5, 0.5 * np.log1p(2 * m.real + m.real**2 + m.imag**2), np.log(np.abs(1 + m)))
    return np.maximum(size, -700.0) + 1j * np.arctan2(m.imag, 1 + m.real)


Terms = list[tuple[_Mgf, float]]


def _compress(steps: Steps, direction: str, degree: int) -> tuple[Terms, bool]:
    """K as a weighted sum of a few log M: the steps themselves or, for long schedules, Chebyshev nodes in log σ.

    Where many σ share a rate, log M(z; σ) is interpolated in log σ at ``degree`` Chebyshev nodes per panel of width at
    most 1/2; the weight of a node is the sum of its Lagrange polynomial over the schedule.
    Says whether it interpolated.
    """
    terms: Terms = []
    interpolated = False
    for q, group in itertools.groupby(steps, key=lambda s: s[0]):
        items = sorted((math.log(s), n) for _, s, n in group)
        first, last = items[0][0], items[-1][0]
        panels = max(1, math.ceil((last - first) / 0.5))
        width = (last - first) / panels or 1.0
        for panel, part in itertools.groupby(items, key=lambda t: min(panels - 1, int((t[0] - first) / width))):
            some = list(part)
            if len(some) <= 2 * degree:
                terms += [(_Mgf(q, math.exp(u), direction), float(n)) for u, n in some]
                continue
            interpolated = True
            k = np.arange(degree)
            nodes = np.cos((2 * k + 1) * math.pi / (2 * degree))
            bary = (-1.0) ** k * np.sin((2 * k + 1) * math.pi / (2 * degree))
            x = (np.array([u for u, _ in some]) - first - (panel + 0.5) * width) / (width / 2)
            gap = x[:, None] - nodes
            hit = np.abs(gap) < 1e-14
            basis = bary / np.where(hit, 1.0, gap)
            basis /= basis.sum(1, keepdims=True)
            basis[hit.any(1)] = hit[hit.any(1)]
            weights = np.array([n for _, n in some]) @ basis
            centre = first + (panel + 0.5) * width
            terms += [
                (_Mgf(q, math.exp(centre + width / 2 * x_), direction), float(n))
                for x_, n in zip(nodes, weights, strict=True)
            ]
    return terms, interpolated


class _Contour:
    """Route 2 for one list of steps; see the module's docstring."""

    def __init__(self, steps: Steps, direction: str, degree: int = 20) -> None:
        self.terms, self.interpolated = _compress(steps, direction, degree)
        self._real = functools.lru_cache(None)(self._real_uncached)

    def _real_uncached(self, c: float) -> tuple[float, float, float]:
        total = np.zeros(3)
        for mgf, n in self.terms:
            total += n * np.array(mgf.real(c))
        return float(total[0]), float(total[1]), float(total[2])

    def _slope(self, c: float) -> float:
        """ε for which c is the saddle point of K(c) - εc - log c - log(1+c)."""
        return self._real(c)[1] - 1 / c - 1 / (1 + c)

    def _log_delta(self, c: float, epsilon: float) -> float:
        """Saddle-point estimate of log δ(ε) (used for choosing parameters only)."""
        k, _, k2 = self._real(c)
        curve = k2 + 1 / c**2 + 1 / (1 + c) ** 2
        return k - epsilon * c - math.log(c) - math.log1p(c) - 0.5 * math.log(2 * math.pi * curve)

    def _solve(self, f: Callable[[float], float]) -> float:
        """Root of an increasing function of log c."""
        lo, hi = -2.0, 2.0
        while f(lo) > 0:
            lo -= 2.0
            if lo < -16:
                raise OracleUnsure("no saddle point")
        while f(hi) < 0:
            hi += 2.0
            if hi > 16:
                raise OracleUnsure("no saddle point")
        return math.exp(brentq(f, lo, hi, xtol=1e-4))

    def saddle(self, epsilon: float) -> float:
        """Saddle point for ε."""
        return self._solve(lambda u: self._slope(math.exp(u)) - epsilon)

    def guess(self, delta: float) -> tuple[float, float]:
        """(c, ε) with saddle-point estimate δ(ε) = delta; ε may be negative."""

        def f(u: float) -> float:
            c = math.exp(u)
            return math.log(delta) - self._log_delta(c, self._slope(c))

        c = self._solve(f)
        return c, self._slope(c)

    def plan(self, epsilon: float, log_delta: float | None = None) -> tuple[list[tuple[float, float, float]], float]:
        """Two settings (c, S, fineness), and the estimate of log δ(ε) they rest on.

        S = 2π/h is such that the aliases e^{cmS} δ(ε+mS), m ≠ 0, are below e^{-28} δ(ε) by the Chernoff bounds
        δ(ε') ≤ e^{K(d) - dε' + d log d - (1+d) log(1+d)}, d > 0, and δ ≤ 1.  c is the saddle point, or a smaller value
        where that makes S smaller (heavy-tailed losses) at a loss of at most e^12 by cancellation.
        """
        saddle = self.saddle(epsilon)
        grid: list[tuple[float, float, float]] = []
        for d in saddle * 1.17 ** np.arange(-24, 11):
            try:
                k, _, k2 = self._real(float(d))
            except OracleUnsure:
                continue
            size = k - d * epsilon - 0.5 * math.log(2 * math.pi * (k2 + 1 / d**2 + 1 / (1 + d) ** 2))
            grid.append((d, k - d * epsilon + d * math.log(d) - (1 + d) * math.log1p(d), size - math.log(d * (1 + d))))
        known = self._log_delta(saddle, epsilon) if log_delta is None else log_delta
        target = known - _DIGITS

        def spacing(c: float) -> float:
            right = min((e - target) / (d - c) for d, e, _ in grid if d > 1.05 * c)
            return max(right, min([-target / c, *((e - target) / (c - d) for d, e, _ in grid if d < 0.95 * c)]))

        ranked = sorted((math.log(spacing(d)) + max(0.0, s - known) / 8, d) for d, _, s in grid if d <= saddle * 1.01)
        c = next((c for _, c in ranked if self._log_delta(c, epsilon) - known < 12), None)
        if c is None:
            raise OracleUnsure("cancellation on every contour (heavy-tailed losses)")
        k2 = self._real(c)[2]
        other = c + min(0.4 / math.sqrt(k2 + 1 / c**2 + 1 / (1 + c) ** 2), 0.1 * c)
        return [(c, spacing(c), 1.0), (other, spacing(other), 1.17)], known

    def _cutoff(self, c: float, spacing: float, floor: float, fine: float) -> float:
        """w beyond which w times the integrand stays below e^{floor - 28}, probed on a log grid."""
        k, _, k2 = self._real(c)
        w, quiet = 4 / math.sqrt(k2 + 1 / c**2 + 1 / (1 + c) ** 2), 0
        while True:
            cost = sum(m.cost(c, w, 1) for m, _ in self.terms) * max(w * spacing / 10, 10)
            if cost > 4 * _CONTOUR_BUDGET:
                raise OracleUnsure(f"characteristic function decays too slowly (w = {w:.0e}, S = {spacing:.0e})")
            decay = sum(n * float(m.block(c, w, 1, 2, fine, m.real(c)[1])[0].real) for m, n in self.terms)
            z = c + 1j * w
            quiet = quiet + 1 if k + decay - math.log(abs(z * (z + 1)) / w) < floor - _DIGITS - 2 else 0
            if quiet == 4:
                return w / 1.3**2
            w *= 1.3

    def nodes(self, setting: tuple[float, float, float], floor: float) -> tuple[float, Complex, Complex]:
        """(h, z, K(z)) on the trapezoid nodes of the contour through c, for log δ(ε) + cε ≥ floor."""
        c, spacing, fine = setting
        h = 2 * math.pi / (spacing * fine)
        n = int(self._cutoff(c, spacing, floor, fine) * fine / h) + 2
        cost = sum(m.cost(c, h * n, n) for m, _ in self.terms)
        if cost > _CONTOUR_BUDGET:
            raise OracleUnsure(f"contour sum too long ({n} frequencies, {cost:.0e} pairs)")
        total = np.zeros(n, complex)
        angle = np.zeros(n)
        z = c + 1j * h * np.arange(n)
        for mgf, count in self.terms:
            k, mean = mgf.grid(c, h, n, fine)
            angle = np.maximum(angle, np.abs(k.imag))
            total += count * (mgf.exact(c) + k) + 1j * (count * mean) * z.imag
        if self.interpolated and angle[total.real > total.real[0] - 40].max() > 2.5:
            raise OracleUnsure("branch of log M unclear in interpolation")
        return h, z, total

    @staticmethod
    def value(nodes: tuple[float, Complex, Complex], epsilon: float) -> tuple[float, float]:
        """log δ(ε) and its derivative from the nodes."""
        h, z, k = nodes
        top = float(k[0].real) - epsilon * float(z[0].real)
        e = np.exp(k - epsilon * z - top)
        e[0] *= 0.5
        value = math.fsum((e / (z * (z + 1))).real) * h / math.pi
        slope = -math.fsum((e / (z + 1)).real) * h / math.pi
        if not value > 0:
            raise OracleUnsure("contour sum is not positive")
        return top + math.log(value), slope / value


def _contour_delta(steps: Steps, epsilon: float, direction: str) -> float:
    """δ(ε) by two contours; the parameters are chosen anew where the estimate of δ they rest on was too high."""
    values: list[float] = []
    for i, degree in enumerate((20, 26)):
        contour = _Contour(steps, direction, degree)
        log_delta = values[0] if values else None
        for _ in range(4):
            settings, known = contour.plan(epsilon, log_delta)
            nodes = contour.nodes(settings[i], known + settings[i][0] * epsilon)
            log_delta = contour.value(nodes, epsilon)[0]
            if log_delta > known - 1:
                break
        values.append(log_delta)
    if not abs(values[0] - values[1]) < RTOL:
        raise OracleUnsure(f"two contours differ by {values[0] - values[1]:.1e} in log δ")
    return math.exp(values[1])


def _contour_epsilon(steps: Steps, delta: float, direction: str) -> float:
    """ε by Newton steps on one contour, then δ(ε) checked on another."""
    contour = _Contour(steps, direction, 20)
    eps = contour.guess(delta)[1]
    target = math.log(delta)
    low, high = -math.inf, math.inf
    for _ in range(14):
        start = eps
        try:
            (setting, _), _ = contour.plan(start, target)
            nodes = contour.nodes(setting, target + setting[0] * start)
            value = contour.value(nodes, start)[0]
            for _ in range(30):
                log_delta, slope = contour.value(nodes, eps)
                step = (target - log_delta) / slope
                eps += step
                if abs(step) < 1e-14 * max(1e-3, abs(eps)) or abs(eps - start) * setting[0] > 8:
                    break
        except OracleUnsure:  # a guess far too large leaves nothing but rounding errors
            if high < math.inf or start <= 0:
                raise
            eps = start / 2
            continue
        if abs(eps - start) * setting[0] < 2:
            break
        low, high = (start, high) if value > target else (low, start)
        if not low < eps < high:
            eps = (max(low, 0.0) + high) / 2 if high < math.inf else 2 * start
    else:
        raise OracleUnsure("ε did not settle")
    if eps <= 0:
        return 0.0
    contour = _Contour(steps, direction, 26)
    (_, setting), _ = contour.plan(eps, target)
    log_delta, slope = contour.value(contour.nodes(setting, target + setting[0] * eps), eps)
    if not abs(log_delta - target) < RTOL:
        raise OracleUnsure(f"two contours differ by {log_delta - target:.1e} in log δ")
    return eps


# ---------------------------------------------------------------------------------------------------------------------
# Route 3: density of the sum
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """Resolution of route 3."""

    order: int  # Gauss-Legendre nodes per panel
    degree: int  # Chebyshev nodes per panel of the interpolated log density
    nats: float  # densities are kept down to e^{-nats}, or more by one nat for every level of convolution
    tol: float  # tolerance of the log density and, relative to the total, of a quadrature panel


def _softplus(v: Real) -> Real:
    return np.logaddexp(0.0, v)


class _Density:
    """Log density in v of a sum s; s = softplus(v) (one-sided) or ψ_b(v) = softplus(v-b) - softplus(-v-b)."""

    def __init__(self, lo: float, hi: float, b: float | None, cut: float = 0.0) -> None:
        self.lo, self.hi, self.b, self.cut = lo, hi, b, cut

    def log_pdf(self, v: Real) -> Real:
        """Log density in v."""
        raise NotImplementedError

    def marks(self) -> Real:
        """Points in v that follow the structure of the density."""
        return np.linspace(self.lo, self.hi, 65)

    def mode(self) -> float:
        """s at the (approximate) maximum of the density in v."""
        v = self.marks()
        return float(self.to_s(v[[self.log_pdf(v).argmax()]])[0])

    def to_s(self, v: Real) -> Real:
        return _softplus(v) if self.b is None else _softplus(v - self.b) - _softplus(-v - self.b)

    def to_v(self, s: Real) -> Real:
        """Inverse of to_s: log(e^s - 1), or s/2 + asinh(e^b sinh(s/2))."""
        if self.b is None:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(s > 0, s + np.log(-np.expm1(-s)), -np.inf)
        return s / 2 + np.arcsinh(math.exp(self.b) * np.sinh(s / 2))

    def log_jacobian(self, v: Real) -> Real:
        """log ds/dv."""
        if self.b is None:
            return -_softplus(-v)
        return np.logaddexp(-_softplus(self.b - v), -_softplus(self.b + v))

    def log_at(self, s: Real) -> Real:
        """Log density in s."""
        v = self.to_v(s)
        out = np.full(v.shape, -np.inf)
        ok = (v >= self.lo) & (v <= self.hi)
        inside = v[ok]
        out[ok] = self.log_pdf(inside) - self.log_jacobian(inside)
        return out


class _Step(_Density):
    """One step: v is a Gaussian (mixture) with standard deviation 1/σ."""

    def __init__(self, q: float, sigma: float, direction: str, nats: float) -> None:
        logit = math.log(q) - math.log1p(-q)
        self.q, self.sigma = (0.0 if direction == "add" else q), sigma
        two_sided = direction == "antipodal"
        self.mean = 0.0 if two_sided else logit - 0.5 / sigma**2
        reach = math.sqrt(2 * (nats + max(math.log(sigma), 0.0))) / sigma
        top = self.mean + (0.0 if direction == "add" else 1 / sigma**2)
        super().__init__(self.mean - reach, top + reach, 0.5 / sigma**2 - logit if two_sided else None, -nats)

    def log_pdf(self, v: Real) -> Real:
        t = (v - self.mean) * self.sigma
        return (
            -0.5 * t * t
            + math.log(self.sigma / math.sqrt(2 * math.pi))
            + _log_mix(self.q, v - self.mean - 0.5 / self.sigma**2)
        )


class _Interpolated(_Density):
    """Piecewise Chebyshev interpolant of the log density; ``edges`` of the panels and ``coef`` (degree × panels)."""

    def __init__(self, edges: Real, coef: Real, b: float | None, cut: float) -> None:
        super().__init__(float(edges[0]), float(edges[-1]), b, cut)
        self.edges, self.coef = edges, coef

    def marks(self) -> Real:
        points = np.concatenate([self.edges, (self.edges[1:] + self.edges[:-1]) / 2])
        points.sort()
        return points[:: max(1, points.size // 150)]

    def log_pdf(self, v: Real) -> Real:
        i = np.clip(np.searchsorted(self.edges, v, side="right") - 1, 0, self.edges.size - 2)
        left = self.edges[i]
        x = 2 * (v - left) / (self.edges[i + 1] - left) - 1
        b1, b2 = np.zeros_like(x), np.zeros_like(x)
        for row in self.coef[:0:-1]:
            b1, b2 = row[i] + 2 * x * b1 - b2, b1
        return self.coef[0][i] + x * b1 - b2


def _integral(
    log_f: Callable[[NDArray[np.intp], Real], Real], a: Real, b: Real, marks: Real, setting: _Setting
) -> Real:
    """log ∫_a^b e^{log_f(row, v)} dv for every row.

    ``log_f(rows, v)`` gives the log integrand for an array of row numbers and a 2-d array v.  Scan at ``marks`` and at
    equidistant points for where the integrand matters, put panels there with as many marks in each, then bisect panels
    until Gauss-Legendre on a panel and on its halves (which are kept) agree to ``tol`` of the row's total.
    """
    out = np.full(a.shape, -np.inf)
    rows = np.flatnonzero(b > a)
    x, w = np.polynomial.legendre.leggauss(setting.order)
    x, w = (x + 1) / 2, w / 2

    def panel(r: NDArray[np.intp], lo: Real, hi: Real, top: Real) -> Real:
        values = np.empty(r.shape)
        for i in range(0, r.size, 25_000):
            k = slice(i, i + 25_000)
            v = lo[k, None] + (hi - lo)[k, None] * x
            values[k] = np.exp(log_f(r[k], v) - top[r[k], None]) @ w * (hi - lo)[k]
        return values

    for start in range(0, rows.size, 2000):
        r = rows[start : start + 2000]
        t = np.linspace(0.0, 1.0, 33)
        grid = np.concatenate(
            [a[r, None] + (b - a)[r, None] * t, np.clip(marks[None, :], a[r, None], b[r, None])], axis=1
        )
        grid.sort(axis=1)
        value = log_f(r, grid)
        top = np.zeros(a.shape)
        top[r] = value.max(1)
        live = np.isfinite(top[r])
        r, grid, value = r[live], grid[live], value[live]
        if not r.size:
            continue
        keep = value > top[r, None] - 42
        first = np.maximum(keep.argmax(1) - 1, 0)
        last = np.minimum(keep.shape[1] - keep[:, ::-1].argmax(1), keep.shape[1] - 1)
        index = np.rint(first[:, None] + (last - first)[:, None] * np.linspace(0, 1, 7)).astype(int)
        edges = np.take_along_axis(grid, index, 1)
        r6, lo, hi = np.repeat(r, 6), edges[:, :-1].ravel(), edges[:, 1:].ravel()
        whole = panel(r6, lo, hi, top)
        done = np.zeros(a.shape)
        for depth in range(19):
            mid = (lo + hi) / 2
            left, right = panel(r6, lo, mid, top), panel(r6, mid, hi, top)
            total = done + np.bincount(r6, left + right, a.size)
            error = np.abs(left + right - whole)
            bad = error > setting.tol * total[r6] if depth < 18 else np.zeros(error.shape, bool)
            done += np.bincount(r6[~bad], (left + right)[~bad], a.size)
            if not bad.any():
                break
            r6, lo, hi, mid = r6[bad], lo[bad], hi[bad], mid[bad]
            whole = np.concatenate([left[bad], right[bad]])
            r6, lo, hi = np.concatenate([r6, r6]), np.concatenate([lo, mid]), np.concatenate([mid, hi])
        if depth == 18 and (error / total[r6])[top[r6] > -65].sum() > 1e-10:
            raise OracleUnsure("convolution integral not resolved")
        with np.errstate(divide="ignore"):
            out[r] = top[r] + np.log(done[r])
    return out


def _half(s: Real, f: _Density, g: _Density, setting: _Setting) -> Real:
    """log ∫ f(t) g(s-t) dt over the t nearer to 0 than s-t (t ≤ s/2 for s ≥ 0, else t ≥ s/2), in the v of f."""
    g_lo, g_hi = (float(x) for x in g.to_s(np.array([g.lo, g.hi])))
    with np.errstate(invalid="ignore"):
        a = np.maximum(f.lo, f.to_v(s - g_hi))
        b = np.minimum(f.hi, f.to_v(s - g_lo))
    middle = f.to_v(s / 2)
    b = np.where(s >= 0, np.minimum(b, middle), b)
    a = np.where(s >= 0, a, np.maximum(a, middle))
    return _integral(lambda r, v: f.log_pdf(v) + g.log_at(s[r][:, None] - f.to_s(v)), a, b, f.marks(), setting)


def _convolve(f: _Density, g: _Density, setting: _Setting) -> _Density:
    """Density of the sum of two independent terms.

    Chebyshev panels are bisected until the last coefficients of the log density are below the tolerance, which is
    relaxed where the density is below e^{-45} (as a δ of 1e-15 needs only the upper e^{-60}).
    """
    b = None
    if f.b is not None and g.b is not None:
        b = -0.5 * float(np.logaddexp(-2 * f.b, -2 * g.b))
    frame = _Density(0.0, 0.0, b)

    def log_h(v: Real) -> Real:
        s = frame.to_s(v)
        first = _half(s, f, g, setting)
        second = first if f is g else _half(s, g, f, setting)
        return np.logaddexp(first, second) + frame.log_jacobian(v)

    ends = frame.to_v(f.to_s(np.array([f.lo, f.hi])) + g.to_s(np.array([g.lo, g.hi])))
    guess = np.concatenate([f.to_s(f.marks()) + g.mode(), g.to_s(g.marks()) + f.mode()])
    near = (ends[1] - ends[0]) * 2.0 ** -np.arange(7, 25)
    v = np.concatenate([np.linspace(ends[0], ends[1], 67), ends[0] + near, ends[1] - near, frame.to_v(guess)])
    v = np.unique(v[(v > ends[0]) & (v < ends[1])])
    cut = max(f.cut, g.cut) + 1.0
    for _ in range(2):  # the second pass sharpens the ends
        value = log_h(v)
        inside = np.flatnonzero(value > cut)
        first, last = inside[0], inside[-1]
        extra = [
            np.linspace(v[max(first - 1, 0)], v[first], 12),
            np.linspace(v[last], v[min(last + 1, v.size - 1)], 12),
        ]
        v = np.unique(np.concatenate([v[inside], *extra]))
    value = log_h(v)
    v = v[value > cut]
    v = v[np.rint(np.linspace(0, v.size - 1, 25)).astype(int)]
    edges = np.unique(v)
    lo, hi = edges[:-1], edges[1:]
    n = setting.degree
    theta = (np.arange(n) + 0.5) * math.pi / n
    x = np.cos(theta)
    to_coef = np.cos(np.outer(np.arange(n), theta)) * (2.0 / n)
    to_coef[0] *= 0.5
    kept: list[tuple[Real, Real, Real]] = []
    for depth in range(16):
        points = lo[:, None] + (hi - lo)[:, None] * (x + 1) / 2
        value = log_h(points.ravel()).reshape(points.shape)
        coef = value @ to_coef.T
        level = value.max(1)
        tol = setting.tol * np.exp(np.clip(-45 - level, 0.0, None) / 2)
        bad = ~(np.abs(coef[:, -3:]).max(1) < tol)
        kept.append((lo[~bad], hi[~bad], coef[~bad]))
        if not bad.any():
            break
        lo, mid, hi = lo[bad], (lo + hi)[bad] / 2, hi[bad]
        lo, hi = np.concatenate([lo, mid]), np.concatenate([mid, hi])
        if lo.size > 2000 or depth == 15:
            raise OracleUnsure(f"density not resolved ({lo.size} panels)")
    starts = np.concatenate([k[0] for k in kept])
    order = np.argsort(starts)
    all_edges = np.append(starts[order], edges[-1])
    result = _Interpolated(all_edges, np.ascontiguousarray(np.concatenate([k[2] for k in kept])[order].T), b, cut)
    # the mass is 1: without this, its error would be multiplied by the number of steps
    mass = _integral(lambda _, v: result.log_pdf(v), edges[:1], edges[-1:], result.marks(), setting)[0]
    if not abs(mass) < 1e-9:
        raise OracleUnsure(f"mass of a density is off by {mass:.1e}")
    result.coef[0] -= mass
    return result


def _convolutions(steps: Steps) -> int:
    """How many pairwise convolutions ``_sum_density`` takes."""
    return sum(n.bit_length() - 1 + n.bit_count() for _, _, n in steps) - 1


def _sum_density(steps: Steps, direction: str, setting: _Setting) -> _Density:
    """Density of Σ (s of each step), by binary powers and then smallest first."""
    work = _convolutions(steps)
    if work > _DENSITY_BUDGET:
        raise OracleUnsure(f"{work} convolutions asked for")
    heap: list[tuple[int, int, _Density]] = []
    tie = itertools.count()
    for q, sigma, n in steps:
        power: _Density = _Step(q, sigma, direction, setting.nats)
        for bit in range(n.bit_length()):
            if bit:
                power = _convolve(power, power, setting)
            if n >> bit & 1:
                heapq.heappush(heap, (1 << bit, next(tie), power))
    while len(heap) > 1:
        n1, _, f = heapq.heappop(heap)
        n2, _, g = heapq.heappop(heap)
        heapq.heappush(heap, (n1 + n2, next(tie), _convolve(f, g, setting)))
    return heap[0][2]


class _Densities:
    """Route 3 for one list of steps: δ(ε) = ∫ (1 - e^{ε-L})₊ dP(L) with L = s + Σ log(1-q), -s - Σ log(1-q), or s."""

    def __init__(self, steps: Steps, direction: str, setting: _Setting) -> None:
        if any(q == 1 for q, _, _ in steps):
            raise OracleUnsure("q = 1 has no one-sided coordinate")
        self.direction, self.setting = direction, setting
        self.floor = math.fsum(n * math.log1p(-q) for q, _, n in steps)
        self.density = _sum_density(steps, direction, setting)

    def log_delta(self, epsilon: float) -> float:
        """log δ(ε); -inf where δ = 0."""
        d = self.density
        sign = -1.0 if self.direction == "add" else 1.0
        edge = epsilon if self.direction == "antipodal" else sign * epsilon - self.floor
        if edge <= 0 and self.direction == "add":
            return -math.inf
        v0 = float(d.to_v(np.array([edge]))[0])
        a, b = (d.lo, min(v0, d.hi)) if self.direction == "add" else (max(v0, d.lo), d.hi)
        if not b > a:
            raise OracleUnsure("δ beyond the range of the density")

        def log_f(_: NDArray[np.intp], v: Real) -> Real:
            with np.errstate(divide="ignore", invalid="ignore"):
                return d.log_pdf(v) + np.log(np.maximum(-np.expm1(sign * (edge - d.to_s(v))), 0.0))

        value = float(_integral(log_f, np.array([a]), np.array([b]), d.marks(), self.setting)[0])
        if value < -45:
            raise OracleUnsure(f"δ = exp({value:.1f}) is too small for the density route")
        return value


@functools.lru_cache(4)
def _densities(steps: tuple[tuple[float, float, int], ...], direction: str) -> tuple[_Densities, _Densities]:
    coarse, fine = _Setting(16, 12, 95.0, 2e-12), _Setting(20, 14, 102.0, 5e-13)
    return _Densities(steps, direction, coarse), _Densities(steps, direction, fine)


def _density_delta(steps: tuple[tuple[float, float, int], ...], epsilon: float, direction: str) -> float:
    one, two = (d.log_delta(epsilon) for d in _densities(steps, direction))
    if one == two == -math.inf:
        return 0.0
    if not abs(one - two) < RTOL:
        raise OracleUnsure(f"two densities differ by {one - two:.1e} in log δ")
    return math.exp(two)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle
# ---------------------------------------------------------------------------------------------------------------------


def _exact(steps: tuple[tuple[float, float, int], ...], epsilon: float, direction: str) -> float | None:
    """Route 1 where it applies."""
    if not steps:
        return max(0.0, -math.expm1(epsilon))
    if all(q == 1 for q, _, _ in steps):
        shift = 2.0 if direction == "antipodal" else 1.0
        return _delta_gauss(math.fsum(n * (shift / s) ** 2 for _, s, n in steps), epsilon)
    bounded = direction == "add" and all(q < 1 for q, _, _ in steps)
    if bounded and epsilon >= -math.fsum(n * math.log1p(-q) for q, _, n in steps):
        return 0.0  # beyond the largest loss
    if len(steps) == 1 and steps[0][2] == 1:
        return _delta_one(steps[0][0], steps[0][1], epsilon, direction)
    return None


def delta(steps: Steps, epsilon: float, direction: str, route: str = "auto") -> float:
    """δ(ε) = E_P[(1 - e^{ε-ΣL})₊] for ε ≥ 0, to a relative error below ``RTOL``, or :class:`OracleUnsure`.

    ``route`` forces ``contour`` or ``density``; ``auto`` tries the closed form, the contour and the density in turn.
    """
    merged = _normalise(steps, direction)
    if epsilon < 0:
        raise ValueError("epsilon must be nonnegative")
    if route == "auto" and (value := _exact(merged, epsilon, direction)) is not None:
        return value
    if route == "density":
        return _density_delta(merged, epsilon, direction)
    try:
        return _contour_delta(merged, epsilon, direction)
    except OracleUnsure:
        if route == "contour":
            raise
        return _density_delta(merged, epsilon, direction)


def epsilon(steps: Steps, delta: float, direction: str, route: str = "auto") -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ delta; the error in ε is ``RTOL`` over |d log δ/dε|.  See :func:`delta`."""
    merged = _normalise(steps, direction)
    if not 0 < delta < 1:
        raise ValueError("delta must lie in (0, 1)")
    exact = _exact(merged, 0.0, direction) if route == "auto" else None  # None unless a closed form applies to every ε
    if exact is not None:
        return _root(lambda e: _log(_exact(merged, e, direction)), delta)
    if route != "density":
        try:
            return _contour_epsilon(merged, delta, direction)
        except OracleUnsure:
            if route == "contour":
                raise
    pair = _densities(merged, direction)
    value = _root(pair[1].log_delta, delta)
    if value > 0:
        error = pair[0].log_delta(value) - math.log(delta)
        if not abs(error) < RTOL:
            raise OracleUnsure(f"two densities differ by {error:.1e} in log δ")
    return value


def _log(x: float | None) -> float:
    return math.log(x) if x else -math.inf


def _root(log_delta: Callable[[float], float], target: float) -> float:
    """Smallest ε ≥ 0 with log_delta(ε) ≤ log target, for a decreasing log_delta that may reach -inf."""

    def f(e: float) -> float:
        try:
            return max(log_delta(e), -1e4) - math.log(target)
        except OracleUnsure:  # beyond the density's range: δ is far below any target
            return -1e4 - math.log(target)

    if f(0.0) <= 0:
        return 0.0
    hi = 1e-3
    while f(hi) > 0:
        hi *= 2
        if hi > 1e6:
            raise OracleUnsure("no ε found")
    lo = 0.0 if hi == 1e-3 else hi / 2
    return brentq(f, lo, hi, xtol=1e-15, rtol=4e-15)


def random_cases(
    seed: int, count: int, max_steps: int = 1_000_000, max_convolutions: int = 12
) -> Iterator[tuple[list[tuple[float, float, int]], str, float, float]]:
    """Yield ``count`` random settings (steps, direction, delta, ε), with ε the oracle's value in [0.01, 60].

    q in [1e-5, 1], σ in [0.3, 50], the total number of steps in [1, max_steps] and δ in [1e-15, 1e-3] are log-uniform.
    A quarter are schedules of 2 to 40 distinct (q, σ) around a common centre.  Settings whose ε is out of range by the
    saddle-point estimate, or that the oracle is unsure of, are skipped; so are, to save time, those that the contour
    cannot do and that take more than ``max_convolutions`` convolutions.
    """
    rng = np.random.default_rng(seed)

    def log_uniform(lo: float, hi: float) -> float:
        return float(np.exp(rng.uniform(math.log(lo), math.log(hi))))

    done = 0
    while done < count:
        q, sigma, total = log_uniform(1e-5, 1.0), log_uniform(0.3, 50.0), round(log_uniform(1, max_steps))
        target, direction = log_uniform(1e-15, 1e-3), str(rng.choice(DIRECTIONS))
        steps = [(q, sigma, total)]
        if rng.random() < 0.25 and total > 1:
            size = int(min(total, rng.integers(2, 41)))
            spread = rng.uniform(0, 1, 2)
            qs = np.clip(q * np.exp(spread[0] * rng.uniform(-1, 1, size)), 1e-5, 1.0)
            sigmas = np.clip(sigma * np.exp(spread[1] * rng.uniform(-1, 1, size)), 0.3, 50.0)
            counts = 1 + rng.multinomial(total - size, rng.dirichlet(np.ones(size)))
            steps = [(float(a), float(b), int(n)) for a, b, n in zip(qs, sigmas, counts, strict=True)]
        try:
            rough = _Contour(_normalise(steps, direction), direction).guess(target)[1] if q < 1 else 1.0
            if not 0.003 < rough < 200:
                continue
            value = epsilon(steps, target, direction, "auto" if _convolutions(steps) <= max_convolutions else "contour")
        except OracleUnsure:
            continue
        if 0.01 <= value <= 60:
            done += 1
            yield steps, direction, target, value
