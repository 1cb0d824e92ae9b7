"""Edge cases, for both engines: what is left out, what is refused, and what stays behind."""

import copy
import gc
import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from reference import DEVICE, tolerance
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

from dpgrad.grads import ENGINES, ClippedSum, bookkeeping, clipped_sum
from dpgrad.grads.check import check
from dpgrad.grads.scaling import RULES, Automatic, Hard, Psac, Psasc, ScaleRule
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.tape import Shared, Tape
from thinned import thinned

pytestmark = pytest.mark.usefixtures("on_device")
both = pytest.mark.parametrize("engine", ENGINES)

EVERY_RULE: list[ScaleRule] = [Hard(), Automatic(), Psac(), Psasc(s=0.5)]
CLIP = 0.7


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(29)


def test_no_rule_is_left_out() -> None:
    assert {type(rule) for rule in EVERY_RULE} == set(RULES)


def scaled(rule: ScaleRule, clip: float = CLIP) -> Callable[[Tensor], Tensor]:
    return partial(rule, clip=clip)


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return (found[0] if isinstance(found, tuple) else found).flatten(1)


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss of each row times a factor of its own."""
    found = outputs(model, batch[0])
    return (found - torch.arange(found.shape[1]).cos()).square().mean(1) * batch[1]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return weighted(model, (x, torch.ones(len(x), dtype=next(model.parameters()).dtype)))


def one_at_a_time(model: nn.Module, loss: Loss, batch: Batch, rule: ScaleRule) -> dict[str, Tensor]:
    """The clipped sum by definition: each example alone, by `torch.autograd`."""
    parameters = trainable(model)
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for i in range(len(pytree.tree_leaves(batch)[0])):
        own = loss(model, pytree.tree_map(lambda leaf, i=i: leaf[i : i + 1], batch)).sum()
        gradients = torch.autograd.grad(own, list(parameters.values()))
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        factor = rule(norm[None], CLIP)[0]
        for name, gradient in zip(parameters, gradients, strict=True):
            total[name] += factor * gradient
    return total


def assert_equal(found: ClippedSum, wanted: dict[str, Tensor], relative: float = 1e-9) -> None:
    assert found.sums.keys() == wanted.keys()
    size = math.hypot(*(float(total.norm()) for total in wanted.values()))
    relative = tolerance(wanted, relative)
    for name, total in wanted.items():
        torch.testing.assert_close(found.sums[name], total, rtol=relative, atol=relative * size)


class Words(nn.Module):
    """A language model whose output weight is its embedding's, by the same parameter or by a function."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.out = None if functional else nn.Linear(4, 7, bias=False)
        if self.out is not None:
            self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(ids)).tanh()
        return F.linear(hidden, self.embedding.weight) if self.out is None else self.out(hidden)


class Twice(nn.Module):
    """One layer used at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Attention(nn.Module):
    """Self-attention within a row."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


class Doubled(nn.Linear):
    """A subclass that computes something else than its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + self.weight.sum() * self.bias.square()


class Bare(nn.Module):
    """Parameters of its own, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp() + self.shift


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(5, *shape)


def ids() -> Tensor:
    return torch.randint(7, (5, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), floats(5)),
    "linear at positions": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), floats(3, 5)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2)), floats(2, 5, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 3, 2), floats(2, 5)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)), ids),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)), floats(3, 5)),
    "group and instance norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)),
        floats(4, 6),
    ),
    "BatchNorm in eval mode": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval()), floats(5)),
    "BatchNorm without parameters in eval mode": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False).eval()),
        floats(5),
    ),
    "recurrent": (lambda: nn.LSTM(5, 3, batch_first=True), floats(4, 5)),
    "attention": (Attention, floats(3, 4)),
    "tied": (lambda: Words(functional=False), ids),
    "tied by a function": (lambda: Words(functional=True), ids),
    "used twice": (Twice, floats(5)),
    "bare parameters": (Bare, floats(3, 5)),
    "a subclass": (lambda: nn.Sequential(Doubled(5, 4), nn.Tanh(), Doubled(4, 2)), floats(5)),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 3)), nn.Tanh()), floats(5)),
    "an orthogonal weight": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh()), floats(5)),
    "activations in place": (
        lambda: nn.Sequential(
            nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 2)
        ),
        floats(5),
    ),
}


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    model, x = (make() for make in MODELS[name])
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


