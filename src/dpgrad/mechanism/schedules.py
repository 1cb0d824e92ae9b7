"""Schedules of clip bounds, noise and learning rates: functions of the step, fixed before training starts.

A schedule is a function of the step, counted from 0. A number is accepted wherever a schedule is. The functions here
return `Formula` values, which can be compared, hashed, pickled, printed and written as JSON.

>>> clip = geometric(start=8.0, ratio=0.999, floor=4.0)
>>> clip
geometric(start=8.0, ratio=0.999, floor=4.0)
>>> clip(0), clip(10_000)
(8.0, 4.0)

A schedule is public: it must not depend on the data or on anything computed from the data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from dpgrad import _validate
from dpgrad.errors import OptionError

__all__ = [
    "Array", "Formula", "Schedule", "affine", "arithmetic", "as_schedule", "constant", "cosine", "decay_then_hold",
    "from_dict", "from_plain", "geometric", "is_constant", "linear", "parse_clip", "piecewise", "to_plain",
    "values", "warmup",
]  # fmt: skip

Array = NDArray[np.float64]
Schedule: TypeAlias = Callable[[int], float]
_Parameter = float | int | tuple[float, ...] | tuple[int, ...] | Schedule


@dataclass(frozen=True, repr=False)
class Formula:
    """A schedule given by a module-level function of the step and its parameters.

    Call it with a step to get a float, or with an array of steps to get an array. Both use the same arithmetic, so a
    plan and its run agree to the last bit.

    >>> linear(start=12.0, steps=100)(np.array([0, 50, 100, 1000])).tolist()
    [12.0, 8.0, 6.0, 6.0]
    >>> from_dict(linear(12.0, 100).to_dict()) == linear(12.0, 100)
    True
    """

    function: Callable[..., Array]
    parameters: tuple[tuple[str, _Parameter], ...]

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: NDArray[Any]) -> Array: ...
    def __call__(self, step: int | NDArray[Any]) -> float | Array:
        if isinstance(step, np.ndarray):
            if step.size and not step.min() >= 0:
                raise OptionError(f"step must be a whole number of at least 0, got {step.min()!r}")
            return self.function(step.astype(np.float64), **dict(self.parameters))
        _validate.whole(step=step)
        return float(self.function(np.array([step], np.float64), **dict(self.parameters))[0])

    @property
    def name(self) -> str:
        """The name of the public function that made it."""
        return self.function.__name__.removeprefix("_")

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.parameters)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the formula as plain values, for JSON; refuse a plain function inside it."""
        return {"schedule": self.name, **{name: _plain(value, name) for name, value in self.parameters}}


def _plain(value: _Parameter, name: str) -> object:
    if isinstance(value, Formula):
        return value.to_dict()
    if callable(value):
        raise OptionError(
            f"{name} is a plain function and cannot be written as JSON: use a formula of dpgrad.schedules"
        )
    return list(value) if isinstance(value, tuple) else value


def from_dict(data: object) -> Formula:
    """Return the formula that `Formula.to_dict` wrote; refuse anything else.

    >>> from_dict({"schedule": "constant", "value": 2.0})
    constant(value=2.0)
    """
    if not isinstance(data, Mapping) or not isinstance(name := data.get("schedule"), str):
        raise OptionError(f"not a schedule: {data!r:.80}; expected an object with a field named schedule")
    # a public function `linear` has its formula in `_linear`; a name without one is no schedule
    if name.startswith("_") or f"_{name}" not in globals() or name not in globals():
        raise OptionError(f"unknown schedule {name!r:.80}: expected the name of a formula of dpgrad.schedules")
    given = {f: from_plain(v) if f == "of" else v for f, v in data.items() if f != "schedule"}
    try:
        made: Formula = globals()[name](**given)
    except TypeError:
        raise OptionError(f"schedule {name} cannot be made of fields {sorted(map(str, given))} as given") from None
    return made


def to_plain(schedule: float | Schedule, name: str = "schedule") -> object:
    """Return a number or a formula as JSON values; refuse a plain function, naming ``name``.

    >>> to_plain(1.5), to_plain(constant(1.5))
    (1.5, {'schedule': 'constant', 'value': 1.5})
    """
    return _plain(schedule, name)


def from_plain(data: object) -> float | Schedule:
    """Return the number or formula that `to_plain` wrote.

    >>> from_plain(1.5), from_plain({"schedule": "constant", "value": 1.5})
    (1.5, constant(value=1.5))
    """
    if isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    return from_dict(data)


def constant(value: float) -> Formula:
    """``value`` at every step.

    >>> constant(0.5)(10)
    0.5
    """
    _validate.positive(value=value)
    return Formula(_constant, (("value", float(value)),))


def _constant(t: Array, value: float) -> Array:
    return np.full(t.shape, value)


