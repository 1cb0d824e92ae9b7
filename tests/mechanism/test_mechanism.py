"""The mechanism: what is run is what is accounted, at every step of every schedule."""

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from dpgrad.accounting import events, exact
from dpgrad.accounting.events import Gaussian, Relation, Repeat
from dpgrad.accounting.pld import PldProfile
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Group, Mechanism

positive = st.floats(0.05, 50.0)
horizon = st.integers(1, 80)
formulas = st.one_of(
    st.builds(schedules.constant, positive),
    st.builds(schedules.linear, positive, horizon),
    st.builds(schedules.affine, positive, horizon),
    st.builds(lambda start, ratio: schedules.geometric(start, ratio, start / 2), positive, st.floats(0.9, 1.0)),
    st.builds(lambda start, rate: schedules.arithmetic(start, rate * start, start / 2), positive, st.floats(0, 0.2)),
    st.builds(schedules.decay_then_hold, positive, positive, horizon),
    st.builds(schedules.cosine, positive, positive, horizon),
    st.builds(schedules.warmup, st.builds(schedules.cosine, positive, positive, horizon), horizon),
    st.builds(lambda b, v: schedules.piecewise([b], v), horizon, st.tuples(positive, positive)),
)


def test_every_formula_is_tested() -> None:
    made = {name for name in vars(schedules) if not name.startswith("_") and f"_{name}" in vars(schedules)}
    assert len(made) == 9, "give `formulas` one more"


groups = st.lists(st.tuples(positive, positive), max_size=4).map(
    lambda pairs: tuple(Group(f"layer{i}.*", *pair) for i, pair in enumerate(pairs))
)
samplers = st.one_of(
    st.builds(sampling.Poisson, st.floats(0, 1)),
    st.builds(
        sampling.Poisson, st.builds(lambda q, n: schedules.cosine(q, 0.0, n), st.floats(0.1, 1), st.integers(1, 99))
    ),
    st.just(sampling.FullBatch()),
    st.builds(sampling.FixedSize, st.just(100), st.integers(1, 100)),
    st.builds(sampling.Shuffle, st.just(100), st.integers(1, 100)),
)


def made(**fields: Any) -> Mechanism:
    """A mechanism; schedules and groups that together leave less noise than any event may have are passed over."""
    try:
        return Mechanism(**fields)
    except ValueError as error:
        if str(error).startswith("noise_multiplier must lie between"):
            reject()
        raise


mechanisms = st.builds(
    made,
    sampler=samplers,
    steps=st.integers(1, 60),
    noise_multiplier=positive,
    clip=positive | formulas,
    noise=positive | formulas,
    hold_noise=st.booleans(),
    relation=st.just(Relation.REPLACE_ONE),
    groups=groups,
    batch_size=st.none() | positive,
)
POISSON = Mechanism(sampling.Poisson(0.01), steps=1000, noise_multiplier=1.0)


def yu(steps: int, noise_multiplier: float = 1.0) -> Mechanism:
    """The run of Yu et al. (2018), Figure 2."""
    clip = schedules.linear(12.0, steps)
    return Mechanism(sampling.Poisson(0.01), steps, noise_multiplier, clip=clip, hold_noise=True)


