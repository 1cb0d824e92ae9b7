"""Callbacks: functions and objects that `fit` calls before the first step, after steps and evaluations, and at the end.

A callback is a function of a `Progress`, called after every step, or an object with any of these methods:

    at_start(progress)        before the first step of this process; progress.resumed says whether the run goes on
    after_evaluation(point)   after each point of the curves
    after_step(progress)      after each step, and after its evaluation
    at_end(fitted)            when the run has ended, also where it was interrupted

What they are given is public, follows from what is released, or is named as outside the guarantee: never the loss or
the gradients of training rows. Where a callback raises, the run stops after a checkpoint and can be resumed; the step
is then shown again.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from dpgrad import _files, _validate
from dpgrad.errors import OptionError, RunError
from dpgrad.training.curves import Point, Progress
from dpgrad.training.diagnostics import Diagnostics

__all__ = ["OUTSIDE", "AfterEvaluation", "AfterStep", "AtEnd", "AtStart", "CSVLog", "Callback", "Callbacks"]

OUTSIDE = "outside the guarantee"  # marks figures on held-out rows


@runtime_checkable
class AtStart(Protocol):
    """A callback before the first step of this process."""

    def at_start(self, progress: Progress) -> object: ...


@runtime_checkable
class AfterEvaluation(Protocol):
    """A callback after each evaluation; True stops the run."""

    def after_evaluation(self, point: Point) -> object: ...


@runtime_checkable
class AfterStep(Protocol):
    """A callback after each step; True stops the run."""

    def after_step(self, progress: Progress) -> object: ...


@runtime_checkable
class AtEnd(Protocol):
    """A callback with the `Fitted` of a run that has ended."""

    def at_end(self, fitted: Any) -> object: ...


Callback = Callable[[Progress], object] | AtStart | AfterEvaluation | AfterStep | AtEnd | Diagnostics
_HOOKS = ("after_step", "after_evaluation", "at_end", "at_start")


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run; ``diagnostics`` stand apart, since they see private values.

    >>> Callbacks.of([lambda progress: progress.step == 3]).after_step(Progress(3, 9, 0.1, None, 1.0, 2.0))
    True
    """

    each: tuple[Any, ...] = ()
    diagnostics: Diagnostics | None = None

    @classmethod
    def of(cls, given: Any) -> "Callbacks":
        """One callback or several; anything else is refused."""
        every = list(given) if isinstance(given, Sequence | set) else [given]
        recorders = [one for one in every if isinstance(one, Diagnostics)]
        if len(recorders) > 1:
            raise OptionError(f"callbacks must hold at most one Diagnostics, got {len(recorders)}")
        others = tuple(one for one in every if not isinstance(one, Diagnostics))
        for one in others:
            if isinstance(one, type) or not (_hooked(one) or callable(one)):
                made = f": make one, {one.__name__}(...)" if isinstance(one, type) else ""
                raise OptionError(
                    "callbacks must be functions of a Progress, or objects with a method "
                    f"{', '.join(_HOOKS[:-1])} or {_HOOKS[-1]}, got {_validate.shown(one)}{made}"
                )
        return cls(others, recorders[0] if recorders else None)

    @property
    def watches_steps(self) -> bool:
        """Whether any of them is called after steps."""
        return any(map(_steps, self.each))

    def at_start(self, progress: Progress) -> None:
        """Before the first step of this process."""
        for one in self.each:
            if isinstance(one, AtStart):
                one.at_start(progress)

    def after_evaluation(self, point: Point) -> bool:
        """After an evaluation; whether one of them wants the run stopped."""
        wanted = [one.after_evaluation(point) is True for one in self.each if isinstance(one, AfterEvaluation)]
        return any(wanted)  # every one was called

    def after_step(self, progress: Progress) -> bool:
        """After a step; whether one of them wants the run stopped."""
        called = [one.after_step if isinstance(one, AfterStep) else one for one in self.each if _steps(one)]
        wanted = [call(progress) is True for call in called]
        return any(wanted)

    def at_end(self, fitted: Any) -> None:
        """When the run has ended. The budget is spent and the result must not be lost: an error becomes a warning."""
        for one in self.each:
            if isinstance(one, AtEnd):
                try:
                    one.at_end(fitted)
                except Exception as error:
                    _validate.warn(
                        f"the run is complete, but {type(one).__name__}.at_end raised {type(error).__name__}: {error}"
                    )


