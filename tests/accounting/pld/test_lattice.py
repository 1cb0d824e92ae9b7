"""Lattice measures: rounding that keeps the order of privacy, and compositions within their stated error."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.accounting.pld import certify, contour, discretise, lattice
from dpgrad.accounting.pld.lattice import Measure, Rounding

KINDS = [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL]
SETTINGS = [(1e-5, 1.0), (0.01, 4.0), (0.01, 0.5), (0.3, 1.0), (0.9, 3.0)]
EPSILONS = [-1.0, -0.1, -0.003, 0.0, 1e-4, 0.003, 0.011, 0.05, 0.1234, 0.3, 0.9, 1.5, 3.0]
TAIL = 1e-18


def closed_form(pair: Pair, epsilon: float) -> float:
    """The profile of one step from 60 digits: see test_pairs."""
    if pair.kind is Kind.LARGER:
        return max(closed_form(Pair(kind, pair.sampling_rate, pair.sigma), epsilon) for kind in (Kind.REMOVE, Kind.ADD))
    with mpmath.workdps(60):
        q, s, e = mpmath.mpf(pair.sampling_rate), mpmath.mpf(pair.sigma), mpmath.mpf(epsilon)
        half = mpmath.mpf(1) / 2
        if pair.kind is Kind.ANTIPODAL:
            x = s * s * (e / 2 + mpmath.asinh((1 - q) / q * mpmath.exp(half / s**2) * mpmath.sinh(e / 2)))
        else:
            sign = 1 if pair.up else -1
            ratio = (mpmath.expm1(sign * e) + q) / q
            x = sign * (s * s * mpmath.log(ratio) + half) if ratio > 0 else -sign * mpmath.inf

        def above(shift: int) -> mpmath.mpf:
            return (1 - q) * _upper(x / s) + q * _upper((x - shift) / s) if shift else _upper(x / s)

        return float(above(int(pair.up)) - mpmath.exp(e) * above(-int(pair.down)))


def _upper(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def losses(measure: Measure, spacing: float) -> np.ndarray:
    return spacing * (measure.first + np.arange(len(measure.mass)))


def plain(measure: Measure, tilt: float, spacing: float) -> np.ndarray:
    """The measure with its tilt taken off."""
    with np.errstate(divide="ignore"):
        return np.exp(np.log(measure.mass) + measure.log_scale - tilt * losses(measure, spacing))


def profile(measure: Measure, tilt: float, spacing: float, epsilon: float) -> float:
    """E(1 − e^{ε−L})₊ of a measure, its infinite mass included, its error not."""
    gain = np.maximum(-np.expm1(np.minimum(epsilon - losses(measure, spacing), 0.0)), 0.0)
    return math.fsum(plain(measure, tilt, spacing) * gain) + measure.infinite


def allowance(measure: Measure, tilt: float, epsilon: float) -> float:
    """What ``error`` may move the profile by, as the module proves."""
    log_most = tilt * math.log(tilt / (tilt + 1)) - math.log1p(tilt)
    return measure.error * math.exp(measure.log_scale - tilt * epsilon + log_most)


class TestDotted:
    """Upper bounds of one step."""

    @pytest.mark.parametrize("kind", Kind)
    @pytest.mark.parametrize(("rate", "sigma"), SETTINGS)
    @pytest.mark.parametrize(("tilt", "spacing"), [(0.5, 0.05), (3.0, 0.01), (15.0, 0.001)])
    def test_profile_is_never_below_the_closed_form(
        self, kind: Kind, rate: float, sigma: float, tilt: float, spacing: float
    ) -> None:
        pair = Pair(kind, rate, sigma)
        measure = discretise.dotted(pair, tilt, spacing, TAIL)
        for epsilon in EPSILONS:
            found, truth = profile(measure, tilt, spacing, epsilon), closed_form(pair, epsilon)
            assert found >= truth * (1 - 1e-11) - 1e-17, epsilon
            assert found <= 1.3 * truth + 2 * TAIL + spacing  # and not by far

    @pytest.mark.parametrize("kind", KINDS)
    def test_error_falls_with_the_square_of_the_spacing(self, kind: Kind) -> None:
        pair, epsilon = Pair(kind, 0.2, 1.0), 0.05
        truth = closed_form(pair, epsilon)
        gaps = []
        for spacing in (0.02, 0.01, 0.005, 0.0025):
            shifted = [
                profile(discretise.dotted(pair, 1.0, spacing, TAIL), 1.0, spacing, epsilon + t * spacing)
                for t in (0, 0.5)
            ]
            gaps.append(max(shifted[0] - truth, shifted[1] - closed_form(pair, epsilon + 0.5 * spacing)))
        assert all(2.5 < a / b < 6 for a, b in itertools.pairwise(gaps)), gaps

    @pytest.mark.parametrize("kind", Kind)
    @pytest.mark.parametrize(("rate", "sigma"), SETTINGS)
    def test_both_masses_are_kept(self, kind: Kind, rate: float, sigma: float) -> None:
        """Σ p = 1 − (what became certain loss), Σ p·e^{−l} = Q's mass, at most 1."""
        tilt, spacing = 1.0, 0.01
        measure = discretise.dotted(Pair(kind, rate, sigma), tilt, spacing, 1e-10)
        mass = plain(measure, tilt, spacing)
        assert math.fsum(mass) + measure.infinite == pytest.approx(1, rel=1e-12)
        assert 1 - 1e-6 <= math.fsum(mass * np.exp(-losses(measure, spacing))) <= 1 + 1e-12
        assert 0 <= measure.infinite <= 1e-10 * (1 + 1e-9)

    def test_the_tail_becomes_certain_loss(self) -> None:
        pair = Pair(Kind.REMOVE, 0.01, 1.0)
        for tail in (1e-3, 1e-6, 1e-12):
            measure = discretise.dotted(pair, 1.0, 0.01, tail)
            assert 0 < measure.infinite <= tail
            assert profile(measure, 1.0, 0.01, 0.5) >= closed_form(pair, 0.5)

    def test_a_long_lattice_is_thinned_and_stays_an_upper_bound(self) -> None:
        pair, tilt, spacing = Pair(Kind.REMOVE, 0.01, 0.3), 2.0, 1e-4
        measure = discretise.dotted(pair, tilt, spacing, TAIL)
        assert np.count_nonzero(measure.mass) < 0.8 * len(measure.mass)
        for epsilon in (0.01, 0.5, 3.0, 10.0):
            truth = closed_form(pair, epsilon)
            assert truth * (1 - 1e-11) <= profile(measure, tilt, spacing, epsilon) <= truth * (1 + 1e-3) + 1e-16


