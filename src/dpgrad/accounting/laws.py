"""Rules of thumb of the literature as functions: how noise scales, what sampling saves, what momentum adds.

A scaling law says how noise grows, up to a constant it does not know; it prices nothing. Calibrate with an accountant.
"""

import math

from dpgrad import _validate
from dpgrad.accounting import historical
from dpgrad.errors import OptionError

__all__ = ["amplification", "classical_gaussian", "moments_scale", "momentum_noise", "strong_scale"]


def moments_scale(sampling_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """q·√(T·log(1/δ))/ε: the noise multiplier under the moments accountant, up to a constant.

    Abadi et al. (2016), Thm. 1, for ε below a constant times q²T.

    >>> round(moments_scale(0.01, 10_000, 1.0, 1e-5), 4)
    3.3931
    """
    _scaling(sampling_rate, steps, epsilon, delta)
    return sampling_rate * math.sqrt(-steps * math.log(delta)) / epsilon


def strong_scale(sampling_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """q·√(T·log(1/δ)·log(T/δ))/ε: the noise multiplier under strong composition, up to a constant.

    Abadi et al. (2016), after Thm. 1: a factor √log(T/δ) more than `moments_scale`.

    >>> round(strong_scale(0.01, 10_000, 1.0, 1e-5), 4)
    15.4462
    """
    return moments_scale(sampling_rate, steps, epsilon, delta) * math.sqrt(math.log(steps / delta))


def _scaling(sampling_rate: float, steps: int, epsilon: float, delta: float) -> None:
    _validate.unit_interval(sampling_rate=sampling_rate)
    _validate.whole(least=1, steps=steps)
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)


def classical_gaussian(epsilon: float, delta: float) -> float:
    """√(2·log(1.25/δ))/ε: the classical noise multiplier of one Gaussian release, for ε below 1 only.

    Dwork and Roth (2014), Thm. A.1. At ε ≥ 1 it can be too little noise, and it is refused; below, it is more than the
    exact multiplier 1/μ.

    >>> round(classical_gaussian(0.5, 1e-5), 4)
    9.6896
    >>> classical_gaussian(1.0, 1e-5)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: the classical Gaussian noise holds for epsilon below 1, got 1.0: use 1 / ...
    """
    _validate.positive(epsilon=epsilon)
    _validate.open_unit(delta=delta)
    if epsilon >= 1:
        raise OptionError(
            f"the classical Gaussian noise holds for epsilon below 1, got {epsilon!r}: "
            "use 1 / exact.mu_for(epsilon, delta)"
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def amplification(epsilon: float, delta: float, sampling_rate: float) -> tuple[float, float]:
    """(log(1 + q(e^ε − 1)), qδ): what an (ε, δ)-private mechanism is when it sees a sample at rate q.

    Poisson sampling under add/remove (Li, Qardaji and Su 2012), sampling without replacement under replace-one (Balle,
    Barthe and Gaboardi 2018). The papers' (qε, qδ) is less than this and does not hold.

    >>> [round(x, 9) for x in amplification(1.0, 1e-5, 0.01)]
    [0.017036863, 1e-07]
    """
    _validate.non_negative(epsilon=epsilon)
    _validate.unit_interval(delta=delta, sampling_rate=sampling_rate)
    return historical.amplified(epsilon, sampling_rate), sampling_rate * delta


def momentum_noise(momentum: float, steps: int | None = None) -> float:
    """(1 − c^{2t})/(1 − c²): the noise variance in m_t = c·m_{t−1} + g_t after t steps, in units of one step's.

    Yu et al. (2018). Without ``steps``, the limit 1/(1 − c²). Momentum is post-processing and costs no privacy; this is
    what it costs in noise.

    >>> round(momentum_noise(0.9), 2), momentum_noise(0.5, 2)
    (5.26, 1.25)
    """
    if not 0 <= momentum < 1:
        raise OptionError(f"momentum must lie in [0, 1), got {momentum!r}: at 1 the noise grows without bound")
    if steps is None:
        return 1 / (1 - momentum**2)
    _validate.whole(least=1, steps=steps)
    return -math.expm1(2 * steps * math.log(momentum)) / (1 - momentum**2) if momentum else 1.0
