"""The rule of ``method="auto"``: steps, batch size and learning rate from public facts, without tuning.

Tuning on private rows costs privacy, and constants of papers suit the data of the papers. The rule reads public facts
alone: the number of rows n (declared, or taken from the data under zero-out), the number of trained parameters d, the
budget ε, and whatever the caller gives. What it gives, and why; `docs/defaults.md` has the measurements.

- **Steps**: T = 4·√n, from 144 to 1,000. With few rows noise limits a run, and more steps add to it. With many rows the
  noise of a step is small, and a short run ends before the model has learned.
- **Epochs**: 12·√ε, from 8 to 50. The signal-to-noise ratio of a run, √T·q/z at sampling rate q and noise multiplier z,
  grows with the epochs towards that of full batches, ever more slowly; computing it needs no data.
- **Batch size**: B = epochs·n/T. More epochs buy larger batches and so less noise, not more steps.
- **Clip bound**: 0.1. The optimizer below normalizes gradients, so only the share of clipped examples depends on it.
  With a low bound nearly all are clipped: what an example counts then does not depend on the scale of the loss, and
  examples whose gradients are small late in a run, as the residuals of a regression, are not lost in noise that a high
  bound would ask for.
- **Optimizer**: `dpgrad.training.scaled.SelfScaled` with momentum 0.9. The one fact that matters and is not public is
  the scale of the inputs; the optimizer finds it from noisy gradients, which cost nothing more to use again.
- **Learning rate**: min(0.1, 50/√(T·d)), falling linearly to 0. Noise fills all d coordinates: after T steps a run of
  noise alone has travelled a norm of about 50/√3 whatever d is. With few parameters 0.1 a step is as far as weights of
  inputs of size 1 have to go.

Everything the caller gives replaces its part of the rule, and the rest follows from it. ``optimizer="adam"`` has the
same rate, and with ``"sgd"`` it is 50·(1 − momentum)/(C·√(T·(0.1 + d·(z/B)²))). Other optimizers keep their own.

Guarantee: n is public under zero-out and replace-one, and a declared constant under add-remove; d, ε and the options do
not depend on the data. So the plan does not, and what the optimizer does is post-processing of private gradients.

>>> epochs(1.0), epochs(3.0), epochs(8.0)
(12.0, 20.8, 33.9)
"""

import dataclasses
import math

from dpgrad.accounting.guarantee import UNIT, plural
from dpgrad.errors import OptionError
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.training.options import Budget, Privacy
from dpgrad.training.recipes import Recipe, optimizer_name

__all__ = ["completed", "epochs", "lengthened", "reason", "steps_for"]

REACH, MOST, SIGNAL = 50.0, 0.1, 0.1
# optimizers whose steps have about the size of the learning rate
_NORMALIZED = ("self-scaled", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop")


def epochs(epsilon: float | None) -> float:
    """The number of passes over the data at a budget; 20.8, as at ε = 3, where only noise is given.

    >>> epochs(0.01), epochs(100.0)
    (8.0, 50.0)
    """
    return round(min(50.0, max(8.0, 12 * math.sqrt(3.0 if epsilon is None else epsilon))), 1)


def steps_for(size: int) -> int:
    """The number of steps for a number of rows.

    >>> steps_for(100), steps_for(8000), steps_for(10**6)
    (144, 358, 1000)
    """
    return round(min(1000.0, max(144.0, 4 * math.sqrt(size))))


def lengthened(budget: Budget, privacy: Privacy, size: int) -> Budget:
    """The budget with the steps and the batch size that it leaves open.

    >>> lengthened(Budget(epsilon=1.0, delta=1e-5), Privacy(), 60_000)
    Budget(epsilon=1.0, delta=1e-05, epochs=None, steps=980, batch_size=735)
    >>> lengthened(Budget(epsilon=1.0, delta=1e-5, batch_size=500), Privacy(), 60_000).steps
    1440
    """
    if budget.epochs is not None and budget.steps is not None:
        return budget  # refused as for every method
    budgeted = budget.epsilon is not None and privacy.noise_multiplier is not None  # the steps follow from the noise
    passes = budget.epochs if budget.epochs is not None else epochs(budget.epsilon)
    steps = budget.steps
    if budget.batch_size is not None:
        if steps is None and budget.epochs is None and not budgeted:
            steps = max(1, round(passes * size / budget.batch_size))
        return dataclasses.replace(budget, steps=steps)
    if steps is None:
        steps = max(steps_for(size), math.ceil(passes))  # more epochs than steps: full batches
    batch_size = min(size, max(1, round(passes * size / steps)))
    if budgeted and budget.steps is None:
        return dataclasses.replace(budget, batch_size=batch_size)
    return dataclasses.replace(budget, epochs=None, steps=steps, batch_size=batch_size)


def completed(method: Recipe, mechanism: Mechanism, parameters: int | None) -> Recipe:
    """The recipe with its learning rate, once steps and noise are known.

    >>> from dpgrad.mechanism.sampling import Poisson
    >>> from dpgrad.training.recipes import auto
    >>> completed(auto(), Mechanism(Poisson(0.1), 100, 1.0, batch_size=10), 62_500).learning_rate
    0.02
    """
    if method.learning_rate is not None or not _knows(method):
        return method
    if parameters is None:
        raise OptionError(
            "parameters is required: method auto chooses the learning rate by the number of trained parameters; or "
            "give learning_rate"
        )
    return dataclasses.replace(method, learning_rate=_learning_rate(method, mechanism, max(1, parameters)))


def _knows(method: Recipe) -> bool:
    return not callable(method.optimizer) and _kind(method) in ("sgd", *_NORMALIZED)


def _kind(method: Recipe) -> str:
    return optimizer_name(method.optimizer).lower()


def _learning_rate(method: Recipe, mechanism: Mechanism, parameters: int) -> float:
    if _kind(method) in _NORMALIZED:
        return min(MOST, REACH / math.sqrt(mechanism.steps * parameters))
    first = mechanism.groups[:1]
    clip, noise = mechanism.clip_at(0, *first), mechanism.std_at(0, *first) / mechanism.divisor
    far = math.sqrt(mechanism.steps * (SIGNAL * clip**2 + parameters * noise**2))
    return REACH * (1 - method.momentum) / far


def reason(method: Recipe, steps: int, batch_size: float, size: int, parameters: int | None, unit: str = UNIT) -> str:
    """What the rule chose and why, in one line.

    >>> from dpgrad.training.recipes import auto
    >>> reason(auto(learning_rate=0.1), 144, 5000, 60_000, 7850)
    '144 steps of 5,000 rows (12 epochs), learning rate 0.1, self-scaled: from 60,000 rows, 7,850 parameters and ε'
    """
    units = plural(unit)
    learning_rate = "the optimizer's own" if method.learning_rate is None else _short(method.learning_rate)
    known = "" if parameters is None else f", {parameters:,} parameters"
    return (
        f"{steps:,} steps of {batch_size:,.6g} {units} ({steps * batch_size / size:.3g} epochs), "
        f"learning rate {learning_rate}, {_kind(method)}: from {size:,} {units}{known} and ε"
    )


def _short(learning_rate: object) -> str:
    return f"{learning_rate:.3g}" if isinstance(learning_rate, int | float) else "by a schedule"
