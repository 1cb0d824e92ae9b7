"""A run that ends at any moment: the ledger covers what was computed, and what follows is the same run or is paid for.

A fault is put at every call of the system that changes a file: before it, in the middle of a write, after it. Three
things may happen there: the process ends; the power fails, and what was not yet on the disk is gone; or the call fails
with an error, as on a full disk. The run is then resumed. Most of these runs are a walk in place of training, which
writes the same files; training itself is killed for real, at random moments, and at some of the boundaries.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import soak
from dpgrad import Mechanism, _files
from dpgrad.accounting import events
from dpgrad.accounting.events import leaves
from dpgrad.mechanism import sampling
from dpgrad.mechanism.keys import Key
from dpgrad.randomness import noise
from dpgrad.runs import checkpoint
from dpgrad.runs.checkpoint import Run
from dpgrad.runs.replay import Identity, data_digest
from dpgrad.runs.values import Reader, Writer
from faulty import CrashError, FaultyOs, moments

HERE = Path(__file__).resolve().parents[1]
PLAN = Mechanism(sampling.FullBatch(), steps=4, noise_multiplier=3.0, batch_size=3)


def walk(
    folder: Path, mechanism: Mechanism, option: str = "", note: Any = lambda attempt, step: None
) -> dict[str, Any]:
    """`soak.train` with a walk in place of training: each step adds the sum of the data and noise.

    Half of the state lies in a file of values, as the shards of a model do.
    """
    data, weights = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(2)

    def identity_of(key: Key) -> Identity:
        return Identity(mechanism.to_dict(), data_digest(key, data), "code", "cpu", 1, None, {"option": option})

    def save(step: int) -> None:
        writer = Writer(run.private)
        writer.write(weights[1:].numpy().tobytes())
        run.save(step, {"weights": weights[:1], "digest": writer.finish(), "name": writer.name}, values=writer.name)

    with Run.open(
        folder, identity_of, mechanism, soak.DELTA, resume=folder.exists(), seed=1, accountant="exact", reserve=2,
        save_every=2,
    ) as run:  # fmt: skip
        if run.state is not None:
            reader = Reader(run.private / run.state["name"], run.state["digest"])
            half = torch.frombuffer(bytearray(reader.read(0, 8)), dtype=torch.float32)
            reader.close()
            weights = torch.cat([run.state["weights"], half])
        if not run.replayed:
            save(run.start)
        for step in range(run.start, run.last):
            run.charge(step)
            note(run.attempt, step)
            weights = weights / 3 + data.sum() + noise.gaussian(weights, 3.0, run.key, step, "weights")
            if step % 2:
                save(step + 1)
        found = {
            "weights": weights.tolist(),
            "event": events.to_json(run.event()),
            "last": run.last,
            "attempt": run.attempt,
            "replayed": run.replayed,
            "reason": run.reason,
        }
        run.finish(lambda place: (place / "summary.json").write_text(json.dumps(found), "utf-8") and None)
    return found


Begun = list[tuple[int, int]]


def attempt(root: Path, faulty: FaultyOs | None = None, run: Any = walk, **options: Any) -> Begun:
    """Run in ``root``/run until the end or the fault; the steps that were begun."""
    begun: Begun = []
    with pytest.MonkeyPatch.context() as patched, suppress(CrashError):
        patched.setattr(_files, "os", faulty or FaultyOs(root))
        run(root / "run", PLAN, note=lambda *step: begun.append(step), **options)
    return begun


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = walk(tmp_path_factory.mktemp("whole") / "run", PLAN)
    assert events.from_json(found["event"]) == PLAN.event()
    assert (found["attempt"], found["last"], found["replayed"]) == (1, 4, False)
    return found


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The calls of an undisturbed run, in order."""
    root = tmp_path_factory.mktemp("calls")
    faulty = FaultyOs(root)
    attempt(root, faulty)
    assert set(faulty.calls) == {"open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "chmod"}
    return faulty.calls


def finished(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "release" / "summary.json").read_text("utf-8"))
    assert not (folder / "private").exists()
    assert not list(folder.glob("*.partial"))
    return found


def resume_the_same(root: Path, begun: Begun, undisturbed: dict[str, Any], run: Any = walk) -> None:
    """Resumed with nothing changed: the weights of the undisturbed run, and the plan in the ledger."""
    folder = root / "run"
    soak.check_ledger(folder, begun, PLAN)
    if ended(folder):
        with pytest.raises(ValueError, match="is finished"):
            attempt(root, run=run)
    else:
        begun = begun + attempt(root, run=run)
    found = finished(folder)
    assert found["weights"] == undisturbed["weights"]
    assert found["attempt"] == 1
    assert soak.check_ledger(folder, begun, PLAN) == PLAN.event() == events.from_json(found["event"])


