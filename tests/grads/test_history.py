"""Momentum of each example before scaling, against sums written out by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dpgrad.grads import ENGINES, clipped_sum
from dpgrad.grads.history import Average, InnerMomentum, Iterate
from dpgrad.grads.scaling import Psasc
from dpgrad.grads.sums import trainable

pytestmark = pytest.mark.usefixtures("on_device")
EXAMPLES = 5
RULE = partial(Psasc(s=0.7, r=0.01), clip=0.4)


class Reused(nn.Module):
    """A convolution, an embedding that is also the head, and one layer used twice: every form a gradient takes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(6, 4)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.twice = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.mix(self.token(ids).mT).mT.tanh()
        hidden = self.twice(self.twice(hidden).tanh()) * self.gain
        return hidden @ self.token.weight.t()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    out: Tensor = model(ids).square().mean((1, 2))
    return out


def made() -> tuple[nn.Module, Tensor, list[Iterate]]:
    """A model in float64, a batch, and five iterates, the latest first."""
    torch.manual_seed(1)
    model = Reused().double()
    iterates = [
        {name: p.detach() + 0.3 * torch.randn_like(p) for name, p in trainable(model).items()} for _ in range(5)
    ]
    return model, torch.randint(0, 6, (EXAMPLES, 7)), iterates


def at(model: nn.Module, iterate: Iterate, ids: Tensor) -> list[dict[str, Tensor]]:
    """The gradient of each example at an iterate, one at a time on a copy of the weights."""
    kept = {name: p.detach().clone() for name, p in trainable(model).items()}
    with torch.no_grad():
        for name, p in trainable(model).items():
            p.copy_(iterate[name])
    names = list(trainable(model))
    found = [
        dict(zip(names, torch.autograd.grad(loss(model, ids[i : i + 1]).sum(), list(model.parameters())), strict=True))
        for i in range(len(ids))
    ]
    with torch.no_grad():
        for name, p in trainable(model).items():
            p.copy_(kept[name])
    return found


