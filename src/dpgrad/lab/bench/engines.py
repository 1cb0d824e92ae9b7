"""One step by each engine, ready to be taken: ordinary training, and dpgrad's private step in its forms.

A step is forward, backward, clipping, noise and the update by SGD. A private step draws all rows of a batch that is
always the same one, unless it is told to draw a Poisson batch from more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad import sampling
from dpgrad.diagnostics import Diagnostics, Recorder
from dpgrad.grads import bookkeeping, clipped_sum, vmap
from dpgrad.graph import CapturedStep
from dpgrad.lab.bench.workloads import Batch, Workload, loss
from dpgrad.mechanism import Group, Mechanism
from dpgrad.private import PrivateGradient
from dpgrad.scaling import Hard

CLIP = 1.0
NOISE = 1.0
LEARNING_RATE = 0.01
_STEPS = 10**7  # more than are ever taken
_WARM_UP = 3

ORDINARY, GRAPH, OURS, EAGER, VMAP = "non-private", "non-private graph", "dpgrad", "dpgrad eager", "dpgrad vmap"
COMPILED = "non-private compiled graph"


@dataclass(frozen=True)
class Prepared:
    """A step that can be taken again and again, and how to wait until those taken are done.

    ``sums`` computes the clipped sum of the batch by name of parameter, at the weights at the beginning and before
    noise; None where nothing is clipped. ``peak`` tells the most bytes held, where torch does not know them.
    """

    step: Callable[[], object]
    wait: Callable[[], object]
    sums: Callable[[], Mapping[str, Tensor]] | None = None
    peak: Callable[[], int] | None = None


Engine = Callable[[Workload, str], Prepared]  # the workload, and "cpu" or "cuda"


def waiting(device: str) -> Callable[[], object]:
    """What returns when the device has done all it was told."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _descent(model: nn.Module, device: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=device == "cuda")


def ordinary(workload: Workload, device: str) -> Prepared:
    """The step without privacy."""
    model, batch = workload.built(device), workload.batch(device)
    return Prepared(_ordinary_step(model, batch, _descent(model, device)), waiting(device))


def _ordinary_step(
    model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, losses: Callable[..., Tensor] = loss
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        losses(model, batch).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ordinary_graph(workload: Workload, device: str, *, compiled: bool = False) -> Prepared:
    """The step without privacy as a CUDA graph, of kernels that torch.compile has made where it is ``compiled``."""
    model, batch = workload.built(device), workload.batch(device)
    step = _ordinary_step(model, batch, _descent(model, device), torch.compile(loss) if compiled else loss)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(held: object = step) -> None:  # a graph does not hold the tensors it reads
        graph.replay()

    return Prepared(replay, waiting(device))


def ours(
    workload: Workload,
    device: str,
    *,
    captured: bool,
    engine: str = "bookkeeping",
    groups: tuple[Group, ...] = (),
    rows: int | None = None,
    diagnostics: Diagnostics | None = None,
    **options: Any,
) -> Prepared:
    """The private step; with ``rows`` on Poisson batches drawn from so many. Options are `PrivateGradient`'s."""
    model, batch = workload.built(device), workload.batch(device)
    data = batch if rows is None else workload.rows(rows, device)
    sampler = sampling.FullBatch() if rows is None else sampling.Poisson(workload.batch_size / rows)
    mechanism = Mechanism(
        sampler, _STEPS, NOISE, clip=CLIP, expected_batch_size=workload.batch_size, groups=groups
    )  # fmt: skip
    if diagnostics is not None:
        options["observe"] = Recorder(diagnostics, model, loss, data, engine=engine)
    private = PrivateGradient(model, loss, mechanism, engine=engine, seed=0, **options)
    optimizer = _descent(model, device)
    if captured:
        step = CapturedStep(private, data, optimizer)
        return Prepared(step.step, waiting(device), partial(_sums, model, batch, engine, step.stream))

    def eager() -> None:
        private.step(data)
        optimizer.step()

    return Prepared(eager, waiting(device), partial(_sums, model, batch, engine))


def _sums(model: nn.Module, batch: Batch, engine: str, stream: torch.cuda.Stream | None = None) -> Mapping[str, Tensor]:
    """The clipped sums; on the stream of a captured step, which has scratch memory for its products already."""
    gradients = vmap.gradients if engine == "vmap" else bookkeeping.gradients
    with torch.cuda.stream(stream):
        sums = clipped_sum(model, loss, batch, partial(Hard(), clip=CLIP), gradients).sums
    if stream is not None:
        stream.synchronize()
    return sums


def engines(device: str) -> dict[str, Engine]:
    """Those of torch and dpgrad by name; the first is what others are compared with.

    >>> list(engines("cpu"))
    ['non-private', 'dpgrad', 'dpgrad vmap']
    """
    on_graphs: dict[str, Engine] = {GRAPH: ordinary_graph, COMPILED: partial(ordinary_graph, compiled=True)}
    uncaptured: dict[str, Engine] = {EAGER: partial(ours, captured=False)} if device == "cuda" else {}
    return {
        ORDINARY: ordinary,
        **(on_graphs if device == "cuda" else {}),
        OURS: partial(ours, captured=device == "cuda"),
        **uncaptured,
        VMAP: partial(ours, captured=False, engine="vmap"),
    }
