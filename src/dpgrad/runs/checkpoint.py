"""A run that survives a crash: its cost is on disk before it is computed, and its state is replaced as a whole.

A run folder holds

    ledger.jsonl     what is spent (`dpgrad.runs.writeahead`); public values only
    lock             held by the process that works on the run, as is the folder itself
    private/         the key and the state; only the owner may read it, and it goes when the run is finished
    release/         what may be shared; it appears as a whole when the run is finished

Sampling and noise of a step are functions of (key, step). A run that was interrupted goes on from its last checkpoint.
Where nothing that moves a bit of a step has changed (`replay.Identity`), the steps since then are taken again
with the same key: they are the same release, and charged once. Otherwise a new key is drawn, all that was reserved
under the old one stays spent, the new steps are charged too, and the run ends where the budget of its plan does. The
same key is never used if anything differs: two results with the same noise and different sums reveal their difference.
A run keeps its plan: another mechanism, δ or accountant, or another ``also_released``, is another run.

The ledger of a new run takes its name when the first checkpoint is on the disk: until then the folder can be begun
again, since no step was reserved. A new key is written to the ledger with its first checkpoint: a resume that is
refused before it costs nothing. Run folders need a POSIX system.

>>> from dpgrad import checkpoint
>>> checkpoint.finished("no such folder")
False
"""

import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

from dpgrad import _files, _processes, _validate
from dpgrad.accounting.events import NOTHING, Event
from dpgrad.errors import OptionError, ResumeError, RunError
from dpgrad.mechanism.keys import Key
from dpgrad.mechanism.mechanism import Mechanism
from dpgrad.runs.replay import Identity
from dpgrad.runs.snapshot import REMEDY, Snapshot, refuse_unreadable
from dpgrad.runs.values import PREFIX, discard_others
from dpgrad.runs.writeahead import WriteAhead

__all__ = ["Interruption", "Run", "finished", "interruptible"]

_LEDGER = "ledger.jsonl"
_UNBEGUN = f"ledger.new{_files.PARTIAL}"  # the ledger of a run without a checkpoint yet: nothing is spent

_README = """Private: do not share this folder.

It holds the key of a run and states of its training. Whoever holds this can subtract the noise: the model that the run
releases has no privacy against them. It is deleted when the run is finished, unless asked to be kept.
"""


def _key(seed: int | None, attempt: int) -> Key:
    """The key of an attempt; the first one of a seed is that of a run without a folder."""
    if seed is None:
        return Key.fresh()
    first = Key.from_seed(seed)
    return first if attempt == 1 else Key(first.derive("attempt", str(attempt)), reproducible=True)