class TestRounded:
    """Lower bounds of one step."""

    @staticmethod
    def lower(found: discretise.Rounded, tilt: float, spacing: float, epsilon: float) -> float:
        """max over thresholds of P(S) − e^ε·Q(S)."""
        p, q = plain(found.p, tilt, spacing), plain(found.q, tilt + 1, spacing)
        assert found.p.first == found.q.first
        sums = np.cumsum(p[::-1]) - math.exp(epsilon) * np.cumsum(q[::-1])
        return max(float(sums.max()), 0.0)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("rate", "sigma"), SETTINGS)
    @pytest.mark.parametrize(("tilt", "spacing"), [(0.5, 0.05), (3.0, 0.01), (15.0, 0.001)])
    def test_profile_is_never_above_the_closed_form(
        self, kind: Kind, rate: float, sigma: float, tilt: float, spacing: float
    ) -> None:
        pair = Pair(kind, rate, sigma)
        (found,) = discretise.rounded(pair, [pair], tilt, spacing, TAIL)
        for epsilon in EPSILONS:
            truth = closed_form(pair, epsilon)
            value = self.lower(found, tilt, spacing, epsilon)
            assert value <= truth * (1 + 1e-11) + 1e-15, epsilon
            assert value >= 0.8 * truth - spacing

    @pytest.mark.parametrize("kind", KINDS)
    def test_another_ruler_only_lowers_it(self, kind: Kind) -> None:
        ruler, spacing = Pair(kind, 0.1, 1.0), 0.005
        actual = [Pair(kind, 0.1, 1.0), Pair(kind, 0.11, 1.0), Pair(kind, 0.1, 1.05), Pair(kind, 0.09, 0.97)]
        for pair, found in zip(actual, discretise.rounded(ruler, actual, 2.0, spacing, TAIL), strict=True):
            for epsilon in (0.0, 0.01, 0.1, 0.5):
                truth = closed_form(pair, epsilon)
                assert truth - spacing <= self.lower(found, 2.0, spacing, epsilon) <= truth * (1 + 1e-11) + 1e-15

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("rate", "sigma"), SETTINGS)
    def test_both_are_parts_of_probabilities(self, kind: Kind, rate: float, sigma: float) -> None:
        pair = Pair(kind, rate, sigma)
        (found,) = discretise.rounded(pair, [pair], 1.0, 0.01, 1e-12)
        for measure, tilt in ((found.p, 1.0), (found.q, 2.0)):
            assert 1 - 1e-6 <= math.fsum(plain(measure, tilt, 0.01)) <= 1 + 1e-13


def direct(masses: list[np.ndarray]) -> np.ndarray:
    """Convolution by definition, in extended precision."""
    out = np.ones(1, np.longdouble)
    for mass in masses:
        out = np.convolve(out, mass.astype(np.longdouble))
    return out


