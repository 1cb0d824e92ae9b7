"""Noise follows the normal law and is a pure function of (key, step, parameter).

Statistical tests are seeded, so that they pass or fail for good; with a fresh seed each would fail about once in a
million. Tests that need a CUDA device take no arguments, so that they can be called without pytest.
"""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dpgrad.convex.solvers import gd
from dpgrad.mechanism import normal, sampling
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import device_noise, noise
from dpgrad.randomness.noise import gaussian

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FALSE_ALARM = 1e-6


def draws(
    count: int,
    key: int = 1,
    step: int = 0,
    name: str = "w",
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> np.ndarray[Any, np.dtype[np.float64]]:
    return gaussian(torch.empty(count, dtype=dtype, device=device), std, key, step, name).double().cpu().numpy()


def assert_normal(x: np.ndarray[Any, Any], std: float) -> None:
    """Mean, variance, shape of the body and weight of the tails are those of N(0, std²)."""
    n = len(x)
    assert 2 * stats.norm.sf(abs(x.sum()) / (std * math.sqrt(n))) > FALSE_ALARM
    energy = (x**2).sum() / std**2
    assert 2 * min(stats.chi2.cdf(energy, n), stats.chi2.sf(energy, n)) > FALSE_ALARM
    assert stats.kstest(x / std, "norm").pvalue > FALSE_ALARM
    for edge in (2.0, 3.0, 4.0):
        beyond, chance = int((np.abs(x) > edge * std).sum()), 2 * stats.norm.sf(edge)
        assert 2 * min(stats.binom.cdf(beyond, n, chance), stats.binom.sf(beyond - 1, n, chance)) > FALSE_ALARM


def assert_uncorrelated(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    """Σ aᵢbᵢ is nearly normal with variance n for independent standard normal values."""
    assert 2 * stats.norm.sf(abs(a @ b) / math.sqrt(len(a))) > FALSE_ALARM
    squares = ((a**2 - 1) @ (b**2 - 1)) / (2 * math.sqrt(len(a)))
    assert 2 * stats.norm.sf(abs(squares)) > FALSE_ALARM


class TestLaw:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("std", [1e-3, 1.0, 250.0])
    def test_normal(self, dtype: torch.dtype, std: float) -> None:
        assert_normal(draws(200_000, key=21, step=3, std=std, dtype=dtype), std)

    def test_normal_across_steps(self) -> None:
        """The first value of each of many steps."""
        assert_normal(np.concatenate([draws(1, key=22, step=t) for t in range(20_000)]), 1.0)

    def test_normal_across_names(self) -> None:
        assert_normal(np.concatenate([draws(1, key=23, name=f"layer.{i}") for i in range(20_000)]), 1.0)

    def test_steps_names_and_keys_are_independent(self) -> None:
        streams = [
            draws(100_000, key=24),
            draws(100_000, key=24, step=1),
            draws(100_000, key=24, step=10**9),
            draws(100_000, key=24, name="w2"),
            draws(100_000, key=25),
            sampling.generator(24, 0).standard_normal(100_000),
        ]
        for a, b in itertools.combinations(streams, 2):
            assert_uncorrelated(a, b)

    @pytest.mark.parametrize("lag", [1, 2, 4, 1000, normal._BLOCK // 2])
    def test_values_are_independent(self, lag: int) -> None:
        """Also the two of a pair, which are made of one length and stand half a block apart."""
        x = draws(200_000, key=26)
        assert_uncorrelated(x[:-lag], x[lag:])

    def test_tails(self) -> None:
        """The weight beyond 4.5 and 5 standard deviations, and the law of what lies beyond 3.5."""
        x = np.abs(draws(4_000_000, key=28))
        for edge in (4.5, 5.0):
            beyond, chance = int((x > edge).sum()), 2 * stats.norm.sf(edge)
            assert 2 * min(stats.binom.cdf(beyond, len(x), chance), stats.binom.sf(beyond - 1, len(x), chance)) > (
                FALSE_ALARM
            )
        assert stats.kstest(stats.norm.sf(x[x > 3.5]) / stats.norm.sf(3.5), "uniform").pvalue > FALSE_ALARM

    def test_pairs(self) -> None:
        """Lengths have the law of Rayleigh and angles are uniform."""
        first, second = draws(normal._BLOCK, key=29).reshape(2, -1)
        assert stats.kstest(np.hypot(first, second), "rayleigh").pvalue > FALSE_ALARM
        assert stats.kstest(np.arctan2(first, second) / (2 * math.pi) + 0.5, "uniform").pvalue > FALSE_ALARM


class TestConvex:
    """The convex solvers draw from the same law."""

    def test_values_are_those_of_a_parameter(self) -> None:
        """So that what holds of the law of training holds here."""
        like = torch.zeros(3, normal._BLOCK, dtype=torch.float64)
        drawn = normal.gaussian(Key.from_seed(7), tuple(like.shape), 2.5, "noise", "w", "3")
        assert np.array_equal(drawn, gaussian(like, 2.5, 7, 3, "w").numpy())

    @pytest.mark.parametrize("std", [1e-3, 1.0, 250.0])
    def test_normal(self, std: float) -> None:
        assert_normal(gd.gaussian(Key.from_seed(41), 0, (300_000,), std), std)

    def test_normal_across_steps(self) -> None:
        assert_normal(
            np.concatenate([gd.gaussian(Key.from_seed(42), t, (3, 2), 1.0).ravel() for t in range(5000)]), 1.0
        )

    def test_steps_and_keys_are_independent(self) -> None:
        streams = [
            gd.gaussian(Key.from_seed(43), 0, (100_000,), 1.0),
            gd.gaussian(Key.from_seed(43), 1, (100_000,), 1.0),
            gd.gaussian(Key.from_seed(44), 0, (100_000,), 1.0),
            normal.gaussian(Key.from_seed(43), (100_000,), 1.0, "noise", "w", "0"),
        ]
        for a, b in itertools.combinations(streams, 2):
            assert_uncorrelated(a, b)


class TestMeans:
    """Noise that is added to sums at every step of a run, in memory that is kept."""

    @pytest.mark.parametrize("most", [1, 300, 1 << 20])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_they_are_the_noisy_means(self, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(noise, "_TOGETHER", most)
        totals = {name: torch.randn(size).to(dtype) for name, size in (("a", 200), ("b", 1), ("c", 700), ("d", 3))}
        stds = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 0.5}
        means = noise.Means(totals, Key.from_seed(45), 7.0)
        for step in (0, 1, 5):
            out = torch.empty(904)
            means.write(out, [*totals.values()], [*stds.values()], step)
            wanted = noise.noisy_means(totals, stds, Key.from_seed(45), step, 7.0)
            assert torch.equal(out, torch.cat([*wanted.values()]).float())


class TestUniform:
    """What values are made of."""

    def fill(self, pairs: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        uniform = np.zeros((2, pairs))
        state = Key.from_seed(30).derive("test")
        normal._fill(*uniform, [slice(0, pairs)], np.random.Generator(np.random.SFC64(0)), [state])
        return uniform

    def test_small_ones_have_further_digits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(normal, "_SHORT", 0.0)
        lengths, angles = self.fill(200_000)
        assert stats.kstest(lengths, "uniform").pvalue > FALSE_ALARM
        assert stats.kstest(angles, "uniform").pvalue > FALSE_ALARM
        monkeypatch.setattr(normal, "_SHORT", 2.0**-8)
        finer, same = self.fill(200_000)
        few = lengths < 2.0**-8
        assert (same == angles).all()
        assert (finer[~few] == lengths[~few]).all()
        digits = (finer - lengths)[few] * 2.0**53
        assert ((digits >= 0) & (digits <= 1)).all()
        assert stats.kstest(digits, "uniform").pvalue > FALSE_ALARM  # rounded to 2^-8 or finer, of 800 of them

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values_are_those_of_box_and_muller(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """For uniform numbers of all sizes, down to the least, where the tail ends."""
        lengths = np.geomspace(2.0**-106, 1 - 2.0**-53, 1000)
        angles = np.random.default_rng(31).random(1000)

        def fill(of_lengths: np.ndarray[Any, Any], of_angles: np.ndarray[Any, Any], *_: Any) -> None:
            of_lengths[:], of_angles[:] = lengths, angles

        monkeypatch.setattr(normal, "_fill", fill)
        with mpmath.workdps(40):
            far = [3 * mpmath.sqrt(-2 * mpmath.log(length)) for length in lengths]
            turns = [2 * mpmath.pi * angle for angle in angles]
            cosines, sines = (
                np.array([float(r * wave(turn)) for r, turn in zip(far, turns, strict=True)])
                for wave in (mpmath.cos, mpmath.sin)
            )
        drawn = draws(2000, std=3.0, dtype=dtype)
        error = np.abs(drawn - np.concatenate([cosines, sines]))
        size = np.tile([float(r) for r in far], 2)
        assert (error <= (8 * 2.0**-53 * size if dtype == torch.float64 else 2.0**-24 * np.abs(drawn) + 2.0**-50)).all()
        assert math.isclose(size.max() / 3, math.sqrt(212 * math.log(2)), rel_tol=1e-12)


class TestFunction:
    def test_any_order_gives_the_same_values(self) -> None:
        asked = list(itertools.product((1, 2), (0, 1, 10**9), ("a", "b")))
        there = [draws(50, *each).tolist() for each in asked]
        back = [draws(50, *each).tolist() for each in reversed(asked)]
        assert there == back[::-1]
        assert len({tuple(values) for values in there}) == len(asked)

    def test_a_number_is_the_key_of_that_seed(self) -> None:
        like = torch.zeros(9)
        assert torch.equal(gaussian(like, 1.0, 7, 0, "w"), gaussian(like, 1.0, Key.from_seed(7), 0, "w"))

    def test_all_of_a_key_counts(self) -> None:
        """A generator that kept 32 bits of its seed would give the same values to some of these."""
        keys = [1, 1 + 2**31, 1 + 2**32, 1 + 2**64, 1 + 2**128]
        assert len({tuple(draws(4, key=key)) for key in keys}) == len(keys)

    @pytest.mark.parametrize("name", ["w", "w1", "", "1w", "w\0", "é"])
    def test_names_are_told_apart(self, name: str) -> None:
        assert (draws(50, name=name) != draws(50, name=f"{name} ")).all()

    def test_contents_layout_and_gradients_of_like_play_no_part(self) -> None:
        plain = gaussian(torch.zeros(4, 6), 1.0, 7, 0, "w")
        for like in (torch.full((4, 6), math.nan), torch.zeros(6, 4).T, torch.nn.Parameter(torch.ones(4, 6))):
            drawn = gaussian(like, 1.0, 7, 0, "w")
            assert torch.equal(drawn, plain)
            assert drawn.is_contiguous()
            assert not drawn.requires_grad

    @pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
    def test_shape(self, shape: tuple[int, ...]) -> None:
        assert gaussian(torch.zeros(shape), 1.0, 7, 0, "w").shape == shape

    @pytest.mark.parametrize(
        ("dtype", "drawn"),
        [
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_dtype(self, dtype: torch.dtype, drawn: torch.dtype) -> None:
        assert gaussian(torch.zeros(3, dtype=dtype), 1.0, 7, 0, "w").dtype == drawn

    def test_float32_is_float64_rounded_once(self) -> None:
        std = 0.1  # not a float32 number
        exact = gaussian(torch.zeros(1000, dtype=torch.float64), std, 7, 0, "w")
        assert torch.equal(gaussian(torch.zeros(1000), std, 7, 0, "w"), exact.float())
        unit = gaussian(torch.zeros(1000, dtype=torch.float64), 1.0, 7, 0, "w")
        torch.testing.assert_close(exact, unit * std, rtol=0, atol=std * 2.0**-49)  # rounded to 2^-53 of a length

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_threads_do_not_matter(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(normal, "_BLOCK", 7)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        alone = draws(100)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert draws(100).tolist() == alone.tolist()

    def test_parameters_beside_it_do_not_matter(self) -> None:
        sizes = {"a": 3, "b": normal._BLOCK + 5, "c": 0, "d": 3 * normal._BLOCK, "e": 1}
        likes = {name: torch.zeros(size) for name, size in sizes.items()}
        stds = {name: 1.0 + place for place, name in enumerate(sizes)}
        drawn = noise.gaussians(likes, stds, 7, 2)
        assert list(drawn) == list(sizes)
        for name, like in likes.items():
            assert torch.equal(drawn[name], gaussian(like, stds[name], 7, 2, name))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_short_parameters_are_transformed_together(self, dtype: torch.dtype) -> None:
        sizes = [size for odd in range(1, 60) for size in (1, odd, 40 * odd)]  # of one standard deviation
        likes = {str(place): torch.zeros(size, dtype=dtype) for place, size in enumerate(sizes)}
        assert sum(sizes) > 4 * normal._AT_ONCE
        drawn = noise.gaussians(likes, dict.fromkeys(likes, 1.5), 7, 2)
        for name, like in likes.items():
            assert torch.equal(drawn[name], gaussian(like, 1.5, 7, 2, name))

    def test_means_are_sums_and_noise_over_the_divisor(self) -> None:
        totals = {"a": torch.randn(3, 4), "b": torch.randn(5, dtype=torch.float64)}
        stds = {"a": 0.5, "b": 2.0}
        drawn, means = noise.gaussians(totals, stds, 7, 2), noise.noisy_means(totals, stds, 7, 2, 3.0)
        for name, total in totals.items():
            assert torch.equal(means[name], (drawn[name] + total) / 3.0)

    def test_blocks_are_independent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also normal: the values of many blocks of a few values each."""
        monkeypatch.setattr(normal, "_BLOCK", 4)
        x = draws(40_000, key=27)
        assert_normal(x, 1.0)
        for lag in (2, 4):
            assert_uncorrelated(x[:-lag], x[lag:])
        monkeypatch.setattr(normal, "_BLOCK", 20_000)
        x = draws(40_000, key=27)
        assert_uncorrelated(x[:20_000], x[20_000:])

    def test_a_shorter_tensor_has_the_first_of_the_blocks(self) -> None:
        shorter, longer = draws(normal._BLOCK + 9), draws(2 * normal._BLOCK)
        assert (shorter[: normal._BLOCK] == longer[: normal._BLOCK]).all()

    def test_std_may_be_a_tensor(self) -> None:
        like = torch.zeros(50)
        for std in (torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)):
            assert torch.equal(gaussian(like, std, 7, 0, "w"), gaussian(like, 0.25, 7, 0, "w"))

    def test_global_generators_play_no_part_and_are_not_moved(self) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
        first = draws(100)
        assert torch.equal(torch.get_rng_state(), before)
        assert (np.random.get_state()[1] == numpy_before).all()
        torch.manual_seed(1)
        np.random.seed(1)
        assert draws(100).tolist() == first.tolist()


class TestHostile:
    @pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf, True, "1", None])
    def test_std(self, std: Any) -> None:
        with pytest.raises(ValueError, match="std must be"):
            gaussian(torch.zeros(3), std, 7, 0, "w")

    @pytest.mark.parametrize("std", [torch.tensor(0.0), torch.tensor(math.nan), torch.tensor([1.0]), torch.tensor(1)])
    def test_tensor_of_std(self, std: Tensor) -> None:
        with pytest.raises(ValueError, match="std must be"):
            gaussian(torch.zeros(3), std, 7, 0, "w")

    def test_noise_that_would_round_to_nothing(self) -> None:
        with pytest.raises(ValueError, match=r"std must be at least 1.18e-38 for noise of torch.float32, got 1e-40"):
            gaussian(torch.zeros(3), 1e-40, 7, 0, "w")
        assert gaussian(torch.zeros(3, dtype=torch.float64), 1e-40, 7, 0, "w").all()

    @pytest.mark.parametrize("step", [-1, 1.5, True, None, 10**9 + 1])
    def test_step(self, step: Any) -> None:
        with pytest.raises(ValueError, match="step must be"):
            gaussian(torch.zeros(3), 1.0, 7, step, "w")

    @pytest.mark.parametrize("key", [-1, 1.5, True, None, "secret", b""])
    def test_key(self, key: Any) -> None:
        with pytest.raises(ValueError, match="key must"):
            gaussian(torch.zeros(3), 1.0, key, 0, "w")

    @pytest.mark.parametrize("name", [None, 3, b"w"])
    def test_name(self, name: Any) -> None:
        with pytest.raises(ValueError, match="name must be text, got"):
            gaussian(torch.zeros(3), 1.0, 7, 0, name)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_like(self, dtype: torch.dtype) -> None:
        with pytest.raises(ValueError, match=f"like must hold real floating-point values, got {dtype}"):
            gaussian(torch.zeros(3, dtype=dtype), 1.0, 7, 0, "w")


@on_cuda
def test_cuda_law() -> None:
    for dtype, std in [(torch.float32, 250.0), (torch.float64, 1.0), (torch.bfloat16, 1e-3)]:
        assert_normal(draws(2_000_000, key=31, step=3, std=std, dtype=dtype, device="cuda"), std)
    assert_normal(np.concatenate([draws(1, key=32, step=t, device="cuda") for t in range(5000)]), 1.0)
    assert_normal(np.concatenate([draws(1, key=32, name=f"{i}", device="cuda") for i in range(5000)]), 1.0)


@on_cuda
def test_cuda_streams_are_independent() -> None:
    asked = [(33, 0, "w"), (33, 1, "w"), (33, 2**29, "w"), (33, 10**9, "w"), (33, 0, "w2"), (34, 0, "w")]
    streams = [draws(200_000, *each, device="cuda") for each in asked]
    for a, b in itertools.combinations(streams, 2):
        assert_uncorrelated(a, b)
    assert_uncorrelated(streams[0], draws(200_000, 33, 0, "w"))


@on_cuda
def test_cuda_is_a_function_of_its_arguments() -> None:
    asked = list(itertools.product((1, 2), (0, 1, 2**20, 10**9), ("a", "b")))
    there = [draws(500, *each, device="cuda").tolist() for each in asked]
    torch.cuda.manual_seed(5)
    torch.randn(100, device="cuda")
    back = [draws(500, *each, device="cuda").tolist() for each in reversed(asked)]
    assert there == back[::-1]
    assert len({tuple(values) for values in there}) == len(asked)


@on_cuda
def test_cuda_parameters_are_drawn_together() -> None:
    """In as many segments as it takes, each with its own standard deviation, normal and independent."""
    likes = {f"{i}": torch.empty(size, device="cuda") for i, size in enumerate((3, 100_000, 200_000, 1))}
    stds = {"0": 1.0, "1": 2.0, "2": 2.0, "3": 1.0}
    drawn = noise.gaussians(likes, stds, 35, 4)
    assert [values.shape for values in drawn.values()] == [like.shape for like in likes.values()]
    assert_normal(drawn["1"].double().cpu().numpy(), 2.0)
    assert_normal(drawn["2"].double().cpu().numpy(), 2.0)
    assert_uncorrelated(*(drawn[name][:100_000].double().cpu().numpy() / 2 for name in "12"))
    again = noise.gaussians(likes, {**stds, "2": 4.0}, 35, 4)
    assert torch.equal(again["2"], 2 * drawn["2"])
    assert torch.equal(again["1"], drawn["1"])
    later = noise.gaussians(likes, stds, 35, 5)
    assert_uncorrelated(*(each["1"].double().cpu().numpy() / 2 for each in (drawn, later)))


def assert_means(device: str, types: tuple[torch.dtype, ...]) -> None:
    """(total + noise) / divisor in float64, rounded once; small ones are one segment, of one type or of several."""
    sizes = (3, 70_000, 0, 9)
    torch.manual_seed(0)
    totals = {f"{i}": torch.randn(size, 1, device=device) for i, size in enumerate(sizes)}
    totals = {name: total.to(dtype) for (name, total), dtype in zip(totals.items(), types, strict=True)}
    totals["1"] = totals["1"].reshape(7, -1).mT  # not contiguous
    stds = {"0": 1.0, "1": 2.0, "2": 2.0, "3": 0.5}
    likes = {name: total.double() for name, total in totals.items()}
    exact = device_noise.gaussians(likes, stds, 35, 4)
    means = device_noise.gaussians(totals, stds, 35, 4, divisor=7.0)
    for name, total in totals.items():
        wanted = ((total.double() + exact[name]) / 7.0).to(total.dtype)
        # A kernel may contract a product and a sum: half a unit in the last place of float64 before it is rounded.
        assert torch.allclose(means[name], wanted, rtol=2 * torch.finfo(total.dtype).eps, atol=1e-15)
        assert means[name].shape == total.shape
        assert means[name].dtype == total.dtype


def test_means_where_a_device_draws_them() -> None:
    assert_means("cpu", (torch.float32,) * 4)
    assert_means("cpu", (torch.float64, torch.float32, torch.float32, torch.float64))


@on_cuda
def test_cuda_means() -> None:
    assert_means("cuda", (torch.float32,) * 4)
    assert_means("cuda", (torch.float64, torch.float32, torch.float32, torch.float64))


@on_cuda
def test_cuda_global_generator_is_not_moved() -> None:
    before, cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    draws(1000, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), cpu)


@on_cuda
def test_cuda_does_not_wait() -> None:
    like, std = torch.zeros(9 * 10**6, device="cuda"), torch.tensor(2.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = gaussian(like, std, 7, 0, "w")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(drawn, gaussian(like, 2.0, 7, 0, "w"))


class _SaysCuda(Tensor):
    """A tensor on the CPU that says it is on a CUDA device."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_parameters_on_a_device_are_drawn_by_it() -> None:
    likes, stds = {"a": torch.ones(3), "b": torch.ones(2, 2)}, {"a": 1.0, "b": 3.0}
    there = {name: like.as_subclass(_SaysCuda) for name, like in likes.items()}
    for found, wanted in (
        (noise.gaussians(there, stds, 7, 4), device_noise.gaussians(likes, stds, 7, 4)),
        (noise.noisy_means(there, stds, 7, 4, 5.0), device_noise.gaussians(likes, stds, 7, 4, 5.0)),
    ):
        assert list(found) == list(wanted)
        for name in likes:
            assert torch.equal(found[name].as_subclass(Tensor), wanted[name])
    with pytest.raises(ValueError, match="std must be positive"):
        noise.noisy_means(there, {**stds, "b": 0.0}, 7, 4, 5.0)
