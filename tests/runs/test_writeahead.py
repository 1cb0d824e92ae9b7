"""The ledger of one run, line by line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpgrad import Mechanism, Relation
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Compose, Gaussian, grouped, leaves
from dpgrad.errors import ResumeError
from dpgrad.mechanism import sampling, schedules
from dpgrad.runs.writeahead import WriteAhead, _opening, charges

DELTA = 1e-5
PLANS = {
    "full batch": Mechanism(sampling.FullBatch(), 12, 6.0),
    "poisson": Mechanism(sampling.Poisson(0.1), 12, 2.0),
    "falling": Mechanism(sampling.FullBatch(), 12, 6.0, clip=schedules.linear(1.0, 12), hold_noise=True),
    "shuffle": Mechanism(sampling.Shuffle(20, 4), 12, 6.0, relation=Relation.ZERO_OUT),
    "shuffle, falling": Mechanism(
        sampling.Shuffle(20, 4), 12, 6.0, relation=Relation.ZERO_OUT, clip=schedules.linear(1.0, 12), hold_noise=True
    ),
}


def created(path: Path, plan: Mechanism, reserve: int = 5) -> WriteAhead:
    return WriteAhead.create(path, plan, DELTA, "pld", reserve, seeded=False)


@pytest.mark.parametrize("name", PLANS)
@given(ends=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_charges_are_those_of_the_steps_one_by_one(name: str, ends: tuple[int, int]) -> None:
    start, stop = sorted(ends)
    if stop == start:
        assert charges(PLANS[name], start, stop) == NOTHING
        return
    cut = PLANS[name].with_steps(stop)
    prices = [cut.step_event(step, start) for step in range(start, stop)]
    assert leaves(charges(PLANS[name], start, stop)) == leaves(grouped(p for p in prices if p != NOTHING))  # type: ignore[misc]


@pytest.mark.parametrize("name", PLANS)
def test_a_whole_run_ends_with_the_plan(name: str, tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS[name])
    for step in range(12):
        ledger.reserve(step)
        read = WriteAhead.read(tmp_path / "ledger")
        assert step < read.present.until <= 12
    assert read.event() == ledger.event() == PLANS[name].event()
    assert ledger.budget() == PLANS[name].guarantee(DELTA).epsilon


def test_blocks_stay_off_the_steps_between(tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS["poisson"])
    sizes = []
    for step in range(12):
        ledger.reserve(step)
        sizes.append((tmp_path / "ledger").stat().st_size)
    assert len(set(sizes)) == 3


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_new_key_may_take_the_steps_that_are_not_spent(left: int, tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS["full batch"], reserve=1)
    for step in range(12 - left):
        ledger.reserve(step)
    ledger.begin(12 - left, 12 - left, 1, seeded=False)
    assert ledger.present.last == 12


def test_blocks_have_a_step_at_least(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reserve must be a whole number"):
        created(tmp_path / "none", PLANS["poisson"], reserve=0)


def test_nothing_beyond_the_plan(tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS["poisson"])
    with pytest.raises(ValueError, match="step 13 would exceed the plan"):
        ledger.reserve(12)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("began", [0, 3, 5])
def test_a_new_key_pays_for_both_and_ends_within_the_budget(name: str, began: int, tmp_path: Path) -> None:
    plan = PLANS[name]
    ledger = created(tmp_path / "ledger", plan, reserve=6)
    ledger.reserve(0)
    ledger.begin(began, 6, 6, seeded=False)
    last, old = ledger.present.last, charges(plan, 0, 6)

    def price(stop: int) -> float:
        return account(Compose((old, charges(plan, began, stop))), plan.relation).epsilon(DELTA)

    assert began <= last < 12
    assert last == began or price(last) <= ledger.budget()
    assert price(last + 1) > ledger.budget()
    assert leaves(ledger.before) == leaves(old)
    for step in range(began, last):
        ledger.reserve(step)
    read = WriteAhead.read(tmp_path / "ledger")
    assert leaves(read.event()) == leaves(old) + leaves(charges(plan, began, last))
    assert account(read.event(), plan.relation).epsilon(DELTA) <= ledger.budget()


def test_a_new_key_within_a_shuffled_epoch_pays_that_epoch_again(tmp_path: Path) -> None:
    plan = PLANS["shuffle"]
    ledger = created(tmp_path / "ledger", plan, reserve=6)
    ledger.reserve(0)  # steps 0 to 5 of epochs of 5
    ledger.begin(6, 6, 1, seeded=False)
    assert sum(leaves(ledger.event()).values()) == 2
    assert ledger.present.last == 10  # one epoch of three is left, and it is this one


def test_an_attempt_is_charged_to_where_its_next_checkpoint_was_due(tmp_path: Path) -> None:
    for due, until in ((3, 6), (6, 6), (9, 9), (99, 12)):
        ledger = created(tmp_path / "ledger", PLANS["poisson"], reserve=6)
        ledger.reserve(0)
        ledger.begin(2, due, 6, seeded=False)
        assert ledger.attempts[0].until == until
        assert WriteAhead.read(tmp_path / "ledger").attempts[0].until == 6  # nothing is written until `commit`
        ledger.commit()
        found = WriteAhead.read(tmp_path / "ledger")
        assert found.attempts == ledger.attempts
        assert len(found.attempts) == 2


def test_what_was_begun_is_written_before_anything_else(tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS["poisson"], reserve=6)
    ledger.reserve(0)
    ledger.begin(2, 9, 4, seeded=False)
    ledger.reserve(2)
    found = WriteAhead.read(tmp_path / "ledger")
    assert found.attempts == ledger.attempts
    assert (found.attempts[0].until, found.present.began, found.present.until) == (9, 2, min(6, ledger.present.last))


@pytest.mark.parametrize("beside", [Gaussian(4.0), Gaussian(1.0)])
def test_a_new_key_leaves_room_for_what_is_released_beside(beside: Gaussian, tmp_path: Path) -> None:
    plan = PLANS["poisson"]
    ledger = WriteAhead.create(tmp_path / "ledger", plan, DELTA, "pld", 5, seeded=False, also_released=beside)
    budget = account(Compose((beside, plan.event())), plan.relation).epsilon(DELTA)
    assert ledger.budget() == pytest.approx(budget, rel=1e-9)
    ledger.reserve(0)
    ledger.begin(2, 5, 5, seeded=False)

    def price(stop: int) -> float:
        both = Compose((beside, charges(plan, 0, 5), charges(plan, 2, stop)))
        return account(both, plan.relation).epsilon(DELTA)

    last = ledger.present.last
    assert price(last) <= budget < price(last + 1)
    assert WriteAhead.read(tmp_path / "ledger").also_released == beside


def test_a_torn_line_counts_as_the_largest_block_it_could_have_been(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = created(path, PLANS["poisson"])
    ledger.reserve(0)
    ledger.reserve(5)
    whole = path.read_bytes()
    ends = len(b"".join(whole.splitlines(keepends=True)[:-1]))
    for cut in range(ends + 1, len(whole)):
        path.write_bytes(whole[:cut])
        read = WriteAhead.read(path)
        assert read.present.until == 10
        assert WriteAhead.read(path).event() == read.event()  # mended, it stays so
        read.reserve(10)
        assert WriteAhead.read(path).present.until == 12


def test_settled_steps_are_given_back(tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS["poisson"])
    ledger.reserve(0)
    ledger.settle(2)
    assert WriteAhead.read(tmp_path / "ledger").present.until == 2
    ledger.reserve(2)
    assert WriteAhead.read(tmp_path / "ledger").present.until == 7


EDITS: dict[str, Any] = {
    "digit": lambda lines: [*lines[:2], lines[2].replace(b'"until": 5', b'"until": 3'), *lines[3:]],
    "left out": lambda lines: [*lines[:2], *lines[3:]],
    "twice": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "exchanged": lambda lines: [*lines[:2], lines[3], lines[2]],
    "last": lambda lines: [*lines[:3], lines[3].replace(b'"until": 10', b'"until": 6')],
    "foreign": lambda lines: [lines[0].replace(b"dpgrad", b"dpmore"), *lines[1:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_ledger_is_refused(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = created(path, PLANS["poisson"])
    ledger.reserve(0)
    ledger.reserve(5)
    path.write_bytes(b"".join(EDITS[edit](path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=r"has the wrong checksum.* was edited or damaged"):
        WriteAhead.read(path)


def test_lines_that_are_whole_and_make_no_sense_are_refused(tmp_path: Path) -> None:
    for record, said in (
        ({"until": 13}, "reserves steps out of turn"),
        ({"attempt": 3, "began": 0}, "begins an attempt out of turn"),
        ({"other": 1}, "'finished'"),
    ):
        ledger = created(tmp_path / "ledger", PLANS["poisson"])
        ledger._lines.append(record)
        with pytest.raises(ValueError, match=f"is not the ledger of a run: .*{said}"):
            WriteAhead.read(tmp_path / "ledger")


def test_nothing_takes_back_steps_but_an_orderly_end_and_nothing_begins_after_the_last(tmp_path: Path) -> None:
    ledger = created(tmp_path / "ledger", PLANS["poisson"])
    ledger.reserve(0)
    ledger._lines.append({"until": 2})
    with pytest.raises(ValueError, match="line 4 reserves steps out of turn"):
        WriteAhead.read(tmp_path / "ledger")
    ledger = created(tmp_path / "ledger", PLANS["poisson"])
    ledger.reserve(0)
    ledger.finish(kept=False)
    with pytest.raises(ValueError, match="begins an attempt out of turn"):
        ledger.begin(2, 5, 5, seeded=False)
    ledger._lines.append(_opening(2, 0, 12, 5, False, PLANS["poisson"]))
    with pytest.raises(ValueError, match="line 5 begins an attempt out of turn"):
        WriteAhead.read(tmp_path / "ledger")


def test_a_ledger_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("dpgrad.runs.writeahead.FORMAT", "another run 7")
        created(tmp_path / "ledger.jsonl", PLANS["poisson"])
    with pytest.raises(ResumeError, match="its first line is not that of"):
        WriteAhead.read(tmp_path / "ledger.jsonl")
