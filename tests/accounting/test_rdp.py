"""The Rényi accountant against printed values, 30-digit quadrature and dp-accounting."""

import math
from collections.abc import Callable, Sequence

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting import account, exact, moments, pld, rdp
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Poisson,
    Relation,
    Repeat,
    Shifted,
    Shuffle,
)
from dpgrad.accounting.guarantee import Guarantee, Profile
from dpgrad.accounting.pairs import Kind, Pair

RATES = st.floats(1e-4, 1.0)
NOISES = st.floats(0.3, 30.0)
DELTAS = st.floats(1e-12, 1e-2)
STEPS = st.integers(1, 10_000)


def run(rate: float, noise: float, steps: int) -> Event:
    return Repeat(Poisson(rate, Gaussian(noise)), steps)


def linear_schedule(steps: int) -> Event:
    return Compose(tuple(Poisson(0.01, Gaussian(min(2.0, 1 + t / steps))) for t in range(steps)))


def least_noise(price: Callable[[Event], Profile], rate: float, steps: int, epsilon: float) -> float:
    low, high = 0.5, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if price(run(rate, middle, steps)).epsilon(1e-5) > epsilon else (low, middle)
    return high


def published(leaf: FixedSize, steps: int, orders: Sequence[int]) -> RdpAccountant:
    """The bound of Wang, Balle and Kasiviswanathan (2019, Thm. 27), as dp-accounting computes it."""
    peer = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    half = dp_accounting.GaussianDpEvent(leaf.event.noise_multiplier / 2)  # in units of the sensitivity
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(leaf.dataset_size, leaf.batch_size, half)
    peer.compose(dp_accounting.SelfComposedDpEvent(sampled, steps))
    return peer


def quadrature(kind: Kind, rate: float, noise: float, c: float) -> float:
    """K(c) with 30 digits: a trapezoidal sum several times finer than rounding needs."""
    with mpmath.workdps(30):
        q, s, t = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.mpf(c)

        def mixture(g: mpmath.mpf) -> mpmath.mpf:
            return 1 - q + q * mpmath.exp(g / s - 1 / (2 * s * s))

        def integrand(g: mpmath.mpf) -> mpmath.mpf:
            match kind:
                case Kind.REMOVE:
                    value = mixture(g) ** (1 + t)
                case Kind.ADD:
                    value = mixture(g) ** -t
                case _:
                    value = mixture(g) ** (1 + t) * mixture(-g) ** -t
            return value * mpmath.npdf(g)

        step = min(s, 1) / 16
        first, last = int((-14 - t / s) / step), int((14 + (1 + 2 * t) / s) / step)
        return float(mpmath.log(step * mpmath.fsum(integrand(step * i) for i in range(first, last + 1))))


class TestReferenceValues:
    def test_case_a(self) -> None:
        profile = rdp.account(run(0.01, 4.0, 10_000))
        assert round(profile.epsilon(1e-5), 7) == 1.0353840
        assert round(profile.best_order(1e-5), 2) == 17.22

    @pytest.mark.parametrize(
        ("rate", "steps", "epsilon", "noise"), [(512 / 60_000, 2343, 3, 0.93761), (1024 / 50_000, 1953, 2, 2.10774)]
    )
    def test_cases_b_and_d(self, rate: float, steps: int, epsilon: float, noise: float) -> None:
        assert round(least_noise(rdp.account, rate, steps, epsilon), 5) == noise

    @pytest.mark.parametrize(("steps", "epsilon"), [(1000, 1.393651), (10_000, 3.926040)])
    def test_case_g_of_distinct_noise(self, steps: int, epsilon: float) -> None:
        assert round(rdp.account(linear_schedule(steps)).epsilon(1e-5), 6) == epsilon

    def test_trap_fractional_orders_near_one(self) -> None:
        """A peer finds no value below order 1.6 here and reports 64.5."""
        profile = rdp.account(run(0.05, 0.6, 2000))
        assert round(profile.epsilon(1e-5), 1) == 59.7
        c = profile.best_order(1e-5) - 1
        assert c < 0.6
        expected = (2000 * quadrature(Kind.REMOVE, 0.05, 0.6, c) - math.log(1e-5) - math.log1p(c)) / c
        assert profile.epsilon(1e-5) == pytest.approx(expected + math.log(c / (1 + c)), rel=1e-10)

    def test_trap_replace_one_moves_by_two_clips(self) -> None:
        """A peer forgets the factor 2: 2.17 at σ = 2, where the truth is 4.38."""
        profile = rdp.account(Gaussian(2.0), Relation.REPLACE_ONE)
        assert round(exact.account(Gaussian(2.0), Relation.REPLACE_ONE).epsilon(1e-5), 2) == 4.38
        assert profile.epsilon(1e-5) == rdp.account(Gaussian(1.0)).epsilon(1e-5) > 4.38
        sampled = rdp.account(run(0.01, 4.0, 10_000), Relation.REPLACE_ONE).epsilon(1e-5)
        assert 1.9931201 < sampled < 2.2  # the antipodal pair; add/remove is 1.04

    def test_fixed_size_at_case_b(self) -> None:
        """The published bound gives 61.8; the pair that dominates, 31.9; the truth is at most 28.7."""
        leaf = FixedSize(60_000, 512, Gaussian(0.8916415))
        assert round(published(leaf, 2343, range(2, 65)).get_epsilon(1e-5), 1) == 61.8
        assert 28.7 < rdp.account(Repeat(leaf, 2343), Relation.REPLACE_ONE).epsilon(1e-5) < 32


