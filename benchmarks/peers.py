"""One step by each peer, for `python -m benchmarks.steps`: every mode of Opacus, and JAX.

Peers are imported when their step is prepared: one that is missing says so in its row.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps.engines import CLIP, LEARNING_RATE, NOISE, Engine, Prepared, bytes_on, pieces, waiting
from benchmarks.steps.networks import EncoderLayer, Transformer
from benchmarks.steps.workloads import Workload
from dpgrad.grads.sums import trainable
from dpgrad.training.models import Residual

MODES = ("hooks", "functorch", "ew", "ghost")


class Criterion(nn.Module):
    """The loss of a workload as Opacus asks for it: ghost clipping sets ``reduction`` to "none"."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload, self.reduction = workload, "mean"

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over rows, or the loss of each."""
        losses = self.workload.losses(outputs, labels)
        return losses if self.reduction == "none" else losses.mean()


def opacus(workload: Workload, device: str, *, mode: str) -> Prepared:
    """The step of Opacus in one of its modes, on one batch, in virtual steps where it is processed in parts."""
    from opacus.grad_sample import wrap_model
    from opacus.optimizers import get_optimizer_class
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, batch = workload.built(device), workload.batch(device)
    names = list(trainable(model))
    _exchange_lstm(model, device)
    wrapped = wrap_model(model, grad_sample_mode=mode, **({"max_grad_norm": CLIP} if mode == "ghost" else {}))
    optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode=mode)(
        torch.optim.SGD(trainable(model).values(), lr=LEARNING_RATE),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=len(batch[1]),
    )
    criterion: Any = Criterion(workload)
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)
    parameters = model.state_dict(keep_vars=True)  # by the names of the model as it was
    parts = pieces(workload, batch)

    def step() -> None:
        for place, (inputs, labels) in enumerate(parts, 1):
            if len(parts) > 1:
                optimizer.signal_skip_step(do_skip=place < len(parts))
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=workload.autocast):
                loss = criterion(wrapped(inputs), labels)
            loss.backward()
            optimizer.step()

    def sums() -> Mapping[str, Tensor]:
        return {name: parameters[name].summed_grad for name in names}

    return Prepared(step, waiting(device), sums, data_bytes=bytes_on(device, batch))


def _exchange_lstm(model: nn.Module, device: str) -> None:
    """Put Opacus' own LSTM in the place of torch's, with its weights."""
    from opacus.layers import DPLSTM

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LSTM):
            own = DPLSTM(module.input_size, module.hidden_size, batch_first=module.batch_first)
            own.load_state_dict(module.state_dict())
            model.set_submodule(name, own.to(device))


def jax(workload: Workload, device: str) -> Prepared:
    """Gradients of single examples by ``vmap(grad)``, the whole step compiled by ``jit``."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from jax import numpy as jnp

    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        jax.config.update("jax_default_matmul_precision", "highest")
    place = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    if workload.next_token or workload.microbatch or workload.autocast:
        raise ValueError("sequences, microbatches and bfloat16 are not written in JAX here")
    model, (inputs, labels) = workload.built("cpu"), workload.batch("cpu")
    first = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    x, y = (jax.device_put((p if p.is_floating_point() else p.int()).numpy(), place) for p in (inputs, labels))
    key = jax.device_put(jax.random.key(0), place)

    def loss(weights: Any, example: Any, label: Any) -> Any:
        return -jax.nn.log_softmax(jax_forward(model, weights, example[None])[0])[label]

    def summed(weights: Any, x: Any, y: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(weights, x, y)
        squares = [jnp.square(g).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(grads)]
        factors = jnp.minimum(1.0, CLIP / jnp.maximum(jnp.sqrt(sum(squares)), 1e-12))
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)

    @partial(jax.jit, donate_argnums=0)
    def update(weights: Any, key: Any, x: Any, y: Any, std: float, rate: float) -> Any:
        keys = jax.random.split(key, len(weights) + 1)
        sums = summed(weights, x, y)
        noise = {name: std * jax.random.normal(keys[i], sums[name].shape) for i, name in enumerate(sums)}
        return {name: weights[name] - rate * (sums[name] + noise[name]) for name in weights}, keys[-1]

    state = [jax.device_put(first, place), key]

    def step() -> None:
        state[:] = update(*state, x, y, CLIP * NOISE, LEARNING_RATE / len(y))

    def sums() -> Mapping[str, Tensor]:
        """The compiled step with other numbers: without noise and at rate -1 it adds the sums to the weights."""
        moved = jax.device_get(update(jax.device_put(first, place), key, x, y, 0.0, -1.0)[0])
        return {name: torch.tensor(moved[name] - first[name]).to(device) for name in first}

    def peak() -> int:
        return int(place.memory_stats()["peak_bytes_in_use"])

    return Prepared(step, lambda: jax.block_until_ready(state[0]), sums, peak=peak if device == "cuda" else None)


def jax_forward(module: nn.Module, weights: Mapping[str, Any], x: Any, prefix: str = "") -> Any:
    """What a module makes of a batch; ``weights`` are the model's by their names in torch, ``prefix`` is the module's.

    Where the largest of several is equal, JAX may choose another than torch: after a ReLU, zeros, whose gradient is 0.
    """
    from jax import lax
    from jax import nn as functions
    from jax import numpy as jnp

    def inner(name: str, x: Any) -> Any:
        return jax_forward(module.get_submodule(name), weights, x, f"{prefix}{name}.")

    weight, bias = weights.get(f"{prefix}weight"), weights.get(f"{prefix}bias")
    match module:
        case nn.Sequential() | nn.ModuleList():
            for name, _ in module.named_children():
                x = inner(name, x)
            return x
        case Residual():
            return x + inner("inner", x)
        case Transformer():
            x = inner("words", x) + inner("places", jnp.arange(x.shape[1]))
            return inner("head", inner("normal", inner("layers", x)[:, 0]))
        case EncoderLayer():
            normal, split = inner("before", x), (*x.shape[:2], module.heads, -1)
            query, key, value = (inner(part, normal).reshape(split) for part in ("query", "key", "value"))
            x = x + inner("out", functions.dot_product_attention(query, key, value).reshape(x.shape))
            return x + inner("down", functions.gelu(inner("up", inner("between", x)), approximate=False))
        case nn.Conv2d():
            padding = [(size, size) for size in module.padding]
            return lax.conv_general_dilated(x, weight, module.stride, padding) + bias[:, None, None]
        case nn.MaxPool2d():
            sides = (1, 1, module.kernel_size, module.kernel_size), (1, 1, module.stride, module.stride)
            return lax.reduce_window(x, -jnp.inf, lax.max, *sides, "VALID")
        case nn.AdaptiveMaxPool2d(output_size=1):
            return x.max((2, 3), keepdims=True)
        case nn.GroupNorm():
            grouped = functions.standardize(x.reshape(len(x), module.num_groups, -1), epsilon=module.eps)
            return grouped.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]
        case nn.LayerNorm():
            return functions.standardize(x, epsilon=module.eps) * weight + bias
        case nn.Embedding():
            return weight[x]
        case nn.Linear():
            return x @ weight.T + bias
        case nn.Flatten():
            return x.reshape(len(x), -1)
        case nn.Tanh():
            return jnp.tanh(x)
        case nn.ReLU():
            return functions.relu(x)
        case _:
            raise ValueError(f"{type(module).__name__} is not written in JAX here")


ENGINES: dict[str, Engine | Callable[..., Prepared]] = {
    **{f"opacus {mode}": partial(opacus, mode=mode) for mode in MODES},
    "jax vmap+jit": jax,
}
