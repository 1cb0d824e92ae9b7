"""Scaling rules: the bound in exact arithmetic, the printed formulas and what is said of them, what is refused."""

import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dpgrad.grads import scaling
from dpgrad.grads.scaling import LEAST_R, RULES, Automatic, Hard, Psac, Psasc, Quotient

DOUBLE = torch.float64
FLOATS = (torch.float32, torch.float64)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

r_values = st.one_of(st.sampled_from([LEAST_R, 1e-4, 0.01, 1.0]), st.floats(LEAST_R, 1e3))
s_values = st.one_of(st.sampled_from([0.45, 0.9, 1.0]), st.floats(1e-3, 10.0))
BUILT: dict[type[Quotient], st.SearchStrategy[Quotient]] = {
    Hard: st.builds(Hard),
    Automatic: st.builds(Automatic, r_values),
    Psac: st.builds(Psac, r_values),
    Psasc: st.builds(Psasc, s_values, r_values),
}
rules = st.one_of(*BUILT.values())
clips = st.one_of(st.sampled_from([1e-30, 0.1, 1.0, 1e30]), st.floats(1e-30, 1e30), st.floats(0.01, 100.0))
SIMPLE = [Hard(), Automatic(), Psac(), Psasc(0.5)]

# The weights as printed by Huang et al. (2024): Eq. 1, Eq. 2, Eq. 4 and Eq. 6, as rational functions of n and C.
PRINTED: dict[type[Quotient], Callable[[Any, Fraction, Fraction], Fraction]] = {
    Hard: lambda rule, n, C: Fraction(1) if n <= C else C / n,
    Automatic: lambda rule, n, C: 1 / (n + Fraction(rule.r)),
    Psac: lambda rule, n, C: C / (n + Fraction(rule.r) / (n + Fraction(rule.r))),
    Psasc: lambda rule, n, C: C / (Fraction(rule.s) * n + Fraction(rule.r) / (n + Fraction(rule.r))),
}


def defined(rule: Quotient, n: Fraction, clip: Fraction) -> Fraction:
    """The factor before rounding: the printed weight at the C whose sensitivity is ``clip``."""
    match rule:
        case Automatic():
            return clip * PRINTED[Automatic](rule, n, clip)
        case Psasc():
            return PRINTED[Psasc](rule, n, clip * Fraction(rule.s))
        case _:
            return PRINTED[type(rule)](rule, n, clip)


@st.composite
def norms_near(draw: st.DrawFn, clip: float, dtype: torch.dtype) -> Tensor:
    """Any floats, and floats around ``clip``, where rounding decides on which side of the bound a product falls."""
    special = [0.0, -0.0, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max, math.inf, math.nan, -1.0, 5e-324]
    near = st.floats(0.5, 3.0).map(lambda ratio: ratio * clip)
    every = st.one_of(st.floats(width=32), st.floats(0.0), st.floats(0.0, 100.0), near, st.sampled_from(special))
    return torch.tensor(draw(st.lists(every, min_size=1, max_size=12)), dtype=dtype)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Quotient, Tensor, float]:
    rule, clip, dtype = draw(rules), draw(clips), draw(st.sampled_from(FLOATS))
    return rule, draw(norms_near(clip, dtype)), clip


def assert_within(norms: Tensor, factors: Tensor, clip: float) -> None:
    """The guarantee of `ScaleRule`, in rational arithmetic."""
    for n, f in zip(norms.double().tolist(), factors.double().tolist(), strict=True):
        assert math.isfinite(f)
        if math.isfinite(n) and n >= 0:
            assert f >= 0
            assert Fraction(f) * Fraction(n) <= Fraction(clip), f"norm {n!r}, factor {f!r}"
        else:
            assert f == 0


