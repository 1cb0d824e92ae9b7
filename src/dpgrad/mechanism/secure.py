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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.mechanism import chacha
from dpgrad.mechanism.keys import Key

__all__ = [
    "DISTANCE",
    "LIMIT",
    "SCALE",
    "Table",
    "Wanted",
    "draw",
    "fill",
    "grid",
    "inexact",
    "numbers",
    "rounded",
    "stream",
    "table",
]

Whole: TypeAlias = NDArray[np.int64]
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

DISTANCE = 2.0**-78  # per value: the probability that it does not follow the law that is accounted
SCALE = 268_435_968  # the standard deviation of the noise in units of the grid, as accounted
LIMIT = 2.0**52  # what a rounded sum is clamped to, in units of the grid

_STD = 1 << 10  # of one part
_SHIFT = 9  # binary digits between two parts
_PARTS = 3
_COLUMNS = 1 << 16  # of the table: a part lies in [-32768, 32767], 32 standard deviations
_FIRST = np.uint32(0xFFFF << 16)  # the digits that decide nearly always, of the first 32
_FAIR = 80  # binary digits that choose within a column
_WORDS = 4  # per value
_VALUES = chacha.BLOCK // _WORDS  # in a block of the stream
_AT_ONCE = 1 << 14  # values that are drawn at a time
_WORTH = 4  # times as many that are worth a thread
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
    # A column that is full gives itself either way, so its threshold need not be 2^80.
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


class Wanted(NamedTuple):
    """Noise of some names from ``start`` on, and where it goes: ``values``, flat.

    Without a ``total`` these get whole numbers, in units of the grid. With one they get (rounded total +
    noise)·unit/divisor, where the total may be ``values`` itself.

    >>> Wanted(np.empty(3), ("noise", "weight", "0")).unit
    1.0
    """

    values: Any
    names: tuple[str, ...]
    start: int = 0
    total: Any = None
    unit: float = 1.0
    divisor: float = 1.0


