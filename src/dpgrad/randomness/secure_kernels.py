"""Noise of the secure source on a CUDA device: ChaCha20 (RFC 8439) and the table of `dpgrad.mechanism.secure`.

The bits are those of `dpgrad.randomness.secure_noise`, which is the plain path.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device
from dpgrad.mechanism import secure

__all__ = ["keys", "noisy", "tables"]

_LIMIT = tl.constexpr(secure.LIMIT)


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _block(key, counter):
    """The sixteen words of blocks of the stream of a key; beyond 2^32 blocks the counter goes on in the nonce."""
    low = counter.to(tl.uint32)
    zero = low ^ low
    k0 = zero + tl.load(key + 0).to(tl.uint32, bitcast=True)
    k1 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    k2 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    k3 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    k4 = zero + tl.load(key + 4).to(tl.uint32, bitcast=True)
    k5 = zero + tl.load(key + 5).to(tl.uint32, bitcast=True)
    k6 = zero + tl.load(key + 6).to(tl.uint32, bitcast=True)
    k7 = zero + tl.load(key + 7).to(tl.uint32, bitcast=True)
    n0 = (counter >> 32).to(tl.uint32)
    c0 = zero + 0x61707865
    c1 = zero + 0x3320646E
    c2 = zero + 0x79622D32
    c3 = zero + 0x6B206574
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, low, n0, zero, zero
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + low, x13 + n0, x14, x15,
    )  # fmt: skip


@triton.jit
def _part(column, first, second, spare, high, low, other):
    """One part of a value: that of its column, or the other one."""
    at = column.to(tl.int32)
    digits = first.to(tl.uint64) | (second.to(tl.uint64) << 32)
    threshold = tl.load(high + at).to(tl.uint64, bitcast=True)
    last = tl.load(low + at)
    own = (digits < threshold) | ((digits == threshold) & (spare.to(tl.int32) < last))
    return tl.where(own, at, tl.load(other + at)).to(tl.int64) - 32768


@triton.jit
def _value(w0, w1, w2, w3, w4, w5, w6, w7, high, low, other):
    """A value in units of the grid, from eight words."""
    spare = w1 >> 16
    x0 = _part(w0 & 0xFFFF, w2, w3, spare, high, low, other)
    x1 = _part(w0 >> 16, w4, w5, spare, high, low, other)
    x2 = _part(w1 & 0xFFFF, w6, w7, spare, high, low, other)
    return x0 + x1 * 512 + x2 * 262144


@triton.jit
def _noisy(
    out, keys, starts, high, low, other, total, unit, divisor, skipped, EACH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(rounded total + noise)·unit / divisor, or the noise in units of the grid: two values a block of ChaCha20.

    The programs of one line serve one parameter, whose values lie from its start to the next one's.
    """
    line = tl.program_id(1)
    begin = tl.load(starts + line)
    count = tl.load(starts + line + 1) - begin
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if 2 * first < count + (skipped & 1):
        place = (skipped >> 1) + first + tl.arange(0, BLOCK)
        w0, w1, w2, w3, w4, w5, w6, w7, v0, v1, v2, v3, v4, v5, v6, v7 = _block(keys + line * 8, place)
        one = _value(w0, w1, w2, w3, w4, w5, w6, w7, high, low, other)
        two = _value(v0, v1, v2, v3, v4, v5, v6, v7, high, low, other)
        value = tl.reshape(tl.join(one, two), (2 * BLOCK,)).to(tl.float64)
        within = 2 * first + tl.arange(0, 2 * BLOCK) - (skipped & 1)
        known = (within >= 0) & (within < count)
        at = begin + within
        if total is not None:
            size = tl.load(unit + at, mask=known, other=1.0) if EACH else tl.load(unit)
            units = tl.load(total + at, mask=known, other=0.0).to(tl.float64) / size
            units = tl.where(units == units, units, 0.0)
            units = tl.minimum(tl.maximum(units, -_LIMIT), _LIMIT)
            down = tl.floor(units)
            rest = units - down
            odd = tl.floor(down * 0.5) * 2.0 != down
            units = down + tl.where((rest > 0.5) | ((rest == 0.5) & odd), 1.0, 0.0)
            value = (units + value) * size / tl.load(divisor)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=known)


def tables(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """The table of one part, where the kernel reads it."""
    high, low, other = secure.table()
    signed = high.view(np.int64), low.astype(np.int32), other.astype(np.int32)
    return tuple(torch.from_numpy(each.copy()).to(device) for each in signed)  # type: ignore[return-value]


def keys(secrets: list[bytes]) -> Tensor:
    """The ChaCha20 keys of some parameters, (parameters, 8) words, on the host."""
    return torch.from_numpy(np.frombuffer(b"".join(secrets), "<i4").astype(np.int32).reshape(-1, 8).copy())


@on_its_device
def noisy(
    out: Tensor,
    keys: Tensor,
    starts: Tensor,
    most: int,
    table: tuple[Tensor, Tensor, Tensor],
    total: Tensor | None = None,
    unit: Tensor | None = None,
    divisor: Tensor | None = None,
    skipped: int = 0,
) -> None:
    """Write the noise of some parameters, which lie one after another, or (rounded total + noise)·unit / divisor.

    ``starts`` (parameters + 1) are where they begin and the last ends, and ``most`` values has the largest. ``skipped``
    values of each stream are left out before the first. ``unit``, one number or one for each value, and ``divisor`` are
    in float64.
    """
    block = 128
    grid = (-(-(most + 1) // (2 * block)), len(keys))
    each = unit is not None and unit.numel() > 1
    _noisy[grid](out, keys, starts, *table, total, unit, divisor, skipped, EACH=each, BLOCK=block)
