"""Laplace, discrete Gaussian, randomized response, exponential mechanism and truncated batches, against closed forms,
many digits, dp-accounting, and mechanisms that are carried out."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from dpgrad.accounting import ACCOUNTANTS, account, curves, exact, interchange, losses, pld, rdp
from dpgrad.accounting.events import (
    Approximate,
    Compose,
    DiscreteGaussian,
    Event,
    Exponential,
    Gaussian,
    Laplace,
    Leaf,
    Poisson,
    RandomizedResponse,
    Relation,
    Repeat,
    TruncatedPoisson,
    from_json,
    to_json,
)
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.ledger import Ledger
from dpgrad.accounting.pairs import Array, Kind
from dpgrad.accounting.pld.blends import Atom, Blend, Slope, Whole
from dpgrad.errors import AccountingError, OptionError

ADD, ZERO, REPLACE = Relation.ADD_REMOVE, Relation.ZERO_OUT, Relation.REPLACE_ONE
DELTA = 1e-6
FINE = 1e-4  # of dp-accounting's grid: it errs by less than this for a few steps

RELEASES: list[tuple[Leaf, Relation]] = [
    (Laplace(3.0), ADD),
    (Laplace(0.7), REPLACE),
    (DiscreteGaussian(2.0), ZERO),
    (DiscreteGaussian(0.6, 1), ADD),
    (DiscreteGaussian(20.0, 3), REPLACE),
    (RandomizedResponse(0.5, 2), REPLACE),
    (RandomizedResponse(0.8, 7), REPLACE),
    (Exponential(0.8, ZERO), ZERO),
    (TruncatedPoisson(0.1, 100, 14, Gaussian(2.0)), ADD),
    (TruncatedPoisson(0.1, 100, 14, Gaussian(2.0)), ZERO),
    (TruncatedPoisson(0.1, 100, 14, Gaussian(2.0)), REPLACE),
]


def exactly(leaf: Leaf, relation: Relation, epsilon: float) -> float:
    """δ(ε) of one release to many digits, from its two laws."""
    with mpmath.workdps(30):
        e, shift = mpmath.exp(mpmath.mpf(epsilon)), relation.reach
        match leaf:
            case Laplace(b):

                def over(x: mpmath.mpf) -> mpmath.mpf:
                    return (mpmath.exp(-abs(x) / b) - e * mpmath.exp(-abs(x - shift) / b)) / (2 * b)

                turn = (shift - b * mpmath.mpf(epsilon)) / 2  # the loss is ε there; before, larger
                return float(mpmath.quad(over, [-60 * b, 0, turn]) if turn > 0 else 0)
            case DiscreteGaussian(sigma, sensitivity):
                shift *= sensitivity
                far = int(40 * sigma) + shift
                density = [
                    mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(sigma) ** 2)) for x in range(-far, far + 1)
                ]
                total = sum(density)
                terms = (density[i] - e * density[i - shift] if i >= shift else density[i] for i in range(len(density)))
                # P around 0 against Q around the shift, mirrored: x runs down
                return float(sum(term for term in terms if term > 0) / total)
            case RandomizedResponse(p, k):
                truth, other = 1 - p + mpmath.mpf(p) / k, mpmath.mpf(p) / k
                return float(
                    max(truth - e * other, 0) + max(other - e * truth, 0) + (k - 2) * max(other - e * other, 0)
                )
            case Exponential(epsilon0):
                whole = mpmath.exp(mpmath.mpf(epsilon0))
                return float((mpmath.sqrt(whole) - mpmath.sqrt(e)) ** 2 / (whole - 1)) if epsilon < epsilon0 else 0.0
            case _:
                raise NotImplementedError


@pytest.mark.parametrize(("leaf", "relation"), RELEASES[:8])
def test_one_release_to_many_digits(leaf: Leaf, relation: Relation) -> None:
    for epsilon in (0.0, 0.05, 0.3, 0.6):
        true = exactly(leaf, relation, epsilon)
        for accountant in ("pld", "exact"):
            found = account(leaf, relation, accountant).delta(epsilon)
            assert true * (1 - 1e-12) <= found <= true * (1 + 1e-8) + 1e-290


@pytest.mark.parametrize(("leaf", "relation"), [*RELEASES[:4], *RELEASES[5:8]])
def test_two_releases_to_many_digits(leaf: Leaf, relation: Relation) -> None:
    """Of a pair, δ₂(ε) = E_P δ₁(ε − L): here from the law of the loss itself, part by part."""
    step = losses.of(leaf, relation, Kind.REMOVE)
    assert isinstance(step, Blend)
    epsilon = 0.4
    true = mpmath.mpf(0)
    with mpmath.workdps(20):

        def once(at: mpmath.mpf) -> mpmath.mpf:
            """δ₁, also at negative ε."""
            if at < 0:  # the laws are symmetric: δ(−ε) = 1 − e^{−ε} + e^{−ε}δ(ε)
                return 1 - mpmath.exp(at) + mpmath.exp(at) * exactly(leaf, relation, float(-at))
            return mpmath.mpf(exactly(leaf, relation, float(at)))

        for weight, part in step.parts:
            match part:
                case Atom(loss):
                    true += weight * once(epsilon - mpmath.mpf(loss))
                case Slope(r):
                    points = sorted({-r, r, *(x for x in (epsilon - r, epsilon) if -r < x < r)})
                    mass = 4 * mpmath.sinh(mpmath.mpf(r) / 2)
                    true += weight * mpmath.quad(
                        lambda x, mass=mass: mpmath.exp(x / 2) / mass * once(epsilon - x), points, maxdegree=4
                    )
                case Whole():
                    table, logs = part.atoms(1e-12)
                    keep = logs > math.log(1e-10)
                    for one, log in zip(table[keep], logs[keep], strict=True):
                        true += weight * mpmath.exp(log) * once(epsilon - mpmath.mpf(one))
    interval = pld.account(Repeat(leaf, 2), relation).delta_interval(epsilon)
    assert float(true) * (1 - 1e-7) <= interval.upper  # the table above leaves out a little
    if not isinstance(leaf, Exponential):
        assert interval.lower <= float(true) * (1 + 1e-6)
        assert interval.upper <= float(true) * (1 + 1e-3)


def _ours(event: Event, relation: Relation) -> pld.Interval:
    return pld.account(event, relation).interval(DELTA)


@pytest.mark.parametrize(
    ("event", "relation", "law"),
    [
        (Laplace(20.0), ADD, partial(peer.from_laplace_mechanism, 20.0)),
        (Laplace(20.0), REPLACE, partial(peer.from_laplace_mechanism, 10.0)),
        (DiscreteGaussian(3.5, 2), ADD, partial(peer.from_discrete_gaussian_mechanism, 3.5, 2)),
        (RandomizedResponse(0.9, 2), REPLACE, partial(peer.from_randomized_response, 0.9, 2)),
        (RandomizedResponse(0.9, 5), REPLACE, partial(peer.from_randomized_response, 0.9, 5)),
    ],
    ids=["laplace", "laplace-replace", "discrete", "coin", "five"],
)
def test_many_releases_against_dp_accounting(event: Leaf, relation: Relation, law: Callable[..., Any]) -> None:
    for count in (1, 30):
        theirs = law(value_discretization_interval=FINE).self_compose(count).get_epsilon_for_delta(DELTA)
        found = _ours(Repeat(event, count), relation)
        assert found.lower <= theirs + 1e-9
        assert found.upper == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "relation", "most"),
    [
        ("REPLACE_ONE", REPLACE, 14),
        *(
            pytest.param(name, relation, most, marks=pytest.mark.slow)
            for name, relation in interchange.RELATIONS.items()
            for most in (11, 14, 30)
        ),
    ],
)
def test_truncated_batches_against_dp_accounting(name: str, relation: Relation, most: int) -> None:
    theirs = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation[name])
    theirs.compose(dp_accounting.TruncatedSubsampledGaussianDpEvent(100, 0.1, most, 2.0), 5)
    found = _ours(Repeat(TruncatedPoisson(0.1, 100, most, Gaussian(2.0)), 5), relation)
    if relation is ADD:  # dp-accounting takes the number of rows as known there; ours may be any up to it
        assert found.lower <= theirs.get_epsilon(DELTA) * (1 + 1e-4)
    else:
        assert found.upper == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-4)


def _sums(rows: list[float], rate: float, most: int) -> dict[float, float]:
    """The law of the sum of a truncated Poisson batch, by enumeration."""
    found: dict[float, float] = {}
    for size in range(len(rows) + 1):
        for sample in itertools.combinations(range(len(rows)), size):
            chance = rate**size * (1 - rate) ** (len(rows) - size)
            kept = list(itertools.combinations(sample, min(size, most)))
            for batch in kept:
                total = math.fsum(rows[i] for i in batch)
                found[total] = found.get(total, 0.0) + chance / len(kept)
    return found


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_small_dataset_shows_more_than_a_truncated_batch_costs(relation: Relation, most: int) -> None:
    """δ(ε) of the mechanism itself, on datasets of four rows of ±1 or nothing, from the enumerated law of its sum."""
    rate, sigma = 0.6, 1.3
    profile = pld.account(TruncatedPoisson(rate, 4, most, Gaussian(sigma)), relation)
    x = np.linspace(-18, 18, 6001)
    width = x[1] - x[0]

    def density(rows: list[float]) -> Array:
        law = _sums(rows, rate, most)
        return (
            sum(p * np.exp(-((x - m) ** 2) / (2 * sigma**2)) for m, p in law.items()) / sigma / math.sqrt(2 * math.pi)
        )  # type: ignore[return-value]

    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), 3):
        values: tuple[list[float], ...] = ([*others, 1.0], [*others, -1.0])
        match relation:
            case Relation.ADD_REMOVE:
                neighbours = [(one, list(others)) for one in values]
            case Relation.ZERO_OUT:
                neighbours = [(one, [*others, 0.0]) for one in values]
            case _:
                neighbours = [values]  # type: ignore[list-item]
        for one, two in neighbours:
            p, q = density(one), density(two)
            for epsilon in (0.0, 0.4, 1.0):
                bound = profile.delta(epsilon)
                for a, b in ((p, q), (q, p)):
                    assert np.maximum(a - math.exp(epsilon) * b, 0).sum() * width <= bound + 1e-6


def test_the_chance_of_a_full_batch_is_enumerated() -> None:
    rate, rows, most = 0.3, 5, 2
    chance, after = losses.cut(TruncatedPoisson(rate, rows, most, Gaussian(1.0)))
    assert chance == pytest.approx(sum(binom.pmf(k, rows - 1, rate) for k in range(most, rows)))
    included = sum(binom.pmf(k, rows - 1, rate) * rate * most / (k + 1) for k in range(most, rows))
    assert after == pytest.approx(included / chance)


@given(st.floats(0.05, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 3.0))
@settings(max_examples=200, deadline=None)
def test_no_mechanism_of_bounded_range_exceeds_the_exponential(epsilon: float, place: float, at: float) -> None:
    """Two candidates: losses t and t − ε, for every t; the profile and every Rényi order lie under ours."""
    t = place * epsilon
    up = (math.exp(epsilon) - math.exp(t)) / math.expm1(epsilon)
    law = [(t, up), (t - epsilon, 1 - up)]
    profile = exact.account(Exponential(epsilon, ADD), ADD)
    true = sum(p * max(0.0, -math.expm1(at - loss)) for loss, p in law)
    assert true <= profile.delta(at) + 1e-14
    orders = rdp.account(Exponential(epsilon, ADD), ADD)
    for order in (1.1, 2.0, 7.0):
        moment = sum(p * math.exp((order - 1) * loss) for loss, p in law)
        assert math.log(moment) / (order - 1) <= orders.divergence(order) + 1e-12
    assert orders.divergence(3.0) <= 3 * curves.zcdp(Exponential(epsilon, ADD), ADD) + 1e-12


def test_the_exponential_mechanism_itself_is_within_its_price() -> None:
    rng = np.random.default_rng(3)
    epsilon, profile = 1.2, exact.account(Exponential(1.2, ADD), ADD)
    for _ in range(200):
        one = rng.normal(size=4) * 3
        two = one + rng.uniform(-1, 1, size=4)  # no utility moves by more than 1
        p, q = (np.exp(epsilon * u / 2) / np.exp(epsilon * u / 2).sum() for u in (one, two))
        for at in (0.0, 0.2, 0.7):
            assert np.maximum(p - math.exp(at) * q, 0).sum() <= profile.delta(at) + 1e-12


@pytest.mark.parametrize(("leaf", "relation"), RELEASES[:7])
def test_renyi_to_many_digits(leaf: Leaf, relation: Relation) -> None:
    for order in (1.5, 4.0, 12.0):
        with mpmath.workdps(30):
            c = mpmath.mpf(order) - 1
            match leaf:
                case Laplace(b):  # Mironov (2017), Table II
                    s = mpmath.mpf(relation.reach) / mpmath.mpf(b)
                    up, down = (c + 1) / (2 * c + 1) * mpmath.exp(c * s), c / (2 * c + 1) * mpmath.exp(-(c + 1) * s)
                    true = mpmath.log(up + down) / c
                case DiscreteGaussian(sigma, sensitivity):
                    s = relation.reach * sensitivity
                    far = int(40 * sigma + (order + 1) * s)
                    weigh = [
                        mpmath.exp(-(mpmath.mpf(x) ** 2) / 2 / mpmath.mpf(sigma) ** 2) for x in range(-far, far + 1)
                    ]
                    terms = (weigh[i] ** (c + 1) * weigh[i - s] ** -c for i in range(s, len(weigh)))
                    true = mpmath.log(sum(terms) / sum(weigh)) / c
                case RandomizedResponse(p, k):
                    truth, other = 1 - p + mpmath.mpf(p) / k, mpmath.mpf(p) / k
                    total = truth ** (c + 1) * other**-c + other ** (c + 1) * truth**-c + (k - 2) * other
                    true = mpmath.log(total) / c
        found = rdp.account(leaf, relation).divergence(order)
        assert float(true) <= found * (1 + 1e-15)
        assert found == pytest.approx(float(true), rel=1e-9)


@pytest.mark.parametrize(("leaf", "relation"), RELEASES)
def test_repeat_is_compose_and_orders_agree(leaf: Leaf, relation: Relation) -> None:
    assert pld.account(Repeat(leaf, 5), relation).epsilon(DELTA) == pytest.approx(
        pld.account(Compose((leaf, Repeat(leaf, 3), leaf)), relation).epsilon(DELTA), rel=1e-12
    )
    few, many = (pld.account(Repeat(leaf, n), relation).epsilon(DELTA) for n in (3, 12))
    assert few < many
    interval = pld.account(Repeat(leaf, 12), relation).interval(DELTA)
    assert interval.lower <= interval.estimate <= interval.upper
    assert interval.lower <= rdp.account(Repeat(leaf, 12), relation).epsilon(DELTA)
    with_more = Compose((Repeat(leaf, 12), Gaussian(5.0), Repeat(Poisson(0.05, Gaussian(2.0)), 20)))
    assert pld.account(with_more, relation, 1e-4).epsilon(DELTA) > interval.lower


@given(st.floats(0.5, 20.0), st.floats(1.05, 3.0), st.integers(1, 40))
@settings(max_examples=8, deadline=None)
def test_more_noise_costs_less(noise: float, factor: float, count: int) -> None:
    for make in (Laplace, DiscreteGaussian):
        less, more = (account(Repeat(make(z), count), ADD, "rdp").epsilon(DELTA) for z in (noise, factor * noise))
        assert more <= less * (1 + 1e-12)
        assert pld.account(Repeat(make(noise), count), ADD, 1e-3).epsilon(DELTA) <= less * (1 + 2e-3)
    for categories in (2, 5):
        less, more = (
            account(RandomizedResponse(p, categories), REPLACE).epsilon(DELTA)
            for p in (min(0.9, noise / 25), min(0.9, noise / 25) + 0.05)
        )
        assert more <= less


@pytest.mark.parametrize(("leaf", "relation"), RELEASES)
def test_is_an_event_like_any_other(leaf: Leaf, relation: Relation) -> None:
    event = Repeat(leaf, 3)
    assert from_json(to_json(event)) == event
    ledger = Ledger()
    ledger.add(event, relation, "counted")
    assert ledger.guarantee(DELTA).epsilon == account(event, relation).epsilon(DELTA)
    assert str(ledger.guarantee(DELTA)).endswith("pld accountant)")
    priced = {"pld", "rdp", "rdp-classic", *(() if isinstance(leaf, TruncatedPoisson) else ("exact",))}
    for name in ACCOUNTANTS:
        if name in priced:
            assert account(leaf, relation, name).epsilon(DELTA) > 0
        else:
            with pytest.raises(AccountingError, match=f"{type(leaf).__name__}|truncated Poisson"):
                account(leaf, relation, name)


@pytest.mark.parametrize(("leaf", "relation"), RELEASES[:9])
def test_groups(leaf: Leaf, relation: Relation) -> None:
    one = Guarantee.of(account(leaf, relation), DELTA)
    three = one.for_group(3)
    assert three.epsilon > one.epsilon
    match leaf:
        case Laplace(z):
            same: Event = Laplace(z / 3)
        case DiscreteGaussian(sigma, sensitivity):
            same = DiscreteGaussian(sigma, 3 * sensitivity)
        case RandomizedResponse():
            same = Repeat(leaf, 3)
        case Exponential(epsilon, declared):
            same = Exponential(3 * epsilon, declared)
        case _:
            return
    assert three.epsilon == pytest.approx(account(same, relation).epsilon(DELTA), rel=2e-3)
    assert three.tradeoff().advantage == pytest.approx(account(same, relation).delta(0.0), rel=1e-3)
    assert three.renyi([3.0]) == pytest.approx([rdp.account(same, relation).divergence(3.0)])


def test_what_has_no_price_is_refused_by_name() -> None:
    for relation in (ADD, ZERO):
        for accountant in ("pld", "rdp", "exact"):
            with pytest.raises(AccountingError, match="RandomizedResponse has no price under"):
                account(RandomizedResponse(0.5, 2), relation, accountant)
    for accountant in ("pld", "rdp", "exact"):
        with pytest.raises(AccountingError, match="declared 1-private under zero-out has no price under replace-one"):
            account(Exponential(1.0, ZERO), REPLACE, accountant)
    for accountant in ("moments", "strong", "moments-closed"):
        with pytest.raises(AccountingError, match="Laplace has no price by this accountant"):
            account(Laplace(1.0), ADD, accountant)
    with pytest.raises(AccountingError, match="Laplace once and alone"):
        account(Repeat(Laplace(1.0), 2), ADD, "exact")
    with pytest.raises(AccountingError, match="sigma of at most"):
        account(DiscreteGaussian(1e6), ADD, "pld")
    assert account(DiscreteGaussian(1e6), ADD, "rdp").epsilon(DELTA) < 1e-4


@pytest.mark.parametrize(
    "make",
    [
        lambda: Laplace(0.0), lambda: Laplace(math.nan), lambda: Laplace(True), lambda: Laplace("1"),
        lambda: DiscreteGaussian(1e-3), lambda: DiscreteGaussian(1.0, 0), lambda: DiscreteGaussian(1.0, 1.5),
        lambda: RandomizedResponse(0.0, 2), lambda: RandomizedResponse(1.5, 2), lambda: RandomizedResponse(0.5, 1),
        lambda: RandomizedResponse(math.nan, 2), lambda: Exponential(-1.0, ADD), lambda: Exponential(math.inf, ADD),
        lambda: Exponential(1.0, "other"), lambda: TruncatedPoisson(0.5, 0, 1, Gaussian(1.0)),
        lambda: TruncatedPoisson(1.5, 9, 1, Gaussian(1.0)), lambda: TruncatedPoisson(0.5, 9, 0, Gaussian(1.0)),
        lambda: TruncatedPoisson(0.5, 9, 1, Laplace(1.0)),
    ],
)  # fmt: skip
def test_refuses_what_is_no_release(make: Callable[[], object]) -> None:
    with pytest.raises((OptionError, AccountingError)):
        make()


def test_coins_are_purely_private_leaves() -> None:
    coin = RandomizedResponse(0.9, 2)
    same = Approximate(coin.epsilon, 0.0, REPLACE)
    for accountant in ("exact", "rdp"):
        ours, theirs = (account(Repeat(one, 40), REPLACE, accountant).epsilon(DELTA) for one in (coin, same))
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert pld.account(Repeat(coin, 40), REPLACE).epsilon(DELTA) == pytest.approx(ours, rel=0.1)
    assert pld.account(Repeat(coin, 40), REPLACE).epsilon(DELTA) == pytest.approx(
        account(Repeat(coin, 40), REPLACE, "exact").epsilon(DELTA), rel=1e-5
    )


def test_no_noise_left_says_nothing() -> None:
    for accountant in ("pld", "rdp", "exact"):
        assert account(RandomizedResponse(1.0, 3), REPLACE, accountant).delta(0.0) <= 1e-290
        assert account(Exponential(0.0, ADD), ADD, accountant).epsilon(DELTA) == 0
    with pytest.raises(AccountingError, match="RandomizedResponse has no price"):
        account(RandomizedResponse(1.0, 3), ADD)
    assert account(Repeat(Exponential(0.0, ADD), 5), ADD).epsilon(DELTA) == pytest.approx(0, abs=1e-9)
    never = TruncatedPoisson(0.0, 10, 3, Gaussian(1.0))
    assert account(Repeat(never, 5), ADD).epsilon(DELTA) == 0
    hardly = TruncatedPoisson(0.01, 1000, 1000, Gaussian(1.0))
    plain = account(Repeat(Poisson(0.01, Gaussian(1.0)), 50), ADD).epsilon(DELTA)
    assert account(Repeat(hardly, 50), ADD).epsilon(DELTA) == pytest.approx(plain, rel=1e-5)
