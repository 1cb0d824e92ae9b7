"""The norm of a linear layer's gradient at one position of each example: weight and bias in one launch."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["of_layer"]

_AT_ONCE = 1024  # squares that are added in float32


@triton.jit
def _length(x, width, W: tl.constexpr):
    """The norm of one row: short sums of squares in float32, which are added in float64."""
    total = tl.zeros((), dtype=tl.float64)
    for start in range(0, width, W):
        at = start + tl.arange(0, W)
        value = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
        total += tl.sum(value * value).to(tl.float64)
    return tl.sqrt(total)


@triton.jit
def _of_layer(
    weight, bias, a, g, next_a, next_g, d, p, lost_a, lost_g, WA: tl.constexpr, WG: tl.constexpr
):  # fmt: skip
    """(‖a‖ + lost)(‖g‖ + lost) and ‖g‖ of one example."""
    example = tl.program_id(0).to(tl.int64)
    of_a, of_g = _length(a + example * next_a, d, WA), _length(g + example * next_g, p, WG)
    tl.store(weight + example, ((of_a + lost_a) * (of_g + lost_g)).to(tl.float32))
    tl.store(bias + example, of_g.to(tl.float32))


@on_its_device
def of_layer(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """‖aᵢ‖‖gᵢ‖ and ‖gᵢ‖, (examples,) each in float32, for a (examples, d) and g (examples, p) of at most 32 bits.

    Guarantee: the product is not below its value, but for rounding, even where squares are below the least float32:
    what they may lose is added to both factors. It is not added to the second result.
    """
    a, g = (each if each.stride(1) == 1 else each.contiguous() for each in (a, g))
    (examples, d), p = a.shape, g.shape[1]
    # Each in memory of its own, which is aligned whatever the number: a kernel is compiled anew for other alignments.
    weight, bias = (torch.empty(examples, device=a.device) for _ in range(2))
    of_a, of_g = (min(_AT_ONCE, max(16, triton.next_power_of_2(width))) for width in (d, p))
    tiny = torch.finfo(torch.float32).tiny
    _of_layer[(examples,)](
        weight, bias, a, g, a.stride(0), g.stride(0), d, p, math.sqrt(d * tiny), math.sqrt(p * tiny),
        WA=of_a, WG=of_g, num_warps=1 if max(of_a, of_g) <= 512 else 4,
    )  # fmt: skip
    return weight, bias
