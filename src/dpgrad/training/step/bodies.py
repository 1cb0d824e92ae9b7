"""The two bodies of a private step, on tensors at fixed addresses.

*accumulate* takes the rows of one piece to their clipped sum and adds it to those of the pieces before; *release* adds
noise to the total, divides and writes ``.grad``. They are called (`taped`) or captured and replayed (`graphed`). The
last piece of a step does both, parameter by parameter, so no second copy of all sums is held. On several ranks
accumulate ends with the sums in one buffer, and release is the exchange that follows it (`release.Exchanged`).

Guarantee: everything a body reads of a step lies in its buffers, so a replay computes the step they describe. Rows
beyond `count` have weight 0. An example whose gradient is not finite is left out within the body.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpgrad.grads import lanes
from dpgrad.grads.batch import as_rows
from dpgrad.grads.clip import PerExample, Scaled, ZeroRows
from dpgrad.grads.sums import Batch, Scale, sum_dtype, trainable
from dpgrad.grads.watch import held
from dpgrad.mechanism.adaptive import WIDTH
from dpgrad.randomness.device_noise import Segment
from dpgrad.training.step.release import Figures, Sharded, release
from dpgrad.training.step.work import Work, width

__all__ = ["Bodies", "Form"]


_FINE = 1 << 20  # parts of a count
_SMALL = 1 << 18  # values of a sum that is small enough to be formed on a side stream


class Form(NamedTuple):
    """Which body: bodies that differ in any of these are captured separately."""

    size: int  # places
    first: bool  # of its step
    last: bool
    many: bool = False  # whether the step has more than two pieces
    past: int = 0  # iterates of an inner momentum stored so far
    observed: bool = False


class Bodies:
    """The bodies of one run on one model. ``rows`` and ``index`` are set before a body is called."""

    def __init__(self, work: Work) -> None:
        self._work, device = work, work.device
        parameters = trainable(work.model)
        self._groups = work.groups()
        self._figures = Figures(work.mechanism, self._groups, work.quantile)
        self._release = release(work.model, work.mechanism, self._figures, work.key, work.ranks)
        self.sharded = self._release if isinstance(self._release, Sharded) else None
        # Parameters that are gathered for a pass are not known yet, and must not be written to.
        self._drop = None if self.sharded else ZeroRows(held(work.model, work.loss, work.rule))
        self._dtype = sum_dtype(next(iter(parameters.values())).dtype)
        used = max(self._groups.values()) + 1 if self._groups else 1
        self._clips = torch.ones(used, 1, dtype=torch.float64, device=device)
        self._clips_are = [1.0] * used
        self._below = torch.zeros(used, dtype=torch.float64, device=device)  # Σ(bᵢ − ½), where bounds follow norms
        self._step = 0
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._from_start = torch.zeros((), dtype=torch.int64, device=device)
        self._carried: dict[
            tuple[Segment, bool], Tensor
        ] = {}  # the sums of the earlier pieces, in steps of two pieces and of more
        self._raw: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self.rows: Batch = None
        self.index: Tensor | None = None  # the examples' places in the data, if each example has an average
        self.seen: dict[Form, tuple[Tensor, Tensor]] = {}  # norms and factors of observed pieces
        self.lanes: list[torch.cuda.Stream] = []

    def at(self, step: int) -> None:
        """Fill the buffers of a step."""
        work = self._work
        for place, clip in enumerate(self._figures.clips(step)[: len(self._clips_are)]):
            if clip != self._clips_are[place]:
                self._clips[place].fill_(clip)
                self._clips_are[place] = clip
        if work.average is not None:
            self._from_start.fill_(step - work.start)
        self._step = step
        self._release.at(step)

    def hold(self, count: int) -> None:
        """How many of the rows of the next piece count."""
        self._count.fill_(count)

    def accumulate(self, form: Form, dry: bool = False) -> None:
        """Add a piece to the sums, and write ``.grad`` if it is the last; ``dry`` keeps the sums of other pieces."""
        work = self._work
        batch, weights, wide = self._weighted(form.size)
        if work.averages is not None:
            index = torch.where(weights.view(-1, wide)[:, 0] > 0, self._own_index(form.size), work.averages.examples)
            batch = index.repeat_interleave(wide), batch
        plain = None
        with lanes.opened(self.lanes), work.scratch.opened():
            if form.observed and (work.inner_momentum is not None or work.averages is not None):
                assert work.engine is not None
                inner = batch if work.averages is None else batch[1]
                plain = work.engine(work.model, work.loss, inner, weights, wide)
            engine = work.engine_at(self._from_start if weights.is_cuda else int(self._from_start))
            found = engine(work.model, work.loss, batch, weights, wide)
            scale = _Noted(work.scale(self._clips))
            with found.scaled(scale, self._groups, self._drop) as scaled:
                if form.observed:
                    self._observe(scaled, scale, plain, form, dry)
                if work.quantile is not None and not dry:
                    self._add_below(_below(scaled, weights.view(-1, wide), self._clips), form)
                for place, part in enumerate(self._release.parts):
                    if len(part.names) == 1 and part.values <= _SMALL:  # too little to fill a device
                        with lanes.on_lane(place):
                            self._add(part, self._summed(part, scaled), form, dry)
                        continue
                    total = self._summed(part, scaled)
                    with lanes.on_lane(place, total):
                        self._add(part, total, form, dry)
        if form.last:
            self._release.finish()

    def inputs(self, size: int) -> list[Tensor]:
        """The inputs of `sums` other than parameters and buffers: a piece's rows, their weights and the clip bounds."""
        batch, weights, _ = self._weighted(size)
        return [*pytree.tree_leaves(batch), weights, self._clips]

    def sums(self, size: int) -> Callable[..., tuple[Tensor, ...]]:
        """The part of `accumulate` that writes nothing, as a function of `inputs`: the sums, part by part.

        Where clip bounds follow the norms, the counts of norms below them come next. Last comes whether every
        gradient is finite. Elsewhere the sums are worthless: examples are not left out.
        """
        form = pytree.tree_structure(self._weighted(size)[0])
        wide = 1 if not self._work.several_rows else width(self.rows)

        def found(*given: Tensor) -> tuple[Tensor, ...]:
            *rows, weights, clips = given
            work = self._work
            batch = pytree.tree_unflatten(rows, form)
            each = work.engine_at(0)(work.model, work.loss, batch, weights, wide)
            with each.scaled(work.scale(clips), self._groups, look=False) as scaled:
                sums = [self._summed(part, scaled) for part in self._release.parts]
                if work.quantile is not None:
                    sums.append(_below(scaled, weights.view(-1, wide), clips))
                return *sums, scaled.keep.all()

        return found

    def add(self, totals: Sequence[Tensor], form: Form) -> None:
        """Add the sums of a piece to those of the earlier pieces, or release them if it is the last."""
        if self._work.quantile is not None:
            *totals, below = totals
            self._add_below(below, form)
        add = self._release.add if form.first and form.last else partial(self._add, form=form, dry=False)
        for part, total in zip(self._release.parts, totals, strict=True):
            add(part, total)
        if form.last:
            self._release.finish()

    def empty(self) -> None:
        """`accumulate` of a step without examples, in one piece: pure noise."""
        self._below.zero_()
        if self.sharded is not None:  # sums that are not given count as zero
            return
        for part in self._release.parts:
            self._release.add(part, torch.zeros(part.values, dtype=self._dtype, device=self._clips.device))
        self._release.finish()

    def show(self) -> Mapping[str, Tensor]:
        """Set every parameter's ``.grad`` and return the noisy means by name; update clip bounds that follow the norms.

        Several ranks add up their sums and counts here.
        """
        noisy = self._release.show()
        if self._work.quantile is not None:
            counts = self._work.ranks.total(self._below, self._step)
            self._work.quantile.follow(self._step, counts)  # it waits for a CUDA device
        return noisy

    def observed(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The clipped and the unclipped sums of an observed step. Private."""
        return self._totals, self._raw

    def nothing(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same for a step without examples."""
        parameters = trainable(self._work.model).items()
        zero = {name: torch.zeros(p.shape, dtype=self._dtype, device=p.device) for name, p in parameters}
        return zero, zero

    def _weighted(self, size: int) -> tuple[Batch, Tensor, int]:
        """The rows, the weight of each within its example, and the number of rows per example."""
        batch = pytree.tree_map(lambda leaf: leaf[:size], self.rows)
        filled = (torch.arange(size, device=self._count.device) < self._count).to(self._dtype)
        if not self._work.several_rows:
            return batch, filled, 1
        wide = width(batch)
        return as_rows(batch), (filled / wide).repeat_interleave(wide), wide

    def _own_index(self, size: int) -> Tensor:
        assert self.index is not None
        return self.index[:size]

    def _summed(self, part: Segment, scaled: Scaled) -> Tensor:
        """The sums of some parameters one after another; small ones are formed side by side."""
        if len(part.names) == 1:
            return scaled.sum(part.names[0]).reshape(-1)
        sums = []
        for place, name in enumerate(part.names):
            with lanes.on_lane(place):
                sums.append(scaled.sum(name).reshape(-1))
        lanes.join()
        return torch.cat(sums)

    def _add(self, part: Segment, total: Tensor, form: Form, dry: bool) -> None:
        """Add a piece in float64 if there are several: τ covers the rounding of each piece, not that of a long sum."""
        if self.sharded is not None:  # the rank that holds a shard adds the pieces of all ranks
            self.sharded.add(part, total)
            return
        if not (form.first and form.last):
            carried = self._carry(part, total, form)
            if form.last:
                total = total.to(torch.float64, copy=True).add_(carried)
            elif not dry:
                carried.copy_(total) if form.first else carried.add_(total)
        if form.last:
            if form.observed:
                self._totals.update(_kept(self._totals, part.split(total, trainable(self._work.model))))
            self._release.add(part, total)

    def _add_below(self, below: Tensor, form: Form) -> None:
        self._below.copy_(below) if form.first else self._below.add_(below)

    def _carry(self, part: Segment, total: Tensor, form: Form) -> Tensor:
        """The buffer of the earlier pieces' sums; of two pieces, the first keeps its type.

        A full piece may be summed in float64 and the rest of a step in float32: the first piece decides, for all.
        """
        of = part, form.many
        if form.first:
            dtype = torch.float64 if form.many else total.dtype
            if of not in self._carried or self._carried[of].dtype != dtype:
                self._carried[of] = torch.zeros(part.values, dtype=dtype, device=total.device)
        elif of not in self._carried:  # a later piece that is tried on its own must not choose the type
            raise RuntimeError("the first piece of a step comes before the others")
        return self._carried[of]

    def _observe(self, scaled: Scaled, scale: "_Noted", plain: PerExample | None, form: Form, dry: bool) -> None:
        """Keep the norms and factors of a piece, and add up its gradients without scaling them."""
        assert scale.factors is not None
        self.seen[form] = scaled.norms, scale.factors
        names = list(trainable(self._work.model))
        if plain is None:
            raw = {name: scaled.plain(name) for name in names}
        else:
            with plain.scaled(torch.ones_like, None, self._drop) as every:
                raw = {name: every.sum(name) for name in names}
        if not form.first:
            raw = {name: raw[name] + self._raw[name] for name in names}
        if not dry or not self._raw:
            self._raw.update(_kept(self._raw, raw))


def _below(scaled: Scaled, weights: Tensor, clips: Tensor) -> Tensor:
    """Σ(bᵢ − ½) of each group, where bᵢ says whether the norm of example i is at most its clip bound: (groups,).

    Padding and examples that are left out add nothing. Multiples of 2^-20 add up without rounding.
    """
    counted = scaled.keep & (weights[:, 0] > 0)
    below = (0.5 + (1 - scaled.norms / clips) / (2 * WIDTH)).clamp(0, 1)
    return torch.where(counted, (below * _FINE).round() / _FINE - 0.5, 0).sum(1)


class _Noted:
    """A scale that remembers the factors it returned."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self.factors: Tensor | None = None

    def __call__(self, norms: Tensor) -> Tensor:
        self.factors = self._scale(norms)
        return self.factors


def _kept(memory: dict[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the values into the memory kept for them."""
    return {name: memory[name].copy_(value) if name in memory else value.clone() for name, value in values.items()}
