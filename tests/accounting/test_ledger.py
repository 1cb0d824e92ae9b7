"""The ledger across runs: everything adds up, in memory, in a file, from several threads and processes."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event as Flag
from typing import Any

import pytest

from dpgrad import _files
from dpgrad.accounting import account
from dpgrad.accounting.events import (
    NOTHING,
    Approximate,
    Compose,
    Event,
    FixedSize,
    Gaussian,
    Poisson,
    Relation,
    Repeat,
    Shuffle,
    leaves,
)
from dpgrad.accounting.ledger import Ledger
from dpgrad.errors import LedgerError
from faulty import CrashError, FaultyOs, moments

STEP = Poisson(0.01, Gaussian(1.0))
ADD = Relation.ADD_REMOVE


def places(tmp_path: Path) -> list[Path | None]:
    return [None, tmp_path / "books.jsonl"]


def test_everything_adds_up(tmp_path: Path) -> None:
    for place in places(tmp_path):
        ledger = Ledger(place)
        assert ledger.event() == NOTHING
        assert ledger.relation is None
        assert ledger.guarantee(1e-5).epsilon == 0
        ledger.add(Repeat(STEP, 100), ADD, "first")
        ledger.add(Repeat(STEP, 50), ADD, "second")
        assert ledger.event() == Compose((Repeat(STEP, 100), Repeat(STEP, 50)))
        assert ledger.guarantee(1e-5).epsilon == account(Repeat(STEP, 150), ADD).epsilon(1e-5)
        assert [entry.label for entry in ledger.entries()] == ["first", "second"]


def test_a_file_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    Ledger(path).add(STEP, ADD, "é: a model")
    again = Ledger(path)
    again.add(Gaussian(2.0), ADD)
    assert Ledger(path).entries() == again.entries()
    assert Ledger(path).event() == Compose((STEP, Gaussian(2.0)))
    assert "books.jsonl, 2 entries" in repr(again)


def test_a_run_that_reports_twice_counts_once_and_a_label_does_not_hide_a_charge() -> None:
    ledger = Ledger()
    ledger.add(Repeat(STEP, 100), ADD, "plan", run="a")
    ledger.add(Repeat(STEP, 7), ADD, "fit")
    ledger.add(Repeat(STEP, 7), ADD, "fit")
    ledger.add(Repeat(STEP, 40), ADD, "spent", run="a")
    assert leaves(ledger.event())[STEP] == 54


def test_relations_do_not_mix(tmp_path: Path) -> None:
    for place in places(tmp_path):
        ledger = Ledger(place)
        ledger.add(STEP, ADD)
        with pytest.raises(ValueError, match="holds releases for add-remove neighbours, got one for replace-one"):
            ledger.add(STEP, Relation.REPLACE_ONE)
        assert ledger.event() == STEP


def test_threads_lose_nothing(tmp_path: Path) -> None:
    for place in places(tmp_path):
        ledger = Ledger(place)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(partial(ledger.add, STEP, ADD), map(str, range(20))))
        assert sorted(int(entry.label) for entry in ledger.entries()) == list(range(20))


def test_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    code = (
        "import sys; from dpgrad import Ledger, Relation; from dpgrad.accounting.events import Gaussian\n"
        "ledger = Ledger(sys.argv[1])\n"
        "for _ in range(15): ledger.add(Gaussian(1.0), Relation.ADD_REMOVE)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
    assert [process.wait(600) for process in both] == [0, 0]
    assert leaves(Ledger(path).event())[Gaussian(1.0)] == 30


def filled(path: Path, *labels: str) -> Ledger:
    ledger = Ledger(path)
    for label in labels:
        ledger.add(STEP, ADD, label)
    return ledger


def labels(path: Path) -> list[str]:
    return [entry.label for entry in Ledger(path).entries()]


def head(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def cut(path: Path, lines: int) -> None:
    """Leave the first ``lines`` lines of a file."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def test_an_incomplete_last_line_is_dropped_where_its_add_had_not_returned(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    filled(path, "whole")
    before = head(path).read_bytes()
    filled(path, "torn")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="was shortened"):  # its add returned
        Ledger(path)
    head(path).write_bytes(before)
    assert labels(path) == ["whole"]
    filled(path, "next", "last")
    assert labels(path) == ["whole", "next", "last"]


