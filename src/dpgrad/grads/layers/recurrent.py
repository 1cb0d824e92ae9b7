"""The recurrent functions of torch, made of layers in one direction on sequences whose first dimension is the batch.

`nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells hand all their weights to one torch function, which says nothing of single
examples. Each rewrite returns what its torch function returns, and uses its weights in one way only: by `run_layer`, on
the batch in its own order, (batch, time, features). That is defined by `F.linear`, of the input once for the whole
sequence, of the state once at each time step (`composed`). `fused` computes the same in one operation, and the gradient
of the state's weight is then one product over time, like that of the input's (`gate_uses`).

Gates (Hochreiter and Schmidhuber 1997; Cho et al. 2014), with u = W_ih x + b_ih and v = W_hh h + b_hh:

- RNN: h' = tanh(u + v) or relu(u + v);
- LSTM: i, f, o = σ(u + v), g = tanh(u + v), c' = f·c + i·g, h' = o·tanh(c'), with a projection h' = W_hr (o·tanh(c'));
- GRU: r, z = σ(u + v), n = tanh(u + r·v), h' = (1 − z)·n + z·h.

Guarantee: the engine takes the first dimension of a layer's inputs for the examples, so a row in another place would be
charged to another example. Packed sequences come sorted by length, and the order of the batch is known only to the
module that was called: `known_inputs` notes it, and without it packed sequences are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import handle_torch_function, has_torch_function

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.layers.unrolled import Unrolled
from dpgrad.grads.uses import Dense, Outer, Use, wide

__all__ = [
    "DATA",
    "REWRITES",
    "WEIGHTS",
    "Fused",
    "OneLayer",
    "State",
    "composed",
    "fused",
    "gate_uses",
    "known_inputs",
    "projection_use",
    "run_layer",
]

State = tuple[Tensor, ...]  # (h,), for the LSTM (h, c); each (batch, hidden)

# What the recurrent module now running was given, where that was packed.
_PACKED: ContextVar[PackedSequence | None] = ContextVar("_PACKED", default=None)


class OneLayer(NamedTuple):
    """One layer in one direction, and what it is given."""

    kind: str  # "lstm", "gru", "rnn_tanh" or "rnn_relu"
    backwards: bool  # through time
    inputs: Tensor  # (batch, time, features)
    hidden: Tensor  # (batch, outputs)
    cell: Tensor | None  # (batch, hidden)
    valid: Tensor | None  # (batch, time): outside its sequence the state of an example stands still
    of_input: Tensor
    of_state: Tensor
    bias_of_input: Tensor | None = None
    bias_of_state: Tensor | None = None
    projection: Tensor | None = None


DATA = ("inputs", "hidden", "cell", "valid")
WEIGHTS = ("of_input", "of_state", "bias_of_input", "bias_of_state", "projection")


def _rnn_step(activation: Callable[[Tensor], Tensor], u: Tensor, v: Tensor, state: State) -> State:
    return (activation(u + v),)


def _lstm_step(u: Tensor, v: Tensor, state: State) -> State:
    i, f, g, o = (u + v).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(u: Tensor, v: Tensor, state: State) -> State:
    (r_u, z_u, n_u), (r_v, z_v, n_v) = u.chunk(3, dim=-1), v.chunk(3, dim=-1)
    n = (n_u + (r_u + r_v).sigmoid() * n_v).tanh()
    return (n + (z_u + z_v).sigmoid() * (state[0] - n),)


_STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {  # u, v and the state before -> the state after
    "rnn_tanh": partial(_rnn_step, torch.tanh),
    "rnn_relu": partial(_rnn_step, torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}


def run_layer(layer: OneLayer) -> State:
    """The outputs, (batch, time, outputs), and the last state of one layer in one direction."""
    tensors = tuple(each for each in layer if isinstance(each, Tensor))
    if has_torch_function(tensors):
        found: State = handle_torch_function(run_layer, tensors, layer)
        return found
    return composed(layer)


def composed(layer: OneLayer) -> State:
    """`run_layer` by its definition.

    Where a sequence is shorter than the batch's longest, its state stands still outside it. So it ends, going forward,
    at its own last element and starts, going backwards, from there.
    """
    step, of_input = _STEPS[layer.kind], F.linear(layer.inputs, layer.of_input, layer.bias_of_input).unbind(1)
    valid = [None] * len(of_input) if layer.valid is None else layer.valid.unsqueeze(2).unbind(1)
    state: State = (layer.hidden,) if layer.cell is None else (layer.hidden, layer.cell)
    outputs = []
    for t in range(len(of_input))[:: -1 if layer.backwards else 1]:
        after = step(of_input[t], F.linear(state[0], layer.of_state, layer.bias_of_state), state)
        if layer.projection is not None:
            after = (F.linear(after[0], layer.projection), *after[1:])
        inside = valid[t]
        if inside is not None:
            after = tuple(torch.where(inside, new, old) for new, old in zip(after, state, strict=True))
        state = after
        outputs.append(state[0])
    return torch.stack(outputs[:: -1 if layer.backwards else 1], dim=1), *state


class Fused(NamedTuple):
    """A layer that was run in one operation."""

    state: State  # what `run_layer` returns
    place: Tensor  # u, (batch, time, gates·hidden), where the gradient of the gates arrives
    tap: Tensor | None  # (batch, time, outputs), where the gradient of the projected states arrives
    earlier: Tensor  # the state before each time step, (batch, time, outputs)
    kept: Tensor  # gates, (batch, time, 4·hidden)
    cells: Tensor


def fused(layer: OneLayer) -> Fused:
    """`run_layer` in one operation, whose backward pass finds no gradient of weights.

    >>> rnn, x = nn.GRU(2, 3, batch_first=True), torch.ones(4, 5, 2)
    >>> layer = OneLayer("gru", False, x, torch.zeros(4, 3), None, None, *(w.detach() for w in rnn.parameters()))
    >>> torch.allclose(fused(layer).state[0], rnn(x)[0])
    True
    """
    kind, projection = layer.kind, layer.projection
    biases = [bias for bias in (layer.bias_of_input, layer.bias_of_state) if bias is not None]
    of_u = layer.bias_of_input if kind == "gru" else sum(biases[1:], start=biases[0]) if biases else None
    u = F.linear(layer.inputs, layer.of_input, of_u)
    tap = None if projection is None else u.new_zeros(()).expand(*u.shape[:2], len(projection))
    if torch.is_grad_enabled():
        u = u if u.requires_grad else u.requires_grad_()
        tap = tap if tap is None else tap.requires_grad_()
    hidden, cell, weight, bias, projection = (
        None if each is None else each.to(u.dtype)  # autocast computed u in another type
        for each in (layer.hidden, layer.cell, layer.of_state, layer.bias_of_state, projection)
    )
    outputs, last, last_cell, earlier, kept, cells = Unrolled.apply(  # type: ignore[no-untyped-call]
        u, hidden, cell, tap, kind, weight, bias if kind == "gru" else None, projection, layer.valid, layer.backwards
    )
    state = (outputs, last) if layer.cell is None else (outputs, last, last_cell)
    return Fused(state, u, tap, earlier, kept, cells)


def gate_uses(layer: OneLayer, run: Fused, g: Tensor, folded: Callable[[Tensor], Tensor]) -> dict[str, Use]:
    """The uses of weights and biases from the gradient of u, (batch, time, gates·hidden).

    ``folded`` puts the examples first, and their rows second.
    """

    def positions(tensor: Tensor) -> Tensor:
        return folded(tensor).flatten(1, -2)  # (examples, rows·time, ...)

    of_u = of_v = positions(g)
    if layer.kind == "gru":
        size = g.shape[2] // 3
        r = run.kept[..., :size].to(g.dtype)
        of_v = positions(torch.cat([g[..., : 2 * size], g[..., 2 * size :] * r], -1))
    found: dict[str, Use] = {
        "of_input": Outer(positions(layer.inputs), of_u),
        "of_state": Outer(positions(run.earlier), of_v),
    }
    if layer.bias_of_input is not None:
        found["bias_of_input"] = Dense(wide(of_u).sum(1)).settled()
    if layer.bias_of_state is not None:
        same = layer.bias_of_input is not None and of_u is of_v
        found["bias_of_state"] = found["bias_of_input"] if same else Dense(wide(of_v).sum(1)).settled()
    return found


def projection_use(run: Fused, g: Tensor, folded: Callable[[Tensor], Tensor]) -> Use:
    """The use of the projection from the gradient of the projected states."""
    size = run.cells.shape[2]
    m = (run.kept[..., 3 * size :] * run.cells.tanh()).to(g.dtype)
    return Outer(folded(m).flatten(1, -2), folded(g).flatten(1, -2))


def _grouped(params: Sequence[Tensor], has_biases: bool, groups: int) -> Iterator[dict[str, Tensor]]:
    """torch's flat list of weights by layer and direction."""
    size = len(params) // groups
    names = [name for name in WEIGHTS if has_biases or not name.startswith("bias")]
    for start in range(0, len(params), size):
        yield dict(zip(names, params[start : start + size], strict=False))  # there may be no projection


