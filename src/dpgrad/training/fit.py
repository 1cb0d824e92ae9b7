"""`fit`: a model, data and a budget in; a trained model and what it cost out."""

import inspect
import math
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpgrad import _validate
from dpgrad.accounting.events import Compose, Event
from dpgrad.accounting.guarantee import Guarantee, not_covered
from dpgrad.accounting.ledger import Ledger
from dpgrad.data import Dataset
from dpgrad.distributed import followed
from dpgrad.distributed.followed import Followed
from dpgrad.distributed.ranks import Ranks
from dpgrad.distributed.shards import whole
from dpgrad.errors import RunError, UnsupportedModelError
from dpgrad.grads.fsdp import is_sharded
from dpgrad.grads.sums import Loss, trainable
from dpgrad.grads.swap import unwrapped
from dpgrad.grads.ways import Way
from dpgrad.mechanism.keys import Key
from dpgrad.reports import page, report
from dpgrad.runs import replay
from dpgrad.runs.checkpoint import Run, interruptible
from dpgrad.runs.weights import Weights
from dpgrad.runs.writeahead import charges
from dpgrad.training import admission, source
from dpgrad.training.averaging import parse as parse_averaging
from dpgrad.training.callbacks import Callback
from dpgrad.training.curves import Point, RunWatch, judging
from dpgrad.training.diagnostics import Recorder
from dpgrad.training.losses import NamedLoss
from dpgrad.training.models import OWN_MODEL
from dpgrad.training.options import Budget, Computing, HeldOut, Privacy, RunFolder, written
from dpgrad.training.plan import Plan
from dpgrad.training.prepare import optimizer_named
from dpgrad.training.private import PrivateGradient
from dpgrad.training.recipes import Recipe, recipe
from dpgrad.training.session import Session, identity
from dpgrad.training.task import Task
from dpgrad.training.temperature import ScaledLoss, cooled
from dpgrad.training.units import ByWeight

__all__ = ["WEIGHTS", "Fitted", "ResumeWarning", "fit"]

WEIGHTS = "weights.pt"  # in release/: the state dict of the model
_POINTS = 20  # points of a curve, and checkpoints of a run, by default
_PRIVACY, _COMPUTING = Privacy(), Computing()


class ResumeWarning(UserWarning):
    """A run resumed with a new key, since something changed: earlier steps stay spent, and new ones are charged."""


