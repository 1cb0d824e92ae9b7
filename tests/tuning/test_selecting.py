"""Selections: what is charged, what is kept, what leaves, and what a crash may not change."""

import functools
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpgrad
from dpgrad import Ledger, Privacy, Relation, RunFolder, recipes
from dpgrad.accounting.trials import NegativeBinomial, PoissonTrials
from dpgrad.errors import DpgradError, OptionError, ResumeError, RunError
from dpgrad.mechanism.keys import Key
from dpgrad.tuning import Configuration, PrivateScore, PublicScore, select, selecting
from dpgrad.tuning.scores import parted

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(120, 3, generator=GENERATOR)
DATA = INPUTS, (INPUTS[:, 0] > 0).long()
OTHERS = torch.randn(80, 3, generator=GENERATOR)
PUBLIC = PublicScore((OTHERS, (OTHERS[:, 0] > 0).long()))
LAW, PLAN = NegativeBinomial(1.0, 0.2), selecting.plan
# one that learns, and one that does not
MANY = [Configuration(recipes.dpsgd(clip=1.0, learning_rate=rate), steps=3, batch_size=30) for rate in (1e-9, 3.0)]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def chosen(**changed: Any) -> Any:
    settings: dict[str, Any] = {
        "configurations": MANY, "score": PUBLIC, "epsilon": 8.0, "delta": 1e-3, "trials": LAW,
        "seed": 3, "data": DATA, "model": network(),
    }  # fmt: skip
    settings |= changed
    return select(settings.pop("model"), settings.pop("data"), **settings)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(autouse=True, scope="module")
def planned_once() -> Any:
    """Equal plans are made once: tests of plans are elsewhere."""
    known: dict[str, Any] = {}

    def once(*given: Any, **options: Any) -> Any:
        name = repr((given, options, options["privacy"].units))  # which the repr of Privacy leaves out
        if name not in known:
            known[name] = PLAN(*given, **options)
        return known[name]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(selecting, "plan", once)
        yield


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods' learning rates of the trials that were trained, without the rehearsals on zeros."""
    seen: list[str] = []
    plain = selecting.fit

    def noted(model: Any, data: Any, *rest: Any, **options: Any) -> Any:
        if options.get("epsilon") is not None:
            seen.append(f"{options['method'].learning_rate:g}")
        return plain(model, data, *rest, **options)

    monkeypatch.setattr(selecting, "fit", noted)
    return seen


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no figures into pages: tests of pages are elsewhere, and one here writes a whole one."""
    monkeypatch.setattr(dpgrad.reports.page, "page", lambda *_: "")


@functools.cache
def whole_weights(seed: int) -> Tensor:
    """The weights of the winner of a selection that nothing interrupts."""
    return weights(chosen(seed=seed).model)


def drawn(seed: int, law: Any = LAW) -> int:
    return selecting._drawn(law, Key.from_seed(seed))


def test_the_best_of_as_many_trials_as_were_drawn(counted: list[str]) -> None:
    seed = next(seed for seed in range(50) if drawn(seed) == 5)
    given = network()
    before = weights(given).clone()
    found = chosen(seed=seed, model=given)
    assert len(counted) == 5
    assert found.configuration == 1  # the other learns nothing
    assert torch.equal(weights(given), before)
    assert not torch.equal(weights(found.model), before)
    assert found.fitted.guarantee == found.plan.guarantee
    assert found.fitted.event == found.plan.event


def test_each_trial_of_a_seeded_selection_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trials with the same noise would reveal the difference of their sums."""
    seeds: list[int] = []

    def failing(*_: Any, **options: Any) -> Any:
        seeds.append(options["seed"])
        raise ValueError

    monkeypatch.setattr(selecting._Task, "rehearse", lambda *_: None)
    monkeypatch.setattr(selecting, "fit", failing)
    with pytest.raises(RunError, match="ended without a model"):
        chosen(seed=next(seed for seed in range(50) if drawn(seed) == 5))
    assert len(set(seeds)) == len(seeds) == 5


