"""Straight-line code equals the function it was recorded from, bit by bit, or is refused."""

import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from networks import NETWORKS, VOCABULARY, Network, class_loss, images, labelled_tokens, output_loss, sequences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dpgrad.grads.clip import Scaled, _factors
from dpgrad.grads.precision import own_products, precision_settings
from dpgrad.grads.scaling import Automatic, Bounded, Hard, Psac, Psasc, ScaleRule
from dpgrad.grads.sums import Loss, trainable
from dpgrad.grads.traced import CannotTraceError, Traced
from dpgrad.grads.ways import Attributed

Body = Callable[..., tuple[Tensor, ...]]


def accumulate(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    rule: ScaleRule | None = None,
    rows: int = 1,
    groups: Mapping[str, int] | None = None,
    dropping: bool = False,
) -> tuple[Body, tuple[Tensor, ...]]:
    """The body of a step, (leaves of the batch, row weights, clip) -> (sums, whether all is finite), and its inputs.

    With ``dropping`` rows that are not finite are left out without a look at whether there are any.
    """
    leaves, spec = pytree.tree_flatten(batch)
    engine, names, rule = Attributed(), list(trainable(model)), rule or Hard()
    weights = torch.full((len(leaves[0]),), 1 / rows, dtype=next(model.parameters()).dtype)

    def body(*given: Tensor) -> tuple[Tensor, ...]:
        *data, of_rows, clip = given
        found = engine(model, loss, pytree.tree_unflatten(data, spec), of_rows, rows)
        with torch.no_grad(), own_products():
            norms, uses = found._measured(groups or {})
            factors, keep = _factors(norms, Bounded(rule, clip))
            if dropping:
                uses = {name: use.kept(keep, None) for name, use in uses.items()}
            scaled = Scaled(norms, factors, keep, uses, groups)
            return (*map(scaled.sum, names), keep.all())

    clip = torch.full((max(groups.values()) + 1, 1), 0.7) if groups else torch.tensor(0.7)
    body(*leaves, weights, clip)
    engine.decided()
    body(*leaves, weights, clip)
    assert engine.way.name == "batched"
    return body, (*leaves, weights, clip)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Equal bit by bit: NaN is NaN, and -0 is not 0."""
    assert len(one) == len(other)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
        for a, b in zip(one, other, strict=True)
    )


def check(model: nn.Module, body: Body, inputs: tuple[Tensor, ...]) -> Traced:
    """The trace of a body, which equals it on other rows and at other parameters too."""
    traced = Traced(body, inputs, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        *data, weights, clip = inputs
        given = (*(leaf.roll(turn, 0) for leaf in data), weights.roll(turn, 0), clip / (turn + 1))
        torch.manual_seed(turn)
        expected = body(*given)
        torch.manual_seed(turn)
        found = traced(*given)
        assert same(found, expected)
        assert any(bool(each.any()) for each in found[:-1])
        for parameter, total in zip(trainable(model).values(), found[:-1], strict=True):
            parameter.grad = total.to(parameter.dtype)
        optimizer.step()
    return traced


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, 5)
        self.gru, self.head = nn.GRU(5, 4, num_layers=2, batch_first=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.tok(ids))[0][:, -1])


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), *between, nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def points(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 5), torch.randint(3, (rows,))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 5))


MORE = {
    "MLP": Network(mlp, points, class_loss),
    "MLP, dropout": Network(lambda: mlp(nn.Dropout(0.4)), points, class_loss),
    "GRU": Network(Gru, labelled_tokens, class_loss),
    "GroupNorm": Network(normalized, images(3, 8, 5), class_loss),
    "sequences": Network(lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6)), sequences, output_loss),
}  # fmt: skip
EVERY = {**NETWORKS, **MORE}


@pytest.mark.parametrize("name", EVERY)
def test_equals_the_body_at_every_step(name: str) -> None:
    torch.manual_seed(0)
    network = EVERY[name]
    model, batch = network.model(), network.batch()
    check(model, *accumulate(model, network.loss, batch))


@pytest.mark.parametrize(
    "rule",
    [Automatic(), Psac(), Psasc(0.5), lambda norms, clip: clip / (norms + 1)],
    ids=["automatic", "psac", "psasc", "own"],
)
def test_equals_the_body_for_every_rule(rule: ScaleRule) -> None:
    torch.manual_seed(0)
    model = mlp()
    check(model, *accumulate(model, class_loss, points(), rule))


@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer, tied", "LSTM"])
def test_equals_the_body_for_several_rows_and_groups(name: str) -> None:
    torch.manual_seed(0)
    network = EVERY[name]
    model, batch = network.model(), network.batch()
    groups = {each: place % 2 for place, each in enumerate(trainable(model))}
    check(model, *accumulate(model, network.loss, batch, rows=2, groups=groups))


@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer, tied", "ViT", "LSTM"])
def test_equals_the_body_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    network = EVERY[name]
    model, batch = network.model(), network.batch()
    with torch.autocast("cpu", torch.bfloat16):
        traced = check(model, *(made := accumulate(model, network.loss, batch)))
    assert not traced.takes(*made[1]), "autocast is off"


def test_equals_the_body_on_many_examples_in_double() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    x, y = points(300)
    check(model, *accumulate(model, class_loss, (x.double(), y)))


@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer, tied"])
def test_a_row_that_is_not_finite_is_dropped(name: str) -> None:
    torch.manual_seed(0)
    network = EVERY[name]
    model, batch = network.model(), network.batch()
    body, inputs = accumulate(model, network.loss, batch, dropping=True)
    traced = check(model, body, inputs)
    *others, weights, clip = inputs
    weights = weights.clone()
    weights[1] = torch.nan
    found = traced(*others, weights, clip)
    assert same(found, body(*others, weights, clip))
    assert all(bool(each.isfinite().all()) for each in found)


def test_a_row_that_is_not_finite_is_seen() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), points()
    body, inputs = accumulate(model, class_loss, (x, y))
    traced = Traced(body, inputs, model)
    assert bool(traced(*inputs)[-1])
    bad = x.clone()
    bad[2, 1] = torch.nan
    assert not bool(traced(bad, *inputs[1:])[-1])
    assert same(traced(bad, *inputs[1:]), body(bad, *inputs[1:]))


def test_dropout_is_drawn_anew_from_the_default_generator() -> None:
    torch.manual_seed(0)
    model = mlp(nn.Dropout(0.5))
    body, inputs = accumulate(model, class_loss, points())
    before = torch.get_rng_state()
    traced = Traced(body, inputs, model)
    assert torch.equal(torch.get_rng_state(), before), "tracing draws nothing"
    assert not same(traced(*inputs), traced(*inputs))
    torch.manual_seed(5)
    expected = body(*inputs), body(*inputs)
    torch.manual_seed(5)
    assert same(traced(*inputs), expected[0])
    assert same(traced(*inputs), expected[1])


class Buffered(nn.Module):
    """A linear layer times a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_follows_buffers_and_parameters_wherever_they_lie() -> None:
    model = Buffered()
    body, inputs = accumulate(model, class_loss, points())
    traced = Traced(body, inputs, model)
    first = traced(*inputs)
    model.scale.mul_(2)
    assert same(traced(*inputs), body(*inputs))
    model.layer.weight.data = torch.randn(3, 5)
    model.scale.data = torch.rand(3)
    assert same(traced(*inputs), body(*inputs))
    assert not same(traced(*inputs), first)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert same(traced(*inputs), body(*inputs))
    model.layer.weight.data = torch.randn(5, 3).t()
    assert not traced.takes(*inputs), "the weight has other strides"


