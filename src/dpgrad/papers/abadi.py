"""Abadi et al., "Deep Learning with Differential Privacy" (2016): what the moments accountant saves. Arithmetic alone.

The ε of one run by every accountant, the noise that each needs against the scaling laws of Theorem 1, the two savings
over strong composition, and the price of trying several settings. Training on MNIST is in `abadi_mnist`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dpgrad.accounting import ACCOUNTANTS, account, calibrate, historical
from dpgrad.accounting.events import Event, Gaussian, Poisson, Relation, Repeat
from dpgrad.papers import abadi_mnist, figures
from dpgrad.papers.abadi_mnist import PAPER
from dpgrad.papers.claims import every
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size
from dpgrad.tuning import prices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS"]

SAMPLING_RATE, NOISE, DELTA, STEPS = 0.01, 4.0, 1e-5, 10_000


def _run(noise: float, steps: int, sampling_rate: float = SAMPLING_RATE) -> Event:
    return Repeat(Poisson(sampling_rate, Gaussian(noise)), steps)


# ε of one run, and over steps

_PRICED = tuple(name for name in ACCOUNTANTS if name != "exact")  # which has no form for sampling
_PROVEN = ("pld", "rdp", "moments", "rdp-classic", "moments-closed", "strong")


def _epsilon_arms(size: Size) -> tuple[Arm, ...]:
    points = [100, 1000, STEPS] if size == "tiny" else [*range(100, 1000, 100), *range(1000, STEPS + 1, 500)]
    run = {"sampling_rate": SAMPLING_RATE, "noise_multiplier": NOISE, "delta": DELTA, "steps": points}
    return tuple(Arm(name, {"accountant": name, **run}) for name in _PRICED)


def _epsilon_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    one = arm.setting
    found = [
        float(account(_run(one["noise_multiplier"], steps, one["sampling_rate"]), accountant=one["accountant"])
              .epsilon(one["delta"]))
        for steps in one["steps"]
    ]  # fmt: skip
    return {"epsilon": found[-1], "step": list(one["steps"]), "epsilon_so_far": found}


def _below(one: str, other: str, outcomes: Outcomes) -> bool | None:
    """Whether the ε of one accountant is below that of another at every number of steps."""
    pairs = zip(outcomes.curve(one, "epsilon_so_far"), outcomes.curve(other, "epsilon_so_far"), strict=True)
    return every(a < b for a, b in pairs)


def _epsilon_draw(outcomes: Outcomes, figure: "Figure") -> None:
    axes = figure.add_subplot()
    figures.curves(axes, outcomes, "step", "epsilon_so_far")
    axes.set_yscale("log")
    figures.finish(axes, "steps", "ε at δ = 1e-5", "q = 0.01, σ = 4, by every accountant")


def _printed(arm: str, value: float, outcomes: Outcomes) -> bool | None:
    """Whether a figure rounds to what the paper prints."""
    return round(outcomes.mean(arm, "epsilon"), 2) == value if outcomes.of(arm) else None


EPSILON = Experiment(
    "abadi-epsilon", PAPER, "Section 3.1 and Figure 2, ε by the moments accountant and by strong composition",
    "ε of 10,000 steps at q = 0.01, σ = 4 and δ = 1e-5 by every accountant, and over the steps before. The paper's "
    "9.34 is strong composition with (qε, qδ) for a sampled step and the classical Gaussian beyond its range: no "
    "guarantee (strong-printed); in a form that holds ε is larger (strong). Nor is the leading term of the asymptotic "
    "bound a guarantee (moments-asymptotic): with less noise it is below the truth.",
    (), _epsilon_arms, _epsilon_trial, "epsilon", printed={"moments": 1.26, "strong-printed": 9.34}, seeds=1,
    draw=_epsilon_draw,
    claims=(
        Claim("the moments accountant gives ε ≈ 1.26", partial(_printed, "moments", 1.26), certain=True),
        Claim("strong composition, as printed, gives ε ≈ 9.34", partial(_printed, "strong-printed", 9.34),
              certain=True),
        Claim("the moments accountant is below strong composition as printed, at every number of steps",
              partial(_below, "moments", "strong-printed"), certain=True),
        Claim("the moments accountant is below strong composition in a form that holds, at every number of steps",
              partial(_below, "moments", "strong"), certain=True),
        Claim("today's accountant (pld) is below every other that is a guarantee, at every number of steps",
              lambda outcomes: every(_below("pld", other, outcomes) for other in _PROVEN[1:]), certain=True,
              kind="ours"),
    ),
)  # fmt: skip


# The noise that a budget needs, against the scaling laws

_SWEEPS: dict[str, tuple[float, ...]] = {
    "δ": (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10, 1e-12),
    "steps": (10_000, 30_000, 100_000, 300_000, 1_000_000),
    "ε": (0.125, 0.25, 0.5, 1.0),
}
_CALIBRATED = {"moments accountant": "rdp-classic", "strong composition": "strong", "pld": "pld"}


def _noise_arms(size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(f"{named}, over {over}", {"accountant": accountant, "over": over, "values": list(_few(values, size))})
        for named, accountant in _CALIBRATED.items()
        for over, values in _SWEEPS.items()
    )


def _few(values: Sequence[float], size: Size) -> Sequence[float]:
    return values[:: len(values) - 1] if size == "tiny" else values


def _noise_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """The least noise along one sweep, and how evenly it follows each law."""
    budgets = [_budget(arm.setting["over"], value) for value in arm.setting["values"]]
    noise = [
        calibrate.noise_multiplier(partial(_run, steps=steps), epsilon, delta, accountant=arm.setting["accountant"])
        for steps, epsilon, delta in budgets
    ]
    found: dict[str, Any] = {"value": list(arm.setting["values"]), "noise": noise}
    for name, law in (("moments", historical.moments_scale), ("strong", historical.strong_scale)):
        ratios = [z / law(SAMPLING_RATE, *budget) for z, budget in zip(noise, budgets, strict=True)]
        found |= {f"over_{name}_law": ratios, f"{name}_law_varies": max(ratios) / min(ratios)}
    return found


def _budget(over: str, value: float) -> tuple[int, float, float]:
    """Steps, ε and δ with one of them changed."""
    return (
        int(value) if over == "steps" else STEPS,
        value if over == "ε" else 1.0,
        value if over == "δ" else DELTA,
    )


def _follows(arm: str, law: str, times: float, outcomes: Outcomes) -> bool | None:
    """Whether the noise over a law varies by less than this factor along a sweep."""
    return outcomes.mean(arm, f"{law}_law_varies") < times if outcomes.of(arm) else None


def _closer(arm: str, law: str, other: str, outcomes: Outcomes) -> bool | None:
    """Whether the noise follows one law more closely than the other."""
    if not outcomes.of(arm):
        return None
    return outcomes.mean(arm, f"{law}_law_varies") < outcomes.mean(arm, f"{other}_law_varies")


def _saved(outcomes: Outcomes) -> bool | None:
    """Whether strong composition needs more noise than the moments accountant, the more so the smaller δ is."""
    strong, moments = (
        outcomes.curve(f"{named}, over δ", "noise") for named in ("strong composition", "moments accountant")
    )
    ratios = [a / b for a, b in zip(strong, moments, strict=True)]
    return every([*(ratio > 1 for ratio in ratios), *(a < b for a, b in pairwise(ratios))])


def _noise_draw(outcomes: Outcomes, figure: "Figure") -> None:
    panels = [(law, over) for law in ("moments", "strong") for over in _SWEEPS]
    for axes, (law, over) in zip(figures.axes_of(figure, len(panels)), panels, strict=True):
        figures.curves(axes, outcomes, "value", f"over_{law}_law", [f"{named}, over {over}" for named in _CALIBRATED])
        axes.set(xscale="log", ylim=(0, None))
        axes.minorticks_off()
        if over == "ε":
            axes.set_xticks(_SWEEPS[over], [f"{value:g}" for value in _SWEEPS[over]])
        scale = "q√(T·log(1/δ))/ε" if law == "moments" else "q√(T·log(1/δ)·log(T/δ))/ε"
        figures.finish(axes, over, f"σ over {scale}", "", legend=law == "moments")


NOISE_LAWS = Experiment(
    "abadi-noise", PAPER, "Theorem 1, noise against both scaling laws",
    "The least σ for (1, 1e-5) over 10,000 steps at q = 0.01, with one of δ, steps and ε changed, over "
    "q√(T·log(1/δ))/ε (moments law) and q√(T·log(1/δ)·log(T/δ))/ε (strong law). A law holds where the quotient is "
    "constant; shown is its largest over its smallest value along a sweep. The moments accountant is the tail bound "
    "over real Rényi orders (rdp-classic): with λ up to 32, as published, it has no price below ε = log(1/δ)/32. The "
    "laws are for ε below a constant times q²T, here 1. Strong composition is taken in a form that holds.",
    (), _noise_arms, _noise_trial, "moments_law_varies", also=("strong_law_varies",), seeds=1, draw=_noise_draw,
    claims=(
        *(Claim(f"with the moments accountant σ grows as q√(T·log(1/δ))/ε, within 5 % (over {over})",
                partial(_follows, f"moments accountant, over {over}", "moments", 1.05), certain=True)
          for over in _SWEEPS),
        Claim("with strong composition σ grows by a further √log(T/δ): over δ it follows the strong law more closely",
              partial(_closer, "strong composition, over δ", "strong", "moments"), certain=True),
        Claim("with strong composition σ grows by a further √log(T/δ): over steps it follows the strong law more "
              "closely", partial(_closer, "strong composition, over steps", "strong", "moments")),
        Claim("strong composition needs more noise than the moments accountant, the more so the smaller δ is", _saved,
              certain=True),
    ),
)  # fmt: skip


# The two savings: √log(1/δ) in ε, and Tq in δ

_STEP_EPSILON = 0.5  # of one step before sampling


def _savings_arms(size: Size) -> tuple[Arm, ...]:
    deltas, steps = _few(_SWEEPS["δ"], size), _few((100, 1000, STEPS, 100_000), size)
    setting = {"sampling_rate": SAMPLING_RATE, "step_epsilon": _STEP_EPSILON, "deltas": [*deltas], "steps": [*steps]}
    return tuple(Arm(named, {"way": named, **setting}) for named in _WAYS)


def _by_moments(sampling_rate: float, delta: float, steps: int) -> tuple[float, float]:
    """ε at δ, and δ: the moments accountant spends no more of δ, however many steps there are."""
    event = _run(historical.classical_gaussian(_STEP_EPSILON, delta), steps, sampling_rate)
    return float(account(event, accountant="rdp-classic").epsilon(delta)), delta


def _by_strong(sampling_rate: float, delta: float, steps: int) -> tuple[float, float]:
    """Strong composition of steps (ε₁, qδ): √(2T·log(1/δ))·ε₁ + Tε₁(e^ε₁ − 1) at Tqδ + δ."""
    one, each = historical.amplification(_STEP_EPSILON, delta, sampling_rate)
    return math.sqrt(-2 * steps * math.log(delta)) * one + steps * one * math.expm1(one), steps * each + delta


_WAYS: dict[str, Callable[[float, float, int], tuple[float, float]]] = {
    "moments accountant": _by_moments, "strong composition": _by_strong,
}  # fmt: skip


def _savings_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    one, way = arm.setting, _WAYS[arm.setting["way"]]
    rate = one["sampling_rate"]
    unit = rate * one["step_epsilon"] * math.sqrt(STEPS)
    parts = [way(rate, delta, STEPS)[0] / unit for delta in one["deltas"]]
    times = [way(rate, DELTA, steps)[1] / DELTA for steps in one["steps"]]
    return {
        "epsilon_part_grows": parts[-1] / parts[0], "delta_part": times[-1],
        "root_log": [math.sqrt(-math.log(delta)) for delta in one["deltas"]], "epsilon_part": parts,
        "steps_times_rate": [steps * rate for steps in one["steps"]], "delta_part_over_steps": times,
    }  # fmt: skip


def _epsilon_saved(outcomes: Outcomes) -> bool | None:
    """Whether ε by strong composition over that by moments grows as √log(1/δ), within 10 %."""
    moments, strong = (outcomes.curve(way, "epsilon_part") for way in _WAYS)
    roots = outcomes.curve("strong composition", "root_log")
    shares = [s / m / root for s, m, root in zip(strong, moments, roots, strict=True)]
    return every([max(shares) / min(shares) < 1.1]) if shares else None


def _delta_saved(outcomes: Outcomes) -> bool | None:
    """Whether δ by strong composition is Tq times that by moments, and once more for the composition itself."""
    moments, strong = (outcomes.curve(way, "delta_part_over_steps") for way in _WAYS)
    wanted = outcomes.curve("strong composition", "steps_times_rate")
    return every(
        math.isclose(large / small, 1 + want, rel_tol=1e-9)
        for small, large, want in zip(moments, strong, wanted, strict=True)
    )


def _savings_draw(outcomes: Outcomes, figure: "Figure") -> None:
    left, right = figures.axes_of(figure, 2)
    figures.curves(left, outcomes, "root_log", "epsilon_part")
    figures.finish(left, "√log(1/δ)", "ε over q·ε₀·√T", "The ε part")
    figures.curves(right, outcomes, "steps_times_rate", "delta_part_over_steps")
    right.set(xscale="log", yscale="log")
    figures.finish(right, "T·q", "δ of the run over δ of a step", "The δ part")


SAVINGS = Experiment(
    "abadi-savings", PAPER, "Section 3.1, the savings √log(1/δ) and Tq",
    "Steps of classical Gaussian noise √(2·log(1.25/δ))/ε₀ with ε₀ = 0.5 at q = 0.01: each is (ε₀, δ)-private before "
    "sampling. Shown are ε over q·ε₀·√T at T = 10,000, how much it grows from δ = 1e-3 to 1e-12, and the δ of the run "
    "over that of a step.",
    (), _savings_arms, _savings_trial, "epsilon_part_grows", also=("delta_part",), seeds=1, draw=_savings_draw,
    claims=(
        Claim("with the moments accountant the run is (O(q·ε₀·√T), δ)-private: the quotient stays as δ falls",
              lambda outcomes: abs(outcomes.mean("moments accountant", "epsilon_part_grows") - 1) < 0.02, certain=True),
        Claim("the moments accountant saves a factor √log(1/δ) in the ε part", _epsilon_saved, certain=True),
        Claim("the moments accountant saves a factor Tq in the δ part", _delta_saved, certain=True,
              kind="construction"),
    ),
)  # fmt: skip

# The price of choosing among settings

_COUNTS = (2, 5, 10, 20, 50, 100)
_ADDED, _GUPTA, _RANDOM = "all settings added up", "Gupta et al. (2010)", "best of a random number, logarithmic"
_EXTRA = 0.0625  # ε′ of Gupta et al., for which 8ε′ is ½
_FAILING = 0.05  # β, the probability that their search finds nothing good
_CHOICES = ("one trial", _ADDED, _GUPTA, "first to meet a target", _RANDOM, "best of a random number, geometric")


def _selection_arms(size: Size) -> tuple[Arm, ...]:
    run = {"sampling_rate": SAMPLING_RATE, "noise_multiplier": NOISE, "delta": DELTA, "steps": STEPS}
    return tuple(Arm(way, {"way": way, "settings": [*_few(_COUNTS, size)], **run}) for way in _CHOICES)


def _selection_trial(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """The ε of choosing among several numbers of settings by one way of paying for it."""
    one = arm.setting
    trial = _run(one["noise_multiplier"], one["steps"], one["sampling_rate"])
    found = []
    for count in one["settings"]:
        if one["way"] == _GUPTA:
            found.append(_as_cited(trial, count, one["delta"]))
            continue
        named = f"composition of {count:,} trials" if one["way"] == _ADDED else one["way"]
        asked = prices.price(trial, mean=count, delta=one["delta"], relation=Relation.ADD_REMOVE, settings=count)
        found.append(next(each.epsilon for each in asked if each.name == named))
    return {"epsilon": found[-1], "of_two_settings": found[0], "settings": list(one["settings"]), "epsilon_of": found}


def _as_cited(trial: Event, settings: int, delta: float) -> float:
    """ε + 8ε′ of Gupta et al. (2010, Theorem 10.2), as the paper cites it, with the δ of every call added up.

    With chance 1/settings of a good trial it makes (settings/ε′)·log(1/β) calls. No guarantee: docs/proofs/tuning.md.
    """
    calls = math.ceil(settings / _EXTRA * math.log(1 / _FAILING))
    return account(trial, Relation.ADD_REMOVE, "rdp").epsilon(delta / calls) + 8 * _EXTRA


def _cheaper(way: str, least: int, outcomes: Outcomes) -> bool | None:
    """Whether a way costs less than adding up, at every number of settings from ``least`` on."""
    counts = outcomes.curve(_ADDED, "settings")
    pairs = zip(counts, outcomes.curve(way, "epsilon_of"), outcomes.curve(_ADDED, "epsilon_of"), strict=True)
    return every(chosen < added for count, chosen, added in pairs if count >= least)


def _selection_draw(outcomes: Outcomes, figure: "Figure") -> None:
    axes = figure.add_subplot()
    figures.curves(axes, outcomes, "settings", "epsilon_of")
    axes.set(xscale="log")
    axes.minorticks_off()
    axes.set_xticks(_COUNTS, map(str, _COUNTS))
    figures.finish(axes, "settings", "ε at δ = 1e-5", "Choosing the best of several settings")


SELECTION = Experiment(
    "abadi-selection", PAPER, "Section 3.3, the price of trying several settings",
    "ε at δ = 1e-5 of choosing the best of 2 to 100 settings, each a run of 10,000 steps at q = 0.01 and σ = 4, and of "
    "one such run. Added up: every trial by the PLD accountant, and all may be looked at. Gupta et al., as the paper "
    "cites it: fails once in 20 searches, and is no guarantee (docs/proofs/tuning.md). The first to meet a target: the "
    "same search at the price that dpgrad proves, with as many trials as settings on average, as for the best of a "
    "random number of trials (Papernot and Steinke), which dpgrad.tuning runs. The column epsilon is that of 100 "
    "settings.",
    (), _selection_arms, _selection_trial, "epsilon", also=("of_two_settings",), seeds=1, draw=_selection_draw,
    claims=(
        Claim("a version of a result of Gupta et al. is better than adding up the settings, from 5 settings on",
              partial(_cheaper, _GUPTA, 5), certain=True),
        Claim("it is better at any number of settings", partial(_cheaper, _GUPTA, 2)),
        Claim("releasing the best of a random number of trials costs less than adding up, from 5 settings on",
              partial(_cheaper, _RANDOM, 5), certain=True, kind="ours"),
    ),
)  # fmt: skip

EXPERIMENTS = (EPSILON, NOISE_LAWS, SAVINGS, SELECTION, *abadi_mnist.EXPERIMENTS)