def _layers(
    kind: str,
    inputs: Tensor,
    hx: State,
    valid: Tensor | None,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> State:
    """The last layer's outputs (batch, time, hidden) and each part of the last states (layers, batch, hidden)."""
    directions = 2 if bidirectional else 1
    weights = list(_grouped(params, has_biases, num_layers * directions))
    before = list(zip(*(part.unbind(0) for part in hx), strict=True))
    after: list[State] = []
    for layer in range(num_layers):
        if layer:
            inputs = F.dropout(inputs, dropout, train)
        outputs = []
        for group in range(layer * directions, (layer + 1) * directions):
            hidden, *cells = before[group]
            cell = cells[0] if cells else None
            output, *state = run_layer(
                OneLayer(kind, group % directions == 1, inputs, hidden, cell, valid, **weights[group])
            )
            outputs.append(output)
            after.append(tuple(state))
        inputs = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
    return inputs, *(torch.stack(part) for part in zip(*after, strict=True))


def _refuse_unbatched(name: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dim() != dimensions:
        raise UnsupportedModelError(
            f"{name} needs {dimensions} dimensions, one of them the batch, got shape {tuple(tensor.shape)}: "
            "unsqueeze a batch of one"
        )


def _states(hx: Tensor | Sequence[Tensor]) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _padded(
    kind: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> State:
    """All sequences of one length: (batch, time, features), or (time, batch, features) unless ``batch_first``."""
    _refuse_unbatched("a recurrent layer", input, 3)
    inputs = input if batch_first else input.transpose(0, 1)
    output, *after = _layers(
        kind, inputs, _states(hx), None, params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output if batch_first else output.transpose(0, 1), *after


def _packed(
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> State:
    """Sequences of several lengths: put into the batch's own order, run, and put back."""
    given = _PACKED.get()
    # The same tensor, not an equal one: only then is the order that was noted the order of these rows.
    if given is None or given.data is not data:
        raise UnsupportedModelError(
            f"packed sequences of {int(batch_sizes[0])} examples came in an order that is not known: hand the packed "
            "sequence itself to nn.RNN, nn.LSTM or nn.GRU, or give a padded batch"
        )
    inputs, lengths = pad_packed_sequence(given, batch_first=True)
    alike = int(batch_sizes[0]) == int(batch_sizes[-1])
    valid = None if alike else (lengths.unsqueeze(1) > torch.arange(len(batch_sizes), device="cpu")).to(data.device)
    before = tuple(_permuted(part, 1, given.unsorted_indices) for part in _states(hx))
    output, *after = _layers(kind, inputs, before, valid, params, has_biases, num_layers, dropout, train, bidirectional)
    order = None if given.sorted_indices is None else given.sorted_indices.to(lengths.device)
    longest_first = _permuted(lengths, 0, order)
    output = pack_padded_sequence(_permuted(output, 0, given.sorted_indices), longest_first, batch_first=True).data
    return output, *(_permuted(part, 1, given.sorted_indices) for part in after)


def _permuted(tensor: Tensor, dim: int, indices: Tensor | None) -> Tensor:
    return tensor if indices is None else tensor.index_select(dim, indices)


def _recurrent(kind: str, *args: Any, **named: Any) -> State:
    """The two overloads of a recurrent function: the second argument is the packed batch's sizes, or a state."""
    second = args[1] if len(args) > 1 else named.get("batch_sizes")
    packed = isinstance(second, Tensor) and second.dtype == torch.int64
    return (_packed if packed else _padded)(kind, *args, **named)


def _cell(
    kind: str,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | State:
    """One time step: the state after it, in the form in which the state before it was given."""
    _refuse_unbatched("a recurrent cell", input, 2)
    state = _states(hx)
    cell = state[1] if len(state) == 2 else None
    _, *after = run_layer(OneLayer(kind, False, input.unsqueeze(1), state[0], cell, None, w_ih, w_hh, b_ih, b_hh))
    return after[0] if isinstance(hx, Tensor) else tuple(after)


def _left_alone(*args: Any) -> None:
    """On a GPU a recurrent module moves its weights into one buffer for cuDNN, which the rewrites do not call."""


def _note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    packed = next((given for given in (*args, *named.values()) if isinstance(given, PackedSequence)), None)
    if packed is None and type(module) in (nn.RNN, nn.LSTM, nn.GRU):  # a subclass may take what it likes
        _refuse_unbatched(f"nn.{type(module).__name__}", args[0] if args else named["input"], 3)
    _PACKED.set(packed)


@contextmanager
def known_inputs(model: nn.Module) -> Iterator[None]:
    """Within the block it is known what each `nn.RNN`, `nn.LSTM` and `nn.GRU` of ``model`` was given.

    These modules hand neither the order of a packed batch nor the absence of a batch dimension to the function they
    call. Packed sequences are then taken in the order of the batch they were made from, and inputs without a batch
    dimension are refused.

    >>> layer = nn.LSTM(2, 1)
    >>> with known_inputs(layer):
    ...     layer(torch.ones(5, 2))
    Traceback (most recent call last):
    dpgrad.errors.UnsupportedModelError: nn.LSTM needs 3 dimensions, one of them the batch, got shape (5, 2): ...
    """
    modules = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    handles = [module.register_forward_pre_hook(_note, with_kwargs=True) for module in modules]
    token = _PACKED.set(None)
    try:
        yield
    finally:
        _PACKED.reset(token)
        for handle in handles:
            handle.remove()


REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): partial(_recurrent, name) for name in _STEPS},
    **{getattr(torch, f"{name}_cell"): partial(_cell, name) for name in _STEPS},
    torch._cudnn_rnn_flatten_weight: _left_alone,
}
"""The torch function that a recurrent module calls -> the same in terms of `run_layer`.

>>> layer, x = nn.GRU(2, 3), torch.ones(5, 1, 2)
>>> arguments = x, torch.zeros(1, 1, 3), layer._flat_weights, True, 1, 0.0, True, False, False
>>> torch.allclose(REWRITES[torch.gru](*arguments)[0], layer(x)[0])
True
"""
