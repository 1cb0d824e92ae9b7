"""The private step as a CUDA graph: gather, forward, backward, norms, rule, noise and optimizer in one launch.

A step of many small kernels waits for Python to launch them one by one; a graph launches them all at once. Rows are
drawn on the device for many steps ahead, clip bounds and noise of those steps lie beside them, and a counter on the
device says which step it is, so that a replay needs nothing from the host. Graphs are captured for a few sizes of the
batch, and each step replays the smallest that holds its rows.

Guarantee: that of `PrivateGradient`. The rows, the noise and the charge of a step are the same functions of (key, step)
as without a graph, and so is the gradient but for rounding. To leave out an example whose gradient is not finite one
has to look for it; a graph that meets one changes no weight from then on, and the step is taken again without a graph.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpgrad.errors import CannotCaptureError, RunError
from dpgrad.grads import lanes
from dpgrad.grads.batch import as_rows
from dpgrad.grads.precision import precision_settings
from dpgrad.grads.sums import sum_dtype, trainable
from dpgrad.grads.ways import Attributed
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import device_noise, draw
from dpgrad.training import source
from dpgrad.training.private import PrivateGradient, signature

__all__ = ["MOST_AHEAD", "CapturedStep", "Rates", "elsewhere", "refusal"]

_AHEAD = 1 << 22  # rows of the data times steps that are drawn at a time
MOST_AHEAD = 256  # steps
_DEVIATIONS = (0.0, 1.0, 2.0, 3.0, 6.0)  # of the size of a Poisson batch, at which graphs are captured
_WARM_UP = 3
_LANES = 2  # beside the main stream

# Optimizers whose state is made by their first step, and what it begins with where that is not zero.
_BEGINS: dict[type[torch.optim.Optimizer], dict[str, float]] = {
    torch.optim.Adadelta: {}, torch.optim.Adam: {}, torch.optim.AdamW: {}, torch.optim.Adamax: {},
    torch.optim.NAdam: {"mu_product": 1.0}, torch.optim.RAdam: {}, torch.optim.RMSprop: {},
}  # fmt: skip

Rates = tuple[float, ...]  # the learning rate of each of the optimizer's groups of parameters


class CapturedStep:
    """`PrivateGradient.step` and the optimizer's, captured and replayed; call `settle` before looking at the model.

    An optimizer with ``fused=True`` or ``capturable=True`` (both, where it has both options) is part of the graph; any
    other steps after the replay, which then has to be waited for. Learning rates may be set between steps as usual.
    Whatever else changes of model, optimizer or torch's settings is refused by name, as far as it can be seen: numbers
    that the model or the loss hold are those at the capture, and tensors that they hold otherwise than as parameters
    and buffers must stay where they are. Where steps are charged on disk to be replayed, they must be replayed by a
    graph too, since it rounds otherwise.

    >>> from torch import nn
    >>> from dpgrad import Mechanism
    >>> plan = Mechanism(sampling.FullBatch(), steps=2, noise_multiplier=1.0, batch_size=3)
    >>> private = PrivateGradient(nn.Linear(1, 1), lambda model, x: model(x)[:, 0], plan)
    >>> CapturedStep(private, torch.ones(3, 1), torch.optim.SGD(private.model.parameters(), lr=0.1))
    Traceback (most recent call last):
    dpgrad.errors.CannotCaptureError: the model is on cpu: a step is captured on a CUDA device
    """

    def __init__(self, private: PrivateGradient, data: Any, optimizer: torch.optim.Optimizer) -> None:
        reason = refusal(private, data)
        if reason:
            raise CannotCaptureError(reason)
        self._private, self._data, self._optimizer = private, data, optimizer
        self._rows = source.rows(data)
        self._parameters = trainable(private.model)
        self._device = private._device()
        self.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with self._on_stream():
            private._prepare(data, self._rows)
        engine = private._engine
        if isinstance(engine, Attributed) and engine.not_captured:
            raise CannotCaptureError(engine.not_captured)
        self.capacities = _sizes(private.mechanism, self._rows)
        self._fused = _is_fused(optimizer)
        self._optimizes = self._fused or _is_capturable(optimizer)  # within the graphs
        self._first, self._slot_is = 0, 0
        self._counts: list[int] = []
        self._rates_are = self._rates()
        self._device_rates = [torch.tensor(rate, device=self._device) for rate in self._rates_are]
        self._pending: list[tuple[int, Rates]] = []
        self._draws = False
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for parameter in private.model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None  # an optimizer would go on with it
        self._make_state()
        try:
            self._capture_all()
        except RuntimeError as error:
            raise CannotCaptureError(f"the step cannot be captured: {str(error).partition(chr(10))[0]}") from error
        self._held = [tensor.detach() for tensor in self._tensors()]  # a graph does not hold what it works on
        self._captured = self._conditions()

    @property
    def form(self) -> str:
        """What the rounding of a step depends on beside mechanism and data: for whoever replays it elsewhere.

        The sizes of the graphs follow from those, and would tell how many rows there are.
        """
        return f"graphs of steps, the optimizer {'within' if self._optimizes else 'after'} them"

    def step(self) -> None:
        """Take the next step of the mechanism, the optimizer's included."""
        self._refuse_changed()
        step = self._private.steps_taken
        if step >= self._private.mechanism.steps:
            self._private.charged(self._data)  # refuses it
        if not self._first <= step < self._first + len(self._counts):
            self.settle()
            self._draw_ahead(step)
        too_many = self._counts[step - self._first] > self.capacities[-1]
        if too_many:
            self.settle()
        self._private.charged(self._data)
        rates = self._rates()
        if too_many:
            self._without_graph(step, rates)
        else:
            self._pending.append((step, rates))
            self._launch(step, rates)
            if not self._optimizes:
                self.settle()
        for name, parameter in self._parameters.items():
            parameter.grad = self._grads[name]  # where the graphs write; someone may have set it to None
        if not self._optimizes:
            self._optimizer.step()

    def settle(self) -> None:
        """Wait for the steps taken so far, and take again those that a gradient that is not finite has stopped."""
        if self._pending and bool(self._stopped):
            at = self._first + int(self._stopped_at)
            for step, rates in self._pending:
                if step > at:  # one by one: what stopped a step will often stop another
                    self._launch(step, rates)
                if step >= at and bool(self._stopped):
                    self._without_graph(step, rates)
                    self._stopped.zero_()  # not before: what an error leaves undone must not be forgotten
        self._pending = []
        self._private.computed_elsewhere()

    def _launch(self, step: int, rates: Rates) -> None:
        """Replay the smallest graph that holds the rows of ``step``."""
        slot = step - self._first
        if slot != self._slot_is:
            self._slot.fill_(slot)
        self._slot_is = -1  # not known until the graph has counted on
        for place, rate in enumerate(rates):
            if rate != self._rates_are[place]:
                self._device_rates[place].fill_(rate)
        self._rates_are = rates
        graph = self._graphs[next(size for size in self.capacities if self._counts[slot] <= size)]
        if self._draws:  # dropout
            with self._private._own_randomness(step):
                graph.replay()
        else:
            graph.replay()
        self._slot_is = slot + 1

    def _without_graph(self, step: int, rates: Rates) -> None:
        """Take a step that was charged already as `PrivateGradient` takes it."""
        self._private.compute(self._data, step)
        found = {name: parameter.grad for name, parameter in self._parameters.items()}
        if self._optimizes:
            with self._with_rates(rates):
                self._optimizer.step()
        for name, parameter in self._parameters.items():
            grad = found[name]
            assert grad is not None
            parameter.grad = self._grads[name].copy_(grad)

    def _tensors(self) -> list[Tensor]:
        """What the graphs work on and others may exchange."""
        model, optimizer = self._private.model, self._optimizer
        kept = optimizer.state.values() if self._optimizes else ()
        state = (value for each in kept for value in each.values() if isinstance(value, Tensor))
        return [*model.parameters(), *model.buffers(), *_steered(optimizer), *state, *pytree.tree_leaves(self._data)]

    def _conditions(self) -> dict[str, object]:
        """What a graph keeps as it was at its capture, by name."""
        names = [name for name in self._optimizer.defaults if name != "lr"]
        settings = [[group[name] for name in names] for group in self._optimizer.param_groups if self._optimizes]
        return {
            "the model (its mode, its modules or hooks, or what is trained)": signature(self._private.model),
            "a setting of the optimizer other than lr (give it fused=False or capturable=False)": settings,
            "a tensor of data, model or optimizer (write into it instead)": [t.data_ptr() for t in self._tensors()],
            "autocast": torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            "the precision of products": [one.fp32_precision in ("tf32", "bf16") for one in precision_settings()],
            "the scaling rule, or who observes": (self._private.rule, self._private.observe),
        }

    def _refuse_changed(self) -> None:
        for (what, now), before in zip(self._conditions().items(), self._captured.values(), strict=True):
            if now != before:
                raise RunError(f"{what} changed since the step was captured: put it back, or capture the step anew")

    def _make_state(self) -> None:
        """What the graphs read and write, at addresses that stay."""
        device, groups = self._device, max(1, len(self._private.mechanism.groups))
        most = max(1, min(MOST_AHEAD, _AHEAD // max(self._rows, 1)))
        self._indices = torch.zeros(most, self.capacities[-1], dtype=torch.int64, device=device)
        self._drawn = torch.zeros(most, dtype=torch.int64, device=device)
        self._clips = torch.ones(most, groups, dtype=torch.float64, device=device)
        self._stds = torch.ones(most, groups, dtype=torch.float64, device=device)
        self._slot = torch.zeros((), dtype=torch.int64, device=device)
        self._stopped = torch.zeros((), device=device)
        self._stopped_at = torch.zeros((), dtype=torch.int64, device=device)
        # The step of the first slot; until rows are drawn, one that the mechanism does not have.
        self._from = torch.full((), self._private.mechanism.steps, device=device)
        self._divisor = torch.full((), self._private.mechanism.divisor, dtype=torch.float64, device=device)
        # Gradients that are drawn together lie together, so that one kernel writes them all.
        self._noise = device_noise.Stream(self._parameters, self._private.key, device)
        self._grads: dict[str, Tensor] = {}
        self._written: list[Tensor] = []
        for segment in self._noise.segments:
            dtype = self._parameters[segment.names[0]].dtype
            self._written.append(torch.zeros(segment.values, dtype=dtype, device=device))
            self._grads.update(segment.split(self._written[-1], self._parameters))
        self._lanes = [torch.cuda.Stream(device) for _ in range(_LANES)]  # type: ignore[no-untyped-call]

    def _draw_ahead(self, step: int) -> None:
        """Fill the tables from ``step`` on."""
        mechanism = self._private.mechanism
        steps = range(step, min(step + len(self._drawn), mechanism.steps))
        drawn = draw.ahead(mechanism.sampler, steps, self._rows, self._private.key, self.capacities[-1], self._device)
        few, groups = slice(len(steps)), mechanism.groups or (None,)
        self._indices[few], self._drawn[few] = drawn.indices, drawn.counts
        for table, values in ((self._clips, mechanism.clips), (self._stds, mechanism.stds)):
            columns = np.stack([values(steps, group) for group in groups], 1)
            table[few] = torch.from_numpy(columns).to(self._device)
        self._counts = drawn.counts.tolist()
        self._first, self._slot_is = step, 0
        self._slot.zero_()
        self._from.fill_(step)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Within the block work goes to the stream that is captured: libraries hold scratch memory for each stream."""
        outside = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)

    def _capture_all(self) -> None:
        """Capture the graphs, without the optimizer where that cannot be captured."""
        try:
            with self._as_it_was():
                self._capture()
        except RuntimeError as error:
            if self._fused or not self._optimizes or isinstance(error, torch.OutOfMemoryError):
                raise
            self._optimizes = False  # such as one that works on one tensor after another
            self._graphs.clear()
            with self._as_it_was():
                self._capture()

    def _capture(self) -> None:
        pool = None
        default = torch.cuda.default_generators[self._device.index]
        # From large to small: the first leaves room for the others in the pool of memory that they share.
        for size in sorted(self.capacities, reverse=True):
            with self._on_stream(), self._with_rates(self._device_rates):
                before, on_host = default.get_offset(), _host_randomness()
                for turn in range(_WARM_UP):
                    self._slot.zero_()
                    with _waiting_refused(turn == _WARM_UP - 1):
                        self._body(size)
                self._draws = self._draws or default.get_offset() != before
                if _host_randomness() != on_host:
                    raise CannotCaptureError(
                        "model or loss draws random numbers on the host, which a graph would repeat: draw them on the "
                        "device"
                    )
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with self._with_rates(self._device_rates), torch.cuda.graph(graph, pool=pool, stream=self.stream):
                self._body(size)
            self._graphs[size] = graph
            pool = graph.pool()
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def _body(self, size: int) -> None:
        """One step on ``size`` places, which count as far as the step has rows."""
        private = self._private
        model = private.model
        now = self._slot.view(1)
        places = self._indices.index_select(0, now)[0, :size]
        filled = torch.arange(size, device=self._device) < self._drawn.index_select(0, now)
        batch = pytree.tree_map(lambda leaf: leaf.index_select(0, places), self._data)
        width = 1
        if private._several_rows:
            width = pytree.tree_leaves(batch)[0].shape[1]
            batch = as_rows(batch)
        dtype = sum_dtype(next(iter(self._parameters.values())).dtype)
        weights = (filled.to(dtype) / width).repeat_interleave(width) if width > 1 else filled.to(dtype)
        groups = private._groups()
        used = max(groups.values()) + 1 if groups else 1
        clips = self._clips.index_select(0, now)[0, :used, None]
        engine = private._engine
        assert engine is not None
        with lanes.opened(self._lanes):
            per_example = engine(model, private._loss, batch, weights, width)
            stds = self._stds.index_select(0, now)[0].unbind()
            named = {name: stds[groups[name] if groups else 0] for name in self._parameters}
            step = now + self._from
            with per_example.clipped_if_finite(private.scale(clips), groups) as (summed, finite):
                newly = ~finite & (self._stopped == 0)
                self._stopped_at.copy_(torch.where(newly, self._slot, self._stopped_at))
                self._stopped.copy_(torch.maximum(self._stopped, (~finite).float()))
                for place, (segment, written) in enumerate(zip(self._noise.segments, self._written, strict=True)):
                    total = self._summed(segment.names, summed)
                    # The noise of a step that is to be taken again must not be seen on another sum.
                    with lanes.beside(place, total, step):
                        std = device_noise.spread(segment, self._parameters, named)
                        self._noise.write(segment, written, step, std, total, self._divisor, self._stopped)
        if self._fused:
            self._optimizer.step()
        elif self._optimizes:
            _step_unless(self._stopped, self._optimizer)
        self._slot.add_(1)

    def _summed(self, names: Sequence[str], summed: Callable[[str], Tensor]) -> Tensor:
        """The sums of some parameters one after another; small ones are formed side by side."""
        if len(names) == 1:
            return summed(names[0]).flatten()
        sums = []
        for place, name in enumerate(names):
            with lanes.beside(place):
                sums.append(summed(name).flatten())
        lanes.join()
        return torch.cat(sums)

    def _rates(self) -> Rates:
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    @contextmanager
    def _with_rates(self, rates: Sequence[float | Tensor]) -> Iterator[None]:
        """Within the block the optimizer has these learning rates; while capturing, tensors, and skips what stopped."""
        own = [group["lr"] for group in self._optimizer.param_groups]
        optimizer: Any = self._optimizer
        asked = self._fused and any(isinstance(rate, Tensor) for rate in rates)
        try:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            if asked:
                optimizer.grad_scale, optimizer.found_inf = None, self._stopped
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate
            if asked:
                del optimizer.grad_scale, optimizer.found_inf

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """After the block, which takes steps to warm up, model, optimizer and generators are as before it."""
        tensors = [*self._private.model.parameters(), *self._private.model.buffers(), *_steered(self._optimizer)]
        # On the host: on the device they would stand beside the largest step.
        saved = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        state = {
            parameter: {key: value.to("cpu", copy=True) for key, value in kept.items() if isinstance(value, Tensor)}
            for parameter, kept in self._optimizer.state.items()
        }
        for name, trained in self._parameters.items():
            trained.grad = self._grads[name]
        begins = _BEGINS.get(type(self._optimizer), {})
        done = False
        try:
            with torch.random.fork_rng([self._device]):
                yield
            done = True
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, saved, strict=True):
                    tensor.copy_(value)
                for parameter, kept in list(self._optimizer.state.items()):
                    before = state.get(parameter, {})
                    for key, value in kept.items():
                        if isinstance(value, Tensor):
                            value.copy_(before[key]) if key in before else value.fill_(begins.get(key, 0.0))
                    if not done and parameter not in state:
                        del self._optimizer.state[parameter]
            for name, trained in self._parameters.items():
                trained.grad = self._grads[name].zero_() if done else None
            for tensor in (self._slot, self._stopped, self._stopped_at):
                tensor.zero_()


def _host_randomness() -> object:
    """The states of the generators on the host."""
    return torch.default_generator.get_state().tolist(), random.getstate(), repr(np.random.get_state())


@contextmanager
def _waiting_refused(refused: bool) -> Iterator[None]:
    """Within the block waiting for the device is an error; while capturing it would spoil torch's generators."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that it does not find everything: what it misses, the capture refuses
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error" if refused else before)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def refusal(private: PrivateGradient, data: Any) -> str:
    """Why the step of this run cannot be captured; nothing where it may be tried.

    >>> from torch import nn
    >>> from dpgrad import Mechanism
    >>> plan = Mechanism(sampling.FullBatch(), steps=2, noise_multiplier=1.0, batch_size=3)
    >>> refusal(PrivateGradient(nn.Linear(1, 1), lambda model, x: model(x)[:, 0], plan), torch.ones(3, 1))
    'the model is on cpu: a step is captured on a CUDA device'
    """
    device = private._device()
    if device.type != "cuda":
        return elsewhere(device)
    if isinstance(data, Dataset):
        return "data is a Dataset: a captured step takes examples from tensors"
    if any(not isinstance(leaf, Tensor) or leaf.device != device for leaf in pytree.tree_leaves(data)):
        return f"data is not on {device} as tensors: move it there to capture the step"
    if len({parameter.dtype for parameter in trainable(private.model).values()}) > 1:
        return "parameters have several types"
    for name in ("_inner_momentum", "_average", "_augment", "observe", "_memory_limit"):
        if getattr(private, name) is not None:
            return f"{name.strip('_')} is not captured"
    rows = source.rows(data)
    if not rows:
        return "there is no example"
    if private._microbatch is not None and private._microbatch < _sizes(private.mechanism, rows)[-1]:
        return "batches are worked on in pieces of microbatch examples"
    return ""


def elsewhere(device: torch.device) -> str:
    """Why the step of a model on another device is not captured."""
    return f"the model is on {device}: a step is captured on a CUDA device"


def _sizes(mechanism: Mechanism, rows: int) -> list[int]:
    """The numbers of places for which graphs are captured, rising."""
    sampler = mechanism.sampler
    if not isinstance(sampler, sampling.Poisson):
        return [min(rows, sampler.batch_size or rows)]
    some = range(0, mechanism.steps, max(1, mechanism.steps // 1000))
    rate = max(sampler.sampling_rate_at(step) for step in some)
    mean, deviation = rows * rate, math.sqrt(rows * rate * (1 - rate))
    return sorted({max(1, min(rows, math.ceil(mean + times * deviation))) for times in _DEVIATIONS})


def _step_unless(stopped: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step, or none where a flag on the device is set: what the step changed is then put back."""
    parameters = [parameter for parameter in _steered(optimizer) if parameter.grad is not None]
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    with torch.no_grad():
        before = [tensor.clone() for tensor in (*parameters, *state)]
        optimizer.step()
        for tensor, kept in zip((*parameters, *state), before, strict=True):
            torch.where(stopped > 0, kept, tensor, out=tensor)


def _steered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of the optimizer, some of which may not be the model's."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer may be captured and taken back: it says so, and what its state begins with is known.

    Not whether it has a state already: a run that is resumed must be captured as it was.
    """
    return type(optimizer) in _BEGINS and all(group.get("capturable") for group in optimizer.param_groups)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer may be captured and told to skip a step; SGD's first step must not differ from others."""
    return all(
        group.get("fused") and group.get("capturable", True) and not group.get("dampening")
        for group in optimizer.param_groups
    )
