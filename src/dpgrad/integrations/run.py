"""The private half of another library's training loop: its plan, its steps, and the record of what was spent.

The other library keeps its loop, optimizer, schedules, evaluation, logs and checkpoints. dpgrad draws the batches,
clips, adds noise and accounts.

Checkpoints of other libraries are copied and uploaded, so no key is ever written to one. A run that continues from a
checkpoint draws a new key. Every step that the old key may have taken stays spent, the steps from the checkpoint on are
charged too, and the run ends where its budget does. What was spent is read from a record that is on disk before
anything of a step is computed (`dpgrad.runs.writeahead`); it holds public values only.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dpgrad import _files, _processes, _validate
from dpgrad.accounting.events import NOTHING, Event, together
from dpgrad.accounting.guarantee import Guarantee, not_covered
from dpgrad.accounting.ledger import Ledger
from dpgrad.errors import BudgetSpentError, DataError, OptionError, ResumeError, RunError
from dpgrad.grads.sums import Loss, trainable
from dpgrad.mechanism.keys import Key
from dpgrad.reports import report
from dpgrad.runs.writeahead import WriteAhead, charges
from dpgrad.training.curves import Point, Spent, share_rows
from dpgrad.training.fit import Fitted, ResumeWarning
from dpgrad.training.options import Budget, Computing, Privacy
from dpgrad.training.plan import Plan, planned
from dpgrad.training.private import PrivateGradient
from dpgrad.training.recipes import Recipe, recipe
from dpgrad.training.source import Collate

__all__ = ["FOLDER", "IndexedRows", "PrivateRun", "Terms", "refuse_training_rows", "ticks"]

FOLDER = "privacy"  # where the records of runs are, in the output folder of the other library
_PRIVACY, _COMPUTING = Privacy(), Computing()
_RESERVE = 50  # steps that are spent at a time, with one write that waits for the disk


@dataclass(frozen=True)
class Terms:
    """The privacy settings of a run by another library: arguments of `dpgrad.fit`, under the same names.

    The learning rate, the optimizer and averages of a method are the other library's, and left out of it.

    >>> Terms(epsilon=3.0, delta=1e-5).plan(nn.Linear(2, 1), rows=1000, batch_size=100, steps=20).steps
    20
    """

    epsilon: float | None = None
    delta: float | None = None
    method: str | Recipe = "autos"
    privacy: Privacy = _PRIVACY
    computing: Computing = _COMPUTING
    ledger: Ledger | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("privacy", Privacy), ("computing", Computing)):
            if not isinstance(getattr(self, name), kind):
                raise OptionError(
                    f"{name} must be a dpgrad.{kind.__name__}, got {_validate.shown(getattr(self, name))}: write "
                    f"{name}=dpgrad.{kind.__name__}(...)"
                )
        for name in ("collate", "workers"):
            if getattr(self.computing, name):
                raise OptionError(f"computing must not set {name}: it is taken from the data loader's settings")
        for name in ("units", "rows_per_unit", "unit_rule", "unit_name"):
            if getattr(self.privacy, name) is not None:
                raise OptionError(
                    f"privacy must not set {name}: under another library's loop single rows are drawn and clipped, so "
                    "one row is protected; to protect a person with all of their rows, train with dpgrad.fit"
                )
        if self.ledger is not None and not isinstance(self.ledger, Ledger):
            raise OptionError(f"ledger must be a dpgrad.Ledger, got {_validate.shown(self.ledger)}: give Ledger(path)")

    def plan(self, model: nn.Module, rows: int, batch_size: float, steps: int) -> Plan:
        """The plan of ``steps`` steps on ``rows`` rows, expected ``batch_size`` of them per step."""
        _processes.refuse_several()
        method = recipe(self.method)
        if method.temperature is not None:
            raise OptionError("temperature is found by dpgrad.fit after its last step: leave it out here")
        theirs = dict.fromkeys(("learning_rate", "learning_rate_schedule", "optimizer", "averaging"))
        chosen = tuple(name for name in method.chosen if name not in {*theirs, "momentum"})
        method = dataclasses.replace(method, momentum=0.0, chosen=chosen, **theirs)  # type: ignore[arg-type]
        if method.full_batch:
            batch_size = rows if self.privacy.dataset_size is None else self.privacy.dataset_size
        budget = Budget(self.epsilon, self.delta, steps=steps, batch_size=batch_size)
        count = sum(parameter.numel() for parameter in trainable(model).values())
        return planned(method, budget, self.privacy, rows, count)


class PrivateRun:
    """A run of another library's loop: `open` it, `begin` with the model, `step`, `close`.

    ``start`` is the first step to take, ``last`` the number of steps there may be in all: those of the plan, or fewer
    where steps that a checkpoint did not hold are charged twice.

    Guarantee: every value written to ``.grad`` by all processes of the run, together with ``also_released``, is within
    the plan's guarantee. Not covered: a record that is restored from an older copy.

    >>> import torch
    >>> model, data = nn.Linear(2, 1), torch.randn(100, 2)
    >>> terms = Terms(delta=1e-5, privacy=Privacy(noise_multiplier=1.0))
    >>> run = PrivateRun(terms, terms.plan(model, rows=100, batch_size=10, steps=2))
    >>> run.open()
    >>> run.begin(model, lambda model, batch: model(batch)[:, 0].square(), data, microbatch=10)
    >>> while not run.done:
    ...     run.step()
    >>> run.close()
    >>> run.event() == run.plan.mechanism.event(), run.guarantee() == run.plan.guarantee
    (True, True)
    """

    def __init__(self, terms: Terms, plan: Plan) -> None:
        self.terms, self.plan = terms, plan
        self.identifier = ""  # empty until the run is open
        self.start, self.last = 0, plan.steps
        self.private: PrivateGradient | None = None
        self._record: WriteAhead | None = None
        self._lock: int | None = None
        self._before: Event = NOTHING
        self._key = Key.fresh() if terms.seed is None else Key.from_seed(terms.seed)
        self._data: Any = None
        self._began = self._seconds = 0.0
        self._reproducible = self._key.reproducible or terms.privacy.other_seeded
        self._spent = Spent(plan)

    def open(self, folder: Path | None = None, resumed: Mapping[str, Any] | None = None, step: int = 0) -> None:
        """Begin; or continue at ``step`` of the run that ``resumed``, a `state`, belongs to.

        ``folder`` holds the records of runs that can be resumed; without it this one cannot.
        """
        if self.taken > self.start:
            raise RunError(
                "this run was begun already, and its budget is for one: make another one for further training, and add "
                "both up in a dpgrad.Ledger"
            )
        self.private = None  # of an attempt that ended before its first step
        if resumed is not None:
            self._resume(folder, resumed, step)
        elif folder is not None:
            _files.refuse_other_systems()
            _files.make_folder(folder)
            mechanism, accountant = self.plan.mechanism, self.plan.guarantee.accountant
            path = folder / f"{secrets.token_hex(8)}.jsonl"
            self._lock = _files.lock(path.with_suffix(".lock"))
            self._record = WriteAhead.create(
                path, mechanism, self.plan.delta, accountant, _RESERVE, self._key.reproducible, self.plan.also_released
            )
            self.identifier = path.stem
        else:
            self.identifier = secrets.token_hex(8)

    def _resume(self, folder: Path | None, state: Mapping[str, Any], step: int) -> None:
        name = str(state.get("run"))
        path = None if folder is None else folder / f"{name}.jsonl"
        if path is None or not name.isalnum() or not path.is_file():
            raise ResumeError(
                f"the record of what was spent is missing: {path or FOLDER}. Keep the folder {FOLDER} next to the "
                "checkpoints; without it, count the whole plan as spent and start again"
            )
        lock = _files.lock(path.with_suffix(".lock"))
        try:
            record = WriteAhead.read(path)
            self._refuse_other_plan(record, state, step)
            _refuse_shorter(record, state)
            record.begin(step, record.present.until, _RESERVE, self._key.reproducible)
            if record.present.last <= step:
                raise BudgetSpentError(
                    f"the budget is spent: no step after the checkpoint at step {step:,} is within it. Share that "
                    "checkpoint, or begin another run"
                )
            record.commit()
        except BaseException:
            _files.unlock(lock)
            raise
        now = record.present
        if self.terms.seed is not None:
            self._key = Key(Key.from_seed(self.terms.seed).derive("attempt", str(now.number)), reproducible=True)
        self._reproducible |= any(attempt.seeded for attempt in record.attempts)
        self._record, self._lock, self.identifier = record, lock, name
        self._before, self.start, self.last = record.before, now.began, now.last
        self._spent = Spent(self.plan, self._before, self.start)
        if self.last < self.plan.steps:
            _validate.warn(
                f"the run resumes at step {step:,}. Steps that were taken after this checkpoint stay spent and are "
                f"taken again: within its budget the run now ends after {self.last:,} of {self.plan.steps:,} steps",
                ResumeWarning,
            )

    def _refuse_other_plan(self, record: WriteAhead, state: Mapping[str, Any], step: int) -> None:
        if state.get("step") not in (step, step + 1):  # one more where the optimizer had not used the last gradient
            raise ResumeError(
                f"the checkpoint is of step {step:,}, and its privacy state of step {state.get('step')}: its files do "
                "not belong together; resume from another checkpoint"
            )
        given = (self.plan.mechanism.to_dict(), self.plan.delta, self.plan.guarantee.accountant)
        if (record.attempts[0].mechanism.to_dict(), record.delta, record.accountant) != given:
            raise ResumeError(
                "the run was planned with another mechanism, delta or accountant: resume it with the same data, batch "
                "size, number of steps, epsilon and delta as it was begun with"
            )
        if record.also_released != self.plan.also_released:
            raise ResumeError("also_released differs from what the run was planned with: resume it with the same")

    def begin(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        microbatch: int | None,
        collate: Collate = default_collate,
        workers: int = 0,
    ) -> None:
        """Check the model on some examples, and prepare the first step."""
        method, computing, record = self.plan.recipe, self.terms.computing, self._record
        charge: Callable[[int], None] | None = None if record is None else record.reserve
        self.private = PrivateGradient(
            model, loss, self.plan.mechanism, rule=method.scaling(), engine=computing.engine,
            inner_momentum=method.inner_momentum, average=method.average,
            several_rows=self.terms.privacy.several_rows, microbatch=computing.microbatch or microbatch,
            memory_limit=computing.memory_limit, augment=method.augment, capture=computing.capture, workers=workers,
            collate=collate, key=self._key, start=self.start, before=self._before, charge=charge,
        )  # fmt: skip
        self._data, self._began = data, time.perf_counter()
        self.private.prepare(data)

    def step(self) -> None:
        """Charge the next step and write its noisy gradient to ``.grad``."""
        if self.private is None:
            raise RunError("a run begins with a model: call begin before step")
        if self.done:
            raise BudgetSpentError(f"all {self.last:,} steps of the run are taken: a further one is not accounted for")
        if self.terms.ledger is not None and self.taken == self.start:
            # The whole plan: a run that is stopped costs no less.
            event, relation = self._until(self.last), self.plan.mechanism.relation
            self.terms.ledger.add(event, relation, self.plan.recipe.name, self.identifier, self.plan.unit)
        self.private.step(self._data)

    @property
    def taken(self) -> int:
        """The steps taken so far, including those before a resume."""
        return self.start if self.private is None else self.private.steps_taken

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self.taken >= self.last

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: public values, and no key."""
        state = {"run": self.identifier, "step": self.taken}
        if self._record is not None:
            now = self._record.present
            state |= {"attempt": now.number, "until": now.reached}
        return state

    def epsilon(self) -> float:
        """A bound on the ε of the steps so far, for a run whose number of steps was fixed in advance."""
        return self._spent(self.taken)

    def close(self) -> None:
        """Give back steps reserved and not taken, and the lock; closing again does nothing."""
        if self.private is not None and not self._seconds:
            self._seconds = time.perf_counter() - self._began
        lock, self._lock = self._lock, None
        if lock is not None:
            try:
                if self._record is not None:
                    self._record.settle(self.taken)
            finally:
                _files.unlock(lock)

    def event(self) -> Event:
        """The event of all processes of this run."""
        return self._until(self.taken)

    def _until(self, step: int) -> Event:
        return together(self._before, charges(self.plan.mechanism, self.start, step))

    def guarantee(self) -> Guarantee:
        """The guarantee of everything the run releases; that of the whole plan unless all steps are taken.

        A run that stopped early may have stopped because of what it showed, so it costs the plan.
        """
        return self.plan.guarantee_of(self.event()) if self.done else self.plan.guarantee

    def report(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, learning_rate: float, held_out: bool
    ) -> report.Report:
        """The privacy report, in the format of docs/report.md."""
        plan, private = self.plan, self.private
        if optimizer is not None:
            plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, optimizer=type(optimizer)))
        way = None if private is None or private.way is None else private.way.to_release()
        fitted = Fitted(
            model=model,
            guarantee=self.guarantee(),
            plan=plan,
            event=self.event(),
            curves=self._points(learning_rate),
            metric="loss",
            folder=None,
            stopped="interrupted" if not self.done else "budget" if self.last < plan.steps else plan.ends,
            reproducible=self._reproducible,
            public=(*plan.public, "the model, the loss, the shape of one row, and the settings of the trainer"),
            outside=not_covered(
                plan.mechanism.relation, held_out=held_out, diagnostics=False,
                tried=way is not None and way.name in ("lifted", "certified"), unit=plan.unit,
                secure=bool(plan.mechanism.secure_values),
            ),
            seconds=self._seconds,
            way=way,
            clip_bounds=() if private is None else private.clip_bounds,
        )  # fmt: skip
        return fitted.report()

    def _points(self, learning_rate: float) -> tuple[Point, ...]:
        if not self.taken:
            return ()
        mechanism, step = self.plan.mechanism, self.taken
        epoch, clip = step / self.plan.steps_per_epoch, mechanism.clip_at(step - 1, *mechanism.groups[:1])
        if self.private is not None:
            clip = self.private.clip_after(step - 1)
        return (Point(step, epoch, self._spent.at(step), learning_rate, clip, mechanism.multiplier_at(step - 1), None),)