def takes(engine: str, name: str) -> bool:
    """torch.func takes no recurrent layer on a GPU, and on a CPU none in float64, and in float32 only the LSTM."""
    return engine != "vmap" or not name.startswith("recurrent") or DEVICE == "cpu"


of_double = pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name in MODELS for engine in ENGINES if (name, engine) != ("recurrent", "vmap")],
)


@of_double
class TestTheDefinition:
    """The sum is that of each example alone."""

    def test_each_rule(self, name: str, engine: str) -> None:
        model, x = made(name)
        for rule in EVERY_RULE:
            wanted = one_at_a_time(model, plain, x, rule)
            for microbatch in (None, 2):
                found = clipped_sum(model, plain, x, scaled(rule), ENGINES[engine], microbatch=microbatch)
                assert_equal(found, wanted)

    def test_a_batch_of_one(self, name: str, engine: str) -> None:
        model, x = made(name)
        found = clipped_sum(model, plain, x[:1], scaled(Hard()), ENGINES[engine])
        assert_equal(found, one_at_a_time(model, plain, x[:1], Hard()))

    def test_an_empty_batch_is_zeros_and_the_loss_is_not_called(self, name: str, engine: str) -> None:
        def never(model: nn.Module, batch: Batch) -> Tensor:
            raise AssertionError("called")

        model, x = made(name)
        for batch in (x[:0], (x[:0], {"y": torch.ones(0)})):
            found = clipped_sum(model, never, batch, scaled(Hard()), ENGINES[engine])
            assert found.sums.keys() == trainable(model).keys()
            for parameter, total in found.sums.items():
                assert total.shape == trainable(model)[parameter].shape
                assert not total.any()

    def test_gradients_of_zero(self, name: str, engine: str) -> None:
        """At norm zero a factor may be as large as clip/r: still nothing is added."""
        model, x = made(name, torch.float32)
        for rule in EVERY_RULE:
            found = clipped_sum(model, weighted, (x, torch.zeros(len(x))), scaled(rule), ENGINES[engine])
            assert all(bool((total == 0).all()) for total in found.sums.values())

    def test_a_penalty_on_the_parameters_belongs_to_every_example(self, name: str, engine: str) -> None:
        def penalized(model: nn.Module, x: Tensor) -> Tensor:
            return plain(model, x) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())

        model, x = made(name)
        assert_equal(
            clipped_sum(model, penalized, x, scaled(Hard()), ENGINES[engine]),
            one_at_a_time(model, penalized, x, Hard()),
        )

    def test_an_error_in_the_loss_leaves_the_model_as_it_was(self, name: str, engine: str) -> None:
        def failing(model: nn.Module, x: Tensor) -> Tensor:
            plain(model, x)
            raise KeyError("in the loss")

        model, x = made(name)
        before = held_by(model)
        with pytest.raises(KeyError, match="in the loss"):
            clipped_sum(model, failing, x, scaled(Hard()), ENGINES[engine])
        assert held_by(model) == before
        assert_equal(
            clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine]), one_at_a_time(model, plain, x, Hard())
        )


def held_by(model: nn.Module) -> dict[tuple[str, str], int]:
    """Every tensor that a module holds, in whatever way, by identity."""
    return {
        (name, f"{slot}{pytree.keystr(path)}"): id(leaf)
        for name, module in model.named_modules()
        for slot, value in vars(module).items()
        if slot != "_modules"
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    }


BAD: dict[str, Callable[[Tensor, Tensor], None]] = {
    "an input that is NaN": lambda x, factor: x[2].fill_(math.nan),
    "one infinite input": lambda x, factor: x[2].view(-1)[:1].fill_(math.inf),
    "a loss that is NaN": lambda x, factor: factor[2].fill_(math.nan),
    "a loss that is infinite": lambda x, factor: factor[2].fill_(math.inf),
    "a norm that is too long for a float": lambda x, factor: factor[2].fill_(1e30),
}


