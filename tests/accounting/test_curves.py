"""Curves and attacks: against closed forms, many digits, an independent oracle, and attacks that are carried out."""

import math

import mpmath
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpgrad.accounting import account, curves, exact, pld, rdp
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Inexact,
    Laplace,
    Poisson,
    Relation,
    Repeat,
    Shifted,
    Shuffle,
)
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.pairs import Kind, Pair
from dpgrad.errors import AccountingError, OptionError

ADD, ZERO, REPLACE = Relation.ADD_REMOVE, Relation.ZERO_OUT, Relation.REPLACE_ONE
RUN = Repeat(Poisson(0.01, Gaussian(1.1)), 1000)


def promised(event: Event, relation: Relation = ADD, accountant: str = "pld") -> Guarantee:
    return Guarantee.of(account(event, relation, accountant), 1e-5)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0])
def test_a_gaussian_has_its_trade_off(mu: float) -> None:
    found = curves.tradeoff(Gaussian(1 / mu), ADD)
    rates = np.array([0.0, 1e-4, 0.001, 0.01, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0])
    true = norm.cdf(norm.isf(rates) - mu)  # Dong, Roth and Su (2019), Definition 2.6
    values = found.curve(rates)
    assert np.all(values <= true)
    assert np.allclose(values, true, rtol=0, atol=2e-4)
    assert found.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (Gaussian(900.0), ADD),
        (Repeat(Gaussian(900.0), 3), REPLACE),
        (Shuffle(4, Gaussian(900.0)), ZERO),
        (Compose((Gaussian(900.0), Approximate(0.1, 0.0, ADD))), ADD),
        (Shifted(0.1, Gaussian(900.0)), ZERO),
        (Repeat(Poisson(0.5, Gaussian(900.0)), 3), ADD),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_no_delta_is_rounded_to_nothing(event: Event, relation: Relation, size: int) -> None:
    """δ = 0 would say that the release is purely ε-private, which Gaussian noise never is."""
    for accountant in ("pld", "exact", "rdp"):
        if accountant == "exact" and isinstance(event, Repeat) and isinstance(event.event, Poisson):
            continue
        assert min(promised(event, relation, accountant).deltas([1.0, 60.0])) > 0
        assert min(curves.deltas(event, relation, [1.0, 60.0], size, accountant)) > 0
        assert account(event, relation, accountant).delta(60.0) > 0


def test_a_gaussian_to_many_digits() -> None:
    with mpmath.workdps(40):
        true = mpmath.ncdf(mpmath.mpf(1) / 2) - mpmath.ncdf(-mpmath.mpf(1) / 2)
        at_two = mpmath.ncdf(mpmath.mpf("-1.5")) - mpmath.e**2 * mpmath.ncdf(mpmath.mpf("-2.5"))
    found = promised(Gaussian(1.0)).deltas([0.0, 2.0])
    for value, exactly in zip(found, (true, at_two), strict=True):
        assert exactly <= value <= exactly * (1 + 1e-9)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_whole_curve_is_that_of_single_questions(relation: Relation) -> None:
    epsilons = np.linspace(0, 4, 9)
    profile = pld.account(RUN, relation, 1e-4)
    together, single = profile.deltas(epsilons), np.array([profile.delta(float(x)) for x in epsilons])
    lower = [profile.delta_interval(float(x)).lower for x in epsilons]
    assert np.all(together >= lower)
    assert np.allclose(together, single, rtol=5e-3)


def test_the_whole_curve_bounds_the_truth() -> None:
    found = promised(RUN).deltas([0.0, 0.5, 1.0, 1.5])
    for epsilon, value in zip([0.0, 0.5, 1.0, 1.5], found, strict=True):
        steps = [(0.01, 1.1, 1000)]
        true = max(oracle.delta(steps, epsilon, direction) for direction in ("remove", "add"))
        assert true <= value <= true * 1.002


def test_one_step_bounds_the_best_attack() -> None:
    """Neyman and Pearson's test on one sampled step, in closed form: it lies on the certified curve."""
    rate, sigma = 0.2, 0.8
    found = curves.tradeoff(Poisson(rate, Gaussian(sigma)), ADD)
    for threshold in (-0.5, 0.3, 1.0, 2.0):
        wrongly = norm.sf(threshold / sigma)
        power = (1 - rate) * wrongly + rate * norm.sf((threshold - 1) / sigma)
        assert power <= found.power(wrongly)
        assert power - wrongly <= found.advantage
    assert found.advantage == pytest.approx(rate * (2 * norm.cdf(0.5 / sigma) - 1), rel=1e-6)


