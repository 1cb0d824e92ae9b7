"""What ranks do in tests/distributed/test_shards.py: models of FSDP2 beside the same models in one process."""

import os
import shutil
import signal
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dpgrad import HeldOut, Ledger, Mechanism, Privacy, PrivateGradient, RunFolder, fit, recipes, sampling
from dpgrad.distributed import stored
from dpgrad.distributed.ranks import Ranks
from dpgrad.grads import probe
from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.mechanism import Group
from dpgrad.runs import checkpoint as checkpoints
from dpgrad.runs.snapshot import Snapshot
from dpgrad.runs.values import Writer
from dpgrad.runs.weights import Weights

ROWS, WIDTH, WORDS, LONG, SEED = 60, 10, 11, 6, 3
BATCH = 12


class Block(nn.Module):
    """A transformer's block whose rows 2 and 3 ranks cannot share evenly."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.checkpointed = checkpointed

    def run(self, x: Tensor) -> Tensor:
        query, key, value = self.attend(self.before(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value))
        return x + self.down(torch.tanh(self.up(self.after(x))))

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointed:
            return self.run(x)
        found: Tensor = checkpoint(self.run, x, use_reentrant=False)
        return found


class Transformer(nn.Module):
    def __init__(self, checkpointed: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LONG, WIDTH))
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (count, LONG), generator=random), torch.randint(WORDS, (count, LONG), generator=random)


def plan(rate: float = 0.2, **given: Any) -> Mechanism:
    return Mechanism(sampling.Poisson(rate), steps=20, noise_multiplier=0.5, batch_size=BATCH, **given)


def sharded(model: nn.Module, layers: bool = False, **given: Any) -> nn.Module:
    """The model of this rank, as users shard it, or layer by layer; in one process the model itself."""
    if not dist.is_initialized():
        return model
    from torch.distributed.fsdp import fully_shard

    for layer in [each for each in model.modules() if layers and isinstance(each, nn.Linear)]:
        fully_shard(layer, **given)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, **given)
    return fully_shard(model, **given)


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found.clone()


def trained(
    taken: int = 3, optimizer: str = "Adam", rate: float = 0.2, model: dict[str, bool] | None = None,
    mechanism: dict[str, Any] | None = None, half: bool = False, passes: bool = False, layers: bool = False,
    shard: Callable[[nn.Module], nn.Module] | None = None, **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """Weights, gradients and what this rank holds of them after some steps."""
    network = sharded(Transformer(**model or {}), layers) if shard is None else shard(Transformer())
    private = PrivateGradient(network, loss, plan(rate, **mechanism or {}), seed=SEED, **given)
    parameters = {name: each for name, each in network.named_parameters() if each.requires_grad}
    stepper = getattr(torch.optim, optimizer)(parameters.values(), lr=0.01)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        for _ in range(taken):
            if passes:  # as an evaluation between steps, which leaves parameters gathered
                with torch.no_grad():
                    network(rows()[0])
            private.step(rows())
            stepper.step()
    local = getattr(next(iter(parameters.values())), "to_local", None)
    return {
        "weights": {name: whole(each) for name, each in network.named_parameters()},
        "gradients": {name: whole(each.grad) for name, each in parameters.items()},
        "frozen": [name for name, each in network.named_parameters() if each.grad is None],
        "held": None if local is None else {name: each.grad.to_local() for name, each in parameters.items()},
        "way": str(private.way), "ledger": private.ledger, "form": private.form, "bounds": private.clip_bounds,
    }  # fmt: skip


GROUPS = Group("blocks.*", 1.0, 1.0), Group("[!b]*", 0.5, 2.0)
LOOPS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "SGD, tied": {"optimizer": "SGD", "model": {"tied": True}},
    "frozen, checkpointed": {"model": {"frozen": True, "checkpointed": True}},
    "microbatches, passes between": {"microbatch": 3, "passes": True},
    "groups, adaptive clip": {"mechanism": {"groups": GROUPS, "adaptive_clip": AdaptiveClip()}},
    "secure noise, groups": {"mechanism": {"groups": GROUPS, "secure_values": 10**4}, "taken": 2},
    "bfloat16": {"half": True, "taken": 2, "optimizer": "SGD"},
    "engine vmap": {"engine": "vmap", "taken": 2},
    "mostly empty": {"rate": 0.02, "taken": 6},
    "empty": {"rate": 1e-9, "taken": 2},
    "secure noise": {"rate": 1e-9, "taken": 2, "mechanism": {"groups": GROUPS, "secure_values": 10**5}},
    "a unit a layer": {"layers": True, "microbatch": 5, "taken": 1},
}


OF_THREE = (
    "frozen, checkpointed",
    "mostly empty",
    "empty",
    "secure noise",
)  # three ranks take these alone, to save time


def sharded_loops(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: trained(**given) for name, given in LOOPS.items() if ranks == 2 or name in OF_THREE}


def _hybrid(network: nn.Module) -> nn.Module:
    """In two shards, each of which two ranks hold; on an odd number of ranks a whole replica on each."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    shape = (ranks // 2, 2) if ranks % 2 == 0 else (ranks, 1)
    return sharded(network, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))


