"""What a private step computes, apart from how it is run: one record that every runner reads."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpgrad.distributed.ranks import Ranks
from dpgrad.distributed.share import WHOLE, Share
from dpgrad.errors import DataError
from dpgrad.grads import Engine
from dpgrad.grads.history import Average, InnerMomentum, Iterate
from dpgrad.grads.scaling import Bounded, ScaleRule
from dpgrad.grads.scratch import Scratch
from dpgrad.grads.sums import Batch, Groups, Loss, Scale, trainable
from dpgrad.grads.ways import Attributed
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group, Mechanism
from dpgrad.training import source
from dpgrad.training.augment import Augment, augmented
from dpgrad.training.step.quantile import Quantile

__all__ = ["Observed", "Work", "width"]


@dataclass(frozen=True, repr=False)
class Observed:
    """Intermediate values of one step. All but ``noisy`` are private and outside the guarantee.

    ``raw`` is the sum of the examples' gradients at the current weights, neither scaled nor noised. Like ``noisy`` it
    is divided by the expected batch size.

    >>> Observed(0, torch.ones(1, 2), torch.ones(1, 2), 1.0, {}, {}, {})
    Observed(step 0, private)
    """

    step: int
    norms: Tensor  # (groups, examples), of the vectors that the rule scaled
    factors: Tensor  # (groups, examples), as the rule gave them
    clip: Tensor | float  # (groups, 1) where there are groups
    clipped_sum: Mapping[str, Tensor]
    noisy: Mapping[str, Tensor]
    raw: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return f"Observed(step {self.step}, private)"


@dataclass(repr=False, eq=False)
class Work:
    """The step of a run: model, loss and mechanism, the key of its randomness, and what changes from step to step."""

    model: nn.Module
    loss: Loss
    mechanism: Mechanism
    key: Key
    rule: ScaleRule
    inner_momentum: InnerMomentum | None
    average: float | None
    several_rows: bool
    augment: Augment | None
    collate: source.Collate
    start: int  # the first step of the key
    microbatch: int | None
    observe: Callable[[Observed], None] | None
    replayed: bool  # whether a step must round as it did before
    ranks: Ranks = field(default_factory=partial(Ranks, None, True))
    share: Share = WHOLE  # the part of each step that this rank computes
    engine: Engine | None = None  # found before the first step
    iterates: list[Iterate] = field(default_factory=list)
    averages: Average | None = None
    quantile: Quantile | None = field(init=False)  # where the clip bounds follow the norms
    scratch: Scratch = field(default_factory=Scratch)
    shapes: dict[str, list[torch.Size]] = field(default_factory=dict)  # of examples, by the function that made them

    def __post_init__(self) -> None:
        follows = self.mechanism.adaptive_clip is not None
        self.quantile = Quantile(self.mechanism, self.key, self.start) if follows else None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(parameter.device for parameter in self.model.parameters() if parameter.requires_grad)

    def scale(self, clip: Tensor | float) -> Scale:
        """The function from norms to factors that keeps every example within ``clip``, whatever the rule."""
        return Bounded(self.rule, clip)

    def group_of(self, name: str) -> Group | None:
        """The group of a parameter; None where all are clipped together."""
        return self.mechanism.group_of(name) if self.mechanism.groups else None

    def groups(self) -> Groups | None:
        """The place of the group of each trainable parameter; None where all are clipped together."""
        groups = self.mechanism.groups
        if not groups:
            return None
        return {name: groups.index(self.mechanism.group_of(name)) for name in trainable(self.model)}

    def clips(self, step: int) -> Tensor | float:
        """The clip bound, (groups, 1) where there are groups."""
        groups, quantile = self.groups(), self.quantile
        if groups is None:
            return self.mechanism.clip_at(step) if quantile is None else quantile.at(step)[0]
        last = max(groups.values())  # later groups have no parameter to clip
        if quantile is not None:
            clips = quantile.at(step)[: last + 1]
        else:
            clips = [self.mechanism.clip_at(step, group) for group in self.mechanism.groups[: last + 1]]
        return torch.tensor(clips, dtype=torch.float64, device=self.device)[:, None]

    def averages_of(self, rows: int) -> Average | None:
        """The running average of every example, created at the first step; None without ``average``."""
        if self.average is not None and self.averages is None:
            self.averages = Average.for_model(self.model, rows, self.average)
        return self.averages

    def engine_at(self, step: int | Tensor) -> Engine:
        """The engine whose gradients are scaled at a step of the key, counted from its first."""
        assert self.engine is not None
        if self.inner_momentum is not None:
            return self.inner_momentum.engine(self.engine, self.iterates)
        return self.engine if self.averages is None else self.averages.engine(self.engine, step)

    def follow_anew(self) -> None:
        """Follow the next pass operation by operation again, because model, loss or rule changed."""
        if isinstance(self.engine, Attributed):
            self.engine.anew()

    def remember(self) -> None:
        """Keep the model's current values if later steps need them."""
        if self.inner_momentum is not None:
            self.inner_momentum.remember(self.iterates, self.model)

    def gathered(self, data: Any, indices: Tensor) -> Batch:
        """The examples at ``indices``, on the model's device."""
        return self.alike("collate", source.gathered(data, indices, self.device, self.collate))

    def augmented(self, batch: Batch, examples: Tensor, step: int) -> Batch:
        """The rows that ``augment`` makes from the examples at a step."""
        if self.augment is None:
            return batch
        return self.alike("augment", augmented(self.augment, batch, examples + self.share.first, self.key, step))

    def alike(self, made_by: str, batch: Batch) -> Batch:
        """Return the batch; refuse it if its examples differ in shape from earlier ones.

        Guarantee: shapes are the same at every step. If examples were padded to the longest of a batch, one example
        could change how the gradients of all others are measured, and so their factors.
        """
        shapes = [leaf.shape[1:] for leaf in pytree.tree_leaves(batch)]
        if shapes != self.shapes.setdefault(made_by, shapes):
            raise DataError(
                f"{made_by} gives examples of other shapes than before: pad all examples to one fixed length, not to "
                "the longest of a batch, which one example decides"
            )
        return batch

    @contextmanager
    def own_randomness(self, step: int) -> Iterator[None]:
        """Within the block, torch's default generators, which dropout uses, are seeded from (key, step).

        With the caller's (often known) seed, removing one example would shift the dropout masks of all later examples.
        Each rank has its own examples and draws its own masks.
        """
        device, rank = self.device, self.ranks.rank
        own = ("rank", str(rank)) if rank else ()
        seed = int.from_bytes(self.key.derive("model", str(step), *own, size=8), "little")
        before = torch.default_generator.get_state()
        with torch.random.fork_rng([device]) if device.type == "cuda" else nullcontext():
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed)
            try:
                yield
            finally:
                torch.default_generator.set_state(before)


def width(batch: Batch) -> int:
    """The rows of one example."""
    return int(pytree.tree_leaves(batch)[0].shape[1])
