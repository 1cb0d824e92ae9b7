"""Contract (a) in the precisions that models compute in: no example moves the sum by more than the clip bound."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import pytest
import torch
from networks import NETWORKS
from reference import DEVICE, example_gradients, norms, scaled_sum
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from dpgrad.grads import ENGINES, bookkeeping, clipped_sum
from dpgrad.grads.clip import PerExample
from dpgrad.grads.patches import Patches
from dpgrad.grads.precision import MEASURED_ERROR, exact_products, norm_error, own_products, precision_settings
from dpgrad.grads.scaling import RULES, Automatic, Hard, Psac, Psasc
from dpgrad.grads.uses import Dense, Lookup, Outer, Tied, lengths, worth_forming
from thinned import thinned

CLIP = 0.5
EXAMPLES = 12
SIZES = {"Psasc": {"s": 0.6}}
ALL_RULES = [kind(**SIZES.get(kind.__name__, {})) for kind in RULES]


@contextlib.contextmanager
def computing(precision: str) -> Iterator[None]:
    """float32 as it is, TF32 (on a GPU; bfloat16 products of float32 tensors on a CPU), or bfloat16 autocast."""
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh()
        )
        self.head = nn.Linear(8 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.view(-1, 1, 8, 8)).flatten(1))
        return out


class Sequential(nn.Module):
    """Token and position embeddings, attention, layer norm, and the token embedding again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 16), nn.Embedding(64, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 2).long() % 11
        hidden = self.block(self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        out: Tensor = self.head(hidden).mean(1)
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float(), targets, reduction="none")


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    model = kind().to(DEVICE)
    inputs = torch.randn(EXAMPLES, 64, device=DEVICE) * torch.logspace(-2, 2, EXAMPLES, device=DEVICE)[:, None]
    return model, (inputs, torch.randint(0, 5, (EXAMPLES,), device=DEVICE))


