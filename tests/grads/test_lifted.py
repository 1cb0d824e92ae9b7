"""Book-keeping inside vmap: one example never sees another, whatever a model does with values; examples that take
different paths are worked on separately; what vmap cannot take is refused with its reason."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from networks import NETWORKS, WIDTH, output_loss, per_row, sequences
from reference import assert_equal, example_gradients
from test_engines import WRITTEN, Does, Doubled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpgrad.grads import bookkeeping, clipped_sum, fold, lifted, vmap
from dpgrad.grads.clip import PerExample
from dpgrad.grads.forks import Joined, Seen
from dpgrad.grads.lifted import CannotLiftError
from dpgrad.grads.patches import Patches
from dpgrad.grads.scaling import Automatic, Hard
from dpgrad.grads.tape import Shared
from dpgrad.grads.uses import Dense, Lookup, Outer, Tied


@pytest.fixture(autouse=True)
def _double(on_device: None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def assert_exact(model: nn.Module, loss: Any, batch: Any, rows: int = 1, tolerance: float = 1e-10) -> Seen:
    """The gradients of each example are autograd's on that example alone, and so are the losses."""
    seen = Seen()
    examples = len(torch.utils._pytree.tree_leaves(batch)[0])
    found = lifted.gradients(model, loss, batch, torch.ones(examples), rows, seen)
    wanted = example_gradients(model, loss, batch)
    for name, each in wanted.items():
        torch.testing.assert_close(found.uses[name].per_example(), each, rtol=tolerance, atol=tolerance)
    return seen


def row_by_row(model: nn.Module, loss: Any, batch: Any) -> Tensor:
    """The loss of each example, alone."""
    parts = [
        torch.utils._pytree.tree_map(lambda leaf, row=row: leaf[row : row + 1], batch)
        for row in range(len(torch.utils._pytree.tree_leaves(batch)[0]))
    ]
    with torch.no_grad():
        return torch.cat([loss(model, part) for part in parts])


# Models on x (batch, 6, 5) that do with values what a batched pass cannot follow.


def tokens_sorted(own: Any, x: Tensor) -> Tensor:
    """Flattened tokens, sorted, worked on and put back."""
    flat = x.flatten(0, 1)
    order = flat[:, 0].argsort()
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    return own.b(own.a(flat[order]).tanh())[back].view(*x.shape[:2], 4)


def by_index(own: Any, x: Tensor) -> Tensor:
    """The last position of each row, by a length that is among the data."""
    length = (x[:, 0, 0].abs() * 3).long().clamp(0, 5)
    return own.b(own.a(x).tanh()[torch.arange(len(x)), length])


def expert_of_a_row(own: Any, x: Tensor) -> Tensor:
    chosen = own.a(x).sum((1, 2)).long() % 2
    weights = torch.stack([own.b.weight, own.b.weight.flip(0)])
    return torch.einsum("bof,btf->bto", weights[chosen], own.a(x))


def gated(own: Any, x: Tensor) -> Tensor:
    """The best of the experts for each token, by topk and gather."""
    h = own.a(x)
    weight, chosen = h.softmax(-1).topk(2)
    return own.b(h).gather(-1, chosen) * weight


def across_rows(own: Any, x: Tensor) -> Tensor:
    h = own.a(x)
    h[:, 1] += own.b(h[:, 0].clone())
    return h


def slots(own: Any, x: Tensor) -> Tensor:
    """Written into a tensor that begins without any example."""
    out = torch.zeros(len(x), 6, 4)
    for t in range(6):
        out[:, t] = own.b(own.a(x[:, t]).tanh())
    return out


VALUES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tokens sorted": tokens_sorted,
    "variable length by index": by_index,
    "expert of a row": expert_of_a_row,
    "gated": gated,
    "sorted in a layer": lambda own, x: own.b(own.a(x).sort(1)[0].sin()),
    "median": lambda own, x: own.b(own.a(x) - own.a(x).median(1, keepdim=True)[0]),
    "in place across positions": across_rows,
    "written into slots": slots,
    "scattered": lambda own, x: torch.zeros_like(own.a(x)).scatter(
        1, lookup(x).argsort(1)[..., None].expand(-1, -1, 4), own.a(x)
    ),
    "index_put": lambda own, x: own.a(x).index_put((torch.arange(len(x)), lookup(x)[:, 0]), own.b.bias),
    "cumulative": lambda own, x: own.b(own.a(x).cumsum(1)).logsumexp(1),
}


def lookup(x: Tensor) -> Tensor:
    return (2 * x[..., 0]).long().clamp(-2, 2) + 2


def two_layers() -> dict[str, Any]:
    return {"a": nn.Linear(5, 4), "b": nn.Linear(4, 4)}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("examples", [1, 7])
