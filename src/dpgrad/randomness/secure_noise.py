"""Noise of the secure source on tensors: sums are rounded to a grid, and whole numbers of (key, step, name) are added.

The numbers are drawn by the table of `dpgrad.mechanism.secure`: on a CUDA device with Triton by a kernel, elsewhere on
the CPU, from where they are copied to the sums. Both give the same bits.

>>> totals = {"bias": torch.ones(3)}
>>> noisy = noisy_means(totals, {"bias": 2.0**-28}, Key.from_seed(7).secured(), step=0, divisor=4)
>>> noisy["bias"].shape
torch.Size([3])
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpgrad import _triton, _validate
from dpgrad.errors import RunError
from dpgrad.mechanism import secure
from dpgrad.mechanism.keys import Key
from dpgrad.randomness.device_noise import Segment
from dpgrad.randomness.noise import Part

__all__ = ["SecureStream", "added", "drawn", "fill_parts", "noisy_means"]


def drawn(key: Key, step: int, name: str, count: int, start: int = 0) -> Tensor:
    """The noise of a parameter's values from ``start`` on, in units of the grid: whole numbers in float64, on the CPU.

    Guarantee: values of different names, steps and keys, and of sampling, come from streams of their own. The noise of
    one (key, step, name) may be added to one sum only. A part of a parameter gets a part of its noise, wherever it is.

    >>> key = Key.from_seed(7)
    >>> bool((drawn(key, 3, "weight", 2, start=5) == drawn(key, 3, "weight", 7)[5:]).all())
    True
    """
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    found = secure.draw(key, start, count, *_names(name, step), threads=torch.get_num_threads())
    return torch.from_numpy(found).double()


def added(total: Tensor, noise: Tensor, unit: Tensor | float) -> Tensor:
    """The total, rounded to whole units of the grid, plus noise in these units: in float64, which holds it exactly.

    Guarantee: the result is a function of `secure.rounded` of the total and of the noise alone.

    >>> added(torch.tensor([2.6, -1.0]), torch.tensor([1.0, 0.0]), 2.0)
    tensor([4., 0.], dtype=torch.float64)
    """
    units = (total.double() / unit).nan_to_num(nan=0.0, posinf=secure.LIMIT, neginf=-secure.LIMIT)
    return units.clamp_(-secure.LIMIT, secure.LIMIT).round_().add_(noise).mul_(unit)


def noisy_means(
    totals: Mapping[str, Tensor], units: Mapping[str, float], key: Key, step: int, divisor: float
) -> dict[str, Tensor]:
    """(rounded total + noise) / divisor for every parameter by name: float32, or float64 where the total is."""
    wide = {name: total.to(torch.promote_types(total.dtype, torch.float32)) for name, total in totals.items()}
    means = {name: torch.empty_like(total, device="cpu") for name, total in wide.items()}
    parts = [Part(name, 0, total.numel()) for name, total in wide.items()]
    fill_parts([mean.view(-1) for mean in means.values()], list(wide.values()), parts, units, key, step, divisor)
    return {name: mean.to(totals[name].device) for name, mean in means.items()}


def fill_parts(
    means: Sequence[Tensor], totals: Sequence[Tensor], parts: Sequence[Part], units: Mapping[str, float], key: Key,
    step: int, divisor: float,
) -> None:  # fmt: skip
    """Write (rounded total + noise) / divisor for slices of parameters, on the CPU; a mean may be its total.

    A rank that holds a shard of a parameter adds the noise of that shard, whatever the shards.
    """
    _validate.whole(most=_validate.MOST_STEPS, step=step)
    wanted = [
        secure.Wanted(
            mean.numpy(), _names(part.name, step), part.start, total.detach().reshape(-1).cpu().numpy(),
            units[part.name], divisor,
        )
        for mean, total, part in zip(means, totals, parts, strict=True)
    ]  # fmt: skip
    secure.fill(key, wanted, threads=torch.get_num_threads())


class SecureStream:
    """The noise of a run on one device, whose step is set before it is written; ``likes`` are the parameters by name.

    Guarantee: that of `drawn`; nothing is written before the first step is set. What a step needs is copied to memory
    that stays, so a captured graph draws the noise of any step. The host does not wait for the device.

    >>> likes = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}
    >>> segment = Segment(("weight", "bias"), 9, 0)
    >>> stream = SecureStream(likes, [segment], Key.from_seed(7).secured(), "cpu")
    >>> stream.at(3)
    >>> out, one = torch.empty(9), torch.ones((), dtype=torch.float64)
    >>> stream.write(segment, out, one * 2.0**-28, torch.zeros(9), one)
    >>> bool(out.isfinite().all())
    True
    """

    def __init__(
        self, likes: Mapping[str, Tensor], segments: Sequence[Segment], key: Key, device: torch.device | str
    ) -> None:
        self._key, self._sizes = key, {name: like.numel() for name, like in likes.items()}
        self._ready = False  # whether a step is set: until then the memories hold zeros, which are no noise
        self._by_kernel = _triton.runs_on(torch.empty(0, device=device))
        if not self._by_kernel:
            self._drawn = {
                segment: torch.zeros(segment.values, dtype=torch.float64, device=device) for segment in segments
            }
            return
        from dpgrad.randomness import secure_kernels

        self._names = [name for segment in segments for name in segment.names]
        self._table = secure_kernels.tables(device)
        self._keys = torch.zeros(len(self._names), 8, dtype=torch.int32, device=device)
        lines = torch.split(self._keys, [len(segment.names) for segment in segments])
        self._lines = dict(zip(segments, lines, strict=True))
        self._starts = {
            segment: torch.tensor([0, *(self._sizes[name] for name in segment.names)], device=device).cumsum(0)
            for segment in segments
        }

    def at(self, step: int) -> None:
        """The step whose noise is written from now on."""
        _validate.whole(most=_validate.MOST_STEPS, step=step)
        self._ready = True
        if not self._by_kernel:
            for segment, held in self._drawn.items():
                found = [drawn(self._key, step, name, self._sizes[name]) for name in segment.names]
                held.copy_(torch.cat(found))
            return
        from dpgrad.randomness import secure_kernels

        keys = secure_kernels.keys([secure.stream(self._key, *_names(name, step)) for name in self._names])
        self._keys.copy_(keys.pin_memory() if self._keys.is_cuda else keys, non_blocking=True)

    def write(self, segment: Segment, out: Tensor, unit: Tensor, total: Tensor, divisor: Tensor) -> None:
        """Write (rounded total + noise)·unit / divisor of a segment into ``out``, flat.

        ``unit``, one number or one for each value, and ``divisor`` are on the device in float64.
        """
        if not self._ready:
            raise RunError("call at(step) before write: noise belongs to a step")
        if not self._by_kernel:
            out.copy_(added(total, self._drawn[segment], unit).div_(divisor))
            return
        from dpgrad.randomness import secure_kernels

        most = max(self._sizes[name] for name in segment.names)
        exact = out.dtype in (torch.float32, torch.float64)  # other types are rounded by torch, as on a CPU
        mean = out if exact else torch.empty_like(out, dtype=torch.float32)
        lines, starts = self._lines[segment], self._starts[segment]
        secure_kernels.noisy(mean, lines, starts, most, self._table, total, unit, divisor)
        if not exact:
            out.copy_(mean)


def _names(name: str, step: int) -> tuple[str, ...]:
    """Those of the stream of a parameter's noise at a step."""
    return "noise", name, str(step)
