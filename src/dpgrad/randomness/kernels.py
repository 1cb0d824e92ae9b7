"""Random words and Gaussian noise from Philox4x64-10 (Salmon et al., SC 2011), each a function of its counter.

Keys are those of `dpgrad.randomness.philox.constants`, which is the plain path with `dpgrad.randomness.philox.words`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["below", "noisy"]

_TURN = tl.constexpr(2 * math.pi)


@triton.jit
def _block(words, counter, step):
    """The four words of the counter (counter, 0, step, 0)."""
    k0 = tl.load(words + 0).to(tl.uint64, bitcast=True)
    k1 = tl.load(words + 1).to(tl.uint64, bitcast=True)
    m0 = tl.load(words + 2).to(tl.uint64, bitcast=True)
    m1 = tl.load(words + 3).to(tl.uint64, bitcast=True)
    w0 = tl.load(words + 4).to(tl.uint64, bitcast=True)
    w1 = tl.load(words + 5).to(tl.uint64, bitcast=True)
    c0 = counter.to(tl.uint64)
    c1 = c0 * 0
    c2 = c1 + step
    c3 = c1
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        low0 = c0 * m0
        high2 = tl.umulhi(c2, m1)
        low2 = c2 * m1
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += w0
        k1 += w1
    return c0, c1, c2, c3


@triton.jit
def _below(out, words, steps, lasts, rows, BLOCK: tl.constexpr):
    """Whether each word is at most the step's last; counters begin at 1."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1)
    last = tl.load(lasts + which).to(tl.uint64, bitcast=True)
    step = tl.load(steps + which).to(tl.uint64, bitcast=True)
    c0, c1, c2, c3 = _block(words, place + 1, step)
    row = place.to(tl.int64) * 4
    line = out + which.to(tl.int64) * rows
    tl.store(line + row, c0 <= last, mask=row < rows)
    tl.store(line + row + 1, c1 <= last, mask=row + 1 < rows)
    tl.store(line + row + 2, c2 <= last, mask=row + 2 < rows)
    tl.store(line + row + 3, c3 <= last, mask=row + 3 < rows)


@on_its_device
def below(words: Tensor, steps: Tensor, lasts: Tensor, rows: int) -> Tensor:
    """Whether the word of each row at each step is at most the step's last, (steps, rows) bool."""
    out = torch.empty(len(steps), rows, dtype=torch.bool, device=steps.device)
    block = 256
    _below[(-(-rows // (4 * block)), len(steps))](out, words, steps, lasts, rows, BLOCK=block)
    return out


@triton.jit
def _pair(of_length, of_angle):
    """Two independent standard normal values from two words (Box and Muller, 1958)."""
    u = (of_length >> 11).to(tl.float64) * 2.0**-53 + ((of_length & 2047).to(tl.float64) + 0.5) * 2.0**-64
    length = tl.sqrt(-2.0 * tl.log(u))
    angle = (of_angle >> 11).to(tl.float64) * 2.0**-53 * _TURN
    return length * tl.cos(angle), length * tl.sin(angle)


@triton.jit
def _noisy(out, total, std, divisor, stopped, words, steps, first, count, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """(total + std·z) / divisor, four values a counter; NaN where the step is stopped."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(steps).to(tl.uint64, bitcast=True)
    c0, c1, c2, c3 = _block(words, first + place + 1, step)
    z0, z1 = _pair(c0, c1)
    z2, z3 = _pair(c2, c3)
    z = tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (4 * BLOCK,))
    at = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
    known = at < count
    value = z * (tl.load(std + at, mask=known, other=0.0) if EACH else tl.load(std))
    if total is not None:
        value += tl.load(total + at, mask=known, other=0.0).to(tl.float64)
        value /= tl.load(divisor)
    if stopped is not None:
        value = tl.where(tl.load(stopped) > 0, float("nan"), value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=known)


@on_its_device
def noisy(
    out: Tensor,
    words: Tensor,
    step: Tensor,
    first: int,
    std: Tensor,
    total: Tensor | None = None,
    divisor: Tensor | None = None,
    stopped: Tensor | None = None,
) -> None:
    """Write std·z, or (total + std·z) / divisor, z standard normal from the counters after ``first`` at ``step``.

    ``std``, one number or one for each value, and ``divisor`` are in float64. Where ``stopped`` is above 0, NaN is
    written.
    """
    block = 128
    grid = (-(-out.numel() // (4 * block)),)
    each = std.numel() > 1
    _noisy[grid](out, total, std, divisor, stopped, words, step, first, out.numel(), EACH=each, BLOCK=block)
