"""Noise of the secure source on tensors: sums are rounded to a grid, and whole numbers of (key, step, name) are added.

The numbers are drawn on the CPU, by the table of `dpgrad.mechanism.secure`, and copied to where the sums are.

>>> totals = {"bias": torch.ones(3)}
>>> noisy = noisy_means(totals, {"bias": 2.0**-28}, Key.from_seed(7).secured(), step=0, divisor=4)
>>> noisy["bias"].shape
torch.Size([3])
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpgrad import _validate
from dpgrad.mechanism import secure
from dpgrad.mechanism.keys import Key
from dpgrad.randomness.noise import Part

__all__ = ["added", "drawn", "fill_parts", "noisy_means"]


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


def _names(name: str, step: int) -> tuple[str, ...]:
    """Those of the stream of a parameter's noise at a step."""
    return "noise", name, str(step)