def fill(key: Key, wanted: Sequence[Wanted], threads: int = 1) -> None:
    """Draw noise, and add it to what it belongs to, a few thousand values at a time.

    Threads share the work where there is enough, and do not change the values. They are those of one call (see
    `dpgrad.mechanism.normal.fill`) and run numpy alone.

    Guarantee: values of different keys, names and places come from words of their own.

    >>> out = np.array([1.0, -2.0, 0.5])
    >>> fill(Key.from_seed(7), [Wanted(out, ("a",), total=out, unit=2.0**-28)])
    >>> bool((out == [1.0, -2.0, 0.5] + draw(Key.from_seed(7), 0, 3, "a") * 2.0**-28).all())
    True
    """
    chunks = _chunks(wanted)
    _quick()  # made once, before threads ask for it
    waiting = iter(chunks)  # each thread takes the next
    slots = max((sum(piece.slots for piece in chunk) for chunk in chunks), default=0)

    def work() -> None:
        desk = _Desk(slots)
        for chunk in waiting:
            desk.fill(key, wanted, chunk)

    threads = min(threads, len(chunks) // _WORTH)
    if threads < 2:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()


def draw(key: Key, start: int, count: int, *names: str, threads: int = 1) -> Whole:
    """Values ``start`` to ``start + count`` of the noise of these names, in units of the grid; see `fill`."""
    _validate.whole(start=start, count=count)
    out = np.empty(count, np.int64)
    fill(key, [Wanted(out, names, start)], threads)
    return out


class _Piece(NamedTuple):
    """Neighbouring values of one of those wanted."""

    place: int  # of the wanted
    first: int  # of its values
    length: int
    block: int  # of its stream
    skipped: int  # values of that block that come before
    slots: int  # values in the blocks that hold it


def _chunks(wanted: Sequence[Wanted]) -> list[list[_Piece]]:
    """What is wanted, cut into pieces, and as many of them together as are drawn at a time."""
    chunks: list[list[_Piece]] = []
    room = 0
    for place, each in enumerate(wanted):
        done, count = 0, len(each.values)
        while done < count:
            if room < 2 * _VALUES:  # a piece has at most one value too many at either end
                chunks.append([])
                room = _AT_ONCE
            block, skipped = divmod(each.start + done, _VALUES)
            many = min(room - skipped, count - done)
            slots = -(-(skipped + many) // _VALUES) * _VALUES
            chunks[-1].append(_Piece(place, done, many, block, skipped, slots))
            room -= slots
            done += many
    return chunks


class _Desk:
    """Room for some values while they are drawn: memory that is used again and again stays in the cache."""

    def __init__(self, slots: int) -> None:
        self._words = np.empty((slots, _WORDS), np.uint64)
        self._columns = np.empty(_PARTS * slots, np.intp)
        self._found, self._digits = np.empty((2, _PARTS * slots), np.uint32)
        self._own = np.empty(_PARTS * slots, np.bool_)
        self._noise, self._sums = np.empty((2, slots))

    def fill(self, key: Key, wanted: Sequence[Wanted], pieces: Sequence[_Piece]) -> None:
        """Draw some pieces, whose words lie one after another."""
        at = 0
        for piece in pieces:
            words = self._words[at : at + piece.slots].reshape(-1, chacha.BLOCK)
            chacha.words(stream(key, *wanted[piece.place].names), piece.block, len(words), out=words)
            at += piece.slots
        noise = self.numbers(self._words[:at])
        at = 0
        for place, first, length, _, skipped, slots in pieces:
            values, _, _, total, unit, divisor = wanted[place]
            here, drawn = values[first : first + length], noise[at + skipped : at + skipped + length]
            if total is not None:
                sums = self._sums[:length]
                sums[:] = total[first : first + length]
                _round(sums, unit)
                sums += drawn
                sums *= unit
                sums /= divisor
                drawn = sums
            np.copyto(here, drawn, casting="unsafe")
            at += slots

    def numbers(self, words: chacha.Words) -> Array:
        """The value that each line of four words makes, as a whole number in float64, in memory that is used again.

        The first 16 digits of each part decide nearly always: only where they are those of the threshold are the
        others compared.
        """
        count = len(words)
        columns, found, digits, own = (
            each[: _PARTS * count] for each in (self._columns, self._found, self._digits, self._own)
        )
        columns.reshape(_PARTS, count)[:] = words.view("<u2")[:, :_PARTS].T  # part after part
        np.bitwise_and(words.view("<u4")[:, 3::2].T, _FIRST, out=digits.reshape(_PARTS, count))
        _quick().take(columns, out=found, mode="clip")
        np.less_equal(digits, found, out=own)  # in their first 16 digits: those of `digits` have zeros behind them
        places = np.flatnonzero(own)
        kept, near = columns.take(places), found.take(places)
        for n in np.flatnonzero((digits.take(places) ^ near) <= 0xFFFF):
            part, line = divmod(int(places[n]), count)
            if not _below(words[line], part):
                kept[n] = near[n] & 0xFFFF
        found[places] = kept
        np.bitwise_and(found, 0xFFFF, out=found)
        one, two, three = found.reshape(_PARTS, count)
        noise, lower = self._noise[:count], digits[:count]
        np.left_shift(two, _SHIFT, out=lower)
        lower += one
        np.multiply(three, float(1 << 2 * _SHIFT), out=noise)
        noise += lower
        noise -= _COLUMNS // 2 * (1 + (1 << _SHIFT) + (1 << 2 * _SHIFT))
        return noise


def _below(words: chacha.Words, part: int) -> bool:
    """Whether the 80 digits of a part, in the four words of a value, are below the threshold of its column."""
    high, low, _ = table()
    column, spare = (int(words[0]) >> shift & 0xFFFF for shift in (16 * part, 16 * _PARTS))
    return (int(words[part + 1]), spare) < (int(high[column]), int(low[column]))


@lru_cache(maxsize=1)
def _quick() -> NDArray[np.uint32]:
    """The first 16 digits of each threshold, and the value that the column gives beyond: found by one look."""
    high, _, other = table()
    return ((high >> np.uint64(48)).astype(np.uint32) << np.uint32(16)) | other


def numbers(words: chacha.Words) -> Whole:
    """The value that each line of four words makes, (count, 4) to (count,).

    The first word holds three columns of 16 bits and 16 spare bits, the others the first 64 of 80 digits of each part.
    The spare bits are the last 16 digits, which decide where the others are equal to those of the threshold: with
    probability 2^-64. All parts share them.

    >>> numbers(np.zeros((1, 4), np.uint64)).tolist()
    [-8606744576]
    """
    return _Desk(len(words)).numbers(np.ascontiguousarray(words)).astype(np.int64)


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
    found = np.array(totals, np.float64)
    _round(found, unit)
    return found


def _round(sums: Array, unit: float) -> None:
    """`rounded`, in place."""
    with np.errstate(over="ignore"):
        sums /= unit
    if not (sums.max() <= LIMIT and sums.min() >= -LIMIT):  # also where one is not a number
        np.nan_to_num(sums, copy=False, nan=0.0, posinf=LIMIT, neginf=-LIMIT)
        np.clip(sums, -LIMIT, LIMIT, out=sums)
    np.rint(sums, out=sums)


def inexact(values: int, steps: int = 1) -> float:
    """The probability that some value of these steps does not follow the law that is accounted; at most 1.

    >>> round(inexact(values=1_000_000, steps=10_000), 16)
    3.31e-14
    """
    _validate.whole(values=values, steps=steps)
    return min(1.0, math.ldexp(float(values * steps), -78) * (1 + 2.0**-50))