SPOILT = [
    (name, bad, engine)
    for engine in ENGINES
    for name, (_, x) in MODELS.items()
    for bad in BAD
    if takes(engine, name) and not (x is ids and "input" in bad)  # no NaN index
]


@pytest.mark.parametrize(("name", "bad", "engine", "rule"), thinned(SPOILT, EVERY_RULE))
def test_an_example_that_is_not_finite_is_left_out(name: str, bad: str, engine: str, rule: ScaleRule) -> None:
    model, x = made(name, torch.float32)
    factor = torch.ones(len(x))
    BAD[bad](x, factor)
    rest = torch.arange(len(x)) != 2
    found = clipped_sum(model, weighted, (x, factor), scaled(rule), ENGINES[engine])
    without = clipped_sum(model, weighted, (x[rest], factor[rest]), scaled(rule), ENGINES[engine])
    assert any(bool(total.any()) for total in without.sums.values())
    assert_equal(found, dict(without.sums), relative=1e-5)


@both
def test_what_is_not_finite_in_one_group_is_left_out_of_all(engine: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x[:, 0]) + self.other(x[:, 1])

    model, x = Two(), torch.randn(4, 2, 3)
    nn.init.zeros_(model.one.weight)
    nn.init.constant_(model.other.bias, 10.0)  # the gradient of the output is about 20
    x[1, 0] = 1e38  # the gradient of `one` is infinite; the loss and the gradient of `other` are not
    groups = {name: int(name.startswith("other")) for name in trainable(model)}
    found = clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine], groups=groups)
    without = clipped_sum(model, plain, x[[0, 2, 3]], scaled(Hard()), ENGINES[engine], groups=groups)
    assert_equal(found, dict(without.sums), relative=1e-5)


@both
@pytest.mark.parametrize("several", [False, True])
def test_what_the_mask_leaves_out_may_hold_anything(several: bool, engine: str) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 2, 3) if several else torch.randn(4, 3)
    mask = torch.tensor([True, False, True, False])
    x[~mask] = math.nan
    options = {"several_rows": several}
    found = clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine], mask=mask, **options)
    without = clipped_sum(model, plain, x[mask], scaled(Hard()), ENGINES[engine], **options)
    assert_equal(found, dict(without.sums), relative=1e-5)


