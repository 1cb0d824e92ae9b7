"""Gaussian noise as a pure function of (secret run key, step, parameter).

On the CPU the numbers come from numpy's SFC64 under a 256-bit seed for every block of values, on a CUDA device from
torch's Philox4x32-10 under a 64-bit seed. torch's generator for the CPU is not used: it keeps 32 bits of its seed.
Neither stream is cryptographic, and the low-order bits of floating-point noise can leak what it hides (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012).

>>> import torch
>>> like = torch.zeros(2, 3)
>>> drawn = gaussian(like, std=2.0, key=7, step=0, name="layer.weight")
>>> bool((drawn == gaussian(like, std=2.0, key=7, step=0, name="layer.weight")).all())
True
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgrad import _validate
from dpgrad.keys import AnyKey, Key

# A call on a CUDA device moves the offset of its generator by 4 for every 2 float64 values that one thread makes: by
# less than 2n + 8 for n values even if a single thread made them all. A stride of 2^33 therefore keeps the steps of
# models of up to 2^31 values apart, and 10^9 · 2^33 < 2^63: offsets never wrap. They must be multiples of 4.
STRIDE = 1 << 33
MOST_VALUES = 1 << 31
_SEGMENT = 1 << 24  # values that a CUDA device draws at a time, but for parameters that have more
_BLOCK = 1 << 16  # values on the CPU that share a generator: their number is part of the function
_HELD = 1 << 13  # float64 values that a thread of the CPU holds at a time

Std = float | Tensor


def gaussian(like: Tensor, std: Std, key: AnyKey, step: int, name: str) -> Tensor:
    """Independent N(0, std²) values of the shape and on the device of ``like``: float64 for float64, else float32.

    ``name`` is the parameter's. The values are the same whenever the key, step, name, shape, dtype and model of device
    are; the global generators are neither read nor moved. ``std`` may be a 0-d tensor; on a CUDA device its value is
    not checked, since that would wait for the device.

    Guarantee: values of different names, steps and keys, and of sampling, come from streams of their own. They are
    drawn and scaled in float64 and rounded once: made of 32 bits each, float32 values of CUDA end at √(66 ln 2) ≈ 6.8
    standard deviations, and δ would have to pay for the missing tails of every parameter and step. The noise of one
    (key, step, name) may be added to one sum only: the difference of two sums with the same noise has none.

    >>> import torch
    >>> gaussian(torch.zeros(3, dtype=torch.bfloat16), std=1.0, key=7, step=0, name="bias").dtype
    torch.float32
    >>> gaussian(torch.zeros(3), std=0.0, key=7, step=0, name="bias")
    Traceback (most recent call last):
    ValueError: std must be positive and finite, got 0.0
    """
    return gaussians({name: like}, {name: std}, key, step)[name]


def gaussians(likes: Mapping[str, Tensor], stds: Mapping[str, Std], key: AnyKey, step: int) -> dict[str, Tensor]:
    """`gaussian` for every parameter by name, each with its own standard deviation.

    The threads of a CPU share the work. On a CUDA device all parameters are drawn together, and the values of one
    depend on which others stand beside it.

    >>> import torch
    >>> likes, stds = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, {"weight": 2.0, "bias": 1.0}
    >>> drawn = gaussians(likes, stds, key=7, step=0)
    >>> bool((drawn["weight"] == gaussian(likes["weight"], 2.0, key=7, step=0, name="weight")).all())
    True
    """
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    for name, like in likes.items():
        if not like.is_floating_point():
            raise ValueError(f"like must hold real floating-point values, got {like.dtype}")
        _check_std(stds[name], _drawn_type(like))
    cuda = next((like.device for like in likes.values() if like.is_cuda), None)
    if cuda is None:
        return _on_cpu(likes, stds, Key.of(key), step)
    random = device_generator(likes, key, cuda)
    random.set_offset(step * STRIDE)
    drawn = {}
    for names, values in drawn_from(random, likes, stds):
        for name, part in zip(names, torch.split(values, [likes[name].numel() for name in names]), strict=True):
            drawn[name] = part.view(likes[name].shape).to(_drawn_type(likes[name]))
    return drawn


def device_generator(likes: Mapping[str, Tensor], key: AnyKey, device: torch.device) -> torch.Generator:
    """The generator of a run's noise on a CUDA device; step t begins at offset t·`STRIDE`."""
    values = sum(like.numel() for like in likes.values())
    if values > MOST_VALUES:
        raise ValueError(f"a model must have at most {MOST_VALUES:,} values to train on one device, got {values:,}")
    random = torch.Generator(device)
    random.manual_seed(int.from_bytes(Key.of(key).derive("noise on cuda", *likes, size=8), "little"))
    return random


