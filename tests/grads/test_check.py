"""The check before the first step: what it refuses, what it accepts, and that it leaves no trace."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dpgrad import Mechanism, PrivateGradient
from dpgrad.errors import UnsupportedModelError
from dpgrad.grads import ENGINES, clipped_sum, vmap
from dpgrad.grads.check import check, compare
from dpgrad.grads.clip import PerExample
from dpgrad.grads.convert import convert
from dpgrad.grads.sums import Batch, Loss
from dpgrad.grads.uses import Dense, Use
from dpgrad.grads.ways import Attributed, Way
from dpgrad.mechanism import sampling
from thinned import thinned

WIDTH = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(17)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    """One value per row, whatever the model returns for a row."""
    found = model(batch)
    found = (found[0] if isinstance(found, tuple) else found).flatten(1)
    return (found - torch.arange(found.shape[1], device=found.device).cos()).square().sum(1)


def rows(count: int = 5, *shape: int) -> Tensor:
    return torch.randn(count, *(shape or (WIDTH,)))


class Attention(nn.Module):
    """Self-attention over the rows' own sequence, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


class Tied(nn.Module):
    """A language model whose output weight is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.embedding(ids)), self.embedding.weight)


class Function(nn.Module):
    """A model that is the given function of (module, input), with some layers to use."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x) * self.weight)


class Keeping(nn.Module):
    """Keeps its last output and, in a buffer, a function of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.register_buffer("size", torch.tensor(math.nan))

    def forward(self, x: Tensor) -> Tensor:
        self.size = self.layer.weight.detach().norm()
        self.newest = self.layer(x)
        return self.newest


class Masked(nn.Module):
    """A mask of truth values among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(WIDTH) > 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).masked_fill(self.mask, 0)


ACCEPTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(WIDTH, 2), rows),
    "a bias before a norm": (lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 2)), rows),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.InstanceNorm2d(2)
        ),
        lambda: rows(5, 1, 8, 8),
    ),
    "BatchNorm in eval mode": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)),
        rows,
    ),
    "InstanceNorm with statistics, in eval mode": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.InstanceNorm1d(3, track_running_stats=True).eval()),
        lambda: rows(5, 1, 7),
    ),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 4), nn.AlphaDropout(0.3)), rows),
    "dropout as a function": (lambda: Function(lambda own, x: F.dropout(x, 0.5, own.training)), rows),
    "noise that is always there": (lambda: Function(lambda own, x: x + torch.randn_like(x)), rows),
    "a recurrent layer with dropout": (
        lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True),
        lambda: rows(5, 4, 3),
    ),
    "attention with dropout": (Attention, lambda: rows(5, 3, 4)),
    "a transformer layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda: rows(5, 3, 4)),
    "tied weights": (Tied, lambda: torch.randint(11, (5, 6))),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 3)), nn.Tanh()), rows),
    "what is kept of a pass": (lambda: Keeping(), rows),
    "a mask among the buffers": (lambda: Masked(), rows),
    "one row": (lambda: nn.Linear(WIDTH, 2), lambda: rows(1)),
    "equal rows": (lambda: nn.Linear(WIDTH, 2), lambda: torch.zeros(8, WIDTH)),
    "one row of indices": (Tied, lambda: torch.arange(6)[None]),
    "double precision": (lambda: nn.Linear(WIDTH, 2).double(), lambda: rows().double()),
    "gradients that are zero": (lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Hardtanh(9.0, 10.0)), rows),
}


# torch.func takes an LSTM on a CPU in float32, and no recurrent layer on a GPU.
TAKEN = [
    (name, engine)
    for name in ACCEPTED
    for engine in ENGINES
    if DEVICE == "cpu" or (name, engine) != ("a recurrent layer with dropout", "vmap")
]


@pytest.mark.parametrize(("name", "engine"), TAKEN)
def test_good_models_are_accepted(name: str, engine: str) -> None:
    model, batch = (make().to(DEVICE) for make in ACCEPTED[name])
    check(model, squares, batch, engine)


def test_sparse_gradients_are_accepted_where_the_engine_takes_them() -> None:
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2))
    check(model, squares, torch.randint(11, (5, 3)))


