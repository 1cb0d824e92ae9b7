"""Faults planted in private training, each a change of the code that is run; for the tests and for `benchmarks.audit`.

A fault is a context manager that changes dpgrad within a block, or a loop of a user's own with the fault written out.
"""

import contextlib
import copy
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from dpgrad.accounting.events import NOTHING, Relation
from dpgrad.audit.trials import PrivateSteps, Stepper, Trial
from dpgrad.grads import history, scaling, uses
from dpgrad.grads.clip import PerExample
from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism import keys, mechanism, sampling
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import draw, noise
from dpgrad.training import private
from dpgrad.training.same_data import SameData
from dpgrad.training.step import bodies, quantile, release

Fault = Callable[[], contextlib.AbstractContextManager[None]]
DELTA = 1e-5


@contextlib.contextmanager
def patched(owner: Any, **new: Any) -> Iterator[None]:
    """Within the block the owner has other attributes."""
    old = {name: vars(owner)[name] for name in new}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


def honest() -> contextlib.AbstractContextManager[None]:
    """No fault."""
    return contextlib.nullcontext()


# ---------------------------------------------------------------- noise
class _Plain:
    """`noise.Means` by `noise.noisy_means`, whose parts the faults below replace."""

    def __init__(self, likes: Any, key: Any, divisor: float) -> None:
        self._names, self._key, self._divisor = [*likes], key, divisor

    def write(self, out: Tensor, totals: Any, stds: Any, step: int) -> None:
        named, sized = (dict(zip(self._names, values, strict=True)) for values in (totals, stds))
        torch.cat([*noise.noisy_means(named, sized, self._key, step, self._divisor).values()], out=out)


def _drawn(**new: Any) -> contextlib.AbstractContextManager[None]:
    """Another way to draw noise, wherever a step asks for it."""
    return patched(noise, Means=_Plain, **new)


def _noised(change: Callable[..., tuple[Any, Any, Any, int, float]]) -> Fault:
    real = noise.noisy_means

    def other(totals: Any, stds: Any, key: Any, step: int, divisor: float) -> Any:
        return real(*change(totals, stds, key, step, divisor))

    return lambda: _drawn(noisy_means=other)


def less_noise(factor: float) -> Fault:
    """Noise of another size than claimed."""
    return _noised(lambda totals, stds, *rest: (totals, {name: std * factor for name, std in stds.items()}, *rest))


def group_left_out() -> contextlib.AbstractContextManager[None]:
    """One parameter gets next to no noise."""

    def quieter(totals: Any, stds: Any, *rest: Any) -> Any:
        return totals, {name: std * (1e-3 if name.endswith("bias") else 1) for name, std in stds.items()}, *rest

    return _noised(quieter)()


