"""Root searches on a monotone function of one number, for every accountant.

One search differs, and stays with what it searches: `pld.contour` moves a whole saddle point along with the tilt.
"""

import math
from collections.abc import Callable


def halved(
    beyond: Callable[[float], bool], low: float, high: float, *, relative: float = 0.0, absolute: float = 0.0
) -> tuple[float, float]:
    """The bracket around the place where ``beyond`` turns from true to false, halved until it is narrow.

    Narrow means at most ``relative``·high + ``absolute`` wide, or two neighbouring floats.

    Guarantee: ``beyond`` was true at the lower end and false at the upper one, or the end is the one given.

    >>> low, high = halved(lambda x: x * x < 2, 0.0, 2.0, relative=1e-9)
    >>> low < 2**0.5 <= high, high - low < 3e-9
    (True, True)
    """
    while high - low > relative * high + absolute:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if beyond(middle) else (low, middle)
    return low, high


def doubled(beyond: Callable[[float], bool], low: float, high: float, most: float = math.inf) -> tuple[float, float]:
    """A bracket whose upper end is ``high``, doubled until ``beyond`` is false there; ∞ where it would exceed ``most``.

    >>> doubled(lambda x: x < 5, 0.0, 1.0), doubled(lambda x: True, 0.0, 1.0, most=100.0)
    ((4.0, 8.0), (64.0, inf))
    """
    while beyond(high):
        low, high = high, 2 * high
        if high > most:
            return low, math.inf
    return low, high


def root(
    f: Callable[[float], float], low: tuple[float, float], high: tuple[float, float], tolerance: float
) -> tuple[float, float]:
    """An x with −tolerance ≤ f(x) ≤ 0, and the slope there, for an f that falls; Chandrupatla's method.

    ``low`` and ``high`` are (x, f(x)) on either side. It takes few evaluations, so it serves where one is costly. Where
    f jumps over that strip, the right side of the jump, to twelve digits.

    >>> x, slope = root(lambda x: 2 - x * x, (0.0, 2.0), (2.0, -2.0), tolerance=1e-9)
    >>> round(x, 6), round(slope, 2)
    (1.414214, -2.83)
    """
    (b, fb), (a, fa) = low, high
    middle = tolerance / 2  # aim at the middle of the strip
    fa, fb = fa + middle, fb + middle
    c, fc = b, fb
    good, slope = a, (fb - fa) / (b - a)
    t = fa / (fa - fb)
    for _ in range(100):
        if (-middle <= fa <= middle and good == a) or abs(a - b) < 1e-12:
            break
        x = a + min(max(t, 1e-3), 1 - 1e-3) * (b - a)
        value = f(x)
        fx = value + middle
        slope = (fx - fa) / (x - a)
        if (fx > 0) == (fa > 0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        if value <= 0:  # of the value itself: the sum with the middle is rounded
            good = x
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        if phi**2 < xi and (1 - phi) ** 2 < 1 - xi:  # the parabola through the three is monotone: follow it
            t = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        else:
            t = 0.5
    return good, slope


def newton(excess: Callable[[float], tuple[float, float]], most: float) -> float:
    """The c in (0, most] at which a growing function, given with its derivative, is zero; Newton in log c.

    >>> round(newton(lambda c: (c * c - 2, 2 * c), most=10.0), 6)
    1.414214
    """
    low, high, c = 0.0, math.inf, min(4.0, most)
    for _ in range(100):
        value, slope = excess(c)
        low, high = (low, c) if value > 0 else (c, high)
        if low >= most or high < 1e-12:
            break
        move = -value / (slope * c) if slope * c > 0 else math.copysign(math.inf, -value)
        following = c * math.exp(min(max(move, -2.0), 2.0))
        if not low < following < high:
            following = math.sqrt(low * high) if low > 0 else high / 8
        following = min(following, most)
        if abs(following - c) <= 1e-8 * c:
            break
        c = following
    return c
