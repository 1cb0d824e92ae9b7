"""The time steps of an LSTM or a GRU: one product and one kernel for each, forward and backward.

What they compute is said in `dpgrad.grads.layers.steps`, the plain path. Gates are computed in float32, and cells kept
in it, whatever the type of the data.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpgrad._triton import on_its_device
from dpgrad.grads.layers.steps import Back, Given, Ran, Returned, before

__all__ = ["backward", "forward"]

_BLOCK = 256  # values of a state for each program


@triton.jit
def _tanh(x):
    """tanh to some units of rounding, also near 0, where the quotient would cancel."""
    small = x * x
    series = x * (1.0 + small * (-0.33333333 + small * (0.13333333 + small * (-0.05396825 + small * 0.02186949))))
    return tl.where(small < 0.09, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _read(place, at, known):
    return tl.load(place + at, mask=known, other=0.0).to(tl.float32)


@triton.jit
def _lstm_step(
    u, v, kept, c_before, c_after, h_before, h_after, valid, of_gates, of_c_before, of_c, of_h_before, of_h, of_valid,
    items, size, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gates, cell and state of one time step; ``of_...`` is how far apart the rows of a tensor are."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < items
    row, column = (at // size).to(tl.int64), at % size
    gate, flat = row * of_gates + column, row * 4 * size + column
    i = tl.sigmoid(_read(u, gate, known) + _read(v, flat, known))
    f = tl.sigmoid(_read(u, gate + size, known) + _read(v, flat + size, known))
    g = _tanh(_read(u, gate + 2 * size, known) + _read(v, flat + 2 * size, known))
    o = tl.sigmoid(_read(u, gate + 3 * size, known) + _read(v, flat + 3 * size, known))
    tl.store(kept + gate, i, mask=known)
    tl.store(kept + gate + size, f, mask=known)
    tl.store(kept + gate + 2 * size, g, mask=known)
    tl.store(kept + gate + 3 * size, o, mask=known)
    past = _read(c_before, row * of_c_before + column, known)
    c = f * past + i * g
    h = o * _tanh(c)
    if MASKED:
        inside = tl.load(valid + row * of_valid, mask=known, other=0) != 0
        c = tl.where(inside, c, past)
        h = tl.where(inside, h, _read(h_before, row * of_h_before + column, known))
    tl.store(c_after + row * of_c + column, c, mask=known)
    tl.store(h_after + row * of_h + column, h, mask=known)


@triton.jit
def _lstm_step_back(
    du, dh, dc, arriving, kept, c_before, c_after, valid, of_gates, of_arriving, of_c_before, of_c, of_valid,
    items, size, ARRIVING: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the gates of one time step; dc becomes that of the step before, and dh what passes it by."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < items
    row, column = (at // size).to(tl.int64), at % size
    gate = row * of_gates + column
    i, f = _read(kept, gate, known), _read(kept, gate + size, known)
    g, o = _read(kept, gate + 2 * size, known), _read(kept, gate + 3 * size, known)
    shown = _tanh(_read(c_after, row * of_c + column, known))
    of_h, of_cell = _read(dh, at, known), _read(dc, at, known)
    if ARRIVING:
        of_h += _read(arriving, row * of_arriving + column, known)
    both = of_cell + of_h * o * (1.0 - shown * shown)
    d_i, d_f = both * g * i * (1.0 - i), both * _read(c_before, row * of_c_before + column, known) * f * (1.0 - f)
    d_g, d_o = both * i * (1.0 - g * g), of_h * shown * o * (1.0 - o)
    past = both * f
    if MASKED:
        inside = tl.load(valid + row * of_valid, mask=known, other=0) != 0
        d_i, d_f = tl.where(inside, d_i, 0.0), tl.where(inside, d_f, 0.0)
        d_g, d_o = tl.where(inside, d_g, 0.0), tl.where(inside, d_o, 0.0)
        past = tl.where(inside, past, of_cell)
        tl.store(dh + at, tl.where(inside, 0.0, of_h), mask=known)
    tl.store(du + gate, d_i, mask=known)
    tl.store(du + gate + size, d_f, mask=known)
    tl.store(du + gate + 2 * size, d_g, mask=known)
    tl.store(du + gate + 3 * size, d_o, mask=known)
    tl.store(dc + at, past, mask=known)


@triton.jit
def _gru_step(
    u, v, kept, h_before, h_after, valid, of_u, of_kept, of_h_before, of_h, of_valid,
    items, size, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gates and state of one time step."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < items
    row, column = (at // size).to(tl.int64), at % size
    of_input, flat, gate = row * of_u + column, row * 3 * size + column, row * of_kept + column
    r = tl.sigmoid(_read(u, of_input, known) + _read(v, flat, known))
    z = tl.sigmoid(_read(u, of_input + size, known) + _read(v, flat + size, known))
    last = _read(v, flat + 2 * size, known)
    n = _tanh(_read(u, of_input + 2 * size, known) + r * last)
    tl.store(kept + gate, r, mask=known)
    tl.store(kept + gate + size, z, mask=known)
    tl.store(kept + gate + 2 * size, n, mask=known)
    tl.store(kept + gate + 3 * size, last, mask=known)
    past = _read(h_before, row * of_h_before + column, known)
    h = n + z * (past - n)
    if MASKED:
        h = tl.where(tl.load(valid + row * of_valid, mask=known, other=0) != 0, h, past)
    tl.store(h_after + row * of_h + column, h, mask=known)


@triton.jit
def _gru_step_back(
    du, dv, dh, arriving, kept, h_before, valid, of_du, of_arriving, of_kept, of_h_before, of_valid,
    items, size, ARRIVING: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of both parts of the gates of one time step; dh becomes what passes them by."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < items
    row, column = (at // size).to(tl.int64), at % size
    gate, flat, into = row * of_kept + column, row * 3 * size + column, row * of_du + column
    r, z = _read(kept, gate, known), _read(kept, gate + size, known)
    n, last = _read(kept, gate + 2 * size, known), _read(kept, gate + 3 * size, known)
    of_h = _read(dh, at, known)
    if ARRIVING:
        of_h += _read(arriving, row * of_arriving + column, known)
    d_n = of_h * (1.0 - z) * (1.0 - n * n)
    d_r = d_n * last * r * (1.0 - r)
    d_z = of_h * (_read(h_before, row * of_h_before + column, known) - n) * z * (1.0 - z)
    past = of_h * z
    if MASKED:
        inside = tl.load(valid + row * of_valid, mask=known, other=0) != 0
        d_r, d_z, d_n = tl.where(inside, d_r, 0.0), tl.where(inside, d_z, 0.0), tl.where(inside, d_n, 0.0)
        past = tl.where(inside, past, of_h)
    tl.store(du + into, d_r, mask=known)
    tl.store(du + into + size, d_z, mask=known)
    tl.store(du + into + 2 * size, d_n, mask=known)
    tl.store(dv + flat, d_r, mask=known)
    tl.store(dv + flat + size, d_z, mask=known)
    tl.store(dv + flat + 2 * size, d_n * r, mask=known)
    tl.store(dh + at, past, mask=known)


def _masks(given: Given, time: int, otherwise: Tensor) -> tuple[list[Tensor], int, bool]:
    """Where the state does not stand still at each time step, how far apart its rows are, and whether it ever does."""
    if given.valid is None:
        return [otherwise] * time, 0, False
    valid = given.valid.to(torch.uint8)
    return list(valid.unbind(1)), valid.stride(0), True


@on_its_device
def forward(u: Tensor, given: Given) -> Ran:
    """What `steps.forward` returns."""
    u, outputs = u.contiguous(), u.new_empty(*u.shape[:2], given.weight.shape[1])
    if given.kind == "lstm":
        kept, cells = _lstm(u, given, outputs)
    else:
        kept, cells = _gru(u, given, outputs), u.new_empty(0)
    return Ran(outputs, before(outputs, given.hidden, given.backwards), kept, cells)


def _lstm(u: Tensor, given: Given, outputs: Tensor) -> tuple[Tensor, Tensor]:
    (batch, time, gates), size = u.shape, u.shape[2] // 4
    kept, cells = torch.empty_like(u), torch.empty(batch, time, size, device=u.device)
    v, turned, projection = u.new_empty(batch, gates), given.weight.t(), given.projection
    assert given.cell is not None
    h, c, m = given.hidden.contiguous(), given.cell.contiguous(), u.new_empty(batch, size)
    valid, of_valid, masked = _masks(given, time, u)
    of_input, gate, cell, after = (each.unbind(1) for each in (u, kept, cells, outputs))
    for t in given.order(time):
        torch.mm(h, turned, out=v)
        new = after[t] if projection is None else m
        _lstm_step[(triton.cdiv(batch * size, _BLOCK),)](
            of_input[t], v, gate[t], c, cell[t], h, new, valid[t],
            u.stride(0), c.stride(0), cells.stride(0), h.stride(0), new.stride(0), of_valid,
            batch * size, size, MASKED=masked, BLOCK=_BLOCK,
        )  # fmt: skip
        if projection is not None:
            torch.mm(m, projection.t(), out=after[t])
        h, c = after[t], cell[t]
    return kept, cells


def _gru(u: Tensor, given: Given, outputs: Tensor) -> Tensor:
    (batch, time, gates), size = u.shape, u.shape[2] // 3
    kept, v = u.new_empty(batch, time, 4 * size), u.new_empty(batch, gates)
    turned, bias, h = given.weight.t(), given.bias, given.hidden.contiguous()
    valid, of_valid, masked = _masks(given, time, u)
    of_input, gate, after = (each.unbind(1) for each in (u, kept, outputs))
    for t in given.order(time):
        if bias is None:
            torch.mm(h, turned, out=v)
        else:
            torch.addmm(bias, h, turned, out=v)
        _gru_step[(triton.cdiv(batch * size, _BLOCK),)](
            of_input[t], v, gate[t], h, after[t], valid[t],
            u.stride(0), kept.stride(0), h.stride(0), outputs.stride(0), of_valid,
            batch * size, size, MASKED=masked, BLOCK=_BLOCK,
        )  # fmt: skip
        h = after[t]
    return kept


def backward(back: Back, ran: Ran, given: Given) -> Returned:
    """What `steps.backward` returns."""
    outputs = None if back.outputs is None else back.outputs.contiguous()
    return (_lstm_backward if given.kind == "lstm" else _gru_backward)(
        ran.kept, back._replace(outputs=outputs), ran, given
    )


def _started(like: Tensor, arrived: Tensor | None) -> Tensor:
    """A contiguous copy of what arrived; zeros where nothing did."""
    found = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return found if arrived is None else found.copy_(arrived)


@on_its_device
def _lstm_backward(kept: Tensor, back: Back, ran: Ran, given: Given) -> Returned:
    (batch, time, size), projection, cells = ran.cells.shape, given.projection, ran.cells
    du, dh = torch.empty_like(kept), _started(given.hidden, back.hidden)
    assert given.cell is not None
    first = given.cell.contiguous()
    dc = _started(cells[:, 0], back.cell)
    projected = du.new_empty(0) if projection is None else torch.empty_like(ran.earlier)
    valid, of_valid, masked = _masks(given, time, kept)
    order = given.order(time)[::-1]
    gates, gate, cell = du.unbind(1), kept.unbind(1), cells.unbind(1)
    arriving = [dh] * time if back.outputs is None else back.outputs.unbind(1)
    for t, earlier in zip(order, [*order[1:], None], strict=True):
        c = first if earlier is None else cell[earlier]
        dm = dh
        if projection is not None:
            projected[:, t] = dh if back.outputs is None else dh + arriving[t]
            dm = projected[:, t] @ projection
        _lstm_step_back[(triton.cdiv(batch * size, _BLOCK),)](
            gates[t], dm, dc, arriving[t], gate[t], c, cell[t], valid[t],
            kept.stride(0), arriving[t].stride(0), c.stride(0), cells.stride(0), of_valid, batch * size, size,
            ARRIVING=back.outputs is not None and projection is None, MASKED=masked, BLOCK=_BLOCK,
        )  # fmt: skip
        if masked:
            dh.addmm_(gates[t], given.weight)
        else:
            torch.mm(gates[t], given.weight, out=dh)
    return du, dh, dc.to(du.dtype), projected


@on_its_device
def _gru_backward(kept: Tensor, back: Back, ran: Ran, given: Given) -> Returned:
    batch, time, size = ran.earlier.shape
    du, dv = kept.new_empty(batch, time, 3 * size), kept.new_empty(batch, 3 * size)
    dh = _started(given.hidden, back.hidden)
    valid, of_valid, masked = _masks(given, time, kept)
    gates, gate, earlier = du.unbind(1), kept.unbind(1), ran.earlier.unbind(1)
    arriving = [dh] * time if back.outputs is None else back.outputs.unbind(1)
    for t in given.order(time)[::-1]:
        _gru_step_back[(triton.cdiv(batch * size, _BLOCK),)](
            gates[t], dv, dh, arriving[t], gate[t], earlier[t], valid[t],
            du.stride(0), arriving[t].stride(0), kept.stride(0), ran.earlier.stride(0), of_valid, batch * size, size,
            ARRIVING=back.outputs is not None, MASKED=masked, BLOCK=_BLOCK,
        )  # fmt: skip
        dh.addmm_(dv, given.weight)
    return du, dh, du.new_empty(0), du.new_empty(0)
