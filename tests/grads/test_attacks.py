"""What a hostile review found in the gradient engines and the check: each attack stays refused, or within the bound."""

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from networks import Same
from reference import DEVICE, assert_equal
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from dpgrad.grads import ENGINES, bookkeeping, check, clipped_sum
from dpgrad.grads.calls import MixedError
from dpgrad.grads.check import prepared
from dpgrad.grads.precision import norm_error
from dpgrad.grads.scaling import Hard
from thinned import thinned

pytestmark = pytest.mark.usefixtures("on_device")
Loss = Callable[[nn.Module, Tensor], Tensor]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).float().square().sum(1)
    return out


def first(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)[:, 0]
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_many_examples_leave_a_share_between_zero_and_clip(engine: str) -> None:
    """τ grew with the examples of one sum: past 2^22 the factors were negative, past 2^23 they exceeded clip."""
    x = torch.zeros(1 << 23 if engine == "bookkeeping" else 1 << 13, 1)
    x[0] = 100.0
    model = nn.Linear(1, 1, bias=False)
    share = clipped_sum(model, first, x, partial(Hard(), clip=1.0), ENGINES[engine]).sums["weight"].item()
    assert 0.99 < share <= 1.0
    assert norm_error(torch.float32) < 2e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("examples", [1, 5, 100, 127])
def test_the_share_of_an_example_does_not_depend_on_how_many_were_drawn(engine: str, examples: int) -> None:
    """τ grew with the examples drawn, so that one more changed what all others gave to the sum."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.zeros(examples, 2)
    x[0, 0], x[1:, 1] = 3.0, 3.0
    shares = [
        clipped_sum(model, first, few, partial(Hard(), clip=1.0), ENGINES[engine]).sums["weight"][0, 0].item()
        for few in (x, torch.cat([x, torch.tensor([[0.0, 3.0]])]))
    ]
    assert shares[0] == shares[1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", [1e-20, 1e-25, 1e-30])
def test_a_norm_whose_square_is_no_float(engine: str, clip: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    x = torch.full((1, 1), 1e-12)
    found = clipped_sum(model, lambda m, x: m(x)[:, 0] * 1e-11, x, partial(Hard(), clip=clip), ENGINES[engine])
    assert abs(found.sums["weight"].item()) <= clip


@pytest.mark.parametrize("engine", ENGINES)
def test_lookups_that_cancel_do_not_round_other_examples(engine: str) -> None:
    """Two lookups of one row, 66000 and -66000, rounded what another example had there: 1.03 for a clip of 1."""
    width, ulp = 64, 2.0**-7
    model = nn.Embedding(2, width)

    def loss(model: nn.Module, weights: Tensor) -> Tensor:
        out: Tensor = (model(torch.zeros(weights.shape[:2], dtype=torch.int64)) * weights).sum((1, 2))
        return out

    weights = torch.zeros(2, 2, width)
    weights[0, 0] = 15.51 * ulp
    weights[0, 0, :30] = 16.51 * ulp
    weights[1, 0], weights[1, 1] = 66000.0, -66000.0
    with_it, without = (
        clipped_sum(model, loss, w, partial(Hard(), clip=1.0), ENGINES[engine]).sums["weight"].double()
        for w in (weights, weights[1:])
    )
    assert float((with_it - without).norm()) <= 1.0


class Mean(nn.Module):
    """A little of the batch's mean in every row."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.share * x.mean(0, keepdim=True))
        return out


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-2])
def test_examples_that_act_weakly_on_each_other(share: float) -> None:
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="examples act on each other"):
        check(Mean(share), squares, torch.randn(8, 3))