def ended(folder: Path) -> bool:
    path = folder / "ledger.jsonl"
    return path.exists() and path.read_bytes().endswith(b' {"finished": true, "kept": false}\n')


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
def test_a_crash_at_every_boundary_is_replayed(power: bool, calls: list[str], undisturbed: Any, tmp_path: Path) -> None:
    for at, when in moments(calls):
        root = tmp_path / f"{at}-{when}"
        root.mkdir()
        faulty = FaultyOs(root, at, when)
        begun = attempt(root, faulty)
        assert faulty.ended, f"no crash {when} call {at}"
        if power:
            faulty.fail_power()
        try:
            resume_the_same(root, begun, undisturbed)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"crash {when} call {at}, {calls[at]}") from error


def test_a_crash_at_every_boundary_is_paid_for_where_the_run_differs(calls: list[str], tmp_path: Path) -> None:
    """Another option, so a new key: everything that was reserved stays spent, and the run ends within the budget."""
    earlier = 0
    for at, when in moments(calls):
        root = tmp_path / f"{at}-{when}"
        root.mkdir()
        begun = attempt(root, FaultyOs(root, at, when))
        if ended(root / "run"):
            continue
        before = soak.check_ledger(root / "run", begun, PLAN)
        begun += attempt(root, option="another")
        found = finished(root / "run")
        spent = soak.check_ledger(root / "run", begun, PLAN)
        assert leaves(spent) == leaves(events.from_json(found["event"]))
        if found["attempt"] == 1:  # nothing had been saved or spent
            assert before == events.NOTHING
            continue
        assert found["reason"] == "not the same as before: option"
        new = [step for number, step in begun if number == found["attempt"]]
        # at most as far as the next checkpoint was due, since lines that were cut from the ledger leave no trace
        assert 0 <= sum(leaves(spent).values()) - sum(leaves(before).values()) - len(new) <= 2
        earlier += found["last"] < PLAN.steps
    assert earlier > 10


def test_training_that_crashes_is_replayed(tmp_path: Path) -> None:
    """At a boundary within each write of a checkpoint and of the ledger, after the first checkpoint."""
    plan, calls = soak.plan(4), FaultyOs(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_files, "os", calls)
        whole = soak.train(tmp_path / "whole", plan)
    assert events.from_json(whole["event"]) == events.from_json(whole["ledger"]) == plan.event()
    later = [at for at, name in enumerate(calls.calls) if name == "write"][4:]
    assert len(later) >= 5
    for at in later:
        root = tmp_path / f"{at}"
        root.mkdir()
        begun: Begun = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_files, "os", FaultyOs(root, at, "during"))
            with pytest.raises(CrashError):
                soak.train(root / "run", plan, note=lambda *step: begun.append(step))  # noqa: B023
        soak.check_ledger(root / "run", begun, plan)
        found = soak.train(root / "run", plan)
        assert found["weights"] == whole["weights"]
        assert events.from_json(found["event"]) == events.from_json(found["ledger"]) == plan.event()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["disk-full", "input-output"])
