"""A solver with nothing to tune: DP-GD on centred, preconditioned rows, its learning rate set by public numbers.

With T full-batch releases that are together μ-GDP, noise of std m·C·√T/(n·μ) on every mean gradient, and a learning
rate η with momentum β, the noise that reaches the score of a row of norm R has a std of at most G·R·m·C/(n·μ), where
G = η·T/(1−β): it depends on neither T nor the number of columns. (m is 2 under replace-one and 1 under zero-out; C
clips.) So there is one knob, and κ, the noise on a score, sets it from public numbers:

    G = κ·n·μ/(m·C·R),   T only says how finely the way is cut.

A single score stands for the difference of two logits, and is allowed twice the κ of a logit; so is a preconditioned
one, whose noise is spread over all directions alike.

Before the descent two releases may be made, each where public numbers (n, p, μ, m) say that it is worth its price:

* the mean c of the rows, for the share between 5 and 15 % of μ² that brings the norm of its noise to R/4, when that
  norm is at most R/2;
* their second moment A = XᵀX/n, when the norm of its noise is at most about twice the mean R²/p of its eigenvalues. The
  descent then runs on (x − c)·M, with M = (A − c·cᵀ)^(−1/2) and no eigenvalue taken to be below the noise; as the
  second-order method of Ganesh et al., "Faster Differentially Private Convex Optimization via Second-Order Methods"
  (2023), but released once.

**Clipped gradients are biased.** The clip bound cuts what rows on the wrong side of the boundary say, at any ε and n:
the descent does not end at the minimiser of the loss. Where the boundary lies hardly changes, but scores are too large
where rows follow a logistic model, the more so the less the columns tell. Accuracy gains by it, since the noise is that
of the clip bound. `fitted_chances` gives probabilities that allow for it. For the coefficients of a logistic model take
`gd` at the pace of `pace`, or `objective`: they can do without clipping.

All releases are Gaussian, so together they are exactly μ-GDP with μ² the sum of theirs (Dong, Roth and Su 2019):
nothing is lost by there being several.

>>> import numpy as np
>>> from dpgrad.convex.losses import Logistic
>>> random = np.random.default_rng(7)
>>> rows = random.standard_normal((2000, 2))
>>> targets = np.where(rows @ [2.0, 1.0] > 0, 1, -1)
>>> found = solve(rows, targets, Logistic(), epsilon=1.0, delta=1e-7, relation=Relation.REPLACE_ONE, key=7)
>>> bool(np.mean((found.scores(rows)[:, 0] > 0) == (targets > 0)) > 0.9)
True
>>> [(release.name, round(release.share, 2)) for release in found.releases]
[('mean', 0.05), ('second moment', 0.1), ('gradients', 0.85)]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from dpgrad import _validate
from dpgrad.accounting import account, exact
from dpgrad.accounting.events import Compose, Event, Gaussian, Inexact, Pinned, Relation, Repeat
from dpgrad.convex import chunked
from dpgrad.convex.design import Design, Matrix, Rows, Rule, quiet
from dpgrad.convex.losses import Array, HuberSvm, Logistic, RowLoss, Softmax
from dpgrad.convex.solvers import gd
from dpgrad.convex.solvers.solved import Statistic
from dpgrad.convex.weighted import Joint, Weighted
from dpgrad.errors import BudgetSpentError, OptionError
from dpgrad.mechanism.keys import AnyKey, Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.mechanism.sampling import FullBatch
from dpgrad.reports.report import Report, report

__all__ = [
    "INTERCEPT",
    "KEPT",
    "KNOWN",
    "MOMENTUM",
    "MOST_COLUMNS",
    "MOST_FLOOR",
    "SECOND_MOMENT",
    "SPREAD",
    "STABLE",
    "AutoPlan",
    "Solution",
    "Statistic",
    "fitted_chances",
    "mean_row",
    "noised_matrix",
    "second_moment",
    "solve",
    "symmetric_noise",
    "unclipped",
]  # fmt: skip

# Thresholds, κ and clip bounds were chosen on held-out parts of the training rows of Adult and Covertype, whole and in
# samples of 300 rows and more, at ε from 0.1 to 1, the softmax clip bound and the noise up to which the mean is
# released also of MNIST; so was the range of the mean's share, whose upper end is worth half a point and more on
# samples of 300 to 2,000. Momentum, intercept, other shares and the spread started from values that earlier trials had
# found with an eye on test accuracy on these three. On samples of 455 and 1,500 training rows of the three, κ = 1 is
# within the error of the best κ or second to 1/2, which wins where the noise leaves nothing but the majority to be
# learned. Where `fitted_chances` applies was seen in the log loss of test rows of Adult, Covertype, MNIST, Reuters and
# digits, and is the same on a held-out fifth of their training rows at ε from 0.1 to 1: 0.003 to 0.03 less where the
# descent is preconditioned (Covertype, Adult from ε = 1 on), up to 0.24 more on most where it is not.
MOMENTUM = 0.8
INTERCEPT = 0.3  # the constant column, in units of the radius
LEAST_MEAN_SHARE, MOST_MEAN_SHARE, SECOND_SHARE = 0.05, 0.15, 0.1  # of μ²
MEAN_NOISE, MOST_MEAN_NOISE = 0.25, 0.5  # the norm of the mean's noise, in units of the radius: wanted, and borne
MOST_FLOOR = 3.0  # the floor of the eigenvalues, in units of their mean R²/p
MOST_COLUMNS = 2000  # a second moment of more is not worth its p³
SPREAD = 0.1  # the largest eigenvalue of the rows' covariance where it is not known, in units of R²
STABLE = 2.0  # the learning rate times the largest curvature; heavy-ball descent is stable up to 2(1+β) = 3.6
KEPT = 0.01  # of the probabilities by the scores, which keeps their order strict
SECOND_MOMENT = "second moment"
KNOWN = (Logistic, HuberSvm, Softmax, Joint, Weighted)
_CHUNK = 64  # columns of the second moment that are summed at once
_ROUNDING = 1e-9  # μ stays below the target by this much, so the price does in floating point


@dataclass(frozen=True, eq=False)
class Solution:
    """Coefficients (columns, outputs) and intercept (outputs,) for rows as the public rule leaves them, and the price.

    ``rule`` and ``radius`` say what is done to a row before the coefficients apply: `scores` does it. ``cut`` is
    the length of a typical row in units of the clip bound, by which `fitted_chances` corrects probabilities. It is set
    where the descent was preconditioned: only then it reaches its end in every direction, and scores are too large by
    what clipping did. Elsewhere they may be too small as well, by what is left of the way.

    >>> one = Solution(np.array([[2.0]]), np.array([0.5]), 1.0, "clip", Compose(()), (), Relation.ZERO_OUT, False)
    >>> one.scores([[0.25], [9.0]]).round(6).tolist()
    [[1.0], [2.5]]
    """

    coef: Array
    intercept: Array
    radius: float
    rule: Rule
    event: Event
    releases: tuple[Statistic, ...]
    relation: Relation
    reproducible: bool
    cut: float | None = None
    title: ClassVar[str] = "auto"

    def report(self, delta: float) -> Report:
        """The privacy report, in the format of docs/report.md."""
        return report(self, delta=delta)

    def scores(self, rows: ArrayLike | Matrix) -> Array:
        """The scores (n, outputs) of raw rows, which are first clipped or normalised as those of the fit were."""
        return Design(rows, radius=self.radius, rule=self.rule).scores(self.coef) + self.intercept


@dataclass(frozen=True)
class AutoPlan:
    """Which releases are made and with how much noise: a function of public numbers alone.

    ``mu`` is that of all releases together, ``moved`` the m of the relation.

    >>> small, large = (AutoPlan(rows, 50, 1.0, 0.2, 2, 60, outputs=1) for rows in (300, 300_000))
    >>> small.centred, small.preconditioned, large.centred, large.preconditioned
    (False, False, True, True)
    """

    rows: int
    columns: int
    radius: float
    mu: float
    moved: int
    steps: int
    outputs: int
    secure: bool = False

    def secure_values(self, name: str) -> int:
        """How many values of a release get noise of the secure source: 0 where that is ordinary.

        >>> AutoPlan(300, 50, 1.0, 0.2, 2, 60, outputs=1, secure=True).secure_values("gradients")
        51
        """
        columns = {"mean": 1, SECOND_MOMENT: self.columns}.get(name)
        values = (self.columns + 1) * self.outputs if columns is None else self.columns * columns
        return values if self.secure else 0

    def within(self, epsilon: float, delta: float, share: float) -> "AutoPlan":
        """The plan with the μ of that share of the budget."""
        mu = exact.mu_for(epsilon, gd.below(delta, self.most_secure_values)) * (1 - _ROUNDING) * math.sqrt(share)
        return replace(self, mu=mu)

    @property
    def most_secure_values(self) -> int:
        """How many values of all releases get noise of the secure source, at most."""
        values = self.secure_values
        second = values(SECOND_MOMENT) if self.columns <= MOST_COLUMNS else 0
        return values("mean") + second + self.steps * values("gradients")

    @property
    def clip(self) -> float:
        """The bound on one gradient: a quarter of R for one output on rows as they are, else half."""
        return self.radius * (0.25 if self.outputs == 1 and not self.preconditioned else 0.5)

    @property
    def mean_share(self) -> float:
        """The share of μ² at which the norm of the mean's noise is R/4, within bounds."""
        wanted = (self.mean_sensitivity * math.sqrt(self.columns) / (self.mu * MEAN_NOISE * self.radius)) ** 2
        return min(max(wanted, LEAST_MEAN_SHARE), MOST_MEAN_SHARE)

    @property
    def mean_std(self) -> float:
        """The noise on each coordinate of the mean row."""
        return self.mean_sensitivity / (self.mu * math.sqrt(self.mean_share))

    @property
    def mean_sensitivity(self) -> float:
        """m·R/n: a row is taken away, or another put in its place."""
        return self.moved * self.radius / self.rows

    @property
    def second_std(self) -> float:
        """The noise on each coordinate of the second moment, entries off the diagonal counted √2 times."""
        return self.second_sensitivity / (self.mu * math.sqrt(SECOND_SHARE))

    @property
    def second_sensitivity(self) -> float:
        """√m·R²/n, by ‖xxᵀ − yyᵀ‖² = ‖x‖⁴ + ‖y‖⁴ − 2(x·y)² ≤ 2R⁴."""
        return math.sqrt(self.moved) * self.radius**2 / self.rows

    @property
    def floor(self) -> float:
        """The least eigenvalue told from noise: √2 times the norm to be expected of the symmetric noise, √(2p)·std."""
        return 2 * math.sqrt(self.columns) * self.second_std

    @property
    def centred(self) -> bool:
        """Whether the mean is worth its price."""
        return self.mean_std * math.sqrt(self.columns) <= MOST_MEAN_NOISE * self.radius

    @property
    def preconditioned(self) -> bool:
        """Whether the second moment is worth its price."""
        clear = self.floor * self.columns <= MOST_FLOOR * self.radius**2
        return self.centred and clear and self.columns <= MOST_COLUMNS

    @property
    def share(self) -> float:
        """What is left of μ² for the gradients."""
        return 1 - self.mean_share * self.centred - SECOND_SHARE * self.preconditioned

    def mechanism(self, relation: Relation) -> Mechanism:
        """The descent's noise and clip bound."""
        multiplier = self.moved * math.sqrt(self.steps) / (self.mu * math.sqrt(self.share))
        return Mechanism(
            FullBatch(), self.steps, multiplier, self.clip, relation=relation, batch_size=self.rows,
            secure_values=self.secure_values("gradients"),
        )  # fmt: skip

    def learning_rate(self, kappa: float, spread: float) -> float:
        """η = G·(1−β)/T, or less where that is unstable on rows whose second moment has the eigenvalue ``spread``.

        A score bends the logistic loss by at most 1/4 and the softmax by 1/2. The Huber SVM bends more, but only where
        a margin lies within its width of 1: on average over the rows hardly more than the logistic loss.
        """
        noise = kappa * (2 if self.outputs == 1 or self.preconditioned else 1)
        curvature = spread / (4 if self.outputs == 1 else 2)
        travel = noise * self.rows * self.mu * math.sqrt(self.share) / (self.moved * self.clip * self.radius)
        return min(travel * (1 - MOMENTUM) / self.steps, STABLE / curvature)

    def releases(self, mechanism: Mechanism) -> tuple[Statistic, ...]:
        """What the plan releases, in order."""
        made = []
        if self.centred:
            made.append(Statistic("mean", self.mean_sensitivity, self.mean_std, self.mean_share))
        if self.preconditioned:
            made.append(Statistic(SECOND_MOMENT, self.second_sensitivity, self.second_std, SECOND_SHARE))
        made.append(Statistic("gradients", self.moved * self.clip, mechanism.std_at(0), self.share, self.steps))
        return tuple(made)


