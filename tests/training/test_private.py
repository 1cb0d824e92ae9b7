"""One private step against the same step written out: draw, clip one example at a time, add noise, divide."""

import dataclasses
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpgrad import Mechanism, Relation, grads
from dpgrad.accounting.events import NOTHING, Compose, Gaussian, Poisson, Repeat, leaves
from dpgrad.errors import OptionError, UnsupportedModelError
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import RULES, Hard, Psasc, ScaleRule
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group
from dpgrad.randomness import noise
from dpgrad.training.private import Observed, PrivateGradient
from dpgrad.training.step import release

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, STEPS, DIVISOR = 24, 3, 6.0
SAMPLERS: dict[str, tuple[Any, Relation]] = {
    "poisson": (sampling.Poisson(0.25), Relation.ADD_REMOVE),
    "full-batch": (sampling.FullBatch(), Relation.ZERO_OUT),
    "fixed-size": (sampling.FixedSize(ROWS, 6), Relation.REPLACE_ONE),
    "shuffle": (sampling.Shuffle(ROWS, 6), Relation.ZERO_OUT),
}
CLIPS: dict[str, Any] = {
    "constant": 0.8,
    "linear": schedules.linear(0.8, STEPS),
    "affine": schedules.affine(0.8, STEPS),
    "geometric": schedules.geometric(0.8, 0.9, 0.1),
    "arithmetic": schedules.arithmetic(0.8, 0.1, 0.4),
    "piecewise": schedules.piecewise([1], [0.8, 0.3]),
    "cosine": schedules.cosine(0.8, 0.2, STEPS),
    "function": lambda step: 0.8 / (1 + step),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    out: Tensor = (model(inputs) - targets).square().sum(1)
    return out


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    return draw(count, 3), draw(count, 2)


def mechanism(name: str = "poisson", **options: Any) -> Mechanism:
    sampler, relation = SAMPLERS[name]
    settings = {"steps": STEPS, "noise_multiplier": 0.7, "clip": 0.8, "batch_size": DIVISOR} | options
    return Mechanism(sampler, relation=relation, **settings)


def by_hand(model: nn.Module, plan: Mechanism, step: int, key: Any, rule: ScaleRule) -> dict[str, Tensor]:
    """The gradient that a step must write, one example at a time, on the device of the model."""
    inputs, targets = (leaf.to(next(model.parameters()).device) for leaf in rows())
    names = [name for name, _ in model.named_parameters()]
    groups = {name: plan.group_of(name) if plan.groups else None for name in names}
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in plan.sampler.draw(ROWS, step, key):
        alone = loss(model, (inputs[i : i + 1], targets[i : i + 1])).sum()
        each = dict(zip(names, torch.autograd.grad(alone, list(model.parameters())), strict=True))
        for group in set(groups.values()):
            own = [name for name in names if groups[name] == group]
            norm = torch.cat([each[name].flatten() for name in own]).norm()
            factor = rule(norm, plan.clip_at(step, group))
            for name in own:
                total[name] += factor * each[name]
    drawn = noise.gaussians(total, {name: plan.std_at(step, groups[name]) for name in names}, key, step)
    return {name: (total[name] + drawn[name]) / DIVISOR for name in names}


def assert_written(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("engine", grads.ENGINES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_step_is_the_step_written_out(sampler: str, engine: str) -> None:
    model, plan = network().to(DEVICE), mechanism(sampler, clip=schedules.linear(0.8, STEPS), hold_noise=True)
    private = PrivateGradient(model, loss, plan, engine=engine, seed=5)
    for step in range(STEPS):
        private.step(rows())
        assert_written(model, by_hand(model, plan, step, private.key, Hard()))
    assert private.ledger == plan.event()
    assert private.spent(1e-5) == plan.guarantee(1e-5)


def test_a_gradient_that_was_given_other_memory_is_written_again() -> None:
    """`p.grad.data = ...` is a common way to scale gradients: the next step must not leave what it left."""
    model, plan = network().to(DEVICE), mechanism("full-batch")
    private = PrivateGradient(model, loss, plan, seed=5)
    for step in range(STEPS):
        private.step(rows())
        assert_written(model, by_hand(model, plan, step, private.key, Hard()))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = 0.5 * parameter.grad


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_step_with_every_rule(kind: Callable[..., ScaleRule]) -> None:
    rule = kind(**({"s": 0.6} if kind is Psasc else {}))
    model, plan = network().to(DEVICE), mechanism()
    private = PrivateGradient(model, loss, plan, rule=rule, seed=5)
    private.step(rows())
    assert_written(model, by_hand(model, plan, 0, private.key, rule))


def test_groups_have_their_own_clip_and_noise() -> None:
    groups = (Group("0.*", clip=0.5), Group("2.weight", noise_multiplier=2.0), Group("2.bias", 0.25, 3.0))
    model, plan = network().to(DEVICE), mechanism(groups=groups)
    private = PrivateGradient(model, loss, plan, seed=5)
    private.step(rows())
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))


def test_groups_must_cover_the_parameters() -> None:
    with pytest.raises(ValueError, match=r"parameter '2.weight' must match one group"):
        PrivateGradient(network(), loss, mechanism(groups=(Group("0.*"),)))


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_realised_noise_over_clip_is_the_multiplier_that_is_charged(clip: str, hold: bool) -> None:
    """At every step: noise measured with an empty batch, clip measured with a huge gradient, multiplier in the ledger.

    20,000 values estimate a standard deviation to 0.5 % (one sigma); 4 % is eight of them, a false alarm in 10^15.
    """
    plan = mechanism("full-batch", clip=CLIPS[clip], hold_noise=hold, noise=schedules.piecewise([2], [1.0, 1.5]))
    wide = nn.Linear(20_000, 1, bias=False)
    quiet, loud = torch.zeros(0, 20_000), torch.full((1, 20_000), 1e3)
    empty = PrivateGradient(wide, lambda model, x: model(x)[:, 0], plan, seed=1)
    full = PrivateGradient(wide, lambda model, x: model(x)[:, 0], plan, seed=1)
    for step in range(STEPS):
        empty.step(quiet)
        assert wide.weight.grad is not None
        drawn = wide.weight.grad.double() * DIVISOR
        full.step(loud)
        moved = (wide.weight.grad.double() * DIVISOR - drawn).norm()
        charged = plan.step_event(step)
        assert isinstance(charged, Gaussian)
        assert float(drawn.std() / moved) == pytest.approx(charged.noise_multiplier, rel=0.04)
        assert 0.99 * plan.clip_at(step) <= moved <= plan.clip_at(step) * (1 + 1e-6)
    assert empty.ledger == full.ledger == plan.event()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_full_run_ends_with_the_plan_in_the_ledger(sampler: str, clip: str) -> None:
    plan = mechanism(sampler, steps=7, clip=CLIPS[clip], hold_noise=True)
    private = PrivateGradient(network(), loss, plan)
    assert private.ledger == Compose(())
    for _ in range(7):
        private.step(rows())
    assert private.ledger == plan.event()


def test_no_step_beyond_the_mechanism() -> None:
    private = PrivateGradient(network(), loss, mechanism(steps=1))
    private.step(rows())
    with pytest.raises(ValueError, match="all 1 steps of the mechanism are taken"):
        private.step(rows())


def test_a_step_is_charged_before_gradients_are_computed_and_even_if_it_fails() -> None:
    seen = []

    def fails(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(private.ledger)
        if private.steps_taken:
            raise KeyError("broken")
        return loss(model, batch)

    private = PrivateGradient(network(), fails, mechanism("full-batch"))
    with pytest.raises(UnsupportedModelError, match="raised KeyError on training rows"):
        private.step(rows())
    assert private.steps_taken == 1
    assert seen[-1] == private.ledger == Repeat(Gaussian(0.7), 1)


def test_division_is_by_the_declared_size() -> None:
    found = []
    for size in (1.0, 4.0):
        model = network()
        PrivateGradient(model, loss, mechanism(batch_size=size), seed=5).step(rows())
        assert model[0].weight.grad is not None
        found.append(model[0].weight.grad)
    torch.testing.assert_close(found[0], 4 * found[1])


def test_divisor_must_be_declared() -> None:
    with pytest.raises(ValueError, match="batch_size is required"):
        PrivateGradient(network(), loss, Mechanism(sampling.Poisson(0.1), 1, 1.0))


@pytest.mark.parametrize("microbatch", [1, 2, 5, 100])
def test_microbatches_do_not_change_the_step(microbatch: int) -> None:
    model, plan = network(), mechanism("full-batch")
    private = PrivateGradient(model, loss, plan, microbatch=microbatch, seed=5)
    private.step(rows())
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))


