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

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgrad import _validate
from dpgrad.keys import AnyKey, Key

# A call on a CUDA device moves the offset of its generator by 4 for every 2 float64 values that one thread makes: by
# less than 2n + 8 for n values even if a single thread made them all. A stride of 2^33 therefore keeps the steps of
# tensors of up to 2^31 values apart, and 10^9 · 2^33 < 2^63: offsets never wrap. They must be multiples of 4.
STRIDE = 1 << 33
MOST_VALUES = 1 << 31
_CHUNK = 1 << 22  # float64 values that a CUDA device holds at a time
_BLOCK = 1 << 16  # values on the CPU that share a generator: their number is part of the function
_HELD = 1 << 13  # float64 values that a thread of the CPU holds at a time


def gaussian(like: Tensor, std: float | Tensor, key: AnyKey, step: int, name: str) -> Tensor:
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
    drawn = _empty(like, std, step)
    if like.is_cuda:
        _fill_on_cuda(drawn.view(-1), std, Key.of(key), step, name)
    else:
        _fill_on_cpu({name: drawn.view(-1)}, {name: std}, Key.of(key), step)
    return drawn


def gaussians(likes: Mapping[str, Tensor], stds: Mapping[str, float], key: AnyKey, step: int) -> dict[str, Tensor]:
    """`gaussian` for every parameter by name, each with its own standard deviation; threads of a CPU share the work.

    >>> import torch
    >>> likes, stds = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, {"weight": 2.0, "bias": 1.0}
    >>> drawn = gaussians(likes, stds, key=7, step=0)
    >>> bool((drawn["weight"] == gaussian(likes["weight"], 2.0, key=7, step=0, name="weight")).all())
    True
    """
    if any(like.is_cuda for like in likes.values()):
        return {name: gaussian(like, stds[name], key, step, name) for name, like in likes.items()}
    drawn = {name: _empty(like, stds[name], step) for name, like in likes.items()}
    _fill_on_cpu({name: values.view(-1) for name, values in drawn.items()}, stds, Key.of(key), step)
    return drawn


def _empty(like: Tensor, std: float | Tensor, step: int) -> Tensor:
    """Where the noise for ``like`` goes."""
    if not like.is_floating_point():
        raise ValueError(f"like must hold real floating-point values, got {like.dtype}")
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    drawn = torch.empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    _check_std(std, drawn.dtype)
    return drawn


def _fill_on_cpu(drawn: Mapping[str, Tensor], stds: Mapping[str, float | Tensor], key: Key, step: int) -> None:
    """Fill block by block, each from a generator of its own, so that threads may share the work.

    The threads are those of one call: a pool that outlived it would hang a process that is forked. They run numpy
    alone, since torch would start as many threads again in each.
    """
    blocks = [
        (values.numpy(), float(stds[name]), key, step, name, block)
        for name, values in drawn.items()
        for block in range(-(-values.numel() // _BLOCK))
    ]
    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2 or sum(values.numel() for values in drawn.values()) < _BLOCK:
        for block in blocks:
            _fill_block(*block)
        return
    with ThreadPoolExecutor(threads) as pool:
        for filled in [pool.submit(_fill_block, *block) for block in blocks]:
            filled.result()


def _fill_block(
    drawn: "np.ndarray[Any, np.dtype[Any]]", std: float, key: Key, step: int, name: str, block: int
) -> None:
    seed = int.from_bytes(key.derive("noise", name, str(step), str(block)), "little")
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, pool_size=8)))
    part = drawn[block * _BLOCK : (block + 1) * _BLOCK]
    for start in range(0, len(part), _HELD):  # what is held stays in the cache of one core
        few = part[start : start + _HELD]
        np.multiply(random.standard_normal(len(few)), std, out=few, casting="same_kind")


def _fill_on_cuda(drawn: Tensor, std: float | Tensor, key: Key, step: int, name: str) -> None:
    """Fill ``drawn`` from a generator of its own on the device."""
    if drawn.numel() > MOST_VALUES:
        raise ValueError(f"{name} must have at most {MOST_VALUES:,} values, got {drawn.numel():,}: split it")
    random = torch.Generator(drawn.device)
    random.manual_seed(int.from_bytes(key.derive("noise on cuda", name, size=8), "little"))
    random.set_offset(step * STRIDE)
    for part in torch.split(drawn, _CHUNK):
        values = torch.randn(part.numel(), generator=random, dtype=torch.float64, device=drawn.device)
        torch.mul(values, std, out=part)


def _check_std(std: float | Tensor, dtype: torch.dtype) -> None:
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
