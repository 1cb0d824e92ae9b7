"""Each Triton kernel against the plain path: they run on a CUDA device only."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpgrad import _triton
from dpgrad.grads import bookkeeping, vmap
from dpgrad.grads.layers import linear
from dpgrad.grads.precision import MEASURED_ERROR
from dpgrad.grads.scaling import RULES, Quotient
from dpgrad.grads.uses import Dense, Outer, Use
from dpgrad.randomness import device_noise, philox

pytestmark = pytest.mark.skipif(not _triton.available, reason="needs a CUDA device and Triton")

SINGLE = [torch.float32, torch.bfloat16, torch.float16]


def cut(x: Tensor) -> Tensor:
    """x to TF32 towards zero."""
    return (x.view(torch.int32) & -0x2000).view(torch.float32)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("sizes", [(5, 70, 33), (16, 8, 8), (70, 40, 20), (200, 768, 70), (300, 33, 130), (513, 20, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ghost(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    from dpgrad.grads.kernels.products import ghost

    positions, d, p = sizes
    a, g = random(3, positions, d).to(dtype), random(3, positions, p).to(dtype)
    exact_a, exact_g = (cut(each.float()).double() for each in (a, g))
    norms = (exact_g.mT @ exact_a).flatten(1).norm(dim=1)
    mass = (exact_a.norm(dim=2) * exact_g.norm(dim=2)).sum(1)
    assert ((ghost(a, g, 0.0, 0.0, 0.0) / norms - 1).abs() < 1e-4).all()
    wanted = (norms**2 + 1e-2 * mass**2).sqrt() + 1e-2 * mass
    assert ((ghost(a, g, 1e-2, 1e-2, 0.0) / wanted - 1).abs() < 1e-4).all()
    a[1, 0, 0] = math.nan
    assert ghost(a, g, 0.0, 0.0, 0.0).isfinite().tolist() == [True, False, True]


def test_an_overflow_is_not_taken_for_a_short_norm() -> None:
    """⟨G₁, G₂⟩ of two blocks of positions overflows below zero: the norm must not come out finite and short."""
    from dpgrad.grads.kernels.products import ghost

    for positions in (256, 384):
        a, g = torch.full((1, positions, 8), 1e8, device="cuda"), torch.full((1, positions, 8), 5e8, device="cuda")
        g[:, 128:] *= -1
        true = (g.double().mT @ a.double()).norm()
        found = ghost(a, g, 1e-4, 1e-3, 0.0)
        assert not found.isfinite() or found >= true


SHAPES = [
    (3, 20, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8)),
    (40, 16, (3, 3), (1, 1), (1, 1), (1, 1), (16, 17)),
    (5, 7, (3, 2), (2, 1), (1, 0), (2, 3), (11, 12)),
    (130, 140, (1, 1), (1, 1), (0, 0), (1, 1), (4, 4)),
    (1, 16, (8, 8), (2, 2), (3, 3), (1, 1), (28, 28)),
]


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_convolutions(shape: tuple[Any, ...], items: int) -> None:
    from dpgrad.grads.kernels.convolution import formed
    from dpgrad.grads.kernels.products import ghost, swapped

    ins, outs, kernel, stride, padding, dilation, size = shape
    x = cut(random(4, ins, *size))
    weight = random(outs, ins, *kernel).requires_grad_()
    g = cut(torch.randn_like(F.conv2d(x, weight, None, stride, padding, dilation)))
    wanted = []
    for of_one, of_g in zip(x.double().split(items), g.double().split(items), strict=True):
        out = F.conv2d(of_one, weight.double(), None, stride, padding, dilation)
        wanted.append(torch.autograd.grad(out, weight, of_g)[0].double())
    matrices = torch.stack(wanted).flatten(2)
    norms = matrices.flatten(1).norm(dim=1)
    found, parts = formed(x, g, kernel, stride, padding, dilation, items)
    assert ((found - matrices).flatten(1).norm(dim=1) < 1e-5 * norms).all()
    assert ((parts.sum(1).sqrt() / norms - 1).abs() < 1e-5).all()
    turned = swapped(x.flatten(2)).view(4, *size, ins)
    sizes = (*size, g.shape[3], *kernel, *stride, *padding, *dilation)
    of_examples = swapped(g.flatten(2)).view(4 // items, -1, outs)
    measured = ghost(turned, of_examples, 0.0, 0.0, 0.0, sizes, items)
    assert ((measured / norms - 1).abs() < 1e-4).all()


def test_scaled() -> None:
    from dpgrad.grads.kernels.products import scaled

    x, factors = random(7, 33, 129), torch.rand(7, device="cuda")
    found, wanted = scaled(x, factors), cut(x) * factors[:, None, None]
    assert ((found - wanted).abs() <= 2.0**-11 * wanted.abs()).all()
    assert torch.equal(cut(found), found)
    x[2, 3, 4] = math.inf
    x.view(torch.int32)[3, 0, 0] = 0x7FFFFFFF  # a number it is not, and rounding it up would make it zero
    assert [int((~row.isfinite()).sum()) for row in scaled(x, factors)] == [0, 0, 1, 1, 0, 0, 0]


def test_swapped() -> None:
    from dpgrad.grads.kernels.products import swapped

    for shape in [(3, 70, 50), (2, 5, 100), (1, 1, 1), (4, 64, 64)]:
        x = random(*shape)
        assert torch.equal(swapped(x), x.mT)


@pytest.mark.parametrize("shape", [(1, 1), (300, 5), (512, 8192), (130, 40_000)])
@pytest.mark.parametrize("dtype", SINGLE)
def test_weighted(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from dpgrad.grads.kernels.products import weighted

    x, factors = random(*shape).to(dtype), torch.rand(shape[0], device="cuda")
    wanted = factors.double() @ x.double()
    assert weighted(x, factors).dtype == torch.float64
    assert ((weighted(x, factors) - wanted).abs() <= 1e-12 * shape[0]).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 5, 7), (512, 512, 32), (130, 33, 100)])
@pytest.mark.parametrize("dtype", SINGLE)
def test_weighted_outer(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    from dpgrad.grads.kernels.products import weighted_outer

    examples, d, p = shape
    a, g, factors = random(examples, d).to(dtype), random(examples, p).to(dtype), torch.rand(examples, device="cuda")
    wanted = (g.double() * factors.double()[:, None]).mT @ a.double()
    assert (weighted_outer(a, g, factors, 128) - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 5, 7), (512, 256, 256), (3, 40_000, 1025), (2, 9, 70_001)])
@pytest.mark.parametrize("dtype", SINGLE)
def test_lengths_of_a_layer(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """They are those of float64, as exactly as norms are said to be, for every order of the values."""
    from dpgrad.grads.kernels.lengths import of_layer

    examples, d, p = shape
    for a, g in [
        (random(examples, d), random(examples, p)),
        (random(d, examples).mT, random(examples, 3 * p)[:, p : 2 * p]),
        (random(1, d).expand(examples, d), random(examples, 2, p)[:, 1]),
    ]:
        a, g = a.to(dtype), g.to(dtype)
        of_a, of_g = a.double().norm(dim=1), g.double().norm(dim=1)
        for found, wanted in zip(of_layer(a, g), (of_a * of_g, of_g), strict=True):
            assert found.dtype == torch.float32
            assert ((found / wanted - 1).abs() <= MEASURED_ERROR[torch.float32] / 16).all()


def test_squares_below_the_least_float_are_in_the_length_of_a_layer() -> None:
    from dpgrad.grads.kernels.lengths import of_layer

    for small in (1e-19, 1e-23, 1e-38, 1e-45):
        a, g = torch.full((2, 700), small, device="cuda"), torch.full((2, 33), 3.0, device="cuda")
        wanted = a.double().norm(dim=1) * g.double().norm(dim=1)
        assert (of_layer(a, g)[0] >= wanted * (1 - MEASURED_ERROR[torch.float32])).all()
        assert (of_layer(g, a)[0] >= wanted * (1 - MEASURED_ERROR[torch.float32])).all()
        assert (of_layer(a, a)[0] >= a.double().square().sum(1) * (1 - MEASURED_ERROR[torch.float32])).all()


def test_what_is_not_finite_makes_the_length_of_a_layer_so() -> None:
    from dpgrad.grads.kernels.lengths import of_layer

    for odd in (math.nan, math.inf, -math.inf, 3e38):
        a, g = random(4, 2000), random(4, 33)
        a[1, 1999], g[2, 0] = odd, odd
        of_weight, of_bias = of_layer(a, g)
        assert of_weight.isfinite().tolist() == [True, False, False, True]
        assert of_bias.isfinite().tolist() == [True, True, False, True]
    a, g = random(2, 5), torch.zeros(2, 3, device="cuda")
    a[0, 0] = math.inf
    assert of_layer(a, g)[0].isfinite().tolist() == [False, True]


def test_a_layer_is_measured_in_a_captured_graph() -> None:
    """A replay measures the values that there are by then."""
    from dpgrad.grads.kernels.lengths import of_layer

    a, g = random(130, 40), random(130, 70)
    of_layer(a, g)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = of_layer(a, g)
    a.copy_(random(130, 40))
    g.copy_(random(130, 70))
    graph.replay()
    for captured, wanted in zip(found, of_layer(a, g), strict=True):
        assert torch.equal(captured, wanted)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The examples of every launch of the kernel that measures layers, from now on."""
    from dpgrad.grads.kernels import lengths

    found, of_layer = [], lengths.of_layer

    def noted(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        found.append(len(a))
        return of_layer(a, g)

    monkeypatch.setattr(lengths, "of_layer", noted)
    return found


@pytest.mark.parametrize("dtype", SINGLE)
@pytest.mark.parametrize("outs", [1, 6])
@pytest.mark.parametrize("many", [7, 300])
def test_weight_and_bias_are_measured_and_summed_as_in_double(
    dtype: torch.dtype, outs: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one launch for both, whichever is asked for first, and without a copy in float32."""
    x, g, weight, bias = (random(*shape).to(dtype) for shape in ((many, 1, 5), (many, 1, outs), (outs, 5), (outs,)))
    factors = torch.rand(many, device="cuda")
    exact = g.double().mT @ x.double()
    launched = launches(monkeypatch)
    cases: list[tuple[dict[str, Use], float, float]] = [
        (linear.linear(g, x, weight, bias), 1, 1),
        (linear.addmm(g, bias, x, weight.mT), 1, 1),
        (linear.addmm(g, bias, x, weight.mT, alpha=0.5, beta=0.5), 0.5, 0.5),
        (linear.addmm(g, bias, x, weight.mT, alpha=0.5, beta=2), 0.5, 2),
    ]
    for at, (uses, alpha, beta) in enumerate(cases):
        launched.clear()
        of_weight = exact if at == 0 else exact.mT
        found = [uses[name].settled() for name in ("bias", "weight")]
        if alpha == beta:
            assert {each.gradients.dtype for each in found if isinstance(each, Dense | Outer)} == {dtype}
        assert launched == [many]
        for name, wanted in (("bias", beta * g[:, 0].double()), ("weight", alpha * of_weight)):
            norms, use = uses[name].settled().measured()
            assert torch.allclose(norms.double(), wanted.flatten(1).norm(dim=1), rtol=1e-5)
            assert torch.allclose(use.per_example().double(), wanted, rtol=1e-6)
            total = torch.einsum("i...,i->...", wanted, factors.double())
            assert (use.weighted_sum(factors) - total).norm() <= 1e-6 * (wanted.abs().sum(0)).norm()
            few = use.part(slice(2, 5))
            assert torch.equal(few.per_example(), use.per_example()[2:5])
            assert torch.allclose(few.measured()[0], norms[2:5], rtol=1e-5)


def test_a_layer_with_a_bias_of_one_number_is_measured_as_it_is() -> None:
    x, g = random(9, 1, 5), random(9, 1, 6)
    found = linear.linear(g, x, random(6, 5), random(1))["bias"]
    assert torch.allclose(found.settled().measured()[0], g.sum((1, 2)).abs(), atol=1e-5)


class Steps(nn.Module):
    """Layers at one position, one of them without bias, one with a frozen weight, and one used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.plain = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(3):
            x = self.again(x).tanh()
        return self.last(self.frozen(self.plain(x)).tanh())


def test_layers_at_one_position_take_one_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are used several times take none; norms and clipped sums are those of one example at a time."""
    model, x = Steps().to("cuda"), random(200, 5)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1)

    weights = torch.ones(200, device="cuda")
    wanted = vmap.gradients(model, loss, x, weights)
    bookkeeping.gradients(model, loss, x, weights)
    launched = launches(monkeypatch)
    found = bookkeeping.gradients(model, loss, x, weights)
    assert torch.allclose(found.norms(), wanted.norms(), rtol=1e-4)
    assert launched == [200] * 4  # first, plain, frozen, last

    def scale(norms: Tensor) -> Tensor:
        return (1 / norms).clamp(max=1)

    sums, exact = found.clipped(scale).sums, wanted.clipped(scale).sums
    for name in exact:
        assert torch.allclose(sums[name].double(), exact[name].double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_factors(kind: type[Quotient], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of plain torch, to the bit, for every kind of norm."""
    odd = [0.0, 1e-45, 1e-30, 0.5, 1.0, math.nextafter(1.0, 2), 3.4e38, math.inf, -math.inf, -1.0, math.nan]
    norms = torch.cat([torch.tensor(odd), torch.rand(2000) * 3]).cuda().repeat(2, 1)
    rule = kind(**({"s": 0.6} if kind.__name__ == "Psasc" else {}))
    for clip in (1.0, torch.tensor([[0.5], [2.0]], dtype=torch.float64, device="cuda")):
        found = rule(norms, clip)
        with monkeypatch.context() as patch:
            patch.setattr(_triton, "available", False)
            assert torch.equal(found, rule(norms, clip))


def test_examples_that_are_not_finite_have_no_factor() -> None:
    from dpgrad.grads.kernels.factors import finite, together

    norms, factors = torch.rand(3, 1500, device="cuda"), torch.rand(3, 1500, device="cuda")
    found, kept = finite(norms, factors, 0.5)
    assert torch.equal(found, factors * 0.5)
    assert bool(kept.all())
    norms[1, 1400], norms[2, 7] = math.nan, math.inf
    found, kept = finite(norms, factors, 0.5)
    assert (found == 0).nonzero().tolist() == [[group, at] for group in range(3) for at in (7, 1400)]
    assert (kept == 0).nonzero()[:, 0].tolist() == [7, 1400]
    parts = random(37, 130)
    assert torch.allclose(together(parts, 2.0), parts.norm(dim=0) + 2, rtol=1e-6)
    assert together(norms, 0.0).isfinite().sum() == 1498


def test_rows_are_set_to_zero_where_they_lie() -> None:
    """Those of tensors of every type and order of dimensions, in one launch; what may not be written is copied."""
    from dpgrad.grads.clip import ZeroRows

    keep = torch.ones(37, dtype=torch.int8, device="cuda")
    keep[[0, 5, 36]] = 0
    plain = [
        random(37, 5), random(37, 3, 4, 6).contiguous(memory_format=torch.channels_last), random(37, 1).bfloat16(),
        random(37, 7).double(), random(37, 4001), random(40, 3)[2:39], random(37, 9)[:, :4], random(1, 6).expand(37, 6),
        random(8, 37, 2).movedim(1, 0), *(random(37, 2) for _ in range(12)),
    ]  # fmt: skip
    plain[3][5], plain[4][0, 17] = math.nan, math.inf
    protected = random(37, 8)
    before = [tensor.clone() for tensor in (*plain, protected)]
    drop = ZeroRows([protected])
    found = [drop(keep, tensor) for tensor in (*plain, protected)]
    drop.launch()
    for was, now in zip(before, found, strict=True):
        assert not now[keep == 0].any()
        assert torch.equal(now[keep == 1], was[keep == 1])
    assert torch.equal(protected, before[-1])
    assert found[0] is plain[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_affine(dtype: torch.dtype) -> None:
    from dpgrad.grads.kernels import affine

    for channels, groups, space in [(12, 3, 30), (64, 16, 1024), (5, 1, 1), (6, 1, 49)]:
        x, g = random(9, channels, space).to(dtype), random(9, channels, space).to(dtype)
        normal = F.group_norm(x.double(), groups, eps=1e-5)
        wanted = (g.double() * normal).sum(2), g.double().sum(2)
        for found, exact in zip(affine.group_norm(x, g, groups, 1e-5), wanted, strict=True):
            assert (found - exact).norm() <= 1e-5 * exact.norm()
    for positions, width in [(1, 50), (37, 768), (16, 8), (40, 2)]:
        x, g = random(9, positions, width).to(dtype), random(9, positions, width).to(dtype)
        normal = F.layer_norm(x.double(), (width,), eps=1e-5)
        wanted = (g.double() * normal).sum(1), g.double().sum(1)
        for found, exact in zip(affine.layer_norm(x, g, 1e-5), wanted, strict=True):
            assert (found - exact).norm() <= 1e-5 * exact.norm()


def test_noise_is_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    likes = {"a": torch.zeros(3, 7, device="cuda"), "b": torch.zeros(70_001, device="cuda"), "c": torch.zeros(2)}
    stream = device_noise.Stream(likes, key=7, device="cuda")
    step, two = torch.tensor([10**12], device="cuda"), torch.full((), 2.0, dtype=torch.float64, device="cuda")
    for segment in stream.segments:
        by_kernel, plain = (torch.empty(segment.values, dtype=torch.float64, device="cuda") for _ in range(2))
        total = random(segment.values)
        stream.write(segment, by_kernel, step, two, total, two, torch.zeros((), device="cuda"))
        with monkeypatch.context() as patch:
            patch.setattr(_triton, "available", False)
            stream.write(segment, plain, step, two, total, two)
        assert ((by_kernel - plain).abs() < 1e-13).all()
        stream.write(segment, by_kernel, step, two, total, two, torch.ones((), device="cuda"))
        assert by_kernel.isnan().all()


def test_words_are_those_of_plain_torch() -> None:
    from dpgrad.randomness.kernels import below

    key = [2**64 - 3, 5]
    lasts = [philox.signed(2**62), philox.signed(2**63 + 17)]
    found = below(philox.constants(key, "cuda"), torch.tensor([3, 2**40]).cuda(), torch.tensor(lasts).cuda(), 1001)
    for line, step, last in zip(found, (3, 2**40), (2**62, 2**63 + 17), strict=True):
        words = philox.words(torch.arange(1, 252), torch.tensor([step]), key).flatten()[:1001]
        assert line.tolist() == [word % 2**64 <= last for word in words.tolist()]
