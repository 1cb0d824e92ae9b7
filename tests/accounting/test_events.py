"""The language of accounting: counting, regrouping, JSON that comes back and JSON that is refused."""

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting.events import (
    LEAST_NOISE,
    MOST_NOISE,
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Leaf,
    Pinned,
    Poisson,
    Relation,
    Repeat,
    Shifted,
    Shuffle,
    fold,
    from_dict,
    from_json,
    group_multiplier,
    grouped,
    leaves,
    to_dict,
    to_json,
)

NOISES = st.floats(LEAST_NOISE, MOST_NOISE)
GAUSSIANS = st.builds(Gaussian, NOISES)
LEAVES = st.one_of(
    GAUSSIANS,
    st.builds(Poisson, st.floats(0, 1), GAUSSIANS),
    st.builds(lambda m, more, g: FixedSize(m + more, m, g), st.integers(1, 10**9), st.integers(0, 10**9), GAUSSIANS),
    st.builds(Shuffle, st.integers(1, 10**9), GAUSSIANS),
    st.builds(Approximate, st.floats(0, 1e3), st.floats(0, 1, exclude_max=True), st.sampled_from(Relation)),
    st.builds(Shifted, st.floats(0, 1e3), GAUSSIANS),
    st.builds(Pinned, GAUSSIANS, st.sampled_from(Relation)),
)
EVENTS = st.recursive(
    LEAVES,
    lambda inner: st.builds(Repeat, inner, st.integers(0, 50)) | st.builds(Compose, st.lists(inner, max_size=4)),
    max_leaves=12,
)


def unrolled(event: Event) -> list[Leaf]:
    """Every single application, in order: the definition that counts must agree with."""
    match event:
        case Repeat(inner, count):
            return unrolled(inner) * count
        case Compose(events):
            return [leaf for e in events for leaf in unrolled(e)]
        case _:
            return [event]


SMALL = st.recursive(
    st.builds(Poisson, st.sampled_from([0.1, 0.2]), st.builds(Gaussian, st.sampled_from([1.0, 2.0]))),
    lambda inner: st.builds(Repeat, inner, st.integers(0, 3)) | st.builds(Compose, st.lists(inner, max_size=3)),
    max_leaves=6,
)


class TestCounting:
    @given(SMALL)
    def test_leaves_are_the_unrolled_applications(self, event: Event) -> None:
        assert leaves(event) == Counter(unrolled(event))

    @given(SMALL)
    def test_fold_counts_as_leaves_do(self, event: Event) -> None:
        assert fold(event, lambda _: 1, lambda x, n: n * x, sum) == leaves(event).total()

    @given(SMALL)
    def test_each_distinct_leaf_is_priced_once_in_order(self, event: Event) -> None:
        asked: list[Leaf] = []
        fold(event, asked.append, lambda _, n: n, list)
        assert asked == list(dict.fromkeys(unrolled(event)))

    @given(LEAVES, st.integers(0, 30))
    def test_repeat_is_compose(self, leaf: Leaf, count: int) -> None:
        assert leaves(Repeat(leaf, count)) == leaves(Compose((leaf,) * count))

    @given(SMALL, st.randoms(use_true_random=False))
    def test_regrouping_keeps_the_leaves(self, event: Event, shuffle: random.Random) -> None:
        steps = unrolled(event)
        assert leaves(grouped(steps)) == leaves(event)
        shuffle.shuffle(steps)
        cut = shuffle.randint(0, len(steps))
        assert leaves(Compose((Compose(steps[:cut]), Repeat(grouped(steps[cut:]), 1)))) == leaves(event)

    def test_counts_multiply_and_never_overflow(self) -> None:
        event: Event = Gaussian(1.0)
        for _ in range(4):
            event = Repeat(event, 10**12)
        assert leaves(event) == {Gaussian(1.0): 10**48}

    def test_what_is_repeated_zero_times_is_absent(self) -> None:
        assert leaves(Compose((Repeat(Gaussian(1.0), 0), Gaussian(2.0)))) == {Gaussian(2.0): 1}
        assert not leaves(NOTHING)
        assert not leaves(grouped([]))

    def test_deep_trees_are_counted(self) -> None:
        event: Event = Gaussian(1.0)
        for _ in range(5000):
            event = Compose((Repeat(event, 2), NOTHING))
        assert leaves(event) == {Gaussian(1.0): 2**5000}
        assert fold(event, lambda _: 1, lambda x, n: n * x, sum) == 2**5000

    def test_many_distinct_steps_are_counted_at_once(self) -> None:
        steps = [Gaussian(1 + t / 100_000) for t in range(100_000)]
        assert leaves(grouped(steps)).total() == 100_000

    def test_fold_refuses_what_is_no_event(self) -> None:
        with pytest.raises(ValueError, match="unknown event 'gaussian': expected one of Gaussian, Poisson"):
            fold("gaussian", lambda _: 1, lambda x, n: n * x, sum)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="unknown event 3"):
            leaves(3)  # type: ignore[arg-type]


