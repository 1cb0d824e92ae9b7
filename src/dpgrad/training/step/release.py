"""From clipped sums to ``.grad``: noise of (key, step, parameter) is added once, and the sum is divided.

Guarantee: a sum is given noise before anything of it is written to ``.grad``, and the noise of a step is written once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dpgrad.grads.sums import sum_dtype, trainable
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.schedules import Array
from dpgrad.randomness import device_noise, noise
from dpgrad.training.step.quantile import Quantile

__all__ = ["Figures", "OnDevice", "OnHost", "Release", "release"]

_AHEAD = 256  # steps


class Release(Protocol):
    """Takes the sums of a step part by part and writes their noisy means to ``.grad``."""

    parts: tuple[device_noise.Segment, ...]  # parameters that are handed over together, one after another

    def at(self, step: int) -> None:
        """The step whose noise is added from now on."""

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        """The sum of a part, flat."""

    def finish(self) -> None:
        """Write what was added."""

    def show(self) -> Mapping[str, Tensor]:
        """Let every parameter have its ``.grad``; the noisy means by name."""


@dataclass
class OnHost:
    """Noise of a CPU, which is drawn for all parameters at once."""

    parameters: Mapping[str, nn.Parameter]
    figures: "Figures"
    key: Key
    divisor: float
    parts: tuple[device_noise.Segment, ...] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        self.parts = tuple(device_noise.Segment((name,), size, 0) for name, size in sizes.items())
        self._step = 0
        self._totals: dict[str, Tensor] = {}
        self._noisy: Mapping[str, Tensor] = {}

    def at(self, step: int) -> None:
        self._step = step

    def add(self, part: device_noise.Segment, total: Tensor) -> None:
        self._totals.update(part.split(total, self.parameters))

    def finish(self) -> None:
        totals, self._totals = self._totals, {}
        values = self.figures.stds(self._step)
        stds = {name: values[self.figures.place(name)] for name in totals}
        self._noisy = noise.noisy_means(totals, stds, self.key, self._step, self.divisor)

    def show(self) -> Mapping[str, Tensor]:
        for name, parameter in self.parameters.items():
            parameter.grad = self._noisy[name].to(parameter.dtype)
        return self._noisy


@dataclass
class OnDevice:
    """Noise of a CUDA device, written part by part by one kernel each, at addresses that stay."""

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
        # Gradients of the type in which they are written are those memories themselves.
        self._grads = {
            name: mean if mean.dtype == self.parameters[name].dtype else torch.zeros_like(self.parameters[name])
            for name, mean in self._means.items()
        }

    def _type(self, part: device_noise.Segment) -> torch.dtype:
        """One type of all parameters of a part, or the one in which they are summed."""
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
        self._noise.write(part, self._written[part], self._step, std, total, self._divisor)
        for name in part.names:
            if self._grads[name] is not self._means[name]:
                self._grads[name].copy_(self._means[name])

    def finish(self) -> None:
        """Nothing is left to write."""

    def show(self) -> Mapping[str, Tensor]:
        for name, parameter in self.parameters.items():
            parameter.grad = self._grads[name]  # someone may have set it to None
        return self._means


class Figures:
    """Clip bound and standard deviation of the noise at each step by group, looked up for many steps at once."""

    def __init__(
        self, mechanism: Mechanism, groups: Mapping[str, int] | None, quantile: Quantile | None = None
    ) -> None:
        self._mechanism, self._groups, self._quantile = mechanism, groups, quantile
        self._steps = range(0)
        self._clips = self._stds = np.zeros((0, 0))
        self.count = max(1, len(mechanism.groups))

    def place(self, name: str) -> int:
        """The place of a parameter's group."""
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
            self._steps = steps  # at last: figures of other steps must not be taken for theirs, whatever interrupts
        place = step - self._steps.start
        return self._clips[place], self._stds[place]


def release(model: nn.Module, mechanism: Mechanism, figures: Figures, key: Key) -> Release:
    """What writes the gradients of the parameters that are trained, where they lie."""
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # an optimizer would go on with what it has
    if device.type == "cuda":
        return OnDevice(parameters, figures, key, mechanism.divisor, device)
    return OnHost(parameters, figures, key, mechanism.divisor)