def flat(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([total.double().flatten() for total in sums.values()])


@pytest.mark.parametrize(
    ("engine", "network", "precision", "rule"),
    thinned(ENGINES, [Convolutional, Sequential], ["float32", "tf32", "bf16"], ALL_RULES, pairs=True),
)
def test_one_example_moves_the_sum_by_at_most_clip(
    engine: str, network: Callable[[], nn.Module], precision: str, rule: Hard | Automatic | Psac | Psasc
) -> None:
    model, batch = made(network)
    scale = partial(rule, clip=CLIP)
    with computing(precision):
        whole = clipped_sum(model, loss, batch, scale, ENGINES[engine])
        for i in range(0, EXAMPLES, 3):
            alone = clipped_sum(model, loss, tuple(leaf[i : i + 1] for leaf in batch), scale, ENGINES[engine])
            assert flat(alone.sums).norm() <= CLIP
            mask = torch.arange(EXAMPLES, device=DEVICE) != i
            without = clipped_sum(model, loss, batch, scale, ENGINES[engine], mask=mask)
            assert (flat(whole.sums) - flat(without.sums)).norm() <= CLIP
            rest = clipped_sum(model, loss, tuple(leaf[mask] for leaf in batch), scale, ENGINES[engine])
            # Without the row, products of another shape may round other examples' activations otherwise.
            others = {"float32": 1e-5, "tf32": 5e-3, "bf16": 3e-2}[precision] * CLIP * EXAMPLES**0.5
            assert (flat(whole.sums) - flat(rest.sums)).norm() <= CLIP + others


# Of the length of a sum; not every CPU has a mode between the other two. On CUDA the norm of a convolution is longer by
# what transforms may leave, 1.5e-5 of the whole input times the whole gradient.
ROUNDING = {"bf16": 0.1} | ({"float32": 1e-4, "tf32": 2e-2} if DEVICE == "cuda" else {"float32": 1e-5})


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(name: str) -> None:
    """Autograd in float64 on each example alone, but for rounding; and no example moves the sum by more than clip."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    with torch.device(DEVICE):
        model, batch = network.model(), network.batch()
        wide = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)
        gradients = example_gradients(copy.deepcopy(model).double(), network.loss, wide)
        engine = partial(bookkeeping.gradients, layouts=bookkeeping.find_layouts(model, network.loss, batch))
        one, none = 2 * max(norms(gradients)), min(norms(gradients)) / 2  # every factor is one, or none is
        for precision, clip in itertools.product(ROUNDING, (one, none)):
            wanted = flat(scaled_sum(gradients, Hard(), (clip,))) * (1 - norm_error(torch.float32))
            with computing(precision):
                sums = partial(clipped_sum, model, network.loss, batch, partial(Hard(), clip=clip), engine)
                found = flat(sums().sums)
                only = torch.arange(4) == 2
                alone, without = (flat(sums(mask=mask).sums) for mask in (only, ~only))
            assert max(alone.norm(), (found - without).norm()) <= clip, precision
            assert (found - wanted).norm() <= ROUNDING[precision] * wanted.norm(), precision


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("network", [Convolutional, Sequential])
def test_hard_clipping_comes_within_tau_of_the_bound(engine: str, network: Callable[[], nn.Module]) -> None:
    """The margins are not so wide that signal is thrown away."""
    model, batch = made(network)
    for i in range(EXAMPLES):
        one = tuple(leaf[i : i + 1] for leaf in batch)
        found = clipped_sum(model, loss, one, partial(Hard(), clip=1e-4), ENGINES[engine])
        assert 0.995e-4 <= flat(found.sums).norm() <= 1e-4


def exactly(use: Outer | Lookup | Tied | Dense) -> Tensor:
    """The norms in float64."""
    return use.per_example().double().flatten(1).norm(dim=1)


def double(use: Outer | Lookup | Tied) -> Outer | Lookup | Tied:
    match use:
        case Outer(a, g):
            return Outer(a.double(), g.double())
        case Lookup(ids, g, count):
            return Lookup(ids, g.double(), count)
        case Tied(rows, outer):
            return Tied(double(rows), double(outer))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(64, 3, 4), (8, 40, 50), (1, 5, 5), (8, 300, 200), (1, 64, 64), (70, 900, 900)])
@pytest.mark.parametrize("left", [1.0, 1e-2, 1e-4, 1e-6, 0.0])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_cancelling_products_are_never_measured_too_short(
    sizes: tuple[int, int, int], left: float, precision: str
) -> None:
    """Terms that cancel to a fraction of their size: float32 has lost the norm, which must not come out smaller."""
    positions, d, p = sizes
    torch.manual_seed(positions)
    a, g = torch.randn(20, positions, d, device=DEVICE), torch.randn(20, positions, p, device=DEVICE)
    use = Outer(torch.cat([a, a], 1), torch.cat([g, -g * (1 - left)], 1))
    with computing(precision), own_products():
        norms, summed = use.measured()
        assert isinstance(summed, Dense) == worth_forming(2 * positions, d, p, a.device)  # both are among the sizes
        if not isinstance(summed, Dense):  # else what was measured is itself what is summed
            # TF32 measures factors that are cut: what it adds for that covers the rounding of the factors as well.
            assert (norms.double() >= exactly(double(use)) * (1 - MEASURED_ERROR[torch.float32])).all()
        factors = torch.rand(20, device=DEVICE)
        for i in range(3):
            term = summed.weighted_sum(torch.where(torch.arange(20, device=DEVICE) == i, factors, 0))
            assert term.double().norm() <= factors[i] * norms[i].double() * (1 + MEASURED_ERROR[torch.float32])


@pytest.mark.parametrize("left", [1.0, 1e-2, 1e-4, 0.0])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_cancelling_convolutions_are_never_measured_too_short(left: float, precision: str) -> None:
    torch.manual_seed(7)
    half, g = torch.randn(130, 256, 4, 4, device=DEVICE), torch.randn(130, 256, 4, 4, device=DEVICE)
    x = torch.cat([half, torch.zeros(130, 256, 1, 4, device=DEVICE), half], 2)  # the same again, out of reach
    g = torch.cat([g, torch.zeros(130, 256, 1, 4, device=DEVICE), -g * (1 - left)], 2)
    use = Patches(x, g, (1, 1), (1, 1), (0, 0), (1, 1), 1, 130)
    with computing(precision), own_products():
        norms, summed = use.measured()
        assert isinstance(summed, Patches)
        assert (norms.double() >= exactly(double(Outer(*(t.flatten(2).mT for t in (x, g))))) * (1 - 2e-4)).all()
        factors = torch.rand(130, device=DEVICE)
        for i in range(3):
            term = summed.weighted_sum(torch.where(torch.arange(130, device=DEVICE) == i, factors, 0))
            assert term.double().norm() <= factors[i] * norms[i].double() * (1 + MEASURED_ERROR[torch.float32])


@pytest.mark.parametrize("left", [1.0, 1e-3, 1e-6, 0.0])
def test_tied_uses_that_cancel_are_never_measured_too_short(left: float) -> None:
    torch.manual_seed(5)
    ids = torch.randint(0, 7, (10, 9), device=DEVICE)
    g = torch.randn(10, 9, 4, device=DEVICE)
    onehot = F.one_hot(ids, 7).float()  # a linear layer that undoes the embedding's gradient
    use = Tied(Lookup(ids, g, 7), Outer(-g * (1 - left), onehot))
    with exact_products():
        norms, _ = use.measured()
    assert (norms.double() >= exactly(double(use)) * (1 - MEASURED_ERROR[torch.float32])).all()


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("width", [16, 128, 300])
def test_a_norm_does_not_depend_on_how_many_examples_stand_beside_it(width: int, precision: str) -> None:
    """Else one example more would change the factors of all others. Few and many differ by any limit on memory."""
    torch.manual_seed(8)
    a, g = torch.randn(600, 32, width, device=DEVICE), torch.randn(600, 32, width, device=DEVICE)
    x, y = (each.mT.reshape(600, width, 4, 8) for each in (a, g))
    with computing(precision), own_products():
        for use in (Outer(a, g), Patches(x, y, (1, 1), (1, 1), (0, 0), (1, 1), 1, 600)):
            many = use.measured()[0][:3]
            few = use.part(slice(0, 3)).measured()[0]
            # cuBLAS may round to TF32 in another order where there are more; another form would move it by a percent.
            assert ((many / few - 1).abs() < (2e-3 if precision == "tf32" else 1e-5)).all()


@pytest.mark.parametrize("positions", [1, 2, 40])
def test_a_tied_use_whose_positions_cancel_adds_no_more_than_its_norm(positions: int) -> None:
    """Positions that cancel before they are scaled need not do so afterwards, however the norm was found."""
    torch.manual_seed(6)
    a = torch.randint(-9, 10, (8, positions, 3), device=DEVICE).float()
    g = torch.randint(-9, 10, (8, positions, 5), device=DEVICE).float()
    outer = Outer(torch.cat([3 * a, a], 1), torch.cat([g, -3 * g], 1))
    use = Tied(
        Lookup(torch.zeros(8, 1, dtype=torch.int64, device=DEVICE), torch.zeros(8, 1, 3, device=DEVICE), 5), outer
    )
    with own_products():
        norms, summed = use.measured()
        factors = (1 / norms).clamp(max=1e6)
        for i in range(8):
            term = summed.weighted_sum(torch.where(torch.arange(8, device=DEVICE) == i, factors, 0))
            assert term.double().norm() <= factors[i] * norms[i].double() * (1 + MEASURED_ERROR[torch.float32])


@pytest.mark.parametrize("values", [1 << 13, (1 << 13) + 1, 1 << 20, 3 << 20])
def test_the_norm_of_a_long_row_is_not_short(values: int) -> None:
    """One large value first, then small ones whose squares would vanish beside it."""
    row = torch.full((1, values), 2.0**-13 * 0.99, device=DEVICE)
    row[0, ::64] = 1.0
    true = float(row.double().norm())
    assert true * (1 - MEASURED_ERROR[torch.float32]) <= float(Dense(row).measured()[0]) <= true * (1 + 1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-19, 1e-10, 1.0, 1e18])
def test_norms_survive_tiny_and_huge_entries(size: float) -> None:
    a, g = torch.full((3, 1, 4), size, device=DEVICE), torch.full((3, 1, 4), 1 / size, device=DEVICE)
    norms, _ = Outer(a, g).measured()
    assert (norms >= 4 * (1 - 1e-6)).all()
    assert (lengths(a) >= 2 * size * (1 - 1e-6)).all()


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-21), (torch.float32, 1e-24), (torch.float64, 1e-163)])
def test_no_norm_is_short_where_squares_vanish(dtype: torch.dtype, size: float, many: int) -> None:
    """A norm of 0 in place of a small one would be divided by."""
    rows = torch.full((2, 50), size, dtype=dtype, device=DEVICE)
    gradients = PerExample({str(part): Dense(rows) for part in range(many)})
    assert (gradients.norms() >= size * math.sqrt(50 * many) * (1 - 1e-6)).all()


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("size", [1e-19, 1e-20, 1e-21, 1e-23])
def test_ghost_norms_survive_tiny_entries(size: float, precision: str) -> None:
    a, g = torch.full((2, 2, 40), size, device=DEVICE), torch.full((2, 2, 50), 1e15, device=DEVICE)
    with computing(precision), own_products():
        norms, summed = Outer(a, g).measured()
    assert isinstance(summed, Outer)
    assert (norms.double() >= exactly(double(Outer(a, g))) * (1 - 1e-6)).all()


def settings() -> list[str]:
    return [setting.fp32_precision for setting in precision_settings()]


def test_exact_products_restore_what_was_set() -> None:
    with computing("tf32"):
        before = settings()
        with exact_products():
            assert set(settings()) == {"ieee"}
        assert settings() == before
        with pytest.raises(KeyError, match="x"), exact_products():
            raise KeyError("x")
        assert settings() == before
        assert torch.get_float32_matmul_precision() == "medium"
    with computing("bf16"), exact_products():
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype == torch.float32


def test_exact_products_restore_autocast() -> None:
    for enabled in (True, False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            with own_products(), own_products():
                assert not torch.is_autocast_enabled(DEVICE)
            assert torch.is_autocast_enabled(DEVICE) == enabled
            assert torch.get_autocast_dtype(DEVICE) == torch.bfloat16


def test_a_second_thread_waits() -> None:
    """torch's settings are those of the process: one thread would restore them while another multiplies."""

    def enter() -> list[str]:
        with own_products():
            return settings()

    with computing("tf32"), ThreadPoolExecutor(1) as pool:
        before = settings()
        with own_products():
            other = pool.submit(enter)
            with own_products():  # the same thread need not wait
                pass
            assert wait([other], timeout=0.2).not_done
            assert set(settings()) == {"ieee"}
        assert set(other.result()) == {"ieee"}
        assert settings() == before


def test_exact_products_are_exact() -> None:
    a, b = torch.full((64, 64), 1 + 2.0**-12, device=DEVICE), torch.ones(64, 64, device=DEVICE)
    with computing("tf32"), exact_products():
        assert torch.equal(a @ b, torch.full_like(a, 64 * (1 + 2.0**-12)))


def test_sums_of_bfloat16_models_are_float32() -> None:
    model = nn.Linear(4, 3).bfloat16()
    found = clipped_sum(model, lambda m, x: m(x).float().sum(1), torch.randn(6, 4).bfloat16(), torch.ones_like)
    assert {total.dtype for total in found.sums.values()} == {torch.float32}


def test_a_long_sum_in_bfloat16_autocast_does_not_lose_an_example() -> None:
    """256 equal terms in bfloat16 would swallow the last one: the sum must still move by it."""
    model = nn.Linear(1, 1, bias=False).to(DEVICE)
    inputs = torch.ones(300, 1, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = clipped_sum(model, lambda m, x: m(x).float()[:, 0], inputs, partial(Hard(), clip=1.0))
        fewer = clipped_sum(model, lambda m, x: m(x).float()[:, 0], inputs[1:], partial(Hard(), clip=1.0))
    moved = float(found.sums["weight"] - fewer.sums["weight"])
    assert 0.99 <= moved <= 1.0


def test_one_example_more_among_many_alike() -> None:
    """Short sums end where they end without it: if all of them were cut otherwise, all would round otherwise."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, 0]

    model = nn.Linear(4, 1, bias=False)
    layouts = bookkeeping.find_layouts(model, loss, torch.ones(2, 4))
    engine = partial(bookkeeping.gradients, layouts=layouts)
    for seed in (37, 62, 69):  # rows for which pieces of 127 of 65,535 rows would exceed the bound
        row = 1.5 + torch.rand(4, generator=torch.Generator().manual_seed(seed))
        more, fewer = (
            clipped_sum(model, loss, row.repeat(count, 1), partial(Hard(), clip=1.0), engine).sums["weight"].double()
            for count in (65_536, 65_535)
        )
        assert float((more - fewer).norm()) <= 1.0
