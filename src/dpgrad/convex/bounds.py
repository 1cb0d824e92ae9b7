"""Bounds on the excess risk of private gradient descent, with every constant written out.

Yu et al., "Gradient Perturbation is Underrated for Differentially Private Convex Optimization" (IJCAI 2020), bound the
expected excess empirical risk E[F(x_out) − F(x*)], over the randomness of the algorithm, x* being the minimiser nearest
to the start x₁. The bounds here are those of the paper with its constants derived, and hold as numbers. They ask for

    E⟨∇F(x_t), x_t − x*⟩ ≥ ν·E‖x_t − x*‖²   at every iterate x₁, …, x_T of the run,

for a convex F, β-smooth where β is used, no clipping that binds, and for DP-SGD noisy gradients g + z of an unbiased g
with E‖g + z‖² ≤ G² at every step, the gradient of an l2 term among them.

Where this differs from the print:

* ν ≥ μ, not "ν = μ always". Definition 3 as printed asks for its inequality at every x; then ν = μ for every
  quadratic (let x − x* grow along the flattest direction), so ν is taken along the run.
* The noise that smooths x_t is η·z, so Definition 3's σ is η·σ; x₁ carries none, so ν must hold there without noise.
* The proof of Theorem 1 leaves out the 2√2 of its own σ, and the bounds for ν = 0 leave out ‖x₁ − x*‖.
* Theorem 2 takes σ from a lemma that asks for ε < c₁T/n², which at T = n²ε² says ε > 1/c₁: nothing for small ε. Here
  the noise multiplier is an argument, to be had from an accountant.
* Theorem 2 for ν = 0 rests on Shamir and Zhang (2013), who project every step on a set of diameter D; Algorithm 2 does
  not project and D is not defined. Here D = ‖x₁ − x*‖ and nothing is projected: the mean of the iterates then has the
  printed order, the last iterate one logarithm more.
* Theorem 2 for ν > 0 asks for ν and for gradients of at most L everywhere, which gives E‖x_t − x*‖² ≤ (L/ν)²; the noise
  of step t−1 alone moves x_t by p·(Lσ/(ν(t−1)))². For p·σ² > 1 the two are at odds at the first steps. So G is an
  argument: it bounds the gradients that occur, such as those of an l2 term (see `sgd_distance`).
* η = 1/(νt) and T = 2·log(n)/(ην) need ν, which depends on the data: a ν read from them is outside the guarantee.

Every bound speaks of the iterate after ``steps`` steps, x_{steps+1}.

>>> problem = Problem(examples=1000, dimension=10, lipschitz=1.0, smoothness=0.25, curvature=0.05, distance=2.0)
>>> choice = gd_choice(problem, epsilon=1.0)
>>> choice.steps, choice.learning_rate, choice.average
(70, 4.0, False)
>>> round(gd_risk(problem, std=0.02, learning_rate=choice.learning_rate, steps=choice.steps), 5)
0.04
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpgrad import _validate
from dpgrad.convex.solvers import gd, sgd
from dpgrad.errors import OptionError
from dpgrad.mechanism import schedules
from dpgrad.mechanism.schedules import Schedule

__all__ = [
    "Choice", "Order", "Problem", "gd_average_risk", "gd_choice", "gd_distance", "gd_risk", "gradient_bound",
    "poisson_gradient_bound", "sgd_average_risk", "sgd_choice", "sgd_distance", "sgd_risk", "table_1", "theorem_1",
    "theorem_2",
]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """The constants of F = (1/n)·Σ f_i that bounds are made of: n, p, L, β, ν and ‖x₁ − x*‖.

    L bounds the gradient of one row, and is what its gradient is clipped to; β may be infinite where a bound does
    without. ``curvature`` is ν along the run: the strong convexity μ always serves, 0 says that none is known.

    >>> Problem(100, 5, lipschitz=1.0, smoothness=0.25, curvature=0.5, distance=1.0)
    Traceback (most recent call last):
    dpgrad.errors.OptionError: curvature must be at most smoothness = 0.25, got 0.5: no direction curves more ...
    """

    examples: int
    dimension: int
    lipschitz: float
    smoothness: float
    curvature: float
    distance: float

    def __post_init__(self) -> None:
        _validate.whole(least=1, examples=self.examples, dimension=self.dimension)
        _validate.non_negative(curvature=self.curvature, distance=self.distance)
        _validate.positive(lipschitz=self.lipschitz)
        if self.smoothness != math.inf:
            _validate.positive(smoothness=self.smoothness)
        if self.curvature > self.smoothness:
            raise OptionError(
                f"curvature must be at most smoothness = {self.smoothness!r}, got {self.curvature!r}: "
                "no direction curves more than the steepest"
            )


class Choice(NamedTuple):
    """The parameters a theorem chooses: learning rate (of step 0, 1, …), number of steps, whether to average.

    >>> Choice(learning_rate=4.0, steps=70, average=False).steps
    70
    """

    learning_rate: float | Schedule
    steps: int
    average: bool


def gd_choice(problem: Problem, epsilon: float) -> Choice:
    """Theorem 1's parameters of DP-GD, whole steps.

    ν > 0: η = 1/β, T = 2·log(n)/(ην), the last iterate. ν = 0: η = 1/β, T = nβε/√p, the mean of x₂, …, x_{T+1}. The
    second T depends on the units of x; Eq. 12 is least at T = nβε·‖x₁−x*‖/(4L·√(p·log(1/δ))).

    >>> gd_choice(Problem(1000, 100, lipschitz=1.0, smoothness=1.0, curvature=0.0, distance=1.0), epsilon=0.5)
    Choice(learning_rate=1.0, steps=50, average=True)
    """
    _validate.positive(epsilon=epsilon, smoothness=problem.smoothness)
    learning_rate = 1 / problem.smoothness
    if problem.curvature > 0:
        steps = math.ceil(2 * math.log(problem.examples) / (learning_rate * problem.curvature))
        return Choice(learning_rate, max(1, steps), False)
    steps = round(problem.examples * problem.smoothness * epsilon / math.sqrt(problem.dimension))
    return Choice(learning_rate, max(1, steps), True)


def gd_distance(problem: Problem, *, std: float | Schedule, learning_rate: float, steps: int) -> float:
    """E‖x_{t+1} − x*‖² after t = ``steps`` steps of DP-GD is at most this (Eq. 9).

    (1−ην)^t·‖x₁ − x*‖² + p·η²·Σ_i (1−ην)^{t−i}·σ_i², for η ≤ 1/β; ``std`` is the noise on each coordinate of the mean
    gradient, constant or a schedule counted from step 0.

    >>> problem = Problem(1000, 10, lipschitz=1.0, smoothness=1.0, curvature=0.5, distance=2.0)
    >>> round(gd_distance(problem, std=0.1, learning_rate=1.0, steps=20), 6)
    0.200004
    """
    _check_rate(problem, learning_rate)
    _validate.whole(least=1, steps=steps)
    kept = 1 - learning_rate * problem.curvature
    start = kept**steps * problem.distance**2
    if callable(std):
        squares = schedules.values(std, steps, name="std", zero=True) ** 2
        total = float(kept ** np.arange(steps - 1, -1, -1.0) @ squares)
    else:
        _validate.non_negative(std=std)
        total = std**2 * (steps if kept == 1 else (1 - kept**steps) / (1 - kept))
    return start + problem.dimension * learning_rate**2 * total


def gd_risk(problem: Problem, *, std: float | Schedule, learning_rate: float, steps: int) -> float:
    """The excess risk of DP-GD's last iterate is at most this: β/2·r² with r² of Eq. 9 (`gd_distance`).

    At Theorem 1's T and σ = 2√2·L·√(T·log(1/δ))/(nε) it is β‖x₁−x*‖²/(2n²) + 8βpL²·log(n)·log(1/δ)/(ν²n²ε²), up
    to the rounding of T.

    >>> problem = Problem(1000, 10, lipschitz=1.0, smoothness=1.0, curvature=0.5, distance=2.0)
    >>> round(gd_risk(problem, std=0.1, learning_rate=1.0, steps=20), 6)
    0.100002
    """
    return problem.smoothness / 2 * gd_distance(problem, std=std, learning_rate=learning_rate, steps=steps)


def gd_average_risk(problem: Problem, *, std: float, learning_rate: float, steps: int) -> float:
    """The excess risk of the mean of DP-GD's iterates x₂, …, x_{T+1} is at most this, whatever ν (Eq. 12).

    ‖x₁−x*‖²/(2ηT) + (η/2)(1+ηβ)·p·σ² for η ≤ 1/β, which at the paper's η = 1/β is β‖x₁−x*‖²/(2T) + p·σ²/β. With σ as in
    `gd_risk` and T = nβε/√p it is √p·(‖x₁−x*‖²/2 + 8L²·log(1/δ))/(nε).

    >>> problem = Problem(1000, 10, lipschitz=1.0, smoothness=1.0, curvature=0.0, distance=2.0)
    >>> round(gd_average_risk(problem, std=0.01, learning_rate=1.0, steps=100), 6)
    0.021
    """
    _check_rate(problem, learning_rate)
    _validate.whole(least=1, steps=steps)
    _validate.non_negative(std=std)
    noise = learning_rate / 2 * (1 + learning_rate * problem.smoothness) * problem.dimension * std**2
    return problem.distance**2 / (2 * learning_rate * steps) + noise


def gradient_bound(problem: Problem, noise_multiplier: float) -> float:
    """G = L·√(1 + p·σ²): E‖g + z‖² ≤ G² for the gradient g of one row and its noise z of std L·σ (Theorem 2).

    >>> problem = Problem(1000, 24, lipschitz=2.0, smoothness=1.0, curvature=0.0, distance=1.0)
    >>> gradient_bound(problem, noise_multiplier=1.0)
    10.0
    """
    _validate.non_negative(noise_multiplier=noise_multiplier)
    return problem.lipschitz * math.sqrt(1 + problem.dimension * noise_multiplier**2)


def poisson_gradient_bound(problem: Problem, noise_multiplier: float, sampling_rate: float) -> float:
    """G = L·√(1 + (1−q)/b + p·σ²/b²), b = q·n: the same for a Poisson sample's sum with noise of std L·σ, over b.

    E‖g‖² = ‖∇F‖² + (1−q)/(q·n²)·Σ‖∇f_i‖²; the paper's Theorem 2 has one row a step, its experiments and practice this.

    >>> problem = Problem(1000, 24, lipschitz=2.0, smoothness=1.0, curvature=0.0, distance=1.0)
    >>> round(poisson_gradient_bound(problem, noise_multiplier=1.0, sampling_rate=0.1), 4)
    2.0114
    """
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.positive(sampling_rate=sampling_rate)
    _validate.unit_interval(sampling_rate=sampling_rate)
    batch = sampling_rate * problem.examples
    noise = problem.dimension * (noise_multiplier / batch) ** 2
    return problem.lipschitz * math.sqrt(1 + (1 - sampling_rate) / batch + noise)


def sgd_choice(problem: Problem, epsilon: float, bound: float, *, short: bool = False) -> Choice:
    """Theorem 2's parameters of DP-SGD with one row a step, whole steps: T = n²ε².

    ``bound`` is G, of `gradient_bound`. ν > 0: η_t = 1/(νt), the last iterate. ν = 0: η_t = D/(G√t), D = ‖x₁−x*‖, the
    mean of the iterates. ``short`` takes T = nε/√p, the paper's second choice, for a risk of order √p·L²·log(n)/(nεν).

    >>> problem = Problem(1000, 25, lipschitz=1.0, smoothness=1.0, curvature=0.5, distance=1.0)
    >>> choice = sgd_choice(problem, epsilon=0.1, bound=gradient_bound(problem, 1.0))
    >>> choice.steps, choice.learning_rate(0), choice.learning_rate(3)
    (10000, 2.0, 0.5)
    """
    _validate.positive(epsilon=epsilon)
    root = problem.examples * epsilon
    steps = max(1, round(root / math.sqrt(problem.dimension) if short else root**2))
    if problem.curvature > 0:
        return Choice(sgd.harmonic(problem.curvature), steps, False)
    return Choice(sgd.root(problem.distance, bound), steps, True)


def sgd_distance(problem: Problem, bound: float, steps: int) -> float:
    """E‖x_t − x*‖² ≤ 2G²/(t·ν²) at t = ``steps`` + 1, for η_t = 1/(νt) and ``bound`` = G (Eq. 13).

    From x₁ = 0 with ν = l2, the weight of ‖x‖²/2, −ν·x_{t+1} is the mean of the t noisy gradients of the rows, so
    the l2 term adds no more than they have: G = 2L·√(1 + p·σ²), twice `gradient_bound`, is sure to do.

    It holds from t = 1 on, where ν‖x₁−x*‖² ≤ ⟨∇F(x₁), x₁−x*⟩ ≤ G‖x₁−x*‖. The recursion of the proof, E r²_{t+1} ≤
    (1−2/t)·E r²_t + G²/(νt)², gives half of it for large t.

    >>> problem = Problem(1000, 25, lipschitz=1.0, smoothness=1.0, curvature=0.5, distance=1.0)
    >>> sgd_distance(problem, bound=2.0, steps=99)
    0.32
    """
    _validate.positive(bound=bound, curvature=problem.curvature)
    _validate.whole(least=1, steps=steps)
    return 2 * bound**2 / ((steps + 1) * problem.curvature**2)


def sgd_risk(problem: Problem, bound: float, steps: int) -> float:
    """The excess risk of DP-SGD's last iterate at `sgd_choice`'s rates is at most this (Theorem 2).

    Of x_T, with h = 1 + log T, for ν > 0 and for ν = 0,

        G²/(νT)·(9·log(1 + T/2) + 3 + 3·log 2 + 2/T)   (or β/2·r² with r² of Eq. 13, where that is less),
        D·G/√T·(2h² + 1.5h − 0.5).

    Derivation, after Shamir and Zhang (2013). Convexity and E‖x_{t+1}−w‖² ≤ E‖x_t−w‖² − 2η_t·E⟨∇F(x_t), x_t−w⟩ + η_t²G²
    give, summed over the last k+1 steps, Σ E[F(x_t) − F(w)] ≤ E‖x_{T−k}−w‖²/(2η_{T−k}) + B_k, where
    B_k = Σ_{t>T−k} E‖x_t−w‖²/2·(1/η_t − 1/η_{t−1}) + G²/2·Σ_{t≥T−k} η_t. Let S_k be the mean of E F over the last k+1
    iterates; w = x_{T−k} gives S_{k−1} ≤ S_k + B_k/(k(k+1)), and w = x* bounds S_k.
    ν > 0: Eq. 13 bounds the distances; for k ≤ T/2 each 1/t is at most 2/T, so B_k ≤ (9k+1)·G²/(νT), and
    S_{T/2} − F(x*) ≤ (2 + 3·log 2 + 2/T)·G²/(νT).
    ν = 0: E‖x_t−x*‖² ≤ D²·(1 + Σ_{s<t} 1/s) ≤ D²(1+h), so B_k ≤ ((2h+3)k + 1)·D·G/√T, and S_{T−1} is bounded as in
    `sgd_average_risk`.

    >>> problem = Problem(1000, 25, lipschitz=1.0, smoothness=float("inf"), curvature=0.5, distance=1.0)
    >>> round(sgd_risk(problem, bound=2.0, steps=10**6), 6)
    0.000985
    """
    _validate.positive(bound=bound)
    _validate.whole(least=1, steps=steps)
    last = steps + 1
    if problem.curvature > 0:
        factor = 9 * math.log1p(last / 2) + 3 + 3 * math.log(2) + 2 / last
        smooth = problem.smoothness / 2 * sgd_distance(problem, bound, steps)
        return min(smooth, bound**2 / (problem.curvature * last) * factor)
    h = 1 + math.log(last)
    return problem.distance * bound / math.sqrt(last) * (2 * h**2 + 1.5 * h - 0.5)


def sgd_average_risk(problem: Problem, bound: float, steps: int) -> float:
    """The excess risk of the mean of DP-SGD's iterates, whatever ν, for η_t = D/(G√t), is at most this (Theorem 2).

    D·G·√(T+1)/T·(2 + log(T)/2) for the mean of x₂, …, x_{T+1}, T = ``steps`` and D = ‖x₁−x*‖: Σ E[F(x_t) − F(x*)] ≤
    Σ E‖x_t−x*‖²/2·(1/η_t − 1/η_{t−1}) + G²/2·Σ η_t with E‖x_t−x*‖² ≤ D²·(1 + Σ_{s<t} 1/s).

    >>> problem = Problem(1000, 25, lipschitz=1.0, smoothness=1.0, curvature=0.0, distance=1.0)
    >>> round(sgd_average_risk(problem, bound=2.0, steps=10**6), 4)
    0.0178
    """
    _validate.positive(bound=bound)
    _validate.whole(least=1, steps=steps)
    return problem.distance * bound * math.sqrt(steps + 1) / steps * (2 + math.log(steps) / 2)


def theorem_1(problem: Problem, epsilon: float, delta: float) -> float:
    """Theorem 1 as a number: the excess risk of DP-GD at `gd_choice` and Algorithm 1's σ is at most this.

    σ = 2√2·L·√(T·log(1/δ))/(nε), for replace-one neighbours. `gd.calibrated` asks for less noise: give its std to
    `gd_risk` or `gd_average_risk` for the smaller figure.

    >>> problem = Problem(10_000, 10, lipschitz=1.0, smoothness=0.25, curvature=0.05, distance=2.0)
    >>> round(theorem_1(problem, epsilon=1.0, delta=1e-8), 5)
    0.0137
    """
    choice = gd_choice(problem, epsilon)
    std = problem.lipschitz * gd.closed_form(choice.steps, epsilon, delta) / problem.examples
    risk = gd_average_risk if choice.average else gd_risk
    return risk(problem, std=std, learning_rate=1 / problem.smoothness, steps=choice.steps)


def theorem_2(problem: Problem, epsilon: float, noise_multiplier: float, *, short: bool = False) -> float:
    """Theorem 2 as a number: the excess risk of DP-SGD with one row a step at `sgd_choice` is at most this.

    ``noise_multiplier`` is σ, from an accountant, for that many steps at that ε. For ν > 0, G is twice
    `gradient_bound`, as an l2 term asks for: of that alone it is sure that both ν and G hold (see above).

    >>> problem = Problem(1000, 25, lipschitz=1.0, smoothness=0.25, curvature=0.05, distance=1.0)
    >>> round(theorem_2(problem, epsilon=0.1, noise_multiplier=1.0), 3)
    1.04
    """
    bound = gradient_bound(problem, noise_multiplier) * (2 if problem.curvature > 0 else 1)
    choice = sgd_choice(problem, epsilon, bound, short=short)
    risk = sgd_average_risk if choice.average else sgd_risk
    return risk(problem, bound, choice.steps)


def _check_rate(problem: Problem, learning_rate: float) -> None:
    _validate.positive(smoothness=problem.smoothness, learning_rate=learning_rate)
    if learning_rate * problem.smoothness > 1 + 1e-12:
        most = 1 / problem.smoothness
        raise OptionError(f"learning_rate must be at most 1/smoothness = {most:g}, got {learning_rate!r}")


class Order(NamedTuple):
    """One row of Table 1: orders of growth, without constants; None where the paper has no bound.

    >>> Order("DP-GD, Jayaraman et al.", convex=None, strongly_convex=0.5).strongly_convex
    0.5
    """

    method: str
    convex: float | None
    strongly_convex: float | None


def table_1(problem: Problem, strong_convexity: float, epsilon: float) -> tuple[Order, ...]:
    """Table 1's orders of the excess risk, as printed: to compare how methods grow, never as bounds.

    L = 1; log(1/δ), constants and ‖x₁−x*‖ are left out, and log(n) stands for max(log n, 1). The last two rows are the
    paper's own: the smaller of two orders, with or without strong convexity.

    >>> problem = Problem(10_000, 100, lipschitz=1.0, smoothness=0.25, curvature=0.05, distance=1.0)
    >>> for row in table_1(problem, strong_convexity=1e-4, epsilon=1.0):
    ...     print(f"{row.method:30} {row.convex or 0:.2g} {row.strongly_convex or 0:.2g}")
    objective perturbation         0.001 0.01
    output perturbation            0.0063 25
    DP-SGD, Bassily et al.         0.028 0.85
    DP-GD, Jayaraman et al.        0 2.1e+03
    DP-GD, expected curvature      0.00092 0.00092
    DP-SGD, expected curvature     0.00018 0.00018
    """
    _validate.positive(epsilon=epsilon, smoothness=problem.smoothness)
    _validate.non_negative(strong_convexity=strong_convexity)
    beta, nu, mu = problem.smoothness, problem.curvature, strong_convexity
    log = max(math.log(problem.examples), 1.0)
    root = math.sqrt(problem.dimension) / (problem.examples * epsilon)
    gd = min(root, beta * root**2 * log / nu**2) if nu else root
    sgd = min(root * log, root**2 * log / nu) if nu else root * log
    return (
        Order("objective perturbation", root, root**2 / mu if mu else None),
        Order("output perturbation", (math.sqrt(beta) * root) ** (2 / 3), beta * root**2 / mu**2 if mu else None),
        Order("DP-SGD, Bassily et al.", root * log**1.5, root**2 * log**2 / mu if mu else None),
        Order("DP-GD, Jayaraman et al.", None, beta * root**2 * log**2 / mu**2 if mu else None),
        Order("DP-GD, expected curvature", gd, gd),
        Order("DP-SGD, expected curvature", sgd, sgd),
    )
