"""Several processes are refused wherever each would release something of its own; tests/distributed has real ones."""

import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpgrad import Ledger, Mechanism, Privacy, PrivateGradient, _processes, fit
from dpgrad.accounting.events import Gaussian, Relation
from dpgrad.convex.estimators import DPLinearRegression, DPLogisticRegression, DPStandardScaler
from dpgrad.grads.swap import unwrapped
from dpgrad.mechanism import sampling
from dpgrad.runs.checkpoint import Run
from dpgrad.runs.replay import Identity
from dpgrad.training import pca

LAUNCHERS = [
    "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "HOROVOD_SIZE",
    "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE",
]  # fmt: skip
SEVERAL = "this runs in one process"
DATA = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def private(model: nn.Module | None = None, **given: Any) -> PrivateGradient:
    plan = Mechanism(sampling.FullBatch(), 3, 1.0, batch_size=20.0)
    return PrivateGradient(model or nn.Linear(3, 2), loss, plan, **given)


def fitted(path: Path) -> object:
    return fit(
        nn.Linear(3, 2), DATA, loss, steps=2, batch_size=5, delta=1e-3, folder=path / "run",
        ledger=Ledger(path / "ledger.jsonl"), privacy=Privacy(noise_multiplier=1.0),
    )  # fmt: skip


TRAINING: dict[str, Callable[[Path], object]] = {"PrivateGradient": lambda path: private(), "fit": fitted}
X, Y = DATA.numpy().astype(float), np.arange(20) % 2
ENTRIES: dict[str, Callable[[Path], object]] = {
    "principal_directions": lambda path: pca.principal_directions(DATA, 1, 1.0, ledger=Ledger(path / "ledger.jsonl")),
    "DPLogisticRegression": lambda path: DPLogisticRegression(epsilon=1.0, data_norm=1.0, classes=[0, 1]).fit(X, Y),
    "DPLinearRegression": lambda path: DPLinearRegression(
        epsilon=1.0, data_norm=1.0, target_bounds=(0.0, 1.0)
    ).fit(X, Y.astype(float)),
    "DPStandardScaler": lambda path: DPStandardScaler(epsilon=1.0, bounds=(-1.0, 1.0)).fit(X),
}  # fmt: skip


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", ENTRIES)
def test_every_release_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{SEVERAL}, and torch.distributed has 2 ranks here: .*Run it in one"):
        ENTRIES[name](tmp_path)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ledger.jsonl").exists() or not (tmp_path / "ledger.jsonl").read_text("utf-8")


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("variable", LAUNCHERS)
def test_a_launcher_is_seen_before_the_processes_are_connected(
    name: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=rf"^{SEVERAL}, and a launcher started 2 processes \({variable} in the env"):
        ENTRIES[name](tmp_path)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("variable", LAUNCHERS)
def test_processes_that_are_not_connected_are_told_the_line_to_add(
    name: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=r"are not connected: .*Call torch.distributed.init_process_group\(\) first"):
        TRAINING[name](tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_does_not_connect_what_a_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="are not connected"):
        private()


