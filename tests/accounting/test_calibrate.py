"""Calibration: the answer is within the target, nothing smaller is, and the quick price never decides."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.accounting import account, calibrate, exact, pld
from dpgrad.accounting.calibrate import least, most_steps
from dpgrad.accounting.events import Event, FixedSize, Gaussian, Poisson, Relation, Repeat, Shuffle, grouped

CASE_B = (512 / 60_000, 2343)  # specs: N = 60000, B = 512, 20 epochs


class Counted:
    """A price that counts how often it is asked."""

    def __init__(self, price: Callable[[Any], float]) -> None:
        self.price, self.asked = price, 0

    def __call__(self, x: Any) -> float:
        self.asked += 1
        return self.price(x)


class TestLeast:
    @given(st.floats(0.3, 6.0), st.floats(1e-2, 1e2), st.floats(-1, 1))
    def test_power_laws(self, power: float, target: float, log_scale: float) -> None:
        scale = math.exp(log_scale)

        def price(x: float) -> float:
            return scale * x**-power

        exact_root = (scale / target) ** (1 / power)
        found = least(price, target, low=1e-9, high=1e9)
        assert price(found) <= target
        assert found <= exact_root * (1 + 1e-6)

    @given(st.floats(0.5, 4.0), st.floats(0.05, 50.0), st.floats(1.0, 1.01))
    def test_a_quick_price_that_is_too_low_does_not_decide(self, power: float, target: float, gap: float) -> None:
        def price(x: float) -> float:
            return gap * x**-power

        found = least(price, target, quick=lambda x: x**-power, low=1e-6, high=1e6)
        assert price(found) <= target < price(found * (1 - 1e-3))

    @given(st.floats(0.5, 4.0), st.floats(0.05, 50.0), st.floats(0.98, 1.02), st.sampled_from([0.01, 0.05, 0.5]))
    def test_on_a_grid_the_multiple_below_fails(self, power: float, target: float, gap: float, grid: float) -> None:
        def price(x: float) -> float:
            return gap * (x + 1e-3) ** -power

        found = least(price, target, quick=lambda x: (x + 1e-3) ** -power, low=1e-6, high=1e6, grid=grid)
        k = round(found / grid)
        assert found == pytest.approx(k * grid, rel=1e-12)
        assert price(found) <= target
        assert k == 1 or price((k - 1) * grid) > target

    def test_multiples_are_what_is_typed(self) -> None:
        assert least(lambda x: 1 / x, 1 / 1.145, low=0.01, high=10, grid=0.01) == 1.15
        assert least(lambda x: 1 / x, 1 / 0.29, low=0.01, high=10, grid=0.1) == 0.3

    def test_few_prices_are_asked_for(self) -> None:
        quick, price = (
            Counted(lambda x: 3 * x**-1.7 + 0.1 / x**4),
            Counted(lambda x: (3 * x**-1.7 + 0.1 / x**4) * 1.00002),
        )
        least(price, 0.5, quick=quick, low=0.01, high=1e7)
        assert quick.asked <= 12
        assert price.asked <= 2

    def test_a_target_that_no_noise_reaches(self) -> None:
        with pytest.raises(
            ValueError, match=r"no noise_multiplier up to 100 reaches epsilon 0\.001 .*allow a larger"
        ) as e:
            least(lambda x: 1 / x, 1e-3, low=0.01, high=100)
        assert "\n" not in str(e.value)

    def test_a_certified_price_that_never_arrives(self) -> None:
        with pytest.raises(ValueError, match="no noise_multiplier up to 100 is certified to reach epsilon 1"):
            least(lambda x: 2.0, 1.0, quick=lambda x: 1 / x, low=0.01, high=100)
        with pytest.raises(ValueError, match="no noise_multiplier up to 100 is certified to reach epsilon 1"):
            least(lambda x: 2.0, 1.0, quick=lambda x: 1 / x, low=0.01, high=100, grid=1.0)

    def test_a_target_that_the_least_meets(self) -> None:
        assert least(lambda x: 1 / x, 1e3, low=0.01, high=100) == 0.01
        assert least(lambda x: 0.0, 1.0, low=0.01, high=100) == 0.01

    def test_jumps_infinities_and_zeros(self) -> None:
        def price(x: float) -> float:
            return math.inf if x < 2 else 0.0

        assert least(price, 1.0, low=0.01, high=100) == pytest.approx(2.0, rel=1e-9)

    def test_nan_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the price is nan"):
            least(lambda x: math.nan, 1.0, low=0.01, high=100)

    @pytest.mark.parametrize("target", [0, -1.0, math.nan, math.inf, True, "1"])
    def test_bad_targets(self, target: Any) -> None:
        with pytest.raises(ValueError, match="target of noise_multiplier must be"):
            least(lambda x: 1 / x, target, low=0.01, high=100)

    @pytest.mark.parametrize("grid", [1e-320, 1e-15, 1e-9])
    def test_a_grid_that_is_too_fine_to_search(self, grid: float) -> None:
        with pytest.raises(ValueError, match=r"grid .* must be at least 1e-06 for a noise_multiplier of about 1,"):
            least(lambda x: 1 / x, 1.0, low=0.01, high=100, grid=grid)

    @pytest.mark.parametrize("grid", [0, -0.01, math.nan, True])
    def test_bad_grids(self, grid: Any) -> None:
        with pytest.raises(ValueError, match="grid must be"):
            least(lambda x: 1 / x, 1.0, low=0.01, high=100, grid=grid)


class TestMostSteps:
    @given(st.integers(1, 10**8), st.floats(0.3, 1.5))
    def test_every_answer_is_found(self, answer: int, power: float) -> None:
        target = (answer + 0.5) ** power
        price = Counted(lambda n: n**power)
        assert most_steps(price, target) == answer
        assert price.asked < 60

    @given(st.integers(1, 10**6), st.floats(1.0, 1.05))
    def test_a_quick_price_does_not_decide(self, answer: int, gap: float) -> None:
        target = gap * math.sqrt(answer + 0.5)
        assert most_steps(lambda n: gap * math.sqrt(n), target, quick=math.sqrt) == answer

    @given(st.integers(2, 5000), st.integers(1, 400))
    def test_stairs(self, answer: int, width: int) -> None:
        """Shuffled batches: an epoch begun is paid whole."""
        target = math.sqrt(answer)
        assert most_steps(lambda n: math.sqrt(-(-n // width)), target) == answer * width

    def test_a_price_that_trembles_still_ends_between_within_and_beyond(self) -> None:
        def price(n: int) -> float:
            return math.sqrt(n) * (1 + 1e-5 * math.sin(7919 * n))

        found = most_steps(price, 1000.0, quick=math.sqrt)
        assert price(found) <= 1000.0 < price(found + 1)
        assert abs(found - 10**6) < 100

    @given(st.integers(2, 10**6), st.floats(-0.5, 0.5), st.floats(-6.0, 1.0))
    def test_a_price_that_is_nothing_for_long(self, free: int, gap: float, log_slope: float) -> None:
        """The slope says nothing about where the price begins: that is found by halving, not step by step."""
        price = Counted(lambda n: 10**log_slope * max(n - free, 0))
        found = most_steps(price, 1e-7, quick=lambda n: max(n - (1 + gap) * free, 0.0))
        assert found == free
        assert price.asked <= 60

    def test_one_step_is_too_much(self) -> None:
        for quick in (None, math.sqrt):
            with pytest.raises(ValueError, match=r"steps: one step already costs epsilon 1, above the target 0.5: add"):
                most_steps(math.sqrt, 0.5, quick=quick)

    def test_no_end_in_sight(self) -> None:
        for quick in (None, lambda n: 0.0):
            with pytest.raises(ValueError, match=r"1,000 steps, the most that are priced, cost epsilon 0, within the"):
                most_steps(lambda n: 0.0, 1.0, quick=quick, limit=1000)

    @pytest.mark.parametrize("limit", [0, 1.5, True, 10**12])
    def test_bad_limits(self, limit: Any) -> None:
        with pytest.raises(ValueError, match="limit must be"):
            most_steps(math.sqrt, 1.0, limit=limit)


class TestNoiseMultiplier:
    @pytest.mark.parametrize(
        ("rate", "steps", "epsilon", "expected"),
        [(*CASE_B, 3.0, 0.8916415), (1024 / 50_000, 1953, 2.0, 1.9686454)],  # specs: B, D
    )
    def test_reference(self, rate: float, steps: int, epsilon: float, expected: float) -> None:
        def run(z: float) -> Event:
            return Repeat(Poisson(rate, Gaussian(z)), steps)

        found = calibrate.noise_multiplier(run, epsilon, 1e-5)
        assert 1 - 1e-7 < found / expected < 1 + 1e-4
        assert account(run(found)).epsilon(1e-5) <= epsilon < account(run(found * (1 - 1e-3))).epsilon(1e-5)

    @pytest.mark.parametrize(
        ("accountant", "expected", "tolerance"), [("rdp", 0.93761, 1e-4), ("moments", 1.01056, 1e-3)]
    )
    def test_reference_of_other_accountants(self, accountant: str, expected: float, tolerance: float) -> None:
        pytest.importorskip(f"dpgrad.accounting.{accountant}")
        rate, steps = CASE_B
        found = calibrate.noise_multiplier(
            lambda z: Repeat(Poisson(rate, Gaussian(z)), steps), 3.0, 1e-5, accountant=accountant
        )
        assert found == pytest.approx(expected, rel=tolerance)

    def test_few_certified_prices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quick, price = Counted(pld.PldProfile.estimate), Counted(pld.PldProfile.epsilon)
        monkeypatch.setattr(pld.PldProfile, "estimate", lambda self, delta: quick(lambda: (self, delta)))
        monkeypatch.setattr(pld.PldProfile, "epsilon", lambda self, delta: price(lambda: (self, delta)))
        quick.price, price.price = (lambda f, p=p: p(*f()) for p in (quick.price, price.price))
        rate, steps = CASE_B
        calibrate.noise_multiplier(lambda z: Repeat(Poisson(rate, Gaussian(z)), steps), 3.0, 1e-5)
        assert quick.asked <= 10
        assert price.asked <= 2

    @given(st.floats(0.05, 20.0), st.floats(1e-10, 1e-2), st.integers(1, 10_000), st.sampled_from(list(Relation)))
    def test_full_batch_is_least(self, epsilon: float, delta: float, steps: int, relation: Relation) -> None:
        found = calibrate.noise_multiplier(lambda z: Repeat(Gaussian(z), steps), epsilon, delta, relation)
        shift = 2 if relation is Relation.REPLACE_ONE else 1

        def price(z: float) -> float:
            return exact.epsilon(shift * math.sqrt(steps) / z, delta)

        assert price(found) <= epsilon < price(found * (1 - 1e-3))

    @given(st.floats(0.1, 5.0), st.floats(1.05, 2.0), st.integers(1, 1000))
    def test_monotone(self, epsilon: float, more: float, steps: int) -> None:
        def noise(epsilon: float, delta: float, steps: int) -> float:
            return calibrate.noise_multiplier(lambda z: Repeat(Gaussian(z), steps), epsilon, delta, accountant="exact")

        here = noise(epsilon, 1e-6, steps)
        assert noise(epsilon * more, 1e-6, steps) < here
        assert noise(epsilon, 1e-6 * more**4, steps) < here
        assert noise(epsilon, 1e-6, 2 * steps) > here

    @pytest.mark.parametrize(
        ("event", "relation"),
        [
            (lambda z: Repeat(Poisson(0.05, Gaussian(z)), 50), Relation.REPLACE_ONE),
            (lambda z: Repeat(FixedSize(100, 5, Gaussian(z)), 50), Relation.REPLACE_ONE),
            (lambda z: Repeat(Shuffle(20, Gaussian(z)), 3), Relation.ZERO_OUT),
            (lambda z: Poisson(0.01, Gaussian(z)), Relation.ADD_REMOVE),
        ],
    )
    def test_other_samplers_and_relations(self, event: Callable[[float], Event], relation: Relation) -> None:
        found = calibrate.noise_multiplier(event, 1.0, 1e-5, relation)
        assert account(event(found), relation).epsilon(1e-5) <= 1.0
        assert account(event(found * (1 - 1e-3)), relation).epsilon(1e-5) > 1.0

    def test_on_a_grid(self) -> None:
        """Yu et al. (2018): ε = 2, δ = 1e-5, q = .01, constant clip bound."""
        for steps, expected in ((500, 0.86), (1000, 0.96), (2000, 1.15), (4000, 1.46)):
            found = calibrate.noise_multiplier(
                lambda z, steps=steps: Repeat(Poisson(0.01, Gaussian(z)), steps), 2.0, 1e-5, grid=0.01
            )
            assert found == expected

    def test_unreachable(self) -> None:
        with pytest.raises(ValueError, match=r"no noise_multiplier up to 1e\+07 reaches epsilon 1e-12"):
            calibrate.noise_multiplier(lambda z: Repeat(Gaussian(z), 1000), 1e-12, 1e-15)

    @pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf, True, "2"])
    def test_bad_epsilon(self, epsilon: Any) -> None:
        with pytest.raises(ValueError, match=r"^epsilon must be"):
            calibrate.noise_multiplier(Gaussian, epsilon, 1e-5)
        with pytest.raises(ValueError, match=r"^epsilon must be"):
            calibrate.steps(lambda n: Repeat(Gaussian(1.0), n), epsilon, 1e-5)

    @pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, True, "1e-5"])
    def test_bad_delta(self, delta: Any) -> None:
        with pytest.raises(ValueError, match=r"^delta must"):
            calibrate.noise_multiplier(Gaussian, 1.0, delta)

    def test_history_is_refused(self) -> None:
        pytest.importorskip("dpgrad.accounting.historical")
        with pytest.raises(ValueError, match="historical comparison"):
            calibrate.noise_multiplier(
                lambda z: Repeat(Poisson(0.01, Gaussian(z)), 100), 1.0, 1e-5, accountant="strong-printed"
            )

    def test_unknown_accountant(self) -> None:
        with pytest.raises(ValueError, match=r"accountant must be one of pld, .* got 'prv'"):
            calibrate.noise_multiplier(Gaussian, 1.0, 1e-5, accountant="prv")


class TestSteps:
    @given(st.floats(2.0, 200.0), st.floats(0.5, 8.0))
    def test_full_batch_is_most(self, z: float, epsilon: float) -> None:
        def price(n: int) -> float:
            return exact.epsilon(math.sqrt(n) / z, 1e-5)

        if price(1) > epsilon:
            with pytest.raises(ValueError, match="one step already costs"):
                calibrate.steps(lambda n: Repeat(Gaussian(z), n), epsilon, 1e-5)
            return
        found = calibrate.steps(lambda n: Repeat(Gaussian(z), n), epsilon, 1e-5)
        assert price(found) <= epsilon < price(found + 1)

    def test_poisson(self) -> None:
        """Case A of the specs, a step's worth above its exact ε."""

        def run(n: int) -> Event:
            return Repeat(Poisson(0.01, Gaussian(4.0)), n)

        found = calibrate.steps(run, 0.9469668, 1e-5)
        assert 10_000 <= found <= 10_002
        assert account(run(found)).epsilon(1e-5) <= 0.9469668 < account(run(found + 1)).epsilon(1e-5)


