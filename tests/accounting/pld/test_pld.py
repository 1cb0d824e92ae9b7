"""The certified accountant: reference values, an independent oracle, peers, and the laws every ε obeys."""

import math
import random
from typing import Any

import dp_accounting
import oracle
import pytest
from benchmarks.conformance import side
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting import calibrate, exact, pld
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Leaf,
    Poisson,
    Relation,
    Repeat,
    Shifted,
    Shuffle,
    grouped,
)
from dpgrad.accounting.pld import DeltaAt, EpsilonAt, Interval
from thinned import thinned

ORACLE_ERROR = 1e-9  # relative; what the oracle claims of itself, and all that is forgiven
RATE_B, RATE_D = 512 / 60_000, 1024 / 50_000


def run(rate: float, noise: float, steps: int) -> Event:
    return Repeat(Poisson(rate, Gaussian(noise)), steps)


def linear_schedule(steps: int) -> Event:
    """Case G: σ_t = min(2, 1 + t/T)."""
    return Compose(tuple(Poisson(0.01, Gaussian(min(2.0, 1 + t / steps))) for t in range(steps)))


ADD_REMOVE, ZERO_OUT, REPLACE_ONE = Relation
CASE_A, CASE_B, CASE_D = run(0.01, 4.0, 10_000), run(RATE_B, 0.8916415, 2343), run(RATE_D, 1.9686454, 1953)
# Reference values: event, relation, ε at δ = 1e-5, and half a unit of its last printed digit
REFERENCE = {
    "A": (CASE_A, ADD_REMOVE, 0.9468668008, 0.6e-10),
    "B": (CASE_B, ADD_REMOVE, 3.0, 2.5e-7),  # σ is printed to 5e-8, dε/dσ is about -4.5
    "D": (CASE_D, ADD_REMOVE, 2.0, 1e-7),
    "H small": (Repeat(Gaussian(1.0), 2), ADD_REMOVE, 6.5729700670, 0.6e-10),
    "H large": (Repeat(Gaussian(8.0), 8), ADD_REMOVE, 1.3564673645, 0.6e-10),
    "I at A": (CASE_A, REPLACE_ONE, 1.9931201, 0.6e-7),
    "I at B": (CASE_B, REPLACE_ONE, 4.5994279, 3e-7),
}