class TestDivergence:
    @pytest.mark.parametrize("kind", [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL])
    @pytest.mark.parametrize(
        ("rate", "noise", "c"),
        [
            (0.05, 0.6, 0.05),
            (0.05, 0.6, 0.5),
            (0.01, 4.0, 16.22),
            (0.3, 0.3, 2.5),
            (0.9, 2.0, 30.0),
            (0.999, 5.0, 40.0),
        ],
    )
    def test_equals_quadrature_with_many_digits(self, kind: Kind, rate: float, noise: float, c: float) -> None:
        found = rdp.tilts([Pair(kind, rate, noise), Pair(kind, rate, 1.3 * noise)], c)[0, 0]
        truth = quadrature(kind, rate, noise, c)
        assert truth * (1 - 1e-14) <= found <= truth * (1 + 3e-12) + 1e-15

    def test_derivatives_are_those_of_the_value(self) -> None:
        some = [Pair(kind, 0.02, 1.1) for kind in Kind]
        below, here, above = (rdp.tilts(some, c) for c in (2.999, 3.0, 3.001))
        np.testing.assert_allclose(here[1], (above[0] - below[0]) / 0.002, rtol=1e-6)
        np.testing.assert_allclose(here[2], (above[1] - below[1]) / 0.002, rtol=1e-6)

    @given(RATES, NOISES, st.floats(0.01, 60.0))
    @settings(max_examples=60)
    def test_removing_a_row_is_the_worse_direction(self, rate: float, noise: float, c: float) -> None:
        remove, add = (rdp.tilts([Pair(kind, rate, noise)], c)[0, 0] for kind in (Kind.REMOVE, Kind.ADD))
        assert add <= remove * (1 + 1e-9) + 1e-15

    @pytest.mark.parametrize("order", [2, 3, 8, 40])
    @pytest.mark.parametrize(("size", "noise"), [(512, 0.9), (512, 4.0), (6000, 2.0), (30_000, 1.0)])
    def test_fixed_size_is_below_the_published_bound(self, size: int, noise: float, order: int) -> None:
        leaf = FixedSize(60_000, size, Gaussian(noise))
        bound = float(published(leaf, 1, [order]).rdp[0])
        assert rdp.account(leaf, Relation.REPLACE_ONE).divergence(order) <= bound

    @pytest.mark.parametrize("kind", Kind)
    def test_next_to_no_noise_is_bounded(self, kind: Kind) -> None:
        edge = 0.05 if kind is Kind.LARGER else 0.02
        sampled, bound = rdp.tilts([Pair(kind, 0.3, 1.001 * edge), Pair(kind, 0.3, 0.999 * edge)], 1.5)[0]
        assert sampled <= bound
        if kind is not Kind.ADD:
            assert bound <= sampled * 1.05
        for leaf in (Poisson(0.1, Gaussian(1e-6)), FixedSize(100, 10, Gaussian(0.02))):
            assert math.isfinite(rdp.account(leaf, Relation.REPLACE_ONE).epsilon(1e-5))

    @pytest.mark.parametrize("order", [1.0, 0.5, math.inf, math.nan])
    def test_orders_are_above_one(self, order: float) -> None:
        with pytest.raises(ValueError, match="order must be above 1"):
            rdp.account(Gaussian(1.0)).divergence(order)


