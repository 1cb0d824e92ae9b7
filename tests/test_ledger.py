"""The ledger across runs: everything adds up, in memory, in a file, from several threads and processes."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from dpgrad.accounting import account
from dpgrad.events import NOTHING, Compose, Gaussian, Poisson, Relation, Repeat, leaves
from dpgrad.ledger import Ledger

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
        "import sys; from dpgrad.ledger import Ledger; from dpgrad.events import Gaussian, Relation\n"
        "ledger = Ledger(sys.argv[1])\n"
        "for _ in range(15): ledger.add(Gaussian(1.0), Relation.ADD_REMOVE)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert leaves(Ledger(path).event())[Gaussian(1.0)] == 30


def test_an_incomplete_last_line_is_dropped_since_its_add_had_not_returned(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    ledger = Ledger(path)
    ledger.add(STEP, ADD, "whole")
    ledger.add(STEP, ADD, "torn")
    path.write_bytes(path.read_bytes()[:-9])
    assert [entry.label for entry in Ledger(path).entries()] == ["whole"]
    Ledger(path).add(STEP, ADD, "next")
    assert [entry.label for entry in Ledger(path).entries()] == ["whole", "next"]


@pytest.mark.parametrize(
    ("old", "new"), [(b"1.0", b"9.0"), (b"first", b"worst"), (b"\n", b"\n\n")], ids=["noise", "label", "line"]
)
def test_an_edited_file_is_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    ledger = Ledger(path)
    ledger.add(STEP, ADD, "first")
    ledger.add(STEP, ADD, "second")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(ValueError, match=r"line \d does not have the checksum .* edited or damaged"):
        Ledger(path)
    with pytest.raises(ValueError, match="edited or damaged"):
        ledger.add(STEP, ADD)


def test_a_line_left_out_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    for label in ("first", "second"):
        Ledger(path).add(STEP, ADD, label)
    head, _, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + second)
    with pytest.raises(ValueError, match="line 2 does not have the checksum"):
        Ledger(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    with pytest.raises(ValueError, match="is not a file of checked lines"):
        Ledger(path)
    path.write_text("")
    with pytest.raises(ValueError, match="is not a ledger of dpgrad"):
        Ledger(path)
    with pytest.raises(ValueError, match="its folder is missing"):
        Ledger(tmp_path / "no" / "books.jsonl").add(STEP, ADD)
