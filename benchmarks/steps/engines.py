"""One step by each engine, ready to be taken: ordinary training, and dpgrad's private step in its forms.

A step is forward, backward, clipping, noise and the update by SGD. Steps without privacy take one batch again and
again; private ones draw Poisson lots of as many examples on average.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.steps.workloads import DATASET, LOTS, Batch, Workload
from dpgrad.grads.history import InnerMomentum
from dpgrad.grads.sums import trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import noise
from dpgrad.training.diagnostics import Diagnostics, Recorder
from dpgrad.training.private import PrivateGradient

CLIP = 1.0
NOISE = 1.0
LEARNING_RATE = 0.01
SEED = 0  # of private steps: their lots and their noise are known
AHEAD = 256  # steps for which a captured step may fill its tables at once
WORKERS = 4  # that read a Dataset
_STEPS = 10**5  # more than are ever taken
_WARM_UP = 3

ORDINARY, GRAPH, OURS, EAGER = "non-private", "non-private graph", "dpgrad", "dpgrad eager"
COMPILED = "non-private compiled graph"
Sums = Mapping[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """A step that can be taken again and again, and how to wait until those taken are done.

    Guarantee: nothing is computed before the first step, so that its time is that of the whole set-up.
    """

    step: Callable[[], object]
    wait: Callable[[], object]
    sums: Callable[[], Sums] | None = None  # what the first step, just taken, summed before noise, if it clips
    lots: bool = False  # whether those are sums of the first Poisson lot, not of the fixed batch
    share: Callable[[int], float] = lambda steps: 1.0  # examples of the last steps, in the number expected
    warm_up: int = 2  # steps until all that follow are alike
    period: int = 1  # a cost that comes back after so many steps is paid by every block of as many
    data_bytes: int = 0  # on the device, not counted as memory of a step
    peak: Callable[[], int] | None = None  # the most bytes held, where torch does not know them
    form: Callable[[], str] = lambda: ""  # how steps are taken, once some are


Engine = Callable[[Workload, str], Prepared]  # the workload, and "cpu" or "cuda"


def waiting(device: str) -> Callable[[], object]:
    """What returns when the device has done all it was told."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def bytes_on(device: str, data: Any) -> int:
    """Bytes of the tensors there."""
    leaves = [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor)]
    return sum(leaf.nbytes for leaf in leaves if leaf.device.type == device)


def _descent(model: nn.Module, device: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model).values(), lr=LEARNING_RATE, fused=device == "cuda")


def pieces(workload: Workload, batch: Batch) -> list[Batch]:
    """The batch in the parts that are processed at a time."""
    most = workload.microbatch or len(batch[1])
    return list(zip(*(column.split(most) for column in batch), strict=True))


def _ordinary_step(
    workload: Workload, model: nn.Module, batch: Batch, device: str, compiled: bool = False
) -> Callable[[], None]:
    optimizer, parts, rows = _descent(model, device), pieces(workload, batch), len(batch[1])
    loss = torch.compile(workload.loss) if compiled else workload.loss

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            (loss(model, part).sum() / rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ordinary(workload: Workload, device: str) -> Prepared:
    """The step without privacy."""
    batch = workload.batch(device)
    step = _ordinary_step(workload, workload.built(device), batch, device)
    return Prepared(step, waiting(device), data_bytes=bytes_on(device, batch))


def ordinary_graph(workload: Workload, device: str, *, compiled: bool = False) -> Prepared:
    """The step without privacy as a CUDA graph, of kernels that torch.compile has made where it is ``compiled``."""
    batch = workload.batch(device)
    step = _ordinary_step(workload, workload.built(device), batch, device, compiled)
    graphs: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        if not graphs:
            graphs.append(_captured(step))
        graphs[0].replay()

    return Prepared(replay, waiting(device), data_bytes=bytes_on(device, batch))


def _captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def ours(
    workload: Workload,
    device: str,
    *,
    capture: bool | None = None,
    groups: tuple[Group, ...] = (),
    **options: Any,
) -> Prepared:
    """The private step; ``capture`` and options, which add to the workload's, are `PrivateGradient`'s."""
    model, data = workload.built(device), workload.data(device)
    rows, options = LOTS * workload.batch_size, {**workload.options, **options}
    sampler = sampling.Poisson(1 / LOTS)
    mechanism = Mechanism(sampler, _STEPS, NOISE, clip=CLIP, batch_size=workload.batch_size, groups=groups)
    diagnostics: Diagnostics | None = options.pop("diagnostics", None)
    if diagnostics is not None:
        options["observe"] = Recorder(diagnostics, model, workload.loss, data)
    workers = WORKERS if workload.place == DATASET and device == "cuda" else 0
    private = PrivateGradient(
        model, workload.loss, mechanism, seed=SEED, microbatch=workload.microbatch, capture=capture, workers=workers,
        **options,
    )  # fmt: skip
    optimizer = _descent(model, device)

    def step() -> None:
        private.step(data)
        optimizer.step()

    def share(steps: int) -> float:
        last = range(private.steps_taken - steps, private.steps_taken)
        return fmean(len(sampler.draw(rows, at, private.key)) for at in last) / workload.batch_size

    momentum: InnerMomentum | None = options.get("inner_momentum")
    return Prepared(
        step, waiting(device), partial(_sums, private), lots=True, share=share, period=AHEAD,
        warm_up=2 + (momentum.length if momentum else 0),
        data_bytes=bytes_on(device, data), form=partial(_form, private),
    )  # fmt: skip


def _form(private: PrivateGradient) -> str:
    """How steps were taken, and why they were not captured where they were not."""
    return f"{private.form}: {private.not_captured}" if private.not_captured else private.form


def _sums(private: PrivateGradient) -> Sums:
    """What the last step summed: its gradient is (sum + noise) / divisor, and the noise of a known seed is known."""
    at, mechanism, parameters = private.steps_taken - 1, private.mechanism, trainable(private.model)
    stds = {name: mechanism.std_at(at, private.work.group_of(name)) for name in parameters}
    drawn = noise.gaussians(parameters, stds, private.key, at)
    return {name: _gradient(parameters[name]) * mechanism.divisor - drawn[name] for name in parameters}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # a private step writes all of them
    return parameter.grad


def engines(device: str) -> dict[str, Engine]:
    """Those of torch and dpgrad by name.

    >>> list(engines("cpu"))
    ['non-private', 'dpgrad']
    """
    if device == "cpu":
        return {ORDINARY: ordinary, OURS: ours}
    return {
        ORDINARY: ordinary,
        GRAPH: ordinary_graph,
        OURS: ours,
        EAGER: partial(ours, capture=False),
        COMPILED: partial(ordinary_graph, compiled=True),
    }
