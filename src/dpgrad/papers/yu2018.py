"""Yu et al., "Improve the Gradient Perturbation Approach" (2018): Figures 1 to 4 and the two readings of σ̃.

Momentum after the noise, and a clip bound that falls to half while the noise keeps its absolute size. Where the paper
does not print a setting, `about` of the experiment says what was chosen. Nothing here was tuned.

Batches are drawn by Poisson sampling and divided by their expected size, and ε is that of the PLD accountant; the paper
divides by the size of the batch drawn, which is private, and counts with the moments accountant.
"""

import functools
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dpgrad.accounting.events import Relation
from dpgrad.accounting.laws import momentum_noise
from dpgrad.mechanism import sampling, schedules
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.papers import figures, private_sgd, tasks
from dpgrad.papers.claims import best, every, gain, grows, reaches
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size
from dpgrad.training.models import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS", "mechanism"]

PAPER = "Yu et al. 2018"
LEARNING_RATE, MOMENTUM, CLIP = 0.02, 0.6, 12.0
EPSILON, DELTA = 2.0, 1e-5
SAMPLING_RATE: dict[Size, float] = {"full": 0.01, "quick": 0.01, "tiny": 0.25}
TARGETS: dict[Size, tuple[int, ...]] = {"full": (5, 10, 20, 40), "quick": (2, 5), "tiny": (1, 2)}
MIDDLE: dict[Size, int] = {"full": 20, "quick": 5, "tiny": 2}  # target epochs where one number is taken
COEFFICIENTS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
NETWORKS = {"yu2018-cnn": "CNN", "yu2018-softmax": "softmax"}
_NOISELESS = 1e-6  # a noise multiplier that changes nothing, where nothing is private


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
    ("mnist", "full"): 60_000, ("mnist", "quick"): 6000, ("mnist", "tiny"): 240,
    ("covertype", "full"): 464_809, ("covertype", "quick"): 6000, ("covertype", "tiny"): 240,
}  # fmt: skip


def _setting(size: Size, epochs: int, model: str = "yu2018-cnn", data: str = "mnist", **others: Any) -> dict[str, Any]:
    """The printed settings of Figure 2 at a number of target epochs, with others in place of some."""
    rate = others.get("sampling_rate", SAMPLING_RATE[size])
    return {
        "model": model, "data": data, "rows": _ROWS[data, size], "sampling_rate": rate,
        "target_steps": round(epochs / rate), "epsilon": EPSILON, "delta": DELTA, "relation": "add-remove",
        "accountant": "rdp" if size == "tiny" else "pld", "clip": CLIP, "clip_schedule": None,
        "reading": "less-noise", "momentum": 0.0, "learning_rate": LEARNING_RATE, **others,
    }  # fmt: skip


def _run(setting: Mapping[str, Any]) -> tuple[Mechanism, float]:
    return mechanism(**{name: setting[name] for name in (*_BUDGET, *_FOUND) if name in setting})


_NOISE, _FOUND = "yu2018-noise", ("noise_multiplier", "steps")


def _settled(arm: Arm, earlier: Mapping[str, Outcomes]) -> Arm:
    """The arm with the noise and the steps of `NOISE`, which are searched for in the trial where that has not run."""
    budget = {name: arm.setting[name] for name in _BUDGET}
    known = (trial for name in earlier[_NOISE].arms for trial in earlier[_NOISE].of(name))
    found = next((trial for trial in known if trial["setting"] == budget), {})
    return Arm(arm.name, {**arm.setting, **{name: found[name] for name in _FOUND if name in found}})


