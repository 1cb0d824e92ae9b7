"""Figures 2 to 9 of Huang et al., "Enhancing DP-SGD through non-monotonous adaptive scaling gradient weight" (2024).

Figures 2 to 8 come from diagnostics that are recorded over the last ten epochs of a run: one experiment per dataset
trains the four methods and draws every panel that the paper has of it. The diagnostics read the private rows without
noise: they explain, and are outside every guarantee.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dpgrad.papers import figures, huang
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size
from dpgrad.training.diagnostics import Diagnostics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ALIASES", "EXPERIMENTS"]

_BASELINES = ("DP-SGD", "Auto-S", "DP-PSAC")
_OURS = "DP-PSASC"
_LAST = 10  # epochs
_BINS = np.linspace(-1, 1, 41)  # of cosines, the same for every arm

# ── Figures 2 to 8: recorded diagnostics ──


def _recorded(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """Train with diagnostics of the last ten epochs, and keep what the figures show of them."""
    given = arm.setting
    epochs = huang.epochs_of(given, place.size)
    rows = huang.rows_of(given, place)
    last = min(_LAST, epochs / 2)
    fitted = huang.train(
        given, rows, seed, place, diagnostics=Diagnostics(last, probe=2 if place.size == "tiny" else 64)
    )
    assert fitted.diagnostics is not None
    found = fitted.diagnostics.report()
    steps = {name: np.array(values, dtype=float) for name, values in found["steps"].items()}
    by_epoch = np.array_split(np.arange(len(steps["step"])), max(1, round(last)))
    similarity = steps["gradient_similarity"]
    return {
        "similarity": float(np.nanmean(similarity)),
        "parameter_similarity": float(np.nanmean(steps["parameter_similarity"])),
        "weight": found["weight"]["mean"],
        "noise_relative_weight": found["noise_relative_weight"]["mean"],
        "norm": found["gradient_norm"]["mean"],
        "median_norm": found["gradient_norm"]["quantiles"]["0.5"],
        "share_fell": found["share_fell"]["mean"],
        "most_weight": _most_weight(given),
        "similarities": (np.histogram(similarity, _BINS)[0] / len(similarity)).tolist(),
        "parameter_similarities": found["parameter_similarity"]["histogram"],
        "norms": found["gradient_norm"]["histogram"],
        "epochs": [epochs - round(last) + 1 + place for place in range(len(by_epoch))],
        "weights": [float(steps["weight"][part].mean()) for part in by_epoch],
        "noise_relative_weights": [float(steps["noise_relative_weight"][part].mean()) for part in by_epoch],
    }


def _most_weight(given: Any) -> float:
    """The largest weight that the rule gives at any norm."""
    match given["method"]:
        case "dpsgd":
            return 1.0
        case "autos":
            return float(1 / given["r"])
    s, r = given.get("s", 1.0), given["r"]
    return float(given["clip"] / (1 - (1 - math.sqrt(s * r)) ** 2))


def _four(name: str, size: Size) -> tuple[Arm, ...]:
    steps = huang.ROWS[name].steps
    return tuple(
        Arm(title, huang.setting(name, huang.METHODS[title], steps[len(steps) // 2])) for title in (*_BASELINES, _OURS)
    )


def _panels(name: str, parameters: bool, outcomes: Outcomes, figure: "Figure") -> None:
    """Three panels of similarities, then norms, then weights raw and relative to the noise."""
    panels = figures.axes_of(figure, 9 if parameters else 6)
    for axes, other in zip(panels, _BASELINES, strict=False):
        middles = (_BINS[1:] + _BINS[:-1]) / 2
        for place, arm in enumerate((other, _OURS)):
            if arm in outcomes.arms:
                axes.step(
                    middles, outcomes.curve(arm, "similarities"), where="mid", color=figures.COLOURS[place], label=arm
                )
        figures.finish(axes, "cosine of noisy and plain gradient", "share of steps", f"{other} and {_OURS}")
    _histograms(panels[3], outcomes, "norms", (_OURS,))
    figures.finish(panels[3], "gradient norm", "share of examples", "norms in the last epochs")
    for axes, what, title in (
        (panels[4], "weights", "mean weight"),
        (panels[5], "noise_relative_weights", "mean weight relative to the noise"),
    ):
        figures.curves(axes, outcomes, "epochs", what, ("DP-PSAC", _OURS))
        figures.finish(axes, "epoch", title, title)
    for axes, other in zip(panels[6:], _BASELINES, strict=False):
        _histograms(axes, outcomes, "parameter_similarities", (other, _OURS))
        figures.finish(axes, "cosine of the weights after one step", "share of steps", f"{other} and {_OURS}")


def _histograms(axes: "Axes", outcomes: Outcomes, what: str, arms: tuple[str, ...]) -> None:
    """The histogram of the first trial of each arm."""
    for place, arm in enumerate(arms):
        if arm in outcomes.arms and outcomes.of(arm)[0][what]["edges"]:
            found = outcomes.of(arm)[0][what]
            axes.stairs(found["share"], found["edges"], color=figures.COLOURS[place], label=arm)


def _falls(outcomes: Outcomes) -> bool | None:
    curves = [outcomes.curve(arm, "weights") for arm in ("DP-PSAC", _OURS)]
    return None if any(len(curve) < 2 for curve in curves) else all(curve[-1] < curve[0] for curve in curves)


def _small_norms(outcomes: Outcomes) -> bool | None:
    means = [(outcomes.mean(arm, "median_norm"), outcomes.mean(arm, "norm")) for arm in outcomes.arms]
    return all(median < mean for median, mean in means) if means else None


def _bounded(outcomes: Outcomes) -> bool:
    return all(0 < t["weight"] <= t["most_weight"] * (1 + 1e-6) for arm in outcomes.arms for t in outcomes.of(arm))


def _at_most(other: str, outcomes: Outcomes) -> bool | None:
    above = outcomes.above(_OURS, other, "similarity")
    return None if above is None else not above


_CLAIMS = (
    Claim(
        "noisy gradients of DP-PSASC are more similar to the plain ones than those of DP-PSAC",
        lambda found: found.above(_OURS, "DP-PSAC", "similarity"),
    ),
    *(
        Claim(
            f"those of DP-PSASC are at most as similar as those of {other} (the paper: sometimes)",
            partial(_at_most, other),
        )
        for other in ("DP-SGD", "Auto-S")
    ),
    Claim("most gradients are small: the median norm is below the mean in the last epochs", _small_norms),
    Claim("DP-PSASC gives larger weights than DP-PSAC", lambda found: found.above(_OURS, "DP-PSAC", "weight")),
    Claim(
        "relative to its own noise, DP-PSASC gives smaller weights than DP-PSAC (Equation 7)",
        lambda found: found.above("DP-PSAC", _OURS, "noise_relative_weight"),
    ),
    Claim("mean weights fall over the last epochs", _falls),
    Claim("no mean weight exceeds the largest that its rule allows", _bounded, certain=True, kind="construction"),
)


def _diagnosed(number: int, name: str, item: str, parameters: bool = False) -> Experiment:
    row = huang.ROWS[name]
    return Experiment(
        f"huang-figure{number}",
        huang.PAPER,
        f"{item}, {row.title}",
        f"Diagnostics of the last {_LAST} epochs at the settings of Table III; the parameter similarity of Figure 7 is "
        "not defined in the paper and is read as the cosine of the weights after one step with and without privacy. "
        "Zero-out neighbours: n is public. Outside the guarantee: read from the training rows without noise.",
        (row.dataset,),
        partial(_four, name),
        _recorded,
        "similarity",
        claims=_CLAIMS,
        seeds=2,
        draw=partial(_panels, name, parameters),
        also=("weight", "noise_relative_weight", "norm", "median_norm", "share_fell", "parameter_similarity"),
        after=huang.searches(name),
        settle=huang.settled,
    )


_DIAGNOSED = (
    _diagnosed(3, "fashion-mnist", "Figures 2(a), 3 and 8"),
    _diagnosed(4, "mnist", "Figures 4 and 8"),
    _diagnosed(5, "cifar10", "Figures 5 and 8"),
    _diagnosed(6, "celeba", "Figures 2(b), 6 and 8"),
    _diagnosed(7, "imagenette", "Figures 7 and 8", parameters=True),
)
ALIASES = {
    "huang-figure2": ("huang-figure3", "huang-figure6"),
    "huang-figure8": tuple(one.name for one in _DIAGNOSED),
}

# ── Figure 9: two gradients, scaled, summed and perturbed ──

_GRADIENTS = ((1.6, 0.5), (0.25, 1.1))  # one long, one short: the picture has no numbers
_DRAWS = 10_000  # of the noise, in a trial


def _figure9(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """Scale two gradients by a rule, add one and the same noise relative to the sensitivity, and measure the angle."""
    import torch

    from dpgrad.grads.scaling import Hard, Psasc

    given = arm.setting
    rule = Hard() if given["rule"] == "clip" else Psasc(s=given["s"], r=given["r"])
    bound = given["clip"] if given["rule"] == "clip" else given["clip"] / given["s"]
    gradients = np.array(_GRADIENTS)
    norms = torch.from_numpy(np.linalg.norm(gradients, axis=1))
    scaled = gradients * rule(norms, bound).numpy()[:, None]
    noise = bound * given["noise_multiplier"] * np.random.default_rng(seed).standard_normal((_DRAWS, 2))
    totals, plain = scaled.sum(0) + noise, gradients.sum(0)
    cosines = totals @ plain / np.linalg.norm(totals, axis=1) / np.linalg.norm(plain)
    return {
        "cosine": float(cosines.mean()), "scaled": scaled.tolist(), "noisy": totals[:40].tolist(), "bound": bound,
        "longest": float(np.linalg.norm(scaled, axis=1).max()),
    }  # fmt: skip


def _figure9_arms(size: Size) -> tuple[Arm, ...]:
    common = {"clip": 1.0, "noise_multiplier": 0.5}
    return (
        Arm("DP-SGD", {"rule": "clip", **common}),
        Arm("DP-PSASC", {"rule": "psasc", "s": 0.6, "r": 0.1, **common}),
    )


def _draw9(outcomes: Outcomes, figure: "Figure") -> None:
    for axes, arm in zip(figures.axes_of(figure, 2, columns=2), ("DP-SGD", "DP-PSASC"), strict=True):
        trial = outcomes.of(arm)[0]
        plain = np.sum(_GRADIENTS, axis=0)
        arrows = [(*pair, "#7F7F7F", f"g{i + 1}") for i, pair in enumerate(_GRADIENTS)]
        arrows += [(*pair, figures.COLOURS[0], f"scaled g{i + 1}") for i, pair in enumerate(trial["scaled"])]
        arrows += [(*plain, "#000000", "sum without privacy")]
        axes.scatter(
            [x for x, _ in trial["noisy"]],
            [y for _, y in trial["noisy"]],
            s=8,
            color=figures.COLOURS[1],
            label="noisy sums",
        )
        for x, y, colour, label in arrows:
            axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": colour})
            axes.annotate(label, (x, y), fontsize=8, color=colour)
        turn = np.linspace(0, 2 * math.pi, 100)
        axes.plot(trial["bound"] * np.cos(turn), trial["bound"] * np.sin(turn), color="#BBBBBB", linestyle="--")
        axes.set_aspect("equal")
        axes.set(xlim=(-1.9, 2.6), ylim=(-1.9, 2.4))
        figures.finish(axes, "", "", f"{arm}: mean cosine {trial['cosine']:.3f}")


_FIGURE_9 = Experiment(
    "huang-figure9",
    huang.PAPER,
    "Figure 9",
    "Two gradients are scaled by clipping and by DP-PSASC, summed, and the same noise relative to the sensitivity is "
    "added. The paper's picture has no numbers: gradients (1.6, 0.5) and (0.25, 1.1), C = 1, s = 0.6, r = 0.1 and a "
    "noise multiplier of 0.5 are ours.",
    (),
    _figure9_arms,
    _figure9,
    "cosine",
    claims=(
        Claim(
            "no scaled gradient is longer than the sensitivity, C for clipping and C/s for DP-PSASC",
            lambda found: all(t["longest"] <= t["bound"] * (1 + 1e-6) for arm in found.arms for t in found.of(arm)),
            certain=True,
            kind="construction",
        ),
        Claim(
            "the noisy sum of DP-PSASC is likely at a larger angle to the sum without privacy than that of clipping",
            lambda found: found.above("DP-SGD", "DP-PSASC", "cosine"),
        ),
    ),
    draw=_draw9,
    also=("longest",),
)

EXPERIMENTS: tuple[Experiment, ...] = (*_DIAGNOSED, _FIGURE_9)