@both
class TestDropout:
    """Norm and sum come from one mask, and another one is drawn for every example."""

    def test_no_example_exceeds_the_bound(self, engine: str) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 2))
        x, clip = torch.randn(1, 6), 1e-3
        lengths = []
        for _ in range(100):
            found = clipped_sum(model, plain, x, scaled(Hard(), clip), ENGINES[engine])
            lengths.append(math.hypot(*(float(total.double().norm()) for total in found.sums.values())))
        assert max(lengths) <= clip
        # The gradient is far longer than the bound, so what is added is as long as the bound, up to the margins.
        assert min(lengths) > 0.99 * clip

    def test_examples_have_masks_of_their_own(self, engine: str) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
        layer = ENGINES[engine](model, lambda model, x: model(x)[:, 0], torch.ones(2, 64), torch.ones(2))
        first, second = layer.uses["1.weight"].per_example().flatten(1) != 0
        assert 0 < int(first.sum()) < 64  # all or none: 2^-63
        assert not torch.equal(first, second)  # the same: 2^-64

    def test_the_check_and_the_layouts_draw_no_random_numbers(self, engine: str) -> None:
        model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2)), torch.randn(3, 6)
        check(model, plain, x, engine)
        sums = []
        for _ in range(2):
            torch.manual_seed(5)
            check(model, plain, x, engine)
            sums.append(clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine]).sums)
            assert len(set(torch.rand(9).tolist())) == 9
        assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def refusing(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise AssertionError("compiled")


@both
class TestCompiled:
    """A compiled model is used as the model it was made from."""

    def test_it_is_unwrapped_and_nothing_is_compiled(self, engine: str) -> None:
        model, x = made("linear")
        compiled = torch.compile(model, backend=refusing)
        found = clipped_sum(compiled, plain, x, scaled(Hard()), ENGINES[engine])
        assert_equal(found, one_at_a_time(model, plain, x, Hard()))

    def test_a_part_that_is_compiled_is_refused(self, engine: str) -> None:
        model = nn.Sequential(nn.Linear(5, 4), torch.compile(nn.Linear(4, 2), backend=refusing))
        with pytest.raises(ValueError, match="module '1' of the model is compiled: give it uncompiled"):
            clipped_sum(model, plain, torch.randn(3, 5), scaled(Hard()), ENGINES[engine])

    @pytest.mark.parametrize("part", ["itself", "0"])
    def test_a_module_compiled_in_place_is_refused(self, part: str, engine: str) -> None:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
        (model if part == "itself" else model[0]).compile(backend=refusing)
        with pytest.raises(ValueError, match=f"module '{part}' of the model is compiled: give it uncompiled"):
            clipped_sum(model, plain, torch.randn(3, 5), scaled(Hard()), ENGINES[engine])


class Multiply(torch.autograd.Function):
    """x·w by hand, in a way that no engine can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class Hidden(nn.Module):
    """A weight that is used by a custom function, from a list, or from the outside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.layer = nn.Linear(5, 2)
        self.aliases = (self.weight,)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "function":
                return self.layer(Multiply.apply(x, self.weight))
            case "list":
                return self.layer(x * self.aliases[0])
            case _:
                return self.layer(x) + self.weight.sum()


def hidden(way: str) -> tuple[nn.Module, Loss]:
    model = Hidden(way)
    outside = model.weight
    return model, (lambda model, x: plain(model, x) + (x * outside).sum(1)) if way == "outside" else plain


@pytest.mark.parametrize("way", ["function", "list", "outside"])
class TestUncovered:
    """A use of a parameter that an engine cannot see is refused by name, never left out."""

    def test_bookkeeping(self, way: str) -> None:
        model, loss = hidden(way)
        with pytest.raises(ValueError, match=r"parameter weight is used where it cannot be followed .*engine='single'"):
            clipped_sum(model, loss, torch.randn(4, 5), scaled(Hard()))
        with pytest.raises(ValueError, match="parameter weight is used where it cannot be followed"):
            check(model, loss, torch.randn(4, 5))

    def test_vmap(self, way: str) -> None:
        model, loss = hidden(way)
        message = (
            "cannot take this model" if way == "function" else "does not get the gradient of parameter weight right"
        )
        with pytest.raises(ValueError, match=f"engine 'vmap' {message}"):
            check(model, loss, torch.randn(4, 5), "vmap")


class Remembering(list[Any]):
    """A list that remembers what was appended after it is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.ever: list[Any] = []

    def append(self, item: Any) -> None:
        super().append(item)
        self.ever.append(item)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Remembering]:
    """What the tapes of the fast engine note, that of the gradients last."""
    found: list[Remembering] = []

    class Noted(Tape):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.records = Remembering()
            found.append(self.records)

    monkeypatch.setattr(bookkeeping, "Tape", Noted)
    return found


class TestFrozen:
    """What is frozen costs nothing and takes no part."""

    @pytest.mark.parametrize("frozen", [(0,), (2,), (0, 2), (4,), ()])
    def test_it_leaves_no_record(self, frozen: tuple[int, ...], records: list[Remembering]) -> None:
        model, x = (
            nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
            torch.randn(3, 5),
        )
        for i in frozen:
            model[i].requires_grad_(False)
        found = clipped_sum(model, plain, x, scaled(Hard()))
        live = [f"{i}.{kind}" for i in (0, 2, 4) if i not in frozen for kind in ("weight", "bias")]
        assert list(found.sums) == live
        assert [name for record in records[-1].ever for name in record.names] == live
        assert len(records[-1].ever) == 3 - len(frozen)

    @of_double
    def test_the_rest_is_exact(self, name: str, engine: str) -> None:
        model, x = made(name)
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)
        assert_equal(
            clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine]), one_at_a_time(model, plain, x, Hard())
        )

    @both
    def test_nothing_but_frozen_parameters_give_an_empty_sum(self, engine: str) -> None:
        model = nn.Linear(5, 2).requires_grad_(False)
        assert clipped_sum(model, plain, torch.randn(3, 5), scaled(Hard()), ENGINES[engine]).sums == {}


class TestInPlace:
    """Activations may be changed in place; what a layer was given may not."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 1.0
            after = self.layer(hidden)
            hidden += 1
            return self.out(after + hidden)

    def test_bookkeeping_refuses_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"the input of linear with parameter layer\.weight was changed in place"):
            clipped_sum(self.Changed(), plain, torch.randn(3, 5), scaled(Hard()))

    def test_so_does_torch(self) -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            plain(self.Changed(), torch.randn(3, 5)).sum().backward()

    @both
    def test_a_sum_in_place_is_exact(self, engine: str) -> None:
        class Residual(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 2)

            def forward(self, x: Tensor) -> Tensor:
                after = self.layer(x)
                after += x
                after.mul_(0.5)
                return self.out(F.relu_(after))

        model, x = Residual().double(), torch.randn(3, 5).double()
        assert_equal(
            clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine]), one_at_a_time(model, plain, x, Hard())
        )


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3)), nn.Tanh())


