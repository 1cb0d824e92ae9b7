"""The weight of a convolution: its forms agree however many examples are unfolded at a time."""

import gc
import weakref

import pytest
import torch
from reference import DEVICE
from torch import Tensor, nn

from dpgrad.grads import bookkeeping, patches
from dpgrad.grads.patches import Patches
from dpgrad.grads.uses import Dense

EXAMPLES, ITEMS = 5, 2
# channels, outputs, space, kernel, stride, padding, dilation, groups
CASES = {
    "one dimension": (3, 4, (9,), (3,), (1,), (0,), (1,), 1),
    "stride leaves a rest": (2, 4, (8, 9), (3, 2), (3, 2), (1, 0), (1, 1), 1),
    "dilation and groups": (4, 6, (7, 8), (2, 3), (1, 2), (2, 1), (2, 1), 2),
    "every channel alone": (4, 4, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "three dimensions": (2, 2, (4, 3, 5), (2, 2, 2), (2, 1, 1), (1, 0, 1), (1, 1, 2), 1),
    "few positions, wide patches": (24, 24, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "padding beyond a tiny input": (2, 2, (1, 1), (1, 1), (9, 9), (3, 3), (1, 1), 1),
}


def made(name: str) -> tuple[Patches, Tensor]:
    """A use with random data, and what autograd says is the gradient of each example."""
    channels, outputs, space, kernel, stride, padding, dilation, groups = CASES[name]
    random = torch.Generator().manual_seed(len(name))
    function = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}[len(space)]
    x = torch.randn(EXAMPLES * ITEMS, channels, *space, generator=random, dtype=torch.float64)
    weight = torch.zeros(outputs, channels // groups, *kernel, dtype=torch.float64, requires_grad=True)
    expected, g = [], []
    for rows in x.split(ITEMS):
        out = function(rows, weight, None, stride, padding, dilation, groups)
        g.append(torch.randn(out.shape, generator=random, dtype=torch.float64))
        expected.append(torch.autograd.grad(out, weight, g[-1])[0])
    there = x.to(DEVICE), torch.cat(g).to(DEVICE)
    return Patches(*there, kernel, stride, padding, dilation, groups, EXAMPLES), torch.stack(expected).to(DEVICE)


@pytest.mark.parametrize("at_once", [1, 200, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_every_form_is_the_gradient(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patches._VALUES_AT_ONCE, DEVICE, at_once)
    use, expected = made(name)
    factors = torch.rand(EXAMPLES, dtype=torch.float64, device=DEVICE)
    total = torch.einsum("i,i...->...", factors, expected)
    norms, summed = use.measured()
    torch.testing.assert_close(use.per_example(), expected)
    torch.testing.assert_close(norms, expected.flatten(1).norm(dim=1))
    for form in (use, summed, use.settled()):
        torch.testing.assert_close(form.weighted_sum(factors), total)


def test_both_ways_to_a_norm_are_taken() -> None:
    assert isinstance(made("one dimension")[0].settled(), Dense)
    assert isinstance(made("few positions, wide patches")[0].settled(), Patches)


def test_few_examples_are_unfolded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patches._VALUES_AT_ONCE, DEVICE, 200)
    use, _ = made("one dimension")
    parts = [(part, a.numel()) for part, a, _ in use._factors()]
    assert [part.start for part, _ in parts] == list(range(EXAMPLES))
    assert max(size for _, size in parts) <= 200


def test_a_step_lets_go_of_what_it_noted() -> None:
    """Without help from the collector of cycles: it may not run for many steps."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 1))
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, 0]

    batch = torch.randn(3, 1, 8, 8)
    layouts = bookkeeping.find_layouts(model, loss, batch)
    bookkeeping.gradients(model, loss, batch, torch.ones(3), layouts=layouts)  # a pass that is followed allows no looks
    model[2].register_forward_pre_hook(lambda _, inputs: seen.append(weakref.ref(inputs[0].untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        found = bookkeeping.gradients(model, loss, batch, torch.ones(3), layouts=layouts)
        assert seen[-1]() is not None  # the input of the linear layer is part of its gradient
        del found
        assert seen[-1]() is None
    finally:
        gc.enable()


def test_a_layer_lets_go_of_its_input_once_its_gradient_has_arrived() -> None:
    """Long before the backward pass ends: else the inputs of all layers would stand beside all gradients."""
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 1)).to(DEVICE)
    held: list[bool] = []

    def watch(_: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].requires_grad:
            with torch._C.DisableTorchFunction():  # a pass that is followed allows no looks
                storage = weakref.ref(inputs[0].untyped_storage())
                inputs[0].register_hook(lambda _: held.append(storage() is not None))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, 0]

    batch = torch.randn(4, 3, device=DEVICE)
    layouts = bookkeeping.find_layouts(model, loss, batch)
    held.clear()
    bookkeeping.gradients(model, loss, batch, torch.ones(4, device=DEVICE), layouts=layouts)  # followed, without looks
    model[1].register_forward_pre_hook(watch)
    bookkeeping.gradients(model, loss, batch, torch.ones(4, device=DEVICE), layouts=layouts)
    assert set(held) == {False}  # twice, since a pass with a hook is another one than was followed
