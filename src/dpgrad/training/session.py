"""A run under way: what changes during it, the loop over its steps, and what a checkpoint holds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpgrad.distributed import stored
from dpgrad.distributed.followed import Followed, options_of_all
from dpgrad.distributed.ranks import Phase, weights_digest
from dpgrad.distributed.shards import local, plain, whole
from dpgrad.errors import ResumeError, RunError
from dpgrad.grads.fsdp import is_shard, is_sharded
from dpgrad.grads.ways import Way
from dpgrad.mechanism.keys import Key
from dpgrad.runs import replay
from dpgrad.runs.checkpoint import Interruption, Run
from dpgrad.runs.weights import Weights
from dpgrad.training import source
from dpgrad.training.averaging import Averaged, Ema, Tail
from dpgrad.training.curves import Progress, RunWatch, evaluate
from dpgrad.training.diagnostics import Recorder
from dpgrad.training.losses import Metric
from dpgrad.training.plan import Plan
from dpgrad.training.private import PrivateGradient
from dpgrad.training.step.graphed import Graphed

__all__ = ["Session", "behaviours", "identity"]


@dataclass
class Session:
    """A run under way: what changes during it, which is what a checkpoint holds, and the loop."""

    private: PrivateGradient
    optimizer: torch.optim.Optimizer
    plan: Plan
    data: Any
    run: Run | Followed | None
    save_every: int
    options: Callable[[], dict[str, str]]
    averaging: Ema | Tail | None = None
    average: Averaged | None = field(init=False, default=None)
    _forms: str = field(init=False, default="")
    _known: list[int] = field(init=False, default_factory=list)  # versions of the weights before callbacks saw them
    recorder: Recorder | None = None
    weights: Weights | None = None
    unseen: bool = False  # whether the last step could not be shown to every callback
    watched: bool = True  # whether rank 0 has callbacks, which may stop the run
    watch: RunWatch = field(init=False)

    def train(self, last: int, interruption: Interruption) -> None:
        """Take the steps up to ``last``, or until someone has seen enough. All ranks stop after the same step."""
        ranks = self.private.ranks
        ranks.asked = interruption.__bool__
        enough = self.unseen and self.show(self.private.steps_taken)
        while (step := self.private.steps_taken) < last and not enough:
            learning_rate = _set_learning_rate(self.optimizer, self.plan.learning_rate_at(step))
            self.observe(step, learning_rate)
            self.step()
            if self.average is not None:
                self.average.update(step)
            enough = self.show(step + 1)
            if self.run is not None and ((step + 1) % self.save_every == 0 or step + 1 == self.run.due):
                self.save(self.run)
            if interruption if ranks.alone else ranks.stopping:
                break
        with self.kept():
            self.watch.finish(self.private.steps_taken, _set_learning_rate(self.optimizer, None))
        if self.run is not None:
            self.save(self.run)
        if self.average is not None:
            self.average.finish()

    def show(self, step: int) -> bool:
        """Evaluate and call the callbacks after ``step`` steps; whether one of them wants the run stopped."""
        learning_rate = self.plan.learning_rate_at(step - 1) if step else None
        self._known = self._versions()
        with self.kept():
            enough = self.watch.after(step, _set_learning_rate(self.optimizer, learning_rate))
        self.unseen = False
        ranks = self.private.ranks
        if ranks.alone:
            if self.run is not None and self._versions() != self._known:
                self.save(self.run)  # steps are never replayed across what a callback did to the weights
            return enough
        if self.watched:
            changed = ranks.meet(Phase.SHOWN, step, stop=enough, wish=self._versions() != self._known)
            if any(changed) and self.run is not None:
                self.save(self.run)  # as above; replicas that differ by now are refused here
        return ranks.stopping

    def _versions(self) -> list[int]:
        parameters = list(self.private.model.parameters())
        return [each._version for each in (*parameters, *map(local, filter(is_shard, parameters)))]

    def start(self, at_start: Callable[[Progress], None]) -> None:
        """Call ``at_start`` of a resumed run; refuse it where it changes the weights that steps are replayed from."""
        before = weights_digest(self.private.model, shards=True)
        at_start(self.seen())
        if weights_digest(self.private.model, shards=True) != before:
            raise RunError(
                "at_start of a callback changed the weights of a run that is resumed: change them only where "
                "progress.resumed is False"
            )

    def seen(self) -> Progress:
        """Where callbacks have seen the run so far: a resumed run goes on from there."""
        step = max(0, self.private.steps_taken - self.unseen)
        return self.watch.now(step, _set_learning_rate(self.optimizer, None))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Where a callback raises in the block, store the step that was taken: the run can be resumed after it.

        Shards are stored by all ranks together, and this one has failed: such a run resumes at its last checkpoint.
        """
        try:
            yield
        except Exception:
            self.unseen = True
            if self.run is not None and not is_sharded(self.private.model):
                self.run.save(self.private.steps_taken, self.state(), self.options())
            raise

    def step(self) -> None:
        """One step of the mechanism and one of the optimizer."""
        self.private.step(self.data)
        self.optimizer.step()

    def observe(self, step: int, learning_rate: float) -> None:
        """Let the diagnostics see the steps of their window."""
        if self.recorder is not None:
            self.recorder.learning_rate = learning_rate
            first = self.recorder.diagnostics.first_step(self.plan.steps, self.plan.steps_per_epoch)
            self.private.observe = self.recorder if step >= first else None

    def score(self, metric: Metric, held_out: Any, collate: source.Collate) -> float:
        """The metric on held-out rows, of averaged weights where there are any. Ranks that hold shards all call it."""
        model, ranks, step = self.private.model, self.private.ranks, self.private.steps_taken
        with nullcontext() if self.average is None else self.average.applied(), whole(model, ranks, step):
            found = evaluate(model, metric, held_out, collate)
        self._known = self._versions()  # averaged weights came and went
        return found

    def save(self, run: Run | Followed) -> None:
        """Store where training is, and what the model, the loss and the rest do by now: they may have changed.

        Rank 0 stores it, with the settings of every rank, after the weights of all ranks were compared.
        """
        ranks, options = self.private.ranks, self.options()
        if not ranks.alone:
            ranks.refuse_different({"weights": weights_digest(self.private.model)}, Phase.SAVED)
            options = options_of_all(ranks.every(options))
        self._forms = self._found_forms()
        step, values = self.private.steps_taken, ""
        if is_sharded(self.private.model):
            with ranks.together():
                state, values = stored.written(self.state(), self.private.model, ranks, step, self._folder())
        else:
            state = self.state() if ranks.first else {}
        run.save(step, state, options, values)

    def _folder(self) -> Path:
        """Where rank 0 keeps what is private."""
        assert self.run is not None
        return self.run.folder / "private"

    def collected(self) -> dict[str, Tensor] | None:
        """The whole weights of a model in shards, for rank 0 to release, in a file that goes with them.

        None for other models. All ranks call this.
        """
        private, ranks = self.private, self.private.ranks
        if self.weights is None or not is_sharded(private.model):
            return None
        with ranks.together():
            shards = {"model": self.weights.state()}
        state, name = stored.written(shards, private.model, ranks, private.steps_taken, self._folder())
        if not ranks.first:
            return {}
        found: dict[str, Tensor] = stored.mapped(state, self._folder())["model"]
        (self._folder() / name).unlink()
        return found

    def _found_forms(self) -> str:
        """How steps are run, on each rank."""
        return " | ".join(self.private.ranks.every(self.private.form))

    def state(self) -> dict[str, Any]:
        """Everything but the key; private. Refused where something changed that is not trained."""
        if self.weights is not None:
            self.weights.refuse_changed()
        return {
            "private": self.private.state(),
            "model": self.private.model.state_dict(),
            "kind": type(self.optimizer).__name__,
            "optimizer": self.optimizer.state_dict(),
            "averaging": self.plan.recipe.averaging,
            "average": None if self.average is None else self.average.state(),
            "points": self.watch.plain_points(),
            "unseen": self.unseen,
            "recorder": None if self.recorder is None else self.recorder.state(),
            "captured": self._forms,
            "way": None if self.private.way is None else astuple(self.private.way.to_release()),
        }

    def resume(self) -> None:
        """Go on where the run was."""
        state = None if self.run is None else self.run.state
        if state is not None:
            state = stored.read(state, self.private.model, self.private.ranks, self._folder())
            self._load_model(state["model"])
        if self.averaging is not None:  # from the weights that were loaded, where this averaging is new
            self.average = Averaged(self.private.model, self.averaging)
        if self.run is None:
            return
        if state is not None:
            if state["kind"] == type(self.optimizer).__name__:  # another optimizer, under a new key, begins anew
                self.optimizer.load_state_dict(state["optimizer"])
            self.private.restore(state["private"])
            self.unseen = bool(state.get("unseen"))
            self.watch.begin(self.run.start, state["points"], self.run.last, self.run.before, self.run.began)
            if self.average is not None and state["averaging"] == self.plan.recipe.averaging:
                self.average.restore(state["average"])
            if self.recorder is not None and state["recorder"] is not None:
                self.recorder.restore(state["recorder"])
            self.private.way = Way(*state["way"]) if state.get("way") else None  # 0.1.0 did not store it

    def begin(self, capture: bool | None) -> None:
        """Prepare the first step and store where the run begins: a replay starts from there, and must run as this does.

        ``capture`` is what the user asked for.
        """
        self.private.prepare(self.data)
        self._forms = self._found_forms()
        if self.run is None:
            return
        if not self.run.replayed:
            self.save(self.run)
        elif self.run.state is not None and self.run.state["captured"] != self._forms:
            raise ResumeError(
                f"the steps of this run were taken as {self.run.state['captured']}, and would now be as "
                f"{self._forms}, which rounds differently: resume it as it was, with as much free memory, or give "
                f"capture={capture is not True and self.private.form == Graphed.form} to go on with a new key"
            )

    def _load_model(self, state: Mapping[str, Tensor]) -> None:
        own = {name: value.shape for name, value in self.private.model.state_dict().items()}
        if own != {name: value.shape for name, value in state.items()}:
            raise ResumeError(
                "model has other parameters or shapes than the run in the folder: resume it with the same model"
            )
        self.private.model.load_state_dict(state)


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float | None) -> float:
    """Set the learning rate where one is given; the rate that holds."""
    if learning_rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    return float(optimizer.param_groups[0]["lr"])


def identity(
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
        data=replay.data_digest(key, source.comparable(data)),
        code=replay.code_version(),
        device=replay.device_kind(device),
        ranks=1,
        microbatch=microbatch,
        options=options(),
    )


def behaviours(settings: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """What the settings do at this moment; the state of ``model`` is the checkpoint's."""
    with plain(model) as sharded:
        found = {name: replay.behaviour(value, trained=model) for name, value in settings.items()}
    return {**found, "shards": repr(sharded)} if sharded else found