def test_parameters_of_one_buffer() -> None:
    flat = torch.randn(24)
    model = nn.ParameterList([nn.Parameter(flat[:12]), nn.Parameter(flat[12:])])
    x = torch.randn(4, 3)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        return x @ model[0].view(3, 4), x @ model[1].view(4, 3).t()

    traced = Traced(body, [x], model)
    assert same(traced(x), body(x))
    flat.mul_(3)
    assert same(traced(x), body(x))
    model[1].data = torch.randn(12)
    assert not traced.takes(x), "they lie apart now"


def test_constants_of_the_loss_are_read_where_they_lie() -> None:
    model, weights = mlp(), torch.tensor([1.0, 2.0, 3.0])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        mask = torch.ones(3, 3).triu().bool()
        shift = torch.tensor([0.5, 0.25, 0.0]).mul_(2)
        width = int(torch.arange(3).sum())  # of sizes alone
        return F.cross_entropy(
            (model(batch[0]) + shift) @ mask.float() / width, batch[1], weight=weights, reduction="none"
        )

    body, inputs = accumulate(model, loss, points())
    traced = check(model, body, inputs)
    weights.mul_(2)
    assert same(traced(*inputs), body(*inputs))
    assert same(traced(*inputs), body(*inputs)), "a constant that is changed in place is made anew"