class Quantized(nn.Module):
    """Values on a grid as fine as the largest value of the whole batch allows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    @staticmethod
    def on_grid(x: Tensor) -> Tensor:
        step = x.detach().abs().amax() / 127 + 1e-12
        return x + ((x / step).round() * step - x).detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.on_grid(self.first(self.on_grid(x)).relu()))
        return out


@pytest.mark.parametrize("mixed", [False, True])
def test_one_scale_for_the_whole_batch(mixed: bool) -> None:
    torch.manual_seed(0)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed), pytest.raises(ValueError, match="act on each other"):
        check(Quantized(), squares, torch.randn(8, 8))


class Writes(nn.Module):
    """Keeps the mean of the batch where no version counts."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.plain = torch.zeros(3)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        match self.where:
            case "data":
                self.frozen.data.copy_(x.mean(0))
            case "new data":
                self.frozen.data = x.mean(0)
            case "unregistered":
                self.plain.copy_(x.mean(0))
            case _:
                self.plain = x.mean(0)  # taken back after every pass
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("where", ["data", "new data", "unregistered"])
def test_values_of_the_batch_left_without_a_version(where: str) -> None:
    model = Writes(where)
    with pytest.raises(ValueError, match=r"the forward pass changes (parameter frozen|tensor plain) in place"):
        check(model, squares, torch.randn(8, 3))
    assert not model.frozen.any()
    assert not model.plain.any()


def test_an_attribute_that_is_taken_back_is_accepted() -> None:
    model = Writes("attribute")
    check(model, squares, torch.randn(8, 3))
    assert not model.plain.any()