class TestEveryRule:
    def test_all_of_them_are_listed(self) -> None:
        made = {
            kind
            for kind in vars(scaling).values()
            if inspect.isclass(kind) and issubclass(kind, Quotient) and not inspect.isabstract(kind)
        }
        assert made == set(RULES) == BUILT.keys() == PRINTED.keys() == {type(rule) for rule in SIMPLE}

    @given(calls())
    @example((Hard(), torch.tensor([3.0, 5.0, 1e38]), 1e-12))  # subnormal factors
    @example((Automatic(LEAST_R), torch.tensor([0.0, 1e-45, 3e38]), 1e30))  # clip/r is beyond float32
    @example((Psasc(5e-324, 1e308), torch.tensor([0.0, 1e308], dtype=DOUBLE), 1e30))
    @example((Psasc(1e308, LEAST_R), torch.tensor([0.0, 5e-324], dtype=DOUBLE), 1e30))
    def test_no_norm_times_its_factor_exceeds_clip(self, call: tuple[Quotient, Tensor, float]) -> None:
        rule, norms, clip = call
        factors = rule(norms, clip)
        assert factors.dtype == norms.dtype
        assert_within(norms, factors, clip)

    @given(calls())
    def test_factors_are_the_formula_but_for_rounding(self, call: tuple[Quotient, Tensor, float]) -> None:
        rule, norms, clip = call
        norms = norms[(norms >= 0) & norms.isfinite()]
        limits = torch.finfo(norms.dtype)
        for n, f in zip(norms.tolist(), rule(norms, clip).tolist(), strict=True):
            wanted = min(defined(rule, Fraction(n), Fraction(clip)), Fraction(limits.max))
            least = Fraction(limits.smallest_normal) * Fraction(limits.eps)
            assert abs(Fraction(f) - wanted) <= 4 * Fraction(limits.eps) * wanted + 2 * least

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("clip", [0.1, 1 / 3, 1.0, 1.7])
    def test_bound_holds_for_a_binade_of_float32(self, rule: Quotient, clip: float) -> None:
        """The product of two float32 is exact in float64, so this needs no rational numbers."""
        bits = torch.arange(0x3F800000, 0x40000000, 13, dtype=torch.int32)
        norms = bits.view(torch.float32)  # from 1 up to 2
        assert bool((rule(norms, clip).double() * norms.double() <= clip).all())

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("clip", [0.1, 1 / 3, 1.7])
    def test_bound_holds_for_many_float64(self, rule: Quotient, clip: float) -> None:
        """A quotient computed as clip times a reciprocal, which is two units off for some norms, would fail here."""
        norms = 1.7 + torch.rand(4000, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
        assert_within(norms, rule(norms, clip), clip)

    def test_that_binade_shows_what_plain_clipping_does(self) -> None:
        norms = torch.arange(0x3F800000, 0x40000000, 13, dtype=torch.int32).view(torch.float32)
        plain = (0.1 / norms).clamp(max=1.0)
        assert 0.3 < (plain.double() * norms.double() > 0.1).double().mean() < 0.7

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_what_is_no_norm_gets_nothing(self, rule: Quotient, dtype: torch.dtype) -> None:
        norms = torch.tensor([math.inf, math.nan, -math.inf, -1.0, -1e-3, -1e-45], dtype=dtype)
        assert rule(norms, 1.0).tolist() == [0.0] * 6

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_is_raised_to_float32_first(self, rule: Quotient, dtype: torch.dtype) -> None:
        norms = torch.tensor([0.0, 1e-3, 0.7, 3.0, 6e4, math.inf]).to(dtype)
        factors = rule(norms, 0.3)
        assert factors.dtype == torch.float32
        assert torch.equal(factors, rule(norms.float(), 0.3))
        assert_within(norms, factors, 0.3)

    @given(rules, st.lists(clips, min_size=1, max_size=3), st.data())
    def test_groups_are_rows(self, rule: Quotient, bounds: list[float], data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from(FLOATS))
        norms = torch.tensor([data.draw(st.lists(st.floats(0, 1e3), min_size=2, max_size=2)) for _ in bounds]).to(dtype)
        rows = torch.stack([rule(row, clip) for row, clip in zip(norms, bounds, strict=True)])
        assert torch.equal(rule(norms, torch.tensor(bounds, dtype=DOUBLE)[:, None]), rows)

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0), (2, 1, 3)])
    def test_any_shape_of_norms(self, rule: Quotient, shape: tuple[int, ...]) -> None:
        norms = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        factors = rule(norms, 0.5)
        assert factors.shape == shape
        assert factors.flatten().tolist() == [rule(n, 0.5).item() for n in norms.flatten()]

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_clip_in_a_tensor_is_taken_as_it_is(self, rule: Quotient, dtype: torch.dtype) -> None:
        clip = torch.tensor(0.3, dtype=dtype)  # not the number 0.3, which is no float of any kind
        norms = torch.linspace(0.0, 3.0, 100)
        assert torch.equal(rule(norms, clip), rule(norms, clip.item()))
        assert_within(norms, rule(norms, clip), clip.item())

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, -math.inf, math.nan])
    def test_a_tensor_that_is_no_clip_bound_lets_nothing_through(self, rule: Quotient, clip: float) -> None:
        norms = torch.tensor([0.0, 1e-3, 1.0, math.inf, math.nan])
        assert rule(norms, torch.tensor(clip)).tolist() == [0.0] * 5

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    def test_nothing_is_read_back_from_the_device(self, rule: Quotient) -> None:
        """Tensors on the meta device have no values: to read one is an error."""
        factors = rule(torch.empty(2, 3, device="meta"), torch.empty(2, 1, device="meta"))
        assert factors.shape == (2, 3)
        with pytest.raises(RuntimeError, match="meta"):
            bool(factors.sum() > 0)

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    def test_autocast_changes_nothing(self, rule: Quotient) -> None:
        norms = torch.linspace(0.0, 3.0, 100)
        with torch.autocast("cpu", torch.bfloat16):
            factors = rule(norms, 0.3)
        assert torch.equal(factors, rule(norms, 0.3))

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    def test_norms_are_left_as_they_were(self, rule: Quotient) -> None:
        norms = torch.tensor([0.5, math.nan, 2.0], dtype=DOUBLE)
        rule(norms, torch.tensor(0.3, dtype=DOUBLE))
        assert torch.equal(norms.nan_to_num(-1.0), torch.tensor([0.5, -1.0, 2.0], dtype=DOUBLE))

    @given(rules)
    def test_frozen_hashable_and_copied(self, rule: Quotient) -> None:
        same = pickle.loads(pickle.dumps(rule))
        assert same == rule
        assert hash(same) == hash(rule)
        assert eval(repr(rule)) == rule
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
            rule.r = 0.5  # type: ignore[attr-defined]

    def test_kinds_differ(self) -> None:
        assert len({Hard(), Automatic(0.5), Psac(0.5), Psasc(0.5, 0.5), Psasc(1.0, 0.5), Automatic(0.25)}) == 6
        assert Automatic(1) == Automatic(1.0)
        assert type(Psasc(1, 1).s) is type(Psasc(1, 1).r) is float


