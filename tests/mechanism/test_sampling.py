"""Samplers: what they draw follows the law their event assumes, and each step is a pure function of (key, step)."""

import itertools
import json
import math
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpgrad.accounting import events
from dpgrad.accounting.events import Gaussian, Relation
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.sampling import FixedSize, FullBatch, Poisson, Sampler, Shuffle

SAMPLERS: list[Sampler] = [
    Poisson(0.05),
    Poisson(0.0),
    Poisson(1.0),
    Poisson(schedules.piecewise([3], [0.5, 0.01])),
    FixedSize(101, 10),
    FixedSize(101, 101),
    FullBatch(),
    Shuffle(101, 10),
    Shuffle(101, 101),
    Shuffle(101, 1),
]
every = pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)


def test_every_sampler_is_tested() -> None:
    made = {value for value in vars(sampling).values() if isinstance(value, type) and "draw" in vars(value)} - {Sampler}
    assert {type(sampler) for sampler in SAMPLERS} == made == set(sampling.KINDS)


class TestEverySampler:
    @every
    def test_indices_rise_and_lie_in_range(self, sampler: Sampler) -> None:
        for step in range(25):
            drawn = sampler.draw(101, step, b"key")
            assert drawn.dtype == np.int64
            assert np.all(np.diff(drawn) > 0)
            assert not len(drawn) or (drawn[0] >= 0 and drawn[-1] < 101)

    @every
    def test_draw_is_a_pure_function_of_key_and_step(self, sampler: Sampler) -> None:
        there = [sampler.draw(101, step, 77).tolist() for step in range(30)]
        back = [sampler.draw(101, step, 77).tolist() for step in reversed(range(30))]
        assert there == back[::-1]

    @every
    def test_what_is_returned_may_be_written_to(self, sampler: Sampler) -> None:
        before = sampler.draw(101, 0, 5)
        sampler.draw(101, 0, 5)[:] = 0
        assert sampler.draw(101, 0, 5).tolist() == before.tolist()

    @every
    def test_global_randomness_plays_no_part(self, sampler: Sampler) -> None:
        np.random.seed(0)
        first = sampler.draw(101, 4, b"k").tolist()
        np.random.seed(1)
        assert sampler.draw(101, 4, b"k").tolist() == first

    @every
    def test_plan_is_the_events_of_the_steps(self, sampler: Sampler) -> None:
        multipliers = np.repeat([1.0, 1.0, 2.0, 0.5], 2 * sampler.span)
        spans = multipliers[:: sampler.span]
        expected = events.grouped(sampler.event(float(z), i * sampler.span) for i, z in enumerate(spans))
        planned = [(leaf, count) for leaf, count in sampler.plan(multipliers)]
        assert events.grouped(leaf for leaf, count in planned for _ in range(count)) == expected
        for (a, _), (b, _) in itertools.pairwise(planned):
            assert a != b
        for leaf, _ in planned:  # leaves are built unchecked: they must be those that checks would let through
            assert events.from_dict(events.to_dict(leaf)) == leaf
            assert hash(events.from_dict(events.to_dict(leaf))) == hash(leaf)
            assert repr(events.from_dict(events.to_dict(leaf))) == repr(leaf)

    @every
    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    def test_plan_refuses_what_is_no_multiplier(self, sampler: Sampler, bad: float) -> None:
        multipliers = np.ones(20)
        multipliers[13] = bad
        with pytest.raises(ValueError, match=f"noise_multiplier at step 13 must be positive and finite, got {bad!r}"):
            list(sampler.plan(multipliers))

    @every
    def test_json_round_trip(self, sampler: Sampler) -> None:
        assert sampling.from_dict(json.loads(json.dumps(sampling.to_dict(sampler)))) == sampler

    @every
    @pytest.mark.parametrize("rows", [-1, 1.5, True, "101", None])
    def test_rows_must_be_a_count(self, sampler: Sampler, rows: Any) -> None:
        with pytest.raises(ValueError, match="rows must be a whole number"):
            sampler.draw(rows, 0, 1)

    @every
    @pytest.mark.parametrize("step", [-1, 1.5, True, "0"])
    def test_step_must_be_a_count(self, sampler: Sampler, step: Any) -> None:
        if isinstance(sampler, FullBatch):
            pytest.skip("a full batch does not look at the step")
        with pytest.raises(ValueError, match=r"step|start"):
            sampler.draw(101, step, 1)

    @every
    def test_relations_are_those_with_a_price(self, sampler: Sampler) -> None:
        from dpgrad.accounting import account

        for relation in Relation:
            event = sampler.event(2.0)
            if relation in sampler.relations:
                account(event, relation)
            else:
                with pytest.raises(ValueError, match=f"no price under {relation}|fixed size reveal"):
                    account(event, relation)


