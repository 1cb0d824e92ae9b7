"""`DPTrainer` on tiny models with random weights; nothing is downloaded.

transformers is imported by the tests, not when they are collected: it takes long.
"""

import json
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, Subset

import dpgrad
from dpgrad.errors import DataError, OptionError, ResumeError, RunError, UnsupportedModelError
from dpgrad.integrations.losses import ExampleLoss, inner, refuse_other
from dpgrad.training.fit import ResumeWarning
from dpgrad.training.options import Computing, Privacy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("transformers", "peft", "accelerate")), reason="missing"
    ),
]
ROWS, LENGTH, TOKENS = 40, 6, 20
NOISE = Privacy(noise_multiplier=0.8)


def bert(classes: int = 2, **more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=2 * LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=classes, **more,
    )  # fmt: skip


def built(name: str, config: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config)
    return model


def classifier() -> nn.Module:
    """A BERT whose own weights are frozen, with LoRA adapters and a trained head."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(built("BertForSequenceClassification", bert()), adapters)  # type: ignore[arg-type]


def gpt2() -> nn.Module:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=TOKENS, n_positions=2 * LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return built("GPT2LMHeadModel", config)


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TOKENS, (ROWS, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids[:, 0] > TOKENS // 2).long()}


class Examples(Dataset[Any]):
    """Rows of columns as dicts, which transformers expects."""

    def __init__(self, table: dict[str, Tensor], first: int = 0) -> None:
        self.table, self.first = table, first

    def __len__(self) -> int:
        return ROWS - self.first

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[self.first + index] for name, column in self.table.items()}


def arguments(folder: Path, **given: Any) -> Any:
    from transformers import TrainingArguments

    usual: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.1,
        "optim": "sgd", "lr_scheduler_type": "linear", "logging_steps": 2, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**usual, **given})


def trainer(folder: Path, model: nn.Module, rows: Any, held_out: Any = None, **given: Any) -> Any:
    from dpgrad.integrations.transformers import DPTrainer

    known = {*arguments(folder).to_dict()} - {"seed"}
    settings = {name: given.pop(name) for name in [*given] if name in known}
    terms = {"delta": 1e-3, "privacy": NOISE, "seed": 5, **given}
    return DPTrainer(model, arguments(folder, **settings), train_dataset=rows, eval_dataset=held_out, **terms)


def plain(made: Any, model: nn.Module, loss: Any, data: dict[str, Tensor]) -> nn.Module:
    """The same run as a loop of one's own: same mechanism and seed, SGD with a linear schedule."""
    model.train()
    mechanism = made.plan.mechanism
    private = dpgrad.PrivateGradient(
        model, loss, mechanism, rule=dpgrad.recipes.autos().scaling(), microbatch=4, seed=5
    )
    for step in range(mechanism.steps):
        private.step(data)
        rate = 0.1 * (1 - step / mechanism.steps)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return model