@quiet
def solve(
    rows: ArrayLike | Matrix, targets: ArrayLike, loss: RowLoss, *, epsilon: float, delta: float, relation: Relation,
    radius: float | None = None, fit_intercept: bool = True, kappa: float = 1.0, steps: int = 60,
    key: AnyKey | None = None, charge: Callable[[Event], None] | None = None, share: float = 1.0, secure: bool = False,
) -> Solution:  # fmt: skip
    """The coefficients of a private linear classifier within (ε, δ), with every release it took to find them.

    Rows longer than ``radius``, a bound chosen without looking at them, are clipped to it; without one every row is
    normalised, and its length is lost. Where lengths carry information give a radius: for columns scaled to [0, 1] half
    the diagonal of the box, √p/2, is a public rule. ``rows`` is dense or CSR, which is never made dense. ``kappa`` is
    the noise allowed on a logit. ``key`` is fresh unless given; one key serves one run on one dataset. ``charge`` is
    called with the event before anything is released. ``share`` as for `gd.calibrated`. ``secure`` takes noise from the
    secure source (docs/secure_noise.md).

    Guarantee: (ε, δ) for neighbours under ``relation``, by the exact profile of all releases together; which are made
    and with how much noise depends on the numbers of rows and columns, the radius, the loss and the arguments alone.
    The number of rows is public, so add/remove is refused. Sums run in float64, and every row's part in a release is
    lowered by what rounding may add to it.
    """
    _check(loss, epsilon, kappa, steps, fit_intercept)
    rule: Rule = "normalise" if radius is None else "clip"
    reach = 1.0 if radius is None else radius
    plain = chunked.designed(rows, radius=reach, rule=rule)
    reach = plain.radius
    checked = chunked.checked(loss, targets, plain.rows)
    gd.check_delta(delta, plain.rows)
    relation = gd.same_size(relation, "auto sets noise and learning rate by the number of rows, which must be public")
    plan = AutoPlan(plain.rows, plain.features, reach, 1.0, relation.reach, steps, loss.outputs, secure)
    plan = plan.within(epsilon, delta, share)
    mechanism = plan.mechanism(relation)
    releases = plan.releases(mechanism)
    event = _event(releases, plan, relation)
    if account(event, relation, exact.NAME).epsilon(delta) > epsilon:
        raise BudgetSpentError(f"epsilon {epsilon!r} is too small to be met in floating point at delta {delta:g}")

    if charge is not None:
        charge(event)
    secret = gd.keyed(key, plan.most_secure_values, 0)
    centre = _noisy_mean(plain, plan, secret) if plan.centred else None
    linear_map, spread = None, SPREAD * reach**2
    if centre is not None and plan.preconditioned:
        linear_map, spread = _preconditioner(plain, centre, plan, secret)
    constant = INTERCEPT * reach if fit_intercept else 0.0
    design = chunked.designed(rows, radius=reach, rule=rule, intercept=constant, centre=centre, linear_map=linear_map)
    learned = plan.learning_rate(kappa, max(spread, constant**2))
    coefficients, _ = gd.solve(design, checked, loss, mechanism, learning_rate=learned, momentum=MOMENTUM, key=secret)
    scored = loss == Logistic() or isinstance(loss, Softmax)
    cut = math.hypot(reach, constant) / plan.clip if plan.preconditioned and scored else None
    folded = _folded(coefficients, constant, centre, linear_map)
    return Solution(*folded, reach, rule, event, releases, relation, secret.reproducible, cut)