def _train(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """Train one arm; its accuracy on test rows during the run and at its end."""
    setting = arm.setting
    rows, (run, epsilon) = private_sgd.rows(setting["data"], place), _run(setting)
    torch.manual_seed(seed)
    model = build(setting["model"], rows.shape, rows.classes).to(place.device)
    curves = private_sgd.trained(
        model, rows.train, run, setting["learning_rate"], seed, momentum=setting["momentum"],
        look={"test_accuracy": lambda: tasks.accuracy(model, rows.x_test, rows.y_test)},
        points=private_sgd.POINTS[place.size],
    )  # fmt: skip
    return {
        "accuracy": curves["test_accuracy"][-1], "early_accuracy": curves["test_accuracy"][1], "epsilon": epsilon,
        "steps": run.steps, "target_steps": setting["target_steps"], "noise_multiplier": run.noise_multiplier,
        "momentum_noise": momentum_noise(setting["momentum"]), **curves,
    }  # fmt: skip


def _within_budget(outcomes: Outcomes) -> bool | None:
    """Whether the certified ε of every run is at most its target."""
    found = [trial["epsilon"] for arm in outcomes.arms for trial in outcomes.of(arm)]
    return every(epsilon <= EPSILON for epsilon in found)


# Figure 1


def _figure1_arms(size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(f"{named}, {how}", {**_setting(size, MIDDLE[size], model), "private": how == "DP-SGD"})
        for model, named in NETWORKS.items()
        for how in ("DP-SGD", "without noise")
    )


def _figure1_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """The mean gradient norm of the same training rows in the course of a run."""
    setting = arm.setting
    rows, (run, _) = private_sgd.rows(setting["data"], place), _run(setting)
    torch.manual_seed(seed)
    model = build(setting["model"], rows.shape, rows.classes).to(place.device)
    probe = rows.first(1000).train
    curves = private_sgd.trained(
        model, rows.train, run if setting["private"] else run.with_noise(_NOISELESS), setting["learning_rate"], seed,
        look={"gradient_norm": lambda: private_sgd.gradient_norm(model, probe)},
        points=private_sgd.POINTS[place.size],
    )  # fmt: skip
    first, last = curves["gradient_norm"][0], curves["gradient_norm"][-1]
    return {"first_norm": first, "last_norm": last, "norm_ratio": last / first, **curves}


def _falls(arm: str, outcomes: Outcomes) -> bool | None:
    """Whether the norm at the end is below that at the start, by more than two standard errors."""
    mean, error = outcomes.mean(arm, "norm_ratio"), outcomes.error(arm, "norm_ratio")
    return None if not abs(1 - mean) > 2 * error else mean < 1


def _figure1_draw(outcomes: Outcomes, figure: "Figure") -> None:
    panels = figures.axes_of(figure, 2)
    for axes, named in zip(panels, NETWORKS.values(), strict=True):
        figures.curves(axes, outcomes, "step", "gradient_norm", [arm for arm in outcomes.arms if arm.startswith(named)])
        figures.finish(axes, "step", "mean gradient norm of 1,000 training rows", named)


FIGURE_1 = Experiment(
    "yu2018-figure1", PAPER, "Figure 1",
    "Mean norm of the gradients of the first 1,000 training rows, computed without noise and outside any guarantee, "
    "during DP-SGD at the settings of Figure 2 (20 target epochs, ε = 2) and during the same run with clipping alone. "
    "The paper does not say which run its figure shows.",
    ("mnist",), _figure1_arms, _figure1_trial, "norm_ratio", also=("first_norm", "last_norm"), draw=_figure1_draw,
    claims=tuple(
        Claim(f"gradients tend to zero as training goes on: their norm falls ({named}, {how})",
              partial(_falls, f"{named}, {how}"))
        for named in NETWORKS.values() for how in ("DP-SGD", "without noise")
    ),
)  # fmt: skip


# Figure 2, at several numbers of target epochs

_VARIANTS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "momentum": {"momentum": MOMENTUM},
    "falling clip, less noise": {"clip_schedule": "linear"},
    "both, less noise": {"clip_schedule": "linear", "momentum": MOMENTUM},
    "both, more steps": {"clip_schedule": "linear", "momentum": MOMENTUM, "reading": "more-steps"},
    "falling clip, more steps": {"clip_schedule": "linear", "reading": "more-steps"},
}