def test_results_are_tensors_of_their_own() -> None:
    model, x = nn.Linear(3, 3), torch.randn(4, 3)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x, x[1:], model.weight, model.weight.t(), y, y, y[0], torch.zeros(3), torch.tensor([1.0])

    traced = Traced(body, [x], model)
    kept, expected = x.clone(), body(x)
    found = traced(x)
    assert same(found, expected)
    for each in found:
        each.add_(1)
    assert same(traced(x), expected)
    assert torch.equal(x, kept)
    assert len({each.untyped_storage().data_ptr() for each in found}) == len(found)
    assert not any(each.requires_grad for each in found)


@contextmanager
def set_to(setting: Any, value: str) -> Iterator[None]:
    before = setting.fp32_precision
    setting.fp32_precision = value
    try:
        yield
    finally:
        setting.fp32_precision = before


def test_lower_precision_is_refused_before_and_after() -> None:
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    traced = Traced(lambda x: (model(x),), [x], model)
    for setting in precision_settings()[3:]:  # those of the CPU
        with set_to(setting, "bf16"):
            with pytest.raises(CannotTraceError, match="lower precision"):
                Traced(lambda x: (model(x),), [x], model)
            with pytest.raises(CannotTraceError, match="settings"):
                traced(x)
    assert traced.takes(x)


@pytest.mark.parametrize(
    "other",
    [torch.randn(5, 3), torch.randn(4, 3).double(), torch.randn(3, 4).t(), torch.randn(1, 3).expand(4, 3)],
    ids=["rows", "type", "strides", "expanded"],
)
def test_other_inputs_are_refused(other: Tensor) -> None:
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    traced = Traced(lambda x: (model(x),), [x], model)
    assert traced.takes(x)
    for given in ([other], [], [x, x]):
        assert not traced.takes(*given)
        with pytest.raises(CannotTraceError, match="not those of the call"):
            traced(*given)