class TestKeys:
    def test_different_keys_and_steps_differ(self) -> None:
        drawn = {tuple(Poisson(0.5).draw(200, step, key)) for step in range(20) for key in range(20)}
        assert len(drawn) == 400

    def test_whole_key_counts(self) -> None:
        """Keys that agree in their first 32, 64 or 128 bits give other batches."""
        keys = [1, 1 + 2**32, 1 + 2**64, 1 + 2**128, b"a" * 32, b"a" * 33]
        assert len({tuple(Poisson(0.5).draw(200, 0, key)) for key in keys}) == len(keys)

    @every
    def test_a_number_is_the_key_of_that_seed(self, sampler: Sampler) -> None:
        assert sampler.draw(101, 3, 77).tolist() == sampler.draw(101, 3, Key.from_seed(77)).tolist()

    @pytest.mark.parametrize("sampler", [Poisson(0.5), FixedSize(10, 5), Shuffle(10, 5)], ids=repr)
    @pytest.mark.parametrize("key", [-1, 1.5, True, "secret", None, [1]])
    def test_hostile(self, sampler: Sampler, key: Any) -> None:
        with pytest.raises(ValueError, match="key must be a whole number"):
            sampler.draw(10, 0, key)

    def test_a_number_and_what_equals_it_are_not_confused(self) -> None:
        """The permutation that was kept for key 1 is not handed to True, which Python holds equal to 1."""
        Shuffle(10, 5).draw(10, 0, 1)
        with pytest.raises(ValueError, match="key must be a whole number"):
            Shuffle(10, 5).draw(10, 0, True)

    def test_empty(self) -> None:
        with pytest.raises(ValueError, match="key must not be empty, got b''"):
            sampling.generator(b"", 0)


class TestWords:
    """Word i of a step is a function of (key, step, i), whatever range it is asked for in."""

    @given(st.integers(0, 10**9), st.integers(0, 3000), st.integers(0, 60))
    def test_any_range_is_that_of_the_stream(self, step: int, start: int, count: int) -> None:
        philox = np.random.Philox(
            key=np.frombuffer(Key.of(5).derive("sampling", size=16), np.uint64), counter=[0, 0, step, 0]
        )
        assert sampling.words(5, step, start, count).tolist() == philox.random_raw(start + count)[start:].tolist()

    def test_far_ranges_are_found_by_counting_on(self) -> None:
        """numpy counts on by itself across 2^32 blocks."""
        start = 4 * (2**32 - 2) + 1
        whole = sampling.words(5, 10**9, start, 40)
        assert whole.tolist() == [int(sampling.words(5, 10**9, start + i, 1)[0]) for i in range(40)]

    def test_bits_are_fair(self) -> None:
        """Each of 64 bits, over the rows of a step and over the steps of a row; a false alarm once in a million."""
        count = 20_000
        rows = sampling.words(5, 3, 0, count)
        steps = np.array([sampling.words(5, step, 0, 1)[0] for step in range(count)])
        for words in (rows, steps):
            ones = np.array([np.count_nonzero(words & np.uint64(1 << bit)) for bit in range(64)])
            p = 2 * np.minimum(stats.binom.cdf(ones, count, 0.5), stats.binom.sf(ones - 1, count, 0.5))
            assert p.min() > 1e-6 / (2 * 64)

    @pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1), (2**62 + 1, 1), (0, 1.5), (True, 1)])
    def test_range_must_be_one(self, start: Any, count: Any) -> None:
        with pytest.raises(ValueError, match=r"start|count"):
            sampling.words(5, 0, start, count)

    def test_steps_are_bounded(self) -> None:
        with pytest.raises(ValueError, match="step must be at most 1,000,000,000, got 1,000,000,001"):
            sampling.words(5, 10**9 + 1, 0, 1)

    @given(st.floats(0, 1))
    def test_threshold_is_the_floor(self, rate: float) -> None:
        assert sampling.threshold(rate) == math.floor(Fraction(rate) * 2**64)

    @pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
    def test_threshold_refuses_what_is_no_rate(self, rate: float) -> None:
        with pytest.raises(ValueError, match="rate must"):
            sampling.threshold(rate)


