"""Products of per-example factors on tensor cores: ghost norms, operands of weighted sums.

TF32 keeps 10 bits of a fraction. A product of operands that have no more is exact, and the sum of products is formed in
float32, so a norm and a sum made of the same operands speak of the same gradient.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device

__all__ = ["ghost", "scaled", "swapped", "weighted", "weighted_outer"]

_BK = 32  # columns that a Gram matrix takes at a time


@triton.jit
def _cut(x):
    """The value of TF32 next to x towards zero; what is not a number stays so."""
    return tl.where(x == x, (x.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def _nearest(x):
    """The nearest value of TF32, ties away from zero; what is not a number stays so."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _scaled(out, x, factors, each, BLOCK: tl.constexpr):
    """The values of x, cut, times the factor of their example, rounded."""
    example, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = at < each
    value = tl.load(x + example * each + at, mask=known, other=0.0).to(tl.float32)
    tl.store(out + example * each + at, _nearest(_cut(value) * tl.load(factors + example)), mask=known)


@on_its_device
def scaled(x: Tensor, factors: Tensor) -> Tensor:
    """f_i·x_i for contiguous x (examples, ...), in TF32: x is cut towards zero, and the product is rounded."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    each = x[0].numel()
    _scaled[(len(x), -(-each // 2048))](out, x, factors, each, BLOCK=2048, num_warps=8)
    return out


@triton.jit
def _swapped(out, x, rows, columns, BLOCK: tl.constexpr):
    """A tile of each item's matrix, transposed."""
    item = tl.program_id(0).to(tl.int64) * rows * columns
    row, column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    known = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + item + row[:, None] * columns + column[None, :], mask=known, other=0.0)
    tl.store(out + item + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(known))


