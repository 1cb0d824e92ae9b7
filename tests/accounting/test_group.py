"""What a group of rows is promised, against closed forms, many digits and another accountant."""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binom

from dpgrad.accounting import account, exact, group, pld
from dpgrad.accounting._shifts import shifts
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Pinned,
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
DELTA = 1e-5


def promised(event: Event, relation: Relation = ADD, accountant: str = "pld", delta: float = DELTA) -> Guarantee:
    return Guarantee.of(account(event, relation, accountant), delta)


def truth(kind: Kind, rate: float, sigma: float, size: int, epsilon: float) -> float:
    """δ(ε) of one step of a group, to many digits: ∫(P − e^ε·Q)₊ between the places where the integrand may turn."""
    with mpmath.workdps(30):
        weights = [mpmath.binomial(size, j) * mpmath.mpf(rate) ** j * (1 - mpmath.mpf(rate)) ** (size - j)
                   for j in range(size + 1)]  # fmt: skip
        sigma = mpmath.mpf(sigma)

        def mixed(x: mpmath.mpf, sign: int) -> mpmath.mpf:
            return sum(w * mpmath.npdf(x, sign * j, sigma) for j, w in enumerate(weights))

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            p = mpmath.npdf(x, 0, sigma) if kind is Kind.ADD else mixed(x, 1)
            q = mpmath.npdf(x, 0, sigma) if kind is Kind.REMOVE else mixed(x, -1)
            return p - mpmath.exp(epsilon) * q

        start = float(Pair(kind, rate, float(sigma), size).place(np.array([epsilon]))[0])
        root = mpmath.findroot(excess, start)
        return float(mpmath.quad(excess, mpmath.linspace(root, root + size + 30 * sigma, 12)))


@pytest.mark.parametrize("kind", [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL])
@pytest.mark.parametrize(("rate", "sigma", "size"), [(0.3, 1.0, 2), (0.01, 0.7, 4)])
def test_one_step_to_many_digits(kind: Kind, rate: float, sigma: float, size: int) -> None:
    epsilon = 0.25 * min(Pair(kind, rate, sigma, size).most, 2.0)
    found = pld.single.bound(Pair(kind, rate, sigma, size), epsilon, upper=True)
    wanted = truth(kind, rate, sigma, size, epsilon)
    assert wanted <= found <= wanted * (1 + 1e-7)


@pytest.mark.parametrize("kind", [Kind.REMOVE, Kind.ADD, Kind.ANTIPODAL])
@pytest.mark.parametrize("size", [2, 10, 500])
def test_place_undoes_loss(kind: Kind, size: int) -> None:
    pair = Pair(kind, 0.02, 0.8, size)
    x = np.linspace(-6.0, 20.0, 41) * (-1 if kind is Kind.ADD else 1)
    loss = pair.loss(x)
    assert np.all(np.diff(loss) * np.sign(np.diff(x)) >= 0)
    kept = np.abs(loss - (np.log1p(-0.02) * size if kind is Kind.REMOVE else pair.most)) > 1e-6
    assert np.allclose(pair.loss(pair.place(loss[kept])), loss[kept], rtol=1e-11, atol=1e-12)
    if kind is Kind.REMOVE:
        assert pair.place(np.array([size * math.log1p(-0.02) - 0.1]))[0] == -np.inf


@pytest.mark.parametrize(("rate", "size"), [(0.3, 7), (0.01, 33), (0.2, 400), (1e-6, 10_000), (0.999, 60), (0.01, 100)])
def test_the_number_that_take_part_is_never_understated(rate: float, size: int) -> None:
    found = shifts(rate, size)
    weights = np.exp(found.log_weights)
    assert weights.sum() + math.exp(found.none) == pytest.approx(1.0, abs=1e-8)
    for place, by in enumerate(found.by):  # at least as likely to be as many, for every number
        assert weights[place:].sum() >= binom.sf(by - 1, size, rate) * (1 - 1e-12)
    if size <= 32:
        assert np.allclose(weights, binom.pmf(np.arange(1, size + 1), size, rate), rtol=1e-10)