def test_values_do_not_move_examples(name: str, examples: int) -> None:
    seen = assert_exact(Does(VALUES[name], **two_layers()), output_loss, sequences(examples))
    assert seen.paths == 1


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights from labels": lambda out, y: F.cross_entropy(
        out, y, weight=1 / (1 + F.one_hot(y, 3).to(out.dtype).mean(0)), reduction="none"
    ),
    "pos_weight": lambda out, y: F.binary_cross_entropy_with_logits(
        out[:, 0], y.gt(0).to(out.dtype), pos_weight=1 + y.gt(0).to(out.dtype).mean(), reduction="none"
    ),
    "median length": lambda out, y: out.square().sum(1) * y.to(out.dtype).median(),
    "a share of the batch": lambda out, y: out.square().sum(1) / len(out),
    "one rare token": lambda out, y: out.square().sum(1) * (1 + (y == 2).to(out.dtype).sum()),
}


class TestStatisticsOfTheBatch:
    """A statistic over the batch is one over the single row that the model sees; losses tell that it was another."""

    @pytest.mark.parametrize("name", STATISTICS)
    def test_alone(self, name: str) -> None:
        batch = torch.randn(9, 5), torch.tensor([0, 0, 0, 1, 1, 0, 2, 0, 1])

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return STATISTICS[name](model(batch[0]), batch[1])

        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        assert_exact(model, loss, batch)
        found = lifted.losses(model, loss, batch)
        torch.testing.assert_close(found, row_by_row(model, loss, batch))
        with torch.no_grad():
            assert not torch.allclose(found, loss(model, batch))


# Models on x (batch, 6, 5) that read values in Python, and what decides the path of a row.


def early_exit(own: Any, x: Tensor) -> Tensor:
    h = own.a(x)
    for _ in range(3):
        h = own.b(h.tanh())
        if h.sum() > 3 * x[0, 0, 0]:
            break
    return h


def nested(own: Any, x: Tensor) -> Tensor:
    if x[0, 0, 0] > 0:
        return own.a(x).sin() if (x[0, 1, 0] > 0).item() else own.b(own.a(x))
    return own.a(x)


def positive(x: Tensor) -> Tensor:
    return (x[..., 0] > 0).sum()


ASKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "if": lambda own, x: own.a(x) if x.sum() > 0 else own.b(own.a(x)),
    "if all": lambda own, x: own.a(x) if (x[:, 0] > -1).all() else own.b(own.a(x)),
    "nested": nested,
    "early exit": early_exit,
    "item": lambda own, x: own.a(x)[:, : positive(x).item() + 1].sum(1),
    "slice": lambda own, x: own.a(x[:, : positive(x).clamp(min=1)]).sum(1),
    "slice written": lambda own, x: slice_written(own, x),
    "range": lambda own, x: sum((own.a(x[:, t]).sin() for t in range(positive(x))), start=own.a(x[:, 0])),
    "int": lambda own, x: own.a(x.roll(int(positive(x)), 1)).cumsum(1),
    "float": lambda own, x: own.a(x) * float(x[0, 0, 0].round()),
    "arange": lambda own, x: own.a(x)[:, torch.arange(positive(x))].sum(1) + own.b(own.a(x[:, 0])),
    "tolist": lambda own, x: own.a(x) * sum(x[:, 0, 0].gt(0).long().tolist()),
    "equal": lambda own, x: own.a(x) if torch.equal(x[:, 0, :1].gt(0), x[:, 1, :1].gt(0)) else own.b(own.a(x)),
    "allclose": lambda own, x: own.a(x) if torch.allclose(x[:, 0], x[:, 1], atol=2.5) else own.b(own.a(x)),
    "contains": lambda own, x: own.a(x) if 3 in lookup(x) else own.b(own.a(x)),
    "is_nonzero": lambda own, x: own.a(x) if torch.is_nonzero(x[0, 0, 0].gt(0)) else own.b(own.a(x)),
}


def slice_written(own: Any, x: Tensor) -> Tensor:
    h = own.a(x).clone()
    h[:, : positive(x)] = 0.5
    return own.b(h)