def _refuse_shorter(record: WriteAhead, state: Mapping[str, Any]) -> None:
    """Refuse a record that says less than it did when the checkpoint was written: lines only ever come to it."""
    number, until = state.get("attempt", len(record.attempts)), state.get("until", 0)
    told = type(number) is int and 1 <= number <= len(record.attempts) and type(until) is int
    attempt = record.attempts[number - 1] if told else record.present
    spent = attempt.until if "attempt" in state else max(one.until for one in record.attempts)
    if not told or spent < state["step"] or attempt.reached < until:
        raise ResumeError(
            "the record of what was spent is older than the checkpoint: lines of it are missing, or it is an older "
            f"copy. Put the latest copy of the folder {FOLDER} next to the checkpoints; without it, count "
            "the whole plan as spent and start again"
        )


class IndexedRows(Dataset[Any]):
    """Training rows by index, whatever library holds them.

    >>> len(IndexedRows(["a", "b"])), IndexedRows(["a", "b"])[1]
    (2, 'b')
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[int(index)]


def refuse_training_rows(held_out: Any, rows: Any, name: str) -> None:
    """Refuse held-out rows that `dpgrad.training.curves.share_rows` recognises as training ``rows``.

    A list may hold the examples themselves; they are the same where they are the same objects.

    >>> refuse_training_rows([["a"]], [["a"]], "evaluation")
    """
    listed = isinstance(held_out, list | tuple) and isinstance(rows, list | tuple)
    known = {id(row) for row in rows} if listed else set()
    sized = callable(getattr(held_out, "__len__", None)) and not isinstance(held_out, IterableDataset)
    shared = any(id(row) in known for row in held_out) if listed else sized and share_rows(held_out, rows)
    if held_out is rows or shared:
        raise DataError(
            f"the {name} rows are rows of the training data: a figure on them would be shown without noise; keep rows "
            "apart, e.g. with train_test_split"
        )


class _Ticks(Dataset[int]):
    """As many examples as an epoch has steps, with nothing in them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def _nothing(examples: list[int]) -> dict[str, Any]:
    return {}


def ticks(count: int) -> DataLoader[Any]:
    """A loader of ``count`` empty batches, which makes another library's loop take as many steps per epoch.

    >>> list(ticks(2))
    [{}, {}]
    """
    return DataLoader(_Ticks(count), batch_size=1, collate_fn=_nothing)