@pytest.mark.parametrize(("rate", "sigma", "steps", "size"), [(0.2, 3.0, 10, 3)])
def test_between_the_bounds_of_another_accountant(rate: float, sigma: float, steps: int, size: int) -> None:
    numbers = list(range(size + 1))
    chances = [float(p) for p in binom.pmf(numbers, size, rate)]

    def other(pessimistic: bool) -> float:
        one = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma, numbers, chances, pessimistic_estimate=pessimistic, value_discretization_interval=1e-2,
            use_connect_dots=pessimistic,
        )  # fmt: skip
        return float(one.self_compose(steps).get_epsilon_for_delta(DELTA))

    interval = pld.PldProfile(Repeat(Poisson(rate, Gaussian(sigma)), steps), ADD, group=size).interval(DELTA)
    assert other(False) <= interval.upper
    assert interval.lower <= other(True)
    assert interval.lower <= interval.upper <= interval.lower * (1 + 1e-5)
    assert (
        interval.upper
        <= promised(Repeat(Poisson(rate, Gaussian(sigma)), steps)).for_group(size).epsilon
        <= (interval.upper * (1 + 1e-3))
    )


@pytest.mark.parametrize("relation", Relation)
def test_full_batches_move_k_times_as_far(relation: Relation) -> None:
    event = Repeat(Gaussian(30.0), 7)
    for size in (2, 3, 50):
        wanted = exact.epsilon(size * relation.reach * math.sqrt(7) / 30, DELTA)
        for accountant in ("pld", "exact"):
            found = promised(event, relation, accountant).for_group(size)
            assert found.epsilon == pytest.approx(wanted, rel=1e-12)
            assert found.accountant == accountant
    every_row = promised(Repeat(Poisson(1.0, Gaussian(30.0)), 7), relation).for_group(3)
    assert every_row.epsilon == pytest.approx(promised(event, relation).for_group(3).epsilon, rel=1e-12)


def test_a_shuffled_epoch_is_one_gaussian_and_a_pinned_release_too() -> None:
    wanted = exact.epsilon(3 * math.sqrt(4) / 20, DELTA)
    assert promised(Repeat(Shuffle(9, Gaussian(20.0)), 4), ZERO).for_group(3).epsilon == pytest.approx(wanted, rel=1e-9)
    pinned = Repeat(Pinned(Gaussian(20.0), ZERO), 4)
    assert promised(pinned, ZERO, "exact").for_group(3).epsilon == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("relation", Relation)
def test_grows_with_the_group_and_one_is_itself(relation: Relation) -> None:
    one = promised(Repeat(Poisson(0.02, Gaussian(1.2)), 50), relation)
    assert one.for_group(1) == one
    found = [one.for_group(size).epsilon for size in (1, 2, 3, 8)]
    assert all(more > less > 0 for less, more in pairwise(found))
    every = promised(Repeat(Gaussian(1.2), 50), relation)  # sampling can only help
    assert one.for_group(8).epsilon < every.for_group(8).epsilon


def test_replaced_rows_cost_more_than_removed_ones_and_less_than_twice_as_many() -> None:
    event = Repeat(Poisson(0.02, Gaussian(1.2)), 50)
    removed, replaced = (promised(event, relation).for_group(3).epsilon for relation in (ADD, REPLACE))
    assert removed < replaced
    # removing one set of three and adding another: both steps of the chain at the same ε
    chain = group.chained(pld.PldProfile(event, ADD, 1e-4, group=3), DELTA, 2)
    assert replaced < chain


def test_the_chain_holds_for_a_gaussian_and_is_what_the_formula_says() -> None:
    profile = account(Gaussian(5.0), ADD, "exact")
    for size in (2, 4):
        found = group.chained(profile, DELTA, size)
        assert found >= exact.epsilon(size / 5, DELTA)
        single = found / size
        factor = math.fsum(math.exp(i * single) for i in range(size))
        assert profile.delta(single) * factor <= DELTA * (1 + 1e-9)
        assert profile.delta(single * 0.998) * factor > DELTA
    assert group.chained(account(Gaussian(0.01), ADD, "exact"), DELTA, 30) == math.inf


