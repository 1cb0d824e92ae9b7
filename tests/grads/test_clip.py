"""The clipped sum of per-example gradients against the same sum written out: every factor is that of its example."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpgrad.grads import bookkeeping, clip
from dpgrad.grads.clip import PerExample
from dpgrad.grads.precision import SUMMED_AT_ONCE, norm_error
from dpgrad.grads.scaling import Bounded, Hard
from dpgrad.grads.uses import Dense

GROUPS = {"a": 0, "b": 1, "c": 0}
COUNTS = [1, SUMMED_AT_ONCE, SUMMED_AT_ONCE + 1, 3 * SUMMED_AT_ONCE, 3 * SUMMED_AT_ONCE + 5]


def gradients(count: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of all sizes from far below to far above a clip bound of 1."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.logspace(-2, 2, count).to(dtype)[torch.randperm(count, generator=generator)]
    shapes = {"a": (2, 3), "b": (4,), "c": (1,)}
    drawn = {name: torch.randn(count, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {name: lengths.view(-1, *[1] * (each.ndim - 1)) * each for name, each in drawn.items()}


def written_out(found: dict[str, Tensor], clips: Tensor, groups: dict[str, int] | None) -> dict[str, Tensor]:
    """Each example scaled to its bounds, shortened by what rounding may add, and added up in float64."""
    count = len(found["a"])
    total = {name: torch.zeros(each.shape[1:], dtype=torch.float64) for name, each in found.items()}
    for i in range(count):
        flat = {name: each[i].double().flatten() for name, each in found.items()}
        if not all(bool(each.isfinite().all()) for each in flat.values()):
            continue
        for group in range(len(clips)):
            names = [name for name in flat if groups is None or groups[name] == group]
            length = float(torch.cat([flat[name] for name in names]).norm())
            factor = min(1.0, float(clips[group]) / length) * (1 - norm_error(found["a"].dtype))
            for name in names:
                total[name] += factor * found[name][i].double()
    return total


@pytest.mark.parametrize("held", [1, clip._HELD])
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["one", "groups"])
@pytest.mark.parametrize("count", COUNTS)
def test_the_sum_is_the_sum_written_out(
    count: int, groups: dict[str, int] | None, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "_HELD", held)  # how many short sums are formed at a time
    found = gradients(count)
    if count > SUMMED_AT_ONCE:
        found["a"][3, 0, 0], found["b"][count - 1, 2] = math.nan, math.inf
    clips = torch.tensor([[1.0], [0.3]] if groups else [[1.0]])
    clipped = PerExample({name: Dense(each.clone()) for name, each in found.items()}).clipped(
        Bounded(Hard(), clips), groups
    )
    for name, total in written_out(found, clips[:, 0], groups).items():
        torch.testing.assert_close(clipped.sums[name].double(), total, rtol=1e-5, atol=1e-5)
        assert clipped.sums[name].dtype == (torch.float32 if count <= SUMMED_AT_ONCE else torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_example_stays_below_its_bound_by_what_rounding_may_add(dtype: torch.dtype) -> None:
    for length in (1e-18, 0.5, 1.0, 1e18):
        alone = {"a": torch.full((1, 3), length, dtype=dtype)}
        clipped = PerExample({"a": Dense(alone["a"])}).clipped(Bounded(Hard(), torch.ones(1, 1, dtype=dtype)))
        assert float(clipped.sums["a"].double().norm()) <= 1 - norm_error(dtype) / 2


def test_squares_below_the_least_number_are_added_to_the_norm() -> None:
    """Of n values whose squares are lost the norm is at most the root of n times the least float: it is added."""
    values = 10_000
    tiny = torch.finfo(torch.float32).tiny
    own = {"a": torch.full((2, values), 0.9 * math.sqrt(tiny)), "b": torch.full((2, 1), 0.9 * math.sqrt(tiny))}
    norms = PerExample({name: Dense(each) for name, each in own.items()}).norms()
    assert float(norms.min()) >= math.sqrt((values + 1) * tiny)


def test_a_group_without_gradients_has_norm_zero() -> None:
    norms = PerExample({"b": Dense(gradients(5)["b"])}).norms(GROUPS)
    assert norms.shape == (2, 5)
    assert not norms[0].any()
    assert bool((norms[1] > 0).all())


class Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that are called within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_norms_send_nothing_to_the_device() -> None:
    """Numbers of Python that become a tensor on a CUDA device wait for it, and such a step cannot be captured."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.Linear(3, 2)), torch.randn(5, 4)
    groups = {name: place for place, (name, _) in enumerate(model.named_parameters())}

    def squares(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x).square().sum(1)
        return out

    layouts = bookkeeping.find_layouts(model, squares, x)
    found = bookkeeping.gradients(model, squares, x, torch.ones(5), layouts=layouts)
    with Called() as called:
        together = found.norms()
    assert "stack" in called.names
    assert "lift_fresh" not in called.names
    assert "_to_copy" not in called.names
    torch.testing.assert_close(together[0], found.norms(groups).norm(dim=0))