class TestRealisedIsAccounted:
    """Pitfall 1: a schedule that changes one copy of the clip bound or of the noise and not the other."""

    @given(mechanisms)
    def test_std_over_clip_is_the_multiplier_at_every_step(self, mechanism: Mechanism) -> None:
        for t in range(mechanism.steps):
            ratios = [mechanism.std_at(t, g) / mechanism.clip_at(t, g) for g in mechanism.groups or [None]]
            assert mechanism.multiplier_at(t) == pytest.approx(events.group_multiplier(ratios), rel=1e-14)

    @given(mechanisms)
    def test_the_event_is_that_of_the_steps(self, mechanism: Mechanism) -> None:
        ledger = [mechanism.step_event(t) for t in range(mechanism.steps)]
        assert mechanism.event() == events.grouped(leaf for leaf in ledger if leaf != events.NOTHING)
        assert events.from_json(events.to_json(mechanism.event())) == mechanism.event()

    @given(mechanisms)
    def test_no_step_is_accounted_at_more_noise_than_it_gets(self, mechanism: Mechanism) -> None:
        span = mechanism.sampler.span
        charged = [e for t in range(mechanism.steps) if (e := mechanism.step_event(t)) != events.NOTHING]
        for t in range(mechanism.steps):
            leaf = charged[t // span]
            gaussian = leaf if isinstance(leaf, Gaussian) else leaf.event
            assert gaussian.noise_multiplier <= mechanism.multiplier_at(t)

    def test_noise_held_at_its_absolute_size(self) -> None:
        mechanism = yu(1000, 0.96)
        assert {mechanism.std_at(t) for t in range(1000)} == {0.96 * 12.0}
        assert mechanism.multiplier_at(0) == 0.96
        assert mechanism.multiplier_at(500) == pytest.approx(0.96 * 1.5)
        assert mechanism.with_steps(2000).multiplier_at(1999) == pytest.approx(0.96 * 2)

    def test_noise_follows_the_clip_bound_unless_held(self) -> None:
        mechanism = replace(yu(1000), hold_noise=False)
        assert mechanism.std_at(999) == mechanism.clip_at(999)
        assert mechanism.event() == POISSON.event()

    def test_scheduled_sampling_rate(self) -> None:
        rate = schedules.piecewise([2], [0.5, 0.25])
        event = Mechanism(sampling.Poisson(rate), 5, 1.0).event()
        leaves = {q: events.Poisson(q, Gaussian(1.0)) for q in (0.5, 0.25)}
        assert event == events.Compose((events.Repeat(leaves[0.5], 2), events.Repeat(leaves[0.25], 3)))


class TestGroups:
    def test_one_plain_group_is_no_group(self) -> None:
        assert replace(POISSON, groups=(Group("*"),)).event() == POISSON.event()

    def test_printed_bounds_and_noises_can_be_typed_in(self) -> None:
        """With clip and noise multiplier 1, a group's are absolute."""
        mechanism = Mechanism(sampling.FullBatch(), 1, 1.0, groups=(Group("a", 4.0, 3.0), Group("b", 0.5, 4.0)))
        a, b = mechanism.groups
        assert (mechanism.clip_at(0, a), mechanism.std_at(0, a)) == (4.0, 12.0)
        assert (mechanism.clip_at(0, b), mechanism.std_at(0, b)) == (0.5, 2.0)
        assert mechanism.multiplier_at(0) == pytest.approx(1 / math.sqrt(1 / 9 + 1 / 16))

    def test_a_group_must_be_named_and_known(self) -> None:
        mechanism = replace(POISSON, groups=(Group("a"), Group("b")))
        with pytest.raises(ValueError, match="group is required: this mechanism clips 2 groups, each by itself"):
            mechanism.clip_at(0)
        with pytest.raises(ValueError, match="group must be one of this mechanism's 2, got Group"):
            mechanism.std_at(0, Group("c"))
        with pytest.raises(ValueError, match="group must be one of this mechanism's 0"):
            POISSON.std_at(0, Group("a"))

    def test_each_parameter_has_one_group(self) -> None:
        mechanism = replace(POISSON, groups=(Group("conv*"), Group("*.bias")))
        assert mechanism.group_of("conv1.weight").pattern == "conv*"
        with pytest.raises(ValueError, match=r"'conv1.bias' must match one group, it matches groups 'conv\*', '\*"):
            mechanism.group_of("conv1.bias")
        with pytest.raises(ValueError, match=r"'fc.weight' must match one group, it matches no group"):
            mechanism.group_of("fc.weight")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("",), "pattern must be a non-empty string"),
            ((3,), "pattern must be a non-empty string"),
            (("a", 0.0), "clip of a group must be positive"),
            (("a", 1.0, math.nan), "noise_multiplier of a group must be a number, got nan"),
        ],
    )
    def test_bad_groups_are_refused(self, arguments: tuple[Any, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Group(*arguments)

    def test_patterns_differ(self) -> None:
        with pytest.raises(ValueError, match="groups must have different patterns"):
            replace(POISSON, groups=(Group("a"), Group("a", 2.0)))


class TestShuffle:
    MECHANISM = Mechanism(sampling.Shuffle(100, 30), 10, 1.0, relation=Relation.ZERO_OUT)

    def test_one_event_an_epoch_and_a_part_counts_whole(self) -> None:
        assert self.MECHANISM.event() == events.Repeat(events.Shuffle(4, Gaussian(1.0)), 3)
        assert self.MECHANISM.with_steps(8).event() == events.Repeat(events.Shuffle(4, Gaussian(1.0)), 2)

    def test_an_epoch_has_its_least_multiplier(self) -> None:
        noise = schedules.piecewise([3, 5], [3.0, 1.0, 2.0])
        event = replace(self.MECHANISM, noise=noise).event()
        assert [(run.event.event.noise_multiplier, run.count) for run in event.events] == [(1.0, 2), (2.0, 1)]

    def test_a_new_key_pays_for_the_epoch_it_enters(self) -> None:
        paid = [t for t in range(10) if self.MECHANISM.step_event(t, start=6) != events.NOTHING]
        assert paid == [0, 4, 6, 8]

    def test_it_costs_one_gaussian_an_epoch(self) -> None:
        epsilon = self.MECHANISM.guarantee(1e-5).epsilon
        assert epsilon == pytest.approx(exact.epsilon(math.sqrt(3), 1e-5), rel=1e-6)
        assert epsilon > replace(self.MECHANISM, sampler=sampling.Poisson(0.3)).guarantee(1e-5).epsilon


class TestConstruction:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
            ({"steps": 10**12}, "steps must be at most 1,000,000,000, got 1,000,000,000,000"),
            ({"steps": True}, "steps must be a whole number, got True"),
            ({"steps": 10.0}, "steps must be a whole number, got 10.0"),
            ({"noise_multiplier": 0.0}, "noise_multiplier must be positive and finite, got 0.0"),
            ({"noise_multiplier": -1.0}, "noise_multiplier must be positive"),
            ({"noise_multiplier": math.nan}, "noise_multiplier must be a number, got nan"),
            ({"noise_multiplier": "1"}, "noise_multiplier must be a number, got '1'"),
            ({"noise_multiplier": True}, "noise_multiplier must be a number, got True"),
            ({"clip": 0.0}, "clip must be positive and finite, got 0.0; give a number or a function of the step"),
            ({"clip": "linear"}, "clip must be a number, got 'linear'; give a number or a function of the step"),
            ({"clip": None}, "clip must be a number, got None"),
            ({"clip": lambda t: float(t)}, "clip at step 0 must be positive and finite, got 0.0"),
            ({"clip": lambda t: 1.0 - t / 7}, "clip at step 7 must be positive and finite, got 0.0"),
            ({"clip": lambda t: math.nan if t == 999 else 1.0}, "clip at step 999 must be positive and finite, got"),
            ({"noise": lambda t: -1.0 if t == 3 else 1.0}, "noise at step 3 must be positive and finite, got -1.0"),
            ({"noise": schedules.cosine(1.0, 0.0, 10)}, "noise at step 10 must be positive and finite, got 0.0"),
            ({"hold_noise": 1}, "hold_noise must be True or False, got 1"),
            ({"hold_noise": True, "clip": lambda t: 1e300 if t == 0 else 1e-300}, "noise_multiplier at step 1 must be"),
            ({"relation": "swap"}, "relation must be one of add-remove, zero-out, replace-one, got 'swap'"),
            ({"batch_size": 0}, "batch_size must be positive"),
            ({"batch_size": math.inf}, "batch_size must be positive and finite"),
            ({"sampler": "poisson"}, "sampler must be one of dpgrad.sampling, such as"),
            ({"sampler": sampling.Poisson(lambda t: t / 500)}, r"sampling_rate at step 501 must lie in \[0, 1\]"),
            (
                {"sampler": sampling.Shuffle(100, 10)},
                "shuffle sampling has no price under add-remove: use relation zero-out or replace-one, or the Poisson",
            ),
            (
                {"sampler": sampling.FixedSize(100, 10), "relation": Relation.ZERO_OUT},
                "fixed-size sampling has no price under zero-out: use relation replace-one, or the Poisson sampler",
            ),
            ({"groups": ("a",)}, "groups must hold Group values, got 'a'"),
        ],
    )  # fmt: skip
    def test_hostile_values_are_refused_in_one_line(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            replace(POISSON, **change)
        assert "\n" not in str(caught.value)

    def test_late_steps_are_checked_when_priced_or_run(self) -> None:
        """A plain function is asked for its first 100,000 steps and its last at once."""
        mechanism = replace(POISSON, steps=150_000, noise=lambda t: 0.0 if t == 120_000 else 1.0)
        with pytest.raises(ValueError, match="noise at step 120000 must be positive"):
            mechanism.event()
        with pytest.raises(ValueError, match="noise at step 120000 must be positive"):
            mechanism.std_at(120_000)

    def test_a_schedule_is_checked_at_its_last_step_and_asked_for_none_after_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dpgrad.mechanism.mechanism._CHECKED_AT_ONCE", 3)
        asked: set[int] = set()

        def clip(step: int) -> float:
            asked.add(step)
            return 1.0 if step < 6 else -1.0

        Mechanism(sampling.FullBatch(), 6, 1.0, clip=clip, relation="zero-out", batch_size=10)
        assert asked == {0, 1, 2, 5}
        with pytest.raises(ValueError, match=r"clip"):
            Mechanism(sampling.FullBatch(), 7, 1.0, clip=clip, relation="zero-out", batch_size=10)

    def test_it_is_a_value(self) -> None:
        assert yu(100) == yu(100)
        assert hash(yu(100)) == hash(yu(100))
        assert pickle.loads(pickle.dumps(yu(100))) == yu(100)
        assert Mechanism(sampling.Poisson(0.01), np.int64(1000), np.float64(1.0), relation="add-remove") == POISSON  # type: ignore[arg-type]

    @pytest.mark.parametrize("step", [-1, 1000, 10**12, 1.5, True])
    def test_steps_that_are_not_part_of_the_run(self, step: Any) -> None:
        for ask in (POISSON.clip_at, POISSON.std_at, POISSON.multiplier_at, POISSON.step_event):
            with pytest.raises(ValueError, match="step must be"):
                ask(step)

    def test_divisor_is_declared_or_known(self) -> None:
        with pytest.raises(ValueError, match="batch_size is required to train with poisson sampling"):
            _ = POISSON.divisor
        assert replace(POISSON, batch_size=512).divisor == 512.0
        assert Mechanism(sampling.Shuffle(100, 30), 1, 1.0, relation=Relation.ZERO_OUT).divisor == 30.0


class TestJson:
    @given(mechanisms)
    def test_round_trip(self, mechanism: Mechanism) -> None:
        assert Mechanism.from_dict(json.loads(json.dumps(mechanism.to_dict(), allow_nan=False))) == mechanism

    def test_plain_functions_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="clip is a plain function and cannot be written as JSON: use a formula"):
            replace(POISSON, clip=lambda t: 1.0).to_dict()

    @pytest.mark.parametrize(
        "change",
        [{"steps": None}, {"extra": 1}, {"groups": 3}, {"groups": [{"pattern": "a"}]}, {"clip": "1"}, {"sampler": 1}],
    )
    def test_anything_else_is_refused(self, change: dict[str, Any]) -> None:
        data = POISSON.to_dict() | change
        with pytest.raises(ValueError, match=r"steps must|not a mechanism|groups must|not a schedule|not a sampler"):
            Mechanism.from_dict(data)
        with pytest.raises(ValueError, match="not a mechanism"):
            Mechanism.from_dict({"steps": 3})


