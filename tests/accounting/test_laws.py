"""The literature's rules of thumb as functions."""

import math

import pytest

from dpgrad.accounting import exact, historical


def test_scaling_laws_scale() -> None:
    one = historical.moments_scale(0.01, 100, 1.0, 1e-5)
    assert one == pytest.approx(0.01 * math.sqrt(100 * math.log(1e5)))
    assert historical.moments_scale(0.02, 100, 1.0, 1e-5) == pytest.approx(2 * one)
    assert historical.moments_scale(0.01, 400, 1.0, 1e-5) == pytest.approx(2 * one)
    assert historical.moments_scale(0.01, 100, 2.0, 1e-5) == pytest.approx(one / 2)
    assert historical.strong_scale(0.01, 100, 1.0, 1e-5) == pytest.approx(one * math.sqrt(math.log(100 / 1e-5)))


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 0.999])
def test_classical_gaussian_is_more_noise_than_needed(epsilon: float) -> None:
    assert historical.classical_gaussian(epsilon, 1e-5) > 1 / exact.mu_for(epsilon, 1e-5)


def test_classical_gaussian_is_refused_where_it_fails() -> None:
    with pytest.raises(ValueError, match=r"below 1, got 8: use 1 / exact.mu_for"):
        historical.classical_gaussian(8, 1e-5)
    printed = math.sqrt(2 * math.log(1.25e5)) / 50
    assert printed < 1 / exact.mu_for(50.0, 1e-5)  # what it would have said is too little


def test_amplification_is_more_than_the_papers() -> None:
    epsilon, delta = historical.amplification(2.0, 1e-5, 0.1)
    assert epsilon == pytest.approx(math.log(1 + 0.1 * (math.exp(2) - 1)))
    assert epsilon > 0.1 * 2.0
    assert delta == pytest.approx(1e-6)
    assert historical.amplification(2.0, 1e-5, 1.0) == (pytest.approx(2.0), 1e-5)
    assert historical.amplification(2.0, 1e-5, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.9])
def test_momentum_noise_is_the_sum_it_stands_for(momentum: float) -> None:
    for steps in (1, 2, 50):
        assert historical.momentum_noise(momentum, steps) == pytest.approx(
            sum(momentum ** (2 * t) for t in range(steps))
        )
    assert historical.momentum_noise(momentum, 10_000) == pytest.approx(historical.momentum_noise(momentum))
    assert round(historical.momentum_noise(0.9), 2) == 5.26


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="momentum must lie in"):
        historical.momentum_noise(1.0)
    with pytest.raises(ValueError, match="steps must be"):
        historical.momentum_noise(0.9, 0)
    with pytest.raises(ValueError, match="sampling_rate must lie in"):
        historical.moments_scale(1.5, 10, 1.0, 1e-5)
    with pytest.raises(ValueError, match="epsilon must be positive"):
        historical.strong_scale(0.5, 10, 0.0, 1e-5)
    with pytest.raises(ValueError, match="delta must lie"):
        historical.amplification(1.0, 1.5, 0.1)
