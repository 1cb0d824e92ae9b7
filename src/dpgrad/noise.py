"""Gaussian noise as a pure function of (secret run key, step, parameter).

On the CPU the numbers come from numpy's Philox4x64-10 under a 128-bit key, on a CUDA device from torch's Philox4x32-10
under a 64-bit seed. torch's generator for the CPU is not used: it keeps 32 bits of its seed. Neither stream is
cryptographic, and the low-order bits of floating-point noise can leak what it hides (Mironov, "On significance of the
least significant bits for differential privacy", CCS 2012).

>>> import torch
>>> like = torch.zeros(2, 3)
>>> drawn = gaussian(like, std=2.0, key=7, step=0, name="layer.weight")
>>> bool((drawn == gaussian(like, std=2.0, key=7, step=0, name="layer.weight")).all())
True
"""

from collections.abc import Callable

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
_CHUNK = 1 << 22  # float64 values held at a time


def gaussian(like: Tensor, std: float | Tensor, key: AnyKey, step: int, name: str) -> Tensor:
    """Independent N(0, std²) values of the shape and on the device of ``like``: float64 for float64, else float32.

    ``name`` is the parameter's. The values are the same whenever the key, step, name, shape, dtype and model of device
    are; the global generators are neither read nor moved. ``std`` may be a 0-d tensor; on a CUDA device its value is
    not checked, since that would wait for the device.

    Guarantee: values of different names, steps and keys, and of sampling, come from disjoint streams. They are drawn
    and scaled in float64 and rounded once: made of 32 bits each, float32 values of CUDA end at √(66 ln 2) ≈ 6.8
    standard deviations, and δ would have to pay for the missing tails of every parameter and step. The noise of one
    (key, step, name) may be added to one sum only: the difference of two sums with the same noise has none.

    >>> import torch
    >>> gaussian(torch.zeros(3, dtype=torch.bfloat16), std=1.0, key=7, step=0, name="bias").dtype
    torch.float32
    >>> gaussian(torch.zeros(3), std=0.0, key=7, step=0, name="bias")
    Traceback (most recent call last):
    ValueError: std must be positive and finite, got 0.0
    """
    if not like.is_floating_point():
        raise ValueError(f"like must hold real floating-point values, got {like.dtype}")
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    drawn = torch.empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    _check_std(std, drawn.dtype)
    normal = (_on_cuda if like.is_cuda else _on_cpu)(drawn, Key.of(key), step, name)
    for part in torch.split(drawn.view(-1), _CHUNK):
        torch.mul(normal(part.numel()), std, out=part)
    return drawn


def _on_cpu(drawn: Tensor, key: Key, step: int, name: str) -> Callable[[int], Tensor]:
    """Standard normal values from numpy, in float64; a step has 2^128 blocks of the generator of its own."""
    words = np.frombuffer(key.derive("noise", name, size=16), "<u8")
    random = np.random.Generator(np.random.Philox(key=words, counter=np.array([0, 0, step, 0], np.uint64)))
    return lambda count: torch.from_numpy(random.standard_normal(count))


def _on_cuda(drawn: Tensor, key: Key, step: int, name: str) -> Callable[[int], Tensor]:
    """Standard normal values from a generator of its own on the device, in float64."""
    if drawn.numel() > MOST_VALUES:
        raise ValueError(f"{name} must have at most {MOST_VALUES:,} values, got {drawn.numel():,}: split it")
    random = torch.Generator(drawn.device)
    random.manual_seed(int.from_bytes(key.derive("noise on cuda", name, size=8), "little"))
    random.set_offset(step * STRIDE)
    return lambda count: torch.randn(count, generator=random, dtype=torch.float64, device=drawn.device)


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