def _at(variant: str, epochs: int) -> str:
    return f"{variant}, {epochs} epochs"


def _figure2_arms(model: str, size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(_at(variant, epochs), _setting(size, epochs, model, **others))
        for epochs in (TARGETS[size] if size != "tiny" or model != "yu2018-cnn" else TARGETS[size][1:])
        for variant, others in _VARIANTS.items()
        if variant != "falling clip, more steps" or epochs == MIDDLE[size]
    )


def _there(outcomes: Outcomes, variant: str) -> list[int]:
    """The target epochs at which a variant was run."""
    every_target = sorted({epochs for targets in TARGETS.values() for epochs in targets})
    return [epochs for epochs in every_target if outcomes.of(_at(variant, epochs))]


def _improves(variant: str, outcomes: Outcomes) -> bool | None:
    return every(
        outcomes.above(_at(variant, epochs), _at("DP-SGD", epochs), "accuracy") for epochs in _there(outcomes, variant)
    )


def _best_of_four(outcomes: Outcomes) -> bool | None:
    others = ("DP-SGD", "momentum", "falling clip, less noise")
    return every(
        best(outcomes, [_at("both, less noise", epochs)], [_at(other, epochs) for other in others], "accuracy")
        for epochs in _there(outcomes, "DP-SGD")
    )


def _more_when_short(variant: str, outcomes: Outcomes) -> bool | None:
    """Whether the gain over DP-SGD is larger at the fewest target epochs than at the most."""
    there = _there(outcomes, variant)
    if len(there) < 2:
        return None
    few, many = (
        gain(outcomes, _at(variant, epochs), _at("DP-SGD", epochs), "accuracy") for epochs in (there[0], there[-1])
    )
    return grows(many, few)


def _lasts_longer(outcomes: Outcomes) -> bool | None:
    found = [trial for arm in outcomes.arms if "more steps" in arm for trial in outcomes.of(arm)]
    return every(trial["steps"] > trial["target_steps"] for trial in found)


def _needs_less(outcomes: Outcomes) -> bool | None:
    return every(
        outcomes.above(_at("DP-SGD", epochs), _at("both, less noise", epochs), "noise_multiplier", 0)
        for epochs in _there(outcomes, "both, less noise")
    )


def _figure2_draw(outcomes: Outcomes, figure: "Figure") -> None:
    targets = _there(outcomes, "DP-SGD")
    for axes, epochs in zip(figures.axes_of(figure, max(1, len(targets)), columns=2), targets, strict=False):
        arms = [arm for arm in outcomes.arms if arm.endswith(f", {epochs} epochs")]
        figures.curves(axes, outcomes, "step", "test_accuracy", arms)
        figures.finish(axes, "step", "accuracy on test rows (%)", f"{epochs} target epochs")


_FIGURE_2_CLAIMS = (
    Claim("momentum c = 0.6 improves on DP-SGD, at all target epochs", partial(_improves, "momentum")),
    Claim("a falling clip bound improves on DP-SGD, at all target epochs (less noise)",
          partial(_improves, "falling clip, less noise")),
    Claim("both improve on DP-SGD, at all target epochs (less noise)", partial(_improves, "both, less noise")),
    Claim("both improve on DP-SGD, at all target epochs (more steps)", partial(_improves, "both, more steps")),
    Claim("both together are the best of the four, at all target epochs (less noise)", _best_of_four),
    Claim("the advantage grows as the budget (steps) shrinks (less noise)",
          partial(_more_when_short, "both, less noise")),
    Claim("the advantage grows as the budget (steps) shrinks (more steps)",
          partial(_more_when_short, "both, more steps")),
    Claim("a falling clip bound allows more steps than the target (more steps)", _lasts_longer, certain=True),
    Claim("a falling clip bound needs less noise for the same steps (less noise)", _needs_less, certain=True),
    Claim("every run is within ε = 2, certified", _within_budget, certain=True),
)  # fmt: skip