def test_the_number_of_trials_has_its_law() -> None:
    """Of 2,000 keys. A chi-squared statistic of 5 cells is above 18.5 once in a thousand sound laws."""
    law = NegativeBinomial(0.0, 0.3)
    numbers = [selecting._drawn(law, Key.from_seed(seed)) for seed in range(2000)]
    expected = [2000 * weight for _, weight in zip(range(5), law.weights(), strict=False)][1:]
    expected.append(2000 - sum(expected))
    seen = [numbers.count(k) for k in range(1, 5)]
    seen.append(2000 - sum(seen))
    assert sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True)) < 18.5
    assert PoissonTrials(0.1).quantile(0.5) == 0


def test_the_whole_is_charged_before_the_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()

    class StopError(BaseException):
        pass

    def stop(self: Any, *rest: Any) -> Any:
        raise StopError

    monkeypatch.setattr(selecting._Selection, "_trained", stop)
    with pytest.raises(StopError):
        chosen(ledger=ledger)
    entry = ledger.entries()[0]
    assert entry.label == "tuning"
    assert ledger.guarantee(1e-3, "rdp").epsilon <= 8.0


def test_only_the_winner_leaves(tmp_path: Path) -> None:
    ledger = Ledger()
    found = chosen(folder=tmp_path / "run", ledger=ledger, seed=None)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock", "release"]
    report = dpgrad.reports.report.load(tmp_path / "run")
    assert report["guarantee"]["epsilon"] == found.guarantee.epsilon <= 8.0
    assert report["release"]["allowed"]
    assert any("tuning costs" in note for note in report["notes"])
    assert selecting.DURATION in report["outside"]
    assert report["event"]["type"] == "selection"
    assert len(ledger.entries()) == 1
    kept = torch.load(tmp_path / "run" / "release" / "weights.pt", weights_only=True)
    assert torch.equal(torch.cat([value.flatten() for value in kept.values()]), weights(found.model))
    text = (tmp_path / "run" / "release" / "report.json").read_text("utf-8")
    assert '"taken"' not in text
    assert 'score": ' not in text


@pytest.mark.usefixtures("undrawn")
def test_a_folder_and_memory_agree(tmp_path: Path) -> None:
    one, other = chosen(), chosen(folder=tmp_path / "run")
    assert one.configuration == other.configuration
    assert torch.equal(weights(one.model), weights(other.model))
    assert not one.fitted.report()["release"]["allowed"]  # from a seed


class Crash(BaseException):  # as sudden as a kill
    pass


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("within", [False, True], ids=["after a trial", "within a trial"])
def test_a_selection_goes_on_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str], at: int, within: bool
) -> None:
    seed = next(seed for seed in range(50) if drawn(seed) == 5)
    whole = whole_weights(seed)
    counted.clear()
    ledger, calls = Ledger(), iter(range(100))
    private = tmp_path / "run" / "private"

    def crash(*_: Any) -> Any:
        if next(calls) == at:
            assert stat.S_IMODE(os.stat(private).st_mode) == 0o700
            raise Crash
        return DEFAULT(*_)

    place = (dpgrad.training.session.Session, "save") if within else (selecting.Store, "taken_trial")
    DEFAULT = getattr(*place)
    monkeypatch.setattr(*place, crash)
    with pytest.raises(Crash):
        chosen(seed=seed, folder=tmp_path / "run", ledger=ledger)
    monkeypatch.setattr(*place, DEFAULT)
    with pytest.raises(RunError, match="not finished: resume it"):
        chosen(seed=seed, folder=tmp_path / "run", ledger=ledger)
    found = chosen(seed=seed, folder=RunFolder(tmp_path / "run", resume=True), ledger=ledger)
    assert torch.equal(weights(found.model), whole)
    assert len(counted) <= 6  # none that had ended was trained again
    assert len(ledger.entries()) == 1
    assert not private.exists()
    with pytest.raises(ResumeError, match="finished"):
        chosen(seed=seed, folder=RunFolder(tmp_path / "run", resume=True))


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Path:
    def crash(*_: Any) -> Any:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(selecting.Store, "taken_trial", crash)
        with pytest.raises(Crash):
            chosen(folder=tmp_path / "run", **changed)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "changed",
    [
        {"data": (INPUTS + 1, DATA[1])},
        {"data": (INPUTS[:90], DATA[1][:90])},
        {"epsilon": 7.0},
        {"configurations": [*MANY, "auto"]},
        {"score": PrivateScore(0.2, 20.0)},
        {"seed": 4},
        {"trials": NegativeBinomial(1.0, 0.3)},
    ],
    ids=[str(n) for n in range(7)],
)
def test_another_selection_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any) -> None:
    folder = begun(tmp_path, monkeypatch)
    with pytest.raises(ResumeError):
        chosen(**({"folder": RunFolder(folder, resume=True)} | changed))
    assert (folder / "private" / "selection.json").exists()


