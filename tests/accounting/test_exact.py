"""The closed form of full-batch Gaussians, against 60-digit arithmetic down to δ = 1e-100."""

import math
from typing import Any

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad.accounting import ACCOUNTANTS, account, exact
from dpgrad.events import NOTHING, Compose, Event, FixedSize, Gaussian, Poisson, Relation, Repeat, Shuffle

MUS = [1e-6, 1e-4, 0.01, 0.3, 0.499, 0.501, 1.0, 3.0, 10.0, 50.0]
DELTAS = [0.3, 1e-2, 1e-5, 1e-15, 1e-100]


def true_delta(mu: float, epsilon: float, digits: int = 300) -> mpmath.mpf:
    """Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), with digits to spare for the cancellation."""
    with mpmath.workdps(digits):
        m, e, half = mpmath.mpf(mu), mpmath.mpf(epsilon), mpmath.mpf(1) / 2
        return (
            mpmath.erfc((e / m - m / 2) / mpmath.sqrt(2)) * half
            - mpmath.exp(e) * mpmath.erfc((e / m + m / 2) / mpmath.sqrt(2)) * half
        )


class TestAgainstManyDigits:
    @pytest.mark.parametrize("delta", DELTAS)
    @pytest.mark.parametrize("mu", MUS)
    def test_epsilon_is_right_and_from_above(self, mu: float, delta: float) -> None:
        found = exact.epsilon(mu, delta)
        if found == 0:
            assert true_delta(mu, 0.0) <= mpmath.mpf(delta) * (1 + mpmath.mpf(1e-13))
            return
        assert true_delta(mu, found) <= delta
        # twelve digits, or what the rounding of ε/μ − μ/2 leaves where ε is small against μ²
        assert true_delta(mu, found * (1 - 4e-12)) > delta

    @pytest.mark.parametrize("mu", MUS)
    @pytest.mark.parametrize("sigmas", [0.0, 0.7, 2.0, 5.0, 8.0, 21.0])
    def test_delta(self, mu: float, sigmas: float) -> None:
        epsilon = mu * sigmas + mu * mu / 2
        truth = true_delta(mu, epsilon)
        found = exact.log_delta(mu, epsilon)
        assert found == pytest.approx(float(mpmath.log(truth)), rel=1e-12, abs=1e-11)

    @given(st.floats(1e-6, 50.0), st.floats(0.0, 30.0))
    @settings(max_examples=100)
    def test_delta_anywhere(self, mu: float, sigmas: float) -> None:
        epsilon = max(mu * (sigmas - 8) + mu * mu / 2, 0.0)
        profile = exact.GaussianProfile(mu, Gaussian(1.0), Relation.ADD_REMOVE)
        assert profile.delta(epsilon) == pytest.approx(float(true_delta(mu, epsilon)), rel=1e-10)

    @pytest.mark.parametrize("delta", DELTAS)
    @pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 8.0, 100.0])
    def test_the_largest_mu(self, epsilon: float, delta: float) -> None:
        mu = exact.mu_for(epsilon, delta)
        assert true_delta(mu, epsilon) <= mpmath.mpf(delta) * (1 + mpmath.mpf(1e-13))
        assert true_delta(mu * (1 + 1e-11), epsilon) > delta

    def test_case_h(self) -> None:
        """The reference values of full batches."""
        assert round(exact.epsilon(math.sqrt(1 / 8), 1e-5), 10) == 1.3564673645
        assert round(exact.account(Repeat(Gaussian(8.0), 128)).epsilon(1e-5), 10) == 6.5729700670


