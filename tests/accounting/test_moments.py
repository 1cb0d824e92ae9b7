"""The moments accountant of Abadi et al., three ways."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting import exact, moments, pld, rdp
from dpgrad.accounting.events import NOTHING, Compose, Event, FixedSize, Gaussian, Poisson, Relation, Repeat, Shuffle
from dpgrad.accounting.guarantee import Guarantee

Accountant = Callable[..., moments.MomentsProfile]
VALID: list[Accountant] = [moments.account, moments.closed]
ALL: list[Accountant] = [*VALID, moments.asymptotic]
RATES = st.floats(1e-4, 0.99)
NOISES = st.floats(0.3, 30.0)
DELTAS = st.floats(1e-12, 1e-2)
STEPS = st.integers(1, 10_000)


def run(rate: float, noise: float, steps: int) -> Event:
    return Repeat(Poisson(rate, Gaussian(noise)), steps)


@pytest.mark.parametrize("price", VALID)
class TestReferenceValues:
    def test_case_a(self, price: Accountant) -> None:
        assert round(price(run(0.01, 4.0, 10_000)).epsilon(1e-5), 7) == 1.2585747  # the paper prints 1.26

    @pytest.mark.parametrize(
        ("rate", "steps", "epsilon", "noise"), [(512 / 60_000, 2343, 3, 1.01056), (1024 / 50_000, 1953, 2, 2.41658)]
    )
    def test_cases_b_and_d(self, price: Accountant, rate: float, steps: int, epsilon: float, noise: float) -> None:
        assert price(run(rate, noise + 5e-6, steps)).epsilon(1e-5) <= epsilon
        assert price(run(rate, noise - 5e-6, steps)).epsilon(1e-5) > epsilon


class TestMoments:
    @given(RATES, NOISES)
    @settings(max_examples=40)
    def test_integrals_equal_the_binomial_sum(self, rate: float, noise: float) -> None:
        event = Poisson(rate, Gaussian(noise))
        integrated, summed = moments.account(event).log_moments, moments.closed(event).log_moments
        np.testing.assert_allclose(integrated, summed, rtol=1e-8)

    def test_tiny_rates_keep_their_digits(self) -> None:
        found = moments.closed(Poisson(1e-9, Gaussian(1.0))).log_moments
        assert found[0] == pytest.approx(1e-18 * math.expm1(1.0), rel=1e-12)
        np.testing.assert_allclose(moments.account(Poisson(1e-9, Gaussian(1.0))).log_moments, found, rtol=1e-5)

    @pytest.mark.parametrize("moment", [1, 7, 32])
    def test_both_expectations_with_many_digits(self, moment: int) -> None:
        with mpmath.workdps(40):
            q, s = mpmath.mpf(0.05), mpmath.mpf(0.6)

            def mixture(g: mpmath.mpf) -> mpmath.mpf:
                return 1 - q + q * mpmath.exp(g / s - 1 / (2 * s * s))

            points = [mpmath.mpf(i) / 32 for i in range(-32 * 70, 32 * 70)]  # trapezoidal sums, finer than needed
            first = mpmath.fsum(mpmath.npdf(g) * mixture(g) ** -moment for g in points) / 32
            second = mpmath.fsum(mpmath.npdf(g) * mixture(g) ** (moment + 1) for g in points) / 32
            assert first < second
            worst = float(mpmath.log(second))
        found = moments.account(Poisson(0.05, Gaussian(0.6))).log_moments[moment - 1]
        assert found == pytest.approx(worst, rel=2e-12)

    def test_full_batch_is_a_parabola(self) -> None:
        moment = np.arange(1, 33)
        for price in VALID:
            found = price(Gaussian(3.0)).log_moments
            np.testing.assert_allclose(found, moment * (moment + 1) / 18, rtol=1e-12)

    def test_epsilon_is_that_of_the_best_moment(self) -> None:
        profile = moments.account(run(0.01, 4.0, 10_000))
        moment = 19
        assert profile.epsilon(1e-5) == (profile.log_moments[moment - 1] - math.log(1e-5)) / moment

    @given(RATES, NOISES, STEPS, DELTAS)
    @settings(max_examples=40)
    def test_delta_is_the_inverse_of_epsilon(self, rate: float, noise: float, steps: int, delta: float) -> None:
        for price in ALL:
            profile = price(run(rate, noise, steps))
            assert profile.delta(profile.epsilon(delta)) == pytest.approx(delta, rel=1e-6)
            assert 0 < profile.delta(1e6) <= profile.delta(0.0) <= 1


class TestLaws:
    @given(RATES, NOISES, STEPS, DELTAS, st.floats(1.0, 3.0))
    @settings(max_examples=40)
    def test_monotone(self, rate: float, noise: float, steps: int, delta: float, factor: float) -> None:
        for price in ALL:
            here = price(run(rate, noise, steps)).epsilon(delta)
            slack = 1 + 1e-9
            assert here >= 0
            assert price(run(rate, noise * factor, steps)).epsilon(delta) <= here * slack
            assert price(run(rate / factor, noise, steps)).epsilon(delta) <= here * slack
            assert price(run(rate, noise, math.ceil(steps * factor))).epsilon(delta) * slack >= here
            assert price(run(rate, noise, steps)).epsilon(min(delta * factor, 0.5)) <= here * slack

    @given(RATES, NOISES, st.integers(0, 6))
    @settings(max_examples=30)
    def test_repeat_is_compose(self, rate: float, noise: float, count: int) -> None:
        one = Compose((Poisson(rate, Gaussian(noise)), Poisson(rate, Gaussian(2 * noise))))
        for price in ALL:
            repeated, composed = price(Repeat(one, count)), price(Compose((one,) * count))
            np.testing.assert_allclose(repeated.log_moments, composed.log_moments, rtol=1e-12)
            assert repeated.epsilon(1e-5) == pytest.approx(composed.epsilon(1e-5), rel=1e-12)

    @given(NOISES, STEPS, DELTAS, st.sampled_from([Relation.ADD_REMOVE, Relation.REPLACE_ONE]))
    @settings(max_examples=50)
    def test_at_least_the_exact_one(self, noise: float, steps: int, delta: float, relation: Relation) -> None:
        event = Repeat(Gaussian(noise), steps)
        for price in VALID:
            assert price(event, relation).epsilon(delta) >= exact.account(event, relation).epsilon(delta)

    @given(RATES, NOISES, STEPS, DELTAS)
    @settings(max_examples=30)
    def test_at_least_the_best_of_all_orders(self, rate: float, noise: float, steps: int, delta: float) -> None:
        event = run(rate, noise, steps)
        assert moments.account(event).epsilon(delta) >= rdp.classic(event).epsilon(delta) * (1 - 1e-9)

    def test_steps_cost_nothing(self) -> None:
        for price in ALL:
            assert 0 < price(run(1e-6, 10.0, 10**9)).epsilon(1e-6) < 10

    def test_a_thousand_distinct_steps(self) -> None:
        event = Compose(tuple(Poisson(0.01, Gaussian(1 + t / 1000)) for t in range(1000)))
        integrated, summed = (price(event).epsilon(1e-5) for price in VALID)
        assert integrated == pytest.approx(summed, rel=1e-9)

    def test_nothing_is_free(self) -> None:
        for price in ALL:
            for event in (NOTHING, run(0.1, 1.0, 0), Poisson(0.0, Gaussian(1.0))):
                assert (price(event).epsilon(1e-5), price(event).delta(0.0)) == (0, 0)


class TestAsymptotic:
    def test_falls_below_the_truth(self) -> None:
        event = run(0.01, 0.5, 100)
        assert round(moments.asymptotic(event).epsilon(1e-5), 2) == 1.40
        lower = pld.account(event, precision=1e-3).interval(1e-5).lower
        assert lower == pytest.approx(6.48, abs=0.01)
        assert moments.asymptotic(event).epsilon(1e-5) < lower

    def test_is_no_guarantee(self) -> None:
        profile = moments.asymptotic(run(0.01, 4.0, 100))
        assert profile.accountant == "moments-asymptotic"
        with pytest.raises(ValueError, match="moments-asymptotic is a historical comparison"):
            Guarantee.of(profile, 1e-5)


LEAVES: list[Event] = [
    Gaussian(3.0),
    Poisson(0.1, Gaussian(3.0)),
    Poisson(1.0, Gaussian(3.0)),
    FixedSize(100, 10, Gaussian(3.0)),
    FixedSize(100, 100, Gaussian(3.0)),
    Shuffle(10, Gaussian(3.0)),
]


def refused(leaf: Event, relation: Relation, price: Accountant) -> bool:
    """What has no price under any accountant, or no form in this one."""
    if isinstance(leaf, FixedSize) and relation is not Relation.REPLACE_ONE:
        return True
    if isinstance(leaf, Shuffle) and relation is Relation.ADD_REMOVE:
        return True
    sampled = isinstance(leaf, Poisson | FixedSize) and leaf.sampling_rate < 1
    if price is moments.closed:
        return sampled and relation is Relation.REPLACE_ONE
    return price is moments.asymptotic and (not sampled or relation is Relation.REPLACE_ONE)


@pytest.mark.parametrize("price", ALL)
@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("leaf", LEAVES)
def test_every_leaf_and_relation_is_priced_or_refused(leaf: Event, relation: Relation, price: Accountant) -> None:
    if refused(leaf, relation, price):
        with pytest.raises(ValueError, match=rf"under {relation}.*: .*use "):
            price(leaf, relation)
        return
    profile = price(leaf, relation)
    assert 0 < profile.epsilon(1e-5) < 30
    if price is not moments.asymptotic:
        assert profile.epsilon(1e-5) >= pld.account(leaf, relation, precision=1e-2).interval(1e-5).lower
        assert Guarantee.of(profile, 1e-5).accountant == profile.accountant


def test_closed_has_no_form_for_replace_one() -> None:
    with pytest.raises(ValueError, match="moments-closed has no closed form for Poisson sampling under replace-one"):
        moments.closed(Poisson(0.1, Gaussian(1.0)), Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="has a form for Poisson sampling at a rate below 1"):
        moments.asymptotic(Gaussian(1.0))