def poisson_bits(rate: float, rows: int, steps: int, key: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    bits = np.zeros((steps, rows), bool)
    for step in range(steps):
        bits[step, Poisson(rate).draw(rows, step, key)] = True
    return bits


class TestPoissonLaw:
    """Seeded, so that they pass or fail for good; with a fresh seed each would fail about once in a million."""

    FALSE_ALARM = 1e-6

    @pytest.mark.parametrize(("rate", "rows"), [(0.01, 500), (0.3, 200), (0.9, 100), (0.5, 3)])
    def test_every_row_is_included_at_the_rate(self, rate: float, rows: int) -> None:
        steps = 4000
        totals = poisson_bits(rate, rows, steps, key=11).sum(axis=0)
        p = min(2 * min(stats.binom.cdf(t, steps, rate), stats.binom.sf(t - 1, steps, rate)) for t in totals)
        assert p > self.FALSE_ALARM / rows

    @pytest.mark.parametrize(("rate", "rows"), [(0.01, 500), (0.3, 200), (0.5, 3)])
    def test_sizes_are_binomial(self, rate: float, rows: int) -> None:
        steps = 4000
        sizes = poisson_bits(rate, rows, steps, key=12).sum(axis=1)
        cut = np.unique(stats.binom.ppf(np.linspace(0, 1, 9)[1:-1], rows, rate))
        expected = np.diff([0.0, *stats.binom.cdf(cut, rows, rate), 1.0]) * steps
        seen = np.bincount(np.searchsorted(cut, sizes, side="left"), minlength=len(expected))
        assert stats.chisquare(seen, expected).pvalue > self.FALSE_ALARM

    def test_rows_are_pairwise_independent(self) -> None:
        steps, rows, rate = 6000, 30, 0.3
        bits = poisson_bits(rate, rows, steps, key=13).astype(float)
        z = (bits - rate).T @ (bits - rate) / (rate * (1 - rate) * math.sqrt(steps))
        pairs = z[np.triu_indices(rows, 1)]
        assert 2 * stats.norm.sf(np.abs(pairs).max()) > self.FALSE_ALARM / len(pairs)

    @pytest.mark.parametrize("lag", [1, 2, 64])
    def test_steps_are_independent(self, lag: int) -> None:
        steps, rows, rate = 3000, 200, 0.3
        bits = poisson_bits(rate, rows, steps, key=14).astype(float) - rate
        products = bits[lag:] * bits[:-lag]
        z = products.sum() / (rate * (1 - rate) * math.sqrt(products.size))
        assert 2 * stats.norm.sf(abs(z)) > self.FALSE_ALARM

    def test_keys_are_independent(self) -> None:
        steps, rows, rate = 2000, 200, 0.3
        a, b = (poisson_bits(rate, rows, steps, key) - rate for key in (15, 16))
        z = float((a * b).sum()) / (rate * (1 - rate) * math.sqrt(a.size))
        assert 2 * stats.norm.sf(abs(z)) > self.FALSE_ALARM

    def test_a_rate_may_be_a_schedule(self) -> None:
        sampler = Poisson(schedules.piecewise([1], [1.0, 0.0]))
        assert len(sampler.draw(10, 0, 1)) == 10
        assert len(sampler.draw(10, 1, 1)) == 0
        assert sampler.event(1.0, step=0) == events.Poisson(1.0, Gaussian(1.0))
        assert sampler.event(1.0, step=5) == events.Poisson(0.0, Gaussian(1.0))
        with pytest.raises(ValueError, match="steps_per_epoch is not defined where sampling_rate is a schedule"):
            _ = sampler.steps_per_epoch

    def test_no_rows(self) -> None:
        assert len(Poisson(0.5).draw(0, 0, 1)) == 0

    def test_overall_count_is_binomial(self) -> None:
        rows, steps, rate = 1_000_003, 5, 0.013  # rows are drawn in chunks, the last one short
        total = sum(len(Poisson(rate).draw(rows, step, 17)) for step in range(steps))
        tails = stats.binom.cdf(total, rows * steps, rate), stats.binom.sf(total - 1, rows * steps, rate)
        assert 2 * min(tails) > self.FALSE_ALARM

    def test_pairs_of_steps_and_of_neighbours_are_independent(self) -> None:
        """Counts of (in, in), (in, out), ... for a row at two steps, and for two rows one to five apart."""
        rows, rate = 400_000, 0.2
        here, there = poisson_bits(rate, rows, 2, key=18)
        law = np.outer([1 - rate, rate], [1 - rate, rate]).ravel()
        for a, b in [(here, there), *((here[:-lag], here[lag:]) for lag in range(1, 6))]:
            seen = np.bincount(2 * a[::12] + b[::12], minlength=4)  # every twelfth: no row is in two pairs
            assert stats.chisquare(seen, law * seen.sum()).pvalue > self.FALSE_ALARM / 6

    @pytest.mark.parametrize("rate", [0.0, 2.0**-70, 0.02, 0.5, 1.0])
    def test_more_rows_change_nothing_for_those_before_them(self, rate: float) -> None:
        many = Poisson(rate).draw(600_000, 4, 1)
        for rows in (0, 1, 7, 1 << 18, (1 << 18) + 1):
            assert Poisson(rate).draw(rows, 4, 1).tolist() == many[many < rows].tolist()

    def test_a_row_is_in_below_the_threshold_and_out_at_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for rate in (0.0, 2.0**-64, 0.5, 1 - 2.0**-53, 1.0):
            below = sampling.threshold(rate)
            near = [word for word in (0, below - 1, below, 2**64 - 1) if 0 <= word < 2**64]
            monkeypatch.setattr(sampling, "words", lambda *_, near=near: np.array(near, np.uint64))
            assert Poisson(rate).draw(len(near), 0, 1).tolist() == [i for i, word in enumerate(near) if word < below]

    def test_rates_are_nested(self) -> None:
        """The rows at a rate are among those at any greater rate: one word a row, against a threshold."""
        drawn = [set(Poisson(rate).draw(1000, 4, 1).tolist()) for rate in (0.0, 0.01, 0.3, 0.31, 1.0)]
        assert all(a <= b for a, b in itertools.pairwise(drawn))
        assert [len(drawn[0]), len(drawn[-1])] == [0, 1000]

    def test_memory_is_bounded(self) -> None:
        """30 million words are 240 MB; a chunk of them, the comparison and the rows drawn are a few."""
        tracemalloc.start()
        try:
            Poisson(1e-3).draw(30_000_000, 3, 1)
            assert tracemalloc.get_traced_memory()[1] < 10e6
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, True, "0.1", None])
    def test_rate_must_lie_in_the_unit_interval(self, rate: Any) -> None:
        with pytest.raises(ValueError, match="sampling_rate must"):
            Poisson(rate)

    def test_scheduled_rate_is_checked(self) -> None:
        with pytest.raises(ValueError, match=r"sampling_rate at step 0 must lie in \[0, 1\], got 2.0"):
            Poisson(schedules.constant(2.0))
        with pytest.raises(ValueError, match=r"sampling_rate at step 2 must lie in \[0, 1\], got 1.5"):
            Poisson(lambda t: 0.5 * (t + 1)).draw(10, 2, 1)


