"""Both engines equal the definition on whole networks and on every way of writing a model; what they cannot take is
refused, and norms are never measured too small."""

import gc
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import NETWORKS, ON_ENGINES, output_loss, per_row, sequences
from reference import (
    ENGINES,
    SIMPLE,
    Loss,
    assert_equal,
    assert_norms_bound,
    example_gradients,
    scaled_sum,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dpgrad.grads import ClippedSum, bookkeeping, clipped_sum, single
from dpgrad.grads.precision import MEASURED_ERROR
from dpgrad.grads.scaling import Automatic, Hard, Quotient
from dpgrad.grads.tape import Shared
from dpgrad.grads.uses import Lookup, Outer, Tied
from dpgrad.grads.ways import Attributed
from thinned import thinned, thinned_where

BOTH = tuple(ENGINES)
engines = pytest.mark.parametrize("engine", ENGINES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # where vmap has no batching rule
    pytest.mark.filterwarnings("ignore:the model can neither be followed"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _double(on_device: None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


by_network = pytest.mark.parametrize(("name", "engine"), ON_ENGINES)


@pytest.mark.parametrize(
    ("name", "engine", "rule", "microbatch"),
    thinned_where(lambda *case: case[:2] in ON_ENGINES, NETWORKS, ENGINES, SIMPLE, [None, 1, 3, 100]),
)
def test_network(name: str, engine: str, rule: Quotient, microbatch: int | None) -> None:
    model, batch, loss = NETWORKS[name].model(), NETWORKS[name].batch(), NETWORKS[name].loss
    lengths = torch.tensor(example_norms(model, loss, batch))
    clips = [float(lengths.median()), float(lengths.max()) * 2]  # some are shortened; none is
    for clip in clips:
        assert_equal(model, loss, batch, ENGINES[engine], rule, (clip,), microbatch=microbatch)


@pytest.mark.usefixtures("nothing_older")
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_left_for_the_garbage_collector(name: str) -> None:
    """A pass that is over holds no memory: what holds itself would stand beside the passes after it."""
    model, batch, loss = NETWORKS[name].model(), NETWORKS[name].batch(), NETWORKS[name].loss
    assert torch._dynamo  # imported at first use, and the import holds on to frames
    gc.collect()
    gc.disable()
    try:
        known = bookkeeping.find_layouts(model, loss, batch)
        clipped_sum(model, loss, batch, partial(Hard(), clip=1.0), partial(bookkeeping.gradients, layouts=known))
        assert not [each for each in gc.get_objects() if type(each) is Shared]
    finally:
        gc.enable()


def test_an_autocast_around_many_passes_keeps_none_of_them() -> None:
    """It keeps the weights that it has converted until it ends, and every pass has weights of its own."""
    model = nn.Linear(2048, 1024, dtype=torch.float32)
    x = torch.randn(2, 2048, dtype=torch.float32)
    batch = x, torch.ones(2, dtype=torch.float32)

    def held() -> int:
        if x.is_cuda:
            return torch.cuda.memory_allocated()
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    with torch.autocast(x.device.type, torch.bfloat16):
        known = bookkeeping.find_layouts(model, output_loss, batch)
        before = 0
        for turn in range(40):
            bookkeeping.gradients(model, output_loss, batch, batch[1], layouts=known)
            before = held() if turn == 7 else before
    assert held() - before < 8 * 2 * model.weight.numel()  # of 32 converted weights


def example_norms(model: nn.Module, loss: Loss, batch: Any) -> list[float]:
    gradients = example_gradients(model, loss, batch)
    return [sum(float(each[i].square().sum()) for each in gradients.values()) ** 0.5 for i in range(4)]


class Does(nn.Module):
    """Parts and what is done with them: ``does(self, x)``. A tensor is a parameter."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def lookup(x: Tensor) -> Tensor:
    """Indices 0 to 4 from real data."""
    return (2 * x[..., 0]).long().clamp(-2, 2) + 2


def tied(x_to_x: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """An embedding and a linear layer with one weight."""
    model = Does(x_to_x, tok=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False))
    model.head.weight = model.tok.weight
    return model


def frozen_in_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for parameter in (model[0].weight, model[2].bias, model[3].weight, model[3].bias, model[5].bias):
        parameter.requires_grad_(False)
    return model


def block(own: Any, x: Tensor) -> Tensor:
    return own.b(own.n(own.a(x)).tanh() * own.w + own.p(torch.arange(x.shape[1])))


def parts_of_a_block() -> dict[str, Any]:
    return {
        "a": nn.Linear(5, 4), "b": nn.Linear(4, 5), "n": nn.LayerNorm(4), "w": torch.randn(4), "p": nn.Embedding(6, 4),
    }  # fmt: skip


def slots_changed(own: Any, x: Tensor) -> Tensor:
    x = own.a(x)
    x += 1
    x[:, 0].mul_(2)
    x[:, 1] = 0.5
    return own.b(x.relu_())


def noted(own: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = own.a(x).tanh()
    return own.a(x) * teacher


# Ways of writing a model on x (batch, 6, 5).
WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "tied modules": lambda: tied(lambda own, x: own.head(own.tok(lookup(x)).tanh())),
    "tied by F.linear": lambda: tied(lambda own, x: F.linear(own.tok(lookup(x)).tanh(), own.tok.weight)),
    "tied by a product": lambda: tied(lambda own, x: own.tok(lookup(x)).sin() @ own.tok.weight.t()),
    "tied twice over": lambda: tied(
        lambda own, x: own.head(own.tok(lookup(x)) + own.tok(lookup(x).flip(1)).tanh())
        + own.head(own.tok(lookup(x)).sin())
    ),
    "tied and changed": lambda: tied(lambda own, x: own.head(own.tok(lookup(x))) + (own.tok.weight.sin() * 2).sum()),
    "reused": lambda: Does(lambda own, x: own.a(own.a(x).tanh()).tanh() + own.a(x.flip(1)), a=nn.Linear(5, 5)),
    "reused at two ranks": lambda: Does(lambda own, x: own.a(x).sum(1).tanh() + own.a(x[:, 0]), a=nn.Linear(5, 5)),
    "reused flat and not": lambda: Does(
        lambda own, x: own.a(x.flatten(0, 1)).view(x.shape).sum(1).tanh() + own.a(x[:, 0]), a=nn.Linear(5, 5)
    ),
    "reused convolution": lambda: Does(lambda own, x: own.a(own.a(x).tanh()), a=nn.Conv1d(6, 6, 3, padding=1)),
    "frozen in part": frozen_in_part,
    "checkpointed": lambda: Does(
        lambda own, x: checkpoint(partial(block, own), x, use_reentrant=False), **parts_of_a_block()
    ),
    "checkpointed twice": lambda: Does(
        lambda own, x: checkpoint(
            partial(block, own), checkpoint(partial(block, own), x, use_reentrant=False).tanh(), use_reentrant=False
        ),
        **parts_of_a_block(),
    ),
    "time first": lambda: Does(
        lambda own, x: block(own, x).transpose(0, 1).contiguous().sin().transpose(0, 1), **parts_of_a_block()
    ),
    "time first in every layer": lambda: Does(
        lambda own, x: own.n(own.a(x.transpose(0, 1)).tanh()).transpose(0, 1), a=nn.Linear(5, 4), n=nn.LayerNorm(4)
    ),
    "flattened": lambda: Does(
        lambda own, x: own.n(own.a(x.reshape(-1, 5)).tanh()).view(len(x), 6, 4), a=nn.Linear(5, 4), n=nn.LayerNorm(4)
    ),
    "flattened, and a bare weight": lambda: Does(
        lambda own, x: (own.a(x.flatten(0, 1)).tanh() * own.w).view(len(x), 6, 4), a=nn.Linear(5, 4), w=torch.randn(4)
    ),
    "flattened, time first": lambda: Does(
        lambda own, x: (own.a(x.transpose(0, 1).reshape(-1, 5)).tanh() * own.w).view(6, len(x), 4).transpose(0, 1),
        a=nn.Linear(5, 4), w=torch.randn(4),
    ),
    "frames of a film": lambda: Does(
        lambda own, x: own.a(x.reshape(-1, 1, 5)).view(len(x), -1), a=nn.Conv1d(1, 2, 3, padding=1)
    ),
    "two views in one batch": lambda: Does(
        lambda own, x: torch.stack(own.b(own.a(torch.cat([x, x.flip(1)])).tanh()).chunk(2), 1),
        a=nn.Linear(5, 4), b=nn.Linear(4, 3),
    ),
    "heads in the batch": lambda: Does(
        lambda own, x: own.n(own.a(x).view(len(x), 6, 2, 2).transpose(1, 2).reshape(-1, 6, 2)).view(len(x), -1).sin(),
        a=nn.Linear(5, 4), n=nn.LayerNorm(2),
    ),
    "positions": lambda: Does(
        lambda own, x: (own.a(x) + own.p(torch.arange(x.shape[1]))).sin(), a=nn.Linear(5, 4), p=nn.Embedding(8, 4)
    ),
    "positions of a row": lambda: Does(
        lambda own, x: (own.a(x) + own.p(torch.arange(x.shape[1]).unsqueeze(0))).sin(),
        a=nn.Linear(5, 4), p=nn.Embedding(8, 4),
    ),
    "positions of the batch": lambda: Does(
        lambda own, x: (own.a(x) + own.p(torch.arange(x.shape[1]).expand(x.shape[:2]))).sin(),
        a=nn.Linear(5, 4), p=nn.Embedding(8, 4),
    ),
    "positions through a layer": lambda: Does(
        lambda own, x: (x + own.b(own.a(own.p(torch.arange(6))).tanh())).sin(),
        a=nn.Linear(4, 4), b=nn.Linear(4, 5), p=nn.Embedding(8, 4),
    ),
    "positions alone": lambda: Does(
        lambda own, x: x.sum(-1) * own.b(own.a(torch.eye(6)).tanh()).squeeze(-1), a=nn.Linear(6, 4), b=nn.Linear(4, 1)
    ),
    "a long constant": lambda: Does(  # 247 = 13·19: a multiple of two numbers of rows that are tried
        lambda own, x: own.a(torch.linspace(0, 1, 247 * 4).view(247, 4)).sum(0).sin() * x[:, 0, :4], a=nn.Linear(4, 4)
    ),
    "changed in place": lambda: Does(slots_changed, a=nn.Linear(5, 4), b=nn.Linear(4, 3)),
    "ReLU in place": lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
    "without gradient": lambda: Does(noted, a=nn.Linear(5, 4)),
    "parameters in a list": lambda: Does(
        lambda own, x: sum(weight * x for weight in own.all), all=nn.ParameterList([torch.randn(5), torch.randn(6, 1)])
    ),
    "nothing depends on it": lambda: Does(lambda own, x: own.a(x), a=nn.Linear(5, 4), b=nn.Linear(5, 4)),
}  # fmt: skip
NOT_BY_VMAP = {"checkpointed", "checkpointed twice"}  # torch.func does not take saved-tensor hooks


# The length, its parts and multiples, and primes.
SIZES = {"bookkeeping": [1, 2, 3, 5, 6, 7, 12], "vmap": [1, 3], "lifted": [1, 3, 12], "single": [3]}


@pytest.mark.parametrize(
    ("name", "engine", "examples"),
    [
        (name, engine, examples)
        for name in WRITTEN
        for engine in BOTH
        for examples in SIZES[engine]
        if engine == "bookkeeping" or name not in NOT_BY_VMAP
    ],
)
def test_way_of_writing(name: str, engine: str, examples: int) -> None:
    rule = SIMPLE[examples % 4]
    microbatch = 5 if examples == 12 else None
    assert_equal(
        WRITTEN[name](), output_loss, sequences(examples), ENGINES[engine], rule, (2.0,), microbatch=microbatch
    )


class TestKnownLayouts:
    """Layouts are found once and hold for batches of any size, and of other lengths."""

    @pytest.mark.parametrize("name", WRITTEN)
    def test_other_batches(self, name: str) -> None:
        model = WRITTEN[name]()
        known = bookkeeping.find_layouts(model, output_loss, sequences(3))
        engine = partial(bookkeeping.gradients, layouts=known)
        for examples in (1, 6, 4):
            assert_equal(model, output_loss, sequences(examples), engine, Hard(), (2.0,))

    @pytest.mark.parametrize("first", [1, 2, 6])
    @pytest.mark.parametrize("name", ["flattened", "flattened, and a bare weight", "positions", "time first"])
    def test_other_lengths(self, name: str, first: int) -> None:
        model = {
            **WRITTEN,
            "flattened": lambda: Does(lambda own, x: own.a(x.reshape(-1, 5)).view(len(x), -1).sin(), a=nn.Linear(5, 4)),
            "flattened, and a bare weight": lambda: Does(
                lambda own, x: (x.reshape(-1, 5) * own.w).view(len(x), -1).sin(), w=torch.randn(5)
            ),
        }[name]()
        known = bookkeeping.find_layouts(model, output_loss, sequences(3, first, 5))
        for length in (6, 3, 1):
            batch = sequences(4, length, 5)
            assert_equal(model, output_loss, batch, partial(bookkeeping.gradients, layouts=known), Hard(), (2.0,))

    def test_another_path_is_learnt(self) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            return own.a(x) if own.plain else (own.a(x.flatten(0, 1)) * own.w).view(*x.shape[:2], 4).sin()

        model = Does(forward, a=nn.Linear(5, 4), w=torch.randn(4), plain=True)
        engine = partial(bookkeeping.gradients, layouts=bookkeeping.find_layouts(model, output_loss, sequences()))
        for model.plain in (True, False, True):
            assert_equal(model, output_loss, sequences(), engine, Hard(), (2.0,))


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences(enforce_sorted: bool) -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        lengths = x[:, 0, 0].abs().mul(10).long().clamp(1, 6)
        if enforce_sorted:
            lengths = torch.full_like(lengths, 6)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=enforce_sorted)
        out, state = own.lstm(packed)
        return torch.cat([pad_packed_sequence(out, batch_first=True, total_length=6)[0].flatten(1), state[0][0]], 1)

    model = Does(forward, lstm=nn.LSTM(5, 3, batch_first=True))
    assert_equal(model, output_loss, sequences(5), ENGINES["bookkeeping"], Automatic(), (2.0,), microbatch=3)


@pytest.mark.parametrize(
    ("name", "masked", "microbatch", "engine"),
    thinned(
        ["tied modules", "flattened", "flattened, time first", "positions", "reused convolution"],
        ["no", "examples", "rows"],
        [None, 1, 2, 5],
        ENGINES,
        pairs=True,
    ),
)
def test_several_rows(name: str, masked: str, microbatch: int | None, engine: str) -> None:
    examples, rows = 4, 3
    batch = pytree.tree_map(lambda leaf: leaf.unflatten(0, (examples, rows)), sequences(examples * rows))
    mask = {
        "no": None,
        "examples": torch.tensor([True, False, True, True]),
        "rows": torch.tensor([[True, False, False], [True, True, True], [False, False, False], [True, False, True]]),
    }[masked]
    assert_equal(
        WRITTEN[name](), output_loss, batch, ENGINES[engine], Automatic(), (2.0,),
        mask=mask, several_rows=True, microbatch=microbatch,
    )  # fmt: skip


@engines
def test_rows_of_one_example_may_act_on_each_other(engine: str) -> None:
    """The loss sees an example's rows together; its gradient is that of their mean, and no other example is in it."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def contrast(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x).unflatten(0, (-1, 3))
        return (found - found.mean(1, keepdim=True)).square().sum(-1).flatten()

    x = torch.randn(4, 3, 5)
    each = [torch.autograd.grad(contrast(model, rows).mean(), list(model.parameters())) for rows in x]
    names = [name for name, _ in model.named_parameters()]
    gradients = {name: torch.stack(of_one) for name, of_one in zip(names, zip(*each, strict=True), strict=True)}
    wanted = scaled_sum(gradients, Hard(), (0.1,))
    found = clipped_sum(model, contrast, x, partial(Hard(), clip=0.1), ENGINES[engine], several_rows=True, microbatch=3)
    torch.testing.assert_close(dict(found.sums), wanted, rtol=1e-8, atol=1e-10)


@engines
def test_mask_of_examples(engine: str) -> None:
    mask = torch.tensor([False, True, True, False, True])
    assert_equal(
        WRITTEN["positions"](), output_loss, sequences(5), ENGINES[engine], Automatic(), mask=mask, microbatch=2
    )


@engines
@pytest.mark.parametrize("rule", SIMPLE)
@pytest.mark.parametrize("name", ["transformer, tied", "CNN"])
def test_groups_have_their_own_clip(name: str, rule: Quotient, engine: str) -> None:
    model, batch, loss = NETWORKS[name].model(), NETWORKS[name].batch(), NETWORKS[name].loss
    groups = {parameter: place % 3 for place, (parameter, _) in enumerate(model.named_parameters())}
    assert_equal(model, loss, batch, ENGINES[engine], rule, (0.05, 0.4, 1e3), groups, microbatch=3)


Pair = namedtuple("Pair", ["x", "y"])
TREES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tensor": (lambda x, y: torch.cat([x, y[:, None]], 1), lambda batch: (batch[:, :-1], batch[:, -1])),
    "tuple": (lambda x, y: (x, y), lambda batch: batch),
    "list": (lambda x, y: [x, y], lambda batch: (batch[0], batch[1])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "nested": (lambda x, y: {"in": [(x, y * 2)], "out": y}, lambda batch: (batch["in"][0][0], batch["out"])),
    "namedtuple": (Pair, lambda batch: (batch.x, batch.y)),
}


@engines
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_batches_of_every_kind(kind: str, microbatch: int | None, engine: str) -> None:
    make, read = TREES[kind]
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        return (model(x).squeeze(1) - y).square()

    assert_equal(model, loss, make(torch.randn(5, 5), torch.randn(5)), ENGINES[engine], Hard(), microbatch=microbatch)


@engines
def test_sums_of_disjoint_examples_add(engine: str) -> None:
    model, (x, weights) = WRITTEN["tied modules"](), sequences(7)
    scale = partial(Automatic(), clip=1.0)

    def total(start: int, stop: int) -> ClippedSum:
        return clipped_sum(model, output_loss, (x[start:stop], weights[start:stop]), scale, ENGINES[engine])

    parts, whole = total(0, 3) + total(3, 4) + total(4, 7), total(0, 7)
    torch.testing.assert_close(dict(parts.sums), dict(whole.sums), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="sums of different parameters do not add"):
        whole + ClippedSum({"other": torch.zeros(1)})


class TestNorms:
    """A norm is not measured below the norm of what is summed, and above it by no more than its margin for rounding."""

    @by_network
    def test_in_float64(self, name: str, engine: str) -> None:
        network = NETWORKS[name]
        model, batch = network.model(), network.batch()
        found = ENGINES[engine](model, network.loss, batch, torch.ones(4))
        wanted = example_gradients(model, network.loss, batch)
        assert_norms_bound(found, wanted, error=MEASURED_ERROR[torch.float64], excess=1e-6)

    @by_network
    def test_in_float32(self, name: str, engine: str) -> None:
        """Against the gradients that this pass computed, whose own rounding is no part of the bound."""
        network = NETWORKS[name]
        torch.set_default_dtype(torch.float32)
        model, batch = network.model(), network.batch()
        found = ENGINES[engine](model, network.loss, batch, torch.ones(4))
        summed = {
            name: torch.stack([use.measured()[1].weighted_sum(one) for one in torch.eye(4)])
            for name, use in found.uses.items()
        }
        assert_norms_bound(found, summed, error=MEASURED_ERROR[torch.float32], excess=0.02)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("left", [0.0, 1e-7, 1e-4, 1e-2, 1.0])
    def test_when_tied_uses_cancel(self, left: float, dtype: torch.dtype) -> None:
        """R + O with O = −R but for ``left`` of it: what is left is measured, not lost in the difference."""
        ids = torch.tensor([[0, 3, 3, 1]])
        r = torch.randn(1, 4, 6, dtype=dtype)
        matrix = Lookup(ids, r, 5).per_example()[0].double()
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        outer = Outer(v[None].to(dtype), (-(1 - left) * u * s).T[None].to(dtype))
        use = Tied(Lookup(ids, r, 5), outer)
        exact = Tied(Lookup(ids, r.double(), 5), Outer(outer.inputs.double(), outer.gradients.double()))
        true = exact.per_example().norm()
        measured, source = use.measured()
        summed = source.weighted_sum(torch.ones(1, dtype=dtype)).double().norm()
        assert measured.double() >= max(true, summed) * (1 - MEASURED_ERROR[dtype])
        assert measured.double() <= true * 1.001 + 100 * torch.finfo(dtype).eps ** 0.5 * matrix.norm()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("width", [3, 40])
    def test_when_positions_cancel(self, width: int, dtype: torch.dtype) -> None:
        """Both ways of a product: instantiated, and by inner products of positions."""
        a, g = torch.randn(3, 4, width, dtype=dtype), torch.randn(3, 4, width, dtype=dtype)
        a, g = torch.cat([a, a], 1), torch.cat([g, -g], 1)
        use = Outer(a, g)
        measured, source = use.measured()
        for one in torch.eye(3, dtype=dtype):
            summed = source.weighted_sum(one).double().norm()
            assert (one * measured).sum().double() >= summed * (1 - MEASURED_ERROR[dtype])


class Doubled(torch.autograd.Function):
    """y = 2 x w, in a way that torch functions do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return 2 * x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * g * torch.Tensor(w), (2 * g * x).sum((0, 1))


class Reversed(torch.autograd.Function):
    """y = x, with the gradient turned around: without a setup_context, which vmap would need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def row_by_row(own: Any, x: Tensor) -> Tensor:
    rows = own.a(x)
    return torch.stack([own.b(rows[0]), *(own.b(row) for row in rows[1:])])


def first_row_alone(own: Any, x: Tensor) -> Tensor:
    h = own.a(x)
    return h[..., :3] + own.b(h[0])


def with_a_row_more(own: Any, x: Tensor) -> Tensor:
    return own.b(torch.cat([own.a(x), torch.ones(1, 6, 4)]))[: len(x)]


def by_length(own: Any, x: Tensor) -> Tensor:
    """Sorted, worked on, and put back: every row is right, in the order of another."""
    order = x[:, 0, 0].argsort()
    return own.a(x[order])[order.argsort()]


def selected(own: Any, x: Tensor) -> Tensor:
    """Only some positions of each row, as many as the data say."""
    chosen = x[..., 0] > 0
    values = own.b(own.a(x)[chosen]).sum(-1)
    rows = torch.arange(len(x)).unsqueeze(1).expand_as(chosen)[chosen]
    return torch.zeros(len(x)).index_add(0, rows, values).unsqueeze(1)


def changed_weight(own: Any, x: Tensor) -> Tensor:
    weight = own.w * 1
    weight[0] = 0
    return x * weight


def two_layers() -> dict[str, Any]:
    return {"a": nn.Linear(5, 4), "b": nn.Linear(4, 3)}


# What is neither followed through the batch nor guessed: the way it goes instead.
OTHER_WAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "row by row": (lambda: Does(row_by_row, **two_layers()), "lifted"),
    "a row more": (lambda: Does(with_a_row_more, **two_layers()), "lifted"),
    "sorted": (lambda: Does(by_length, a=nn.Linear(5, 4)), "lifted"),
    "two dimensions": (
        lambda: Does(lambda own, x: own.a(x) + own.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(5, 4)), "lifted"
    ),
    "repeated within the batch": (
        lambda: Does(lambda own, x: own.w.repeat(len(x), 1).view_as(x) * x, w=torch.randn(6, 5)), "lifted"
    ),
    "selected": (lambda: Does(selected, **two_layers()), "lifted"),
    "computed weight changed in place": (lambda: Does(changed_weight, w=torch.randn(5)), "lifted"),
    "custom function": (lambda: Does(lambda own, x: own.b(Reversed.apply(own.a(x))), **two_layers()), "certified"),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "custom function": (lambda: Does(lambda own, x: Doubled.apply(x, own.w), w=torch.randn(5)), "cannot be followed"),
    "custom function of a computed weight": (
        lambda: Does(lambda own, x: Doubled.apply(x, own.w.exp()), w=torch.randn(5)), "cannot be followed"
    ),
    "parameter changed in place": (
        lambda: Does(lambda own, x: own.w.data.clamp_(-1, 1).sum() + x * own.w, w=torch.randn(5)), "not in place"
    ),
    "transposed and looked up": (
        lambda: Does(lambda own, x: F.embedding(lookup(x), own.w.t()), w=torch.randn(3, 5)), "other than in a product"
    ),
    "max_norm": (lambda: Does(lambda own, x: own.e(lookup(x)), e=nn.Embedding(5, 3, max_norm=1.0)), "max_norm"),
    "scale_grad_by_freq": (
        lambda: Does(lambda own, x: own.e(lookup(x)), e=nn.Embedding(5, 3, scale_grad_by_freq=True)),
        "scale_grad_by_freq",
    ),
    "BatchNorm": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(5, 3)), "BatchNorm in training mode"),
    "kept outside its module": (lambda: hidden(), "kept outside its module"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_what_cannot_be_followed_goes_another_way(name: str) -> None:
    make, way = OTHER_WAYS[name]
    model, engine = make(), Attributed()
    assert_equal(model, output_loss, sequences(4), engine, Hard())
    assert engine.way.name == way, engine.way


def hidden() -> nn.Module:
    model = Does(lambda own, x: x * own.kept[0], w=torch.randn(5))
    model.kept = [model.w]
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name: str) -> None:
    """The gradients would be another example's, or lost: never returned."""
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        clipped_sum(make(), output_loss, sequences(6), partial(Hard(), clip=1.0))


@pytest.mark.parametrize("name", ["custom function", "custom function of a computed weight"])
def test_one_example_at_a_time_takes_what_is_refused(name: str) -> None:
    """The way out that the messages name."""
    assert_equal(REFUSED[name][0](), output_loss, sequences(4), single.gradients, Hard())


def test_order_is_seen_behind_a_layer_of_zeros() -> None:
    """At first no gradient passes a last layer of zeros; the order of what is before it is found all the same."""
    model = WRITTEN["flattened, time first"]()
    whole = nn.Sequential(model, nn.Linear(4, 2))
    nn.init.zeros_(whole[1].weight)
    known = bookkeeping.find_layouts(whole, output_loss, sequences(3))
    nn.init.normal_(whole[1].weight)
    assert_equal(whole, output_loss, sequences(4), partial(bookkeeping.gradients, layouts=known), Hard())


def test_loss_with_a_penalty_on_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return per_row(model(batch[0])) + 0.1 * sum(weight.square().sum() for weight in model.parameters())

    for engine in ENGINES.values():
        assert_equal(model, loss, sequences(3), engine, Hard(), (2.0,))


def test_the_reference_tells_a_wrong_sum() -> None:
    """The comparison fails where one example's gradient is charged to another."""
    model, batch = WRITTEN["positions"](), sequences(4)
    gradients = example_gradients(model, output_loss, batch)
    wanted = scaled_sum(gradients, Hard(), (2.0,))
    mixed = {name: (each + each.roll(1, 0)) / 2 for name, each in gradients.items()}
    off = scaled_sum(mixed, Hard(), (2.0,))
    assert max(float((off[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted) > 0.01
