"""Parts of different rate, noise and length together: narrow intervals, estimates inside them, δ at small ε."""

import math

import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pld import side

from dpgrad.accounting import calibrate, pld
from dpgrad.accounting.events import (
    Compose,
    DiscreteGaussian,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Poisson,
    RandomizedResponse,
    Relation,
    Repeat,
)
from dpgrad.accounting.pairs import Kind
from dpgrad.accounting.pld import DeltaAt, EpsilonAt, Side

ORACLE_ERROR = 1e-9


def run(rate: float, noise: float, steps: int) -> Event:
    return Repeat(Poisson(rate, Gaussian(noise)), steps)


def run_fixed(rows: int, batch: int, noise: float, steps: int) -> Event:
    return Repeat(FixedSize(rows, batch, Gaussian(noise)), steps)


def truth(steps: oracle.Steps, delta: float) -> float:
    return max(oracle.epsilon(steps, delta, direction) for direction in ("remove", "add"))


# parts as (q, σ, count), and the most that the interval may be wide, relative to ε
MIXED = {
    "a Gaussian beside sampled steps": ([(1.0, 20.0, 1), (0.001, 1.0, 10**5)], 1e-5),
    "two noise levels": ([(0.001, 1.0, 50_000), (0.001, 1.5, 50_000)], 1e-5),
    "millions beside thousands": ([(1e-4, 0.8, 5 * 10**6), (0.01, 4.0, 10**4), (1.0, 10.0, 1)], 1e-4),
    "millions twice": ([(0.001, 1.0, 2 * 10**6), (0.002, 2.0, 10**6)], 2e-5),
    "a rate a thousand times the other": ([(1e-4, 1.0, 10**5), (0.1, 8.0, 50)], 2e-5),
    "plain, as case B": ([(512 / 60_000, 0.8916415, 2343)], 4e-6),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MIXED)
def test_intervals_are_narrow_and_hold_the_truth(name: str) -> None:
    parts, widest = MIXED[name]
    profile = pld.account(Compose(tuple(run(*part) for part in parts)))
    interval, true = profile.interval(1e-6), truth(parts, 1e-6)
    assert interval.lower <= true * (1 + ORACLE_ERROR)
    assert interval.upper >= true * (1 - ORACLE_ERROR)
    assert interval.upper - interval.lower <= widest * true
    assert interval.lower <= profile.estimate(1e-6) <= interval.upper
    assert profile.estimate(1e-6) == pytest.approx(true, rel=1e-7)


PARTS = st.lists(
    st.tuples(st.floats(-4.0, -1.0), st.floats(-0.2, 1.0), st.floats(0.0, 5.5)), min_size=1, max_size=3, unique=True
)


@pytest.mark.exhaustive
@given(PARTS, st.none() | st.floats(0.5, 2.0), st.floats(-14.0, -3.0))
@settings(max_examples=12, deadline=None)
def test_lower_estimate_upper(parts: list[tuple[float, float, float]], plain: float | None, log_delta: float) -> None:
    """Bounds hold the estimate and, where the oracle reaches, the truth."""
    steps = [(10**q, 10**z, round(10**n)) for q, z, n in parts] + ([(1.0, 10**plain, 1)] if plain else [])
    profile = pld.account(Compose(tuple(run(*part) for part in steps)))
    interval, estimate = profile.interval(10**log_delta), profile.estimate(10**log_delta)
    assert 0 <= interval.lower <= interval.estimate <= interval.upper
    assert interval.lower <= estimate <= interval.upper
    try:
        true = max(oracle.epsilon(steps, 10**log_delta, direction, "contour") for direction in ("remove", "add"))
    except oracle.OracleUnsure:
        return
    assert interval.lower <= true * (1 + ORACLE_ERROR)
    assert interval.upper >= true * (1 - ORACLE_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [110, pytest.param(700, marks=pytest.mark.exhaustive)])
def test_estimates_of_rates_and_noise_that_change_together(steps: int) -> None:
    """Rare losses make K turn too fast for interpolation: the estimate was off by up to a half."""
    levels = [1 + t / steps for t in range(steps)]
    profile = pld.account(Compose(tuple(Poisson(0.01 * x, Gaussian(x)) for x in levels)), precision=1e-4)
    interval = profile.interval(1e-5)
    assert interval.lower <= profile.estimate(1e-5) <= interval.upper


MANY = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "event",
    [
        Repeat(RandomizedResponse(0.9, 2), 100),
        Repeat(RandomizedResponse(0.9, 5), 60),
        Repeat(DiscreteGaussian(20.0), 5),
        pytest.param(Repeat(DiscreteGaussian(300.0), 50), marks=MANY),
        Compose((DiscreteGaussian(4.5), RandomizedResponse(0.64, 5))),
        pytest.param(Compose((Repeat(DiscreteGaussian(6.0), 20), run(0.01, 1.0, 5))), marks=MANY),
        Repeat(Exponential(0.1, Relation.REPLACE_ONE), 20),
    ],
    ids=str,
)
def test_estimates_of_losses_with_atoms(event: Event) -> None:
    """Atoms come into step again beyond any frequency at which the integrand seemed to have faded."""
    profile = pld.account(event, Relation.REPLACE_ONE)
    interval = profile.interval(1e-6)
    assert interval.lower <= profile.estimate(1e-6) <= interval.upper


@pytest.mark.filterwarnings("error")
def test_a_range_beside_fixed_size_samples() -> None:
    """At large orders e^{cL} overflowed where P has next to no mass, and numpy warned."""
    event = Compose((Exponential(0.6186, Relation.REPLACE_ONE), run_fixed(10_000, 20, 6.8112, 38)))
    found = pld.account(event, Relation.REPLACE_ONE).epsilon(4.7e-9)
    assert 0.6186 < found < 0.7


