"""Tables II and III of Huang et al., "Enhancing DP-SGD through non-monotonous adaptive scaling gradient weight" (2024).

Table II prints N, batch size, epochs, r, C, ε and δ, and Table III the s that was found; learning rates and momentum
constants are not printed. They are searched here on a split of the training rows, in the paper's order: a learning rate
for each of DP-SGD, Auto-S and DP-PSAC (``huang-search-ROW``), then s for DP-PSASC at DP-PSAC's learning rate
(``huang-s-ROW``), then momentum for DP-PSASC* at that s (``huang-momentum-ROW``). The search is not charged.

A learning rate is given as ``step`` = η·sensitivity, the farthest that one example can move the weights, times the
batch size: η = step/C for DP-SGD and DP-PSAC, step for Auto-S, step·s/C for DP-PSASC.

Different from the paper: Poisson sampling with the certified accountant, where it draws batches of fixed size without
replacement and accounts as if they were Poisson. The channels of the CNN, and what ResNet-9 is, are not printed: ours
are in `dpgrad.training.models`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dpgrad.papers import figures, searching, tasks
from dpgrad.papers.experiment import Arm, Claim, Experiment, Outcomes, Place, Size
from dpgrad.training import models, plan, recipes
from dpgrad.training.diagnostics import Diagnostics
from dpgrad.training.fit import Fitted, fit
from dpgrad.training.options import HeldOut, Privacy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "EXPERIMENTS", "KEPT", "METHODS", "PAPER", "ROWS", "Row", "epochs_of", "rows_of", "searches", "setting", "settled",
    "train",
]  # fmt: skip

PAPER = "Huang et al. 2024"
METHODS = {
    "DP-SGD": "dpsgd", "Auto-S": "autos", "DP-PSAC": "psac", "DP-PSASC": "psasc", "DP-PSASC*": "psasc-momentum",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of Tables II and III: the printed settings and accuracies, and the steps that the search tries."""

    dataset: str
    title: str
    model: str
    rows: int
    batch_size: int
    epochs: int
    r: float
    clip: float
    epsilon: float
    delta: float
    s: float
    printed: tuple[float, ...]  # in the order of METHODS
    steps: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)


ROWS = {
    "mnist": Row(
        "mnist", "MNIST", "huang2024-cnn", 60_000, 512, 20, 1e-4, 0.3, 3.0, 1e-5, 0.9,
        (97.35, 97.95, 98.11, 98.37, 98.65),
    ),
    "fashion-mnist": Row(
        "fashion-mnist", "Fashion-MNIST", "huang2024-cnn", 40_000, 512, 60, 1e-3, 0.25, 9.0, 1e-5, 0.55,
        (85.59, 86.15, 86.36, 86.91, 87.22),
    ),
    "cifar10": Row(
        "cifar10-features", "CIFAR-10 on features", "linear", 50_000, 1024, 40, 1e-4, 0.1, 2.0, 1e-5, 0.8,
        (92.24, 92.65, 92.85, 93.12, 93.36), (0.5, 1.0, 2.0, 4.0),
    ),
    "cifar10-simclr": Row(
        "cifar10-simclr", "CIFAR-10 on SimCLRv2 features", "linear", 50_000, 1024, 40, 1e-4, 0.1, 2.0, 1e-5, 0.8,
        (92.24, 92.65, 92.85, 93.12, 93.36), (0.5, 1.0, 2.0, 4.0),
    ),
    "imagenette": Row(
        "imagenette64", "Imagenette", "resnet9", 9_464, 256, 50, 0.01, 0.2, 8.0, 1e-4, 0.8,
        (63.61, 63.87, 64.21, 65.26, 66.79), (0.25, 0.5, 1.0),
    ),
    "celeba": Row(
        "celeba", "CelebA [Male]", "resnet9", 162_079, 512, 10, 1e-4, 0.2, 8.0, 5e-6, 0.45,
        (94.79, 95.12, 95.2, 95.36, 95.61), (0.25, 0.5, 1.0),
    ),
}  # fmt: skip
SCALES = (0.45, 0.55, 0.7, 0.8, 0.9, 1.0)  # the s of Table III, and 1, which is DP-PSAC
_MOMENTA = ((0.5, 0.5, 1), (0.8, 0.5, 1), (0.9, 0.5, 1))  # outer momentum 1 − γ₁, γ₀, K₀
_POINTS = 8  # of the curves

