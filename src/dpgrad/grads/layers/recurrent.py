"""The recurrent functions of torch, written with `F.linear` on whole weights.

`nn.RNN`, `nn.LSTM`, `nn.GRU` and their cells hand all their weights to one torch function, which says nothing of single
examples. Each rewrite returns what its torch function returns, and uses a weight in one way only: `F.linear` of an
input whose first dimension is the batch, in the batch's own order. The input weights are applied once for the whole
sequence, (batch, time, features), the weights of the state once at each time step, (batch, hidden).

Gates (Hochreiter and Schmidhuber 1997; Cho et al. 2014), with u = W_ih x + b_ih and v = W_hh h + b_hh:

- RNN: h' = tanh(u + v) or relu(u + v);
- LSTM: i, f, o = σ(u + v), g = tanh(u + v), c' = f·c + i·g, h' = o·tanh(c'), with a projection h' = W_hr (o·tanh(c'));
- GRU: r, z = σ(u + v), n = tanh(u + r·v), h' = (1 − z)·n + z·h.

Guarantee: the engine takes the first dimension of each `F.linear` for the examples, so a row in another place would be
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

from dpgrad.errors import UnsupportedModelError

__all__ = ["REWRITES", "LayerWeights", "State", "Step", "known_inputs"]

State = tuple[Tensor, ...]  # (h,), for the LSTM (h, c); each (batch, hidden)
Step = Callable[[Tensor, Tensor, State], State]  # u, v and the state before -> the state after

# What the recurrent module now running was given, where that was packed.
_PACKED: ContextVar[PackedSequence | None] = ContextVar("_PACKED", default=None)


class LayerWeights(NamedTuple):
    """The weights of one layer in one direction."""

    of_input: Tensor
    of_state: Tensor
    bias_of_input: Tensor | None
    bias_of_state: Tensor | None
    projection: Tensor | None


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


def _direction(
    step: Step, weights: LayerWeights, inputs: Tensor, state: State, valid: Sequence[Tensor | None], backwards: bool
) -> tuple[Tensor, State]:
    """The outputs (batch, time, hidden) of one layer in one direction, and its last state.

    Where a sequence is shorter than the batch's longest, its state stands still outside it (``valid[t]``: (batch, 1)).
    So it ends, going forward, at its own last element and starts, going backwards, from there.
    """
    of_input = F.linear(inputs, weights.of_input, weights.bias_of_input).unbind(1)
    outputs = []
    for t in range(len(of_input))[:: -1 if backwards else 1]:
        after = step(of_input[t], F.linear(state[0], weights.of_state, weights.bias_of_state), state)
        if weights.projection is not None:
            after = (F.linear(after[0], weights.projection), *after[1:])
        inside = valid[t]
        if inside is not None:
            after = tuple(torch.where(inside, new, old) for new, old in zip(after, state, strict=True))
        state = after
        outputs.append(state[0])
    return torch.stack(outputs[:: -1 if backwards else 1], dim=1), state


def _grouped(params: Sequence[Tensor], has_biases: bool, groups: int) -> Iterator[LayerWeights]:
    """torch's flat list of weights by layer and direction."""
    size = len(params) // groups
    for start in range(0, len(params), size):
        of_input, of_state, *rest = params[start : start + size]
        bias_of_input, bias_of_state = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
        yield LayerWeights(of_input, of_state, bias_of_input, bias_of_state, rest[0] if rest else None)


def _layers(
    step: Step,
    inputs: Tensor,
    hx: State,
    valid: Sequence[Tensor | None],
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
            output, state = _direction(
                step, weights[group], inputs, before[group], valid, backwards=group % directions == 1
            )
            outputs.append(output)
            after.append(state)
        inputs = torch.cat(outputs, dim=-1)
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
    step: Step,
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
    always = [None] * inputs.shape[1]
    output, *after = _layers(
        step, inputs, _states(hx), always, params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output if batch_first else output.transpose(0, 1), *after


def _packed(
    step: Step,
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
    everyone = int(batch_sizes[0])
    valid = [
        None if size == everyone else (lengths > t).to(data.device).unsqueeze(1)
        for t, size in enumerate(batch_sizes.tolist())
    ]
    before = tuple(_permuted(part, 1, given.unsorted_indices) for part in _states(hx))
    output, *after = _layers(step, inputs, before, valid, params, has_biases, num_layers, dropout, train, bidirectional)
    order = None if given.sorted_indices is None else given.sorted_indices.to(lengths.device)
    longest_first = _permuted(lengths, 0, order)
    output = pack_padded_sequence(_permuted(output, 0, given.sorted_indices), longest_first, batch_first=True).data
    return output, *(_permuted(part, 1, given.sorted_indices) for part in after)


def _permuted(tensor: Tensor, dim: int, indices: Tensor | None) -> Tensor:
    return tensor if indices is None else tensor.index_select(dim, indices)


def _recurrent(step: Step, *args: Any, **named: Any) -> State:
    """The two overloads of a recurrent function: the second argument is the packed batch's sizes, or a state."""
    second = args[1] if len(args) > 1 else named.get("batch_sizes")
    packed = isinstance(second, Tensor) and second.dtype == torch.int64
    return (_packed if packed else _padded)(step, *args, **named)


def _cell(
    step: Step,
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
    after = step(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return after[0] if isinstance(hx, Tensor) else after


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


_STEPS: dict[str, Step] = {
    "rnn_tanh": partial(_rnn_step, torch.tanh),
    "rnn_relu": partial(_rnn_step, torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}

REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): partial(_recurrent, step) for name, step in _STEPS.items()},
    **{getattr(torch, f"{name}_cell"): partial(_cell, step) for name, step in _STEPS.items()},
    torch._cudnn_rnn_flatten_weight: _left_alone,
}
"""The torch function that a recurrent module calls -> the same in terms of `F.linear`.

>>> layer, x = nn.GRU(2, 3), torch.ones(5, 1, 2)
>>> arguments = x, torch.zeros(1, 1, 3), layer._flat_weights, True, 1, 0.0, True, False, False
>>> torch.allclose(REWRITES[torch.gru](*arguments)[0], layer(x)[0])
True
"""
