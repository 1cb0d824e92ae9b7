"""Every constant that docs/proofs/accounting.md proves or assumes, against arithmetic of many digits."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft
from scipy.special import erf, erfcx, log_ndtr, ndtr

from dpgrad.accounting import exact
from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.accounting.pld import cells, discretise, lattice, single
from dpgrad.accounting.pld.discretise import Span
from dpgrad.accounting.pld.lattice import Measure

EPS = float(np.finfo(float).eps)
SETTINGS = [(1e-5, 1.0), (0.01, 0.1), (0.3, 1.0), (0.02, 30.0), (0.9, 3.0)]


def phi(x: float) -> mpmath.mpf:
    """Φ to many digits, in either tail."""
    return mpmath.erfc(-mpmath.mpf(x) / mpmath.sqrt(2)) / 2


class TestAssumptions:
    """Section 1: what scipy and numpy are assumed to compute, with the factor left."""

    POINTS = (*np.linspace(-37.0, 0.0, 400), *-np.geomspace(1e-12, 37.0, 100))

    def test_normal_tail(self) -> None:
        with mpmath.workdps(50):
            worst = max(float(abs(mpmath.mpf(float(ndtr(x))) / phi(x) - 1)) for x in self.POINTS)
        assert 10 * worst <= discretise._TAIL

    def test_complementary_error_function(self) -> None:
        with mpmath.workdps(50):
            for t in [*np.linspace(-5, 40, 300), *np.geomspace(1e-9, 1e6, 100)]:
                found, x = float(erfcx(t)), mpmath.mpf(float(t))
                truth = mpmath.exp(x * x) * mpmath.erfc(x) if t < 1e4 else 1 / (x * mpmath.sqrt(mpmath.pi))
                assert abs(found / truth - 1) <= 64 * EPS * (1 + min(t, 0) ** 2) + (1e-8 if t >= 1e4 else 0)

    @pytest.mark.parametrize("kappa", [0.5, 1.0])
    def test_interpolation_weights(self, kappa: float) -> None:
        """s and the logarithm of its complement keep the digits that `_in_s` relies on."""
        with mpmath.workdps(60):
            for sigma in np.geomspace(0.02, 1e6, 200):
                x = kappa / float(sigma)
                s = mpmath.erf(mpmath.mpf(x) / mpmath.sqrt(2))
                assert 4 * abs(float(erf(x / math.sqrt(2))) - s) <= cells._MARGIN * s
                tail = mpmath.log(phi(-x))
                assert 4 * abs(float(log_ndtr(-x)) - tail) <= cells._MARGIN * (1 - tail)

    @pytest.mark.parametrize("function", ["exp", "expm1", "log", "log1p"])
    def test_elementary_functions(self, function: str) -> None:
        """Four units in the last place."""
        points = np.concatenate([-np.geomspace(1e-9, 0.9, 80), np.geomspace(1e-9, 600, 160)])
        points = np.abs(points) if function == "log" else points
        with mpmath.workdps(50):
            for x, found in zip(points, getattr(np, function)(points), strict=True):
                truth = getattr(mpmath, function)(mpmath.mpf(float(x)))
                assert abs(mpmath.mpf(float(found)) - truth) <= 4 * EPS * abs(truth)


class TestQuadrature:
    """Section 2."""

    @pytest.mark.parametrize("points", [3, 4, 8])
    @pytest.mark.parametrize("reach", [2.0, 9.0, 13.0, 40.0, 120.0])
    def test_remainder(self, points: int, reach: float) -> None:
        """On the longest panel, at its worst place: where the Gaussian is farthest from its mean."""
        with mpmath.workdps(60):
            width = mpmath.mpf(discretise._longest(points, reach))
            roots = mpmath.polyroots(mpmath.taylor(lambda t: mpmath.legendre(points, t), 0, points)[::-1], maxsteps=200)
            for right in (reach, reach / 2, float(width) / 2):
                middle = right - width / 2
                found = mpmath.fsum(
                    2
                    / ((1 - t * t) * mpmath.diff(lambda u: mpmath.legendre(points, u), t) ** 2)
                    * mpmath.npdf(middle + width / 2 * t)
                    for t in roots
                )
                truth = phi(right) - phi(middle - width / 2) if right < 1 else phi(-(middle - width / 2)) - phi(-right)
                assert abs(found * width / 2 / truth - 1) <= discretise._REMAINDER

    @pytest.mark.parametrize("kind", [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL])
    @pytest.mark.parametrize(("rate", "sigma"), SETTINGS)
    @pytest.mark.parametrize("tail", [1e-12, 1e-30, 1e-200])
    def test_masses_are_within_the_accuracy(self, kind: Kind, rate: float, sigma: float, tail: float) -> None:
        """P's and Q's mass of some cells of outputs, from the nodes, against many digits."""
        pair = Pair(kind, rate, sigma)
        low, high = discretise.ends(pair, tail)
        bound = discretise.accuracy(pair, 1.0, tail)
        cuts = np.linspace(low, high, 23)[1:-1]
        x, log_weight = discretise._nodes(sigma, discretise._reach(pair, tail), cuts, low, high)
        log_p = pair.log_p(x) + log_weight
        for logs, shift in ((log_p, float(pair.up)), (log_p - pair.loss(x), -float(pair.down))):
            with mpmath.workdps(50):
                for a, b in ((low, cuts[0]), (cuts[9], cuts[10]), (cuts[-1], high)):
                    inside = logs[(x > a) & (x < b)]
                    found = mpmath.fsum(mpmath.exp(mpmath.mpf(float(t))) for t in inside)
                    truth = mixture(rate if shift else 0.0, sigma, shift, float(a), float(b))
                    assert abs(found / truth - 1) <= bound


def mixture(rate: float, sigma: float, shift: float, a: float, b: float) -> mpmath.mpf:
    """The mass of (1 − q)N(0) + qN(shift) between a and b."""

    def between(mean: float) -> mpmath.mpf:
        left, right = (mpmath.mpf(a) - mean) / sigma, (mpmath.mpf(b) - mean) / sigma
        return phi(right) - phi(left) if right < 0 else phi(-left) - phi(-right)

    return (1 - mpmath.mpf(rate)) * between(0.0) + mpmath.mpf(rate) * between(shift)


class TestTransform:
    """Section 4: the error of each Fourier coefficient."""

    @pytest.mark.parametrize("size", [16, 81, 125, 1024, 4320, 6561, 15625, 65536, 30 * 30 * 30])
    @pytest.mark.parametrize("shape", ["even", "peak", "random"])
    def test_forward_and_back(self, size: int, shape: str) -> None:
        rng = np.random.default_rng(size)
        mass = {"even": np.ones(size), "peak": np.exp(-0.1 * np.arange(size)), "random": rng.random(size)}[shape]
        mass /= mass.sum()
        found = fft.rfft(mass)
        if np.finfo(np.longdouble).eps < EPS / 100:
            truth = exact_transform(mass)
            some = np.arange(0, len(found), max(1, len(found) // 64))
            assert np.abs(found[some] - truth(some)).max() <= lattice._FFT * math.log2(size) / 4
        back = fft.irfft(found, size)
        assert np.sqrt(((back - mass) ** 2).sum()) <= 2 * lattice._FFT * math.log2(size) * np.sqrt((mass**2).sum())


def exact_transform(mass: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Some Fourier coefficients by definition, in extended precision, angles reduced exactly."""
    size = len(mass)
    angle = 2 * np.pi * np.arange(size, dtype=np.longdouble) / size
    table = np.cos(angle.astype(np.longdouble)), np.sin(angle.astype(np.longdouble))

    def some(frequencies: np.ndarray) -> np.ndarray:
        out = []
        for k in frequencies:
            place = (int(k) * np.arange(size)) % size
            out.append(complex((mass * table[0][place]).sum(), -(mass * table[1][place]).sum()))
        return np.array(out)

    return some