class TestOnCuda:
    norms = torch.cat([torch.logspace(-45, 38, 5000, dtype=DOUBLE), torch.tensor([0.0, -1.0, math.inf, math.nan])])

    @on_cuda
    @pytest.mark.parametrize("rule", [*SIMPLE, Psasc(0.45, LEAST_R)], ids=repr)
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("clip", [1e-30, 0.1, 1e30])
    def test_bound(self, rule: Quotient, dtype: torch.dtype, clip: float) -> None:
        norms = self.norms.to(dtype)
        assert_within(norms, rule(norms.cuda(), clip).cpu(), clip)
        assert_within(norms, rule(norms.cuda(), torch.tensor(clip, dtype=DOUBLE, device="cuda")).cpu(), clip)

    @on_cuda
    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    def test_captured_graph_follows_its_clip(self, rule: Quotient) -> None:
        norms, clip = self.norms.float().cuda(), torch.ones((), dtype=DOUBLE, device="cuda")
        rule(norms, clip)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            factors, fixed = rule(norms, clip), rule(norms, 0.5)
        for bound in (0.3, 7.0):
            clip.fill_(bound)
            graph.replay()
            assert torch.equal(factors, rule(norms, bound))
            assert torch.equal(fixed, rule(norms, 0.5))

    @on_cuda
    def test_clip_elsewhere_is_refused(self) -> None:
        with pytest.raises(ValueError, match="clip must be on the device of norms, cuda:0, got cpu"):
            Hard()(torch.ones(3, device="cuda"), torch.tensor(1.0))