class Keeping(nn.Module):
    """Keeps what it computed, as modules do that are looked at later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.register_buffer("last", torch.zeros(2))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        self.last = self.layer.weight.sum(1)
        self.newest = found
        return found


LEAVING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    **MODELS,
    "the old weight_norm": (old_weight_norm, floats(5)),
    "recurrent, two layers, two ways": (
        lambda: nn.LSTM(5, 3, num_layers=2, bidirectional=True, batch_first=True),
        floats(4, 5),
    ),
    "a module that keeps its output": (Keeping, floats(5)),
}


def shared_tensors() -> set[int]:
    gc.collect()
    return {id(kept) for kept in gc.get_objects() if issubclass(type(kept), Shared)}


def functorch_levels(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        for leaf in pytree.tree_leaves([value for slot, value in vars(module).items() if slot != "_modules"]):
            if isinstance(leaf, Tensor):
                yield torch._C._functorch.maybe_get_level(leaf)


class TestAfterwards:
    """Nothing of an engine stays behind."""

    @pytest.mark.parametrize(
        ("name", "engine"), [(name, engine) for name in LEAVING for engine in ENGINES if takes(engine, name)]
    )
    def test_the_model_holds_what_it_held(self, name: str, engine: str) -> None:
        model, x = (make() for make in LEAVING[name])
        before, values = held_by(model), copy.deepcopy(dict(model.named_parameters()))
        clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine])
        assert held_by(model) == before
        assert set(functorch_levels(model)) == {-1}
        assert all(torch.equal(parameter, values[slot]) for slot, parameter in model.named_parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
        plain(model, x).sum().backward()

    def test_no_shared_tensor_is_alive(self) -> None:
        pairs = [(name, *(make() for make in LEAVING[name])) for name in LEAVING]
        before = shared_tensors()
        totals = {name: clipped_sum(model, plain, x, scaled(Hard())).sums for name, model, x in pairs}
        assert not shared_tensors() - before
        for name, sums in totals.items():
            assert all(type(total) is Tensor and not total.requires_grad for total in sums.values()), name

    @pytest.mark.parametrize(
        ("name", "engine"),
        [
            (name, engine)
            for name in LEAVING
            for engine in ENGINES
            if name != "the old weight_norm" and takes(engine, name)  # which torch cannot copy
        ],
    )
    def test_the_model_can_be_copied_and_saved(self, name: str, engine: str) -> None:
        model, x = (make() for make in LEAVING[name])
        found = clipped_sum(model, plain, x, scaled(Hard()), ENGINES[engine])
        if not any(
            parametrize.is_parametrized(module) for module in model.modules()
        ):  # torch does not save these whole
            torch.save(model, io.BytesIO())
        again = clipped_sum(copy.deepcopy(model), plain, x, scaled(Hard()), ENGINES[engine])
        assert_equal(again, dict(found.sums), relative=1e-6)