def same(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


def of_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def test_a_classifier_with_lora_is_trained_as_by_a_loop_of_ones_own(tmp_path: Path) -> None:
    table = columns()
    made = trainer(
        tmp_path, classifier(), Examples(table), Examples(table, first=30), compute_metrics=accuracy,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    assert made.plan.mechanism.batch_size == 8
    assert made.plan.mechanism.sampler == dpgrad.sampling.Poisson(8 / ROWS)
    output = made.train()

    same(made.model, plain(made, classifier(), of_class, table))
    trained = {name for name, value in made.model.named_parameters() if value.requires_grad}
    changed = {name for name, value in made.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trained
    assert all("lora" in name or "classifier" in name for name in trained)

    assert made.guarantee() == made.plan.mechanism.guarantee(1e-3)
    assert made.report()["plan"]["method"]["optimizer"] == "SGD"
    assert not made.report()["release"]["allowed"]  # of a seed
    history = made.state.log_history
    assert not any("loss" in entry or "train_loss" in entry for entry in history)
    assert [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    assert history[-1]["epsilon"] == pytest.approx(made.guarantee().epsilon)
    assert math.isnan(output.training_loss)
    assert "train_loss" not in output.metrics
    with pytest.raises(RunError, match="begun already"):
        made.train()
    assert {"adapter_model.safetensors", "privacy.json"} <= {
        path.name for path in (tmp_path / "checkpoint-4").iterdir()
    }


def test_a_language_model_of_a_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = columns()
    table["labels"] = torch.where(table["attention_mask"] == 1, table["input_ids"], -100)
    rows = datasets.Dataset.from_dict({name: value.tolist() for name, value in table.items()} | {"text": ["a"] * ROWS})

    def next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:]
        counts = labels != -100
        picked = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return -(picked * counts).sum(1) / counts.sum(1)

    ledger = dpgrad.Ledger()
    made = trainer(tmp_path, gpt2(), rows, max_steps=-1, num_train_epochs=0.5, ledger=ledger, dataloader_num_workers=1)
    assert made.plan.steps == 3  # half of the five steps of an epoch, rounded up
    made.train()
    same(made.model, plain(made, gpt2(), next_word, table))
    assert made.guarantee() == made.plan.mechanism.guarantee(1e-3) == ledger.guarantee(1e-3)
    assert not (tmp_path / "privacy").exists()  # nothing was saved, so nothing can be resumed


class StopError(Exception):
    """What ends a process."""


def test_a_resumed_run_pays_for_the_steps_it_lost(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 6:
                raise StopError

    def made(**given: Any) -> Any:
        return trainer(
            tmp_path, classifier(), Examples(columns()), save_strategy="steps", save_steps=3, max_steps=8, seed=None,
            gradient_accumulation_steps=1, **{"privacy": Privacy(noise_multiplier=0.8, accountant="rdp"), **given},
        )  # fmt: skip

    first = made(callbacks=[Ends()])
    with pytest.raises(StopError):
        first.train()
    assert first.guarantee() == first.plan.guarantee
    second = made()
    with pytest.warns(ResumeWarning, match="resumes at step 3"):
        output = second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    run = second._run
    assert run._before == run.plan.mechanism.with_steps(6).event()  # all that the first process took
    assert output.global_step == run.last < 8
    assert second.guarantee().epsilon <= second.plan.guarantee.epsilon

    with pytest.raises(ResumeError, match="another mechanism"):
        made(privacy=Privacy(noise_multiplier=0.7)).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3" / "privacy.json").unlink()
    with pytest.raises(ResumeError, match="what was spent is not known"):
        made().train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    with pytest.raises(ResumeError, match="there is no checkpoint"):
        trainer(tmp_path / "none", classifier(), Examples(columns())).train(resume_from_checkpoint=True)


# ---- losses of single examples, by the models themselves


def of_words(labels: Tensor, **more: Tensor) -> dict[str, Tensor]:
    table = columns()
    return {"input_ids": table["input_ids"], "attention_mask": table["attention_mask"], "labels": labels, **more}


def tags() -> Tensor:
    table = columns()
    return torch.where(table["attention_mask"] == 1, table["input_ids"] % 3, -100)


def t5() -> nn.Module:
    from transformers import T5Config

    config = T5Config(
        vocab_size=TOKENS, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    return built("T5ForConditionalGeneration", config)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], ExampleLoss]] = {
    "one of several": (
        lambda: built("BertForSequenceClassification", bert(3)), lambda: torch.arange(ROWS) % 3, ExampleLoss(False),
    ),
    "several of several": (
        lambda: built("BertForSequenceClassification", bert(3, problem_type="multi_label_classification")),
        lambda: (columns()["input_ids"][:, :3] % 2).float(), ExampleLoss(False, "multi_label_classification"),
    ),
    "regression": (
        lambda: built("BertForSequenceClassification", bert(1)), lambda: torch.linspace(-1, 1, ROWS),
        ExampleLoss(False),
    ),
    "tokens": (lambda: built("BertForTokenClassification", bert(3)), tags, ExampleLoss(False)),
    "masked": (lambda: built("BertForMaskedLM", bert()), tags, ExampleLoss(False)),
    "causal": (gpt2, tags, ExampleLoss(True)),
    "sequence to sequence": (t5, tags, ExampleLoss(False)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_example_is_what_the_model_returns_for_it_alone(name: str) -> None:
    make, labels, loss = LOSSES[name]
    model, batch = make().eval(), of_words(labels())
    with torch.no_grad():
        found = loss(model, batch)
        alone = [model(**{name: value[i : i + 1] for name, value in batch.items()}).loss for i in range(8)]
    assert found.shape == (ROWS,)
    torch.testing.assert_close(found[:8], torch.stack(alone), rtol=1e-5, atol=1e-6)
    one = {name: value[:1] for name, value in batch.items()}
    refuse_other(loss, model, one)
    if one["labels"].ndim == 2 and not one["labels"].is_floating_point():
        with pytest.raises(UnsupportedModelError, match="compute_per_example_loss"):
            refuse_other(ExampleLoss(not loss.shift), model, one)


@pytest.mark.parametrize("shift", [False, True])
def test_label_smoothing_is_that_of_the_trainer(shift: bool) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    logits, labels = torch.randn(ROWS, LENGTH, 5), tags()
    ours = ExampleLoss(shift, smoothing=0.1).of(logits, labels)
    theirs = [
        LabelSmoother(0.1)({"logits": logits[i : i + 1]}, labels[i : i + 1], shift_labels=shift) for i in range(ROWS)
    ]
    torch.testing.assert_close(ours, torch.stack(theirs))


@pytest.mark.parametrize(("shape", "shift"), [((), False), ((LENGTH,), False), ((LENGTH,), True)])
def test_a_label_that_is_no_class_is_refused_without_naming_it(shape: tuple[int, ...], shift: bool) -> None:
    with pytest.raises(DataError, match="none of the model's 5 classes") as raised:
        ExampleLoss(shift).of(torch.zeros(3, *shape, 5), torch.full((3, *shape), 77))
    assert "77" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    def twice(outputs: Any, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
        return 2 * F.cross_entropy(outputs.logits, labels, reduction="none")

    table = columns()
    # Normalized gradients are the same of any multiple, so clip the usual way.
    method = dpgrad.recipes.dpsgd(clip=100.0)
    made = trainer(
        tmp_path, classifier(), Examples(table), compute_loss_func=twice, method=method, max_steps=1, bf16=True
    )
    made.train()
    other = trainer(
        tmp_path, classifier(), Examples(table), method=method, max_steps=1, bf16=True,
        compute_per_example_loss=lambda model, batch: 2 * of_class(model, batch),
    )  # fmt: skip
    other.train()
    same(made.model, other.model)
    mean = trainer(tmp_path, classifier(), Examples(table), compute_per_example_loss=lambda m, b: of_class(m, b).mean())
    with pytest.raises(UnsupportedModelError, match="one value per"):
        mean.train()


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing = True .* lower per_device_train_batch_size"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"include_num_input_tokens_seen": True}, "counts private tokens"),
        ({"train_sampling_strategy": "group_by_length"}, "batches are drawn at random"),
        ({"train_sampling_strategy": "sequential"}, "batches are drawn at random"),
    ],
)
def test_arguments_that_leak_or_break_are_refused(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    if not given.keys() <= arguments(tmp_path).to_dict().keys():
        pytest.skip("this version of transformers has no such argument")
    with pytest.raises(OptionError, match=told):
        trainer(tmp_path, nn.Linear(1, 1), None, **given)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("fp16", True, "use bf16"), ("deepspeed", "config.json", "one process"), ("fsdp", "full_shard", "one process"),
     ("_n_gpu", 2, "CUDA_VISIBLE_DEVICES"), ("optim", "galore_adamw_layerwise", "adamw_torch"),
     ("optim", "lomo", "adamw_torch")],
)  # fmt: skip
def test_arguments_of_other_machines_are_refused(tmp_path: Path, name: str, value: object, told: str) -> None:
    from dpgrad.integrations.transformers import DPTrainer

    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(OptionError, match=told):
        DPTrainer(classifier(), args, train_dataset=Examples(columns()), epsilon=1.0, delta=1e-3)


def test_a_clip_bound_of_the_whole_batch_is_not_applied(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"max_grad_norm = 0.3 is not applied: .*dpsgd\(clip=0.3\)"):
        made = trainer(tmp_path, classifier(), None, max_grad_norm=0.3)
    assert made.args.max_grad_norm == 0


def test_a_trainer_that_computes_its_own_loss_is_refused(tmp_path: Path) -> None:
    from dpgrad.integrations.transformers import DPTrainer

    class Own(DPTrainer):
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            return super().compute_loss(*args, **given)

    with pytest.raises(OptionError, match="compute_per_example_loss"):
        Own(classifier(), arguments(tmp_path), train_dataset=Examples(columns()), epsilon=1.0, delta=1e-3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_rows_that_cannot_be_drawn_or_are_judged_too_are_refused(tmp_path: Path) -> None:
    rows = Examples(columns())
    with pytest.raises(DataError, match="map-style"):
        trainer(tmp_path, classifier(), Stream())
    with pytest.raises(DataError, match="the evaluation rows are rows of the training data"):
        trainer(tmp_path, classifier(), rows, {"all": rows})
    made = trainer(tmp_path, classifier(), rows)
    with pytest.raises(DataError, match="the evaluation rows are rows of the training data"):
        made.evaluate(rows)
    with pytest.raises(DataError, match="the test rows are rows of the training data"):
        made.predict(Subset(rows, [3]))
    with pytest.raises(OptionError, match="each a release of its own"):
        made.hyperparameter_search()
    with pytest.raises(RunError, match="there is no train_dataset"):
        trainer(tmp_path, classifier(), None).train()
    with pytest.raises(OptionError, match="computing must not set workers"):
        trainer(tmp_path, classifier(), rows, computing=Computing(workers=1))
    made = trainer(tmp_path, classifier(), rows)
    made.args.max_steps = 2
    with pytest.raises(RunError, match="do not change the arguments"):
        made.train()


def test_parts_of_the_training_rows_are_refused_for_evaluation(tmp_path: Path) -> None:
    import datasets

    rows, table = Examples(columns()), datasets.Dataset.from_dict({k: v.tolist() for k, v in columns().items()})
    listed = [rows[index] for index in range(ROWS)]
    split = table.train_test_split(0.25, seed=1)
    for trained, held_out in (
        (rows, Subset(rows, range(5))), (Subset(rows, range(9)), Subset(rows, [8])), (table, table.select(range(5))),
        (table, {"some": table.select([1, 3])}), (listed, listed[:3]), (table, Subset(table, [2])),
    ):  # fmt: skip
        with pytest.raises(DataError, match="the evaluation rows are rows of the training data"):
            trainer(tmp_path, classifier(), trained, held_out)
    for trained, held_out in (
        (Subset(rows, range(9)), Subset(rows, range(9, 20))), (split["train"], {"a": split["test"]}),
        (listed[3:], listed[:3]),
    ):  # fmt: skip
        made = trainer(tmp_path, classifier(), trained, held_out)
        made.get_eval_dataloader("a" if isinstance(held_out, dict) else None)
    made.eval_dataset = listed[2:4]
    with pytest.raises(DataError, match="the evaluation rows are rows of the training data"):
        made.get_eval_dataloader()


def to_longest(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    most = max(int(example["attention_mask"].sum()) for example in examples)
    return {
        name: torch.stack([example[name][:most] if example[name].ndim else example[name] for example in examples])
        for name in examples[0]
    }


def at_random(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.1, 1, batch["input_ids"])}


def mixed(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**batch, "input_ids": batch["input_ids"].flip(0)}


def ragged(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    raise ValueError("expected sequence of length 3 at dim 1 (got 5)")  # as transformers says it


@pytest.mark.parametrize(
    ("collator", "told"),
    [
        (to_longest, "longest example of a batch.*max_length"),
        (at_random, "draws random numbers"),
        (mixed, "'input_ids'"),
        (ragged, "cannot put the examples into one batch: .*max_length"),
    ],
)
def test_a_collator_by_which_examples_meet_is_refused(tmp_path: Path, collator: Any, told: str) -> None:
    made = trainer(tmp_path, classifier(), Examples(columns()), data_collator=collator)
    with pytest.raises(DataError, match=told):
        made.train()
    assert made._run.event() == dpgrad.events.NOTHING


def test_checkpoints_hold_no_secret(tmp_path: Path) -> None:
    made = trainer(tmp_path, classifier(), Examples(columns()), max_steps=1, save_strategy="steps", save_steps=1)
    made.train()
    secret = made._run._key.secret
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert secret not in written
    assert secret.hex().encode() not in written
    assert json.loads((tmp_path / "checkpoint-1" / "privacy.json").read_text("utf-8"))["step"] == 1
    assert type(inner(made.model)).__name__ == "BertForSequenceClassification"
