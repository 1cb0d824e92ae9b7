"""Noise of a device, on the CPU: every value against numpy's Philox, and no counter used twice."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgrad.mechanism.keys import Key
from dpgrad.randomness import device_noise
from dpgrad.randomness.device_noise import Segment, Stream, gaussians, spread

KEY = Key.from_seed(11)
SHAPES = {"a": (3,), "big": (5, 7), "b": (2, 2), "large": (41,), "empty": (0,), "c": ()}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_noise, "_SMALL", 8)  # so that small tensors make several segments
    monkeypatch.setattr(device_noise, "_PLAIN_AT_ONCE", 4)


def likes(**dtypes: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtypes.get(name, torch.float32)) for name, shape in SHAPES.items()}


def words_of(parameters: Mapping[str, Tensor], step: int, first: int, count: int) -> np.ndarray[Any, Any]:
    """The words of the counters after ``first``, by numpy."""
    sizes = [str(like.numel()) for like in parameters.values()]
    key = np.frombuffer(KEY.derive("noise on cuda", *parameters, *sizes, size=16), "<u8").astype(np.uint64)
    counter = np.array([first, 0, step, 0], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def normal(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Box and Muller (1958), a pair of values from each pair of words."""
    first, second = words[0::2], words[1::2]
    u = (first >> np.uint64(11)) * 2.0**-53 + ((first & np.uint64(2047)) + 0.5) * 2.0**-64
    length, angle = np.sqrt(-2 * np.log(u)), 2 * math.pi * (second >> np.uint64(11)) * 2.0**-53
    return np.stack([length * np.cos(angle), length * np.sin(angle)], 1).ravel()


