"""What a step audit runs: private steps on some data under a seed, seen through ``.grad`` alone.

`PrivateSteps` runs dpgrad's own. For any other code, give a function of a `Trial` that leaves its gradients.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad.audit import moving
from dpgrad.audit.exact import Array
from dpgrad.errors import AuditError, DataError, OptionError
from dpgrad.grads.scaling import ScaleRule
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import unwrapped
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.training.private import PrivateGradient

__all__ = [
    "Canaried",
    "Gradients",
    "NoisySums",
    "NotFiniteError",
    "PrivateSteps",
    "Stepper",
    "Trial",
    "UnderAudit",
    "joined",
    "rows_of",
]

Gradients = Mapping[str, Tensor] | Sequence[Tensor]  # by name, or in the order of the model's trained parameters
BIG = 1e4  # norm of the gradient of a canary, far beyond any clip bound in use
_SINGLE = 2.0**-23  # of float32
_WALK = 0.1  # how far the weights are moved between steps, by a public rule
_LEFT = ".left"  # no parameter's name begins with a dot


class NotFiniteError(AuditError):
    """Gradients with an infinity or a NaN."""


@dataclass(frozen=True)
class Trial:
    """What a stepper is asked to run: the steps numbered ``steps`` of ``mechanism`` on ``data``, under ``seed``.

    The mechanism's sampler says which rows each step takes: all of them where it is `sampling.FullBatch`. ``loss`` of
    (model, batch) gives one value per row. The stepper returns the noisy mean gradients of these steps, as they stand
    in ``.grad``. It must give the same for the same trial, and must leave the weights where they are (a learning rate
    of 0) or move them by a rule that reads no data. Code that cannot begin in the middle starts at step 0 and returns
    the last ``len(steps)`` gradients. Where the mechanism has ``adaptive_clip`` each step also returns, as ``".clip"``,
    its clip bounds and those of the next step, (2, groups); a row without a gradient counts as below the bound.

    >>> from dpgrad import sampling
    >>> trial = Trial(nn.Linear(1, 1), None, Mechanism(sampling.FullBatch(), 9, 1.0), None, seed=0, steps=range(3, 5))
    >>> trial.full_batch, len(trial.steps)
    (True, 2)
    """

    model: nn.Module
    loss: Loss
    mechanism: Mechanism
    data: Any
    seed: int | None
    steps: range

    @property
    def full_batch(self) -> bool:
        """Whether every step takes all rows."""
        return isinstance(self.mechanism.sampler, sampling.FullBatch)


Stepper = Callable[[Trial], Iterable[Gradients]]


@dataclass(frozen=True)
class PrivateSteps:
    """dpgrad's own steps: `PrivateGradient` with a rule and its other options.

    The weights move between steps by a seeded random walk that reads no data, so momentum over iterates is used.
    """

    rule: ScaleRule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, trial: Trial) -> list[Gradients]:
        with warnings.catch_warnings():  # which are for those who train
            warnings.simplefilter("ignore", UserWarning)
            return self._run(trial)

    def _run(self, trial: Trial) -> list[Gradients]:
        private = self.private(trial)
        parameters = trainable(private.model)
        kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        found: list[dict[str, Tensor]] = []
        try:
            for step in trial.steps:
                private.step(trial.data)
                gradients = {name: _grad(parameter).clone() for name, parameter in parameters.items()}
                if (bounds := private.work.quantile) is not None:
                    gradients[moving.CLIP] = torch.tensor([bounds.at(step), bounds.at(step + 1)], dtype=torch.float64)
                found.append(gradients)
                _walk(parameters, step)
            if found:
                found[-1][_LEFT] = _state(private.model)
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(kept[name])
        return [*found]

    def private(self, trial: Trial) -> PrivateGradient:
        """The steps of a trial, none taken yet."""
        return PrivateGradient(
            trial.model, trial.loss, trial.mechanism, rule=self.rule, seed=trial.seed, start=trial.steps.start,
            **self.options,
        )  # fmt: skip

    def plain(self) -> "PrivateSteps":
        """The same steps on rows that are single vectors."""
        kept = {name: value for name, value in self.options.items() if name in ("engine", "microbatch", "capture")}
        return PrivateSteps(None, kept)

    @property
    def several_rows(self) -> bool:
        """Whether an example of the data has several rows."""
        return bool(self.options.get("several_rows"))

    def canaried(self) -> "PrivateSteps":
        """The same steps on data with the columns of `Canaried`."""
        augment = self.options.get("augment")
        if augment is None:
            return self

        def widened(batch: Batch, generator: torch.Generator) -> Batch:
            inner, *columns = batch
            made = augment(inner, generator)
            copies = pytree.tree_leaves(made)[0].shape[1]
            return made, *(column[:, None].expand(-1, copies) for column in columns)

        return replace(self, options={**self.options, "augment": widened})


def _state(model: nn.Module) -> Tensor:
    """All weights and buffers of a model, in a row."""
    tensors = [*model.parameters(), *model.buffers()]
    return torch.cat([each.detach().cpu().double().flatten() for each in tensors])


def _grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise AuditError("a step left no .grad: a parameter that is trained got no gradient")
    return parameter.grad.detach()


def _walk(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    with torch.no_grad():
        for parameter in parameters.values():
            moved = torch.randn(parameter.shape, generator=generator) * _WALK
            parameter.add_(moved.to(parameter.device, parameter.dtype))


def _inner(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by the names they have in the model that others, such as Opacus and DDP, have wrapped."""
    for name, parameter in model.named_parameters():
        yield name.removeprefix("_module.").removeprefix("module."), parameter