def direct(masses: list[np.ndarray]) -> np.ndarray:
    out = np.ones(1, np.longdouble)
    for mass in masses:
        out = np.convolve(out, mass.astype(np.longdouble))
    return out


MASSES = st.lists(st.floats(1e-6, 1), min_size=2, max_size=25)


class TestComposition:
    """Section 5."""

    @given(MASSES, MASSES, st.integers(-20, 20), st.integers(-40, 40), st.integers(8, 60), st.floats(-14.0, -6.0))
    @settings(max_examples=60, deadline=None)
    def test_rare_steps_are_counted(
        self, near: list[float], far: list[float], first: int, start: int, count: int, log_ratio: float
    ) -> None:
        """core^{n−J} times `Rare` is (core + far)ⁿ within the stated error."""
        core = Measure(first, np.array(near) / sum(near), 0.01)
        rest = Measure(start, np.array(far) / sum(far), 0.01 + log_ratio)
        most = lattice.most_rare(core, rest, count)
        whole = lattice.compose([lattice.power(core, most)])
        found = lattice.compose([lattice.rare(whole, core, rest, count, most), lattice.power(core, count - most)])
        low = min(first, start)
        both = np.zeros(max(first + len(near), start + len(far)) - low)
        both[first - low : first - low + len(near)] += core.mass * math.exp(0.01)
        both[start - low : start - low + len(far)] += rest.mass * math.exp(0.01 + log_ratio)
        truth = direct([both] * count) / np.exp(np.longdouble(found.log_scale))
        place = found.first - low * count
        size = max(len(truth), place + len(found.mass))
        gap = np.zeros(size, np.longdouble)
        gap[: len(truth)] += truth
        gap[place : place + len(found.mass)] -= found.mass
        assert float(np.abs(gap).sum()) <= found.error

    @given(st.lists(st.tuples(MASSES, st.integers(-9, 9), st.integers(1, 20)), min_size=1, max_size=3))
    @settings(max_examples=40, deadline=None)
    def test_convolution_by_definition_keeps_relative_precision(
        self, parts: list[tuple[list[float], int, int]]
    ) -> None:
        measures = [(Measure(first, np.array(m) / sum(m), 0.0), n) for m, first, n in parts]
        found = lattice.convolve([lattice.power(m, n) for m, n in measures], 1e-40)
        truth = direct([m.mass for m, n in measures for _ in range(n)])
        place = found.first - sum(m.first * n for m, n in measures)
        inside = truth[place : place + len(found.mass)]
        steps = sum(n for _, n in measures)
        assert np.all(np.abs(found.mass - inside) <= 4 * EPS * 25 * steps * inside + found.error)
        assert float(truth.sum() - inside.sum()) <= found.error + 1e-15

    @pytest.mark.parametrize("size", [10, 1000, 100_000])
    def test_suffix_sums(self, size: int) -> None:
        terms = np.random.default_rng(size).random(size)
        found, truth = np.cumsum(terms), np.cumsum(terms.astype(np.longdouble))
        assert float(np.abs(found / truth - 1).max()) <= size * EPS


