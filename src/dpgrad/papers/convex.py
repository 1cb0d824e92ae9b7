"""Table 4, Figure 2 and the ablation of Yu et al., "Gradient Perturbation is Underrated" (IJCAI 2020): every solver.

A *trial* is one fit of one solver with one setting on one dataset at one ε; its outcome is a few figures of the test
split. Replace-one neighbours, δ = 1/n². DP-GD and DP-SGD take the rows as they are and clip gradients, as in the paper;
the others take rows of norm 1. Only `auto` and "gd-intercept" fit an intercept; the latter is there because the paper
does not say whether its DP-GD does.

Guarantee: of each fit, the (ε, δ) it was given. Its outcome is not private: accuracy is measured on test rows, and the
excess risk on the private ones.

>>> FitTrial("adult", "gd", 0.1, (("rate", 1.0), ("steps", 50)), run=0).label
'rate=1 steps=50'
"""

import functools
import itertools
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpgrad import data
from dpgrad.accounting.events import Event, Relation
from dpgrad.convex.curvature import Objective
from dpgrad.convex.design import Design, Matrix
from dpgrad.convex.losses import Array, Logistic, Softmax, Targets
from dpgrad.convex.solvers import amp, auto, gd, objective, output, sgd
from dpgrad.convex.solvers.perturbed import Perturbation
from dpgrad.errors import OptionError
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.sampling import Poisson
from dpgrad.papers import sources

__all__ = [
    "L2",
    "PAPER",
    "RELATION",
    "SAMPLING_RATE",
    "SHAPES",
    "SOLVERS",
    "STEPS",
    "UNBOUNDED",
    "FitTrial",
    "Model",
    "Prepared",
    "Scored",
    "Setting",
    "SolverGrid",
    "auc",
    "bound_multiplier",
    "judged",
    "outcome",
    "source_of",
    "task",
]  # fmt: skip

RELATION = Relation.REPLACE_ONE
STEPS = (50, 200, 800)
L2 = 1e-4
UNBOUNDED = 1e6  # a radius that no row here reaches
SAMPLING_RATE = 0.1
# Table 4: accuracy in %, at ε = 1 on MNIST and 0.1 on the others.
PAPER: dict[str, dict[str, float]] = {
    "adult": {"non-private": 84.8, "amp": 79.3, "output": 77.4, "sgd": 80.4, "gd": 80.9, "gd-intercept": 80.9},
    "mnist": {"non-private": 91.9, "amp": 71.9, "output": 69.4, "sgd": 87.5, "gd": 88.6, "gd-intercept": 88.6},
    "real-sim": {"non-private": 93.3, "amp": 73.1, "output": 73.2, "sgd": 73.8, "gd": 76.1, "gd-intercept": 76.1},
    "rcv1": {"non-private": 93.5, "amp": 64.5, "output": 66.7, "sgd": 70.4, "gd": 74.9, "gd-intercept": 74.9},
}
# Table 3: rows, columns and classes.
SHAPES: dict[str, tuple[int, int, int]] = {
    "adult": (45_220, 104, 2), "mnist": (65_000, 784, 10), "real-sim": (72_309, 20_958, 2), "rcv1": (50_000, 47_236, 2),
}  # fmt: skip
Setting = tuple[tuple[str, float | str], ...]


@dataclass(frozen=True)
class FitTrial:
    """One fit: which solver, on what, at which ε (None where nothing is private), how set, and the number of the run.

    >>> FitTrial("adult", "auto", 0.1).seed == FitTrial("adult", "auto", 0.1, run=1).seed
    False
    """

    dataset: str
    solver: str
    epsilon: float | None
    setting: Setting = ()
    run: int = 0

    @property
    def label(self) -> str:
        """The setting in words."""
        return " ".join(f"{name}={value if isinstance(value, str) else f'{value:g}'}" for name, value in self.setting)

    @property
    def seed(self) -> int:
        """The seed of its noise, another one for each trial."""
        return zlib.crc32(repr(self).encode())