class TestAgainstPeer:
    @pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
    @pytest.mark.parametrize(
        ("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.001, 0.7, 20_000), (0.1, 3.0, 500), (1.0, 5.0, 50)]
    )
    def test_agrees_on_fine_orders(self, rate: float, noise: float, steps: int, delta: float) -> None:
        profile = rdp.account(run(rate, noise, steps))
        best = profile.best_order(delta)
        peer = RdpAccountant(sorted({best, *np.linspace(max(1.2, 0.8 * best), 1.2 * best, 7)}))
        peer.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
        found, order = peer.get_epsilon_and_optimal_order(delta)
        assert order == pytest.approx(best, rel=0.1)
        # the peer's series for fractional orders is cut short: good to five digits
        assert profile.epsilon(delta) == pytest.approx(found, rel=1e-5)

    @pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.001, 0.7), (0.1, 3.0), (0.5, 10.0)])
    def test_agrees_at_whole_orders(self, rate: float, noise: float) -> None:
        orders = [2, 3, 17, 64, 500]
        peer = RdpAccountant(orders)
        peer.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)))
        found = [rdp.account(Poisson(rate, Gaussian(noise))).divergence(order) for order in orders]
        np.testing.assert_allclose(found, peer.rdp, rtol=1e-9)


class TestConversion:
    @given(RATES, NOISES, STEPS, DELTAS, st.floats(1.05, 80.0))
    @settings(max_examples=60)
    def test_the_order_found_is_best(self, rate: float, noise: float, steps: int, delta: float, order: float) -> None:
        for price, improved in ((rdp.account, True), (rdp.classic, False)):
            profile = price(run(rate, noise, steps))
            other = profile.divergence(order) - math.log(delta) / (order - 1)
            other += math.log1p(-1 / order) - math.log(order) / (order - 1) if improved else 0
            assert profile.epsilon(delta) <= max(other, 0) * (1 + 1e-9)

    @given(RATES, NOISES, STEPS, DELTAS)
    @settings(max_examples=60)
    def test_delta_is_the_inverse_of_epsilon(self, rate: float, noise: float, steps: int, delta: float) -> None:
        for price in (rdp.account, rdp.classic):
            profile = price(run(rate, noise, steps))
            epsilon = profile.epsilon(delta)
            assert epsilon >= 0
            if epsilon > 1e-6:
                assert profile.delta(epsilon) == pytest.approx(delta, rel=1e-5)
            else:
                assert profile.delta(epsilon) <= delta * (1 + 1e-5)

    def test_classic_is_named_and_larger(self) -> None:
        event = run(0.01, 4.0, 10_000)
        assert rdp.classic(event).accountant == "rdp-classic"
        assert rdp.classic(event).epsilon(1e-5) == pytest.approx(1.2583757, abs=1e-7)
        assert (
            moments.account(event).epsilon(1e-5) > rdp.classic(event).epsilon(1e-5) > rdp.account(event).epsilon(1e-5)
        )

    def test_tiny_epsilon_takes_large_orders_and_is_never_negative(self) -> None:
        profile = rdp.account(run(1e-3, 200.0, 10))
        assert profile.best_order(1e-9) > 1000
        assert 0 < profile.epsilon(1e-9) < 0.01
        assert rdp.account(run(1e-5, 50.0, 10)).epsilon(1e-3) == 0

    @pytest.mark.parametrize("epsilon", [0.0, 1e3, 1e6])
    def test_delta_is_a_bound_at_any_epsilon(self, epsilon: float) -> None:
        for price in (rdp.account, rdp.classic):
            assert 0 < price(run(0.01, 1.0, 100)).delta(epsilon) <= 1

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
    def test_delta_is_checked(self, delta: float) -> None:
        with pytest.raises(ValueError, match="delta must"):
            rdp.account(Gaussian(1.0)).epsilon(delta)

    def test_epsilon_is_checked(self) -> None:
        with pytest.raises(ValueError, match="epsilon must"):
            rdp.account(Gaussian(1.0)).delta(-0.1)