def sharded_hybrid(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return trained(taken=1, optimizer="SGD", shard=_hybrid)


def _crossed(network: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh

    return sharded(network, mesh=DeviceMesh("cpu", [2, 0, 1]))


def low_precision(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Passes in bfloat16 by ``mp_policy``, with weights and sums in float32; in one process by hand."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if ranks > 1:
        found = trained(taken=2, optimizer="SGD", shard=lambda model: sharded(model, mp_policy=policy))
        found["types"] = {str(each.dtype) for each in (*found["weights"].values(), *found["gradients"].values())}
        return found
    network, low = Transformer(), Transformer().bfloat16()
    private = PrivateGradient(low, loss, plan(), seed=SEED)
    stepper = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(2):
        low.load_state_dict(network.state_dict())
        private.step(rows())
        for own, other in zip(network.parameters(), low.parameters(), strict=True):
            assert other.grad is not None
            own.grad = other.grad.float()
        stepper.step()
    return {"weights": dict(network.named_parameters())}


class Wide(nn.Sequential):
    """Eight units of 16,576 values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(8)))


def peaks(rank: int, ranks: int, folder: Path) -> list[float]:
    """The most bytes that tensors of this rank took, as a multiple of the model's parameters.

    In each of three steps; and in addition, on several ranks, while the state is written.
    """
    network, found = Wide(), []
    with pytest.MonkeyPatch.context() as patch, Live() as live:
        patch.setattr(probe, "_SKETCH", 1024)  # as small beside a unit as it is beside one of a large model
        whole_model = sum(each.numel() * each.element_size() for each in network.parameters())
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard

            for unit in network:
                fully_shard(unit)
            fully_shard(network)
        mechanism = Mechanism(sampling.Poisson(0.2), steps=20, noise_multiplier=1.0, batch_size=4)
        given: dict[str, Any] = {"capture": False} if ranks == 1 else {}
        private = PrivateGradient(network, lambda model, x: model(x).square().mean(1), mechanism, seed=SEED, **given)
        for _ in range(3):
            live.most = 0
            private.step(torch.ones(20, 64).cumsum(0))
            found.append(live.most / whole_model)
        if ranks > 1:
            patch.setattr(stored, "_PIECE", whole_model // 64)
            state, held = {"model": network.state_dict()}, private.ranks
            live.most = 0
            torch.zeros(1)
            before = live.most
            marked, _ = stored.written(state, network, held, 3, folder)
            found.append((live.most - before) / whole_model)
            again = stored.read(held.from_first(lambda: marked), network, held, folder)["model"]
            assert all(torch.equal(whole(value), whole(state["model"][name])) for name, value in again.items())
    return found


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors took at once; memory that is given back while a tensor lives does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((result, args)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                self._known.setdefault(storage._cdata, weakref.ref(storage))
        held = {key: storage for key, each in self._known.items() if (storage := each()) is not None}
        self._known = {key: self._known[key] for key in held}
        self.most = max(self.most, sum(storage.nbytes() for storage in held.values()))
        return result


def _columns(network: nn.Module) -> nn.Module:
    return sharded(nn.Linear(6, 6, bias=False), shard_placement_fn=lambda parameter: Shard(1))


def _in_part(network: nn.Module) -> nn.Module:
    sharded(network.blocks[0])  # type: ignore[index, arg-type]
    return network


def sharded_failing(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What every rank raises where one fails, and which models are refused."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    from dpgrad.grads.check import check

    state = {"broken": False}

    def broken(model: nn.Module, batch: Any) -> Tensor:
        if state["broken"] and rank == ranks - 1:
            raise ZeroDivisionError("on one rank")
        return loss(model, batch)

    private = PrivateGradient(sharded(Transformer()), broken, plan(rate=0.5), seed=SEED)

    def in_a_step() -> None:
        private.step(rows())
        state["broken"] = True
        private.step(rows())

    def made(shard: Callable[[nn.Module], nn.Module] = sharded, **given: Any) -> Callable[[], object]:
        return lambda: PrivateGradient(shard(Transformer()), loss, plan(), **given)

    def reading(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * float(model.head.weight.detach().numpy().max() > 0)

    away = CPUOffloadPolicy(pin_memory=False)
    tries = {
        "in a step": in_a_step,
        "on one rank": made(microbatch=0 if rank == ranks - 1 else None),
        "offloaded": made(lambda model: sharded(model, offload_policy=away)),
        "crossed": made(_crossed),
        "read": lambda: PrivateGradient(sharded(Transformer()), reading, plan(), seed=SEED).step(rows()),
        "columns": made(_columns),
        "in part": made(_in_part),
        "inner momentum": made(inner_momentum=InnerMomentum(0.5, 2)),
        "captured": made(capture=True),
        "checked": lambda: check(sharded(Transformer()), loss, rows(8)),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "taken"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["afterwards"] = str(trained(taken=1)["weights"]["places"].sum().item())
    return found


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4))


def fitted(network: nn.Module, optimizer: str = "sgd", last: int | None = None, **given: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    inputs, labels = torch.randn(200, 7, generator=random), torch.randint(4, (200,), generator=random)
    method = recipes.psasc(averaging="tail:0.5", optimizer=optimizer)
    held_out = HeldOut((inputs[:50], labels[:50]), evaluate_every=3)
    seen: list[int] = []

    def stopped(now: Any) -> bool:
        seen.append(now.step)
        return bool(now.step == last)

    found = fit(
        sharded(network), (inputs[50:], labels[50:]), steps=6, batch_size=30, delta=1e-4, method=method, seed=7,
        privacy=Privacy(noise_multiplier=1.0), held_out=held_out, callbacks=stopped, **given,
    )  # fmt: skip
    weights = {name: whole(each) for name, each in network.named_parameters()}
    scores = [(point.step, point.held_out) for point in found.curves]
    return {"weights": weights, "scores": scores, "seen": seen, "whole": found.event == found.plan.mechanism.event()}


class Unlike(nn.Sequential):
    """A frozen layer, a buffer and, for Adam, two states a parameter, in shapes that ranks cannot share evenly."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4))
        self[2].requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0))


def kept(
    rank: int, folder: Path, resume: bool = False, network: nn.Module | None = None, optimizer: str = "adam",
    **given: Any,
) -> Any:  # fmt: skip
    """A run of a sharded model in a folder, with a checkpoint after every second step."""
    network = Unlike() if network is None else network
    run = RunFolder(folder / "run", resume=resume, checkpoint_every=2, release=lambda place, found: None)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(stored, "_PIECE", 200)  # many pieces, which end within shards
        found = fitted(network, optimizer, folder=run, ledger=Ledger(folder / "spent.jsonl"), **given)
    found["new key"] = [str(each.message) for each in caught if "new key" in str(each.message)]
    return found


def sharded_runs(rank: int, ranks: int, folder: Path) -> Any:
    return kept(rank, folder)


def _ended_at(rank: int, folder: Path, owner: Any, name: str, calls: int) -> Any:
    """A run in which this rank is killed at a call of a function, if ``calls`` is not 0."""
    original, counted = getattr(owner, name), 0

    def counting(*given: Any, **named: Any) -> Any:
        nonlocal counted
        counted += 1
        if counted == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **named)

    setattr(owner, name, counting)
    return kept(rank, folder)