@on_its_device
def swapped(x: Tensor) -> Tensor:
    """Contiguous x (items, rows, columns) stored as (items, columns, rows)."""
    items, rows, columns = x.shape
    out = torch.empty(items, columns, rows, dtype=x.dtype, device=x.device)
    block = 64 if min(rows, columns) > 32 else 32
    _swapped[(items, -(-rows // block), -(-columns // block))](out, x, rows, columns, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _gram(
    x, one, other, positions, width, BT: tl.constexpr, BK: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """⟨x_t, x_s⟩ for the positions of two blocks; ``WHOLE``: the width is a multiple of BK."""
    ts, ss, ks = one * BT + tl.arange(0, BT), other * BT + tl.arange(0, BT), tl.arange(0, BK)
    found = tl.zeros((BT, BT), dtype=tl.float32)
    for start in range(0, width, BK):
        inside = ks < BK if WHOLE else start + ks < width
        a = tl.load(
            x + ts[:, None] * width + (start + ks)[None, :], mask=(ts[:, None] < positions) & inside[None, :], other=0.0
        )
        b = tl.load(
            x + ss[None, :] * width + (start + ks)[:, None], mask=(ss[None, :] < positions) & inside[:, None], other=0.0
        )
        a, b = a.to(tl.float32), b.to(tl.float32)
        if CUT:
            a, b = _cut(a), _cut(b)
        found = tl.dot(a, b, found, input_precision="tf32")
    return found


@triton.jit
def _gram_of_patches(
    x, one, other, positions, channels: tl.constexpr, height: tl.constexpr, width: tl.constexpr, columns: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, EACH: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """⟨patch_t, patch_s⟩ for the positions of two blocks; x is stored as (items, height, width, channels).

    ``EACH`` of the positions are in one item; 0 where there is one item.
    """
    ts, ss, ks = one * BT + tl.arange(0, BT), other * BT + tl.arange(0, BT), tl.arange(0, BK)
    at_t, at_s = ts, ss
    of_t, of_s = x + (ts * 0)[:, None], x + (ss * 0)[None, :]  # where the item of a position begins
    if EACH > 0:
        at_t, of_t = ts % EACH, x + (ts // EACH)[:, None] * (height * width * channels)
        at_s, of_s = ss % EACH, x + (ss // EACH)[None, :] * (height * width * channels)
    found = tl.zeros((BT, BT), dtype=tl.float32)
    steps: tl.constexpr = (channels + BK - 1) // BK
    for at in range(0, KH * KW * steps):
        tap = at // steps
        channel = (at % steps) * BK + ks
        down, right = (tap // KW) * DH - PH, (tap % KW) * DW - PW
        y, z = (at_t // columns) * SH + down, (at_t % columns) * SW + right
        seen = (ts < positions) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        a = tl.load(
            of_t + (y * width + z)[:, None] * channels + channel[None, :],
            mask=seen[:, None] & (channel[None, :] < channels), other=0.0,
        )  # fmt: skip
        y, z = (at_s // columns) * SH + down, (at_s % columns) * SW + right
        seen = (ss < positions) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        b = tl.load(
            of_s + (y * width + z)[None, :] * channels + channel[:, None],
            mask=seen[None, :] & (channel[:, None] < channels), other=0.0,
        )  # fmt: skip
        a, b = a.to(tl.float32), b.to(tl.float32)
        if CUT:
            a, b = _cut(a), _cut(b)
        found = tl.dot(a, b, found, input_precision="tf32")
    return found


@triton.jit
def _diagonal(gram, BT: tl.constexpr):
    same = tl.arange(0, BT)[:, None] == tl.arange(0, BT)[None, :]
    return tl.sum(tl.where(same, gram, 0.0), axis=1)


@triton.jit
def _ghost(
    found, masses, a, g, positions, lost, each_a, tiles, blocks, d, p, SHAPE: tl.constexpr, EACH: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, CUT: tl.constexpr, WHOLE_D: tl.constexpr, WHOLE_P: tl.constexpr,
):  # fmt: skip
    """Σ ⟨a_t, a_s⟩⟨g_t, g_s⟩ over the positions of two blocks, those off the diagonal counted twice; its mass there.

    The widths are numbers of the call: a kernel for each pair of them would take a second to compile.
    """
    example, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    one = tl.where((one + 1) * (one + 2) // 2 <= tile, one + 1, one)  # the root may be rounded either way
    one = tl.where(one * (one + 1) // 2 > tile, one - 1, one)
    other = tile - one * (one + 1) // 2
    if SHAPE is None:
        of_a = _gram(a + example * each_a, one, other, positions, d, BT, BK, CUT, WHOLE_D)
    else:
        of_a = _gram_of_patches(
            a + example * each_a, one, other, positions, SHAPE[11], SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], SHAPE[4],
            SHAPE[5], SHAPE[6], SHAPE[7], SHAPE[8], SHAPE[9], SHAPE[10], EACH, BT, BK, CUT,
        )  # fmt: skip
    of_g = _gram(g + example * positions * p, one, other, positions, p, BT, BK, CUT, WHOLE_P)
    total = tl.sum(of_a * of_g)
    tl.store(found + example * tiles + tile, tl.where(one == other, total, 2 * total))
    if one == other:
        known = one * BT + tl.arange(0, BT) < positions
        lengths = tl.sqrt(_diagonal(of_a, BT) + lost) * tl.sqrt(_diagonal(of_g, BT) + lost)
        tl.store(masses + example * blocks + one, tl.sum(tl.where(known, lengths, 0.0)))


@triton.jit
def _finished(norms, found, masses, tiles, blocks, gamma, sigma, TILES: tl.constexpr, BLOCKS: tl.constexpr):
    """√(Σ found + γ·mass²) + σ·mass of one example."""
    example = tl.program_id(0).to(tl.int64)
    at, of = tl.arange(0, TILES), tl.arange(0, BLOCKS)
    total = tl.sum(tl.load(found + example * tiles + at, mask=at < tiles, other=0.0))
    mass = tl.sum(tl.load(masses + example * blocks + of, mask=of < blocks, other=0.0))
    # What cancels may come out below zero. An overflow may be of either sign: its root is not a number, and stays so.
    total = tl.where((total < 0.0) & (total > -float("inf")), 0.0, total)
    tl.store(norms + example, tl.sqrt(total + gamma * (mass * mass)) + sigma * mass)


@on_its_device
def ghost(
    a: Tensor, g: Tensor, gamma: float, sigma: float, lost: float, shape: tuple[int, ...] | None = None, items: int = 1
) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖ of each example in TF32, operands cut towards zero, with what rounding may hide added.

    a (examples, T, d) and g (examples, T, p) are contiguous. With mass = Σ_t ‖a_t‖‖g_t‖, where ``lost`` is added to
    each squared length, the result is √(Σ_ts ⟨a_t, a_s⟩⟨g_t, g_s⟩ + γ·mass²) + σ·mass.

    With ``shape``, a is the input of a convolution stored as (examples·items, height, width, channels), a_t is a patch
    of it, the T positions are those of all items of an example, and ``shape`` is (height, width, columns of the output,
    kernel, stride, padding, dilation), two numbers each.
    """
    examples, positions, p = g.shape
    d = a.shape[-1]
    block = 128 if positions > 64 else max(16, triton.next_power_of_2(positions))
    blocks = -(-positions // block)
    tiles = blocks * (blocks + 1) // 2
    found, masses = torch.empty(examples, tiles, device=a.device), torch.empty(examples, blocks, device=a.device)
    _ghost[(examples, tiles)](
        found, masses, a, g, positions, lost, items * a[0].numel(), tiles, blocks, d, p,
        None if shape is None else (*shape, d), EACH=positions // items if items > 1 else 0, BT=block, BK=_BK,
        CUT=not _cuts(block, a.device), WHOLE_D=d % _BK == 0, WHOLE_P=p % _BK == 0,
        num_warps={128: 8, 64: 4}.get(block, 1), num_stages=4,
    )  # fmt: skip
    norms = torch.empty(examples, device=a.device)
    _finished[(examples,)](
        norms, found, masses, tiles, blocks, gamma, sigma,
        TILES=triton.next_power_of_2(tiles), BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return norms


@triton.jit
def _square(out, x, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    value = tl.load(x + at)
    tl.store(out + at, tl.dot(value, value, input_precision="tf32"))


@cache
def _cuts(block: int, device: torch.device) -> bool:
    """Whether a product of blocks of this size cuts its operands to TF32 towards zero, as NVIDIA's devices do.

    Where it does not, kernels cut them first. Seen from a value that lies just below one of TF32.
    """
    size = min(block, 64)
    below = 1 + 2.0**-10 - 2.0**-20
    x = below * torch.eye(size, device=device)
    out = torch.empty_like(x)
    _square[(1,)](out, x, B=size, num_warps=4 if size == 64 else 1)
    return bool((out == torch.eye(size, device=device)).all())


@triton.jit(do_not_specialize=["examples"])
def _weighted(out, x, factors, examples, width, BE: tl.constexpr, BW: tl.constexpr):
    """Σ f_i x_i in float64, for some of the columns."""
    at = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW)
    some = tl.arange(0, BE)
    total = tl.zeros((BE, BW), dtype=tl.float64)
    for start in range(0, examples, BE):
        row = (start + some).to(tl.int64)
        known = row < examples
        factor = tl.load(factors + row, mask=known, other=0.0).to(tl.float64)
        value = tl.load(x + row[:, None] * width + at[None, :], mask=known[:, None] & (at[None, :] < width), other=0.0)
        total += factor[:, None] * value.to(tl.float64)
    tl.store(out + at, tl.sum(total, axis=0), mask=at < width)


@on_its_device
def weighted(x: Tensor, factors: Tensor) -> Tensor:
    """Σ f_i x_i in float64 for contiguous x (examples, width) and factors (examples,)."""
    examples, width = x.shape
    out = torch.empty(width, dtype=torch.float64, device=x.device)
    columns, rows = (16, 128) if width <= 1 << 15 else (64, 32)
    _weighted[(-(-width // columns),)](out, x, factors, examples, width, BE=rows, BW=columns, num_warps=4, num_stages=3)
    return out


@triton.jit(do_not_specialize=["examples"])
def _weighted_outer(
    out, a, g, factors, examples, d, p, AT_ONCE: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):
    """A tile of Σ f_i g_i a_iᵀ: few terms in float32, such sums in float64."""
    ps, ds = tl.program_id(0) * BP + tl.arange(0, BP), tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BP, BD), dtype=tl.float64)
    for begin in range(0, examples, AT_ONCE):
        few = tl.zeros((BP, BD), dtype=tl.float32)
        for start in range(begin, begin + AT_ONCE, BE):
            row = (start + tl.arange(0, BE)).to(tl.int64)
            known = row < examples
            factor = tl.load(factors + row, mask=known, other=0.0)
            left = tl.load(g + row[None, :] * p + ps[:, None], mask=known[None, :] & (ps[:, None] < p), other=0.0)
            right = tl.load(a + row[:, None] * d + ds[None, :], mask=known[:, None] & (ds[None, :] < d), other=0.0)
            left = left.to(tl.float32) * factor[None, :]
            few = tl.dot(left, right.to(tl.float32), few, input_precision="ieee")
        total += few.to(tl.float64)
    tl.store(out + ps[:, None] * d + ds[None, :], total, mask=(ps[:, None] < p) & (ds[None, :] < d))


@on_its_device
def weighted_outer(a: Tensor, g: Tensor, factors: Tensor, at_once: int) -> Tensor:
    """Σ f_i g_i a_iᵀ, (p, d) in float64, for contiguous a (examples, d) and g (examples, p) of at most 32 bits.

    At most ``at_once`` terms, a multiple of 32, are added in float32.
    """
    (examples, d), p = a.shape, g.shape[1]
    out = torch.empty(p, d, dtype=torch.float64, device=a.device)
    _weighted_outer[(-(-p // 16), -(-d // 32))](
        out, a, g, factors, examples, d, p, AT_ONCE=at_once, BE=32, BP=16, BD=32, num_warps=2, num_stages=3
    )
    return out