@given(st.sampled_from([Relation.ADD_REMOVE, Relation.REPLACE_ONE]), st.floats(0.4, 4.0), st.floats(0.05, 0.9))
@settings(max_examples=8, deadline=None)
def test_a_trade_off_falls_is_convex_and_symmetric(relation: Relation, sigma: float, rate: float) -> None:
    found = curves.tradeoff(Repeat(Poisson(rate, Gaussian(sigma)), 3), relation)
    rates = np.linspace(0, 1, 101)
    values = found.curve(rates)
    assert np.all(np.diff(values) <= 1e-12)
    assert np.all(np.diff(values, 2) >= -1e-12)
    assert np.all(values <= 1 - rates + 1e-12)
    inner = (values > 1e-6) & (values < 1)
    assert np.all(found.curve(values[inner]) <= rates[inner] + 1e-9)  # f(f(a)) ≤ a: the curve is its own mirror image
    powers = [found.power(x) for x in (0.001, 0.01, 0.05, 0.5)]
    assert powers == sorted(powers)
    assert all(power - x <= found.advantage + 1e-12 for x, power in zip((0.001, 0.01, 0.05, 0.5), powers, strict=True))
    beliefs = [found.belief(chance) for chance in (0.5, 0.1, 0.01, 0.001)]
    assert beliefs == sorted(beliefs)
    assert all(0.5 <= belief <= 1 for belief in beliefs)


@pytest.mark.parametrize("rate", [1e-310, 5e-324])
def test_rates_below_the_inverse_of_a_large_factor_bound_the_best_attack(rate: float) -> None:
    """One row moves the sum by 1,000 scales of Laplace noise: the test with this rate misses a row hardly ever."""
    threshold = -math.log(2 * rate)  # in scales
    missed = math.exp(threshold - 1000) / 2
    assert curves.tradeoff(Laplace(1e-3), ADD).false_negatives(rate) <= missed


@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_a_belief_is_exceeded_no_more_often_than_it_says(mu: float) -> None:
    """The posterior of a Gaussian is known: log-odds are N(μ²/2, μ²) where the row is in."""
    found = curves.tradeoff(Gaussian(1 / mu), ADD)
    for prior in (0.1, 0.5, 0.9):
        for chance in (0.2, 0.01, 1e-4):
            bound = found.belief(chance, prior)
            logit = math.log(bound / (1 - bound)) - math.log(prior / (1 - prior))
            assert norm.sf((logit - mu**2 / 2) / mu) <= chance


def test_precision_is_bayes() -> None:
    found = curves.tradeoff(Gaussian(1.0), ADD)
    power = float(norm.sf(norm.isf(0.01) - 1))
    assert found.precision(0.01) == pytest.approx(power / (power + 0.01), rel=1e-3)
    assert found.precision(0.01, prior=0.001) < 0.01
    assert found.precision(0.0) == 1.0


@pytest.mark.parametrize(
    ("event", "relation"),
    [(Repeat(Gaussian(8.0), 16), ADD), (Repeat(Poisson(0.02, Gaussian(2.0)), 50), ADD),
     (Repeat(Poisson(0.02, Gaussian(2.0)), 50), REPLACE), (Repeat(FixedSize(100, 4, Gaussian(3.0)), 20), REPLACE)],
)  # fmt: skip
def test_a_group_has_more_to_lose(event: Event, relation: Relation) -> None:
    one, three = promised(event, relation), promised(event, relation).for_group(3)
    epsilons = [0.0, 0.5, 1.0, 2.0]
    assert all(x < y for x, y in zip(one.deltas(epsilons), three.deltas(epsilons), strict=True))
    assert one.tradeoff().advantage < three.tradeoff().advantage <= 3 * one.tradeoff().advantage * (1 + 1e-3)
    assert one.tradeoff().power(0.05) < three.tradeoff().power(0.05)


def test_a_group_of_a_full_batch_in_closed_form() -> None:
    three = promised(Gaussian(6.0)).for_group(3)
    assert three.mu() == pytest.approx(0.5)
    assert three.zcdp() == pytest.approx(0.125)
    assert three.renyi([2.0, 5.0]) == pytest.approx([0.25, 0.625])
    assert three.tradeoff() == curves.tradeoff(Gaussian(2.0), ADD)


@pytest.mark.parametrize("kind", [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL])
def test_renyi_of_a_group_to_many_digits(kind: Kind) -> None:
    rate, sigma, size, order = 0.1, 1.5, 3, 4.0
    with mpmath.workdps(30):

        def mixed(x: mpmath.mpf, sign: int) -> mpmath.mpf:
            weights = [mpmath.binomial(size, j) * mpmath.mpf(rate) ** j * (1 - mpmath.mpf(rate)) ** (size - j)
                       for j in range(size + 1)]  # fmt: skip
            return sum(w * mpmath.npdf(x, sign * j, sigma) for j, w in enumerate(weights))

        def term(x: mpmath.mpf) -> mpmath.mpf:
            p = mpmath.npdf(x, 0, sigma) if kind is Kind.ADD else mixed(x, 1)
            q = mpmath.npdf(x, 0, sigma) if kind is Kind.REMOVE else mixed(x, -1)
            return p**order * q ** (1 - order)

        true = mpmath.log(mpmath.quad(term, mpmath.linspace(-25, 45, 15))) / (order - 1)
    value = rdp.tilts([Pair(kind, rate, sigma, size)], order - 1)[0, 0] / (order - 1)
    assert float(true) <= value * (1 + 1e-12)
    assert value == pytest.approx(float(true), rel=1e-9)


