"""Steps whose clip bound follows the norms, against the same steps written out one example at a time."""

import copy
import dataclasses
import io
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpgrad
from dpgrad import Mechanism, Relation, recipes
from dpgrad.errors import OptionError, ResumeError, UnsupportedModelError
from dpgrad.grads import ENGINES
from dpgrad.grads.clip import Scaled
from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism import sampling, schedules, secure
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group
from dpgrad.randomness import noise
from dpgrad.training.options import RunFolder
from dpgrad.training.private import Observed, PrivateGradient
from dpgrad.training.step import bodies, straight
from dpgrad.training.step.graphed import Graphed
from dpgrad.training.step.quantile import Quantile
from dpgrad.training.step.sizes import Sizes
from replayed import on_cpu

ROWS, DIVISOR = 40, 10.0
RULE = AdaptiveClip(0.4, 0.3, 1.5)
PAIR = (Group("0.*", clip=0.5), Group("2.*", 1.0, 2.0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    out: Tensor = (model(inputs) - targets).square().sum(1)
    return out


def rows() -> tuple[Tensor, Tensor]:
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return draw(ROWS, 3), draw(ROWS, 2)


DATA = rows()


def mechanism(steps: int = 5, groups: tuple[Group, ...] = (), **options: Any) -> Mechanism:
    settings = {"noise_multiplier": 0.7, "clip": 0.8, "batch_size": DIVISOR, "adaptive_clip": RULE} | options
    return Mechanism(sampling.Poisson(0.25), steps, relation=Relation.ZERO_OUT, groups=groups, **settings)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


def share_below(norm: float, clip: float) -> float:
    """1 for norms well below the clip bound, 0 well above it, and what lies between on a line, in parts of 2^-20."""
    return round(min(1.0, max(0.0, 0.5 + (1 - norm / clip) / 0.1)) * 2**20) / 2**20


def test_rounding_of_other_rows_hardly_moves_a_count() -> None:
    """Norms at the bound are rounded as the number of rows in the batch asks for; all of them together."""

    def counted(norms: Tensor) -> float:
        scaled = Scaled(norms[None], norms[None], torch.ones(len(norms), dtype=torch.bool), {}, None)
        ones = torch.ones(len(norms), 1, dtype=torch.float64)
        return float(vars(bodies)["_below"](scaled, ones, torch.ones(1, 1, dtype=torch.float64)))

    at = torch.ones(300)
    up, down = (torch.nextafter(at, torch.tensor(end)) for end in (2.0, 0.0))
    assert abs(counted(up) - counted(down)) < 1e-3
    assert [counted(norm * torch.ones(2)) for norm in (0.0, 0.9, 1.0, 1.1, torch.inf)] == [1.0, 1.0, 0.0, -1.0, -1.0]


class ByHand:
    """The same run, one example at a time, from the formulas of the paper."""

    def __init__(self, plan: Mechanism, key: Key) -> None:
        self.plan, self.key, self.model = plan, key, network()
        self.clips = [0.8 * (1.0 if group is None else group.clip) for group in plan.groups or (None,)]

    def step(self, step: int) -> list[float]:
        plan, names = self.plan, [name for name, _ in self.model.named_parameters()]
        place = {name: plan.groups.index(plan.group_of(name)) if plan.groups else 0 for name in names}
        below = torch.zeros(len(self.clips), dtype=torch.float64)
        total = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for i in plan.sampler.draw(ROWS, step, self.key):
            alone = loss(self.model, (DATA[0][i : i + 1], DATA[1][i : i + 1])).sum()
            each = dict(zip(names, torch.autograd.grad(alone, list(self.model.parameters())), strict=True))
            for g, clip in enumerate(self.clips):
                own = [name for name in names if place[name] == g]
                norm = torch.cat([each[name].flatten() for name in own]).norm()
                below[g] += share_below(float(norm), clip) - 0.5
                for name in own:
                    total[name] += min(1.0, clip / norm) * each[name]
        multipliers = [0.7 * (1.0 if group is None else group.noise_multiplier) for group in plan.groups or (None,)]
        z = sum(m**-2 for m in multipliers) ** -0.5
        left = (z**-2 - len(self.clips) * (2 * 1.5) ** -2) ** -0.5
        stds = {name: multipliers[place[name]] * left / z * self.clips[place[name]] for name in names}
        drawn = noise.gaussians(total, stds, self.key, step)
        for name, parameter in self.model.named_parameters():
            parameter.grad = (total[name] + drawn[name]) / DIVISOR
        used = list(self.clips)
        noisy = below + noise.gaussian(below, 1.5, self.key, step, ".clip")
        share = (noisy / DIVISOR + 0.5).tolist()
        self.clips = [
            clip * torch.tensor(-0.3 * (b - 0.4), dtype=torch.float64).exp().item()
            for clip, b in zip(self.clips, share, strict=True)
        ]
        return used


@pytest.mark.parametrize("groups", [(), PAIR], ids=["flat", "groups"])
@pytest.mark.parametrize("options", [*({"engine": e} for e in ENGINES), {"microbatch": 3}, {"capture": None}], ids=str)
def test_a_run_is_the_run_written_out(groups: tuple[Group, ...], options: dict[str, Any]) -> None:
    plan, model = mechanism(40 if "capture" in options else 5, groups), network()  # enough for pieces of fixed sizes
    private = PrivateGradient(model, loss, plan, seed=5, **options)
    hand = ByHand(plan, private.key)
    for step in range(5):
        private.step(DATA)
        used = hand.step(step)
        assert private.clip_bounds[step] == pytest.approx(used, rel=1e-9)
        for own, wanted in zip(model.parameters(), hand.model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-8, atol=1e-9)
        descend(model)
        descend(hand.model)
    assert private.ledger == plan.with_steps(5).event()
    assert len({bounds[0] for bounds in private.clip_bounds}) == 5


@pytest.mark.parametrize("values", [0, 9], ids=["ordinary", "secure"])
def test_each_count_gets_the_noise_of_its_step(values: int) -> None:
    """Whose size follows that of the gradients, where the rule leaves it to them."""
    rule = AdaptiveClip(0.5, 0.3)
    plan = mechanism(noise=schedules.piecewise([1], [1.0, 3.0]), adaptive_clip=rule, secure_values=values)
    key = Key.from_seed(4).secured() if values else Key.from_seed(4)
    quantile = Quantile(plan, key)
    for step in range(3):
        (bound,) = quantile.at(step)
        quantile.follow(step, torch.tensor([4.0]))
        std = plan.count_std_at(step)
        if values:
            unit = secure.grid(std, 0.5, 1)
            noisy = (round(4 / unit) + int(secure.draw(key, 0, 1, "noise", ".clip", str(step))[0])) * unit
        else:
            noisy = 4 + float(noise.gaussian(torch.zeros(1, dtype=torch.float64), std, key, step, ".clip"))
        assert quantile.at(step + 1) == [rule.following(bound, noisy, plan.divisor)]
    assert plan.count_std_at(2) > plan.count_std_at(0)


def test_bounds_of_a_run_that_begins_later_are_restored() -> None:
    plan, key = mechanism(), Key.from_seed(4)
    one, other = (Quantile(plan, key, first=2) for _ in range(2))
    one.follow(2, torch.tensor([4.0]))
    first, bounds = one.state(3)
    other.restore(bounds, first, 3)
    assert other.at(3) == one.at(3) != one.at(2)
    with pytest.raises(ResumeError, match="no clip bounds"):
        other.restore(bounds[:-1], first, 3)


def follows(plan: Mechanism, steps: int, **options: Any) -> PrivateGradient:
    """Take some steps beside the same ones written out."""
    model = network()
    private = PrivateGradient(model, loss, plan, seed=5, **options)
    hand = ByHand(plan, private.key)
    for step in range(steps):
        private.step(DATA)
        assert private.clip_bounds[step] == pytest.approx(hand.step(step), rel=1e-9)
        descend(model)
        descend(hand.model)
    return private


@pytest.mark.filterwarnings("ignore:about 0.8 of the 40 rows")
@pytest.mark.parametrize("capture", [False, True])
def test_a_step_without_examples_counts_none_of_the_step_before(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    plan = dataclasses.replace(mechanism(12), sampler=sampling.Poisson(0.02))
    key = follows(plan, 12, capture=capture).key
    counts = [len(plan.sampler.draw(ROWS, step, key)) for step in range(11)]
    assert any(before and not now for before, now in pairwise(counts))


def test_places_beyond_the_examples_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number follows from that of the examples."""
    on_cpu(monkeypatch)
    monkeypatch.setattr(Sizes, "of", lambda *_, **__: Sizes(16, 4))  # pieces of 4, 8, 12 and 16 places
    assert follows(mechanism(12), 8, capture=True).form == Graphed.form


def test_recorded_code_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of many that is run as straight-line code counts as the body does."""
    monkeypatch.setattr(straight, "_FASTER", math.inf)  # kept however long it takes
    monkeypatch.setattr(straight, "_SHORT", math.inf)
    plan = mechanism(200)
    found = []
    for traced in (True, False):
        model = network()
        private = PrivateGradient(model, loss, plan, seed=5)
        private.prepare(DATA)
        runner = private._running
        assert isinstance(runner, straight.Straight)
        runner.worth = traced
        for _ in range(12):
            private.step(DATA)
            descend(model)
        codes: list[Any] = [vars(each)["_code"] for each in runner._graphs.values()]
        assert any(codes) == traced
        found.append((private.clip_bounds, torch.cat([p.flatten() for p in model.parameters()])))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_examples_that_are_left_out_and_padding_count_for_nothing() -> None:
    """A gradient that is not finite adds neither to the sum nor to the count; an empty batch has a count of noise."""
    inputs = DATA[0].clone()
    inputs[3:] = torch.nan
    plan = Mechanism(
        sampling.FullBatch(), 40, 1.0, clip=1e6, batch_size=ROWS, relation=Relation.ZERO_OUT, adaptive_clip=RULE
    )
    for data, count in (((inputs, DATA[1]), 1.5), ((DATA[0][:0], DATA[1][:0]), 0.0)):
        private = PrivateGradient(network(), loss, plan, seed=5)
        private.step(data)
        private.step(data)
        drawn = float(noise.gaussian(torch.zeros(1, dtype=torch.float64), 1.5, private.key, 0, ".clip")[0])
        wanted = RULE.following(1e6, count + drawn, ROWS)
        assert private.clip_bounds[1][0] == pytest.approx(wanted, rel=1e-12)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("groups", [(), PAIR], ids=["flat", "groups"])
def test_a_restored_state_goes_on_bit_for_bit(groups: tuple[Group, ...]) -> None:
    plan, key, whole = mechanism(6, groups), Key.from_seed(9), network()
    private = PrivateGradient(whole, loss, plan, key=key)
    middle: tuple[Any, Any] = (None, None)
    for step in range(6):
        if step == 3:
            middle = stored(private.state()), copy.deepcopy(whole)
        private.step(DATA)
        descend(whole)
    again = PrivateGradient(middle[1], loss, plan, key=key)
    again.restore(middle[0])
    for _ in range(3):
        again.step(DATA)
        descend(middle[1])
    assert again.clip_bounds == private.clip_bounds
    assert torch.equal(
        torch.cat([*map(torch.flatten, middle[1].parameters())]), torch.cat([*map(torch.flatten, whole.parameters())])
    )


def test_a_new_key_goes_on_from_the_bounds_and_a_state_without_them_is_refused() -> None:
    plan, model = mechanism(6), network()
    first = PrivateGradient(model, loss, plan, seed=9)
    for _ in range(3):
        first.step(DATA)
    state = stored(first.state())
    second = PrivateGradient(model, loss, plan, seed=10, start=3, before=first.ledger)
    second.restore(state)
    assert second.clip_bounds == first.clip_bounds
    bare = {name: value for name, value in state.items() if name != "clips"}
    with pytest.raises(ResumeError, match="no clip bounds for the adaptive_clip"):
        PrivateGradient(model, loss, plan, seed=9).restore(bare)


def test_a_step_that_failed_leaves_the_bounds_and_the_run_goes_on() -> None:
    """The gradient of a later step is the clipped sum with noise of its own bound, and the state can be restored."""
    failing = False

    def fragile(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if failing:
            raise ValueError
        return loss(model, batch)

    model, seen = network(), []
    private = PrivateGradient(model, fragile, mechanism(), seed=5, observe=seen.append)
    private.step(DATA)
    step = private.charged(DATA)
    failing = True
    with pytest.raises(UnsupportedModelError):
        private.compute(DATA, step)
    failing = False
    private.step(DATA)
    first, failed, third = private.clip_bounds
    assert third == failed != first
    assert seen[-1].step == 2
    assert float(seen[-1].clip) == third[0]
    std = mechanism().std_at(0) / mechanism().clip_at(0) * third[0]
    drawn = noise.gaussian(torch.zeros(4, 3, dtype=torch.float64), std, private.key, 2, "0.weight")
    noisy = (seen[-1].clipped_sum["0.weight"] + drawn) / DIVISOR
    torch.testing.assert_close(model[0].weight.grad, noisy)
    other = PrivateGradient(network(), loss, mechanism(), key=private.key)
    other.restore(private.state())
    assert other.clip_bounds == private.clip_bounds


def test_observers_see_the_bound_of_their_step() -> None:
    seen: list[Observed] = []
    private = PrivateGradient(network(), loss, mechanism(), seed=5, observe=seen.append)
    for _ in range(3):
        private.step(DATA)
    assert [observed.clip for observed in seen] == [bounds[0] for bounds in private.clip_bounds]


def test_inner_momentum_and_several_rows() -> None:
    """An example of several rows is counted once, by the norm of its mean gradient."""
    wide = (DATA[0].view(20, 2, 3), DATA[1].view(20, 2, 2))
    seen: list[Observed] = []
    plan = mechanism()
    private = PrivateGradient(
        network(), loss, plan, seed=5, observe=seen.append, several_rows=True, inner_momentum=InnerMomentum(0.5, 2)
    )
    for step in range(2):
        private.step(wide)
        norms, clip = seen[step].norms[0], private.clip_bounds[step][0]
        below = sum(share_below(norm, clip) - 0.5 for norm in norms.tolist())
        drawn = float(noise.gaussian(torch.zeros(1, dtype=torch.float64), 1.5, private.key, step, ".clip")[0])
        assert private.clip_after(step + 1) == pytest.approx(RULE.following(clip, below + drawn, DIVISOR), rel=1e-12)


def settings(folder: Path | None = None, **options: Any) -> dict[str, Any]:
    method = recipes.dpsgd(clip=0.7, adaptive_clip="0.5:0.2", learning_rate=0.1)
    return {
        "method": method, "loss": "squared", "epsilon": 4.0, "delta": 1e-3, "steps": 12, "batch_size": 10, "seed": 0,
        "folder": folder,
    } | options  # fmt: skip


def test_fit_reports_the_bounds(tmp_path: Path) -> None:
    fitted = dpgrad.fit(network(), DATA, **settings(tmp_path / "run"))
    assert len(fitted.clip_bounds) == 12
    assert fitted.curves[-1].clip == fitted.clip_bounds[-1][0]
    found = fitted.report()
    assert any(
        "followed a noisy quantile" in note and f"{fitted.clip_bounds[-1][0]:.4g}" in note for note in found["notes"]
    )
    assert "the first clip bound and the rule by which it follows the norms" in found["public"]
    fixed = dpgrad.fit(network(), DATA, **settings(method=recipes.dpsgd(clip=0.7, learning_rate=0.1)))
    assert fitted.event == fixed.event
    assert fitted.guarantee.epsilon == fixed.guarantee.epsilon


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    whole = network()
    wanted = dpgrad.fit(whole, DATA, **settings(tmp_path / "whole"))

    class CrashError(RuntimeError):
        pass

    def crash(progress: Any) -> None:
        if progress.step == 7:
            raise CrashError

    with pytest.raises(CrashError):
        dpgrad.fit(network(), DATA, **settings(RunFolder(tmp_path / "run", checkpoint_every=5)), callbacks=crash)
    model = network()
    found = dpgrad.fit(model, DATA, **settings(RunFolder(tmp_path / "run", checkpoint_every=5, resume=True)))
    assert found.clip_bounds == wanted.clip_bounds
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.autos(adaptive_clip="0.5"), "autos has no clip bound"),
        (lambda: recipes.dpsgd_dynamic(adaptive_clip="0.5"), "so does its schedule"),
        (lambda: recipes.dpsgd(clip=lambda step: 1.0, adaptive_clip="0.5"), "so does its schedule"),
        (lambda: recipes.dpsgd(adaptive_clip="0.5x"), "adaptive_clip must be QUANTILE"),
    ],
)
def test_methods_that_it_does_not_suit(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()
