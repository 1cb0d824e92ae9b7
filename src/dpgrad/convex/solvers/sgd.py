"""DP-SGD: gradient descent on Poisson samples of the rows (Yu et al. 2020, Algorithm 2 as their experiments run it).

    w ← w − ηₜ·(v + l2·w),   v = (Σ_{i sampled} clip(∇lossᵢ(w)) + N(0, std²))/(q·n),

where every row is sampled at every step with probability q. The sum is divided by the *expected* size of a batch: the
realised one is private. The algorithm as printed draws one row a step; this is the version that is worth running.

>>> import numpy as np
>>> from dpgrad.convex.design import Design
>>> from dpgrad.convex.losses import Hinge
>>> design = Design(np.array([[1.0], [-1.0]] * 500), radius=1.0)
>>> targets = np.array([1.0, -1.0] * 500)
>>> mechanism = calibrated(1000, 40, sampling_rate=0.1, clip=1.0, epsilon=1.0, delta=1e-6, relation=Relation.ZERO_OUT)
>>> coefficients, event = solve(design, targets, Hinge(), mechanism, learning_rate=halved(0.5, 40), key=7)
>>> bool(coefficients[0, 0] > 0.5), event == mechanism.event()
(True, True)
"""

from collections.abc import Callable

from numpy.typing import ArrayLike

from dpgrad import _validate
from dpgrad.accounting.events import Relation
from dpgrad.convex.design import Rows
from dpgrad.convex.losses import Array, RowLoss
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.solved import Solved
from dpgrad.errors import OptionError
from dpgrad.mechanism import schedules
from dpgrad.mechanism.keys import AnyKey
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.sampling import Poisson
from dpgrad.mechanism.schedules import Schedule

__all__ = ["calibrated", "halved", "harmonic", "root", "solve"]


def calibrated(
    rows: int,
    steps: int,
    *,
    sampling_rate: float,
    clip: float,
    epsilon: float,
    delta: float,
    relation: Relation,
    accountant: str = "pld",
    share: float = 1.0,
    secure_values: int = 0,
) -> Mechanism:
    """The Poisson-sampled mechanism of ``steps`` steps with the least noise that ``accountant`` finds (ε, δ)-private.

    ``rows`` gives the expected size of a batch, q·n: the number of rows, or under add/remove a number declared without
    counting them. To give the noise instead, build the `Mechanism` and declare ``batch_size``. ``share``
    and ``secure_values`` as for `gd.calibrated`.

    Guarantee: for neighbours under ``relation``; under replace-one a row that changes moves the sum by two clip bounds
    whenever it is sampled, and is priced so. A δ of 1/n or more is refused.

    >>> run = calibrated(1000, 9, sampling_rate=0.1, clip=1.0, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE)
    >>> run.divisor
    100.0
    """
    gd.check_delta(delta, rows)
    gd.below(delta, steps * secure_values)
    _validate.positive(sampling_rate=sampling_rate)
    size = sampling_rate * rows
    plain = Mechanism(
        Poisson(sampling_rate), steps, 1.0, clip, relation=relation, batch_size=size, secure_values=secure_values
    )
    return plain.calibrated(epsilon, delta, accountant, also_released=gd.others(share, epsilon, delta, relation))


def solve(
    design: Rows,
    targets: ArrayLike,
    loss: RowLoss,
    mechanism: Mechanism,
    *,
    learning_rate: float | Schedule,
    l2: float = 0.0,
    momentum: float = 0.0,
    average: bool = False,
    key: AnyKey | None = None,
    each: Callable[[int, Array], None] | None = None,
) -> Solved:
    """The coefficients (features, outputs) after DP-SGD, and the event of having found them; see `gd.solve`.

    A loss with corners is descended by its subgradient. An empty batch is a step like any other: noise is added.

    Guarantee: as for `gd.solve`. Who was sampled is a function of the secret key, and is not kept.
    """
    if not isinstance(mechanism.sampler, Poisson):
        raise OptionError(f"sgd samples rows by Poisson sampling, got {mechanism.sampler.name} sampling")
    return gd.descend(
        design, targets, loss, mechanism,
        learning_rate=learning_rate, l2=l2, momentum=momentum, average=average, key=key, each=each,
    )  # fmt: skip


def halved(learning_rate: float, steps: int) -> schedules.Formula:
    """``learning_rate`` for the first half of ``steps``, half of it for the rest: the paper's experiments.

    >>> [halved(0.2, steps=4)(t) for t in range(4)]
    [0.2, 0.2, 0.1, 0.1]
    """
    _validate.positive(learning_rate=learning_rate)
    _validate.step_count(steps=steps)
    return schedules.piecewise([-(-steps // 2)], [learning_rate, learning_rate / 2])


def harmonic(curvature: float) -> Schedule:
    """1/(ν·t) for t = 1, 2, …: Theorem 2 where the expected curvature ν is positive.

    ν must be public: a curvature measured on the data is a release of its own.

    >>> [harmonic(0.5)(t) for t in range(3)]
    [2.0, 1.0, 0.6666666666666666]
    """
    _validate.positive(curvature=curvature)
    return lambda step: 1 / (curvature * (step + 1))


def root(distance: float, gradient: float) -> Schedule:
    """D/(G·√t) for t = 1, 2, …: Theorem 2 where nothing is known of the curvature.

    D bounds the distance from the start to the minimiser, G = L·√(1 + p·σ²) the size of a noisy gradient.

    >>> [root(distance=2.0, gradient=4.0)(t) for t in (0, 3)]
    [0.5, 0.25]
    """
    _validate.positive(distance=distance, gradient=gradient)
    return lambda step: distance / (gradient * (step + 1) ** 0.5)
