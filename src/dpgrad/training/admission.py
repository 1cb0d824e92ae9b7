"""What a private step refuses before it is charged: wrong kinds of arguments, models, and rules that cannot be held."""

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import chain
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.accounting.ledger import Ledger
from dpgrad.data import is_file
from dpgrad.data import names as dataset_names
from dpgrad.errors import DataError, OptionError, UnsupportedModelError
from dpgrad.grads import ENGINES
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import ScaleRule, fault
from dpgrad.grads.sums import sum_dtype, trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.adaptive import FAR
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.training.augment import Augment
from dpgrad.training.models import MODELS
from dpgrad.training.options import ROWS_ON_RANK, Computing, Privacy

__all__ = [
    "Signature", "check_computing", "check_examples", "refuse_arguments", "refuse_kinds", "refuse_model", "rule_fault",
    "warn_of_size",
]  # fmt: skip

_TRIED = 20  # steps at which a rule is tried, over the schedule of its clip bound
_CLIPS = 100_000  # steps whose clip bounds are looked at, as many as a mechanism checks
_FAR = 4.0  # how many times its divisor, or as small a share of it, a batch is not on purpose


def refuse_kinds(loss: object, mechanism: object, rule: object, inner_momentum: object, key: object) -> None:
    """Refuse at once what would fail after a step was charged."""
    if not callable(loss) or isinstance(loss, nn.modules.loss._Loss | torch.optim.Optimizer):
        raise OptionError(
            f"loss must be a function of (model, batch) that returns one value per example, got {_validate.shown(loss)}"
        )
    if not isinstance(mechanism, Mechanism):
        raise OptionError(
            f"mechanism must be a Mechanism, got {_validate.shown(mechanism)}: for a budget use "
            "Mechanism(...).calibrated(epsilon=..., delta=...)"
        )
    if rule is not None and (not callable(rule) or isinstance(rule, type)):
        raise OptionError(
            "rule must be a rule of dpgrad.scaling such as Hard(), or a function rule(norms, clip) that returns the "
            f"factors, got {_validate.shown(rule)}"
        )
    if inner_momentum is not None and not isinstance(inner_momentum, InnerMomentum):
        raise OptionError(
            f"inner_momentum must be an InnerMomentum(gamma, length), got {_validate.shown(inner_momentum)}"
        )
    if key is not None and not isinstance(key, Key):
        raise OptionError(f"key must be a Key, got a {type(key).__name__}: give Key.from_seed(...), or seed=")
    if isinstance(mechanism.sampler, sampling.Poisson) and not mechanism.sampler.sampling_rate_at(0):
        raise OptionError("sampling_rate must be above 0, got 0: no example would ever be drawn")


def refuse_arguments(model: object, data: object, ledger: object, privacy: object, computing: object) -> None:
    """Refuse arguments of another kind than `fit` takes, each with what to write."""
    if not isinstance(model, nn.Module):
        remedy = "build one"
        if isinstance(model, str) and model in MODELS:
            remedy = f"build it, dpgrad.training.models.build({model!r}, shape, outputs)"
        elif isinstance(model, type):
            remedy = f"make one, {model.__name__}(...)"
        elif callable(getattr(model, "fit", None)):
            remedy = _private_estimator(type(model).__name__)
        raise OptionError(f"model must be a torch.nn.Module, got {_validate.shown(model)}: {remedy}")
    if isinstance(data, str | PathLike):
        raise DataError(f"data must be tensors, arrays or a Dataset, got {_validate.shown(data)}: {_loaded(data)}")
    if ledger is not None and not isinstance(ledger, Ledger):
        raise OptionError(f"ledger must be a dpgrad.Ledger, got {_validate.shown(ledger)}: give Ledger(path)")
    for name, value, kind in (("privacy", privacy, Privacy), ("computing", computing, Computing)):
        if not isinstance(value, kind):
            raise OptionError(
                f"{name} must be a dpgrad.{kind.__name__}, got {_validate.shown(value)}: write "
                f"{name}=dpgrad.{kind.__name__}(...)"
            )


# Estimators of scikit-learn, and those of dpgrad in their place.
_ESTIMATORS = {
    "LogisticRegression": "DPLogisticRegression", "SGDClassifier": "DPLogisticRegression",
    "LinearSVC": "DPLinearSVC", "SVC": "DPLinearSVC", "LinearRegression": "DPLinearRegression",
    "Ridge": "DPLinearRegression", "PoissonRegressor": "DPPoissonRegressor",
}  # fmt: skip


def _private_estimator(name: str) -> str:
    """The line to write for an estimator of another library, which `fit` does not train."""
    known = _ESTIMATORS.get(name)
    if known is None:
        return "dpgrad.convex has private estimators for scikit-learn, such as DPLogisticRegression"
    classifier = known in ("DPLogisticRegression", "DPLinearSVC")
    public = "classes=[...]" if classifier else "data_norm=..., target_bounds=(LOW, HIGH)"
    return f"write dpgrad.convex.{known}(epsilon=3, {public}).fit(X, y)"


def _loaded(data: str | PathLike[str]) -> str:
    """The line that reads data which are given by their name or their file."""
    name = os.fspath(data)
    close = _validate.nearest(name, dataset_names())
    if is_file(name):
        return f'write dpgrad.data.read({name!r:.80}, schema="schema.toml"); `dpgrad data describe` proposes a schema'
    return "load them first" if close is None else f"write dpgrad.data.load({close!r})"


