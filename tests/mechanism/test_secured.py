"""What a secured key draws, and what a mechanism with secure noise says and costs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpgrad.accounting import account
from dpgrad.accounting.events import Inexact, Poisson, Relation, Repeat, leaves
from dpgrad.mechanism import chacha, sampling, schedules, secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import draw
from dpgrad.runs.writeahead import charges

KEY = Key.from_seed(7).secured()
FALSE_ALARM = 1e-6  # of a statistic of a fixed seed, for an honest sampler


class TestSampling:
    def test_committed_rows(self) -> None:
        assert sampling.Poisson(0.02).draw(300, 5, KEY).tolist() == POISSON
        assert sampling.FixedSize(50, 5).draw(50, 5, KEY).tolist() == FIXED

    @given(st.integers(0, 10**6), st.integers(0, 2**40), st.integers(0, 30))
    def test_words_are_those_of_the_stream(self, step: int, start: int, count: int) -> None:
        secret = KEY.derive("secure sampling", str(step))
        blocks = chacha.words(secret, start // 8, count // 8 + 2).reshape(-1)
        expected = blocks[start % 8 : start % 8 + count].tolist()
        assert sampling.words(KEY, step, start, count).tolist() == expected

    def test_a_row_takes_part_where_its_word_is_below_the_threshold(self) -> None:
        """With probability floor(q·2^64)/2^64 exactly, which is at most q."""
        for rate in (0.0, 2.0**-64, 0.1, 0.5, 1.0):
            below = int(rate * 2**64)
            expected = [i for i, word in enumerate(sampling.words(KEY, 3, 0, 5000).tolist()) if word < below]
            assert sampling.Poisson(rate).draw(5000, 3, KEY).tolist() == expected

    def test_sources_differ(self) -> None:
        ordinary = Key.from_seed(7)
        assert (sampling.words(KEY, 0, 0, 64) != sampling.words(ordinary, 0, 0, 64)).all()
        for sampler in (sampling.Poisson(0.5), sampling.FixedSize(200, 50), sampling.Shuffle(200, 50)):
            assert sampler.draw(200, 0, KEY).tolist() != sampler.draw(200, 0, ordinary).tolist()

    def test_fixed_sizes_are_uniform(self) -> None:
        """All subsets of two of five rows, over 4,000 steps: false alarm 1e-6."""
        sampler = sampling.FixedSize(5, 2)
        drawn = Counter(tuple(sampler.draw(5, step, KEY)) for step in range(4000))
        assert len(drawn) == 10
        assert stats.chisquare(list(drawn.values())).pvalue > FALSE_ALARM

    def test_equal_words_are_drawn_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tie would favour one order: 64 bits make it seldom, and another draw makes it exact."""
        original, tried = sampling._secure_words, []

        def tied(key: Key, start: int, count: int, *names: str) -> "sampling.Words":
            tried.append(names)
            return np.zeros(count, np.uint64) if len(tried) == 1 else original(key, start, count, *names)

        monkeypatch.setattr(sampling, "_secure_words", tied)
        assert sorted(sampling._secure_order(KEY, 9, 20)) == list(range(20))
        assert tried == [("9", "order", "0"), ("9", "order", "1")]

    def test_an_epoch_holds_each_row_once(self) -> None:
        sampler = sampling.Shuffle(23, 5)
        drawn = np.concatenate([sampler.draw(23, step, KEY) for step in range(sampler.span)])
        assert sorted(drawn) == list(range(23))

    def test_the_device_draws_the_same_rows(self) -> None:
        for sampler in (sampling.Poisson(0.05), sampling.FixedSize(200, 5), sampling.FullBatch()):
            expected = [sampler.draw(200, step, KEY).tolist() for step in range(3)]
            ahead = draw.ahead(sampler, range(3), 200, KEY, 200, "cpu")
            assert [line[:n].tolist() for line, n in zip(ahead.indices, ahead.counts, strict=True)] == expected
            assert draw.chosen(sampler, 200, 2, KEY, "cpu").tolist() == expected[2]
        assert draw.included(KEY, 1, 200, 0.05, "cpu").nonzero()[:, 0].tolist() == (
            sampling.Poisson(0.05).draw(200, 1, KEY).tolist()
        )

    def test_a_step_on_the_device_is_refused(self) -> None:
        import torch

        with pytest.raises(ValueError, match="step must be a number with a secured key"):
            draw.words(KEY, torch.tensor(3), 0, 5, "cpu")

    @pytest.mark.parametrize("step", [-1, 1.5, True, "0"])
    def test_step_is_a_count(self, step: int) -> None:
        for sampler in (sampling.Poisson(0.5), sampling.FixedSize(10, 5)):
            with pytest.raises(ValueError, match="step"):
                sampler.draw(10, step, KEY)