def scaled_sum(momenta: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    norms = torch.stack([torch.cat([g.flatten() for g in m.values()]).norm() for m in momenta])
    factors = RULE(norms)
    return {name: sum(f * m[name] for f, m in zip(factors, momenta, strict=True)) for name in momenta[0]}  # type: ignore[misc]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, total in wanted.items():
        torch.testing.assert_close(found[name], total, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inner", ["current", "past"])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_recomputed_momentum_is_the_sum_over_iterates(engine: str, inner: str, length: int) -> None:
    model, ids, iterates = made()
    momentum = InnerMomentum(0.6, length, inner)  # type: ignore[arg-type]
    now = {name: p.detach().clone() for name, p in trainable(model).items()}
    for steps_before in (0, 1, 5):
        past: list[Iterate] = []
        for iterate in reversed(iterates[:steps_before]):
            with torch.no_grad():
                for name, p in trainable(model).items():
                    p.copy_(iterate[name])
            momentum.remember(past, model)
        with torch.no_grad():
            for name, p in trainable(model).items():
                p.copy_(now[name])
        trail = [now, *iterates[:steps_before]] if inner == "current" else iterates[:steps_before]
        trail = trail[: length + 1]
        found = clipped_sum(model, loss, ids, RULE, momentum.engine(ENGINES[engine], past), microbatch=2)
        if not trail:
            assert all(not total.any() for total in found.sums.values())
            continue
        each = [at(model, iterate, ids) for iterate in trail]
        momenta = [
            {name: sum(0.6**j * each[j][i][name] for j in range(len(trail))) for name in now} for i in range(EXAMPLES)
        ]
        assert_equal(dict(found.sums), scaled_sum(momenta))  # type: ignore[arg-type]


def test_length_zero_is_the_plain_gradient() -> None:
    model, ids, _ = made()
    plain = clipped_sum(model, loss, ids, RULE)
    momentum = InnerMomentum(0.9, 0)
    past: list[Iterate] = []
    momentum.remember(past, model)
    assert not past
    found = clipped_sum(model, loss, ids, RULE, momentum.engine(ENGINES["bookkeeping"], ()))
    assert_equal(dict(found.sums), dict(plain.sums))


def test_remembered_iterates_are_copies() -> None:
    model, _, _ = made()
    past: list[Iterate] = []
    InnerMomentum(0.5, 1).remember(past, model)
    (kept,) = past
    before = kept["gain"].clone()
    with torch.no_grad():
        model.gain.add_(1)
    assert torch.equal(kept["gain"], before)


def test_iterates_move_on_without_moving_in_memory() -> None:
    model, _, _ = made()
    momentum, past = InnerMomentum(0.5, 2), list[Iterate]()
    for value in range(5):
        with torch.no_grad():
            model.gain.fill_(value)
        momentum.remember(past, model)
        if value == 1:
            places = [each["gain"].data_ptr() for each in past]
    assert [float(each["gain"].flatten()[0]) for each in past] == [4.0, 3.0]
    assert [each["gain"].data_ptr() for each in past] == places


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_average_is_algorithm_two(engine: str, microbatch: int | None) -> None:
    """m₀ = g₀; m_k = γ g_k + (1−γ) m_{k−1}, before it is scaled."""
    model, ids, iterates = made()
    state = Average.for_model(model, EXAMPLES, gamma=0.3)
    momenta: list[dict[str, Tensor]] = []
    for step, iterate in enumerate(iterates):
        with torch.no_grad():
            for name, p in trainable(model).items():
                p.copy_(iterate[name])
        fresh = at(model, iterate, ids)
        momenta = (
            fresh
            if step == 0
            else [
                {name: 0.3 * new[name] + 0.7 * old[name] for name in new}
                for new, old in zip(fresh, momenta, strict=True)
            ]
        )
        batch = torch.arange(EXAMPLES), ids
        found = clipped_sum(model, loss, batch, RULE, state.engine(ENGINES[engine], step), microbatch=microbatch)
        assert_equal(dict(found.sums), scaled_sum(momenta))


def test_average_of_a_piece_that_is_worked_on_again_does_not_change() -> None:
    model, ids, _ = made()
    state = Average.for_model(model, EXAMPLES, gamma=0.3)
    engine = state.engine(ENGINES["vmap"], 0)
    batch = torch.arange(EXAMPLES), ids
    first = clipped_sum(model, loss, batch, RULE, engine)
    again = clipped_sum(model, loss, batch, RULE, engine)
    torch.testing.assert_close(dict(again.sums), dict(first.sums), rtol=1e-14, atol=1e-14)  # a GPU adds in any order


def test_average_refuses_a_step_that_was_left_out() -> None:
    model, ids, _ = made()
    state = Average.for_model(model, EXAMPLES, gamma=0.3)
    with pytest.raises(ValueError, match="every example must be averaged at every step"):
        clipped_sum(model, loss, (torch.arange(EXAMPLES), ids), RULE, state.engine(ENGINES["vmap"], 1))


def test_average_says_and_checks_its_memory() -> None:
    model, _, _ = made()
    with pytest.raises(ValueError, match=r"the averages of 1,000,000 examples take 800.0 MB, more than the 1.0 MB"):
        Average.for_model(model, 1_000_000, gamma=0.3, limit=1_000_000)
    assert "private" in repr(Average.for_model(model, 2, gamma=0.3))
    with pytest.raises(ValueError, match="no trainable parameter"):
        Average.for_model(nn.ReLU(), 2, gamma=0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.5, "length": 1}, "gamma must lie in"),
        ({"gamma": 0.5, "length": -1}, "length must be a whole number"),
        ({"gamma": 0.5, "length": 1, "inner": "next"}, "inner must be 'current' or 'past'"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InnerMomentum(**arguments)  # type: ignore[arg-type]
