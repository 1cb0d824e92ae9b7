"""Whole runs of several ranks: one folder and one ledger, stops that all agree on, deaths, and resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ranked
import ranked_jobs as jobs
from dpgrad import Ledger
from dpgrad.accounting.events import leaves
from dpgrad.runs.writeahead import WriteAhead

COUNTS = (2, 3)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    wanted = [("fits", 2), ("fits", 3), ("stopped_by_a_callback", 2), ("stopped_by_a_signal", 3), ("full_disk", 2)]
    wanted += [("fits_parts", 3), ("first_killed", 2), ("last_killed", 3), ("other_folders", 2)]
    wanted += [("resumed_first_killed", 2), ("resumed_last_killed", 3), ("resumed_last_killed", 2)]
    wanted += [("scripts_of_the_page", 2)]
    ranked.run_all(found, wanted)
    return found


def taken(folder: Path) -> int:
    """The steps that the ledger of a run has as spent."""
    return sum(leaves(WriteAhead.read(folder / "run" / "ledger.jsonl").event()).values())


@pytest.mark.parametrize("ranks", COUNTS)
def test_a_run_has_one_folder_one_ledger_and_one_model(ranks: int, folder: Path) -> None:
    every: list[Any] = ranked.results(folder, "fits", ranks)
    for each in every:
        assert torch.equal(each["weights"], every[0]["weights"])
        assert (each["whole"], each["stopped"], each["curves"]) == (True, "plan", every[0]["curves"])
    own = folder / f"fits-{ranks}"
    assert len(Ledger(own / "spent.jsonl").entries()) == 1
    released = torch.load(own / "run" / "release" / "weights.pt")
    assert torch.equal(torch.cat([value.flatten() for value in released.values()]), every[0]["weights"])
    assert not (own / "run" / "private").exists()
    assert taken(own) == jobs.FIT["steps"]


def test_both_numbers_of_ranks_train_the_same_model(folder: Path) -> None:
    two, three = (ranked.results(folder, "fits", ranks)[0]["weights"] for ranks in COUNTS)
    assert float((two - three).abs().max()) < 12 * 2.0**-22  # 12 steps, values below 2


def test_ranks_that_hold_parts_train_the_same_model(folder: Path) -> None:
    every: list[Any] = ranked.results(folder, "fits_parts", 3)
    wanted = ranked.results(folder, "fits", 3)[0]["weights"]
    for each in every:
        assert torch.equal(each["weights"], every[0]["weights"])
        assert each["whole"]
    assert float((every[0]["weights"] - wanted).abs().max()) < 12 * 2.0**-22  # 12 steps, values below 2


@pytest.mark.parametrize(("name", "ranks"), [("stopped_by_a_callback", 2), ("stopped_by_a_signal", 3)])
def test_all_ranks_stop_after_the_same_step(name: str, ranks: int, folder: Path) -> None:
    every: list[Any] = ranked.results(folder, name, ranks)
    for each in every:
        assert each["stopped"] == "interrupted"
        assert each["event"] == every[0]["event"]
        assert torch.equal(each["weights"], every[0]["weights"])
    assert taken(folder / f"{name}-{ranks}") == 4
    assert every[0]["epsilon"] == every[0]["planned"]  # what was seen may be the reason


@pytest.mark.parametrize(("name", "ranks", "dead"), [("first_killed", 2, 0), ("last_killed", 3, 2)])
def test_a_killed_rank_ends_all_with_a_clear_error_and_a_true_ledger(
    name: str, ranks: int, dead: int, folder: Path
) -> None:
    """The others have a result only if they ended within the time that `ranked` gives them."""
    every: list[Any] = ranked.results(folder, name, ranks)
    for rank, words in enumerate(every):
        if rank == dead:
            assert words is None
        else:
            assert words.startswith("RanksError: another rank is gone: "), words
    spent = taken(folder / f"{name}-{ranks}")
    assert 8 <= spent <= jobs.FIT["steps"]  # the eighth step was charged, and perhaps the rest of its block


@pytest.mark.parametrize(("name", "ranks"), [("resumed_first_killed", 2), ("resumed_last_killed", 3)])
def test_as_many_ranks_replay_to_the_bit_and_pay_once(name: str, ranks: int, folder: Path) -> None:
    every: list[Any] = ranked.results(folder, name, ranks)
    for each in every:
        assert each["new_key"] == []
        assert each["whole"]
        assert torch.equal(each["weights"], ranked.results(folder, "fits", ranks)[0]["weights"])


def test_another_number_of_ranks_draws_a_new_key_and_ends_earlier(folder: Path) -> None:
    every: list[Any] = ranked.results(folder, "resumed_last_killed", 2)
    for rank, each in enumerate(every):
        assert torch.equal(each["weights"], every[0]["weights"])
        assert len(each["new_key"]) == (rank == 0)  # told once
        assert each["stopped"] == "budget"
        assert each["epsilon"] <= each["planned"]
    assert "ranks" in every[0]["new_key"][0]
    ledger = WriteAhead.read(folder / "resumed_last_killed-2" / "run" / "ledger.jsonl")
    assert [attempt.began for attempt in ledger.attempts] == [0, 5]  # from the checkpoint
    assert ledger.attempts[0].until >= 8
    assert ledger.attempts[1].last < jobs.FIT["steps"]


def test_a_disk_that_is_full_on_rank_0_ends_all_ranks(folder: Path) -> None:
    first, other = ranked.results(folder, "full_disk", 2)
    assert first.startswith("OSError: [Errno 28]")
    assert other.startswith("RanksError: rank 0 failed")
    assert taken(folder / "full_disk-2") >= 5


def test_other_data_are_refused_before_anything_is_spent(folder: Path) -> None:
    for words in ranked.results(folder, "other_folders", 2):
        assert words.startswith("RanksError: ranks 0 and 1 do not have the same data")
    assert not (folder / "other_folders-2" / "run" / "ledger.jsonl").exists()


def test_the_scripts_of_the_page_run(folder: Path) -> None:
    for found in ranked.results(folder, "scripts_of_the_page", 2):
        assert found == ["4 scripts", "ledger.jsonl", "lock", "release"]
