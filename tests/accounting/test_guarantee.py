"""What a user is told: never an epsilon alone, and never one that is not a guarantee."""

import contextlib
import math
from dataclasses import FrozenInstanceError
from importlib import import_module
from typing import Any

import pytest

from dpgrad.accounting import ACCOUNTANTS, account, pld
from dpgrad.accounting.events import Approximate, Compose, Event, Gaussian, Pinned, Poisson, Relation, Repeat, Shifted
from dpgrad.accounting.guarantee import Guarantee, refuse_history

RUN = Repeat(Poisson(0.01, Gaussian(4.0)), 100)
HISTORY = {"moments-asymptotic", "strong-printed"}


def test_says_delta_neighbours_and_accountant() -> None:
    said = {relation: str(Guarantee(1.5, 1e-5, relation, "pld", RUN)) for relation in Relation}
    for text in said.values():
        assert text.startswith("ε = 1.5 at δ = 1e-05 for datasets ")
        assert text.endswith("(Poisson sampling, pld accountant)")
    assert "presence of one row" in said[Relation.ADD_REMOVE]
    assert "replaced by nothing" in said[Relation.ZERO_OUT]
    assert "differ in one row" in said[Relation.REPLACE_ONE]


def test_names_releases_that_are_no_noise_on_a_sum() -> None:
    event = Compose((Approximate(0.5, 0, Relation.ZERO_OUT), Shifted(0.1, Gaussian(50.0))))
    said = str(Guarantee.of(account(event, Relation.ZERO_OUT, "exact"), 1e-5))
    assert said.endswith("(a release known to be (ε, δ)-private and objective perturbation, exact accountant)")
    assert "replaced by nothing" in said


def test_a_pinned_release_is_full_batch_like_any_other() -> None:
    event = Compose((Gaussian(4.0), Pinned(Gaussian(4.0), Relation.ZERO_OUT)))
    said = str(Guarantee.of(account(event, Relation.ZERO_OUT, "exact"), 1e-5))
    assert said.endswith("(full batch, exact accountant)")


def test_of_a_profile_is_what_the_profile_says() -> None:
    profile = pld.account(RUN)
    given = Guarantee.of(profile, 1e-5)
    assert given == Guarantee(profile.epsilon(1e-5), 1e-5, Relation.ADD_REMOVE, "pld", RUN)
    with pytest.raises(FrozenInstanceError):
        given.epsilon = 0.0  # type: ignore[misc]


def test_is_the_upper_bound() -> None:
    interval = pld.account(RUN).interval(1e-5)
    assert Guarantee.of(pld.account(RUN), 1e-5).epsilon == interval.upper > interval.lower


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_every_accountant_gives_one_or_is_history(name: str) -> None:
    event: Event = Gaussian(4.0) if name == "exact" else RUN
    profile = account(event, accountant=name)
    assert (profile.accountant, profile.event, profile.relation) == (name, event, Relation.ADD_REMOVE)
    assert profile.guarantee == (name not in HISTORY)
    if profile.guarantee:
        refuse_history(profile)
        assert 0 < Guarantee.of(profile, 1e-5).epsilon < math.inf
    else:
        with pytest.raises(ValueError, match=f"accountant {name} is a historical comparison that can understate") as e:
            Guarantee.of(profile, 1e-5)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("epsilon", [-1e-9, -math.inf, math.nan])
def test_epsilon_is_checked(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon must be zero or more"):
        Guarantee(epsilon, 1e-5, Relation.ADD_REMOVE, "pld", RUN)


def test_an_infinite_epsilon_can_be_said() -> None:
    assert str(Guarantee(math.inf, 1e-5, Relation.ADD_REMOVE, "pld", RUN)).startswith("ε = ∞")


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan, True, "1e-5", None])
def test_delta_is_checked(delta: Any) -> None:
    with pytest.raises(ValueError, match="delta must"):
        Guarantee(1.0, delta, Relation.ADD_REMOVE, "pld", RUN)
    with pytest.raises(ValueError, match="delta must"):
        Guarantee.of(pld.account(RUN), delta)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"accountant must be one of pld, rdp, .* got 'prv'"):
        account(RUN, accountant="prv")
    with pytest.raises(ValueError, match="'swap' is not a valid Relation"):
        account(RUN, "swap")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pld", "rdp", "moments", "strong", "rdp-classic"])
def test_a_relation_may_be_given_by_name(name: str) -> None:
    by_name = account(RUN, "replace-one", name)  # type: ignore[arg-type]
    assert by_name.relation is Relation.REPLACE_ONE
    assert by_name.epsilon(1e-5) == account(RUN, Relation.REPLACE_ONE, name).epsilon(1e-5)


@pytest.mark.parametrize("name", ["pld", "rdp", "moments", "exact", "strong", "rdp-classic", "moments-closed"])
def test_no_accountant_takes_one_relation_for_another(name: str) -> None:
    """Given a relation by its name, an accountant prices that one or refuses; add/remove would understate."""
    module, function = ACCOUNTANTS[name]
    price = getattr(import_module(f"dpgrad.accounting.{module}"), function)
    least = account(Gaussian(4.0), Relation.REPLACE_ONE, "exact").epsilon(1e-5)
    with contextlib.suppress(ValueError):
        assert price(Gaussian(4.0), "replace-one").epsilon(1e-5) >= least * (1 - 1e-12)
    with pytest.raises(ValueError, match="swap"):
        price(Gaussian(4.0), "swap")
