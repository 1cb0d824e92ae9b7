"""Momentum inside the clip bound: each example's gradients over past iterates are averaged before they are scaled.

Huang et al. (2024), Algorithms 2 and 3, with the slips of their listings corrected.

`InnerMomentum` (Algorithm 3) sums an example's gradients at the last iterates,

    m_k,i = Σ_{j=0}^{K₀} γ₀^j ∇ℓ(w_{k−j}; x_i),

and the rule scales m_k,i. The K₀+1 terms are not normalised, and terms before step 0 are dropped. The listing computes
m_{k−1} and uses m_k: ``inner="current"`` begins at w_k, ``inner="past"`` at w_{k−1} (so that its first step is noise
alone). Gradients are recomputed at the stored iterates, which is exact and keeps nothing about any example; caching
gradients from the steps at which an example took part would compute another quantity. It costs K₀+1 passes per step.

`Average` (Algorithm 2) keeps m_k,i = γ g_k,i + (1−γ) m_{k−1,i}, m_0,i = g_0,i, for every example of the data, updated
before it is scaled (the listing scales the old one) and divided by the number of examples (the listing divides by B).

Guarantee: after the sums over j, m_k,i is a function of x_i and of w_0, ..., w_k alone. The iterates are outputs of
earlier steps: the adversary has them, and composition over steps is adaptive, so they may be treated as constants at
step k. Then the step is a sum over the sampled examples of vectors of norm at most the clip bound, one for each
example, plus Gaussian noise: the mechanism that the event prices, whatever m is. Full batches have no sampling: the
same holds with q = 1. The state of `Average` is one vector per example and is as private as the data.

Were gradients cached instead, m_k,i would also depend on when i took part before. Given those bits, which are
independent of the bit that is drawn now, the step is again (1−q)N(S, σ²) + qN(S+v, σ²) with ‖v‖ ≤ clip against
N(S, σ²); and the divergence of a mixture over the bits is at most that of its worst part, since hockey-stick
divergences are jointly convex. So caching would be private too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.errors import OptionError, RunError, UnsupportedModelError
from dpgrad.grads.accumulate import Engine
from dpgrad.grads.clip import PerExample
from dpgrad.grads.memory import available, shown_bytes
from dpgrad.grads.precision import own_products
from dpgrad.grads.sums import Batch, Loss, sum_dtype, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.uses import Dense, combined

__all__ = ["Average", "InnerMomentum", "Iterate"]

Iterate = Mapping[str, Tensor]  # the values of the parameters at one step: public


@dataclass(frozen=True)
class InnerMomentum:
    """Per-example momentum by recomputation at the last iterates (Algorithm 3).

    ``gamma`` is γ₀ and ``length`` K₀: up to K₀+1 gradients of each example are added.

    >>> InnerMomentum(gamma=0.5, length=2).weights(3)
    [1.0, 0.5, 0.25]
    """

    gamma: float
    length: int
    inner: Literal["current", "past"] = "current"

    def __post_init__(self) -> None:
        _validate.unit_interval(gamma=self.gamma)
        _validate.whole(length=self.length)
        if self.inner not in ("current", "past"):
            raise OptionError(f"inner must be 'current' or 'past', got {self.inner!r}")

    def weights(self, terms: int) -> list[float]:
        """γ₀^j for each of the iterates, the latest first."""
        return [self.gamma**j for j in range(terms)]

    def remember(self, past: list[Iterate], model: nn.Module) -> None:
        """Put the model's present values first among ``past``, the iterates to give to the next step.

        Once there are as many as are needed, they stay where they lie: values move from one to the next.
        """
        most = self.length if self.inner == "current" else self.length + 1
        if not most:
            return
        now = {name: parameter.detach() for name, parameter in trainable(model).items()}
        if len(past) < most:
            past.append({name: value.clone() for name, value in now.items()})
        for later, earlier in zip([now, *past][-2::-1], past[::-1], strict=False):
            torch._foreach_copy_(list(earlier.values()), [later[name] for name in earlier])

    def engine(self, engine: Engine, past: Sequence[Iterate]) -> Engine:
        """An engine whose gradients are m_k,i, made from ``engine`` and the past iterates, the latest first."""
        return partial(_recomputed, self, engine, past)


def _recomputed(
    momentum: InnerMomentum,
    engine: Engine,
    past: Sequence[Iterate],
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    weights: Tensor,
    rows: int = 1,
) -> PerExample:
    found = []
    if momentum.inner == "current":
        found.append(engine(model, loss, batch, weights, rows))
    for iterate in past:
        with swapped(model, {name: nn.Parameter(value) for name, value in iterate.items()}):
            found.append(engine(model, loss, batch, weights, rows))
    if not found:
        examples = len(weights) // rows
        return PerExample({name: Dense.zero(parameter, examples) for name, parameter in trainable(model).items()})
    scales = momentum.weights(len(found))
    with torch.no_grad(), own_products():
        return PerExample(
            {
                name: combined([one.uses[name].scaled(scale) for one, scale in zip(found, scales, strict=True)])
                for name in found[0].uses
            }
        )


@dataclass(frozen=True)
class Average:
    """Every example's running average of its own gradients, for full batches (Algorithm 2). Private.

    It holds examples × parameters numbers, which `Average.for_model` checks against the memory there is. A batch for
    its engine is ``(index, batch)``: which example each entry is.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> state = Average.for_model(model, examples=2, gamma=0.5)
    >>> state
    Average(2 examples, 8 bytes, private)
    """

    gamma: float
    momenta: Mapping[str, Tensor] = field(repr=False)  # (examples + 1, *shape); the last is for padding
    updates: Tensor = field(repr=False)  # (examples + 1,): how many gradients each average holds

    def __repr__(self) -> str:
        held = sum(momentum[:-1].nbytes for momentum in self.momenta.values())
        return f"Average({self.examples:,} examples, {shown_bytes(held)}, private)"

    @property
    def examples(self) -> int:
        """How many examples there are; as an index it stands for a place that no example fills."""
        return len(self.updates) - 1

    @classmethod
    def for_model(cls, model: nn.Module, examples: int, gamma: float, limit: int | None = None) -> "Average":
        """No average yet, with room for all; refused where it takes more than ``limit`` bytes (default: what is free).

        >>> Average.for_model(nn.Linear(10, 10), examples=1000, gamma=0.1, limit=1000)
        Traceback (most recent call last):
        dpgrad.errors.OptionError: the averages of 1,000 examples take 440.0 KB, more than the 1.0 KB there ...
        """
        _validate.unit_interval(gamma=gamma)
        _validate.whole(least=1, examples=examples)
        parameters = trainable(model)
        if not parameters:
            raise UnsupportedModelError(
                "model has no trainable parameter: set requires_grad on the parameters to train"
            )
        device = next(iter(parameters.values())).device
        needed = sum(p.numel() * sum_dtype(p.dtype).itemsize for p in parameters.values()) * examples
        room = available(device) if limit is None else limit
        if needed > room:
            raise OptionError(
                f"the averages of {examples:,} examples take {shown_bytes(needed)}, more than the {shown_bytes(room)} "
                "there are: use InnerMomentum, which keeps nothing about examples, or fewer parameters"
            )
        momenta = {
            name: torch.zeros((examples + 1, *p.shape), dtype=sum_dtype(p.dtype), device=p.device)
            for name, p in parameters.items()
        }
        return cls(gamma, momenta, torch.zeros(examples + 1, dtype=torch.int64, device=device))

    def state(self) -> dict[str, Any]:
        """The averages as they are now, for a checkpoint. Private."""
        return {"momenta": {name: value[:-1].clone() for name, value in self.momenta.items()},
                "updates": self.updates[:-1].clone()}  # fmt: skip

    @classmethod
    def restored(cls, gamma: float, state: Mapping[str, Any], device: torch.device) -> "Average":
        """The averages of a `state`."""

        def with_padding(held: Tensor) -> Tensor:
            return torch.cat([held.to(device), held.new_zeros(1, *held.shape[1:], device=device)])

        momenta = {name: with_padding(value) for name, value in state["momenta"].items()}
        return cls(gamma, momenta, with_padding(state["updates"]))

    def engine(self, engine: Engine, step: int | Tensor) -> Engine:
        """An engine that brings the averages of its examples up to ``step`` and returns them as the gradients.

        An example that was already brought up to ``step`` stays as it is, so a piece may be worked on again. A
        step on the device is not compared with what the examples have had.
        """
        if isinstance(step, int):
            _validate.whole(step=step)
        return partial(_averaged, self, engine, step)


def _averaged(
    state: Average,
    engine: Engine,
    step: int | Tensor,
    model: nn.Module,
    loss: Loss,
    batch: tuple[Tensor, Batch],
    weights: Tensor,
    rows: int = 1,
) -> PerExample:
    index, inner = batch
    index = index.view(-1, rows)[:, 0]
    done = state.updates[index]
    missed = (done != step) & (done != step + 1) & (index < state.examples)  # places without an example have none
    if isinstance(step, int) and bool(missed.any()):
        raise RunError(f"every example must be averaged at every step, step {step} finds some that were not")
    found = engine(model, loss, inner, weights, rows)
    with torch.no_grad(), own_products():
        for name, use in found.uses.items():
            new, old = use.per_example(), state.momenta[name][index]
            first, again = (of.view(-1, *[1] * (old.ndim - 1)) for of in (done == 0, done == step + 1))
            mixed = torch.where(first, new, state.gamma * new + (1 - state.gamma) * old)
            state.momenta[name][index] = torch.where(again, old, mixed)
        state.updates[index] = torch.where(index < state.examples, step + 1, 0)
    return PerExample({name: Dense(momentum[index]) for name, momentum in state.momenta.items()})
