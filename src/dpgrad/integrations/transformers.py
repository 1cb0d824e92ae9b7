"""`DPTrainer`: the Trainer of transformers, with private steps.

    trainer = DPTrainer(model, args, train_dataset=train, eval_dataset=test, epsilon=3.0, delta=1e-5)
    trainer.train()
    trainer.guarantee()

docs/hugging_face.md turns an ordinary script into a private one.
"""

import copy
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from dpgrad import _files, _validate
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.accounting.ledger import Ledger
from dpgrad.errors import DataError, DpgradError, OptionError, ResumeError, RunError
from dpgrad.grads import unquoted
from dpgrad.grads.sums import Loss
from dpgrad.integrations.losses import ExampleLoss, OwnLoss, inner, refuse_other
from dpgrad.integrations.run import FOLDER, IndexedRows, PrivateRun, Terms, refuse_training_rows, ticks
from dpgrad.reports.report import Report
from dpgrad.training import source
from dpgrad.training.options import Computing, Privacy
from dpgrad.training.plan import Plan
from dpgrad.training.recipes import Recipe

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as missing:
    raise ImportError(
        f"dpgrad.integrations.transformers needs transformers and accelerate: pip install 'dpgrad[text]' ({missing})"
    ) from None

__all__ = ["DPTrainer"]

_STATE = "privacy.json"  # in a checkpoint: which record says what was spent
_PAD = "pad all to one length, e.g. with DataCollatorWithPadding(tokenizer, padding='max_length', max_length=128)"
_PROBED = 4  # examples on which the collator and the loss are tried
_PRIVACY, _COMPUTING = Privacy(), Computing()