def _check(loss: RowLoss, epsilon: float, kappa: float, steps: int, fit_intercept: bool) -> None:
    _validate.positive(epsilon=epsilon, kappa=kappa)
    _validate.step_count(steps=steps)
    if not isinstance(fit_intercept, bool):
        raise OptionError(f"fit_intercept must be True or False, got {_validate.shown(fit_intercept)}")
    if not isinstance(loss, KNOWN):
        raise OptionError(f"auto knows Logistic, HuberSvm and Softmax, got {_validate.shown(loss)}: use gd or sgd")


def unclipped(log_chances: Array, length: float, outputs: int) -> Array:
    """The logarithms (n, classes) of the probabilities at which clipped gradients have mean zero.

    Let q be the probabilities of the classes by the scores of a row, d_k the norm of the residual of class k (‖q − e_k‖
    for a softmax, 1 − q_k for one score), and c what residuals are clipped to: 1/``length``, that of the row in units
    of the clip bound. The clipped gradients of a row whose class is k with probability p_k have mean zero where

        p_k ∝ q_k·max(1, d_k/c),

    and nowhere else: Σ p_k·min(1, c/d_k)·(q − e_k) = 0 says that p_k·min(1, c/d_k) is proportional to q_k. The descent
    ends where they have mean zero over the rows, so p and not q are the probabilities that it fitted. Of two classes
    the one with the larger q never has the smaller p.

    >>> np.exp(unclipped(np.log([[0.2, 0.8]]), 2.0, outputs=1)).round(3).tolist()
    [[0.286, 0.714]]
    """
    chances = np.exp(log_chances)
    residuals = 1 - chances
    if outputs > 1:
        residuals = np.sqrt(np.sum(chances**2, axis=1, keepdims=True) - chances**2 + residuals**2)
    found = log_chances + np.log(np.maximum(1, residuals * length))
    return np.asarray(found - logsumexp(found, axis=1, keepdims=True))