class Run:
    """An open run folder, locked against other processes; a context manager.

    ``key``, ``began`` and ``before`` are for `PrivateGradient`: the key, the step at which it came into use and what
    was spent under others. ``start`` is the first step to take, ``last`` how many of the mechanism's steps there may be
    in all, fewer than planned where a new key had to be paid for. ``state`` is what `save` stored, None for a run that
    begins; step ``due`` needs another `save` first. ``attempt`` counts keys; ``replayed`` says that the present one
    was used before, and ``reason`` why it was not. ``reproducible`` is true where a seed made any key of the run: then
    nothing of it is for release.

    Guarantee: at any moment, also after a crash, `event` covers every step of which anything was computed, and its ε,
    with ``also_released``, is at most that of the plan the run began with. Not covered: copies of the folder; a
    copy that is resumed uses the key again.

    >>> import tempfile, torch
    >>> from dpgrad import sampling
    >>> plan = Mechanism(sampling.Poisson(0.1), steps=3, noise_multiplier=1.0, batch_size=10)
    >>> identity_of = lambda key: Identity(plan.to_dict(), "digest of the data", "code", "cpu", 1, None, {})
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Run.open(folder.name, identity_of, plan, delta=1e-5) as run:
    ...     run.save(0, {"weights": torch.zeros(2)})
    ...     run.charge(0)
    >>> with Run.open(folder.name, identity_of, plan, delta=1e-5, resume=True) as run:
    ...     print(run.replayed, run.start, run.state["weights"])
    ...     for step in range(run.start, run.last):
    ...         run.charge(step)
    ...     run.event() == plan.event()
    True 0 tensor([0., 0.])
    True
    >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: Path,
        locks: tuple[int, ...],
        ledger: WriteAhead,
        key: Key,
        identity: Identity,
        found: Snapshot | None,
        save_every: int,
    ) -> None:
        now = ledger.present
        self.folder, self.private = folder, folder / "private"
        self.key, self.identifier = key, ledger.identifier
        self.attempt, self.began, self.last = now.number, now.began, now.last
        self.state = None if found is None else found.state
        self.start = 0 if found is None else found.step
        self.replayed = found is not None and found.attempt == now.number
        self.reason = ""
        self.before = ledger.before
        self.due = found.due if found is not None and self.replayed else self.start
        self.reproducible = any(attempt.seeded for attempt in ledger.attempts)
        self.keep_private = False
        self._ledger, self._locks, self._identity = ledger, locks, identity
        self._save_every = save_every
        self._next = self.start
        self._known = now.until  # reserved by processes before this one
        self._tried = False
        self._unbegun = found is None  # nothing was stored yet, nor spent
        self._open = True
        self._turns = _processes.Turns("only the first works on its run; give every run its own folder")

    @classmethod
    def open(
        cls,
        folder: str | PathLike[str],
        identity_of: Callable[[Key], Identity],
        mechanism: Mechanism,
        delta: float,
        *,
        resume: bool = False,
        seed: int | None = None,
        accountant: str = "pld",
        reserve: int = 50,
        save_every: int = 50,
        keep_private: bool = False,
        also_released: Event = NOTHING,
    ) -> "Run":
        """Begin a run in a new or empty folder; with ``resume``, go on with the one that is in it.

        ``resume`` needs a folder that is there, and begins the run where a process ended before its first checkpoint.

        ``identity_of(key)`` is compared with what it was: with all equal the key is used again. ``reserve`` steps are
        spent at a time, with one write that waits for the disk. At most ``save_every`` steps are taken from one `save`
        to the next: a new key counts as many as spent. ``keep_private`` keeps the private folder at the end.
        ``also_released`` is another release from the same data: its cost counts against the budget.
        """
        _validate.whole(least=1, reserve=reserve, save_every=save_every)
        _files.refuse_other_systems()
        folder = Path(folder)
        with _files.told(folder, "opened"):
            if folder.exists() and not folder.is_dir():
                raise RunError(f"{folder} is a file: choose a folder for the run")
            if resume and not folder.exists():
                raise ResumeError(f"there is no run in {folder}, which is missing: leave out resume to begin one")
            _files.make_folder(folder)
            _refuse_links(folder)
        locks = _files.lock_folder(folder)
        try:
            ledger = _known_ledger(folder, resume)
            if ledger is None:
                run = cls._begun(
                    folder, locks, identity_of, mechanism, delta, seed, accountant, reserve, save_every, also_released
                )
            else:
                _refuse_other_plan(ledger, mechanism, delta, accountant, also_released)
                found = _found(folder, ledger)
                run = cls._resumed(folder, locks, ledger, found, identity_of, mechanism, seed, reserve, save_every)
        except BaseException:
            _files.unlock(*locks)
            raise
        run.keep_private = keep_private
        return run

    @classmethod
    def _begun(
        cls,
        folder: Path,
        locks: tuple[int, ...],
        identity_of: Callable[[Key], Identity],
        mechanism: Mechanism,
        delta: float,
        seed: int | None,
        accountant: str,
        reserve: int,
        save_every: int,
        also_released: Event,
    ) -> "Run":
        _make_private(folder)
        key = _key(seed, 1)
        identity = _identity(identity_of, key, mechanism)
        path = folder / _UNBEGUN
        ledger = WriteAhead.create(path, mechanism, delta, accountant, reserve, key.reproducible, also_released)
        return cls(folder, locks, ledger, key, identity, None, save_every)

    @classmethod
    def _resumed(
        cls,
        folder: Path,
        locks: tuple[int, ...],
        ledger: WriteAhead,
        found: Snapshot,
        identity_of: Callable[[Key], Identity],
        mechanism: Mechanism,
        seed: int | None,
        reserve: int,
        save_every: int,
    ) -> "Run":
        _make_private(folder)
        now = ledger.present
        identity = _identity(identity_of, found.key, mechanism)
        reason = _why_another_key(found, now.number, identity, seed)
        if not reason:
            return cls(folder, locks, ledger, found.key, identity, found, save_every)
        key = _key(seed, now.number + 1)
        identity = _identity(identity_of, key, mechanism)
        due = found.due if found.attempt == now.number else now.until
        ledger.begin(found.step, due, reserve, key.reproducible)
        run = cls(folder, locks, ledger, key, identity, found, save_every)
        run.reason = reason
        return run

    def charge(self, step: int) -> None:
        """Spend ``step``: what pays for it is on the disk when this returns.

        Refused beyond ``last``, out of turn, and where `save` is ``due``, which stores the state from which the step
        could be taken again.
        """
        self._refuse_closed()
        if step != self._next:
            raise RunError(
                f"step must be {self._next:,}, the next of this run, got {step:,}: a step is taken once under one key"
            )
        if step >= self.due:
            raise RunError(
                f"call save({step}, state) before this step: a crash can replay at most save_every = "
                f"{self._save_every:,} steps"
            )
        self._ledger.reserve(step)
        self._next = step + 1

    def save(
        self, step: int, state: dict[str, Any], options: Mapping[str, Any] | None = None, values: str = ""
    ) -> None:
        """Replace the checkpoint by ``state``, as it is after ``step`` steps: tensors and plain values.

        ``options`` are those of the identity, as they are by now: what moves during a run and is not in ``state`` is
        compared with this when the run goes on. ``values`` is the name of a file of `dpgrad.runs.values` in the private
        folder that belongs to ``state``. After a crash there is the old checkpoint or the new one, with its file.
        """
        self._refuse_closed()
        if step != self._next:
            raise RunError(f"step must be {self._next:,}, the steps taken so far, got {step:,}")
        if not self._tried:
            refuse_unreadable(state)
            self._tried = True
        identity = self._identity if options is None else dataclasses.replace(self._identity, options=dict(options))
        due = step + self._save_every
        self._ledger.commit()
        Snapshot(self.identifier, self.attempt, step, due, self.key, identity, state).write(_checkpoint(self.folder))
        if self._unbegun:
            self._ledger.rename(self.folder / _LEDGER)
            self._unbegun = False
        discard_others(self.private, values)
        self.due = due

    def event(self) -> Event:
        """What was spent, by all attempts: of this process, the steps it charged; of those before, what they reserved.

        After all steps of an undisturbed or replayed run it is the mechanism's event.
        """
        return self._ledger.event_until(self._taken)

    @property
    def _taken(self) -> int:
        """The steps of this attempt that any process may have computed."""
        return max(self._next, self._known)

    def finish(self, release: Callable[[Path], None]) -> None:
        """End the run: ``release(folder)`` writes what may be shared to ``folder``, which becomes ``release/``.

        It appears as a whole, and the private folder goes after that. A process that dies in between leaves it: whoever
        opens the folder next, or asks whether the run is `finished`, completes this.
        """
        self._refuse_closed()
        if self._unbegun:
            raise RunError("call save(0, state) before the run ends: without it the run could not be resumed")
        _refuse_links(self.folder)
        partial = self.folder / f"release{_files.PARTIAL}"
        _files.remove(partial)
        _files.make_folder(partial)
        with _files.told(partial):
            release(partial)
        _files.publish(partial, self.folder / "release")
        self._ledger.settle(self._taken)
        self._ledger.finish(self.keep_private)
        if not self.keep_private:
            _files.remove(self.private)
        self._release_lock()

    def close(self) -> None:
        """Give back the lock, and what was reserved and not taken; closing again does nothing.

        A run of which nothing was saved has not begun: the folder can be used again.
        """
        if not self._open:
            return
        try:
            with suppress(OSError, ValueError):  # reserved steps then stay spent, which is always safe
                if not self._turns.forked:  # else the process of which this is a fork goes on
                    self._ledger.settle(self._taken)
        finally:
            self._release_lock()

    def _release_lock(self) -> None:
        self._open = False
        _files.unlock(*self._locks)

    def _refuse_closed(self) -> None:
        with self._turns:
            if not self._open:
                raise RunError(f"the run in {self.folder} is closed: open it again with resume=True")

    def __reduce_ex__(self, protocol: object) -> str:
        """Copies and pickles are refused: each would charge the steps of one key, and the ledger counts them once."""
        raise RunError("a Run cannot be copied or pickled: give every run a folder of its own")

    def __repr__(self) -> str:
        return f"Run({self.folder}, step {self._next} of {self.last}, attempt {self.attempt}, {self.key.label})"

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checkpoint(folder: Path) -> Path:
    return folder / "private" / "checkpoint.pt"


def finished(folder: str | PathLike[str]) -> bool:
    """Whether the run in ``folder`` has ended. Deletes a key that a process left there when it died in `Run.finish`.

    >>> finished("no such folder")
    False
    """
    folder = Path(folder)
    if not (folder / _LEDGER).exists():
        return False
    _refuse_links(folder)
    locks = _files.lock_folder(folder)
    try:
        return _ended(folder, WriteAhead.read(folder / _LEDGER))
    finally:
        _files.unlock(*locks)


def _ended(folder: Path, ledger: WriteAhead) -> bool:
    """Whether the run has ended; where it has, its secrets are gone when this returns, unless they are to be kept."""
    if ledger.finished and not ledger.kept:
        _remove_secrets(folder / "private")
    return ledger.finished


def _known_ledger(folder: Path, resume: bool) -> WriteAhead | None:
    """The ledger in the folder, None where no run has begun; what is neither a run nor empty is refused."""
    path = folder / _LEDGER
    with _files.told(folder, "opened"):
        if not path.exists():
            names = {entry.name for entry in folder.iterdir() if not entry.name.endswith(_files.PARTIAL)}
            lost = _checkpoint(folder).exists() and not (folder / _UNBEGUN).exists()
            if lost or names - {"lock", "private"}:
                raise RunError(f"{folder} holds files and no ledger of a run: choose a new or empty folder")
            return None
    ledger = WriteAhead.read(path)
    if _ended(folder, ledger):
        raise ResumeError(f"the run in {folder} is finished, see {folder / 'release'}: choose another folder")
    if not resume:
        raise RunError(
            f"{folder} holds a run that is not finished: resume it, in dpgrad.fit with folder=RunFolder(path, "
            "resume=True), or choose another folder"
        )
    return ledger


def _remove_secrets(private: Path) -> None:
    """Remove what a process that ended within `Run.finish` left of the run's own; the rest was put there after it."""
    if not private.is_dir():
        return
    with _files.told(private, "removed"):
        held = (*private.glob(f"*{_files.PARTIAL}"), *private.glob(f"{PREFIX}*"))
        for path in (*held, private / "checkpoint.pt", private / "README.txt"):
            _files.unlink(path)
        if any(private.iterdir()):
            _files.sync_folder(private)
        else:
            _files.remove(private)