def _hooked(one: object) -> bool:
    return isinstance(one, AtStart | AfterEvaluation | AfterStep | AtEnd)


def _steps(one: object) -> bool:
    """Whether a callback is called after steps: a plain function is."""
    return isinstance(one, AfterStep) or not _hooked(one)


_COLUMNS = ("step", "epsilon", "delta", "learning_rate", "clip", "noise_multiplier", f"held_out ({OUTSIDE})")


@final
class CSVLog:
    """A callback that writes a row per step to a CSV file: ε so far, learning rate, clip bound and noise multiplier.

    ``epsilon`` bounds the ε of a run that was planned to end at this step; a run that is stopped because of what it
    showed costs its whole plan. The metric on held-out rows is outside the guarantee, and its column says so. There are
    no durations: how long a step takes may depend on the size of its batch, which is private. A resumed run continues
    in the same file. A new run refuses a file with rows of another.

    >>> import tempfile
    >>> log = CSVLog(Path(tempfile.mkdtemp()) / "log.csv")
    >>> log.at_start(Progress(0, 2, 0.0, None, 0.0, 0.0))
    >>> log.after_step(Progress(1, 2, 0.4, None, 1.0, 1.0, 1e-5, learning_rate=0.1, clip=1.0, noise_multiplier=2.0))
    >>> print(log.path.read_text("utf-8"))
    step,epsilon,delta,learning_rate,clip,noise_multiplier,held_out (outside the guarantee)
    1,0.4,1e-05,0.1,1.0,2.0,
    <BLANKLINE>
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._row: list[object] = []  # the last one
        self._point: Point | None = None
        self._size = 0  # of the file, in bytes, without the last row

    def at_start(self, progress: Progress) -> None:
        """Create the file, or keep the rows of a resumed run up to the step where it continues."""
        if self.path.is_dir():
            raise RunError(f"{self.path} is a folder: give CSVLog the path of a file")
        kept = self._rows()
        if kept and not progress.resumed:
            raise RunError(f"{self.path} has the rows of another run: choose another file, or resume that run")
        _files.make_folder(self.path.parent)
        whole = _line(_COLUMNS) + b"".join(_line(row) for row in kept if int(row[0]) <= progress.step)
        _files.replace(self.path, whole)
        self._row, self._point, self._size = [], None, len(whole)

    def after_evaluation(self, point: Point) -> None:
        """Keep the metric for the row of its step, or add it if that row is already written."""
        self._point = point
        if self._row and self._row[0] == point.step:  # at the end of a run that was stopped
            self._write([*self._row[:-1], point.held_out])

    def after_step(self, progress: Progress) -> None:
        """Write the row of a step."""
        held_out = self._point.held_out if self._point is not None and self._point.step == progress.step else None
        self._size += len(_line(self._row)) if self._row else 0
        self._write([
            progress.step, progress.epsilon, progress.delta, progress.learning_rate, progress.clip,
            progress.noise_multiplier, held_out,
        ])  # fmt: skip

    def _write(self, row: list[object]) -> None:
        """Write the last row, in place of one that was cut off."""
        with _files.told(self.path), self.path.open("r+b") as file:
            file.seek(self._size)
            file.truncate()
            file.write(_line(row))
        self._row = row

    def _rows(self) -> list[list[str]]:
        """The rows of the file; one that was not written to its end is left out."""
        content = _files.read(self.path) or b""
        lines = content.decode("utf-8", "replace").splitlines(keepends=True)
        first, *found = list(csv.reader(line for line in lines if line.endswith("\n"))) or [[]]
        if (lines and first != list(_COLUMNS)) or not all(row and row[0].isdecimal() for row in found):
            raise RunError(f"{self.path} is not a log of dpgrad: choose another file")
        return found


def _line(row: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(["" if value is None else value for value in row])
    return text.getvalue().encode()