@dataclass(frozen=True)
class Scored:
    """What a trial gave: accuracy in %, area under the ROC curve (two classes), empirical risk, seconds of CPU.

    The risk is F(w), the mean loss with l2 = 1e-4, on rows as the solver took them (raw or of norm 1). ``source`` is
    the digest of the code of the solver (`source_of`), None where it was not kept or the solver is another library's.
    """

    trial: FitTrial
    accuracy: float
    auc: float | None
    risk: float
    seconds: float
    source: str | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset as the solvers get it: rows, targets of the loss, and the test split."""

    name: str
    rows: Matrix = field(repr=False)
    targets: Targets = field(repr=False)
    loss: Logistic | Softmax
    test_rows: Matrix = field(repr=False)
    test_classes: NDArray[Any] = field(repr=False)

    def within(self, radius: float, intercept: float = 0.0) -> Design:
        """The training rows clipped to a norm, with a constant column where there is an intercept."""
        return _within(self, radius, intercept)

    def objective(self, design: Design) -> Objective:
        """F on these rows."""
        return Objective(self.loss, design, self.targets, L2)

    @property
    def delta(self) -> float:
        """δ = 1/n²."""
        return float(len(self.targets)) ** -2

    @property
    def sparse(self) -> bool:
        """Whether it is one of the paper's high-dimensional datasets, which have a grid of their own."""
        return not isinstance(self.rows, np.ndarray)


@functools.cache
def _within(task: Prepared, radius: float, intercept: float) -> Design:
    return Design(task.rows, radius=radius, intercept=intercept)


def task(name: str, root: Path | str | None = None) -> Prepared:
    """The dataset of a table by name; "covertype-binary" is its second class against the rest.

    >>> len(task("digits").targets)
    1437
    """
    source = name.removesuffix("-binary")
    recipe = "yu2020" if "yu2020" in data.preprocessings(source) else None
    found = data.load(source, root, recipe).flat()
    y_train, y_test = found.y_train, found.y_test
    classes = len(found.classes or ())
    if source != name:
        y_train, y_test, classes = (y_train == 1).astype(int), (y_test == 1).astype(int), 2
    if classes < 2:
        raise OptionError(f"{name} has no classes: the tables compare classifiers")
    loss = Logistic() if classes == 2 else Softmax(classes)
    targets = 2 * y_train - 1 if classes == 2 else y_train
    return Prepared(
        name, found.x_train.astype(np.float32), targets, loss, found.x_test.astype(np.float32), np.asarray(y_test)
    )


# ── solvers: each gives coefficients, intercept and the rows they are for ──

Model = tuple[Array, Array, Design]


def _gd(task: Prepared, trial: FitTrial) -> Model:
    given = dict(trial.setting)
    steps, clip, constant = int(given["steps"]), float(given["clip"]), float(given.get("intercept", 0))
    design = _rows(task, trial)
    mechanism = gd.calibrated(
        design.rows, steps, clip=clip, epsilon=_epsilon(trial), delta=task.delta, relation=RELATION
    )
    found, _ = gd.solve(
        task.within(design.radius, constant), task.targets, task.loss, mechanism,
        learning_rate=float(given["rate"]), l2=L2, key=trial.seed,
    )  # fmt: skip
    return (found[:-1], constant * found[-1], design) if constant else _plain(found, design)


def _sgd(task: Prepared, trial: FitTrial) -> Model:
    """DP-SGD; ``noise`` is "accountant" or "bound", ``decay`` is "halved" or "constant"."""
    given = dict(trial.setting)
    steps, rate = int(given["steps"]), float(given["rate"])
    design = _rows(task, trial)
    mechanism = _sampled(
        design.rows, steps, float(given["clip"]), _epsilon(trial), str(given.get("noise", "accountant"))
    )
    rates = rate if given.get("decay") == "constant" else sgd.halved(rate, steps)
    found, _ = sgd.solve(design, task.targets, task.loss, mechanism, learning_rate=rates, l2=L2, key=trial.seed)
    return _plain(found, design)


@functools.cache
def _sampled(rows: int, steps: int, clip: float, epsilon: float, noise: str) -> Mechanism:
    delta = float(rows) ** -2
    if noise == "accountant":
        return sgd.calibrated(
            rows, steps, sampling_rate=SAMPLING_RATE, clip=clip, epsilon=epsilon, delta=delta, relation=RELATION
        )
    return Mechanism(
        Poisson(SAMPLING_RATE), steps, bound_multiplier(steps, epsilon, delta), clip,
        relation=RELATION, batch_size=SAMPLING_RATE * rows,
    )  # fmt: skip


def bound_multiplier(steps: int, epsilon: float, delta: float) -> float:
    """The noise multiplier of Iyengar et al.'s DP-SGD: std 4L·√(T·log(1/δ))/(n·ε) on the mean of a batch of q·n rows.

    It is the ablation's "bound"; no accountant asks for as much here.

    >>> round(bound_multiplier(200, 0.1, 36176**-2.0), 1)
    259.2
    """
    return 4 * SAMPLING_RATE * math.sqrt(steps * math.log(1 / delta)) / epsilon