# Who dies, and where: within a file of values, before the checkpoint that names it, before the file before it goes, ...
ENDS: dict[str, tuple[int, Any, str, int]] = {
    "in_a_step": (1, PrivateGradient, "compute", 4),
    "in_the_file": (0, Writer, "write", 15),
    "sending": (1, stored, "_within", 40),
    "before_the_checkpoint": (0, Snapshot, "write", 3),
    "after_the_checkpoint": (0, checkpoints, "discard_others", 3),
    "at_the_release": (0, Weights, "write", 1),
}


def ended(rank: int, ranks: int, folder: Path, end: str) -> Any:
    dies, owner, name, calls = ENDS[end]
    return _ended_at(rank, folder, owner, name, calls if rank == dies else 0)


def resumed(rank: int, ranks: int, folder: Path, left: str) -> Any:
    """Resume, in a copy, a run that was left by another job."""
    if not rank:
        shutil.copytree(folder.parent / left, folder, dirs_exist_ok=True)
    return kept(rank, folder, resume=True)


def plainly(rank: int, ranks: int, folder: Path) -> Any:
    """Resume, with a model that is not sharded, a run of a sharded one."""
    if not rank:
        shutil.copytree(folder.parent / "ended_in_a_step-2", folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "sharded", lambda network: network)
        return kept(rank, folder, resume=True)