def _figure2(model: str) -> Experiment:
    network = (
        "The printed CNN cannot be: 20 channels do not flatten to 50. Taken: 2×2 max-pooling after each convolution, "
        "320→50 with ReLU, 50→10. " if model == "yu2018-cnn" else ""
    )  # fmt: skip
    return Experiment(
        f"yu2018-figure2-{NETWORKS[model].lower()}", PAPER, f"Figure 2, {NETWORKS[model]}",
        "MNIST, ε = 2 for add/remove neighbours, η = 0.02, q = 0.01, c = 0.6, C from 12 to 6 by Eq. 6 over the target "
        "epochs, σ̃ to 0.01. δ is not printed: 1e-5. Target epochs are not printed: 5, 10, 20 and 40. σ̃ is read in two "
        "ways: less noise (the least σ̃ with which the falling bound lasts the target steps) and more steps (σ̃ for a "
        f"constant bound, then steps until the budget is spent). {network}Curves are on the test rows.",
        ("mnist",), partial(_figure2_arms, model), _train, "accuracy", also=("steps", "noise_multiplier", "epsilon"),
        claims=_FIGURE_2_CLAIMS, draw=_figure2_draw, after=(_NOISE,), settle=_settled,
    )  # fmt: skip


# The two readings of σ̃ alone: arithmetic


def _readings_arms(size: Size) -> tuple[Arm, ...]:
    """Only what the accountant needs: no model and no rows."""
    kept = ("rows", "sampling_rate", "target_steps", "epsilon", "delta", "clip", "relation", "accountant")
    settings = {epochs: _setting(size, epochs, clip_schedule="linear") for epochs in TARGETS[size]}
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
        axes.set(xscale="log", yscale="log")
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
        Claim("every run is within ε = 2, certified", _within_budget, certain=True),
    ),
)  # fmt: skip


# Figure 3


def _c(coefficient: float) -> str:
    return f"c = {coefficient:g}"


def _figure3_arms(size: Size) -> tuple[Arm, ...]:
    chosen = COEFFICIENTS if size != "tiny" else (0.0, 0.6, 0.9)
    return tuple(Arm(_c(c), _setting(size, MIDDLE[size], momentum=c)) for c in chosen)


def _figure3_draw(outcomes: Outcomes, figure: "Figure") -> None:
    axes = figure.add_subplot()
    figures.curves(axes, outcomes, "step", "test_accuracy")
    figures.finish(axes, "step", "accuracy on test rows (%)", "Momentum coefficients, CNN")


def _noise_grows(outcomes: Outcomes) -> bool | None:
    found = [outcomes.mean(arm, "momentum_noise") for arm in outcomes.arms]
    return every([*(a < b for a, b in pairwise(found)), round(found[-1]) == 5])


FIGURE_3 = Experiment(
    "yu2018-figure3", PAPER, "Figure 3",
    "MNIST, CNN, at the settings of Figure 2 with a constant clip bound and other momentum coefficients. Network, "
    "clip schedule and length are not printed: the CNN, a constant bound (momentum alone) and 20 epochs.",
    ("mnist",), _figure3_arms, _train, "accuracy", also=("early_accuracy", "momentum_noise"), draw=_figure3_draw,
    claims=(
        Claim("the best accuracy is achieved for c = 0.6 or 0.7",
              lambda outcomes: best(outcomes, [_c(0.6), _c(0.7)],
                                    [_c(c) for c in COEFFICIENTS if c not in (0.6, 0.7)], "accuracy")),
        Claim("c = 0.9 rises faster than c = 0.6 in the beginning (first twentieth of the steps)",
              lambda outcomes: outcomes.above(_c(0.9), _c(0.6), "early_accuracy")),
        Claim("c = 0.9 ends below c = 0.6", lambda outcomes: outcomes.above(_c(0.6), _c(0.9), "accuracy")),
        Claim("the noise in the momentum grows with c, and is about 5 times that of a step at c = 0.9", _noise_grows,
              certain=True),
    ),
)  # fmt: skip


