"""Following a run: the scheduled follower is exact and quick, the filter never lets a run exceed its budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgrad import accounting
from dpgrad.accounting.events import NOTHING, Compose, Event, Gaussian, Poisson, Relation, Repeat, grouped
from dpgrad.accounting.online import Follower, RdpFilter

STEP = Poisson(0.01, Gaussian(1.0))


def schedule(n: int) -> Event:
    return grouped(Poisson(0.01, Gaussian(1.0 + min(t / 100, 1.0))) for t in range(n))


def test_the_last_step_is_certified_and_the_next_is_not() -> None:
    run = Follower(lambda n: Repeat(STEP, n), epsilon=2.0, delta=1e-5)
    assert accounting.account(Repeat(STEP, run.last)).epsilon(1e-5) <= 2.0
    assert accounting.account(Repeat(STEP, run.last + 1)).epsilon(1e-5) > 2.0


def test_schedules_are_followed_exactly() -> None:
    """By the accountant that prices schedules soonest: the follower is the same for all."""
    run = Follower(schedule, epsilon=1.5, delta=1e-5, accountant="rdp", limit=100_000)
    assert run.last > 100
    while run.allows():
        run.advance()
    assert run.taken == run.last
    assert run.event() == schedule(run.last)
    assert accounting.account(run.event(), accountant="rdp").epsilon(1e-5) <= 1.5
    assert accounting.account(schedule(run.last + 1), accountant="rdp").epsilon(1e-5) > 1.5


def test_a_step_too_many_is_refused_and_not_counted() -> None:
    run = Follower(lambda n: Repeat(Gaussian(10.0), n), epsilon=1.0, delta=1e-5)
    for _ in range(run.last):
        run.advance()
    with pytest.raises(ValueError, match=r"step .* would exceed epsilon = 1"):
        run.advance()
    assert run.taken == run.last


def test_an_answer_prices_nothing() -> None:
    """The last step is found before the run: asking and advancing neither build an event nor price one."""
    built = []

    def plan(n: int) -> Event:
        built.append(n)
        return Repeat(STEP, n)

    run = Follower(plan, epsilon=2.0, delta=1e-5)
    before = len(built)
    while run.allows():
        run.advance()
    assert len(built) == before > 0


@pytest.mark.parametrize("relation", list(Relation))
def test_the_filter_stops_within_the_budget(relation: Relation) -> None:
    run = RdpFilter(epsilon=2.0, delta=1e-5, expected=Repeat(STEP, 1000), relation=relation)
    count = 0
    while run.allows(STEP):
        run.charge(STEP)
        count += 1
    assert count > 100
    # what was charged is private by the certified accountant, which prices the same steps fixed in advance
    assert accounting.account(Repeat(STEP, count), relation).epsilon(1e-5) <= 2.0
    # and the filter wastes little: RDP at its best order would stop near here too
    assert accounting.account(Repeat(STEP, count + count // 20), relation, "rdp").epsilon(1e-5) > 2.0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0.6, 8.0)), min_size=1, max_size=30))
def test_whatever_is_charged_stays_private(choices: list[tuple[float, float]]) -> None:
    run = RdpFilter(epsilon=1.0, delta=1e-6, expected=Repeat(STEP, 100))
    taken = []
    for rate, noise in choices:
        step = Poisson(rate, Gaussian(noise))
        if run.allows(step):
            run.charge(step)
            taken.append(step)
    if taken:
        assert accounting.account(Compose(tuple(taken)), accountant="rdp").epsilon(1e-6) <= 1.0 + 1e-9


def test_the_filter_refuses_what_it_cannot_hold() -> None:
    run = RdpFilter(epsilon=1.0, delta=1e-5, expected=Repeat(STEP, 100))
    with pytest.raises(ValueError, match="would exceed epsilon = 1"):
        run.charge(Gaussian(0.01))
    assert run.spent == 0
    with pytest.raises(ValueError, match="expected must release something"):
        RdpFilter(epsilon=1.0, delta=1e-5, expected=NOTHING)
    assert not RdpFilter(epsilon=1e-4, delta=1e-5, expected=Repeat(Gaussian(0.1), 1000)).allows(Gaussian(0.1))
    with pytest.raises(ValueError, match="epsilon must be positive"):
        RdpFilter(epsilon=0.0, delta=1e-5, expected=STEP)