class TestReferenceValues:
    @pytest.mark.parametrize("case", REFERENCE)
    def test_homogeneous_cases_to_their_printed_digits(self, case: str) -> None:
        event, relation, truth, last = REFERENCE[case]
        profile = pld.account(event, relation)
        interval = profile.interval(1e-5)
        assert profile.estimate(1e-5) == pytest.approx(truth, abs=last)
        assert interval.estimate == pytest.approx(truth, abs=last)
        assert interval.lower - last <= truth <= interval.upper + last
        assert interval.upper == profile.epsilon(1e-5)
        assert (interval.upper - interval.lower) / truth <= 1e-4  # the asked-for relative gap

    @pytest.mark.parametrize(("direction", "truth"), [("remove", 0.9468668008), ("add", 0.9370364254)])
    def test_case_a_in_both_directions(self, direction: str, truth: float) -> None:
        one, question = side([(0.01, 4.0, 10_000)], direction), EpsilonAt(1e-5)
        assert one.estimate(question) == pytest.approx(truth, abs=0.6e-10)
        assert one.lower(question, 2e-5) <= truth <= one.upper(question, 2e-5)

    def test_the_worse_direction_is_reported(self) -> None:
        worse = pld.account(CASE_A).interval(1e-5)
        assert worse.lower > 0.9370364254
        assert worse.estimate == pytest.approx(0.9468668008, abs=0.6e-10)

    @pytest.mark.parametrize(
        ("rate", "steps", "epsilon", "noise"), [(RATE_B, 2343, 3.0, 0.8916415), (RATE_D, 1953, 2.0, 1.9686454)]
    )
    def test_noise_of_cases_b_and_d(self, rate: float, steps: int, epsilon: float, noise: float) -> None:
        """The printed σ, to its last digit, is where the estimate crosses the target."""
        below, above = (pld.account(run(rate, noise + d, steps)).estimate(1e-5) for d in (-0.6e-7, 0.6e-7))
        assert above < epsilon < below
        found = calibrate.noise_multiplier(lambda z: run(rate, z, steps), epsilon=epsilon, delta=1e-5)
        assert noise <= found <= noise * (1 + 1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("steps", "truth"), [(1000, 1.073270850), pytest.param(10_000, 3.609786679, marks=pytest.mark.exhaustive)]
    )
    def test_case_g_of_distinct_noise(self, steps: int, truth: float) -> None:
        profile = pld.account(linear_schedule(steps))
        interval = profile.interval(1e-5)
        assert profile.estimate(1e-5) == pytest.approx(truth, abs=0.6e-9)
        assert interval.lower <= truth <= interval.upper
        assert (interval.upper - interval.lower) / truth <= 1e-3

    @pytest.mark.slow
    def test_case_g_of_a_hundred_steps(self) -> None:
        """Too few steps for the contour: narrow bounds find it alone."""
        interval = pld.account(linear_schedule(100), precision=1e-6).interval(1e-5)
        assert interval.lower <= 0.407809735 <= interval.upper
        assert (interval.upper - interval.lower) / 0.407809735 < 1e-5
        assert interval.estimate == pytest.approx(0.407809735, rel=3e-6)

    def test_tiny_rate_and_many_steps(self) -> None:
        """The printed 0.04527 is a peer's pessimistic value at a grid of 1e-6; two routes of the oracle agree on:"""
        interval = pld.account(run(1e-5, 1.0, 1_000_000)).interval(1e-6)
        assert interval.lower <= 0.04524404197 <= interval.upper
        assert (interval.upper - interval.lower) / 0.04524404197 < 5e-4

    def test_fixed_size_and_shuffled_batches(self) -> None:
        """Case J and §4: the dominating pair above, concrete neighbours below, and the room between them told."""
        fixed = pld.account(Repeat(FixedSize(60_000, 512, Gaussian(0.8916415)), 2343), REPLACE_ONE).interval(1e-5)
        assert round(fixed.upper, 1) == 28.7
        assert 25.1 < fixed.lower < fixed.upper  # the remove curve alone at 2C is 25.13
        for relation, upper in ((Relation.ZERO_OUT, 33.2), (REPLACE_ONE, 92.3)):
            shuffled = pld.account(Repeat(Shuffle(117, Gaussian(0.8916415)), 20), relation).interval(1e-5)
            assert round(shuffled.upper, 1) == upper
            assert 0 == shuffled.lower < shuffled.upper


class TestOracle:
    """Bounds contain an independent high-precision value, every time; `python -m benchmarks.conformance` runs more."""

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [74, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (73, 78, 80))])
    def test_random_settings(self, seed: int) -> None:
        for steps, direction, delta, truth in oracle.random_cases(seed, 10, max_convolutions=3):
            one, question = side(steps, direction), EpsilonAt(delta)
            lower, upper = one.lower(question, 2e-5), one.upper(question, 2e-5)
            setting = (steps[:2], len(steps), direction, delta, truth)
            assert lower <= truth * (1 + ORACLE_ERROR), setting
            assert upper >= truth * (1 - ORACLE_ERROR), setting
            assert (upper - lower) / truth < 0.02, setting
            estimate = one.estimate(question)
            assert estimate is None or estimate == pytest.approx(truth, rel=1e-6), setting

    @pytest.mark.parametrize(
        ("rate", "noise", "steps", "direction", "delta"),
        thinned(
            [(0.01, 0.5, 1), (0.3, 0.3, 1), (1e-5, 1.0, 1), (0.9, 5.0, 1), (0.2, 1.0, 2)],
            oracle.DIRECTIONS,
            [1e-3, 1e-6, 1e-15],
            pairs=True,
        ),
    )
    def test_few_steps(self, rate: float, noise: float, steps: int, direction: str, delta: float) -> None:
        case = [(rate, noise, steps)]
        truth, one, question = oracle.epsilon(case, delta, direction), side(case, direction), EpsilonAt(delta)
        lower, upper = one.lower(question, 2e-5), one.upper(question, 2e-5)
        assert lower <= truth * (1 + ORACLE_ERROR)
        assert truth * (1 - ORACLE_ERROR) <= upper <= truth * 1.05 + 1e-9

    @pytest.mark.parametrize("direction", oracle.DIRECTIONS)
    @pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
    def test_delta(self, direction: str, epsilon: float) -> None:
        case = [(0.02, 1.1, 500), (0.05, 2.0, 100)]
        truth, one, question = oracle.delta(case, epsilon, direction), side(case, direction), DeltaAt(epsilon)
        lower, upper = one.lower(question, 2e-5), one.upper(question, 2e-5)
        assert lower <= truth * (1 + ORACLE_ERROR)
        assert truth * (1 - ORACLE_ERROR) <= upper <= truth * 1.01
        assert one.estimate(question) == pytest.approx(truth, rel=1e-6)

    @pytest.mark.parametrize("delta", [1e-30, 1e-100, 1e-250])
    def test_far_below_what_anyone_asks(self, delta: float) -> None:
        """One step has a closed form at any δ."""
        case = [(0.05, 1.0, 1)]
        truth, one = oracle.epsilon(case, delta, "remove"), side(case, "remove")
        assert one.lower(EpsilonAt(delta), 2e-5) <= truth * (1 + ORACLE_ERROR)
        assert truth * (1 - ORACLE_ERROR) <= one.upper(EpsilonAt(delta), 2e-5) <= truth * 1.01