def test_fixed_size_batches_and_objective_perturbation_follow_from_one_row() -> None:
    fixed = promised(FixedSize(1000, 10, Gaussian(4.0)), REPLACE)
    assert 2 * fixed.epsilon < fixed.for_group(2).epsilon < 4 * fixed.epsilon
    assert fixed.for_group(2).accountant == "pld"
    whole = promised(FixedSize(10, 10, Gaussian(40.0)), REPLACE).for_group(2)
    assert whole.epsilon == pytest.approx(exact.epsilon(4 / 40, DELTA), rel=1e-9)
    shifted = promised(Shifted(0.1, Gaussian(50.0)), ZERO)
    assert shifted.for_group(2).epsilon > 2 * shifted.epsilon
    with pytest.raises(AccountingError, match="prices a group of rows for Gaussian noise"):
        pld.PldProfile(Shifted(0.1, Gaussian(50.0)), ZERO, group=2)


def test_a_release_of_which_only_epsilon_and_delta_are_known() -> None:
    pure = promised(Approximate(0.5, 0, REPLACE), REPLACE, "exact")
    assert pure.for_group(4).epsilon == pytest.approx(2.0, rel=1e-12)
    known = promised(Compose((Approximate(0.5, 1e-9, ZERO), Gaussian(40.0))), ZERO)
    lost = 1e-9 * (1 + math.exp(0.5))
    assert known.for_group(2).epsilon == pytest.approx(1.0 + exact.epsilon(2 / 40, DELTA - lost), rel=1e-6)
    assert known.for_group(1000).epsilon == math.inf
    assert promised(NOTHING).for_group(7).epsilon == 0


def test_a_schedule_of_many_noises_is_rounded_to_the_dear_side() -> None:
    steps = Compose(tuple(Poisson(0.02, Gaussian(2 + i / 20)) for i in range(20)))
    found = promised(steps, ZERO).for_group(2)
    exactly = pld.PldProfile(steps, ZERO, 1e-3, group=2).epsilon(DELTA)
    assert exactly * (1 - 2e-3) <= found.epsilon <= 1.06 * exactly


def test_another_accountant_never_promises_a_group_more_than_one_row() -> None:
    one = promised(Repeat(Poisson(0.02, Gaussian(1.2)), 50), ADD, "moments")
    assert one.for_group(2).epsilon > one.epsilon
    assert one.for_group(2).accountant == "pld"


def test_says_how_many_of_what() -> None:
    event = Gaussian(20.0)
    said = {relation: promised(event, relation, "exact").for_group(5).neighbours for relation in Relation}
    assert said[ADD] == "datasets that differ by the presence of 5 rows"
    assert said[ZERO] == "datasets of the same public size, the contributions of 5 rows replaced by nothing"
    assert said[REPLACE] == "datasets of the same public size that differ in 5 rows"
    person = Guarantee(1.0, DELTA, ZERO, "exact", event, unit="person")
    assert "public number of persons, one person's contribution replaced" in str(person)
    assert "the contributions of 2 persons" in str(person.for_group(2))


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None, 10**9])
def test_refuses_a_size_that_is_none(size: object) -> None:
    with pytest.raises(OptionError, match=r"size of the group must be (a whole number|at most)"):
        promised(Gaussian(20.0)).for_group(size)  # type: ignore[arg-type]


def test_refuses_a_group_of_groups() -> None:
    with pytest.raises(OptionError, match="this guarantee is already for 2 rows"):
        promised(Gaussian(20.0)).for_group(2).for_group(2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize(("rate", "sigma", "steps"), [(1e-5, 1.0, 100_000), (0.5, 0.3, 5), (0.01, 20.0, 1000)])
def test_certified_at_the_edges(relation: Relation, rate: float, sigma: float, steps: int) -> None:
    """Bounds hold everywhere; at δ = 1e-12 and a tiny rate they are some percent apart, as they are for one row."""
    for size in (2, 20):
        for delta, width in ((1e-3, 1e-3), (1e-12, 0.06)):
            found = pld.PldProfile(Repeat(Poisson(rate, Gaussian(sigma)), steps), relation, group=size).interval(delta)
            assert found.lower <= found.upper
            assert found.upper <= max(found.lower * (1 + width), 1e-4)