def sharded_disk(rank: int, ranks: int, folder: Path) -> Any:
    """The disk of rank 0 is full in the middle of its second checkpoint."""
    original, counted = Writer.write, 0

    def full(self: Writer, piece: Any) -> None:
        nonlocal counted
        counted += 1
        if counted > 12:
            raise OSError(28, "No space left on device")
        original(self, piece)

    Writer.write = full  # type: ignore[method-assign]
    return kept(rank, folder)


def sharded_scaled(rank: int, ranks: int, folder: Path) -> list[Any]:
    """A run that is stopped and resumed beside one that is not, with an optimizer whose state holds a scalar."""
    own = [folder / name for name in ("whole", "stopped")]
    if not rank:
        for each in own:
            each.mkdir()
    given: dict[str, Any] = {"optimizer": "self-scaled"}
    kept(rank, own[1], last=3, **given)
    return [kept(rank, own[0], **given), kept(rank, own[1], resume=True, **given)]


def sharded_states(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """States that are stored and read, or refused, in a folder that holds nothing else."""
    network, held = sharded(Classifier()), Ranks.of()
    like: Any = next(network.parameters())

    def placed(values: Tensor, placement: Any) -> Tensor:
        found: Tensor = DTensor.from_local(values, like.device_mesh, [placement], run_check=False)
        return found

    alike = placed(torch.tensor(2.5), Replicate())
    states: dict[str, Any] = {
        "alike": [alike, like],
        "partial": [placed(torch.ones(3), Partial()), like],
        "columns": [like.redistribute(placements=[Shard(1)])],
        "unlike": [like] * (1 + (rank == 1)),
        "own": [torch.full((3,), float(rank)), like],
    }
    found: dict[str, Any] = {}
    for name, state in states.items():
        try:
            marked, _ = stored.written({"state": state}, network, held, 3, folder)
            one, other = stored.read(held.from_first(partial(dict, marked)), network, held, folder)["state"]
            found[name] = one.placements == alike.placements and torch.equal(whole(one), whole(alike))
            found[name] &= other.placements == like.placements and torch.equal(whole(other), whole(like))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["left"] = sorted(path.suffix for path in folder.glob("values*"))
    return found


def sharded_fits(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    network = Classifier()
    found = fitted(network)
    saved = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True))
    return {**found, "saved": dict(saved)}


def sharded_adapters(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A tiny causal model of transformers, of which LoRA's adapters are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": LONG, "vocab_size": WORDS}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # else the gradients of lora_A begin at zero
            nn.init.normal_(parameter, std=0.1)
    network = sharded(model)

    def of_model(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).logits.transpose(1, 2), batch[1], reduction="none").mean(1)

    private = PrivateGradient(network, of_model, plan(), seed=SEED)
    trains = {name: each for name, each in network.named_parameters() if each.requires_grad}
    stepper = torch.optim.AdamW(trains.values(), lr=0.01)
    for _ in range(2):
        private.step(rows())
        stepper.step()
    return {name: whole(each) for name, each in trains.items()}


JOBS: dict[str, Any] = {each.__name__: each for each in (
    sharded_loops, sharded_failing, sharded_fits, sharded_adapters, sharded_hybrid, low_precision, peaks, sharded_runs,
    sharded_disk, plainly, sharded_scaled, sharded_states,
)}  # fmt: skip
for end in ENDS:
    JOBS[f"ended_{end}"] = partial(ended, end=end)
    JOBS[f"resumed_{end}"] = partial(resumed, left=f"ended_{end}-2")
