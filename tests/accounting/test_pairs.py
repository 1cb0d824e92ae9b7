"""Dominating pairs: the losses, and numerical checks of every claim that the module proves."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from numpy.typing import NDArray
from scipy.special import ndtr

from dpgrad.accounting import pairs
from dpgrad.accounting.events import FixedSize, Gaussian, Leaf, Pinned, Poisson, Relation, Shuffle
from dpgrad.accounting.pairs import Kind, Pair

KINDS = [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL]
RATES = st.floats(1e-5, 0.999)
NOISES = st.floats(0.3, 50.0)


def upper(x: mpf) -> mpf:
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def profile(kind: Kind, rate: float, sigma: float, epsilon: float) -> mpf:
    """H_{e^ε}(P‖Q) with 60 digits, in closed form: the mass above the x at which the loss is ε."""
    if kind is Kind.LARGER:
        return max(profile(k, rate, sigma, epsilon) for k in (Kind.REMOVE, Kind.ADD))
    with mpmath.workdps(60):
        q, s, e = mpf(rate), mpf(sigma), mpf(epsilon)
        if kind is Kind.ANTIPODAL:
            x = s * s * (e / 2 + mpmath.asinh((1 - q) / q * mpmath.exp(1 / (2 * s * s)) * mpmath.sinh(e / 2)))
            return sum(w * (upper((x - m) / s) - mpmath.exp(e) * upper((x + m) / s)) for w, m in ((1 - q, 0), (q, 1)))
        sign = 1 if kind is Kind.REMOVE else -1
        ratio = (mpmath.expm1(sign * e) + q) / q  # of N(1) to N(0), at the threshold
        if ratio <= 0:  # the loss is above ε everywhere, or nowhere
            return 1 - mpmath.exp(e) if kind is Kind.REMOVE else mpf(0)
        x = s * s * mpmath.log(ratio) + mpf(1) / 2
        if kind is Kind.REMOVE:
            return q * upper((x - 1) / s) + (1 - q - mpmath.exp(e)) * upper(x / s)
        return (1 - mpmath.exp(e) * (1 - q)) * upper(-x / s) - mpmath.exp(e) * q * upper((1 - x) / s)


def amplified_gaussian(rate: float, sigma: float, epsilon: float) -> mpf:
    """q·δ_Gauss(ε′), e^{ε′} = (e^ε − 1 + q)/q: the remove profile another way."""
    with mpmath.workdps(60):
        q, s = mpf(rate), mpf(sigma)
        other = mpmath.log((mpmath.expm1(mpf(epsilon)) + q) / q)
        return q * (upper(other * s - 1 / (2 * s)) - mpmath.exp(other) * upper(other * s + 1 / (2 * s)))


def rounding(pair: Pair, x: float) -> float:
    """How far the loss at x may be from the truth: log(1 + u) of a rounded u is off by about 2^-53·|u|/(1 + u).

    The loss of the antipodal pair is a difference of two such terms, so its error is no fraction of its value.
    """
    found = 0.0
    for sign, there in ((1, pair.up), (-1, pair.down)):
        y = (sign * x - 0.5) / pair.sigma**2
        mixture = 1 - pair.sampling_rate + pair.sampling_rate * math.exp(min(y, 700.0))
        found += 2.0**-50 * (1 + abs(math.log(mixture)) + 1 / mixture) if there else 0.0
    return found


class TestLoss:
    @given(st.sampled_from(KINDS), RATES, NOISES, st.floats(-8.0, 8.0))
    @settings(max_examples=200)
    def test_is_the_log_ratio(self, kind: Kind, rate: float, sigma: float, sigmas: float) -> None:
        pair, x = Pair(kind, rate, sigma), np.array([sigmas * sigma])
        with mpmath.workdps(40):
            q, s, at = mpf(rate), mpf(sigma), mpf(float(x[0]))

            def mixture(m: int) -> mpf:
                return 1 - q + q * mpmath.exp((2 * m * at - 1) / (2 * s * s))

            log_p = mpmath.log(mixture(1)) if pair.up else mpf(0)
            truth = log_p - (mpmath.log(mixture(-1)) if pair.down else 0)
            density = log_p - at**2 / (2 * s * s) - mpmath.log(s * mpmath.sqrt(2 * mpmath.pi))
        assert float(pair.loss(x)[0]) == pytest.approx(float(truth), rel=1e-12, abs=rounding(pair, float(x[0])))
        assert float(pair.log_p(x)[0]) == pytest.approx(float(density), rel=1e-12, abs=1e-13)

    @given(st.sampled_from(KINDS), RATES, NOISES, st.floats(-9.0, 9.0))
    @settings(max_examples=200)
    def test_place_is_its_inverse(self, kind: Kind, rate: float, sigma: float, sigmas: float) -> None:
        pair = Pair(kind, rate, sigma)
        x = np.array([sigmas * sigma])
        loss = pair.loss(x)
        again = pair.place(loss)
        # near log(1−q) the loss no longer tells x; back to the loss nothing is lost
        assert float(pair.loss(again)[0]) == pytest.approx(float(loss[0]), rel=1e-12, abs=rounding(pair, float(x[0])))

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_increasing_and_place_keeps_the_order(self, kind: Kind) -> None:
        for rate, sigma in ((1e-5, 0.3), (0.01, 1.0), (0.5, 0.5), (0.999, 20.0)):
            pair = Pair(kind, rate, sigma)
            x = np.linspace(-12, 13, 5001) * max(sigma, 1.0)
            assert np.all(np.diff(pair.loss(x)) >= 0)
            losses = np.linspace(*pair.loss(x[[0, -1]]), 999)
            assert np.all(np.diff(pair.place(losses)) >= 0)

    def test_outside_the_range(self) -> None:
        lowest = math.log1p(-0.1)
        beyond = np.array([lowest - 1e-3, -5.0])
        assert np.all(Pair(Kind.REMOVE, 0.1, 1.0).place(beyond) == -np.inf)
        assert np.all(Pair(Kind.ADD, 0.1, 1.0).place(-beyond) == np.inf)
        assert np.all(np.isfinite(Pair(Kind.ANTIPODAL, 0.1, 1.0).place(np.array([-700.0, 0.0, 700.0]))))

    def test_antipodal_is_symmetric(self) -> None:
        x = np.linspace(-9, 9, 301)
        pair = Pair(Kind.ANTIPODAL, 0.03, 0.8)
        np.testing.assert_allclose(pair.loss(x), -pair.loss(-x), rtol=1e-13, atol=1e-16)

    def test_add_is_remove_with_the_roles_exchanged(self) -> None:
        x = np.linspace(-9, 9, 301)
        np.testing.assert_array_equal(Pair(Kind.ADD, 0.03, 0.8).loss(x), -Pair(Kind.REMOVE, 0.03, 0.8).loss(-x))


def other_mass(pair: Pair, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Q's mass above x, by its definition."""
    shift = -1.0 if pair.down else 0.0
    tail = (1 - pair.sampling_rate) * ndtr(-x / pair.sigma) + pair.sampling_rate * ndtr((shift - x) / pair.sigma)
    return np.asarray(tail)