class TestAgainstPeer:
    @pytest.mark.parametrize(
        ("rate", "noise", "steps", "grid"),
        [(0.01, 4.0, 10_000, 1e-5), (RATE_B, 0.8916415, 2343, 5e-5), (0.1, 3.0, 100, 5e-5)],
    )
    def test_fine_pld(self, rate: float, noise: float, steps: int, grid: float) -> None:
        """A peer's pessimistic value is an upper bound here: never below our lower bound, and near."""
        peer = PLDAccountant(value_discretization_interval=grid)
        peer.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
        for delta in (1e-3, 1e-5, 1e-8):
            found, interval = peer.get_epsilon(delta), pld.account(run(rate, noise, steps)).interval(delta)
            assert found >= interval.lower
            assert found == pytest.approx(interval.upper, rel=1e-3)

    @pytest.mark.parametrize(
        ("rate", "noise", "steps"), [(0.01, 4.0, 10_000), (RATE_B, 0.8916415, 2343), (1.0, 9.0, 50)]
    )
    def test_rdp_is_a_little_above(self, rate: float, noise: float, steps: int) -> None:
        peer = RdpAccountant()
        peer.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
        for delta in (1e-3, 1e-5, 1e-8):
            interval = pld.account(run(rate, noise, steps)).interval(delta)
            assert interval.upper < peer.get_epsilon(delta) < 1.25 * interval.upper

    def test_replace_one_full_batch(self) -> None:
        peer = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
        peer.compose(dp_accounting.GaussianDpEvent(10.0), 20)
        found = pld.account(Repeat(Gaussian(10.0), 20), REPLACE_ONE).epsilon(1e-6)
        assert peer.get_epsilon(1e-6) == pytest.approx(found, rel=1e-3)


RATES = st.floats(1e-4, 0.5)
NOISES = st.floats(0.5, 20.0)
STEPS = st.integers(1, 5000)
DELTAS = st.floats(-12.0, -2.0).map(lambda x: 10**x)


def bounds(event: Event, delta: float, relation: Relation = ADD_REMOVE) -> Interval:
    return pld.account(event, relation, precision=1e-3).interval(delta)