MASSES = st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda m: sum(m) > 1e-3)


class TestCompose:
    @staticmethod
    def misplaced(found: Measure, first: int, truth: np.ndarray, log_scale: float) -> float:
        """Σ|found − truth| in the scale of ``found``."""
        start = min(first, found.first)
        size = max(first + len(truth), found.first + len(found.mass)) - start
        one, two = np.zeros(size, np.longdouble), np.zeros(size, np.longdouble)
        one[found.first - start : found.first - start + len(found.mass)] = found.mass
        two[first - start : first - start + len(truth)] = truth * np.exp(np.longdouble(log_scale - found.log_scale))
        return float(np.abs(one - two).sum())

    @given(MASSES, st.integers(-40, 40), st.integers(1, 12))
    @settings(max_examples=80)
    def test_powers_are_within_the_stated_error(self, mass: list[float], first: int, count: int) -> None:
        array = np.array(mass) / sum(mass)
        found = lattice.compose([lattice.power(Measure(first, array, 0.3), count)])
        truth = direct([array] * count)
        assert self.misplaced(found, first * count, truth, 0.3 * count) <= found.error
        assert found.error < 1e-11

    @given(st.lists(st.tuples(MASSES, st.integers(-20, 20), st.integers(1, 4)), min_size=1, max_size=4))
    @settings(max_examples=60)
    def test_products_are_within_the_stated_error(self, parts: list[tuple[list[float], int, int]]) -> None:
        measures = [
            (Measure(first, np.array(mass) / sum(mass), 0.1 * i), n) for i, (mass, first, n) in enumerate(parts)
        ]
        found = lattice.compose([lattice.power(m, n) for m, n in measures])
        truth = direct([m.mass for m, n in measures for _ in range(n)])
        first = sum(m.first * n for m, n in measures)
        assert self.misplaced(found, first, truth, sum(m.log_scale * n for m, n in measures)) <= found.error

    @given(MASSES, MASSES, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.integers(1, 3))
    @settings(max_examples=60)
    def test_mixtures_are_within_the_stated_error(
        self, one: list[float], two: list[float], shares: list[float], count: int
    ) -> None:
        a, b = (Measure(f, np.array(m) / sum(m), s) for f, m, s in ((-3, one, 0.0), (2, two, 0.4)))
        weights = np.array([[1 - s, s] for s in shares])
        found = lattice.compose([lattice.product([a, b], weights, np.full(len(shares), float(count)))])
        size = max(len(a.mass), len(b.mass) + 5)
        padded = [np.pad(a.mass, (0, size - len(a.mass))), np.pad(b.mass, (5, size - 5 - len(b.mass))) * math.exp(0.4)]
        truth = direct([(1 - s) * padded[0] + s * padded[1] for s in shares for _ in range(count)])
        assert self.misplaced(found, -3 * len(shares) * count, truth, 0.0) <= found.error

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("rate", "sigma", "count"), [(0.01, 1.0, 300), (0.3, 2.0, 64), (1e-4, 0.7, 1000)])
    def test_steps_against_repeated_squaring(self, kind: Kind, rate: float, sigma: float, count: int) -> None:
        """A real step, composed directly in extended precision: Σ|difference| in the tilted scale."""
        tilt, spacing = 2.0, 0.05
        step = discretise.dotted(Pair(kind, rate, sigma), tilt, spacing, 1e-16)
        found = lattice.compose([lattice.power(step, count)])
        square, truth, n = step.mass.astype(np.longdouble), np.ones(1, np.longdouble), count
        at, offset = step.first, 0
        while n:
            if n & 1:
                truth, offset = np.convolve(truth, square), offset + at
            if n > 1:
                square, at = np.convolve(square, square), 2 * at
                # both ends may be dropped far below what is compared
                kept = np.flatnonzero(square > 1e-24)
                square, at = square[kept[0] : kept[-1] + 1], at + int(kept[0])
            n >>= 1
        assert self.misplaced(found, offset, truth, step.log_scale * count) <= found.error
        assert found.error < 1e-9

    def test_wrap_around_is_counted(self) -> None:
        """A rare large loss lies inside the window or inside the error, by Chernoff's bound of the discrete measure."""
        mass = np.zeros(5001)
        mass[0], mass[5000] = 1 - 1e-7, 1e-7
        found = lattice.compose([lattice.power(Measure(0, mass, 0.0), 1000)])
        n = 1000
        truth = {5000 * k: math.comb(n, k) * 1e-7**k * (1 - 1e-7) ** (n - k) for k in range(8)}
        at = {found.first + i: m for i, m in enumerate(found.mass) if m > 1e-13}
        missing = sum(abs(at.get(k, 0.0) - m) for k, m in truth.items())
        assert missing <= found.error < 1e-8

    def test_inherited_error_and_infinite_mass_add(self) -> None:
        measure = Measure(0, np.array([0.5, 0.5]), 0.0, error=1e-6, infinite=1e-9)
        found = lattice.compose([lattice.power(measure, 50)])
        assert found.error == pytest.approx(50e-6, rel=1e-4)
        assert found.infinite == pytest.approx(50e-9, rel=1e-12)

    def test_a_lattice_too_long_is_refused(self) -> None:
        mass = np.zeros(1 << 20)
        mass[[0, -1]] = 0.5
        with pytest.raises(ValueError, match="its loss spreads too widely to certify"):
            lattice.compose([lattice.power(Measure(0, mass, 0.0), 1000)])