def fitted_chances(log_chances: Array, cut: float, outputs: int) -> Array:
    """The logarithms of the probabilities that a descent with clipped gradients fitted, given those by its scores.

    `unclipped` for a row of typical length, the same for all, so their order stays that of the scores. Two classes
    may come out equally probable over a range of scores: a hundredth of the probabilities by the scores keeps order.

    Guarantee: a function of public numbers and of what has been released.

    >>> np.exp(fitted_chances(np.log([[0.4, 0.6]]), 4.0, outputs=1)).round(3).tolist()
    [[0.499, 0.501]]
    """
    return np.logaddexp(math.log1p(-KEPT) + unclipped(log_chances, cut, outputs), math.log(KEPT) + log_chances)


def _event(releases: tuple[Statistic, ...], plan: AutoPlan, relation: Relation) -> Event:
    """All releases; a noise multiplier is std to half the sensitivity under replace-one, as accountants price it.

    The second moment moves by √2 under replace-one, not by 2: its multiplier is right for this relation alone.
    """

    def leaf(made: Statistic) -> Gaussian | Pinned | Inexact:
        found = Gaussian(plan.moved * made.std / made.sensitivity)
        pinned = Pinned(found, relation) if made.name == SECOND_MOMENT else found
        return gd.with_distance(pinned, plan.secure_values(made.name))

    return Compose(tuple(Repeat(leaf(made), made.count) for made in releases))