@pytest.mark.parametrize(("seed", "mixed", "engine"), thinned(range(3), [False, True], ENGINES, pairs=True))
def test_rounding_is_not_taken_for_a_fault(seed: int, mixed: bool, engine: str) -> None:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()) for _ in range(10)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Flatten(), nn.Linear(8 * 64, 10)).to(DEVICE)
    batch = rows(4, 3, 10, 10).to(DEVICE), torch.randint(10, (4,)).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
        check(model, lambda model, b: F.cross_entropy(model(b[0]).float(), b[1], reduction="none"), batch, engine)


# torch.func runs the backward pass in the types that hold outside the loss.
@pytest.mark.parametrize(("engine", "inside"), [("bookkeeping", True), ("bookkeeping", False), ("vmap", False)])
def test_autocast_is_judged_by_its_own_rounding(engine: str, inside: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) if engine == "bookkeeping" else nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(5, 16), layer, nn.ReLU(), nn.Linear(16, 3))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return squares(model, x).float()

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        check(model, loss, rows(5, 7, 5), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_models_in_bfloat16_are_accepted(engine: str) -> None:
    check(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16(), squares, rows().bfloat16(), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_examples_that_are_not_finite_are_passed_over(engine: str) -> None:
    batch = rows()
    batch[1] = math.nan
    check(nn.Linear(WIDTH, 2), squares, batch, engine)
    with pytest.raises(ValueError, match="no example that was tried has a finite gradient"):
        check(nn.Linear(WIDTH, 2), squares, torch.full((3, WIDTH), math.inf) * torch.arange(1.0, 4)[:, None], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_one_example_may_act_on_each_other(engine: str) -> None:
    def contrast(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x).unflatten(0, (-1, 2))
        return (found - found.mean(1, keepdim=True)).square().sum(-1).flatten()

    check(nn.Linear(WIDTH, 2), contrast, rows(5, 2, WIDTH), engine, several_rows=True)
    with pytest.raises(ValueError, match="examples act on each other"):
        check(nn.Linear(WIDTH, 2), contrast, rows(4), engine)


class Ema(nn.Module):
    """Keeps a running mean of what it sees."""

    def __init__(self, rebind: bool) -> None:
        super().__init__()
        self.rebind = rebind
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        after = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        if self.rebind:
            self.seen = after
        else:
            self.seen.copy_(after)
        return self.layer(x)


class RowCounter(nn.Module):
    """Counts rows: under Poisson sampling that number is private."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.layer(x)


class PassCounter(RowCounter):
    """Counts passes, which are public."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows += 1
        return self.layer(x)


class MixedBackward(torch.autograd.Function):
    """The identity, whose gradient is that of the batch's mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0] + g[0].mean(0)


def norm_after(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), layer, nn.Linear(4, 2))


ACTING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "BatchNorm1d": (lambda: norm_after(nn.BatchNorm1d(4)), rows, r"BatchNorm '1' .* dpgrad\.grads\.convert\(model\)"),
    "BatchNorm without parameters": (
        lambda: norm_after(nn.BatchNorm1d(4, affine=False)),
        rows,
        r"BatchNorm '1' .* dpgrad\.grads\.convert\(model\)",
    ),
    "BatchNorm without statistics, in eval mode": (
        lambda: norm_after(nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        rows,
        r"BatchNorm '1' .* dpgrad\.grads\.convert\(model\)",
    ),
    "BatchNorm3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)),
        lambda: rows(5, 1, 2, 2, 2),
        "BatchNorm '1' mixes examples",
    ),
    "SyncBatchNorm": (lambda: norm_after(nn.SyncBatchNorm(4)), rows, "BatchNorm '1' mixes examples"),
    "statistics of the batch by hand": (
        lambda: Function(lambda own, x: (x - x.mean(0)) / (x.std(0) + 0.1)),
        rows,
        "examples act on each other: the gradient of parameter .* of one changes with the others in its batch",
    ),
    "F.batch_norm": (
        lambda: Function(lambda own, x: F.batch_norm(x, None, None, training=True)),
        rows,
        "examples act on each other",
    ),
    "a softmax over the batch": (lambda: Function(lambda own, x: x.softmax(0)), rows, "examples act on each other"),
    "neighbours": (lambda: Function(lambda own, x: x + 1e-2 * x.roll(1, 0)), rows, "examples act on each other"),
    "the largest of the batch": (
        lambda: Function(lambda own, x: x / x.abs().max()),
        rows,
        "examples act on each other",
    ),
    "a gradient only": (lambda: Function(lambda own, x: MixedBackward.apply(x)), rows, "examples act on each other"),
    "a loss only": (
        lambda: Function(lambda own, x: x + x.detach().mean(0)),
        rows,
        "examples act on each other",
    ),
    "gradients scaled by frequency": (
        lambda: nn.Sequential(nn.Embedding(11, 4, scale_grad_by_freq=True), nn.Linear(4, 2)),
        lambda: torch.randint(11, (5, 3)),
        r"examples act on each other: the gradient of parameter 0\.weight",
    ),
    "a projection of looked-up rows": (
        lambda: nn.Sequential(nn.Embedding(11, 4, max_norm=0.5), nn.Linear(4, 2)),
        lambda: torch.randint(11, (5, 3)),
        "embedding '0' shortens the rows .* max_norm=None",
    ),
    "the same as a function": (
        lambda: Looked(),
        lambda: torch.randint(11, (5, 3)),
        "the forward pass changes parameter weight in place",
    ),
    "statistics of InstanceNorm": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.InstanceNorm1d(3, track_running_stats=True)),
        lambda: rows(5, 1, 7),
        r"writes values of the batch to buffer 1\.running_mean, .* dpgrad\.grads\.convert",
    ),
    "a running mean": (lambda: Ema(rebind=False), rows, "writes values of the batch to buffer seen"),
    "a running mean in a new tensor": (lambda: Ema(rebind=True), rows, "writes values of the batch to buffer seen"),
    "a number of rows": (RowCounter, rows, "writes values of the batch to buffer rows"),
}


class Looked(nn.Module):
    """`F.embedding` with a projection, which writes to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 4))
        self.layer = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(F.embedding(ids, self.weight.clone() * 0 + self.weight, max_norm=None) + self._shortened(ids))

    def _shortened(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return F.embedding(ids, self.weight, max_norm=0.5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ACTING)
def test_what_passes_between_examples_is_refused(name: str, engine: str) -> None:
    make, data, message = ACTING[name]
    with pytest.raises(ValueError, match=message):
        check(make().to(DEVICE), squares, data().to(DEVICE), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_converted_model_is_accepted(engine: str) -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 4, 2),
        nn.BatchNorm1d(4),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(24, 2),
    )
    check(convert(model), squares, rows(5, 1, 7), engine)


def test_a_count_of_passes_is_no_secret() -> None:
    check(PassCounter(), squares, rows())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_message_holds_no_value_of_the_data(engine: str) -> None:
    """Two datasets that are refused are refused in the same words."""
    said = set()
    for data in (rows(), 100 * rows()):
        with pytest.raises(ValueError, match="act on each other") as refusal:
            check(Function(lambda own, x: x.softmax(0)), squares, data, engine)
        said.add(str(refusal.value))
    assert len(said) == 1
    assert "\n" not in said.pop()


def test_a_loss_of_the_whole_batch_is_refused() -> None:
    def contrastive(model: nn.Module, x: Tensor) -> Tensor:
        found = F.normalize(model(x), dim=1)
        return -(found @ found.T).log_softmax(1).diagonal()

    with pytest.raises(ValueError, match="examples act on each other"):
        check(nn.Linear(WIDTH, 4), contrastive, rows())


def test_a_loss_that_shows_the_others_is_refused_whatever_its_gradient() -> None:
    with pytest.raises(ValueError, match="examples act on each other: the loss of one changes with the others"):
        check(nn.Linear(WIDTH, 4), lambda model, x: squares(model, x) + x.mean(), rows())


def test_a_loss_divided_by_the_size_of_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"changes with the number of examples in the batch: .* not divided"):
        check(nn.Linear(WIDTH, 4), lambda model, x: squares(model, x) / len(x), rows())