def hockey_stick(loss: np.ndarray, mass: np.ndarray, epsilon: float) -> float:
    return math.fsum(mass * np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0))


class TestRegrid:
    @given(MASSES, st.integers(-40, 40), st.floats(0.1, 8.0), st.floats(1.2, 9.0))
    @settings(max_examples=80)
    def test_connecting_the_dots_never_lowers_the_profile(
        self, mass: list[float], first: int, tilt: float, ratio: float
    ) -> None:
        old, new = 0.02, 0.02 * ratio
        measure = Measure(first, np.array(mass), 0.0, error=1e-9)
        coarse = lattice.regrid(measure, Rounding(tilt, upper=True), old, new)
        before = plain(measure, tilt, old)
        after = plain(coarse, tilt, new)
        assert math.fsum(after) == pytest.approx(math.fsum(before), rel=1e-11)
        q_before, q_after = (
            math.fsum(m * np.exp(-x)) for m, x in ((before, losses(measure, old)), (after, losses(coarse, new)))
        )
        assert q_after == pytest.approx(q_before, rel=1e-11)
        for epsilon in np.linspace(-1, 1, 21):
            one = hockey_stick(losses(measure, old), before, epsilon)
            two = hockey_stick(losses(coarse, new), after, epsilon)
            assert two >= one * (1 - 1e-11) - 1e-15

    @given(MASSES, st.integers(-40, 40), st.floats(0.1, 8.0), st.floats(1.2, 9.0))
    @settings(max_examples=80)
    def test_rounding_keeps_the_mass_and_moves_it_half_a_cell(
        self, mass: list[float], first: int, tilt: float, ratio: float
    ) -> None:
        old, new = 0.02, 0.02 * ratio
        measure = Measure(first, np.array(mass), 0.0)
        coarse = lattice.regrid(measure, Rounding(tilt, upper=False), old, new)
        before, after = plain(measure, tilt, old), plain(coarse, tilt, new)
        assert math.fsum(after) == pytest.approx(math.fsum(before), rel=1e-11)
        moved = math.fsum(after * losses(coarse, new)) - math.fsum(before * losses(measure, old))
        assert abs(moved) <= (new / 2 + 1e-12) * math.fsum(before)


class TestError:
    @given(st.floats(0.05, 50.0), st.floats(-2.0, 5.0), st.floats(0.0, 3.0), st.floats(-5.0, 10.0))
    @settings(max_examples=100)
    def test_misplaced_tilted_mass_moves_the_profile_by_no_more_than_stated(
        self, tilt: float, scale: float, epsilon: float, place: float
    ) -> None:
        """τ of tilted mass at any l is τ·e^{K−cl} of plain mass, and adds at most that times (1 − e^{ε−l})₊."""
        measure = Measure(0, np.ones(1), scale, error=1e-6)
        added = measure.error * math.exp(scale - tilt * place) * max(-math.expm1(min(epsilon - place, 0.0)), 0.0)
        assert added <= allowance(measure, tilt, epsilon) * (1 + 1e-12)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("rate", "sigma"), SETTINGS)
def test_the_ends_hold_all_but_the_tail(kind: Kind, rate: float, sigma: float) -> None:
    pair = Pair(kind, rate, sigma)
    for tail in (1e-3, 1e-10, 1e-200):
        low, high = discretise.ends(pair, tail)
        assert low < -0.5 < 0.5 < high
        assert float(pair.mass(-np.inf, low)) <= tail * (1 + 1e-9)
        assert float(pair.mass(high, np.inf)) <= tail * (1 + 1e-9)


def test_steps_whose_own_lattice_would_not_fit_in_memory() -> None:
    rare, place = {Pair(Kind.REMOVE, 1e-6, 0.05): 10**6}, contour.Saddle(1.618, 0.0, -0.425, 1.6e-15)
    with pytest.raises(lattice.TooLong):
        certify.resolution(rare, place, delta=0.9, precision=2e-6, direct=1 << 12)
    certify.resolution(rare, place, delta=0.9, precision=2e-6)  # long lattices are taken in parts
