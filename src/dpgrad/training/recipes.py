"""The methods of the papers by name, each with its printed settings as defaults.

>>> psasc().clip, psasc().s, psasc().r
(0.3, 0.9, 0.0001)
>>> psasc(s=0.55, r=0.001, clip=0.25).scaling()
Psasc(s=0.55, r=0.001)

A recipe says how each example's gradient is scaled and how the noisy gradients are used. Batches, steps and noise come
from the budget. C, s, r and the learning rate are given as the paper prints them; ``chosen`` names those it does not
print.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeAlias, cast

from dpgrad import _validate
from dpgrad.errors import OptionError, UnknownOptionError
from dpgrad.training.learning_rates import parse_learning_rate, plain_learning_rate
from dpgrad.training.options import check, option

if TYPE_CHECKING:  # torch and numpy are imported where a recipe is used: the command line needs its fields alone
    import torch

    from dpgrad.grads.history import InnerMomentum
    from dpgrad.grads.scaling import ScaleRule
    from dpgrad.mechanism.adaptive import AdaptiveClip
    from dpgrad.mechanism.mechanism import Group
    from dpgrad.mechanism.schedules import Schedule
    from dpgrad.training.augment import Augment

__all__ = [
    "ABADI",
    "BU",
    "HUANG",
    "RECIPES",
    "RULE",
    "XIA",
    "YU_2018",
    "YU_2020",
    "OptimizerChoice",
    "Recipe",
    "auto",
    "autos",
    "dpgd",
    "dpsgd",
    "dpsgd_amended",
    "dpsgd_dynamic",
    "dpsgd_momentum",
    "optimizer_name",
    "optimizers",
    "psac",
    "psasc",
    "psasc_gd",
    "psasc_momentum",
    "recipe",
    "refuse_optimizer",
]  # fmt: skip

P = ParamSpec("P")
RULES = ("hard", "automatic", "psac", "psasc")
OptimizerChoice: TypeAlias = "str | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]"

ABADI = 'Abadi et al., "Deep learning with differential privacy" (2016)'
YU_2018 = 'Yu et al., "Improve the gradient perturbation approach for differentially private optimization" (2018)'
YU_2020 = 'Yu et al., "Gradient perturbation is underrated for differentially private convex optimization" (2020)'
BU = 'Bu et al., "Automatic clipping" (2022), and Yang et al., "Normalized/clipped SGD with perturbation" (2022)'
XIA = 'Xia et al., "Differentially private learning with per-sample adaptive clipping" (2023)'
RULE = "steps, batch size and learning rate from public facts: docs/defaults.md"
HUANG = 'Huang et al., "Enhancing DP-SGD through non-monotonous adaptive scaling gradient weight" (2024)'


@dataclass(frozen=True)
class Recipe:
    """A method: how each example's gradient is scaled, and how the noisy gradients are used.

    ``clip`` is the paper's C; None where the method has none. With ``clip_schedule`` the noise keeps its absolute size.
    ``momentum`` is Yu's c, and 1 − γ₁ of Huang et al. ``gamma`` is γ₀ of Algorithm 3 where ``length`` (K₀) is given,
    and γ of Algorithm 2 otherwise. ``rule`` is one of the papers' by name, or any ``rule(norms, clip)`` of your own;
    ``clip`` is then the bound itself. ``optimizer`` is the name of one of torch.optim or a function of the parameters.
    ``augment(batch, generator)`` makes K rows of one example, whose mean gradient is scaled once. ``by_rule``: steps,
    batch size and learning rate follow from public facts where they are not given (`dpgrad.training.auto`).
    ``adaptive_clip``: the clip bound starts at ``clip`` and follows a quantile (`dpgrad.mechanism.adaptive`).

    Guarantee: none depends on a recipe. The engine keeps one example within the clip bound whatever the rule returns
    (`dpgrad.scaling.Bounded`), and what follows the noise is computed from what has been released.

    >>> dpsgd_amended().momentum, dpsgd_amended().clip_schedule
    (0.6, 'linear')
    >>> dpsgd(rule=lambda norms, clip: clip / (norms + clip), clip=2.0).bound
    2.0
    """

    name: str
    title: str
    citation: str
    rule: "Literal['hard', 'automatic', 'psac', 'psasc'] | ScaleRule"
    learning_rate: "float | Schedule | None" = option(
        None,
        "The learning rate; default: the method's, or else the optimizer's own.",
        kind="positive",
        metavar="ETA",
    )
    clip: "float | Schedule | None" = option(None, "The clip bound C.", kind="positive", metavar="C")
    clip_schedule: str | None = option(
        None,
        "How the clip bound shrinks to one half while the noise keeps its size: linear, affine, geometric:R or "
        "arithmetic:R with R per step, such as geometric:0.001.",
        kind="text",
        metavar="NAME",
    )
    schedule_steps: int | None = option(
        None,
        "The step at which a linear or affine clip schedule reaches one half; default: the last step.",
        kind="steps",
        metavar="H",
    )
    adaptive_clip: "str | AdaptiveClip | None" = option(
        None, "Move the clip bound with a noisy quantile of the norms: QUANTILE[:ETA[:NOISE]], such as 0.5.",
        kind="name", metavar="QUANTILE",
    )  # fmt: skip
    momentum: float = option(0.0, "The momentum applied to the noisy gradient.", kind="number", metavar="M")
    s: float | None = option(None, "The s of DP-PSASC.", kind="positive", metavar="S")
    r: float | None = option(None, "The r of Auto-S, DP-PSAC and DP-PSASC.", kind="positive", metavar="R")
    gamma: float | None = option(
        None, "The inner momentum, applied to per-example gradients before clipping.", kind="positive", metavar="G"
    )
    length: int | None = option(
        None, "The number of earlier iterates that the inner momentum uses.", kind="count", metavar="K"
    )
    inner: Literal["current", "past"] = option(
        "current", "Whether the inner momentum includes the current iterate.",
        kind="choice", choices=("current", "past"),
    )  # fmt: skip
    learning_rate_schedule: str | None = option(
        None, "constant, linear:SHARE, cosine:SHARE, decay-then-hold:SHARE:EPOCHS, or warmup:STEPS+ before one.",
        kind="text", metavar="NAME",
    )  # fmt: skip
    optimizer: "OptimizerChoice | None" = option(
        None, "An optimizer of torch.optim, such as adam, or self-scaled.", kind="name", metavar="NAME"
    )
    averaging: str | None = option(
        None, "An average of the iterates: ema:DECAY or tail:SHARE.", kind="text", metavar="NAME"
    )
    temperature: float | None = option(
        None, "Spend this share of the budget, such as 0.01, on making class probabilities less overconfident.",
        kind="share", metavar="SHARE",
    )  # fmt: skip
    augment: "Augment | None" = None
    groups: "tuple[Group, ...]" = ()
    full_batch: bool = False
    by_rule: bool = False
    chosen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        if not 0 <= self.momentum < 1:
            raise OptionError(f"momentum must lie in [0, 1), got {_validate.shown(self.momentum)}")
        self.scaling()
        _ = self.inner_momentum
        if self.gamma is not None:
            _validate.unit_interval(gamma=self.gamma)
        self._refuse_misspelt()

    def _refuse_misspelt(self) -> None:
        """Refuse at once what could only be read when a run is planned."""
        from dpgrad.mechanism import schedules
        from dpgrad.mechanism.mechanism import Group
        from dpgrad.training.averaging import parse as parse_averaging

        many = _validate.MOST_STEPS  # whatever suits this many steps may still not suit the run
        if self.averaging is not None:
            parse_averaging(self.averaging, many)
        if self.clip_schedule is not None:
            schedules.parse_clip(self.clip_schedule, 1.0, many)
        if self.learning_rate_schedule is not None:
            parse_learning_rate(self.learning_rate_schedule, 1.0, many, 1.0)
        refuse_optimizer(self.optimizer, self.momentum)
        if self.adaptive is not None and self.clip is None:
            raise OptionError(f"method {self.name} has no clip bound that could follow adaptive_clip: leave it out")
        if self.adaptive is not None and (self.clip_schedule is not None or callable(self.clip)):
            raise OptionError(
                "adaptive_clip moves the clip bound, and so does its schedule: leave out one of them, or choose dpsgd"
            )
        augment: object = self.augment  # a caller may ignore types
        if augment is not None and (not callable(augment) or isinstance(augment, type)):
            raise OptionError(
                "augment must be a function of (batch, generator), such as dpgrad.augment.Shifts(4), got "
                f"{_validate.shown(augment)}"
            )
        groups: object = self.groups
        if not isinstance(groups, tuple) or not all(isinstance(group, Group) for group in groups):
            raise OptionError(f"groups must be a tuple of dpgrad.Group, got {_validate.shown(groups)}")

    def scaling(self) -> "ScaleRule":
        """The rule that scales each example's gradient.

        >>> autos().scaling()
        Automatic(r=0.0001)
        """
        from dpgrad.grads import scaling

        match self.rule:
            case "hard":
                return scaling.Hard()
            case "automatic":
                return scaling.Automatic(r=_given(self.r))
            case "psac":
                return scaling.Psac(r=_given(self.r))
            case "psasc":
                return scaling.Psasc(s=_given(self.s), r=_given(self.r))
        given: object = self.rule  # a caller may ignore types
        if isinstance(given, type):
            raise OptionError(f"rule must be a rule, got its class {given.__name__}: write {given.__name__}()")
        if not callable(given):
            _validate.one_of(RULES, "a function of (norms, clip) that returns the factors", rule=given)
        return self.rule

    @property
    def bound(self) -> "float | Schedule":
        """The clip bound that makes the factors the paper's weights: C, 1 for Auto-S, C/s for DP-PSASC.

        A schedule in place of C is the bound itself: DP-PSASC then has C(t) = s·bound(t).

        >>> round(psasc().bound, 4)
        0.3333
        """
        if callable(self.clip):
            return self.clip
        from dpgrad.grads.scaling import Quotient

        rule, C = self.scaling(), 1.0 if self.clip is None else float(self.clip)
        return rule.sensitivity(C) if isinstance(rule, Quotient) else C

    def clip_over(self, steps: int) -> "float | Schedule":
        """The clip bound of the mechanism, where the schedule's clock runs over ``steps``.

        >>> dpsgd_dynamic().clip_over(100)
        linear(start=12.0, steps=100)
        """
        from dpgrad.mechanism import schedules

        bound = self.bound
        if self.clip_schedule is None or callable(bound):
            return bound
        return schedules.parse_clip(self.clip_schedule, bound, steps)

    @property
    def adaptive(self) -> "AdaptiveClip | None":
        """How the clip bound follows the norms; None if it does not.

        >>> dpsgd(adaptive_clip="0.5").adaptive
        AdaptiveClip(quantile=0.5, learning_rate=0.2, noise=None)
        """
        from dpgrad.mechanism.adaptive import AdaptiveClip

        return None if self.adaptive_clip is None else AdaptiveClip.parse(self.adaptive_clip)

    @property
    def counts(self) -> int:
        """How many noisy counts a step releases: one per group if the clip bounds follow the norms, else 0."""
        return 0 if self.adaptive_clip is None else max(1, len(self.groups))

    @property
    def inner_momentum(self) -> "InnerMomentum | None":
        """The momentum inside the clip bound (Algorithm 3 of Huang et al.), where the method has one."""
        from dpgrad.grads.history import InnerMomentum

        if self.length is None:
            return None
        return InnerMomentum(gamma=_given(self.gamma), length=self.length, inner=self.inner)

    @property
    def average(self) -> float | None:
        """The γ of every example's own average (Algorithm 2 of Huang et al.), where the method has one."""
        return self.gamma if self.length is None else None

    def with_options(self, **given: object) -> "Recipe":
        """The recipe with other constants. None keeps a constant; one that the method does not have is refused.

        >>> dpsgd(s=0.5)
        Traceback (most recent call last):
        dpgrad.errors.OptionError: method dpsgd has no s: leave it out, or choose psasc, psasc-momentum, psasc-gd
        """
        changed = {name: value for name, value in given.items() if value is not None}
        fields = [field.name for field in dataclasses.fields(self)]
        for name in given:
            if name not in fields:
                raise UnknownOptionError(f"{self.name} has no option {name!r:.40}{_validate.meant(name, fields)}")
        for name in changed:
            if name in _OWN and getattr(self, name) is None:
                others = ", ".join(other.name for other in _all().values() if getattr(other, name) is not None)
                raise OptionError(f"method {self.name} has no {name}: leave it out, or choose {others}")
            if name == "clip_schedule" and self.clip is None:
                raise OptionError(f"method {self.name} has no clip bound that could follow clip_schedule: leave it out")
        if "clip_schedule" in changed and callable(changed.get("clip")):
            raise OptionError("clip is a schedule already: give clip_schedule with a number as clip, or leave it out")
        if callable(changed.get("clip")) and self.clip_schedule is not None:
            changed["clip_schedule"] = None
        if callable(changed.get("learning_rate")):
            if "learning_rate_schedule" in changed:
                raise OptionError(
                    "learning_rate is a schedule already: give a number with learning_rate_schedule, or leave it out"
                )
            changed["learning_rate_schedule"] = None
        if callable(changed.get("optimizer")) and not changed.keys() & {"learning_rate", "learning_rate_schedule"}:
            changed["learning_rate"] = None  # the optimizer's own
        if self.by_rule and not _has_momentum(changed.get("optimizer", self.optimizer)):
            changed.setdefault("momentum", 0.0)
        if "rule" in changed and "title" not in changed:
            changed["title"] = f"{self.title}, scaled by {_name(changed['rule'])}"
        left = tuple(name for name in self.chosen if name not in changed)
        return dataclasses.replace(self, **changed, chosen=left)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """The recipe as plain values, for JSON."""
        from dpgrad.mechanism import schedules

        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.clip):
            found["clip"] = schedules.to_plain(self.clip, "clip")
        if callable(self.learning_rate):
            found["learning_rate"] = plain_learning_rate(self.learning_rate)
        return {
            **found,
            "rule": _name(self.rule),
            "optimizer": None if self.optimizer is None else _name(self.optimizer),
            "augment": None if self.augment is None else _name(self.augment),
            "groups": [dataclasses.asdict(group) for group in self.groups],
            "adaptive_clip": None if self.adaptive is None else dataclasses.asdict(self.adaptive),
            "chosen": list(self.chosen),
        }


