"""A plan in words, and what to think about before its budget is spent: the sizes of δ, of the signal, of batches."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpgrad.accounting.guarantee import plural

if TYPE_CHECKING:
    from dpgrad.mechanism.schedules import Schedule
    from dpgrad.training.plan import Plan

__all__ = ["batches", "cautions", "duration", "learning_rate", "over", "power", "usual_delta"]

_NEAR = 0.1  # n·δ, above which δ is not far below 1/n
_USEFUL = 50.0  # of `Plan.reach`: gradients agree in part, and the classes must be separated


def usual_delta(size: int) -> float:
    """A δ well below 1/n for a public number of rows: 1e-5, or a tenth of the power of ten below 1/n if that is less.

    >>> usual_delta(500), usual_delta(60_000), usual_delta(200_000)
    (1e-05, 1e-06, 1e-07)
    """
    return min(1e-5, float(f"1e-{math.ceil(math.log10(size)) + 1}"))


def power(value: float) -> str:
    """The nearest power of ten, as it is written in code."""
    return f"1e{round(math.log10(value))}"


def duration(seconds: float) -> str:
    """A time in words: in seconds, minutes or hours.

    >>> duration(12.5), duration(1550), duration(40_000)
    ('12.5 s', '26 min', '11.1 h')
    """
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def cautions(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Whether δ is near 1/n, and whether noise drowns whatever could be learned; each with a name."""
    if plan.delta * plan.dataset_size > _NEAR:
        yield (
            "delta",
            f"δ = {plan.delta:g} is not far below 1/n = {1 / plan.dataset_size:.2g}, the δ of publishing one "
            f"{plan.unit} at random: choose it well below, e.g. {power(usual_delta(plan.dataset_size))}",
        )
    if plan.reach < _USEFUL:
        yield (
            "usefulness",
            f"over the whole run, gradients that all agreed would add up to {plan.reach:.2g} times the noise, and "
            f"real ones agree far less: expect a model that is little better than chance. It needs more "
            f"{plural(plan.unit)} or a larger ε",
        )


def batches(plan: "Plan") -> str:
    """The batch size that Abadi et al. advise, next to the planned one."""
    if plan.recipe.full_batch:
        return f"every step takes all {plural(plan.unit)}"
    same_epochs, same_steps = plan.dataset_size / max(plan.epochs, 1), plan.dataset_size / math.sqrt(plan.steps)
    return (
        f"{plan.steps_per_epoch:.4g} batches an epoch for {plan.epochs:.4g} epoch{'s' * (plan.epochs != 1)}; "
        f"Abadi et al. (2016) advise as many batches an epoch as epochs: batches of about {same_epochs:.0f} for as "
        f"many epochs, {same_steps:.0f} for as many steps; and smaller batches for convex problems"
    )


def over(plan: "Plan", value: "float | Schedule") -> str:
    """A number, or the first and the last value of a schedule."""
    if not callable(value):
        return f"{value:.6g}"
    first, last = value(0), value(plan.steps - 1)
    return f"{first:.6g}" + ("" if last == first else f" at step 0, {last:.6g} at the last")


def learning_rate(plan: "Plan") -> str:
    """The learning rate and the optimizer that takes it; under another library's loop both are the loop's."""
    if plan.learning_rate is None and plan.recipe.optimizer is None:
        return "that of your optimizer"
    told = "the optimizer's own" if plan.learning_rate is None else over(plan, plan.learning_rate)
    return f"{told} ({plan.optimizer}, momentum {plan.recipe.momentum:g})"
