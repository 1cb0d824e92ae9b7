"""Curvature of a convex objective: minimum, average and expected, at a point and along a run.

Private gradient descent does not feel the flattest direction alone: its noise leaves x in all directions, and what
counts is the expected curvature (Yu et al., "Gradient Perturbation is Underrated", IJCAI 2020, Definition 3)

    ν = E⟨∇F(x̃), x̃ − x*⟩ / E‖x̃ − x*‖²,   x̃ = x − z,  z ~ N(0, s²·I),
      ≈ (s²·tr H + ⟨∇F(x), x − x*⟩) / (p·s² + ‖x − x*‖²)   (Eq. 5; exact for the squared loss),

the mean of two curvatures: the average tr(H)/p, with weight p·s², and the one from x towards x*, with weight ‖x − x*‖².
It is at least the minimum λ_min(H) and tends to the average as s grows. x* is the minimiser nearest the start. In DP-GD
the noise that reaches x is η·z, so s = η·σ, not σ: at usual budgets small, and the second weight counts. For
underdetermined rows ν > 0 although the minimum is 0, but noise in flat directions counts in the denominator: of rank r,
ν ≥ λ₊·r/p for x − x* in the span of the rows, λ₊ the least positive eigenvalue, not ν ≥ λ₊ as the paper remarks.

Guarantee: none. Every figure here is computed from the private rows without a charge: it explains a run, and is not for
release. Nor is a learning rate or a number of steps that was chosen by it covered by the guarantee of the run.

>>> import numpy as np
>>> from dpgrad.convex.losses import Squared
>>> design = Design(np.array([[2.0, 0.0], [0.0, 0.2]]), radius=2.0)
>>> objective = Objective(Squared(np.inf), design, np.array([2.0, 0.2]))
>>> start, best = np.zeros((2, 1)), minimiser(objective)
>>> round(minimum(objective, start).value, 6), round(average(objective, start), 6)
(0.02, 1.01)
>>> [round(expected(objective, np.array([[1.0], [0.0]]), best, std), 3) for std in (0.0, 0.1, 1.0, 10.0)]
[0.02, 0.039, 0.68, 1.005]
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from dpgrad import _validate
from dpgrad.accounting import exact
from dpgrad.convex import bounds
from dpgrad.convex._conjugate import conjugate
from dpgrad.convex.design import Design
from dpgrad.convex.losses import Array, RowLoss, Softmax, Squared, Targets
from dpgrad.data import Dataset
from dpgrad.errors import OptionError

__all__ = [
    "TABLE_2",
    "Curved",
    "Description",
    "Estimate",
    "Objective",
    "PrintedCurvature",
    "RiskPlan",
    "along",
    "average",
    "describe",
    "excess_risk",
    "expected",
    "expected_by_draws",
    "minimiser",
    "minimum",
    "smoothness",
]  # fmt: skip

_DENSE = 2000  # the largest dimension whose Hessian is formed
_BLOCK = 1 << 22  # numbers held at once while a Hessian is formed
_NEWTON_STEPS = 60
_NOISES = tuple(10 ** (k / 4) for k in range(-12, 5))  # of Figure 1


class Estimate(NamedTuple):
    """A figure and its error: the standard error of a mean of draws, or the residual of an eigenvalue; 0 if exact.

    >>> Estimate(0.5, error=0.01)
    Estimate(value=0.5, error=0.01)
    """

    value: float
    error: float


class Curved(RowLoss, Protocol):
    """A loss of one score that has a second derivative."""

    def curvatures(self, scores: Array, targets: Targets) -> Array:
        """The second derivative in the score: (n,)."""


@dataclass(frozen=True, eq=False)
class Objective:
    """F(w) = (1/n)·Σ loss(x_i·w, y_i) + l2/2·‖w‖² on the rows of a design, with its derivatives.

    Coefficients w, gradients and directions have shape (features, outputs). Nothing larger than the scores is held.

    >>> from dpgrad.convex.losses import Logistic
    >>> objective = Objective(Logistic(), Design(np.eye(2), radius=1.0), np.array([1.0, -1.0]), l2=0.1)
    >>> round(objective.value(np.zeros((2, 1))), 6), objective.gradient(np.zeros((2, 1))).round(6).ravel().tolist()
    (0.693147, [-0.25, 0.25])
    """

    loss: Curved | Softmax
    design: Design = field(repr=False)
    targets: Targets = field(repr=False)
    l2: float = 0.0

    def __post_init__(self) -> None:
        _validate.non_negative(l2=self.l2)
        if not self.loss.smooth:
            raise OptionError(f"curvature needs a smooth loss, got {self.loss!r}: use HuberSvm in place of Hinge")
        object.__setattr__(self, "targets", self.loss.checked(self.targets, self.design.rows))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the coefficients: (features, outputs)."""
        return self.design.features, self.loss.outputs

    @property
    def dimension(self) -> int:
        """p: how many coefficients there are."""
        return math.prod(self.shape)

    def value(self, coefficients: Array) -> float:
        """F(w)."""
        values = self.loss.values(self.design.scores(coefficients), self.targets)
        return float(values.mean() + self.l2 / 2 * np.vdot(coefficients, coefficients))

    def gradient(self, coefficients: Array) -> Array:
        """∇F(w)."""
        residuals = self.loss.residuals(self.design.scores(coefficients), self.targets)
        return self.design.gathered(residuals) / self.design.rows + self.l2 * coefficients

    def hessian_product(self, coefficients: Array) -> Callable[[Array], Array]:
        """The map v ↦ H·v at w."""
        bend = self._bend(coefficients)
        rows = self.design.rows
        return lambda v: self.design.gathered(bend(self.design.scores(v))) / rows + self.l2 * v

    def hessian(self, coefficients: Array) -> Array:
        """H at w, (p, p), coefficients in the order of ``w.ravel()``; formed a few columns at a time."""
        features, outputs = self.shape
        bend, rows = self._bend(coefficients), self.design.rows
        found = np.empty((features, outputs, features, outputs))
        width = max(1, _BLOCK // rows)
        for first in range(0, features, width):
            chosen = slice(first, min(first + width, features))
            scores = self.design.scores(np.eye(features)[:, chosen])  # (rows, chosen)
            for k in range(outputs):
                unit = np.zeros((rows, outputs))
                unit[:, k] = 1
                for j, column in enumerate(bend(unit).T):
                    found[:, j, chosen, k] = self.design.gathered(column[:, None] * scores) / rows
        return found.reshape(self.dimension, self.dimension) + self.l2 * np.eye(self.dimension)

    def trace(self, coefficients: Array) -> float:
        """tr H at w by formula: the mean of ‖x_i‖² times the trace of row i's second derivative, and p·l2.

        That trace is the curvature of the loss, and 1 − Σ_k π_k² for the softmax probabilities π: no Hessian is formed.
        """
        scores = self.design.scores(coefficients)
        if isinstance(self.loss, Softmax):
            shares = self.loss.residuals(scores, self.targets)
            shares[np.arange(len(shares)), self.targets] += 1
            bends = 1 - np.einsum("ij,ij->i", shares, shares)
        else:
            bends = self.loss.curvatures(scores, self.targets)
        return float(np.mean(bends * self.design.norms**2) + self.dimension * self.l2)

    def _bend(self, coefficients: Array) -> Callable[[Array], Array]:
        """The map of score directions d_i ↦ (second derivative of row i at w)·d_i."""
        loss, scores = self.loss, self.design.scores(coefficients)
        if isinstance(loss, Softmax):
            return lambda directions: loss.hessian_product(scores, self.targets, directions)
        curvatures = loss.curvatures(scores, self.targets)[:, None]
        return lambda directions: curvatures * directions


def minimum(objective: Objective, coefficients: Array) -> Estimate:
    """λ_min(H) at w: exact up to dimension 2000, above that by Lanczos.

    The Lanczos figure is never below λ_min in exact arithmetic, and some eigenvalue lies within its error. A softmax is
    flat where all classes move together, and fewer rows than coefficients leave a flat direction: then it is l2.

    >>> design = Design(np.array([[1.0, 1.0]]), radius=2.0)
    >>> minimum(Objective(Squared(np.inf), design, np.array([1.0])), np.zeros((2, 1)))
    Estimate(value=0.0, error=0.0)
    """
    if isinstance(objective.loss, Softmax) or objective.design.rows < objective.dimension:
        return Estimate(objective.l2, 0.0)
    if objective.dimension <= _DENSE:
        return Estimate(float(np.linalg.eigvalsh(objective.hessian(coefficients))[0]), 0.0)
    product = objective.hessian_product(coefficients)
    top = _largest(product, objective.shape).value
    # the least of H by the largest of 2·top − H, so the tolerance is relative to top and not to a figure near zero
    rest = _largest(lambda v: 2 * top * v - product(v), objective.shape)
    return Estimate(2 * top - rest.value, rest.error)


def average(objective: Objective, coefficients: Array) -> float:
    """tr(H)/p at w, by formula.

    >>> design = Design(np.array([[1.0, 1.0]]), radius=2.0)
    >>> round(average(Objective(Squared(np.inf), design, np.array([1.0])), np.zeros((2, 1))), 6)
    1.0
    """
    return objective.trace(coefficients) / objective.dimension


def smoothness(objective: Objective) -> float:
    """β: no direction of F curves more, anywhere: the loss's largest second derivative times λ_max(XᵀX/n), plus l2.

    >>> design = Design(np.array([[1.0, 1.0]]), radius=2.0)
    >>> round(smoothness(Objective(Squared(np.inf), design, np.array([1.0]))), 6)
    2.0
    """
    design = objective.design
    steepest = _largest(lambda v: design.gathered(design.scores(v)) / design.rows, (design.features, 1))
    return objective.loss.smoothness(1.0) * (steepest.value + steepest.error) + objective.l2


def _largest(product: Callable[[Array], Array], shape: tuple[int, int]) -> Estimate:
    """The largest eigenvalue of a symmetric map and the norm of its residual: dense where small, else by Lanczos."""
    size = math.prod(shape)
    if size <= 2:  # too small for Lanczos
        matrix = np.column_stack([product(unit.reshape(shape)).ravel() for unit in np.eye(size)])
        return Estimate(float(np.linalg.eigvalsh(matrix)[-1]), 0.0)
    from scipy.sparse.linalg import LinearOperator, eigsh

    operator = LinearOperator((size, size), matvec=lambda v: product(v.reshape(shape)).ravel(), dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)  # fixed: the same figure every time
    if not operator.matvec(start).any():  # the zero map, which Lanczos cannot start on
        return Estimate(0.0, 0.0)
    values, vectors = eigsh(operator, k=1, which="LA", v0=start, ncv=min(size, 60), tol=1e-9)
    value, vector = float(values[0]), vectors[:, 0]
    return Estimate(value, float(np.linalg.norm(operator.matvec(vector) - value * vector)))


def expected(objective: Objective, coefficients: Array, best: Array, std: float) -> float:
    """The expected curvature ν at x for noise of ``std`` on each coordinate, by Eq. 5; ``best`` is x*.

    Exact for the squared loss, elsewhere to second order in the noise.

    >>> design = Design(np.array([[2.0, 0.0], [0.0, 0.2]]), radius=2.0)
    >>> objective = Objective(Squared(np.inf), design, np.array([2.0, 0.2]))
    >>> round(expected(objective, np.zeros((2, 1)), minimiser(objective), std=1.0), 6)
    1.01
    """
    aligned = float(np.vdot(objective.gradient(coefficients), coefficients - best))
    return (objective.trace(coefficients) * std**2 + aligned) / _square(coefficients, best, std)


def expected_by_draws(
    objective: Objective, coefficients: Array, best: Array, std: float, random: np.random.Generator, draws: int = 256
) -> Estimate:
    """The expected curvature ν at x by Monte Carlo on Definition 3, with its standard error.

    The ratio of the means of ⟨∇F(x̃), x̃ − x*⟩ and ‖x̃ − x*‖² over pairs x̃ = x ± z; its bias is of the order of the
    squared error.

    >>> design = Design(np.array([[1.0, 1.0], [1.0, -1.0]]), radius=2.0)
    >>> objective = Objective(Squared(np.inf), design, np.array([1.0, 0.0]))
    >>> found = expected_by_draws(objective, np.zeros((2, 1)), minimiser(objective), 0.1, np.random.default_rng(0))
    >>> round(found.value, 6), round(found.error, 6)
    (1.0, 0.0)
    """
    _validate.whole(least=2, draws=draws)
    _square(coefficients, best, std)

    def parts(point: Array) -> Array:
        gap = point - best
        return np.array([np.vdot(objective.gradient(point), gap), np.vdot(gap, gap)])

    noises = (std * random.standard_normal(objective.shape) for _ in range(draws))
    tops, squares = np.array([parts(coefficients - z) + parts(coefficients + z) for z in noises]).T
    ratio = float(tops.mean() / squares.mean())
    spread = float((tops - ratio * squares).std(ddof=1)) / float(squares.mean())
    return Estimate(ratio, spread / math.sqrt(draws))


def _square(coefficients: Array, best: Array, std: float) -> float:
    """E‖x − z − x*‖²."""
    _validate.non_negative(std=std)
    found = float(np.sum((coefficients - best) ** 2)) + coefficients.size * std**2
    if found == 0:
        raise OptionError("expected curvature is not defined at the minimiser without noise: give a positive std")
    return found


def along(objective: Objective, iterates: Iterable[Array], best: Array, *, learning_rate: float, std: float) -> Array:
    """ν_t at each iterate x₁, x₂, … of DP-GD, given the ones before: what its bounds ask to be at least ν.

    x₁ carries no noise: ν₁ = ⟨∇F(x₁), x₁−x*⟩/‖x₁−x*‖². Every later one is x_{t−1} − η·∇F(x_{t−1}) with noise of
    s = η·σ, ``std`` = σ being that of the mean gradient, and ν_t is Eq. 5 at that point. One run shows one history;
    the least ν_t of several runs estimates the ν of `dpgrad.convex.bounds`.

    >>> design = Design(np.array([[2.0, 0.0], [0.0, 0.2]]), radius=2.0)
    >>> objective = Objective(Squared(np.inf), design, np.array([2.0, 0.2]))
    >>> run = [np.zeros((2, 1)), np.array([[1.0], [0.1]])]
    >>> along(objective, run, minimiser(objective), learning_rate=0.5, std=0.2).round(3).tolist()
    [1.01, 0.04]
    """
    _validate.positive(learning_rate=learning_rate)
    found: list[float] = []
    centre, noise = None, 0.0
    for iterate in iterates:
        found.append(expected(objective, iterate if centre is None else centre, best, noise))
        centre, noise = iterate - learning_rate * objective.gradient(iterate), learning_rate * std
    return np.array(found)


def minimiser(objective: Objective, start: Array | None = None) -> Array:
    """The minimiser x* of F nearest to ``start``, which is 0 unless given.

    Newton's method with a ridge that vanishes with the gradient: d = −(H + τI)⁻¹∇F. Every step lies in the span of the
    rows, so the limit differs from the start by a vector of that span: of all minimisers of a loss that is strictly
    convex in the scores it is the nearest, for the squared loss the least-squares solution of minimum norm.

    >>> design = Design(np.array([[1.0, 1.0]]), radius=2.0)
    >>> minimiser(Objective(Squared(np.inf), design, np.array([1.0]))).round(6).ravel().tolist()
    [0.5, 0.5]
    """
    x = np.zeros(objective.shape) if start is None else np.array(start, np.float64)
    value, gradient = objective.value(x), objective.gradient(x)
    first = float(np.linalg.norm(gradient))
    if first == 0:
        return x
    slack = objective.design.accuracy
    floor = slack * value  # rows that are fitted exactly leave no value to compare with
    for _ in range(_NEWTON_STEPS):
        scale = average(objective, x) or objective.loss.smoothness(objective.design.bound)  # all rows flat: any will do
        left = float(np.linalg.norm(gradient)) / first
        direction = -_solved(objective, x, gradient, scale * max(1e-3 * left, 1e-9), min(max(left, 1e-6), 0.1))
        gain, least = -float(np.vdot(gradient, direction)), slack * max(value, floor)
        if gain <= least and np.linalg.norm(direction) <= 1e-2 * (1 + np.linalg.norm(x)):
            return _checked(objective, x + direction)
        length = 1.0
        while length > 1e-9 and not objective.value(x + length * direction) <= value - 1e-4 * length * gain + least:
            length /= 2
        x = x + length * direction
        value, gradient = objective.value(x), objective.gradient(x)
    raise OptionError(
        f"no minimiser was found in {_NEWTON_STEPS} Newton steps: the objective has none (separable rows) or is flat; "
        "give l2 > 0"
    )


def _solved(objective: Objective, coefficients: Array, gradient: Array, ridge: float, tolerance: float) -> Array:
    """(H + ridge·I)⁻¹·gradient by conjugate gradients, which stay in the span of the rows."""
    product = objective.hessian_product(coefficients)
    return conjugate(lambda vector: product(vector) + ridge * vector, gradient, tolerance)


def _checked(objective: Objective, found: Array) -> Array:
    """The minimiser, refused where the loss is flat in some row: others may then be nearer."""
    if objective.l2 == 0 and not isinstance(objective.loss, Softmax):
        flat = int((objective.loss.curvatures(objective.design.scores(found), objective.targets) == 0).sum())
        if flat:
            raise OptionError(f"the loss is flat at {flat:,} rows: its nearest minimiser is not known; give l2 > 0")
    return found


def excess_risk(objective: Objective, outputs: Iterable[Array], best: Array) -> Estimate:
    """E[F(x_out) − F(x*)] over the outputs of repeated runs, with its standard error.

    >>> design = Design(np.array([[1.0]]), radius=2.0)
    >>> objective = Objective(Squared(np.inf), design, np.array([1.0]))
    >>> excess_risk(objective, [np.array([[0.0]]), np.array([[1.0]])], minimiser(objective))
    Estimate(value=0.25, error=0.25)
    """
    floor = objective.value(best)
    return _mean(objective.value(output) - floor for output in outputs)


def _mean(draws: Iterable[float]) -> Estimate:
    found = np.fromiter(draws, np.float64)
    if len(found) < 2:
        raise OptionError(f"draws must be at least 2, got {len(found)}: an error needs a spread")
    return Estimate(float(found.mean()), float(found.std(ddof=1)) / math.sqrt(len(found)))


class PrintedCurvature(NamedTuple):
    """What Table 2 prints of a dataset, and how it differs from what is found here.

    >>> TABLE_2["graduate-admission"].minimum
    0.00668
    """

    minimum: float
    average: float
    difference: str


# Under the squared loss, columns scaled by their least and greatest value (preprocessing "yu2020").
TABLE_2 = {
    "graduate-admission": PrintedCurvature(6.68e-3, 0.40, "The same here."),
    "sonar": PrintedCurvature(
        3.63e-4,
        0.19,
        "The average is the same; nine in ten of random 80 % of the rows give minima of 2.7e-4 to 3.8e-4, all 4.0e-4.",
    ),
    "boston-housing": PrintedCurvature(
        3.44e-3, 0.34, "No choice of columns of the UCI file gives both printed figures, with the target or without."
    ),
    "swedish-motor-insurance": PrintedCurvature(
        9.07e-6,
        0.24,
        "The printed minimum is that of the columns with the target among them (preprocessing yu2020-with-target), the "
        "average that of the six features.",
    ),
}


class RiskPlan(NamedTuple):
    """So many steps of DP-GD at η = 1/β: σ, s = η·σ, the weight of the average in ν, ν, and a figure of the risk.

    >>> RiskPlan(50, std=0.1, noise=0.05, weight=0.02, expected=0.8, risk=0.05).steps
    50
    """

    steps: int
    std: float
    noise: float
    weight: float
    expected: float
    risk: float


@dataclass(frozen=True)
class Description:
    """Table 2's figures of a dataset, the plans they speak for, and what they mean in words.

    ``minimum``, ``average`` and ν are taken at the start x = 0, ``smoothness`` is β. ``curve`` is Figure 1: pairs of a
    noise s on each coordinate and ν there. A plan's risk is the lesser of Eq. 9 for the last iterate, with ν at the
    start for that of the whole run, and Eq. 12 for the mean of the iterates: an indication, not a bound. ``measured``
    is how many of the ``examples`` the curvatures were measured on.
    """

    name: str
    examples: int
    dimension: int
    minimum: float
    average: float
    smoothness: float
    epsilon: float
    delta: float
    orders: tuple[bounds.Order, ...]
    plans: tuple[RiskPlan, ...]
    curve: tuple[tuple[float, float], ...]
    measured: int

    def words(self) -> tuple[str, ...]:
        """What the figures mean for the learning rate, the number of steps and the solver, a sentence or two each."""
        plan = min(self.plans, key=lambda plan: plan.risk)
        budget = f"epsilon {self.epsilon:g}, delta {self.delta:.2g}"
        part = "" if self.measured == self.examples else f" (the first {self.measured:,} were measured)"
        return (
            f"{self.name}: {self.examples:,} rows{part}, {self.dimension:,} coefficients. Curvature: minimum "
            f"{self.minimum:.3g}, average {self.average:.3g}, largest {self.smoothness:.3g}.",
            f"Expected curvature: {plan.expected:.3g} at the start. At {budget} the noise of {plan.steps} steps moves "
            f"each coefficient by {plan.noise:.2g} a step, so the average has a weight of {plan.weight:.0%} in it "
            "and the way to the minimiser the rest.",
            f"Learning rate: up to 1/{self.smoothness:.3g} = {1 / self.smoothness:.3g} descent is stable.",
            f"Steps: of {', '.join(str(p.steps) for p in self.plans)} the least risk is indicated for {plan.steps}. "
            f"Theorem 1's 2 log(n)/(rate x curvature) is {self._steps(plan.expected)} by the expected curvature, "
            f"{self._steps(self.minimum)} by the minimum.",
            f"Solver: {self._solver()}",
            "These figures come from the private rows: they are not for release, and a choice made by them is outside "
            "the guarantee.",
        )

    def _steps(self, curvature: float) -> str:
        if curvature <= 0:
            return "no number"
        return f"{math.ceil(2 * math.log(self.examples) * self.smoothness / curvature):,}"

    def _solver(self) -> str:
        orders = {row.method: row for row in self.orders}
        objective = min(x for x in orders["objective perturbation"][1:] if isinstance(x, float))
        gradient = orders["DP-GD, expected curvature"].convex or math.inf
        names = ("gradient perturbation", "objective perturbation")
        better, worse = names if gradient < objective else names[::-1]
        ratio = max(gradient, objective) / min(gradient, objective)
        if ratio < 2:
            return f"the orders of {better} and {worse} in Table 1 differ by less than 2 times: constants decide."
        return f"{better}; the order of {worse} in Table 1 is {ratio:.2g} times as large."


def describe(
    dataset: Dataset,
    loss: Curved | Softmax,
    *,
    epsilon: float = 1.0,
    clip: float = 1.0,
    l2: float = 0.0,
    most_rows: int | None = None,
) -> Description:
    """Table 2's curvatures of a dataset's training rows under a loss, and what they mean; see `Description`.

    δ = 1/n², replace-one neighbours, the exact noise of T = 50, 200 and 800 steps (the paper's) with gradients clipped
    to ``clip``, η = 1/β. Labels become ±1 for a loss of margins, and targets of the squared loss are divided by the
    largest: minimum and average do not depend on that, x* and so ν do. Of more than ``most_rows`` rows the first so
    many are measured, in the order of the loader; n remains the number of all.

    `TABLE_2` has the figures that the paper prints, and where they differ from these.

    >>> from dpgrad import data
    >>> found = describe(data.load("digits"), Softmax(10), l2=1e-3)
    >>> found.minimum, round(found.average, 4)
    (0.001, 0.0222)
    >>> found.words()[0]
    'digits: 1,437 rows, 640 coefficients. Curvature: minimum 0.001, average 0.0222, largest 5.23.'
    """
    rows, n = dataset.flat().x_train[:most_rows], len(dataset.y_train)
    rows = rows.astype(np.float64) if isinstance(rows, np.ndarray) else rows
    radius = 1.001 * float(Design(rows, radius=1e18).norms.max())  # no row is clipped
    objective = Objective(loss, Design(rows, radius=radius), _targets(dataset, loss)[:most_rows], l2)
    start = np.zeros(objective.shape)
    best, beta = minimiser(objective), smoothness(objective)
    distance = float(np.linalg.norm(best))
    mu = exact.mu_for(epsilon, float(n) ** -2)

    def problem(curvature: float) -> bounds.Problem:
        return bounds.Problem(n, objective.dimension, clip, beta, curvature, distance)

    def plan(steps: int) -> RiskPlan:
        std = 2 * clip * math.sqrt(steps) / (n * mu)
        nu = expected(objective, start, best, std / beta)
        risk = min(
            bound(problem(nu), std=std, learning_rate=1 / beta, steps=steps)
            for bound in (bounds.gd_risk, bounds.gd_average_risk)
        )
        weight = 1 / (1 + distance**2 / (objective.dimension * (std / beta) ** 2))
        return RiskPlan(steps, std, std / beta, weight, nu, risk)

    plans = tuple(plan(steps) for steps in (50, 200, 800))
    least = minimum(objective, start).value
    strong = least if loss == Squared(math.inf) else l2  # elsewhere the curvature at one point bounds nothing
    nu = min(plans, key=lambda plan: plan.risk).expected
    return Description(
        dataset.name, n, objective.dimension, least, average(objective, start), beta,
        epsilon, float(n) ** -2, bounds.table_1(problem(nu), strong, epsilon), plans,
        tuple((s, expected(objective, start, best, s)) for s in _NOISES), objective.design.rows,
    )  # fmt: skip


def _targets(dataset: Dataset, loss: Curved | Softmax) -> Targets:
    match loss:
        case Softmax():
            return dataset.y_train
        case Squared():
            return dataset.y_train / max(float(np.abs(dataset.y_train).max()), 1e-300)
        case _:
            return 2.0 * dataset.y_train - 1.0