class TestLaws:
    @pytest.mark.slow
    @given(RATES, NOISES, STEPS, DELTAS, st.floats(1.0, 3.0), st.sampled_from([ADD_REMOVE, REPLACE_ONE]))
    @settings(max_examples=12)
    def test_monotone(
        self, rate: float, noise: float, steps: int, delta: float, factor: float, relation: Relation
    ) -> None:
        """No certified lower bound of less exceeds a certified upper bound of more, nor do the estimates."""
        here = bounds(run(rate, noise, steps), delta, relation)
        assert here.lower <= here.estimate <= here.upper
        for less in (
            bounds(run(rate, noise * factor, steps), delta, relation),
            bounds(run(rate / factor, noise, steps), delta, relation),
            bounds(run(rate, noise, math.ceil(steps / factor)), delta, relation),
            bounds(run(rate, noise, steps), min(delta * factor, 0.5), relation),
        ):
            assert less.lower <= here.upper
            assert less.upper <= here.upper * (1 + 3e-3) + 1e-9
            assert less.estimate <= here.estimate * (1 + 1e-3) + 1e-9

    @given(RATES, NOISES, STEPS, DELTAS)
    @settings(max_examples=15)
    def test_delta_and_epsilon_tell_one_story(self, rate: float, noise: float, steps: int, delta: float) -> None:
        profile = pld.account(run(rate, noise, steps), precision=1e-3)
        epsilon = profile.interval(delta)
        assert profile.delta_interval(epsilon.upper).lower <= delta
        if epsilon.lower > 0:
            assert profile.delta_interval(epsilon.lower).upper >= delta

    LEAVES = st.sampled_from(
        [Gaussian(20.0), Poisson(0.01, Gaussian(1.0)), Poisson(0.02, Gaussian(1.5)), Poisson(0.0, Gaussian(1.0))]
    )

    @given(st.lists(LEAVES, min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(1, 40))
    @settings(max_examples=15)
    def test_regrouping_changes_nothing(self, steps: list[Leaf], shuffle: random.Random, count: int) -> None:
        plain = pld.account(Repeat(Compose(tuple(steps)), count), precision=1e-3).epsilon(1e-6)
        permuted = shuffle.sample(steps, len(steps))
        cut = shuffle.randint(0, len(steps))
        for same in (
            Compose((Compose(tuple(permuted)),) * count),
            Compose((Repeat(grouped(permuted[:cut]), count), Repeat(Repeat(grouped(permuted[cut:]), 1), count))),
            grouped(sorted(steps * count, key=repr)),
            Compose((NOTHING, Repeat(Compose(tuple(permuted)), count), Repeat(Gaussian(1.0), 0))),
        ):
            assert pld.account(same, precision=1e-3).epsilon(1e-6) == pytest.approx(plain, rel=1e-12)

    @given(RATES, NOISES, st.integers(0, 300), st.sampled_from([ADD_REMOVE, Relation.ZERO_OUT, REPLACE_ONE]))
    @settings(max_examples=15)
    def test_repeat_is_compose(self, rate: float, noise: float, count: int, relation: Relation) -> None:
        one = Poisson(rate, Gaussian(noise))
        repeated, composed = (
            pld.account(e, relation, precision=1e-3) for e in (Repeat(one, count), Compose((one,) * count))
        )
        assert repeated.epsilon(1e-5) == composed.epsilon(1e-5)

    @given(RATES, NOISES, STEPS, DELTAS)
    @settings(max_examples=10)
    def test_zero_out_costs_what_add_remove_does(self, rate: float, noise: float, steps: int, delta: float) -> None:
        event = Compose((run(rate, noise, steps), Gaussian(10 * noise)))
        assert bounds(event, delta) == bounds(event, delta, Relation.ZERO_OUT)

    @pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.3, 8.0, 50), (1e-3, 0.6, 20_000)])
    def test_replacing_costs_between_one_and_two_changes(self, rate: float, noise: float, steps: int) -> None:
        once, replaced = (bounds(run(rate, noise, steps), 1e-6, r) for r in (ADD_REMOVE, REPLACE_ONE))
        assert once.upper < replaced.lower
        twice = bounds(run(rate, noise / 2, steps), 1e-6)  # not a bound in general, but the order of size
        assert replaced.upper < 2 * twice.upper + 1

    def test_a_full_batch_step_among_sampled_ones(self) -> None:
        """Merged Gaussians and sampled steps compose as one: against the oracle."""
        event = Compose((run(0.02, 1.2, 400), Repeat(Gaussian(10.0), 5), Poisson(1.0, Gaussian(6.0))))
        case = [(0.02, 1.2, 400), (1.0, 10.0, 5), (1.0, 6.0, 1)]
        truth = max(oracle.epsilon(case, 1e-6, direction) for direction in ("remove", "add"))
        interval = pld.account(event).interval(1e-6)
        assert interval.lower <= truth <= interval.upper
        assert interval.estimate == pytest.approx(truth, rel=1e-8)

    def test_more_precision_narrows(self) -> None:
        coarse, fine = (pld.account(CASE_B, precision=p).interval(1e-5) for p in (1e-3, 1e-6))
        assert coarse.lower < fine.lower <= 3.0000001
        assert 2.9999999 <= fine.upper < coarse.upper
        assert fine.upper - fine.lower < 2e-5

    @pytest.mark.parametrize("relation", Relation)
    def test_nothing_is_free(self, relation: Relation) -> None:
        for event in (NOTHING, Repeat(Gaussian(1.0), 0), run(0.1, 1.0, 0), run(0.0, 1.0, 100)):
            profile = pld.account(event, relation)
            assert profile.interval(1e-5) == (0, 0, 0)
            assert profile.delta_interval(0.0) == (0, 0, 0)
            assert profile.estimate(1e-5) == 0

    def test_steps_cost_nothing(self) -> None:
        """No loop over a billion equal steps would end; they are nearly a Gaussian with μ² = Tq²(e^{1/σ²} − 1)."""
        steps = 10**9
        found = pld.account(run(1e-5, 1.0, steps)).epsilon(1e-5)
        assert found == pytest.approx(exact.epsilon(1e-5 * math.sqrt(steps * math.expm1(1.0)), 1e-5), rel=0.01)

    def test_a_delta_that_is_met_for_nothing(self) -> None:
        assert pld.account(run(1e-4, 10.0, 10)).interval(0.1) == (0, 0, 0)