@pytest.mark.parametrize("value", ["1", "0", "", " ", "two", "-2"])
def test_one_process_of_a_launcher(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    _processes.refuse_several()


def test_processes_that_are_connected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one = private()
    one.step(DATA)
    step = one.charged(DATA)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    with pytest.raises(ValueError, match="3 ranks"):
        one.step(DATA)
    with pytest.raises(ValueError, match="3 ranks"):
        one.compute(DATA, step)
    assert one.steps_taken == 2


def in_a_fork(do: Callable[[], object]) -> str:
    """What ``do`` raises in a forked process; empty where it raises nothing."""
    read, write = os.pipe()
    if not (process := os.fork()):
        try:
            do()
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    os.close(write)
    with os.fdopen(read) as told:
        return told.read()


def opened(folder: Path) -> Run:
    plan = Mechanism(sampling.FullBatch(), 9, 1.0, batch_size=20.0)
    identity = Identity(plan.to_dict(), "data", "code", "cpu", 1, None, {})
    run = Run.open(folder, lambda key: identity, plan, 1e-5, reserve=5)
    run.save(0, {})
    return run


class TestForks:
    """A fork copies keys and ledgers in memory: both processes would draw the same noise and charge their own copy."""

    @pytest.mark.parametrize("do", ["step", "charged", "compute", "prepare"])
    def test_a_private_gradient_stays_in_its_process(self, do: str) -> None:
        one = private()
        given = (DATA, one.charged(DATA)) if do == "compute" else (DATA,)
        assert "both would have the same noise" in in_a_fork(lambda: getattr(one, do)(*given))
        getattr(one, do)(*given)

    def test_a_run_stays_in_its_process(self, tmp_path: Path) -> None:
        run = opened(tmp_path / "run")
        run.charge(0)
        spent = (tmp_path / "run" / "ledger.jsonl").read_bytes()
        for do in (lambda: run.charge(1), lambda: run.save(1, {}), lambda: run.finish(lambda folder: None)):
            assert "only the first works on its run" in in_a_fork(do)
        run._next = 3  # as after three steps: the fork below took none of them
        assert in_a_fork(run.close) == ""
        assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == spent
        assert "in use by another process" in in_a_fork(lambda: opened(tmp_path / "run"))
        run.close()

    def test_a_ledger_in_memory_takes_no_entry_that_would_be_lost(self) -> None:
        ledger = Ledger()
        assert "give the ledger a file" in in_a_fork(lambda: ledger.add(Gaussian(1.0), Relation.ADD_REMOVE))
        ledger.add(Gaussian(1.0), Relation.ADD_REMOVE)

    def test_a_ledger_in_a_file_is_that_of_all_processes(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "ledger")
        assert in_a_fork(lambda: ledger.add(Gaussian(1.0), Relation.ADD_REMOVE)) == ""
        assert len(ledger.entries()) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_run_would_charge_its_steps_again(copied: Any, tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run, pytest.raises(ValueError, match="cannot be copied or pickled"):
        copied(run)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_threads_take_different_steps() -> None:
    plan = Mechanism(sampling.FullBatch(), 60, 1.0, batch_size=20.0)
    charged: list[int] = []
    one = PrivateGradient(nn.Linear(3, 2), loss, plan, charge=charged.append)
    one.prepare(DATA)
    taken: list[int] = []

    def some() -> None:
        taken.extend(one.charged(DATA) for _ in range(15))

    threads = [Thread(target=some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(charged) == list(range(60))
    assert one.ledger == plan.event()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
class TestModels:
    """Models made for several processes, here in a group of one: no message may lead to one model for each."""

    def refused(self, model: nn.Module, match: str) -> None:
        for given in (model, nn.Sequential(model)):
            with pytest.raises(ValueError, match=match) as caught:
                private(given)
            assert "give model.module" not in str(caught.value)
            with pytest.raises(ValueError, match=match):
                unwrapped(given)

    def test_one_rank_alone_is_one_process(self) -> None:
        private().step(DATA)

    def test_distributed_data_parallel(self) -> None:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        self.refused(model, "is wrapped in DistributedDataParallel.*: give the model unwrapped")

    def test_fully_sharded(self) -> None:
        from torch.distributed.fsdp import fully_shard

        model: Any = nn.Linear(3, 2)
        fully_shard(model)
        self.refused(model, "the model is sharded by fully_shard, ")

    def test_shards_of_one_rank_are_the_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        plain, model = nn.Linear(3, 2), nn.Linear(3, 2)
        model.load_state_dict(plain.state_dict())
        fully_shard(model)
        one = private(plain, seed=3)
        other = private(model, seed=3, group=dist.group.WORLD)
        for _ in range(2):
            one.step(DATA)
            other.step(DATA)
        held: list[Any] = [parameter.grad for parameter in model.parameters()]
        for parameter, found in zip(plain.parameters(), held, strict=True):
            torch.testing.assert_close(found.to_local(), parameter.grad, rtol=0, atol=2.0**-22)

    def test_distributed_tensors(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        model = nn.Linear(3, 2)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
        self.refused(model, r"parameter (0\.)?weight is a DTensor")
