"""The ledger of one run: which steps are spent, on the disk before anything of them is computed.

An *attempt* is the part of a run that one key served. Its steps are reserved in blocks; a step is spent once it is
reserved, so a step costs no write of its own. The file holds public values only:

    {"format": ..., "identifier": ..., "delta": ..., "accountant": ..., "beside": {...}}
    {"attempt": 1, "began": 0, "last": 100, "reserve": 20, "seeded": false, "mechanism": {...}}
    {"until": 20}                      steps below 20 are spent
    {"until": 40}
    {"until": 33, "settled": true}     the process ended in order and had taken no step from 33 on
    {"until": 60, "torn": true}        a line was being appended when a process ended
    {"attempt": 2, "began": 30, ...}   a new key, from the checkpoint at step 30
    {"finished": true, "kept": false}  whether private/ was asked to be kept

Guarantee: after a crash at any moment, `WriteAhead.event` covers every step of which anything was computed, because
`reserve` returns only when the line is on the disk; and its ε, with ``also_released``, is at most that of the
first attempt's whole plan, because no attempt reserves beyond ``last``. Steps that are taken again with the same key
and the same bits are the same release, so the ledger is keyed by step: each counts once in an attempt.

A torn last line was not acknowledged, so a crash alone would prove that nothing of its steps was computed, and it could
be dropped. It is counted all the same, as the largest block it could have been: a file whose end was cut off within a
line looks alike, and there the steps were computed. It costs at most one block, which the plan had paid for already,
and nothing where the run goes on with the same key. Whole lines cut from the end leave no trace: so, when a new key
begins, the old attempt is charged to where its next checkpoint was due, beyond which no step was taken. A ledger that
is cut further disagrees with the checkpoint, and one that is missing although there is a checkpoint is refused.
"""

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgrad import _validate
from dpgrad._files import Lines
from dpgrad.accounting import account
from dpgrad.accounting.events import NOTHING, Event, Repeat, from_dict, grouped, to_dict, together
from dpgrad.errors import BudgetSpentError, ResumeError
from dpgrad.mechanism.mechanism import Mechanism

__all__ = ["FORMAT", "Attempt", "WriteAhead", "charges"]

FORMAT = "dpgrad run 1"