def by_hand(parameters: Mapping[str, Tensor], step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Standard normal values by name: the small parameters share a run of counters, large ones have their own."""
    small = [name for name, like in parameters.items() if like.numel() < 8]
    found, first = {}, 0
    for names in (small, *([name] for name in parameters if name not in small)):
        values = sum(parameters[name].numel() for name in names)
        counters = math.ceil(values / 4)
        drawn, at = normal(words_of(parameters, step, first, 4 * counters)), 0
        for name in names:
            found[name] = drawn[at : at + parameters[name].numel()].reshape(parameters[name].shape)
            at += parameters[name].numel()
        first += counters
    return found


@pytest.mark.parametrize("step", [0, 1, 7, 10**9])
def test_every_value_is_that_of_numpy(step: int) -> None:
    drawn = gaussians(likes(), dict.fromkeys(SHAPES, 1.0), KEY, step)
    assert list(drawn) == list(SHAPES)
    for name, wanted in by_hand(likes(), step).items():
        assert drawn[name].dtype == torch.float32
        assert drawn[name].shape == SHAPES[name]
        assert drawn[name].numpy() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_segments_use_no_counter_twice() -> None:
    segments = Stream(likes(), KEY, "cpu").segments
    assert [each.names for each in segments] == [("a", "b", "empty", "c"), ("big",), ("large",)]
    used = [counter for each in segments for counter in range(each.first, each.first + -(-each.values // 4))]
    assert len(used) == len(set(used)) == 2 + 9 + 11
    assert min(used) == 0


def test_no_two_values_of_a_step_or_of_two_steps_are_the_same() -> None:
    every = [
        value
        for step in range(3)
        for drawn in gaussians(likes(large=torch.float64), dict.fromkeys(SHAPES, 1.0), KEY, step).values()
        for value in drawn.double().flatten().tolist()
    ]
    assert len(set(every)) == len(every) == 3 * 84


def test_parameters_of_equal_shape_have_independent_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """2²⁰ values: the correlation of independent ones has a standard deviation of 2⁻¹⁰; a false alarm is 6 of them."""
    pair = {"one": torch.zeros(1 << 20), "two": torch.zeros(1 << 20)}
    monkeypatch.setattr(device_noise, "_PLAIN_AT_ONCE", 1 << 22)
    drawn = gaussians(pair, dict.fromkeys(pair, 1.0), KEY, 0)
    assert len(Stream(pair, KEY, "cpu").segments) == 2
    assert abs(float((drawn["one"] * drawn["two"]).mean())) < 6 * 2**-10
    assert abs(float(drawn["one"].square().mean()) - 1) < 6 * math.sqrt(2) * 2**-10


def test_names_sizes_and_keys_make_streams_of_their_own() -> None:
    def first(parameters: dict[str, Tensor], key: Any = KEY) -> float:
        return float(next(iter(gaussians(parameters, dict.fromkeys(parameters, 1.0), key, 0).values())).flatten()[0])

    found = [
        first({"a": torch.zeros(3)}), first({"b": torch.zeros(3)}), first({"a": torch.zeros(4)}),
        first({"a": torch.zeros(3), "b": torch.zeros(3)}), first({"a": torch.zeros(3)}, Key.from_seed(12)),
    ]  # fmt: skip
    assert len(set(found)) == len(found)


def test_each_parameter_has_its_own_deviation_and_type() -> None:
    parameters = likes(b=torch.float64, big=torch.bfloat16)
    stds: dict[str, Any] = {name: float(place + 1) for place, name in enumerate(SHAPES)}
    stds["large"] = torch.tensor(9.0, dtype=torch.float64)
    drawn = gaussians(parameters, stds, KEY, 2)
    assert {name: value.dtype for name, value in drawn.items() if value.dtype != torch.float32} == {"b": torch.float64}
    for name, wanted in by_hand(parameters, 2).items():
        assert drawn[name].numpy() == pytest.approx(wanted * float(stds[name]), rel=1e-6, abs=1e-6)


def test_means_are_sums_and_noise_over_the_divisor() -> None:
    totals = {name: like + place + 1 for place, (name, like) in enumerate(likes().items())}
    drawn = gaussians(totals, dict.fromkeys(SHAPES, 0.5), KEY, 4, divisor=8.0)
    for name, wanted in by_hand(totals, 4).items():
        assert drawn[name].numpy() == pytest.approx((totals[name].numpy() + 0.5 * wanted) / 8, rel=1e-6, abs=1e-7)


def test_a_stopped_step_shows_nothing() -> None:
    stream = Stream(likes(), KEY, "cpu")
    one, step, std = torch.tensor(1.0), torch.tensor([3]), torch.ones((), dtype=torch.float64)
    out = torch.zeros(41)
    stream.write(stream.segments[2], out, step, std, torch.ones(41), torch.tensor(2.0), stopped=one)
    assert bool(out.isnan().all())
    stream.write(stream.segments[2], out, step, std, torch.ones(41), torch.tensor(2.0), stopped=one * 0)
    assert out.numpy() == pytest.approx((1 + by_hand(likes(), 3)["large"]) / 2, rel=1e-6, abs=1e-7)


def test_the_far_end_of_the_tail() -> None:
    """The least word makes the longest pair, √(130 ln 2) long; the largest makes the shortest, and none is infinite."""
    words = torch.tensor([0, -1])  # all bits zero, all bits one
    length = torch.hypot(*device_noise._pair(words, torch.zeros(2, dtype=torch.int64)))
    assert length[0].item() == pytest.approx(math.sqrt(130 * math.log(2)), rel=1e-12)
    assert 0 <= length[1].item() < 1e-7


def test_split_and_joined_are_inverse() -> None:
    segment = Segment(("a", "b"), 7, 0)
    flat = torch.arange(7.0)
    parts = segment.split(flat, likes())
    assert parts["b"].tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert torch.equal(segment.joined(parts), flat)
    one = torch.arange(6.0).view(2, 3).T
    assert Segment(("x",), 6, 0).joined({"x": one}).is_contiguous()


def test_spread_is_one_number_where_all_share_it() -> None:
    parameters = likes()
    segment = Stream(parameters, KEY, "cpu").segments[0]
    assert spread(segment, parameters, dict.fromkeys(SHAPES, 2.0)).shape == ()
    equal = dict(zip(SHAPES, map(float, "222222"), strict=True))  # not the same objects
    assert spread(segment, parameters, equal).shape == ()
    assert spread(segment, parameters, {**equal, "b": 5.0}).tolist() == [2.0] * 3 + [5.0] * 4 + [2.0]
    one = torch.tensor(3.0)
    assert spread(segment, parameters, dict.fromkeys(SHAPES, one)).tolist() == 3.0
    stds: dict[str, Any] = {**dict.fromkeys(SHAPES, 2.0), "b": one}
    assert spread(segment, parameters, stds).tolist() == [2.0] * 3 + [3.0] * 4 + [2.0]
