"""What a hostile review found in the gradient engines and the check: each attack stays refused, or within the bound."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from reference import DEVICE, assert_equal
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from dpgrad.grads import ENGINES, bookkeeping, check, clipped_sum
from dpgrad.grads.calls import MixedError
from dpgrad.grads.precision import norm_error
from dpgrad.scaling import Hard

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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("examples", [128, 512, 2048])
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