class DPTrainer(Trainer):
    """The Trainer of transformers whose gradients are private; everything else is the Trainer's.

    It takes what `transformers.Trainer` takes, and ``epsilon``, ``delta``, ``method``, ``privacy``, ``computing``,
    ``ledger`` and ``seed`` as `dpgrad.fit` does. dpgrad draws the batches by Poisson sampling: the expected batch size
    is ``per_device_train_batch_size × gradient_accumulation_steps``, and ``per_device_train_batch_size`` examples are
    computed at a time. Learning rate, optimizer and schedule are those of the TrainingArguments. ``max_grad_norm`` is
    not applied: each example is clipped instead.

    The loss of an example is computed from the model's logits and ``labels``: classification, regression, causal and
    masked language models, token classification, sequence to sequence. ``compute_per_example_loss(model, inputs)``, or
    a ``compute_loss_func`` that returns one value per example, replaces it.

    ``seed`` is that of the noise, and makes a run unfit for release; ``TrainingArguments.seed`` is not.

    Guarantee: the model after every step, its checkpoints and what is logged of the training rows are private in the
    sense of `guarantee`, one example being one row of ``train_dataset``. The training loss is not logged; ε is. Not
    covered: figures on held-out rows, which the logs and ``trainer_state.json`` of checkpoints hold, for those rows;
    and durations, such as ``train_runtime``, which depend on how many rows the steps drew.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *more: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        method: str | Recipe = "autos",
        privacy: Privacy = _PRIVACY,
        computing: Computing = _COMPUTING,
        compute_per_example_loss: Loss | None = None,
        ledger: Ledger | None = None,
        seed: int | None = None,
        **given: Any,
    ) -> None:
        self.terms = Terms(epsilon, delta, method, privacy, computing, ledger, seed)
        args = copy.copy(args) if args is not None else TrainingArguments("tmp_trainer")
        _refuse_arguments(args)
        if args.max_grad_norm not in (None, 0.0, TrainingArguments.max_grad_norm):
            _validate.warn(
                f"max_grad_norm = {args.max_grad_norm:g} is not applied: each example is clipped instead; for a clip "
                f"bound give method=dpgrad.recipes.dpsgd(clip={args.max_grad_norm:g})"
            )
        args.max_grad_norm = 0.0
        super().__init__(model, args, *more, **given)
        if type(self).compute_loss is not Trainer.compute_loss:
            raise OptionError(
                "compute_loss is overridden, and gives one loss for a batch: override nothing and give "
                "compute_per_example_loss(model, inputs), a function that returns one value per example"
            )
        if self.is_model_parallel:
            raise OptionError("the model lies on several devices: load it on one, without device_map")
        self._own_loss = compute_per_example_loss
        self._run: PrivateRun | None = None
        self._rows: IndexedRows | None = None
        if self.train_dataset is not None:
            self._refuse_training_rows(self.eval_dataset)
            self._rows = IndexedRows(self._used(self.train_dataset))
            self._run = PrivateRun(self.terms, self._planned(len(self._rows)))
        self.add_callback(_Saved(self))

    @property
    def plan(self) -> Plan:
        """The plan and its cost; known before training."""
        return self._training().plan

    def guarantee(self) -> Guarantee:
        """The guarantee of what was trained; that of the whole plan unless all of its steps were taken."""
        return self._training().guarantee()

    def report(self) -> Report:
        """The privacy report, in the format of docs/report.md."""
        known = self.optimizer is not None
        learning_rate = float(self.optimizer.param_groups[0]["lr"]) if known else self.args.learning_rate
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # inside accelerate's
        return self._training().report(self.model, optimizer, learning_rate, self.eval_dataset is not None)

    def _training(self) -> PrivateRun:
        if self._run is None:
            raise RunError("there is no train_dataset: nothing is trained, and nothing released")
        return self._run

    def _planned(self, rows: int) -> Plan:
        """The plan: as many steps as the Trainer takes with these arguments."""
        if not rows:
            raise DataError("train_dataset must hold at least one row, got none")
        args = self.args
        batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        size = rows if self.terms.privacy.dataset_size is None else self.terms.privacy.dataset_size
        self._updates = max(1, -(-size // batch_size))  # per epoch
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * self._updates)
        _validate.step_count(**{"the number of steps": steps})
        return self.terms.plan(self.model, rows, batch_size, steps)

    # ---- hooks of the Trainer

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *more: Any, **given: Any
    ) -> Any:
        """Train as the Trainer does, with private steps; the training loss it returns is NaN, since it is private."""
        if trial is not None:
            self.hyperparameter_search()
        run = self._training()
        if type(resume_from_checkpoint) is bool:
            found = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint else None
            if resume_from_checkpoint and found is None:
                raise ResumeError(f"there is no checkpoint in {self.args.output_dir}: leave out resume_from_checkpoint")
            resume_from_checkpoint = found
        keeps = _plain(self.args.save_strategy) != "no"
        folder = Path(self.args.output_dir, FOLDER) if keeps or resume_from_checkpoint else None
        if resume_from_checkpoint:
            run.open(folder, *_stored(Path(str(resume_from_checkpoint))))
        else:
            run.open(folder)
        try:
            output = super().train(resume_from_checkpoint, *more, **given)
        finally:
            run.close()
        return output._replace(training_loss=math.nan)

    def hyperparameter_search(self, *args: Any, **given: Any) -> NoReturn:
        """Refused: every trial is a release of its own, for which one budget does not account."""
        raise OptionError(
            "a hyperparameter search trains many models on the same rows, each a release of its own: make one "
            "DPTrainer per trial with one dpgrad.Ledger, or tune on public data"
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of empty batches, one per call of `training_step`: the private step reads its own examples."""
        self._training()
        return ticks(self._updates * self.args.gradient_accumulation_steps)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The Trainer's loader of held-out rows; training rows are refused."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset  # it may be another one by now
        self._refuse_training_rows(self.eval_dataset[given] if isinstance(given, str) else given)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[no-any-return]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The Trainer's loader of the rows that `predict` takes; training rows are refused."""
        self._refuse_training_rows(test_dataset, "test")
        return super().get_test_dataloader(test_dataset)  # type: ignore[no-any-return]

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The public number of training rows, or the number of held-out rows."""
        if self._run is not None and isinstance(dataloader.dataset, type(ticks(1).dataset)):
            return self._run.plan.dataset_size
        return super().num_examples(dataloader)  # type: ignore[no-any-return]

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: it depends on how long the private examples are."""
        return 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Write the private gradient of one optimizer step to ``.grad``; return zero for the loss."""
        run = self._training()
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        if self.accelerator.sync_gradients:  # the last of gradient_accumulation_steps calls
            with self.accelerator.autocast():
                if run.private is None:
                    self._begin(run)
                run.step()
            if run.done:
                self.control.should_training_stop = True
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], *more: Any, **given: Any) -> None:
        """Log as the Trainer does, with ε in place of the training loss."""
        training = [name for name in ("loss", "train_loss") if name in logs]
        for name in (*training, "total_flos") if training else ():
            logs.pop(name, None)
        if training and self._run is not None:
            logs["epsilon"] = self._run.epsilon()
        super().log(logs, *more, **given)

    # ---- the private half

    def _begin(self, run: PrivateRun) -> None:
        if run.start != self.state.global_step or run.plan.steps != self.state.max_steps:
            raise RunError(
                f"the Trainer is at step {self.state.global_step:,} of {self.state.max_steps:,}, and the plan at "
                f"{run.start:,} of {run.plan.steps:,}: do not change the arguments after the DPTrainer was made"
            )
        collate = _Collate(self._collator())
        few = [unquoted.example(self._rows, index) for index in range(min(_PROBED, len(self._rows)))]  # type: ignore[arg-type]
        _refuse_collator(collate, few)
        run.begin(
            self.model, self._loss(collate, few), self._rows, collate=collate,
            microbatch=self.args.per_device_train_batch_size, workers=self.args.dataloader_num_workers,
        )  # fmt: skip

    def _loss(self, collate: "_Collate", few: Sequence[Any]) -> Loss:
        if self._own_loss is not None:
            return self._own_loss
        if self.compute_loss_func is not None:
            return OwnLoss(self.compute_loss_func)
        base = inner(self.model)
        config = getattr(base, "config", None)
        causal = (
            getattr(base, "loss_type", None) == "ForCausalLM"
            or type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        )
        shift = causal and not getattr(config, "is_encoder_decoder", False)
        smoothing = 0.0 if self.label_smoother is None else float(self.args.label_smoothing_factor)
        loss = ExampleLoss(shift, getattr(config, "problem_type", None), smoothing)
        for example in few:
            batch = {name: value.to(self.args.device) for name, value in collate([example]).items()}
            refuse_other(loss, self.model, batch)
        return loss

    def _used(self, dataset: Any) -> Any:
        """The columns of a `datasets.Dataset` that the model takes; any other dataset as it is."""
        if isinstance(dataset, IterableDataset) or not callable(getattr(dataset, "__len__", None)):
            raise DataError(
                f"train_dataset must be a map-style dataset with a length, got {type(dataset).__name__}: private "
                "batches are drawn by index; for a datasets.IterableDataset, load it without streaming=True"
            )
        return self._remove_unused_columns(dataset) if _of_datasets(dataset) else dataset

    def _collator(self) -> Callable[[list[Any]], Any]:
        if _of_datasets(self.train_dataset):
            return self.data_collator  # type: ignore[no-any-return]
        return self._get_collator_with_removed_columns(self.data_collator)  # type: ignore[no-any-return]

    def _refuse_training_rows(self, held_out: Any, name: str = "evaluation") -> None:
        for one in held_out.values() if isinstance(held_out, Mapping) else [held_out]:
            if one is not None and self.train_dataset is not None:
                refuse_training_rows(one, self.train_dataset, name)


class _Saved(TrainerCallback):
    """Writes which record a checkpoint belongs to. Public: checkpoints are uploaded."""

    def __init__(self, trainer: DPTrainer) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Add the file to the checkpoint that was just saved."""
        run = self._trainer._run
        if run is not None:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            _files.replace(folder / _STATE, json.dumps(run.state()).encode())