class TestHard:
    def test_gradients_within_the_bound_are_not_touched(self) -> None:
        for dtype in FLOATS:
            below = torch.nextafter(torch.tensor(0.75, dtype=dtype), torch.tensor(0.0, dtype=dtype))
            norms = torch.stack([torch.zeros((), dtype=dtype), below, torch.tensor(0.75, dtype=dtype)])
            assert Hard()(norms, 0.75).tolist() == [1.0, 1.0, 1.0]

    def test_the_first_float_beyond_the_bound_is(self) -> None:
        for dtype in FLOATS:
            above = torch.nextafter(torch.tensor(0.75, dtype=dtype), torch.tensor(1.0, dtype=dtype))
            assert Hard()(above, 0.75) < 1

    @given(st.floats(1e-30, 1e30))
    def test_bound_of_float64_between_two_norms_of_float32(self, clip: float) -> None:
        norm = torch.tensor(clip, dtype=torch.float32)
        assert (Hard()(norm, clip).item() == 1.0) == (norm.item() <= clip)


class TestAsPrinted:
    """A paper's C, s and r, typed as printed, give its weights; its learning rate stays."""

    @given(rules, st.lists(st.floats(0, 1e4), min_size=1, max_size=8), st.floats(1e-3, 1e3))
    def test_weights(self, rule: Quotient, values: list[float], C: float) -> None:
        norms = torch.tensor(values, dtype=DOUBLE)
        weights = rule.weights(norms, C)
        for n, weight in zip(values, weights.tolist(), strict=True):
            wanted = PRINTED[type(rule)](rule, Fraction(n), Fraction(C))
            assert abs(Fraction(weight) - wanted) <= 16 * Fraction(2) ** -53 * wanted
        assert torch.equal(weights, rule(norms, rule.sensitivity(C)))

    def test_sensitivity(self) -> None:
        found = {type(rule): rule.sensitivity(0.3) for rule in SIMPLE}
        assert found == {Hard: 0.3, Automatic: 1.0, Psac: 0.3, Psasc: 0.6}

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    def test_sensitivity_is_the_least_bound(self, rule: Quotient) -> None:
        norms = torch.logspace(-6, 9, 2000, dtype=DOUBLE)
        most = (rule.weights(norms, 0.3) * norms).max().item()
        assert most == pytest.approx(rule.sensitivity(0.3), rel=1e-8)

    @pytest.mark.parametrize("C", [0, -1.0, math.inf, math.nan, True, "1", None])
    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    def test_bad_constant(self, rule: Quotient, C: Any) -> None:
        with pytest.raises(ValueError, match=r"^C must be "):
            rule.weights(torch.ones(2), C)


GRID = torch.cat([torch.zeros(1, dtype=DOUBLE), torch.logspace(-9, 3, 200_001, dtype=DOUBLE)])
# (s, r, C): four rows of Table II and two more
SETTINGS = [
    (0.45, 1e-4, 0.2),
    (0.55, 1e-3, 0.25),
    (0.8, 0.01, 0.2),
    (0.9, 1e-4, 0.3),
    (1.0, 0.01, 1.0),
    (2.5, 0.1, 1.0),
]