# Figure 4

_TIGHT = 0.5
_SHRINK = "geometric:0.001"
_FIGURE_4_TARGETS: dict[str, dict[Size, tuple[int, ...]]] = {
    "mnist": {"full": (5, 10, 20), "quick": (2, 5), "tiny": (2,)},
    "covertype": {"full": (2, 5, 10), "quick": (2, 5), "tiny": (2,)},
}
_COVERTYPE = {"learning_rate": 0.1, "clip": 8.0}


def _figure4_arms(data: str, models: Mapping[str, str], size: Size) -> tuple[Arm, ...]:
    return tuple(arm for model, prefix in models.items() for arm in _figure4_of(data, model, prefix, size))


def _figure4_of(data: str, model: str, prefix: str, size: Size) -> Iterator[Arm]:
    targets = _FIGURE_4_TARGETS[data][size]
    own: dict[str, Any] = dict(_COVERTYPE) if data == "covertype" else {}
    if data == "covertype" and size == "full":
        own["sampling_rate"] = 0.001
    own |= {"epsilon": _TIGHT, "relation": "replace-one", "delta": _ROWS[data, size] ** -2.0}
    for epochs in targets:
        setting = partial(_setting, size, epochs, model, data, **own)
        yield Arm(f"{prefix}DP-SGD, {epochs} epochs", setting())
        yield Arm(f"{prefix}amended, {epochs} epochs", setting(momentum=MOMENTUM, clip_schedule=_SHRINK))
        if epochs == targets[len(targets) // 2]:
            both = {"momentum": MOMENTUM, "clip_schedule": "arithmetic:0.001"}
            yield Arm(f"{prefix}amended, arithmetic, {epochs} epochs", setting(**both))
            both = {"momentum": MOMENTUM, "clip_schedule": _SHRINK, "reading": "more-steps"}
            yield Arm(f"{prefix}amended, more steps, {epochs} epochs", setting(**both))


def _amended_above(prefix: str, outcomes: Outcomes) -> bool | None:
    pairs = [(arm, arm.replace("amended", "DP-SGD")) for arm in outcomes.arms if arm.startswith(f"{prefix}amended, ")]
    return every(
        outcomes.above(one, other, "accuracy") for one, other in pairs if outcomes.of(other)
    )  # the printed form: geometric, less noise


def _some_reach(prefix: str, value: float, outcomes: Outcomes) -> bool | None:
    found = [reaches(outcomes, arm, "accuracy", value) for arm in outcomes.arms if arm.startswith(f"{prefix}amended")]
    return True if True in found else None if None in found or not found else False


def _within_half(outcomes: Outcomes) -> bool | None:
    found = [trial["epsilon"] for arm in outcomes.arms for trial in outcomes.of(arm)]
    return every(epsilon <= _TIGHT for epsilon in found)


def _figure4_draw(prefixes: tuple[str, ...], outcomes: Outcomes, figure: "Figure") -> None:
    for axes, prefix in zip(figures.axes_of(figure, len(prefixes)), prefixes, strict=True):
        figures.curves(axes, outcomes, "step", "test_accuracy", [a for a in outcomes.arms if a.startswith(prefix)])
        figures.finish(axes, "step", "accuracy on test rows (%)", f"{prefix.strip(': ')}, ε = 0.5, replace-one")


_SHRINKS = (
    "The clip bound shrinks by 1/1000 a step down to half; printed without saying of what: taken as a factor 0.999 "
    "(geometric), and once as C/1000 (arithmetic). "
)
FIGURE_4_MNIST = Experiment(
    "yu2018-figure4-mnist", PAPER, "Figure 4, MNIST",
    "MNIST at ε = 0.5, δ = 1/n² = 2.8e-10 for replace-one neighbours, else as in Figure 2. " + _SHRINKS
    + "Target epochs are not printed: 5, 10 and 20, none picked. The paper does not say which network: both.",
    ("mnist",), partial(_figure4_arms, "mnist", {"yu2018-cnn": "CNN: ", "yu2018-softmax": "softmax: "}), _train,
    "accuracy", also=("steps", "noise_multiplier", "epsilon"), printed={"CNN: amended, 10 epochs": 91.5},
    draw=partial(_figure4_draw, ("CNN: ", "softmax: ")), after=(_NOISE,), settle=_settled,
    claims=(
        Claim("the amended algorithm is above DP-SGD, at all target epochs (CNN)", partial(_amended_above, "CNN: ")),
        Claim("the amended algorithm is above DP-SGD, at all target epochs (softmax)",
              partial(_amended_above, "softmax: ")),
        Claim("the amended algorithm reaches about 91.5 % (CNN, any of the target epochs)",
              partial(_some_reach, "CNN: ", 91.5)),
        Claim("every run is within ε = 0.5 for replace-one neighbours, certified", _within_half, certain=True),
    ),
)  # fmt: skip
FIGURE_4_COVERTYPE = Experiment(
    "yu2018-figure4-covertype", PAPER, "Figure 4, Covertype",
    "Covertype, 54-100-100-7 with tanh, η = 0.1, q = 0.001, C = 8 falling to 4, c = 0.6, ε = 0.5, δ = 1/n² for "
    "replace-one neighbours. " + _SHRINKS + "Target epochs, split and scaling of the columns are not printed: 2, 5 and "
    "10 epochs, 464,809 rows for training and 116,203 for test, columns mapped to [0, 1] by public bounds. The paper "
    "prints a curve and no number.",
    ("covertype",), partial(_figure4_arms, "covertype", {"yu2018-covertype": ""}), _train,
    "accuracy", also=("steps", "noise_multiplier", "epsilon"), draw=partial(_figure4_draw, ("",)),
    after=(_NOISE,), settle=_settled,
    claims=(
        Claim("the amended algorithm is above DP-SGD, at all target epochs", partial(_amended_above, "")),
        Claim("every run is within ε = 0.5 for replace-one neighbours, certified", _within_half, certain=True),
    ),
)  # fmt: skip


# The noise of every run of Figures 2 and 4: found once, for all seeds and both networks


def _noise_arms(size: Size) -> tuple[Arm, ...]:
    every_arm = [
        *_figure2_arms("yu2018-softmax", size), *FIGURE_4_MNIST.arms(size), *FIGURE_4_COVERTYPE.arms(size),
    ]  # fmt: skip
    budgets = [{name: arm.setting[name] for name in _BUDGET} for arm in every_arm]
    return tuple(Arm(name, budget) for name, budget in {_said(budget): budget for budget in budgets}.items())


def _said(budget: Mapping[str, Any]) -> str:
    schedule = f"{budget['clip_schedule']} clip, {budget['reading']}" if budget["clip_schedule"] else "constant clip"
    rate, steps = budget["sampling_rate"], budget["target_steps"]
    return f"ε = {budget['epsilon']:g}, q = {rate:g}, C = {budget['clip']:g}, {steps} steps, {schedule}"


def _noise_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    run, epsilon = mechanism(**arm.setting)
    return {"noise_multiplier": run.noise_multiplier, "steps": run.steps, "epsilon": epsilon}


NOISE = Experiment(
    _NOISE, PAPER, "σ̃ and steps of the runs of Figures 2 and 4",
    "The noise multiplier at the first step, to 0.01, and the number of steps of every run, certified by the PLD "
    "accountant. The figures take their noise from here.",
    (), _noise_arms, _noise_trial, "noise_multiplier", also=("steps", "epsilon"), seeds=1,
    claims=(Claim("every run is within ε = 2, certified", _within_budget, certain=True),),
)  # fmt: skip

EXPERIMENTS = (
    NOISE, READINGS, FIGURE_1, *(_figure2(model) for model in NETWORKS), FIGURE_3, FIGURE_4_MNIST, FIGURE_4_COVERTYPE,
)  # fmt: skip
