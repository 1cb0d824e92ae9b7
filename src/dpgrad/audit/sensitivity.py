"""Sensitivity, coupled: the same seed on two neighbouring datasets. The noise cancels, and the difference is what one
row contributes. No chance is involved: a difference beyond the clip bound refutes the claim.

Under add-remove the neighbours have one row more or less. Under the other relations the number of rows is public, and
one row's loss is set to 0 (zero-out) or the row is exchanged (replace-one, at twice the bound).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpgrad.accounting.events import Relation
from dpgrad.audit import moving
from dpgrad.audit.exact import Array
from dpgrad.audit.record import Check
from dpgrad.audit.trials import NotFiniteError, UnderAudit, joined, rows_of
from dpgrad.errors import AuditError
from dpgrad.grads.sums import trainable
from dpgrad.mechanism import sampling
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["SCALES", "Reached", "ascended", "check", "overflow"]

SCALES = (1e-3, 1.0, 30.0, 1e3)  # by which a real row is multiplied
SLACK = 1e-3  # of the clip bound
_COMPANY = 6  # real rows together with a canary
_SAMPLED = 128  # rows from which batches are drawn
_MANY = 256  # canaries that push the same way: a sum that is rounded before noise shows here
_FALLING = 8  # steps of bounds that fall
_LATER = 2  # rows that are tried at the last steps too
_CLIMBS = 4
_ASCENTS = 25
_NARROW = "contributions beyond the clip bound by less than gradients narrower than float32 round"


@dataclass(frozen=True)
class _Pair:
    """Two neighbouring datasets, and how many clip bounds may lie between their sums."""

    name: str
    one: Any
    other: Any
    canaried: bool
    reach: float = 1.0

    @property
    def counted(self) -> float:
        """How far the counts of ``adaptive_clip`` may lie apart, over a row's bound of ½.

        A row that is there in both may go from below its clip bound to beyond, also one whose loss is 0.
        """
        one, other = (len(pytree.tree_leaves(data)[0]) for data in (self.one, self.other))
        return 2.0 if one == other else 1.0


@dataclass(frozen=True)
class Reached:
    """The check, the largest contribution over the clip bound, and what could not be tried."""

    check: Check
    largest: float
    not_tried: tuple[str, ...] = ()


def check(target: UnderAudit, canaries: int) -> Reached:
    """The largest contribution of one row that was found, over its bound, in any group at any step that was tried."""
    search = _Search(target)
    search.run(canaries)
    says = f"largest contribution {search.largest:.4f} of the clip bound ({search.where})"
    if search.elsewhere is not None:
        says += f"; {search.elsewhere}"
    violated = search.largest > 1 + SLACK or search.elsewhere is not None
    return Reached(Check("sensitivity", None, says, violated=violated), search.largest, tuple(search.not_tried))


def overflow(target: UnderAudit) -> Check:
    """Whether a row whose gradient is infinite, or no number, contributes no more than any other row."""
    search = _Search(target)
    for push in (math.inf, math.nan):
        try:
            search.contribution(search.pushed(push), _two_from(0, target.mechanism.steps))
        except NotFiniteError:
            says = f"a row whose gradient is {push} makes the release one that is not finite"
            return Check("overflow", None, says, violated=True)
    says = f"largest contribution {search.largest:.4f} of the clip bound, of rows whose gradients are not finite"
    return Check("overflow", None, says, violated=search.largest > 1 + SLACK)


class _Search:
    """The largest contribution so far."""

    def __init__(self, target: UnderAudit) -> None:
        self.target, self.largest, self.where = target, 0.0, "none"
        self.not_tried: list[str] = []
        self.elsewhere: str | None = None
        self._released: dict[tuple[int, range, bool], Any] = {}
        self._ascents: dict[int, Any] = {}
        rows = rows_of(target.data, slice(0, _COMPANY))
        # where bounds follow counts they differ between neighbours, and so would what real rows contribute later
        self._company = {False: rows, True: target.columns(rows, 0.0 if target.counts else 1.0, 0.0)}

    def run(self, canaries: int) -> None:
        """Search until a contribution exceeds its bound, the canaries that are found soonest first."""
        steps = self.target.mechanism.steps
        self.same_twice(_two_from(0, steps))
        first = range(1) if self.target.counts else _two_from(0, steps)
        for part in (
            lambda: self.contribution(self.pushed(), _two_from(0, steps), few=False),
            self.silent,
            self.falling,
            self.sampled,
            lambda: self.contribution(self.crowd(), first),
            lambda: self.later(steps),
            lambda: self.real(canaries, first),
            lambda: self.climb(first),
        ):
            if self.largest <= 1 + SLACK:
                part()

    def later(self, steps: int) -> None:
        """The gradient canary at later steps."""
        for start in sorted({steps // 2, steps - 1} - {0}):
            self.contribution(self.pushed(), _two_from(start, steps))

    def real(self, canaries: int, first: range) -> None:
        """Real rows at the first steps, and those that contribute most at the last ones."""
        found = {}
        for name, row in self.rows(canaries):
            for pair in self.of_row(name, row):
                found[pair.name] = self.contribution(pair, first), pair
                if self.largest > 1 + SLACK:
                    return
        steps = self.target.mechanism.steps
        if steps > len(first) and not self.target.counts:
            for _, pair in sorted(found.values(), key=lambda one: one[0], reverse=True)[:_LATER]:
                self.contribution(pair, _two_from(steps - 1, steps))

    def same_twice(self, steps: range) -> None:
        """Refuse code that a seed does not determine: nothing can be compared then."""
        target, data = self.target, self._company[False]
        one, other = (target.released(data, target.seed, steps, target.full, few=True) for _ in range(2))
        if not np.allclose(one.sums, other.sums, rtol=0, atol=max(one.rounding, 1e-12)):
            raise AuditError(
                "run gave different gradients for the same trial: draw all randomness from trial.seed, and leave the "
                "weights where they are (learning rate 0)"
            )

    def pushed(self, push: float = 1.0) -> _Pair:
        target, company = self.target, self._company[True]
        row = rows_of(target.data, slice(0, 1))
        absent = company if self._may_be_absent else joined(company, target.columns(row, 0.0, 0.0))
        present = joined(company, target.columns(row, 1.0, push))  # code that sees layers alone sees the row's own loss
        return _Pair("gradient canary", absent, present, canaried=True)

    def silent(self) -> None:
        """A row without a gradient, which only a count may show."""
        target, company = self.target, self._company[True]
        if target.counts and self._may_be_absent:
            row = target.columns(rows_of(target.data, slice(0, 1)), 0.0, 0.0)
            self.contribution(_Pair("a row without a gradient", company, joined(company, row), True), range(1))

    def falling(self) -> None:
        """The gradient canary while clip bounds fall."""
        if self.target.counts:
            mechanism = moving.drifting(self.target.full, up=False)
            most = min(mechanism.steps, _FALLING, moving.limit(mechanism, _COMPANY + 1))
            self.contribution(self.pushed(), range(most), mechanism)

    @property
    def _may_be_absent(self) -> bool:
        return self.target.mechanism.relation is Relation.ADD_REMOVE

    def rows(self, canaries: int) -> Iterator[tuple[str, Any]]:
        target = self.target
        for place in range(min(canaries, target.rows)):
            row = rows_of(target.data, slice(place, place + 1))
            floating = [leaf for leaf in pytree.tree_leaves(row) if leaf.is_floating_point()]
            for scale in SCALES if floating and not place else (1.0,):
                named = f"row {place}" if scale == 1 else f"row {place} times {scale:g}"
                yield named, pytree.tree_map(lambda x, s=scale: x * s if x.is_floating_point() else x, row)
        for place in range(min(2, canaries, target.rows)):
            row = self._ascended(place)
            if row is not None:
                yield f"row {place} after gradient ascent", row

    def _ascended(self, place: int) -> Any:
        if place not in self._ascents:
            self._ascents[place] = ascended(self.target, rows_of(self.target.data, slice(place, place + 1)))
            if self._ascents[place] is None and (why := "rows found by gradient ascent") not in self.not_tried:
                self.not_tried.append(why)
        return self._ascents[place]

    def of_row(self, name: str, row: Any) -> Iterator[_Pair]:
        target, company = self.target, self._company[False]
        if self._may_be_absent:
            yield _Pair(name, company, joined(company, row), canaried=False)
            return
        wide = self._company[True]
        absent, present = (joined(wide, target.columns(row, weight, 0.0)) for weight in (0.0, 1.0))
        yield _Pair(name, absent, present, canaried=True)
        if target.mechanism.relation is Relation.REPLACE_ONE:
            other = rows_of(target.data, slice(target.rows - 1, target.rows))
            yield _Pair(f"{name}, exchanged", joined(company, other), joined(company, row), canaried=False, reach=2.0)

    def crowd(self) -> _Pair:
        """One canary more among many that push the same way."""
        target = self.target
        many = min(_MANY, moving.most_rows(target.mechanism) - 1) if target.counts else _MANY
        row = rows_of(target.data, torch.zeros(many + 1, dtype=torch.int64))
        present = target.columns(row, 1.0, 1.0)
        others = torch.ones(many + 1)
        others[-1] = 0.0
        one_less = pytree.tree_map(lambda leaf: leaf[:-1], present)
        absent = one_less if self._may_be_absent else target.columns(row, others, others)
        return _Pair(f"one of {many + 1} equal canaries", absent, present, canaried=True)

    def contribution(self, pair: _Pair, steps: range, mechanism: Mechanism | None = None, few: bool = True) -> float:
        """How far apart two neighbours are, over the bound; the largest is kept."""
        target = self.target
        moved, rounding = self._moved(pair, steps, mechanism, few)
        found = [(apart / (moving.MOVED * pair.counted), ", count") for apart in self._counted(moved)]
        for group, places in target.places().items():
            apart = np.sqrt(np.square(moved[:, places.astype(int)]).sum(1)) - rounding
            named = "" if group is None else f", group {group.pattern}"
            found.append((apart / (target.mechanism.clips(steps, group) * pair.reach), named))
        largest = 0.0
        for ratios, named in found:
            at = int(np.argmax(ratios))
            largest = max(largest, float(ratios[at]))
            if ratios[at] > self.largest:
                self.largest = float(ratios[at])
                self.where = f"{pair.name}, step {steps[at]}{named}"
        return largest

    def _counted(self, moved: Array) -> Array:
        """How far each count was moved: (groups, steps)."""
        return np.abs(moved[:, moved.shape[1] - self.target.counts :].T)

    def _moved(self, pair: _Pair, steps: range, mechanism: Mechanism | None, few: bool) -> tuple[Array, float]:
        """The difference of two neighbours under one seed, and what rounding may have added."""
        target = self.target
        how = mechanism or target.full
        key = id(pair.one), steps, few
        one = self._released.get(key)
        if one is None:
            one = target.released(pair.one, target.seed, steps, how, canaried=pair.canaried, few=few)
            if any(pair.one is company for company in self._company.values()):  # which lives as long as this search
                self._released[key] = one
        other = target.released(pair.other, target.seed, steps, how, canaried=pair.canaried, few=few)
        if one.left is not None and other.left is not None and not _same(one.left, other.left):
            self.elsewhere = f"what a step leaves in the weights and buffers of the model shows a row ({pair.name})"
        moved, rounding = other.sums - one.sums, max(one.rounding, other.rounding)
        if not other.single and _NARROW not in self.not_tried:
            self.not_tried.append(_NARROW)
        return moved, rounding

    def climb(self, steps: range) -> None:
        """Change real rows at random, and keep what contributes more."""
        target = self.target
        generator = torch.Generator().manual_seed(target.seed + 1)
        row = rows_of(target.data, slice(0, 1))
        best = max(self.contribution(pair, steps) for pair in self.of_row("row 0", row))
        for turn in range(_CLIMBS):
            tried = pytree.tree_map(lambda leaf, column, t=turn: _changed(leaf, column, t, generator), row, target.data)
            found = max(self.contribution(pair, steps) for pair in self.of_row("a row found by search", tried))
            if found > best:
                best, row = found, tried

    def sampled(self) -> None:
        """The canary in the batches that the mechanism's own sampler draws, as the first row of the data."""
        target = self.target
        sampler = target.mechanism.sampler
        if isinstance(sampler, sampling.FullBatch):
            return
        steps = target.mechanism.steps
        sized = isinstance(sampler, sampling.FixedSize | sampling.Shuffle)
        rows = target.rows if sized else min(target.rows, _SAMPLED)
        sampling_rate = (
            sampler.sampling_rate_at(0) if isinstance(sampler, sampling.Poisson) else 1 / sampler.steps_per_epoch
        )
        count = min(steps, 60, max(3, math.ceil(7 / max(sampling_rate, 1e-3))))
        own = torch.zeros(rows)
        own[0] = 1.0
        data = rows_of(target.data, slice(0, rows))
        absent, present = target.columns(data, 0.0, 0.0), target.columns(data, own, own)
        pair = _Pair("gradient canary in sampled batches", absent, present, canaried=True)
        if target.counts:
            drawn = sampling_rate * rows
            count = min(count, moving.limit(target.mechanism, drawn + 6 * math.sqrt(drawn)))
        self.contribution(pair, range(count), target.mechanism, few=False)
        if target.counts:
            self.counted_elsewhere(pair, range(count))
        self.drawn_by_value(pair, data, own, range(count))

    def drawn_by_value(self, pair: _Pair, data: Any, own: Tensor, steps: range) -> None:
        """Whether the canary is drawn into the same batches where its own numbers are others, and its loss larger."""
        target = self.target
        turned = pytree.tree_map(lambda leaf: torch.cat([_turned(leaf), leaf[1:]]), data)
        other = _Pair(pair.name, pair.other, target.columns(turned, own, 3 * own), canaried=True)
        moved, _ = self._moved(other, steps, target.mechanism, few=False)
        apart = np.sqrt(np.square(moved[:, : moved.shape[1] - target.counts]).sum(1))
        elsewhere = np.flatnonzero(apart > 0.5 * self._least_clips(steps))
        if len(elsewhere):
            self.elsewhere = f"a row with other values is not in the same batches (step {steps[int(elsewhere[0])]})"

    def _least_clips(self, steps: range) -> Array:
        """The smallest clip bound of each step."""
        least: Array = np.min([self.target.mechanism.clips(steps, group) for group in self.target.places()], axis=0)
        return least

    def counted_elsewhere(self, pair: _Pair, steps: range) -> None:
        """Whether the canary was counted where it was in no batch."""
        moved, _ = self._moved(pair, steps, self.target.mechanism, few=False)
        apart = np.sqrt(np.square(moved[:, : moved.shape[1] - self.target.counts]).sum(1))
        drawn = apart > 0.5 * self._least_clips(steps)
        elsewhere = np.flatnonzero((self._counted(moved).max(0) > moving.MOVED / 2) & ~drawn)
        if len(elsewhere):
            self.elsewhere = f"a row that was not in the batch of step {steps[int(elsewhere[0])]} was counted"