@pytest.mark.parametrize("engine", ENGINES)
class TestParameters:
    """Every parameter that is trained is covered, or named."""

    def test_none(self, engine: str) -> None:
        with pytest.raises(ValueError, match="model must have a parameter to train"):
            check(nn.Linear(WIDTH, 2).requires_grad_(False), squares, rows(), engine)

    def test_unused(self, engine: str) -> None:
        if engine == "single":
            pytest.skip("paths may depend on values: other examples may use it")
        model = Function(lambda own, x: own.layer(x))
        model.spare = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"does not depend on spare\.weight, spare\.bias: freeze .*requires_grad_"):
            check(model, squares, rows(), engine)
        model.spare.requires_grad_(False)
        check(model, squares, rows(), engine)

    def test_detached(self, engine: str) -> None:
        if engine == "single":
            pytest.skip("paths may depend on values: other examples may use it")
        with pytest.raises(ValueError, match="does not depend on weight, bias"):
            check(nn.Linear(WIDTH, 2), lambda model, x: squares(model, x).detach(), rows(), engine)

    def test_used_by_one_example_only(self, engine: str) -> None:
        """Gradients that happen to be zero are not parameters that are not used."""

        def routed(model: nn.Module, x: Tensor) -> Tensor:
            return torch.where(x[:, 0] > 0, squares(model, x), 0 * squares(model, x))

        batch = rows()
        batch[0, 0], batch[1:, 0] = 1, -1
        check(nn.Linear(WIDTH, 2), routed, batch, engine)

    def test_lazy(self, engine: str) -> None:
        with pytest.raises(ValueError, match="weight has no shape yet"):
            check(nn.LazyLinear(2), squares, rows(), engine)


