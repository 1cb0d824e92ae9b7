"""Gaussian noise as a pure function of (secret run key, step, parameter).

On the CPU the numbers come from `dpgrad.mechanism.normal`, on a CUDA device from Philox4x64-10 under a 128-bit key.
torch's own generators are not used: they keep 32 and 64 bits of their seeds.
Neither stream is cryptographic, and the low-order bits of floating-point noise can leak what it hides (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012).

>>> import torch
>>> like = torch.zeros(2, 3)
>>> drawn = gaussian(like, std=2.0, key=7, step=0, name="layer.weight")
>>> bool((drawn == gaussian(like, std=2.0, key=7, step=0, name="layer.weight")).all())
True
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.mechanism import normal
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.randomness import device_noise

__all__ = ["Means", "Part", "Std", "gaussian", "gaussian_parts", "gaussians", "noisy_means"]

Std = float | Tensor
_TOGETHER = 1 << 20  # values of several parameters that are drawn before their totals are added


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
    dpgrad.errors.OptionError: std must be positive and finite, got 0.0
    """
    return gaussians({name: like}, {name: std}, key, step)[name]


def gaussians(likes: Mapping[str, Tensor], stds: Mapping[str, Std], key: AnyKey, step: int) -> dict[str, Tensor]:
    """`gaussian` for every parameter by name, each with its own standard deviation.

    The threads of a CPU share the work, and the tensors share their memory. On a CUDA device all parameters are drawn
    together, and the values of one depend on which others stand beside it.

    >>> import torch
    >>> likes, stds = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, {"weight": 2.0, "bias": 1.0}
    >>> drawn = gaussians(likes, stds, key=7, step=0)
    >>> bool((drawn["weight"] == gaussian(likes["weight"], 2.0, key=7, step=0, name="weight")).all())
    True
    """
    _check(likes, stds, step)
    if not any(like.is_cuda for like in likes.values()):
        return _on_cpu(likes, stds, Key.of(key), step)
    return device_noise.gaussians(likes, stds, key, step)


class Part(NamedTuple):
    """The values from ``start`` to ``stop`` of a parameter that is laid out flat, row by row.

    >>> Part("weight", 2, 5).stop
    5
    """

    name: str
    start: int
    stop: int


def gaussian_parts(
    likes: Mapping[str, Tensor], parts: Sequence[Part], stds: Mapping[str, Std], key: AnyKey, step: int
) -> list[Tensor]:
    """Slices, at any offsets, of what `gaussians` draws for ``likes``; all of it need not be drawn for them.

    A rank that holds a shard of a parameter draws the noise of that shard: whatever the shards, every value has the
    noise that one process would add.

    >>> import torch
    >>> likes, stds = {"weight": torch.zeros(40, 50), "bias": torch.zeros(40)}, {"weight": 2.0, "bias": 1.0}
    >>> (few,) = gaussian_parts(likes, [Part("weight", 7, 1999)], stds, key=7, step=0)
    >>> bool((few == gaussians(likes, stds, key=7, step=0)["weight"].flatten()[7:1999]).all())
    True
    """
    _check(likes, stds, step)
    if any(like.is_cuda for like in likes.values()):
        return [device_noise.gaussian_part(likes, *part, stds[part.name], key, step) for part in parts]
    found, wanted = [], []
    for name, start, stop in parts:
        found.append(torch.empty(stop - start, dtype=_drawn_type(likes[name]), device="cpu"))
        whole = likes[name].numel()
        wanted.append(normal.Wanted(found[-1].numpy(), float(stds[name]), _stream(name, step), start, whole))
    normal.fill(Key.of(key), wanted, threads=torch.get_num_threads())
    return found


def noisy_means(
    totals: Mapping[str, Tensor], stds: Mapping[str, Std], key: AnyKey, step: int, divisor: float
) -> dict[str, Tensor]:
    """(total + noise) / divisor for every parameter by name, with the noise of `gaussians`.

    >>> import torch
    >>> totals, stds = {"bias": torch.ones(3)}, {"bias": 2.0}
    >>> drawn = gaussians(totals, stds, key=7, step=0)["bias"]
    >>> bool((noisy_means(totals, stds, key=7, step=0, divisor=4)["bias"] == (1 + drawn) / 4).all())
    True
    """
    if any(total.is_cuda for total in totals.values()):
        _check(totals, stds, step)
        return device_noise.gaussians(totals, stds, key, step, divisor)
    drawn = gaussians(totals, stds, key, step)
    if drawn:
        torch._foreach_add_([*drawn.values()], [totals[name] for name in drawn])
        torch._foreach_div_([*drawn.values()], divisor)
    return drawn