def _refuse_links(folder: Path) -> None:
    """Refuse links in place of the run's own files: the key would lie, and stay, elsewhere; locks would not hold."""
    own = (_LEDGER, _UNBEGUN, "lock", "private", "private/checkpoint.pt", "release")
    for path in (folder / name for name in own):
        if path.is_symlink():
            raise RunError(
                f"{path} is a symbolic link: a run keeps its files in its own folder; put the file or folder itself "
                "there, or make the whole run folder a link"
            )


def _found(folder: Path, ledger: WriteAhead) -> Snapshot:
    """The checkpoint in the folder, refused where there is none or it does not belong to the ledger."""
    path = _checkpoint(folder)
    if not path.exists():
        raise ResumeError(
            f"{folder / 'private'} has no checkpoint: without it the run cannot go on; begin in another folder, and "
            "count the run's whole plan as spent unless it surely took no step"
        )
    found, now = Snapshot.read(path), ledger.present
    if found.run != ledger.identifier:
        raise ResumeError(f"{path} belongs to another run than the ledger in its folder: {REMEDY}")
    if found.attempt > now.number:
        raise ResumeError(f"{path} is of attempt {found.attempt} and the ledger ends with {now.number}: {REMEDY}")
    if found.attempt < now.number and now.until > now.began:
        raise ResumeError(
            f"{path} is of attempt {found.attempt}, but attempt {now.number} has spent steps and had saved its own: "
            f"{REMEDY}"
        )
    own = ledger.attempts[found.attempt - 1]
    if not own.began <= found.step <= own.until:
        raise ResumeError(
            f"{path} is at step {found.step:,} and the ledger has steps {own.began:,} to {own.until:,} of its attempt: "
            f"lines of the ledger are missing; {REMEDY}"
        )
    return found