class TestFactsOfThePaper:
    """Huang et al. (2024), sections III-C and IV-B."""

    @pytest.mark.parametrize("r", [1e-4, 1e-3, 0.01])
    def test_automatic_tends_to_one_over_r_at_zero(self, r: float) -> None:
        norms = torch.tensor([1e-3, 1e-6, 1e-9, 0.0], dtype=DOUBLE) * r
        weights = Automatic(r).weights(norms, C=0.3)
        assert weights.diff().gt(0).all()
        assert weights[-1].item() == pytest.approx(1 / r, rel=1e-15)
        assert ((1 / r - weights[:-1]) * r).tolist() == pytest.approx([1e-3, 1e-6, 1e-9], rel=2e-3)

    @pytest.mark.parametrize(("s", "r", "C"), SETTINGS)
    def test_psac_and_psasc_tend_to_c_at_zero(self, s: float, r: float, C: float) -> None:
        shares = torch.tensor([1e-3, 1e-6, 1e-9, 0.0], dtype=DOUBLE)  # ‖g‖/r; to first order w = C·(1 + (1 − sr)·‖g‖/r)
        for rule, slope in ((Psac(r), 1 - r), (Psasc(s, r), 1 - s * r)):
            beyond = (rule.weights(shares * r, C) / C - 1).tolist()
            assert beyond == pytest.approx((slope * shares).tolist(), rel=2e-3, abs=1e-15)

    @pytest.mark.parametrize(("s", "r", "C"), SETTINGS)
    def test_largest_weight_and_where_it_lies(self, s: float, r: float, C: float) -> None:
        most, where = C / (1 - (1 - math.sqrt(s * r)) ** 2), math.sqrt(r / s) - r
        weights = Psasc(s, r).weights(GRID, C)
        at = int(weights.argmax())
        step = GRID[at + 1] - GRID[at - 1]
        assert abs(GRID[at].item() - where) <= step.item()
        assert weights[at].item() == pytest.approx(most, rel=1e-7)
        assert Psasc(s, r).weights(torch.tensor(where, dtype=DOUBLE), C).item() == pytest.approx(most, rel=1e-14)

    @pytest.mark.parametrize(("s", "r", "C"), SETTINGS)
    def test_slope_is_zero_there_and_nowhere_else(self, s: float, r: float, C: float) -> None:
        where = math.sqrt(r / s) - r
        norms = (torch.tensor([0.0, 0.5, 0.99, 1.0, 1.01, 2.0, 1e3], dtype=DOUBLE) * where).requires_grad_()
        denominators = Psasc(s, r).denominator(norms, torch.tensor(C, dtype=DOUBLE))
        (slope,) = torch.autograd.grad(denominators.sum(), norms)  # the weight rises where its denominator falls
        assert slope[3].abs().item() < 1e-12
        assert slope.sign()[[0, 1, 2, 4, 5, 6]].tolist() == [-1, -1, -1, 1, 1, 1]

    @pytest.mark.parametrize(("s", "r"), [(1.0, 1.0), (4.0, 0.5), (0.5, 3.0)])
    def test_for_large_s_times_r_the_weight_only_falls(self, s: float, r: float) -> None:
        weights = Psasc(s, r).weights(GRID[GRID < 100.0], C=1.0)
        assert weights.diff().le(1e-15).all()
        assert weights[0].item() == pytest.approx(1.0, rel=1e-15)

    @pytest.mark.parametrize("r", [1e-4, 0.01, 0.1])
    def test_largest_weight_falls_as_s_grows(self, r: float) -> None:
        most = [Psasc(s, r).weights(GRID, C=0.3).max().item() for s in (0.1, 0.2, 0.45, 0.8, 0.9, 1.0, 2.0, 5.0)]
        assert most == sorted(most, reverse=True)
        assert len(set(most)) == len(most)

    @given(r_values, clips, st.data())
    def test_s_of_one_is_psac(self, r: float, clip: float, data: st.DataObject) -> None:
        norms = data.draw(norms_near(clip, DOUBLE))
        assert torch.equal(Psasc(1.0, r)(norms, clip), Psac(r)(norms, clip))

    @given(st.floats(1e-3, 1.0), st.floats(1e-6, 1.0), st.lists(st.floats(0, 1e6), min_size=1), st.floats(1e-3, 1e3))
    def test_noise_relative_weight_is_below_that_of_psac(self, s: float, r: float, n: list[float], C: float) -> None:
        """Eq. 7. Noise is a multiple of the sensitivity: relative to it a gradient weighs weight/sensitivity."""
        norms = torch.tensor(n, dtype=DOUBLE)
        psac, psasc = Psac(r)(norms, C), Psasc(s, r)(norms, C)
        assert psasc.le(psac).all()
        raw = Psasc(s, r).weights(norms, C)
        assert torch.allclose(raw * s, psasc, rtol=1e-14, atol=0)
        assert raw.ge(psac * (1 - 1e-15)).all()  # while the raw weight is above

    @pytest.mark.parametrize(("s", "r", "C"), [setting for setting in SETTINGS if setting[0] < 1])
    def test_share_of_noise_is_above_that_of_psac(self, s: float, r: float, C: float) -> None:
        """Eq. 7 as it stands, E‖n**‖/‖g**‖ > E‖n*‖/‖g*‖, for noise of σ = 2 in d = 100 dimensions; strict for s < 1."""
        norms = GRID[(GRID > 0) & (GRID < 10.0)]
        noise = 2.0 * math.sqrt(100.0)
        ours = noise * Psasc(s, r).sensitivity(C) / (Psasc(s, r).weights(norms, C) * norms)
        theirs = noise * Psac(r).sensitivity(C) / (Psac(r).weights(norms, C) * norms)
        assert ours.gt(theirs).all()