class TestRefusals:
    @staticmethod
    def refused(call: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match) as error:
            call()
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("delta", [0, 1, 2, -1e-9, math.nan, math.inf, True, None, "1e-5", 1e-300])
    def test_delta(self, delta: Any) -> None:
        profile = pld.account(CASE_A)
        for ask in (profile.epsilon, profile.interval, profile.estimate):
            self.refused(lambda ask=ask: ask(delta), "delta must")

    @pytest.mark.parametrize("epsilon", [-1e-9, math.nan, math.inf, True, None, "1"])
    def test_epsilon(self, epsilon: Any) -> None:
        profile = pld.account(CASE_A)
        for ask in (profile.delta, profile.delta_interval):
            self.refused(lambda ask=ask: ask(epsilon), "epsilon must")

    @pytest.mark.parametrize("precision", [0, -1e-5, math.nan, math.inf, True])
    def test_precision(self, precision: Any) -> None:
        self.refused(lambda: pld.account(CASE_A, precision=precision), "precision must")

    def test_more_steps_than_can_be_certified(self) -> None:
        for steps in (10**9 + 1, 10**12):
            self.refused(lambda steps=steps: pld.account(run(1e-6, 1.0, steps)), "steps must be at most 1,000,000,000")
        self.refused(lambda: pld.account(Repeat(run(1e-6, 1.0, 10**6), 10**6)), "steps must be at most 1,000,000,000")

    def test_a_thousand_million_steps_are_priced(self) -> None:
        interval = pld.account(run(1e-6, 10.0, 10**9)).interval(1e-6)
        assert interval.lower <= interval.estimate <= interval.upper < 1

    def test_full_batches_have_no_limit(self) -> None:
        assert pld.account(Repeat(Gaussian(1e6), 10**12)).epsilon(1e-5) == pld.account(Gaussian(1.0)).epsilon(1e-5)

    def test_samplers_without_a_price(self) -> None:
        self.refused(lambda: pld.account(Shuffle(10, Gaussian(1.0))), "shuffle has no price under add-remove")
        leaf = Repeat(FixedSize(100, 10, Gaussian(1.0)), 5)
        for relation in (ADD_REMOVE, Relation.ZERO_OUT):
            self.refused(lambda r=relation: pld.account(leaf, r), f"fixed-size sampling has no price under {relation}")

    def test_what_is_no_event(self) -> None:
        self.refused(lambda: pld.account("gaussian"), "unknown event 'gaussian'")  # type: ignore[arg-type]

    def test_what_is_no_relation(self) -> None:
        """A name that is no relation must never be priced as another one."""
        self.refused(lambda: pld.account(CASE_A, "swap"), "swap")  # type: ignore[arg-type]

    def test_a_relation_by_name_is_that_relation(self) -> None:
        """Priced as named or refused; never as add/remove, which would understate."""
        truth = pld.account(CASE_A, REPLACE_ONE).interval(1e-5).lower
        try:
            found = pld.account(CASE_A, "replace-one").epsilon(1e-5)  # type: ignore[arg-type]
        except ValueError:
            return
        assert found >= truth


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
def test_every_leaf_and_relation_is_priced_or_refused(leaf: Leaf, relation: Relation) -> None:
    fixed = isinstance(leaf, FixedSize) and relation is not REPLACE_ONE
    if fixed or (isinstance(leaf, Shuffle) and relation is ADD_REMOVE):
        with pytest.raises(ValueError, match="has no price under"):
            pld.account(leaf, relation)
    else:
        interval = pld.account(Repeat(leaf, 3), relation).interval(1e-5)
        assert 0 <= interval.lower <= interval.estimate <= interval.upper < 20
        assert interval.lower > 0 or isinstance(leaf, Shuffle)


