"""Learning-rate schedules by name, as a recipe and the command line give them, and in JSON.

>>> parse_learning_rate("linear:0.5", start=1.0, steps=100, steps_per_epoch=10)(100)
0.5
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dpgrad import _validate
from dpgrad.errors import OptionError

if TYPE_CHECKING:  # numpy is imported where a schedule is made: the command line needs names alone
    from dpgrad.mechanism.schedules import Schedule

__all__ = ["parse_learning_rate", "plain_learning_rate"]


def plain_learning_rate(learning_rate: "float | Schedule | None") -> object:
    """The learning rate for JSON; a plain function is only named as such, since the rate is not accounted."""
    from dpgrad.mechanism import schedules

    if callable(learning_rate) and not isinstance(learning_rate, schedules.Formula):
        return {"schedule": "function"}
    return None if learning_rate is None else schedules.to_plain(learning_rate, "learning_rate")


# The share of its start to which a learning rate falls; that of Abadi et al. for MNIST is 0.052 of 0.1, in 10 epochs.
_ENDS = {"decay-then-hold": 0.5, "linear": 0.0, "cosine": 0.0}


def parse_learning_rate(text: str, start: float, steps: int, steps_per_epoch: float) -> "Schedule":
    """The learning-rate schedule a command line names.

    ``constant``; ``linear`` and ``cosine`` fall over all steps to a share of ``start``, as in ``cosine:0.1`` (default
    0); ``decay-then-hold:SHARE:EPOCHS`` falls on a straight line to that share (default 0.5) over as many epochs
    (default 10) and stays there, as Abadi et al. advise; ``warmup:STEPS+`` before any of them adds a ramp.

    >>> parse_learning_rate("cosine:0.1", start=0.5, steps=100, steps_per_epoch=10)
    cosine(start=0.5, end=0.05, steps=100)
    >>> parse_learning_rate("warmup:5+constant", start=0.5, steps=100, steps_per_epoch=10)
    warmup(of=constant(value=0.5), steps=5)
    """
    from dpgrad.mechanism import schedules

    first, plus, rest = text.partition("+")
    name, *numbers = first.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise OptionError(
            f"learning_rate_schedule {text!r:.80} has a part that is not a number: write {_SPELT}"
        ) from None
    match name, values:
        case "warmup", [ramp] if plus and ramp.is_integer() and not rest.startswith("warmup"):
            return schedules.warmup(parse_learning_rate(rest, start, steps, steps_per_epoch), int(ramp))
        case "constant", [] if not plus:
            return schedules.constant(start)
        case "linear" | "cosine", [*share] if not plus and len(share) < 2:
            end = start * _share(share, name)
            falls: Callable[[float, float, int], Schedule] = (
                schedules.cosine if name == "cosine" else schedules.decay_then_hold
            )
            return falls(start, end, steps)
        case "decay-then-hold", [*given] if not plus and len(given) < 3:
            epochs = given[1] if len(given) == 2 else 10.0
            _validate.positive(**{"epochs of decay-then-hold": epochs})
            over = max(1, round(min(epochs * steps_per_epoch, 2 * _validate.MOST_STEPS)))  # beyond which it is refused
            return schedules.decay_then_hold(start, start * _share(given[:1], name), over)
    raise OptionError(f"learning_rate_schedule must be {_SPELT}, got {text!r:.80}{_validate.meant(name, _RATES)}")


_RATES = ("constant", "linear", "cosine", "decay-then-hold", "warmup")
_SPELT = "constant, linear:SHARE, cosine:SHARE, decay-then-hold:SHARE:EPOCHS, or one warmup:STEPS+ before one of them"


def _share(given: list[float], name: str) -> float:
    share = given[0] if given else _ENDS[name]
    _validate.unit_interval(**{f"share of learning_rate_schedule {name}": share})
    return share