def check_computing(
    engine: str, microbatch: int | None, memory_limit: int | None, workers: int, rows_on_rank: str
) -> None:
    """Refuse settings of how steps are computed that have another value than they may."""
    _validate.whole(workers=workers)
    _validate.one_of(ROWS_ON_RANK, rows_on_rank=rows_on_rank)
    _validate.one_of(ENGINES, engine=engine)
    if microbatch is not None:
        _validate.whole(least=1, microbatch=microbatch)
    if memory_limit is not None:
        _validate.whole(least=1, **{"memory_limit in bytes": memory_limit})


def check_examples(
    mechanism: Mechanism,
    inner_momentum: InnerMomentum | None,
    average: float | None,
    augment: Augment | None,
    several_rows: bool,
) -> None:
    """Refuse ways to make and follow examples that do not go together."""
    if augment is not None and several_rows:
        raise OptionError(
            "augment makes several rows of each example, and several_rows says that the data have them: give one"
        )
    averaged = inner_momentum is not None or not isinstance(mechanism.sampler, sampling.FullBatch)
    if average is not None and averaged:
        raise OptionError("average needs FullBatch sampling and replaces inner_momentum: leave out one of the two")


def refuse_model(model: nn.Module, mechanism: Mechanism) -> None:
    """Refuse a model without parameters to train or of a group, without values, or whose clip bounds are too small."""
    if not trainable(model):
        raise UnsupportedModelError("model must have a parameter to train, got none with requires_grad")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModelError(
                f"parameter {name} is on the meta device, without values: load or initialise it first"
            )
    for group in mechanism.groups:
        if not any(fnmatchcase(name, group.pattern) for name, _ in model.named_parameters()):
            raise OptionError(f"group {group.pattern!r} matches no parameter of the model: change its pattern")
    types = {sum_dtype(parameter.dtype) for parameter in trainable(model).values()}
    _refuse_clips(min(types, key=lambda dtype: dtype.itemsize), mechanism)


def _refuse_clips(dtype: torch.dtype, mechanism: Mechanism) -> None:
    """Refuse clip bounds at which clipped gradients lose digits: one row could move the sum further than its bound."""
    floats, far = torch.finfo(dtype), 1.0 if mechanism.adaptive_clip is None else FAR
    least = floats.tiny / floats.eps * far
    few = range(min(mechanism.steps, _CLIPS) if callable(mechanism.clip) else 1)
    for group in mechanism.groups or (None,):
        for steps in (few, range(mechanism.steps - 1, mechanism.steps)):
            if (found := mechanism.clips(steps, group).min()) < least:
                raise OptionError(
                    f"clip must be at least {least:.3g} for sums of {dtype}"
                    f"{'' if far == 1 else ', since adaptive_clip may lower it to a millionth'}, got {found:.3g}"
                    f"{'' if group is None else f' for group {group.pattern!r}'}: rescale the loss"
                )


def rule_fault(rule: ScaleRule, clip_at: Callable[[int], float | Tensor], steps: int, device: torch.device) -> str:
    """`dpgrad.scaling.fault` at the first, the smallest and the largest clip bound of a mechanism.

    >>> rule_fault(lambda norms, clip: 1 / norms, lambda step: 1 / (1 + step), steps=3, device=torch.device("cpu"))
    'rule gives a norm of 3.33e-10 the factor 3e+09 at clip 0.333, more than clip/norm'
    """
    clips = [clip_at(step) for step in (*range(0, steps, max(1, steps // _TRIED)), steps - 1)]
    return fault(rule, [clips[0], min(clips, key=_first), max(clips, key=_first)], device)


def _first(clip: float | Tensor) -> float:
    """The clip bound, of the first group where there are groups: all groups follow one schedule."""
    return float(clip.flatten()[0]) if isinstance(clip, Tensor) else clip


def warn_of_size(mechanism: Mechanism, rows: int) -> None:
    """Warn where batches are far from the size that divides their sum: the data may be one batch of the dataset."""
    if not isinstance(mechanism.sampler, sampling.Poisson) or mechanism.batch_size is None:
        return
    drawn = mechanism.sampler.sampling_rate_at(0) * rows
    if not mechanism.batch_size / _FAR <= drawn <= mechanism.batch_size * _FAR:
        _validate.warn(
            f"about {drawn:.3g} of the {rows:,} rows given are drawn at each step, and their sum is divided by "
            f"batch_size = {mechanism.batch_size:g}: give the whole dataset at every step, not a batch of it, and "
            "batch_size = sampling rate × rows"
        )


class Signature:
    """What a check of the model relies on, apart from the values of its parameters. It is asked for at every step.

    >>> model = nn.Sequential(nn.Linear(2, 1))
    >>> signature = Signature(model)
    >>> signature.same(), model.append(nn.Tanh()) is model, signature.same()
    (True, True, False)
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [*model.modules()]
        self._before, self._held = self._now()  # held, lest another object be found where one of them was

    def same(self) -> bool:
        """Whether nothing has changed."""
        return self._now()[0] == self._before

    def _now(self) -> tuple[list[list[object]], list[object]]:
        modules = self._modules
        children = [each._modules for each in modules if each._modules]
        parameters = [each._parameters for each in modules if each._parameters]
        values = [*chain.from_iterable(table.values() for table in parameters)]
        held: list[object] = [*chain.from_iterable(table.values() for table in children), *values]
        hooks = [each._forward_hooks for each in modules if each._forward_hooks]
        before = [each._forward_pre_hooks for each in modules if each._forward_pre_hooks]
        tables: list[dict[Any, Any]] = [*children, *parameters, *hooks, *before]
        return [
            [each.training for each in modules],
            [*map(id, tables)],
            [*map(len, tables)],
            [*chain.from_iterable(tables)],
            [*map(id, held)],
            [value is not None and value.requires_grad for value in values],
        ], [held, tables]
