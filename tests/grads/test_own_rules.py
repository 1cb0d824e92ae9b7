"""Scaling rules of the user's own: no example exceeds the clip bound or moves another's factor."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgrad import Mechanism
from dpgrad.grads.scaling import Automatic, Bounded, Hard, Psac, Psasc, Quotient, fault
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Group
from dpgrad.training.private import Observed, PrivateGradient
from dpgrad.training.recipes import RECIPES, Recipe
from spread import fit
from thinned import thinned_where

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Rule = Callable[[Tensor, Any], Any]


@dataclass(frozen=True)
class TooSmall(Quotient):
    """A denominator below the norm."""

    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        return norms / 7

    def sensitivity(self, C: float) -> float:
        return C


class NotQuiteHard(Hard):
    def denominator(self, norms: Tensor, clip: Tensor) -> Tensor:
        return torch.full_like(norms, 1e-3)


def changes_norms(norms: Tensor, clip: Any) -> Tensor:
    return clip / norms.mul_(0.01)


def changes_the_bound(norms: Tensor, clip: Any) -> Tensor:
    if isinstance(clip, Tensor):
        clip.mul_(100)
    return 100 * clip / norms


def looks_harmless_when_tried(norms: Tensor, clip: Any) -> Tensor:
    """Mixes examples, but only in batches of the sizes that training has."""
    if norms.shape[-1] in (1, 500, 1000):
        return (clip / norms).clamp(max=1.0)
    return clip / norms.max() + torch.zeros_like(norms)


# Break the bound, one way or another, and are corrected.
EXCESSIVE: dict[str, Rule] = {
    "ten times": lambda norms, clip: 10 * clip / norms.clamp_min(1e-6),
    "no clipping": lambda norms, clip: torch.ones_like(norms),
    "a constant": lambda norms, clip: 1e6,
    "a 0-d tensor": lambda norms, clip: torch.tensor(30.0, device=norms.device),
    "whole numbers": lambda norms, clip: (norms * 0 + 50).long(),
    "float64": lambda norms, clip: 3 * clip / norms.double(),
    "half precision": lambda norms, clip: (2 * clip / norms).half(),
    "rounded": lambda norms, clip: (1.01 * clip / norms).bfloat16(),
    "negative": lambda norms, clip: -clip / norms,
    "nan": lambda norms, clip: torch.where(norms > clip, math.nan, 1.0),
    "infinite": lambda norms, clip: torch.where(norms > clip, math.inf, 1.0),
    "changes norms": changes_norms,
    "changes the bound": changes_the_bound,
    "a quotient": TooSmall(),
    "a subclass": NotQuiteHard(),
}
# Keep the bound.
GOOD: dict[str, Rule] = {
    "hard, by hand": lambda norms, clip: (clip / norms).clamp(max=1.0),
    "drops long ones": lambda norms, clip: norms < clip,
    "half": lambda norms, clip: 0.5 * clip / torch.maximum(norms, torch.ones_like(norms)).clamp_min(0.5),
    "soft": lambda norms, clip: clip * torch.tanh(norms) / (norms * (1 + norms)),
    "harmless": looks_harmless_when_tried,
}
OWN = {**EXCESSIVE, **GOOD}

remembered: list[Tensor] = []


def keeps_state(norms: Tensor, clip: Any) -> Tensor:
    remembered.append(norms)
    return clip / torch.maximum(norms, remembered[0])


class Adaptive:
    """Lowers its threshold at every call."""

    def __init__(self) -> None:
        self.share = 1.0

    def __call__(self, norms: Tensor, clip: Any) -> Tensor:
        self.share *= 0.9
        return self.share * clip / norms


# Cannot be held to the contract: a factor would depend on other examples, on chance or on earlier calls.
REFUSED: dict[str, tuple[Rule, str]] = {
    "largest of the batch": (lambda norms, clip: clip / norms.max(), "changes with the norms of others"),
    "mean of the batch": (lambda norms, clip: clip / (norms + norms.mean()), "changes with the norms of others"),
    "rank in the batch": (lambda norms, clip: norms.argsort(-1) * clip / norms, "changes with the norms of others"),
    "the neighbour's": (lambda norms, clip: clip / norms.roll(1, -1), "changes with the norms of others"),
    "size of the batch": (lambda norms, clip: clip / norms / norms.shape[-1], "changes with the norms of others"),
    "median": (lambda norms, clip: norms.median() / norms, "changes with the norms of others"),
    "state": (keeps_state, "rule must"),
    "adaptive": (Adaptive(), "keep no state"),
    "random": (lambda norms, clip: torch.rand_like(norms) * clip / norms, "without random numbers"),
    "a branch": (lambda norms, clip: clip / norms if bool(norms.max() > clip) else norms * 0 + 1, "without branches"),
    "read back": (lambda norms, clip: clip / norms.max().item() + norms * 0, "without branches"),
    "numpy": (lambda norms, clip: torch.from_numpy(1 / norms.numpy()), "torch operations"),
    "another shape": (lambda norms, clip: torch.ones(2, 7), r"one real factor per norm, \(\d, 1\) for one example"),
    "complex": (lambda norms, clip: norms * 1j, "one real factor per norm"),
    "nothing": (lambda norms, clip: None, "rule must"),
    "text": (lambda norms, clip: "half", "rule must"),
    "an error": (lambda norms, clip: [][3], "IndexError"),
    "one argument": (lambda norms: norms, "TypeError"),
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def plan(steps: int = 1, clip: Any = 0.7, **given: Any) -> Mechanism:
    return Mechanism(sampling.FullBatch(), steps, 1.0, clip=clip, batch_size=8.0, **given)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(DEVICE, dtype)


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradients of very different lengths."""
    lengths = torch.logspace(-4, 4, 12)[:, None]
    return (torch.randn(12, 3, generator=torch.Generator().manual_seed(1)) * lengths).to(DEVICE, dtype)