class Canaried:
    """A loss whose rows have two more columns: the weight of the user's own loss, and that of a gradient canary.

    The batch is (inner, weight, push). A row's loss is the user's where its weight is positive, else 0, plus
    ``push`` times a linear function of the parameters whose gradient is `BIG` times ``directions``.
    """

    def __init__(self, loss: Loss, directions: Mapping[str, Tensor]) -> None:
        self.loss, self.directions = loss, dict(directions)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        inner, weight, push = batch
        own = self.loss(model, inner)
        along = sum((p * self.directions[name]).sum() for name, p in _inner(model) if name in self.directions)
        found: Tensor = torch.where(weight > 0, own, torch.zeros_like(own)) + BIG * push.to(own.dtype) * along
        return found


@dataclass(frozen=True)
class NoisySums:
    """The noisy sums of some steps, (steps, coordinates), and what rounding may change of them.

    With ``adaptive_clip`` they are those at the first clip bounds, and the noisy counts of the groups come last.
    """

    sums: Array
    precision: float  # the distance from 1 to the next number in the narrowest type of a gradient
    left: Tensor | None = None  # the weights and buffers of the model after the steps

    @property
    def single(self) -> bool:
        """Whether every gradient was float32 or wider."""
        return self.precision <= _SINGLE

    @property
    def rounding(self) -> float:
        """A bound on what rounding adds to the norm of a difference of two steps.

        A value is computed in float32 or wider and rounded once to a narrower type, by at most half its precision.
        """
        wide = float(np.abs(self.sums).max(initial=0.0)) * math.sqrt(self.sums.shape[1]) * 2 * _SINGLE
        if self.single:
            return wide
        return wide + float(np.sqrt(np.square(self.sums).sum(1)).max(initial=0.0)) * self.precision


