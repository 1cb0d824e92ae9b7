"""Yu et al. (2018): the runs of their figures as budgets, and the noise and steps that each budget allows. Arithmetic.

`mechanism` is one run of Algorithm 1 in either reading of σ̃. `figure2_arms` and `figure4_arms` are the runs of the
figures, which `yu2018` trains; `NOISE` finds the noise of each once, for all seeds and networks.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dpgrad.accounting.events import Relation
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.papers import figures
from dpgrad.papers.claims import every
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "AFTER", "EXPERIMENTS", "MIDDLE", "MOMENTUM", "NOISE", "PAPER", "SHRINK", "TARGETS", "TIGHT", "at", "figure2_arms",
    "figure4_arms", "mechanism", "planned", "settings_of", "settled", "within",
]  # fmt: skip

PAPER = "Yu et al. 2018"
LEARNING_RATE, MOMENTUM, CLIP = 0.02, 0.6, 12.0
EPSILON, DELTA = 2.0, 1e-5
SAMPLING_RATE: dict[Size, float] = {"full": 0.01, "quick": 0.05, "tiny": 0.25}
TARGETS: dict[Size, tuple[int, ...]] = {"full": (5, 10, 20, 40), "quick": (2, 4), "tiny": (1, 2)}
MIDDLE: dict[Size, int] = {"full": 20, "quick": 4, "tiny": 2}  # target epochs where one number is taken


@functools.lru_cache(maxsize=64)
def mechanism(
    rows: int,
    sampling_rate: float,
    target_steps: int,
    epsilon: float,
    delta: float,
    clip: float = CLIP,
    clip_schedule: str | None = None,
    reading: str = "less-noise",
    relation: str = "add-remove",
    accountant: str = "pld",
    precision: float | None = 0.01,
    noise_multiplier: float | None = None,
    steps: int | None = None,
) -> tuple[Mechanism, float]:
    """A run of Algorithm 1 within its budget, and its certified ε; σ̃ is a multiple of ``precision``.

    With ``noise_multiplier`` and ``steps``, found before, nothing is searched for.

    >>> run, epsilon = mechanism(240, 0.25, 4, 2.0, 1e-5, clip_schedule="linear")
    >>> run.steps, run.noise_multiplier, epsilon <= 2.0
    (4, 1.31, True)
    """
    bound = clip if clip_schedule is None else schedules.parse_clip(clip_schedule, clip, target_steps)
    run = Mechanism(
        sampling.Poisson(sampling_rate), target_steps, 1.0, clip=bound, hold_noise=clip_schedule is not None,
        relation=Relation(relation), batch_size=sampling_rate * rows,
    )  # fmt: skip
    if noise_multiplier is not None and steps is not None:
        found = run.with_noise(noise_multiplier).with_steps(steps)
    else:
        calibrate = run.more_steps if reading == "more-steps" else run.less_noise
        found = calibrate(epsilon, delta, accountant, grid=precision)
    return found, found.guarantee(delta, accountant).epsilon


_BUDGET = (
    "rows", "sampling_rate", "target_steps", "epsilon", "delta", "clip", "clip_schedule", "reading", "relation",
    "accountant",
)  # fmt: skip
_ROWS: dict[tuple[str, Size], int] = {
    ("mnist", "full"): 60_000, ("mnist", "quick"): 1000, ("mnist", "tiny"): 240,
    ("covertype", "full"): 464_809, ("covertype", "quick"): 1000, ("covertype", "tiny"): 240,
}  # fmt: skip


def settings_of(
    size: Size, epochs: int, model: str = "yu2018-cnn", data: str = "mnist", **others: Any
) -> dict[str, Any]:
    """The printed settings of Figure 2 at a number of target epochs, with others in place of some."""
    sampling_rate = others.get("sampling_rate", SAMPLING_RATE[size])
    return {
        "model": model, "data": data, "rows": _ROWS[data, size], "sampling_rate": sampling_rate,
        "target_steps": round(epochs / sampling_rate), "epsilon": EPSILON, "delta": DELTA, "relation": "add-remove",
        "accountant": "rdp" if size == "tiny" else "pld", "clip": CLIP, "clip_schedule": None,
        "reading": "less-noise", "momentum": 0.0, "learning_rate": LEARNING_RATE, **others,
    }  # fmt: skip


def planned(setting: Mapping[str, Any]) -> tuple[Mechanism, float]:
    return mechanism(**{name: setting[name] for name in (*_BUDGET, *_FOUND) if name in setting})


AFTER = ("yu2018-noise",)
_FOUND = ("noise_multiplier", "steps")


def settled(arm: Arm, earlier: Mapping[str, Outcomes]) -> Arm:
    """The arm with the noise and the steps of `NOISE`, which are searched for in the trial where that has not run."""
    budget = {name: arm.setting[name] for name in _BUDGET}
    known = (trial for name in earlier[AFTER[0]].arms for trial in earlier[AFTER[0]].of(name))
    found = next((trial for trial in known if trial["setting"] == budget), {})
    return Arm(arm.name, {**arm.setting, **{name: found[name] for name in _FOUND if name in found}})


def within(outcomes: Outcomes) -> bool | None:
    """Whether the certified ε of every run is at most its target."""
    found = [trial["epsilon"] for arm in outcomes.arms for trial in outcomes.of(arm)]
    return every(epsilon <= EPSILON for epsilon in found)


# The runs of Figures 2 and 4

VARIANTS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "momentum": {"momentum": MOMENTUM},
    "falling clip, less noise": {"clip_schedule": "linear"},
    "both, less noise": {"clip_schedule": "linear", "momentum": MOMENTUM},
    "both, more steps": {"clip_schedule": "linear", "momentum": MOMENTUM, "reading": "more-steps"},
    "falling clip, more steps": {"clip_schedule": "linear", "reading": "more-steps"},
}


def at(variant: str, epochs: int) -> str:
    return f"{variant}, {epochs} epochs"


def figure2_arms(model: str, size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(at(variant, epochs), settings_of(size, epochs, model, **others))
        for epochs in (TARGETS[size] if size != "tiny" else TARGETS[size][1:])
        for variant, others in VARIANTS.items()
        if variant != "falling clip, more steps" or epochs == MIDDLE[size]
    )


TIGHT = 0.5
SHRINK = "geometric:0.001"
_FIGURE_4_TARGETS: dict[str, dict[Size, tuple[int, ...]]] = {
    "mnist": {"full": (5, 10, 20), "quick": (2, 4), "tiny": (2,)},
    "covertype": {"full": (2, 5, 10), "quick": (2, 4), "tiny": (2,)},
}
_COVERTYPE = {"learning_rate": 0.1, "clip": 8.0}


def figure4_arms(data: str, models: Mapping[str, str], size: Size) -> tuple[Arm, ...]:
    return tuple(arm for model, prefix in models.items() for arm in _figure4_of(data, model, prefix, size))


def _figure4_of(data: str, model: str, prefix: str, size: Size) -> Iterator[Arm]:
    targets = _FIGURE_4_TARGETS[data][size]
    own: dict[str, Any] = dict(_COVERTYPE) if data == "covertype" else {}
    if data == "covertype" and size == "full":
        own["sampling_rate"] = 0.001
    own |= {"epsilon": TIGHT, "relation": "replace-one", "delta": _ROWS[data, size] ** -2.0}
    for epochs in targets:
        made = partial(settings_of, size, epochs, model, data, **own)
        yield Arm(f"{prefix}DP-SGD, {epochs} epochs", made())
        yield Arm(f"{prefix}amended, {epochs} epochs", made(momentum=MOMENTUM, clip_schedule=SHRINK))
        if epochs == targets[len(targets) // 2]:
            both = {"momentum": MOMENTUM, "clip_schedule": "arithmetic:0.001"}
            yield Arm(f"{prefix}amended, arithmetic, {epochs} epochs", made(**both))
            both = {"momentum": MOMENTUM, "clip_schedule": SHRINK, "reading": "more-steps"}
            yield Arm(f"{prefix}amended, more steps, {epochs} epochs", made(**both))


# The two readings of σ̃ alone: arithmetic


def _readings_arms(size: Size) -> tuple[Arm, ...]:
    """Only what the accountant needs: no model and no rows."""
    kept = ("rows", "sampling_rate", "target_steps", "epsilon", "delta", "clip", "relation", "accountant")
    settings = {epochs: settings_of(size, epochs, clip_schedule="linear") for epochs in TARGETS[size]}
    return tuple(Arm(f"{epochs} epochs", {name: one[name] for name in kept}) for epochs, one in settings.items())


def _readings_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    longer, spent = mechanism(**arm.setting, clip_schedule="linear", reading="more-steps")
    quieter, _ = mechanism(**arm.setting, clip_schedule="linear", precision=None)
    target = arm.setting["target_steps"]
    return {
        "steps": longer.steps, "target_steps": target, "times_the_target": longer.steps / target,
        "noise_multiplier": longer.noise_multiplier, "least_noise_multiplier": quieter.noise_multiplier,
        "epsilon": spent,
    }  # fmt: skip


def _times(outcomes: Outcomes) -> list[float]:
    return [outcomes.mean(arm, "times_the_target") for arm in outcomes.arms]


def _over_steps(axes: "Axes", steps: Iterable[float]) -> None:
    """A logarithmic axis with a mark at each number of steps."""
    ticks = sorted(set(steps))
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _readings_draw(outcomes: Outcomes, figure: "Figure") -> None:
    steps, noise = figures.axes_of(figure, 2)
    target = [outcomes.mean(arm, "target_steps") for arm in outcomes.arms]
    for axes, up, low, label in (
        (steps, "steps", "target_steps", "steps"), (noise, "noise_multiplier", "least_noise_multiplier", "σ̃"),
    ):  # fmt: skip
        for name, place in ((up, 0), (low, 1)):
            values = [outcomes.mean(arm, name) for arm in outcomes.arms]
            axes.plot(target, values, color=figures.COLOURS[place], marker=figures.MARKERS[place],
                      label=name.replace("_", " "))  # fmt: skip
        _over_steps(axes, target)
        axes.set_ylim(0)
        figures.finish(axes, "target steps", label, f"{label} in both readings")


READINGS = Experiment(
    "yu2018-readings", PAPER, "Algorithm 1, σ̃ and the steps gained",
    "How long the budget of Figure 2 (ε = 2, δ = 1e-5, q = 0.01) lasts with the σ̃ of a constant clip bound, to 0.01, "
    "while the bound falls from C to C/2 by Eq. 6 (more steps), and the least σ̃ with which the falling bound lasts the "
    "target steps (less noise). By the PLD accountant, certified: a step or two fewer than by the exact ε.",
    (), _readings_arms, _readings_trial, "steps", seeds=1, draw=_readings_draw,
    also=("target_steps", "times_the_target", "noise_multiplier", "least_noise_multiplier", "epsilon"),
    claims=(
        Claim("a falling clip bound allows more steps for the same budget",
              lambda outcomes: every(times > 1 for times in _times(outcomes)), certain=True),
        Claim("the fewer the target steps, the larger the share gained",
              lambda outcomes: every(a > b for a, b in pairwise(_times(outcomes))),
              certain=True),
        Claim("a falling clip bound needs less noise for the same steps",
              lambda outcomes: every(
                  outcomes.mean(arm, "least_noise_multiplier") < outcomes.mean(arm, "noise_multiplier")
                  for arm in outcomes.arms
              ), certain=True),
        Claim("every run is within ε = 2, certified", within, certain=True, kind="construction"),
    ),
)  # fmt: skip


# The noise of every run of Figures 2 and 4: found once, for all seeds and both networks


def _noise_arms(size: Size) -> tuple[Arm, ...]:
    every_arm = [
        *figure2_arms("yu2018-softmax", size), *figure4_arms("mnist", {"yu2018-softmax": ""}, size),
        *figure4_arms("covertype", {"yu2018-covertype": ""}, size),
    ]  # fmt: skip
    budgets = [{name: arm.setting[name] for name in _BUDGET} for arm in every_arm]
    return tuple(Arm(name, budget) for name, budget in {_said(budget): budget for budget in budgets}.items())


def _kind(budget: Mapping[str, Any]) -> str:
    clip = f"{budget['clip_schedule']} clip, {budget['reading']}" if budget["clip_schedule"] else "constant clip"
    return f"q = {budget['sampling_rate']:g}, {clip}"


def _said(budget: Mapping[str, Any]) -> str:
    return f"ε = {budget['epsilon']:g}, C = {budget['clip']:g}, {budget['target_steps']} steps, {_kind(budget)}"


def _noise_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    run, epsilon = mechanism(**arm.setting)
    return {
        "noise_multiplier": run.noise_multiplier, "steps": run.steps, "epsilon": epsilon, "kind": _kind(arm.setting),
        "target_epsilon": arm.setting["epsilon"], "target_steps": arm.setting["target_steps"],
    }  # fmt: skip


def _spent(outcomes: Outcomes) -> bool | None:
    return every(outcomes.mean(arm, "epsilon") <= outcomes.mean(arm, "target_epsilon") for arm in outcomes.arms)


def _noise_draw(outcomes: Outcomes, figure: "Figure") -> None:
    trials = [outcomes.of(arm)[0] for arm in outcomes.arms]
    for axes, epsilon in zip(figures.axes_of(figure, 2), (EPSILON, TIGHT), strict=True):
        kinds = dict.fromkeys(trial["kind"] for trial in trials if trial["target_epsilon"] == epsilon)
        for kind, colour, marker in zip(kinds, figures.COLOURS, figures.MARKERS, strict=False):
            own = [trial for trial in trials if (trial["target_epsilon"], trial["kind"]) == (epsilon, kind)]
            across, up = ([trial[name] for trial in own] for name in ("target_steps", "noise_multiplier"))
            axes.plot(across, up, label=kind, color=colour, marker=marker)
        _over_steps(axes, [trial["target_steps"] for trial in trials if trial["target_epsilon"] == epsilon])
        axes.set_ylim(0, 1.8 * axes.get_ylim()[1])  # the legend is above the lines
        figures.finish(axes, "target steps", "σ̃", f"ε = {epsilon:g}")


NOISE = Experiment(
    AFTER[0], PAPER, "σ̃ and steps of the runs of Figures 2 and 4",
    "The noise multiplier at the first step, to 0.01, and the number of steps of every run, certified by the PLD "
    "accountant. The figures take their noise from here.",
    (), _noise_arms, _noise_trial, "noise_multiplier", also=("steps", "epsilon"), seeds=1,
    draw=_noise_draw,
    claims=(Claim("every run is within its budget, certified", _spent, certain=True, kind="construction"),),
)  # fmt: skip


EXPERIMENTS = (NOISE, READINGS)