class TestMass:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("rate", "sigma"), [(1e-5, 1.0), (0.01, 0.5), (0.3, 4.0), (0.999, 2.0)])
    @pytest.mark.parametrize("epsilon", [-0.4, -1e-3, 1e-3, 0.5, 3.0])
    def test_above_a_loss_is_the_closed_form(self, kind: Kind, rate: float, sigma: float, epsilon: float) -> None:
        pair = Pair(kind, rate, sigma)
        x = pair.place(np.array([epsilon]))
        found = float((pair.mass(x, np.inf) - math.exp(epsilon) * other_mass(pair, x))[0])
        assert found == pytest.approx(float(profile(kind, rate, sigma, epsilon)), rel=1e-9, abs=1e-15)

    @given(st.sampled_from(KINDS), RATES, NOISES, st.lists(st.floats(-30.0, 30.0), max_size=6))
    @settings(max_examples=50)
    def test_adds_up_to_one(self, kind: Kind, rate: float, sigma: float, cuts: list[float]) -> None:
        edges = np.array([-np.inf, *sorted(cuts), np.inf])
        pair = Pair(kind, rate, sigma)
        mass = pair.mass(edges[:-1], edges[1:])
        assert np.all(mass >= 0)
        assert math.fsum(mass) == pytest.approx(1, rel=1e-14)

    def test_tails_keep_their_digits(self) -> None:
        pair = Pair(Kind.REMOVE, 0.01, 1.0)
        for left, right in ((20.0, np.inf), (-np.inf, -20.0), (20.0, 21.0), (-21.0, -20.0)):
            with mpmath.workdps(60):
                parts = [upper(mpf(left) - m) - upper(mpf(right) - m) for m in (0, 1)]
                truth = float(mpf("0.99") * parts[0] + mpf("0.01") * parts[1])
            assert float(pair.mass(left, right)) == pytest.approx(truth, rel=1e-12)


