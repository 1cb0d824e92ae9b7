"""Tables 1 to 4, Figures 1 and 2 and the ablation of Yu et al., "Gradient Perturbation is Underrated" (IJCAI 2020).

Fits are trials of `dpgrad.papers.convex`: replace-one neighbours, δ = 1/n², the benchmark's 80/20 split. As in the
paper, a solver's setting is the one of its grid with the best accuracy on the *test* split (``yu2020-grid-DATASET``),
and the choice is not charged. Table 4 is at ε = 0.1 (1 for several classes), Figure 2 from 0.03 to 3.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpgrad import data
from dpgrad.convex import bounds, curvature
from dpgrad.convex.losses import Logistic, Squared
from dpgrad.papers import convex, figures, searching
from dpgrad.papers.claims import every
from dpgrad.papers.experiment import Arm, ArmKind, Claim, Experiment, Outcomes, Place, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EPSILONS", "EXPERIMENTS", "FIGURE_2", "PAPER", "SOLVERS", "grid", "setting"]

PAPER = "Yu et al. 2020"
SOLVERS = {
    "non-private": "non-private", "AMP": "amp", "Out-SGD": "output", "DP-SGD": "sgd", "DP-GD": "gd",
    "auto (ours)": "auto",
}  # fmt: skip
# The seven datasets of the comparison, and Reuters, which stands in for the two of many columns.
EPSILONS = {
    "adult": 0.1, "mnist": 1.0, "covertype": 1.0, "gisette": 0.1, "kddcup99": 0.1, "real-sim": 0.1, "rcv1": 0.1,
    "reuters": 1.0,
}  # fmt: skip
SPARSE = ("reuters", "real-sim", "rcv1")
FIGURE_2 = (0.03, 0.1, 0.3, 1.0, 3.0)
CURVES = ("adult", "mnist", "real-sim", "rcv1", "reuters")
_TEST = "The setting of a solver with a grid is the best on the test split, as in the paper; tuning not charged. "


# ── Fits ──


@functools.lru_cache(maxsize=2)
def _task(name: str, root: Path | None) -> convex.Prepared:
    return convex.task(name, root)


@functools.lru_cache(maxsize=4)
def _outcome(trial: convex.FitTrial, root: Path | None, tiny: bool) -> convex.Scored:
    if tiny:
        return convex.outcome(_toy(), _generous(trial))
    return convex.outcome(_task(trial.dataset, root), trial)


@functools.cache
def _toy() -> convex.Prepared:
    """A small problem of two classes, for the tests."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((600, 4)).astype(np.float32)
    classes = (rows @ np.array([2.0, -1.0, 0.5, 0.0]) > 0).astype(int)
    return convex.Prepared("toy", rows[:500], 2 * classes[:500] - 1, Logistic(), rows[500:], classes[500:])


def _generous(trial: convex.FitTrial) -> convex.FitTrial:
    """A trial that learns from a few rows: the last setting of its grid, at a larger ε."""
    last = dict(grid("adult", trial.solver)[-1])
    given = {name: value for name, value in trial.setting if name in ("noise", "decay")}
    larger = None if trial.epsilon is None else 5.0  # beyond which AMP's conditions fail
    return replace(trial, epsilon=larger, setting=tuple({**last, **given}.items()))


def setting(dataset: str, solver: str, epsilon: float | None, options: convex.Setting = ()) -> dict[str, Any]:
    """Everything that a fit depends on besides its seed; "method" is what a grid chooses for.

    >>> setting("adult", "gd", 0.1, (("rate", 1.0),))["options"]
    {'rate': 1.0}
    """
    return {
        "dataset": dataset, "solver": solver, "epsilon": epsilon, "method": f"{solver} at {epsilon}",
        "options": dict(options),
    }  # fmt: skip