def test_a_call_that_fails_is_said_and_nothing_is_lost(
    number: int, calls: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    said = {errno.ENOSPC: "the disk is full", errno.EIO: "Input/output error"}[number]
    said = f"(written: {said}; what was written before is kept|removed: {said}; remove it yourself)"
    for at in range(len(calls)):
        root = tmp_path / f"{at}"
        root.mkdir()
        with pytest.raises(OSError, match=rf"{root / 'run'}\S* could not be {said}"):
            attempt(root, FaultyOs(root, at, "during", number))
        resume_the_same(root, [], undisturbed)


def test_a_crash_before_the_first_checkpoint_lets_the_folder_be_begun_again(calls: list[str], tmp_path: Path) -> None:
    """With or without resume, also with another plan: no step was reserved."""
    other = PLAN.with_steps(3)
    unbegun = 0
    for at, when in moments(calls):
        root = tmp_path / f"{at}-{when}"
        root.mkdir()
        folder = root / "run"
        begun = attempt(root, FaultyOs(root, at, when))
        if (folder / "ledger.jsonl").exists():
            assert (folder / "private" / "checkpoint.pt").exists() or ended(folder)
            continue
        assert not begun
        unbegun += folder.exists()
        with Run.open(folder, lambda key: identity(other), other, 1e-5, resume=bool(at % 2 and folder.exists())) as run:
            assert (run.attempt, run.start, run.last, run.state) == (1, 0, 3, None)
        with Run.open(folder, lambda key: identity(other), other, 1e-5, resume=bool(at % 3)) as run:
            run.save(0, {})
            run.charge(0)
    assert unbegun > 20


def identity(mechanism: Mechanism) -> Identity:
    return Identity(mechanism.to_dict(), "data", "code", "cpu", 1, None, {})


def test_a_kill_within_the_end_leaves_no_key(calls: list[str], undisturbed: Any, tmp_path: Path) -> None:
    """Whoever asks next completes it, through a second kill and a power failure."""
    completed = 0
    for at, when in moments(calls):
        root = tmp_path / f"{at}-{when}"
        root.mkdir()
        attempt(root, FaultyOs(root, at, when))
        folder = root / "run"
        if not ended(folder):
            assert not checkpoint.finished(folder)
            continue
        shutil.copytree(root, tmp_path / "copy")
        for second in count():
            again = FaultyOs(root, second, "after")
            with pytest.MonkeyPatch.context() as patched, suppress(CrashError):
                patched.setattr(_files, "os", again)
                assert checkpoint.finished(folder)
            if not again.ended:
                again.fail_power()  # after it returned
            assert (folder / "release" / "summary.json").exists()
            if not again.ended:
                break
            again.fail_power()
            assert checkpoint.finished(folder)
            assert not (folder / "private").exists()
            shutil.rmtree(root)
            shutil.copytree(tmp_path / "copy", root)
        shutil.rmtree(tmp_path / "copy")
        assert not (folder / "private").exists()
        assert json.loads((folder / "release" / "summary.json").read_text("utf-8"))["weights"] == undisturbed["weights"]
        completed += 1
    assert completed > 5


def test_what_was_put_into_the_private_folder_after_the_end_stays_and_the_key_goes(tmp_path: Path) -> None:
    walk(tmp_path / "run", PLAN)
    private = tmp_path / "run" / "private"
    private.mkdir()
    for name in ("checkpoint.pt", "README.txt", "checkpoint.pt.partial", "diagnostics.json"):
        (private / name).write_text(name, "utf-8")
    faulty = FaultyOs(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_files, "os", faulty)
        assert checkpoint.finished(tmp_path / "run")
    faulty.fail_power()
    assert [path.name for path in private.iterdir()] == ["diagnostics.json"]
    (private / "checkpoint.pt").write_text("key", "utf-8")
    said = []
    for at in range(9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_files, "os", FaultyOs(tmp_path, at, "before", errno.EACCES))
            try:
                assert checkpoint.finished(tmp_path / "run")
                break
            except OSError as error:
                said.append(str(error))
    assert any(f"{private / 'checkpoint.pt'} could not be removed: permission is denied" in line for line in said)
    assert all(str(tmp_path / "run") in line for line in said)
    assert not (private / "checkpoint.pt").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for number, said in ((errno.EROFS, "the file system is read-only"), (errno.EACCES, "permission is denied")):
        with pytest.raises(OSError, match=rf"run could not be written: {said}.*choose another folder"):
            attempt(tmp_path, FaultyOs(tmp_path, 0, "before", number))


def test_a_second_crash_while_resuming(calls: list[str], undisturbed: Any, tmp_path: Path) -> None:
    """The first crash tears a line of the ledger; the second is at every boundary of the process that finds it."""

    def torn(root: Path, write: int) -> tuple[Begun, bool]:
        root.mkdir()
        begun, ledger = attempt(root, FaultyOs(root, write, "during")), root / "run" / "ledger.jsonl"
        held = ledger.read_bytes() if ledger.exists() else b""
        return begun, b"\n" in held and not held.endswith(b"\n")

    writes = (at for at, name in enumerate(calls) if name == "write")
    tearing = next(at for at in writes if torn(tmp_path / f"write {at}", at)[1])
    for at in count():
        root = tmp_path / f"{at}"
        begun, _ = torn(root, tearing)
        second = FaultyOs(root, at, "during")
        begun += attempt(root, second)
        resume_the_same(root, begun, undisturbed)
        if not second.ended:
            break
    assert at > 30


SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("soak", sys.argv[1])
soak = importlib.util.module_from_spec(spec)
spec.loader.exec_module(soak)
def note(attempt, step):
    print(step, flush=True)
    if step == 3:
        sys.stdin.readline()  # until the signal was sent
for folder in sys.argv[2:]:
    print(json.dumps(soak.train(Path(folder), soak.plan(30), note=note)), flush=True)
"""


def test_a_signal_stops_between_steps_and_nothing_is_lost(tmp_path: Path) -> None:
    plan = soak.plan(30)
    whole = soak.train(tmp_path / "whole", plan)
    asked = {tmp_path / "term": signal.SIGTERM, tmp_path / "interrupt": signal.SIGINT}
    said = {}
    command = [sys.executable, "-c", SCRIPT, str(HERE / "soak.py"), *map(str, asked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for folder, number in asked.items():
            for line in process.stdout:
                if line.strip() == "3":
                    process.send_signal(number)
                    process.stdin.write("\n")
                    process.stdin.flush()
                if line.startswith("{"):
                    said[folder] = json.loads(line)
                    break
    assert process.returncode == 0
    for folder, number in asked.items():
        assert said[folder]["stopped"] == number.name
        taken = sum(leaves(events.from_json(said[folder]["event"])).values())
        assert taken == 4  # the step under way is finished
        ledger = soak.check_ledger(folder, [(1, step) for step in range(taken)], plan)
        assert sum(leaves(ledger).values()) == taken  # what was reserved and not taken is given back
        resumed = soak.train(folder, plan)
        assert resumed["reason"] == ""
        assert (resumed["weights"], resumed["event"]) == (whole["weights"], whole["event"])


def test_two_kills(tmp_path: Path) -> None:
    """Real ones, at random moments: `make soak` does a hundred."""
    begin = time.perf_counter()
    command = [sys.executable, str(HERE / "soak.py"), "--kills", "2", "--seed", "11"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] >= 2
    assert seen["replayed to the end"] + seen["new keys"] >= 1, f"{seen} after {time.perf_counter() - begin:.0f} s"
