"""`DifferentialPrivacy`: a callback that makes the training of a LightningModule private.

    private = DifferentialPrivacy(epsilon=3.0, delta=1e-5)
    trainer = Trainer(max_epochs=10, callbacks=[private])
    trainer.fit(module, train_loader, val_loader)
    private.guarantee()

``training_step`` returns one loss per example. docs/lightning.md turns an ordinary script into a private one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dpgrad import _validate
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.ledger import Ledger
from dpgrad.errors import DataError, OptionError, ResumeError, RunError, UnsupportedModelError
from dpgrad.integrations.run import FOLDER, IndexedRows, PrivateRun, Terms, refuse_training_rows
from dpgrad.reports.report import Report
from dpgrad.training.options import Computing, Privacy
from dpgrad.training.plan import Plan
from dpgrad.training.recipes import Recipe

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as missing:
    raise ImportError(
        f"dpgrad.integrations.lightning needs lightning: pip install 'dpgrad[lightning]' ({missing})"
    ) from None

__all__ = ["DifferentialPrivacy"]

_PRIVACY, _COMPUTING = Privacy(), Computing()
_PRECISIONS = ("32-true", "bf16-mixed")
# They see batches of the loader, which a private step does not take.
_BATCH_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device", "backward")


class DifferentialPrivacy(Callback):
    """Private steps for a LightningModule with automatic optimization; everything else is Lightning's.

    ``epsilon``, ``delta``, ``method``, ``privacy``, ``computing``, ``ledger`` and ``seed`` are those of `dpgrad.fit`.
    The dataset, ``batch_size``, ``collate_fn`` and ``num_workers`` of the training DataLoader are used, its batches
    are not: dpgrad draws them by Poisson sampling, ``batch_size`` rows in expectation. ``microbatch`` in ``computing``
    bounds how many are computed at a time. Optimizer, schedulers, validation, checkpoints and loggers are the module's
    and the Trainer's.

    ``training_step`` must return one loss per example, e.g. with ``reduction="none"``. What it logs is dropped, with a
    warning: it would be computed from training rows without noise. ``epsilon`` is logged instead.

    Guarantee: the model after every step and its checkpoints are private in the sense of `guarantee`, one example
    being one row of the dataset. Not covered: other uses of training rows by the module's own hooks.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        method: str | Recipe = "autos",
        privacy: Privacy = _PRIVACY,
        computing: Computing = _COMPUTING,
        ledger: Ledger | None = None,
        seed: int | None = None,
    ) -> None:
        self.terms = Terms(epsilon, delta, method, privacy, computing, ledger, seed)
        self._run: PrivateRun | None = None
        self._loader: DataLoader[Any] | None = None
        self._module: Any = None
        self._resumed: dict[str, Any] | None = None
        self._optimizer: Any = None
        self._judged: bool = False
        self._said = False

    @property
    def plan(self) -> Plan:
        """The plan and its cost; known once `Trainer.fit` was called."""
        return self._training().plan

    def guarantee(self) -> Guarantee:
        """The guarantee of what was trained; that of the whole plan unless all of its steps were taken."""
        return self._training().guarantee()

    def report(self) -> Report:
        """The privacy report, in the format of docs/report.md."""
        learning_rate = float(self._optimizer.param_groups[0]["lr"]) if self._optimizer is not None else 0.0
        return self._training().report(self._module, self._optimizer, learning_rate, self._judged)

    def _training(self) -> PrivateRun:
        if self._run is None:
            raise RunError("nothing is trained yet: give this callback to a Trainer, and call its fit")
        return self._run

    # ---- hooks of Lightning

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse training rows: `Trainer.test` shows exact figures on them."""
        self._refuse_training_rows(trainer.test_dataloaders, "test")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse training rows where `Trainer.validate` is called; `Trainer.fit` has looked at its rows already."""
        if trainer.state.fn == "validate":
            self._refuse_training_rows(trainer.val_dataloaders, "validation")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse training rows: predictions for them are not covered."""
        self._refuse_training_rows(trainer.predict_dataloaders, "prediction")

    def _refuse_training_rows(self, loaders: Any, name: str) -> None:
        for each in pytree.tree_leaves(loaders):  # one, or several in a list or dict
            judged = getattr(each, "dataset", None)
            if judged is not None and self._loader is not None:
                self._judged |= name == "validation"
                refuse_training_rows(judged, self._loader.dataset, name)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan the run, and put steps in place of the loader's batches."""
        if self._run is not None and self._run.taken > self._run.start:
            raise RunError(
                "this callback has trained a model, and its budget is for one: make another one for further training, "
                "and add both up in a dpgrad.Ledger"
            )
        _refuse_trainer(trainer, pl_module)
        source = trainer.fit_loop._data_source  # Lightning has no public place for it
        loader = source.dataloader()
        _refuse_loader(loader)
        rows = len(loader.dataset)
        if not rows:
            raise DataError("the training DataLoader must hold at least one row, got none")
        size = rows if self.terms.privacy.dataset_size is None else self.terms.privacy.dataset_size
        updates = max(1, -(-size // loader.batch_size))
        plan = self.terms.plan(pl_module, rows, loader.batch_size, _steps(trainer, updates))
        self._run, self._loader, self._module = PrivateRun(self.terms, plan), loader, pl_module
        source.instance, source.name = _Steps(updates), ""
        pl_module.training_step, pl_module.backward = self._no_loss, self._private_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the run, or continue that of the checkpoint."""
        run, loader = self._training(), self._loader
        assert loader is not None
        self._refuse_training_rows(trainer.val_dataloaders, "validation")
        (self._optimizer,) = trainer.optimizers
        if trainer.global_step and self._resumed is None:
            raise ResumeError(
                "the checkpoint was written without this callback, so what was spent is not known: start again, or "
                "load its weights alone if they are public"
            )
        folder = Path(trainer.default_root_dir, FOLDER)
        if self._resumed is not None:
            run.open(folder, self._resumed, trainer.global_step)
        else:
            run.open(folder if trainer.checkpoint_callbacks else None)
        data: Any = loader.dataset
        rows = data if isinstance(data, Dataset) else IndexedRows(data)
        with self._apart(pl_module), trainer.precision_plugin.train_step_context():
            run.begin(
                pl_module, _loss_of(pl_module), rows, collate=loader.collate_fn,
                microbatch=None, workers=loader.num_workers,
            )  # fmt: skip

    def _no_loss(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """In place of the module's ``training_step``: the private step needs no loss of the batch."""
        return torch.zeros((), device=self._module.device, requires_grad=True)

    def _private_step(self, loss: Tensor, *args: Any, **given: Any) -> None:
        """In place of the module's ``backward``: write the private gradient to ``.grad``."""
        run, trainer = self._training(), self._module.trainer
        with self._apart(self._module), trainer.precision_plugin.train_step_context():
            run.step()
        if run.done and run.last < run.plan.steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ε so far."""
        pl_module.log("epsilon", self._training().epsilon(), prog_bar=True, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: public values, and no key."""
        return {} if self._run is None or not self._run.identifier else self._run.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember which run a checkpoint belongs to."""
        self._resumed = dict(state_dict)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module its own methods back, and close the run."""
        self._end(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the module its own methods back, and close the run."""
        self._end(pl_module)

    def _end(self, module: Any) -> None:
        for name in ("training_step", "backward"):
            module.__dict__.pop(name, None)
        if self._run is not None:
            self._run.close()

    @contextmanager
    def _apart(self, module: Any) -> Iterator[None]:
        """Within the block the module logs nothing, does not know its Trainer, and has its own methods.

        A captured step follows numbers that the model holds; those of a Trainer change at every step.
        """
        ours = {name: module.__dict__.pop(name) for name in ("training_step", "backward") if name in module.__dict__}
        trainer, module.trainer = module.trainer, None
        module.__dict__ |= {"log": self._dropped, "log_dict": self._dropped}
        try:
            yield
        finally:
            for name in ("log", "log_dict"):
                del module.__dict__[name]
            module.trainer = trainer
            module.__dict__ |= ours

    def _dropped(self, *args: Any, **given: Any) -> None:
        if not self._said:
            self._said = True
            _validate.warn(
                "what training_step logs is dropped: it is computed from training rows without noise; epsilon is "
                "logged, and validation_step may log figures on held-out rows"
            )


class _Steps:
    """In place of a loader: as many empty batches as an epoch has steps. There is nothing to resume in it."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{} for _ in range(self._count)])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class _Losses:
    """The losses that ``training_step`` returns, one per example."""

    training_step: Callable[..., Any]  # of the class
    numbered: bool  # whether it takes batch_idx

    def __call__(self, module: Any, batch: Any) -> Tensor:
        found = self.training_step(module, batch, 0) if self.numbered else self.training_step(module, batch)
        losses = found["loss"] if isinstance(found, Mapping) else found
        if not isinstance(losses, Tensor) or not losses.ndim:
            raise UnsupportedModelError(
                "training_step must return one loss per example, got one for the batch: give the loss function "
                "reduction='none'"
            )
        return losses


def _loss_of(module: LightningModule) -> _Losses:
    own = type(module).training_step
    names = [*inspect.signature(own).parameters][1:]
    if names[:1] == ["dataloader_iter"] or not 1 <= len(names) <= 2:
        raise UnsupportedModelError(f"training_step must take (batch, batch_idx), got ({', '.join(names)})")
    return _Losses(own, len(names) == 2)


def _steps(trainer: Trainer, updates: int) -> int:
    """The steps that Lightning takes in epochs of ``updates`` steps."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits.append(trainer.max_epochs * updates)
    if not limits or not min(limits):
        raise OptionError("how long to train is part of the guarantee: give Trainer max_epochs or max_steps, above 0")
    return int(min(limits))


def _refuse_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Refuse settings that a private run cannot honour, each with what to do."""
    for name, value, expected, remedy in (
        ("num_devices", trainer.num_devices, (1,), "write devices=1"),
        ("world_size", trainer.world_size, (1,), "run one process"),
        ("num_nodes", trainer.num_nodes, (1,), "run on one node"),
        ("precision", trainer.precision, _PRECISIONS, "choose one of those"),
        ("gradient_clip_val", trainer.gradient_clip_val or None, (None,), "each example is clipped; leave it out"),
        ("accumulate_grad_batches", trainer.accumulate_grad_batches, (1,), "give the DataLoader the whole batch_size, "
         "and computing=Computing(microbatch=...)"),
        ("overfit_batches", trainer.overfit_batches, (0, 0.0), "leave it out"),
        ("limit_train_batches", trainer.limit_train_batches, (1.0,), "give max_steps instead"),
    ):  # fmt: skip
        if value not in expected:
            shown = " or ".join(map(str, expected))
            raise OptionError(f"Trainer {name} must be {shown} in a private run, got {value}: {remedy}")
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder | GradientAccumulationScheduler):
            raise OptionError(f"{type(callback).__name__} takes steps of its own, or changes them: leave it out")
    if not module.automatic_optimization:
        raise UnsupportedModelError(
            "the module optimizes by itself: set automatic_optimization = True, or use dpgrad.PrivateGradient in its "
            "training_step"
        )
    if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        raise UnsupportedModelError("configure_optimizers must return one optimizer, and not LBFGS")
    for hook in _BATCH_HOOKS:
        if is_overridden(hook, module) or (trainer.datamodule is not None and _is_own(trainer.datamodule, hook)):
            raise UnsupportedModelError(
                f"{hook} is overridden, and a private step does not call it: do this in the Dataset or in training_step"
            )


def _is_own(datamodule: Any, hook: str) -> bool:
    return hook != "backward" and bool(is_overridden(hook, datamodule))


def _refuse_loader(loader: object) -> None:
    """Refuse anything but one DataLoader over a map-style dataset in plain order."""
    if not isinstance(loader, DataLoader):
        raise DataError(f"training rows must come from one torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise DataError(
            "the training DataLoader must have a map-style dataset and a batch_size: private batches are drawn by index"
        )
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise DataError(
            f"the training DataLoader has a {type(loader.sampler).__name__}: private batches are drawn by Poisson "
            "sampling, so leave out its sampler"
        )