class TestReadings:
    """The two readings of Yu et al. (2018), on full batches, where all is known in closed form; see test_mechanism."""

    TARGET = 30

    @staticmethod
    def still(z: float, n: int) -> Event:
        return Repeat(Gaussian(z), n)

    @classmethod
    def shrinking(cls, z: float, n: int) -> Event:
        return grouped(Gaussian(z * min(2, 1 + t / cls.TARGET)) for t in range(n))

    @classmethod
    def price(cls, z: float, n: int) -> float:
        return exact.epsilon(math.sqrt(sum((z * min(2, 1 + t / cls.TARGET)) ** -2 for t in range(n))), 1e-5)

    def test_more_steps(self) -> None:
        found = calibrate.more_steps(self.still, self.shrinking, 2.0, 1e-5, self.TARGET)
        z, n = found
        assert exact.epsilon(math.sqrt(self.TARGET) / z, 1e-5) <= 2.0
        assert exact.epsilon(math.sqrt(self.TARGET) / (z - 0.01), 1e-5) > 2.0
        assert z == round(z, 2)
        assert n > self.TARGET
        assert self.price(z, n) <= 2.0 < self.price(z, n + 1)

    @pytest.mark.parametrize("target", [0, 1.5, True])
    def test_bad_targets(self, target: Any) -> None:
        with pytest.raises(ValueError, match="target_steps must be"):
            calibrate.more_steps(self.still, self.shrinking, 2.0, 1e-5, target)
