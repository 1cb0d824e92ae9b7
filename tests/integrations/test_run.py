"""The private half of another library's loop: its record of what was spent, and how it continues."""

import dataclasses
import importlib
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpgrad
from dpgrad.accounting import account
from dpgrad.errors import BudgetSpentError, OptionError, ResumeError, RunError, UnsupportedModelError
from dpgrad.integrations.run import PrivateRun, Terms
from dpgrad.training.fit import ResumeWarning
from dpgrad.training.options import Computing, Privacy

NOISE = Privacy(noise_multiplier=2.0)
DATA = torch.arange(80.0).reshape(40, 2) / 40


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch))[:, 0].square()


def made(steps: int = 6, **given: Any) -> PrivateRun:
    terms = Terms(**{"delta": 1e-3, "privacy": NOISE, **given})
    return PrivateRun(terms, terms.plan(nn.Linear(2, 1), rows=40, batch_size=10, steps=steps))


def test_the_plan_leaves_the_rate_to_the_other_library() -> None:
    told = str(Terms(delta=1e-3, epsilon=3.0).plan(nn.Linear(2, 1), rows=40, batch_size=10, steps=4))
    assert "learning rate     that of your optimizer\n" in told
    assert "4 = 1 epoch of batches" in told
    assert "for 1 epoch;" in told
    assert "sgd" not in told
    assert "chosen by us" not in told


def begun(run: PrivateRun, steps: int) -> PrivateRun:
    run.begin(nn.Linear(2, 1), losses, DATA, microbatch=None)
    for _ in range(steps):
        run.step()
    return run


def epsilon(run: PrivateRun) -> float:
    """The ε of everything that all processes of the run released, by the events alone."""
    return account(run.event(), run.plan.mechanism.relation, run.plan.guarantee.accountant).epsilon(run.plan.delta)


def test_a_whole_run_costs_its_plan(tmp_path: Path) -> None:
    run = made()
    run.open(tmp_path)
    begun(run, 6).close()
    assert run.done
    assert run.event() == run.plan.mechanism.event()
    assert run.guarantee() == run.plan.guarantee
    with pytest.raises(BudgetSpentError, match="all 6 steps"):
        run.step()
    with pytest.raises(RunError, match=r"make another one .* dpgrad.Ledger"):
        run.open(tmp_path)


def test_a_run_that_stops_early_costs_its_plan(tmp_path: Path) -> None:
    run = made()
    run.open(tmp_path)
    begun(run, 2).close()
    assert run.guarantee() == run.plan.guarantee
    assert run.report(nn.Linear(2, 1), None, 0.1, held_out=False)["stopped"] == "interrupted"


def test_a_run_that_failed_before_its_first_step_can_be_opened_again(tmp_path: Path) -> None:
    run = made(ledger=dpgrad.Ledger())
    run.open(tmp_path)
    with pytest.raises(UnsupportedModelError):
        run.begin(nn.Linear(2, 1), lambda model, batch: losses(model, batch).mean(), DATA, microbatch=None)
    run.close()
    assert run.event() == run.terms.ledger.event() == dpgrad.events.NOTHING  # type: ignore[union-attr]
    run.open(tmp_path)
    begun(run, 6).close()
    assert run.guarantee() == run.plan.guarantee


def test_a_resume_from_the_last_step_takes_all_steps(tmp_path: Path) -> None:
    first = made()
    first.open(tmp_path)
    begun(first, 3).close()
    second = made()
    second.open(tmp_path, first.state(), 3)
    begun(second, 3).close()
    assert second.done
    assert second.taken == second.last == 6
    assert epsilon(second) == pytest.approx(second.plan.guarantee.epsilon, rel=1e-6)


