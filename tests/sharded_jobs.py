"""What ranks do in tests/distributed/test_shards.py: models of FSDP2 beside the same models in one process."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dpgrad import HeldOut, Mechanism, Privacy, PrivateGradient, fit, recipes, sampling
from dpgrad.grads import probe
from dpgrad.grads.history import InnerMomentum
from dpgrad.mechanism.adaptive import AdaptiveClip
from dpgrad.mechanism.mechanism import Group

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
    "bfloat16": {"half": True, "taken": 2, "optimizer": "SGD"},
    "engine vmap": {"engine": "vmap", "taken": 2},
    "mostly empty": {"rate": 0.02, "taken": 6},
    "empty": {"rate": 1e-9, "taken": 2},
    "a unit a layer": {"layers": True, "microbatch": 5, "taken": 1},
}


OF_THREE = ("frozen, checkpointed", "mostly empty", "empty")  # three ranks take these alone, to save time


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
    """The most bytes that tensors of this rank took in each of three steps, as a multiple of the model's parameters."""
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
    from torch.distributed.tensor import Shard

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
        "folder": lambda: fitted(Classifier(), folder=folder / "run"),
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


def fitted(network: nn.Module, **given: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    inputs, labels = torch.randn(200, 7, generator=random), torch.randint(4, (200,), generator=random)
    method = recipes.psasc(averaging="tail:0.5")
    held_out = HeldOut((inputs[:50], labels[:50]), evaluate_every=3)
    seen: list[int] = []
    found = fit(
        sharded(network), (inputs[50:], labels[50:]), steps=6, batch_size=30, delta=1e-4, method=method, seed=7,
        privacy=Privacy(noise_multiplier=1.0), held_out=held_out, callbacks=lambda now: seen.append(now.step), **given,
    )  # fmt: skip
    weights = {name: whole(each) for name, each in network.named_parameters()}
    scores = [(point.step, point.held_out) for point in found.curves]
    return {"weights": weights, "scores": scores, "seen": seen, "whole": found.event == found.plan.mechanism.event()}


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


JOBS = {each.__name__: each for each in (
    sharded_loops, sharded_failing, sharded_fits, sharded_adapters, sharded_hybrid, low_precision, peaks,
)}  # fmt: skip