STEPS, EXAMPLES, WIDTH, SIGMA = 12, 6, 3, 0.7


def trajectory(weight: Callable[[Tensor], Tensor], noise: float, rate: float) -> Tensor:
    """Noisy steps on least squares: w ← w − η/B·(Σ weight(‖g‖)·g + noise·z), with the same z in every call."""
    generator = torch.Generator().manual_seed(5)
    x, y, *normal = (
        torch.randn(size, generator=generator, dtype=DOUBLE)
        for size in [(EXAMPLES, WIDTH), (EXAMPLES,), *[(WIDTH,)] * STEPS]
    )
    w, path = torch.zeros(WIDTH, dtype=DOUBLE), []
    for z in normal:
        gradients = (x @ w - y)[:, None] * x
        total = (weight(gradients.norm(dim=1))[:, None] * gradients).sum(0)
        w = w - rate / EXAMPLES * (total + noise * z)
        path.append(w)
    return torch.stack(path)


def ours(rule: Quotient, clip: float, rate: float) -> Tensor:
    return trajectory(lambda norms: rule(norms, clip), SIGMA * clip, rate)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-13)


class TestTrajectories:
    C, s, r, rate = 0.3, 0.45, 0.05, 0.8

    @pytest.mark.parametrize("rule", [Psac(r), Psasc(s, r)], ids=repr)
    def test_c_is_part_of_the_learning_rate(self, rule: Quotient) -> None:
        whole = ours(rule, rule.sensitivity(self.C), self.rate)
        assert close(whole, ours(rule, rule.sensitivity(1.0), self.C * self.rate))
        assert whole.abs().max() > 0.1

    def test_which_it_is_not_for_hard_clipping(self) -> None:
        assert not close(ours(Hard(), self.C, self.rate), ours(Hard(), 1.0, self.C * self.rate))

    def test_psasc_as_printed(self) -> None:
        """Eq. 8: weight C/(s‖g‖ + r/(‖g‖+r)), noise Cσ/s, learning rate η."""
        C, s, r = self.C, self.s, self.r
        printed = trajectory(lambda n: C / (s * n + r / (n + r)), C * SIGMA / s, self.rate)
        rule = Psasc(s, r)
        assert close(ours(rule, rule.sensitivity(C), self.rate), printed)
        assert not close(ours(rule, C, self.rate), printed)

    def test_automatic_as_printed(self) -> None:
        """Eq. 3: weight 1/(‖g‖+r), noise σ, whatever C is."""
        printed = trajectory(lambda n: 1 / (n + self.r), SIGMA, self.rate)
        rule = Automatic(self.r)
        assert close(ours(rule, rule.sensitivity(self.C), self.rate), printed)

    def test_psasc_is_psac_with_another_inner_numerator_and_learning_rate(self) -> None:
        C, s, r = self.C, self.s, self.r
        psac = trajectory(lambda n: C / (n + (r / s) / (n + r)), C * SIGMA, self.rate / s)
        assert close(ours(Psasc(s, r), C / s, self.rate), psac)
        assert close(ours(Psasc(s, r), C, self.rate / s), psac)


