"""The closed form of full-batch Gaussians, against 60-digit arithmetic down to δ = 1e-100."""

import math
from itertools import combinations
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import common, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.special import ndtr

from dpgrad.accounting import ACCOUNTANTS, account, exact
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Poisson,
    Relation,
    Repeat,
    Shifted,
    Shuffle,
)

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

    @given(st.floats(-6.0, 1.0), st.floats(-4.0, 1.0))
    @settings(max_examples=200)
    def test_delta_at_a_negative_epsilon(self, size: float, sigmas: float) -> None:
        """Where mixed profiles ask for it: at small μ the two terms of the formula all but cancel."""
        mu, epsilon = 10**size, -(10 ** (size + sigmas))
        assert math.exp(exact.log_delta(mu, epsilon)) == pytest.approx(float(true_delta(mu, epsilon)), rel=1e-11)

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


ZERO_OUT, REPLACE_ONE = Relation.ZERO_OUT, Relation.REPLACE_ONE


def by_hand(losses: list[tuple[float, float]], certain: float, mu: float, epsilon: float) -> float:
    """δ of losses with their probabilities, certain failure and a Gaussian, by quadrature over the Gaussian's loss."""
    loss = np.linspace(mu**2 / 2 - 12 * mu, mu**2 / 2 + 12 * mu, 200_001)
    weight = np.exp(-(((loss - mu**2 / 2) / mu) ** 2) / 2)
    weight /= weight.sum()
    inside = sum(p * float(weight @ np.maximum(-np.expm1(epsilon - loss - x), 0)) for x, p in losses)
    return certain + (1 - certain) * inside


class TestApproximate:
    @pytest.mark.parametrize(
        ("epsilon", "delta", "count"), [(0.1, 0.0, 10), (0.5, 1e-4, 5), (2.0, 1e-3, 1), (0.05, 1e-9, 200)]
    )
    @pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 0.99])
    def test_equal_leaves_by_the_optimal_composition_theorem(
        self, epsilon: float, delta: float, count: int, share: float
    ) -> None:
        """Kairouz, Oh and Viswanath (2015), Theorem 3.3, which holds at ε = (k − 2i)·ε₀ and bounds in between."""
        i = int(share * count / 2)
        at = (count - 2 * i) * epsilon
        with mpmath.workdps(40):
            e = mpmath.mpf(epsilon)
            terms = [
                mpmath.binomial(count, fails)
                * (mpmath.exp((count - fails) * e) - mpmath.exp((count - 2 * i + fails) * e))
                for fails in range(i)
            ]
            inner = mpmath.fsum(terms) / (1 + mpmath.exp(e)) ** count
            truth = float(1 - (1 - mpmath.mpf(delta)) ** count * (1 - inner))
        found = exact.account(Repeat(Approximate(epsilon, delta, REPLACE_ONE), count), REPLACE_ONE).delta(at)
        assert found == pytest.approx(truth, rel=1e-9, abs=1e-18)

    @pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 3.0])
    def test_with_gaussians_it_is_the_mean_over_the_signs(self, epsilon: float) -> None:
        event = Compose((Approximate(0.5, 1e-3, ZERO_OUT), Approximate(1.0, 0, ZERO_OUT), Repeat(Gaussian(2.0), 3)))
        up = [1 / (1 + math.exp(-x)) for x in (0.5, 1.0)]
        losses = [
            (a * 0.5 + b * 1.0, (up[0] if a > 0 else 1 - up[0]) * (up[1] if b > 0 else 1 - up[1]))
            for a in (-1, 1)
            for b in (-1, 1)
        ]
        truth = by_hand(losses, 1e-3, math.sqrt(3) / 2, epsilon)
        assert exact.account(event, ZERO_OUT).delta(epsilon) == pytest.approx(truth, rel=1e-6)

    def test_agrees_with_dp_accounting(self) -> None:
        event = Compose((Repeat(Approximate(0.2, 1e-6, ZERO_OUT), 4), Gaussian(3.0)))
        one = privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(0.2, 1e-6), value_discretization_interval=1e-4
        )
        gauss = privacy_loss_distribution.from_gaussian_mechanism(3.0, value_discretization_interval=1e-4)
        peer = one.self_compose(4).compose(gauss)
        profile = exact.account(event, ZERO_OUT)
        for delta in (1e-5, 1e-3):
            found = profile.epsilon(delta)
            assert found <= peer.get_epsilon_for_delta(delta) <= found + 2e-3

    def test_one_alone_is_itself(self) -> None:
        profile = exact.account(Approximate(1.0, 1e-5, ZERO_OUT), ZERO_OUT)
        assert profile.delta(1.0) == pytest.approx(1e-5, rel=1e-9)
        assert profile.delta(1e3) == pytest.approx(1e-5, rel=1e-9)
        assert profile.epsilon(9.9e-6) == math.inf
        assert 0.9 < profile.epsilon(1.01e-5) <= 1
        pure = exact.account(Approximate(1.0, 0.0, ZERO_OUT), ZERO_OUT)
        assert pure.delta(1.0) == 0
        assert 0.999 < pure.epsilon(1e-9) <= 1

    def test_too_many_signs_add_up(self) -> None:
        many = exact.account(Repeat(Approximate(1e-6, 0, ZERO_OUT), 10**6), ZERO_OUT)
        assert many.epsilon(1e-9) == pytest.approx(1.0, rel=1e-6)
        assert exact.account(Repeat(Approximate(1e-3, 0, ZERO_OUT), 1000), ZERO_OUT).epsilon(1e-9) < 0.2

    def test_another_relation_is_refused(self) -> None:
        for declared in Relation:
            for asked in set(Relation) - {declared}:
                with pytest.raises(ValueError, match=f"under {declared} has no price under {asked}: ask for relation"):
                    exact.account(Approximate(1.0, 0.0, declared), asked)