def broken(change: Callable[[Use, int], Use], name: str) -> Callable[..., PerExample]:
    """The definition with one parameter's gradients changed."""

    def gradients(model: nn.Module, loss: Loss, batch: Batch, weights: Tensor, rows: int = 1) -> PerExample:
        found = vmap.gradients(model, loss, batch, weights, rows)
        return replace(found, uses={**found.uses, name: change(found.uses[name], len(found.uses[name].per_example()))})

    return gradients


class Short(Dense):
    """Gradients whose norms are measured too short."""

    def measured(self) -> tuple[Tensor, Use]:
        squares, use = super().measured()
        return squares * 0.9, use


FAULTS: dict[str, Callable[[Use, int], Use]] = {
    "too long": lambda use, n: use.scaled(1.05),
    "zero": lambda use, n: use.scaled(0.0),
    "not finite": lambda use, n: use.scaled(math.nan),
    "of the next example": lambda use, n: Dense(use.per_example().roll(1, 0)),
    "the mean": lambda use, n: Dense(use.per_example().mean(0).expand(n, *use.shape)),
    "norms too short": lambda use, n: Short(use.per_example()),
}


class TestTheEngine:
    """It is compared with the gradients of ordinary automatic differentiation."""

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
    def test_a_fault_is_refused_by_name(self, name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(ENGINES, "bookkeeping", broken(FAULTS[fault], name))  # type: ignore[arg-type]
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))
        with pytest.raises(ValueError, match=f"gradient of parameter {name} right: use engine='single'"):
            check(model, squares, rows())

    @pytest.mark.parametrize("several_rows", [False, True])
    def test_the_unbroken_one_is_accepted(self, several_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(ENGINES, "bookkeeping", broken(lambda use, n: use, "0.weight"))  # type: ignore[arg-type]
        check(
            nn.Sequential(nn.Linear(WIDTH, 4)),
            squares,
            rows(5, 3, WIDTH) if several_rows else rows(),
            several_rows=several_rows,
        )

    def test_a_fault_under_dropout_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(ENGINES, "bookkeeping", broken(FAULTS["too long"], "1.weight"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"does not get the gradient of parameter 1\.weight right"):
            check(nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 4)), squares, rows())

    def test_a_reference_that_vmap_cannot_see_is_refused(self) -> None:
        """It would be left out of the gradient without a word."""
        layer = nn.Linear(WIDTH, 2)
        held = layer.weight
        with pytest.raises(
            ValueError, match="engine 'vmap' does not get the gradient of parameter weight right: use engine='single'"
        ):
            check(layer, lambda model, x: squares(model, x) + (held @ x.T).sum(0), rows(), "vmap")

    def test_a_model_that_an_engine_cannot_take_is_told_the_other(self) -> None:
        def branching(model: nn.Module, x: Tensor) -> Tensor:
            return torch.stack([squares(model, row[None])[0] * (1 if row[0] > 0 else 2) for row in x])

        with pytest.raises(
            ValueError, match=r"engine 'vmap' cannot take this model or loss \(.*\): use engine='single'"
        ):
            check(nn.Linear(WIDTH, 2), branching, rows(), "vmap")
        check(nn.Linear(WIDTH, 2), branching, rows(), "single")
        assert check(nn.Linear(WIDTH, 2), branching, rows()).name == "lifted"

    def test_an_unknown_engine_is_refused(self) -> None:
        with pytest.raises(ValueError, match="engine must be one of bookkeeping, vmap, single, got 'ghost'"):
            check(nn.Linear(WIDTH, 2), squares, rows(), "ghost")


