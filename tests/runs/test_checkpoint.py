"""Run folders: what is in them, who may use them, when a key is used again, what is refused."""

import builtins
import dataclasses
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpgrad import Mechanism, Relation
from dpgrad.accounting import account
from dpgrad.accounting.events import Compose, Gaussian, leaves
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import Key
from dpgrad.runs.checkpoint import Run, finished, interruptible
from dpgrad.runs.replay import Identity, data_digest
from dpgrad.runs.writeahead import WriteAhead

PLAN = Mechanism(sampling.FullBatch(), steps=10, noise_multiplier=5.0, batch_size=3)
DATA = torch.arange(12.0).view(4, 3)


def identity_of(**changed: Any) -> Callable[[Key], Identity]:
    rows = changed.pop("rows", DATA)

    def made(key: Key) -> Identity:
        options = {"rule": "hard", "seed": "none"}
        found = Identity(PLAN.to_dict(), data_digest(key, rows), "code 1", "cpu", 1, None, options)
        return dataclasses.replace(found, **changed)

    return made


def opened(folder: Path, identity: Any = None, mechanism: Mechanism = PLAN, **options: Any) -> Run:
    settings: dict[str, Any] = {
        "resume": folder.exists(),
        "accountant": "exact",
        "reserve": 4,
        "save_every": 4,
    } | options
    delta = settings.pop("delta", 1e-5)
    return Run.open(folder, identity or identity_of(mechanism=mechanism.to_dict()), mechanism, delta, **settings)


def taken(run: Run, steps: int) -> None:
    """Take steps; a checkpoint where one is due."""
    if not run.replayed:
        run.save(run.start, {"at": run.start})
    for step in range(run.start, run.start + steps):
        if step == run.due:
            run.save(step, {"at": step})
        run.charge(step)


def crashed(folder: Path, steps: int, **options: Any) -> Run:
    """A run that took steps and whose process ended without a word."""
    run = opened(folder, **options)
    taken(run, steps)
    run._release_lock()
    return run


def spent(folder: Path) -> int:
    return sum(leaves(WriteAhead.read(folder / "ledger.jsonl").event()).values())


def test_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "run"
    with opened(folder, resume=False) as run:
        assert (run.attempt, run.start, run.began, run.last) == (1, 0, 0, 10)
        assert run.state is None
        assert not run.replayed
        taken(run, 3)
        run.save(3, {"weights": torch.ones(2), "names": ["a"], "step": 3})
        private = folder / "private"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert {path.name for path in private.iterdir()} == {"README.txt", "checkpoint.pt"}
        for path in private.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "Whoever holds this can subtract the noise" in (private / "README.txt").read_text("utf-8")
        assert {path.name for path in folder.iterdir()} == {"lock", "ledger.jsonl", "private"}
        for step in range(3, 10):
            if step == run.due:
                run.save(step, {})
            run.charge(step)
        assert run.event() == PLAN.event()
        run.finish(lambda place: (place / "model").write_text("weights", "utf-8") and None)
    assert {path.name for path in folder.iterdir()} == {"lock", "ledger.jsonl", "release"}
    assert (folder / "release" / "model").read_text("utf-8") == "weights"
    assert WriteAhead.read(folder / "ledger.jsonl").event() == PLAN.event()
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"run is finished, see .*release"):
            opened(folder, resume=resume)


def test_the_key_is_in_the_private_folder_alone(tmp_path: Path) -> None:
    with opened(tmp_path, keep_private=True) as run:
        taken(run, 10)
        secret = run.key.secret
        assert secret.hex() not in repr(vars(run))
        run.finish(lambda place: None)
    holding = [
        p
        for p in tmp_path.rglob("*")
        if p.is_file() and any(s in p.read_bytes() for s in (secret, secret.hex().encode()))
    ]
    assert holding == [tmp_path / "private" / "checkpoint.pt"]


def test_a_private_folder_opened_to_others_is_closed_again(tmp_path: Path) -> None:
    crashed(tmp_path, 2)
    (tmp_path / "private").chmod(0o755)
    opened(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700


def test_a_private_folder_that_was_to_be_kept_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "kept", keep_private=True) as run:
        taken(run, 10)
        run.finish(lambda place: None)
    with pytest.raises(ValueError, match="is finished"):
        opened(tmp_path / "kept")
    assert (tmp_path / "kept" / "private" / "checkpoint.pt").exists()


