"""Yu et al., "Improve the Gradient Perturbation Approach" (2018): Figures 1 to 4 and the two readings of σ̃.

Momentum after the noise, and a clip bound that falls to half while the noise keeps its absolute size. Where the paper
does not print a setting, `about` of the experiment says what was chosen. Nothing here was tuned.

Batches are drawn by Poisson sampling and divided by their expected size, and ε is that of the PLD accountant; the paper
divides by the size of the batch drawn, which is private, and counts with the moments accountant.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dpgrad.accounting.historical import momentum_noise
from dpgrad.papers import figures, private_sgd, tasks, yu2018_noise
from dpgrad.papers.claims import best, every, gain, grows, reaches
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size
from dpgrad.papers.yu2018_noise import (
    AFTER,
    MIDDLE,
    PAPER,
    TARGETS,
    TIGHT,
    at,
    figure2_arms,
    figure4_arms,
    planned,
    settings_of,
    settled,
    within,
)
from dpgrad.training.models import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS"]

COEFFICIENTS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
NETWORKS = {"yu2018-cnn": "CNN", "yu2018-softmax": "softmax"}
_NOISELESS = 1e-6  # a noise multiplier that changes nothing, where nothing is private


def _train(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """Train one arm; its accuracy on test rows during the run and at its end."""
    setting = arm.setting
    rows, (run, epsilon) = private_sgd.rows(setting["data"], place).few(setting["rows"]), planned(setting)
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


# Figure 1


def _figure1_arms(size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(f"{named}, {how}", {**settings_of(size, MIDDLE[size], model), "private": how == "DP-SGD"})
        for model, named in NETWORKS.items()
        for how in ("DP-SGD", "without noise")
    )


def _figure1_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """The mean gradient norm of the same training rows in the course of a run."""
    setting = arm.setting
    rows, (run, _) = private_sgd.rows(setting["data"], place).few(setting["rows"]), planned(setting)
    torch.manual_seed(seed)
    model = build(setting["model"], rows.shape, rows.classes).to(place.device)
    probe = rows.few(1000).train
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


def _there(outcomes: Outcomes, variant: str) -> list[int]:
    """The target epochs at which a variant was run."""
    every_target = sorted({epochs for targets in TARGETS.values() for epochs in targets})
    return [epochs for epochs in every_target if outcomes.of(at(variant, epochs))]


def _improves(variant: str, outcomes: Outcomes) -> bool | None:
    return every(outcomes.above(at(variant, epochs), at("DP-SGD", epochs), "accuracy") for epochs in TARGETS["full"])


def _best_of_four(outcomes: Outcomes) -> bool | None:
    others = ("DP-SGD", "momentum", "falling clip, less noise")
    return every(
        best(outcomes, [at("both, less noise", epochs)], [at(other, epochs) for other in others], "accuracy")
        for epochs in TARGETS["full"]
    )


def _more_when_short(variant: str, outcomes: Outcomes) -> bool | None:
    """Whether the gain over DP-SGD is larger at the fewest target epochs than at the most."""
    least, *_, most = TARGETS["full"]
    few, many = (gain(outcomes, at(variant, epochs), at("DP-SGD", epochs), "accuracy") for epochs in (least, most))
    return grows(many, few)


def _lasts_longer(outcomes: Outcomes) -> bool | None:
    found = [trial for arm in outcomes.arms if "more steps" in arm for trial in outcomes.of(arm)]
    return every(trial["steps"] > trial["target_steps"] for trial in found)


def _needs_less(outcomes: Outcomes) -> bool | None:
    return every(
        outcomes.above(at("DP-SGD", epochs), at("both, less noise", epochs), "noise_multiplier", 0)
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
    Claim("every run is within ε = 2, certified", within, certain=True, kind="construction"),
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
        ("mnist",), partial(figure2_arms, model), _train, "accuracy", also=("steps", "noise_multiplier", "epsilon"),
        claims=_FIGURE_2_CLAIMS, draw=_figure2_draw, after=AFTER, settle=settled,
    )  # fmt: skip


# Figure 3


def _c(coefficient: float) -> str:
    return f"c = {coefficient:g}"


def _figure3_arms(size: Size) -> tuple[Arm, ...]:
    chosen = COEFFICIENTS if size != "tiny" else (0.0, 0.6, 0.9)
    return tuple(Arm(_c(c), settings_of(size, MIDDLE[size], momentum=c)) for c in chosen)


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
              certain=True, kind="construction"),
    ),
)  # fmt: skip


# Figure 4

_Arms = Callable[[Size], tuple[Arm, ...]]


def _amended_above(arms: _Arms, prefix: str, outcomes: Outcomes) -> bool | None:
    """The printed form, geometric with less noise, at every target."""
    plain = [arm.name for arm in arms("full") if arm.name.startswith(f"{prefix}DP-SGD, ")]
    return every(outcomes.above(name.replace("DP-SGD", "amended"), name, "accuracy") for name in plain)


def _some_reach(arms: _Arms, prefix: str, value: float, outcomes: Outcomes) -> bool | None:
    names = [arm.name for arm in arms("full") if arm.name.startswith(f"{prefix}amended")]
    found = [reaches(outcomes, name, "accuracy", value) for name in names]
    return True if True in found else None if None in found else False


def _within_half(outcomes: Outcomes) -> bool | None:
    found = [trial["epsilon"] for arm in outcomes.arms for trial in outcomes.of(arm)]
    return every(epsilon <= TIGHT for epsilon in found)


def _figure4_draw(prefixes: tuple[str, ...], outcomes: Outcomes, figure: "Figure") -> None:
    for axes, prefix in zip(figures.axes_of(figure, len(prefixes)), prefixes, strict=True):
        figures.curves(axes, outcomes, "step", "test_accuracy", [a for a in outcomes.arms if a.startswith(prefix)])
        figures.finish(axes, "step", "accuracy on test rows (%)", f"{prefix.strip(': ')}, ε = 0.5, replace-one")


_SHRINKS = (
    "The clip bound shrinks by 1/1000 a step down to half; printed without saying of what: taken as a factor 0.999 "
    "(geometric), and once as C/1000 (arithmetic). "
)
_ON_MNIST = partial(figure4_arms, "mnist", {"yu2018-cnn": "CNN: ", "yu2018-softmax": "softmax: "})
_ON_COVERTYPE = partial(figure4_arms, "covertype", {"yu2018-covertype": ""})
FIGURE_4_MNIST = Experiment(
    "yu2018-figure4-mnist", PAPER, "Figure 4, MNIST",
    "MNIST at ε = 0.5, δ = 1/n² = 2.8e-10 for replace-one neighbours, else as in Figure 2. " + _SHRINKS
    + "Target epochs are not printed: 5, 10 and 20, none picked. The paper prints 91.5 % "
    "for the amended algorithm without saying at which epochs or with which network: both are run.",
    ("mnist",), _ON_MNIST, _train,
    "accuracy", also=("steps", "noise_multiplier", "epsilon"),
    draw=partial(_figure4_draw, ("CNN: ", "softmax: ")), after=AFTER, settle=settled,
    claims=(
        Claim("the amended algorithm is above DP-SGD, at all target epochs (CNN)",
              partial(_amended_above, _ON_MNIST, "CNN: ")),
        Claim("the amended algorithm is above DP-SGD, at all target epochs (softmax)",
              partial(_amended_above, _ON_MNIST, "softmax: ")),
        Claim("the amended algorithm reaches about 91.5 % (CNN, any of the target epochs)",
              partial(_some_reach, _ON_MNIST, "CNN: ", 91.5)),
        Claim("every run is within ε = 0.5 for replace-one neighbours, certified", _within_half, certain=True,
              kind="construction"),
    ),
)  # fmt: skip
FIGURE_4_COVERTYPE = Experiment(
    "yu2018-figure4-covertype", PAPER, "Figure 4, Covertype",
    "Covertype, 54-100-100-7 with tanh, η = 0.1, q = 0.001, C = 8 falling to 4, c = 0.6, ε = 0.5, δ = 1/n² for "
    "replace-one neighbours. " + _SHRINKS + "Target epochs, split and scaling of the columns are not printed: 2, 5 and "
    "10 epochs, 464,809 rows for training and 116,203 for test, columns mapped to [0, 1] by public bounds. The paper "
    "prints a curve and no number.",
    ("covertype",), _ON_COVERTYPE, _train,
    "accuracy", also=("steps", "noise_multiplier", "epsilon"), draw=partial(_figure4_draw, ("",)),
    after=AFTER, settle=settled,
    claims=(
        Claim("the amended algorithm is above DP-SGD, at all target epochs",
              partial(_amended_above, _ON_COVERTYPE, "")),
        Claim("every run is within ε = 0.5 for replace-one neighbours, certified", _within_half, certain=True,
              kind="construction"),
    ),
)  # fmt: skip


EXPERIMENTS = (
    *yu2018_noise.EXPERIMENTS, FIGURE_1, *(_figure2(model) for model in NETWORKS), FIGURE_3, FIGURE_4_MNIST,
    FIGURE_4_COVERTYPE,
)  # fmt: skip
