"""A small private run that may be killed at any moment, and a driver that kills it.

    python tests/soak.py [--kills 100] [--seed 0]

Each run is killed by SIGKILL at random moments and resumed until it is finished; some are resumed with another option,
so that a new key is drawn. After every kill the ledger must cover every step that was begun, and its ε must be at most
the plan's. At the end a run that was only replayed must have the weights of an undisturbed one, bit for bit, and the
plan in its ledger.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # runs are forked, and a CUDA device does not survive that

import torch
from torch import Tensor, nn

from dpgrad import Mechanism
from dpgrad.accounting import account, events
from dpgrad.accounting.events import Event
from dpgrad.mechanism import sampling
from dpgrad.runs.checkpoint import Run, interruptible
from dpgrad.runs.replay import Identity, behaviour, code_version, data_digest, deterministic, device_kind
from dpgrad.runs.writeahead import WriteAhead
from dpgrad.training import private as private_module
from dpgrad.training.private import PrivateGradient

ROWS, DELTA = 48, 1e-5
Note = Callable[[int, int], None]  # (attempt, step): called when a step begins


def plan(steps: int) -> Mechanism:
    return Mechanism(sampling.Poisson(0.25), steps, noise_multiplier=1.2, clip=0.5, batch_size=12)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def train(
    folder: Path,
    mechanism: Mechanism,
    *,
    seed: int | None = 1,
    option: str = "",
    reserve: int = 2,
    every: int = 2,
    note: Note = lambda attempt, step: None,
    pause: float = 0.0,
    resume: bool | None = None,
) -> dict[str, Any]:
    """Train to the end, or until a signal asks to stop; what the run came to."""
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(ROWS, 4, generator=generator), torch.randint(2, (ROWS,), generator=generator)
    torch.manual_seed(int.from_bytes(os.urandom(4), "little") if seed is None else seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def identity_of(key: Any) -> Identity:
        options = {"loss": behaviour(loss), "model": behaviour(model, trained=model), "option": option}
        digest = data_digest(key, data)
        return Identity(mechanism.to_dict(), digest, code_version(), device_kind("cpu"), 1, None, options)

    resume = folder.exists() if resume is None else resume
    opened = Run.open(
        folder, identity_of, mechanism, DELTA, resume=resume, seed=seed, reserve=reserve, save_every=every
    )
    with opened as run, interruptible() as interruption, deterministic():

        def charge(step: int) -> None:
            run.charge(step)
            note(run.attempt, step)

        private = PrivateGradient(
            model, loss, mechanism, key=run.key, start=run.began, before=run.before, charge=charge
        )

        def save() -> None:
            parts = {"private": private.state(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            run.save(private.steps_taken, parts)

        if run.state is not None:
            model.load_state_dict(run.state["model"])
            optimizer.load_state_dict(run.state["optimizer"])
            private.restore(run.state["private"])
        if not run.replayed:
            save()
        while private.steps_taken < run.last and not interruption:
            private.step(data)
            optimizer.step()
            time.sleep(pause)
            if private.steps_taken % every == 0:
                save()
        save()
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        summary = {
            "weights": hashlib.blake2b(weights.numpy().tobytes(), digest_size=16).hexdigest(),
            "event": events.to_json(run.event()),
            "ledger": events.to_json(private.ledger),
            "last": run.last,
            "attempt": run.attempt,
            "replayed": run.replayed,
            "reason": run.reason,
            "stopped": interruption.signal,
        }
        if not interruption:
            run.finish(lambda place: (place / "summary.json").write_text(json.dumps(summary), "utf-8") and None)
    return summary


@cache
def epsilon(event: Event, accountant: str) -> float:
    return account(event, plan(1).relation, accountant).epsilon(DELTA)


def check_ledger(folder: Path, begun: list[tuple[int, int]], mechanism: Mechanism) -> Event:
    """The ledger, as a crash left it, covers all steps that were begun, and is within the budget; its event."""
    path = folder / "ledger.jsonl"
    if not path.exists():
        assert not begun, "steps were begun without a ledger"
        return events.NOTHING
    copy = Path(tempfile.mkdtemp()) / "ledger.jsonl"  # reading mends a torn line: the run is to find it as it is
    shutil.copyfile(path, copy)
    ledger = WriteAhead.read(copy)
    shutil.rmtree(copy.parent)
    for number, step in begun:
        attempt = ledger.attempts[number - 1]
        assert attempt.began <= step < attempt.until, f"step {step} of attempt {number} is not in the ledger"
    truth = [
        leaf
        for attempt in ledger.attempts
        for step in sorted({step for number, step in begun if number == attempt.number})
        if (leaf := attempt.mechanism.step_event(step, attempt.began)) != events.NOTHING
    ]
    spent, price = ledger.event(), ledger.accountant
    least = epsilon(events.grouped(truth), price) if truth else 0.0
    assert least <= epsilon(spent, price) <= epsilon(mechanism.event(), price), "below the truth, or above the budget"
    return spent


def _child(folder: Path, mechanism: Mechanism, seed: int, option: str, truth: Path, pause: float) -> None:
    torch.set_num_threads(1)
    private_module.check = lambda *_: None  # it would take most of the time of so small a run
    file = os.open(truth, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(attempt: int, step: int) -> None:
        os.write(file, f"{attempt} {step}\n".encode())

    try:
        train(folder, mechanism, seed=seed, option=option, reserve=5, every=7, note=note, pause=pause)
    except ValueError as refused:  # killed after its last line and before its end
        if "is finished" not in str(refused):
            raise


def _begun(truth: Path) -> list[tuple[int, int]]:
    if not truth.exists():
        return []
    return [(int(a), int(b)) for a, b in (line.split() for line in truth.read_text(encoding="utf-8").splitlines())]


def soak(kills: int, seed: int, place: Path, steps: int = 40, pause: float = 0.02) -> dict[str, int]:
    """Kill runs ``kills`` times; what was seen. Nothing of torch runs in this process, which is forked."""
    importlib.import_module("torch._dynamo")  # optimizers load it, which takes longer than the run: once, before forks
    code_version()
    fork = multiprocessing.get_context("fork")
    dice = random.Random(seed)
    mechanism = plan(steps)
    seen = {
        "kills": 0,
        "runs": 0,
        "replayed to the end": 0,
        "new keys": 0,
        "ended earlier": 0,
        "torn": 0,
        "kills between steps": 0,
    }

    def started(folder: Path, run: int, option: str, truth: Path) -> Any:
        child = fork.Process(target=_child, args=(folder, mechanism, run, option, truth, pause))
        child.start()
        return child

    while seen["kills"] < kills:
        run, seen["runs"] = seen["runs"], seen["runs"] + 1
        folder, truth, option = place / f"run-{run}", place / f"truth-{run}", 0
        begin = time.perf_counter()
        whole = started(place / f"whole-{run}", run, "0", place / f"whole-truth-{run}")
        whole.join()
        took = time.perf_counter() - begin
        assert whole.exitcode == 0
        wanted = json.loads((place / f"whole-{run}" / "release" / "summary.json").read_text("utf-8"))
        for _ in range(40):
            child = started(folder, run, str(option), truth)
            if seen["kills"] < kills:
                child.join(dice.uniform(0.05, 1.0) * took)
            else:
                child.join()
            if child.exitcode is None:
                before = len(_begun(truth))
                child.kill()
                child.join()
                seen["kills"] += 1
                seen["kills between steps"] += bool(before)
            else:
                assert child.exitcode == 0, f"run {run} failed by itself, see above"
            check_ledger(folder, _begun(truth), mechanism)
            with suppress(FileNotFoundError):
                seen["torn"] += not (folder / "ledger.jsonl").read_bytes().endswith(b"\n")
            if child.exitcode == 0:
                break
            option += dice.random() < 0.15
        else:
            continue  # killed forty times before its end: the next run
        found = json.loads((folder / "release" / "summary.json").read_text("utf-8"))
        assert not (folder / "private").exists()
        spent = check_ledger(folder, _begun(truth), mechanism)
        for told in ("event", "ledger"):
            assert events.leaves(events.from_json(found[told])) == events.leaves(spent), f"{told} differs"
        seen["new keys"] += found["attempt"] - 1
        if found["attempt"] == 1:
            assert found["weights"] == wanted["weights"], f"run {run} ended with other weights"
            assert spent == mechanism.event()
            seen["replayed to the end"] += 1
        else:
            seen["ended earlier"] += found["last"] < steps
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill private runs and check what is left.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", file=sys.stderr)
    place = Path(tempfile.mkdtemp(prefix="dpgrad-soak-"))
    try:
        print(json.dumps(soak(given.kills, given.seed, place)))
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