def _refuse_other_plan(
    ledger: WriteAhead, mechanism: Mechanism, delta: float, accountant: str, also_released: Event
) -> None:
    """A guarantee is that of one plan; what a run showed may be why another one is asked for."""
    plan = ledger.attempts[0].mechanism
    for name, planned, given in (
        ("delta", ledger.delta, delta),
        ("accountant", ledger.accountant, accountant),
        ("relation", plan.relation.value, mechanism.relation.value),
    ):
        if planned != given:
            raise ResumeError(f"the run was planned with {name} {planned}, got {given}: resume it with the same")
    ours, theirs = plan.to_dict(), Mechanism.from_dict(mechanism.to_dict()).to_dict()
    if ours != theirs:
        differing = ", ".join(sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)))
        raise ResumeError(
            f"the run was planned with another mechanism, which differs in {differing}: resume it with the same, or "
            "begin another run in another folder and add both up in a ledger"
        )
    if also_released != ledger.also_released:
        raise ResumeError(
            "also_released differs from what the run was planned with, whose budget covers both: resume it with the "
            "same, and record later releases in a ledger"
        )


def _identity(identity_of: Callable[[Key], Identity], key: Key, mechanism: Mechanism) -> Identity:
    """The identity under ``key``, which must be that of a run of ``mechanism``."""
    found = identity_of(key)
    if found.mechanism != dataclasses.replace(found, mechanism=mechanism.to_dict()).mechanism:
        raise OptionError("identity_of must return an Identity with this mechanism: give mechanism.to_dict()")
    return found