class TestLaws:
    """ε is monotone, counts are not lost, and the bound stays above the truth."""

    @given(RATES, NOISES, STEPS, DELTAS, st.floats(1.0, 3.0))
    @settings(max_examples=50)
    def test_monotone(self, rate: float, noise: float, steps: int, delta: float, factor: float) -> None:
        here = rdp.account(run(rate, noise, steps)).epsilon(delta)
        slack = 1 + 1e-9
        assert rdp.account(run(rate, noise * factor, steps)).epsilon(delta) <= here * slack
        assert rdp.account(run(rate / factor, noise, steps)).epsilon(delta) <= here * slack
        assert rdp.account(run(rate, noise, math.ceil(steps * factor))).epsilon(delta) * slack >= here
        assert rdp.account(run(rate, noise, steps)).epsilon(min(delta * factor, 0.5)) <= here * slack

    @given(RATES, NOISES, st.integers(0, 6), st.sampled_from(Relation))
    @settings(max_examples=40)
    def test_repeat_is_compose(self, rate: float, noise: float, count: int, relation: Relation) -> None:
        one = Compose((Poisson(rate, Gaussian(noise)), Gaussian(2 * noise)))
        for price in (rdp.account, rdp.classic):
            repeated, composed = price(Repeat(one, count), relation), price(Compose((one,) * count), relation)
            assert repeated.epsilon(1e-5) == composed.epsilon(1e-5)

    @given(NOISES, STEPS, DELTAS, st.sampled_from([Relation.ADD_REMOVE, Relation.REPLACE_ONE]))
    def test_at_least_the_exact_one(self, noise: float, steps: int, delta: float, relation: Relation) -> None:
        event = Repeat(Gaussian(noise), steps)
        truth = exact.account(event, relation).epsilon(delta)
        assert rdp.classic(event, relation).epsilon(delta) >= rdp.account(event, relation).epsilon(delta) >= truth

    @pytest.mark.parametrize(
        ("event", "relation"),
        [
            (run(0.01, 1.0, 1000), Relation.ADD_REMOVE),
            (run(0.01, 0.5, 1), Relation.ZERO_OUT),
            (run(0.3, 6.0, 200), Relation.REPLACE_ONE),
            (Repeat(FixedSize(1000, 50, Gaussian(3.0)), 100), Relation.REPLACE_ONE),
        ],
    )
    def test_above_the_certified_lower_bound_and_below_moments(self, event: Event, relation: Relation) -> None:
        lower = pld.account(event, relation, precision=1e-3).interval(1e-5).lower
        assert lower <= rdp.account(event, relation).epsilon(1e-5) <= moments.account(event, relation).epsilon(1e-5)

    def test_a_thousand_million_steps_cost_nothing(self) -> None:
        for count in (10**9, 10**12):
            assert 0 < rdp.account(run(1e-6, 10.0, count)).epsilon(1e-6) < 1e6

    def test_nothing_is_free(self) -> None:
        for event in (NOTHING, Repeat(Gaussian(1.0), 0), Poisson(0.0, Gaussian(1.0))):
            profile = rdp.account(event)
            assert (profile.epsilon(1e-5), profile.delta(0.0), profile.divergence(2.0)) == (0, 0, 0)


class TestEveryLeafAndRelation:
    @pytest.mark.parametrize("relation", Relation)
    @pytest.mark.parametrize(
        "leaf",
        [
            Gaussian(3.0),
            Poisson(0.1, Gaussian(3.0)),
            Poisson(1.0, Gaussian(3.0)),
            FixedSize(100, 10, Gaussian(3.0)),
            FixedSize(100, 100, Gaussian(3.0)),
            Shuffle(10, Gaussian(3.0)),
        ],
    )
    def test_is_priced_or_refused(self, leaf: Event, relation: Relation) -> None:
        fixed = isinstance(leaf, FixedSize) and relation is not Relation.REPLACE_ONE
        if fixed or (isinstance(leaf, Shuffle) and relation is Relation.ADD_REMOVE):
            with pytest.raises(ValueError, match="has no price under"):
                rdp.account(leaf, relation)
        else:
            guarantee = Guarantee.of(rdp.account(leaf, relation), 1e-5)
            assert 0 < guarantee.epsilon < 20
            assert guarantee.accountant == "rdp"