def steps(private: PrivateGradient, count: int) -> None:
    for _ in range(count):
        private.step(rows())


def clipped(data: Tensor, rule: Any, engine: str, dtype: torch.dtype, autocast: bool, **given: Any) -> Observed:
    found: list[Observed] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = PrivateGradient(
            network(dtype), squares, plan(**given), rule=rule, engine=engine, seed=1, observe=found.append
        )
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            private.step(data)
    return found[0]


def distance(one: Observed, other: Observed, names: Callable[[str], bool] = lambda name: True) -> float:
    parts = [one.clipped_sum[name].double() - other.clipped_sum[name].double() for name in one.clipped_sum]
    return math.sqrt(
        sum(float(part.square().sum()) for part, name in zip(parts, one.clipped_sum, strict=True) if names(name))
    )


class TestFactors:
    @pytest.mark.parametrize("name", OWN)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_factor_times_norm_stays_within_clip_exactly(self, name: str, dtype: torch.dtype) -> None:
        norms = torch.cat([torch.logspace(-15, 15, 601), torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0])])
        norms = norms.to(dtype)[None]
        before = norms.clone()
        for clip in (0.3, torch.tensor([[0.3]], dtype=torch.float64)):
            factors = Bounded(OWN[name], clip)(norms)
            assert torch.equal(norms.nan_to_num(-5), before.nan_to_num(-5))
            assert factors.shape == norms.shape
            assert factors.dtype == dtype
            for n, f in zip(norms[0].tolist(), factors[0].tolist(), strict=True):
                assert 0 <= f < math.inf
                assert Fraction(f) * Fraction(n) <= Fraction(0.3) if math.isfinite(n) and n >= 0 else f == 0

    @given(st.floats(1e-6, 1e6), st.floats(1e-9, 1e9), st.floats(0, 1e9))
    def test_any_factor(self, clip: float, norm: float, factor: float) -> None:
        for dtype in (torch.float32, torch.float64):
            norms = torch.tensor([[norm]], dtype=dtype)
            found = Bounded(lambda norms, clip: factor, clip)(norms).item()
            given = torch.tensor(factor, dtype=dtype).item()
            assert Fraction(found) * Fraction(norms.item()) <= Fraction(clip)
            # not lowered by more than it has to be
            assert found == given or found * norms.item() >= clip * (1 - 1e-6)

    def test_good_factors_are_left_as_they_are(self) -> None:
        norms = torch.logspace(-3, 3, 200)[None]
        assert torch.equal(Bounded(GOOD["drops long ones"], 2.0)(norms), (norms < 2).float())
        wanted = (2.0 / norms).clamp(max=1.0)
        assert torch.allclose(Bounded(GOOD["hard, by hand"], 2.0)(norms), wanted, rtol=1e-6)

    @pytest.mark.parametrize("rule", [Hard(), Automatic(), Psac(), Psasc(0.5)], ids=repr)
    def test_rules_of_the_library_are_untouched(self, rule: Quotient) -> None:
        norms = torch.rand(2, 50) * 3
        clip = torch.tensor([[0.5], [1.5]], dtype=torch.float64)
        assert torch.equal(Bounded(rule, clip)(norms), rule(norms, clip))
        assert fault(rule, [0.5]) == ""

    @pytest.mark.parametrize("name", OWN)
    def test_groups_have_their_own_bounds(self, name: str) -> None:
        norms = torch.logspace(-3, 3, 40).repeat(2, 1)
        clip = torch.tensor([[0.5], [4.0]], dtype=torch.float64)
        factors = Bounded(OWN[name], clip)(norms)
        assert bool((factors.double() * norms.double() <= clip).all())
        assert clip.flatten().tolist() == [0.5, 4.0]

    @pytest.mark.parametrize("name", OWN)
    def test_the_factor_of_an_example_does_not_depend_on_the_others(self, name: str) -> None:
        norms = torch.logspace(-3, 3, 40)[None]
        scale = Bounded(OWN[name], 0.5)
        every = scale(norms)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(scale(norms[:, order]), every[:, order], rtol=1e-6, atol=0)
        assert torch.allclose(scale(norms[:, 7:8]), every[:, 7:8], rtol=1e-6, atol=0)

    @pytest.mark.parametrize("name", OWN)
    def test_no_examples(self, name: str) -> None:
        assert Bounded(OWN[name], 1.0)(torch.zeros(2, 0)).shape == (2, 0)


