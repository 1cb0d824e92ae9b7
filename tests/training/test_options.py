"""Every option is declared once: Python, TOML and the command line agree with that declaration."""

import argparse
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpgrad
from dpgrad import Computing, HeldOut, Privacy, Recipe, RunFolder, cli, errors, recipes
from dpgrad.training.curves import Progress
from dpgrad.training.diagnostics import Diagnostics
from dpgrad.training.options import Budget, parted

RECORDS = (Budget, Privacy, Computing, HeldOut, RunFolder, Recipe)
BUDGET: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-3, "steps": 3, "batch_size": 20}


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :3].argmax(1)


def declared() -> dict[str, dataclasses.Field[Any]]:
    return {
        field.name: field
        for record in RECORDS
        for field in dataclasses.fields(record)
        if field.metadata.get("kind") is not None
    }


def test_fit_has_sixteen_parameters() -> None:
    assert len(inspect.signature(dpgrad.fit).parameters) <= 16


def test_the_budget_is_that_of_fit() -> None:
    given = inspect.signature(dpgrad.fit).parameters
    for field in dataclasses.fields(Budget):
        assert given[field.name].default is field.default is None


def test_no_name_means_two_things() -> None:
    names = [field.name for record in RECORDS for field in dataclasses.fields(record)]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


@pytest.mark.parametrize("name", sorted(declared()))
def test_the_command_line_has_every_option_as_it_is_declared(name: str) -> None:
    field = declared()[name]
    commands = next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    (action,) = [a for a in commands.choices["train"]._actions if f"--{name.replace('_', '-')}" in a.option_strings]
    assert action.dest == name
    assert action.help == field.metadata["help"]
    assert action.default is None  # so that what was typed can be told from what was not
    assert tuple(action.choices or ()) == field.metadata["choices"]


@pytest.mark.parametrize("name", list(recipes.RECIPES))
def test_a_function_a_method(name: str) -> None:
    made = getattr(recipes, name.replace("-", "_"))
    assert made() == recipes.RECIPES[name]
    assert made(learning_rate=0.5).learning_rate == 0.5
    with pytest.raises(
        errors.OptionError, match="unknown option 'learning_rat' of a recipe: did you mean learning_rate"
    ):
        made(learning_rat=0.5)


def test_a_recipe_and_the_command_line_mean_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = (
        f"train --method psasc --clip 0.3 --learning-rate 4 --steps 5 --batch-size 64 --plan --json --out {tmp_path}"
    )
    assert cli.main(command.split()) == 0
    plan = json.loads(capsys.readouterr().out)["plans"]["psasc"]
    mine = recipes.psasc(clip=0.3, learning_rate=4.0, averaging=plan["averaging"])
    assert plan["method"] == json.loads(json.dumps(mine.to_dict()))


