"""Averages of iterates: computed from what has been released, they cost nothing and take noise out of the result.

Both averages are of the form a ← a + w(t)·(θ − a); they differ in the weight of the newest iterate.

>>> model = nn.Linear(1, 1, bias=False)
>>> average = Averaged(model, parse("tail:0.5", steps=4))
>>> for step, value in enumerate([9.0, 8.0, 2.0, 4.0]):
...     _ = nn.init.constant_(model.weight, value)
...     average.update(step)
>>> with average.applied():
...     model.weight.item()
3.0
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.errors import OptionError
from dpgrad.grads.sums import trainable

__all__ = ["Averaged", "Ema", "Tail", "parse"]


@dataclass(frozen=True)
class Ema:
    """The exponential moving average Σ d^{t−j} θ_j / Σ d^{t−j}, without the bias of starting from zero.

    >>> [round(Ema(0.5).weight(t), 3) for t in range(3)]
    [1.0, 0.667, 0.571]
    """

    decay: float

    def __post_init__(self) -> None:
        _validate.open_unit(decay=self.decay)

    def weight(self, step: int) -> float:
        """(1 − d)/(1 − d^{t+1}): the weight of iterate t among iterates 0 to t."""
        return (1 - self.decay) / (1 - self.decay ** (step + 1))


@dataclass(frozen=True)
class Tail:
    """The mean of the iterates from ``start`` on; the iterate itself before that.

    >>> [Tail(2).weight(t) for t in range(4)]
    [1.0, 1.0, 1.0, 0.5]
    """

    start: int

    def weight(self, step: int) -> float:
        """1/(how many iterates are in the mean)."""
        return 1 / max(1, step - self.start + 1)


def parse(text: str, steps: int) -> Ema | Tail:
    """The average a command line names: ``ema:DECAY``, or ``tail:SHARE`` for the last share of the steps.

    >>> parse("ema:0.99", steps=10), parse("tail:0.3", steps=10)
    (Ema(decay=0.99), Tail(start=7))
    """
    name, _, number = str(text).partition(":")
    try:
        value = float(number)
    except ValueError:
        name, value = "", 0.0
    match name:
        case "ema":
            return Ema(value)
        case "tail":
            if value != 1:
                _validate.open_unit(**{"share of averaging tail": value})
            return Tail(steps - max(1, round(value * steps)))
        case _:
            known = _validate.meant(str(text).partition(":")[0], ("ema", "tail"))
            raise OptionError(f"averaging must be ema:DECAY or tail:SHARE, got {_validate.shown(text)}{known}")


class Averaged:
    """The average of a model's trained parameters over the steps of a run; public, as the iterates are.

    >>> Averaged(nn.Linear(2, 1), Ema(0.9)).state().keys()
    dict_keys(['weight', 'bias'])
    """

    def __init__(self, model: nn.Module, kind: Ema | Tail) -> None:
        self._parameters = trainable(model)
        self._kind = kind
        self._means = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the iterate after ``step``, counted from 0."""
        torch._foreach_lerp_(list(self._means.values()), list(self._parameters.values()), self._kind.weight(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averaged parameters."""
        kept = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._means[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = kept[name]

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the averaged parameters in the model."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._means[name])

    def state(self) -> dict[str, Tensor]:
        """The averages, for a checkpoint."""
        return dict(self._means)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for name, mean in self._means.items():
            mean.copy_(state[name])
