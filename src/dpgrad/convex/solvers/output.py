"""Output perturbation: descend without noise, then add noise once to the result (Wu et al. 2017; Zhang et al. 2017).

The rows are put into a random order, cut into batches of b, and descended ``passes`` times in that order:

    w ← w − ηₜ·(Σ_{i in batch} ∇lossᵢ(w)/b + l2·w).

Every batch is divided by b, the last and shorter one too: dividing by its own size would let its rows pull harder.

**Sensitivity** (argument stability). A step on one batch is a Lipschitz map with constant ρₜ = max(|1 − ηₜ·l2|,
|1 − ηₜ(β + l2)|), at most 1 for ηₜ ≤ 2/(β + l2). Where neighbours differ in a row of the batch, their gradients at one
point differ by m·L/b, the l2 term being the same for both; m is 2 under replace-one and 1 under zero-out. So for every
order of the rows the results differ by at most

    (m·L/b)·max_j Σ_{t in j, j+N, j+2N, …} ηₜ·Π_{s>t} ρₛ,       N batches a pass.

* convex, constant η: m·k·L·η/b for k passes;
* l2 = γ > 0 with ηₜ = min(1/(β + γ), 1/γt): m·L/(γ·b·N), whatever k (each summand is at most 1/γT, T = kN);
* b = n, full gradients: m·L·η·T/n for T steps, and with l2 = γ and constant η ≤ 1/(β + γ)
  m·L/(γn)·(1 − (1 − ηγ)^T).

Wu et al. bound the gradients of the regularised loss and need a ball for that; the loss alone is enough, and no ball.
The noise is that of the exact Gaussian mechanism, not √(2·log(2/δ))/ε, which holds for ε < 1 only.

>>> import numpy as np
>>> from dpgrad.convex.losses import Logistic
>>> design = Design(np.array([[1.0], [-1.0]] * 500), radius=1.0)
>>> plan = calibrated(1000, Logistic(), radius=1.0, passes=5, batch_size=50, learning_rate=0.2, epsilon=1.0,
...     delta=1e-6, relation=Relation.REPLACE_ONE)
>>> coefficients, event = solve(design, np.array([1.0, -1.0] * 500), Logistic(), plan, key=7)
>>> round(plan.sensitivity, 6), bool(coefficients[0, 0] > 0)
(0.04, True)
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import Event, Gaussian, Relation
from dpgrad.convex import chunked
from dpgrad.convex.design import Design, Rows, quiet
from dpgrad.convex.losses import Array, RowLoss, Targets
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.solved import Solved, Statistic
from dpgrad.errors import OptionError
from dpgrad.mechanism import schedules
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.mechanism.schedules import Schedule

__all__ = ["Descent", "calibrated", "descend", "order", "solve", "stability"]


@dataclass(frozen=True)
class Descent:
    """A descent in public numbers: what it does, how far one row moves its result, and the noise on that."""

    loss: RowLoss
    radius: float
    rows: int
    relation: Relation
    passes: int
    batch_size: int
    learning_rates: tuple[float, ...]
    l2: float
    sensitivity: float
    std: float
    secure_values: int = 0

    @property
    def event(self) -> Event:
        """One Gaussian release."""
        return gd.with_distance(Gaussian(self.relation.reach * self.std / self.sensitivity), self.secure_values)


def calibrated(
    rows: int,
    loss: RowLoss,
    *,
    radius: float,
    passes: int,
    batch_size: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    learning_rate: float | Schedule | None = None,
    l2: float = 0.0,
    models: int = 1,
    share: float = 1.0,
    secure_values: int = 0,
) -> Descent:
    """The descent with the least noise on its result that is (ε, δ)-private.

    ``radius`` is ``design.bound``. Without ``learning_rate`` it is min(1/(β + l2), 1/(l2·t)), for which l2 must be
    positive. ``batch_size=rows`` takes full gradients. ``models`` such fits on the same rows get μ²/models each, so
    that together they are exactly as private as one; ``share`` and ``secure_values`` as for `gd.calibrated`.

    Guarantee: by the sensitivity of this module and the exact profile of the Gaussian mechanism. Add/remove is refused:
    the batches reveal the number of rows. The authors' grids are learning rates .001, .01, .1 and passes 5, 10, 100 at
    batches of 50; l2 of 1e-4 and 1e-3 at 200 passes.

    >>> from dpgrad.convex.losses import Logistic
    >>> plan = calibrated(1000, Logistic(), radius=1.0, passes=20, batch_size=50, l2=0.01, epsilon=1.0, delta=1e-6,
    ...     relation=Relation.REPLACE_ONE)
    >>> round(plan.sensitivity, 4)  # at most 2·L/(l2·n) = 0.2
    0.1979
    """
    relation = gd.same_size(relation, "batches reveal the number of rows")
    _validate.whole(least=1, rows=rows, passes=passes, batch_size=batch_size, models=models)
    _validate.whole(most=rows, batch_size=batch_size)
    _validate.positive(epsilon=epsilon)
    _validate.non_negative(l2=l2)
    gd.check_delta(delta, rows)
    if not loss.smooth:
        raise OptionError(f"output needs a smooth loss, got {loss!r}: use sgd, or HuberSvm in place of Hinge")
    batches = -(-rows // batch_size)
    smoothness = loss.smoothness(radius) + l2
    rates = _rates(learning_rate, passes * batches, l2, smoothness)
    sensitivity = relation.reach * loss.lipschitz(radius) / batch_size * stability(rates, batches, l2, smoothness)
    mu = exact.mu_for(epsilon, gd.below(delta, models * secure_values)) * (1 - 1e-9)
    std = sensitivity * math.sqrt(models / share) / mu
    return Descent(loss, radius, rows, relation, passes, batch_size, rates, l2, sensitivity, std, secure_values)


def stability(learning_rates: tuple[float, ...], batches: int, l2: float, smoothness: float) -> float:
    """max_j Σ_{t in j, j+N, …} ηₜ·Π_{s>t} ρₛ: how far a unit more of one row's gradient in each pass moves the end.

    >>> stability((0.1,) * 12, batches=4, l2=0.0, smoothness=1.0)  # three passes
    0.30000000000000004
    """
    eta = np.array(learning_rates)
    shrink = np.maximum(np.abs(1 - eta * l2), np.abs(1 - eta * smoothness))
    if float(shrink.max()) > 1 + 1e-12:
        raise OptionError(
            f"learning_rate must be at most 2/(smoothness + l2) = {2 / smoothness:.6g}, got {max(learning_rates):.6g}: "
            "beyond it a step may drive neighbours apart"
        )
    # Π_{s>t}, from the end
    left = np.append(np.cumprod(np.minimum(shrink, 1.0)[:0:-1])[::-1], 1.0)
    return float((eta * left).reshape(-1, batches).sum(axis=0).max())


@quiet
def solve(design: Rows, targets: ArrayLike, loss: RowLoss, plan: Descent, *, key: AnyKey | None = None) -> Solved:
    """The coefficients (features, outputs) after the descent and its noise, and the event of having found them.

    ``key`` is fresh unless given; one key serves one run on one dataset.

    Guarantee: the event is that of ``plan``; another loss, another number of rows or longer rows are refused. The
    descent runs in float64 whatever the precision of the rows, one row's contribution being allowed a millionth for
    rounding.
    """
    if loss != plan.loss:
        raise OptionError(f"loss must be the one the noise was calibrated for, {plan.loss!r}, got {loss!r}")
    gd.check_design(design, plan.radius, plan.rows)
    secret = gd.keyed(key, plan.secure_values, design.features * loss.outputs)
    found = descend(design, targets, loss, plan, order(secret, plan.rows))
    noisy = gd.noised(secret, 0, found, plan.sensitivity, plan.std)
    release = Statistic("coefficients", plan.sensitivity, plan.std, share=1.0)
    return Solved(noisy, plan.event, plan.relation, "output perturbation", secret.reproducible, (release,))


def order(key: Key, rows: int) -> NDArray[np.int64]:
    """The rows in random order, a function of the key; privacy does not depend on the order.

    >>> sorted(order(Key.from_seed(7), 4).tolist())
    [0, 1, 2, 3]
    """
    words = np.frombuffer(key.derive("convex order", size=16), "<u8")
    return np.random.Generator(np.random.Philox(key=words)).permutation(rows)


def descend(design: Rows, targets: ArrayLike, loss: RowLoss, plan: Descent, rows: NDArray[np.int64]) -> Array:
    """The coefficients after the descent over ``rows`` in that order, before any noise.

    Guarantee: one row moves them by at most ``plan.sensitivity``, for every order.
    """
    checked = chunked.checked(loss, targets, design.rows)
    design = design.precise()  # rounding in float32 would drive neighbours apart at every step
    found = np.zeros((design.features, loss.outputs))
    starts = range(0, len(rows), plan.batch_size)
    for step, rate in enumerate(plan.learning_rates):
        start = starts[step % len(starts)]
        chosen = rows[start : start + plan.batch_size]
        # drawing all rows would copy every one
        total = design.added(partial(_pull, loss=loss, found=found), checked, None if len(starts) == 1 else chosen)
        found = found - rate * (total * ((1 - design.slack) / plan.batch_size) + plan.l2 * found)
    return found


def _pull(design: Design, targets: Targets, *, loss: RowLoss, found: Array) -> Array:
    """The sum of the gradients of some rows."""
    return design.summed(found, lambda place, scores: loss.residuals(scores, targets[place]))


def _rates(learning_rate: float | Schedule | None, steps: int, l2: float, smoothness: float) -> tuple[float, ...]:
    if learning_rate is not None:
        return tuple(float(rate) for rate in schedules.values(learning_rate, steps, name="learning_rate"))
    if l2 <= 0:
        raise OptionError("learning_rate is required where l2 is 0: at most 2/smoothness of the loss")
    return tuple(np.minimum(1 / smoothness, 1 / (l2 * np.arange(1, steps + 1))).tolist())
