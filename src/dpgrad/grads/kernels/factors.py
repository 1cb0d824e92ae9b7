"""From the norms of the parts of an example's gradient to its factor, in few launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["finite", "quotient", "together"]


@triton.jit(do_not_specialize=["examples"])
def _together(out, parts, many, examples, lost, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """√Σ parts² + lost for some of the examples."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < examples
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, many, PARTS):
        row = start + tl.arange(0, PARTS)
        inside = (row[:, None] < many) & known[None, :]
        value = tl.load(parts + row[:, None] * examples + at[None, :], mask=inside, other=0.0)
        total += tl.sum(value * value, axis=0)
    tl.store(out + at, tl.sqrt(total) + lost, mask=known)


@on_its_device
def together(parts: Tensor, lost: float) -> Tensor:
    """The norm of each example, (examples,), from those of its parts, contiguous (parts, examples), and ``lost``."""
    many, examples = parts.shape
    out = torch.empty(examples, device=parts.device)
    _together[(-(-examples // 64),)](out, parts, many, examples, lost, PARTS=16, BLOCK=64, num_warps=2)
    return out


@triton.jit(do_not_specialize=["examples"])
def _quotient(out, norms, bounds, denominators, examples, each, BLOCK: tl.constexpr):
    """The float32 below the one nearest to bound/denominator, 1 where they are equal, 0 where a norm is unusable."""
    group, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = at < examples
    bound = tl.load(bounds + group * each + at * 0)  # the same for all
    norm = tl.load(norms + group * examples + at, mask=known, other=0.0)
    denominator = tl.load(denominators + group * examples + at, mask=known, other=1.0)
    nearest = (bound / denominator).to(tl.float32)
    below = tl.where(nearest > 0, (nearest.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), nearest)
    factor = tl.where(denominator == bound, nearest, below)
    usable = (norm >= 0) & (bound > 0) & (bound < float("inf"))
    tl.store(out + group * examples + at, tl.where(usable, factor, 0.0), mask=known)


@on_its_device
def quotient(norms: Tensor, bound: Tensor, denominator: Tensor) -> Tensor:
    """The factors of `dpgrad.scaling.Quotient`: norms float32, bound and denominator float64.

    norms and denominator are contiguous (groups, examples); bound is one number, or (groups, 1).
    """
    out = torch.empty_like(norms)
    groups, examples = norms.shape
    each = 1 if bound.numel() > 1 else 0
    _quotient[(groups, -(-examples // 256))](out, norms, bound, denominator, examples, each, BLOCK=256, num_warps=2)
    return out


@triton.jit(do_not_specialize=["examples"])
def _finite(out, kept, norms, factors, groups, examples, shrink, BLOCK: tl.constexpr):
    """factor·shrink, or 0 for an example that has a norm that is not finite; whether it has none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < examples
    keep = known
    for group in range(0, groups):
        norm = tl.load(norms + group * examples + at, mask=known, other=0.0)
        keep = keep & (tl.abs(norm) < float("inf"))
    for group in range(0, groups):
        factor = tl.load(factors + group * examples + at, mask=known, other=0.0)
        tl.store(out + group * examples + at, tl.where(keep, factor * shrink, 0.0), mask=known)
    tl.store(kept + at, keep.to(tl.int8), mask=known)


@on_its_device
def finite(norms: Tensor, factors: Tensor, shrink: float) -> tuple[Tensor, Tensor]:
    """factors·shrink, with 0 for each example that has a norm that is not finite, and whether it has none, (examples,).

    norms and factors are contiguous float32 (groups, examples); the second tensor is int8, 0 or 1.
    """
    groups, examples = norms.shape
    out, kept = torch.empty_like(factors), torch.empty(examples, dtype=torch.int8, device=norms.device)
    _finite[(-(-examples // 128),)](out, kept, norms, factors, groups, examples, shrink, BLOCK=128, num_warps=2)
    return out, kept