def test_what_a_crash_at_the_end_left_of_the_key_goes_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        taken(run, 10)
        secrets = (tmp_path / "private" / "checkpoint.pt").read_bytes()
        run.finish(lambda place: None)
    private = tmp_path / "private"
    private.mkdir()
    (private / "checkpoint.pt").write_bytes(secrets)
    (private / "diagnostics.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match="is finished"):
        opened(tmp_path)
    assert [path.name for path in private.iterdir()] == ["diagnostics.json"]


def test_what_a_crash_left_of_a_checkpoint_goes_when_the_run_is_opened(tmp_path: Path) -> None:
    crashed(tmp_path, 2)
    (tmp_path / "private" / "checkpoint.pt.partial").write_bytes(b"half a key")
    opened(tmp_path).close()
    assert {path.name for path in (tmp_path / "private").iterdir()} == {"README.txt", "checkpoint.pt"}


def test_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        crashed(tmp_path, 2)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "private" / "checkpoint.pt").stat().st_mode) == 0o600


def test_nothing_changed_is_replayed_with_the_same_key(tmp_path: Path) -> None:
    first = crashed(tmp_path, 3)
    with opened(tmp_path) as run:
        assert run.replayed
        assert (run.key, run.attempt, run.start, run.state, run.reason) == (first.key, 1, 0, {"at": 0}, "")
        taken(run, 10)
        assert run.event() == PLAN.event()
    assert spent(tmp_path) == 10


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rows": DATA + 1}, "data"),
        ({"code": "code 2"}, "code"),
        ({"device": "cuda"}, "device"),
        ({"ranks": 2}, "ranks"),
        ({"microbatch": 16}, "microbatch"),
        ({"options": {"rule": "psac", "seed": "none"}}, "rule"),
        ({"options": {"rule": "hard"}}, "seed"),
    ],
)
def test_anything_that_differs_draws_a_new_key_and_pays_for_both(
    changed: dict[str, Any], name: str, tmp_path: Path
) -> None:
    first = crashed(tmp_path, 3)  # four are reserved
    with opened(tmp_path, identity_of(**changed)) as run:
        assert not run.replayed
        assert run.key != first.key
        assert (run.attempt, run.start, run.began, run.state) == (2, 0, 0, {"at": 0})
        assert run.reason == f"not the same as before: {name}"
        assert run.last == 6  # four of ten are spent, and steps 0 to 5 of the new attempt make ten
        taken(run, 6)
        with pytest.raises(ValueError, match="step 7 would exceed the plan"):
            run.charge(6)
        assert leaves(run.event()) == leaves(PLAN.event())
        assert leaves(run.before) == leaves(PLAN.with_steps(4).event())


def test_a_run_keeps_its_plan(tmp_path: Path) -> None:
    """A guarantee is that of one plan: what a run showed may be why another is asked for."""
    crashed(tmp_path, 3)
    for other, name in ((PLAN.with_noise(10.0), "noise_multiplier"), (PLAN.with_steps(20), "steps")):
        with pytest.raises(ValueError, match=rf"planned with another mechanism, which differs in {name}: .*a ledger"):
            opened(tmp_path, mechanism=other)
    with pytest.raises(ValueError, match="also_released differs from what the run was planned with"):
        opened(tmp_path, also_released=Gaussian(3.0))
    assert spent(tmp_path) == 4


def test_what_is_released_beside_is_the_ledger_s(tmp_path: Path) -> None:
    crashed(tmp_path, 3, also_released=Gaussian(3.0))
    with pytest.raises(ValueError, match="also_released differs from what the run was planned with"):
        opened(tmp_path)
    budget = PLAN.guarantee(1e-5, "exact", also_released=Gaussian(3.0)).epsilon
    with opened(tmp_path, identity_of(ranks=2), also_released=Gaussian(3.0)) as run:
        taken(run, run.last)
        whole = account(Compose((Gaussian(3.0), run.event())), Relation.ADD_REMOVE, "exact").epsilon(1e-5)
        assert run.last == 6
        assert whole == pytest.approx(budget, rel=1e-9)