def test_a_crash_between_release_and_removal_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting.Store, "forget", lambda store: None)
    chosen(folder=tmp_path / "run")
    monkeypatch.undo()
    assert (tmp_path / "run" / "private").exists()
    with pytest.raises(ResumeError, match="finished"):
        chosen(folder=RunFolder(tmp_path / "run", resume=True))
    assert not (tmp_path / "run" / "private").exists()


@pytest.mark.parametrize("at", range(3))
def test_a_crash_during_the_removal_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Files are removed in any order: the state may go first."""
    monkeypatch.setattr(selecting.Store, "forget", lambda store: None)
    chosen(folder=tmp_path / "run")
    monkeypatch.undo()
    private = tmp_path / "run" / "private"
    shutil.rmtree(next(private.glob("trial-*")))
    assert {path.name for path in private.iterdir()} == {"README.txt", "selection.json"}
    for name in ["selection.json", "README.txt"][:at]:
        (private / name).unlink()
    with pytest.raises(ResumeError, match="finished"):
        chosen(folder=RunFolder(tmp_path / "run", resume=True))
    assert not private.exists()


@pytest.mark.parametrize("left", [(), ("README.txt",), ("README.txt", "selection.json.partial")], ids=len)
def test_a_crash_before_the_first_trial_leaves_a_new_folder(tmp_path: Path, left: tuple[str, ...]) -> None:
    private = tmp_path / "run" / "private"
    private.mkdir(parents=True, mode=0o700)
    for name in left:
        (private / name).write_text("{", "utf-8")
    chosen(folder=tmp_path / "run")
    assert (tmp_path / "run" / "release").exists()
    assert not private.exists()


def test_failing_trials_are_the_worst_and_nobody_hears_of_them(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = selecting.fit

    def failing(model: Any, data: Any, *rest: Any, **options: Any) -> Any:
        if options.get("epsilon") is not None and options["method"].learning_rate < 1:
            raise ValueError("patient 17 has the value 3.25")
        return plain(model, data, *rest, **options)

    monkeypatch.setattr(selecting, "fit", failing)
    seed = next(seed for seed in range(50) if drawn(seed) > 6)  # both settings are tried
    assert chosen(seed=seed).configuration == 1
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")

    def never(*rest: Any, **options: Any) -> Any:
        return plain(*rest, **options) if options.get("epsilon") is None else 1 / 0

    monkeypatch.setattr(selecting, "fit", never)
    with pytest.raises(RunError, match="ended without a model") as refused:
        chosen(seed=seed)
    assert refused.value.__cause__ is None
    assert "17" not in str(refused.value)


def test_no_trial_at_all_is_told_alike(tmp_path: Path) -> None:
    law = PoissonTrials(0.5)
    seed = next(seed for seed in range(50) if drawn(seed, law) == 0)
    with pytest.raises(RunError, match="ended without a model"):
        chosen(seed=seed, trials=law, folder=tmp_path / "run")
    assert not (tmp_path / "run" / "private").exists()


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 1.0], [1.0, 1.0]], ids=str)
def test_scores_that_are_no_numbers_and_ties(values: list[float], counted: list[str]) -> None:
    """NaN and ∞ are the worst of all; of equal scores the first wins."""
    seed = next(seed for seed in range(50) if drawn(seed) == 3)
    calls = iter([0.0] * len(MANY) + [*values, -1.0, -1.0])  # the first are the rehearsals
    found = chosen(seed=seed, score=PublicScore(function=lambda model: next(calls)))
    wanted = 0 if values == [1.0, 1.0] else 1
    rates = [f"{one.recipe.learning_rate:g}" for one in MANY]
    assert found.configuration == rates.index(counted[wanted])


def test_what_cannot_be_trained_is_refused_before_it_is_paid_for() -> None:
    ledger = Ledger()
    with pytest.raises(DpgradError):
        chosen(model=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), ledger=ledger)
    with pytest.raises(ZeroDivisionError):
        chosen(score=PublicScore(function=lambda model: 1 / 0), ledger=ledger)
    assert not ledger.entries()


def test_a_call_that_cannot_be_made_shows_before_it_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial and its rehearsal are one call: an error in it is told, not counted as a failed trial."""
    plain, ledger = selecting.fit, Ledger()

    def renamed(model: Any, data: Any, loss: Any, *, method: Any, target_epsilon: Any = None, **rest: Any) -> Any:
        if "epsilon" in rest:
            raise TypeError("fit() got an unexpected keyword argument 'epsilon'")
        return plain(model, data, loss, method=method, epsilon=target_epsilon, **rest)

    monkeypatch.setattr(selecting, "fit", renamed)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        chosen(ledger=ledger)
    assert not ledger.entries()


