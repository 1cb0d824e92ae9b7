"""Gaussian noise on a CUDA device as a pure function of (secret run key, step, place among the model's values).

A value is made of words of Philox4x64-10, whose counter holds the step and the place, by the method of Box and Muller
(1958), in float64. Nothing is remembered between calls, so a captured graph draws the noise of any step.

>>> likes = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}
>>> stream = Stream(likes, key=7, device="cpu")
>>> [each.names for each in stream.segments]
[('weight', 'bias')]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgrad import _triton
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.randomness import philox

__all__ = ["Segment", "Stream", "gaussian_part", "gaussians", "spread"]

_SMALL = 1 << 16  # values of a parameter that is drawn together with others
_PLAIN_AT_ONCE = 1 << 22  # counters whose words plain torch holds


@dataclass(frozen=True)
class Segment:
    """Parameters whose noise is drawn in one piece, one after another.

    >>> Stream({"bias": torch.zeros(5)}, key=7, device="cpu").segments
    (Segment(names=('bias',), values=5, first=0),)
    """

    names: tuple[str, ...]
    values: int
    first: int  # counters before it

    def split(self, flat: Tensor, likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of a flat tensor in the shapes of the parameters, by name."""
        parts = torch.split(flat, [likes[name].numel() for name in self.names])
        return {name: part.view(likes[name].shape) for name, part in zip(self.names, parts, strict=True)}

    def joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameters' tensors one after another, flat."""
        flat = [tensors[name].reshape(-1) for name in self.names]
        return torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()