@pytest.mark.parametrize("crashed", [False, True], ids=["stopped", "crashed"])
def test_steps_after_the_checkpoint_are_charged_twice(tmp_path: Path, crashed: bool) -> None:
    full: Any = {"steps": 60, "method": "dpgd", "privacy": Privacy(noise_multiplier=20.0, accountant="exact")}
    first = made(**full)
    first.open(tmp_path)
    state = begun(first, 20).state()
    for _ in range(10):
        first.step()
    if crashed:  # nothing is given back: a block of 50 steps stays spent
        assert first._lock is not None
        dpgrad._files.unlock(first._lock)
    else:
        first.close()
    second = made(**full)
    with pytest.warns(ResumeWarning, match="ends after"):
        second.open(tmp_path, state, 20)
    assert second.start == 20
    lost = second.plan.mechanism.with_steps(50 if crashed else 30).event()
    assert second._before == lost
    assert 20 < second.last < 60
    begun(second, second.last - 20).close()
    assert second.done
    assert epsilon(second) <= second.plan.guarantee.epsilon
    assert second.guarantee().epsilon == pytest.approx(epsilon(second))
    longer = dpgrad.accounting.events.Compose((lost, second.plan.mechanism.with_steps(second.last - 20 + 1).event()))
    assert account(longer, second.plan.mechanism.relation, "exact").epsilon(1e-3) > second.plan.guarantee.epsilon
    assert second.report(nn.Linear(2, 1), None, 0.1, held_out=False)["stopped"] == "budget"


def test_a_new_key_is_used_after_a_resume(tmp_path: Path) -> None:
    first = made(seed=3)
    first.open(tmp_path)
    begun(first, 2).close()
    second = made(seed=3)
    second.open(tmp_path, first.state(), 2)
    assert second._key != first._key
    assert second._key.reproducible


def test_no_secret_is_written(tmp_path: Path) -> None:
    run = made()
    run.open(tmp_path)
    begun(run, 2).close()
    assert set(run.state()) == {"run", "step", "attempt", "until"}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert run._key.secret not in written
    assert run._key.secret.hex().encode() not in written
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    first = made()
    first.open(tmp_path)
    begun(first, 3).close()
    state = first.state()
    with pytest.raises(ResumeError, match=r"record .* is missing"):
        made().open(tmp_path / "elsewhere", state, 3)
    with pytest.raises(ResumeError, match=r"record .* is missing"):
        made().open(tmp_path, {"run": "../../etc/passwd"}, 3)
    with pytest.raises(ResumeError, match="do not belong together"):
        made().open(tmp_path, state, 5)
    with pytest.raises(ResumeError, match="another mechanism"):
        made(privacy=Privacy(noise_multiplier=1.5)).open(tmp_path, state, 3)
    with pytest.raises(ResumeError, match="another mechanism"):
        made(delta=1e-4).open(tmp_path, state, 3)
    running = made()
    running.open(tmp_path, state, 3)
    with pytest.raises(RunError, match="in use"):
        made().open(tmp_path, state, 3)


FULL: dict[str, Any] = {"steps": 200, "method": "dpgd", "privacy": Privacy(noise_multiplier=40.0, accountant="exact")}


def test_a_record_that_says_less_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    first = made(**FULL)
    first.open(tmp_path)
    at_60 = begun(first, 60).state()
    for _ in range(60):
        first.step()
    at_120 = first.state()
    first.close()
    (path,) = tmp_path.glob("*.jsonl")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line.split(maxsplit=1)[1]).get("until") for line in lines[2:]] == [50, 100, 150, 120]
    older = {name: at_120[name] for name in ("run", "step")}  # as checkpoints were, which named neither
    cut = b"".join(lines[:3])
    for left, state in ((cut, at_120), (cut, older), (b"".join(lines[:4]), at_120), (cut, at_60)):
        path.write_bytes(left)
        with pytest.raises(ResumeError, match="is older than the checkpoint"):
            made(**FULL).open(tmp_path, state, state["step"])
        assert path.read_bytes() == left
    path.write_bytes(whole)
    for damaged in ({"attempt": 2}, {"attempt": 0}, {"attempt": "1"}, {"until": 151}, {"until": None}):
        with pytest.raises(ResumeError, match="is older than the checkpoint"):
            made(**FULL).open(tmp_path, {**at_120, **damaged}, 120)
    second = made(**FULL)
    with pytest.warns(ResumeWarning):
        second.open(tmp_path, at_60, 60)  # 100 steps were reserved then; those not taken were given back
    state = begun(second, 1).state()
    second.close()
    path.write_bytes(whole)  # the steps that the second process took again are missing from it
    with pytest.raises(ResumeError, match="is older than the checkpoint"):
        made(**FULL).open(tmp_path, state, 61)