def steps_share_noise() -> contextlib.AbstractContextManager[None]:
    """Two steps after each other have the same noise."""
    change = _noised(lambda totals, stds, key, step, divisor: (totals, stds, key, step // 2, divisor))
    return change()


def sum_rounded_before_noise() -> contextlib.AbstractContextManager[None]:
    """Sums are cast to bfloat16 before noise is added."""
    change = _noised(lambda totals, *rest: ({n: t.bfloat16().to(t.dtype) for n, t in totals.items()}, *rest))
    return change()


def noise_on_a_grid() -> contextlib.AbstractContextManager[None]:
    """The noise itself is cast to bfloat16."""
    real = noise.gaussians

    def coarse(likes: Any, stds: Any, key: Any, step: int) -> Any:
        return {name: drawn.bfloat16().to(drawn.dtype) for name, drawn in real(likes, stds, key, step).items()}

    return _drawn(gaussians=coarse)


def parameters_share_noise() -> contextlib.AbstractContextManager[None]:
    """All parameters draw from one stream."""
    real = vars(noise)["_on_cpu"]

    def same(likes: Any, stds: Any, key: Any, step: int) -> Any:
        return {name: real({"x": like}, {"x": stds[name]}, key, step)["x"] for name, like in likes.items()}

    return _drawn(_on_cpu=same)


def _changed_noise(change: Callable[[Tensor, float], Tensor]) -> contextlib.AbstractContextManager[None]:
    real = noise.gaussians

    def changed(likes: Any, stds: Any, key: Any, step: int) -> Any:
        return {name: change(drawn, float(stds[name])) for name, drawn in real(likes, stds, key, step).items()}

    return _drawn(gaussians=changed)


def noise_without_tails() -> contextlib.AbstractContextManager[None]:
    """Noise ends at three standard deviations."""
    return _changed_noise(lambda drawn, std: drawn.clamp(-3 * std, 3 * std))


def noise_for_one_row() -> contextlib.AbstractContextManager[None]:
    """The rows of a weight share their noise, up to a factor."""
    factors = torch.tensor([1.0, 1.001, 1.002])[:, None]
    return _changed_noise(lambda drawn, _: (drawn[:4] * factors).flatten() if len(drawn) == 12 else drawn)


def laplace_noise() -> contextlib.AbstractContextManager[None]:
    """Laplace noise of the standard deviation that Gaussian noise is to have."""

    def drawn(likes: Any, stds: Any, key: Any, step: int) -> Any:
        return {
            name: torch.from_numpy(_random(key, step, name).laplace(0, float(stds[name]) / 2**0.5, like.shape)).to(like)
            for name, like in likes.items()
        }

    return _drawn(gaussians=drawn)


def noise_fades() -> contextlib.AbstractContextManager[None]:
    """From the middle of a long run on, noise is half of what is claimed."""

    def quieter(totals: Any, stds: Any, key: Any, step: int, divisor: float) -> Any:
        return totals, {name: std * (0.5 if step >= 500 else 1) for name, std in stds.items()}, key, step, divisor

    return _noised(quieter)()


def empty_batch_without_noise() -> contextlib.AbstractContextManager[None]:
    """A batch without rows releases zeros."""
    seen, real, means = {"empty": False}, bodies.Bodies.empty, noise.noisy_means

    def empty(own: Any) -> None:
        seen["empty"] = True
        real(own)
        seen["empty"] = False

    def plain(totals: Any, stds: Any, key: Any, step: int, divisor: float) -> Any:
        found = means(totals, stds, key, step, divisor)
        return {name: torch.zeros_like(each) for name, each in found.items()} if seen["empty"] else found

    stack = contextlib.ExitStack()
    stack.enter_context(patched(bodies.Bodies, empty=empty))
    stack.enter_context(_drawn(noisy_means=plain))
    return stack


def few_keys() -> contextlib.AbstractContextManager[None]:
    """A run without a seed has one of 65,536 keys."""

    def fresh(kind: type[keys.Key]) -> keys.Key:
        return kind(secrets.token_bytes(2) + bytes(keys.SIZE - 2), reproducible=False)

    return patched(keys.Key, fresh=classmethod(fresh))


# ---------------------------------------------------------------- clipping
def norm_without_biases() -> contextlib.AbstractContextManager[None]:
    """Norms leave out the biases, which are few numbers."""
    real = vars(PerExample)["_measured"]

    def measured(own: PerExample, groups: Any) -> Any:
        weights = PerExample({name: use for name, use in own.uses.items() if not name.endswith("bias")})
        return real(weights, groups)[0], real(own, groups)[1]

    return patched(PerExample, _measured=measured)


def nothing_dropped() -> contextlib.AbstractContextManager[None]:
    """Rows whose gradients are not finite are not left out."""
    module = sys.modules[PerExample.__module__]
    real = vars(module)["_factors"]

    def factors(norms: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
        found, keep = real(norms, scale)
        return found, torch.ones_like(keep)

    return patched(module, _factors=factors)


def buffer_from_rows() -> contextlib.AbstractContextManager[None]:
    """A step keeps the mean of its rows in a buffer of the model."""
    real = private.PrivateGradient.step

    def step(own: Any, data: Any) -> None:
        real(own, data)
        own.model.register_buffer("seen", pytree.tree_leaves(data)[0].mean())

    return patched(private.PrivateGradient, step=step)


def _scaled(change: Callable[[Any, Tensor], Tensor]) -> Fault:
    return lambda: patched(scaling.Bounded, __call__=change)


def no_clip() -> contextlib.AbstractContextManager[None]:
    """Nothing is clipped."""
    return _scaled(lambda _, norms: torch.ones_like(norms))()


def clip_too_large() -> contextlib.AbstractContextManager[None]:
    """Everything is clipped to 1.1 times the bound."""
    real = scaling.Bounded.__call__
    return _scaled(lambda bounded, norms: real(replace(bounded, clip=bounded.clip * 1.1), norms))()


def rule_not_held() -> contextlib.AbstractContextManager[None]:
    """A rule that exceeds the bound is not lowered to it."""
    return _scaled(lambda bounded, norms: (bounded.clip / (0.8 * norms + 0.01)).to(norms.dtype))()


def unseen_schedule() -> contextlib.AbstractContextManager[None]:
    """The clip bound grows, and noise and accountant do not know."""
    real = release.Figures.clips

    def growing(figures: Any, step: int) -> list[float]:
        return [clip * (1 + step / 100) for clip in real(figures, step)]

    return patched(release.Figures, clips=growing)


@contextlib.contextmanager
def tied_apart() -> Iterator[None]:
    """The two uses of a tied weight are measured apart; the check of engines, which refuses that, is turned off."""
    real = uses.Tied.measured

    def measured(tied: uses.Tied) -> Any:
        one, other = tied.rows.measured()[0], tied.outer.measured()[0]
        return (one.square() + other.square()).sqrt(), real(tied)[1]

    with (
        patched(uses.Tied, measured=measured),
        patched(sys.modules[private.prepared.__module__], _refuse_engine=lambda *_: None),
        patched(private, compare=lambda *_, **__: None),
    ):
        yield


def rows_clipped_apart() -> contextlib.AbstractContextManager[None]:
    """Every augmented row is clipped as if it were an example."""
    real = vars(bodies.Bodies)["_weighted"]

    def weighted(own: Any, size: int) -> Any:
        batch, weights, wide = real(own, size)
        return batch, (weights > 0).to(weights.dtype), 1 if wide > 1 else wide

    return patched(bodies.Bodies, _weighted=weighted)


def mask_ignored() -> contextlib.AbstractContextManager[None]:
    """Places of a piece that no example fills count as the example that fills the first."""
    real = vars(bodies.Bodies)["_weighted"]

    def weighted(own: Any, size: int) -> Any:
        batch, weights, wide = real(own, size)
        return batch, torch.full_like(weights, 1 / wide), wide

    return patched(bodies.Bodies, _weighted=weighted)


@dataclass(frozen=True)
class _Stale(PerExample):
    """Gradients that are measured at another iterate than they are summed at."""

    measured_at: PerExample = field(default=None)  # type: ignore[assignment]

    def _measured(self, groups: Any) -> Any:
        return self.measured_at.norms(groups), super()._measured(groups)[1]


def stale_iterate() -> contextlib.AbstractContextManager[None]:
    """Momentum is measured at the iterates before, and summed at the current ones."""
    real = vars(history)["_recomputed"]

    def recomputed(momentum: InnerMomentum, engine: Any, past: Any, model: Any, loss: Any, *rest: Any) -> PerExample:
        found = real(momentum, engine, past, model, loss, *rest)
        if not past:
            return found
        stale = real(replace(momentum, inner="past"), engine, [past[0], *past], model, loss, *rest)
        return _Stale(found.uses, stale)

    return patched(history, _recomputed=recomputed)


# ---------------------------------------------------------------- the divisor
@contextlib.contextmanager
def _divided(seen: dict[str, int], *patches: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    real = noise.noisy_means

    def other(totals: Any, stds: Any, key: Any, step: int, divisor: float) -> Any:
        return real(totals, stds, key, step, float(max(1, seen["rows"])))

    with contextlib.ExitStack() as stack:
        for each in (*patches, _drawn(noisy_means=other)):
            stack.enter_context(each)
        yield


def realised_size() -> contextlib.AbstractContextManager[None]:
    """The sum is divided by the number of rows that were drawn."""
    seen = {"rows": 1}
    at, hold = bodies.Bodies.at, bodies.Bodies.hold

    def started(own: Any, step: int) -> None:
        seen["rows"] = 0
        at(own, step)

    def held(own: Any, count: int) -> None:
        seen["rows"] += count
        hold(own, count)

    return _divided(seen, patched(bodies.Bodies, at=started, hold=held))


def divisor_from_data() -> contextlib.AbstractContextManager[None]:
    """The sum is divided by the number of rows of the data, under add-remove."""
    seen, real = {"rows": 1}, vars(SameData)["_same_rows"]

    def rows(own: Any, data: Any) -> int:
        seen["rows"] = real(own, data)
        return seen["rows"]

    return _divided(seen, patched(SameData, _same_rows=rows))


# ---------------------------------------------------------------- sampling
def _batches(drawn: Callable[[sampling.Poisson, int, int, Any], Any]) -> Fault:
    chosen, ahead = draw.chosen, draw.ahead

    def one(sampler: Any, rows: int, step: int, key: Any, device: Any) -> Tensor:
        if not isinstance(sampler, sampling.Poisson):
            return chosen(sampler, rows, step, key, device)
        return torch.from_numpy(np.asarray(drawn(sampler, rows, step, key))).long()

    def several(sampler: Any, steps: range, rows: int, key: Any, capacity: int, device: Any) -> draw.Ahead:
        if not isinstance(sampler, sampling.Poisson):
            return ahead(sampler, steps, rows, key, capacity, device)
        found = [one(sampler, rows, step, key, device) for step in steps]
        indices = torch.zeros(len(steps), capacity, dtype=torch.int64)
        for line, each in zip(indices, found, strict=True):
            line[: len(each)] = each[:capacity]
            line[len(each) :] = each[0] if len(each) else 0
        return draw.Ahead(indices, torch.tensor([len(each) for each in found]))

    return lambda: patched(draw, chosen=one, ahead=several)


def _random(key: Any, *words: object) -> np.random.Generator:
    seed = keys.Key.of(key).derive("planted", *map(str, words), size=8)
    return np.random.default_rng(int.from_bytes(seed, "little"))


def shuffled() -> contextlib.AbstractContextManager[None]:
    """Batches of shuffled epochs, accounted as Poisson sampling."""

    def drawn(sampler: sampling.Poisson, rows: int, step: int, key: Any) -> Any:
        size = max(1, round(rows * sampler.sampling_rate_at(step)))
        epoch, place = divmod(step, max(1, rows // size))
        order = _random(key, epoch).permutation(rows)
        return np.sort(order[place * size : (place + 1) * size])

    return _batches(drawn)()


def batches_come_again() -> contextlib.AbstractContextManager[None]:
    """From step 400 on there are three batches, again and again."""

    def drawn(sampler: sampling.Poisson, rows: int, step: int, key: Any) -> Any:
        random = _random(key, step if step < 400 else 400 + step % 3)
        return np.flatnonzero(random.random(rows) < sampler.sampling_rate_at(step))

    return _batches(drawn)()


def replayed_batch() -> contextlib.AbstractContextManager[None]:
    """The batch of every other step is that of the step before."""
    return _batches(lambda sampler, rows, step, key: sampler.draw(rows, step // 2 * 2, key))()


def with_replacement() -> contextlib.AbstractContextManager[None]:
    """Rows are drawn with replacement, so that one may be twice in a batch."""

    def drawn(sampler: sampling.Poisson, rows: int, step: int, key: Any) -> Any:
        size = round(rows * sampler.sampling_rate_at(step))
        return np.sort(_random(key, step).integers(rows, size=size))

    return _batches(drawn)()


def fixed_batches() -> contextlib.AbstractContextManager[None]:
    """Batches of one size, drawn without replacement, accounted as Poisson sampling."""

    def drawn(sampler: sampling.Poisson, rows: int, step: int, key: Any) -> Any:
        return np.sort(_random(key, step).permutation(rows)[: round(rows * sampler.sampling_rate_at(step))])

    return _batches(drawn)()


# ---------------------------------------------------------------- the price
def wrong_relation() -> contextlib.AbstractContextManager[None]:
    """A run under replace-one is priced as if one row were only left out."""
    real = Mechanism.profile

    def profile(own: Mechanism, accountant: str = "pld", **others: Any) -> Any:
        return real(replace(own, relation=Relation.ADD_REMOVE), accountant, **others)

    return patched(Mechanism, profile=profile)


def group_not_priced() -> contextlib.AbstractContextManager[None]:
    """The noise multiplier of several groups is taken to be that of the first."""
    return patched(mechanism, group_multiplier=lambda multipliers: next(iter(multipliers)))


def short_ledger() -> contextlib.AbstractContextManager[None]:
    """One step is not charged."""
    real = Mechanism.step_event

    def event(own: Mechanism, step: int, start: int = 0) -> Any:
        return NOTHING if step == 1 else real(own, step, start)

    return patched(Mechanism, step_event=event)


# ---------------------------------------------------------------- clip bounds that follow a quantile
def _followed(change: Callable[[quantile.Quantile, Tensor], tuple[Tensor, float]]) -> Fault:
    """Another count of norms below the bound, and how much of the noise it gets."""
    real = quantile.Quantile.follow

    def follow(own: quantile.Quantile, step: int, counts: Tensor) -> None:
        counted, factor = change(own, counts)
        gaussian = noise.gaussian
        with patched(quantile, noise=SimpleNamespace(gaussian=lambda *given: factor * gaussian(*given))):
            real(own, step, counted)

    return lambda: patched(quantile.Quantile, follow=follow)


def count_not_noised() -> contextlib.AbstractContextManager[None]:
    """The next clip bound follows the exact count."""
    return _followed(lambda _, counts: (counts, 0.0))()


def count_noise(factor: float) -> Fault:
    """The noise on the count is of another size than claimed."""
    return _followed(lambda _, counts: (counts, factor))


def count_from_zero() -> contextlib.AbstractContextManager[None]:
    """A row adds 0 or 1 to the count, in place of −½ or ½."""
    return _below_by(lambda scaled, weights, clips, real: real(scaled, weights, clips) + 0.5 * (weights > 0).sum())


def count_of_several() -> contextlib.AbstractContextManager[None]:
    """A row adds twice what it may to the count."""
    return _followed(lambda _, counts: (2 * counts, 1.0))()


def _below_by(change: Callable[..., Tensor]) -> contextlib.AbstractContextManager[None]:
    real = vars(bodies)["_below"]
    return patched(bodies, _below=lambda scaled, weights, clips: change(scaled, weights, clips, real))


def exact_quantile() -> contextlib.AbstractContextManager[None]:
    """The next clip bound is half-way to the quantile of the norms, without noise."""
    seen: dict[str, Tensor] = {"norms": torch.ones(1)}

    def noted(scaled: Any, weights: Tensor, clips: Tensor, real: Any) -> Tensor:
        seen["norms"] = scaled.norms.detach()
        found: Tensor = real(scaled, weights, clips)
        return found

    def following(rule: AdaptiveClip, clip: float, *given: Any) -> float:
        middle = float(seen["norms"].quantile(rule.quantile))
        return clip * min(max((middle / clip) ** 0.5, 0.9), 1.1)

    stack = contextlib.ExitStack()
    stack.enter_context(_below_by(noted))
    stack.enter_context(patched(AdaptiveClip, following=following))
    return stack


def count_without_share() -> contextlib.AbstractContextManager[None]:
    """The gradients get the noise of a step that counts nothing."""
    return patched(AdaptiveClip, widening=lambda rule, multipliers, groups, batch_size: np.ones_like(multipliers))


def count_left_out_of_noise() -> contextlib.AbstractContextManager[None]:
    """The mechanism makes room for the count, and the step does not."""
    real = release.Figures.stds

    def narrow(figures: Any, step: int) -> list[float]:
        plain = vars(figures)["_mechanism"]
        share = plain.without_adaptive_clip().std_at(step) / plain.std_at(step)
        return [share * std for std in real(figures, step)]

    return patched(release.Figures, stds=narrow)


def noise_behind_bound() -> contextlib.AbstractContextManager[None]:
    """The noise keeps the size that the first clip bound asked for."""
    real = release.Figures.stds
    return patched(release.Figures, stds=lambda figures, step: real(figures, 0))


def clip_behind_bound() -> contextlib.AbstractContextManager[None]:
    """Gradients are clipped to the first bound, while the noise follows."""
    real = release.Figures.clips
    return patched(release.Figures, clips=lambda figures, step: real(figures, 0))


def count_of_all_rows() -> contextlib.AbstractContextManager[None]:
    """The count is that of all rows of the data, which sampling does not hide."""
    seen: dict[str, Any] = {}
    real, begin = quantile.Quantile.follow, private.PrivateGradient.step

    def step(own: Any, data: Any) -> Any:
        seen["own"], seen["data"] = own, data
        return begin(own, data)

    def follow(own: quantile.Quantile, at: int, counts: Tensor) -> None:
        model, loss = seen["own"].work.model, seen["own"].work.loss
        parameters = [p for p in model.parameters() if p.requires_grad]
        losses = loss(model, seen["data"])
        norms = [
            torch.cat([g.flatten() for g in torch.autograd.grad(each, parameters, retain_graph=True)]).norm()
            for each in losses
        ]
        below = sum((0.5 if float(norm) <= own.at(at)[0] else -0.5) for norm in norms)
        real(own, at, torch.full_like(counts, below))

    stack = contextlib.ExitStack()
    stack.enter_context(patched(private.PrivateGradient, step=step))
    stack.enter_context(patched(quantile.Quantile, follow=follow))
    return stack


# ---------------------------------------------------------------- what is audited
def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """One value per row."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def tied_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a text: the sum over its places."""
    ids, targets = batch
    return F.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none").sum(1)


class TiedModel(nn.Module):
    """An embedding whose weight is that of the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of each place."""
        found: Tensor = self.head(self.embedding(ids)) * 3
        return found


@dataclass(frozen=True)
class Subject:
    """What `audit.step` is given."""

    model: nn.Module
    loss: Any
    mechanism: Mechanism
    data: Any
    options: dict[str, Any] = field(default_factory=dict)
    run: Stepper | None = None


def rows(count: int = 40, columns: int = 4) -> tuple[Tensor, Tensor]:
    """Random rows of two classes."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, columns, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def poisson(**changed: Any) -> Mechanism:
    """The mechanism that most subjects have."""
    settings: dict[str, Any] = {"steps": 20, "noise_multiplier": 1.0, "batch_size": 8.0, **changed}
    return Mechanism(settings.pop("sampler", sampling.Poisson(0.2)), **settings)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose weights are the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def mlp() -> nn.Module:
    """23 parameters in four tensors."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))


def subject(**changed: Any) -> Subject:
    """The model of 23 parameters."""
    options = changed.pop("options", {})
    return Subject(mlp(), cross_entropy, poisson(**changed), rows(), options)


def wide_subject(**changed: Any) -> Subject:
    """A model of 410 parameters, for small deviations of the noise."""
    return Subject(seeded(lambda: nn.Linear(40, 10)), cross_entropy, poisson(**changed), rows(40, 40))


def twin_subject() -> Subject:
    """Two weights of the same shape."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)))
    return Subject(model, cross_entropy, poisson(), rows())


def tied_subject() -> Subject:
    """A tied weight of 24 numbers."""
    ids = torch.randint(0, 6, (40, 3), generator=torch.Generator().manual_seed(1))
    return Subject(seeded(TiedModel), tied_loss, poisson(), (ids, ids.clone()))


def several_subject() -> Subject:
    """Examples of four rows."""
    inputs, targets = rows(80)
    data = inputs.view(20, 4, 4), targets.view(20, 4)
    return Subject(mlp(), cross_entropy, poisson(), data, {"several_rows": True})


def following_subject(**changed: Any) -> Subject:
    """Clip bounds that follow a quantile; counting takes a quarter of what a step may reveal."""
    return subject(**{"adaptive_clip": AdaptiveClip(0.5, noise=1.0), **changed})


GROUPS = (Group("0.*", clip=0.5), Group("2.*"))
MOMENTUM = {"inner_momentum": InnerMomentum(gamma=0.5, length=1)}


@dataclass(frozen=True)
class Case:
    """A planted fault, where it is planted, and the part of the step audit that is to find it."""

    name: str
    fault: Fault
    subject: Callable[[], Subject]
    found_by: str
    steps: int = 60


CASES = (
    Case("noise / √2", less_noise(2**-0.5), subject, "noise"),
    Case("noise × 0.9", less_noise(0.9), wide_subject, "noise"),
    Case("noise × 0.98", less_noise(0.98), lambda: wide_subject(steps=200), "noise", 200),
    Case("clip not applied", no_clip, subject, "sensitivity"),
    Case("clip × 1.1", clip_too_large, subject, "sensitivity"),
    Case("shuffling accounted as Poisson", shuffled, subject, "sampling"),
    Case("divided by the realised size", realised_size, subject, "sensitivity"),
    Case("clip schedule the accountant does not see", unseen_schedule, subject, "sensitivity"),
    Case("tied weights clipped apart", tied_apart, tied_subject, "sensitivity"),
    Case("two parameters share noise", parameters_share_noise, twin_subject, "noise"),
    Case("two steps share noise", steps_share_noise, subject, "noise"),
    Case("one rank's noise lost (emulated)", less_noise(2**-0.5), subject, "noise"),
    Case("augmentations clipped apart", rows_clipped_apart, several_subject, "sensitivity"),
    Case("rule above clip", rule_not_held, subject, "sensitivity"),
    Case("wrong relation", wrong_relation, lambda: subject(relation=Relation.REPLACE_ONE), "price"),
    Case("group left out of the noise", group_left_out, lambda: subject(groups=GROUPS), "noise"),
    Case("group left out of the price", group_not_priced, lambda: subject(groups=GROUPS), "price"),
    Case("sum rounded before noise", sum_rounded_before_noise, subject, "sensitivity"),
    Case("noise on a coarse grid", noise_on_a_grid, subject, "noise"),
    Case("replayed batch", replayed_batch, subject, "sampling"),
    Case("stale iterate in inner momentum", stale_iterate, lambda: subject(options=MOMENTUM, clip=0.1), "sensitivity"),
    Case("mask of padding ignored", mask_ignored, lambda: subject(steps=200), "sensitivity"),
    Case("divisor from the data", divisor_from_data, subject, "sensitivity"),
    Case("ledger short by a step", short_ledger, subject, "ledger"),
    Case("sampling with replacement", with_replacement, subject, "sampling"),
    Case("fixed-size batches accounted as Poisson", fixed_batches, subject, "sampling"),
    Case("noise fades late in a run", noise_fades, lambda: subject(steps=1000), "noise"),
    Case(
        "empty batch without noise", empty_batch_without_noise,
        lambda: subject(sampler=sampling.Poisson(0.05), batch_size=2.0), "noise",
    ),
    Case("noise without tails", noise_without_tails, wide_subject, "noise"),
    Case("rows of a weight share noise", noise_for_one_row, subject, "noise"),
    Case("Laplace noise", laplace_noise, subject, "noise"),
    Case("norm without the biases", norm_without_biases, wide_subject, "sensitivity"),
    Case("row that is not finite kept", nothing_dropped, subject, "overflow"),
    Case("buffer computed from rows", buffer_from_rows, subject, "sensitivity"),
    Case("batches come again late in a run", batches_come_again, lambda: subject(steps=1000), "sampling"),
    Case("one of 65,536 keys", few_keys, subject, "keys"),
    Case("adaptive clip: count not noised", count_not_noised, following_subject, "noise"),
    Case("adaptive clip: count noise × 0.5", count_noise(0.5), following_subject, "noise"),
    Case("adaptive clip: row counts 0 or 1", count_from_zero, following_subject, "sensitivity"),
    Case("adaptive clip: row counts twice", count_of_several, following_subject, "sensitivity"),
    Case("adaptive clip: exact quantile", exact_quantile, following_subject, "noise"),
    Case(
        "adaptive clip: count left out of the price", count_without_share,
        lambda: following_subject(sampler=sampling.FullBatch()), "price",
    ),
    Case("adaptive clip: count left out of the noise", count_left_out_of_noise, following_subject, "noise"),
    Case("adaptive clip: noise behind the bound", noise_behind_bound, following_subject, "noise"),
    Case("adaptive clip: clip behind the bound", clip_behind_bound, following_subject, "sensitivity"),
    Case("adaptive clip: count of all rows", count_of_all_rows, following_subject, "sensitivity"),
)  # fmt: skip


# ---------------------------------------------------------------- a user's own loop
def own_loop(trial: Trial, *, noise_factor: float = 1.0, by_value: bool = False) -> list[dict[str, Tensor]]:
    """DP-SGD written out: one backward pass per row, and torch's own generator; no step of an optimizer.

    ``by_value``: rows with a positive first number are drawn twice as often.
    """
    random = torch.Generator().manual_seed(trial.seed)
    parts = trial.data if isinstance(trial.data, tuple) else (trial.data,)
    count, clip, found = _length(parts), trial.mechanism.clip_at(0), []
    for _ in range(trial.steps.stop):
        taken = range(count)
        if not trial.full_batch:
            rate = 1 / trial.mechanism.sampler.steps_per_epoch
            often = 1 + (pytree.tree_leaves(trial.data)[0][:, 0] > 0).float() if by_value else 1
            taken = torch.nonzero(torch.rand(count, generator=random) < rate * often)[:, 0].tolist()
        sums = {name: torch.zeros_like(p) for name, p in trial.model.named_parameters()}
        for row in taken:
            trial.model.zero_grad()
            one = _row(trial.data, row)
            trial.loss(trial.model, one).sum().backward()  # type: ignore[no-untyped-call]
            norm = torch.stack([p.grad.norm() for p in trial.model.parameters() if p.grad is not None]).norm()
            for name, p in trial.model.named_parameters():
                if p.grad is not None:
                    sums[name] += p.grad * float((clip / norm.clamp(min=1e-12)).clamp(max=1))
        std = trial.mechanism.std_at(0) * noise_factor
        found.append({
            name: (total + std * torch.randn(total.shape, generator=random)) / trial.mechanism.divisor
            for name, total in sums.items()
        })  # fmt: skip
    trial.model.zero_grad()
    return found[trial.steps.start :]


def _length(parts: Any) -> int:
    while isinstance(parts, tuple):
        parts = parts[0]
    return len(parts)


def _row(data: Any, row: int) -> Any:
    return tuple(_row(part, row) for part in data) if isinstance(data, tuple) else data[row : row + 1]


# ---------------------------------------------------------------- two processes
def _rank(rank: int, meeting: str, pipe: Any) -> None:
    """One of two processes: dpgrad's own steps, or rows clipped, half of the noise's variance added, and summed."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    while (asked := pipe.recv()) is not None:
        trial, fault = asked
        if isinstance(fault, str):
            trial = replace(trial, model=copy.deepcopy(trial.model))  # what was sent is memory that all ranks share
            with RANK_FAULTS[fault]() if rank else honest():
                steps = [dict(each) for each in PrivateSteps()(trial)]
            pipe.send([{name: value.numpy() for name, value in one.items()} for one in steps] if not rank else None)
            continue
        lost = fault
        own = replace(trial, data=_every_second(trial.data, rank), seed=2 * trial.seed + rank)
        factor = 0.0 if rank == lost else 2**-0.5
        found = own_loop(own, noise_factor=factor)
        for gradients in found:
            for name in sorted(gradients):
                dist.all_reduce(gradients[name])
        pipe.send([{name: value.numpy() for name, value in one.items()} for one in found] if not rank else None)
    dist.destroy_process_group()


def _every_second(data: Any, rank: int) -> Any:
    return tuple(_every_second(part, rank) for part in data) if isinstance(data, tuple) else data[rank::2]


def _no_noise(likes: Any, parts: Any, stds: Any, key: Any, step: int) -> list[Tensor]:
    return [torch.zeros(part.stop - part.start) for part in parts]


RANK_FAULTS: dict[str, Fault] = {  # of the second of two ranks that take dpgrad's own steps
    "none": honest,
    "noise lost": lambda: patched(noise, gaussian_parts=_no_noise),
    "clip not applied": no_clip,
}


class TwoRanks:
    """Steps of two real processes. A user's own loop, without the noise of rank ``lost``; or dpgrad's own, where
    ``lost`` names a fault of the second rank."""

    def __init__(self, folder: Any, lost: int | str | None = None, patience: float = 300.0) -> None:
        import torch.multiprocessing as several

        context = several.get_context("spawn")
        self.lost, self._patience, self._pipes, self._ranks = lost, patience, [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, str(folder / "meeting"), there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._ranks.append(process)

    def __call__(self, trial: Trial) -> list[dict[str, Tensor]]:
        for pipe in self._pipes:
            pipe.send((trial, self.lost))
        found, _ = (self._answer(pipe) for pipe in self._pipes)
        return [{name: torch.from_numpy(value) for name, value in one.items()} for one in found]

    def _answer(self, pipe: Any) -> Any:
        if not pipe.poll(self._patience):
            raise TimeoutError("a rank did not answer")
        return pipe.recv()

    def close(self) -> None:
        """End both processes."""
        for pipe, process in zip(self._pipes, self._ranks, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(30)
            if process.is_alive():
                process.kill()
