"""`fit`: a model, data and a budget in; a trained model and what it cost out.

>>> _ = torch.manual_seed(0)
>>> inputs = torch.randn(200, 2)
>>> fitted = fit(
...     nn.Linear(2, 2), (inputs, (inputs[:, 0] > 0).long()), method="psasc", epsilon=3.0, delta=1e-4, epochs=8
... )
>>> fitted.guarantee.epsilon <= 3.0, fitted.event == fitted.plan.mechanism.event(), fitted.stopped
(True, True, 'plan')
>>> print(fitted.guarantee)
ε = 3 at δ = 0.0001 for datasets of the same public size, one row's contribution replaced by nothing (Poisson ...
"""

import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpgrad import _processes, _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Compose, Event, Relation
from dpgrad.accounting.guarantee import Guarantee, not_covered
from dpgrad.accounting.ledger import Ledger
from dpgrad.grads.scaling import ScaleRule, fault
from dpgrad.grads.sums import Loss, trainable
from dpgrad.grads.swap import unwrapped
from dpgrad.grads.ways import Way
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Group
from dpgrad.mechanism.schedules import Schedule
from dpgrad.runs import replay
from dpgrad.runs.checkpoint import Interruption, Run, interruptible
from dpgrad.runs.weights import Weights
from dpgrad.runs.writeahead import charges
from dpgrad.training import source
from dpgrad.training.augment import Augment
from dpgrad.training.averaging import Averaged, Ema, Tail
from dpgrad.training.averaging import parse as parse_averaging
from dpgrad.training.curves import Point, Progress, Watch, evaluate, refuse_held_out
from dpgrad.training.diagnostics import Diagnostics, Recorder
from dpgrad.training.graph import CannotCaptureError, CapturedStep, elsewhere, refusal
from dpgrad.training.losses import Metric, PerRow, loss_named, metric_named
from dpgrad.training.plan import Plan, make
from dpgrad.training.prepare import (
    OptimizerChoice,
    classes_of,
    device_of,
    optimizer_name,
    optimizer_named,
    within_reach,
)
from dpgrad.training.private import PrivateGradient
from dpgrad.training.recipes import Recipe

WEIGHTS = "weights.pt"  # in release/: the state dict of the model
_POINTS = 20  # how many points a curve has, and how often a checkpoint is written, unless told otherwise


