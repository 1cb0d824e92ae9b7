"""The solvers under the names that estimators give them, each with the options it takes and its defaults.

>>> from dpgrad.convex.losses import Logistic
>>> rows, targets = np.array([[1.0], [-1.0]] * 500), np.array([1, 0] * 500)
>>> task = SolverTask(Logistic(), 2, 1.0, 1e-6, Relation.REPLACE_ONE, radius=1.0, fit_intercept=False)
>>> found = solve("gd", rows, targets, task, {"max_iter": 20}, Key.from_seed(7))
>>> found.coef.shape, found.steps, [release.name for release in found.releases]
((1, 1), 20, ['gradients'])
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.accounting.events import Event, Relation, Repeat
from dpgrad.convex import chunked
from dpgrad.convex.design import Design, Matrix, Rows, Rule
from dpgrad.convex.inference import LEFT, STRAIGHT, Descended, Moments, Perturbed, Scatter
from dpgrad.convex.losses import Array, Counts, RowLoss, Squared, Targets
from dpgrad.convex.solvers import amp, auto, gd, objective, one_vs_rest, output, perturbed, regression, sgd
from dpgrad.convex.solvers.pace import ALLOWED, UNSETTLED, Pace, Path, paced
from dpgrad.convex.solvers.perturbed import Perturbation
from dpgrad.convex.solvers.solved import Solved, Statistic
from dpgrad.convex.weighted import Weighted
from dpgrad.errors import OptionError
from dpgrad.mechanism import schedules
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism

__all__ = [
    "BINARY",
    "COUNTS_ALLOWED",
    "OPTIONS",
    "REGRESSION",
    "REGRESSION_ALLOWED",
    "SOLVERS",
    "Found",
    "Options",
    "Solver",
    "SolverTask",
    "design",
    "prepared_rows",
    "signed",
    "solve",
    "unfolded",
    "unweighted",
]  # fmt: skip

Options = Mapping[str, Any]
REGRESSION_ALLOWED = 0.2  # the noise on a prediction, in units of half the width of the target's bounds
COUNTS_ALLOWED = 1.0  # the noise on the logarithm of an expected count
_MOST_COLUMNS = 10_000  # of a second moment: 800 MB


@dataclass(frozen=True)
class SolverTask:
    """What is asked of a solver, in public numbers. Without a ``radius`` rows are normalised.

    A loss of one score for more than two classes separates each class from the rest, in fits that share the budget. No
    classes: a regression. ``charge`` is called with the event before anything is released. ``share`` is the solver's
    share of the budget, in μ². ``secure`` takes noise from the secure source.
    """

    loss: RowLoss
    classes: int
    epsilon: float
    delta: float
    relation: Relation
    radius: float | None
    fit_intercept: bool
    charge: Callable[[Event], None] = lambda event: None
    share: float = 1.0
    secure: bool = False

    def secure_values(self, prepared: Rows) -> int:
        """How many coefficients get noise of the secure source: 0 where that is ordinary."""
        return prepared.features * self.loss.outputs if self.secure else 0

    @property
    def mu(self) -> float:
        """The μ that the solver may take."""
        return exact.mu_for(self.epsilon, self.delta) * math.sqrt(self.share)

    @property
    def bound(self) -> float:
        """No row of the design is longer: that of `prepared`."""
        reach = self.radius or 1.0
        return math.hypot(reach, reach) if self.fit_intercept else reach


@dataclass(frozen=True, eq=False)
class Found:
    """Coefficients (features, outputs) and intercept (outputs,) for rows as the public rule leaves them.

    ``cut`` is that of `auto.Solution`, by which probabilities are corrected. ``unsettled`` says, from what was
    released, that the coefficients are not those of the optimum. ``spread`` says how ``weights``, the coefficients of
    the design with its constant column, scatter around the optimum; None where that is not known.
    """

    coef: Array
    intercept: Array
    event: Event
    releases: tuple[Statistic, ...]
    steps: int
    cut: float | None = None
    unsettled: str | None = None
    weights: Array | None = None
    spread: Scatter | None = None


def design(rows: Matrix, radius: float | None) -> Design:
    """Rows in memory, clipped to ``radius`` or normalised without one."""
    return Design(rows, **_treated(radius))


def _treated(radius: float | None) -> dict[str, Any]:
    rule: Rule = "normalise" if radius is None else "clip"
    return {"radius": 1.0 if radius is None else radius, "rule": rule}


def solve(name: object, rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """The coefficients by the solver of that name, for targets that are class indices, or numbers without classes.

    An option that the solver does not take is refused.
    """
    known = SOLVERS if task.classes else REGRESSION
    _validate.one_of(known, solver=name)
    run, taken = known[str(name)]
    if name in BINARY and isinstance(task.loss, Weighted):
        raise OptionError(unweighted(str(name)))
    if name in BINARY and task.secure:
        raise OptionError(
            f"noise secure is refused with solver {name}: its proof needs noise that has a density, inside the "
            f"objective, and whole numbers on a grid have none; use {', '.join(sorted(set(SOLVERS) - BINARY))}"
        )
    if task.loss.outputs == 1 and task.classes == 2:
        targets = chunked.applied(signed, targets)
    unused = sorted(set(options) - taken)
    if unused:
        raise OptionError(f"solver {name} does not use {', '.join(unused)}: leave {unused[0]} at None")
    if "max_iter" in options:
        _validate.step_count(max_iter=options["max_iter"])
    if "batch_size" in options:
        _validate.whole(least=1, batch_size=options["batch_size"])
    return run(rows, targets, task, options, key)


def unweighted(name: str) -> str:
    """Why a solver has no use for class weights.

    >>> unweighted("amp")
    'solver amp does not use class_weight: leave it at None, or use auto, gd, sgd or output'
    """
    return f"solver {name} does not use class_weight: leave it at None, or use auto, gd, sgd or output"


def _auto(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    steps = options.get("max_iter", 60)
    found = auto.solve(
        rows, targets, task.loss, epsilon=task.epsilon, delta=task.delta, relation=task.relation, radius=task.radius,
        fit_intercept=task.fit_intercept, kappa=options.get("kappa", 1.0), steps=steps, key=key, charge=task.charge,
        share=task.share, secure=task.secure,
    )  # fmt: skip
    return Found(found.coef, found.intercept, found.event, found.releases, steps, found.cut)


def _gd(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """DP-GD, clipped where nothing is cut; see `_descended`."""
    prepared = prepared_rows(rows, task)
    clip = float(options.get("clip", task.loss.lipschitz(prepared.bound)))
    pace = _pace(prepared, clip, task.mu, task, options)
    mechanism = gd.calibrated(
        prepared.rows, pace.steps, clip=clip, epsilon=task.epsilon, delta=task.delta, relation=task.relation,
        share=task.share, secure_values=task.secure_values(prepared),
    )  # fmt: skip
    return _descended("gradients", gd.solve, prepared, targets, mechanism, pace, task, options, key)


def _sgd(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """DP-SGD on a tenth of the rows per step; see `_descended`."""
    prepared = prepared_rows(rows, task)
    clip = float(options.get("clip", task.loss.lipschitz(prepared.bound)))
    sampled = options.get("sampling_rate", 0.1)
    pace = _pace(prepared, clip, task.mu, task, options)
    mechanism = sgd.calibrated(
        prepared.rows, pace.steps, sampling_rate=sampled, clip=clip,
        epsilon=task.epsilon, delta=task.delta, relation=task.relation, share=task.share,
        secure_values=task.secure_values(prepared),
    )  # fmt: skip
    # the μ of full batches with as much noise on their mean gradient
    mu = task.relation.reach * sampled * math.sqrt(pace.steps) / mechanism.noise_multiplier
    pace = _pace(prepared, clip, mu, task, {**options, "max_iter": pace.steps})
    name = f"gradients of rows sampled at rate {sampled:g}"
    return _descended(name, sgd.solve, prepared, targets, mechanism, pace, task, options, key)


def prepared_rows(rows: Matrix, task: SolverTask) -> Rows:
    """The rows, with a constant column as long as they are where an intercept is learned."""
    constant = (task.radius or 1.0) if task.fit_intercept else 0.0
    return chunked.designed(rows, **_treated(task.radius), intercept=constant)


def signed(places: Targets) -> Array:
    """Places 0 and 1 of two classes as −1 and +1.

    >>> signed(np.array([0, 1])).tolist()
    [-1.0, 1.0]
    """
    return np.asarray(2.0 * places - 1)


def _pace(prepared: Rows, clip: float, mu: float, task: SolverTask, options: Options) -> Pace:
    """The pace that public numbers suggest; that of the paper, 100 plain steps, where a learning rate is given."""
    learning_rate, steps, momentum = (options.get(name) for name in ("learning_rate", "max_iter", "momentum"))
    if momentum is not None:
        gd.check_momentum(momentum)
    smoothness = task.loss.smoothness(prepared.bound)
    if isinstance(task.loss, Counts):  # whose penalty may exceed the curvature of the loss
        smoothness += float(np.max(options["l2"]))
    suggested = paced(
        prepared.rows, clip=clip, radius=prepared.bound, smoothness=smoothness, mu=mu, moved=task.relation.reach,
        allowed=COUNTS_ALLOWED if isinstance(task.loss, Counts) else ALLOWED if task.classes else REGRESSION_ALLOWED,
        steps=steps if learning_rate is None else None, momentum=momentum if learning_rate is None else None,
    )  # fmt: skip
    if learning_rate is None:
        return suggested
    own = Pace(steps or 100, learning_rate, momentum or 0.0, 1.0)
    return replace(own, reached=min(own.travel * suggested.reached / suggested.travel, 1.0))


def _descended(
    name: str,
    solve: Callable[..., Solved],
    prepared: Rows,
    targets: Targets,
    mechanism: Mechanism,
    pace: Pace,
    task: SolverTask,
    options: Options,
    key: Key,
) -> Found:
    """The mean of the second half of the iterates; with a learning rate of the caller's own, the last of them."""
    planned, path = "learning_rate" not in options, Path(pace.steps)
    plain = planned or solve is gd.solve
    learning_rate = pace.learning_rate if plain else sgd.halved(pace.learning_rate, pace.steps)
    penalty = options.get("l2", 0.0)
    task.charge(mechanism.event())
    solved = solve(
        prepared, targets, task.loss, mechanism,
        learning_rate=learning_rate, l2=penalty, momentum=pace.momentum, key=key, each=path.add,
    )  # fmt: skip
    weights = path.mean if planned else solved.coefficients
    spread = None
    if mechanism.clip_at(0) >= task.loss.lipschitz(prepared.bound) * (1 - 1e-9):  # else clipped gradients are biased
        rates = tuple(float(one) for one in schedules.values(learning_rate, pace.steps, name="learning_rate"))
        sampled = (1 / solved.releases[0].sampling_rate - 1) / prepared.rows
        counted = Path.weights(pace.steps) if planned else (*(0.0,) * (pace.steps - 1), 1.0)
        std = mechanism.std_at(0) / mechanism.divisor
        left = STRAIGHT if isinstance(task.loss, Squared) else LEFT
        spread = Descended(rates, pace.momentum, counted, penalty, std, sampled=sampled, left=left)
    releases = tuple(replace(release, name=name) for release in solved.releases)
    return Found(
        *unfolded(weights, prepared.intercept), solved.event, releases, mechanism.steps,
        unsettled=_unsettled(path, pace), weights=weights, spread=spread,
    )  # fmt: skip