class TestDeltaAtSmallEpsilon:
    def test_one_step_is_exact(self) -> None:
        found = pld.account(Poisson(1e-5, Gaussian(1.0))).delta_interval(0.01)
        true = oracle.delta([(1e-5, 1.0, 1)], 0.01, "remove")
        assert found.lower <= true <= found.upper <= true * (1 + 1e-9)

    @pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 0.01, 0.3, 3.0])
    @pytest.mark.parametrize("direction", oracle.DIRECTIONS)
    @pytest.mark.parametrize("rate", [1e-7, 1e-4, 0.05, 0.7])
    def test_one_step(self, rate: float, direction: str, epsilon: float) -> None:
        true, one = oracle.delta([(rate, 0.9, 1)], epsilon, direction), side([(rate, 0.9, 1)], direction)
        assert one.lower(DeltaAt(epsilon), 1e-5) <= true <= one.upper(DeltaAt(epsilon), 1e-5)
        assert one.upper(DeltaAt(epsilon), 1e-5) <= true * (1 + 1e-8) + 1e-300

    def test_one_fixed_size_step(self) -> None:
        event = FixedSize(10**5, 10, Gaussian(2.0))
        found = pld.account(event, Relation.REPLACE_ONE).delta(0.01)
        assert found == pytest.approx(oracle.delta([(1e-4, 1.0, 1)], 0.01, "remove"), rel=1e-9)

    @pytest.mark.parametrize(("rate", "steps", "delta"), [(1e-5, 2, 1e-15), (1e-5, 3, 1e-12), (1e-3, 5, 1e-12)])
    def test_few_steps(self, rate: float, steps: int, delta: float) -> None:
        """FFT round-off is a share of all mass, and would exceed δ; convolution by definition has none."""
        case = [(rate, 1.0, steps)]
        epsilon, one = oracle.epsilon(case, delta, "remove"), side(case, "remove")
        assert delta * 0.999 <= one.lower(DeltaAt(epsilon), 1e-5) <= delta * (1 + ORACLE_ERROR)
        assert delta * (1 - ORACLE_ERROR) <= one.upper(DeltaAt(epsilon), 1e-5) <= delta * 1.001
        assert one.lower(EpsilonAt(delta), 1e-5) == pytest.approx(epsilon, rel=1e-3)
        assert one.upper(EpsilonAt(delta), 1e-5) == pytest.approx(epsilon, rel=1e-3)


class TestExtremeTargets:
    @pytest.mark.parametrize(
        ("epsilon", "relation"),
        [
            (1e6, Relation.ADD_REMOVE),
            pytest.param(20_000.0, Relation.REPLACE_ONE, marks=pytest.mark.exhaustive),
            pytest.param(20_000.0, Relation.ADD_REMOVE, marks=pytest.mark.exhaustive),
            pytest.param(1e6, Relation.REPLACE_ONE, marks=pytest.mark.exhaustive),
        ],
    )
    def test_a_target_beyond_the_least_noise(self, epsilon: float, relation: Relation) -> None:
        """A trial with less noise than can be certified is too little noise, not the end of the search."""
        z = calibrate.noise_multiplier(lambda z: run(0.01, z, 1000), epsilon, 1e-5, relation)
        assert 0.02 <= z < 0.05
        assert pld.account(run(0.01, z, 1000), relation).epsilon(1e-5) <= epsilon

    def test_noise_that_stays_too_small_is_told(self) -> None:
        fixed = run(0.01, 0.001, 10)
        with pytest.raises(ValueError, match="certifies sampled steps with std/shift of at least"):
            calibrate.noise_multiplier(lambda z: Compose((fixed, run(0.01, z, 10))), 1.0, 1e-5)

    def test_steps_that_cost_nothing(self) -> None:
        """At a large δ a thousand steps cost 0: the next ones were asked for by a ratio to nothing."""
        found = calibrate.steps(lambda n: run(0.00125, 0.4, n), epsilon=8.47e-05, delta=0.18)
        assert pld.account(run(0.00125, 0.4, found)).epsilon(0.18) <= 8.47e-05
        assert pld.account(run(0.00125, 0.4, found + 1)).epsilon(0.18) > 8.47e-05

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("rate", "steps", "epsilon", "delta"),
        [(1e-6, 1, 1e-6, 1e-15), (1.0, 1, 1e6, 0.5), (1e-6, 10**7, 1e-6, 0.5), (0.5, 10**7, 1e6, 1e-15)],
    )
    def test_corners(self, rate: float, steps: int, epsilon: float, delta: float) -> None:
        try:
            z = calibrate.noise_multiplier(lambda z: run(rate, z, steps), epsilon, delta)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert pld.account(run(rate, z, steps)).epsilon(delta) <= epsilon


def test_the_largest_rate_need_not_have_the_least_noise() -> None:
    """The lattice of sampled steps is as fine beside a plain Gaussian as without one."""
    alone = side([(0.001, 1.0, 10**5)], "remove")
    both: Side = side([(0.001, 1.0, 10**5), (1.0, 20.0, 1)], "remove")
    gaps = [one.upper(EpsilonAt(1e-6), 2e-6) - one.lower(EpsilonAt(1e-6), 2e-6) for one in (alone, both)]
    assert gaps[1] < 3 * gaps[0]
    assert Kind.REMOVE in {pair.kind for pair in both.counts}
    assert math.isfinite(gaps[0])