def random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "objects": {
            (name, f"{slot}{pytree.keystr(path)}"): id(leaf)
            for name, module in model.named_modules()
            for slot, value in vars(module).items()
            if slot != "_modules"
            for path, leaf in pytree.tree_flatten_with_path(value)[0]
            if isinstance(leaf, Tensor)
        },
        "gradients": {name: id(parameter.grad) for name, parameter in model.named_parameters()},
        "modules": [(name, module.training, repr(module)) for name, module in model.named_modules()],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors, others = one.pop("tensors"), other.pop("tensors")
    return one == other and all(
        torch.equal(tensor.nan_to_num(9.0), others[name].nan_to_num(9.0)) for name, tensor in tensors.items()
    )


@pytest.mark.parametrize(
    ("name", "engine"),
    [*TAKEN, *((name, engine) for name in ACTING if name != "the same as a function" for engine in ENGINES)],
)
def test_the_model_is_left_as_it_was(name: str, engine: str) -> None:
    make, data, *refused = {**ACCEPTED, **ACTING}[name]
    model, batch = make().to(DEVICE), data().to(DEVICE)  # type: ignore[operator]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, given = state_of(model), copy.deepcopy(batch)
    random_states = random_state()
    try:
        check(model, squares, batch, engine)
    except ValueError:
        assert refused
    else:
        assert not refused
    assert all(map(torch.equal, random_states, random_state()))
    assert same(before, state_of(model))
    assert torch.equal(batch, given)
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


class Squeezes(nn.Module):
    """Takes any number of examples but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze()


def test_a_model_that_squeezes_its_output_is_taken() -> None:
    model, x = Squeezes(), rows(5)
    assert check(model, lambda model, x: model(x).square(), x).name == "batched"
    one = clipped_sum(model, lambda model, x: model(x).square(), x[:1], lambda norms: torch.ones_like(norms))
    wanted = torch.autograd.grad(model(x[:1]).square(), model.layer.weight)[0]
    torch.testing.assert_close(one.sums["layer.weight"], wanted, rtol=2e-3, atol=1e-6)


def strict(model: nn.Module, batch: Any) -> Tensor:
    """Raises a ValueError where shapes differ, as () and (1,) do."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("loss", [strict, lambda model, batch: model(batch[0]).square()], ids=["strict", "scalar"])
def test_a_model_that_squeezes_its_output_is_trained_on_batches_of_one(loss: Loss) -> None:
    """The comparison of the second step met a batch of one row, and ended the run."""
    data, plan = (rows(20), torch.rand(20)), Mechanism(sampling.Poisson(0.05), 8, 1.0, batch_size=1.0)
    private = PrivateGradient(Squeezes(), loss, plan, seed=0)
    sizes = [len(plan.sampler.draw(20, step, private.key)) for step in range(8)]
    assert 1 in sizes[1:]
    for _ in range(8):
        private.step(data)


@pytest.mark.parametrize("engine", ["vmap", "single"])
def test_engines_that_pass_one_example_say_what_to_change(engine: str) -> None:
    data = rows(5), torch.rand(5)
    with pytest.raises(ValueError, match=r"fails with one example.* squeeze\(-1\) in place of squeeze\(\)$"):
        check(Squeezes(), strict, data, engine)
    check(nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0)), strict, data, engine)  # as squeeze(-1)


class DropsAttention(nn.Module):
    """Dropout as a function, which no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x).softmax(-1), 0.5, self.training)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_as_a_function_is_taken(engine: str) -> None:
    check(DropsAttention(), squares, rows(), engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reentrant_checkpoint_is_refused_with_a_remedy(engine: str) -> None:
    def loss(reentrant: bool) -> Loss:
        return lambda model, x: squares(nn.Identity(), checkpoint(model, x.requires_grad_(), use_reentrant=reentrant))

    with pytest.raises(ValueError, match="give use_reentrant=False"):
        check(nn.Linear(WIDTH, 2), loss(True), rows(), engine)
    if engine != "vmap":  # which takes no hooks on saved tensors
        check(nn.Linear(WIDTH, 2), loss(False), rows(), engine)


def test_no_more_than_a_few_examples_are_looked_at() -> None:
    seen = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(x))
        return squares(model, x)

    batch = torch.cat([rows(4), torch.full((4_996, WIDTH), math.nan)])
    assert check(nn.Linear(WIDTH, 2), loss, batch).name == "batched"
    assert max(seen) <= 1024
    assert sum(seen) <= 2 * 1024


def test_examples_come_from_all_over() -> None:
    """The last row, and one in the middle, are passed through the model."""
    seen: set[float] = set()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.update(x[:, 0].tolist())
        return squares(model, x)

    batch = rows(1000)
    batch[:, 0] = torch.arange(1000)
    check(nn.Linear(WIDTH, 2), loss, batch, "single")
    assert max(seen) > 900
    assert any(300 < value < 700 for value in seen)


def test_the_way_is_that_of_batches_as_large_as_the_one_given() -> None:
    """A few examples are compared and followed; larger batches take another path through the loss."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) <= 20:
            return model(x).square().sum(1)
        order = x[:, 0].argsort()
        return model(x[order]).square().sum(1)[order.argsort()]

    model, rows = nn.Linear(3, 2), torch.randn(60, 3)
    assert check(model, loss, rows[:20]) == Way("batched", "no operation depends on values")
    with pytest.warns(UserWarning, match="batches of some sizes cannot be followed"):
        found = check(model, loss, rows)
    assert found == Way("lifted", "in batches of some sizes, sort works along the dimension of the examples")