def packed(own: Any, x: Tensor) -> Tensor:
    lengths = lookup(x)[:, 0] + 1
    inputs = nn.utils.rnn.pack_padded_sequence(own.a(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
    return own.lstm(inputs)[1][0][0]


def experts(own: Any, x: Tensor) -> Tensor:
    """Each expert takes the tokens that chose it, and its results are added back."""
    flat = x.flatten(0, 1)
    chosen = (flat[:, 0] > 0).long() + (flat[:, 1] > 0).long()
    out = torch.zeros(len(flat), 4)
    for expert in range(3):
        (tokens,) = torch.where(chosen == expert)
        out.index_add_(0, tokens, own.a(flat[tokens]) * (expert + 1))
    return out.view(*x.shape[:2], 4)


# Values decide how many entries a tensor has.
SHAPES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rows grouped by a mask": lambda own, x: own.a(torch.cat([x[x[:, 0, 0] > 0], x[x[:, 0, 0] <= 0]])),
    "boolean mask": lambda own, x: own.a(x)[x[..., 0] > 0].sum(0, keepdim=True) + own.b(own.a(x[:, 0])),
    "mask among indices": lambda own, x: own.a(x)[:, x[0, :, 0] > 0].sum(1) + own.b(own.a(x[:, 0])),
    "masked_select": lambda own, x: own.a(x).masked_select(x[..., :4] > 0).sum().expand(len(x), 1),
    "nonzero": lambda own, x: own.a(x[:, x[0, :, 0].gt(0).nonzero()[:, 0]]).sum(1),
    "nonzero as a tuple": lambda own, x: own.a(x[x[..., 0].gt(0).nonzero(as_tuple=True)]).sum(0, keepdim=True),
    "where": lambda own, x: own.a(x[:, torch.where(x[0, :, 0] > 0)[0]]).sum(1),
    "experts": experts,
    "unique": lambda own, x: own.a(x) * lookup(x).unique().numel(),
    "bincount": lambda own, x: own.a(x) * torch.bincount(lookup(x)[0]).max(),
    "repeat_interleave": lambda own, x: own.b(own.a(x).repeat_interleave(lookup(x)[0].clamp(max=1) + 1, 1)).sum(1),
    "packed": packed,
}


class TestForks:
    @pytest.mark.parametrize("name", ASKED)
    def test_each_example_takes_its_own_path(self, name: str) -> None:
        model, batch = Does(ASKED[name], **two_layers()), sequences(12)
        seen = assert_exact(model, output_loss, batch)
        assert seen.paths > 1
        assert seen.asked
        torch.testing.assert_close(lifted.losses(model, output_loss, batch), row_by_row(model, output_loss, batch))

    @pytest.mark.parametrize("name", ASKED)
    def test_examples_that_agree_stay_together(self, name: str) -> None:
        batch = tuple(leaf.expand(5, *leaf.shape[1:]) for leaf in sequences(1))
        seen = assert_exact(Does(ASKED[name], **two_layers()), output_loss, batch)
        assert (seen.paths, seen.asked) == (1, True)

    @pytest.mark.parametrize("name", ["nested", "slice", "early exit"])
    @pytest.mark.parametrize("microbatch", [None, 5])
    def test_clipped_sum(self, name: str, microbatch: int | None) -> None:
        mask = torch.rand(13) > 0.2
        model = Does(ASKED[name], **two_layers())
        assert_equal(
            model, output_loss, sequences(13), lifted.gradients, Hard(), (0.7,), mask=mask, microbatch=microbatch
        )

    def test_a_sum_of_more_examples_than_are_added_at_once(self) -> None:
        model = Does(ASKED["nested"], **two_layers())
        assert_equal(model, output_loss, sequences(300), lifted.gradients, Automatic(), (0.7,))

    def test_as_many_paths_as_examples(self) -> None:
        model = Does(lambda own, x: own.a(x) * float(x[0, 0, 0]), a=nn.Linear(5, 4))
        assert assert_exact(model, output_loss, sequences(40)).paths == 40

    @pytest.mark.parametrize("rows", [2, 3])
    def test_rows_of_an_example_travel_together(self, rows: int) -> None:
        """The rows of one example are one batch: they decide together."""
        model, batch = Does(ASKED["if"], **two_layers()), sequences(5 * rows)
        found = lifted.gradients(model, output_loss, batch, torch.ones(5 * rows), rows, seen := Seen())
        assert seen.paths > 1
        for example in range(5):
            own = slice(example * rows, (example + 1) * rows)
            loss = output_loss(model, (batch[0][own], batch[1][own])).sum()
            wanted = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            for (name, parameter), each in zip(model.named_parameters(), wanted, strict=True):
                gradient = torch.zeros_like(parameter) if each is None else each
                torch.testing.assert_close(found.uses[name].per_example()[example], gradient)

    def test_zeros_of_different_sign_and_nan_are_told_apart(self) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            value = x[0, 0].item()
            return own.a(x) * (3.0 if value != value else 2.0 if str(value) == "-0.0" else 1.0)

        x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, 2.0], [-0.0, 3.0]])
        found = lifted.gradients(
            Does(forward, a=nn.Linear(2, 1)), lambda model, x: model(x)[:, 0], x, torch.ones(4), seen=(seen := Seen())
        )
        assert seen.paths == 2
        assert found.uses["a.bias"].per_example().flatten().tolist() == [1, 2, 1, 2]

    def test_a_model_that_catches_errors_does_not_hide_a_fork(self) -> None:
        def forward(own: Any, x: Tensor) -> Tensor:
            try:
                return own.a(x) if x.sum() > 0 else own.b(own.a(x))
            except Exception:
                return own.a(x) * 0

        assert assert_exact(Does(forward, **two_layers()), output_loss, sequences(6)).paths == 2

    def test_random_paths_are_as_likely_as_alone(self) -> None:
        """An answer that was drawn is kept when the pass starts again; drawing anew would favour agreement."""

        def forward(own: Any, x: Tensor) -> Tensor:
            return own.a(x) * (1.0 if torch.rand(()) < 0.2 else 0.0)

        model = Does(forward, a=nn.Linear(1, 1))
        drawn = torch.cat(
            [
                lifted.gradients(model, lambda model, x: model(x)[:, 0], torch.ones(8, 1), torch.ones(8))
                .uses["a.bias"]
                .per_example()
                .flatten()
                for _ in range(150)
            ]
        )
        assert abs(float(drawn.mean()) - 0.2) < 5 * (0.16 / 1200) ** 0.5  # one in two million by chance

    def test_nothing_is_asked_of_a_model_without_questions(self) -> None:
        for name in ("CNN", "transformer, tied", "LSTM"):
            network = NETWORKS[name]
            lifted.gradients(network.model(), network.loss, network.batch(), torch.ones(4), seen=(seen := Seen()))
            assert (seen.paths, seen.asked) == (1, False)

    def test_questions_about_parameters_are_no_questions_about_the_batch(self) -> None:
        model = Does(lambda own, x: own.a(x) if own.a.weight.sum() > 100 else own.a(x).sin(), a=nn.Linear(5, 4))
        assert not assert_exact(model, output_loss, sequences(3)).asked


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_each_examples_own(name: str) -> None:
    """Where the caller wants it, examples are told apart by what decides their shapes."""
    model = Does(SHAPES[name], lstm=nn.LSTM(4, 3, batch_first=True), **two_layers())
    batch = sequences(9)
    seen = Seen(masks=True)
    found = lifted.gradients(model, output_loss, batch, torch.ones(9), seen=seen)
    assert seen.paths > 1
    for parameter, each in example_gradients(model, output_loss, batch).items():
        torch.testing.assert_close(found.uses[parameter].per_example(), each)