def _stored(checkpoint: Path) -> tuple[dict[str, Any], int]:
    """What a checkpoint says about privacy, and its step."""
    found = _files.read(checkpoint / _STATE)
    state = _files.read(checkpoint / "trainer_state.json")
    try:
        if found is not None and state is not None:
            return dict(json.loads(found)), int(json.loads(state)["global_step"])
    except (ValueError, KeyError, TypeError):
        raise ResumeError(f"{checkpoint}: its files are damaged; resume from another checkpoint") from None
    missing = _STATE if found is None else "trainer_state.json"
    raise ResumeError(
        f"{checkpoint / missing} is missing, so what was spent is not known: resume from a checkpoint that a DPTrainer "
        "wrote completely"
    )


@dataclass(frozen=True)
class _Collate:
    """The data collator of the Trainer, giving a plain dict."""

    collator: Callable[[list[Any]], Any]

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        try:
            return dict(self.collator(list(examples)))
        except DpgradError:
            raise
        except ValueError:  # of transformers, where lengths differ; its text may hold values of rows
            raise DataError(f"data_collator cannot put the examples into one batch: {_PAD}") from None


def _of_datasets(dataset: Any) -> bool:
    return callable(getattr(dataset, "remove_columns", None))


def _refuse_collator(collate: _Collate, few: Sequence[Any]) -> None:
    """Refuse a collator by which one example changes another: by padding, at random, or otherwise."""
    before = _random_state()
    together = collate(copy.deepcopy(list(few)))  # a step collates one example at a time
    if _random_state() != before:
        raise DataError(
            "data_collator draws random numbers, and one example more changes those of all others: mask or transform "
            "the rows when they are prepared, with dataset.map"
        )
    for place, example in enumerate(few):
        alone = source.together([copy.deepcopy(example)], collate)
        for name, value in together.items():
            if not isinstance(value, Tensor):
                continue  # refused by a step
            if alone[name].shape[1:] != value.shape[1:]:
                raise DataError(
                    f"data_collator pads to the longest example of a batch, so one example changes all others: {_PAD}"
                )
            if not torch.equal(alone[name][0], value[place]):
                raise DataError(
                    f"data_collator gives an example other values of {name!r} in another batch: make it treat each "
                    "example independently of the others"
                )