def test_memory_limit_gives_microbatches() -> None:
    model, plan = network(), mechanism("full-batch")
    private = PrivateGradient(model, loss, plan, engine="vmap", memory_limit=4_000, seed=5)
    private.step(rows())
    assert private.work.microbatch is not None
    assert 1 < private.work.microbatch < ROWS
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))
    with pytest.raises(ValueError, match="memory limit must be at least"):
        PrivateGradient(network(), loss, plan, engine="vmap", memory_limit=10).step(rows())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_takes_smaller_pieces_of_the_same_batch(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most five examples fit: the same examples are summed, each once, and noise is added once."""
    sizes, noises = [], []
    engine, write = grads.ENGINES["vmap"], noise.Means.write

    def noted(self: noise.Means, *given: Any) -> None:
        noises.extend(self._names)
        write(self, *given)

    def small(model: nn.Module, loss: Any, batch: Any, weights: Tensor, rows: int = 1) -> Any:
        if len(weights) > 5:
            raise error
        sizes.append(len(weights))
        return engine(model, loss, batch, weights, rows)

    monkeypatch.setitem(grads.ENGINES, "vmap", small)
    monkeypatch.setattr(noise.Means, "write", noted)
    model, plan = network(), mechanism("full-batch")
    private = PrivateGradient(model, loss, plan, engine="vmap", seed=5)
    private.step(rows())
    assert sum(sizes[-8:]) == ROWS
    assert sorted(noises) == sorted(name for name, _ in model.named_parameters())
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_pieces_of_fixed_sizes_that_do_not_fit_become_smaller(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on at most five examples fit: the gradients are those of a run in which all do."""
    plan = Mechanism(sampling.Poisson(0.6), 40, 0.5, relation="zero-out", batch_size=0.6 * ROWS)
    engine, full = grads.ENGINES["vmap"], [False]

    def small(model: nn.Module, loss: Any, batch: Any, weights: Tensor, rows: int = 1) -> Any:
        if full[0] and len(weights) > 5:
            raise error
        return engine(model, loss, batch, weights, rows)

    monkeypatch.setitem(grads.ENGINES, "vmap", small)
    found = []
    for limited in (True, False):
        model = network()
        private = PrivateGradient(model, loss, plan, engine="vmap", seed=5)
        for step in range(3):
            full[0] = limited and step > 0
            private.step(rows())
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        assert private.steps_taken == 3
    for one, other in zip(found[:3], found[3:], strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("steps", [4, 40], ids=["single kernels", "pieces of fixed sizes"])
def test_an_engine_that_goes_wrong_on_the_way_stops_the_run_before_the_step_is_charged(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison before the first step saw nothing of it."""
    engine, wrong = grads.ENGINES["vmap"], [False]

    def changing(model: nn.Module, loss: Any, batch: Any, weights: Tensor, rows: int = 1) -> Any:
        if wrong[0]:
            batch = tuple(leaf.roll(1, 0) for leaf in batch)  # each example has the gradient of another
        return engine(model, loss, batch, weights, rows)

    monkeypatch.setitem(grads.ENGINES, "vmap", changing)
    charged: list[int] = []
    plan = mechanism("full-batch", steps=steps)
    private = PrivateGradient(network(), loss, plan, engine="vmap", charge=charged.append)
    private.step(rows())
    wrong[0] = True
    with pytest.raises(UnsupportedModelError, match="engine 'vmap' does not get the gradient"):
        private.step(rows())
    assert charged == [0]


def test_one_example_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    private = PrivateGradient(network(), loss, mechanism("full-batch"))
    private.step(rows())

    def never(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(private.work, "engine", never)
    with pytest.raises(MemoryError, match="the gradient of one example does not fit in memory"):
        private.step(rows())


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = rows()
        return inputs[index], targets[index]


@pytest.mark.parametrize(
    "data",
    [rows(), [*rows()], TensorDataset(*rows()), Pairs(), tuple(leaf.numpy() for leaf in rows())],
    ids=["tensors", "list", "TensorDataset", "Dataset", "arrays"],
)
def test_data_in_every_form(data: Any) -> None:
    model, plan = network(), mechanism()
    private = PrivateGradient(model, loss, plan, seed=5)
    private.step(data)
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))


def test_memory_mapped_arrays(tmp_path: Any) -> None:
    inputs, targets = (leaf.numpy() for leaf in rows())
    np.save(tmp_path / "inputs.npy", inputs)
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    model, plan = network(), mechanism()
    private = PrivateGradient(model, loss, plan, seed=5)
    private.step((mapped, targets))
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from rows()[0]


class Endless(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3)


class Ragged(Pairs):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(3 + index), torch.zeros(2)


class Worded(Pairs):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), "word"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "data must be readable by index, got Stream, a stream"),
        (Endless(), "data must be readable by index, got Endless, a stream"),
        (
            (torch.zeros(3, 3), torch.zeros(2, 2)),
            r"data\[0\] has 3, data\[1\] has 2: a tuple, list or dict holds columns",
        ),
        ("rows", "data must be a tensor or an array with one entry per example, got a str"),
        (
            [(torch.zeros(3), 1)],
            r"data\[0\]\[1\] must be a tensor .* got a int: wrap a list of examples in a map-style",
        ),
        (torch.tensor(1.0), "data must be a tensor or an array with one entry per example"),
        ((), "data must hold tensors with one entry per example, but nothing"),
        (Ragged(), "the examples of data cannot be put into one batch: make the Dataset return tensors of one shape"),
        (Worded(), r"an example of data must hold tensors or numbers, \[1\]\[0\] is a str: leave it out"),
    ],
)
def test_data_that_cannot_be_drawn_from(data: Any, message: str) -> None:
    private = PrivateGradient(network(), loss, mechanism())
    with pytest.raises(ValueError, match=message):
        private.step(data)
    assert private.steps_taken == 0


def test_empty_batches_and_empty_data_are_noise_that_counts() -> None:
    model, plan = network(), mechanism(steps=2)
    never = PrivateGradient(model, loss, plan, seed=5)
    never.step((torch.zeros(0, 3), torch.zeros(0, 2)))
    for name, p in model.named_parameters():
        expected = noise.gaussian(p, plan.std_at(0), never.key, 0, name) / DIVISOR
        torch.testing.assert_close(p.grad, expected)
    assert never.steps_taken == 1
    assert never.ledger == plan.with_steps(1).event() == Repeat(Poisson(0.25, Gaussian(0.7)), 1)


def test_runs_differ_unless_seeded_and_keys_are_never_shown() -> None:
    def first(seed: int | None) -> Tensor:
        model = network()
        private = PrivateGradient(model, loss, mechanism(), seed=seed)
        private.step(rows())
        assert ("not for release" in repr(private)) == (seed is not None)
        assert private.key.secret.hex() not in repr(vars(private))
        assert repr(private.key.secret) not in repr(vars(private))
        assert model[0].weight.grad is not None
        found: Tensor = model[0].weight.grad
        return found

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))
    assert not torch.equal(first(None), first(None))


def test_global_random_state_is_left_alone() -> None:
    private = PrivateGradient(network(), loss, mechanism())
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    private.step(rows())
    assert torch.equal(torch.rand(3), expected)


def test_frozen_parameters_get_no_gradient_and_thawed_ones_are_checked() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    private = PrivateGradient(model, loss, mechanism(), seed=5)
    private.step(rows())
    assert model[0].weight.grad is None
    model[0].weight.requires_grad_(True)
    private.step(rows())
    assert_written(model, by_hand(model, private.mechanism, 1, private.key, Hard()))


def test_engine_that_differs_from_its_definition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = grads.ENGINES["bookkeeping"]

    def wrong(*given: Any, **options: Any) -> Any:
        found = engine(*given, **options)
        return type(found)({name: use.scaled(1.001) for name, use in found.uses.items()})

    monkeypatch.setitem(grads.ENGINES, "bookkeeping", wrong)
    private = PrivateGradient(network(), loss, mechanism())
    with pytest.raises(ValueError, match=r"0\.weight.*single"):
        private.step(rows())
    assert private.steps_taken == 0


def test_inner_momentum_over_steps() -> None:
    """Two steps with the weights moved between: m₁ = g(w₁) + γ g(w₀), scaled as one gradient."""
    model, plan = network(), mechanism("full-batch")
    private = PrivateGradient(model, loss, plan, inner_momentum=InnerMomentum(0.5, 2), seed=5)
    private.step(rows())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    private.step(rows())
    inputs, targets = rows()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(ROWS):
        momentum = {name: torch.zeros_like(p) for name, p in now.items()}
        for weight, iterate in ((1.0, now), (0.5, before)):
            copy = network()
            copy.load_state_dict(iterate)
            alone = loss(copy, (inputs[i : i + 1], targets[i : i + 1])).sum()
            for name, g in zip(now, torch.autograd.grad(alone, list(copy.parameters())), strict=True):
                momentum[name] += weight * g
        norm = torch.cat([m.flatten() for m in momentum.values()]).norm()
        for name, m in momentum.items():
            total[name] += min(1.0, 0.8 / float(norm)) * m
    wanted = {
        name: (t + noise.gaussian(t, plan.std_at(1), private.key, 1, name)) / DIVISOR for name, t in total.items()
    }
    assert_written(model, wanted)


def test_average_runs_on_full_batches_only() -> None:
    model = network()
    private = PrivateGradient(model, loss, mechanism("full-batch"), average=0.3, microbatch=7, seed=5)
    for _ in range(STEPS):
        private.step(rows())
    assert_written(model, by_hand(model, private.mechanism, STEPS - 1, private.key, Hard()))  # the weights stood still
    with pytest.raises(ValueError, match="average needs FullBatch sampling"):
        PrivateGradient(network(), loss, mechanism(), average=0.3)


@pytest.mark.parametrize("engine", grads.ENGINES)
@pytest.mark.parametrize("average", [None, 0.5])
def test_several_rows_per_example(engine: str, average: float | None) -> None:
    """Two equal rows are one example, clipped once."""
    model, plan = network(), mechanism("full-batch")
    doubled = tuple(leaf[:, None].expand(-1, 2, -1).clone() for leaf in rows())
    private = PrivateGradient(model, loss, plan, several_rows=True, engine=engine, average=average, seed=5)
    private.step(doubled)
    assert_written(model, by_hand(model, plan, 0, private.key, Hard()))


@pytest.mark.parametrize("steps", [STEPS, 100])  # so many that pieces of fixed sizes are worth their code
@pytest.mark.parametrize("clip", [0.8, 1e3])
def test_the_gradient_of_several_rows_is_their_mean(steps: int, clip: float) -> None:
    """Where the clip bound does not bind, a sum in place of the mean would be seen."""
    model, plan = network(), mechanism(steps=steps, clip=clip, noise_multiplier=1e-3)
    inputs, targets = rows()
    views = (
        inputs[:, None] + torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)[:, None],
        targets[:, None].expand(-1, 3, -1),
    )
    private = PrivateGradient(model, loss, plan, several_rows=True, seed=5)
    private.step(views)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in plan.sampler.draw(ROWS, 0, private.key):
        alone = loss(model, (views[0][i], views[1][i])).mean()
        each = torch.autograd.grad(alone, list(model.parameters()))
        factor = min(1.0, clip / float(torch.cat([g.flatten() for g in each]).norm()))
        for name, g in zip(total, each, strict=True):
            total[name] += factor * g
    drawn = noise.gaussians(total, dict.fromkeys(total, plan.std_at(0)), private.key, 0)
    assert_written(model, {name: (total[name] + drawn[name]) / DIVISOR for name in total})


def test_autocast_and_optimizers() -> None:
    """A regression that is learnt at little noise, in bfloat16, with Adam."""
    torch.manual_seed(0)
    inputs = torch.randn(200, 4)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    model = nn.Linear(4, 1)
    plan = Mechanism(sampling.Poisson(0.5), 60, noise_multiplier=0.1, batch_size=100)
    private = PrivateGradient(model, lambda m, b: (m(b[0])[:, 0].float() - b[1]).square(), plan, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16):
            private.step((inputs, targets))
        optimizer.step()
    assert (model(inputs)[:, 0] - targets).square().mean() < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "hooks"}, "engine must be one of bookkeeping, vmap, single, got 'hooks'"),
        ({"microbatch": 0}, "microbatch must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"key": 7}, r"key must be a Key, got a int: give Key.from_seed\(\.\.\.\), or seed="),
        ({"average": 0.5, "inner_momentum": InnerMomentum(0.5, 1)}, "average needs FullBatch sampling"),
        ({"rule": Hard}, "rule must be a rule of dpgrad.scaling such as"),
        ({"rule": "psasc"}, "rule must be a rule of dpgrad.scaling such as"),
        ({"inner_momentum": 0.9}, "inner_momentum must be an InnerMomentum"),
        ({"memory_limit": "2GB"}, "memory_limit in bytes must be a whole number"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivateGradient(network(), loss, mechanism("full-batch"), **options)


def test_a_loss_may_mix_the_rows_of_one_example() -> None:
    """Two views of an example are compared with each other, as contrastive losses do."""

    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = model(batch[0]).unflatten(0, (-1, 2)).unbind(1)
        return (first * second).sum(1).repeat_interleave(2)

    found = {}
    for engine in grads.ENGINES:
        model = network()
        views = tuple(torch.stack([leaf, leaf.flip(1)], 1) for leaf in rows())
        PrivateGradient(model, contrast, mechanism("full-batch"), several_rows=True, engine=engine, seed=5).step(views)
        found[engine] = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found["bookkeeping"], found["vmap"])


def test_what_is_no_mechanism_loss_or_model_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"mechanism must be a Mechanism, got 5\.0: for a budget use"):
        PrivateGradient(network(), loss, 5.0)  # type: ignore[arg-type]
    for wrong in (nn.CrossEntropyLoss(), 3, torch.optim.SGD(network().parameters(), lr=1.0)):
        with pytest.raises(ValueError, match=r"loss must be a function of \(model, batch\)"):
            PrivateGradient(network(), wrong, mechanism())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must have a parameter to train"):
        PrivateGradient(network().requires_grad_(False), loss, mechanism())
    with pytest.raises(ValueError, match=r"parameter 0\.weight is on the meta device"):
        PrivateGradient(network().to("meta"), loss, mechanism())
    with pytest.raises(ValueError, match=r"group 'conv\*' matches no parameter"):
        PrivateGradient(network(), loss, mechanism(groups=(Group("[02]*"), Group("conv*"))))
    with pytest.raises(ValueError, match="sampling_rate must be above 0"):
        PrivateGradient(network(), loss, Mechanism(sampling.Poisson(0), 1, 1.0, batch_size=1))


@pytest.mark.parametrize("clip", [1e-42, schedules.geometric(1.0, 1e-20, 1e-40)])
@pytest.mark.parametrize("options", [{}, {"secure_values": 99}, {"groups": (Group("0.*"), Group("2.*"))}])
def test_a_clip_bound_that_floats_do_not_hold_is_refused(clip: Any, options: dict[str, Any]) -> None:
    """Below the least normal float products lose digits: at 1e-44 a row moved the sum by 1.6 clip bounds."""
    plan = mechanism(clip=clip, **options)
    with pytest.raises(OptionError, match=r"clip must be at least 9.86e-32 for sums of torch.float32, got 1e-4"):
        PrivateGradient(network().float(), loss, plan)
    PrivateGradient(network(), loss, plan)  # float64 holds it


def test_a_clip_bound_that_a_quantile_may_move_too_far_is_refused() -> None:
    plan = mechanism(clip=1e-28, adaptive_clip=AdaptiveClip(0.5))
    with pytest.raises(OptionError, match=r"clip must be at least 9.86e-26 .* adaptive_clip may lower it .* got 1e-28"):
        PrivateGradient(network().float(), loss, plan)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 5e3, 7.3e4, 1e7])
def test_no_row_contributes_more_than_the_smallest_clip_bound(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, add, clip = [], release.OnHost.add, 1e-31

    def spied(self: Any, part: Any, total: Tensor) -> None:
        seen.append(total.double().flatten())
        add(self, part, total)

    monkeypatch.setattr(release.OnHost, "add", spied)
    plan = Mechanism(sampling.FullBatch(), 2, 1.0, clip=clip, batch_size=1)
    row = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(2)) * scale
    PrivateGradient(nn.Linear(50_000, 1, bias=False), lambda model, x: model(x)[:, 0], plan).step(row)
    assert 0.99 * clip < torch.cat(seen).norm() <= clip


def test_a_batch_instead_of_the_dataset_is_refused() -> None:
    private = PrivateGradient(network(), loss, mechanism())
    private.step(rows())
    with pytest.raises(ValueError, match="data must be the whole dataset, with the same rows at every step"):
        private.step(rows(5))
    assert private.steps_taken == 1


def test_a_parameter_frozen_on_the_way_is_not_stepped_again() -> None:
    model = network()
    private = PrivateGradient(model, loss, mechanism())
    private.step(rows())
    model[0].weight.requires_grad_(False)
    private.step(rows())
    assert model[0].weight.grad is None


def test_averages_need_the_same_parameters() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    private = PrivateGradient(model, loss, mechanism("full-batch"), average=0.5)
    private.step(rows())
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="average keeps a vector for each parameter"):
        private.step(rows())


def test_no_step_in_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match=r"outside torch\.inference_mode"):
        PrivateGradient(network(), loss, mechanism()).step(rows())


def test_examples_of_a_dataset_are_put_together_by_collate() -> None:
    def padded(examples: list[Any]) -> Any:
        return torch.stack([x[:3] for x, _ in examples]).double(), torch.stack([y for _, y in examples]).double()

    PrivateGradient(network(), loss, mechanism(), collate=padded).step(Ragged())


def test_examples_padded_to_the_longest_of_a_batch_are_refused() -> None:
    """The number of positions decides how gradients are measured: it may not depend on who takes part."""

    class Lengths(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Tensor:
            return torch.randn(1 + index % 7, 3)

    def padded(examples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    plan = Mechanism(sampling.Poisson(0.1), steps=20, noise_multiplier=1.0, batch_size=4)
    private = PrivateGradient(nn.Linear(3, 1), lambda model, x: model(x).sum((1, 2)), plan, seed=1, collate=padded)

    def some_steps() -> None:
        for _ in range(20):
            private.step(Lengths())

    with pytest.raises(ValueError, match="collate must give every example tensors of one shape and type"):
        some_steps()


def test_an_augmentation_that_gives_other_shapes_later_is_refused() -> None:
    many = [2]

    def augment(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = (leaf[:, None].repeat_interleave(many[0], 1) for leaf in batch)
        return inputs, targets

    private = PrivateGradient(network(), loss, mechanism("full-batch"), augment=augment, seed=5)
    private.step(rows())
    many[0] = 3
    with pytest.raises(ValueError, match="augment gives examples of other shapes than before"):
        private.step(rows())


def taken(private: PrivateGradient, steps: int, model: nn.Module) -> list[Tensor]:
    """The gradients of some steps, each followed by a step of descent."""
    found = []
    for _ in range(steps):
        private.step(rows())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """What a file gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "poisson": ("poisson", {}),
    "shuffle": ("shuffle", {}),
    "inner momentum": ("full-batch", {"inner_momentum": InnerMomentum(0.5, 2)}),
    "past momentum": ("full-batch", {"inner_momentum": InnerMomentum(0.5, 1, inner="past")}),
    "average": ("full-batch", {"average": 0.4}),
    "memory": ("full-batch", {"memory_limit": 4_000, "engine": "vmap"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_restored_state_goes_on_bit_for_bit(name: str) -> None:
    sampler, options = RESUMED[name]
    plan, key = mechanism(sampler, steps=6, clip=schedules.linear(0.8, 6), hold_noise=True), Key.from_seed(9)
    whole = network()
    wanted = taken(PrivateGradient(whole, loss, plan, key=key, **options), 6, whole)
    first = network()
    private = PrivateGradient(first, loss, plan, key=key, **options)
    taken(private, 3, first)
    state, ledger = stored(private.state()), private.ledger
    weights = {name: value.clone() for name, value in first.state_dict().items()}
    taken(private, 2, first)  # lost
    second = network()
    second.load_state_dict(weights)
    again = PrivateGradient(second, loss, plan, key=key, **options)
    again.restore(state)
    assert again.steps_taken == 3
    assert again.ledger == ledger
    for found, expected in zip(taken(again, 3, second), wanted[3:], strict=True):
        assert torch.equal(found, expected)
    assert again.ledger == plan.event()


def test_the_state_holds_no_key() -> None:
    model = network()
    private = PrivateGradient(model, loss, mechanism("full-batch"), average=0.4, seed=5)
    private.step(rows())
    file = io.BytesIO()
    torch.save(private.state(), file)
    assert private.key.secret not in file.getvalue()
    assert private.key.secret.hex().encode() not in file.getvalue()


def test_a_new_key_goes_on_pays_again_and_begins_the_averages_anew() -> None:
    model, plan = network(), mechanism("full-batch", steps=5)
    first = PrivateGradient(model, loss, plan, average=0.4, seed=1)
    taken(first, 2, model)
    second = PrivateGradient(model, loss, plan, average=0.4, seed=2, start=2, before=first.ledger)
    second.restore(stored(first.state()))
    assert second.steps_taken == 2
    assert second.ledger == first.ledger
    second.step(rows())
    assert_written(model, by_hand(model, plan, 2, second.key, Hard()))  # the first of an average is the gradient
    assert sum(leaves(second.ledger).values()) == 3
    assert second.spent(1e-5).epsilon == plan.with_steps(3).guarantee(1e-5).epsilon


def test_a_new_key_within_a_shuffled_epoch_pays_for_it_again() -> None:
    plan = mechanism("shuffle", steps=8)
    private = PrivateGradient(network(), loss, plan, start=2)
    for _ in range(6):
        private.step(rows())
    assert sum(leaves(private.ledger).values()) == 2  # what is left of the first epoch of four, and the second


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({}, {"step": 99}, "step of the state must be at most 3"),
        ({}, {"start": 1}, "start must be 1, as when the state was taken, got 0"),
        ({}, {"more": 1}, "not the state of a PrivateGradient"),
        ({}, {"iterates": [{}]}, "give the inner_momentum it was taken with"),
        ({}, {"average": {"momenta": {}, "updates": torch.zeros(1)}}, "give the average it was taken with"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(options: Any, changed: dict[str, Any], message: str) -> None:
    private = PrivateGradient(network(), loss, mechanism(), seed=5, **options)
    private.step(rows())
    state = private.state() | changed
    with pytest.raises(ValueError, match=message):
        PrivateGradient(network(), loss, mechanism(), seed=5, **options).restore(state)
    with pytest.raises(ValueError, match="before the first step"):
        private.restore(private.state())


@pytest.mark.parametrize("another", [{}, {"seed": 6}, {"key": Key.fresh()}], ids=["fresh", "seed", "key"])
def test_a_state_belongs_to_its_key(another: dict[str, Any]) -> None:
    """Restored under two other keys, the steps that follow would be two releases, and each object would count one."""
    model, plan = network(), mechanism(steps=4)
    private = PrivateGradient(model, loss, plan, seed=5)
    taken(private, 2, model)
    state = stored(private.state())
    with pytest.raises(
        ValueError, match=r"under another key, at step 2: give that key; or, for a new one, start=2 and b"
    ):
        PrivateGradient(model, loss, plan, **another).restore(state)
    for before in (NOTHING, plan.with_steps(1).event()):
        with pytest.raises(ValueError, match="before must hold what the state spent"):
            PrivateGradient(model, loss, plan, start=2, before=before, **another).restore(state)
    with pytest.raises(ValueError, match="start must be 0, as when the state was taken, got 2"):
        PrivateGradient(model, loss, plan, start=2, before=private.ledger, seed=5).restore(state)
    again = PrivateGradient(model, loss, plan, start=2, before=private.ledger, **another)
    again.restore(state)
    taken(again, 2, model)
    assert leaves(again.ledger) == leaves(plan.event())


@pytest.mark.parametrize(
    "changed", [{"noise_multiplier": 6.3}, {"clip": 0.1}, {"sampler": sampling.Poisson(0.1)}], ids=str
)
def test_a_state_belongs_to_its_mechanism(changed: dict[str, Any]) -> None:
    """With the key and other noise, a step would repeat the noise of one that the first object may take: 9 r₁ − r₂."""
    private = PrivateGradient(network(), loss, mechanism(), seed=5)
    private.step(rows())
    state = stored(private.state())
    with pytest.raises(
        ValueError, match="taken with other batches, clip bounds or noise, at step 1: give the mechanism"
    ):
        PrivateGradient(network(), loss, dataclasses.replace(mechanism(), **changed), seed=5).restore(state)
    PrivateGradient(network(), loss, mechanism().with_steps(9), seed=5).restore(state)  # more of the same
    del state["noise"]
    PrivateGradient(network(), loss, mechanism(), seed=5).restore(state)


def test_a_state_before_the_first_step() -> None:
    state = PrivateGradient(network(), loss, mechanism(), seed=5).state()
    PrivateGradient(network(), loss, mechanism(noise_multiplier=6.3), seed=5).restore(state)


def test_a_state_of_0_1_0_is_one_of_another_key() -> None:
    private = PrivateGradient(network(), loss, mechanism(), seed=5)
    private.step(rows())
    state = {name: value for name, value in private.state().items() if name not in ("key", "noise")}
    with pytest.raises(ValueError, match="under another key"):
        PrivateGradient(network(), loss, mechanism(), seed=5).restore(state)
    PrivateGradient(network(), loss, mechanism(), start=1, before=private.ledger).restore(state)


def test_a_step_is_charged_first_and_a_refusal_leaves_it_untaken() -> None:
    asked: list[int] = []

    def charge(step: int) -> None:
        asked.append(step)
        assert private.steps_taken == step
        if len(asked) == 2:
            raise OSError("disk full")

    model = network()
    private = PrivateGradient(model, loss, mechanism(), seed=5, charge=charge)
    private.step(rows())
    with pytest.raises(OSError, match="disk full"):
        private.step(rows())
    assert private.steps_taken == 1
    assert private.ledger == mechanism(steps=1).event()
    private.step(rows())
    assert asked == [0, 1, 1]
    assert_written(model, by_hand(model, private.mechanism, 1, private.key, Hard()))


@pytest.mark.parametrize("steps", [4, 40], ids=["single kernels", "pieces of fixed sizes"])
def test_a_step_that_must_be_replayed_is_not_worked_on_in_smaller_pieces(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more memory the replay would add the same noise to a sum that was rounded differently."""
    engine = grads.ENGINES["vmap"]

    def small(model: nn.Module, loss: Any, batch: Any, weights: Tensor, rows: int = 1) -> Any:
        if len(weights) > 15:
            raise MemoryError
        return engine(model, loss, batch, weights, rows)

    monkeypatch.setitem(grads.ENGINES, "vmap", small)
    model, plan = network(), mechanism("full-batch", steps=steps)
    private = PrivateGradient(model, loss, plan, engine="vmap", charge=lambda step: None)
    with pytest.raises(MemoryError, match="could not be replayed: give microbatch"):
        private.step(rows())
    assert model[0].weight.grad is None
    assert private.steps_taken == 1
    PrivateGradient(model, loss, plan, engine="vmap", charge=lambda step: None, microbatch=12).step(rows())


def jittered(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three noisy copies of each example."""
    inputs, targets = (leaf[:, None].expand(-1, 3, -1) for leaf in batch)
    return inputs + torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype), targets


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("engine", grads.ENGINES)
def test_augmentations_are_averaged_within_the_example_before_scaling(engine: str, microbatch: int | None) -> None:
    model, plan = network(), mechanism("full-batch", steps=2)
    private = PrivateGradient(model, loss, plan, augment=jittered, engine=engine, microbatch=microbatch, seed=5)
    seen = []
    for step in range(2):
        private.step(rows())
        random, made = torch.Generator(), []
        for i in range(ROWS):
            random.manual_seed(int.from_bytes(private.key.derive("augment", str(step), str(i), size=8), "little"))
            made.append(jittered(tuple(leaf[i : i + 1] for leaf in rows()), random))
        inputs, targets = (torch.cat(leaves) for leaves in zip(*made, strict=True))
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for i in range(ROWS):
            own = torch.autograd.grad(loss(model, (inputs[i], targets[i])).mean(), list(model.parameters()))
            factor = min(1.0, 0.8 / float(torch.cat([g.flatten() for g in own]).norm()))
            for name, g in zip(total, own, strict=True):
                total[name] += factor * g
        assert_written(
            model,
            {n: (t + noise.gaussian(t, plan.std_at(step), private.key, step, n)) / DIVISOR for n, t in total.items()},
        )
        seen.append(inputs)
    assert not torch.equal(*seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": jittered, "several_rows": True}, "augment makes several rows of each example"),
        ({"seed": 1, "key": Key.from_seed(1)}, "give seed or key, not both"),
        ({"start": 4}, "start must be at most 3"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivateGradient(network(), loss, mechanism(), **options)


@pytest.mark.parametrize("microbatch", [None, 7])
@pytest.mark.parametrize("groups", [(), (Group("0.*", clip=0.5), Group("2.*"))], ids=["one", "groups"])
def test_what_is_observed_is_what_the_step_did(groups: tuple[Group, ...], microbatch: int | None) -> None:
    model, plan = network(), mechanism("full-batch", groups=groups)
    seen: list[Observed] = []
    private = PrivateGradient(model, loss, plan, seed=5, observe=seen.append, microbatch=microbatch)
    private.step(rows())
    quiet = network()
    PrivateGradient(quiet, loss, plan, seed=5, microbatch=microbatch).step(rows())
    (found,) = seen
    inputs, targets = rows()
    each = [
        torch.autograd.grad(loss(model, (x[None], y[None])).sum(), list(model.parameters()))
        for x, y in zip(inputs, targets, strict=True)
    ]
    parts = [(0, 1), (2, 3)] if groups else [(0, 1, 2, 3)]
    norms = torch.stack(
        [torch.stack([torch.cat([g[i].flatten() for i in part]).norm() for g in each]) for part in parts]
    )
    torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.factors, private.rule(norms, found.clip), rtol=1e-9, atol=1e-9)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        raw = torch.stack([g[number] for g in each]).sum(0) / DIVISOR
        torch.testing.assert_close(found.raw[name], raw, rtol=1e-8, atol=1e-9)
        assert torch.equal(found.noisy[name], parameter.grad)
        assert torch.equal(parameter.grad, quiet.get_parameter(name).grad)  # looking changes nothing
        drawn = noise.gaussian(parameter, plan.std_at(0, private.work.group_of(name)), private.key, 0, name)
        torch.testing.assert_close(found.clipped_sum[name], parameter.grad * DIVISOR - drawn, rtol=1e-8, atol=1e-8)
    assert repr(found) == "Observed(step 0, private)"


def test_an_empty_batch_is_observed() -> None:
    seen: list[Observed] = []
    private = PrivateGradient(network(), loss, mechanism(), observe=seen.append)
    private.step((torch.zeros(0, 3), torch.zeros(0, 2)))
    assert seen[0].norms.shape == seen[0].factors.shape == (1, 0)


def test_a_step_is_computed_once_and_only_when_charged() -> None:
    """Its noise on two sums would reveal their difference."""
    private = PrivateGradient(network(), loss, mechanism("full-batch"), seed=5)
    with pytest.raises(ValueError, match="step 0 was not charged, or was already computed"):
        private.compute(rows(), 0)
    step = private.charged(rows())
    private.compute(rows(), step)
    for again in (step, step + 1):
        with pytest.raises(ValueError, match=f"step {again} was not charged, or was already computed"):
            private.compute(rows(), again)