def test_numbers_written_by_a_mask() -> None:
    """Shapes do not change, so no example is told apart."""

    def forward(own: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[x[..., 0] > 0] = 0.5
        h = own.a(x)
        h[h > 1] = h.new_tensor(0.25)
        return own.b(h)

    assert assert_exact(Does(forward, **two_layers()), output_loss, sequences(6)).paths == 1


def test_a_computed_weight_written_in_place() -> None:
    def forward(own: Any, x: Tensor) -> Tensor:
        weight = own.w * 1
        weight[0] = 0
        positions = own.a(torch.eye(5)[:, :5])
        positions /= 2
        return own.b(positions[:4, :4] * x[:, :4, :4]) * weight

    assert_exact(Does(forward, w=torch.randn(4), **two_layers()), output_loss, sequences(4))


class TestJoined:
    """Gradients in several forms behave as one form with all examples."""

    @staticmethod
    def _found() -> tuple[PerExample, dict[str, Tensor]]:
        model, batch = Does(ASKED["slice"], **two_layers()), sequences(9)
        return lifted.gradients(model, output_loss, batch, torch.ones(9)), example_gradients(model, output_loss, batch)

    def test_forms(self) -> None:
        found, wanted = self._found()
        use, each = found.uses["a.weight"], wanted["a.weight"]
        assert isinstance(use, Joined)
        factors = torch.rand(9)
        torch.testing.assert_close(use.weighted_sum(factors), torch.einsum("b,b...->...", factors, each))
        torch.testing.assert_close(
            use.weighted_sums(factors.view(3, 3)),
            torch.einsum("pb,pb...->p...", factors.view(3, 3), each.view(3, 3, 4, 5)),
        )
        norms, source = use.measured()
        torch.testing.assert_close(norms, each.flatten(1).norm(dim=1))
        torch.testing.assert_close(source.per_example(), each)
        torch.testing.assert_close(use.part(slice(2, 7)).per_example(), each[2:7])
        torch.testing.assert_close(use.scaled(2.0).per_example(), 2 * each)
        keep = torch.arange(9) % 2 == 0
        torch.testing.assert_close(use.kept(keep).per_example(), each * keep[:, None, None])
        assert use.shape == each.shape[1:]


class TestForms:
    """Weights keep their cheap forms inside vmap."""

    def test_tied_embedding(self) -> None:
        wide = 4096
        model = Does(lambda own, x: own.head(own.tok(x).tanh()), tok=nn.Embedding(wide, 8), head=nn.Linear(8, wide))
        model.head.weight = model.tok.weight
        found = lifted.gradients(
            model, lambda model, x: model(x).logsumexp(-1).sum(1), torch.randint(wide, (3, 6)), torch.ones(3)
        )
        assert isinstance(found.uses["tok.weight"], Tied)

    def test_convolution_linear_and_embedding(self) -> None:
        model = Does(
            lambda own, x: own.l(own.c(own.e(x).mT[..., None]).flatten(1)),
            e=nn.Embedding(999, 64), c=nn.Conv2d(64, 128, (3, 1)), l=nn.Linear(512, 300),
        )  # fmt: skip
        found = lifted.gradients(
            model, lambda model, x: model(x).sin().sum(1), torch.randint(999, (3, 6)), torch.ones(3)
        )
        assert isinstance(found.uses["e.weight"], Lookup)
        assert isinstance(found.uses["c.weight"], Patches)
        assert isinstance(found.uses["l.weight"], Outer)

    @pytest.mark.parametrize("name", NETWORKS)
    def test_those_of_the_batched_pass(self, name: str) -> None:
        model, batch, loss = NETWORKS[name].model(), NETWORKS[name].batch(), NETWORKS[name].loss
        found = lifted.gradients(model, loss, batch, torch.ones(4)).uses
        batched = bookkeeping.gradients(model, loss, batch, torch.ones(4)).uses
        assert {name: type(use) for name, use in found.items()} == {name: type(use) for name, use in batched.items()}


def saved(run: Callable[[], object]) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(held.values())


@pytest.mark.parametrize("name", ["CNN", "ResNet-9", "transformer, tied", "GPT-2, tied", "LoRA", "ViT"])
def test_the_backward_pass_keeps_little_more_than_a_batched_one(name: str) -> None:
    model, batch, loss = NETWORKS[name].model(), NETWORKS[name].batch(), NETWORKS[name].loss
    known = bookkeeping.find_layouts(model, loss, batch)
    batched = saved(lambda: bookkeeping.gradients(model, loss, batch, torch.ones(4), layouts=known))
    assert saved(lambda: lifted.gradients(model, loss, batch, torch.ones(4))) <= 1.3 * batched


class Cube(torch.autograd.Function):
    """w·x³ with a vmap rule of its own making."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return w * x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w * 3 * x**2, (g * x**3).flatten(0, -2).sum(0)


def test_an_autograd_function_with_a_vmap_rule() -> None:
    assert_exact(
        Does(lambda own, x: Cube.apply(own.a(x), own.w), a=nn.Linear(5, 4), w=torch.randn(4)), output_loss, sequences()
    )


class Norms(nn.Module):
    """Normalization in every form, on images."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Conv2d(3, 4, 3, padding=1), layer, nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.layer(self.first(x)), inplace=True))


def with_statistics(norm: nn.Module) -> nn.Module:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm.eval()


IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm([4, 8, 8]),
    "RMSNorm": lambda: nn.RMSNorm([8]),
    "InstanceNorm": lambda: nn.InstanceNorm2d(4, affine=True),
    "InstanceNorm, fixed": lambda: with_statistics(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "BatchNorm, fixed": lambda: with_statistics(nn.BatchNorm2d(4)),
    "MaxPool": lambda: nn.MaxPool2d(2, return_indices=False),
    "AvgPool": lambda: nn.AvgPool2d(3, 1),
    "AdaptiveMaxPool": lambda: nn.AdaptiveMaxPool2d(5),
    "AdaptiveAvgPool": lambda: nn.AdaptiveAvgPool2d((4, 3)),
    "Upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "ConvTranspose": lambda: nn.ConvTranspose2d(4, 4, 3, stride=2),
    "grouped": lambda: nn.Conv2d(4, 4, 3, groups=2, padding="same"),
    "reflected": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "Unfold": lambda: nn.Sequential(nn.Unfold(3), nn.Fold((8, 8), 3)),
    "frozen": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)).requires_grad_(False),
    "PixelShuffle": lambda: nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(1, 4, 1)),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", IMAGE_LAYERS)
