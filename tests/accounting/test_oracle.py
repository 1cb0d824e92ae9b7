"""Self-tests of the oracle: closed forms, reference values, and its two numerical routes against each other."""

from __future__ import annotations

import math

import pytest
from oracle import DIRECTIONS, OracleUnsure, delta, epsilon, random_cases
from scipy.integrate import quad
from scipy.stats import norm

CASE_A = [(0.01, 4.0, 10_000)]
CASE_B = [(512 / 60_000, 0.8916415, 2343)]
CASE_D = [(1024 / 50_000, 1.9686454, 1953)]


def schedule(total: int) -> list[tuple[float, float, int]]:
    return [(0.01, min(2.0, 1 + t / total), 1) for t in range(total)]


@pytest.mark.parametrize(
    ("steps", "target", "direction", "expected", "tol"),
    [
        (CASE_A, 1e-5, "remove", 0.9468668008, 1e-10),
        (CASE_A, 1e-5, "add", 0.9370364254, 1e-10),
        (CASE_A, 1e-5, "antipodal", 1.9931201, 1e-7),
        (CASE_B, 1e-5, "remove", 3.0, 1e-7),
        (CASE_B, 1e-5, "antipodal", 4.5994279, 1e-7),
        (CASE_D, 1e-5, "remove", 2.0, 1e-7),
        ([(1.0, math.sqrt(8.0), 1)], 1e-5, "remove", 1.3564673645, 1e-10),
        ([(1.0, math.sqrt(0.5), 1)], 1e-5, "remove", 6.5729700670, 1e-10),
        ([(0.01, 1.0, 10_000)], 1e-10, "remove", 9.31614, 1e-5),
        ([(0.01, 1.0, 1000)], 1e-12, "remove", 3.9143, 1e-4),
        ([(0.01, 1.0, 1000)], 3e-14, "remove", 4.394, 1e-3),
        ([(0.01, 0.5, 1)], 1e-5, "remove", 3.03, 0.01),
        ([(0.01, 1.0, 100)], 1e-5, "remove", 0.7180, 1e-4),
        # dp-accounting's pessimistic 0.04527 at a grid of 1e-6 (0.04767 at 1e-5); the contour and the density agree on:
        pytest.param([(1e-5, 1.0, 1_000_000)], 1e-6, "remove", 0.04524404197, 1e-10, marks=pytest.mark.exhaustive),
    ],
)
def test_reference_values(
    steps: list[tuple[float, float, int]], target: float, direction: str, expected: float, tol: float
) -> None:
    assert epsilon(steps, target, direction) == pytest.approx(expected, abs=tol)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        pytest.param(100, 0.407809735, marks=pytest.mark.exhaustive),
        (1000, 1.073270850),
        pytest.param(10_000, 3.609786679, marks=pytest.mark.exhaustive),
    ],
)
def test_schedule(total: int, expected: float) -> None:
    assert epsilon(schedule(total), 1e-5, "remove") == pytest.approx(expected, abs=2e-9)


def test_remove_dominates_in_reference_cases() -> None:
    for steps in (CASE_A, CASE_B, CASE_D):
        assert epsilon(steps, 1e-5, "add") < epsilon(steps, 1e-5, "remove")


def gauss(mu: float, eps: float) -> float:
    return float(norm.sf(eps / mu - mu / 2) - math.exp(eps) * norm.sf(eps / mu + mu / 2))


