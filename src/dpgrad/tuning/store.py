"""The folder of a selection: what it must know to go on after a crash, and the release of the winner.

    lock             held by the process that works on the selection, as is the folder itself
    private/         the key, how far the selection is, and the trials; for the owner alone, and gone at the end
    release/         the winner; it appears as a whole

Guarantee: a finished trial is not run again. Trials that lost are removed at once. When ``release/`` is there,
``private/`` is removed, also by whoever opens the folder after a crash in between.
"""

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dpgrad import _files
from dpgrad.errors import ResumeError, RunError
from dpgrad.mechanism.keys import Key
from dpgrad.reports import strict_json
from dpgrad.training.fit import WEIGHTS, Fitted
from dpgrad.training.options import RunFolder

__all__ = ["Best", "Store"]

FORMAT = "dpgrad selection 1"
_STATE, _TOLD, _ABOUT = "selection.json", "trial.json", "README.txt"
_README = """Private: do not look into this folder, and do not share it.

It holds the trials of a selection, their scores and their number. The price of the selection is that of releasing the
winner alone: whoever sees anything here has seen more than was paid for. It is deleted when the winner is released.
"""
Restore = Callable[[int, dict[str, Any], dict[str, Any]], Fitted]


@dataclass(frozen=True)
class Best:
    """The best trial so far. Private."""

    trial: int
    configuration: int
    score: float


