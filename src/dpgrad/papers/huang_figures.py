"""Figures 2 to 9 of Huang et al., "Enhancing DP-SGD through non-monotonous adaptive scaling gradient weight" (2024)."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dpgrad.papers import figures
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS", "PAPER"]

PAPER = "Huang et al. 2024"

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
    PAPER,
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
        ),
        Claim(
            "the noisy sum of DP-PSASC is likely at a larger angle to the sum without privacy than that of clipping",
            lambda found: found.above("DP-SGD", "DP-PSASC", "cosine"),
        ),
    ),
    draw=_draw9,
    also=("longest",),
)

EXPERIMENTS: tuple[Experiment, ...] = (_FIGURE_9,)