def test_options_by_name_are_parted() -> None:
    budget, privacy, left = parted({"epsilon": 1.0, "accountant": "rdp", "clip": 2.0, "delta": None})
    assert (budget, privacy, left) == (Budget(epsilon=1.0), Privacy(accountant="rdp"), {"clip": 2.0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(epsilon=0.0), "epsilon must be positive"),
        (lambda: Budget(delta=1.0), "delta must lie strictly between"),
        (lambda: Budget(steps=0), "steps must be a whole number of at least 1"),
        (lambda: Privacy(relation="neighbour"), "relation must be one of add-remove, zero-out, replace-one, got"),
        (lambda: Privacy(accountant="gdp"), "accountant must be one of pld"),
        (lambda: Computing(memory_limit=-1), "memory_limit must be a whole number"),
        (lambda: RunFolder("x", resume=1), "resume must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: RunFolder("x", checkpoint_every=0), "checkpoint_every must be a whole number"),
        (lambda: HeldOut(evaluate_every=0), "evaluate_every must be a whole number"),
        (lambda: dpgrad.fit(nn.Linear(4, 3), rows(), **BUDGET, privacy={}), "privacy must be a dpgrad.Privacy, got {}"),
        (lambda: dpgrad.fit(nn.Linear(4, 3), rows(), **BUDGET, callbacks=[3]), "callbacks must be functions"),
    ],
)  # fmt: skip
def test_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(errors.OptionError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


class TestFit:
    def test_a_dataset_of_dpgrad_is_data_with_its_held_out_rows(self) -> None:
        digits = dpgrad.data.load("digits")
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        done = dpgrad.fit(model, digits, epsilon=3, delta=1e-5, steps=2, batch_size=64)
        assert done.dataset is digits
        assert done.held_out is not None
        assert done.report()["data"]["name"] == "digits"

    def test_every_callback_is_told_and_one_of_them_may_stop_the_run(self) -> None:
        seen: list[Progress] = []
        callbacks = [lambda progress: progress.step == 2, seen.append, Diagnostics()]
        done = dpgrad.fit(nn.Linear(4, 3), rows(), **BUDGET, callbacks=callbacks)
        assert done.stopped == "interrupted"
        assert [progress.step for progress in seen] == [1, 2]
        assert done.diagnostics is not None
        one = dpgrad.fit(nn.Linear(4, 3), rows(), **BUDGET, callbacks=seen.append)
        assert one.stopped == "plan"
        assert len(seen) == 5

    def test_what_is_saved_is_reported_and_predicts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        done = dpgrad.fit(
            nn.Linear(4, 3), rows(), **BUDGET, folder=tmp_path / "run", held_out=HeldOut(evaluate_every=1)
        )
        assert len(done.curves) == 3
        assert done.held_out is None
        done.save(tmp_path / "saved")
        (tmp_path / "mine.py").write_text("from torch import nn\ndef make(): return nn.Linear(4, 3)\n", "utf-8")
        np.save(tmp_path / "rows.npy", rows()[0].numpy())
        for folder in (tmp_path / "run", tmp_path / "saved"):
            assert cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
            command = ["predict", str(folder), "--input", str(tmp_path / "rows.npy"), "--json"]
            capsys.readouterr()
            assert cli.main([*command, "--model", f"{tmp_path / 'mine.py'}:make"]) == 0
            found = json.loads(capsys.readouterr().out)
            wanted = done.model(rows()[0]).softmax(1)
            assert found["labels"] == [str(int(label)) for label in wanted.argmax(1)]
            assert cli.main(command) == 2
            assert "name the function that builds it with --model" in capsys.readouterr().err
            assert cli.main([*command, "--model", "nowhere.py:make"]) == 2
        with pytest.raises(errors.RunError, match="is not an empty folder"):
            done.save(tmp_path / "saved")

    def test_a_buffer_that_the_rows_changed_is_not_saved(self, tmp_path: Path) -> None:
        class Remembers(nn.Linear):
            def __init__(self) -> None:
                super().__init__(4, 3)
                self.register_buffer("seen", torch.zeros(()))

        model = Remembers()

        def stopped(progress: Progress) -> None:
            model.seen.fill_(float(rows()[0].sum()))  # a statistic of the rows, without noise

        done = dpgrad.fit(model, rows(), **BUDGET, callbacks=stopped)
        with pytest.raises(errors.UnsupportedModelError, match="seen of the model changed during the run"):
            done.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()

    def test_a_model_that_changed_after_the_run_is_not_saved(self, tmp_path: Path) -> None:
        done = dpgrad.fit(nn.Linear(4, 3), rows(), **BUDGET)
        with torch.no_grad():
            done.model.weight.add_(1.0)  # type: ignore[operator, union-attr]
        with pytest.raises(errors.UnsupportedModelError, match="the model changed after the run"):
            done.save(tmp_path / "saved")

    def test_a_model_that_takes_more_than_inputs_ends_with_a_report(self, tmp_path: Path) -> None:
        class Masked(nn.Linear):
            def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
                return super().forward(x * mask)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            found: Tensor = model(batch[0], batch[1][:, None]).square().sum(1)
            return found

        done = dpgrad.fit(Masked(4, 3), (rows()[0], torch.ones(80)), loss, **BUDGET, folder=tmp_path / "run")
        assert done.stopped == "plan"
        assert done.report()["model"] is None
        assert (tmp_path / "run" / "release" / "report.json").is_file()

    def test_a_figure_that_is_not_finite_does_not_lose_the_run(self, tmp_path: Path) -> None:
        inputs, held_out = rows()[0], (torch.full((5, 4), 3e38), torch.zeros(5, 1))
        data, folder = (inputs, inputs[:, :1]), tmp_path / "run"
        done = dpgrad.fit(nn.Linear(4, 1), data, "squared", **BUDGET, held_out=held_out, folder=folder)
        assert done.held_out is not None
        assert not np.isfinite(done.held_out)
        found = json.loads((folder / "release" / "report.json").read_text("utf-8"))
        assert found["result"]["held_out"] is None
