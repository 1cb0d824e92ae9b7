"""`PrivateGradient`: charge a step, draw its batch, clip every example, add noise, divide, and write ``.grad``.

The rest is ordinary PyTorch: the noisy gradient may be used freely, by any optimizer of ``torch.optim``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpgrad import _processes, _validate
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Event, Leaf, expanded, from_json, grouped, leaves, to_json, together
from dpgrad.accounting.guarantee import Guarantee
from dpgrad.distributed.ranks import Phase, Ranks
from dpgrad.distributed.rounds import Rounds, Totals
from dpgrad.distributed.shards import refuse_layout, whole
from dpgrad.errors import (
    BudgetSpentError,
    CannotCaptureError,
    OptionError,
    ResumeError,
    RunError,
    UnsupportedModelError,
)  # fmt: skip
from dpgrad.grads import Way
from dpgrad.grads.accumulate import unless_out_of_memory
from dpgrad.grads.again import Again
from dpgrad.grads.check import compare, prepared
from dpgrad.grads.fsdp import is_sharded, resharded
from dpgrad.grads.history import Average, InnerMomentum
from dpgrad.grads.memory import fitting
from dpgrad.grads.scaling import Hard, ScaleRule
from dpgrad.grads.scratch import Scratch
from dpgrad.grads.sums import Batch, Loss, trainable
from dpgrad.grads.swap import unwrapped
from dpgrad.grads.unquoted import unquoted
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.randomness import draw
from dpgrad.training import agreed, same_loss, source
from dpgrad.training.admission import (
    Signature,
    check_computing,
    check_examples,
    refuse_kinds,
    refuse_model,
    rule_fault,
    warn_of_size,
)
from dpgrad.training.augment import Augment, probed
from dpgrad.training.same_data import SameData
from dpgrad.training.step.graphed import Graphed
from dpgrad.training.step.pieces import FEWEST_STEPS, Pieces
from dpgrad.training.step.release import of_source
from dpgrad.training.step.sizes import Sizes, capacity
from dpgrad.training.step.straight import Straight
from dpgrad.training.step.taped import Taped
from dpgrad.training.step.work import Observed, Work

__all__ = ["Observed", "PrivateGradient"]

_LARGE = 1 << 24  # parameters; a larger model is tried on at most as many examples as one of its passes takes


class PrivateGradient:
    """Private steps of a mechanism on a model; each writes the noisy mean of clipped gradients to ``.grad``.

    ``loss(model, batch)`` returns one value per row. ``rule`` is a rule of `dpgrad.scaling` or your own function
    ``rule(norms, clip)``; it is applied to each example alone, and the clip bound is enforced. ``engine`` is a name in
    `dpgrad.grads.ENGINES`. ``microbatch`` is the largest number of examples processed at a time, and ``memory_limit``
    the bytes from which to choose it; neither changes the result.

    With ``several_rows`` the data are (examples, K, ...), and an example's gradient is the mean over its K rows.
    ``augment(batch, generator)`` makes such rows at every step. It is called for one example at a time, (1, ...), and
    returns (1, K, ...), drawn from the generator. `dpgrad.augment.Shifts` shifts all images of a batch at once.
    ``inner_momentum`` and ``average`` (the γ for full batches) scale a momentum of each example's gradients in place of
    the gradient (`dpgrad.grads.history`). ``collate`` makes a batch from the examples of a Dataset, which ``workers``
    processes read; 0 reads them in a thread.

    On a CUDA device steps are captured as CUDA graphs and replayed, whatever the options and the optimizer; where they
    cannot be, a warning says why, once (`not_captured`). ``capture`` True requires it, False turns it off. Graphs
    follow changes of the model, the loss, the rule and torch's settings between steps.

    ``seed`` makes the run reproducible and unfit for release: anyone who guesses it can subtract the noise. ``.grad``
    is overwritten in place, so `zero_grad` is not needed; clone a gradient to keep it beyond the next step. Noise is
    added to every coordinate, including the row of an embedding's ``padding_idx``.

    A run that outlives its process (`dpgrad.checkpoint.Run`) passes its ``key``, the first step ``start`` of that key,
    what was spent ``before`` under other keys, and ``charge``. ``charge`` is called with the number of each step before
    anything of it is computed; if it raises, the step is not taken. ``observe`` is called after each step with its
    intermediate values, which are computed only if it is given.

    After ``torch.distributed.init_process_group()`` all ranks make one of these and take every step together
    (docs/several_processes.md): each works on its part of the batch, and every rank gets the same ``.grad``. ``group``
    is a process group other than the default. With ``rows_on_rank="part"`` each rank is given rows of its own, and
    batches are drawn over all of them. If a rank sends no heartbeat for ``rank_timeout`` seconds while
    another waits for it, the run ends on all ranks. Key, initial weights and charge are those of rank 0.

    Guarantee: after all steps, everything written to ``.grad`` has the privacy profile of ``mechanism.event()`` under
    ``mechanism.relation``, where one example is one row of the data. A step is charged before its gradients are
    computed. Clip bound, noise and charge are read from one frozen mechanism. The divisor is its declared constant,
    never the size of the batch drawn.

    Not covered: other uses of the data by the model, the loss or the caller; timing; attacks on floating-point noise,
    unless the mechanism has ``secure_values`` (docs/secure_noise.md); rounding beyond
    `dpgrad.grads.precision.norm_error` (add-remove neighbours, long sums over positions); that the comparison of the
    engine with its definition before the first step passed; and errors and warnings. What your own code raises on
    training rows is reported without its words (`dpgrad.grads.unquoted`). A message of torch may reveal the batch size:
    do not release it.

    >>> from dpgrad import sampling
    >>> model = nn.Linear(2, 1)
    >>> data = torch.randn(100, 2), torch.randn(100)
    >>> def loss(model, batch):
    ...     inputs, targets = batch
    ...     return (model(inputs)[:, 0] - targets).square()
    >>> mechanism = Mechanism(sampling.Poisson(0.1), steps=2, noise_multiplier=1.0, batch_size=10)
    >>> private = PrivateGradient(model, loss, mechanism)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(mechanism.steps):
    ...     private.step(data)
    ...     optimizer.step()
    >>> private.ledger == mechanism.event()
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        mechanism: Mechanism,
        *,
        rule: ScaleRule | None = None,
        engine: str = "bookkeeping",
        inner_momentum: InnerMomentum | None = None,
        average: float | None = None,
        several_rows: bool = False,
        microbatch: int | None = None,
        memory_limit: int | None = None,
        collate: source.Collate = default_collate,
        augment: Augment | None = None,
        observe: Callable[[Observed], None] | None = None,
        capture: bool | None = None,
        workers: int = 0,
        seed: int | None = None,
        key: Key | None = None,
        start: int = 0,
        before: Event = NOTHING,
        charge: Callable[[int], None] | None = None,
        group: Any = None,
        rows_on_rank: str = "all",
        rank_timeout: float = _processes.RANK_TIMEOUT,
    ) -> None:
        self.ranks = Ranks.of(group, rank_timeout)
        rule = Hard() if rule is None else rule
        with self.ranks.together():
            refuse_kinds(loss, mechanism, rule, inner_momentum, key)
            model = unwrapped(model, sharded=True)
            resharded(model)
            refuse_layout(model, self.ranks)
            check_computing(engine, microbatch, memory_limit, workers, rows_on_rank)
            check_examples(mechanism, inner_momentum, average, augment, several_rows)
            agreed.refuse_features(self.ranks, {"average": average, "observe": observe})
            agreed.refuse_with_shards(model, {"inner_momentum": inner_momentum, "capture": capture})
            if seed is not None and key is not None:
                raise OptionError("give seed or key, not both: a seed stands for a key")
            _validate.whole(most=mechanism.steps, start=start)
            _ = mechanism.divisor  # refused here, not at the first step
            refuse_model(model, mechanism)
            own = key or (Key.fresh() if seed is None else Key.from_seed(seed))
            key = agreed.opened(
                self.ranks, model, own, mechanism, start, before, rule=rule, engine=engine, augment=augment,
                inner_momentum=inner_momentum, several_rows=several_rows, rows_on_rank=rows_on_rank,
            )  # fmt: skip
            key = of_source(key, model, mechanism)
            self.work = Work(
                model, loss, mechanism, key, rule, inner_momentum, average, several_rows or augment is not None,
                augment, collate, start, microbatch, observe, charge is not None, self.ranks,
            )  # fmt: skip
            if memory_limit is not None:
                self.work.scratch = Scratch(0)  # beside a pass it would take more than was measured
            self._begin(charge, start, before, rows_on_rank == "part")
        self._engine_name, self._memory_limit, self._capture, self._workers = engine, memory_limit, capture, workers

    def _begin(self, charge: Callable[[int], None] | None, start: int, before: Event, parts: bool) -> None:
        """Set the state before the first step."""
        self.work.groups()
        self._sharded = is_sharded(self.work.model)
        self._running: Taped | Pieces | None = None
        self.not_captured = ""  # why steps are not captured although they could have been
        self._data = SameData(self.work, parts)
        self.way: Way | None = None  # how gradients are computed; known from the first step on
        self._again = Again()
        self._checked: Signature | None = None
        self._charge, self._start, self._before = charge, start, before
        self._turns = _processes.Turns("both would have the same noise; make one in each process, and charge both")
        self._charged: list[Leaf] = []
        self._owed: set[int] = set()  # charged and not yet computed
        self._step = start
        self._tried: ScaleRule | None = None
        self._fault = ""
        self._try_rule()

    def __repr__(self) -> str:
        return f"PrivateGradient(step {self._step} of {self.mechanism.steps}, {self.key.label})"

    def __reduce_ex__(self, protocol: object) -> str:
        """Copies and pickles are refused: a second object with this key would add the same noise to another sum."""
        raise RunError(
            "a PrivateGradient cannot be copied or pickled: two results with the same noise reveal their difference; "
            "make a new one, and charge its steps too"
        )

    @property
    def model(self) -> nn.Module:
        """The model whose gradients are written. Model, mechanism and key cannot be replaced: steps depend on them."""
        return self.work.model

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that gives clip bound, noise and cost."""
        return self.work.mechanism

    @property
    def key(self) -> Key:
        """The key that all randomness of the run follows from."""
        return self.work.key

    @property
    def steps_taken(self) -> int:
        """The number of steps charged so far, including those before ``start``."""
        return self._step

    @property
    def clip_bounds(self) -> Sequence[Sequence[float]]:
        """The clip bounds of ``adaptive_clip``, by group, at each step so far: released values.

        Empty without ``adaptive_clip``; `Mechanism.clips` then has them.
        """
        return () if self.work.quantile is None else self.work.quantile.used(self._step)

    def clip_after(self, step: int) -> float:
        """The clip bound of the first group at a step; at the next step if ``step`` was not taken yet."""
        bounds = self.work.clips(step)
        return float(bounds.flatten()[0]) if isinstance(bounds, Tensor) else bounds

    @property
    def ledger(self) -> Event:
        """The event of the steps so far; ``mechanism.event()`` after the last step of a run with a single key."""
        return together(self._before, self._own_ledger)

    @property
    def _own_ledger(self) -> Event:
        """The event of the steps under the current key."""
        return grouped(self._charged) if self._charged else NOTHING

    def spent(self, delta: float, accountant: str = "pld") -> Guarantee:
        """Return the ε of the steps so far.

        It holds if the number of steps was fixed in advance. A run stopped because of what it showed costs the whole
        plan: ``mechanism.guarantee(delta)``.
        """
        return Guarantee.of(account(self.ledger, self.mechanism.relation, accountant), delta)

    def step(self, data: Any) -> None:
        """Draw this step's batch from ``data`` and write the noisy mean of its clipped gradients to ``.grad``.

        ``data`` is the whole dataset: tensors or arrays with a common first dimension (in tuples or dicts), data
        frames, Arrow tables, a map-style Dataset, a ``datasets.Dataset``, or a DataLoader over a map-style dataset,
        whose batches are not used (docs/data.md). The batch is moved to the model's device. An empty batch gives pure
        noise.
        """
        self.compute(data, self.charged(data))

    def charged(self, data: Any) -> int:
        """Charge the next step and return its number; the caller must then `compute` that step, once.

        For callers that have to do something between the two. All others call `step`.
        """
        with self._together():
            data, rows = self._data.taken(data)
            if torch.is_inference_mode_enabled():
                raise RunError("a step needs gradients: call it outside torch.inference_mode")
            if self._sharded:
                resharded(self.model)
            step = self._step
            if step >= self.mechanism.steps:
                raise BudgetSpentError(
                    f"all {self.mechanism.steps:,} steps of the mechanism are taken: a further one is not accounted for"
                )
            if self._owed and not self.ranks.alone:
                raise RunError(
                    "the step charged last was not computed yet, and several ranks must take the steps in order: "
                    "compute it first"
                )
            self._try_rule()
            if self._fault:
                _validate.warn(
                    f"{self._fault}: such factors are lowered to it, or dropped, and no example exceeds the clip bound"
                )
                self._fault = ""  # once
            self._prepare(data, rows)
            if not self.ranks.alone and same_loss.due(step - self._start):
                probe = partial(self._probe, data, self._data.from_all_over()) if self._data.held else None
                same_loss.compare(self.work, partial(self._passing, data, step), probe, self._data.parts, step)
            if not self._sharded:  # otherwise compared while the parameters are gathered
                with self._passing(data, step):
                    self._compare_again(data, rows, step)
            if self._charge is not None and self.ranks.first:
                self._charge(step)
            # No rank computes before the charge is on the disk of rank 0.
            self.ranks.meet(Phase.CHARGED, step, weights=agreed.weights_at(self.ranks, self.model, step - self._start))
            price = self.mechanism.step_event(step, self._start)
            if price != NOTHING:
                self._charged.append(price)  # type: ignore[arg-type]
            self._step = step + 1  # charged even if what follows fails
            self._owed.add(step)
            return step

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Report a failure on this rank to the others; refuse processes that were connected since the start."""
        if self.ranks.alone:
            _processes.refuse_several()
        with self._turns, self.ranks.together():
            yield

    def compute(self, data: Any, step: int) -> None:
        """Compute a charged step and write ``.grad``; refuse a step that was not charged or was already computed."""
        with self._together():
            data, rows = self._data.taken(data, again=True)
            if step not in self._owed:
                raise RunError(
                    f"step {step} was not charged, or was already computed. Reusing its noise on a different sum would "
                    "reveal their difference"
                )
            self._owed.discard(step)
            if self._sharded:
                self._computed_in_shards(data, rows, step)
                return
            with self._passing(data, step):
                self._computed(data, rows, step)

    @contextmanager
    def _passing(self, data: Any, step: int, totals: Totals | None = None) -> Iterator[Rounds | None]:
        """Pass rows through the model within the block: parameters are whole, and errors do not quote rows."""
        told = unquoted(self.model, self.work.loss, partial(self._data.zeros, data))
        with whole(self.model, self.ranks, step, totals) if self._sharded else nullcontext() as rounds, told:
            yield rounds

    def _computed_in_shards(self, data: Any, rows: int, step: int) -> None:
        """Compare and compute in one block, which all ranks enter: it gathers parameters and exchanges sums."""
        runner = self._runner(data, rows)
        assert isinstance(runner, Taped)
        self.model.zero_grad()  # or the previous step's gradients would take memory while sums are formed
        with self._passing(data, step, runner.totals) as rounds:
            self._compare_again(data, rows, step)
            seen = runner.summed(data, rows, step, rounds)
        runner.shown(step, seen)

    def _computed(self, data: Any, rows: int, step: int) -> None:
        runner = self._runner(data, rows)

        def taken() -> bool:
            runner.step(data, rows, step)
            return True

        if isinstance(runner, Taped):
            runner.step(data, rows, step)
        elif unless_out_of_memory(taken) is None:
            if self.work.replayed:
                raise MemoryError(
                    "this step did not fit in memory in pieces of fixed sizes, and other pieces round differently, so "
                    "it could not be replayed: give microbatch"
                )
            # Nothing of the step was released: it is computed again, in pieces that fit in memory.
            self._stop()
            self._running = Taped(self.work)
            self._running.step(data, rows, step)

    def prepare(self, data: Any) -> None:
        """Do what precedes the first step: check the model on some examples, and capture the step if possible.

        Nothing is released or charged.
        """
        with self._together():
            data, rows = self._data.taken(data)
            self._try_rule()
            if self._sharded:
                resharded(self.model)
            self._prepare(data, rows)
            with nullcontext() if self._sharded else self._passing(data, self._step):
                self._runner(data, rows)

    @property
    def form(self) -> str:
        """How steps are run, and so how they round; known after `prepare` or the first step."""
        return Taped.form if self._running is None else self._running.form

    @property
    def rule(self) -> ScaleRule:
        """The rule that scales each example."""
        return self.work.rule

    @rule.setter
    def rule(self, rule: ScaleRule) -> None:
        self.work.rule = rule

    @property
    def observe(self) -> Callable[[Observed], None] | None:
        """The function that is shown the intermediate values of each step."""
        return self.work.observe

    @observe.setter
    def observe(self, observe: Callable[[Observed], None] | None) -> None:
        agreed.refuse_features(self.ranks, {"observe": observe})
        self.work.observe = observe

    def state(self) -> dict[str, Any]:
        """Return everything except the key that the next step depends on. Private; store it at once.

        Its ``key`` is a digest that identifies the key and reveals nothing else about it.

        >>> from dpgrad import sampling
        >>> plan = Mechanism(sampling.FullBatch(), steps=2, noise_multiplier=1.0, batch_size=3)
        >>> private = PrivateGradient(nn.Linear(1, 1), lambda model, x: model(x)[:, 0], plan)
        >>> private.step(torch.ones(3, 1))
        >>> private.state()["step"]
        1
        """
        kept = self.work.averages
        return {
            "key": self.key.derive("state").hex(),
            "step": self._step,
            "start": self._start,
            "noise": agreed.noise_digest(self.mechanism, range(self._start, self._step)),
            "ledger": to_json(self._own_ledger),
            "microbatch": self.work.microbatch,
            "iterates": [{name: value.clone() for name, value in iterate.items()} for iterate in self.work.iterates],
            "average": None if kept is None else kept.state(),
            **({} if self.work.quantile is None else {"clips": self.work.quantile.state(self._step)}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`.

        With the same key and ``start``, the next step is bit for bit the one that would have followed. A different key
        is a new release: ``start`` must be where the state ends, and ``before`` must hold what the state spent. The
        averages of single examples then start again, because they are vectors of the rows there were.
        """
        fields = {"key", "step", "start", "noise", "ledger", "microbatch", "iterates", "average", "clips"}
        if set(state) | {"key", "noise", "clips"} != fields:
            raise ResumeError(f"not the state of a PrivateGradient: it has fields {_validate.shown(sorted(state))}")
        if self._step != self._start or self._charged:
            raise ResumeError("restore a state before the first step, not after")
        step, same = state["step"], state.get("key") == self.key.derive("state").hex()
        agreed.refuse_other_past(state, same, self.mechanism, self._start)
        if not same and step != self._start:
            raise ResumeError(
                f"the state was taken under another key, at step {step:,}: give that key; or, for a new one, "
                f"start={step} and before, what was spent so far"
            )
        if not same and leaves(from_json(state["ledger"])) - leaves(self._before):
            raise ResumeError("before must hold what the state spent under its own key: a new key adds to it")
        if len(state["iterates"]) and self.work.inner_momentum is None:
            raise ResumeError("the state has iterates of an inner momentum: give the inner_momentum it was taken with")
        first, bounds = state.get("clips", (step, None))
        if self.work.quantile is not None and (same or bounds is not None):
            self.work.quantile.restore(bounds, first, step)
        parameters = trainable(self.model)
        self.work.iterates[:] = [
            {name: value.to(parameters[name].device, copy=True) for name, value in iterate.items()}
            for iterate in state["iterates"]
        ]
        self._step = step
        self._stop()  # a runner made by `prepare` has other sizes and averages
        if not same:
            return
        self._charged = expanded(from_json(state["ledger"]))
        if state["microbatch"] is not None:
            self.work.microbatch, self._memory_limit = state["microbatch"], None  # the size found then
        if (kept := state["average"]) is not None:
            if self.work.average is None:
                raise ResumeError("the state has averages of examples: give the average it was taken with")
            self.work.averages = Average.restored(self.work.average, kept, self.work.device)

    def _try_rule(self) -> None:
        """Refuse a user's rule to which the contract cannot be applied, and note what has to be corrected."""
        if self.rule is not self._tried:
            self._fault = rule_fault(self.rule, self.work.clips, self.mechanism.steps, self.work.device)
            self._tried = self.rule

    def _prepare(self, data: Any, rows: int) -> None:
        """Compare the engine with its definition before the first step, and again after the model changed.

        That is: other parameters are trained; parameters, modules or hooks were replaced; or a module is in the other
        mode, since BatchNorm mixes examples in training mode only.
        """
        if self._checked is not None and self._checked.same():
            return
        now = Signature(self.model)
        with self._passing(data, self._step):
            if self._data.held:
                self._choose_engine(data, rows)
        self.work.microbatch = agreed.same_model(self.ranks, self.model, self.work.microbatch)
        self._checked = now
        self._stop()

    def _choose_engine(self, data: Any, rows: int) -> None:
        work = self.work
        if work.averages is not None and set(work.averages.momenta) != set(trainable(self.model)):
            raise UnsupportedModelError(
                "average keeps a vector for each parameter: train the same parameters at every step"
            )
        warn_of_size(self.mechanism, rows)
        probe = self._probe(data, self._data.from_all_over())
        most = min(work.share.most(rows), capacity(self.mechanism, rows))  # pieces of a batch have fewer still
        if self._in_pieces() and sum(each.numel() for each in self.model.parameters()) > _LARGE:
            most = Sizes.of(self.mechanism, rows, work.microbatch, share=work.share).most
        work.engine, self.way = prepared(
            self.model, work.loss, probe, self._engine_name, work.several_rows, most, self._sharded
        )
        if self._memory_limit is not None:
            most = fitting(self.model, work.loss, probe, self._memory_limit, work.engine, work.several_rows)
            work.microbatch = most if work.microbatch is None else min(most, work.microbatch)

    def _stop(self) -> None:
        """Discard the runner of the steps, with its graphs or code."""
        if isinstance(self._running, Pieces):
            self._running.close()
        self._running = None

    def _probe(self, data: Any, indices: Tensor) -> Batch:
        """These examples as a step would see them."""
        batch = self.work.gathered(data, indices)
        return batch if self.work.augment is None else probed(self.work.augment, batch, self.key)

    def _compare_again(self, data: Any, rows: int, step: int) -> None:
        """Compare the engine with its definition on examples of this step's batch, now and then.

        Values change: what was zero at the first step hides nothing later. A difference stops the run.
        """
        work = self.work
        if work.engine is None or not self._again.due():
            return
        # If memory runs out here, the step itself may still fit, in smaller pieces.
        with self._again.timed(), suppress(torch.OutOfMemoryError, MemoryError):
            every = draw.chosen(self.mechanism.sampler, rows, step, self.key, self.work.device)
            chosen = self.work.share.of(every)
            if len(chosen):
                few = self._probe(data, chosen[:: max(1, len(chosen) // 2)][:2])
                compare(work.model, work.loss, few, work.engine, self._engine_name, work.several_rows, self._sharded)

    def _runner(self, data: Any, rows: int) -> "Taped | Pieces":
        """The runner of the steps: on pieces of fixed sizes if that pays off, as graphs on a CUDA device."""
        if self._running is None:
            self._running = self._on_pieces(data, rows) or Taped(self.work)
        return self._running

    def _in_pieces(self) -> bool:
        """Whether to work on pieces of fixed sizes."""
        if self._sharded:  # parameters lie elsewhere at every step
            return False
        worth = self._capture or self.mechanism.steps >= FEWEST_STEPS
        return bool(worth) and self._capture is not False and self._data.held > 0

    def _on_pieces(self, data: Any, rows: int) -> Pieces | None:
        if not self._in_pieces():
            return None
        if self.work.device.type == "cpu" and not self._capture:
            return Straight(self.work, data, rows, self._workers)
        try:
            return Graphed(self.work, data, rows, self._workers, self._step)
        except CannotCaptureError as error:
            if self._capture:
                raise
            self.not_captured = str(error)
            _validate.warn(f"the step is not captured as a CUDA graph: {error}")
            return None