class TestSpeed:
    def test_a_billion_equal_steps_are_one_repetition(self) -> None:
        assert POISSON.with_steps(10**9).event() == Repeat(POISSON.step_event(0), 10**9)

    def test_a_hundred_thousand_distinct_steps(self) -> None:
        assert len(yu(100_000).event().events) == 100_000

    def test_chunks_of_a_sampling_rate_that_moves_join(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = schedules.piecewise([9, 20], [0.01, 0.02, 0.05])
        plan = Mechanism(sampling.Poisson(rates), 30, 1.0, batch_size=10)
        whole = plan.event()
        monkeypatch.setattr("dpgrad.mechanism.mechanism._CHUNK", 7)
        assert plan.event() == whole
        assert [leaf.count for leaf in whole.events] == [9, 11, 10]

    def test_chunks_join(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mechanism = replace(yu(50), noise=schedules.piecewise([64], [1.0, 2.0])).with_steps(100)
        whole = mechanism.event()
        monkeypatch.setattr("dpgrad.mechanism.mechanism._CHUNK", 7)
        assert mechanism.event() == whole
        shuffled = replace(mechanism, sampler=sampling.Shuffle(100, 40), relation=Relation.ZERO_OUT)
        part = shuffled.event()
        monkeypatch.setattr("dpgrad.mechanism.mechanism._CHUNK", 1000)
        assert shuffled.event() == part

    def test_too_many_distinct_steps_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dpgrad.mechanism.mechanism._MOST_DISTINCT", 10)
        with pytest.raises(ValueError, match="the schedules change more than 10 times: hold values longer"):
            yu(50).event()


class TestBudget:
    def test_guarantee_says_all(self) -> None:
        given_ = Mechanism(sampling.FullBatch(), 8, 8.0).guarantee(1e-5)
        assert given_.epsilon == pytest.approx(1.3564673645, rel=1e-9)  # specs: case H
        assert (given_.delta, given_.relation, given_.accountant) == (1e-5, Relation.ADD_REMOVE, "pld")
        assert given_.event == Mechanism(sampling.FullBatch(), 8, 8.0).event()

    def test_calibrated_is_a_new_value_within_target(self) -> None:
        target = replace(POISSON, sampler=sampling.Poisson(512 / 60_000), steps=2343)
        found = target.calibrated(epsilon=3.0, delta=1e-5)
        assert found == target.with_noise(found.noise_multiplier)
        assert target.noise_multiplier == 1.0
        assert found.guarantee(1e-5).epsilon <= 3.0
        assert found.noise_multiplier == pytest.approx(0.8916415, rel=1e-4)  # specs: case B
        assert found.noise_multiplier >= 0.89164

    @pytest.mark.parametrize("hold_noise", [True, False])
    def test_calibration_sees_groups_and_schedules(self, hold_noise: bool) -> None:
        mechanism = Mechanism(
            sampling.FullBatch(), 40, 1.0, clip=schedules.linear(3.0, 20), noise=schedules.piecewise([9], [1.0, 2.0]),
            hold_noise=hold_noise, groups=(Group("a", 2.0, 3.0), Group("b")), relation=Relation.REPLACE_ONE,
        )  # fmt: skip
        found = mechanism.calibrated(1.5, 1e-6)
        mu = 2 * math.sqrt(sum(found.multiplier_at(t) ** -2 for t in range(40)))
        assert exact.epsilon(mu, 1e-6) == pytest.approx(1.5, rel=1e-3)
        assert exact.epsilon(mu, 1e-6) <= 1.5

    def test_longest(self) -> None:
        found = Mechanism(sampling.FullBatch(), 1, 10.0).longest(epsilon=3.0, delta=1e-5)
        assert found.guarantee(1e-5).epsilon <= 3.0 < found.with_steps(found.steps + 1).guarantee(1e-5).epsilon

    def test_longest_of_shuffled_batches_ends_with_an_epoch(self) -> None:
        found = replace(TestShuffle.MECHANISM, noise_multiplier=10.0).longest(epsilon=3.0, delta=1e-5)
        assert found.steps == 4 * Mechanism(sampling.FullBatch(), 1, 10.0).longest(3.0, 1e-5).steps

    def test_history_cannot_calibrate(self) -> None:
        pytest.importorskip("dpgrad.accounting.historical")
        with pytest.raises(ValueError, match="historical comparison"):
            POISSON.calibrated(1.0, 1e-5, accountant="strong-printed")
        with pytest.raises(ValueError, match="historical comparison"):
            POISSON.longest(1.0, 1e-5, accountant="strong-printed")
        with pytest.raises(ValueError, match="historical comparison"):
            POISSON.guarantee(1e-5, accountant="strong-printed")


class TestBeside:
    """What else was released from the same data is composed with the run."""

    FULL = Mechanism(sampling.FullBatch(), 8, 1.0)

    def test_nothing_beside_changes_nothing(self) -> None:
        nothing = events.Compose(())
        assert self.FULL.guarantee(1e-5, also_released=nothing) == self.FULL.guarantee(1e-5)
        assert self.FULL.calibrated(1.0, 1e-5, also_released=nothing) == self.FULL.calibrated(1.0, 1e-5)

    def test_gaussians_add_up_as_squares(self) -> None:
        """8/z² + 1/10² = μ², with μ the one of which ε is 1 at δ = 1e-5."""
        mu = 1 / 3.7306315
        assert exact.account(Gaussian(1 / mu), Relation.ADD_REMOVE).epsilon(1e-5) == pytest.approx(1.0, rel=1e-6)
        found = self.FULL.calibrated(1.0, 1e-5, also_released=Gaussian(10.0))
        assert found.noise_multiplier == pytest.approx(math.sqrt(8 / (mu**2 - 0.01)), rel=1e-4)
        assert (
            found.guarantee(1e-5, also_released=Gaussian(10.0)).epsilon
            <= 1.0
            < found.guarantee(1e-5, also_released=Gaussian(9.0)).epsilon
        )

    def test_longest(self) -> None:
        run = self.FULL.with_noise(10.0)
        alone, beside = run.longest(3.0, 1e-5), run.longest(3.0, 1e-5, also_released=events.Repeat(Gaussian(10.0), 20))
        assert (alone.steps, beside.steps) == (51, 31)

    def test_both_readings_of_yu(self) -> None:
        clip = schedules.affine(12.0, 10)
        run = Mechanism(sampling.FullBatch(), 10, 1.0, clip=clip, hold_noise=True)
        for reading in (run.more_steps, run.less_noise):
            found = reading(2.0, 1e-5, also_released=Gaussian(4.0))
            assert found.guarantee(1e-5, also_released=Gaussian(4.0)).epsilon <= 2.0
            assert found.noise_multiplier > reading(2.0, 1e-5).noise_multiplier

    @pytest.mark.parametrize("name", ["calibrated", "longest", "more_steps", "less_noise"])
    def test_a_budget_that_is_spent_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"also_released alone costs epsilon 4\.37.* of 1 in all: nothing is left"):
            getattr(self.FULL, name)(1.0, 1e-5, also_released=Gaussian(1.0))

    def test_epsilon_is_checked_first(self) -> None:
        with pytest.raises(ValueError, match="epsilon must be a number"):
            self.FULL.calibrated("1", 1e-5, also_released=Gaussian(1.0))  # type: ignore[arg-type]


def ends_first(rows: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """The rows of a table, those between the first and the last marked exhaustive."""
    return [pytest.param(*row, marks=() if row in (rows[0], rows[-1]) else pytest.mark.exhaustive) for row in rows]


class TestYu2018:
    """ε = 2, δ = 1e-5, q = .01: how long σ̃ for a constant bound lasts under the shrinking one, and the least σ̃.

    The step counts are those of the exact ε (the estimate, ten digits). Elsewhere they are given as 5,039 / 6,229 /
    9,159 / 15,219; for 1000 the exact ε is 1.9998852 after 6,230 steps and 2.0000224 after 6,231, so that one more is
    within the budget.
    """

    MORE = ((500, 0.86, 5039), (1000, 0.96, 6230), (2000, 1.15, 9159), (4000, 1.46, 15219))
    LESS = ((500, 0.704), (1000, 0.758), (2000, 0.861), (4000, 1.060))

    @staticmethod
    def exact(mechanism: Mechanism) -> float:
        profile = mechanism.profile()
        assert isinstance(profile, PldProfile)
        return profile.estimate(1e-5)

    @pytest.mark.parametrize(("target", "noise_multiplier", "steps"), ends_first(MORE))
    def test_more_steps_by_exact_epsilon(self, target: int, noise_multiplier: float, steps: int) -> None:
        run = yu(target, noise_multiplier)
        assert self.exact(run.with_steps(steps)) <= 2.0 < self.exact(run.with_steps(steps + 1))

    @pytest.mark.parametrize(("target", "noise_multiplier"), ends_first(LESS))
    def test_less_noise_by_exact_epsilon(self, target: int, noise_multiplier: float) -> None:
        """Printed to three digits, rounded to the nearest."""
        assert self.exact(yu(target, noise_multiplier - 6e-4)) > 2.0 > self.exact(yu(target, noise_multiplier + 6e-4))

    @pytest.mark.slow
    def test_more_steps_has_the_noise_of_a_bound_that_stays_at_its_start(self) -> None:
        run = Mechanism(sampling.FullBatch(), 20, 1.0, clip=schedules.linear(12.0, 20), hold_noise=True)
        still = replace(run, clip=12.0).calibrated(2.0, 1e-5, "exact")
        found = run.more_steps(2.0, 1e-5, "exact", grid=None)
        assert found.noise_multiplier == pytest.approx(still.noise_multiplier, rel=1e-6)

    def test_a_schedule_need_not_go_on_after_the_last_step(self) -> None:
        bounds = (3.0, 2.0, 1.0)
        assert Mechanism(sampling.FullBatch(), 3, 1.0, clip=lambda step: bounds[step]).clip_at(2) == 1.0

    def test_more_steps_certified(self) -> None:
        """What is certified lies a little above the exact ε, and so lasts a few steps less; never more."""
        found = yu(500).more_steps(2.0, 1e-5)
        assert found == yu(500, 0.86).with_steps(found.steps)
        assert 5039 - 2 <= found.steps <= 5039
        assert found.guarantee(1e-5).epsilon <= 2.0

    @pytest.mark.slow
    def test_less_noise_certified(self) -> None:
        found = yu(500).less_noise(2.0, 1e-5)
        assert found == yu(500, found.noise_multiplier)
        assert found.noise_multiplier == pytest.approx(0.7044, rel=1e-3)
        assert found.guarantee(1e-5).epsilon <= 2.0