def _noisy_mean(plain: Rows, plan: AutoPlan, key: Key) -> Array:
    """The mean row with its noise; a counter of the noise that no step of the descent uses."""
    return gd.noised(key, plan.steps, mean_row(plain), plan.mean_sensitivity, plan.mean_std)


def mean_row(plain: Rows) -> Array:
    """The mean of the rows, before any noise.

    Guarantee: leaving out a row moves it by at most R/n, exchanging one by at most 2R/n, for a public n; summed in
    float64, and lowered by what rounding there may add.

    >>> mean_row(Design([[1.0, 0.0], [0.0, 1.0]], radius=1.0)).round(5).tolist()
    [0.5, 0.5]
    """
    return plain.added(_row_sum)[:, 0] * ((1 - plain.slack) / plain.rows)


def _row_sum(plain: Design, targets: None) -> Array:
    return plain.gathered(np.ones((plain.rows, 1)))


def second_moment(plain: Rows) -> Array:
    """XᵀX/n, before any noise, by a few columns at a time so that sparse rows are never made dense.

    Guarantee: leaving out a row moves its Frobenius norm by at most R²/n, exchanging one by √2·R²/n, for a public n;
    summed in float64, and lowered by what rounding there may add.

    >>> second_moment(Design([[1.0, 0.0], [0.0, 0.5]], radius=1.0)).round(5).tolist()
    [[0.5, 0.0], [0.0, 0.125]]
    """
    total = plain.added(_products)
    return (total + total.T) / 2 * ((1 - 2 * plain.slack) / plain.rows)


