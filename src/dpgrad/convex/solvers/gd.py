"""DP-GD: full-batch gradient descent on a convex loss, each gradient noised (Yu et al. 2020, Algorithm 1).

    w ← w − η·(v + l2·w),   v = (Σᵢ clip(∇lossᵢ(w)) + N(0, std²))/n,   T times from w = 0.

A gradient of a linear model is rᵢ·xᵢᵀ, of norm ‖rᵢ‖·‖xᵢ‖, so clipping scales the rows of the residual matrix and no
gradient of a single row is ever formed (Goodfellow 2015). T releases with noise multiplier z = std/clip are exactly
μ-GDP with μ = √T/z, and 2√T/z under replace-one: the noise is what `accounting.exact` asks for, not a bound.

>>> import numpy as np
>>> from dpgrad.convex.losses import Logistic
>>> design = Design(np.array([[1.0], [-1.0]] * 500), radius=1.0)
>>> targets = np.array([1.0, -1.0] * 500)
>>> mechanism = calibrated(1000, 20, clip=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE)
>>> coefficients, event = solve(design, targets, Logistic(), mechanism, learning_rate=2.0, key=7)
>>> bool(coefficients[0, 0] > 1), event == mechanism.event()
(True, True)
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import NOTHING, Event, Gaussian, Inexact, Pinned, Relation, Repeat
from dpgrad.convex import chunked
from dpgrad.convex.design import Design, Rows, quiet
from dpgrad.convex.losses import Array, RowLoss, Targets
from dpgrad.convex.solvers.solved import Solved, Statistic
from dpgrad.errors import OptionError
from dpgrad.mechanism import chacha, normal, schedules, secure
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.sampling import FullBatch, Poisson
from dpgrad.mechanism.schedules import Schedule

__all__ = [
    "below", "calibrated", "check_delta", "check_design", "check_momentum", "clipped_sum", "closed_form", "descend",
    "gaussian", "keyed", "noised", "others", "same_size", "solve", "with_distance",
]  # fmt: skip


def calibrated(
    rows: int,
    steps: int,
    *,
    clip: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    share: float = 1.0,
    secure_values: int = 0,
) -> Mechanism:
    """The full-batch mechanism of ``steps`` steps with the least noise that is (ε, δ)-private.

    ``rows`` divides the noisy sum: the number of rows, or under add/remove a number declared without counting them. To
    give the noise instead, build the `Mechanism` and declare ``batch_size``. ``share`` is what it may take of the
    budget, in μ², where other Gaussian releases take the rest. ``secure_values`` is the number of coefficients where
    noise is to come from the secure source (docs/secure_noise.md), else 0.

    Guarantee: by the exact profile of the composition, for neighbours under ``relation``. A δ of 1/n or more is
    refused: it would allow to publish a row.

    >>> run = calibrated(1000, 50, clip=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT)
    >>> round(run.noise_multiplier, 2)
    29.87
    """
    check_delta(delta, rows)
    below(delta, steps * secure_values)
    plain = Mechanism(FullBatch(), steps, 1.0, clip, relation=relation, batch_size=rows, secure_values=secure_values)
    return plain.calibrated(epsilon, delta, "exact", also_released=others(share, epsilon, delta, relation))


def others(share: float, epsilon: float, delta: float, relation: Relation) -> Event:
    """The event of other Gaussian releases that take all but ``share`` of the budget, in μ².

    >>> others(0.75, epsilon=1.0, delta=1e-5, relation=Relation.ZERO_OUT).noise_multiplier.__round__(3)
    7.461
    """
    if share == 1:
        return NOTHING
    _validate.open_unit(share=share)
    return Gaussian(Relation(relation).reach / (exact.mu_for(epsilon, delta) * math.sqrt(1 - share)))


def check_delta(delta: float, rows: int) -> None:
    """Refuse a δ at which a mechanism that publishes a random row as it is would count as private.

    >>> check_delta(0.01, rows=100)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: delta must be below 1/n = 0.01 for n = 100 rows, got 0.01: 1/n^2 is usual
    """
    _validate.open_unit(delta=delta)
    _validate.whole(least=1, rows=rows)
    if delta >= 1 / rows:
        raise OptionError(
            f"delta must be below 1/n = {1 / rows:g} for n = {rows:,} rows, got {delta!r}: 1/n^2 is usual"
        )


def check_design(design: Rows, radius: float, rows: int | None = None) -> None:
    """Refuse longer rows than noise was calibrated for, or another number of them where ``rows`` is given.

    >>> check_design(Design([[3.0]], radius=3.0), radius=1.0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: rows may be as long as 3, beyond the radius 1 that the noise was calibrated for: ...
    """
    if rows is not None and design.rows != rows:
        raise OptionError(f"the noise was calibrated for {rows:,} rows, got {design.rows:,}")
    if design.bound > radius * (1 + 1e-12):
        raise OptionError(
            f"rows may be as long as {design.bound:g}, beyond the radius {radius:g} that the noise was calibrated "
            "for: give design.bound as the radius"
        )


def same_size(relation: Relation, why: str) -> Relation:
    """The relation, refused where neighbours differ in their number of rows; ``why`` says what depends on it.

    >>> same_size(Relation.ADD_REMOVE, "batches reveal the number of rows")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: relation add-remove is refused: batches reveal the number of rows; use ...
    """
    if Relation(relation) is Relation.ADD_REMOVE:
        raise OptionError(f"relation add-remove is refused: {why}; use zero-out or replace-one")
    return Relation(relation)


def solve(
    design: Rows,
    targets: ArrayLike,
    loss: RowLoss,
    mechanism: Mechanism,
    *,
    learning_rate: float | Schedule,
    l2: float | Array = 0.0,
    momentum: float = 0.0,
    average: bool = False,
    key: AnyKey | None = None,
    each: Callable[[int, Array], None] | None = None,
) -> Solved:
    """The coefficients (features, outputs) after DP-GD, and the event of having found them.

    ``l2`` is the weight of ‖w‖²/2, which no row owns: its gradient is added after clipping and noise; an array of shape
    (features, 1) weighs each coefficient by itself. ``momentum`` and
    ``average`` (the mean of the iterates in place of the last, for losses without curvature) work on what has been
    released already and cost nothing. ``key`` is fresh unless given; one key serves one run on one dataset. ``each`` is
    called with the number of every step and the iterate after it, which is released.

    Guarantee: the event is that of ``mechanism``, whose clip bound and noise are the ones applied, for rows that differ
    under its relation. Gradients are clipped and summed in float64, and the clip bound is lowered by what rounding
    there may do to the sum of all (`Design.slack`); noise is taken to be Gaussian, as exact arithmetic would draw it,
    unless the mechanism has ``secure_values``.
    """
    if not isinstance(mechanism.sampler, FullBatch):
        raise OptionError(f"gd takes every row at every step, got {mechanism.sampler.name} sampling: use sgd")
    if not loss.smooth:
        raise OptionError(f"gd needs a smooth loss, got {loss!r}: use sgd, or HuberSvm in place of Hinge")
    return descend(
        design, targets, loss, mechanism,
        learning_rate=learning_rate, l2=l2, momentum=momentum, average=average, key=key, each=each,
    )  # fmt: skip


@quiet
def descend(
    design: Rows,
    targets: ArrayLike,
    loss: RowLoss,
    mechanism: Mechanism,
    *,
    learning_rate: float | Schedule,
    l2: float | Array,
    momentum: float,
    average: bool,
    key: AnyKey | None,
    each: Callable[[int, Array], None] | None = None,
) -> Solved:
    """The descent that full and sampled batches share; see `solve`."""
    for weight in np.ravel(l2).tolist():
        _validate.non_negative(l2=weight)
    check_momentum(momentum)
    if mechanism.adaptive_clip is not None:
        raise OptionError("the convex solvers keep their clip bound: give a mechanism without adaptive_clip")
    rates = schedules.values(learning_rate, mechanism.steps, name="learning_rate")
    coefficients = np.zeros((design.features, loss.outputs))
    secret = keyed(key, mechanism.secure_values, coefficients.size)
    divisor, checked = mechanism.divisor, chunked.checked(loss, targets, design.rows)
    if mechanism.relation is Relation.ADD_REMOVE:  # one row more moves others within blocks, and how they are rounded
        design = design.precise()
    velocity, mean = np.zeros_like(coefficients), np.zeros_like(coefficients)
    for step, rate in enumerate(rates):
        total = _batch_sum(design, checked, loss, coefficients, mechanism, step, secret)
        noisy = noised(secret, step, total, mechanism.clip_at(step), mechanism.std_at(step))
        with np.errstate(over="ignore", invalid="ignore"):
            velocity = momentum * velocity + noisy / divisor + l2 * coefficients
            coefficients = coefficients - rate * velocity
        if not np.isfinite(coefficients).all():
            raise OptionError(f"learning_rate {rate:g} makes the coefficients grow without bound: lower it, or l2")
        mean += (coefficients - mean) / (step + 1)
        if each is not None:
            each(step, coefficients)
    release = Statistic(
        "gradients", mechanism.relation.reach * mechanism.clip_at(0), mechanism.std_at(0), 1.0, mechanism.steps,
        _sampling_rate(mechanism),
    )  # fmt: skip
    found, title = mean if average else coefficients, f"gradient descent, {mechanism.sampler.name} sampling"
    return Solved(found, mechanism.event(), mechanism.relation, title, secret.reproducible, (release,))


def _sampling_rate(mechanism: Mechanism) -> float:
    """That of the first step."""
    sampler = mechanism.sampler
    return sampler.sampling_rate_at(0) if isinstance(sampler, Poisson) else 1.0


def check_momentum(momentum: float) -> None:
    """Refuse a momentum outside [0, 1).

    >>> check_momentum(1.0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: momentum must be below 1, got 1.0
    """
    _validate.non_negative(momentum=momentum)
    if momentum >= 1:
        raise OptionError(f"momentum must be below 1, got {momentum!r}")


def _batch_sum(
    design: Rows, targets: Targets, loss: RowLoss, coefficients: Array, mechanism: Mechanism, step: int, key: Key
) -> Array:
    full = isinstance(mechanism.sampler, FullBatch)  # drawing would copy every row
    drawn = None if full else mechanism.sampler.draw(design.rows, step, key)
    return clipped_sum(design, targets, loss, coefficients, mechanism.clip_at(step), drawn)


def clipped_sum(
    design: Rows,
    targets: Targets,
    loss: RowLoss,
    coefficients: Array,
    clip: float,
    drawn: "np.typing.NDArray[np.int64] | None" = None,
) -> Array:
    """The sum of the gradients of all rows, each clipped to norm ``clip``: (features, outputs), before any noise.

    With ``drawn``, the sum over these rows alone.

    Guarantee: setting a row to zero moves it by at most ``clip``, exchanging one by at most twice that, as it is
    computed: clipped and summed in float64, whatever the precision of the rows. Taking a row out altogether moves
    others to other places of a block, where their float32 scores may round differently: that bound is for
    ``design.precise()``. A row whose gradient is not finite counts as absent.

    >>> from dpgrad.convex.losses import Squared
    >>> design = Design(np.array([[1.0], [3.0]]), radius=3.0)
    >>> total = clipped_sum(design, np.array([-1.0, -1.0]), Squared(9.0), np.zeros((1, 1)), clip=2.0)
    >>> total.round(5).tolist()
    [[3.0]]
    """
    part = partial(_clipped, loss=loss, coefficients=coefficients, most=clip * (1 - design.slack))
    return design.added(part, targets, drawn)


def _clipped(design: Design, targets: Targets, *, loss: RowLoss, coefficients: Array, most: float) -> Array:
    """The sum over some rows of gradients clipped to ``most``."""

    def clipped(rows: slice, scores: Array) -> Array:
        residuals = loss.residuals(scores, targets[rows])
        norms = np.sqrt(np.einsum("ij,ij->i", residuals, residuals)) * design.norms[rows]
        residuals *= np.divide(most, norms, out=np.ones_like(norms), where=norms > most)[:, None]
        residuals[~np.isfinite(norms)] = 0
        return residuals

    with np.errstate(over="ignore", invalid="ignore"):  # a score beyond float32: the row is dropped above
        return design.summed(coefficients, clipped)


def gaussian(key: Key, step: int, shape: tuple[int, ...], std: float) -> Array:
    """Noise of standard deviation ``std``, a function of the key and the step; see `dpgrad.mechanism.normal`.

    Guarantee: the stream is keyed apart from the one that draws batches.

    >>> noise = gaussian(Key.from_seed(7), step=3, shape=(2, 1), std=1.0)
    >>> bool((noise == gaussian(Key.from_seed(7), step=3, shape=(2, 1), std=1.0)).all())
    True
    """
    return normal.gaussian(key, shape, std, "convex noise", str(step))


def noised(key: Key, step: int, total: Array, sensitivity: float, std: float) -> Array:
    """The total with noise of standard deviation ``std`` on each value, of the source that ``key`` is for.

    With a secured key the total is rounded to a grid, whole numbers are added, and ``sensitivity`` says how far one row
    moves the total: noise grows by what rounding adds to that.

    Guarantee: the noise multiplier is at least std/sensitivity, rounding included (docs/proofs/secure_noise.md).

    >>> key, total = Key.from_seed(7).secured(), np.array([[1.0], [2.0]])
    >>> bool(np.abs(noised(key, 0, total, sensitivity=1.0, std=1e-3) - total).max() < 0.01)
    True
    """
    if not key.secure:
        return total + gaussian(key, step, total.shape, std)
    unit, found = secure.grid(std, sensitivity, total.size), np.empty(total.size)
    secure.fill(key, [secure.Wanted(found, ("convex noise", str(step)), total=total.reshape(-1), unit=unit)])
    if np.abs(found).max() >= unit * (secure.LIMIT - 64 * secure.SCALE):  # read from what is released
        raise OptionError(
            f"noise secure holds sums of up to {secure.LIMIT / secure.SCALE:.2g} standard deviations of the noise, and "
            "this one is beyond: use fewer rows, a smaller epsilon or the ordinary noise; what was charged is spent"
        )
    return found.reshape(total.shape)


def keyed(key: AnyKey | None, secure_values: int, values: int) -> Key:
    """The key, fresh unless given, for the source that ``secure_values`` accounts for, of ``values`` that are noised.

    >>> keyed(7, secure_values=2, values=3)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: secure_values must be at least 3, the number of values that get noise, got 2: each ...
    """
    if secure_values:
        chacha.refuse_missing()
        if values > secure_values:
            raise OptionError(
                f"secure_values must be at least {values:,}, the number of values that get noise, got "
                f"{secure_values:,}: each adds to delta"
            )
    return dataclasses.replace(Key.fresh() if key is None else Key.of(key), secure=secure_values > 0)


def with_distance(event: Gaussian | Pinned, secure_values: int) -> Gaussian | Pinned | Inexact:
    """The event of one release with the distance of that many values of secure noise.

    >>> with_distance(Gaussian(4.0), secure_values=0), with_distance(Gaussian(4.0), secure_values=10).distance < 1e-22
    (Gaussian(noise_multiplier=4.0), True)
    """
    return Inexact(event, secure.inexact(secure_values)) if secure_values else event


def below(delta: float, secure_values: int) -> float:
    """What is left of δ for exact noise, once so many values of secure noise have taken theirs.

    >>> below(1e-6, secure_values=0) == 1e-6, below(1e-20, secure_values=10**4)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: delta must be above 3.31e-20 for 10,000 values of secure noise, got 1e-20: give a ...
    """
    if not secure_values:
        return delta
    distance = secure.inexact(secure_values)
    if delta <= distance:
        raise OptionError(
            f"delta must be above {distance:.3g} for {secure_values:,} values of secure noise, got {delta!r}: give a "
            "larger delta, or use the ordinary noise"
        )
    return math.nextafter((delta - distance) * (1 - 2.0**-50), 0.0)


def closed_form(steps: int, epsilon: float, delta: float, relation: Relation = Relation.REPLACE_ONE) -> float:
    """The noise multiplier of the paper's Algorithm 1, 2√2·√(T·log(1/δ))/ε under replace-one, half of it otherwise.

    That is σ·n/L for its σ = 2√2·L·√(T·log(1/δ))/(n·ε), and amounts to μ = ε/√(2·log(1/δ)). It is here to compare: it
    asks for 17 to 28 % more noise than `calibrated` at ε from 1 to 0.1 and δ = 36,176⁻², and beyond ε = 9.2 it is not
    private there.

    Guarantee: refused where the exact profile says that it is not (ε, δ)-private.

    >>> round(closed_form(50, epsilon=0.1, delta=36176**-2.0) / 1e3, 4)
    0.9163
    """
    _check_budget(steps, epsilon, delta)
    multiplier = Relation(relation).reach * math.sqrt(2 * steps * math.log(1 / delta)) / epsilon
    profile = exact.account(Repeat(Gaussian(multiplier), steps), relation)
    if profile.delta(epsilon) > delta:
        raise OptionError(
            f"epsilon {epsilon!r} is too large for the closed form at delta {delta:g}: it would give "
            f"{profile.epsilon(delta):.6g}; use calibrated, which is exact"
        )
    return multiplier


def _check_budget(steps: int, epsilon: float, delta: float) -> None:
    _validate.step_count(steps=steps)
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)