class TestClosedForms:
    """Section 6."""

    @given(
        st.sampled_from([Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL, Kind.LARGER]),
        st.floats(-8.0, -0.001),
        st.floats(-1.3, 3.0),
        st.floats(-8.0, 2.3),
    )
    @settings(max_examples=300, deadline=None)
    def test_one_step(self, kind: Kind, log_rate: float, log_sigma: float, log_epsilon: float) -> None:
        pair = Pair(kind, 10**log_rate, 10**log_sigma)
        epsilon = 10**log_epsilon
        truth = one_step(pair, epsilon)
        assert single.bound(pair, epsilon, upper=False) <= truth <= single.bound(pair, epsilon, upper=True)
        if truth > 1e-280 and epsilon < -0.999 * math.log1p(-pair.sampling_rate):
            assert single.delta(pair, epsilon) == pytest.approx(truth, rel=single.SLACK / 10)

    def test_adding_a_row_reveals_nothing_beyond_its_largest_loss(self) -> None:
        pair = Pair(Kind.ADD, 0.01, 1.0)
        assert single.delta(pair, -math.log1p(-0.01)) < 1e-300
        assert single.delta(pair, 1.0) == 0

    @given(st.floats(-4.0, 2.0), st.floats(-4.0, 3.0))
    @settings(max_examples=300, deadline=None)
    def test_gaussian(self, log_mu: float, log_epsilon: float) -> None:
        mu, epsilon = 10**log_mu, 10**log_epsilon
        with mpmath.workdps(80):
            m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
            truth = phi(m / 2 - e / m) - mpmath.exp(e) * phi(-m / 2 - e / m)
            if truth > mpmath.mpf(10) ** -290:
                assert abs(mpmath.mpf(math.exp(exact.log_delta(mu, epsilon))) / truth - 1) <= 1e-12


def one_step(pair: Pair, epsilon: float) -> mpmath.mpf:
    """P(A) − e^ε·Q(A) beyond the threshold, to 200 digits."""
    if pair.kind is Kind.LARGER:
        return max(one_step(Pair(kind, pair.sampling_rate, pair.sigma), epsilon) for kind in (Kind.REMOVE, Kind.ADD))
    with mpmath.workdps(200):
        q, s, e = mpmath.mpf(pair.sampling_rate), mpmath.mpf(pair.sigma), mpmath.mpf(epsilon)
        half = mpmath.mpf(1) / 2
        if pair.kind is Kind.ANTIPODAL:
            x = s * s * (e / 2 + mpmath.asinh((1 - q) / q * mpmath.exp(half / s**2) * mpmath.sinh(e / 2)))
        else:
            sign = 1 if pair.up else -1
            ratio = (mpmath.expm1(sign * e) + q) / q
            if ratio <= 0:
                return mpmath.mpf(0)
            x = sign * (s * s * mpmath.log(ratio) + half)

        def above(shift: int) -> mpmath.mpf:
            plain = mpmath.erfc(x / s / mpmath.sqrt(2)) / 2
            if not shift:
                return plain
            return (1 - q) * plain + q * mpmath.erfc((x - shift) / s / mpmath.sqrt(2)) / 2

        return above(int(pair.up)) - mpmath.exp(e) * above(-int(pair.down))


def test_the_core_leaves_out_what_it_says() -> None:
    """Tilted mass outside the core, times the number of steps, is below `_RARE`."""
    for kind in (Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL):
        for rate, sigma in SETTINGS:
            pair, tilt, tail, count = Pair(kind, rate, sigma), 5.0, 1e-16, 10_000
            inside = discretise.core(pair, count, tilt, tail)
            ends = discretise.ends(pair, tail)
            masses = [
                discretise.dotted(pair, tilt, 1e-3, tail, [span], whole=False).log_scale
                for span in (inside, Span(ends.low, inside.low), Span(inside.high, ends.high))
                if span.low < span.high
            ]
            outside = sum(math.exp(log - masses[0]) for log in masses[1:])
            assert outside * count <= discretise._RARE