EXTREMES = {
    "next to no noise": (run(0.01, 0.01, 10), 1e-5),
    "little noise": (run(0.01, 0.05, 10), 1e-5),
    "much noise": (run(0.5, 1e6, 10), 1e-9),
    "a rate next to nothing": (run(1e-12, 1.0, 10), 1e-15),
    "a rate next to one": (run(1 - 1e-12, 3.0, 10), 1e-5),
    "many steps of next to nothing": (run(1e-7, 4.0, 10**9), 1e-5),
    "small noise many steps": (run(1e-5, 0.3, 10**5), 1e-9),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_priced_or_refused_in_one_line(name: str) -> None:
    """Never a traceback, a warning or a bound on the wrong side of the other."""
    event, delta = EXTREMES[name]
    try:
        interval = pld.account(event, precision=1e-3).interval(delta)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert 0 <= interval.lower <= interval.estimate <= interval.upper


class TestOtherLeaves:
    """Approximate and shifted releases: in closed form with full batches, by adding up with sampled ones."""

    FULL = Compose((Approximate(0.2, 1e-7, ZERO_OUT), Shifted(0.1, Gaussian(20.0)), Repeat(Gaussian(9.0), 3)))

    def test_with_full_batches_it_is_the_closed_form(self) -> None:
        found, truth = pld.account(self.FULL, ZERO_OUT), exact.account(self.FULL, ZERO_OUT)
        assert found.accountant == "pld"
        assert found.epsilon(1e-5) == truth.epsilon(1e-5) == found.estimate(1e-5)
        assert found.delta(0.7) == truth.delta(0.7)
        assert found.interval(1e-5) == Interval(0.0, found.epsilon(1e-5), found.epsilon(1e-5))
        assert found.delta_interval(0.7).upper == found.delta(0.7)

    def test_with_sampled_steps_both_sides_add_up(self) -> None:
        steps, other = run(0.01, 1.0, 100), Approximate(0.5, 1e-6, ADD_REMOVE)
        both = pld.account(Compose((steps, other)), precision=1e-3)
        alone = pld.account(steps, precision=1e-3)
        assert both.epsilon(1e-5) <= alone.epsilon(4.5e-6) + 0.5
        assert both.epsilon(1e-5) >= alone.epsilon(9e-6) + 0.4
        assert both.delta(2.0) <= alone.delta(1.5) + 1.001e-6
        assert both.epsilon(1e-6) == math.inf
        assert both.delta(0.0) <= 1

    def test_another_relation_is_refused(self) -> None:
        with pytest.raises(ValueError, match="under zero-out has no price under replace-one"):
            pld.account(self.FULL, REPLACE_ONE)