class TestRefused:
    @pytest.mark.parametrize("kind", [Automatic, Psac, lambda r: Psasc(0.5, r)], ids=["Automatic", "Psac", "Psasc"])
    @pytest.mark.parametrize("r", [0, -0.01, math.nan, math.inf, True, "0.01", None, [0.01], LEAST_R / 2, 5e-324])
    def test_bad_r(self, kind: Callable[[Any], Quotient], r: Any) -> None:
        with pytest.raises(ValueError, match=r"^r must be (positive and finite|a number|at least 1e-12), got "):
            kind(r)

    @pytest.mark.parametrize("s", [0, -0.5, math.nan, math.inf, True, "0.5", None])
    def test_bad_s(self, s: Any) -> None:
        with pytest.raises(ValueError, match=r"^s must be (positive and finite|a number), got "):
            Psasc(s)

    def test_s_has_no_default(self) -> None:
        with pytest.raises(TypeError, match="'s'"):
            Psasc()  # type: ignore[call-arg]

    @pytest.mark.parametrize("rule", SIMPLE, ids=repr)
    @pytest.mark.parametrize("clip", [0, 0.0, -1.0, math.nan, math.inf, True, "1", None, [1.0], 10**400])
    def test_bad_clip(self, rule: Quotient, clip: Any) -> None:
        with pytest.raises(ValueError, match=r"^clip must be (positive and finite|a number), got "):
            rule(torch.ones(3), clip)

    @pytest.mark.parametrize("clip", [torch.tensor(1), torch.tensor(True), torch.tensor(1j)])
    def test_clip_in_a_tensor_of_something_else(self, clip: Tensor) -> None:
        with pytest.raises(ValueError, match=r"^clip must be a number or a tensor of floats, got a tensor of torch\."):
            Hard()(torch.ones(3), clip)

    @pytest.mark.parametrize("norms", [torch.ones(3, dtype=torch.int64), torch.ones(3) * 1j, torch.ones(3) > 0])
    def test_norms_that_are_no_floats(self, norms: Tensor) -> None:
        with pytest.raises(ValueError, match=r"^norms must be a tensor of floats, got a tensor of torch\."):
            Hard()(norms, 1.0)

    @pytest.mark.parametrize("norms", [1.0, [1.0, 2.0], None, "norms"])
    def test_norms_that_are_no_tensor(self, norms: Any) -> None:
        with pytest.raises(ValueError, match=r"^norms must be a tensor of floats, got "):
            Hard()(norms, 1.0)

    @pytest.mark.parametrize(
        ("norms", "clip"), [((3,), (2, 1)), ((2, 3), (2,)), ((1, 3), (2, 1)), ((), (1,)), ((3,), (2,)), ((1,), (3,))]
    )
    def test_clip_that_would_change_the_shape(self, norms: tuple[int, ...], clip: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"^clip must broadcast to the shape of norms, .*\(groups, 1\)"):
            Hard()(torch.ones(norms), torch.ones(clip))

    def test_clip_on_another_device(self) -> None:
        with pytest.raises(ValueError, match=r"^clip must be on the device of norms, cpu, got meta: move it there"):
            Hard()(torch.ones(3), torch.ones((), device="meta"))

    def test_rule_without_a_denominator(self) -> None:
        with pytest.raises(TypeError, match="abstract"):
            Quotient()  # type: ignore[abstract]