def test_zcdp_holds_at_every_order() -> None:
    for event, relation in ((RUN, ADD), (RUN, REPLACE), (Repeat(Shuffle(5, Gaussian(3.0)), 4), ZERO),
                            (Approximate(0.7, 0.0, ADD), ADD)):  # fmt: skip
        rho = curves.zcdp(event, relation)
        profile = rdp.account(event, relation)
        assert all(profile.divergence(order) <= rho * order for order in (1.01, 2.0, 10.0, 200.0))


def test_what_does_not_hold_is_refused() -> None:
    with pytest.raises(AccountingError, match=r"sampled steps have no useful μ: .* tradeoff\(\)"):
        promised(RUN).mu()
    secure = promised(Repeat(Inexact(Gaussian(4.0), 1e-17), 3))
    for ask in (secure.mu, secure.zcdp, lambda: secure.renyi([2.0])):
        with pytest.raises(AccountingError, match=r"secure noise .* tradeoff\(\)"):
            ask()
    assert secure.tradeoff().advantage >= promised(Repeat(Gaussian(4.0), 3)).tradeoff().advantage
    with pytest.raises(AccountingError, match="trade-off curve"):
        curves.mu(Approximate(1.0, 0.0, ADD), ADD)
    with pytest.raises(AccountingError, match="no zCDP"):
        curves.zcdp(Approximate(1.0, 1e-6, ADD), ADD)
    with pytest.raises(AccountingError, match="no proven zCDP"):
        curves.zcdp(Shifted(0.1, Gaussian(50.0)), ADD)
    with pytest.raises(AccountingError, match="several rows"):
        curves.renyi(Shifted(0.1, Gaussian(50.0)), ADD, size=2)
    with pytest.raises(AccountingError, match="historical"):
        curves.tradeoff(RUN, ADD, accountant="strong-printed")
    found = curves.tradeoff(Gaussian(1.0), ADD)
    for bad in (-0.1, 1.5, math.nan):
        with pytest.raises(OptionError):
            found.power(bad)
    for bad in (0.0, 1.0, math.nan):
        with pytest.raises(OptionError):
            found.belief(bad)
    for bad in (-1.0, math.inf, math.nan, "1", None):
        with pytest.raises(OptionError):
            promised(RUN).deltas([0.0, bad])  # type: ignore[list-item]
    for bad in (1.0, 0.5, math.inf, math.nan, "2", None):
        with pytest.raises(OptionError):
            promised(RUN).renyi([2.0, bad])  # type: ignore[list-item]
    assert promised(RUN).deltas([]) == []


def test_nothing_reveals_nothing() -> None:
    found = curves.tradeoff(NOTHING, ZERO)
    assert found.advantage == 0
    assert found.power(0.05) == pytest.approx(0.05, abs=1e-12)
    assert found.belief(1e-6) == pytest.approx(0.5, abs=1e-12)


def test_releases_that_add_up_have_curves_too() -> None:
    event = Compose((Repeat(Poisson(0.01, Gaussian(4.0)), 100), Approximate(0.1, 1e-7, ADD)))
    profile = pld.account(event, ADD, 1e-3)
    epsilons = np.array([0.0, 0.2, 0.6])
    for epsilon, value in zip(epsilons, profile.deltas(epsilons), strict=True):
        assert value == pytest.approx(profile.delta(float(epsilon)), rel=2e-2)
    assert curves.tradeoff(event, ADD).power(0.0) >= 1e-7  # with probability δ it tells all


def test_figures_are_plain_values_and_none_where_a_notion_fails() -> None:
    full, sampled = promised(Gaussian(2.0)).attacks(), promised(RUN).attacks()
    assert full["mu"] == 0.5
    assert full["rho"] == pytest.approx(0.125)
    assert sampled["mu"] is sampled["rho"] is None
    assert [one["order"] for one in sampled["renyi"]] == list(curves.ORDERS)
    assert promised(Approximate(0.5, 1e-6, ADD)).attacks()["renyi"] == []
    points = sampled["tradeoff"]
    assert points[0]["false_positives"] == 0
    assert points[-1] == {"false_positives": 1.0, "false_negatives": 0.0}


def test_another_accountant_answers_where_pld_does_not() -> None:
    event = Repeat(Poisson(0.5, Gaussian(0.015)), 2)  # too little noise for pld
    found = Guarantee(1e5, 1e-5, ADD, "rdp", event).tradeoff()
    assert found.accountant == "rdp"
    assert found.advantage == 1.0
    rough, fine = (curves.Tradeoff((0.0, 1.0), (1.0, 1e-3), name) for name in ("rdp", "rdp"))
    assert rough.advantage == fine.advantage == pytest.approx((math.e - 1 + 2e-3) / (math.e + 1))


def test_mu_agrees_with_the_exact_accountant() -> None:
    event = Compose((Repeat(Gaussian(3.0), 7), Poisson(1.0, Gaussian(2.0))))
    for relation in Relation:
        assert curves.mu(event, relation) == exact.account(event, relation).mu  # type: ignore[union-attr]