def linear(start: float, steps: int) -> Formula:
    """start / min(2, 1 + t/steps): falls from ``start`` to half of it at ``steps`` and stays there.

    Yu et al. (2018), Eq. 6. The paper calls this harmonic schedule linear, and so does the command line. `affine` is
    the straight line.

    >>> [round(linear(12.0, 4)(t), 3) for t in range(6)]
    [12.0, 9.6, 8.0, 6.857, 6.0, 6.0]
    """
    _validate.positive(start=start)
    _validate.step_count(steps=steps)
    return Formula(_linear, (("start", float(start)), ("steps", int(steps))))


def _linear(t: Array, start: float, steps: int) -> Array:
    return np.asarray(start / np.minimum(2.0, 1.0 + t / steps))


def affine(start: float, steps: int) -> Formula:
    """start·(1 − t/(2·steps)): a straight line from ``start`` to half of it at ``steps``, then constant.

    >>> [affine(12.0, 4)(t) for t in range(6)]
    [12.0, 10.5, 9.0, 7.5, 6.0, 6.0]
    """
    _validate.positive(start=start)
    _validate.step_count(steps=steps)
    return Formula(_affine, (("start", float(start)), ("steps", int(steps))))


def _affine(t: Array, start: float, steps: int) -> Array:
    return np.asarray(start * (1.0 - np.minimum(t / steps, 1.0) / 2.0))


def geometric(start: float, ratio: float, floor: float) -> Formula:
    """max(start·ratioᵗ, floor).

    >>> [geometric(8.0, ratio=0.5, floor=1.0)(t) for t in range(5)]
    [8.0, 4.0, 2.0, 1.0, 1.0]
    """
    _falling(start, floor)
    if ratio != 1:
        _validate.open_unit(ratio=ratio)
    return Formula(_geometric, (("start", float(start)), ("ratio", float(ratio)), ("floor", float(floor))))


def _geometric(t: Array, start: float, ratio: float, floor: float) -> Array:
    return np.asarray(np.maximum(start * np.power(ratio, t), floor))


def arithmetic(start: float, decrement: float, floor: float) -> Formula:
    """max(start − decrement·t, floor).

    >>> [arithmetic(8.0, decrement=3.0, floor=4.0)(t) for t in range(4)]
    [8.0, 5.0, 4.0, 4.0]
    """
    _falling(start, floor)
    _validate.non_negative(decrement=decrement)
    return Formula(_arithmetic, (("start", float(start)), ("decrement", float(decrement)), ("floor", float(floor))))


def _arithmetic(t: Array, start: float, decrement: float, floor: float) -> Array:
    return np.asarray(np.maximum(start - decrement * t, floor))


def _falling(start: float, floor: float) -> None:
    _validate.positive(start=start, floor=floor)
    if floor > start:
        raise OptionError(f"floor must be at most start = {start!r}, got {floor!r}")


def decay_then_hold(start: float, end: float, steps: int) -> Formula:
    """A straight line from ``start`` to ``end`` over ``steps``, then ``end``.

    The learning-rate schedule of Abadi et al. (2016), who advise against an ``end`` near zero.

    >>> [decay_then_hold(0.5, 0.25, steps=2)(t) for t in range(4)]
    [0.5, 0.375, 0.25, 0.25]
    """
    _validate.positive(start=start)
    _validate.non_negative(end=end)
    _validate.step_count(steps=steps)
    return Formula(_decay_then_hold, (("start", float(start)), ("end", float(end)), ("steps", int(steps))))


def _decay_then_hold(t: Array, start: float, end: float, steps: int) -> Array:
    return np.where(t >= steps, end, start + (end - start) * (t / steps))


