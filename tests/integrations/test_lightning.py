"""The callback `DifferentialPrivacy` with a small LightningModule."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import dpgrad
from dpgrad.errors import DataError, OptionError, ResumeError, RunError, UnsupportedModelError
from dpgrad.training.fit import ResumeWarning
from dpgrad.training.options import Privacy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    # Lightning's own: too few workers, no logger, an existing folder, deprecations inside it
    pytest.mark.filterwarnings("ignore:::lightning"),
]
NOISE = Privacy(noise_multiplier=0.8)
INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())
TRAIN, HELD_OUT = Subset(ROWS, range(40)), Subset(ROWS, range(40, 60))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def module(**methods: Any) -> Any:
    """An ordinary LightningModule but for one word: its loss is not averaged."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, labels = batch
            loss = F.cross_entropy(self.net(inputs), labels, reduction="none")
            self.log("train_loss", loss.mean())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            inputs, labels = batch
            self.log("accuracy", (self.net(inputs).argmax(1) == labels).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return type("Classifier", (Classifier,), methods)()


def private(**given: Any) -> Any:
    from dpgrad.integrations.lightning import DifferentialPrivacy

    return DifferentialPrivacy(**{"delta": 1e-3, "privacy": NOISE, "seed": 5, **given})


def trainer(folder: Path, *callbacks: Any, **given: Any) -> Any:
    from lightning import Trainer

    usual = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
        "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(callbacks=[*callbacks], **{**usual, **given})


def loader(**given: Any) -> DataLoader[Any]:
    return DataLoader(TRAIN, **{"batch_size": 8, "shuffle": True, **given})


def test_a_module_is_trained_as_by_a_loop_of_ones_own(tmp_path: Path) -> None:
    callback, own = private(), module()
    runs = trainer(tmp_path, callback)
    with pytest.warns(UserWarning, match="what training_step logs is dropped"):
        runs.fit(own, loader(), DataLoader(HELD_OUT, batch_size=20))

    mechanism = callback.plan.mechanism
    model = nn.ModuleDict({"net": network()})  # noise is drawn by the names of parameters
    assert mechanism.sampler == dpgrad.sampling.Poisson(8 / 40)
    assert mechanism.steps == runs.global_step == 10

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model.net(batch[0]), batch[1], reduction="none")  # type: ignore[operator]

    rule = dpgrad.recipes.autos().scaling()
    gradient = dpgrad.PrivateGradient(model, losses, mechanism, rule=rule, seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for _ in range(mechanism.steps):
        gradient.step(tuple(column[:40] for column in ROWS.tensors))
        optimizer.step()
        schedule.step()
    for name, value in own.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)

    assert callback.guarantee() == mechanism.guarantee(1e-3)
    assert set(runs.callback_metrics) == {"accuracy", "epsilon"}
    assert float(runs.callback_metrics["epsilon"]) == pytest.approx(callback.guarantee().epsilon, rel=1e-5)
    found = callback.report()
    assert found["plan"]["method"]["optimizer"] == "SGD"
    assert found["result"]["steps"] == 10
    assert any("held-out rows" in entry for entry in found["outside"])
    assert own.training_step.__func__ is type(own).training_step  # the module has its own methods back
    assert "log" not in vars(own)
    with pytest.raises(RunError, match="its budget is for one"):
        trainer(tmp_path, callback).fit(own, loader())