@dataclass(frozen=True, repr=False)
class Fitted:
    """A trained model, its privacy guarantee, and what the guarantee assumes and leaves out.

    ``event`` is what the steps taken released, and ``guarantee`` covers it. An ``interrupted`` run may have been
    stopped because of what it showed, so its guarantee is that of the whole plan. ``public`` lists what is assumed to
    be public, ``outside`` what is not covered. ``reproducible`` marks a run from a seed, not for release.
    ``diagnostics`` are private. ``way`` says how per-example gradients were computed and why, without sizes or values
    of the data; None if no step was taken. ``dataset`` is the dataset of dpgrad that was trained on, if any,
    ``described`` is what `dpgrad predict` needs to know about the model, and ``weights`` is what `save` writes.
    ``clip_bounds`` are those of every step, by group, where they follow the norms (``adaptive_clip``): they are
    released values. ``notes`` are for the report. ``temperature`` is what the last layer was divided by, where the
    method has a ``temperature``; a released value.

    >>> rows = torch.ones(50, 2), torch.ones(50).long()
    >>> fitted = fit(nn.Linear(2, 2), rows, epsilon=1.0, delta=1e-3, steps=2)
    >>> fitted.guarantee.epsilon <= 1.0, fitted.stopped, fitted.report()["kind"]
    (True, 'plan', 'run')
    """

    model: nn.Module
    guarantee: Guarantee
    plan: Plan
    event: Event
    curves: tuple[Point, ...]
    metric: str
    folder: Path | None
    stopped: Literal["plan", "budget", "interrupted"]
    reproducible: bool
    public: tuple[str, ...]
    outside: tuple[str, ...]
    seconds: float
    diagnostics: Recorder | None = None
    way: Way | None = None
    dataset: Dataset | None = None
    described: dict[str, Any] | None = None
    weights: Weights | None = None
    clip_bounds: Sequence[Sequence[float]] = ()
    notes: tuple[str, ...] = ()
    temperature: float | None = None

    @property
    def held_out(self) -> float | None:
        """The metric on held-out rows after the last step."""
        return self.curves[-1].held_out if self.curves else None

    def __repr__(self) -> str:
        judged = "" if self.held_out is None else f", held-out {self.metric} {self.held_out:.4g}"
        return f"<Fitted by {self.plan.recipe.name}: {self.guarantee}{judged}; stopped: {self.stopped}>"

    def report(self) -> report.Report:
        """The privacy report as a plain dictionary, in the format of docs/report.md."""
        return report.report(self)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write a release folder: the weights, and the report as JSON, text and page.

        Guarantee: it holds the trained parameters, which the guarantee covers, buffers that do not depend on the data,
        and the report. A model of which anything else would be written is refused.
        """
        if is_sharded(core := unwrapped(self.model, sharded=True)):
            raise UnsupportedModelError(
                "the model is sharded by fully_shard: give fit a folder, in which the whole weights are released, or "
                "save get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
                "torch.distributed.checkpoint.state_dict, called on every rank"
            )
        if self.weights is None:
            Weights(core)  # says why
            raise UnsupportedModelError("the model could not be released when the run began: train it again")
        path = Path(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path} is not an empty folder: choose another one")
        self.weights.state()  # refuses before anything is written
        path.mkdir(parents=True, exist_ok=True)
        _write(self, None, self.weights, path)


def _elsewhere(name: str) -> str:
    """Say where an option that is not a parameter of `fit` belongs."""
    if name.lower() in ("x", "y", "labels", "targets"):
        return ": give rows and targets as one pair, fit(model, (X, y), epsilon=..., delta=...)"
    if name.lower() in ("secure_mode", "secure"):
        return ': write privacy=Privacy(noise="secure")'
    recipes = {field.name: f"method=recipes.auto({field.name}=...)" for field in fields(Recipe)}
    if place := written(name) or recipes.get(name):
        return f": write {place}"
    own = inspect.signature(fit).parameters
    others = [field.name for record in (Privacy, Computing, HeldOut, RunFolder, Recipe) for field in fields(record)]
    close = _validate.nearest(name, [*own, *others])
    return "" if close is None or close in own else f": did you mean {close}? Write {written(close) or recipes[close]}"


@_validate.keywords(_elsewhere)
def fit(
    model: nn.Module,
    data: Any,
    loss: str | Loss = "cross-entropy",
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: float | None = None,
    method: str | Recipe = "auto",
    held_out: Any = None,
    folder: str | PathLike[str] | RunFolder | None = None,
    ledger: Ledger | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    seed: int | None = None,
    privacy: Privacy = _PRIVACY,
    computing: Computing = _COMPUTING,
) -> Fitted:
    """Train ``model`` in place on ``data`` with differential privacy, within a budget.

    ``data`` are tensors, arrays (memory maps are read row by row), data frames, Arrow tables and files, a map-style
    Dataset, a ``datasets.Dataset``, a DataLoader over a map-style dataset (its batches are not used), or a dataset of
    `dpgrad.data`, whose test rows are then held out. A loss by name takes (inputs, targets), or a dict with labels:
    cross-entropy, bce (summed over labels), squared, huber. A loss of your own is a function of (model, batch) that
    returns one value per example.

    ``epsilon`` and ``delta`` are enough: method auto chooses the rest from public facts (`dpgrad.training.auto`).
    ``method`` is also the name of a paper's method, which needs ``epochs`` or ``steps``, or a `Recipe`, such as
    ``recipes.psasc(clip=0.1)``. ``held_out`` rows (or a `HeldOut`) are for the curves; evaluating on them costs no
    privacy of the training rows, and they are not protected. With ``folder`` (a path or a `RunFolder`) the run can be
    resumed after a crash, and a release folder with weights and report is written at its end. ``ledger`` adds up
    several runs on the same data. A callback is called after each step with a `Progress`, or has methods for steps,
    evaluations and the end (`dpgrad.training.callbacks`), such as `CSVLog`; where it returns True, or at Ctrl-C, the
    run stops and costs what the plan costs. A `Diagnostics` among the callbacks records the papers' diagnostics, which
    are private. ``seed`` repeats a run and makes it unfit for release. Modules stay in the mode they are in.

    Guarantee: the trained model, and whatever was seen of it during the run, is private in the sense of the guarantee
    returned, for one row of the data or, with ``Privacy(units=...)``, one person. `Fitted.outside` is not covered.

    >>> data = torch.randn(200, 2), torch.arange(200) % 2
    >>> fitted = fit(nn.Linear(2, 2), data, method="psasc", epsilon=3.0, delta=1e-4, epochs=8)
    >>> fitted.event == fitted.plan.mechanism.event(), fitted.stopped
    (True, 'plan')
    >>> print(fitted.guarantee)
    ε = 3 at δ = 0.0001 for datasets of the same public size, one row's contribution replaced by nothing (Poisson ...
    """
    began = time.perf_counter()
    settings: object = computing  # a caller may ignore types
    known = settings if isinstance(settings, Computing) else Computing()
    ranks = Ranks.of(known.group, known.rank_timeout)
    with ranks.together():
        budget = Budget(epsilon, delta, epochs, steps, batch_size)
        run_folder = _folder_of(ranks, folder)
        admission.refuse_arguments(model, data, ledger, privacy, computing)
        task = Task.of(model, data, loss, held_out, callbacks, privacy, computing, ranks)
        plan = task.plan(recipe(method), budget, run_folder)
        fitted = _trained(task, plan, run_folder, ledger, seed, began)
    task.callbacks.at_end(fitted)
    return fitted


def _folder_of(ranks: Ranks, given: str | PathLike[str] | RunFolder | None) -> RunFolder | None:
    """The run folder of rank 0; those given on other ranks are ignored."""
    own = given if isinstance(given, RunFolder) or given is None else RunFolder(given)
    told = ranks.from_first(lambda: None if own is None else replace(own, release=None))
    return own if ranks.first else told


def _trained(
    task: Task, plan: Plan, folder: RunFolder | None, ledger: Ledger | None, seed: int | None, began: float
) -> Fitted:
    """Take the steps of a plan, in a run folder if there is one."""
    resumed = folder is not None and folder.resume
    if not resumed:  # before anything is written or spent
        task.callbacks.at_start(RunWatch(plan, 1, None, None).now(0, _first_learning_rate(plan)))
    ranks = task.ranks
    with ExitStack() as stack:
        run = None if folder is None else _opened(task, plan, folder, seed, stack)
        session = _session(task, plan, run, folder, seed)
        last = plan.steps if run is None else run.last
        if resumed:
            session.start(task.callbacks.at_start)
        name = secrets.token_hex(8) if run is None else run.identifier
        ranks.from_first(partial(_reserve, ledger, plan, run, last, name))
        with interruptible() as interruption:
            session.train(last, interruption)
        temperature = _cooled(task, session) if session.private.steps_taken == last else None
        fitted = _fitted(task, session, last, began, temperature)
        if run is not None and folder is not None:
            if session.weights is not None and session.private.steps_taken == last:
                released = session.collected()
                ranks.from_first(partial(_finish, run, fitted, folder, session.weights, released))
            if session.recorder is not None:
                session.recorder.write(Path(folder.path))  # last, so the run's secrets are deleted first
    return fitted


def _opened(task: Task, plan: Plan, folder: RunFolder, seed: int | None, stack: ExitStack) -> Run | Followed:
    """Open the run folder, on rank 0; the other ranks follow."""
    stack.enter_context(replay.deterministic())
    known = partial(identity, plan, task.data, task.device, task.computing.microbatch, partial(task.behaviours, plan))
    save_every = _every(folder.checkpoint_every, plan)

    def open_run(identity_of: Callable[[Key], replay.Identity]) -> Run:
        return Run.open(
            folder.path, identity_of, plan.mechanism, plan.delta, resume=folder.resume, seed=seed,
            accountant=task.privacy.accountant, save_every=save_every, keep_private=folder.keep_private,
            also_released=plan.also_released,
        )  # fmt: skip

    return followed.opened(task.ranks, open_run, known, task.computing.rows_on_rank == "part", save_every, stack)


def _warn_of_new_key(run: Run | Followed, plan: Plan) -> None:
    _validate.warn(
        f"the run in {run.folder} resumes at step {run.start:,} with a new key ({run.reason}). What was charged before "
        "stays spent and the steps from there on are charged too: within its budget the run now ends after "
        f"{run.last:,} of {plan.steps:,} steps",
        ResumeWarning,
    )


def _session(task: Task, plan: Plan, run: Run | Followed | None, folder: RunFolder | None, seed: int | None) -> Session:
    """Prepare everything for the next step of the run."""
    method, computing = plan.recipe, task.computing
    private = PrivateGradient(
        task.model, task.step_loss, plan.mechanism, rule=method.scaling(), engine=computing.engine,
        inner_momentum=method.inner_momentum, average=method.average, **task.of_examples,
        microbatch=computing.microbatch, memory_limit=computing.memory_limit,
        augment=method.augment, capture=computing.capture, workers=computing.workers, group=task.ranks,
        rows_on_rank=computing.rows_on_rank,
        **({"seed": seed} if run is None else _keyed(run)),
    )  # fmt: skip
    parameters = trainable(private.model).values()
    stepper = optimizer_named(method.optimizer, parameters, plan.learning_rate_at(0) or 1.0, method.momentum)
    save_every = _every(None if folder is None else folder.checkpoint_every, plan)
    session = Session(private, stepper, plan, task.data, run, save_every, partial(task.behaviours, plan))
    if method.averaging is not None:
        session.averaging = parse_averaging(method.averaging, plan.steps)
    if task.callbacks.diagnostics is not None:
        session.recorder = Recorder(
            task.callbacks.diagnostics, private.model, task.step_loss, task.data, engine=computing.engine,
            **task.of_examples,
        )  # fmt: skip
    judges = task.ranks.first or is_sharded(private.model)  # a pass through shards needs every rank
    held_out = task.held_out if task.held_out is not None and judges else HeldOut()
    session.watched = task.ranks.from_first(lambda: bool(task.callbacks.each))
    score = None if held_out.rows is None else partial(session.score, task.metric, held_out.rows, task.collate)
    called = task.callbacks
    shown = called.after_step if called.watches_steps else None
    session.watch = RunWatch(plan, _every(held_out.evaluate_every, plan), score, shown, called.after_evaluation)
    if private.work.quantile is not None:
        session.watch.clip_after = private.clip_after
    session.resume()
    session.begin(computing.capture)
    if run is not None or not is_sharded(private.model):
        with nullcontext() if run is not None else suppress(UnsupportedModelError):  # only a release needs it
            session.weights = Weights(private.model)
    if run is not None and run.reason and task.ranks.first:
        _warn_of_new_key(run, plan)
    return session


def _cooled(task: Task, session: Session) -> float | None:
    """Divide the last layer by a private temperature, which the plan has paid for once; return it.

    A run that resumed with a new key may have released one under its first key, so none is released again.
    """
    plan, private, run = session.plan, session.private, session.run
    if plan.temperature is None or (isinstance(run, Run) and run.attempt > 1):
        return None
    layer = task.last_layer()
    loss = task.loss if not isinstance(task.loss, NamedLoss) else ScaledLoss(task.loss.name)
    return cooled(
        private.model, layer, loss if task.owned is None else ByWeight(loss), plan.temperature, task.data, private.key,
        microbatch=task.computing.microbatch, replayed=run is not None, **task.of_examples,
    )  # fmt: skip


def _fitted(task: Task, session: Session, last: int, began: float, temperature: float | None) -> Fitted:
    """The result of a run that has ended."""
    plan, private, run = session.plan, session.private, session.run
    complete = private.steps_taken == last
    event = task.ranks.from_first(lambda: run.event() if isinstance(run, Run) else private.ledger)
    way = None if private.way is None else private.way.to_release()
    if session.weights is not None:
        session.weights.settle()
    return Fitted(
        model=task.model,
        # a stopped run may have been stopped because of what it showed: it costs the whole plan
        guarantee=plan.guarantee_of(event) if complete else plan.guarantee,
        plan=plan,
        event=event,
        curves=tuple(task.ranks.from_first(lambda: session.watch.points)),
        metric=task.metric.name,
        folder=None if run is None else run.folder,
        stopped="interrupted" if not complete else "budget" if last < plan.steps else plan.ends,
        reproducible=task.privacy.other_seeded or (private.key.reproducible if run is None else run.reproducible),
        public=(*plan.public, "the model, the loss and the shape of one row"),
        outside=not_covered(
            plan.mechanism.relation,
            held_out=task.held_out is not None and task.held_out.rows is not None,
            diagnostics=task.callbacks.diagnostics is not None,
            tried=way is not None and way.name in ("lifted", "certified"),
            unit=plan.unit,
            secure=bool(plan.mechanism.secure_values),
        ),
        seconds=time.perf_counter() - began,
        diagnostics=session.recorder,
        way=way,
        dataset=task.dataset,
        described=_described(task),
        weights=session.weights,
        clip_bounds=private.clip_bounds,
        notes=() if temperature is None else (_DIVIDED.format(temperature),),
        temperature=temperature,
    )


_DIVIDED = (
    "the last layer was divided by a temperature of {:.3g}, which keeps class probabilities away from 0 and 1; it "
    "was found from noisy full batches, which are part of the guarantee"
)


def _described(task: Task) -> dict[str, Any] | None:
    """The shape and type of a row and the number of outputs, all public, if a loss by name calls the model.

    None for a Dataset that does not hold tensors: the shape of one of its examples may depend on that example. All
    ranks that hold shards must call this.
    """
    with whole(task.core, task.ranks, 0):
        return _of_rows(task)


def _of_rows(task: Task) -> dict[str, Any] | None:
    held = task.rows.tensors if type(task.rows) is TensorDataset else task.rows
    if not isinstance(task.loss, NamedLoss) or task.privacy.several_rows or not isinstance(held, tuple | list):
        return None
    if not source.rows(task.rows):  # this rank holds no rows
        return None
    inputs = source.gathered(held[0], torch.arange(1), task.device)
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or 0 in inputs.shape:
        return None
    found: object = None
    with torch.no_grad(), judging(task.core), suppress(Exception):  # the budget is spent: a run must not end here
        found = task.core(torch.zeros_like(inputs))
    if not isinstance(found, Tensor) or found.ndim > 2:
        return None
    outputs, dtype = found.shape[1] if found.ndim == 2 else 1, str(inputs.dtype).removeprefix("torch.")
    return {"name": OWN_MODEL, "shape": list(inputs.shape[1:]), "outputs": outputs, "dtype": dtype}


def _first_learning_rate(plan: Plan) -> float:
    """The first learning rate; NaN for an optimizer of the user's own, whose rate is not known yet."""
    learning_rate = plan.learning_rate_at(0)
    return math.nan if learning_rate is None else learning_rate