class TestEvents:
    def test_precisions_add(self) -> None:
        event = Compose(
            (Repeat(Gaussian(4.0), 8), Gaussian(2.0), Poisson(1.0, Gaussian(1.0)), Poisson(0.0, Gaussian(1.0)))
        )
        assert exact.account(event).mu == pytest.approx(math.sqrt(8 / 16 + 1 / 4 + 1), rel=1e-15)

    @pytest.mark.parametrize("leaf", [Gaussian(3.0), Poisson(1.0, Gaussian(3.0)), FixedSize(9, 9, Gaussian(3.0))])
    def test_replace_one_moves_by_two_clips(self, leaf: Event) -> None:
        assert exact.account(leaf, Relation.REPLACE_ONE).mu == pytest.approx(2 / 3, rel=1e-15)

    def test_shuffle_is_one_gaussian_an_epoch(self) -> None:
        event = Repeat(Shuffle(117, Gaussian(2.0)), 20)
        assert exact.account(event, Relation.ZERO_OUT).mu == pytest.approx(math.sqrt(20) / 2, rel=1e-15)
        assert exact.account(event, Relation.REPLACE_ONE).mu == pytest.approx(math.sqrt(20), rel=1e-15)

    def test_nothing_is_free(self) -> None:
        for event in (NOTHING, Repeat(Gaussian(1.0), 0), Poisson(0.0, Gaussian(1.0))):
            profile = exact.account(event)
            assert (profile.epsilon(1e-100), profile.delta(0.0)) == (0, 0)

    def test_any_number_of_steps(self) -> None:
        assert exact.account(Repeat(Gaussian(1e6), 10**12)).epsilon(1e-5) == exact.epsilon(1.0, 1e-5)

    @given(st.floats(0.3, 50.0), st.integers(1, 10**6), st.floats(1e-15, 0.1), st.sampled_from(Relation))
    @settings(max_examples=40)
    @pytest.mark.parametrize(
        "name", [n for n in ACCOUNTANTS if n not in ("exact", "moments-asymptotic", "strong-printed")]
    )
    def test_no_accountant_is_below(
        self, name: str, noise: float, steps: int, delta: float, relation: Relation
    ) -> None:
        """On plain Gaussians every accountant that guarantees anything is at least the exact one."""
        event = Repeat(Gaussian(noise), steps)
        truth = exact.account(event, relation).epsilon(delta)
        assert account(event, relation, name).epsilon(delta) >= truth * (1 - 1e-12)

    @given(st.floats(0.3, 50.0), st.integers(1, 10**6), st.floats(1e-15, 0.1), st.floats(1.0, 3.0))
    @settings(max_examples=60)
    def test_monotone(self, noise: float, steps: int, delta: float, factor: float) -> None:
        here = exact.account(Repeat(Gaussian(noise), steps)).epsilon(delta)
        slack = 1 + 1e-12
        assert exact.account(Repeat(Gaussian(noise * factor), steps)).epsilon(delta) <= here * slack
        assert exact.account(Repeat(Gaussian(noise), math.ceil(steps * factor))).epsilon(delta) * slack >= here
        assert exact.account(Repeat(Gaussian(noise), steps)).epsilon(min(delta * factor, 0.5)) <= here * slack


class TestRefusals:
    @pytest.mark.parametrize("relation", Relation)
    def test_sampled_events(self, relation: Relation) -> None:
        with pytest.raises(
            ValueError, match=r"accountant exact prices full-batch Gaussians only, got Poisson .* 0\.1: use"
        ):
            exact.account(Repeat(Poisson(0.1, Gaussian(1.0)), 10), relation)

    def test_fixed_size(self) -> None:
        with pytest.raises(ValueError, match="accountant exact prices full-batch Gaussians only, got FixedSize"):
            exact.account(FixedSize(10, 1, Gaussian(1.0)), Relation.REPLACE_ONE)
        with pytest.raises(ValueError, match="fixed-size sampling has no price under zero-out"):
            exact.account(FixedSize(10, 1, Gaussian(1.0)), Relation.ZERO_OUT)

    def test_shuffle_under_add_remove(self) -> None:
        with pytest.raises(ValueError, match="shuffle has no price under add-remove"):
            exact.account(Shuffle(10, Gaussian(1.0)))

    @pytest.mark.parametrize("delta", [0, 1, -1, math.nan, math.inf, True, None, "1e-5"])
    def test_delta(self, delta: Any) -> None:
        with pytest.raises(ValueError, match="delta must") as error:
            exact.account(Gaussian(1.0)).epsilon(delta)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="delta must"):
            exact.mu_for(1.0, delta)

    @pytest.mark.parametrize("epsilon", [-1e-9, math.nan, math.inf, True, None])
    def test_epsilon(self, epsilon: Any) -> None:
        with pytest.raises(ValueError, match="epsilon must"):
            exact.account(Gaussian(1.0)).delta(epsilon)
        with pytest.raises(ValueError, match="epsilon must"):
            exact.mu_for(epsilon, 1e-5)