@pytest.mark.parametrize("state_of", [lambda state: state, lambda state: {"run": state["run"], "step": state["step"]}])
def test_a_record_as_it_was_left_is_resumed(tmp_path: Path, state_of: Any) -> None:
    first = made(**FULL)
    first.open(tmp_path)
    begun(first, 120).close()
    second = made(**FULL)
    second.open(tmp_path, state_of(first.state()), 120)
    assert second.start == 120
    second.close()
    third = made(**FULL)
    third.open(tmp_path, state_of(second.state()), 120)  # of a process that took no step
    assert third.last == 200


def test_a_spent_budget_is_refused(tmp_path: Path) -> None:
    first = made()
    first.open(tmp_path)
    state = {**begun(first, 6).state(), "step": 1}
    first.close()
    with pytest.raises(BudgetSpentError, match="the budget is spent"):
        made().open(tmp_path, state, 1)


def test_a_ledger_adds_up_runs(tmp_path: Path) -> None:
    ledger = dpgrad.Ledger()
    first = made(ledger=ledger)
    first.open(tmp_path)
    begun(first, 3).close()
    assert ledger.guarantee(1e-3).epsilon == pytest.approx(first.plan.guarantee.epsilon)  # the plan, though it stopped
    second = made(ledger=ledger)
    second.open(tmp_path, first.state(), 3)
    begun(second, 1).close()
    assert ledger.guarantee(1e-3).epsilon == pytest.approx(first.plan.guarantee.epsilon, rel=1e-6)  # the same run


def test_what_is_protected_is_said_as_the_plan_says_it(tmp_path: Path) -> None:
    ledger = dpgrad.Ledger()
    first = made(ledger=ledger)
    first.plan = dataclasses.replace(first.plan, unit="letter")
    first.open(tmp_path)
    state = begun(first, 2).state()
    first.step()
    first.close()
    assert {entry.unit for entry in ledger.entries()} == {"letter"}
    second = made()
    second.plan = dataclasses.replace(second.plan, unit="letter")
    with pytest.warns(ResumeWarning):
        second.open(tmp_path, state, 2)
    begun(second, second.last - 2).close()
    assert second.guarantee() != second.plan.guarantee
    assert second.guarantee().unit == "letter"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"privacy": Privacy()}, "a budget is required"),
        ({"delta": None}, "delta is required"),
        ({"delta": 0.5}, "delta must be below 1/n"),
        ({"method": "dpsdg"}, "did you mean dpsgd"),
        ({"privacy": 3.0}, r"write privacy=dpgrad.Privacy\(...\)"),
        ({"computing": Computing(workers=2)}, "computing must not set workers"),
        ({"privacy": Privacy(units=[0] * 40, noise_multiplier=2.0)}, r"must not set units: .* dpgrad\.fit"),
        ({"privacy": Privacy(rows_per_unit=2, noise_multiplier=2.0)}, r"must not set rows_per_unit: .* dpgrad\.fit"),
        ({"privacy": Privacy(unit_rule="first", noise_multiplier=2.0)}, r"must not set unit_rule: .* dpgrad\.fit"),
        ({"privacy": Privacy(unit_name="x", noise_multiplier=2.0)}, r"must not set unit_name: .* dpgrad\.fit"),
        ({"ledger": "a.jsonl"}, r"ledger must be a dpgrad.Ledger"),
    ],
)
def test_terms_are_checked(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        made(**given)


def test_the_report_says_whose_optimizer_it_was() -> None:
    run = made(method=dpgrad.recipes.psasc(clip=0.5))
    run.open()
    model = nn.Linear(2, 1)
    begun(run, 6).close()
    found = run.report(model, torch.optim.AdamW(model.parameters()), 0.1, held_out=True)
    json.dumps(found, allow_nan=False)
    assert found["plan"]["method"]["optimizer"] == "AdamW"
    assert found["plan"]["learning_rate"] is None
    assert found["plan"]["method"]["momentum"] == 0
    assert found["result"]["steps"] == 6
    assert found["release"]["allowed"]


@pytest.mark.parametrize("module", ["lightning", "transformers"])
def test_a_missing_library_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, f"dpgrad.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"^dpgrad.integrations.{module} needs {module}.*pip install 'dpgrad\["):
        importlib.import_module(f"dpgrad.integrations.{module}")
