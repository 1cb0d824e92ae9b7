"""Attacks on selections: trials that are not the ones priced, scores that one row moves too far, and wasted budgets."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpgrad import Ledger, Privacy, Relation
from dpgrad.accounting import account
from dpgrad.accounting.events import Gaussian, Inexact, Repeat, Selection
from dpgrad.accounting.trials import NegativeBinomial
from dpgrad.errors import AccountingError, DataError, DpgradError, OptionError, RunError
from dpgrad.mechanism.keys import Key
from dpgrad.training.losses import loss_named
from dpgrad.tuning import Configuration, PrivateScore, PublicScore, plan, select, selecting

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(90, 3, generator=GENERATOR)
DATA = INPUTS, (INPUTS[:, 0] > 0).long()
OTHERS = torch.randn(20, 3, generator=GENERATOR)
ROWS = OTHERS, (OTHERS[:, 0] > 0).long()
LAW = NegativeBinomial(1.0, 0.5)
UNITS = torch.arange(90) // 3


def chosen(**changed: Any) -> Any:
    settings: dict[str, Any] = {
        "configurations": [Configuration("dpsgd", steps=2, batch_size=9)], "score": PublicScore(ROWS), "epsilon": 4.0,
        "delta": 1e-3, "trials": LAW, "seed": 3, "data": DATA, "model": nn.Linear(3, 2),
    }  # fmt: skip
    settings |= changed
    return select(settings.pop("model"), settings.pop("data"), **settings)


def test_persons_are_priced_as_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 persons with 90 rows a batch of 9 draws each with probability 0.3, not 0.1."""
    ran = []
    plain = selecting.fit

    def noted(*given: Any, **options: Any) -> Any:
        found = plain(*given, **options)
        if options.get("epsilon") is not None:
            ran.append(found.event)
        return found

    monkeypatch.setattr(selecting, "fit", noted)
    found = chosen(score=PublicScore(ROWS, units=[99] * 20), privacy=Privacy(units=UNITS))
    assert ran
    assert set(ran) == {found.plan.plans[0].mechanism.event()}
    assert found.plan.plans[0].mechanism.sampler.sampling_rate_at(0) == pytest.approx(0.3)
    real = account(Selection((ran[0],), LAW), Relation.ZERO_OUT, "rdp").epsilon(1e-3)
    assert real == found.guarantee.epsilon <= 4.0


def test_nobody_is_protected_and_public() -> None:
    with pytest.raises(OptionError, match=r"PublicScore\(rows, units=ids\)"):
        chosen(privacy=Privacy(units=UNITS))
    with pytest.raises(DataError, match="belong to a person who also has training rows"):
        chosen(score=PublicScore(ROWS, units=[29] * 20), privacy=Privacy(units=UNITS))
    for asked in (chosen, partial(plan, ["auto"], rows=30, epsilon=4.0, delta=1e-3)):
        with pytest.raises(OptionError, match="a private score counts rows, and one person may have many"):
            asked(score=PrivateScore(), privacy=Privacy(units=UNITS))
    with pytest.raises(OptionError, match="it has none"):
        PublicScore(function=float, units=[1])


def test_a_trial_that_is_not_the_one_priced_is_not_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = selecting.fit

    def other(*given: Any, **options: Any) -> Any:
        if options.get("epsilon") is not None:
            options["batch_size"] = 30
        return plain(*given, **options)

    monkeypatch.setattr(selecting, "fit", other)
    with pytest.raises(RunError, match="not the one that the selection is priced for"):
        chosen(folder=tmp_path / "run")
    assert not (tmp_path / "run" / "release").exists()


def test_one_row_of_several_labels_moves_a_private_count_by_one() -> None:
    """Every two rows of two labels that differ in one row, with noise too small to matter."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data.copy_(torch.eye(2))
    score = PrivateScore(0.5, std=1e-9)

    def count(*labels: tuple[int, int]) -> float:
        rows = torch.ones(len(labels), 2), torch.tensor(labels).float()
        return score.of(model, loss_named("bce"), Key.from_seed(0), 0, rows)

    each = list(product((0, 1), repeat=2))
    moved = [abs(count(kept, one) - count(kept, other)) for kept, one, other in product(each, repeat=3)]
    assert max(moved) == pytest.approx(1, abs=1e-6)


def test_a_private_score_that_cannot_be_computed_is_refused_before_it_is_paid_for(tmp_path: Path) -> None:
    data = INPUTS.view(45, 2, 3), DATA[1].view(45, 2)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(DpgradError):
        chosen(data=data, score=PrivateScore(0.2), privacy=Privacy(several_rows=True), ledger=ledger)
    assert not ledger.entries()


class _Named(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": INPUTS[row], "note": object(), "y": DATA[1][row]}  # torch cannot collate a note


def _pairs(rows: list[dict[str, Any]]) -> Any:
    return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])


def test_rows_are_scored_by_the_collate_they_are_trained_with() -> None:
    from dpgrad import Computing

    found = chosen(data=_Named(), score=PrivateScore(0.2), computing=Computing(collate=_pairs))
    assert found.configuration == 0


def test_secure_noise_has_no_price_within_a_selection() -> None:
    with pytest.raises(OptionError, match="noise secure is not priced within a selection"):
        chosen(privacy=Privacy(noise="secure"))
    with pytest.raises(AccountingError, match="secure noise has no price"):
        Selection((Repeat(Inexact(Gaussian(4.0), 1e-20), 3),), LAW)


def test_a_law_without_zero_never_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Key, "derive", lambda self, *names, size=32: bytes(size))
    assert selecting._drawn(LAW, Key.from_seed(0)) == 1
    monkeypatch.setattr(Key, "derive", lambda self, *names, size=32: b"\xff" * size)
    assert selecting._drawn(LAW, Key.from_seed(0)) > 40