def test_lora_by_peft_in_bfloat16_trains_the_adapters_alone(tmp_path: Path) -> None:
    import lightning

    peft = pytest.importorskip("peft")
    own = module()
    own.net = peft.get_peft_model(own.net, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    before = {name: value.clone() for name, value in own.state_dict().items()}
    callback, rows = private(), lightning.LightningDataModule()
    rows.train_dataloader = lambda: loader(num_workers=1)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="is dropped"):
        trainer(tmp_path, callback, max_steps=2, precision="bf16-mixed").fit(own, datamodule=rows)
    changed = {name for name, value in own.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora" in name}
    assert callback.plan.steps == 2


class StopError(Exception):
    """What ends a process."""


@pytest.mark.filterwarnings("ignore:what training_step logs")
def test_a_resumed_run_pays_for_the_steps_it_lost(tmp_path: Path) -> None:
    from lightning import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 9:
                raise StopError

    def saved() -> Any:
        return ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=-1, filename="{step}")

    def runs(*callbacks: Any) -> Any:
        return trainer(tmp_path, *callbacks, saved(), max_epochs=3, enable_checkpointing=True)

    quick = Privacy(noise_multiplier=0.8, accountant="rdp")
    first, second = private(seed=None, privacy=quick), private(seed=None, privacy=quick)
    with pytest.raises(StopError):
        runs(first, Ends()).fit(module(), loader())
    kept = tmp_path / "kept" / "step=5.ckpt"
    state = torch.load(kept, weights_only=False)
    assert state["callbacks"]["DifferentialPrivacy"]["step"] == 5
    assert first._run._key.secret not in kept.read_bytes()
    resumed = runs(second)
    with pytest.warns(ResumeWarning, match="resumes at step 5"):
        resumed.fit(module(), loader(), ckpt_path=kept)
    assert second._run._before == second.plan.mechanism.with_steps(9).event()
    assert 5 < resumed.global_step == second._run.last < 15
    assert second.guarantee().epsilon <= second.plan.guarantee.epsilon
    del state["callbacks"]["DifferentialPrivacy"]
    torch.save(state, kept)
    with pytest.raises(ResumeError, match="written without this callback"):
        runs(private()).fit(module(), loader(), ckpt_path=kept)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches must be 1 .*microbatch"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"limit_train_batches": 3}, "give max_steps instead"),
        ({"precision": "64-true"}, "precision must be 32-true or bf16-mixed"),
        ({"devices": 2, "strategy": "ddp_spawn"}, None),
        ({"max_epochs": -1}, "give Trainer max_epochs or max_steps"),
    ],
)
def test_settings_that_break_the_guarantee_are_refused(tmp_path: Path, given: dict[str, Any], told: str | None) -> None:
    from dpgrad.integrations.lightning import _refuse_trainer

    runs = trainer(tmp_path, private(), **given)
    if told is None:  # without starting other processes
        with pytest.raises(OptionError, match="write devices=1"):
            _refuse_trainer(runs, module())
        return
    with pytest.raises(OptionError, match=told):
        runs.fit(module(), loader())


class Stream(IterableDataset[Any]):
    """Rows that come by once."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("rows", "held_out", "told"),
    [
        (lambda: DataLoader(Stream(), batch_size=8), None, "map-style dataset"),
        (lambda: loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 40, 40)), None, "leave out its sampler"),
        (lambda: [torch.zeros(8, 4)], None, "one torch DataLoader"),
        (loader, lambda: DataLoader(Subset(ROWS, [5, 50])), "the validation rows are rows of the training"),
        (loader, lambda: {"all": DataLoader(TRAIN)}, "the validation rows are rows of the training data"),
    ],
)
def test_loaders_that_break_the_guarantee_are_refused(tmp_path: Path, rows: Any, held_out: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        trainer(tmp_path, private()).fit(module(), rows(), held_out and held_out())


def test_other_loops_of_the_trainer_refuse_training_rows(tmp_path: Path) -> None:
    model = module()
    model.test_step = model.predict_step = model.validation_step = lambda batch, batch_idx: model.net(batch[0])
    fitted = trainer(tmp_path, private())
    fitted.fit(model, loader())
    held_out = DataLoader(Subset(ROWS, [50]))
    for loop, name in ((fitted.test, "test"), (fitted.predict, "prediction"), (fitted.validate, "validation")):
        with pytest.raises(DataError, match=f"the {name} rows are rows of the training data"):
            loop(model, DataLoader(TRAIN))
        loop(model, held_out)


def test_parts_of_a_hugging_face_dataset_are_refused_for_validation(tmp_path: Path) -> None:
    import datasets

    rows: Any = datasets.Dataset.from_dict({"x": INPUTS.tolist()})
    with pytest.raises(DataError, match="the validation rows are rows of the training data"):
        trainer(tmp_path, private()).fit(module(), DataLoader(rows, batch_size=8), DataLoader(rows.select([3, 39])))


def mean_loss(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ({"training_step": mean_loss}, "one loss per example, got one for the batch: .*reduction='none'"),
        ({"automatic_optimization": False}, "optimizes by itself"),
        ({"on_after_batch_transfer": lambda self, batch, dataloader_idx: batch}, "on_after_batch_transfer"),
        ({"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())}, "not LBFGS"),
        ({"training_step": lambda self, dataloader_iter: None}, "must take"),
    ],
)
def test_modules_that_break_the_guarantee_are_refused(tmp_path: Path, methods: dict[str, Any], told: str) -> None:
    callback, own = private(), module(**methods)
    with pytest.raises(UnsupportedModelError, match=told):
        trainer(tmp_path, callback).fit(own, loader())
    assert callback._run is None or callback._run.event() == dpgrad.events.NOTHING


def test_other_callbacks_that_take_steps_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with pytest.raises(OptionError, match="GradientAccumulationScheduler"):
        trainer(tmp_path, private(), GradientAccumulationScheduler({1: 2})).fit(module(), loader())
    with pytest.raises(RunError, match="nothing is trained yet"):
        private().guarantee()
