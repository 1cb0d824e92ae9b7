"""One-run auditing: many canaries in one run, each in or out by a coin (Steinke, Nasr and Jagielski 2023).

It needs one run where the game needs thousands, and finds only gross faults. It gives a lower bound on ε, no verdict.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from dpgrad import _validate
from dpgrad.audit import exact
from dpgrad.audit.record import Audit, Check
from dpgrad.errors import OptionError

__all__ = ["one_run", "p_value"]


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P[at least ``right`` of ``guesses`` right] under (ε, δ)-privacy (their Theorem 5.2), an upper bound.

    β = P[Bin(r, e^ε/(e^ε+1)) ≥ v] and p = β + 2mδ·max_{1≤i≤v} (P[Bin ≥ v − i] − β)/i.

    >>> f"{p_value(10, 10, 10, 0.0, 0.0):.6f}"
    '0.000977'
    """
    rate = float(special.expit(epsilon))
    tail = exact.above(right, guesses, rate)
    if delta == 0 or right == 0:
        return tail
    back = np.arange(1, right + 1)
    gains = (np.array([exact.above(right - int(i), guesses, rate) for i in back]) - tail) / back
    return float(min(1.0, tail + 2 * canaries * delta * max(0.0, float(gains.max()))))


def one_run(
    scores: Sequence[float],
    included: Sequence[bool],
    *,
    delta: float = 1e-5,
    guesses: int | None = None,
    level: float = 0.05,
    seed: int = 0,
) -> Audit:
    """A lower bound on ε from one run: the score of each canary, and whether a fair coin put it into the data.

    The ``guesses``/2 canaries of the highest score are guessed to be in and as many of the lowest to be out; by
    default half of all are guessed. The number is to be fixed before the run. Weak: a bound far below ε says nothing,
    and the record gives no verdict.

    >>> random = np.random.default_rng(0)
    >>> coins = random.random(1000) < 0.5
    >>> found = one_run(random.normal(size=1000) + 6 * coins, coins)
    >>> found.refuted, found.lower_epsilon > 2
    (False, True)
    """
    values, coins = np.asarray(scores, float).ravel(), np.asarray(included).ravel().astype(bool)
    if len(values) != len(coins) or len(values) < 10 or np.isnan(values).any():
        raise OptionError(f"scores and included must be as long as each other, 10 at least, got {len(values)}")
    _validate.open_unit(delta=delta, level=level)
    count = len(values) // 2 if guesses is None else guesses
    _validate.whole(least=2, most=len(values), guesses=count)
    order, half = np.argsort(values, kind="stable"), count // 2
    right = int(coins[order[-half:]].sum()) + int((~coins[order[:half]]).sum())
    low, high = 0.0, 60.0
    if p_value(len(values), 2 * half, right, low, delta) > level:
        high = low
    for _ in range(40 if high else 0):
        middle = (low + high) / 2
        refuted = p_value(len(values), 2 * half, right, middle, delta) <= level
        low, high = (middle, high) if refuted else (low, middle)
    says = f"{right} of {2 * half} guesses about {len(values)} canaries were right"
    check = Check("one run", p_value(len(values), 2 * half, right, 0.0, delta), says)  # of ε = 0, which nobody claims
    return Audit(
        "one run", "any ε", level, (check,), ("everything that one run cannot show",), delta=delta, lower_epsilon=low,
        seed=seed, trials=1, verdict=False,
    )  # fmt: skip
