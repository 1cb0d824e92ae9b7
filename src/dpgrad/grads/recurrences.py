"""Recurrent layers on the tape: one record for the weights and biases of a layer, over all of its time steps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpgrad.errors import UnsupportedModelError
from dpgrad.grads.axes import Layout
from dpgrad.grads.layers import recurrent
from dpgrad.grads.layers.recurrent import DATA, WEIGHTS, Fused, OneLayer, State, run_layer
from dpgrad.grads.shared import Shared, names_of, plain_of
from dpgrad.grads.uses import Use

if TYPE_CHECKING:
    from dpgrad.grads.tape import Tape

__all__ = ["fits", "recorded", "run"]


def run(tape: "Tape", layer: OneLayer) -> State:
    """The results of a layer that parameters are given to; their uses are noted."""
    if fits(layer):
        # Each row of the state belongs to a row of the inputs, so the inputs show where the examples are.
        layout = tape._met(layer.inputs, names_of(layer), run_layer, "inputs")
        if layout is not None and not layout.dim:
            return recorded(tape, layer, layout)
    return recurrent.composed(layer)


def fits(layer: OneLayer) -> bool:
    """Whether the weights are whole parameters, or have no gradient, and the data are none."""
    weights = [getattr(layer, name) for name in WEIGHTS]
    known = all(
        each is None or (each.whole and not each.flipped if isinstance(each, Shared) else not each.requires_grad)
        for each in weights
    )
    return known and not any(isinstance(getattr(layer, name), Shared) for name in DATA)


def recorded(tape: "Tape", layer: OneLayer, layout: Layout) -> State:
    """The results of a layer that fits, whose data have their rows where ``layout`` says."""
    weights = {name: value for name in WEIGHTS if (value := getattr(layer, name)) is not None}
    known = layer._replace(**{name: plain_of(value).detach() for name, value in weights.items()})
    with torch._C.DisableTorchFunctionSubclass():
        run = recurrent.fused(known)
    if not (torch.is_grad_enabled() and tape.recording):
        return run.state
    parameters = {name: value.names[0] for name, value in weights.items() if isinstance(value, Shared)}
    projection = parameters.pop("projection", None)
    folded = partial(tape._folded, layout=layout)
    if parameters:
        passed = layer.inputs.requires_grad
        place: Tensor | GradientEdge = get_gradient_edge(run.place) if passed else run.place
        uses = _gate_uses(known, run, parameters, folded)
        tape._record(place, run.place.shape, layout, tuple(parameters.values()), uses, passed)
    if projection is not None and run.tap is not None:
        tape._record(run.tap, run.tap.shape, layout, (projection,), _projection_use(run, folded))
    return run.state


def _gate_uses(
    layer: OneLayer, run: Fused, parameters: dict[str, str], folded: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Sequence[Use]]:
    data, version = layer.inputs, layer.inputs._version
    noted = layer._replace(inputs=data.detach().to(run.place.dtype))  # autocast computed with it in that type
    held = _held(run)

    def uses(g: Tensor) -> list[Use]:
        if noted.inputs.untyped_storage() is data.untyped_storage() and data._version != version:
            raise UnsupportedModelError(
                f"the input of a recurrent layer with parameter {parameters[next(iter(parameters))]} was changed in "
                "place after it was used: use the function that is not in place"
            )
        found = recurrent.gate_uses(noted, held, g, folded)
        return [found[name] for name in parameters]

    return uses


def _projection_use(run: Fused, folded: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Sequence[Use]]:
    held = _held(run)
    return lambda g: [recurrent.projection_use(held, g, folded)]


def _held(run: Fused) -> Fused:
    """What uses are made of; the results themselves may be freed."""
    return run._replace(state=(), place=run.earlier, tap=None)
