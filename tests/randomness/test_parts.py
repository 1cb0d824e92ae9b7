"""Noise of a shard: a slice, at any offset, of the noise of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.mechanism import normal
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import device_noise, noise

KEY = Key.from_seed(3)
BLOCK = 1 << 16


@pytest.fixture(scope="module")
def whole() -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    values = np.empty(3 * BLOCK + 17)
    normal.fill(KEY, [normal.Wanted(values, 2.0, ("noise", "w", "5"))])
    return values


edges = st.one_of(st.integers(0, 3 * BLOCK + 17), st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]))


@settings(max_examples=15)
@given(ends=st.tuples(edges, edges))
def test_a_slice_at_any_offset_on_the_cpu(
    ends: tuple[int, int], whole: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> None:
    start, stop = sorted(ends)
    part = np.full(stop - start, np.nan)
    normal.fill(KEY, [normal.Wanted(part, 2.0, ("noise", "w", "5"), start, len(whole))])
    np.testing.assert_array_equal(part, whole[start:stop])


SIZES = {"weight": (7, 31), "bias": (3,), "scalar": (), "large": (BLOCK + 5,)}
LIKES = {name: torch.zeros(shape) for name, shape in SIZES.items()}
STDS: dict[str, float | torch.Tensor] = {"weight": 1.0, "bias": 0.5, "scalar": 2.0, "large": 1.5}


@settings(max_examples=30)
@given(name=st.sampled_from([*SIZES]), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)), on_device=st.booleans())
def test_a_slice_of_a_parameter(name: str, ends: tuple[float, float], on_device: bool) -> None:
    """``on_device`` in plain torch: the words and the places are those of the kernel."""
    count = LIKES[name].numel()
    start, stop = sorted(round(end * count) for end in ends)
    if on_device:
        found = device_noise.gaussian_part(LIKES, name, start, stop, STDS[name], KEY, 4)
        wanted = device_noise.gaussians(LIKES, STDS, KEY, 4)[name]
    else:
        (found,) = noise.gaussian_parts(LIKES, [noise.Part(name, start, stop)], STDS, KEY, 4)
        wanted = noise.gaussians(LIKES, STDS, KEY, 4)[name]
    assert torch.equal(found, wanted.flatten()[start:stop])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_of_a_device_make_up_the_noise_of_all_parameters(ranks: int) -> None:
    """As `Exchanged` draws them: all values one after another, by the counters of their segments."""
    stream = device_noise.Stream(LIKES, KEY, "cpu")
    last = stream.segments[-1]
    shard = -(-(4 * last.first + last.values) // (4 * ranks)) * 4
    step, one = torch.full((1,), 4), torch.ones((), dtype=torch.float64)
    flat = torch.empty(ranks * shard, dtype=torch.float64)
    for rank in range(ranks):
        place = device_noise.Segment((), shard, rank * shard // 4)
        stream.write(place, flat[rank * shard : (rank + 1) * shard], step, one)
    for segment in stream.segments:
        wanted = torch.empty(segment.values, dtype=torch.float64)
        stream.write(segment, wanted, step, one)
        assert torch.equal(flat[4 * segment.first :][: segment.values], wanted)
