"""Gaussian noise as a pure function of (secret run key, step, parameter).

On the CPU the numbers come from numpy's SFC64, whose state of 256 bits is derived anew for every block of values, on a
CUDA device from Philox4x64-10 under a 128-bit key. torch's own generators are not used: they keep 32 and 64 bits of
their seeds.
Neither stream is cryptographic, and the low-order bits of floating-point noise can leak what it hides (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012).

>>> import torch
>>> like = torch.zeros(2, 3)
>>> drawn = gaussian(like, std=2.0, key=7, step=0, name="layer.weight")
>>> bool((drawn == gaussian(like, std=2.0, key=7, step=0, name="layer.weight")).all())
True
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpgrad import _validate, device_noise
from dpgrad.keys import AnyKey, Key

_BLOCK = 1 << 16  # values on the CPU that share a generator: their number is part of the function
_HELD = 1 << 16  # pairs of values that a thread of the CPU works on at a time, in the cache of its core
_SHORT = 2.0**-20  # uniform numbers below it are given further digits

Std = float | Tensor


def gaussian(like: Tensor, std: Std, key: AnyKey, step: int, name: str) -> Tensor:
    """Independent N(0, std²) values of the shape and on the device of ``like``: float64 for float64, else float32.

    ``name`` is the parameter's. The values are the same whenever the key, step, name, shape, dtype and model of device
    are; the global generators are neither read nor moved. ``std`` may be a 0-d tensor; on a CUDA device its value is
    not checked, since that would wait for the device.

    Guarantee: values of different names, steps and keys, and of sampling, come from streams of their own. They are
    drawn and scaled in float64 and rounded once: made of 32 bits each, values would end at √(66 ln 2) ≈ 6.8 standard
    deviations, and δ would have to pay for the missing tails of every parameter and step. On the CPU they end at
    √(212 ln 2) ≈ 12.1, beyond which a pair of values would lie with probability 2^-106. The noise of one
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
    if not any(like.is_cuda for like in likes.values()):
        return _on_cpu(likes, stds, Key.of(key), step)
    return device_noise.gaussians(likes, stds, key, step)


def _drawn_type(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


class _Block(NamedTuple):
    """Values on the CPU that share a generator."""

    values: Tensor  # (values,), to be written
    size: int
    std: float
    state: bytes  # of the generator


def _on_cpu(likes: Mapping[str, Tensor], stds: Mapping[str, Std], key: Key, step: int) -> dict[str, Tensor]:
    """Drawn block by block, each from a generator of its own, so that threads may share the work.

    Uniform numbers are drawn in threads of this call alone: a pool that outlived it would hang a process that is
    forked. What is computed from them is left to the threads of torch, value by value, so that the number of threads
    does not matter.
    """
    drawn = {name: torch.empty(like.shape, dtype=_drawn_type(like), device="cpu") for name, like in likes.items()}
    blocks = [
        _Block(part, part.numel(), float(stds[name]), key.derive("noise", name, str(step), str(place)))
        for name, values in drawn.items()
        for place, part in enumerate(values.view(-1).split(_BLOCK))  # type: ignore[no-untyped-call]
    ]
    blocks.sort(key=lambda block: block.size, reverse=True)  # threads that take every so many-th have equal work
    threads = torch.get_num_threads()
    pairs = max(threads * _HELD, _pairs(_BLOCK))
    held = torch.empty(3, min(pairs, sum(_pairs(block.size) for block in blocks)), dtype=torch.float64, device="cpu")
    with ThreadPoolExecutor(threads) as pool:  # which starts a thread when there is work for it
        for few in _in_turn(blocks, pairs):
            _draw(few, held, pool, threads)
    return drawn


def _pairs(values: int) -> int:
    return (values + 1) // 2


def _in_turn(blocks: Iterable[_Block], most: int) -> Iterator[list[tuple[_Block, slice]]]:
    """As many blocks at a time as have ``most`` pairs of values, each with its place among them."""
    few: list[tuple[_Block, slice]] = []
    start = 0
    for block in blocks:
        pairs = _pairs(block.size)
        if start + pairs > most:
            yield few
            few, start = [], 0
        few.append((block, slice(start, start + pairs)))
        start += pairs
    yield few


def _draw(blocks: Sequence[tuple[_Block, slice]], held: Tensor, pool: Executor, threads: int) -> None:
    """Two values from two uniform numbers: √(−2 ln u)·(cos 2πv, sin 2πv) (Box and Muller, 1958).

    ``held``, (3, pairs), is where they are made, in float64.
    """
    pairs = blocks[-1][1].stop if blocks else 0
    lengths, angles, cosines = held[:, :pairs]
    uniform = held.numpy()
    workers = min(threads, 2 * pairs // _BLOCK)
    if workers > 1:
        list(pool.map(lambda first: _fill(blocks[first::workers], uniform), range(workers)))
    else:
        _fill(blocks, uniform)
    lengths.log_().mul_(-2).sqrt_()
    angles.mul_(2 * math.pi)
    torch.cos(angles, out=cosines)
    sines = angles.sin_()
    for block, place in blocks:
        length, half = lengths[place].mul_(block.std), place.stop - place.start
        torch.mul(length, cosines[place], out=block.values[:half])
        rest = slice(place.start, place.start + block.size - half)
        torch.mul(lengths[rest], sines[rest], out=block.values[half:])


def _fill(blocks: Iterable[tuple[_Block, slice]], uniform: "np.ndarray[Any, np.dtype[np.float64]]") -> None:
    """Uniform numbers in (0, 1) for the lengths of each block's pairs, and in [0, 1) for their angles.

    numpy's are multiples of 2^-53. Small ones, of which a length far out is made, are given 53 further binary digits.
    """
    bits = np.random.SFC64(0)
    random = np.random.Generator(bits)
    for block, place in blocks:
        state = np.frombuffer(block.state, "<u8").astype(np.uint64)
        bits.state = {"bit_generator": "SFC64", "state": {"state": state}, "has_uint32": 0, "uinteger": 0}
        lengths, angles = uniform[:2, place]
        random.random(out=lengths)
        random.random(out=angles)
        if lengths.min(initial=1.0) < _SHORT:
            short = np.flatnonzero(lengths < _SHORT)
            lengths[short] += (1 - random.random(len(short))) * 2.0**-53


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
