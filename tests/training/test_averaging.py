"""Averages of iterates against the sums they stand for."""

import pytest
import torch
from torch import Tensor, nn

from dpgrad.training.averaging import Averaged, Ema, Tail, parse

STEPS = 12


def iterates() -> Tensor:
    return torch.randn(STEPS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def averaged(kind: Ema | Tail, upto: int) -> Tensor:
    model = nn.Linear(3, 1, bias=False).double()
    average = Averaged(model, kind)
    for step, value in enumerate(iterates()[:upto]):
        with torch.no_grad():
            model.weight.copy_(value[None])
        average.update(step)
    with average.applied():
        return model.weight.detach().clone()[0]


@pytest.mark.parametrize("upto", [1, 2, 7, 12])
def test_ema_is_the_weighted_mean_without_the_bias_of_its_start(upto: int) -> None:
    decay, running = 0.8, torch.zeros(3, dtype=torch.float64)
    for value in iterates()[:upto]:
        running = decay * running + (1 - decay) * value
    torch.testing.assert_close(averaged(Ema(decay), upto), running / (1 - decay**upto))


@pytest.mark.parametrize(("share", "upto"), [(0.5, 12), (0.5, 8), (0.25, 12), (1.0, 12), (0.5, 3), (0.01, 12)])
def test_tail_is_the_mean_of_the_last_iterates(share: float, upto: int) -> None:
    start = STEPS - max(1, round(share * STEPS))
    wanted = iterates()[start:upto].mean(0) if upto > start else iterates()[upto - 1]
    kind = parse(f"tail:{share}", STEPS)
    assert kind == Tail(start)
    torch.testing.assert_close(averaged(kind, upto), wanted)


def test_the_model_has_its_own_weights_again_after_the_block() -> None:
    model = nn.Linear(2, 1)
    average = Averaged(model, Ema(0.9))
    before = model.weight.detach().clone()
    average.update(0)
    with torch.no_grad():
        model.weight += 1
    own = model.weight.detach().clone()

    def broken() -> None:
        with average.applied():
            assert torch.equal(model.weight, before)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        broken()
    assert torch.equal(model.weight, own)
    average.finish()
    assert torch.equal(model.weight, before)


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert list(Averaged(model, Ema(0.9)).state()) == ["weight"]


def test_a_state_is_gone_on_from() -> None:
    model = nn.Linear(2, 1)
    one, other = Averaged(model, Ema(0.5)), Averaged(model, Ema(0.5))
    for step in range(4):
        with torch.no_grad():
            model.weight += 1
        one.update(step)
        if step == 1:
            other.restore({name: value.clone() for name, value in one.state().items()})
        if step > 1:
            other.update(step)
    assert torch.equal(one.state()["weight"], other.state()["weight"])


@pytest.mark.parametrize("text", ["ema", "ema:x", "mean:0.5", "", "tail"])
def test_unknown_averages_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="averaging must be ema:DECAY or tail:SHARE, got "):
        parse(text, 10)


@pytest.mark.parametrize("text", ["ema:1", "ema:0", "tail:0", "tail:2"])
def test_shares_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must lie strictly between 0 and 1"):
        parse(text, 10)
