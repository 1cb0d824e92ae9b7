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

from benchmarks.steps.workloads import Batch, Workload, loss
from dpgrad.grads import clipped_sum, vmap
from dpgrad.grads.precision import exact_products
from dpgrad.grads.scaling import Hard
from dpgrad.grads.sums import trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.randomness import noise
from dpgrad.training.diagnostics import Diagnostics, Recorder
from dpgrad.training.graph import MOST_AHEAD, CapturedStep
from dpgrad.training.private import PrivateGradient

CLIP = 1.0
NOISE = 1.0
LEARNING_RATE = 0.01
_STEPS = 10**7  # more than are ever taken
_WARM_UP = 3

ORDINARY, GRAPH, OURS, EAGER, VMAP = "non-private", "non-private graph", "dpgrad", "dpgrad eager", "dpgrad vmap"
COMPILED = "non-private compiled graph"
Sums = Mapping[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """A step that can be taken again and again, and how to wait until those taken are done.

    ``sums`` takes the first step, in the form that is timed, and returns what it summed before noise, by name of
    parameter; None where nothing is clipped. ``definition`` computes exactly what it should be, on a model of its own.
    ``peak`` tells the most bytes held, where torch does not know them. A cost that comes back after ``period`` steps,
    such as that of tables filled ahead, is paid by every block of as many.
    """

    step: Callable[[], object]
    wait: Callable[[], object]
    sums: Callable[[], Sums] | None = None
    peak: Callable[[], int] | None = None
    definition: Callable[[], Sums] | None = None
    period: int = 1


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
        sampler, _STEPS, NOISE, clip=CLIP, batch_size=workload.batch_size, groups=groups
    )  # fmt: skip
    if diagnostics is not None:
        options["observe"] = Recorder(diagnostics, model, loss, data, engine=engine)
    private = PrivateGradient(model, loss, mechanism, engine=engine, seed=0, **options)
    optimizer = _descent(model, device)
    if captured:
        step = CapturedStep(private, data, optimizer)
        summed = partial(_sums, private, step.step, step.settle)
        return Prepared(step.step, waiting(device), summed, period=MOST_AHEAD)

    def eager() -> None:
        private.step(data)
        optimizer.step()

    defined = partial(definition, workload, device) if engine == "vmap" else None
    return Prepared(eager, waiting(device), partial(_sums, private, eager, waiting(device)), definition=defined)


def _sums(private: PrivateGradient, step: Callable[[], object], wait: Callable[[], object]) -> Sums:
    """What the next step sums: its gradient is (sum + noise) / divisor, and the noise of a known seed is known."""
    at, mechanism, parameters = private.steps_taken, private.mechanism, trainable(private.model)
    step()
    wait()
    stds = {name: mechanism.std_at(at, private.group_of(name)) for name in parameters}
    drawn = noise.gaussians(parameters, stds, private.key, at)
    return {name: _gradient(parameters[name]) * mechanism.divisor - drawn[name] for name in parameters}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # a private step writes all of them
    return parameter.grad


def definition(workload: Workload, device: str) -> Sums:
    """The sum of the clipped gradients of single examples, which vmap forms one by one, without TF32."""
    scale = partial(Hard(), clip=CLIP)
    with exact_products():
        return clipped_sum(workload.built(device), loss, workload.batch(device), scale, vmap.gradients).sums


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