class TestFixedSize:
    def test_size_is_fixed_and_rows_are_uniform(self) -> None:
        """Chi-square over rows; seeded, a fresh seed would fail once in a million."""
        steps, rows, size = 5000, 40, 7
        counts = np.zeros(rows)
        for step in range(steps):
            drawn = FixedSize(rows, size).draw(rows, step, 21)
            assert len(drawn) == size
            counts[drawn] += 1
        # counts sum to a constant and are negatively correlated: scaled, the statistic is chi-square with rows-1
        rate = size / rows
        statistic = ((counts - steps * rate) ** 2).sum() / (steps * rate * (1 - rate)) * (rows - 1) / rows
        assert stats.chi2.sf(statistic, rows - 1) > 1e-6

    def test_steps_per_epoch(self) -> None:
        assert FixedSize(100, 40).steps_per_epoch == 2.5


class TestShuffle:
    @given(st.integers(1, 60), st.data())
    def test_an_epoch_is_a_partition(self, rows: int, data: st.DataObject) -> None:
        sampler = Shuffle(rows, data.draw(st.integers(1, rows)))
        for epoch in range(2):
            batches = [sampler.draw(rows, epoch * sampler.span + i, 9) for i in range(sampler.span)]
            assert sorted(np.concatenate(batches).tolist()) == list(range(rows))
            assert all(len(batch) == sampler.batch_size for batch in batches[:-1])
            assert 1 <= len(batches[-1]) <= sampler.batch_size

    def test_epochs_are_shuffled_afresh(self) -> None:
        sampler = Shuffle(1000, 100)
        first = {tuple(sampler.draw(1000, epoch * 10, 9)) for epoch in range(50)}
        assert len(first) == 50

    def test_positions_are_uniform(self) -> None:
        """In which batch row 0 falls; chi-square, seeded, a fresh seed would fail once in a million."""
        sampler = Shuffle(20, 4)
        counts = np.zeros(5)
        for epoch in range(3000):
            counts[[0 in sampler.draw(20, 5 * epoch + i, 31) for i in range(5)].index(True)] += 1
        assert stats.chisquare(counts).pvalue > 1e-6

    def test_plan_takes_the_least_multiplier_of_an_epoch(self) -> None:
        sampler = Shuffle(100, 50)
        planned = list(sampler.plan(np.array([1.0, 3.0, 4.0, 2.0, 9.0])))
        assert planned == [
            (events.Shuffle(2, Gaussian(1.0)), 1),
            (events.Shuffle(2, Gaussian(2.0)), 1),
            (events.Shuffle(2, Gaussian(9.0)), 1),  # cut short, and paid whole
        ]

    def test_plan_begins_with_an_epoch(self) -> None:
        with pytest.raises(ValueError, match="start must be the first step of an epoch of 2 batches, got 3"):
            list(Shuffle(100, 50).plan(np.ones(4), start=3))