def _random_state() -> tuple[object, ...]:
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2]  # type: ignore[index]


_ALONE, _DRAWN = "one process is supported; leave it out", "batches are drawn at random; leave it out"
# Arguments that a private run cannot honour: which values are refused, and what to do.
_REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fp16": (bool, "its loss scaling skips steps that were paid for; use bf16=True"),
    "gradient_checkpointing": (bool, "leave it out; a lower per_device_train_batch_size needs less memory"),
    "auto_find_batch_size": (
        bool,
        "the batch size is part of the guarantee; use computing=Computing(memory_limit=...)",
    ),
    "group_by_length": (bool, _DRAWN),
    "train_sampling_strategy": (lambda value: _plain(value) != "random", _DRAWN),
    "neftune_noise_alpha": (lambda value: True, "its noise depends on the length of the batch; leave it out"),
    "include_num_input_tokens_seen": (
        lambda value: value not in (False, "no"),
        "it counts private tokens; leave it out",
    ),
    "deepspeed": (bool, _ALONE),
    "fsdp": (bool, _ALONE),
    "world_size": (lambda value: value > 1, "one process is supported; run without torchrun"),
    "n_gpu": (lambda value: value > 1, "one device is supported; set CUDA_VISIBLE_DEVICES=0"),
    "optim": (
        lambda value: "lomo" in _plain(value) or "layerwise" in _plain(value),
        "it steps during the backward pass, before noise is added; use adamw_torch",
    ),
}


def _plain(value: Any) -> str:
    """The text of a member of an Enum, or of a text."""
    return str(getattr(value, "value", value))


def _refuse_arguments(args: TrainingArguments) -> None:
    for name, (refused, remedy) in _REFUSED.items():
        value = getattr(args, name, None)  # each version of transformers has its own arguments
        if value is not None and refused(value):
            raise OptionError(f"TrainingArguments.{name} = {_validate.shown(value)} cannot be kept private: {remedy}")