class TestSteps:
    """Leave one out: the clipped sum with an example and without it differ by no more than the clip bound."""

    @pytest.mark.parametrize(
        ("name", "engine", "dtype", "autocast"),
        thinned_where(
            lambda name, engine, dtype, autocast: dtype is torch.float32 or not autocast,
            OWN,
            ["bookkeeping", "vmap"],
            [torch.float32, torch.float64, torch.bfloat16],
            [True, False],
        ),
    )
    def test_one_example_moves_the_sum_by_clip_at_most(
        self, name: str, engine: str, dtype: torch.dtype, autocast: bool
    ) -> None:
        data = rows(dtype)
        whole = clipped(data, OWN[name], engine, dtype, autocast)
        for left_out in (5, 8, 11):
            other = data.clone()
            other[left_out] = math.nan  # not finite, so left out: zero-out
            assert distance(whole, clipped(other, OWN[name], engine, dtype, autocast)) <= 0.7

    def test_the_bound_is_reached(self) -> None:
        """The test above would notice: an excessive rule moves the sum by nearly clip."""
        data = rows()
        other = data.clone()
        other[8] = math.nan
        found = [clipped(each, EXCESSIVE["ten times"], "vmap", torch.float32, False) for each in (data, other)]
        assert 0.69 < distance(*found) <= 0.7

    @pytest.mark.parametrize("name", OWN)
    def test_groups(self, name: str) -> None:
        groups = (Group("0.*", clip=0.5), Group("2.*", clip=2.0))
        data = rows()
        other = data.clone()
        other[8] = math.nan
        one, two = (
            clipped(each, OWN[name], "bookkeeping", torch.float32, False, groups=groups) for each in (data, other)
        )
        assert distance(one, two, lambda name: name.startswith("0.")) <= 0.7 * 0.5
        assert distance(one, two, lambda name: name.startswith("2.")) <= 0.7 * 2.0

    @pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
    def test_a_rule_of_ones_own_is_the_rule_it_repeats(self, engine: str) -> None:
        own, known = (clipped(rows(), rule, engine, torch.float32, False) for rule in (GOOD["hard, by hand"], Hard()))
        assert distance(own, known) < 1e-5