def _unsettled(path: Path, pace: Pace) -> str | None:
    """What to say where the coefficients still moved at the end of the descent, and what would help.

    A descent that went less far than its noise allows wants more steps; one that went as far wants less noise.
    """
    if path.moved <= UNSETTLED:
        return None
    remedy = "more rows, a larger epsilon or a tighter data_norm are needed"
    if pace.reached < 0.99:
        remedy = f"raise max_iter to about {math.ceil(pace.steps / pace.reached):,}, or learning_rate where it is given"
    return (
        f"the coefficients had not settled: they moved by {path.moved:.0%} of their length in the last quarter of the "
        f"descent, which went {pace.reached:.0%} as far as its noise allows. Do not read them as the optimum's: "
        f"{remedy}. Predictions may be good all the same"
    )


def _output(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """Output perturbation after ``max_iter`` passes over batches of 50 rows, at the learning rate 1/√n of Wu et al."""
    prepared = prepared_rows(rows, task)
    batch_size = min(options.get("batch_size", 50), prepared.rows)
    if isinstance(rows, chunked.Chunks) and batch_size < prepared.rows:
        raise OptionError(
            f"solver output takes batches of {batch_size:,} rows from all over the data, for each of which Dask would "
            "read all of it: use gd or auto, or give a batch_size of all rows"
        )
    usual = min(1 / math.sqrt(prepared.rows), 1 / task.loss.smoothness(prepared.bound))
    plan = output.calibrated(
        prepared.rows, task.loss, radius=prepared.bound, passes=options.get("max_iter", 10),
        batch_size=batch_size, learning_rate=options.get("learning_rate", usual),
        l2=options.get("l2", 0.0), epsilon=task.epsilon, delta=task.delta, relation=task.relation, share=task.share,
        secure_values=task.secure_values(prepared),
    )  # fmt: skip
    task.charge(plan.event)
    solved = output.solve(prepared, targets, task.loss, plan, key=key)
    filled = prepared.rows / (plan.batch_size * -(-prepared.rows // plan.batch_size))  # the last batch is shorter
    rates = tuple(rate * filled for rate in plan.learning_rates)
    counted = (*(0.0,) * (len(rates) - 1), 1.0)
    spread = Descended(rates, 0.0, counted, plan.l2 / filled, std=0.0, output_std=plan.std)
    return Found(
        *unfolded(solved.coefficients, prepared.intercept), solved.event, solved.releases, plan.passes,
        weights=solved.coefficients, spread=spread,
    )  # fmt: skip


def _objective(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """Tight objective perturbation, each class against the rest; ``l2`` where it exceeds what privacy needs."""
    prepared = prepared_rows(rows, task)
    plan = objective.calibrated(
        prepared.rows, task.loss, radius=prepared.bound, epsilon=task.epsilon, delta=task.delta,
        relation=task.relation, ridge=options.get("l2", 0.0) * prepared.rows, models=_models(task), share=task.share,
    )  # fmt: skip
    found = _minimised(prepared, targets, plan, task, key)
    spread = Perturbed(plan.ridge, options.get("l2", 0.0) * prepared.rows, plan.scale, plan.output_scale)
    return replace(found, spread=spread)


def _amp(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """AMP without tuning, each class against the rest."""
    prepared = prepared_rows(rows, task)
    plan = amp.tuning_free(
        prepared.rows, task.loss, radius=prepared.bound, epsilon=task.epsilon, delta=task.delta,
        relation=task.relation, models=_models(task), unit=task.radius or 1.0,
    )  # fmt: skip
    return _minimised(prepared, targets, plan, task, key)


def _models(task: SolverTask) -> int:
    return 1 if task.classes == 2 else task.classes


def _minimised(prepared: Rows, targets: Targets, plan: Perturbation, task: SolverTask, key: Key) -> Found:
    """The minimisers, of one class against the rest where there are more than two; their steps are private."""
    binary, models = partial(perturbed.solve, loss=plan.loss, plan=plan), _models(task)
    task.charge(plan.event if models == 1 else Repeat(plan.event, models))
    if models == 1:
        coefficients, event = binary(prepared, targets, key=key)
    else:
        coefficients, event = one_vs_rest.solve(prepared, targets, models, binary, key=key)
    releases = tuple(replace(release, count=models) for release in plan.releases)
    return Found(*unfolded(coefficients, prepared.intercept), event, releases, 1, weights=coefficients)


def _adassp(rows: Matrix, targets: Targets, task: SolverTask, options: Options, key: Key) -> Found:
    """AdaSSP, for targets in [−1, 1]."""
    prepared = prepared_rows(rows, task)
    if prepared.features > _MOST_COLUMNS:
        raise OptionError(
            f"solver adassp forms a matrix of columns × columns, got {prepared.features:,} of them, "
            f"at most {_MOST_COLUMNS:,}: use gd"
        )
    l2 = options.get("l2", 0.0)
    _validate.non_negative(l2=l2)
    plan = regression.calibrated(
        prepared.rows, radius=prepared.bound, target_bound=1.0, epsilon=task.epsilon, delta=task.delta,
        relation=task.relation, share=task.share, secure_columns=prepared.features if task.secure else 0,
    )  # fmt: skip
    task.charge(plan.event)
    noisy = regression.released(prepared, targets, plan, key)
    weights = noisy.coefficients(plan, l2)
    spread = Moments(noisy.moment, noisy.ridge(plan, l2), noisy.penalty(l2), plan.moment_std, plan.product_std)
    found = unfolded(weights, prepared.intercept)
    return Found(*found, plan.event, plan.releases, 1, weights=weights, spread=spread)


def unfolded(coefficients: Array, constant: float) -> tuple[Array, Array]:
    """Coefficients of the columns, and the intercept: what the constant column carries.

    >>> weights, intercept = unfolded(np.array([[2.0], [3.0]]), constant=0.5)
    >>> weights.tolist(), intercept.tolist()
    ([[2.0]], [1.5])
    """
    if constant:
        return coefficients[:-1], constant * coefficients[-1]
    return coefficients, np.zeros(coefficients.shape[1])


_DESCENT = {"max_iter", "learning_rate", "clip", "l2", "momentum"}
Solver = Callable[[Matrix, Targets, SolverTask, Options, Key], Found]
SOLVERS: dict[str, tuple[Solver, set[str]]] = {
    "auto": (_auto, {"max_iter", "kappa"}),
    "gd": (_gd, _DESCENT),
    "sgd": (_sgd, _DESCENT | {"sampling_rate"}),
    "output": (_output, {"max_iter", "batch_size", "learning_rate", "l2"}),
    "objective": (_objective, {"l2"}),
    "amp": (_amp, set()),
}
REGRESSION: dict[str, tuple[Solver, set[str]]] = {"adassp": (_adassp, {"l2"}), "gd": (_gd, _DESCENT)}
BINARY = {"objective", "amp"}  # proved for losses of one score
OPTIONS = sorted(set().union(*(taken for _, taken in SOLVERS.values())))
