"""`dpgrad train` without --method: auto, except on digits; the plan says what was chosen."""

import json

import pytest

from dpgrad import cli, data
from dpgrad.training import auto, jobs


def test_the_plan_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("train --method auto --model linear --plan --json".split()) == 0
    plan = json.loads(capsys.readouterr().out)["plans"]["auto"]
    assert plan["steps"] == auto.steps_for(1437)
    assert plan["chosen_by_rule"].startswith(f"{plan['steps']} steps of ")
    assert plan["averaging"] is None  # the settings of digits are not those of auto
    assert cli.main("train --method auto --model linear --epochs 5 --clip 0.5 --plan".split()) == 0
    shown = capsys.readouterr().out
    assert "chosen by rule" in shown
    assert "clip bound        0.5" in shown


def test_the_default_method() -> None:
    digits = data.load("digits")
    assert "auto" not in jobs.job(digits).methods
    other = data.Dataset(
        "toy", digits.x_train, digits.y_train, digits.x_test, digits.y_test, digits.classes, "default", "none", ()
    )
    assert jobs.job(other).methods == ("auto",)