def _two_from(step: int, steps: int) -> range:
    """The step and the one before it, so what is kept from step to step takes part."""
    return range(min(max(step - 1, 0), max(steps - 2, 0)), min(max(step + 1, 2), steps))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _turned(leaf: Tensor) -> Tensor:
    """The first row with its numbers negated; of whole numbers, the last row that differs from it."""
    if leaf.is_floating_point():
        return -leaf[:1]
    others = leaf[(leaf != leaf[:1]).flatten(1).any(1)] if leaf.ndim > 1 else leaf[leaf != leaf[:1]]
    return others[-1:] if len(others) else leaf[:1]


def _changed(leaf: Tensor, column: Tensor, turn: int, generator: torch.Generator) -> Tensor:
    if leaf.is_floating_point():
        moved = torch.randn(leaf.shape, generator=generator).to(leaf)
        return leaf + moved * (leaf.abs().mean() + 0.1)
    known = column.reshape(-1)
    if turn % 2 == 0:  # the same value everywhere: rows that use one parameter again and again
        chosen = known[torch.randint(len(known), (1,), generator=generator)]
        return chosen.expand(leaf.shape).clone()
    return known[torch.randint(len(known), leaf.shape, generator=generator)]


def ascended(target: UnderAudit, row: Any) -> Any:
    """The row with its numbers moved up the gradient of its own gradient's norm; None where that cannot be computed."""
    leaves, form = pytree.tree_flatten(row)
    moving = [place for place, leaf in enumerate(leaves) if leaf.is_floating_point()]
    if not moving or (target.ours is not None and (target.ours.several_rows or target.ours.options.get("augment"))):
        return None
    device = next(iter(trainable(target.model).values())).device
    values = [leaf.detach().clone().to(device) for leaf in leaves]
    parameters = list(trainable(target.model).values())
    try:
        for _ in range(_ASCENTS):
            for place in moving:
                values[place] = values[place].detach().requires_grad_(True)
            loss = target.loss(target.model, pytree.tree_unflatten(values, form)).sum()
            gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            squares = [gradient.square().sum() for gradient in gradients]
            upward = torch.autograd.grad(torch.stack(squares).sum(), [values[place] for place in moving])
            with torch.no_grad():
                for place, way in zip(moving, upward, strict=True):
                    size, length = values[place].norm() + 0.1, way.norm()
                    if float(length) > 0 and math.isfinite(float(length)):
                        values[place] = values[place] + 0.2 * size * way / length
    except RuntimeError:  # an operation without a second derivative, or a column that the loss does not use
        return None
    moved = [value.detach().to(leaf.device) for value, leaf in zip(values, leaves, strict=True)]
    return pytree.tree_unflatten(moved, form)