def cosine(start: float, end: float, steps: int) -> Formula:
    """end + (start − end)·(1 + cos(π·t/steps))/2, then ``end``; equals torch's CosineAnnealingLR up to ``steps``.

    >>> [round(cosine(1.0, 0.0, steps=4)(t), 3) for t in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    _validate.positive(start=start)
    _validate.non_negative(end=end)
    _validate.step_count(steps=steps)
    return Formula(_cosine, (("start", float(start)), ("end", float(end)), ("steps", int(steps))))


def _cosine(t: Array, start: float, end: float, steps: int) -> Array:
    return np.asarray(end + (start - end) * ((1.0 + np.cos(np.pi * np.minimum(t / steps, 1.0))) / 2.0))


def warmup(of: float | Schedule, steps: int) -> Formula:
    """of(t)·min(1, (t+1)/steps): another schedule, multiplied by a ramp over the first ``steps``.

    >>> [warmup(0.1, steps=2)(t) for t in range(3)]
    [0.05, 0.1, 0.1]
    """
    _validate.step_count(steps=steps)
    return Formula(_warmup, (("of", as_schedule(of, "of")), ("steps", int(steps))))


def _warmup(t: Array, of: Schedule, steps: int) -> Array:
    return np.asarray(_at(of, t) * np.minimum(1.0, (t + 1.0) / steps))


def piecewise(boundaries: Sequence[int], values: Sequence[float]) -> Formula:
    """``values[i]`` from step ``boundaries[i−1]`` to the step before ``boundaries[i]``.

    >>> halved = piecewise(boundaries=[100], values=[0.1, 0.05])
    >>> halved(99), halved(100)
    (0.1, 0.05)
    """
    starts, held = tuple(boundaries), tuple(values)
    if len(held) != len(starts) + 1:
        raise OptionError(f"values must be one more than the {len(starts)} boundaries, got {len(held)}")
    for i, (start, before) in enumerate(zip(starts, (0, *starts), strict=False)):
        _validate.whole(least=1, **{f"boundaries[{i}]": start})
        if not start > before:
            raise OptionError(f"boundaries must rise, got {start} after {before}")
    for i, value in enumerate(held):
        _validate.non_negative(**{f"values[{i}]": value})
    return Formula(
        _piecewise, (("boundaries", tuple(int(b) for b in starts)), ("values", tuple(float(v) for v in held)))
    )


def _piecewise(t: Array, boundaries: tuple[int, ...], values: tuple[float, ...]) -> Array:
    return np.array(values)[np.searchsorted(np.array(boundaries, np.float64), t, side="right")]


def as_schedule(value: float | Schedule, name: str = "schedule") -> Schedule:
    """Return ``value`` if it is a function of the step, or the constant schedule of a number.

    >>> as_schedule(1.5)
    constant(value=1.5)
    """
    if callable(value):
        return value
    try:
        _validate.positive(**{name: value})
    except ValueError as error:
        raise OptionError(f"{error}; give a number or a function of the step") from None
    return constant(value)


def is_constant(value: float | Schedule) -> bool:
    """Whether the schedule is known to be constant.

    >>> is_constant(1.0), is_constant(linear(1.0, 10))
    (True, False)
    """
    return not callable(value) or (isinstance(value, Formula) and value.function is _constant)


def values(schedule: float | Schedule, steps: int, start: int = 0, name: str = "schedule", zero: bool = False) -> Array:
    """Return the schedule at ``steps`` consecutive steps from ``start``, each checked to be finite and positive.

    ``zero`` allows zero as well. A plain function is called step by step, a formula once.

    >>> values(lambda t: 1.0 / (1 + t), 3).tolist()
    [1.0, 0.5, 0.3333333333333333]
    >>> values(lambda t: 1.0 - t, 3, name="clip")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: clip at step 1 must be positive and finite, got 0.0
    """
    _validate.whole(steps=steps, start=start)
    known = as_schedule(schedule, name)
    if not callable(schedule):
        return np.full(steps, schedule, dtype=np.float64)
    found = _at(known, np.arange(start, start + steps, dtype=np.float64), name)
    good = np.isfinite(found) & ((found >= 0) if zero else (found > 0))
    if not good.all():
        first = int(np.argmin(good))
        bound = "zero or more and finite" if zero else "positive and finite"
        raise OptionError(f"{name} at step {start + first} must be {bound}, got {float(found[first])!r}")
    return found


def _at(schedule: Schedule, t: Array, name: str = "schedule") -> Array:
    """The schedule at each step of ``t``: in one call for a formula, in a loop for a plain function."""
    if isinstance(schedule, Formula):
        return schedule(t)
    found = np.empty(len(t))
    for i, step in enumerate(t.astype(np.int64).tolist()):
        value = schedule(step)
        try:
            if isinstance(value, bool | str | bytes):
                raise TypeError
            found[i] = float(value)
        except (TypeError, ValueError):
            raise OptionError(f"{name} at step {step} must be a number, got {value!r:.80}") from None
    return found


def parse_clip(text: str, start: float, steps: int) -> Formula:
    """Parse a clip schedule: ``linear``, ``affine``, ``geometric:R`` or ``arithmetic:R``.

    Each falls from ``start`` to half of it. The first two get there at ``steps``; geometric multiplies by (1−R) per
    step, arithmetic subtracts R·start per step. Yu et al. (2018) shrink by 1/1000 per step without saying which.

    >>> parse_clip("geometric:0.001", start=8.0, steps=100)
    geometric(start=8.0, ratio=0.999, floor=4.0)
    """
    name, colon, rate = text.partition(":")
    match name:
        case "linear" | "affine":
            if colon:
                raise OptionError(f"clip schedule {name} takes no rate, got {text!r}: write {name}")
            return (linear if name == "linear" else affine)(start, steps)
        case "geometric" | "arithmetic":
            try:
                r = float(rate)
            except ValueError:
                got = repr(text) if colon else f"{text!r} without one"
                raise OptionError(
                    f"clip schedule {name} needs a rate R between 0 and 1, got {got}: write {name}:0.001"
                ) from None
            _validate.open_unit(**{f"rate of clip schedule {name}": r})
            _validate.positive(start=start)
            return (
                geometric(start, 1 - r, start / 2) if name == "geometric" else arithmetic(start, r * start, start / 2)
            )
        case _:
            raise OptionError(
                f"clip schedule must be linear, affine, geometric:R or arithmetic:R, got {text!r:.80}"
                + _validate.meant(name, ("linear", "affine", "geometric", "arithmetic"))
            )
