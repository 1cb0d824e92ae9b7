"""Sampling on the device: the same bits as numpy, and the rows that the samplers draw.

Tests that need a CUDA device take no arguments, so that they can be called without pytest.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.sampling import FixedSize, FullBatch, Poisson, Sampler, Shuffle
from dpgrad.randomness import draw, philox

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
words64 = st.integers(0, 2**64 - 1)


def unsigned(words: torch.Tensor) -> list[int]:
    return words.cpu().numpy().view(np.uint64).tolist()


class TestPhilox:
    @given(words64, words64)
    def test_product(self, x: int, multiplier: int) -> None:
        high, low = philox._product(torch.tensor([philox.signed(x)]), multiplier)
        assert (unsigned(high)[0] << 64) + unsigned(low)[0] == x * multiplier

    def test_known_answer(self) -> None:
        """The vector of zeros that Random123 publishes for philox4x64 with 10 rounds (kat_vectors)."""
        answer = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
        assert unsigned(philox.words(torch.tensor([0]), torch.tensor([0]), [0, 0])[0]) == answer

    @given(st.binary(min_size=1, max_size=40), st.integers(0, 10**9), st.integers(0, 2**62 - 100), st.integers(0, 50))
    def test_words_are_those_of_numpy(self, key: bytes, step: int, start: int, count: int) -> None:
        assert unsigned(draw.words(key, step, start, count, "cpu")) == sampling.words(key, step, start, count).tolist()

    @pytest.mark.parametrize("step", [0, 1, 2**29, 10**9])
    @pytest.mark.parametrize("start", [0, 4 * (2**31 - 9) + 1, 4 * (2**32 - 9) + 3, 4 * (2**33 - 9) + 2])
    def test_ranges_that_cross_counters_of_32_bits(self, start: int, step: int) -> None:
        assert unsigned(draw.words(3, step, start, 1000, "cpu")) == sampling.words(3, step, start, 1000).tolist()

    def test_step_may_be_a_tensor(self) -> None:
        assert unsigned(draw.words(3, torch.tensor(9), 6, 50, "cpu")) == sampling.words(3, 9, 6, 50).tolist()

    @pytest.mark.parametrize("step", [-1, 1.5, True, 10**9 + 1])
    def test_step_must_be_one(self, step: Any) -> None:
        with pytest.raises(ValueError, match="step must be"):
            draw.words(3, step, 0, 4, "cpu")


class TestIncluded:
    @pytest.mark.parametrize("rate", [0.0, 2.0**-64, 1e-3, 0.3, 0.5, math.nextafter(0.5, 1), 0.99, 1.0])
    @pytest.mark.parametrize("rows", [0, 1, 5, 3001])
    def test_rows_are_those_of_the_sampler(self, rows: int, rate: float) -> None:
        for step in (0, 3, 10**9):
            mask = draw.included(b"k", step, rows, rate, "cpu")
            assert mask.shape == (rows,)
            assert mask.nonzero().flatten().tolist() == Poisson(rate).draw(rows, step, b"k").tolist()

    def test_the_words_at_the_threshold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A word equal to the threshold is out, one less is in: in the order of unsigned numbers."""
        for rate in (2.0**-64, 0.25, 0.5, 0.75, 1 - 2.0**-53):
            below = sampling.threshold(rate)
            near = [word for word in (0, below - 1, below, 2**63 - 1, 2**63, 2**64 - 1) if 0 <= word < 2**64]
            fixed = torch.tensor([philox.signed(word) for word in near])
            monkeypatch.setattr(draw, "words", lambda *_, fixed=fixed: fixed)
            assert draw.included(1, 0, len(near), rate, "cpu").tolist() == [word < below for word in near]

    @pytest.mark.parametrize("chunk", [1, 7, 64])
    def test_chunks_do_not_matter(self, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = draw.included(4, 2, 200, 0.3, "cpu").tolist()
        monkeypatch.setattr(draw, "_CHUNK", chunk)
        assert draw.included(4, 2, 200, 0.3, "cpu").tolist() == whole

    @pytest.mark.parametrize(("rows", "rate"), [(-1, 0.5), (True, 0.5), (5, 1.5), (5, math.nan)])
    def test_hostile(self, rows: Any, rate: float) -> None:
        with pytest.raises(ValueError, match=r"rows must|sampling_rate must"):
            draw.included(1, 0, rows, rate, "cpu")


SAMPLERS: list[Sampler] = [
    Poisson(0.2),
    Poisson(schedules.piecewise([3], [0.9, 0.01])),
    FixedSize(53, 10),
    FullBatch(),
    Shuffle(53, 10),
]


def test_every_sampler_is_tested() -> None:
    assert {type(sampler) for sampler in SAMPLERS} == set(sampling.KINDS)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_rows_are_chosen_as_the_sampler_draws(sampler: Sampler) -> None:
    for step in range(8):
        chosen = draw.chosen(sampler, 53, step, Key.from_seed(6), "cpu")
        assert chosen.dtype == torch.int64
        assert chosen.tolist() == sampler.draw(53, step, 6).tolist()


@on_cuda
def test_cuda_words_are_those_of_numpy() -> None:
    for step in (0, 1, 2**29, 10**9):
        for start in (0, 4 * (2**31 - 9) + 1, 4 * (2**32 - 9) + 3, 2**62 - 5000):
            assert unsigned(draw.words(3, step, start, 4001, "cuda")) == sampling.words(3, step, start, 4001).tolist()


@on_cuda
def test_cuda_rows_are_chosen_without_waiting() -> None:
    """Beyond half a million rows the device draws them, and is waited for."""
    many = draw._HOST_ROWS + 5
    assert draw.chosen(Poisson(0.01), many, 3, 6, "cuda").tolist() == Poisson(0.01).draw(many, 3, 6).tolist()
    for sampler in SAMPLERS:
        torch.cuda.set_sync_debug_mode("error")
        try:
            chosen = draw.chosen(sampler, 53, 2, 6, "cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert chosen.tolist() == sampler.draw(53, 2, 6).tolist()


@on_cuda
def test_cuda_draws_are_those_of_numpy() -> None:
    for rows, rate in [(60_000, 0.0), (60_000, 1e-4), (60_000, 0.5), (60_000, 1.0), ((1 << 24) + 12345, 1e-3)]:
        mask = draw.included(3, 7, rows, rate, "cuda")
        assert mask.is_cuda
        assert mask.nonzero()[:, 0].tolist() == Poisson(rate).draw(rows, 7, 3).tolist()


@on_cuda
def test_cuda_graph_draws_any_step_without_waiting() -> None:
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    draw.included(3, step, 10_000, 0.01, "cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.graph(graph):
            mask = draw.included(3, step, 10_000, 0.01, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    for t in [*range(20), 10**9]:
        step.fill_(t)
        graph.replay()
        assert mask.nonzero()[:, 0].tolist() == Poisson(0.01).draw(10_000, t, 3).tolist()


DRAWN_AHEAD: list[Sampler] = [Poisson(0.02), Poisson(1.0), FullBatch(), FixedSize(500, 7), Shuffle(500, 60)]


@pytest.mark.parametrize("sampler", DRAWN_AHEAD, ids=repr)
@pytest.mark.parametrize("capacity", [3, 16, 600])
def test_ahead_draws_what_each_step_draws(sampler: Sampler, capacity: int) -> None:
    drawn = draw.ahead(sampler, range(5, 12), rows=500, key=3, capacity=capacity, device="cpu")
    for step, indices, count in zip(range(5, 12), drawn.indices, drawn.counts, strict=True):
        wanted = sampler.draw(500, step, 3).tolist()
        assert int(count) == len(wanted)
        assert indices[: len(wanted)].tolist() == wanted[:capacity]
        if wanted:
            assert set(indices[len(wanted) :].tolist()) <= {wanted[0]}


def test_ahead_of_a_rate_that_varies() -> None:
    sampler = Poisson(schedules.piecewise([2], [0.0, 0.5]))
    drawn = draw.ahead(sampler, range(4), rows=100, key=3, capacity=100, device="cpu")
    assert [int(count) for count in drawn.counts] == [len(sampler.draw(100, step, 3)) for step in range(4)]


@on_cuda
def test_cuda_ahead_by_its_kernel() -> None:
    for rows in (1, 2, 3, 4, 5, 1023, 1024, 1025, 100_003):
        for rate in (0.01, 0.5, 1.0):
            drawn = draw.ahead(Poisson(rate), range(7, 12), rows, key=5, capacity=rows, device="cuda")
            for step, indices, count in zip(range(7, 12), drawn.indices, drawn.counts, strict=True):
                assert indices[: int(count)].tolist() == Poisson(rate).draw(rows, step, 5).tolist()