def test_every_configuration_is_scored_before_it_is_paid_for() -> None:
    calls, ledger = iter([0.0]), Ledger()
    with pytest.raises(StopIteration):
        chosen(score=PublicScore(function=lambda model: next(calls)), ledger=ledger)
    assert not ledger.entries()


def test_a_private_score(counted: list[str]) -> None:
    found = chosen(score=PrivateScore(0.25, 3.0), epsilon=20.0)
    assert found.guarantee.epsilon <= 20.0
    assert found.plan.plans[0].dataset_size == 90
    train, scored = parted(DATA, 0.25, Key.from_seed(3))
    assert len(train[0]), len(scored[0]) == (90, 30)
    both = torch.cat([train[0], scored[0]])
    assert torch.equal(both[both[:, 0].argsort()], INPUTS[INPUTS[:, 0].argsort()])
    for changed, message in (
        ({"privacy": Privacy(dataset_size=120)}, "splits the data by positions"),
        ({"privacy": Privacy(units=list(range(120)))}, "counts rows"),
    ):
        with pytest.raises(OptionError, match=message):
            chosen(score=PrivateScore(0.25, 3.0), epsilon=20.0, **changed)


def test_the_noisy_count_is_the_count_with_its_noise() -> None:
    """A model that is always right, over 400 trials: mean n/2 and the standard deviation asked for, to 4.5 errors."""
    score, key = PrivateScore(0.5, 2.0), Key.from_seed(5)
    right = nn.Linear(3, 2)
    with torch.no_grad():
        right.weight.copy_(torch.tensor([[-9.0, 0, 0], [9.0, 0, 0]]))
        right.bias.zero_()
    from dpgrad.training.losses import loss_named

    seen = torch.tensor([score.of(right, loss_named("cross-entropy"), key, trial, DATA) for trial in range(400)])
    assert abs(seen.mean() - 60) < 4.5 * 2 / 20
    assert abs(seen.std() / 2 - 1) < 4.5 / math.sqrt(800)


def test_training_rows_are_no_public_score() -> None:
    with pytest.raises(DpgradError):
        chosen(score=PublicScore(DATA))
    with pytest.raises(OptionError, match="score must be"):
        chosen(score=0.5)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x", "utf-8")
    for folder, message in (("file", "is a file"), ("full", "other files")):
        with pytest.raises(RunError, match=message):
            chosen(folder=tmp_path / folder)
    with pytest.raises(RunError, match="cannot be kept"):
        chosen(folder=RunFolder(tmp_path / "run", keep_private=True))
    with pytest.raises(ResumeError, match="missing"):
        chosen(folder=RunFolder(tmp_path / "run", resume=True))


def test_replace_one_and_json(tmp_path: Path) -> None:
    found = chosen(privacy=Privacy(relation=Relation.REPLACE_ONE))
    assert found.guarantee.relation is Relation.REPLACE_ONE
    assert json.loads(found.fitted.report().json())["guarantee"]["relation"] == "replace-one"