def test_another_seed_is_another_key(tmp_path: Path) -> None:
    with opened(tmp_path / "seeded", seed=5) as run:
        assert run.key == Key.from_seed(5)
        assert run.reproducible
        taken(run, 1)
    with opened(tmp_path / "seeded", seed=5) as run:
        assert run.replayed
    keys = {Key.from_seed(5)}
    for seed in (6, None, 5):
        with opened(tmp_path / "seeded", seed=seed) as run:
            assert run.reason == "not the same as before: seed"
            assert run.key not in keys  # also where a seed comes back
            assert run.reproducible
            keys.add(run.key)
            run.save(run.start, {})


def test_a_seed_of_a_later_key_makes_the_run_unfit_for_release(tmp_path: Path) -> None:
    """Whoever guesses it subtracts the noise of the steps under that key, whatever the first one was."""
    for seed, reproducible in ((None, False), (5, True), (None, True)):
        with opened(tmp_path / "run", seed=seed) as run:
            assert run.reproducible == reproducible
            taken(run, 1)


def test_the_same_seed_on_other_data_is_another_key(tmp_path: Path) -> None:
    """The noise of one key on two sums would reveal their difference."""
    with opened(tmp_path / "seeded", seed=5) as run:
        taken(run, 1)
    keys = {Key.from_seed(5)}
    for rows in (DATA + 1, DATA):
        with opened(tmp_path / "seeded", identity_of(rows=rows), seed=5) as run:
            assert run.reason == "not the same as before: data"
            assert run.key not in keys
            keys.add(run.key)
            run.save(run.start, {})


def test_the_new_attempt_is_replayed_in_its_turn(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        taken(run, 2)
        run.save(2, {"at": 2})
    other = identity_of(ranks=2)
    second = opened(tmp_path, other)
    # what was reserved is given back, and what could have been taken before the next checkpoint is charged again
    assert (second.attempt, second.began, second.start, second.last) == (2, 2, 2, 6)
    taken(second, 3)
    second.save(5, {"at": 5})
    second._release_lock()
    with opened(tmp_path, other) as run:
        assert run.replayed
        assert (run.key, run.attempt, run.began, run.start) == (second.key, 2, 2, 5)
        for step in range(5, run.last):
            run.charge(step)
    assert spent(tmp_path) == 10


def test_lines_cut_from_the_ledger_are_charged_where_a_new_key_begins(tmp_path: Path) -> None:
    """Five steps from the checkpoint at 3; the line that reserved the last of them is gone, without a trace."""
    run = opened(tmp_path, save_every=6)
    taken(run, 3)
    run.save(3, {"at": 3})
    for step in range(3, 8):
        run.charge(step)
    run._release_lock()
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    assert spent(tmp_path) == 4
    with opened(tmp_path, identity_of(ranks=2), save_every=1) as run:
        assert sum(leaves(run.before).values()) == 9  # at 9 the next checkpoint was due
        assert run.last == 4


def test_a_checkpoint_that_is_due_comes_before_the_step(tmp_path: Path) -> None:
    with opened(tmp_path, save_every=2) as run:
        run.save(0, {})
        run.charge(0)
        run.charge(1)
        with pytest.raises(ValueError, match=r"call save\(2, state\) before this step: .*save_every = 2 steps"):
            run.charge(2)
    with opened(tmp_path, save_every=9) as run:  # what was said when it was stored
        assert (run.start, run.due) == (0, 2)


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_ledger_without_its_first_attempt_is_refused(left: int, checkpoint: bool, tmp_path: Path) -> None:
    crashed(tmp_path, 3)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:left]))
    if not checkpoint:
        (tmp_path / "private" / "checkpoint.pt").unlink()
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"ends before its first attempt: .*count the whole plan as spent"):
            opened(tmp_path, resume=resume)


def test_a_ledger_is_begun_only_where_there_is_none(tmp_path: Path) -> None:
    """Two lines say that nothing is spent; so would the ledger of a run of which the rest was cut."""
    crashed(tmp_path, 3)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:2]))
    (tmp_path / "private" / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match="has no checkpoint: without it the run cannot go on"):
        opened(tmp_path)