class TestTheBatch:
    """What cannot be judged is refused."""

    def test_empty(self) -> None:
        with pytest.raises(ValueError, match="batch must hold an example to check the model on"):
            check(nn.Linear(WIDTH, 2), squares, rows(0))

    def test_without_difference(self) -> None:
        with pytest.raises(ValueError, match="batch must hold examples that differ"):
            check(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)), squares, torch.ones(4, dtype=torch.int64))

    def test_on_another_device(self) -> None:
        with pytest.raises(ValueError, match="batch lies on cpu and the model on meta"):
            check(nn.Linear(WIDTH, 2, device="meta"), squares, rows())


@pytest.mark.parametrize("scale", [1e-20, 1e-24, 1e-36, 1e-42])
def test_gradients_whose_squares_are_no_floats_are_compared_by_what_a_norm_can_tell(scale: float) -> None:
    """An example that is classified beyond doubt; on a CUDA device its norms lose what is below the least float."""
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 2)
    model = nn.Sequential(*layers).to(DEVICE)
    batch = torch.rand(4, 1, 16, 16, device=DEVICE)
    compare(model, lambda model, x: scale * squares(model, x), batch, Attributed(), "bookkeeping")


class Bent(nn.Module):
    """A unit at its bend: beside other rows it is on, and off alone, which ``types`` of float cannot tell apart."""

    def __init__(self, *types: torch.dtype, shares: tuple[float, ...] = (1e-3,)) -> None:
        super().__init__()
        self.types, self.shares = types, shares
        self.large = nn.Linear(WIDTH, 3)
        self.small = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in shares)

    def forward(self, x: Tensor) -> Tensor:
        rounding = 1e-9 * (len(x) > 1) * (x.dtype in self.types)
        at_zero = [unit(x) - unit(x).detach() for unit in self.small]
        units = [share * F.relu(each + rounding) for share, each in zip(self.shares, at_zero, strict=True)]
        return torch.cat([self.large(x), *units], 1)


def test_units_that_rounding_turns_on_are_no_fault() -> None:
    """Kernels differ with the number of rows. In float64 the engine is right, and the difference is small."""
    check(Bent(torch.float32), squares, rows())
    for model in (Bent(torch.float32, torch.float64), Bent(torch.float32, shares=(1.0,))):
        with pytest.raises(UnsupportedModelError, match=r"the gradient of parameter small\.0\.weight"):
            check(model, squares, rows())


def test_a_unit_at_its_bend_excuses_no_other_parameter() -> None:
    with pytest.raises(UnsupportedModelError, match=r"the gradient of parameter small\.1\.weight"):
        check(Bent(torch.float32, shares=(1e-3, 1.0)), squares, rows())


def test_a_gradient_that_is_wrong_is_refused_where_it_is_small() -> None:
    """Half of what it should be, and a million times what a norm may lose."""
    model = nn.Linear(3, 2).to(DEVICE)
    batch = torch.rand(4, 3, device=DEVICE)
    engine = Attributed()

    def half(*given: Any) -> Any:
        found = engine(*given)
        return replace(found, uses={name: use.scaled(0.5) for name, use in found.uses.items()})

    with pytest.raises(UnsupportedModelError, match="does not get the gradient"):
        compare(model, lambda model, x: 1e-12 * squares(model, x), batch, half, "bookkeeping")