class Stream:
    """The noise of a run on one device; ``likes`` are the parameters by name.

    Guarantee: values of different places, steps, keys and sets of parameters, and of sampling, come from counters or
    keys of their own. They end at √(130 ln 2) ≈ 9.5 standard deviations: the length of a pair is made of 64 bits.

    >>> stream = Stream({"bias": torch.zeros(5)}, key=7, device="cpu")
    >>> out = torch.empty(5)
    >>> stream.write(stream.segments[0], out, torch.tensor([3]), torch.ones((), dtype=torch.float64))
    >>> bool(out.isfinite().all())
    True
    """

    def __init__(self, likes: Mapping[str, Tensor], key: AnyKey, device: torch.device | str) -> None:
        sizes = (str(like.numel()) for like in likes.values())
        secret = Key.of(key).derive("noise on cuda", *likes, *sizes, size=16)
        self._key = [int.from_bytes(secret[:8], "little"), int.from_bytes(secret[8:], "little")]
        self._words = philox.constants(self._key, device)
        self.segments = _segments(likes)

    def write(
        self,
        segment: Segment,
        out: Tensor,
        step: Tensor,
        std: Tensor,
        total: Tensor | None = None,
        divisor: Tensor | None = None,
        stopped: Tensor | None = None,
    ) -> None:
        """Write the noise of a segment, or (total + noise) / divisor, into ``out``, flat, without waiting for it.

        ``step`` (1,), ``std``, one number or one for each value, and ``divisor`` are on the device, the latter two in
        float64. Where ``stopped`` is above 0, NaN is written.
        """
        if _triton.runs_on(out):
            from dpgrad.randomness.kernels import noisy

            noisy(out, self._words, step, segment.first, std, total, divisor, stopped)
            return
        values = self._normal(segment, step) * std
        if total is not None and divisor is not None:
            values = (values + total) / divisor
        out.copy_(values if stopped is None else values.masked_fill(stopped > 0, math.nan))

    def _normal(self, segment: Segment, step: Tensor) -> Tensor:
        """Standard normal values, in plain torch."""
        counters = -(-segment.values // 4)
        found = []
        for start in range(0, counters, _PLAIN_AT_ONCE):
            stop = min(start + _PLAIN_AT_ONCE, counters)
            at = torch.arange(segment.first + start + 1, segment.first + stop + 1, device=step.device)
            a, b, c, d = philox.words(at, step, self._key).unbind(-1)
            found.append(torch.stack([*_pair(a, b), *_pair(c, d)], -1).flatten())
        return torch.cat(found)[: segment.values]


def _pair(of_length: Tensor, of_angle: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normal values from two words."""
    u = _upper(of_length).double() * 2.0**-53 + ((of_length & 2047).double() + 0.5) * 2.0**-64
    length = (-2 * u.log()).sqrt()
    angle = _upper(of_angle).double() * 2.0**-53 * (2 * math.pi)
    return length * angle.cos(), length * angle.sin()


def _upper(word: Tensor) -> Tensor:
    """The upper 53 bits of an unsigned word."""
    return (word >> 11) & ((1 << 53) - 1)


def _segments(likes: Mapping[str, Tensor]) -> tuple[Segment, ...]:
    """The small parameters together, then each large one alone."""
    sizes = {name: like.numel() for name, like in likes.items()}
    small = tuple(name for name, size in sizes.items() if size < _SMALL)
    found: list[Segment] = []
    first = 0
    for names in [*([small] if small else []), *((name,) for name in sizes if name not in set(small))]:
        values = sum(sizes[name] for name in names)
        found.append(Segment(names, values, first))
        first += -(-values // 4)
    return tuple(found)


def gaussians(
    likes: Mapping[str, Tensor],
    stds: Mapping[str, float | Tensor],
    key: AnyKey,
    step: int,
    divisor: float | None = None,
) -> dict[str, Tensor]:
    """The noise of ``step`` for every parameter by name, each with its own standard deviation: float32, or float64.

    With a ``divisor`` it is (like + noise) / divisor, formed in float64 and rounded once.

    >>> drawn = gaussians({"bias": torch.zeros(5)}, {"bias": 2.0}, key=7, step=0)
    >>> drawn["bias"].shape
    torch.Size([5])
    """
    device = next(iter(likes.values())).device
    stream = Stream(likes, key, device)
    at = torch.full((1,), step, device=device)
    shared = {std: _on_device(std, device) for std in stds.values()}
    own = {name: shared[std] for name, std in stds.items()}
    by = None if divisor is None else _on_device(divisor, device)
    drawn: dict[str, Tensor] = {}
    for segment in stream.segments:
        types = {name: torch.promote_types(likes[name].dtype, torch.float32) for name in segment.names}
        dtype = types[segment.names[0]] if len(set(types.values())) == 1 else torch.float64
        out = torch.empty(segment.values, dtype=dtype, device=device)
        total = None if divisor is None else segment.joined(likes)
        stream.write(segment, out, at, spread(segment, likes, own), total, by)
        for name, part in segment.split(out, likes).items():
            drawn[name] = part.to(types[name])
    return {name: drawn[name] for name in likes}


def gaussian_part(
    likes: Mapping[str, Tensor], name: str, start: int, stop: int, std: float | Tensor, key: AnyKey, step: int
) -> Tensor:
    """The values from ``start`` to ``stop`` of the flat noise of one parameter, as `gaussians` draws it.

    >>> likes = {"weight": torch.zeros(9), "bias": torch.zeros(5)}
    >>> part = gaussian_part(likes, "bias", 1, 4, 2.0, key=7, step=0)
    >>> torch.equal(part, gaussians(likes, {"weight": 1.0, "bias": 2.0}, key=7, step=0)["bias"][1:4])
    True
    """
    device = likes[name].device
    stream = Stream(likes, key, device)
    segment = next(each for each in stream.segments if name in each.names)
    before = sum(likes[other].numel() for other in segment.names[: segment.names.index(name)])
    counters, skipped = divmod(before + start, 4)
    around = Segment((name,), skipped + stop - start, segment.first + counters)
    out = torch.empty(around.values, dtype=torch.promote_types(likes[name].dtype, torch.float32), device=device)
    if stop > start:
        stream.write(around, out, torch.full((1,), step, device=device), _on_device(std, device))
    return out[skipped:]


def spread(segment: Segment, likes: Mapping[str, Tensor], stds: Mapping[str, float | Tensor]) -> Tensor:
    """The standard deviation of a segment in float64: one number where its parameters share it, else one a value.

    >>> likes = {"weight": torch.zeros(2), "bias": torch.zeros(1)}
    >>> spread(Stream(likes, key=7, device="cpu").segments[0], likes, {"weight": 2.0, "bias": 1.0})
    tensor([2., 2., 1.], dtype=torch.float64)
    """
    device = likes[segment.names[0]].device
    own = [stds[name] for name in segment.names]
    if all(each is own[0] or (not isinstance(each, Tensor) and each == own[0]) for each in own):
        return _on_device(own[0], device)
    each = [_on_device(std, device) for std in own]
    return torch.cat([std.expand(likes[name].numel()) for std, name in zip(each, segment.names, strict=True)])


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """A number in float64."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
