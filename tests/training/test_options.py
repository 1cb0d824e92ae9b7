"""Every option is declared once: Python, TOML and the command line agree with that declaration."""

import argparse
import dataclasses
import inspect
import json
import pydoc
import re
import subprocess
import sys
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
from dpgrad.training.models import build
from dpgrad.training.options import Budget, parted, written

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
    commands = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
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
    with pytest.raises(errors.OptionError, match="has no option 'learning_rat': did you mean learning_rate"):
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

    def test_what_predictions_need_is_known_of_every_form_of_rows(self, tmp_path: Path) -> None:
        """Arrays, memory maps and tensors have one shape; the examples of another Dataset may not."""
        x, y = rows()[0].double().numpy(), rows()[1].numpy()
        np.save(tmp_path / "x.npy", x)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        held = torch.utils.data.TensorDataset(*rows())
        known = {"name": "own", "shape": [4], "outputs": 3, "dtype": "float32"}
        for given, wanted in (
            ((mapped, y), {**known, "dtype": "float64"}),
            (held, known),
            (torch.utils.data.Subset(held, range(len(held))), None),
        ):
            model = nn.Linear(4, 3, dtype=torch.float64 if given[0] is mapped else None)
            done = dpgrad.fit(model, given, **BUDGET)
            assert done.described == wanted
        ids = torch.randint(0, 9, (30, 5)), rows()[1][:30]
        done = dpgrad.fit(build("words", (5,), 3), ids, **BUDGET)
        assert done.described == {"name": "own", "shape": [5], "outputs": 3, "dtype": "int64"}

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


MISSPELT = {
    "optimizer": "adm", "averaging": "eam:0.9", "learning_rate_schedule": "cosin:0.1", "clip_schedule": "linaer",
    "rule": "psasac", "inner": "pats",
}  # fmt: skip


class TestMethods:
    def test_every_text_of_a_recipe_is_tried(self) -> None:
        texts = {f.name for f in dataclasses.fields(Recipe) if f.metadata.get("kind") in ("text", "name", "choice")}
        assert texts | {"rule"} == {*MISSPELT, "adaptive_clip"}  # which is numbers, tried below

    @pytest.mark.parametrize("name", MISSPELT)
    def test_a_misspelt_name_is_refused_at_once(self, name: str) -> None:
        said = f"{name.replace('clip_schedule', 'clip schedule')} must be .*, got '{MISSPELT[name]}': did you mean "
        with pytest.raises(errors.OptionError, match=said):
            recipes.psasc_momentum(**{name: MISSPELT[name]})
        with pytest.raises(errors.OptionError, match=said):
            dataclasses.replace(recipes.psasc_momentum(), **{name: MISSPELT[name]})

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"optimizer": 5}, "optimizer must be a function of the parameters or one of adadelta"),
            ({"optimizer": "adam", "momentum": 0.5}, "momentum = 0.5 is that of SGD"),
            ({"optimizer": torch.optim.Adam([nn.Parameter(torch.zeros(1))])}, "give lambda parameters: Adam"),
            ({"averaging": 3}, "averaging must be a text, got 3"),
            ({"averaging": "ema:2"}, "decay"),
            ({"adaptive_clip": "half"}, "adaptive_clip must be QUANTILE, QUANTILE:ETA or QUANTILE:ETA:NOISE, got"),
            ({"momentum": "0.5"}, "momentum must be a number, got '0.5'"),
            ({"augment": "shifts"}, "augment must be a function of"),
            ({"groups": "bias"}, "groups must be a tuple of dpgrad.Group"),
        ],
        ids=str,
    )
    def test_what_no_run_could_use(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(errors.OptionError, match=re.escape(said)):
            recipes.dpsgd(**given)

    @pytest.mark.parametrize("name", list(recipes.RECIPES))
    def test_the_signature_has_every_option_with_its_default(self, name: str) -> None:
        method = getattr(recipes, name.replace("-", "_"))
        shown = inspect.signature(method).parameters
        assert {key: one.default for key, one in shown.items()} == {
            field.name: getattr(recipes.RECIPES[name], field.name) for field in dataclasses.fields(Recipe)
        }
        assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in shown.values())
        text = pydoc.render_doc(method, renderer=pydoc.plaintext)
        for field in dataclasses.fields(Recipe):
            assert f"{field.name}: " in text
            assert field.metadata.get("help", "") in " ".join(text.split())

    def test_no_torch_for_a_signature(self) -> None:
        code = "import inspect, sys, dpgrad\ninspect.signature(dpgrad.recipes.psasc)\nassert 'torch' not in sys.modules"
        assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0

    def test_a_method_that_was_not_called(self) -> None:
        with pytest.raises(errors.OptionError, match=r"got the function psasc: call it, psasc\("):
            recipes.recipe(recipes.psasc)  # type: ignore[arg-type]