def _fit(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """One fit, and its figures on the test split."""
    given = arm.setting
    run = 0 if given["solver"] == "non-private" else seed  # nothing random is in it
    trial = convex.FitTrial(given["dataset"], given["solver"], given["epsilon"], tuple(given["options"].items()), run)
    found = _outcome(trial, place.data, place.size == "tiny")
    rows = _toy() if place.size == "tiny" else _task(given["dataset"], place.data)
    share = 100 * float(np.unique(rows.test_classes, return_counts=True)[1].max()) / len(rows.test_classes)
    return {"accuracy": found.accuracy, "auc": found.auc, "risk": found.risk, "largest_class": share}


def _code(arm: Arm) -> str:
    """The digest of the solver's code alone: another solver's change does not make a fit stale."""
    return convex.source_of(arm.setting["solver"])


def grid(dataset: str, solver: str) -> list[convex.Setting]:
    """The settings of a solver among which the paper takes the best.

    >>> len(grid("adult", "gd")), len(grid("adult", "auto"))
    (9, 1)
    """
    from scipy import sparse

    rows: Any = sparse.csr_array((1, 1)) if dataset in SPARSE else np.zeros((1, 1))
    return convex.SOLVERS[solver].grid(convex.Prepared(dataset, rows, rows, Logistic(), rows, rows))


def _grid_arms(dataset: str, size: Size) -> tuple[Arm, ...]:
    """Every setting of every grid at every ε that is shown."""
    found = []
    budgets = FIGURE_2 if dataset in CURVES and size == "full" else (EPSILONS[dataset],)
    for title, solver in SOLVERS.items():
        settings = grid(dataset, solver)
        if len(settings) == 1:
            continue
        few = settings if size == "full" else settings[-2:] if size == "quick" else settings[-1:]
        for epsilon in (None,) if solver == "non-private" else budgets:
            for options in few:
                words = convex.FitTrial(dataset, solver, epsilon, options).label
                at = "" if epsilon is None else f", ε = {epsilon:g}"
                found.append(Arm(f"{title}{at}: {words}", setting(dataset, solver, epsilon, options)))
    return tuple(found)


def _chosen(arm: Arm, earlier: Mapping[str, Outcomes]) -> Arm:
    """The arm with the best setting of the grid; the middle of the grid where it has not been run."""
    given = dict(arm.setting)
    search = _grid_name(given["dataset"])
    found = searching.chosen(search, earlier.get(search, Outcomes({})), given["method"])
    settings = grid(given["dataset"], given["solver"])
    options = found.get("options", dict(settings[len(settings) // 2]))
    how = "nothing to choose"
    if len(settings) > 1:
        tried = earlier.get(search, Outcomes({}))
        how = searching.told(search, tried, given["method"], len(settings), "the middle of the grid")
    return Arm(arm.name, given | {"options": {**options, **given["options"]}}, how)


def _grid_name(dataset: str) -> str:
    return f"yu2020-grid-{dataset}"


def _grid(dataset: str) -> Experiment:
    return Experiment(
        _grid_name(dataset), _titled(dataset, "Table 4"),
        f"grids of Table 4 and Figure 2, {dataset}", f"Every setting of the grids. {_TEST}"
        .strip(), (dataset,), partial(_grid_arms, dataset), _fit, "accuracy", seeds=1, source=_code,
        claims=(_learning(dataset),),
    )  # fmt: skip


def _titled(dataset: str, item: str) -> str:
    """The paper, or, for a dataset that it does not have, what of it we do alike."""
    return PAPER if dataset in convex.SHAPES else f"ours, as {item} of {PAPER}"


def _kind(dataset: str) -> ArmKind:
    return "paper" if dataset in convex.SHAPES else "ours"


# ── Table 4, Figure 2 and the ablation ──


# The share of the largest class among the test rows, in %: of trials that were made before it was recorded.
LARGEST_CLASS = {"adult": 75.8514, "mnist": 10.9308, "covertype": 48.7922, "reuters": 94.5741}


def _learns(dataset: str, outcomes: Outcomes) -> bool | None:
    """Whether the best setting of every solver is above the share of the largest class of the test rows."""
    best: dict[str, float] = {}
    shares = {share for arm in outcomes.arms for share in outcomes.values(arm, "largest_class")}
    share = max(shares, default=LARGEST_CLASS.get(dataset))
    for arm in outcomes.arms:
        title = arm.split(",")[0].split(":")[0]
        best[title] = max(best.get(title, 0.0), outcomes.mean(arm, "accuracy"))
    return None if share is None or not best else all(accuracy > share for accuracy in best.values())


def _learning(dataset: str) -> Claim:
    known = f" ({LARGEST_CLASS[dataset]:.2f} %)" if dataset in LARGEST_CLASS else ""
    text = f"every solver at its best is above the share of the largest class of the test rows{known}"
    return Claim(text, partial(_learns, dataset), kind="ours")


def _table4_arms(dataset: str, size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(title, setting(dataset, solver, None if solver == "non-private" else EPSILONS[dataset]))
        for title, solver in SOLVERS.items()
    )


# Gradient perturbation is to be ahead of the other kinds.
_GRADIENT_FIRST = tuple(product(("DP-GD", "DP-SGD"), ("AMP", "Out-SGD")))


def _table4(dataset: str) -> Experiment:
    printed = convex.PAPER.get(dataset, {})
    claims = tuple(
        Claim(
            f"{one} is more accurate than {other}",
            lambda found, a=one, b=other: found.above(a, b, "accuracy"),  # type: ignore[misc]
            kind=_kind(dataset),
        )
        for one, other in _GRADIENT_FIRST
    )
    return Experiment(
        f"yu2020-table4-{dataset}", _titled(dataset, "Table 4"), f"Table 4, {dataset}, ε = {EPSILONS[dataset]:g}",
        f"{_TEST}The noise of DP-GD is exact and that of DP-SGD certified, where the paper uses bounds. Auto has "
        "nothing to tune.",
        (dataset,), partial(_table4_arms, dataset), _fit, "accuracy",
        {title: printed[solver] for title, solver in SOLVERS.items() if solver in printed},
        (*claims, _learning(dataset)), seeds=20, also=("auc", "risk"), after=(_grid_name(dataset),), settle=_chosen,
        source=_code,
    )  # fmt: skip


def _figure2_arms(dataset: str, size: Size) -> tuple[Arm, ...]:
    budgets = FIGURE_2 if size != "tiny" else (EPSILONS[dataset],)
    private = [
        Arm(f"{title}, ε = {epsilon:g}", setting(dataset, solver, epsilon))
        for title, solver in SOLVERS.items()
        for epsilon in budgets
        if solver != "non-private"
    ]
    return (Arm("non-private", setting(dataset, "non-private", None)), *private)


def _draw2(outcomes: Outcomes, figure: "Figure") -> None:
    axes = figure.add_subplot()
    for place, title in enumerate(list(SOLVERS)[1:]):
        arms = [arm for arm in outcomes.arms if arm.startswith(f"{title}, ")]
        points = [(float(arm.rpartition(" = ")[2]), outcomes.mean(arm, "accuracy")) for arm in arms]
        if points:
            across, up = zip(*points, strict=True)
            axes.plot(across, up, marker=figures.MARKERS[place], color=figures.COLOURS[place], label=title)
    if "non-private" in outcomes.arms:
        axes.axhline(outcomes.mean("non-private", "accuracy"), color="#7F7F7F", linestyle="--", label="NP")
    axes.set_xscale("log")
    figures.finish(axes, "ε (replace-one, δ = 1/n²)", "test accuracy, %", "accuracy against ε")


def _rises(outcomes: Outcomes) -> bool | None:
    """Whether every solver is more accurate at its largest ε than at its smallest, by two standard errors."""
    least, most = min(FIGURE_2), max(FIGURE_2)
    return every(
        outcomes.above(f"{title}, ε = {most:g}", f"{title}, ε = {least:g}", "accuracy") for title in list(SOLVERS)[1:]
    )


def _ahead(outcomes: Outcomes) -> bool | None:
    return every(
        outcomes.above(f"{one}, ε = {epsilon:g}", f"{other}, ε = {epsilon:g}", "accuracy")
        for epsilon in FIGURE_2
        for one, other in _GRADIENT_FIRST
    )


def _figure2(dataset: str) -> Experiment:
    return Experiment(
        f"yu2020-figure2-{dataset}", _titled(dataset, "Figure 2"), f"Figure 2, {dataset}", f"{_TEST}At each ε anew.",
        (dataset,), partial(_figure2_arms, dataset), _fit, "accuracy",
        claims=(
            Claim("DP-GD and DP-SGD are more accurate than AMP and Out-SGD, at every ε", _ahead, kind=_kind(dataset)),
            Claim("accuracy is higher at ε = 3 than at ε = 0.03 for every solver", _rises, kind="ours"),
            _learning(dataset),
        ),
        draw=_draw2, after=(_grid_name(dataset),), settle=_chosen, source=_code,
    )  # fmt: skip


def _ablation_arms(size: Size) -> tuple[Arm, ...]:
    return tuple(
        Arm(
            f"noise by {noise}, rate {decay}",
            setting("adult", "sgd", EPSILONS["adult"]) | {"options": {"noise": noise, "decay": decay}},
        )
        for noise in ("bound", "accountant")
        for decay in ("constant", "halved")
    )


_ABLATION = Experiment(
    "yu2020-ablation", PAPER, "ablation of DP-SGD, adult, ε = 0.1",
    "DP-SGD at its best setting of the grid: noise by the closed-form bound of Iyengar et al. or by the accountant, "
    "learning rate constant or halved at T/2. The paper prints no figures.",
    ("adult",), _ablation_arms, _fit, "accuracy",
    claims=(
        Claim(
            "the accountant is better than the bound",
            lambda found: found.above("noise by accountant, rate halved", "noise by bound, rate halved", "accuracy"),
        ),
        Claim(
            "a learning rate that is halved at T/2 is better than a constant one",
            lambda found: found.above("noise by accountant, rate halved", "noise by accountant, rate constant",
                                      "accuracy"),
        ),
    ),
    seeds=20, after=(_grid_name("adult"),), settle=_chosen, source=_code,
)  # fmt: skip


# ── Tables 1, 2 and 3, Figure 1 ──

# Where the orders of Table 1 are compared: Adult's shape, rows of norm 1, logistic loss with l2 = 1e-4.
_ADULT = {"examples": 36_176, "dimension": 104, "smoothness": 0.25, "strong_convexity": 1e-4, "epsilon": 0.1}


def _orders(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """One row of Table 1 in numbers, with ν the average curvature tr(H)/p of rows of norm 1 at the start."""
    given = dict(arm.setting)
    nu = given["smoothness"] / given["dimension"]
    problem = bounds.Problem(given["examples"], given["dimension"], 1.0, given["smoothness"], nu, 1.0)
    found = {row.method: row for row in bounds.table_1(problem, given["strong_convexity"], given["epsilon"])}
    row = found[arm.name]
    known = [value for value in row[1:] if isinstance(value, float)]
    return {"least": min(known), "convex": row.convex, "strongly_convex": row.strongly_convex}


def _table1_arms(size: Size) -> tuple[Arm, ...]:
    problem = bounds.Problem(100, 10, 1.0, 0.25, 0.1, 1.0)
    return tuple(Arm(row.method, _ADULT) for row in bounds.table_1(problem, 1e-4, 1.0))


_TABLE_1 = Experiment(
    "yu2020-table1", PAPER, "Table 1",
    "The orders of the excess risk, without constants, at the shape of Adult (n = 36,176, p = 104), β = 1/4, μ = 1e-4, "
    "ε = 0.1 and ν = β/p, the average curvature of rows of norm 1 at the start. Orders are compared, not bounds.",
    (), _table1_arms, _orders, "least", seeds=1, also=("convex", "strongly_convex"),
    claims=(
        Claim(
            "gradient perturbation by expected curvature is no worse than any earlier gradient perturbation",
            lambda found: all(
                found.mean(f"{one}, expected curvature", "least") <= found.mean(other, "least")
                for one, other in (("DP-GD", "DP-GD, Jayaraman et al."), ("DP-SGD", "DP-SGD, Bassily et al."))
            ),
            certain=True,
        ),
    ),
)  # fmt: skip


def _regression() -> data.Dataset:
    """A small regression, for the tests."""
    random = np.random.default_rng(0)
    rows = random.uniform(size=(200, 4))
    targets = rows @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.1 * random.standard_normal(200)
    return data.Dataset("toy", rows, targets, rows[:0], targets[:0], None, "default", "none", ())


def _curved(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """Minimum, average and expected curvature of a dataset under the squared loss."""
    name = arm.setting["dataset"]
    found = _regression() if place.size == "tiny" else data.load(name, place.data, "yu2020")
    described = curvature.describe(found, Squared(float("inf")))
    return {
        "average": described.average, "minimum": described.minimum, "expected": dict(described.curve)[1.0],
        "noises": [noise for noise, _ in described.curve], "curve": [nu for _, nu in described.curve],
    }  # fmt: skip


def _table2_arms(size: Size) -> tuple[Arm, ...]:
    names = list(curvature.TABLE_2) if size != "tiny" else list(curvature.TABLE_2)[:1]
    return tuple(Arm(name, {"dataset": name, "printed_minimum": curvature.TABLE_2[name].minimum}) for name in names)


def _beyond(outcomes: Outcomes) -> bool | None:
    found = [(outcomes.mean(arm, "expected"), outcomes.mean(arm, "minimum")) for arm in outcomes.arms]
    return all(expected > least for expected, least in found) if found else None


def _draw1(outcomes: Outcomes, figure: "Figure") -> None:
    axes = figure.add_subplot()
    figures.curves(axes, outcomes, "noises", "curve")
    for place, arm in enumerate(outcomes.arms):
        axes.axhline(outcomes.mean(arm, "average"), color=figures.COLOURS[place], linestyle="--")
    axes.set_xscale("log")
    figures.finish(axes, "σ", "expected curvature ν (dashed: average)", "Figure 1: ν with varying σ at x = 0")


def _tends(outcomes: Outcomes) -> bool | None:
    """Whether ν comes within 1 % of the average at the largest noise."""
    ends = [(outcomes.curve(arm, "curve"), outcomes.mean(arm, "average")) for arm in outcomes.arms]
    return all(math.isclose(curve[-1], mean, rel_tol=0.01) for curve, mean in ends) if ends else None


def _nearly(name: str, outcomes: Outcomes) -> bool | None:
    if not outcomes.of(name):
        return None
    return outcomes.mean(name, "expected") >= 0.9 * outcomes.mean(name, "average")


_EXPECTED = Claim("the expected curvature at σ = 1 is above the minimum", _beyond, certain=True, kind="construction")
_TABLE_2 = Experiment(
    "yu2020-table2", PAPER, "Table 2",
    "Curvatures under the squared loss, columns scaled by their least and greatest value. "
    + " ".join(f"{name}: {told.difference}" for name, told in curvature.TABLE_2.items()),
    tuple(curvature.TABLE_2), _table2_arms, _curved, "average",
    {name: told.average for name, told in curvature.TABLE_2.items()},
    (_EXPECTED,), seeds=1, also=("minimum", "expected"),
)  # fmt: skip
_FIGURE_1 = Experiment(
    "yu2020-figure1", PAPER, "Figure 1",
    "The expected curvature by Eq. 5 at x = 0 with varying σ; the paper draws two of the datasets of Table 2, here are "
    "all four.",
    tuple(curvature.TABLE_2), _table2_arms, _curved, "expected",
    claims=(
        _EXPECTED, Claim("ν tends to the average curvature as σ grows", _tends),
        *(Claim(f"at σ = 1 ν is almost as large as the average curvature, nine tenths at least ({name})",
                partial(_nearly, name))
          for name in curvature.TABLE_2),
    ),
    seeds=1, draw=_draw1, also=("average",),
)  # fmt: skip


def _shape(arm: Arm, seed: int, place: Place) -> dict[str, Any]:
    """Rows, columns and classes as they are here; nothing where the files are absent."""
    name = arm.setting["dataset"]
    try:
        found = data.load(
            "digits" if place.size == "tiny" else name, place.data, None if place.size == "tiny" else "yu2020"
        )
    except data.MissingFileError:
        return {"rows": None, "columns": None, "classes": None, "here": False}
    flat = found.flat()
    rows = flat.x_train.shape[0] + flat.x_test.shape[0]
    return {"rows": rows, "columns": flat.x_train.shape[1], "classes": len(found.classes or ()), "here": True}


def _table3_arms(size: Size) -> tuple[Arm, ...]:
    shapes = convex.SHAPES.items()
    return tuple(Arm(name, {"dataset": name, "printed": list(shape)}) for name, shape in shapes)


def _as_printed(outcomes: Outcomes) -> bool | None:
    here = [arm for arm in outcomes.arms if outcomes.of(arm)[0]["here"]]
    return all(convex.SHAPES[arm][0] == outcomes.mean(arm, "rows") for arm in here) if here else None


_TABLE_3 = Experiment(
    "yu2020-table3", PAPER, "Table 3",
    "Shapes of the four datasets; one whose files are absent has no figure of ours.",
    (), _table3_arms, _shape, "rows", {name: float(shape[0]) for name, shape in convex.SHAPES.items()},
    (Claim("the datasets that are here have the printed number of rows", _as_printed),),
    seeds=1, also=("columns", "classes"),
)  # fmt: skip

EXPERIMENTS: tuple[Experiment, ...] = (
    _TABLE_1,
    _TABLE_2,
    _FIGURE_1,
    _TABLE_3,
    *map(_grid, EPSILONS),
    *map(_table4, EPSILONS),
    *map(_figure2, CURVES),
    _ABLATION,
)
