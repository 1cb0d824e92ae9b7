"""The time steps of one recurrent layer in one direction, forward and backward, in plain torch.

Given u = W_ih x + b for all time steps, (batch, time, gates·hidden), a step is one product with the weight of the state
and the pointwise gates of `recurrent`. The backward pass finds du at all time steps:

- RNN: du = dh·act'(h);
- LSTM: dc += dm·o·(1 − tanh²c), du = (dc·g·i', dc·c₋·f', dc·i·(1 − g²), dm·tanh(c)·o') with σ' = σ(1 − σ), dc₋ = dc·f,
  where m = o·tanh(c) is the new state before it is projected;
- GRU: dn = dh·(1 − z)·(1 − n²), du = (dn·v_n·r', dh·(h₋ − n)·z', dn), and dv is du with its last part times r.

All of du are factors known from the forward pass times dh or dc. The factors are computed for all time steps at once,
and multiplied step by step, in place.

Guarantee: rows, the first dimension of every tensor but the weights, are kept apart.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Back", "Given", "Ran", "Returned", "backward", "before", "forward"]


class Given(NamedTuple):
    """What one layer is run with. All tensors of numbers have one type."""

    kind: str  # "lstm", "gru", "rnn_tanh" or "rnn_relu"
    backwards: bool  # through time
    weight: Tensor  # of the state: (gates·hidden, outputs)
    bias: Tensor | None  # of the GRU's state; other layers have it in u
    projection: Tensor | None  # (outputs, hidden)
    hidden: Tensor  # before the first step: (batch, outputs)
    cell: Tensor | None  # (batch, hidden)
    valid: Tensor | None  # (batch, time): outside, the state stands still

    def order(self, time: int) -> range:
        """The time steps in the order of the forward pass."""
        return range(time)[:: -1 if self.backwards else 1]

    def inside(self, time: int) -> Sequence[Any]:
        """(batch, 1) at each time step: where the state does not stand still; None where it never does."""
        return [None] * time if self.valid is None else self.valid.unsqueeze(2).unbind(1)


class Ran(NamedTuple):
    """What a forward pass found, (batch, time, ...) each; empty where a kind of layer has none."""

    outputs: Tensor
    earlier: Tensor  # the state before each time step
    kept: Tensor  # gates: i, f, g, o of the LSTM, r, z, n, v_n of the GRU, and the new states of an RNN
    cells: Tensor


class Back(NamedTuple):
    """The gradients that arrive at the outputs, the last state and the last cell."""

    outputs: Tensor | None
    hidden: Tensor | None
    cell: Tensor | None

    def first(self, like: Tensor, order: Sequence[int]) -> Tensor:
        """dh at the last time step, the first of ``order``, in memory of its own; zeros where there is none."""
        found = torch.zeros_like(like, memory_format=torch.contiguous_format)
        for arrived in (None if self.outputs is None else self.outputs[:, order[0]], self.hidden):
            if arrived is not None:
                found.add_(arrived)
        return found

    def earlier(self, order: Sequence[int]) -> Sequence[Tensor | None]:
        """The gradient of the output of the step before each, in the order of the backward pass."""
        if self.outputs is None:
            return [None] * len(order)
        arriving = self.outputs.unbind(1)
        return [*(arriving[t] for t in order[1:]), None]


Returned = tuple[Tensor, Tensor, Tensor, Tensor]  # du, dh and dc before the first step, and dh at all if projected


def before(values: Tensor, first: Tensor, backwards: bool) -> Tensor:
    """The value before each time step, (batch, time, ...).

    >>> before(torch.tensor([[1, 2, 3]]), torch.tensor([0]), backwards=False)
    tensor([[0, 1, 2]])
    """
    return torch.cat([values[:, 1:], first[:, None]] if backwards else [first[:, None], values[:, :-1]], 1)


def _split(tensor: Tensor, *sizes: int) -> Sequence[Tensor]:
    """Pieces of the last dimension: of these sizes, or all of one size."""
    return torch.split(tensor, list(sizes) if len(sizes) > 1 else sizes[0], -1)


def forward(u: Tensor, given: Given) -> Ran:
    """All time steps."""
    outputs, nothing = u.new_empty(*u.shape[:2], given.weight.shape[1]), u.new_empty(0)
    match given.kind:
        case "lstm":
            kept, cells = _lstm(u, given, outputs)
        case "gru":
            kept, cells = _gru(u, given, outputs), nothing
        case _:
            kept, cells = _rnn(u, given, outputs), nothing
    return Ran(outputs, before(outputs, given.hidden, given.backwards), kept, cells)


def backward(back: Back, ran: Ran, given: Given) -> Returned:
    """All time steps, the last one first. Of ``ran`` the outputs are not used: a model may have changed them."""
    match given.kind:
        case "lstm":
            return _lstm_backward(back, ran, given)
        case "gru":
            return _gru_backward(back, ran, given)
        case _:
            return _rnn_backward(back, ran, given)


def _held(inside: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """The new state; the old one where the state stands still."""
    return new if inside is None else torch.where(inside, new, old, out=new)


def _rnn(u: Tensor, given: Given, outputs: Tensor) -> Tensor:
    activate = torch.tanh_ if given.kind == "rnn_tanh" else torch.relu_
    of_input, after, inside = u.unbind(1), outputs.unbind(1), given.inside(u.shape[1])
    turned, h = given.weight.t(), given.hidden
    for t in given.order(u.shape[1]):
        activate(torch.addmm(of_input[t], h, turned, out=after[t]))
        h = _held(inside[t], after[t], h)
    return outputs.clone()


def _lstm(u: Tensor, given: Given, outputs: Tensor) -> tuple[Tensor, Tensor]:
    size = u.shape[2] // 4
    kept, cells = u.new_empty(u.shape), u.new_empty(*u.shape[:2], size)
    of_input, gates, after, cell = (each.unbind(1) for each in (u, kept, outputs, cells))
    i_f, (i, f, g, o) = kept[..., : 2 * size].unbind(1), (part.unbind(1) for part in _split(kept, size))
    turned, projection, inside = given.weight.t(), given.projection, given.inside(u.shape[1])
    assert given.cell is not None
    h, c, m = given.hidden, given.cell, u.new_empty(len(u), size)
    for t in given.order(u.shape[1]):
        torch.addmm(of_input[t], h, turned, out=gates[t])
        i_f[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        torch.mul(f[t], c, out=cell[t]).addcmul_(i[t], g[t])
        torch.tanh(cell[t], out=m)
        if projection is None:
            torch.mul(o[t], m, out=after[t])
        else:
            torch.mm(m.mul_(o[t]), projection.t(), out=after[t])
        h, c = _held(inside[t], after[t], h), _held(inside[t], cell[t], c)
    return kept, cells


def _gru(u: Tensor, given: Given, outputs: Tensor) -> Tensor:
    size = u.shape[2] // 3
    kept, v = u.new_empty(*u.shape[:2], 4 * size), u.new_empty(len(u), 3 * size)
    r_z, (r, z, n, last) = kept[..., : 2 * size].unbind(1), (part.unbind(1) for part in _split(kept, size))
    (u_both, u_n), (v_both, v_n) = _split(u, 2 * size, size), _split(v, 2 * size, size)
    of_both, of_n, after, inside = u_both.unbind(1), u_n.unbind(1), outputs.unbind(1), given.inside(u.shape[1])
    turned, bias, h = given.weight.t(), given.bias, given.hidden
    for t in given.order(u.shape[1]):
        if bias is None:
            torch.mm(h, turned, out=v)
        else:
            torch.addmm(bias, h, turned, out=v)
        torch.add(of_both[t], v_both, out=r_z[t]).sigmoid_()
        last[t].copy_(v_n)
        torch.addcmul(of_n[t], r[t], v_n, out=n[t]).tanh_()
        torch.lerp(n[t], h, z[t], out=after[t])
        h = _held(inside[t], after[t], h)
    return kept


def _masked(given: Given, *factors: Tensor) -> None:
    """Let the factors be zero where the state stands still."""
    if given.valid is not None:
        outside = ~given.valid.unsqueeze(2)
        for factor in factors:
            factor.masked_fill_(outside, 0)


def _kept_on(given: Given, factor: Tensor) -> Tensor:
    """The factor by which a state passes its gradient on: 1 where it stands still."""
    return factor if given.valid is None else torch.where(given.valid.unsqueeze(2), factor, 1)


def _past(arriving: Tensor | None, g: Tensor, given: Given, dh: Tensor, inside: Tensor | None) -> Tensor:
    """dh before a step: from its gates, from the output there and, where the state stood still, from after it."""
    new = torch.mm(g, given.weight) if arriving is None else torch.addmm(arriving, g, given.weight)
    return new if inside is None else new.add_(dh.masked_fill(inside, 0))


def _rnn_backward(back: Back, ran: Ran, given: Given) -> Returned:
    du = 1 - ran.kept.square() if given.kind == "rnn_tanh" else (ran.kept > 0).to(ran.kept.dtype)
    _masked(given, du)
    order, inside, each = given.order(du.shape[1])[::-1], given.inside(du.shape[1]), du.unbind(1)
    dh = back.first(given.hidden, order)
    for t, arriving in zip(order, back.earlier(order), strict=True):
        each[t].mul_(dh)
        dh = _past(arriving, each[t], given, dh, inside[t])
    return du, dh, du.new_empty(0), du.new_empty(0)


def _lstm_backward(back: Back, ran: Ran, given: Given) -> Returned:
    size, time = ran.cells.shape[2], ran.cells.shape[1]
    du, of_cell, f = _lstm_factors(ran, given)
    order, inside, projection = given.order(time)[::-1], given.inside(time), given.projection
    three, last = (each.unbind(1) for each in _split(du, 3 * size, size))
    each, into_cell, on = du.unbind(1), of_cell.unbind(1), f.unbind(1)
    dh = back.first(given.hidden, order)
    dc = torch.zeros_like(on[0], memory_format=torch.contiguous_format)
    if back.cell is not None:
        dc.add_(back.cell)
    projected = du.new_empty(0) if projection is None else torch.empty_like(ran.earlier)
    for t, arriving in zip(order, back.earlier(order), strict=True):
        dm = dh
        if projection is not None:
            projected[:, t] = dh
            dm = dh @ projection
        dc.addcmul_(dm, into_cell[t])
        three[t].view(-1, 3, size).mul_(dc.unsqueeze(1))
        last[t].mul_(dm)
        dc.mul_(on[t])
        dh = _past(arriving, each[t], given, dh, inside[t])
    if projection is not None:
        _masked(given, projected)
    return du, dh, dc, projected


def _lstm_factors(ran: Ran, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """What dc (i, f, g) and dm (o) are multiplied by for du; dm, for dc; and dc, for dc of the step before."""
    size = ran.cells.shape[2]
    i, f, g, o = _split(ran.kept, size)
    assert given.cell is not None
    du, shown = torch.empty_like(ran.kept), ran.cells.tanh()
    d_i, d_f, d_g, d_o = _split(du, size)
    torch.mul(i - i.square(), g, out=d_i)
    torch.mul(f - f.square(), before(ran.cells, given.cell, given.backwards), out=d_f)
    torch.mul(1 - g.square(), i, out=d_g)
    torch.mul(o - o.square(), shown, out=d_o)
    of_cell = torch.addcmul(o, o, shown.square_(), value=-1)
    _masked(given, du, of_cell)
    return du, of_cell, _kept_on(given, f)


def _gru_backward(back: Back, ran: Ran, given: Given) -> Returned:
    size, time = ran.earlier.shape[2], ran.earlier.shape[1]
    r, z, n, v_n = _split(ran.kept, size)
    du = ran.kept.new_empty(*ran.kept.shape[:2], 3 * size)
    d_r, d_z, d_n = _split(du, size)
    torch.mul(1 - z, 1 - n.square(), out=d_n)
    torch.mul(r - r.square(), v_n, out=d_r).mul_(d_n)
    torch.mul(z - z.square(), ran.earlier - n, out=d_z)
    _masked(given, du)
    order, dv = given.order(time)[::-1], du.new_empty(len(du), 3 * size)
    each, (both, last) = du.unbind(1), (part.unbind(1) for part in _split(du, 2 * size, size))
    of_both, of_last = _split(dv, 2 * size, size)
    scale, on = r.unbind(1), _kept_on(given, z).unbind(1)
    dh = back.first(given.hidden, order)
    for t, arriving in zip(order, back.earlier(order), strict=True):
        each[t].view(-1, 3, size).mul_(dh.unsqueeze(1))
        of_both.copy_(both[t])
        torch.mul(last[t], scale[t], out=of_last)
        dh = dh.mul_(on[t]) if arriving is None else torch.addcmul(arriving, dh, on[t])
        dh.addmm_(dv, given.weight)
    return du, dh, du.new_empty(0), du.new_empty(0)