@dataclass(frozen=True, eq=False)
class UnderAudit:
    """The code under audit: model, loss, mechanism, some rows, and who runs a step."""

    model: nn.Module
    loss: Loss
    mechanism: Mechanism
    data: Any
    run: Stepper
    seed: int
    directions: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, mechanism: Mechanism, data: Any, run: Stepper, seed: int) -> "UnderAudit":
        """A target whose model is a copy, without dropout: masks of other shapes would not be the same draws."""
        model = copy.deepcopy(unwrapped(model))
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        return cls(model, loss, mechanism, _tensors(data), run, seed, _directions(model, mechanism))

    @property
    def names(self) -> list[str]:
        """The parameters that are trained."""
        return list(trainable(self.model))

    @property
    def full(self) -> Mechanism:
        """The mechanism on full batches: the same clip bounds, noise and divisor."""
        return replace(self.mechanism, sampler=sampling.FullBatch(), batch_size=self.mechanism.divisor)

    @property
    def rows(self) -> int:
        """The number of examples."""
        return len(pytree.tree_leaves(self.data)[0])

    @property
    def ours(self) -> PrivateSteps | None:
        """dpgrad's own steps, where they are what is audited."""
        return self.run if isinstance(self.run, PrivateSteps) else None

    def group_of(self, name: str) -> Group | None:
        """The group of a parameter."""
        return self.mechanism.group_of(name) if self.mechanism.groups else None

    def slices(self) -> dict[str, slice]:
        """Where each parameter and each count of ``adaptive_clip`` lies in what is released."""
        found = self._parameters()
        start = max((part.stop for part in found.values()), default=0)
        return {**found, **{f"count {n}": slice(start + n, start + n + 1) for n in range(self.counts)}}

    @property
    def counts(self) -> int:
        """How many counts a step releases."""
        return 0 if self.mechanism.adaptive_clip is None else max(1, len(self.mechanism.groups))

    def quiet(self, rows: int) -> Array:
        """What is released of rows without gradients, but for the noise: each is below every clip bound."""
        size = max(part.stop for part in self.slices().values())
        return np.where(np.arange(size) < size - self.counts, 0.0, moving.MOVED * rows)

    def _parameters(self) -> dict[str, slice]:
        """Where each parameter lies in a flat vector."""
        found, start = {}, 0
        for name, parameter in trainable(self.model).items():
            found[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
        return found

    def places(self) -> dict[Group | None, Array]:
        """The coordinates of each group."""
        found: dict[Group | None, list[Array]] = {}
        for name, part in self._parameters().items():
            found.setdefault(self.group_of(name), []).append(np.arange(part.start, part.stop, dtype=float))
        return {group: np.concatenate(parts) for group, parts in found.items()}

    def stds(self, steps: range) -> Array:
        """The claimed standard deviation of the noise, (steps, coordinates)."""
        parts = [
            np.repeat(self.mechanism.stds(steps, self.group_of(name))[:, None], part.stop - part.start, 1)
            for name, part in self._parameters().items()
        ]
        if self.counts:
            parts.append(np.repeat(self.mechanism.count_stds(steps)[:, None], self.counts, 1))
        return np.concatenate(parts, 1)

    def columns(self, data: Any, weight: float | Tensor, push: float | Tensor) -> Any:
        """Rows with the two columns of `Canaried`; an example of several rows has them for each."""
        leaf = pytree.tree_leaves(data)[0]
        wide = self.ours is not None and self.ours.several_rows
        shape = leaf.shape[: 2 if wide else 1]

        def column(value: float | Tensor) -> Tensor:
            given = torch.as_tensor(value, dtype=torch.float32)
            given = given.view(-1, *[1] * (len(shape) - 1)) if given.ndim else given
            return given.expand(shape).clone()

        return data, column(weight), column(push)

    def released(
        self, data: Any, seed: int, steps: range, mechanism: Mechanism, *, canaried: bool = False, few: bool = False
    ) -> NoisySums:
        """What the steps release: the gradients times the declared divisor. ``few``: nothing is captured or traced."""
        loss = Canaried(self.loss, self.directions) if canaried else self.loss
        run = self.run
        if self.ours is not None:
            ours = self.ours.canaried() if canaried else self.ours
            run = replace(ours, options={"capture": False, **ours.options}) if few else ours
        trial = Trial(self.model, loss, mechanism, data, seed, steps)
        found = list(run(trial))
        last = found[-1] if found else None
        left = last[_LEFT] if isinstance(last, Mapping) and _LEFT in last else _state(self.model)
        sums = replace(read(found, self.names, len(steps), mechanism.divisor), left=left)
        return self._steady(sums, found[-len(steps) :], mechanism) if self.counts else sums

    def _steady(self, sums: NoisySums, found: Sequence[Gradients], mechanism: Mechanism) -> NoisySums:
        """The sums as they would be at the first clip bounds, and the noisy counts."""
        bounds = moving.bounds_of([each for each in found if isinstance(each, Mapping)], mechanism)
        groups: list[Group | None] = [*mechanism.groups] or [None]
        values = sums.sums.copy()
        for name, part in self._parameters().items():
            group = self.group_of(name)
            values[:, part] *= (mechanism.clip_at(0, group) / bounds[:, 0, groups.index(group)])[:, None]
        return replace(sums, sums=np.concatenate([values, moving.counts(bounds, mechanism)], 1))


def read(found: Iterable[Gradients], names: Sequence[str], steps: int, divisor: float) -> NoisySums:
    """The gradients that a stepper returned as noisy sums; what cannot be read is refused."""
    rows, precision = [], 0.0
    for gradients in found:
        given = dict(gradients) if isinstance(gradients, Mapping) else dict(zip(names, gradients, strict=False))
        if missing := [name for name in names if name not in given]:
            raise AuditError(f"run left no gradient of {missing[0]}: return one for each parameter that is trained")
        precision = max(precision, *(torch.finfo(given[name].dtype).eps for name in names))
        rows.append(np.concatenate([given[name].detach().cpu().double().numpy().ravel() for name in names]) * divisor)
    if len(rows) < steps:
        raise AuditError(f"run must return the gradients of {steps:,} steps, got {len(rows):,}")
    sums = np.stack(rows[-steps:])
    if not np.isfinite(sums).all():
        raise NotFiniteError("run left gradients that are not finite: every private step releases finite numbers")
    return NoisySums(sums, precision)


def rows_of(data: Any, index: slice | Tensor) -> Any:
    """Some rows of the data."""
    return pytree.tree_map(lambda leaf: leaf[index], data)


def joined(*parts: Any) -> Any:
    """Rows one after another."""
    flat = [pytree.tree_flatten(part) for part in parts]
    leaves = [torch.cat(same) for same in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _tensors(data: Any) -> Any:
    leaves, form = pytree.tree_flatten(data)
    if not leaves or not all(isinstance(leaf, Tensor | np.ndarray) and leaf.ndim for leaf in leaves):
        raise DataError(
            "data of an audit must be tensors or arrays with a common first dimension, in tuples or dicts: "
            "give some rows of it in that form"
        )
    made = [torch.as_tensor(leaf) for leaf in leaves]
    if len({len(leaf) for leaf in made}) != 1 or len(made[0]) < 2:
        raise DataError("data of an audit must have at least two rows, as many in every tensor")
    return pytree.tree_unflatten(made, form)


def _directions(model: nn.Module, mechanism: Mechanism) -> dict[str, Tensor]:
    """A random direction, of norm 1 within each group: the worst example is at its bound in every group at once.

    Every tensor of a group has the same share, so that one which a norm leaves out shows, however small it is.
    """
    generator = torch.Generator().manual_seed(1)
    parameters = trainable(model)
    drawn = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in parameters.items()}
    if not drawn:
        raise OptionError("model has no trainable parameter: set requires_grad on the parameters to train")
    groups = {name: mechanism.group_of(name) if mechanism.groups else None for name in drawn}
    tensors = Counter(groups.values())
    lengths = {name: float(way.norm()) * math.sqrt(tensors[groups[name]]) for name, way in drawn.items()}
    return {name: (way / lengths[name]).to(parameters[name]) for name, way in drawn.items()}
