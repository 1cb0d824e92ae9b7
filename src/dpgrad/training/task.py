"""What a run is given: model, data, loss and settings, checked and brought into the forms that a step reads."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from dpgrad.data import Dataset
from dpgrad.distributed.ranks import Ranks
from dpgrad.distributed.shards import refuse_layout, whole
from dpgrad.errors import CannotCaptureError, DataError, OptionError
from dpgrad.grads.fsdp import resharded
from dpgrad.grads.scaling import fault
from dpgrad.grads.sums import Loss, trainable
from dpgrad.grads.swap import unwrapped
from dpgrad.grads.unquoted import unquoted
from dpgrad.runs.weights import Weights
from dpgrad.training import agreed, forms, source
from dpgrad.training.callbacks import Callbacks
from dpgrad.training.curves import evaluate, refuse_held_out
from dpgrad.training.jobs import JobRows
from dpgrad.training.losses import Metric, loss_named, metric_named
from dpgrad.training.options import ROWS_PER_UNIT, UNIT_RULES, Budget, Computing, HeldOut, Privacy, RunFolder
from dpgrad.training.plan import Plan, planned
from dpgrad.training.prepare import classes_of, device_of, within_reach
from dpgrad.training.recipes import Recipe
from dpgrad.training.session import behaviours
from dpgrad.training.step.graphed import elsewhere
from dpgrad.training.temperature import last_layer
from dpgrad.training.units import ByWeight, Owned, OwnerExamples, Together, refuse_shared

__all__ = ["Task", "owners_of"]


@dataclass(frozen=True)
class Task:
    """The model, data and settings of a run, with every default filled in; on several ranks, those of this rank."""

    model: nn.Module
    data: Any
    loss: Loss
    metric: Metric
    held_out: HeldOut | None
    callbacks: Callbacks
    privacy: Privacy
    computing: Computing
    dataset: Dataset | None
    rows: Any  # as given: ``data`` has one example per person where rows belong to persons
    owned: Owned | None
    ranks: Ranks
    total: int  # examples of all ranks

    @classmethod
    def of(
        cls, model: nn.Module, data: Any, loss: str | Loss, held_out: Any, callbacks: Any, privacy: Privacy,
        computing: Computing, ranks: Ranks,
    ) -> "Task":  # fmt: skip
        dataset = data if isinstance(data, Dataset) else None
        if dataset is not None:
            rows = JobRows.of(dataset)
            privacy, data = privacy.of_data(dataset), rows.train
            if held_out is None and rows.held_out is not None:
                owners = dataset.test_units if privacy.units is dataset.units else None
                held_out = HeldOut(rows.held_out, held_out_units=owners)
        judged = held_out if isinstance(held_out, HeldOut) or held_out is None else HeldOut(held_out)
        if judged is not None and judged.rows is not None:
            judged = _judged(judged, data, model)
        data = forms.taken(data, model=model)
        if ranks.first:
            forms.warn_of_missing(data)
        called = Callbacks.of(callbacks)
        agreed.refuse_features(ranks, {"Diagnostics": called.diagnostics})
        if not ranks.first:
            called = Callbacks.of(())
        goal = loss_named(loss)
        metric = metric_named(None if judged is None else judged.metric, goal)
        owned = owners_of(privacy, data, judged)
        examples = data if owned is None else owned.examples(data)
        parts = computing.rows_on_rank == "part" and not ranks.alone
        if parts and owned is not None:
            raise OptionError(
                f'units names the owner of each row, and with rows_on_rank="part" the rows of one {privacy.unit} may '
                "lie on several ranks: give every rank all rows"
            )
        total = sum(ranks.every(source.rows(examples))) if parts else source.rows(examples)
        if not total:
            raise DataError("data must hold at least one row, got none")
        return cls(
            model, within_reach(examples, device_of(model)), goal, metric, judged, called, privacy, computing, dataset,
            data, owned, ranks, total,
        )  # fmt: skip

    @property
    def core(self) -> nn.Module:
        return unwrapped(self.model, sharded=True)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def collate(self) -> source.Collate:
        """How single rows become a batch."""
        return self.computing.collate or default_collate

    @property
    def of_examples(self) -> dict[str, Any]:
        """What depends on an example being one row, or one person with several."""
        collate = Together(self.collate) if isinstance(self.data, OwnerExamples) else self.collate
        return {"several_rows": self.privacy.several_rows or self.owned is not None, "collate": collate}

    @property
    def step_loss(self) -> Loss:
        """The loss of a step: with how much a row counts, where rows belong to persons."""
        return self.loss if self.owned is None else ByWeight(self.loss)

    def plan(self, method: Recipe, budget: Budget, folder: RunFolder | None) -> Plan:
        """The plan; what does not fit together is refused here, before a step is charged."""
        resharded(self.core)
        refuse_layout(self.core, self.ranks)
        counted = sum(parameter.numel() for parameter in trainable(self.core).values())
        single = not (self.privacy.several_rows or method.augment)
        if self.owned is not None and method.augment:
            raise OptionError(
                f"augment makes the rows of an example, and here they are those of a {self.privacy.unit}: leave out "
                "augment, or units"
            )
        held = single and source.rows(self.rows) > 0
        with whole(self.core, self.ranks, 0):
            own = classes_of(self.core, self.loss, self.rows, self.collate) if held else None
        classes = next((each for each in self.ranks.every(own) if each is not None), None)
        found = planned(method, budget, self.privacy, self.total, counted, classes)
        self._refuse_misfits(found, folder)
        return found

    def _refuse_misfits(self, plan: Plan, folder: RunFolder | None) -> None:
        if self.held_out is not None and self.held_out.rows is not None:
            first = source.gathered(self.held_out.rows, torch.arange(1), self.device, self.collate)
            zeros = partial(pytree.tree_map, torch.zeros_like, first)
            core = self.core
            with whole(core, self.ranks, 0), unquoted(core, self.metric.values, zeros, "held-out rows"):
                evaluate(core, self.metric, first)
        # refuses a rule that cannot be held to its bound
        if plan.temperature is not None:
            if not self.ranks.alone:
                raise OptionError("temperature is found by one process: leave it out on several ranks")
            self.last_layer()
        fault(plan.recipe.scaling(), [plan.mechanism.clip_at(0, *plan.recipe.groups[:1])], self.device)
        if folder is not None:
            Weights(self.core)  # refuses a model that cannot be released
        if self.computing.capture and self.device.type != "cuda":
            raise CannotCaptureError(elsewhere(self.device))

    def last_layer(self) -> nn.Linear:
        """The layer that a temperature divides; a model that has none is refused."""
        return last_layer(self.core, self.loss, self.rows, self.collate)

    def behaviours(self, plan: Plan) -> dict[str, str]:
        """Everything in the settings that the bits of a step depend on, as it is now."""
        settings = {
            "recipe": plan.recipe, "learning_rate": plan.learning_rate, "loss": self.loss, "model": self.core,
            "several_rows": self.of_examples["several_rows"], "engine": self.computing.engine, "collate": self.collate,
            "memory_limit": self.computing.memory_limit, "diagnostics": self.callbacks.diagnostics,
            "capture": self.computing.capture,
        }  # fmt: skip
        return behaviours(settings, self.core)


def _judged(held_out: HeldOut, data: Any, model: nn.Module) -> HeldOut:
    """The held-out rows in a form that can be read, if none of them is a row of the training ``data``."""
    refuse_held_out(held_out.rows, data)
    return replace(held_out, rows=forms.taken(held_out.rows, "held_out", model))


def owners_of(privacy: Privacy, data: Any, held_out: HeldOut | None) -> Owned | None:
    """Whose each row is, where rows belong to persons; None where each row stands for itself."""
    if privacy.units is None:
        if held_out is not None and held_out.held_out_units is not None:
            raise OptionError(
                "held_out has held_out_units and the training rows have none: give privacy=Privacy(units=...)"
            )
        return None
    rows = source.rows(data)
    if held_out is not None and held_out.rows is not None:
        if held_out.held_out_units is None:
            raise OptionError(
                f"held_out has rows and no owners, and a {privacy.unit} may have rows in both parts: write "
                "held_out=HeldOut(rows, held_out_units=ids), one id per row; rows of nobody in the training data may "
                "have any ids that are not theirs"
            )
        refuse_shared(privacy.units, held_out.held_out_units, rows, source.rows(held_out.rows), privacy.unit)
    most, rule = privacy.rows_per_unit or ROWS_PER_UNIT, privacy.unit_rule or UNIT_RULES[0]
    return Owned.of(privacy.units, rows, most, rule, privacy.unit)