class TestProfilesAreConvex:
    """The upper bound for schedules rests on this: a mixture of neighbouring nodes dominates what lies between."""

    @staticmethod
    def s(kind: Kind, sigma: float) -> mpf:
        with mpmath.workdps(60):
            return mpmath.erf(mpf(Pair(kind, 0.5, 1.0).kappa) / mpf(sigma) / mpmath.sqrt(2))

    @given(
        st.sampled_from(Kind), st.floats(1e-5, 1.0), st.floats(0.2, 60.0), st.floats(1.001, 4.0), st.floats(0.01, 0.99),
        st.floats(-3.0, 8.0),
    )  # fmt: skip
    @settings(max_examples=300)
    def test_in_the_noise(
        self, kind: Kind, rate: float, low: float, factor: float, place: float, epsilon: float
    ) -> None:
        kind = Kind.REMOVE if rate == 1 else kind
        high = low * factor
        between = low * factor**place
        with mpmath.workdps(60):
            s = [self.s(kind, sigma) for sigma in (low, between, high)]
            share = (s[1] - s[2]) / (s[0] - s[2])
            ends = [profile(kind, rate, sigma, epsilon) for sigma in (low, high)]
            mixture = share * ends[0] + (1 - share) * ends[1]
            assert profile(kind, rate, between, epsilon) <= mixture + mpf(10) ** -50

    @given(
        st.sampled_from(Kind), st.floats(1e-5, 0.9), st.floats(1e-5, 0.9), st.floats(0.01, 0.99), NOISES,
        st.floats(-3.0, 8.0),
    )  # fmt: skip
    @settings(max_examples=200)
    def test_in_the_rate(self, kind: Kind, one: float, two: float, place: float, sigma: float, epsilon: float) -> None:
        between = one + (two - one) * place
        with mpmath.workdps(60):
            share = (mpf(between) - mpf(one)) / (mpf(two) - mpf(one)) if one != two else mpf(0)
            share = min(max(share, mpf(0)), mpf(1))
            mixture = (1 - share) * profile(kind, one, sigma, epsilon) + share * profile(kind, two, sigma, epsilon)
            slack = mpf(10) ** -50 + (abs(mixture) * mpf("1e-14") if one == two else 0)
            assert profile(kind, between, sigma, epsilon) <= mixture + slack

    @given(st.sampled_from(Kind), st.floats(0.001, 0.5), st.floats(0.4, 8.0), st.floats(-2.0, 4.0))
    @settings(max_examples=100)
    def test_the_four_corners_of_a_cell_dominate_its_middle(
        self, kind: Kind, rate: float, sigma: float, epsilon: float
    ) -> None:
        rates, sigmas = (rate, 1.2 * rate), (sigma, 1.3 * sigma)
        middle_rate, middle_sigma = 1.1 * rate, 1.15 * sigma
        with mpmath.workdps(60):
            s = [self.s(kind, x) for x in (sigmas[0], middle_sigma, sigmas[1])]
            by_sigma = (s[1] - s[2]) / (s[0] - s[2])
            by_rate = (mpf(rates[1]) - mpf(middle_rate)) / (mpf(rates[1]) - mpf(rates[0]))
            corners = sum(
                w * v * profile(kind, r, x, epsilon)
                for w, x in zip((by_sigma, 1 - by_sigma), sigmas, strict=True)
                for v, r in zip((by_rate, 1 - by_rate), rates, strict=True)
            )
            assert profile(kind, middle_rate, middle_sigma, epsilon) <= corners + mpf(10) ** -50

    def test_antipodal_needs_its_own_kappa(self) -> None:
        """A control: with κ = ½ in place of 1 the antipodal profile is not convex, and the test above would see it."""
        with mpmath.workdps(60):
            sigmas = [mpf(x) for x in ("0.9", "0.95", "1.0")]
            s = [mpmath.erf(mpf("0.5") / x / mpmath.sqrt(2)) for x in sigmas]
            share = (s[1] - s[2]) / (s[0] - s[2])
            values = [profile(Kind.ANTIPODAL, 0.9, float(x), 1e-3) for x in sigmas]
            assert values[1] > share * values[0] + (1 - share) * values[2]


