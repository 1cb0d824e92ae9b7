"""From clipped sums to ``.grad``: noise of (key, step, parameter) is added once, and the sum is divided.

In one process, `OnHost` or `OnDevice` adds the noise where the sums are. On several ranks, `Exchanged` collects this
rank's sums in a buffer, which a captured body can do, and `show` exchanges them.

Guarantee: a sum is given noise before anything of it is written to ``.grad``, and the noise of a step is written once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpgrad.distributed.exchange import ALIGNED, Exchange
from dpgrad.distributed.ranks import Ranks
from dpgrad.distributed.rounds import Rounds
from dpgrad.distributed.shards import as_shard, totals_of
from dpgrad.errors import OptionError
from dpgrad.grads.fsdp import is_sharded
from dpgrad.grads.sums import sum_dtype, trainable
from dpgrad.mechanism import chacha, secure
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.schedules import Array
from dpgrad.randomness import device_noise, noise, secure_noise
from dpgrad.training.step.quantile import Quantile

__all__ = [
    "Exchanged", "Figures", "OnDevice", "OnHost", "Release", "SecureOnDevice", "SecureOnHost", "Sharded", "of_source",
    "refuse_values", "release",
]  # fmt: skip

_AHEAD = 256  # steps


class Release(Protocol):
    """Takes the sums of a step part by part and writes their noisy means to ``.grad``."""

    parts: tuple[device_noise.Segment, ...]  # parameters that are passed to `add` together, flat and in order

    def at(self, step: int) -> None:
        """Add the noise of this step from now on."""

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        """Take the flat sum of a part."""

    def finish(self) -> None:
        """Write the gradients of all parts."""

    def show(self) -> Mapping[str, Tensor]:
        """Let every parameter have its ``.grad``; the noisy means by name."""


@dataclass
class OnHost:
    """Noise on a CPU, drawn for all parameters at once; gradients keep their memory from step to step."""

    parameters: Mapping[str, nn.Parameter]
    figures: "Figures"
    key: Key
    divisor: float
    parts: tuple[device_noise.Segment, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = _singly(self.parameters)
        self._step = 0
        self._totals: dict[str, Tensor] = {}
        self._noisy: Mapping[str, Tensor] = {}
        self._memory = torch.empty(0)  # of all gradients, where they have one type
        if len({parameter.dtype for parameter in self.parameters.values()}) == 1:
            like = next(iter(self.parameters.values()))
            self._memory = torch.empty(sum(part.values for part in self.parts), dtype=like.dtype)
            places = torch.split(self._memory, [part.values for part in self.parts])
            each = zip(self.parameters.items(), places, strict=True)
            self._grads = {name: place.view(parameter.shape) for (name, parameter), place in each}
            self._means = noise.Means(self.parameters, self.key, self.divisor)

    def at(self, step: int) -> None:
        self._step = step

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        self._totals[part.names[0]] = total

    def finish(self) -> None:
        totals, self._totals = self._totals, {}
        values = self.figures.stds(self._step)
        stds = {name: values[self.figures.place(name)] for name in totals}
        sums = [*totals.values()]  # in the order of the parameters
        if len(self._memory) and len({total.dtype for total in sums}) == 1:
            self._means.write(self._memory, sums, [*stds.values()], self._step)
            self._noisy = self._grads
        else:
            self._shape(noise.noisy_means(totals, stds, self.key, self._step, self.divisor))

    def _shape(self, means: Mapping[str, Tensor]) -> None:
        """Keep the flat means as views in the shapes of the parameters."""
        self._noisy = {name: mean.view(self.parameters[name].shape) for name, mean in means.items()}

    def show(self) -> Mapping[str, Tensor]:
        for parameter, noisy in zip(self.parameters.values(), self._noisy.values(), strict=True):
            parameter.grad = _shown(noisy, parameter)
        return self._noisy


@dataclass
class OnDevice:
    """Noise on a CUDA device, written by one kernel per part, at fixed addresses."""

    parameters: Mapping[str, nn.Parameter]
    figures: "Figures"
    key: Key
    divisor: float
    device: torch.device

    def __post_init__(self) -> None:
        full = partial(torch.full, device=self.device)
        self._noise = device_noise.Stream(self.parameters, self.key, self.device)
        self.parts = self._noise.segments
        self._step = full((1,), 0)
        self._divisor = full((), self.divisor, dtype=torch.float64)
        self._values = [1.0] * self.figures.count
        self._stds = [full((), 1.0, dtype=torch.float64) for _ in self._values]
        self._named = {name: self._stds[self.figures.place(name)] for name in self.parameters}
        self._written = {
            part: torch.zeros(part.values, dtype=self._type(part), device=self.device) for part in self.parts
        }
        self._means = {
            name: mean for part in self.parts for name, mean in part.split(self._written[part], self.parameters).items()
        }
        # A gradient that has the type of the buffer is a view of it.
        self._grads = {
            name: mean if mean.dtype == self.parameters[name].dtype else torch.zeros_like(self.parameters[name])
            for name, mean in self._means.items()
        }

    def _type(self, part: device_noise.Segment) -> torch.dtype:
        """The type that all parameters of a part share, or else the type of their sums."""
        types = {self.parameters[name].dtype for name in part.names}
        return types.pop() if len(types) == 1 else sum_dtype(next(iter(types)))

    def at(self, step: int) -> None:
        self._step.fill_(step)
        for place, value in enumerate(self.figures.stds(step)):
            if value != self._values[place]:
                self._stds[place].fill_(value)
                self._values[place] = value

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        std = device_noise.spread(part, self.parameters, self._named)
        self._write(part, total, std)
        for name in part.names:
            if self._grads[name] is not self._means[name]:
                self._grads[name].copy_(self._means[name])

    def _write(self, part: device_noise.Segment, total: Tensor, std: Tensor) -> None:
        self._noise.write(part, self._written[part], self._step, std, total, self._divisor)

    def finish(self) -> None:
        """Nothing is left to write."""

    def show(self) -> Mapping[str, Tensor]:
        for name, parameter in self.parameters.items():
            parameter.grad = _shown(self._grads[name], parameter)
        return self._means


class Exchanged:
    """Sums of one of several ranks: `show` adds them up over all ranks, and one rank adds the noise of each value.

    Guarantee: the noise of a value is that of `OnHost` or `OnDevice`, whatever the number of ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], figures: "Figures", key: Key, divisor: float, ranks: Ranks
    ) -> None:
        self._parameters, self._figures, self._key = parameters, figures, key
        device = next(iter(parameters.values())).device
        self._step, self._divisor = 0, torch.full((), divisor, dtype=torch.float64, device=device)
        on_device = device.type == "cuda" and not key.secure  # secure noise of a shard is drawn on the CPU
        self._stream = device_noise.Stream(parameters, key, device) if on_device else None
        self.parts = self._stream.segments if self._stream is not None else _singly(parameters)
        if self._stream is not None:  # noise counters depend on a value's position
            self._starts = {part: ALIGNED * part.first for part in self.parts}
        else:
            ends = np.cumsum([part.values for part in self.parts]).tolist()
            self._starts = {part: end - part.values for part, end in zip(self.parts, ends, strict=True)}
        last = self.parts[-1]
        types = {sum_dtype(parameter.dtype) for parameter in parameters.values()}
        self._exchange = Exchange(ranks, self._starts[last] + last.values, device, max(types, key=lambda t: t.itemsize))
        self._held = {part: self._place(self._exchange.sums, part) for part in self.parts}
        self._means = {
            name: mean
            for part in self.parts
            for name, mean in part.split(self._place(self._exchange.means, part), parameters).items()
        }
        first = self._exchange.shard * ranks.rank
        self._own = [
            noise.Part(part.names[0], start, stop)
            for part in self.parts
            if self._stream is None
            for start, stop in [_overlap(self._starts[part], part.values, first, self._exchange.shard)]
            if start < stop
        ]
        self._groups = self._of_values(first) if figures.count > 1 and self._stream is not None else None
        self._values = [1.0] * figures.count
        self._stds = torch.ones(figures.count, dtype=torch.float64, device=device)
        self._grids = _Grids(parameters, figures) if key.secure else None
        self._drawn: list[Tensor] = []  # the noise of this rank's shard at the current step

    def _place(self, flat: Tensor, part: device_noise.Segment) -> Tensor:
        """The slice of a part in the flat buffer."""
        return flat[self._starts[part] : self._starts[part] + part.values]

    def _of_values(self, first: int) -> Tensor:
        """The group of each value of this rank's shard; padding between parameters has an arbitrary one."""
        groups = torch.zeros(len(self._exchange.sums), dtype=torch.int64)
        for part in self.parts:
            for name, place in part.split(self._place(groups, part), self._parameters).items():
                place.fill_(self._figures.place(name))
        return groups[first : first + self._exchange.shard].to(self._exchange.sums.device)

    def at(self, step: int) -> None:
        self._step = step

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        self._held[part].copy_(total)

    def finish(self) -> None:
        """Noise is added when all ranks have come so far."""

    def show(self) -> Mapping[str, Tensor]:
        noisy = self._on_host if self._stream is None else self._on_device
        ahead = self._draw if self._stream is None and self._grids is None else None
        self._exchange.run(self._step, noisy, ahead)
        for name, parameter in self._parameters.items():
            parameter.grad = _shown(self._means[name], parameter)
        return self._means

    def _draw(self) -> None:
        """Draw the noise of this rank's shard."""
        values = self._figures.stds(self._step)
        stds = {name: values[self._figures.place(name)] for name in self._parameters}
        self._drawn = noise.gaussian_parts(self._parameters, self._own, stds, self._key, self._step)

    def _on_host(self, total: Tensor, first: int) -> Tensor:
        """The noisy means of a shard that begins at ``first``."""
        if self._grids is not None:
            return self._grids.added(total, self._own, self._key, self._step, float(self._divisor))
        drawn, self._drawn, at = self._drawn, [], 0
        for few, _ in zip(drawn, self._own, strict=True):  # in order, from the beginning of the shard
            total[at : at + len(few)] += few
            at += len(few)
        return total.div_(self._divisor)

    def _on_device(self, total: Tensor, first: int) -> Tensor:
        assert self._stream is not None
        for place, value in enumerate(self._figures.stds(self._step)):
            if value != self._values[place]:
                self._stds[place].fill_(value)
                self._values[place] = value
        std = self._stds[0] if self._groups is None else self._stds[self._groups]
        out = torch.empty(len(total), dtype=self._exchange.means.dtype, device=total.device)
        shard = device_noise.Segment((), len(total), first // ALIGNED)
        at = torch.full((1,), self._step, device=total.device)
        self._stream.write(shard, out, at, std, total, self._divisor)
        return out


class Sharded:
    """Sums of a rank that holds shards of the parameters: it adds the noise of its own shards, and keeps them.

    ``rounds`` exchange sums during the passes of a step; call `show` after them. Guarantee:
    the noise of a value is that of `OnHost` or `OnDevice`, whatever the number of ranks.
    """

    def __init__(self, model: nn.Module, figures: "Figures", key: Key, divisor: float, ranks: Ranks) -> None:
        self._parameters, self._figures, self._key, self._divisor = trainable(model), figures, key, divisor
        self.totals = totals_of(model, ranks)
        self.rounds: Rounds | None = None
        self.parts = tuple(
            device_noise.Segment(names, sum(self._parameters[name].numel() for name in names), place)
            for place, names in enumerate(self.totals.buckets)
        )
        self._grids = _Grids(self._parameters, figures) if key.secure else None
        self._step = 0

    def at(self, step: int) -> None:
        self._step = step

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        assert self.rounds is not None  # sums are given within the block of the passes
        self.rounds.give(part.first, total)

    def finish(self) -> None:
        """Noise is added when all ranks have come so far."""

    def show(self) -> Mapping[str, Tensor]:
        means: dict[str, Tensor] = {}
        sums = self.totals.sums
        for place, names in enumerate(self.totals.buckets):
            own = [noise.Part(name, *self.totals.ends(name)) for name in names]
            total, sums[place] = sums[place], torch.empty(0)  # or its memory would stay allocated
            few = torch.split(self._noisy(own, total), [part.stop - part.start for part in own])
            for name, mean in zip(names, few, strict=True):
                parameter = self._parameters[name]
                means[name] = mean.view(-1, *parameter.shape[1:]).to(parameter.dtype)
                parameter.grad = as_shard(means[name], parameter)
        return means

    def _noisy(self, parts: Sequence[noise.Part], total: Tensor) -> Tensor:
        """The noisy means of the own shards of a few parameters."""
        own = [part for part in parts if part.start < part.stop]
        if self._grids is not None:
            return self._grids.added(total, own, self._key, self._step, self._divisor)
        values = self._figures.stds(self._step)
        stds = {name: values[self._figures.place(name)] for name in self._parameters}
        drawn = noise.gaussian_parts(self._parameters, own, stds, self._key, self._step)
        if drawn:
            total += torch.cat(drawn)
        return total.div_(self._divisor)


def _shown(mean: Tensor, parameter: Tensor) -> Tensor:
    """A mean as a gradient; a view of it if the types are equal.

    It is a new tensor at every step: one whose memory the user replaced (``.grad.data = ...``) would never change.
    """
    return mean.detach().to(parameter.dtype)


def _overlap(start: int, values: int, first: int, length: int) -> tuple[int, int]:
    """The part of ``values``, which begin at ``start``, that lies in the ``length`` places from ``first`` on."""
    return max(0, first - start), min(values, first + length - start)


def _singly(parameters: Mapping[str, nn.Parameter]) -> tuple[device_noise.Segment, ...]:
    """One part per parameter."""
    return tuple(device_noise.Segment((name,), parameter.numel(), 0) for name, parameter in parameters.items())


@dataclass
class SecureOnHost(OnHost):
    """`OnHost` with noise of the secure source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grids = _Grids(self.parameters, self.figures)

    def finish(self) -> None:
        totals, self._totals = self._totals, {}
        grids = self._grids.at(self._step)
        units = {name: grids[self.figures.place(name)] for name in totals}
        self._shape(secure_noise.noisy_means(totals, units, self.key, self._step, self.divisor))


@dataclass
class SecureOnDevice(OnDevice):
    """`OnDevice` with noise of the secure source; buffers of standard deviations hold the grid instead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grids = _Grids(self.parameters, self.figures)
        self._secure = secure_noise.SecureStream(self.parameters, self.parts, self.key, self.device)

    def at(self, step: int) -> None:
        for place, unit in enumerate(self._grids.at(step)):
            if unit != self._values[place]:
                self._stds[place].fill_(unit)
                self._values[place] = unit
        self._secure.at(step)

    def _write(self, part: device_noise.Segment, total: Tensor, std: Tensor) -> None:
        self._secure.write(part, self._written[part], std, total, self._divisor)


class _Grids:
    """The grid of each group at each step, for as many values as its parameters have."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], figures: "Figures") -> None:
        self._figures = figures
        self._values = [0] * figures.count
        for name, parameter in parameters.items():
            self._values[figures.place(name)] += parameter.numel()

    def at(self, step: int) -> list[float]:
        each = zip(self._figures.stds(step), self._figures.clips(step), self._values, strict=True)
        return [secure.grid(std, clip, max(1, values)) for std, clip, values in each]

    def added(self, total: Tensor, parts: Sequence[noise.Part], key: Key, step: int, divisor: float) -> Tensor:
        """Replace the sums of some slices of parameters, which lie one after another, by noisy means."""
        grids = self.at(step)
        units = {part.name: grids[self._figures.place(part.name)] for part in parts}
        sizes = [part.stop - part.start for part in parts]
        held = total.cpu()
        own = torch.split(held[: sum(sizes)], sizes)
        secure_noise.fill_parts(own, own, parts, units, key, step, divisor)
        return held.to(total.device)


class Figures:
    """Clip bounds and noise standard deviations by group, computed for many steps at once."""

    def __init__(
        self, mechanism: Mechanism, groups: Mapping[str, int] | None, quantile: Quantile | None = None
    ) -> None:
        self._mechanism, self._groups, self._quantile = mechanism, groups, quantile
        self._steps = range(0)
        self._clips = self._stds = np.zeros((0, 0))
        self.count = max(1, len(mechanism.groups))

    def place(self, name: str) -> int:
        """The index of a parameter's group."""
        return self._groups[name] if self._groups else 0

    def clips(self, step: int) -> list[float]:
        """The clip bound of each group."""
        if self._quantile is not None:
            return self._quantile.at(step)
        found: list[float] = self._at(step)[0].tolist()
        return found

    def stds(self, step: int) -> list[float]:
        """The standard deviation of the noise of each group."""
        clips, stds = self._at(step)
        if self._quantile is not None:
            stds = stds / clips * self._quantile.at(step)
        found: list[float] = stds.tolist()
        return found

    def _at(self, step: int) -> tuple[Array, Array]:
        if step not in self._steps:
            self._steps = range(0)
            steps = range(step, min(step + _AHEAD, self._mechanism.steps))
            groups = self._mechanism.groups or (None,)
            self._clips = np.stack([self._mechanism.clips(steps, group) for group in groups], 1)
            self._stds = np.stack([self._mechanism.stds(steps, group) for group in groups], 1)
            self._steps = steps  # last: an interruption must not leave the figures of other steps under these
        place = step - self._steps.start
        return self._clips[place], self._stds[place]


def release(model: nn.Module, mechanism: Mechanism, figures: Figures, key: Key, ranks: Ranks) -> Release:
    """Choose who writes the gradients of the trained parameters: by device, ranks and noise source."""
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # or an optimizer would use its old gradient
    key = dataclasses.replace(key, secure=bool(mechanism.secure_values))
    if key.secure:
        refuse_values(parameters, mechanism)
    if is_sharded(model):
        return Sharded(model, figures, key, mechanism.divisor, ranks)
    if not ranks.alone:
        return Exchanged(parameters, figures, key, mechanism.divisor, ranks)
    if device.type == "cuda":
        drawn = SecureOnDevice if key.secure else OnDevice
        return drawn(parameters, figures, key, mechanism.divisor, device)
    return (SecureOnHost if key.secure else OnHost)(parameters, figures, key, mechanism.divisor)


def of_source(key: Key, model: nn.Module, mechanism: Mechanism) -> Key:
    """The key for the source of noise that the mechanism accounts for."""
    if mechanism.secure_values:
        chacha.refuse_missing()
        refuse_values(trainable(model), mechanism)
    return dataclasses.replace(key, secure=bool(mechanism.secure_values))


def refuse_values(parameters: Mapping[str, Tensor], mechanism: Mechanism) -> None:
    """Refuse a mechanism with secure noise that accounts for fewer values than are given noise."""
    counts = 0 if mechanism.adaptive_clip is None else max(1, len(mechanism.groups))
    values = counts + sum(parameter.numel() for parameter in parameters.values())
    if values > mechanism.secure_values:
        counted = f" and its {counts} noisy count{'s' * (counts > 1)} of adaptive_clip" if counts else ""
        raise OptionError(
            f"secure_values must be at least {values:,}, the number of values that the model trains{counted}, got "
            f"{mechanism.secure_values:,}: each adds to delta"
        )
