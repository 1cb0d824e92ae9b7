"""The two-world game, its e-process, one run, and audits of estimators; statistical tests have fixed seeds."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

import dpgrad
from benchmarks import planted_fits
from dpgrad import audit, sampling
from dpgrad.accounting import account
from dpgrad.accounting.events import Gaussian, Poisson, Repeat
from dpgrad.audit import games, single
from dpgrad.audit.claims import ClaimCurve, claimed
from dpgrad.audit.games import Wrong
from dpgrad.convex import DPStandardScaler
from dpgrad.errors import AuditError, OptionError, ReportError
from dpgrad.mechanism.mechanism import Mechanism


class TestCurve:
    def test_is_below_that_of_the_gaussian_and_near_it(self) -> None:
        a = np.linspace(0.001, 0.999, 200)
        true = stats.norm.cdf(stats.norm.ppf(1 - a) - 1)
        found = ClaimCurve.gaussian(1.0).f(a)
        assert (found <= true + 1e-12).all()
        assert (found >= true - 2e-3).all()

    def test_whole_profile_of_sampled_steps_is_certified(self) -> None:
        profile = account(Repeat(Poisson(0.1, Gaussian(1.0)), 20))
        curve = ClaimCurve.of(profile)
        for epsilon, delta in list(zip(curve.epsilons, curve.deltas, strict=True))[::6]:
            assert delta >= profile.delta(float(epsilon)) * (1 - 1e-5)

    @pytest.mark.parametrize("claim", ["private", None, (1.0,), (-1.0, 1e-5), (1.0, 1.5), 3])
    def test_other_claims_are_refused(self, claim: Any) -> None:
        with pytest.raises(OptionError):
            claimed(claim)

    def test_family_scales_the_noise(self) -> None:
        told = claimed(Mechanism(sampling.FullBatch(), 4, 2.0))
        assert told.family is not None
        assert told.family.at(2.0).epsilon(1e-5) == pytest.approx(
            Mechanism(sampling.FullBatch(), 4, 4.0).profile().epsilon(1e-5), rel=1e-3
        )


class TestPValue:
    def test_is_above_the_statistic_at_every_rate(self) -> None:
        """sup_a T(1 − ln T) over a finer grid than that of the bound is not above it."""
        curve, counts = ClaimCurve.gaussian(1.0), Wrong(20, 400, 60, 400)
        a = np.linspace(1e-6, 1 - 1e-6, 20_011)
        t = stats.binom.cdf(20, 400, a) * stats.binom.cdf(60, 400, curve.f(a))
        worst = float(np.max(np.where(t > 0, t * (1 - np.log(np.maximum(t, 1e-300))), 0)))
        found = games.p_value(counts, curve)
        assert worst <= found <= 1.2 * worst + 1e-12

    def test_true_claims_are_rejected_at_most_at_their_level(self) -> None:
        random, curve, rejected = np.random.default_rng(1), ClaimCurve.gaussian(1.0), 0
        for _ in range(150):
            inside, outside = random.normal(1, 1, 300), random.normal(0, 1, 300)
            threshold, flip = games.chosen(inside[:90], outside[:90], curve)
            rejected += games.p_value(games.counted(inside[90:], outside[90:], threshold, flip), curve) <= 0.05
        assert stats.binom.sf(rejected - 1, 150, 0.05) > 1e-4

    def test_perfect_scores_refute(self) -> None:
        assert games.p_value(Wrong(0, 400, 0, 400), ClaimCurve.gaussian(1.0)) < 1e-50

    def test_lower_bounds_on_epsilon(self) -> None:
        """Clopper and Pearson's bound from the same counts is close, and the family's is higher."""
        counts = Wrong(5, 3500, 1600, 3500)
        low = games.least_epsilon(counts, 1e-5, 0.05)
        assert 4 < low < math.log((1900 / 3500) / (5 / 3500))
        told = claimed(Mechanism(sampling.FullBatch(), 1, 0.25))
        in_family = games.least_in_family(counts, told, 1e-5, 0.05)
        assert in_family is not None
        assert in_family > low


def noisy_sum(data: list[float], seed: int) -> float:
    return sum(data) + float(np.random.default_rng(seed).normal())


class TestGame:
    def test_honest_sum_is_not_refuted_and_half_the_noise_is(self) -> None:
        honest = audit.game(noisy_sum, [0.0], [0.0, 1.0], Mechanism(sampling.FullBatch(), 1, 1.0), trials=1000)
        honest.assert_held()
        assert honest.words.startswith("Not refuted. This does not prove the claim; tried: two-world game; not tried:")
        assert honest.lower_epsilon is not None
        assert honest.lower_epsilon_in_family is not None
        claim = Mechanism(sampling.FullBatch(), 1, 2.0)
        found = audit.game(noisy_sum, [0.0], [0.0, 1.0], claim, trials=2000)
        assert found.refuted
        assert "assuming the claimed mechanism with less noise" in str(found)

    def test_stops_early_where_the_claim_is_far_off(self) -> None:
        found = audit.game(noisy_sum, [0.0], [0.0, 8.0], (0.5, 1e-5), trials=4000, stop_early=True)
        assert found.refuted
        assert found.checks[0].name == "e-process"
        assert found.trials is not None
        assert found.trials < 1000

    def test_looks_and_last_test_share_the_level(self) -> None:
        found = audit.game(noisy_sum, [0.0], [0.0, 1.0], (10.0, 1e-5), trials=200, stop_early=True, level=0.02)
        assert [check.level for check in found.checks] == [0.01, 0.01]
        found.assert_held()

    @pytest.mark.parametrize(
        "settings", [{"trials": 10}, {"level": 0.0}, {"delta": 1.0}, {"seed": -1}, {"trials": 2.5}]
    )
    def test_settings_are_checked(self, settings: Any) -> None:
        with pytest.raises(OptionError):
            audit.game(noisy_sum, [0.0], [1.0], (1.0, 1e-5), **settings)

    def test_score_that_is_no_number(self) -> None:
        with pytest.raises(AuditError, match="score of trial 0 is not a number"):
            audit.game(lambda data, seed: math.nan, [0.0], [1.0], (1.0, 1e-5))

    @pytest.mark.parametrize("bad", [[], [1.0] * 5, [math.nan] * 50])
    def test_scores_are_checked(self, bad: list[float]) -> None:
        with pytest.raises(OptionError, match="at least 20 scores"):
            audit.scores(bad, [0.0] * 50, (1.0, 1e-5))


def test_wealth_against_a_true_claim_rarely_grows() -> None:
    """Ville: 1/p ever reaches 20 with probability at most 5 %."""
    random, curve, rejected = np.random.default_rng(2), ClaimCurve.gaussian(1.0), 0
    for _ in range(100):
        inside, outside = random.normal(1, 1, 400), random.normal(0, 1, 400)
        bettor = games.Bettor(curve)
        for seen in range(50, 401, 50):
            bettor.look(inside[:seen], outside[:seen])
        rejected += bettor.p <= 0.05
    assert stats.binom.sf(rejected - 1, 100, 0.05) > 1e-4


class TestOneRun:
    def test_pure_privacy_is_the_binomial_tail(self) -> None:
        assert single.p_value(50, 40, 33, 1.2, 0.0) == pytest.approx(
            stats.binom.sf(32, 40, math.exp(1.2) / (1 + math.exp(1.2)))
        )

    def test_gives_no_verdict(self) -> None:
        coins = np.random.default_rng(0).random(400) < 0.5
        found = audit.one_run(coins * 9.0, coins)
        assert not found.refuted
        assert not found.checks[0].refuted
        assert "REFUTED" not in str(found)
        assert found.words.startswith("Weak by design, no verdict. Not refuted.")
        assert found.lower_epsilon is not None
        assert found.lower_epsilon > 2

    def test_bound_holds_for_randomised_response(self) -> None:
        """Each coin is told right with probability e^ε/(1 + e^ε): the bound is above ε in at most 5 % of the runs."""
        random, above = np.random.default_rng(3), 0
        for _ in range(200):
            coins = random.random(200) < 0.5
            told = coins ^ (random.random(200) > 1 / (1 + math.exp(-1.0)))
            found = audit.one_run(told + 1e-6 * random.random(200), coins, delta=1e-12, guesses=200)
            above += found.lower_epsilon is not None and found.lower_epsilon > 1.0
        assert stats.binom.sf(above - 1, 200, 0.05) > 1e-4


@pytest.mark.parametrize("fit", planted_fits.FITS)
class TestEstimator:
    def test_honest_fit_is_not_refuted(self, fit: str) -> None:
        found = planted_fits.FITS[fit][0]()
        found.assert_held()
        assert [check.name for check in found.checks] == ["sensitivity", "two-world game"]
        assert "by 1.0000 of the declared sensitivity" in found.checks[0].says

    def test_half_the_sensitivity_is_refuted(self, fit: str) -> None:
        audited, fault = planted_fits.FITS[fit]
        with fault():
            found = audited()
        assert found.words.startswith("REFUTED: sensitivity: a row moves ")
        assert "by 2.0000 of the declared sensitivity" in found.words

    @pytest.mark.parametrize(("left", "trials"), [(0.5, 2000), (0.0, 100)])
    def test_half_the_noise_and_none_are_refuted(self, fit: str, left: float, trials: int) -> None:
        with planted_fits.noise_times(left)():
            found = planted_fits.FITS[fit][0](trials)
        assert found.checks[1].refuted
        assert found.words.startswith("REFUTED: two-world game: ")


def test_zero_out_is_refused() -> None:
    made = DPStandardScaler(epsilon=1.0, bounds=(-1.0, 1.0), relation="zero-out")
    with pytest.raises(OptionError, match="relation='replace-one'"):
        audit.estimator(made, planted_fits.ROWS, read=lambda fitted: fitted.mean_, row=[1.0, 1.0])


def test_reports_carry_the_words_and_no_more() -> None:
    found = audit.scores([0.0] * 50, [0.0] * 50, (1.0, 1e-5))
    promise = Mechanism(sampling.FullBatch(), 1, 4.0).guarantee(1e-5)
    told = dpgrad.report(promise, audit=found)
    assert found.words in told["notes"]
    assert found.words in " ".join(told.text().split())
    for word in ("passed", "verified"):
        assert word not in found.words


def test_an_audit_has_a_report_of_its_own() -> None:
    promise = Mechanism(sampling.FullBatch(), 1, 4.0).guarantee(1e-5)
    found = audit.scores([0.0] * 50, [0.0] * 50, promise)
    told = dpgrad.report(found)
    assert told["kind"] == "audit"
    assert told["notes"] == [found.words]
    assert told["release"]["allowed"] is False
    with pytest.raises(ReportError, match="a curve or a pair"):
        dpgrad.report(audit.scores([0.0] * 50, [0.0] * 50, (1.0, 1e-5)))
