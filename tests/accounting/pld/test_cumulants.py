"""Cumulants of the loss against 30-digit quadrature, real and complex, for every kind of pair."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpc, mpf

from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.accounting.pld import cumulants
from thinned import thinned

KINDS = [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL]


def moment(kind: Kind, rate: float, sigma: float, z: mpc) -> mpc:
    """E_P e^{zL} with 30 digits: a trapezoidal sum in x/σ, exponentially exact; ``larger`` in its pieces."""
    with mpmath.workdps(30):
        q, s = mpf(rate), mpf(sigma)
        c = float(mpmath.re(z))

        def mixture(g: mpf, m: int) -> mpf:
            return 1 - q + q * mpmath.exp(m * g / s - 1 / (2 * s * s))

        def integrand(g: mpf, what: Kind) -> mpc:
            match what:
                case Kind.REMOVE:
                    value = mixture(g, 1) ** (1 + z)
                case Kind.ADD:
                    value = mixture(g, -1) ** -z
                case _:
                    value = mixture(g, 1) ** (1 + z) * mixture(g, -1) ** -z
            return value * mpmath.npdf(g)

        low, high = -13 - float(1 / s), 13 + (2 + 2 * c) / float(s)
        if kind is Kind.LARGER:
            edge = float(1 / (2 * s))
            parts = [
                mpmath.quad(lambda g, what=what: integrand(g, what), [a + (b - a) * mpf(i) / 10 for i in range(11)])
                for what, a, b in ((Kind.ADD, low, -edge), (Kind.REMOVE, edge, high))
            ]
            return sum(parts) + (1 - q) * mpmath.erf(1 / (2 * s * mpmath.sqrt(2)))
        step = min(s, mpf(1)) / 12
        return step * mpmath.fsum(integrand(step * i, kind) for i in range(int(low / step), int(high / step) + 1))


def truth(kind: Kind, rate: float, sigma: float, c: float) -> float:
    return float(mpmath.re(mpmath.log(moment(kind, rate, sigma, mpf(c)))))


SETTINGS = [
    (1e-5, 1.0, 3.0),
    (0.01, 4.0, 16.2),
    (0.05, 0.6, 0.5),
    (0.3, 0.3, 2.5),
    (0.9, 2.0, 30.0),
    (0.5, 20.0, 200.0),
]


class TestReal:
    @pytest.mark.parametrize("kind", Kind)
    @pytest.mark.parametrize(("rate", "sigma", "c"), SETTINGS)
    def test_value(self, kind: Kind, rate: float, sigma: float, c: float) -> None:
        found = cumulants.tilted(Pair(kind, rate, sigma), c).value
        assert found == pytest.approx(truth(kind, rate, sigma, c), rel=1e-11, abs=1e-15)

    @pytest.mark.parametrize(("rate", "sigma", "c", "value"), [(0.999, 2.6, 32.0, 74.928), (0.9, 4.0, 100.0, 125.835)])
    def test_add_at_a_large_tilt(self, rate: float, sigma: float, c: float, value: float) -> None:
        """A past fault: e^{cL} moves the whole Gaussian out of where it was looked for."""
        found = cumulants.tilted(Pair(Kind.ADD, rate, sigma), c).value
        assert round(found, 3) == value
        assert found == pytest.approx(truth(Kind.ADD, rate, sigma, c), rel=1e-12)

    @pytest.mark.parametrize("kind", Kind)
    @pytest.mark.parametrize(("rate", "sigma", "c"), SETTINGS)
    def test_derivatives(self, kind: Kind, rate: float, sigma: float, c: float) -> None:
        pair, h = Pair(kind, rate, sigma), 1e-3 * c
        below, here, above = (cumulants.tilted(pair, x) for x in (c - h, c, c + h))
        assert here.slope == pytest.approx((above.value - below.value) / (2 * h), rel=1e-4)
        assert here.curvature == pytest.approx((above.slope - below.slope) / (2 * h), rel=1e-3)
        assert here.curvature > 0

    def test_tiny_values_keep_their_digits(self) -> None:
        """K(1) of remove is log(1 + q²(e^{1/σ²} − 1)) exactly."""
        for rate in (1e-3, 1e-6, 1e-9):
            found = cumulants.tilted(Pair(Kind.REMOVE, rate, 2.0), 1.0).value
            assert found == pytest.approx(math.log1p(rate**2 * math.expm1(0.25)), rel=1e-15 / rate + 1e-12)

    @given(st.floats(1e-5, 0.999), st.floats(0.3, 50.0), st.integers(1, 40))
    @settings(max_examples=60)
    def test_remove_at_whole_tilts_is_a_binomial_sum(self, rate: float, sigma: float, c: int) -> None:
        with mpmath.workdps(40):
            q, s = mpf(rate), mpf(sigma)
            total = mpmath.fsum(
                mpmath.binomial(c + 1, k) * (1 - q) ** (c + 1 - k) * q**k * mpmath.exp(k * (k - 1) / (2 * s * s))
                for k in range(c + 2)
            )
            value = float(mpmath.log(total))
        found = cumulants.tilted(Pair(Kind.REMOVE, rate, sigma), float(c)).value
        assert found == pytest.approx(value, rel=1e-10, abs=1e-15)

    @given(st.floats(0.1, 50.0), st.floats(0.01, 100.0))
    @settings(max_examples=40)
    def test_full_batch(self, sigma: float, c: float) -> None:
        found = cumulants.tilted(Pair(Kind.REMOVE, 1.0, sigma), c)
        assert found.value == pytest.approx(c * (c + 1) / (2 * sigma**2), rel=1e-14)
        assert found.slope == pytest.approx((2 * c + 1) / (2 * sigma**2), rel=1e-14)
        assert found.curvature == pytest.approx(sigma**-2, rel=1e-14)

    def test_a_tail_left_out_only_lowers_it(self) -> None:
        pair = Pair(Kind.REMOVE, 1e-4, 0.4)
        values = [cumulants.tilted(pair, 20.0, tail).value for tail in (0.0, 1e-30, 1e-20, 1e-10, 1e-5)]
        assert values[0] > values[-1]
        assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(values))

    @given(st.sampled_from(Kind), st.floats(1e-4, 0.99), st.floats(0.3, 30.0), st.floats(0.1, 30.0))
    @settings(max_examples=60)
    def test_convex_and_zero_at_zero(self, kind: Kind, rate: float, sigma: float, c: float) -> None:
        pair = Pair(kind, rate, sigma)
        half, whole = cumulants.tilted(pair, c / 2).value, cumulants.tilted(pair, c).value
        assert cumulants.tilted(pair, 0.0).value == pytest.approx(0, abs=1e-13)
        assert -1e-15 <= 2 * half <= whole * (1 + 1e-9) + 1e-14


class TestComplex:
    @pytest.mark.parametrize(
        ("kind", "rate", "sigma", "c"), thinned(Kind, [(0.01, 4.0, 16.2), (0.05, 0.6, 0.5), (0.9, 2.0, 8.0)])
    )
    def test_value(self, kind: Kind, rate: float, sigma: float, c: float) -> None:
        pair = Pair(kind, rate, sigma)
        width = 1 / math.sqrt(cumulants.tilted(pair, c).curvature)
        w = np.linspace(0, 3 * width, 7)
        found = cumulants.transform(pair, c, w)
        for i in (0, 1, 3, 6):
            expected = complex(moment(kind, rate, sigma, mpc(c, float(w[i]))))
            # the exponential: the branch of the logarithm does not matter
            scaled = complex(mpmath.exp(mpmath.log(mpc(expected)) - mpf(cumulants.tilted(pair, c).value)))
            assert abs(np.exp(found[i] - found[0].real) - scaled) < 1e-10

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_continuous_from_zero(self, kind: Kind) -> None:
        pair = Pair(kind, 0.2, 0.5)
        found = cumulants.transform(pair, 1.0, np.linspace(0, 20, 400))
        assert found[0] == pytest.approx(cumulants.tilted(pair, 1.0).value, rel=1e-12)
        finer = cumulants.transform(pair, 1.0, np.linspace(0, 20, 3193))[::8]  # the same branch, however it is walked
        np.testing.assert_allclose(found, finer, rtol=0, atol=1e-10)
        assert np.all(found.real <= found[0].real * (1 + 1e-12))  # |E e^{(c+iw)L}| ≤ E e^{cL}

    def test_tiny_rates_keep_their_digits(self) -> None:
        pair, w = Pair(Kind.REMOVE, 1e-5, 1.0), np.array([0.0, 0.5, 1.0, 4.0])
        found = cumulants.transform(pair, 3.0, w)
        for k, at in zip(found, w, strict=True):
            expected = complex(mpmath.log(moment(Kind.REMOVE, 1e-5, 1.0, mpc(3.0, float(at)))))
            assert abs(k - expected) < 1e-10 * max(abs(expected), 1e-6)


class TestNodes:
    @pytest.mark.parametrize("kind", Kind)
    @pytest.mark.parametrize(("rate", "sigma"), [(1e-5, 0.3), (0.01, 1.0), (0.5, 10.0), (0.99, 0.5)])
    def test_both_laws_have_mass_one(self, kind: Kind, rate: float, sigma: float) -> None:
        loss, log_p = cumulants.law(Pair(kind, rate, sigma), 1.0)
        assert np.exp(log_p).sum() == pytest.approx(1, rel=1e-12)
        assert np.exp(log_p - loss).sum() == pytest.approx(1, rel=1e-12)

    @pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.5, 3.0)])
    def test_the_atom_of_the_larger(self, rate: float, sigma: float) -> None:
        """What add has below zero and remove above leaves a mass at zero."""
        add, remove = Pair(Kind.ADD, rate, sigma), Pair(Kind.REMOVE, rate, sigma)
        rest = 1 - float(add.mass(-np.inf, -0.5)) - float(remove.mass(0.5, np.inf))
        assert cumulants.atom(Pair(Kind.LARGER, rate, sigma)) == pytest.approx(rest, rel=1e-12)
        assert add.loss(np.array([-0.5]))[0] == pytest.approx(0, abs=1e-15)
        assert remove.loss(np.array([0.5]))[0] == pytest.approx(0, abs=1e-15)
        assert cumulants.atom(remove) == 0
