"""Philox4x64-10 in plain torch (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A word is a function of a key of 128 bits and a counter: where and with which others it is computed does not matter.
torch's signed integers hold the 64 bits of unsigned words.

>>> counters, step = torch.arange(1, 3), torch.tensor([5])
>>> words(counters, step, [1, 2]).shape
torch.Size([2, 4])
"""

import torch
from torch import Tensor

__all__ = ["constants", "signed", "words"]

# Table 2 and Section 3 of the paper.
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = (1 << 32) - 1


def signed(word: int) -> int:
    """The 64 bits of an unsigned word as torch's signed integers hold them.

    >>> signed(2**64 - 1)
    -1
    """
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def constants(key: list[int], device: torch.device | str) -> Tensor:
    """What a kernel needs to know: the two words of the key, the two multipliers and the two Weyl constants.

    >>> constants([1, 2], "cpu").shape
    torch.Size([6])
    """
    known = torch.tensor([signed(word) for word in (*key, *_MULTIPLIERS, *_WEYL)])
    if torch.device(device).type == "cuda":
        known = known.pin_memory()  # the copy then does not wait for the device
    return known.to(device, non_blocking=True)


def words(counters: Tensor, step: Tensor, key: list[int]) -> Tensor:
    """The four words of each of the counters (counter, 0, step, 0): (..., 4).

    >>> numbers = words(torch.tensor([1]), torch.tensor([0]), [0, 0])[0]
    >>> import numpy as np
    >>> made_by_numpy = np.random.Philox(key=0, counter=0).random_raw(4)
    >>> (numbers.numpy().view("u8") == made_by_numpy).all()
    np.True_
    """
    c0, c1, c2, c3 = counters, torch.zeros_like(step), step, torch.zeros_like(step)
    for i in range(_ROUNDS):
        k0, k1 = (signed(word + i * weyl) for word, weyl in zip(key, _WEYL, strict=True))
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high2, low2 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
    return torch.stack([c0, c1, c2, c3], dim=-1)


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of the 128-bit product of unsigned words, from products of 32-bit halves."""
    m0, m1 = multiplier & _LOW, multiplier >> 32
    x0, x1 = x & _LOW, _high(x)
    # No sum below reaches 2^64: (2^32-1)² + 2·(2^32-1) = 2^64 - 1. Signed arithmetic that wraps keeps the same bits.
    middle = x1 * m0 + _high(x0 * m0)
    cross = x0 * m1 + (middle & _LOW)
    return x1 * m1 + _high(middle) + _high(cross), x * signed(multiplier)


def _high(x: Tensor) -> Tensor:
    """The upper 32 bits, moved down: the shift of signed integers copies the sign, the mask takes the copies away."""
    return (x >> 32) & _LOW
