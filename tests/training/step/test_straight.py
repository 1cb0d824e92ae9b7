"""Steps of straight-line code are those of the bodies that are called, to the bit, on pieces of the same sizes."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.training.private import PrivateGradient
from dpgrad.training.step import straight
from dpgrad.training.step.bodies import Bodies
from dpgrad.training.step.straight import Straight

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a CPU")
ROWS = 200


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is kept whatever the load of the machine."""
    monkeypatch.setattr(straight, "_FASTER", math.inf)
    monkeypatch.setattr(straight, "_SHORT", math.inf)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether code stood for each piece that it was asked for."""
    found: list[bool] = []
    run = straight._Body._run

    def noted(self: Any, code: Any) -> bool:
        found.append(run(self, code))
        return found[-1]

    monkeypatch.setattr(straight._Body, "_run", noted)
    return found


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 8, generator=random), torch.randint(4, (ROWS,), generator=random)


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 4))


def plan(**given: Any) -> Mechanism:
    return Mechanism(sampling.Poisson(0.2), 300, 0.5, relation="zero-out", batch_size=40, **given)


def trained(steps: int = 25, data: Any = None, dropout: float = 0.0, **given: Any) -> tuple[nn.Module, Any]:
    model = network(dropout)
    private = PrivateGradient(model, loss, given.pop("mechanism", plan()), seed=5, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for _ in range(steps):
        private.step(rows() if data is None else data)
        optimizer.step()
    return model, private


def called(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> Any:
    """The same run without code."""
    with monkeypatch.context() as patch:
        patch.setattr(straight._Body, "_may_be_traced", lambda self: False)
        return make()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dropout": 0.5},
        {"microbatch": 16},
        {"inner_momentum": InnerMomentum(0.5, 2)},
        {"mechanism": plan(groups=(Group("0.*", clip=0.5), Group("[!0].*")))},
    ],
    ids=["plain", "dropout", "pieces", "momentum", "groups"],
)
def test_the_same_to_the_bit(given: dict[str, Any], ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found, private = trained(**given)
    assert private.form == Straight.form
    assert sum(ran) > 10
    wanted, _ = called(monkeypatch, lambda: trained(**given))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))


def test_steps_that_are_observed_are_called(ran: list[bool]) -> None:
    """Code gives sums alone: what is observed would be that of an earlier step."""
    seen: list[float] = []
    trained(10, observe=lambda found: seen.append(float(found.norms.sum())))
    assert not ran
    assert len(set(seen)) == 10


def test_it_is_near_the_step_on_as_many_rows_as_there_are(ran: list[bool]) -> None:
    found, _ = trained()
    wanted, private = trained(capture=False)
    assert private.form != Straight.form
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_examples_that_are_not_finite_are_left_out(ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows()
    data[0][3], data[0][60] = math.nan, math.inf
    for dropout in (0.0, 0.5):
        found, _ = trained(data=data, dropout=dropout)
        assert not all(ran)
        wanted, _ = called(monkeypatch, lambda dropout=dropout: trained(data=data, dropout=dropout))
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))
        assert all(bool(each.isfinite().all()) for each in found.parameters())


def test_a_model_that_reads_values_is_called(ran: list[bool]) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x if float(x.detach().abs().max()) < 1e9 else 2 * x)
            return out

    private = PrivateGradient(Reads(), loss, plan(), seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes another way
        for _ in range(4):
            private.step(rows())
    assert not ran


def test_code_is_made_before_it_is_needed(ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    trace = straight._Body._trace

    def noted(self: Any) -> None:
        made.append(len(ran))
        trace(self)

    monkeypatch.setattr(straight._Body, "_trace", noted)
    trained(40)
    assert made[:1] == [0]
    assert set(made[1:]) == {1}  # at the end of the same step: no later one waits for it
    assert all(ran)


def sizes(model: nn.Module, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """The places of pieces, and the examples in them, over 12 steps of a plan of ``steps``.

    How the steps are run tells which sizes they have: a run that would be resumed with others is refused.
    """
    places: set[int] = set()
    filled: set[int] = set()
    hold, replay = Bodies.hold, Straight._replay
    monkeypatch.setattr(Bodies, "hold", lambda self, count: (filled.add(count), hold(self, count)))
    monkeypatch.setattr(Straight, "_replay", lambda self, form: (places.add(form.size), replay(self, form)))
    mechanism = Mechanism(sampling.Poisson(0.2), steps, 0.5, batch_size=16)
    inputs = torch.randn(80, next(model.parameters()).shape[1])
    private = PrivateGradient(model, loss, mechanism, seed=5)
    for _ in range(12):
        private.step((inputs, torch.zeros(80, dtype=torch.int64)))
    assert (private.form == Straight.form) == (places != filled)
    return places, filled


def test_no_place_stays_empty_where_products_take_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    places, filled = sizes(nn.Sequential(nn.Linear(2048, 2048)), 1000, monkeypatch)
    assert places == filled
    assert len(places) > 3


def test_few_places_stay_empty_where_products_take_as_long_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    middle = nn.Sequential(nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 512))
    places, filled = sizes(middle, 1000, monkeypatch)
    assert places != filled
    assert max(min(size - count for size in places if size >= count) for count in filled) <= 2  # half a deviation


@pytest.mark.parametrize(("steps", "few"), [(1000, True), (100, False)])
def test_sizes_are_few_where_code_is_made_for_them(steps: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    places, filled = sizes(network(), steps, monkeypatch)
    assert (len(places) < len(filled)) == few
    assert few or places == filled


def test_what_changes_is_followed(ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode, a frozen layer, the memory of a weight, a module, and a number of the loss."""

    class Weighted:
        def __init__(self) -> None:
            self.factor = 1.0

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return self.factor * loss(model, batch)

    def run() -> list[Tensor]:
        model, weighted = network(0.5), Weighted()
        private = PrivateGradient(model, weighted, plan(), seed=5)
        changes: dict[int, Callable[[], object]] = {
            12: lambda: model.eval(),
            24: lambda: model[0].requires_grad_(False),
            36: lambda: setattr(model[4].weight, "data", 2 * model[4].weight.data),
            48: lambda: setattr(model, "2", nn.ReLU()),
            60: lambda: setattr(weighted, "factor", 0.01),
        }
        found = []
        for step in range(72):
            changes.get(step, lambda: None)()
            private.step(rows())
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return found

    straight_on = run()
    assert sum(ran) > 10
    for a, b in zip(straight_on, called(monkeypatch, run), strict=True):
        assert torch.equal(a, b)