def test_functions_of_a_batch(name: str, rows: int) -> None:
    model, batch = Norms(IMAGE_LAYERS[name]()), sequences(3 * rows, 3, 8, 8)
    if rows == 1:
        assert_exact(model, output_loss, batch)
    batch = tuple(leaf.unflatten(0, (3, rows)) for leaf in batch)
    assert_equal(model, output_loss, batch, lifted.gradients, Hard(), (0.5,), several_rows=True)


@pytest.mark.parametrize("name", ["GroupNorm", "MaxPool", "ConvTranspose", "grouped"])
def test_channels_last(name: str) -> None:
    model, (x, weights) = Norms(IMAGE_LAYERS[name]()), sequences(3, 3, 8, 8)
    assert_exact(
        model.to(memory_format=torch.channels_last), output_loss, (x.to(memory_format=torch.channels_last), weights)
    )


def test_images_without_a_batch() -> None:
    """Each image alone: the examples become the batch of the convolution."""

    def forward(own: Any, x: Tensor) -> Tensor:
        return torch.stack([F.max_pool2d(own.c(image), 2) for image in x])

    assert_exact(Does(forward, c=nn.Conv2d(3, 4, 3)), output_loss, sequences(3, 3, 8, 8))


CAUSAL = torch.ones(6, 6).tril().bool()
# Functions of a batch whose other arguments have dimensions of their own, as many as there may be examples.
BROADCAST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a batch of matrices": lambda own, x: (own.a(x).mean(1) @ own.three).transpose(0, 1),
    "a batch of matrices by name": lambda own, x: torch.matmul(own.a(x)[:, None], other=own.three),
    "a batch of trained matrices": lambda own, x: (own.a(x).mean(1) @ own.w).transpose(0, 1),
    "a matrix added": lambda own, x: torch.addmm(own.held, own.a(x)[0, :3], own.three[0])[None],
    "a matrix added, trained": lambda own, x: torch.addmm(own.held, own.a(x)[0, :3], own.w[0])[None],
    "a vector added": lambda own, x: torch.addmm(own.held[0], own.a(x)[0], own.three[0])[None],
    "a matrix added by linear": lambda own, x: F.linear(own.a(x)[0, :3], own.three[0], own.held)[None],
    "a vector": lambda own, x: own.a(x) @ own.held[0],
    "attention without a batch": lambda own, x: attended(own, own.a(x).unflatten(-1, (2, 2)).transpose(1, 2)[0])[None],
    "attention of unequal batches": lambda own, x: F.scaled_dot_product_attention(
        own.a(x)[:, None], torch.cat([own.a(x), x[..., :4]])[:1, None], own.three[:1, None]
    ),
    "outer": lambda own, x: torch.outer(own.a(x)[0, 0], own.a.bias)[None],
    "embedding without a batch": lambda own, x: F.embedding(lookup(x)[0, 0], own.a.weight.t() * 2)[None],
    "layer norm of everything": lambda own, x: F.layer_norm(own.a(x), own.a(x).shape),
    "class weights": lambda own, x: F.cross_entropy(
        own.a(x).mT, lookup(x).clamp(max=3), weight=own.held[0].exp(), label_smoothing=0.1, reduction="none"
    ),
    "class probabilities": lambda own, x: F.cross_entropy(own.a(x).mT, x[..., :4].softmax(-1).mT, reduction="none"),
    "mean over positions": lambda own, x: F.cross_entropy(own.a(x).mT, lookup(x).clamp(max=3)).expand(len(x), 1),
    "grid of one image": lambda own, x: F.grid_sample(own.a(x)[:, None], x[:, :, None, :2].tanh(), align_corners=False),
}


