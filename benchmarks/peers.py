"""One step by each peer, for `dpgrad bench`: every mode of Opacus, and JAX.

Peers are imported when their step is prepared: one that is missing says so in its row.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad.grads.sums import trainable
from dpgrad.lab.bench.engines import CLIP, LEARNING_RATE, NOISE, Engine, Prepared, waiting
from dpgrad.lab.bench.workloads import Workload

MODES = ("hooks", "functorch", "ew", "ghost")


def opacus(workload: Workload, device: str, *, mode: str) -> Prepared:
    """The step of Opacus in one of its modes."""
    from opacus.grad_sample import wrap_model
    from opacus.layers import DPLSTM
    from opacus.optimizers import get_optimizer_class
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, batch = workload.built(device), workload.batch(device)
    names = list(trainable(model))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LSTM):  # Opacus has one of its own
            own = DPLSTM(module.input_size, module.hidden_size, batch_first=module.batch_first)
            own.load_state_dict(module.state_dict())
            model.set_submodule(name, own.to(device))
    wrapped = wrap_model(model, grad_sample_mode=mode, **({"max_grad_norm": CLIP} if mode == "ghost" else {}))
    optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode=mode)(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=len(batch[1]),
    )
    criterion = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)
    parameters = model.state_dict(keep_vars=True)  # by the names of the model as it was

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    def sums() -> Mapping[str, Tensor]:
        step()
        return {name: parameters[name].summed_grad for name in names}

    return Prepared(step, waiting(device), sums)


def jax(workload: Workload, device: str) -> Prepared:
    """Gradients of single examples by ``vmap(grad)``, the whole step compiled by ``jit``; for sequences of layers."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from jax import numpy as jnp

    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        jax.config.update("jax_default_matmul_precision", "highest")
    place = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    model, (inputs, labels) = workload.built("cpu"), workload.batch("cpu")
    if not isinstance(model, nn.Sequential):
        raise ValueError("written for sequences of layers only")
    forward = partial(jax_forward, list(model))
    weights = {name: jax.device_put(value.detach().numpy(), place) for name, value in model.named_parameters()}
    x, y = (jax.device_put(part.numpy(), place) for part in (inputs, labels.int()))
    key = jax.device_put(jax.random.key(0), place)

    def loss(weights: Any, example: Any, label: Any) -> Any:
        return -jax.nn.log_softmax(forward(weights, example[None])[0])[label]

    def summed(weights: Any, x: Any, y: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(weights, x, y)
        squares = [jnp.square(g).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(grads)]
        factors = jnp.minimum(1.0, CLIP / jnp.maximum(jnp.sqrt(sum(squares)), 1e-12))
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)

    @partial(jax.jit, donate_argnums=0)
    def update(weights: Any, key: Any, x: Any, y: Any) -> Any:
        keys = jax.random.split(key, len(weights) + 1)
        sums = summed(weights, x, y)
        noise = {name: CLIP * NOISE * jax.random.normal(keys[i], sums[name].shape) for i, name in enumerate(sums)}
        return {name: weights[name] - LEARNING_RATE / len(y) * (sums[name] + noise[name]) for name in weights}, keys[-1]

    state = [weights, key]

    def step() -> None:
        state[:] = update(*state, x, y)

    def sums() -> Mapping[str, Tensor]:
        with jax.default_matmul_precision("highest"):
            found = jax.jit(summed)(state[0], x, y)
        return {name: torch.tensor(jax.device_get(value)).to(device) for name, value in found.items()}

    def peak() -> int:
        return int(place.memory_stats()["peak_bytes_in_use"])

    return Prepared(step, lambda: jax.block_until_ready(state[0]), sums, peak if device == "cuda" else None)


def jax_forward(layers: list[nn.Module], weights: Mapping[str, Any], x: Any) -> Any:
    """What the layers make of a batch; ``weights`` are theirs by the names torch gives them."""
    from jax import lax
    from jax import numpy as jnp

    for place, layer in enumerate(layers):
        weight, bias = weights.get(f"{place}.weight"), weights.get(f"{place}.bias")
        match layer:
            case nn.Conv2d():
                padding = [(size, size) for size in layer.padding]
                x = lax.conv_general_dilated(x, weight, layer.stride, padding) + bias[:, None, None]
            case nn.MaxPool2d():
                sides = (1, 1, layer.kernel_size, layer.kernel_size), (1, 1, layer.stride, layer.stride)
                x = lax.reduce_window(x, -jnp.inf, lax.max, *sides, "VALID")
            case nn.Tanh():
                x = jnp.tanh(x)
            case nn.Flatten():
                x = x.reshape(len(x), -1)
            case nn.Linear():
                x = x @ weight.T + bias
            case _:
                raise ValueError(f"{type(layer).__name__} is not written in JAX here")
    return x


ENGINES: dict[str, Engine | Callable[..., Prepared]] = {
    **{f"opacus {mode}": partial(opacus, mode=mode) for mode in MODES},
    "jax vmap+jit": jax,
}