class Unpadded(nn.Module):
    """Only the entries that a mask keeps, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        found = self.layer(x[mask])[:, 0].sin()
        return torch.zeros(mask.shape, dtype=x.dtype).masked_scatter(mask, found).sum(1)


class Packed(nn.Module):
    """A layer on the entries of a packed sequence, which stand time step by time step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rnn = nn.Linear(3, 5), nn.GRU(5, 1, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        seen = PackedSequence(
            self.layer(packed.data), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
        out: Tensor = self.rnn(seen)[1][-1, :, 0]
        return out


@pytest.mark.parametrize("kind", [Unpadded, Packed])
def test_rows_of_several_lengths_that_are_flattened(kind: Callable[[], nn.Module]) -> None:
    """Equal lengths in the rows that are checked said nothing of the others: these were cut into equal shares."""
    torch.manual_seed(0)
    model = kind()
    batch = torch.randn(8, 6, 3), torch.tensor([3, 3, 3, 3, 1, 5, 2, 4])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = model(*batch)
        return out

    assert check(model, loss, batch).name == "lifted"
    with pytest.raises(MixedError):
        bookkeeping.find_layouts(model, loss, batch)
    assert_equal(model.double(), loss, (batch[0].double(), batch[1]), ENGINES["bookkeeping"], Hard())


@pytest.mark.parametrize(("engine", "examples"), thinned(ENGINES, [2048, 512, 128]))
def test_a_sum_that_rounds_at_every_term_stays_within_the_bound(engine: str, examples: int) -> None:
    """Half the examples climb to a power of two and the others hover around it, so that every addition rounds."""
    model = nn.Linear(1, 1, bias=False)
    climbers = examples // 2
    values = torch.full((examples,), 100.0)
    values[climbers:] = torch.where(torch.arange(examples - climbers) % 2 == 0, 0.5, -0.5 + 0.74 * 2.0**-23 * climbers)
    values[0] = -100.0
    for extra in (0.0, 0.3, 0.6, 1.0):
        values[1] = extra
        sums = [
            clipped_sum(model, first, rows[:, None], partial(Hard(), clip=1.0), ENGINES[engine]).sums["weight"].double()
            for rows in (values, values[1:])
        ]
        assert (sums[0] - sums[1]).abs().item() <= 1.0


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_that_is_not_a_number_does_not_drop_its_example(engine: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3, 3)
    mask = torch.tensor([[True, True, False], [False, True, True], [True, True, True], [False, False, False]])
    scale = partial(Hard(), clip=0.1)
    clean = clipped_sum(model, squares, x, scale, ENGINES[engine], mask=mask, several_rows=True)
    dirty = torch.where(mask[..., None], x, torch.nan)
    found = clipped_sum(model, squares, dirty, scale, ENGINES[engine], mask=mask, several_rows=True)
    for name, total in clean.sums.items():
        torch.testing.assert_close(found.sums[name], total)


class Sorts(nn.Module):
    """Rows sorted by their length around one layer, as recurrent models do it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = (x[:, 0] > 5).long().sort(stable=True).indices  # alike for every row that is probed
        out: Tensor = self.layer(x[order])[order.argsort()]
        return out


def test_rows_sorted_within_the_model_are_lifted_even_where_the_probe_is_in_order() -> None:
    assert check(Sorts(), squares, torch.rand(4, 3)).name == "lifted"
    rows = 10 * torch.rand(9, 3, dtype=torch.float64)
    assert_equal(Sorts().double(), squares, rows, ENGINES["bookkeeping"], Hard())


def test_sorting_and_picking_within_a_row_is_accepted() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.sort(dim=1).values[:, :2]) + self.layer(x.topk(2).values)
            return out

    check(Chooses(), squares, torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_different_types_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(ValueError, match="must have one floating-point type"):
        check(model, squares, torch.randn(4, 3))


# ---- what changes from pass to pass, and what a backward pass or a rule for vmap sees of a whole batch


class Body(nn.Module):
    """Some layers, and a function of (module, batch)."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.zero = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        nn.init.zeros_(self.zero.weight)
        self.body, self.count = body, 0
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.body(self, x) + self.zero(x[:, :1].expand(-1, 4))


def odd(x: Tensor) -> Tensor:
    """One, and nine where an odd row is in the batch."""
    return 1 + 8 * (x.detach() == 9).any().to(x.dtype)


def change_of_others(body: Callable[[Any, Tensor], Tensor], loss: Loss = squares, passes: int = 1) -> float:
    """By how much the gradients of other rows change, of their own length, when one row becomes odd."""
    torch.manual_seed(0)
    random.seed(0)
    model, x = Body(body).to(DEVICE), torch.rand(30, 3, device=DEVICE)
    y = x.clone()
    y[25] = 9.0
    change = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = prepared(model, loss, x)[0]
        for _ in range(passes):
            uses = [engine(model, loss, some, torch.ones(30, device=DEVICE)).uses.values() for some in (x, y)]
            one, other = (torch.cat([use.per_example().flatten(1) for use in each], 1)[:25] for each in uses)
            change = max(change, float(((one - other).norm(dim=1) / one.norm(dim=1)).max()))
    return change


class Back(torch.autograd.Function):
    """The same values, and a backward pass that looks at the inputs of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * odd(ctx.saved_tensors[0]), None


class Turning(torch.autograd.Function):
    """The same values, and a backward pass of the same length, whose sign looks at the inputs of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * (5 - odd(ctx.saved_tensors[0])) / 4, None


class Ruled(torch.autograd.Function):
    """The same values, and a rule for vmap that looks at the inputs of all examples."""

    @staticmethod
    def forward(x: Tensor, inputs: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, int], x: Tensor, inputs: Tensor) -> tuple[Tensor, int]:
        return Ruled.apply(x * odd(inputs), inputs), dims[0]


@torch.library.custom_op("dpgrad_attacks::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


torch.library.register_autograd(same, lambda ctx, g: g)
torch.library.register_vmap(same, lambda info, dims, x: (same(x * odd(x)), dims[0]))


def changed_when_saved(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept * odd(x)):
        out: Tensor = m.second(m.first(x).sin())
    return out


def zero_layer(m: Any, x: Tensor) -> Tensor:
    h = Same.apply(m.first(x))
    out: Tensor = m.second(h) + m.zero(h * odd(x))
    return out


def with_gradients_only(m: Any, x: Tensor) -> Tensor:
    h = Same.apply(m.first(x))
    out: Tensor = m.second(h * (odd(x) if h.requires_grad else 1))
    return out


def straight_through(model: nn.Module, x: Tensor) -> Tensor:
    """The value says nothing of the gradient."""
    own = squares(model, x)
    return own.detach() + odd(x) * (own - own.detach())


@pytest.mark.parametrize(
    ("body", "loss"),
    [
        (lambda m, x: m.second(Back.apply(m.first(x), x)), squares),
        (lambda m, x: m.second(Turning.apply(m.first(x), x)), squares),
        (lambda m, x: m.second(Same.apply(m.first(x))), straight_through),
        (zero_layer, squares),
        (with_gradients_only, squares),
        (changed_when_saved, squares),
        (lambda m, x: m.second(Ruled.apply(m.first(x), x)), squares),
        (lambda m, x: m.second(m.first(same(x)[:, :1] / x[:, :1] * x)), squares),
    ],
    ids=[
        "backward",
        "turned backward",
        "straight through",
        "zero layer",
        "with gradients only",
        "when saved",
        "rule for vmap",
        "rule of an operation",
    ],
)
def test_a_statistic_that_no_loss_shows(body: Callable[[Any, Tensor], Tensor], loss: Loss) -> None:
    """Losses and lengths of half-batches were compared, and rules for vmap trusted: one row moved sums by 12 × clip."""
    try:
        assert change_of_others(body, loss) < 0.01
    except ValueError as refusal:
        assert "engine='single'" in str(refusal) or "act on each other" in str(refusal)  # noqa: PT017


@pytest.mark.parametrize(
    "now",
    [lambda m: m.count > 100, lambda m: random.random() < 0.03, lambda m: bool(torch.rand(()) < 0.03)],
    ids=["counted", "drawn", "drawn by torch"],
)
def test_a_path_that_is_taken_now_and_then(now: Callable[[Any], bool]) -> None:
    """What was followed once was taken for true of all passes: one row changed the gradients of others."""
    taken = []

    def body(m: Any, x: Tensor) -> Tensor:
        taken.append(now(m))
        out: Tensor = m.second(m.first(x * odd(x) if taken[-1] else x))
        return out

    try:
        assert change_of_others(body, passes=100) < 0.01
    except ValueError as refusal:
        assert "act on each other" in str(refusal)  # noqa: PT017
    assert any(taken)


def test_an_ordinary_model_is_followed_once() -> None:
    x, counting = torch.rand(5, 3), Body(lambda m, x: m.second(m.first(x)))
    for model in (nn.Sequential(counting.first, nn.Dropout(), counting.second), counting):
        layouts = bookkeeping.find_layouts(model, squares, x)
        bookkeeping.gradients(model, squares, x, torch.ones(5), layouts=layouts)
        assert bool(layouts.proven) == (model is not counting)


ELSEWHERE: list[Tensor] = []


@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_what_is_kept_of_an_earlier_batch(lifted: bool, own: bool) -> None:
    """It changed the gradients of later batches, and inside vmap it was taken for a tensor of theirs."""

    def body(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        if lifted:
            order = x[:, 0].argsort()
            h = h[order][order.argsort()]
        held = m.held if own else ELSEWHERE
        if m.count > 100 and held[-1].shape == h.shape:
            h = h + held[-1]
        held.append(h.detach())
        out: Tensor = m.second(h)
        return out

    ELSEWHERE.clear()
    with pytest.raises(ValueError, match="kept from an earlier batch"):
        change_of_others(body, passes=60)


def test_what_is_kept_and_not_used_again_is_accepted() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.held[:] = [m.first(x)]
        out: Tensor = m.second(m.held[0])
        return out

    assert change_of_others(body, passes=3) == 0


def test_random_numbers_that_a_model_seeds() -> None:
    """Examples get them by their place: one row moved sums by 6 × clip."""

    def body(m: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        out: Tensor = m.second(m.first(x) * torch.rand(len(x), 1, device=x.device))
        return out

    with pytest.raises(ValueError, match=r"remove torch\.manual_seed"):
        check(Body(body), squares, torch.rand(8, 3))


def test_a_generator_of_the_model_s_own_inside_vmap() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        h = m.first(x)
        out: Tensor = m.second(h + (torch.rand(len(x), 4, generator=generator) if bool((x == 9).any()) else 0))
        return out

    with pytest.raises(ValueError, match="generator of the model's own"):
        change_of_others(body)