class Stubborn(nn.Module):
    """Does one thing that no trace can keep."""

    def __init__(self, does: Callable[["Stubborn", Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.layer, self.calls = does, nn.Linear(3, 3), 0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.does(self, x))


def counted(model: Stubborn, x: Tensor) -> Tensor:
    model.calls += 1
    return x * (model.calls > 100)


def updated(model: Stubborn, x: Tensor) -> Tensor:
    model.seen.add_(1)
    return x


def caught(model: Stubborn, x: Tensor) -> Tensor:
    try:
        return x * float(x[0, 0])
    except Exception:  # the refusal itself
        return x


REFUSED: dict[str, Callable[[Stubborn, Tensor], Tensor]] = {
    "item": lambda model, x: x * x.sum().item(),
    "branch": lambda model, x: x if x.sum() > -1e9 else -x,
    "tolist": lambda model, x: x * x.tolist()[0][0],
    "numpy": lambda model, x: x * torch.from_numpy(np.asarray([x.detach().numpy()[0, 0]])),
    "branch on a list": lambda model, x: x if max(x.flatten().tolist()) < 1e9 else -x,
    "branch on an array": lambda model, x: x if x.detach().numpy().max() < 1e9 else -x,
    "nonzero": lambda model, x: x + x.nonzero().sum(),
    "mask": lambda model, x: x + x[x > 0].sum(),
    "unique": lambda model, x: x + x.unique().sum(),
    "equal": lambda model, x: x * torch.equal(x, x),
    "repeated": lambda model, x: x + x.repeat_interleave((x[:, 0] > 0).long() + 1, 0).sum(),
    "parameter read": lambda model, x: x * model.layer.bias[0].item(),
    "buffer read": lambda model, x: x * float(model.seen[0]),
    "random numbers read": lambda model, x: x if torch.rand(()).item() < 2 else -x,
    "counter": counted,
    "random": lambda model, x: x * (random.random() < 2),
    "numpy random": lambda model, x: x * (np.random.rand() < 2),
    "own generator": lambda model, x: x * torch.rand((), generator=torch.Generator()),
    "input in place": lambda model, x: x.mul_(2),
    "buffer in place": updated,
    "memory in place": lambda model, x: (x * 2).resize_(4, 3),
    "error caught": caught,
    "sparse": lambda model, x: x + x.to_sparse().to_dense(),
    "as another type": lambda model, x: x + (x * 2).view(torch.int32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(name: str) -> None:
    model, x = Stubborn(REFUSED[name]), torch.randn(4, 3)
    kept, seen, drawn = x.clone(), model.seen.clone(), torch.get_rng_state()
    with pytest.raises(CannotTraceError):
        Traced(lambda x: (model(x),), [x], model)
    assert torch.equal(x, kept)
    assert torch.equal(model.seen, seen)
    assert torch.equal(torch.get_rng_state(), drawn)


class Checkpointed(nn.Module):
    """Runs its inner part again in the backward pass."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(5, 6), nn.Dropout(rate), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


def test_what_runs_again_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    model = Checkpointed(0.0)
    check(model, *accumulate(model, class_loss, points()))
    model = Checkpointed(0.5)
    body, inputs = accumulate(model, class_loss, points())
    with pytest.raises(CannotTraceError, match="does not run as the function does"):
        Traced(body, inputs, model)  # the second mask would not be the first one


def test_random_numbers_that_are_taken_back() -> None:
    model = nn.Linear(3, 3)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        with torch.random.fork_rng([]):
            torch.rand(3)
        return (model(x),)

    with pytest.raises(CannotTraceError, match="does not run as the function does"):
        Traced(body, [torch.randn(4, 3)], model)  # code would move the generator


def test_inputs_that_are_expanded() -> None:
    model, x, weights = nn.Linear(3, 3), torch.randn(4, 3), torch.ones(1).expand(4)

    def body(x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        return (model(x) * weights[:, None],)

    traced = Traced(body, [x, weights], model)
    assert same(traced(2 * x, torch.rand(1).fill_(3).expand(4)), body(2 * x, torch.full((4,), 3.0)))


def test_a_tensor_from_outside_that_is_changed_is_refused() -> None:
    model, total = nn.Linear(3, 3), torch.zeros(3)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        total.add_(model(x).detach().sum(0))
        return (total * 2,)

    with pytest.raises(CannotTraceError, match="did not make is changed"):
        Traced(body, [torch.randn(4, 3)], model)
    assert not total.any(), "tracing has changed nothing"


def test_a_constant_that_changes_from_call_to_call_is_refused() -> None:
    model, turns = nn.Linear(3, 3), [0.0]

    def body(x: Tensor) -> tuple[Tensor, ...]:
        turns[0] += 1
        return (model(x) * torch.tensor([turns[0]] * 3),)

    with pytest.raises(CannotTraceError, match="not always the same"):
        Traced(body, [torch.randn(4, 3)], model)


def test_inputs_that_share_memory_are_refused() -> None:
    model, x = nn.Linear(3, 3), torch.randn(8, 3)
    with pytest.raises(CannotTraceError, match="share memory"):
        Traced(lambda x, y: (x + y,), [x[:4], x[4:]], model)
    with pytest.raises(CannotTraceError, match="share memory"):
        Traced(lambda x: (x * 2,), [model.weight.detach()], model)


def test_errors_leave_everything_as_it_was() -> None:
    model, ids = nn.Embedding(5, 2), torch.tensor([0, 4])
    traced = Traced(lambda ids: (model(ids) * 2,), [ids], model)
    expected = traced(ids)
    with pytest.raises(IndexError):
        traced(torch.tensor([0, 5]))
    assert torch.is_grad_enabled()
    assert same(traced(ids), expected)

    def fails(ids: Tensor) -> tuple[Tensor, ...]:
        raise ZeroDivisionError("by a half")

    with pytest.raises(CannotTraceError, match="by a half"):
        Traced(fails, [ids], model)


def test_threads_share_a_trace() -> None:
    torch.manual_seed(0)
    model = mlp()
    body, inputs = accumulate(model, class_loss, points())
    traced = Traced(body, inputs, model)
    given = [(inputs[0] * turn, *inputs[1:]) for turn in range(8)]
    expected = [body(*each) for each in given]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: traced(*each), given * 8))
    assert all(map(same, found, expected * 8))


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within the block take at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in pytree.tree_leaves(args) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in self.known | given:
                storage = each.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def gone(self, storage: int, size: int) -> None:
        self.known.discard(storage)
        self.now -= size


@pytest.mark.parametrize("name", ["MLP", "CNN", "transformer, tied", "LSTM"])
@pytest.mark.parametrize("cast", [False, True])
def test_takes_no_more_memory_than_the_body(name: str, cast: bool) -> None:
    torch.manual_seed(0)
    network = EVERY[name]
    model = network.model()
    batch = pytree.tree_map(lambda leaf: leaf.repeat_interleave(32, 0), network.batch())
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        body, inputs = accumulate(model, network.loss, batch)
        traced = Traced(body, inputs, model)
        with Peak() as taped:
            body(*inputs)
        with Peak() as straight:
            traced(*inputs)
    assert 0 < straight.most <= taped.most