def _every(given: int | None, plan: Plan) -> int:
    return -(-plan.steps // _POINTS) if given is None else given


def _keyed(run: Run | Followed) -> dict[str, Any]:
    return {"key": run.key, "start": run.began, "before": run.before, "charge": run.charge}


def _reserve(ledger: Ledger | None, plan: Plan, run: Run | Followed | None, last: int, name: str) -> None:
    """Add the whole plan to the ledger: a run that is stopped costs no less."""
    if ledger is not None:
        reserved = _reserved(plan, run, last)
        if plan.temperature is not None:
            reserved = Compose((reserved, plan.temperature.event()))
        ledger.add(reserved, plan.mechanism.relation, plan.recipe.name, name, plan.unit)


def _finish(
    run: Run | Followed, fitted: Fitted, folder: RunFolder, weights: Weights, whole: dict[str, Tensor] | None
) -> None:
    """Write the release folder, on rank 0."""
    if isinstance(run, Run):
        run.finish(partial(_write, fitted, folder.release, weights, whole=whole))


def _reserved(plan: Plan, run: Run | Followed | None, last: int) -> Event:
    """The event of ``last`` steps, including what was released under earlier keys."""
    if run is None or run.attempt == 1:
        return plan.mechanism.event()
    return Compose((run.before, charges(plan.mechanism, run.began, last)))


def _write(
    fitted: Fitted,
    release: Callable[[Path, Fitted], None] | None,
    weights: Weights,
    folder: Path,
    whole: dict[str, Tensor] | None = None,
) -> None:
    """Write the release folder; for a sharded model, with its ``whole`` weights."""
    weights.write(folder / WEIGHTS, whole)
    if release is not None:
        release(folder, fitted)
        return
    found = fitted.report()
    report.write(folder, found)
    (folder / page.FILE).write_text(page.page({fitted.plan.recipe.name: found}), "utf-8")
