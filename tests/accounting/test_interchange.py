"""dp-accounting's events as trees: every event that both have goes there and back, and costs the same."""

import json
import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st

from dpgrad.accounting import account
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    DiscreteGaussian,
    Event,
    Exponential,
    FixedSize,
    Gaussian,
    Laplace,
    Pinned,
    Poisson,
    RandomizedResponse,
    Relation,
    Repeat,
    Selection,
    Shifted,
    Shuffle,
    TruncatedPoisson,
)
from dpgrad.accounting.interchange import RELATIONS, from_dp_accounting, relation_of, to_dp_accounting
from dpgrad.accounting.trials import PoissonTrials
from dpgrad.errors import AccountingError, OptionError

SHARED: list[tuple[dp_event.DpEvent, Event, str]] = [
    (dp_event.GaussianDpEvent(2.0), Gaussian(2.0), "ADD_OR_REMOVE_ONE"),
    (dp_event.GaussianDpEvent(2.0), Gaussian(2.0), "REPLACE_ONE"),
    (dp_event.LaplaceDpEvent(3.0), Laplace(3.0), "REPLACE_SPECIAL"),
    (
        dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.5)), 20),
        Repeat(Poisson(0.1, Gaussian(1.5)), 20),
        "REPLACE_ONE",
    ),
    (
        dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(4.0), dp_event.LaplaceDpEvent(9.0)]),
        Compose((Gaussian(4.0), Laplace(9.0))),
        "ADD_OR_REMOVE_ONE",
    ),
    (dp_event.NoOpDpEvent(), NOTHING, "ADD_OR_REMOVE_ONE"),
    (dp_event.RandomizedResponseDpEvent(0.5, 4), RandomizedResponse(0.5, 4), "REPLACE_ONE"),
    *(
        (
            dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 2.0),
            TruncatedPoisson(0.1, 100, 20, Gaussian(2.0)),
            name,
        )
        for name in ("REPLACE_ONE", "REPLACE_SPECIAL")  # for the third see docs/proofs/releases.md
    ),
]
UNPRICED: list[tuple[dp_event.DpEvent, Event]] = [  # by dp-accounting's PLD
    (
        dp_event.SampledWithoutReplacementDpEvent(100, 10, dp_event.GaussianDpEvent(4.0)),
        FixedSize(100, 10, Gaussian(4.0)),
    ),
]


def made(tree: Any) -> Any:
    """The event of dp-accounting that a tree describes."""
    if isinstance(tree, list):
        return [made(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    given = {name: made(value) for name, value in tree.items() if name not in ("module_name", "class_name")}
    assert tree["module_name"] == dp_event.__name__
    return getattr(dp_event, tree["class_name"])(**given)


@pytest.mark.parametrize(("theirs", "ours"), [*((a, b) for a, b, _ in SHARED), *UNPRICED])
def test_there_and_back(theirs: dp_event.DpEvent, ours: Event) -> None:
    assert from_dp_accounting(theirs.to_named_tuple()) == ours
    tree = to_dp_accounting(ours)
    assert made(tree) == theirs
    assert from_dp_accounting(json.loads(json.dumps(tree))) == ours
    without = {name: value for name, value in tree.items() if name != "module_name"}
    assert from_dp_accounting(without) == ours


@pytest.mark.parametrize(("theirs", "ours", "name"), SHARED)
def test_costs_the_same(theirs: dp_event.DpEvent, ours: Event, name: str) -> None:
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation[name])
    accountant.compose(theirs)
    event = from_dp_accounting(theirs.to_named_tuple())
    assert event == ours
    found = account(event, relation_of(name)).epsilon(1e-6)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-4, abs=1e-4)  # its grid


TRIAL, THEIR_TRIAL = (
    Repeat(Poisson(0.1, Gaussian(2.0)), 20),
    dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(2.0)), 20),
)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, math.inf])
@pytest.mark.parametrize("mean", [2.0, 10.0])
def test_selections_there_and_back(shape: float, mean: float) -> None:
    theirs = dp_event.RepeatAndSelectDpEvent(THEIR_TRIAL, mean, shape)
    ours = from_dp_accounting(theirs.to_named_tuple())
    assert isinstance(ours, Selection)
    assert ours.events == (TRIAL,)
    assert ours.trials.mean == pytest.approx(mean, rel=1e-10)
    assert ours.trials.mean >= mean
    back = made(to_dp_accounting(ours))
    assert (back.event, back.shape, back.mean) == (theirs.event, shape, ours.trials.mean)
    again = from_dp_accounting(json.loads(json.dumps(to_dp_accounting(ours))))
    found = account(ours, Relation.ADD_REMOVE, "rdp").epsilon(1e-6)
    assert account(again, Relation.ADD_REMOVE, "rdp").epsilon(1e-6) == pytest.approx(found, rel=1e-9)
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(theirs)
    assert found == pytest.approx(accountant.get_epsilon(1e-6), rel=0.02)  # its orders are few
    assert found <= accountant.get_epsilon(1e-6) * (1 + 1e-9)


@pytest.mark.parametrize(("mean", "shape"), [("2", 1.0), (math.nan, 1.0), (0.5, 1.0), (3.0, -2.0), (3.0, -math.inf)])
def test_selections_that_are_none(mean: Any, shape: float) -> None:
    tree = {**to_dp_accounting(Selection((TRIAL,), PoissonTrials(3.0))), "mean": mean, "shape": shape}
    with pytest.raises((AccountingError, OptionError)):
        from_dp_accounting(tree)