# How an experiment is made small: training rows, test rows, epochs, batch size, and the model for the paper's.
_SMALL: dict[str, dict[str, Any]] = {
    "quick": {"rows": 2000, "test": 1000, "epochs": 3, "batch_size": 256},
    "tiny": {
        "rows": 600,
        "test": 200,
        "epochs": 2,
        "batch_size": 150,
        "model": "linear",
        "accountant": "rdp",
        "epsilon": 30.0,
        "step": 2.0,
    },
}
_SMALL_MODELS = {"huang2024-cnn": "cnn", "resnet9": "cnn"}


# ── Training ──


def setting(name: str, method: str, step: float, **others: Any) -> dict[str, Any]:
    """Everything that a trial of a row depends on: what Table II prints, the method and what was chosen.

    >>> setting("mnist", "psasc", 0.6)["s"]
    0.9
    """
    row = ROWS[name]
    scale = {"s": row.s} if method.startswith("psasc") else {}
    momenta = {"momentum": 0.8, "gamma": 0.5, "length": 1} if method == "psasc-momentum" else {}
    return {
        "row": name, "method": method, "step": step, **scale, **momenta, "model": row.model, "rows": row.rows,
        "batch_size": row.batch_size, "epochs": row.epochs, "r": row.r, "clip": row.clip, "epsilon": row.epsilon,
        "delta": row.delta, **others,
    }  # fmt: skip


def rows_of(given: Mapping[str, Any], place: Place) -> tasks.Loaded:
    """The rows of a trial: N of them, or a few where the experiment is small; a search has training rows alone."""
    small = _SMALL.get(place.size, {})
    rows = tasks.load(ROWS[given["row"]].dataset, place)
    rows = rows.few(small.get("rows", given["rows"]), small.get("test"))
    return rows.searched() if given.get("search") else rows


def epochs_of(given: Mapping[str, Any], size: Size) -> float:
    """How many epochs a trial has at a size.

    >>> epochs_of(setting("mnist", "psac", 1.0), "full")
    20
    """
    found: float = _SMALL.get(size, {}).get("epochs", given["epochs"])
    return found


def _recipe(given: Mapping[str, Any]) -> recipes.Recipe:
    """The method with its constants; the learning rate follows from ``step``."""
    method, clip, s = given["method"], given["clip"], given.get("s", 1.0)
    sensitivity = 1.0 if method == "autos" else clip / s
    rate = given["step"] / sensitivity * (1 - given.get("momentum", 0.0))
    own = {name: given[name] for name in ("s", "momentum", "gamma", "length") if name in given}
    if method != "autos":
        own["clip"] = clip
    if method != "dpsgd":
        own["r"] = given["r"]
    return recipes.recipe(method).with_options(learning_rate=rate, **own)