def attended(own: Any, q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("examples", [1, 2, 3, 4])
@pytest.mark.parametrize("name", BROADCAST)
def test_nothing_is_broadcast_along_the_examples(name: str, examples: int) -> None:
    if name == "attention of unequal batches" and torch.cuda.is_available():
        pytest.skip("attention does not take batches of unequal size on a CUDA device")
    model = Does(BROADCAST[name], a=nn.Linear(5, 4), w=torch.randn(3, 4, 4))
    model.register_buffer("three", torch.randn(3, 4, 4))
    model.register_buffer("held", torch.randn(3, 4))
    assert_exact(model, output_loss, sequences(examples))


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 8), nn.Linear(5, 4), nn.Linear(5, 4)
        self.bias = nn.Parameter(torch.randn(4, 6, 6))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (self.k, self.v))
        if not self.options.get("enable_gqa"):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mask = self.options.get("attn_mask")
        given = {**self.options, "attn_mask": mask(self, x)} if mask else self.options
        return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "grouped queries": {"enable_gqa": True},
    "common mask": {"attn_mask": lambda own, x: CAUSAL.to(x.device)},
    "common mask of a batch": {"attn_mask": lambda own, x: CAUSAL.to(x.device).expand(len(x), 1, 6, 6)},
    "mask of each example": {"attn_mask": lambda own, x: ((x[..., 0] > -0.5) | (torch.arange(6) == 0))[:, None, None]},
    "numbers of each example": {"attn_mask": lambda own, x: x[:, None, :, :1].expand(-1, 4, -1, 6)},
    "parameter": {"attn_mask": lambda own, x: own.bias},
    "parameter and data": {"attn_mask": lambda own, x: own.bias + x[:, None, :, :1]},
    "parameter, expanded": {"attn_mask": lambda own, x: own.bias.expand(len(x), -1, -1, -1)},
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, rows: int) -> None:
    model, batch = Attention(**ATTENTION[name]), sequences(3 * rows)
    assert_exact(model, output_loss, batch)
    batch = tuple(leaf.unflatten(0, (3, rows)) for leaf in batch)
    assert_equal(model, output_loss, batch, lifted.gradients, Hard(), (0.5,), several_rows=True)


def test_attention_stays_fused() -> None:
    """The function is called once, on queries of all examples in four dimensions."""
    shapes = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in str(func) and "backward" not in str(func):
                shapes.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    torch.set_default_dtype(torch.float32)
    heads = Does(lambda own, x: attended(own, own.a(x).unflatten(-1, (2, 8)).transpose(1, 2)), a=nn.Linear(5, 16))
    with Noted():
        lifted.gradients(heads, output_loss, sequences(3), torch.ones(3))
    assert shapes == [(3, 2, 6, 8)]


@pytest.mark.parametrize("name", ["CNN", "ResNet-9", "transformer", "GPT-2, tied", "LSTM"])
def test_autocast(name: str) -> None:
    """bfloat16 rounds alike in both passes: they call the same kernels on the same tensors."""
    torch.set_default_dtype(torch.float32)
    network = NETWORKS[name]
    model, batch = network.model(), network.batch()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = lifted.gradients(model, network.loss, batch, torch.ones(4)).uses
        batched = bookkeeping.gradients(model, network.loss, batch, torch.ones(4)).uses
    for parameter, use in batched.items():
        wanted = use.per_example()
        off = (found[parameter].per_example() - wanted).norm()
        assert off <= 0.02 * wanted.norm() + 1e-6, parameter