def _products(plain: Design, targets: None) -> Array:
    """XᵀX of some rows."""
    total = np.empty((plain.features, plain.features))
    for start in range(0, plain.features, _CHUNK):
        some = np.eye(plain.features, min(_CHUNK, plain.features - start), -start)
        total[:, start : start + _CHUNK] = plain.summed(some, lambda _, columns: columns)
    return total


def symmetric_noise(key: Key, step: int, columns: int, std: float) -> Array:
    """A symmetric matrix of Gaussian noise: std on the diagonal, std/√2 off it.

    In the coordinates (diagonal, √2·upper triangle), whose Euclidean norm is the Frobenius norm, it is N(0, std²).

    >>> noise = symmetric_noise(Key.from_seed(7), step=0, columns=3, std=1.0)
    >>> bool((noise == noise.T).all())
    True
    """
    square = gd.gaussian(key, step, (columns, columns), std)
    return (square + square.T) / 2


def noised_matrix(key: Key, step: int, total: Array, sensitivity: float, std: float) -> Array:
    """A symmetric matrix with noise of `symmetric_noise`, of the source that ``key`` is for.

    Guarantee: as for `gd.noised`, with ``sensitivity`` in the Frobenius norm. Secure noise goes to every entry, in the
    norm of which both halves count; making the sum symmetric afterwards is post-processing and gives the same law.

    >>> found = noised_matrix(Key.from_seed(7).secured(), 0, np.eye(2), sensitivity=1.0, std=1.0)
    >>> bool((found == found.T).all())
    True
    """
    if not key.secure:
        return total + symmetric_noise(key, step, len(total), std)
    square = gd.noised(key, step, total, sensitivity, std)
    return (square + square.T) / 2


def _preconditioner(plain: Rows, centre: Array, plan: AutoPlan, key: Key) -> tuple[Array, float]:
    """M = (A − c·cᵀ)^(−1/2) of the noisy second moment, and the largest eigenvalue of the covariance it leaves.

    It is scaled so that the mean square of a row's norm is about R².
    """
    noisy = noised_matrix(key, plan.steps + 1, second_moment(plain), plan.second_sensitivity, plan.second_std)
    found, vectors = np.linalg.eigh(noisy - np.outer(centre, centre))
    eigenvalues = np.maximum(found, plan.floor)
    # what of the variance along each direction is told from noise, once divided by the clamped eigenvalue
    kept = float(np.sum(np.maximum(found, 0) / eigenvalues))
    stretch = plan.radius / math.sqrt(max(kept, 1.0))
    return np.asarray((vectors * (stretch / np.sqrt(eigenvalues))) @ vectors.T), stretch**2


def _folded(
    coefficients: Array, constant: float, centre: Array | None, linear_map: Array | None
) -> tuple[Array, Array]:
    """Coefficients and intercept for rows before the centre, the map and the constant column were applied."""
    weights = coefficients[:-1] if constant else coefficients
    last = coefficients[-1] if constant else np.zeros(coefficients.shape[1])
    weights = weights if linear_map is None else linear_map @ weights
    return weights, constant * last - (0.0 if centre is None else centre @ weights)
