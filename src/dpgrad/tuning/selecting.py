"""`select`: run a random number of trials, and release the best of them alone.

Guarantee: the whole selection is charged before its first trial. How many trials there are, and which settings each
has, follow from a key that is drawn before any row is read. A trial that fails or has no score is the worst of all, and
nothing says that it failed. Trials, scores, their number and the key are kept in memory, or in ``private/``, which goes
when the winner is released.
"""

import copy
import math
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset, default_collate

from dpgrad import _processes, _validate
from dpgrad.accounting.events import Relation
from dpgrad.accounting.guarantee import Guarantee, up
from dpgrad.accounting.ledger import Ledger
from dpgrad.accounting.trials import Trials
from dpgrad.errors import OptionError, ResumeError, RunError
from dpgrad.grads.sums import Loss, trainable
from dpgrad.grads.swap import unwrapped
from dpgrad.mechanism.keys import Key
from dpgrad.runs.replay import data_digest
from dpgrad.runs.weights import Weights
from dpgrad.training import forms, source
from dpgrad.training.curves import Point
from dpgrad.training.fit import WEIGHTS, Fitted, ResumeWarning, fit
from dpgrad.training.losses import loss_named
from dpgrad.training.options import Budget, Computing, HeldOut, Privacy, RunFolder
from dpgrad.training.plan import Plan
from dpgrad.training.recipes import Recipe
from dpgrad.training.task import owners_of
from dpgrad.training.units import Owned
from dpgrad.tuning.planned import ACCOUNTANT, Configuration, SelectionPlan, plan
from dpgrad.tuning.scores import PrivateScore, PublicScore, Score, parted, zeros_like
from dpgrad.tuning.store import Best, Store

__all__ = ["Selected", "select"]

_PRIVACY, _COMPUTING = Privacy(), Computing()
DURATION = "how long the selection took: it depends on the number of trials, which is private"


@dataclass(frozen=True, repr=False)
class Selected:
    """The winner of a selection, and what the whole selection costs.

    ``fitted`` has the model, and the guarantee of the selection in place of that of one trial. ``configuration`` is the
    place of the winner's settings in the plan.
    """

    fitted: Fitted
    configuration: int
    plan: SelectionPlan

    @property
    def model(self) -> nn.Module:
        """The winner's model."""
        return self.fitted.model

    @property
    def guarantee(self) -> Guarantee:
        """That of the whole selection."""
        return self.plan.guarantee

    def __repr__(self) -> str:
        return f"<Selected configuration {self.configuration}: {self.guarantee}>"


def select(
    model: nn.Module,
    data: Any,
    loss: str | Loss = "cross-entropy",
    *,
    configurations: "Sequence[str | Recipe | Configuration]",
    score: Score,
    epsilon: float,
    delta: float,
    trials: str | Trials = "logarithmic",
    mean: float | None = None,
    folder: str | PathLike[str] | RunFolder | None = None,
    ledger: Ledger | None = None,
    seed: int | None = None,
    privacy: Privacy = _PRIVACY,
    computing: Computing = _COMPUTING,
) -> Selected:
    """Train a random number of models, each with one of ``configurations``, and return the one with the best score.

    Each trial begins with a copy of ``model``, which stays as it is. ``score`` is a `PublicScore` on rows that are not
    protected, or a `PrivateScore`, a noisy count that each trial pays for. ``epsilon`` and ``delta`` are for all
    together; `plan` says what is left for one trial, and what other ways would cost. With ``folder`` the selection can
    be resumed after a crash, and a release folder is written at its end, which holds the winner alone.

    Guarantee: the model returned, its settings and its report are private in the sense of the guarantee, if nobody
    looks at the trials, their scores or their number meanwhile: not into ``private/``, and not at the clock.
    """
    _processes.refuse_several()
    run_folder = folder if isinstance(folder, RunFolder) or folder is None else RunFolder(folder)
    task = _Task.of(model, data, loss, score, privacy, computing)
    rows = task.examples
    if isinstance(score, PrivateScore):
        rows -= round(score.share * rows)
    counted = sum(parameter.numel() for parameter in trainable(unwrapped(model)).values())
    found = plan(
        configurations, rows=rows, score=score, epsilon=epsilon, delta=delta, trials=trials, mean=mean,
        parameters=counted, privacy=privacy,
    )  # fmt: skip
    _refuse_relation(score, found.guarantee.relation)
    task.rehearse(found)
    release = None if run_folder is None else run_folder.release
    with ExitStack() as stack:
        store = None
        if run_folder is not None:
            store = stack.enter_context(Store.open(run_folder, task.identity(found), seed))
        key = store.key if store is not None else Key.fresh() if seed is None else Key.from_seed(seed)
        if ledger is not None:  # the whole selection, before its first trial
            name = secrets.token_hex(8) if store is None else store.identifier
            ledger.add(found.event, found.guarantee.relation, "tuning", name, privacy.unit)
        selection = _Selection(task, found, key, store)
        winner, number = selection.run()
        if store is not None:
            store.finish(winner.save if release is None else partial(_saved, winner, release))
            winner = replace(winner, folder=store.folder)
    return Selected(winner, number, found)


