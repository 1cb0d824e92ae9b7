"""What a private step refuses before it is charged: wrong kinds of arguments, models, and rules that cannot be held."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from dpgrad import _validate
from dpgrad.errors import OptionError, UnsupportedModelError
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import ScaleRule, fault
from dpgrad.grads.sums import trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["refuse_kinds", "refuse_model", "rule_fault", "warn_of_size"]

_TRIED = 20  # steps at which a rule is tried, over the schedule of its clip bound
_FAR = 4.0  # how many times its divisor, or as small a share of it, a batch is not on purpose


def refuse_kinds(loss: object, mechanism: object, rule: object, inner_momentum: object) -> None:
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
    if isinstance(mechanism.sampler, sampling.Poisson) and not mechanism.sampler.sampling_rate_at(0):
        raise OptionError("sampling_rate must be above 0, got 0: no example would ever be drawn")


def refuse_model(model: nn.Module, mechanism: Mechanism) -> None:
    """Refuse a model that has nothing to train, has no values yet, or lacks the parameters of a group."""
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