def charges(mechanism: Mechanism, start: int, stop: int) -> Event:
    """What the steps from ``start``, where a key came into use, to before ``stop`` release.

    >>> from dpgrad import sampling
    >>> epochs = Mechanism(sampling.Shuffle(100, 25), steps=12, noise_multiplier=1.0, relation="zero-out")
    >>> charges(epochs, 0, 12).count, charges(epochs, 6, 12).count, charges(epochs, 6, 8).count
    (3, 2, 1)
    """
    if stop <= start:
        return NOTHING
    whole = mechanism.with_steps(stop).event()
    if start == 0:
        return whole
    span = mechanism.sampler.span
    if isinstance(whole, Repeat):  # every step costs the same
        return Repeat(whole.event, 1 + (stop - 1) // span - start // span)
    cut = mechanism.with_steps(stop)
    prices = (cut.step_event(step, start) for step in range(start, stop))
    return grouped(price for price in prices if price != NOTHING)  # type: ignore[misc]


@dataclass(frozen=True)
class Attempt:
    """Steps under one key: from ``began`` on, spent below ``until``, never to go beyond ``last``.

    ``reached`` is the highest ``until`` there was, before steps that were not taken were given back.

    >>> from dpgrad import sampling
    >>> plan = Mechanism(sampling.FullBatch(), steps=10, noise_multiplier=5.0)
    >>> Attempt(2, began=4, last=8, reserve=2, seeded=False, mechanism=plan, until=6).event()
    Repeat(event=Gaussian(noise_multiplier=5.0), count=2)
    """

    number: int
    began: int
    last: int
    reserve: int
    seeded: bool
    mechanism: Mechanism
    until: int
    reached: int = 0

    def event(self) -> Event:
        return charges(self.mechanism, self.began, self.until)


class WriteAhead:
    """An open ledger of a run; the last of ``attempts`` is the present one.

    >>> import tempfile
    >>> from dpgrad import sampling
    >>> plan = Mechanism(sampling.FullBatch(), steps=10, noise_multiplier=5.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "ledger.jsonl")
    ...     WriteAhead.create(path, plan, 1e-5, "exact", reserve=4, seeded=False).reserve(0)
    ...     WriteAhead.read(path).event()
    Repeat(event=Gaussian(noise_multiplier=5.0), count=4)
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.identifier = ""
        self.delta, self.accountant = 0.0, ""
        self.also_released: Event = NOTHING
        self.attempts: list[Attempt] = []
        self.finished = self.kept = False
        self._pending: list[dict[str, Any]] = []  # followed, and not yet in the file
        try:
            for number, record in enumerate(lines.records):
                self._take(number, record)
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"{lines.path} is not the ledger of a run: {error}; choose another folder") from None

    @classmethod
    def create(
        cls,
        path: Path,
        mechanism: Mechanism,
        delta: float,
        accountant: str,
        reserve: int,
        seeded: bool,
        also_released: Event = NOTHING,
    ) -> "WriteAhead":
        """The ledger of a run that begins: nothing is spent. ``also_released`` counts against the same budget."""
        _validate.open_unit(delta=delta)
        _validate.whole(least=1, reserve=reserve)
        head = {"format": FORMAT, "identifier": secrets.token_hex(16), "delta": delta, "accountant": accountant}
        head["beside"] = to_dict(also_released)
        first = _opening(1, 0, mechanism.steps, reserve, seeded, mechanism)
        return cls(Lines.create(path, [head, first]))

    @classmethod
    def read(cls, path: Path) -> "WriteAhead":
        """The ledger in ``path``; a torn last line is counted as spent, and replaced by a line that says so."""
        lines = Lines.read(path)
        found = cls(lines)
        if not found.attempts:
            raise ResumeError(
                f"{path} ends before its first attempt: lines are missing, and what they said is not known; count the "
                "whole plan as spent and begin in another folder"
            )
        if lines.torn:
            now = found.present
            record = {"until": now.until if found.finished else min(now.until + now.reserve, now.last), "torn": True}
            lines.replace_torn(record)
            found._take(len(lines.records), record)
        return found

    def _take(self, number: int, record: dict[str, Any]) -> None:
        """Follow one line."""
        if number == 0:
            if record.get("format") != FORMAT:
                raise ResumeError(f"its first line is not that of {FORMAT!r}")
            self.identifier, self.delta = record["identifier"], record["delta"]
            self.accountant, self.also_released = record["accountant"], from_dict(record["beside"])
        elif "attempt" in record:
            if record["attempt"] != len(self.attempts) + 1 or self.finished:
                raise ResumeError(f"line {number + 1} begins an attempt out of turn")
            self.attempts.append(
                Attempt(
                    record["attempt"], record["began"], record["last"], record["reserve"], record["seeded"],
                    Mechanism.from_dict(record["mechanism"]), record["began"],
                )
            )  # fmt: skip
        elif "until" in record:
            least = self.present.began if "settled" in record else self.present.until
            if not least <= record["until"] <= self.present.last:
                raise ResumeError(f"line {number + 1} reserves steps out of turn")
            reached = max(self.present.reached, record["until"])
            self.attempts[-1] = dataclasses.replace(self.present, until=record["until"], reached=reached)
        else:
            self.finished, self.kept = bool(record["finished"]), bool(record["kept"])

    def _plan(self, record: dict[str, Any]) -> None:
        """Follow a line that `commit` will write."""
        self._take(len(self._lines.records) + len(self._pending), record)
        self._pending.append(record)

    def _add(self, record: dict[str, Any]) -> None:
        self._plan(record)
        self.commit()

    def commit(self) -> None:
        """Write what was begun; on the disk when this returns."""
        while self._pending:
            self._lines.append(self._pending[0])
            del self._pending[0]

    def rename(self, path: Path) -> None:
        """Give the file another name in its folder."""
        self._lines.rename(path)

    @property
    def present(self) -> Attempt:
        return self.attempts[-1]

    @property
    def before(self) -> Event:
        """What the attempts before the present one spent."""
        return together(*(attempt.event() for attempt in self.attempts[:-1]))

    def event(self) -> Event:
        """What all attempts spent."""
        return together(*(attempt.event() for attempt in self.attempts))

    def event_until(self, taken: int) -> Event:
        """What all attempts spent, of the present one the steps before ``taken``."""
        now = self.present
        return together(self.before, charges(now.mechanism, now.began, taken))

    def budget(self) -> float:
        """The ε of the plan that the run began with, together with ``also_released``."""
        first = self.attempts[0].mechanism
        return first.guarantee(self.delta, self.accountant, also_released=self.also_released).epsilon

    def begin(self, began: int, due: int, reserve: int, seeded: bool) -> None:
        """A new attempt, that goes on at step ``began`` and ends where the budget does.

        It costs nothing until `commit`. ``due`` is where the next checkpoint of the attempt before was due: to there
        it may have spent.
        """
        now = self.present
        _validate.whole(most=now.mechanism.steps, **{"step of the checkpoint": began})
        if (until := min(due, now.last)) > now.until:
            self._plan({"until": until})
        last = self._affordable(began)
        self._plan(_opening(len(self.attempts) + 1, began, last, reserve, seeded, now.mechanism))

    def _affordable(self, began: int) -> int:
        """The step before which the steps from ``began``, with all that is spent, are within the budget.

        Guarantee: the ε of all of it was computed and is at most that of the plan, or no step is left.
        """
        spent, budget, mechanism = self.event(), self.budget(), self.present.mechanism

        def fits(stop: int) -> bool:
            event = together(self.also_released, spent, charges(mechanism, began, stop))
            return account(event, mechanism.relation, self.accountant).epsilon(self.delta) <= budget

        within, beyond = began, mechanism.steps + 1
        stop = mechanism.steps
        while beyond - within > 1:
            within, beyond = (stop, beyond) if fits(stop) else (within, stop)
            stop = (within + beyond) // 2
        return within

    def reserve(self, step: int) -> None:
        """Spend ``step`` and those of its block, where it is not spent yet; on the disk when this returns."""
        now = self.present
        if step >= now.last:
            raise BudgetSpentError(
                f"step {step + 1:,} would exceed the plan: this attempt may go to step {now.last:,}; stop here"
            )
        if step >= now.until:
            self._add({"until": min(step + now.reserve, now.last)})

    def settle(self, taken: int) -> None:
        """Give back what was reserved and not taken: steps from ``taken`` on were not computed by any process."""
        if taken < self.present.until:
            self._add({"until": taken, "settled": True})

    def finish(self, kept: bool) -> None:
        """Nothing more will be spent; ``kept`` says whether the private folder stays."""
        self._add({"finished": True, "kept": kept})


def _opening(number: int, began: int, last: int, reserve: int, seeded: bool, mechanism: Mechanism) -> dict[str, Any]:
    return {
        "attempt": number,
        "began": began,
        "last": last,
        "reserve": reserve,
        "seeded": seeded,
        "mechanism": mechanism.to_dict(),
    }