def _auto(task: Prepared, trial: FitTrial) -> Model:
    found = auto.solve(
        task.rows, task.targets, task.loss,
        epsilon=_epsilon(trial), delta=task.delta, relation=RELATION, key=trial.seed,
    )  # fmt: skip
    return found.coef, found.intercept, task.within(1.0)  # no row here is shorter: normalising is clipping


def _amp(task: Prepared, trial: FitTrial) -> Model:
    """AMP; "amp-published" has the ridge of its authors' code, whose curvature is L² for every loss."""
    given = dict(trial.setting)

    def plan(design: Design, loss: Logistic, models: int) -> Perturbation:
        common = _common(task, trial, design, models)
        if "noise_share" not in given:
            free = amp.tuning_free(design.rows, loss, **common)
            if trial.solver == "amp-free":
                return free
            beyond = loss.lipschitz(design.bound) ** 2 / loss.smoothness(design.bound)
            return amp.tuning_free(design.rows, loss, **common, ridge=beyond * free.ridge)
        noise_share, output_share = float(given["noise_share"]), float(given["output_share"])
        return amp.calibrated(design.rows, loss, **common, noise_share=noise_share, output_share=output_share)

    return _against_the_rest(task, trial, Logistic(), plan, amp.solve)


def _objective(task: Prepared, trial: FitTrial) -> Model:
    def plan(design: Design, loss: Logistic, models: int) -> Perturbation:
        return objective.calibrated(design.rows, loss, **_common(task, trial, design, models))

    return _against_the_rest(task, trial, Logistic(float(dict(trial.setting)["slope"])), plan, objective.solve)


def _output(task: Prepared, trial: FitTrial) -> Model:
    given = dict(trial.setting)
    batch = int(given.get("batch", len(task.targets)))

    def plan(design: Design, loss: Logistic, models: int) -> output.Descent:
        rate = None if "l2" in given else float(given.get("rate", 1 / loss.smoothness(design.bound)))
        return output.calibrated(
            design.rows, loss, **_common(task, trial, design, models),
            passes=int(given["passes"]), batch_size=batch, learning_rate=rate, l2=float(given.get("l2", 0)),
        )  # fmt: skip

    return _against_the_rest(task, trial, Logistic(), plan, output.solve)


def _common(task: Prepared, trial: FitTrial, design: Design, models: int) -> dict[str, Any]:
    return {
        "radius": design.bound, "epsilon": _epsilon(trial), "delta": task.delta, "relation": RELATION, "models": models,
    }  # fmt: skip


_Planned = TypeVar("_Planned")


def _against_the_rest(
    task: Prepared,
    trial: FitTrial,
    loss: Logistic,
    plan: Callable[[Design, Logistic, int], _Planned],
    solve: Callable[..., tuple[Array, Event]],
) -> Model:
    """One fit for two classes, else one per class against the rest, which share the budget."""
    design = _rows(task, trial)
    if isinstance(task.loss, Logistic):
        return _plain(solve(design, task.targets, loss, plan(design, loss, 1), key=trial.seed)[0], design)
    shared = plan(design, loss, task.loss.classes)
    parts = [
        solve(design, np.where(task.targets == k, 1, -1), loss, shared, key=f"{trial.seed} {k}".encode())[0]
        for k in range(task.loss.classes)
    ]
    return _plain(np.hstack(parts), design)


def _non_private(task: Prepared, trial: FitTrial) -> Model:
    """The minimiser of F, which gives the risk that others exceed."""
    design = _rows(task, trial)
    return _plain(_minimised(task.objective(design), 3000), design)


def _minimised(objective: Objective, most: int) -> Array:
    from scipy.optimize import minimize

    def both(flat: Array) -> tuple[float, Array]:
        w = flat.reshape(objective.shape)
        return objective.value(w), objective.gradient(w).ravel()

    start = np.zeros(objective.dimension)
    found = minimize(both, start, jac=True, method="L-BFGS-B", options={"maxiter": most, "gtol": 1e-7, "maxcor": 30})
    return np.asarray(found.x).reshape(objective.shape)


def _plain(coefficients: Array, design: Design) -> Model:
    return coefficients, np.zeros(coefficients.shape[1]), design


def _rows(task: Prepared, trial: FitTrial) -> Design:
    given = dict(trial.setting)
    return task.within(UNBOUNDED if given.get("rows") == "raw" else float(given.get("radius", 1.0)))


def _epsilon(trial: FitTrial) -> float:
    if trial.epsilon is None:
        raise OptionError(f"{trial.solver} needs an epsilon")
    return trial.epsilon


def _rates(task: Prepared) -> tuple[float, ...]:
    return (0.2, 2.0, 10.0) if task.sparse else (0.1, 1.0, 5.0)