def _saved(winner: Fitted, release: Callable[[Path, Fitted], None], folder: Path) -> None:
    """Write the winner's weights, and what the caller adds to them."""
    folder.mkdir(parents=True, exist_ok=True)
    assert winner.weights is not None
    winner.weights.write(folder / WEIGHTS)
    release(folder, winner)


def _refuse_relation(score: Score, relation: Relation) -> None:
    if isinstance(score, PrivateScore) and relation is Relation.ADD_REMOVE:
        raise OptionError(
            "a private score splits the data by positions, and under add-remove a row more moves others between the "
            "parts: use relation zero-out or replace-one, or a public score"
        )


@dataclass(frozen=True)
class _Task:
    """What every trial trains."""

    model: nn.Module
    data: Any
    loss: str | Loss
    score: Score
    privacy: Privacy
    computing: Computing

    @classmethod
    def of(
        cls, model: nn.Module, data: Any, loss: str | Loss, score: Score, privacy: Privacy, computing: Computing
    ) -> "_Task":
        given: object = score  # a caller may ignore types
        if not isinstance(given, PublicScore | PrivateScore):
            raise OptionError(
                "score must be PublicScore(rows) on rows that are not protected, or PrivateScore(), got "
                f"{_validate.shown(given)}"
            )
        own: object = model
        if not isinstance(own, nn.Module):
            raise OptionError(f"model must be a torch.nn.Module, got {_validate.shown(own)}")
        taken = forms.taken(data, model=model)
        score.refuse(taken)
        if isinstance(score, PublicScore) and score.rows is not None:
            score = replace(score, rows=forms.taken(score.rows, "held_out", model))
        return cls(model, taken, loss, score, privacy, computing)

    @cached_property
    def owned(self) -> Owned | None:
        """Whose each row is, where rows belong to persons. Private."""
        judged, score, unit = None, self.score, self.privacy.unit
        if isinstance(score, PublicScore) and score.rows is not None:
            if self.privacy.units is not None and score.units is None:
                raise OptionError(
                    f"the rows of a public score have no owners, and a {unit} may own protected rows too: write "
                    "PublicScore(rows, units=ids), one id per row"
                )
            judged = HeldOut(score.rows, held_out_units=score.units)
        return owners_of(self.privacy, self.data, judged)

    @property
    def examples(self) -> int:
        """How many examples a trial draws from: rows, or persons where rows belong to persons."""
        return source.rows(self.data) if self.owned is None else len(self.owned)

    @property
    def collate(self) -> source.Collate:
        """How single rows become a batch."""
        return self.computing.collate or default_collate

    def identity(self, found: SelectionPlan) -> Callable[[Key], dict[str, Any]]:
        """What must be the same for a selection to go on, under its key."""
        return lambda key: {
            "event": _digest(key, repr((found.event, found.guarantee.relation, found.guarantee.delta))),
            "configurations": _digest(key, repr([one.recipe.to_dict() for one in found.plans])),
            "score": _digest(key, str(self.score)),
            "rows": source.rows(self.data),
            "units": None if self.owned is None else data_digest(key, (self.owned.rows, self.owned.weights)),
            "data": None if isinstance(self.data, Dataset) else data_digest(key, source.comparable(self.data)),
        }

    def rehearse(self, found: SelectionPlan) -> None:
        """Train a step of each configuration on rows of zeros: what cannot be trained is refused before it is paid for.

        No private value is read, so the error may be shown.
        """
        zeros = zeros_like(self.data, 4, self.collate)
        own = replace(
            self.privacy, noise_multiplier=1.0, units=None, rows_per_unit=None, unit_rule=None, unit_name=None,
            dataset_size=None, relation=None, accountant="rdp",
        )  # fmt: skip
        computing = replace(self.computing, memory_limit=None, collate=None)
        for one in found.configurations:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copied = copy.deepcopy(self.model)
                budget = Budget(delta=0.1, steps=1, batch_size=None if one.recipe.full_batch else 2)
                self.trained(copied, zeros, one.recipe, budget, privacy=own, computing=computing, seed=0)
                self.score.of(copied, loss_named(self.loss), Key.from_seed(0), 0, zeros, self.collate)

    def trained(self, model: nn.Module, data: Any, method: Recipe, budget: Budget, **how: Any) -> Fitted:
        """Fit one trial. The rehearsal makes the same call, and shows its mistakes before any row is read."""
        return fit(
            model, data, self.loss, method=method, epsilon=budget.epsilon, delta=budget.delta, epochs=budget.epochs,
            steps=budget.steps, batch_size=budget.batch_size, **how,
        )  # fmt: skip