def _why_another_key(found: Snapshot, attempt: int, identity: Identity, seed: int | None) -> str:
    """Why the key of a checkpoint must not be used again; empty where it may."""
    if found.attempt != attempt:
        return f"attempt {attempt} was begun and left before its first checkpoint"
    differing = identity.differences(found.identity)
    if (seed is not None) != found.key.reproducible or (seed is not None and _key(seed, attempt) != found.key):
        differing.append("seed")
    told = [f"{name} (cannot be compared)" if name in identity.incomparable() else name for name in differing]
    return f"not the same as before: {', '.join(told)}" if told else ""


def _make_private(folder: Path) -> None:
    """The private folder, closed to others, without what a crash left incomplete."""
    private = folder / "private"
    _files.make_folder(private, 0o700)
    for left in private.glob(f"*{_files.PARTIAL}"):
        _files.discard(left)
    if not (private / "README.txt").exists():
        _files.replace(private / "README.txt", _README.encode())


class Interruption:
    """Whether a signal asked the process to stop: true once it did, and ``signal`` is its name.

    >>> bool(Interruption())
    False
    """

    def __init__(self) -> None:
        self.signal = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal:  # asked twice: at once
            raise KeyboardInterrupt(f"second signal {signal.Signals(number).name}")
        self.signal = signal.Signals(number).name


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Within the block SIGTERM and Ctrl-C ask to stop between two steps; a second one stops at once.

    In a thread other than the main one signals do not arrive, and nothing is changed.

    >>> with interruptible() as interruption:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     interruption.signal
    'SIGTERM'
    """
    interruption = Interruption()
    numbers = (signal.SIGTERM, signal.SIGINT) if current_thread() is main_thread() else ()
    before = {number: signal.signal(number, interruption._note) for number in numbers}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