class Store:
    """An open folder of a selection, locked against other processes; a context manager."""

    def __init__(self, folder: Path, locks: tuple[int, ...], state: dict[str, Any], every: int | None) -> None:
        self.folder, self._locks, self._state, self._every = folder, locks, state, every
        self._private = folder / "private"

    @classmethod
    def open(cls, given: RunFolder, identity: Callable[[Key], dict[str, Any]], seed: int | None) -> "Store":
        """Begin a selection in a new or empty folder; with ``resume``, go on with the one in it."""
        _files.refuse_other_systems()
        folder = Path(given.path)
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder} is a file: choose a folder for the selection")
        if given.keep_private:
            raise RunError("the trials of a selection cannot be kept: its price is that of the winner alone")
        if given.resume and not folder.exists():
            raise ResumeError(f"there is no selection in {folder}, which is missing: leave out resume to begin one")
        _files.make_folder(folder)
        for name in ("private", "release", "lock"):
            if (folder / name).is_symlink():
                raise RunError(f"{folder / name} is a symbolic link: a selection keeps its files in its own folder")
        locks = _files.lock_folder(folder)
        try:
            return cls._opened(folder, locks, given, identity, seed)
        except BaseException:
            _files.unlock(*locks)
            raise

    @classmethod
    def _opened(
        cls, folder: Path, locks: tuple[int, ...], given: RunFolder, identity: Callable[[Key], dict[str, Any]],
        seed: int | None,
    ) -> "Store":  # fmt: skip
        private = folder / "private"
        if (folder / "release").exists():
            if (private / _STATE).exists() or _holds_no_trial(private):
                _files.remove(private)
            raise ResumeError(f"the selection in {folder} is finished, see {folder / 'release'}: choose another folder")
        if (private / _STATE).exists():
            if not given.resume:
                raise RunError(
                    f"{folder} holds a selection that is not finished: resume it with folder=RunFolder(path, "
                    "resume=True), or choose another folder"
                )
            return cls._resumed(folder, locks, given, identity, seed)
        if given.resume:
            raise ResumeError(f"there is no selection in {folder}: leave out resume to begin one")
        names = {path.name for path in folder.iterdir() if not path.name.endswith(_files.PARTIAL)} - {"lock", "private"}
        if names or not _holds_no_trial(private):
            raise RunError(f"{folder} holds other files: choose a new or empty folder")
        _files.make_folder(private, 0o700)
        _files.replace(private / _ABOUT, _README.encode())
        key = Key.fresh() if seed is None else Key.from_seed(seed)
        identifier = Key.fresh().secret.hex()[:16]
        state = {
            "format": FORMAT, "key": key.secret.hex(), "reproducible": key.reproducible, "identifier": identifier,
            "identity": identity(key), "taken": 0, "best": None,
        }  # fmt: skip
        store = cls(folder, locks, state, given.checkpoint_every)
        store._write()
        return store

    @classmethod
    def _resumed(
        cls, folder: Path, locks: tuple[int, ...], given: RunFolder, identity: Callable[[Key], dict[str, Any]],
        seed: int | None,
    ) -> "Store":  # fmt: skip
        state = strict_json.read(folder / "private" / _STATE)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ResumeError(f"{folder / 'private' / _STATE} is not the state of a selection: choose another folder")
        store = cls(folder, locks, state, given.checkpoint_every)
        key = store.key
        if (seed is not None) != key.reproducible or (seed is not None and Key.from_seed(seed) != key):
            raise ResumeError("seed is not that of the selection in the folder: resume it with the same")
        differing = [name for name, value in identity(key).items() if state["identity"].get(name) != value]
        if differing:
            raise ResumeError(
                f"the selection in {folder} differs in {', '.join(differing)}: resume it as it was begun, or begin "
                "another in another folder and count both as spent"
            )
        _files.make_folder(folder / "private", 0o700)
        kept = {store.trial(store.taken), *store._best_folder()}
        for path in sorted((folder / "private").glob("trial-*")):
            if path not in kept:
                _files.remove(path)
        return store

    @property
    def key(self) -> Key:
        """The key that the number of trials and their settings follow from. Secret."""
        return Key(bytes.fromhex(self._state["key"]), bool(self._state["reproducible"]))

    @property
    def identifier(self) -> str:
        """The name of the selection in a ledger."""
        return str(self._state["identifier"])

    @property
    def taken(self) -> int:
        """How many trials have ended. Private."""
        return int(self._state["taken"])

    @property
    def best(self) -> Best | None:
        """The best trial so far. Private."""
        found = self._state["best"]
        return None if found is None else Best(found["trial"], found["configuration"], _number(found["score"]))

    def _best_folder(self) -> list[Path]:
        return [] if self.best is None else [self.trial(self.best.trial)]

    def _write(self) -> None:
        _files.replace(self._private / _STATE, json.dumps(self._state).encode())

    def trial(self, trial: int) -> Path:
        """The run folder of a trial."""
        return self._private / f"trial-{trial:06}"

    def run_folder(self, trial: int, resume: bool) -> RunFolder:
        """Options that run a trial in its folder and write what `read` needs besides the weights."""
        return RunFolder(self.trial(trial), resume=resume, checkpoint_every=self._every, release=_write_told)

    def discard(self, trial: int) -> None:
        """Remove what there is of a trial."""
        _files.remove(self.trial(trial))

    def taken_trial(self, trial: int, best: Best | None) -> None:
        """Note that a trial has ended, and remove all but the best."""
        before = self._best_folder()
        told = None if best is None else {**asdict(best), "score": repr(best.score)}
        self._state |= {"taken": trial + 1, "best": told}
        self._write()
        for path in (self.trial(trial), *before):
            if path not in self._best_folder():
                _files.remove(path)

    def finished(self, trial: int, configuration: int, restore: Restore) -> Fitted | None:
        """The result of a trial that ended before a crash; None where it did not."""
        if not (self.trial(trial) / "release" / _TOLD).is_file():
            return None
        return self.read(Best(trial, configuration, 0.0), restore)

    def read(self, best: Best, restore: Restore) -> Fitted:
        """The result of a trial, from its folder."""
        folder = self.trial(best.trial) / "release"
        content = _files.read(folder / WEIGHTS)
        if content is None:
            raise ResumeError(f"{folder} has no weights: the selection cannot go on; count it as spent")
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        return restore(best.configuration, state, _told(strict_json.read(folder / _TOLD)))

    def finish(self, save: Callable[[Path], None]) -> None:
        """Release the winner, and remove everything else."""
        partial = self.folder / f"release{_files.PARTIAL}"
        _files.remove(partial)
        save(partial)
        _files.publish(partial, self.folder / "release")
        self.forget()

    def forget(self) -> None:
        """Remove the private files."""
        _files.remove(self._private)

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _files.unlock(*self._locks)


def _number(text: str) -> float:
    return float(text)


def _write_told(folder: Path, fitted: Fitted) -> None:
    told = {
        "metric": fitted.metric, "stopped": fitted.stopped, "reproducible": fitted.reproducible,
        "public": list(fitted.public), "outside": list(fitted.outside), "seconds": fitted.seconds,
        "described": fitted.described, "clip_bounds": [list(bounds) for bounds in fitted.clip_bounds],
    }  # fmt: skip
    (folder / _TOLD).write_text(json.dumps(told), "utf-8")


def _told(found: Any) -> dict[str, Any]:
    return {
        **found, "public": tuple(found["public"]), "outside": tuple(found["outside"]),
        "clip_bounds": tuple(map(tuple, found["clip_bounds"])),
    }  # fmt: skip


def _holds_no_trial(private: Path) -> bool:
    """Whether a crash before the first trial, or while the folder was being removed, may have left it as it is."""
    names = {path.name for path in private.iterdir()} if private.is_dir() else set()
    return all(name == _ABOUT or name.endswith(_files.PARTIAL) for name in names)