@dataclass(frozen=True)
class Fitted:
    """A trained model, what it cost, and what must be said beside it.

    ``event`` is what the steps taken released; ``guarantee`` is what holds: of a run that was ``interrupted``, perhaps
    because of what it showed, that of the whole plan. ``public`` is assumed to be known to everyone; ``outside`` is not
    covered. ``reproducible`` marks a run from a seed, which is not for release. ``diagnostics`` are private. ``way`` is
    how the gradients of single examples were computed, and why so, without sizes or values of the data; None where no
    step was taken.
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

    @property
    def held_out(self) -> float | None:
        """The metric on held-out rows after the last step."""
        return self.curves[-1].held_out if self.curves else None


Release = Callable[[Path, Fitted], None]


@runtime_checkable
class Released(Protocol):
    """What was released from the same data, such as a `dpgrad.pca.Projection`: its cost, and whether a seed made it."""

    @property
    def event(self) -> Event: ...
    @property
    def reproducible(self) -> bool: ...


def fit(
    model: nn.Module,
    data: Any,
    loss: str | Loss = "cross-entropy",
    *,
    method: str | Recipe = "dpsgd",
    rule: ScaleRule | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    noise_multiplier: float | None = None,
    lot: float | None = None,
    dataset_size: int | None = None,
    relation: str | Relation | None = None,
    accountant: str = "pld",
    reading: str | None = None,
    beside: Event | Released = NOTHING,
    clip: float | Schedule | None = None,
    clip_schedule: str | None = None,
    schedule_steps: int | None = None,
    s: float | None = None,
    r: float | None = None,
    gamma: float | None = None,
    length: int | None = None,
    inner: Literal["current", "past"] | None = None,
    groups: tuple[Group, ...] = (),
    learning_rate: float | Schedule | None = None,
    rate_schedule: str | None = None,
    momentum: float | None = None,
    optimizer: OptimizerChoice | None = None,
    averaging: str | None = None,
    augment: Augment | None = None,
    several_rows: bool = False,
    held_out: Any = None,
    metric: str | PerRow | None = None,
    evaluate_every: int | None = None,
    progress: Callable[[Progress], object] | None = None,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    keep_private: bool = False,
    checkpoint_every: int | None = None,
    release: Release | None = None,
    ledger: Ledger | None = None,
    seed: int | None = None,
    engine: str = "bookkeeping",
    microbatch: int | None = None,
    memory_limit: int | None = None,
    collate: source.Collate = default_collate,
    capture: bool | None = None,
    diagnostics: Diagnostics | None = None,
) -> Fitted:
    """Train ``model`` in place on ``data`` with differential privacy, within a budget.

    Data are tensors, arrays (memory maps are read row by row) or a map-style Dataset; the mechanism draws the batches.
    A loss by name takes data as (inputs, targets): cross-entropy, bce (summed over labels), squared, huber. A loss of
    your own is a function of (model, batch) that returns one value per example. ``method`` is a name in
    `dpgrad.recipes.RECIPES` or a `Recipe` of your own; ``rule(norms, clip)`` replaces its scaling rule and is held to
    ``clip`` (`dpgrad.scaling.Bounded`); ``clip`` (the paper's C), ``s``, ``r``, ``gamma``, ``length``, ``inner``,
    ``momentum``, ``clip_schedule`` and ``learning_rate`` replace its constants. The budget, ``lot`` and ``reading`` are
    those of `dpgrad.plan.make`. Give ``dataset_size`` as a constant to have the relation add-remove.

    ``rate_schedule`` is read by `dpgrad.recipes.parse_rate`. ``optimizer`` is the name of one of torch.optim or a
    function of the parameters; Adam and its like see the noise in their second moment too, so that coordinates whose
    gradients are below the noise all get nearly the same rate: the plan says where that is. ``averaging`` is
    ``ema:DECAY`` or ``tail:SHARE``. ``augment(batch, generator)`` makes K rows of each example, whose mean gradient is
    scaled once; it is called for one example at a time, (1, ...) to (1, K, ...).

    ``held_out`` rows are for the curves; they cost the training rows nothing and are not protected. ``progress`` is
    called after each step; where it returns True, or at Ctrl-C, the run stops and costs what the plan costs. Modules
    stay in the mode they are in.

    With ``folder``, what is spent is on disk before it is computed and a run that died goes on with ``resume``
    (`dpgrad.checkpoint`): with the same key where everything is the same, with a new one, and an earlier end, where
    anything differs or cannot be compared, such as a Dataset other than a TensorDataset. Another plan is refused: it is
    another run. ``release(folder, fitted)`` adds to what may be shared. ``ledger`` adds up several runs on the same
    data. ``beside`` is what else is released from them, such as a projection, for which the budget has to do as well;
    it is not added to the ledger, since whoever released it charges it there, once for all runs.

    On a CUDA device the step is captured as a graph where it can be (``capture``: None), must be or must not be. That
    changes rounding: a run with a folder that was captured is replayed as a graph or not at all.

    Guarantee: the trained model, and whatever was seen of it during the run, is private in the sense of the guarantee
    returned, one example being one row of the data. `Fitted.outside` lists what is not covered.
    """
    began = time.perf_counter()
    _processes.refuse_several()
    rows = source.rows(data)
    if not rows:
        raise ValueError("data must hold at least one row, got none")
    given: object = ledger  # a caller may ignore types
    if given is not None and not isinstance(given, Ledger):
        raise ValueError(f"ledger must be a dpgrad Ledger, got {_validate.shown(given)}: give Ledger(path)")
    released, seeded = (beside.event, beside.reproducible) if isinstance(beside, Released) else (beside, False)
    goal, core, device = loss_named(loss), unwrapped(model), device_of(model)
    if held_out is not None:
        refuse_held_out(held_out, data)
    data = within_reach(data, device)
    own_rate = callable(optimizer) and learning_rate is None and rate_schedule is None
    plan = make(
        method, dataset_size=rows if dataset_size is None else dataset_size, declared=dataset_size is not None,
        epsilon=epsilon, delta=delta, epochs=epochs, steps=steps, noise_multiplier=noise_multiplier, lot=lot,
        relation=relation, accountant=accountant, reading=reading, schedule_steps=schedule_steps, groups=groups,
        learning_rate=learning_rate, rate_schedule=rate_schedule, optimizer=optimizer_name(optimizer),
        averaging=averaging, parameters=sum(parameter.numel() for parameter in trainable(core).values()),
        classes=None if several_rows or augment else classes_of(core, goal, data, collate), beside=released, rule=rule,
        clip=clip, clip_schedule=clip_schedule, s=s, r=r, gamma=gamma, length=length, inner=inner, momentum=momentum,
    )  # fmt: skip
    plan = replace(plan, rate=None) if own_rate else plan
    judged = metric_named(metric, goal)
    if held_out is not None:  # on one row: what does not fit together is refused before anything is spent
        evaluate(core, judged, source.gathered(held_out, torch.arange(1), device, collate))
    if resume and folder is None:
        raise ValueError("resume needs the folder of the run that is to go on: give folder")
    fault(plan.recipe.scaling(), [plan.mechanism.clip_at(0, *groups[:1])], device)  # refuses a rule that cannot be held
    if folder is not None:
        Weights(core)  # refuses, before anything is spent, a model of which not everything may be released
    if capture and diagnostics is not None:
        raise ValueError("a captured step is not observed: leave out capture, or diagnostics")
    if capture and device.type != "cuda":  # before there is a folder
        raise CannotCaptureError(elsewhere(device))
    settings = {
        "recipe": plan.recipe, "rate": plan.rate, "optimizer": optimizer, "averaging": averaging, "loss": goal,
        "model": core, "augment": augment, "several_rows": several_rows, "engine": engine, "collate": collate,
        "memory_limit": memory_limit, "diagnostics": diagnostics, "capture": capture,
    }  # fmt: skip
    options, save_every = partial(_options, settings, core), _every(checkpoint_every, "checkpoint_every", plan)
    with ExitStack() as stack:
        run = None
        if folder is not None:
            stack.enter_context(replay.deterministic())
            identity_of = partial(_identity, plan, data, device, microbatch, options)
            run = Run.open(
                folder, identity_of, plan.mechanism, plan.delta, resume=resume, seed=seed, accountant=accountant,
                save_every=save_every, keep_private=keep_private, beside=released,
            )  # fmt: skip
            stack.enter_context(run)
        private = PrivateGradient(
            model, goal, plan.mechanism, rule=plan.recipe.scaling(), engine=engine,
            inner_momentum=plan.recipe.inner_momentum, average=plan.recipe.average, several_rows=several_rows,
            microbatch=microbatch, memory_limit=memory_limit, collate=collate, augment=augment,
            **({"seed": seed} if run is None else _keyed(run)),
        )  # fmt: skip
        parameters = trainable(private.model).values()
        stepper = optimizer_named(optimizer, parameters, plan.rate_at(0) or 1.0, plan.recipe.momentum)
        session = _Session(private, stepper, plan, data, run, save_every, options)
        if averaging is not None:
            session.averaging = parse_averaging(averaging, plan.steps)
        if diagnostics is not None:
            session.recorder = Recorder(
                diagnostics, private.model, goal, data, engine=engine, several_rows=several_rows, collate=collate
            )
        score = None if held_out is None else partial(session.score, judged, held_out, collate)
        session.watch = Watch(plan, _every(evaluate_every, "evaluate_every", plan), score, progress)
        reason = refusal(private, data)  # before a limit of memory is replaced by what was found within it
        session.resume()
        if capture is not False and diagnostics is None:
            session.captured = _captured(private, data, stepper, reason, required=capture is True)
        session.begin(other=capture is not True and session.captured is not None)
        session.weights = None if run is None else Weights(private.model)
        last = plan.steps if run is None else run.last
        if ledger is not None:  # the whole plan: a run that is stopped costs no less
            name = secrets.token_hex(8) if run is None else run.identifier
            ledger.add(_planned(plan, run, last), plan.mechanism.relation, plan.recipe.name, run=name)
        with interruptible() as interruption:
            session.train(last, interruption)
        complete = private.steps_taken == last
        event = private.ledger if run is None else run.event()
        way = None if private.way is None else private.way.to_release()
        fitted = Fitted(
            model=model,
            # of the whole plan where the run was cut short, since what it showed may be why
            guarantee=plan.guarantee if not complete or event == plan.mechanism.event() else _cost(plan, event),
            plan=plan,
            event=event,
            curves=tuple(session.watch.points),
            metric=judged.name,
            folder=None if folder is None else Path(folder),
            stopped="interrupted" if not complete else "budget" if last < plan.steps else plan.ends,
            reproducible=seeded or (private.key.reproducible if run is None else run.reproducible),
            public=(*plan.public, "the model, the loss and the shape of one row"),
            outside=not_covered(
                plan.mechanism.relation,
                held_out=held_out is not None,
                diagnostics=diagnostics is not None,
                tried=way is not None and way.name in ("lifted", "certified"),
            ),
            seconds=time.perf_counter() - began,
            diagnostics=session.recorder,
            way=way,
        )
        if run is not None and session.weights is not None and complete:
            run.finish(partial(_write, fitted, release, session.weights))
        if session.recorder is not None and folder is not None:
            session.recorder.write(Path(folder))  # after the run's own secrets are gone, which need not stay for it
    return fitted


@dataclass
class _Session:
    """A run under way: what changes during it, which is what a checkpoint holds, and the loop."""

    private: PrivateGradient
    optimizer: torch.optim.Optimizer
    plan: Plan
    data: Any
    run: Run | None
    save_every: int
    options: Callable[[], dict[str, str]]
    averaging: Ema | Tail | None = None
    average: Averaged | None = field(init=False, default=None)
    recorder: Recorder | None = None
    captured: CapturedStep | None = None
    weights: Weights | None = None
    watch: Watch = field(init=False)

    def train(self, last: int, interruption: Interruption) -> None:
        """Take the steps up to ``last``, or until someone has seen enough."""
        while (step := self.private.steps_taken) < last:
            rate = _set_rate(self.optimizer, self.plan.rate_at(step))
            self.observe(step, rate)
            self.step()
            if self.average is not None:
                self.settle()
                self.average.update(step)
            enough = self.watch.after(step + 1, rate)
            if self.run is not None and ((step + 1) % self.save_every == 0 or step + 1 == self.run.due):
                self.save(self.run)
            if enough or interruption:
                break
        self.settle()
        taken = self.private.steps_taken
        self.watch.finish(taken, _set_rate(self.optimizer, None))
        if self.run is not None:
            self.save(self.run)
        if self.average is not None:
            self.average.finish()

    def step(self) -> None:
        """One step of the mechanism and one of the optimizer."""
        if self.captured is not None:
            self.captured.step()
        else:
            self.private.step(self.data)
            self.optimizer.step()

    def settle(self) -> None:
        """Wait until the model is that of the steps taken."""
        if self.captured is not None:
            self.captured.settle()

    def observe(self, step: int, rate: float) -> None:
        """Let the diagnostics see the steps of their window."""
        if self.recorder is not None:
            self.recorder.learning_rate = rate
            first = self.recorder.diagnostics.first_step(self.plan.steps, self.plan.steps_per_epoch)
            self.private.observe = self.recorder if step >= first else None

    def score(self, metric: Metric, held_out: Any, collate: source.Collate) -> float:
        """The metric on held-out rows, of the averaged weights where there are any."""
        self.settle()
        with nullcontext() if self.average is None else self.average.applied():
            return evaluate(self.private.model, metric, held_out, collate)

    def save(self, run: Run) -> None:
        """Store where training is, and what the model, the loss and the rest do by now: they may have changed."""
        run.save(self.private.steps_taken, self.state(), self.options())

    def state(self) -> dict[str, Any]:
        """Everything but the key; private. Refused where something changed that is not trained."""
        self.settle()
        if self.weights is not None:
            self.weights.refuse_changed()
        return {
            "private": self.private.state(),
            "model": self.private.model.state_dict(),
            "kind": type(self.optimizer).__name__,
            "optimizer": self.optimizer.state_dict(),
            "averaging": self.plan.averaging,
            "average": None if self.average is None else self.average.state(),
            "points": self.watch.plain_points(),
            "recorder": None if self.recorder is None else self.recorder.state(),
            "captured": self.form,
            "way": None if self.private.way is None else astuple(self.private.way.to_release()),
        }

    def resume(self) -> None:
        """Go on where the run was."""
        state = None if self.run is None else self.run.state
        if state is not None:
            self._load_model(state["model"])
        if self.averaging is not None:  # from the weights that were loaded, where this averaging is new
            self.average = Averaged(self.private.model, self.averaging)
        if self.run is None:
            return
        if state is not None:
            if state["kind"] == type(self.optimizer).__name__:  # another optimizer, under a new key, begins anew
                self.optimizer.load_state_dict(state["optimizer"])
            self.private.restore(state["private"])
            self.watch.begin(self.run.start, state["points"], self.run.last, self.run.before, self.run.began)
            if self.average is not None and state["averaging"] == self.plan.averaging:
                self.average.restore(state["average"])
            if self.recorder is not None and state["recorder"] is not None:
                self.recorder.restore(state["recorder"])
            self.private.way = Way(*state["way"]) if state.get("way") else None  # 0.1.0 did not store it

    def begin(self, other: bool) -> None:
        """Store where the run begins: a replay starts from there, and must be captured if this is.

        ``other`` is a setting of capture that is not the present one.
        """
        if self.run is None:
            return
        if not self.run.replayed:
            self.save(self.run)
        elif self.run.state is not None and self.run.state["captured"] != self.form:
            raise ValueError(
                f"the steps of this run were taken as {self.run.state['captured']}, and would now be as {self.form}, "
                f"which rounds otherwise: resume it as it was, with as much free memory, or give capture={other} to go "
                "on with a new key"
            )

    @property
    def form(self) -> str:
        """How steps are taken, which their bits depend on."""
        return "single kernels" if self.captured is None else self.captured.form

    def _load_model(self, state: Mapping[str, Tensor]) -> None:
        own = {name: value.shape for name, value in self.private.model.state_dict().items()}
        if own != {name: value.shape for name, value in state.items()}:
            raise ValueError(
                "model has other parameters or shapes than the run in the folder: resume it with the same model"
            )
        self.private.model.load_state_dict(state)


def _captured(
    private: PrivateGradient, data: Any, optimizer: torch.optim.Optimizer, reason: str, required: bool
) -> CapturedStep | None:
    """The step as a CUDA graph, where there is no ``reason`` against it; refused with the reason where it must be."""
    try:
        if reason:
            raise CannotCaptureError(reason)
        return CapturedStep(private, data, optimizer)
    except CannotCaptureError as error:
        if required:
            raise
        if next(private.model.parameters()).is_cuda:
            warnings.warn(f"the step is not captured as a CUDA graph: {error}", stacklevel=3)
        return None


def _every(given: int | None, name: str, plan: Plan) -> int:
    if given is None:
        return -(-plan.steps // _POINTS)
    _validate.whole(least=1, **{name: given})
    return given


def _set_rate(optimizer: torch.optim.Optimizer, rate: float | None) -> float:
    """Set the learning rate where one is given; the rate that holds."""
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    return float(optimizer.param_groups[0]["lr"])


def _keyed(run: Run) -> dict[str, Any]:
    return {"key": run.key, "start": run.began, "before": run.before, "charge": run.charge}


def _identity(
    plan: Plan,
    data: Any,
    device: torch.device,
    microbatch: int | None,
    options: Callable[[], dict[str, str]],
    key: Key,
) -> replay.Identity:
    """All that the bits of a step depend on, apart from what a checkpoint holds."""
    return replay.Identity(
        mechanism=plan.mechanism.to_dict(),
        data=replay.data_digest(key, data),
        code=replay.code_version(),
        device=replay.device_kind(device),
        ranks=1,
        microbatch=microbatch,
        options=options(),
    )


def _options(settings: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """What the settings do at this moment; the state of ``model`` is the checkpoint's."""
    return {name: replay.behaviour(value, trained=model) for name, value in settings.items()}


def _planned(plan: Plan, run: Run | None, last: int) -> Event:
    """What ``last`` steps release in all, with what was released under earlier keys."""
    if run is None or run.attempt == 1:
        return plan.mechanism.event()
    return Compose((run.before, charges(plan.mechanism, run.began, last)))


def _cost(plan: Plan, event: Event) -> Guarantee:
    """The guarantee of what was released, and of what was released beside it."""
    whole = event if plan.beside == NOTHING else Compose((plan.beside, event))
    return Guarantee.of(account(whole, plan.mechanism.relation, plan.guarantee.accountant), plan.delta)


def _write(fitted: Fitted, release: Release | None, weights: Weights, folder: Path) -> None:
    """Write what may be shared."""
    weights.write(folder / WEIGHTS)
    if release is not None:
        release(folder, fitted)
