"""Groups and persons on the command line."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpgrad import cli, data
from dpgrad.cli import _data
from dpgrad.training import advice

RUN = "epsilon --sampling-rate 0.05 --noise-multiplier 2 --steps 20 --delta 1e-5"
Answer = dict[str, Any]


def test_epsilon_of_a_group(answer: Callable[[str], Answer], told: Callable[[str], str]) -> None:
    one, three = answer(RUN), answer(f"{RUN} --group 3")
    assert "group" not in one
    assert three["epsilon"] == one["epsilon"]
    assert three["group"]["size"] == 3
    assert three["group"]["epsilon"] > 3 * one["epsilon"]
    assert answer(f"{RUN} --group 1")["group"]["epsilon"] == one["epsilon"]
    assert "differ by the presence of 3 rows" in told(f"{RUN} --group 3")


def test_refuses_groups_that_are_none(refused: Callable[..., str]) -> None:
    assert "--group must be a whole number of at least 1, got 0" in refused(f"{RUN} --group 0")
    assert "got 'x'" in refused(f"{RUN} --group x")
    assert "size of the group must be at most 1,000,000" in refused(f"{RUN} --group 1e7")
    assert "accountant strong-printed gives none" in refused(f"{RUN} --group 2 --accountant strong-printed")


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> int:
    """The digits, five of each person; the number of persons."""
    digits = data.load("digits")
    units = np.arange(len(digits.y_train)) // 5
    known = dataclasses.replace(digits, units=units, test_units=len(units) + np.arange(len(digits.y_test)))
    monkeypatch.setattr(_data, "load", lambda *_: known)
    return int(units[-1]) + 1


def test_train_counts_persons(owned: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"train --method dpsgd --model linear --steps 2 --batch-size 20 --no-baseline --out {tmp_path / 'run'}"
    assert cli.main([*words.split(), "--rows-per-unit", "2", "--unit-name", "writer", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["methods"]["dpsgd"]["report"]
    assert found["plan"]["dataset_size"] == owned
    assert found["plan"]["rows_per_unit"] == 2
    assert found["guarantee"]["privacy_unit"] == "one writer"
    assert f"out of {owned:,} writers" in (tmp_path / "run" / "release" / "report.txt").read_text("utf-8")


def test_tune_counts_persons(owned: int, answer: Callable[[str], Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults of delta and of the batch size are for so many persons, not rows."""
    monkeypatch.setattr(advice, "usual_delta", lambda size: 0.01 / size)
    found = answer("tune --plan --model linear --configuration dpsgd,steps=2")
    assert found["delta"] == 0.01 / owned
    assert found["configurations"][0]["batch_size"] == owned


def test_options_of_persons_need_persons(refused: Callable[..., str]) -> None:
    assert "the data name none: name the owner of each row" in refused("train --plan --rows-per-unit 2")
    assert "--rows-per-unit must be a whole number of at least 1, got 0" in refused("train --plan --rows-per-unit 0")