def positive_part(shifts: float, mus: list[float], mu: float, epsilon: float) -> float:
    """δ(ε) of Σ(s + max(0, Gᵢ)) + G₀, by convolution on a fine lattice with losses rounded to it."""
    h = 2e-3
    reach = int(40 / h)

    def law(one: float, *, positive: bool) -> NDArray[np.float64]:
        edges = (np.arange(-reach, reach + 2) - 0.5) * h
        mass = np.diff(ndtr((edges - one**2 / 2) / one))
        if positive:
            mass[reach] += mass[:reach].sum()
            mass[:reach] = 0
        return mass

    total = law(mu, positive=False) if mu else np.eye(1, 2 * reach + 1, reach)[0]
    for one in mus:
        total = fftconvolve(total, law(one, positive=True))[reach : 3 * reach + 1]
    loss = np.arange(-reach, reach + 1) * h + shifts
    return float(np.maximum(total, 0) @ np.maximum(-np.expm1(epsilon - loss), 0))


class TestShifted:
    @pytest.mark.parametrize("relation", Relation)
    def test_one_alone_has_the_gaussian_profile_beyond_its_shift(self, relation: Relation) -> None:
        profile, plain = (exact.account(e, relation) for e in (Shifted(0.3, Gaussian(2.0)), Gaussian(2.0)))
        for epsilon in (0.3, 0.5, 2.0):
            assert profile.delta(epsilon) == pytest.approx(plain.delta(epsilon - 0.3), rel=1e-9)
        assert profile.epsilon(1e-6) == pytest.approx(0.3 + plain.epsilon(1e-6), rel=1e-9)

    def test_below_its_shift_it_is_the_loss_that_is_never_below_it(self) -> None:
        profile = exact.account(Shifted(0.3, Gaussian(2.0)), ZERO_OUT)
        for epsilon in (0.0, 0.1, 0.29):
            assert profile.delta(epsilon) == pytest.approx(positive_part(0.3, [0.5], 0, epsilon), rel=1e-4)

    @pytest.mark.parametrize(
        ("noises", "plain"), [([2.0], 1.0), ([2.0, 2.0], 0.3), ([1.0, 2.0, 2.0], 0.5), ([1.5] * 4, 0.0)]
    )
    @pytest.mark.parametrize("epsilon", [1.5, 2.5, 4.0])  # the FFT of the oracle errs by 1e-16
    def test_composition_bounds_the_convolution(self, noises: list[float], plain: float, epsilon: float) -> None:
        shift, mus = 0.1 * len(noises), [1 / z for z in noises]
        parts: list[Event] = [Shifted(0.1, Gaussian(z)) for z in noises]
        event = Compose((*parts, Gaussian(1 / plain)) if plain else tuple(parts))
        truth = positive_part(shift, mus, plain, epsilon)
        found = exact.account(event, ZERO_OUT).delta(epsilon)
        alone = math.exp(exact.log_delta(math.sqrt(sum(m * m for m in mus) + plain**2), epsilon - shift))
        assert max(truth, alone) <= found * (1 + 1e-4)
        assert found <= (2 ** len(noises)) * truth

    def test_ten_cost_little_more_than_ten_gaussians(self) -> None:
        ten = exact.account(Repeat(Shifted(0.0, Gaussian(50.0)), 10), REPLACE_ONE).epsilon(1e-9)
        plain = exact.account(Repeat(Gaussian(50.0), 10), REPLACE_ONE).epsilon(1e-9)
        assert plain < ten < 1.05 * plain

    def test_many_kinds_are_priced_no_lower_than_one_by_one_and_no_higher_than_at_the_largest(self) -> None:
        """Twelve kinds have 4,096 subsets: summed here one by one, and as if all had the least noise of them."""
        noises = [20.0 + i for i in range(12)]
        many = exact.account(Compose(tuple(Shifted(0.01, Gaussian(z)) for z in noises)), ZERO_OUT)
        same = exact.account(Repeat(Shifted(0.01, Gaussian(20.0)), 12), ZERO_OUT)
        for epsilon in (0.12, 0.5, 1.0):
            squares = [sum(part) for k in range(1, 13) for part in combinations([z**-2 for z in noises], k)]
            each = math.fsum(math.exp(exact.log_delta(math.sqrt(x), epsilon - 0.12)) for x in squares)
            assert min(each, 1) <= many.delta(epsilon) * (1 + 1e-12)
            assert many.delta(epsilon) <= same.delta(epsilon)
        assert many.delta(1.0) < 0.7 * same.delta(1.0)

    def test_thousands_have_a_price_by_pld(self) -> None:
        """The sum over subsets bounds nothing there, the Rényi bound does."""
        event = Repeat(Shifted(0.001, Gaussian(500.0)), 3000)
        assert exact.account(event, ZERO_OUT).epsilon(1e-5) == math.inf
        found = account(event, ZERO_OUT, "pld").epsilon(1e-5)
        assert found == account(event, ZERO_OUT, "rdp").epsilon(1e-5)
        assert exact.account(Repeat(Gaussian(500.0), 3000), ZERO_OUT).epsilon(1e-5) + 3 < found < 7