@pytest.mark.parametrize("kind", [FixedSize, Shuffle])
class TestSizes:
    def test_wrong_rows_are_refused(self, kind: Any) -> None:
        with pytest.raises(ValueError, match="rows must equal the declared dataset_size = 100, got 99"):
            kind(100, 10).draw(99, 0, 1)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ((0, 1), "dataset_size must be a whole number of at least 1, got 0"),
            ((10, 0), "batch_size must be a whole number of at least 1, got 0"),
            ((10, 11), "batch_size must be at most dataset_size = 10, got 11"),
            ((10.0, 1), "dataset_size must be a whole number, got 10.0"),
            ((True, 1), "dataset_size must be a whole number, got True"),
            ((10, math.nan), "batch_size must be a whole number, got nan"),
        ],
    )
    def test_bad_sizes_are_refused(self, kind: Any, sizes: tuple[Any, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            kind(*sizes)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"sampler": "poison"},
        {"sampler": ["poisson"]},
        {"sampler": "poisson"},
        {"sampler": "poisson", "sampling_rate": "0.1"},
        {"sampler": "poisson", "sampling_rate": True},
        {"sampler": "shuffle", "dataset_size": 3},
        {"sampler": "full-batch", "rows": 3},
    ],
)
def test_from_dict_refuses_anything_else(data: object) -> None:
    with pytest.raises(ValueError, match=r"sampler|schedule"):
        sampling.from_dict(data)


def test_a_plain_function_is_not_written() -> None:
    with pytest.raises(ValueError, match="sampling_rate is a plain function and cannot be written as JSON"):
        sampling.to_dict(Poisson(lambda t: 0.1))


def test_to_dict_refuses_anything_else() -> None:
    with pytest.raises(ValueError, match=r"unknown sampler 0\.1: expected one of poisson"):
        sampling.to_dict(0.1)  # type: ignore[arg-type]