class TestMechanism:
    plain = Mechanism(sampling.Poisson(0.01), 100, 1.0, batch_size=10)
    secured = Mechanism(sampling.Poisson(0.01), 100, 1.0, batch_size=10, secure_values=1000)

    def test_its_event_has_the_distance(self) -> None:
        distance = secure.inexact(1000)
        assert self.secured.event() == Repeat(Inexact(self.plain.event().event, distance), 100)  # type: ignore[union-attr]
        assert self.secured.step_event(5) == Inexact(Poisson(0.01, self.plain.event().event.event), distance)  # type: ignore[union-attr]
        assert account(self.secured.event()).distance >= 100_000 * secure.DISTANCE  # type: ignore[attr-defined]

    def test_every_way_of_counting_agrees(self) -> None:
        clip = schedules.piecewise([30], [2.0, 1.0])
        for sampler, relation in (
            (sampling.Poisson(0.01), Relation.ADD_REMOVE),
            (sampling.Shuffle(70, 10), Relation.ZERO_OUT),
        ):
            run = Mechanism(sampler, 70, 1.0, clip=clip, hold_noise=True, relation=relation, secure_values=9)
            steps = [run.step_event(step) for step in range(70)]
            counted = Counter(event for event in steps if isinstance(event, Inexact))
            assert leaves(run.event()) == counted == leaves(charges(run, 0, 70))
            paid = sum(leaf.distance * count for leaf, count in counted.items())
            assert paid >= 70 * 9 * secure.DISTANCE

    def test_plain_values(self) -> None:
        assert Mechanism.from_dict(self.secured.to_dict()) == self.secured
        assert "secure_values" not in self.plain.to_dict()  # as before there was such a field
        assert Mechanism.from_dict(self.plain.to_dict()) == self.plain
        with pytest.raises(ValueError, match="not a mechanism"):
            Mechanism.from_dict({**self.plain.to_dict(), "other": 1})

    def test_calibration_stays_within_the_budget(self) -> None:
        many = Mechanism(sampling.FullBatch(), 10, 1.0, secure_values=10**9)
        found = many.calibrated(1.0, 1e-5, "exact")
        assert found.secure_values == 10**9
        assert found.guarantee(1e-5, "exact").epsilon <= 1.0
        assert many.longest(20.0, 1e-5, "exact").secure_values == 10**9

    @pytest.mark.parametrize("values", [-1, 1.5, True, "9", 2**60])
    def test_values_are_a_count(self, values: int) -> None:
        with pytest.raises(ValueError, match="secure_values"):
            Mechanism(sampling.FullBatch(), 1, 1.0, secure_values=values)

    def test_too_many_values_for_the_grid(self) -> None:
        group = Group("a", noise_multiplier=1e6)
        with pytest.raises(ValueError, match="too coarse"):
            Mechanism(sampling.FullBatch(), 1, 1.0, groups=(group,), secure_values=10**6)
        with pytest.raises(ValueError, match="too coarse"):
            Mechanism(
                sampling.FullBatch(), 9, 1.0, noise=schedules.piecewise([5], [1.0, 1e6]), secure_values=10**6
            )  # fmt: skip


POISSON = [169, 185, 256, 260]
FIXED = [19, 21, 32, 37, 49]
