"""`dpgrad tune`: the plan, a selection from end to end, and what is refused."""

import json
from pathlib import Path

import pytest

from dpgrad.cli import main

TWO = ["--configuration", "dpsgd,clip=0.1,learning_rate=20,steps=3", "--configuration", "autos,learning-rate=2,steps=4"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["tune", *words])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_plan_says_what_each_way_costs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--plan", "--json", "--epsilon", "4", *TWO)
    found = json.loads(out)
    assert status == 0
    assert found["epsilon"] <= 4
    assert len(found["configurations"]) == 2
    names = [one["name"] for one in found["prices"]]
    assert "one trial" in names
    assert any(name.startswith("composition") for name in names)
    assert "first to meet a target" in names


def test_a_selection_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_dir, ledger = tmp_path / "tuned", tmp_path / "ledger"
    words = ("--json", "--model", "linear", "--epsilon", "8", "--mean-trials", "2", *TWO)
    status, out, err = run(capsys, *words, "--out", str(out_dir), "--ledger", str(ledger), "--trials", "geometric")
    assert status == 0, err
    found = json.loads(out)
    assert found["configuration"] in TWO
    assert found["epsilon"] <= 8
    assert sorted(path.name for path in out_dir.iterdir()) == ["lock", "release"]
    assert json.loads((out_dir / "release" / "report.json").read_text("utf-8"))["model"]["name"] == "linear"
    assert "trial-" not in err
    assert main(["report", str(out_dir), "--json"]) == 0
    capsys.readouterr()
    status, _, err = run(capsys, *words, "--out", str(out_dir), "--resume")
    assert status == 2
    assert "is finished" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--configuration", "dpsgd,clip"], "--configuration must be METHOD"),
        (["--configuration", "dpsgd,epsilon=3"], "--configuration must be METHOD"),
        (["--configuration", "dpsgd,clip=-1"], "clip of --configuration must be positive"),
        (["--configuration", "dpsg"], "did you mean dpsgd"),
        (["--configuration", "auto", "--configuration", "auto"], "are the same"),
        ([], "--configuration is required"),
        ([*TWO, "--score-std", "3"], "--score-std is for --score private"),
        ([*TWO, "--score", "private", "--score-std", "0.01"], "costs more than epsilon"),
        ([*TWO, "--mean-trials", "0.5"], "mean number of trials"),
        (["--resume"], "--resume needs --out"),
        ([*TWO, "--device", "tpu"], "--device must be cpu or cuda"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    status, out, err = run(capsys, "--plan", *words)
    assert status == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
