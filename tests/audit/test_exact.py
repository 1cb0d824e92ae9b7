"""The tests with a known law: against scipy and mpmath, and super-uniform under the claim.

Rates are compared with their levels by a binomial test at 1e-4 each, with fixed seeds.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpgrad.audit import exact, sampled
from dpgrad.audit.record import bonferroni

COUNTS = st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
MANY = 2000


def not_too_often(ps: "np.ndarray", level: float = 0.05) -> None:
    count = int((np.asarray(ps) <= level).sum())
    assert stats.binom.sf(count - 1, len(ps), level) > 1e-4, f"{count} of {len(ps)} at {level}"


@given(COUNTS, st.floats(0.001, 0.999))
def test_tails_are_those_of_scipy(counts: tuple[int, int], rate: float) -> None:
    x, n = counts
    assert math.isclose(exact.below(x, n, rate), stats.binom.cdf(x, n, rate), rel_tol=1e-9, abs_tol=1e-300)
    assert math.isclose(exact.above(x, n, rate), stats.binom.sf(x - 1, n, rate), rel_tol=1e-9, abs_tol=1e-300)


@pytest.mark.parametrize(("rate", "x", "p"), [(0.0, 0, 1.0), (0.0, 1, 0.0), (1.0, 5, 1.0), (1.0, 4, 0.0)])
def test_counts_at_the_ends(rate: float, x: int, p: float) -> None:
    assert exact.count(x, 5, rate) == p


def test_correlation_is_students() -> None:
    random = np.random.default_rng(1)
    a, b = random.normal(size=(MANY, 7)), 3 * random.normal(size=(MANY, 7))
    ps = exact.correlation((a * b).sum(1), (a * a).sum(1), (b * b).sum(1), 7)
    assert stats.kstest(ps, "uniform").pvalue > 1e-4
    assert exact.correlation(np.array([2.0]), np.array([2.0]), np.array([2.0]), 7)[0] == 0.0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_ratios_are_uniform_whatever_the_scale(scale: float) -> None:
    values = scale * np.random.default_rng(2).normal(size=40_000)
    assert exact.uniform(exact.even(values)) > 1e-4


@pytest.mark.parametrize("law", ["laplace", "uniform", "logistic"])
def test_other_laws_have_other_ratios(law: str) -> None:
    values = getattr(np.random.default_rng(3), law)(size=40_000)
    values -= np.median(values)
    assert exact.uniform(exact.even(values)) < 1e-6


def test_ties_of_float32_noise_are_rare() -> None:
    values = np.random.default_rng(4).normal(size=40_000).astype(np.float32)
    assert exact.ties(values.astype(float))[0] > 1e-3
    assert exact.ties(np.round(values.astype(float), 2))[0] < 1e-4


def test_lagged_pairs_are_disjoint_and_exact() -> None:
    random = np.random.default_rng(5)
    ps = np.array([exact.lagged(random.normal(size=(4, 13)), lag) for lag in (1, 2, 6) for _ in range(500)])
    assert stats.kstest(ps, "uniform").pvalue > 1e-4
    line = np.repeat(random.normal(size=(4, 7)), 2, axis=1)
    assert exact.lagged(line, 1) < 1e-6


def test_poisson_batches_are_judged_at_their_level() -> None:
    random = np.random.default_rng(6)
    rates = np.linspace(0.1, 0.4, 30)
    ps = [sampled.poisson((random.random((30, 40)) < rates[:, None]).astype(np.int64), rates, n)[0] for n in range(400)]
    not_too_often(np.array(ps))


def test_rows_at_rate_zero_refute() -> None:
    assert sampled.poisson(np.ones((2, 4), np.int64), np.zeros(2), 0)[0] == 0.0
    assert sampled.poisson(np.zeros((2, 4), np.int64), np.zeros(2), 0)[0] == 1.0


def test_fixed_batches_of_other_sizes_refute() -> None:
    counts = np.zeros((4, 6), np.int64)
    counts[:, :2] = 1
    assert sampled.fixed_size(counts, 3)[0] == 0.0


def test_bonferroni_names_the_least() -> None:
    assert bonferroni([(0.5, "a"), (0.001, "b"), (0.9, "c")]) == (0.003, "b")
