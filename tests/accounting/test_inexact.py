"""Noise that is not drawn exactly costs its distance in δ, under every accountant and for groups."""

import json
import math

import pytest

from dpgrad.accounting import ACCOUNTANTS, account, curves, events, group
from dpgrad.accounting.events import Approximate, Compose, FixedSize, Gaussian, Inexact, Poisson, Relation, Repeat
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.inexact import InexactProfile, parted

STEP = Poisson(0.02, Gaussian(1.5))
RUN = Repeat(STEP, 200)


def inexact(distance: float) -> Repeat:
    return Repeat(Inexact(STEP, distance), 200)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_delta_pays_for_the_distance(name: str) -> None:
    event = RUN if name != "exact" else Repeat(Gaussian(30.0), 200)
    near = Repeat(Inexact(event.event, 1e-9), 200)  # type: ignore[arg-type]
    exact, found = account(event, accountant=name), account(near, accountant=name)
    assert isinstance(found, InexactProfile)
    assert 2e-7 <= found.distance <= 2e-7 * (1 + 1e-12)
    assert found.epsilon(1e-5) == pytest.approx(exact.epsilon(1e-5 - 2e-7), rel=1e-6)
    assert found.epsilon(1e-5) >= exact.epsilon(1e-5)
    assert found.delta(2.0) >= exact.delta(2.0) + 2e-7
    assert found.delta(2.0) == pytest.approx(exact.delta(2.0) + 2e-7, rel=1e-9)
    assert (found.event, found.relation, found.accountant, found.guarantee) == (
        near, exact.relation, name, exact.guarantee,
    )  # fmt: skip


def test_nothing_is_left_of_delta() -> None:
    assert account(inexact(1e-7)).epsilon(1e-5) == math.inf
    assert account(inexact(0.5)).delta(1.0) == 1.0
    assert group.epsilon(inexact(1e-7), Relation.ADD_REMOVE, 1e-5, 2, "pld")[0] == math.inf


def test_beyond_what_is_proved_epsilon_is_infinite() -> None:
    found = account(Inexact(Gaussian(0.01), 1e-20), accountant="exact")
    assert account(Gaussian(0.01), accountant="exact").epsilon(1e-5) > 256
    assert found.epsilon(1e-5) == math.inf
    assert found.delta(1e4) == found.delta(256.0)


def test_an_exact_event_is_left_alone() -> None:
    assert parted(RUN) == (RUN, 0.0)
    assert not isinstance(account(RUN), InexactProfile)
    assert account(Repeat(Inexact(STEP, 0.0), 200)).epsilon(1e-5) == account(RUN).epsilon(1e-5)


def test_distances_of_different_releases_add_up() -> None:
    both = Compose((inexact(1e-12), Gaussian(9.0), Repeat(Inexact(Gaussian(9.0), 1e-11), 3)))
    event, distance = parted(both)
    assert events.leaves(event) == {STEP: 200, Gaussian(9.0): 4}
    assert distance == pytest.approx(2.3e-10)


def test_groups_pay_the_same_distance() -> None:
    exact = group.epsilon(RUN, Relation.ADD_REMOVE, 1e-5 - 2e-7, 3, "pld")[0]
    assert group.epsilon(inexact(1e-9), Relation.ADD_REMOVE, 1e-5, 3, "pld")[0] == pytest.approx(exact, rel=1e-6)
    one = Guarantee.of(account(inexact(1e-9)), 1e-5)
    assert one.for_group(3).epsilon == pytest.approx(exact, rel=1e-6)
    assert one.sampling == "Poisson sampling"


def test_bounds_hold_each_other() -> None:
    found = account(inexact(1e-9))
    assert isinstance(found, InexactProfile)
    interval = found.interval(1e-5)
    assert interval.lower <= account(RUN).epsilon(1e-5) <= interval.upper == found.epsilon(1e-5)
    assert interval.lower <= found.estimate(1e-5) <= interval.upper


def test_json() -> None:
    assert events.from_json(events.to_json(inexact(1e-20))) == inexact(1e-20)
    with pytest.raises(ValueError, match="must have fields"):
        events.from_dict({"type": "inexact", "event": json.loads(events.to_json(STEP))})


@pytest.mark.parametrize("distance", [-1e-9, 1.5, math.nan, "0", True])
def test_a_distance_is_a_probability(distance: float) -> None:
    with pytest.raises(ValueError, match="distance"):
        Inexact(STEP, distance)


@pytest.mark.parametrize("event", [RUN, Inexact(STEP, 0.1), Approximate(1.0, 0.0, Relation.ZERO_OUT), None])
def test_only_noise_on_a_sum_is_inexact(event: object) -> None:
    with pytest.raises(ValueError, match="only noise on a sum"):
        Inexact(event, 0.1)  # type: ignore[arg-type]


def test_relations_are_those_of_the_event() -> None:
    fixed = Inexact(FixedSize(100, 5, Gaussian(2.0)), 1e-12)
    assert account(fixed, Relation.REPLACE_ONE).epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="no price under add-remove"):
        account(fixed)


def test_curves_pay_the_distance_and_stronger_notions_are_refused() -> None:
    exact, found = Guarantee.of(account(RUN), 1e-5), Guarantee.of(account(inexact(1e-6)), 1e-3)
    for one, other in zip(
        curves.deltas(RUN, Relation.ADD_REMOVE, [0.5, 1.0, 300.0]),
        curves.deltas(inexact(1e-6), Relation.ADD_REMOVE, [0.5, 1.0, 300.0]),
        strict=True,
    ):
        assert one + 2e-4 * (1 - 1e-9) <= other <= one + 2.1e-4
    plain, near = exact.attacks(), found.attacks()
    assert near["membership_advantage"] >= plain["membership_advantage"]
    assert (near["mu"], near["rho"], near["renyi"]) == (None, None, [])
    with pytest.raises(ValueError, match="secure noise has no zCDP"):
        curves.zcdp(Inexact(Gaussian(2.0), 1e-9), Relation.ADD_REMOVE)