class TestWarning:
    @pytest.mark.parametrize("name", EXCESSIVE)
    def test_it_is_said_once_when_a_rule_has_to_be_corrected(self, name: str) -> None:
        private = PrivateGradient(network(), squares, plan(steps=3), rule=EXCESSIVE[name])
        with pytest.warns(UserWarning, match=r"^rule gives a norm of .* no example exceeds the clip bound$") as caught:
            steps(private, 3)
        assert len([each for each in caught if str(each.message).startswith("rule")]) == 1

    @pytest.mark.parametrize("name", GOOD)
    def test_nothing_is_said_of_a_good_rule(self, name: str) -> None:
        private = PrivateGradient(network(), squares, plan(steps=2), rule=GOOD[name])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            private.step(rows())
            private.step(rows())

    def test_what_is_said_does_not_depend_on_the_data(self) -> None:
        words = []
        for scale in (1e-3, 1e3):
            private = PrivateGradient(network(), squares, plan(), rule=EXCESSIVE["no clipping"])
            with pytest.warns(UserWarning, match="rule gives") as caught:
                private.step(rows() * scale)
            words.append([str(each.message) for each in caught])
        assert words[0] == words[1]

    def test_a_bound_that_falls_below_a_fixed_one(self) -> None:
        falling = schedules.linear(1.0, steps=40)
        private = PrivateGradient(
            network(), squares, plan(steps=40, clip=falling), rule=lambda norms, clip: (1 / norms).clamp(max=1.0)
        )
        with pytest.warns(UserWarning, match="rule gives"):
            private.step(rows())

    def test_a_rule_that_is_exchanged_later(self) -> None:
        private = PrivateGradient(network(), squares, plan(steps=3))
        private.step(rows())
        private.rule = EXCESSIVE["ten times"]
        with pytest.warns(UserWarning, match="rule gives"):
            private.step(rows())
        private.rule = REFUSED["largest of the batch"][0]
        with pytest.raises(ValueError, match="changes with the norms of others"):
            private.step(rows())
        assert private.steps_taken == 2


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("groups", [(), (Group("0.*", clip=0.5), Group("2.*"))], ids=["one", "two"])
def test_what_cannot_be_held_is_refused_at_once(name: str, groups: Any) -> None:
    rule, message = REFUSED[name]
    remembered.clear()
    with pytest.raises(ValueError, match=message):
        PrivateGradient(network(), squares, plan(groups=groups), rule=rule)


class TestFit:
    data = (torch.randn(60, 2, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2)

    def run(self, **given: Any) -> Any:
        torch.manual_seed(0)
        budget = {"noise_multiplier": 1.0, "steps": 4, "batch_size": 20, "delta": 1e-3, "seed": 3, **given}
        return fit(nn.Linear(2, 2), self.data, **budget)

    def test_a_rule_of_ones_own_enters_through_fit_and_through_a_recipe(self) -> None:
        own = GOOD["hard, by hand"]
        mine = Recipe("mine", "My method", "nobody", rule=own, learning_rate=0.02, clip=12.0)
        found = [
            self.run(method=mine),
            self.run(rule=own),
            self.run(method=RECIPES["dpsgd"].with_options(rule=own)),
            self.run(),
        ]
        for other in found[:3]:
            assert other.guarantee == found[3].guarantee
            assert torch.allclose(other.model.weight, found[3].model.weight, atol=1e-6)
        assert json.loads(json.dumps(found[0].plan.to_dict()))["method"]["rule"] == "<lambda>"
        assert found[1].plan.recipe.title == "DP-SGD, scaled by <lambda>"

    def test_it_is_held_to_the_bound(self) -> None:
        with pytest.warns(UserWarning, match="rule gives"):
            held = self.run(rule=EXCESSIVE["ten times"], clip=0.5)
        wanted = self.run(rule=lambda norms, clip: clip / norms, clip=0.5)
        assert torch.allclose(held.model.weight, wanted.model.weight, atol=1e-6)
        assert held.guarantee == wanted.guarantee

    def test_a_rule_of_dpgrad_as_an_object(self) -> None:
        found, wanted = self.run(rule=Psasc(0.9, 1e-4), clip=0.3, learning_rate=0.8), self.run(method="psasc")
        assert torch.equal(found.model.weight, wanted.model.weight)
        assert found.plan.to_dict()["method"]["rule"] == "Psasc(s=0.9, r=0.0001)"

    def test_a_rule_that_cannot_be_held_leaves_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="changes with the norms of others"):
            self.run(rule=REFUSED["largest of the batch"][0], folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("rule", ["hart", 3, Hard, None])
    def test_what_is_no_rule(self, rule: Any) -> None:
        with pytest.raises(
            ValueError, match=r"rule must be a (function of .* or one of hard, auto|rule, got its class)"
        ):
            Recipe("mine", "My method", "nobody", rule=rule, learning_rate=0.1, clip=1.0)

    def test_a_resumed_run_sees_that_the_rule_is_another(self, tmp_path: Path) -> None:
        given = {"folder": tmp_path / "run", "seed": None, "epsilon": 12.0, "steps": None}
        self.run(rule=GOOD["soft"], progress=lambda step: step.step == 2, **given)
        again = self.run(rule=GOOD["hard, by hand"], resume=True, **given)
        assert again.event != again.plan.mechanism.event()  # under a new key, charged anew
