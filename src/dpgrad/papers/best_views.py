"""Fixed features of one image or row for our best runs: scattering of shifted and mirrored images, and normalizations.

Everything here is a fixed function of one row with constants that no row was read for, so it costs no privacy: a
row's features do not change when another row is added, left out or exchanged (`dpgrad.training.features`).

>>> maps = torch.rand(2, 81, 7, 7)
>>> normalized(maps, "paths", 2, 8).shape
torch.Size([2, 81, 7, 7])
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dpgrad import _validate
from dpgrad.training.features import scattering

__all__ = ["CACHE", "NORMALIZATIONS", "VIEWS", "View", "hats", "moved", "normalized", "paths", "scattered", "views"]

CACHE = "DPGRAD_BEST_CACHE"  # the folder in which the processes of a search share scattering transforms
_BATCH = {"cpu": 64}  # images at a time; 1,024 elsewhere

View = tuple[int, int, bool]  # pixels down, pixels to the right, mirrored
_AS_IT_IS: View = (0, 0, False)
# The rows of one example, by name: their gradients are averaged before the mean is clipped, and predictions averaged.
VIEWS: dict[str, tuple[View, ...]] = {
    "one": (_AS_IT_IS,),
    "corners": (_AS_IT_IS, (1, 1, False), (-1, -1, False)),
    "cross": (_AS_IT_IS, (1, 0, False), (-1, 0, False), (0, 1, False), (0, -1, False)),
    "mirror": (_AS_IT_IS, (0, 0, True)),
    "mirror-4": (_AS_IT_IS, (0, 0, True), (1, 1, False), (-1, -1, True)),
    "mirror-6": (_AS_IT_IS, (0, 0, True), (1, 0, False), (-1, 0, True), (0, 1, True), (0, -1, False)),
    "wide-4": (_AS_IT_IS, (0, 0, True), (4, 4, False), (-4, -4, True)),
    "wide-8": (
        _AS_IT_IS, (0, 0, True), (4, 4, False), (-4, -4, True), (4, -4, True), (-4, 4, False), (0, 6, True),
        (0, -6, False),
    ),
}  # fmt: skip
NORMALIZATIONS = ("none", "paths", "groups", "local", "unit")


def views(name: str) -> tuple[View, ...]:
    """The views of a name.

    >>> views("mirror")
    ((0, 0, False), (0, 0, True))
    """
    _validate.one_of(VIEWS, views=name)
    return VIEWS[name]


def moved(images: Tensor, view: View) -> Tensor:
    """Images, (rows, channels, height, width), shifted and then mirrored; zeros move in.

    >>> moved(torch.tensor([[[[1.0, 2.0]]]]), (0, 1, True))
    tensor([[[[1., 0.]]]])
    """
    down, right, mirrored = view
    height, width = images.shape[-2:]
    padded = F.pad(images, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)))
    shifted = padded[..., max(-down, 0) :, max(-right, 0) :][..., :height, :width]
    return shifted.flip(-1) if mirrored else shifted


def paths(scales: int, angles: int) -> list[int]:
    """How many maps each path of a scattering transform has: the mean, each scale, each pair of scales.

    >>> paths(2, 8), sum(paths(2, 8))
    ([1, 8, 8, 64], 81)
    """
    return [1, *[angles] * scales, *[angles**2] * (scales * (scales - 1) // 2)]


def normalized(maps: Tensor, kind: str, scales: int, angles: int) -> Tensor:
    """Maps of one row brought to a common scale by that row alone.

    "paths": mean 0 and variance 1 over the maps and positions of each path, whose sizes differ by orders of magnitude;
    "groups": the same over 27 equal groups (Tramèr and Boneh, 2021); "local": the same after dividing the maps of a
    path by their root mean square around each position; "unit": norm 1.

    >>> normalized(torch.tensor([[[[3.0, 4.0]]]]), "unit", 1, 1)
    tensor([[[[0.6000, 0.8000]]]])
    """
    _validate.one_of(NORMALIZATIONS, norm=kind)
    if kind == "none":
        return maps
    if kind == "unit":
        return F.normalize(maps.flatten(1), dim=1).view_as(maps)
    if kind == "groups":
        return F.group_norm(maps, 27, eps=1e-6)
    sizes = paths(scales, angles)
    parts = torch.split(maps, sizes * (maps.shape[1] // sum(sizes)), dim=1)
    scaled = (F.group_norm(part, 1, eps=1e-6) for part in parts) if kind == "paths" else map(_contrasts, parts)
    return torch.cat([*scaled], 1)


def _contrasts(part: Tensor) -> Tensor:
    """The maps of one path over their root mean square in 3×3 positions and all maps; a single map is standardized."""
    if part.shape[1] == 1:
        return F.group_norm(part, 1, eps=1e-6) / 2
    energy = F.avg_pool2d(part.square().mean(1, keepdim=True), 3, 1, 1, count_include_pad=False)
    even = part / (energy.sqrt() + energy.mean((2, 3), keepdim=True).sqrt() / 10 + 1e-6)
    return F.group_norm(even, 1, eps=1e-6)


def scattered(
    images: NDArray[np.uint8], name: str, chosen: Sequence[View], *, scales: int, angles: int, norm: str, device: str
) -> Tensor:
    """The normalized scattering maps of each view, (rows, views, maps, height, width) in float16, on the device.

    ``name`` tells images apart in the folder that `CACHE` names; where it names none, nothing is kept.
    """
    found: Tensor | None = None
    for at, view in enumerate(chosen):
        for start, maps in _transformed(images, name, view, scales, angles, device):
            if found is None:
                found = torch.empty((len(images), len(chosen), *maps.shape[1:]), dtype=torch.float16, device=device)
            found[start : start + len(maps), at] = normalized(maps.to(device).float(), norm, scales, angles)
    assert found is not None
    return found


def _transformed(
    images: NDArray[np.uint8], name: str, view: View, scales: int, angles: int, device: str
) -> list[tuple[int, Tensor]]:
    """The transforms of one view in blocks, from the cache where they are there."""
    folder = os.environ.get(CACHE)
    file = None if not folder else Path(folder) / f"{name}-{scales}-{angles}-{'_'.join(map(str, map(int, view)))}.pt"
    if file is not None and file.exists():
        whole = torch.load(file, weights_only=True, mmap=True)
        return [(start, whole[start : start + 8192]) for start in range(0, len(whole), 8192)]
    shape = images.shape[1], images.shape[2], images.shape[3]
    batch = _BATCH.get(device, 1024)
    extract = scattering(shape, scales, angles, batch=batch)
    extract.module.to(device)
    side = shape[1] >> scales, shape[2] >> scales
    blocks = []
    for start in range(0, len(images), batch):
        few = torch.from_numpy(images[start : start + batch]).to(device).float() / 255
        blocks.append((start, extract(moved(few, view)).view(len(few), -1, *side).half()))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        torch.save(torch.cat([block.cpu() for _, block in blocks]), part)
        part.replace(file)
    return blocks


def hats(rows: Tensor, columns: int, knots: int) -> Tensor:
    """The first ``columns``, in [0, 1], as shares of the two nearest of ``knots`` equal steps; the others as they are.

    A layer on them can follow any function that is linear between knots. Of a column that bounds leave room around,
    most shares are zero, and clipped gradients do not pay for them.

    >>> hats(torch.tensor([[0.25, 1.0]]), columns=1, knots=3)
    tensor([[0.5000, 0.5000, 0.0000, 1.0000]])
    """
    places = rows[:, :columns, None] * (knots - 1)
    shares = (1 - (places - torch.arange(knots, device=rows.device)).abs()).clamp(min=0)
    return torch.cat([shares.flatten(1), rows[:, columns:]], 1)