def test_dropout_is_each_examples_own() -> None:
    model = nn.Sequential(nn.Linear(1, 64, bias=False), nn.Dropout(0.5))
    found = lifted.gradients(model, lambda model, x: model(x).sum(1), torch.ones(8, 1), torch.ones(8))
    masks = found.uses["0.weight"].per_example().flatten(1)
    assert set(masks.flatten().tolist()) == {0.0, 2.0}
    assert len(masks.unique(dim=0)) == 8


class Ruled(torch.autograd.Function):
    """Nothing, with a rule for vmap of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def vmap(info: Any, dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return Ruled.apply(x), dims[0]


REASONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    **{name: (forward, "by their values") for name, forward in SHAPES.items()},
    "numpy": (lambda own, x: own.a(x) * float(x.detach().numpy().sum()), "other code"),
    "autograd function": (lambda own, x: Doubled.apply(own.a(x), torch.ones(4)), "setup_context"),
    "checkpoint": (lambda own, x: checkpoint(own.a, x, use_reentrant=False), "checkpoint|_NoopSaveInputs"),
    "reentrant checkpoint": (lambda own, x: checkpoint(own.a, x, use_reentrant=True), "setup_context"),
    "buffer": (lambda own, x: own.a(x) + own.held.copy_(x.detach().mean()), "common to all"),
    "own vmap": (lambda own, x: torch.func.vmap(own.a)(x), "parameter a.weight is used inside a vmap"),
    "rule in an own vmap": (
        lambda own, x: torch.func.vmap(torch.func.vmap(Ruled.apply))(own.a(x)[None]), "Ruled has its own rule"
    ),
    "resized": (lambda own, x: own.a(x.clone().resize_(1, *x.shape[1:])), "the memory of others"),
    "resized in an own vmap": (
        lambda own, x: own.a(torch.func.vmap(lambda row: row.clone().resize_(5))(x[0])), "the memory of others"
    ),
    "strided": (lambda own, x: own.a(x.clone().as_strided_(x.shape, x.stride())), "the memory of others"),
    "set": (lambda own, x: own.a(x.clone().set_(x.flip(1))), "the memory of others"),
    "parameter in place": (lambda own, x: own.a(x) + own.a.bias.data.mul_(1).sum(), "mul_ changes in place"),
}  # fmt: skip


ERRORS: dict[str, tuple[Callable[[Any, Tensor], Any], type[Exception], str]] = {
    "shape": (lambda own, x: own.a(x[..., :3]), RuntimeError, "shapes cannot be multiplied"),
    "type": (lambda own, x: own.a(x.float()), ValueError, "types do not match"),
    "key": (lambda own, x: {}["missing"], KeyError, "missing"),
    "value": (lambda own, x: int("seven"), ValueError, "seven"),
    "index of one example": (
        lambda own, x: F.embedding((x[..., 0] > 2.5).long() * 9, own.a.weight), IndexError, "out of range"
    ),
    "no tensor": (lambda own, x: 3.0, AttributeError, "flatten"),
    "BatchNorm": (
        lambda own, x: F.batch_norm(own.a(x).mT, None, None, training=True), ValueError, "BatchNorm in training"
    ),
}  # fmt: skip


class TestRefused:
    """What vmap cannot take is refused with its reason; errors of the model itself stay what they are."""

    @pytest.mark.parametrize("name", REASONS)
    @pytest.mark.parametrize("loss_alone", [False, True])
    def test_with_its_reason(self, name: str, loss_alone: bool) -> None:
        if name == "numpy" and torch.get_default_device().type != "cpu":
            pytest.skip("a tensor on a device has no NumPy array with or without vmap")
        forward, reason = REASONS[name]
        model = Does(forward, lstm=nn.LSTM(4, 3, batch_first=True), **two_layers())
        model.register_buffer("held", torch.zeros(()))
        way: Any = partial(lifted.gradients, weights=torch.ones(4))
        if loss_alone and name not in ("checkpoint", "reentrant checkpoint"):  # which do nothing without a gradient
            way = lifted.losses
        with pytest.raises(CannotLiftError, match=reason) as refused:
            way(model, output_loss, sequences(4))
        assert len(str(refused.value).splitlines()) == 1

    @pytest.mark.parametrize("name", ERRORS)
    def test_errors_of_the_model(self, name: str) -> None:
        if name == "index of one example" and torch.cuda.is_available():
            pytest.skip("an index out of its range ends the process on a CUDA device")
        forward, kind, message = ERRORS[name]
        batch = sequences(5)
        batch[0][3, 2, 0] = 3.0
        with pytest.raises(kind, match=message):
            lifted.gradients(Does(forward, a=nn.Linear(5, 4)), output_loss, batch, torch.ones(5))

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda model, batch: model(batch[0]).mean(), "one value per example"),
            (lambda model, batch: model(batch[0]), "one value per example"),
            (lambda model, batch: 3.0, "must return a tensor"),
            (lambda model, batch: batch[1].long(), "floating-point"),
        ],
    )
    def test_losses(self, loss: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            lifted.gradients(nn.Linear(5, 4), loss, sequences(3), torch.ones(3))


@pytest.mark.parametrize("examples", [1, 3])
def test_a_parameter_written_in_place_is_refused_and_left_alone(examples: int) -> None:
    model = Does(lambda own, x: own.a.weight.data.t()[0].mul_(0).sum() + own.a(x), a=nn.Linear(5, 4))
    before = model.a.weight.clone()
    with pytest.raises(CannotLiftError, match="mul_ changes in place"):
        lifted.gradients(model, output_loss, sequences(examples), torch.ones(examples))
    assert torch.equal(model.a.weight, before)


def test_a_model_is_as_before_when_a_pass_ends_in_a_fork_or_an_error() -> None:
    model = Does(ASKED["nested"], **two_layers())
    before = dict(model.named_parameters())
    lifted.gradients(model, output_loss, sequences(9), torch.ones(9))
    with pytest.raises(CannotLiftError):
        lifted.gradients(Does(lambda own, x: model(x)[x > 0], inner=model), output_loss, sequences(3), torch.ones(3))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("nothing_older")
@pytest.mark.parametrize("name", [*NETWORKS, "fork"])
def test_nothing_is_left_for_the_garbage_collector(name: str) -> None:
    if name == "fork":
        model, batch, loss = Does(ASKED["nested"], **two_layers()), sequences(9), output_loss
    else:
        model, batch, loss = NETWORKS[name].model(), NETWORKS[name].batch(), NETWORKS[name].loss
    gc.collect()
    gc.disable()
    try:
        clipped_sum(model, loss, batch, partial(Hard(), clip=1.0), lifted.gradients)
        assert not [each for each in gc.get_objects() if type(each) is Shared]
    finally:
        gc.enable()


def test_shapes_of_parameters_are_shapes() -> None:
    model = Does(
        lambda own, x: own.a(x) * own.a.weight.shape[:-1].numel() * own.a.weight.size().numel(), a=nn.Linear(5, 4)
    )
    assert_exact(model, output_loss, sequences(3))


def separated(func: Any, shape: tuple[int, ...], *rest: Any, **options: Any) -> None:
    """Each entry of the batch has the result that it has alone."""
    x = torch.randn(3, *shape)
    together = torch.utils._pytree.tree_leaves(func(x, *rest, **options))
    for row in range(3):
        alone = torch.utils._pytree.tree_leaves(func(x[row : row + 1], *rest, **options))
        for one, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(all_of_them[row : row + 1], one)


@pytest.mark.parametrize("func", sorted(fold._RANKS, key=lambda func: (func.__name__, func.__module__ or "")))
def test_entries_of_a_folded_batch_do_not_act_on_each_other(func: Any) -> None:
    """That is what makes it right to fold examples into it."""
    name, rank = func.__name__, fold._RANKS[func]
    space = (6,) * (rank - 2)
    if func is F.scaled_dot_product_attention:
        separated(lambda q: func(q, q.sin(), q.cos(), is_causal=True), (2, 6, 4))
    elif name in ("unfold", "im2col"):
        separated(func, (4, 6, 6), 3)
    elif name == "fold":
        separated(func, (4 * 9, 16), (6, 6), 3)
    elif "conv" in name:
        separated(func, (4, *space), torch.randn(4, 4, *[3] * (rank - 2)), torch.randn(4))
    elif "adaptive" in name:
        separated(func, (4, *space), [3] * (rank - 2))
    else:
        separated(func, (4, *space), [2] * (rank - 2), [1] * (rank - 2))


def test_losses_that_no_example_is_in() -> None:
    """A penalty alone: every example has the same gradient."""
    model = nn.Linear(5, 4)
    found = lifted.gradients(
        model, lambda model, batch: model.weight.square().sum().expand(len(batch[0])), sequences(3), torch.ones(3)
    )
    torch.testing.assert_close(found.uses["weight"].per_example(), (2 * model.weight.detach()).expand(3, -1, -1))
    assert isinstance(found.uses["bias"], Dense)


@pytest.mark.parametrize("name", [name for name in WRITTEN if not name.startswith("checkpointed")])
def test_losses_are_those_of_single_rows(name: str) -> None:
    model, batch = WRITTEN[name](), sequences(4)
    torch.testing.assert_close(lifted.losses(model, output_loss, batch), row_by_row(model, output_loss, batch))


def test_several_rows_see_each_other_and_no_other_example() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, WIDTH))
    x = torch.randn(12, 5)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return per_row(model(x) - model(x).mean(0))

    found = lifted.gradients(model, loss, x, torch.full((12,), 1 / 3), rows=3)
    wanted = vmap.gradients(model, loss, x, torch.full((12,), 1 / 3), rows=3)
    for name, use in wanted.uses.items():
        torch.testing.assert_close(found.uses[name].per_example(), use.per_example())
