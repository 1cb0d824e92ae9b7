"""What precedes a run: where the data lie, which optimizer, which classes, how long it will take."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from dpgrad.training import curves, prepare, recipes
from dpgrad.training.losses import NamedLoss
from dpgrad.training.plan import make

CPU = torch.device("cpu")


def rows(count: int = 60) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :3].argmax(1)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_tensors_stay_where_they_are() -> None:
    inputs, targets = rows()
    assert prepare.within_reach((inputs, targets), CPU)[0].data_ptr() == inputs.data_ptr()
    held = inputs.numpy()
    assert prepare.within_reach(held, CPU).data_ptr() == inputs.data_ptr()


def test_datasets_and_memory_maps_stay_as_they_are(tmp_path: Path) -> None:
    dataset = TensorDataset(*rows())
    assert prepare.within_reach(dataset, CPU) is dataset
    np.save(tmp_path / "inputs.npy", rows()[0].numpy())
    held = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    assert prepare.within_reach([held, rows()[1]], CPU)[0] is held


def test_read_only_arrays_are_copied_and_not_shared() -> None:
    held = np.arange(3.0)
    held.flags.writeable = False
    found = prepare.within_reach(held, CPU)
    found += 1
    assert held.tolist() == [0, 1, 2]


def test_every_name_of_torch_makes_an_optimizer() -> None:
    names = recipes.optimizers()
    assert {"adam", "adamw", "rmsprop", "adagrad", "sgd"} <= set(names)
    assert not {"lbfgs", "optimizer", "sparseadam"} & set(names)
    for name, kind in names.items():
        if name != "muon":  # for matrices alone
            assert isinstance(prepare.optimizer_named(name, [nn.Parameter(torch.zeros(2, 2))], 0.1, 0.0), kind)


def test_classes() -> None:
    model, loss = nn.Linear(4, 3), NamedLoss("cross-entropy")
    assert prepare.classes_of(model, loss, rows(), default_collate) == 3
    assert prepare.classes_of(model, loss, TensorDataset(*rows()), default_collate) == 3
    assert prepare.classes_of(model, NamedLoss("squared"), rows(), default_collate) is None


def test_looking_for_classes_does_not_move_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    prepare.classes_of(model, NamedLoss("cross-entropy"), rows(), default_collate)
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert model.training


def test_expected_time_reads_shapes_and_leaves_the_model_alone() -> None:
    plan = make("psasc-momentum", rows=60, batch_size=15, steps=12, noise_multiplier=1.0, delta=1e-3)
    model = nn.Linear(4, 3)
    before = weights(model)
    inputs, targets = rows()
    spoilt = torch.full_like(inputs, math.nan), targets
    found = prepare.expected_seconds(model, spoilt, NamedLoss("cross-entropy"), plan)
    assert 0 < found < 60
    assert torch.equal(weights(model), before)


def test_expected_time_of_texts() -> None:
    """Rows of words must differ, as the check of a model asks for; they take the memory of about one row."""
    plan = make("dpsgd", rows=60, batch_size=15, steps=4, noise_multiplier=1.0, delta=1e-3)
    texts = torch.zeros(60, 2, 4, dtype=torch.int64), torch.zeros(60, dtype=torch.int64)
    model = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(24, 2))
    assert prepare.expected_seconds(model, texts, NamedLoss("cross-entropy"), plan) > 0
    found = prepare._made_up(texts[0][:1], 10**6, torch.device("cpu"))
    assert found.shape == (10**6, 2, 4)
    assert found.untyped_storage().nbytes() < 9 * 10**6
    assert sorted(set(found[:4].flatten().tolist())) == [0, 1]
    assert not torch.equal(found[0], found[1])


def test_expected_time_counts_the_prices_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ε so far is priced twenty times; at a large ε that takes longer than the steps."""
    plan = make("dpsgd", rows=60, batch_size=15, steps=40, noise_multiplier=1.0, delta=1e-3)
    clock = [0.0]
    priced = curves.account

    def slow(*args: Any) -> Any:
        clock[0] += 3.0
        return priced(*args)

    monkeypatch.setattr(prepare.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(curves, "account", slow)
    found = prepare.expected_seconds(nn.Linear(4, 3), rows(), NamedLoss("cross-entropy"), plan)
    spent, before = curves.Spent(plan), clock[0]
    for step in range(1, 41):
        spent(step)
    assert found == clock[0] - before > 50


def test_labels_of_all_rows_are_checked_for_bce() -> None:
    inputs, targets = rows()
    signed = torch.where(targets == 0, -1.0, 1.0)
    with pytest.raises(ValueError, match="targets of bce must lie from 0 to 1"):
        prepare.classes_of(nn.Linear(4, 1), NamedLoss("bce"), (inputs, signed), default_collate)
    prepare.classes_of(nn.Linear(4, 1), NamedLoss("bce"), (inputs, (signed + 1) / 2), default_collate)
