"""Secure noise: whole numbers whose law is that of a Gaussian, from the ChaCha20 stream, without floating point.

A value is K = X₀ + 2^9·X₁ + 2^18·X₂. Each X is drawn from one table with probabilities that are multiples of 2^-96, and
follows the discrete Gaussian of standard deviation 1024 but for a probability of 2^-80. K then follows, but for a
probability of `DISTANCE`, a law that a function of N(0, `SCALE`²) has. Sums are rounded to whole multiples of a
`grid` before K is added, in exact arithmetic, so the low-order bits of the result reveal nothing (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012). docs/proofs/secure_noise.md has the
proof.

>>> drawn = draw(Key.from_seed(7), 0, 5, "noise", "weight", "3")
>>> bool((draw(Key.from_seed(7), 2, 2, "noise", "weight", "3") == drawn[2:4]).all())
True
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.mechanism import chacha
from dpgrad.mechanism.keys import Key

__all__ = ["DISTANCE", "LIMIT", "SCALE", "Table", "draw", "grid", "inexact", "numbers", "rounded", "stream", "table"]

Whole: TypeAlias = NDArray[np.int64]
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

DISTANCE = 2.0**-78  # per value: the probability that it does not follow the law that is accounted
SCALE = 268_435_968  # the standard deviation of the noise in units of the grid, as accounted
LIMIT = 2.0**52  # what a rounded sum is clamped to, in units of the grid

_STD = 1 << 10  # of one part
_SHIFT = 9  # binary digits between two parts
_PARTS = 3
_COLUMNS = 1 << 16  # of the table: a part lies in [-32768, 32767], 32 standard deviations
_FAIR = 80  # binary digits that choose within a column
_WORDS = 4  # per value
_AT_ONCE = 1 << 14  # values whose words are held at a time
_MOST_ROUNDING = 1 / 16  # of the noise, that rounding to the grid may cost


class Table(NamedTuple):
    """The table of one part: column i gives i where the 80 digits lie below its threshold, else ``other``.

    >>> made = table()
    >>> len(made.high), made.high.dtype, made.low.dtype, made.other.dtype
    (65536, dtype('uint64'), dtype('uint16'), dtype('uint16'))
    """

    high: NDArray[np.uint64]  # the first 64 digits of the threshold
    low: NDArray[np.uint16]  # the other 16
    other: NDArray[np.uint16]


@lru_cache(maxsize=1)
def table() -> Table:
    """Make the table by the alias method (Walker, 1977; Vose, 1991) in whole numbers, the same on every machine.

    The parts' probabilities are multiples of 2^-96, each at least (1 − 2^-80) times that of the discrete Gaussian.
    """
    capacity = 1 << _FAIR
    left = weights()
    threshold, other = [capacity] * _COLUMNS, list(range(_COLUMNS))
    small = [i for i, weight in enumerate(left) if weight < capacity]
    large = [i for i, weight in enumerate(left) if weight >= capacity]
    while small and large:
        less, more = small.pop(), large[-1]
        threshold[less], other[less] = left[less], more
        left[more] -= capacity - left[less]
        if left[more] < capacity:
            small.append(large.pop())
    # A column that is full gives itself either way, so that its threshold need not be 2^80.
    threshold = [min(each, capacity - 1) for each in threshold]
    high = np.array([each >> 16 for each in threshold], np.uint64)
    low = np.array([each & 0xFFFF for each in threshold], np.uint16)
    return Table(high, low, np.array(other, np.uint16))


def weights() -> list[int]:
    """2^96 times the probability of each value of a part, from -32768 on; they add up to 2^96.

    >>> sum(weights()) == 2**96
    True
    """
    digits = 384
    one = 1 << digits
    falls = _exponential(one, 2 * _STD**2)  # e^{-1/(2·1024²)}
    ratio, square = falls, falls * falls >> digits
    density = [one]  # e^{-i²/(2·1024²)}, each too small by less than 2^-350
    for _ in range(_COLUMNS // 2):
        density.append(density[-1] * ratio >> digits)
        ratio = ratio * square >> digits
    total = 2 * sum(density) - one
    whole, slack = 1 << (_FAIR + 16), 1 << 64
    found = []
    for i in range(-_COLUMNS // 2, _COLUMNS // 2):
        exact = (density[abs(i)] + (1 << 64)) * (whole - _COLUMNS)  # (1 − 2^-80) of it, in units of 2^-96
        found.append((exact + slack) // total + 1)
    rest = whole - sum(found)
    if rest < 0:
        raise AssertionError("the weights of the table exceed 1")
    found[_COLUMNS // 2] += rest
    return found


def _exponential(one: int, divisor: int) -> int:
    """e^{-1/divisor} in units of 1/one, too small by a few units at most."""
    total, term, k = one, one, 0
    while term:
        k += 1
        term //= k * divisor
        total += -term if k % 2 else term
    return total - 2 * k


def stream(key: Key, *names: str) -> bytes:
    """The ChaCha20 key of the noise of these names: that of one parameter at one step, say."""
    return key.derive("secure noise", *names)


def draw(key: Key, start: int, count: int, *names: str, threads: int = 1) -> Whole:
    """Values ``start`` to ``start + count`` of the noise of these names, in units of the grid.

    ``threads`` share the work, and do not change the values.

    Guarantee: values of different keys, names and places come from words of their own.
    """
    _validate.whole(start=start, count=count)
    secret = stream(key, *names)
    out = np.empty(count, np.int64)

    def fill(done: int) -> None:
        many = min(_AT_ONCE, count - done)
        block, skipped = divmod((start + done) * _WORDS, chacha.BLOCK)
        blocks = -(-(skipped + many * _WORDS) // chacha.BLOCK)
        words = chacha.words(secret, block, blocks).reshape(-1)[skipped : skipped + many * _WORDS]
        numbers(words.reshape(many, _WORDS), out[done : done + many])

    pieces = range(0, count, _AT_ONCE)
    table()  # made once, before threads ask for it
    if min(threads, len(pieces)) < 2:
        for done in pieces:
            fill(done)
    else:
        with ThreadPoolExecutor(min(threads, len(pieces))) as pool:
            list(pool.map(fill, pieces))
    return out


def numbers(words: chacha.Words, out: Whole | None = None) -> Whole:
    """The value that each line of four words makes, (count, 4) to (count,).

    The first word holds three columns of 16 bits and 16 spare bits, the others the first 64 of 80 digits of each part.
    The spare bits are the last 16 digits, which decide where the others are equal to those of the threshold: with
    probability 2^-64. All parts share them.

    >>> numbers(np.zeros((1, 4), np.uint64)).tolist()
    [-8606744576]
    """
    high, low, other = table()
    short = words[:, :1].copy().view("<u2")  # (count, 4)
    out = np.empty(len(words), np.int64) if out is None else out
    for part in reversed(range(_PARTS)):
        column, chosen = short[:, part].astype(np.intp), words[:, part + 1]
        threshold = high.take(column)
        others = chosen >= threshold
        if (tied := chosen == threshold).any():
            others &= ~(tied & (short[:, 3] < low.take(column)))
        np.copyto(column, other.take(column), where=others)
        column -= _COLUMNS // 2
        if part == _PARTS - 1:
            out[:] = column
        else:
            out <<= _SHIFT
            out += column
    return out


def grid(std: float, clip: float, values: int) -> float:
    """The grid of a release of ``values`` numbers whose norm moves by at most ``clip``, for noise of at least ``std``.

    Guarantee: rounding moves a sum by at most one unit per number (`rounded`), so two rounded neighbours differ by at
    most clip/grid + 2√values units. The noise of `SCALE` units is at least std/clip times that, and the noise
    multiplier is what it would be without rounding.

    >>> 1 <= grid(std=1.0, clip=1.0, values=1_000_000) * SCALE < 1.00001
    True
    """
    _validate.positive(std=std, clip=clip)
    _validate.whole(least=1, values=values)
    moved = 2 * math.sqrt(values) * (std / clip) * (1 + 1e-12)  # units of noise that rounding calls for
    if not moved <= _MOST_ROUNDING * SCALE:
        raise OptionError(
            f"noise secure rounds to a grid that is too coarse for {values:,} values at noise multiplier "
            f"{std / clip:.4g}: use less noise or fewer parameters, or the ordinary noise"
        )
    found = std / (SCALE - moved) * (1 + 1e-12)
    if not found >= 1e-290:
        raise OptionError(f"std must be at least 1e-280 for noise secure, got {std!r}: rescale the loss")
    return found


def rounded(totals: Array, unit: float) -> Array:
    """Each total as a whole number of grid units, at most `LIMIT` in size and within one of total/unit where that is.

    >>> rounded(np.array([0.0, 2.6, -np.inf, np.nan]), 1.0).tolist()
    [0.0, 3.0, -4503599627370496.0, 0.0]
    """
    with np.errstate(over="ignore"):
        units = np.asarray(totals, np.float64) / unit
    found = np.nan_to_num(units, nan=0.0, posinf=LIMIT, neginf=-LIMIT)
    return np.rint(np.clip(found, -LIMIT, LIMIT))


def inexact(values: int, steps: int = 1) -> float:
    """The probability that some value of these steps does not follow the law that is accounted; at most 1.

    >>> round(inexact(values=1_000_000, steps=10_000), 16)
    3.31e-14
    """
    _validate.whole(values=values, steps=steps)
    return min(1.0, math.ldexp(float(values * steps), -78) * (1 + 2.0**-50))
