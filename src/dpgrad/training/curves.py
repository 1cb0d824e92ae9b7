"""What may be watched while a run is under way, and the curves it leaves.

Nothing here is read from the training rows without noise: the loss or the accuracy on them is never shown.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Compose, Event
from dpgrad.errors import DataError
from dpgrad.grads.batch import row_losses
from dpgrad.grads.unquoted import length
from dpgrad.mechanism import schedules
from dpgrad.mechanism.sampling import Indices
from dpgrad.runs.writeahead import charges
from dpgrad.training import forms, source, tables
from dpgrad.training.losses import Metric
from dpgrad.training.plan import Plan

__all__ = ["Point", "Progress", "RunWatch", "Spent", "evaluate", "judging", "refuse_held_out", "share_rows"]

_JUDGED = 1024  # held-out rows at a time
_STAGES = 10  # in the course of a run the ε so far is computed at the ends and the middles of as many stages
_FEW = 50  # points of the curves up to which each has its own ε


@dataclass(frozen=True)
class Point:
    """A point of the curves, after ``step`` steps; ``held_out`` is the metric on held-out rows.

    ``epsilon`` is what a run would have cost whose number of steps had been fixed at ``step``, by the accountant of the
    plan; where a run has more than fifty points, what it would have cost at the next of twenty steps. To stop here
    because of what was seen costs the plan.

    >>> Point(117, 1.0, 0.4, learning_rate=0.8, clip=0.3, noise_multiplier=0.9, held_out=0.95).held_out
    0.95
    """

    step: int
    epoch: float
    epsilon: float
    learning_rate: float
    clip: float
    noise_multiplier: float
    held_out: float | None


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows: steps taken and in all, a bound on ε so far, the last metric, and time.

    ``epsilon``, at ``delta``, is that of the `Point` of this step, or else of one of the next steps: see `Spent`. The
    last values are those of this step's learning rate, clip bound and noise multiplier. ``resumed`` marks a run that
    goes on in its folder.

    >>> Progress(5, 100, 0.4, None, seconds=1.0, seconds_left=19.0).step
    5
    """

    step: int
    steps: int
    epsilon: float
    held_out: float | None
    seconds: float
    seconds_left: float
    delta: float = math.nan
    learning_rate: float = math.nan
    clip: float = math.nan
    noise_multiplier: float = math.nan
    resumed: bool = False