class TestGroups:
    @given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5))
    def test_squares_of_the_inverse_add(self, multipliers: list[float]) -> None:
        one = group_multiplier(multipliers)
        assert one**-2 == pytest.approx(sum(z**-2 for z in multipliers), rel=1e-12)
        assert one <= min(multipliers) * (1 + 1e-15)

    def test_bad_groups(self) -> None:
        with pytest.raises(ValueError, match="groups must not be empty"):
            group_multiplier([])
        with pytest.raises(ValueError, match="noise_multiplier must be positive"):
            group_multiplier([1.0, 0.0])


BAD_NOISE = [0, -1.0, math.nan, math.inf, -math.inf, True, "1", None, [1.0], 1j, 10**400]
BAD_RATE = [-1e-9, 1.0000001, math.nan, math.inf, True, "0.5", None]
BAD_COUNT = [-1, 1.0, math.nan, True, "3", None]
BAD_SIZE = [0, *BAD_COUNT]


class TestBadInput:
    @pytest.mark.parametrize("noise", BAD_NOISE, ids=lambda x: str(x)[:10])
    def test_noise(self, noise: Any) -> None:
        with pytest.raises(ValueError, match="noise_multiplier must be"):
            Gaussian(noise)

    @pytest.mark.parametrize("rate", BAD_RATE)
    def test_rate(self, rate: Any) -> None:
        with pytest.raises(ValueError, match="sampling_rate must"):
            Poisson(rate, Gaussian(1.0))

    @pytest.mark.parametrize("count", BAD_COUNT)
    def test_count(self, count: Any) -> None:
        with pytest.raises(ValueError, match="count must be a whole number"):
            Repeat(Gaussian(1.0), count)

    @pytest.mark.parametrize("size", BAD_SIZE)
    def test_sizes(self, size: Any) -> None:
        with pytest.raises(ValueError, match="batch_size must be a whole number"):
            FixedSize(100, size, Gaussian(1.0))
        with pytest.raises(ValueError, match="dataset_size must be a whole number"):
            FixedSize(size, 1, Gaussian(1.0))
        with pytest.raises(ValueError, match="batches must be a whole number"):
            Shuffle(size, Gaussian(1.0))

    def test_a_sample_is_no_larger_than_its_dataset(self) -> None:
        with pytest.raises(ValueError, match="batch_size must be at most 100, got 101"):
            FixedSize(100, 101, Gaussian(1.0))

    @pytest.mark.parametrize("inner", [Poisson(0.1, Gaussian(1.0)), Repeat(Gaussian(1.0), 2), NOTHING, None, 1.0])
    def test_only_a_gaussian_is_sampled(self, inner: Any) -> None:
        """Sampling a composition once is not sampling each step: there is no such event to misread."""
        for make in (lambda e: Poisson(0.1, e), lambda e: FixedSize(10, 1, e), lambda e: Shuffle(10, e)):
            with pytest.raises(ValueError, match="only a Gaussian can be sampled, got"):
                make(inner)

    @pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, True, "1", None])
    def test_losses(self, value: Any) -> None:
        with pytest.raises(ValueError, match="epsilon must"):
            Approximate(value, 0.0, Relation.ZERO_OUT)
        with pytest.raises(ValueError, match="delta must"):
            Approximate(1.0, value, Relation.ZERO_OUT)
        with pytest.raises(ValueError, match="shift must"):
            Shifted(value, Gaussian(1.0))

    def test_what_is_declared_for_no_relation(self) -> None:
        with pytest.raises(ValueError, match="delta must be below 1, got 1"):
            Approximate(1.0, 1.0, Relation.ZERO_OUT)
        for relation in ("swap", None, [], "k" * 10_000):
            with pytest.raises(ValueError, match="relation must be one of add-remove, zero-out, replace-one, got") as e:
                Approximate(1.0, 0.0, relation)  # type: ignore[arg-type]
            assert len(str(e.value)) < 200
            with pytest.raises(ValueError, match="relation must be one of add-remove, zero-out, replace-one, got"):
                Pinned(Gaussian(1.0), relation)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="only a Gaussian can be pinned"):
            Pinned(Poisson(0.1, Gaussian(1.0)), Relation.ZERO_OUT)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="only a Gaussian can be shifted"):
            Shifted(0.1, Poisson(0.1, Gaussian(1.0)))  # type: ignore[arg-type]

    def test_only_events_compose(self) -> None:
        with pytest.raises(ValueError, match="unknown event 'x'"):
            Compose((Gaussian(1.0), "x"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="unknown event None"):
            Repeat(None, 2)  # type: ignore[arg-type]

    def test_relations_have_three_names(self) -> None:
        assert [r.value for r in Relation] == ["add-remove", "zero-out", "replace-one"]
        with pytest.raises(ValueError, match="'swap' is not a valid Relation"):
            Relation("swap")


class TestValues:
    def test_numbers_become_plain_floats(self) -> None:
        for noise in (2, np.float32(2), np.float64(2)):
            assert Gaussian(noise) == Gaussian(2.0)
            assert type(Gaussian(noise).noise_multiplier) is float
        assert type(Poisson(1, Gaussian(1)).sampling_rate) is float

    def test_a_list_becomes_a_tuple(self) -> None:
        assert Compose([Gaussian(1.0)]) == Compose((Gaussian(1.0),))  # type: ignore[arg-type]
        assert hash(Compose([Gaussian(1.0)])) == hash(Compose((Gaussian(1.0),)))  # type: ignore[arg-type]

    def test_numpy_integers_survive_json(self) -> None:
        g = Gaussian(1.0)
        for event in (Repeat(g, np.int64(3)), FixedSize(np.int64(9), np.int32(3), g), Shuffle(np.int64(3), g)):
            assert from_json(to_json(event)) == event


class TestJson:
    @given(EVENTS)
    @settings(max_examples=200)
    def test_round_trip(self, event: Event) -> None:
        text = to_json(event)
        assert "\n" not in text
        assert from_json(text) == event
        assert from_dict(json.loads(text)) == event
        assert to_dict(from_json(text)) == to_dict(event)

    def test_every_bit_is_kept(self) -> None:
        for noise in (0.1 + 0.2, LEAST_NOISE, MOST_NOISE, 1 / 3):
            assert from_json(to_json(Gaussian(noise))) == Gaussian(noise)

    @staticmethod
    def refused(text: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match) as error:
            from_json(text)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400

    @pytest.mark.parametrize("text", ["", "{", "nonsense", "{'type': 1}", "\ufeff{}", "[1,]", '{"type": "gaussian"'])
    def test_not_json(self, text: str) -> None:
        self.refused(text, "not an event")

    @pytest.mark.parametrize("text", ["null", "3", "true", '"gaussian"', "[]", "{}", '[{"type": "gaussian"}]', "NaN"])
    def test_not_an_object(self, text: str) -> None:
        self.refused(text, "not an event")

    @pytest.mark.parametrize(
        "kind", ["[]", "{}", "null", "true", "1", '"cauchy"', '"Gaussian"', '""', '"a\\nb"', '"\\ud800"']
    )
    def test_unknown_types(self, kind: str) -> None:
        self.refused(f'{{"type": {kind}, "noise_multiplier": 1.0}}', "not an event.*whose type is one of gaussian")

    @pytest.mark.parametrize("level", ["[", '{"type":"compose","events":[', '{"type":"repeat","count":1,"event":'])
    @pytest.mark.parametrize("depth", [900, 3000, 100_000])
    def test_deep_nesting_that_is_cut_off(self, level: str, depth: int) -> None:
        self.refused(level * depth, "not an event")

    @pytest.mark.parametrize(
        ("opening", "closing"), [('{"type":"compose","events":[', "]}"), ('{"type":"repeat","count":1,"event":', "}")]
    )
    def test_deep_nesting_that_is_whole(self, opening: str, closing: str) -> None:
        """What is too deep to read is refused; never a RecursionError."""
        inner = '{"type":"gaussian","noise_multiplier":1.0}'
        for depth in [*range(440, 500), *range(880, 1000), 3000, 100_000]:
            try:
                event = from_json(opening * depth + inner + closing * depth)
            except ValueError as error:
                assert "not an event" in str(error)  # noqa: PT017
            else:
                assert leaves(event) == {Gaussian(1.0): 1}

    @pytest.mark.parametrize(
        "noise", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "null", "[1]", "0", "-1"]
    )
    def test_bad_numbers(self, noise: str) -> None:
        self.refused(f'{{"type": "gaussian", "noise_multiplier": {noise}}}', "noise_multiplier must be")

    @pytest.mark.parametrize("digits", [400, 5000])
    def test_numbers_beyond_any_float(self, digits: int) -> None:
        self.refused(f'{{"type": "gaussian", "noise_multiplier": {"9" * digits}}}', "noise_multiplier|not an event")

    def test_long_values_are_not_echoed(self) -> None:
        self.refused(json.dumps({"type": "gaussian", "noise_multiplier": list(range(10_000))}), "noise_multiplier must")
        self.refused(json.dumps({"type": "gaussian", "k" * 10_000: 1}), "must have fields")

    @pytest.mark.parametrize("count", ["1.0", "true", "-1", "null", '"3"', "NaN", "[]"])
    def test_bad_counts(self, count: str) -> None:
        text = f'{{"type": "repeat", "count": {count}, "event": {{"type": "gaussian", "noise_multiplier": 1}}}}'
        self.refused(text, "count must be a whole number")

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            ({"type": "gaussian"}, "gaussian must have fields.*noise_multiplier"),
            ({"type": "gaussian", "noise_multiplier": 1.0, "clip": 2.0}, "gaussian must have fields.*got.*clip"),
            ({"type": "poisson", "sampling_rate": 0.1}, "poisson must have fields.*event"),
            ({"type": "compose", "events": {}}, "events must be a list"),
            ({"type": "compose", "events": "gaussian"}, "events must be a list"),
            ({"type": "compose", "events": [[]]}, "not an event"),
            ({"type": "repeat", "count": 2, "event": None}, "not an event: None"),
            (
                {"type": "shuffle", "batches": 0, "event": {"type": "gaussian", "noise_multiplier": 1}},
                "batches must be",
            ),
            (
                {"type": "poisson", "sampling_rate": 0.1, "event": {"type": "compose", "events": []}},
                "only a Gaussian can be sampled",
            ),
        ],
    )
    def test_wrong_fields(self, data: dict[str, Any], match: str) -> None:
        self.refused(json.dumps(data), match)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["type", "event", "events", "count", "noise_multiplier", "sampling_rate", "x"]),
                    inner
                    | st.sampled_from(["gaussian", "poisson", "repeat", "compose", "shuffle", "fixed-size", "shifted"]),
                    max_size=4,
                )
            ),
            max_leaves=8,
        )
    )
    @settings(max_examples=300)
    def test_anything_else_is_refused_in_one_line(self, data: object) -> None:
        try:
            event = from_dict(data)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert from_json(to_json(event)) == event