class TestOtherLeaves:
    """Purely private and shifted releases: closed forms against the definition, and never below the exact price."""

    @pytest.mark.parametrize("order", [1.01, 2.0, 7.5, 100.0])
    @pytest.mark.parametrize("epsilon", [1e-3, 0.5, 5.0])
    def test_pure_is_randomised_response(self, epsilon: float, order: float) -> None:
        with mpmath.workdps(40):
            e, a = mpmath.mpf(epsilon), mpmath.mpf(order)
            up = mpmath.exp(e) / (1 + mpmath.exp(e))
            truth = mpmath.log(up**a * (1 - up) ** (1 - a) + (1 - up) ** a * up ** (1 - a)) / (a - 1)
        profile = rdp.account(Approximate(epsilon, 0, Relation.ZERO_OUT), Relation.ZERO_OUT)
        assert profile.divergence(order) == pytest.approx(float(truth), rel=1e-6, abs=1e-13)
        assert profile.divergence(order) >= float(truth) * (1 - 1e-15)

    @pytest.mark.parametrize("order", [1.01, 2.0, 7.5, 100.0])
    @pytest.mark.parametrize("noise", [0.5, 3.0, 50.0])
    def test_shifted_is_the_positive_part(self, noise: float, order: float) -> None:
        c, mu = order - 1, 1 / noise
        with mpmath.workdps(30):
            normal = lambda x: mpmath.npdf(x, mpmath.mpf(mu) ** 2 / 2, mu)  # noqa: E731
            peak = mu**2 / 2 + c * mu**2
            inside = mpmath.quad(
                lambda x: mpmath.exp(c * x) * normal(x), [0, max(peak - 8 * mu, 0), max(peak, 0) + mu, peak + 12 * mu]
            )
            low = mpmath.ncdf(-mpmath.mpf(mu) / 2)
            truth = float(0.1 + mpmath.log(low + inside) / c)
        found = rdp.account(Shifted(0.1, Gaussian(noise)), Relation.ADD_REMOVE).divergence(order)
        assert found == pytest.approx(truth, rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize(
        "event",
        [
            Repeat(Approximate(0.1, 0, Relation.ZERO_OUT), 10),
            Repeat(Shifted(0.02, Gaussian(20.0)), 5),
            Compose((Approximate(0.3, 0, Relation.ZERO_OUT), Shifted(0.1, Gaussian(9.0)), Repeat(Gaussian(30.0), 7))),
        ],
        ids=["pure", "shifted", "both"],
    )
    def test_never_below_the_closed_form(self, event: Event) -> None:
        loose, tight = rdp.account(event, Relation.ZERO_OUT), exact.account(event, Relation.ZERO_OUT)
        for delta in (1e-3, 1e-9):
            # what is composed by a sum over subsets may itself be above the truth by a little
            assert tight.epsilon(delta) * 0.97 < loose.epsilon(delta) < 1.5 * tight.epsilon(delta)
            assert loose.delta(loose.epsilon(delta)) == pytest.approx(delta, rel=1e-3)

    def test_sampled_steps_compose_with_them(self) -> None:
        steps = run(0.01, 1.0, 100)
        both = rdp.account(Compose((steps, Approximate(0.5, 0, Relation.ADD_REMOVE))))
        assert rdp.account(steps).epsilon(1e-5) < both.epsilon(1e-5) < rdp.account(steps).epsilon(1e-5) + 0.5

    def test_a_leaf_that_may_fail_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match="accountant rdp has no price for a release that is private with delta above"
        ):
            rdp.account(Approximate(0.1, 1e-9, Relation.ZERO_OUT), Relation.ZERO_OUT)

    @pytest.mark.parametrize("accountant", ["moments", "moments-closed", "strong"])
    @pytest.mark.parametrize("leaf", [Approximate(0.1, 0, Relation.ADD_REMOVE), Shifted(0.1, Gaussian(9.0))])
    def test_accountants_that_cannot_refuse_by_name(self, accountant: str, leaf: Event) -> None:
        with pytest.raises(
            ValueError, match=f"{type(leaf).__name__} has no price by this accountant: use accountant pld"
        ):
            account(leaf, accountant=accountant)