def test_a_run_that_was_opened_and_closed_has_not_begun(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert not (tmp_path / "ledger.jsonl").exists()
    with opened(tmp_path, mechanism=PLAN.with_steps(5), resume=False) as run:
        assert run.last == 5


def test_what_moved_during_a_run_is_compared_as_it_was_at_the_checkpoint(tmp_path: Path) -> None:
    begins = {"rule": "hard", "seed": "none"}
    with opened(tmp_path) as run:
        run.save(0, {}, begins)
        run.charge(0)
        run.save(1, {}, begins | {"loss": "annealed"})
        run.charge(1)
    with opened(tmp_path) as run:
        assert run.reason == "not the same as before: loss"
        run.save(1, {}, begins)
        run.charge(1)
    with opened(tmp_path) as run:
        assert run.replayed


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    crashed(tmp_path, 1)
    with opened(tmp_path, identity_of(rows=TensorRows())) as run:
        assert run.reason == "not the same as before: data (cannot be compared)"


class TensorRows(torch.utils.data.TensorDataset):
    def __init__(self) -> None:
        super().__init__(DATA)


def test_a_crash_before_the_first_checkpoint_of_a_new_attempt(tmp_path: Path) -> None:
    crashed(tmp_path, 3)
    second = opened(tmp_path, identity_of(ranks=2))
    second._ledger.commit()
    second._release_lock()
    with opened(tmp_path, identity_of(ranks=2)) as run:
        assert run.attempt == 3
        assert run.reason == "attempt 2 was begun and left before its first checkpoint"
        assert run.last == 6


def test_a_resume_that_comes_to_nothing_before_its_first_checkpoint_costs_nothing(tmp_path: Path) -> None:
    """Whatever is refused after the folder was opened, a model or a setting, leaves the ledger as it was."""
    crashed(tmp_path, 3)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    for _ in range(3):
        with opened(tmp_path, identity_of(ranks=2)) as run:
            assert (run.attempt, run.last) == (2, 6)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    with opened(tmp_path) as run:
        assert run.replayed


def test_there_is_nothing_to_resume_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run in .*run, which is missing: leave out resume to begin one"):
        opened(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()  # as a process leaves it that ended at once
    opened(tmp_path / "run", resume=True).close()


@pytest.mark.parametrize("name", ["private", "ledger.jsonl", "lock", "private/checkpoint.pt", "release"])
def test_links_in_place_of_the_run_s_own_files_are_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = crashed(folder, 10)
    (folder / "release").mkdir()
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    there = files(tmp_path)
    for act in (lambda: opened(folder), lambda: finished(folder)):
        with pytest.raises(ValueError, match=f"{folder / name} is a symbolic link: .*make the whole run folder a link"):
            act()
    run._open = True
    with pytest.raises(ValueError, match=f"{folder / name} is a symbolic link"):
        run.finish(lambda place: None)
    assert files(tmp_path) == there
    (tmp_path / "link").symlink_to(folder)
    (folder / name).unlink()
    (tmp_path / "elsewhere").rename(folder / name)
    opened(tmp_path / "link").close()


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_link_in_the_private_folder_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("words", "utf-8")
    with opened(tmp_path / "run") as run:
        taken(run, 10)
        (tmp_path / "run" / "private" / "linked").symlink_to(tmp_path / "mine")
        run.finish(lambda place: None)
    assert not (tmp_path / "run" / "private").exists()
    assert (tmp_path / "mine" / "notes").read_text("utf-8") == "words"


def test_an_end_gives_back_what_was_reserved_and_not_taken(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        taken(run, 1)
        run.finish(lambda place: None)
    assert spent(tmp_path) == 1


def test_a_run_that_saved_nothing_does_not_end(tmp_path: Path) -> None:
    with opened(tmp_path) as run, pytest.raises(ValueError, match=r"save\(0, state\) before the run ends"):
        run.finish(lambda place: None)
    assert not (tmp_path / "release").exists()


def test_other_systems_are_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ValueError, match=r"need a POSIX system .*leave out the folder"):
        opened(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_release_that_cannot_be_written_names_its_place(tmp_path: Path) -> None:
    def full(place: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as run:
        taken(run, 10)
        with pytest.raises(OSError, match=r"release.partial could not be written: the disk is full; what was written"):
            run.finish(full)
    with opened(tmp_path) as run:
        assert run.replayed


def test_an_orderly_end_gives_back_its_own_reserve_and_no_other(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        taken(run, 1)
    assert spent(tmp_path) == 1
    crashed(tmp_path, 4)
    with opened(tmp_path) as run:
        taken(run, 2)
        assert sum(leaves(run.event()).values()) == spent(tmp_path)
    assert spent(tmp_path) == 5


def test_a_step_is_charged_in_turn_once_and_only_after_a_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        with pytest.raises(ValueError, match=r"save\(0, state\) before this step"):
            run.charge(0)
        run.save(0, {})
        run.charge(0)
        for step in (0, 2):
            with pytest.raises(ValueError, match="step must be 1, the next of this run"):
                run.charge(step)
        with pytest.raises(ValueError, match="step must be 1, the steps taken so far, got 5"):
            run.save(5, {})
    with pytest.raises(ValueError, match="is closed: open it again"):
        run.charge(1)
    with opened(tmp_path, identity_of(ranks=2)) as run, pytest.raises(ValueError, match="before this step"):
        run.charge(0)


def test_what_cannot_be_loaded_again_is_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        with pytest.raises(ValueError, match="state must hold tensors and plain values only"):
            run.save(0, {"model": torch.nn.Linear(1, 1)})
        with pytest.raises(ValueError, match="state must be a dict, got 3"):
            run.save(0, 3)  # type: ignore[arg-type]


def test_two_processes_are_kept_apart_and_a_dead_one_does_not_block(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom dpgrad import _files\n"
        "_files.lock(Path(sys.argv[1]) / 'lock')\nprint('held', flush=True)\ntime.sleep(3600)"
    )
    crashed(tmp_path, 2)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="is in use by another process"):
            opened(tmp_path)
        other.kill()
    with opened(tmp_path) as run, pytest.raises(ValueError, match="is in use by another process"):
        opened(tmp_path)
    assert run.replayed


def test_a_deleted_lock_file_lets_no_second_process_in(tmp_path: Path) -> None:
    crashed(tmp_path, 2)
    with opened(tmp_path):
        (tmp_path / "lock").unlink()
        with pytest.raises(ValueError, match="is in use by another process"):
            opened(tmp_path)
    opened(tmp_path).close()


def test_a_folder_is_begun_once_and_resumed_when_asked(tmp_path: Path) -> None:
    crashed(tmp_path, 2)
    with pytest.raises(ValueError, match="holds a run that is not finished: resume it"):
        opened(tmp_path, resume=False)
    with pytest.raises(ValueError, match="the run was planned with delta 1e-05, got 1e-06"):
        opened(tmp_path, delta=1e-6)
    with pytest.raises(ValueError, match="the run was planned with accountant exact, got pld"):
        opened(tmp_path, accountant="pld")
    other = dataclasses.replace(PLAN, relation=Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="the run was planned with relation add-remove, got replace-one"):
        opened(tmp_path, mechanism=other)
    with pytest.raises(ValueError, match="identity_of must return an Identity with this mechanism"):
        opened(tmp_path / "new", identity_of(), PLAN.with_steps(5))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("words", "utf-8")
    with pytest.raises(ValueError, match="holds files and no ledger of a run"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="is a file: choose a folder"):
        opened(tmp_path / "thesis.tex")
    crashed(tmp_path / "run", 2)
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(ValueError, match="holds files and no ledger of a run"):
        opened(tmp_path / "run")


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    return {
        "torn": content[:middle],
        "edited": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"x",
        "empty": b"",
        "foreign": b"PK" + content[2:],
    }


@pytest.mark.parametrize("how", damaged(b"1234"))
def test_a_damaged_checkpoint_is_refused(how: str, tmp_path: Path) -> None:
    crashed(tmp_path, 2)
    path = tmp_path / "private" / "checkpoint.pt"
    path.write_bytes(damaged(path.read_bytes())[how])
    with pytest.raises(ValueError, match=r"is incomplete or was edited|is not a checkpoint of dpgrad"):
        opened(tmp_path)
    assert spent(tmp_path) == 4


def test_files_of_another_run_are_refused(tmp_path: Path) -> None:
    crashed(tmp_path / "one", 2)
    crashed(tmp_path / "two", 2)
    checkpoint = Path("private", "checkpoint.pt")
    own = (tmp_path / "one" / checkpoint).read_bytes()
    (tmp_path / "one" / checkpoint).write_bytes((tmp_path / "two" / checkpoint).read_bytes())
    with pytest.raises(ValueError, match="belongs to another run than the ledger in its folder"):
        opened(tmp_path / "one")
    (tmp_path / "one" / checkpoint).write_bytes(own)
    opened(tmp_path / "one").close()


def test_an_older_ledger_or_checkpoint_put_back_is_refused(tmp_path: Path) -> None:
    ledger, checkpoint = tmp_path / "ledger.jsonl", tmp_path / "private" / "checkpoint.pt"
    run = opened(tmp_path)
    taken(run, 0)
    old = ledger.read_bytes()
    taken(run, 5)
    run.save(5, {"at": 5})
    run._release_lock()
    new = ledger.read_bytes()
    ledger.write_bytes(old)
    with pytest.raises(
        ValueError, match=r"is at step 5 and the ledger has steps 0 to 0 .* lines of the ledger are missing"
    ):
        opened(tmp_path)
    ledger.write_bytes(new)
    first = checkpoint.read_bytes()
    crashed(tmp_path, 1, identity=identity_of(ranks=2))
    second = checkpoint.read_bytes()
    checkpoint.write_bytes(first)
    with pytest.raises(ValueError, match="is of attempt 1, but attempt 2 has spent steps"):
        opened(tmp_path)
    checkpoint.write_bytes(second)
    ledger.write_bytes(new)
    with pytest.raises(ValueError, match="is of attempt 2 and the ledger ends with 1"):
        opened(tmp_path)


def test_a_run_without_its_private_folder_cannot_go_on(tmp_path: Path) -> None:
    crashed(tmp_path, 2)
    (tmp_path / "private" / "checkpoint.pt").unlink()
    with pytest.raises(ValueError, match="has no checkpoint: without it the run cannot go on"):
        opened(tmp_path)


def test_a_release_appears_as_a_whole_in_place_of_the_one_before(tmp_path: Path) -> None:
    """A process that ended between the release and the line that says so releases again."""
    run = opened(tmp_path)
    taken(run, 10)
    run.save(10, {})
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "old").write_text("old", "utf-8")

    def breaks(place: Path) -> None:
        (place / "half").write_text("half", "utf-8")
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        run.finish(breaks)
    assert {path.name for path in (tmp_path / "release").iterdir()} == {"old"}
    run.finish(lambda place: (place / "new").write_text("new", "utf-8") and None)
    assert {path.name for path in (tmp_path / "release").iterdir()} == {"new"}
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "ledger.jsonl", "release"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_is_a_flag_and_a_second_one_acts_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interruptible() as interruption:
        assert not interruption
        signal.raise_signal(number)
        assert interruption
        assert interruption.signal == number.name
        with pytest.raises(KeyboardInterrupt, match=f"second signal {number.name}"):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_signals_in_another_thread_are_left_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with interruptible() as interruption:
            seen.append(bool(interruption))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_charge_within_a_block_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a thousand opens a file, writes or waits for the disk: the block was reserved by the first."""
    long = PLAN.with_steps(100_000)
    with opened(tmp_path, mechanism=long, reserve=50_000, save_every=50_000) as run:
        run.save(0, {})
        run.charge(0)
        calls: list[str] = []
        for module, name in ((os, "open"), (os, "write"), (os, "fsync"), (os, "replace"), (builtins, "open")):
            monkeypatch.setattr(module, name, lambda *args, name=name, **options: calls.append(name))
        for step in range(1, 1001):
            run.charge(step)
        monkeypatch.undo()
        assert not calls
