"""The kinds of errors: what they are, that everything refused is one of them, and how a caller meets each."""

import ast
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpgrad
from dpgrad import errors
from dpgrad.accounting.events import Approximate, Compose, Gaussian, Poisson, Repeat
from dpgrad.distributed.followed import identity_of_all
from dpgrad.runs.replay import Identity

PACKAGE = Path(dpgrad.__file__).parent
KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS)
class TestKinds:
    def test_is_caught_as_dpgrads_and_as_pythons(self, kind: type[Exception]) -> None:
        assert issubclass(kind, errors.DpgradError)
        assert issubclass(kind, ValueError)

    def test_is_documented(self, kind: type[Exception]) -> None:
        first, *_ = (kind.__doc__ or "").splitlines()
        assert first.endswith(".")
        assert first.count(". ") >= 1, "say when it is raised and what to do"

    def test_reaches_another_process(self, kind: type[Exception]) -> None:
        again = pickle.loads(pickle.dumps(kind("clip must be positive")))
        assert type(again) is kind
        assert str(again) == "clip must be positive"


def test_all_names_every_kind() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(errors.__all__) == defined
    assert errors.__all__ == sorted(errors.__all__)


def bare(source: str) -> list[int]:
    """The lines that make or raise a ValueError of no kind, or define a subclass of it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Name("ValueError")) | ast.Raise(ast.Name("ValueError")):
                found.append(node.lineno)
            case ast.ClassDef(name, bases) if not name.startswith("_"):
                found += [node.lineno for base in bases if isinstance(base, ast.Name) and base.id == "ValueError"]
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("raise ValueError", [1]),
        ("\nraise ValueError('x') from None", [2]),
        ("def f():\n    return ValueError('x')", [2]),
        ("class Odd(ValueError): ...", [1]),
        ("class _Odd(ValueError): ...", []),
        ("try: f()\nexcept ValueError: pass", []),
        ("raise OptionError('x')", []),
    ],
)
def test_bare_errors_are_found(source: str, lines: list[int]) -> None:
    assert bare(source) == lines


def test_every_error_has_a_kind() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if bare(path.read_text("utf-8"))}
    assert found == {"errors.py"}  # where DpgradError itself is made of it


ONE_STEP = dpgrad.Mechanism(dpgrad.sampling.FixedSize(8, 4), 1, 1.0, relation=dpgrad.Relation.REPLACE_ONE)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(batch)).square().sum(1)


def private(model: nn.Module | None = None, **given: Any) -> dpgrad.PrivateGradient:
    return dpgrad.PrivateGradient(model or nn.Linear(2, 1), squares, ONE_STEP, **given)


def bad_option(folder: Path) -> None:
    dpgrad.Mechanism(dpgrad.sampling.Poisson(2.0), steps=1, noise_multiplier=1.0)


def no_price(folder: Path) -> None:
    dpgrad.accounting.account(Poisson(0.1, Gaussian(1.0)), dpgrad.Relation.ADD_REMOVE, "exact")


def no_price_in_a_ledger(folder: Path) -> None:
    relation = dpgrad.Relation.ADD_REMOVE
    declared = Approximate(1.0, 1e-6, dpgrad.Relation.REPLACE_ONE)
    dpgrad.Ledger().add(Compose((declared, Gaussian(1.0))), relation, "a model")


def budget_too_small(folder: Path) -> None:
    dpgrad.calibrate.steps(lambda n: Repeat(Gaussian(0.5), n), epsilon=0.1, delta=1e-5)


def step_too_many(folder: Path) -> None:
    gradient, data = private(), torch.randn(8, 2)
    for _ in range(2):
        gradient.step(data)


def follower_at_its_end(folder: Path) -> None:
    follower = dpgrad.online.Follower(lambda n: Repeat(Gaussian(10.0), n), epsilon=1.0, delta=1e-5)
    for _ in range(10_000):
        follower.advance()


def edited_ledger(folder: Path) -> None:
    path = folder / "ledger"
    dpgrad.Ledger(path).add(Gaussian(1.0), dpgrad.Relation.ADD_REMOVE, "a model")
    path.write_bytes(path.read_bytes().replace(b"a model", b"no model"))
    dpgrad.Ledger(path).entries  # noqa: B018


def shortened_ledger(folder: Path) -> None:
    path = folder / "ledger"
    dpgrad.Ledger(path).add(Gaussian(1.0), dpgrad.Relation.ADD_REMOVE, "a model")
    path.unlink()
    dpgrad.Ledger(path).entries  # noqa: B018


def unknown_dataset(folder: Path) -> None:
    dpgrad.data.load("digit")


def rows_not_finite(folder: Path) -> None:
    dpgrad.convex.design.Design(np.full((2, 2), np.nan), radius=1.0)


def missing_file(folder: Path) -> None:
    dpgrad.data.load("mnist", folder)


def batch_norm(folder: Path) -> None:
    private(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).step(torch.randn(8, 2))


def one_loss_for_all(folder: Path) -> None:
    dpgrad.grads.check(nn.Linear(2, 1), lambda model, batch: model(batch).sum(), torch.randn(8, 2))


def captured_on_a_cpu(folder: Path) -> None:
    private(capture=True).prepare(torch.randn(8, 2))


def never_asked(key: object) -> Any:
    raise AssertionError("the folder is refused first")


def folder_taken(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine", "utf-8")
    dpgrad.checkpoint.Run.open(folder, never_asked, ONE_STEP, 1e-5)


def nothing_to_resume(folder: Path) -> None:
    dpgrad.checkpoint.Run.open(folder / "missing", never_asked, ONE_STEP, 1e-5, resume=True)


def state_of_something_else(folder: Path) -> None:
    private().restore({"step": 3})


def no_report(folder: Path) -> None:
    dpgrad.reports.report.released(folder)


def several_processes(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        private()


def ranks_that_differ(folder: Path) -> None:
    own = Identity({}, "rows", "code", "cpu", 1, None, {})
    identity_of_all([own, replace(own, code="other")], parts=False)


def unknown_option(folder: Path) -> None:
    dpgrad.recipes.psasc(lr=0.1)


def refuted_audit(folder: Path) -> None:
    from dpgrad import audit

    audit.scores([9.0] * 100, [0.0] * 100, (0.1, 1e-5)).assert_held()


MET = [
    (errors.OptionError, bad_option),
    (errors.UnknownOptionError, unknown_option),
    (errors.AccountingError, no_price),
    (errors.AccountingError, no_price_in_a_ledger),
    (errors.AuditError, refuted_audit),
    (errors.BudgetSpentError, budget_too_small),
    (errors.BudgetSpentError, step_too_many),
    (errors.BudgetSpentError, follower_at_its_end),
    (errors.LedgerError, edited_ledger),
    (errors.LedgerError, shortened_ledger),
    (errors.DataError, unknown_dataset),
    (errors.DataError, rows_not_finite),
    (errors.MissingFileError, missing_file),
    (errors.UnsupportedModelError, batch_norm),
    (errors.UnsupportedModelError, one_loss_for_all),
    (errors.CannotCaptureError, captured_on_a_cpu),
    (errors.RunError, folder_taken),
    (errors.ResumeError, nothing_to_resume),
    (errors.ResumeError, state_of_something_else),
    (errors.ReportError, no_report),
    (errors.RanksError, ranks_that_differ),
    (errors.UnsupportedSystemError, several_processes),
]


@pytest.mark.parametrize(("kind", "refused"), MET, ids=[refused.__name__ for _, refused in MET])
def test_a_caller_catches_what_they_mean(
    kind: type[Exception], refused: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPGRAD_DATA", raising=False)
    with pytest.raises(kind) as raised:
        refused(tmp_path)
    assert isinstance(raised.value, errors.DpgradError)
    closest = next(base for base in type(raised.value).__mro__ if base.__module__ == errors.__name__)
    assert closest is kind
    assert "\n" not in str(raised.value)


def test_every_kind_is_met() -> None:
    assert {kind for kind, _ in MET} == {*KINDS} - {errors.DpgradError}