def test_one_step_is_amplified_gaussian() -> None:
    """δ_remove(ε) = q δ_Gauss(log(1 + (e^ε-1)/q)), and for the antipodal pair the integral of (P - e^ε Q)₊."""
    q, sigma, eps = 0.2, 0.9, 0.4
    assert delta([(q, sigma, 1)], eps, "remove") == pytest.approx(
        q * gauss(1 / sigma, math.log1p(math.expm1(eps) / q)), rel=1e-12
    )

    def excess(x: float, sign: int) -> float:
        centre, plus, minus = (norm.pdf(x, m, sigma) for m in (0.0, 1.0, -1.0))
        mix = (1 - q) * centre + q * plus
        other = (1 - q) * centre + q * minus if sign == 0 else centre
        p, r = (other, mix) if sign < 0 else (mix, other)
        return max(p - math.exp(eps) * r, 0.0)

    for direction, sign, e in (("remove", 1, eps), ("add", -1, eps), ("antipodal", 0, eps)):
        value = quad(excess, -10, 10, args=(sign,), epsabs=1e-14, epsrel=1e-12, limit=400, points=[-1, 0, 0.5, 1])[0]
        assert delta([(q, sigma, 1)], e, direction) == pytest.approx(value, rel=1e-8, abs=1e-13)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_numerical_routes_match_closed_forms(direction: str) -> None:
    one = [(0.1, 1.0, 1)]
    assert delta(one, 0.06, direction, "density") == pytest.approx(delta(one, 0.06, direction), rel=1e-12)
    if direction == "antipodal":  # for the others the characteristic function of one step decays too slowly
        assert delta(one, 0.06, direction, "contour") == pytest.approx(delta(one, 0.06, direction), rel=1e-11)
    full = [(1.0, 8.0, 3), (1.0, 5.0, 2)]
    assert delta(full, 2.0, direction, "contour") == pytest.approx(delta(full, 2.0, direction), rel=1e-11)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_steps_by_nested_quadrature(direction: str) -> None:
    """δ₂(ε) = E_P[δ₁(ε - L)] over the first step, with the closed form for the second (extended to ε - L < 0)."""
    q, sigma, eps = 0.3, 1.1, 0.35

    def one(e: float) -> float:
        if e >= 0:
            return delta([(q, sigma, 1)], e, direction)
        swap = {"remove": "add", "add": "remove", "antipodal": "antipodal"}[direction]
        return -math.expm1(e) + math.exp(e) * delta([(q, sigma, 1)], -e, swap)  # duality of the profile

    def ratio(x: float, m: float) -> float:
        return math.log(1 - q + q * math.exp((2 * m * x - 1) / (2 * sigma**2)))

    def integrand(x: float) -> float:
        up, down = ratio(x, 1.0), ratio(x, -1.0)
        loss = {"remove": up, "add": -up, "antipodal": up - down}[direction]
        return norm.pdf(x, 0, sigma) * (1.0 if direction == "add" else math.exp(up)) * one(eps - loss)

    # a kink-free integrand, except that δ₁ of ``add`` vanishes to all orders at the largest loss
    value = quad(integrand, -11, 12, epsabs=0, epsrel=1e-10, limit=60)[0]
    for route in ("contour", "density"):
        assert delta([(q, sigma, 2)], eps, direction, route) == pytest.approx(value, rel=2e-9)


@pytest.mark.parametrize(
    ("steps", "eps", "direction"),
    [
        ([(0.01, 0.7, 20)], 0.1, "remove"),
        pytest.param([(0.01, 0.7, 20)], 0.1, "add", marks=pytest.mark.exhaustive),
        ([(0.02, 1.3, 8), (0.05, 2.0, 3)], 0.1, "antipodal"),
        pytest.param([(0.03, 1.0, 5), (0.01, 0.8, 2), (0.2, 3.0, 4)], 0.5, "remove", marks=pytest.mark.exhaustive),
    ],
)
def test_routes_agree(steps: list[tuple[float, float, int]], eps: float, direction: str) -> None:
    assert delta(steps, eps, direction, "contour") == pytest.approx(delta(steps, eps, direction, "density"), rel=2e-10)


def test_slow_characteristic_function() -> None:
    """Tiny q and few steps: only the density route gets there."""
    steps = [(1e-5, 1.0, 100)]
    assert epsilon(steps, 1e-10, "remove", "density") == pytest.approx(0.00211992563572624, rel=1e-10)


def test_inverse_and_edges() -> None:
    for steps, target, direction in ((CASE_B, 1e-6, "add"), ([(0.05, 0.6, 2)], 1e-7, "remove")):
        eps = epsilon(steps, target, direction)
        assert delta(steps, eps, direction) == pytest.approx(target, rel=2e-9)
    assert epsilon([(1e-4, 50.0, 1)], 1e-3, "remove") == 0.0
    assert epsilon([(0.0, 1.0, 10)], 1e-5, "remove") == 0.0
    assert delta([(0.1, 1.0, 1)], 0.2, "add") == 0.0  # beyond the largest loss, -log(1-q)
    assert delta([(0.1, 1.0, 3)], 0.4, "add", "density") == 0.0
    with pytest.raises(ValueError, match="direction"):
        delta(CASE_A, 1.0, "sideways")


def test_raises_when_out_of_reach() -> None:
    with pytest.raises(OracleUnsure):
        delta([(1e-5, 0.3, 3)], 20.0, "remove", "contour")
    with pytest.raises(OracleUnsure):
        delta([(0.001 * k, 0.5, 1) for k in range(1, 60)], 1.0, "remove", "density")


def test_random_cases_are_seeded() -> None:
    first = list(random_cases(1, 3, max_convolutions=2))
    assert first == list(random_cases(1, 3, max_convolutions=2))
    assert all(0.01 <= eps <= 60 for *_, eps in first)