def tried(**given: Any) -> Any:
    options: dict[str, Any] = {"model": nn.Linear(4, 3), "data": rows(), **BUDGET, **given}
    return dpgrad.fit(options.pop("model"), options.pop("data"), **options)


class TestWhereAnOptionIsWritten:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"model": "cnn"}, "model must be a torch.nn.Module, got 'cnn': build it, dpgrad.training.models.build"),
            ({"model": nn.Linear}, "make one, Linear(...)"),
            ({"model": None}, "model must be a torch.nn.Module, got None"),
            ({"data": "digits"}, "write dpgrad.data.load('digits')"),
            (
                {"data": "my.csv"},
                "data must be tensors, arrays or a Dataset, got 'my.csv': write dpgrad.data.read('my.csv'",
            ),
            ({"held_out": 0.2}, "or HeldOut(rows, ...), got 0.2: keep rows apart before training, e.g. with "),
            ({"held_out": True}, "held_out must be rows, such as (inputs, targets)"),
            ({"held_out": "test"}, "held_out must be rows, such as (inputs, targets)"),
            ({"folder": 3}, "folder must be a path or a RunFolder, got 3"),
            ({"ledger": "books"}, "give Ledger(path)"),
            ({"privacy": {"relation": "zero-out"}}, "write privacy=dpgrad.Privacy(...)"),
            ({"computing": "vmap"}, "write computing=dpgrad.Computing(...)"),
            ({"epsilon": None}, "or delta and privacy=Privacy(noise_multiplier=...)"),
            ({"steps": None, "method": "dpsgd"}, "(or both epsilon and privacy=Privacy(noise_multiplier=...))"),
            ({"privacy": Privacy(relation="add-remove")}, "Give privacy=Privacy(dataset_size=...)"),
            ({"privacy": Privacy(noise_multiplier=0.1)}, "leave out privacy=Privacy(noise_multiplier=...)"),
            ({"secure_mode": True}, "fit has no option 'secure_mode': write privacy=Privacy(noise=\"secure\")"),
            ({"clip": 1.0}, "fit has no option 'clip': write method=recipes.auto(clip=...)"),
            ({"lr": 1.0}, "did you mean learning_rate? Write method=recipes.auto(learning_rate=...)"),
            ({"noise_multiplier": 1.0}, "write privacy=Privacy(noise_multiplier=...)"),
            ({"microbatch": 1}, "write computing=Computing(microbatch=...)"),
            ({"resume": True}, "write folder=RunFolder(path, resume=...)"),
            ({"metric": "accuracy"}, "write held_out=HeldOut(rows, metric=...)"),
            ({"epsilo": 1.0}, "fit has no option 'epsilo': did you mean epsilon?"),
        ],
        ids=str,
    )
    def test_one_line_says_what_to_write(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(errors.DpgradError, match=re.escape(said)) as raised:
            tried(**given)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("record", [Privacy, Computing, HeldOut, RunFolder])
    def test_every_option_of_a_record_is_found(self, record: type[Any]) -> None:
        for field in dataclasses.fields(record):
            assert f"{record.__name__}(" in written(field.name)
            with pytest.raises(TypeError, match=re.escape(written(field.name))):
                tried(**{field.name: None})

    def test_the_command_line_names_its_own_options(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert cli.main(f"train --noise-multiplier 0.1 --epsilon 1 --steps 9 --plan --out {tmp_path}".split()) == 2
        said = capsys.readouterr().err
        assert "leave out --noise-multiplier to have the noise found" in said
        assert "Privacy(" not in said

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Privacy(also_released="pca"),  # type: ignore[arg-type]
            lambda: Privacy(several_rows=3),  # type: ignore[arg-type]
            lambda: Computing(capture="yes"),  # type: ignore[arg-type]
            lambda: Computing(collate=3),  # type: ignore[arg-type]
            lambda: Computing(engine="vmpa"),
        ],
    )
    def test_a_record_is_checked_when_it_is_made(self, make: Any) -> None:
        with pytest.raises(errors.OptionError):
            make()

    def test_the_engines_are_those_of_grads(self) -> None:
        (field,) = [field for field in dataclasses.fields(Computing) if field.name == "engine"]
        assert field.metadata["choices"] == tuple(dpgrad.grads.ENGINES)
