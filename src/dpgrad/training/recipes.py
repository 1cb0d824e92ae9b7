"""The methods of the papers by name, each with its printed settings as defaults.

>>> RECIPES["psasc"].clip, RECIPES["psasc"].s, RECIPES["psasc"].r
(0.3, 0.9, 0.0001)
>>> recipe("psasc").with_options(s=0.55, r=0.001, clip=0.25).scaling()
Psasc(s=0.55, r=0.001)

A recipe says how one example is scaled and what is done with the noisy gradients; lots, steps and noise come from the
budget. Its constants are those of the paper: C, s, r and the learning rate are typed in as printed. Values no paper
prints are named in ``chosen``.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from dpgrad import _validate
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.scaling import Automatic, Hard, Psac, Psasc, Quotient, ScaleRule
from dpgrad.mechanism import schedules
from dpgrad.mechanism.schedules import Schedule

ABADI = 'Abadi et al., "Deep learning with differential privacy" (2016)'
YU_2018 = 'Yu et al., "Improve the gradient perturbation approach for differentially private optimization" (2018)'
YU_2020 = 'Yu et al., "Gradient perturbation is underrated for differentially private convex optimization" (2020)'
BU = 'Bu et al., "Automatic clipping" (2022), and Yang et al., "Normalized/clipped SGD with perturbation" (2022)'
XIA = 'Xia et al., "Differentially private learning with per-sample adaptive clipping" (2023)'
HUANG = 'Huang et al., "Enhancing DP-SGD through non-monotonous adaptive scaling gradient weight" (2024)'


@dataclass(frozen=True)
class Recipe:
    """One method: the scaling rule with its constants, the learning rate, momentum, and how the clip bound moves.

    ``clip`` is the paper's C; None where the method has none. ``clip_schedule`` is a name that
    `dpgrad.schedules.parse_clip` reads; the noise then keeps its absolute size. ``momentum`` is Yu's c, and 1 − γ₁ of
    Huang et al. ``gamma`` is γ₀ of Algorithm 3 where ``length`` (K₀) is given, and γ of Algorithm 2 otherwise.

    ``rule`` is one of the papers' by name, or any ``rule(norms, clip)`` of your own; ``clip`` is then the bound itself.

    Guarantee: none depends on a recipe. The engine keeps one example within the clip bound whatever the rule returns
    (`dpgrad.scaling.Bounded`), and momentum is computed from what has been released.

    >>> RECIPES["dpsgd-amended"].momentum, RECIPES["dpsgd-amended"].clip_schedule
    (0.6, 'linear')
    >>> RECIPES["dpsgd"].with_options(rule=lambda norms, clip: clip / (norms + clip), clip=2.0).bound
    2.0
    """

    name: str
    title: str
    citation: str
    rule: Literal["hard", "automatic", "psac", "psasc"] | ScaleRule
    learning_rate: float
    clip: float | Schedule | None
    clip_schedule: str | None = None
    momentum: float = 0.0
    s: float | None = None
    r: float | None = None
    gamma: float | None = None
    length: int | None = None
    inner: Literal["current", "past"] = "current"
    full_batch: bool = False
    chosen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _validate.positive(learning_rate=self.learning_rate)
        if self.clip is not None and not callable(self.clip):
            _validate.positive(clip=self.clip)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {_validate.shown(self.momentum)}")
        self.scaling()
        _ = self.inner_momentum
        if self.gamma is not None:
            _validate.unit_interval(gamma=self.gamma)

    def scaling(self) -> ScaleRule:
        """The rule that scales each example's gradient.

        >>> RECIPES["autos"].scaling()
        Automatic(r=0.0001)
        """
        match self.rule:
            case "hard":
                return Hard()
            case "automatic":
                return Automatic(r=_given(self.r))
            case "psac":
                return Psac(r=_given(self.r))
            case "psasc":
                return Psasc(s=_given(self.s), r=_given(self.r))
        given: object = self.rule  # a caller may ignore types
        if not callable(given) or isinstance(given, type):
            raise ValueError(
                "rule must be hard, automatic, psac, psasc, or a function rule(norms, clip) that returns the factors, "
                f"got {_validate.shown(given)}"
            )
        return self.rule

    @property
    def bound(self) -> float | Schedule:
        """The clip bound that makes the factors the paper's weights: C, 1 for Auto-S, C/s for DP-PSASC.

        A schedule in place of C is the bound itself: DP-PSASC then has C(t) = s·bound(t).

        >>> round(RECIPES["psasc"].bound, 4)
        0.3333
        """
        if callable(self.clip):
            return self.clip
        rule, C = self.scaling(), 1.0 if self.clip is None else float(self.clip)
        return rule.sensitivity(C) if isinstance(rule, Quotient) else C

    def clip_over(self, steps: int) -> float | Schedule:
        """The clip bound of the mechanism, where the schedule's clock runs over ``steps``.

        >>> RECIPES["dpsgd-dynamic"].clip_over(100)
        linear(start=12.0, steps=100)
        """
        bound = self.bound
        if self.clip_schedule is None or callable(bound):
            return bound
        return schedules.parse_clip(self.clip_schedule, bound, steps)

    @property
    def inner_momentum(self) -> InnerMomentum | None:
        """The momentum inside the clip bound (Algorithm 3 of Huang et al.), where the method has one."""
        if self.length is None:
            return None
        return InnerMomentum(gamma=_given(self.gamma), length=self.length, inner=self.inner)

    @property
    def average(self) -> float | None:
        """The γ of every example's own average (Algorithm 2 of Huang et al.), where the method has one."""
        return self.gamma if self.length is None else None

    def with_options(self, **given: object) -> "Recipe":
        """The recipe with other constants; None leaves one as it is, and what the method does not have is refused.

        >>> RECIPES["dpsgd"].with_options(s=0.5)
        Traceback (most recent call last):
        ValueError: method dpsgd has no s: leave it out, or choose psasc, psasc-momentum, psasc-gd
        """
        changed = {name: value for name, value in given.items() if value is not None}
        for name in changed:
            if name in _OWN and getattr(self, name) is None:
                others = ", ".join(other.name for other in RECIPES.values() if getattr(other, name) is not None)
                raise ValueError(f"method {self.name} has no {name}: leave it out, or choose {others}")
            if name == "clip_schedule" and self.clip is None:
                raise ValueError(f"method {self.name} has no clip bound that could follow clip_schedule: leave it out")
        if "clip_schedule" in changed and callable(changed.get("clip")):
            raise ValueError("clip is a schedule already: give clip_schedule with a number as clip, or leave it out")
        if callable(changed.get("clip")) and self.clip_schedule is not None:
            changed["clip_schedule"] = None
        if "rule" in changed and "title" not in changed:
            changed["title"] = f"{self.title}, scaled by {_name(changed['rule'])}"
        left = tuple(name for name in self.chosen if name not in changed)
        return dataclasses.replace(self, **changed, chosen=left)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """The recipe as plain values, for JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "rule": _name(self.rule)
        }
        if callable(self.clip):
            found["clip"] = schedules.to_plain(self.clip, "clip")
        return {**found, "chosen": list(self.chosen)}


# Options that a method either has or has not; every method has a learning rate and may have momentum.
_OWN = ("clip", "s", "r", "gamma", "length")


def _name(rule: object) -> str:
    """A rule in words: those of dpgrad as they are written, a function by its name."""
    if isinstance(rule, str):
        return rule
    return repr(rule) if isinstance(rule, Quotient) else str(getattr(rule, "__name__", type(rule).__name__))


def _given(value: float | None) -> float:
    if value is None:  # a recipe of one's own, short of a constant of its rule
        raise ValueError(
            "a recipe must give every constant of its rule: r, and s for psasc, gamma where there is length"
        )
    return value


# DP-SGD, momentum and dynamic clipping: Figure 2 of Yu et al. (2018). Scaling rules: the MNIST row of Table II of Huang
# et al., whose learning rates are not printed. They are chosen so that one example's largest step, learning rate times
# C, is 0.24 as in Figure 2; with momentum c, learning rate/(1 − c) takes the place of the learning rate.
_ALL = (
    Recipe("dpsgd", "DP-SGD", ABADI, "hard", learning_rate=0.02, clip=12.0),
    Recipe("dpsgd-momentum", "DP-SGD with momentum", YU_2018, "hard", learning_rate=0.02, clip=12.0, momentum=0.6),
    Recipe(
        "dpsgd-dynamic", "DP-SGD with a shrinking clip bound", YU_2018, "hard",
        learning_rate=0.02, clip=12.0, clip_schedule="linear",
    ),
    Recipe(
        "dpsgd-amended", "Amended DP-SGD: momentum and a shrinking clip bound", YU_2018, "hard",
        learning_rate=0.02, clip=12.0, clip_schedule="linear", momentum=0.6,
    ),
    Recipe("autos", "Auto-S", BU, "automatic", learning_rate=0.24, clip=None, r=1e-4, chosen=("learning_rate",)),
    Recipe("psac", "DP-PSAC", XIA, "psac", learning_rate=0.8, clip=0.3, r=1e-4, chosen=("learning_rate",)),
    Recipe("psasc", "DP-PSASC", HUANG, "psasc", learning_rate=0.8, clip=0.3, s=0.9, r=1e-4, chosen=("learning_rate",)),
    Recipe(
        "psasc-momentum", "DP-PSASC with inner and outer momentum", HUANG, "psasc",
        learning_rate=0.32, clip=0.3, s=0.9, r=1e-4, momentum=0.6, gamma=0.5, length=2,
        chosen=("learning_rate", "momentum", "gamma", "length"),
    ),
    Recipe("dpgd", "DP-GD", YU_2020, "hard", learning_rate=1.0, clip=1.0, full_batch=True),
    Recipe(
        "psasc-gd", "DP-PSASC with momentum on full batches", HUANG, "psasc",
        learning_rate=3.0, clip=0.3, s=0.9, r=1e-4, gamma=0.3, full_batch=True, chosen=("learning_rate", "gamma"),
    ),
)  # fmt: skip
RECIPES: dict[str, Recipe] = {made.name: made for made in _ALL}


def recipe(method: str | Recipe) -> Recipe:
    """The recipe of that name; one of your own is passed on as it is.

    >>> recipe("psaac")
    Traceback (most recent call last):
    ValueError: unknown method 'psaac': did you mean psac? The methods are dpsgd, ...
    """
    if isinstance(method, Recipe):
        return method
    if method not in RECIPES:
        close = get_close_matches(str(method).lower(), RECIPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown method {_validate.shown(method)}: did you mean {close}? The methods are {', '.join(RECIPES)}"
        )
    return RECIPES[method]


# The share of its start to which a learning rate falls; that of Abadi et al. for MNIST is 0.052 of 0.1, in 10 epochs.
_ENDS = {"decay-then-hold": 0.5, "linear": 0.0, "cosine": 0.0}


def parse_rate(text: str, start: float, steps: int, steps_per_epoch: float) -> Schedule:
    """The learning-rate schedule a command line names.

    ``constant``; ``linear`` and ``cosine`` fall over all steps to a share of ``start``, as in ``cosine:0.1`` (default
    0); ``decay-then-hold:SHARE:EPOCHS`` falls on a straight line to that share (default 0.5) over as many epochs
    (default 10) and stays there, as Abadi et al. advise; ``warmup:STEPS+`` before any of them adds a ramp.

    >>> parse_rate("cosine:0.1", start=0.5, steps=100, steps_per_epoch=10)
    cosine(start=0.5, end=0.05, steps=100)
    >>> parse_rate("warmup:5+constant", start=0.5, steps=100, steps_per_epoch=10)
    warmup(of=constant(value=0.5), steps=5)
    """
    first, plus, rest = text.partition("+")
    name, *numbers = first.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise ValueError(f"rate_schedule {text!r:.80} has a part that is not a number: write {_SPELT}") from None
    match name, values:
        case "warmup", [ramp] if plus and ramp.is_integer() and not rest.startswith("warmup"):
            return schedules.warmup(parse_rate(rest, start, steps, steps_per_epoch), int(ramp))
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
    raise ValueError(f"unknown rate_schedule {text!r:.80}: write {_SPELT}")


_SPELT = "constant, linear:SHARE, cosine:SHARE, decay-then-hold:SHARE:EPOCHS, or one warmup:STEPS+ before one of them"


def _share(given: list[float], name: str) -> float:
    share = given[0] if given else _ENDS[name]
    _validate.unit_interval(**{f"share of rate_schedule {name}": share})
    return share