class Means:
    """`noisy_means` at every step of a run on a CPU, written to a flat tensor, one parameter after another.

    Guarantee: every value is written once, with the result: no noise without its total is ever in the tensor.

    >>> import torch
    >>> totals, stds = {"weight": torch.ones(6), "bias": torch.ones(3)}, {"weight": 2.0, "bias": 1.0}
    >>> out = torch.empty(9)
    >>> Means(totals, key=7, divisor=4).write(out, [*totals.values()], [*stds.values()], step=0)
    >>> bool((out[6:] == noisy_means(totals, stds, key=7, step=0, divisor=4)["bias"]).all())
    True
    """

    def __init__(self, likes: Mapping[str, Tensor], key: AnyKey, divisor: float) -> None:
        self._names, self._sizes = [*likes], [like.numel() for like in likes.values()]
        self._key, self._divisor = Key.of(key), divisor
        self._held: dict[torch.dtype, list[_Some]] = {}

    def write(self, out: Tensor, totals: list[Tensor], stds: Sequence[float], step: int) -> None:
        """Write to ``out``; the totals are flat and have one type, in which noise is drawn."""
        _validate.whole(most=_validate.MOST_STEPS, step=step)
        dtype, threads, at = _drawn_type(totals[0]), torch.get_num_threads(), str(step)
        for std in set(stds):
            _check_std(std, dtype)
        for some in self._held.get(dtype) or self._together(dtype):
            drawn = zip(self._names[some.places], some.values, stds[some.places], strict=True)
            wanted = [normal.Wanted(values, std, ("noise", name, at)) for name, values, std in drawn]
            normal.fill(self._key, wanted, threads)
            torch._foreach_add_(some.parts, totals[some.places])
            torch.div(some.flat, self._divisor, out=out[some.start : some.start + len(some.flat)])

    def _together(self, dtype: torch.dtype) -> "list[_Some]":
        """All parameters, some at a time, in memory that is kept where it is short."""
        found, first, start = [], 0, 0
        sizes = self._sizes
        memory = torch.empty(min(sum(sizes), max(_TOGETHER, *sizes)), dtype=dtype, device="cpu")
        while first < len(sizes):
            stop = first + max(1, bisect_right([*accumulate(sizes[first:])], _TOGETHER))
            flat = memory[: sum(sizes[first:stop])]
            parts = tuple(torch.split(flat, sizes[first:stop]))
            found.append(_Some(slice(first, stop), flat, parts, [part.numpy() for part in parts], start))
            first, start = stop, start + len(flat)
        if len(memory) <= _TOGETHER:
            self._held = {dtype: found}
        return found


class _Some(NamedTuple):
    """Neighbouring parameters whose noise is drawn together."""

    places: slice  # among all parameters
    flat: Tensor  # their noise, in memory that they share with others
    parts: tuple[Tensor, ...]
    values: list[normal.Array]
    start: int  # values before them


def _check(likes: Mapping[str, Tensor], stds: Mapping[str, Std], step: int) -> None:
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    known: set[tuple[float, torch.dtype]] = set()  # parameters have few standard deviations among them
    for name, like in likes.items():
        std, dtype = stds[name], like.dtype
        if isinstance(std, float) and (std, dtype) in known:
            continue
        if not like.is_floating_point():
            raise OptionError(f"like must hold real floating-point values, got {dtype}")
        _check_std(std, _drawn_type(like))
        if isinstance(std, float):
            known.add((std, dtype))


def _stream(name: str, step: int) -> tuple[str, ...]:
    """The words from which, with the key, the noise of a parameter at a step is derived."""
    return ("noise", name, str(step))


def _drawn_type(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _on_cpu(likes: Mapping[str, Tensor], stds: Mapping[str, Std], key: Key, step: int) -> dict[str, Tensor]:
    """The noise of every parameter, in one piece of memory for each type."""
    of_type: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, like in likes.items():
        of_type.setdefault(_drawn_type(like), {})[name] = like
    drawn: dict[str, Tensor] = {}
    wanted: list[normal.Wanted] = []
    for dtype, some in of_type.items():
        sizes = [like.numel() for like in some.values()]
        parts = torch.split(torch.empty(sum(sizes), dtype=dtype, device="cpu"), sizes)
        for (name, like), part in zip(some.items(), parts, strict=True):
            wanted.append(normal.Wanted(part.numpy(), float(stds[name]), _stream(name, step)))
            drawn[name] = part.view(like.shape)
    normal.fill(key, wanted, threads=torch.get_num_threads())
    return {name: drawn[name] for name in likes}


def _check_std(std: Std, dtype: torch.dtype) -> None:
    """Refuse what is no standard deviation, or one so small that noise of ``dtype`` would round to nothing."""
    if isinstance(std, Tensor):
        if std.ndim or not std.is_floating_point():
            raise OptionError(f"std must be a number or a 0-d tensor of one, got {tuple(std.shape)} of {std.dtype}")
        if std.is_cuda:
            return
        std = float(std)
    _validate.positive(std=std)
    least = torch.finfo(dtype).tiny
    if std < least:
        raise OptionError(f"std must be at least {least:.3g} for noise of {dtype}, got {std!r}: rescale the loss")
