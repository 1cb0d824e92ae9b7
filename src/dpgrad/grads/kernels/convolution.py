"""The gradient of a convolution's weight for each example, from patches that are never stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["formed"]


@triton.jit
def _formed(
    out, found, x, g, tiles, outs: tl.constexpr, ins: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ITEMS: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile (outputs, patch values) of Σ_t g_t ⊗ patch_t over the items of one example, and its squared length."""
    example, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    across: tl.constexpr = (ins * KH * KW + BQ - 1) // BQ
    ps, qs = (tile // across) * BP + tl.arange(0, BP), (tile % across) * BQ + tl.arange(0, BQ)
    channel, inner = qs // (KH * KW), qs % (KH * KW)
    down, right = (inner // KW) * DH - PH, (inner % KW) * DW - PW
    positions: tl.constexpr = rows * columns
    total = tl.zeros((BP, BQ), dtype=tl.float32)
    for item in range(ITEMS):
        row = example * ITEMS + item
        base = x + row * ins * height * width + channel * height * width
        for start in range(0, positions, BK):
            ts = start + tl.arange(0, BK)
            inside = ts < positions
            left = tl.load(
                g + (row * outs + ps[:, None]) * positions + ts[None, :],
                mask=(ps[:, None] < outs) & inside[None, :], other=0.0,
            )  # fmt: skip
            y = (ts // columns)[:, None] * SH + down[None, :]
            z = (ts % columns)[:, None] * SW + right[None, :]
            seen = (y >= 0) & (y < height) & (z >= 0) & (z < width) & inside[:, None] & (channel[None, :] < ins)
            patch = tl.load(base[None, :] + y * width + z, mask=seen, other=0.0)
            total = tl.dot(left, patch, total, input_precision="tf32")
    at = (example * outs + ps[:, None]) * (ins * KH * KW) + qs[None, :]
    tl.store(out + at, total, mask=(ps[:, None] < outs) & (qs[None, :] < ins * KH * KW))
    tl.store(found + example * tiles + tile, tl.sum(total * total))


@on_its_device
def formed(
    x: Tensor,
    g: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    items: int = 1,
) -> tuple[Tensor, Tensor]:
    """The gradient of each example, (examples, P, C·kernel), and the parts of its squared norm.

    x (examples·items, C, H, W) and g (examples·items, P, H', W') are contiguous float32, the items of an example
    neighbours; products are formed in TF32.
    """
    _, ins, height, width = x.shape
    examples = len(x) // items
    outs, rows, columns = g.shape[1:]
    size = ins * kernel[0] * kernel[1]
    bp, bq = (min(128, max(16, triton.next_power_of_2(length))) for length in (outs, size))
    if bp < 128:
        bq = min(bq, 64)
    bk, warps, stages = (32, 8 if bp * bq > 1 << 13 else 4, 4) if bp * bq > 1 << 11 else (16, 1, 4)
    tiles = -(-outs // bp) * -(-size // bq)
    out = torch.empty(examples, outs, size, device=x.device)
    found = torch.empty(examples, tiles, device=x.device)
    _formed[(examples, tiles)](
        out, found, x, g, tiles, outs, ins, height, width, rows, columns, *kernel, *stride, *padding, *dilation,
        ITEMS=items, BP=bp, BQ=bq, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, found