def drawn_from(
    random: torch.Generator, likes: Mapping[str, Tensor], stds: Mapping[str, Std]
) -> Iterator[tuple[list[str], Tensor]]:
    """The noise of the parameters, some at a time, one after another in one float64 tensor; nothing waits for it.

    ``random`` stands at the offset of its step.
    """
    for names in segments(likes):
        sizes = [likes[name].numel() for name in names]
        values = torch.randn(sum(sizes), generator=random, dtype=torch.float64, device=random.device)
        start = 0
        for std, size in _with_one_std([stds[name] for name in names], sizes):
            values[start : start + size] *= std
            start += size
        yield names, values


def segments(likes: Mapping[str, Tensor]) -> list[list[str]]:
    """The parameters in order, as many at a time as a CUDA device draws at once."""
    found: list[list[str]] = []
    values = _SEGMENT
    for name, like in likes.items():
        if values + like.numel() > _SEGMENT:
            found.append([])
            values = 0
        found[-1].append(name)
        values += like.numel()
    return found


def _with_one_std(stds: Iterable[Std], sizes: Iterable[int]) -> Iterator[tuple[Std, int]]:
    """How many values in a row share a standard deviation: one product scales them all."""

    def same(each: tuple[Std, int]) -> float:
        return id(each[0]) if isinstance(each[0], Tensor) else each[0]

    for _, equal in groupby(zip(stds, sizes, strict=True), key=same):
        found = list(equal)
        yield found[0][0], sum(size for _, size in found)


def _drawn_type(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _on_cpu(likes: Mapping[str, Tensor], stds: Mapping[str, Std], key: Key, step: int) -> dict[str, Tensor]:
    """Filled block by block, each from a generator of its own, so that threads may share the work.

    The threads are those of one call: a pool that outlived it would hang a process that is forked. They run numpy
    alone, since torch would start as many threads again in each.
    """
    drawn = {name: torch.empty(like.shape, dtype=_drawn_type(like)) for name, like in likes.items()}
    blocks = [
        (values.view(-1).numpy(), float(stds[name]), key, step, name, block)
        for name, values in drawn.items()
        for block in range(-(-values.numel() // _BLOCK))
    ]
    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2 or sum(values.numel() for values in drawn.values()) < _BLOCK:
        for block in blocks:
            _fill_block(*block)
        return drawn
    with ThreadPoolExecutor(threads) as pool:
        for filled in [pool.submit(_fill_block, *block) for block in blocks]:
            filled.result()
    return drawn


def _fill_block(
    drawn: "np.ndarray[Any, np.dtype[Any]]", std: float, key: Key, step: int, name: str, block: int
) -> None:
    seed = int.from_bytes(key.derive("noise", name, str(step), str(block)), "little")
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, pool_size=8)))
    part = drawn[block * _BLOCK : (block + 1) * _BLOCK]
    for start in range(0, len(part), _HELD):  # what is held stays in the cache of one core
        few = part[start : start + _HELD]
        np.multiply(random.standard_normal(len(few)), std, out=few, casting="same_kind")


def _check_std(std: Std, dtype: torch.dtype) -> None:
    """Refuse what is no standard deviation, or one so small that noise of ``dtype`` would round to nothing."""
    if isinstance(std, Tensor):
        if std.ndim or not std.is_floating_point():
            raise ValueError(f"std must be a number or a 0-d tensor of one, got {tuple(std.shape)} of {std.dtype}")
        if std.is_cuda:
            return
        std = float(std)
    _validate.positive(std=std)
    least = torch.finfo(dtype).tiny
    if std < least:
        raise ValueError(f"std must be at least {least:.3g} for noise of {dtype}, got {std!r}: rescale the loss")