def test_a_selection_among_several_settings_is_refused() -> None:
    with pytest.raises(AccountingError, match=r"^Selection has no event in dp-accounting"):
        to_dp_accounting(Selection((Gaussian(1.0), Gaussian(2.0)), PoissonTrials(3.0)))


def test_their_renyi_accountant_needs_half_the_multiplier() -> None:
    """Under REPLACE_ONE it reads it as noise over the distance of neighbours, unlike their PLD accountant."""

    def theirs(event: dp_event.DpEvent) -> float:
        found = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        return float(found.compose(event).get_epsilon(1e-6))

    plain = account(Gaussian(3.4), Relation.REPLACE_ONE, "rdp").epsilon(1e-6)
    assert plain == pytest.approx(theirs(dp_event.GaussianDpEvent(1.7)), rel=1e-3)
    whole, half = (dp_event.SampledWithoutReplacementDpEvent(100, 10, dp_event.GaussianDpEvent(z)) for z in (4.0, 2.0))
    sampled = account(FixedSize(100, 10, Gaussian(4.0)), Relation.REPLACE_ONE).epsilon(1e-6)
    assert theirs(whole) < sampled < theirs(half)


def test_every_relation_has_a_name() -> None:
    assert set(RELATIONS) == {relation.name for relation in dp_accounting.NeighboringRelation}
    assert set(RELATIONS.values()) == set(Relation)
    with pytest.raises(OptionError, match="relation must be one of"):
        relation_of("SWAP")


KNOWN = {
    "NoOpDpEvent", "GaussianDpEvent", "LaplaceDpEvent", "RandomizedResponseDpEvent", "PoissonSampledDpEvent",
    "SampledWithoutReplacementDpEvent", "TruncatedSubsampledGaussianDpEvent", "SelfComposedDpEvent", "ComposedDpEvent",
    "RepeatAndSelectDpEvent",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [x for x in dir(dp_event) if x.endswith("DpEvent") and x != "DpEvent" and x not in KNOWN]
)
def test_every_other_event_is_refused_by_name(name: str) -> None:
    with pytest.raises(AccountingError, match=f"^{name} of dp-accounting has no event here"):
        from_dp_accounting({"module_name": dp_event.__name__, "class_name": name})


@pytest.mark.parametrize(
    "event",
    [
        Shuffle(4, Gaussian(1.0)), Approximate(1.0, 0.0, Relation.ZERO_OUT), Shifted(0.1, Gaussian(50.0)),
        Pinned(Gaussian(1.0), Relation.ZERO_OUT), DiscreteGaussian(1.0), Exponential(1.0, Relation.ZERO_OUT),
    ],
)  # fmt: skip
def test_what_they_do_not_have_is_refused_by_name(event: Event) -> None:
    with pytest.raises(AccountingError, match=f"^{type(event).__name__} has no event in dp-accounting"):
        to_dp_accounting(Compose((Gaussian(1.0), event)))


@pytest.mark.parametrize(
    "tree",
    [
        None, 3, "GaussianDpEvent", [], {}, {"class_name": 3}, {"class_name": "GaussianDpEvent"}, (1, 2),
        {"class_name": "GaussianDpEvent", "noise_multiplier": 0}, {"class_name": "GaussianDpEvent", "noise": 1.0},
        {"class_name": "GaussianDpEvent", "noise_multiplier": "1"},
        {"class_name": "ComposedDpEvent", "events": {"class_name": "NoOpDpEvent"}},
        {"class_name": "PoissonSampledDpEvent", "sampling_probability": 0.1, "event": {"class_name": "NoOpDpEvent"}},
        {"class_name": "SelfComposedDpEvent", "event": {"class_name": "NoOpDpEvent"}, "count": -1},
        {"class_name": "__import__"},
    ],
)  # fmt: skip
def test_refuses_what_is_no_tree(tree: object) -> None:
    with pytest.raises((AccountingError, OptionError)):
        from_dp_accounting(tree)


def test_refuses_a_tree_that_is_too_deep() -> None:
    tree: dict[str, Any] = {"class_name": "NoOpDpEvent"}
    for _ in range(100_000):
        tree = {"class_name": "SelfComposedDpEvent", "event": tree, "count": 1}
    with pytest.raises(AccountingError, match="nested too deeply"):
        from_dp_accounting(tree)


leaves = st.one_of(
    st.builds(Gaussian, st.floats(0.1, 100)),
    st.builds(Laplace, st.floats(0.1, 100)),
    st.builds(RandomizedResponse, st.floats(0.01, 1.0), st.integers(2, 9)),
    st.builds(Poisson, st.floats(0, 1), st.builds(Gaussian, st.floats(0.1, 100))),
    st.builds(TruncatedPoisson, st.floats(0, 1), st.integers(1, 99), st.integers(1, 99), st.just(Gaussian(1.0))),
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.builds(Repeat, inner, st.integers(0, 9)) | st.builds(Compose, st.lists(inner, max_size=3).map(tuple))
    ),
    max_leaves=6,
)


@given(trees)
def test_any_composition_goes_there_and_back(event: Event) -> None:
    assert from_dp_accounting(to_dp_accounting(event)) == event
    assert from_dp_accounting(made(to_dp_accounting(event)).to_named_tuple()) == event
