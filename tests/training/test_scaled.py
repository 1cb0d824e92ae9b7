"""`SelfScaled` follows its formulas whatever the scale of the loss, goes on from a stored state, and refuses misuse."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dpgrad import errors
from dpgrad.training.scaled import SelfScaled


def parameters() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=random)) for shape in ((3, 2), (4,))]


def descend(own: list[nn.Parameter], optimizer: SelfScaled, first: int, last: int, size: float = 1.0) -> None:
    """Steps on size·½‖w − 1‖² with noise that depends on the step alone."""
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        for one in own:
            one.grad = size * (one.detach() - 1 + 0.1 * torch.randn(one.shape, generator=random))
        optimizer.step()


def flat(own: list[nn.Parameter]) -> Tensor:
    return torch.cat([one.detach().flatten() for one in own])


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_steps_do_not_depend_on_the_scale_of_the_loss(size: float) -> None:
    found = []
    for factor in (1.0, size):
        own = parameters()
        descend(own, SelfScaled(own, 0.01), 0, 20, factor)
        found.append(flat(own))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_scale_grows_where_steps_are_short_and_shrinks_where_they_are_long() -> None:
    scales = []
    for rate in (1e-3, 30.0):
        own = parameters()
        optimizer = SelfScaled(own, rate)
        descend(own, optimizer, 0, 40)
        scales.append(float(optimizer.param_groups[0]["log_scale"]))
    assert scales[0] > 1
    assert scales[1] < -0.5


def test_a_stored_state_goes_on_as_if_nothing_had_happened() -> None:
    whole, halves = parameters(), parameters()
    descend(whole, SelfScaled(whole, 0.05), 0, 12)
    first = SelfScaled(halves, 0.05)
    descend(halves, first, 0, 5)
    second = SelfScaled(halves, 0.05)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    descend(halves, second, 5, 12)
    assert torch.equal(flat(whole), flat(halves))


def test_a_parameter_without_a_gradient_stays() -> None:
    own = parameters()
    before = own[1].detach().clone()
    own[0].grad = torch.ones_like(own[0])
    optimizer = SelfScaled(own, 0.1)
    optimizer.step()
    assert torch.equal(own[1], before)
    own[0].grad = None
    optimizer.step()  # nothing to do
    assert optimizer.param_groups[0]["taken"] == 1


def test_no_gradient_no_step() -> None:
    own = parameters()
    before = flat(own)
    for one in own:
        one.grad = torch.zeros_like(one)
    SelfScaled(own, 0.1).step()
    assert torch.equal(flat(own), before)


def test_misuse() -> None:
    with pytest.raises(errors.OptionError, match="lr must be positive"):
        SelfScaled(parameters(), 0.0)
    with pytest.raises(errors.OptionError, match="momentum must lie in"):
        SelfScaled(parameters(), 0.1, 1.0)
    with pytest.raises(errors.OptionError, match="leave closure out"):
        SelfScaled(parameters(), 0.1).step(lambda: 0.0)
