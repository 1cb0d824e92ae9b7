"""`dpgrad audit`: what it audits, its words, its exit status and its refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planted
from dpgrad import cli

SMALL = 'method = "dpsgd"\nsteps = 5\nbatch-size = 64\nmodel = "linear"\n'


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sign of life on standard error, however slow the machine, and less to run."""
    import contextlib

    from dpgrad.audit import steps

    monkeypatch.setattr("dpgrad.cli._options.patience", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(steps, "CHECKS", ("noise", "ledger"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(SMALL, "utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = cli.main(["audit", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_honest_job_is_not_refuted(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, "--config", config)
    assert code == 0
    assert found["refuted"] is False
    assert list(found["audits"]) == ["dpsgd"]
    record = found["audits"]["dpsgd"]
    assert record["words"].startswith("Not refuted. This does not prove the claim; tried: noise size")
    assert record["for_release"] is False
    assert {check["name"] for check in record["checks"]} >= {"noise size", "ledger"}


def test_refuted_job_exits_with_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with planted.less_noise(0.9)():
        code, found = run(capsys, "--config", config)
    assert code == 1
    assert found["refuted"] is True
    assert found["audits"]["dpsgd"]["words"].endswith("at level 0.001")


def test_words_for_people(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--config", config]) == 0
    out = capsys.readouterr().out
    assert "Not refuted. This does not prove the claim" in out
    assert "not for release" in out
    assert "passed" not in out
    assert "verified" not in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('data = "digit"', "did you mean digits"),
        ('method = "sgdd"', "method"),
        ("epsilon = -1", "epsilon"),
        ("colour = 3", "unknown key"),
        ("= 3", "not TOML"),
    ],
)
def test_what_cannot_be_run_exits_with_2(text: str, said: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text, "utf-8")
    assert said in refused(f"audit --config {path}")


def test_missing_file_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "there is no such file" in refused(f"audit --config {tmp_path / 'none.toml'}")