@pytest.mark.parametrize("left", [0, 1, 2, 3])
@pytest.mark.parametrize("live", [True, False])
def test_a_ledger_that_was_shortened_is_refused(left: int, live: bool, tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    ledger = filled(path, "first", "second", "third")
    cut(path, left)
    for act in (ledger.entries, lambda: ledger.add(STEP, ADD)) if live else (lambda: Ledger(path),):
        with pytest.raises(ValueError, match=rf"has {max(left - 1, 0)} entries, and had 3, .* begin another ledger"):
            act()


def test_a_ledger_that_was_deleted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    ledger = filled(path, "first", "second")
    path.unlink()
    for act in (ledger.entries, lambda: ledger.add(STEP, ADD), lambda: Ledger(path)):
        with pytest.raises(ValueError, match=r"books.jsonl was deleted or moved, and it held 2 entries: put it back"):
            act()


def test_a_live_ledger_notices_that_both_files_went_or_went_back(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    filled(path, "first")
    old = path.read_bytes(), head(path).read_bytes()
    live = filled(path, "second")
    path.write_bytes(old[0])
    head(path).write_bytes(old[1])
    with pytest.raises(ValueError, match="was shortened or put back to an earlier state: it has 1 entries, and had 2"):
        live.entries()
    filled(path, "another", "and another")
    with pytest.raises(ValueError, match="it has 3 entries, and had 2, or other ones"):
        live.add(STEP, ADD)
    path.unlink()
    head(path).unlink()
    with pytest.raises(ValueError, match="was deleted or moved"):
        live.guarantee(1e-5)
    assert labels(path) == []  # what nobody has open is a new ledger: the docstring says so


def test_what_a_live_ledger_reads_of_others_it_remembers(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    reader = Ledger(path)
    filled(path, "first", "second")
    assert len(reader.entries()) == 2
    for place in (path, head(path)):
        place.unlink()
    with pytest.raises(ValueError, match="was deleted or moved, and it held 2 entries"):
        reader.entries()


@pytest.mark.parametrize("how", ["empty", "words", "line", "cut", "longer", "twice"])
def test_a_damaged_head_is_refused(how: str, tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    filled(path, "first")
    right = head(path).read_bytes()
    damaged = {"empty": b"", "words": b"words", "line": b"words\n"}
    damaged |= {"cut": right[:-1], "longer": right + b"x", "twice": 2 * right}
    head(path).write_bytes(damaged[how])
    with pytest.raises(ValueError, match=r"books\.jsonl\.head"):
        Ledger(path)


def test_a_head_of_another_ledger_or_another_time_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "books.jsonl", tmp_path / "other.jsonl"
    filled(path, "first")
    first = head(path).read_bytes()
    filled(path, "second", "third")
    filled(other, "another", "and another", "yet another")
    right = head(path).read_bytes()
    head(path).write_bytes(head(other).read_bytes())
    with pytest.raises(ValueError, match="was shortened or put back"):
        Ledger(path)
    head(path).write_bytes(first)
    with pytest.raises(ValueError, match=r"counts 1 entries of 3: it is an older head"):
        Ledger(path)
    head(path).write_bytes(right)
    assert labels(path) == ["first", "second", "third"]


def test_a_ledger_of_0_1_0_is_adopted_once(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    with pytest.raises(ValueError, match="is missing: there is no ledger to adopt"):
        Ledger.adopt(path)
    ledger = filled(path, "first", "second")
    head(path).unlink()  # as 0.1.0 left it
    path.write_bytes(path.read_bytes() + b"half a li")
    for act in (lambda: Ledger(path), lambda: ledger.add(STEP, ADD)):
        with pytest.raises(ValueError, match=r"has no head, books.jsonl.head: .*dpgrad 0.1.0 .*Ledger.adopt\('/"):
            act()
    assert [entry.label for entry in Ledger.adopt(path).entries()] == ["first", "second"]
    with pytest.raises(ValueError, match="has a head already"):
        Ledger.adopt(path)
    filled(path, "third")
    assert labels(path) == ["first", "second", "third"]
    notes = tmp_path / "notes"
    notes.write_text("", "utf-8")
    with pytest.raises(ValueError, match="is not a ledger of dpgrad"):
        Ledger.adopt(notes)
    assert not head(notes).exists()


def test_every_path_to_a_ledger_is_the_same_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds what the others added, under one lock and one head."""
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "link").symlink_to("real/books")
    (tmp_path / "chain").symlink_to("link")
    monkeypatch.chdir(tmp_path)
    paths = ["link", tmp_path / "chain", "real/books", "linked/books", "real/../linked/./books", tmp_path / "link"]
    opened = [Ledger(path) for path in paths]
    for number, ledger in enumerate(opened):
        ledger.add(STEP, ADD, str(number))
    assert all(len(ledger.entries()) == len(paths) for ledger in opened)
    assert {path.name for path in tmp_path.rglob("*")} == {
        "real", "linked", "link", "chain", "books", "books.lock", "books.head",
    }  # fmt: skip
    (tmp_path / "link").unlink()  # what was opened stays open
    opened[0].add(STEP, ADD)
    assert len(opened[2].entries()) == len(paths) + 1


def test_a_second_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "books"
    ledger = filled(path, "first")
    (tmp_path / "second").hardlink_to(path)
    for act in (lambda: ledger.add(STEP, ADD), lambda: Ledger(path), lambda: Ledger.adopt(tmp_path / "second")):
        with pytest.raises(ValueError, match=r"has 2 names \(hard links\).*delete the others, or copy the file"):
            act()
    (tmp_path / "second").unlink()
    ledger.add(STEP, ADD)


class Announced:
    """``os`` that says when a file was opened."""

    def __init__(self) -> None:
        self.opened = Flag()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *given: Any) -> int:
        file = os.open(*given)
        self.opened.set()
        return file


def test_who_waited_for_a_lock_that_was_deleted_gets_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not enter beside who made the new file."""
    path = tmp_path / "lock"
    old = _files.lock(path)
    announced = Announced()
    monkeypatch.setattr(_files, "os", announced)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_files.lock, path, wait=True)
        assert announced.opened.wait(60)
        path.unlink()
        _files.unlock(_files.lock(path), old)
        file = waiting.result(60)
    assert os.path.samestat(os.fstat(file), path.stat())
    _files.unlock(file)


UNPRICED: dict[str, Event] = {
    "overflow": Repeat(Gaussian(1.0), 10**400),
    "sampled overflow": Repeat(STEP, 10**400),
    "infinite loss": Repeat(Approximate(1e308, 0.0, ADD), 10),
    "relation": Approximate(1.0, 0.0, Relation.ZERO_OUT),
    "fixed size": FixedSize(100, 10, Gaussian(1.0)),
    "shuffle": Shuffle(10, Gaussian(1.0)),
    "none together": Compose((Poisson(0.1, Gaussian(1e-3)), Approximate(1.0, 1e-6, ADD))),
}


@pytest.mark.parametrize("name", UNPRICED)
def test_what_no_accountant_prices_is_refused_when_it_is_added(name: str, tmp_path: Path) -> None:
    for place in places(tmp_path):
        ledger = Ledger(place)
        ledger.add(STEP, ADD)
        with pytest.raises(ValueError, match="no accountant prices this release: "):
            ledger.add(UNPRICED[name], ADD)
        assert ledger.guarantee(1e-5).epsilon > 0
        assert ledger.event() == STEP


def test_what_has_no_price_together_with_the_rest_is_refused(tmp_path: Path) -> None:
    """One has a price by rdp alone, the other by all but rdp."""
    one, other = Poisson(0.1, Gaussian(1e-3)), Approximate(1.0, 1e-6, ADD)
    for place in places(tmp_path):
        for first, second in ((one, other), (other, one)):
            if place is not None:
                place = place.with_name(type(first).__name__)
            ledger = Ledger(place)
            ledger.add(first, ADD)
            with pytest.raises(ValueError, match=r"together with those in the ledger: .*; use another ledger"):
                ledger.add(second, ADD)
            assert ledger.event() == first


def test_a_report_that_a_run_replaces_is_priced_with_nothing() -> None:
    one, other = Poisson(0.1, Gaussian(1e-3)), Approximate(1.0, 1e-6, ADD)
    ledger = Ledger()
    ledger.add(one, ADD, run="a")
    ledger.add(other, ADD, run="a")
    assert ledger.event() == other


def test_an_event_too_deep_to_be_written_is_refused(tmp_path: Path) -> None:
    deep: Event = STEP
    for _ in range(3000):
        deep = Repeat(deep, 1)
    for place in places(tmp_path):
        with pytest.raises(ValueError, match="nested too deeply"):
            Ledger(place).add(deep, ADD)


def test_entries_that_others_add_while_it_is_read_are_no_disagreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and ledger are two files: between reading one and the other, others may have added entries."""
    path = tmp_path / "books.jsonl"
    filled(path, "0")
    reader, found, waiting = Ledger(path), _files.Lines.found, ["1", "2"]

    def slowly(place: Path) -> _files.Lines | None:
        if place == path and waiting:
            new, waiting[:] = list(waiting), []
            filled(path, *new)
        return found(place)

    monkeypatch.setattr(_files.Lines, "found", slowly)
    assert [entry.label for entry in reader.entries()] == ["0", "1", "2"]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The calls of a ledger that is begun and gets three entries."""
    root = tmp_path_factory.mktemp("calls")
    faulty = FaultyOs(root)
    assert charged(root, faulty) == ["0", "1", "2"]
    return faulty.calls


def add_three(path: Path, done: list[str]) -> None:
    for label in "012":
        Ledger(path).add(STEP, ADD, label)
        done.append(label)


def charged(root: Path, faulty: FaultyOs) -> list[str]:
    """Add entries until the third or the fault; those whose `add` returned."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patched, suppress(CrashError):
        patched.setattr(_files, "os", faulty)
        add_three(root / "books", done)
    return done


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_a_crash_at_every_boundary_loses_no_entry_and_locks_no_one_out(
    power: bool, calls: list[str], tmp_path: Path
) -> None:
    assert {"open", "write", "fsync", "replace"} == set(calls)
    torn = ahead = 0
    for at, when in moments(calls):
        root = tmp_path / f"{at}-{when}"
        root.mkdir()
        faulty = FaultyOs(root, at, when)
        done = charged(root, faulty)
        assert faulty.ended, f"no crash {when} call {at}"
        if power:
            faulty.fail_power()
        path = root / "books"
        torn += path.exists() and not path.read_bytes().endswith(b"\n")
        kept = labels(path)
        assert kept in (done, [*done, str(len(done))]), f"crash {when} call {at}, {calls[at]}"
        ahead += kept != done
        filled(path, "next", "last")
        assert labels(path) == [*kept, "next", "last"]
        assert account(Ledger(path).event(), ADD, "rdp").epsilon(1e-5) > 0
    assert ahead > 5
    assert power or torn == 2


def test_a_second_crash_while_the_first_is_repaired(calls: list[str], tmp_path: Path) -> None:
    """The first tears the line of the second entry; the second is at every boundary of the next `add`."""
    tearing = [at for at, name in enumerate(calls) if name == "write"][3]
    for at, when in moments(calls):
        root = tmp_path / f"{at}-{when}"
        root.mkdir()
        assert charged(root, FaultyOs(root, tearing, "during")) == ["0"]
        assert not (root / "books").read_bytes().endswith(b"\n")
        second = FaultyOs(root, at, when)
        done = charged(root, second)
        kept = labels(root / "books")
        assert kept in (["0", *done], ["0", *done, str(len(done))]), f"crash {when} call {at}"
        filled(root / "books", "last")
        assert labels(root / "books") == [*kept, "last"]
        if not second.ended:
            break


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk-full", "input-output"])
def test_a_call_that_fails_names_the_file_and_loses_nothing(number: int, calls: list[str], tmp_path: Path) -> None:
    for at in range(len(calls)):
        root = tmp_path / f"{at}"
        root.mkdir()
        faulty = FaultyOs(root, at, "during", number)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_files, "os", faulty)
            done: list[str] = []
            with pytest.raises(OSError, match=rf"{root / 'books'}\S* could not be written: .*choose another folder"):
                add_three(root / "books", done)
        assert labels(root / "books") in (done, [*done, str(len(done))])
        filled(root / "books", "next")


def test_other_systems_are_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    for act in (Ledger, Ledger.adopt):
        with pytest.raises(ValueError, match=r"need a POSIX system .* keep the ledger in memory with Ledger\(\)"):
            act(tmp_path / "books")
    assert not list(tmp_path.iterdir())
    Ledger().add(STEP, ADD)


@pytest.mark.parametrize(
    ("old", "new"), [(b"1.0", b"9.0"), (b"first", b"worst"), (b"\n", b"\n\n")], ids=["noise", "label", "line"]
)
def test_an_edited_file_is_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    ledger = Ledger(path)
    ledger.add(STEP, ADD, "first")
    ledger.add(STEP, ADD, "second")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(ValueError, match=r"line \d has the wrong checksum.* edited or damaged"):
        Ledger(path)
    with pytest.raises(ValueError, match="edited or damaged"):
        ledger.add(STEP, ADD)


def test_a_line_left_out_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    for label in ("first", "second"):
        Ledger(path).add(STEP, ADD, label)
    head, _, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + second)
    with pytest.raises(ValueError, match="line 2 has the wrong checksum"):
        Ledger(path)


@pytest.mark.parametrize("written", [{"type": "of a later version"}, {"type": "gaussian"}])
def test_a_release_that_cannot_be_read_is_refused(
    written: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right checksum too: left out, it would be spent and not counted."""
    path = tmp_path / "books.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("dpgrad.accounting.ledger.to_dict", lambda event: written)
        Ledger(path).add(STEP, ADD)
    before = path.read_bytes()
    for act in (lambda: Ledger(path), lambda: Ledger(path).add(STEP, ADD)):
        with pytest.raises(LedgerError, match="holds a line that is not a ledger entry"):
            act()
    assert path.read_bytes() == before


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes", "utf-8")
    with pytest.raises(ValueError, match="is not a file of checked lines"):
        Ledger(path)
    path.write_text("", "utf-8")
    with pytest.raises(ValueError, match="is not a ledger of dpgrad"):
        Ledger(path)
    with pytest.raises(ValueError, match="its folder is missing"):
        Ledger(tmp_path / "no" / "books.jsonl").add(STEP, ADD)


def test_rows_and_persons_do_not_add_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.add(Gaussian(40.0), Relation.ZERO_OUT, "one", unit="person")
    with pytest.raises(LedgerError, match="that protect one person, got one that protects one row"):
        ledger.add(Gaussian(40.0), Relation.ZERO_OUT, "two")
    again = Ledger(tmp_path / "ledger")
    assert [entry.unit for entry in again.entries()] == ["person"]
    assert "one person's contribution" in str(again.guarantee(1e-5, "exact"))