def train(
    given: Mapping[str, Any],
    rows: tasks.Loaded,
    seed: int,
    place: Place,
    diagnostics: Diagnostics | None = None,
    curve: bool = False,
) -> Fitted:
    """Train one arm with one seed; accuracy on the held-out rows is followed only where a curve is wanted."""
    small = _SMALL.get(place.size, {})
    paper = given["model"]
    name = paper if place.size == "full" else small.get("model", _SMALL_MODELS.get(paper, paper))
    torch.manual_seed(seed)
    model = models.build(name, rows.shape, rows.classes).to(place.device)
    epochs, batch = epochs_of(given, place.size), small.get("batch_size", given["batch_size"])
    steps = int(epochs * len(rows.y) / batch)
    held_out = HeldOut((rows.x_test, rows.y_test), evaluate_every=max(1, steps // _POINTS)) if curve else None
    with tasks.fast_products():
        fitted = fit(
            model,
            rows.train,
            epsilon=small.get("epsilon", given["epsilon"]),
            delta=given["delta"],
            epochs=epochs,
            batch_size=batch,
            method=_recipe({**given, "step": small.get("step", given["step"])}),
            held_out=held_out or HeldOut(evaluate_every=max(1, steps)),
            callbacks=() if diagnostics is None else diagnostics,
            seed=seed,
            privacy=Privacy(accountant=small.get("accountant", "pld")),
        )
    return tasks.whole(fitted)


def _trial(arm: Arm, seed: int, place: Place, curve: bool = False) -> dict[str, Any]:
    """One cell of Table III, or one candidate of a search."""
    rows = rows_of(arm.setting, place)
    fitted = train(arm.setting, rows, seed, place, curve=curve)
    found: dict[str, Any] = {
        "accuracy": tasks.accuracy(fitted.model, rows.x_test, rows.y_test),
        "epsilon": fitted.guarantee.epsilon,
        "budget": _SMALL.get(place.size, {}).get("epsilon", arm.setting["epsilon"]),
        "noise_multiplier": fitted.plan.mechanism.noise_multiplier,
        "steps": fitted.plan.steps,
        "chance": 100 * float(rows.y_test.bincount().max()) / len(rows.y_test),
    }
    if curve:
        found |= {
            "at": [point.epoch for point in fitted.curves if point.held_out is not None],
            "curve": [100 * point.held_out for point in fitted.curves if point.held_out is not None],
        }
    return found


# ── The search, in the paper's order ──


def searches(name: str) -> tuple[str, str, str]:
    """The names of the searches of a row: learning rates, s, momentum.

    >>> searches("mnist")
    ('huang-search-mnist', 'huang-s-mnist', 'huang-momentum-mnist')
    """
    return f"huang-search-{name}", f"huang-s-{name}", f"huang-momentum-{name}"


def settled(arm: Arm, earlier: Mapping[str, Outcomes]) -> Arm:
    """The arm with the constants that the searches before it chose; what none of them tried stays as it is."""
    given = dict(arm.setting)
    rates, scales, momenta = searches(given["row"])
    method, found, said = given["method"], dict[str, Any](), list[str]()
    whole = {rates: len(ROWS[given["row"]].steps), scales: len(_scale_arms(given["row"], "full")),
             momenta: len(_momentum_arms(given["row"], "full"))}  # fmt: skip

    def pick(search: str, of: str, *wanted: str) -> None:
        tried = earlier.get(search, Outcomes({}))
        chosen = searching.chosen(search, tried, of)
        found.update({each: chosen[each] for each in wanted if each in chosen})
        how = searching.told(search, tried, of, whole[search], "as printed, or the middle of the grid")
        said.append(f"{', '.join(wanted)}: {how}")

    if not method.startswith("psasc"):
        pick(rates, method, "step")
    else:
        if method == "psasc-momentum":
            pick(momenta, method, "step", "momentum", "gamma", "length")
        pick(scales, "psasc", "s", *(() if "momentum" in found else ("step",)))
    fixed = {each: given[each] for each in given.get("fixed", ())}
    return Arm(arm.name, given | found | fixed, "; ".join(said))


def _of_psac(arm: Arm, earlier: Mapping[str, Outcomes]) -> Arm:
    """s is tried at the learning rate of DP-PSAC, as in the paper: the step then grows as 1/s."""
    given = dict(arm.setting)
    rates, *_ = searches(given["row"])
    step = searching.chosen(rates, earlier[rates], "psac").get("step", given["step"])
    return Arm(arm.name, given | {"step": step / given["s"] if given["rate"] == "kept" else step})


def _at_s(arm: Arm, earlier: Mapping[str, Outcomes]) -> Arm:
    """Momentum is tried at the s that was found, and at factors of the step that goes with it."""
    given = dict(arm.setting)
    found = searching.chosen(searches(given["row"])[1], earlier[searches(given["row"])[1]], "psasc")
    return Arm(arm.name, given | {"s": found.get("s", given["s"]), "step": found.get("step", 1.0) * given["factor"]})


def _rate_arms(name: str, size: Size) -> tuple[Arm, ...]:
    tried = ROWS[name].steps if size != "tiny" else ROWS[name].steps[2:3]
    return tuple(
        Arm(f"{title}, step {step:g}", setting(name, METHODS[title], step, search=True))
        for title in ("DP-SGD", "Auto-S", "DP-PSAC")
        for step in tried
    )


def _scale_arms(name: str, size: Size) -> tuple[Arm, ...]:
    kept = [(s, "kept") for s in (SCALES if size != "tiny" else (0.5, 1.0))]
    same = [(s, "falls with s") for s in ((0.45, 0.7) if size != "tiny" else (0.5,))]
    return tuple(
        Arm(
            f"s = {s:g}" if rate == "kept" else f"s = {s:g}, same step",
            setting(name, "psasc", 1.0, search=True, rate=rate) | {"s": s},
        )
        for s, rate in [*kept, *same]
    )


def _momentum_arms(name: str, size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(
            f"momentum {momentum:g}, step × {factor:g}",
            setting(name, "psasc-momentum", 1.0, search=True, factor=factor)
            | {"momentum": momentum, "gamma": gamma, "length": length},
        )
        for momentum, gamma, length in (_MOMENTA if size != "tiny" else _MOMENTA[:1])
        for factor in ((0.5, 1.0) if size != "tiny" else (1.0,))
    )


def _matters_late(outcomes: Outcomes) -> bool | None:
    """Whether accuracy differs more between values of s at the end than after the first eighth of the run.

    By more than two standard errors over the seeds.
    """
    kept = [arm for arm in outcomes.arms if "same step" not in arm]
    seeds = zip(*([trial["curve"] for trial in outcomes.of(arm)] for arm in kept), strict=False)
    apart = [[max(column) - min(column) for column in zip(*curves, strict=False)] for curves in seeds]
    known = [{"early": found[0], "late": found[-1]} for found in apart if len(found) > 2]
    sides = {side: [{"apart": each[side]} for each in known] for side in ("early", "late")}
    return Outcomes(sides).above("late", "early", "apart")


def _draw_scales(outcomes: Outcomes, figure: "Figure") -> None:
    left, right = figures.axes_of(figure, 2, columns=2)
    for place, (kept, label) in enumerate(((True, "learning rate kept"), (False, "step kept: rate falls with s"))):
        arms = [arm for arm in outcomes.arms if ("same step" not in arm) == kept]
        points = sorted((float(arm.split(",")[0].removeprefix("s = ")), arm) for arm in arms)
        if points:
            means = [outcomes.mean(arm, "accuracy") for _, arm in points]
            errors = [outcomes.error(arm, "accuracy") for _, arm in points]
            errors = [0.0 if math.isnan(error) else 2 * error for error in errors]
            left.errorbar(
                [s for s, _ in points], means, yerr=errors, color=figures.COLOURS[place], marker="o", label=label
            )
        if points and kept:
            left.axvline(points[means.index(max(means))][0], color="#7F7F7F", linestyle="--", label="s*")
    figures.finish(left, "s", "accuracy on held-out training rows, %", "accuracy against s")
    figures.curves(right, outcomes, "at", "curve", [arm for arm in outcomes.arms if "same step" not in arm])
    figures.finish(right, "epoch", "accuracy on held-out training rows, %", "s early and late")


# ── Table III ──


def _table3_arms(name: str, size: Size) -> tuple[Arm, ...]:
    middle = ROWS[name].steps[len(ROWS[name].steps) // 2]
    return tuple(Arm(title, setting(name, method, middle)) for title, method in METHODS.items())


def _better(one: str, other: str) -> Claim:
    return Claim(f"{one} is more accurate than {other}", lambda found: found.above(one, other, "accuracy"))


def _within(outcomes: Outcomes) -> bool | None:
    """Whether every trial kept its ε."""
    spent = [outcomes.mean(arm, "epsilon") <= outcomes.of(arm)[0]["budget"] for arm in outcomes.arms]
    return all(spent) if spent else None


def _learns(outcomes: Outcomes) -> bool | None:
    """Whether every arm is well above the share of the most frequent class."""
    gains = [(outcomes.mean(arm, "accuracy"), outcomes.mean(arm, "chance")) for arm in outcomes.arms]
    return all(accuracy > chance + (100 - chance) / 4 for accuracy, chance in gains) if gains else None


_LEARNS = Claim("every arm learns: it is far better than the most frequent class", _learns, certain=True, kind="ours")
KEPT = Claim("every trial keeps its certified ε within the budget", _within, certain=True, kind="construction")
_ORDER = (
    *(_better(one, other) for other, one in pairwise(METHODS)),
    *(_better("DP-PSASC", other) for other in ("DP-SGD", "Auto-S")),
)


def _experiments(name: str) -> tuple[Experiment, ...]:
    """The three searches of a row, and the row."""
    row = ROWS[name]
    rates, scales, momenta = searches(name)
    common: dict[str, Any] = {"paper": PAPER, "needs": (row.dataset,), "figure": "accuracy"}
    split = "Accuracy on a sixth of the training rows that the fits did not see; the test rows are not used. "
    charged = f"Learning rates and momentum are not printed; {searching.NOT_CHARGED} ({rates}, {scales}, {momenta}). "
    sampled = (
        "Poisson sampling and certified accounting, where the paper draws batches of fixed size. Neighbours: the row "
        "of one person is set to zero (zero-out), so the number of rows is public."
    )
    instead = "MobileNetV2 features in place of SimCLRv2's. " if name == "cifar10" else ""
    return (
        Experiment(
            rates, item=f"search of learning rates, {row.title}", trial=_trial, arms=partial(_rate_arms, name), seeds=1,
            about=f"{split}step = η·sensitivity. {sampled}", claims=(_LEARNS, KEPT), **common,
        ),
        Experiment(
            scales, item=f"accuracy against s, {row.title}", trial=partial(_trial, curve=True),
            arms=partial(_scale_arms, name), seeds=2, after=(rates,), settle=_of_psac, draw=_draw_scales,
            about=f"{split}DP-PSASC at the learning rate of DP-PSAC, as in the paper, and with the rate lowered as s "
            "falls so that the largest step stays the same: s then acts only through r/s. "
            f"{sampled}",
            claims=(Claim("s has little influence early and much late", _matters_late), _LEARNS, KEPT), **common,
        ),
        Experiment(
            momenta, item=f"search of momentum, {row.title}", trial=_trial, arms=partial(_momentum_arms, name), seeds=1,
            after=(rates, scales), settle=_at_s, about=f"{split}DP-PSASC* at the s of the search before. {sampled}",
            claims=(_LEARNS, KEPT), **common,
        ),
        Experiment(
            f"huang-table3-{name}", item=f"Table III, {row.title}", trial=_trial, arms=partial(_table3_arms, name),
            printed=dict(zip(METHODS, row.printed, strict=True)), claims=(*_ORDER, _LEARNS, KEPT),
            after=(rates, scales, momenta), settle=settled, also=("epsilon", "noise_multiplier"),
            about=f"Settings of Table II. {instead}{charged}{sampled}", **common,
        ),
    )  # fmt: skip


# ── Table II ──


def _calibrated(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """The noise that the printed settings need, by the certified accountant and by RDP, which Opacus uses."""
    given = dict(arm.setting)
    wanted = {each: given[each] for each in ("epsilon", "delta", "epochs", "batch_size")}
    if place.size == "tiny":
        wanted["epochs"] = 1
    certified, loose = (
        plan.make("dpsgd", rows=given["rows"], **wanted, accountant=accountant) for accountant in ("pld", "rdp")
    )
    return {
        "noise_multiplier": certified.mechanism.noise_multiplier, "noise_by_rdp": loose.mechanism.noise_multiplier,
        "epsilon": certified.guarantee.epsilon, "budget": given["epsilon"], "steps": certified.steps,
        "sampling_rate": given["batch_size"] / given["rows"],
    }  # fmt: skip


def _table2_arms(size: Size) -> tuple[Arm, ...]:
    names = [name for name in ROWS if name != "cifar10-simclr"]
    wanted = ("rows", "batch_size", "epochs", "r", "clip", "epsilon", "delta")
    return tuple(
        Arm(ROWS[name].title, {each: getattr(ROWS[name], each) for each in wanted})
        for name in (names if size != "tiny" else names[-1:])
    )


_TABLE_2 = Experiment(
    "huang-table2",
    PAPER,
    "Table II",
    "The printed settings and the noise multiplier that they need with Poisson sampling, by the certified accountant "
    "and by Rényi accounting. Neighbours: a row is set to zero (zero-out), so n is public. The paper prints no noise.",
    (),
    _table2_arms,
    _calibrated,
    "noise_multiplier",
    claims=(
        KEPT,
        Claim(
            "the certified accountant needs less noise than Rényi accounting",
            lambda found: all(
                found.mean(arm, "noise_multiplier") < found.mean(arm, "noise_by_rdp") for arm in found.arms
            ),
            certain=True,
            kind="ours",
        ),
    ),
    seeds=1,
    also=("noise_by_rdp", "epsilon", "steps", "sampling_rate"),
)

EXPERIMENTS: tuple[Experiment, ...] = (_TABLE_2, *(one for name in ROWS for one in _experiments(name)))