def _descent_grid(task: Prepared, factor: float = 1.0) -> list[Setting]:
    """The paper's grid; DP-SGD's learning rates are twice those of DP-GD."""
    clip = 0.5 if task.sparse else 1.0
    return [
        (("rows", "raw"), ("clip", clip), ("rate", factor * rate), ("steps", steps))
        for steps in STEPS
        for rate in _rates(task)
    ]


def _intercept_grid(task: Prepared) -> list[Setting]:
    """The paper's grid of DP-GD with a column of ones."""
    return [(*setting, ("intercept", 1.0)) for setting in _descent_grid(task)]


def _product(**values: Sequence[float]) -> list[Setting]:
    return [tuple(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _amp_grid() -> list[Setting]:
    """The published grid."""
    shares = {"noise_share": (0.9, 0.95, 0.98, 0.99), "output_share": (0.001, 0.01, 0.1, 0.5)}
    return _product(radius=(0.1, 1, 10), **shares)


def _output_grid() -> list[Setting]:
    """The published grid where a step is stable, but for 100 passes (10 at ten times the rate cost the same noise)."""
    convex = _product(radius=(0.1, 1, 10), batch=(50,), rate=(0.001, 0.01, 0.1), passes=(5, 10))
    stable = [s for s in convex if float(dict(s)["rate"]) <= 2 / Logistic().smoothness(float(dict(s)["radius"]))]
    return stable + _product(batch=(50,), l2=(1e-4, 1e-3, 1e-2), passes=(5,))


@dataclass(frozen=True)
class SolverGrid:
    """How a solver fits, and the settings among which the best is taken."""

    fit: Callable[[Prepared, FitTrial], Model]
    grid: Callable[[Prepared], list[Setting]]


SOLVERS: dict[str, SolverGrid] = {
    "non-private": SolverGrid(_non_private, lambda _: [(("rows", "raw"),), (("rows", "unit"),)]),
    "auto": SolverGrid(_auto, lambda _: [()]),
    "gd": SolverGrid(_gd, _descent_grid),
    "gd-intercept": SolverGrid(_gd, _intercept_grid),
    "sgd": SolverGrid(_sgd, functools.partial(_descent_grid, factor=2.0)),
    "amp": SolverGrid(_amp, lambda _: _amp_grid()),
    "amp-free": SolverGrid(_amp, lambda _: [()]),
    "amp-published": SolverGrid(_amp, lambda _: [()]),
    "output": SolverGrid(_output, lambda _: _output_grid()),
    "output-full": SolverGrid(_output, lambda _: _product(passes=(10, 50, 200))),
    "objective": SolverGrid(_objective, lambda _: _product(slope=(0.25, 0.5, 1.0))),
}


# ── running ──


def outcome(task: Prepared, trial: FitTrial) -> Scored:
    """The figures of one trial."""
    began = time.process_time()
    model = SOLVERS[trial.solver].fit(task, trial)
    found = judged(task, trial, model, time.process_time() - began)
    return replace(found, source=source_of(trial.solver))


def source_of(solver: str) -> str:
    """The digest of the code that the trials of a solver depend on.

    >>> source_of("amp") == source_of("amp-free") != source_of("gd")
    True
    """
    module = "curvature" if solver == "non-private" else f"solvers.{solver.partition('-')[0]}"
    return sources.digest(f"dpgrad.convex.{module}")


def judged(task: Prepared, trial: FitTrial, model: Model, seconds: float) -> Scored:
    """The figures of a model, however it was found."""
    coefficients, intercept, design = model
    scores = Design(task.test_rows, radius=design.radius).scores(coefficients) + intercept
    binary = scores.shape[1] == 1
    guesses = (scores[:, 0] > 0).astype(int) if binary else scores.argmax(axis=1)
    targets = task.loss.checked(task.targets, design.rows)
    risk = task.loss.values(design.scores(coefficients) + intercept, targets).mean()
    return Scored(
        trial,
        accuracy=100 * float(np.mean(guesses == task.test_classes)),
        auc=auc(scores[:, 0], task.test_classes == 1) if binary else None,
        risk=float(risk + L2 / 2 * np.vdot(coefficients, coefficients)),
        seconds=seconds,
    )


def auc(scores: Array, positive: NDArray[np.bool_]) -> float:
    """The area under the ROC curve: how often a positive row scores above a negative one, ties counting half.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True]))
    0.875
    """
    order = np.argsort(scores, kind="stable")
    _, place, counts = np.unique(scores[order], return_inverse=True, return_counts=True)
    ranks = np.empty(len(scores))
    ranks[order] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(scores) - ones)))