class TestProfiles:
    @given(RATES, NOISES, st.floats(0.0, 8.0))
    @settings(max_examples=60)
    def test_remove_is_the_amplified_gaussian(self, rate: float, sigma: float, epsilon: float) -> None:
        found, truth = profile(Kind.REMOVE, rate, sigma, epsilon), amplified_gaussian(rate, sigma, epsilon)
        with mpmath.workdps(60):
            assert abs(found - truth) <= mpf(10) ** -50

    @given(RATES, NOISES, st.floats(0.0, 8.0))
    @settings(max_examples=60)
    def test_the_larger_is_remove_above_zero_and_add_below(self, rate: float, sigma: float, epsilon: float) -> None:
        with mpmath.workdps(60):
            remove, add = (profile(kind, rate, sigma, epsilon) for kind in (Kind.REMOVE, Kind.ADD))
            assert remove >= add - mpf(10) ** -50
            remove, add = (profile(kind, rate, sigma, -epsilon) for kind in (Kind.REMOVE, Kind.ADD))
            assert add >= remove - mpf(10) ** -50

    @given(RATES, NOISES, st.floats(-4.0, 8.0))
    @settings(max_examples=60)
    def test_replacing_is_dominated_by_the_larger_at_two_clips(self, rate: float, sigma: float, epsilon: float) -> None:
        """Fixed-size: the neighbours at which the others contribute nothing are the antipodal pair."""
        with mpmath.workdps(60):
            most = profile(Kind.LARGER, rate, sigma / 2, epsilon)
            assert profile(Kind.ANTIPODAL, rate, sigma, epsilon) <= most + mpf(10) ** -50


class TestAntipodalIsWorst:
    """P = (1−q)N₀ + qN_a, Q = (1−q)N₀ + qN_b in the plane: no |a|, |b| ≤ 1 beats a = −b, |a| = 1."""

    GRID = np.arange(-8.5, 8.5, 0.04)

    def hockey_stick(
        self, rate: float, a: tuple[float, float], b: tuple[float, float], alphas: list[float]
    ) -> np.ndarray:
        """H_α by the trapezoidal rule on the plane, noise 1."""
        x, y = self.GRID[:, None], self.GRID[None, :]

        def mixture(m: tuple[float, float]) -> np.ndarray:
            centre = np.exp(-(x**2 + y**2) / 2)
            return (1 - rate) * centre + rate * np.exp(-((x - m[0]) ** 2 + (y - m[1]) ** 2) / 2)

        p, q = mixture(a), mixture(b)
        cell = 0.04**2 / (2 * math.pi)
        return np.array([np.maximum(p - alpha * q, 0).sum() * cell for alpha in alphas])

    @pytest.mark.parametrize(("rate", "sigma"), [(0.05, 0.6), (0.4, 1.0), (0.9, 1.5)])
    def test_in_the_plane(self, rate: float, sigma: float) -> None:
        alphas = [0.3, 0.8, 1.0, 1.3, 3.0]
        worst = np.array([float(profile(Kind.ANTIPODAL, rate, sigma, math.log(alpha))) for alpha in alphas])
        reach = 1 / sigma
        quadrature = self.hockey_stick(rate, (reach, 0.0), (-reach, 0.0), alphas)
        np.testing.assert_allclose(quadrature, worst, atol=4e-5)  # the error of the quadrature
        # turning b away from a, its length fixed, never makes it easier to hide
        turned = [
            self.hockey_stick(rate, (reach, 0.0), (reach * math.cos(t), reach * math.sin(t)), alphas)
            for t in np.linspace(0, math.pi, 7)
        ]
        assert np.all(np.diff(np.array(turned), axis=0) >= -8e-5)
        # and longer is worse
        for a, b in ((0.5, 1.0), (1.0, 0.5), (0.7, 0.7), (0.0, 1.0), (1.0, 0.0)):
            shorter = self.hockey_stick(rate, (reach * a, 0.0), (-reach * b, 0.0), alphas)
            assert np.all(shorter <= worst + 4e-5)


