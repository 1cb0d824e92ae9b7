"""When an engine is compared again, by a clock that the test moves."""

import pytest

from dpgrad.grads import again
from dpgrad.grads.again import Again


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(again.time, "monotonic", lambda: self.now)

    def run(self, steps: int, each: float, comparison: float, first: float = 0.0, third: float = 1.0) -> list[int]:
        """The steps before which a comparison is due, in a run whose first and third steps take longer."""
        found, when = [], Again()
        for step in range(steps):
            if when.due():
                found.append(step)
                with when.timed():
                    self.now += comparison
            self.now += {0: first, 2: third}.get(step, each)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_cheap_one_comes_back_after_four_times_as_many_steps(clock: Clock) -> None:
    assert clock.run(1000, each=1.0, comparison=0.5) == [1, 4, 16, 64, 256]


def test_a_dear_one_comes_once_in_a_thousand_steps(clock: Clock) -> None:
    assert clock.run(1000, each=1.0, comparison=20.0) == [1]


def test_what_the_first_step_sets_up_pays_for_none(clock: Clock) -> None:
    assert clock.run(1000, each=1.0, comparison=20.0, first=10_000.0) == [1]


def test_a_step_that_makes_what_others_need_pays_for_none(clock: Clock) -> None:
    """Code that was made at the third step let steps seem long, and comparisons took 1.3 % of a run."""
    assert clock.run(1000, each=1.0, comparison=4.0, third=100.0) == [1]


def test_beside_the_first_they_take_a_hundredth_at_most(clock: Clock) -> None:
    for comparison in (0.1, 0.9, 1.0, 1.1, 2.0, 3.0, 10.0):
        due = clock.run(2000, each=1.0, comparison=comparison)
        assert due[0] == 1
        assert (len(due) - 1) * comparison <= 0.01 * 2000