def _digest(key: Key, text: str) -> str:
    return key.derive("selection", text).hex()


class _Selection:
    """A selection under way."""

    def __init__(self, task: _Task, found: SelectionPlan, key: Key, store: Store | None) -> None:
        self._task, self._plan, self._key, self._store = task, found, key, store
        self._train, self._scored = task.data, None
        if isinstance(task.score, PrivateScore):
            self._train, self._scored = parted(task.data, task.score.share, key)
        self._fitted: Fitted | None = None  # of the best so far, where there is no folder

    def run(self) -> tuple[Fitted, int]:
        """All trials; the winner and the place of its settings."""
        number = _drawn(self._plan.trials, self._key)
        best, first = (None, 0) if self._store is None else (self._store.best, self._store.taken)
        for trial in range(first, number):
            settings = int.from_bytes(self._key.derive("settings", str(trial), size=16), "little")
            best = self._trial(trial, settings % len(self._plan.plans), best)
        if best is None or not math.isfinite(best.score):
            self._forget()
            raise RunError(
                "the selection ended without a model: no trial was drawn, or none could be trained and scored. It is "
                "charged in full; allow more trials, or train each configuration by itself on other rows"
            )
        fitted = self._fitted if self._store is None else self._store.read(best, self._restored)
        assert fitted is not None
        return self._released(fitted, best), best.configuration

    def _trial(self, trial: int, settings: int, best: Best | None) -> Best | None:
        """One trial; the best so far. Its error is not shown: it may depend on the rows."""
        fitted, score = None, -math.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                fitted = self._trained(trial, settings)
                if fitted.stopped != "interrupted":
                    task = self._task
                    found = task.score.of(
                        fitted.model, loss_named(task.loss), self._key, trial, self._scored, task.collate
                    )
                    score = found if math.isfinite(found) else -math.inf
            except OSError as error:  # of a file: whoever has fixed it resumes; the path would tell which trial
                raise RunError(
                    f"a file could not be read or written ({error.strerror}): fix that, and resume"
                ) from None
            except Exception:  # the worst of all trials
                pass
        if fitted is not None and fitted.stopped == "interrupted":
            raise KeyboardInterrupt("the selection is charged in full; resume it where it has a folder")
        if fitted is not None and fitted.event != self._plan.plans[settings].mechanism.event():
            raise RunError(
                "a trial was not the one that the selection is priced for: nothing is released, and it is charged in "
                "full; give every option of the trials to select, and report this"
            )
        own = Best(trial, settings, score)
        better = fitted is not None and (best is None or score > best.score)
        if better and self._store is None:
            self._fitted = fitted
        best = own if better else best
        if self._store is not None:
            self._store.taken_trial(trial, best)
        return best

    def _trained(self, trial: int, settings: int) -> Fitted:
        task, one = self._task, self._plan.configurations[settings]
        budget = one.budget(self._plan.trial_epsilon, self._plan.guarantee.delta)
        own = int.from_bytes(self._key.derive("trial", str(trial), size=7), "little")
        seed = own if self._key.reproducible else None
        privacy = replace(task.privacy, accountant=ACCOUNTANT)

        def run(folder: RunFolder | None) -> Fitted:
            return task.trained(
                copy.deepcopy(task.model), self._train, one.recipe, budget, folder=folder, seed=seed, privacy=privacy,
                computing=task.computing,
            )  # fmt: skip

        if self._store is None:
            return run(None)
        known = self._store.trial(trial)
        if known.is_dir():
            if (finished := self._store.finished(trial, settings, self._restored)) is not None:
                return finished
            warnings.simplefilter("error", ResumeWarning)
            try:
                return run(self._store.run_folder(trial, resume=True))
            except (ResumeError, RunError, ResumeWarning):
                self._store.discard(trial)  # nothing of it was seen: it may begin anew, with another key
        return run(self._store.run_folder(trial, resume=False))

    def _restored(self, settings: int, state: dict[str, Any], told: dict[str, Any]) -> Fitted:
        """The result of a trial that ended in this folder, as it was written."""
        model = copy.deepcopy(self._task.model)
        weights = Weights(unwrapped(model))
        unwrapped(model).load_state_dict(state)
        weights.settle()
        one = self._plan.plans[settings]
        return Fitted(
            model=model, guarantee=one.guarantee, plan=one, event=one.mechanism.event(), curves=(), folder=None,
            diagnostics=None, way=None, dataset=None, weights=weights, **told,
        )  # fmt: skip

    def _released(self, fitted: Fitted, best: Best) -> Fitted:
        """The winner with the guarantee of the selection."""
        found, task = self._plan, self._task
        one = found.plans[best.configuration]
        alone = (
            f"chosen among {len(found.plans):,} settings by the best of a random number of trials ({found.trials}), "
            f"{task.score}"
        )
        cost = (
            f"tuning costs ε = {up(found.guarantee.epsilon)} in all, at δ = {found.guarantee.delta:g}; one trial alone "
            f"would have cost {up(one.guarantee.epsilon)}, by the same accountant"
        )
        learning_rate = one.learning_rate_at(one.steps - 1)
        clip = fitted.clip_bounds[-1][0] if fitted.clip_bounds else _last_clip(one)
        last = Point(
            one.steps, one.epochs, found.guarantee.epsilon, math.nan if learning_rate is None else learning_rate, clip,
            one.mechanism.multiplier_at(one.steps - 1), None,
        )  # fmt: skip
        return replace(
            fitted, plan=one, guarantee=found.guarantee, event=found.event, curves=(last,), way=None,
            outside=(*fitted.outside, DURATION), notes=(alone, cost),
            public=(*fitted.public, "the settings that are chosen among, and the law of the number of trials"),
        )  # fmt: skip

    def _forget(self) -> None:
        if self._store is not None:
            self._store.forget()


def _last_clip(one: Plan) -> float:
    return one.mechanism.clip_at(one.steps - 1, *one.mechanism.groups[:1])


def _drawn(law: Trials, key: Key) -> int:
    """The number of trials: the least k with P(K ≤ k) above a uniform number of 52 bits, from the key.

    It is the middle of one of 2^52 intervals, and never 0, at which a law without 0 would give 0.
    """
    return law.quantile(((int.from_bytes(key.derive("number of trials", size=8), "little") >> 12) + 0.5) / 2**52)