class TestOf:
    @pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.ZERO_OUT])
    def test_one_row_more_or_less(self, relation: Relation) -> None:
        assert pairs.directions(relation) == (Kind.REMOVE, Kind.ADD)
        for kind in pairs.directions(relation):
            assert pairs.of(Poisson(0.1, Gaussian(3.0)), relation, kind) == Pair(kind, 0.1, 3.0)
            for leaf in (Gaussian(3.0), Poisson(1.0, Gaussian(3.0))):
                assert pairs.of(leaf, relation, kind) == Pair(Kind.REMOVE, 1.0, 3.0)
        assert pairs.of(Shuffle(5, Gaussian(3.0)), Relation.ZERO_OUT, Kind.ADD) == Pair(Kind.REMOVE, 1.0, 3.0)

    def test_one_row_exchanged(self) -> None:
        relation = Relation.REPLACE_ONE
        (kind,) = pairs.directions(relation)
        assert pairs.of(Poisson(0.1, Gaussian(3.0)), relation, kind) == Pair(Kind.ANTIPODAL, 0.1, 3.0)
        assert pairs.of(FixedSize(50, 5, Gaussian(3.0)), relation, kind) == Pair(Kind.LARGER, 0.1, 1.5)
        full: list[Leaf] = [
            Gaussian(3.0), Poisson(1.0, Gaussian(3.0)), FixedSize(5, 5, Gaussian(3.0)), Shuffle(5, Gaussian(3.0))
        ]  # fmt: skip
        assert {pairs.of(leaf, relation, kind) for leaf in full} == {Pair(Kind.REMOVE, 1.0, 1.5)}

    def test_pinned_noise_has_a_price_under_its_own_relation_alone(self) -> None:
        for declared in Relation:
            for asked in Relation:
                kind = pairs.directions(asked)[0]
                pinned = Pinned(Gaussian(3.0), declared)
                if asked is declared:
                    assert pairs.of(pinned, asked, kind) == pairs.of(pinned.event, asked, kind)
                    continue
                with pytest.raises(ValueError, match=f"counted for {declared} .*no price under {asked}"):
                    pairs.of(pinned, asked, kind)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match=r"shuffle has no price under add-remove.*use relation zero-out"):
            pairs.of(Shuffle(5, Gaussian(3.0)), Relation.ADD_REMOVE, Kind.REMOVE)
        for relation in (Relation.ADD_REMOVE, Relation.ZERO_OUT):
            with pytest.raises(ValueError, match=f"fixed-size sampling has no price under {relation}.*use relation"):
                pairs.of(FixedSize(5, 1, Gaussian(3.0)), relation, Kind.REMOVE)
        with pytest.raises(ValueError, match="unknown event 'x'"):
            pairs.of("x", Relation.ADD_REMOVE, Kind.REMOVE)  # type: ignore[arg-type]
