"""One recurrent layer in one direction over all time steps, as one operation of torch with one backward pass.

The operation loops over time itself: on a CUDA device by one product and one Triton kernel per step
(`dpgrad.grads.kernels.recurrent`), elsewhere in plain torch (`dpgrad.grads.layers.steps`). It is an operation of torch,
so that a pass that is followed or traced meets one operation, whatever it is made of.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import Library, register_fake

from dpgrad import _triton
from dpgrad.grads.layers import steps
from dpgrad.grads.layers.steps import Back, Given, Ran, Returned

__all__ = ["Unrolled", "operation"]

_HALF = (torch.float16, torch.bfloat16)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _by_kernel(given: Given) -> bool:
    """Whether the pointwise part of a step is one Triton kernel."""
    known = given.kind in ("lstm", "gru") and (given.projection is None or given.valid is None)
    return known and given.weight.dtype in (*_HALF, torch.float32) and _triton.runs_on(given.weight)


@contextmanager
def _as_written(tensor: Tensor) -> Iterator[None]:
    """Within the block operations run as they are written: no graph, no views to keep track of, no autocast."""
    kind = tensor.device.type
    cast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    with torch._C._AutoDispatchBelowAutograd(), cast:
        yield


def _run(
    kind: str,
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    valid: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, ...]:
    """Outputs, the last state, the last cell; then the earlier states, what is kept of the gates, and the cells."""
    given = Given(kind, backwards, weight, bias, projection, hidden, cell, valid)
    with _as_written(u):
        if _by_kernel(given):
            from dpgrad.grads.kernels.recurrent import forward

            ran = forward(u, given)
        else:
            ran = steps.forward(_wide(u), Given(*map(_wide, given)))
        outputs, earlier = (each.to(u.dtype) for each in ran[:2])
        at = 0 if backwards else -1
        last_cell = ran.cells[:, at].to(u.dtype, copy=True) if kind == "lstm" else u.new_empty(0)
        return outputs, outputs[:, at].clone(), last_cell, earlier, ran.kept, ran.cells


def _run_backward(
    kind: str,
    of_outputs: Tensor | None,
    of_last: Tensor | None,
    of_last_cell: Tensor | None,
    earlier: Tensor,
    kept: Tensor,
    cells: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    valid: Tensor | None,
    backwards: bool,
) -> Returned:
    """The gradients of u, of the first state and cell, and, where it is projected, of the state at each time step."""
    given = Given(kind, backwards, weight, None, projection, hidden, cell, valid)
    back, ran = Back(of_outputs, of_last, of_last_cell), Ran(earlier.new_empty(0), earlier, kept, cells)
    with _as_written(earlier):
        if _by_kernel(given):
            from dpgrad.grads.kernels.recurrent import backward

            return backward(back, ran, given)
        found = steps.backward(Back(*map(_wide, back)), Ran(*map(_wide, ran)), Given(*map(_wide, given)))
        du, dh, dc, projected = (each.to(earlier.dtype) for each in found)
        return du, dh, dc, projected


def _shapes(kind: str, u: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    batch, time, width = *u.shape[:2], weight.shape[1]
    size = u.shape[2] // {"lstm": 4, "gru": 3}.get(kind, 1)
    is_lstm, kept = kind == "lstm", width if kind.startswith("rnn") else 4 * size
    shapes: list[tuple[int, ...]] = [(batch, time, width), (batch, width), (batch, size) if is_lstm else (0,)]
    shapes += [(batch, time, width), (batch, time, kept), (batch, time, size) if is_lstm else (0,)]
    outputs, last, last_cell, earlier, *wide = map(u.new_empty, shapes)
    return outputs, last, last_cell, earlier, *map(_wide, wide)


def _shapes_backward(
    kind: str, a: Any, b: Any, c: Any, earlier: Tensor, kept: Any, cells: Any, weight: Tensor, projection: Any, *_: Any
) -> tuple[Tensor, ...]:
    batch, time, width = earlier.shape
    dc = (batch, weight.shape[0] // 4) if kind == "lstm" else (0,)
    projected = (0,) if projection is None else (batch, time, width)
    return tuple(map(earlier.new_empty, ((batch, time, weight.shape[0]), (batch, width), dc, projected)))


_library: Any = Library("dpgrad", "FRAGMENT")  # type: ignore[no-untyped-call]
_STATE = "Tensor hidden, Tensor? cell, Tensor? valid, bool backwards"
_SCHEMAS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    f"unrolled(str kind, Tensor u, Tensor weight, Tensor? bias, Tensor? projection, {_STATE}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)": (_run, _shapes),
    "unrolled_backward(str kind, Tensor? of_outputs, Tensor? of_last, Tensor? of_last_cell, Tensor earlier, "
    f"Tensor kept, Tensor cells, Tensor weight, Tensor? projection, {_STATE}) -> (Tensor, Tensor, Tensor, Tensor)": (
        _run_backward,
        _shapes_backward,
    ),
}
for _schema, (_implementation, _fake) in _SCHEMAS.items():
    _name = _library.define(_schema)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    register_fake(f"dpgrad::{_name}", _fake, lib=_library)

operation: Any = torch.ops.dpgrad.unrolled.default
_backward: Any = torch.ops.dpgrad.unrolled_backward.default


class Unrolled(torch.autograd.Function):
    """The operation with its backward pass: to u, to the state before it, and to a tap of the projected states.

    Weights get no gradient here: it is a product of du and of the earlier states, which are among the results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        hidden: Tensor,
        cell: Tensor | None,
        tap: Tensor | None,  # of the same shape as the outputs; its gradient is that of the projected states
        kind: str,
        weight: Tensor,
        bias: Tensor | None,
        projection: Tensor | None,
        valid: Tensor | None,
        backwards: bool,
    ) -> tuple[Tensor, ...]:
        found = operation(kind, u, weight, bias, projection, hidden, cell, valid, backwards)
        ctx.mark_non_differentiable(*found[3:])
        ctx.save_for_backward(*found[3:], weight, projection, hidden, cell, valid)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.backwards = kind, backwards
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Tensor | None, ...]:
        du, dh, dc, projected = _backward(ctx.kind, *arrived[:3], *ctx.saved_tensors, ctx.backwards)
        return du, dh, dc if ctx.kind == "lstm" else None, projected if ctx.needs_input_grad[3] else None, *[None] * 6
