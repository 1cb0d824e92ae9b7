"""Gaussian noise in numpy, a pure function of (secret key, what it is for): the law of every draw on a CPU.

The numbers come from numpy's SFC64, whose state of 256 bits is derived anew for every block of values. The stream is
not cryptographic, and the low-order bits of floating-point noise can leak what it hides (Mironov, "On significance of
the least significant bits for differential privacy", CCS 2012).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dpgrad.mechanism.keys import Key

__all__ = ["Array", "Wanted", "fill", "gaussian"]

_BLOCK = 1 << 16  # values that share a generator: their number is part of the function
_AT_ONCE = 1 << 14  # pairs of values of several short blocks, which are transformed together
_SHORT = 2.0**-20  # uniform numbers below it are given further digits

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Wanted(NamedTuple):
    """Values to be drawn: where they are written, a flat array; their standard deviation; and what they are for.

    They are those from ``start`` on of ``size`` values, all of them by default.
    """

    values: Array
    std: float
    names: tuple[str, ...]
    start: int = 0
    size: int | None = None


class _Block(NamedTuple):
    """Values that share a generator."""

    values: Array
    std: float
    state: bytes  # of the generator


def gaussian(key: Key, shape: tuple[int, ...], std: float, *names: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Independent N(0, std²) values, the same whenever the key, the names and the shape are.

    Guarantee: values of different names come from streams of their own. They end at √(212 ln 2) ≈ 12.1 standard
    deviations, beyond which a pair of values would lie with probability 2^-106.

    >>> one, again, other = (gaussian(Key.from_seed(7), (2, 1), 1.0, "noise", step) for step in "001")
    >>> bool((one == again).all()), bool((one == other).any())
    (True, False)
    """
    values = np.empty(math.prod(shape))
    fill(key, [Wanted(values, std, names)])
    return values.reshape(shape)


def fill(key: Key, wanted: Iterable[Wanted], threads: int = 1) -> None:
    """Draw values block by block, each from a generator of its own, so threads may share the work.

    The threads are those of one call: a pool that outlived it would hang a process that is forked. They run numpy
    alone, since torch would start as many threads again in each.

    >>> whole, part = np.empty(100_000), np.empty(7)
    >>> fill(Key.from_seed(7), [Wanted(whole, 1.0, ("noise",))])
    >>> fill(Key.from_seed(7), [Wanted(part, 1.0, ("noise",), start=65_533, size=100_000)])
    >>> bool((part == whole[65_533:65_540]).all())
    True
    """
    cut: list[tuple[Array, Array]] = []  # parts of blocks, and what is drawn for them
    blocks = [block for each in wanted for block in _blocks(key, each, cut)]
    _shared(blocks, threads)
    for values, drawn in cut:
        values[:] = drawn


def _blocks(key: Key, wanted: Wanted, cut: list[tuple[Array, Array]]) -> Iterator[_Block]:
    """The blocks that values lie in; of one that is not wanted whole, all is drawn elsewhere, and noted in ``cut``."""
    values, std, names, start, size = wanted
    if not start and size is None and 0 < len(values) <= _BLOCK:
        yield _Block(values, std, key.derive(*names, "0"))
        return
    stop = start + len(values)
    size = stop if size is None else size
    for place in range(start // _BLOCK, -(-stop // _BLOCK)) if len(values) else ():
        first, last = place * _BLOCK, min((place + 1) * _BLOCK, size)
        here = values[max(first - start, 0) : last - start]
        state = key.derive(*names, str(place))
        if first >= start and last <= stop:
            yield _Block(here, std, state)
        else:
            drawn = np.empty(last - first, values.dtype)
            cut.append((here, drawn[max(start - first, 0) : stop - first]))
            yield _Block(drawn, std, state)


def _shared(blocks: list[_Block], threads: int) -> None:
    """Draw the blocks, on as many threads as there is work for."""
    waiting = iter(_in_groups(blocks))  # each thread takes the next
    threads = min(threads, len(blocks))
    if threads < 2 or sum(len(block.values) for block in blocks) < _BLOCK:
        _draw(waiting)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_draw, waiting) for _ in range(threads)]:
            done.result()


def _in_groups(blocks: Iterable[_Block]) -> list[list[_Block]]:
    """Neighbouring blocks that are short and have one standard deviation, to be transformed together."""
    groups: list[list[_Block]] = []
    pairs, std = 0, math.nan
    for block in blocks:
        own = (len(block.values) + 1) // 2
        pairs += own
        if pairs > _AT_ONCE or block.std != std:
            groups.append([])
            pairs, std = own, block.std
        groups[-1].append(block)
    return groups


def _draw(groups: Iterator[list[_Block]]) -> None:
    """Two values from two uniform numbers: √(−2 ln u)·(cos 2πv, sin 2πv) (Box and Muller, 1958).

    They are cos 2πv = 2/(1 + t²) − 1 and sin 2πv = 2t/(1 + t²) with t = tan πv: one function in place of two.
    """
    random = np.random.Generator(np.random.SFC64(0))
    held = np.empty((3, 0))
    for blocks in groups:
        ends = [*accumulate((len(block.values) + 1) // 2 for block in blocks)]
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if held.shape[1] < ends[-1]:
            held = np.empty((3, ends[-1]))
        lengths, tangents, bases = held[:, : ends[-1]]
        _fill(lengths, tangents, parts, random, [block.state for block in blocks])
        np.log(lengths, out=lengths)
        np.multiply(lengths, -2, out=lengths)
        np.sqrt(lengths, out=lengths)
        np.multiply(lengths, blocks[0].std, out=lengths)
        np.multiply(tangents, math.pi, out=tangents)
        np.tan(tangents, out=tangents)
        np.multiply(tangents, tangents, out=bases)
        np.multiply(bases, 0.5, out=bases)
        np.add(bases, 0.5, out=bases)
        np.divide(lengths, bases, out=bases)
        np.subtract(bases, lengths, out=lengths)
        np.multiply(bases, tangents, out=bases)
        for (values, _, _), part in zip(blocks, parts, strict=True):
            pairs = part.stop - part.start
            values[:pairs] = lengths[part]
            values[pairs:] = bases[part][: len(values) - pairs]


def _fill(
    lengths: Array, angles: Array, parts: Sequence[slice], random: np.random.Generator, states: Sequence[bytes]
) -> None:
    """Uniform numbers, part by part from a state of 256 bits: in (0, 1) for the lengths of pairs, in [0, 1) for angles.

    numpy's are multiples of 2^-53. Small ones, of which a length far out is made, are given 53 further binary digits.
    """
    words = np.frombuffer(b"".join(states), "<u8").astype(np.uint64, copy=False).reshape(-1, 4)
    state: dict[str, Any] = {"bit_generator": "SFC64", "state": {}, "has_uint32": 0, "uinteger": 0}

    def begin(part: slice, own: Array) -> None:
        state["state"]["state"] = own
        random.bit_generator.state = state
        random.random(out=lengths[part])
        random.random(out=angles[part])

    for part, own in zip(parts, words, strict=True):
        begin(part, own)
    if lengths.min() >= _SHORT:
        return
    for part, own in zip(parts, words, strict=True):
        short = part.start + np.flatnonzero(lengths[part] < _SHORT)
        if len(short):
            begin(part, own)  # the digits are those that follow
            lengths[short] += (1 - random.random(len(short))) * 2.0**-53
