"""Settings at which an earlier version certified too little, crashed or hung: each must stay contained."""

import math

import numpy as np
import pytest

from dpgrad.accounting import exact, pld
from dpgrad.accounting.events import Gaussian, Poisson, Relation, Repeat, Shuffle, grouped


@pytest.mark.parametrize("rate", [0.1, 0.001])
def test_noise_so_small_that_s_has_no_digits(rate: float) -> None:
    """Interpolation weights lost their digits near s = 1, and steps were priced with the larger of two noises."""
    middle = np.linspace(0.12059293, 0.12059293 * 1.0002, 110)
    levels = [0.12059291, *map(float, middle), 0.12226915]
    event = grouped(Poisson(rate, Gaussian(z)) for z in levels)
    fewer = Repeat(Poisson(rate, Gaussian(float(middle[-1]))), 110)  # the same steps with more noise, and two fewer
    upper = pld.account(event, Relation.REPLACE_ONE).epsilon(1e-5)
    assert upper >= pld.account(fewer, Relation.REPLACE_ONE).interval(1e-5).lower


@pytest.mark.parametrize(
    ("low", "high", "rate", "relation"), [(0.05, 0.06, 0.01, "add-remove"), (0.11, 0.125, 0.1, "replace-one")]
)
def test_many_levels_of_very_small_noise(low: float, high: float, rate: float, relation: str) -> None:
    event = grouped(Poisson(rate, Gaussian(float(z))) for z in np.linspace(low, high, 150))
    quiet = grouped(Poisson(rate, Gaussian(high)) for _ in range(150))
    assert (
        pld.account(event, Relation(relation)).epsilon(1e-5)
        >= pld.account(quiet, Relation(relation)).interval(1e-5).lower
    )


RARE = [(rate, noise) for rate in (1e-8, 1e-6, 1e-4) for noise in (0.1, 0.3, 0.5)]


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [
        *((*one, 1) for one in RARE),
        *(pytest.param(*one, 10, marks=[] if i % 4 == 0 else pytest.mark.exhaustive) for i, one in enumerate(RARE)),
    ],
)
def test_few_steps_at_tiny_rates(rate: float, noise: float, steps: int) -> None:
    """The add direction is bounded by Σ −log(1−q); its lattice needs no tilt that overflows."""
    interval = pld.account(Repeat(Poisson(rate, Gaussian(noise)), steps)).interval(1e-9)
    assert 0 <= interval.lower <= interval.upper < math.inf
    if steps == 1 and interval.upper > 0:
        # remove in closed form: δ(ε) = q·δ_Gauss(ε′) with e^{ε′} = (e^ε − 1 + q)/q
        def delta(epsilon: float) -> float:
            return rate * math.exp(exact.log_delta(1 / noise, math.log1p(math.expm1(epsilon) / rate)))

        assert delta(interval.upper) <= 1e-9 * (1 + 1e-9)
        assert interval.lower == 0 or delta(interval.lower) >= 1e-9 * (1 - 1e-9)


def test_an_epoch_cut_short_has_no_lower_bound() -> None:
    """One batch of an epoch hides who took part; adding up batches that were never released showed 0.198."""
    assert pld.account(Shuffle(100, Gaussian(1.0)), Relation.ZERO_OUT).interval(1e-3).lower == 0.0


@pytest.mark.parametrize("noise", [1e2, 1e6, 1e10, 1e12])
def test_tiny_mu_keeps_its_digits(noise: float) -> None:
    found = exact.account(Gaussian(noise)).delta(0.0)
    assert found == pytest.approx(math.erf(1 / noise / 2 / math.sqrt(2)), rel=1e-11)
    assert found >= math.erf(1 / noise / 2 / math.sqrt(2))


def test_noise_too_small_to_certify_is_refused() -> None:
    with pytest.raises(ValueError, match=r"accountant pld certifies sampled steps .* at least 0\.02"):
        pld.account(Poisson(0.01, Gaussian(1e-4)))


@pytest.mark.parametrize("precision", [1e-12, 0.5])
def test_precision_is_bounded(precision: float) -> None:
    with pytest.raises(ValueError, match="precision must lie between"):
        pld.account(Poisson(0.01, Gaussian(1.0)), precision=precision)


@pytest.mark.parametrize(("rate", "noise", "epsilon", "steps"), [(0.999, 1.213, 55.29, 1), (0.983, 8.987, 46.17, 2)])
def test_delta_far_out(rate: float, noise: float, epsilon: float, steps: int) -> None:
    interval = pld.account(Repeat(Poisson(rate, Gaussian(noise)), steps), Relation.REPLACE_ONE).delta_interval(epsilon)
    assert 0 <= interval.lower <= interval.upper < 1e-6
