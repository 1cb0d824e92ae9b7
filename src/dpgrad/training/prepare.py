"""What a run needs before its first step: data on the device, an optimizer, checked targets, an estimate of time."""

import copy
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from dpgrad import _validate
from dpgrad.errors import OptionError, UnsupportedModelError
from dpgrad.grads.batch import row_losses
from dpgrad.grads.kept import Guarded
from dpgrad.grads.memory import available
from dpgrad.grads.sums import Loss, trainable
from dpgrad.grads.swap import swapped
from dpgrad.grads.unquoted import unquoted
from dpgrad.training import forms, source
from dpgrad.training.curves import Spent, judging
from dpgrad.training.losses import NamedLoss, outputs_and_targets, refuse_targets, targets_of
from dpgrad.training.plan import Plan
from dpgrad.training.private import PrivateGradient
from dpgrad.training.recipes import OptimizerChoice, optimizers, refuse_optimizer
from dpgrad.training.scaled import SelfScaled

__all__ = ["classes_of", "device_of", "expected_seconds", "optimizer_named", "within_reach"]


def device_of(model: nn.Module) -> torch.device:
    """The one device on which the model lies.

    >>> device_of(nn.Linear(1, 1))
    device(type='cpu')
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"model must lie on one device, its parameters lie on {where}: put all of it on one with "
            "model.to(device), and load it without device_map"
        )
    return next(iter(devices), torch.device("cpu"))


def within_reach(data: Any, device: torch.device) -> Any:
    """Move the data to the model's device if they fit; memory maps stay as they are.

    >>> within_reach(np.zeros(3), torch.device("cpu"))
    tensor([0., 0., 0.], dtype=torch.float64)
    """
    if isinstance(data, Dataset):
        return data
    leaves = [leaf for leaf in pytree.tree_leaves(data) if not isinstance(leaf, np.memmap)]
    fits = device.type == "cpu" or sum(leaf.nbytes for leaf in leaves) < available(device) / 2

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, np.memmap) or not fits:
            return leaf
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.writeable or not leaf.dtype.isnative:  # torch shares neither
                leaf = leaf.astype(leaf.dtype.newbyteorder("="))
            leaf = torch.from_numpy(leaf)
        return leaf.to(device)

    return pytree.tree_map(placed, data)


def optimizer_named(
    choice: "OptimizerChoice | None", parameters: Iterable[nn.Parameter], learning_rate: float, momentum: float
) -> torch.optim.Optimizer:
    """An optimizer of `torch.optim` or our own by its name, or what a function makes of the parameters; None is SGD.

    >>> optimizer_named("adamw", [nn.Parameter(torch.zeros(1))], learning_rate=0.1, momentum=0.0).param_groups[0]["lr"]
    0.1
    """
    parameters = list(parameters)
    if choice is None or (isinstance(choice, str) and choice.lower() == "sgd"):
        # One kernel for all parameters; on the CPU it gains nothing.
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, fused=parameters[0].is_cuda)
    refuse_optimizer(choice, momentum)
    if isinstance(choice, str) and choice.lower() == "self-scaled":
        return SelfScaled(parameters, learning_rate, momentum)
    if not isinstance(choice, str):
        made: object = choice(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise OptionError(f"optimizer must make a torch.optim.Optimizer, it made {_validate.shown(made)}")
        return made
    on_device = {"fused": True, "capturable": True} if parameters[0].is_cuda and choice.lower() in _FUSED else {}
    return optimizers()[choice.lower()](parameters, lr=learning_rate, **on_device)


_FUSED = ("adam", "adamw")


def classes_of(model: nn.Module, loss: Loss, data: Any, collate: source.Collate) -> int | None:
    """The number of classes of a classifier, after checking the labels of all rows; None for others.

    Labels in a tensor or an array are checked here, those of a Dataset during training.

    >>> rows = torch.zeros(5, 2), torch.tensor([0, 1, 2, 1, 0])
    >>> classes_of(nn.Linear(2, 3), NamedLoss("cross-entropy"), rows, default_collate)
    3
    """
    if loss not in (NamedLoss("cross-entropy"), NamedLoss("bce")):
        return None
    device = device_of(model)
    batch = source.gathered(data, torch.arange(1), device, collate)
    told = unquoted(model, loss, lambda: pytree.tree_map(torch.zeros_like, batch))
    with judging(model), swapped(model, {}), told, Guarded().of(batch):  # nothing of the row stays in the model
        row_losses(loss, model, batch, 1)  # refuses model, loss and data that do not fit together
        outputs, _ = outputs_and_targets(model, batch)
    if not isinstance(data, Dataset):
        for few in source.blocks(targets_of(data), 1 << 20):
            refuse_targets(loss, outputs, few)
    return int(outputs.shape[1]) if loss == NamedLoss("cross-entropy") else None


def _made_up(leaf: Tensor, rows: int, device: torch.device) -> Tensor:
    """Rows in the shape of one, in the memory of about one; numbers of words differ, as those of real texts do."""
    if leaf.is_floating_point():
        return torch.randn(leaf.shape).to(device, leaf.dtype).expand(rows, *leaf.shape[1:])
    if leaf.ndim == 1:
        return torch.zeros(rows, dtype=leaf.dtype, device=device)  # labels: the first class is always there
    size = leaf[0].numel()
    turns = (torch.arange(rows + size - 1, device=device) % 2).to(leaf.dtype)
    return turns.unfold(0, size, 1).view(rows, *leaf.shape[1:])


def expected_seconds(
    model: nn.Module,
    data: Any,
    loss: Loss,
    plan: Plan,
    *,
    engine: str = "bookkeeping",
    microbatch: int | None = None,
    collate: source.Collate = default_collate,
    steps: int = 3,
) -> float:
    """Estimate the time of a plan's steps from a few steps on random numbers in the shape of the first row.

    The ε so far, which a run prices at some of its steps and which takes long at large ε, is timed once. Loading the
    examples of a Dataset, evaluation, and what precedes the first step are left out.

    Guarantee: of the data only the shape and the type of one example are read. A copy of the model is trained.

    >>> from dpgrad.training.plan import make
    >>> plan = make("dpsgd", rows=20, batch_size=5, steps=3, noise_multiplier=1.0, delta=0.01)
    >>> rows = torch.zeros(20, 2), torch.zeros(20, dtype=torch.int64)
    >>> expected_seconds(nn.Linear(2, 3), rows, NamedLoss("cross-entropy"), plan) > 0
    True
    """
    trial = copy.deepcopy(model)
    device = device_of(trial)
    shape = source.gathered(forms.taken(data, model=model), torch.arange(1), torch.device("cpu"), collate)

    rows = pytree.tree_map(lambda leaf: _made_up(leaf, plan.dataset_size, device), shape)
    named = plan.recipe
    private = PrivateGradient(
        trial, loss, plan.mechanism.with_steps(max(plan.steps, steps + 1)), rule=named.scaling(), engine=engine,
        inner_momentum=named.inner_momentum, average=named.average, microbatch=microbatch,
    )  # fmt: skip
    optimizer = optimizer_named(None, trainable(private.model).values(), 1e-3, named.momentum)
    taken = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        private.step(rows)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    spent, began = Spent(plan), time.perf_counter()
    spent(max(1, plan.steps // 2))
    return float(np.median(taken[1:])) * plan.steps + (time.perf_counter() - began) * spent.prices
