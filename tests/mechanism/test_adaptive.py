"""The clip bound that follows a quantile: its noise, its update, and what a mechanism with it costs."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad import Mechanism, Relation
from dpgrad.errors import OptionError
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.mechanism import Group

SAMPLERS: list[tuple[Any, Relation]] = [
    (sampling.Poisson(0.1), Relation.ADD_REMOVE),
    (sampling.Poisson(0.1), Relation.REPLACE_ONE),
    (sampling.FullBatch(), Relation.ZERO_OUT),
    (sampling.FullBatch(), Relation.REPLACE_ONE),
    (sampling.FixedSize(100, 10), Relation.REPLACE_ONE),
    (sampling.Shuffle(100, 10), Relation.ZERO_OUT),
]


def run(sampler: Any = None, relation: Relation = Relation.ZERO_OUT, **options: Any) -> Mechanism:
    settings = {"steps": 7, "noise_multiplier": 1.3, "clip": 0.8, "batch_size": 10} | options
    return Mechanism(sampler or sampling.FullBatch(), relation=relation, **settings)


@pytest.mark.parametrize(("sampler", "relation"), SAMPLERS)
@pytest.mark.parametrize("groups", [(), (Group("a*", 0.5, 2.0), Group("b*", 3.0, 0.7))])
@pytest.mark.parametrize("rule", [AdaptiveClip(), AdaptiveClip(0.9, 0.1, 3.0)])
def test_what_one_example_reveals_is_what_the_event_says(
    sampler: Any, relation: Relation, groups: tuple[Group, ...], rule: AdaptiveClip
) -> None:
    """The farthest that one example moves gradients and counts, each over its own noise, is 1/multiplier or less."""
    plain = run(sampler, relation, groups=groups, noise=schedules.piecewise([3], [1.0, 1.4]))
    plan = dataclasses.replace(plain, adaptive_clip=rule)
    assert plan.event() == plain.event()
    for step in range(plan.steps):
        places = plan.groups or (None,)
        alone = sum((plan.clip_at(step, g) / plan.std_at(step, g)) ** 2 for g in places)
        counts = len(places) * (0.5 / plan.count_std_at(step)) ** 2
        assert math.sqrt(alone + counts) <= 1 / plan.multiplier_at(step)
        assert math.sqrt(alone + counts) == pytest.approx(1 / plan.multiplier_at(step), rel=1e-9)
        # exchanging an example moves a group by twice its clip bound and a count by one: twice as far as one example
        twice = sum((2 * plan.clip_at(step, g) / plan.std_at(step, g)) ** 2 for g in places)
        exchanged = len(places) * (1 / plan.count_std_at(step)) ** 2
        assert math.sqrt(twice + exchanged) <= Relation.REPLACE_ONE.reach / plan.multiplier_at(step)


def test_the_split_is_the_papers() -> None:
    plan = run(adaptive_clip=AdaptiveClip(noise=5.0))
    split = (1.3**-2 - (2 * 5.0) ** -2) ** -0.5
    assert plan.std_at(0) / plan.clip_at(0) == pytest.approx(split, rel=1e-12)


def test_noise_by_default_is_that_of_the_paper_and_at_most_a_quarter() -> None:
    assert run(batch_size=100, adaptive_clip=AdaptiveClip()).count_std_at(0) == 5.0
    small = run(batch_size=2, adaptive_clip=AdaptiveClip())
    assert small.count_std_at(0) == 1.3
    assert small.std_at(0) / run().std_at(0) == pytest.approx(math.sqrt(4 / 3))


def test_too_little_noise_on_the_count_is_refused() -> None:
    with pytest.raises(OptionError, match=r"noise of adaptive_clip must be above 0\.65, .* got 0\.6"):
        run(adaptive_clip=AdaptiveClip(noise=0.6))
    with pytest.raises(OptionError, match="times the root of 2 groups"):
        run(adaptive_clip=AdaptiveClip(noise=0.6), groups=(Group("a*"), Group("b*")))


@pytest.mark.parametrize("options", [{"clip": schedules.linear(1.0, 5)}, {"hold_noise": True}])
def test_a_schedule_and_a_quantile_do_not_both_move_the_bound(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="moves the clip bound, and so does a schedule"):
        run(adaptive_clip=AdaptiveClip(), **options)


def test_the_expected_batch_size_is_needed() -> None:
    with pytest.raises(OptionError, match="batch_size is required"):
        run(sampling.Poisson(0.1), batch_size=None, adaptive_clip=AdaptiveClip())


@pytest.mark.parametrize(
    "text",
    ["", "half", "0.5:", "0.5:0.2:3:4", "-0.1", "1.1", "nan", "0.5:0", "0.5:inf", "0.5:0.2:-1", True, [0.5], b"1"],
)
def test_bad_rules_are_refused(text: Any) -> None:
    with pytest.raises(OptionError, match="adaptive_clip"):
        AdaptiveClip.parse(text)


@given(st.floats(1e-3, 1e3), st.floats(allow_nan=False), st.floats(0.1, 1e6), st.floats(0, 1), st.floats(1e-6, 1e6))
def test_the_next_bound_is_always_a_bound(clip: float, count: float, size: float, quantile: float, rate: float) -> None:
    found = AdaptiveClip(quantile, rate).following(clip, count, size, start=1.0)
    assert 1e-6 <= found <= 1e6


def test_the_bound_settles_at_the_quantile() -> None:
    """Without noise: 200 norms, uniform on (0, 1]; the bound that γ of them do not exceed is γ."""
    norms, clip, rule = (np.arange(200) + 1) / 200, 9.0, AdaptiveClip(0.3, 0.2)
    for _ in range(300):
        clip = rule.following(clip, float(((norms <= clip) - 0.5).sum()), 200.0)
    assert clip == pytest.approx(0.3, abs=0.01)


def test_json_has_the_rule_only_where_there_is_one() -> None:
    plan = run(adaptive_clip=AdaptiveClip(0.7, 0.1, 4.0))
    assert Mechanism.from_dict(plan.to_dict()) == plan
    assert "adaptive_clip" not in run().to_dict()
    assert Mechanism.from_dict(run().to_dict()) == run()
    with pytest.raises(OptionError, match="adaptive_clip must be an object"):
        Mechanism.from_dict({**run().to_dict(), "adaptive_clip": {"quantile": 0.5}})


def test_calibration_does_not_stumble_over_the_rule() -> None:
    plan = run(batch_size=60, adaptive_clip=AdaptiveClip(noise=30.0))
    found = plan.calibrated(1.0, 1e-5)
    assert found.noise_multiplier == run().calibrated(1.0, 1e-5).noise_multiplier
    assert found.adaptive_clip == plan.adaptive_clip
    assert plan.more_steps(3.0, 1e-5).adaptive_clip == plan.adaptive_clip
    assert plan.longest(30.0, 1e-5).steps == run().longest(30.0, 1e-5).steps


def test_noise_that_is_too_small_at_a_step_in_between_is_refused_before_the_first() -> None:
    peak = schedules.piecewise([3, 6], [1.0, 5.0, 1.0])
    with pytest.raises(OptionError, match=r"noise of adaptive_clip must be above 2\.5"):
        Mechanism(sampling.FullBatch(), 9, 1.0, noise=peak, batch_size=100, adaptive_clip=AdaptiveClip(noise=1.0))
