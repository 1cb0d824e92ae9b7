"""Strong composition: one form that holds, and the paper's, which does not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting import exact, historical, pld, rdp
from dpgrad.accounting.events import NOTHING, Compose, Event, FixedSize, Gaussian, Poisson, Relation, Repeat, Shuffle
from dpgrad.accounting.guarantee import Guarantee

RATES = st.floats(1e-4, 1.0)
NOISES = st.floats(0.3, 30.0)
DELTAS = st.floats(1e-12, 1e-2)
STEPS = st.integers(1, 10_000)
CASE_A = Repeat(Poisson(0.01, Gaussian(4.0)), 10_000)


def run(rate: float, noise: float, steps: int) -> Event:
    return Repeat(Poisson(rate, Gaussian(noise)), steps)


def one_step_truth(rate: float, noise: float, delta: float) -> float:
    """ε of one Poisson step: δ_remove(ε) = q·δ_Gauss(ε′) with e^{ε′} = (e^ε − 1 + q)/q."""
    base = exact.epsilon(1 / noise, delta / rate)
    return math.log(1 - rate + rate * math.exp(base))


class TestPrinted:
    def test_case_a_is_the_papers(self) -> None:
        assert round(historical.printed(CASE_A).epsilon(1e-5), 3) == 9.339  # the paper prints 9.34

    def test_falls_below_the_truth(self) -> None:
        step = Poisson(0.01, Gaussian(0.5))
        truth = one_step_truth(0.01, 0.5, 1e-5)
        assert round(truth, 4) == 3.0254
        assert 0.08 < historical.printed(step).epsilon(1e-5) < 0.4 < truth
        assert historical.account(step).epsilon(1e-5) == pytest.approx(truth, rel=1e-10)

    def test_is_no_guarantee(self) -> None:
        profile = historical.printed(CASE_A)
        assert profile.accountant == "strong-printed"
        with pytest.raises(ValueError, match="strong-printed is a historical comparison"):
            Guarantee.of(profile, 1e-5)

    def test_delta_is_the_inverse_of_epsilon(self) -> None:
        assert historical.printed(CASE_A).delta(9.339065243825392) == pytest.approx(1e-5, rel=1e-6)

    @pytest.mark.parametrize("leaf", [FixedSize(100, 10, Gaussian(1.0)), Shuffle(10, Gaussian(1.0))])
    def test_has_no_form_for_other_samplers(self, leaf: Event) -> None:
        with pytest.raises(ValueError, match="full-batch and Poisson sampling under add-remove or zero-out only"):
            historical.printed(leaf, Relation.ZERO_OUT)

    def test_has_no_form_for_replace_one(self) -> None:
        with pytest.raises(ValueError, match="got Poisson under replace-one: use accountant strong or pld"):
            historical.printed(Poisson(0.1, Gaussian(1.0)), Relation.REPLACE_ONE)


class TestValid:
    def test_case_a(self) -> None:
        """With the same halves of δ: what the theorem says, digit by digit."""
        base = exact.epsilon(1 / 4.0, 0.5e-5 / (10_000 * 0.01))
        one = math.log(1 + 0.01 * (math.exp(base) - 1))
        halves = one * math.sqrt(20_000 * math.log(2e5)) + 10_000 * one * (math.exp(one) - 1)
        found = historical.account(CASE_A).epsilon(1e-5)
        assert 0.9 * halves < found <= halves
        assert round(found, 3) == 16.847
        assert Guarantee.of(historical.account(CASE_A), 1e-5).accountant == "strong"

    @given(RATES, NOISES, STEPS, DELTAS, st.floats(1.0, 3.0))
    @settings(max_examples=40)
    def test_monotone(self, rate: float, noise: float, steps: int, delta: float, factor: float) -> None:
        for price in (historical.account, historical.printed):
            here = price(run(rate, noise, steps)).epsilon(delta)
            slack = 1 + 1e-9
            assert here >= 0
            assert price(run(rate, noise * factor, steps)).epsilon(delta) <= here * slack
            assert price(run(rate, noise, math.ceil(steps * factor))).epsilon(delta) * slack >= here
            assert price(run(rate, noise, steps)).epsilon(min(delta * factor, 0.5)) <= here * slack
            assert price(run(rate / factor, noise, steps)).epsilon(delta) <= here * slack

    @given(RATES, NOISES, st.integers(0, 6))
    @settings(max_examples=30)
    def test_repeat_is_compose(self, rate: float, noise: float, count: int) -> None:
        one = Compose((Poisson(rate, Gaussian(noise)), Gaussian(2 * noise)))
        for price in (historical.account, historical.printed):
            assert price(Repeat(one, count)).epsilon(1e-5) == price(Compose((one,) * count)).epsilon(1e-5)

    @given(NOISES, STEPS, DELTAS, st.sampled_from([Relation.ADD_REMOVE, Relation.REPLACE_ONE]))
    @settings(max_examples=40)
    def test_at_least_the_exact_one(self, noise: float, steps: int, delta: float, relation: Relation) -> None:
        event = Repeat(Gaussian(noise), steps)
        truth = exact.account(event, relation).epsilon(delta)
        assert historical.account(event, relation).epsilon(delta) >= truth * (1 - 1e-12)

    @given(RATES, NOISES, DELTAS)
    @settings(max_examples=40)
    def test_one_step_is_the_truth(self, rate: float, noise: float, delta: float) -> None:
        expected = one_step_truth(rate, noise, delta) if delta < rate else 0.0
        assert historical.account(run(rate, noise, 1)).epsilon(delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
    @pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.0, 100), (0.5, 20.0, 50), (0.05, 0.7, 3)])
    def test_above_the_certified_lower_bound(self, rate: float, noise: float, steps: int, relation: Relation) -> None:
        event = run(rate, noise, steps)
        lower = pld.account(event, relation, precision=1e-3).interval(1e-5).lower
        assert lower <= historical.account(event, relation).epsilon(1e-5)

    def test_fixed_size_moves_by_two_clips(self) -> None:
        leaf = FixedSize(1000, 50, Gaussian(4.0))
        found = historical.account(Repeat(leaf, 20), Relation.REPLACE_ONE).epsilon(1e-5)
        assert found == historical.account(run(0.05, 2.0, 20)).epsilon(1e-5)
        assert found >= pld.account(Repeat(leaf, 20), Relation.REPLACE_ONE, precision=1e-3).interval(1e-5).lower

    def test_delta_is_the_inverse_of_epsilon(self) -> None:
        for delta in (1e-9, 1e-3):
            profile = historical.account(run(0.01, 2.0, 500))
            assert profile.delta(profile.epsilon(delta)) == pytest.approx(delta, rel=1e-6)
        assert historical.account(Gaussian(0.1)).delta(0.0) == pytest.approx(1, rel=1e-4)
        assert 0 < historical.account(Gaussian(10.0)).delta(1e4) <= 1e-299

    def test_a_schedule_of_many_distinct_steps_loses_a_thousandth(self) -> None:
        few, many = (
            Compose(tuple(Poisson(0.01, Gaussian(4 + t / n)) for t in range(n) for _ in range(2000 // n)))
            for n in (500, 2000)
        )
        one, other = historical.account(few).epsilon(1e-5), historical.account(many).epsilon(1e-5)
        assert other == pytest.approx(one, rel=5e-3)
        assert other > rdp.account(many).epsilon(1e-5)

    def test_steps_cost_nothing(self) -> None:
        assert 0 < historical.account(run(1e-6, 10.0, 10**9)).epsilon(1e-6) < math.inf

    def test_losses_beyond_the_exponential_are_added_up(self) -> None:
        assert historical.account(run(0.5, 0.02, 3)).epsilon(1e-5) < 3 * 2000

    def test_nothing_is_free(self) -> None:
        for price in (historical.account, historical.printed):
            for event in (NOTHING, run(0.1, 1.0, 0), Poisson(0.0, Gaussian(1.0))):
                assert (price(event).epsilon(1e-5), price(event).delta(0.0)) == (0, 0)


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
def test_every_leaf_and_relation_is_priced_or_refused(leaf: Event, relation: Relation) -> None:
    fixed = isinstance(leaf, FixedSize) and relation is not Relation.REPLACE_ONE
    if fixed or (isinstance(leaf, Shuffle) and relation is Relation.ADD_REMOVE):
        with pytest.raises(ValueError, match="has no price under"):
            historical.account(leaf, relation)
    else:
        assert 0 < historical.account(leaf, relation).epsilon(1e-5) < 30


@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 1.0, 29.9, 30.1, 700.0, 1e5])
def test_amplification_keeps_its_digits(epsilon: float) -> None:
    for rate in (1e-300, 1e-9, 0.3, 1.0):
        found = historical.amplified(epsilon, rate)
        assert found <= epsilon * (1 + 1e-15)
        if epsilon < 600:
            assert found == pytest.approx(math.log1p(rate * math.expm1(epsilon)), rel=1e-13)
