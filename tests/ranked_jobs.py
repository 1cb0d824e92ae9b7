"""What ranks do in tests/distributed: functions of (rank, ranks, folder), run by `ranked.serve`."""

import os
import pathlib
import re
import shutil
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dpgrad
import ranked
import replayed
import sharded_jobs
from dpgrad import Computing, Ledger, Mechanism, Privacy, PrivateGradient, RunFolder, fit, sampling
from dpgrad.distributed.exchange import Exchange
from dpgrad.errors import RanksError
from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.mechanism import Group
from dpgrad.runs.snapshot import Snapshot
from dpgrad.training.augment import Shifts

ROWS, SEED = 400, 5
SILENCE = 5.0  # seconds that ranks wait for a sign of life


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(count, 1, 8, 8, generator=random), torch.randint(4, (count,), generator=random)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(), nn.Linear(216, 4))


def plan(rate: float = 0.1, steps: int = 30, noise: float = 0.5, **given: Any) -> Mechanism:
    return Mechanism(sampling.Poisson(rate), steps=steps, noise_multiplier=noise, batch_size=rate * ROWS, **given)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def part_of(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The rows of this rank; of three, one has none."""
    cuts = {2: [0, 150, ROWS], 3: [0, 100, 100, ROWS]}[dist.get_world_size()]
    start, stop = cuts[dist.get_rank()], cuts[dist.get_rank() + 1]
    return data[0][start:stop], data[1][start:stop]


def trained(mechanism: Mechanism, taken: int = 8, **given: Any) -> dict[str, Any]:
    """Weights after some steps in an own loop; other initial weights on every rank, of which rank 0's are used."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, data = network(seed=rank), rows()
    if given.get("rows_on_rank") == "part":
        if ranks > 1:
            data = part_of(data)
        else:
            del given["rows_on_rank"]
    private = PrivateGradient(model, loss, mechanism, seed=SEED, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for _ in range(taken):
        private.step(data)
        optimizer.step()
    return {"weights": flat(model), "ledger": private.ledger, "form": private.form}


GROUPS = Group("0.*", 1.0, 1.0), Group("[14].*", 0.5, 2.0)
LOOPS: dict[str, dict[str, Any]] = {
    "pieces": {"mechanism": plan()},
    "single kernels": {"mechanism": plan(), "capture": False},
    "microbatches": {"mechanism": plan(), "capture": False, "microbatch": 7},
    "recorded code": {"mechanism": plan(steps=200), "taken": 30},
    "part": {"mechanism": plan(), "rows_on_rank": "part"},
    "part, single kernels": {"mechanism": plan(), "rows_on_rank": "part", "capture": False, "augment": Shifts(2)},
    "groups": {"mechanism": plan(groups=GROUPS)},
    "augmented": {"mechanism": plan(), "augment": Shifts(2)},
    "inner momentum": {"mechanism": plan(), "inner_momentum": InnerMomentum(0.5, 2), "capture": False},
    "full batch": {"mechanism": Mechanism(sampling.FullBatch(), 6, 5.0, batch_size=400.0), "taken": 6},
    "adaptive clip": {"mechanism": plan(adaptive_clip=AdaptiveClip(), groups=GROUPS)},
    "secure noise": {"mechanism": plan(adaptive_clip=AdaptiveClip(), groups=GROUPS, secure_values=10**4)},
    "mostly empty": {"mechanism": plan(rate=0.002, steps=40), "taken": 40},
}


OF_THREE = ("pieces", "part", "adaptive clip", "secure noise", "mostly empty")  # loops that three ranks take too


def loops(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: trained(**given) for name, given in LOOPS.items() if ranks == 2 or name in OF_THREE}


def captured(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Steps that are replayed, as graphs would be, with the exchange after them."""
    with pytest.MonkeyPatch.context() as patch:
        replayed.on_cpu(patch)
        return trained(plan(), capture=True)


def empty_lots(rank: int, ranks: int, folder: Path) -> Tensor:
    """The noise of steps without rows, (steps, values)."""
    model, mechanism = nn.Linear(60, 50), plan(rate=1e-9, steps=25, noise=1.5)
    private = PrivateGradient(model, lambda model, x: model(x).sum(1), mechanism, seed=SEED)
    found = []
    for _ in range(25):
        private.step(torch.zeros(ROWS, 60))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found)


def failing(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What every rank raises where one rank fails or differs; the ranks can go on together after each."""
    data, last = rows(), ranks - 1

    def broken(model: nn.Module, batch: Any) -> Tensor:
        if state["broken"] and rank == last:
            raise ZeroDivisionError("on one rank")
        return loss(model, batch)

    state: dict[str, Any] = {"broken": False}
    private = PrivateGradient(network(), broken, plan(), seed=SEED, capture=False)

    def in_a_step() -> None:
        private.step(data)
        state["broken"] = True
        try:
            private.step(data)
        finally:
            state["broken"] = False

    def unlike_data() -> None:
        other = (data[0] + float(rank == last), data[1])
        PrivateGradient(network(), loss, plan(), seed=SEED).step(other)

    def at_the_charge() -> None:
        def full(step: int) -> None:
            raise OSError(28, "No space left on device")

        PrivateGradient(network(), loss, plan(), seed=SEED, charge=full).step(data)

    def charged_twice() -> None:
        other = PrivateGradient(network(), loss, plan(), seed=SEED)
        step = other.charged(data)
        other.charged(data) if rank == last else other.compute(data, step)

    def one_value() -> None:
        other = data[0].clone()
        other[123, 0, 3, 3] = torch.nextafter(other[123, 0, 3, 3], torch.tensor(9.0 * (rank == last)))
        PrivateGradient(network(), loss, plan(), seed=SEED).step((other, data[1]))

    def other_buffer() -> None:
        model = network()
        model.register_buffer("more", torch.zeros(2 + (rank == last)))
        PrivateGradient(model, loss, plan())

    def other_batches() -> None:
        class Shifted(sampling.Poisson):
            def draw(self, rows: int, step: int, key: Any) -> Any:
                return super().draw(rows, step + (rank == last), key)

        mechanism = Mechanism(Shifted(0.1), steps=30, noise_multiplier=0.5, batch_size=40)
        PrivateGradient(network(), loss, mechanism, seed=SEED).step(data)

    def another_run() -> None:
        one, two = (PrivateGradient(network(), loss, plan(), seed=seed) for seed in (1, 2))
        (two if rank == last else one).step(data)

    def other_optimizer() -> None:
        model = network()
        private = PrivateGradient(model, loss, plan(), seed=SEED)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * (rank == last))
        for _ in range(2):
            private.step(data)
            optimizer.step()

    def other_loss(**given: Any) -> None:
        """A row counts twice as much on the last rank."""
        rows_of = part_of(data) if given else data
        many = 1.0 + (rank == last)
        PrivateGradient(network(), lambda model, batch: many * loss(model, batch), plan(), **given).step(rows_of)

    def other_loss_later() -> None:
        """The last rank changes its loss after the first step, which is seen before the seventeenth."""
        state["more"] = 1.0
        own = PrivateGradient(network(), lambda model, batch: state["more"] * loss(model, batch), plan(), seed=SEED)
        for _ in range(17):
            own.step(data)
            state["more"] = 1.0 + (rank == last)

    def another_order() -> None:
        mine = (data[0].flip(0), data[1].flip(0)) if rank == last else data
        PrivateGradient(network(), loss, plan(), rows_on_rank="part").step(mine)

    tries = {
        "in a step": in_a_step,
        "other optimizer": other_optimizer,
        "other loss": other_loss,
        "other loss on parts": partial(other_loss, rows_on_rank="part"),
        "other loss later": other_loss_later,
        "same part in another order": another_order,
        "other data": unlike_data,
        "one value": one_value,
        "other buffer": other_buffer,
        "other mechanism": lambda: PrivateGradient(network(), loss, plan(noise=0.5 + (rank == last))),
        "other clip": lambda: PrivateGradient(network(), loss, plan(clip=lambda step: 1.0 + (rank == last))),
        "other model": lambda: PrivateGradient(nn.Linear(3 + (rank == last), 2), loss, plan()),
        "other engine": lambda: PrivateGradient(network(), loss, plan(), engine="vmap" if rank else "bookkeeping"),
        "other option": lambda: PrivateGradient(network(), loss, plan(), microbatch=0 if rank == last else None),
        "average": lambda: PrivateGradient(
            network(), loss, Mechanism(sampling.FullBatch(), 3, 1.0, batch_size=9.0), average=0.5
        ),
        "other batches": other_batches,
        "same part twice": lambda: PrivateGradient(network(), loss, plan(), rows_on_rank="part").step(data),
        "at the charge": at_the_charge,
        "another run": another_run,
        "charged twice": charged_twice,
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "taken"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    # Still together: nothing was left half exchanged.
    found["afterwards"] = str(trained(plan(), taken=1)["weights"].sum().item())
    return found


def connected_later(rank: int, ranks: int, folder: Path) -> str:
    """A model that is wrapped, and one whose steps began before the ranks were connected."""
    wrapped = nn.parallel.DistributedDataParallel(network())
    try:
        PrivateGradient(wrapped, loss, plan())
    except ValueError as error:
        return str(error)
    return "taken"


DATA = rows(300)
FIT: dict[str, Any] = {"steps": 12, "batch_size": 30, "delta": 1e-4, "method": "psasc"}


def fitted(
    folder: Path, rank: int, resume: bool = False, callbacks: Any = (), data: Any = DATA, **given: Any
) -> dict[str, Any]:
    model = network(seed=rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(
            model, data, folder=RunFolder(folder / "run", resume=resume, checkpoint_every=5),
            privacy=Privacy(noise_multiplier=1.0), callbacks=callbacks, **{**FIT, **given},
        )  # fmt: skip
    new_key = [str(each.message) for each in caught if "new key" in str(each.message)]
    whole = found.event == found.plan.mechanism.event()
    return {
        "weights": flat(model), "whole": whole, "stopped": found.stopped, "event": found.event, "new_key": new_key,
        "epsilon": found.guarantee.epsilon, "planned": found.plan.guarantee.epsilon, "curves": len(found.curves),
    }  # fmt: skip


def fits(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Ranks other than 0 work elsewhere: in a folder that is gone, in another time zone and language."""
    if rank:
        gone = folder / f"gone-{rank}"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        os.environ |= {"TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8"}
        time.tzset()
    ledger = Ledger(folder / "spent.jsonl")
    return fitted(folder, rank, seed=7, ledger=ledger, held_out=rows(20))


def fits_parts(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Every rank holds rows of its own, and the second of three none."""
    cuts = [0, 120, 120, 300]
    data = tuple(each[cuts[rank] : cuts[rank + 1]] for each in DATA)
    return fitted(folder, rank, seed=7, data=data, computing=Computing(rows_on_rank="part"))


def stopped_by_a_callback(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return fitted(folder, rank, callbacks=lambda progress: progress.step == 4)


def stopped_by_a_signal(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The last rank is asked to stop before it computes its fourth step."""
    original, taken = PrivateGradient.compute, 0

    def asked(self: PrivateGradient, data: Any, step: int) -> None:
        nonlocal taken
        taken += 1
        if rank == ranks - 1 and taken == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, data, step)

    PrivateGradient.compute = asked  # type: ignore[method-assign]
    return fitted(folder, rank)


def killed(rank: int, folder: Path, where: tuple[type, str], step: int = 8) -> dict[str, Any]:
    """A run in which this rank is killed at the ``step``-th call of a method, if ``step`` is not 0."""
    owner, name = where
    original, calls = getattr(owner, name), 0

    def counting(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *given)

    setattr(owner, name, counting)
    return fitted(folder, rank, seed=7)


def first_killed(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Rank 0 is gone when a step was charged and before it was computed."""
    return killed(rank, folder, (PrivateGradient, "compute"), 8 if rank == 0 else 0)


def last_killed(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The last rank is gone within an exchange: its noisy shard is sent to nobody."""
    return killed(rank, folder, (Exchange, "_gather"), 8 if rank == ranks - 1 else 0)


def resumed(rank: int, ranks: int, folder: Path, left: str, began: int) -> dict[str, Any]:
    """Resume, in a copy, the run that was left by another job on ``began`` ranks."""
    if not rank:
        shutil.copytree(folder.parent / f"{left}-{began}" / "run", folder / "run")
    return fitted(folder, rank, resume=True, seed=7)


def silent(rank: int, ranks: int, folder: Path) -> str:
    """The last rank is stopped after its first step, as if its machine were gone; rank 0 ends it in the end."""
    stopped = folder / "stopped"
    private, ledger = PrivateGradient(network(), loss, plan(), seed=SEED, rank_timeout=SILENCE), 0
    try:
        for _ in range(3):
            private.step(rows())
            ledger = private.steps_taken
            if rank == ranks - 1:
                stopped.with_suffix(".new").write_text(str(os.getpid()), "utf-8")
                stopped.with_suffix(".new").rename(stopped)
                os.kill(os.getpid(), signal.SIGSTOP)
    except RanksError as error:
        return f"after {ledger} steps: {error}"
    finally:
        (folder / f"noticed-{rank}").touch()
        while rank == 0 and not all((folder / f"noticed-{other}").exists() for other in range(ranks - 1)):
            time.sleep(0.05)
        if rank == 0:
            os.kill(int(stopped.read_text("utf-8")), signal.SIGKILL)
    return "nothing was noticed"


def slow(rank: int, ranks: int, folder: Path) -> int:
    """The last rank takes longer for one step than a silent rank is waited for."""
    private = PrivateGradient(network(), loss, plan(), seed=SEED, rank_timeout=SILENCE / 2)
    for step in range(2):
        if step and rank == ranks - 1:
            time.sleep(1.5 * SILENCE)
        private.step(rows())
    return private.steps_taken


def full_disk(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Rank 0 cannot write its second checkpoint."""
    original, saves = Snapshot.write, 0

    def failing(self: Snapshot, path: Path) -> None:
        nonlocal saves
        saves += 1
        if saves == 2:
            raise OSError(28, "No space left on device")
        original(self, path)

    Snapshot.write = failing  # type: ignore[method-assign]
    return fitted(folder, rank, seed=7)


def other_folders(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Rank 0 alone is given a folder; the last rank has other data."""
    model, data = network(seed=rank), (DATA[0] + float(rank == ranks - 1), DATA[1])
    given = folder / "run" if rank == 0 else None
    fit(model, data, folder=given, privacy=Privacy(noise_multiplier=1.0), **FIT)
    return {}


def scripts_of_the_page(rank: int, ranks: int, folder: Path) -> list[str]:
    """The scripts of docs/several_processes.md, each with a model; what they leave in the folder that they share."""
    os.chdir(folder)
    page = (ranked.TESTS.parent / "docs" / "several_processes.md").read_text("utf-8")
    scripts = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    inputs, targets = rows(120)
    given = {"inputs": inputs, "targets": targets, "data": (inputs, targets), "loss": loss, "pathlib": pathlib}
    for script in scripts:
        model = network()
        model.blocks = [model[0]]
        names = {**given, "torch": torch, "dpgrad": dpgrad, "model": model, "mechanism": plan(steps=2)}
        exec(script.replace("torch.distributed.init_process_group()", ""), names)
    return [f"{len(scripts)} scripts", *sorted(path.name for path in Path("run").iterdir())]


JOBS: dict[str, Any] = {
    each.__name__: each
    for each in (
        loops, captured, empty_lots, failing, connected_later, fits, fits_parts, stopped_by_a_callback,
        stopped_by_a_signal, first_killed, last_killed, full_disk, other_folders, scripts_of_the_page, silent, slow,
    )
}  # fmt: skip
for left, began in (("first_killed", 2), ("last_killed", 3)):
    JOBS[f"resumed_{left}"] = partial(resumed, left=left, began=began)
JOBS |= sharded_jobs.JOBS

if __name__ == "__main__":
    ranked.serve(JOBS)
