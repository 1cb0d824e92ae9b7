"""The definition of the clipped sum, written without the library: plain autograd, one example at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad.grads import Engine, clipped_sum, lifted, single, vmap, ways
from dpgrad.grads.clip import PerExample
from dpgrad.grads.scaling import RULES, Automatic, Hard, Psac, Psasc, Quotient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Loss = Callable[[nn.Module, Any], Tensor]

ENGINES: dict[str, Engine] = {
    "bookkeeping": ways.gradients, "lifted": lifted.gradients, "vmap": vmap.gradients, "single": single.gradients,
}  # fmt: skip

# In float64 the library shortens factors by τ = 2⁻⁴⁰ + 2·examples·2⁻⁵² < 10⁻¹² and lengthens norms by what rounding may
# have hidden, γ‖a‖‖g‖ with γ < 10⁻¹³, whose root enters where a norm is computed as a difference. Both stay far below
# this part of the whole sum; a gradient charged to another example, lost or counted twice moves it by far more.
TOLERANCE = 1e-8

# The kernel behind torch's weight_norm on CUDA takes its root in float32 (`sqrtf`) whatever the type, so that autograd
# itself is off by up to 3·2⁻²⁴ there; an engine that writes the norm out is not.
ROOT_IN_FLOAT32 = 2e-7


def tolerance(names: Iterable[str], usual: float = TOLERANCE) -> float:
    """By how much of the whole sum autograd's gradients of these parameters may differ from an engine's."""
    normed = any(name.endswith(("weight.original0", "weight_g")) for name in names)
    return max(usual, ROOT_IN_FLOAT32) if normed and DEVICE == "cuda" else usual


# The papers' weights (Huang et al., 2024, Eqs. 1, 2, 4 and 6) at the constant that makes each bounded by clip.
FORMULAS: dict[type[Quotient], Callable[[Any, float, float], float]] = {
    Hard: lambda rule, n, clip: min(1.0, clip / n) if n else 1.0,
    Automatic: lambda rule, n, clip: clip / (n + rule.r),
    Psac: lambda rule, n, clip: clip / (n + rule.r / (n + rule.r)),
    Psasc: lambda rule, n, clip: rule.s * clip / (rule.s * n + rule.r / (n + rule.r)),
}
SIMPLE: list[Quotient] = [Hard(), Automatic(), Psac(), Psasc(0.5)]
assert set(map(type, SIMPLE)) == set(FORMULAS) == set(RULES), "every rule has its formula here"


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def row_gradients(model: nn.Module, loss: Loss, batch: Any) -> dict[str, Tensor]:
    """The gradient of each row's loss, (rows, *shape): the model as it is, on a batch of that row alone."""
    parameters = trained(model)
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for row in range(len(pytree.tree_leaves(batch)[0])):
        alone = pytree.tree_map(lambda leaf, row=row: leaf[row : row + 1].clone(), batch)
        with torch.enable_grad():
            value = loss(model, alone).sum()
        leaves = list(parameters.values())
        gradients = (
            torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
        )
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            found[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(each) for name, each in found.items()}


def example_gradients(
    model: nn.Module, loss: Loss, batch: Any, several_rows: bool = False, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """The gradient of each example, (examples, *shape): the mean over its rows that the mask counts."""
    if not several_rows:
        found = row_gradients(model, loss, batch)
        kept = torch.ones(len(next(iter(found.values())))) if mask is None else mask
        return {name: torch.einsum("b,b...->b...", kept.to(each), each) for name, each in found.items()}
    examples, width = pytree.tree_leaves(batch)[0].shape[:2]
    found = row_gradients(model, loss, pytree.tree_map(lambda leaf: leaf.flatten(0, 1), batch))
    counted = torch.ones(examples, width) if mask is None else mask.view(examples, -1).expand(examples, width)
    return {
        name: torch.stack(
            [
                sum(
                    (each[i * width + k] for k in range(width) if counted[i, k]),
                    start=torch.zeros_like(each[0]),
                )
                / max(1, int(counted[i].sum()))
                for i in range(examples)
            ]
        )
        for name, each in found.items()
    }


def factors(rule: Quotient, norms: Sequence[float], clip: float) -> list[float]:
    return [FORMULAS[type(rule)](rule, norm, clip) for norm in norms]


def norms(gradients: Mapping[str, Tensor]) -> list[float]:
    """The norm of each example over all parameters, in float64."""
    squares = [each.double().reshape(len(each), -1).square().sum(1) for each in gradients.values()]
    return [float(total) ** 0.5 for total in torch.stack(squares).sum(0)]


def scaled_sum(
    gradients: Mapping[str, Tensor],
    rule: Quotient,
    clips: Sequence[float],
    groups: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Σ f(‖gᵢ‖)·gᵢ, group by group of parameters."""
    found = {}
    for group, clip in enumerate(clips):
        own = {name: each for name, each in gradients.items() if (groups[name] if groups else 0) == group}
        if own:
            weights = factors(rule, norms(own), clip)
            for name, each in own.items():
                found[name] = sum(
                    (weight * gradient for weight, gradient in zip(weights, each, strict=True)),
                    start=torch.zeros_like(each[0]),
                )
    return found


def assert_equal(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    engine: Engine,
    rule: Quotient,
    clips: Sequence[float] = (0.7,),
    groups: Mapping[str, int] | None = None,
    mask: Tensor | None = None,
    several_rows: bool = False,
    microbatch: int | None = None,
) -> None:
    """The library's clipped sum is the definition's, to `TOLERANCE` of the length of the whole sum; on a GPU if any."""
    model, (batch, mask) = model.to(DEVICE), pytree.tree_map_only(Tensor, lambda leaf: leaf.to(DEVICE), (batch, mask))
    with torch.device(DEVICE):  # where models make their constants
        wanted = scaled_sum(example_gradients(model, loss, batch, several_rows, mask), rule, clips, groups)

    def scale(norms: Tensor) -> Tensor:
        return rule(norms, torch.tensor(clips, dtype=torch.float64, device=DEVICE).unsqueeze(1))

    with torch.device(DEVICE):
        found = clipped_sum(model, loss, batch, scale, engine, groups, mask, several_rows, microbatch).sums
    assert list(found) == list(wanted) == list(trained(model)) or set(found) == set(wanted)
    length = max(sum(float(each.square().sum()) for each in wanted.values()) ** 0.5, 1e-3 * min(clips))
    for name, each in wanted.items():
        assert found[name].shape == each.shape, name
        off = float((found[name] - each).norm()) / length
        assert off <= tolerance(wanted), f"{name}: off by {off:.1e} of the sum"


def assert_norms_bound(gradients: PerExample, wanted: Mapping[str, Tensor], error: float, excess: float) -> None:
    """Measured norms are at least the true ones, to the relative ``error``, and exceed them by at most ``excess``."""
    measured, true = gradients.norms()[0].double(), torch.tensor(norms(wanted), dtype=torch.float64)
    assert (measured >= true * (1 - error)).all(), (measured, true)
    assert (measured <= true * (1 + excess) + excess).all(), (measured, true)