# Options that only some methods have.
_OWN = ("clip", "s", "r", "gamma", "length")


def _name(rule: object) -> str:
    """The name of a rule, optimizer or other function; a rule of dpgrad as it is written in Python."""
    if isinstance(rule, str):
        return rule
    if dataclasses.is_dataclass(rule):
        return repr(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def optimizer_name(optimizer: "OptimizerChoice | None") -> str:
    """The name of an optimizer in a plan.

    >>> optimizer_name(None), optimizer_name("adam")
    ('sgd', 'adam')
    """
    return "sgd" if optimizer is None else _name(optimizer)


def _has_momentum(optimizer: object) -> bool:
    """Whether ``momentum`` of a recipe is that of the optimizer."""
    return optimizer is None or (isinstance(optimizer, str) and optimizer.lower() in ("sgd", "self-scaled"))


def refuse_optimizer(optimizer: "OptimizerChoice | None", momentum: float = 0.0) -> None:
    """Refuse what `Recipe.optimizer` cannot be: a name that torch.optim does not have, or an optimizer itself.

    >>> refuse_optimizer("adm")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: optimizer must be a function of the parameters or one of ..., got 'adm': did you mean ...
    """
    given: object = optimizer  # a caller may ignore types
    if _has_momentum(given):
        return
    import torch

    if isinstance(given, torch.optim.Optimizer):
        kind = type(given).__name__
        raise OptionError(
            f"optimizer must be a name or a function that makes one of the parameters, got {kind} itself: give "
            f"lambda parameters: {kind}(parameters, ...)"
        )
    if not callable(given):
        name = given.lower() if isinstance(given, str) else given
        _validate.one_of(optimizers(), "a function of the parameters", optimizer=name)
    if momentum:
        raise OptionError(
            f"momentum = {momentum:g} is that of SGD, and another optimizer was chosen: leave out optimizer, or give "
            "method dpsgd or momentum 0 and set the optimizer's own"
        )


def optimizers() -> "dict[str, Callable[..., torch.optim.Optimizer]]":
    """The optimizers of torch by lower-case name, without those that a private step does not suit, and our own.

    LBFGS evaluates the loss several times per step, and SparseAdam needs sparse gradients.

    >>> "adam" in optimizers(), "lbfgs" in optimizers()
    (True, False)
    """
    import torch

    from dpgrad.training.scaled import SelfScaled

    found: dict[str, Callable[..., torch.optim.Optimizer]] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    found["self-scaled"] = SelfScaled
    return {name: found[name] for name in sorted(found) if name not in ("lbfgs", "sparseadam")}


def _given(value: float | None) -> float:
    if value is None:  # a user's recipe that lacks a constant of its rule
        raise OptionError(
            "a recipe must give every constant of its rule: r, and s for psasc, gamma where there is length"
        )
    return value


def _method(declared: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """A method of the papers as a function of its options, which are the fields of `Recipe`.

    ``declared`` is a partial call, since making a recipe needs torch. Its signature has every option, with the method's
    constants as defaults.
    """
    assert isinstance(declared, functools.partial)
    name = declared.keywords["name"]
    _DECLARED[name] = declared

    def made(**options: object) -> Recipe:
        return _all()[name].with_options(**options)

    made.__name__ = made.__qualname__ = name.replace("-", "_")
    made.__signature__ = inspect.signature(declared).replace(return_annotation=Recipe)  # type: ignore[attr-defined]
    told = [f"{field.name}: {field.metadata['help']}" for field in dataclasses.fields(Recipe) if field.metadata]
    title = f"{declared.keywords['title']}: {declared.keywords['citation']}."
    made.__doc__ = "\n\n".join([title, "Every option is a field of `Recipe`:", "\n".join(told)])
    return cast(Callable[P, Recipe], made)


_DECLARED: "dict[str, functools.partial[Recipe]]" = {}

# DP-SGD, momentum and dynamic clipping: Figure 2 of Yu et al. (2018). Scaling rules: the MNIST row of Table II of Huang
# et al., whose learning rates are not printed. They are chosen so that one example's largest step, learning rate times
# C, is 0.24 as in Figure 2; with momentum c, learning rate/(1 − c) takes the place of the learning rate.
dpsgd = _method(
    partial(Recipe, name="dpsgd", title="DP-SGD", citation=ABADI, rule="hard", learning_rate=0.02, clip=12.0)
)
dpsgd_momentum = _method(
    partial(
        Recipe, name="dpsgd-momentum", title="DP-SGD with momentum", citation=YU_2018, rule="hard",
        learning_rate=0.02, clip=12.0, momentum=0.6,
    )
)  # fmt: skip
dpsgd_dynamic = _method(
    partial(
        Recipe, name="dpsgd-dynamic", title="DP-SGD with a shrinking clip bound", citation=YU_2018, rule="hard",
        learning_rate=0.02, clip=12.0, clip_schedule="linear",
    )
)  # fmt: skip
dpsgd_amended = _method(
    partial(
        Recipe, name="dpsgd-amended", title="Amended DP-SGD: momentum and a shrinking clip bound", citation=YU_2018,
        rule="hard", learning_rate=0.02, clip=12.0, clip_schedule="linear", momentum=0.6,
    )
)  # fmt: skip
autos = _method(
    partial(
        Recipe, name="autos", title="Auto-S", citation=BU, rule="automatic",
        learning_rate=0.24, clip=None, r=1e-4, chosen=("learning_rate",),
    )
)  # fmt: skip
psac = _method(
    partial(
        Recipe, name="psac", title="DP-PSAC", citation=XIA, rule="psac",
        learning_rate=0.8, clip=0.3, r=1e-4, chosen=("learning_rate",),
    )
)  # fmt: skip
psasc = _method(
    partial(
        Recipe, name="psasc", title="DP-PSASC", citation=HUANG, rule="psasc",
        learning_rate=0.8, clip=0.3, s=0.9, r=1e-4, chosen=("learning_rate",),
    )
)  # fmt: skip
psasc_momentum = _method(
    partial(
        Recipe, name="psasc-momentum", title="DP-PSASC with inner and outer momentum", citation=HUANG, rule="psasc",
        learning_rate=0.32, clip=0.3, s=0.9, r=1e-4, momentum=0.6, gamma=0.5, length=2,
        chosen=("learning_rate", "momentum", "gamma", "length"),
    )
)  # fmt: skip
dpgd = _method(
    partial(
        Recipe, name="dpgd", title="DP-GD", citation=YU_2020, rule="hard",
        learning_rate=1.0, clip=1.0, full_batch=True,
    )
)  # fmt: skip
psasc_gd = _method(
    partial(
        Recipe, name="psasc-gd", title="DP-PSASC with momentum on full batches", citation=HUANG, rule="psasc",
        learning_rate=3.0, clip=0.3, s=0.9, r=1e-4, gamma=0.3, full_batch=True, chosen=("learning_rate", "gamma"),
    )
)  # fmt: skip
# Last, since the papers' methods come first in a message that lists all.
auto = _method(
    partial(
        Recipe, name="auto", title="DP-SGD with nothing to tune", citation=RULE, rule="hard", clip=0.1, momentum=0.9,
        learning_rate_schedule="linear", optimizer="self-scaled", by_rule=True,
    )
)  # fmt: skip


@functools.cache
def _all() -> dict[str, Recipe]:
    return {name: declared() for name, declared in _DECLARED.items()}


if TYPE_CHECKING:
    RECIPES: dict[str, Recipe]
else:

    def __getattr__(name: str) -> object:
        if name != "RECIPES":  # made when first asked for: rules need torch
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _all()


def recipe(method: str | Recipe) -> Recipe:
    """The recipe of that name; one of your own is passed on as it is.

    >>> recipe("psaac")
    Traceback (most recent call last):
    dpgrad.errors.OptionError: method must be a Recipe or one of dpsgd, ..., got 'psaac': did you mean psac?
    """
    if isinstance(method, Recipe):
        return method
    given: object = method  # a caller may ignore types
    if callable(given):
        name = _name(given)
        raise OptionError(f"method must be a Recipe or a name, got the function {name}: call it, {name}(...)")
    _validate.one_of(_DECLARED, "a Recipe", method=given)
    return _all()[method]
