"""What adds noise to the sums of a step: of the right step, group and size, on a CPU and where a device would be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import device_noise, noise
from dpgrad.training.private import Observed, PrivateGradient
from dpgrad.training.step import release
from dpgrad.training.step.release import Figures, OnDevice

GROUPS = (Group("0.*", clip=0.5), Group("2.*", noise_multiplier=2.0))
STEPS = 11


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def mechanism(**options: Any) -> Mechanism:
    settings = {"clip": schedules.linear(2.0, STEPS), "noise": schedules.piecewise([7], [1.0, 3.0])} | options
    return Mechanism(sampling.Poisson(0.1), STEPS, 0.7, batch_size=8, **settings)


@pytest.mark.parametrize("hold", [True, False])
def test_figures_are_those_of_the_step(hold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a run begins, and however many steps are looked up at a time."""
    monkeypatch.setattr(release, "_AHEAD", 4)
    plan = mechanism(groups=GROUPS, hold_noise=hold)
    figures = Figures(plan, {"0.weight": 0, "2.weight": 1})
    for step in (5, 6, 9, 10, 3, 0, 4, 8):
        assert figures.clips(step) == [plan.clip_at(step, group) for group in GROUPS]
        assert figures.stds(step) == [plan.std_at(step, group) for group in GROUPS]


class Halved(nn.Module):
    """A layer in bfloat16 among others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.bfloat16()).float()
        return found


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def test_noise_of_parameters_of_several_types_is_that_of_the_step() -> None:
    """Their means have no memory in common: they are made anew at each step, with its noise."""
    model, seen = network(), []
    model.append(Halved())
    private = PrivateGradient(model, losses, mechanism(), seed=3, engine="vmap", observe=seen.append)
    for _ in range(2):
        private.step(torch.randn(80, 4, generator=torch.Generator().manual_seed(1)))
    likes = {name: parameter.detach() for name, parameter in model.named_parameters()}
    each: Observed
    for each in seen:
        stds = dict.fromkeys(likes, private.mechanism.std_at(each.step))
        drawn = noise.gaussians(likes, stds, private.key, each.step)
        for name, mean in each.noisy.items():
            expected = (each.clipped_sum[name].view(mean.shape) + drawn[name]) / private.mechanism.divisor
            torch.testing.assert_close(mean.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capture", [None, False])
def test_the_sums_of_many_pieces_lose_nothing(capture: bool | None) -> None:
    """Added up in float32, ones beside 2^26 would vanish: a rounding that nothing accounts for."""
    found = []
    for ones in (1.0, 0.0):
        model, seen = nn.Linear(1, 1, bias=False), []
        plan = Mechanism(sampling.FullBatch(), 40, 1.0, clip=1e9, batch_size=5)
        private = PrivateGradient(
            model, lambda model, x: model(x)[:, 0], plan, seed=3, microbatch=1, capture=capture, observe=seen.append
        )
        private.step(torch.tensor([[2.0**26], *[[ones]] * 4]))
        found.append(float(seen[0].clipped_sum["weight"]))
    assert found[0] - found[1] == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one", "two"])
def test_where_a_device_would_be_noise_is_that_of_step_and_group(groups: tuple[Group, ...]) -> None:
    """`OnDevice` in plain torch: sizes that rise and fall from step to step, and a parameter that is large."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 14000))
    likes, key, plan = dict(model.named_parameters()), Key.from_seed(5), mechanism(groups=groups)
    places = {name: int(name.startswith("2.")) for name in likes} if groups else None
    made = OnDevice(likes, Figures(plan, places), key, plan.divisor, torch.device("cpu"))
    assert len(made.parts) == 2
    for step in (0, 8, 3):
        generator = torch.Generator().manual_seed(step)
        totals = {name: torch.randn(like.shape, generator=generator) for name, like in likes.items()}
        made.at(step)
        for part in made.parts:
            made.add(part, part.joined(totals))
        made.finish()
        made.show()
        stds = {name: plan.std_at(step, groups[places[name]] if places else None) for name in likes}
        expected = device_noise.gaussians(totals, stds, key, step, plan.divisor)
        for name, like in likes.items():
            assert like.grad is not None
            assert torch.equal(like.grad, expected[name])