class Spent:
    """The ε of the first steps of a run, by the accountant of its plan.

    ``before`` is what was spent under keys before the present one, which came into use at step ``began``. `at` prices
    a step. A call prices twenty steps of the run at most and gives the next of them, a bound, since further steps only
    add.

    >>> from dpgrad.training.plan import make
    >>> plan = make("dpgd", rows=1000, steps=100, noise_multiplier=20.0, delta=1e-5)
    >>> spent = Spent(plan)
    >>> spent(3) == spent(5) == plan.epsilon_after(5) > spent.at(3), spent(100) == plan.guarantee.epsilon
    (True, True)
    """

    def __init__(self, plan: Plan, before: Event = NOTHING, began: int = 0) -> None:
        self._plan, self._before, self._began = plan, before, began
        stage = -(-plan.steps // _STAGES)
        ends = range(0, plan.steps + stage, stage)
        self._priced = sorted({min(end + part, plan.steps) for end in ends for part in (0, -(-stage // 2))})
        self._known = {plan.steps: plan.guarantee.epsilon}

    @property
    def prices(self) -> int:
        """How many steps of the run are priced for calls alone; that of the plan is known."""
        return sum(0 < step < self._plan.steps for step in self._priced)

    def __call__(self, step: int) -> float:
        """A bound on the ε of the first ``step`` steps, at little cost."""
        return self._known.get(step) or self.at(self._priced[bisect_left(self._priced, step)])

    def at(self, step: int) -> float:
        """The ε of the first ``step`` steps; at most that of the plan, which bounds each part of it."""
        if step not in self._known:
            plan = self._plan
            found = account(self._event(step), plan.mechanism.relation, plan.guarantee.accountant).epsilon(plan.delta)
            self._known[step] = min(found, plan.guarantee.epsilon)
        return self._known[step]

    def _event(self, step: int) -> Event:
        """The event of the first ``step`` steps, of steps under an earlier key, and of other releases."""
        return Compose((self._plan.also_released, self._before, charges(self._plan.mechanism, self._began, step)))


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in evaluation mode and nothing is recorded for gradients.

    >>> model = nn.Dropout()
    >>> with judging(model):
    ...     model.training
    False
    >>> model.training
    True
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def evaluate(model: nn.Module, metric: Metric, held_out: Any, collate: source.Collate = default_collate) -> float:
    """The mean of a metric over held-out rows, in evaluation mode.

    >>> from dpgrad.training.losses import accuracy, metric_named, NamedLoss
    >>> rows = torch.eye(2), torch.tensor([0, 1])
    >>> evaluate(nn.Identity(), metric_named("accuracy", NamedLoss("cross-entropy")), rows)
    1.0
    """
    rows = source.rows(held_out)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    with judging(model):
        for start in range(0, rows, _JUDGED):
            batch = source.gathered(held_out, torch.arange(start, min(start + _JUDGED, rows)), device, collate)
            try:
                total += row_losses(metric.values, model, batch, min(_JUDGED, rows - start)).double().sum()
            except ValueError as error:
                raise DataError(f"metric {metric.name} on held_out: {error}") from error
    return float(total) / rows


def refuse_held_out(held_out: Any, data: Any) -> None:
    """Refuse held-out rows that are none, that are not numbers, or that are rows of the training ``data``.

    Either may be in any form. Rows are the same where they lie in the same memory, also as parts of it, in one file
    of the datasets library, or have the same index in one Dataset. Copies, and what other Datasets hold, cannot be
    seen.

    >>> rows = torch.zeros(3, 2), torch.zeros(3)
    >>> refuse_held_out(rows, rows)
    Traceback (most recent call last):
    dpgrad.errors.DataError: held_out are rows of the training data: a figure on them would be shown without ...
    """
    rows = forms.taken(held_out, "held_out")
    if not source.rows(rows):
        raise DataError("held_out must hold at least one row, got none: leave it out to train without evaluation")
    if share_rows(held_out, data):
        raise DataError(
            "held_out are rows of the training data: a figure on them would be shown without noise; keep rows apart"
        )
    if isinstance(rows, Dataset):
        return
    for path, leaf in pytree.tree_flatten_with_path(rows)[0]:
        for few in source.blocks(leaf, 1 << 16):
            if few.is_floating_point() and not bool(few.isfinite().all()):
                raise DataError(f"held_out{pytree.keystr(path)} holds values that are not finite: remove those rows")


def share_rows(one: Any, other: Any) -> bool:
    """Whether rows of ``one`` are rows of ``other``, by their index in one Dataset or by their place in memory.

    >>> rows = torch.zeros(3, 2)
    >>> share_rows(rows[:2], rows[1:]), share_rows(rows[:2], rows[2:])
    (True, False)
    """
    (mine, own), (yours, others) = _unwrapped(one), _unwrapped(other)
    if mine is yours:
        return bool(np.isin(own, others).any())
    if isinstance(mine, Dataset) or isinstance(yours, Dataset):
        return False
    pairs = product(pytree.tree_leaves(mine), pytree.tree_leaves(yours))
    return any(_meet(leaf, own, far, others) for leaf, far in pairs)


def _meet(leaf: Any, own: Indices, far: Any, others: Indices) -> bool:
    """Whether rows of two leaves, given by their indices, are the same."""
    if _lies(leaf) and _lies(far):
        return _overlap(_places(leaf, own), _places(far, others))
    if tables.chunked(leaf) and tables.chunked(far):
        here, there = tables.origins(leaf, own), tables.origins(far, others)
        return any(bool(np.isin(here[origin], there[origin]).any()) for origin in here.keys() & there.keys())
    return leaf is far


def _lies(leaf: Any) -> bool:
    """Whether the values of a leaf are in memory here."""
    return isinstance(leaf, Tensor | np.ndarray)


def _length(leaf: Any) -> int:
    return len(leaf) if _lies(leaf) or tables.chunked(leaf) else 1


def _unwrapped(data: Any) -> tuple[Any, Indices]:
    """The data that a Subset, a TensorDataset or a datasets.Dataset takes its rows from, and which rows of them."""
    data = forms.places(data)
    by_index = isinstance(data, Dataset) or forms.selected(data) is not None
    count = length(data) if by_index else max(map(_length, pytree.tree_leaves(data)), default=0)
    rows: Indices = np.arange(count)
    while isinstance(data, Subset):
        inner: Any = data.dataset
        rows = np.asarray(data.indices, dtype=np.int64)[rows] % len(inner)  # they may count from the end
        data = inner
    if (found := forms.selected(data)) is not None:
        data, chosen = found
        rows = chosen[rows]
    return (data.tensors if isinstance(data, TensorDataset) else data), rows


def _places(leaf: Any, rows: Indices) -> tuple[Indices, int]:
    """Where in memory the given rows of a tensor or array begin, in order, and how many bytes each takes.

    Where rows are interleaved, as in an array of columns, one value stands for each: that at the lowest address.
    """
    given = isinstance(leaf, Tensor)
    size, address = (leaf.element_size(), leaf.data_ptr()) if given else (leaf.itemsize, leaf.ctypes.data)
    strides = [stride * size for stride in leaf.stride()] if given else leaf.strides
    ends = [(length - 1) * stride for length, stride in zip(leaf.shape[1:], strides[1:], strict=True)]
    first = sum(min(0, end) for end in ends)
    span = sum(max(0, end) for end in ends) - first + size
    if span > abs(strides[0]):
        span = size
    return np.sort(address + first + strides[0] * rows), span if 0 not in leaf.shape else 0


def _overlap(one: tuple[Indices, int], other: tuple[Indices, int]) -> bool:
    (starts, size), (others, length) = one, other
    after, before = np.searchsorted(starts, others - size, "right"), np.searchsorted(starts, others + length, "left")
    return bool(size and length and (before > after).any())


class RunWatch:
    """Looks at a run after its steps: evaluates every so many, records a point, reports progress.

    >>> from dpgrad.training.plan import make
    >>> watch = RunWatch(make("dpgd", rows=9, steps=2, noise_multiplier=1.0, delta=0.1), 1, lambda: 0.5, None)
    >>> watch.after(1, learning_rate=0.1), [point.held_out for point in watch.points]
    (False, [0.5])
    """

    def __init__(
        self,
        plan: Plan,
        every: int,
        score: Callable[[], float] | None,
        progress: Callable[[Progress], object] | None,
        evaluated: Callable[[Point], object] = lambda point: None,
    ) -> None:
        self.points: list[Point] = []
        self._plan, self._every, self._score = plan, every, score
        self._progress, self._evaluated = progress, evaluated
        self._resumed = False
        self.clip_after: Callable[[int], float] | None = None  # where the clip bound follows the norms
        self._spent = Spent(plan)
        self._began, self._first, self._last = time.perf_counter(), 0, plan.steps

    def begin(
        self, step: int, points: Sequence[Sequence[Any]], last: int, before: Event = NOTHING, began: int = 0
    ) -> None:
        """Go on after ``step`` steps of ``last``, with the points there were; the rest is as in `Spent`."""
        self._first, self._last, self._resumed = step, last, True
        self._spent = Spent(self._plan, before, began)
        self.points = [Point(*values) for values in points if values[0] <= step]

    def plain_points(self) -> list[list[Any]]:
        """The points as plain values, for a checkpoint."""
        return [list(astuple(point)) for point in self.points]

    def after(self, step: int, learning_rate: float) -> bool:
        """Look at the run after ``step`` steps; whether whoever was shown its progress wants it stopped.

        A step that is looked at again, since it could not be shown to all, is not evaluated again.
        """
        enough = False
        if step % self._every == 0 or step == self._last:
            each = self._plan.steps <= _FEW * self._every or step == self._last
            if not self.points or self.points[-1].step < step:
                self.points.append(
                    self._point(step, learning_rate, self._spent.at(step) if each else self._spent(step))
                )
            enough = self._evaluated(self.points[-1]) is True
        if self._progress is None:
            return enough
        return self._progress(self.now(step, learning_rate)) is True or enough

    def now(self, step: int, learning_rate: float) -> Progress:
        """What may be shown after ``step`` steps."""
        seconds = time.perf_counter() - self._began
        left = seconds / max(1, step - self._first) * (self._last - step)
        held_out = self.points[-1].held_out if self.points else None
        return Progress(
            step, self._last, self._spent(step), held_out, seconds, left, self._plan.delta, learning_rate,
            *self._noise(step), self._resumed,
        )  # fmt: skip

    def finish(self, step: int, learning_rate: float) -> None:
        """Add the last point of a run that ends before its plan does."""
        if step and (not self.points or self.points[-1].step < step):
            self.points.append(self._point(step, learning_rate, self._spent.at(step)))
            self._evaluated(self.points[-1])

    def _noise(self, step: int) -> tuple[float, float]:
        """The clip bound and the noise multiplier of the last of ``step`` steps."""
        mechanism, last = self._plan.mechanism, max(0, step - 1)
        clip = schedules.as_schedule(mechanism.clip)(last) if self.clip_after is None else self.clip_after(last)
        return clip, mechanism.multiplier_at(last)

    def _point(self, step: int, learning_rate: float, epsilon: float) -> Point:
        held_out = None if self._score is None else self._score()
        return Point(step, step / self._plan.steps_per_epoch, epsilon, learning_rate, *self._noise(step), held_out)
