"""Scale and shift of normalization layers: the gradient of each example in one pass over input and gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["group_norm", "layer_norm"]


@triton.jit
def _group(scale, shift, x, g, eps, channels, space, C: tl.constexpr, S: tl.constexpr):
    """Σ g·(x − mean)/sd and Σ g over space, for the channels of one group."""
    group = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, C), tl.arange(0, S)
    known = (rows[:, None] < channels) & (columns[None, :] < space)
    at = group * channels * space + rows[:, None] * space + columns[None, :]
    value = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    gradient = tl.load(g + at, mask=known, other=0.0).to(tl.float32)
    many = channels * space
    centred = tl.where(known, value - tl.sum(value) / many, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred) / many + eps)
    place = group * channels + rows
    tl.store(scale + place, tl.sum(gradient * centred, axis=1) / deviation, mask=rows < channels)
    tl.store(shift + place, tl.sum(gradient, axis=1), mask=rows < channels)


@on_its_device
def group_norm(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of scale and shift, (items, C) each, for contiguous x and g (items, C, space)."""
    items, channels, space = x.shape
    scale, shift = (torch.empty(items, channels, device=x.device) for _ in range(2))
    each = channels // groups
    c, s = triton.next_power_of_2(each), triton.next_power_of_2(space)
    _group[(items * groups,)](scale, shift, x, g, eps, each, space, C=c, S=s, num_warps=4 if c * s <= 2048 else 8)
    return scale, shift


@triton.jit
def _layer(scale, shift, x, g, eps, positions, width, parts, ROWS: tl.constexpr, W: tl.constexpr):
    """Σ g·(x − mean)/sd and Σ g over some of the positions of an example."""
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, W)
    known = columns < width
    of_scale, of_shift = tl.zeros((W,), dtype=tl.float32), tl.zeros((W,), dtype=tl.float32)
    for row in range(part * ROWS, tl.minimum((part + 1) * ROWS, positions)):
        at = (example * positions + row) * width + columns
        value = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        gradient = tl.load(g + at, mask=known, other=0.0).to(tl.float32)
        centred = tl.where(known, value - tl.sum(value) / width, 0.0)
        of_scale += gradient * centred / tl.sqrt(tl.sum(centred * centred) / width + eps)
        of_shift += gradient
    at = (example * parts + part) * width + columns
    tl.store(scale + at, of_scale, mask=known)
    tl.store(shift + at, of_shift, mask=known)


@on_its_device
def layer_norm(x: Tensor, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of scale and shift, (examples, width) each, for contiguous x and g (examples, positions, width)."""
    examples, positions, width = x.shape
    rows = 16
    parts = -(-positions // rows)
    both = torch.empty(2, examples, parts, width, device=x.device)
    w = triton.next_power_of_2(width)
    _layer[(examples, parts)](
        both[0], both[1], x, g, eps, positions, width, parts, ROWS=rows, W=w, num_warps=max(1, min(8, w // 256))
    )
    scale, shift = both.sum(2) if parts > 1 else both[:, :, 0]
    return scale, shift
